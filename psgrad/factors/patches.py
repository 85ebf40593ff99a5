"""The factor of a convolution's weight."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from ..torch_.storage import are_one_memory
from . import conv_costs, costs, huge_pages, quick_grads
from .base import Factor, Kron
from .maps import Side, applied, gram_of
from .numerics import cast, scaled, vanishing, widened
from .outer import Outer


@dataclass(frozen=True, eq=False)
class Patches(Factor):
    """Gradients of a convolution's weight (O, C/G, *K), a sample being B images."""

    x: Tensor  # (N, B, C, *S)
    g: Tensor  # (N, B, O, *S')
    geometry: costs.ConvGeometry
    kernel: tuple[int, ...]  # K

    @property
    def plan(self) -> costs.Plan:
        x, g, geometry, kernel = self.x, self.g, self.geometry, self.kernel
        found = conv_costs.fastest("gradients", x, g, geometry, kernel, self.by)
        return conv_costs.conv_weight(x.shape, g.shape, geometry, kernel, x.element_size(), found)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.g.shape[2], self.x.shape[2] // self.geometry.groups, *self.kernel

    def dense(self, out: Tensor | None = None) -> Tensor:
        return self.by(self.plan.strategy, out)

    @property
    def fills_out(self) -> bool:
        return self.plan.strategy != "grouped" or self._grouped_tile() < len(self.x)

    def _grouped_tile(self) -> int:
        sizes = conv_costs.Sizes.of(self.x.shape, self.g.shape, self.geometry, self.kernel)
        return conv_costs.grouped_tile(sizes, self.x.element_size())

    def by(self, strategy: str, out: Tensor | None = None) -> Tensor:
        """The gradients by one of the ways that `conv_costs.conv_weight` chooses from."""
        shape = (len(self.x), *self.shape)
        if self.x.numel() == 0 or self.g.numel() == 0:
            return self.g.new_zeros(shape) if out is None else out.zero_()
        if strategy == "grouped":
            return self._grouped(shape, out)
        ways = {"pointwise": self._pointwise, "patches": self._patches, "loop": self._loop, "quick": self._quick}
        write = ways[strategy]
        if out is not None and out.is_contiguous() and out.dtype == self.g.dtype:
            return write(out)
        grads = write(huge_pages.empty(shape, self.g))
        return grads if out is None else out.copy_(grads)

    def _grouped(self, shape: tuple[int, ...], out: Tensor | None) -> Tensor:
        """A convolution in which each sample has groups of its own; its batch axis is B. Some samples at a time."""
        tile = self._grouped_tile()
        if out is None and tile < len(self.x):
            out = huge_pages.empty(shape, self.g)
        for start in range(0, len(self.x), tile):
            part = slice(start, start + tile)
            x, g = (t[part].transpose(0, 1).reshape(t.shape[1], -1, *t.shape[3:]) for t in (self.x, self.g))
            n = min(tile, len(self.x) - start)
            geometry = self.geometry._replace(groups=n * self.geometry.groups)
            grads = weight_gradient(x, g, geometry, (n * shape[1], *shape[2:]), None if out is None else out[part])
            if out is None:
                return grads.view(shape)
            out[part].copy_(grads.view(n, *shape[1:]))
        assert out is not None
        return out

    def _loop(self, out: Tensor) -> Tensor:
        """The ordinary weight gradient of each sample."""
        for x, g, grads in zip(self.x, self.g, out, strict=True):
            grads.copy_(weight_gradient(x, g, self.geometry, self.shape, grads))
        return out

    def _quick(self, out: Tensor) -> Tensor:
        return quick_grads.of_convolution(self.x, self.g, self.geometry, self.kernel, out)

    def _pointwise(self, out: Tensor) -> Tensor:
        """A 1x1 kernel on one image: a matrix product of what is there."""
        groups, (o, c, *_) = self.geometry.groups, self.shape
        x, g = (t.reshape(-1, size, size_of(self.g)) for t, size in ((self.x, c), (self.g, o // groups)))
        torch.bmm(g, x.mT, out=out.view(-1, o // groups, c))  # (N G, O/G, C/G)
        return out

    def _patches(self, out: Tensor) -> Tensor:
        """The input's patches as a matrix, times the cotangent; some samples, and some positions, at a time."""
        n, groups, size = len(out), self.geometry.groups, self.g.shape[3:]
        rows = out.view(n, groups, self.shape[0] // groups, -1)  # (N, G, O/G, C/G K)
        o, taps = rows.shape[2:]
        tiles = conv_costs.conv_tiles(self.x.shape, self.g.shape, self.geometry, self.kernel, self.x.element_size())
        columns = Columns(self.x, self.geometry, self.kernel, size, tiles)
        turned = (
            rows.new_empty(tiles.samples * groups, taps, o) if conv_costs.conv_turns(o, taps, size_of(self.g)) else None
        )
        for start in range(0, n, tiles.samples):
            x, g, grads = (t[start : start + tiles.samples] for t in (self.x, self.g, rows))
            m = len(x) * groups
            view, grads = columns.of(x), grads.flatten(0, 1)
            for first in range(0, size[0], tiles.length):
                length = min(tiles.length, size[0] - first)
                left = g.narrow(3, first, length).transpose(1, 2).reshape(m, o, -1)
                right = columns.copied(view.narrow(-len(size), first, length)).view(m, taps, -1)
                if turned is None:
                    _product(left, right, grads, first > 0)
                else:
                    _product(right, left, turned[:m], first > 0)
            if turned is not None:
                grads.copy_(turned[:m].mT)
        return out

    @property
    def tile_bytes(self) -> int:
        """More than others': each tile has patches to lay out."""
        return costs.WORKSPACE

    def norms(self) -> Tensor:
        x, g, geometry, kernel = self.x, self.g, self.geometry, self.kernel
        found = conv_costs.fastest("norms", x, g, geometry, kernel, self._norms_by)
        if found is None:
            found = conv_costs.conv_norms(x.shape, g.shape, geometry, kernel, x.element_size()).strategy
        return self._norms_by(found)

    def _norms_by(self, strategy: str) -> Tensor:
        if strategy == "quick":
            return quick_grads.of_convolution(self.x, self.g, self.geometry, self.kernel, self.g.new_empty(len(self.g)))
        return self.rooted(*self._by_gram()) if strategy == "gram" else super().norms()

    def _by_gram(self) -> tuple[Tensor, Tensor]:
        """Squared norms, and what they have to exceed: patches as an outer product's rows, a few samples at a time."""
        groups, (o, c, *_) = self.geometry.groups, self.shape
        taps, positions = c * prod(self.kernel), size_of(self.g)
        found, least = [], []
        for _, part in self.tiles(groups * taps * positions * self.x.element_size()):
            size = self.g.shape[3:]
            columns = Columns(part.x, self.geometry, self.kernel, size, conv_costs.Tiles(len(part.x), size[0]))
            x = columns.copied(columns.of(part.x)).view(-1, taps, positions).mT  # (N G, T, C/G K)
            g = part.g.transpose(1, 2).reshape(-1, o // groups, positions).mT  # (N G, T, O/G)
            squares, low = (t.view(-1, groups).sum(1) for t in Outer(x, g).by_gram())
            found.append(squares)
            least.append(low)
        return torch.cat(found), torch.cat(least)

    def vanishing(self) -> Tensor | None:
        return vanishing(self.x, self.g)

    def weighted_sum(self, w: Tensor | None = None) -> Tensor:
        """One ordinary weight gradient, of the cotangent scaled."""
        if self.x.numel() == 0 or self.g.numel() == 0:
            return widened(self.g).new_zeros(self.shape)
        x, g = widened(self.x).flatten(0, 1), scaled(self.g, w).flatten(0, 1)
        return weight_gradient(x, g, self.geometry, self.shape)

    def along(self, directions: Tensor) -> Tensor:
        """For a direction V the convolution with V as the weight, times the cotangent."""
        dtype, n = directions.dtype, len(self.x)
        if self.x.numel() == 0 or self.g.numel() == 0:
            return directions.new_zeros(n, len(directions))
        if costs.along(len(directions), size_of(self.g)).strategy == "tiles":
            parts = [self] if self.dtype is directions.dtype else [part for _, part in self.tiles()]
            return torch.cat([Factor.along(p.each(lambda t: cast(t, directions.dtype)), directions) for p in parts])
        columns = []
        for v in directions:
            rows = []
            for _, part in self.tiles((self.x[0].numel() + self.g[0].numel()) * dtype.itemsize):
                x, g = cast(part.x, dtype).flatten(0, 1), part.g.flatten(0, 1)
                y = convolution(x, v, self.geometry)
                for axis, size in enumerate(g.shape[2:], start=2):  # a transposed one may have left positions out
                    y = y.narrow(axis, 0, size)
                rows.append((y * g).reshape(len(part.x), -1).sum(1))
            columns.append(rows[0] if len(rows) == 1 else torch.cat(rows))
        return torch.stack(columns, 1)

    def mapped(self, left: Side, right: Side, dtype: torch.dtype) -> Factor:
        groups = self.geometry.groups
        if right is None and (groups == 1 or left is None or left.dim() == 1):
            g = applied(self.g.movedim(2, -1), left, dtype).movedim(-1, 2)
            return replace(self, x=cast(self.x, dtype), g=g)
        if groups > 1 or self.x.numel() == 0 or self.g.numel() == 0:
            return super().mapped(left, right, dtype)
        g = applied(self.g.movedim(2, -1).flatten(1, -2), left, dtype)  # (N, T, O)
        inputs = prod(self.shape[1:]) if right is None else len(right)
        if costs.keeps_dense(size_of(self.g) * (inputs + g.shape[-1]), inputs * g.shape[-1]):
            return super().mapped(left, right, dtype)
        return Outer(torch.cat([applied(x, right, dtype) for x in self._columns()]), g)

    def kron(self, dtype: torch.dtype) -> Kron | None:
        if self.geometry.groups > 1:
            return None  # each group has inputs of its own
        taps = prod(self.shape[1:])
        inputs = self.g.new_zeros(taps, taps, dtype=dtype)
        if self.x.numel() and self.g.numel():
            for x in self._columns():
                inputs += gram_of(cast(x.flatten(0, 1), dtype))
        return Kron(gram_of(cast(self.g.movedim(2, -1).flatten(0, -2), dtype)), inputs)

    def _columns(self) -> Iterator[Tensor]:
        """The patches (n, T, C K) that meet each position of the output, a few samples at a time; of one group."""
        taps, positions, size = prod(self.shape[1:]), size_of(self.g), self.g.shape[3:]
        for _, part in self.tiles(taps * positions * self.x.element_size()):
            columns = Columns(part.x, self.geometry, self.kernel, size, conv_costs.Tiles(len(part.x), size[0]))
            yield columns.copied(columns.of(part.x)).view(-1, taps, positions).mT

    def merge_key(self) -> Hashable:
        return type(self), self.shape, self.dtype, self.geometry, self.x.shape[2:], self.g.shape[2:]

    def merged_with(self, others: Sequence[Factor]) -> Factor:
        """More images in each sample."""
        alike = [self, *(f for f in others if isinstance(f, Patches))]
        return replace(self, x=torch.cat([f.x for f in alike], 1), g=torch.cat([f.g for f in alike], 1))

    def jacobians(self, others: Sequence[Factor]) -> Tensor:
        """Of one input: patches are laid out once, for the cotangents of all outputs side by side."""
        alike = [self, *(f for f in others if isinstance(f, Patches) and f.geometry == self.geometry)]
        if len(alike) <= len(others) or self.geometry.groups > 1 or not are_one_memory([f.x for f in alike]):
            return super().jacobians(others)
        grads = replace(self, g=torch.cat([f.g for f in alike], 2)).dense()
        return grads.view(len(grads), len(alike), *self.shape)

    def cut_grain(self) -> int:
        return self.shape[0] // self.geometry.groups if self.geometry.groups > 1 else 1

    def cut(self, rows: slice) -> Factor:
        groups, g = self.geometry.groups, self.g[:, :, rows]
        if groups == 1:
            return replace(self, g=g)
        some, width = g.shape[2] // self.cut_grain(), self.shape[1]  # whole groups
        first = rows.start // self.cut_grain() * width
        x = self.x[:, :, first : first + some * width]
        return replace(self, x=x, g=g, geometry=self.geometry._replace(groups=some))


def convolution(x: Tensor, weight: Tensor, geometry: costs.ConvGeometry) -> Tensor:
    """x (B, C, *S) with a weight (O, C/G, *K)."""
    stride, padding, dilation, groups = geometry
    y: Tensor = torch.ops.aten.convolution(x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups)
    return y


def weight_gradient(
    x: Tensor, g: Tensor, geometry: costs.ConvGeometry, shape: tuple[int, ...], place: Tensor | None = None
) -> Tensor:
    """The ordinary gradient of a weight of this shape; x (B, C, *S), g (B, O, *S').

    torch asks for the weight, of which only the shape is read; `place` is memory of as many numbers to stand for it.
    """
    stride, padding, dilation, groups = geometry
    recorded = torch.is_grad_enabled() and (x.requires_grad or g.requires_grad)  # a graph would keep it, as it was
    if place is not None and place.is_contiguous() and place.dtype == g.dtype and not recorded:
        weight = place.view(shape)
    else:
        weight = g.new_empty(shape)  # never touched; one number expanded would be copied to all of its size
    grads: Tensor = torch.ops.aten.convolution_backward(
        g, x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups, [False, True, False]
    )[1]
    return grads


def _product(a: Tensor, b: Tensor, out: Tensor, more: bool) -> None:
    """a b^T for each of a batch, in the place of what `out` holds or on top of it."""
    if more:
        out.baddbmm_(a, b.mT)
    else:
        torch.bmm(a, b.mT, out=out)


def size_of(g: Tensor) -> int:
    """The positions of one sample's output, B x S'."""
    return g.shape[1] * prod(g.shape[3:])


# ---- the windows that a kernel sees, laid out as matrices -------------------------------------------------------


def windows(x: Tensor, geometry: costs.ConvGeometry, kernel: Sequence[int], size: Sequence[int]) -> Tensor:
    """A view (N, C, *K, B, *S') of the padded input (N, B, C, *S): what each tap of the kernel meets."""
    axes = len(kernel)
    for axis in range(axes):
        x = _along(x, 3 + axis, axis, geometry, kernel, size)
    return x.permute(0, 2, *range(3 + axes, 3 + 2 * axes), 1, *range(3, 3 + axes))


def _along(
    x: Tensor, at: int, axis: int, geometry: costs.ConvGeometry, kernel: Sequence[int], size: Sequence[int]
) -> Tensor:
    """A view with the positions of one axis of the output at `at`, and what the kernel meets there behind all else.

    Not by as_strided: a compiler lays tensors out as it likes, and of some that have gaps reads other memory.
    """
    stride, dilation = geometry.stride[axis], geometry.dilation[axis]
    x = x.unfold(at, dilation * (kernel[axis] - 1) + 1, stride)
    if x.shape[at] != size[axis]:
        x = x.narrow(at, 0, size[axis])
    return x[..., ::dilation] if dilation > 1 else x


class Columns:
    """Lays out windows for some samples and some positions at a time, always in the same memory.

    Fresh memory for each tile would cost page faults.
    """

    def __init__(
        self,
        x: Tensor,
        geometry: costs.ConvGeometry,
        kernel: Sequence[int],
        size: Sequence[int],
        tiles: conv_costs.Tiles,
    ) -> None:
        self.geometry, self.kernel, self.size = geometry, tuple(kernel), tuple(size)
        b, c, *s = x.shape[1:]
        extents = [length + 2 * p for length, p in zip(s, geometry.padding, strict=True)]
        self.room = x.new_empty(tiles.samples * b * c * prod(kernel) * tiles.length * prod(size[1:]))
        self.padded = x.new_zeros(tiles.samples, b, c, *extents) if any(geometry.padding) else None
        shifts = conv_costs.conv_shifts(geometry, kernel, extents, size)
        self.shifted = x.new_empty(tiles.samples, c, kernel[-1], b, *extents[:-1], size[-1]) if shifts else None

    def of(self, x: Tensor) -> Tensor:
        """A view (N, C, *K, B, *S') of all windows of some samples, to be cut along the first of S' and copied."""
        if self.padded is not None:
            inner = self.padded[: len(x)]
            for axis, p in enumerate(self.geometry.padding, start=3):
                inner = inner.narrow(axis, p, x.shape[axis])
            inner.copy_(x)
            x = self.padded[: len(x)]
        return windows(x, self.geometry, self.kernel, self.size) if self.shifted is None else self._by_rows(x)

    def copied(self, view: Tensor) -> Tensor:
        """Windows in the workspace, in the order of the view's axes."""
        return self.room[: view.numel()].view(view.shape).copy_(view)

    def _by_rows(self, x: Tensor) -> Tensor:
        """The same view, of a copy shifted along the last axis: several of the input's rows are one row of it."""
        assert self.shifted is not None
        last = len(self.kernel) - 1
        y = self.shifted[: len(x)]  # (N, C, K, B, *S, S') with the last of K and of S'
        rows = _along(x, 3 + last, last, self.geometry, self.kernel, self.size)
        y.copy_(rows.permute(0, 2, 4 + last, 1, *range(3, 4 + last)))
        for axis in range(last):
            y = _along(y, 4 + axis, axis, self.geometry, self.kernel, self.size)
        return y.permute(0, 1, *range(5 + last, 5 + 2 * last), 2, 3, *range(4, 5 + last))
