"""Whether tensors have values, and whether ops are being recorded: what may be decided by looking at numbers."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch._subclasses.fake_tensor import (
    FakeTensorMode as FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, has_proxy_slot
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

NO_VALUES = (DataDependentOutputException, DynamicOutputShapeException)  # a fake tensor is asked for what it has not
FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"

_PROXY: Any = torch._C._TorchDispatchModeKey.PROXY
_FAKE: Any = torch._C._TorchDispatchModeKey.FAKE


class _Thread(threading.local):
    captured = 0  # how many calls, one inside the other, torch.compile has a part of its graph made of


_thread = _Thread()


@contextmanager
def captured() -> Iterator[None]:
    """Inside, ops count as recorded: torch.compile runs us on tensors without values before it records anything."""
    _thread.captured += 1
    try:
        yield
    finally:
        _thread.captured -= 1


def is_captured() -> bool:
    """Whether the ops are to be a part of somebody's compiled function."""
    return _thread.captured > 0


def is_recorded() -> bool:
    """Whether ops are being recorded, as by make_fx: then we may not branch on values."""
    return torch._C._get_dispatch_mode(_PROXY) is not None or _thread.captured > 0


def has_proxy(t: Tensor) -> bool:
    """Whether `t` is a part of what is being recorded, and not a tensor from elsewhere."""
    return has_proxy_slot(t, torch._C._get_dispatch_mode(_PROXY).tracer)


def unrecorded() -> AbstractContextManager[Any]:
    """Inside, nothing is recorded: tensors that are being recorded have their values there."""
    return disable_proxy_modes_tracing()


@contextmanager
def unlogged(name: str) -> Iterator[None]:
    """Inside, one of torch's loggers says nothing of what this thread does."""
    log, thread = logging.getLogger(name), threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(passes)
    try:
        yield
    finally:
        log.removeFilter(passes)


def assert_in_graph(condition: Tensor, message: str) -> None:
    """An op that raises where `condition` is false: when recorded ops run."""
    torch._assert_async(condition, message)


def can_look(t: Tensor) -> bool:
    """Whether we may branch on the values of `t`: meta tensors have none."""
    return not (t.is_meta or is_recorded())


def is_faking() -> bool:
    """Whether tensors have shapes and no values, as `explain` and `max_bytes` run a function first."""
    return torch._C._get_dispatch_mode(_FAKE) is not None


# How many modes see every op that torch dispatches: tracers, meters, fake tensors.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def has_function_modes() -> bool:
    """Whether a mode of the caller's sees every function of torch; that of a default device does not count."""
    if not torch._C._len_torch_function_stack():
        return False
    return not all(isinstance(mode, DeviceContext) for mode in _get_current_function_mode_stack())
