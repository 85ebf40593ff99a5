"""Vmap's level: what a batched tensor hides, and how a rule gets to see it.

Inside `vmap` a tensor is a wrapper around one that has the sample axis. A rule runs on that plain (N, ...) tensor: we
pop vmap's layer, call the rule, push the layer back. The public way, an autograd Function with a `vmap` staticmethod,
takes ten times as long.
"""

import types
from collections.abc import Callable
from functools import cache
from typing import TypeVar

from torch import Tensor
from torch._C import _functorch as _ft
from torch._functorch import predispatch as _predispatch

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
    """`run(*args)` on plain tensors: without the innermost layer, which is pushed back afterwards."""
    layer = _ft.pop_dynamic_layer_stack()
    try:
        return run(*args)
    finally:
        _ft.push_dynamic_layer_stack(layer)


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
