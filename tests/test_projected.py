"""Random projections: linear, unbiased, of the variance that is stated, the same everywhere."""

import hashlib
import subprocess
import sys
from math import isqrt
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import psgrad
from psgrad.factors import costs
from psgrad.factors import philox as philox_module
from psgrad.factors.dense import Dense
from psgrad.factors.outer import Outer
from psgrad.factors.philox import BITS, Stream, philox
from psgrad.factors.rows import Rows
from psgrad.factors.sketch import SHIFTS, SIGNS, Projection, shifts_of, two_sizes
from psgrad.factors.sum import Placement, Sum

from .cases import CASES, Case, N
from .test_contract import assert_close
from .test_dots import nothing_written
from .test_quantities import flat, linear_loss, pytestmark, tied_gpt, warns, workspace  # noqa: F401

# ---- the generator -----------------------------------------------------------------------------------------

ONES = 0xFFFFFFFF
KNOWN = [  # counter, key, words: those that its authors published
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_the_generator_is_philox(counter: Any, key: Any, words: Any) -> None:
    assert philox(counter, key) == words
    tensors = philox(tuple(torch.tensor([0, word]) for word in counter), key)
    assert tuple(int(t[1]) for t in tensors) == words


def sign(stream: Stream, place: int) -> int:
    """By plain ints."""
    bit = place % BITS
    return 1 - 2 * (stream.words(place // BITS)[bit // 32] >> bit % 32 & 1)


def test_signs_by_place() -> None:
    stream = Stream((7 << 40) + 5, 3, SIGNS)
    start = (1 << 33) - 200  # beyond a word of counters, too
    want = torch.tensor([float(sign(stream, start + k)) for k in range(500)])
    like = torch.empty(0)
    assert torch.equal(stream.run(start, start + 500, like), want)
    assert torch.equal(stream.run(start + 77, start + 300, like), want[77:300])
    starts = torch.tensor([start, start + 1, start + 130, start + 255])
    rows = stream.signs(starts, 140, torch.float32)
    assert torch.equal(rows, torch.stack([want[k : k + 140] for k in (0, 1, 130, 255)]))
    assert want.double().mean().abs() < 0.15


# ---- signs that are kept -----------------------------------------------------------------------------------


def kept_pages() -> int:
    return philox_module._page.cache_info().currsize


def test_kept_signs_are_those_that_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever pages they are on; and the second time nobody draws."""
    monkeypatch.setattr(philox_module, "PAGE", 4)
    philox_module.forget()
    stream, like = Stream(3, 1, SIGNS), torch.empty(0, dtype=torch.float64)
    ranges = [
        (0, 0),
        (0, 1),
        (0, 128),
        (5, 700),
        (512, 1024),
        (511, 1025),
        (130, 3000),
        (2999, 3000),
        (1 << 34, (1 << 34) + 900),
    ]
    want = [stream.run(*places, like) for places in ranges]
    assert kept_pages() == 0
    for places, signs in zip(ranges, want, strict=True):
        found = stream.run(*places, like, True)
        assert found.dtype is torch.float64
        assert torch.equal(found, signs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "words", None)
        for places, signs in list(zip(ranges, want, strict=True))[1:]:
            assert torch.equal(stream.run(*places, like, True), signs)
    found.zero_()  # nobody else's memory
    assert torch.equal(stream.run(*ranges[-1], like, True), want[-1])
    other = Stream(3, 2, SIGNS)
    assert torch.equal(other.run(0, 900, like, True), other.run(0, 900, like))
    philox_module.forget()


def test_kept_signs_have_a_bound() -> None:
    page = philox_module._page(Stream(0, 0, SIGNS), 0, philox_module.PAGE, torch.device("cpu"))
    assert page.nbytes * philox_module._page.cache_parameters()["maxsize"] == 64 << 20
    assert page.nbytes * 8 == BITS * philox_module.PAGE


def test_when_signs_are_kept() -> None:
    """Not by calls that have a bound of their own, not where tensors have no values, and not when nobody wants it."""
    fn, params, batch = problem()
    psgrad.empty_cache()
    want = psgrad.projected_grads(fn, params, batch, 64, max_bytes="1MB")
    assert kept_pages() == 0
    stream = Stream(0, 0, SIGNS)
    with FakeTensorMode():
        assert stream.run(0, 300, torch.empty(0), True).shape == (300,)
    with torch.device("meta"):
        assert stream.run(0, 300, torch.empty(0), True).is_meta
    assert kept_pages() == 0
    with torch.inference_mode():
        first = stream.run(0, 300, torch.empty(0), True)
    assert kept_pages() == 1
    assert torch.equal(first, stream.run(0, 300, torch.ones(1, requires_grad=True).detach(), True))
    psgrad.empty_cache()
    for _ in range(2):
        torch.testing.assert_close(psgrad.projected_grads(fn, params, batch, 64), want, rtol=1e-5, atol=1e-6)
    assert kept_pages() == len(params)
    psgrad.empty_cache()
    assert kept_pages() == 0


def test_shifts_by_block() -> None:
    stream = Stream(1, 2, SHIFTS)
    found = shifts_of(stream, 100, 4000)
    assert [min(found), max(found)] == [0, 99]
    assert shifts_of(stream, 100, 9)[:9] == found[:9]
    tensor = torch.stack(stream.below(100, torch.arange(1000)), 1).flatten()
    assert tensor.tolist() == found
    counts = torch.bincount(tensor, minlength=100).double()
    assert float(((counts - 40) ** 2 / 40).sum()) < 150  # chi squared of 99 degrees: 99 +- 14


# ---- the projection as a matrix ----------------------------------------------------------------------------


def matrix(shape: tuple[int, ...], param: int, dim: int, seed: int, two_sided: bool) -> Tensor:
    """(P, dim) of one parameter, by plain ints."""
    size = int(torch.Size(shape).numel())
    if two_sided and size > dim:
        o, i = shape[0], size // shape[0]
        p, q = two_sizes(o, i, dim)
        sides = []
        for rows, columns, purpose in ((p, o, 2), (q, i, 3)):
            stream = Stream(seed, param, purpose)
            drawn = torch.tensor([sign(stream, k) for k in range(rows * columns)], dtype=torch.float64)
            identity = torch.eye(rows, dtype=torch.float64)
            sides.append(identity if rows == columns else drawn.view(rows, columns) / rows**0.5)
        return torch.kron(*sides).mT @ matrix((p * q,), param, dim, seed, False)
    found = torch.zeros(size, dim, dtype=torch.float64)
    for k in range(size):
        block = k // dim
        shift = Stream(seed, param, SHIFTS).below(dim, block // 4)[block % 4]
        found[k, (k + shift) % dim] = sign(Stream(seed, param, SIGNS), k)
    return found


_MATRICES: dict[Any, Tensor] = {}


def projected(grads: Any, dim: int, seed: int, two_sided: bool) -> Tensor:
    """The loop's gradients, projected."""
    total = torch.zeros(N, dim, dtype=torch.float64)
    for i, g in enumerate(optree.tree_leaves(grads)):
        key = tuple(g.shape[1:]), i, dim, seed, two_sided
        if key not in _MATRICES:
            _MATRICES[key] = matrix(*key)
        total += g.reshape(N, g[0].numel()) @ _MATRICES[key]
    return total


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.usefixtures("workspace")
def test_the_loops_gradients_projected(case: Case) -> None:
    fn, params, batch = case.make()
    for dim, two_sided in ((5, False), (16, False), (6, True)):
        want = projected(case.loop_grads(), dim, 3, two_sided)
        kind: Any = "two_sided" if two_sided else "sketch"
        with warns(case):
            assert_close(psgrad.projected_grads(fn, params, batch, dim, seed=3, kind=kind), want)
            assert_close(psgrad.projected_grads(fn, params, batch, dim, seed=3, kind=kind, chunk_size=3), want)


def moments(params: Any) -> Any:
    generator = torch.Generator().manual_seed(2)
    return optree.tree_map(lambda p: torch.rand(p.shape, dtype=p.dtype, generator=generator), params)


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.id)
def test_gradients_divided_by_second_moments(case: Case) -> None:
    fn, params, batch = case.make()
    v = moments(params)
    scaled = optree.tree_map(lambda g, m: g / (m.sqrt() + 0.1), case.loop_grads(), v)
    for kind in ("sketch", "two_sided"):
        want = projected(scaled, 6, 1, kind == "two_sided")
        for options in ({}, {"chunk_size": 3}):
            with warns(case):
                found = psgrad.projected_grads(fn, params, batch, 6, seed=1, kind=kind, normalize=v, eps=0.1, **options)
            assert_close(found, want)


@pytest.mark.parametrize("case", CASES[::3], ids=lambda case: case.id)
def test_a_projector_of_ones_own(case: Case) -> None:
    fn, params, batch = case.make()
    named = dict(psgrad.display.leaves(params))
    generator = torch.Generator().manual_seed(2)
    own = {k: torch.randn(p.numel(), 5, dtype=p.dtype, generator=generator) for k, p in named.items()}
    project = lambda name, grads: grads.reshape(len(grads), own[name].shape[0]) @ own[name]
    want = flat_rows(case.loop_grads()) @ torch.cat(list(own.values()))
    for options in ({}, {"chunk_size": 3}):
        with warns(case):
            assert_close(psgrad.projected_grads(fn, params, batch, 5, projector=project, **options), want)


def flat_rows(grads: Any) -> Tensor:
    return torch.cat([t.reshape(len(t), t[0].numel()) for t in optree.tree_leaves(grads)], 1)


def test_a_large_parameter_goes_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """And of each part in all samples, so that signs are drawn once; and the same numbers."""
    outer = Outer(torch.randn(6, 3, 20).double(), torch.randn(6, 3, 30).double())
    own = Sum((Placement(None, outer),), torch.Size((30, 20)))
    ask = Projection(32, 0, 0, False, None, torch.float64)
    want = ask(own)
    drawn = []
    run = Stream.run
    monkeypatch.setattr(Stream, "run", lambda self, a, b, *rest: drawn.append((a, b)) or run(self, a, b, *rest))
    monkeypatch.setattr("psgrad.factors.costs.WORKSPACE", 1000)
    assert_close(ask(own), want)
    assert len(drawn) > 3
    assert [a for a, _ in drawn[1:]] == [b for _, b in drawn[:-1]]


@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("n", [1, 9, 70])
def test_parts_of_a_matrix_add_up(monkeypatch: pytest.MonkeyPatch, n: int, t: int) -> None:
    """Whatever the parts are, in rows and in samples."""
    outer = Outer(torch.randn(n, t, 20).double(), torch.randn(n, t, 70).double())
    own = Sum((Placement(None, outer),), torch.Size((70, 20)))
    for dim in (8, 33, 5000):
        want = Projection(dim, 0, 0, False, None, torch.float64)(
            Sum((Placement(None, Dense(outer.dense())),), torch.Size((70, 20)))
        )
        for size in (1, 3000, 200_000):
            monkeypatch.setattr(costs, "TILE", size)
            monkeypatch.setattr(costs, "WORKSPACE", size)
            assert_close(Projection(dim, 0, 0, False, None, torch.float64)(own), want)


@pytest.mark.parametrize("t", [1, 128])
@pytest.mark.parametrize("row_bytes", [0, 4, 1024, 1 << 18, 1 << 30])
def test_parts_fit_the_workspace(t: int, row_bytes: int) -> None:
    for n in (1, 8, 1000):
        samples, rows = costs.sketch_piece(n, t, row_bytes)
        assert 1 <= samples <= n
        assert rows >= 1
        assert samples * rows * row_bytes <= max(costs.WORKSPACE, row_bytes)


@pytest.mark.parametrize(("d", "dim"), [(8, 16), (6, 16), (16, 16), (40, 16), (5, 1), (3, 200)])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_table_row_by_row_and_as_a_whole(monkeypatch: pytest.MonkeyPatch, d: int, dim: int, scaled: bool) -> None:
    rows = Rows(torch.randint(30, (4, 9)), torch.randn(4, 9, d).double(), 30)
    own = Sum((Placement(None, rows),), torch.Size((30, d)))
    ask = Projection(dim, 1, 2, False, torch.rand(30, d).double() if scaled else None, torch.float64)
    found = []
    for few in (False, True):
        monkeypatch.setattr(costs, "reads_few", lambda t, rows, few=few: few)
        found.append(ask(own))
    assert_close(found[1], found[0])


def test_what_is_not_written_out() -> None:
    """A table in either kind; in two-sided ones linear layers neither."""
    table = Sum((Placement(None, Rows(torch.randint(50, (4, 3)), torch.randn(4, 3, 8), 50)),), torch.Size((50, 8)))
    with nothing_written(Rows):
        assert Projection(16, 0, 0, False, None, torch.float32)(table).shape == (4, 16)
        assert Projection(16, 0, 0, True, None, torch.float32)(table).shape == (4, 16)
    calls = []
    dense = Outer.dense
    outer = Outer(torch.randn(4, 3, 40), torch.randn(4, 3, 50))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Outer, "dense", lambda self, out=None: calls.append(self.shape) or dense(self, out))
        Projection(16, 0, 0, True, None, torch.float32)(Sum((Placement(None, outer),), torch.Size((50, 40))))
    assert calls == [(4, 4)]


# ---- unbiased, and of the variance that is stated ------------------------------------------------------------

SEEDS = 600


def pairs(two_sided: bool, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Estimates (SEEDS, N, N) of the inner products, the exact ones, and the bounds on the variance.

    A matrix of outer products, whose variance is the worst from two sides; a table; a vector.
    """
    torch.manual_seed(0)
    outer = Sum(
        (Placement(None, Outer(torch.randn(3, 12).double(), torch.randn(3, 10).double())),), torch.Size((10, 12))
    )
    rows = Rows(torch.randint(9, (3, 4)), torch.randn(3, 4, 7).double(), 9)
    table = Sum((Placement(None, rows),), torch.Size((9, 7)))
    vector = Sum((Placement(None, Dense(torch.randn(3, 40).double())),), torch.Size((40,)))
    owns = [outer, table, vector]
    found = []
    for seed in range(SEEDS):
        each = sum(Projection(dim, seed, i, two_sided, None, torch.float64)(own) for i, own in enumerate(owns))
        found.append(each @ each.mT)
    parts = [own.dense().flatten(1) for own in owns]
    grads = torch.cat(parts, 1)
    exact, squares = grads @ grads.mT, grads.square().sum(1)
    bound = (squares[:, None] * squares + exact.square()) / dim
    if two_sided:
        for own, g in zip(owns, parts, strict=True):
            if g.shape[1] > dim:
                o, i = own.shape if len(own.shape) == 2 else (own.shape[0], 1)
                p, q = two_sizes(o, i, dim)
                norms = g.square().sum(1)
                bound = bound + 2 * (1 / p + 1 / q + 2 / (p * q)) * norms[:, None] * norms
    return torch.stack(found), exact, bound, grads


@pytest.mark.parametrize("dim", [16, 49])
@pytest.mark.parametrize("two_sided", [False, True])
def test_inner_products_are_estimated_without_bias(two_sided: bool, dim: int) -> None:
    found, exact, bound, _ = pairs(two_sided, dim)
    error = found.std(0) / SEEDS**0.5
    assert bool(((found.mean(0) - exact).abs() < 3 * error).all())
    assert bool((found.var(0) < bound * (1 + 4 * (2 / SEEDS) ** 0.5)).all())
    assert bool((found.var(0) > 0).all())


def test_a_sketch_is_as_good_as_a_dense_projection() -> None:
    found, _, _, grads = pairs(False, 16)
    dense = []
    for seed in range(SEEDS):
        a = torch.randn(grads.shape[1], 16, generator=torch.Generator().manual_seed(seed)).double() / 4
        dense.append((grads @ a) @ (grads @ a).mT)
    assert float(found.var(0).mean()) < 1.1 * float(torch.stack(dense).var(0).mean())


def test_as_many_numbers_as_there_are() -> None:
    """Nothing meets: inner products within a parameter are exact."""
    fn = lambda w, x: F.linear(x, w).tanh().sum()
    w, x = torch.randn(4, 6).double(), torch.randn(5, 2, 6).double()
    for kind in ("sketch", "two_sided"):
        rows = psgrad.projected_grads(fn, w, x, 24, kind=kind)
        assert_close(rows @ rows.mT, psgrad.gram(fn, w, x))


def test_sizes_of_two_sides() -> None:
    for o, i, dim in (
        (100, 200, 64),
        (3, 1000, 64),
        (1000, 2, 64),
        (5, 20, 7),
        (1, 100, 64),
        (100, 100, 4096),
        (9, 9, 1),
    ):
        p, q = two_sizes(o, i, dim)
        assert 1 <= p <= o
        assert 1 <= q <= i
        assert p * q <= dim
        assert p * q >= min(o * i, dim) / 2 or p == q == isqrt(dim)


# ---- the same everywhere -------------------------------------------------------------------------------------


def problem() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 8, 3), nn.Tanh(), nn.Flatten(), nn.Linear(80, 40), nn.Tanh(), nn.Linear(40, 3))
    fn, params = psgrad.from_module(model, F.cross_entropy)
    return fn, params, (torch.randn(15, 2, 12), torch.randint(3, (15,)))


@pytest.mark.parametrize("kind", ["sketch", "two_sided"])
def test_chunks_give_the_same_rows(kind: Any) -> None:
    fn, params, batch = problem()
    want = psgrad.projected_grads(fn, params, batch, 64, kind=kind)
    for options in ({"chunk_size": 1}, {"chunk_size": 7}, {"chunk_size": 15}, {"max_bytes": 100_000}):
        found = psgrad.projected_grads(fn, params, batch, 64, kind=kind, **options)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
    other = psgrad.projected_grads(fn, params, batch, 64, kind=kind, seed=1)
    assert float((other - want).norm()) > float(want.norm())


_RESTARTED = """
import torch
torch.set_num_threads(1)
torch.randn(3)  # whatever was drawn before
from tests.test_projected import digest
print(digest())
"""


def digest() -> str:
    """Of a projection of numbers that are exact in float64: any order of sums gives the same."""
    torch.set_num_threads(1)
    exact = lambda *shape: torch.arange(int(torch.Size(shape).numel()), dtype=torch.float64).view(shape) % 17 - 8
    outer = Sum((Placement(None, Outer(exact(3, 4, 20), exact(3, 4, 30))),), torch.Size((30, 20)))
    found = Projection(64, 12345678901234567890, 2, False, None, torch.float64)(outer)
    return hashlib.sha256(repr(found.tolist()).encode()).hexdigest()


def test_a_new_process_has_the_same_projection() -> None:
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _RESTARTED], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest() == RECORDED


RECORDED = "214ed19c9795385415acf523a3dc03064dddc2fbf5b0f1e8abe58861381694fd"  # on any machine


def test_generators_are_left_alone() -> None:
    fn, params, batch = problem()
    before = torch.get_rng_state()
    rows = psgrad.projected_grads(fn, params, batch, 16)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert torch.equal(psgrad.projected_grads(fn, params, batch, 16), rows)


# ---- samples, dtypes, errors ---------------------------------------------------------------------------------


def test_a_bad_sample_touches_its_own_row_only() -> None:
    w, x = torch.randn(3, 4), torch.randn(5, 4)
    good = torch.tensor([0, 1, 3, 4])
    bad = x.clone()
    bad[2, 1] = torch.nan
    for kind in ("sketch", "two_sided"):
        want = psgrad.projected_grads(linear_loss, w, x, 4, kind=kind)
        for options in ({}, {"chunk_size": 2}):
            found = psgrad.projected_grads(linear_loss, w, bad, 4, kind=kind, **options)
            assert_close(found[good], want[good])
            assert not found[2].isfinite().all()


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_samples_that_do_not_count(chunk_size: int | None) -> None:
    w, x, valid = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([True, False, True, True, False])
    padded = x.masked_fill(~valid[:, None], torch.nan)
    both = lambda w, x: (linear_loss(w, x), x.sum())
    found, aux = psgrad.projected_grads(both, w, padded, 5, valid=valid, chunk_size=chunk_size, has_aux=True)
    assert_close(found[valid], psgrad.projected_grads(linear_loss, w, x[valid], 5))
    assert not found[~valid].any()
    assert_close(aux, x.sum(1).where(valid, 0))
    assert psgrad.projected_grads(linear_loss, w, x[:0], 5).shape == (0, 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    """Gradients that are sums of 50 products, 180,000: beyond float16."""
    x, w = torch.full((3, 50, 8), 60.0).to(dtype), torch.zeros(4, 8).to(dtype)
    fn = lambda w, x: 60 * F.linear(x, w).sum()
    exact = psgrad.projected_grads(fn, w.double(), x.double(), 6)
    for kind in ("sketch", "two_sided"):
        found = psgrad.projected_grads(fn, w, x, 6, kind=kind)
        assert found.dtype == torch.float32
        assert found.isfinite().all()
    torch.testing.assert_close(psgrad.projected_grads(fn, w, x, 6).double(), exact, rtol=1e-2, atol=1e3)


def test_tied_and_shared_weights_have_every_part() -> None:
    fn, params, batch = tied_gpt()
    rows = flat(psgrad.testing.loop_grads(fn, params, batch))
    found = psgrad.projected_grads(fn, params, batch, 20_000)
    exact = rows @ rows.mT
    assert float((found @ found.mT - exact).abs().max()) < 0.1 * float(exact.max())


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "dim": (
        {"dim": 0},
        psgrad.ArgumentError,
        "dim=0 is not a positive int\n  say how many numbers each sample is to get.",
    ),
    "seed": (
        {"seed": -1},
        psgrad.ArgumentError,
        "seed=-1 is not an int from 0 to 2^64 - 1\n  give one: it says which projection.",
    ),
    "kind": (
        {"kind": "dense"},
        psgrad.ArgumentError,
        'kind=\'dense\' is not one of "sketch", "two_sided"\n'
        "  sketch: the variance of a dense projection; two_sided: faster for samples of one position.",
    ),
    "projector": (
        {"projector": 3},
        psgrad.ArgumentTypeError,
        "projector is a int, not a function\n  give projector(name, grads) -> (n, dim).",
    ),
    "projector's shape": (
        {"projector": lambda name, grads: grads},
        psgrad.ArgumentError,
        "projector returned a tensor of shape (5, 3, 4) for 'params', not one of shape (5, 8)\n"
        "  give one row of dim numbers for every gradient.",
    ),
    "eps": (
        {"eps": -1.0},
        psgrad.ArgumentError,
        "eps=-1.0 is not a number from 0 on\n  give one: it is added to the root of moments.",
    ),
    "moments": (
        {"normalize": torch.ones(4)},
        psgrad.ArgumentError,
        "normalize has shape (4,), neither (3, 4) nor (K, 3, 4)\n"
        "  give one direction, or K of them along a leading axis.",
    ),
    "many moments": (
        {"normalize": torch.ones(2, 3, 4)},
        psgrad.ArgumentError,
        "normalize has a leading axis that params do not have\n  give one number for every number of params.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    options, kind, message = REFUSED[name]
    options = {"dim": 8} | options
    with pytest.raises(kind) as error:
        psgrad.projected_grads(linear_loss, torch.randn(3, 4), torch.randn(5, 4), options.pop("dim"), **options)
    assert str(error.value) == message


# ---- what it is for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["gram", "sketch", "two_sided"])
def test_flipped_labels_are_found(by: Any) -> None:
    """One in ten labels of the digits is wrong: four fifths of these are in the first fifth of a ranking.

    Ranked by a sample's influence on itself, as TracIn does.
    """
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    generator = torch.Generator().manual_seed(0)
    flipped = torch.randperm(len(y), generator=generator)[: len(y) // 10]
    labels = y.clone()
    labels[flipped] = (y[flipped] + torch.randint(1, 10, (len(flipped),), generator=generator)) % 10
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    fn, params = psgrad.from_module(model, F.cross_entropy)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()
    if by == "gram":
        kernel = psgrad.gram(fn, params, (x, labels))
    else:
        rows = psgrad.projected_grads(fn, params, (x, labels), 512, kind=by)
        kernel = rows @ rows.mT
    first = kernel.diagonal().argsort(descending=True)[: len(y) // 5]
    share = float(torch.isin(flipped, first).float().mean())
    assert share >= 0.8
