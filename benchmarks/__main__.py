"""`python -m benchmarks`: psgrad beside its peers, in time or memory; exit code 1 if a bar is missed."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from . import bars, compare, measured, memory, timing
from .bars import Verdict
from .machine import BUSY, Others
from .measured import Measured, Record
from .peers import BASE, GROWTH, PEERS
from .quantities import NAMES, Truth
from .table import Table
from .workloads import QUICK, SWEEP, SWEEP_NORMS, SWEEP_WIDTH, WORKLOADS, Point, setup

PATIENCE = 3.0  # seconds of a contender, after which it gets no more turns than it must


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    run = Run(args, setup(args.threads) | {"rounds": args.rounds})
    for quantity in args.quantity:
        run.table(quantity)
    missed = [verdict for verdict in run.verdicts if not verdict.met]
    if run.verdicts:
        print(f"\n{len(run.verdicts) - len(missed)} of {len(run.verdicts)} bars met")
    for verdict in missed:
        print(f"{verdict.kind} of {verdict.quantity}, {verdict.workload}: {verdict}")
    if args.against:
        print("\n".join([f"\nagainst {args.against}:", *compare.compare(run.records, measured.read(args.against))]))
    if args.plots:
        from . import plot

        plot.draw(run.records, args.plots)
    return int(bool(missed))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("--quantity", type=among(NAMES), help=f"some of {', '.join(NAMES)}, with commas (all)")
    add("--only", type=among(WORKLOADS), help=f"some of {', '.join(WORKLOADS)} (all)")
    add("--peers", type=among(PEERS), help=f"some of {', '.join(PEERS)} (all; for --sweep {', '.join(GROWTH)})")
    add("--rounds", type=positive, help="turns of each contender, of slow ones fewer (30)")
    add("--quick", action="store_true", help=f"one round of {', '.join(QUICK)}")
    add("--memory", action="store_true", help="peak memory in place of time (of grads, norms and clipped)")
    add("--malloc", choices=list(memory.MALLOC), default="tight", help="for --memory: with the holes of malloc, or not")
    add("--sweep", action="store_true", help="how cost grows with samples, width and length (not of gram)")
    add("--threads", type=positive, default=2, help="of torch, for times (2)")
    add("--json", type=Path, metavar="FILE", help="write the figures there too")
    add("--against", type=Path, metavar="FILE", help="say what got worse since the run that wrote FILE")
    add("--plots", type=Path, metavar="DIR", help="draw the figures there (needs matplotlib)")
    args = parser.parse_args(argv)
    args.rounds = args.rounds or (1 if args.quick else 30)
    args.peers = args.peers or list(GROWTH if args.sweep else PEERS)
    args.quantity = args.quantity or [name for name in NAMES if wanted(name, args)]
    return args


def wanted(quantity: str, args: argparse.Namespace) -> bool:
    """Whether a quantity is measured unless others are asked for."""
    if args.memory:
        return quantity != "gram"
    return quantity != "gram" if args.sweep else True


def among(known: Mapping[str, object] | Sequence[str]) -> Callable[[str], list[str]]:
    """A type of argument: names among `known`, with commas, in the order of `known`."""

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return [name for name in known if name in chosen]

    return names


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def points(args: argparse.Namespace, quantity: str) -> list[Point]:
    """The rows of a table."""
    if args.sweep:
        rows = SWEEP + (SWEEP_WIDTH if quantity != "grads" else []) + (SWEEP_NORMS if quantity == "norms" else [])
    else:
        rows = [Point(name) for name in (QUICK if args.quick and not args.only else WORKLOADS)]
    return [point for point in rows if args.only is None or point.workload in args.only]


class Run:
    """What has been measured so far; right answers are worked out once for all quantities."""

    def __init__(self, args: argparse.Namespace, about: dict[str, Any]) -> None:
        self.args, self.about = args, about
        self.kind = "memory" if args.memory else "time"
        self.truths: dict[Point, Truth] = {}
        self.records: list[Record] = []
        self.verdicts: list[Verdict] = []

    def table(self, quantity: str) -> None:
        """Measure a quantity, and print a row as soon as there is one."""
        chosen = {BASE, *self.args.peers}
        peers = [peer for name, peer in PEERS.items() if name in chosen and quantity in peer.offers]
        table = Table(self.kind, quantity, [peer.name for peer in peers])
        for point in points(self.args, quantity):
            progress(f"{quantity} {point.label}")
            truth = self.truths.setdefault(point, Truth(point.make()))
            doing, share = partial(progress, f"{quantity} {point.label}"), None
            if self.args.memory:
                found = memory.measure(point, quantity, peers, doing, self.args.malloc)
            else:
                others = Others()
                found = timing.measure(truth, quantity, peers, self.args.rounds, PATIENCE, doing)
                share = others.share()
                if share > BUSY:
                    table.remarks[f"Other processes took over {BUSY:.0%} of the cores: not to be trusted."] = None
            progress()
            verdict = bars.judge(self.kind, quantity, point.label, found, truth.task.size)
            self.verdicts += [verdict] if verdict else []
            self.keep(quantity, point, len(truth.task.inputs), found)
            table.row(point, truth.task, found, share, verdict)
        table.end()

    def keep(self, quantity: str, point: Point, n: int, found: Mapping[str, Measured]) -> None:
        base = found[BASE].best
        for name, m in found.items():
            ratio = m.best / base if m.best is not None and base else None
            self.records.append(Record(self.kind, quantity, point.label, n, name, m, ratio))
        if self.args.json:  # after each row: a run that is stopped keeps what it has
            figures = [verdict.figures() for verdict in self.verdicts]
            measured.write(self.args.json, self.about, self.records, figures)


def progress(where: str = "", doing: str = "") -> None:
    """Say on stderr what is running: in place on a terminal, else a line for each row."""
    if sys.stderr.isatty():
        print(f"\r\033[K{where} {doing}", end="", file=sys.stderr, flush=True)
    elif where and not doing:
        print(f"{where} ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
