"""The ladder: all samples at once where that can be, else in groups that agree, else one by one. Each step is exact.

A use of a parameter goes by a rule, else by plain vmap, else in a loop over samples for that one op (`mode.py`). Where
samples disagree on a branch, the batch is split and each group runs on its own; where even that cannot be, samples run
one after the other by ordinary autograd.
"""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import (
    ArgumentError,
    FallbackWarning,
    PsgradError,
    UnsupportedOpError,
    UnusedParametersWarning,
    is_out_of_memory,
    place_of,
    reason_of,
)
from ..factors import assumptions, warm_memory
from ..torch_.compiler import CompilerLoaded, eagerly, is_loaded
from ..torch_.storage import version_of
from .batched import KeptForward, Outcome, keep_forward, run_together, seen_grad
from .checkpoint import Following
from .collectors import Collector, SumCollector
from .held import HELD, Holding, OwnParameters, again, recorded
from .problem import Problem, Sampled, generators, rewind
from .signals import Diverged, NeedsLoop, SampleWritten, Unrecordable

_EXPERTS = (
    "  it loops over experts, of which samples choose others: where the model is one of transformers,\n"
    '  model.set_experts_implementation("grouped_mm") keeps samples together.'
)
C = TypeVar("C", bound=Collector)
R = TypeVar("R")
Make = Callable[[Problem], C]  # a collector for the samples of a problem


@dataclass(eq=False, slots=True)
class differentiating:  # noqa: N801, it reads as torch.no_grad() does
    """Gradients work inside, whatever the caller has switched off.

    A caller who gives `problem` answers it inside: if then no parameter had a gradient, a warning says so.
    """

    problem: Problem | None = None
    switches: contextlib.ExitStack | None = None  # what the caller has switched off, on while inside

    def __enter__(self) -> None:
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            self.switches = contextlib.ExitStack()
            self.switches.enter_context(torch.inference_mode(False))
            self.switches.enter_context(torch.enable_grad())
        if self.problem is not None:
            warm_memory.begin(self.problem.save_memory)

    def __exit__(self, kind: object, error: object, _: object) -> None:
        if self.switches is not None:
            self.switches.close()
        if self.problem is None:
            return
        if self.problem.save_memory:
            warm_memory.end()
        if isinstance(error, _Carried):
            raise error.error from None
        if not self.problem.reached and self.problem.n and kind is None:
            warnings.warn(
                "the loss depends on no parameter, so every gradient is zero\n"
                "  compute it from the params that fn is given; .detach(), .item() and torch.no_grad() cut them off.",
                UnusedParametersWarning,
                stacklevel=callers_level(),
            )


class _Carried(BaseException):
    """A StopIteration that `fn` raised, on its way through our iterators, which would take it for their end."""

    def __init__(self, error: StopIteration) -> None:
        self.error = error


class Group(NamedTuple, Generic[C]):
    """Samples that ran together: which rows of the problem they are, in that order, and what came out."""

    places: Tensor | None  # None: all
    collector: C
    outcome: Outcome

    def among(self, index: Tensor) -> "Group[C]":
        """A group of the samples `index` as one of all."""
        return self._replace(places=index if self.places is None else index[self.places.to(index.device)])


def collect(
    problem: Problem, make: Make[C], *, quiet: bool = False, on_copies: bool = False, is_part: bool = False
) -> Iterator[Group[C]]:
    """Per-sample gradients, group by group, each in a collector of its own: one group of all where that can be.

    `quiet` keeps fallbacks to itself; `on_copies`: `fn` changes its sample in place, so each attempt gets a copy;
    `is_part`: the samples are a group of others already, and whoever split these counts the groups.
    """
    collector = make(problem)
    found: Outcome | _Refusal = _attempt(problem, partial(run_together, problem, collector, on_copies=on_copies))
    if isinstance(found, Outcome):
        if found.looped and not quiet:
            _warn_of_loops(found.looped)
        yield Group(None, collector, found)
    elif found.writes:
        yield from collect(problem, make, quiet=quiet, on_copies=True)
    elif assumptions.are_for_others():
        what = "samples part ways" if found.groups else f"samples run one by one ({found.why})"
        raise Unrecordable(f"{what} at {found.where}")
    elif not found.groups:
        reason = f"psgrad runs fn in a loop over samples: exact, but slow\n  vmap refused at {found.where}: {found.why}"
        yield from _one_by_one(problem, make, None if quiet else reason)
    else:
        count = 0
        for index in found.groups:  # each on its own
            for group in collect(problem.rows(index), make, quiet=quiet, on_copies=on_copies, is_part=True):
                count += 1
                yield group.among(index)
        if not quiet and not is_part:
            found.warn_of_groups(problem.n, count)


class _Refusal(NamedTuple):
    """Why the samples cannot run all at once, in words: an exception's traceback would hold the attempt's tensors."""

    groups: list[Tensor]  # samples that agree on a branch
    where: str = ""
    why: str = ""
    writes: bool = False

    def warn_of_groups(self, n: int, count: int) -> None:
        """Where n samples have become many groups."""
        if count > max(8, n // 2):
            what = f"psgrad splits {n} samples into {count} groups, which disagree at {self.where}"
            _warn(f"{what}\n{_EXPERTS}" if "Experts.forward" in self.where else what)


def _attempt(problem: Problem, run: Callable[[], R]) -> R | _Refusal:
    """What `run` gives for all samples at once, or why it cannot."""
    try:
        if problem.randomness == "different":
            return run()
        with _drawing_of(problem):
            return run()
    except Diverged as diverged:
        found = _Refusal(diverged.groups, place_of(diverged))
    except SampleWritten:
        return _Refusal([], writes=True)
    except NeedsLoop as needed:
        found = _Refusal([], place_of(needed), needed.why)
    except PsgradError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if problem.randomness == "error" and "randomness error mode" in str(error):
            raise _drawing(place_of(error)) from None
        found = _Refusal([], place_of(error), reason_of(error))
    return found


def _warn_of_loops(looped: Sequence[str]) -> None:
    _warn("psgrad runs a part of fn in a loop over samples: exact, slower there\n  " + "\n  ".join(looped))


def _warn(message: str) -> None:
    warnings.warn(message, FallbackWarning, stacklevel=callers_level())


# ---- several outputs -------------------------------------------------------------------------------------


class KeptForwards(NamedTuple):
    """The forwards of all samples of a problem, a group of them each, kept for the backward of each output."""

    # the places of a group's samples (None: all), the problem of these alone, their forward
    parts: Sequence[tuple[Tensor | None, Problem, KeptForward]]

    def backward(self, k: int, make: Make[C]) -> list[Group[C]] | None:
        """The gradients of output k; None where they cannot be had this way."""
        groups = []
        for places, problem, forward in self.parts:
            collector = make(problem)
            outcome = _attempt(problem._replace(randomness="different"), lambda: forward.backward(k, collector))  # noqa: B023
            if isinstance(outcome, _Refusal):
                return None
            groups.append(Group(places, collector, outcome))
        return groups


def keep_forwards(problem: Problem, times: int, *, quiet: bool = False) -> KeptForwards | None:
    """`fn`, which returns a row of outputs, once for all samples; None where the graph is not to be had, or does not
    serve so many `times`: then it has to run for each output anew."""
    parts = _kept(problem, times, quiet)
    return None if parts is None else KeptForwards(parts)


def _kept(
    problem: Problem, times: int, quiet: bool, on_copies: bool = False, is_part: bool = False
) -> "Sequence[tuple[Tensor | None, Problem, KeptForward]] | None":
    found = _attempt(problem, lambda: keep_forward(problem, on_copies=on_copies))
    if isinstance(found, KeptForward):
        if not found.can_repeat and times > 1:
            return None
        if found.looped and not quiet:
            _warn_of_loops(found.looped)
        return [(None, problem, found)]
    if found.writes:
        return _kept(problem, times, quiet, True)
    if not found.groups:
        return None
    parts = []
    for index in found.groups:
        own = _kept(problem.rows(index), times, quiet, on_copies, True)
        if own is None:
            return None
        for places, some, forward in own:
            parts.append((index if places is None else index[places.to(index.device)], some, forward))
    if not quiet and not is_part:
        found.warn_of_groups(problem.n, len(parts))
    return parts


# ---- where vmap cannot ----------------------------------------------------------------------------------


@contextlib.contextmanager
def generators_kept(problem: Problem) -> Iterator[None]:
    """Inside, random numbers are drawn; after, the generators are as they were."""
    before = generators(problem.params)
    try:
        yield
    finally:
        rewind(before)


def _drawing_of(problem: Problem) -> contextlib.AbstractContextManager[Any]:
    """What `randomness` says of a group of the samples: "same" lets every group draw what the first drew."""
    if problem.randomness == "same":
        rewind(problem.draws_from)
    return _no_draws(problem) if problem.randomness == "error" else _NOTHING


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _no_draws(problem: Problem) -> Iterator[None]:
    """Inside, nobody draws random numbers: an error says if somebody did."""
    before = generators(problem.params)
    yield
    after = generators(problem.params)
    if not all(torch.equal(state, after[device]) for device, state in before.items()):
        raise _drawing("an unknown place")


def _drawing(where: str) -> ArgumentError:
    return ArgumentError(
        f'fn draws random numbers at {where}, which randomness="error" refuses\n'
        '  say randomness="different" or "same", or call model.eval().'
    )


def join(outcomes: list[Outcome], places: Sequence[Tensor | None] = ()) -> Outcome:
    """Outcomes of parts as one; `places` are the samples of each part, where they are not in order."""
    if len(outcomes) == 1 and (not places or places[0] is None):
        return outcomes[0]
    index = torch.cat([p for p in places if p is not None]) if places else None
    first = outcomes[0]
    for other in outcomes[1:]:
        if other.aux_spec != first.aux_spec:
            raise ArgumentError(
                f"aux has another structure for some samples: {first.aux_spec} and {other.aux_spec}\n"
                "  return the same structure in every branch of fn."
            )
        for i, (a, b) in enumerate(zip(first.aux, other.aux, strict=True)):
            if a.shape[1:] != b.shape[1:]:
                assert first.aux_spec is not None
                raise ArgumentError(
                    f"{first.aux_spec.accessors()[i].codify('aux')} has shape {tuple(a.shape[1:])} for some samples "
                    f"and {tuple(b.shape[1:])} for others\n  return the same shape in every branch of fn."
                )
    order = None if index is None else index.argsort()

    def joined(parts: Sequence[Tensor]) -> Tensor:
        rows = torch.cat(list(parts))
        return rows if order is None else rows[order.to(rows.device)]

    return Outcome(
        joined([o.values for o in outcomes]),
        [joined(leaves) for leaves in zip(*(o.aux for o in outcomes), strict=True)],
        first.aux_spec,
    )


def no_outcome(problem: Problem) -> Outcome:
    """What besides gradients comes out for no samples; `fn` runs on zeros only where the shape of aux is wanted."""
    if not problem.has_aux:
        return Outcome(problem.params[0].new_empty(0), [], None)
    sample = [t.new_zeros(t.shape[1:]) if b else t for t, b in zip(problem.batch, problem.batched, strict=True)]
    with torch.enable_grad(), generators_kept(problem):
        out = problem.call([p.clone() for p in problem.params], sample)
    return Outcome(out.loss.new_empty(0), [a.new_empty(0, *a.shape) for a in out.aux], out.aux_spec)


_OF_TORCH = RuntimeError, IndexError, TypeError  # what ops raise where dtypes or shapes do not fit


def _one_by_one(problem: Problem, make: Make[C], warning: str | None) -> Iterator[Group[C]]:
    """One sample after the other, by ordinary autograd. An error that `fn` raises there is the user's own."""
    following = Following(OwnParameters(problem))
    for i in range(problem.n):
        one = problem.rows(slice(i, i + 1))
        copies = [p.clone() for p in problem.params]  # whatever fn does to them stays here
        params = [p.detach().requires_grad_() for p in copies]
        try:
            held, (loss, aux, spec) = _called(one, params, following)
        except CompilerLoaded:
            held, (loss, aux, spec) = _called(one, params, following)
        except Exception as error:
            if type(error) in _OF_TORCH:
                error.add_note(f"psgrad called fn with one sample, detached: {one.sample_in_words()}")
            raise
        for name, p in zip(problem.names, copies, strict=True) if any(map(version_of, copies)) else ():
            if version_of(p):
                raise UnsupportedOpError(
                    f"fn changes {name} in place\n"
                    "  per-sample gradients need parameters that stay put: change a clone instead."
                )
        collector = make(one)
        if loss.requires_grad:
            if one.seed is not None and isinstance(collector, SumCollector):
                collector.weights = one.seed  # not into the backward, which need not be linear
            with again(held), following:  # a Function may run a model again
                found = seen_grad(loss, params, allow_unused=True)
            grads = [_with_inner(g, p) for g, p in zip(found, params, strict=True)]
            if any(g is not None for g in grads):
                problem.reached.append(True)
            collector.put([(torch.zeros_like(p) if g is None else g)[None] for p, g in zip(params, grads, strict=True)])
        if i == 0 and warning is not None:  # a sample alone works, so it was vmap that refused
            _warn(warning)
        outcome = Outcome(loss.detach()[None].clone(), [a[None] for a in aux], spec)
        yield Group(torch.full((1,), i, device=loss.device), collector, outcome)


def _with_inner(grad: Tensor | None, param: Tensor) -> Tensor | None:
    """A gradient, and what a backward inside the backward has added to the parameter's own."""
    if param.grad is None:
        return grad
    return param.grad if grad is None else grad + param.grad


def _called(one: Problem, params: list[Tensor], following: Following) -> tuple[list[Holding], Sampled]:
    """`fn` for one sample; and what models held meanwhile."""
    HELD.looping += 1
    try:
        with _drawing_of(one), recorded() as held, eagerly():
            loaded = is_loaded()
            try:
                return held, one.call(params, one.copied().sample(0), following)
            finally:
                if not loaded and is_loaded():
                    raise CompilerLoaded
    except StopIteration as error:
        raise _Carried(error) from None
    except RuntimeError as error:
        if "not require grad" not in str(error) or isinstance(error, PsgradError):
            raise
        raise UnsupportedOpError(
            f"torch.autograd says in fn: {reason_of(error)}\n"
            f"  called at {place_of(error)}\n"
            "  fn gets its sample without a graph, even where the batch requires grad: "
            "differentiate by it with torch.func.grad in fn."
        ) from error
    finally:
        HELD.looping -= 1


def callers_level() -> int:
    """How far up the stack the user's call is, for a warning that points there."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "psgrad",
        "contextlib",
    ):
        depth, frame = depth + 1, frame.f_back
    return depth
