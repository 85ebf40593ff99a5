"""The oracle, and checks against it: a plain loop over samples, with ordinary autograd."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import optree
import torch

from .engine.batched import run_together
from .engine.collectors import DenseCollector
from .engine.ladder import differentiating
from .engine.problem import Problem, paths
from .engine.rule_call import UseRecord
from .engine.signals import Diverged, NeedsLoop
from .engine.validate import flat_params, validated
from .quantities.grads import per_sample_grads
from .torch_.compiler import uncompiled


@uncompiled
def loop_grads(fn: Callable[..., Any], params: Any, batch: Any, *, in_dims: Any = 0) -> Any:
    """Per-sample gradients by the most obvious means: one backward pass per sample.

    >>> fn = lambda w, x: (w * x).sum() ** 2
    >>> psgrad.testing.loop_grads(fn, torch.tensor([1.0, 2.0]), torch.eye(2))
    tensor([[2., 0.],
            [0., 4.]])

    Shares nothing with the engine but the layout of its arguments. Give it float64 to make it an oracle.
    """
    problem = validated(fn, params, batch, in_dims=in_dims, randomness="different")
    rows = []
    with differentiating():
        for i in range(problem.n):
            leaves = [p.detach().clone().requires_grad_() for p in problem.params]
            sample = optree.tree_unflatten(problem.batch_spec, problem.sample(i))
            loss = fn(optree.tree_unflatten(problem.params_spec, leaves), sample).sum()
            if loss.requires_grad:
                grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
                inner = [p.grad for p in leaves]  # what a backward inside the backward has added
                rows.append(tuple(g if own is None else g + own for g, own in zip(grads, inner, strict=True)))
            else:
                rows.append(tuple(torch.zeros_like(p) for p in leaves))
    columns = [torch.stack(c) for c in zip(*rows, strict=True)] or [p.new_empty(0, *p.shape) for p in problem.params]
    return optree.tree_unflatten(problem.params_spec, columns)


def _named(name: str, text: str) -> str:
    return f"{name}: {text}"


@uncompiled
def rules_used(fn: Callable[..., Any], params: Any, batch: Any, *, in_dims: Any = 0) -> dict[str, list[str]]:
    """Which rule handled each use of each parameter in a real run; "vmap" where none did.

    >>> fn = lambda p, x: torch.nn.functional.linear(x, p["w"]).sum() + torch.maximum(x, p["w"]).sum()
    >>> psgrad.testing.rules_used(fn, {"w": torch.ones(2, 3)}, torch.ones(4, 3))
    {"params['w']": ['linear', 'vmap']}
    """
    problem = validated(fn, params, batch, in_dims=in_dims, randomness="different")
    log: list[UseRecord] = []
    with differentiating():
        _logged(problem.copied(), log)
    used: dict[str, list[str]] = {}
    for use in log:
        for param in use.params:
            used.setdefault(param.source.name, []).append(use.rule or "vmap")
    return used


def _logged(problem: Problem, log: list[UseRecord]) -> None:
    """Run, and log every use; where samples part ways, in each part."""
    before = len(log)
    try:
        run_together(problem, DenseCollector(problem), log)
    except Diverged as diverged:
        del log[before:]
        for index in diverged.groups:
            _logged(problem.rows(index), log)
    except NeedsLoop as needed:
        error = RuntimeError(f"samples run one by one: {needed.why}")
        raise error.with_traceback(needed.__traceback__) from None  # which says where


@uncompiled
def check(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    in_dims: Any = 0,
    rules: Mapping[str, Sequence[str]] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Raise AssertionError unless `per_sample_grads` equals the loop and, given `rules`, those rules ran.

    >>> fn = lambda p, x: torch.nn.functional.linear(x, p["w"]).square().sum()
    >>> w = torch.ones(2, 3, dtype=torch.float64)
    >>> psgrad.testing.check(fn, {"w": w}, torch.ones(4, 3, dtype=torch.float64), rules={"params['w']": ["linear"]})

    Tolerances are those of `torch.testing.assert_close` for the dtype unless given.
    """
    ours = optree.tree_leaves(per_sample_grads(fn, params, batch, in_dims=in_dims))
    want = optree.tree_leaves(loop_grads(fn, params, batch, in_dims=in_dims))
    names = paths(flat_params(params)[1], "params")
    for name, a, b in zip(names, ours, want, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=partial(_named, name))
    if rules is not None:
        used = rules_used(fn, params, batch, in_dims=in_dims)
        unknown = [name for name in rules if name not in used and name not in names]
        if unknown:
            raise AssertionError(f"no parameter is called {unknown[0]}; there are {', '.join(names)}")
        for name, expected in rules.items():
            found = used.get(name, [])
            if sorted(found) != sorted(expected):
                raise AssertionError(f"{name} was handled by {found}, not by {list(expected)}")


__all__ = ["check", "loop_grads", "rules_used"]
