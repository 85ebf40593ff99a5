"""Rows of numbers that are linear in a sample's gradients: what inner products and projections have in common."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..engine.batched import Outcome
from ..engine.ladder import join
from ..engine.linear_collector import LinearCollector, LinearMap
from ..engine.problem import Problem
from ..streaming.stream import Quantity, Run, dtype_of


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

        def make(problem: Problem) -> LinearCollector:
            return LinearCollector(problem, state.linear_map, self.merges)

        for group in run(chunk, make):
            numbers = group.collector.numbers()
            n = group.outcome.values.shape[0]
            each = [numbers] if not self.per_param else [[t] for t in numbers]
            found.append([self._added(chunk, own, n) for own in each])
            places.append(group.places)
            outcomes.append(group.outcome)
        state.chunks.append(self._placed(chunk, found, places))
        return join(outcomes, places)

    def _added(self, chunk: Problem, numbers: Sequence[Tensor | None], n: int) -> Tensor:
        """The sum (n, width) over parameters."""
        total: Tensor | None = None
        for own in numbers:
            if own is not None:
                own = own.to(chunk.params[0].device, dtype_of(chunk))
                total = own if total is None else total.add_(own)
        return _zeros(chunk, n, self.width) if total is None else total

    def _placed(self, chunk: Problem, found: list[list[Tensor]], places: list[Tensor | None]) -> list[Tensor]:
        """The rows of groups at the places of their samples."""
        if places[0] is None:
            return found[0]
        whole = [_zeros(chunk, chunk.n, self.width) for _ in found[0]]
        for index, rows in zip(places, found, strict=True):
            assert index is not None
            for target, t in zip(whole, rows, strict=True):
                target[index.to(target.device)] = t
        return whole

    def finish(self, state: Rows) -> list[Tensor]:
        if len(state.chunks) == 1:
            return state.chunks[0]
        return [torch.cat(parts) for parts in zip(*state.chunks, strict=True)] or state.none

    def row_bytes(self, whole: Problem) -> int:
        return self.width * dtype_of(whole).itemsize * (len(whole.params) if self.per_param else 1)


def _zeros(problem: Problem, n: int, width: int) -> Tensor:
    return torch.zeros(n, width, dtype=dtype_of(problem), device=problem.params[0].device)
