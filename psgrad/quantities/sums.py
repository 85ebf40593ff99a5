"""weighted_grad: sums of per-sample gradients, with weights that are given or depend on the norms."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, overload

import optree
import torch
from torch import Tensor

from ..annotations import Group, P, Randomness
from ..engine.batched import Outcome
from ..engine.collectors import SumCollector
from ..engine.ladder import differentiating, join
from ..engine.problem import Problem
from ..engine.signals import NoReads
from ..engine.validate import is_nested, validated
from ..errors import ArgumentError, ArgumentTypeError
from ..factors import assumptions
from ..factors.numerics import norm_of_norms
from ..processes.agreed import agreed
from ..processes.ranks import Ranks
from ..processes.shards import Shards, shards_of
from ..processes.sums import Sums
from ..streaming.blocks import Block, add_sums, blocks_joined, gathered, norms_of_block, norms_of_param
from ..streaming.stream import (
    Counted,
    Quantity,
    Run,
    accumulate,
    blocks_of,
    counted,
    dtype_of,
    fold,
    metas,
    no_values,
    plan,
    stream,
    tree_of_sums,
)
from ..torch_ import levels, tracing
from ..torch_.compiler import uncompiled
from . import nested
from .factored import Factors
from .layered import scattered_sums
from .norms import norms_of_chunk

Totals = list[Tensor | None]  # sums of each parameter's gradients; None: zeros


@overload
def weighted_grad(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    weights: Tensor | Callable[[Tensor], Tensor],
    *,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[False] = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    sharded: Any = None,
    group: Group | None = None,
) -> P: ...
@overload
def weighted_grad(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    weights: Tensor | Callable[[Tensor], Tensor],
    *,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[True],
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    sharded: Any = None,
    group: Group | None = None,
) -> tuple[P, Any]: ...


@uncompiled
@agreed
def weighted_grad(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    weights: Tensor | Callable[[Tensor], Tensor],
    *,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: bool = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    sharded: Any = None,
    group: Any = None,
) -> Any:
    """The sum over n of weights[n] times the gradient of sample n.

    >>> fn = lambda w, x: (w * x).sum()
    >>> w, x = torch.zeros(2), torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    >>> psgrad.weighted_grad(fn, w, x, torch.tensor([1.0, 10.0]))
    tensor([ 3., 24.])
    >>> psgrad.weighted_grad(fn, w, x, lambda norms: 1 / norms)  # every sample the same say
    tensor([0.6000, 1.8000])

    Given a tensor, this is one ordinary weighted backward. A function gets the norms (N,), 0 for samples that are
    not `valid`, and returns the weights (N,); with more than one chunk that takes two passes, which draw the same
    random numbers. A sample with weight 0 does not count, not even if its gradient is NaN.

    Inside a torch.func transform it is a differentiable function of params, batch and weights. Given a tensor, nothing
    of N x P is held there either. A sample with weight 0 runs like any other, as its weight may have a derivative.

    The natural step of `gram` with momentum, as SPRING has it: the step phi with the least |J phi - r|^2 +
    d |phi - m phi_before|^2, from one backward for each step.

    >>> def residual(p, sample):
    ...     x, y = sample
    ...     return p["v"] @ torch.tanh(p["w"] @ x) - y
    >>> params = {"w": torch.randn(30, 2), "v": torch.randn(30) / 30}
    >>> x = torch.randn(20, 2)
    >>> batch = x, x[:, 0].sin()
    >>> phi, losses = {name: torch.zeros_like(p) for name, p in params.items()}, []
    >>> for _ in range(10):
    ...     fg = psgrad.factored_grads(residual, params, batch)
    ...     rest = fg.values - 0.5 * fg.dots(phi)
    ...     step = fg.weighted_sum(torch.linalg.solve(fg.dots() + 0.1 * torch.eye(20), rest))
    ...     phi = {name: 0.5 * phi[name] + step[name] for name in params}
    ...     params = {name: p - 0.5 * phi[name] for name, p in params.items()}
    ...     losses.append(float(fg.values.square().mean()))
    >>> losses[-1] < 0.01 * losses[0]
    True

    Args:
        fn, params, batch, in_dims, randomness, chunk_size, max_bytes, progress: as for `per_sample_grads`.
        weights: (N,), or a function of the norms.
        valid: (N,) booleans; the other samples do not run.
        has_aux: `fn` returns `(loss, aux)`; aux comes back with a leading sample axis, zeros where not `valid`.
        sharded: parameters in pieces, as for `clipped_grad`; it matters to a function of the norms.
        group: processes that share a batch, as for `clipped_grad`: the sum is over the samples of all ranks, `weights`
            are those of this rank's. A function of the norms is called once on every rank, with the norms of its own
            samples, perhaps none; it may itself talk to the other ranks.

    Returns:
        A pytree like params; with `has_aux` `(grad, aux)`.
    """
    if group is not None and callable(weights):
        weights = group.once(weights)
    problem = validated(
        fn, params, batch, in_dims=in_dims, randomness=randomness, has_aux=has_aux, save_memory=max_bytes is not None
    )
    there = counted(problem, valid)
    problem = there.problem
    shards = None if sharded is None else shards_of(sharded, params, max_bytes)
    if is_nested():
        return _nested_sums(there, weights, nested.step_of(problem, chunk_size, max_bytes))
    options: dict[str, Any] = {"chunk_size": chunk_size, "max_bytes": max_bytes}
    shown = "weighted_grad" if progress else None
    if group is not None and group.lockstep is not None:
        return _layer_by_layer(group, there, weights, options)
    across = None if group is None else Sums(group, metas(problem), lambda: problem.n)
    if callable(weights):
        if shards is not None and chunk_size is not None and chunk_size < problem.n:
            raise ArgumentError(
                "sharded, chunk_size and a function of the norms are given, which takes two passes\n"
                "  give weights, from per_sample_norms(..., sharded=...), or no chunk_size."
            )
        one = KeptSums(_GivenWeights(there, weights, shards), across)
        step = plan(one, problem, **options)
        assert isinstance(step, int)
        with differentiating(problem):
            found, outcome = fold(one if step >= problem.n > 0 else TwoPasses(one.weigh), problem, step, shown)
        totals = found.totals
    else:
        totals, outcome = stream(WeightedSums(_checked_weights(weights, there)), problem, progress=shown, **options)
    if across is not None:
        totals = list(across.result(totals))
    return there.with_aux(tree_of_sums(problem, totals, group), outcome)


def _layer_by_layer(ranks: Ranks, there: Counted, weights: Any, options: dict[str, Any]) -> Any:
    """The same for a model under fully_shard: factors are kept, and sums are made parameter by parameter."""
    problem = there.problem
    w = None if callable(weights) else _checked_weights(weights, there)
    if options["max_bytes"] is not None:
        bounded: Any = TwoPasses(_GivenWeights(there, weights)) if w is None else WeightedSums(w)
        stream(bounded, problem, ranks=ranks, **options)
        ranks.agree(problem.n)
        return optree.tree_unflatten(problem.params_spec, ranks.lockstep.pieces.result())
    kept, _ = stream(Factors(), problem, ranks=ranks, **options)
    blocks = list(blocks_joined(kept, problem.params[0].device))
    del kept
    if w is None:
        (norms,) = norms_of(problem, blocks, False)
        w = _checked_weights(weights(there.among_zeros(norms)), there)
    leaves = scattered_sums(ranks, problem, blocks, [w] * len(problem.params), problem.n)
    return optree.tree_unflatten(problem.params_spec, leaves)


def _nested_sums(there: Counted, weights: Any, step: int) -> Any:
    """Inside a transform, through which weights may be differentiated too."""
    if callable(weights):
        weigh = lambda norms: _checked_weights(weights(there.among_zeros(norms)), there)
        totals, outcome = nested.sums_by_norms(there, weigh, step)
    else:
        totals, outcome = nested.sums(there, _checked_weights(weights, there), step)
    return there.with_aux(tree_of_sums(there.problem, totals), outcome)


def _checked_weights(weights: Any, there: Counted) -> Tensor:
    """The weights of the samples that count."""
    n, index, problem = there.n, there.places, there.problem
    if not isinstance(weights, Tensor):
        raise ArgumentTypeError(
            f"weights is a {type(weights).__name__}, not a tensor\n"
            "  give one number per sample, or a function of the norms."
        )
    if tuple(weights.shape) != (n,):
        raise ArgumentError(f"weights has shape {tuple(weights.shape)}, not ({n},)\n  give one number per sample.")
    if weights.is_complex():
        raise ArgumentTypeError("weights are complex numbers\n  give real ones.")
    w = (weights if is_nested() else weights.detach()).to(problem.params[0].device)
    if not w.is_floating_point():  # booleans, counts
        w = w.to(dtype_of(problem))
    w = w if index is None else w[index.to(w.device)]
    w = there.masked(w)
    can_look = (tracing.can_look(w) or assumptions.are_noted()) and not levels.hides_values(w)
    if can_look and not assumptions.decide(lambda: w.isfinite().all()):
        bad = (~w.isfinite()).nonzero()[:, 0]
        shown = ", ".join(map(str, (bad if index is None else index.to(bad.device)[bad]).tolist()[:10]))
        raise ArgumentError(f"weights are not finite for samples {shown}\n  give 0 to leave a sample out.")
    return w


# ---- with given weights ----------------------------------------------------------------------------------


def _starting_totals(whole: Problem, step: int) -> Totals:
    """Zeros to add chunks to; where all samples run at once, their sums are the totals themselves."""
    return [None] * len(whole.params) if step >= whole.n else [meta.new() for meta in metas(whole)]


@dataclass(eq=False)
class WeightedSums(Quantity[Totals, Totals]):
    """The gradients of the losses, each loss counting with its weight: one ordinary backward."""

    name = "sums"
    has_sums = scatters = True
    weights: Tensor | None  # None: all are 1

    def start(self, whole: Problem, step: int) -> Totals:
        return _starting_totals(whole, step)

    def add(self, state: Totals, rows: slice, chunk: Problem, run: Run) -> Outcome:
        return add_weighted_chunk(state, chunk, None if self.weights is None else self.weights[rows], run)

    def rehearsal(self) -> "WeightedSums":
        return WeightedSums(None)


def add_weighted_chunk(totals: Totals, chunk: Problem, weights: Tensor | None, run: Run) -> Outcome:
    """The gradients of a chunk, summed with weights, added to `totals`."""
    outcomes: list[Outcome] = []
    places: list[Tensor | None] = []
    for group in run(chunk._replace(seed=weights), SumCollector):
        accumulate(totals, group.collector.result())
        outcomes.append(group.outcome)
        places.append(group.places)
    return join(outcomes, places)


# ---- with weights that depend on the norms ---------------------------------------------------------------


class Weights(NamedTuple):
    """What the norms of some samples say: a weight (N,) for each parameter, perhaps the same for all."""

    of_params: Sequence[Tensor]
    skip_zero_check: bool = False  # weights of zero need no special handling


class Weigh:
    """How weights come from norms."""

    per_param = False  # from the norms of each parameter
    calls_users = False  # by a function of the user's, which is called once
    good = True  # nothing so far makes the call fail in the end

    def __call__(self, norms: list[Tensor], count: int) -> tuple[list[Tensor], Weights]:
        """The norms as they are reported, and the weights of `count` parameters."""
        raise NotImplementedError


@dataclass(eq=False)
class _Rehearsed(Weigh):
    """For the planner: weights like any, from no function of the user's, without a look at numbers."""

    per_param: bool

    def __call__(self, norms: list[Tensor], count: int) -> tuple[list[Tensor], Weights]:
        return norms, Weights([norms[0]] * count, skip_zero_check=True)


class _GivenWeights(Weigh):
    """By the user's function, which sees the norms of all samples."""

    calls_users = True

    def __init__(self, there: Counted, function: Callable[[Tensor], Any], shards: Shards | None = None) -> None:
        self.there, self.function, self.shards = there, function, shards
        self.per_param = shards is not None

    def __call__(self, norms: list[Tensor], count: int) -> tuple[list[Tensor], Weights]:
        if self.shards is not None and len(norms[0]):  # without samples nobody has anything to say
            norms = [norm_of_norms(self.shards.whole_norms(norms))]
        norms_of_all = self.there.among_zeros(norms[0])
        with NoReads() if assumptions.are_noted() else nullcontext():
            found = self.function(norms_of_all)
        return norms, Weights([_checked_weights(found, self.there)] * count)


class FromNorms(NamedTuple):
    """Sums with weights that depend on the norms, so far; and the norms."""

    totals: Totals
    norms: list[list[Tensor]]  # of each chunk
    weights: list[Tensor]  # of all samples, where they are known before the sums

    def all_norms(self, problem: Problem, count: int) -> list[Tensor]:
        """Norms (N,) of all samples, for each of `count` bounds."""
        if len(self.norms) == 1:
            return self.norms[0]
        return [torch.cat(parts) for parts in zip(*self.norms, strict=True)] or [no_values(problem)] * count


@dataclass(eq=False)
class KeptSums(Quantity[FromNorms, FromNorms]):
    """One pass: the factors of a chunk are kept until its norms are known."""

    name = "clipped"
    has_sums = True
    weigh: Weigh
    across: Sums | None = None
    n: int = 0  # how many samples there are, all chunks together

    def start(self, whole: Problem, step: int) -> FromNorms:
        self.n = whole.n
        return FromNorms(_starting_totals(whole, step), [], [])

    def add(self, state: FromNorms, rows: slice, chunk: Problem, run: Run) -> Outcome:
        blocks, outcome = blocks_of(chunk, run)
        weigh, count, found = self.weigh, len(chunk.params), None
        if assumptions.waits(chunk.params[0]) and not weigh.calls_users:  # then one look at values is for all of them
            with assumptions.doubted() as doubts:
                found = weigh(norms_of(chunk, blocks, weigh.per_param), count)
            found = found if assumptions.hold(doubts) else None
        norms, weights = found or weigh(norms_of(chunk, blocks, weigh.per_param), count)
        state.norms.append(norms)
        across = self.across if rows.stop == self.n and self.weigh.good else None  # a call that fails sends nothing
        while blocks:
            last = None if len(blocks) > 1 else across
            add_sums(blocks.pop(0), weights.of_params, state.totals, weights.skip_zero_check, last)
        return outcome

    def rehearsal(self) -> "KeptSums":
        return KeptSums(_Rehearsed(self.weigh.per_param))


def norms_of(chunk: Problem, blocks: Sequence[Block], per_param: bool) -> list[Tensor]:
    """Norms (N,) of what is kept, or those of each parameter."""
    lead, dtype, device = (chunk.n,), dtype_of(chunk), chunk.params[0].device
    if not per_param:
        return [gathered(blocks, lead, norms_of_block, dtype, device)]
    return [gathered(blocks, lead, partial(norms_of_param, i), dtype, device) for i in range(len(chunk.params))]


@dataclass(eq=False)
class TwoPasses(Quantity[FromNorms, FromNorms]):
    """Norms first, then the gradient of the weighted losses: holds no factors. One weight for all parameters."""

    name = "clipped in two"
    has_sums = scatters = looks_first = True
    weigh: Weigh

    def start(self, whole: Problem, step: int) -> FromNorms:
        return FromNorms(_starting_totals(whole, step), [], [no_values(whole)])

    def look(self, state: FromNorms, chunk: Problem, run: Run) -> Outcome:
        norms, outcome = norms_of_chunk(chunk, run, repeats_draws=True)
        state.norms.append(norms)
        return outcome

    def decide(self, state: FromNorms) -> None:
        norms = torch.cat([own for (own,) in state.norms]) if state.norms else state.weights[0]
        _, weights = self.weigh([norms], 1)
        state.weights[0] = weights.of_params[0]

    def add(self, state: FromNorms, rows: slice, chunk: Problem, run: Run) -> Outcome:
        return add_weighted_chunk(state.totals, chunk, state.weights[0][rows], run)

    def rehearsal(self) -> "TwoPasses":
        return TwoPasses(_Rehearsed(False))
