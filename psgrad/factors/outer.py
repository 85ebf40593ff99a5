"""The factor of a matrix: what linear layers, matrix products and recurrent cells yield."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..torch_ import tracing
from ..torch_.storage import are_one_memory
from . import assumptions, clock, costs, huge_pages, quick_grads
from .base import Factor, Kron, NormMemo
from .maps import Side, applied, gram_of
from .numerics import cast, lost_below, norms_of, scaled, wide_norms, widened, widest
from .products import batched_product, long_product, product

_WORTH = 1 << 22  # multiply-adds; of fewer, the ways are not measured


@dataclass(frozen=True, eq=False)
class Outer(Factor):
    """Gradients of a matrix, or of H of them: for sample n, the sum over t of g[n, t] x[n, t]^T."""

    x: Tensor  # (N, T, I) or (N, H, T, I); (N, I) where there is one position
    g: Tensor  # (N, T, O) or (N, H, T, O); (N, O)
    sums_positions: ClassVar[bool] = True

    @property
    def plan(self) -> costs.Plan:
        return costs.Plan("bmm" if self._plain.x.dim() > 2 else "mul", self.x.numel() * self.g.shape[-1], 0)

    @property
    def with_positions(self) -> "Outer":
        """The same with an axis for positions."""
        return self if self.x.dim() > 2 else Outer(self.x[:, None], self.g[:, None])

    @property
    def _plain(self) -> "Outer":
        """The same without an axis for one position."""
        one = self.x.dim() == 3 and self.x.shape[1] == 1
        return Outer(self.x.squeeze(1), self.g.squeeze(1)) if one else self

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.x.shape[1:-2], self.g.shape[-1], self.x.shape[-1])

    def bytes(self) -> tuple[int, int]:
        x, g = self.x, self.g
        if x.dim() > 2:
            return super().bytes()
        return x.nbytes + g.nbytes, g.nbytes * x.shape[1]  # one position: often a small call

    def dense(self, out: Tensor | None = None) -> Tensor:
        if clock.here.in_cpp and self._fastest("gradients", "product", self._by) == "quick":
            return self._quick(out)
        return self._product(out)

    def _by(self, way: str) -> Tensor:
        return self._quick() if way == "quick" else self._product()

    def _product(self, out: Tensor | None = None) -> Tensor:
        """The gradients by torch's products."""
        x, g = self.x, self.g
        if x.dim() == 3 and x.shape[1] == 1:
            x, g = x.squeeze(1), g.squeeze(1)
        if x.dim() == 2:  # 0.2 to 0.7 of bmm's time
            g, x = g.unsqueeze(2), x.unsqueeze(1)
            product: Callable[..., Tensor] = torch.mul
        else:
            g, product = g.mT, batched_product
        if out is None:
            shape = (*g.shape[:-1], x.shape[-1])  # (N, [H,] O, I)
            if not huge_pages.is_large(shape, g):
                return product(g, x)
            out = huge_pages.empty(shape, g)
        if out.dtype != x.dtype:
            return out.copy_(product(g, x))
        if out.stride(-1) != 1 and out.stride(-2) == 1:  # the matrix is stored transposed: so is the product
            product(x.mT, g.mT, out=out.mT)
            return out
        return product(g, x, out=out)

    def _quick(self, out: Tensor | None = None) -> Tensor:
        """The gradients by a kernel of ours."""
        x, g = self.x, self.g
        if out is None:
            out = huge_pages.empty((len(x), *self.shape), g)
        if out.dtype is x.dtype and out.is_contiguous():
            return quick_grads.of_matrix(x, g, out)
        if out.dtype is x.dtype and out.mT.is_contiguous():  # the matrix is stored transposed
            quick_grads.of_matrix(g, x, out.mT)
            return out
        return out.copy_(self._quick())

    def _fastest(self, question: str, usual: str, run: Callable[[str], Tensor]) -> str:
        """The way by which `run` answers a question in the least time; where it is not worth a look, the usual one."""
        x, g = self.x, self.g
        if x.dim() != 3 or x.numel() * g.shape[2] < _WORTH or not clock.can_tell(x, g):
            return usual
        ways = [usual, "quick"] if quick_grads.is_for_matrix(x, g) else [usual]
        return clock.fastest((question, "matrix"), x, g, ways, run)

    def norms(self) -> Tensor:
        if self.x.dim() == 2:
            return cast(wide_norms(self.x) * wide_norms(self.g), widest(self.x.dtype, self.g.dtype))
        x, g = (own := self._plain).x, own.g
        if x.dim() == 2:
            return own.norms()
        if x.dim() == 4:
            return norms_of(Outer(x.flatten(0, 1), g.flatten(0, 1)).norms().view(x.shape[:2]))
        n, t, i = x.shape
        plan = costs.outer_norms(n, t, i, g.shape[-1], x.element_size())
        way = self._fastest("norms", plan.strategy, self._norms_by) if clock.here.in_cpp else plan.strategy
        return self._norms_by(way)

    def _norms_by(self, way: str) -> Tensor:
        if way == "quick":
            return quick_grads.of_matrix(self.x, self.g, self.g.new_empty(len(self.g)))
        return self.rooted(*self.by_gram()) if way == "gram" else super().norms()

    def norms_with(self, memo: NormMemo) -> Tensor:
        if self.x.dim() != 2:
            return self.norms()
        return wide_norms(self.x).mul_(memo.norms(self.g))  # the norm of an outer product

    def by_gram(self) -> tuple[Tensor, Tensor]:
        """Squared norms: sum over t, s of (x[t] . x[s]) (g[t] . g[s]), in strips, each pair once by symmetry.

        And what they have to exceed. Where positions cancel, digits are lost: the squares that they have alone tell.
        Where x[t] . x[s] is below the smallest normal number d, up to I d is lost, which makes I d times the sum of all
        g[t] . g[s], at most T times that of the |g[t]|^2; the same for x; and T^2 d where the products are.
        """
        t, (i, o) = self.x.shape[1], (self.x.shape[2], self.g.shape[2])
        size = costs.gram_strip(t)
        found, least = [], []
        for _, part in self.tiles(2 * size * t * 4):
            x, g = widened(part.x), widened(part.g)
            lost = t * lost_below(x.dtype)
            total, low = x.new_zeros(len(x)), x.new_full((len(x),), t * lost)
            for start in range(0, t, size):
                end = min(start + size, t)
                of_x, of_g = torch.bmm(x[:, start:end], x[:, :end].mT), torch.bmm(g[:, start:end], g[:, :end].mT)
                diagonal = of_x.diagonal(start, 1, 2)
                low.add_(diagonal.sum(1), alpha=o * lost).add_(of_g.diagonal(start, 1, 2).sum(1), alpha=i * lost)
                products = of_x.mul_(of_g)
                last = products[:, :, start:]  # these positions with each other: both halves
                total.add_(products.flatten(1).sum(1), alpha=2).sub_(last.sum((1, 2)))
                low.add_(diagonal.sum(1), alpha=1e4 * torch.finfo(x.dtype).eps)
            found.append(total)
            least.append(low)
        return torch.cat(found), torch.cat(least)

    def vanishing(self) -> Tensor | None:
        """At no position are x and g both other than zero, as in a recurrent layer whose loss reads one end of it."""
        x, g = (own := self.with_positions).x, own.g
        met = (x.any(-1) & g.any(-1)).flatten(1).any(1)
        return ~met & x.isfinite().flatten(1).all(1) & g.isfinite().flatten(1).all(1)

    def weighted_sum(self, w: Tensor | None = None) -> Tensor:
        if self.x.dim() == 4:  # each head alone
            x, g = (t.transpose(0, 1).flatten(1, 2) for t in (widened(self.x), scaled(self.g, w)))
            return g.mT @ x
        return long_product(*self._weighted(w))

    def add_weighted(self, total: Tensor, w: Tensor | None = None) -> None:
        if self.x.dim() == 4:
            super().add_weighted(total, w)
        else:
            total.addmm_(*self._weighted(w))

    def _weighted(self, w: Tensor | None) -> tuple[Tensor, Tensor]:
        """Matrices (O, N T) and (N T, I) whose product is the weighted sum."""
        x, g = self.x, self.g
        if x.element_size() < 4 or g.element_size() < 4:
            x, g = widened(x), widened(g)
        if x.dim() == 2:
            return g.t() if w is None else g.t() * (w if w.dtype is g.dtype else w.to(g.dtype)), x
        x, g = (scaled(x, w), g) if x.numel() < g.numel() else (x, scaled(g, w))  # the smaller of the two
        return g.flatten(0, 1).mT, x.flatten(0, 1)

    def along(self, directions: Tensor) -> Tensor:
        """For a direction V the sum over t of g[t] . (V x[t]); where there are many, the gradients are written out."""
        own = self._plain
        if own.x.dim() == 4 or costs.along(len(directions), own.positions).strategy == "tiles":
            parts = [self] if self.dtype is directions.dtype else [part for _, part in self.tiles()]
            return torch.cat([Factor.along(p.each(lambda t: cast(t, directions.dtype)), directions) for p in parts])
        dtype, (o, i) = directions.dtype, own.shape
        narrow = own.x if i < o else own.g
        columns = []
        for v in directions:
            rows = []
            for _, part in own.tiles(narrow[0].numel() * dtype.itemsize if len(narrow) else None):
                x, g = cast(part.x, dtype), cast(part.g, dtype)
                products = product(g, v).mul_(x) if i < o else product(x, v.mT).mul_(g)
                rows.append(products.flatten(1).sum(1))
            columns.append(rows[0] if len(rows) == 1 else torch.cat(rows))
        return torch.stack(columns, 1)

    def mapped(self, left: Side, right: Side, dtype: torch.dtype) -> Factor:
        if self.x.dim() == 4:
            return super().mapped(left, right, dtype)
        return Outer(applied(self.x, right, dtype), applied(self.g, left, dtype))

    def kron(self, dtype: torch.dtype) -> Kron | None:
        if self.x.dim() == 4:
            return None
        return Kron(*(gram_of(cast(t.flatten(0, -2), dtype)) for t in (self.g, self.x)))

    @property
    def positions(self) -> int:
        """T, of a matrix."""
        return self.x.shape[1] if self.x.dim() > 2 else 1

    def squared_deviations(self, mean: Tensor) -> Tensor:
        own = self._plain
        can_look = tracing.can_look(own.x) or assumptions.are_noted()
        if own.x.dim() > 2 or own.x.device.type == "mps" or not can_look:  # mps has no float64
            return super().squared_deviations(mean)
        x, g, m = own.x.double(), own.g.double(), mean.double()  # float64 for the differences
        moments = g.square().mT @ x.square()
        squares = moments - 2 * m * (g.mT @ x) + len(x) * m.square()
        # where gradients hardly differ no digits are left of the difference; of float32 numbers some are
        enough = 1e-8 if own.dtype is not torch.float64 else 1e-4
        if assumptions.decide(lambda: (squares <= enough * moments).logical_and(moments > 0).any()):
            return super().squared_deviations(mean)
        return squares.to(mean.dtype)

    def merge_key(self) -> Hashable:
        return type(self), self.shape, self.dtype

    def merged_with(self, others: Sequence[Factor]) -> Factor:
        """Sums over more positions."""
        rows = [self.with_positions, *(f.with_positions for f in others if isinstance(f, Outer))]
        return Outer(torch.cat([f.x for f in rows], -2), torch.cat([f.g for f in rows], -2))

    def transposed(self) -> "Outer | None":
        return Outer(self.g, self.x)

    def jacobians(self, others: Sequence[Factor]) -> Tensor:
        """Of one input: a product with the cotangents of all outputs side by side."""
        alike = [self, *(f for f in others if isinstance(f, Outer))]
        one = len(alike) > len(others) and self.x.dim() < 4 and are_one_memory([f.x for f in alike])
        if not one:
            return super().jacobians(others)
        grads = Outer(self.x, torch.cat([f.g for f in alike], -1)).dense()
        return grads.view(len(grads), len(alike), *self.shape)

    def cut_grain(self) -> int:
        return 1

    def cut(self, rows: slice) -> Factor:
        if self.x.dim() == 4:  # whole heads
            return Outer(self.x[:, rows], self.g[:, rows])
        return Outer(self.x, self.g[..., rows])

    def rows_at(self, index: Tensor) -> Factor:
        return Outer(self.x, self.g[..., index])
