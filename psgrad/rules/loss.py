"""cross_entropy: no parameters, but under vmap it is taken apart into a dozen small ops."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..factors import assumptions
from ..registry.rule import BatchFold, Decline
from ..torch_ import kernels, levels, tracing
from ..torch_.storage import folded


class Options(NamedTuple):
    weight: Tensor | None  # (C,), the same for all samples
    reduction: str
    ignore_index: int
    label_smoothing: float


def bind_cross_entropy(
    randomness: str,
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> tuple[tuple[Any, ...], Options] | Decline:
    if size_average is not None or reduce is not None or reduction not in ("mean", "sum"):
        return Decline("no reduction")
    if weight is not None and levels.is_batched(weight, levels.current_level()):
        return Decline("class weights that are parameters, or differ between samples")
    if target.is_floating_point() or input.dim() < 2 or target.dim() != input.dim() - 1 or input.numel() == 0:
        return Decline("targets other than class indices with a batch axis")
    return (input, target), Options(weight, reduction, ignore_index, label_smoothing)


_REDUCTIONS = ("none", "mean", "sum")  # by torch's number for each


def bind_cross_entropy_loss(
    randomness: str,
    input: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[tuple[Any, ...], Options] | Decline:
    kind = _REDUCTIONS[reduction]
    return bind_cross_entropy(randomness, input, target, weight, None, ignore_index, None, kind, label_smoothing)


def cross_entropy(options: Options, x: Tensor, target: Tensor) -> Tensor:
    """The losses (N,) of x (N, B, C, ...) and target (N, B, ...)."""
    weight, reduction, ignored, smoothing = options
    if assumptions.are_noted():  # a compiler may leave out the op that would refuse a target that is no class
        assumptions.assume(((target >= 0) & (target < x.shape[2])) | (target == ignored))
    n, rows, classes = x.shape[0], folded(x), folded(target)
    size = classes.numel() // n
    cheap = type(target) is Tensor and target.is_cpu and not tracing.is_recorded()
    each = all_count = None
    if cheap and reduction == "mean" and weight is None and _NO_CLASS < ignored < 0 and rows.numel() <= _SMALL:
        each = all_count = _of_classes_alone(rows, classes, smoothing)
    if each is None:
        each = kernels.cross_entropy(rows, classes, weight, 0, ignored, smoothing)
    if size != 1:
        each = each.view(n, size).sum(1)
    if reduction == "sum":
        return each
    if weight is not None:
        counts = target != ignored
        return each / (weight[target.where(counts, 0)] * counts).reshape(n, size).sum(1)
    # a look costs a quarter of a division and its backward
    if all_count is not None or (cheap and not _is_among(ignored, target)):
        return each / size if size != 1 else each
    return each / (target.reshape(n, size) != ignored).sum(1)  # none counted: 0 / 0, as torch has it


_SMALL = 1 << 13  # numbers whose losses may be worked out in vain
_NO_CLASS = -(1 << 40)


def _of_classes_alone(x: Tensor, target: Tensor, smoothing: float) -> Tensor | None:
    """The losses (N B,) where every target is a class; None where one may have to be ignored.

    The kernel looks at each target itself, and refuses what is no class: a look of ours costs a small net 3 % more.
    """
    if target.dtype is not torch.int64:
        return None
    try:
        return kernels.cross_entropy(x, target, None, 0, _NO_CLASS, smoothing)
    except IndexError:
        return None


def _is_among(ignored: int, target: Tensor) -> bool:
    """Whether a target is ignored; below zero there are no others."""
    return int(target.min()) < 0 if ignored < 0 else bool((target == ignored).any())


RULES = (
    BatchFold("cross_entropy", (F.cross_entropy,), bind_cross_entropy, cross_entropy),
    BatchFold("cross_entropy", (kernels.cross_entropy,), bind_cross_entropy_loss, cross_entropy),
)
