"""The natural step in sample space, as the docstrings of gram and weighted_grad write it down: as the dense solve."""

from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn

import psgrad

from .test_contract import assert_close

DAMPING, MOMENTUM, RATE = 0.05, 0.9, 0.3


def problem(n: int = 12) -> tuple[Any, Any, Any]:
    """Residuals of a small net on positions, with a layer that is called twice."""
    torch.manual_seed(0)
    shared = nn.Linear(5, 5)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), shared, nn.Tanh(), shared, nn.Tanh(), nn.Linear(5, 1)).double()
    fn, params = psgrad.from_module(model, lambda y, target: (y.squeeze(-1) - target).mean())
    return fn, params, (torch.randn(n, 4, 3).double(), torch.randn(n, 4).double())


def dense(fn: Any, params: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """J (N, P) and r (N,), by the plain loop."""
    leaves = optree.tree_leaves(psgrad.testing.loop_grads(fn, params, batch))
    rows = torch.cat([g.flatten(1) for g in leaves], 1)
    n = len(batch[0])
    return rows, torch.stack([fn(params, optree.tree_map(lambda t, i=i: t[i], batch)).detach() for i in range(n)])


def as_vector(tree: Any) -> Tensor:
    return torch.cat([t.flatten() for t in optree.tree_leaves(tree)])


@pytest.mark.parametrize("chunk_size", [None, 5])
def test_a_step(chunk_size: int | None) -> None:
    fn, params, batch = problem()
    j, r = dense(fn, params, batch)
    kernel = psgrad.gram(fn, params, batch, chunk_size=chunk_size)
    weights = torch.linalg.solve(kernel + DAMPING * torch.eye(len(r)), r)
    step = psgrad.weighted_grad(fn, params, batch, weights, chunk_size=chunk_size)
    want = torch.linalg.solve(j.mT @ j + DAMPING * torch.eye(j.shape[1]), j.mT @ r)
    assert_close(as_vector(step), want)


@pytest.mark.parametrize("streamed", [False, True])
def test_steps_with_momentum(streamed: bool) -> None:
    """Three of them, beside the minimum of |J phi - r|^2 + d |phi - m phi_before|^2 by a solve with P x P numbers."""
    fn, params, batch = problem()
    phi = optree.tree_map(torch.zeros_like, params)
    before = as_vector(phi)
    for _ in range(3):
        j, r = dense(fn, params, batch)
        identity = torch.eye(j.shape[1], dtype=torch.float64)
        want = torch.linalg.solve(j.mT @ j + DAMPING * identity, j.mT @ r + DAMPING * MOMENTUM * before)
        damped = DAMPING * torch.eye(len(r))
        if streamed:
            rest = r - MOMENTUM * psgrad.per_sample_dots(fn, params, batch, phi)
            weights = torch.linalg.solve(psgrad.gram(fn, params, batch) + damped, rest)
            step = psgrad.weighted_grad(fn, params, batch, weights)
        else:
            fg = psgrad.factored_grads(fn, params, batch)
            rest = fg.values - MOMENTUM * fg.dots(phi)
            step = fg.weighted_sum(torch.linalg.solve(fg.dots() + damped, rest))
        phi = optree.tree_map(lambda p, s: MOMENTUM * p + s, phi, step)
        assert_close(as_vector(phi), want)
        before = want
        params = optree.tree_map(lambda p, s: p - RATE * s, params, phi)
