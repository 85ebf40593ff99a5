"""A call can be recorded by make_fx, rules and all, and replayed for other numbers."""

import warnings
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
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
