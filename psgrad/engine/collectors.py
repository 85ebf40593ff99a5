"""Where the factors of a backward go: written out as they come, kept, or reduced to norms or sums."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..factors import assumptions, costs, warm_memory
from ..factors.base import Factor, NormMemo, without_zero_weights
from ..factors.dense import Dense
from ..factors.numerics import wide
from ..factors.pullback import Pullback, pull, pull_rows, pull_sums
from ..factors.region import Region
from ..factors.sum import Placement, Sum, as_stored, sum_of
from ..registry.params import Param, Source
from ..torch_ import tracing
from ..torch_.autograd import full_precision, in_full_precision
from .problem import Problem


class Collector:
    """What is made of the factors that a backward yields, source by source."""

    reduces_early = False  # it wants to know, when a factor comes, if more are to come for the same source
    weights: Tensor | None = None  # (N,): those of the samples' gradients, where they are not in the backward's seed
    weighs_factors = False  # the weights are not to be in the backward's seed

    def __init__(self, problem: Problem) -> None:
        self.params, self.n = problem.params, problem.n

    def has(self, source: Source) -> bool:
        """Whether anything came for `source`."""
        raise NotImplementedError

    def add(self, param: Param, factor: Factor, use: object = None) -> None:
        """Take a factor of a parameter, or of a view of one."""
        raise NotImplementedError

    def add_dense(self, source: Source, grads: Tensor) -> None:
        """Take gradients (N, *shape) of a whole source that autograd worked out."""
        raise NotImplementedError

    def pull(self, derived: Sequence[Source], roots: Sequence[Source]) -> None:
        """Pass what came for functions of parameters on to the parameters."""
        raise NotImplementedError

    def put(self, grads: Sequence[Tensor]) -> None:
        """Take the gradients of every parameter, worked out by somebody else; nothing else comes."""
        raise NotImplementedError


class Relay(Collector):
    """Hands everything on to another collector, which may change from one backward of a graph to the next."""

    to: Collector

    def has(self, source: Source) -> bool:
        return self.to.has(source)

    def add(self, param: Param, factor: Factor, use: object = None) -> None:
        self.to.add(param, factor, use)

    def add_dense(self, source: Source, grads: Tensor) -> None:
        self.to.add_dense(source, grads)

    def pull(self, derived: Sequence[Source], roots: Sequence[Source]) -> None:
        self.to.pull(derived, roots)


class DenseCollector(Collector):
    """Per-sample gradients (N, *shape) of every parameter, written as factors arrive."""

    def __init__(self, problem: Problem, buffers: Sequence[Tensor] = ()) -> None:
        self.params, self.n = problem.params, problem.n
        self.grads: dict[int, Tensor] = {}  # what has been written, by the source's index
        self.later: dict[int, list[Placement]] = {}  # small factors of what is used often: one long sum for many
        self.buffers = dict(enumerate(buffers)) if buffers else {}  # contiguous: where to write gradients

    def has(self, source: Source) -> bool:
        return source.index in self.grads or source.index in self.later

    def _write(self, index: int, like: Tensor) -> None:
        """Write the factors of a source that were put off."""
        terms = self.later.pop(index, None)
        if terms is None:
            return
        written, buffer, whole = self.grads.get(index), self.buffers.get(index), sum_of(terms, like.shape)
        assert whole is not None
        shape = (self.n, *like.shape)
        if written is None:
            self.grads[index] = whole.dense(warm_memory.empty(shape, like) if buffer is None else buffer)
        else:
            written.add_(whole.dense(warm_memory.empty(shape, like)))

    def pull(self, derived: Sequence[Source], roots: Sequence[Source]) -> None:
        for source in derived:
            self._write(source.index, source.value)
        rows = [self.grads.pop(source.index) for source in derived]
        values = [source.traced() for source in derived]
        traced = [source.traced() for source in roots]
        for source, grads in zip(roots, pull_rows(values, traced, rows), strict=True):
            if grads is not None:
                self.add_dense(source, grads)

    def add(self, param: Param, factor: Factor, use: object = None) -> None:
        source = param.source
        index, dtype = source.index, source.value.dtype
        if source.uses > 1 and factor.sums_positions and not costs.keeps_dense(*factor.bytes()):
            self.later.setdefault(index, []).append(placement(param, factor))
            return
        written, buffer = self.grads.get(index), self.buffers.get(index)
        if written is None and (param.value is source.value or param.whole):
            shape = (self.n, *source.value.shape)
            room = buffer if buffer is not None or factor.is_written else _room(factor, shape, source.value)
            grads = factor.dense(room)
            if buffer is None and not (grads.shape == shape and grads.dtype == dtype and grads.is_contiguous()):
                if grads.numel() != prod(shape):
                    raise ArgumentError(
                        f"a rule's factor for {source.name} has shape {tuple(grads.shape)}, not {shape}\n"
                        "  its backward must yield one gradient per sample: mend the rule."
                    )
                grads = grads.reshape(shape).to(dtype).contiguous()
            self.grads[index] = grads
            return
        if written is None and param.covers:
            whole = warm_memory.empty((self.n, *source.value.shape), source.value) if buffer is None else buffer
            factor.dense(param.part.rows(whole))
            self.grads[index] = whole
            return
        if written is None:
            shape = (self.n, *source.value.shape)
            written = (warm_memory.empty(shape, source.value) if buffer is None else buffer).zero_()
            self.grads[index] = written
        region, grads = param.collapsed(factor.dense())
        region.rows(written).add_(grads)

    def add_dense(self, source: Source, grads: Tensor) -> None:
        index = source.index
        written, buffer = self.grads.get(index), self.buffers.get(index)
        if written is not None:
            written.add_(grads)
        elif buffer is not None:
            self.grads[index] = buffer.copy_(grads)
        else:  # autograd may hand out one tensor twice, or an expanded one
            self.grads[index] = warm_memory.empty(grads.shape, grads).copy_(grads)

    def put(self, grads: Sequence[Tensor]) -> None:
        for i, g in enumerate(grads):
            self.grads[i] = g

    def result(self) -> list[Tensor]:
        """The gradients of every parameter; zeros where nothing used it."""
        if self.later:
            with full_precision():
                for i in list(self.later):
                    self._write(i, self.params[i])
        if len(self.grads) < len(self.params):
            for i, p in enumerate(self.params):
                if i not in self.grads:
                    buffer = self.buffers.get(i)
                    self.grads[i] = p.new_zeros(self.n, *p.shape) if buffer is None else buffer.zero_()
        return [self.grads[i] for i in range(len(self.params))]


def placement(param: Param, factor: Factor) -> Placement:
    """A factor at its place; gradients of an expanded view are written out, and summed."""
    if param.whole:
        return Placement(None, factor)
    region = param.part
    if any(size > 1 and stride == 0 for size, stride in zip(region.shape, region.strides, strict=True)):
        region, grads = param.collapsed(factor.dense())
        return Placement(region, Dense(grads))
    return Placement(region, factor)


def _room(factor: Factor, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    """Memory for a factor's gradients where they are many; None: `dense` finds some itself."""
    if not warm_memory.is_lent(shape, like):  # as in small calls
        return None
    return warm_memory.empty(shape, like) if factor.fills_out and shape[1:] == tuple(factor.shape) else None


class FactorCollector(Collector):
    """The factors themselves, without the graph they come from."""

    def __init__(self, problem: Problem) -> None:
        self.params, self.n = problem.params, problem.n
        self.terms: dict[int, list[Placement]] = {}  # by the source's index
        self.held = 0  # bytes

    def has(self, source: Source) -> bool:
        return source.index in self.terms

    def add(self, param: Param, factor: Factor, use: object = None) -> None:
        """Keep a factor in the form that takes less memory."""
        term = Placement(None, factor) if param.value is param.source.value else placement(param, factor)
        region, factor = term
        held, dense = factor.bytes()
        if not factor.is_written and costs.keeps_dense(held, dense):
            tensors, room = factor.tensors(), None
            if len({t.dtype for t in tensors}) == 1:  # which their products then have, too
                room = _room(factor, (self.n, *factor.shape), tensors[0])
            term, held = Placement(region, Dense(factor.dense(room))), dense
        self.held += held
        self.terms.setdefault(param.source.index, []).append(term)

    def add_dense(self, source: Source, grads: Tensor) -> None:
        term = Placement(None, Dense(grads.contiguous()))
        self.held += grads.nbytes
        self.terms.setdefault(source.index, []).append(term)

    def pull(self, derived: Sequence[Source], roots: Sequence[Source]) -> None:
        """Keep factors of functions of parameters: they are passed on to the parameters when somebody asks."""
        values = tuple(source.traced() for source in derived)
        sums = tuple(own for s in derived if (own := sum_of(self.terms.pop(s.index), s.value.shape)) is not None)
        traced = [source.traced() for source in roots]
        reached = pull(values, traced, list(map(torch.zeros_like, values)))
        for source, root, grad in zip(roots, traced, reached, strict=True):
            if grad is not None:
                term = Placement(None, Pullback(sums, values, root))
                self.terms.setdefault(source.index, []).append(term)

    def put(self, grads: Sequence[Tensor]) -> None:
        self.terms = {i: [Placement(None, Dense(g))] for i, g in enumerate(grads)}
        self.held = sum(g.nbytes for g in grads)

    def result(self) -> list[Sum | None]:
        """What is known of each parameter's gradients; None: all are zero."""
        take = self.terms.pop
        return [sum_of(take(i, ()), p.shape) for i, p in enumerate(self.params)]

    def _sum(self, i: int) -> Sum | None:
        return sum_of(self.terms.pop(i, ()), self.params[i].shape)


class NormTakenTooEarly(BaseException):
    """A gradient came for a source whose norm was taken already: keep all factors instead."""


class NormCollector(FactorCollector):
    """Norms, taken as factors arrive where one is all that comes; the others are kept till the end."""

    reduces_early = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.taken: dict[int, Tensor] = {}
        self.memo = NormMemo()

    def has(self, source: Source) -> bool:
        if source.index in self.taken:
            raise NormTakenTooEarly
        return super().has(source)

    def add(self, param: Param, factor: Factor, use: object = None) -> None:
        source = param.source
        index = source.index
        if index in self.taken:
            raise NormTakenTooEarly
        is_one = param.value is source.value or 0 not in param.value.stride()  # each number has a gradient of its own
        if is_one and source.uses == 1 and self.reduces_early and index < len(self.params):
            self.taken[index] = factor.norms_with(self.memo)
        else:
            super().add(param, factor, use)

    def add_dense(self, source: Source, grads: Tensor) -> None:
        if source.index in self.taken:
            raise NormTakenTooEarly
        super().add_dense(source, grads)

    def norms(self) -> list[Tensor | None]:
        """Norms (N,) of every parameter; None where all are zero."""
        if self.terms:
            with full_precision():
                for i in sorted(self.terms):
                    if (own := self._sum(i)) is not None:
                        self.taken[i] = own.norms_with(self.memo)
        return list(map(self.taken.get, range(len(self.params))))


class LateNormCollector(NormCollector):
    """Norms of factors that are all kept till the end."""

    reduces_early = False


_MODERATE = (1e-6, 1e6)  # weights that a backward in float32 takes without harm


class SumCollector(Collector):
    """The sum over samples of each parameter's gradients, added up as factors arrive."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        seed = problem.seed
        self.sums: dict[int, Tensor] = {}  # by the source's index, in the dtype for sums
        # the samples whose weight is not 0; the others are left out, as 0 times a NaN would be NaN. None: all
        self.counted: Tensor | None = None
        self.weighs_factors = False  # weights far from 1 do not go through the backward, where they leave its range
        self.seed = seed if tracing.is_recorded() else None  # whose zeros nobody has looked at
        if self.seed is not None:
            self.weighs_factors = True
        elif seed is not None and not seed.is_meta and seed.numel():
            low, high = map(float, seed.abs().aminmax())
            if low == 0:
                self.counted = seed.nonzero()[:, 0]
                low = float(seed[self.counted].abs().amin()) if len(self.counted) else 1.0
            self.weighs_factors = not (_MODERATE[0] <= low <= high <= _MODERATE[1])

    @in_full_precision
    def _sum(self, factor: Factor) -> Tensor | None:
        if self.counted is None:
            if self.seed is not None and not assumptions.are_noted():
                factor = without_zero_weights(factor, self.seed)
            return factor.weighted_sum(self.weights)
        w = None if self.weights is None else self.weights[self.counted]
        return factor.select(self.counted).weighted_sum(w) if len(self.counted) else None

    def has(self, source: Source) -> bool:
        return source.index in self.sums

    def _add(self, index: int, region: Region | None, found: Tensor | None, shape: torch.Size) -> None:
        if found is None:
            return
        if index not in self.sums and region is None:
            self.sums[index] = found.contiguous().view(shape)
            return
        if index not in self.sums:
            self.sums[index] = found.new_zeros(shape)
        target = self.sums[index] if region is None else region.of(self.sums[index])
        target.add_(found.reshape(target.shape))

    def add(self, param: Param, factor: Factor, use: object = None) -> None:
        source, (region, factor) = param.source, as_stored(placement(param, factor))
        found = self._sum(factor)
        self._add(source.index, region, found, source.value.shape)

    def add_dense(self, source: Source, grads: Tensor) -> None:
        shape = source.value.shape
        self._add(source.index, None, self._sum(Dense(grads)), shape)

    def pull(self, derived: Sequence[Source], roots: Sequence[Source]) -> None:
        values, traced = [s.traced() for s in derived], [s.traced() for s in roots]
        sums = [self.sums.pop(s.index) for s in derived]
        for source, grad in zip(roots, pull_sums(values, traced, sums), strict=True):
            if grad is not None:
                shape = source.value.shape
                own = grad.to(wide(grad.dtype), copy=True)  # autograd may hand out one tensor twice
                self._add(source.index, None, own, shape)

    def put(self, grads: Sequence[Tensor]) -> None:
        for i, (p, g) in enumerate(zip(self.params, grads, strict=True)):
            self._add(i, None, self._sum(Dense(g)), p.shape)

    def result(self) -> list[Tensor | None]:
        """The sums; None where nothing came."""
        if self.seed is not None and assumptions.are_noted():
            for total in self.sums.values():
                assumptions.assume_no_zero_met_nan(self.seed, total)
        return [self.sums.get(i) for i in range(len(self.params))]
