"""One chunk of samples at a time: run it, reduce it, let it go. What the quantities have in common."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor

from ..engine import ladder as _engine
from ..engine.collectors import FactorCollector, NormCollector, NormTakenTooEarly, SumCollector
from ..engine.problem import Problem, rewind
from ..errors import ArgumentError
from ..factors import costs as _plan
from ..factors.numerics import cast, wide, widest
from ..quantities.factored import Block, FactoredGrads, Meta, gathered, norm_of_all, norms_of_block, norms_of_param
from ..torch_ import levels
from .budget import Run, Work

# ---- what is done with the samples of one chunk ----------------------------------------------------------


def metas(problem: Problem) -> tuple[Meta, ...]:
    return tuple(Meta(p.shape, p.dtype, p.device) for p in problem.params)


def kept(problem: Problem, run: Run = _engine.run) -> tuple[list[Block], _engine.Outcome]:
    """The factors of all samples, and what came out besides."""
    blocks: list[Block] = []
    outcomes: list[_engine.Outcome] = []

    def take(part: "_engine.Part[FactorCollector]") -> None:
        index = None if part.index is None else part.index.to(problem.params[0].device)
        blocks.append(Block(index, tuple(part.sink.result()), part.sink.held <= _plan.SMALL_HELD))
        outcomes.append(part.outcome)

    run(problem, lambda p: FactorCollector(p.params, p.n), take)
    return blocks, _engine.join(outcomes, [block.index for block in blocks])


def factored(problem: Problem, run: Run = _engine.run) -> FactoredGrads:
    """The same, to ask questions of."""
    return factored_outcome(problem, run)[0]


def factored_outcome(problem: Problem, run: Run = _engine.run) -> tuple[FactoredGrads, _engine.Outcome]:
    """The same, and what came out besides as it is, to be joined with that of other chunks."""
    blocks, outcome = kept(problem, run)
    return asked(problem, blocks, outcome), outcome


def asked(problem: Problem, blocks: Sequence[Block], outcome: _engine.Outcome) -> FactoredGrads:
    """What is kept of all samples, and what came out besides, as one object."""
    aux = optree.tree_unflatten(outcome.aux_spec, outcome.aux) if outcome.aux_spec is not None else None
    return FactoredGrads(tuple(blocks), metas(problem), problem.params_spec, problem.n, outcome.values, aux)


def norms_kept(problem: Problem, blocks: Sequence[Block], *, per_param: bool = False) -> list[Tensor]:
    """Norms (N,) of what is kept, or those of each parameter."""
    lead, dtype, device = (problem.n,), dtype_of(problem), problem.params[0].device
    if not per_param:
        return [gathered(blocks, lead, norms_of_block, dtype, device)]
    return [gathered(blocks, lead, partial(norms_of_param, i), dtype, device) for i in range(len(problem.params))]


def norms(
    problem: Problem, run: Run = _engine.run, *, per_param: bool = False, draws: Any = None
) -> tuple[list[Tensor], _engine.Outcome]:
    """Norms (N,), or those of each parameter, and what came out besides; factors are let go as they come.

    `draws`: the generators' states, for those who want the same numbers drawn again later.
    """
    try:
        return _norms_by(NormCollector, problem, run, per_param)
    except NormTakenTooEarly:
        rewind(draws or {})
        return _norms_by(partial(NormCollector, reduces_early=False), problem, run, per_param)


def _norms_by(
    sink: Callable[[Sequence[Tensor], int], NormCollector], problem: Problem, run: Run, per_param: bool
) -> tuple[list[Tensor], _engine.Outcome]:
    found: list[list[Tensor]] = []
    places: list[Tensor | None] = []
    outcomes: list[_engine.Outcome] = []
    dtype, device = dtype_of(problem), problem.params[0].device

    def take(part: "_engine.Part[NormCollector]") -> None:
        rows = part.sink.norms()
        if not per_param:
            rows = [norm_of_all(rows)]
        n = part.outcome.values.shape[0]
        found.append([torch.zeros(n, dtype=dtype, device=device) if t is None else t.to(device, dtype) for t in rows])
        places.append(part.index)
        outcomes.append(part.outcome)

    run(problem, lambda p: sink(p.params, p.n), take)
    outcome = _engine.join(outcomes, places)
    if places[0] is None:
        return found[0], outcome
    whole = [torch.empty(problem.n, dtype=dtype, device=device) for _ in found[0]]
    for index, rows in zip(places, found, strict=True):
        assert index is not None
        for target, t in zip(whole, rows, strict=True):
            target[index.to(device)] = t
    return whole, outcome


def dtype_of(problem: Problem) -> torch.dtype:
    """The dtype of norms."""
    return widest(*[p.dtype for p in problem.params])


def sums(problem: Problem, run: Run = _engine.run) -> tuple[list[Tensor | None], _engine.Outcome]:
    """The gradients summed over all samples, each loss counting as `problem.seed` says; and what came out besides."""
    totals = no_totals(problem)
    outcomes: list[_engine.Outcome] = []
    places: list[Tensor | None] = []

    def take(part: "_engine.Part[SumCollector]") -> None:
        accumulate(totals, part.sink.result())
        outcomes.append(part.outcome)
        places.append(part.index)

    run(problem, lambda p: SumCollector(p.params, p.n, p.seed), take)
    return totals, _engine.join(outcomes, places)


def no_totals(problem: Problem) -> list[Tensor | None]:
    return [None] * len(problem.params)


def work(name: str, do: Callable[[Problem, Run], object]) -> Callable[[Problem], Work]:
    """What is done with a chunk, for those who ask what it allocates."""
    return lambda _: Work(name, do)


def summing(name: str, do: Callable[[Problem, Run], object], problem: Problem, in_place: bool = False) -> Work:
    """The same for sums over samples, which are the result."""
    sizes = [p.numel() * wide(p.dtype).itemsize for p in problem.params]
    return Work(name, do, sums=sum(sizes), in_place=in_place)


def accumulate(totals: list[Tensor | None], found: Sequence[Tensor | None]) -> None:
    for i, t in enumerate(found):
        if t is not None:
            total = totals[i]
            totals[i] = t if total is None else total.add_(t)


def finished(problem: Problem, totals: Sequence[Tensor | None]) -> Any:
    """Sums as a pytree like params, in the parameters' dtypes; zeros where there is nothing."""
    leaves = [
        torch.zeros_like(p, memory_format=torch.contiguous_format) if t is None else cast(t, p.dtype)
        for t, p in zip(totals, problem.params, strict=True)
    ]
    return optree.tree_unflatten(problem.params_spec, leaves)


# ---- chunks, and samples that do not count ---------------------------------------------------------------


def chunks(problem: Problem, step: int) -> Iterator[tuple[slice, Problem]]:
    for start in range(0, problem.n, max(step, 1)):
        rows = slice(start, min(start + step, problem.n))
        yield rows, problem if step >= problem.n else problem.rows(rows)


def refuse_inside_transforms(name: str) -> None:
    """These are not differentiable functions."""
    if levels.current_level() is not None:
        raise ArgumentError(
            f"{name} is called inside a torch.func transform\n"
            "  compute it from per_sample_grads there, which can be differentiated and vmapped."
        )


def counting(problem: Problem, valid: Any) -> tuple[Problem, Tensor | None]:
    """The samples that count, and which they are; None: all."""
    if valid is None:
        return problem, None
    if not isinstance(valid, Tensor) or valid.dtype != torch.bool or tuple(valid.shape) != (problem.n,):
        what = f"{valid.dtype}, {tuple(valid.shape)}" if isinstance(valid, Tensor) else f"a {type(valid).__name__}"
        raise ArgumentError(f"valid is {what}, not booleans of shape ({problem.n},)\n  give one per sample.")
    if bool(valid.all()):
        return problem, None
    index = valid.nonzero()[:, 0]
    return problem.rows(index), index


def spread_out(t: Tensor, index: Tensor | None, n: int) -> Tensor:
    """Rows of the samples that count among zeros for the others."""
    return t if index is None else t.new_zeros(n, *t.shape[1:]).index_copy_(0, index.to(t.device), t)


def joined(problem: Problem, outcomes: list[_engine.Outcome]) -> _engine.Outcome:
    """What came out of all chunks besides gradients."""
    if outcomes:
        return _engine.join(outcomes)
    return _engine.no_outcome(problem)._replace(values=no_values(problem))


def with_aux(result: Any, outcome: _engine.Outcome, index: Tensor | None, n: int) -> Any:
    """`result`, and where `fn` returns aux, that of all samples: zeros for those that do not count."""
    if outcome.aux_spec is None:
        return result
    rows = [spread_out(t, index, n) for t in outcome.aux]
    return result, optree.tree_unflatten(outcome.aux_spec, rows)


def no_values(problem: Problem) -> Tensor:
    return problem.params[0].new_empty(0, dtype=dtype_of(problem))
