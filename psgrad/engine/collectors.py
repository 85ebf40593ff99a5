"""Where the factors of a backward go: written out as they come, or kept."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..factors import costs as _plan
from ..factors import huge_pages as _alloc
from ..factors.leaves import Dense, Factor, NormsOfMany, Outer, wide
from ..factors.pulling import pull_rows, pull_sums
from ..factors.sum import Kept, Pulled, Term, grouped, upright
from ..registry.params import Param, Region, Source


class DenseSink:
    """Per-sample gradients (N, *shape) of every parameter, written as factors arrive."""

    hasty = False

    def __init__(self, params: Sequence[Tensor], n: int, buffers: Sequence[Tensor] | None = None) -> None:
        self.params, self.n = list(params), n
        self.grads: dict[int, Tensor] = {}  # what has been written, by the source's index
        self.later: dict[int, list[Term]] = {}  # small factors of what is used often: one long sum for many short ones
        self.buffers = None if buffers is None else list(buffers)  # contiguous, where parameters are to be written

    def has(self, source: Source) -> bool:
        return source.index in self.grads or source.index in self.later

    def _write(self, index: int, like: Tensor) -> None:
        """What was put off."""
        terms = self.later.pop(index, None)
        if terms is None:
            return
        written, buffer, kept = self.grads.get(index), self._buffer(index), Kept(grouped(terms, like.shape), like.shape)
        shape = (self.n, *like.shape)
        if written is None:
            self.grads[index] = kept.dense(_alloc.empty(shape, like) if buffer is None else buffer)
        else:
            written.add_(kept.dense(_alloc.empty(shape, like)))

    def pull(self, derived: Sequence[Source], roots: Sequence[Source]) -> None:
        """Gradients of functions of parameters, passed on to the parameters."""
        for source in derived:
            self._write(source.index, source.value)
        rows = [self.grads.pop(source.index) for source in derived]
        values = [source.traced() for source in derived]
        traced = [source.traced() for source in roots]
        for source, grads in zip(roots, pull_rows(values, traced, rows), strict=True):
            if grads is not None:
                self.add_dense(source, grads)

    def _buffer(self, index: int) -> Tensor | None:
        return self.buffers[index] if self.buffers is not None and index < len(self.buffers) else None

    def add(self, param: Param, factor: Factor, use: object = None) -> None:
        """A factor of a parameter, or of a view of one."""
        source = param.source
        index, dtype = source.index, source.value.dtype
        if source.uses > 1 and isinstance(factor, Outer) and not _plan.keeps_dense(*factor.bytes()):
            self.later.setdefault(index, []).append(_term(param, factor))
            return
        written, buffer = self.grads.get(index), self._buffer(index)
        if written is None and param.whole:
            grads = factor.dense(buffer)
            shape = (self.n, *source.value.shape)
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
            whole = _alloc.empty((self.n, *source.value.shape), source.value) if buffer is None else buffer
            factor.dense(param.part.rows(whole))
            self.grads[index] = whole
            return
        if written is None:
            shape = (self.n, *source.value.shape)
            written = (_alloc.empty(shape, source.value) if buffer is None else buffer).zero_()
            self.grads[index] = written
        region, grads = param.collapsed(factor.dense())
        region.rows(written).add_(grads)

    def add_dense(self, source: Source, grads: Tensor) -> None:
        """Gradients of a whole source that autograd worked out."""
        index = source.index
        written, buffer = self.grads.get(index), self._buffer(index)
        if written is not None:
            written.add_(grads)
        elif buffer is not None:
            self.grads[index] = buffer.copy_(grads)
        else:  # autograd may hand out one tensor twice, or an expanded one
            self.grads[index] = grads.clone(memory_format=torch.contiguous_format)

    def put(self, grads: Sequence[Tensor]) -> None:
        """Gradients of every parameter that somebody else worked out."""
        for i, g in enumerate(grads):
            self.grads[i] = g

    def result(self) -> list[Tensor]:
        """The gradients of every parameter; zeros where nothing used it."""
        for i, p in enumerate(self.params):
            self._write(i, p)
            if i not in self.grads:
                buffer = self._buffer(i)
                self.grads[i] = p.new_zeros(self.n, *p.shape) if buffer is None else buffer.zero_()
        return [self.grads[i] for i in range(len(self.params))]


def _term(param: Param, factor: Factor) -> Term:
    """A factor at its place; gradients of an expanded view are written out, and summed."""
    if param.whole:
        return Term(None, factor)
    region = param.part
    if any(size > 1 and stride == 0 for size, stride in zip(region.shape, region.strides, strict=True)):
        region, grads = param.collapsed(factor.dense())
        return Term(region, Dense(grads))
    return Term(region, factor)


class FactorSink:
    """The factors themselves, without the graph they come from."""

    hasty = False

    def __init__(self, params: Sequence[Tensor], n: int) -> None:
        self.params, self.n = list(params), n
        self.terms: dict[int, list[Term]] = {}  # by the source's index
        self.held = 0  # bytes

    def has(self, source: Source) -> bool:
        return source.index in self.terms

    def add(self, param: Param, factor: Factor, use: object = None) -> None:
        """A factor of a parameter, or of a view of one, in the form that takes less memory."""
        term = _term(param, factor)
        region, factor = term
        if isinstance(factor, Dense):
            self.held += factor.grads.nbytes
        else:
            held, dense = factor.bytes()
            if _plan.keeps_dense(held, dense):
                term, held = Term(region, Dense(factor.dense())), dense
            self.held += held
        self.terms.setdefault(param.source.index, []).append(term)

    def add_dense(self, source: Source, grads: Tensor) -> None:
        """Gradients of a whole source that autograd worked out."""
        term = Term(None, Dense(grads.contiguous()))
        self.held += grads.nbytes
        self.terms.setdefault(source.index, []).append(term)

    def pull(self, derived: Sequence[Source], roots: Sequence[Source]) -> None:
        """Factors of functions of parameters, to be passed on to the parameters when somebody asks."""
        values = tuple(source.traced() for source in derived)
        kept = tuple(Kept(grouped(self.terms.pop(s.index), s.value.shape), s.value.shape) for s in derived)
        traced = [source.traced() for source in roots]
        zeros = [torch.zeros_like(value) for value in values]
        reached = torch.autograd.grad(values, traced, zeros, allow_unused=True, retain_graph=True)
        for source, root, grad in zip(roots, traced, reached, strict=True):
            if grad is not None:
                term = Term(None, Pulled(kept, values, root))
                self.terms.setdefault(source.index, []).append(term)

    def put(self, grads: Sequence[Tensor]) -> None:
        """Gradients of every parameter that somebody else worked out."""
        self.terms = {i: [Term(None, Dense(g))] for i, g in enumerate(grads)}
        self.held = sum(g.nbytes for g in grads)

    def result(self) -> "list[Kept]":
        """What is known of each parameter's gradients."""
        return [self._kept(i) for i in range(len(self.params))]

    def _kept(self, i: int) -> Kept:
        shape = self.params[i].shape
        return Kept(grouped(self.terms.pop(i, ()), shape), shape)


class Again(BaseException):
    """A gradient came for a source whose norm was taken already: keep all factors instead."""


class NormSink(FactorSink):
    """Norms, taken as factors arrive where one is all that comes; the others are kept till the end."""

    def __init__(self, params: Sequence[Tensor], n: int, hasty: bool = True) -> None:
        super().__init__(params, n)
        self.hasty = hasty
        self.taken: dict[int, Tensor] = {}
        self.many = NormsOfMany()

    def has(self, source: Source) -> bool:
        if source.index in self.taken:
            raise Again
        return super().has(source)

    def add(self, param: Param, factor: Factor, use: object = None) -> None:
        source = param.source
        index = source.index
        if index in self.taken:
            raise Again
        if source.uses == 1 and self.hasty and index < len(self.params) and 0 not in param.value.stride():
            self.taken[index] = self.many.of(factor)
        else:
            super().add(param, factor, use)

    def add_dense(self, source: Source, grads: Tensor) -> None:
        if source.index in self.taken:
            raise Again
        super().add_dense(source, grads)

    def norms(self) -> list[Tensor | None]:
        """Norms (N,) of every parameter; None where all are zero."""
        taken, many = self.taken, self.many
        return [taken[i] if i in taken else self._kept(i).norms(many) for i in range(len(self.params))]


class SumSink:
    """The sum over samples of each parameter's gradients, added up as factors arrive."""

    hasty = False

    def __init__(self, params: Sequence[Tensor], seed: Tensor | None) -> None:
        self.params = list(params)
        self.sums: dict[int, Tensor] = {}  # by the source's index, in the dtype for sums
        self.weights: Tensor | None = None  # where the losses' dtype is too short for the seed
        # samples that do not count are left out here: their gradients may be NaN, which 0 times is NaN
        self.counting: Tensor | None = None
        if seed is not None and not seed.is_meta and bool((seed == 0).any()):
            self.counting = seed.nonzero()[:, 0]

    def _sum(self, factor: Factor) -> Tensor | None:
        if self.counting is None:
            return factor.weighted_sum(self.weights)
        w = None if self.weights is None else self.weights[self.counting]
        return factor.select(self.counting).weighted_sum(w) if len(self.counting) else None

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
        """A factor of a parameter, or of a view of one."""
        source, (region, factor) = param.source, upright(_term(param, factor))
        found = self._sum(factor)
        self._add(source.index, region, found, source.value.shape)

    def add_dense(self, source: Source, grads: Tensor) -> None:
        """Gradients of a whole source that autograd worked out."""
        shape = source.value.shape
        self._add(source.index, None, self._sum(Dense(grads)), shape)

    def pull(self, derived: Sequence[Source], roots: Sequence[Source]) -> None:
        """Sums for functions of parameters, passed on to the parameters."""
        values, traced = [s.traced() for s in derived], [s.traced() for s in roots]
        sums = [self.sums.pop(s.index) for s in derived]
        for source, grad in zip(roots, pull_sums(values, traced, sums), strict=True):
            if grad is not None:
                shape = source.value.shape
                own = grad.to(wide(grad.dtype), copy=True)  # autograd may hand out one tensor twice
                self._add(source.index, None, own, shape)

    def put(self, grads: Sequence[Tensor]) -> None:
        """Gradients of every parameter that somebody else worked out."""
        for i, (p, g) in enumerate(zip(self.params, grads, strict=True)):
            self._add(i, None, self._sum(Dense(g)), p.shape)

    def result(self) -> list[Tensor | None]:
        """The sums; None where nothing came."""
        return [self.sums.get(i) for i in range(len(self.params))]
