"""A call can be recorded by make_fx, rules and all, and replayed for other numbers."""

import warnings
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import psgrad

from .cases import CASES
from .test_contract import pytestmark as pytestmark  # torch's warnings about cases of the table

# what fn, or torch, decides by looking at numbers
LOOKS = ("embedding-bag-offsets", "embedding-bag-last-offset", "branch", "item", "float", "int", "tolist", "range")
LOOKS += ("packed", "lstm-list", "parameters-alone")
CAN_BE = [case for case in CASES if not case.loops and not any(look in case.id for look in LOOKS)]
RECORDED = {(frozenset(rule for used in case.rules.values() for rule in used), case.folds): case for case in CAN_BE}


@pytest.mark.parametrize("case", RECORDED.values(), ids=lambda case: case.id)
def test_a_recorded_call_gives_the_same_for_other_numbers(case: Any) -> None:
    fn, params, batch = case.make()

    def asked(params: Any) -> Any:
        grads = psgrad.per_sample_grads(fn, params, batch)
        clipped = psgrad.clipped_grad(fn, params, batch, 1.0, nonfinite="propagate")
        return optree.tree_leaves((grads, psgrad.per_sample_norms(fn, params, batch), clipped.grad))

    def drawn(call: Any, params: Any) -> Any:
        torch.manual_seed(1)
        return call(params)

    with warnings.catch_warnings():
        warnings.simplefilter("error", psgrad.FallbackWarning)
        with tracing(TracingContext(FakeTensorMode())):  # without it the tracer makes a mode for each op: half the time
            graph = drawn(make_fx(asked), params)
        others = optree.tree_map(lambda p: 0.9 * p, params)
        for found, expected in zip(drawn(graph, others), drawn(asked, others), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_what_depends_on_numbers_is_asserted_when_the_ops_run() -> None:
    def clipped(w: Any, x: Any) -> Any:
        return psgrad.clipped_grad(lambda w, x: (w * x).sum(), w, x, 1.0).grad

    graph = make_fx(clipped)(torch.ones(2), torch.ones(3, 2))
    torch.testing.assert_close(graph(torch.ones(2), 2 * torch.ones(3, 2)), clipped(torch.ones(2), 2 * torch.ones(3, 2)))
    with pytest.raises(RuntimeError, match="the gradients of a sample are not finite"):
        graph(torch.ones(2), torch.full((3, 2), torch.nan))


TABLES = {
    "gram": psgrad.gram,
    "grad_stats": lambda *problem: psgrad.grad_stats(*problem).variance["w"],
    "by frequency": lambda *problem: psgrad.per_sample_grads(*problem)["w"],
}


@pytest.mark.parametrize("name", TABLES)
def test_what_is_recorded_of_a_table_depends_on_no_index(name: Any) -> None:
    """Recorded where every sample repeats one row, replayed where all rows differ."""
    by_frequency = name == "by frequency"
    fn = lambda p, x: F.embedding(x, p["w"], scale_grad_by_freq=by_frequency).sin().sum()
    params = {"w": torch.randn(50, 3, dtype=torch.float64)}
    first, other = torch.ones(4, 5, dtype=torch.long), torch.stack([torch.randperm(50)[:5] for _ in range(4)])
    traced = make_fx(lambda w, x: TABLES[name](fn, {"w": w}, x))(params["w"], first)
    torch.testing.assert_close(traced(params["w"], other), TABLES[name](fn, params, other))


def _net(p: Any, x: Any) -> Any:
    return (p["w"] @ x).tanh().square()


def _loss(p: Any, x: Any) -> Any:
    return _net(p, x).sum()


OF_VALID: dict[str, Any] = {
    "norms": lambda p, x, v: psgrad.per_sample_norms(_loss, p, x, valid=v),
    "clipped": lambda p, x, v: psgrad.clipped_grad(_loss, p, x, 0.1, valid=v)[:2],
    "weighted": lambda p, x, v: psgrad.weighted_grad(_loss, p, x, x[:, 0], valid=v),
    "gram": lambda p, x, v: psgrad.gram(_loss, p, x, valid=v),
    "stats": lambda p, x, v: psgrad.grad_stats(_loss, p, x, valid=v)[:2],
    "dots": lambda p, x, v: psgrad.per_sample_dots(_loss, p, x, p, valid=v),
    "projected": lambda p, x, v: psgrad.projected_grads(_loss, p, x, 3, valid=v),
    "kron": lambda p, x, v: psgrad.kron_factors(_loss, p, x, valid=v),
    "jacobians": lambda p, x, v: psgrad.per_sample_jacobians(_net, p, x, valid=v),
    "ntk": lambda p, x, v: psgrad.ntk(_net, p, x, valid=v),
}
REFUSED = ("stats", "kron")  # what would count the samples that stand in for others


@pytest.mark.parametrize("name", OF_VALID)
def test_samples_that_do_not_count_do_not_in_a_graph_either(name: str) -> None:
    params, x = {"w": torch.randn(3, 4, dtype=torch.float64)}, torch.randn(5, 4, dtype=torch.float64)
    first, other = torch.tensor([1, 0, 1, 0, 1]).bool(), torch.tensor([0, 1, 1, 0, 0]).bool()

    def asked(w: Any, x: Any, valid: Any) -> Any:
        return optree.tree_leaves(OF_VALID[name]({"w": w}, x, valid))

    if name in REFUSED:
        with pytest.raises(psgrad.ArgumentError, match="of the samples that are valid cannot be recorded as a graph"):
            make_fx(asked)(params["w"], x, first)
        return
    graph = make_fx(asked)(params["w"], x, first)
    for found, expected in zip(graph(params["w"], x, other), asked(params["w"], x, other), strict=True):
        torch.testing.assert_close(found, expected)
