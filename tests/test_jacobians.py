"""Functions with several outputs: Jacobians and neural tangent kernels, beside the loop and beside jacrev."""

from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import psgrad
from psgrad.streaming.budget import Meter

from .cases import CASES, Case, N
from .test_contract import assert_close
from .test_quantities import TiedGPT, linear_loss, pytestmark, warns, workspace  # noqa: F401


def several(fn: Any) -> Any:
    """Two numbers of a loss: it, and its sine."""

    def outputs(params: Any, sample: Any) -> Tensor:
        loss = fn(params, sample).reshape(())
        return torch.stack([loss, loss.sin()])

    return outputs


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_as_the_loop_has_them(case: Case) -> None:
    fn, params, batch = case.make()
    outputs = several(fn)
    each = [psgrad.testing.loop_grads(lambda p, s, k=k: outputs(p, s)[k], params, batch) for k in range(2)]
    want = optree.tree_map(lambda *rows: torch.stack(rows, 1), *each)
    rows = torch.cat([t.reshape(N, 2, t[0, 0].numel()) for t in optree.tree_leaves(want)], 2)
    full = torch.einsum("nkp,mlp->nmkl", rows, rows)
    with warns(case):
        for options in ({}, {"chunk_size": 3}):
            assert_close(psgrad.per_sample_jacobians(outputs, params, batch, **options), want)
            assert_close(psgrad.ntk(outputs, params, batch, **options), full)
            trace = psgrad.ntk(outputs, params, batch, outputs="trace", **options)
            assert_close(trace, torch.einsum("nmkk->nm", full))


def conv_net() -> Any:
    layers = [nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)]
    model = nn.Sequential(*layers).double()
    params = {name: p.detach() for name, p in model.named_parameters()}
    return lambda p, x: functional_call(model, p, (x[None],))[0], params, torch.randn(6, 2, 8, 8).double()


def shared_net() -> Any:
    """Logits of two positions, with a table that is read and multiplied, and a block called twice: outputs (2, 9)."""
    model = TiedGPT(9, 8, 2).double().eval()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def fn(p: Any, x: Tensor) -> Tensor:
        logits: Tensor = functional_call(model, p, (x[None],))
        return logits

    return fn, params, torch.randint(9, (5, 2))


@pytest.mark.parametrize("make", [conv_net, shared_net])
def test_as_jacrev_has_them(make: Any) -> None:
    fn, params, batch = make()
    want = vmap(jacrev(fn), in_dims=(None, 0))(params, batch)
    assert_close(psgrad.per_sample_jacobians(fn, params, batch), want)
    outputs = fn(params, batch[0]).dim()
    rows = torch.cat([want[name].flatten(1, outputs).flatten(2) for name in params], 2)
    full = torch.einsum("nkp,mlp->nmkl", rows, rows)
    for options in ({}, {"chunk_size": 2}, {"max_bytes": 200_000}):
        assert_close(psgrad.ntk(fn, params, batch, **options), full)
        assert_close(psgrad.ntk(fn, params, batch, batch[1:4], **options), full[:, 1:4])
        trace = torch.einsum("nmkk->nm", full)
        assert_close(psgrad.ntk(fn, params, batch, outputs="trace", **options), trace)
        assert_close(psgrad.ntk(fn, params, batch, batch[1:4], outputs="trace", **options), trace[:, 1:4])


def test_one_number_is_an_output() -> None:
    w, x = torch.randn(3, 4).double(), torch.randn(5, 4).double()
    assert_close(psgrad.per_sample_jacobians(linear_loss, w, x), psgrad.per_sample_grads(linear_loss, w, x))
    assert_close(psgrad.ntk(linear_loss, w, x)[:, :, 0, 0], psgrad.gram(linear_loss, w, x))
    none = psgrad.per_sample_jacobians(lambda w, x: (w @ x)[:0], w, x)
    assert none.shape == (5, 0, 3, 4)
    assert psgrad.ntk(lambda w, x: (w @ x)[:0], w, x).shape == (5, 5, 0, 0)
    assert psgrad.per_sample_jacobians(lambda w, x: w @ x, w, x[:0]).shape == (0, 3, 3, 4)
    assert psgrad.ntk(lambda w, x: w @ x, w, x[:0], x).shape == (0, 5, 3, 3)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_samples_that_do_not_count(chunk_size: int | None) -> None:
    w, x, valid = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([True, False, True, True, False])
    fn = lambda w, x: torch.tanh(w @ x)
    padded, options = x.masked_fill(~valid[:, None], torch.nan), {"valid": valid, "chunk_size": chunk_size}
    found = psgrad.per_sample_jacobians(fn, w, padded, **options)
    assert_close(found[valid], psgrad.per_sample_jacobians(fn, w, x[valid]))
    assert not found[~valid].any()
    kernel = psgrad.ntk(fn, w, padded, **options)
    assert_close(kernel[valid][:, valid], psgrad.ntk(fn, w, x[valid]))
    assert not kernel[~valid].any()
    assert not kernel[:, ~valid].any()
    against = psgrad.ntk(fn, w, padded, x, outputs="trace", **options)
    assert_close(against[valid], psgrad.ntk(fn, w, x[valid], x, outputs="trace"))


def test_a_bad_sample_touches_its_own_rows_only() -> None:
    w, x = torch.randn(3, 4), torch.randn(5, 4)
    fn = lambda w, x: torch.tanh(w @ x)
    bad, good = x.clone(), torch.tensor([0, 1, 3, 4])
    bad[2, 1] = torch.nan
    kernel = psgrad.ntk(fn, w, bad)
    assert_close(kernel[good][:, good], psgrad.ntk(fn, w, x[good]))
    assert not kernel[2].isfinite().any()
    assert_close(psgrad.per_sample_jacobians(fn, w, bad)[good], psgrad.per_sample_jacobians(fn, w, x[good]))


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_all_outputs_of_a_sample_draw_the_same(randomness: Any) -> None:
    """Two outputs that are the same function of what is drawn have the same rows; samples differ, or do not."""
    fn = lambda w, x: (w * x * torch.rand(2)).sum().expand(2)
    w, x = torch.zeros(2), torch.ones(4, 2)
    for chunk_size in (None, 3):
        found = psgrad.per_sample_jacobians(fn, w, x, randomness=randomness, chunk_size=chunk_size)
        assert torch.equal(found[:, 0], found[:, 1])
        assert torch.equal(found[0], found[1]) == (randomness == "same")
        for outputs in ("full", "trace"):
            kernel = psgrad.ntk(fn, w, x, randomness=randomness, chunk_size=chunk_size, outputs=outputs)
            kernel = kernel if outputs == "trace" else kernel.sum((2, 3)) / 2
            assert_close(kernel, kernel.mT.contiguous())  # a chunk that runs again draws the same
    with pytest.raises(psgrad.ArgumentError, match='which randomness="error" refuses'):
        psgrad.ntk(fn, w, x, randomness="error")


def test_one_warning_where_no_output_has_a_gradient() -> None:
    w, x = torch.randn(3, 4), torch.randn(5, 4)
    with pytest.warns(psgrad.UnusedParametersWarning) as caught:
        psgrad.per_sample_jacobians(lambda w, x: x, w, x)
    assert len(caught) == 1
    half = lambda w, x: torch.stack([x.sum(), (w @ x).sum()])  # one has: no warning, and these are errors
    assert not psgrad.per_sample_jacobians(half, w, x)[:, 0].any()
    assert not psgrad.ntk(half, w, x)[:, :, 0].any()


def test_memory_stays_far_below_the_jacobian() -> None:
    """Of a net of a million parameters, 64 samples and 10 outputs: 2.6 GB, were it there."""
    model = nn.Sequential(nn.Linear(784, 1024), nn.Tanh(), nn.Linear(1024, 200), nn.Tanh(), nn.Linear(200, 10))
    params = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(64, 784)
    with Meter([*params.values(), x]) as meter:
        kernel = psgrad.ntk(lambda p, x: functional_call(model, p, (x,)), params, x)
    assert kernel.shape == (64, 64, 10, 10)
    size = sum(p.numel() for p in params.values())
    assert size > 1_000_000
    assert meter.peak < 64 * 10 * size * 4 / 50


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no tensor": (
        lambda w, x: psgrad.ntk(lambda w, x: (w, x), w, x),
        psgrad.ArgumentTypeError,
        "fn must return the outputs for one sample as a tensor, but returned a tuple\n"
        "  return a floating-point tensor, of any shape.",
    ),
    "integers": (
        lambda w, x: psgrad.per_sample_jacobians(lambda w, x: (w @ x).long(), w, x),
        psgrad.ArgumentTypeError,
        "fn must return the outputs for one sample as a tensor, but returned a tensor of torch.int64\n"
        "  return a floating-point tensor, of any shape.",
    ),
    "outputs": (
        lambda w, x: psgrad.ntk(lambda w, x: w @ x, w, x, outputs="diagonal"),
        psgrad.ArgumentError,
        'outputs=\'diagonal\' is not one of "full", "trace"\n'
        "  full: all pairs of outputs; trace: the sum over outputs with themselves.",
    ),
    "other shapes": (
        lambda w, x: psgrad.ntk(lambda w, x: w[0, 0] * x, w, x, x[:, :2]),
        psgrad.ArgumentError,
        "fn returns outputs of shape (4,) for batch, of shape (2,) for other\n  the kernel needs as many for both.",
    ),
    "transform": (
        lambda w, x: torch.func.grad(lambda w: psgrad.ntk(lambda w, x: w @ x, w, x).sum())(w),
        psgrad.ArgumentError,
        "ntk is called inside a torch.func transform\n"
        "  compute it from per_sample_grads there, which can be differentiated and vmapped.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, kind, message = REFUSED[name]
    with pytest.raises(kind) as error:
        call(torch.randn(3, 4), torch.randn(5, 4))
    assert str(error.value) == message


def test_a_module_of_psgrads_own() -> None:
    """What `from_module` makes, with the model's output as its value."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    fn, params = psgrad.from_module(model, lambda y, target: (y - target)[0])
    batch = torch.randn(6, 4).double(), torch.randn(6, 3).double()
    want = vmap(jacrev(lambda p, x: functional_call(model, p, (x,))), in_dims=(None, 0))(params, batch[0])
    assert_close(psgrad.per_sample_jacobians(fn, params, batch), want)
    assert F.mse_loss(want["2.bias"], torch.eye(3).double().expand(6, 3, 3)) < 1e-20


def test_outputs_with_derivatives_that_torch_has_only_in_grad_mode() -> None:
    """The derivative of silu by the points has no forward mode where gradients are off: fn runs as it will later."""
    net = nn.Sequential(nn.Linear(2, 4), nn.SiLU(), nn.Linear(4, 1)).double()
    params = {name: p.detach() for name, p in net.named_parameters()}

    def fn(p: Any, x: Tensor) -> Tensor:
        u = lambda x: functional_call(net, p, (x,))[0]
        return torch.stack([u(x), torch.func.hessian(u)(x).trace()])

    x = torch.rand(3, 2, dtype=torch.float64)
    with torch.no_grad():
        kernel = psgrad.ntk(fn, params, x)
    jacobians = [jacrev(fn)(params, row) for row in x]
    rows = torch.stack([torch.cat([j[name].flatten(1) for name in params], 1) for j in jacobians])
    assert_close(kernel, torch.einsum("nkp,mlp->nmkl", rows, rows))
    assert kernel.requires_grad is False
