"""All that is known of one parameter's per-sample gradients: factors of disjoint parts of it.

A parameter that is used several times has several factors, and the norm of their sum needs their cross
terms. Factors of one part and one kind become one factor (longer sums), a table that is read and multiplied
becomes `Tied`, whatever meets a dense gradient is added to it; what is left, parts that overlap in odd ways,
is written out a few samples at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..registry.params import Region, whole_region
from ..torch_ import tracing
from . import costs as _plan
from . import huge_pages as _alloc
from . import inner as _pairs
from .leaves import Dense, Factor, NormsOfMany, Outer, Rows, Tied, norm_of_norms, wide
from .patches import Patches
from .pulling import pull_rows, pull_sums


class Term(NamedTuple):
    """A factor, and the part of the parameter whose gradients it gives; None: all of it, in order."""

    region: Region | None
    factor: Factor


class Kept(NamedTuple):
    """The gradients of one parameter for N samples; zeros outside the terms' regions, which are disjoint."""

    terms: tuple[Term, ...]
    shape: torch.Size

    @property
    def whole(self) -> Factor | None:
        """The one factor that stands for the parameter as it is, where there is one."""
        return self.terms[0].factor if len(self.terms) == 1 and self.terms[0].region is None else None

    def tensors(self) -> list[Tensor]:
        return [t for term in self.terms for t in term.factor.tensors()]

    def each(self, change: Callable[[Tensor], Tensor]) -> "Kept":
        return Kept(tuple(Term(region, factor.each(change)) for region, factor in self.terms), self.shape)

    def select(self, index: slice | Tensor) -> "Kept":
        return Kept(tuple(Term(region, factor.select(index)) for region, factor in self.terms), self.shape)

    def layout(self) -> Any:
        """What is kept but for the tensors."""
        return self.shape, *((region, factor.layout()) for region, factor in self.terms)

    def without_graph(self) -> "Kept":
        """The same, with gradients that are still to be pulled back written out."""
        return Kept(tuple(Term(region, _without_graph(factor)) for region, factor in self.terms), self.shape)

    def norms(self, many: NormsOfMany | None = None) -> Tensor | None:
        """Norms (N,); None where all gradients are zero. Those that `many` gives may be in float64."""
        if len(self.terms) == 1:
            factor = self.terms[0].factor
            return factor.norms() if many is None else many.of(factor)
        return norm_of_norms([factor.norms() for _, factor in self.terms]) if self.terms else None

    def dense(self, out: Tensor) -> Tensor:
        """The gradients, written into the contiguous (N, *shape) `out`."""
        if (factor := self.whole) is not None:
            factor.dense(out.view(len(out), *factor.shape))
            return out
        out.zero_()
        for region, factor in self.terms:
            assert region is not None  # a whole one stands alone
            target = region.rows(out)
            target.copy_(factor.dense().reshape(target.shape))
        return out

    def weighted_sum(self, w: Tensor | None = None) -> Tensor:
        """The sum over n of w[n] times gradient n, in the dtype for sums; there must be a term."""
        if (factor := self.whole) is not None:
            total = factor.weighted_sum(w)
            return total if total.shape == self.shape and total.is_contiguous() else total.contiguous().view(self.shape)
        like = self.terms[0].factor.tensors()[-1]
        zeros = like.new_zeros(self.shape, dtype=wide(like.dtype))
        return self._placed(zeros, lambda factor, _: factor.weighted_sum(w))

    def add_weighted(self, total: Tensor, w: Tensor | None) -> Tensor:
        """The same, added to `total`."""
        if (factor := self.whole) is not None and total.is_contiguous():
            factor.add_weighted(total.view(factor.shape), w)
            return total
        return total.add_(self.weighted_sum(w))

    def spread(self, mean: Tensor, n: int) -> Tensor:
        """The sum over n of the squares of gradient n - mean."""
        if (whole := self.whole) is not None:
            return whole.spread(mean.view(whole.shape)).view(self.shape)
        out = n * mean.square()  # where no term says otherwise the gradients are zeros
        return self._placed(out, lambda factor, region: factor.spread(region.of(mean).contiguous().view(factor.shape)))

    def _placed(self, out: Tensor, quantity: Callable[[Factor, Region], Tensor]) -> Tensor:
        for region, factor in self.terms:
            assert region is not None  # a whole one stands alone
            target = region.of(out)
            target.copy_(quantity(factor, region).reshape(target.shape))
        return out

    def dots(self, other: "Kept") -> Tensor | None:
        """Inner products (N, M) with the gradients of other samples; None where all are zero."""
        if not self.terms or not other.terms:
            return None
        if [t.region for t in self.terms] == [t.region for t in other.terms]:
            pairs = [(a.factor, b.factor) for a, b in zip(self.terms, other.terms, strict=True)]
        else:  # used in another way by the other samples
            pairs = [(self._written(), other._written())]
        total = _pairs.dots(*pairs[0])
        for a, b in pairs[1:]:
            total += _pairs.dots(a, b)
        return total

    def _written(self) -> Dense:
        like = self.terms[0].factor.tensors()[-1]
        n = len(self.terms[0].factor)
        return Dense(self.dense(_alloc.empty((n, *self.shape), like)))


@dataclass(frozen=True, eq=False)
class Placed(Factor):
    """The sum of factors of parts that overlap."""

    terms: tuple[tuple[Region, Factor], ...]
    whole: torch.Size

    @property
    def plan(self) -> _plan.Plan:
        return _plan.Plan("one after the other", sum(factor.plan.flops for _, factor in self.terms), 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.whole)

    def tensors(self) -> list[Tensor]:
        return [t for _, factor in self.terms for t in factor.tensors()]

    def each(self, change: Callable[[Tensor], Tensor]) -> "Placed":
        return Placed(tuple((region, factor.each(change)) for region, factor in self.terms), self.whole)

    def layout(self) -> Any:
        return Placed, *((region, factor.layout()) for region, factor in self.terms)

    def dense(self, out: Tensor | None = None) -> Tensor:
        if out is None or not out.is_contiguous():
            last = self.tensors()[-1]
            grads = _alloc.empty((len(self), *self.shape), last)
        else:
            grads = out
        grads.zero_()
        for region, factor in self.terms:
            target = region.rows(grads)
            target.add_(factor.dense().reshape(target.shape))
        return grads if out is None or grads is out else out.copy_(grads)

    def weighted_sum(self, w: Tensor | None = None) -> Tensor:
        sums = [(region, factor.weighted_sum(w)) for region, factor in self.terms]
        total = sums[0][1].new_zeros(self.shape)
        for region, found in sums:
            target = region.of(total)
            target.add_(found.reshape(target.shape))
        return total


@dataclass(frozen=True, eq=False)
class Pulled(Factor):
    """Gradients that reach a parameter through functions of parameters alone, such as a weight norm.

    Those functions are the same for every sample: sums go through their derivative once, gradients a few
    samples at a time.
    """

    kept: tuple[Kept, ...]  # of each function's value
    values: tuple[Tensor, ...]  # with the graph of the functions
    root: Tensor  # the parameter in that graph

    @property
    def plan(self) -> _plan.Plan:
        flops = sum(factor.plan.flops for kept in self.kept for _, factor in kept.terms)
        return _plan.Plan("pulled back", flops, 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.root.shape)

    def tensors(self) -> list[Tensor]:
        return [t for kept in self.kept for t in kept.tensors()]

    def each(self, change: Callable[[Tensor], Tensor]) -> "Pulled":
        return Pulled(tuple(kept.each(change) for kept in self.kept), self.values, self.root)

    def layout(self) -> Any:
        return Pulled, *(kept.layout() for kept in self.kept), *map(id, self.values), id(self.root)

    def tiles(self, bytes_each: int | None = None) -> "Iterator[tuple[slice, Pulled]]":
        sizes = [sum(v.nbytes for v in self.values), self.root.nbytes]  # a small matrix may make a large one
        return super().tiles(max(sizes) if bytes_each is None else bytes_each)

    def _pull(self, pull: Callable[..., list[Tensor | None]], grads: list[Tensor]) -> Tensor:
        with torch.inference_mode(False):
            (pulled,) = pull(self.values, [self.root], [g.clone() if g.is_inference() else g for g in grads])
        assert pulled is not None, "a function of a parameter does not reach it; please report this"
        return pulled

    def dense(self, out: Tensor | None = None) -> Tensor:
        n = len(self)
        rows = [
            kept.dense(value.new_empty(n, *value.shape)) for kept, value in zip(self.kept, self.values, strict=True)
        ]
        grads = self._pull(pull_rows, rows)
        return grads if out is None else out.copy_(grads)

    def weighted_sum(self, w: Tensor | None = None) -> Tensor:
        sums = [kept.weighted_sum(w) for kept in self.kept]
        return self._pull(pull_sums, sums).to(wide(self.root.dtype))


def _without_graph(factor: Factor) -> Factor:
    if isinstance(factor, Placed):
        return Placed(tuple((region, _without_graph(part)) for region, part in factor.terms), factor.whole)
    return Dense(factor.dense()) if isinstance(factor, Pulled) else factor


# ---- many factors to few ---------------------------------------------------------------------------------


def grouped(terms: Sequence[Term], shape: torch.Size) -> tuple[Term, ...]:
    """The same gradients as factors of disjoint regions."""
    if len(terms) < 2 and not (terms and terms[0].region):
        return tuple(terms)
    all_of_it = whole_region(shape).coalesced()
    by_region: dict[Region, list[Factor]] = {}
    for region, factor in map(upright, terms):
        by_region.setdefault(all_of_it if region is None else region.coalesced(), []).append(factor)
    found = [(region, _added(factors)) for region, factors in by_region.items()]
    if len(found) > 1 and not _disjoint([region for region, _ in found], shape, found[0][1].tensors()[0]):
        return (Term(None, Placed(tuple(found), shape)),)
    return tuple(Term(None if region == all_of_it else region, factor) for region, factor in found)


def upright(term: Term) -> Term:
    """A matrix that is used transposed, as it is stored."""
    region, factor = term
    if region and type(factor) is Outer and len(region.shape) == 2 and region.strides[0] < region.strides[1]:
        return Term(region.mT, Outer(factor.g, factor.x))
    return term


def _kind(factor: Factor) -> Any:
    """What two factors must have in common to become one."""
    common = type(factor), factor.shape, factor.dtype
    if isinstance(factor, Patches):
        return *common, factor.geometry, factor.x.shape[2:], factor.g.shape[2:]
    return common if isinstance(factor, (Outer, Rows, Dense)) else id(factor)


def _added(factors: list[Factor]) -> Factor:
    """The sum of factors of one region, as one factor."""
    if len(factors) == 1:
        return factors[0]
    kinds: dict[Any, list[Factor]] = {}
    for factor in factors:
        kinds.setdefault(_kind(factor), []).append(factor)
    merged = [_joined(alike) if len(alike) > 1 else alike[0] for alike in kinds.values()]
    if len(merged) == 1:
        return merged[0]
    dense = next((f for f in merged if isinstance(f, Dense)), None)
    if dense is not None:  # N x P numbers are held anyway
        total = dense.grads.clone()
        for factor in merged:
            for rows, part in factor.tiles() if factor is not dense else ():
                total[rows] += part.dense().reshape(total[rows].shape)
        return Dense(total)
    outer, table = (next((f for f in merged if type(f) is kind), None) for kind in (Outer, Rows))
    if len(merged) == 2 and isinstance(outer, Outer) and isinstance(table, Rows) and outer.shape == table.shape:
        return Tied(outer.rows, table)
    shape = torch.Size(merged[0].shape)
    return Placed(tuple((whole_region(shape), factor) for factor in merged), shape)


def _joined(alike: list[Factor]) -> Factor:
    """Factors of one kind as one: sums over more positions."""
    first = alike[0]
    if isinstance(first, Dense):
        return Dense(
            torch.stack([f.dense() for f in alike]).sum(0) if len(alike) > 2 else first.grads + alike[1].dense()
        )
    axis = 1
    if isinstance(first, Outer):
        axis, alike = -2, [f.rows for f in alike if isinstance(f, Outer)]
        first = alike[0]
    columns = iter(zip(*(f.tensors() for f in alike), strict=True))
    return first.each(lambda _: torch.cat(next(columns), axis))


def _disjoint(regions: list[Region], shape: torch.Size, like: Tensor) -> bool:
    """Whether no number belongs to two regions."""
    ordered = sorted(regions, key=lambda r: r.offset)
    if all(a.last < b.offset for a, b in pairwise(ordered)):
        return True
    if not tracing.can_look(like):  # take them for parts that overlap
        return False
    taken = like.new_zeros(prod(shape), dtype=torch.bool)
    for region in regions:
        part = region.of(taken)
        if bool(part.any()):
            return False
        part.fill_(True)
    return True
