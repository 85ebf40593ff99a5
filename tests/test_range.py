"""Norms and clipped sums of gradients whose squares are beyond the range of their dtype."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import psgrad
from psgrad.factors import costs as _plan
from psgrad.factors import numerics
from psgrad.factors.base import Factor
from psgrad.factors.dense import Dense, Product
from psgrad.factors.matrices import Matrices
from psgrad.factors.outer import Outer
from psgrad.factors.patches import Patches
from psgrad.factors.pullback import Pullback
from psgrad.factors.region import Region
from psgrad.factors.rows import Rows
from psgrad.factors.sum import Placement, Sum
from psgrad.streaming import budget as _memory

MAGNITUDES = {
    torch.float32: (1e-35, 1e-25, 1e-15, 1.0, 1e15, 1e25, 1e35),
    torch.bfloat16: (1e-35, 1e-25, 1e-15, 1.0, 1e15, 1e25, 1e35),
    torch.float16: (1e-2, 1.0, 1e2),
    torch.float64: (1e-250, 1e-160, 1e-20, 1.0, 1e20, 1e160, 1e250),
}
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-2, torch.float64: 1e-12}


def _randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _index(n: int, t: int, rows: int) -> Tensor:
    return torch.randint(rows, (n, t))


def _outer(n: int, t: int, i: int, o: int) -> Outer:
    return Outer(_randn(n, t, i), _randn(n, t, o))


def _overlapping(n: int) -> Sum:
    terms = Placement(None, _outer(n, 2, 3, 4)), Placement(Region((2, 3), (3, 1), 3), _outer(n, 2, 3, 2))
    return Sum(terms, torch.Size((4, 3)), is_disjoint=False)


def _disjoint(n: int) -> Sum:
    parts = Region((2, 3), (3, 1), 0), Region((1, 3), (3, 1), 9)
    return Sum(tuple(Placement(r, _outer(n, 2, 3, r.shape[0])) for r in parts), torch.Size((4, 3)))


def _tied_factor(n: int) -> Sum:
    table = Rows(_index(n, 6, 20), _randn(n, 6, 16), 20)
    return Sum((Placement(None, _outer(n, 5, 16, 20)), Placement(None, table)), torch.Size((20, 16)), is_disjoint=False)


def _pulled(n: int) -> Pullback:
    root = _randn(4, 3).requires_grad_()
    value = torch.tanh(root)
    return Pullback((Sum((Placement(None, _outer(n, 2, 3, 4)),), value.shape),), (value,), root)


def _conv(n: int, groups: int, size: int) -> Patches:
    geometry = _plan.ConvGeometry((1, 1), (1, 1), (1, 1), groups)
    return Patches(_randn(n, 1, 8, size, size), _randn(n, 1, 32, size, size), geometry, (3, 3))


# the factor of n samples in float64, and how its norms are found where that is a choice
FACTORS: dict[str, Callable[[int], Factor]] = {
    "dense": lambda n: Dense(_randn(n, 3, 5)),
    "dense-number": lambda n: Dense(_randn(n)),
    "dense-large": lambda n: Dense(_randn(n, 60, 70)),
    "product": lambda n: Product(_randn(n, 6), _randn(n, 6)),
    "outer-plain": lambda n: Outer(_randn(n, 7), _randn(n, 3)),
    "outer-plain-large": lambda n: Outer(_randn(n, 3000), _randn(n, 3)),
    "outer-one": lambda n: _outer(n, 1, 7, 3),
    "outer-gram": lambda n: _outer(n, 4, 16, 16),
    "outer-gram-strips": lambda n: _outer(n, 100, 300, 300),
    "outer-tiles": lambda n: _outer(n, 30, 4, 3),
    "outer-heads": lambda n: Outer(_randn(n, 2, 4, 16), _randn(n, 2, 4, 16)),
    "rows": lambda n: Rows(_index(n, 6, 4), _randn(n, 6, 5), 4),
    "rows-one": lambda n: Rows(_index(n, 1, 4), _randn(n, 1, 5), 4),
    "matrices": lambda n: Matrices(_index(n, 30, 4), _randn(n, 30, 5), _randn(n, 30, 3), 3),
    "matrices-gram": lambda n: Matrices(_index(n, 9, 4), _randn(n, 9, 32), _randn(n, 9, 24), 3),
    "patches-gram": lambda n: _conv(n, 1, 3),
    "patches-tiles": lambda n: _conv(n, 1, 12),
    "patches-groups-gram": lambda n: _conv(n, 2, 2),
    "tied": _tied_factor,
    "overlapping": _overlapping,
    "disjoint": _disjoint,
    "pulled": _pulled,
}
GRAM = {"outer-gram", "outer-gram-strips", "patches-gram", "patches-groups-gram"}


def _changed(factor: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    """The factor with every tensor of numbers changed, which is told whether it is the input or the cotangent."""
    if isinstance(factor, Sum):
        terms = tuple(Placement(r, _changed(f, change)) for r, f in factor.terms)
        return dataclasses.replace(factor, terms=terms)
    if isinstance(factor, Pullback):
        root = change("", factor.root.detach()).requires_grad_()
        return Pullback(tuple(_changed(own, change) for own in factor.sums), (torch.tanh(root),), root)
    named = {f.name: getattr(factor, f.name) for f in dataclasses.fields(factor)}
    return dataclasses.replace(
        factor, **{k: change(k, v) for k, v in named.items() if isinstance(v, Tensor) and v.is_floating_point()}
    )


def _spread_over(factor: Factor, magnitudes: Tensor, where: str) -> Factor:
    """Sample n times magnitudes[n]: in the input, the cotangent, both, or the more in one the less in the other."""
    has_x = not isinstance(factor, (Dense, Rows))
    apart = magnitudes.max().sqrt() ** torch.where(magnitudes > 1, 1, -1)
    of_x = {"x": magnitudes, "g": torch.ones_like(magnitudes), "both": magnitudes.sqrt(), "apart": apart}[where]

    def change(name: str, t: Tensor) -> Tensor:
        if name == "":
            return t
        scale = magnitudes if not has_x else of_x if name == "x" else magnitudes / of_x
        return t * scale.view(-1, *[1] * (t.dim() - 1))

    if isinstance(factor, Sum):  # some terms have no input to scale
        terms = tuple(Placement(r, _spread_over(f, magnitudes, where)) for r, f in factor.terms)
        return dataclasses.replace(factor, terms=terms)
    found: Factor = _changed(factor, change)
    return found


def _made(kind: str, dtype: torch.dtype, where: str, more: tuple[float, ...] = ()) -> tuple[Factor, Factor]:
    """Samples of all magnitudes in `dtype`, and the same in float64."""
    torch.manual_seed(0)
    magnitudes = torch.tensor((*MAGNITUDES[dtype], *more), dtype=torch.float64)
    factor = _spread_over(FACTORS[kind](len(magnitudes)), magnitudes, where)
    short: Factor = _changed(factor, lambda _, t: t.to(dtype))
    exact: Factor = _changed(short, lambda _, t: t.double())
    return short, exact


def _exact_norms(exact: Factor) -> Tensor:
    """Norms in float64 whose squares do not matter, of gradients that are written out."""
    rows = exact.dense().flatten(1) if exact.shape else exact.dense()[:, None]
    largest = rows.abs().amax(1, keepdim=True)
    return torch.where(largest > 0, rows / largest, 0).norm(dim=1) * largest[:, 0]


@pytest.mark.parametrize("where", ["x", "g", "both", "apart"])
@pytest.mark.parametrize("kind", FACTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_norms_of_every_factor_at_every_magnitude(kind: str, where: str, dtype: torch.dtype) -> None:
    short, exact = _made(kind, dtype, where)
    norms = short.norms()
    assert norms.dtype == numerics.wide(dtype)
    torch.testing.assert_close(norms.double(), _exact_norms(exact), rtol=ROUNDING[dtype], atol=0.0)


@pytest.mark.parametrize("kind", FACTORS)
def test_norms_of_float16(kind: str) -> None:
    short, exact = _made(kind, torch.float16, "g")
    torch.testing.assert_close(short.norms().double(), _exact_norms(exact), rtol=ROUNDING[torch.float16], atol=0.0)


def test_the_kinds_take_the_ways_they_are_named_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rooted = []
    monkeypatch.setattr(Factor, "rooted", lambda self, squares, least: rooted.append(type(self)) or squares.sqrt())
    for kind in FACTORS:
        rooted.clear()
        _made(kind, torch.float32, "g")[0].norms()
        assert bool(rooted) == (kind in GRAM | {"outer-heads", "tied", "matrices-gram"}), kind


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", FACTORS)
def test_zeros_have_norm_zero_and_what_is_not_finite_touches_no_other(kind: str, bad: float) -> None:
    short, _ = _made(kind, torch.float32, "g", (0.0, bad, 1.0))
    norms = short.norms()
    n = len(norms)
    assert norms[n - 3] == 0
    assert not norms[n - 2].isfinite()
    others = torch.tensor([*range(n - 3), n - 1])
    torch.testing.assert_close(norms[others], short.select(others).norms(), rtol=1e-6, atol=0.0)
    assert norms[others].isfinite().all()


@pytest.mark.parametrize("kind", ["outer-gram", "patches-gram", "tied"])
def test_samples_without_a_gradient_are_not_written_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short, exact = _made(kind, torch.float32, "g", (0.0, 0.0))
    short, exact = (f.select(torch.tensor([3, 7, 8])) for f in (short, exact))
    expected = _exact_norms(exact)
    monkeypatch.setattr(type(short), "dense", None)
    torch.testing.assert_close(short.norms().double(), expected, rtol=1e-5, atol=0.0)


def test_an_input_that_is_not_finite_is_seen_though_the_cotangent_is_zero() -> None:
    factor = FACTORS["outer-gram"](3)
    assert isinstance(factor, Outer)
    factor.x[1, 2, 3], factor.g[1] = torch.inf, 0
    assert factor.norms().isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("kind", [kind for kind in FACTORS if kind != "pulled"])
def test_recorded_norms_hold_at_every_magnitude(kind: str) -> None:
    """No look is allowed while ops are recorded; what is recorded for one magnitude is replayed for all."""
    short, exact = _made(kind, torch.float32, "g")
    tensors = short.tensors()

    def norms(*values: Tensor) -> Tensor:
        rest = iter(values)
        return short.each(lambda _: next(rest)).norms()

    ones = [torch.ones_like(t) if t.is_floating_point() else t for t in tensors]
    graph = make_fx(norms)(*ones)
    torch.testing.assert_close(graph(*tensors).double(), _exact_norms(exact), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("where", ["x", "g", "both"])
@pytest.mark.parametrize("kind", FACTORS)
def test_clipped_sums_of_every_factor(kind: str, where: str) -> None:
    """Every sample is scaled to norm 1, so that none drowns the others."""
    short, exact = _made(kind, torch.float32, where)
    if kind == "dense-number":
        return  # the sum of signs may cancel
    expected = (exact.dense() / _exact_norms(exact).view(-1, *[1] * len(exact.shape))).sum(0)
    found = short.weighted_sum(1 / short.norms())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    total = torch.zeros_like(found)
    short.add_weighted(total, 1 / short.norms())
    torch.testing.assert_close(total, found)


# ---- through the public functions ------------------------------------------------------------------------


def _tied(p: Any, tokens: Tensor) -> Tensor:
    h = torch.tanh(F.embedding(tokens, p["table"]) @ p["mix"])
    return F.cross_entropy(F.linear(h, p["table"]), tokens.roll(1))


def _net(p: Any, x: Tensor) -> Tensor:
    h = torch.tanh(F.linear(x, p["w1"], p["b1"]))
    return F.linear(h, p["w2"]).square().sum()


def _convolved(p: Any, x: Tensor) -> Tensor:
    h = F.group_norm(F.conv2d(x[None], p["conv"], p["bias"], padding=1), 2, p["gain"])
    return torch.tanh(h).square().sum()


def _parts(p: Any, x: Tensor) -> Tensor:
    """Parts of one matrix that overlap, and a function of another."""
    h = F.linear(x, p["w"][:5]).tanh().sum() + F.linear(x, p["w"][3:]).square().sum()
    return h + F.linear(x, torch.tanh(p["v"])).square().sum()


def _repeated(p: Any, x: Tensor) -> Tensor:
    """A layer that is used twice, and heads."""
    h = torch.tanh(F.linear(torch.tanh(F.linear(x, p["w"])), p["w"]))
    return torch.einsum("ti,hio->hto", h, p["heads"]).square().sum()


FUNCTIONS: dict[str, tuple[Any, dict[str, tuple[int, ...]], Callable[[int], Tensor]]] = {
    "net": (_net, {"w1": (6, 5), "b1": (6,), "w2": (3, 6)}, lambda n: _randn(n, 5)),
    "sequence": (_net, {"w1": (16, 12), "b1": (16,), "w2": (16, 16)}, lambda n: _randn(n, 3, 12)),
    "long": (_net, {"w1": (4, 3), "b1": (4,), "w2": (3, 4)}, lambda n: _randn(n, 30, 3)),
    "conv": (_convolved, {"conv": (8, 4, 3, 3), "bias": (8,), "gain": (8,)}, lambda n: _randn(n, 4, 3, 3)),
    "tied": (_tied, {"table": (20, 16), "mix": (16, 16)}, lambda n: _index(n, 6, 20)),
    "parts": (_parts, {"w": (8, 6), "v": (4, 6)}, lambda n: _randn(n, 3, 6)),
    "repeated": (_repeated, {"w": (8, 8), "heads": (2, 8, 8)}, lambda n: _randn(n, 3, 8)),
}


def _scaled_losses(name: str, dtype: torch.dtype) -> tuple[Any, Any, Any, Any, Tensor]:
    """A function whose sample n has gradients of about magnitude n, params and batch; gradients, norms in float64."""
    torch.manual_seed(0)
    fn, shapes, samples = FUNCTIONS[name]
    scale = torch.tensor(MAGNITUDES[dtype], dtype=torch.float64)
    params = {k: (_randn(*shape) / shape[-1] ** 0.5).to(dtype) for k, shape in shapes.items()}
    data = samples(len(scale))
    batch = (data.to(dtype) if data.is_floating_point() else data, scale)

    def scaled(p: Any, sample: Any) -> Tensor:
        return fn(p, sample[0]) * sample[1].to(next(iter(p.values())).dtype)

    as64 = optree.tree_map(lambda t: t.double() if t.is_floating_point() else t, (params, batch))
    grads = psgrad.testing.loop_grads(scaled, *as64)
    each = optree.tree_map(lambda g: Dense(g), grads)
    return scaled, params, batch, grads, optree.tree_map(_exact_norms, each)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_norms_of_functions(name: str, dtype: torch.dtype) -> None:
    fn, params, batch, _, expected = _scaled_losses(name, dtype)
    total = numerics.norm_of_norms(list(expected.values()))
    fg = psgrad.factored_grads(fn, params, batch)
    close = {"rtol": 1e-4 if dtype is torch.float32 else 1e-10, "atol": 0.0, "check_dtype": False}
    for chunk_size in (None, 3):
        torch.testing.assert_close(psgrad.per_sample_norms(fn, params, batch, chunk_size=chunk_size), total, **close)
    for each in (psgrad.per_sample_norms(fn, params, batch, per_param=True), fg.norms(per_param=True)):
        for k, norms in each.items():
            torch.testing.assert_close(norms, expected[k], **close)
    torch.testing.assert_close(fg.norms(), total, **close)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("passes", ["one", "chunks", "two", "factored", "per parameter"])
def test_clipped_sums_of_functions(name: str, passes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, params, batch, grads, expected = _scaled_losses(name, torch.float32)
    norms = numerics.norm_of_norms(list(expected.values()))
    options: dict[str, Any] = {"chunks": {"chunk_size": 2}, "two": {"max_bytes": 250}}.get(passes, {})
    if passes == "two":
        peaks = {"clipped": 1 << 40}
        monkeypatch.setattr(
            _memory, "peak_bytes", lambda problem, n, m, quantity, parted=False: peaks.get(quantity.name, 100 * n)
        )
    if passes == "factored":
        found = psgrad.factored_grads(fn, params, batch).clipped_sum(1.0)
    elif passes == "per parameter":
        found = psgrad.clipped_grad(fn, params, batch, dict.fromkeys(params, 1.0)).grad
    else:
        step = psgrad.clipped_grad(fn, params, batch, 1.0, **options)
        torch.testing.assert_close(step.norms.double(), norms, rtol=1e-4, atol=0.0)
        found = step.grad
    for k, each in grads.items():
        w = (1 / (expected[k] if passes == "per parameter" else norms)).clamp(max=1)
        torch.testing.assert_close(found[k].double(), torch.tensordot(w, each, 1), rtol=1e-3, atol=1e-5)


def test_one_large_gradient_clipped_to_norm_one() -> None:
    fn = lambda w, x: F.linear(x, w).sum()
    step = psgrad.clipped_grad(fn, torch.zeros(3, 4), torch.full((1, 4), 1e30), 1.0)
    torch.testing.assert_close(step.norms, torch.tensor([1e30 * 12**0.5]))
    torch.testing.assert_close(step.grad.norm(), torch.tensor(1.0))


def test_norms_of_half_precision_parameters() -> None:
    fn, params, batch, _, expected = _scaled_losses("sequence", torch.bfloat16)
    found = psgrad.per_sample_norms(fn, params, batch, per_param=True)
    for k, norms in found.items():
        torch.testing.assert_close(norms.double(), expected[k], rtol=0.1, atol=0.0)


def test_results_do_not_share_memory() -> None:
    """The cotangent of a sum is the gradient of every bias in it, whose norms are taken once."""
    for dtype in (torch.float32, torch.float64):
        params = {k: torch.zeros(3, dtype=dtype) for k in ("a", "b")} | {"w": torch.zeros(3, 2, dtype=dtype)}
        fn = lambda p, x: (F.linear(x, p["w"], p["a"]) + p["b"]).sum()
        norms = psgrad.per_sample_norms(fn, params, torch.ones(4, 2, dtype=dtype), per_param=True)
        norms["a"].zero_()
        for k in ("b", "w"):
            assert (norms[k] > 1).all()
