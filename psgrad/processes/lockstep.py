"""Passes in lock step: every rank runs as many as the one with most to do, since each gathers what all ranks hold.

A pass is one vmapped forward and one backward. Before each of them one small all-reduce says whether some rank has
work, and whether one has failed. A rank without work runs a row of zeros. A pass that ends early, because samples
disagree on a branch or because something raised, still takes part in the gathers that are left of it; what it was to do
is done by passes of their own.

So the order in which a pass gathers has to be known. It is learned once for a model, by a pass on zeros in which ranks
ask each other before every gather. A pass may leave layers out; where it wants one at another point, it is thrown away:
if it was so on all ranks they learn the new order, else all raise.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.batched import Outcome, run_pass
from ..engine.collectors import Collector, FactorCollector, LateNormCollector, SumCollector
from ..engine.ladder import Group, generators_kept
from ..engine.mode import RunOptions
from ..engine.problem import Problem, generators, rewind
from ..engine.signals import Diverged, NeedsLoop, Rerun, SampleWritten, Signal
from ..errors import UnsupportedOpError, place_of
from ..factors.base import Factor
from ..factors.numerics import wide
from ..registry.params import Param, Source
from ..torch_.compiler import CompilerLoaded
from ..torch_.sharding import Unit
from ..torch_.storage import storage_of
from .layers import Layers, OutOfTurn
from .ranks import Ranks


class _Ended(Signal):
    """All ranks know that the pass cannot go on."""


_RETRIES = SampleWritten, Rerun, CompilerLoaded
_ENDS = "", "again", "failed"


class _Work(NamedTuple):
    """Samples that are to run together, and how."""

    rows: Tensor | None  # None: all
    options: RunOptions = RunOptions(save_memory=True)  # what runs where must not depend on a rank's samples
    on_copies: bool = False
    is_again: bool = False  # it was out of turn before

    def of(self, problem: Problem) -> Problem:
        return problem.copied() if self.on_copies else problem

    def after(self, signal: SampleWritten | Rerun | CompilerLoaded) -> "_Work":
        """The same once more, as a run that has ended early says."""
        if isinstance(signal, Rerun):
            return self._replace(options=self.options._replace(**{signal.option: True}))
        return self._replace(on_copies=True) if isinstance(signal, SampleWritten) else self


class Lockstep:
    """The passes of one call."""

    def __init__(self, ranks: Ranks, layers: Layers) -> None:
        self.ranks, self.layers = ranks, layers
        self.is_out_of_turn = False  # in the last pass
        self.is_between = False  # two rounds of passes, where all ranks call what is the user's
        self.ended = ""  # how, where all ranks know that a pass has
        self.pieces: Pieces | None = None  # where sums go as they come
        ranks.rounds.append(self)

    def run(self, problem: Problem, make: Callable[[Problem], Any]) -> Iterator[Group[Any]]:
        """As `engine.collect`, group by group, each in a pass."""
        problem = problem._replace(lasting=True)  # functions of parameters are pulled back when these are gone
        todo = [_Work(None)]
        while todo:
            work = todo.pop(0)
            part = problem if work.rows is None else problem.rows(work.rows)
            self._step(has_work=True)
            self._learn(part if work.is_again else _zeros(problem, 1))
            draws = generators(problem.params)
            collector = make(part)
            try:
                outcome = self._pass(work.of(part), collector, work.options)
            except Diverged as diverged:
                rows = work.rows
                todo = [
                    work._replace(rows=own if rows is None else rows[own.to(rows.device)]) for own in diverged.groups
                ] + todo
            except _RETRIES as signal:
                if isinstance(signal, CompilerLoaded):  # which happens once, and not in a second round of passes
                    rewind(draws)
                todo.insert(0, work.after(signal))
            except OutOfTurn:
                rewind(draws)
                todo.insert(0, self._again(work))
            except NeedsLoop as needed:
                raise _one_by_one(needed) from None
            else:
                yield Group(work.rows, collector, outcome)

    def finish(self, problem: Problem) -> None:
        """Run as many passes more as other ranks need."""
        self.rest(problem)
        self.ranks.rounds.remove(self)

    def rehearse(self, problem: Problem, n: int) -> None:
        """A pass on n rows of zeros on all ranks, for somebody who measures."""
        rows, work = _zeros(problem, n), _Work(None)
        with generators_kept(problem):
            while True:
                self._step(has_work=True)
                self._learn(rows)
                try:
                    self._pass(rows, LateNormCollector(rows), work.options)
                    return
                except OutOfTurn:
                    work = self._again(work)

    def rest(self, problem: Problem) -> None:
        """The same between two rounds of passes."""
        while self._step(has_work=False):
            one = _zeros(problem, 1)
            self._learn(one)
            self._idle(one)
        self.is_between = True

    def scattering(self, params: list[Tensor]) -> "Pieces":
        """From here on a pass sums, and its sums are scattered as they come."""
        self.pieces = Pieces(self.ranks, self.layers, params)
        return self.pieces

    def abandon(self) -> None:
        if not self.ended:
            self._agree(False, True, False, False)

    def _again(self, work: _Work) -> _Work:
        """A pass that was out of turn, once more."""
        if work.is_again:
            raise UnsupportedOpError(
                "the layers of the model run in another order each time\n"
                "  under fully_shard every rank has to call the same modules in the same order."
            ) from None
        self.is_out_of_turn = True
        return work._replace(is_again=True)

    def _learn(self, part: Problem) -> None:
        """Find out in which order a pass gathers, once for a model, by a pass on one row of `part` on all ranks."""
        if (self.pieces is not None) in self.layers.schedules:
            return
        one, work = part if part.n == 1 else part.rows(slice(0, 1)), _Work(None)
        while True:
            try:
                with generators_kept(part):
                    self._pass(work.of(one), self._idle_collector(one), work.options)
                return
            except _Ended:
                pass
            except _RETRIES as signal:
                work = work.after(signal)
                self._end("again")
            except NeedsLoop as needed:
                self._end("failed")
                raise _one_by_one(needed) from None
            except Exception:
                self._end("failed")
                raise
            if self.ended == "failed":
                self.ranks.refuse()
            if self.ended == "orders":
                self.ranks.over = True
                raise _disordered()
            self.ended = ""

    def _end(self, how: str) -> None:
        """Let the others know, who learn an order with this rank, that its pass has come to an end."""
        if not self.ended and not self.ranks.over:
            self.ended = _ENDS[self._agree(0, _ENDS.index(how), 0, 0)[1]]

    def _ask(self, number: int) -> None:
        """Whether all ranks are at the same collective of a pass, before it begins."""
        if not self.ended:
            how, highest, lowest = self._agree(0, 0, number, -number)[1:]
            self.ended = _ENDS[how] or ("orders" if highest != -lowest else "")
        if self.ended:
            raise _Ended

    def _idle(self, one: Problem) -> None:
        """A pass on a row of zeros, for the others' sake. It changes nothing, and its failure is nobody's."""
        with generators_kept(one), contextlib.suppress(Exception, Signal):
            self._pass(one, self._idle_collector(one), RunOptions(save_memory=True))

    def _idle_collector(self, one: Problem) -> Collector:
        if self.pieces is None:
            return FactorCollector(one)
        return SumCollector(one._replace(seed=one.params[0].new_zeros(1)))  # a weight of zero: nothing is added

    def _pass(self, part: Problem, collector: Collector, options: RunOptions) -> Outcome:
        _copy_parameters(collector)
        scatter = None if self.pieces is None else self.pieces.of(collector)
        is_good, is_known = False, (self.pieces is not None) in self.layers.schedules
        try:
            with self.layers.passing(self._ask, scatter):
                outcome = run_pass(part, collector, options)
            is_good = True
            return outcome
        finally:
            if self.layers.units.is_broken:
                self.ranks.lose()
            if self.pieces is not None and not self.ranks.over and (is_good or is_known):
                self.pieces.scatter_rest(collector if is_good else None)

    def _step(self, has_work: bool) -> bool:
        """Whether some rank has work. Raises where one has failed."""
        out = self.is_out_of_turn
        more, failed, some, others = self._agree(has_work, False, out, not out)
        if failed:
            self.ranks.refuse()
        if some and others:
            self.ranks.over = True
            raise _disordered()
        if some:
            del self.layers.schedules[self.pieces is not None]
        self.is_out_of_turn = False
        return bool(more)

    def _agree(self, *own: int) -> list[int]:
        """The largest of what ranks say: four numbers, the second of which tells whether one has failed."""
        self.is_between = False
        said = torch.tensor(own, dtype=torch.int64, device=self.ranks.device)
        with self.ranks.in_touch():
            dist.all_reduce(said, dist.ReduceOp.MAX, group=self.ranks.group)
        return [int(number) for number in said.tolist()]


def _one_by_one(needed: NeedsLoop) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"samples of a model under fully_shard would have to run one by one: {needed.why}\n"
        f"  at {place_of(needed)}\n"
        "  write that part so that vmap takes it, or give the model before fully_shard."
    )


def _disordered() -> UnsupportedOpError:
    return UnsupportedOpError(
        "the ranks of the group ran the layers of the model in different orders\n"
        "  under fully_shard every rank has to call the same modules in the same order."
    )


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


# ---- sums ------------------------------------------------------------------------------------------------


class Pieces:
    """This rank's pieces of the sums over all ranks, so far: no rank holds more whole sums than those of a unit.

    What is added in several parts is scattered in several.
    """

    def __init__(self, ranks: Ranks, layers: Layers, params: list[Tensor]) -> None:
        self.ranks, self.params = ranks, params
        places = {storage_of(p): i for i, p in enumerate(params)}
        self.of_unit = {
            id(unit): [i for param in unit.params if (i := places.get(storage_of(param.gathered()))) is not None]
            for unit in layers.units.all
        }
        self.found: list[Any] = [None] * len(params)

    def of(self, collector: Any) -> Callable[[Unit, bool], None]:
        """Scatters what `collector` has for a unit, or zeros where its pass has failed."""

        def scatter(unit: Unit, is_good: bool) -> None:
            for i in self.of_unit[id(unit)]:
                self._scatter(i, collector.sums.pop(i, None) if is_good else None)

        return scatter

    def scatter_rest(self, collector: Any) -> None:
        """What came when the backward of its unit was over: by functions of parameters, which are pulled back last."""
        there = {} if collector is None else collector.sums
        flags = torch.tensor([i in there for i in range(len(self.params))], dtype=torch.int32, device=self.ranks.device)
        with self.ranks.in_touch():
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.ranks.group)
        for i, flag in enumerate(flags.tolist()):
            if flag:
                self._scatter(i, there.pop(i, None))

    def result(self) -> list[Tensor]:
        """The pieces, in the dtypes of the parameters' own."""
        for i, found in enumerate(self.found):
            if found is None:  # no rank had a sample
                self.found[i] = torch.zeros_like(self.ranks.leaves[i])
        return [t.to(own.dtype) for t, own in zip(self.found, self.ranks.leaves, strict=True)]

    def _scatter(self, i: int, total: Tensor | None) -> None:
        p, place = self.params[i], self.ranks.places[i]
        assert place is not None
        if total is None:
            total = torch.zeros(p.shape, dtype=wide(p.dtype), device=p.device)
        with self.ranks.in_touch():
            piece = place.summed(total.to(wide(p.dtype)).reshape(p.shape).contiguous())
        self.found[i] = piece if self.found[i] is None else self.found[i] + piece
