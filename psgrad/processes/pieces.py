"""Sums of a model under fully_shard, scattered while a backward runs: no rank holds more than a unit's."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..factors.numerics import wide
from ..torch_.sharding import Unit
from ..torch_.storage import storage_of
from .layers import Layers
from .ranks import Ranks


class Pieces:
    """This rank's pieces of the sums over all ranks, so far. What is added in several parts is scattered in several."""

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
