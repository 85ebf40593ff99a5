"""A loss that depends on no parameter: zeros, and one warning per call that says so."""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import psgrad

CALLS = {
    "per_sample_grads": psgrad.per_sample_grads,
    "per_sample_norms": psgrad.per_sample_norms,
    "norms per parameter": lambda *a, **k: psgrad.per_sample_norms(*a, per_param=True, **k),
    "clipped_grad": lambda *a, **k: psgrad.clipped_grad(*a, 1.0, **k),
    "weighted_grad": lambda *a, **k: psgrad.weighted_grad(*a, torch.arange(5.0), **k),
    "weighted_grad by norms": lambda *a, **k: psgrad.weighted_grad(*a, lambda norms: norms + 1, **k),
    "gram": psgrad.gram,
    "per_sample_jacobians": psgrad.per_sample_jacobians,
    "ntk": psgrad.ntk,
    "projected_grads": lambda *a, **k: psgrad.projected_grads(*a, 5, **k),
    "kron_factors": psgrad.kron_factors,
    "per_sample_dots": lambda *a, **k: psgrad.per_sample_dots(*a, PARAMS, **k),
    "grad_stats": psgrad.grad_stats,
    "factored_grads": psgrad.factored_grads,
}
LOSSES = {
    "a constant": lambda p, x: torch.tensor(1.0),
    "the sample alone": lambda p, x: x.sum(),
    "detached": lambda p, x: F.linear(x, p["w"].detach()).sum(),
    "detached later": lambda p, x: F.linear(x, p["w"]).detach().sum(),
    "a graph of its own": lambda p, x: (x * torch.ones(4, requires_grad=True)).sum(),
}
PARAMS = {"w": torch.randn(3, 4), "v": torch.randn(4)}


def unused(call: Any) -> Any:
    """How many warnings of unused parameters a call gives; no other is allowed."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        warnings.simplefilter("always", psgrad.UnusedParametersWarning)
        call()
    return caught


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}, {"max_bytes": 100_000}], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_every_quantity_warns_once(name: Any, options: Any) -> None:
    (caught,) = unused(lambda: CALLS[name](LOSSES["the sample alone"], PARAMS, torch.randn(5, 4), **options))
    assert str(caught.message) == (
        "the loss depends on no parameter, so every gradient is zero\n"
        "  compute it from the params that fn is given; .detach(), .item() and torch.no_grad() cut them off."
    )
    assert caught.filename == __file__


@pytest.mark.parametrize("name", LOSSES)
def test_every_way_to_lose_the_parameters(name: Any) -> None:
    grads = []
    assert len(unused(lambda: grads.append(psgrad.per_sample_grads(LOSSES[name], PARAMS, torch.randn(5, 4))))) == 1
    assert not any(g.any() for g in grads[0].values())


@pytest.mark.parametrize("surroundings", [torch.no_grad, torch.inference_mode])
def test_surroundings_that_switch_gradients_off(surroundings: Any) -> None:
    with surroundings():
        assert len(unused(lambda: psgrad.per_sample_grads(LOSSES["detached"], PARAMS, torch.randn(5, 4)))) == 1
        assert not unused(lambda: psgrad.per_sample_grads(lambda p, x: (x * p["v"]).sum(), PARAMS, torch.randn(5, 4)))


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_loop_over_samples(chunk_size: Any) -> None:
    """There it is what fn closes over that makes the loss require a gradient."""
    other = torch.randn(4, requires_grad=True)

    def calling(weight: Any) -> Any:
        def fn(p: Any, x: Any) -> Any:
            return (x * weight(p)).sum() * float(x.numpy().max())

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            psgrad.per_sample_grads(fn, PARAMS, torch.randn(5, 4), chunk_size=chunk_size)
        assert any(w.category is psgrad.FallbackWarning for w in caught)
        return sum(w.category is psgrad.UnusedParametersWarning for w in caught)

    assert calling(lambda p: other) == 1
    assert calling(lambda p: p["v"].detach()) == 1
    assert calling(lambda p: p["v"]) == 0
    assert other.grad is None


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"chunk_size": 2}], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_one_sample_that_uses_one_parameter_is_enough(name: Any, options: Any) -> None:
    """Whatever chunk it is in; the others take a branch without parameters."""
    x = -torch.rand(5, 4)
    x[3] = 1.0
    fn = lambda p, x: (x * p["v"]).sum() if x[0] > 0 else x.sum()
    assert not unused(lambda: CALLS[name](fn, PARAMS, x, **options))


@pytest.mark.parametrize("small", [True, False])
def test_gradients_that_are_zero_are_gradients(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psgrad.factors.costs.SMALL", psgrad.factors.costs.SMALL if small else -1)
    for fn in (
        lambda p, x: F.linear(x, p["w"]).sum() * 0,
        lambda p, x: F.linear(x, p["w"]).round().sum(),
        lambda p, x: F.linear(x, torch.tanh(p["w"])).sum(),
        lambda p, x: torch.maximum(x, p["v"]).sum(),
        lambda p, x: p["v"].sum(),
    ):
        for call in CALLS.values():
            assert not unused(lambda call=call, fn=fn: call(fn, PARAMS, torch.randn(5, 4)))


def test_no_samples() -> None:
    fn, x = LOSSES["the sample alone"], torch.randn(5, 4)
    for name, call in CALLS.items():
        if name != "weighted_grad":
            assert not unused(lambda call=call: call(fn, PARAMS, x[:0]))
    none = torch.zeros(5, dtype=torch.bool)
    assert not unused(lambda: psgrad.per_sample_norms(fn, PARAMS, x, valid=none))
    assert not unused(lambda: psgrad.clipped_grad(fn, PARAMS, x, 1.0, valid=none))


def test_explain_says_it_without_a_warning() -> None:
    reports = []
    assert not unused(lambda: reports.append(psgrad.explain(LOSSES["detached"], PARAMS, torch.randn(5, 4))))
    assert reports[0].unused == ("params['v']", "params['w']")
