"""`bounded`: whether max_bytes holds, and what it costs beside the best fixed chunk size.

For bounds that are shares of what the call takes when it is free (per_sample_grads writing into `out=`): the chunk size
chosen, the peak of resident memory over the bound, the time over that of the fastest fixed chunk size that stays within
the bound, and the time that the choice takes, once. A workload's bounds share two fresh processes: memory is measured
under a malloc that gives back what is freed, times under the usual one.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from statistics import median
from typing import Any
from unittest import mock

import psgrad

from .internals import budget
from .measuring import Call, Measured, fresh, grown, interleaved
from .models import Point
from .peers import caller
from .results import Bar, Plan, Row, Run, describe

SHARES = (0.55, 0.3, 0.15)
FLOOR = 1 << 18  # bytes: the interpreter's own objects and small blocks come and go within this
HOLDS = Bar(1.1, "max_bytes", "bound", beyond=FLOOR)
FAST = Bar(1.15, "max_bytes", "best chunk")
Cells = dict[str, Measured]
Held = tuple[Cells, int]  # memory under a bound, and the largest of the fixed chunk sizes that stay within it


def plans(args: Namespace, run: Run) -> Iterator[Plan]:
    """For each quantity a table of memory, and one of times."""
    for quantity in args.quantity:
        held = cache(partial(fresh, peaks, quantity, malloc="tight", threads=args.threads))
        timed = partial(fresh, times, quantity, args.rounds, threads=args.threads)
        cells = lambda point, held=held: [found for found, _ in held(point)]
        taken = cache(lambda point, held=held, timed=timed: timed(held(point), point))
        yield Plan("memory", quantity, "bound", ("free", "max_bytes"), rows(args, HOLDS, cells), 22)
        yield Plan("time", quantity, "best chunk", ("max_bytes", "choosing"), rows(args, FAST, taken), 22)


def rows(args: Namespace, bar: Bar, found: Callable[[Point], Sequence[Cells]]) -> Iterator[Row]:
    for point in (Point(name, args.n) for name in args.only):
        for i, share in enumerate(SHARES):
            measure = lambda point=point, i=i: found(point)[i]
            yield Row(f"{point.label} {share:.0%}", point.samples, measure, [bar])


def call_of(quantity: str, point: Point) -> tuple[Callable[..., Any], int]:
    """The quantity as a function of options, and the bytes of the result that a call makes."""
    task = point.make()
    return caller(quantity, task, reuse=quantity == "grads"), task.size * (quantity == "clipped")


def sizes(n: int) -> list[int]:
    """Chunk sizes to compare with."""
    return sorted({-(-n // parts) for parts in (1, 2, 3, 4, 5, 6, 8, 12, 16)})


def peaks(quantity: str, point: Point) -> list[Held]:
    """What bounds come to in memory, in this process."""
    call, result = call_of(quantity, point)
    call()
    free, fixed = median(grown(call) for _ in range(3)), {}
    for size in sizes(point.samples):
        call(chunk_size=size)
        fixed[size] = grown(partial(call, chunk_size=size)) - result
    return [held(call, result, free, int(free * share), fixed) for share in SHARES]


def held(call: Callable[..., Any], result: int, free: float, bound: int, fixed: dict[int, float]) -> Held:
    cells, own = {"bound": Measured(bound), "free": Measured(free)}, partial(call, max_bytes=bound)
    try:
        chunk, _ = choose(own)
    except psgrad.ArgumentError as error:  # not a sample fits: refused, which is no miss
        return cells | {"bound": Measured(bound, note=describe(error))}, 0
    cells["max_bytes"] = Measured(median(grown(own) for _ in range(3)) - result, mark=f"by {chunk}")
    return cells, max((size for size, taken in fixed.items() if taken <= bound), default=0)


def times(quantity: str, rounds: int, bounds: Sequence[Held], point: Point) -> list[Cells]:
    """What bounds come to in time, in this process: beside chunk sizes up to the largest that fits."""
    (call, _), found = call_of(quantity, point), [Cells() for _ in bounds]
    for taken, (cells, fits) in zip(found, bounds, strict=True):
        if near := [size for size in sizes(point.samples) if fits / 4 <= size <= fits]:
            own = partial(call, max_bytes=int(cells["bound"].best or 0))
            choice = Measured(choose(own)[1])
            timed = interleaved({0: own, **{size: partial(call, chunk_size=size) for size in near}}, rounds)
            best = min(near, key=lambda size, timed=timed: timed[size].best or 0)
            taken |= {"best chunk": replace(timed[best], mark=f"by {best}"), "max_bytes": timed[0], "choosing": choice}
    return found


def choose(call: Call) -> tuple[int, float]:
    """The chunk size that a call with max_bytes comes to, and the seconds that the choice takes."""
    choice, chunks, seconds = budget.chunk_size, list[int](), list[float]()

    def watched(*args: Any) -> int:
        start = time.perf_counter()
        chunks.append(choice(*args))
        seconds.append(time.perf_counter() - start)
        return chunks[-1]

    with mock.patch.object(budget, "chunk_size", watched):
        call()
    return min(chunks), sum(seconds)
