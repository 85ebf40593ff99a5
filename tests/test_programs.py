"""Random programs: every quantity equals what the loop over samples gives.

A thousand programs in `make test`, always the same ones. `HYPOTHESIS_PROFILE=thorough` draws others each time, and
`PROGRAMS=20000` says how many.
"""

import os
from typing import Any

import hypothesis
import optree
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import psgrad

from .programs import Program, programs

pytestmark = [  # an exact answer by a slower way is as good here
    pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning"),
    pytest.mark.filterwarnings("ignore::psgrad.UnusedParametersWarning"),  # programs are random
    pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented:UserWarning"),
]

COUNT = int(os.environ.get("PROGRAMS", 5000 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 1000))
BLOCKS = 8  # tests that share the work, for runs in parallel processes


def _close(what: str, found: Any, wanted: Any) -> None:
    """Equal up to rounding, measured against the largest number of each tensor."""
    paths, leaves, spec = optree.tree_flatten_with_path(found)
    others, other_spec = optree.tree_flatten(wanted)
    assert spec == other_spec, what
    for path, a, b in zip(paths, leaves, others, strict=True):
        assert a.shape == b.shape, f"{what} {path} has shape {tuple(a.shape)}"
        gap, size = (a - b).abs().max(), b.abs().max()  # quicker than torch.testing, which has more to say
        assert gap <= 1e-8 * max(1.0, float(size)), f"{what} {path} is off by {gap:.3g} of {size:.3g}:\n{a}\n{b}"


def _summed(grads: Any, weights: Tensor) -> Any:
    return optree.tree_map(lambda t: torch.einsum("n,n...->...", weights, t), grads)


def _variance(grads: Any) -> Any:
    return optree.tree_map(lambda t: (t - t.mean(0)).square().sum(0) / (len(t) - 1), grads)


def check(program: Program, chunk_size: int | None) -> None:
    """Every quantity of the program against the loop; nothing that was handed in is changed."""
    fn, params, batch = program.run()
    try:
        grads = psgrad.testing.loop_grads(fn, params, optree.tree_map(torch.clone, batch))
    except RuntimeError as error:  # a write, or a view of a sample's layout, that torch refuses without vmap too
        hypothesis.assume("modified by an inplace operation" not in str(error))
        hypothesis.assume("view size is not compatible" not in str(error))
        raise
    n = program.n
    rows = torch.cat([t.reshape(n, -1) for t in optree.tree_leaves(grads)], 1)
    hypothesis.assume(bool((rows.abs() < 1e6).all()))
    norms = rows.norm(dim=1)
    bound = float(norms.median()) or 1.0
    clip = (bound / norms).clamp(max=1)
    weights = torch.tensor([1.0, -0.5, 0.0, 2.0], dtype=torch.float64)[:n]
    before = optree.tree_map(torch.clone, (params, batch))

    chunks = {"chunk_size": chunk_size}
    call = (fn, params, batch)

    _close("per_sample_grads", psgrad.per_sample_grads(*call, **chunks), grads)
    _close("per_sample_norms", psgrad.per_sample_norms(*call, **chunks), norms)
    clipped = psgrad.clipped_grad(*call, bound, **chunks)
    _close("clipped_grad", clipped.grad, _summed(grads, clip))
    _close("clipped_grad's norms", clipped.norms, norms)
    _close("weighted_grad", psgrad.weighted_grad(*call, weights, **chunks), _summed(grads, weights))
    _close("gram", psgrad.gram(*call, **chunks), rows @ rows.mT)
    if n > 1:
        _close("grad_stats", psgrad.grad_stats(*call, **chunks).variance, _variance(grads))
    factored = psgrad.factored_grads(*call)
    _close("factored_grads().norms", factored.norms(), norms)
    each = optree.tree_map(lambda t: t.reshape(n, -1).norm(dim=1), grads)
    _close("factored_grads().norms of each", factored.norms(per_param=True), each)
    _close("factored_grads().dots", factored.dots(), rows @ rows.mT)
    _close("factored_grads().weighted_sum", factored.weighted_sum(weights), _summed(grads, weights))
    if n > 1:
        _close("factored_grads().variance", factored.variance(), _variance(grads))
    _close("factored_grads().dense", factored.dense(), grads)
    for name, now, then in zip(("params", "batch"), (params, batch), before, strict=True):
        assert all(map(torch.equal, optree.tree_leaves(now), optree.tree_leaves(then))), f"{name} was changed"


@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_random_program_gives_what_the_loop_gives(block: int) -> None:
    @hypothesis.settings(max_examples=max(1, COUNT // BLOCKS))
    @hypothesis.given(programs(), st.sampled_from([None, 1, 2]))
    def holds(program: Program, chunk_size: int | None) -> None:
        check(program, chunk_size)

    if hypothesis.settings.default.derandomize:
        holds = hypothesis.seed(block)(holds)
    holds()
