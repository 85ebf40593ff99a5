"""clipped_grad: the sum of per-sample gradients whose norms are kept within bounds."""

from collections.abc import Callable
from typing import Any, Literal, overload

import optree
import torch
from torch import Tensor

from ..annotations import Group, Nonfinite, P, Randomness
from ..engine.validate import is_nested, validated
from ..errors import ArgumentError
from ..processes.agreed import agreed
from ..processes.ranks import Ranks
from ..processes.shards import Shards, shards_of
from ..processes.sums import Sums
from ..streaming.stream import Counted, counted, metas, stream, tree_of_sums
from ..torch_ import tracing
from ..torch_.compiler import uncompiled
from . import nested
from .clipping import (
    Bounds,
    ClippedGrad,
    bounds_of,
    check_nonfinite,
    clip_weights,
    finite_of,
    norms_under,
    refuse_nonfinite,
)
from .factored import factored
from .layered import scattered_sums
from .sums import KeptSums, TwoPasses, Weigh, Weights, norms_of


@overload
def clipped_grad(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    max_norm: float | Tensor,
    *,
    nonfinite: Nonfinite = "raise",
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[False] = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    sharded: Any = None,
    group: Group | None = None,
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
    has_aux: Literal[False] = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    sharded: Any = None,
    group: Group | None = None,
) -> ClippedGrad[P, Any]: ...
@overload
def clipped_grad(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    max_norm: float | Tensor,
    *,
    nonfinite: Nonfinite = "raise",
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[True],
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    sharded: Any = None,
    group: Group | None = None,
) -> tuple[ClippedGrad[P], Any]: ...
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
    progress: bool = False,
    sharded: Any = None,
    group: Group | None = None,
) -> tuple[ClippedGrad[P, Any], Any]: ...


@uncompiled
@agreed
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
    progress: bool = False,
    sharded: Any = None,
    group: Any = None,
) -> Any:
    """The sum of the per-sample gradients, each scaled down to norm `max_norm` where it is larger.

    >>> fn = lambda w, x: (w * x).sum()
    >>> psgrad.clipped_grad(fn, torch.zeros(2), torch.tensor([[3.0, 4.0], [0.0, 0.5]]), 1.0)
    ClippedGrad(grad=tensor([0.6000, 1.3000]), norms=tensor([5.0000, 0.5000]), values=tensor([0., 0.]), count=2,
        sensitivity=1.0)

    One forward and one backward: the factors are kept until the norms are known. Where `max_bytes` does not
    allow even one sample's factors, two passes: norms first, then the weighted gradient. A gradient of norm 0
    stays as it is. One sample more or less moves the sum by at most `sensitivity`: `ClippedGrad` says when.

    Inside a torch.func transform it is a differentiable function of params, batch and `max_norm`, which writes the
    gradients out, chunk by chunk. A gradient whose norm is just the bound counts as not clipped. Inside `vmap` numbers
    cannot be read: say nonfinite="zero" or "propagate".

    Args:
        fn, params, batch, in_dims, randomness, chunk_size, max_bytes, progress: as for `per_sample_grads`.
        max_norm: a positive number; or a pytree prefix of params, for example one number per layer: then each
            number clips the norm over the parameters below it. For params with names, as `from_module` gives
            them, a dict from names of modules or parameters: {"encoder": 1.0, "head": 0.1}.
        nonfinite: what to do with samples whose gradients are not finite. "raise": an error that names them;
            "zero": they do not count; "propagate": the sum is NaN.
        valid: (N,) booleans; the other samples do not run and do not count, their norms and values are 0.
        has_aux: `fn` returns `(loss, aux)`; aux comes back with a leading sample axis, zeros where not `valid`.
        sharded: for a `fn` that has parameters in pieces (tensor parallel, see `psgrad.parallel`): a pytree prefix of
            params with the group of ranks that hold the other pieces, which have the same samples, and None for what
            is whole. Norms are then those of the whole gradients.
        group: processes that share a batch: a torch.distributed ProcessGroup, or a DeviceMesh with one axis. `batch` is
            this rank's part, perhaps empty; `grad` and `count` are over the samples of all ranks, norms, values and aux
            of this rank's. If a rank raises, all do: the others a `RemoteError`.

    Returns:
        `ClippedGrad(grad, norms, values, count, sensitivity)`; with `has_aux` `(ClippedGrad(...), aux)`.
    """
    check_nonfinite(nonfinite)
    problem = validated(
        fn, params, batch, in_dims=in_dims, randomness=randomness, has_aux=has_aux, save_memory=max_bytes is not None
    )
    bounds = bounds_of(max_norm, params, len(problem.params))
    there = counted(problem, valid)
    problem = there.problem
    shards = None if sharded is None else shards_of(sharded, params, max_bytes)
    if is_nested():
        return _nested_clipped(there, bounds, nonfinite, nested.step_of(problem, chunk_size, max_bytes))
    clip = Clip(bounds.each, bounds.group, nonfinite, there, shards)
    across = None
    if group is not None:
        group.expect(max_norm=bounds.sensitivity, bounds=bounds.group, nonfinite=nonfinite)
        if group.lockstep is not None:
            return _layer_by_layer(group, there, bounds, clip, chunk_size, max_bytes)
        across = Sums(group, metas(problem), lambda: problem.n - clip.left_out)
    found, outcome = stream(
        KeptSums(clip, across),
        problem,
        chunk_size=chunk_size,
        max_bytes=max_bytes,
        instead=None if clip.per_param else TwoPasses(clip),
        progress="clipped_grad" if progress else None,
    )
    norms = list(map(there.among_zeros, found.all_norms(problem, len(bounds.each))))
    if nonfinite == "raise" and not clip.good:
        refuse_nonfinite(torch.stack(norms).isfinite().all(0))
    totals, count = found.totals, there.count - clip.left_out
    if group is not None and across is not None:
        totals, count = list(across.result(totals)), group.count
    result = ClippedGrad(
        tree_of_sums(problem, totals, group),
        norms[0] if bounds.spec is None else optree.tree_unflatten(bounds.spec, norms),
        there.among_zeros(outcome.values),
        count,
        bounds.sensitivity,
    )
    return there.with_aux(result, outcome)


def _nested_clipped(there: Counted, bounds: Bounds, nonfinite: str, step: int) -> Any:
    """Inside a transform: the same as differentiable functions of params, batch and bounds."""
    found = nested.clipped(there, bounds, nonfinite, step)
    norms = [there.among_zeros(t) for t in found.norms]
    if nonfinite == "raise":
        refuse_nonfinite(torch.stack(norms).isfinite().all(0))
    result: ClippedGrad[Any, Any] = ClippedGrad(
        tree_of_sums(there.problem, found.sums),
        norms[0] if bounds.spec is None else optree.tree_unflatten(bounds.spec, norms),
        there.among_zeros(found.outcome.values),
        found.samples,  # type: ignore[arg-type]  # a number could not leave a vmap
        nested.sensitivity_of(bounds, norms[0]),  # type: ignore[arg-type]
    )
    return there.with_aux(result, found.outcome)


def _layer_by_layer(
    ranks: Ranks, there: Counted, bounds: Bounds, clip: "Clip", chunk_size: Any, max_bytes: Any
) -> ClippedGrad[Any, Any]:
    """The same for a model under fully_shard: factors are kept, and sums are made parameter by parameter."""
    problem = there.problem
    if max_bytes is not None:
        return _in_two_passes(ranks, there, bounds, clip, chunk_size, max_bytes)
    kept, outcome = factored(problem, chunk_size=chunk_size, max_bytes=max_bytes, ranks=ranks)
    blocks = list(kept._blocks)
    del kept
    norms, weights = clip(norms_of(problem, blocks, clip.per_param), len(problem.params))
    if clip.nonfinite == "raise" and not clip.good:
        refuse_nonfinite(there.among_zeros(torch.stack(norms).isfinite().all(0).logical_not()).logical_not())
    leaves = scattered_sums(ranks, problem, blocks, weights.of_params, problem.n - clip.left_out)
    norms = [there.among_zeros(t) for t in norms]
    return ClippedGrad(
        optree.tree_unflatten(problem.params_spec, leaves),
        norms[0] if bounds.spec is None else optree.tree_unflatten(bounds.spec, norms),
        there.among_zeros(outcome.values),
        ranks.count,
        bounds.sensitivity,
    )


def _in_two_passes(
    ranks: Ranks, there: Counted, bounds: Bounds, clip: "Clip", chunk_size: Any, max_bytes: Any
) -> ClippedGrad[Any, Any]:
    """The same where memory is short: norms first, then the gradient of the weighted losses. No factor is kept."""
    if clip.per_param:
        raise ArgumentError(
            "max_bytes and several bounds are given, and a model under fully_shard takes one weight for all parameters "
            "then\n  give one bound, or chunk_size."
        )
    problem = there.problem
    options: dict[str, Any] = {"chunk_size": chunk_size, "max_bytes": max_bytes, "ranks": ranks}
    found, outcome = stream(TwoPasses(clip), problem, **options)
    (norms,) = (there.among_zeros(t) for t in found.all_norms(problem, 1))
    if clip.nonfinite == "raise" and not clip.good:
        refuse_nonfinite(norms.isfinite())
    ranks.agree(problem.n - clip.left_out)
    return ClippedGrad(
        optree.tree_unflatten(problem.params_spec, ranks.lockstep.pieces.result()),
        norms,
        there.among_zeros(outcome.values),
        ranks.count,
        bounds.sensitivity,
    )


class Clip(Weigh):
    """So that norms are at most the bounds, each for the parameters under it."""

    def __init__(
        self, bounds: list[Any], group: list[int], nonfinite: str, there: Counted, shards: Shards | None = None
    ) -> None:
        self.bounds, self.group, self.nonfinite, self.there, self.shards = bounds, group, nonfinite, there, shards
        self.per_param = len(bounds) > 1 or shards is not None
        self.calls_users = shards is not None  # ranks that hold the other pieces are asked once
        self.good = True  # all norms so far are finite
        self.left_out: Any = 0  # samples that are not, and count as zeros; a tensor while ops are recorded

    def __call__(self, norms: list[Tensor], count: int) -> tuple[list[Tensor], Weights]:
        if self.shards is not None:
            norms = self.shards.whole_norms(norms)
        if self.per_param:
            norms = norms_under(norms, self.group, len(self.bounds))
        finite = finite_of(norms, self.nonfinite)
        if finite is not None:
            self.good = False
            if self.nonfinite == "zero":
                left_out = (~finite).sum()
                self.left_out += left_out if tracing.is_recorded() else int(left_out)
        weights: list[Tensor] = []
        for t, bound in zip(norms, self.bounds, strict=True):
            weights.append(self.there.masked(clip_weights(t, bound, finite, self.nonfinite)))
        skips = finite is None or self.nonfinite == "propagate"
        of_params = weights * count if len(weights) == 1 else list(map(weights.__getitem__, self.group[:count]))
        return norms, Weights(of_params, skips)
