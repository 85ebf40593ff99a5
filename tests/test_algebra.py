"""Factors as an algebra: sums of every pair of leaves, and a type of somebody else's with every quantity."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import psgrad
from psgrad.extend import Call, Factor, Plan, Rule, register, unregister
from psgrad.factors import inner
from psgrad.factors.base import NormMemo
from psgrad.factors.costs import ConvGeometry
from psgrad.factors.dense import Dense, Product
from psgrad.factors.matrices import Matrices
from psgrad.factors.outer import Outer
from psgrad.factors.patches import Patches
from psgrad.factors.region import Region
from psgrad.factors.rows import Rows
from psgrad.factors.sum import Placement, Sum, sum_of

N, SHAPE = 5, torch.Size((4, 6))
POINTWISE = ConvGeometry((1,), (0,), (1,), 1)


@pytest.fixture(autouse=True)
def float64() -> None:
    torch.set_default_dtype(torch.float64)  # conftest puts it back


@dataclass(frozen=True, eq=False)
class Own(Factor):
    """Somebody's factor, which says no more than it must: gradients that are all the same number."""

    number: Tensor  # (N,)

    @property
    def plan(self) -> Plan:
        return Plan("expand", 0, 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(SHAPE)

    def dense(self, out: Tensor | None = None) -> Tensor:
        grads = self.number[:, None, None].expand(-1, *SHAPE)
        return grads.clone() if out is None else out.copy_(grads)


LEAVES: dict[str, Callable[[], Factor]] = {  # gradients of a 4 x 6 matrix
    "dense": lambda: Dense(torch.randn(N, 4, 6)),
    "product": lambda: Product(torch.randn(N, 4, 6), torch.randn(N, 4, 6)),
    "outer": lambda: Outer(torch.randn(N, 3, 6), torch.randn(N, 3, 4)),
    "outer-one": lambda: Outer(torch.randn(N, 6), torch.randn(N, 4)),
    "rows": lambda: Rows(torch.randint(4, (N, 7)), torch.randn(N, 7, 6), 4),
    "matrices": lambda: Matrices(torch.randint(5, (N, 7)), torch.randn(N, 7, 6), torch.randn(N, 7, 1), 4),
    "patches": lambda: Patches(torch.randn(N, 1, 6, 5), torch.randn(N, 1, 4, 5), POINTWISE, (1,)),
    "own": lambda: Own(torch.randn(N)),
}


def dense_of(factor: Factor) -> Tensor:
    return factor.dense().reshape(N, *SHAPE).clone()


def check(found: Factor | None, expected: Tensor) -> None:
    """Every question has the answer of the written gradients."""
    assert isinstance(found, Sum)
    w, mean = torch.randn(N), expected.mean(0)
    rows = expected.flatten(1)
    torch.testing.assert_close(found.dense(), expected)
    for out in (torch.full_like(expected, torch.nan), torch.full((*SHAPE, N), torch.nan).movedim(-1, 0)):
        torch.testing.assert_close(found.dense(out), expected)
    torch.testing.assert_close(found.norms(), rows.norm(dim=1))
    torch.testing.assert_close(found.norms_with(NormMemo()), rows.norm(dim=1))
    torch.testing.assert_close(found.weighted_sum(w), torch.tensordot(w, expected, 1))
    torch.testing.assert_close(found.weighted_sum(), expected.sum(0))
    for total in (torch.ones(SHAPE), torch.ones(SHAPE[::-1]).mT):
        found.add_weighted(total, w)
        torch.testing.assert_close(total, 1 + torch.tensordot(w, expected, 1))
    torch.testing.assert_close(found.squared_deviations(mean), (expected - mean).square().sum(0))
    torch.testing.assert_close(found.dots(found), rows @ rows.mT)
    for k in (1, 3):
        directions = torch.randn(k, *SHAPE)
        torch.testing.assert_close(found.along(directions), rows @ directions.flatten(1).mT)
    for left, right in ((torch.randn(3, 4), torch.randn(2, 6)), (torch.randn(4), None), (None, torch.randn(6, 6))):
        turned = expected if right is None else expected @ right.mT
        want = turned if left is None else torch.diag(left) @ turned if left.dim() == 1 else left @ turned
        torch.testing.assert_close(found.mapped(left, right, torch.float64).dense(), want)
    some = found.select(torch.tensor([3, 1]))
    torch.testing.assert_close(some.norms(), rows[[3, 1]].norm(dim=1))
    torch.testing.assert_close(some.dots(found), rows[[3, 1]] @ rows.mT)
    assert len(found) == N


@pytest.mark.parametrize("names", [*itertools.combinations_with_replacement(LEAVES, 2)], ids="+".join)
def test_the_sum_of_any_two(names: tuple[str, str]) -> None:
    a, b = (LEAVES[name]() for name in names)
    expected = dense_of(a) + dense_of(b)
    check(sum_of([Placement(None, a), Placement(None, b)], SHAPE), expected)


@pytest.mark.parametrize("names", [*itertools.product(LEAVES, repeat=2)], ids="+".join)
def test_the_sum_of_a_whole_and_a_part(names: tuple[str, str]) -> None:
    """The part is rows 1 and 2, by a factor of a matrix of two rows."""
    whole, part = (LEAVES[name]() for name in names)
    region = Region((2, 6), (6, 1), 6)
    cut = Dense(dense_of(part)[:, 1:3].contiguous()) if part.cut_grain() != 1 else part.cut(slice(1, 3))
    expected = dense_of(whole)
    expected[:, 1:3] += cut.dense().reshape(N, 2, 6)
    check(sum_of([Placement(region, cut), Placement(None, whole)], SHAPE), expected)


@pytest.mark.parametrize("names", [*itertools.product(LEAVES, repeat=2)], ids="+".join)
def test_parts_side_by_side(names: tuple[str, str]) -> None:
    """Row 0, and rows 2 and 3; nothing in row 1."""
    factors = [LEAVES[name]() for name in names]
    places = (slice(0, 1), Region((1, 6), (6, 1), 0)), (slice(2, 4), Region((2, 6), (6, 1), 12))
    terms, expected = [], torch.zeros(N, *SHAPE)
    for factor, (rows, region) in zip(factors, places, strict=True):
        cut = Dense(dense_of(factor)[:, rows].contiguous()) if factor.cut_grain() != 1 else factor.cut(rows)
        expected[:, rows] = cut.dense().reshape(N, *region.shape)
        terms.append(Placement(region, cut))
    found = sum_of(terms, SHAPE)
    assert found is not None
    assert found.is_disjoint
    check(found, expected)


def test_a_matrix_used_as_it_is_and_transposed() -> None:
    x, g = torch.randn(N, 3, 4), torch.randn(N, 3, 6)
    turned = Placement(Region((6, 4), (1, 6), 0), Outer(x, g))  # gradients of the transposed matrix
    straight = LEAVES["outer"]()
    expected = dense_of(straight) + torch.einsum("nto,nti->nio", g, x)
    found = sum_of([turned, Placement(None, straight)], SHAPE)
    check(found, expected)
    assert found is not None
    assert len(found.terms) == 1  # one longer sum


# ---- through the public functions ------------------------------------------------------------------------


def _bind(x: Any, w: Any) -> Call:
    return Call(x, (w,))


def _forward(options: None, x: Tensor, w: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    return x * w.sum(), ()


def _backward(options: None, g: Tensor, x: Tensor, params: Any, saved: Any, needs: Any) -> Any:
    gx = g * params[0].sum() if needs.x else None
    return gx, [Own((g * x).flatten(1).sum(1))]


def times_sum(x: Tensor, w: Tensor) -> Tensor:
    if torch.overrides.has_torch_function((x, w)):
        return torch.overrides.handle_torch_function(times_sum, (x, w), x, w)  # type: ignore[no-any-return]
    return x * w.sum()


@pytest.mark.parametrize("with_others", [False, True])
def test_a_factor_of_ones_own_has_every_quantity(with_others: bool) -> None:
    def fn(w: Tensor, x: Tensor) -> Tensor:
        loss = times_sum(x, w).sin().sum()
        return loss + torch.nn.functional.linear(x, w).square().sum() if with_others else loss

    w, x = torch.randn(SHAPE), torch.randn(N, 6)
    grads = psgrad.testing.loop_grads(fn, w, x)
    rows = grads.flatten(1)
    norms, weights = rows.norm(dim=1), torch.randn(N)
    rule = register(Rule("times_sum", (times_sum,), _bind, _forward, _backward))
    try:
        used = ["times_sum", "linear"] if with_others else ["times_sum"]
        psgrad.testing.check(fn, w, x, rules={"params": used})
        fg = psgrad.factored_grads(fn, w, x)
        clip = (0.5 / norms).clamp(max=1)
        for chunk_size in (None, 2):
            option = {"chunk_size": chunk_size}
            torch.testing.assert_close(psgrad.per_sample_norms(fn, w, x, **option), norms)
            step = psgrad.clipped_grad(fn, w, x, 0.5, **option)
            torch.testing.assert_close(step.grad, torch.tensordot(clip, grads, 1))
            found = psgrad.weighted_grad(fn, w, x, weights, **option)
            torch.testing.assert_close(found, torch.tensordot(weights, grads, 1))
            torch.testing.assert_close(psgrad.gram(fn, w, x, **option), rows @ rows.mT)
            torch.testing.assert_close(psgrad.per_sample_dots(fn, w, x, w, **option), rows @ w.flatten())
            whole = psgrad.projected_grads(fn, w, x, 24, **option)  # as many numbers as there are: a rotation
            torch.testing.assert_close(whole @ whole.mT, rows @ rows.mT)
            torch.testing.assert_close(psgrad.grad_stats(fn, w, x, **option).variance, grads.var(0))
        assert psgrad.clipped_grad(fn, w, x, 0.5, max_bytes="1MB").grad.shape == SHAPE
        torch.testing.assert_close(fg.norms(), norms)
        torch.testing.assert_close(fg.dots(), rows @ rows.mT)
        torch.testing.assert_close(fg[1:].dense(), grads[1:])
        torch.testing.assert_close(psgrad.concat([fg, fg]).sum(), 2 * grads.sum(0))
        assert "Own" in str(psgrad.explain(fn, w, x))
    finally:
        unregister(rule)


def test_inner_products_of_factors_of_two_shapes() -> None:
    """As where some samples read rows of a view of a parameter, and others have gradients of it as it is."""
    rows, whole = Rows(torch.randint(4, (N, 3)), torch.randn(N, 3, 6), 4), Dense(torch.randn(N, 1, 4, 6))
    expected = dense_of(rows).flatten(1) @ dense_of(whole).flatten(1).mT
    torch.testing.assert_close(inner.dots(rows, whole), expected)
    torch.testing.assert_close(inner.dots(whole, rows), expected.mT)


def test_a_tensor_that_may_be_none_is_refused() -> None:
    """Rows of it would not be taken where samples are selected."""

    @dataclass(frozen=True, eq=False)
    class Loose(Factor):
        x: Tensor
        g: Tensor | None

    with pytest.raises(TypeError, match=r"^Loose\.g may be None: a factor's tensors are annotated Tensor$"):
        Loose(torch.ones(2, 3), torch.ones(2, 3)).select(torch.tensor([1]))
