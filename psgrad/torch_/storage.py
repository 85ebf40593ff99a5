"""A tensor's memory: its storage, its version, the tensor it is a view of; and whether tensors share numbers.

Views of one storage may lie side by side, or in between: `is_distinct` and `first_clash` go number by number.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import gcd
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor


def storage_of(t: Tensor) -> int:
    """Which storage `t` is a view of."""
    return t.untyped_storage()._cdata  # type: ignore[no-any-return]


def identity_of(storage: torch.UntypedStorage) -> int:
    """What tells a storage from others that are alive."""
    return storage._cdata  # type: ignore[no-any-return]


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are views of one storage."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata  # type: ignore[no-any-return]


def are_one_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether tensors are the same numbers at the same places."""
    first = tensors[0]
    return all(
        t is first
        or (
            shares_memory(t, first)
            and (t.shape, t.stride(), t.storage_offset()) == (first.shape, first.stride(), first.storage_offset())
            and t.dtype is first.dtype
        )
        for t in tensors
    )


version_of: Callable[[Tensor], int] = attrgetter("_version")  # how often a tensor has been written to
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")  # what a tensor is a view of, as far as autograd knows
is_view: Callable[[Tensor], bool] = Tensor._is_view  # whether autograd knows a tensor as a view of another


def parted(t: Tensor) -> Tensor:
    """(N, ...) as (N, 1, ...), where nobody but us has the tensor without that axis: `unfolded` gives it back."""
    return t.unsqueeze(-t.dim())  # counted from behind, as vmap counts no axis of a function's own


def unfolded(t: Tensor) -> Tensor | None:
    """The (N B, ...) tensor that (N, B, ...) is a view of, as where a sample was given an axis. None: there is none."""
    base = base_of(t)
    if base is None or base.dim() != t.dim() - 1:
        return None
    if t.requires_grad or base.requires_grad:  # a graph may have come another way than the memory
        node: Any = t.grad_fn
        below = base.grad_fn
        if type(node).__name__ != "UnsqueezeBackward0" or node._saved_dim & _BITS != -base.dim() & _BITS:
            return None  # not the node of `parted`: a Function, say, with a backward of its own
        if t._backward_hooks or below is None or node.next_functions != ((below, base.output_nr),):
            return None  # `fn` may have a hook there; fully_shard has hooks on the tensor
        return base if base.is_contiguous() else None
    if not (base.is_contiguous() and t.is_contiguous()) or base.dtype is not t.dtype:
        return None
    shape = t.shape
    return base if base.shape == (shape[0] * shape[1], *shape[2:]) else None


_BITS = (1 << 64) - 1  # of a node's axis, which some versions of torch show without its sign


def folded(t: Tensor) -> Tensor:
    """(N, B, ...) as (N B, ...)."""
    base = unfolded(t)
    return t.flatten(0, 1) if base is None else base


def expanded(t: Tensor, n: int) -> Tensor:
    """`t` n times, without memory. Torch refuses views of an empty storage: such a one gets its size for a moment."""
    storage = t.untyped_storage()
    if storage.nbytes() or not t.numel():
        return t.expand(n, *t.shape)
    storage.resize_(int(t.storage_offset() + _extent(t, 0)) * t.itemsize)
    try:
        return t.expand(n, *t.shape)
    finally:
        storage.resize_(0)


def is_distinct(t: Tensor) -> bool:
    """Whether each number of `t` has a place of its own."""
    extent = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return stride > 0 and _marks([t], t.itemsize) == t.numel()
            extent += stride * (size - 1)
    return True


def first_clash(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Two of several views of one storage that share a number; None: there are none.

    Pieces of a flat buffer, and columns of a matrix with a row per sample, are told apart by their bounds; other
    layouts by marking the places that each takes.
    """
    there = [(i, t) for i, t in enumerate(tensors) if t.numel()]
    if _are_apart([t for _, t in there]):
        return None
    for k, (i, a) in enumerate(there):
        for j, b in there[k + 1 :]:
            unit = gcd(a.itemsize, b.itemsize)
            if not _are_apart([a, b]) and _marks([a, b], unit) < _marks([a], unit) + _marks([b], unit):
                return i, j
    return None


def _are_apart(tensors: Sequence[Tensor]) -> bool:
    """Whether bounds alone show that no two tensors share a number."""
    spans = sorted(
        (t.storage_offset() * t.itemsize, (t.storage_offset() + _extent(t, 0)) * t.itemsize) for t in tensors
    )
    if all(a[1] <= b[0] for a, b in pairwise(spans)):
        return True
    strides = {(t.stride(0), t.itemsize) if t.dim() else (0, 0) for t in tensors}
    row = min(strides)[0]
    if len(strides) > 1 or row == 0:
        return False
    columns = sorted((t.storage_offset() % row, t.storage_offset() % row + _extent(t, 1)) for t in tensors)
    around = (columns[0][0] + row, 0)  # the first again, in the next row
    return all(a[1] <= b[0] for a, b in pairwise([*columns, around]))


def _extent(t: Tensor, axis: int) -> int:
    """How far it is from the first number of `t`, or of one row of it, to behind the last; from `axis` on."""
    return 1 + sum(stride * (size - 1) for stride, size in zip(t.stride()[axis:], t.shape[axis:], strict=True))


def _marks(tensors: Sequence[Tensor], unit: int) -> int:
    """How many places of `unit` bytes the tensors take together."""
    starts = [t.storage_offset() * t.itemsize // unit for t in tensors]
    low = min(starts)
    ends = [start + _extent(t, 0) * t.itemsize // unit for start, t in zip(starts, tensors, strict=True)]
    taken = torch.zeros(max(ends) - low, dtype=torch.bool)  # of places alone, wherever the tensors are
    for start, t in zip(starts, tensors, strict=True):
        wide = t.itemsize // unit
        shape, strides = (*t.shape, wide), (*(s * wide for s in t.stride()), 1)
        taken.as_strided(shape, strides, start - low).fill_(True)
    return int(taken.sum())
