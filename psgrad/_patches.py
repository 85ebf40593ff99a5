"""The factor of a convolution's weight."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _alloc, _plan
from ._factors import Factor, Outer, scaled, widened


@dataclass(frozen=True, eq=False)
class Patches(Factor):
    """Gradients of a convolution's weight (O, C/G, *K), a sample being B images."""

    x: Tensor  # (N, B, C, *S)
    g: Tensor  # (N, B, O, *S')
    geometry: _plan.ConvGeometry
    kernel: tuple[int, ...]  # K

    @property
    def plan(self) -> _plan.Plan:
        return _plan.conv_weight(self.x.shape, self.g.shape, self.geometry, self.kernel, self.x.element_size())

    @property
    def shape(self) -> tuple[int, ...]:
        return self.g.shape[2], self.x.shape[2] // self.geometry.groups, *self.kernel

    def dense(self, out: Tensor | None = None) -> Tensor:
        shape = (len(self.x), *self.shape)
        strategy = self.plan.strategy
        if self.x.numel() == 0 or self.g.numel() == 0:
            return self.g.new_zeros(shape) if out is None else out.zero_()
        if strategy == "grouped":
            grads = self._grouped(shape)
            return grads if out is None else out.copy_(grads)
        if out is None or not out.is_contiguous() or out.dtype != self.g.dtype:
            grads = self._products(strategy, _alloc.empty(shape, self.g))
            return grads if out is None else out.copy_(grads)
        return self._products(strategy, out)

    def _grouped(self, shape: tuple[int, ...]) -> Tensor:
        """One convolution in which each sample has groups of its own; its batch axis is B."""
        n, o, c, *kernel = shape
        x, g = (t.transpose(0, 1).reshape(t.shape[1], -1, *t.shape[3:]) for t in (self.x, self.g))
        weight = g.new_empty(1).expand(n * o, c, *kernel)  # only its shape is read
        stride, padding, dilation, groups = self.geometry
        grads: Tensor = torch.ops.aten.convolution_backward(
            g, x, weight, None, stride, padding, dilation, False, [0] * len(kernel), n * groups, [False, True, False]
        )[1]
        return grads.view(shape)

    def _products(self, strategy: str, out: Tensor) -> Tensor:
        """One matrix product per sample and group, written straight into the contiguous `out`."""
        n, groups = len(self.x), self.geometry.groups
        rows = out.view(n * groups, out.shape[1] // groups, -1)  # (N G, O/G, C/G K)
        columns = self._pointwise if strategy == "pointwise" else self._columns
        size = out[0, 0].numel() * groups * prod(self.g.shape[3:]) * self.x.shape[1] * self.x.element_size()
        step = n if strategy == "pointwise" else _plan.samples_at_once(size)
        for start in range(0, n, step):
            g = self.g[start : start + step].transpose(1, 2).reshape(-1, rows.shape[1], size_of(self.g))
            x = columns(self.x[start : start + step]).reshape(len(g), rows.shape[2], -1)
            torch.bmm(g, x.mT, out=rows[start * groups : (start + step) * groups])
        return out

    def _pointwise(self, x: Tensor) -> Tensor:
        """The input at the positions that a 1x1 kernel visits, (N, C, B, *S')."""
        positions: Any = (..., *(slice(None, None, s) for s in self.geometry.stride))
        return x[positions].transpose(1, 2)

    def _columns(self, x: Tensor) -> Tensor:
        """A view of the padded input's patches, (N, C, *K, B, *S')."""
        stride, padding, dilation, _ = self.geometry
        if any(padding):
            x = F.pad(x, [p for side in reversed(padding) for p in (side, side)])
        x = x.contiguous()
        (n, b, c), (by_n, by_b, by_c, *by_s) = x.shape[:3], x.stride()
        steps = [s * d for s, d in zip(by_s, dilation, strict=True)]
        moves = [s * d for s, d in zip(by_s, stride, strict=True)]
        return x.as_strided((n, c, *self.kernel, b, *self.g.shape[3:]), (by_n, by_c, *steps, by_b, *moves))

    def tiles(self, bytes_each: int | None = None) -> "Iterator[tuple[slice, Patches]]":
        """Larger than others': each tile has patches to lay out."""
        size = prod(self.shape) * self.x.element_size() if bytes_each is None else bytes_each
        return super().tiles(max(1, size * _plan.TILE // _plan.WORKSPACE))

    def norms(self) -> Tensor:
        plan = _plan.conv_norms(self.x.shape, self.g.shape, self.geometry, self.kernel, self.x.element_size())
        return self._rooted(*self._by_gram()) if plan.strategy == "gram" else super().norms()

    def _by_gram(self) -> tuple[Tensor, Tensor]:
        """Squared norms: patches as the rows of an outer product, a few samples at a time."""
        groups, (o, c, *_) = self.geometry.groups, self.shape
        taps, positions = c * prod(self.kernel), size_of(self.g)
        found, alone = [], []
        for _, part in self.tiles(groups * taps * positions * self.x.element_size()):
            x = part._columns(part.x).reshape(-1, taps, positions).mT  # (N G, T, C/G K)
            g = part.g.transpose(1, 2).reshape(-1, o // groups, positions).mT  # (N G, T, O/G)
            squares, parts = (t.view(-1, groups).sum(1) for t in Outer(x, g).by_gram())
            found.append(squares)
            alone.append(parts)
        return torch.cat(found), torch.cat(alone)

    def weighted_sum(self, w: Tensor | None = None) -> Tensor:
        """One ordinary weight gradient, of the cotangent scaled."""
        if self.x.numel() == 0 or self.g.numel() == 0:
            return widened(self.g).new_zeros(self.shape)
        x, g = widened(self.x).flatten(0, 1), scaled(self.g, w).flatten(0, 1)
        stride, padding, dilation, groups = self.geometry
        weight = g.new_empty(1).expand(self.shape)  # only its shape is read
        grads: Tensor = torch.ops.aten.convolution_backward(
            g, x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups, [False, True, False]
        )[1]
        return grads


def size_of(g: Tensor) -> int:
    """The positions of one sample's output, B x S'."""
    return g.shape[1] * prod(g.shape[3:])
