"""`python -m benchmarks`: the table of times (or of memory), and exit code 1 if a bar is missed."""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from . import bars, contenders, memory, timing
from .machine import BUSY, Others
from .timing import Time
from .workloads import WORKLOADS, make, setup


def main() -> int:
    args = arguments()
    about = setup()
    if args.memory:
        results, missed = memories(args.only), False
    else:
        results, missed = times(args.only, args.rounds)
        about["rounds"] = args.rounds
    if args.json:
        args.json.write_text(json.dumps({**about, "workloads": results}, indent=1) + "\n")
    return int(missed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--only", type=names, default=list(WORKLOADS), help="workloads, separated by commas")
    parser.add_argument("--rounds", type=positive, default=30, help="turns of each contender (30)")
    parser.add_argument("--quick", dest="rounds", action="store_const", const=5, help="5 rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--memory", action="store_true", help="peak memory in place of time")
    return parser.parse_args()


def names(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := [name for name in chosen if name not in WORKLOADS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(WORKLOADS)}")
    return chosen


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def times(workloads: Iterable[str], rounds: int) -> tuple[dict[str, Any], bool]:
    """Print the table of times; the figures, and whether a bar is missed."""
    others = [name for name in contenders.GRADS if name != "batch"]
    print(f"per_sample_grads: times as ratios to batch, the minimum of {rounds} rounds (median/minimum)\n")
    print(row("workload", "N", "batch ms", *others) + "  others' CPU  bar")
    results: dict[str, Any] = {}
    notes: list[str] = []
    busy: list[str] = []
    missed = False
    for workload in workloads:
        progress(workload)
        task, machine = make(workload), Others()
        measured = timing.measure(task, contenders.GRADS, rounds, partial(progress, workload))
        share = machine.share()
        progress()
        if share > BUSY:
            busy.append(workload)
        base = measured["batch"]
        cells = [cell(measured[name], base.best, f"{workload}, {name}", notes) for name in others]
        batch = cell(base, 1e-3, f"{workload}, batch", notes)
        bar = bars.GRADS.get(workload)
        ratio = measured[bar.contender].best / measured[bar.base].best if bar else float("nan")
        met = ratio <= bar.limit if bar else None  # a contender that failed is NaN: not met
        missed |= met is False
        line = row(workload, str(len(task.inputs)), batch, *cells)
        print(f"{line}{share:>13.0%}  {verdict(bar, ratio, met)}", flush=True)
        figures = {name: {"error": t.error} if t.error else asdict(t) for name, t in measured.items()}
        results[workload] = {"others": share, "times": figures}
        if bar:
            results[workload]["bar"] = {**asdict(bar), "measured": ratio if ratio > 0 else None, "met": met}
    if busy:
        notes.append(f"Other processes took over {BUSY:.0%} of the cores on {', '.join(busy)}: not to be trusted.")
    print("\n".join(["", *notes]))
    return results, missed


def cell(time: Time, base: float, where: str, notes: list[str]) -> str:
    """A time over a base with its spread; an error becomes a note."""
    if time.error:
        notes.append(f"[{len(notes) + 1}] {where}: {time.error}")
        return f"failed [{len(notes)}]"
    return f"{time.mark} {time.best / base:.2f} ({time.spread:.2f})".strip()


def verdict(bar: bars.Bar | None, ratio: float, met: bool | None) -> str:
    """The bar, and how the measured ratio stands to it."""
    if bar is None:
        return "-"
    how = "met" if met else f"MISSED by {ratio / bar.limit - 1:.0%}" if ratio > 0 else "MISSED, nothing to compare"
    return f"{bar.contender} {ratio:.2f} of {bar.base}, bar {bar.limit:.2f}: {how}"


def memories(workloads: Iterable[str]) -> dict[str, Any]:
    """Print the table of peak memory; the figures, in bytes."""
    print("per_sample_grads: peak memory of one call beyond model and data, MB (ratio to batch)\n")
    print(row("workload", "N", "result", *memory.NAMES))
    results: dict[str, Any] = {}
    notes: list[str] = []
    for workload in workloads:
        progress(workload)
        task, peaks = make(workload), {}
        for name in memory.NAMES:
            progress(workload, name)
            peaks[name] = memory.peak(workload, name)
        progress()
        base, cells = peaks["batch"], []
        for name, value in peaks.items():
            if isinstance(value, str):
                notes.append(f"[{len(notes) + 1}] {workload}, {name}: {value}")
                cells.append(f"failed [{len(notes)}]")
            else:
                cells.append(f"{mb(value)} ({value / base:.2f})" if isinstance(base, float) else mb(value))
        print(row(workload, str(len(task.inputs)), mb(task.result_bytes), *cells), flush=True)
        results[workload] = {"result": task.result_bytes, **peaks}
    if "resnet" in results:
        results["resnet"] |= (chunked := chunks("resnet", results["resnet"]["result"]))
        notes.append(f"\nresnet, {memory.CHUNKED}: {chunked.pop('text')}")
    print("\n".join(["", *notes]))
    return results


def chunks(workload: str, result: float) -> dict[str, Any]:
    """The peak in chunks, beside what no chunked call can do without: the result, and a chunk's activations."""
    whole, part = memory.peak(workload, memory.CHUNKED), memory.peak(workload, "batch", memory.CHUNK)
    if isinstance(whole, str) or isinstance(part, str):
        return {memory.CHUNKED: whole, "activations": part, "text": f"failed: {whole}, {part}"}
    text = f"{mb(whole)} MB, {whole / (result + part):.2f} of (result {mb(result)} + activations of a chunk {mb(part)})"
    return {memory.CHUNKED: whole, "activations": part, "text": text}


def mb(size: float) -> str:
    return f"{size / 1e6:.1f}"


def row(name: str, n: str, *cells: str) -> str:
    return f"{name:<12}{n:>4}" + "".join(f"{c:>18}" for c in cells)


def progress(workload: str = "", doing: str = "") -> None:
    """Say on stderr what is running: in place on a terminal, else a line for each workload."""
    if sys.stderr.isatty():
        print(f"\r\033[K{workload} {doing}", end="", file=sys.stderr, flush=True)
    elif workload and not doing:
        print(f"{workload} ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
