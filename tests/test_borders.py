"""Where a pure function ends: hidden parameters, functions that run again, compiled functions, faults of torch's own.

Each of these gave wrong numbers without a word once, here or in torch's vmap.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psgrad
from psgrad.testing import loop_grads

pytestmark = pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")


@pytest.fixture(autouse=True)
def float64() -> None:
    torch.set_default_dtype(torch.float64)  # conftest puts it back


def exact(fn: Any, params: Any, batch: Any) -> None:
    """Every quantity equals the loop; chunks change nothing; params and batch stay as they were."""
    tensors = [t for t in torch.utils._pytree.tree_leaves((params, batch)) if isinstance(t, torch.Tensor)]
    before = [t.clone() for t in tensors]
    want = loop_grads(fn, params, torch.utils._pytree.tree_map(torch.clone, batch))
    rows = torch.cat([g.flatten(1) for g in torch.utils._pytree.tree_leaves(want)], 1)
    close = torch.testing.assert_close
    close(psgrad.per_sample_grads(fn, params, batch), want)
    for chunk_size in (1, 2):
        close(psgrad.per_sample_grads(fn, params, batch, chunk_size=chunk_size), want)
    close(psgrad.per_sample_norms(fn, params, batch), rows.norm(dim=1))
    bound = rows.norm(dim=1).median().item() + 1e-3
    scales = (bound / rows.norm(dim=1)).clamp(max=1)
    clipped = torch.utils._pytree.tree_leaves(psgrad.clipped_grad(fn, params, batch, bound).grad)
    close(torch.cat([g.flatten() for g in clipped]), scales @ rows)
    w = torch.linspace(-1, 2, len(rows))
    weighted = torch.utils._pytree.tree_leaves(psgrad.weighted_grad(fn, params, batch, w))
    close(torch.cat([g.flatten() for g in weighted]), w @ rows)
    for t, old in zip(tensors, before, strict=True):
        assert torch.equal(t, old)


# ---- parameters that are not where they seem to be ----------------------------------------------------------


class Hidden(nn.Module):
    """Holds its weight once more outside `_parameters`."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(3, 4), nn.Parameter(torch.randn(2, 4))
        weight = self.weight
        self.read = {"dict": {"w": weight}.get, "list": lambda _, held=[weight]: held[0], "closure": lambda _: weight}[
            how
        ]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.linear(x)), self.read("w"))


@pytest.mark.parametrize("how", ["dict", "list", "closure"])
@pytest.mark.parametrize("updated", [False, True])
def test_a_parameter_that_is_also_held_outside_its_module(how: Any, updated: Any) -> None:
    fn, params = psgrad.from_module(Hidden(how), F.mse_loss)
    params = {k: p + 1 for k, p in params.items()} if updated else params
    with pytest.raises(psgrad.UnsupportedOpError) as error:
        psgrad.per_sample_grads(fn, params, (torch.randn(5, 3), torch.randn(5, 2)))
    first, second, *rest = str(error.value).splitlines()
    assert first == "F.linear uses the model's own parameter 'weight' in place of params['weight'], as a constant"
    assert second.startswith("  called at test_borders.py:")
    assert rest == [
        "  the model holds it in a second place, where fn cannot replace it: read it from the module when it is used,",
        "  or take it out of params if it is meant to be a constant.",
    ]


def test_a_parameter_of_ones_own_function_met_as_a_constant() -> None:
    model = Hidden("dict")
    fn = lambda p, s: torch.func.functional_call(model, p, (s,)).square().sum()
    with pytest.raises(psgrad.UnsupportedOpError, match=r"F.linear uses params\['weight'\] as a constant"):
        psgrad.per_sample_grads(fn, dict(model.named_parameters()), torch.randn(5, 3))


def test_a_closed_over_parameter_may_be_a_constant_where_it_is_detached() -> None:
    w = nn.Parameter(torch.randn(3))
    exact(lambda p, x: ((p - w.detach()) * x).square().sum() + (p * x).sum(), w, torch.randn(5, 3))


def test_some_of_the_parameters_only() -> None:
    model = Hidden("dict")
    fn, params = psgrad.from_module(model, F.mse_loss)
    del params["weight"]
    exact(fn, params, (torch.randn(5, 3), torch.randn(5, 2)))


class Swapping(nn.Module):
    """Puts its own parameter back before it runs, as wrappers of modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        own = self.inner.weight.detach()
        self.inner.register_forward_pre_hook(lambda module, _: module._parameters.update(weight=own))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_a_module_that_replaces_what_it_was_given() -> None:
    fn, params = psgrad.from_module(Swapping(), F.mse_loss)
    with pytest.raises(psgrad.UnsupportedOpError) as error:
        psgrad.per_sample_grads(fn, params, (torch.randn(5, 3), torch.randn(5, 2)))
    assert str(error.value) == (
        "the model replaced params['inner.weight'] while it ran, so that its gradient would be lost\n"
        "  in 'inner', a Linear\n"
        "  a hook or a wrapper puts another tensor there: give the module without it, or write fn yourself."
    )


class Doubled(torch.autograd.Function):
    """A module that runs once more in the backward, as adjoint methods of differential equations do."""

    @staticmethod
    def forward(ctx: Any, module: Any, x: Tensor, *params: Any) -> Any:
        ctx.module = module
        ctx.save_for_backward(x, *params)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, *params = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.module(x)
            found = torch.autograd.grad(y, (x, *params), g, allow_unused=True)
        return None, *found


class Adjoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Doubled.apply(self.inner, torch.tanh(x), *self.inner.parameters()))


def test_a_function_that_runs_the_module_again_in_its_backward() -> None:
    model = Adjoint()
    fn, params = psgrad.from_module(model, F.mse_loss)
    x, y = torch.randn(5, 3), torch.randn(5, 2)
    own = [
        torch.autograd.grad(F.mse_loss(model(a[None]), b[None]), list(model.parameters()))
        for a, b in zip(x, y, strict=True)
    ]
    want = dict(zip(params, map(torch.stack, zip(*own, strict=True)), strict=True))
    torch.testing.assert_close(psgrad.per_sample_grads(fn, params, (x, y)), want)
    moved = {k: p.clone() for k, p in params.items()}  # not the model's own memory
    torch.testing.assert_close(psgrad.per_sample_grads(fn, moved, (x, y)), want)


def test_a_function_that_runs_the_module_again_where_nobody_holds_its_parameters() -> None:
    model = Adjoint()
    fn = lambda p, s: torch.func.functional_call(model, p, (s,)).square().sum()
    with pytest.raises(psgrad.UnsupportedOpError, match="as a constant"):
        psgrad.per_sample_grads(fn, dict(model.named_parameters()), torch.randn(5, 3))


# ---- torch's own faults under vmap --------------------------------------------------------------------------

W = lambda *shape: torch.linspace(-1.3, 1.7, torch.Size(shape).numel()).reshape(shape).sin()


def _slice_and_index(p: Any, s: Any) -> Any:
    a = torch.zeros(3, 5)  # as many rows as columns are written: values that are transposed fit
    a[1:, torch.tensor([0, 2])] = (p * s)[:2]
    return (a * W(3, 5)).sum()


def _index_buffer(p: Any, s: Any, index: Any = torch.tensor([0, 2])) -> Any:  # noqa: B008
    a = torch.zeros(3, 5)
    a[1:, index] = (p * s)[:2]
    return (a * W(3, 5)).sum()


def _mask_and_slice(p: Any, s: Any) -> Any:
    a = torch.zeros(3, 5)
    a[1:, torch.tensor([True, False, True, False, False])] = (p * s)[:2]
    return (a * W(3, 5)).sum()


def _apart(p: Any, s: Any) -> Any:
    a = torch.zeros(2, 3, 3)
    a[torch.tensor([0, 1]), 1:, torch.tensor([2, 0])] = (p * s)[:2]
    return (a * W(2, 3, 3)).sum()


def _from_the_sample(p: Any, s: Any) -> Any:
    a = torch.zeros(3, 5)
    a[1:, s.argsort(1)[0] + 1] = (p * s)[:2]
    return (a * W(3, 5)).sum()


def _select_scatter(p: Any, s: Any) -> Any:
    return (torch.select_scatter(torch.ones(3, 2) * s, p[0] * s[0], 0, 1) * W(3, 2)).sum()


def _squeeze(p: Any, s: Any) -> Any:
    h = (p * s)[:1].clone()
    return (h.squeeze_() * W(2)).sum() ** 2


def _as_strided(p: Any, s: Any) -> Any:
    h = (p * s).clone()
    return (h.as_strided_((2, 2), (1, 2)) * W(2, 2)).sum() ** 2


def _roll(p: Any, s: Any) -> Any:
    return torch.roll((p * s).sum(), 1) ** 2 + (p * s).prod().roll(3) ** 3


FAULTS = {
    f.__name__.strip("_"): f
    for f in (
        _slice_and_index,
        _index_buffer,
        _mask_and_slice,
        _apart,
        _from_the_sample,
        _select_scatter,
        _squeeze,
        _as_strided,
        _roll,
    )
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("n", [1, 3])
def test_what_torchs_vmap_gets_wrong(name: Any, n: Any) -> None:
    exact(FAULTS[name], torch.randn(3, 2), torch.randn(n, 3, 2))


@pytest.mark.parametrize("padding", [2, -1, None])
@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.parametrize("own", [None, "own index"])
def test_embedding_of_a_table_that_differs_between_samples(padding: Any, by_frequency: Any, own: Any) -> None:
    fixed = torch.tensor([0, 2, 2, 3, 1])

    def fn(p: Any, s: Any) -> Any:
        index = fixed if own is None else s[1]
        return (F.embedding(index, p * s[0], padding, scale_grad_by_freq=by_frequency) * W(5, 3)).square().sum()

    exact(fn, torch.randn(4, 3), (torch.randn(5, 4, 3), torch.randint(4, (5, 5))))


def test_a_step_of_maml_through_an_embedding_with_padding() -> None:
    model = nn.Sequential(nn.Embedding(6, 3, padding_idx=0), nn.Flatten(), nn.Linear(12, 2))
    tokens = lambda *shape: torch.randint(6, shape)

    def fn(p: Any, task: Any) -> Any:
        loss = lambda p, t: torch.func.functional_call(model, p, (t,)).square().mean()
        inner = torch.func.grad(loss)(p, task[0])
        return loss({k: p[k] - 0.1 * inner[k] for k in p}, task[1])

    params = {k: p.detach() for k, p in model.named_parameters()}
    exact(fn, params, tokens(4, 2, 5, 4))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch does not have it yet")
@pytest.mark.parametrize("frozen", ["head", "inputs", "computed"])
def test_linear_cross_entropy_in_chunks(frozen: Any) -> None:
    head, options = torch.randn(5, 4), nn.LinearCrossEntropyOptions(batch_chunk_size=2)

    def fn(p: Any, s: Any) -> Any:
        x = s[0] if frozen == "inputs" else torch.tanh(s[0] @ p["w"])
        own = {"head": head, "inputs": p["head"], "computed": p["head"] * s[0].mean()}[frozen]
        return F.linear_cross_entropy(x, own, s[1], options=options)

    exact(
        fn,
        {"w": torch.randn(3, 4), "head": torch.randn(5, 3 if frozen == "inputs" else 4)},
        (torch.randn(3, 6, 3), torch.randint(5, (3, 6))),
    )


def test_running_statistics_in_the_batch() -> None:
    for norm in (F.batch_norm, F.instance_norm):
        kwargs = {"training": True} if norm is F.batch_norm else {"use_input_stats": True}

        def fn(p: Any, s: Any, norm: Any = norm, kwargs: Any = kwargs) -> Any:
            return (norm(s[0] * p["s"], s[1], s[2], p["w"], p["b"], **kwargs) * W(4, 3, 2)).sum()

        params = {"s": torch.randn(3, 2), "w": torch.randn(3), "b": torch.randn(3)}
        exact(fn, params, (torch.randn(5, 4, 3, 2), torch.randn(5, 3), torch.rand(5, 3) + 1))


def test_running_statistics_in_the_batch_that_fn_reads_afterwards() -> None:
    def fn(p: Any, s: Any) -> Any:
        y = F.batch_norm(s[0] * p, s[1], s[2], training=True)
        return (y * W(4, 3)).sum() * s[1].sum()

    exact(fn, torch.randn(3), (torch.randn(5, 4, 3), torch.randn(5, 3), torch.rand(5, 3) + 1))


# ---- exceptions, hooks, random numbers ----------------------------------------------------------------------


def _factorised(p: Any, s: Any) -> Any:
    try:
        return torch.linalg.cholesky(p @ p.mT + s).diagonal().log().sum()
    except torch.linalg.LinAlgError:
        return (p * s).sum()


def test_a_factorisation_that_fails_for_some_samples_only() -> None:
    s = torch.stack([torch.eye(3) * k for k in (1.0, -100.0, 2.0, -50.0)])
    exact(_factorised, torch.randn(3, 3), s)


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.clamp(-0.1, 0.1)


class NewClamped(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Any:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.clamp(-0.1, 0.1)


def _hooked(p: Any, s: Any) -> Any:
    h = torch.tanh(p * s)
    h.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return (h * s).sum()


CLAMPS = {
    "function": lambda p, s: (Clamped.apply(torch.tanh(p * s)) * s).sum(),
    "new function": lambda p, s: (NewClamped.apply(torch.tanh(p * s)) * s).sum(),
    "hook": _hooked,
}


@pytest.mark.parametrize("how", CLAMPS)
def test_weights_where_a_backward_is_not_linear(how: Any) -> None:
    exact(CLAMPS[how], torch.randn(3), torch.randn(5, 3))


def _clamps_inputs(p: Any, s: Any) -> Any:
    h = F.linear(s, p)
    h.grad_fn.register_hook(lambda inputs, _: tuple(None if g is None else g * 2 for g in inputs))
    return torch.tanh(h).sum()


def test_a_hook_that_changes_the_gradients_of_a_nodes_inputs() -> None:
    exact(_clamps_inputs, torch.randn(2, 3), torch.randn(5, 3))
    exact(lambda p, s: _clamps_inputs(p, torch.tanh(s * p)), torch.randn(2, 3), torch.randn(5, 2, 3))


def _own_generator(p: Any, s: Any) -> Any:
    return (p * s * torch.rand(3, generator=torch.Generator().manual_seed(7))).sum() ** 2


def _forked(p: Any, s: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        noise = torch.rand(3)
    return (p * s * noise).sum() ** 2


def _seeded_dropout(p: Any, s: Any) -> Any:
    torch.manual_seed(0)  # the seed of the tests, too
    return F.dropout(p * s, 0.5).sum() ** 2


@pytest.mark.parametrize("fn", [_own_generator, _forked, _seeded_dropout])
def test_samples_that_seed_a_generator_draw_equal_numbers(fn: Any) -> None:
    exact(fn, torch.randn(3), torch.randn(5, 3))


# ---- processes ----------------------------------------------------------------------------------------------


@pytest.fixture
def process_group() -> Iterator[Any]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_sharded_model_without_a_group_is_refused_by_name() -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(3, 4)
    fully_shard(model)
    fn, params = psgrad.from_module(model, F.mse_loss)
    with pytest.raises(psgrad.ArgumentTypeError) as error:
        psgrad.clipped_grad(fn, params, (torch.randn(2, 3), torch.randn(2, 4)), 1.0)
    assert str(error.value) == (
        "params['bias'] is a DTensor, and there is no group\n"
        "  say group= with the ranks that hold it, or give its full_tensor(), or its to_local()."
    )


@pytest.mark.usefixtures("process_group")
def test_a_dtensor_is_refused_by_name() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    w = distribute_tensor(torch.randn(3), init_device_mesh("cpu", (1,)))
    with pytest.raises(psgrad.ArgumentTypeError) as error:
        psgrad.per_sample_grads(lambda p, s: (p["w"] * s).sum(), {"w": w}, torch.randn(5, 3))
    assert (
        str(error.value) == "params['w'] is a DTensor, and there is no group\n"
        "  say group= with the ranks that hold it, or give its full_tensor(), or its to_local()."
    )


@pytest.mark.usefixtures("process_group")
def test_a_module_in_pieces_is_refused_by_name() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    parallelize_module(model, init_device_mesh("cpu", (1,)), {"1": ColwiseParallel()})
    with pytest.raises(psgrad.ArgumentError) as error:
        psgrad.from_module(model, F.cross_entropy)
    assert str(error.value) == (
        "parameter '1.weight' of the model is a DTensor, as parallelize_module and distribute_module make them\n"
        "  give the model before that, or write fn(params, sample) -> loss yourself."
    )


@pytest.mark.usefixtures("process_group")
def test_ddp_stands_for_its_module() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    fn, params = psgrad.from_module(nn.parallel.DistributedDataParallel(model), F.mse_loss)
    own, want = psgrad.from_module(model, F.mse_loss)
    assert list(params) == list(want)
    batch = torch.randn(5, 3), torch.randn(5, 2)
    torch.testing.assert_close(psgrad.per_sample_grads(fn, params, batch), psgrad.per_sample_grads(own, want, batch))


# ---- sums behind a cast -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 3e4])
@pytest.mark.parametrize("chunk_size", [None, 7])
def test_sums_behind_a_cast_are_taken_in_float32(dtype: Any, scale: Any, chunk_size: Any) -> None:
    def fn(p: Any, s: Any) -> Any:
        return (F.linear(s.to(dtype), p.to(dtype)).float() * W(3).float()).sum()

    p, s = torch.randn(3, 4, dtype=torch.float32), torch.rand(40, 4, dtype=torch.float32) + 1
    rows = W(3).to(dtype).double()[:, None] * s.to(dtype).double()[:, None, :]  # products are not in half precision
    w = (torch.rand(40) * scale).float()
    close = {"rtol": 1e-5, "atol": 1e-6 * scale}
    want = (rows * w.double()[:, None, None]).sum(0).float()
    found = psgrad.weighted_grad(fn, p, s, w, chunk_size=chunk_size)
    assert not torch.equal(found, found.to(dtype).float())  # weights are in the backward, the sum is not rounded
    torch.testing.assert_close(found, want, rtol=1e-2, atol=0)
    if chunk_size is None:
        torch.testing.assert_close(psgrad.weighted_grad(fn, p, s, lambda _: w), want, **close)
    torch.testing.assert_close(psgrad.factored_grads(fn, p, s, chunk_size=chunk_size).weighted_sum(w), want, **close)
    bound = 1.5
    clipped = (rows * (bound / rows.flatten(1).norm(dim=1)).clamp(max=1)[:, None, None]).sum(0).float()
    found = psgrad.clipped_grad(fn, p, s, bound, chunk_size=chunk_size).grad
    torch.testing.assert_close(found, clipped, rtol=1e-3, atol=0)  # norms are of gradients in half precision
    assert not torch.equal(found, found.to(dtype).float())


def test_a_function_of_a_parameter_whose_backward_vmap_refuses() -> None:
    fn = lambda p, s: (F.pad(p, (1, 1, 1, 1), mode="circular") * s).sum() ** 2
    exact(fn, torch.randn(1, 2, 3, 3), torch.randn(4, 1, 2, 5, 5))
