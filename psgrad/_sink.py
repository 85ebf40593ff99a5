"""Where factors go: a sink that materialises each one at once, so that what it holds can be freed."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from . import _alloc
from ._errors import ArgumentError
from ._factors import Factor
from ._param import Param, Source


class DenseSink:
    """Per-sample gradients (N, *shape) of every parameter, written as factors arrive."""

    def __init__(self, params: Sequence[Tensor], n: int, buffers: Sequence[Tensor] | None = None) -> None:
        self.params, self.n = list(params), n
        self.grads: dict[int, Tensor] = {}  # what has been written, by the source's index
        self.buffers = None if buffers is None else list(buffers)  # contiguous, where parameters are to be written

    def reset(self) -> None:
        self.grads.clear()

    def has(self, source: Source) -> bool:
        return source.index in self.grads

    def take(self, source: Source) -> Tensor:
        return self.grads.pop(source.index)

    def _buffer(self, index: int) -> Tensor | None:
        return self.buffers[index] if self.buffers is not None and index < len(self.buffers) else None

    def add(self, param: Param, factor: Factor, use: object = None) -> None:
        """A factor of a parameter, or of a view of one."""
        source = param.source
        index, dtype = source.index, source.value.dtype
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
            factor.dense(param.rows(whole))
            self.grads[index] = whole
            return
        if written is None:
            shape = (self.n, *source.value.shape)
            written = (_alloc.empty(shape, source.value) if buffer is None else buffer).zero_()
            self.grads[index] = written
        rows, grads = param.rows(written), factor.dense()
        grads = grads.reshape(rows.shape)
        for axis, (size, stride) in enumerate(zip(param.value.shape, param.value.stride(), strict=True), start=1):
            if size > 1 and stride == 0:  # an expanded axis: one element stands for many
                grads, rows = grads.sum(axis, keepdim=True), rows.narrow(axis, 0, 1)
        rows.add_(grads)

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

    def put(self, index: Tensor, part: "DenseSink") -> None:
        """The finished gradients of the samples `index`."""
        for i, grads in enumerate(part.result()):
            self._whole(i).index_copy_(0, index.to(grads.device), grads)

    def put_row(self, row: int, grads: Sequence[Tensor] | None) -> None:
        """The gradients of one sample; None are zeros."""
        for i in range(len(self.params)):
            whole = self._whole(i)
            if grads is None:
                whole[row].zero_()
            else:
                whole[row].copy_(grads[i])

    def _whole(self, i: int) -> Tensor:
        if i not in self.grads:
            buffer, p = self._buffer(i), self.params[i]
            self.grads[i] = _alloc.empty((self.n, *p.shape), p) if buffer is None else buffer
        return self.grads[i]

    def result(self) -> list[Tensor]:
        """The gradients of every parameter; zeros where nothing used it."""
        for i, p in enumerate(self.params):
            if i not in self.grads:
                buffer = self._buffer(i)
                self.grads[i] = p.new_zeros(self.n, *p.shape) if buffer is None else buffer.zero_()
        return [self.grads[i] for i in range(len(self.params))]
