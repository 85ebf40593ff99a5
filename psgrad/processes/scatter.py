"""Sums over all ranks, parameter by parameter, each in pieces as the parameter is."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..factors.numerics import wide
from .ranks import Ranks


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
