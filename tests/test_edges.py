"""Edges where a rule, the engine or a module could part ways with torch without anybody noticing."""

import threading
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import psgrad


def losses_of(fn: Any, params: Any, batch: Any) -> Any:
    return psgrad.per_sample_grads(fn, params, batch, return_value=True)[1]


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, w: F.instance_norm(x, weight=w, use_input_stats=False),
        lambda x, w: F.batch_norm(x, None, None, weight=w),
    ],
    ids=["instance", "batch"],
)
def test_norm_by_running_statistics_that_are_not_there(norm: Any) -> None:
    """torch's own error, not a crash."""
    with pytest.raises(RuntimeError, match="running_mean"):
        psgrad.per_sample_grads(lambda w, x: norm(x, w).sum(), torch.ones(3), torch.randn(2, 1, 3, 4))


def test_one_model_in_three_threads() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    kept = list(model.parameters())
    x, y = torch.randn(6, 4).double(), torch.randint(3, (6,))
    fn, params = psgrad.from_module(model, F.cross_entropy)
    want = psgrad.per_sample_grads(fn, params, (x, y))
    wrong = []

    def work(scale: Any) -> None:
        fn, params = psgrad.from_module(model, F.cross_entropy)
        scaled = {k: p * scale for k, p in params.items()}
        mine = want if scale == 1 else psgrad.testing.loop_grads(fn, scaled, (x, y))
        for _ in range(30):
            grads = psgrad.per_sample_grads(fn, scaled, (x, y))
            wrong.extend(k for k in grads if not torch.allclose(grads[k], mine[k]))

    threads = [threading.Thread(target=work, args=(scale,)) for scale in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(a is b for a, b in zip(model.parameters(), kept, strict=True))


@pytest.mark.parametrize("write", [lambda p: p.data.mul_(0.5), lambda p: p.detach()[0].add_(1)], ids=["data", "detach"])
def test_parameters_changed_through_an_alias(write: Any) -> None:
    def fn(p: Any, x: Any) -> Any:
        write(p)
        return (p * x).sum() ** 2

    p, x = torch.randn(4), torch.randn(3, 4)
    before = p.clone()
    with pytest.raises(psgrad.UnsupportedOpError, match="changes params in place"):
        psgrad.per_sample_grads(fn, p, x)
    assert torch.equal(p, before)


@pytest.mark.parametrize(("p", "x", "dtype"), [(300.0, 600.0, torch.float16), (1e-25, 1e-30, torch.float32)])
@pytest.mark.parametrize("first", [True, False])
def test_division_does_not_square(p: Any, x: Any, dtype: Any, first: Any) -> None:
    p, x = torch.tensor([p], dtype=dtype), torch.tensor([[x], [x / 2]], dtype=dtype)
    fn = (lambda p, x: (x / p).sum()) if first else (lambda p, x: (p / (x * 1.0)).sum())
    if not first and dtype == torch.float32:
        x = x * 1e30
    torch.testing.assert_close(psgrad.per_sample_grads(fn, p, x), psgrad.testing.loop_grads(fn, p, x))


@pytest.mark.parametrize(
    ("p", "x"),
    [
        (torch.tensor(2.0, dtype=torch.float64), torch.randn(3, 4)),
        (torch.tensor(2.0), torch.randn(3, 4, dtype=torch.bfloat16)),
        (torch.randn(3), torch.randn(5, 1, dtype=torch.float64)),
    ],
)
def test_scalars_promote_as_torch_has_it(p: Any, x: Any) -> None:
    fn = lambda p, x: (x.sum() * p).sum()
    assert losses_of(fn, p, x).dtype == fn(p, x[0]).dtype
    torch.testing.assert_close(psgrad.per_sample_grads(fn, p, x), psgrad.testing.loop_grads(fn, p, x))


def test_bias_that_is_not_a_vector() -> None:
    w, b, x = torch.randn(2, 3).double(), torch.randn(2, 1).double(), torch.randn(1, 2, 3).double()
    fn = lambda p, x: F.linear(x, p["w"], p["b"]).sin().sum()
    psgrad.testing.check(fn, {"w": w, "b": b}, x)


def test_matrix_times_vector_under_autocast() -> None:
    w, x = torch.randn(3, 4), torch.randn(5, 4)
    fn = lambda w, x: torch.mv(w, x).square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        assert losses_of(fn, w, x).dtype == fn(w, x[0]).dtype
        torch.testing.assert_close(psgrad.per_sample_grads(fn, w, x), psgrad.testing.loop_grads(fn, w, x))


def test_an_error_that_speaks_of_randomness_is_still_the_users() -> None:
    def fn(p: Any, x: Any) -> None:
        raise ValueError("random forest is missing")

    with pytest.raises(ValueError, match=r"^random forest is missing$"):
        psgrad.per_sample_grads(fn, torch.ones(2), torch.ones(3, 2), randomness="error")


def test_no_samples_change_nothing() -> None:
    def fn(p: Any, x: Any) -> Any:
        p.mul_(2)
        return (p * torch.rand_like(x)).sum(), x

    p, state = torch.ones(3), torch.get_rng_state()
    grads, aux = psgrad.per_sample_grads(fn, p, torch.ones(0, 3), has_aux=True)
    assert grads.shape == (0, 3)
    assert aux.shape == (0, 3)
    assert torch.equal(p, torch.ones(3))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
def test_weight_norm_by_hooks_leaves_the_module_usable() -> None:
    model = nn.utils.weight_norm(nn.Linear(4, 3).double())
    fn, params = psgrad.from_module(model, F.mse_loss)
    batch = torch.randn(5, 4).double(), torch.randn(5, 3).double()
    psgrad.testing.check(fn, params, batch)
    assert torch.isfinite(model.weight.sum())
    assert not torch._C._functorch.is_batchedtensor(model.weight)


def test_constant_weight_changed_in_place() -> None:
    """torch's own complaint comes out, as it does without psgrad."""

    def fn(p: Any, x: Any) -> Any:
        c = torch.ones(2, 1, 1)
        y = F.conv1d((x * p)[None], c)
        c.mul_(3)
        return y.square().sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        psgrad.per_sample_grads(fn, torch.ones(4), torch.randn(3, 4))


def test_large_results_are_ordinary_tensors() -> None:
    """Over 8 MiB: the memory is the system's own, and behaves."""
    w, x = torch.randn(512, 512).double(), torch.randn(20, 512).double()
    fn = lambda w, x: F.linear(x, w).square().sum()
    grads = psgrad.per_sample_grads(fn, w, x)
    assert grads.numel() * 8 > 8 << 20
    torch.testing.assert_close(grads[7], torch.func.grad(fn)(w, x[7]))
    again = psgrad.per_sample_grads(fn, w, x)
    assert again.data_ptr() != grads.data_ptr()
    grads.zero_()
    assert again.abs().sum() > 0
    assert grads.clone().sum() == 0


def test_many_bare_parameters_cost_one_walk() -> None:
    """A use without a rule looks at the graph; that must not be done once per parameter."""
    params = [torch.randn(3) for _ in range(150)]
    calls = []
    walk = psgrad.engine.batched._restrided
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psgrad.engine.batched, "_restrided", lambda losses: calls.append(1) or walk(losses))
        psgrad.per_sample_grads(lambda p, x: sum(torch.maximum(w, x).sum() for w in p), params, torch.randn(4, 3))
    assert len(calls) == 1


def test_complex_parameters_are_refused_with_a_remedy() -> None:
    with pytest.raises(psgrad.ArgumentTypeError) as error:
        psgrad.per_sample_grads(lambda p, x: p.abs().sum(), torch.ones(2, dtype=torch.complex64), torch.ones(3))
    assert str(error.value) == (
        "params has dtype torch.complex64, which is not supported\n"
        "  give torch.view_as_real of it, and undo that in fn."
    )


def test_check_names_an_unknown_path() -> None:
    fn, w, x = lambda p, x: F.linear(x, p["w"]).sum(), torch.ones(2, 3), torch.ones(4, 3)
    with pytest.raises(AssertionError, match=r"no parameter is called w; there are params\['w'\]"):
        psgrad.testing.check(fn, {"w": w}, x, rules={"w": ["linear"]})


# ---- a view has a graph of its own, whatever its memory -----------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 1])
def test_logits_that_are_a_parameter(chunk_size: Any) -> None:
    p, t = torch.randn(3, 5, dtype=torch.float64), torch.randint(5, (2, 3))
    fn = lambda p, t: F.cross_entropy(p, t)
    ours = psgrad.per_sample_grads(fn, p, t, chunk_size=chunk_size)
    torch.testing.assert_close(ours, psgrad.testing.loop_grads(fn, p, t))


def test_a_view_without_a_graph_stops_the_gradient() -> None:
    def fn(p: Any, x: Any) -> Any:
        h = torch.tanh(p["a"] @ x)
        with torch.no_grad():
            still = h.unsqueeze(0)
        return F.linear(still, p["w"]).square().sum() + h.sum()

    p = {"a": torch.randn(4, 3, dtype=torch.float64), "w": torch.randn(2, 4, dtype=torch.float64)}
    x = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(psgrad.per_sample_grads(fn, p, x), psgrad.testing.loop_grads(fn, p, x))


def test_a_hook_on_the_node_of_a_view() -> None:
    def fn(p: Any, x: Any) -> Any:
        h = torch.tanh(F.linear(x, p["a"]))[None]
        h.grad_fn.register_prehook(lambda grads: (grads[0] * 3,))
        return F.linear(h, p["w"]).square().sum()

    p = {"a": torch.randn(4, 3, dtype=torch.float64), "w": torch.randn(2, 4, dtype=torch.float64)}
    x = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(psgrad.per_sample_grads(fn, p, x), psgrad.testing.loop_grads(fn, p, x))


def test_a_part_of_a_batch_without_features() -> None:
    x = torch.empty(5, 0, dtype=torch.float64)[:3]
    p = {"w": torch.empty(2, 0, dtype=torch.float64), "b": torch.randn(2, dtype=torch.float64)}
    fn = lambda p, x: F.linear(x[None], p["w"], p["b"]).square().sum()
    torch.testing.assert_close(psgrad.per_sample_grads(fn, p, x), psgrad.testing.loop_grads(fn, p, x))
