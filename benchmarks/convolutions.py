"""`convolutions`: weight gradients of convolutions from real networks, by every strategy; `fit`: what strategies cost.

Psgrad may take 1.3 times what the ordinary weight gradient takes with a fill of the N x P numbers that it does not
write, and must not trail vmap by more than noise. `fit` takes the time of a strategy for a sum of counts times prices,
none of them negative. Relative errors count, and large ones little: the noise of a shared machine.
"""

import random
import re
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import cycle
from statistics import mean
from unittest import mock

import torch
from torch import Tensor
from torch.func import vmap

from .internals import ConvGeometry, Patches, conv_plan, weight_gradient
from .measuring import ORDINARY, Call, Measured, beside_ordinary
from .results import Bar, Plan, Record, Row, Run, read

BARS = (Bar(1.3, base=ORDINARY), Bar(1.05, base="vmap"))
STRATEGIES = ("pointwise", "patches", "grouped", "loop")
CONTENDERS = ("ordinary", "fill", "psgrad", "psgrad fresh", "vmap", *STRATEGIES)
DRAWN = "weight gradient of drawn shapes"
TURNED = ("ordinary", "fill", *STRATEGIES, *(f"{strategy} turned" for strategy in STRATEGIES))
Shape = tuple[tuple[int, ...], tuple[int, ...], ConvGeometry, tuple[int, ...]]  # (N, 1, C, *S), (N, 1, O, *S'), .., K
Sample = tuple[str, dict[str, float], float]  # a convolution, how often a strategy does what there, its seconds

# Networks, each with convolutions: samples * channels in - out, size, kernel; then as needed /stride, padding (p; else
# it keeps the size at stride 1), dilation (d) and groups (g). "cifar", "wide" and "instance" are of the workloads.
NETWORKS = {
    "cifar": "64*3-16 32x32 k3, 64*16-16 32x32 k3, 64*16-32 32x32 k3 /2, 64*16-32 32x32 k1 /2, 64*32-32 16x16 k3, "
    "64*32-64 16x16 k3 /2, 64*32-64 16x16 k1 /2, 64*64-64 8x8 k3",
    "wide": "16*64-64 32x32 k3, 16*64-128 32x32 k3 /2, 16*128-128 16x16 k3, 16*256-256 8x8 k3",
    "instance": "32*3-32 32x32 k3, 32*32-64 32x32 k3 /2, 32*64-64 16x16 k3",
    "resnet18": "8*3-64 224x224 k7 /2, 8*64-64 56x56 k3, 8*64-128 56x56 k3 /2, 8*128-128 28x28 k3, 8*256-256 14x14 k3, "
    "8*512-512 7x7 k3",
    "resnet50": "8*64-256 56x56 k1, 8*256-64 56x56 k1, 8*256-512 56x56 k1 /2, 8*1024-256 14x14 k1, 8*512-2048 7x7 k1",
    "resnext": "8*128-128 56x56 k3 g32, 8*512-512 14x14 k3 g32",
    "vgg": "2*64-64 224x224 k3, 2*128-128 112x112 k3, 8*512-512 14x14 k3",
    "mobilenet": "8*3-32 224x224 k3 /2, 8*32-32 112x112 k3 g32, 8*64-64 112x112 k3 /2 g64, 32*512-512 14x14 k3 g512, "
    "32*1024-1024 7x7 k3 g1024, 16*240-240 28x28 k5 g240, 8*64-128 56x56 k1, 16*512-512 14x14 k1",
    "convnext": "8*3-96 224x224 k4 /4 p0, 8*96-96 56x56 k7 g96, 8*384-384 14x14 k7 g384, 16*768-768 7x7 k7 g768, "
    "8*96-192 56x56 k2 /2 p0, 8*384-768 14x14 k2 /2 p0",
    "vit": "8*3-192 224x224 k16 /16 p0",
    "unet": "2*1-64 256x256 k3, 1*64-64 256x256 k3, 2*256-128 64x64 k3, 4*64-2 256x256 k1",
    "atrous": "4*256-256 28x28 k3 d2",
    "inception": "8*128-128 17x17 k1x7",
    "wavenet": "8*64-64 4000 k2 p4 d4, 8*64-64 4000 k2 p0 d256",
    "tcn": "32*32-32 500 k3 d8",
    "audio": "16*1-32 16000 k9 /2 p0, 8*1-64 16000 k80 /4 p0, 16*32-64 2000 k9 /2 p0, 4*512-512 400 k3 /2",
    "conformer": "16*256-256 200 k31 g256",
    "text": "32*70-256 200 k7 p0",
    "video": "2*3-64 8x112x112 k3x7x7 /1x2x2, 2*64-64 8x28x28 k3, 4*64-64 8x28x28 k3x1x1",
    "volume": "8*1-8 24x24x24 k3, 8*8-16 24x24x24 k3 /2",
}
SHAPES = [f"{network} {text}" for network, texts in NETWORKS.items() for text in texts.split(", ")]
NOTATION = re.compile(r"(\d+)\*(\d+)-(\d+) ([\dx]+) k([\dx]+)(?: /([\dx]+))?(?: p(\d+))?(?: d(\d+))?(?: g(\d+))?$")


def read_shape(text: str) -> Shape:
    """A convolution's input, cotangent, geometry and kernel, from the notation above; a sample is one image."""
    found = NOTATION.search(text)
    assert found is not None, text
    n, c, o, size, *rest = (tuple(map(int, part.split("x"))) if part else () for part in found.groups())
    each = lambda given: given * len(size) if len(given) == 1 else given
    kernel, stride, dilation = each(rest[0]), each(rest[1] or (1,)), each(rest[3] or (1,))
    padding = each(rest[2]) or tuple(d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=True))
    ends = zip(size, kernel, stride, padding, dilation, strict=True)
    out = [(length + 2 * p - d * (k - 1) - 1) // s + 1 for length, k, s, p, d in ends]
    return (*n, 1, *c, *size), (*n, 1, *o, *out), ConvGeometry(stride, padding, dilation, *(rest[4] or (1,))), kernel


def contenders(shape: Shape, sets: int = 1) -> tuple[dict[str, Call], str]:
    """The call of every contender, and the strategy that psgrad chooses."""
    torch.manual_seed(0)
    x, g, geometry, kernel = shape
    weight = (g[2], x[2] // geometry.groups, *kernel)
    factors = [Patches(torch.randn(x), torch.randn(g), geometry, kernel) for _ in range(sets)]
    # Operands are taken from some sets in turn: inside a model nobody finds them in a cache.
    turns = cycle([(factor, torch.empty(x[0], *weight)) for factor in factors])
    gradient = lambda x, g: weight_gradient(x, g, geometry, weight)

    def ordinary() -> Tensor:
        factor, _ = next(turns)
        return gradient(factor.x[:, 0], factor.g[:, 0])

    def vmapped() -> Tensor:  # the step of vmap(grad) that gives the weight's gradients, without its forward pass
        factor, _ = next(turns)
        return vmap(gradient)(factor.x, factor.g)

    def ours(strategy: str = "", fresh: bool = False) -> Tensor:
        factor, buffer = next(turns)
        out = None if fresh else buffer
        return factor.by(strategy, out) if strategy else factor.dense(out)

    calls: dict[str, Call] = {"ordinary": ordinary, "fill": lambda: next(turns)[1].fill_(1.0), "vmap": vmapped}
    calls |= {"psgrad": ours, "psgrad fresh": partial(ours, fresh=True)}
    return calls | {name: partial(ours, name) for name in conv_plan.counts(*shape)}, factors[0].plan.strategy


def measure(text: str, rounds: int, sets: int = 1, wanted: Sequence[str] = CONTENDERS) -> dict[str, Measured]:
    calls, chosen = contenders(read_shape(text), sets)
    return beside_ordinary({name: call for name, call in calls.items() if name in wanted}, rounds, chosen)


def plans(args: Namespace, run: Run) -> Iterator[Plan]:
    taken = partial(measure, rounds=args.rounds, sets=args.sets)
    rows = (Row(text, read_shape(text)[0][0], partial(taken, text), BARS) for text in args.only)
    yield Plan("time", "weight gradient", ORDINARY, CONTENDERS, rows, max(map(len, SHAPES)))


# While it lasts, products of matrices are taken with their result transposed, or not.
turning = partial(mock.patch.object, conv_plan, "conv_turns")
SIZES = {1: (50, 200, 1000, 4000, 16000), 2: (4, 7, 8, 14, 16, 28, 32, 56, 112), 3: (4, 8, 12, 16, 24)}
KERNELS = {1: (1, 2, 3, 5, 9, 15), 2: (1, 2, 3, 3, 3, 5, 7), 3: (1, 2, 3, 3)}
CHANNELS = (1, 3, 4, 8, 8, 10, 16, 16, 20, 32, 32, 48, 64, 64, 96, 128, 128, 256, 256, 512)


def draw(rng: random.Random) -> str:
    """A convolution that takes a few milliseconds, in the notation of `convolutions`."""
    while True:
        d = rng.choice([1, 2, 2, 2, 2, 3])
        size, kernel = rng.choice(SIZES[d]), rng.choice(KERNELS[d])
        stride, dilation = rng.choice([(1, 1), (1, 1), (1, 1), (1, 2), (2, 1)])
        c, o, groups = rng.choice(CHANNELS), rng.choice(CHANNELS), 1
        if rng.random() < 0.25:
            groups = rng.choice([2, 4, 8, 16, 32, 64, 128, 256, 512])
            c = o = groups * rng.choice([1, 1, 2, 4, 8, 16])
        t, weights = (size // stride) ** d, o * c // groups * kernel**d
        n = min(64, int(6e6 / (weights * t / 50 + (c * size**d + o * t + weights) / 2)))
        n = rng.choice([n, n, n // 2, n // 4])
        if n > 0 and n * max(weights, c * size**d, o * t) < 3e7:  # numbers in an operand or the result
            return f"{n}*{c}-{o} {'x'.join([str(size)] * d)} k{kernel} /{stride} d{dilation} g{groups}"


def measure_both(text: str, rounds: int) -> dict[str, Measured]:
    """The times of every strategy, with products taken either way."""
    found: dict[str, Measured] = {}
    for turned in (True, False):
        with turning(return_value=turned):
            times = measure(text, rounds, wanted=TURNED)
        found |= {name + " turned" * (turned and name in STRATEGIES): taken for name, taken in times.items()}
    return found


def counted(records: Iterable[Record]) -> Iterator[Sample]:
    for record in records:
        strategy, _, turned = record.contender.partition(" ")
        if record.quantity == DRAWN and strategy in STRATEGIES:
            with turning(return_value=bool(turned)):
                counts = conv_plan.counts(*read_shape(record.workload))[strategy]
            yield record.workload, counts, record.measured.best or 0.0


def fit(found: list[Sample]) -> dict[str, float]:
    """Prices in nanoseconds."""
    import numpy as np
    from scipy.optimize import nnls

    names = sorted({name for _, counts, _ in found for name in counts})
    a = np.array([[counts.get(name, 0.0) for name in names] for _, counts, _ in found])
    t = np.array([seconds * 1e9 for *_, seconds in found])
    weights = 1 / t
    for _ in range(30):  # least absolute errors by least squares, weighted again and again
        prices, _ = nnls(a * weights[:, None], t * weights)
        weights = 1 / t / np.sqrt(np.maximum(np.abs(a @ prices / t - 1), 0.05))
    return dict(zip(names, prices.tolist(), strict=True))


def losses(found: list[Sample], prices: dict[str, float]) -> list[float]:
    """For each convolution the time of the strategy that is chosen by prices over that of the best one, in order."""
    ways: dict[str, list[tuple[float, float]]] = {}
    for shape, counts, seconds in found:
        ways.setdefault(shape, []).append((sum(prices[name] * count for name, count in counts.items()), seconds))
    return sorted(min(taken)[1] / min(seconds for _, seconds in taken) for taken in ways.values())


def fitting(args: Namespace, run: Run) -> Iterator[Plan]:
    """A table of convolutions drawn at random; then prices from it and earlier ones in the file, and what they lose."""
    run.records += read(args.json) if args.json.exists() else []
    rng, end = random.Random(len(run.records)), time.monotonic() + args.seconds
    drawn = iter(lambda: draw(rng) if time.monotonic() < end else "", "")
    rows = (Row(text, read_shape(text)[0][0], partial(measure_both, text, args.rounds)) for text in drawn)
    yield Plan("time", DRAWN, ORDINARY, TURNED, rows, 44)
    found = list(counted(run.records))
    prices = fit(found)
    lost = losses(found, prices)
    print("\n".join(f'    "{name}": {price:.3g},' for name, price in prices.items()))
    print(f"{len(lost)} shapes; chosen over best: mean {mean(lost):.2f}, 90% under {lost[int(0.9 * len(lost))]:.2f}")
