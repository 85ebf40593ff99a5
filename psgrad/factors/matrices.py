"""The factor of a stack of matrices of which each position meets one: what mixtures of experts yield."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..torch_ import tracing
from . import costs, huge_pages
from .base import Factor
from .numerics import cast, norms_of, scaled, wide, widened
from .outer import Outer


def has_values(index: Tensor) -> bool:
    """Whether positions can be sorted by their matrix: how many each has is known from values alone."""
    return type(index) is Tensor and tracing.can_look(index)


def _one_by_one(count: int) -> range:
    """The matrices that all positions meet where nobody can tell which; one is enough for shapes alone."""
    return range(min(count, 1) if tracing.is_faking() else count)


def positions_of(index: Tensor, count: int) -> Sequence[Tensor]:
    """For each of `count` matrices the positions, in `index` flattened, that meet it: one look."""
    index = index.flatten()
    order = index.argsort(stable=True)
    found: Sequence[Tensor] = order.split(torch.bincount(index, minlength=count + 1).tolist())
    return found[:count]


def products(x: Tensor, index: Tensor, matrices: Tensor) -> Tensor:
    """x[m] @ matrices[index[m]] for (M, I) by (E, I, O); zeros where the index is E."""
    out = x.new_zeros(len(x), matrices.shape[2])
    if not has_values(index):
        for e in _one_by_one(len(matrices)):
            out = out + x.where((index == e)[:, None], 0) @ matrices[e]
        return out
    for rows, matrix in zip(positions_of(index, len(matrices)), matrices, strict=True):
        if len(rows):
            out[rows] = x[rows] @ matrix
    return out


@dataclass(frozen=True, eq=False)
class Matrices(Factor):
    """Gradients of a stack of matrices: for sample n, g[n, t] x[n, t]^T added to matrix index[n, t]."""

    index: Tensor  # (N, T); E: the position meets none of them
    x: Tensor  # (N, T, I)
    g: Tensor  # (N, T, O)
    count: int  # E
    sums_positions: ClassVar[bool] = True

    @property
    def plan(self) -> costs.Plan:
        return costs.Plan("mm of each group", self.x.numel() * self.g.shape[-1], 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.count, self.g.shape[-1], self.x.shape[-1]

    def _alone(self, e: int) -> Outer:
        """The gradients of one matrix: all positions, with zeros for those that meet another."""
        there = (self.index == e)[..., None]
        return Outer(self.x.where(there, 0), self.g.where(there, 0))

    def _sorted(self) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """The positions in groups of one sample and one matrix.

        Their order; the groups' places among (N, E); the same places, and how many positions each has, for Python.
        """
        n, e = len(self), self.count
        sample = torch.arange(n, device=self.index.device)[:, None]
        place = (self.index + e * sample).where(self.index < e, n * e).flatten()
        order = place.argsort(stable=True)
        sizes = torch.bincount(place, minlength=n * e + 1)[: n * e]
        there = sizes.nonzero()[:, 0]
        return order, there, there.tolist(), sizes[there].tolist()

    def dense(self, out: Tensor | None = None) -> Tensor:
        shape = len(self), *self.shape
        grads = out if out is not None and out.is_contiguous() and out.dtype == self.dtype else None
        grads = huge_pages.empty(shape, self.g) if grads is None else grads.view(shape)
        if not has_values(self.index):
            for e in _one_by_one(self.count):
                grads[:, e] = self._alone(e).dense()
        else:
            order, _, places, sizes = self._sorted()
            matrices, rest = grads.flatten(0, 1), torch.ones(len(self) * self.count, dtype=torch.bool)
            rest[places] = False
            matrices.index_fill_(0, rest.nonzero()[:, 0].to(grads.device), 0)
            x, g = self.x.flatten(0, 1)[order], self.g.flatten(0, 1)[order]
            start = 0
            for place, size in zip(places, sizes, strict=True):
                torch.mm(g[start : start + size].mT, x[start : start + size], out=matrices[place])
                start += size
        return grads if out is None or grads.data_ptr() == out.data_ptr() else out.copy_(grads)

    def _groups(self) -> Iterator[tuple[Tensor, Outer]]:
        """Groups of one sample and one matrix, those of about the same size together.

        Each part: the groups' places among (N, E), and as samples of an Outer the groups themselves. Where they have
        fewer positions than the largest of the part, which has less than twice as many, zeros stand for these.
        """
        order, there, _, sizes = self._sorted()
        counts = torch.tensor(sizes, device=order.device)
        begins = counts.cumsum(0) - counts
        powers = 2 ** torch.arange(64 - 1, device=order.device)
        kinds = torch.bucketize(counts, powers)
        for kind in kinds.unique().tolist():
            own = (kinds == kind).nonzero()[:, 0]
            steps = torch.arange(int(counts[own].max()), device=order.device)
            rows = order[(begins[own, None] + steps).clamp_(max=len(order) - 1)]
            is_own = (steps < counts[own, None])[..., None]
            x, g = self.x.flatten(0, 1)[rows], self.g.flatten(0, 1)[rows]
            yield there[own], Outer(x.where(is_own, 0), g.where(is_own, 0))

    def norms(self) -> Tensor:
        (_, t, i), o = self.x.shape, self.g.shape[-1]
        if not has_values(self.index):
            return norms_of(torch.stack([self._alone(e).norms() for e in _one_by_one(self.count)], 1))
        each = 2 * t * (i + o) * self.g.element_size() * costs.TILE // costs.WORKSPACE
        return torch.cat([part._norms() for _, part in self.tiles(each)])

    def _norms(self) -> Tensor:
        found = self.g.new_zeros(len(self) * self.count, dtype=wide(self.dtype))
        for places, outer in self._groups():
            found[places] = cast(outer.norms(), found.dtype)
        return norms_of(found.view(len(self), self.count))

    def weighted_sum(self, w: Tensor | None = None) -> Tensor:
        total = self.g.new_zeros(self.shape, dtype=wide(self.dtype))
        self.add_weighted(total, w)
        return total

    def add_weighted(self, total: Tensor, w: Tensor | None = None) -> None:
        if not has_values(self.index):
            for e in _one_by_one(self.count):
                total[e] += self._alone(e).weighted_sum(w)
            return
        for matrix, (sample, x, g) in zip(total, self._each(), strict=True):
            if len(x):
                matrix.addmm_(cast(scaled(g, None if w is None else w[sample]), total.dtype).mT, cast(x, total.dtype))

    def _each(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each matrix the positions that meet it: whose they are (M,), x (M, I) and g (M, O)."""
        x, g, t = self.x.flatten(0, 1), self.g.flatten(0, 1), self.index.shape[1]
        for rows in positions_of(self.index, self.count):
            yield rows // max(t, 1), widened(x[rows]), widened(g[rows])

    def along(self, directions: Tensor) -> Tensor:
        """For a direction V the sum over t of g[t] . (V[index[t]] x[t]), or from the gradients written out."""
        positions = max(1, self.index.shape[1] // max(1, self.count))
        if costs.along(len(directions), positions).strategy == "tiles" or not has_values(self.index):
            return super().along(directions)
        found = directions.new_zeros(len(self), len(directions))
        for e, (sample, x, g) in enumerate(self._each()):
            x, g = cast(x, directions.dtype), cast(g, directions.dtype)
            for k, v in enumerate(directions[:, e]):
                found[:, k].index_add_(0, sample, (x @ v.mT).mul_(g).sum(1))
        return found

    def dots(self, other: "Matrices") -> Tensor:
        """Inner products (N, M), position by position: only those of one matrix meet."""
        found = widened(self.g).new_zeros(len(self), len(other))
        for (n, x, g), (m, y, h) in zip(self._each(), other._each(), strict=True):
            for some in torch.arange(len(n), device=n.device).split(costs.tile(8 * max(1, len(m)))):
                meeting = (x[some] @ y.mT).mul_(g[some] @ h.mT)
                rows = meeting.new_zeros(len(self), len(m)).index_add_(0, n[some], meeting)
                found.index_add_(1, m, rows)
        return found

    def merge_key(self) -> Hashable:
        return type(self), self.shape, self.dtype

    def merged_with(self, others: Sequence[Factor]) -> Factor:
        alike = [self, *(f for f in others if isinstance(f, Matrices))]
        index, x, g = (torch.cat([getattr(f, name) for f in alike], 1) for name in ("index", "x", "g"))
        return Matrices(index, x, g, self.count)

    def cut_grain(self) -> int:
        return 1

    def cut(self, rows: slice) -> Factor:
        count = rows.stop - rows.start
        there = (self.index >= rows.start) & (self.index < rows.stop)
        return Matrices((self.index - rows.start).where(there, count), self.x, self.g, count)

    def rows_touched(self) -> Tensor | None:
        return self.index[self.index < self.count].unique() if has_values(self.index) else None

    def rows_at(self, index: Tensor) -> Factor:
        place = torch.searchsorted(index, self.index.contiguous())
        there = index[place.clamp(max=len(index) - 1)] == self.index
        return Matrices(place.where(there, len(index)), self.x, self.g, len(index))
