"""The only file that touches torch's private functorch names, and those of its autograd engine and of its ops.

Inside `vmap` a tensor is a wrapper around one that has the sample axis. A rule wants that inner tensor,
so it runs one level below, with vmap's layer set aside for a moment (0.02 ms a call; the public way, an
autograd Function with a `vmap` staticmethod, costs 0.2 ms). `_versions.py` checks on import that the names
are there.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch as _ft
from torch._functorch import predispatch as _predispatch
from torch._library.custom_ops import CustomOpDef as _CustomOp
from torch._ops import OpOverload, OpOverloadPacket

_T = TypeVar("_T")


class vmap_level:  # noqa: N801, used like a function
    """The body of `torch.vmap` over n samples: inside, what `wrap` made has a hidden sample axis."""

    def __init__(self, n: int, randomness: str) -> None:
        self.n, self.randomness = n, randomness

    def __enter__(self) -> int:
        _load_decompositions()
        level: int = _ft._vmap_increment_nesting(self.n, self.randomness)
        return level

    def __exit__(self, *_: object) -> None:
        _ft._vmap_decrement_nesting()


@cache
def _load_decompositions() -> None:
    _predispatch.lazy_load_decompositions()


current_level: Callable[[], int | None] = _ft.maybe_current_level  # of the innermost transform in this thread


def is_batched(t: Tensor, level: int | None) -> bool:
    """Whether `t` carries the sample axis of the vmap at `level`."""
    return _ft.maybe_get_level(t) == level and _ft.is_batchedtensor(t)


def is_differentiated(t: Tensor) -> bool:
    """Whether `t` belongs to a `grad` or `vjp` inside the function, perhaps one that has ended."""
    return bool(_ft.is_gradtrackingtensor(t))


def lower(t: Tensor, n: int, level: int) -> Tensor:
    """The (N, ...) tensor behind a batched one; an unbatched one is the same for every sample."""
    inner: Tensor
    inner, dim = _ft._unwrap_batched(t, level)
    if dim is None:
        return inner.expand(n, *inner.shape)
    return inner.movedim(dim, 0) if dim else inner


def unwrap(t: Tensor, n: int, level: int) -> Tensor:
    """The same of a result of the function: memory of its own for every sample."""
    found = lower(t, n, level)
    return found if is_batched(t, level) else found.clone()


def wrap(t: Tensor, level: int) -> Tensor:
    """`t` of shape (N, ...) as the vmap at `level` hands it to the function."""
    return _ft._add_batch_dim(t, 0, level)


def below(run: Callable[..., _T], *args: object) -> _T:
    """`run(*args)` with the innermost layer set aside."""
    layer = _ft.pop_dynamic_layer_stack()
    try:
        return run(*args)
    finally:
        _ft.push_dynamic_layer_stack(layer)


is_autocasting: Callable[[], bool] = torch._C._is_any_autocast_enabled  # for some device

_PROXY: Any = torch._C._TorchDispatchModeKey.PROXY
_FAKE: Any = torch._C._TorchDispatchModeKey.FAKE


def is_recorded() -> bool:
    """Whether ops are being written down, as by make_fx: what follows must not depend on the numbers."""
    return torch._C._get_dispatch_mode(_PROXY) is not None


def can_look(t: Tensor) -> bool:
    """Whether what follows may depend on the numbers in `t`: meta tensors have none."""
    return not (t.is_meta or is_recorded())


def is_faking() -> bool:
    """Whether tensors have shapes and no values, as `explain` and `max_bytes` run a function first."""
    return torch._C._get_dispatch_mode(_FAKE) is not None


# ---- ops, as a mode sees them called ------------------------------------------------

Overload = OpOverload  # torch.ops.aten.mul.Tensor
Packet = OpOverloadPacket  # torch.ops.aten.mul: all its overloads
CustomOp = _CustomOp  # what the decorator torch.library.custom_op returns; has one overload


def overload_of(packet: Any, args: Any, kwargs: Any) -> Any:
    """The overload of an op that a call with these arguments means; RuntimeError where there is none."""
    names = packet.overloads()
    if len(names) == 1:
        return getattr(packet, names[0])
    return getattr(packet, torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs))


def packet_of(overload: Any) -> Any:
    """The op that an overload belongs to."""
    return overload.overloadpacket


def overload_of_custom_op(op: Any) -> Any:
    """What a custom op calls."""
    return op._opoverload


_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward


def gradients(y: Tensor, inputs: Sequence[Any], seed: Tensor) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` of `y` with `seed`, None where an input is not used.

    By the engine itself, without the checks of what is known to fit: 0.05 ms less. On the CPU, where the backward
    runs in this thread.
    """
    if y.device.type != "cpu":
        return torch.autograd.grad(y, inputs, seed, allow_unused=True)
    found: tuple[Tensor | None, ...] = _run_backward(
        (y,), (seed,), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found
