"""gram: inner products of per-sample gradients. It needs pairs of chunks, and so is no fold over them."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, overload

import optree
import torch
from torch import Tensor

from ..annotations import Group, P, Randomness
from ..composable import composed
from ..engine.batched import Outcome
from ..engine.ladder import collect, differentiating, generators_kept
from ..engine.problem import Problem, generators, rewind
from ..engine.validate import is_nested, validated
from ..errors import ArgumentError
from ..factors import assumptions
from ..processes.agreed import agreed
from ..processes.parcels import Matrix
from ..processes.ranks import Ranks
from ..processes.shards import Shards, shards_of
from ..streaming.progress import Bar
from ..streaming.stream import (
    Counted,
    Quantity,
    Run,
    chunks,
    counted,
    dtype_of,
    joined,
    metas,
    plan,
    refuse_recording,
)
from ..torch_.compiler import uncompiled
from . import nested
from .across import Rows, products_of_all, refuse_max_bytes
from .factored import FactoredGrads, factored, factored_chunk


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
    progress: bool = False,
    sharded: Any = None,
    group: Group | None = None,
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
    progress: bool = False,
    sharded: Any = None,
    group: Group | None = None,
) -> tuple[Tensor, Any]: ...


@uncompiled
@agreed
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
    progress: bool = False,
    sharded: Any = None,
    group: Any = None,
) -> Any:
    """Inner products of per-sample gradients: (N, N), or (N, M) with those of another batch.

    >>> fn = lambda w, x: (w * x).sum()
    >>> psgrad.gram(fn, torch.zeros(2), torch.tensor([[3.0, 4.0], [0.0, 2.0]]))
    tensor([[25.,  8.],
            [ 8.,  4.]])

    The empirical neural tangent kernel of the loss, and what data attribution is made of. In chunks two of them
    are held at a time, and each runs once for every other: the fewer chunks, the better. To ask several questions
    of one batch, keep its `factored_grads` and give that as `other`.

    Inside a torch.func transform it is a differentiable function of params and batches; N x P numbers are held there.

    A natural step needs no matrix of P x P: with the gradients J of N residuals r as rows, the damped Gauss-Newton step
    is (J^T J + d)^-1 J^T r = J^T (J J^T + d)^-1 r, a solve with N x N numbers and one weighted sum.

    >>> def residual(p, sample):  # of one sample; the loss is the sum of their squares, halved
    ...     x, y = sample
    ...     return p["v"] @ torch.tanh(p["w"] @ x) - y
    >>> params = {"w": torch.randn(30, 2), "v": torch.randn(30) / 30}
    >>> x = torch.randn(20, 2)
    >>> batch = x, x[:, 0].sin()
    >>> kernel = psgrad.gram(residual, params, batch)
    >>> r = torch.vmap(residual, in_dims=(None, 0))(params, batch)
    >>> weights = torch.linalg.solve(kernel + torch.eye(20), r)
    >>> step = psgrad.weighted_grad(residual, params, batch, weights)
    >>> params = {name: p - step[name] for name, p in params.items()}
    >>> after = torch.vmap(residual, in_dims=(None, 0))(params, batch)
    >>> bool(after.square().sum() < 0.1 * r.square().sum())
    True

    With momentum: see `weighted_grad`.

    Args:
        fn, params, batch, in_dims, randomness, chunk_size, max_bytes, progress: as for `per_sample_grads`.
        other: another batch for the same `fn` and `in_dims`, or a `FactoredGrads`; None: the batch itself.
        valid: (N,) booleans; rows (and without `other` columns) of the other samples are 0, and they do not run.
        has_aux: `fn` returns `(loss, aux)`; aux of `batch` comes back with a leading sample axis, zeros where not
            `valid`. That of `other` does not.
        sharded: parameters in pieces, as for `clipped_grad`: products of whole gradients. The factors of all samples
            are kept, and a matrix for each parameter; not together with a group.
        group: processes that share a batch, as for `clipped_grad`. Rows are this rank's samples, columns those of all
            ranks, one rank after the other; factors are kept, and sent once, so that `max_bytes` is refused.

    Returns:
        A tensor (N, N) or (N, M), in float32 at least; with `has_aux` `(products, aux)`.
    """
    options: dict[str, Any] = {"in_dims": in_dims, "randomness": randomness, "has_aux": has_aux}
    problem = validated(fn, params, batch, save_memory=max_bytes is not None, **options)
    there = counted(problem, valid)
    problem = there.problem
    shards = None if sharded is None else shards_of(sharded, params, max_bytes)
    if is_nested():
        second = None if other is None or isinstance(other, FactoredGrads) else validated(fn, params, other, **options)
        return _nested_gram(there, other, second, nested.step_of(problem, chunk_size, max_bytes))
    if shards is not None:
        if group is not None:
            raise ArgumentError(
                "sharded and group are both given to gram\n  gather the samples of the group, and drop it."
            )
        return _of_pieces(shards, there, fn, params, other, options, chunk_size)
    if group is not None:
        options |= {"chunk_size": chunk_size, "max_bytes": max_bytes, "progress": progress}
        return _across_ranks(group, there, fn, params, other, options)
    step = plan(_Pair(), problem, chunk_size, max_bytes)
    assert isinstance(step, int)
    second = None
    if other is not None and not isinstance(other, FactoredGrads):
        second = validated(fn, params, other, save_memory=max_bytes is not None, **options)
    with differentiating(problem), _bar(problem, other, second, step) if progress else nullcontext() as bar:
        if isinstance(other, FactoredGrads):
            found, outcomes = _against(problem, other, step, bar)
        else:
            found, outcomes = _crossed(problem, second, step, bar)
            if second is None:
                found = there.among_zeros(found.mT).mT
        outcome = joined(problem, outcomes)
    return there.with_aux(there.among_zeros(found), outcome)


def _nested_gram(there: Counted, other: Any, second: Problem | None, step: int) -> Any:
    """Inside a transform: products of gradients that are written out."""
    problem = there.problem
    grads, outcome = composed(problem, step or None)
    if isinstance(other, FactoredGrads):
        other._check_like(problem.params_spec, metas(problem))
        found = nested.products(grads, optree.tree_leaves(other.dense()), dtype_of(problem))
    elif second is not None:
        found = nested.products(grads, composed(second, step or None)[0], dtype_of(problem))
    else:
        found = nested.products(grads, grads, dtype_of(problem))
        found = there.among_zeros(found.mT).mT
    return there.with_aux(there.among_zeros(found), outcome)


class _Pair(Quantity[list[Any], None]):
    """Two chunks at a time and their inner products: what the planner measures."""

    name = "gram"

    def start(self, whole: Problem, step: int) -> list[Any]:
        return []

    def add(self, state: list[Any], rows: slice, chunk: Problem, run: Run) -> Outcome:
        first, outcome = factored_chunk(chunk, run)
        first.dots(factored_chunk(chunk, run)[0])
        return outcome


def _against(problem: Problem, other: FactoredGrads, step: int, bar: Bar | None) -> tuple[Tensor, list[Outcome]]:
    """Inner products of each chunk with what is kept of other samples."""
    rows, outcomes = [], []
    run = collect if bar is None else bar.watching(collect)
    for _, chunk in chunks(problem, step, bar):
        fg, outcome = factored_chunk(chunk, run)
        rows.append(fg.dots(other))
        outcomes.append(outcome)
    return torch.cat(rows) if rows else _zeros(problem, 0, len(other)), outcomes


def _zeros(problem: Problem, n: int, m: int) -> Tensor:
    return torch.zeros(n, m, dtype=dtype_of(problem), device=problem.params[0].device)


def _bar(problem: Problem, other: object, second: Problem | None, step: int) -> Bar:
    """A bar over the samples that run, each as often as it does."""
    sizes = [chunk.n for _, chunk in chunks(problem, step)]
    if second is not None:
        return Bar("gram", problem.n + len(sizes) * second.n)
    return Bar("gram", problem.n if other is not None else sum(k * n for k, n in enumerate(sizes, 1)))


def _crossed(problem: Problem, second: Problem | None, step: int, bar: Bar | None) -> tuple[Tensor, list[Outcome]]:
    """Inner products chunk against chunk, and what came out of each chunk of `problem` besides.

    A chunk that runs again draws what it drew the first time.
    """
    states: dict[int, Any] = {}
    rows = [chunk for _, chunk in chunks(problem, step)]
    columns = rows if second is None else [chunk for _, chunk in chunks(second, step)]
    run = collect if bar is None else bar.watching(collect)

    def factored(chunk: Problem) -> tuple[FactoredGrads, Outcome]:
        found = factored_chunk(chunk, run)
        if bar is not None:
            bar.done(chunk.n)
        return found

    if len(rows) == len(columns) == 1:
        left, outcome = factored(rows[0])
        right = left if second is None else factored(columns[0])[0]
        return right.dots(left).mT.contiguous(), [outcome]  # dots gives the transpose of what it made: nothing to copy

    if assumptions.are_for_others():
        refuse_recording("gram in chunks, which run more than once")

    def again(k: int) -> tuple[FactoredGrads, Outcome]:
        if k not in states:
            states[k] = generators(problem.params)
            return factored(columns[k])
        with generators_kept(problem):
            rewind(states[k])
            return factored(columns[k])

    out = _zeros(problem, problem.n, problem.n if second is None else second.n)
    outcomes = []
    for i, chunk in enumerate(rows):
        left, outcome = again(i) if second is None else factored(chunk)
        outcomes.append(outcome)
        top = slice(i * step, i * step + chunk.n)
        for k in range(i if second is None else 0, len(columns)):
            side = slice(k * step, k * step + columns[k].n)
            out[top, side] = left.dots(left if second is None and k == i else again(k)[0])
            if second is None and k != i:
                out[side, top] = out[top, side].mT
    return out, outcomes


def _of_pieces(
    shards: Shards, there: Counted, fn: Any, params: Any, other: Any, options: dict[str, Any], chunk_size: int | None
) -> Any:
    """Products of gradients of which some are in pieces: those of the pieces are summed over their ranks."""
    step: dict[str, Any] = {"chunk_size": chunk_size, "max_bytes": None}
    own, outcome = factored(there.problem, **step)
    if other is not None and not isinstance(other, FactoredGrads):
        other = factored(validated(fn, params, other, **options), **step)[0]
    each = [t.to(dtype_of(there.problem)) for t in optree.tree_leaves(own.dots(other, per_param=True))]
    found = torch.stack(shards.summed(each)).sum(0)
    if other is None:
        found = there.among_zeros(found.mT).mT
    return there.with_aux(there.among_zeros(found), outcome)


# ---- over the samples of all ranks ------------------------------------------------------------------------


def _across_ranks(
    ranks: Ranks, there: Counted, fn: Callable[..., Any], params: Any, other: Any, options: dict[str, Any]
) -> Any:
    """The rows of this rank's samples; columns are the samples of all ranks, one rank after the other."""
    refuse_max_bytes("gram", options.pop("max_bytes"))
    if ranks.lockstep is not None and other is not None and not isinstance(other, FactoredGrads):
        raise ArgumentError(
            "other is a second batch, and a model under fully_shard runs one in a call\n"
            "  give its factored_grads(..., group=...)."
        )
    step, shown = options.pop("chunk_size"), options.pop("progress")
    matrix = Matrix(ranks, dtype_of(there.problem))
    ranks.expect(other=other is not None)

    def kept(problem: Problem) -> tuple[FactoredGrads, Outcome]:
        return factored(problem, chunk_size=step, max_bytes=None, progress="gram" if shown else None, ranks=ranks)

    own, outcome = kept(there.problem)
    sides = [Rows([own], there.places, there.n)]
    if isinstance(other, FactoredGrads):
        own.dots(other[:0])  # refuses other parameters
        sides.append(Rows([other], None, len(other)))
    elif other is not None:
        second = kept(validated(fn, params, other, **options))[0]
        sides.append(Rows([second], None, len(second)))
    return there.with_aux(products_of_all(ranks, matrix, sides)[:, :, 0, 0], outcome)
