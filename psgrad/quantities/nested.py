"""Quantities inside a torch.func transform: made of differentiable ops on gradients, so that transforms go through.

Gradients come from `composed`, written out. A sum with given weights needs none of them: it is the gradient of the
weighted losses (`composed_sum`). Derivatives are those of the formulas, with two conventions where there is none: a
norm of 0 has the derivative 0, of any order; a gradient whose norm is just the bound counts as not clipped.
"""

from collections.abc import Callable, Iterator, Sequence
from math import inf, nan, sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..composable import composed, composed_sum
from ..engine.batched import Outcome
from ..engine.problem import Problem, generators, rewind
from ..errors import ArgumentError
from ..factors.numerics import flat, lost_below, suspects, weighted_sum_of, widened
from ..streaming.stream import Counted, check_step, chunks, dtype_of, joined, kept_rows, no_values, stand_ins
from ..torch_ import levels, tracing
from ..torch_.autograd import in_full_precision
from .clipping import Bounds

Sums = Sequence[Tensor | None]
Draws = dict[torch.device, Tensor]  # the states of generators


def step_of(problem: Problem, chunk_size: int | None, max_bytes: int | float | str | None) -> int:
    """How many samples to run at once; `max_bytes` is checked, and has no effect."""
    check_step(problem, chunk_size, max_bytes)
    return min(chunk_size or problem.n, problem.n)


def _can_read(t: Tensor) -> bool:
    """Whether we may branch on the values of `t`."""
    return tracing.can_look(t) and not levels.hides_values(t)


def _runs(problem: Problem, step: int) -> Iterator[tuple[slice, Problem, Draws]]:
    """The samples, `step` at a time, and where each chunk's random numbers start."""
    for rows, chunk in chunks(problem, step):
        if problem.draws_from is not None:  # all samples share one draw
            rewind(problem.draws_from)
        yield rows, chunk, generators(problem.params)


# ---- norms -----------------------------------------------------------------------------------------------


@in_full_precision
def norms_of_rows(grads: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Norms (N,) over gradients given in parts (N, *shape); no square leaves the dtype's range."""
    device = grads[0].device
    parts = [flat(g).to(device, dtype) for g in grads if g.shape[1:].numel()]
    if not parts:
        return torch.zeros(len(grads[0]), dtype=dtype, device=device)
    each = torch.stack([torch.linalg.vector_norm(part, dim=1) for part in parts])
    least = sqrt(max(part.shape[1] for part in parts) * lost_below(dtype))
    if _can_read(each) and suspects(each.detach().flatten(), least) is None:  # as it mostly is: half the time
        norms: Tensor = torch.linalg.vector_norm(each, dim=0)
        return norms
    largest = torch.stack([part.detach().abs().amax(1) for part in parts]).amax(0)
    scale = torch.where((largest > 0) & (largest < inf), largest, 1)  # it cancels out, and so do its derivatives
    squares = torch.stack([(part / scale[:, None]).square().sum(1) for part in parts]).sum(0)
    zero = squares == 0  # where the square root has no derivative
    return torch.where(zero, 0, torch.where(zero, 1, squares).sqrt()) * scale


def norms(problem: Problem, step: int, per_param: bool) -> tuple[list[Tensor], Outcome]:
    """Norms (N,) of the gradients of all parameters, or of each; and what came out besides."""
    found, outcomes = [], []
    for _, chunk, _ in _runs(problem, step):
        grads, outcome = composed(chunk)
        parts = [[g] for g in grads] if per_param else [grads]
        found.append([norms_of_rows(part, dtype_of(problem)) for part in parts])
        outcomes.append(outcome)
    return _joined_norms(problem, found, len(problem.params) if per_param else 1), joined(problem, outcomes)


def _norms_under(grads: Sequence[Tensor], bounds: Bounds, problem: Problem) -> list[Tensor]:
    """Norms (N,) over the parameters under each bound."""
    under: list[list[Tensor]] = [[] for _ in bounds.each]
    for g, k in zip(grads, bounds.group, strict=True):
        under[k].append(g)
    dtype = dtype_of(problem)
    return [norms_of_rows(own, dtype) if own else grads[0].new_zeros(len(grads[0]), dtype=dtype) for own in under]


def _joined_norms(problem: Problem, found: Sequence[list[Tensor]], count: int) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*found, strict=True)] or [no_values(problem)] * count


# ---- sums ------------------------------------------------------------------------------------------------


@in_full_precision
def _weighted(grads: Sequence[Tensor], w: Sequence[Tensor]) -> list[Tensor]:
    """Gradients (N, *shape) summed, each parameter's with weights (N,) of its own."""
    return [weighted_sum_of(g, own.to(g.device)) for g, own in zip(grads, w, strict=True)]


def _added(totals: Sums, found: Sums) -> Sums:
    return [b if a is None else a if b is None else a + b for a, b in zip(totals, found, strict=True)]


def sums(there: Counted, weights: Tensor, step: int) -> tuple[Sums, Outcome]:
    """The gradients summed with weights (N,) that are given; and what came out besides."""
    problem = there.problem
    weights = there.masked(weights)
    totals: Sums = [None] * len(problem.params)
    outcomes = []
    for rows, chunk, draws in _runs(problem, step):
        found, outcome = _sum_of_chunk(chunk, weights[rows], draws)
        totals = _added(totals, found)
        outcomes.append(outcome)
    return totals, joined(problem, outcomes)


def _sum_of_chunk(chunk: Problem, weights: Tensor, draws: Draws) -> tuple[Sums, Outcome]:
    """By the gradient of the weighted losses, or where that will not do, from gradients written out."""
    if all(p.dtype.itemsize >= 4 for p in chunk.params):  # others are summed in a wider dtype
        largest = weights.detach().abs().amax()
        scale = torch.where((largest > 0) & (largest < inf), largest, 1)  # weights far from 1 may leave the range
        found = composed_sum(chunk, weights / scale)
        if found is not None and not _has_bad_losses(found[1]):
            own, outcome = found
            return [None if t is None else t * scale.to(t) for t in own], outcome
        rewind(draws)
    grads, outcome = composed(chunk)
    return _weighted(grads, [weights] * len(grads)), outcome


def _has_bad_losses(outcome: Outcome) -> bool:
    """Whether a loss is not finite, be its gradient finite: a mean over labels that are all ignored, which is 0 / 0.

    The derivative by the weight of that loss would go through the division.
    """
    return _can_read(outcome.values) and not bool(outcome.values.isfinite().all())


def sums_by_norms(there: Counted, weigh: Callable[[Tensor], Tensor], step: int) -> tuple[Sums, Outcome]:
    """The gradients summed with weights that depend on the norms (N,) of all samples; in chunks, two passes."""
    problem = there.problem
    if step >= problem.n > 0:
        grads, outcome = composed(problem)
        w = there.masked(weigh(norms_of_rows(grads, dtype_of(problem))))
        return _weighted(grads, [w] * len(grads)), outcome
    start = generators(problem.params)
    (own,), outcome = norms(problem, step, False)
    w = weigh(own)
    after = generators(problem.params)
    rewind(start)  # both passes draw the same numbers
    found, _ = sums(there, w, step)
    rewind(after)
    return found, outcome


class Clipped(NamedTuple):
    """Sums of clipped gradients, the norms for each bound, how many samples are in the sums, and what came besides."""

    sums: Sums
    norms: list[Tensor]
    samples: Tensor
    outcome: Outcome


def clipped(there: Counted, bounds: Bounds, nonfinite: str, step: int) -> Clipped:
    """The gradients summed, so that the norm over the parameters under each bound is at most that."""
    problem = there.problem
    totals: Sums = [None] * len(problem.params)
    found, finite, outcomes = [], [], []
    for rows, chunk, draws in _runs(problem, step):
        mask = None if there.mask is None else there.mask[rows]
        own, norms, good, outcome = _clip_chunk(chunk, bounds, nonfinite, mask, draws)
        totals = _added(totals, own)
        found.append(norms)
        finite.append(good if mask is None else good & mask)
        outcomes.append(outcome)
    count = torch.cat(finite).sum() if finite else torch.zeros((), dtype=torch.long, device=problem.params[0].device)
    return Clipped(totals, _joined_norms(problem, found, len(bounds.each)), count, joined(problem, outcomes))


def _clip_chunk(
    chunk: Problem, bounds: Bounds, nonfinite: str, mask: Tensor | None, draws: Draws
) -> tuple[Sums, list[Tensor], Tensor, Outcome]:
    """The sums of a chunk, its norms for each bound, which samples count as finite, and what came out besides."""
    grads, outcome = composed(chunk)
    norms = _norms_under(grads, bounds, chunk)
    finite = torch.stack(norms).isfinite().all(0)
    if nonfinite == "raise":
        _refuse_hidden(finite)
    if nonfinite == "zero" and not _can_read(finite):
        grads = [kept_rows(g, finite) for g in grads]
    elif nonfinite == "zero" and not bool(finite.all()):  # 0 times the derivatives of the others may be NaN
        grads, norms = _without(finite, chunk, bounds, grads, norms, draws)
    counts = finite if nonfinite == "zero" else torch.ones_like(finite)
    w = [_clip_weights(t, bound) for t, bound in zip(norms, bounds.each, strict=True)]
    if nonfinite == "propagate":
        w = [torch.where(finite, own, nan) for own in w]
    left = counts if mask is None else counts & mask
    w = [torch.where(left, own, 0) for own in w]
    return _weighted(grads, [w[k] for k in bounds.group]), norms, counts, outcome


def _without(
    finite: Tensor, chunk: Problem, bounds: Bounds, grads: list[Tensor], norms: list[Tensor], draws: Draws
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients and norms of a chunk in which samples that are not finite have no graph: it runs again without them."""
    if not bool(finite.any()):
        return [torch.zeros_like(g).detach() for g in grads], [t.detach() for t in norms]
    rewind(draws)
    again, _ = composed(chunk.rows(stand_ins(finite)))
    pairs = zip(_norms_under(again, bounds, chunk), norms, strict=True)
    return again, [torch.where(finite, own, old.detach()) for own, old in pairs]


def _clip_weights(norms: Tensor, bound: Any) -> Tensor:
    """What makes norms (N,) at most the bound, which is a number or a tensor of one."""
    bound = bound.to(norms) if isinstance(bound, Tensor) else min(bound, torch.finfo(norms.dtype).max)
    over = norms > bound
    return torch.where(over, bound / torch.where(over, norms, 1), 1)


def _refuse_hidden(finite: Tensor) -> None:
    """nonfinite="raise" has to look at numbers."""
    if not _can_read(finite):
        raise ArgumentError(
            'nonfinite="raise" depends on numbers, which cannot be read inside vmap or another call of psgrad\n'
            '  say nonfinite="zero" to leave samples out whose gradients are not finite, or nonfinite="propagate".'
        )


def sensitivity_of(bounds: Bounds, like: Tensor) -> Tensor:
    """How far one sample can move the sum, as a tensor: a number could not leave a vmap."""
    each = [torch.as_tensor(bounds.each[k], dtype=like.dtype, device=like.device) for k in sorted(set(bounds.group))]
    return each[0].clone() if len(each) == 1 else torch.stack(each).square().sum().sqrt()


# ---- inner products --------------------------------------------------------------------------------------


@in_full_precision
def products(left: Sequence[Tensor], right: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Inner products (N, M) of gradients (N, *shape) with gradients (M, *shape)."""
    device = left[0].device
    pairs = [(flat(a).to(device, dtype), flat(b).to(device, dtype)) for a, b in zip(left, right, strict=True)]
    return torch.stack([a @ b.mT for a, b in pairs]).sum(0)


# ---- moments ---------------------------------------------------------------------------------------------


class Moments(NamedTuple):
    """Mean and unbiased variance of the gradients of each parameter, squared norms (N,), and of how many samples."""

    mean: list[Tensor]
    variance: list[Tensor]
    sq_norms: Tensor
    samples: Tensor


@in_full_precision
def moments(there: Counted, grads: Sequence[Tensor], dtype: torch.dtype) -> Moments:
    """Of the samples that count; with fewer than two the variance is NaN, with none the mean is."""
    device = grads[0].device
    samples = torch.as_tensor(len(grads[0]), device=device) if there.mask is None else there.mask.sum()
    below = torch.where(samples > 1, samples - 1, nan)
    rows = [widened(g) for g in grads]
    mean = [there.masked(g).sum(0) / samples.to(g.device) for g in rows]
    variance = [
        there.masked((g - m).square()).sum(0) / below.to(g.device, g.dtype) for g, m in zip(rows, mean, strict=True)
    ]
    sq_norms = torch.stack([flat(g).to(device, dtype).square().sum(1) for g in grads]).sum(0)
    return Moments(mean, variance, sq_norms, samples)
