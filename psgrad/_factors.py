"""Factors: the N per-sample gradients of one parameter at one call, unmaterialised.

A rule says which factor its backward yields; everything that is computed from per-sample gradients is
written once per factor type, here.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from . import _alloc, _plan
from ._patches import Patches as Patches


class Factor(Protocol):
    """The per-sample gradients of one parameter at one call."""

    @property
    def plan(self) -> _plan.Plan:
        """How `dense` goes about it, and what that costs."""

    def dense(self, out: Tensor | None = None) -> Tensor:
        """The gradients (N, *shape), written into `out` where it is given."""


def _keep(grads: Tensor, out: Tensor | None) -> Tensor:
    return grads if out is None else out.copy_(grads)


def as_rows(t: Tensor) -> Tensor:
    """(N, ..., D) as (N, T, D)."""
    return t.flatten(1, -2) if t.dim() > 2 else t[:, None]


@dataclass(frozen=True, eq=False)
class Dense:
    """Gradients that are there already. The tensor belongs to the factor: nobody else holds it."""

    grads: Tensor  # (N, *shape)

    @property
    def plan(self) -> _plan.Plan:
        return _plan.Plan("as it is", 0, 0)

    def dense(self, out: Tensor | None = None) -> Tensor:
        return _keep(self.grads, out)


@dataclass(frozen=True, eq=False)
class Outer:
    """Gradients of a matrix, or of H of them: for sample n, the sum over t of g[n, t] x[n, t]^T."""

    x: Tensor  # (N, T, I) or (N, H, T, I)
    g: Tensor  # (N, T, O) or (N, H, T, O)

    @property
    def plan(self) -> _plan.Plan:
        return _plan.Plan("bmm" if self.x.shape[-2] > 1 else "mul", self.x.numel() * self.g.shape[-1], 0)

    def dense(self, out: Tensor | None = None) -> Tensor:
        x, g = self.x, self.g
        product = torch.matmul if x.shape[-2] != 1 else torch.mul  # T = 1: 0.2 to 0.7 of bmm's time
        if out is None:
            shape = (*g.shape[:-2], g.shape[-1], x.shape[-1])  # (N, [H,] O, I)
            if not _alloc.is_large(shape, g):
                return product(g.mT, x)
            out = _alloc.empty(shape, g)
        if out.dtype != x.dtype:
            return out.copy_(product(g.mT, x))
        if out.stride(-1) != 1 and out.stride(-2) == 1:  # the matrix is stored transposed: so is the product
            product(x.mT, g, out=out.mT)
            return out
        return product(g.mT, x, out=out)


@dataclass(frozen=True, eq=False)
class Rows:
    """Gradients of a table of rows: for sample n, g[n, t] added to row index[n, t]."""

    index: Tensor  # (N, T)
    g: Tensor  # (N, T, D)
    rows: int  # V

    @property
    def plan(self) -> _plan.Plan:
        return _plan.Plan("index_add", self.g.numel(), 0)

    def dense(self, out: Tensor | None = None) -> Tensor:
        (n, _, d), v = self.g.shape, self.rows
        grads = out if out is not None and out.is_contiguous() and out.dtype == self.g.dtype else None
        grads = (_alloc.empty((n, v, d), self.g) if grads is None else grads).zero_()
        flat = (self.index + v * torch.arange(n, device=self.g.device)[:, None]).flatten()
        grads.view(n * v, d).index_add_(0, flat, self.g.flatten(0, 1))
        return grads if out is None or grads is out else out.copy_(grads)
