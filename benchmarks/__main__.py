"""psgrad beside its peers, in time and memory; exit code 1 if a bar is missed. Without a command: `workloads`."""

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import bounded, convolutions, layers, results, workloads
from .convolutions import SHAPES
from .layers import FAMILIES
from .measuring import MALLOC, setup
from .models import LARGE, WORKLOADS
from .peers import GROWTH, PEERS
from .results import Plan, Run
from .tasks import QUANTITIES


def among(known: Collection[str]) -> Callable[[str], list[str]]:
    """A type of argument: names among `known`, or the first word of several, with commas, in the order of `known`."""

    def names(text: str) -> list[str]:
        meant = {name: {name} & {*known} or {k for k in known if k.startswith(f"{name} ")} for name in text.split(",")}
        if unknown := [name for name, found in meant.items() if not found]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
        return [name for name in known if any(name in found for found in meant.values())]

    return names


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


class Command(NamedTuple):
    """A sub-command: what it measures, and what one may choose."""

    help: str
    plans: Callable[[argparse.Namespace, Run], Iterable[Plan]]
    rounds: int  # 0: nothing is measured
    names: Collection[str]  # of its rows, for --only
    quick: str  # those of --quick
    options: Mapping[str, Any]  # some of OPTIONS, with their defaults


def earlier(args: argparse.Namespace, run: Run) -> Iterable[Plan]:
    """No tables, but the figures of other runs; of what several have measured, that of the last file."""
    measured = [record for file in args.files for record in results.read(file)]
    last = {(r.kind, r.quantity, r.workload, r.n, r.contender): r for r in measured}
    run.records += last.values()
    run.about["runs"] = [results.about(file) for file in args.files]
    return ()


THREE, QUICK, SWEPT = "grads,norms,clipped", "mlp-tiny,conv1d,gpt", ("mlp", "resnet", "gpt")
MODELS = {"quantity": ",".join(QUANTITIES), "peers": ",".join(PEERS), "kind": "time", "malloc": "tight"}
IN_MEMORY = MODELS | {"quantity": THREE, "kind": "memory", "n": None}
GROWING = MODELS | {"quantity": THREE, "peers": ",".join(GROWTH)}
TRAINED = MODELS | {"quantity": "norms,clipped", "peers": "psgrad", "kind": "time,memory", "n": None}
BOUNDED = {"quantity": THREE, "n": None, "only": ",".join(name for name in WORKLOADS if name != "mlp-tiny")}
EARLIER = {"files": None, "pages": False}
FITTED = {"seconds": None, "json": Path("build/bench/fit.json")}
COMMANDS = {
    "workloads": Command("models beside every peer", workloads.plans, 30, WORKLOADS, QUICK, MODELS | {"n": None}),
    "memory": Command("the same in peak memory, in fresh processes", workloads.plans, 1, WORKLOADS, QUICK, IN_MEMORY),
    "sweep": Command("cost as samples, width and length grow", workloads.plans, 30, SWEPT, "mlp", GROWING),
    "large": Command("models of the size that people train", workloads.plans, 3, LARGE, "resnet50", TRAINED),
    "convolutions": Command("66 from real nets, by strategy", convolutions.plans, 5, SHAPES, "instance", {"sets": 1}),
    "layers": Command("each op's rule beside its ordinary backward", layers.plans, 10, FAMILIES, "rms_norm,add", {}),
    "bounded": Command("max_bytes beside fixed chunk sizes", bounded.plans, 3, WORKLOADS, "conv3d", BOUNDED),
    "fit": Command("draws convolutions, fits the costs of their strategies", convolutions.fitting, 2, (), "", FITTED),
    "read": Command("figures of earlier runs, to compare, draw or show", earlier, 0, (), "", EARLIER),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "seconds": {"type": float, "help": "how long to measure; 0: fits what the file of --json has"},
    "files": {"type": Path, "nargs": "+", "metavar": "FILE", "help": "what --json wrote"},
    "quantity": {"type": among(QUANTITIES), "help": f"some of {', '.join(QUANTITIES)} (%(default)s)"},
    "peers": {"type": among(PEERS), "help": f"some of {', '.join(PEERS)} (%(default)s)"},
    "kind": {"type": among(("time", "memory")), "help": "time, memory or both (%(default)s)"},
    "malloc": {"choices": list(MALLOC), "help": "for memory: with the holes of malloc, or not (%(default)s)"},
    "n": {"type": positive, "help": "samples, in place of a model's own number"},
    "sets": {"type": positive, "help": "operands to take in turn, so that caches are cold (%(default)s)"},
    "rounds": {"type": positive, "help": "turns of each contender, of slow ones fewer (%(default)s)"},
    "quick": {"action": "store_true", "help": "one round of a few"},
    "threads": {"type": positive, "default": 2, "help": "of torch (%(default)s)"},
    "json": {"type": Path, "metavar": "FILE", "help": "write the figures there too"},
    "against": {"type": Path, "metavar": "FILE", "help": "say what got worse since the run that wrote FILE"},
    "every": {"action": "store_true", "help": "with --against: every figure of both runs, and averages"},
    "plots": {"type": Path, "metavar": "DIR", "help": "draw the figures there (needs matplotlib)"},
    "pages": {"action": "store_true", "help": "write the figures into the README and docs/measurements.md"},
}


def arguments(given: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    quick = "--quick" in given
    for name, (about, _, rounds, names, few, options) in COMMANDS.items():
        sub = commands.add_parser(name, help=about, description=about)
        if names:
            words = dict.fromkeys(name.split()[0] for name in names)
            sub.add_argument("--only", type=among(names), metavar="NAMES", help=f"some of {', '.join(words)}")
        taken = {*options, *(("rounds", "quick", "threads") if rounds else ()), "json", "against", "every", "plots"}
        for option in [option for option in OPTIONS if option in taken]:
            sub.add_argument(option if option in ("seconds", "files") else f"--{option}", **OPTIONS[option])
        usual = {"only": ",".join(names), "rounds": rounds} | options
        sub.set_defaults(**usual | ({"only": few, "rounds": 1} if quick else {}))
    named = given and given[0] in (*COMMANDS, "-h", "--help")
    return parser.parse_args(given if named else ["workloads", *given])


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(sys.argv[1:] if argv is None else argv)
    about = setup(args.threads) if args.rounds else {}
    run = Run(about | {"command": args.command, "rounds": args.rounds}, args.json)
    for plan in COMMANDS[args.command].plans(args, run):
        run.measure(plan)
    run.save()
    missed = run.missed()
    if args.against:
        changes = results.compare(run.records, results.read(args.against), args.every)
        print(f"\nagainst {args.against}:", *changes, sep="\n")
    if args.plots:
        from . import plot

        print(*plot.draw(run.records, args.plots), sep="\n")
    if getattr(args, "pages", False):
        from . import pages

        print(*pages.write(run.records), sep="\n")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
