"""Times of contenders on one task, interleaved: the minimum of each is what it costs, the rest is noise."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

import psgrad

from .contenders import Contender, Grads
from .workloads import Task

TURN = 0.01  # seconds: short calls repeat within a turn, for a minimum as sure as that of long ones


@dataclass(frozen=True)
class Time:
    """What a contender took, in seconds, or why it did not run."""

    best: float = float("nan")
    spread: float = float("nan")  # median / minimum
    error: str = ""
    mark: str = ""


def measure(
    task: Task, contenders: Mapping[str, Contender], rounds: int, progress: Callable[[str], None]
) -> dict[str, Time]:
    """Times of each contender; the first one is the base that the others' gradients are checked against."""
    calls: dict[str, Callable[[], Grads]] = {}
    times: dict[str, list[float]] = {}
    failed: dict[str, Time] = {}
    marks: dict[str, str] = {}
    base: Grads = {}
    for name, contender in contenders.items():
        progress(f"warm-up {name}")
        try:
            call = contender(task)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", psgrad.FallbackWarning)
                grads = call()
            base = base or grads
            if grads is not base:
                check(grads, base)
        except Exception as error:
            failed[name] = Time(error=describe(error))
            continue
        calls[name], times[name] = call, []
        marks[name] = "loop" if any(issubclass(w.category, psgrad.FallbackWarning) for w in caught) else ""
        del grads
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warm-up had them, and psgrad's fallback is said by the mark
        names = list(calls)
        for i in range(rounds):
            for name in names[i % len(names) :] + names[: i % len(names)]:  # nobody always follows the same one
                progress(f"round {i + 1}/{rounds} {name}")
                times[name] += turn(calls[name])
    measured = {name: Time(min(t), median(t) / min(t), mark=marks[name]) for name, t in times.items()}
    return {name: failed.get(name) or measured[name] for name in contenders}


def turn(call: Callable[[], object]) -> list[float]:
    """The times of calls in a row, one at least; what a call returns is freed before the next, outside its time."""
    times: list[float] = []
    while sum(times) < TURN:
        start = perf_counter()
        result = call()
        times.append(perf_counter() - start)
        del result
    return times


def check(grads: Grads, base: Grads) -> None:
    """Per-sample gradients average to the batch gradient: a fast wrong answer is not a time."""
    if grads.keys() != base.keys():
        raise AssertionError(f"gradients of {sorted(grads)}, not of {sorted(base)}")
    total = sum(g.square().sum() for g in base.values())
    off = sum((grads[name].mean(0) - g).square().sum() for name, g in base.items())
    error = float(torch.as_tensor(off / total).sqrt())
    if not error < 1e-3:  # NaN fails too
        raise AssertionError(f"wrong gradients: off by {error:.1e} of the batch gradient")


def describe(error: Exception) -> str:
    """An exception on one short line."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 110 else text[:107] + "..."
