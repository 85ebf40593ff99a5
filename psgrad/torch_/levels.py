"""Vmap's level: what a batched tensor hides, and how a rule gets to see it.

Inside `vmap` a tensor is a wrapper around one that has the sample axis. A rule runs on that plain (N, ...) tensor: we
pop vmap's layer, call the rule, push the layer back. The public way, an autograd Function with a `vmap` staticmethod,
takes ten times as long.
"""

import types
from collections.abc import Callable, Iterable
from functools import cache
from itertools import repeat
from typing import TypeVar

from torch import Tensor
from torch._C import _functorch as _ft
from torch._functorch import predispatch as _predispatch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter as _innermost
from torch.autograd import forward_ad
from torch.autograd.forward_ad import unpack_dual

_T = TypeVar("_T")


@cache
def _load_decompositions() -> None:
    _predispatch.lazy_load_decompositions()


def enter(n: int, randomness: str) -> int:
    """Begin the body of `torch.vmap` over n samples: until `leave`, what `wrap` makes has a hidden sample axis."""
    _load_decompositions()
    level: int = _ft._vmap_increment_nesting(n, randomness)
    return level


leave: Callable[[], int] = _ft._vmap_decrement_nesting  # the level that was entered last


current_level: Callable[[], int | None] = _ft.maybe_current_level  # of the innermost transform in this thread


level_of: Callable[[Tensor], int | None] = _ft.maybe_get_level  # of the transform that a tensor belongs to
is_batched_tensor: Callable[[Tensor], bool] = _ft.is_batchedtensor


def is_batched(t: Tensor, level: int | None) -> bool:
    """Whether `t` carries the sample axis of the vmap at `level`."""
    return level_of(t) == level and is_batched_tensor(t)


def is_transformed(t: Tensor) -> bool:
    """Whether `t` belongs to any transform of torch.func: it has no memory of its own to describe."""
    return bool(_ft.is_functorch_wrapped_tensor(t))


def is_differentiated(t: Tensor) -> bool:
    """Whether `t` belongs to a `grad` or `vjp` inside the function, perhaps one that has ended."""
    return bool(_ft.is_gradtrackingtensor(t))


def hides_values(t: Tensor) -> bool:
    """Whether `t` has other numbers for every call that some vmap makes at once, so that none can be read."""
    while is_transformed(t):
        if is_batched_tensor(t):
            return True
        t = _ft.get_unwrapped(t)
    return False


_ENDED = -2  # what torch says for the level of a tensor that belongs to a transform which has ended


def alive(t: Tensor) -> Tensor:
    """`t` without the layers of transforms that have ended, as where the function that `vjp` returned is called.

    Torch takes one such layer off by itself; of two it says that a tensor has escaped.
    """
    while is_differentiated(t) and level_of(t) == _ENDED:
        t = _ft.get_unwrapped(t)
    return t


def undifferentiated(t: Tensor) -> Tensor:
    """`t` without the layers of transforms that take it for a constant, as `grad(f, 1)` does its first argument."""
    while is_differentiated(t) and not t.requires_grad and not _has_tangent(t):
        t = _ft.get_unwrapped(t)
    return t


def has_tangents() -> bool:
    """Whether tensors may have tangents just now, by torch.autograd.forward_ad, which ops of others may lose."""
    return forward_ad._current_level >= 0


def _has_tangent(t: Tensor) -> bool:
    """Whether the `jvp` that `t` belongs to gives it a tangent; transforms inside that `jvp` do not see it."""
    level = level_of(t)
    return level is not None and level != _ENDED and at(level, unpack_dual, t).tangent is not None


def lower(t: Tensor, n: int, level: int) -> Tensor:
    """The (N, ...) tensor behind a batched one; an unbatched one is the same for every sample."""
    inner: Tensor
    inner, dim = _ft._unwrap_batched(t, level)
    if dim is None:
        return inner.expand(n, *inner.shape)
    return inner.movedim(dim, 0) if dim else inner


def rows_in_front(t: Tensor, level: int) -> Tensor:
    """The (N, ...) tensor behind one that is batched at `level`."""
    inner: Tensor
    inner, dim = _ft._unwrap_batched(t, level)
    return inner.movedim(dim, 0) if dim else inner


def unwrap(t: Tensor, n: int, level: int) -> Tensor:
    """`lower` for a result of the function: an unbatched one is copied for every sample."""
    inner: Tensor
    inner, dim = _ft._unwrap_batched(t, level)
    if dim is None:
        return inner.expand(n, *inner.shape).clone()
    return inner.movedim(dim, 0) if dim else inner


def wrap(t: Tensor, level: int) -> Tensor:
    """`t` of shape (N, ...) as the vmap at `level` hands it to the function."""
    return _ft._add_batch_dim(t, 0, level)


def wrap_all(tensors: Iterable[Tensor], level: int) -> list[Tensor]:
    """`wrap` of each."""
    return list(map(_ft._add_batch_dim, tensors, repeat(0), repeat(level)))


def below(run: Callable[..., _T], *args: object) -> _T:
    """`run(*args)` on plain tensors: without the innermost layer, which is pushed back afterwards."""
    layer = _ft.pop_dynamic_layer_stack()
    try:
        return run(*args)
    finally:
        _ft.push_dynamic_layer_stack(layer)


def sampled_below(level: int, run: Callable[..., Tensor], *args: object) -> Tensor:
    """`below` for a `run` that gives a (N, ...) tensor, which is wrapped for the vmap at `level`, the innermost."""
    layer = _ft.pop_dynamic_layer_stack()
    try:
        found = run(*args)
    finally:
        _ft.push_dynamic_layer_stack(layer)
    return _ft._add_batch_dim(found, 0, level)


def at(level: int, run: Callable[..., _T], *args: object) -> _T:
    """`run(*args)` with the transforms above `level` set aside, which take no part in it."""
    if current_level() == level:
        return run(*args)
    with _innermost().lower():  # and autograd as it was where that transform began
        return at(level, run, *args)


def runs_in(frame: types.FrameType) -> bool:
    """Whether it is a transform's own code that runs in a frame of Python."""
    return str(frame.f_globals.get("__name__", "")).startswith("torch._functorch")


def plain(t: Tensor) -> Tensor:
    """The tensor with all samples behind a batched one of the innermost level; any other as it is."""
    level = current_level()
    if level is None or not is_batched(t, level):
        return t
    inner: Tensor = _ft._unwrap_batched(t, level)[0]
    return inner
