"""grad_stats: mean and variance of the per-sample gradients, and the gradient noise scale."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, overload

import optree
import torch
from torch import Tensor

from .. import display
from ..annotations import Group, P, Randomness
from ..composable import composed
from ..engine.batched import Outcome
from ..engine.problem import Problem
from ..engine.validate import is_nested, validated
from ..errors import ArgumentError
from ..factors.maps import mapped_shape
from ..processes.agreed import agreed
from ..processes.ranks import Ranks
from ..processes.shards import Shards, shards_of
from ..processes.sums import Sums
from ..streaming.blocks import Meta
from ..streaming.stream import (
    Counted,
    Quantity,
    Run,
    counted,
    dtype_of,
    metas,
    refuse_recording,
    stream,
    tree_of_sums,
)
from ..torch_.compiler import uncompiled
from . import nested
from .factored import factored, factored_chunk
from .layered import scattered_moments
from .named import Maps, empty_maps, maps_of


class GradStats(NamedTuple, Generic[P]):
    """What `grad_stats` gives: estimates from the samples that are `valid`. `grad_stats` says what of.

    Attributes:
        mean: the mean of the gradients, a pytree like params.
        variance: the unbiased variance over samples of every number of the gradients, a pytree like params.
        sq_norms: (N,) squared norms of the gradients; 0 for samples that are not `valid`.
        values: (N,) losses; 0 for samples that are not `valid`.
        trace: the sum of `variance`, for tr(S), as a tensor of one number like the next two.
        sq_mean: |mean|^2 less what noise adds to it, for |G|^2; it can be negative.
        noise_scale: `trace / sq_mean`, a batch size: the simple noise scale.
    """

    mean: P
    variance: P
    sq_norms: Tensor
    values: Tensor
    trace: Tensor
    sq_mean: Tensor
    noise_scale: Tensor

    def __repr__(self) -> str:
        return display.brief(self)

    @display.safely
    def _repr_html_(self) -> str:
        """How much of the gradients is noise, and in which parameters."""
        pairs = [
            ("samples", f"{len(self.values):,}"),
            ("noise scale", display.number(self.noise_scale)),
            ("tr(S)", display.number(self.trace)),
            ("|G|²", display.number(self.sq_mean)),
        ]
        means, variances = display.leaves(self.mean), [t for _, t in display.leaves(self.variance)]
        traces = [None if t.is_meta else float(t.sum(dtype=self.trace.dtype)) for t in variances]
        total = sum(t for t in traces if t is not None)
        shown = display.largest(traces, "tr(S)")
        rows = []
        for i in shown.rows:
            (name, mean), trace = means[i], traces[i]
            square = display.sq_norm(mean)
            rows.append(
                (
                    name,
                    display.shape(mean),
                    display.number(None if square is None else square**0.5),
                    display.number(trace),
                    display.meter(trace / total if trace and total else 0.0),
                )
            )
        square = display.number_of(self.sq_mean)
        drowned = "noise drowns the mean here: average trace and sq_mean over batches before dividing"
        return display.page(
            "GradStats",
            display.facts(pairs),
            display.notes([drowned] if square is not None and square <= 0 else []),
            display.histogram(self.sq_norms.sqrt(), "norms of the gradients"),
            display.table(
                ("parameter", "shape", "norm of the mean", "tr(S)", "share of tr(S)"), rows, left=2, more=shown.more
            ),
        )


@overload
def grad_stats(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    *,
    basis: Mapping[str, Any] | None = None,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[False] = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    sharded: Any = None,
    group: Group | None = None,
) -> GradStats[P]: ...
@overload
def grad_stats(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    *,
    basis: Mapping[str, Any] | None = None,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[True],
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    sharded: Any = None,
    group: Group | None = None,
) -> tuple[GradStats[P], Any]: ...


@uncompiled
@agreed
def grad_stats(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    basis: Mapping[str, Any] | None = None,
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
    are never held, but for parameters that no rule takes: plain vmap writes the gradients of a chunk out.

    Inside a torch.func transform it is a differentiable function of params and batch; N x P numbers are held there.

    In another basis, such as the eigenvectors of `kron_factors`, the second moments of EK-FAC:

    >>> fn, params = psgrad.from_module(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy)
    >>> batch = torch.randn(50, 3), torch.randint(2, (50,))
    >>> found = psgrad.kron_factors(fn, params, batch)["weight"]
    >>> vectors = torch.linalg.eigh(found.output)[1], torch.linalg.eigh(found.input)[1]
    >>> stats = psgrad.grad_stats(fn, params, batch, basis={"weight": vectors})
    >>> moments = stats.variance["weight"] * 49 / 50 + stats.mean["weight"] ** 2
    >>> moments.shape
    torch.Size([2, 3])

    Args:
        fn, params, batch, in_dims, randomness, chunk_size, max_bytes, progress: as for `per_sample_grads`.
        basis: for some matrices, by name, a pair (QO, QI) whose columns are basis vectors on the side of the output and
            on that of the input, as `torch.linalg.eigh` gives them; None for a side that stays. Means, variances and
            norms are then those of QO^T g QI. Names as for `FactoredGrads.precondition`, which takes the transposes.
        valid: (N,) booleans; the other samples do not run and do not count, their entries are 0.
        has_aux: `fn` returns `(loss, aux)`; aux comes back with a leading sample axis, zeros where not `valid`.
        sharded: parameters in pieces, as for `clipped_grad`: means and variances are those of the pieces, all else is
            of whole gradients.
        group: processes that share a batch, as for `clipped_grad`: all but `sq_norms`, `values` and aux is over the
            samples of all ranks.

    Returns:
        `GradStats(mean, variance, sq_norms, values, trace, sq_mean, noise_scale)`; with `has_aux`
        `(GradStats(...), aux)`.
    """
    problem = validated(
        fn, params, batch, in_dims=in_dims, randomness=randomness, has_aux=has_aux, save_memory=max_bytes is not None
    )
    there = counted(problem, valid)
    problem = there.problem
    shards = None if sharded is None else shards_of(sharded, params, max_bytes)
    if is_nested():
        if basis is not None:
            raise ArgumentError(
                "basis= is given inside a torch.func transform\n  rotate per_sample_grads there instead."
            )
        return _nested_stats(there, nested.step_of(problem, chunk_size, max_bytes))
    if there.mask is not None:
        refuse_recording("grad_stats of the samples that are valid")
    shown = "grad_stats" if progress else None
    if group is not None and group.lockstep is not None:
        if basis is not None or shards is not None:
            raise ArgumentError(
                f"{'basis' if shards is None else 'sharded'}= is given, and the moments of a model under fully_shard "
                "are in pieces, as its parameters are\n"
                "  give the model before fully_shard."
            )
        return _layer_by_layer(group, there, chunk_size, max_bytes)
    maps = {} if basis is None else maps_of(basis, problem.params_spec, problem.params, "basis", True)
    rounds = None
    if group is not None:
        group.expect(basis=[(i, *(None if t is None else tuple(t.shape) for t in pair)) for i, pair in maps.items()])
        shapes = _mapped_metas(problem, maps)
        rounds = Sums(group, shapes, lambda: problem.n), Sums(group, shapes)
    quantity = Moments(maps, per_param=shards is not None)
    found, outcome = stream(quantity, problem, chunk_size=chunk_size, max_bytes=max_bytes, progress=shown)
    if rounds is not None:
        found = _over_all_ranks(found, *rounds)
    below = found.seen - 1 if found.seen > 1 else torch.nan
    variance = [t.div_(below) for t in found.deviations]
    mean = found.mean if found.seen else [m * torch.nan for m in found.mean]
    none = torch.zeros(0, dtype=dtype_of(problem), device=problem.params[0].device)
    sq_norms = torch.cat(found.sq_norms, -1) if found.sq_norms else none
    if shards is not None and found.sq_norms:
        sq_norms = torch.stack(shards.summed(list(sq_norms))).sum(0)
    return there.with_aux(_stats(there, mean, variance, sq_norms, max(found.seen, 1), outcome, group, shards), outcome)


def _stats(
    there: Counted,
    mean: list[Tensor],
    variance: list[Tensor],
    sq_norms: Tensor,
    count: Tensor | int,
    outcome: Outcome,
    ranks: Ranks | None = None,
    shards: Shards | None = None,
) -> GradStats[Any]:
    """The estimates from `count` samples, given the moments of each parameter's gradients."""
    problem, dtype = there.problem, dtype_of(there.problem)
    traces, squares = [v.sum(dtype=dtype) for v in variance], [m.square().sum(dtype=dtype) for m in mean]
    if shards is not None:
        traces, squares = shards.summed(traces), shards.summed(squares)
    trace = torch.stack(traces).sum()
    sq_mean = torch.stack(squares).sum() - trace / count
    return GradStats(
        tree_of_sums(problem, mean, ranks),
        tree_of_sums(problem, variance, ranks),
        there.among_zeros(sq_norms),
        there.among_zeros(outcome.values),
        trace,
        sq_mean,
        trace / sq_mean,
    )


def _nested_stats(there: Counted, step: int) -> Any:
    """Inside a transform: from gradients that are written out."""
    grads, outcome = composed(there.problem, step or None)
    found = nested.moments(there, grads, dtype_of(there.problem))
    return there.with_aux(_stats(there, *found, outcome), outcome)


@dataclass(eq=False)
class _Moments:
    """Of the samples seen so far."""

    maps: Maps

    mean: list[Tensor]
    deviations: list[Tensor]  # sums of squared differences from the mean
    sq_norms: list[Tensor]
    seen: int = 0


def _mapped_metas(problem: Problem, maps: Maps) -> list[Meta]:
    """What the moments of each parameter look like."""
    found = list(metas(problem))
    for i, sides in maps.items():
        found[i] = found[i]._replace(shape=torch.Size(mapped_shape(tuple(found[i].shape), *sides)))
    return found


class Moments(Quantity[_Moments, _Moments]):
    """Means and squared deviations, chunk by chunk as in Chan et al. (1983)."""

    def __init__(self, maps: Maps | None = None, rehearsed: bool = False, per_param: bool = False) -> None:
        self.maps, self.rehearsed, self.per_param = maps or {}, rehearsed, per_param  # squared norms of each parameter
        shapes = [(i, *(None if t is None else t.shape for t in pair)) for i, pair in self.maps.items()]
        self.name = f"stats {shapes}" if shapes else "stats"

    def start(self, whole: Problem, step: int) -> _Moments:
        zeros = _mapped_metas(whole, self.maps)
        maps = empty_maps(self.maps) if self.rehearsed else self.maps
        return _Moments(maps, [meta.new() for meta in zeros], [meta.new() for meta in zeros], [])

    def rehearsal(self) -> "Moments":
        return Moments(self.maps, rehearsed=True)

    def add(self, state: _Moments, rows: slice, chunk: Problem, run: Run) -> Outcome:
        fg, outcome = factored_chunk(chunk, run)
        if state.maps:
            fg = fg._mapped(state.maps)
        own = [t.div_(len(fg)) for t in fg._sums(None)]
        share = len(fg) / (state.seen + len(fg))
        for m, total, t, part in zip(state.mean, state.deviations, own, fg._squared_deviations(own), strict=True):
            gap = t.sub_(m)
            m.add_(gap, alpha=share)
            total.add_(part).add_(gap.square_(), alpha=state.seen * share)
        if self.per_param:
            leaves = optree.tree_leaves(fg.sq_norms(per_param=True))
            state.sq_norms.append(torch.stack([t.to(dtype_of(chunk)) for t in leaves]))
        else:
            state.sq_norms.append(fg.sq_norms())
        state.seen += chunk.n
        return outcome


def _layer_by_layer(ranks: Ranks, there: Counted, chunk_size: Any, max_bytes: Any) -> GradStats[Any]:
    """The same for a model under fully_shard: factors are kept, and moments are made parameter by parameter."""
    problem, dtype = there.problem, dtype_of(there.problem)
    kept, outcome = factored(problem, chunk_size=chunk_size, max_bytes=max_bytes, ranks=ranks)
    found = scattered_moments(ranks, problem, kept._blocks, dtype)
    below = found.seen - 1 if found.seen > 1 else torch.nan
    trace = found.total / below
    sq_mean = (found.sq_mean if found.seen else found.sq_mean * torch.nan) - trace / max(found.seen, 1)
    mean = found.mean if found.seen else [m * torch.nan for m in found.mean]
    return GradStats(
        optree.tree_unflatten(problem.params_spec, mean),
        optree.tree_unflatten(problem.params_spec, [t / below for t in found.deviations]),
        there.among_zeros(kept.sq_norms()),
        there.among_zeros(outcome.values),
        trace,
        sq_mean,
        trace / sq_mean,
    )


def _over_all_ranks(own: _Moments, first: Sums, second: Sums) -> _Moments:
    """The moments of the samples of all ranks: the mean first, then what each rank has around it."""
    sums: list[Tensor | None] = [m * own.seen for m in own.mean]
    totals = first.result(sums)
    seen = first.ranks.count
    mean = [t.div_(max(seen, 1)) for t in totals]
    around = zip(own.deviations, own.mean, mean, strict=True)
    parts: list[Tensor | None] = [d.add_((m - whole).square_(), alpha=own.seen) for d, m, whole in around]
    return _Moments(own.maps, mean, second.result(parts), own.sq_norms, seen)
