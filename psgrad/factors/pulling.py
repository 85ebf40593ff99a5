"""Gradients of functions of parameters alone, passed on to the parameters by the functions' derivative."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .leaves import cast, wide

Pulled = list[Tensor | None]  # of each parameter; None where no function of it is among the values


def pull_rows(values: Sequence[Tensor], roots: Sequence[Tensor], rows: Sequence[Tensor]) -> Pulled:
    """For gradients (N, *shape) of the values, those of the parameters."""
    try:
        return list(
            torch.autograd.grad(values, roots, rows, is_grads_batched=True, allow_unused=True, retain_graph=True)
        )
    except RuntimeError:  # vmap refuses the backward of one of the functions
        each = [_pull(values, roots, one) for one in zip(*rows, strict=True)]
    return [None if column[0] is None else torch.stack(column) for column in zip(*each, strict=True)]


def pull_sums(values: Sequence[Tensor], roots: Sequence[Tensor], sums: Sequence[Tensor]) -> Pulled:
    """For sums in their wide dtype, those of the parameters.

    A function in half precision, such as a cast, would round a sum in float32. The derivative is linear: so the sum
    goes through it in parts that half precision holds, each the rest of the one before, scaled to the dtype's range.
    """
    halves = [v for v in values if wide(v.dtype) is not v.dtype]
    if not halves or all(wide(root.dtype) is not root.dtype for root in roots):
        return _pull(values, roots, [cast(s, v.dtype) for s, v in zip(sums, values, strict=True)])
    total: Pulled = [None] * len(roots)
    rest = list(sums)
    for _ in range(3):  # of 8 bits each at the least: the 24 of float32
        scale = _power_of_two(rest)
        parts = [(r / scale).to(v.dtype) for r, v in zip(rest, values, strict=True)]
        for i, found in enumerate(_pull(values, roots, parts)):
            if found is not None:
                own, before = found.to(wide(found.dtype)) * scale, total[i]
                total[i] = own if before is None else before.add_(own)
        rest = [r - p.to(r.dtype) * scale for r, p in zip(rest, parts, strict=True)]
    return total


def _power_of_two(tensors: Sequence[Tensor]) -> Tensor:
    """What brings the largest of all numbers to between 1 and 2; 1 where all are zero."""
    largest = torch.stack([t.abs().amax() if t.numel() else t.new_zeros(()) for t in tensors]).amax()
    return torch.where(largest > 0, largest.log2().floor().exp2(), 1)


def _pull(values: Sequence[Tensor], roots: Sequence[Tensor], grads: Sequence[Tensor]) -> Pulled:
    return list(torch.autograd.grad(values, roots, grads, allow_unused=True, retain_graph=True))
