"""One vmapped forward, one ordinary backward: the factors of every parameter.

The ladder, each step exact: a rule for the use -> plain vmap of that use -> a loop over samples for the
whole call. Where samples disagree on a branch, the batch is split and each part runs on its own.
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from . import _functorch as ft
from ._errors import FallbackWarning, PsgradError, place_of
from ._intercept import Diverged, Intercept, Use
from ._param import Source
from ._problem import Problem, Sampled
from ._sink import DenseSink


class Outcome(NamedTuple):
    """What besides gradients came out: losses (N,), and aux with a leading N."""

    values: Tensor
    aux: list[Tensor]
    aux_spec: optree.PyTreeSpec | None


@contextlib.contextmanager
def differentiating() -> Iterator[None]:
    """Gradients work inside, whatever the caller has switched off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def run(problem: Problem, sink: DenseSink) -> Outcome:
    """Per-sample gradients into `sink`."""
    try:
        with _draws(problem):
            return vmapped(problem, sink)
    except Diverged as diverged:
        groups = diverged.groups
    except PsgradError:
        raise
    except Exception as error:
        if _is_out_of_memory(error):
            raise
        return _looped(problem, sink, error)
    return _split(problem, sink, groups)


def vmapped(problem: Problem, sink: Any, log: list[Use] | None = None) -> Outcome:
    """All samples at once."""
    n = problem.n
    mode = Intercept(n, problem.randomness, sink, log)
    roots = [p.contiguous().detach().requires_grad_() for p in problem.params]
    leaves = [p.detach().expand(n, *p.shape).requires_grad_() for p in roots]
    batch = [t for t, b in zip(problem.batch, problem.batched, strict=True) if b]
    spec: list[optree.PyTreeSpec | None] = [None]

    def sampled(wrapped: list[Tensor], rows: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        level = ft.current_level()
        assert level is not None
        mode.level = level
        for i, (name, root, leaf, w) in enumerate(zip(problem.names, roots, leaves, wrapped, strict=True)):
            mode.track(Source(i, name, root, leaf), w)
        each = iter(rows)
        sample = [next(each) if b else t for t, b in zip(problem.batch, problem.batched, strict=True)]
        with mode:
            out = problem.call(wrapped, sample)
        spec[0] = out.aux_spec
        return out.loss, out.aux

    losses, aux = torch.vmap(sampled, randomness=problem.randomness)(leaves, batch)
    if losses.requires_grad:
        _backward(losses, mode, roots, sink)
    return Outcome(losses.detach(), aux, spec[0])


def _backward(losses: Tensor, mode: Intercept, roots: list[Tensor], sink: Any) -> None:
    """Gradients of the losses to the sink; those of functions of parameters pulled back to the parameters.

    Samples are independent under vmap, so the gradient of the sum of the losses is every sample's own.
    """
    leaves = [source.leaf for source in mode.sources]
    grads = torch.autograd.grad(losses, [mode.anchor, *leaves], torch.ones_like(losses), allow_unused=True)[1:]
    for source, grad in zip(mode.sources, grads, strict=True):
        if grad is not None:
            sink.add_dense(source, grad)
    derived = [source for source in mode.sources[len(roots) :] if sink.has(source)]
    if derived:
        rows = [sink.take(source) for source in derived]
        values = [source.value for source in derived]
        pulled = torch.autograd.grad(values, roots, rows, is_grads_batched=True, allow_unused=True)
        for source, grad in zip(mode.sources, pulled, strict=False):
            if grad is not None:
                sink.add_dense(source, grad)


# ---- where vmap cannot ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _draws(problem: Problem) -> Iterator[None]:
    """With randomness="same", leave the generators as they were: the next part draws the same again."""
    if problem.randomness != "same":
        yield
        return
    devices = {p.device for p in problem.params if p.device.type != "cpu"}
    kind = next(iter(devices)).type if devices else "cuda"
    with torch.random.fork_rng([d.index for d in devices], device_type=kind):
        yield


def _split(problem: Problem, sink: DenseSink, groups: list[Tensor]) -> Outcome:
    """Each group of samples on its own, put back in order."""
    values: Tensor | None = None
    aux: list[Tensor] = []
    outcome: Outcome | None = None
    for index in groups:
        part = DenseSink(sink.sources_of(problem), len(index))
        outcome = run(problem.rows(index), part)
        sink.put(index, part)
        if values is None:
            values = outcome.values.new_empty(problem.n)
            aux = [a.new_empty(problem.n, *a.shape[1:]) for a in outcome.aux]
        values.index_copy_(0, index.to(values.device), outcome.values)
        for whole, rows in zip(aux, outcome.aux, strict=True):
            whole.index_copy_(0, index.to(whole.device), rows)
    assert values is not None and outcome is not None
    return Outcome(values, aux, outcome.aux_spec)


def _looped(problem: Problem, sink: DenseSink, reason: Exception) -> Outcome:
    """One sample after the other, by ordinary autograd. An error that `fn` raises there is the user's own."""
    outs: list[Sampled] = []
    sink.reset()
    for i in range(problem.n):
        with _draws(problem):
            params = [p.detach().requires_grad_() for p in problem.params]
            out = problem.call(params, problem.sample(i))
        if i == 0:  # a sample alone works, so it was vmap that refused
            why = str(reason).strip().splitlines()[0] if str(reason).strip() else type(reason).__name__
            warnings.warn(
                f"psgrad runs fn in a loop over samples: exact, but slow\n  vmap refused at {place_of(reason)}: {why}",
                FallbackWarning,
                stacklevel=_callers_level(),
            )
        grads = torch.autograd.grad(out.loss, params, materialize_grads=True) if out.loss.requires_grad else None
        sink.put_row(i, grads)
        outs.append(Sampled(out.loss.detach(), out.aux, out.aux_spec))
    values = torch.stack([out.loss for out in outs])
    aux = [torch.stack(leaves) for leaves in zip(*(out.aux for out in outs), strict=True)]
    return Outcome(values, aux, outs[0].aux_spec)


def _callers_level() -> int:
    """How far up the stack the user's call is, for a warning that points there."""
    import sys

    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "psgrad",
        "contextlib",
    ):
        depth, frame = depth + 1, frame.f_back
    return depth


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
