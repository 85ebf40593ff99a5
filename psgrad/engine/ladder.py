"""One vmapped forward, one ordinary backward: the factors of every parameter.

The ladder, each step exact: a rule for the use -> plain vmap of that use -> a loop over samples for the
whole call. Where samples disagree on a branch, the batch is split and each part runs on its own.
"""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import optree
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
)
from ..registry.params import Source
from ..torch_ import autograd, levels
from ..torch_.autograd import FUNCTIONS_SEEN
from ..torch_.compiler import CompilerLoaded, compilers_noticed, eagerly
from ..torch_.functions import opened
from ..torch_.storage import is_view, storage_of, version_of, versions_of
from .checkpoint import Following
from .collectors import DenseCollector, FactorCollector, NormCollector, SumCollector
from .held import Holding, OwnParameters, again, recorded
from .mode import Diverged, Intercept, Retry, Written, reason_of
from .op_loop import Unlooped
from .problem import Problem, Sampled, generators, rewind
from .rule_call import Use

S = TypeVar("S", DenseCollector, FactorCollector, NormCollector, SumCollector)


class Outcome(NamedTuple):
    """What besides gradients came out: losses (N,), and aux with a leading N."""

    values: Tensor
    aux: list[Tensor]
    aux_spec: optree.PyTreeSpec | None
    looped: tuple[str, ...] = ()  # ops that ran in a loop over samples, in words


def differentiating(problem: Problem | None = None) -> contextlib.AbstractContextManager[Any]:
    """Gradients work inside, whatever the caller has switched off.

    A caller who gives `problem` answers it inside: if then no parameter had a gradient, a warning says so.
    """
    answering = contextlib.nullcontext() if problem is None else _Answering(problem)
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        return answering
    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.enable_grad())
    stack.enter_context(answering)
    return stack


class _Answering:
    """Warns at its end where the samples of `problem` ran, and no parameter had a gradient for any of them."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, *_: object) -> None:
        if not self.problem.reached and self.problem.n and kind is None:
            warnings.warn(
                "the loss depends on no parameter, so every gradient is zero\n"
                "  compute it from the params that fn is given; .detach(), .item() and torch.no_grad() cut them off.",
                UnusedParametersWarning,
                stacklevel=_callers_level(),
            )


@dataclass(eq=False, slots=True)  # not frozen, which costs; nobody changes one
class Part(Generic[S]):
    """Samples that ran together: which rows of the problem they are, in that order, and what came out."""

    index: Tensor | None  # None: all
    sink: S
    outcome: Outcome


def run(
    problem: Problem,
    sink: Callable[[Problem], S],
    take: Callable[[Part[S]], None],
    *,
    quiet: bool = False,
    writes: bool = False,
) -> None:
    """Per-sample gradients, part by part: each goes to `take`, with a sink of its own.

    One part of all samples where that can be. `quiet` keeps fallbacks to itself; `writes`: `fn` changes its
    sample in place, so each attempt gets a copy.
    """
    found = _attempt(problem, sink(problem), writes)
    if isinstance(found, Part):
        if found.outcome.looped and not quiet:
            _warn(
                "psgrad runs a part of fn in a loop over samples: exact, slower there\n  "
                + "\n  ".join(found.outcome.looped)
            )
        take(found)
    elif found.writes:
        run(problem, sink, take, quiet=quiet, writes=True)
    elif not found.groups:
        reason = f"psgrad runs fn in a loop over samples: exact, but slow\n  vmap refused at {found.where}: {found.why}"
        _looped(problem, sink, take, None if quiet else reason)
    else:
        if len(found.groups) > max(8, problem.n // 2) and not quiet:
            _warn(f"psgrad splits {problem.n} samples into {len(found.groups)} groups, which disagree at {found.where}")
        for index in found.groups:  # each on its own
            run(problem.rows(index), sink, partial(_take_of, take, index), quiet=quiet, writes=writes)


def _take_of(take: Callable[[Part[S]], None], index: Tensor, part: Part[S]) -> None:
    """A part of the samples `index` as a part of all."""
    take(replace(part, index=index if part.index is None else index[part.index.to(index.device)]))


class _Refusal(NamedTuple):
    """Why the samples cannot run all at once, in words: an exception's traceback would hold the attempt's tensors."""

    groups: list[Tensor]  # samples that agree on a branch
    where: str = ""
    why: str = ""
    writes: bool = False


def _attempt(problem: Problem, sink: S, writes: bool) -> Part[S] | _Refusal:
    attempt = problem.copied() if writes else problem
    versions = versions_of(problem.batch)
    try:
        if problem.randomness == "different":
            return Part(None, sink, vmapped(attempt, sink))
        with _draws(problem):
            return Part(None, sink, vmapped(attempt, sink))
    except Diverged as diverged:
        refusal = _Refusal(diverged.groups, place_of(diverged))
    except Written:
        return _Refusal([], writes=True)
    except Unlooped as unlooped:
        refusal = _Refusal([], place_of(unlooped), unlooped.why)
    except PsgradError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if problem.randomness == "error" and "randomness error mode" in str(error):
            raise _drawing(place_of(error)) from None
        refusal = _Refusal([], place_of(error), reason_of(error))
    if versions_of(problem.batch) != versions:
        raise UnsupportedOpError(
            "fn changes its sample in place, and has to run more than once\n  change a clone of the sample instead."
        )
    return refusal


def _warn(message: str) -> None:
    warnings.warn(message, FallbackWarning, stacklevel=_callers_level())


def vmapped(problem: Problem, sink: Any, log: list[Use] | None = None) -> Outcome:
    """All samples at once."""
    settings: list[str] = []
    while True:
        try:
            with eagerly(), FUNCTIONS_SEEN:
                return _through(problem, sink, log, settings)
        except Retry as retry:
            settings.append(retry.setting)  # each is asked for once
        except CompilerLoaded:
            pass  # `eagerly` knows of it now
        if log is not None:
            log.clear()
        if problem.randomness == "same":
            rewind(problem.draws_from)


def _through(problem: Problem, sink: Any, log: list[Use] | None, settings: list[str]) -> Outcome:
    """One forward and one backward."""
    n = problem.n
    own = OwnParameters(problem.params, lambda: problem.names)
    mode = Intercept(n, problem.randomness, sink, log, problem.frugal or "frugal" in settings, own)
    if settings:
        mode.lifts, mode.repeats = "lifts" in settings, "repeats" in settings
    mode.lasting = problem.lasting
    roots = [p.contiguous() for p in problem.params]
    leaves = [p.expand(n, *p.shape).requires_grad_() for p in roots]
    mode.anchor = leaves[0]
    with levels.vmap_level(n, problem.randomness) as level:
        mode.level, mode.roots = level, len(roots)
        if not problem.own_batch:
            mode.batch = problem.batch
        wrapped = [
            mode.track(Source(i, problem.name, p, leaf)) for i, (p, leaf) in enumerate(zip(roots, leaves, strict=True))
        ]
        sample = [levels.wrap(t, level) if b else t for t, b in zip(problem.batch, problem.batched, strict=True)]
        with compilers_noticed():
            out = problem.call(wrapped, sample, mode)
        losses = levels.unwrap(out.loss, n, level)
        aux = [levels.unwrap(a, n, level) for a in out.aux]
    if losses.requires_grad and _backward(losses, mode, len(roots), sink, problem.seed):
        problem.reached.append(True)
    values = losses.detach()
    if losses.is_leaf or is_view(losses):  # memory that may be another's
        values = values.clone()
    if aux:
        aux = _owned(aux, [values, *problem.params, *problem.batch])
    looped = tuple([f"{op} {why}" for op, why in mode.looped.items()]) if mode.looped else ()
    return Outcome(values, aux, out.aux_spec, looped)


def _owned(results: list[Tensor], others: list[Any]) -> list[Tensor]:
    """`results` as memory of their own: not shared with `others`, with each other, or between samples."""
    taken = {storage_of(t) for t in others if isinstance(t, Tensor)}
    owned = []
    for t in results:
        owned.append(t.clone() if storage_of(t) in taken or not t.is_contiguous() else t)
        taken.add(storage_of(owned[-1]))
    return owned


def _backward(losses: Tensor, mode: Intercept, count: int, sink: Any, seed: Tensor | None) -> bool:
    """Gradients of the losses to the sink; those of functions of parameters pulled back to the parameters.

    Samples are independent under vmap, so the gradient of the sum of the losses is every sample's own.
    Returns whether a parameter has one.
    """
    leaves = [source.leaf for source in mode.sources]
    if seed is not None and (losses.dtype.itemsize < 4 or mode.functions or mode.hooks):
        sink.weights, seed = seed, None  # float16 may not hold them; a backward of the user's may not be linear
    seed = torch.ones_like(losses) if seed is None else seed.to(losses.dtype)
    inputs: list[Any] = [*leaves, *mode.tape.edges]
    if mode.functions:  # Python runs in the backward, perhaps a model whose parameters are its own again
        with _Unchanged(mode.own_parameters):
            found = _seen_grad(losses, inputs, seed, allow_unused=True)
    else:
        found = autograd.gradients(losses, inputs, seed)
    grads, cotangents = found[: len(leaves)], found[len(leaves) :]
    mode.tape.backward(cotangents)
    restrided: list[Any] | None = None
    for source, grad in zip(mode.sources, grads, strict=True):
        if grad is not None:
            restrided = _restrided(losses) if restrided is None else restrided
            if any(leaf is source.leaf for leaf in restrided):
                raise RuntimeError("as_strided of a parameter has no gradient per sample")
            sink.add_dense(source, grad)
            mode.note_unseen(source)
    derived = [source for source in mode.sources[count:] if sink.has(source)]
    if derived:
        sink.pull(derived, mode.sources[:count])
    # a rule that runs as a Function hands its factors to the sink and nothing to autograd
    for g in reversed(found):
        if g is not None:
            return True
    return any(source.uses for source in mode.sources)


_seen_grad = opened(torch.autograd.grad)  # modes are not asked, and so are on while the backward runs


class _Unchanged(Following):
    """For a backward of all samples: what would be a parameter taken for a constant sends the call to the loop."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except UnsupportedOpError:
            raise Unlooped("a Function runs a model again in its backward") from None


def _restrided(losses: Tensor) -> list[Any]:
    """The leaves to which as_strided was applied, straight or through views, behind the mode's back.

    Its backward takes the samples of a stride-0 leaf for overlapping memory, and averages over them.
    """
    found, seen, todo = [], set(), [losses.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        below = [n for n, _ in node.next_functions]
        todo += below
        if node.name().startswith("AsStrided"):
            while len(below) == 1 and below[0] is not None:
                found.append(getattr(below[0], "variable", None))
                below = [n for n, _ in below[0].next_functions]
    return found


# ---- where vmap cannot ----------------------------------------------------------------------------------


@contextlib.contextmanager
def generators_kept(problem: Problem) -> Iterator[None]:
    """Inside, random numbers are drawn; after, the generators are as they were."""
    before = generators(problem.params)
    try:
        yield
    finally:
        rewind(before)


@contextlib.contextmanager
def _draws(problem: Problem) -> Iterator[None]:
    """What `randomness` says of a part of the samples: "same" lets every part draw what the first drew."""
    if problem.randomness == "same":
        rewind(problem.draws_from)
        yield
    elif problem.randomness == "error":
        before = generators(problem.params)
        yield
        after = generators(problem.params)
        if not all(torch.equal(state, after[device]) for device, state in before.items()):
            raise _drawing("an unknown place")
    else:
        yield


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
    with torch.no_grad(), generators_kept(problem):
        out = problem.call([p.clone() for p in problem.params], sample)
    return Outcome(out.loss.new_empty(0), [a.new_empty(0, *a.shape) for a in out.aux], out.aux_spec)


def _looped(
    problem: Problem, sink: Callable[[Problem], S], take: Callable[[Part[S]], None], warning: str | None
) -> None:
    """One sample after the other, by ordinary autograd. An error that `fn` raises there is the user's own."""
    follow = Following(OwnParameters(problem.params, lambda: problem.names))
    for i in range(problem.n):
        one = problem.rows(slice(i, i + 1))
        copies = [p.clone() for p in problem.params]  # whatever fn does to them stays here
        params = [p.detach().requires_grad_() for p in copies]
        try:
            held, (loss, aux, spec) = _one_by_one(problem, one, params, follow)
        except CompilerLoaded:
            held, (loss, aux, spec) = _one_by_one(problem, one, params, follow)
        for name, p in zip(problem.names, copies, strict=True) if any(versions_of(copies)) else ():
            if version_of(p):
                raise UnsupportedOpError(
                    f"fn changes {name} in place\n"
                    "  per-sample gradients need parameters that stay put: change a clone instead."
                )
        row = sink(one)
        if loss.requires_grad:
            if one.seed is not None and isinstance(row, SumCollector):
                row.weights = one.seed  # not into the backward, which need not be linear
            with again(held), follow:  # a Function may run a model again
                grads = _seen_grad(loss, params, allow_unused=True)
            if any(g is not None for g in grads):
                problem.reached.append(True)
            row.put([(torch.zeros_like(p) if g is None else g)[None] for p, g in zip(params, grads, strict=True)])
        if i == 0 and warning is not None:  # a sample alone works, so it was vmap that refused
            _warn(warning)
        outcome = Outcome(loss.detach()[None].clone(), [a[None] for a in aux], spec)
        take(Part(torch.full((1,), i, device=loss.device), row, outcome))


def _one_by_one(
    problem: Problem, one: Problem, params: list[Tensor], follow: Following
) -> tuple[list[Holding], Sampled]:
    """`fn` for one sample; and what models held meanwhile."""
    with _draws(problem), recorded() as held, eagerly(), compilers_noticed():
        return held, problem.call(params, one.copied().sample(0), follow)


def _callers_level() -> int:
    """How far up the stack the user's call is, for a warning that points there."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "psgrad",
        "contextlib",
    ):
        depth, frame = depth + 1, frame.f_back
    return depth
