"""Parameters as `fn` meets them: stored once, whatever the number of samples."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..torch_.storage import shares_memory


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


def whole_region(shape: torch.Size) -> Region:
    """All of a parameter."""
    return Region(tuple(shape), tuple(prod(shape[i + 1 :]) for i in range(len(shape))), 0)


@dataclass(eq=False, slots=True)
class Source:
    """A tensor whose per-sample gradients are collected: a parameter, or a function of parameters alone.

    A function of parameters alone (a mask times a weight, a weight norm, a cast) is the same for every
    sample, so it is computed once, and its per-sample gradients are pulled back to the parameters at the
    end. `value` is contiguous and has no sample axis; `graph` is the same with the graph of that function.
    """

    index: int
    named: Callable[[int], str]  # its path from its index, worked out when somebody asks
    value: Tensor
    leaf: Tensor  # (N, *shape), stride 0 along N: what plain vmap differentiates
    graph: Tensor | None = None
    uses: int = 0  # how many factors and other gradients may come; counted for those who sum as they come

    @property
    def name(self) -> str:
        return self.named(self.index)

    def traced(self) -> Tensor:
        """`value` as ordinary autograd follows it; made when the first function of it is computed."""
        if self.graph is None:
            self.graph = self.value.detach().requires_grad_()
        return self.graph


@dataclass(eq=False, slots=True)
class Param:
    """A source as an op sees it: whole, or through a view that shares the source's memory."""

    value: Tensor
    source: Source
    wrapped: Tensor  # the batched tensor that `fn` holds
    graph: Tensor | None = None  # a view as ordinary autograd follows it; None: the source's

    def traced(self) -> Tensor:
        """`value` as ordinary autograd follows it, to compute functions of parameters alone."""
        return self.source.traced() if self.graph is None else self.graph

    def view(self, fn: Callable[[Tensor], Tensor]) -> "Param | None":
        """The same parameter through `fn`, or None where `fn` cannot do without a copy."""
        value = fn(self.value)
        return Param(value, self.source, self.wrapped) if shares_memory(value, self.value) else None

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def dim(self) -> int:
        return self.value.dim()

    def numel(self) -> int:
        return self.value.numel()

    @property
    def whole(self) -> bool:
        """Whether this is the source as it stands."""
        if self.value is self.source.value:
            return True
        return self.value.shape == self.source.value.shape and self.value.stride() == self.source.value.stride()

    @property
    def covers(self) -> bool:
        """Whether every number of the source is here, once: a transposition or a new shape of it."""
        return self.value.numel() == self.source.value.numel() and 0 not in self.value.stride()

    @property
    def part(self) -> Region:
        """Which part of the source this is."""
        offset = self.value.storage_offset() - self.source.value.storage_offset()
        return Region(tuple(self.value.shape), self.value.stride(), int(offset))

    def collapsed(self, grads: Tensor) -> tuple[Region, Tensor]:
        """Gradients (N, *shape) of this view, summed along expanded axes, where one number stands for many."""
        region = self.part
        grads = grads.reshape(len(grads), *region.shape)
        for axis, (size, stride) in enumerate(zip(region.shape, region.strides, strict=True)):
            if size > 1 and stride == 0:
                grads = grads.sum(axis + 1, keepdim=True)
        return Region(tuple(grads.shape[1:]), region.strides, region.offset), grads
