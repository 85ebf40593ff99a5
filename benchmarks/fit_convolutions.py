"""`python -m benchmarks.fit_convolutions SECONDS`: measures convolutions drawn at random, and fits `_conv_plan.COSTS`.

The time of a strategy is taken for a sum of counts times prices, none of them negative. Relative errors count, and
large ones little: the noise of a shared machine. Times are added to FILE, from which everything there is is fitted.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import mean, quantiles
from typing import Any
from unittest import mock

import numpy as np
from scipy.optimize import nnls

from psgrad.factors import conv_costs as _conv_plan
from psgrad.factors.costs import ConvGeometry

from .convolutions import Problem, Shape, measure, shape
from .workloads import setup

MOST = 3e7  # numbers in an operand or the result
Sample = dict[str, Any]  # "shape", "turns", "seconds"


def draw(rng: random.Random) -> Shape:
    """A convolution that takes a few milliseconds."""
    while True:
        d = rng.choice([1, 2, 2, 2, 2, 3])
        size = rng.choice([[50, 200, 1000, 4000, 16000], [4, 7, 8, 14, 16, 28, 32, 56, 112], [4, 8, 12, 16, 24]][d - 1])
        kernel = rng.choice([[2, 3, 5, 9, 15], [2, 3, 3, 3, 5, 7], [2, 3, 3]][d - 1])
        stride = rng.choice([1, 1, 1, 2])
        dilation = rng.choice([1, 1, 1, 2]) if stride == 1 else 1
        c, o = rng.choice([8, 16, 32, 48, 64, 128, 256, 512, 1, 4, 20]), rng.choice([8, 16, 32, 64, 128, 256, 512, 10])
        groups = 1
        match rng.choice(["plain"] * 5 + ["depthwise", "groups", "stem", "1x1"]):
            case "depthwise":
                c = o = groups = rng.choice([16, 32, 64, 128, 256, 512])
            case "groups":
                groups = rng.choice([2, 4, 8, 16, 32])
                c = o = groups * rng.choice([2, 4, 8, 16, 32])
            case "stem":
                c, o = rng.choice([1, 3]), rng.choice([16, 32, 64, 96])
            case "1x1":
                kernel = 1
        t, weights = (size // stride) ** d, o * c // groups * kernel**d
        n = min(64, int(6e6 / (weights * t / 50 + (c * size**d + o * t + weights) / 2)))
        n = rng.choice([n, n, n // 2, n // 4])
        if n > 0 and n * max(weights, c * size**d, o * t) < MOST:
            return shape(n, c, o, size, kernel, stride, dilation=dilation, groups=groups, d=d)


def sample(drawn: Shape) -> list[Sample]:
    """Its times, with products taken either way."""
    found = []
    for turns in (False, True):
        with mock.patch.object(_conv_plan, "conv_turns", return_value=turns):
            found.append({"shape": drawn, "turns": turns, "seconds": measure(Problem(drawn, 1), 2, peers=False)})
    return found


def counted(given: Sample) -> dict[str, dict[str, float]]:
    n, c, o, size, kernel, geometry = given["shape"]
    geometry = ConvGeometry(*(tuple(v) if isinstance(v, list) else v for v in geometry))
    ends = zip(size, *geometry[:3], kernel, strict=True)
    out = [(length + 2 * p - d * (k - 1) - 1) // s + 1 for length, s, p, d, k in ends]
    with mock.patch.object(_conv_plan, "conv_turns", return_value=given["turns"]):
        return _conv_plan.counts((n, 1, c, *size), (n, 1, o, *out), geometry, kernel)


def fit(samples: list[Sample]) -> dict[str, float]:
    """Prices in nanoseconds."""
    rows = [(done, given["seconds"][way] * 1e9) for given in samples for way, done in counted(given).items()]
    names = sorted({name for done, _ in rows for name in done})
    a = np.array([[done.get(name, 0.0) for name in names] for done, _ in rows])
    t = np.array([taken for _, taken in rows])
    weights = 1 / t
    for _ in range(30):  # least absolute errors by least squares, weighted again and again
        prices, _ = nnls(a * weights[:, None], t * weights)
        weights = 1 / t / np.sqrt(np.maximum(np.abs(a @ prices / t - 1), 0.05))
    return dict(zip(names, prices.tolist(), strict=True))


def judge(samples: list[Sample], prices: dict[str, float]) -> list[float]:
    """For each shape the chosen strategy's time over the best one's."""
    found = []
    for plain, turned in zip(samples[::2], samples[1::2], strict=True):
        ways = [(done, s["seconds"][way]) for s in (plain, turned) for way, done in counted(s).items()]
        _, chosen = min((sum(prices[name] * count for name, count in done.items()), taken) for done, taken in ways)
        found.append(chosen / min(taken for _, taken in ways))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_convolutions", description=__doc__)
    parser.add_argument("seconds", type=float, help="how long to measure; 0: fit what FILE has")
    parser.add_argument("--file", type=Path, default=Path("build/bench/convolutions.json"))
    args = parser.parse_args()
    setup()
    samples: list[Sample] = json.loads(args.file.read_text()) if args.file.exists() else []
    rng, end = random.Random(len(samples)), time.monotonic() + args.seconds
    while time.monotonic() < end:
        samples += sample(draw(rng))
    args.file.parent.mkdir(parents=True, exist_ok=True)
    args.file.write_text(json.dumps(samples))
    prices = fit(samples)
    print("\n".join(f'    "{name}": {price:.3g},' for name, price in prices.items()))
    lost = judge(samples, prices)
    print(f"{len(lost)} shapes; chosen over best: mean {mean(lost):.2f}, 90% under {quantiles(lost, n=10)[-1]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
