"""`python -m benchmarks.bounded`: whether max_bytes holds, and what it costs beside the best fixed chunk size.

For each workload, quantity and bound (shares of what the call takes when it is free, per_sample_grads writing into
`out=`): the chunk size chosen, the peak of resident memory over the bound, the time over that of the fastest fixed
chunk size that stays within the bound, and the time that the choice took, once. Each in two fresh processes: memory
under a malloc that gives back what is freed (memory.py), times under the usual one.
"""

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import psgrad
from psgrad.streaming import budget as _memory

from .memory import MALLOC, grown
from .timing import fastest
from .workloads import WORKLOADS, Task, setup

QUANTITIES = ("grads", "norms", "clipped")
SHARES = (0.55, 0.3, 0.15)
SLACK, SLOW = 1.1, 1.15  # what a bound may be exceeded by, and what the best fixed chunk size may be slower by
FLOOR = 1 << 18  # bytes: the interpreter's own objects and small blocks come and go within this


@dataclass(frozen=True)
class Bounded:
    """How one bound fared."""

    workload: str
    quantity: str
    free: float  # bytes without a bound
    bound: int
    error: str = ""
    chunk: int = 0
    peak: float = 0.0  # bytes beyond the result
    choosing: float = 0.0  # seconds
    call: float = 0.0  # seconds of a call, after that
    best: int = 0  # the fastest chunk size that fits
    slower: float = 0.0  # time over that of `best`

    @property
    def held(self) -> bool:
        return not self.error and self.peak <= SLACK * self.bound + FLOOR


def caller(task: Task, quantity: str) -> Callable[..., Any]:
    """The quantity as a function of the options."""
    fn, params = psgrad.from_module(task.model, task.loss)
    batch = task.inputs, task.target
    if quantity == "clipped":
        return partial(psgrad.clipped_grad, fn, params, batch, task.max_norm)
    if quantity == "norms":
        return partial(psgrad.per_sample_norms, fn, params, batch)
    out = {name: p.new_zeros(len(task.inputs), *p.shape) for name, p in params.items()}
    return partial(psgrad.per_sample_grads, fn, params, batch, out=out)


def result_of(task: Task, quantity: str) -> int:
    """Bytes of the result that a call makes."""
    return task.size // len(task.inputs) if quantity == "clipped" else 0


class Choices:
    """Which chunk sizes max_bytes came to, and how long that took."""

    def __init__(self) -> None:
        self.choose, self.sizes, self.seconds = _memory.chunk_size, list[int](), 0.0

    def __enter__(self) -> "Choices":
        def watched(*args: Any) -> int:
            start = perf_counter()
            try:
                self.sizes.append(self.choose(*args))
            finally:
                self.seconds += perf_counter() - start
            return self.sizes[-1]

        _memory.chunk_size = watched
        return self

    def __exit__(self, *_: object) -> None:
        _memory.chunk_size = self.choose


def settled(call: Callable[[], object], turns: int = 3) -> float:
    """Bytes by which the process grows in a call that has run before."""
    return median(grown(call) for _ in range(turns))


def memory_of(workload: str, quantity: str) -> list[Bounded]:
    """What bounds come to in memory, in this process."""
    samples, make = WORKLOADS[workload]
    task = make(samples)
    call, result = caller(task, quantity), result_of(task, quantity)
    call()
    free = settled(call)
    sizes = dict.fromkeys(fixed(samples), 0.0)
    for n in sizes:
        call(chunk_size=n)
        sizes[n] = settled(partial(call, chunk_size=n), 1) - result
    found = []
    for share in SHARES:
        bound = int(free * share)
        with Choices() as choices:
            try:
                call(max_bytes=bound)
            except psgrad.ArgumentError as error:
                found.append(Bounded(workload, quantity, free, bound, str(error).splitlines()[0]))
                continue
        peak = settled(partial(call, max_bytes=bound)) - result
        fits = [n for n, size in sizes.items() if size <= bound]
        found.append(
            Bounded(
                workload,
                quantity,
                free,
                bound,
                "",
                min(choices.sizes),
                peak,
                choices.seconds,
                best=max(fits, default=0),
            )
        )
    return found


def fixed(n: int) -> list[int]:
    """Chunk sizes to compare with."""
    sizes = {n} | {-(-n // parts) for parts in (1, 2, 3, 4, 5, 6, 8, 12, 16)}
    return sorted(size for size in sizes if size >= 1)


def times_of(workload: str, quantity: str, rows: Sequence[Bounded], rounds: int) -> list[Bounded]:
    """The same with times, in this process: chunk sizes up to the largest that fits."""
    samples, make = WORKLOADS[workload]
    call = caller(make(samples), quantity)
    timed = []
    for row in rows:
        if row.error or not row.best:
            timed.append(row)
            continue
        with Choices() as choices:
            call(max_bytes=row.bound)
        calls = {0: partial(call, max_bytes=row.bound)}
        calls |= {n: partial(call, chunk_size=n) for n in fixed(samples) if row.best / 4 <= n <= row.best}
        times = fastest(calls, rounds)
        own = times.pop(0)
        best = min(times, key=lambda n: times[n])
        values = asdict(row) | {"choosing": choices.seconds, "call": own, "best": best, "slower": own / times[best]}
        timed.append(Bounded(**values))
    return timed


def measure(workload: str, quantity: str, rounds: int) -> list[Bounded]:
    """Both, each in a process of its own."""
    rows = _in_process("memory", workload, quantity, MALLOC["tight"])
    return _in_process("times", workload, quantity, {}, rows, rounds)


def _in_process(kind: str, workload: str, quantity: str, env: dict[str, str], *more: Any) -> list[Bounded]:
    given = json.dumps([kind, workload, quantity, *more], default=asdict)
    command = [sys.executable, "-m", "benchmarks.bounded", "--child", given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | env)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return [Bounded(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def child(kind: str, workload: str, quantity: str, rows: Sequence[dict[str, Any]] = (), rounds: int = 1) -> None:
    warnings.simplefilter("ignore")
    setup()
    if kind == "memory":
        found = memory_of(workload, quantity)
    else:
        found = times_of(workload, quantity, [Bounded(**row) for row in rows], rounds)
    print(json.dumps([asdict(row) for row in found]))


def main(argv: Sequence[str] | None = None) -> int:
    from .__main__ import among, positive

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bounded", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", type=among(WORKLOADS), help=f"some of {', '.join(WORKLOADS)} (all but mlp-tiny)")
    parser.add_argument("--quantity", type=among(QUANTITIES), default=list(QUANTITIES), help="some of %(default)s")
    parser.add_argument("--rounds", type=positive, default=3, help="turns of each chunk size (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        child(*json.loads(args.child))
        return 0
    print(
        "| workload | quantity | free MB | bound MB | chunk | peak/bound | best chunk | time/best | choosing / call |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    every: list[Bounded] = []
    for workload in args.only or [name for name in WORKLOADS if name != "mlp-tiny"]:
        for quantity in args.quantity:
            found = measure(workload, quantity, args.rounds)
            every += found
            for row in found:
                print(line(row), flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in every], indent=1) + "\n")
    tried = [row for row in every if not row.error]
    held, fast = [row for row in tried if row.held], [row for row in tried if row.slower <= SLOW]
    print(f"\n{len(held)} of {len(tried)} bounds held, {len(fast)} as fast as the best chunk size or nearly", end="; ")
    print(f"{len(every) - len(tried)} refused")
    return int(len(held) < len(tried))


def line(row: Bounded) -> str:
    start = f"| {row.workload} | {row.quantity} | {row.free / 1e6:.1f} | {row.bound / 1e6:.1f} |"
    if row.error:
        return f"{start} {row.error} | | | | |"
    choosing = f"{row.choosing * 1e3:.0f} ms / {row.call * 1e3:.0f} ms" if row.call else "-"
    over = "" if row.held else " !"
    return (
        f"{start} {row.chunk} | {row.peak / row.bound:.2f}{over} | {row.best or '-'} | {row.slower:.2f} | {choosing} |"
    )


if __name__ == "__main__":
    sys.exit(main())
