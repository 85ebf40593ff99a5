"""Costs from shapes, and the choices made from them. `explain` shows each choice."""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

TILE = 4 << 20  # bytes: gradients written out at once, to be reduced; larger ones leave the cache
WORKSPACE = 16 << 20  # bytes: what a strategy may hold at once; malloc keeps blocks of this size for reuse

SMALL = 1 << 16  # bytes of an input: with less, a call's own overhead is what counts
SMALL_TOTAL = 1 << 22  # bytes of cotangents that may be held for that


class Plan(NamedTuple):
    """A choice: the strategy's name, its multiply-adds, its workspace in bytes."""

    strategy: str
    flops: int
    workspace: int


class ConvGeometry(NamedTuple):
    """A convolution but for its sizes; one entry per spatial axis."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def samples_at_once(bytes_each: int) -> int:
    """How many samples' workspace fits WORKSPACE; one always does."""
    return max(1, WORKSPACE // max(1, bytes_each))


def tile(bytes_each: int) -> int:
    """How many samples' gradients make a tile; one always does."""
    return max(1, TILE // max(1, bytes_each))


def keeps_dense(held: int, dense: int) -> bool:
    """Whether to keep gradients in place of their factor, from the bytes of either.

    Where gradients are about as small as the factor (a convolution over many positions), norms need them written
    out anyway, and a weighted sum of them is cheaper than of the factor.
    """
    return dense <= 1.25 * held


def gram_block(t: int) -> int:
    """How many of T positions meet as many others at once, in a block of at most 1024 x 1024 products."""
    return max(1, min(t, 1024))


def outer_norms(n: int, t: int, i: int, o: int, itemsize: int) -> Plan:
    """How to get squared norms of sums of T outer products, O x I each.

    gram   inner products of the positions with each other: T^2 (I + O) multiply-adds.
    tiles  the gradients written out, a few samples at a time: T I O.
    """
    gram, tiles = t * t * (i + o), t * i * o
    if t > 0 and gram <= tiles:
        block = gram_block(t)
        return Plan("gram", n * gram, min(n, tile(8 * block * block)) * 8 * block * block)
    return Plan("tiles", n * tiles, min(n, tile(i * o * itemsize)) * i * o * itemsize)


def outer_dots(n: int, t: int, m: int, s: int, o: int, i: int) -> Plan:
    """How to get N x M inner products of sums of T and of S outer products.

    gram   every position with every other: N T M S (I + O) multiply-adds.
    tiles  the gradients written out, a few rows at a time: (N T + M S + N M) I O.
    """
    gram, tiles = n * t * m * s * (i + o), (n * t + m * s + n * m) * i * o
    if t * s > 0 and gram <= tiles:
        return Plan("gram", gram, min(n, tile(8 * t * m * s)) * 8 * t * m * s)
    return Plan("tiles", tiles, WORKSPACE)


def conv_norms(
    x: Sequence[int], g: Sequence[int], geometry: ConvGeometry, kernel: Sequence[int], itemsize: int
) -> Plan:
    """The same for a convolution's weight: its positions are those of the output, its inputs the patches."""
    inputs, channels = x[2] // geometry.groups * prod(kernel), g[2] // geometry.groups
    plan = outer_norms(x[0] * geometry.groups, x[1] * prod(g[3:]), inputs, channels, itemsize)
    return plan if plan.strategy == "gram" else conv_weight(x, g, geometry, kernel, itemsize)._replace(strategy="tiles")


def conv_weight(
    x: Sequence[int], g: Sequence[int], geometry: ConvGeometry, kernel: Sequence[int], itemsize: int
) -> Plan:
    """How to get a conv's per-sample weight gradients: x (N, B, C, *S), g (N, B, O, *S').

    pointwise  a 1x1 kernel is a matrix product.
    grouped    one convolution with N x groups groups. Its kernel pays a reorder for each weight it
               writes, and works on blocks of 8 channels (not in 1d).
    patches    the input's patches as a matrix (im2col), then one matrix product per sample: pays for
               writing each patch.
    The constants are multiply-adds' worth per element moved, read off 26 shapes of ResNets, 1d and 3d
    nets on 2 CPU threads: patches win up to about two output positions per output channel.
    """
    n, channels = x[0], g[2] // geometry.groups
    inputs, taps, positions = x[2] // geometry.groups, prod(kernel), x[1] * prod(g[3:])
    weights = geometry.groups * channels * inputs * taps
    flops = n * weights * positions
    if taps == 1 and not any(geometry.padding):
        return Plan("pointwise", flops, 0)
    patches = geometry.groups * inputs * taps * positions
    blocks = -(-inputs // 8) * 8 / inputs if len(kernel) > 1 and inputs else 1
    if flops + 24 * n * patches <= blocks * flops + 48 * n * weights:
        return Plan("patches", flops, min(n, samples_at_once(patches * itemsize)) * patches * itemsize)
    return Plan("grouped", flops, n * weights * itemsize)
