"""Tensor parallel: the two collectives that a function needs which has its parameters in pieces.

Each rank of a group holds a piece of some layers, and runs `fn` on the same samples. `copy_to_shards` stands where a
layer begins whose outputs are split, `sum_over_shards` where one ends whose inputs are:

    h = parallel.copy_to_shards(x, group)
    h = torch.relu(F.linear(h, p["up"]))                          # a part of the rows of `up`
    y = parallel.sum_over_shards(F.linear(h, p["down"]), group)   # the same part of the columns of `down`

Both run once for all samples, under vmap and under psgrad. All ranks of the group have to call them in the same order;
one that raises in between leaves the others waiting for as long as the group's timeout allows.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .processes.groups import group_of

__all__ = ["copy_to_shards", "sum_over_shards"]


def copy_to_shards(x: Tensor, group: Any) -> Tensor:
    """`x` as it is; its gradient is the sum of those of all ranks of the group."""
    return _CopyToShards.apply(x, group_of(group))  # type: ignore[no-any-return]


def sum_over_shards(x: Tensor, group: Any) -> Tensor:
    """The sum of `x` of all ranks of the group; its gradient is that of the sum, which all of them have."""
    return _SumOverShards.apply(x, group_of(group))  # type: ignore[no-any-return]


def _summed(t: Tensor, group: "dist.ProcessGroup") -> Tensor:
    t = t.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(t, group=group)
    return t


class _CopyToShards(torch.autograd.Function):
    takes_all_samples = True  # the engine hands it the (N, ...) tensor

    @staticmethod
    def forward(x: Tensor, group: Any) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _SumOverShards.apply(g, ctx.group), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, group: Any) -> tuple[Tensor, int | None]:
        return _CopyToShards.apply(x, group), in_dims[0]


class _SumOverShards(torch.autograd.Function):
    takes_all_samples = True

    @staticmethod
    def forward(x: Tensor, group: Any) -> Tensor:
        return _summed(x, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.group = inputs[1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return _CopyToShards.apply(g, ctx.group), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, group: Any) -> tuple[Tensor, int | None]:
        return _SumOverShards.apply(x, group), in_dims[0]
