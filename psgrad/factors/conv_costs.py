"""What a convolution's per-sample weight gradients cost by each strategy, and the choices made from that.

pointwise  a 1x1 kernel on one image is a matrix product of what is there.
patches    the windows that the kernel sees as a matrix (im2col), in tiles, then a matrix product per sample and group.
grouped    one convolution with N x groups groups, by torch's kernel for the weight's gradient, in tiles of samples.
loop       the same kernel, a sample at a time: large maps, whose work it shares out between threads itself.
quick      a kernel of ours in C++ (`quick_grads`), where a compiler is at work anyway and the clock says so.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..torch_ import kernels
from . import clock, costs, quick_grads
from .costs import ConvGeometry, Plan

# Nanoseconds on two CPU threads, float32; `python -m benchmarks fit 600` measures and fits them. torch's kernels are
# oneDNN's, matrix products MKL's: where MKL is behind, so are the strategies by matrix products.
EVEN = {
    # matrix products: for each multiply-add, number of an operand, odd one out of 8, number of the result
    "multiply": 0.0153,
    "operand": 0.126,
    "rest": 0.0772,
    "result": 0.141,
    "turn": 0.863,  # a number of a result that is transposed
    # patches: for each call, tile, row of adjacent numbers, number, and number where they are not adjacent
    "call": 5.3e4,
    "tile": 4.9e4,
    "row": 4.8,
    "number": 0.1,
    "apart": 0.42,
    # torch's kernel on blocks of 8 channels: call, group, multiply-add, operand of one, number of x and g, of weights
    "blocks.call": 5.9e4,
    "blocks.groups": 1.0e3,
    "blocks.multiply": 0.0155,
    "blocks.operand": 0.004,
    "blocks.moved": 0.4,
    "blocks.weights": 1.09,
    # its kernel for one channel a group
    "depthwise.call": 1.57e5,
    "depthwise.multiply": 0.0305,
    "depthwise.moved": 0.256,
    "depthwise.weights": 1.5,
    # its kernel for the rest, which lays out patches itself
    "unrolled.call": 6.4e4,
    "unrolled.groups": 530,
    "unrolled.multiply": 0.0154,
    "unrolled.windows": 0.75,
    "unrolled.moved": 0.235,
    "unrolled.weights": 0.89,
    # a number of a large result that torch's kernel allocates, set by hand: whether malloc has such memory at hand
    # differs from run to run. 4.7 MB took 1.2 to 6.6 times the ordinary gradient's time, 2.4 MB 1.1 to 1.5 times.
    "fresh": 3.0,
}
BEHIND = {  # in the same order
    "multiply": 0.00905,
    "operand": 0.0358,
    "rest": 0.0195,
    "result": 0.0429,
    "turn": 0.303,
    "call": 1.72e4,
    "tile": 2.59e4,
    "row": 1.96,
    "number": 0.0227,
    "apart": 0.0932,
    "blocks.call": 1.52e4,
    "blocks.groups": 7.1,
    "blocks.multiply": 0.00354,
    "blocks.operand": 0.0182,
    "blocks.moved": 0.146,
    "blocks.weights": 0.272,
    "depthwise.call": 5.14e4,
    "depthwise.multiply": 0.0101,
    "depthwise.moved": 0.0661,
    "depthwise.weights": 0.103,
    "unrolled.call": 1.49e4,
    "unrolled.groups": 113,
    "unrolled.multiply": 0.00453,
    "unrolled.windows": 0.261,
    "unrolled.moved": 0.111,
    "unrolled.weights": 0.347,
    "fresh": 0,  # in whole models, too: malloc has such memory at hand
}
COSTS = BEHIND if kernels.MKL_IS_BEHIND else EVEN
AT_ONCE = 2 * costs.TILE  # bytes of patches, and copies of the operands, at once: half takes up to 1.18 of the time
ROW = 18  # numbers that a copy moves in the time that it takes to begin with a row of them


class Tiles(NamedTuple):
    """How much of a convolution's patches is laid out at once: samples, and places along the first spatial axis."""

    samples: int
    length: int


class Sizes(NamedTuple):
    """A convolution in numbers."""

    n: int
    groups: int
    o: int  # outputs of a group
    c: int  # inputs of a group
    taps: int  # of the kernel
    t: int  # positions of the output, of all B images
    s: int  # positions of the input, likewise

    @classmethod
    def of(cls, x: Sequence[int], g: Sequence[int], geometry: ConvGeometry, kernel: Sequence[int]) -> "Sizes":
        groups = geometry.groups
        images = x[1]
        return cls(
            x[0], groups, g[2] // groups, x[2] // groups, prod(kernel), images * prod(g[3:]), images * prod(x[3:])
        )


def counts(
    x: Sequence[int], g: Sequence[int], geometry: ConvGeometry, kernel: Sequence[int]
) -> dict[str, dict[str, float]]:
    """For each strategy that works how often it does what COSTS has a price for; x (N, B, C, *S), g (N, B, O, *S')."""
    z = Sizes.of(x, g, geometry, kernel)
    found: dict[str, dict[str, float]] = {}
    if is_pointwise(x, geometry, kernel):
        return {"pointwise": _product(z, z.o, z.c)}
    rows, numbers = _copied(z, x, g, geometry, kernel)
    turns = {"turn": z.n * z.groups * z.o * z.c * z.taps} if conv_turns(z.o, z.c * z.taps, z.t) else {}
    a, b = (z.c * z.taps, z.o) if turns else (z.o, z.c * z.taps)
    tiles = conv_tiles(x, g, geometry, kernel, 4)
    steps = -(-z.n // tiles.samples) * -(-g[3] // tiles.length)
    found["patches"] = _product(z, a, b) | turns | {"row": rows, "number": numbers, "call": 1, "tile": steps}
    if geometry.stride[-1] > 1:
        found["patches"]["apart"] = numbers
    found["grouped"] = _grouped(z, geometry, kernel)
    found["loop"] = {name: count * z.n for name, count in _kernel(z, geometry, kernel).items()}
    return found


def is_pointwise(x: Sequence[int], geometry: ConvGeometry, kernel: Sequence[int]) -> bool:
    """Whether the windows are the input as it stands."""
    return x[1] == 1 and prod(kernel) == 1 and not any(geometry.padding) and all(s == 1 for s in geometry.stride)


def _product(z: Sizes, a: int, b: int) -> dict[str, float]:
    """A product a x T by T x b for each sample and group. The library works on 8 of b at a time, and on a rest of 7 as
    on 4, 2 and 1."""
    m = z.n * z.groups
    return {
        "multiply": m * a * b * z.t,
        "operand": m * (a + b) * z.t,
        "rest": m * a * (b % 8).bit_count() * z.t,
        "result": m * a * b,
    }


def _copied(
    z: Sizes, x: Sequence[int], g: Sequence[int], geometry: ConvGeometry, kernel: Sequence[int]
) -> tuple[int, int]:
    """Rows of adjacent numbers, and numbers, that are copied to lay out the patches."""
    extents = [size + 2 * p for size, p in zip(x[3:], geometry.padding, strict=True)]
    row = g[-1]
    rows, numbers = z.taps * z.t // row, z.taps * z.t
    if conv_shifts(geometry, kernel, extents, g[3:]):
        shifted = x[1] * kernel[-1] * prod(extents[:-1])
        rows, numbers = shifted + z.taps * z.t // (row * g[-2]), shifted * row + z.taps * z.t
    each = z.n * z.groups * z.c
    return each * rows, each * numbers


def _kernel(z: Sizes, geometry: ConvGeometry, kernel: Sequence[int]) -> dict[str, float]:
    """A call of torch's kernel for the weight's gradient, of which there are three."""
    groups, weights = z.groups, z.groups * z.o * z.c * z.taps
    work, moved = weights * z.t, groups * (z.c * z.s + z.o * z.t)
    whole = z.o % 8 == 0 and (z.c % 8 == 0 or (groups == 1 and z.c == 3 and len(kernel) > 1))
    if whole:
        kind, more = "blocks", {"groups": groups, "operand": groups * (z.c + z.o) * z.taps * z.t}
    elif z.o == z.c == 1 and groups > 1 and len(kernel) < 3 and kernel[-1] <= 3 and set(geometry.dilation) == {1}:
        kind, more = "depthwise", {}
    else:
        kind, more = "unrolled", {"groups": groups, "windows": groups * z.c * z.taps * z.t}
    fresh: dict[str, float] = {"fresh": weights} if weights * 4 > costs.TILE else {}
    return fresh | {f"{kind}.{name}": count for name, count in {
        "call": 1, "multiply": work, "moved": moved, "weights": weights, **more,
    }.items()}  # fmt: skip


def _grouped(z: Sizes, geometry: ConvGeometry, kernel: Sequence[int]) -> dict[str, float]:
    """Calls of that kernel, each for a tile of samples."""
    m = grouped_tile(z, 4)
    steps = -(-z.n // m)
    done = _kernel(z._replace(groups=m * z.groups, n=1), geometry, kernel)
    return {name: count * (steps if name.endswith(".call") else z.n / m) for name, count in done.items()}


def estimates(x: Sequence[int], g: Sequence[int], geometry: ConvGeometry, kernel: Sequence[int]) -> dict[str, float]:
    """Nanoseconds by each strategy that works, on two CPU threads."""
    return {strategy: _price(done) for strategy, done in counts(x, g, geometry, kernel).items()}


@lru_cache(1024)  # 0.1 ms each time
def _cheapest(
    x: tuple[int, ...], g: tuple[int, ...], geometry: ConvGeometry, kernel: tuple[int, ...], threads: int
) -> str:
    found = estimates(x, g, geometry, kernel)
    return min(found, key=found.__getitem__)


# ---- choices by the clock ------------------------------------------------------------------------------------

_WORTH = 1e5  # nanoseconds; what takes less is not measured
_NEAR = 4.0  # times the least estimate: what is beyond is not measured


def fastest(
    question: str, x: Tensor, g: Tensor, geometry: ConvGeometry, kernel: tuple[int, ...], run: Callable[[str], object]
) -> str | None:
    """The strategy by which `run` answers a question ("gradients", "norms") in the least time, where the clock decides;
    None where it is not worth a look."""
    if not (clock.here.measures and clock.can_tell(x, g)):
        return None
    known = estimates(x.shape, g.shape, geometry, kernel)
    least = min(known.values())
    if least < _WORTH:
        return None
    if question == "norms":
        ways = [conv_norms(x.shape, g.shape, geometry, kernel, x.element_size()).strategy]
    else:
        ways = [strategy for strategy, price in known.items() if price <= _NEAR * least]
    if clock.here.in_cpp and quick_grads.is_for_convolution(x, g, geometry):
        ways.append("quick")
    return clock.fastest((question, geometry, kernel), x, g, ways, run)


def conv_weight(
    x: Sequence[int],
    g: Sequence[int],
    geometry: ConvGeometry,
    kernel: Sequence[int],
    itemsize: int,
    strategy: str | None = None,
) -> Plan:
    """How to get a conv's per-sample weight gradients: x (N, B, C, *S), g (N, B, O, *S'); by `strategy`, if given."""
    z = Sizes.of(x, g, geometry, kernel)
    flops = z.n * z.groups * z.o * z.c * z.taps * z.t
    if flops == 0:
        return Plan("zeros", 0, 0)
    if strategy is None:
        strategy = _cheapest(tuple(x), tuple(g), geometry, tuple(kernel), torch.get_num_threads())
    weights = z.groups * z.o * z.c * z.taps * itemsize
    if strategy == "patches":
        return Plan(strategy, flops, itemsize * _workspace(z, x, g, geometry, kernel, itemsize))
    samples = {"pointwise": 0, "quick": 0, "grouped": grouped_tile(z, itemsize), "loop": 1}[strategy]
    return Plan(strategy, flops, samples * weights)


def _workspace(
    z: Sizes, x: Sequence[int], g: Sequence[int], geometry: ConvGeometry, kernel: Sequence[int], itemsize: int
) -> int:
    """Numbers that the patches strategy holds: the tile, the padded and the shifted input, a turned result."""
    patches = z.groups * z.c * z.taps
    tiles = conv_tiles(x, g, geometry, kernel, itemsize)
    held = patches * z.t // g[3] * tiles.length + _copies(x, g, geometry, kernel)
    if conv_turns(z.o, z.c * z.taps, z.t):
        held += patches * z.o
    return tiles.samples * held


def _copies(x: Sequence[int], g: Sequence[int], geometry: ConvGeometry, kernel: Sequence[int]) -> int:
    """Numbers of the padded and the shifted input of a sample."""
    extents = [size + 2 * p for size, p in zip(x[3:], geometry.padding, strict=True)]
    padded = x[1] * x[2] * prod(extents) if any(geometry.padding) else 0
    shifts = conv_shifts(geometry, kernel, extents, g[3:])
    return padded + (x[1] * x[2] * kernel[-1] * prod(extents[:-1]) * g[-1] if shifts else 0)


def conv_tiles(
    x: Sequence[int], g: Sequence[int], geometry: ConvGeometry, kernel: Sequence[int], itemsize: int
) -> Tiles:
    """How to cut the patches: into samples, and where one is too large, places along the first axis.

    Threads share the products out by sample and group, so there is one for each thread, and in the end no rest.
    """
    z = Sizes.of(x, g, geometry, kernel)
    least = min(z.n, -(-torch.get_num_threads() // z.groups))
    patches, size = z.groups * z.c * z.taps * z.t * itemsize, g[3]
    each = patches + _copies(x, g, geometry, kernel) * itemsize
    whole = AT_ONCE // each
    if whole >= z.n:
        return Tiles(z.n, size)
    if whole >= least:
        return Tiles(_even(z.n, whole, least), size)
    if least * each <= costs.WORKSPACE or itemsize < 4:  # short sums would be rounded each
        return Tiles(least, size)
    length = max(1, AT_ONCE // (least * patches // size))
    return Tiles(least, -(-size // -(-size // length)))


def grouped_tile(z: Sizes, itemsize: int) -> int:
    """How many samples a call of torch's kernel is for; it lays out input, cotangent and result anew.

    Of 64 samples, 16 channels on 32x32, 32 at once take 0.6 of the time where malloc has no memory at hand, and 1.1
    where it has; of 32, depthwise 512 on 14x14, 16 take 0.2 and 0.9.
    """
    each = z.groups * (z.c * z.s + z.o * z.t + z.o * z.c * z.taps) * itemsize
    return min(z.n, _even(z.n, max(1, AT_ONCE // each), -(-torch.get_num_threads() // z.groups)))


def _even(n: int, most: int, least: int) -> int:
    """Tiles of about the same size, each a multiple of `least`: a size of up to `most`, but `least` always."""
    samples = max(least, most // least * least)
    samples = -(-n // -(-n // samples))
    return -(-samples // least) * least


def conv_shifts(geometry: ConvGeometry, kernel: Sequence[int], extents: Sequence[int], size: Sequence[int]) -> bool:
    """Whether to lay out patches by way of a copy that is shifted along the last axis, with longer rows to copy then.

    64 channels, 3x3 on 8x8: 0.9 of the time; depthwise 7x7 on 7x7: half of it.
    """
    if len(kernel) == 1 or geometry.stride[-2] != 1 or kernel[-2] == 1:
        return False
    row, plane, taps, outer = size[-1], size[-2] * size[-1], prod(kernel), prod(size[:-2])
    direct = taps * outer * size[-2] * (ROW + row)
    shifted = kernel[-1] * prod(extents[:-1]) * (ROW + row) + taps * outer * (ROW + plane)
    return shifted < direct


def conv_turns(o: int, taps: int, t: int) -> bool:
    """Whether a product is patches times cotangent, to be transposed, rather than cotangent times patches."""
    plain, turned = _product(Sizes(1, 1, o, taps, 1, t, t), o, taps), _product(Sizes(1, 1, o, taps, 1, t, t), taps, o)
    return _price(turned) + COSTS["turn"] * o * taps < _price(plain)


def _price(done: dict[str, float]) -> float:
    return sum(COSTS[name] * count for name, count in done.items())


def conv_norms(
    x: Sequence[int], g: Sequence[int], geometry: ConvGeometry, kernel: Sequence[int], itemsize: int
) -> Plan:
    """How to get squared norms: as of an outer product, whose positions are the output's, its inputs the patches."""
    inputs, channels = x[2] // geometry.groups * prod(kernel), g[2] // geometry.groups
    plan = costs.outer_norms(x[0] * geometry.groups, x[1] * prod(g[3:]), inputs, channels, itemsize)
    return plan if plan.strategy == "gram" else conv_weight(x, g, geometry, kernel, itemsize)._replace(strategy="tiles")
