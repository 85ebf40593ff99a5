"""per_sample_norms: how large each gradient is."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, overload

import optree
import torch
from torch import Tensor

from ..annotations import Group, P, Randomness
from ..engine.batched import Outcome
from ..engine.collectors import LateNormCollector, NormCollector, NormTakenTooEarly
from ..engine.ladder import join
from ..engine.problem import Problem, generators, rewind
from ..engine.validate import is_nested, validated
from ..errors import ArgumentError, FallbackWarning, place_of, reason_of
from ..factors import assumptions
from ..factors.numerics import norm_of_norms
from ..processes.agreed import agreed
from ..processes.shards import shards_of
from ..streaming.blocks import norm_of_all
from ..streaming.stream import Quantity, Run, counted, dtype_of, in_order, no_values, stream
from ..torch_.compiler import uncompiled
from . import nested


@overload
def per_sample_norms(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    *,
    per_param: Literal[False] = False,
    valid: Tensor | None = None,
    differentiable: bool = False,
    in_dims: Any = 0,
    has_aux: Literal[False] = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    sharded: Any = None,
    group: Group | None = None,
) -> Tensor: ...
@overload
def per_sample_norms(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    *,
    per_param: Literal[True],
    valid: Tensor | None = None,
    differentiable: bool = False,
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
def per_sample_norms(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    *,
    per_param: Literal[False] = False,
    valid: Tensor | None = None,
    differentiable: bool = False,
    in_dims: Any = 0,
    has_aux: Literal[True],
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    sharded: Any = None,
    group: Group | None = None,
) -> tuple[Tensor, Any]: ...
@overload
def per_sample_norms(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    *,
    per_param: Literal[True],
    valid: Tensor | None = None,
    differentiable: bool = False,
    in_dims: Any = 0,
    has_aux: Literal[True],
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    sharded: Any = None,
    group: Group | None = None,
) -> tuple[P, Any]: ...
@overload
def per_sample_norms(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    *,
    per_param: bool = False,
    valid: Tensor | None = None,
    differentiable: bool = False,
    in_dims: Any = 0,
    has_aux: bool = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    sharded: Any = None,
    group: Group | None = None,
) -> Any: ...


@uncompiled
@agreed
def per_sample_norms(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    per_param: bool = False,
    valid: Tensor | None = None,
    differentiable: bool = False,
    in_dims: Any = 0,
    has_aux: bool = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    sharded: Any = None,
    group: Any = None,
) -> Any:
    """The norm of every sample's gradient, at about the price of one backward pass.

    >>> fn = lambda w, x: (w * x).sum() ** 2 / 2
    >>> psgrad.per_sample_norms(fn, torch.tensor([1.0, 1.0]), torch.tensor([[3.0, 4.0], [0.0, 1.0], [1.0, -1.0]]))
    tensor([35.,  1.,  0.])

    Exact, cross terms of parameters that are used more than once included; N x P numbers are never held.
    Sums are taken in float32 at least. A sample whose gradient is not finite has a norm that is not finite,
    and touches no other.

    Args:
        fn, params, batch, in_dims, randomness: as for `per_sample_grads`.
        per_param: the norms of each parameter's gradients, a pytree like params with leaves (N,).
        valid: (N,) booleans; the other samples do not run, and their norms are 0.
        differentiable: the result is attached to the autograd graph of params and batch, for gradient
            penalties. Writes the gradients out, chunk by chunk. Inside a torch.func transform always so. A norm of 0
            has the derivative 0. The graph needs the activations of all samples, so that `max_bytes` has no effect
            then, and `progress` neither.
        has_aux: `fn` returns `(loss, aux)`; aux comes back with a leading sample axis, zeros where not `valid`.
        chunk_size, max_bytes, progress: as for `per_sample_grads`.
        sharded: parameters in pieces, as for `clipped_grad`.
        group: processes that share a batch, as for `clipped_grad`. The norms are of this rank's samples; if a rank
            raises, all do.

    Returns:
        The norms, (N,), or with `per_param` a pytree of them; with `has_aux` `(norms, aux)`.
    """
    attached = differentiable or is_nested()
    problem = validated(
        fn,
        params,
        batch,
        in_dims=in_dims,
        randomness=randomness,
        has_aux=has_aux,
        attached=differentiable,
        save_memory=max_bytes is not None,
    )
    there = counted(problem, valid)
    problem = there.problem
    if differentiable and not is_nested() and not problem.requires_grad:
        raise ArgumentError(
            "differentiable=True, but no leaf of params or batch requires grad\n  call requires_grad_() on some first."
        )
    shards = None if sharded is None else shards_of(sharded, params, max_bytes)
    if attached and shards is not None:
        raise ArgumentError("sharded is given with differentiable=True, which knows of no other rank\n  drop one.")
    if attached and group is not None and group.lockstep is not None:
        raise ArgumentError(
            "differentiable=True, and the parameters of a model under fully_shard are there for a layer at a time\n"
            "  give the model before fully_shard."
        )
    if attached:
        norms, outcome = _attached_norms(problem, nested.step_of(problem, chunk_size, max_bytes), per_param)
    else:
        shown = "per_sample_norms" if progress else None
        norms, outcome = stream(
            Norms(per_param or shards is not None),
            problem,
            chunk_size=chunk_size,
            max_bytes=max_bytes,
            progress=shown,
            ranks=group,
        )
        if shards is not None:
            norms = shards.whole_norms(norms)
            norms = norms if per_param else [norm_of_norms(norms)]
    norms = list(map(there.among_zeros, norms))
    result = optree.tree_unflatten(problem.params_spec, norms) if per_param else norms[0]
    return there.with_aux(result, outcome)


class _Found(NamedTuple):
    """Norms of each chunk, and what they are where there is none."""

    chunks: list[list[Tensor]]
    none: list[Tensor]


@dataclass(eq=False)
class Norms(Quantity[_Found, list[Tensor]]):
    """Norms (N,) of the gradients of all parameters, or of each; factors are let go as they come."""

    name = "norms"
    per_param: bool = False

    def start(self, whole: Problem, step: int) -> _Found:
        return _Found([], [no_values(whole) for _ in whole.params] if whole.n == 0 else [])

    def add(self, state: _Found, rows: slice, chunk: Problem, run: Run) -> Outcome:
        norms, outcome = norms_of_chunk(chunk, run, self.per_param)
        state.chunks.append(norms)
        return outcome

    def finish(self, state: _Found) -> list[Tensor]:
        if len(state.chunks) == 1:
            return state.chunks[0]
        return [torch.cat(parts) for parts in zip(*state.chunks, strict=True)] or state.none


def norms_of_chunk(
    chunk: Problem, run: Run, per_param: bool = False, repeats_draws: bool = False
) -> tuple[list[Tensor], Outcome]:
    """Norms (N,), or those of each parameter, and what came out besides.

    `repeats_draws`: whatever way they are found, random numbers are drawn from where the generators are now.
    """
    waits = assumptions.waits(chunk.params[0])
    draws = generators(chunk.params) if repeats_draws or waits else {}
    if waits:
        with assumptions.doubted() as doubts:
            found = _norms_by(NormCollector, chunk, run, per_param, draws)
        if assumptions.hold(doubts):
            return found
        rewind(draws)
    return _norms_by(NormCollector, chunk, run, per_param, draws)


def _norms_by(
    collector: type[NormCollector], chunk: Problem, run: Run, per_param: bool, draws: Any
) -> tuple[list[Tensor], Outcome]:
    """Norms taken as factors come; where one was taken too early, all once more, from factors that are kept."""
    found: list[list[Tensor]] = []
    places: list[Tensor | None] = []
    outcomes: list[Outcome] = []
    dtype, device = dtype_of(chunk), chunk.params[0].device
    try:
        for own, taken, outcome in run(chunk, collector):
            rows: list[Any] = taken.norms() if per_param else [norm_of_all(taken.norms())]
            for i, t in enumerate(rows):
                if t is None:
                    rows[i] = torch.zeros(outcome.values.shape[0], dtype=dtype, device=device)
                elif t.device != device:
                    rows[i] = t.to(device, dtype)
                elif t.dtype is not dtype:
                    rows[i] = t.to(dtype)
            found.append(rows)
            places.append(own)
            outcomes.append(outcome)
    except NormTakenTooEarly:
        rewind(draws)
        return _norms_by(LateNormCollector, chunk, run, per_param, draws)
    if places[0] is None:  # as in most calls
        return found[0], outcomes[0]
    return in_order(found, places, chunk.n), join(outcomes, places)


def _attached_norms(problem: Problem, step: int, per_param: bool) -> tuple[list[Tensor], Outcome]:
    """The norms as a differentiable function of params and batch; and what came out besides."""
    if is_nested():
        return nested.norms(problem, step, per_param)
    try:
        return nested.norms(problem, step, per_param)
    except Exception as error:
        why, where = reason_of(error), place_of(error)
        grads, outcome = _looped_grads(problem)
        warnings.warn(
            f"psgrad runs fn in a loop over samples: exact, but slow\n  vmap refused at {where}: {why}",
            FallbackWarning,
            stacklevel=3,
        )
    parts = [[g] for g in grads] if per_param else [grads]
    return [nested.norms_of_rows(part, dtype_of(problem)) for part in parts], outcome


def _looped_grads(problem: Problem) -> tuple[list[Tensor], Outcome]:
    """Gradients with their graph, one sample after the other; and what came out besides."""
    rows, outcomes = [], []
    for i in range(problem.n):
        params = [p if p.requires_grad else p.detach().requires_grad_() for p in problem.params]
        loss, aux, spec = problem.call(params, problem.sample(i))
        rows.append(torch.autograd.grad(loss, params, create_graph=True, materialize_grads=True))
        outcomes.append(Outcome(loss.detach()[None].clone(), [a[None].clone() for a in aux], spec))
    return [torch.stack(column) for column in zip(*rows, strict=True)], join(outcomes)
