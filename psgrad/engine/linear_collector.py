"""Numbers that are linear in a sample's gradients, such as inner products: added up as factors arrive."""

from collections.abc import Callable

from torch import Tensor

from ..factors.base import Factor
from ..factors.sum import Sum, as_stored
from ..registry.params import Param, Source
from ..torch_.autograd import in_full_precision
from .collectors import FactorCollector, placement
from .problem import Problem

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
