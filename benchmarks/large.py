"""`python -m benchmarks.large`: norms and clipped sums of models of the size that people train.

Their per-sample gradients would be 410 MB (a ResNet-50) and 1 GB (GPT-2 small) even for 4 and 2 samples, and are never
written out. Time and peak memory over those of the batch gradient: time interleaved, the minimum; memory in fresh
processes (memory.py); answers checked against a loop over samples.
"""

import argparse
import sys
from collections.abc import Sequence

from . import memory, timing
from .__main__ import among, positive, progress
from .measured import Measured
from .peers import BASE, PEERS
from .quantities import Truth
from .workloads import LARGE, Point, setup

QUANTITIES = ("norms", "clipped")
KINDS = ("time", "memory")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.large", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", type=among(LARGE), default=list(LARGE), help="some of %(default)s")
    parser.add_argument("--quantity", type=among(QUANTITIES), default=list(QUANTITIES), help="some of %(default)s")
    parser.add_argument("--kind", type=among(KINDS), default=list(KINDS), help="some of %(default)s")
    parser.add_argument("--n", type=positive, help="samples (4 and 2)")
    parser.add_argument("--rounds", type=positive, default=3, help="turns of each contender (%(default)s)")
    args = parser.parse_args(argv)
    setup()
    print("| model | N | parameters | quantity | batch | psgrad | psgrad / batch |\n|---|---|---|---|---|---|---|")
    failed = False
    peers = [PEERS[BASE], PEERS["psgrad"]]
    for name in args.only:
        point = Point(name, args.n)
        truth = Truth(point.make())
        size = sum(p.numel() for p in truth.task.params.values())
        for quantity in args.quantity:
            start = f"| {name} | {len(truth.task.inputs)} | {size / 1e6:.1f} M | {quantity}"
            for kind in args.kind:
                progress(f"{kind} of {quantity}, {name}")
                if kind == "time":
                    found = timing.measure(truth, quantity, peers, args.rounds, 60.0, lambda _: None)
                    line = row(found, "s", 1.0)
                else:
                    found = memory.measure(point, quantity, peers, lambda _: None)
                    line = row(found, "MB", 1e6)
                failed = failed or bool(found["psgrad"].error)
                print(f"{start}, {kind} | {line}", flush=True)
    return int(failed)


def row(found: dict[str, Measured], unit: str, scale: float) -> str:
    ours, base = found["psgrad"], found[BASE]
    if ours.best is None or base.best is None:
        return f"failed: {ours.error or base.error} | | |"
    return f"{base.best / scale:.3g} {unit} | {ours.best / scale:.3g} {unit} | {ours.best / base.best:.2f} |"


if __name__ == "__main__":
    sys.exit(main())
