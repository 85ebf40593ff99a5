"""Gradients of functions of parameters alone, such as a weight norm, on their way back to the parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import costs
from .base import Factor
from .dense import Dense
from .numerics import cast, wide
from .sum import Sum

Gradients = list[Tensor | None]  # of each parameter; None: a function does not depend on it


@dataclass(frozen=True, eq=False)
class Pullback(Factor):
    """Gradients that reach a parameter through functions of parameters alone, such as a weight norm.

    Those functions are the same for every sample: sums go through their derivative once, gradients a few
    samples at a time.
    """

    sums: tuple[Sum, ...]  # the gradients of each function's value
    values: tuple[Tensor, ...]  # with the graph of the functions
    root: Tensor  # the parameter in that graph

    @property
    def plan(self) -> costs.Plan:
        flops = sum(factor.plan.flops for own in self.sums for _, factor in own.terms)
        return costs.Plan("pulled back", flops, 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.root.shape)

    def tensors(self) -> list[Tensor]:
        return [t for own in self.sums for t in own.tensors()]

    def each(self, change: Callable[[Tensor], Tensor]) -> "Pullback":
        return Pullback(tuple(own.each(change) for own in self.sums), self.values, self.root)

    def layout(self) -> Any:
        return Pullback, *(own.layout() for own in self.sums), *map(id, self.values), id(self.root)

    def written_bytes(self) -> int:
        return max(sum(v.nbytes for v in self.values), self.root.nbytes)  # a small matrix may make a large one

    def without_graph(self) -> Factor:
        return Dense(self.dense())

    def _pull(self, pull: Callable[..., list[Tensor | None]], grads: list[Tensor]) -> Tensor:
        with torch.inference_mode(False):
            (pulled,) = pull(self.values, [self.root], [g.clone() if g.is_inference() else g for g in grads])
        assert pulled is not None, "a function of a parameter does not reach it; please report this"
        return pulled

    def dense(self, out: Tensor | None = None) -> Tensor:
        n = len(self)
        rows = [own.dense(value.new_empty(n, *value.shape)) for own, value in zip(self.sums, self.values, strict=True)]
        grads = self._pull(pull_rows, rows)
        return grads if out is None else out.copy_(grads)

    def weighted_sum(self, w: Tensor | None = None) -> Tensor:
        sums = [own.weighted_sum(w) for own in self.sums]
        return self._pull(pull_sums, sums).to(wide(self.root.dtype))

    def along(self, directions: Tensor) -> Tensor:
        """<J^T s, v> = <s, J v>: the directions go through the functions' derivative, and meet the factors there."""
        with torch.inference_mode(False):
            pushed = push(self.values, self.root, directions)
        if pushed is None:
            return super().along(directions)
        total: Tensor | None = None
        for own, v in zip(self.sums, pushed, strict=True):
            found = own.along(v)
            total = found if total is None else total.add_(found)
        assert total is not None
        return total


def push(values: Sequence[Tensor], root: Tensor, directions: Tensor) -> list[Tensor] | None:
    """For K directions (K, *shape) of a parameter those of the values, by the transpose of the backward.

    None where the backward cannot be transposed, or not exactly: torch cannot differentiate it; it is somebody's
    Python, which may not be linear; it runs in half precision, which would round the directions.
    """
    if any(wide(t.dtype) is not t.dtype for t in (root, *values)) or _runs_python(values):
        return None
    pushed: list[list[Tensor]] = [[] for _ in values]
    try:
        with torch.enable_grad():
            seeds = [torch.zeros_like(v, requires_grad=True) for v in values]
            (back,) = torch.autograd.grad(values, [root], seeds, create_graph=True)
            for v in directions.clone() if directions.is_inference() else directions:
                found = torch.autograd.grad(back, seeds, cast(v, root.dtype), allow_unused=True, retain_graph=True)
                for own, t, value in zip(pushed, found, values, strict=True):
                    own.append(torch.zeros_like(value) if t is None else t.detach())
    except RuntimeError:
        return None
    return [torch.stack(own) for own in pushed]


def _runs_python(values: Sequence[Tensor]) -> bool:
    """Whether an autograd Function is among what the values were computed by."""
    seen: set[Any] = set()
    todo: list[Any] = [value.grad_fn for value in values]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        seen.add(node)
        todo += [below for below, _ in node.next_functions]
    return False


def pull_rows(values: Sequence[Tensor], roots: Sequence[Tensor], rows: Sequence[Tensor]) -> Gradients:
    """For gradients (N, *shape) of the values, those of the parameters."""
    try:
        return list(
            torch.autograd.grad(values, roots, rows, is_grads_batched=True, allow_unused=True, retain_graph=True)
        )
    except RuntimeError:  # vmap refuses the backward of one of the functions
        each = [pull(values, roots, one) for one in zip(*rows, strict=True)]
    return [None if column[0] is None else torch.stack(column) for column in zip(*each, strict=True)]


def pull_sums(values: Sequence[Tensor], roots: Sequence[Tensor], sums: Sequence[Tensor]) -> Gradients:
    """For sums in their wide dtype, those of the parameters.

    A function in half precision, such as a cast, would round a sum in float32. The derivative is linear: so the sum
    goes through it in parts that half precision holds, each the rest of the one before, scaled to the dtype's range.
    """
    halves = [v for v in values if wide(v.dtype) is not v.dtype]
    if not halves or all(wide(root.dtype) is not root.dtype for root in roots):
        return pull(values, roots, [cast(s, v.dtype) for s, v in zip(sums, values, strict=True)])
    total: Gradients = [None] * len(roots)
    rest = list(sums)
    for _ in range(3):  # of 8 bits each at the least: the 24 of float32
        scale = _power_of_two(rest)
        parts = [(r / scale).to(v.dtype) for r, v in zip(rest, values, strict=True)]
        for i, found in enumerate(pull(values, roots, parts)):
            if found is not None:
                own, before = found.to(wide(found.dtype)) * scale, total[i]
                total[i] = own if before is None else before.add_(own)
        rest = [r - p.to(r.dtype) * scale for r, p in zip(rest, parts, strict=True)]
    return total


def _power_of_two(tensors: Sequence[Tensor]) -> Tensor:
    """What brings the largest of all numbers to between 1 and 2; 1 where all are zero."""
    largest = torch.stack([t.abs().amax() if t.numel() else t.new_zeros(()) for t in tensors]).amax()
    return torch.where(largest > 0, largest.log2().floor().exp2(), 1)


def pull(values: Sequence[Tensor], roots: Sequence[Tensor], grads: Sequence[Tensor]) -> Gradients:
    """For one gradient of each of the values, those of the parameters."""
    return list(torch.autograd.grad(values, roots, grads, allow_unused=True, retain_graph=True))
