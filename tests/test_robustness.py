"""What must hold whatever happens: no trace of an exception, no leak, no aliasing, threads, randomness, fallbacks."""

import contextlib
import gc
import re
import threading
import warnings
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import psgrad
from psgrad.factors import costs as _plan
from psgrad.rules.linear import LINEAR


@pytest.fixture(autouse=True)
def float64() -> None:
    torch.set_default_dtype(torch.float64)  # conftest puts it back


def net() -> Any:
    """A bit of everything that has a rule, a view and a function of parameters."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok = nn.Embedding(7, 8)
            self.conv, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.scale, self.pos = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(5, 8))
            self.batch_norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)
            self.seen = "never"

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.tok(tokens) * self.scale + self.pos
            x = torch.tanh(self.norm(self.conv(x.mT))).mT
            x = self.attention(x, x, x)[0] + x @ (self.head.weight.t() @ self.head.weight)
            if x.isfinite().all():
                x = self.batch_norm(x.mT).mT
            return self.head(x).mean(1)

    return Net()


def problem() -> Any:
    model = net()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    return model, fn, params, (torch.randint(7, (4, 5)), torch.randint(3, (4,)))


# ---- exceptions leave no trace ------------------------------------------------------------------------


def surroundings() -> Any:
    """Everything that torch keeps per thread or process and that a call could forget to put back."""
    return {
        "function modes": list(_get_current_function_mode_stack()),
        "dispatch modes": list(_get_current_dispatch_mode_stack()),
        "functorch level": torch._C._functorch.maybe_current_level(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "anomaly": torch.is_anomaly_enabled(),
        "warn always": torch.is_warn_always_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "vmap fallback": torch._C._functorch._is_vmap_fallback_enabled(),
        "saved tensor hooks": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "thread count": threading.active_count(),
        "filters": list(warnings.filters),
    }


def contents(model: Any) -> Any:
    """The module's tensors by identity and by value, and its other attributes."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "identity": {name: id(t) for name, t in tensors.items()},
        "type": {name: type(t) for name, t in tensors.items()},
        "value": {name: t.detach().clone() for name, t in tensors.items()},
        "grad": {name: t.grad for name, t in tensors.items()},
        "requires_grad": {name: t.requires_grad for name, t in tensors.items()},
        "version": {name: t._version for name, t in tensors.items()},
        "attributes": {
            path: sorted(k for k in module.__dict__ if not k.startswith("_")) for path, module in model.named_modules()
        },
    }


def same_contents(a: Any, b: Any) -> Any:
    values = [(a["value"][name], b["value"][name]) for name in a["value"]]
    return all(a[key] == b[key] for key in a if key != "value") and all(torch.equal(x, y) for x, y in values)


class BoomError(Exception):
    """The user's own error."""


class Bomb(TorchFunctionMode):
    """Raises at the k-th torch function that is called under it."""

    def __init__(self, k: Any, error: Any = BoomError) -> None:
        super().__init__()
        self.k, self.error, self.count = k, error, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.k:
            raise self.error(f"at {self.k}")
        return func(*args, **(kwargs or {}))


def functions_called(fn: Any, params: Any, batch: Any) -> Any:
    counts = []

    def counting(p: Any, s: Any) -> Any:
        with Bomb(-1) as bomb:
            loss = fn(p, s)
        counts.append(bomb.count)
        return loss

    psgrad.per_sample_grads(counting, params, batch)
    return counts[0]


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"max_bytes": 10**8}, {"randomness": "same"}], ids=str)
def test_exception_at_every_op_leaves_nothing_behind(options: Any) -> None:
    """Raise at the k-th torch function for each k: the user's error comes out, everything else is as it was."""
    model, fn, params, batch = problem()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    total = functions_called(fn, params, batch)
    assert total > 30
    before, module_before, rng = surroundings(), contents(model), torch.get_rng_state()
    inputs = [t.clone() for t in (*params.values(), *batch)]
    for k in range(1, total + 1, 1 if not options else 5):

        def failing(p: Any, s: Any, k: Any = k) -> Any:
            with Bomb(k):
                return fn(p, s)

        with pytest.raises(BoomError, match=f"^at {k}$"):
            psgrad.per_sample_grads(failing, params, batch, **options)
        assert surroundings() == before
        assert same_contents(contents(model), module_before)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(a, b) for a, b in zip(inputs, (*params.values(), *batch), strict=True))
    torch.testing.assert_close(psgrad.per_sample_grads(fn, params, batch), psgrad.testing.loop_grads(fn, params, batch))


@pytest.mark.parametrize("k", [1, 10, 25])
def test_exception_in_explain_leaves_nothing_behind(k: Any) -> None:
    model, fn, params, batch = problem()
    before, module_before, rng = surroundings(), contents(model), torch.get_rng_state()

    def failing(p: Any, s: Any) -> Any:
        with Bomb(k):
            return fn(p, s)

    with pytest.raises(BoomError, match=f"^at {k}$"):
        psgrad.explain(failing, params, batch)
    assert surroundings() == before
    assert same_contents(contents(model), module_before)
    assert torch.equal(torch.get_rng_state(), rng)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration])
def test_exceptions_of_every_kind_come_out(error: Any) -> None:
    """Interrupts too; at once, without a second run of fn for those that are not errors."""
    _model, fn, params, batch = problem()
    before, runs = surroundings(), []

    def failing(p: Any, s: Any) -> Any:
        runs.append(1)
        with Bomb(12, error):
            return fn(p, s)

    with pytest.raises(error):
        psgrad.per_sample_grads(failing, params, batch)
    assert surroundings() == before
    assert len(runs) == (1 if not issubclass(error, Exception) else 2)


def test_the_error_is_the_one_that_fn_raised() -> None:
    """The object itself, with what it carries, not a copy or a wrapper; and no FallbackWarning on the way."""
    raised = []

    def fn(p: Any, x: Any) -> Any:
        h = F.linear(x, p)
        raised.append(BoomError("mine", 42))
        raise raised[-1]
        return h

    with pytest.raises(BoomError) as caught:
        psgrad.per_sample_grads(fn, torch.randn(3, 4), torch.randn(5, 4))
    assert caught.value is raised[-1]
    assert caught.value.args == ("mine", 42)


def test_an_error_of_one_sample_comes_out() -> None:
    """fn refuses a sample on purpose, by a data-dependent branch."""

    def fn(p: Any, x: Any) -> Any:
        if x[0] > 2:
            raise BoomError("too large")
        return F.linear(x, p).sum()

    x = torch.zeros(5, 4)
    psgrad.per_sample_grads(fn, torch.randn(3, 4), x)
    x[3, 0] = 3
    before = surroundings()
    with pytest.raises(BoomError, match=r"^too large$"):
        psgrad.per_sample_grads(fn, torch.randn(3, 4), x)
    assert surroundings() == before


class FailsBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Any:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> None:
        raise BoomError("in the backward")


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
def test_an_error_in_the_backward_leaves_nothing_behind() -> None:
    model, fn, params, batch = problem()
    before, module_before = surroundings(), contents(model)
    with pytest.raises(BoomError, match="in the backward"):
        psgrad.per_sample_grads(lambda p, s: FailsBackward.apply(fn(p, s)), params, batch)
    assert surroundings() == before
    assert same_contents(contents(model), module_before)


def test_a_call_that_works_leaves_nothing_behind() -> None:
    model, fn, params, batch = problem()
    before, module_before, rng = surroundings(), contents(model), torch.get_rng_state()
    psgrad.per_sample_grads(fn, params, batch)
    psgrad.per_sample_grads(fn, params, batch, max_bytes=10**7)
    psgrad.explain(fn, params, batch)
    assert surroundings() == before
    assert same_contents(contents(model), module_before)
    assert torch.equal(torch.get_rng_state(), rng)  # nothing was drawn


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_surrounding_modes_are_put_back(grad: Any, inference: Any) -> None:
    _, fn, params, batch = problem()

    def failing(p: Any, s: Any) -> Any:
        with Bomb(9):
            return fn(p, s)

    with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        before = surroundings()
        psgrad.per_sample_grads(fn, params, batch)
        assert surroundings() == before
        with pytest.raises(BoomError):
            psgrad.per_sample_grads(failing, params, batch)
        assert surroundings() == before


def test_a_surrounding_function_mode_sees_the_ops() -> None:
    """Somebody else's mode around the call keeps working, and is not disturbed."""
    fn, w, x = (lambda p, x: torch.sin(F.linear(x, p)).sum()), torch.randn(3, 4), torch.randn(5, 4)
    with Bomb(-1) as counter:
        ours = psgrad.per_sample_grads(fn, w, x)
        assert _get_current_function_mode_stack() == [counter]
    assert counter.count > 0
    torch.testing.assert_close(ours, psgrad.testing.loop_grads(fn, w, x))


# ---- threads and nesting ------------------------------------------------------------------------------


def test_two_threads_with_different_models() -> None:
    """50 rounds each, at once: equal to the serial answers, bit for bit."""
    linear = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    first, params = psgrad.from_module(linear, F.mse_loss)
    jobs = [(first, params, (torch.randn(6, 6), torch.randn(6, 3))), problem()[1:]]
    want = [psgrad.per_sample_grads(*job) for job in jobs]
    wrong, errors, start = [], [], threading.Barrier(2)

    def work(job: Any, expected: Any) -> None:
        try:
            start.wait()
            for i in range(50):
                grads = psgrad.per_sample_grads(*job, chunk_size=None if i % 3 else 2)
                close = optree.tree_map(lambda a, b: torch.allclose(a, b, rtol=1e-12, atol=1e-14), grads, expected)
                if not all(optree.tree_leaves(close)):
                    wrong.append(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(jobs, want, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not wrong


def test_an_exception_in_one_thread_does_not_touch_the_other() -> None:
    _, fn, params, batch = problem()
    _, other, other_params, other_batch = problem()
    want = psgrad.per_sample_grads(fn, params, batch)
    got, failures, start = [], [], threading.Barrier(2)

    def failing(p: Any, s: Any) -> Any:
        with Bomb(15):
            return other(p, s)

    def fails() -> None:
        start.wait()
        for _ in range(20):
            try:
                psgrad.per_sample_grads(failing, other_params, other_batch)
            except BoomError as error:
                failures.append(error)

    def works() -> None:
        start.wait()
        for _ in range(20):
            got.append(psgrad.per_sample_grads(fn, params, batch))

    threads = [threading.Thread(target=fails), threading.Thread(target=works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == len(got) == 20
    for grads in got:
        torch.testing.assert_close(grads, want, rtol=1e-12, atol=1e-14)


def test_explain_in_one_thread_and_gradients_in_the_other() -> None:
    """explain runs fn on fake tensors: no business of other threads."""
    job, other = problem()[1:], problem()[1:]
    want = psgrad.per_sample_grads(*job)
    reports, grads, start = [], [], threading.Barrier(2)

    def work(results: Any, call: Any, arguments: Any) -> None:
        start.wait()
        for _ in range(10):
            results.append(call(*arguments))

    threads = [
        threading.Thread(target=work, args=(reports, psgrad.explain, other)),
        threading.Thread(target=work, args=(grads, psgrad.per_sample_grads, job)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports) == len(grads) == 10
    assert {str(report) for report in reports} == {str(reports[0])}
    for found in grads:
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-14)


def test_calls_nest() -> None:
    """A call inside fn, over the same parameters, with an exception in the inner one that fn handles."""
    w, x = torch.randn(3, 4), torch.randn(5, 2, 4)
    inner = lambda w, row: torch.tanh(F.linear(row, w)).sum()

    def refuse(w: Any, row: Any) -> None:
        raise BoomError("inner")

    def fn(w: Any, rows: Any) -> Any:
        with contextlib.suppress(BoomError):
            psgrad.per_sample_grads(refuse, w, rows)
        return psgrad.per_sample_grads(inner, w, rows).square().sum() + F.linear(rows, w).sum()

    reference = lambda w, rows: (
        torch.vmap(torch.func.grad(inner), in_dims=(None, 0))(w, rows).square().sum() + F.linear(rows, w).sum()
    )
    before = surroundings()
    ours = psgrad.per_sample_grads(fn, w, x)
    assert surroundings() == before
    torch.testing.assert_close(ours, torch.vmap(torch.func.grad(reference), in_dims=(None, 0))(w, x))


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
def test_explain_nests() -> None:
    """explain from inside fn describes the inner call."""
    reports = []

    def fn(w: Any, x: Any) -> Any:
        if not reports:
            reports.append(psgrad.explain(lambda v, y: F.linear(y, v).sum(), torch.zeros(2, 3), torch.zeros(4, 3)))
        return F.linear(x, w).square().sum()

    w, x = torch.randn(3, 4), torch.randn(5, 4)
    ours = psgrad.per_sample_grads(fn, w, x)
    assert [row.how for row in reports[0].rows] == ["rule linear"]
    torch.testing.assert_close(ours, psgrad.testing.loop_grads(fn, w, x))


# ---- memory -------------------------------------------------------------------------------------------


def live_tensors() -> Any:
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())


def resident() -> Any:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def _fails(fn: Any, params: Any, batch: Any) -> None:
    def failing(p: Any, s: Any) -> Any:
        with Bomb(12):
            return fn(p, s)

    try:
        psgrad.per_sample_grads(failing, params, batch)
    except BoomError:
        return
    raise AssertionError("did not fail")


def _loops(fn: Any, params: Any, batch: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", psgrad.FallbackWarning)
        psgrad.per_sample_grads(lambda p, s: fn(p, s) + s[0][s[0] > 3].sum() * p["scale"].sum(), params, batch)


def _splits(fn: Any, params: Any, batch: Any) -> None:
    psgrad.per_sample_grads(lambda p, s: fn(p, s) * (2 if s[0][0] > 3 else 1), params, batch)


CALLS = {
    "a call": (200, psgrad.per_sample_grads),
    "a failing call": (50, _fails),
    "a loop": (20, _loops),
    "a split batch": (50, _splits),
    "chunks": (50, lambda *args: psgrad.per_sample_grads(*args, chunk_size=3)),
    "a new fn with max_bytes": (
        20,
        lambda fn, *args: psgrad.per_sample_grads(lambda *a: fn(*a), *args, max_bytes=10**7),
    ),
    "explain": (20, psgrad.explain),
}


@pytest.mark.parametrize("name", CALLS)
def test_memory_does_not_grow(name: Any) -> None:
    """No tensor stays alive, and no memory outside of tensors either."""
    rounds, call = CALLS[name]
    _, fn, params, batch = problem()
    for _ in range(10):
        call(fn, params, batch)
    tensors, size = live_tensors(), resident()
    for _ in range(rounds):
        call(fn, params, batch)
    assert live_tensors() == tensors
    assert resident() - size < 32 << 20


def test_large_results_are_freed() -> None:
    """100 results of 8 MB: one that stayed alive each time would be 800 MB."""
    fn, w, x = (lambda p, x: torch.sin(F.linear(x, p)).sum()), torch.randn(100, 100), torch.randn(100, 100)
    for _ in range(3):
        psgrad.per_sample_grads(fn, w, x)
    size = resident()
    for _ in range(100):
        psgrad.per_sample_grads(fn, w, x)
    assert resident() - size < 80 << 20


# ---- inputs and results -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
@pytest.mark.parametrize("way", ["vmap", "chunks", "split", "loop"])
def test_inputs_are_never_modified(way: Any) -> None:
    _, fn, params, batch = problem()
    params = {k: p.clone().requires_grad_() for k, p in params.items()}
    inputs = [*params.values(), *batch]
    before = [(t.detach().clone(), t._version, t.requires_grad, t.grad_fn, t.data_ptr()) for t in inputs]

    def function(p: Any, s: Any) -> Any:
        factor = 2 if way == "split" and s[0][0] > 3 else 1
        return fn(p, s) * (factor + (s[0][s[0] > 3].numel() if way == "loop" else 0))

    psgrad.per_sample_grads(function, params, batch, chunk_size=3 if way == "chunks" else None)
    for t, (value, version, requires_grad, grad_fn, pointer) in zip(inputs, before, strict=True):
        assert torch.equal(t.detach(), value)
        assert (t._version, t.requires_grad, t.grad_fn, t.data_ptr()) == (version, requires_grad, grad_fn, pointer)
        assert t.grad is None


def test_in_place_ops_on_a_copy_of_the_sample() -> None:
    x = torch.randn(5, 4)
    before = x.clone()

    def fn(p: Any, x: Any) -> Any:
        x = x.clone()
        x[0] = 7.0
        x.mul_(2)
        return torch.sin(F.linear(x, p)).sum()

    psgrad.testing.check(fn, torch.randn(3, 4), x)
    assert torch.equal(x, before)


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"max_bytes": 10**6}], ids=str)
@pytest.mark.parametrize("way", ["vmap", "split", "loop"])
def test_in_place_ops_on_the_sample_itself(way: Any, options: Any) -> None:
    """Exact or refused, however often fn runs for one answer; the caller's batch stays as it is."""
    x, w = torch.randn(5, 4), torch.randn(3, 4)
    before = x.clone()

    def fn(p: Any, x: Any) -> Any:
        x.mul_(2)
        extra = x[x > 0].sum() if way == "loop" else 0
        return torch.sin(F.linear(x, p)).sum() * (2 if way == "split" and x[0] > 0 else 1) + extra * p.sum()

    want = psgrad.testing.loop_grads(lambda p, x: fn(p, x.clone()), w, x)
    try:
        ours = psgrad.per_sample_grads(fn, w, x, **options)
    except psgrad.UnsupportedOpError:
        ours = want
    torch.testing.assert_close(ours, want)
    assert torch.equal(x, before)


WRITES = {
    "detach": lambda p: p.detach().add_(1),
    "data": lambda p: p.data.mul_(0.5),
    "data of a view": lambda p: p[0].data.zero_(),
    "view of data": lambda p: p.data.view(-1)[0].zero_(),
    "setitem": lambda p: p.detach().__setitem__(0, 0.0),
    "out": lambda p: torch.mul(p.detach(), 2, out=p.detach()),
}


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
@pytest.mark.parametrize("name", WRITES)
def test_parameters_that_fn_writes_behind_autograds_back(name: Any) -> None:
    """Refused or not, the caller's parameters stay as they are."""
    w = torch.randn(3, 4)
    before = w.clone()

    def fn(p: Any, x: Any) -> Any:
        WRITES[name](p)
        return torch.sin(F.linear(x, p)).sum()

    with contextlib.suppress(psgrad.UnsupportedOpError):
        psgrad.per_sample_grads(fn, w, torch.randn(5, 4))
    assert torch.equal(w, before)


def storages(tree: Any) -> Any:
    return [t.untyped_storage().data_ptr() for t in optree.tree_leaves(tree) if t.numel()]


ALIASING = {
    "one gradient for two parameters": lambda p, x: ((p["a"] + p["b"]) * x).sum(),
    "added bare": lambda p, x: (x + p["a"] + p["b"]).sum(),
    "subtracted bare": lambda p, x: (x - p["a"] - p["b"]).square().sum(),
    "the sample is the gradient": lambda p, x: (p["a"] * x).sum() + (p["b"] * x).sum(),
    "views of one parameter": lambda p, x: (p["a"][:2] * x[:2]).sum() + p["b"].sum(),
    "not used": lambda p, x: x.sum(),
    "shared by all samples": lambda p, x: p["a"].sum() + p["b"].sum(),
}


@pytest.mark.filterwarnings("ignore::psgrad.UnusedParametersWarning")
@pytest.mark.parametrize("name", ALIASING)
def test_results_do_not_alias(name: Any) -> None:
    """Neither each other nor the inputs; every row has memory of its own."""
    fn = ALIASING[name]
    params, x = {"a": torch.randn(4), "b": torch.randn(4)}, torch.randn(5, 4)
    aux_fn = lambda p, x: (fn(p, x), {"x": x, "again": x, "a": p["a"], "one": 1.0})
    grads, (values, _aux) = psgrad.per_sample_grads(aux_fn, params, x, has_aux=True, return_value=True)
    assert len(set(storages((grads, values)))) == 3
    assert not set(storages((grads, values))) & set(storages((params, x)))
    want = psgrad.testing.loop_grads(fn, params, x)
    for t in (*grads.values(), values):
        rest = t[1:].clone()
        t[0] = 99.0  # writes one row only
        assert torch.equal(t[1:], rest)
    torch.testing.assert_close({k: g[1:] for k, g in grads.items()}, {k: g[1:] for k, g in want.items()})


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
@pytest.mark.parametrize("way", ["vmap", "loop", "chunks"])
@pytest.mark.parametrize("n", [1, 5])
def test_aux_does_not_alias(n: Any, way: Any) -> None:
    """Neither the inputs, nor what fn closes over, nor another leaf of aux."""
    params, x, closed = {"a": torch.randn(4)}, torch.randn(n, 4), torch.randn(4)
    inputs = (params["a"], x, closed)
    before = [t.clone() for t in inputs]

    def fn(p: Any, x: Any) -> Any:
        h = p["a"] * x
        extra = x[x > 0].sum() if way == "loop" else 0
        return h.sum() + extra, {"x": x, "a": p["a"], "closed": closed, "one": 1.0, "h": h, "again": h}

    _, aux = psgrad.per_sample_grads(fn, params, x, has_aux=True, chunk_size=2 if way == "chunks" else None)
    want = {k: t.clone() for k, t in aux.items()}
    for name, t in aux.items():
        t[0] = 99.0
        want[name][0] = 99.0
        torch.testing.assert_close(aux, want, rtol=0, atol=0)
    assert all(torch.equal(t, old) for t, old in zip(inputs, before, strict=True))


@pytest.mark.filterwarnings("ignore::psgrad.UnusedParametersWarning")
def test_values_have_memory_of_their_own() -> None:
    _, values = psgrad.per_sample_grads(
        lambda p, x: torch.tensor(1.0), torch.randn(3), torch.randn(5, 3), return_value=True
    )
    values[0] = 7.0
    assert torch.equal(values, torch.tensor([7.0, 1.0, 1.0, 1.0, 1.0]))


def test_out_that_is_not_contiguous() -> None:
    fn, w, x = (lambda p, x: torch.sin(F.linear(x, p)).sum()), torch.randn(3, 4), torch.randn(5, 4)
    out = torch.full((4, 5, 6), torch.nan)[:, :, ::2].permute(1, 2, 0)
    assert psgrad.per_sample_grads(fn, w, x, out=out) is out
    torch.testing.assert_close(out, psgrad.testing.loop_grads(fn, w, x))


# ---- the loop over samples ----------------------------------------------------------------------------


class OldStyle(torch.autograd.Function):
    """No setup_context: vmap refuses it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * g


def test_old_style_autograd_function() -> None:
    """Exact, and the warning says where and why, and points at the call."""

    def fn(p: Any, x: Any) -> Any:
        h = F.linear(x, p)
        return OldStyle.apply(h).sum()

    w, x = torch.randn(3, 4), torch.randn(5, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        grads = psgrad.per_sample_grads(fn, w, x)
        line = test_old_style_autograd_function.__code__.co_firstlineno + 10
    torch.testing.assert_close(grads, psgrad.testing.loop_grads(fn, w, x))
    assert [w.category for w in caught] == [psgrad.FallbackWarning]
    assert str(caught[0].message) == (
        "psgrad runs a part of fn in a loop over samples: exact, slower there\n"
        f"  OldStyle.apply at test_robustness.py:{fn.__code__.co_firstlineno + 2} in {fn.__qualname__}: "
        "it does not say what it does under vmap"
    )
    assert caught[0].filename == __file__
    assert caught[0].lineno == line


def test_the_warning_can_be_an_error() -> None:
    """As people who cannot afford the loop would have it: the call stops before it begins."""
    runs = []

    def fn(p: Any, x: Any) -> Any:
        runs.append(1)
        return OldStyle.apply(F.linear(x, p)).sum()

    before = surroundings()
    with warnings.catch_warnings():
        warnings.simplefilter("error", psgrad.FallbackWarning)
        with pytest.raises(psgrad.FallbackWarning, match="psgrad runs a part of fn in a loop over samples"):
            psgrad.per_sample_grads(fn, torch.randn(3, 4), torch.randn(50, 4))
    assert len(runs) <= 2
    assert surroundings() == before


def test_new_style_autograd_function_needs_no_loop() -> None:
    class Cube(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Any:
            return x**3

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return 3 * x**2 * g

    fn = lambda p, x: Cube.apply(F.linear(x, p["w"])).sum() + Cube.apply(p["b"]).sum()
    psgrad.testing.check(fn, {"w": torch.randn(3, 4), "b": torch.randn(3)}, torch.randn(5, 4))


DYNAMIC = {
    "unique": lambda p, x: p[:, x.long().unique() % 4].square().sum() * x.sum(),
    "numpy": lambda p, x: F.linear(x, p).sum() * float(x.numpy().max()),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch, before vmap refuses
@pytest.mark.parametrize("name", DYNAMIC)
def test_data_dependent_shapes(name: Any) -> None:
    x = torch.randn(5, 4)
    with pytest.warns(psgrad.FallbackWarning, match=r"test_robustness\.py:\d+ in <lambda>: "):
        psgrad.testing.check(DYNAMIC[name], torch.randn(3, 4), x)


MASKED = {
    "boolean mask": lambda p, x: torch.sin(F.linear(x, p))[x[:3] > 0].sum(),
    "mask of a parameter": lambda p, x: p[x[:3] > 0].square().sum() * x.sum(),
    "mask of two axes": lambda p, x: (p * x)[(p * x) > 0].square().sum(),
    "mask beside a slice": lambda p, x: (p * x)[1:, x > 0].square().sum(),
    "mask beside a number": lambda p, x: (p * x)[x[:3] > 0, 1].square().sum(),
    "number behind a mask": lambda p, x: _put(p * x, x[:3] > 0, 0.5).square().sum(),
    "sample behind a mask": lambda p, x: _put(p * x, p * x > 0, x.sum()).square().sum(),
    "vector behind a mask": lambda p, x: _put(p * x, x[:3] > 0, p[0]).square().sum(),
    "values behind a mask": lambda p, x: _put(p * x, p * x > 0, (p - x)[p * x > 0]).square().sum(),
    "samples behind a mask of zeros": lambda p, x: (_put(torch.zeros(4), x > 0, x[x > 0]) * p).square().sum(),
    "masked_select": lambda p, x: torch.masked_select(F.linear(x, p), x[:3] > 0).square().sum(),
    "masked_select of a row": lambda p, x: p.masked_select(x > 0).square().sum() * x.sum(),
    "nonzero": lambda p, x: p[:, x.relu().nonzero().flatten()].square().sum() * x.sum(),
    "nonzero of two axes": lambda p, x: (p * x)[tuple((p * x).relu().nonzero().t())].square().sum(),
    "where of one argument": lambda p, x: F.linear(x, p)[torch.where(x[:3] > 0)].square().sum(),
    "argwhere": lambda p, x: F.linear(x, p)[torch.argwhere(x[:3] > 0)[:, 0]].square().sum(),
}


def _put(t: Any, mask: Any, value: Any) -> Any:
    t[mask] = value
    return t


@pytest.mark.parametrize("batch", ["masks that differ", "masks of one size", "one mask", "no element"])
@pytest.mark.parametrize("name", MASKED)
def test_masks(name: Any, batch: Any) -> None:
    """Masks as indices need no loop: written as integers where samples choose equally many, else in parts."""
    x = torch.randn(6, 4).abs() + 0.1
    if batch == "masks that differ":
        x = x * torch.randn(6, 4).sign()
    elif batch == "masks of one size":
        x = torch.stack([row * torch.tensor([1.0, -1, 1, -1]).roll(2 * i) for i, row in enumerate(x)])
        x[0, :2] *= -1
    else:
        x = x * (torch.tensor([1.0, -1, 1, -1]) if batch == "one mask" else -1)
    psgrad.testing.check(MASKED[name], torch.randn(3, 4), x, rtol=1e-9, atol=1e-9)


INTEGERS = {
    "first axis": lambda t, i, j: t[i],
    "second axis": lambda t, i, j: t[:, i],
    "last axis": lambda t, i, j: t[..., i],
    "behind a new axis": lambda t, i, j: t[None, i],
    "two": lambda t, i, j: t[i, -1 - i],
    "beside a number": lambda t, i, j: t[1, :, i],
    "before a slice and a tensor": lambda t, i, j: t[i, :, j],
    "behind a tensor and a slice": lambda t, i, j: t[j, :, i],
    "before a tensor": lambda t, i, j: t[i, j],
    "behind everything and a tensor": lambda t, i, j: t[j, ..., i],
    "around a tensor": lambda t, i, j: t[i, j, i],
    "before a slice and a mask": lambda t, i, j: t[i, :, torch.ones(3, dtype=torch.bool)],
    "behind a mask of two axes": lambda t, i, j: t[torch.eye(3, dtype=torch.bool), i],
    "of 16 bits": lambda t, i, j: t[i.short(), :, j],
}


@pytest.mark.parametrize("of", ["parameter", "constant"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_as_indices(name: Any, of: Any) -> None:
    """An integer of the sample drops its axis, and every other one stays where it is. All sizes are equal here."""
    table, weight = torch.randn(3, 3, 3), torch.randn(3, 3, 3)

    def fn(p: Any, sample: Any) -> Any:
        found = INTEGERS[name](p if of == "parameter" else table.to(p), *sample)
        return (torch.sin(found) * weight.to(p)[: len(found)] * p.sum()).sum()

    batch = torch.tensor([0, 2, 1, 2]), torch.randint(3, (4, 3))
    psgrad.testing.check(fn, torch.randn(3, 3, 3), batch, rtol=1e-9, atol=1e-9)


IN_PLACE = {
    "copy of a parameter": lambda p, x: F.linear(x, p.clone().mul_(2)).square().sum(),
    "function of a parameter": lambda p, x: F.linear(x, (p * 1.5).add_(1).tanh_()).square().sum(),
    "row of a copy": lambda p, x: F.linear(x, _with_row(p.clone())).square().sum(),
    "view of a copy": lambda p, x: F.linear(x, _through_a_view(p.clone())).square().sum(),
    "sample into a copy": lambda p, x: F.linear(x, p.clone().add_(x)).square().sum(),
    "output of a layer": lambda p, x: F.linear(x, p).mul_(2).add_(1).relu_().square().sum(),
    "output of a layer, twice": lambda p, x: F.linear(F.linear(x, p).mul_(2)[:1].expand(4), p).sin_().sum(),
    "output with a bias": lambda p, x: F.linear(x[None], p, p[:, 0]).mul_(2).relu_().square().sum(),
    "part of an output": lambda p, x: _part_doubled(F.linear(x[None], p, p[:, 0])).square().sum(),
    "part of a convolution": lambda p, x: _part_doubled(F.conv1d(x[None], p[:, None], p[:, 0])).square().sum(),
    "input of a layer, after": lambda p, x: _input_changed(torch.sin(x), p),
    "buffer of zeros": lambda p, x: F.linear(x, torch.zeros(3, 4).copy_(p)).square().sum(),
    "rows of a buffer": lambda p, x: F.linear(x, _filled(torch.zeros(3, 4), p)).square().sum(),
    "empty_like": lambda p, x: F.linear(x, torch.empty_like(p).copy_(p)).square().sum(),
    "index_put": lambda p, x: (x.clone().index_put_((torch.tensor([1]),), p[0, :1]) * p).square().sum(),
    "activation added to a parameter": lambda p, x: _then_doubled(torch.sin(x), p),
    "copy, unseen by autograd": lambda p, x: F.linear(x, _zeroed(p.clone())).square().sum(),
    "function, unseen by autograd": lambda p, x: F.linear(x, _zeroed(p * 2)).square().sum(),
}


def _with_row(w: Any) -> Any:
    w[1] = 0.5
    return w


def _zeroed(w: Any) -> Any:
    with torch.no_grad():
        w[0] = 0
        w.mul_(2)
    return w


def _through_a_view(w: Any) -> Any:
    w.view(-1)[2:5].mul_(3)
    w.t()[0].zero_()
    return w


def _filled(buffer: Any, w: Any) -> Any:
    for i, row in enumerate(w):
        buffer[i] = row * 2
    return buffer


def _part_doubled(y: Any) -> Any:
    y[:, 1:].mul_(2)
    y.view(-1)[0].add_(1)
    return y


def _input_changed(h: Any, p: Any) -> Any:
    y = F.linear(h, p)
    return y.sum() * h.clone().mul_(2).sum()


def _then_doubled(h: Any, p: Any) -> Any:
    y = h + p[0]
    h.mul_(2)
    return (y * h).sum()


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large: no call counts as small."""
    if request.param == "large":
        monkeypatch.setattr(_plan, "SMALL", -1)


@pytest.mark.usefixtures("size")
def test_results_share_no_memory() -> None:
    p = {name: torch.randn(3) for name in "abcd"} | {"w": torch.randn(3, 4), "v": torch.randn(3, 4)}

    def fn(p: Any, x: Any) -> Any:  # autograd hands one cotangent to both layers and to both sums
        return (F.linear(x, p["w"], p["a"]) + F.linear(x, p["v"], p["b"]) + p["c"] + p["d"]).sum()

    grads = optree.tree_leaves(psgrad.per_sample_grads(fn, p, torch.randn(5, 4)))
    assert len({g.untyped_storage().data_ptr() for g in grads}) == len(grads)


def _doubling(p: Any, x: Any) -> Any:
    y = F.linear(x, p)
    y.grad_fn.register_prehook(lambda grads: (grads[0] * 2,))
    return y.sin().sum()


@pytest.mark.usefixtures("size")
def test_hooks_on_the_graph_of_an_output_count() -> None:
    psgrad.testing.check(_doubling, torch.randn(3, 4), torch.randn(5, 4), rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("size")
def test_a_rule_may_return_a_view() -> None:
    """A transposed output, which is no reshape of what was computed."""
    bind = lambda input, weight, bias=None: psgrad.extend.Call(input, (weight, bias))
    forward = lambda options, x, w, b: (F.linear(x, w, b).mT, ())
    backward = lambda options, g, x, params, saved, needs: LINEAR.backward(options, g.mT, x, params, saved, needs)
    transposed = lambda input, weight, bias=None: F.linear(input, weight, bias).mT

    def called(*args: Any) -> Any:
        if torch.overrides.has_torch_function(args):
            return torch.overrides.handle_torch_function(called, args, *args)
        return transposed(*args)

    rule = psgrad.extend.register(psgrad.extend.Rule("transposed", (called,), bind, forward, backward, native=True))
    try:
        fn = lambda p, x: (called(x, p["w"], p["b"]) * torch.arange(6.0).view(3, 2)).sin().sum()
        params = {"w": torch.randn(3, 4), "b": torch.randn(3)}
        psgrad.testing.check(fn, params, torch.randn(5, 2, 4), rules={"params['w']": ["transposed"]})
    finally:
        psgrad.extend.unregister(rule)


def _changes_a_constant(p: Any, x: Any) -> Any:
    scale = torch.ones(3, 3)
    y = F.linear(F.linear(x, p), scale)
    with torch.no_grad():
        scale.add_(1)
    return y.sum()


def _changes_an_input(p: Any, x: Any) -> Any:
    h = torch.sin(x)
    y = F.linear(h, p)
    with torch.no_grad():
        h.zero_()
    return y.sum()


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("fn", [_changes_a_constant, _changes_an_input])
def test_an_operand_changed_before_the_backward_is_refused_as_torch_does(fn: Any) -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        psgrad.per_sample_grads(fn, torch.randn(3, 4), torch.randn(2, 4))


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_ops_on_what_comes_from_parameters(name: Any) -> None:
    w = torch.randn(3, 4)
    before = w.clone()
    psgrad.testing.check(IN_PLACE[name], w, torch.randn(5, 4), rtol=1e-9, atol=1e-9)
    assert torch.equal(w, before)


LAYERS = {
    "linear": lambda: (nn.Linear(4, 4), (3, 4)),
    "conv1d": lambda: (nn.Conv1d(4, 4, 2), (4, 6)),
    "conv2d": lambda: (nn.Conv2d(4, 4, 2), (4, 6, 6)),
    "conv3d": lambda: (nn.Conv3d(4, 4, 2), (4, 3, 3, 3)),
    "group_norm": lambda: (nn.GroupNorm(2, 4), (4, 6)),
    "instance_norm": lambda: (nn.InstanceNorm1d(4, affine=True), (4, 6)),
    "batch_norm, eval": lambda: (nn.BatchNorm1d(4).eval(), (4, 6)),
    "batch_norm": lambda: (nn.BatchNorm1d(4), (4, 6)),
    "layer_norm": lambda: (nn.LayerNorm(6), (4, 6)),
    "embedding": lambda: (nn.Embedding(7, 4), None),
}


@pytest.mark.parametrize("name", LAYERS)
def test_in_place_activation_after_a_layer(name: Any) -> None:
    """nn.ReLU(inplace=True) after every kind of layer: exact, and no loop over samples."""
    layer, shape = LAYERS[name]()
    fn, params = psgrad.from_module(nn.Sequential(layer, nn.ReLU(inplace=True)), lambda out, _: torch.sin(out).sum())
    x = torch.randn(5, *shape) if shape else torch.randint(7, (5, 3))
    psgrad.testing.check(fn, params, (x, torch.zeros(5)), rtol=1e-9, atol=1e-9)


# ---- randomness ---------------------------------------------------------------------------------------


def draws(fn: Any, n: Any = 32, **options: Any) -> Any:
    """Gradients for n equal samples of a function that is linear in p, and its values."""
    torch.manual_seed(5)
    p = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    grads, values = psgrad.per_sample_grads(fn, p, torch.ones(n, 3, 4), return_value=True, **options)
    return p, grads, values


def _attention_dropout(p: Any, x: Any) -> Any:
    h = torch.tanh(x)  # linear in p, which makes the values
    return F.scaled_dot_product_attention(h, h, F.linear(x, p), dropout_p=0.5).sum()


RANDOM = {
    "dropout": lambda p, x: F.dropout(F.linear(x, p), 0.5).sum(),
    "dropout of a weight": lambda p, x: F.linear(x, F.dropout(p, 0.5)).sum(),
    "dropout, nested": lambda p, x: F.dropout(torch.relu(F.dropout(F.linear(x, p), 0.3)), 0.3).sum(),
    "dropout1d": lambda p, x: F.dropout1d(F.linear(x, p), 0.5).sum(),
    "feature dropout": lambda p, x: F.dropout2d(F.linear(x, p)[None, :, None], 0.5).sum(),
    "attention": _attention_dropout,
    "bernoulli": lambda p, x: (F.linear(x, p) * torch.bernoulli(torch.full((8,), 0.5))).sum(),
    "rand_like": lambda p, x: (lambda h: (h * torch.rand_like(h)).sum())(F.linear(x, p)),
    "randn": lambda p, x: (F.linear(x, p) * torch.randn(8)).sum(),
    "normal_": lambda p, x: (F.linear(x, p) * torch.empty_like(x[:, :1]).normal_()).sum(),
    "bernoulli_": lambda p, x: (F.linear(x, p) * torch.empty(8).bernoulli_(0.5)).sum(),
    "uniform_ of a copy": lambda p, x: (F.linear(x, p) * torch.ones(2, 8)[1].clone().uniform_(-1, 1)).sum(),
    "rrelu": lambda p, x: F.rrelu(F.linear(x, p), training=True).sum(),
    "randperm": lambda p, x: (F.linear(x, p)[:, torch.randperm(8)] * torch.arange(8)).sum(),
}


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", RANDOM)
def test_random_draws_are_the_same_in_forward_and_backward(name: Any) -> None:
    """f is homogeneous of degree one in p, so f(p) = <p, f'(p)>: only if both saw the same draws."""
    p, grads, values = draws(RANDOM[name])
    torch.testing.assert_close(values, (grads * p).sum((1, 2)))
    assert values.std() > 0


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", RANDOM)
def test_every_sample_draws_its_own(name: Any) -> None:
    _, grads, _ = draws(RANDOM[name])
    assert len(grads.flatten(1).unique(dim=0)) >= 4


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_reproducible_under_a_seed(name: Any, chunk_size: Any) -> None:
    for randomness in ("different", "same"):
        _, first, _ = draws(RANDOM[name], chunk_size=chunk_size, randomness=randomness)
        _, again, _ = draws(RANDOM[name], chunk_size=chunk_size, randomness=randomness)
        assert torch.equal(first, again)


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("chunk_size", [None, 5])
def test_randomness_same_is_one_draw_for_all(name: Any, chunk_size: Any) -> None:
    p, grads, values = draws(RANDOM[name], randomness="same", chunk_size=chunk_size)
    torch.testing.assert_close(grads, grads[:1].expand_as(grads))
    torch.testing.assert_close(values, (grads * p).sum((1, 2)))
    _, whole, _ = draws(RANDOM[name], randomness="same")
    torch.testing.assert_close(grads, whole)


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", RANDOM)
def test_randomness_error_refuses(name: Any) -> None:
    with pytest.raises(Exception, match=r"random"):
        draws(RANDOM[name], randomness="error")


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_stochastic_depth_needs_no_loop(randomness: Any) -> None:
    """Random numbers into a new tensor, as torchvision has it; a loop would warn."""
    fn = lambda p, x: (F.linear(x, p) * torch.empty((1, 1)).bernoulli_(0.5).div_(0.5)).sum() + p.sum()
    _, grads, _ = draws(fn, randomness=randomness)
    dropped = (grads == 1).flatten(1).all(1)
    assert len(dropped.unique()) == (1 if randomness == "same" else 2)


def test_dropout_rows_are_zero_or_doubled() -> None:
    """d/dw of sum(dropout(x @ w)): a column is x, doubled, where it was kept, and 0 where not."""
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    grads = psgrad.per_sample_grads(lambda w, x: F.dropout(x @ w, 0.5).sum(), torch.randn(4, 8), x)
    kept = (grads != 0).any(1)  # (N, 8)
    torch.testing.assert_close(grads, 2 * x[:, :, None] * kept[:, None], rtol=1e-12, atol=0)
    assert 0.4 < kept.double().mean() < 0.6
    assert len(kept.unique(dim=0)) > 32


def test_dropout_of_a_weight_is_drawn_per_sample() -> None:
    """A mask on the weight itself: a random function of parameters alone still differs between samples."""
    torch.manual_seed(0)
    grads = psgrad.per_sample_grads(
        lambda w, x: F.linear(x, F.dropout(w, 0.5)).sum(), torch.randn(8, 4), torch.ones(64, 4)
    )
    assert set(grads.unique().tolist()) == {0.0, 2.0}
    assert len(grads.flatten(1).unique(dim=0)) == 64


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
@pytest.mark.parametrize("way", ["split", "loop"])
def test_randomness_when_samples_do_not_run_at_once(way: Any) -> None:
    """Where the batch is split, or in the loop: each its own, all one, and reproducible."""

    def fn(p: Any, x: Any) -> Any:
        h = F.dropout(F.linear(x, p), 0.5)
        if way == "loop":
            return h[h != 0].sum()
        return (h * (2 if x[0, 0] > 0 else 1)).sum()

    x = torch.ones(32, 1, 4)
    x[::2] *= -1

    def grads(**options: Any) -> Any:
        torch.manual_seed(1)
        return psgrad.per_sample_grads(fn, torch.ones(8, 4), x, **options)

    masks = grads() != 0
    assert torch.equal(grads(), grads())
    assert len(masks.flatten(1).unique(dim=0)) > 16
    masks = grads(randomness="same") != 0
    assert len(masks.flatten(1).unique(dim=0)) == 1


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_the_generator_moves_on(randomness: Any, chunk_size: Any) -> None:
    """Chunks may share a draw; the next call never draws it again."""
    torch.manual_seed(0)
    draw = lambda: psgrad.per_sample_grads(
        lambda w, x: F.dropout(x @ w).sum(),
        torch.ones(4, 64),
        torch.ones(5, 4),
        randomness=randomness,
        chunk_size=chunk_size,
    )
    assert not torch.equal(draw(), draw())


def test_one_draw_is_shared_by_chunks_and_by_the_loop() -> None:
    for shape in ({}, {"chunk_size": 2}):
        torch.manual_seed(0)
        fn = lambda w, x: F.dropout(x @ w).sum()
        grads = psgrad.per_sample_grads(fn, torch.ones(4, 64), torch.ones(5, 4), randomness="same", **shape)
        assert torch.equal(grads, grads[:1].expand_as(grads))


def test_fn_without_randomness_draws_nothing() -> None:
    _, fn, params, batch = problem()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    psgrad.per_sample_grads(fn, params, batch)
    psgrad.per_sample_grads(fn, params, batch, max_bytes=10**7)
    assert torch.equal(torch.get_rng_state(), before)


def test_explain_draws_nothing() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    psgrad.explain(lambda w, x: F.dropout(x @ w).sum(), torch.ones(4, 8), torch.ones(5, 4))
    psgrad.explain(lambda w, x: F.dropout(x @ w).sum() * (2 if x[0] > 0 else 1), torch.ones(4, 8), torch.ones(5, 4))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_message_of_a_refused_draw() -> None:
    def fn(p: Any, x: Any) -> Any:
        return F.dropout(F.linear(x, p)).sum()

    place = f"test_robustness.py:{fn.__code__.co_firstlineno + 1} in {fn.__qualname__}"
    with pytest.raises(psgrad.PsgradError, match=re.escape(place)):
        psgrad.per_sample_grads(fn, torch.randn(3, 4), torch.randn(5, 4), randomness="error")


# ---- a second run, with other settings ---------------------------------------------------------------------


def _through_a_buffer(p: Any, x: Any) -> Any:
    h = F.dropout(x * p["scale"], 0.5)
    buffer = torch.zeros(3)
    buffer[:2] = F.linear(h, p["weight"])  # samples, into a tensor that has none
    return (buffer * (p["weight"] * 2).mul_(3).sum()).sum()  # and a function of parameters, changed in place


def _of_two_runs() -> Any:
    return {"weight": torch.randn(2, 4), "scale": torch.randn(4)}, torch.randn(1, 4).expand(6, 4)


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("chunk_size", [None, 4])
def test_draws_when_fn_runs_once_more(randomness: Any, chunk_size: Any) -> None:
    """Reproducible under a seed; with "same", one draw for all samples and all chunks."""
    params, x = _of_two_runs()

    def grads(size: Any) -> Any:
        torch.manual_seed(2)
        return psgrad.per_sample_grads(_through_a_buffer, params, x, randomness=randomness, chunk_size=size)["weight"]

    first = grads(chunk_size)
    assert torch.equal(first, grads(chunk_size))
    alike = [bool(torch.allclose(row, first[0])) for row in first]
    assert all(alike) if randomness == "same" else not all(alike)
    if randomness == "same":
        torch.testing.assert_close(first, grads(None))


def test_explain_and_max_bytes_when_fn_runs_once_more() -> None:
    params, x = _of_two_runs()
    report = psgrad.explain(_through_a_buffer, params, x)
    assert {(row.param, row.how.split(":")[0]) for row in report.rows} == {
        ("params['weight']", "rule linear"),
        ("params['weight']", "vmap"),
        ("params['scale']", "rule mul"),
    }
    assert len({(row.param, row.place, row.op) for row in report.rows}) == len(report.rows)
    torch.manual_seed(2)
    psgrad.per_sample_grads(_through_a_buffer, params, x, max_bytes=report.peak_bytes // 2)


# ---- transforms and graphs that fn looks at --------------------------------------------------------------------


@pytest.mark.parametrize("of", ["parameter", "sample"])
def test_a_pullback_inside_fn(of: Any) -> None:
    """The pullback is called when the transform that made it has ended."""

    def fn(p: Any, x: Any) -> Any:
        if of == "parameter":
            _, pull = torch.func.vjp(lambda w: torch.tanh(x @ w), p["w"])
        else:
            _, pull = torch.func.vjp(lambda x: torch.tanh(x @ p["w"]), x)
        return pull(x)[0].pow(2).sum()

    params, x = {"w": torch.randn(3, 3, dtype=torch.float64)}, torch.randn(4, 5, 3, dtype=torch.float64)
    want = torch.vmap(torch.func.grad(fn), in_dims=(None, 0))(params, x)
    found, values = psgrad.per_sample_grads(fn, params, x, return_value=True)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(values, torch.stack([fn(params, s) for s in x]))


@pytest.mark.parametrize("asks", [lambda h: h.grad_fn is not None, lambda h: not h.is_leaf])
def test_fn_may_look_at_the_graph(asks: Any) -> None:
    def fn(p: Any, x: Any) -> Any:
        h = x @ p["w"]
        return h.pow(2).sum() * (1 if asks(h) else 2)

    psgrad.testing.check(fn, {"w": torch.randn(3, 3)}, torch.randn(4, 5, 3))


# ---- views between layers, which the backward does not pass --------------------------------------------------


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", ["first", "activation", "second"])
def test_a_hook_between_layers_counts(place: str, late: bool) -> None:
    """A model sees a batch of one: layers meet without that axis, and a hook has its shape all the same."""
    params = {"a": torch.randn(5, 4, dtype=torch.float64), "b": torch.randn(3, 5, dtype=torch.float64)}
    batch = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))

    def double(grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        assert grads[0].dim() == 2
        assert grads[0].shape[0] == 1
        return tuple(2 * g for g in grads)

    def fn(p: dict[str, torch.Tensor], sample: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        made = {"first": F.linear(sample[0][None], p["a"])}
        if place in made and not late:
            made[place].grad_fn.register_prehook(double)
        made["activation"] = torch.tanh(made["first"])
        if place == "activation" and not late:
            made[place].grad_fn.register_prehook(double)
        made["second"] = F.linear(made["activation"], p["b"])
        if place == "second" or late:
            made[place].grad_fn.register_prehook(double)
        return F.cross_entropy(made["second"], sample[1][None])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = psgrad.per_sample_grads(fn, params, batch)
    torch.testing.assert_close(found, psgrad.testing.loop_grads(fn, params, batch))


def test_what_an_activation_made_can_be_written_to() -> None:
    params = {"a": torch.randn(5, 4, dtype=torch.float64), "b": torch.randn(3, 5, dtype=torch.float64)}
    batch = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))

    def fn(p: dict[str, torch.Tensor], sample: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = F.linear(sample[0][None], p["a"])
        with torch.no_grad():
            shift = torch.tanh(x).sum()
        h = torch.sin(x)
        h.add_(torch.cos(x)).add_(F.relu(x.detach(), inplace=False))
        h[0, 1] = 3 * sample[0][0]
        return F.cross_entropy(F.linear(h, p["b"]) + shift, sample[1][None])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = psgrad.per_sample_grads(fn, params, batch)
    torch.testing.assert_close(found, psgrad.testing.loop_grads(fn, params, batch))


class _Turned(torch.autograd.Function):
    """Gives an axis, as views do, and has a gradient of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return -3 * g[0]


def _hooked(h: torch.Tensor) -> torch.Tensor:
    a = h.unsqueeze(0)
    a.grad_fn.register_prehook(lambda grads: (3 * grads[0],))
    return a


@pytest.mark.parametrize("turned", [_Turned.apply, _hooked], ids=["a Function", "a hook"])
@pytest.mark.parametrize("then", [torch.tanh, lambda a: a], ids=["activation", "layer"])
def test_an_axis_of_a_function_of_its_own(turned: Any, then: Any) -> None:
    """What `fn` does where it gives an axis counts there alone, not for the tensor that has none."""

    def fn(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, p["a"])
        return F.linear(then(turned(h)), p["b"]).sin().sum() + h.cos().sum()

    params = {"a": torch.randn(5, 4, dtype=torch.float64), "b": torch.randn(3, 5, dtype=torch.float64)}
    x = torch.randn(6, 4, dtype=torch.float64)
    torch.testing.assert_close(psgrad.per_sample_grads(fn, params, x), psgrad.testing.loop_grads(fn, params, x))
