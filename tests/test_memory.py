"""Memory as the system sees it: what kernels take is known, max_bytes holds; few runs choose a chunk size."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import psgrad
from psgrad import _memory
from psgrad._applied import Applied
from psgrad._param import Param, Source
from psgrad._plan import ConvGeometry
from psgrad.rules.conv import CONV

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
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | TIGHT)
    assert done.returncode == 0, done.stderr
    return [[float(word) for word in line.split()] for line in done.stdout.splitlines()]


_KERNELS = """
import torch
from psgrad._scratch import scratch

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
from psgrad._memory import Meter
from psgrad._patches import Patches
from psgrad._plan import ConvGeometry

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


# ---- the choice of a chunk size ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [7, 32, 100])
@pytest.mark.parametrize("fixed", [0, 50, 1000])
@pytest.mark.parametrize("bend", [0, 200])
def test_a_chunk_size_is_chosen_in_few_runs(n: int, fixed: int, bend: int) -> None:
    """As few chunks as there can be; where memory is proportional to samples, from two runs."""
    sizes = lambda m: fixed + 100 * m + min(bend, 30 * m)
    problem: Any = SimpleNamespace(n=n)
    for bound in (sizes(1), sizes(2), sizes(n // 2) + 1, sizes(n) - 1, sizes(n)):
        with mock.patch.object(_memory, "peak_bytes", side_effect=lambda _, m, *rest: sizes(m)) as runs:
            found = _memory._most(problem, bound, mock.sentinel.work, {})
        fits = [m for m in range(1, n + 1) if sizes(m) <= bound]
        assert found == _memory._even(n, max(fits))
        assert runs.call_count <= (2 if fixed == bend == 0 else 4)


def test_a_bound_for_which_one_sample_is_too_much() -> None:
    problem: Any = SimpleNamespace(n=9)
    with (
        mock.patch.object(_memory, "peak_bytes", side_effect=lambda _, m, *rest: 1000 + m),
        pytest.raises(psgrad.ArgumentError, match="max_bytes=1,000 is too little: one sample at a time needs 1,001"),
    ):
        _memory._most(problem, 1000, mock.sentinel.work, {})


def test_some_samples_may_need_less_than_one() -> None:
    sizes = {1: 100, 2: 90, 3: 50, 8: 300}
    assert _memory._most(SimpleNamespace(n=8), 60, mock.sentinel.work, dict(sizes)) == 3  # type: ignore[arg-type]
    with pytest.raises(psgrad.ArgumentError, match="max_bytes=40 is too little: 3 samples at a time need 50"):
        _memory._most(SimpleNamespace(n=8), 40, mock.sentinel.work, dict(sizes))  # type: ignore[arg-type]


# ---- the order of a backward -------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "order"), [(9, ["input", "weight"]), (3, ["weight", "input"])])
def test_an_input_gradient_goes_before_the_weights_where_it_is_the_larger(size: int, order: list[str]) -> None:
    """(2, 1, 4, size, size) numbers, and (2, 4, 4, 3, 3) of the weight."""
    x, g = torch.randn(2, 1, 4, size, size), torch.randn(2, 1, 4, size, size)
    weight = torch.randn(4, 4, 3, 3)
    met: list[str] = []
    source = Source(0, str, weight, weight.expand(2, *weight.shape))
    sink: Any = SimpleNamespace(add=lambda *_: met.append("weight"))
    rule = CONV[1]
    applied = Applied(rule, ConvGeometry((1, 1), (1, 1), (1, 1), 1), (Param(weight, source, weight), None), sink)
    with mock.patch.object(applied, "rule", wraps=rule) as watched:
        watched.native = True
        watched.backward.side_effect = lambda *a: (a[-1].x and met.append("input")) or rule.backward(*a)
        gx = applied.backward(g, x, [weight, None], (), True)
    assert met == order
    want = torch.nn.functional.conv_transpose2d(g[:, 0], weight, padding=1)[:, None]
    torch.testing.assert_close(gx, want)
