"""Linear maps of matrices, L g R^T: as they act on the two sides of a factor.

A side is a matrix, a vector that stands for a diagonal matrix, or None for the identity. A parameter with more axes
counts as a matrix of its first axis and all others, a vector as a matrix of one column.
"""

from math import prod

import torch
from torch import Tensor

from . import warm_memory
from .numerics import cast
from .products import LARGE, goes_to_onednn, long_product, product

Side = Tensor | None


def applied(t: Tensor, side: Side, dtype: torch.dtype) -> Tensor:
    """A side on the last axis of `t`."""
    t = cast(t, dtype)
    if side is None:
        return t
    return t * side if side.dim() == 1 else t @ side.mT


def mapped_matrices(grads: Tensor, left: Side, right: Side, dtype: torch.dtype) -> Tensor:
    """L g R^T of gradients (N, *shape) that are written out, as (N, O, I)."""
    rows = applied(grads.reshape(*grads.shape[:2], prod(grads.shape[2:])), right, dtype)
    if left is None:
        return rows
    if left.dim() == 1:
        return rows * left[:, None]
    if rows.shape[2] == 1:  # vectors: one product, where `left` would meet each of them
        return applied(rows[..., 0], left, dtype)[..., None]
    return left @ rows


def mapped_shape(shape: tuple[int, ...], left: Side, right: Side) -> tuple[int, ...]:
    """The shape of a parameter after both; axes beyond the first stay apart where their number stays the same."""
    rows = shape[0] if left is None or left.dim() == 1 else len(left)
    if right is None or len(right) == prod(shape[1:]):
        return rows, *shape[1:]
    return rows, len(right)


def columns_of(side: Side, start: int, size: int, whole: int, like: Tensor) -> Side:
    """The side for a part of the parameter that begins at `start`: its columns there."""
    if start == 0 and size == whole:
        return side
    if side is None:
        side = torch.ones(whole, dtype=like.dtype, device=like.device)
    return (torch.diag(side) if side.dim() == 1 else side)[:, start : start + size]


def gram_of(t: Tensor) -> Tensor:
    """t^T t of (M, D), each pair of columns once: 9/16 of the products in eight strips."""
    d = t.shape[1]
    strip = max(64, -(-d // 8))
    if d <= 2 * strip:
        return long_product(t.mT, t)
    out, columns = warm_memory.empty((d, d), t), t.mT
    if t.numel() * strip >= LARGE and goes_to_onednn(columns, t):
        columns, room = columns.contiguous(), None  # strips of it have no gaps
    else:  # a strip is made with rows that do not lie a power of two apart: such rows meet in the cache
        room = t.new_empty(strip, d + 16)
    for start in range(0, d, strip):
        end = min(start + strip, d)
        a, b = columns[start:end], columns[:end].mT
        made = product(a, b) if room is None else torch.mm(a, b, out=room[: end - start, :end])
        out[start:end, :end] = made
        out[:start, start:end] = made[:, :start].mT
    return out
