"""psgrad.compile: the eager answers, from graphs that are never stale; the rules are in them."""

import contextlib
import functools
import logging
import os
import random
import subprocess
import sys
import threading
import types
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psgrad
from psgrad.compilation import recording
from psgrad.compilation.recording import Recording
from psgrad.compilation.sizes import padded_size
from psgrad.compilation.surroundings import Surroundings
from psgrad.factors import clock, warm_memory
from psgrad.rules import quick_steps
from psgrad.torch_ import cpp, graphs

from .cases import CASES, Case, N

D = torch.float64
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
QUANTITIES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "grads": (psgrad.per_sample_grads, {"return_value": True}),
    "norms": (psgrad.per_sample_norms, {}),
    "clipped": (psgrad.clipped_grad, {"max_norm": 0.5}),
    "weighted": (psgrad.weighted_grad, {"weights": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=D)}),
    "gram": (psgrad.gram, {}),
    "stats": (psgrad.grad_stats, {}),
    "factored": (psgrad.factored_grads, {}),
}
# Every case with one quantity in turn; with all of them where there is time.
NAMES = list(QUANTITIES)
PAIRS = [(case, name) for i, case in enumerate(CASES) for name in (NAMES if THOROUGH else [NAMES[i % len(NAMES)]])]


def assert_same(found: Any, wanted: Any, **tolerances: Any) -> None:
    """Equal types, trees and dtypes; values up to rounding."""
    assert type(found) is type(wanted)
    if isinstance(found, psgrad.FactoredGrads):
        found, wanted = (found.dense(), found.values), (wanted.dense(), wanted.values)
    if isinstance(found, psgrad.GradStats):  # whose noise scale may be a number divided by a rounding error
        found, wanted = found._replace(noise_scale=found.trace), wanted._replace(noise_scale=wanted.trace)
    leaves, spec = optree.tree_flatten(found)
    others, other_spec = optree.tree_flatten(wanted)
    assert spec == other_spec
    for a, b in zip(leaves, others, strict=True):
        if isinstance(a, Tensor):
            torch.testing.assert_close(a, b, equal_nan=True, **tolerances)
        else:
            assert type(a) is type(b)
            assert a == b


def recordings(step: psgrad.Compiled) -> list[Recording]:
    return [graph for world in step._worlds for entry in world.entries.values() for graph in entry.graphs]


def moved(tree: Any) -> Any:
    """Other numbers, near these."""
    return optree.tree_map(lambda t: t + 1e-2 * torch.randn_like(t) if t.is_floating_point() else t, tree)


def flipped(batch: Any) -> Any:
    return optree.tree_map(lambda t: t.flip(0), batch)


def net(*, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3)).double()


def batch_of(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 6, dtype=D, generator=generator), torch.randint(3, (n,), generator=generator)


# ---- the whole table -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # those of the eager call, which other tests look for
@pytest.mark.parametrize(("case", "name"), PAIRS, ids=lambda value: getattr(value, "id", value))
def test_equals_the_eager_call(case: Case, name: str) -> None:
    """With the numbers it was recorded with, and with others: a graph of the same ops has no memory of the first."""
    quantity, options = QUANTITIES[name]
    fn, params, batch = case.make()
    step = psgrad.compile(quantity, fn, backend="replay", **options)
    other_params, other_batch = moved(params), moved(flipped(batch))
    for given in ((params, batch), (other_params, other_batch)):
        torch.manual_seed(1)
        found = step(*given)
        torch.manual_seed(1)
        assert_same(found, quantity(fn, *given, **options))
    info = step.cache_info()
    if not case.loops and case.id != "lstm-list":  # of one op, which is recorded, or of the whole call; by a mask
        assert (info.hits, info.misses) == ((0, 2) if case.diverges or case.looks else (2, 0))


def outputs(model: nn.Module) -> Any:
    return psgrad.from_module(model, lambda y, _: y[0])[0]


@pytest.mark.parametrize("name", ["per_sample_dots", "projected_grads", "kron_factors", "per_sample_jacobians", "ntk"])
def test_the_other_quantities(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    if name in ("per_sample_jacobians", "ntk"):
        fn = outputs(model)
    options = {
        "per_sample_dots": {"direction": optree.tree_map(torch.randn_like, params)},
        "projected_grads": {"dim": 16},
    }
    quantity = getattr(psgrad, name)
    step = psgrad.compile(quantity, fn, backend="replay", **options.get(name, {}))
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(N, 2, 6, 6, dtype=D, generator=generator)
        check(step, params, (x, torch.randint(3, (N,), generator=generator)))
    assert (step.cache_info().hits, step.cache_info().graphs) == (3, 1)


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
@pytest.mark.parametrize("name", ["per_sample_jacobians", "ntk"])
def test_what_would_have_to_be_drawn_again_is_not_recorded(name: str) -> None:
    """All outputs of a sample share its draws, and run one after the other."""
    model = net(dropout=0.5)
    fn, params = outputs(model), dict(psgrad.from_module(model, F.cross_entropy)[1])
    step = psgrad.compile(getattr(psgrad, name), fn, backend="replay")
    for _ in range(2):
        torch.manual_seed(1)
        found = step(params, batch_of(N))
        torch.manual_seed(1)
        assert_same(found, getattr(psgrad, name)(fn, params, batch_of(N)))
    assert step.cache_info().hits == 0


# ---- inductor --------------------------------------------------------------------------------------------


def has_compiler() -> bool:
    return graphs.missing_compiler() is None


def _of_each_rule() -> list[Case]:
    """One case of each rule."""
    found: dict[str, Case] = {}
    for case in CASES:
        for rule in {name for used in case.rules.values() for name in used}:
            if not (case.diverges or case.loops or case.looks or "(" in rule):
                found.setdefault(rule, case)
    return list({case.id: case for case in found.values()}.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not THOROUGH, reason="takes minutes; a few networks are below")
@pytest.mark.parametrize("case", _of_each_rule(), ids=lambda case: case.id)
def test_inductor_equals_the_eager_call_for_every_rule(case: Case) -> None:
    if not has_compiler():
        pytest.skip("no C++ compiler")
    fn, params, batch = case.make()
    step = psgrad.compile(psgrad.clipped_grad, fn, backend="inductor", max_norm=0.5)
    for given in ((params, batch), (moved(params), moved(flipped(batch)))):
        assert_same(step(*given), psgrad.clipped_grad(fn, *given, 0.5))
    assert step.cache_info().backends == ("inductor",)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["grads", "clipped"])
def test_inductor_equals_the_eager_call(name: str) -> None:
    if not has_compiler():
        pytest.skip("no C++ compiler")
    quantity, options = QUANTITIES[name]
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 3),
    ).double()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    step = psgrad.compile(quantity, fn, backend="inductor", **options)
    for _ in range(2):
        batch = torch.randn(N, 2, 6, 6, dtype=D), torch.randint(3, (N,))
        assert_same(step(params, batch), quantity(fn, params, batch, **options))
    assert step.cache_info().backends == ("inductor",)
    assert step.cache_info().hits == 2


@pytest.mark.filterwarnings("ignore")
def test_ops_that_compiled_code_calls_by_a_detour_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    if not has_compiler():
        pytest.skip("no C++ compiler")
    fn = lambda a, x: torch.linalg.cholesky(a @ a.mT + x.square().sum() * torch.eye(3, dtype=D)).sum()
    step = psgrad.compile(psgrad.per_sample_norms, fn, backend="inductor")
    a, x = torch.randn(3, 3, dtype=D), torch.rand(N, 2, dtype=D) + 1
    log = logging.getLogger("torch._inductor.ir")
    log.addHandler(caplog.handler)
    try:
        assert_same(step(a, x), psgrad.per_sample_norms(fn, a, x))
    finally:
        log.removeHandler(caplog.handler)
    assert step.cache_info().backends == ("inductor",)
    assert not [record for record in caplog.records if record.name == log.name]


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names it; "auto" does without."""
    monkeypatch.setattr(graphs, "missing_compiler", lambda: "torch's C++ compiler 'g++' is not there")
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    with pytest.raises(psgrad.ArgumentError) as error:
        psgrad.compile(psgrad.per_sample_grads, fn, backend="inductor")
    assert str(error.value) == (
        "backend=\"inductor\" compiles C++, but torch's C++ compiler 'g++' is not there\n"
        '  install one, or say backend="replay".'
    )
    step = psgrad.compile(psgrad.per_sample_grads, fn)
    step(params, batch_of(N))
    assert step.cache_info().backends == ("replay",)


# ---- the rules ran ---------------------------------------------------------------------------------------


def test_the_rules_are_in_the_graph() -> None:
    """By its ops: vmap of a convolution's backward would be a convolution with a weight per sample, of a linear layer's
    a bmm; the norm of a linear layer's gradient is a product of two norms, and nothing of N x P is there."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    step = psgrad.compile(psgrad.per_sample_norms, fn, backend="replay")
    step(params, batch_of(N))
    (graph,) = recordings(step)
    assert graph.ops.count("aten.addmm.default") == 2
    assert graph.ops.count("aten.mm.default") == 1  # the gradient of the hidden layer
    assert graph.ops.count("aten.linalg_vector_norm.default") == 4
    assert not [op for op in graph.ops if "bmm" in op or "expand" in op]


def test_norms_keep_their_fast_form() -> None:
    """Inner products of positions, not gradients written out, which a graph may not choose by looking."""
    torch.manual_seed(0)
    model = nn.Linear(256, 300).double()
    fn, params = psgrad.from_module(model, lambda y, _: y.square().sum())
    x = torch.randn(N, 8, 256, dtype=D)
    step = psgrad.compile(psgrad.per_sample_norms, fn, backend="replay")
    assert_same(step(params, (x, torch.zeros(N))), psgrad.per_sample_norms(fn, params, (x, torch.zeros(N))))
    (graph,) = recordings(step)
    assert graph.ops.count("aten.bmm.default") == 2
    assert graph.assumes
    zeros = x.clone()
    zeros[1] = 0  # a gradient of zeros is no reason to doubt
    assert_same(step(params, (zeros, torch.zeros(N))), psgrad.per_sample_norms(fn, params, (zeros, torch.zeros(N))))
    assert step.cache_info().misses == 0


# ---- never stale -----------------------------------------------------------------------------------------


def compiled_norms(fn: Any, **options: Any) -> psgrad.Compiled:
    return psgrad.compile(psgrad.per_sample_norms, fn, backend="replay", **options)


def check(step: psgrad.Compiled, params: Any, batch: Any) -> None:
    assert_same(step(params, batch), step.quantity(step.fn, params, batch, **step.options))


def test_another_branch() -> None:
    """All samples change their mind: the call runs eagerly, and the third time from a graph of its own."""
    fn = lambda w, x: (w * x).sum() ** 2 if x.sum() > 0 else (w * x).sum() ** 3
    step, w, x = compiled_norms(fn), torch.randn(3, dtype=D), torch.rand(N, 3, dtype=D)
    for sign, hits, misses in ((1, 1, 0), (1, 2, 0), (-1, 2, 1), (-1, 2, 2), (-1, 3, 2), (1, 4, 2)):
        check(step, w, sign * x)
        assert (step.cache_info().hits, step.cache_info().misses) == (hits, misses)
    x[0] *= -1  # they part ways
    check(step, w, x)
    assert step.cache_info().misses == 3


def test_a_number_that_fn_asks_for() -> None:
    fn = lambda w, x: (w * x).sum() * x[0].item()
    step, w = compiled_norms(fn), torch.randn(3, dtype=D)
    for first in (2.0, 2.0, 3.0, 3.0, 3.0):
        x = torch.randn(N, 3, dtype=D)
        x[:, 0] = first
        check(step, w, x)
    assert (step.cache_info().hits, step.cache_info().misses) == (3, 2)


def test_a_changed_buffer() -> None:
    """In place, it is read anew by the same graph; another one in its place makes another graph."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double().eval()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    step = compiled_norms(fn)
    check(step, params, batch_of(N))
    statistics: Any = model[1]
    statistics.running_mean += 1
    statistics.running_var *= 2
    check(step, params, batch_of(N))
    assert step.cache_info().graphs == 1
    statistics.running_mean = torch.randn(4, dtype=D)
    check(step, params, batch_of(N))
    assert (step.cache_info().graphs, step.cache_info().misses) == (2, 0)


def test_a_small_constant_is_not_taken_for_granted() -> None:
    """Compilers put the numbers of small constants into their code."""
    if not has_compiler():
        pytest.skip("no C++ compiler")
    scale = torch.tensor(2.0, dtype=D)
    fn = lambda w, x: (w * x).sum() ** 2 * scale
    step = psgrad.compile(psgrad.per_sample_norms, fn, backend="inductor")
    w, x = torch.randn(3, dtype=D), torch.randn(N, 3, dtype=D)
    check(step, w, x)
    scale.mul_(5)
    check(step, w, x)
    assert step.cache_info().hits == 2


SCALE: Any = 2.0


def _global_fn(w: Tensor, x: Tensor) -> Tensor:
    return (w * x).sum() ** 2 * SCALE


@pytest.mark.parametrize("values", [(2.0, 3.0), (torch.tensor(2.0), torch.tensor(3.0))], ids=["number", "tensor"])
def test_another_closed_over_value(values: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a closure, among the globals, in a container, in an object, in a partial's."""
    box, holder = [values[0]], type("Holder", (), {})()
    holder.table = {"scale": values[0]}
    scale = values[0]
    monkeypatch.setitem(globals(), "SCALE", values[0])

    def closing(w: Tensor, x: Tensor) -> Tensor:
        return (w * x).sum() ** 2 * scale

    functions = [
        closing,
        _global_fn,
        lambda w, x: (w * x).sum() ** 2 * box[0],
        lambda w, x: (w * x).sum() ** 2 * holder.table["scale"],
        functools.partial(lambda w, x, inner: inner(w, x), inner=closing),
    ]
    steps = [compiled_norms(fn) for fn in functions]
    w, x = torch.randn(3), torch.randn(N, 3)
    before = [step(w, x) for step in steps]
    scale = box[0] = holder.table["scale"] = values[1]
    monkeypatch.setitem(globals(), "SCALE", values[1])
    for step, old in zip(steps, before, strict=True):
        check(step, w, x)
        torch.testing.assert_close(step(w, x), old * 1.5)
        assert step.cache_info().graphs == 2
        assert step.cache_info().misses == 0


def test_train_and_eval() -> None:
    model = net(dropout=0.5)
    fn, params = psgrad.from_module(model, F.cross_entropy)
    step = compiled_norms(fn)
    for training in (True, False, True, False):
        model.train(training)
        torch.manual_seed(3)
        found = step(params, batch_of(N))
        torch.manual_seed(3)
        assert_same(found, psgrad.per_sample_norms(fn, params, batch_of(N)))
    assert (step.cache_info().graphs, step.cache_info().misses) == (2, 0)


@pytest.mark.parametrize("depth", [1, 6, 20])
def test_an_attribute_of_a_module_deep_inside(depth: int) -> None:
    class Leaf(nn.Module):
        offset = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(6, 5, dtype=D), 2.0

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale + self.offset

    leaf = Leaf()
    model: nn.Module = leaf
    for _ in range(depth):
        model = nn.Sequential(model)
    fn, params = psgrad.from_module(model, lambda out, y: F.cross_entropy(out.square(), y))
    step, batch = compiled_norms(fn), (torch.randn(N, 6, dtype=D), torch.arange(N))
    check(step, params, batch)
    leaf.scale = 3.0
    check(step, params, batch)
    Leaf.offset = 2.0
    check(step, params, batch)
    assert step.cache_info().graphs == 3


def test_a_hook_that_comes_later() -> None:
    model = net()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    step = compiled_norms(fn)
    check(step, params, batch_of(N))
    handle = model[0].register_forward_hook(lambda module, inputs, output: output * 2)
    check(step, params, batch_of(N))
    handle.remove()
    check(step, params, batch_of(N))
    assert step.cache_info().misses == 0


def test_autocast_on_and_off() -> None:
    model = net().float()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    x, y = batch_of(N)
    batch = x.float(), y
    step = compiled_norms(fn)
    for enabled in (False, True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            check(step, params, batch)
    assert step.cache_info().graphs == 2


def test_another_dtype_and_other_strides() -> None:
    model = net()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    step = compiled_norms(lambda p, s: fn(p, s))
    x, y = batch_of(N)
    check(step, params, (x, y))
    check(step, params, (x.T.contiguous().T, y))
    check(step, params, (x.repeat_interleave(2, 1)[:, ::2], y))
    assert step.cache_info().graphs == 3
    free = compiled_norms(lambda w, x: (w * x).sum() ** 2)
    for dtype in (torch.float32, D, torch.bfloat16, torch.float32):
        check(free, torch.ones(3, dtype=dtype), torch.randn(N, 3).to(dtype))
    assert free.cache_info().graphs == 3


@pytest.mark.parametrize(
    ("quantity", "options"), [(psgrad.per_sample_norms, {}), (psgrad.clipped_grad, {"max_norm": 0.1})]
)
def test_a_layer_read_at_one_end(quantity: Any, options: dict[str, Any]) -> None:
    """What a loss reads of the way back has met one position: the matrix of the state has a gradient of zero."""
    torch.manual_seed(0)

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.GRU(3, 16, batch_first=True, bidirectional=True), nn.Linear(32, 2)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.rnn(x)[0][:, -1])

    fn, params = psgrad.from_module(Last().double(), F.cross_entropy)
    step = psgrad.compile(quantity, fn, backend="replay", **options)
    for _ in range(3):
        batch = torch.randn(5, 6, 3, dtype=D), torch.randint(2, (5,))
        torch.testing.assert_close(step(params, batch), quantity(fn, params, batch, **options))
    assert step.cache_info()[:3] == (3, 0, 1)


def test_a_call_that_fails_says_nothing_of_others() -> None:
    """Its error is the eager call's, without a word on graphs, and the next call is recorded."""
    fn = lambda p, s: F.cross_entropy(s[0] @ p, s[1])
    p, x, y = torch.randn(4, 3, dtype=D), torch.randn(5, 4, dtype=D), torch.randint(3, (5,))
    step = compiled_norms(fn)
    for n in (5, 5, 4):  # of 4, filled up
        with warnings.catch_warnings(), pytest.raises(IndexError, match="out of bounds"):
            warnings.simplefilter("error")
            step(p, (x[:n], torch.full((n,), 7)))
    for n in (5, 4, 5):
        torch.testing.assert_close(step(p, (x[:n], y[:n])), psgrad.per_sample_norms(fn, p, (x[:n], y[:n])))
    assert (before := step.cache_info())[:3] == (3, 3, 1)
    for _ in range(3):  # nor does one take away what is there
        with warnings.catch_warnings(), pytest.raises(IndexError, match="out of bounds"):
            warnings.simplefilter("error")
            step(p, (x, torch.full((5,), 7)))
    torch.testing.assert_close(step(p, (x, y)), psgrad.per_sample_norms(fn, p, (x, y)))
    assert step.cache_info() == before._replace(hits=4, misses=6)  # nothing was recorded anew


@pytest.mark.parametrize("backend", ["replay", "inductor"])
def test_directions_elsewhere_in_memory(backend: Any) -> None:
    """A matrix that is used in parts reads a part of each direction, which may be a row of a larger tensor."""
    if backend == "inductor" and graphs.missing_compiler() is not None:
        pytest.skip("no C++ compiler")
    torch.manual_seed(0)

    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return (F.linear(x, p["w"][:5]) * F.linear(x, p["w"][5:]).tanh()).sum() * p["w"][2, 3]

    params, batch, directions = {"w": torch.randn(10, 6)}, torch.randn(4, 3, 6), torch.randn(3, 10, 6)
    step = psgrad.compile(psgrad.per_sample_dots, fn, backend=backend)
    grads = psgrad.testing.loop_grads(fn, params, batch)["w"].flatten(1)
    for direction in (directions[1], directions[0], directions[2], torch.randn(6, 20)[:, 3:13].mT):
        right = grads @ direction.flatten()
        for found in (
            step(params, batch, {"w": direction}),
            psgrad.per_sample_dots(fn, params, batch, {"w": direction}),
        ):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    assert step.cache_info()[:2] == (4, 0)


def test_the_same_tensor_twice_is_two_inputs() -> None:
    fn = lambda p, x: (p["a"] * x).sum() ** 2 + (p["b"] * x).sum() ** 3
    step, w, x = compiled_norms(fn, per_param=True), torch.randn(3, dtype=D), torch.randn(N, 3, dtype=D)
    check(step, {"a": w, "b": w}, x)
    check(step, {"a": w, "b": torch.randn(3, dtype=D)}, x)
    assert step.cache_info().hits == 2


def test_a_nan_sample() -> None:
    """It is named, left out or let through, as by the eager call; and the graph goes on afterwards."""
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    x, y = batch_of(N)
    bad = x.clone()
    bad[2] = torch.nan
    step = psgrad.compile(psgrad.clipped_grad, fn, backend="replay", max_norm=0.1)
    check(step, params, (x, y))
    with pytest.raises(psgrad.ArgumentError, match="the gradients of sample 2 are not finite"):
        step(params, (bad, y))
    check(step, params, (x, y))
    assert step.cache_info().hits == 2
    zero = psgrad.compile(psgrad.clipped_grad, fn, backend="replay", max_norm=0.1, nonfinite="zero")
    check(zero, params, (x, y))
    check(zero, params, (bad, y))
    assert zero(params, (bad, y)).count == N - 1
    through = psgrad.compile(psgrad.clipped_grad, fn, backend="replay", max_norm=0.1, nonfinite="propagate")
    check(through, params, (x, y))
    check(through, params, (bad, y))
    assert through.cache_info().misses == 0


def test_a_nan_sample_of_weight_zero_leaves_no_trace() -> None:
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    x, y = batch_of(N)
    step = psgrad.compile(psgrad.weighted_grad, fn, backend="replay")
    weights = torch.tensor([1.0, 2.0, 0.0, 3.0], dtype=D)
    assert_same(step(params, (x, y), weights), psgrad.weighted_grad(fn, params, (x, y), weights))
    x[2] = torch.nan
    assert_same(step(params, (x, y), weights), psgrad.weighted_grad(fn, params, (x, y), weights))
    assert (step.cache_info().hits, step.cache_info().misses) == (1, 1)


def test_gradients_that_lose_digits_or_range() -> None:
    """Where positions cancel, and where squares leave the dtype's range."""
    torch.manual_seed(0)
    model = nn.Linear(256, 300)
    fn, params = psgrad.from_module(model, lambda y, sign: (y * sign).sum())
    x, sign = torch.randn(N, 8, 256), torch.ones(N, 8, 300)
    step = compiled_norms(fn)
    check(step, params, (x, sign))
    x[1, 4:], sign[1, 4:] = x[1, :4], -1.0  # the second half takes away what the first has given
    check(step, params, (x, sign))
    check(step, params, (x * 1e25, sign))
    assert (step.cache_info().hits, step.cache_info().misses) == (1, 2)


def test_an_ignored_target() -> None:
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    step = compiled_norms(fn)
    x, y = batch_of(N)
    check(step, params, (x, y))
    y[1] = -100
    check(step, params, (x, y))  # 0 / 0 for that sample, as torch has it
    assert (step.cache_info().hits, step.cache_info().graphs) == (2, 1)


# ---- random numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["replay", "inductor"])
def test_dropout_draws_anew_and_repeats_under_a_seed(backend: Any) -> None:
    if backend == "inductor" and not has_compiler():
        pytest.skip("no C++ compiler")
    fn, params = psgrad.from_module(net(dropout=0.5), F.cross_entropy)
    step = psgrad.compile(psgrad.per_sample_norms, fn, backend=backend)
    found = []
    for _ in range(2):
        torch.manual_seed(7)
        found += [step(params, batch_of(N)), step(params, batch_of(N))]
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    torch.manual_seed(7)
    torch.testing.assert_close(found[0], psgrad.per_sample_norms(fn, params, batch_of(N)))


def test_recording_draws_nothing() -> None:
    fn, params = psgrad.from_module(net(dropout=0.5), F.cross_entropy)
    torch.manual_seed(7)
    first = compiled_norms(fn)(params, batch_of(N))
    torch.manual_seed(7)
    torch.testing.assert_close(first, psgrad.per_sample_norms(fn, params, batch_of(N)))


def seeds(w: Tensor, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return (w * x * torch.rand_like(x)).sum() ** 2


def draws_by_python(w: Tensor, x: Tensor) -> Tensor:
    return (w * x).sum() ** 2 * random.random()


def draws_by_numpy(w: Tensor, x: Tensor) -> Tensor:
    import numpy as np

    return (w * x).sum() ** 2 * np.random.rand()


@pytest.mark.filterwarnings("ignore:psgrad runs fn in a loop over samples")
@pytest.mark.parametrize("fn", [seeds, draws_by_python, draws_by_numpy])
def test_numbers_that_a_graph_would_freeze(fn: Any) -> None:
    step, w, x = compiled_norms(fn), torch.randn(3, dtype=D), torch.randn(N, 3, dtype=D)
    with pytest.warns(psgrad.FallbackWarning, match=r"psgrad\.compile runs per_sample_norms eagerly"):
        first = step(w, x)
    second = step(w, x)
    assert step.cache_info().hits == 0
    assert torch.equal(first, second) == (fn is seeds)


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
def test_a_checkpoint_that_draws_again_is_not_recorded() -> None:
    """Its second forward has to draw what the first drew."""
    model = net(dropout=0.5)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Any:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    fn, params = psgrad.from_module(Outer(), F.cross_entropy)
    step = compiled_norms(fn)
    for _ in range(2):
        torch.manual_seed(1)
        found = step(params, batch_of(N))
        torch.manual_seed(1)
        assert_same(found, psgrad.per_sample_norms(fn, params, batch_of(N)))
    assert step.cache_info().hits == 0


# ---- batches of many sizes -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in QUANTITIES if name not in ("stats", "factored", "weighted")])
def test_batches_of_other_sizes_are_filled_up(name: str) -> None:
    quantity, options = QUANTITIES[name]
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    step = psgrad.compile(quantity, fn, backend="replay", **options)
    for n in (32, 30, 25, 7, 32, 8, 5, 40, 1):
        assert_same(step(params, batch_of(n, n)), quantity(fn, params, batch_of(n, n), **options))
    info = step.cache_info()
    assert (info.hits, info.misses) == (9, 0)
    assert info.graphs <= 7


def test_weights_of_batches_of_other_sizes() -> None:
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    step = psgrad.compile(psgrad.weighted_grad, fn, backend="replay")
    for n in (32, 30, 25):
        weights = torch.randn(n, dtype=D)
        assert_same(step(params, batch_of(n), weights), psgrad.weighted_grad(fn, params, batch_of(n), weights))
    assert (step.cache_info().graphs, step.cache_info().misses) == (1, 0)
    function = psgrad.compile(psgrad.weighted_grad, fn, backend="replay", weights=lambda norms: norms / norms.sum())
    for n in (32, 30):  # it must not see copies
        check(function, params, batch_of(n))


def test_poisson_batches_need_few_graphs() -> None:
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    step = psgrad.compile(psgrad.clipped_grad, fn, backend="replay", max_norm=0.1)
    for n in torch.poisson(torch.full((60,), 64.0), torch.Generator().manual_seed(0)).int().tolist():
        check(step, params, batch_of(n))
    assert step.cache_info().graphs <= 5
    assert step.cache_info().misses == 0


def test_as_many_samples_as_a_layer_has_units() -> None:
    """An axis of a parameter is not taken for the samples'."""
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    step = psgrad.compile(psgrad.per_sample_norms, fn, backend="replay")
    for n in (8, 7, 6, 8):  # the hidden layer has 8 units
        check(step, params, batch_of(n))
    assert step.cache_info().graphs == 1


def test_padded_sizes() -> None:
    assert [padded_size(n) for n in (1, 2, 3, 4, 5, 6, 7, 12, 13, 33, 48, 49)] == [
        1, 2, 3, 4, 6, 6, 8, 12, 16, 48, 48, 64,
    ]  # fmt: skip
    assert all(n <= padded_size(n) <= 1.5 * n for n in range(1, 1000))


@pytest.mark.parametrize("name", ["norms", "clipped", "gram"])
def test_samples_that_are_not_valid(name: str) -> None:
    """From one graph, whichever they are; garbage in them does not matter."""
    quantity, options = QUANTITIES[name]
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    step = psgrad.compile(quantity, fn, backend="replay", **options)
    for seed in range(3):
        x, y = batch_of(6, seed)
        valid = torch.tensor([True, False, True, True, False, True]).roll(seed)
        x[~valid] = torch.nan
        assert_same(step(params, (x, y), valid=valid), quantity(fn, params, (x, y), valid=valid, **options))
    assert (step.cache_info().graphs, step.cache_info().misses) == (1, 0)
    none = torch.zeros(6, dtype=torch.bool)
    assert_same(step(params, batch_of(6), valid=none), quantity(fn, params, batch_of(6), valid=none, **options))


def test_an_empty_batch() -> None:
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    for quantity, options in (QUANTITIES["grads"], QUANTITIES["norms"], QUANTITIES["clipped"], QUANTITIES["gram"]):
        check(psgrad.compile(quantity, fn, backend="replay", **options), params, batch_of(0))


# ---- options ---------------------------------------------------------------------------------------------


def test_options_of_the_quantity() -> None:
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    batch = batch_of(6)
    with_aux = lambda p, s: (fn(p, s), {"x": s[0].sum()})
    for quantity, function, options in [
        (psgrad.per_sample_grads, fn, {"chunk_size": 2}),
        (psgrad.per_sample_grads, with_aux, {"has_aux": True, "return_value": True}),
        (psgrad.per_sample_norms, fn, {"per_param": True}),
        (psgrad.per_sample_norms, with_aux, {"has_aux": True}),
        (psgrad.clipped_grad, fn, {"max_norm": {"0": 0.1, "3": 0.2}}),
        (psgrad.clipped_grad, with_aux, {"max_norm": 0.1, "has_aux": True, "chunk_size": 4}),
        (psgrad.clipped_grad, fn, {"max_norm": 0.1, "max_bytes": "1MB"}),
        (psgrad.clipped_grad, fn, {"max_norm": 0.1, "randomness": "same"}),
        (psgrad.gram, fn, {"other": batch_of(3, 1)}),
        (psgrad.weighted_grad, fn, {"weights": torch.arange(6)}),
        (psgrad.weighted_grad, fn, {"weights": lambda norms: 1 / norms}),
    ]:
        step = psgrad.compile(quantity, function, backend="replay", **options)
        for seed in range(2):
            check(step, params, batch_of(6, seed))
        assert step.cache_info().hits == 2, (quantity, options)
    back = optree.tree_map(lambda t: t.movedim(0, -1), batch)
    check(psgrad.compile(psgrad.per_sample_norms, fn, backend="replay", in_dims=-1), params, back)


def test_a_bound_that_is_a_tensor_is_read_anew() -> None:
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    bound = torch.tensor(0.1, dtype=D)
    step = psgrad.compile(psgrad.clipped_grad, fn, backend="replay", max_norm=bound)
    for _ in range(2):
        check(step, params, batch_of(N))
        bound.mul_(2)
    assert step(params, batch_of(N)).sensitivity == pytest.approx(0.4)
    assert step.cache_info().graphs == 1


def test_arguments_by_position() -> None:
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    step = psgrad.compile(psgrad.clipped_grad, fn, backend="replay")
    assert_same(step(params, batch_of(N), 0.1), psgrad.clipped_grad(fn, params, batch_of(N), 0.1))
    assert_same(step(params, batch_of(N), 0.2), psgrad.clipped_grad(fn, params, batch_of(N), 0.2))


def test_inside_inference_mode_and_no_grad() -> None:
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    step = compiled_norms(fn)
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            found = step(params, batch_of(N))
        assert not found.is_inference()
        assert not found.requires_grad


def test_parameters_that_require_grad() -> None:
    model = net()
    fn, _ = psgrad.from_module(model, F.cross_entropy)
    step = compiled_norms(fn)
    assert not step(dict(model.named_parameters()), batch_of(N)).requires_grad


def test_inside_a_transform_it_is_the_quantity_itself() -> None:
    fn = lambda w, x: (w * x).sum() ** 2
    step = psgrad.compile(psgrad.per_sample_grads, fn, backend="replay")
    w, x = torch.randn(3, dtype=D), torch.randn(N, 3, dtype=D)
    wanted = torch.func.jacrev(lambda w: psgrad.per_sample_grads(fn, w, x))(w)
    torch.testing.assert_close(torch.func.jacrev(lambda w: step(w, x))(w), wanted)


# ---- mistakes, and what is remembered --------------------------------------------------------------------


def test_mistakes() -> None:
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    for make, kind, message in [
        (
            lambda: psgrad.compile(psgrad.explain, fn),
            TypeError,
            "explain is not a quantity that can be compiled\n  give one of psgrad.per_sample_grads, "
            "psgrad.per_sample_norms, psgrad.clipped_grad, psgrad.weighted_grad, psgrad.gram, psgrad.grad_stats, "
            "psgrad.factored_grads, psgrad.per_sample_dots, psgrad.projected_grads, psgrad.kron_factors, "
            "psgrad.per_sample_jacobians, psgrad.ntk.",
        ),
        (
            lambda: psgrad.compile(psgrad.clipped_grad(fn, params, batch_of(N), 1.0), fn),  # type: ignore[arg-type]
            TypeError,
            "a ClippedGrad is not a quantity that can be compiled\n  give one of psgrad.per_sample_grads, "
            "psgrad.per_sample_norms, psgrad.clipped_grad, psgrad.weighted_grad, psgrad.gram, psgrad.grad_stats, "
            "psgrad.factored_grads, psgrad.per_sample_dots, psgrad.projected_grads, psgrad.kron_factors, "
            "psgrad.per_sample_jacobians, psgrad.ntk.",
        ),
        (
            lambda: psgrad.compile(psgrad.gram, 3),
            TypeError,
            "fn is a int, not a function\n  give fn(params, sample) -> loss.",
        ),
        (
            lambda: psgrad.compile(psgrad.gram, fn, backend="jit"),  # type: ignore[arg-type]
            ValueError,
            'backend=\'jit\' is not one of "auto", "inductor", "replay"\n  say one of them.',
        ),
        (
            lambda: psgrad.compile(psgrad.per_sample_grads, fn, out={}, progress=True),
            ValueError,
            "out= does not go with psgrad.compile\n  call the quantity itself for that.",
        ),
        (
            lambda: psgrad.compile(psgrad.clipped_grad, fn, group=object()),
            ValueError,
            "group= does not go with psgrad.compile\n  call the quantity itself for that.",
        ),
    ]:
        with pytest.raises(kind) as error:
            make()
        assert isinstance(error.value, psgrad.PsgradError)
        assert str(error.value) == message
    step = psgrad.compile(psgrad.clipped_grad, fn, backend="replay", max_norm=-1.0)
    with pytest.raises(psgrad.ArgumentError, match=r"max_norm=-1\.0 is not positive"):
        step(params, batch_of(N))
    with pytest.raises(psgrad.ArgumentError, match="disagree on the number of samples"):
        compiled_norms(fn)(params, (torch.randn(4, 6, dtype=D), torch.zeros(5, dtype=torch.long)))


def test_errors_of_fn_are_its_own() -> None:
    def fn(w: Tensor, x: Tensor) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), warnings.catch_warnings():
        warnings.simplefilter("ignore", psgrad.FallbackWarning)
        compiled_norms(fn)(torch.ones(3), torch.ones(N, 3))


def test_the_cache_is_bounded_and_can_be_cleared() -> None:
    step, w = compiled_norms(lambda w, x: (w * x).sum() ** 2), torch.ones(1)
    for size in range(70):
        step(w, torch.ones(1, 1 + size))
    info = step.cache_info()
    assert info.graphs <= 64
    assert info.seconds > 0
    step.clear()
    assert step.cache_info() == (0, 0, 0, (), 0.0)
    check(step, w, torch.ones(2, 3))
    assert repr(step).startswith("psgrad.compile(per_sample_norms, ")


def test_what_changes_at_every_call_is_named() -> None:
    count = [0]

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return (w * x).sum() ** 2 * count[0]

    step, w, x = compiled_norms(fn), torch.randn(3, dtype=D), torch.randn(N, 3, dtype=D)

    def many() -> None:
        for i in range(12):
            count[0] = i + 1
            check(step, w, x)

    with pytest.warns(psgrad.FallbackWarning, match="a list, which fn reads, changes from call to call"):
        many()


def test_many_failures_in_a_row_end_in_eager_calls() -> None:
    fn = lambda w, x: (w * x).sum() * x[0].item()
    step, w = compiled_norms(fn), torch.randn(3, dtype=D)

    def many() -> None:
        for i in range(12):
            x = torch.randn(N, 3, dtype=D)
            x[:, 0] = i + 1
            check(step, w, x)

    with pytest.warns(psgrad.FallbackWarning, match="did not hold for many calls in a row"):
        many()
    assert step.cache_info().graphs == 0


def test_two_threads() -> None:
    from concurrent.futures import ThreadPoolExecutor

    fn, params = psgrad.from_module(net(), F.cross_entropy)
    step = compiled_norms(fn)
    batches = [batch_of(n, n) for n in (5, 9, 5, 12, 9, 5)]
    wanted = [psgrad.per_sample_norms(fn, params, batch) for batch in batches]
    with ThreadPoolExecutor(3) as pool:
        for found, right in zip(pool.map(lambda batch: step(params, batch), batches), wanted, strict=True):
            torch.testing.assert_close(found, right)


def test_importing_psgrad_loads_no_compiler() -> None:
    code = "import sys, psgrad; assert 'torch._inductor' not in sys.modules and 'torch._dynamo' not in sys.modules"
    root = Path(__file__).resolve().parent.parent
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_surroundings_stop_at_libraries_and_circles() -> None:
    circle: list[Any] = []
    circle.append(circle)
    fn = lambda w, x: (w * x).sum() * len(circle) * torch.pi
    around = Surroundings(fn)
    assert around.are_same()
    circle.append(1)
    assert not around.are_same()


# ---- in one graph with the rest of somebody's function ---------------------------------------------------


class Ops:
    """A backend that keeps the ops of the graphs that it is given, and runs them."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def keep(graph: Any, inputs: Any) -> Any:
            self.graphs.append(graphs.ops_of(graph))
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=keep)(graph, inputs)


def in_one_graph(function: Callable[..., Any], backend: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    compiled: Callable[..., Any] = torch.compile(function, fullgraph=True, backend=backend)
    return compiled


def test_a_training_step_is_one_graph_with_the_rules_in_it() -> None:
    """A clipped gradient, noise, an update: no break, one graph, no bmm for the linear layers, norms as products."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    clipped = psgrad.compile(psgrad.clipped_grad, fn, max_norm=0.3)

    def step(params: Any, momentum: Any, noise: Any, x: Tensor, y: Tensor) -> Any:
        found = clipped(params, (x, y))
        momentum = {k: 0.9 * m + found.grad[k] / found.count + noise[k] for k, m in momentum.items()}
        return {k: p - 0.1 * momentum[k] for k, p in params.items()}, momentum, found.norms.mean()

    zeros, ops = optree.tree_map(torch.zeros_like, params), Ops()
    noise = optree.tree_map(lambda p: 0.01 * torch.randn_like(p), params)
    compiled = in_one_graph(step, ops)
    for seed in range(2):
        given = params, zeros, noise, *batch_of(N, seed)
        assert_same(compiled(*given), step(*given))
    (names,) = ops.graphs
    assert names.count("aten.addmm.default") == 2
    assert not [name for name in names if "bmm" in name]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", [name for name in QUANTITIES if name != "factored"])
def test_every_quantity_in_one_graph(name: str, backend: str) -> None:
    quantity, options = QUANTITIES[name]
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    made = psgrad.compile(quantity, fn, **options)
    compiled = in_one_graph(lambda params, x, y: made(params, (x, y)), backend)
    for seed in range(2):
        found = compiled(params, *batch_of(N, seed))
        assert_same(found, quantity(fn, params, batch_of(N, seed), **options))


def test_inductor_in_one_graph() -> None:
    if not has_compiler():
        pytest.skip("no C++ compiler")
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    made = psgrad.compile(psgrad.clipped_grad, fn, max_norm=0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled = in_one_graph(lambda params, x, y: made(params, (x, y)), "inductor")
        assert_same(compiled(params, *batch_of(N)), psgrad.clipped_grad(fn, params, batch_of(N), 0.3))


def test_samples_that_are_not_finite_in_one_graph() -> None:
    """An error when it runs; left out; let through."""
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    x, y = batch_of(N)
    x[2] = torch.nan
    made = psgrad.compile(psgrad.clipped_grad, fn, max_norm=0.3)
    compiled = in_one_graph(lambda params, x, y: made(params, (x, y)).grad, "aot_eager")
    compiled(params, *batch_of(N))
    with pytest.raises(RuntimeError, match="the gradients of a sample are not finite"):
        compiled(params, x, y)
    for how in ("zero", "propagate"):
        other = psgrad.compile(psgrad.clipped_grad, fn, max_norm=0.3, nonfinite=how)
        compiled = in_one_graph(lambda params, x, y, other=other: other(params, (x, y)), "aot_eager")
        found, wanted = compiled(params, x, y), psgrad.clipped_grad(fn, params, (x, y), 0.3, nonfinite=how)
        assert_same(found.grad, wanted.grad)
        assert int(found.count) == wanted.count


def test_valid_samples_and_zero_weights_in_one_graph() -> None:
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    x, y = batch_of(N)
    x[1] = torch.nan
    valid = torch.tensor([True, False, True, True])
    clipped = psgrad.compile(psgrad.clipped_grad, fn, max_norm=0.3)
    weighted = psgrad.compile(psgrad.weighted_grad, fn)
    compiled = in_one_graph(
        lambda params, x, y, valid: (clipped(params, (x, y), valid=valid).grad, weighted(params, (x, y), valid * 2.0)),
        "aot_eager",
    )
    wanted = psgrad.clipped_grad(fn, params, (x, y), 0.3, valid=valid).grad
    assert_same(compiled(params, x, y, valid), (wanted, psgrad.weighted_grad(fn, params, (x, y), valid * 2.0)))


def test_what_fn_closes_over_is_read_anew_in_one_graph() -> None:
    """Buffers and tensors in closures, changed in place; another buffer; another mode of the model."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(1.0), nn.Linear(4, 3)).double().eval()
    of_model, params = psgrad.from_module(model, F.cross_entropy)
    scale = torch.tensor(2.0, dtype=D)

    def fn(params: Any, sample: Any) -> Tensor:
        return of_model(params, sample) * scale

    made = psgrad.compile(psgrad.per_sample_norms, fn)
    compiled = in_one_graph(lambda params, x, y: made(params, (x, y)), "aot_eager")

    def same() -> None:
        torch.testing.assert_close(compiled(params, *batch_of(N)), psgrad.per_sample_norms(fn, params, batch_of(N)))

    same()
    statistics: Any = model[1]
    statistics.running_mean += 1
    scale.mul_(3)
    same()
    statistics.running_mean = torch.randn(4, dtype=D)
    same()
    model[2].train()  # drops everything
    same()
    assert not compiled(params, *batch_of(N)).equal(psgrad.per_sample_norms(of_model, params, batch_of(N)))


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
def test_what_cannot_be_in_one_graph_breaks_it() -> None:
    """Results with factors, aux, samples that run one by one or part ways: right, outside of the graph."""
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    parting = lambda w, x: (w * x).sum() ** 2 if x.sum() > 0 else (w * x).sum() ** 3
    w, x = torch.randn(3, dtype=D), torch.randn(8, 3, dtype=D)
    for quantity, function, options, given in [
        (psgrad.factored_grads, fn, {}, (params, batch_of(N))),
        (psgrad.per_sample_norms, lambda p, s: (fn(p, s), s[0].sum()), {"has_aux": True}, (params, batch_of(N))),
        (psgrad.per_sample_norms, seeds, {}, (w, x)),
        (psgrad.per_sample_norms, parting, {}, (w, x)),
    ]:
        made = psgrad.compile(quantity, function, backend="replay", **options)
        torch._dynamo.reset()
        compiled = torch.compile(lambda params, batch, made=made: made(params, batch), backend="aot_eager")
        for _ in range(2):
            assert_same(compiled(*given), quantity(function, *given, **options))


def test_a_number_that_fn_asks_of_a_shared_tensor() -> None:
    limit = torch.tensor(2.0, dtype=D)
    fn = lambda w, x: (w * x).sum() ** int(limit) * (3 if limit > 1 else 1) + torch.zeros(limit.long()).sum()
    step, w, x = compiled_norms(fn), torch.randn(3, dtype=D), torch.randn(N, 3, dtype=D)
    for value, hits in ((2.0, 1), (2.0, 2), (3.0, 2), (3.0, 2), (3.0, 3)):
        limit.fill_(value)
        check(step, w, x)
        assert step.cache_info().hits == hits


def test_zero_and_minus_zero_are_two_answers() -> None:
    fn = lambda w, x: (w * x).sum() * (1.0 if str(x[0].item()) == "0.0" else 2.0)
    step, w, x = compiled_norms(fn), torch.randn(3, dtype=D), torch.randn(N, 3, dtype=D)
    for zero in (0.0, -0.0, 0.0):
        x[:, 0] = zero
        check(step, w, x)
    assert step.cache_info().hits == 2


# ---- what a reviewer found stale -------------------------------------------------------------------------


class _Slotted:
    __slots__ = ("k",)


class _Holder:
    k: Any = 2.0

    def scaled(self, y: Tensor) -> Tensor:
        return y * self.k * FACTOR

    @property
    def twice(self) -> Any:
        return 2 * self.k


class _Calling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def helper(self, y: Tensor) -> Tensor:
        return y * FACTOR

    def forward(self, x: Tensor) -> Tensor:
        return self.helper(self.layer(x))


FACTOR: Any = 1.0


def _with_default(w: Tensor, x: Tensor, k: float = 2.0) -> Tensor:
    return (w * x).sum() ** 2 * k


def test_state_in_every_place_that_fn_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes of modules of Python, classes, slots, properties; globals of methods; defaults; arrays; -0.0."""
    import numpy as np

    settings, slotted, holder, values = types.ModuleType("settings"), _Slotted(), _Holder(), np.array([2.0])
    settings.k = slotted.k = 2.0  # type: ignore[attr-defined]
    zero, numbers = [0.0], {1, 2}
    places: list[tuple[Any, Callable[[], None]]] = [
        (lambda w, x: (w * x).sum() ** 2 * settings.k, lambda: setattr(settings, "k", 3.0)),
        (lambda w, x: (w * x).sum() ** 2 * slotted.k, lambda: setattr(slotted, "k", 3.0)),
        (lambda w, x: holder.scaled((w * x).sum() ** 2), lambda: monkeypatch.setattr(_Holder, "k", 3.0)),
        (lambda w, x: (w * x).sum() ** 2 * holder.twice, lambda: monkeypatch.setattr(_Holder, "k", 4.0)),
        (lambda w, x: holder.scaled((w * x).sum() ** 2), lambda: monkeypatch.setitem(globals(), "FACTOR", 5.0)),
        (_with_default, lambda: monkeypatch.setattr(_with_default, "__defaults__", (3.0,))),
        (lambda w, x: (w * x).sum() ** 2 * float(values[0]), lambda: values.__setitem__(0, 3.0)),
        (lambda w, x: (w * x).sum() ** 2 * len(numbers), lambda: numbers.add(3)),
        (lambda w, x: (w * x).sum() * (2 if str(zero[0]) == "0.0" else 3), lambda: zero.__setitem__(0, -0.0)),
    ]
    w, x = torch.randn(3, dtype=D), torch.randn(N, 3, dtype=D)
    for fn, change in places:
        step = compiled_norms(fn)
        before = step(w, x)
        change()
        check(step, w, x)
        assert not torch.allclose(step(w, x), before)
    model = _Calling().double()
    fn, params = psgrad.from_module(model, lambda y, _: y.sum() ** 2)
    step = compiled_norms(fn)
    before = step(params, (x, x))
    monkeypatch.setitem(globals(), "FACTOR", 7.0)
    check(step, params, (x, x))
    assert not torch.allclose(step(params, (x, x)), before)


class _Inheriting(_Holder):
    pass


class _Scaler:
    def __call__(self, y: Tensor) -> Tensor:
        return y * FACTOR


class _Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y * FACTOR

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent * FACTOR


def _importing(w: Tensor, x: Tensor) -> Tensor:
    from imported_late import k  # type: ignore[import-not-found]

    return (w * x).sum() ** 2 * k


@pytest.mark.filterwarnings("ignore:psgrad runs a part of fn in a loop")
def test_state_in_places_that_are_hard_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues, and numbers in them that die; imports while fn runs; classes that fn makes objects of, and what these
    inherit; names that are words; attributes of tensors; distributions."""
    queue, nested, t = deque([float("2")]), deque([{"k": 2.0}]), torch.ones((), dtype=D)
    normal = torch.distributions.Normal(torch.zeros((), dtype=D), torch.ones((), dtype=D))
    t.k = 2.0  # type: ignore[attr-defined]
    module = types.ModuleType("imported_late")
    module.k = 2.0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "imported_late", module)

    def another_number() -> None:
        queue.pop()
        queue.append(float("3"))  # where the other one was

    places: list[tuple[Any, Callable[[], None]]] = [
        (lambda w, x: (w * x).sum() ** 2 * queue[0], another_number),
        (lambda w, x: (w * x).sum() ** 2 * nested[0]["k"], lambda: nested[0].update(k=3.0)),
        (_importing, lambda: setattr(module, "k", 3.0)),
        (_importing, lambda: monkeypatch.setitem(sys.modules, "imported_late", types.SimpleNamespace(k=4.0))),
        (lambda w, x: _Scaler()((w * x).sum() ** 2), lambda: monkeypatch.setitem(globals(), "FACTOR", 3.0)),
        (lambda w, x: _Scaling.apply((w * x).sum() ** 2), lambda: monkeypatch.setitem(globals(), "FACTOR", 4.0)),
        (lambda w, x: (w * x).sum() ** 2 * _Inheriting.k, lambda: monkeypatch.setattr(_Holder, "k", 3.0)),
        (lambda w, x: (w * x).sum() ** 2 * getattr(_Holder, "k"), lambda: monkeypatch.setattr(_Holder, "k", 4.0)),  # noqa: B009
        (lambda w, x: (w * x * t).sum() ** 2 * t.k, lambda: setattr(t, "k", 3.0)),
        (lambda w, x: normal.log_prob((w * x).sum()), lambda: setattr(normal, "scale", 3 * t)),
    ]
    w, x = torch.randn(3, dtype=D), torch.randn(N, 3, dtype=D)
    for fn, change in places:
        step = compiled_norms(fn)
        before = step(w, x)
        change()
        check(step, w, x)
        assert not torch.allclose(step(w, x), before)
        assert step.cache_info()[:3] == (3, 0, 2)


def test_what_a_thread_has_for_itself() -> None:
    own, found = threading.local(), []
    own.k = 2.0
    step = compiled_norms(lambda w, x: (w * x).sum() ** 2 * own.k)
    w, x = torch.randn(3, dtype=D), torch.randn(N, 3, dtype=D)
    before = step(w, x)

    def other() -> None:
        own.k = 3.0
        found.append(step(w, x))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert_same(found[0], before * 1.5)
    assert_same(step(w, x), before)


def test_a_variable_that_loses_its_value() -> None:
    def made() -> tuple[Any, Any]:
        scale = 2.0

        def fn(w: Tensor, x: Tensor) -> Tensor:
            try:
                return (w * x).sum() * scale
            except NameError:
                return (w * x).sum()

        def drop() -> None:
            nonlocal scale
            del scale

        return fn, drop

    fn, drop = made()
    step, w, x = compiled_norms(fn), torch.randn(3, dtype=D), torch.randn(4, 3, dtype=D)
    check(step, w, x)
    drop()
    check(step, w, x)
    assert step.cache_info()[:3] == (2, 0, 2)


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
def test_a_closed_over_tensor_that_is_written_to_by_name_is_not_recorded() -> None:
    buffer = torch.zeros(3, dtype=D)
    step = compiled_norms(lambda w, x: (w * x * torch.add(buffer, 1, out=buffer)).sum())
    step(torch.ones(3, dtype=D), torch.ones(N, 3, dtype=D))
    assert step.cache_info()[:3] == (0, 1, 0)


def test_negated_views_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code would read their memory, where the numbers have another sign."""
    monkeypatch.setattr(graphs, "missing_compiler", lambda: None)
    monkeypatch.setattr(graphs, "compile_graph", lambda graph, *_: graphs.replay(graph))
    step = psgrad.compile(psgrad.per_sample_norms, lambda w, x: (w * x).sum() ** 2, backend="inductor")
    w, z = torch.randn(3, dtype=D), torch.randn(N, 3, dtype=torch.complex128)
    for x in (z.imag, z.conj().imag):
        check(step, w, x)
    assert step.cache_info()[:4] == (2, 0, 2, ("inductor", "replay"))


@pytest.mark.filterwarnings("ignore:psgrad runs a part of fn in a loop", "ignore:Converting a tensor")
def test_a_number_that_is_asked_for_where_no_mode_sees_it() -> None:
    t = torch.tensor(2.0, dtype=D)

    class Scaling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            return y * float(t)

        @staticmethod
        def backward(ctx: Any, cotangent: Tensor) -> Tensor:
            return cotangent * float(t)

    for fn in (
        lambda w, x: Scaling.apply((w * x).sum() ** 2),
        lambda w, x: (w * x).sum() * torch.func.grad(lambda t: t**2 * float(t))(t),
    ):
        step, w, x = compiled_norms(fn), torch.randn(3, dtype=D), torch.randn(N, 3, dtype=D)
        for value, hits in ((2.0, 1), (2.0, 2), (3.0, 2), (2.0, 3)):
            t.fill_(value)
            check(step, w, x)
            assert step.cache_info().hits == hits


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_modules_of_torch_jit_are_not_recorded() -> None:
    model = torch.jit.script(nn.BatchNorm1d(3).double().eval())
    step = compiled_norms(lambda w, x: (w * model(x[None])[0]).sum())
    w, x = torch.randn(3, dtype=D), torch.randn(N, 3, dtype=D)
    with pytest.warns(psgrad.FallbackWarning, match="torch.jit"):
        check(step, w, x)
    model.running_mean = torch.ones(3, dtype=D)
    check(step, w, x)
    assert step.cache_info()[:3] == (0, 2, 0)


def test_weighing_that_fails_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        torch.rand(3)
        raise RuntimeError("no")

    monkeypatch.setattr(recording, "_ready", fail)
    step = compiled_norms(lambda w, x: F.dropout(w * x).sum() ** 2)
    w, x = torch.randn(3, dtype=D), torch.randn(N, 3, dtype=D)
    torch.manual_seed(0)
    with pytest.warns(psgrad.FallbackWarning, match="RuntimeError: no"):
        found = step(w, x)
    torch.manual_seed(0)
    assert_same(found, psgrad.per_sample_norms(step.fn, w, x))


READERS: dict[str, Callable[..., Tensor]] = {
    "numpy": lambda y, t: y * float(t.numpy()),
    "full": lambda y, t: y * torch.full((1,), t)[0],
    "tensor": lambda y, t: y * torch.tensor([t, 1.0])[0],
    "equal": lambda y, t: y * (2.0 if torch.equal(t, torch.full_like(t, 2.0)) else 3.0),
    "slice": lambda y, t: y * torch.ones(4)[: t.long()].sum(),
    "nonzero": lambda y, t: y * (torch.arange(4) < t).nonzero().shape[0],
    "mask": lambda y, t: y * torch.arange(4.0)[torch.arange(4) < t].mean(),
}


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
@pytest.mark.parametrize("name", READERS)
def test_values_that_python_comes_by_in_other_ways(name: str) -> None:
    t = torch.tensor(2.0, dtype=D)
    fn = lambda w, x: READERS[name]((w * x).sum() ** 2, t)
    step, w, x = compiled_norms(fn), torch.randn(3, dtype=D), torch.randn(N, 3, dtype=D)
    check(step, w, x)
    t.fill_(3.0)
    check(step, w, x)


def test_sizes_that_follow_from_parameters() -> None:
    fn = lambda w, x: (w * x)[w != 0].mean()
    step, x = psgrad.compile(psgrad.per_sample_grads, fn, backend="replay"), torch.ones(N, 3)
    with pytest.warns(psgrad.FallbackWarning, match="the sizes that .* gives depend on values"):
        step(torch.tensor([1.0, 0.0, 0.0]), x)
    check(step, torch.tensor([1.0, 2.0, 0.0]), x)


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
def test_functions_among_the_options_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    fn = lambda w, x: (w * x).sum() ** 2
    w, x = torch.randn(3, dtype=D), torch.randn(N, 3, dtype=D)
    step = psgrad.compile(psgrad.weighted_grad, fn, backend="replay", weights=lambda n: FACTOR * torch.ones_like(n))
    check(step, w, x)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    check(step, w, x)
    assert step.cache_info().hits == 2
    for reading in (lambda n: torch.tensor(n.tolist()), lambda n: torch.from_numpy(n.numpy())):
        other = psgrad.compile(psgrad.weighted_grad, fn, backend="replay", weights=reading)
        check(other, w, x)
        check(other, w, 2 * x)
        assert other.cache_info().hits == 0
    late = psgrad.compile(psgrad.weighted_grad, fn, backend="replay")
    assert_same(late(w, x, lambda n: n), psgrad.weighted_grad(fn, w, x, lambda n: n))
    assert late.cache_info().hits == 0


@pytest.mark.parametrize("backend", ["replay", "inductor"])
def test_a_closed_over_tensor_that_is_cast(backend: Any) -> None:
    if backend == "inductor" and not has_compiler():
        pytest.skip("no C++ compiler")
    table = nn.Embedding(7, 3)
    fn = lambda w, i: (w * table(i).float()).sum() ** 2
    step = psgrad.compile(psgrad.per_sample_norms, fn, backend=backend)
    w, i = torch.randn(3), torch.arange(N)
    check(step, w, i)
    table.half()
    check(step, w, i)


def test_a_call_that_no_graph_was_good_for_draws_what_the_eager_one_draws() -> None:
    fn = lambda w, x: (w * x).sum() if torch.rand(()) > 0.5 else 2 * (w * x).sum()
    step = compiled_norms(fn, randomness="same")
    for seed in range(40):
        torch.manual_seed(seed)
        found = step(torch.ones(1), torch.ones(1, 1))
        torch.manual_seed(seed)
        assert_same(found, psgrad.per_sample_norms(fn, torch.ones(1), torch.ones(1, 1), randomness="same"))
    assert step.cache_info().hits > 30


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
def test_generators_and_iterators_are_not_recorded() -> None:
    import numpy as np

    python, of_numpy, numbers = random.Random(0), np.random.default_rng(0), iter(range(100))
    w, x = torch.randn(3, dtype=D), torch.randn(N, 3, dtype=D)
    for draw in (python.random, lambda: of_numpy.random(), lambda: next(numbers) + 1):
        step = compiled_norms(lambda w, x, draw=draw: (w * x).sum() ** 2 * draw())
        assert not torch.allclose(step(w, x), step(w, x))
        assert step.cache_info().hits == 0


def test_files_that_loggers_hold_do_not_matter() -> None:
    """sys.stderr is an iterator over lines; models of transformers reach it by their loggers."""
    handler = logging.StreamHandler(sys.stderr)
    w, x = torch.randn(3, dtype=D), torch.randn(N, 3, dtype=D)

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return (w * x).sum() ** 2 * (1.0 if handler.stream is not None else 2.0)

    @contextlib.contextmanager
    def nothing() -> Any:
        yield

    fn = nothing()(fn)  # a decorator of theirs, which holds a generator
    step = compiled_norms(fn)
    assert_same(step(w, x), psgrad.per_sample_norms(fn, w, x))
    assert step.cache_info().hits == 1


def test_arguments_that_do_not_fit_are_told_before_anything_is_recorded() -> None:
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    with pytest.raises(psgrad.ArgumentTypeError) as error:
        psgrad.compile(psgrad.clipped_grad, fn, max_grad_norm=1.0)
    assert str(error.value) == (
        "clipped_grad got an unexpected keyword argument 'max_grad_norm'\n"
        "  give options of psgrad.clipped_grad, or backend=."
    )
    step = psgrad.compile(psgrad.clipped_grad, fn, backend="replay")
    with pytest.raises(psgrad.ArgumentTypeError) as error:
        step(params, batch_of(N))
    assert str(error.value) == (
        "clipped_grad missing a required argument: 'max_norm'\n"
        "  give what psgrad.clipped_grad takes, to psgrad.compile or to the call."
    )
    with pytest.raises(psgrad.ArgumentTypeError) as error:
        step(fn, params, batch_of(N))
    assert str(error.value) == ("params is fn, which psgrad.compile was given already\n  call it with (params, batch).")


@pytest.mark.parametrize("backend", ["replay", "inductor"])
def test_a_target_that_is_no_class_is_refused(backend: Any) -> None:
    if backend == "inductor" and not has_compiler():
        pytest.skip("no C++ compiler")
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    step = psgrad.compile(psgrad.per_sample_norms, fn, backend=backend)
    x, y = batch_of(N)
    check(step, params, (x, y))
    y[1] = 3
    with pytest.raises((IndexError, RuntimeError)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        psgrad.per_sample_norms(fn, params, (x, y))
    with pytest.raises((IndexError, RuntimeError)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(params, (x, y))


def test_errors_name_the_sizes_that_were_given() -> None:
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    step = psgrad.compile(psgrad.clipped_grad, fn, backend="replay", max_norm=1.0)
    step(params, batch_of(8))
    with pytest.raises(psgrad.ArgumentError, match=r"valid is .*\(8,\), not a tensor of booleans of shape \(7,\)"):
        step(params, batch_of(7), valid=torch.ones(8, dtype=torch.bool))


def test_a_rebound_closure_in_one_graph() -> None:
    scale = torch.tensor(2.0, dtype=D)

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return (w * x).sum() ** 2 * scale

    made = psgrad.compile(psgrad.per_sample_norms, fn)
    scale = torch.tensor(7.0, dtype=D)
    compiled = in_one_graph(lambda w, x: made(w, x), "aot_eager")
    w, x = torch.randn(3, dtype=D), torch.randn(N, 3, dtype=D)
    for value in (7.0, 3.0):
        scale = torch.tensor(value, dtype=D)
        torch.testing.assert_close(compiled(w, x), psgrad.per_sample_norms(fn, w, x))


def test_a_bound_that_is_a_tensor_breaks_the_graph() -> None:
    """Its sensitivity is a number, which a graph has not."""
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    made = psgrad.compile(psgrad.clipped_grad, fn, backend="replay", max_norm=torch.tensor(0.3, dtype=D))
    torch._dynamo.reset()
    compiled = torch.compile(lambda params, x, y: made(params, (x, y)), backend="aot_eager")
    assert compiled(params, *batch_of(N)).sensitivity == pytest.approx(0.3)


def test_warning_points_at_the_call() -> None:
    """Wherever in psgrad it was found out."""
    step = psgrad.compile(
        psgrad.per_sample_norms, lambda w, x: (w * x).sum() if x[0] > 0 else w.sum(), backend="replay"
    )
    with pytest.warns(psgrad.FallbackWarning, match="samples part ways") as found:
        step(torch.ones(2), torch.tensor([[1.0, 2.0], [-1.0, 2.0]]))
    assert {warning.filename for warning in found} == {__file__}


def test_too_many_arguments_are_refused() -> None:
    """What the eager call takes by name alone is taken by name alone."""
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    with pytest.raises(TypeError, match="positional argument"):
        compiled_norms(fn)(params, batch_of(N), True)
    with pytest.raises(TypeError, match="positional argument"):
        psgrad.compile(psgrad.clipped_grad, fn, backend="replay")(params, batch_of(N), 1.0, None)
    ones = torch.ones(N)
    with pytest.raises(TypeError, match="multiple values"):
        psgrad.compile(psgrad.weighted_grad, fn, backend="replay")(params, batch_of(N), ones, weights=2 * ones)


def test_what_weights_close_over_is_read_anew_in_one_graph() -> None:
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    scale = torch.tensor(2.0, dtype=D)
    weights = lambda norms: scale * torch.ones_like(norms)
    made = psgrad.compile(psgrad.weighted_grad, fn, weights=weights)
    compiled = in_one_graph(lambda params, x, y: made(params, (x, y)), "aot_eager")
    for _ in range(2):
        assert_same(compiled(params, *batch_of(N)), psgrad.weighted_grad(fn, params, batch_of(N), weights))
        scale.mul_(3)


# ---- what a hunter of stale graphs found ---------------------------------------------------------------------


def in_turn(h: Tensor, others: Any) -> Tensor:
    """A number that depends on the order of `others`."""
    return functools.reduce(lambda h, t: torch.tanh(h * t) + t, others, h).sum()


def test_the_order_of_dicts_counts() -> None:
    a, b, x = torch.randn(3, 3, dtype=D)
    fn = lambda p, s: in_turn(s["x"], p.values()) + in_turn(p["a"], s.values())
    step = compiled_norms(fn)
    params, batch = {"a": a, "b": b}, {"x": x.expand(4, 3).clone(), "y": torch.randn(4, 3, dtype=D)}
    turned = lambda tree: dict(reversed(tree.items()))
    for given in ((params, batch), (turned(params), batch), (params, turned(batch)), (params, batch)):
        check(step, *given)
    nested = compiled_norms(lambda p, s: in_turn(s, p[0]["inner"].values()))
    check(nested, [{"inner": params}], batch["x"])
    check(nested, [{"inner": turned(params)}], batch["x"])
    assert step.cache_info()[:3] == (4, 0, 3)


class _Gained(nn.Module):
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gain


def _scaled(w: Tensor) -> Tensor:
    return w * _scaled.factor  # type: ignore[attr-defined,no-any-return]


def test_state_that_comes_to_be_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an instance or a class, in place of a method, behind a cache, in a variable that had no value."""
    model = _Gained()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    step, batch = compiled_norms(fn), batch_of(4)
    check(step, params, batch)
    with monkeypatch.context() as changed:
        changed.setattr(model, "gain", 5.0, raising=False)
        check(step, params, batch)
    with monkeypatch.context() as changed:
        changed.setattr(_Gained, "forward", lambda self, x: self.layer(x) * 7)
        check(step, params, batch)
    vars(model)["forward"] = lambda x: model.layer(x) * 9
    check(step, params, batch)
    del vars(model)["forward"]
    hook = nn.modules.module.register_module_forward_hook(lambda module, given, found: found * 3)
    try:
        check(step, params, batch)
    finally:
        hook.remove()
    check(step, params, batch)
    assert step.cache_info()[:3] == (6, 0, 5)

    w, x = torch.randn(3, dtype=D), torch.randn(4, 3, dtype=D)
    _scaled.factor = 2.0  # type: ignore[attr-defined]
    cached = functools.lru_cache(lambda w: _scaled(w))
    step = compiled_norms(lambda w, x: (cached(w) * x).sum() + abs((w * x).sum()))
    check(step, w, x)
    monkeypatch.setitem(globals(), "abs", lambda t: t * 2)
    check(step, w, x)
    assert step.cache_info()[:3] == (2, 0, 2)


def test_a_variable_that_gets_a_value_later() -> None:
    def made() -> tuple[Any, Any]:
        if os.environ.get("PSGRAD_NEVER"):
            scale = 1.0

        def fn(w: Tensor, x: Tensor) -> Tensor:
            try:
                return (w * x).sum() * scale
            except NameError:
                return (w * x).sum()

        def set_scale(value: float) -> None:
            nonlocal scale
            scale = value

        return fn, set_scale

    fn, set_scale = made()
    step, w, x = compiled_norms(fn), torch.randn(3, dtype=D), torch.randn(4, 3, dtype=D)
    check(step, w, x)
    set_scale(5.0)
    check(step, w, x)
    assert step.cache_info()[:3] == (2, 0, 2)


class _Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func in (torch.sin, Tensor.sin) else found


@pytest.mark.parametrize("backend", ["replay", "inductor"])
def test_tangents_of_the_caller(backend: Any) -> None:
    """Compiled code would drop them without a word."""
    if backend == "inductor" and not has_compiler():
        pytest.skip("no C++ compiler")
    w, x = torch.randn(4), torch.randn(3, 4)
    step = psgrad.compile(psgrad.per_sample_grads, lambda w, x: (x * w).sum().square(), backend=backend)
    step(w, x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(w, torch.ones(4))
        tangent = torch.autograd.forward_ad.unpack_dual(step(dual, x)).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent, 2 * x.sum(1, keepdim=True) * x)


def test_modes_of_the_caller() -> None:
    step, w, x = compiled_norms(lambda w, x: (w * x.sin()).sum()), torch.randn(3, dtype=D), torch.randn(4, 3, dtype=D)
    check(step, w, x)
    with _Doubling():
        check(step, w, x)
    with torch.device("cpu"):  # a default device is a mode, too, and another graph
        check(step, w, x)
    assert step.cache_info()[:3] == (2, 0, 2)


def test_results_may_be_written_to() -> None:
    """A graph makes its results anew, those that are always the same too."""
    params = {"w": torch.randn(3, dtype=D), "unused": torch.randn(2, dtype=D)}
    x, fn = torch.randn(4, 3, dtype=D), lambda p, s: (p["w"] * s).sum()
    for backend in ("replay", "inductor") if has_compiler() else ("replay",):
        step = psgrad.compile(psgrad.per_sample_grads, fn, backend=backend)
        for _ in range(2):
            found = step(params, x)
            assert_same(found, psgrad.per_sample_grads(fn, params, x))
            optree.tree_map(lambda t: t.fill_(7.0), found)


def test_eager_calls_stay_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    seconds = {"eager": 1.0}

    def least_seconds(contenders: Any, *_: Any) -> dict[str, float]:
        asked.append(list(contenders))
        for run in contenders.values():
            run()
        return {name: seconds[name] for name in contenders}

    monkeypatch.setattr(recording, "_least_seconds", least_seconds)
    monkeypatch.setattr(graphs, "missing_compiler", lambda: "there is none")
    fn, params = psgrad.from_module(net(), F.cross_entropy)
    for seconds["replay"], backend in ((1e-4, "replay"), (0.9, "replay"), (1.1, "eager")):
        step = psgrad.compile(psgrad.clipped_grad, fn, max_norm=0.5)
        for n in (8, 8, 7):
            check(step, params, batch_of(n))
        info = step.cache_info()
        assert set(info.backends) == {backend}
        assert (info.hits, info.misses) == ((0, 3) if backend == "eager" else (3, 0))
    assert asked[:2] == [["replay"]] * 2  # a graph for 8 samples, from which one is left out
    assert asked[-2:] == [["replay"], ["replay", "eager"]]


@pytest.mark.parametrize("by_hand", [False, True])
def test_recurrent_layers_have_one_graph(by_hand: bool) -> None:
    """They list their parameters anew whenever they run with others, which is no change of what `fn` reads."""
    model = nn.LSTM(3, 4, batch_first=True).double()
    fn, params = psgrad.from_module(model, lambda y, target: (y[0] * target).sum())
    if by_hand:
        fn = lambda params, s: (torch.func.functional_call(model, params, (s[0],))[0] * s[1]).sum()
    step = psgrad.compile(psgrad.per_sample_grads, fn, backend="replay")
    for _ in range(3):
        check(step, params, (torch.randn(N, 5, 3, dtype=D), torch.randn(N, 5, 4, dtype=D)))
    assert step.cache_info()[:3] == (3, 0, 1)


def test_large_convolutions_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever way is the fastest, the numbers are the same; what has a bound on memory is planned by estimates."""
    monkeypatch.setattr(clock, "_fastest", fastest := dict[Any, str]())
    model = nn.Conv2d(16, 16, 3, padding=1).double()
    fn, params = psgrad.from_module(model, lambda y, target: (y * target).sum())
    x, target = torch.randn(16, 16, 32, 32, dtype=D), torch.randn(16, 16, 32, 32, dtype=D)
    for strategy in ("patches", "grouped", "loop"):
        fastest.clear()
        for max_bytes in ("1GB", None):
            step = psgrad.compile(psgrad.per_sample_grads, fn, backend="replay", max_bytes=max_bytes)
            for scale in (1, 2):
                check(step, params, (x, scale * target))
            assert len(fastest) == (max_bytes is None)
        (key,) = fastest
        fastest[key] = strategy
        step = psgrad.compile(psgrad.per_sample_grads, fn, backend="replay")
        check(step, params, (x, target))
        calls = [op for graph in recordings(step) for op in graph.ops].count("aten.convolution_backward.default")
        assert calls == {"patches": 0, "grouped": 1, "loop": 16}[strategy]


def test_kernels_of_small_graphs_are_called_from_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large ones from Python, which asks for memory that is kept; so too where C++ cannot call them."""
    if not has_compiler():
        pytest.skip("no C++ compiler")
    compiled, from_python, broken = graphs._compiled, list[bool](), set[bool]()

    def watched(*args: Any, **options: Any) -> Any:
        from_python.append(options["from_python"])
        if options["from_python"] in broken:
            raise NotImplementedError("an op that C++ cannot call")
        return compiled(*args, **options)

    monkeypatch.setattr(graphs, "_compiled", watched)
    fn = lambda w, x: (x @ w).tanh().sum()
    for size, failing, ways in ((3, set[bool](), [False]), (3, {False}, [False, True]), (300, set(), [True])):
        step = psgrad.compile(psgrad.per_sample_grads, fn, backend="inductor")
        from_python.clear()
        broken.clear()
        broken.update(failing)
        for _ in range(2):
            check(step, torch.randn(size, size), torch.randn(4, size))
        assert from_python == ways
        assert step.cache_info()[:4] == (2, 0, 1, ("inductor",))


def test_large_tensors_of_compiled_code_are_in_memory_that_is_kept() -> None:
    if not has_compiler():
        pytest.skip("no C++ compiler")
    w, x = torch.randn(300, 300), torch.randn(4, 300)  # four gradients are 1.4 MB
    fn = lambda w, x: (x @ w).tanh().sum()
    step = psgrad.compile(psgrad.per_sample_grads, fn, backend="inductor")
    step(w, x)
    found = step(w, x)
    torch.testing.assert_close(found, psgrad.per_sample_grads(fn, w, x))
    place = found.data_ptr()
    held, kept = found[1:], found.clone()
    del found
    other = step(w, 2 * x)
    assert other.data_ptr() != place  # somebody holds a view
    torch.testing.assert_close(held, kept[1:])
    del other, held
    places = {step(w, x).data_ptr() for _ in range(4)}
    assert len(places) <= 2


def test_a_tensor_in_a_list_in_one_graph() -> None:
    held = [torch.tensor(2.0, dtype=D)]
    step = psgrad.compile(psgrad.weighted_grad, lambda w, x: (w * x * held[0]).sum(), weights=torch.ones(4, dtype=D))
    function = lambda w, x: step(w, x) * 2
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    w, x = torch.randn(3, dtype=D), torch.randn(4, 3, dtype=D)
    for change in (lambda: None, lambda: held[0].mul_(3), lambda: held.__setitem__(0, torch.tensor(5.0, dtype=D))):
        change()
        torch.testing.assert_close(compiled(w, x), function(w, x))


def test_what_comes_and_goes_in_compiled_code_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of ours are for what is returned, and for what is too large for malloc to keep."""
    if not has_compiler():
        pytest.skip("no C++ compiler")
    lent, empty = list[int](), warm_memory.empty
    monkeypatch.setattr(warm_memory, "empty", lambda shape, like: (lent.append(shape[0]), empty(shape, like))[1])
    w, x = torch.randn(300, 300, dtype=D), torch.randn(4, 1000, 300, dtype=D)  # outputs 9.6 MB, four gradients 2.9 MB
    fn = lambda w, x: (x @ w).tanh().square().sum()
    for quantity, held in ((psgrad.per_sample_norms, []), (psgrad.per_sample_grads, [4 * 300 * 300])):
        step = psgrad.compile(quantity, fn, backend="inductor")
        step(w, x)
        for scale in (1, 2):
            lent.clear()
            torch.testing.assert_close(step(w, scale * x), quantity(fn, w, scale * x))
            assert [n for n in lent if n * 8 >= warm_memory.LEAST][: len(held)] == held
        assert step.cache_info()[:2] == (3, 0)


CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "conv1d": lambda: nn.Conv1d(2, 4, 3, padding=1),
    "conv2d": lambda: nn.Conv2d(2, 4, 3, stride=2, groups=2),
    "conv2d-dilated": lambda: nn.Conv2d(2, 3, 3, dilation=2),
    "conv3d": lambda: nn.Conv3d(2, 3, 3, padding=1),
    "conv_transpose2d": lambda: nn.ConvTranspose2d(2, 3, 3, stride=2),
    "conv_transpose3d": lambda: nn.ConvTranspose3d(2, 3, 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, D, torch.bfloat16])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_input_gradients_of_convolutions_read_no_input(name: str, dtype: torch.dtype) -> None:
    """Graphs give them memory that nobody has written to: here NaN, as deterministic algorithms fill it."""
    torch.manual_seed(0)
    model = CONVOLUTIONS[name]().to(dtype)
    fn, params = psgrad.from_module(model, lambda y, _: y.square().sum())
    params["scale"] = torch.ones((), dtype=dtype)  # so that the input has a gradient
    scaled = lambda p, x: fn({k: v for k, v in p.items() if k != "scale"}, (x.tanh() * p["scale"], x))
    sizes = (6,) * int(name[name.index("d") - 1])
    options = {"max_bytes": "1GB"}  # no call is left to ordinary autograd
    step = psgrad.compile(psgrad.per_sample_grads, scaled, backend="replay", **options)
    try:
        torch.use_deterministic_algorithms(True)
        for _ in range(2):
            x = torch.randn(N, 2, *sizes, dtype=dtype)
            found = step(params, x)
            assert_same(found, psgrad.per_sample_grads(scaled, params, x, **options))
            assert found["scale"].isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)
    assert step.cache_info()[:2] == (2, 0)
    assert "aten.empty_like.default" in [op for graph in recordings(step) for op in graph.ops]


# ---- recurrent layers ------------------------------------------------------------------------------------


def _loops(step: psgrad.Compiled) -> list[str]:
    """The ops of a graph that are loops over time."""
    (graph,) = recordings(step)
    assert "aten.addmm_.default" not in graph.ops  # a step's product
    return [op for op in graph.ops if op.startswith("psgrad.")]


RECURRENT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lstm": (lambda: nn.LSTM(3, 4, 2, batch_first=True), "lstm"),
    "lstm-both-ways": (lambda: nn.LSTM(3, 4, bidirectional=True, batch_first=True), "lstm"),
    "lstm-projections": (lambda: nn.LSTM(3, 4, 2, proj_size=2, batch_first=True), "lstm"),
    "gru": (lambda: nn.GRU(3, 4, 2, batch_first=True), "gru"),
    "rnn": (lambda: nn.RNN(3, 4, 2, batch_first=True), "rnn"),
    "rnn-relu": (lambda: nn.RNN(3, 4, 2, nonlinearity="relu", batch_first=True), "rnn"),
    "dropout": (lambda: nn.LSTM(3, 4, 2, dropout=0.5, batch_first=True), "lstm"),
}


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_a_recurrent_layer_is_one_op_each_way(name: str, quantity: str) -> None:
    """However many steps there are, with the answers of the eager call."""
    make, kind = RECURRENT[name]
    torch.manual_seed(0)
    fn, params = psgrad.from_module(make().double(), lambda y, target: (y[0].mean(-1) * target).sum())
    function, options = QUANTITIES[quantity]
    step = psgrad.compile(function, fn, backend="replay", **options)
    for seed in range(2):
        batch = torch.randn(N, 30, 3, dtype=D), torch.randn(N, 30, dtype=D)
        torch.manual_seed(seed)
        found = step(params, batch)
        torch.manual_seed(seed)
        assert_same(found, function(fn, params, batch, **options))
    assert step.cache_info()[:3] == (2, 0, 1)
    assert _loops(step) == [f"psgrad.{kind}_steps.default"] * 2 + [f"psgrad.{kind}_steps_back.default"] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lower", [False, True])
def test_recurrent_layers_of_other_dtypes(dtype: torch.dtype, lower: bool) -> None:
    torch.manual_seed(0)
    fn, params = psgrad.from_module(nn.LSTM(3, 4, batch_first=True).to(dtype), lambda y, t: (y[0] * t).sum())
    step = compiled_norms(fn)
    with torch.autocast("cpu", torch.bfloat16, enabled=lower):
        for _ in range(2):
            check(step, params, (torch.randn(N, 9, 3).to(dtype), torch.randn(N, 9, 4).to(dtype)))
    assert len(_loops(step)) == 2


def test_packed_sequences_in_one_graph() -> None:
    """By their lengths, which the graph takes for granted: with others there is another."""
    lengths, layer = torch.tensor([5, 5, 2]), nn.GRU(3, 4, bidirectional=True).double()

    def fn(params: Any, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths)
        return torch.func.functional_call(layer, params, (packed,))[0].data.square().sum()

    step, params = compiled_norms(fn), {name: p.detach() for name, p in layer.named_parameters()}
    for given, hits in (([5, 5, 2], 1), ([5, 5, 2], 2), ([5, 3, 2], 2), ([5, 3, 2], 2), ([5, 3, 2], 3), ([5, 5, 2], 4)):
        lengths.copy_(torch.tensor(given))
        check(step, params, torch.randn(N, 5, 3, 3, dtype=D))
        assert step.cache_info().hits == hits
    assert {op for graph in recordings(step) for op in graph.ops if op.startswith("psgrad.")} == {
        "psgrad.gru_steps.default",
        "psgrad.gru_steps_back.default",
    }


@pytest.mark.parametrize("name", ["lstm", "lstm-projections", "gru", "rnn"])
def test_recurrent_layers_by_the_compiler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around the loops as well, by kernels called from C++ or from Python; the loops are C++ but for projections."""
    if not has_compiler():
        pytest.skip("no C++ compiler")
    ran: list[str] = []
    call = cpp.call
    monkeypatch.setattr(cpp, "call", lambda *args: [ran.append(args[1]), call(*args)])
    torch.manual_seed(0)
    fn, params = psgrad.from_module(RECURRENT[name][0]().double(), lambda y, target: (y[0].mean(-1) * target).sum())
    for n in (N, 64) if name == "lstm" else (N,):
        step = psgrad.compile(psgrad.clipped_grad, fn, backend="inductor", max_norm=0.5)
        for _ in range(2):
            ran.clear()
            check(step, params, (torch.randn(n, 20, 3, dtype=D), torch.randn(n, 20, dtype=D)))
            assert ran == ([] if name == "lstm-projections" else [name] * 2 + [f"{name}_back"] * 2)
        assert step.cache_info()[:4] == (2, 0, 1, ("inductor",))
        assert len(_loops(step)) == 4


def test_loops_are_of_torchs_ops_where_cpp_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_compiler():
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(quick_steps, "_library", lambda: None)
    monkeypatch.delattr(cpp, "call")
    fn, params = psgrad.from_module(nn.RNN(3, 4, batch_first=True).double(), lambda y, target: (y[0] * target).sum())
    step = psgrad.compile(psgrad.per_sample_norms, fn, backend="inductor")
    check(step, params, (torch.randn(N, 9, 3, dtype=D), torch.randn(N, 9, 4, dtype=D)))
    assert step.cache_info()[:4] == (1, 0, 1, ("inductor",))


def test_a_recurrent_layer_in_one_graph_with_a_step() -> None:
    torch.manual_seed(0)
    params, zeros = {k: p.detach() for k, p in nn.LSTM(3, 4).double().named_parameters()}, torch.zeros(1, 1, 4, dtype=D)

    def fn(params: Any, s: Any) -> Tensor:  # dynamo takes no modules with recurrent layers
        found = torch.lstm(s[0][:, None], (zeros, zeros), [*params.values()], True, 1, 0.0, False, False, False)
        return (found[0][:, 0] * s[1]).sum()

    made, ops = psgrad.compile(psgrad.clipped_grad, fn, max_norm=0.3), Ops()
    compiled = in_one_graph(lambda params, x, t: made(params, (x, t)), ops)
    for _ in range(2):
        batch = torch.randn(N, 30, 3, dtype=D), torch.randn(N, 30, 4, dtype=D)
        assert_same(compiled(params, *batch), psgrad.clipped_grad(fn, params, batch, 0.3))
    (names,) = ops.graphs
    assert "aten.addmm.default" in names  # of all steps
    assert len([name for name in names if "addmm" in name]) < 5


def test_graphs_of_others_have_no_ops_of_ours() -> None:
    """They may be differentiated, or run where there is no psgrad."""
    from torch.fx.experimental.proxy_tensor import make_fx

    fn, params = psgrad.from_module(nn.LSTM(3, 4, batch_first=True).double(), lambda y, t: (y[0] * t).sum())
    batch = torch.randn(N, 3, 3, dtype=D), torch.randn(N, 3, 4, dtype=D)
    graph = make_fx(lambda params, batch: psgrad.per_sample_norms(fn, params, batch))(params, batch)
    assert not [op for op in graphs.ops_of(graph) if "psgrad" in op]
    torch.testing.assert_close(graph(params, batch), psgrad.per_sample_norms(fn, params, batch))
