"""What people compute from per-sample gradients, in one call each, without writing the gradients out."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, overload

import optree
import torch
from torch import Tensor

from ..annotations import Nonfinite, P, Randomness
from ..engine import ladder as _engine
from ..engine import problem as _problem
from ..engine.problem import Problem, generators, rewind
from ..errors import ArgumentError, ArgumentTypeError, FallbackWarning, place_of
from ..factors.numerics import flat
from ..streaming import chunks as _chunk
from ..streaming.budget import Run, Work
from ..torch_ import levels
from ..torch_.compiler import uncompiled
from ..torch_.storage import storage_of
from .factored import (
    FactoredGrads,
    add_sums,
    blocks_joined,
    bounds_of,
    check_nonfinite,
    clip_weights,
    finite_of,
    norms_under,
    refuse_nonfinite,
)
from .grads import check_step, composed, step_of


@uncompiled
def factored_grads(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    *,
    in_dims: Any = 0,
    has_aux: bool = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
) -> FactoredGrads[P]:
    """Per-sample gradients that are not written out, to ask any number of questions of.

    >>> model = torch.nn.Linear(100, 50)
    >>> fn, params = psgrad.from_module(model, torch.nn.functional.cross_entropy)
    >>> fg = psgrad.factored_grads(fn, params, (torch.randn(8, 100), torch.randint(50, (8,))))
    >>> fg
    FactoredGrads(8 samples x 5,050 parameters, holding 4,800 bytes; dense 161,600)
    >>> fg.norms().shape, fg.dots().shape, fg.clipped_sum(1.0)["weight"].shape
    (torch.Size([8]), torch.Size([8, 8]), torch.Size([50, 100]))

    One forward and one backward. What is held are the inputs of layers and the gradients of their outputs, or
    the gradients themselves where these are smaller: for a linear layer N x (I + O) numbers in place of
    N x I x O.

    Args:
        fn, params, batch, in_dims, has_aux, randomness: as for `per_sample_grads`.
        chunk_size: how many samples to run at once. The factors of all chunks are kept.
        max_bytes: a bound on what is allocated beyond inputs and result; the chunk size is worked out from it.

    Returns:
        A `FactoredGrads`; its `values` are the losses, its `aux` what `fn` returned besides.
    """
    _chunk.refuse_inside_transforms("factored_grads")
    problem = _problem.make(
        fn, params, batch, in_dims=in_dims, randomness=randomness, has_aux=has_aux, frugal=max_bytes is not None
    )
    problem.lasting = True
    step = step_of(problem, chunk_size, max_bytes, _chunk.work("factored", _chunk.factored))
    with _engine.differentiating(problem):
        blocks, outcomes = [], []
        for _, chunk in _chunk.chunks(problem, step):
            own, outcome = _chunk.kept(chunk)
            blocks.append((own, chunk.n))
            outcomes.append(outcome)
        whole = blocks_joined(blocks, problem.params[0].device)
        return _own(_chunk.asked(problem, whole, _chunk.joined(problem, outcomes)), problem)


def _own(fg: FactoredGrads, problem: Problem) -> FactoredGrads:
    """The same without memory that is the caller's, who may change it."""
    theirs = {storage_of(t) for t in (*problem.params, *problem.batch) if isinstance(t, Tensor)}

    def owned(t: Tensor) -> Tensor:
        if len(t) > 1 and t.stride(0) == 0:  # the same for all samples: a parameter, or what fn closes over
            return t[:1].clone().expand(t.shape)
        # a single row has no stride that would tell
        return t.clone() if len(t) == 1 or storage_of(t) in theirs else t

    blocks = [block.each(owned) for block in fg._blocks]
    return FactoredGrads(tuple(blocks), fg._metas, fg._spec, fg._n, fg.values, fg.aux)


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
) -> tuple[Tensor, Any]: ...
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
) -> Any: ...


@uncompiled
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
            penalties. Writes the gradients out, chunk by chunk. Inside a torch.func transform always so. The graph
            needs the activations of all samples, so that `max_bytes` has no effect then.
        has_aux: `fn` returns `(loss, aux)`; aux comes back with a leading sample axis, zeros where not `valid`.
        chunk_size, max_bytes: as for `per_sample_grads`.

    Returns:
        The norms, (N,), or with `per_param` a pytree of them; with `has_aux` `(norms, aux)`.
    """
    attached = differentiable or levels.current_level() is not None
    problem = _problem.make(
        fn,
        params,
        batch,
        in_dims=in_dims,
        randomness=randomness,
        has_aux=has_aux,
        attached=differentiable,
        frugal=max_bytes is not None,
    )
    n, (problem, index) = problem.n, _chunk.counting(problem, valid)
    if differentiable and levels.current_level() is None and not problem.requires_grad:
        raise ArgumentError(
            "differentiable=True, but no leaf of params or batch requires grad\n  call requires_grad_() on some first."
        )
    if attached:
        check_step(problem, chunk_size, max_bytes)
        norms, outcome = _attached_norms(problem, min(chunk_size or problem.n, problem.n), per_param)
    else:
        step = step_of(problem, chunk_size, max_bytes, _chunk.work("norms", _chunk.norms))
        with _engine.differentiating(problem):
            found = [_chunk.norms(chunk, per_param=per_param) for _, chunk in _chunk.chunks(problem, step)]
            outcome = _chunk.joined(problem, [outcome for _, outcome in found])
        rows = [own for own, _ in found] or [[_chunk.no_values(problem) for _ in problem.params]]
        norms = rows[0] if len(rows) == 1 else [torch.cat(parts) for parts in zip(*rows, strict=True)]
    norms = [_chunk.spread_out(t, index, n) for t in norms]
    result = optree.tree_unflatten(problem.params_spec, norms) if per_param else norms[0]
    return _chunk.with_aux(result, outcome, index, n)


def _attached_norms(problem: Problem, step: int, per_param: bool) -> tuple[list[Tensor], _engine.Outcome]:
    """The norms as a differentiable function of params and batch; and what came out besides."""
    if problem.n == 0:
        none = [problem.params[0].new_empty(0)] * (len(problem.params) if per_param else 1)
        return none, _engine.no_outcome(problem)
    if levels.current_level() is not None:
        grads, outcome = composed(problem, step)
    else:
        try:
            grads, outcome = composed(problem, step)
        except Exception as error:
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            where = place_of(error)
            grads, outcome = _looped_grads(problem)
            warnings.warn(
                f"psgrad runs fn in a loop over samples: exact, but slow\n  vmap refused at {where}: {why}",
                FallbackWarning,
                stacklevel=3,
            )
    each = [torch.linalg.vector_norm(flat(g), dim=1) for g in grads]
    norms = each if per_param else [torch.linalg.vector_norm(torch.stack(each), dim=0)]  # at 0 its gradient is 0
    return norms, outcome


def _looped_grads(problem: Problem) -> tuple[list[Tensor], _engine.Outcome]:
    """Gradients with their graph, one sample after the other; and what came out besides."""
    rows, outcomes = [], []
    for i in range(problem.n):
        params = [p if p.requires_grad else p.detach().requires_grad_() for p in problem.params]
        loss, aux, spec = problem.call(params, problem.sample(i))
        rows.append(torch.autograd.grad(loss, params, create_graph=True, materialize_grads=True))
        outcomes.append(_engine.Outcome(loss.detach()[None].clone(), [a[None].clone() for a in aux], spec))
    return [torch.stack(column) for column in zip(*rows, strict=True)], _engine.join(outcomes)


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
) -> tuple[P, Any]: ...


@uncompiled
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

    Args:
        fn, params, batch, in_dims, randomness, chunk_size, max_bytes: as for `per_sample_grads`.
        weights: (N,), or a function of the norms.
        valid: (N,) booleans; the other samples do not run.
        has_aux: `fn` returns `(loss, aux)`; aux comes back with a leading sample axis, zeros where not `valid`.

    Returns:
        A pytree like params; with `has_aux` `(grad, aux)`.
    """
    _chunk.refuse_inside_transforms("weighted_grad")
    problem = _problem.make(
        fn, params, batch, in_dims=in_dims, randomness=randomness, has_aux=has_aux, frugal=max_bytes is not None
    )
    n, (problem, index) = problem.n, _chunk.counting(problem, valid)

    def given(weights: Any) -> Tensor:
        return _checked_weights(weights, n, index, problem)

    with _engine.differentiating(problem):
        if not callable(weights):
            step = step_of(problem, chunk_size, max_bytes, partial(_chunk.summing, "sums", _chunk.sums))
            totals, outcome = _weighted(problem, given(weights), step)
        else:
            step = step_of(problem, chunk_size, max_bytes, _clip_work)
            totals, outcome = _weighted_by_norms(
                problem, lambda norms: given(weights(_chunk.spread_out(norms, index, n))), step
            )
        return _chunk.with_aux(_chunk.finished(problem, totals), outcome, index, n)


def _weighted_by_norms(
    problem: Problem, weights: Callable[[Tensor], Tensor], step: int
) -> tuple[list[Tensor | None], _engine.Outcome]:
    """The gradients summed with weights that depend on their norms; and what came out besides."""
    if step >= problem.n > 0:
        blocks, outcome = _chunk.kept(problem)
        w = weights(*_chunk.norms_kept(problem, blocks))
        totals = _chunk.no_totals(problem)
        while blocks:
            add_sums(blocks.pop(0), [w] * len(totals), totals)
        return totals, outcome
    states, rows, outcomes = [], [], []
    for _, chunk in _chunk.chunks(problem, step):
        states.append(generators(problem.params))
        norms, outcome = _chunk.norms(chunk, draws=states[-1])
        rows += norms
        outcomes.append(outcome)
    w = weights(torch.cat(rows) if rows else _chunk.no_values(problem))
    return _weighted(problem, w, step, states)[0], _chunk.joined(problem, outcomes)


def _checked_weights(weights: Any, n: int, index: Tensor | None, problem: Problem) -> Tensor:
    """The weights of the samples that count."""
    if not isinstance(weights, Tensor):
        raise ArgumentTypeError(
            f"weights is a {type(weights).__name__}, not a tensor\n"
            "  give one number per sample, or a function of the norms."
        )
    if tuple(weights.shape) != (n,):
        raise ArgumentError(f"weights has shape {tuple(weights.shape)}, not ({n},)\n  give one number per sample.")
    if weights.is_complex():
        raise ArgumentTypeError("weights are complex numbers\n  give real ones.")
    w = weights.detach().to(problem.params[0].device)
    w = w if index is None else w[index.to(w.device)]
    if not w.is_meta and not bool(w.isfinite().all()):
        bad = (~w.isfinite()).nonzero()[:, 0]
        shown = ", ".join(map(str, (bad if index is None else index.to(bad.device)[bad]).tolist()[:10]))
        raise ArgumentError(f"weights are not finite for samples {shown}\n  give 0 to leave a sample out.")
    return w


def _weighted(
    problem: Problem, w: Tensor, step: int, states: Sequence[Any] = ()
) -> tuple[list[Tensor | None], _engine.Outcome]:
    """The gradients of the weighted losses, summed; each chunk draws from the state given for it."""
    totals, outcomes = _chunk.no_totals(problem), []
    after = generators(problem.params)
    for k, (_, chunk) in enumerate(_chunk.chunks(replace(problem, seed=w), step)):
        if states:
            rewind(states[k])
        found, outcome = _chunk.sums(chunk)
        _chunk.accumulate(totals, found)
        outcomes.append(outcome)
    if states:
        rewind(after)
    return totals, _chunk.joined(problem, outcomes)


class ClippedGrad(NamedTuple, Generic[P]):
    """What `clipped_grad` gives."""

    grad: P  # the sum of the clipped gradients, a pytree like params
    norms: Any  # (N,) before clipping; a pytree of them like max_norm where that is one
    values: Tensor  # (N,) losses


@overload
def clipped_grad(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    max_norm: Any,
    *,
    nonfinite: Nonfinite = "raise",
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[False] = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
) -> ClippedGrad[P]: ...
@overload
def clipped_grad(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    max_norm: Any,
    *,
    nonfinite: Nonfinite = "raise",
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[True],
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
) -> tuple[ClippedGrad[P], Any]: ...


@uncompiled
def clipped_grad(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    max_norm: Any,
    *,
    nonfinite: Nonfinite = "raise",
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: bool = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
) -> Any:
    """The sum of the per-sample gradients, each scaled down to norm `max_norm` where it is larger.

    >>> fn = lambda w, x: (w * x).sum()
    >>> psgrad.clipped_grad(fn, torch.zeros(2), torch.tensor([[3.0, 4.0], [0.0, 0.5]]), 1.0)
    ClippedGrad(grad=tensor([0.6000, 1.3000]), norms=tensor([5.0000, 0.5000]), values=tensor([0., 0.]))

    One forward and one backward: the factors are kept until the norms are known. Where `max_bytes` does not
    allow even one sample's factors, two passes: norms first, then the weighted gradient. A gradient of norm 0
    stays as it is.

    Args:
        fn, params, batch, in_dims, randomness, chunk_size, max_bytes: as for `per_sample_grads`.
        max_norm: a positive number; or a pytree prefix of params, for example one number per layer: then each
            number clips the norm over the parameters below it. For params with names, as `from_module` gives
            them, a dict from names of modules or parameters: {"encoder": 1.0, "head": 0.1}.
        nonfinite: what to do with samples whose gradients are not finite. "raise": an error that names them;
            "zero": they do not count; "propagate": the sum is NaN.
        valid: (N,) booleans; the other samples do not run and do not count, their norms and values are 0.
        has_aux: `fn` returns `(loss, aux)`; aux comes back with a leading sample axis, zeros where not `valid`.

    Returns:
        `ClippedGrad(grad, norms, values)`; with `has_aux` `(ClippedGrad(...), aux)`.
    """
    _chunk.refuse_inside_transforms("clipped_grad")
    check_nonfinite(nonfinite)
    problem = _problem.make(
        fn, params, batch, in_dims=in_dims, randomness=randomness, has_aux=has_aux, frugal=max_bytes is not None
    )
    bounds, bounds_spec, group = bounds_of(max_norm, params, len(problem.params))
    n, (problem, index) = problem.n, _chunk.counting(problem, valid)
    with _engine.differentiating(problem):
        try:
            step = step_of(problem, chunk_size, max_bytes, _clip_work)
        except ArgumentError as error:
            if max_bytes is None or not error.least or len(bounds) > 1:
                raise
            try:
                totals, norms, outcome, good = _clipped_in_two(problem, bounds[0], nonfinite, max_bytes)
            except ArgumentError as other:
                raise min(error, other, key=lambda e: e.least) from None
        else:
            totals, norms, outcome, good = _clipped(problem, bounds, group, nonfinite, step)
    norms = [_chunk.spread_out(t, index, n) for t in norms]
    if nonfinite == "raise" and not good:
        refuse_nonfinite(torch.stack(norms).isfinite().all(0))
    result = ClippedGrad(
        _chunk.finished(problem, totals),
        norms[0] if bounds_spec is None else optree.tree_unflatten(bounds_spec, norms),
        _chunk.spread_out(outcome.values, index, n),
    )
    return _chunk.with_aux(result, outcome, index, n)


def _clip_work(whole: Problem) -> Work:
    """What a chunk of clipped_grad does, for those who ask what it allocates."""

    def do(problem: Problem, run: Run) -> object:
        metas = _chunk.metas(problem)
        totals: list[Tensor | None] = [None if problem.n == whole.n else meta.new() for meta in metas]
        blocks, _ = _chunk.kept(problem, run)
        (norms,) = _chunk.norms_kept(problem, blocks)
        while blocks:
            add_sums(blocks.pop(0), [norms] * len(metas), totals, counted=True)
        return totals

    return _chunk.summing("clipped", do, whole, in_place=True)


def _clipped(
    problem: Problem, bounds: Sequence[Any], group: Sequence[int], nonfinite: str, step: int
) -> tuple[list[Tensor | None], list[Tensor], _engine.Outcome, bool]:
    """The sums; norms (N,) of the parameters under each bound; what came out besides; whether all is finite."""
    totals = _chunk.no_totals(problem)
    all_norms, outcomes, good = [], [], True
    for _, chunk in _chunk.chunks(problem, step):
        blocks, outcome = _chunk.kept(chunk)
        norms = _chunk.norms_kept(chunk, blocks, per_param=len(bounds) > 1)
        if len(bounds) > 1:
            norms = norms_under(norms, group, len(bounds))
        finite = finite_of(norms, nonfinite)
        good = good and finite is None
        weights = [clip_weights(t, bound, finite, nonfinite) for t, bound in zip(norms, bounds, strict=True)]
        all_norms.append(norms)
        outcomes.append(outcome)
        while blocks:
            counted = finite is None or nonfinite == "propagate"
            add_sums(blocks.pop(0), [weights[k] for k in group], totals, counted)
    whole = _chunk.joined(problem, outcomes)
    if not all_norms:
        return totals, [_chunk.no_values(problem) for _ in bounds], whole, good
    if len(all_norms) == 1:
        return totals, all_norms[0], whole, good
    return totals, [torch.cat(parts) for parts in zip(*all_norms, strict=True)], whole, good


def _clipped_in_two(
    problem: Problem, bound: Any, nonfinite: str, max_bytes: int | float | str
) -> tuple[list[Tensor | None], list[Tensor], _engine.Outcome, bool]:
    """The same by two passes: norms, then the gradient of the weighted losses. Both draw the same numbers."""

    def both(problem: Problem, run: Run) -> object:
        return _chunk.norms(problem, run), _chunk.sums(problem, run)

    step = step_of(problem, None, max_bytes, partial(_chunk.summing, "clipped in two", both))
    states, norms, outcomes = [], [], []
    for _, chunk in _chunk.chunks(problem, step):
        states.append(generators(problem.params))
        found, outcome = _chunk.norms(chunk, draws=states[-1])
        norms += found
        outcomes.append(outcome)
    whole = torch.cat(norms)
    finite = finite_of([whole], nonfinite)
    w = clip_weights(whole, bound, finite, nonfinite)
    return _weighted(problem, w, step, states)[0], [whole], _chunk.joined(problem, outcomes), finite is None


@overload
def gram(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    other: Any = None,
    *,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[False] = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
) -> Tensor: ...
@overload
def gram(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    other: Any = None,
    *,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[True],
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
) -> tuple[Tensor, Any]: ...


@uncompiled
def gram(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    other: Any = None,
    *,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: bool = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
) -> Any:
    """Inner products of per-sample gradients: (N, N), or (N, M) with those of another batch.

    >>> fn = lambda w, x: (w * x).sum()
    >>> psgrad.gram(fn, torch.zeros(2), torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    tensor([[25.,  8.],
            [ 8.,  4.]])

    The empirical neural tangent kernel of the loss, and what data attribution is made of. In chunks two of them
    are held at a time, and each runs once for every other: the fewer chunks, the better. To ask several questions
    of one batch, keep its `factored_grads` and give that as `other`.

    Args:
        fn, params, batch, in_dims, randomness, chunk_size, max_bytes: as for `per_sample_grads`.
        other: another batch for the same `fn` and `in_dims`, or a `FactoredGrads`; None: the batch itself.
        valid: (N,) booleans; rows (and without `other` columns) of the other samples are 0, and they do not run.
        has_aux: `fn` returns `(loss, aux)`; aux of `batch` comes back with a leading sample axis, zeros where not
            `valid`. That of `other` does not.

    Returns:
        A tensor (N, N) or (N, M), in float32 at least; with `has_aux` `(products, aux)`.
    """
    _chunk.refuse_inside_transforms("gram")
    problem = _problem.make(
        fn, params, batch, in_dims=in_dims, randomness=randomness, has_aux=has_aux, frugal=max_bytes is not None
    )
    n, (problem, index) = problem.n, _chunk.counting(problem, valid)
    step = step_of(problem, chunk_size, max_bytes, _chunk.work("gram", _gram_work))
    with _engine.differentiating(problem):
        if isinstance(other, FactoredGrads):
            rows, outcomes = [], []
            for _, chunk in _chunk.chunks(problem, step):
                fg, outcome = _chunk.factored_outcome(chunk)
                rows.append(fg.dots(other))
                outcomes.append(outcome)
            found = _stacked(rows, problem, len(other))
        elif other is not None:
            second = _problem.make(
                fn, params, other, in_dims=in_dims, randomness=randomness, has_aux=has_aux, frugal=problem.frugal
            )
            found, outcomes = _crossed(problem, second, step)
        else:
            found, outcomes = _crossed(problem, None, step)
            found = _chunk.spread_out(found.mT, index, n).mT
        whole = _chunk.joined(problem, outcomes)
    return _chunk.with_aux(_chunk.spread_out(found, index, n), whole, index, n)


def _gram_work(problem: Problem, run: Run) -> object:
    first = _chunk.factored(problem, run)
    return first.dots(_chunk.factored(problem, run))


def _stacked(rows: Sequence[Tensor], problem: Problem, m: int) -> Tensor:
    return (
        torch.cat(list(rows))
        if rows
        else torch.zeros(0, m, dtype=_chunk.dtype_of(problem), device=problem.params[0].device)
    )


def _crossed(problem: Problem, second: Problem | None, step: int) -> tuple[Tensor, list[_engine.Outcome]]:
    """Inner products chunk against chunk, and what came out of each chunk of `problem` besides.

    A chunk that runs again draws what it drew the first time.
    """
    states: dict[int, Any] = {}
    rows = [chunk for _, chunk in _chunk.chunks(problem, step)]
    columns = rows if second is None else [chunk for _, chunk in _chunk.chunks(second, step)]
    if len(rows) == len(columns) == 1:
        left, outcome = _chunk.factored_outcome(rows[0])
        right = left if second is None else _chunk.factored(columns[0])
        return right.dots(left).mT.contiguous(), [outcome]  # dots gives the transpose of what it made: nothing to copy

    def again(k: int) -> tuple[FactoredGrads, _engine.Outcome]:
        if k not in states:
            states[k] = generators(problem.params)
            return _chunk.factored_outcome(columns[k])
        with _engine.generators_kept(problem):
            rewind(states[k])
            return _chunk.factored_outcome(columns[k])

    m = problem.n if second is None else second.n
    out = torch.zeros(problem.n, m, dtype=_chunk.dtype_of(problem), device=problem.params[0].device)
    outcomes = []
    for i, chunk in enumerate(rows):
        left, outcome = again(i) if second is None else _chunk.factored_outcome(chunk)
        outcomes.append(outcome)
        top = slice(i * step, i * step + chunk.n)
        for k in range(i if second is None else 0, len(columns)):
            side = slice(k * step, k * step + columns[k].n)
            out[top, side] = left.dots(left if second is None and k == i else again(k)[0])
            if second is None and k != i:
                out[side, top] = out[top, side].mT
    return out, outcomes


class GradStats(NamedTuple, Generic[P]):
    """What `grad_stats` gives."""

    mean: P  # a pytree like params
    variance: P  # a pytree like params
    sq_norms: Tensor  # (N,)
    values: Tensor  # (N,) losses
    trace: Tensor  # tr(S)
    sq_mean: Tensor  # |G|^2
    noise_scale: Tensor  # tr(S) / |G|^2


@overload
def grad_stats(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    *,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[False] = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
) -> GradStats[P]: ...
@overload
def grad_stats(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    *,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[True],
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
) -> tuple[GradStats[P], Any]: ...


@uncompiled
def grad_stats(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: bool = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
) -> Any:
    """Mean and variance of the per-sample gradients, and the gradient noise scale.

    >>> fn = lambda w, x: (w * x).sum()
    >>> stats = psgrad.grad_stats(fn, torch.zeros(2), torch.tensor([[1.0, 4.0], [3.0, 4.0]]))
    >>> stats.mean, stats.variance, stats.sq_norms
    (tensor([2., 4.]), tensor([2., 0.]), tensor([17., 25.]))
    >>> stats.trace.item(), stats.sq_mean.item()
    (2.0, 19.0)

    With N samples g_n drawn independently, their true mean G and covariance S:

    - `mean` and `variance` (with N - 1) are unbiased for G and for the diagonal of S;
    - `trace`, the sum of `variance`, is unbiased for tr(S);
    - `sq_mean` = |mean|^2 - trace / N is unbiased for |G|^2 (|mean|^2 alone is too large by tr(S) / N, and so
      `sq_mean` can be negative where noise drowns the signal);
    - `noise_scale` = trace / sq_mean is the simple noise scale of McCandlish et al. (2018), a batch size; as a
      ratio of two unbiased estimates it is not itself unbiased. Average `trace` and `sq_mean` over batches
      before dividing, for a steadier figure.

    With fewer than two samples `variance` and the estimates are NaN, with none `mean` too. The gradients are
    written out a few samples at a time where a layer's factors do not give the variance otherwise; N x P numbers
    are never held.

    Args:
        fn, params, batch, in_dims, randomness, chunk_size, max_bytes: as for `per_sample_grads`.
        valid: (N,) booleans; the other samples do not run and do not count, their entries are 0.
        has_aux: `fn` returns `(loss, aux)`; aux comes back with a leading sample axis, zeros where not `valid`.

    Returns:
        `GradStats(mean, variance, sq_norms, values, trace, sq_mean, noise_scale)`; with `has_aux`
        `(GradStats(...), aux)`.
    """
    _chunk.refuse_inside_transforms("grad_stats")
    problem = _problem.make(
        fn, params, batch, in_dims=in_dims, randomness=randomness, has_aux=has_aux, frugal=max_bytes is not None
    )
    n, (problem, index) = problem.n, _chunk.counting(problem, valid)
    step = step_of(problem, chunk_size, max_bytes, _chunk.work("stats", _stats_work))
    sq_norms, outcomes, seen = [], [], 0
    with _engine.differentiating(problem):
        mean = [meta.new() for meta in _chunk.metas(problem)]
        spread = [meta.new() for meta in _chunk.metas(problem)]
        for _, chunk in _chunk.chunks(problem, step):
            squares, outcome = _stats_of(chunk, mean, spread, seen)
            sq_norms.append(squares)
            outcomes.append(outcome)
            seen += chunk.n
        whole = _chunk.joined(problem, outcomes)
    below = seen - 1 if seen > 1 else torch.nan
    variance = [s.div_(below) for s in spread]
    if seen == 0:
        mean = [m * torch.nan for m in mean]
    dtype = _chunk.dtype_of(problem)
    trace = torch.stack([v.sum(dtype=dtype) for v in variance]).sum()
    sq_mean = torch.stack([m.square().sum(dtype=dtype) for m in mean]).sum() - trace / max(seen, 1)
    squares = torch.cat(sq_norms) if sq_norms else torch.zeros(0, dtype=dtype, device=problem.params[0].device)
    result = GradStats(
        _chunk.finished(problem, mean),
        _chunk.finished(problem, variance),
        _chunk.spread_out(squares, index, n),
        _chunk.spread_out(whole.values, index, n),
        trace,
        sq_mean,
        trace / sq_mean,
    )
    return _chunk.with_aux(result, whole, index, n)


def _stats_of(chunk: Problem, mean: list[Tensor], spread: list[Tensor], seen: int) -> tuple[Tensor, _engine.Outcome]:
    """Squared norms of a chunk, and what came out besides; its samples join the `seen` ones in `mean` and `spread`."""
    fg, outcome = _chunk.factored_outcome(chunk)
    own = [t.div_(len(fg)) for t in fg._sums(None)]
    share = len(fg) / (seen + len(fg))
    for m, s, t, part in zip(mean, spread, own, fg._spread(own), strict=True):  # Chan et al. (1983)
        gap = t.sub_(m)
        m.add_(gap, alpha=share)
        s.add_(part).add_(gap.square_(), alpha=seen * share)
    return fg.sq_norms(), outcome


def _stats_work(problem: Problem, run: Run) -> object:
    fg = _chunk.factored(problem, run)
    return fg._spread(fg._sums(None)), fg.norms()
