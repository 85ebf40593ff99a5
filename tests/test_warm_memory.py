"""Memory of results is used again: only when nobody can read it any more, not much of it, and with the same answers."""

import copy
import gc
import io
import mmap
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor, nn
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

import psgrad
from psgrad.factors import huge_pages, warm_memory
from psgrad.torch_.storage import is_view
from psgrad.torch_.tracing import FakeTensorMode

from .cases import CASES, Case
from .test_contract import assert_close, grads_of
from .test_contract import pytestmark as of_contract

supported = pytest.mark.skipif(not huge_pages._HUGE_PAGES, reason="the system has no such memory")
pytestmark = [supported, *of_contract]
LARGE = 1 << 20  # bytes: from here on results are lent


@pytest.fixture(autouse=True)
def own_pool() -> Iterator[None]:
    """Each test begins and ends with nothing kept."""
    warm_memory._OWN.pool.__init__()  # type: ignore[misc]
    yield
    warm_memory._OWN.pool.__init__()  # type: ignore[misc]


def pool() -> warm_memory.Pool:
    return warm_memory._OWN.pool


def kept() -> int:
    """Bytes that this thread's pool keeps, counted one by one."""
    return sum(size * len(blocks) for size, blocks in pool().kept.items())


def lent(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return warm_memory.empty(shape, torch.empty(0, dtype=dtype))


def linear_problem(n: int = 16, width: int = 128) -> tuple[Any, Any, Any]:
    """A linear layer whose gradients are 16 x 128 x 128 float32: 1 MB."""
    torch.manual_seed(0)
    fn = lambda w, x: torch.tanh(F.linear(x, w)).sum()
    return fn, torch.randn(width, width) / width, torch.randn(n, 3, width)


SIZE = 16 * 128 * 128 * 4


def test_what_comes_back_within_a_call_counts_once() -> None:
    """In a late call, too: blocks of it are as recent as can be."""
    own = pool()
    for _ in range(3 * warm_memory.RECENT):
        warm_memory.begin(bounded=False)
    for _ in range(3):
        block = lent(SIZE // 4)
        del block
    assert own.lent == 0
    assert own.peaks[-1] == kept() == SIZE


@pytest.mark.parametrize("strides", [(1024, 1), (1, 512), (2048, 1), (0, 1)])
def test_memory_for_compiled_code_holds_its_strides(strides: tuple[int, int]) -> None:
    """It is lent where numbers lie side by side; a tensor with gaps needs more, and one that repeats needs less."""
    t = warm_memory.empty_strided((512, 1024), strides, torch.float32)
    assert t.stride() == strides
    assert t.untyped_storage().nbytes() >= 4 * (1 + 511 * strides[0] + 1023 * strides[1])
    assert pool().lent == (t.nbytes if strides in ((1024, 1), (1, 512)) else 0)
    assert warm_memory.empty_strided((4, 4), (4, 1), torch.float32).shape == (4, 4)
    assert len(pool().loans) == (pool().lent > 0)


# ---- nobody's memory is lent ---------------------------------------------------------------------------------------


class Saved(torch.autograd.Function):
    """Saves its input, and gives it back as a gradient."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, t: Tensor) -> Tensor:
        ctx.save_for_backward(t)
        return w.sum()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (t,) = ctx.saved_tensors
        return t.double().mean().expand(1) * g, None


class Cycle:
    """Something that only a garbage collection ends."""

    def __init__(self, held: Any) -> None:
        self.held, self.itself = held, self


def graph_of(t: Tensor) -> Tensor:
    return Saved.apply(torch.ones(1, dtype=torch.float64, requires_grad=True), t)


def parameter_of(t: Tensor) -> nn.Parameter:
    return nn.Parameter(t)


def alias_of(t: Tensor) -> Tensor:
    return t.new_empty(0).set_(t.untyped_storage(), 0, t.shape)


# what a holder makes of a tensor, and how the numbers are read off that
HOLDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "itself": (lambda t: t, lambda t: t),
    "slice": (lambda t: t[1:, ::2], lambda t: t),
    "last number": (lambda t: t[-1, -1], lambda t: t),
    "transposed": (lambda t: t.mT, lambda t: t),
    "detached": (lambda t: t.detach(), lambda t: t),
    "data": (lambda t: t.data, lambda t: t),
    "alias": (alias_of, lambda t: t),
    "parameter": (parameter_of, lambda t: t.detach()),
    "bytes": (lambda t: t.view(torch.int8), lambda t: t.view(torch.float32)),
    "array": (lambda t: t.numpy(), torch.from_numpy),
    "array of a slice": (lambda t: t[1:].numpy()[:, 1:], torch.from_numpy),
    "buffer of an array": (
        lambda t: memoryview(t.numpy()),
        lambda m: torch.frombuffer(m.cast("B"), dtype=torch.float32),
    ),
    "from a capsule": (torch.from_dlpack, lambda t: t),
    "storage": (lambda t: t.untyped_storage(), lambda s: torch.empty(0).set_(s)),
    "graph": (
        graph_of,
        lambda y: torch.autograd.grad(y, y.grad_fn.next_functions[0][0].variable, retain_graph=True)[0],
    ),
    "cycle": (Cycle, lambda c: c.held),
    "nested": (lambda t: {"a": [(t.view(-1),)]}, lambda d: d["a"][0][0]),
    "closure": (lambda t: lambda: t, lambda f: f()),
}


class Lending(RuleBasedStateMachine):
    """Tensors are lent, held in every way, let go in any order, here and in other threads; none ever changes."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: list[tuple[float, Any, Callable[[Any], Tensor]]] = []
        self.count = 0
        self.blocks: set[int] = set()
        self.again = 0

    @initialize()
    def begin(self) -> None:
        pool().__init__()  # type: ignore[misc]
        warm_memory.begin(bounded=False)

    def take(self, rows: int, how: list[str]) -> None:
        t = lent(rows, 64)
        self.again += t.data_ptr() in self.blocks
        self.blocks.add(t.data_ptr())
        self.count += 1
        t.fill_(self.count)  # a holder of the same memory would see it
        for name in how:
            make, read = HOLDERS[name]
            self.holders.append((float(self.count), make(t), read))

    @rule(rows=st.integers(16, 80), how=st.lists(st.sampled_from(sorted(HOLDERS)), max_size=3))
    def lend(self, rows: int, how: list[str]) -> None:
        self.take(rows, how)

    @rule(rows=st.integers(16, 80), how=st.lists(st.sampled_from(sorted(HOLDERS)), max_size=2))
    def lend_elsewhere(self, rows: int, how: list[str]) -> None:
        """By a thread that ends: what it made lives on."""
        thread = threading.Thread(target=self.take, args=(rows, how))
        thread.start()
        thread.join()

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        if self.holders:
            del self.holders[data.draw(st.integers(0, len(self.holders) - 1))]

    @rule(data=st.data())
    def let_go_elsewhere(self, data: st.DataObject) -> None:
        if self.holders:
            taken = [self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))]
            thread = threading.Thread(target=taken.clear)
            thread.start()
            thread.join()

    @rule(how=st.lists(st.sampled_from(["slice", "alias", "storage", "parameter"]), max_size=2))
    def share(self, how: list[str]) -> None:
        """Moved to memory that other processes may have; that of ours is free again.

        Not with an array beside it: torch takes the memory of any tensor away from under its arrays then.
        """
        self.take(32, ["itself", *how])
        self.holders[-1 - len(how)][1].share_memory_()

    @rule()
    def collect(self) -> None:
        gc.collect()

    @rule()
    def call(self) -> None:
        warm_memory.begin(bounded=False)

    @rule()
    def bounded_call(self) -> None:
        warm_memory.begin(bounded=True)
        self.take(32, ["itself"])
        warm_memory.end()
        assert kept() == 0

    @rule()
    def empty(self) -> None:
        psgrad.empty_cache()
        assert kept() == 0

    @invariant()
    def nothing_changes(self) -> None:
        for number, held, read in self.holders:
            values = read(held)
            assert values.numel() > 0
            assert bool((values == number).all())

    @invariant()
    def no_more_is_kept_than_said(self) -> None:
        assert kept() <= pool().bound

    @invariant()
    def kept_blocks_are_nobodys(self) -> None:
        """By addresses, whatever holders and loans say."""
        starts = {torch.frombuffer(b, dtype=torch.uint8).data_ptr() for own in pool().kept.values() for b in own}
        held = {t.untyped_storage().data_ptr() for _, t, _ in self.holders if isinstance(t, Tensor)}
        assert not starts & held


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_memory, "LEAST", 1)


MACHINE = settings(max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.usefixtures("small_blocks")
def test_what_somebody_holds_never_changes() -> None:
    run_state_machine_as_test(Lending, settings=MACHINE)  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("how", HOLDERS)
def test_each_way_of_holding_keeps_the_memory_and_no_longer(how: str) -> None:
    warm_memory.begin(bounded=False)
    make, read = HOLDERS[how]
    t = lent(32, 64).fill_(7)
    place = t.data_ptr()
    held = make(t)
    del t
    gc.collect()
    others = [lent(32, 64).fill_(8) for _ in range(3)]
    assert place not in {t.data_ptr() for t in others}
    assert bool((read(held) == 7).all())
    del held
    gc.collect()
    assert lent(32, 64).data_ptr() == place


@pytest.mark.usefixtures("small_blocks")
def test_many_threads_at_once() -> None:
    """Each writes, waits for the others to write, and reads; what it drops, another may drop last."""
    failed, passed_on = list[Any](), list[Tensor]()

    def work(seed: int) -> None:
        try:
            for i in range(200):
                t = lent(16 + (seed + i) % 8, 64).fill_(1000 * seed + i)
                array = t[1:].numpy()
                passed_on.append(t)
                if i % 3 == 0 and passed_on:
                    passed_on.pop(0)
                if i % 20 == 0:
                    psgrad.empty_cache()
                    gc.collect()
                if i % 7 == 0:
                    warm_memory.begin(bounded=False)
                del t
                other = lent(16 + (seed + i) % 8, 64).fill_(-1)
                if not (array == 1000 * seed + i).all():
                    failed.append((seed, i))
                del other, array
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not failed


def test_a_collection_in_the_middle_of_a_loan_does_no_harm(small_blocks: None) -> None:
    """Garbage that is found while a block is being lent comes back, and is lent next."""
    warm_memory.begin(bounded=False)
    before = gc.get_threshold()
    gc.set_threshold(1)
    held: list[tuple[int, Tensor]] = []
    try:
        for i in range(300):
            Cycle(lent(16 + i % 5, 64).fill_(-1))
            held.append((i, lent(16 + i % 5, 64).fill_(i)))
            del held[: len(held) // 10]
            assert all(bool((t == number).all()) for number, t in held)
    finally:
        gc.set_threshold(*before)


def test_a_forked_process_has_memory_of_its_own(small_blocks: None) -> None:
    warm_memory.begin(bounded=False)
    held, dropped = lent(32, 64).fill_(1), lent(32, 64)
    place = dropped.data_ptr()
    del dropped
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            own = lent(32, 64).fill_(5)
            held.fill_(6)
            os.write(writing, b"y" if own.data_ptr() == place and bool((own == 5).all()) else b"n")
        finally:
            os._exit(0)
    mine = lent(32, 64).fill_(3)
    os.waitpid(child, 0)
    assert os.read(reading, 1) == b"y"
    os.close(reading)
    os.close(writing)
    assert bool((held == 1).all())
    assert bool((mine == 3).all())


def test_a_torch_that_would_not_hold_the_memory_is_not_lent_any(monkeypatch: pytest.MonkeyPatch) -> None:
    frombuffer = torch.frombuffer
    monkeypatch.setattr(torch, "frombuffer", lambda m, dtype: frombuffer(bytearray(m), dtype=dtype))
    assert not warm_memory._torch_holds_memory.__wrapped__()
    monkeypatch.undo()
    assert warm_memory._torch_holds_memory.__wrapped__()


# ---- results are ordinary tensors ----------------------------------------------------------------------------------


def result() -> Tensor:
    return psgrad.per_sample_grads(*linear_problem())  # type: ignore[no-any-return]


def test_results_are_in_the_place_of_those_before() -> None:
    first = result()
    place, value = first.data_ptr(), first.clone()
    del first
    again = result()
    assert again.data_ptr() == place
    assert_close(again, value)
    other = result()
    assert other.data_ptr() != place
    other.fill_(float("nan"))
    assert_close(again, value)


@pytest.mark.parametrize("keep", [lambda t: t[3], lambda t: t.numpy(), lambda t: t.untyped_storage()])
def test_what_is_kept_of_a_result_stays(keep: Callable[[Tensor], Any]) -> None:
    held = keep(result())
    read = torch.empty(0).set_ if isinstance(held, torch.UntypedStorage) else torch.as_tensor
    values = read(held).clone()
    for _ in range(3):
        result().fill_(float("nan"))
    assert torch.equal(read(held), values)


def test_results_have_storages_of_their_own_and_no_more() -> None:
    t = result()
    assert t.untyped_storage().nbytes() == t.nbytes == SIZE
    assert t.storage_offset() == 0
    assert t.is_contiguous()
    assert t.is_leaf
    assert not t.requires_grad
    assert not is_view(t)
    assert t.data_ptr() % 64 == 0
    saved = io.BytesIO()
    torch.save(t, saved)
    assert saved.tell() < SIZE + 4096
    saved.seek(0)
    assert torch.equal(torch.load(saved), t)
    assert torch.equal(pickle.loads(pickle.dumps(t)), t)
    assert torch.equal(copy.deepcopy(t), t)


def test_results_can_be_written_differentiated_and_shrunk() -> None:
    t, value = result(), result()
    t.mul_(2).requires_grad_()
    (t * t).sum().backward()
    assert t.grad is not None
    assert_close(t.grad, 4 * value)
    small = result().resize_(3, 4)
    assert_close(small, value.flatten()[:12].view(3, 4))
    with pytest.raises(RuntimeError, match="not resizable"):  # as of any tensor on somebody's memory
        small.resize_(10 * SIZE)
    other = torch.empty(0).set_(value)
    del value
    result().zero_()
    assert bool(other.any())


def _doubled(results: Any, t: Tensor) -> None:
    t.mul_(2)
    results.put(float(t.double().sum()))


def test_a_result_that_is_shared_with_a_process_is_that_process_s_too() -> None:
    context = torch.multiprocessing.get_context("fork")
    t = result()
    place, total = t.data_ptr(), float(t.double().sum())
    t.share_memory_()
    assert t.data_ptr() != place
    again = result()
    assert again.data_ptr() == place  # which nobody has any more
    answers = context.SimpleQueue()
    process = context.Process(target=_doubled, args=(answers, t))
    process.start()
    assert answers.get() == pytest.approx(2 * total)
    process.join()
    assert float(t.double().sum()) == pytest.approx(2 * total)
    assert float(again.double().sum()) == pytest.approx(total)


# ---- with the same answers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.usefixtures("small_blocks")
def test_answers_do_not_depend_on_what_was_in_the_memory(case: Case) -> None:
    """Gradients written out, and factors kept as gradients, in memory that is full of NaN."""
    fn, params, batch = case.make()
    want = psgrad.testing.loop_grads(fn, params, batch)
    for options in ({}, {"chunk_size": 3}):
        for t in optree.tree_leaves(grads_of(case, fn, params, batch, **options)):
            t.fill_(torch.nan)
        del t
        assert_close(grads_of(case, fn, params, batch, **options), want)
    if case.loops:
        return
    for sums in [block.sums for block in psgrad.factored_grads(fn, params, batch)._blocks]:
        for t in [t for own in sums if own is not None for t in own.tensors() if t.is_floating_point()]:
            if t.untyped_storage().data_ptr() % mmap.PAGESIZE == 0:  # not a batch of the user's
                t.fill_(torch.nan)
                del t
    del sums
    assert_close(psgrad.factored_grads(fn, params, batch).dense(), want)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    fn, w, x = linear_problem()
    w, x = w.to(dtype), x.to(dtype)
    result = psgrad.per_sample_grads(fn, w, x)
    place = result.data_ptr()
    result.fill_(torch.nan)
    del result
    found = psgrad.per_sample_grads(fn, w, x)
    assert found.data_ptr() == place
    assert found.dtype is dtype
    want = psgrad.testing.loop_grads(fn, w.double(), x.double())
    torch.testing.assert_close(found.double(), want, rtol=4 * torch.finfo(dtype).eps ** 0.75, atol=0.05)


def test_autocast_gives_what_it_gave() -> None:
    """Products in bfloat16, gradients in float32."""
    fn, w, x = linear_problem()
    with torch.autocast("cpu", torch.bfloat16):
        found = psgrad.per_sample_grads(fn, w, x)
        want = psgrad.per_sample_grads(fn, w, x, chunk_size=8)
        few = psgrad.per_sample_grads(fn, w, x[:2])
    assert found.dtype is torch.float32
    assert found.untyped_storage().nbytes() == SIZE
    assert_close(found, want, rtol=0, atol=0)
    assert_close(found[:2], few, rtol=0.02, atol=0.02)


# ---- not much is kept ----------------------------------------------------------------------------------------------


def test_a_loop_keeps_one_result() -> None:
    held = None
    for _ in range(5):
        held = result()
        assert kept() <= SIZE
    del held
    assert kept() <= 2 * SIZE


def test_of_many_results_two_are_kept() -> None:
    held = [result() for _ in range(20)]
    assert kept() == 0
    del held
    assert kept() == 2 * SIZE


def test_what_is_not_used_is_given_back() -> None:
    result()
    assert kept() == SIZE
    for _ in range(warm_memory.RECENT):
        psgrad.per_sample_grads(lambda w, x: (w * x).sum(), torch.ones(2), torch.ones(3, 2))
    assert kept() == SIZE
    psgrad.per_sample_grads(lambda w, x: (w * x).sum(), torch.ones(2), torch.ones(3, 2))
    assert kept() == 0


def test_other_sizes_take_the_place_of_those_before() -> None:
    """Batches that grow: each result is too large for the block before it."""
    fn, w, x = linear_problem(64)
    for n in (16, 24, 36, 54):
        psgrad.per_sample_grads(fn, w, x[:n])
        assert kept() <= 2 * n * w.nbytes
    psgrad.per_sample_grads(fn, w, x[:50])  # in the block of 54
    assert kept() <= 2 * 54 * w.nbytes


def test_a_block_is_not_far_too_large() -> None:
    fn, w, x = linear_problem(64)
    large = psgrad.per_sample_grads(fn, w, x)
    place = large.data_ptr()
    del large
    assert psgrad.per_sample_grads(fn, w, x[:56]).data_ptr() == place
    assert psgrad.per_sample_grads(fn, w, x[:16]).data_ptr() != place


def test_there_is_a_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_memory, "MOST", SIZE // 2)
    result()
    assert kept() == 0


def test_empty_cache_gives_back_that_of_every_thread() -> None:
    result()
    ready, done = threading.Event(), threading.Event()
    found: list[int] = []

    def work() -> None:
        result()
        found.append(kept())
        ready.set()
        done.wait()
        found.append(kept())

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    assert kept() == SIZE
    psgrad.empty_cache()
    assert kept() == 0
    done.set()
    thread.join()
    assert found == [SIZE, 0]


def test_a_thread_that_ends_keeps_nothing() -> None:
    pools, held = len(warm_memory._POOLS), list[Tensor]()
    thread = threading.Thread(target=lambda: (result(), held.append(result())))
    thread.start()
    thread.join()
    gc.collect()
    assert len(warm_memory._POOLS) == pools
    value = held[0].clone()
    result().fill_(torch.nan)
    assert_close(held[0], value)
    held.clear()  # by another thread than had it lent
    assert_close(result(), value)


def test_a_call_with_a_bound_keeps_nothing_and_is_given_nothing_kept() -> None:
    first = result()
    place = first.data_ptr()
    del first
    other = psgrad.per_sample_grads(*linear_problem(), max_bytes="10MB")
    assert kept() == 0
    del other
    assert kept() == 0
    held = result()
    psgrad.clipped_grad(*linear_problem(), 1.0, max_bytes=0.5)
    assert kept() == 0
    del held
    assert kept() <= SIZE
    assert place


def test_what_is_let_go_during_a_call_with_a_bound_is_not_kept() -> None:
    held = [result()]

    def fn(w: Tensor, x: Tensor) -> Tensor:
        held.clear()
        return torch.tanh(F.linear(x, w)).sum()

    psgrad.per_sample_norms(fn, *linear_problem()[1:], max_bytes="10MB")
    assert not held
    assert kept() == 0


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> list[mmap.mmap]:
    """The blocks that the system is offered from now on."""
    found: list[mmap.mmap] = []
    monkeypatch.setattr(huge_pages, "offer", found.append)
    return found


def test_kept_blocks_are_offered_to_the_system(monkeypatch: pytest.MonkeyPatch, offered: list[mmap.mmap]) -> None:
    monkeypatch.setattr(warm_memory, "OURS", SIZE - 1)
    t = result()
    assert not offered
    del t
    assert [len(block) for block in offered] == [SIZE]


def test_as_much_as_malloc_keeps_is_not_offered(offered: list[mmap.mmap]) -> None:
    """Neither in a loop, where it would have to be asked for anew each time, nor of many blocks that come back."""
    warm_memory.begin(bounded=False)
    for _ in range(100):
        result()
    assert not offered
    held = [lent(SIZE // 4) for _ in range(2 * warm_memory.OURS // SIZE)]
    held.clear()
    assert kept() == 2 * warm_memory.OURS
    assert sum(map(len, offered)) == warm_memory.OURS


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(st.integers(-5, 9), max_size=60))
def test_what_is_not_offered_is_bounded_in_any_order(steps: list[int]) -> None:
    """Blocks of many sizes are lent, or the one at some place comes back."""
    pool().__init__()  # type: ignore[misc]
    warm_memory.begin(bounded=False)
    offered, held = list[mmap.mmap](), list[Tensor]()
    with (
        mock.patch.object(huge_pages, "offer", offered.append),
        mock.patch.object(warm_memory, "OURS", 20 * mmap.PAGESIZE),
    ):
        for step in steps:
            if step > 0:
                held.append(lent(step * mmap.PAGESIZE // 4))
            elif held:
                held.pop(step % len(held))
            blocks = [block for own in pool().kept.values() for block in own]
            offered[:] = [block for block in offered if block in blocks]  # what is lent is written to
            assert sum(len(block) for block in blocks if block not in offered) <= warm_memory.OURS


@pytest.mark.parametrize("size", [1 << 20, 2 << 20, 9 << 20])
def test_what_is_written_after_an_offer_is_there(size: int) -> None:
    block = huge_pages.mapped(size)
    assert block is not None
    t = torch.frombuffer(block, dtype=torch.float32).fill_(1)
    huge_pages.offer(block)
    t[::2] = 3
    t[1::2] = 4
    assert bool((t.view(-1, 2) == torch.tensor([3.0, 4.0])).all())


def test_an_exception_leaves_no_trace() -> None:
    fn, w, x = linear_problem()

    def failing(w: Tensor, x: Tensor) -> Tensor:
        fn(w, x)
        raise KeyError("mine")

    for options in ({}, {"max_bytes": "10MB"}):
        with pytest.raises(KeyError):
            psgrad.per_sample_grads(failing, w, x, **options)
    assert pool().bounded_calls == 0
    result()
    assert kept() == SIZE


def test_where_the_system_has_no_memory_torch_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "mapped", lambda size: None)
    found = lent(1 << 20)
    assert found.untyped_storage().resizable()
    assert not pool().loans


# ---- and only for ordinary tensors ---------------------------------------------------------------------------------


def is_lent(t: Tensor) -> bool:
    return not t.untyped_storage().resizable()


def test_which_tensors_are_lent() -> None:
    like = torch.empty(0)
    assert is_lent(warm_memory.empty((LARGE // 4,), like))
    assert not is_lent(warm_memory.empty((LARGE // 4 - 1,), like))
    assert is_lent(warm_memory.empty((LARGE // 4,), nn.Parameter(like)))
    assert warm_memory.empty((LARGE,), like.to("meta")).is_meta
    with FakeTensorMode():
        assert type(warm_memory.empty((LARGE,), torch.empty(0))) is not Tensor
    assert not pool().loans or len(pool().loans) <= 2


def test_tracers_and_transforms_see_ordinary_ops() -> None:
    found: list[bool] = []

    def traced(x: Tensor) -> Tensor:
        out = warm_memory.empty((LARGE,), x)
        found.append(bool(pool().loans))
        return out.zero_() + x.sum()

    graph = make_fx(traced)(torch.ones(3))
    assert any("empty" in str(node.target) for node in graph.graph.nodes)
    vmap(traced)(torch.ones(2, 3))
    torch.func.grad(lambda x: traced(x).sum())(torch.ones(3))
    assert found == [False] * 3


def test_memory_that_torch_is_told_to_fill_is_filled() -> None:
    assert is_lent(lent(LARGE))
    torch.use_deterministic_algorithms(True)
    try:
        assert bool(lent(LARGE).isnan().all())
        assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    finally:
        torch.use_deterministic_algorithms(False)


# ---- so that pages are there ---------------------------------------------------------------------------------------

_LOOP = """
import resource, sys
import psgrad, torch
from torch import nn

BEFORE
torch.set_num_threads(1)
torch.manual_seed(0)
layers = [nn.Linear(512, 512), nn.Tanh()] * 4
fn, params = psgrad.from_module(nn.Sequential(*layers), nn.functional.mse_loss)
batch = torch.randn(32, 16, 512), torch.randn(32, 16, 512)  # gradients of 32 x 1 MB, once

def faults(call):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    result = call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

model = nn.Sequential(*layers)
def others():  # what a training loop does between two calls
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return [torch.randn(1000, 300) @ torch.randn(300, 500) for _ in range(3)]

for call in (
    lambda: psgrad.per_sample_grads(fn, params, batch),
    lambda: psgrad.per_sample_norms(fn, params, batch),
    lambda: psgrad.clipped_grad(fn, params, batch, 1.0),
)[:CALLS]:
    found = []
    for _ in range(12):
        kept = others()
        found.append(faults(call))
    print(*sorted(found))
"""


def loop_faults(before: str, calls: int) -> list[list[int]]:
    """Page faults of gradients, norms and clipped sums, in order: malloc as it is, other work between two calls."""
    script = _LOOP.replace("BEFORE", before).replace("CALLS", str(calls))
    command = [sys.executable, "-W", "ignore", "-c", script]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=plain, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


def test_a_loop_has_few_page_faults() -> None:
    """Where malloc keeps what is freed there are none; else those of activations, not of 8192 pages of results."""
    for found in loop_faults("psgrad.keep_freed_memory()", calls=3):
        assert found[len(found) // 2] < 500, found
    (grads,) = loop_faults("", calls=1)
    assert grads[len(grads) // 2] < 4096, grads


ROOT = Path(__file__).resolve().parent.parent
