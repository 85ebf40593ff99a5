"""Inner products of the gradients of several outputs.

N samples with K outputs each have N K gradients of a parameter. What an op saw of a sample is the same for all of its
outputs, so that K factors share it: what is made of it alone is made once.

Products are added to a matrix (N K, M L), sample by sample and output by output. Of gradients with themselves only the
lower half need be right: `mirrored` fills in the other.
"""

from collections.abc import Iterator, Sequence
from math import lcm, prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..torch_ import tracing
from ..torch_.storage import are_one_memory
from . import costs, inner
from .base import Factor
from .numerics import cast, widened
from .outer import Outer
from .rows import Rows
from .sum import Sum

Sums = Sequence[Sum | None]  # of one parameter, by output; None: all zeros


def add_products(total: Tensor, a: Sums, b: Sums) -> None:
    """Add the inner products of one parameter's gradients; `a is b`: with themselves."""
    if None not in a and None not in b:
        _add_all(total, a, b)  # type: ignore[arg-type]
        return
    left, right = ([k for k, own in enumerate(sums) if own is not None] for sums in (a, b))
    if left and right:
        some = [a[k] for k in left]
        rows, columns = len(total) // len(a) * len(left), total.shape[1] // len(b) * len(right)
        found = total.new_zeros(rows, columns)
        _add_all(found, some, some if a is b else [b[k] for k in right])  # type: ignore[arg-type, misc]
        target, found = _by_output(total, len(a), len(b)), _by_output(found, len(left), len(right))
        for i, k in enumerate(left):
            for j, m in enumerate(right):
                target[:, k, :, m] += found[:, i, :, j]


def mirrored(total: Tensor) -> None:
    """The half above the diagonal as the one below, a strip at a time."""
    size = len(total)
    for start in range(0, size, _strip(size)):
        end = min(start + _strip(size), size)
        total[start:end, end:] = total[end:, start:end].mT
        own = total[start:end, start:end]
        own.copy_(own.tril() + own.tril(-1).mT)


def _strip(size: int) -> int:
    return max(64, -(-size // 8))


def _by_output(total: Tensor, k: int, m: int) -> Tensor:
    """(N K, M L) as (N, K, M, L)."""
    return total.view(len(total) // k, k, total.shape[1] // m, m)


def _add_all(total: Tensor, a: Sequence[Sum], b: Sequence[Sum]) -> None:
    regions = [[region for region, _ in own.terms] for own in (*a, *b)]
    if all(own.is_disjoint for own in (*a, *b)) and all(own == regions[0] for own in regions):
        for i in range(len(regions[0])):
            factors = [own.terms[i].factor for own in a]
            _add(total, factors, factors if a is b else [own.terms[i].factor for own in b])
        return
    parts = [own.summands() for own in (*a, *b)]
    kinds = [[type(f) for f in own] for own in parts]
    if any(Sum in own for own in kinds) or any(own != kinds[0] for own in kinds):
        _pair_by_pair(total, a, b)
        return
    left, right = (list(zip(*[own.summands() for own in sums], strict=True)) for sums in (a, b))
    for i, one in enumerate(left):
        if a is not b:
            for other in right:
                _add(total, one, other)
            continue
        _add(total, one, one)
        for other in left[:i]:
            found = torch.zeros_like(total)
            _add(found, one, other)
            total.add_(found).add_(found.mT)


def _pair_by_pair(total: Tensor, a: Sequence[Factor], b: Sequence[Factor]) -> None:
    """Each pair of outputs by itself; with themselves, each once."""
    target = _by_output(total, len(a), len(b))
    for k, one in enumerate(a):
        for i, other in enumerate(b[: k + 1] if a is b else b):
            found = one.dots(other) if isinstance(one, Sum) and isinstance(other, Sum) else inner.dots(one, other)
            target[:, k, :, i] += found.to(total)
            if a is b and i < k:
                target[:, i, :, k] += found.mT.to(total)


def _add(total: Tensor, a: Sequence[Factor], b: Sequence[Factor]) -> None:
    """The products of factors of one kind and place."""
    here = a[0].tensors()[-1].device == total.device
    if not here or not (_by_gram(total, a, b) or _by_tiles(total, a, b)):
        _pair_by_pair(total, a, b)


# ---- position by position --------------------------------------------------------------------------------


class _Positions(NamedTuple):
    """What K outputs have at each position of a sample: their gradients are sums over positions of g x^T."""

    x: list[Tensor]  # (N, T, I) each, or indices (N, T, 1)
    g: list[Tensor]  # (N, T, O) each
    share: bool  # all x are one memory

    @staticmethod
    def of(factors: Sequence[Factor]) -> "_Positions | None":
        rows = [f for f in factors if isinstance(f, Rows)]
        outer = [f.with_positions for f in factors if isinstance(f, Outer) and f.x.dim() < 4]
        if len(factors) not in (len(rows), len(outer)) or any(f.shape != factors[0].shape for f in factors):
            return None
        x = [f.x for f in outer] or [f.index[..., None] for f in rows]
        return _Positions(x, [f.g for f in outer] or [f.g for f in rows], are_one_memory(x))

    @property
    def widths(self) -> tuple[int, int]:
        """How many numbers x and g have at one position, of all outputs."""
        k, i, o = len(self.x), self.x[0].shape[-1], self.g[0].shape[-1]
        return (1 if self.share else k) * i, k * o

    def blocks(self) -> "list[_Positions]":
        """All outputs at once where a copy of them is small, else each by itself."""
        stacked = sum(t.nbytes for t in self.g) + (0 if self.share else sum(t.nbytes for t in self.x))
        if stacked <= costs.WORKSPACE:
            x = self.x[0][:, None] if self.share else torch.stack(self.x, 1)
            return [_Positions([x], [torch.stack(self.g, 1)], True)]
        return [_Positions([x[:, None]], [g[:, None]], True) for x, g in zip(self.x, self.g, strict=True)]


def _by_gram(total: Tensor, a: Sequence[Factor], b: Sequence[Factor]) -> bool:
    """Every position of a sample with every position of another: (x . x') times all (g . g'). False: not this way."""
    left, right = _Positions.of(a), _Positions.of(b)
    if left is None or right is None or a[0].shape != b[0].shape or left.x[0].dtype != right.x[0].dtype:
        return False
    (n, t), (m, s) = left.x[0].shape[:2], right.x[0].shape[:2]
    pairs, meetings = n * len(a) * m * len(b), n * t * m * s
    (xa, ga), (xb, gb) = left.widths, right.widths
    flops = meetings * (xa * xb // left.x[0].shape[-1] + ga * gb // left.g[0].shape[-1]) + pairs * t * s * costs.ELEMENT
    tiles = (n * len(a) * t + m * len(b) * s) * prod(a[0].shape) + _tile_flops(a, b, pairs)
    if t * s > 1 and flops > tiles:
        return False
    rows, columns = left.blocks(), right.blocks()
    target = _by_output(total, len(a), len(b))
    k, i = len(a) // len(rows), len(b) // len(columns)  # outputs of a block
    step = costs.tile(2 * k * t * i * m * s * total.itemsize)
    shared = left.share and right.share
    for start in range(0, n, step):
        some = slice(start, start + step)
        of_x = _products(rows[0].x[0][some], columns[0].x[0], total.dtype) if shared else None
        for p, one in enumerate(rows):
            for q, other in enumerate(columns):
                part = target[some, k * p : k * p + k, :, i * q : i * q + i]
                products = of_x
                if products is None:
                    products = _products(one.x[0][some], other.x[0], total.dtype)
                of_g = _products(one.g[0][some], other.g[0], total.dtype)
                if t * s == 1:
                    part.addcmul_(products[:, :, 0, :, :, 0], of_g[:, :, 0, :, :, 0])
                else:
                    part += of_g.mul_(products).sum((2, 5))
    return True


def _tile_flops(a: Sequence[Factor], b: Sequence[Factor], pairs: int) -> int:
    """Multiply-adds of the products of gradients that are written out."""
    numbers = prod(a[0].shape)
    if isinstance(a[0], Rows):  # of the rows that samples read, at most
        numbers = min(a[0].rows, len(a[0]) * a[0].index.shape[1]) * a[0].g.shape[-1]
    return pairs * numbers // (2 if a is b else 1)


def _products(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """(N, K, T, D) and (M, L, S, D): products (N, K, T, M, L, S) of all positions; of indices, if they are equal."""
    lead = (*x.shape[:3], *y.shape[:3])
    if not x.is_floating_point():
        return (x.flatten(0, 3)[:, None] == y.flatten(0, 3)).to(dtype).view(lead)
    return cast(torch.mm(widened(x).flatten(0, 2), widened(y).flatten(0, 2).mT), dtype).view(lead)


# ---- written out, a few rows of the parameter at a time --------------------------------------------------


def _by_tiles(total: Tensor, a: Sequence[Factor], b: Sequence[Factor]) -> bool:
    """The gradients written out, some rows of the parameter at a time. False: too much would be written at once."""
    if (cuts := _cuts(total, a, b)) is None:
        return False
    for some in cuts:
        rows = _written(some(a), total.dtype)
        if a is not b:
            total.addmm_(rows, _written(some(b), total.dtype).mT)
            continue
        size = len(rows)
        for start in range(0, size, _strip(size)):
            end = min(start + _strip(size), size)
            total[start:end, :end].addmm_(rows[start:end], rows[:end].mT)
    return True


def _written(factors: Sequence[Factor], dtype: torch.dtype) -> Tensor:
    """Gradients (N K, numbers)."""
    grads = factors[0].jacobians(factors[1:])
    return cast(grads.reshape(grads.shape[0] * grads.shape[1], -1), dtype)


def _cuts(total: Tensor, a: Sequence[Factor], b: Sequence[Factor]) -> "Iterator[Cut] | None":
    """What leaves as much of each factor as can be written out at once; None where no factor can be cut."""
    every, shape = (*a, *b), a[0].shape
    if not shape or any(f.shape != shape for f in every) or not len(a[0]) or not len(b[0]):
        return None
    touched = _touched(a)
    touched = _touched(b) if touched is None and a is not b else touched
    if touched is not None:
        return _touched_cuts(total, every, touched)
    grain = lcm(*(f.cut_grain() for f in every))
    room = max(f.tile_bytes for f in every)
    rows = len(total) + (0 if a is b else total.shape[1])
    each = rows * prod(shape[1:]) * max(grain, 1) * total.itemsize
    if grain == 0:
        return iter([Cut(None)]) if each * shape[0] <= room else None
    step = grain * max(1, room // max(1, each))
    return (Cut(slice(start, min(start + step, shape[0]))) for start in range(0, shape[0], step))


def _touched(factors: Sequence[Factor]) -> Tensor | None:
    """The rows of the parameter that have a gradient for some sample and output; None: all, or nobody knows."""
    tables = [f for f in factors if isinstance(f, Rows)]
    if tables and tracing.is_faking():  # where tensors have no values: as many as there can be
        index = tables[0].index
        return torch.arange(min(tables[0].rows, index.numel()), device=index.device)
    if len(tables) == len(factors) and are_one_memory([f.index for f in tables]):
        return tables[0].rows_touched()
    found = [f.rows_touched() for f in factors]
    there = [rows for rows in found if rows is not None]
    return torch.unique(torch.cat(there)) if len(there) == len(found) else None


def _touched_cuts(total: Tensor, every: Sequence[Factor], touched: Tensor) -> "Iterator[Cut] | None":
    each = sum(total.shape) * prod(every[0].shape[1:]) * total.itemsize
    step = max(1, costs.TILE // max(1, each))
    if any(f.rows_at(touched[:1]) is None for f in every):
        return None
    return (Cut(some) for some in touched.split(step))


class Cut:
    """Some rows of a parameter: a slice, indices, or None for all."""

    def __init__(self, rows: slice | Tensor | None) -> None:
        self.rows = rows

    def __call__(self, factors: Sequence[Factor]) -> list[Factor]:
        if self.rows is None:
            return list(factors)
        if isinstance(self.rows, slice):
            return [f.cut(self.rows) for f in factors]
        found = [f.rows_at(self.rows) for f in factors]
        assert None not in found
        return found  # type: ignore[return-value]
