"""Norms, sums, inner products and statistics, for every case of the table: as from the loop's gradients."""

import contextlib
import gc
import subprocess
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import optree
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import psgrad
from psgrad.factors import costs as _plan
from psgrad.factors import inner as _pairs
from psgrad.factors.dense import Dense
from psgrad.factors.numerics import norm_of_norms
from psgrad.factors.outer import Outer
from psgrad.factors.patches import Patches
from psgrad.streaming import budget as _memory

from .cases import CASES, Case, N
from .test_contract import assert_close

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
    pytest.mark.filterwarnings("ignore::psgrad.UnusedParametersWarning"),  # two cases of the table
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


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
    """Tight: everything that is cut into tiles is cut into many, and no call counts as small."""
    if request.param == "tight":
        monkeypatch.setattr(_plan, "WORKSPACE", 100)
        monkeypatch.setattr(_plan, "TILE", 100)
        monkeypatch.setattr(_plan, "SMALL", -1)
        monkeypatch.setattr(_plan, "gram_block", lambda t: max(1, min(t, 2)))
        monkeypatch.setattr(_plan, "gram_strip", lambda t: max(1, min(t, 2)))


@every_case
@pytest.mark.usefixtures("workspace")
def test_factored_grads_answer_as_the_loop_does(case: Case) -> None:
    fn, params, batch = case.make()
    grads, w = case.loop_grads(), torch.linspace(-1, 2, N, dtype=torch.float64)
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
    grads = case.loop_grads()
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


# ---- shared weights, at length ---------------------------------------------------------------------------


def check_all(fn: Any, params: Any, batch: Any, **tolerances: Any) -> None:
    """Every quantity as from the loop's gradients."""
    grads = psgrad.testing.loop_grads(fn, params, batch)
    rows = flat(grads)
    n = len(rows)
    fg = psgrad.factored_grads(fn, params, batch)
    assert_close(fg.sq_norms(), rows.square().sum(1), **tolerances)
    assert_close(psgrad.per_sample_norms(fn, params, batch), rows.norm(dim=1), **tolerances)
    assert_close(fg.dots(), rows @ rows.mT, **tolerances)
    w = torch.linspace(0, 1, n, dtype=rows.dtype)
    assert_close(fg.weighted_sum(w), summed(grads, w), **tolerances)
    assert_close(psgrad.weighted_grad(fn, params, batch, w), summed(grads, w), **tolerances)
    if n > 1:
        assert_close(fg.variance(), optree.tree_map(lambda t: t.var(0), grads), **tolerances)


USES = {
    "linear": lambda w, x: F.linear(x, w),
    "transposed": lambda w, x: x @ w,
    "einsum": lambda w, x: torch.einsum("ti,oi->to", x, w),
    "rows": lambda w, x: w[:2] @ x.mT,
    "columns": lambda w, x: x[:, :2] @ w[:, :2].mT,
    "other columns": lambda w, x: x[:, 2:] @ w[:, 2:].mT,
    "embedding": lambda w, x: F.embedding((x * 7).long() % len(w), w),
    "indexed": lambda w, x: w[(x[:, 0] * 5).long() % len(w)],
    "bare": lambda w, x: x[:, None] * w,
    "maximum": lambda w, x: torch.maximum(x.mean(), w),
    "squared": lambda w, x: (w**2) @ x.mT,
    "convolution": lambda w, x: F.conv1d(x[None, :, :2].mT, w.view(2, 2, -1), padding=2),
    "pointwise": lambda w, x: F.conv1d(x.mT[None], w[..., None]),
    "expanded": lambda w, x: torch.baddbmm(x.sum() * x.new_ones(3, 4, 2), w.expand(3, 4, 4), x.new_ones(3, 4, 2)),
}


@hypothesis.given(uses=st.lists(st.sampled_from(sorted(USES)), min_size=1, max_size=4), t=st.integers(1, 9))
@hypothesis.settings(max_examples=80)
def test_a_weight_used_in_several_ways(uses: list[str], t: int) -> None:
    torch.manual_seed(0)

    def fn(params: Any, x: Tensor) -> Tensor:
        total = torch.zeros((), dtype=x.dtype)
        for k, use in enumerate(uses):
            total = total + (USES[use](params["w"], x + k) * params["s"]).sin().sum()
        return total

    params = {"w": torch.randn(4, 4, dtype=torch.float64), "s": torch.tensor(0.7, dtype=torch.float64)}
    check_all(fn, params, torch.randn(3, t, 4, dtype=torch.float64), rtol=1e-6, atol=1e-8)


class TiedGPT(nn.Module):
    """Embedding and head share a table; positions; one block called twice, as ALBERT has it."""

    def __init__(self, vocabulary: int = 50, width: int = 16, length: int = 12) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]))
        for _ in range(2):
            h = self.block(h)
        logits: Tensor = self.head(h)
        return logits.flatten(0, 1)


def tokens_loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y.flatten())


def tied_gpt() -> tuple[Any, Any, Any]:
    fn, params = psgrad.from_module(TiedGPT().double(), tokens_loss)
    return fn, params, (torch.randint(50, (5, 12)), torch.randint(50, (5, 12)))


def recurrent() -> tuple[Any, Any, Any]:
    """A cell unrolled by hand."""

    def fn(params: Any, x: Tensor) -> Tensor:
        h = x.new_zeros(6)
        for step in x:
            h = torch.tanh(F.linear(step, params["in"], params["bias"]) + F.linear(h, params["hidden"]))
        return h.square().sum()

    shapes = {"in": (6, 3), "hidden": (6, 6), "bias": (6,)}
    params = {name: torch.randn(shape, dtype=torch.float64) / 2 for name, shape in shapes.items()}
    return fn, params, torch.randn(5, 7, 3, dtype=torch.float64)


@pytest.mark.parametrize("make", [tied_gpt, recurrent])
def test_models_with_shared_weights(make: Any) -> None:
    check_all(*make())


class Watch(TorchDispatchMode):
    """Records the most elements that any new tensor had."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(t, Tensor) and not t._is_view():
                self.most = max(self.most, t.untyped_storage().nbytes() // t.element_size())
        return out


@pytest.mark.parametrize(
    "quantity",
    [
        "norms",
        "clipped",
        "weighted",
        "gram",
        "dots",
        "factored dots",
        "mapped",
        "projected",
        "two-sided",
        "ntk",
        "ntk trace",
    ],
)
def test_no_tensor_of_n_times_p(quantity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the tied table nor for the layers that are called twice: N x P of any one parameter."""
    monkeypatch.setattr(_plan, "WORKSPACE", 1 << 12)
    monkeypatch.setattr(_plan, "TILE", 1 << 12)
    n, width, vocabulary = 16, 32, 500
    fn, params = psgrad.from_module(TiedGPT(vocabulary, width), tokens_loss)
    batch = torch.randint(vocabulary, (n, 12)), torch.randint(vocabulary, (n, 12))
    several = lambda p, s: fn(p, s).view(1) ** torch.tensor([1, 2])
    sides = {name: (torch.ones(len(p)), torch.eye(p[0].numel())) for name, p in params.items() if p.dim() == 2}
    ask = {
        "norms": lambda: psgrad.per_sample_norms(fn, params, batch),
        "clipped": lambda: psgrad.clipped_grad(fn, params, batch, 1.0),
        "weighted": lambda: psgrad.weighted_grad(fn, params, batch, lambda norms: 1 / norms),
        "gram": lambda: psgrad.gram(fn, params, batch),
        "dots": lambda: psgrad.per_sample_dots(fn, params, batch, params),
        "factored dots": lambda: psgrad.factored_grads(fn, params, batch).dots(params),
        "projected": lambda: psgrad.projected_grads(fn, params, batch, 100),
        "two-sided": lambda: psgrad.projected_grads(fn, params, batch, 100, kind="two_sided"),
        "ntk": lambda: psgrad.ntk(several, params, batch),
        "ntk trace": lambda: psgrad.ntk(several, params, batch, outputs="trace"),
        "mapped": lambda: psgrad.factored_grads(fn, params, batch).precondition(sides).norms(),
    }[quantity]
    with Watch() as watch:
        ask()
    largest = max(p.numel() for p in params.values())
    assert n * 12 * vocabulary <= watch.most < n * largest / 2  # the logits, and nothing like N tables


# ---- samples that are not finite, or do not count --------------------------------------------------------


def linear_loss(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(w @ x).sum() + (w * x).sum() ** 2


def test_a_bad_sample_touches_its_own_row_only() -> None:
    w, x = torch.randn(3, 4), torch.randn(5, 4)
    good = torch.tensor([0, 1, 3, 4])
    want = psgrad.clipped_grad(linear_loss, w, x[good], 1.0)
    for value in (torch.nan, torch.inf):
        bad = x.clone()
        bad[2, 1] = value
        norms = psgrad.per_sample_norms(linear_loss, w, bad)
        assert_close(norms[good], want.norms)
        assert not norms[2].isfinite()
        assert_close(psgrad.gram(linear_loss, w, bad)[good][:, good], psgrad.gram(linear_loss, w, x[good]))
        for options in ({}, {"chunk_size": 2}):
            with pytest.raises(psgrad.ArgumentError, match=r"the gradients of sample 2 are not finite\n  leave them"):
                psgrad.clipped_grad(linear_loss, w, bad, 1.0, **options)
            step = psgrad.clipped_grad(linear_loss, w, bad, 1.0, nonfinite="zero", **options)
            assert_close(step.grad, want.grad)
            assert not step.norms[2].isfinite()
            step = psgrad.clipped_grad(linear_loss, w, bad, 1.0, nonfinite="propagate", **options)
            assert step.grad.isnan().any()
        weights = torch.tensor([1.0, 2.0, 0.0, 3.0, 4.0])
        assert_close(
            psgrad.weighted_grad(linear_loss, w, bad, weights),
            psgrad.weighted_grad(linear_loss, w, x[good], weights[good]),
        )
        with pytest.raises(psgrad.ArgumentError, match="sample 2 are"):
            psgrad.factored_grads(linear_loss, w, bad).clipped_sum(1.0)


def test_many_bad_samples_are_counted() -> None:
    with pytest.raises(psgrad.ArgumentError, match=r"samples 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, \.\.\. \(12 in all\) are"):
        psgrad.clipped_grad(linear_loss, torch.ones(3, 4), torch.full((12, 4), torch.nan), 1.0)


def test_a_zero_gradient_stays_zero() -> None:
    fn = lambda w, x: (w * x).sum()
    step = psgrad.clipped_grad(fn, torch.ones(2), torch.tensor([[0.0, 0.0], [3.0, 4.0]]), 1.0)
    assert_close(step.grad, torch.tensor([0.6, 0.8]))
    assert_close(step.norms, torch.tensor([0.0, 5.0]))


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_samples_that_do_not_count(chunk_size: int | None) -> None:
    """Their rows may hold anything: padding to a fixed size."""
    w, x, valid = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([True, False, True, True, False])
    padded = x.masked_fill(~valid[:, None], torch.nan)
    options: Any = {"valid": valid, "chunk_size": chunk_size}
    there = x[valid]

    def back(t: Tensor) -> Tensor:
        out = t.new_zeros(5, *t.shape[1:])
        out[valid] = t
        return out

    assert_close(
        psgrad.per_sample_norms(linear_loss, w, padded, **options),
        back(psgrad.per_sample_norms(linear_loss, w, there)),
    )
    step, want = (
        psgrad.clipped_grad(linear_loss, w, padded, 1.0, **options),
        psgrad.clipped_grad(linear_loss, w, there, 1.0),
    )
    assert_close(tuple(step), (want.grad, back(want.norms), back(want.values), 3, 1.0))
    weights = torch.arange(5.0)
    assert_close(
        psgrad.weighted_grad(linear_loss, w, padded, weights, **options),
        psgrad.weighted_grad(linear_loss, w, there, weights[valid]),
    )
    kernel = psgrad.gram(linear_loss, w, there)
    assert_close(psgrad.gram(linear_loss, w, padded, **options), back(back(kernel).mT).mT)
    assert_close(psgrad.gram(linear_loss, w, padded, there, **options), back(kernel))
    stats, stats_want = psgrad.grad_stats(linear_loss, w, padded, **options), psgrad.grad_stats(linear_loss, w, there)
    assert_close(stats.variance, stats_want.variance)
    assert_close(stats.sq_norms, back(stats_want.sq_norms))
    none = psgrad.clipped_grad(linear_loss, w, padded, 1.0, valid=torch.zeros(5, dtype=torch.bool))
    assert_close(tuple(none), (torch.zeros(3, 4), torch.zeros(5), torch.zeros(5), 0, 1.0))


# ---- what fn returns besides -----------------------------------------------------------------------------


WITH_AUX: dict[str, Any] = {
    "norms": psgrad.per_sample_norms,
    "norms of parameters": partial(psgrad.per_sample_norms, per_param=True),
    "weighted": lambda *args, **options: psgrad.weighted_grad(*args, torch.linspace(-1, 2, 6), **options),
    "weighted by norms": lambda *args, **options: psgrad.weighted_grad(*args, lambda n: 1 / (1 + n), **options),
    "clipped": lambda *args, **options: psgrad.clipped_grad(*args, 0.5, **options),
    "gram": psgrad.gram,
    "gram with others": lambda fn, p, x, **options: psgrad.gram(fn, p, x, 1 + x[:4], **options),
    "stats": psgrad.grad_stats,
}
RUNS: dict[str, Any] = {
    "at once": {},
    "chunks": {"chunk_size": 4},
    "some": {"valid": torch.tensor([True, False, True, True, False, True])},
    "some, in chunks": {"valid": torch.tensor([True, False, True, True, False, True]), "chunk_size": 3},
    "none": {"valid": torch.zeros(6, dtype=torch.bool)},
}


def square_or_sum(w: Tensor, x: Tensor) -> Tensor:
    """A loss that splits a batch in two."""
    return torch.tanh(w @ x).square().sum() if x.sum() > 0 else (w @ x).exp().sum()


def and_aux(loss: Any) -> Any:
    """The loss; and which sample it is, a number of the sample, and one that is the same for all."""
    return lambda w, x: (loss(w, x), {"x": x, "sum": (x.sum(), 7)})


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("loss", [linear_loss, square_or_sum], ids=["together", "split"])
@pytest.mark.parametrize("quantity", WITH_AUX)
def test_aux_comes_back_with_every_quantity(quantity: str, loss: Any, run: str) -> None:
    """Its rows at the places of their samples, whatever ran together; the quantity itself as without it."""
    w, x = torch.randn(3, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    ask, options = WITH_AUX[quantity], RUNS[run]
    found, aux = ask(and_aux(loss), w, x, has_aux=True, **options)
    want = ask(loss, w, x, **options)
    assert type(found) is type(want)
    assert_close(optree.tree_leaves(found), optree.tree_leaves(want), equal_nan=True)
    there = options.get("valid", torch.ones(6, dtype=torch.bool))
    assert_close(aux["x"], x * there[:, None])
    assert_close(aux["sum"], (x.sum(1) * there, 7 * there))


@pytest.mark.parametrize("quantity", ["clipped", "weighted by norms"])
def test_aux_of_two_passes(quantity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which draw the same numbers: aux is of the samples whose gradients are summed."""
    real = _memory.peak_bytes

    def peak(problem: Any, n: int, samples: int, asked: Any, parted: bool = False) -> int:
        small = n * 100 + 0 * real(problem, n, samples, asked)
        return 1 << 40 if asked.name == "clipped" and quantity == "clipped" else small

    monkeypatch.setattr(_memory, "peak_bytes", peak)

    def fn(w: Tensor, x: Tensor) -> Any:
        dropped = F.dropout(x, 0.5, True)
        return (w * dropped).sum(), dropped

    w, x = torch.zeros(8, dtype=torch.float64), torch.ones(6, 8, dtype=torch.float64)
    found, dropped = WITH_AUX[quantity](fn, w, x, has_aux=True, max_bytes=250)
    norms = dropped.norm(dim=1)
    weights = (0.5 / norms).clamp(max=1) if quantity == "clipped" else 1 / (1 + norms)
    assert_close(found.grad if quantity == "clipped" else found, weights @ dropped)


def test_aux_of_chunks_of_a_gram_matrix() -> None:
    """A chunk that runs again draws the same, so that its aux belongs to its row."""

    def fn(w: Tensor, x: Tensor) -> Any:
        dropped = F.dropout(x, 0.5, True)
        return (w * dropped).sum(), dropped

    found, dropped = psgrad.gram(fn, torch.zeros(8), torch.ones(6, 8), has_aux=True, chunk_size=2)
    assert_close(found, dropped @ dropped.mT)


def test_aux_of_a_gram_matrix_with_factored_grads() -> None:
    w, x = torch.randn(3, 4), torch.randn(6, 4)
    fg = psgrad.factored_grads(linear_loss, w, x[:2])
    for chunk_size in (None, 4):
        found, aux = psgrad.gram(and_aux(linear_loss), w, x, fg, has_aux=True, chunk_size=chunk_size)
        assert_close(found, psgrad.gram(linear_loss, w, x, x[:2]))
        assert_close(aux["x"], x)


@pytest.mark.parametrize("loss", [linear_loss, square_or_sum], ids=["together", "loop"])
def test_aux_with_differentiable_norms(loss: Any) -> None:
    w, x = torch.randn(3, 4, requires_grad=True), torch.randn(6, 4)
    valid = torch.tensor([True, False, True, True, False, True])
    with pytest.warns(psgrad.FallbackWarning) if loss is square_or_sum else contextlib.nullcontext():
        norms, aux = psgrad.per_sample_norms(and_aux(loss), w, x, has_aux=True, differentiable=True, valid=valid)
    assert norms.requires_grad
    assert not aux["x"].requires_grad
    assert_close(norms.detach(), psgrad.per_sample_norms(loss, w, x, valid=valid))
    assert_close(aux["x"], x * valid[:, None])
    assert_close(aux["sum"], (x.sum(1) * valid, 7 * valid))
    ask = lambda w: psgrad.per_sample_norms(and_aux(linear_loss), w, x, has_aux=True)
    gradient, aux = torch.func.grad(lambda w: (ask(w)[0].sum(), ask(w)[1]), has_aux=True)(w.detach())
    assert_close(aux["x"], x)
    assert_close(gradient, torch.func.grad(lambda w: psgrad.per_sample_norms(linear_loss, w, x).sum())(w.detach()))


@pytest.mark.parametrize("quantity", sorted(set(WITH_AUX) - {"weighted", "gram with others"}))
def test_aux_of_no_samples(quantity: str) -> None:
    _, aux = WITH_AUX[quantity](and_aux(linear_loss), torch.ones(3, 4), torch.ones(0, 4), has_aux=True)
    assert aux["x"].shape == (0, 4)
    assert aux["sum"][0].shape == aux["sum"][1].shape == (0,)
    fg = psgrad.factored_grads(and_aux(linear_loss), torch.ones(3, 4), torch.ones(0, 4), has_aux=True)
    assert fg.aux["x"].shape == (0, 4)


@pytest.mark.parametrize("quantity", WITH_AUX)
def test_aux_whose_structure_depends_on_the_chunk(quantity: str) -> None:
    def fn(w: Tensor, x: Tensor) -> Any:
        return (w @ x).sum(), {"x": x} if x.sum() > 0 else {}

    x = torch.cat([torch.ones(3, 4), -torch.ones(3, 4)])
    for ask in (WITH_AUX[quantity], psgrad.factored_grads):
        with pytest.raises(psgrad.ArgumentError) as error:
            ask(fn, torch.ones(3, 4), x, has_aux=True, chunk_size=3)
        assert str(error.value) == (
            "aux has another structure for some samples: PyTreeSpec({'x': *}) and PyTreeSpec({})\n"
            "  return the same structure in every branch of fn."
        )


# ---- bounds, passes and draws ----------------------------------------------------------------------------


def layers() -> tuple[Any, Any, Any]:
    def fn(params: Any, x: Tensor) -> Tensor:
        h = torch.tanh(F.linear(x, params["first"]["w"], params["first"]["b"]))
        return F.linear(h, params["last"]["w"]).square().sum()

    shapes = {"first": {"w": (5, 4), "b": (5,)}, "last": {"w": (2, 5)}}
    params = optree.tree_map(
        lambda s: torch.randn(s, dtype=torch.float64), shapes, is_leaf=lambda s: isinstance(s, tuple)
    )
    return fn, params, torch.randn(6, 4, dtype=torch.float64)


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_a_bound_for_each_layer(chunk_size: int | None) -> None:
    fn, params, batch = layers()
    grads = psgrad.testing.loop_grads(fn, params, batch)
    step = psgrad.clipped_grad(fn, params, batch, {"first": 0.5, "last": torch.tensor(2.0)}, chunk_size=chunk_size)
    for name, bound in (("first", 0.5), ("last", 2.0)):
        norms = flat(grads[name]).norm(dim=1)
        assert_close(step.norms[name], norms)
        assert_close(step.grad[name], summed(grads[name], (bound / norms).clamp(max=1)))


@pytest.mark.parametrize("nonfinite", ["raise", "zero", "propagate"])
def test_two_passes_where_one_needs_too_much(nonfinite: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Say that no sample's factors can be kept: norms, then the weighted gradient, with the same dropout."""
    fn, params = psgrad.from_module(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3)), F.cross_entropy)
    batch = torch.randn(6, 8), torch.zeros(6, dtype=torch.long)
    if nonfinite != "raise":
        batch[0][2] = torch.nan
    real = _memory.peak_bytes

    def peak(problem: Any, n: int, samples: int, quantity: Any, parted: bool = False) -> int:
        if quantity.name == "clipped":
            return 1 << 40
        return n * 100 + 0 * real(problem, n, samples, quantity, parted)

    monkeypatch.setattr(_memory, "peak_bytes", peak)
    torch.manual_seed(1)
    want = psgrad.clipped_grad(fn, params, batch, 0.1, chunk_size=2, nonfinite=nonfinite)
    torch.manual_seed(1)
    step = psgrad.clipped_grad(fn, params, batch, 0.1, max_bytes=250, nonfinite=nonfinite)
    assert_close(tuple(step), tuple(want), equal_nan=True)
    with pytest.raises(psgrad.ArgumentError, match="max_bytes=50 is too little: one sample at a time needs 100"):
        psgrad.clipped_grad(fn, params, batch, 0.1, max_bytes=50)


@pytest.mark.parametrize("sizes", [(64, 64, 2), (512, 512, 2), (8, 6, 4)])
@pytest.mark.parametrize("lead", [(8,), (2,), (2, 6)])
@pytest.mark.parametrize("quantity", ["clipped", "weighted", "norms", "stats"])
def test_the_bound_that_an_error_names_is_the_least(quantity: str, sizes: Any, lead: Any) -> None:
    """Where parameters are large and samples small, sums for each chunk take more than all samples at once."""
    a, b, c = sizes
    fn, params = psgrad.from_module(nn.Sequential(nn.Linear(a, b), nn.Tanh(), nn.Linear(b, c)), F.mse_loss)
    batch = torch.randn(*lead, a), torch.randn(*lead, c)
    run: Any = {
        "clipped": lambda most: psgrad.clipped_grad(fn, params, batch, 0.1, max_bytes=most),
        "weighted": lambda most: psgrad.weighted_grad(fn, params, batch, torch.ones(lead[0]), max_bytes=most),
        "norms": lambda most: psgrad.per_sample_norms(fn, params, batch, max_bytes=most),
        "stats": lambda most: psgrad.grad_stats(fn, params, batch, max_bytes=most),
    }[quantity]
    with pytest.raises(psgrad.ArgumentError, match="give at least") as error:
        run(1)
    least = int(str(error.value).split("max_bytes=")[-1].split(",")[0])
    run(least)
    with pytest.raises(psgrad.ArgumentError, match=f"at least max_bytes={least},"):
        run(least - 1)


def test_statistics_keep_their_bound() -> None:
    fn, params = psgrad.from_module(nn.Linear(256, 256), F.mse_loss)
    batch = torch.randn(2, 6, 256), torch.randn(2, 6, 256)
    with pytest.raises(psgrad.ArgumentError) as error:
        psgrad.grad_stats(fn, params, batch, max_bytes=1)
    least = int(str(error.value).split("max_bytes=")[-1].split(",")[0])
    for percent in range(100, 160, 4):  # one sample at a time, then both
        with _memory.Meter([*params.values(), *batch]) as meter:
            found = psgrad.grad_stats(fn, params, batch, max_bytes=least * percent // 100)
        result = sum(t.nbytes for t in (*found.mean.values(), *found.variance.values()))
        assert 0 < meter.peak - result < 1.1 * least * percent // 100


@pytest.mark.parametrize("max_norm", [1e300, float("inf"), torch.tensor(1e300, dtype=torch.float64)])
def test_a_bound_beyond_the_norms_dtype_clips_nothing(max_norm: Any) -> None:
    batch = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    found = psgrad.clipped_grad(lambda w, x: (w * x).sum(), torch.zeros(2), batch, max_norm)
    assert_close(found.grad, torch.tensor([3.0, 4.0]))


def test_a_bound_for_each_module_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))).double()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    batch = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    grads = psgrad.testing.loop_grads(fn, params, batch)
    step = psgrad.clipped_grad(fn, params, batch, {"0": 0.1, "2": 0.2, "2.1.bias": 0.3})
    under = {"0": ["0.weight", "0.bias"], "2": ["2.0.weight", "2.0.bias", "2.1.weight"], "2.1.bias": ["2.1.bias"]}
    for (name, names), bound in zip(under.items(), (0.1, 0.2, 0.3), strict=True):
        norms = flat([grads[k] for k in names]).norm(dim=1)
        assert_close(step.norms[name], norms)
        for k in names:
            assert_close(step.grad[k], summed(grads[k], (bound / norms).clamp(max=1)))
    with pytest.raises(psgrad.ArgumentError, match=r"^max_norm has no bound for '2.0.bias'\n  give one for the para"):
        psgrad.clipped_grad(fn, params, batch, {"0": 0.1, "2.0.weight": 0.2, "2.1": 0.2})
    with pytest.raises(psgrad.ArgumentError, match=r"^max_norm has '1', under which there is no parameter\n  leave"):
        psgrad.clipped_grad(fn, params, batch, {"0": 0.1, "1": 1.0, "2": 0.2})


def test_a_function_of_the_norms_sees_all_samples() -> None:
    x, valid = torch.randn(5, 4), torch.tensor([True, False, True, True, False])
    importance, w = torch.arange(1.0, 6.0), torch.randn(3, 4)
    for chunk_size in (None, 2):
        found = psgrad.weighted_grad(
            linear_loss, w, x, lambda norms: importance / norms, valid=valid, chunk_size=chunk_size
        )
        norms = psgrad.per_sample_norms(linear_loss, w, x[valid])
        assert_close(found, psgrad.weighted_grad(linear_loss, w, x[valid], importance[valid] / norms))


def test_it_can_be_iterated() -> None:
    fn, params, batch = layers()
    fg = psgrad.factored_grads(fn, params, batch)
    assert_close(torch.cat([one.norms() for one in fg]), fg.norms())


def test_two_passes_draw_the_same() -> None:
    fn, params = psgrad.from_module(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3)), F.cross_entropy)
    batch = torch.ones(6, 8), torch.zeros(6, dtype=torch.long)
    step = psgrad.weighted_grad(fn, params, batch, lambda norms: 1 / norms, chunk_size=6)
    torch.manual_seed(3)
    norms = []
    psgrad.weighted_grad(fn, params, batch, lambda n: norms.append(n) or 1 / n, chunk_size=2)
    after = torch.rand(())
    torch.manual_seed(3)
    total = psgrad.weighted_grad(fn, params, batch, lambda n: 1 / n, chunk_size=2)
    assert torch.rand(()) == after
    torch.manual_seed(3)
    grads = psgrad.per_sample_grads(fn, params, batch, chunk_size=2)
    assert_close(flat(grads).norm(dim=1), norms[0])
    assert_close(total, summed(grads, 1 / norms[0]))
    assert optree.tree_structure(step) == optree.tree_structure(total)


def test_chunks_of_a_gram_matrix_draw_the_same_each_time() -> None:
    fn, params = psgrad.from_module(nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3)), F.cross_entropy)
    batch = torch.ones(6, 8), torch.zeros(6, dtype=torch.long)
    torch.manual_seed(3)
    kernel = psgrad.gram(fn, params, batch, chunk_size=2)
    torch.manual_seed(3)
    rows = flat(psgrad.per_sample_grads(fn, params, batch, chunk_size=2))
    assert_close(kernel, rows @ rows.mT)


def test_max_bytes_bounds_what_is_allocated() -> None:
    fn, params = psgrad.from_module(nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 10)), F.cross_entropy)
    batch = torch.randn(512, 64), torch.randint(10, (512,))
    for quantity in (psgrad.per_sample_norms, psgrad.factored_grads, psgrad.grad_stats, psgrad.gram):
        with _memory.Meter([*params.values(), *batch]) as meter:
            quantity(fn, params, batch)
        free = meter.peak
        sums = sum(p.nbytes for p in params.values())  # twice that below: mean and variance
        result = {psgrad.gram: 4 * 512 * 512, psgrad.grad_stats: sums}.get(quantity, 0)
        if quantity is psgrad.factored_grads:
            continue  # its result is what takes the memory
        quantity(fn, params, batch, max_bytes=free // 3)  # works out the chunk size, and remembers it
        with _memory.Meter([*params.values(), *batch]) as meter:
            quantity(fn, params, batch, max_bytes=free // 3)
        assert meter.peak <= free // 3 * 1.1 + 2 * result + 4 * 512 * 8


def long_sequences() -> tuple[Any, Any, Any]:
    """Activations that are much larger than the sums, and gone when the last sum is there."""
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    fn, params = psgrad.from_module(model, F.mse_loss)
    return fn, params, (torch.randn(40, 50, 32), torch.randn(40, 50, 8))


def peak_of_clipped(fn: Any, params: Any, batch: Any, **options: Any) -> int:
    with _memory.Meter([*params.values(), *batch]) as meter:
        psgrad.clipped_grad(fn, params, batch, 0.1, **options)
    return meter.peak


@pytest.mark.parametrize("share", [2, 4, 8])
def test_max_bytes_bounds_a_clipped_sum(share: int) -> None:
    fn, params, batch = long_sequences()
    bound, result = peak_of_clipped(fn, params, batch) // share, sum(p.nbytes for p in params.values())
    want = psgrad.clipped_grad(fn, params, batch, 0.1)
    assert_close(psgrad.clipped_grad(fn, params, batch, 0.1, max_bytes=bound).grad, want.grad)
    assert 0.4 * bound < peak_of_clipped(fn, params, batch, max_bytes=bound) - result <= 1.1 * bound


def test_a_clipped_sum_lets_go_of_what_is_summed() -> None:
    model = nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 10))
    fn, params = psgrad.from_module(model, F.cross_entropy)
    batch = torch.randn(100, 300), torch.randint(10, (100,))
    result, factor = sum(p.nbytes for p in params.values()), 100 * 400 * 4  # an input, or a cotangent, of width 400
    assert peak_of_clipped(fn, params, batch) < result + 2.5 * factor  # of five that are kept till the norms are known


@pytest.mark.parametrize("shape", [(5, 1), (5, 3), (5, 2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_sums_add_to_what_is_there(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    factor = Outer(torch.randn(*shape, 4).to(dtype), torch.randn(*shape, 6).to(dtype))
    w, found = torch.rand(5), factor.weighted_sum(None)
    for weights in (None, w):
        total = torch.ones_like(found)
        factor.add_weighted(total, weights)
        assert_close(total, 1 + factor.weighted_sum(weights))


# ---- gram and statistics ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-13, 1.0, 1e10])
def test_one_position_with_and_without_an_axis(scale: float) -> None:
    """Norms are products of norms: no square of an inner product under- or overflows."""
    x, g = scale * torch.randn(5, 7, dtype=torch.float32), scale * torch.randn(5, 3, dtype=torch.float32)
    plain, rows = Outer(x, g), Outer(x[:, None], g[:, None])
    expected = (x.double().norm(dim=1) * g.double().norm(dim=1)).float()
    for factor in (plain, rows):
        torch.testing.assert_close(factor.norms(), expected, rtol=1e-5, atol=0.0)
        torch.testing.assert_close(factor.dense(), g[:, :, None] * x[:, None], rtol=1e-5, atol=0.0)
        assert factor.plan.strategy == "mul"
    torch.testing.assert_close(
        plain.squared_deviations(rows.weighted_sum() / 5), rows.squared_deviations(plain.weighted_sum() / 5)
    )


@pytest.mark.parametrize("parts", [1, 2, 9, 30])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_norms_of_many_parts_neither_overflow_nor_vanish(parts: int, scale: float) -> None:
    norms = [torch.full((3,), scale) for _ in range(parts)]
    torch.testing.assert_close(norm_of_norms(norms), torch.full((3,), scale * parts**0.5), rtol=1e-5, atol=0.0)


def test_gradients_of_a_batch_meet_themselves_once_written(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Patches] = []
    dense = Patches.dense
    monkeypatch.setattr(Patches, "dense", lambda self, out=None: (written.append(self), dense(self, out))[1])
    fg = psgrad.factored_grads(
        lambda w, x: F.conv2d(x, w).sin().sum(), torch.randn(9, 8, 5, 5), torch.randn(3, 8, 8, 8)
    )
    rows = fg.dense().flatten(1)
    written.clear()
    torch.testing.assert_close(fg.dots(), rows @ rows.mT)
    assert len(written) == 1
    torch.testing.assert_close(fg.dots(fg[:]), rows @ rows.mT)
    assert len(written) == 3


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_gram_with_others(chunk_size: int | None) -> None:
    fn, params, batch = tied_gpt()
    other = tuple(t[:3].flip(1) for t in batch)
    rows, columns = (flat(psgrad.testing.loop_grads(fn, params, b)) for b in (batch, other))
    assert_close(psgrad.gram(fn, params, batch, other, chunk_size=chunk_size), rows @ columns.mT)
    fg = psgrad.factored_grads(fn, params, other, chunk_size=chunk_size)
    assert_close(psgrad.gram(fn, params, batch, fg, chunk_size=chunk_size), rows @ columns.mT)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_gram_matrix_lies_in_order(chunk_size: int | None) -> None:
    fn, x = lambda w, x: (w * x).sum().exp(), torch.randn(5, 3)
    w = torch.zeros(3)
    assert psgrad.gram(fn, w, x, chunk_size=chunk_size).is_contiguous()
    assert psgrad.gram(fn, w, x, x[:2], chunk_size=chunk_size).is_contiguous()


@pytest.mark.parametrize(
    ("layout", "tiled"),
    [
        (lambda t: t, False),
        (lambda t: t.mT.contiguous().mT, True),
        (lambda t: t[:, :1, :1].expand(t.shape), True),
        (lambda t: t.half(), True),
    ],
    ids=["in order", "transposed", "expanded", "half"],
)
def test_products_of_gradients_copy_no_more_than_a_tile(
    layout: Any, tiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that a product would lay out or widen whole are cut into tiles first."""
    seen, by_tiles = [], _pairs._by_tiles
    monkeypatch.setattr(_pairs, "_by_tiles", lambda a, b: seen.append(1) or by_tiles(a, b))
    a, b = layout(torch.randn(4, 6, 5)), layout(torch.randn(3, 6, 5))
    found = _pairs.dots(Dense(a), Dense(b))
    assert bool(seen) == tiled
    assert_close(found.double(), a.double().flatten(1) @ b.double().flatten(1).mT, rtol=1e-5, atol=1e-5)


def test_the_noise_scale() -> None:
    """On gradients with a known mean and covariance, the estimates average to them."""
    fn = lambda w, x: (w * x).sum()
    mean, spread = (
        torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64),
        torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64),
    )
    w, found = torch.zeros(3, dtype=torch.float64), []
    for _ in range(400):
        x = mean + spread * torch.randn(4, 3, dtype=torch.float64)
        stats = psgrad.grad_stats(fn, w, x)
        assert_close(stats.noise_scale, stats.trace / stats.sq_mean)
        found.append(torch.stack([stats.trace, stats.sq_mean]))
    trace, sq_mean = torch.stack(found).mean(0)
    assert abs(trace - 5.25) < 0.3
    assert abs(sq_mean - 5.25) < 0.5


def test_statistics_of_too_few_samples() -> None:
    one = psgrad.grad_stats(linear_loss, torch.ones(3, 4), torch.ones(1, 4))
    assert one.variance.isnan().all()
    assert one.trace.isnan()
    assert one.mean.isfinite().all()
    none = psgrad.grad_stats(linear_loss, torch.ones(3, 4), torch.ones(0, 4))
    assert none.mean.isnan().all()
    assert none.sq_norms.shape == none.values.shape == (0,)


# ---- the object ------------------------------------------------------------------------------------------


def test_nothing_of_no_samples() -> None:
    w, x = torch.ones(3, 4), torch.ones(0, 4)
    fg = psgrad.factored_grads(linear_loss, w, x)
    assert len(fg) == 0
    assert fg.norms().shape == fg.values.shape == (0,)
    assert fg.dots().shape == (0, 0)
    assert fg.dense().shape == (0, 3, 4)
    assert_close(fg.sum(), torch.zeros(3, 4))
    assert psgrad.per_sample_norms(linear_loss, w, x).shape == (0,)
    assert psgrad.gram(linear_loss, w, x, torch.ones(2, 4)).shape == (0, 2)
    step = psgrad.clipped_grad(linear_loss, w, x, 1.0)
    assert_close(tuple(step), (torch.zeros(3, 4), torch.zeros(0), torch.zeros(0), 0, 1.0))


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_values_and_aux_come_along(chunk_size: int | None) -> None:
    def fn(w: Tensor, x: Tensor) -> Any:
        return (w * x).sum(), {"x": x, "sum": x.sum()}

    x = torch.randn(5, 3)
    fg = psgrad.factored_grads(fn, torch.ones(3), x, has_aux=True, chunk_size=chunk_size)
    assert_close(fg.values, x.sum(1))
    assert_close(fg.aux, {"x": x, "sum": x.sum(1)})
    assert_close(fg[1:3].aux["x"], x[1:3])
    assert_close(fg[1:3].values, x[1:3].sum(1))


@pytest.mark.parametrize("index", [2, -1, slice(1, 4), slice(None, None, 2), [0, 3], torch.tensor([4, 4, 0]), ...])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_indexing_by_sample(index: Any, chunk_size: int | None) -> None:
    fn, params, batch = layers()
    fg = psgrad.factored_grads(fn, params, batch, chunk_size=chunk_size)
    rows = torch.arange(6)[index].reshape(-1)
    assert_close(fg[index].dense(), optree.tree_map(lambda t: t[rows], fg.dense()))
    mask = torch.zeros(6, dtype=torch.bool)
    mask[rows] = True
    assert_close(fg[mask].norms(), fg.norms()[mask])
    assert_close(fg[mask][0].norms(), fg.norms()[mask][:1])


def test_a_pytree_node() -> None:
    fn, params, batch = tied_gpt()
    fg = psgrad.factored_grads(fn, params, batch)
    leaves, spec = optree.tree_flatten(fg)
    assert all(isinstance(t, Tensor) for t in leaves)
    assert spec == optree.tree_structure(psgrad.factored_grads(fn, params, batch))
    single = optree.tree_map(lambda t: t.float() if t.is_floating_point() else t, {"it": fg})["it"]
    assert isinstance(single, psgrad.FactoredGrads)
    assert_close(single.norms(), fg.norms(), rtol=1e-5, atol=1e-5)
    assert_close(fg.to("cpu").norms(), fg.norms())


def test_it_is_immutable_and_keeps_no_graph() -> None:
    fn, params, (x, y) = tied_gpt()
    fg = psgrad.factored_grads(fn, params, (x, y))
    with pytest.raises(AttributeError):
        fg.values = None  # type: ignore[misc]
    norms = fg.norms()
    x.zero_()
    y.zero_()
    assert_close(fg.norms(), norms)
    assert not any(t.requires_grad for t in optree.tree_leaves(fg))


def test_a_weight_norm_is_pulled_back_when_asked() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)).double()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    batch = torch.randn(4, 6, dtype=torch.float64), torch.randint(5, (4,))
    check_all(fn, params, batch)
    fg = psgrad.factored_grads(fn, params, batch)
    want = fg.dense()
    with torch.inference_mode():
        assert_close(fg.dense(), want)
        assert_close(fg.norms(), flat(want).norm(dim=1))
    assert_close(fg.to("cpu").dense(), want)


# ---- precision -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("workspace")
def test_half_precision_sums_in_single(dtype: torch.dtype) -> None:
    """The square of 300 is infinite in float16."""
    fn = lambda w, x: (w * x).sum()
    x = torch.full((3, 1000), 300.0, dtype=dtype)
    w = torch.zeros(1000, dtype=dtype)
    norms = psgrad.per_sample_norms(fn, w, x)
    assert norms.dtype == torch.float32
    assert_close(norms, torch.full((3,), 300 * 1000**0.5), rtol=1e-3, atol=0)
    assert psgrad.gram(fn, w, x).dtype == torch.float32
    assert_close(psgrad.gram(fn, w, x), norms[:, None] * norms, rtol=1e-3, atol=0)
    step = psgrad.clipped_grad(fn, w, x, 1.0)
    assert step.grad.dtype == dtype
    assert_close(step.grad.float(), torch.full((1000,), 3 / 1000**0.5), rtol=1e-2, atol=0)


def test_under_autocast_as_the_loop() -> None:
    fn, params = psgrad.from_module(TiedGPT(), tokens_loss)
    batch = torch.randint(50, (5, 12)), torch.randint(50, (5, 12))
    with torch.autocast("cpu", torch.bfloat16):
        rows = flat(psgrad.testing.loop_grads(fn, params, batch))
        assert_close(psgrad.per_sample_norms(fn, params, batch), rows.norm(dim=1), rtol=2e-2, atol=0)
        step = psgrad.clipped_grad(fn, params, batch, 1e9)
    assert all(t.dtype == torch.float32 for t in step.grad.values())
    assert_close(flat(optree.tree_map(lambda t: t[None], step.grad))[0], rows.sum(0), rtol=0, atol=0.03)


# ---- differentiable norms --------------------------------------------------------------------------------


def penalty(norms: Tensor) -> Tensor:
    return (norms - 1).square().sum()


def norms_by_hand(fn: Any, params: Any, batch: Any) -> Tensor:
    grads = vmap(grad(fn), in_dims=(None, 0))(params, batch)
    return flat(grads).norm(dim=1)


def test_norms_can_be_differentiated() -> None:
    fn, params, batch = layers()
    ask = partial(psgrad.per_sample_norms, fn, differentiable=True)
    want = torch.func.grad(lambda p, b: penalty(norms_by_hand(fn, p, b)), argnums=(0, 1))(params, batch)
    for options in ({}, {"chunk_size": 4}):
        norms = partial(ask, **options)
        found = torch.func.grad(lambda p, b, norms=norms: penalty(norms(p, b)), argnums=(0, 1))(params, batch)
        assert_close(found, want)
    leaves = optree.tree_map(lambda t: t.clone().requires_grad_(), (params, batch))
    norms = ask(*leaves)
    assert_close(norms.detach(), norms_by_hand(fn, params, batch))
    penalty(norms).backward()
    assert_close(optree.tree_map(lambda t: t.grad, leaves), want)
    assert not psgrad.per_sample_norms(fn, *leaves).requires_grad
    each = ask(*leaves, per_param=True)
    assert_close(each["last"]["w"].detach(), psgrad.per_sample_norms(fn, params, batch, per_param=True)["last"]["w"])


def test_differentiable_norms_at_zero_and_where_vmap_refuses() -> None:
    w = torch.zeros(3, requires_grad=True)
    psgrad.per_sample_norms(
        lambda w, x: (w * x).square().sum(), w, torch.ones(2, 3), differentiable=True
    ).sum().backward()
    assert_close(w.grad, torch.zeros(3))

    def branches(w: Tensor, x: Tensor) -> Tensor:
        return (w * x).square().sum() if x.sum() > 0 else (w * x).exp().sum()

    x = torch.tensor([[1.0, 2.0, 3.0], [-1.0, -2.0, 0.5]], dtype=torch.float64)
    w = torch.tensor([0.5, -0.3, 0.2], dtype=torch.float64, requires_grad=True)
    with pytest.warns(psgrad.FallbackWarning):
        norms = psgrad.per_sample_norms(branches, w, x, differentiable=True)
    found = torch.autograd.grad(penalty(norms), w)[0]
    rows = [torch.autograd.grad(branches(w, s), w, create_graph=True)[0] for s in x]
    assert_close(found, torch.autograd.grad(penalty(torch.stack(rows).norm(dim=1)), w)[0])


def test_a_use_that_nobody_announces_is_not_missed() -> None:
    """A rule's use of a weight, and one inside another transform: the norm is taken again, of both."""
    fn = lambda w, x: F.linear(x, w).sum() + vmap(lambda r: (r * x).square().sum())(w).sum()
    check_all(fn, torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64))
    fn, params = psgrad.from_module(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), lambda y, _: y.sum())
    weight = {**params}

    def both(p: Any, x: Tensor) -> Tensor:
        return fn(p, (x, x)) + _Doubled.apply(p["0.weight"]).sum()

    check_all(both, {k: v.double() for k, v in weight.items()}, torch.randn(3, 4, dtype=torch.float64))


class _Doubled(torch.autograd.Function):
    """A Function that the watching mode does not see."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor) -> Tensor:
        return 2 * w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


# ---- errors ----------------------------------------------------------------------------------------------


ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "weights-infinite": (
        lambda w, x: psgrad.weighted_grad(linear_loss, w, x, torch.tensor([1.0, torch.inf, 1.0, 1.0, torch.nan])),
        psgrad.ArgumentError,
        "weights are not finite for samples 1, 4\n  give 0 to leave a sample out.",
    ),
    "weights-complex": (
        lambda w, x: psgrad.weighted_grad(linear_loss, w, x, torch.ones(5, dtype=torch.complex64)),
        psgrad.ArgumentTypeError,
        "weights are complex numbers\n  give real ones.",
    ),
    "not-attached": (
        lambda w, x: psgrad.per_sample_norms(linear_loss, w, x, differentiable=True),
        psgrad.ArgumentError,
        "differentiable=True, but no leaf of params or batch requires grad\n  call requires_grad_() on some first.",
    ),
    "generator": (
        lambda w, x: psgrad.per_sample_norms(linear_loss, nn.Linear(2, 2).parameters(), x),
        psgrad.ArgumentTypeError,
        "params is a generator, not a tensor\n  give dict(model.named_parameters()), or what from_module returns.",
    ),
    "list-for-module": (
        lambda w, x: psgrad.per_sample_norms(
            psgrad.from_module(nn.Linear(4, 2), F.mse_loss)[0], [torch.ones(2, 4), torch.ones(2)], (x, x[:, :2])
        ),
        psgrad.ArgumentTypeError,
        "params is a list, not a dict from parameter name to tensor\n  give what from_module returned, or some of it.",
    ),
    "names-for-module": (
        lambda w, x: psgrad.per_sample_norms(
            psgrad.from_module(nn.Linear(4, 2), F.mse_loss)[0], {"model.weight": torch.ones(2, 4)}, (x, x[:, :2])
        ),
        psgrad.ArgumentError,
        "params has 'model.weight', which the model has not\n  give what from_module returned, or some of it.",
    ),
    "loss-class": (
        lambda w, x: psgrad.from_module(nn.Linear(4, 2), nn.MSELoss),  # type: ignore[arg-type]
        psgrad.ArgumentTypeError,
        "loss is the class MSELoss\n  give an instance: MSELoss().",
    ),
    "weights-shape": (
        lambda w, x: psgrad.weighted_grad(linear_loss, w, x, torch.ones(3)),
        psgrad.ArgumentError,
        "weights has shape (3,), not (5,)\n  give one number per sample.",
    ),
    "weights-type": (
        lambda w, x: psgrad.weighted_grad(linear_loss, w, x, 1.0),
        psgrad.ArgumentTypeError,
        "weights is a float, not a tensor\n  give one number per sample, or a function of the norms.",
    ),
    "max-norm-negative": (
        lambda w, x: psgrad.clipped_grad(linear_loss, w, x, -1.0),
        psgrad.ArgumentError,
        "max_norm=-1.0 is not positive\n  give a positive number; inf clips nothing.",
    ),
    "max-norm-nan": (
        lambda w, x: psgrad.clipped_grad(linear_loss, w, x, torch.nan),
        psgrad.ArgumentError,
        "max_norm=nan is not positive\n  give a positive number; inf clips nothing.",
    ),
    "max-norm-type": (
        lambda w, x: psgrad.clipped_grad(linear_loss, w, x, "1"),
        psgrad.ArgumentTypeError,
        "max_norm is a str, not a number\n  give a positive number.",
    ),
    "nonfinite": (
        lambda w, x: psgrad.clipped_grad(linear_loss, w, x, 1.0, nonfinite="drop"),
        psgrad.ArgumentError,
        'nonfinite=\'drop\' is not one of "raise", "zero", "propagate"\n'
        "  raise: an error that names the samples; zero: they do not count; propagate: the sum is NaN.",
    ),
    "valid-shape": (
        lambda w, x: psgrad.per_sample_norms(linear_loss, w, x, valid=torch.ones(4, dtype=torch.bool)),
        psgrad.ArgumentError,
        "valid is torch.bool, (4,), not a tensor of booleans of shape (5,)\n"
        "  give one per sample, True where it counts.",
    ),
    "valid-dtype": (
        lambda w, x: psgrad.gram(linear_loss, w, x, valid=torch.ones(5)),
        psgrad.ArgumentError,
        "valid is torch.float32, (5,), not a tensor of booleans of shape (5,)\n"
        "  give one per sample, True where it counts.",
    ),
    "other-params": (
        lambda w, x: psgrad.factored_grads(linear_loss, w, x).dots(psgrad.factored_grads(linear_loss, w[:2], x)),
        psgrad.ArgumentError,
        "other holds the gradients of other parameters\n  give the same params to both.",
    ),
    "other-shape": (
        lambda w, x: psgrad.factored_grads(linear_loss, w, x).dots(x),
        psgrad.ArgumentError,
        "other has shape (5, 4), neither (3, 4) nor (K, 3, 4)\n"
        "  give one direction, or K of them along a leading axis.",
    ),
    "other-type": (
        lambda w, x: psgrad.factored_grads(linear_loss, w, x).dots("w"),
        psgrad.ArgumentTypeError,
        "other is a str, not a tensor\n  give a tensor of shape (3, 4).",
    ),
    "mask": (
        lambda w, x: psgrad.factored_grads(linear_loss, w, x)[torch.ones(3, dtype=torch.bool)],
        psgrad.ArgumentError,
        "a mask of shape (3,) does not fit 5 samples\n  give one entry per sample.",
    ),
    "index": (
        lambda w, x: psgrad.factored_grads(linear_loss, w, x)[7],
        psgrad.ArgumentError,
        "7 does not index 5 samples: index 7 is out of bounds for dimension 0 with size 5\n"
        "  give an int, a slice, a tensor of indices or a mask.",
    ),
    "transform": (
        lambda w, x: torch.func.grad(lambda w: psgrad.factored_grads(linear_loss, w, x).norms().sum())(w),
        psgrad.ArgumentError,
        "factored_grads is called inside a torch.func transform\n"
        "  compute it from per_sample_grads there, which can be differentiated and vmapped.",
    ),
    "both-bounds": (
        lambda w, x: psgrad.clipped_grad(linear_loss, w, x, 1.0, chunk_size=2, max_bytes=1 << 20),
        psgrad.ArgumentError,
        "chunk_size and max_bytes are both given\n  give one: max_bytes works out a chunk size.",
    ),
    "chunks": (
        lambda w, x: psgrad.clipped_grad(linear_loss, w, x, 1.0, chunk_size=0),
        psgrad.ArgumentError,
        "chunk_size=0 is not a positive int\n  give one, or None for no bound.",
    ),
}


def _differentiable(**options: Any) -> Any:
    return lambda w, x: psgrad.per_sample_norms(
        linear_loss, w.clone().requires_grad_(), x, differentiable=True, **options
    )


ERRORS |= {
    "differentiable-chunks": (
        _differentiable(chunk_size=-1),
        psgrad.ArgumentError,
        "chunk_size=-1 is not a positive int\n  give one, or None for no bound.",
    ),
    "differentiable-bytes": (
        _differentiable(max_bytes=0),
        psgrad.ArgumentError,
        "max_bytes=0 is not a positive int\n  give one, or None for no bound.",
    ),
    "differentiable-both": (
        _differentiable(chunk_size=2, max_bytes=1 << 20),
        psgrad.ArgumentError,
        "chunk_size and max_bytes are both given\n  give one: max_bytes works out a chunk size.",
    ),
    "transform-chunks": (
        lambda w, x: torch.func.grad(lambda w: psgrad.per_sample_norms(linear_loss, w, x, chunk_size=True).sum())(w),
        psgrad.ArgumentError,
        "chunk_size=True is not a positive int\n  give one, or None for no bound.",
    ),
    "tuple": (
        lambda w, x: psgrad.clipped_grad(lambda w, x: (linear_loss(w, x), x), w, x, 1.0),
        psgrad.ArgumentTypeError,
        "fn must return the loss of one sample as a tensor, but returned a tuple "
        "(with has_aux=True it may return (loss, aux))\n  return a tensor with one element.",
    ),
    "no-tuple": (
        lambda w, x: psgrad.grad_stats(linear_loss, w, x, has_aux=True),
        psgrad.ArgumentTypeError,
        "fn must return (loss, aux) with has_aux=True, but returned a Tensor\n"
        "  return the two as a tuple, or drop has_aux.",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    call, kind, message = ERRORS[name]
    with pytest.raises(kind) as error:
        call(torch.ones(3, 4), torch.ones(5, 4))
    assert str(error.value) == message


def test_a_bound_that_does_not_fit_params() -> None:
    fn, params, batch = layers()
    with pytest.raises(psgrad.ArgumentError) as error:
        psgrad.clipped_grad(fn, params, batch, {"first": 1.0, "middle": 1.0})
    assert str(error.value) == (
        "max_norm does not fit params\n"
        "  max_norm: PyTreeSpec({'first': *, 'middle': *})\n"
        "  params: PyTreeSpec({'first': {'b': *, 'w': *}, 'last': {'w': *}})\n"
        "  give one number, or a pytree prefix of params; where these have names, a dict from names."
    )
    with pytest.raises(psgrad.ArgumentError, match=r"^max_norm\['last'\]=0.0 is not positive"):
        psgrad.clipped_grad(fn, params, batch, {"first": 1.0, "last": 0.0})


# ---- memory, in a process of its own ---------------------------------------------------------------------

_LARGE = """
import ctypes, sys
from pathlib import Path
import torch, psgrad
from torch import nn

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) / 1024 for x in lines if x.startswith(field + ":"))

class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(1_000_000, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.table(x).mean(1))

if sys.argv[1] == "mlp":
    widths = (2048, 3072, 2560, 512, 10)
    model = nn.Sequential(*(m for a, b in zip(widths, widths[1:]) for m in (nn.Linear(a, b), nn.ReLU())))
    batch = torch.randn(512, 2048), torch.randint(10, (512,))
else:
    model, batch = Table(), (torch.randint(1_000_000, (4096, 20)), torch.randint(2, (4096,)))
fn, params = psgrad.from_module(model, nn.functional.cross_entropy)
psgrad.clipped_grad(fn, params, tuple(t[:2] for t in batch), 1.0)  # loads what is loaded late
ctypes.CDLL(None).malloc_trim(0)
Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
before = status("VmRSS")
norms = psgrad.per_sample_norms(fn, params, batch)
step = psgrad.clipped_grad(fn, params, batch, 1.0)
assert torch.allclose(step.norms, norms, rtol=1e-4)
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux says how much memory a process takes")
@pytest.mark.parametrize(("model", "bound"), [("mlp", 300), ("table", 300)])
def test_large_models_take_little_memory(model: str, bound: float) -> None:
    """Gradients of 32 GB and of 262 GB: norms and a clipped sum in a few hundred MB, beyond model and data."""
    done = subprocess.run([sys.executable, "-c", _LARGE, model], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < bound


# ---- where sums, views and branches meet -----------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 1, 2])
def test_two_parameters_that_are_added_first(chunk_size: int | None) -> None:
    """Autograd hands one tensor to both; the sums over chunks must not add to it twice."""
    fn = lambda p, x: F.linear(x, p["a"] + p["b"]).tanh().sum()
    params = {k: torch.randn(3, 4, dtype=torch.float64) for k in "ab"}
    x, w = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    want = summed(psgrad.testing.loop_grads(fn, params, x), w)
    found = psgrad.weighted_grad(fn, params, x, w, chunk_size=chunk_size)
    assert_close(found, want)
    assert found["a"].data_ptr() != found["b"].data_ptr()
    assert_close(psgrad.weighted_grad(fn, params, x, lambda _: w, chunk_size=chunk_size), want)


BRANCHES: dict[str, Any] = {
    "groups": lambda p, x: (
        F.conv1d(x.view(1, 6, -1), p.view(12, 2, 3), groups=3)
        if x[0] > 0
        else F.conv1d(x.view(1, 8, -1), p.view(12, 2, 3), groups=4)
    ),
    "views": lambda p, x: p.view(24, 3) @ x[:3] if x[0] > 0 else p.view(12, 6) @ x[:6],
    "table": lambda p, x: (
        F.embedding((x * 5).long() % 36, p.view(36, 2)) if x[0] > 0 else F.linear(x[:6], p.view(12, 6))
    ),
    "no rows": lambda p, x: (
        F.embedding((x[:0]).long(), p.view(36, 2)).sum() + 0 * x.sum()
        if x[0] > 0
        else F.embedding((x * 5).long() % 36, p.view(36, 2))
    ),
}


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.usefixtures("workspace")
def test_gram_between_branches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that use a parameter in other ways."""
    monkeypatch.setattr(_plan, "keeps_dense", lambda *_: False)
    fn = lambda p, x: BRANCHES[name](p, x).square().sum()
    p, x = torch.randn(72, dtype=torch.float64), torch.rand(6, 24, dtype=torch.float64) - torch.tensor([[0.5]])
    x[:3, 0], x[3:, 0] = 0.5, -0.5
    rows = flat(psgrad.testing.loop_grads(fn, p, x))
    assert_close(psgrad.gram(fn, p, x), rows @ rows.mT)
    assert_close(psgrad.per_sample_norms(fn, p, x), rows.norm(dim=1))


@pytest.mark.parametrize("close", [1e-2, 1e-4])
def test_norms_of_positions_that_cancel(close: float) -> None:
    """Tokens alike, cotangents that sum to nothing: float32 norms keep their digits."""
    fn = lambda p, s: (F.linear(s[0], p["w"]) * s[1]).sum()
    x = torch.randn(4, 1, 512) + close * torch.randn(4, 16, 512)
    g = torch.randn(4, 16, 512)
    batch = x, g - g.mean(1, keepdim=True)
    params = {"w": torch.zeros(512, 512)}
    exact = (batch[1].double().mT @ batch[0].double()).flatten(1).norm(dim=1)
    assert_close(psgrad.per_sample_norms(fn, params, batch).double(), exact, rtol=1e-3, atol=0)

    def tied(p: Any, s: Any) -> Tensor:
        return (F.embedding(s[0], p["w"]) * s[1]).sum() - (F.linear(s[1], p["w"]) * s[2]).sum() * (1 - close)

    index = torch.arange(5).expand(3, 5)
    batch3 = index, torch.randn(3, 5, 30), F.one_hot(index, 20).float()
    params = {"w": torch.zeros(20, 30)}
    exact = flat(
        psgrad.testing.loop_grads(tied, {"w": params["w"].double()}, (index, batch3[1].double(), batch3[2].double()))
    )
    assert_close(psgrad.per_sample_norms(tied, params, batch3).double(), exact.norm(dim=1), rtol=1e-2, atol=0)


def test_variances_of_rows_that_hardly_vary() -> None:
    fn = lambda p, x: (F.embedding(torch.arange(6), p) * x).sum()
    x = 1 + 1e-3 * torch.randn(50, 6, 32)
    stats = psgrad.grad_stats(fn, torch.zeros(1000, 32), x)
    assert_close(stats.variance[:6], x.var(0), rtol=1e-3, atol=0)
    assert_close(stats.variance[6:], torch.zeros(994, 32))


def test_weights_that_half_losses_cannot_hold() -> None:
    fn = lambda w, x: (w * x).sum()
    w, x = torch.zeros(4, dtype=torch.float16), torch.full((3, 4), 1e-4, dtype=torch.float16)
    found = psgrad.weighted_grad(fn, w, x, torch.full((3,), 1e6))
    assert_close(found, torch.full((4,), 300.0, dtype=torch.float16), rtol=1e-2, atol=0)


def test_what_fn_closes_over_may_change_later() -> None:
    index = torch.tensor([0, 2, 2])
    fg = psgrad.factored_grads(lambda p, x: (F.embedding(index, p) * x).sum(), torch.ones(4, 50), torch.randn(5, 3, 50))
    before = fg.dense()
    index.add_(1)
    assert_close(fg.dense(), before)


def test_channels_last_slices() -> None:
    fn = lambda p, x: (F.conv2d(x[None], p[:64]) + F.conv2d(x[None], p[64:])).square().sum()
    x = torch.randn(2, 32, 5, 5).to(memory_format=torch.channels_last)
    p = torch.randn(128, 32, 3, 3)
    grads = psgrad.per_sample_grads(fn, p, x)
    assert_close(psgrad.clipped_grad(fn, p, x, 1e9).grad, grads.sum(0), rtol=1e-3, atol=1e-2)
    assert psgrad.grad_stats(fn, p, x).variance.shape == p.shape


@pytest.mark.parametrize("guard", [torch.inference_mode, torch.no_grad])
def test_whatever_the_caller_switched_off(guard: Any) -> None:
    fn, params, batch = layers()
    want = psgrad.grad_stats(fn, params, batch)
    with guard():
        assert_close(tuple(psgrad.grad_stats(fn, params, batch)), tuple(want))
        assert_close(psgrad.gram(fn, params, batch), psgrad.factored_grads(fn, params, batch).dots())
        assert_close(psgrad.clipped_grad(fn, params, batch, 1.0).norms, want.sq_norms.sqrt())


def test_no_call_leaves_a_cycle() -> None:
    """A result that only the collector could free would fill the memory of a loop."""
    fn = lambda p, x: (x @ p["w"].t()).square().sum()
    params, x = {"w": torch.randn(3, 4)}, torch.randn(5, 4)
    gc.collect()
    gc.disable()
    try:
        kept = [weakref.ref(psgrad.per_sample_grads(fn, params, x)["w"]) for _ in range(3)]
        assert [ref() for ref in kept] == [None] * 3
    finally:
        gc.enable()


def test_a_checkpoint_keeps_no_factor_for_norms() -> None:
    fn, params, batch = layers()

    def checkpointed(p: Any, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(fn, p, x, use_reentrant=False)

    check_all(checkpointed, params, batch)
    assert_close(
        psgrad.clipped_grad(checkpointed, params, batch, 1.0).grad, psgrad.clipped_grad(fn, params, batch, 1.0).grad
    )
