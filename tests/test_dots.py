"""Inner products with a direction: as from the loop's gradients, and without these being written out."""

import contextlib
from typing import Any
from unittest import mock

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import psgrad
from psgrad.factors.base import Factor
from psgrad.factors.costs import ConvGeometry
from psgrad.factors.dense import Dense
from psgrad.factors.outer import Outer
from psgrad.factors.patches import Patches
from psgrad.factors.pullback import Pullback
from psgrad.factors.rows import Rows

from .cases import CASES, Case, N
from .test_contract import assert_close
from .test_quantities import flat, linear_loss, pytestmark, tied_gpt, warns, workspace  # noqa: F401

ROUNDED = {"cast"}  # cases that compute in float32


def directions(params: Any, k: int | None, seed: int = 1) -> Any:
    generator = torch.Generator().manual_seed(seed)
    lead = () if k is None else (k,)
    return optree.tree_map(lambda p: torch.randn((*lead, *p.shape), dtype=p.dtype, generator=generator), params)


def expected(grads: Any, v: Any, k: int | None) -> Any:
    """The inner products of each parameter, a tree."""

    def each(g: Tensor, t: Tensor) -> Tensor:
        found = g.reshape(len(g), -1) @ t.reshape(k or 1, -1).mT
        return found[:, 0] if k is None else found

    return optree.tree_map(each, grads, v)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.usefixtures("workspace")
def test_as_the_loop_has_them(case: Case) -> None:
    fn, params, batch = case.make()
    grads = case.loop_grads()
    close: Any = {"rtol": 1e-5, "atol": 1e-6} if case.id in ROUNDED else {}
    with warns(case):
        fg = psgrad.factored_grads(fn, params, batch)
    for k in (None, 1, 3):
        v = directions(params, k)
        each = expected(grads, v, k)
        total = sum(optree.tree_leaves(each))
        with warns(case):
            assert_close(psgrad.per_sample_dots(fn, params, batch, v), total, **close)
            assert_close(psgrad.per_sample_dots(fn, params, batch, v, chunk_size=3), total, **close)
            assert_close(psgrad.per_sample_dots(fn, params, batch, v, per_param=True), each, **close)
        assert_close(fg.dots(v), total, **close)
        assert_close(fg.dots(v, per_param=True), each, **close)
    pairs = optree.tree_map(lambda g: g.reshape(N, -1) @ g.reshape(N, -1).mT, grads)
    assert_close(fg.dots(per_param=True), pairs)
    some = fg[torch.tensor([2, 0])]
    assert_close(fg.dots(some, per_param=True), optree.tree_map(lambda t: t[:, [2, 0]], pairs))


def test_one_backward_gives_scores_and_the_gradient() -> None:
    """Training samples and held-out ones in one batch."""
    fn, params, batch = tied_gpt()
    rows = flat(psgrad.testing.loop_grads(fn, params, batch))
    fg = psgrad.factored_grads(fn, params, batch)
    assert_close(fg[:3].dots(fg[3:].mean()), rows[:3] @ rows[3:].mean(0))


# ---- by the rule, and not by gradients written out ---------------------------------------------------------


@contextlib.contextmanager
def nothing_written(*kinds: type[Factor]) -> Any:
    """Inside, factors of these types cannot be written out."""
    with contextlib.ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(mock.patch.object(kind, "dense", side_effect=AssertionError("written out")))
        yield


class Everything(nn.Module):
    """An embedding, a convolution, a weight norm, linear layers, one of them fused and split."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.normed = parametrizations.weight_norm(nn.Linear(8, 8))
        self.fused = nn.Linear(8, 24)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv(self.table(tokens).mT).mT
        q, k, v = (F.linear(x, w) for w in self.fused.weight.chunk(3))
        found: Tensor = self.head(self.normed(q.tanh() * k + v))
        return found


@pytest.mark.parametrize("asked", ["streamed", "factored"])
def test_no_gradient_is_written_out(asked: str) -> None:
    fn, params = psgrad.from_module(Everything().double(), lambda y, t: F.cross_entropy(y[0], t[0]))
    batch = torch.randint(11, (5, 3)), torch.randint(11, (5, 3))  # short: factors are smaller than gradients
    rows = flat(psgrad.testing.loop_grads(fn, params, batch))
    v = directions(params, None)
    fg = psgrad.factored_grads(fn, params, batch)
    kinds = Outer, Rows, Patches, Pullback
    assert {type(f) for block in fg._blocks for own in block.sums if own for _, f in own.terms} >= {Pullback}
    with nothing_written(*kinds):
        found = fg.dots(v) if asked == "factored" else psgrad.per_sample_dots(fn, params, batch, v)
    want = rows @ torch.cat([t.flatten() for t in optree.tree_leaves(v)])
    assert_close(found, want)


def test_a_function_of_parameters_that_torch_cannot_differentiate_twice() -> None:
    """Its gradients are written out, a few samples at a time."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor) -> Tensor:
            return 2 * w

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 2 * g.detach()  # the transpose of this would be zero, without a word

    w, x = torch.randn(4, 3, dtype=torch.float64), torch.randn(5, 2, 3, dtype=torch.float64)
    root = w.clone().requires_grad_()
    value = Doubled.apply(root)
    inner = Outer(x, torch.randn(5, 2, 4, dtype=torch.float64))
    sums = psgrad.factors.sum.sum_of([psgrad.factors.sum.Placement(None, inner)], value.shape)
    v = torch.randn(1, 4, 3, dtype=torch.float64)
    assert sums is not None
    found = Pullback((sums,), (value,), root).along(v)
    assert_close(found[:, 0], 2 * (inner.dense() * v).sum((1, 2)))


def test_many_directions_write_tiles_of_gradients() -> None:
    """K T products against T + K of the same size."""
    outer = Outer(torch.randn(6, 30, 5), torch.randn(6, 30, 4))
    with nothing_written(Outer):
        assert outer.along(torch.randn(1, 4, 5)).shape == (6, 1)
        plain = Outer(torch.randn(6, 5), torch.randn(6, 4))
        assert plain.along(torch.randn(9, 4, 5)).shape == (6, 9)
        with pytest.raises(AssertionError, match="written out"):
            outer.along(torch.randn(9, 4, 5))


# ---- numbers ---------------------------------------------------------------------------------------------

GEOMETRY = ConvGeometry((1,), (1,), (1,), 1)
HALF: dict[str, Any] = {
    "outer": lambda s: Outer(torch.full((2, 3, 4), s), torch.full((2, 3, 5), s)),
    "outer-one": lambda s: Outer(torch.full((2, 4), s), torch.full((2, 5), s)),
    "heads": lambda s: Outer(torch.full((2, 2, 3, 4), s), torch.full((2, 2, 3, 5), s)),
    "rows": lambda s: Rows(torch.tensor([[0, 1], [2, 2]]), torch.full((2, 2, 3), s), 4),
    "patches": lambda s: Patches(torch.full((2, 1, 3, 6), s), torch.full((2, 1, 4, 6), s), GEOMETRY, (3,)),
    "dense": lambda s: Dense(torch.full((2, 3, 4), s)),
}


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", HALF)
def test_half_precision_is_summed_in_float32(kind: str, dtype: torch.dtype, k: int) -> None:
    """Numbers of 3000, whose products are beyond float16, and directions that it would round."""
    factor = HALF[kind](3000.0)
    v = torch.randn((k, *factor.shape), generator=torch.Generator().manual_seed(0))
    exact = factor.each(lambda t: t.double() if t.is_floating_point() else t)
    want = exact.dense().flatten(1) @ v.double().flatten(1).mT
    found = factor.each(lambda t: t.to(dtype) if t.is_floating_point() else t).along(v)
    assert found.dtype == torch.float32
    exactly = 3000.0 if dtype is torch.float16 else float(torch.tensor(3000.0).bfloat16())
    scale = (exactly / 3000.0) ** (1 if kind in ("rows", "dense") else 2)
    torch.testing.assert_close(found.double(), want * scale, rtol=1e-4, atol=1e3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    w, x = torch.randn(3, 4, dtype=dtype), torch.randn(5, 4, dtype=dtype)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    fn = lambda w, x: F.linear(x, w).tanh().sum()
    want = (psgrad.per_sample_grads(fn, w, x).to(wide) * 2).sum((1, 2))
    for given in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        found = psgrad.per_sample_dots(fn, w, x, torch.full((3, 4), 2, dtype=given))
        assert found.dtype == wide
        torch.testing.assert_close(found, want, rtol=2e-2 if dtype.itemsize < 4 else 1e-5, atol=1e-2)


def test_a_bad_sample_touches_its_own_row_only() -> None:
    w, x, v = torch.randn(3, 4), torch.randn(5, 4), torch.randn(3, 4)
    want = psgrad.per_sample_dots(linear_loss, w, x, v)
    good = torch.tensor([0, 1, 3, 4])
    for value in (torch.nan, torch.inf):
        bad = x.clone()
        bad[2, 1] = value
        for options in ({}, {"chunk_size": 2}):
            found = psgrad.per_sample_dots(linear_loss, w, bad, v, **options)
            assert_close(found[good], want[good])
            assert not found[2].isfinite()
        assert not psgrad.factored_grads(linear_loss, w, bad).dots(v)[2].isfinite()


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_samples_that_do_not_count(chunk_size: int | None) -> None:
    w, x, valid = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([True, False, True, True, False])
    padded, v = x.masked_fill(~valid[:, None], torch.nan), torch.randn(2, 3, 4)
    found = psgrad.per_sample_dots(linear_loss, w, padded, v, valid=valid, chunk_size=chunk_size)
    assert_close(found[valid], psgrad.per_sample_dots(linear_loss, w, x[valid], v))
    assert not found[~valid].any()
    both = lambda w, x: (linear_loss(w, x), x.sum())
    found, aux = psgrad.per_sample_dots(both, w, padded, v, valid=valid, chunk_size=chunk_size, has_aux=True)
    assert_close(aux, x.sum(1).where(valid, 0))
    assert found.shape == (5, 2)


def test_sizes_of_nothing() -> None:
    w, x = torch.randn(3, 4), torch.randn(5, 4)
    assert psgrad.per_sample_dots(linear_loss, w, x[:0], w).shape == (0,)
    assert psgrad.per_sample_dots(linear_loss, w, x[:0], w.expand(2, 3, 4)).shape == (0, 2)
    assert psgrad.per_sample_dots(linear_loss, w, x, w[None][:0]).shape == (5, 0)
    assert psgrad.factored_grads(linear_loss, w, x[:0]).dots(w).shape == (0,)
    nothing = psgrad.per_sample_dots(linear_loss, w, x, w, valid=torch.zeros(5, dtype=torch.bool))
    assert_close(nothing, torch.zeros(5))


@pytest.mark.parametrize("surroundings", [torch.no_grad, torch.inference_mode])
def test_surroundings_do_not_matter(surroundings: Any) -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2))
    fn, params = psgrad.from_module(model, F.cross_entropy)
    batch = torch.randn(5, 4), torch.randint(2, (5,))
    want = psgrad.per_sample_dots(fn, params, batch, params)
    with surroundings():
        v = optree.tree_map(torch.clone, params)
        assert_close(psgrad.per_sample_dots(fn, params, batch, v), want)
        assert_close(psgrad.factored_grads(fn, params, batch).dots(v), want)
    assert_close(psgrad.per_sample_dots(fn, params, batch, v), want)
    with torch.autocast("cpu", torch.bfloat16):
        fg = psgrad.factored_grads(fn, params, batch)
    rows = flat(fg.dense())
    with torch.autocast("cpu", torch.bfloat16):
        found = fg.dots(v)
    assert_close(found, rows @ torch.cat([t.flatten() for t in optree.tree_leaves(v)]), rtol=1e-2, atol=1e-2)


PARAMS = {"w": torch.ones(4, 3), "b": torch.ones(())}
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "structure": (
        {"w": torch.ones(4, 3)},
        psgrad.ArgumentError,
        "direction has another structure than params: it lacks direction['b']\n"
        "  give a tensor for every parameter, such as what weighted_grad returns.",
    ),
    "shape": (
        {"w": torch.ones(3, 4), "b": torch.ones(())},
        psgrad.ArgumentError,
        "direction['w'] has shape (3, 4), neither (4, 3) nor (K, 4, 3)\n"
        "  give one direction, or K of them along a leading axis.",
    ),
    "shape of a number": (
        {"w": torch.ones(4, 3), "b": torch.ones(2, 2)},
        psgrad.ArgumentError,
        "direction['b'] has shape (2, 2), neither () nor (K,)\n"
        "  give one direction, or K of them along a leading axis.",
    ),
    "number": (
        {"w": torch.ones(4, 3), "b": 1.0},
        psgrad.ArgumentTypeError,
        "direction['b'] is a float, not a tensor\n  give a tensor of shape ().",
    ),
    "complex": (
        {"w": torch.ones(4, 3), "b": torch.ones((), dtype=torch.complex64)},
        psgrad.ArgumentTypeError,
        "direction['b'] has dtype torch.complex64\n  give real numbers.",
    ),
    "count": (
        {"w": torch.ones(2, 4, 3), "b": torch.ones(3)},
        psgrad.ArgumentError,
        "direction['b'] holds 3 directions, direction['w'] 2 directions\n"
        "  give every parameter as many, along a leading axis.",
    ),
    "one and many": (
        {"w": torch.ones(2, 4, 3), "b": torch.ones(())},
        psgrad.ArgumentError,
        "direction['b'] holds one direction, direction['w'] 2 directions\n"
        "  give every parameter as many, along a leading axis.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_directions_that_are_refused(name: str) -> None:
    given, kind, message = REFUSED[name]
    fn = lambda p, x: (x @ p["w"].mT * p["b"]).sum()
    with pytest.raises(kind) as error:
        psgrad.per_sample_dots(fn, PARAMS, torch.ones(2, 3), given)
    assert str(error.value) == message
    with pytest.raises(kind) as error:
        psgrad.factored_grads(fn, PARAMS, torch.ones(2, 3)).dots(given)
    ours = {
        "direction[": "other[",
        "direction has another": "other has another",
        "give a tensor for every parameter, such as what weighted_grad": (
            "give a FactoredGrads, or a tensor for every parameter, such as what mean()"
        ),
    }
    for old, new in ours.items():
        message = message.replace(old, new)
    assert str(error.value) == message


def test_inside_a_transform() -> None:
    with pytest.raises(psgrad.ArgumentError) as error:
        torch.func.grad(lambda w: psgrad.per_sample_dots(linear_loss, w, torch.ones(2, 4), w).sum())(torch.ones(3, 4))
    assert str(error.value) == (
        "per_sample_dots is called inside a torch.func transform\n"
        "  compute it from per_sample_grads there, which can be differentiated and vmapped."
    )


# ---- a net of many kinds -----------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Convolutions on channels-last images, one transposed, checkpoints, a recurrent layer."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1, groups=groups)
        self.back = nn.ConvTranspose2d(8, 4, 3, stride=2, output_padding=1, padding=1)
        self.linear, self.lstm, self.head = nn.Linear(4, 5), nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda x: self.conv(x).tanh(), x, use_reentrant=False)
        x = self.back(x).flatten(2).mT
        x = checkpoint(lambda x: self.linear(x).relu(), x, use_reentrant=False)
        found: Tensor = self.head(self.lstm(x[:, :6])[0][:, -1])
        return found


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("groups", [1, 2])
def test_every_question_about_a_net_of_many_kinds(groups: int, n: int) -> None:
    """By rules, as any fallback would warn."""
    fn, params = psgrad.from_module(Mixed(groups).double(), F.cross_entropy)
    x = torch.randn(n, 4, 5, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    batch = x, torch.randint(3, (n,))
    grads = psgrad.testing.loop_grads(fn, params, batch)
    rows = flat(grads)
    for k in (None, 3):
        v = directions(params, k)
        want = sum(optree.tree_leaves(expected(grads, v, k)))
        assert_close(psgrad.per_sample_dots(fn, params, batch, v), want)
        assert_close(psgrad.factored_grads(fn, params, batch).dots(v), want)
    for kind in ("sketch", "two_sided"):
        found = psgrad.projected_grads(fn, params, batch, 50, kind=kind)
        assert_close(psgrad.projected_grads(fn, params, batch, 50, kind=kind, max_bytes="2MB"), found)
    assert_close(psgrad.ntk(fn, params, batch)[:, :, 0, 0], rows @ rows.mT)
    factors = psgrad.kron_factors(fn, params, batch)
    assert ("conv.weight" in factors) == (groups == 1)
    sides = {name: (torch.randn_like(k.output), torch.randn_like(k.input)) for name, k in factors.items()}
    mapped = psgrad.factored_grads(fn, params, batch).precondition(sides).dense()
    for name, (left, right) in sides.items():
        assert_close(mapped[name].flatten(2), left @ grads[name].flatten(2) @ right.mT)
