"""Memory for results: lent, and lent again once nobody holds it.

malloc gives much of what is freed back to the system, and a result that is as large as the batch times the parameters
then begins in pages that have never been touched: the page faults cost more than the arithmetic. So large results are
blocks of ours, each a mapping of its own, that are kept when they come back. Most loops drop a result before they have
the next one: it is written to memory that is there.

How a block comes back. A tensor is made by `torch.frombuffer` from a memoryview that nobody else has. torch holds the
memoryview as long as the tensor's storage lives, which is as long as a view, an array, a graph or a storage needs it.
When the storage dies the memoryview does, and a weak reference tells us. No references are counted, no tensor is asked.

Why a block is never lent to two. It is lent, or it is in `kept`. It gets into `kept` only by the death of its
memoryview, which a weak reference reports once. It leaves by `list.pop`, which gives it to one taker. Both are atomic:
neither another thread nor a garbage collection in the middle of a line gets in between, and there is no lock to wait
for. What else is counted (bytes, calls) decides how much is kept, never who has it.

A thread has blocks of its own, which end with it. Mappings are private, so a forked process has copies.

A system that is short of memory takes the pages of kept blocks away, and the next loan has fresh ones
(`huge_pages.offer`). That is for what is kept beyond `OURS`: to offer a block of 2 to 4 MB takes 0.2 to 0.3 ms. Every
core forgets where the pages of all else are, and the next writer marks those of the block anew, one by one.
"""

import mmap
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..torch_ import graphs
from . import huge_pages, philox

MOST = 2 << 30  # bytes that a thread keeps at most
RECENT = 8  # calls: what none of so many has used is given back
LEAST = 1 << 20  # bytes of a block: a loan takes 4 us more than malloc, which keeps smaller ones by itself
OURS = 64 << 20  # bytes that a thread keeps and the system is not offered, as many as malloc keeps
_SLACK = 1.25  # how much larger than asked a block may be: batches differ a little in size


class _Loan(weakref.ref[memoryview]):
    """A weak reference to the memoryview of a lent block; when that dies, the block comes back."""

    __slots__ = ("block", "call", "home")
    block: mmap.mmap
    call: int  # for which it was lent
    home: "weakref.ref[Pool]"


class Pool:
    """The blocks of one thread."""

    def __init__(self) -> None:
        self.kept: dict[int, list[mmap.mmap]] = {}  # by size
        self.loans: dict[int, _Loan] = {}  # that have not ended, by id: a weak reference has to live to tell
        self.call = 0  # how many calls of ours have begun
        self.used: dict[int, int] = {}  # for which call a block of a size was lent last
        self.lent = 0  # bytes that were lent for this call and have not come back
        self.peaks = deque([0], RECENT + 1)  # the most bytes lent at once, for this call and each of the last
        self.bytes = 0  # kept
        self.bound = 0  # on those
        self.bounded_calls = 0  # how many calls are going on that have a bound of their own
        self.home = weakref.ref(self)

    def give_back(self) -> None:
        """A call of ours begins: what none of the last ones used is given back."""
        self.peaks.append(0)
        self._set_bound()
        for size in list(self.used):
            if self.call - self.used[size] > RECENT:
                self.used.pop(size, None)
                self.kept.pop(size, None)
        self.bytes = sum([size * len(self.kept.get(size, ())) for size in list(self.kept)])
        for size in sorted(self.kept, key=lambda size: self.used.get(size, 0)):
            while self.bytes > self.bound and self._claim(size) is not None:
                pass

    def _set_bound(self) -> None:
        """Twice what one of the last calls had at once may be kept: calls of two kinds may take turns."""
        self.bound = min(MOST, 2 * max(self.peaks))

    def lend(self, nbytes: int) -> memoryview | None:
        """Memory for a tensor, which comes back when the memoryview dies; None: the system has none."""
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        block = self._claim(size) or self._claim_larger(size) or huge_pages.mapped(size)
        if block is None:
            return None
        view = memoryview(block)[:nbytes]
        loan, size = _Loan(view, _end), len(block)
        loan.block, loan.call, loan.home = block, self.call, self.home
        self.loans[id(loan)] = loan
        self.used[size] = self.call
        self.lent += size
        if self.lent > self.peaks[-1]:
            self.peaks[-1] = self.lent
            self._set_bound()
        return view

    def _claim(self, size: int) -> mmap.mmap | None:
        """A kept block of this size: from now on the caller's."""
        try:
            block = self.kept[size].pop()
        except (KeyError, IndexError):
            return None
        self.bytes -= size
        return block

    def _claim_larger(self, size: int) -> mmap.mmap | None:
        """The smallest kept block that is larger, but not too large."""
        for other in sorted(self.kept):
            if size < other <= _SLACK * size and (block := self._claim(other)) is not None:
                return block
        return None

    def take_back(self, loan: _Loan) -> None:
        """Keep the block of a loan that has ended, unless that would be too much."""
        self.loans.pop(id(loan), None)
        size = len(loan.block)
        if loan.call == self.call:
            self.lent -= size
        if self.bytes + size <= self.bound and self.call - loan.call <= RECENT and not self.bounded_calls:
            self.bytes += size
            if self.bytes > OURS:
                huge_pages.offer(loan.block)
            self.kept.setdefault(size, []).append(loan.block)

    def clear(self) -> None:
        """Give everything back that nobody holds."""
        self.kept.clear()
        self.bytes = 0


def _end(loan: Any) -> None:
    """The memory of a loan is nobody's any more. This may run in any thread, and while garbage is collected."""
    pool = loan.home()
    if pool is not None:  # else its thread has ended, and the block ends with the loan
        pool.take_back(loan)


_POOLS: "dict[int, weakref.ref[Pool]]" = {}  # of all threads


class _Own(threading.local):
    """The pool of the thread that asks."""

    def __init__(self) -> None:
        pool = self.pool = Pool()
        key = id(pool)
        _POOLS[key] = weakref.ref(pool, lambda _: _POOLS.pop(key, None))


_OWN = _Own()


def begin(bounded: bool) -> None:
    """A call of ours begins. One that is `bounded`, by max_bytes, is given fresh memory, and none is kept: it has to
    say when it ends, by `end`."""
    pool = _OWN.pool
    if bounded:
        pool.bounded_calls += 1
        pool.clear()
        return
    pool.call += 1
    pool.lent = 0
    if pool.bound or pool.kept:  # not for small calls, which are lent nothing
        pool.give_back()


def end() -> None:
    """A bounded call has ended."""
    _OWN.pool.bounded_calls -= 1


def keeps() -> bool:
    """Whether memory may be kept for the next call."""
    return not _OWN.pool.bounded_calls


def is_lent(shape: Sequence[int], like: Tensor) -> bool:
    """Whether `empty` lends memory for this."""
    if prod(shape) * like.element_size() < LEAST or _OWN.pool.bounded_calls:
        return False
    return huge_pages.can_map(like) and _torch_holds_memory()


@cache
def _torch_holds_memory() -> bool:
    """Whether this torch does what all of this rests on: a memoryview lives just as long as a storage made from it."""
    view = memoryview(bytearray(64))
    told = weakref.ref(view)
    t = torch.frombuffer(view, dtype=torch.uint8)
    del view
    array = t[1:].numpy()
    del t
    held = told() is not None
    del array
    return held and told() is None


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """`like.new_empty(shape)` for a result, in memory that was used before where it is large."""
    if not is_lent(shape, like):
        return huge_pages.empty(shape, like)
    view = _OWN.pool.lend(prod(shape) * like.element_size())
    return like.new_empty(shape) if view is None else huge_pages.tensor_on(view, shape, like)


def empty_strided(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`torch.empty_strided` on the CPU for compiled code, in memory that was used before where it is large."""
    numbers = prod(shape)
    if numbers * dtype.itemsize < LEAST or numbers != 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)):
        return graphs.empty_strided(shape, strides, dtype)
    return graphs.reinterpreted(empty((numbers,), _like(dtype)), shape, strides)


class Returned(threading.local):
    """The memory of what one piece of compiled code writes: what it returns is in blocks of ours.

    What comes and goes inside a call is malloc's, which gives one block to tensors of many sizes. Kept, they would all
    be held from call to call, a third as much again as the batch gradient takes. Compiled code asks for the same
    tensors in the same order whenever it runs, so its first run tells which are returned. Were that wrong, memory would
    be the slower, and no number another.
    """

    def __init__(self) -> None:
        self.asked = 0  # in this run, of large tensors
        self.returned: set[int] | None = None  # which of these are; None: nobody knows yet
        self.places: dict[int, int] = {}  # whose each address was last

    def empty_strided(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As that of torch."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes < LEAST:
            return graphs.empty_strided(shape, strides, dtype)
        self.asked += 1
        if nbytes >= huge_pages.LARGE or (self.returned is not None and self.asked in self.returned):
            return empty_strided(shape, strides, dtype)
        t = graphs.empty_strided(shape, strides, dtype)
        if self.returned is None:
            self.places[t.data_ptr()] = self.asked
        return t

    def run(self, runner: graphs.Runner, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results of code that asks here for its memory."""
        begin(bounded=False)
        self.asked = 0
        self.places.clear()
        found = runner(*tensors)
        if self.returned is None:
            self.returned = {self.places.get(t.untyped_storage().data_ptr(), 0) for t in found}
        return found


@cache
def _like(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, dtype=dtype)


_SHOWN = (32 << 20) - (64 << 10)  # bytes of the largest block from which malloc learns, nearly


def keep_freed_memory() -> None:
    """Have malloc keep up to 64 MB of what anybody in this process frees. psgrad never does this unasked.

    >>> psgrad.keep_freed_memory()

    Activations come from malloc. glibc gives the end of its heap back to the system when more of that is free than
    twice the largest block that it has freed before, of which 32 MB are the most that counts; the next call then
    begins with page faults. This frees one such block, to which nothing is written. It holds for the
    whole process until it ends. Where `MALLOC_TRIM_THRESHOLD_` or its like is set, and in other mallocs, it changes
    nothing.
    """
    bytes(_SHOWN)


def empty_cache() -> None:
    """Give the memory that psgrad keeps for its next results back to the system.

    >>> psgrad.empty_cache()

    On a CPU, memory of large results is kept once the caller has let go of them, so that the next call writes to pages
    that are there. At most twice what one of the last eight calls took is kept, never more than 2 GiB for a thread, and
    what eight calls did not use is given back without being asked. Calls with `max_bytes` keep nothing. Memory that
    somebody holds, be it by a view or by a NumPy array, is never touched. On other devices torch itself keeps memory.
    The random bits that `projected_grads` keeps on any device, 64 MB at most, are given back as well.
    """
    for known in list(_POOLS.values()):
        pool = known()
        if pool is not None:
            pool.clear()
    philox.forget()
