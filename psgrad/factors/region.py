"""Parts of a parameter, as views of it describe them."""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..torch_ import tracing


class Region(NamedTuple):
    """A part of a parameter: a view of it, were it laid out contiguously."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def of(self, t: Tensor) -> Tensor:
        """This part of `t`, a contiguous tensor like the parameter."""
        return t.as_strided(self.shape, self.strides, t.storage_offset() + self.offset)

    def rows(self, grads: Tensor) -> Tensor:
        """This part of `grads`, contiguous (N, *shape) gradients of the parameter."""
        shape, strides = (len(grads), *self.shape), (prod(grads.shape[1:]), *self.strides)
        return grads.as_strided(shape, strides, grads.storage_offset() + self.offset)

    def read(self, rows: Tensor) -> Tensor:
        """The same of `rows` (N, *shape) that are somebody else's, perhaps with gaps."""
        if not tracing.is_recorded():
            return self.rows(rows.contiguous())
        # A graph will run with rows elsewhere in memory, and compilers lose the place where a view begins.
        index = torch.full((1,), self.offset, device=rows.device)
        for size, stride in zip(self.shape, self.strides, strict=True):
            index = (index[:, None] + torch.arange(size, device=rows.device) * stride).flatten()
        return rows.flatten(1).index_select(1, index).view(len(rows), *self.shape)

    def coalesced(self) -> "Region":
        """The same numbers in the same order along as few axes as can be."""
        shape: list[int] = []
        strides: list[int] = []
        for size, stride in zip(self.shape, self.strides, strict=True):
            if size == 1:
                continue
            if shape and strides[-1] == size * stride:
                shape[-1], strides[-1] = shape[-1] * size, stride
            else:
                shape.append(size)
                strides.append(stride)
        return Region(tuple(shape), tuple(strides), self.offset)

    @property
    def last(self) -> int:
        """The furthest number in it."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def mT(self) -> "Region":  # noqa: N802, as tensors have it
        *shape, o, i = self.shape
        *strides, by_o, by_i = self.strides
        return Region((*shape, i, o), (*strides, by_i, by_o), self.offset)
