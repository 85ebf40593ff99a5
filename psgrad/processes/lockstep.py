"""Passes in lock step: every rank runs as many as the one with most to do, since each gathers what all ranks hold.

A pass is one vmapped forward and one backward. Before each of them one small all-reduce says whether some rank has
work, and whether one has failed. A rank without work runs a row of zeros. A pass that ends early, because samples
disagree on a branch or because something raised, still takes part in the gathers that are left of it; what it was to do
is done by passes of their own.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.batched import Outcome, run_pass
from ..engine.collectors import Collector, FactorCollector, NormCollector, SumCollector
from ..engine.ladder import Group, generators_kept
from ..engine.mode import RunOptions
from ..engine.problem import Problem
from ..engine.signals import Diverged, NeedsLoop, Rerun, SampleWritten, Signal
from ..errors import UnsupportedOpError, place_of
from ..factors.base import Factor
from ..registry.params import Param, Source
from ..torch_.compiler import CompilerLoaded
from ..torch_.storage import storage_of
from .layers import Layers
from .pieces import Pieces
from .ranks import Ranks


class _Work(NamedTuple):
    """Samples that are to run together, and how."""

    rows: Tensor | None  # None: all
    options: RunOptions = RunOptions(save_memory=True)  # what runs where must not depend on a rank's samples
    on_copies: bool = False


class Lockstep:
    """The passes of one call."""

    def __init__(self, ranks: Ranks, layers: Layers) -> None:
        self.ranks, self.layers = ranks, layers
        self.order = 0  # in which the last pass has gathered
        self.pieces: Pieces | None = None  # where sums go as they come
        ranks.rounds.append(self)

    def run(self, problem: Problem, make: Callable[[Problem], Any]) -> Iterator[Group[Any]]:
        """As `engine.collect`, group by group, each in a pass."""
        problem = problem._replace(lasting=True)  # functions of parameters are pulled back when these are gone
        todo = [_Work(None)]
        while todo:
            work = todo.pop(0)
            self._step(has_work=True)
            self._learn(problem)
            part = problem if work.rows is None else problem.rows(work.rows)
            collector = make(part)
            try:
                outcome = self._pass(part.copied() if work.on_copies else part, collector, work.options)
            except Diverged as diverged:
                rows = work.rows
                todo = [
                    work._replace(rows=own if rows is None else rows[own.to(rows.device)]) for own in diverged.groups
                ] + todo
            except SampleWritten:
                todo.insert(0, work._replace(on_copies=True))
            except Rerun as rerun:
                todo.insert(0, work._replace(options=work.options._replace(**{rerun.option: True})))
            except CompilerLoaded:
                todo.insert(0, work)
            except NeedsLoop as needed:
                raise UnsupportedOpError(
                    f"samples of a model under fully_shard would have to run one by one: {needed.why}\n"
                    f"  at {place_of(needed)}\n"
                    "  write that part so that vmap takes it, or give the model before fully_shard."
                ) from None
            else:
                yield Group(work.rows, collector, outcome)

    def finish(self, problem: Problem) -> None:
        """Run as many passes more as other ranks need."""
        self.rest(problem)
        self.ranks.rounds.remove(self)

    def rehearse(self, problem: Problem, n: int) -> None:
        """A pass on n rows of zeros on all ranks, for somebody who measures."""
        self._step(has_work=True)
        self._learn(problem)
        rows = _zeros(problem, n)
        with generators_kept(problem):
            self._pass(rows, NormCollector(rows.params, n, reduces_early=False), RunOptions(save_memory=True))

    def rest(self, problem: Problem) -> None:
        """The same between two rounds of passes."""
        while self._step(has_work=False):
            self._learn(problem)
            self._idle(problem)

    def scattering(self, params: list[Tensor]) -> Pieces:
        """From here on a pass sums, and its sums are scattered as they come."""
        self.pieces = Pieces(self.ranks, self.layers, params)
        return self.pieces

    def abandon(self) -> None:
        self._agree(False, True)

    def _learn(self, problem: Problem) -> None:
        """Find out in which order a pass gathers, once for a model, by a pass on zeros on all ranks."""
        if (self.pieces is not None) not in self.layers.schedules:
            self._idle(problem)

    def _idle(self, problem: Problem) -> None:
        """A pass on a row of zeros, for the others' sake. It changes nothing, and its failure is nobody's."""
        one = _zeros(problem, 1)
        with generators_kept(problem):
            try:
                self._pass(one, self._idle_collector(one), RunOptions(save_memory=True))
            except (Exception, Signal):
                if (self.pieces is not None) not in self.layers.schedules:
                    raise

    def _idle_collector(self, one: Problem) -> Collector:
        if self.pieces is None:
            return FactorCollector(one.params, 1)
        return SumCollector(one.params, 1, one.params[0].new_zeros(1))  # a weight of zero: nothing is added

    def _pass(self, part: Problem, collector: Collector, options: RunOptions) -> Outcome:
        _copy_parameters(collector)
        scatter = None if self.pieces is None else self.pieces.of(collector)
        is_good = False
        try:
            with self.layers.passing(scatter):
                outcome = run_pass(part, collector, options)
            is_good = True
            return outcome
        finally:
            self.order = self.layers.order()
            self.ranks.over = self.layers.units.is_broken or self.ranks.over
            if self.pieces is not None and not self.ranks.over:
                self.pieces.scatter_rest(collector if is_good else None)

    def _step(self, has_work: bool) -> bool:
        """Whether some rank has work. Raises where one has failed."""
        more, failed, highest, lowest = self._agree(has_work, False)
        if failed:
            self.ranks.refuse()
        if highest != -lowest:  # some rank got pieces of one layer for those of another
            self.ranks.over = True
            raise UnsupportedOpError(
                "the ranks of the group ran the layers of the model in different orders\n"
                "  under fully_shard every rank has to call the same modules in the same order."
            )
        return bool(more)

    def _agree(self, has_work: bool, failed: bool) -> list[int]:
        """The largest of what ranks say; of their orders the smallest, too, which is the same if there is but one."""
        said = torch.tensor([has_work, failed, self.order, -self.order], device=self.ranks.device)
        with self.ranks.in_touch():
            dist.all_reduce(said, dist.ReduceOp.MAX, group=self.ranks.group)
        return [int(number) for number in said.tolist()]


def _zeros(problem: Problem, n: int) -> Problem:
    """The problem with n samples of zeros."""
    zeros = [t.new_zeros(n, *t.shape[1:]) if b else t for t, b in zip(problem.batch, problem.batched, strict=True)]
    return problem._replace(batch=zeros, n=n, seed=None, own_batch=True, lasting=True, reached=[])


def _copy_parameters(collector: Collector) -> None:
    """Let `collector` keep copies of gathered parameters, where a gradient is one: their memory will be gone."""
    theirs = {storage_of(p) for p in collector.params}
    add, add_dense = collector.add, collector.add_dense

    def own(t: Tensor) -> Tensor:
        return t.clone() if storage_of(t) in theirs else t

    def copying_add(param: Param, factor: Factor, use: object = None) -> None:
        add(param, factor.each(own), use)

    def copying_add_dense(source: Source, grads: Tensor) -> None:
        add_dense(source, own(grads))

    vars(collector).update(add=copying_add, add_dense=copying_add_dense)
