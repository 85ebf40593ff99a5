"""The rung between plain vmap and the loop for the whole call: one op in a loop over samples; answers; control flow."""

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psgrad
from psgrad.engine import faults as _faults
from psgrad.testing import check


@pytest.fixture(autouse=True)
def float64() -> None:
    torch.set_default_dtype(torch.float64)  # conftest puts it back


def warnings_of(fn: Any, params: Any, batch: Any) -> Any:
    """What psgrad warns of when gradients, norms and clipped sums are asked for, all of which equal the loop."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", psgrad.FallbackWarning)
        check(fn, params, batch)
        rows = psgrad.testing.loop_grads(fn, params, batch).flatten(1)
        torch.testing.assert_close(psgrad.per_sample_norms(fn, params, batch), rows.norm(dim=1))
        clipped = psgrad.clipped_grad(fn, params, batch, 0.5).grad.flatten()
        torch.testing.assert_close(clipped, (0.5 / rows.norm(dim=1)).clamp(max=1) @ rows)
        torch.testing.assert_close(psgrad.gram(fn, params, batch), rows @ rows.mT)
    return {str(w.message).splitlines()[0] for w in caught if w.category is psgrad.FallbackWarning}


PART = {"psgrad runs a part of fn in a loop over samples: exact, slower there"}


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: Any) -> Any:
        ctx.save_for_backward(x)
        ctx.shift = shift
        return x**3 + shift, x.detach().sign()

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Any) -> Any:
        return 3 * ctx.saved_tensors[0] ** 2 * g, None


class Newer(torch.autograd.Function):
    """In the newer style, but without a word about vmap."""

    @staticmethod
    def forward(x: Tensor) -> Any:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * ctx.saved_tensors[0]


_kept_apply = Newer.apply  # as people do

LOOPED = {
    "a Function's method that was kept": lambda p, x: _kept_apply(F.linear(x, p)).sum(),
    "old-style Function": lambda p, x: sum(t.sum() for t in Cubed.apply(F.linear(x, p), 2)),
    "newer Function": lambda p, x: Newer.apply(F.linear(x, p)).sum(),
    "Function of a parameter and a sample": lambda p, x: (Newer.apply(p * x) * F.linear(x, p)[:, None]).sum(),
    "no batching rule": lambda p, x: torch.column_stack([F.linear(x, p), x[:3]]).square().sum(),
    "in place": lambda p, x: F.linear(x, p).clone().put_(torch.tensor([0, 2]), x[:2] * 3).square().sum(),
}


@pytest.mark.parametrize("name", LOOPED)
def test_one_op_in_a_loop(name: Any) -> None:
    assert warnings_of(LOOPED[name], torch.randn(3, 4), torch.randn(5, 4)) <= PART


def test_everything_around_it_keeps_its_rules() -> None:
    fn = lambda p, x: Cubed.apply(F.linear(x, p["a"]), 1)[0] @ p["b"]
    params, x = {"a": torch.randn(3, 4), "b": torch.randn(3)}, torch.randn(5, 4)
    assert psgrad.testing.rules_used(fn, params, x) == {"params['a']": ["linear"], "params['b']": ["matmul"]}


def test_explain_shows_the_rung() -> None:
    fn = lambda p, x: Newer.apply(p["a"] * x).sum() + Newer.apply(p["b"]).sum() * x.sum()
    params = {"a": torch.randn(4), "b": torch.randn(4)}
    report = psgrad.explain(fn, params, torch.randn(5, 4))
    assert "\nin a loop over samples: Newer.apply at test_op_loop.py" in str(report)
    assert len(report.looped) == 1
    rows = {row.param: row.how for row in report.rows}
    assert rows["params['b']"] == "vmap: in a loop over samples, it does not say what it does under vmap"


def test_a_function_that_reaches_for_what_it_is_not_given() -> None:
    """A tensor that a Function closes over is not among its arguments: then the whole call runs in a loop."""

    def fn(p: Any, x: Any) -> Any:
        class Reaching(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, h: Tensor) -> Any:
                ctx.save_for_backward(h)
                return h * x.sum()

            @staticmethod
            def backward(ctx: Any, g: Tensor) -> Any:
                return g * x.sum()

        return Reaching.apply(F.linear(x, p)).square().sum()

    found = warnings_of(fn, torch.randn(3, 4), torch.randn(5, 4))
    assert found == {"psgrad runs fn in a loop over samples: exact, but slow"}


def _apply() -> Any:
    """`Function.apply` as it stands, and its code where it is Python."""
    method = torch.autograd.Function.__dict__["apply"]
    return method, getattr(getattr(method, "__func__", None), "__code__", None)


def test_functions_are_torchs_own_again() -> None:
    before = _apply()
    with pytest.warns(psgrad.FallbackWarning):
        psgrad.per_sample_grads(LOOPED["newer Function"], torch.randn(3, 4), torch.randn(5, 4))
    with pytest.raises(ZeroDivisionError):
        psgrad.per_sample_grads(lambda p, x: Newer.apply(p * x).sum() / 0 * (1 // 0), torch.randn(4), torch.randn(5, 4))
    assert before == _apply()


# ---- answers -------------------------------------------------------------------------------------------------


def _repeated(p: Any, x: Any) -> Any:
    counts = (x[:3] > 0).long()
    return torch.repeat_interleave(F.linear(x, p), counts).sum() + F.linear(x, p).sum()


ANSWERED = {
    "format": lambda p, x: F.linear(x, p).sum() * len(f"{(x > 9).sum()} of {x.shape}"),
    "repr": lambda p, x: F.linear(x, p).sum() * len(repr(x.sign().abs())),
    "nonzero as a tuple": lambda p, x: F.linear(x, p)[(x[:3] > 0).nonzero(as_tuple=True)].sum() + p.sum(),
    "equal": lambda p, x: F.linear(x, p).sum() * (2 if torch.equal(x, x.clone()) else 3),
    "equal for some": lambda p, x: F.linear(x, p).sum() * (2 if torch.equal(x.relu(), x) else 3),
    "int of a boolean": lambda p, x: F.linear(x, p).sum() * int(x[0] > 0),
    "arange": lambda p, x: (torch.arange((x > 0).sum() + 1) * F.linear(x, p).sum()).sum(),
    "gaussian_nll_loss": lambda p, x: F.gaussian_nll_loss(F.linear(x, p), x[:3], x[1:].exp()),
    "repeat_interleave": _repeated,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own loop, in C++
@pytest.mark.parametrize("name", ANSWERED)
def test_what_asks_for_a_python_value_or_a_shape(name: Any) -> None:
    found = warnings_of(ANSWERED[name], torch.randn(3, 4), torch.randn(6, 4))
    assert found <= PART | {"psgrad splits 6 samples into 6 groups, which disagree at"}


# ---- control flow --------------------------------------------------------------------------------------------

CONTROL = {
    "cond": lambda p, x: torch.cond(x.sum() > 0, lambda h: h.sin(), lambda h: h.cos(), (F.linear(x, p),)).sum(),
    "while_loop": lambda p, x: torch._higher_order_ops.while_loop(
        lambda i, h: h.square().sum() < 40 + i, lambda i, h: (i + 1, h * 1.5), (torch.tensor(0), F.linear(x, p) + 0.1)
    )[1].sum(),
    "scan": lambda p, x: torch._higher_order_ops.scan(
        lambda h, a: (torch.tanh(F.linear(h, p[:, :3]) + a), h * a), torch.zeros(3), x[:, None] + p[0, 0]
    )[1].sum(),
    "map": lambda p, x: torch._higher_order_ops.map(lambda a, h: (a * h).sin(), x, F.linear(x, p)).sum(),
}


@pytest.mark.parametrize("name", CONTROL)
def test_control_flow(name: Any) -> None:
    params, x = torch.randn(3, 4), torch.randn(5, 4)
    alone = torch.stack([torch.func.grad(PLAIN[name])(params, s) for s in x])
    with warnings.catch_warnings():
        warnings.simplefilter("error", psgrad.FallbackWarning)
        for _ in range(2):
            torch.testing.assert_close(psgrad.per_sample_grads(CONTROL[name], params, x), alone)


_FRESH = """
import sys, warnings, torch, psgrad
from torch import nn
fn = lambda p, x: torch.cond(x.sum() > 0, lambda h: h.sin(), lambda h: h.cos(), (nn.functional.linear(x, p),)).sum()
p, x = torch.ones(3, 4), torch.tensor([[1.0, 2, 3, 4], [-1, 0, 0, 0]])
assert "torch._dynamo.eval_frame" not in sys.modules
warnings.filterwarnings("ignore", "Dynamo does not know how to trace")
warnings.simplefilter("error", psgrad.FallbackWarning)
found = psgrad.per_sample_norms(fn, p, x)
assert "torch._dynamo.eval_frame" in sys.modules
slopes = torch.tensor([10.0, -1.0])
want = 3**0.5 * x.norm(dim=1) * torch.stack([slopes[0].cos(), slopes[1].sin()]).abs()
torch.testing.assert_close(found, want)
"""


def test_control_flow_in_a_process_that_has_not_loaded_a_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", _FRESH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
@pytest.mark.parametrize("name", CONTROL)
def test_control_flow_in_the_loop_for_the_whole_call(name: Any) -> None:
    """`.numpy()` sends the whole call to the loop."""
    params, x = torch.randn(3, 4), torch.randn(5, 4)
    alone = torch.stack([torch.func.grad(PLAIN[name])(params, s) for s in x])
    found = psgrad.per_sample_grads(lambda p, s: CONTROL[name](p, s) + float(s.numpy().sum()), params, x)
    torch.testing.assert_close(found, alone)


def _doubling(p: Any, x: Any) -> Any:
    i, h = 0, F.linear(x, p) + 0.1
    while h.square().sum() < 40 + i:
        i, h = i + 1, h * 1.5
    return h.sum()


def _scanned(p: Any, x: Any) -> Any:
    h, total = torch.zeros(3), 0
    for a in x[:, None] + p[0, 0]:
        h, total = torch.tanh(F.linear(h, p[:, :3]) + a), total + (h * a).sum()
    return total


PLAIN = {
    "cond": lambda p, x: (F.linear(x, p).sin() if x.sum() > 0 else F.linear(x, p).cos()).sum(),
    "while_loop": _doubling,
    "scan": _scanned,
    "map": lambda p, x: (x[:, None] * F.linear(x, p)).sin().sum(),
}


# ---- torch's own faults ----------------------------------------------------------------------------------------

S = torch.Tensor
WRONG = {  # a call of each function in the table of faults for which plain vmap is wrong, or refuses
    torch.select_scatter: lambda p, x: (torch.select_scatter(x * 1.0, p[0] * x[0], 0, 1) * x.sin()).sum(),
    torch.index_select: lambda p, x: torch.index_select(p * x, 1, (x[0, 0] > 0.5).long()).sin().sum(),
    torch.roll: lambda p, x: torch.roll((p * x).sum(), 2) * x.sum(),
    S.squeeze_: lambda p, x: ((p * x)[:1, :1].clone().squeeze_() ** 2).sum(),
    S.as_strided_: lambda p, x: (p * x).clone().as_strided_((2, 2), (1, 2), 1).sin().prod(),
    F.embedding: lambda p, x: F.embedding((x[:, 0] > 0.5).long(), p * x, 1).square().sum(),
    torch.index_fill: lambda p, x: (torch.index_fill(torch.ones(3, 4), 0, torch.tensor([1]), (p * x).sum()) * x).sum(),
    S.index_fill_: lambda p, x: (torch.ones(3, 4).index_fill_(0, torch.tensor([1]), (p * x).sum()) * x).sum(),
    torch.as_strided_copy: lambda p, x: torch.as_strided_copy(p, (2, 2), (1, 2), 1).sin().prod() * x.sum(),
    torch.as_strided_scatter: lambda p, x: (
        torch.as_strided_scatter(p * x, x[:2, :2] * 2, (2, 2), (1, 3), 1).sin().sum()
    ),
    S.addbmm_: lambda p, x: (p @ x.mT).clone().addbmm_((p * x)[None], x.mT[None]).sin().sum(),
    S.cumprod_: lambda p, x: (p * x).cumprod_(0).sin().sum(),
    S.float_power_: lambda p, x: (p * x).square().float_power_(1.5).sum(),
    S.hypot_: lambda p, x: (p * x).hypot_(x).sum(),
    S.index_reduce_: lambda p, x: (p * x).clone().index_reduce_(0, torch.tensor([0, 0]), x[:2], "prod").sin().sum(),
    S.ldexp_: lambda p, x: (p * x).ldexp_(x).sum(),
    S.pow_: lambda p, x: (p * x).square().pow_(x).sum(),
    S.__ipow__: lambda p, x: (p * x).square().__ipow__(x).sum(),
}


def _runs(fn: Any, p: Any, x: Any) -> Any:
    try:
        torch.func.grad(fn)(p, x)
    except RuntimeError:
        return False
    return True


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning", "ignore:index_reduce")
@pytest.mark.parametrize(
    "fault",
    [fault for fault in _faults.TABLE if not fault.what.startswith("does not look")],
    ids=lambda f: f.functions[0].__name__,
)
def test_faults_of_torch(fault: Any) -> None:
    fn = WRONG[fault.functions[0]]
    if not _runs(fn, torch.rand(3, 4) + 0.5, torch.rand(3, 4) + 0.1):
        pytest.skip("this torch refuses to differentiate it, samples or not")
    check(fn, torch.rand(3, 4) + 0.5, torch.rand(5, 3, 4) + 0.1)
    check(fn, torch.rand(3, 4) + 0.5, torch.rand(1, 3, 4) + 0.1)


MISTAKES = {  # which torch refuses, and its vmap does not
    "embedding of a parameter, below": (lambda p, i: F.embedding(i - 1, p).sum(), IndexError),
    "embedding of a parameter, above": (lambda p, i: F.embedding(i + 1, p).sum(), IndexError),
    "embedding of a table per sample": (lambda p, i: F.embedding(i - 1, p * (1 + i)).sum(), IndexError),
    "embedding, by names": (lambda p, i: F.embedding(weight=p * (1 + i), input=i - 1).sum(), IndexError),
    "one_hot": (lambda p, i: (F.one_hot(i, 2) * p[0, 0]).sum(), RuntimeError),
    "one_hot, by names": (lambda p, i: (F.one_hot(input=i, num_classes=2) * p[0, 0]).sum(), RuntimeError),
    "index_fill": (lambda p, i: torch.index_fill(p * i, 0, torch.tensor([4]), 1.0).sum(), IndexError),
    "select_scatter": (lambda p, i: torch.select_scatter(p * i, p[0], 0, 3).sum(), IndexError),
}


def test_faults_are_known_by_the_names_of_arguments() -> None:
    """And what vmap gets right of these functions is left to it."""
    p, x = torch.rand(3, 4), torch.rand(5, 3, 4)
    assert not warnings_of(lambda p, x: torch.roll(input=(p * x).sum(), shifts=2) * x.sum(), p, x)
    assert not warnings_of(lambda p, x: (torch.roll(input=p * x, shifts=1, dims=0) * x).sum(), p, x)
    index = lambda x: (x[0, 0] > 0.5).long()
    assert not warnings_of(lambda p, x: torch.index_select(input=p * x, dim=1, index=index(x)).sin().sum(), p, x)
    assert not warnings_of(lambda p, x: F.embedding(weight=p * x, input=index(x), padding_idx=1).square().sum(), p, x)


@pytest.mark.parametrize("name", MISTAKES)
def test_what_torch_refuses_is_refused(name: Any) -> None:
    fn, error = MISTAKES[name]
    p, i = torch.rand(3, 4), torch.tensor([0, 1, 2])
    with pytest.raises(error):
        for one in i:
            fn(p, one)
    with pytest.raises(error):
        psgrad.per_sample_grads(fn, p, i)


@pytest.mark.parametrize("name", [f.__name__ for f in WRONG])
def test_torch_has_not_mended_it_yet(name: Any) -> None:
    """Fails when torch gets right what the table of faults is for: then the entry can go."""
    fn = next(f for function, f in WRONG.items() if function.__name__ == name)
    p = torch.rand(3, 4) + 0.5
    mended = True
    for x in (torch.rand(5, 3, 4) + 0.1, torch.rand(1, 3, 4) + 0.1):
        leaves = p.expand(len(x), 3, 4).requires_grad_()
        try:
            found = torch.autograd.grad(torch.vmap(fn)(leaves, x).sum(), leaves)[0]
            mended = mended and torch.allclose(found, psgrad.testing.loop_grads(fn, p, x))
        except Exception:
            mended = False
    assert not mended


# ---- beside torch.compile --------------------------------------------------------------------------------------


@pytest.fixture
def model() -> Any:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def compilers(test: Any) -> Any:
    """Warnings of dynamo's and inductor's own are let through."""
    for text in ("The .grad attribute of a Tensor that is not a leaf", ".torch.jit.script_method. is deprecated"):
        test = pytest.mark.filterwarnings(f"ignore:{text}")(test)
    return test


@compilers
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_functions_inside_fn(backend: Any, model: Any) -> None:
    if backend == "inductor":
        pytest.importorskip("torch._inductor")
    compiled = torch.compile(lambda h: torch.tanh(h) * 2, backend=backend, fullgraph=True)
    net = torch.compile(model, backend=backend)
    whole, params = psgrad.from_module(net, F.mse_loss)
    plain, own = psgrad.from_module(model, F.mse_loss)
    fn = lambda p, x: compiled(F.linear(x, p)).square().sum()
    for _ in range(3):
        check(fn, torch.randn(3, 4), torch.randn(5, 4))
        batch = torch.randn(5, 4), torch.randn(5, 3)
        params = {k: torch.randn_like(p) for k, p in params.items()}
        found = psgrad.per_sample_grads(whole, params, batch)
        want = psgrad.per_sample_grads(plain, dict(zip(own, params.values(), strict=True)), batch)
        torch.testing.assert_close(list(found.values()), list(want.values()))


QUANTITIES = {
    "per_sample_grads": lambda fn, p, b: psgrad.per_sample_grads(fn, p, b),
    "per_sample_norms": lambda fn, p, b: psgrad.per_sample_norms(fn, p, b),
    "weighted_grad": lambda fn, p, b: psgrad.weighted_grad(fn, p, b, lambda norms: 1 / norms),
    "clipped_grad": lambda fn, p, b: psgrad.clipped_grad(fn, p, b, 0.5).grad,
    "gram": lambda fn, p, b: psgrad.gram(fn, p, b),
    "grad_stats": lambda fn, p, b: psgrad.grad_stats(fn, p, b).variance,
    "factored_grads": lambda fn, p, b: psgrad.factored_grads(fn, p, b).clipped_sum(0.5),
    "explain": lambda fn, p, b: torch.tensor(psgrad.explain(fn, p, b).result_bytes),
    "from_module": lambda fn, p, b: psgrad.per_sample_norms(psgrad.from_module(_MODEL, F.mse_loss)[0], p, b),
}
_MODEL = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


@compilers
@pytest.mark.parametrize("name", QUANTITIES)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_inside_a_compiled_function(name: Any, backend: Any) -> None:
    fn, params = psgrad.from_module(_MODEL, F.mse_loss)
    quantity = QUANTITIES[name]

    def step(params: Any, x: Any, y: Any) -> Any:
        found = quantity(fn, params, (x * 2, y))
        return torch.utils._pytree.tree_map(lambda t: t * 3 + 1, found)

    compiled = torch.compile(step, backend=backend)
    for _ in range(2):
        args = {k: torch.randn_like(p) for k, p in params.items()}, torch.randn(5, 4), torch.randn(5, 3)
        torch.testing.assert_close(compiled(*args), step(*args))


def test_the_rules_run_inside_a_compiled_function() -> None:
    fn, params = psgrad.from_module(_MODEL, F.mse_loss)
    compiled = torch.compile(lambda p, x, y: psgrad.testing.rules_used(fn, p, (x, y)), backend="eager")
    used = compiled(params, torch.randn(5, 4), torch.randn(5, 3))
    assert used == {f"params['{name}']": ["linear"] for name in params}
