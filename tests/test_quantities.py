"""Norms, sums, inner products and statistics, for every case of the table: as from the loop's gradients."""

import contextlib
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import psgrad
from psgrad import _plan

from .cases import CASES, Case, N
from .test_contract import assert_close

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


_LOOPED: dict[str, Any] = {}


def oracle(case: Case) -> Any:
    if case.id not in _LOOPED:
        _LOOPED[case.id] = psgrad.testing.loop_grads(*case.make())
    return _LOOPED[case.id]


def flat(grads: Any) -> Tensor:
    """(N, P) of a tree of gradients."""
    return torch.cat([t.flatten(1) if t.dim() > 1 else t[:, None] for t in optree.tree_leaves(grads)], 1)


def summed(grads: Any, w: Tensor | None = None) -> Any:
    if w is None:
        return optree.tree_map(lambda t: t.sum(0), grads)
    return optree.tree_map(lambda t: torch.einsum("n,n...->...", w, t), grads)


def variance(grads: Any) -> Any:
    return optree.tree_map(lambda t: (t - t.mean(0)).square().sum(0) / (N - 1), grads)


def warns(case: Case) -> Any:
    return pytest.warns(psgrad.FallbackWarning) if case.loops else contextlib.nullcontext()


@pytest.fixture(params=["roomy", "tight"])
def workspace(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tight: everything that is cut into tiles is cut into many."""
    if request.param == "tight":
        monkeypatch.setattr(_plan, "WORKSPACE", 100)
        monkeypatch.setattr(_plan, "gram_block", lambda t: max(1, min(t, 2)))


@every_case
@pytest.mark.usefixtures("workspace")
def test_factored_grads_answer_as_the_loop_does(case: Case) -> None:
    fn, params, batch = case.make()
    grads, w = oracle(case), torch.linspace(-1, 2, N, dtype=torch.float64)
    rows = flat(grads)
    with warns(case):
        fg = psgrad.factored_grads(fn, params, batch)
    assert len(fg) == N
    assert_close(fg.dense(), grads)
    assert_close(fg.sq_norms(), rows.square().sum(1))
    assert_close(fg.norms(), rows.norm(dim=1))
    each = optree.tree_map(lambda t: t.reshape(N, -1).norm(dim=1), grads)
    assert_close(fg.norms(per_param=True), each)
    assert_close(fg.sum(), summed(grads))
    assert_close(fg.mean(), optree.tree_map(lambda t: t.mean(0), grads))
    assert_close(fg.weighted_sum(w), summed(grads, w))
    bound = float(rows.norm(dim=1).median()) or 1.0
    assert_close(fg.clipped_sum(bound), summed(grads, (bound / rows.norm(dim=1)).clamp(max=1)))
    assert_close(fg.variance(), variance(grads))
    assert_close(fg.dots(), rows @ rows.mT)
    index = torch.tensor([N - 1, 0, 2, 0])
    some = fg[index]
    assert_close(some.dense(), optree.tree_map(lambda t: t[index], grads))
    assert_close(some.norms(), rows[index].norm(dim=1))
    assert_close(fg.dots(some), rows @ rows[index].mT)


@every_case
def test_one_call_functions_stream_over_chunks(case: Case) -> None:
    fn, params, batch = case.make()
    grads = oracle(case)
    rows = flat(grads)
    norms = rows.norm(dim=1)
    bound = float(norms.median()) or 1.0
    w = (bound / norms).clamp(max=1)
    for options in ({}, {"chunk_size": 2}):
        with warns(case):
            assert_close(psgrad.per_sample_norms(fn, params, batch, **options), norms)
            assert_close(psgrad.weighted_grad(fn, params, batch, w, **options), summed(grads, w))
            by_norms = psgrad.weighted_grad(fn, params, batch, lambda n: (bound / n).clamp(max=1), **options)
            assert_close(by_norms, summed(grads, w))
            step = psgrad.clipped_grad(fn, params, batch, bound, **options)
            assert_close(step.grad, summed(grads, w))
            assert_close(step.norms, norms)
            assert_close(psgrad.gram(fn, params, batch, **options), rows @ rows.mT)
            stats = psgrad.grad_stats(fn, params, batch, **options)
    assert_close(stats.mean, optree.tree_map(lambda t: t.mean(0), grads))
    assert_close(stats.variance, variance(grads))
    assert_close(stats.sq_norms, norms.square())
    assert_close(stats.trace, rows.var(0).sum())
