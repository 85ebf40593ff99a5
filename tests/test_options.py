"""The options of per_sample_grads: in_dims, has_aux, return_value, chunk_size, max_bytes, out, randomness."""

import math
import random
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psgrad
from psgrad.streaming.budget import Meter
from psgrad.torch_.storage import first_clash, is_distinct


@pytest.fixture(autouse=True)
def float64() -> None:
    torch.set_default_dtype(torch.float64)  # conftest puts it back


def fn(p: Any, x: Any) -> Any:
    return torch.sin(F.linear(x, p["w"], p["b"])).sum()


def params() -> Any:
    generator = torch.Generator().manual_seed(1)
    return {"w": torch.randn(3, 4, generator=generator), "b": torch.randn(3, generator=generator)}


def close(ours: Any, want: Any) -> None:
    torch.testing.assert_close(ours, want, rtol=1e-10, atol=1e-12)


def branching(p: Any, x: Any) -> Any:
    """Splits the batch: samples disagree."""
    return fn(p, x) if x.sum() > 0 else fn(p, x).square()


def looping(p: Any, x: Any) -> Any:
    """vmap refuses a boolean mask: samples run one by one."""
    return fn(p, x) + x[x > 0].sum() * p["b"].sum()


def counted(function: Any) -> Any:
    """`function`, and a list that grows with each of its calls."""
    calls = []

    def wrapper(*args: Any) -> Any:
        calls.append(1)
        return function(*args)

    return wrapper, calls


# ---- in_dims ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_in_dims_as_one_int(dim: Any) -> None:
    p, x = params(), torch.randn(5, 2, 4)
    close(psgrad.per_sample_grads(fn, p, x.movedim(0, dim), in_dims=dim), psgrad.testing.loop_grads(fn, p, x))


def test_in_dims_as_a_prefix() -> None:
    """One int for a whole branch of the batch, another for a leaf."""
    p, x, y, z = params(), torch.randn(5, 4), torch.randn(5, 4), torch.randn(5, 4)
    f = lambda p, s: fn(p, s[0]["x"] + 2 * s[0]["y"]) * s[1].sum()
    want = psgrad.testing.loop_grads(f, p, ({"x": x, "y": y}, z))
    close(psgrad.per_sample_grads(f, p, ({"x": x.t(), "y": y.t()}, z), in_dims=(1, 0)), want)
    close(psgrad.per_sample_grads(f, p, ({"x": x.t(), "y": y}, z.t()), in_dims=({"x": 1, "y": 0}, -1)), want)


@pytest.mark.parametrize("shared", [torch.tensor(2.0), torch.ones(4), 2.0])
def test_in_dims_none_shares_a_leaf(shared: Any) -> None:
    p, x = params(), torch.randn(5, 4)
    ours = psgrad.per_sample_grads(lambda p, s: fn(p, s[0] * s[1]), p, (x, shared), in_dims=(0, None))
    close(ours, psgrad.testing.loop_grads(lambda p, x: fn(p, x * shared), p, x))


def test_in_dims_none_shares_a_branch_of_anything() -> None:
    """Strings, numbers and None travel to fn as they are."""
    seen = []

    def f(p: Any, s: Any) -> Any:
        seen.append(s[1])
        return fn(p, s[0])

    extra = {"name": "a", "size": 3, "nothing": None}
    psgrad.per_sample_grads(f, params(), (torch.randn(5, 4), extra), in_dims=(0, None))
    assert seen == [extra]


def test_none_in_the_batch() -> None:
    p, x = params(), torch.randn(5, 4)
    f = lambda p, s: fn(p, s["x"]) if s["mask"] is None else fn(p, s["x"] * s["mask"])
    close(psgrad.per_sample_grads(f, p, {"x": x, "mask": None}), psgrad.testing.loop_grads(fn, p, x))


@pytest.mark.parametrize(
    "function", [branching, pytest.param(looping, marks=pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning"))]
)
def test_in_dims_when_samples_are_split(function: Any) -> None:
    p, x = params(), torch.randn(7, 4)
    want = psgrad.testing.loop_grads(function, p, x)
    close(psgrad.per_sample_grads(function, p, x.t(), in_dims=1), want)
    close(psgrad.per_sample_grads(function, p, x.t(), in_dims=-1, chunk_size=3), want)


def test_nested_batches() -> None:
    class Sample(NamedTuple):
        x: torch.Tensor
        rest: dict

    p, x, y = params(), torch.randn(5, 4), torch.randint(3, (5,))
    f = lambda p, s: F.cross_entropy(F.linear(s.x, p["w"], p["b"]), s.rest["y"][0])
    want = psgrad.testing.loop_grads(lambda p, s: F.cross_entropy(F.linear(s[0], p["w"], p["b"]), s[1]), p, (x, y))
    close(psgrad.per_sample_grads(f, p, Sample(x, {"y": [y]})), want)


# ---- has_aux and return_value -------------------------------------------------------------------------


def with_aux(p: Any, x: Any) -> Any:
    out = F.linear(x, p["w"], p["b"])
    aux = {"out": out, "top": out.argmax(), "pair": (x.sum() > 0, [7, 0.5, True]), "none": None}
    return torch.sin(out).sum(), aux


def expected_aux(p: Any, x: Any) -> Any:
    out = F.linear(x, p["w"], p["b"])
    n = len(x)
    numbers = [torch.full((n,), 7), torch.full((n,), 0.5), torch.full((n,), True)]
    return {"out": out, "top": out.argmax(-1), "pair": (x.sum(-1) > 0, numbers), "none": None}


def same_tree(ours: Any, want: Any) -> None:
    assert optree.tree_structure(ours) == optree.tree_structure(want)
    for a, b in zip(optree.tree_leaves(ours), optree.tree_leaves(want), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("chunk_size", [None, 1, 3])
@pytest.mark.parametrize("n", [0, 1, 5])
def test_what_comes_back_and_in_which_order(n: Any, chunk_size: Any) -> None:
    p, x = params(), torch.randn(n, 4)
    grads, values = psgrad.testing.loop_grads(fn, p, x), torch.sin(F.linear(x, p["w"], p["b"])).sum(-1)
    options = {"chunk_size": chunk_size}
    same_tree(psgrad.per_sample_grads(fn, p, x, **options), grads)
    same_tree(psgrad.per_sample_grads(fn, p, x, return_value=True, **options), (grads, values))
    same_tree(psgrad.per_sample_grads(with_aux, p, x, has_aux=True, **options), (grads, expected_aux(p, x)))
    same_tree(
        psgrad.per_sample_grads(with_aux, p, x, has_aux=True, return_value=True, **options),
        (grads, (values, expected_aux(p, x))),
    )


def test_the_order_is_that_of_torch_func() -> None:
    p, x = params(), torch.randn(5, 4)
    f = lambda p, x: (fn(p, x), {"x2": 2 * x})
    theirs = torch.vmap(torch.func.grad_and_value(f, has_aux=True), in_dims=(None, 0))(p, x)
    same_tree(psgrad.per_sample_grads(f, p, x, has_aux=True, return_value=True), theirs)


def test_aux_without_leaves() -> None:
    p, x = params(), torch.randn(5, 4)
    for aux in ({}, None, ()):
        _, back = psgrad.per_sample_grads(lambda p, x, aux=aux: (fn(p, x), aux), p, x, has_aux=True)
        assert back == aux


def test_aux_and_values_are_detached() -> None:
    p, x = {k: t.requires_grad_() for k, t in params().items()}, torch.randn(5, 4)
    _, (values, aux) = psgrad.per_sample_grads(with_aux, p, x, has_aux=True, return_value=True)
    assert not values.requires_grad
    assert not aux["out"].requires_grad


def test_aux_of_a_split_batch() -> None:
    p, x = params(), torch.randn(7, 4)
    f = lambda p, x: (branching(p, x), {"x": x, "positive": 1 if x.sum() > 0 else 0})
    grads, (values, aux) = psgrad.per_sample_grads(f, p, x, has_aux=True, return_value=True)
    close(grads, psgrad.testing.loop_grads(branching, p, x))
    close(values, torch.stack([branching(p, row) for row in x]))
    assert torch.equal(aux["x"], x)
    assert torch.equal(aux["positive"], (x.sum(1) > 0).long())


def test_aux_of_a_split_batch_with_another_dtype_per_branch() -> None:
    p, x = params(), torch.tensor([[1.0] * 4, [-1.0] * 4, [2.0] * 4])
    f = lambda p, x: (fn(p, x), 1 if x.sum() > 0 else 0.5)
    _, aux = psgrad.per_sample_grads(f, p, x, has_aux=True)
    torch.testing.assert_close(aux, torch.tensor([1.0, 0.5, 1.0]), check_dtype=False)


@pytest.mark.parametrize(
    "aux",
    [lambda x: {"a": x} if x.sum() > 0 else {"b": x}, lambda x: x if x.sum() > 0 else x[:2]],
    ids=["keys", "shape"],
)
def test_aux_of_a_split_batch_that_does_not_fit_together(aux: Any) -> None:
    """Another structure or shape per sample cannot be stacked: an error of psgrad's own, never a wrong key."""
    x = torch.tensor([[1.0] * 4, [-1.0] * 4, [2.0] * 4])
    with pytest.raises(psgrad.PsgradError, match="aux"):
        psgrad.per_sample_grads(lambda p, x: (fn(p, x), aux(x)), params(), x, has_aux=True)


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
def test_aux_of_the_loop() -> None:
    p, x = params(), torch.randn(5, 4)
    f = lambda p, x: (looping(p, x), {"count": (x > 0).sum(), "x": x, "seven": 7})
    grads, (values, aux) = psgrad.per_sample_grads(f, p, x, has_aux=True, return_value=True)
    close(grads, psgrad.testing.loop_grads(looping, p, x))
    close(values, torch.stack([looping(p, row) for row in x]))
    same_tree(aux, {"count": (x > 0).sum(1), "x": x, "seven": torch.full((5,), 7)})


def test_values_have_the_dtype_of_the_loss() -> None:
    p = {k: t.float() for k, t in params().items()}
    x = torch.randn(5, 4, dtype=torch.float32)
    _, values = psgrad.per_sample_grads(lambda p, x: fn(p, x).double(), p, x, return_value=True)
    assert values.dtype == torch.float64
    assert values.shape == (5,)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_values_have_one_axis(shape: Any) -> None:
    _, values = psgrad.per_sample_grads(
        lambda p, x: fn(p, x).view(shape), params(), torch.randn(5, 4), return_value=True
    )
    assert values.shape == (5,)


# ---- chunk_size ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7, 8, 100])
def test_chunk_size(size: Any) -> None:
    """The answer is the same, and so many samples run at once."""
    p, x = params(), torch.randn(7, 4)
    f, calls = counted(fn)
    close(psgrad.per_sample_grads(f, p, x, chunk_size=size), psgrad.testing.loop_grads(fn, p, x))
    assert len(calls) == math.ceil(7 / min(size, 7))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_chunk_size_when_samples_are_split(size: Any) -> None:
    p, x = params(), torch.randn(7, 4)
    close(psgrad.per_sample_grads(branching, p, x, chunk_size=size), psgrad.testing.loop_grads(branching, p, x))


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
@pytest.mark.parametrize("size", [1, 2, 5])
def test_chunk_size_in_the_loop(size: Any) -> None:
    p, x = params(), torch.randn(7, 4)
    close(psgrad.per_sample_grads(looping, p, x, chunk_size=size), psgrad.testing.loop_grads(looping, p, x))


def test_chunk_size_with_unused_parameters() -> None:
    p, x = params() | {"idle": torch.randn(2)}, torch.randn(7, 4)
    grads = psgrad.per_sample_grads(fn, p, x, chunk_size=3)
    assert torch.equal(grads["idle"], torch.zeros(7, 2))


# ---- max_bytes ----------------------------------------------------------------------------------------


def conv_net() -> Any:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(),
        nn.Linear(512, 4),
    )
    function, p = psgrad.from_module(net, F.mse_loss)
    return function, p, (torch.randn(40, 3, 10, 10), torch.randn(40, 4)), [*net.buffers()]


def sequence_net() -> Any:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    function, p = psgrad.from_module(layer, F.mse_loss)
    return function, p, (torch.randn(40, 12, 16), torch.randn(40, 12, 16)), []


def branching_net() -> Any:
    """fn looks at values: nothing is known from shapes alone."""
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    function, p = psgrad.from_module(net, F.mse_loss)

    def branch(p: Any, s: Any) -> Any:
        loss = function(p, s)
        return loss * 2 if s[0].sum() > 1e9 else loss

    return branch, p, (torch.randn(40, 12, 16), torch.randn(40, 12, 16)), []


def two_way_net() -> Any:
    """Samples disagree on the branch: each chunk is split."""
    function, p, batch, known = branching_net()
    return (lambda p, s: function(p, s) * (2 if s[0].sum() > 0 else 1)), p, batch, known


def measured(function: Any, p: Any, batch: Any, known: Any, **options: Any) -> Any:
    """The result, and the most bytes that were alive at once beyond inputs and result."""
    n = len(optree.tree_leaves(batch)[0])
    out = optree.tree_map(lambda t: t.new_empty(n, *t.shape), p)
    with Meter([*optree.tree_leaves((p, batch, out)), *known]) as meter:
        grads = psgrad.per_sample_grads(function, p, batch, out=out, **options)
    return grads, meter.peak


@pytest.mark.parametrize("make", [conv_net, sequence_net, branching_net, two_way_net])
@pytest.mark.parametrize("share", [2, 5, 10])
def test_max_bytes_is_respected(make: Any, share: Any) -> None:
    function, p, batch, known = make()
    want, all_at_once = measured(function, p, batch, known)
    bound = all_at_once // share
    psgrad.per_sample_grads(function, p, batch, max_bytes=bound)  # works out the chunk size, on fake tensors
    grads, peak = measured(function, p, batch, known, max_bytes=bound)
    close(grads, want)
    assert peak <= 1.1 * bound
    assert peak > 0.4 * bound  # and made use of


def test_max_bytes_that_all_samples_fit() -> None:
    function, p, batch, known = conv_net()
    _, all_at_once = measured(function, p, batch, known)
    f, calls = counted(function)
    psgrad.per_sample_grads(f, p, batch, max_bytes=2 * all_at_once)  # works it out
    calls.clear()
    psgrad.per_sample_grads(f, p, batch, max_bytes=2 * all_at_once)
    assert len(calls) == 1


def test_max_bytes_is_what_explain_says() -> None:
    function, p, batch, known = conv_net()
    _, all_at_once = measured(function, p, batch, known)
    report = psgrad.explain(function, p, batch, max_bytes=all_at_once // 4)
    assert abs(report.peak_bytes - all_at_once) <= 0.1 * all_at_once
    f, calls = counted(function)
    psgrad.per_sample_grads(f, p, batch, max_bytes=all_at_once // 4)
    calls.clear()
    psgrad.per_sample_grads(f, p, batch, max_bytes=all_at_once // 4)
    assert len(calls) == math.ceil(40 / report.chunk_size)


def test_max_bytes_follows_in_dims() -> None:
    """A choice made where a leaf is shared is not taken over where each sample has its own."""
    p, batch = {"w": torch.randn(())}, (torch.randn(64), torch.randn(64, 64))
    f = lambda p, s: torch.sin(s[0] * s[1] * p["w"]).sum()  # 64 numbers a sample, or 64 x 64
    bound = measured(f, p, batch, [], in_dims=(0, 0))[1]
    assert measured(f, p, batch, [], in_dims=(0, None))[1] > 10 * bound
    for in_dims in ((0, 0), (0, None)):
        psgrad.per_sample_grads(f, p, batch, in_dims=in_dims, max_bytes=bound)
        assert measured(f, p, batch, [], in_dims=in_dims, max_bytes=bound)[1] <= 1.1 * bound


@pytest.mark.parametrize("share", [2.5, 3.5, 6])
def test_max_bytes_makes_even_chunks(share: Any) -> None:
    function, p, batch, known = conv_net()
    _, all_at_once = measured(function, p, batch, known)
    sizes = []
    f = lambda p, s: sizes.append(torch._C._functorch.get_unwrapped(s[0]).shape[0]) or function(p, s)
    psgrad.per_sample_grads(f, p, batch, max_bytes=int(all_at_once / share))
    sizes.clear()
    psgrad.per_sample_grads(f, p, batch, max_bytes=int(all_at_once / share))
    each = math.ceil(40 / len(sizes))
    assert len(sizes) > 1
    assert sizes == [min(each, 40 - start) for start in range(0, 40, each)]


def test_max_bytes_of_no_samples() -> None:
    grads = psgrad.per_sample_grads(fn, params(), torch.randn(0, 4), max_bytes=1)
    assert grads["w"].shape == (0, 3, 4)


def test_max_bytes_is_reproducible_under_a_seed() -> None:
    """Measuring draws no random numbers, even where fn has to run for it."""

    def f(p: Any, x: Any) -> Any:
        h = F.dropout(F.linear(x, p["w"]))
        return (h * 2 if x[0] > 0 else h).sum()

    p, x = params(), torch.randn(6, 4)

    def grads(**options: Any) -> Any:
        torch.manual_seed(0)
        return psgrad.per_sample_grads(f, {"w": p["w"]}, x, **options)["w"]

    first, again, unbounded = grads(max_bytes=10**6), grads(max_bytes=10**6), grads()
    assert torch.equal(first, again)
    assert torch.equal(first, unbounded)


# ---- out ----------------------------------------------------------------------------------------------


def stale(n: Any, p: Any) -> Any:
    return {k: torch.full((n, *t.shape), torch.nan) for k, t in p.items()}


@pytest.mark.parametrize(
    "function",
    [fn, branching, pytest.param(looping, marks=pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning"))],
)
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_out_is_written_and_returned(function: Any, chunk_size: Any) -> None:
    p, x = params() | {"idle": torch.randn(2, 2)}, torch.randn(7, 4)
    out = stale(7, p)
    tensors = dict(out)
    grads = psgrad.per_sample_grads(function, p, x, out=out, chunk_size=chunk_size)
    assert grads is out
    assert all(out[k] is t for k, t in tensors.items())
    close(out, psgrad.testing.loop_grads(function, p, x))
    for x in (torch.randn(7, 4), torch.randn(7, 4)):  # what an earlier call left does not count
        psgrad.per_sample_grads(function, p, x, out=out, chunk_size=chunk_size)
        close(out, psgrad.testing.loop_grads(function, p, x))


LAYOUTS = {
    "transposed": lambda t: torch.full_like(t.mT.contiguous(), torch.nan).mT,
    "a slice": lambda t: torch.full((len(t), 5, 9), torch.nan)[:, 1:4, 2:6],
    "every other": lambda t: torch.full((len(t), 3, 8), torch.nan)[:, :, ::2],
    "samples last": lambda t: torch.full((3, 4, len(t)), torch.nan).movedim(-1, 0),
    "an offset": lambda t: torch.full((t.numel() + 1,), torch.nan)[1:].view(t.shape),
    "rows of a longer one": lambda t: torch.full((2 * len(t), 3, 4), torch.nan)[len(t) :],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_out_of_any_layout(layout: Any, chunk_size: Any) -> None:
    p, x = {"w": params()["w"]}, torch.randn(7, 4)
    f = lambda p, x: torch.sin(F.linear(x, p["w"])).sum()
    out = {"w": LAYOUTS[layout](torch.empty(7, 3, 4))}
    psgrad.per_sample_grads(f, p, x, out=out, chunk_size=chunk_size)
    close(out, psgrad.testing.loop_grads(f, p, x))


def test_out_leaves_the_memory_around_it_alone() -> None:
    p, x = {"w": params()["w"]}, torch.randn(7, 4)
    whole = torch.full((9, 5, 9), 13.0)
    psgrad.per_sample_grads(lambda p, x: F.linear(x, p["w"]).sum(), p, x, out={"w": whole[1:8, 1:4, 2:6]})
    whole[1:8, 1:4, 2:6] = 13.0
    assert (whole == 13.0).all()


def test_out_with_everything_else() -> None:
    p, x = params(), torch.randn(7, 4)
    out = stale(7, p)
    grads, (values, aux) = psgrad.per_sample_grads(with_aux, p, x, out=out, has_aux=True, return_value=True)
    assert grads is out
    close(out, psgrad.testing.loop_grads(fn, p, x))
    close(values, torch.sin(F.linear(x, p["w"], p["b"])).sum(-1))
    same_tree(aux, expected_aux(p, x))


def test_out_of_no_samples() -> None:
    p = params()
    out = stale(0, p)
    assert psgrad.per_sample_grads(fn, p, torch.randn(0, 4), out=out) is out


def test_out_of_views_of_one_buffer() -> None:
    """Parameters that are views of one flat tensor, gradients written into one matrix."""
    flat, x = torch.randn(15), torch.randn(7, 4)
    p = {"w": flat[:12].view(3, 4), "b": flat[12:]}
    rows = torch.full((7, 15), torch.nan)
    psgrad.per_sample_grads(fn, p, x, out={"w": rows[:, :12].view(7, 3, 4), "b": rows[:, 12:]})
    want = psgrad.testing.loop_grads(fn, p, x)
    close(rows, torch.cat([want["w"].flatten(1), want["b"]], 1))


APART = {
    "columns": lambda rows: (rows[:, :4], rows[:, 4:8]),
    "the other way round": lambda rows: (rows[:, 6:], rows[:, 2:6]),
    "pieces": lambda rows: (rows.view(-1)[:28].view(7, 4), rows.view(-1)[28:56].view(7, 4)),
    "every other": lambda rows: (rows[:, :8:2], rows[:, 1:8:2]),
    "samples last": lambda rows: (rows.view(10, 7).mT[:, :4], rows.view(10, 7).mT[:, 4:8]),
    "rows in between": lambda rows: (rows.view(14, 5)[::2, :4], rows.view(14, 5)[1::2, :4]),
}


@pytest.mark.parametrize("pieces", APART)
def test_out_of_pieces_of_one_buffer(pieces: Any) -> None:
    """That no number belongs to two of them is what counts, not that they are views of one storage."""
    rows, x = torch.full((7, 10), torch.nan), torch.randn(7, 4)
    a, b = APART[pieces](rows)
    p = {"a": torch.randn(4), "b": torch.randn(4)}
    f = lambda p, x: (p["a"] * x).sin().sum() + (p["b"] * x).cos().sum()
    out = psgrad.per_sample_grads(f, p, x, out={"a": a, "b": b})
    close(out, psgrad.testing.loop_grads(f, p, x))


def places(t: Any) -> Any:
    """Every byte of `t` in its storage."""
    index = torch.arange(t.untyped_storage().nbytes()).view(-1, t.itemsize)
    return (
        index.flatten()
        .as_strided((*t.shape, t.itemsize), (*(s * t.itemsize for s in t.stride()), 1), t.storage_offset() * t.itemsize)
        .flatten()
    )


def test_views_that_share_a_number() -> None:
    """Against all their places listed."""
    memory, pick, seen = torch.zeros(64), random.Random(0), set()

    def view() -> Any:
        t = memory if pick.random() < 0.8 else memory.view(torch.float16)
        shape = [pick.randint(1, 3) for _ in range(pick.randint(1, 3))]
        strides = [pick.randint(0, 8) for _ in shape]
        return t.as_strided(shape, strides, pick.randint(0, 12))

    for _ in range(3000):
        a, b = view(), view()
        distinct = len(places(a).unique()) == len(places(a))
        assert is_distinct(a) == distinct
        clash = not set(places(a).tolist()).isdisjoint(places(b).tolist())
        assert first_clash([a, b]) == ((0, 1) if clash else None)
        seen.add((distinct, clash))
    assert len(seen) == 4


def test_out_in_inference_mode() -> None:
    p, x = params(), torch.randn(7, 4)
    with torch.inference_mode():
        out = psgrad.per_sample_grads(fn, p, x, out=stale(7, p))
    close({k: t.clone() for k, t in out.items()}, psgrad.testing.loop_grads(fn, p, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_out_of_the_dtype_of_the_parameter(dtype: Any) -> None:
    """The product runs in float64; the result is what the parameter's dtype can hold of it."""
    p, x = {"w": params()["w"].to(dtype)}, torch.randn(7, 4)
    f = lambda p, x: torch.sin(x * p["w"]).sum()
    out = {"w": torch.empty(7, 3, 4, dtype=dtype)}
    psgrad.per_sample_grads(f, p, x, out=out)
    torch.testing.assert_close(out, psgrad.per_sample_grads(f, p, x), rtol=0, atol=0)
    torch.testing.assert_close(out["w"], psgrad.testing.loop_grads(f, p, x)["w"])


# ---- randomness ---------------------------------------------------------------------------------------


def noisy(p: Any, x: Any) -> Any:
    return (F.linear(x, p["w"], p["b"]) * torch.rand(3)).sum()


def test_randomness_different() -> None:
    torch.manual_seed(0)
    grads = psgrad.per_sample_grads(noisy, params(), torch.randn(20, 4))["b"]
    assert len(grads.unique(dim=0)) == 20


@pytest.mark.parametrize("chunk_size", [None, 1, 3])
def test_randomness_same(chunk_size: Any) -> None:
    """One draw for all samples, the one that a single call would make, whatever the chunks."""
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    options = {"randomness": "same", "chunk_size": chunk_size}
    grads = psgrad.per_sample_grads(noisy, params(), torch.randn(20, 4, generator=torch.Generator()), **options)["b"]
    torch.testing.assert_close(grads, want.expand(20, 3), rtol=0, atol=0)


def test_randomness_error_without_draws() -> None:
    p, x = params(), torch.randn(5, 4)
    close(psgrad.per_sample_grads(fn, p, x, randomness="error"), psgrad.testing.loop_grads(fn, p, x))
