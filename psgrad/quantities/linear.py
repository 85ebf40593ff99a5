"""Rows of numbers that are linear in a sample's gradients: what inner products and projections have in common."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..engine.batched import Outcome
from ..engine.collectors import FactorCollector, placement
from ..engine.ladder import join
from ..engine.problem import Problem
from ..factors.base import Factor
from ..factors.sum import Sum, as_stored
from ..registry.params import Param, Source
from ..streaming.stream import Quantity, Run, dtype_of, in_order
from ..torch_.autograd import in_full_precision

LinearMap = Callable[[int, Sum], Tensor]  # for the index of a parameter, and gradients of it: (N, D)


class LinearCollector(FactorCollector):
    """A linear map of every parameter's gradients.

    A factor is let go as soon as it is mapped: of a parameter that is used several times the numbers add up. Factors of
    functions of parameters are kept, as these go through a derivative first. `merges`: the map costs as much for one
    factor as for the sum of several, so that the factors of a parameter that is used more than once are kept till the
    end.
    """

    def __init__(self, problem: Problem, linear_map: LinearMap, merges: bool = False) -> None:
        super().__init__(problem)
        self.linear_map = linear_map
        self.reduces_early = merges  # then `uses` are counted
        self.merges = merges
        self.taken: dict[int, Tensor] = {}

    def has(self, source: Source) -> bool:
        return source.index in self.taken or super().has(source)

    def add(self, param: Param, factor: Factor, use: object = None) -> None:
        source = param.source
        if source.index >= len(self.params) or (self.merges and source.uses > 1):
            super().add(param, factor, use)
        else:
            self._take(source.index, Sum((as_stored(placement(param, factor)),), source.value.shape))

    @in_full_precision
    def _take(self, index: int, own: Sum) -> None:
        found, before = self.linear_map(index, own), self.taken.get(index)
        self.taken[index] = found if before is None else before.add_(found)

    def numbers(self) -> list[Tensor | None]:
        """The numbers (N, D) of every parameter; None where all gradients are zero."""
        for i in range(len(self.params)):
            if (own := self._sum(i)) is not None:
                self._take(i, own)
        return [self.taken.get(i) for i in range(len(self.params))]


@dataclass(eq=False)
class Rows:
    """The map, and what it gave for each chunk."""

    linear_map: LinearMap
    none: list[Tensor]  # the answer for no samples
    chunks: list[list[Tensor]] = field(default_factory=list)


class LinearRows(Quantity[Rows, list[Tensor]]):
    """For every sample `width` numbers: a linear map of each parameter's gradients, added up over parameters.

    Factors are let go as they come. `per_param`: the numbers of each parameter by themselves.
    """

    width = 1
    per_param = False
    merges = False  # see LinearCollector

    def linear_map(self, whole: Problem) -> LinearMap:
        """What is done to the gradients of a parameter; what it needs for that lives as long as the map."""
        raise NotImplementedError

    def start(self, whole: Problem, step: int) -> Rows:
        count = len(whole.params) if self.per_param else 1
        none = _zeros(whole, 0, self.width)
        return Rows(self.linear_map(whole), [none] * count if whole.n == 0 else [])

    def add(self, state: Rows, rows: slice, chunk: Problem, run: Run) -> Outcome:
        found: list[list[Tensor]] = []
        places: list[Tensor | None] = []
        outcomes: list[Outcome] = []
        for group in run(chunk, lambda part: LinearCollector(part, state.linear_map, self.merges)):
            numbers = group.collector.numbers()
            n = group.outcome.values.shape[0]
            each = [numbers] if not self.per_param else [[t] for t in numbers]
            found.append([self._added(chunk, own, n) for own in each])
            places.append(group.places)
            outcomes.append(group.outcome)
        state.chunks.append(in_order(found, places, chunk.n))
        return join(outcomes, places)

    def _added(self, chunk: Problem, numbers: Sequence[Tensor | None], n: int) -> Tensor:
        """The sum (n, width) over parameters."""
        total: Tensor | None = None
        for own in numbers:
            if own is not None:
                own = own.to(chunk.params[0].device, dtype_of(chunk))
                total = own if total is None else total.add_(own)
        return _zeros(chunk, n, self.width) if total is None else total

    def finish(self, state: Rows) -> list[Tensor]:
        if len(state.chunks) == 1:
            return state.chunks[0]
        return [torch.cat(parts) for parts in zip(*state.chunks, strict=True)] or state.none

    def row_bytes(self, whole: Problem) -> int:
        return self.width * dtype_of(whole).itemsize * (len(whole.params) if self.per_param else 1)


def _zeros(problem: Problem, n: int, width: int) -> Tensor:
    return torch.zeros(n, width, dtype=dtype_of(problem), device=problem.params[0].device)
