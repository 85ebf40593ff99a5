"""Times, interleaved, and peak memory, in processes of their own; and how much of the machine others take."""

import ctypes
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from random import Random
from statistics import median
from typing import Any
from unittest import mock

import torch

BUSY = 0.1  # a tenth of the cores gone to others already moves minima of two-threaded calls
TURN = 0.05  # seconds: short calls repeat within a turn; with 0.01 a call of 0.3 ms never gets past cold caches
CALLS = 3  # in a turn at least: the first meets memory as another contender left it, the next as in a training loop
ENOUGH = 3  # turns that even a slow contender gets
PATIENCE = 3.0  # seconds of a contender, after which it gets no more turns than it must
ORDINARY = "ordinary + fill"  # the base of an op: its ordinary gradient, and writing N of them, which that does not do
# By default glibc's malloc keeps holes between the blocks of its heap, and how large these are is chance: 106 to 132 MB
# in one process and another where 72 MB of tensors are alive. A tight one gives back each freed block over 64 KiB.
MALLOC = {"tight": {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}, "default": {}}
Call = Callable[[], object]


@dataclass(frozen=True)
class Measured:
    """What one contender took, or why it did not run."""

    best: float | None = None  # seconds or bytes
    spread: float | None = None  # median / best
    turns: int = 0
    error: str = ""
    mark: str = ""  # said in the cell
    note: str = ""  # said below the table
    ready: float = 0.0  # seconds until the first call was there, of what is compiled

    def over(self, base: "Measured", beyond: float = 0) -> float | None:
        """The ratio to a base, some bytes aside."""
        return (self.best - beyond) / base.best if self.best is not None and base.best else None


def setup(threads: int = 2) -> dict[str, Any]:
    """The settings that every measurement shares, and what to say about them."""
    torch.set_num_threads(threads)
    # Malloc keeps what is freed up to the largest block that ever was, 32 MB at most: as in a process that trains.
    torch.empty((32 << 20) - (64 << 10), dtype=torch.uint8)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    machine = {"threads": threads, "cores": os.cpu_count()}
    return {"date": time.strftime("%Y-%m-%d", time.gmtime())} | versions | {"dtype": "float32"} | machine


def progress(text: str, row: bool = False) -> None:
    """Says on stderr what is running: in place on a terminal, a step after its row; else a line for each row."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}\033[s" if row else f"\033[u\033[K{text}", end="", file=sys.stderr, flush=True)
    elif row and text:
        print(f"{text}...", file=sys.stderr, flush=True)


def interleaved(calls: Mapping[Any, Call], rounds: int, patience: float = PATIENCE) -> dict[Any, Measured]:
    """The cost of each call, a minimum; one that has taken `patience` seconds, and had `ENOUGH` turns, gets no more."""
    turns: dict[Any, list[list[float]]] = {name: [] for name in calls}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ops that vmap runs in a loop; psgrad's fallback is said by a mark
        for i in range(rounds):
            names = [name for name, had in turns.items() if len(had) < ENOUGH or sum(map(sum, had)) < patience]
            Random(i).shuffle(names)  # nobody always follows the same one
            for name in names:
                progress(f"round {i + 1}/{rounds} {name}")
                settle()
                turns[name].append(turn(calls[name]))
    times = {name: list(chain.from_iterable(had)) for name, had in turns.items()}
    return {name: Measured(min(t), median(t) / min(t), len(turns[name])) for name, t in times.items()}


def settle() -> None:
    """Waits until this process's own threads rest: JAX's are at work for 0.4 s after a call that made 2 GB."""
    end = time.monotonic() + 2  # seconds: some may never rest
    while time.monotonic() < end:
        used = time.process_time()
        time.sleep(0.005)
        if time.process_time() - used < 0.001:
            return


def turn(call: Call) -> list[float]:
    """The times of calls in a row, some at least; what a call returns is freed before the next, outside its time."""
    times, spent = list[float](), 0.0
    while len(times) < CALLS or spent < TURN:
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
        spent += times[-1]
        del result
    return times


def beside_ordinary(calls: Mapping[str, Call], rounds: int, chosen: str = "") -> dict[str, Measured]:
    """The times of an op's contenders with their base, and a mark on the one that psgrad chooses."""
    found = interleaved(calls, rounds)
    if chosen:
        found[chosen] = replace(found[chosen], mark="chosen")
    ordinary, fill = found["ordinary"], found["fill"]
    return {ORDINARY: replace(ordinary, best=(ordinary.best or 0) + (fill.best or 0)), **found}


def clocks() -> tuple[float, float, float]:
    """Seconds: all cores at work (NaN: not known), this process and its children at work, the clock."""
    try:
        cores = [int(ticks) for ticks in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        busy = (sum(cores) - cores[3] - cores[4]) / os.sysconf("SC_CLK_TCK")  # but idle, and waiting for a disk
    except OSError:
        busy = float("nan")
    return busy, sum(os.times()[:4]), time.monotonic()


def others(start: tuple[float, float, float]) -> float:
    """The share of the cores that other processes have used since `start`."""
    busy, own, clock = (b - a for a, b in zip(start, clocks(), strict=True))
    return max(busy - own, 0.0) / (clock * (os.cpu_count() or 1))


def fresh(function: Callable[..., Any], *args: Any, malloc: str = "default", threads: int = 2) -> Any:
    """What `function` returns in a process of its own."""
    pool = ProcessPoolExecutor(1, get_context("spawn"), setup, (threads,))
    with mock.patch.dict(os.environ, MALLOC[malloc], PYTHONWARNINGS="ignore"), pool:
        return pool.submit(function, *args).result()


def grown(call: Call) -> float:
    """Bytes by which this process grows at the peak of a call."""
    ctypes.CDLL(None).malloc_trim(0)  # freed heap would be reused without showing
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status("VmRSS")
    result = call()
    after = _status("VmHWM")
    del result
    return after - before


def _status(field: str) -> float:
    """A field of the kernel's account of this process, in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field + ":"))
    return float(line.split()[1]) * 1024
