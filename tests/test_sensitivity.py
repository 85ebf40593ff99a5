"""What private training asks of a clipped sum: how many samples are in it, and how far one of them can move it."""

import inspect
import math
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psgrad
from psgrad.streaming import budget

Params = dict[str, Tensor]
DIAGONAL = lambda w, x: (w * x).sum()  # the gradient of sample x is x


def norm(tree: Any) -> float:
    return math.hypot(*(float(t.double().norm()) for t in optree.tree_leaves(tree)))


def difference(a: Any, b: Any) -> Any:
    return optree.tree_map(lambda s, t: s.double() - t.double(), a, b)


def without(batch: Any, n: int) -> Any:
    return optree.tree_map(lambda t: torch.cat([t[:n], t[n + 1 :]]), batch)


class Tagger(nn.Module):
    """An embedding that is the head, too; a layer on every position; a normalisation: factors of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.mix = nn.Linear(6, 6)
        self.scale = nn.LayerNorm(6)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.scale(torch.tanh(self.mix(self.table(tokens)))), self.table.weight)


def convolution(seed: int) -> tuple[Any, Params, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 4))
    return *psgrad.from_module(model, F.cross_entropy), (3 * torch.randn(6, 1, 8, 8), torch.randint(4, (6,)))


def tagger(seed: int) -> tuple[Any, Params, Any]:
    torch.manual_seed(seed)
    fn, params = psgrad.from_module(Tagger(), lambda out, y: F.cross_entropy(out.mT, y))
    return fn, params, (torch.randint(7, (5, 9)), torch.randint(7, (5, 9)))


# ---- the guarantee -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("bounds", ["one", "one for each parameter", "by module"])
@pytest.mark.parametrize("make", [convolution, tagger])
def test_one_sample_moves_the_sum_by_at_most_the_sensitivity(make: Any, bounds: str, chunk_size: int | None) -> None:
    """Over many draws of parameters and samples, each sample taken out in turn; some movements reach the bound."""
    largest = 0.0
    for seed in range(12):
        fn, params, batch = make(seed)
        max_norm: Any = 0.2
        if bounds == "one for each parameter":
            max_norm = {name: 0.05 * (1 + k) for k, name in enumerate(params)}
        elif bounds == "by module":
            max_norm = dict.fromkeys({name.partition(".")[0] for name in params}, 0.1)
        step = psgrad.clipped_grad(fn, params, batch, max_norm, chunk_size=chunk_size)
        for n in range(step.count):
            less = psgrad.clipped_grad(fn, params, without(batch, n), max_norm, chunk_size=chunk_size)
            assert (less.count, less.sensitivity) == (step.count - 1, step.sensitivity)
            largest = max(largest, norm(difference(step.grad, less.grad)) / step.sensitivity)
    assert 0.999 < largest < 1 + 1e-5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_clipped_gradient_is_within_its_bound_up_to_rounding(dtype: torch.dtype) -> None:
    allowed = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1 / 256}[dtype]
    for seed in range(20):
        fn, params, (tokens, labels) = tagger(seed)
        params = {name: p.to(dtype) for name, p in params.items()}
        for n in range(len(tokens)):
            step = psgrad.clipped_grad(fn, params, (tokens[n : n + 1], labels[n : n + 1]), 0.1)
            assert norm(step.grad) <= 0.1 * (1 + allowed)


@pytest.mark.parametrize("t", [64, 300])
def test_positions_that_nearly_cancel_do_not_hide_a_gradient(t: int) -> None:
    """The worst case for norms that are taken from products of positions: what is left is small beside its parts."""
    fn = lambda w, s: ((s[0] @ w.mT) * s[1]).sum()  # the sum over positions of g x^T
    for seed in range(30):
        torch.manual_seed(seed)
        x, g = torch.randn(1, t, 200), torch.randn(1, t, 200)
        left = 10 ** -torch.empty(()).uniform_(0.5, 3.5)
        x, g = torch.cat([x, x], 1), torch.cat([g, -g + left * torch.randn_like(g)], 1)
        step = psgrad.clipped_grad(fn, torch.zeros(200, 200), (x, g), 0.1)
        assert norm(step.grad) <= 0.1 * (1 + 1e-4)


def test_exchanging_a_sample_moves_the_sum_by_twice_as_much() -> None:
    one, other = torch.tensor([[3.0, 4.0]]), torch.tensor([[-3.0, -4.0]])
    steps = [psgrad.clipped_grad(DIAGONAL, torch.zeros(2), x, 1.0) for x in (one, other)]
    assert norm(difference(steps[0].grad, steps[1].grad)) == pytest.approx(2 * steps[0].sensitivity)


def test_a_sample_that_is_not_finite_moves_nothing_where_it_does_not_count() -> None:
    x = torch.tensor([[3.0, 4.0], [torch.inf, 0.0], [0.0, 0.5]])
    step = psgrad.clipped_grad(DIAGONAL, torch.zeros(2), x, 1.0, nonfinite="zero")
    less = psgrad.clipped_grad(DIAGONAL, torch.zeros(2), x[[0, 2]], 1.0, nonfinite="zero")
    torch.testing.assert_close(step.grad, less.grad, rtol=0, atol=0)
    assert (step.count, step.sensitivity) == (less.count, less.sensitivity) == (2, 1.0)


# ---- the numbers -------------------------------------------------------------------------------------------


def two_layers() -> tuple[Any, Any, Any]:
    params = {"a": {"w": torch.zeros(2), "b": torch.zeros(())}, "c": torch.zeros(3)}
    fn = lambda p, x: (p["a"]["w"] * x[:2]).sum() + p["a"]["b"] + (p["c"] * x).sum()
    return fn, params, torch.randn(5, 3)


@pytest.mark.parametrize(
    ("max_norm", "sensitivity"),
    [
        (2.0, 2.0),
        (3, 3.0),
        (math.inf, math.inf),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([0.5], dtype=torch.float64), 0.5),
        ({"a": 3.0, "c": 4.0}, 5.0),
        ({"a": {"w": 1.0, "b": 2.0}, "c": torch.tensor(2.0)}, 3.0),
    ],
)
@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}])
def test_the_sensitivity_is_the_norm_of_the_bounds(max_norm: Any, sensitivity: float, options: Any) -> None:
    fn, params, batch = two_layers()
    step = psgrad.clipped_grad(fn, params, batch, max_norm, **options)
    kept = psgrad.factored_grads(fn, params, batch, **options).clipped_grad(max_norm)
    for found in (step, kept):
        assert type(found.count) is int
        assert type(found.sensitivity) is float
        assert found.count == 5
        assert found.sensitivity == pytest.approx(sensitivity)


def test_a_bound_over_no_parameter_adds_nothing() -> None:
    params = {"a": [torch.zeros(2)], "none": []}
    step = psgrad.clipped_grad(lambda p, x: (p["a"][0] * x).sum(), params, torch.ones(1, 2), {"a": 1.0, "none": 7.0})
    assert step.sensitivity == 1.0


def test_bounds_by_names_of_modules() -> None:
    fn, params, batch = convolution(0)
    step = psgrad.clipped_grad(fn, params, batch, {"0": 1.0, "1": 2.0, "4": 2.0})
    assert step.sensitivity == pytest.approx(3.0)


def test_bounds_without_values_give_a_sensitivity_that_is_not_known() -> None:
    on_meta = psgrad.clipped_grad(
        DIAGONAL,
        torch.zeros(2, device="meta"),
        torch.zeros(4, 2, device="meta"),
        torch.ones((), device="meta"),
        nonfinite="propagate",
    )
    assert on_meta.count == 4
    assert math.isnan(on_meta.sensitivity)


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("max_norm", [1.0, {"w": 1.0, "v": 1.0}])
def test_the_count_is_of_samples_in_the_sum(max_norm: Any, chunk_size: int | None) -> None:
    params = {"w": torch.zeros(2), "v": torch.zeros(2)}
    fn = lambda p, x: ((p["w"] * x).sum() + (p["v"] * x * x).sum(), x)
    x = torch.randn(6, 2)
    x[1], x[4] = torch.nan, torch.inf
    options: Any = {"chunk_size": chunk_size, "has_aux": True}
    step, aux = psgrad.clipped_grad(fn, params, x, max_norm, nonfinite="zero", **options)
    assert (step.count, len(aux)) == (4, 6)
    step, _ = psgrad.clipped_grad(fn, params, x, max_norm, nonfinite="propagate", **options)
    assert step.count == 6
    valid = torch.tensor([True, True, True, False, False, False])
    step, aux = psgrad.clipped_grad(fn, params, x, max_norm, nonfinite="zero", valid=valid, **options)
    assert (step.count, len(step.values), len(aux)) == (2, 6, 6)
    step, _ = psgrad.clipped_grad(fn, params, x, max_norm, valid=~valid & x.isfinite().all(1), **options)
    assert step.count == 2
    kept = psgrad.factored_grads(fn, params, x, **options)
    assert kept.clipped_grad(max_norm, nonfinite="zero").count == 4
    assert kept.clipped_grad(max_norm, nonfinite="propagate").count == 6
    assert kept[2:4].clipped_grad(max_norm).count == 2


def test_the_count_in_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say that no sample's factors can be kept: norms, then the weighted gradient."""
    peak = lambda problem, n, samples, quantity, parted=False: 1 << 40 if quantity.name == "clipped" else n * 100
    monkeypatch.setattr(budget, "peak_bytes", peak)
    x = torch.randn(6, 3)
    x[1, 0] = torch.nan
    fn = lambda w, x: torch.tanh(x @ w.mT).sum()
    step = psgrad.clipped_grad(fn, torch.randn(2, 3), x, 1.0, nonfinite="zero", max_bytes=250)
    assert (step.count, step.sensitivity) == (5, 1.0)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_no_samples(chunk_size: int | None) -> None:
    step = psgrad.clipped_grad(DIAGONAL, torch.zeros(2), torch.zeros(0, 2), 1.5, chunk_size=chunk_size)
    assert (step.count, step.sensitivity) == (0, 1.5)
    assert not step.grad.any()
    kept = psgrad.factored_grads(DIAGONAL, torch.zeros(2), torch.zeros(0, 2)).clipped_grad(1.5)
    assert (kept.count, kept.sensitivity) == (0, 1.5)


def test_what_is_kept_gives_all_that_the_function_gives() -> None:
    fn, params, batch = tagger(0)
    bounds = dict.fromkeys({name.partition(".")[0] for name in params}, 0.1)
    for max_norm in (0.1, bounds):
        step = psgrad.clipped_grad(fn, params, batch, max_norm)
        kept = psgrad.factored_grads(fn, params, batch).clipped_grad(max_norm)
        assert type(kept) is psgrad.ClippedGrad
        torch.testing.assert_close(list(optree.tree_leaves(kept)), list(optree.tree_leaves(step)))
        torch.testing.assert_close(
            psgrad.factored_grads(fn, params, batch).clipped_sum(max_norm), kept.grad, rtol=0, atol=0
        )


def test_every_field_is_described() -> None:
    for result in (psgrad.ClippedGrad, psgrad.GradStats):
        described = inspect.getdoc(result)  # without the indentation, which Python 3.13 itself takes away
        assert described is not None
        for name in result._fields:
            assert f"\n    {name}: " in described
