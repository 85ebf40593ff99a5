"""What `fn` closes over is frozen and costs nothing: no graph starts there, nothing is kept, no backward runs."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import psgrad
from psgrad.streaming.budget import Meter

N = 6


@pytest.fixture(autouse=True)
def float64() -> None:
    torch.set_default_dtype(torch.float64)  # conftest puts it back


def _body() -> Any:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 16),
        nn.LayerNorm(16),
        nn.Tanh(),
        nn.Unflatten(1, (2, 8)),
        nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True),
        nn.Flatten(),
    )


def _closing_over() -> Any:
    """A body, a leaf and a tensor with a graph: all of them require grad, none is in params."""
    body, scale = _body(), nn.Parameter(torch.randn(16))
    shift = torch.tanh(scale * 2)

    def fn(p: Any, sample: Any) -> Any:
        x, y = sample
        h = body(x[None]) * scale + shift + torch.cat([scale[:8], shift[8:]])
        return F.cross_entropy(F.linear(torch.sin(h), p["weight"], p["bias"]), y[None])

    return fn, {"weight": torch.randn(3, 16), "bias": torch.randn(3)}


def _with_frozen_parameters() -> Any:
    model = nn.Sequential(_body(), nn.Linear(16, 3))
    model[0].requires_grad_(False)
    return psgrad.from_module(model, F.cross_entropy)


def _with_some_of_the_params() -> Any:
    fn, params = psgrad.from_module(nn.Sequential(_body(), nn.Linear(16, 3)), F.cross_entropy)
    return fn, {name: p for name, p in params.items() if name.startswith("1.")}


every_way = pytest.mark.parametrize("make", [_closing_over, _with_frozen_parameters, _with_some_of_the_params])


def _batch() -> Any:
    return torch.randn(N, 3, 6, 6), torch.randint(3, (N,))


class Kernels(TorchDispatchMode):
    """The names of the kernels that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@every_way
def test_exact(make: Any) -> None:
    psgrad.testing.check(*make(), _batch(), rtol=1e-9, atol=1e-9)


@every_way
def test_nothing_is_saved_in_the_body(make: Any) -> None:
    """The head saves its input; the loss what it needs. Nothing is as large as an activation of the body."""
    fn, params = make()
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        psgrad.per_sample_grads(fn, params, _batch())
    assert 1 <= len(sizes) <= 6
    assert max(sizes) == N * 16  # the head's input


@every_way
def test_no_backward_runs_in_the_body(make: Any) -> None:
    fn, params = make()
    with Kernels() as kernels:
        psgrad.per_sample_grads(fn, params, _batch())
    assert [name for name in kernels.names if "backward" in name] == [
        "nll_loss_backward",
        "_log_softmax_backward_data",
    ]
    assert "convolution" in kernels.names


def test_memory_does_not_grow_with_the_depth_of_the_body() -> None:
    def peak(depth: Any) -> Any:
        body = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(depth)])
        scale = nn.Parameter(torch.randn(64))

        def fn(p: Any, x: Any) -> Any:
            return (body(x) * scale).matmul(p).square().sum()

        params, x = torch.randn(64), torch.randn(N, 20, 64)
        with Meter([params, x, scale, *body.parameters()]) as meter:
            psgrad.per_sample_grads(fn, params, x)
        return meter.peak

    assert peak(8) == peak(2)


def test_the_caller_may_still_differentiate_the_body() -> None:
    """The leaves are left as they are: with their graph, their gradient and their flag."""
    body = nn.Linear(4, 4)
    y = body(torch.ones(4)).sum()
    psgrad.per_sample_grads(lambda p, x: (body(x) * p * y).sum(), torch.randn(4), torch.randn(N, 4))
    assert body.weight.requires_grad
    assert body.weight.grad is None
    y.backward()
    assert torch.equal(body.weight.grad, torch.ones(4, 4))


@pytest.mark.parametrize("write", ["add_", "__iadd__", "copy_", "__setitem__"])
def test_a_closed_over_leaf_is_not_written(write: Any) -> None:
    """Torch refuses to change a leaf that requires grad; so it stays."""
    w = nn.Parameter(torch.randn(4))
    before = w.detach().clone()

    def fn(p: Any, x: Any) -> Any:
        args = (0, 1.0) if write == "__setitem__" else (torch.ones(4),)
        getattr(w, write)(*args)
        return (p * x * w).sum()

    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        psgrad.per_sample_grads(fn, torch.randn(4), torch.randn(N, 4))
    assert torch.equal(w, before)


@pytest.mark.parametrize(
    "use",
    [
        lambda w, x: x * (w if w.requires_grad else 0),
        lambda w, x: x * (w if w.is_leaf and w.grad is None else 0),
        lambda w, x: x @ torch.outer(w[None].mT[:, 0], w),
        lambda w, x: x * copy.deepcopy(w),
        lambda w, x: x * {w: w}[w],
        lambda w, x: torch.where(x > 0, x, w),
    ],
)
def test_uses_of_a_closed_over_leaf(use: Any) -> None:
    w = nn.Parameter(torch.randn(4))
    psgrad.testing.check(lambda p, x: use(w, x * p).square().sum(), torch.randn(4), torch.randn(N, 4))


DIFFERENTIATES = {
    "a closed-over leaf": lambda p, x, w: p * x * torch.autograd.grad(w.square().sum(), w)[0],
    "a closed-over leaf, perhaps unused": lambda p, x, w: (
        p * x * torch.autograd.grad((w * x).sin().sum(), w, allow_unused=True)[0]
    ),
    "a leaf of its own": lambda p, x, w: p * x * _slope(torch.ones(4).requires_grad_()),
    "a leaf made as such": lambda p, x, w: p * x * _slope(torch.ones(4, requires_grad=True)),
    "the sample": lambda p, x, w: p * _slope(x.detach().requires_grad_()),
    "a jacobian": lambda p, x, w: p * x * torch.autograd.functional.jacobian(lambda t: (t * w).sin(), w.detach()),
    "a jacobian at the sample": lambda p, x, w: p * torch.autograd.functional.jacobian(lambda t: (t * w).sin(), x),
    "a jacobian of the sample": lambda p, x, w: p * torch.autograd.functional.jacobian(lambda t: (t * x).sin(), w),
    "backward": lambda p, x, w: p * x * _after_backward(torch.ones(4, requires_grad=True)),
}


def _slope(leaf: Any) -> Any:
    return torch.autograd.grad(leaf.exp().sin().sum(), leaf)[0]


def _after_backward(leaf: Any) -> Any:
    leaf.exp().sum().backward()
    return leaf.grad


def test_requires_grad_is_what_autograd_says() -> None:
    """Under vmap too: what comes from parameters requires grad, a sample does not."""
    w, seen = nn.Parameter(torch.randn(4)), []

    def fn(p: Any, x: Any) -> Any:
        seen.append([t.requires_grad for t in (p, p * 2, x * p, x, w, x * w)])
        return (x * p).sum()

    psgrad.per_sample_grads(fn, torch.randn(4), torch.randn(N, 4))
    assert seen == [[True, True, True, False, True, False]]


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
@pytest.mark.parametrize("what", DIFFERENTIATES)
def test_fn_that_differentiates(what: Any) -> None:
    """Frozen is what nobody differentiates: a gradient inside fn is exact, by the loop where vmap refuses it."""
    w = nn.Parameter(torch.randn(4))
    fn = lambda p, x: DIFFERENTIATES[what](p, x, w).square().sum()
    psgrad.testing.check(fn, torch.randn(4), torch.randn(N, 4), rtol=1e-9, atol=1e-9)
