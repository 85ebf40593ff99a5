"""Directions: trees like params, with which gradients have inner products."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..engine.problem import differences, kind_of, paths
from ..errors import ArgumentError, ArgumentTypeError
from ..factors.numerics import cast, wide
from ..factors.sum import Sum
from ..torch_.sharding import is_dtensor


class Directions(NamedTuple):
    """K directions (K, *shape) for each parameter, as they were given; `single`: one was given, without an axis."""

    leaves: list[Tensor]
    dtypes: list[torch.dtype]  # in which each parameter's inner products are summed
    width: int  # K
    single: bool

    def along(self, i: int, own: Sum) -> Tensor:
        """Inner products (N, K) of parameter i's gradients with its directions."""
        given, dtype = self.leaves[i], self.dtypes[i]
        if self.width == 0:
            return torch.zeros(len(own), 0, dtype=dtype, device=given.device)
        return own.along(cast(given, dtype).contiguous())

    def squeezed(self, numbers: Tensor) -> Tensor:
        """(N, K), or (N,) where one direction was given."""
        return numbers[:, 0] if self.single else numbers

    def empty(self) -> "Directions":
        """The same without the numbers, in memory of their own."""
        return self._replace(leaves=[torch.empty_like(t) for t in self.leaves])


def directions_of(
    given: Any,
    spec: optree.PyTreeSpec,
    params: Sequence[Any],
    name: str = "direction",
    remedy: str = "give a tensor for every parameter, such as what weighted_grad returns.",
) -> Directions:
    """A tree like params, of whose leaves shape, dtype and device are read, checked: (*shape), or all (K, *shape)."""
    leaves, own = optree.tree_flatten(given)
    if own != spec:
        raise ArgumentError(f"{name} has another structure than params: {differences(own, spec, name)}\n  {remedy}")
    found: list[Tensor] = []
    counts: dict[str, int | None] = {}
    for path, p, t in zip(paths(spec, name), params, leaves, strict=True):
        shape = tuple(p.shape)
        if not isinstance(t, Tensor):
            raise ArgumentTypeError(f"{path} is {kind_of(t)}, not a tensor\n  give a tensor of shape {shape}.")
        if is_dtensor(t):
            raise ArgumentTypeError(
                f"{path} is a DTensor, and there is no group\n"
                "  say group= with the ranks that hold it, or give its full_tensor()."
            )
        if t.is_complex():
            raise ArgumentTypeError(f"{path} has dtype {t.dtype}\n  give real numbers.")
        if tuple(t.shape) == shape:
            counts[path] = None
        elif tuple(t.shape[1:]) == shape and t.dim() == len(shape) + 1:
            counts[path] = t.shape[0]
        else:
            many = ", ".join(["K", *map(str, shape)]) + ("," if not shape else "")
            raise ArgumentError(
                f"{path} has shape {tuple(t.shape)}, neither {shape} nor ({many})\n"
                "  give one direction, or K of them along a leading axis."
            )
        t = t.detach().to(p.device)
        found.append(t[None] if counts[path] is None else t)
    if len(set(counts.values())) > 1:
        first, *others = counts
        other = next(path for path in others if counts[path] != counts[first])
        said = ["one direction" if counts[path] is None else f"{counts[path]} directions" for path in (first, other)]
        raise ArgumentError(
            f"{first} holds {said[0]}, {other} {said[1]}\n  give every parameter as many, along a leading axis."
        )
    count = next(iter(counts.values()))
    return Directions(found, [wide(p.dtype) for p in params], 1 if count is None else count, count is None)
