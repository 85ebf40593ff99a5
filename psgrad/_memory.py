"""How much a call allocates, and the chunk size that keeps it under a bound: from shapes, before running."""

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import _engine
from ._errors import ArgumentError, PsgradError
from ._intercept import Diverged
from ._op_loop import Unlooped
from ._problem import Problem
from ._scratch import scratch

Run = Callable[[Problem, Callable[[Problem], Any], Callable[[Any], None]], None]  # `_engine.run`, or a stand-in

_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")


class Meter(TorchDispatchMode):
    """Follows the storages that come to life under it: bytes alive now, and the most at any time, kernels' own too."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.seen = {t.untyped_storage()._cdata for t in known}
        self.known = known  # keeps their storages, and so their addresses, from being used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(t, Tensor):
                self._meet(t)
        self.peak = max(self.peak, self.alive + scratch(func, args, out))
        return out

    def _meet(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        key = storage._cdata
        if key not in self.seen:
            self.seen.add(key)
            self.alive += storage.nbytes()
            weakref.finalize(storage, self._part, key, storage.nbytes())

    def _part(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.alive -= size


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Inside, torch does not log the tracebacks of this thread's fake tensors: a real run comes after them."""
    thread = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.thread != thread

    _FAKE_LOG.addFilter(passes)
    try:
        yield
    finally:
        _FAKE_LOG.removeFilter(passes)


@contextlib.contextmanager
def fake(problem: Problem) -> Iterator[Problem]:
    """The same problem on tensors that have shapes and no memory. What `fn` closes over follows suit."""
    with _unlogged(), FakeTensorMode(allow_non_fake_inputs=True) as mode, _engine.differentiating():

        def faked(t: Any) -> Any:
            return mode.from_tensor(t, static_shapes=True) if isinstance(t, Tensor) else t

        yield replace(problem, params=[faked(p) for p in problem.params], batch=[faked(t) for t in problem.batch])


def _first(problem: Problem, n: int) -> Problem:
    """The problem with its first n samples, as copies: `fn` may change them."""
    return problem.rows(slice(0, n)).copied()


class Work(NamedTuple):
    """What a public function does with the samples that it runs at once."""

    name: str
    do: Callable[[Problem, Run], object]
    result: int = 0  # bytes per sample that stay, and do not count
    sums: int = 0  # bytes of the sums over samples that are the result
    in_place: bool = False  # chunks add to one result, which `do` makes first; otherwise each has sums of its own


def _peak(problem: Problem, work: Work, run: Run) -> int:
    """Bytes that `work` allocates beyond its inputs and its result."""
    inputs = [t for t in (*problem.params, *problem.batch) if isinstance(t, Tensor)]
    with Meter(inputs) as meter:
        kept = work.do(problem, run)
    del kept
    return max(0, int(meter.peak) - problem.n * work.result)


def _at_once(problem: Problem, sink: Callable[[Problem], Any], take: Callable[[Any], None]) -> None:
    """All samples, or an error."""
    found = sink(problem)
    take(_engine.Part(None, found, _engine.vmapped(problem, found)))


def peak_bytes(problem: Problem, n: int, work: Work, parted: bool = False) -> int:
    """What `work` on n samples allocates beyond its inputs and its result.

    `parted`: also where samples disagree and each part holds results of its own before they are put
    together. On shapes alone where `fn` allows it; where it looks at values, from runs on one and on two samples.
    """
    whole = work.sums if work.in_place or n == problem.n else 0
    try:
        with fake(problem) as shapes:
            return max(0, _peak(_first(shapes, n), work, _at_once) - whole)
    except PsgradError:
        raise
    except (Exception, Diverged, Unlooped):
        problem = replace(problem, frugal=True)  # two samples are small, and so more would be held of each than of many
        with _engine.differentiating(), _engine.generators_kept(problem):
            run = partial(_engine.run, quiet=True)
            one = _peak(_first(problem, 1), work, run)
            two = _peak(_first(problem, 2), work, run) if n > 1 and problem.n > 1 else one
        return max(0, one + (n - 1) * max(two - one, 0) - whole) + n * (work.result if parted else 0)


_PEAKS: "weakref.WeakKeyDictionary[Any, dict[Any, dict[int, int]]]" = weakref.WeakKeyDictionary()


def chunk_size(problem: Problem, max_bytes: int, work: Work) -> int:
    """The most samples, or nearly, that can run at once within `max_bytes`; as even chunks as there can be."""
    tensors = [t for t in (*problem.params, *problem.batch) if isinstance(t, Tensor)]
    shapes = tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)
    key = (work.name, shapes, tuple(problem.batched), problem.randomness, problem.has_aux)
    try:
        known = _PEAKS.setdefault(problem.fn, {})  # a choice of memory, never of the answer: safe to remember
    except TypeError:  # a callable that takes no weak reference
        known = {}
    return _most(problem, max_bytes, work, known.setdefault(key, {}))


def _most(problem: Problem, max_bytes: int, work: Work, peaks: dict[int, int]) -> int:
    """The most samples within the bound, or nearly; `peaks` are those found so far, by the number of samples."""

    def peak(n: int) -> int:
        if n not in peaks:
            peaks[n] = peak_bytes(problem, n, work, True)
        return peaks[n]

    if peak(problem.n) <= max_bytes:
        return problem.n
    likely = _even(problem.n, max(1, problem.n * max_bytes // peak(problem.n)))  # each sample takes about as much
    if peak(likely) > max_bytes and peak(1) > max_bytes and min(peaks.values()) > max_bytes:
        n = min(peaks, key=peaks.__getitem__)  # all at once, where chunks have sums of their own
        need = "one sample at a time needs" if n == 1 else f"{n} samples at a time need"
        error = ArgumentError(
            f"max_bytes={max_bytes:,} is too little: {need} {peaks[n]:,}\n"
            f"  give at least max_bytes={peaks[n]}, or make the sample smaller."
        )
        error.least = peaks[n]
        raise error
    for _ in range(6):  # secant steps: the peak is close to a straight line in n
        low = max(n for n, size in peaks.items() if size <= max_bytes)
        high = min(n for n, size in peaks.items() if size > max_bytes and n > low)
        share = (max_bytes - peaks[low]) / max(peaks[high] - peaks[low], 1)
        middle = _even(problem.n, min(low + int(share * (high - low)), high - 1))
        if middle <= low:  # no fewer chunks to be had
            break
        peak(middle)
    return max(n for n, size in peaks.items() if size <= max_bytes)


def _even(n: int, most: int) -> int:
    """The size of the chunks of n samples when there are as few as with `most` in each, and all about the same."""
    return -(-n // -(-n // most))
