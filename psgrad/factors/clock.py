"""Choices by the clock: while a graph is recorded that will run many times, a few milliseconds are well spent.

How much faster one kernel is than another differs between machines. So the ways to a large result on the CPU are
measured, once each, in place of being estimated.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from time import perf_counter

import torch
from torch import Tensor

from . import assumptions

_TURNS = 4  # that each way gets; the first warms up


class _Thread(threading.local):
    measures = False  # whether the clock decides
    in_cpp = False  # whether kernels of ours in C++ take part


here = _Thread()
_fastest: dict[Hashable, str] = {}  # the ways that were measured, by all that their time depends on


@contextmanager
def measured(in_cpp: bool) -> Iterator[None]:
    """Inside, the clock decides. `in_cpp`: kernels of ours in C++ take part."""
    before = here.measures, here.in_cpp
    here.measures, here.in_cpp = True, in_cpp
    try:
        yield
    finally:
        here.measures, here.in_cpp = before


def can_tell(x: Tensor, g: Tensor) -> bool:
    """Whether there is anything to be measured of a product of these."""
    return type(x) is Tensor and x.is_cpu and x.numel() > 0 and g.numel() > 0


def fastest(question: Hashable, x: Tensor, g: Tensor, ways: Sequence[str], run: Callable[[str], object]) -> str:
    """The way by which `run` answers a question about x and g in the least time."""
    if len(ways) == 1:
        return ways[0]
    layout = [(tuple(t.shape), t.stride(), t.dtype) for t in (x, g)]
    key = question, *layout, torch.get_num_threads(), tuple(ways)
    if key not in _fastest:
        seconds = dict.fromkeys(ways, inf)
        with assumptions.apart(), torch.no_grad():
            for turn in range(_TURNS):
                for way in ways:
                    started = perf_counter()
                    run(way)
                    if turn:
                        seconds[way] = min(seconds[way], perf_counter() - started)
        _fastest[key] = min(ways, key=seconds.__getitem__)
    return _fastest[key]
