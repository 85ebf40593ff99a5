"""psgrad beside its peers on whole models: `workloads`, `memory`, `sweep` and `large`."""

import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product

import psgrad

from .measuring import PATIENCE, Call, Measured, fresh, grown, interleaved, progress
from .models import LARGE, Point
from .peers import BASE, PEERS
from .results import Bar, Plan, Row, Run, describe

# How cost grows: with samples, and for what is never written out with width, for norms with the length of sequences.
SAMPLES = [Point(workload, n) for workload in ("mlp", "resnet") for n in (1, 8, 64, 512)]
WIDTHS = [Point("mlp", width=width) for width in (256, 512, 1024, 2048, 4096)]
LENGTHS = [Point("gpt", length=length) for length in (32, 64, 128, 256, 512, 1024)]

LIMITS = """
kind   quantity mlp-tiny mlp  resnet resnet-wide instance conv1d conv3d gpt  gpt-tied lstm resnet50 gpt2-small
time   grads    3.0      -    1.35   1.25        1.25     1.15   1.4    1.12 -        3.0  -        -
time   norms    2.5      1.05 1.3    1.2         1.2      1.1    1.35   1.15 -        3.0  1.3      1.15
time   clipped  3.0      1.15 1.4    1.3         1.3      1.2    1.45   1.3  -        3.2  1.6      1.3
memory grads    -        1.1  1.1    1.1         1.1      1.1    1.1    1.1  1.1      1.1  -        -
memory norms    -        1.3  1.3    1.3         1.3      1.3    1.3    1.3  1.3      1.5  1.3      1.3
memory clipped  -        1.3  1.3    1.3         1.3      1.3    1.3    1.3  1.3      1.5  1.3      1.3
"""
HEAD, *ROWS = (line.split() for line in LIMITS.strip().splitlines())
BARS = {(*row[:2], name): Bar(float(x)) for row in ROWS for name, x in zip(HEAD, row, strict=True) if x[0].isdigit()}
COMPILED = """
quantity mlp-tiny mlp  resnet resnet-wide instance conv1d conv3d gpt  lstm
grads    0.40     -    1.10   1.10        1.0      1.0    0.95   1.0  1.5
norms    0.40     0.65 1.1    1.0         1.0      0.95   0.9    0.95 1.5
clipped  0.45     1.05 1.2    1.2         1.1      1.0    0.95   1.15 1.7
"""
BARS["time", "grads", "mlp"] = Bar(0.30, "psgrad out=", "vmap(grad)")  # nearly all of it is writing N x P floats

task = cache(Point.make)  # right answers are worked out once for all quantities


def plans(args: Namespace, run: Run) -> Iterator[Plan]:
    """A table for each kind and quantity, with a row for each workload."""
    for kind, quantity in product(args.kind, args.quantity):
        points = SAMPLES + WIDTHS * (quantity != "grads") + LENGTHS * (quantity == "norms")
        if args.command != "sweep":
            points = [Point(name, args.n) for name in args.only]
        names = [name for name, peer in PEERS.items() if name in (BASE, *args.peers) and quantity in peer.quantities]
        taken = partial(peaks, args.malloc, args.threads) if kind == "memory" else partial(times, args.rounds)
        taken, points = partial(taken, quantity, names), [point for point in points if point.workload in args.only]
        rows = (Row(point.label, point.samples, partial(taken, point), bars(kind, quantity, point)) for point in points)
        yield Plan(kind, quantity, BASE, names, rows)


_NAMES, *_LINES = (line.split() for line in COMPILED.strip().splitlines())
COMPILED_BARS = {
    (line[0], name): Bar(float(x), "psgrad compiled")
    for line in _LINES
    for name, x in zip(_NAMES, line, strict=True)
    if x[0].isdigit()
}


def bars(kind: str, quantity: str, point: Point) -> list[Bar]:
    """A workload's bar at its own size; memory of gradients is judged beyond the gradients themselves."""
    bar = BARS.get((kind, quantity, point.label))
    if bar and (kind, quantity) == ("memory", "grads"):
        bar = replace(bar, beyond=point.samples * task(point).size)
    graph = COMPILED_BARS.get((quantity, point.label)) if kind == "time" else None
    return [each for each in (bar, graph) if each]


def times(rounds: int, quantity: str, names: Sequence[str], point: Point) -> dict[str, Measured]:
    """Times of contenders whose answers are right, or why there are none."""
    calls: dict[str, Call] = {}
    found: dict[str, Measured] = {}
    for name in names:
        progress(f"warm-up {name}")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ready = PEERS[name].make(quantity, task(point))
                answer = ready.read(ready.call())
            if not name.startswith(BASE):
                task(point).check(quantity, answer)
            del answer  # which may be gigabytes
        except Exception as error:
            found[name] = Measured(error=describe(error, PEERS[name].package))
            continue
        looped = any(issubclass(w.category, psgrad.FallbackWarning) for w in caught)
        found[name] = Measured(mark="loop" * looped, note=ready.note, ready=ready.seconds)
        calls[name] = ready.call
    for name, taken in interleaved(calls, rounds, 60.0 if point.workload in LARGE else PATIENCE).items():
        was = found[name]
        found[name] = replace(taken, mark=was.mark, note=was.note, ready=was.ready)
    return found


def peaks(malloc: str, threads: int, quantity: str, names: Sequence[str], point: Point) -> dict[str, Measured]:
    """Bytes at the peak of one call of each contender beyond what was there before it, each in a process of its own."""
    found = {}
    for name in names:
        progress(name)
        try:
            found[name] = fresh(peak, quantity, name, point, malloc=malloc, threads=threads)
        except Exception as error:  # a broken pool: killed, most likely, for want of memory
            found[name] = Measured(error=describe(error, PEERS[name].package))
    return found


def peak(quantity: str, name: str, point: Point) -> Measured:
    """The same of one contender, in this process."""
    ready = PEERS[name].make(quantity, point.make())
    ready.call()  # builds kernels and loads code
    sizes = []
    for _ in range(3):
        psgrad.empty_cache()  # what was kept of the last result counts, too
        sizes.append(grown(ready.call))
    _, middle, most = sorted(sizes)
    return Measured(middle, most / max(middle, 1), 3, note=ready.note)
