"""Maps of factors, L g R^T, and Kronecker factors: beside the loop's gradients, and beside a record of every layer."""

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import psgrad
from psgrad.display import names_of
from psgrad.factors.maps import gram_of
from psgrad.factors.outer import Outer
from psgrad.factors.rows import Rows

from .cases import CASES, Case, N
from .test_contract import assert_close
from .test_dots import Everything, nothing_written
from .test_quantities import linear_loss, pytestmark, warns, workspace  # noqa: F401

Sides = tuple[Tensor | None, Tensor | None]


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


SIDES: dict[str, Callable[[int, int], Sides]] = {
    "both": lambda o, i: (randn(o, o), randn(i, i)),
    "diagonal": lambda o, i: (randn(o), randn(i)),
    "left": lambda o, i: (randn(o, o), None),
    "right": lambda o, i: (None, randn(i, i)),
    "diagonal and right": lambda o, i: (randn(o), randn(i, i)),
    "smaller": lambda o, i: (randn(2, o), randn(3, i)),
}


def as_matrix(side: Tensor | None, size: int) -> Tensor:
    side = torch.ones(size, dtype=torch.float64) if side is None else side
    return torch.diag(side) if side.dim() == 1 else side


def chosen(grads: Any, kind: str) -> tuple[dict[str, Sides], list[Tensor]]:
    """Sides for every parameter with axes, and what they make of gradients."""
    leaves, spec = optree.tree_flatten(grads)
    maps, want = {}, []
    for name, g in zip(names_of(spec), leaves, strict=True):
        if g.dim() < 2:
            want.append(g)
            continue
        o, i = g.shape[1], int(torch.Size(g.shape[2:]).numel())
        left, right = SIDES[kind](o, i)
        if g.dim() == 2:  # a vector has one column
            right = None
        maps[name] = left, right
        found = as_matrix(left, o) @ g.reshape(N, o, i) @ as_matrix(right, i).mT
        same = right is None or len(right) == i
        want.append(found.reshape(N, found.shape[1], *g.shape[2:]) if same else found)
    return maps, want


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.usefixtures("workspace")
def test_gradients_are_mapped_as_the_loops_are(case: Case) -> None:
    fn, params, batch = case.make()
    with warns(case):
        fg = psgrad.factored_grads(fn, params, batch)
    torch.manual_seed(0)
    for kind in SIDES:
        maps, want = chosen(case.loop_grads(), kind)
        mapped = fg.precondition(maps)
        rows = torch.cat([t.reshape(N, t[0].numel()) for t in want], 1)
        assert_close(optree.tree_leaves(mapped.dense()), want)
        assert_close(mapped.norms(), rows.norm(dim=1))
        assert_close(mapped.dots(), rows @ rows.mT)
        assert_close(optree.tree_leaves(mapped.mean()), [t.mean(0) for t in want])
        assert_close(mapped[1:].norms(), rows[1:].norm(dim=1))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_statistics_in_another_basis(case: Case) -> None:
    fn, params, batch = case.make()
    for kind in ("both", "smaller"):
        maps, want = chosen(case.loop_grads(), kind)
        basis = {name: tuple(t if t is None else t.mT for t in pair) for name, pair in maps.items()}
        for options in ({}, {"chunk_size": 3}):
            with warns(case):
                stats = psgrad.grad_stats(fn, params, batch, basis=basis, **options)
            assert_close(optree.tree_leaves(stats.mean), [t.mean(0) for t in want])
            assert_close(optree.tree_leaves(stats.variance), [(t - t.mean(0)).square().sum(0) / (N - 1) for t in want])
            squares = sum(t.reshape(N, t[0].numel()).square().sum(1) for t in want)
            assert_close(stats.sq_norms, squares)


def test_a_bound_on_memory_holds_in_another_basis() -> None:
    fn, params = psgrad.from_module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)), F.cross_entropy)
    batch = torch.randn(32, 20, 8), torch.randint(3, (32, 20))
    fn = lambda p, s, inner=fn: inner(p, (s[0].mean(0), s[1][0]))
    basis = {"0.weight": (torch.randn(16, 16), torch.randn(8, 8))}
    whole = psgrad.grad_stats(fn, params, batch, basis=basis)
    bounded = psgrad.grad_stats(fn, params, batch, basis=basis, max_bytes=30_000)
    assert_close(bounded.variance, whole.variance)


def test_factors_stay_factors() -> None:
    """Linear layers, tables, fused and split ones, convolutions: nothing is written out."""
    fn, params = psgrad.from_module(Everything().double(), lambda y, t: F.cross_entropy(y[0], t[0]))
    del params["normed.parametrizations.weight.original0"], params["normed.parametrizations.weight.original1"]
    batch = torch.randint(11, (5, 3)), torch.randint(11, (5, 3))
    fg = psgrad.factored_grads(fn, params, batch)
    grads = psgrad.testing.loop_grads(fn, params, batch)
    maps = {}
    for name, p in params.items():
        if p.dim() > 1:
            maps[name] = randn(len(p), len(p)), randn(p[0].numel(), p[0].numel())
    with nothing_written(Outer, Rows):
        mapped = fg.precondition(maps)
    sums = dict(zip(sorted(params), mapped._blocks[0].sums, strict=True))
    kinds = {name: {type(f).__name__ for _, f in own.terms} for name, own in sums.items() if own is not None}
    assert kinds["fused.weight"] == {"Outer"}
    assert kinds["table.weight"] == {"Outer"}
    assert kinds["conv.weight"] == {"Outer"}
    for name, (left, right) in maps.items():
        g = grads[name].flatten(2)
        assert_close(mapped.dense()[name].flatten(2), left @ g @ right.mT)


def test_a_preconditioned_inner_product() -> None:
    """The scores of K-FAC influence functions."""
    fn, params = psgrad.from_module(nn.Linear(4, 3).double(), F.cross_entropy)
    batch = randn(20, 4), torch.randint(3, (20,))
    found = psgrad.kron_factors(fn, params, batch)["weight"]
    inverses = [torch.linalg.inv(t + 0.1 * torch.eye(len(t))) for t in (found.output, found.input)]
    fg = psgrad.factored_grads(fn, {"weight": params["weight"], "bias": params["bias"]}, batch)
    scores = fg.precondition({"weight": tuple(inverses)}).dots(fg, per_param=True)["weight"]
    rows = fg.dense()["weight"].flatten(1)
    assert_close(scores, rows @ torch.kron(*inverses) @ rows.mT)


def test_maps_are_applied_in_full_precision_under_autocast() -> None:
    fg = psgrad.factored_grads(lambda w, x: F.linear(x, w).sin().sum(), torch.randn(3, 4), torch.randn(5, 2, 4))
    maps = {"params": (torch.randn(3, 3), torch.randn(4, 4))}
    want = fg.precondition(maps).dense()
    with torch.autocast("cpu", torch.bfloat16):
        found = fg.precondition(maps)
    torch.testing.assert_close(found.dense(), want)


def test_preconditioned_gradients_can_be_saved_and_joined() -> None:
    w, x = torch.randn(3, 4), torch.randn(5, 4)
    fg = psgrad.factored_grads(linear_loss, w, x)
    mapped = fg.precondition({"params": (torch.randn(2, 3), None)})
    both = psgrad.concat([mapped[:2], mapped[2:]])
    assert_close(both.norms(), mapped.norms())
    with pytest.raises(psgrad.ArgumentError, match="params is not the same in parts"):
        psgrad.concat([fg, mapped])
    with pytest.raises(psgrad.ArgumentError, match="other holds the gradients of other parameters"):
        fg.dots(mapped)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_mapped_in_float32(dtype: torch.dtype) -> None:
    w, x = torch.randn(3, 4).to(dtype), torch.randn(5, 2, 4).to(dtype)
    fn = lambda w, x: F.linear(x, w).tanh().sum()
    fg = psgrad.factored_grads(fn, w, x)
    left, right = 1e4 * torch.randn(3, 3), torch.randn(4, 4)
    want = left @ fg.dense().float() @ right.mT
    mapped = fg.precondition({"params": (left, right)})
    assert mapped.norms().dtype == torch.float32
    torch.testing.assert_close(mapped.norms(), want.flatten(1).norm(dim=1), rtol=2e-2, atol=1.0)
    assert mapped.mean().dtype == dtype


# ---- Kronecker factors -----------------------------------------------------------------------------------


class Recorder(TorchFunctionMode):
    """Keeps what goes into layers and comes out of them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Tensor, Tensor, Any, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (F.linear, F.conv1d, F.conv2d):
            out.retain_grad()
            self.calls.append((func, args[0], args[1], args[3:], out))
        elif func is F.embedding:
            out.retain_grad()
            self.calls.append((func, args[0], args[1], (), out))
        return out


def recorded(fn: Any, params: dict[str, Tensor], batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """The factors of every matrix, by ordinary autograd, sample by sample, call by call."""
    found: dict[str, list[Tensor]] = {
        name: [torch.zeros(p[0].numel(), p[0].numel()).double(), torch.zeros(len(p), len(p)).double()]
        for name, p in params.items()
        if p.dim() > 1
    }
    leaves = optree.tree_leaves(batch)
    for n in range(len(leaves[0])):
        own = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        with Recorder() as recorder:
            loss = fn(own, optree.tree_map(lambda t, n=n: t[n], batch))
        loss.backward()
        for func, x, w, options, out in recorder.calls:
            storages = {p.untyped_storage().data_ptr(): name for name, p in own.items()}
            name = storages.get(w.untyped_storage().data_ptr())
            if name is None or name not in found:
                continue
            inputs, output = found[name]
            assert out.grad is not None
            width = own[name][0].numel()
            if func is F.linear:
                x, g = x.reshape(-1, x.shape[-1]), out.grad.reshape(-1, out.shape[-1])
            elif func is F.embedding:
                inputs += out.grad.flatten(0, -2).mT @ out.grad.flatten(0, -2)
                output += torch.diag(torch.bincount(x.flatten(), minlength=len(output)).double())
                continue
            else:
                if x.dim() < w.dim():
                    x, grad = x[None], out.grad[None]
                else:
                    grad = out.grad
                stride, padding, dilation, *_ = (*options, 1, 0, 1)[:3]
                if func is F.conv1d:
                    x, grad, kernel = x[:, :, None], grad[:, :, None], (1, *w.shape[2:])
                    spread = {
                        "stride": (1, _one(stride)),
                        "padding": (0, _one(padding)),
                        "dilation": (1, _one(dilation)),
                    }
                else:
                    kernel, spread = tuple(w.shape[2:]), {"stride": stride, "padding": padding, "dilation": dilation}
                x = F.unfold(x, kernel, **spread).transpose(1, 2).flatten(0, 1)
                g = grad.movedim(1, -1).flatten(0, -2)
            row = (w.storage_offset() - own[name].storage_offset()) // width
            inputs += x.mT @ x
            output[row : row + g.shape[1], row : row + g.shape[1]] += g.mT @ g
    return {name: (a / len(leaves[0]), b / len(leaves[0])) for name, (a, b) in found.items()}


def _one(value: Any) -> int:
    return int(value[0]) if isinstance(value, (tuple, list)) else int(value)


def tokens() -> Any:
    fn, params = psgrad.from_module(Everything().double(), lambda y, t: F.cross_entropy(y[0], t[0]))
    return fn, params, (torch.randint(11, (6, 7)), torch.randint(11, (6, 7)))


def images() -> Any:
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 3, stride=2, dilation=2, padding=2), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Conv2d(3, 3, 1), nn.Flatten(), nn.Linear(27, 5)).double()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    return fn, params, (randn(6, 2, 6, 6), torch.randint(5, (6,)))


def twice() -> Any:
    """A layer called twice, on positions; a table of its own; a matrix that is used transposed."""

    def fn(p: Any, sample: Any) -> Tensor:
        x = F.embedding(sample, p["table"])
        for _ in range(2):
            x = F.linear(x, p["w"], p["b"]).tanh()
        return F.linear(x, p["v"]).square().sum()

    params = {"table": randn(9, 4), "w": randn(4, 4), "b": randn(4), "v": randn(3, 4)}
    return fn, params, torch.randint(9, (6, 5))


@pytest.mark.parametrize("options", [{}, {"chunk_size": 1}, {"chunk_size": 4}, {"max_bytes": 60_000}], ids=str)
@pytest.mark.parametrize("make", [tokens, images, twice])
def test_kronecker_factors_as_recorded(make: Any, options: Any) -> None:
    fn, params, batch = make()
    want = recorded(fn, params, batch)
    found = psgrad.kron_factors(fn, params, batch, **options)
    left_out = {"normed.parametrizations.weight.original0", "normed.parametrizations.weight.original1"}
    assert set(found) == set(want) - left_out
    for name, (inputs, output) in found.items():
        assert_close(inputs, want[name][0])
        assert_close(torch.diag(output) if output.dim() == 1 else output, want[name][1])
    assert found[name].input.dtype == torch.float64
    if make is twice:
        assert found["table"].output.dim() == 1


@pytest.mark.usefixtures("workspace")
def test_kronecker_factors_in_tiles() -> None:
    fn, params, batch = images()
    want = recorded(fn, params, batch)
    for name, (inputs, output) in psgrad.kron_factors(fn, params, batch).items():
        assert_close((inputs, output), want[name])


def test_a_transposed_matrix() -> None:
    w, x = randn(4, 3), randn(5, 2, 4)
    found = psgrad.kron_factors(lambda w, x: (x @ w).sum(), w, x)["params"]
    ones = torch.ones(3, 3, dtype=torch.float64)
    assert_close(found.output, torch.einsum("nti,ntj->ij", x, x) / 5)  # rows of w meet x
    assert_close(found.input, 2 * ones)


@pytest.mark.parametrize("d", [1, 64, 130, 300])
def test_each_pair_once(d: int) -> None:
    t = randn(20, d)
    assert_close(gram_of(t), t.mT @ t)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_case_has_factors_of_the_right_size(case: Case) -> None:
    """In chunks the same; symmetric; of one position the trace of both is the squared norm."""
    fn, params, batch = case.make()
    with warns(case):
        whole, chunked = (psgrad.kron_factors(fn, params, batch, chunk_size=c) for c in (None, 3))
    assert_close(chunked, whole)
    own = dict(psgrad.display.leaves(params))
    assert set(whole) <= {name for name, p in own.items() if p.dim() > 1}
    for name, (inputs, output) in whole.items():
        o, i = own[name].shape[0], own[name][0].numel()
        assert inputs.shape == (i, i)
        assert output.shape == (o,) * output.dim()
        assert_close(inputs, inputs.mT.contiguous())


def test_samples_that_do_not_count() -> None:
    fn, params, (x, y) = images()
    valid = torch.tensor([True, False, True, True, False, True])
    padded = x.masked_fill(~valid[:, None, None, None], torch.nan)
    want = psgrad.kron_factors(fn, params, (x[valid], y[valid]))
    assert_close(psgrad.kron_factors(fn, params, (padded, y), valid=valid), want)
    assert_close(psgrad.kron_factors(fn, params, (padded, y), valid=valid, chunk_size=2), want)
    none = psgrad.kron_factors(fn, params, (x[:0], y[:0]), names=["0.weight"])["0.weight"]
    assert none.input.isnan().all()
    assert (none.input.shape, none.output.shape) == ((18, 18), (4, 4))
    assert psgrad.kron_factors(fn, params, (x[:0], y[:0])) == {}
    both = lambda p, s: (fn(p, s), s[1])
    _, aux = psgrad.kron_factors(both, params, (x, y), valid=valid, has_aux=True)
    assert_close(aux, y.where(valid, 0))


def test_names() -> None:
    fn, params, batch = images()
    some = psgrad.kron_factors(fn, params, batch, names=["2.weight", "params['0.weight']"])
    assert set(some) == {"0.weight", "2.weight"}
    nested = {"a": [randn(4, 3), randn(2)]}
    found = psgrad.kron_factors(lambda p, x: F.linear(x, p["a"][0]).sum(), nested, randn(5, 3))
    assert list(found) == ["['a'][0]"]
    fg = psgrad.factored_grads(lambda p, x: F.linear(x, p["a"][0]).sum(), nested, randn(5, 3))
    for name in ("['a'][0]", "params['a'][0]"):
        assert fg.precondition({name: (torch.ones(1, 4), None)}).dense()["a"][0].shape == (5, 1, 3)


W, X = torch.randn(3, 4), torch.randn(5, 4)
FG = lambda: psgrad.factored_grads(linear_loss, W, X)
REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no dict": (
        lambda: FG().precondition([1, 2]),  # type: ignore[arg-type]
        psgrad.ArgumentTypeError,
        "maps is a list, not a dict\n  give two matrices for each parameter that is to change.",
    ),
    "name": (
        lambda: FG().precondition({"w": (None, None)}),
        psgrad.ArgumentError,
        "maps has 'w', but no parameter is called that\n  there are 'params'.",
    ),
    "pair": (
        lambda: FG().precondition({"params": torch.ones(3, 3)}),
        psgrad.ArgumentTypeError,
        "maps['params'] is a Tensor, not two matrices\n  give one for the rows and one for the columns.",
    ),
    "size": (
        lambda: FG().precondition({"params": (torch.ones(4, 4), None)}),
        psgrad.ArgumentError,
        "maps['params'][0] has shape (4, 4), which does not fit 3 numbers\n"
        "  give a matrix of shape (any, 3), a vector of 3 for a diagonal one, or None for no change.",
    ),
    "complex": (
        lambda: FG().precondition({"params": (None, torch.ones(4, dtype=torch.complex64))}),
        psgrad.ArgumentTypeError,
        "maps['params'][1] is torch.complex64\n  give a tensor of real numbers, or None for no change.",
    ),
    "number": (
        lambda: FG().precondition({"params": (None, 2.0)}),
        psgrad.ArgumentTypeError,
        "maps['params'][1] is a float\n  give a tensor of real numbers, or None for no change.",
    ),
    "a single number": (
        lambda: psgrad.factored_grads(lambda w, x: (w * x).sum(), torch.ones(()), X).precondition(
            {"params": (None, None)}
        ),
        psgrad.ArgumentError,
        "maps['params'] is for a single number, which is no matrix\n  leave it out.",
    ),
    "basis": (
        lambda: psgrad.grad_stats(linear_loss, W, X, basis={"params": (torch.ones(2, 3), None)}),
        psgrad.ArgumentError,
        "basis['params'][0] has shape (2, 3), which does not fit 3 numbers\n"
        "  give a matrix of shape (3, any), a vector of 3 for a diagonal one, or None for no change.",
    ),
    "kron name": (
        lambda: psgrad.kron_factors(linear_loss, W, X, names=["w"]),
        psgrad.ArgumentError,
        "names has 'w', but no parameter is called that\n  there are 'params'.",
    ),
    "kron of what is no product": (
        lambda: psgrad.kron_factors(lambda w, x: (w * x).sum(), W, X, names=["params"]),
        psgrad.ArgumentError,
        "params has no Kronecker factors: it has gradients by Product\n"
        "  name parameters that are multiplied as matrices, or leave names out to get all of them.",
    ),
    "kron of a vector": (
        lambda: psgrad.kron_factors(lambda w, x: (w * x).sum(), X[0], X, names=["params"]),
        psgrad.ArgumentError,
        "params has no Kronecker factors: it is no matrix\n"
        "  name parameters that are multiplied as matrices, or leave names out to get all of them.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, kind, message = REFUSED[name]
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message


def test_factors_of_k_fac_are_no_pair_of_sides() -> None:
    """They come as (input, output), and for a square matrix the wrong order would fit."""
    fn, params = psgrad.from_module(nn.Sequential(nn.Linear(3, 3)), nn.functional.cross_entropy)
    batch = torch.randn(5, 3), torch.zeros(5, dtype=torch.int64)
    found = psgrad.kron_factors(fn, params, batch)
    with pytest.raises(psgrad.ArgumentTypeError) as error:
        psgrad.factored_grads(fn, params, batch).precondition(found)
    assert str(error.value) == (
        "maps['0.weight'] is a KronFactors, whose fields need not be in the order of the sides\n"
        "  give a plain pair, of its inverses say: (inverse(k.output), inverse(k.input))."
    )
