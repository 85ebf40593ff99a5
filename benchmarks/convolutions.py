"""`python -m benchmarks.convolutions`: per-sample weight gradients of convolutions from real networks.

Every figure is a ratio, within one run, to the ordinary weight gradient of the same batch. Exit code 1 where a bar is
missed.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from psgrad.factors import conv_costs as _conv_plan
from psgrad.factors.costs import ConvGeometry
from psgrad.factors.patches import Patches, weight_gradient

from .__main__ import among, positive, progress
from .machine import BUSY, Others
from .timing import Call, fastest
from .workloads import setup

BAR = 1.3  # ours over the ordinary weight gradient and a fill of what ours writes beyond it
NOISE = 1.05  # by how much ours may trail vmap(grad): what two runs of one call differ by


class Shape(NamedTuple):
    """A convolution of N images, square or cubic unless it says otherwise."""

    n: int
    c: int
    o: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    geometry: ConvGeometry


def shape(
    n: int, c: int, o: int, size: Any, kernel: Any, stride: Any = 1, padding: Any = None, dilation: int = 1,
    groups: int = 1, d: int = 2,
) -> Shape:  # fmt: skip
    """Padded so that a stride of 1 keeps the size, unless `padding` says otherwise."""
    size, kernel, stride = (v if isinstance(v, tuple) else (v,) * d for v in (size, kernel, stride))
    sides = tuple(dilation * (k - 1) // 2 if padding is None else padding for k in kernel)
    return Shape(n, c, o, size, kernel, ConvGeometry(stride, sides, (dilation,) * d, groups))


depthwise = lambda n, c, size, kernel, stride=1, d=2: shape(n, c, c, size, kernel, stride, groups=c, d=d)
line = partial(shape, d=1)
volume = partial(shape, d=3)

SHAPES = {
    # a small ResNet on 32x32 images, its wide form, and the net with instance norm: the benchmark's workloads
    "cifar 3-16": shape(64, 3, 16, 32, 3),
    "cifar 16-16": shape(64, 16, 16, 32, 3),
    "cifar 16-32 /2": shape(64, 16, 32, 32, 3, 2),
    "cifar 16-32 1x1 /2": shape(64, 16, 32, 32, 1, 2),
    "cifar 32-32": shape(64, 32, 32, 16, 3),
    "cifar 32-64 /2": shape(64, 32, 64, 16, 3, 2),
    "cifar 32-64 1x1 /2": shape(64, 32, 64, 16, 1, 2),
    "cifar 64-64": shape(64, 64, 64, 8, 3),
    "wide 64-64": shape(16, 64, 64, 32, 3),
    "wide 64-128 /2": shape(16, 64, 128, 32, 3, 2),
    "wide 128-128": shape(16, 128, 128, 16, 3),
    "wide 256-256": shape(16, 256, 256, 8, 3),
    "instance 3-32": shape(32, 3, 32, 32, 3),
    "instance 32-64 /2": shape(32, 32, 64, 32, 3, 2),
    "instance 64-64": shape(32, 64, 64, 16, 3),
    # ResNet-18, ResNet-50, ResNeXt, VGG on 224x224
    "resnet stem 7x7 /2": shape(8, 3, 64, 224, 7, 2),
    "resnet18 64-64": shape(8, 64, 64, 56, 3),
    "resnet18 64-128 /2": shape(8, 64, 128, 56, 3, 2),
    "resnet18 128-128": shape(8, 128, 128, 28, 3),
    "resnet18 256-256": shape(8, 256, 256, 14, 3),
    "resnet18 512-512": shape(8, 512, 512, 7, 3),
    "resnet50 64-256 1x1": shape(8, 64, 256, 56, 1),
    "resnet50 256-64 1x1": shape(8, 256, 64, 56, 1),
    "resnet50 256-512 1x1 /2": shape(8, 256, 512, 56, 1, 2),
    "resnet50 1024-256 1x1": shape(8, 1024, 256, 14, 1),
    "resnet50 512-2048 1x1": shape(8, 512, 2048, 7, 1),
    "resnext 128 in 32": shape(8, 128, 128, 56, 3, groups=32),
    "resnext 512 in 32": shape(8, 512, 512, 14, 3, groups=32),
    "vgg 64-64": shape(2, 64, 64, 224, 3),
    "vgg 128-128": shape(2, 128, 128, 112, 3),
    "vgg 512-512": shape(8, 512, 512, 14, 3),
    # MobileNet, ConvNeXt, a vision transformer's patches
    "mobilenet stem /2": shape(8, 3, 32, 224, 3, 2),
    "mobilenet dw 32": depthwise(8, 32, 112, 3),
    "mobilenet dw 64 /2": depthwise(8, 64, 112, 3, 2),
    "mobilenet dw 512": depthwise(32, 512, 14, 3),
    "mobilenet dw 1024": depthwise(32, 1024, 7, 3),
    "mobilenet dw 240 5x5": depthwise(16, 240, 28, 5),
    "mobilenet 64-128 1x1": shape(8, 64, 128, 56, 1),
    "mobilenet 512-512 1x1": shape(16, 512, 512, 14, 1),
    "convnext patchify 4x4 /4": shape(8, 3, 96, 224, 4, 4, 0),
    "convnext dw 96 7x7": depthwise(8, 96, 56, 7),
    "convnext dw 384 7x7": depthwise(8, 384, 14, 7),
    "convnext dw 768 7x7": depthwise(16, 768, 7, 7),
    "convnext 96-192 2x2 /2": shape(8, 96, 192, 56, 2, 2, 0),
    "convnext 384-768 2x2 /2": shape(8, 384, 768, 14, 2, 2, 0),
    "vit patch 16x16": shape(8, 3, 192, 224, 16, 16, 0),
    # U-Net and other nets that answer for every pixel
    "unet 1-64": shape(2, 1, 64, 256, 3),
    "unet 64-64": shape(1, 64, 64, 256, 3),
    "unet 256-128": shape(2, 256, 128, 64, 3),
    "unet head 64-2 1x1": shape(4, 64, 2, 256, 1),
    "atrous 256-256 every 2nd": shape(4, 256, 256, 28, 3, dilation=2),
    "inception 128-128 1x7": shape(8, 128, 128, 17, (1, 7)),
    # sound and text
    "wavenet 64-64 every 4th": line(8, 64, 64, 4000, 2, padding=4, dilation=4),
    "wavenet 64-64 every 256th": line(8, 64, 64, 4000, 2, padding=0, dilation=256),
    "tcn 32-32 every 8th": line(32, 32, 32, 500, 3, dilation=8),
    "audio 1-32 9 /2": line(16, 1, 32, 16000, 9, 2, 0),
    "audio 1-64 80 /4": line(8, 1, 64, 16000, 80, 4, 0),
    "audio 32-64 9 /2": line(16, 32, 64, 2000, 9, 2, 0),
    "audio 512-512 3 /2": line(4, 512, 512, 400, 3, 2),
    "conformer dw 256 31": depthwise(16, 256, 200, 31, d=1),
    "text 70-256 7": line(32, 70, 256, 200, 7, padding=0),
    # video and volumes
    "video stem 3x7x7 /2": volume(2, 3, 64, (8, 112, 112), (3, 7, 7), (1, 2, 2)),
    "video 64-64": volume(2, 64, 64, (8, 28, 28), 3),
    "video 64-64 3x1x1": volume(4, 64, 64, (8, 28, 28), (3, 1, 1)),
    "volume 1-8": volume(8, 1, 8, 24, 3),
    "volume 8-16 /2": volume(8, 8, 16, 24, 3, 2),
}


class Problem:
    """Some sets of operands, taken in turn: inside a model nobody finds them in a cache."""

    def __init__(self, shape: Shape, sets: int) -> None:
        torch.manual_seed(0)
        self.shape, self.next = shape, 0
        self.conv = (F.conv1d, F.conv2d, F.conv3d)[len(shape.kernel) - 1]
        self.weight = torch.randn(shape.o, shape.c // shape.geometry.groups, *shape.kernel)
        xs = [torch.randn(shape.n, 1, shape.c, *shape.size) for _ in range(sets)]
        self.factors = [Patches(x, self._cotangent(x), shape.geometry, shape.kernel) for x in xs]
        self.outs = [torch.empty(shape.n, *self.weight.shape) for _ in range(sets)]

    def _cotangent(self, x: Tensor) -> Tensor:
        return torch.randn_like(self.conv(x[:, 0], self.weight, None, *self.shape.geometry))[:, None]

    def turn(self) -> tuple[Patches, Tensor]:
        self.next = (self.next + 1) % len(self.factors)
        return self.factors[self.next], self.outs[self.next]

    def ordinary(self) -> Tensor:
        factor, _ = self.turn()
        return weight_gradient(factor.x[:, 0], factor.g[:, 0], self.shape.geometry, tuple(self.weight.shape))

    def fill(self) -> Tensor:
        return self.turn()[1].fill_(1.0)

    def ours(self, strategy: str | None = None, fresh: bool = False) -> Tensor:
        """Our way; a strategy's own where one is named."""
        factor, out = self.turn()
        return factor.by(strategy or factor.plan.strategy, None if fresh else out)

    def vmapped(self) -> Tensor:
        """The step of vmap(grad) that gives the weight's gradients, without its forward pass."""
        factor, _ = self.turn()
        step = lambda x, g: weight_gradient(x, g, self.shape.geometry, tuple(self.weight.shape))
        return vmap(step)(factor.x, factor.g)

    @property
    def strategies(self) -> list[str]:
        x, g, geometry, kernel = (getattr(self.factors[0], name) for name in ("x", "g", "geometry", "kernel"))
        return list(_conv_plan.counts(x.shape, g.shape, geometry, kernel))

    def contenders(self) -> dict[str, Call]:
        ours = {"ours": self.ours, "fresh": partial(self.ours, fresh=True)}
        return {"ordinary": self.ordinary, "fill": self.fill, **ours, **self.each(), "vmap": self.vmapped}

    def each(self) -> dict[str, Call]:
        return {strategy: partial(self.ours, strategy) for strategy in self.strategies}


def measure(problem: Problem, rounds: int, peers: bool = True) -> dict[str, float]:
    """Seconds of each contender, or of the strategies alone: the minimum over rounds in which each has its turn."""
    contenders = problem.contenders() if peers else problem.each()
    for call in contenders.values():
        call()
    return fastest(contenders, rounds)


class Row(NamedTuple):
    """What a shape's times come to."""

    name: str
    seconds: Mapping[str, float]
    chosen: str
    strategies: Sequence[str]

    def over(self, contender: str, base: str = "ordinary") -> float:
        return self.seconds[contender] / self.seconds[base]

    @property
    def with_fill(self) -> float:
        """Ours over the ordinary gradient and a fill of the N x P numbers that it does not write."""
        return self.seconds["ours"] / (self.seconds["ordinary"] + self.seconds["fill"])

    @property
    def best(self) -> str:
        return min(self.strategies, key=self.seconds.__getitem__)

    @property
    def missed(self) -> list[str]:
        """The bars that ours does not keep."""
        bars = [f"{self.with_fill:.2f} > {BAR}"] if self.with_fill > BAR else []
        behind = self.over("ours", "vmap")
        return bars + ([f"{behind:.2f} of vmap(grad)"] if behind > NOISE else [])

    def cells(self) -> list[str]:
        ratios = [self.over("ours"), self.with_fill, self.over("fresh"), self.over("vmap")]
        ways = ", ".join(f"{way} {self.over(way):.2f}" for way in self.strategies)
        figures = [f"{self.seconds['ordinary'] * 1e3:.2f}", *(f"{ratio:.2f}" for ratio in ratios)]
        return [self.name, *figures, self.chosen, self.best, ways, ", ".join(self.missed)]


HEAD = [
    *("shape", "ordinary ms", "ours", "ours/(ordinary+fill)", "ours, fresh memory", "vmap(grad)"),
    *("chosen", "best", "each strategy", "missed"),
]


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    about = setup() | {"rounds": args.rounds, "sets": args.sets}
    rows: list[Row] = []
    busy: list[str] = []
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for name in args.only or SHAPES:
        progress(name)
        others, problem = Others(), Problem(SHAPES[name], args.sets)
        seconds = measure(problem, args.rounds)
        rows.append(Row(name, seconds, problem.factors[0].plan.strategy, problem.strategies))
        progress()
        print(f"| {' | '.join(rows[-1].cells())} |", flush=True)
        busy += [name] if others.share() > BUSY else []
        if args.json:  # after each row: a run that is stopped keeps what it has
            args.json.write_text(json.dumps(about | {"rows": [row._asdict() for row in rows]}, indent=1))
    missed = [row for row in rows if row.missed]
    print(f"\n{len(rows) - len(missed)} of {len(rows)} shapes keep the bars")
    for row in missed:
        print(f"{row.name}: {', '.join(row.missed)}")
    if busy:
        print(f"Other processes took over {BUSY:.0%} of the cores, not to be trusted: {', '.join(busy)}")
    return int(bool(missed))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convolutions", description=__doc__)
    parser.add_argument("--only", type=among(SHAPES), help="some of the shapes, with commas (all)")
    parser.add_argument("--rounds", type=positive, default=5, help="turns of each contender (5)")
    parser.add_argument(
        "--sets", type=positive, default=1, help="operands to take in turn, so that caches are cold (1)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
