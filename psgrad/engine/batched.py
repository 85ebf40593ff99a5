"""All samples at once: one vmapped forward under the mode, one ordinary backward.

Samples are independent under vmap, so the gradient of the *sum* of the losses that arrives at an op is each sample's
own.
"""

from collections.abc import Callable
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..errors import PsgradError, UnsupportedOpError, is_out_of_memory
from ..registry.params import Source
from ..torch_ import autograd, levels
from ..torch_.compiler import CompilerLoaded, eagerly, is_loaded
from ..torch_.functions import opened
from ..torch_.storage import expanded, is_view, storage_of, version_of
from ..torch_.watching import WATCHING
from .checkpoint import Following
from .collectors import Collector, Relay
from .mode import Mode, RunOptions
from .problem import Problem, Sampled, rewind
from .rule_call import UseRecord
from .signals import Diverged, NeedsLoop, Rerun
from .writes import refuse_lost_writes

_contiguous: Callable[[Tensor], Tensor] = Tensor.contiguous
_leaf_of: Callable[[Source], Tensor] = attrgetter("leaf")


class Outcome(NamedTuple):
    """What besides gradients came out: losses (N,), and aux with a leading N."""

    values: Tensor
    aux: list[Tensor]
    aux_spec: optree.PyTreeSpec | None
    looped: tuple[str, ...] = ()  # ops that ran in a loop over samples, in words


def run_together(
    problem: Problem,
    collector: Any,
    log: list[UseRecord] | None = None,
    *,
    on_copies: bool = False,
    run: Callable[..., Any] | None = None,
) -> Any:
    """All samples at once; `on_copies`: `fn` changes its sample in place, so each attempt gets a copy.

    `run`: what to do in place of a forward and a backward, `run_pass`, whose outcome this gives.
    """
    options = RunOptions(save_memory=True) if problem.save_memory else _USUAL
    logged = 0 if log is None else len(log)
    while True:
        given = problem.copied() if on_copies else problem
        try:
            return (run or run_pass)(given, collector, options, log)
        except Rerun as rerun:
            options = options._replace(**{rerun.option: True})  # each is asked for once
        except CompilerLoaded:
            pass  # it is known now
        if log is not None:
            del log[logged:]
        if problem.randomness == "same":
            rewind(problem.draws_from)


def run_pass(
    problem: Problem, collector: Collector, options: RunOptions, log: list[UseRecord] | None = None
) -> Outcome:
    """One forward and one backward of all samples; a `Signal` says what else is to be done."""
    with WATCHING, eagerly() if is_loaded() else _NOTHING:
        mode = Mode(problem, collector, options, log)
        losses, aux, aux_spec = _run_forward(problem, mode)
        if losses.requires_grad and _backward(losses, mode, problem.seed):
            problem.reached.append(True)
    values = losses.detach()
    if losses.is_leaf or is_view(losses):  # memory that may be another's
        values = values.clone()
    if aux:
        aux = _owned(aux, [values, *problem.params, *problem.batch])
    looped = tuple([f"{op} {why}" for op, why in mode.looped.items()]) if mode.looped else ()
    return Outcome(values, aux, aux_spec, looped)


_USUAL = RunOptions()
_NOTHING = nullcontext()


def _run_forward(problem: Problem, mode: Mode) -> Sampled:
    """`fn` of all samples at once, with a sample axis in front of what it gives."""
    n, callers = problem.n, problem.params + mode.batch  # what `fn` must not write to
    if not all(problem.batched):
        callers = [t for t in callers if isinstance(t, Tensor)]
    before = list(map(version_of, callers))
    roots = list(map(_contiguous, problem.params))
    try:
        leaves = [p.expand(n, *p.shape).requires_grad_() for p in roots]
    except RuntimeError:  # parameters whose memory comes and goes, layer by layer
        leaves = [expanded(p, n).requires_grad_() for p in roots]
    mode.anchor = leaves[0]
    mode.level = level = levels.enter(n, problem.randomness)
    try:
        out = _forward(problem, mode, mode.track_roots(problem.name, roots, leaves))
        losses = levels.lower(out.loss, n, level)
        aux = [levels.unwrap(a, n, level) for a in out.aux] if out.aux else []
    except (Exception, Diverged, NeedsLoop) as error:  # most likely samples are to run in another way, from the start
        told = isinstance(error, PsgradError) or is_out_of_memory(error)
        if not told and list(map(version_of, callers)) != before:
            raise _changed(problem, before, "and has to run more than once") from None
        raise
    finally:
        levels.leave()
    if list(map(version_of, callers)) != before:
        raise _changed(problem, before, "in a way that psgrad did not see")
    mode.draws.check()
    if mode.view_copies:
        refuse_lost_writes(mode)
    return Sampled(losses, aux, out.aux_spec)


def _forward(problem: Problem, mode: Mode, params: list[Tensor]) -> Sampled:
    """`fn`, once, for all samples."""
    level, loaded = mode.level, is_loaded()
    if all(problem.batched):
        sample = levels.wrap_all(problem.batch, level)
    else:
        sample = [levels.wrap(t, level) if b else t for t, b in zip(problem.batch, problem.batched, strict=True)]
    try:
        return problem.call(params, sample, mode)
    finally:
        if not loaded and is_loaded():
            raise CompilerLoaded
        if mode.signal is not None:  # whatever `fn` has made of it
            signal = mode.signal
            mode.signal = None  # in a circle with its traceback it would keep fn's frames alive
            try:
                raise signal
            finally:
                del signal


def _changed(problem: Problem, before: list[int], how: str) -> UnsupportedOpError:
    """The error for a write that passed by the mode: by torch.jit, or inside a Function."""
    now = map(version_of, problem.params)
    names = [name for name, a, b in zip(problem.names, before, now, strict=False) if a != b]
    if names:
        remedy = "per-sample gradients need parameters that stay put: change a clone instead."
        return UnsupportedOpError(f"fn changes {names[0]} in place\n  {remedy}")
    return UnsupportedOpError(f"fn changes its sample in place, {how}\n  change a clone of the sample instead.")


def _owned(results: list[Tensor], others: list[Any]) -> list[Tensor]:
    """`results` as memory of their own: not shared with `others`, with each other, or between samples."""
    taken = {storage_of(t) for t in others if isinstance(t, Tensor)}
    owned = []
    for t in results:
        owned.append(t.clone() if storage_of(t) in taken or not t.is_contiguous() else t)
        taken.add(storage_of(owned[-1]))
    return owned


def _backward(losses: Tensor, mode: Mode, seed: Tensor | None, keep_graph: bool = False) -> bool:
    """Gradients of the losses to the collector; those of functions of parameters pulled back to the parameters.

    `keep_graph`: another backward follows, and the seed says which output this one is of.

    Returns whether a parameter has one.
    """
    collector, leaves = mode.collector, list(map(_leaf_of, mode.sources))
    if seed is not None and not keep_graph:
        # half precision has no room for weights, or these are too far from 1 for any dtype
        short = losses.dtype.itemsize < 4 or collector.weighs_factors
        if short or mode.calls_functions or mode.has_hooks:  # whose backward may not be linear
            collector.weights, seed = seed, None
    seed = torch.ones_like(losses) if seed is None else seed.to(losses.dtype)
    inputs: list[Any] = [*leaves, *mode.deferred.edges]
    if mode.calls_functions:  # Python runs in the backward, perhaps a model whose parameters are its own again
        with _Unchanged(mode.own_parameters):
            found = seen_grad(losses, inputs, seed, allow_unused=True, retain_graph=keep_graph)
    else:
        found = autograd.gradients(losses, inputs, seed, keep_graph)
    grads, cotangents = found[: len(leaves)], found[len(leaves) :]
    mode.deferred.backward(cotangents)
    restrided: list[Any] | None = None
    for source, grad in zip(mode.sources, grads, strict=True):
        if grad is not None:
            restrided = _restrided(losses) if restrided is None else restrided
            if any(leaf is source.leaf for leaf in restrided):
                raise RuntimeError("as_strided of a parameter has no gradient per sample")
            collector.add_dense(source, grad)
            mode.record_unseen(source)
    if len(mode.sources) > mode.roots:
        derived = [source for source in mode.sources[mode.roots :] if collector.has(source)]
        if derived:
            collector.pull(derived, mode.sources[: mode.roots])
    # a rule that runs as a Function hands its factors to the collector and nothing to autograd
    for g in reversed(found):
        if g is not None:
            return True
    return any(source.uses for source in mode.sources)


# ---- several outputs: one forward, a backward for each ---------------------------------------------------


class KeptForward:
    """A forward of all samples, kept for the backward of each output."""

    def __init__(self, mode: Mode, relay: Relay, outputs: Tensor) -> None:
        self.mode, self.relay, self.outputs = mode, relay, outputs
        self.looped = tuple(f"{op} {why}" for op, why in mode.looped.items())

    @property
    def can_repeat(self) -> bool:
        """Whether every backward finds the graph as the first did: where Python runs in it, nobody knows."""
        return not (self.mode.calls_functions or self.mode.has_hooks)

    def backward(self, k: int, collector: Collector) -> Outcome:
        """The gradients of output k, of all samples."""
        problem, outputs = self.mode.problem, self.outputs
        self.relay.to = collector
        if outputs.requires_grad:
            seed = torch.zeros_like(outputs)
            seed[:, k] = 1
            with WATCHING, eagerly() if is_loaded() else _NOTHING:
                if _backward(outputs, self.mode, seed, keep_graph=True):
                    problem.reached.append(True)
        return Outcome(outputs.detach()[:, k].clone(), [], None, self.looped)


def keep_forward(problem: Problem, *, on_copies: bool = False) -> KeptForward:
    """`fn`, which returns a row of outputs, of all samples at once."""
    kept: KeptForward = run_together(problem, Relay(problem), on_copies=on_copies, run=_forward_pass)
    return kept


def _forward_pass(problem: Problem, relay: Relay, options: RunOptions, log: list[UseRecord] | None) -> KeptForward:
    with WATCHING, eagerly() if is_loaded() else _NOTHING:
        mode = Mode(problem, relay, options, log)
        return KeptForward(mode, relay, _run_forward(problem, mode).loss)


seen_grad = opened(torch.autograd.grad)  # not shown to modes itself, so that they are on while its backward runs


class _Unchanged(Following):
    """For a backward of all samples: where it takes a parameter for a constant, the call goes to the loop."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_function__(func, types, args, kwargs)
        except UnsupportedOpError:
            raise NeedsLoop("a Function runs a model again in its backward") from None


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
