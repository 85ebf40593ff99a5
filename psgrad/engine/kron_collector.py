"""What outer products are made of, summed as factors arrive: for Kronecker-factored curvature."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ..factors.base import Factor, Kron
from ..factors.numerics import wide
from ..factors.sum import MatrixBlock, Sum, as_stored
from ..registry.params import Param, Source
from ..torch_.autograd import in_full_precision
from .collectors import Collector, placement
from .problem import Problem


class KronCollector(Collector):
    """Sums over samples and positions of g g^T and x x^T for the parameters that are `wanted`."""

    def __init__(self, problem: Problem, wanted: Collection[int]) -> None:
        super().__init__(problem)
        self.wanted = wanted
        self.sums: dict[int, Kron] = {}
        self.others: dict[int, str] = {}  # parameters with gradients that are no outer products: what these are
        self.derived: set[int] = set()  # functions of parameters for which something came

    def has(self, source: Source) -> bool:
        return source.index in self.sums or source.index in self.others or source.index in self.derived

    @in_full_precision
    def add(self, param: Param, factor: Factor, use: object = None) -> None:
        source = param.source
        index = source.index
        if index >= len(self.params):
            self.derived.add(index)
        elif index in self.wanted:
            term = as_stored(placement(param, factor))
            block = Sum((term,), source.value.shape).block(term)
            found = None if block is None else term.factor.kron(wide(source.value.dtype))
            if block is None or found is None:
                self.others[index] = type(term.factor).__name__
            else:
                self._add(index, block, found)

    def _add(self, index: int, block: MatrixBlock, found: Kron) -> None:
        p, before = self.params[index], self.sums.get(index)
        height, width = p.shape[0], p[0].numel() if len(p) else 0
        output = embedded(found.output, block.row, height)
        inputs = embedded(found.input, block.column, width)
        self.sums[index] = Kron(output, inputs) if before is None else added(before, Kron(output, inputs))

    def add_dense(self, source: Source, grads: Tensor) -> None:
        if source.index >= len(self.params):
            self.derived.add(source.index)
        elif source.index in self.wanted:
            self.others[source.index] = "Dense"

    def pull(self, derived: Sequence[Source], roots: Sequence[Source]) -> None:
        values, traced = [source.traced() for source in derived], [source.traced() for source in roots]
        zeros = [torch.zeros_like(value) for value in values]
        reached = torch.autograd.grad(values, traced, zeros, allow_unused=True, retain_graph=True)
        for source, grad in zip(roots, reached, strict=True):
            if grad is not None and source.index in self.wanted:
                self.others[source.index] = "Pullback"

    def put(self, grads: Sequence[Tensor]) -> None:
        self.others = {i: "a loop over samples" for i, g in enumerate(grads) if i in self.wanted}


def embedded(t: Tensor, start: int, size: int) -> Tensor:
    """A matrix as a diagonal block of one of `size`, a diagonal likewise."""
    if len(t) == size:
        return t
    out = t.new_zeros((size,) * t.dim())
    out[(slice(start, start + len(t)),) * t.dim()] = t
    return out


def added(a: Kron, b: Kron) -> Kron:
    """The sums of both; a diagonal meets a matrix on its diagonal."""
    first, second = (a.output, b.output) if a.output.dim() >= b.output.dim() else (b.output, a.output)
    if first.dim() > second.dim():
        first.diagonal().add_(second)
    else:
        first.add_(second)
    return Kron(first, a.input.add_(b.input))
