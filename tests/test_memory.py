"""Memory as the system sees it: what kernels take is known, max_bytes holds; few runs choose a chunk size."""

import functools
import gc
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psgrad
from psgrad.engine.rule_call import BoundRule
from psgrad.factors.costs import ConvGeometry
from psgrad.registry.params import Param, Source
from psgrad.rules.conv import CONV
from psgrad.streaming import budget as _memory

resident = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="Linux says how much memory a process takes"
)
TIGHT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # what is freed is given back at once
FLOOR = 1 << 18  # bytes: the interpreter's own objects come and go within this

_GROWN = """
import ctypes
from pathlib import Path
from statistics import median

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith(field + ":"))

def once(call):
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status("VmRSS")
    result = call()
    return status("VmHWM") - before

def grown(call):
    call()  # builds kernels, works out chunk sizes
    return median(once(call) for _ in range(3))
"""


def in_process(script: str) -> list[list[float]]:
    """The lines of numbers that a fresh process prints."""
    command = [sys.executable, "-W", "ignore", "-c", _GROWN + script]
    patient = {"OMP_WAIT_POLICY": "PASSIVE"}  # two threads that wait for each other leave their cores to other tests
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | TIGHT | patient)
    assert done.returncode == 0, done.stderr
    return [[float(word) for word in line.split()] for line in done.stdout.splitlines()]


_KERNELS = """
import torch
from psgrad.streaming.kernel_scratch import scratch

aten = torch.ops.aten
torch.set_num_threads(2)

def show(x, w, stride=1, dilation=1, groups=1, transposed=False):
    for dtype in (torch.float32, torch.float64):
        x, w = (t if isinstance(t, torch.Tensor) else torch.randn(t) for t in (x, w))
        x, w, d = x.to(dtype), w.to(dtype), x.dim() - 2
        options = [stride] * d, [1] * d, [dilation] * d, transposed, [0] * d, groups
        y = aten.convolution(x, w, None, *options)
        args = x, w, None, *options
        print(grown(lambda: aten.convolution(*args)) - y.nbytes, scratch(aten.convolution.default, args, y))
        for wanted, result in ([True, False, False], x), ([False, True, False], w):
            back = y, *args, wanted
            op = aten.convolution_backward.default
            print(grown(lambda: op(*back)) - result.nbytes, scratch(op, back, None))

show((16, 64, 16, 16), (64, 64, 3, 3))
show((16, 32, 32, 32), (64, 32, 3, 3), stride=2)
show((1, 1024, 16, 16), (1024, 64, 3, 3), groups=16)
show((16, 1, 4000), (32, 1, 9), stride=2)
show((16, 32, 24, 24), (32, 32, 3, 3), dilation=2)
show((16, 8, 16, 16, 16), (16, 8, 3, 3, 3), stride=2)
show((16, 64, 16, 16), (64, 32, 4, 4), stride=2, transposed=True)
"""


@resident
def test_what_convolutions_take_for_themselves_is_known() -> None:
    """Kernels of seven convolutions, in two dtypes, for output and both gradients."""
    found = in_process(_KERNELS)
    assert len(found) == 7 * 2 * 3
    for held, counted in found:
        assert held <= 1.1 * counted + FLOOR
    assert sum(held for held, _ in found) > 0.7 * sum(counted for _, counted in found)  # and little more


_STRATEGIES = """
import torch
from psgrad.streaming.budget import Meter
from psgrad.factors.patches import Patches
from psgrad.factors.costs import ConvGeometry

torch.set_num_threads(2)
x, g, out = torch.randn(16, 1, 64, 16, 16), torch.randn(16, 1, 64, 16, 16), torch.zeros(16, 64, 64, 3, 3)
factor = Patches(x, g, ConvGeometry((1, 1), (1, 1), (1, 1), 1), (3, 3))
for strategy in ("grouped", "patches"):  # a loop takes less than can be told from the rest
    with Meter([x, g, out]) as meter:
        factor.by(strategy, out)
    print(grown(lambda: factor.by(strategy, out)), meter.peak)
"""


@resident
def test_what_gradients_of_a_convolution_take_is_known() -> None:
    """Nothing that no tensor shows, such as a copy of the weight that stands for a shape."""
    for held, counted in in_process(_STRATEGIES):
        assert 0.7 * counted - FLOOR < held <= 1.1 * counted + FLOOR


_BOUNDED = """
import psgrad, torch
from torch import nn

torch.set_num_threads(2)
torch.manual_seed(0)
layers = [nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()]
layers += [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
for dtype in (torch.float32, torch.float64):
    fn, params = psgrad.from_module(nn.Sequential(*layers).to(dtype), nn.functional.cross_entropy)
    batch = torch.randn(32, 3, 32, 32, dtype=dtype), torch.randint(10, (32,))
    out = {name: p.new_zeros(32, *p.shape) for name, p in params.items()}
    free = grown(lambda: psgrad.per_sample_grads(fn, params, batch, out=out))
    for share in (0.5, 0.3, 0.15):
        bound = int(free * share)
        print(grown(lambda: psgrad.per_sample_grads(fn, params, batch, out=out, max_bytes=bound)), bound)
"""


@resident
def test_max_bytes_holds_for_what_the_process_takes() -> None:
    for peak, bound in in_process(_BOUNDED):
        assert 0.4 * bound < peak <= 1.1 * bound + FLOOR


# ---- a bound as people write it ----------------------------------------------------------------------------

PARAMS = [torch.zeros(1)]


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (None, None),
        (7, 7),
        ("7B", 7),
        ("500MB", 500 * 10**6),
        ("2GB", 2 * 10**9),
        ("2 gb", 2 * 10**9),
        (" 1.5GiB ", 3 << 29),
        ("1.5gib", 3 << 29),
        (".5 KiB", 512),
        ("3.kB", 3000),
        ("0.29GB", 290 * 10**6),
        ("2.01GB", 201 * 10**7),  # as a float a little less
        ("9" * 400 + "B", int("1" + "0" * 400)),  # more than a float can be
        ("1TB", 10**12),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(given: Any, want: Any) -> None:
    assert _memory.bytes_of(given, PARAMS) == want


@pytest.mark.parametrize(
    "given", ["two GB", "2XB", "GB", "2 G", "-2GB", "0GB", "0.1B", "1e3MB", "2GB 3MB", "nan GB", "2iB"]
)
def test_strings_that_are_no_sizes(given: str) -> None:
    with pytest.raises(psgrad.ArgumentError) as error:
        _memory.bytes_of(given, PARAMS)
    assert str(error.value) == (
        f"max_bytes={given!r} is not a positive size\n"
        '  give a number and a unit, such as "500MB" or "1.5GiB", or a positive int.'
    )


@pytest.mark.parametrize("given", [0, -1, True, 0.0, 1.0, 1.5, -0.5, float("nan"), float("inf"), "2", "", [1]])
def test_values_that_are_no_bounds(given: Any) -> None:
    with pytest.raises(psgrad.ArgumentError) as error:
        _memory.bytes_of(given, PARAMS)
    assert str(error.value) == f"max_bytes={given!r} is not a positive int\n  give one, or None for no bound."


@pytest.mark.parametrize(("free", "want"), [(2000, 992), (2050, 1024), (40, 20), (1, 1)])
def test_a_fraction_of_free_memory(free: int, want: int) -> None:
    """Rounded down to five bits, so that a little more or less is the same bound."""
    with mock.patch.object(_memory, "_free_for_processes", return_value=free):
        assert _memory.bytes_of(0.5, PARAMS) == want


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux says how much memory is free")
def test_the_free_memory_of_a_cpu() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    told = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    assert 0.8 * told < _memory._free_for_processes() < 1.25 * told


def test_the_free_memory_of_a_cpu_where_nothing_but_sysconf_tells() -> None:
    pages = {"SC_AVPHYS_PAGES": 100, "SC_PAGE_SIZE": 4096}
    with (
        mock.patch("builtins.open", side_effect=FileNotFoundError),
        mock.patch.object(os, "sysconf", side_effect=pages.__getitem__),
    ):
        assert _memory._free_for_processes() == 409600


def test_the_free_memory_of_another_device() -> None:
    """What torch keeps there for its next tensors is free, too: it would count as taken after the first call."""
    gpu = SimpleNamespace(
        mem_get_info=lambda _: (1000, 9000), memory_reserved=lambda _: 500, memory_allocated=lambda _: 200
    )
    with mock.patch.object(torch, "get_device_module", return_value=gpu):
        assert _memory._free(torch.device("cuda:1"), 0.5) == 1300
    two: Any = [SimpleNamespace(device=torch.device("cuda:0")), SimpleNamespace(device=torch.device("cuda:1"))]
    with mock.patch.object(_memory, "_free", side_effect=lambda device, _: 64 if device.index else 640):
        assert _memory.bytes_of(0.25, two) == 16  # the one that has less


@pytest.mark.parametrize("device", ["cpu", "meta", "mps"])
def test_free_memory_that_is_not_known(device: str) -> None:
    params: Any = [SimpleNamespace(device=torch.device(device))]
    with (
        mock.patch.object(_memory, "_free_for_processes", side_effect=ValueError("unrecognized configuration name")),
        mock.patch.object(torch, "get_device_module", return_value=SimpleNamespace()),
        pytest.raises(psgrad.ArgumentError) as error,
    ):
        _memory.bytes_of(0.5, params)
    assert str(error.value) == (
        f"max_bytes=0.5 is a fraction of the free memory, which is not known for device {device}\n"
        '  give a size, such as "2GB".'
    )


def weighted(fn: Any, params: Any, batch: Any, **options: Any) -> Any:
    n = len(batch) if isinstance(batch, torch.Tensor) else len(batch[0])
    return psgrad.weighted_grad(fn, params, batch, torch.ones(n), **options)


QUANTITIES: dict[str, Callable[..., Any]] = {
    "grads": psgrad.per_sample_grads,
    "factored": psgrad.factored_grads,
    "norms": psgrad.per_sample_norms,
    "weighted": weighted,
    "clipped": lambda *args, **options: psgrad.clipped_grad(*args, 1.0, **options),
    "dots": lambda *args, **options: psgrad.per_sample_dots(*args, args[1], **options),
    "projected": lambda *args, **options: psgrad.projected_grads(*args, 32, **options),
    "gram": psgrad.gram,
    "jacobians": psgrad.per_sample_jacobians,
    "ntk": psgrad.ntk,
    "stats": psgrad.grad_stats,
    "kron": psgrad.kron_factors,
    "explain": psgrad.explain,
}


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_every_quantity_takes_sizes_and_fractions(quantity: str) -> None:
    x, seen = torch.randn(6, 3), list[int]()
    with mock.patch.object(_memory, "chunk_size", side_effect=lambda _, bound, *rest: seen.append(bound) or 2):
        for given in ("2 kB", 0.5):
            QUANTITIES[quantity](lambda w, x: (w * x).sum() ** 2, torch.ones(3), x, max_bytes=given)
    assert seen[0] == 2000
    assert seen[-1] > 1 << 20
    with pytest.raises(psgrad.ArgumentError, match="max_bytes='2 kiloB' is not a positive size"):
        QUANTITIES[quantity](lambda w, x: (w * x).sum(), torch.ones(3), x, max_bytes="2 kiloB")


# ---- the choice of a chunk size ----------------------------------------------------------------------------


def choose(n: int, bound: int, peak: Callable[[int], int], curve: _memory.Curve | None = None) -> Any:
    bounded = _memory.Bounded(curve or _memory.Curve(), bound, peak)
    return _memory.chosen(n, bounded, bounded)


@pytest.mark.parametrize("n", [7, 32, 100])
@pytest.mark.parametrize("fixed", [0, 50, 1000])
@pytest.mark.parametrize("bend", [0, 200])
def test_a_chunk_size_is_chosen_in_few_runs(n: int, fixed: int, bend: int) -> None:
    """As few chunks as there can be."""
    sizes = lambda m: fixed + 100 * m + min(bend, 30 * m)
    for bound in (sizes(1), sizes(2), sizes(n // 2) + 1, sizes(n) - 1, sizes(n)):
        runs = mock.Mock(side_effect=sizes)
        fits = [m for m in range(1, n + 1) if sizes(m) <= bound]
        assert choose(n, bound, runs) == _memory._even(n, max(fits))
        assert runs.call_count <= (7 if bound < sizes(n) else 1)


def kinked(n: int) -> int:
    """Another strategy from 20 samples on, which takes half."""
    return 100 * n if n < 20 else 55 * n


CURVES: dict[str, Callable[[int], int]] = {
    "straight": lambda n: 100 * n,
    "with a fixed part": lambda n: 5000 + 100 * n,
    "a part that grows up to a limit": lambda n: 100 * n + min(1000, 200 * n),
    "pairs": lambda n: 100 * n + n * n,
    "flat at first": lambda n: max(0, 100 * n - 3000),
    "a strategy that takes less from 20 on": kinked,
    "a strategy that takes more from 20 on": lambda n: 100 * n + 1500 * (n >= 20),
    "strategies in turn": lambda n: 100 * n + 150 * (n // 5 % 2),
}


@pytest.mark.parametrize("curve", CURVES)
def test_numbers_of_samples_that_were_not_measured_stay_within_the_bound(curve: str) -> None:
    """Whatever came before; and after a while hardly any is measured."""
    peak, turns = CURVES[curve], random.Random(0)
    for bound in range(peak(1), peak(70), max(1, peak(70) // 40)):
        known, runs = _memory.Curve(), mock.Mock(side_effect=peak)
        for turn in range(80):
            if turn == 40:
                runs.reset_mock()
            n = turns.randint(1, 64)
            size = choose(n, bound, runs, known)
            assert peak(size) <= bound
            assert peak(n - (n - 1) // size * size) <= bound  # the last chunk
        assert runs.call_count <= 8
        assert len(known.peaks) <= _memory.MEASURED


def test_a_choice_does_not_depend_on_the_calls_before() -> None:
    """Where one sample more takes no less; behind such a kink the first call of all looks closer."""
    for peak in [peak for peak in CURVES.values() if peak is not kinked]:
        known, bound = _memory.Curve(), peak(13) + 10
        later = {n: choose(n, bound, peak, known) for n in range(1, 65)}
        assert {n: choose(n, bound, peak) for n in range(1, 65)} == later


def test_samples_close_to_the_bound_are_measured_only_so_often() -> None:
    known, runs = _memory.Curve(), mock.Mock(side_effect=lambda n: 100 * n)
    for n in range(9000, 10001):
        assert choose(n, 10**6, runs, known) in (n, -(-n // 2))
    assert runs.call_count <= _memory.MEASURED + 4
    for bound in range(10**5, 2 * 10**6, 1000):
        choose(10**4, bound, runs, known)
    assert len(known.peaks) <= 8 * _memory.MEASURED


def test_a_bound_for_which_one_sample_is_too_much() -> None:
    for n in (1, 2, 9):
        assert str(choose(n, 1000, lambda m: 1000 + m).error()) == (
            "max_bytes=1,000 is too little: one sample at a time needs 1,001\n"
            "  give at least max_bytes=1001, or make the sample smaller."
        )


def test_some_samples_may_need_less_than_one() -> None:
    sizes = {1: 100, 2: 90, 3: 50, 4: 200, 8: 300}
    curve = _memory.Curve()
    curve.peaks = sizes
    assert choose(8, 60, sizes.__getitem__, curve) == 3
    assert str(choose(8, 40, sizes.__getitem__, curve).error()).startswith(
        "max_bytes=40 is too little: 3 samples at a time need less than one, but still 50\n"
    )


def test_all_samples_may_need_less_than_one() -> None:
    """Where chunks have sums of their own."""
    whole = _memory.Bounded(_memory.Curve(), 60, lambda n: 10 * n)
    chunk = _memory.Bounded(_memory.Curve(), 60, lambda n: 100 + 10 * n)
    assert _memory.chosen(6, whole, chunk) == 6
    assert str(_memory.chosen(7, whole, chunk).error()).startswith(
        "max_bytes=60 is too little: all 7 samples at once need less than chunks of them, but still 70\n"
    )
    assert str(_memory.chosen(12, whole, chunk).error()).startswith(
        "max_bytes=60 is too little: one sample at a time needs 110"
    )


# ---- one plan for all numbers of samples -------------------------------------------------------------------


def kinked_net() -> tuple[Any, Any, Callable[[int], Any]]:
    """Gradients of the second convolution go another way from 20 samples on, which takes half of all."""
    layers = [nn.Conv2d(3, 4, 5, padding=2), nn.ReLU(), nn.Conv2d(4, 64, 3, padding=1, dilation=2), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5)).double()
    batch = lambda n: (torch.randn(n, 3, 6, 6, dtype=torch.float64), torch.randint(5, (n,)))
    return *psgrad.from_module(model, F.cross_entropy), batch


def sequence_net() -> tuple[Any, Any, Callable[[int], Any]]:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    return *psgrad.from_module(model, F.mse_loss), lambda n: (torch.randn(n, 20, 32), torch.randn(n, 20, 8))


def large_net() -> tuple[Any, Any, Callable[[int], Any]]:
    """Parameters that take more than samples do."""
    model = nn.Sequential(nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 3))
    return *psgrad.from_module(model, F.cross_entropy), lambda n: (torch.randn(n, 200), torch.randint(3, (n,)))


def branching_net() -> tuple[Any, Any, Callable[[int], Any]]:
    """fn looks at values: nothing is known from shapes alone."""
    fn, params, batch = sequence_net()
    return (lambda p, s: fn(p, s) * (2 if s[0].sum() > 1e9 else 1)), params, batch


def metered(quantity: str, fn: Any, params: Any, batch: Any, **options: Any) -> int:
    """The most bytes alive at once beyond inputs and result."""
    n, result = len(batch[0]), 0
    known = [*params.values(), *batch]
    if quantity == "grads":
        options["out"] = {name: p.new_empty(n, *p.shape) for name, p in params.items()}
        known += options["out"].values()
    if quantity in ("clipped", "weighted"):
        result = sum(p.nbytes for p in params.values())
    if quantity == "kron":
        result = sum(4 * (len(p) ** 2 + p[0].numel() ** 2) for p in params.values() if p.dim() == 2)
    with _memory.Meter(known) as meter:
        QUANTITIES[quantity](fn, params, batch, **options)
    return int(meter.peak) - result


@pytest.mark.parametrize(
    ("net", "quantity", "share"),
    [
        (kinked_net, "grads", 0.8),
        (kinked_net, "grads", 0.35),
        (kinked_net, "clipped", 0.7),
        (sequence_net, "norms", 0.4),
        (sequence_net, "clipped", 0.4),
        (sequence_net, "dots", 0.4),
        (sequence_net, "kron", 0.7),
        (sequence_net, "projected", 0.6),
        (branching_net, "projected", 0.7),
        (large_net, "dots", 0.6),
        (branching_net, "dots", 0.7),
        (sequence_net, "weighted", 0.8),
        (large_net, "norms", 0.6),
        (large_net, "clipped", 0.6),
        (branching_net, "grads", 0.4),
        (branching_net, "norms", 0.7),
    ],
)
def test_a_plan_holds_for_other_numbers_of_samples(net: Any, quantity: str, share: float) -> None:
    """The bound is kept for real, and hardly anything is measured any more."""
    fn, params, batch = net()
    metered(quantity, fn, params, batch(2))
    bound = int(metered(quantity, fn, params, batch(24)) * share)
    for n in (24, 5, 17, 33, 40):
        QUANTITIES[quantity](fn, params, batch(n), max_bytes=bound)
    with mock.patch.object(_memory, "peak_bytes", wraps=_memory.peak_bytes) as runs:
        for n in range(1, 41, 1 if net is kinked_net else 2):
            QUANTITIES[quantity](fn, params, batch(n), max_bytes=bound)
    assert runs.call_count <= 8
    for n in range(1, 41, 1 if net is kinked_net else 3):
        given = batch(n)
        QUANTITIES[quantity](fn, params, given, max_bytes=bound)  # what may still be measured is not metered
        assert metered(quantity, fn, params, given, max_bytes=bound) <= 1.01 * bound + 64 * n


def planned(fn: Any, params: Any, batch: Any, **options: Any) -> int:
    """How often a call measures."""
    with mock.patch.object(_memory, "peak_bytes", wraps=_memory.peak_bytes) as runs:
        psgrad.per_sample_norms(fn, params, batch, max_bytes=10**6, **options)
    return runs.call_count


def tanh_loss(w: Any, sample: Any) -> Any:
    x, *_ = sample
    return torch.tanh(x @ w).sum()


def test_another_number_of_samples_is_no_other_plan() -> None:
    w, x = torch.randn(4, 3), torch.randn(20, 5, 4)
    fn = lambda w, sample: tanh_loss(w, sample)
    assert planned(fn, w, (x,)) == 1
    assert planned(fn, w, (x[:16],)) == 1
    for n in (1, 2, 7, 15, 16):
        assert planned(fn, w, (x[:n],)) <= (n in (1, 2, 7))  # at first powers of two
        assert planned(fn, w, (x[:n],)) == 0
    assert planned(fn, w, (torch.randn(5, 30, 4),), in_dims=1) == 1  # samples lie elsewhere in memory
    assert planned(fn, w, (torch.randn(5, 31, 4),), in_dims=1) == 1
    assert planned(fn, w, (torch.randn(5, 29, 4),), in_dims=1) == 0


@pytest.mark.parametrize(
    ("change", "in_dims"),
    [
        (lambda x: (x[:, :4],), 0),  # shorter samples
        (lambda x: (x[:, None],), 0),  # another shape
        (lambda x: (x.mT.contiguous().mT,), 0),  # another layout
        (lambda x: (x, x), 0),  # another tree
        (lambda x: (x, x), (0, None)),  # the same tree, one leaf shared
    ],
)
def test_samples_that_differ_have_plans_of_their_own(change: Any, in_dims: Any) -> None:
    w, x = torch.randn(4, 3), torch.randn(8, 8, 4)
    fn = lambda w, sample: tanh_loss(w, sample)
    assert planned(fn, w, (x,)) == 1
    if in_dims != 0:
        assert planned(fn, w, (x, x)) == 1
    assert planned(fn, w, change(x), in_dims=in_dims) == 1
    assert planned(fn, w, change(x), in_dims=in_dims) == 0


@pytest.mark.parametrize("other", [torch.ones(3), torch.ones(2, dtype=torch.float64), 3, "b", None, 0.0, True])
def test_what_samples_share_belongs_to_the_plan(other: Any) -> None:
    w, x = torch.randn(4, 3), torch.randn(8, 4)
    fn = lambda w, sample: tanh_loss(w, sample)
    for leaf in (torch.ones(2), 2, "a", 0.5, 1):
        planned(fn, w, (x, leaf), in_dims=(0, None))
    assert planned(fn, w, (x, other), in_dims=(0, None)) == 1
    assert planned(fn, w, (x, other), in_dims=(0, None)) == 0
    assert planned(fn, w, (x, 0.75), in_dims=(0, None)) == 0  # one that changes with every step, such as a weight


def test_what_else_belongs_to_the_plan() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 2))
    fn, params = psgrad.from_module(model, F.mse_loss)
    batch = torch.randn(8, 4), torch.randn(8, 2)
    assert planned(fn, params, batch) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert planned(fn, params, batch) == 1
        assert planned(fn, params, batch) == 0
    assert planned(fn, params, batch, randomness="same") == 1
    assert planned(fn, {name: p.double() for name, p in params.items()}, tuple(t.double() for t in batch)) == 1
    model[1].eval()
    assert planned(fn, params, batch) == 1
    model[1].train()
    assert planned(fn, params, batch) == 0
    with torch.no_grad(), torch.inference_mode():  # fn runs with gradients all the same
        assert planned(fn, params, batch) == 0


MODEL = nn.Sequential(nn.Linear(4, 2), nn.Dropout())


def global_loss(params: Any, sample: Any) -> Any:
    return torch.func.functional_call(MODEL, params, (sample,)).sum()


class Trainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = MODEL

    def loss(self, params: Any, sample: Any) -> Any:
        return torch.func.functional_call(self.model, params, (sample,)).sum()

    def square(self, params: Any, sample: Any) -> Any:
        return self.loss(params, sample) ** 2


@pytest.mark.parametrize(
    "fn", [global_loss, functools.partial(global_loss), Trainer().loss], ids=["global", "partial", "method"]
)
def test_training_is_seen_wherever_the_module_is(fn: Any) -> None:
    params = {name: p.detach() for name, p in MODEL.named_parameters()}
    x = torch.randn(8, 4)
    planned(fn, params, x)
    MODEL.eval()
    try:
        assert planned(fn, params, x) == 1
    finally:
        MODEL.train()
    assert planned(fn, params, x) == 0


def test_methods_have_plans_though_each_look_makes_a_new_one() -> None:
    trainer, params, x = Trainer(), {name: p.detach() for name, p in MODEL.named_parameters()}, torch.randn(8, 4)
    assert [planned(trainer.loss, params, x) for _ in range(2)] == [1, 0]
    assert [planned(trainer.square, params, x) for _ in range(2)] == [1, 0]
    assert planned(Trainer().loss, params, x) == 1


def test_plans_are_few_and_go_with_their_function() -> None:
    w = torch.randn(4, 3)
    fn = lambda w, sample: tanh_loss(w, sample)
    with mock.patch.object(_memory, "PLANS", 3):
        for length in (1, 2, 3, 1, 4):
            planned(fn, w, (torch.randn(8, length, 4),))
        assert len(_memory._PLANS[fn]) == 3
        assert [planned(fn, w, (torch.randn(8, length, 4),)) for length in (4, 1, 3, 2)] == [0, 0, 0, 1]
    gc.collect()
    plans = len(_memory._PLANS)
    del fn
    gc.collect()
    assert len(_memory._PLANS) < plans


def test_threads_plan_at_once() -> None:
    w, failed = torch.randn(4, 3), list[BaseException]()
    fn = lambda w, sample: tanh_loss(w, sample)

    def work(seed: int) -> None:
        try:
            for n in random.Random(seed).sample(range(1, 40), 8):
                x = torch.randn(n, 6, 4)
                found = psgrad.per_sample_norms(fn, w, (x,), max_bytes=2000)
                torch.testing.assert_close(found, psgrad.per_sample_norms(fn, w, (x,)))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# ---- the order of a backward -------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "order"), [(9, ["input", "weight"]), (3, ["weight", "input"])])
def test_an_input_gradient_goes_before_the_weights_where_it_is_the_larger(size: int, order: list[str]) -> None:
    """(2, 1, 4, size, size) numbers, and (2, 4, 4, 3, 3) of the weight."""
    x, g = torch.randn(2, 1, 4, size, size), torch.randn(2, 1, 4, size, size)
    weight = torch.randn(4, 4, 3, 3)
    met: list[str] = []
    source = Source(0, str, weight, weight.expand(2, *weight.shape))
    collector: Any = SimpleNamespace(add=lambda *_: met.append("weight"))
    rule = CONV[1]
    operands = Param(weight, source, weight), None
    bound = BoundRule(rule, ConvGeometry((1, 1), (1, 1), (1, 1), 1), operands, collector)
    with mock.patch.object(bound, "rule", wraps=rule) as watched:
        watched.native = True
        watched.backward.side_effect = lambda *a: (a[-1].x and met.append("input")) or rule.backward(*a)
        gx = bound.backward(g, x, [weight, None], (), True)
    assert met == order
    want = torch.nn.functional.conv_transpose2d(g[:, 0], weight, padding=1)[:, None]
    torch.testing.assert_close(gx, want)
