"""Gradients that are written out already, and gradients that are one product away from it."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from . import costs
from .base import Factor, NormMemo
from .numerics import cast, flat, norms_of, weighted_sum_of


@dataclass(frozen=True, eq=False)
class Dense(Factor):
    """Gradients that are there already."""

    grads: Tensor  # (N, *shape)
    own: bool = True  # False: the tensor is another's too, so that a result must be a copy
    is_written: ClassVar[bool] = True

    @property
    def plan(self) -> costs.Plan:
        return costs.Plan("as it is", 0, 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.grads.shape[1:])

    def bytes(self) -> tuple[int, int]:
        return self.grads.nbytes, self.grads.nbytes

    def dense(self, out: Tensor | None = None) -> Tensor:
        if out is not None:
            return out.copy_(self.grads)
        return self.grads if self.own else self.grads.clone()

    def norms(self) -> Tensor:
        return norms_of(self.grads)

    def norms_with(self, memo: NormMemo) -> Tensor:
        return memo.norms(self.grads, to_keep=True)

    def weighted_sum(self, w: Tensor | None = None) -> Tensor:
        return weighted_sum_of(self.grads, w)

    def along(self, directions: Tensor) -> Tensor:
        columns = flat(directions).mT
        if self.grads.is_contiguous() and self.grads.dtype is columns.dtype:
            return torch.mm(flat(self.grads), columns)
        found = [torch.mm(cast(flat(part.grads), columns.dtype), columns) for _, part in self.tiles()]
        return torch.cat(found)

    def merge_key(self) -> Hashable:
        return type(self), self.shape, self.dtype

    def merged_with(self, others: Sequence[Factor]) -> Factor:
        if len(others) == 1:
            return Dense(self.grads + others[0].dense())
        return Dense(torch.stack([self.dense(), *(f.dense() for f in others)]).sum(0))

    def cut_grain(self) -> int:
        return 1

    def cut(self, rows: slice) -> Factor:
        return Dense(self.grads[:, rows])


@dataclass(frozen=True, eq=False)
class Product(Factor):
    """Gradients that are products, element by element: x[n] g[n], written straight to where they go."""

    x: Tensor  # (N, *shape), or what broadcasts to it
    g: Tensor  # (N, *shape)

    @property
    def plan(self) -> costs.Plan:
        return costs.Plan("mul", self.g.numel(), 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.g.shape[1:])

    def dense(self, out: Tensor | None = None) -> Tensor:
        return self.x * self.g if out is None else torch.mul(self.x, self.g, out=out)
