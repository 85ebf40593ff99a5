"""Functions with several outputs: Jacobians and neural tangent kernels, beside the loop and beside jacrev."""

from typing import Any
from unittest import mock

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

import psgrad
from psgrad.factors import costs
from psgrad.factors.dense import Dense
from psgrad.factors.outer import Outer
from psgrad.factors.outputs import add_products, mirrored
from psgrad.factors.rows import Rows
from psgrad.factors.sum import Placement, sum_of
from psgrad.quantities import jacobians
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
    assert_close(psgrad.ntk(fn, params, batch, max_bytes=200_000), full)
    for options in ({}, {"chunk_size": 2}):
        assert_close(psgrad.ntk(fn, params, batch, **options), full)
        assert_close(psgrad.ntk(fn, params, batch, batch[1:4], **options), full[:, 1:4])
        trace = torch.einsum("nmkk->nm", full)
        assert_close(psgrad.ntk(fn, params, batch, outputs="trace", **options), trace)
        assert_close(psgrad.ntk(fn, params, batch, batch[1:4], outputs="trace", **options), trace[:, 1:4])


def counting(fn: Any) -> tuple[Any, list[int]]:
    """`fn`, and a list that grows whenever it runs."""
    calls: list[int] = []

    def counted(params: Any, sample: Any) -> Tensor:
        calls.append(1)
        return fn(params, sample)  # type: ignore[no-any-return]

    return counted, calls


def test_fn_runs_once_for_all_outputs() -> None:
    fn, calls = counting(lambda w, x: torch.tanh(w @ x))
    w, x = torch.randn(3, 4).double(), torch.randn(5, 4).double()
    for quantity in (psgrad.per_sample_jacobians, psgrad.ntk, lambda *a: psgrad.ntk(*a, outputs="trace")):
        calls.clear()
        quantity(fn, w, x)
        assert len(calls) == 2  # and once for the shape of what it returns
    calls.clear()
    psgrad.ntk(fn, w, x, chunk_size=2)  # chunks 0, 1, 2 as rows, and 1, 2, 2 as columns
    assert len(calls) == 1 + 6


class Doubled(torch.autograd.Function):
    """Twice its input, by a backward that is right only once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = 2
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        factor, ctx.factor = ctx.factor, 0
        return factor * g


def test_a_backward_of_somebody_elses_runs_once_for_each_forward() -> None:
    fn, calls = counting(lambda w, x: Doubled.apply(torch.tanh(w @ x)))
    w, x = torch.randn(3, 4).double(), torch.randn(5, 4).double()
    want = 2 * psgrad.per_sample_jacobians(lambda w, x: torch.tanh(w @ x), w, x)
    with pytest.warns(psgrad.FallbackWarning):
        assert_close(psgrad.per_sample_jacobians(fn, w, x), want)
    assert len(calls) > 3
    rows = want.flatten(2)
    with pytest.warns(psgrad.FallbackWarning):
        assert_close(psgrad.ntk(fn, w, x), torch.einsum("nkp,mlp->nmkl", rows, rows))


def branching(w: Any, x: Tensor) -> Tensor:
    """Two ways for samples to go; one uses a parameter that the other does not."""
    if x.sum() > 0:
        return torch.tanh(w["a"] @ x)
    return torch.sin(w["a"] @ (w["b"] * x))


def test_samples_that_part_ways_run_once_in_each_group() -> None:
    w = {"a": torch.randn(3, 4).double(), "b": torch.randn(4).double()}
    x = torch.randn(6, 4).double()
    x[::2] = x[::2].abs()
    x[1::2] = -x[1::2].abs()
    fn, calls = counting(branching)
    each = [psgrad.testing.loop_grads(lambda p, s, k=k: branching(p, s)[k], w, x) for k in range(3)]
    want = optree.tree_map(lambda *rows: torch.stack(rows, 1), *each)
    rows = torch.cat([t.flatten(2) for t in optree.tree_leaves(want)], 2)
    assert_close(psgrad.per_sample_jacobians(fn, w, x), want)
    assert len(calls) == 1 + 1 + 2
    kernel = torch.einsum("nkp,mlp->nmkl", rows, rows)
    assert_close(psgrad.ntk(fn, w, x), kernel)
    assert_close(psgrad.ntk(fn, w, x, x[1:3], chunk_size=4), kernel[:, 1:3])
    assert_close(psgrad.ntk(fn, w, x, outputs="trace"), torch.einsum("nmkk->nm", kernel))


def test_few_outputs_are_held_where_there_is_little_memory() -> None:
    """All samples at once, some of eight outputs at a time, and the same kernel."""
    fn = lambda w, x: torch.tanh(w["b"] @ torch.tanh(w["a"] @ x))
    w = {"a": torch.randn(40, 6).double(), "b": torch.randn(8, 40).double()}
    x = torch.randn(7, 6).double()
    want = psgrad.ntk(fn, w, x)
    with mock.patch.object(jacobians, "_Kernel", side_effect=jacobians._Kernel) as kernel:
        assert_close(psgrad.ntk(fn, w, x, max_bytes=40_000), want)
    step, width = kernel.call_args.args[2:4]
    assert step == 7
    assert 1 < width < 8
    with mock.patch.object(jacobians, "_steps", return_value=(4, 3)):
        assert_close(psgrad.ntk(fn, w, x), want)
        assert_close(psgrad.ntk(fn, w, x, x[:3]), want[:, :3])


@pytest.mark.parametrize("n", [3, 50])
@pytest.mark.parametrize("room", [1 << 24, 1])
def test_factors_of_outputs_meet_in_every_way(room: int, n: int) -> None:
    """Each output's factors stacked, or by themselves; positions met, or gradients written out, in strips of 64."""
    m, k, t = 4, 2, 3

    def outer(count: int, positions: int, i: int = 4, o: int = 5, shared: bool = True) -> list[Any]:
        x = [torch.randn(count, positions, i).double() for _ in range(k)]
        return [Outer(x[0] if shared else own, torch.randn(count, positions, o).double()) for own in x]

    def rows(count: int) -> list[Any]:
        index = torch.randint(5, (count, t))
        return [Rows(index, torch.randn(count, t, 4).double(), 5) for _ in range(k)]

    def dense(count: int) -> list[Any]:
        return [Dense(torch.randn(count, 5, 4).double()) for _ in range(k)]

    makers = [
        lambda c: outer(c, 1),
        lambda c: outer(c, t),
        lambda c: outer(c, 40),
        lambda c: outer(c, t, shared=False),
        rows,
        dense,
    ]
    with mock.patch.object(costs, "WORKSPACE", room), mock.patch.object(costs, "TILE", room):
        for left in makers:
            for right in makers:
                a, b = ([sum_of([Placement(None, f)], torch.Size((5, 4))) for f in own] for own in (left(n), right(m)))
                for other in (a, b, [None, b[1]]):
                    dense_a, dense_b = (
                        torch.stack([torch.zeros_like(own[1].dense()) if f is None else f.dense() for f in own], 1)
                        for own in (a, other)
                    )
                    want = dense_a.flatten(2).flatten(0, 1) @ dense_b.flatten(2).flatten(0, 1).mT
                    total = torch.zeros_like(want)
                    add_products(total, a, other)
                    if other is a:
                        mirrored(total)
                    torch.testing.assert_close(total, want)


def test_outputs_of_which_one_uses_a_parameter_twice() -> None:
    def outer() -> Placement:
        return Placement(None, Outer(torch.randn(3, 2, 4).double(), torch.randn(3, 2, 5).double()))

    rows, shape = Placement(None, Rows(torch.randint(5, (3, 2)), torch.randn(3, 2, 4).double(), 5)), torch.Size((5, 4))
    sums = [sum_of([outer()], shape), sum_of([outer(), rows], shape)]
    dense = torch.stack([own.dense() for own in sums if own is not None], 1).reshape(6, 20)
    for other in (sums, list(sums)):
        total = torch.zeros(6, 6).double()
        add_products(total, sums, other)
        torch.testing.assert_close(total, dense @ dense.mT)


def test_the_matrix_of_a_kernel_is_no_copy() -> None:
    w, x = torch.randn(3, 4), torch.randn(5, 4)
    kernel = psgrad.ntk(lambda w, x: torch.tanh(w @ x), w, x, x[:2])
    matrix = kernel.permute(0, 2, 1, 3).reshape(15, 6)
    assert matrix.data_ptr() == kernel.data_ptr()
    assert torch.equal(matrix[3 * 4 + 2, 3 * 1 + 1], kernel[4, 1, 2, 1])


def test_outputs_of_another_shape_are_refused() -> None:
    def fn(w: Tensor, x: Tensor) -> Tensor:
        return w @ x if x[0] > 0 else (w @ x)[:2]

    x = torch.tensor([[1.0, 2.0], [-1.0, 2.0]])
    with pytest.raises(psgrad.ArgumentError) as error:
        psgrad.ntk(fn, torch.randn(3, 2), x)
    assert str(error.value) == (
        "fn returns outputs of shape (3,) for the first sample, of shape (2,) for another\n"
        "  return as many for every sample."
    )


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
