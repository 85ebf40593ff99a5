"""FactoredGrads as an object: bounds, copies and files, several as one, parameters that change afterwards."""

from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psgrad

from .cases import Case
from .test_contract import assert_close
from .test_quantities import every_case, flat, layers, summed, warns
from .test_quantities import pytestmark as pytestmark  # torch's warnings about cases of the table

# ---- clipped sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize(
    "max_norm",
    [0.3, 1, torch.tensor(0.3), {"first": 0.5, "last": torch.tensor(2.0)}, {"first": {"w": 0.1, "b": 0.2}, "last": 1}],
    ids=["float", "int", "tensor", "layers", "parameters"],
)
def test_a_clipped_sum_takes_the_bounds_of_clipped_grad(max_norm: Any, chunk_size: int | None) -> None:
    fn, params, batch = layers()
    grads = psgrad.testing.loop_grads(fn, params, batch)
    step = psgrad.clipped_grad(fn, params, batch, max_norm)
    found = psgrad.factored_grads(fn, params, batch, chunk_size=chunk_size).clipped_sum(max_norm)
    assert_close(found, step.grad)
    if isinstance(max_norm, dict):
        norms = flat(grads["last"]).norm(dim=1)
        want = summed(grads["last"], (float(max_norm["last"]) / norms).clamp(max=1))
        assert_close(found["last"], want)


def test_a_clipped_sum_takes_bounds_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))).double()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    batch = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    fg, bounds = psgrad.factored_grads(fn, params, batch), {"0": 0.1, "2": 0.2, "2.1.bias": 0.3}
    assert_close(fg.clipped_sum(bounds), psgrad.clipped_grad(fn, params, batch, bounds).grad)
    with pytest.raises(psgrad.ArgumentError) as error:
        fg.clipped_sum({"0": 0.1, "2.0": 0.2})
    assert str(error.value) == (
        "max_norm has no bound for '2.1.bias'\n  give one for the parameter, or for a module above it."
    )


def test_a_clipped_sum_checks_its_bounds() -> None:
    fn, params, batch = layers()
    fg = psgrad.factored_grads(fn, params, batch)
    with pytest.raises(psgrad.ArgumentError) as error:
        fg.clipped_sum({"first": 1.0, "middle": 1.0})
    assert str(error.value) == (
        "max_norm does not fit params\n"
        "  max_norm: PyTreeSpec({'first': *, 'middle': *})\n"
        "  params: PyTreeSpec({'first': {'b': *, 'w': *}, 'last': {'w': *}})\n"
        "  give one number, or a pytree prefix of params."
    )
    with pytest.raises(psgrad.ArgumentError) as error:
        fg.clipped_sum({"first": 1.0, "last": -1.0})
    assert str(error.value) == "max_norm['last']=-1.0 is not positive\n  give a positive number; inf clips nothing."


def test_a_clipped_sum_by_layers_leaves_bad_samples_out() -> None:
    """A sample that is not finite in one layer does not count in the others either."""
    fn = lambda p, x: (p["a"] * x[0]).sum() + (p["b"] * x[1]).sum()
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    x = torch.tensor([[[3.0, 4.0], [1.0, 0.0]], [[torch.inf, 1.0], [1.0, 1.0]]])
    fg, bounds = psgrad.factored_grads(fn, params, x), {"a": 1.0, "b": 10.0}
    assert_close(fg.clipped_sum(bounds, nonfinite="zero"), {"a": torch.tensor([0.6, 0.8]), "b": torch.tensor([1.0, 0])})
    assert fg.clipped_sum(bounds, nonfinite="propagate")["b"].isnan().any()
    with pytest.raises(psgrad.ArgumentError) as error:
        fg.clipped_sum(bounds)
    assert str(error.value) == (
        "the gradients of sample 1 are not finite\n"
        '  leave them out with nonfinite="zero", or let them through with nonfinite="propagate".'
    )


# ---- what happens to params, batch and constants afterwards ------------------------------------------------


def wiped(*trees: Any) -> None:
    """Zeros in the memory of every tensor, as no version counter of torch's notices."""
    for t in optree.tree_leaves(trees):
        if isinstance(t, Tensor):
            t.untyped_storage().fill_(0)


@every_case
def test_answers_stay_when_params_and_batch_change(case: Case) -> None:
    for chunk_size in (None, 1):  # of one sample nothing tells what is the caller's memory
        fn, params, batch = case.make()
        with warns(case):
            fg = psgrad.factored_grads(fn, params, batch, chunk_size=chunk_size)
        grads, norms = fg.dense(), fg.norms()
        wiped(params, batch)
        assert_close(fg.dense(), grads, rtol=0, atol=0)
        assert_close(fg.norms(), norms, rtol=0, atol=0)


def weight_norm() -> tuple[Any, Any, Any, Any]:
    fn, params = psgrad.from_module(nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), F.cross_entropy)
    return fn, params, (torch.randn(4, 6), torch.randint(5, (4,))), ()


def masked_weight() -> tuple[Any, Any, Any, Any]:
    mask = torch.rand(5, 6)
    return lambda w, x: F.linear(x, (w * mask).exp()).square().sum(), torch.randn(5, 6), torch.randn(4, 6), mask


def table_of_constants() -> tuple[Any, Any, Any, Any]:
    index = torch.tensor([3, 1, 1])
    return lambda w, x: (F.embedding(index, w) * x).sum(), torch.randn(9, 50), torch.randn(4, 3, 50), index


def constant_input() -> tuple[Any, Any, Any, Any]:
    c = torch.randn(3, 40)
    return lambda w, x: (F.linear(c, w) * x).sum(), torch.randn(30, 40), torch.randn(4, 3, 30), c


def two_parameters() -> tuple[Any, Any, Any, Any]:
    params = {"a": torch.randn(3, 40), "b": torch.randn(30, 40)}
    return lambda p, x: (F.linear(p["a"], p["b"]) * x).sum(), params, torch.randn(4, 3, 30), ()


CHANGES: dict[str, Any] = {
    "in place": lambda t: t.add_(1),
    "data": lambda t: t.data.add_(1),
    "overwritten": lambda t: t.zero_(),
}


@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [weight_norm, masked_weight, table_of_constants, constant_input, two_parameters])
def test_answers_stay_when_what_fn_uses_changes(make: Any, change: str, chunk_size: int | None) -> None:
    """Parameters behind a function of parameters, constants that fn closes over: of many samples and of one."""
    fn, params, batch, constants = make()
    want = psgrad.testing.loop_grads(fn, params, batch)
    fg = psgrad.factored_grads(fn, params, batch, chunk_size=chunk_size)
    with torch.no_grad():
        for t in optree.tree_leaves((params, constants)):
            CHANGES[change](t)
    rows = flat(want)
    assert_close(fg.dense(), want, rtol=1e-4, atol=1e-5)
    assert_close(fg.norms(), rows.norm(dim=1), rtol=1e-4, atol=1e-5)
    assert_close(fg.sum(), summed(want), rtol=1e-4, atol=1e-4)
    assert_close(fg.dots(), rows @ rows.mT, rtol=1e-4, atol=1e-4)
    assert_close(fg.to("cpu").dense(), want, rtol=1e-4, atol=1e-5)
