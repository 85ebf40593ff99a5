"""Sums for a model under fully_shard: from factors that are kept, parameter by parameter: one whole sum at a time."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..engine.problem import Problem
from ..processes.ranks import Ranks
from ..processes.scatter import Scatter
from ..streaming.blocks import Block, add_sums
from ..torch_.autograd import in_full_precision


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
    """What block k knows of parameter i, and then knows no more."""
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
