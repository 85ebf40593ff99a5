"""Sums of factors: all that is known of one parameter's per-sample gradients.

A parameter that is used several times has several factors, and the norm of their sum needs their cross terms. Factors
of one part and one kind become one factor (longer sums); whatever meets written gradients is added to them; what is
left are terms at their places, disjoint parts where that can be.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_ import tracing
from . import costs, huge_pages, inner
from .base import Factor, NormMemo
from .dense import Dense
from .maps import Side, columns_of, mapped_shape
from .numerics import cast, in_float64, lost_below, norm_of_norms, wide
from .outer import Outer
from .region import Region
from .rows import Rows


class Placement(NamedTuple):
    """A factor, and the part of the parameter whose gradients it gives; None: all of it, in order."""

    region: Region | None
    factor: Factor

    def of(self, t: Tensor) -> Tensor:
        """The part of `t`, a contiguous tensor like the parameter."""
        return t if self.region is None else self.region.of(t)

    def rows(self, grads: Tensor) -> Tensor:
        """The part of contiguous gradients (N, *shape) of the parameter."""
        return grads if self.region is None else self.region.rows(grads)


class MatrixBlock(NamedTuple):
    """Some rows and columns of a parameter as a matrix."""

    row: int
    rows: int
    column: int
    columns: int


@dataclass(frozen=True, eq=False)
class Sum(Factor):
    """The gradients of one parameter as a sum of placed factors; zeros where no term is.

    |f + g|^2 = |f|^2 + |g|^2 + 2 <f, g>: the last is zero between disjoint terms. Of overlapping terms there is one
    pair whose inner products are cheap, a table that is read by index and multiplied as a matrix, as language models
    tie embedding and head; the others are written out, a few samples at a time.
    """

    terms: tuple[Placement, ...]  # one at least
    whole: torch.Size  # the parameter's shape
    is_disjoint: bool = True  # no number of the parameter belongs to two terms

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.whole)

    @property
    def plan(self) -> costs.Plan:
        return costs.Plan("one after the other", sum(factor.plan.flops for _, factor in self.terms), 0)

    @property
    def single(self) -> Factor | None:
        """The one factor that stands for the parameter as it is, but perhaps for its shape."""
        return self.terms[0].factor if len(self.terms) == 1 and self.terms[0].region is None else None

    def tensors(self) -> list[Tensor]:
        return [t for _, factor in self.terms for t in factor.tensors()]

    def each(self, change: Callable[[Tensor], Tensor]) -> "Sum":
        return self._with(factor.each(change) for _, factor in self.terms)

    def select(self, index: slice | Tensor) -> "Sum":
        return self._with(factor.select(index) for _, factor in self.terms)

    def without_graph(self) -> "Sum":
        return self._with(factor.without_graph() for _, factor in self.terms)

    def _with(self, factors: Iterator[Factor]) -> "Sum":
        placed = tuple(map(Placement, [region for region, _ in self.terms], factors))
        return Sum(placed, self.whole, self.is_disjoint)

    def layout(self) -> Any:
        return Sum, self.whole, self.is_disjoint, *((region, factor.layout()) for region, factor in self.terms)

    def dense(self, out: Tensor | None = None) -> Tensor:
        grads = out if out is not None and out.is_contiguous() else None
        if grads is None:
            grads = huge_pages.empty((len(self), *self.whole), self.tensors()[-1])
        rest = self.terms
        if rest[0].region is None:  # written first, so that nothing has to be cleared
            factor, rest = rest[0].factor, rest[1:]
            factor.dense(grads.view(len(grads), *factor.shape))
        else:
            grads.zero_()
        for term in rest:
            target = term.rows(grads)
            if self.is_disjoint:
                target.copy_(term.factor.dense().reshape(target.shape))
            elif term.region is None:
                term.factor.add_to(target)
            else:
                target.add_(term.factor.dense().reshape(target.shape))
        return grads if out is None or grads is out else out.copy_(grads)

    # ---- norms -----------------------------------------------------------------------------------------------

    def norms(self) -> Tensor:
        return self.norms_with(NormMemo())

    def norms_with(self, memo: NormMemo) -> Tensor:
        terms = self.terms
        if len(terms) == 1:
            return terms[0].factor.norms_with(memo)
        if self.is_disjoint:
            return norm_of_norms([factor.norms() for _, factor in terms])
        tied = self._tied()
        return super().norms() if tied is None else self._tied_norms(*tied)

    def _tied(self) -> tuple[Outer, Rows] | None:
        """The terms, if they are a table multiplied as a matrix, and read by index."""
        if len(self.terms) != 2 or any(region is not None for region, _ in self.terms):
            return None
        outer, rows = sorted((factor for _, factor in self.terms), key=lambda f: isinstance(f, Rows))
        is_tied = isinstance(outer, Outer) and isinstance(rows, Rows) and outer.shape == rows.shape
        return (outer, rows) if is_tied else None  # type: ignore[return-value]

    def _tied_norms(self, outer: Outer, rows: Rows) -> Tensor:
        squares = in_float64(outer.norms()).square() + in_float64(rows.norms()).square()
        crossed = inner.cross(outer, rows)
        least = squares * (1e4 * torch.finfo(crossed.dtype).eps) + _uncertainty(outer, rows)
        return cast(self.rooted(squares + 2 * crossed, least), crossed.dtype)

    def vanishing(self) -> Tensor | None:
        tied = self._tied()
        return None if tied is None else (tied[0].norms() == 0) & (tied[1].norms() == 0)

    # ---- sums ------------------------------------------------------------------------------------------------

    def weighted_sum(self, w: Tensor | None = None) -> Tensor:
        first, *rest = self.terms
        if first.region is None:
            total = first.factor.weighted_sum(w)
            if not (total.shape == self.whole and total.is_contiguous()):
                total = total.contiguous().view(self.whole)
        else:
            like, rest = self.tensors()[-1], list(self.terms)
            total = like.new_zeros(self.whole, dtype=wide(like.dtype))
        return self._add(rest, total, w) if rest else total

    def add_weighted(self, total: Tensor, w: Tensor | None = None) -> None:
        if total.is_contiguous():
            self._add(self.terms, total, w)
        else:
            total.add_(self.weighted_sum(w))

    def _add(self, terms: Sequence[Placement], total: Tensor, w: Tensor | None) -> Tensor:
        """Weighted sums of terms, added to the contiguous `total`."""
        for term in terms:
            target = term.of(total)
            if target.is_contiguous() and wide(term.factor.dtype) == total.dtype:
                term.factor.add_weighted(target.view(term.factor.shape), w)
            else:
                target.add_(term.factor.weighted_sum(w).reshape(target.shape))
        return total

    def along(self, directions: Tensor) -> Tensor:
        total: Tensor | None = None
        for term in self.terms:
            own = directions if term.region is None else term.region.read(directions)
            own = own.reshape(len(directions), *term.factor.shape).contiguous()
            found = term.factor.along(own)
            total = found if total is None else total.add_(found)
        assert total is not None
        return total

    def mapped(self, left: Side, right: Side, dtype: torch.dtype) -> "Sum":
        shape = torch.Size(mapped_shape(self.shape, left, right))
        blocks = [self.block(term) for term in self.terms]
        terms = []
        for term, block in zip(self.terms, blocks, strict=True):
            if block is None:  # neither the matrix nor a block of it, by what is known
                return Sum((Placement(None, Dense(super().mapped(left, right, dtype).dense())),), shape)
            terms.append(self._mapped_term(term, block, left, right, dtype, shape))
        found = sum_of(terms, shape)
        assert found is not None
        return found

    def block(self, term: Placement) -> "MatrixBlock | None":
        """Which rows and columns of the parameter, as a matrix, a term is; None: it is no such block."""
        shape, own = self.shape, term.factor.shape
        if not shape or not own:
            return None
        width, (rows, columns) = prod(shape[1:]), (own[0], prod(own[1:]))
        if term.region is None:
            return MatrixBlock(0, rows, 0, columns) if rows == shape[0] else None
        offset = term.region.offset
        block = Region((rows, columns), (width, 1), offset)
        if block.coalesced() != term.region.coalesced() or not width or offset % width + columns > width:
            return None
        return MatrixBlock(offset // width, rows, offset % width, columns)

    def _mapped_term(
        self, term: Placement, block: "MatrixBlock", left: Side, right: Side, dtype: torch.dtype, shape: torch.Size
    ) -> Placement:
        """A block of the matrix mapped: all of it, or where rows stay as they are some rows."""
        width, like = prod(self.shape[1:]), term.factor.tensors()[-1]
        like = like.new_empty(0, dtype=dtype)
        right = columns_of(right, block.column, block.columns, width, like)
        if left is None or left.dim() == 1:
            some = left if left is None else left[block.row : block.row + block.rows]
            mapped = term.factor.mapped(some, right, dtype)
            if block.rows == self.shape[0]:
                return Placement(None, mapped)
            wide = prod(shape[1:])
            return Placement(Region((block.rows, wide), (wide, 1), block.row * wide), mapped)
        left = columns_of(left, block.row, block.rows, self.shape[0], like)
        return Placement(None, term.factor.mapped(left, right, dtype))

    def squared_deviations(self, mean: Tensor) -> Tensor:
        if (single := self.single) is not None:
            return single.squared_deviations(mean.view(single.shape)).view(self.whole)
        if not self.is_disjoint:
            return super().squared_deviations(mean)
        total = len(self) * mean.square()  # where no term says otherwise the gradients are zeros
        for term in self.terms:
            target, factor = term.of(total), term.factor
            own = factor.squared_deviations(term.of(mean).contiguous().view(factor.shape))
            target.copy_(own.reshape(target.shape))
        return total

    # ---- inner products --------------------------------------------------------------------------------------

    def dots(self, other: "Sum") -> Tensor:
        """Inner products (N, M) with the gradients of other samples."""
        regions = [region for region, _ in self.terms]
        if not (self.is_disjoint and other.is_disjoint and regions == [region for region, _ in other.terms]):
            return inner.dots(self, other)  # used in another way by the other samples, or parts that overlap
        total: Tensor | None = None
        for (_, a), (_, b) in zip(self.terms, other.terms, strict=True):
            found = inner.dots(a, b)
            total = found if total is None else total.add_(found)
        assert total is not None
        return total

    def summands(self) -> tuple[Factor, ...]:
        factors = tuple(factor for region, factor in self.terms if region is None)
        alike = len(factors) == len(self.terms) and all(factor.shape == self.shape for factor in factors)
        return factors if alike else (self,)


def _uncertainty(outer: Outer, rows: Rows) -> Tensor:
    """How large squared norms have to be for what `inner.cross` loses not to matter.

    Of S T summands each is the product of a sum over D, where the smallest normal number may be lost D times, and of an
    outer.g, which is smaller than the norm of all of them.
    """
    (_, s, d), t, g = outer.x.shape, rows.index.shape[1], outer.g
    largest: Tensor = torch.linalg.vector_norm(g.flatten(1), dim=1, dtype=wide(g.dtype))
    return largest.mul_(d).add_(1).mul_(2 * s * t * lost_below(largest.dtype))


# ---- many factors to few ---------------------------------------------------------------------------------


def sum_of(terms: Sequence[Placement], shape: torch.Size) -> Sum | None:
    """The gradients of a parameter of this shape, all its factors added; None: there is none, all are zero."""
    if len(terms) < 2 and not (terms and terms[0].region):
        return Sum(tuple(terms), shape) if terms else None
    axes = () if prod(shape) == 1 else (prod(shape),)
    all_of_it = Region(axes, (1,) * len(axes), 0)  # coalesced
    by_region: dict[Region, list[Factor]] = {}
    for region, factor in map(as_stored, terms):
        by_region.setdefault(all_of_it if region is None else region.coalesced(), []).append(factor)
    found = [Placement(None if region == all_of_it else region, _added(own)) for region, own in by_region.items()]
    if len(found) == 1 and found[0].region is None and isinstance(found[0].factor, Sum):
        inner = found[0].factor
        return inner if inner.whole == shape else Sum(tuple(found), shape)
    found.sort(key=lambda term: term.region is not None)  # the whole parameter first: it needs no zeros below it
    return Sum(tuple(found), shape, len(found) == 1 or _are_disjoint(list(by_region), shape, found[0].factor))


def as_stored(term: Placement) -> Placement:
    """A matrix that is used transposed, as it is stored."""
    region, factor = term
    if region and len(region.shape) == 2 and region.strides[0] < region.strides[1]:
        turned = factor.transposed()
        if turned is not None:
            return Placement(region.mT, turned)
    return term


def _added(factors: list[Factor]) -> Factor:
    """The sum of factors of one region, as one factor."""
    if len(factors) == 1:
        return factors[0]
    kinds: dict[Hashable, list[Factor]] = {}
    for factor in factors:
        key = factor.merge_key()
        kinds.setdefault(id(factor) if key is None else key, []).append(factor)
    merged = [alike[0].merged_with(alike[1:]) if len(alike) > 1 else alike[0] for alike in kinds.values()]
    if len(merged) == 1:
        return merged[0]
    written = next((f for f in merged if f.is_written), None)
    if written is not None:  # N x P numbers are held anyway
        total = written.dense().clone()
        for factor in merged:
            for rows, part in factor.tiles() if factor is not written else ():
                total[rows] += part.dense().reshape(total[rows].shape)
        return Dense(total)
    merged.sort(key=lambda f: isinstance(f, Rows))  # added to what is there without being written out
    shape = torch.Size(merged[0].shape)
    terms = [Placement(None, f.with_positions if isinstance(f, Outer) else f) for f in merged]
    return Sum(tuple(terms), shape, is_disjoint=False)


def _are_disjoint(regions: list[Region], shape: torch.Size, like: Factor) -> bool:
    """Whether no number belongs to two regions."""
    ordered = sorted(regions, key=lambda r: r.offset)
    if all(a.last < b.offset for a, b in pairwise(ordered)):
        return True
    if like.tensors()[0].is_meta or tracing.is_faking():  # take them for parts that overlap
        return False
    with tracing.unrecorded():  # places, not values: these are the same whenever a graph runs
        taken = torch.zeros(prod(shape), dtype=torch.bool)
        for region in regions:
            part = region.of(taken)
            if bool(part.any()):
                return False
            part.fill_(True)
    return True
