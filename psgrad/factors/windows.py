"""The windows that a convolution's kernel sees, laid out as matrices."""

from collections.abc import Sequence
from math import prod

from torch import Tensor

from . import conv_costs
from .costs import ConvGeometry


def windows(x: Tensor, geometry: ConvGeometry, kernel: Sequence[int], size: Sequence[int]) -> Tensor:
    """A view (N, C, *K, B, *S') of the padded input (N, B, C, *S): what each tap of the kernel meets."""
    (n, b, c), (by_n, by_b, by_c, *by_s) = x.shape[:3], x.stride()
    taps = [s * d for s, d in zip(by_s, geometry.dilation, strict=True)]
    moves = [s * d for s, d in zip(by_s, geometry.stride, strict=True)]
    return x.as_strided((n, c, *kernel, b, *size), (by_n, by_c, *taps, by_b, *moves))


class Columns:
    """Lays out windows for some samples and some positions at a time, always in the same memory.

    Fresh memory for each tile would cost page faults.
    """

    def __init__(
        self, x: Tensor, geometry: ConvGeometry, kernel: Sequence[int], size: Sequence[int], tiles: conv_costs.Tiles
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
        stride, _, dilation, _ = self.geometry
        by_n, by_b, by_c, *by_s, by_last = x.stride()
        y = self.shifted[: len(x)]  # (N, C, K, B, *S, S') with the last of K and of S'
        y.copy_(x.as_strided(y.shape, (by_n, by_c, by_last * dilation[-1], by_b, *by_s, by_last * stride[-1])))
        by_n, by_c, by_k, by_b, *by_s, by_last = y.stride()
        taps = [s * d for s, d in zip(by_s, dilation[:-1], strict=True)]
        moves = [s * d for s, d in zip(by_s, stride[:-1], strict=True)]
        shape = (len(x), x.shape[2], *self.kernel, x.shape[1], *self.size)
        return y.as_strided(shape, (by_n, by_c, *taps, by_k, by_b, *moves, by_last))
