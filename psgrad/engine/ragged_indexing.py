"""Functions whose result has a shape that depends on values: masks as indices, nonzero. And integers as indices.

Under vmap every sample has one shape. Where all samples choose equally many elements the choice can be
written as integer indices, which vmap takes; where they do not, the batch is split by the count.
"""

from typing import Any

import torch
from torch import Tensor

from ..torch_ import levels
from .signals import split_by_rows

GETITEM, SETITEM = torch.Tensor.__getitem__, torch.Tensor.__setitem__
_SELECT = frozenset([torch.masked_select, torch.Tensor.masked_select])
_NONZERO = frozenset([torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere])
_WHERE = torch.where
FUNCTIONS: frozenset[Any] = _SELECT | _NONZERO | {GETITEM, SETITEM, _WHERE}
_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
_TAKES_INTEGERS = _VERSION >= (2, 13)  # vmap takes x[i] where i is an integer that differs between samples


def rewritten(func: Any, args: Any, kwargs: Any, n: int, level: int) -> tuple[Any, Any, Any] | None:
    """`func` with its arguments as a call that vmap takes, or None where it takes them as they are."""
    if func is GETITEM or func is SETITEM:
        index = args[1]
        entries = index if type(index) in (tuple, list) else (index,)
        if not any(_is_mask(entry, level) for entry in entries):
            if func is SETITEM or type(index) is list or not _needs_help(entries, level):
                return None
            return _getitem, (args[0], entries, level), {}
        if func is SETITEM and _is_mask(index, level) and _is_number(args[2]):  # whatever their count
            target, value = args[0], args[2]
            mask = index.reshape(*index.shape, *[1] * (target.dim() - index.dim()))
            if not isinstance(value, Tensor):
                return torch.Tensor.masked_fill_, (target, mask, value), {}
            return torch.Tensor.copy_, (target, torch.where(mask, value.to(target.dtype), target)), {}
        indices: list[Any] = []
        for entry in entries:
            indices += _positions(entry, n, level) if _is_mask(entry, level) else [entry]
        return func, (args[0], tuple(indices), *args[2:]), {}
    as_tuple = func in _NONZERO and kwargs.get("as_tuple", False)
    named = {k: v for k, v in kwargs.items() if k != "as_tuple"}
    if named or len(args) != (2 if func in _SELECT else 1) or not levels.is_batched(args[-1], level):
        return None
    if func in _SELECT:
        x, mask = torch.broadcast_tensors(*args)
        return GETITEM, (x, tuple(_positions(mask, n, level))), {}
    if args[0].dim() == 0:
        return None
    positions = _positions(args[0] != 0, n, level)
    return (tuple, (positions,), {}) if func is _WHERE or as_tuple else (torch.stack, (positions, 1), {})


def selects(func: Any, args: Any, level: int) -> bool:
    """Whether a call is x[i] with a single integer that differs between samples, and slices: without vmap, a view."""
    if func is not GETITEM:
        return False
    entries = args[1] if type(args[1]) is tuple else (args[1],)
    gathers = [entry for entry in entries if _is_gathering(entry) and not _is_integer(entry, level)]
    return not gathers and any(_is_integer(entry, level) for entry in entries)


def _is_gathering(entry: Any) -> bool:
    """Whether an entry of an index makes a copy of what it chooses: tensors, lists, arrays."""
    return isinstance(entry, (Tensor, list)) or hasattr(entry, "__array__")


def is_mixed(func: Any, args: Any) -> bool:
    """Whether a call assigns by tensors and other things together, as A[1:, index] = v: vmap mistakes the axes then."""
    if func is not SETITEM or type(args[1]) is not tuple:
        return False
    gathering = sum([_is_gathering(entry) for entry in args[1]])
    return 0 < gathering < len(args[1])


def put(target: Tensor, index: tuple[Any, ...], value: Any, n: int, level: int) -> bool:
    """target[index] = value for every sample, by one call for all; False where the index has something unusual in it.

    Torch's own way: slices and numbers first, which gives a view; then the tensors, whose common shape stands in the
    place of their axes where these are neighbours, and in front where they are not.
    """
    view, axis, places = levels.lower(target, n, level), 1, dict[int, Tensor]()
    gathering = [_is_gathering(entry) and not isinstance(entry, Tensor) for entry in index]
    index = tuple(torch.as_tensor(e, device=target.device) if g else e for e, g in zip(index, gathering, strict=True))
    given = sum([entry.dim() if _is_boolean(entry) else entry is not None and entry is not ... for entry in index])
    for entry in index:
        if entry is ...:
            axis += target.dim() - given
        elif entry is None:
            view, axis = view.unsqueeze(axis), axis + 1
        elif isinstance(entry, slice):
            view, axis = view[(*[slice(None)] * axis, entry)], axis + 1
        elif type(entry) is int:
            view = view.select(axis, entry)
        elif _is_boolean(entry) and entry.dim() and not levels.is_batched(entry, level):
            for where in entry.nonzero(as_tuple=True):
                places[axis], axis = where[None], axis + 1
        elif isinstance(entry, Tensor) and entry.dim() and not entry.is_floating_point() and entry.dtype != torch.bool:
            places[axis] = levels.lower(entry, n, level) if levels.is_batched(entry, level) else entry[None]
            axis += 1
        else:
            return False
    rank = max(t.dim() for t in places.values()) - 1
    where = [t.reshape(len(t), *[1] * (rank + 1 - t.dim()), *t.shape[1:]) for t in places.values()]
    common = torch.broadcast_shapes((n, *[1] * rank), *(t.shape for t in where))[1:]
    axes = list(places)
    first = axes[0] if axes == list(range(axes[0], axes[0] + len(axes))) else 1
    rest = [size for i, size in enumerate(view.shape) if i and i not in places]
    shape = (n, *rest[: first - 1], *common, *rest[first - 1 :])
    rows = value if isinstance(value, Tensor) else torch.tensor(value, dtype=view.dtype, device=view.device)
    rows = levels.lower(rows, n, level) if levels.is_batched(rows, level) else rows[None]
    if rows.dim() > len(shape):
        return False
    rows = rows.reshape(len(rows), *[1] * (len(shape) - rows.dim()), *rows.shape[1:]).expand(shape)
    rows = rows.movedim(list(range(first, first + rank)), list(range(1, 1 + rank)))
    samples = torch.arange(n, device=view.device).view(n, *[1] * rank)
    view.movedim(axes, list(range(1, 1 + len(axes))))[(samples, *where)] = rows.to(view.dtype)
    return True


def _needs_help(entries: Any, level: int) -> bool:
    """Whether vmap needs help with an index because of an integer in it that differs between samples.

    Torch itself selects by an integer first and then indexes by the tensors. Vmap takes the integer for one of
    them, and the axes come out in another order: x[i, :, j].
    """
    tensors = [entry for entry in entries if isinstance(entry, Tensor)]
    return (len(tensors) > 1 or not _TAKES_INTEGERS) and any(_is_integer(t, level) for t in tensors)


def _getitem(x: Tensor, entries: Any, level: int) -> Tensor:
    """x[entries], by the integers that differ between samples one at a time and then by the rest."""
    axes = [0 if entry is None or entry is Ellipsis or isinstance(entry, bool) else 1 for entry in entries]
    axes = [entry.dim() if _is_boolean(entry) else axis for entry, axis in zip(entries, axes, strict=True)]
    rest, axis = [], 0
    for entry, taken in zip(entries, axes, strict=True):
        if _is_integer(entry, level):
            where = entry.reshape(1).long()
            x = x[(*[slice(None)] * axis, where)] if axis else x[where]  # which is a rule's, if x is a parameter
            entry = 0
        rest.append(entry)
        axis += taken if entry is not Ellipsis else x.dim() - sum(axes)
    return x[tuple(rest)]


def _is_boolean(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)


def _is_integer(value: Any, level: int) -> bool:
    """Whether `value` is a single integer that differs between samples."""
    if not isinstance(value, Tensor) or value.dim() > 0 or _is_boolean(value) or value.dtype.is_floating_point:
        return False
    return levels.is_batched(value, level)


def _is_mask(value: Any, level: int) -> bool:
    """Whether `value` is a boolean mask that differs between samples."""
    return (
        isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 0 and levels.is_batched(value, level)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


def _positions(mask: Tensor, n: int, level: int) -> list[Tensor]:
    """Where `mask` is true, one index tensor per axis, as a batched tensor of K each."""
    rows = levels.lower(mask, n, level)
    counts = rows.flatten(1).sum(1)
    split_by_rows(counts)
    chosen = rows.flatten(1).nonzero()[:, 1].view(n, int(counts[0]))
    return [levels.wrap(index, level) for index in torch.unravel_index(chosen, rows.shape[1:])]
