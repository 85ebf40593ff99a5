"""Functions whose result has a shape that depends on values: masks as indices, nonzero.

Under vmap every sample has one shape. Where all samples choose equally many elements the choice can be
written as integer indices, which vmap takes; where they do not, the batch is split by the count.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _functorch as ft

Split = Callable[[Tensor], None]  # raises where the rows of a tensor are not all equal

GETITEM, SETITEM = torch.Tensor.__getitem__, torch.Tensor.__setitem__
_SELECT = frozenset([torch.masked_select, torch.Tensor.masked_select])
_NONZERO = frozenset([torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere])
_WHERE = torch.where
FUNCTIONS: frozenset[Any] = _SELECT | _NONZERO | {GETITEM, SETITEM, _WHERE}


def rewritten(func: Any, args: Any, kwargs: Any, n: int, level: int, split: Split) -> tuple[Any, Any, Any] | None:
    """`func` with its arguments as a call that vmap takes, or None where it takes them as they are."""
    if func is GETITEM or func is SETITEM:
        index = args[1]
        entries = index if type(index) in (tuple, list) else (index,)
        if not any(_is_mask(entry, level) for entry in entries):
            return None
        if func is SETITEM and _is_mask(index, level) and _is_number(args[2]):  # whatever their count
            target, value = args[0], args[2]
            mask = index.reshape(*index.shape, *[1] * (target.dim() - index.dim()))
            if not isinstance(value, Tensor):
                return torch.Tensor.masked_fill_, (target, mask, value), {}
            return torch.Tensor.copy_, (target, torch.where(mask, value.to(target.dtype), target)), {}
        indices: list[Any] = []
        for entry in entries:
            indices += _positions(entry, n, level, split) if _is_mask(entry, level) else [entry]
        return func, (args[0], tuple(indices), *args[2:]), {}
    if kwargs or len(args) != (2 if func in _SELECT else 1) or not ft.is_batched(args[-1], level):
        return None
    if func in _SELECT:
        x, mask = torch.broadcast_tensors(*args)
        return GETITEM, (x, tuple(_positions(mask, n, level, split))), {}
    if args[0].dim() == 0:
        return None
    positions = _positions(args[0] != 0, n, level, split)
    return (tuple, (positions,), {}) if func is _WHERE else (torch.stack, (positions, 1), {})


def _is_mask(value: Any, level: int) -> bool:
    """Whether `value` is a boolean mask that differs between samples."""
    return isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 0 and ft.is_batched(value, level)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


def _positions(mask: Tensor, n: int, level: int, split: Split) -> list[Tensor]:
    """Where `mask` is true, one index tensor per axis, as a batched tensor of K each."""
    rows = ft.lower(mask, n, level)
    counts = rows.flatten(1).sum(1)
    split(counts)
    chosen = rows.flatten(1).nonzero()[:, 1].view(n, int(counts[0]))
    return [ft.wrap(index, level) for index in torch.unravel_index(chosen, rows.shape[1:])]
