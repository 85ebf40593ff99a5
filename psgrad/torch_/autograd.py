"""Torch's autograd engine, called directly."""

import contextlib
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

is_autocasting: Callable[[], bool] = torch._C._is_any_autocast_enabled  # for some device
without_modes: Any = torch._C.DisableTorchFunction  # inside, torch functions are not shown to modes
_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward


def gradients(y: Tensor, inputs: Sequence[Any], seed: Tensor, keep_graph: bool = False) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` of `y` with `seed`, None where an input is not used; `keep_graph`: another one follows.

    On the CPU, where the backward runs in this thread, this calls the C++ engine directly: our arguments are valid,
    and the checks of torch.autograd.grad cost 50 us.
    """
    if y.device.type != "cpu":
        return torch.autograd.grad(y, inputs, seed, allow_unused=True, retain_graph=keep_graph)
    found: tuple[Tensor | None, ...] = _run_backward(
        (y,), (seed,), keep_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


def direct_apply(function: Any) -> Any:
    """`function.apply` of the C++ base class, without the checks for functorch: for calls outside any transform."""
    return super(torch.autograd.Function, function).apply


_NOTHING = contextlib.nullcontext()


def full_precision() -> contextlib.AbstractContextManager[Any]:
    """Inside, autocast is off: factors are asked in the dtype that they have."""
    if not is_autocasting():
        return _NOTHING
    stack = contextlib.ExitStack()
    device = torch.accelerator.current_accelerator()
    for kind in ("cpu", *([] if device is None else [device.type])):
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


R = TypeVar("R")


def in_full_precision(function: Callable[..., R]) -> Callable[..., R]:
    """`function` outside autocast, wherever it is called. It must not want its arguments to be freed meanwhile."""

    @wraps(function)
    def precise(*args: Any, **kwargs: Any) -> R:
        if not is_autocasting():
            return function(*args, **kwargs)
        with full_precision():
            return function(*args, **kwargs)

    return precise
