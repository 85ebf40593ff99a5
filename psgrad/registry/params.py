"""Parameters as `fn` meets them: stored once, whatever the number of samples."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..factors.region import Region
from ..torch_.storage import shares_memory


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
