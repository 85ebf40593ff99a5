"""Quantities inside torch.func: sums, clipped sums, inner products, norms and moments in somebody else's transforms.

The reference is the literal formula on rows from a loop over samples, under transforms that loop, too.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import psgrad
from psgrad import composable as _composable
from psgrad.factors import costs
from psgrad.quantities import nested

from .cases import Case, default_dtype, loss
from .test_borders import CLAMPS
from .test_composable import (
    MODULES,
    REFERENCE,
    TORCH,
    TWICE,
    Elementary,
    N,
    Setting,
    Tools,
    _ensemble,
    _two,
    assert_close,
    draw,
    looped,
    setting,
)
from .test_quantities import Watch

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
]

Rows = Callable[[Any, Any], Any]  # (params, batch) -> per-sample gradients


def weights(n: int = N) -> Tensor:
    return torch.linspace(-1.1, 2, n, dtype=torch.float64)


# ---- the literal formulas ------------------------------------------------------------------------------------


def flat(rows: Any) -> Tensor:
    """Gradients as (N, P)."""
    return torch.cat([g.reshape(len(g), -1) for g in optree.tree_leaves(rows)], 1)


def summed(rows: Any, w: Tensor) -> Any:
    return optree.tree_map(lambda g: torch.tensordot(w, g, 1), rows)


def norms_of(rows: Any) -> Tensor:
    return flat(rows).square().sum(1).sqrt()


def clip(rows: Any, bound: Any) -> Any:
    return summed(rows, torch.clamp(bound / norms_of(rows), max=1))


def clip_each(rows: dict[str, Tensor], bound: float) -> Any:
    return {name: clip(g, bound) for name, g in rows.items()}


def stats(rows: Any) -> Any:
    g = flat(rows)
    mean, var = optree.tree_map(lambda g: g.mean(0), rows), optree.tree_map(lambda g: g.var(0), rows)
    trace = g.var(0).sum()
    square = g.mean(0).square().sum() - trace / len(g)
    return mean, var, g.square().sum(1), trace, square, trace / square


class Question(NamedTuple):
    ours: Callable[[Any, Any, Any], Any]  # (fn, params, batch)
    formula: Callable[[Any], Any]  # of the rows


def _stats(fn: Any, p: Any, x: Any) -> Any:
    found = psgrad.grad_stats(fn, p, x)
    return *found[:3], *found[4:]


BOUND = 0.7  # a part of the samples is clipped, as `test_some_are_clipped_and_some_are_not` says
QUESTIONS = {
    "norms": Question(psgrad.per_sample_norms, norms_of),
    "norms of each": Question(
        lambda fn, p, x: psgrad.per_sample_norms(fn, p, x, per_param=True),
        lambda rows: optree.tree_map(lambda g: norms_of([g]), rows),
    ),
    "weighted": Question(
        lambda fn, p, x: psgrad.weighted_grad(fn, p, x, weights(optree.tree_leaves(x)[0].shape[0])),
        lambda rows: summed(rows, weights(len(optree.tree_leaves(rows)[0]))),
    ),
    "weighted by norms": Question(
        lambda fn, p, x: psgrad.weighted_grad(fn, p, x, lambda norms: 1 / (1 + norms)),
        lambda rows: summed(rows, 1 / (1 + norms_of(rows))),
    ),
    "weighted by norms, in chunks": Question(
        lambda fn, p, x: psgrad.weighted_grad(fn, p, x, lambda norms: 1 / (1 + norms.sum()) + norms, chunk_size=2),
        lambda rows: summed(rows, 1 / (1 + norms_of(rows).sum()) + norms_of(rows)),
    ),
    "clipped": Question(
        lambda fn, p, x: psgrad.clipped_grad(fn, p, x, BOUND, nonfinite="zero")[:2],
        lambda rows: (clip(rows, BOUND), norms_of(rows)),
    ),
    "clipped, in chunks": Question(
        lambda fn, p, x: psgrad.clipped_grad(fn, p, x, BOUND, nonfinite="propagate", chunk_size=2).grad,
        lambda rows: clip(rows, BOUND),
    ),
    "clipped, a bound for each": Question(
        lambda fn, p, x: psgrad.clipped_grad(fn, p, x, optree.tree_map(lambda _: BOUND, p), nonfinite="propagate").grad,
        lambda rows: clip_each(rows, BOUND),
    ),
    "gram": Question(psgrad.gram, lambda rows: flat(rows) @ flat(rows).T),
    "stats": Question(_stats, stats),
}


# ---- under every transform -----------------------------------------------------------------------------------


def scalar(tree: Any) -> Tensor:
    """A number in which every element counts differently."""
    leaves = optree.tree_leaves(tree)
    return sum(((1 + k) * t * torch.linspace(1, 2, t.numel()).view(t.shape)).sum() for k, t in enumerate(leaves))


def _pulled(f: Callable[[Any], Tensor], p: Any) -> Any:
    """The gradient of f, by a pullback that runs when its transform has ended."""
    return vjp(f, p)[1](torch.tensor(1.0))


Quantity = Callable[[Any, Any], Any]  # (params, batch)
INSIDE: dict[str, Callable[[Setting, Quantity, Tools], Any]] = {
    "grad": lambda s, q, t: grad(lambda p: scalar(q(p, s.x)))(s.p),
    "grad of the batch": lambda s, q, t: grad(lambda x: scalar(q(s.p, x)))(s.x),
    "vmap": lambda s, q, t: t.vmap(lambda x: q(s.p, x))(_two(s.x)),
    "vmap, an ensemble": lambda s, q, t: t.vmap(lambda p: q(p, s.x))(_ensemble(s.p)),
    "vmap, a batch for each model": lambda s, q, t: t.vmap(q)(_ensemble(s.p), _two(s.x)),
    "jacrev": lambda s, q, t: t.jacrev(lambda p: q(p, s.x))(s.p),
    "jacfwd": lambda s, q, t: t.jacfwd(lambda p: q(p, s.x))(s.p),
    "jvp": lambda s, q, t: jvp(lambda p: q(p, s.x), (s.p,), (s.p,)),
    "vjp": lambda s, q, t: grad(lambda p: scalar(_pulled(lambda p: scalar(q(p, s.x)), p)))(s.p),
    "grad(vmap), an ensemble": lambda s, q, t: grad(lambda e: scalar(t.vmap(lambda p: q(p, s.x))(e)))(_ensemble(s.p)),
    "grad(vmap)": lambda s, q, t: grad(lambda p: scalar(t.vmap(lambda x: q(p, x))(_two(s.x))))(s.p),
    "vmap(grad)": lambda s, q, t: t.vmap(grad(lambda p, x: scalar(q(p, x))), (None, 0))(s.p, _two(s.x)),
    "hessian": lambda s, q, t: t.hessian(lambda p: scalar(q(p, s.x)))(s.p),
}
SMALL = ["linear-vector", "conv1d-groups", "group-norm", "network"]
PAIRS = [(name, transform) for name in SMALL for transform in INSIDE if transform != "hessian" or name != "network"]


@pytest.fixture(autouse=True)
def float64() -> Any:
    with default_dtype(torch.float64):
        yield


def compare(s: Setting, transform: str, question: str) -> None:
    run, (ours, formula) = INSIDE[transform], QUESTIONS[question]
    found = run(s, lambda p, x: ours(s.f, p, x), TORCH)
    with Elementary():
        assert_close(found, run(s, lambda p, x: formula(looped(grad(s.f), (None, 0))(p, x)), REFERENCE))


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize(("name", "transform"), PAIRS)
def test_every_quantity_under_every_transform(name: str, transform: str, question: str) -> None:
    compare(setting(name), transform, question)


@pytest.mark.parametrize("question", ["weighted", "clipped", "gram"])
@pytest.mark.parametrize("transform", ["grad", "vmap, an ensemble", "grad(vmap)"])
@pytest.mark.parametrize("name", [name for name in MODULES if name not in SMALL])
def test_stock_modules(name: str, transform: str, question: str) -> None:
    compare(setting(name), transform, question)


def test_some_are_clipped_and_some_are_not() -> None:
    torch.manual_seed(0)
    over = [norms_of(vmap(grad(s.f), (None, 0))(s.p, s.x)) > BOUND for s in map(setting, SMALL)]
    assert any(t.all() for t in over)
    assert any(t.any() and not t.all() for t in over)


@pytest.mark.parametrize("case", TWICE, ids=lambda case: case.id)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")  # by F.mse_loss
def test_every_case_inside_grad(case: Case) -> None:
    """Values, and how they change along the parameters, the weights and the bound together."""
    fn, params, batch = case.make()
    n = len(optree.tree_leaves(batch)[0])
    w, bound = weights(n), norms_of(looped(grad(fn), (None, 0))(params, batch)).median().detach() * 1.001 + 1e-3

    def along(ask: Callable[[Any, Tensor, Tensor], Any]) -> Any:
        def f(t: Tensor) -> tuple[Tensor, Any]:
            found = ask(optree.tree_map(lambda p: p * t, params), w * t, bound * t**2)
            return scalar(found), found

        with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
            return grad(f, has_aux=True)(torch.ones((), dtype=torch.float64))

    def ours(p: Any, w: Tensor, bound: Tensor) -> Any:
        total = psgrad.weighted_grad(fn, p, batch, w)
        return total, psgrad.clipped_grad(fn, p, batch, bound).grad, psgrad.gram(fn, p, batch)

    def formula(p: Any, w: Tensor, bound: Tensor) -> Any:
        rows = looped(grad(fn), (None, 0))(p, batch)
        return summed(rows, w), safe_clip(rows, bound), flat(rows) @ flat(rows).T

    found = along(ours)
    with Elementary():
        assert_close(found, along(formula))


def safe_clip(rows: Any, bound: Tensor) -> Any:
    """`clip` of the samples with a gradient."""
    there = flat(rows).detach().any(1)
    if not there.any():
        return summed(rows, torch.ones(len(there)))
    return clip(optree.tree_map(lambda g: g[there], rows), bound)


# ---- real nets -----------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A net with a parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.temperature


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.table(x)), self.table.weight)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][-1])


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: Scaled(), lambda: draw(4, 3)),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
        lambda: draw(4, 1, 2, 4, 4),
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), lambda: draw(4, 3, 4)),
    "tied embedding": (lambda: Tied(), lambda: torch.randint(7, (4, 5))),
    "lstm": (lambda: Recurrent(), lambda: draw(4, 5, 2)),
}


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("name", NETS)
def test_a_meta_gradient_through_a_clipped_step(name: str, chunk_size: int | None) -> None:
    """The loss after a step, differentiated by params, weights of samples, the bound and the step size."""
    make, draw_x = NETS[name]
    torch.manual_seed(0)
    net, x = make(), draw_x()
    params = {k: p.detach() + 0.3 * draw(*p.shape) for k, p in net.named_parameters()}
    fn = lambda p, x: loss(functional_call(net, p, (x,)))
    bound = norms_of(looped(grad(fn), (None, 0))(params, x)).median() * 1.01

    def after(p: Any, w: Tensor, bound: Tensor, lr: Tensor, ours: bool) -> Tensor:
        if ours:
            step = psgrad.clipped_grad(fn, p, x, bound, chunk_size=chunk_size).grad
            more = psgrad.weighted_grad(fn, p, x, w, chunk_size=chunk_size)
        else:
            rows = looped(grad(fn), (None, 0))(p, x)
            step, more = clip(rows, bound), summed(rows, w)
        moved = {k: t - lr * (step[k] + more[k]) for k, t in p.items()}
        return sum(fn(moved, one) for one in x[:2])

    args = params, weights(4), bound, torch.tensor(0.1)
    with sdpa_kernel(SDPBackend.MATH):
        found = grad(after, (0, 1, 2, 3))(*args, True)
        with Elementary():
            assert_close(found, grad(after, (0, 1, 2, 3))(*args, False))


# ---- the rule ran --------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    rule: str
    samples: bool
    summed: bool
    n: int


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """Every run of a rule's backward inside a transform."""
    runs: list[Seen] = []
    forward = _composable._OpGrad.forward

    def spied(spec: Any, count: int, g: Tensor, x: Tensor, *rest: Any) -> Any:
        runs.append(Seen(spec.rule.name, spec.samples, spec.summed, len(x)))
        return forward(spec, count, g, x, *rest)

    monkeypatch.setattr(_composable._OpGrad, "forward", staticmethod(spied))
    return runs


def test_the_rules_run(seen: list[Seen]) -> None:
    s = setting("network")
    backward = ["layer_norm", "linear", "group_norm", "conv1d"]
    jvp(lambda w: psgrad.weighted_grad(s.f, s.p, s.x, w), (weights(),), (weights(),))
    assert seen == [Seen(rule, True, True, N) for rule in backward[::2]]  # summed by the rule, where torch is no match
    for question in ("norms", "clipped", "gram", "stats"):
        seen.clear()
        jvp(lambda t, question=question: QUESTIONS[question].ours(s.f, s.p, s.x * t), *[(torch.tensor(1.0),)] * 2)
        assert seen == [Seen(rule, True, False, N) for rule in backward]  # all samples at once, rows written out


@pytest.mark.parametrize("name", ["layer-norm", "embedding", "lstm"])
def test_sums_by_rules(name: str, seen: list[Seen]) -> None:
    s = setting(name)
    vmap(lambda t: psgrad.weighted_grad(s.f, s.p, s.x, weights()))(torch.zeros(1))
    assert {run[1:] for run in seen} == {(True, True, N)}


@pytest.mark.parametrize("name", SMALL)
def test_use_rules_sums_where_a_whole_batch_is_differentiated(name: str, seen: list[Seen]) -> None:
    s = setting(name)
    total = lambda p: vmap(s.f, (None, 0))(p, s.x).sum()
    with psgrad.use_rules():
        found = grad(total)(s.p)
    assert {run[1:] for run in seen} == {(True, True, N)}
    assert_close(found, grad(total)(s.p))


def test_the_rules_run_for_batches_of_a_vmap(seen: list[Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    s = setting("layer-norm-no-bias")
    wanted = REFERENCE.vmap(lambda x: summed(looped(grad(s.f), (None, 0))(s.p, x), weights()))(_two(s.x))
    assert_close(vmap(lambda x: psgrad.weighted_grad(s.f, s.p, x, weights()))(_two(s.x)), wanted)
    assert seen == [Seen("layer_norm", True, False, 2 * N)]  # the rows of both make a tile
    seen.clear()
    monkeypatch.setattr(costs, "TILE", 1)
    assert_close(vmap(lambda x: psgrad.weighted_grad(s.f, s.p, x, weights()))(_two(s.x)), wanted)
    assert seen == [Seen("layer_norm", True, True, N)] * 2


@pytest.mark.parametrize("name", SMALL)
def test_sums_of_calls_that_do_not_fit_a_tile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "TILE", 1)
    for transform in ("vmap", "grad(vmap)", "vmap(grad)", "jacrev"):
        compare(setting(name), transform, "weighted")


# ---- memory --------------------------------------------------------------------------------------------------

WIDE: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(64, 80), nn.Tanh(), nn.Linear(80, 64)), lambda n: draw(n, 64)),
    "conv": (lambda: nn.Sequential(nn.Conv1d(32, 32, 5), nn.GroupNorm(2, 32)), lambda n: draw(n, 1, 32, 6)),
    "bilinear": (lambda: Pair(), lambda n: draw(n, 16)),
    "embedding": (lambda: nn.Embedding(500, 8), lambda n: torch.randint(500, (n, 3))),
    "tied embedding": (lambda: Wide(), lambda n: torch.randint(100, (n, 3))),
    "matmul": (lambda: Bare(), lambda n: draw(n, 64)),
}


class Wide(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 64)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(16, 16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


class Bare(nn.Module):
    """A parameter that no rule sees."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(draw(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


@pytest.mark.parametrize("name", WIDE)
def test_a_weighted_sum_inside_grad_holds_nothing_of_n_times_p(name: str) -> None:
    make, draw_x = WIDE[name]
    n, net = 16, make()
    params, x = {k: p.detach() for k, p in net.named_parameters()}, draw_x(n)
    fn = lambda p, x: loss(functional_call(net, p, (x,)))
    with Watch() as watch:
        grad(lambda p: scalar(psgrad.weighted_grad(fn, p, x, weights(n))))(params)
    largest = max(p.numel() for p in params.values())
    assert largest <= watch.most < n * largest / 4
    with Watch() as watch:  # the watch sees through transforms
        grad(lambda p: scalar(psgrad.clipped_grad(fn, p, x, 1.0).grad))(params)
    assert watch.most >= n * largest


@pytest.mark.parametrize("name", NETS)
def test_sums_of_real_nets_write_no_gradients_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, draw_x = NETS[name]
    net, x = make(), draw_x()
    params = {k: p.detach() for k, p in net.named_parameters()}
    fn = lambda p, x: loss(functional_call(net, p, (x,)))
    monkeypatch.setattr(nested, "composed", None)
    with sdpa_kernel(SDPBackend.MATH):
        grad(lambda p: scalar(psgrad.weighted_grad(fn, p, x, weights(4), chunk_size=3)))(params)


def test_chunks_of_a_clipped_sum_inside_vmap() -> None:
    """Without a graph, gradients are written out for a chunk at a time."""
    make, draw_x = WIDE["linear"]
    net, x = make(), draw_x(16)
    params = {k: p.detach() for k, p in net.named_parameters()}
    fn = lambda p, x: loss(functional_call(net, p, (x,)))
    largest = max(p.numel() for p in params.values())
    most = []
    for chunk_size in (None, 4):
        ask = lambda c, k=chunk_size: psgrad.clipped_grad(fn, params, x, c, nonfinite="raise", chunk_size=k).grad
        with Watch() as watch:
            vmap(ask)(torch.tensor([1.0]))
        most.append(watch.most)
    assert most[0] >= 16 * largest
    assert most[1] <= 5 * largest


# ---- where derivatives need care -----------------------------------------------------------------------------


def square(w: Tensor, x: Tensor) -> Tensor:
    return (w * x).sum() ** 2 / 2


W, X = torch.tensor([1.0, -1.0], dtype=torch.float64), torch.tensor([[3.0, 1.0], [1.0, 1.0], [0.0, 0.5]]).double()


@pytest.mark.parametrize("order", [grad, lambda f: jacrev(grad(f)), lambda f: jacfwd(jacrev(f))])
def test_a_gradient_of_zero(order: Any) -> None:
    """Sample 1 has the gradient 0, where the norm has no derivative: it counts as 0, and the others as ever."""
    some = torch.tensor([0, 2])
    norms = lambda w, x: psgrad.per_sample_norms(square, w, x).sum()
    assert_close(
        order(lambda w: norms(w, X))(W), order(lambda w: norms_of([vmap(grad(square), (None, 0))(w, X[some])]).sum())(W)
    )
    clipped = lambda w, x: scalar(psgrad.clipped_grad(square, w, x, 1.0).grad)
    plain = lambda w, x: scalar(clip([vmap(grad(square), (None, 0))(w, x)], 1.0))
    # not clipped, the sample is in the sum, and has a derivative there
    wanted = order(lambda w: plain(w, X[some]))(W)
    wanted = wanted + order(lambda w: scalar(grad(square)(w, X[1])))(W)
    assert_close(order(lambda w: clipped(w, X))(W), wanted)


def test_a_parameter_without_a_gradient_beside_others() -> None:
    params = {"a": W, "b": torch.ones(2)}
    fn = lambda p, x: square(p["a"], x) + 0 * p["b"].sum()
    norms = lambda p: psgrad.per_sample_norms(fn, p, X[::2]).sum()
    found = jacrev(grad(norms))(params)
    assert_close(found["a"]["a"], jacrev(grad(lambda w: psgrad.per_sample_norms(square, w, X[::2]).sum()))(W))
    assert_close(found["b"], {"a": torch.zeros(2, 2), "b": torch.zeros(2, 2)})


def test_a_norm_that_is_the_bound_counts_as_not_clipped() -> None:
    x = torch.tensor([[3.0, 4.0]])
    fn = lambda w, x: (w * x).sum() + (w * x).square().sum()
    zero = torch.zeros(2)
    step = lambda w, c: psgrad.clipped_grad(fn, w, x, c).grad
    assert_close(psgrad.clipped_grad(fn, zero, x, 5.0).norms, torch.tensor([5.0]))
    assert_close(jacrev(step)(zero, torch.tensor(5.0)), torch.diag(2 * x[0] ** 2))
    assert_close(jacrev(step, 1)(zero, torch.tensor(5.0)), torch.zeros(2))
    assert_close(jacfwd(step, 1)(zero, torch.tensor(4.9)), x[0] / 5)


@pytest.mark.parametrize("size", [1e25, 1e-25])
def test_norms_beyond_the_range_of_squares(size: float) -> None:
    fn = lambda w, x: (w * x).sum()
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]]) * size
    w = torch.zeros(2, dtype=torch.float32)
    norms, slope = vjp(lambda x: psgrad.per_sample_norms(fn, w, x), x.float())
    assert_close(norms, torch.tensor([5 * size, 0], dtype=torch.float32))
    assert_close(slope(torch.ones(2, dtype=torch.float32))[0], torch.tensor([[0.6, 0.8], [0, 0]]).float())


# ---- samples that are not finite, or do not count ------------------------------------------------------------


def root(w: Tensor, x: Tensor) -> Tensor:
    """Where x is 0 the gradient is NaN, and so is every derivative."""
    return (w * x).square().sum().sqrt() + (w**2 * x).sum()


BAD = torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, -1.0], [0.5, 0.5]], dtype=torch.float64)
GOOD = torch.tensor([0, 2, 3])


def after_step(w: Tensor, x: Tensor, **options: Any) -> Tensor:
    return scalar(w - psgrad.clipped_grad(root, w, x, 1.0, **options).grad)


def test_nonfinite_raises_inside_grad() -> None:
    with pytest.raises(psgrad.ArgumentError) as error:
        grad(after_step)(W, BAD)
    assert str(error.value) == (
        "the gradients of sample 1 are not finite\n"
        '  leave them out with nonfinite="zero", or let them through with nonfinite="propagate".'
    )
    assert_close(grad(after_step)(W, BAD[GOOD]), grad(after_step)(W, BAD[GOOD], nonfinite="zero"))


def test_nonfinite_raise_is_refused_inside_vmap() -> None:
    with pytest.raises(psgrad.ArgumentError) as error:
        vmap(after_step, (0, None))(torch.stack([W, 2 * W]), BAD[GOOD])
    assert str(error.value) == (
        'nonfinite="raise" depends on numbers, which cannot be read inside vmap or another call of psgrad\n'
        '  say nonfinite="zero" to leave samples out whose gradients are not finite, or nonfinite="propagate".'
    )
    # a vmap over something else leaves the numbers as they are
    bounds = torch.tensor([0.5, 5.0])
    found = vmap(lambda c: psgrad.clipped_grad(root, W, BAD[GOOD], c).grad)(bounds)
    assert_close(found, torch.stack([psgrad.clipped_grad(root, W, BAD[GOOD], float(c)).grad for c in bounds]))


@pytest.mark.parametrize("chunk_size", [None, 1, 2, 3])
def test_nonfinite_zero_leaves_no_trace_in_derivatives(chunk_size: int | None) -> None:
    found = psgrad.clipped_grad(root, W, BAD, 1.0, nonfinite="zero")
    grad_of = lambda x, **options: grad(after_step)(W, x, nonfinite="zero", **options)
    assert_close(grad_of(BAD, chunk_size=chunk_size), grad_of(BAD[GOOD]))
    inside = []
    jvp(lambda w: inside.append(psgrad.clipped_grad(root, w, BAD, 1.0, nonfinite="zero")) or w, (W,), (W,))
    assert inside[0].count == found.count == 3


def test_nonfinite_inside_vmap() -> None:
    models = torch.stack([W, 2 * W])
    ask = lambda w, nonfinite: psgrad.clipped_grad(root, w, BAD, 1.0, nonfinite=nonfinite)
    found = vmap(lambda w: ask(w, "zero"))(models)
    for k, w in enumerate(models):
        alone = psgrad.clipped_grad(root, w, BAD, 1.0, nonfinite="zero")
        assert_close(found.grad[k], alone.grad)
        assert found.count[k] == alone.count == 3
        torch.testing.assert_close(found.norms[k], alone.norms, equal_nan=True)
    assert vmap(lambda w: ask(w, "propagate"))(models).grad.isnan().all()
    assert vmap(lambda w: ask(w, "propagate"))(models).count.tolist() == [4, 4]


VALID = {
    "norms": lambda w, x, **o: psgrad.per_sample_norms(root, w, x, **o),
    "weighted": lambda w, x, **o: psgrad.weighted_grad(root, w, x, torch.arange(1.0, 1 + len(x)), **o),
    "by norms": lambda w, x, **o: psgrad.weighted_grad(root, w, x, lambda norms: norms.square(), **o),
    "clipped": lambda w, x, **o: psgrad.clipped_grad(root, w, x, 1.0, nonfinite="zero", **o),
    "gram": lambda w, x, **o: psgrad.gram(root, w, x, **o),
    "gram, another": lambda w, x, **o: psgrad.gram(root, w, x, BAD[GOOD], **o),
    "stats": lambda w, x, **o: psgrad.grad_stats(root, w, x, **o),
}


def numbers(found: Any) -> list[Tensor]:
    """Every tensor and every number of a result."""
    return [torch.as_tensor(t).double() for t in optree.tree_leaves(found)]


@pytest.mark.parametrize("name", VALID)
def test_valid_inside_grad(name: str) -> None:
    """Samples that do not count touch neither values nor derivatives."""
    ask, valid, eps = VALID[name], torch.tensor([True, False, True, True]), 1e-6
    values, slopes = jvp(lambda w: numbers(ask(w, BAD, valid=valid)), (W,), (W,))
    torch.testing.assert_close(values, numbers(ask(W, BAD, valid=valid)))
    above, below = (numbers(ask(w, BAD, valid=valid)) for w in (W + eps * W, W - eps * W))
    difference = [(a - b) / (2 * eps) for a, b in zip(above, below, strict=True)]
    torch.testing.assert_close(slopes, difference, rtol=1e-6, atol=1e-6)
    total = lambda w: scalar(numbers(ask(w, BAD, valid=valid)))
    torch.testing.assert_close(grad(total)(W) @ W, scalar(difference), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk_size", [None, 3])
@pytest.mark.parametrize("name", VALID)
def test_valid_that_differs_between_the_calls_of_a_vmap(name: str, chunk_size: int | None) -> None:
    ask = VALID[name]
    valid = torch.tensor([[True, False, True, True], [False, False, False, True], [False, False, True, True]])
    one = lambda w, v: ask(w, BAD, valid=v, chunk_size=chunk_size)
    if name == "clipped" and chunk_size is not None:
        one = lambda w, v: ask(w, BAD, valid=v, chunk_size=chunk_size)._replace(count=v.sum())
    found = vmap(lambda v: one(W, v))(valid)
    for k, v in enumerate(valid):
        alone = numbers(ask(W, BAD, valid=v))
        torch.testing.assert_close([t[k].double() for t in optree.tree_leaves(found)], alone, equal_nan=True)
    pieces = lambda w, v: scalar(numbers(one(w, v))[: 1 if name == "stats" else None])
    slopes = vmap(grad(pieces), (None, 0))(W, valid)
    for k, v in enumerate(valid):
        torch.testing.assert_close(slopes[k], grad(pieces)(W, v))


# ---- weights and bounds --------------------------------------------------------------------------------------


def test_a_weight_of_zero_has_a_derivative() -> None:
    w = torch.tensor([0.0, 1.0, 0.0])
    rows = vmap(grad(square), (None, 0))(W, X)
    assert_close(jacrev(lambda w: psgrad.weighted_grad(square, W, X, w))(w), rows.T)
    assert_close(jacfwd(lambda w: psgrad.weighted_grad(square, W, X, w))(w), rows.T)


def test_weights_of_other_kinds() -> None:
    mask = torch.tensor([True, False, True])
    ask = lambda w, given: psgrad.weighted_grad(square, w, X, given)
    for given in (mask, mask.long(), mask.float()):
        assert_close(jacrev(ask)(W, given), jacrev(ask)(W, mask.double()))
    several = torch.stack([mask.double(), 2 * weights()])
    assert_close(vmap(ask, (None, 0))(W, several), torch.stack([ask(W, w) for w in several]))


BAD_WEIGHTS = {
    "shape": (torch.ones(2), psgrad.ArgumentError, "weights has shape (2,), not (3,)\n  give one number per sample."),
    "infinite": (
        torch.tensor([1.0, torch.inf, 1.0]),
        psgrad.ArgumentError,
        "weights are not finite for samples 1\n  give 0 to leave a sample out.",
    ),
    "number": (
        2.0,
        psgrad.ArgumentTypeError,
        "weights is a float, not a tensor\n  give one number per sample, or a function of the norms.",
    ),
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
def test_weights_are_checked_inside_transforms(name: str) -> None:
    given, kind, message = BAD_WEIGHTS[name]
    for ask in (given, lambda norms: given):
        with pytest.raises(kind) as error:
            grad(lambda w, ask=ask: psgrad.weighted_grad(square, w, X, ask).sum())(W)
        assert str(error.value) == message


def test_bounds_are_checked_where_they_can_be_read() -> None:
    ask = lambda c: psgrad.clipped_grad(square, W, X, c).grad.sum()
    with pytest.raises(psgrad.ArgumentError, match=re.escape("max_norm=-1.0 is not positive")):
        grad(ask)(torch.tensor(-1.0))
    with pytest.raises(psgrad.ArgumentError, match="chunk_size=0 is not a positive int"):
        grad(lambda w: psgrad.clipped_grad(square, w, X, 1.0, chunk_size=0).grad.sum())(W)
    assert_close(
        grad(lambda w: scalar(psgrad.clipped_grad(square, w, X, torch.inf).grad))(W),
        grad(lambda w: scalar(psgrad.weighted_grad(square, w, X, torch.ones(3))))(W),
    )


def test_a_tree_of_bounds() -> None:
    params = {"a": W, "b": torch.tensor(0.5)}
    fn = lambda p, x: (p["a"] * x).sum() ** 2 + p["b"] * x.sum() ** 2 + p["b"] ** 2 * x[0]
    bounds = {"a": torch.tensor(2.0), "b": torch.tensor(1.0)}

    def ours(p: Any, bounds: Any) -> Any:
        return psgrad.clipped_grad(fn, p, X, bounds)

    def formula(p: Any, bounds: Any) -> Any:
        rows = vmap(grad(fn), (None, 0))(p, X)
        return {
            k: summed(
                rows[k], torch.where((n := flat([rows[k]]).norm(dim=1)) > bounds[k], bounds[k] / n.clamp(min=1e-9), 1.0)
            )
            for k in p
        }

    for which in (0, 1):
        found = grad(lambda p, b: scalar(ours(p, b).grad), which)(params, bounds)
        p = {"a": W, "b": torch.tensor(0.5)}
        assert_close(found, grad(lambda p, b: scalar(formula(p, b)), which)(p, bounds))
    assert_close(
        grad(lambda b: ours(params, b).sensitivity)(bounds),
        {"a": 2 / 5**0.5 * torch.ones(()), "b": 1 / 5**0.5 * torch.ones(())},
    )


def _hook_on_params(p: Tensor, s: Tensor) -> Tensor:
    h = torch.tanh(p)
    h.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return (h * s).sum()


NOT_LINEAR = {
    "function": CLAMPS["new function"],
    "hook": CLAMPS["hook"],
    "hook on a function of params": _hook_on_params,
}


@pytest.mark.parametrize("how", NOT_LINEAR)
def test_weights_where_a_backward_is_not_linear(how: str) -> None:
    """They must not go through it, as they would where the weighted losses are differentiated."""
    fn, p, x, w = NOT_LINEAR[how], torch.randn(3), torch.randn(5, 3), torch.tensor([5.0, -3.0, 0.1, 2.0, 1.0])
    rows = torch.stack([grad(fn)(p, one) for one in x])
    for options in ({}, {"chunk_size": 2}):
        values = jvp(lambda w, o=options: psgrad.weighted_grad(fn, p, x, w, **o), (w,), (torch.ones(5),))
        assert_close(values, (w @ rows, rows.sum(0)))


def test_weights_far_from_one_stay_out_of_the_backward() -> None:
    fn = lambda w, x: (w * x * 1e-30).sum() * 1e-4
    w, x = torch.zeros(2, dtype=torch.float32), torch.ones(3, 2, dtype=torch.float32)
    given = torch.tensor([1e35, 1e36, 1e37])
    found = []
    jvp(lambda w: found.append(psgrad.weighted_grad(fn, w, x, given).tolist()) or w, (w,), (w,))
    torch.testing.assert_close(found[0], [1110.0, 1110.0], rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_half_precision_are_taken_in_float32(dtype: torch.dtype) -> None:
    fn = lambda w, x: (w * x).sum()
    w, x = torch.zeros(2, dtype=dtype), torch.full((3000, 2), 0.1, dtype=dtype)
    for ask in (
        lambda w: psgrad.weighted_grad(fn, w, x, torch.ones(3000)),
        lambda w: psgrad.clipped_grad(fn, w, x, 10.0, chunk_size=1000).grad,
        lambda w: psgrad.grad_stats(fn, w, x).mean * 3000,
    ):
        found, _ = jvp(ask, (w,), (w,))
        assert found.dtype == dtype
        assert (found.double() - x.double().sum(0)).abs().max() <= torch.finfo(dtype).eps * 300
    norms, _ = jvp(lambda w: psgrad.per_sample_norms(fn, w, x), (w,), (w,))
    assert norms.dtype == torch.float32


def test_weights_are_not_rounded_to_the_dtype_of_losses() -> None:
    fn = lambda w, x: (w * x).sum().bfloat16()
    found, _ = vjp(lambda w: psgrad.weighted_grad(fn, w, X[:1], torch.tensor([1.001])), W)
    assert_close(found, 1.001 * X[0])


# ---- options -------------------------------------------------------------------------------------------------


def with_aux(p: Any, x: Tensor) -> tuple[Tensor, Any]:
    return square(p, x), {"twice": 2 * x, "sum": x.sum()}


AUX = {
    "norms": lambda w, **o: psgrad.per_sample_norms(with_aux, w, X, has_aux=True, **o),
    "weighted": lambda w, **o: psgrad.weighted_grad(with_aux, w, X, weights(), has_aux=True, **o),
    "by norms": lambda w, **o: psgrad.weighted_grad(with_aux, w, X, lambda norms: norms, has_aux=True, **o),
    "clipped": lambda w, **o: psgrad.clipped_grad(with_aux, w, X, 1.0, has_aux=True, **o),
    "gram": lambda w, **o: psgrad.gram(with_aux, w, X, has_aux=True, **o),
    "stats": lambda w, **o: psgrad.grad_stats(with_aux, w, X, has_aux=True, **o),
}


@pytest.mark.parametrize(
    "options", [{}, {"chunk_size": 2}, {"max_bytes": "1GB"}, {"valid": torch.tensor([True, False, True])}]
)
@pytest.mark.parametrize("name", AUX)
def test_aux_and_values_inside_transforms(name: str, options: Any) -> None:
    found = vmap(lambda c: optree.tree_map(lambda t: t * c, AUX[name](W, **options)))(torch.ones(1))
    wanted = AUX[name](W, **options)
    torch.testing.assert_close([t[0].double() for t in optree.tree_leaves(found)], numbers(wanted))


@pytest.mark.parametrize("name", AUX)
def test_no_samples(name: str) -> None:
    valid = torch.zeros(3, dtype=torch.bool)
    found = vmap(lambda c: optree.tree_map(lambda t: t * c, AUX[name](W, valid=valid)))(torch.ones(1))
    wanted = AUX[name](W, valid=valid)
    torch.testing.assert_close([t[0].double() for t in optree.tree_leaves(found)], numbers(wanted), equal_nan=True)
    assert psgrad_of_nothing(grad) == (0, 2)


def psgrad_of_nothing(transform: Any) -> tuple[int, ...]:
    shapes = []

    def f(w: Tensor) -> Tensor:
        rows = psgrad.per_sample_grads(square, w, X[:0])
        shapes.append(tuple(rows.shape))
        return w.sum() + rows.sum()

    transform(f)(W)
    return shapes[0]


def noisy(table: Tensor, i: Tensor) -> Tensor:
    """A sample's gradient is in its own row of the table, times a draw."""
    return (F.embedding(i, table) * torch.rand(2) * 10).sum()


@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_both_passes_draw_the_same_numbers(randomness: Any, chunk_size: int | None) -> None:
    table, index = torch.zeros(5, 2), torch.arange(5)
    options = {"randomness": randomness, "chunk_size": chunk_size}

    def unit(table: Tensor) -> Tensor:
        return psgrad.weighted_grad(noisy, table, index, lambda norms: 1 / norms, **options)

    rows, _ = jvp(unit, (table,), (table,))
    assert_close(rows.norm(dim=1), torch.ones(5))
    assert (rows - rows[0]).abs().max() < 1e-12 if randomness == "same" else len(rows.unique(dim=0)) == 5
    total, _ = jvp(lambda t: psgrad.weighted_grad(noisy, t, index, torch.ones(5), **options), (table,), (table,))
    clipped, _ = jvp(lambda t: psgrad.clipped_grad(noisy, t, index, 1e-3, **options).grad, (table,), (table,))
    assert_close(clipped.norm(dim=1), torch.full((5,), 1e-3))
    for found in (total, clipped):
        assert (found - found[0]).abs().max() < 1e-12 if randomness == "same" else len(found.unique(dim=0)) == 5


def _noisy_function(table: Tensor, i: Tensor) -> Tensor:
    return NOT_LINEAR["function"](noisy(table, i)[None], torch.ones(1))


def _noisy_root(table: Tensor, i: Tensor) -> Tensor:
    return noisy(table, i) + torch.where(i == 1, noisy(0 * table, i), 0).sqrt()


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_what_runs_again_draws_the_same_numbers(chunk_size: int | None) -> None:
    """Where the gradient of weighted losses will not do, and where samples are left out."""
    table, index, after = torch.zeros(5, 2), torch.arange(5), []

    def run(ask: Callable[[Tensor], Tensor]) -> Tensor:
        torch.manual_seed(3)
        found, _ = vjp(ask, table)
        after.append(torch.rand(1))  # as many numbers were drawn
        return found

    options = {"chunk_size": chunk_size}
    rows = run(lambda t: psgrad.per_sample_grads(_noisy_function, t, index, **options).sum(0))
    assert_close(run(lambda t: psgrad.weighted_grad(_noisy_function, t, index, torch.ones(5), **options)), rows)
    rows = run(lambda t: torch.nan_to_num(psgrad.per_sample_grads(_noisy_root, t, index, **options)).sum(0))
    ask = lambda t: psgrad.clipped_grad(_noisy_root, t, index, torch.inf, nonfinite="zero", **options).grad
    assert_close(run(ask), rows)
    assert rows.any(1).tolist() == [True, False, True, True, True]
    assert after[0] == after[1]
    assert after[2] == after[3]


def test_factored_grads_as_the_other_of_gram() -> None:
    s = setting("linear")
    other = psgrad.factored_grads(s.f, s.p, -s.x)
    rows = lambda p, x: flat(vmap(grad(s.f), (None, 0))(p, x))
    kept = rows(s.p, -s.x)
    assert_close(jacrev(lambda p: psgrad.gram(s.f, p, s.x, other))(s.p), jacrev(lambda p: rows(p, s.x) @ kept.T)(s.p))
    both = lambda p: psgrad.gram(s.f, p, s.x, -s.x)
    assert_close(jacrev(both)(s.p), jacrev(lambda p: rows(p, s.x) @ rows(p, -s.x).T)(s.p))
    with pytest.raises(psgrad.ArgumentError, match="other holds the gradients of other parameters"):
        grad(lambda w: psgrad.gram(square, w, X, other).sum())(W)


KEPT = {
    "weights": lambda fg, t: fg.weighted_sum(torch.ones(3) * t),
    "max_norm": lambda fg, t: fg.clipped_grad(t).grad,
    "max_norm, of each": lambda fg, t: fg.clipped_sum(t),
}


@pytest.mark.parametrize("transform", [grad, vmap, lambda f: lambda t: jvp(f, (t,), (t,))])
@pytest.mark.parametrize("what", KEPT)
def test_transforms_do_not_go_through_what_is_kept(what: str, transform: Any) -> None:
    kept = psgrad.factored_grads(square, W, X)
    t = torch.ones(2) if transform is vmap else torch.tensor(1.0)
    with pytest.raises(psgrad.ArgumentError) as error:
        transform(lambda t: KEPT[what](kept, t).sum())(t)
    name = what.partition(",")[0]
    assert str(error.value) == (
        f"{name} belongs to a torch.func transform, which does not go through kept gradients\n"
        f"  call psgrad.{'clipped_grad' if name == 'max_norm' else 'weighted_grad'} there."
    )
    kept.weighted_sum(weights())


# ---- inside psgrad -------------------------------------------------------------------------------------------


def tasks(w: Tensor, x: Tensor) -> Tensor:
    """The loss of a task, which is a batch: after a clipped step and a weighted one."""
    step = psgrad.clipped_grad(square, w, x, 1.0, nonfinite="zero").grad
    return square(w - 0.1 * step - 0.2 * psgrad.weighted_grad(square, w, x, weights()), x[0])


def plain_tasks(w: Tensor, x: Tensor) -> Tensor:
    rows = vmap(grad(square), (None, 0))(w, x)
    return square(w - 0.1 * clip([rows], 1.0)[0] - 0.2 * weights() @ rows, x[0])


def test_inside_another_call_of_psgrad() -> None:
    w, x = torch.tensor([1.0, 0.3]), torch.stack([X + 0.1, 2 * X - 0.3, X.flip(0) + 0.7])
    wanted = torch.stack([grad(plain_tasks)(w, one) for one in x])
    assert_close(psgrad.per_sample_grads(tasks, w, x), wanted)
    assert_close(psgrad.per_sample_norms(tasks, w, x), wanted.norm(dim=1))
    assert_close(psgrad.clipped_grad(tasks, w, x, 0.1).grad, clip([wanted], 0.1)[0])


class OldStyle(torch.autograd.Function):
    """What no transform takes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def test_inside_a_loop_over_samples() -> None:
    """Where psgrad runs the outer function sample by sample, by ordinary autograd, sums are in its graph."""
    w, x = torch.tensor([1.0, 0.3]), torch.stack([X + 0.1, 2 * X - 0.3])
    wanted = torch.stack([grad(plain_tasks)(w, one) for one in x])

    def looping(w: Tensor, x: Tensor) -> Tensor:
        y = torch.empty(())
        y.set_(tasks(w, x).detach())  # a new storage, which vmap refuses
        return tasks(w, x) + 0 * y

    with pytest.warns(psgrad.FallbackWarning):
        assert_close(psgrad.per_sample_grads(looping, w, x), wanted)


def test_results_stay_in_the_graph_of_plain_autograd() -> None:
    w = W.clone().requires_grad_()
    out, _ = vjp(lambda t: psgrad.weighted_grad(square, w * t, X, weights()), torch.tensor(1.0))
    rows = lambda w: weights() @ vmap(grad(square), (None, 0))(w, X)
    assert_close(torch.autograd.grad(scalar(out), w)[0], grad(lambda w: scalar(rows(w)))(W))


@pytest.mark.parametrize(
    "quantity",
    [
        psgrad.per_sample_grads,
        psgrad.per_sample_norms,
        lambda fn, w, x: psgrad.weighted_grad(fn, w, x, torch.arange(1.0, 4.0)),
        lambda fn, w, x: psgrad.clipped_grad(fn, w, x, 1.0).grad,
        psgrad.gram,
    ],
)
def test_tangents_of_forward_ad(quantity: Any) -> None:
    """They pass through every quantity as they do through jvp, whatever way the op of the parameter goes."""
    forward_ad = torch.autograd.forward_ad
    w, v, x = torch.randn(4), torch.randn(4), torch.randn(3, 4)

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return (x * w).sum().square() + F.linear(x, w[None]).sin().sum() + torch.dot(x, w).cos()

    right = torch.func.jvp(lambda w: quantity(fn, w, x), (w,), (v,))[1]
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(quantity(fn, forward_ad.make_dual(w, v), x)).tangent
    assert found is not None
    torch.testing.assert_close(found, right)
