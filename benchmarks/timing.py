"""Times of contenders on one task, interleaved: the minimum of each is what it costs, the rest is noise."""

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import chain
from math import inf
from random import Random
from statistics import median
from time import perf_counter
from typing import TypeVar

import psgrad

from .machine import settle
from .measured import Measured, describe
from .peers import BASE
from .peers.peer import Peer
from .quantities import Truth

TURN = 0.05  # seconds: short calls repeat within a turn; with 0.01 a call of 0.3 ms never gets past cold caches
CALLS = 3  # in a turn at least: the first meets memory as another contender left it, the next as in a training loop
ENOUGH = 3  # turns that even a slow contender gets
Call = Callable[[], object]
K = TypeVar("K", bound=Hashable)


def measure(
    truth: Truth, quantity: str, peers: Iterable[Peer], rounds: int, patience: float, progress: Callable[[str], None]
) -> dict[str, Measured]:
    """Times of each contender; `patience` as in `interleaved`."""
    calls: dict[str, Call] = {}
    found: dict[str, Measured] = {}
    for peer in peers:
        progress(f"warm-up {peer.name}")
        call, found[peer.name] = warm(truth, quantity, peer)
        if call:
            calls[peer.name] = call
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warm-up had them, and psgrad's fallback is said by the mark
        times = interleaved(calls, rounds, patience, progress)
    for name, turns in times.items():
        first, each = found[name], list(chain.from_iterable(turns))
        found[name] = Measured(min(each), median(each) / min(each), len(turns), mark=first.mark, note=first.note)
    return found


def interleaved(
    calls: Mapping[K, Call], rounds: int, patience: float = inf, progress: Callable[[str], None] = lambda _: None
) -> dict[K, list[list[float]]]:
    """The times of each call, turn by turn; one that has taken `patience` seconds, and had `ENOUGH`, gets no more."""
    times: dict[K, list[list[float]]] = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    for i in range(rounds):
        names = [name for name in calls if len(times[name]) < ENOUGH or spent[name] < patience]
        Random(i).shuffle(names)  # nobody always follows the same one
        for name in names:
            progress(f"round {i + 1}/{rounds} {name}")
            settle()
            times[name].append(turn(calls[name]))
            spent[name] += sum(times[name][-1])
    return times


def fastest(calls: Mapping[K, Call], rounds: int, patience: float = inf) -> dict[K, float]:
    """The shortest time of each call."""
    return {name: min(map(min, turns)) for name, turns in interleaved(calls, rounds, patience).items()}


def warm(truth: Truth, quantity: str, peer: Peer) -> tuple[Call | None, Measured]:
    """A contender's call, run once and its answer checked; or why there is none."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ready = peer.offers[quantity](truth.task)
            answer = ready.call()
        if peer.name != BASE:
            truth.check(quantity, ready.read(answer))
    except Exception as error:
        return None, Measured(error=describe(error, peer.package))
    looped = any(issubclass(w.category, psgrad.FallbackWarning) for w in caught)
    return ready.call, Measured(mark="loop" if looped else "*" if ready.note else "", note=ready.note)


def turn(call: Call) -> list[float]:
    """The times of calls in a row, some at least; what a call returns is freed before the next, outside its time."""
    times: list[float] = []
    while len(times) < CALLS or sum(times) < TURN:
        start = perf_counter()
        result = call()
        times.append(perf_counter() - start)
        del result
    return times
