"""Sums for a model under fully_shard: from factors that are kept, parameter by parameter: one whole sum at a time."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.problem import Problem
from ..factors.numerics import wide
from ..processes.ranks import Ranks
from ..streaming.blocks import Block, add_sums
from ..torch_.autograd import in_full_precision


class Scatter:
    """A round with one sum after the other, or two for each parameter; which they are follows from params alone.

    The heads come first, and at the end some numbers that are summed over all ranks, among them whether one has failed.
    """

    def __init__(
        self, ranks: Ranks, params: Sequence[Tensor], samples: int, numbers: int = 0, twice: bool = False
    ) -> None:
        ranks.agree(samples)
        self.ranks, self.params, self.numbers = ranks, params, numbers
        self.todo = [(i, whole) for i in range(len(params)) for whole in ((True, False) if twice else (False,))]
        ranks.rounds.append(self)

    def whole(self, i: int, total: Tensor | None) -> Tensor:
        """The sum of what all ranks have for parameter i, whole on every rank."""
        return self._next(i, True, total)

    def pieces(self, i: int, total: Tensor | None) -> Tensor:
        """The same in pieces, as parameter i is, in its dtype."""
        found = self._next(i, False, total)
        return found.to(self.ranks.leaves[i].dtype)

    def finish(self, numbers: Sequence[Tensor] = ()) -> list[float]:
        """Raises where some rank has failed. Returns the sums of `numbers`."""
        *found, failed = self._end(torch.stack([t.double() for t in numbers]) if numbers else None)
        if failed:
            self.ranks.refuse()
        return found

    def abandon(self) -> None:
        while self.todo:
            self._next(*self.todo[0], None)
        self._end(None, failed=True)

    def _next(self, i: int, whole: bool, total: Tensor | None) -> Tensor:
        if self.todo[0] != (i, whole):
            raise AssertionError(f"parameter {i} is out of turn; please report this")
        p = self.params[i]
        if total is None:
            total = torch.zeros(p.shape, dtype=wide(p.dtype), device=p.device)
        total = total.to(wide(p.dtype)).reshape(p.shape).contiguous()
        with self.ranks.in_touch():
            if whole:
                dist.all_reduce(total, group=self.ranks.group)
                found = total
            else:
                place = self.ranks.places[i]
                assert place is not None
                found = place.summed(total)
        self.todo.pop(0)
        return found

    def _end(self, numbers: Tensor | None, failed: bool = False) -> list[float]:
        said = torch.zeros(self.numbers + 1, dtype=torch.float64, device=self.ranks.device)
        if numbers is not None:
            said[:-1] = numbers
        said[-1] = failed
        self.ranks.finished(self.ranks.started(said))
        self.ranks.rounds.remove(self)
        return [float(number) for number in said.tolist()]


def scattered_sums(
    ranks: Ranks, problem: Problem, blocks: list[Block], weights: Sequence[Tensor], samples: int
) -> list[Tensor]:
    """Sums over all ranks with weights (N,) for each parameter, in pieces; `samples` of this rank's count.

    Takes `blocks` apart: what is known of a parameter is let go with its sum.
    """
    scatter = Scatter(ranks, problem.params, samples)
    found = []
    for i in range(len(problem.params)):
        totals: list[Tensor | None] = [None]
        for k in range(len(blocks)):
            add_sums(_taken(blocks, k, i), [weights[i]], totals)
        found.append(scatter.pieces(i, totals.pop()))
    scatter.finish()
    return found


def _taken(blocks: list[Block], k: int, i: int) -> Block:
    """Take what block k knows of parameter i out of it."""
    places, sums, _ = blocks[k]
    blocks[k] = blocks[k]._replace(sums=(*sums[:i], None, *sums[i + 1 :]))
    return Block(places, (sums[i],), True)


class ScatteredMoments(NamedTuple):
    """Over the samples of all ranks; mean and sums of squared deviations in pieces."""

    mean: list[Tensor]
    deviations: list[Tensor]
    sq_mean: Tensor  # of the whole mean
    total: Tensor  # of all squared deviations
    seen: int


@in_full_precision
def scattered_moments(ranks: Ranks, problem: Problem, blocks: Sequence[Block], dtype: torch.dtype) -> ScatteredMoments:
    """Parameter by parameter: the whole mean, which every rank needs, then what each has around it."""
    scatter = Scatter(ranks, problem.params, problem.n, numbers=1, twice=True)
    seen = ranks.count
    means, deviations = [], []
    square = total = torch.zeros((), dtype=torch.float64, device=problem.params[0].device)
    for i in range(len(problem.params)):
        totals: list[Tensor | None] = [None]
        for block in blocks:
            add_sums(Block(block.places, (block.sums[i],), True), None, totals)
        mean = scatter.whole(i, totals.pop()) / max(seen, 1)
        around = torch.zeros_like(mean)
        for block in blocks:
            own = block.sums[i]
            n = problem.n if block.places is None else len(block.places)
            around += n * mean.square() if own is None else own.squared_deviations(mean)
        square = square + mean.square().sum(dtype=torch.float64).to(square.device)
        total = total + around.sum(dtype=torch.float64).to(total.device)
        place = ranks.places[i]
        assert place is not None
        means.append(place.of(mean.to(ranks.leaves[i].dtype)))
        deviations.append(scatter.pieces(i, around))
    (whole,) = scatter.finish([total])
    return ScatteredMoments(means, deviations, square.to(dtype), square.new_tensor(whole).to(dtype), seen)
