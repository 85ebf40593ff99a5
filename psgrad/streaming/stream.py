"""Quantities, streamed: each is a fold over chunks of samples, and the planner runs that same fold without memory.

A quantity says how its answer starts, what a chunk adds to it, and how it ends. `stream` checks the options that all
quantities share, finds a chunk size that keeps `max_bytes`, and folds.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar, cast

import optree
import torch
from torch import Tensor

from ..engine import ladder
from ..engine.batched import Outcome
from ..engine.collectors import FactorCollector
from ..engine.ladder import Group, collect, differentiating, join
from ..engine.problem import Problem, generators, rewind
from ..engine.signals import Unrecordable
from ..engine.validate import check_positive, is_nested
from ..errors import ArgumentError
from ..factors import assumptions, costs
from ..factors.numerics import widest
from ..processes.ranks import Ranks
from ..torch_ import levels, tracing
from . import budget
from .blocks import Block, Meta
from .progress import Bar

_dtype_of: Callable[[Tensor], torch.dtype] = attrgetter("dtype")
State = TypeVar("State")
Result = TypeVar("Result")
Run = Callable[[Problem, Callable[[Problem], Any]], Iterator[Group[Any]]]  # `engine.collect`, or what the planner has


class Quantity(Generic[State, Result]):
    """One question about the gradients of all samples."""

    name = ""  # what the planner remembers its measurements by
    has_sums = False  # over samples: a chunk holds its own beside the totals, a run of all samples at once does not
    scatters = False  # of a model under fully_shard those sums are like the parameters, and are scattered as they come
    keeps_all = False  # what is held grows with every chunk
    looks_first = False  # a pass over all chunks comes before: `look` at each, then `decide`

    def start(self, whole: Problem, step: int) -> State:
        """The answer before any chunk, with the memory that chunks of `step` samples are added to."""
        raise NotImplementedError

    def look(self, state: State, chunk: Problem, run: Run) -> Outcome:
        """What the first pass does with a chunk."""
        raise NotImplementedError

    def decide(self, state: State) -> None:
        """What is worked out between the passes."""

    def add(self, state: State, rows: slice, chunk: Problem, run: Run) -> Outcome:
        """What a chunk adds, and what came out besides; `rows` are its samples. The only description of the work."""
        raise NotImplementedError

    def finish(self, state: State) -> Result:
        """The answer: what was added up, unless a quantity makes something of it."""
        return cast(Result, state)

    def rehearsal(self) -> "Quantity[State, Result]":
        """The same work for the planner, who has neither numbers nor the samples: nothing of the user's is called."""
        return self

    def row_bytes(self, whole: Problem) -> int:
        """Bytes of the answer for each sample, which groups of samples may hold once more."""
        return 0


class Counted(NamedTuple):
    """The samples that count, out of N."""

    problem: Problem  # of these alone
    places: Tensor | None  # which they are; None: all
    n: int
    mask: Tensor | None = None  # (N,) booleans: all run, but those where it is False only stand in for others

    @property
    def count(self) -> Any:
        """How many they are: an int, or with a mask a tensor."""
        return self.problem.n if self.mask is None else self.mask.sum()

    def masked(self, t: Tensor) -> Tensor:
        """Rows of the samples that run, with zeros for those that only stand in for others."""
        if self.mask is not None and len(t) != self.n:
            refuse_recording("valid= in chunks")
        return t if self.mask is None else kept_rows(t, self.mask)

    def among_zeros(self, t: Tensor) -> Tensor:
        """Rows of the samples that count among zeros for the others."""
        if self.places is None:
            return self.masked(t)
        return t.new_zeros(self.n, *t.shape[1:]).index_copy_(0, self.places.to(t.device), t)

    def with_aux(self, result: Any, outcome: Outcome) -> Any:
        """`result`, and where `fn` returns aux, that of all samples: zeros for those that do not count."""
        if outcome.aux_spec is None:
            return result
        return result, optree.tree_unflatten(outcome.aux_spec, [self.among_zeros(t) for t in outcome.aux])


def counted(problem: Problem, valid: Any) -> Counted:
    """The samples that `valid` says count."""
    if valid is None:
        return Counted(problem, None, problem.n)
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool or tuple(valid.shape) != (problem.n,):
        what = f"{valid.dtype}, {tuple(valid.shape)}" if isinstance(valid, Tensor) else f"a {type(valid).__name__}"
        raise ArgumentError(
            f"valid is {what}, not a tensor of booleans of shape ({problem.n},)\n"
            "  give one per sample, True where it counts."
        )
    if tracing.is_recorded() or levels.hides_values(valid):
        if assumptions.are_noted():
            assumptions.assume(valid.any())
        return Counted(problem.rows(stand_ins(valid)), None, problem.n, valid)
    if bool(valid.all()):
        return Counted(problem, None, problem.n)
    index = valid.nonzero()[:, 0]
    return Counted(problem.rows(index), index, problem.n)


def kept_rows(t: Tensor, mask: Tensor) -> Tensor:
    """Rows of `t` where `mask` (N,) is True, zeros elsewhere."""
    return torch.where(mask.view(-1, *[1] * (t.dim() - 1)).to(t.device), t, torch.zeros_like(t))


def stand_ins(mask: Tensor) -> Tensor:
    """Indices (N,) by which every sample outside of `mask` becomes one of those in it, without a look at values.

    A sample that is not to count cannot be left out where `mask` differs between the calls of a vmap. Its own numbers
    must not run all the same: zero times a derivative that is infinite is NaN.
    """
    return torch.where(mask, torch.arange(len(mask), device=mask.device), mask.byte().argmax())


# ---- the fold --------------------------------------------------------------------------------------------


def stream(
    quantity: Quantity[Any, Result],
    problem: Problem,
    *,
    chunk_size: int | None,
    max_bytes: int | float | str | None,
    instead: Quantity[Any, Result] | None = None,
    progress: str | None = None,
    ranks: Ranks | None = None,
) -> tuple[Result, Outcome]:
    """The quantity of all samples, and what came out besides; by `instead` where `max_bytes` is too little for it.

    `progress`: the name that a bar over samples has; None shows none. `ranks`: some models want them in lock step.
    """
    if ranks is not None and ranks.lockstep is not None:
        return in_lock_step(quantity, problem, chunk_size, max_bytes, ranks.lockstep)
    step = plan(quantity, problem, chunk_size, max_bytes, instead)
    if isinstance(step, budget.TooLittle):
        assert instead is not None
        quantity, step = instead, plan_or_raise(instead, problem, chunk_size, max_bytes, step)
    with differentiating(problem):
        return fold(quantity, problem, step, progress)


def fold(
    quantity: Quantity[Any, Result], problem: Problem, step: int, progress: str | None = None, bar: Bar | None = None
) -> tuple[Result, Outcome]:
    """The quantity of all samples, `step` of them at a time."""
    if progress is not None:
        with Bar(progress, problem.n * (2 if quantity.looks_first else 1)) as shown:
            return fold(quantity, problem, step, bar=shown)
    state = quantity.start(problem, step)
    if step >= problem.n > 0 and bar is None and not quantity.looks_first:  # as in most calls
        outcome = quantity.add(state, slice(0, problem.n), problem, collect)
        return quantity.finish(state), outcome
    again = quantity.looks_first or (problem.randomness == "same" and step < problem.n)
    if again and assumptions.are_for_others():
        raise Unrecordable("random numbers would have to be drawn again")
    outcomes = _passes(quantity, state, problem, step, collect if bar is None else bar.watching(collect), bar)
    return quantity.finish(state), joined(problem, outcomes)


def _passes(
    quantity: Quantity[State, Any],
    state: State,
    problem: Problem,
    step: int,
    run: Run,
    bar: Bar | None = None,
    turn: Callable[[], None] | None = None,
) -> list[Outcome]:
    """Add all chunks to `state`, after a look at each where the quantity wants one; and what came out besides.

    `turn` is called before chunks are added: behind the first pass, where there are two.
    """
    looked: list[Outcome] = []
    draws: list[Any] = []
    if quantity.looks_first:
        for _, chunk in chunks(problem, step, bar):
            draws.append(generators(problem.params))
            looked.append(quantity.look(state, chunk, run))
    if turn is not None:
        turn()
    if not quantity.looks_first:
        return [quantity.add(state, rows, chunk, run) for rows, chunk in chunks(problem, step, bar)]
    quantity.decide(state)
    after = generators(problem.params)
    for drawn, (rows, chunk) in zip(draws, chunks(problem, step, bar), strict=True):
        rewind(drawn)  # both passes draw the same numbers
        quantity.add(state, rows, chunk, run)
    rewind(after)
    return looked


def in_lock_step(
    quantity: Quantity[Any, Result], problem: Problem, chunk_size: int | None, max_bytes: Any, lockstep: Any
) -> tuple[Result, Outcome]:
    """The quantity of a model under fully_shard: all ranks run as many passes as the one with most to do.

    Sums are not in the result: they are scattered as they come, and are in `lockstep.pieces`.
    """
    if problem.has_aux:
        raise ArgumentError("has_aux is given, and from_module's fn returns the loss alone\n  drop has_aux.")
    bound = check_step(problem, chunk_size, max_bytes)
    if bound is not None and quantity.keeps_all:
        raise ArgumentError(
            "max_bytes is given, and for a model under fully_shard this keeps the factors of all samples\n"
            "  give chunk_size: how many samples run at once."
        )
    with differentiating(problem):
        step = min((chunk_size or problem.n) if bound is None else _rehearsed(lockstep, problem, bound), problem.n)
        state = quantity.start(problem, step)

        def turn() -> None:
            if quantity.looks_first:
                lockstep.rest(problem)
            if quantity.scatters:
                lockstep.scattering(problem.params)

        outcomes = _passes(quantity, state, problem, step, lockstep.run, turn=turn)
        lockstep.finish(problem)
        return quantity.finish(state), joined(problem, outcomes)


def _rehearsed(lockstep: Any, problem: Problem, bound: int) -> int:
    """How many samples at once stay within `bound` bytes, by passes on one and on two rows of zeros.

    What FSDP2 has gathered does not count; the sums of a unit, which wait to be scattered, do.
    """
    peaks = []
    for n in (1, 2):
        with budget.Meter([t for t in (*problem.params, *problem.batch) if isinstance(t, Tensor)]) as meter:
            lockstep.rehearse(problem, n)
        peaks.append(meter.peak + lockstep.layers.largest_sums())
    one, two = map(int, peaks)
    if one > bound:
        raise budget.TooLittle(bound, one, "one sample at a time needs").error()
    return 1 + (bound - one) // max(two - one, 1)


def chunks(problem: Problem, step: int, bar: Bar | None = None) -> Iterable[tuple[slice, Problem]]:
    """The samples, `step` at a time; `bar` hears of each chunk that is done."""
    if step >= problem.n > 0 and bar is None:
        return [(slice(0, problem.n), problem)]
    return _chunks(problem, step, bar)


def _chunks(problem: Problem, step: int, bar: Bar | None) -> Iterator[tuple[slice, Problem]]:
    for start in range(0, problem.n, max(step, 1)):
        rows = slice(start, min(start + step, problem.n))
        yield rows, problem if step >= problem.n else problem.rows(rows)
        if bar is not None:
            bar.done(rows.stop - start)


def joined(problem: Problem, outcomes: list[Outcome]) -> Outcome:
    """What came out of all chunks besides gradients."""
    if outcomes:
        return join(outcomes)
    return ladder.no_outcome(problem)._replace(values=no_values(problem))


# ---- how many samples at a time --------------------------------------------------------------------------


def plan(
    quantity: Quantity[Any, Any],
    problem: Problem,
    chunk_size: int | None,
    max_bytes: int | float | str | None,
    instead: object = None,
) -> "int | budget.TooLittle":
    """How many samples to run at once; with `instead`, TooLittle where not even one fits."""
    if chunk_size is None and max_bytes is None:
        return problem.n
    bound = check_step(problem, chunk_size, max_bytes)
    if bound is None or problem.n == 0 or is_nested():
        return min(chunk_size or problem.n, problem.n)
    with assumptions.apart() if tracing.is_recorded() else nullcontext():
        found = budget.chunk_size(problem, bound, quantity)
    if isinstance(found, budget.TooLittle) and instead is None:
        raise found.error()
    return found


def plan_or_raise(
    quantity: Quantity[Any, Any],
    problem: Problem,
    chunk_size: int | None,
    max_bytes: int | float | str | None,
    before: "budget.TooLittle",
) -> int:
    """The same for a quantity that stands in for another, for which there is too little: the lesser need is named."""
    found = plan(quantity, problem, chunk_size, max_bytes, before)
    if isinstance(found, budget.TooLittle):
        raise min(before, found, key=lambda too_little: too_little.least).error()
    return found


def check_step(problem: Problem, chunk_size: int | None, max_bytes: int | float | str | None) -> int | None:
    """The two options that say how many samples to run at once, checked; and the bound in bytes."""
    check_positive("chunk_size", chunk_size)
    bound = budget.bytes_of(max_bytes, problem.params)
    if chunk_size is not None and bound is not None:
        raise ArgumentError("chunk_size and max_bytes are both given\n  give one: max_bytes works out a chunk size.")
    return bound


def refuse_recording(what: str) -> None:
    """For what cannot be recorded as a graph."""
    if assumptions.are_for_others():
        raise Unrecordable(what)
    raise ArgumentError(f"{what} cannot be recorded as a graph\n  call it outside of make_fx and torch.compile.")


def refuse_inside_transforms(name: str) -> None:
    """For what is no differentiable function: factors cannot be differentiated."""
    if is_nested():
        raise ArgumentError(
            f"{name} is called inside a torch.func transform\n"
            "  compute it from per_sample_grads there, which can be differentiated and vmapped."
        )


# ---- what quantities have in common ----------------------------------------------------------------------


def metas(problem: Problem) -> tuple[Meta, ...]:
    return tuple([Meta(p.shape, p.dtype, p.device) for p in problem.params])


def dtype_of(problem: Problem) -> torch.dtype:
    """The dtype of norms."""
    return widest(*set(map(_dtype_of, problem.params)))


def no_values(problem: Problem) -> Tensor:
    return problem.params[0].new_empty(0, dtype=dtype_of(problem))


def blocks_of(problem: Problem, run: Run) -> tuple[list[Block], Outcome]:
    """The factors of all samples, and what came out besides."""
    blocks: list[Block] = []
    outcomes: list[Outcome] = []
    for group in run(problem, FactorCollector):
        index = None if group.places is None else group.places.to(problem.params[0].device)
        small = group.collector.held <= costs.SMALL_HELD
        blocks.append(Block(index, tuple(group.collector.result()), small))
        outcomes.append(group.outcome)
    return blocks, join(outcomes, [block.places for block in blocks])


def in_order(found: Sequence[list[Tensor]], places: Sequence[Tensor | None], n: int) -> list[Tensor]:
    """Rows of n samples, from those of groups of them and the places of each group's samples."""
    if places[0] is None:
        return found[0]
    whole = [t.new_empty(n, *t.shape[1:]) for t in found[0]]
    for index, rows in zip(places, found, strict=True):
        assert index is not None
        for target, t in zip(whole, rows, strict=True):
            target[index.to(target.device)] = t
    return whole


def accumulate(totals: list[Tensor | None], found: Sequence[Tensor | None]) -> None:
    for i, t in enumerate(found):
        if t is not None:
            total = totals[i]
            totals[i] = t if total is None else total.add_(t)


def tree_of_sums(problem: Problem, totals: Sequence[Tensor | None], ranks: Ranks | None = None) -> Any:
    """Sums as a pytree like params, in the parameters' dtypes; zeros where there is nothing. Those of all `ranks` are
    in pieces where the parameters were."""
    leaves: list[Tensor] = []
    for t, p in zip(totals, problem.params, strict=True):
        if t is None:
            t = torch.zeros_like(p, memory_format=torch.contiguous_format)
        leaves.append(t if t.dtype is p.dtype else t.to(p.dtype))
    return problem.params_spec.unflatten(leaves if ranks is None else ranks.placed(leaves))
