"""How much a call allocates, and the chunk size that keeps it under a bound: from shapes, before running."""

import contextlib
import os
import re
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..engine.batched import run_together
from ..engine.ladder import Group, collect, differentiating, generators_kept
from ..engine.problem import Problem
from ..engine.signals import Signal
from ..engine.validate import check_positive
from ..errors import ArgumentError, PsgradError
from ..factors import warm_memory
from ..torch_.modules import buffers_of, reachable_modules
from ..torch_.storage import identity_of, storage_of
from ..torch_.tracing import FAKE_TENSOR_LOG, FakeTensorMode, TorchDispatchMode, unlogged
from .kernel_scratch import scratch

if TYPE_CHECKING:
    from .stream import Quantity, Run


class Meter(TorchDispatchMode):
    """Follows the storages that come to life under it: bytes alive now, and the most at any time, kernels' own too."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.seen = {storage_of(t) for t in known}
        self.known = known  # keeps their storages, and so their addresses, from being used again
        self.events: list[tuple[int, int]] = []  # what came and went: (number of the storage, bytes); -1: for a moment
        self.numbers: dict[int, int] = {}  # of the storages that are alive
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(t, Tensor):
                self._meet(t)
        extra = scratch(func, args, out)
        if extra:
            self.events.append((-1, extra))
        self.peak = max(self.peak, self.alive + extra)
        return out

    def _meet(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        key = identity_of(storage)
        if key not in self.seen:
            self.seen.add(key)
            self.alive += storage.nbytes()
            self.numbers[key], self.count = self.count, self.count + 1
            self.events.append((self.numbers[key], storage.nbytes()))
            weakref.finalize(storage, self._part, key, storage.nbytes())

    def _part(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.alive -= size
        self.events.append((self.numbers.pop(key), -size))

    def peak_beyond_what_lives(self) -> int:
        """The most bytes at any time, without those of the storages that are alive now: the result."""
        result = set(self.numbers.values())
        alive, peak = 0, 0
        for number, size in self.events:
            if number == -1:
                peak = max(peak, alive + size)
            elif number not in result:
                alive += size
                peak = max(peak, alive)
        return peak


@contextlib.contextmanager
def _models_kept(fn: Any) -> Iterator[None]:
    """Inside, modules may keep what they make, as caches that are filled on first use; afterwards it is gone again."""
    homes = [home for module in reachable_modules([fn]) for home in (vars(module), buffers_of(module))]
    before = [(home, dict(home)) for home in homes]
    try:
        yield
    finally:
        for home, held in before:
            for key in [key for key in home if key not in held]:
                del home[key]
            home.update(held)


@contextlib.contextmanager
def fake(problem: Problem) -> Iterator[Problem]:
    """The same problem on tensors that have shapes and no memory. What `fn` closes over follows suit."""
    no_tracebacks = unlogged(FAKE_TENSOR_LOG)  # a real run comes after
    with no_tracebacks, _models_kept(problem.fn), FakeTensorMode(allow_non_fake_inputs=True) as mode, differentiating():

        def faked(t: Any) -> Any:
            return mode.from_tensor(t, static_shapes=True) if isinstance(t, Tensor) else t

        yield problem._replace(params=[faked(p) for p in problem.params], batch=[faked(t) for t in problem.batch])


def _first(problem: Problem, n: int) -> Problem:
    """The problem with its first n samples, as copies: `fn` may change them. Where it has fewer, the first repeats."""
    rows = min(len(t) for t, b in zip(problem.batch, problem.batched, strict=True) if b)
    if n > rows:
        batch = [_repeated(t, n) if b else t for t, b in zip(problem.batch, problem.batched, strict=True)]
        problem = problem._replace(batch=batch, n=n)
    return problem.rows(slice(0, n)).copied()


def _repeated(t: Tensor, n: int) -> Tensor:
    """The first row of `t` n times, its axes in the same order in memory."""
    order = _order(t)
    shape = (n, *t.shape[1:])
    memory = t.new_empty([shape[d] for d in order]).permute([order.index(d) for d in range(t.dim())])
    return memory.copy_(t[:1].expand(shape))


def _order(t: Tensor) -> list[int]:
    """The axes of `t`, the outermost in memory first."""
    strides = t.stride()
    return sorted(range(t.dim()), key=lambda d: -strides[d])


def _peak(whole: Problem, quantity: "Quantity[Any, Any]", size: int, run: "Run") -> int:
    """Bytes that `quantity` allocates for its first `size` samples beyond its inputs and its result."""
    rows = slice(0, size)
    chunk = whole if size >= whole.n else whole.rows(rows)
    inputs = [t for t in (*whole.params, *whole.batch, *chunk.batch) if isinstance(t, Tensor)]
    quantity = quantity.rehearsal()
    with Meter(inputs) as meter:
        state = quantity.start(whole, size)
        if quantity.looks_first:
            quantity.look(state, chunk, run)
            quantity.decide(state)
        outcome = quantity.add(state, rows, chunk, run)
        peak: int = meter.peak_beyond_what_lives()
    del state, outcome
    return peak


def _at_once(problem: Problem, make: Callable[[Problem], Any]) -> Iterator[Group[Any]]:
    """All samples, or an error."""
    collector = make(problem)
    yield Group(None, collector, run_together(problem, collector))


def peak_bytes(problem: Problem, size: int, samples: int, quantity: "Quantity[Any, Any]", parted: bool = False) -> int:
    """What `quantity` allocates for `size` of `samples` samples at once, beyond its inputs and its result.

    `parted`: also where samples disagree and each group holds results of its own before they are put together. On
    shapes alone where `fn` allows it; where it looks at values, from runs on one and on two samples.
    """
    try:
        with fake(problem) as shapes:
            return _peak(_first(shapes, samples), quantity, size, _at_once)
    except PsgradError:
        raise
    except (Exception, Signal):
        problem = problem._replace(save_memory=True)  # two samples are small: more would be held of each than of many
        with differentiating(), generators_kept(problem):
            run = partial(collect, quiet=True)
            one = _peak(_first(problem, 1 + (samples > size)), quantity, 1, run)
            two = _peak(_first(problem, 2 + (samples > size)), quantity, 2, run) if size > 1 and problem.n > 1 else one
        found: int = one + (size - 1) * max(two - one, 0) + (size * quantity.row_bytes(problem) if parted else 0)
        return found


# ---- a bound as people write it ----------------------------------------------------------------------------

_SIZE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(b|[kmgt]i?b)\s*", re.IGNORECASE)
_POWERS = {letter: power for power, letter in enumerate("bkmgt")}


def bytes_of(max_bytes: int | float | str | None, params: Sequence[Tensor]) -> int | None:
    """`max_bytes` as a number: it may be a size such as "1.5GiB", or a fraction of what the params' devices have free.

    What a fraction gives is rounded down to its five leading bits: free memory changes a little from call to call,
    and each new bound would have to be planned for.
    """
    if isinstance(max_bytes, float) and 0 < max_bytes < 1:
        size = int(max_bytes * min(_free(device, max_bytes) for device in {p.device for p in params}))
        rest = max(0, size.bit_length() - 5)
        return max(1, size >> rest << rest)
    if isinstance(max_bytes, str) and any(map(str.isalpha, max_bytes)):
        found = _SIZE.fullmatch(max_bytes)
        number, unit = found.groups() if found else ("0", "b")
        size = int(Decimal(number) * (1024 if len(unit) == 3 else 1000) ** _POWERS[unit[0].lower()])
        if size < 1:
            raise ArgumentError(
                f"max_bytes={max_bytes!r} is not a positive size\n"
                '  give a number and a unit, such as "500MB" or "1.5GiB", or a positive int.'
            )
        return size
    check_positive("max_bytes", max_bytes)
    assert max_bytes is None or isinstance(max_bytes, int)
    return max_bytes


def _free(device: torch.device, fraction: float) -> int:
    """Bytes that `device` has free, once it has what we keep for results."""
    warm_memory.empty_cache()
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError, StopIteration):
        return _free_for_processes() if device.type == "cpu" else _free_for_tensors(device)
    raise ArgumentError(
        f"max_bytes={fraction!r} is a fraction of the free memory, which is not known for device {device}\n"
        '  give a size, such as "2GB".'
    )


def _free_for_processes() -> int:
    """Bytes that the system can give to processes without swapping, where it says so."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_for_tensors(device: torch.device) -> int:
    """Bytes that a device has free, and those that torch keeps there for its next tensors."""
    memory: Any = torch.get_device_module(device)
    free: int = memory.mem_get_info(device)[0]
    return free + int(memory.memory_reserved(device) - memory.memory_allocated(device))


# ---- the choice of a chunk size ----------------------------------------------------------------------------

ROOM = 1.1  # what a number of samples that was not measured may take beyond what those around it say
MEASURED = 32  # once so many are measured, those close to the bound are not measured, and count as too many
PLANS = 128  # for one fn: shapes of samples, such as lengths of sequences


@dataclass(eq=False)
class Curve:
    """Bytes by the number of samples that run at once, as far as they were measured."""

    peaks: dict[int, int] = field(default_factory=dict)  # is replaced, never changed: threads need no lock


class Bounded(NamedTuple):
    """Which numbers of samples are within a bound; `measure` finds another point of the curve.

    The peak is close to a straight line in the number of samples, with kinks where strategies change: at some of
    them one sample more takes much less. Powers of two are measured, and some numbers close to the bound. A number
    between two of these counts as within the bound if there is room for the peak of the upper one, and for the peak of
    the lower one with as many bytes for each sample more as were found below it. Where there is no room, but a straight
    line from the lower to the upper one is under the bound, the number itself is measured. Which two these are depends
    on the bound, and hardly ever on the calls before.
    """

    curve: Curve
    bound: int
    measure: Callable[[int], int]

    def peak(self, n: int) -> int:
        """The bytes of n samples, measured where they are not known."""
        known = self.curve.peaks
        if n == 0 or n in known:
            return known[n] if n else 0
        size = self.measure(n)
        self.curve.peaks = (known if len(known) < 8 * MEASURED else {}) | {n: size}
        return size

    def holds(self, n: int) -> bool:
        """Whether n samples at once stay within the bound."""
        power = _power_above(n)
        if n in self.curve.peaks or n == power or not self.curve.peaks:
            return self.peak(n) <= self.bound
        if 2 * self.peak(power) <= self.bound:
            return True
        if self.peak(power // 2) > self.bound:
            return False
        if self._surely(n, power // 2, power):
            return True
        low, high = self._nearest(n, power)
        if low == high or self._surely(n, low, high):
            return self.peak(low) <= self.bound
        likely = self._line(low, high, n) <= self.bound and len(self.curve.peaks) < MEASURED
        return likely and self.peak(n) <= self.bound

    def _surely(self, n: int, low: int, high: int) -> bool:
        """Whether n samples are within the bound by what is known of fewer and of more."""
        power = _power_below(low)
        each = max(0, self.peak(power) - self.peak(power // 2)) / (power - power // 2)
        return ROOM * max(self.peak(low) + each * (n - low), self.peak(high)) <= self.bound

    def _line(self, low: int, high: int, n: int) -> float:
        return self.peak(low) + (self.peak(high) - self.peak(low)) / (high - low) * (n - low)

    def _nearest(self, n: int, power: int) -> tuple[int, int]:
        """The nearest numbers up to n and from n on, of a power of two, the one before, and some close to the bound."""
        low, high, known = power // 2, power, [power // 2, power]
        for _ in range(3):
            rise = max(1, self.peak(high) - self.peak(low))
            middle = low + int((self.bound / ROOM - self.peak(low)) / rise * (high - low))
            if bent := middle <= 1.03 * low:  # right behind `low`, unless the curve bends upwards
                middle = (low + high) // 2
            if not low < middle < high:
                break
            known.append(middle)
            if ROOM * self.peak(middle) <= self.bound:
                low = middle
            elif bent:
                break
            else:
                high = middle
        return max(m for m in known if m <= n), min(m for m in known if m >= n)

    def most(self, n: int) -> int:
        """The size of chunks of n samples: the fewest, but two at least, and even; 0 if one sample is too many."""
        size = self._start(-(-n // 2)) if n > 1 else 0
        while size:
            size = _even(n, size)
            if self.holds(size) and self.holds(n - (n - 1) // size * size):  # the last one has what is left
                break
            size -= 1
        return size

    def _start(self, n: int) -> int:
        """Where to begin to look downwards for sizes within the bound: n, or the end of the powers of two below it."""
        power = _power_above(n)
        while power > 1 and self.peak(power) > self.bound:  # as many as there can be if all take as much
            power = min(power // 2, _power_below(int(power * self.bound / self.peak(power))) or 1)
        while power < n and self.peak(power) <= self.bound and self.peak(2 * power) <= self.bound:
            power *= 2
        return min(n, 2 * power - 1)


def _power_above(n: int) -> int:
    """The power of two that is n or the next above."""
    return 1 << max(0, n - 1).bit_length()


def _power_below(n: int) -> int:
    """The power of two that is n or the next below; 0 for 0."""
    return 1 << n.bit_length() - 1 if n else 0


def _even(n: int, most: int) -> int:
    """The size of the chunks of n samples when there are as few as with `most` in each, and all about the same."""
    return -(-n // -(-n // most))


class Plan:
    """What is known of one kind of call: peaks of a run of all samples, and of a chunk with sums of its own."""

    def __init__(self, has_sums: bool) -> None:
        self.whole = Curve()
        self.chunk = Curve() if has_sums else self.whole


_PLANS: "weakref.WeakKeyDictionary[Any, OrderedDict[Hashable, Plan]]" = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


class TooLittle(NamedTuple):
    """Not even one sample fits the bound."""

    bound: int
    least: int  # bytes that would do
    need: str  # in words

    def error(self) -> ArgumentError:
        return ArgumentError(
            f"max_bytes={self.bound:,} is too little: {self.need} {self.least:,}\n"
            f"  give at least max_bytes={self.least}, or make the sample smaller."
        )


def chunk_size(problem: Problem, max_bytes: int, quantity: "Quantity[Any, Any]") -> int | TooLittle:
    """The most samples, or nearly, that can run at once within `max_bytes`; as even chunks as there can be.

    Planned once for samples of a shape: after a few calls another number of samples costs a look-up.
    """

    plan = _plan_of(problem, quantity)
    whole = Bounded(plan.whole, max_bytes, lambda size: peak_bytes(problem, size, size, quantity, True))
    chunk = Bounded(plan.chunk, max_bytes, lambda size: peak_bytes(problem, size, size + 1, quantity, True))
    return chosen(problem.n, whole, chunk)


def chosen(n: int, whole: Bounded, chunk: Bounded) -> int | TooLittle:
    """How many of n samples run at once: all, or the size of chunks."""
    if whole.holds(n):
        return n
    if size := chunk.most(n):
        return size
    found = {size: peak for size, peak in chunk.curve.peaks.items() if size < n}  # of one sample, and maybe of others
    if fit := [size for size, peak in found.items() if peak <= chunk.bound]:  # some samples may take less than one
        return max(fit)
    if n == 1 or (whole.curve is not chunk.curve and whole.peak(_power_below(n)) < found[1]):
        found[n] = whole.peak(n)  # all at once, where chunks have sums of their own
    size = min(found, key=found.__getitem__)
    words = {n: f"all {n} samples at once need less than chunks of them, but still", 1: "one sample at a time needs"}
    need = words.get(size, f"{size} samples at a time need less than one, but still")
    return TooLittle(whole.bound, found[size], need)


def _plan_of(problem: Problem, quantity: "Quantity[Any, Any]") -> Plan:
    """The plan for problems that differ in the number of samples alone; a new one where `fn` takes no weak reference.

    A plan is a choice of memory, never of the answer: safe to remember.
    """
    fn: Any = problem.fn
    signature = _signature(problem)
    try:
        owner, method = fn, None
        if isinstance(fn, types.MethodType):  # is made anew whenever it is looked up
            owner, method = fn.__self__, weakref.ref(fn.__func__)
        key = method, quantity.name, signature
        with _LOCK:
            plans = _PLANS.setdefault(owner, OrderedDict())
            plan = plans.get(key) or Plan(quantity.has_sums)
            plans[key] = plan
            plans.move_to_end(key)
            if len(plans) > PLANS:
                plans.popitem(last=False)
        return plan
    except TypeError:
        return Plan(quantity.has_sums)


def _signature(problem: Problem) -> tuple[Hashable, ...]:
    """All but the number of samples that may change what a run allocates."""
    params = tuple([(p.shape, p.stride(), p.dtype, p.device) for p in problem.params])
    batch = tuple([_leaf(t, b) for t, b in zip(problem.batch, problem.batched, strict=True)])
    options = problem.randomness, problem.has_aux, problem.save_memory
    training = tuple([module.training for module in reachable_modules([problem.fn])])
    # and torch's settings on which dtypes and kernels depend
    kinds = sorted({"cpu"} | {p.device.type for p in problem.params})
    can_cast, does_cast = torch.amp.autocast_mode.is_autocast_available, torch.is_autocast_enabled
    casts = tuple([(kind, torch.get_autocast_dtype(kind)) for kind in kinds if can_cast(kind) and does_cast(kind)])
    settings = casts, torch.get_default_dtype(), torch.get_num_threads(), torch.backends.mkldnn.enabled
    return problem.params_spec, params, problem.batch_spec, batch, options, settings, training


def _leaf(t: Any, batched: bool) -> Hashable:
    """What a leaf of the batch has to do with memory, whatever the number of samples; an int may be a size."""
    if not isinstance(t, Tensor):
        return type(t), t if isinstance(t, (int, str)) else t != 0 if isinstance(t, float) else None
    if not batched:
        return t.shape, t.stride(), t.dtype, t.device
    order = None if t.is_contiguous() else tuple(d for d in _order(t) if t.shape[d] > 1)  # strides may depend on N
    return "sample", t.shape[1:], order, t.dtype, t.device
