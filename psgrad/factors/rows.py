"""The factor of a table of rows: what embeddings and indexing yield."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..torch_ import tracing
from . import costs, huge_pages
from .base import Factor, Kron
from .maps import Side, applied, gram_of
from .numerics import cast, norms_of, scaled, widened
from .outer import Outer


@dataclass(frozen=True, eq=False)
class Rows(Factor):
    """Gradients of a table of rows: for sample n, g[n, t] added to row index[n, t]."""

    index: Tensor  # (N, T)
    g: Tensor  # (N, T, D)
    rows: int  # V

    @property
    def plan(self) -> costs.Plan:
        return costs.Plan("index_add", self.g.numel(), 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows, self.g.shape[-1]

    @property
    def reads_few(self) -> bool:
        """Whether a sample reads so few rows that the table is better not written out."""
        return costs.reads_few(self.index.shape[1], self.rows) or self.written_bytes() > costs.WORKSPACE

    def dense(self, out: Tensor | None = None) -> Tensor:
        (n, _, d), v = self.g.shape, self.rows
        grads = out if out is not None and out.is_contiguous() and out.dtype == self.g.dtype else None
        grads = (huge_pages.empty((n, v, d), self.g) if grads is None else grads).zero_()
        places = (self.index + v * torch.arange(n, device=self.g.device)[:, None]).flatten()
        grads.view(n * v, d).index_add_(0, places, self.g.flatten(0, 1))
        return grads if out is None or grads is out else out.copy_(grads)

    def add_to(self, grads: Tensor) -> None:
        sample = torch.arange(len(grads), device=grads.device)[:, None].expand(self.index.shape)
        grads.view(len(grads), *self.shape).index_put_((sample, self.index), self.g.to(grads.dtype), accumulate=True)

    def norms(self) -> Tensor:
        _, t, d = self.g.shape
        if t == 1:
            return norms_of(self.g)
        return torch.cat([part._by_segments() for _, part in self.tiles(t * d * self.g.element_size())])

    def _by_segments(self) -> Tensor:
        """Each sample's rows with one index added up, in a table of T rows in place of V."""
        t = self.g.shape[1]
        ordered, order = self.index.sort(dim=1)
        begins = torch.zeros_like(ordered)
        begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        segment = torch.empty_like(order).scatter_(1, order, begins.cumsum(1))
        return norms_of(Rows(segment, widened(self.g), t).dense())

    def weighted_sum(self, w: Tensor | None = None) -> Tensor:
        g = scaled(self.g, w).flatten(0, 1)
        return g.new_zeros(self.shape).index_add_(0, self.index.flatten(), g)

    def add_weighted(self, total: Tensor, w: Tensor | None = None) -> None:
        total.index_add_(0, self.index.flatten(), scaled(self.g, w).flatten(0, 1).to(total.dtype))

    def along(self, directions: Tensor) -> Tensor:
        """The directions' rows at the index, times g."""
        dtype, (_, t, d) = directions.dtype, self.g.shape
        columns = []
        for v in directions:
            parts = [p for _, p in self.tiles(t * d * dtype.itemsize)]
            rows = [v[part.index].mul_(part.g).flatten(1).sum(1) for part in parts]
            columns.append(rows[0] if len(rows) == 1 else torch.cat(rows))
        return torch.stack(columns, 1)

    def mapped(self, left: Side, right: Side, dtype: torch.dtype) -> Factor:
        g = applied(self.g, right, dtype)
        if left is not None and left.dim() == 2:  # the table's rows are mixed: no longer few of them
            return Outer(g, left.mT[self.index])
        return Rows(self.index, g if left is None else g * left[self.index][..., None], self.rows)

    def kron(self, dtype: torch.dtype) -> Kron:
        """A row that is read is an outer product of the row's unit vector."""
        index = self.index.flatten()
        ones = torch.ones(len(index), dtype=dtype, device=index.device)
        return Kron(ones.new_zeros(self.rows).index_add_(0, index, ones), gram_of(cast(self.g.flatten(0, 1), dtype)))

    def squared_deviations(self, mean: Tensor) -> Tensor:
        """Rows that a sample does not touch differ from the mean by the mean."""
        if not tracing.can_look(self.index):  # how many are touched is not known
            return super().squared_deviations(mean)
        _, t, d = self.g.shape
        untouched = mean.new_full((self.rows,), len(self))
        total = torch.zeros_like(mean)
        for _, part in self.tiles(3 * t * d * self.g.element_size()):
            index, sums = part._summed()
            total.index_add_(0, index, (sums - mean[index]).square_())
            untouched.index_add_(0, index, mean.new_full((len(index),), -1))
        return total.add_(untouched[:, None] * mean.square())

    def _summed(self) -> tuple[Tensor, Tensor]:
        """The rows that each sample touches, once each: their indices (U,) and gradients (U, D)."""
        keys = (self.index + self.rows * torch.arange(len(self), device=self.index.device)[:, None]).flatten()
        found, where = torch.unique(keys, return_inverse=True)
        g = widened(self.g).flatten(0, 1)
        return found % self.rows, g.new_zeros(len(found), g.shape[1]).index_add_(0, where, g)

    def merge_key(self) -> Hashable:
        return type(self), self.shape, self.dtype

    def merged_with(self, others: Sequence[Factor]) -> Factor:
        alike = [self, *(f for f in others if isinstance(f, Rows))]
        return Rows(torch.cat([f.index for f in alike], 1), torch.cat([f.g for f in alike], 1), self.rows)

    def cut_grain(self) -> int:
        return 1

    def cut(self, rows: slice) -> Factor:
        there = (self.index >= rows.start) & (self.index < rows.stop)
        index = (self.index - rows.start).where(there, 0)
        return Rows(index, self.g.where(there[..., None], 0), rows.stop - rows.start)

    def rows_touched(self) -> Tensor | None:
        return torch.unique(self.index) if tracing.can_look(self.index) else None

    def rows_at(self, index: Tensor) -> Factor:
        place = torch.searchsorted(index, self.index.contiguous()).clamp_(max=len(index) - 1)
        there = (index[place] == self.index)[..., None]
        return Rows(place, self.g.where(there, 0), len(index))
