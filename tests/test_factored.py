"""FactoredGrads as an object: bounds, copies and files, several as one, parameters that change afterwards."""

import copy
import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psgrad
from psgrad.factors.base import Factor
from psgrad.factors.dense import Dense
from psgrad.factors.plain_data import RECORDS
from psgrad.factors.pullback import Pullback
from psgrad.factors.sum import Placement, Sum
from psgrad.quantities.factored import Block

from .cases import Case, Layer
from .test_contract import assert_close
from .test_quantities import every_case, flat, layers, linear_loss, recurrent, summed, tied_gpt, warns
from .test_quantities import pytestmark as pytestmark  # torch's warnings about cases of the table

# ---- clipped sums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize(
    "max_norm",
    [0.3, 1, torch.tensor(0.3), {"first": 0.5, "last": torch.tensor(2.0)}, {"first": {"w": 0.1, "b": 0.2}, "last": 1}],
    ids=["float", "int", "tensor", "layers", "parameters"],
)
def test_a_clipped_sum_takes_the_bounds_of_clipped_grad(max_norm: Any, chunk_size: int | None) -> None:
    fn, params, batch = layers()
    grads = psgrad.testing.loop_grads(fn, params, batch)
    step = psgrad.clipped_grad(fn, params, batch, max_norm)
    found = psgrad.factored_grads(fn, params, batch, chunk_size=chunk_size).clipped_sum(max_norm)
    assert_close(found, step.grad)
    if isinstance(max_norm, dict):
        norms = flat(grads["last"]).norm(dim=1)
        want = summed(grads["last"], (float(max_norm["last"]) / norms).clamp(max=1))
        assert_close(found["last"], want)


def test_a_clipped_sum_takes_bounds_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))).double()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    batch = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
    fg, bounds = psgrad.factored_grads(fn, params, batch), {"0": 0.1, "2": 0.2, "2.1.bias": 0.3}
    assert_close(fg.clipped_sum(bounds), psgrad.clipped_grad(fn, params, batch, bounds).grad)
    with pytest.raises(psgrad.ArgumentError) as error:
        fg.clipped_sum({"0": 0.1, "2.0": 0.2})
    assert str(error.value) == (
        "max_norm has no bound for '2.1.bias'\n  give one for the parameter, or for a module above it."
    )


def test_a_clipped_sum_checks_its_bounds() -> None:
    fn, params, batch = layers()
    fg = psgrad.factored_grads(fn, params, batch)
    with pytest.raises(psgrad.ArgumentError) as error:
        fg.clipped_sum({"first": 1.0, "middle": 1.0})
    assert str(error.value) == (
        "max_norm does not fit params\n"
        "  max_norm: PyTreeSpec({'first': *, 'middle': *})\n"
        "  params: PyTreeSpec({'first': {'b': *, 'w': *}, 'last': {'w': *}})\n"
        "  give one number, or a pytree prefix of params; where these have names, a dict from names."
    )
    with pytest.raises(psgrad.ArgumentError) as error:
        fg.clipped_sum({"first": 1.0, "last": -1.0})
    assert str(error.value) == "max_norm['last']=-1.0 is not positive\n  give a positive number; inf clips nothing."


def test_a_clipped_sum_by_layers_leaves_bad_samples_out() -> None:
    """A sample that is not finite in one layer does not count in the others either."""
    fn = lambda p, x: (p["a"] * x[0]).sum() + (p["b"] * x[1]).sum()
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    x = torch.tensor([[[3.0, 4.0], [1.0, 0.0]], [[torch.inf, 1.0], [1.0, 1.0]]])
    fg, bounds = psgrad.factored_grads(fn, params, x), {"a": 1.0, "b": 10.0}
    assert_close(fg.clipped_sum(bounds, nonfinite="zero"), {"a": torch.tensor([0.6, 0.8]), "b": torch.tensor([1.0, 0])})
    assert fg.clipped_sum(bounds, nonfinite="propagate")["b"].isnan().any()
    with pytest.raises(psgrad.ArgumentError) as error:
        fg.clipped_sum(bounds)
    assert str(error.value) == (
        "the gradients of sample 1 are not finite\n"
        '  leave them out with nonfinite="zero", or let them through with nonfinite="propagate".'
    )


# ---- what happens to params, batch and constants afterwards ------------------------------------------------


def wiped(*trees: Any) -> None:
    """Zeros in the memory of every tensor, as no version counter of torch's notices."""
    for t in optree.tree_leaves(trees):
        if isinstance(t, Tensor):
            t.untyped_storage().fill_(0)


@every_case
def test_answers_stay_when_params_and_batch_change(case: Case) -> None:
    for chunk_size in (None, 1):  # of one sample nothing tells what is the caller's memory
        fn, params, batch = case.make()
        with warns(case):
            fg = psgrad.factored_grads(fn, params, batch, chunk_size=chunk_size)
        grads, norms = fg.dense(), fg.norms()
        wiped(params, batch)
        assert_close(fg.dense(), grads, rtol=0, atol=0)
        assert_close(fg.norms(), norms, rtol=0, atol=0)


def weight_norm() -> tuple[Any, Any, Any, Any]:
    fn, params = psgrad.from_module(nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), F.cross_entropy)
    return fn, params, (torch.randn(4, 6), torch.randint(5, (4,))), ()


def masked_weight() -> tuple[Any, Any, Any, Any]:
    mask = torch.rand(5, 6)
    return lambda w, x: F.linear(x, (w * mask).exp()).square().sum(), torch.randn(5, 6), torch.randn(4, 6), mask


def table_of_constants() -> tuple[Any, Any, Any, Any]:
    index = torch.tensor([3, 1, 1])
    return lambda w, x: (F.embedding(index, w) * x).sum(), torch.randn(9, 50), torch.randn(4, 3, 50), index


def constant_input() -> tuple[Any, Any, Any, Any]:
    c = torch.randn(3, 40)
    return lambda w, x: (F.linear(c, w) * x).sum(), torch.randn(30, 40), torch.randn(4, 3, 30), c


def two_parameters() -> tuple[Any, Any, Any, Any]:
    params = {"a": torch.randn(3, 40), "b": torch.randn(30, 40)}
    return lambda p, x: (F.linear(p["a"], p["b"]) * x).sum(), params, torch.randn(4, 3, 30), ()


CHANGES: dict[str, Any] = {
    "in place": lambda t: t.add_(1),
    "data": lambda t: t.data.add_(1),
    "overwritten": lambda t: t.zero_(),
}


@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [weight_norm, masked_weight, table_of_constants, constant_input, two_parameters])
def test_answers_stay_when_what_fn_uses_changes(make: Any, change: str, chunk_size: int | None) -> None:
    """Parameters behind a function of parameters, constants that fn closes over: of many samples and of one."""
    fn, params, batch, constants = make()
    want = psgrad.testing.loop_grads(fn, params, batch)
    fg = psgrad.factored_grads(fn, params, batch, chunk_size=chunk_size)
    with torch.no_grad():
        for t in optree.tree_leaves((params, constants)):
            CHANGES[change](t)
    rows = flat(want)
    assert_close(fg.dense(), want, rtol=1e-4, atol=1e-5)
    assert_close(fg.norms(), rows.norm(dim=1), rtol=1e-4, atol=1e-5)
    assert_close(fg.sum(), summed(want), rtol=1e-4, atol=1e-4)
    assert_close(fg.dots(), rows @ rows.mT, rtol=1e-4, atol=1e-4)
    assert_close(fg.to("cpu").dense(), want, rtol=1e-4, atol=1e-5)


# ---- copies and files ------------------------------------------------------------------------------------


def saved(fg: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(fg, file)
    file.seek(0)
    return torch.load(file, **options)


COPIES: dict[str, Any] = {
    "pickle": lambda fg: pickle.loads(pickle.dumps(fg)),
    "deepcopy": copy.deepcopy,
    "torch.load": saved,
}


def check_copy(other: Any, fg: Any) -> None:
    """Every answer the same, from memory of its own."""
    assert isinstance(other, psgrad.FactoredGrads)
    assert len(other) == len(fg)
    assert_close(other.dense(), fg.dense())
    assert_close(other.norms(), fg.norms())
    assert_close(other.norms(per_param=True), fg.norms(per_param=True))
    assert_close(other.sum(), fg.sum())
    assert_close(other.variance(), fg.variance(), equal_nan=True)
    assert_close(other.dots(), fg.dots())
    assert_close(other.dots(fg), fg.dots())
    assert_close(other[1:].clipped_sum(0.5), fg[1:].clipped_sum(0.5))
    assert_close((other.values, other.aux), (fg.values, fg.aux))


@every_case
def test_copies_answer_as_the_original(case: Case) -> None:
    fn, params, batch = case.make()
    with warns(case):
        fg = psgrad.factored_grads(fn, params, batch)
    want = fg.dense(), fg.norms()
    with torch.serialization.safe_globals([Layer]):  # a class of the user's own, in one case
        others = [copied(fg) for copied in COPIES.values()]
    wiped(params, batch, optree.tree_leaves(fg))
    for other in others:
        assert_close((other.dense(), other.norms()), want)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("make", [layers, tied_gpt, recurrent])
def test_copies_answer_every_question(make: Any, how: str) -> None:
    fg = psgrad.factored_grads(*make())
    check_copy(COPIES[how](fg), fg)


class Pair(NamedTuple):
    w: Any
    b: Any


def in_tree(tree: Any) -> Any:
    """Gradients of parameters in a tree, in two chunks, with aux."""

    def fn(p: Any, x: Tensor) -> Any:
        total = sum((F.linear(x, w).square().sum() for w in optree.tree_leaves(p)), x.new_zeros(()))
        return total, {"sum": x.sum(), "x": (x, None)}

    return psgrad.factored_grads(fn, tree, torch.randn(5, 4), has_aux=True, chunk_size=3)


TREES: dict[str, Any] = {
    "tensor": lambda w: w(),
    "dict, not sorted": lambda w: {"b": w(), "a": {"c": w()}},
    "numbers for keys": lambda w: {2: w(), 1: w()},
    "list and tuple": lambda w: [w(), (w(), None, [])],
    "ordered": lambda w: OrderedDict(b=w(), a=w()),
    "named": lambda w: Pair(w(), {"it": w()}),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("tree", TREES)
def test_copies_of_trees(tree: str, how: str) -> None:
    fg = in_tree(TREES[tree](lambda: torch.randn(3, 4)))
    if tree == "named" and how == "torch.load":  # torch asks for every class that is not its own
        with pytest.raises(pickle.UnpicklingError, match=r"GLOBAL tests.test_factored.Pair was not an allowed global"):
            saved(fg)
        other = saved(fg, weights_only=False)
    else:
        other = COPIES[how](fg)
    check_copy(other, fg)
    assert optree.tree_structure(other.sum()) == optree.tree_structure(fg.sum())
    assert repr(other.sum()) == repr(fg.sum())  # the order of keys, too


class Picky:
    """A node of a tree that takes tensors alone."""

    def __init__(self, w: Any) -> None:
        if not isinstance(w, Tensor):
            raise TypeError("not a tensor")
        self.w = w


EVERYWHERE: Any = optree.registry.__GLOBAL_NAMESPACE
optree.register_pytree_node(Picky, lambda p: ((p.w,), None), lambda _, c: Picky(c[0]), namespace=EVERYWHERE)


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_copies_of_trees_that_take_tensors_alone(how: str) -> None:
    fn = lambda p, x: F.linear(x, p.w).square().sum()
    fg = psgrad.factored_grads(fn, Picky(torch.randn(3, 4)), torch.randn(5, 4))
    other = COPIES[how](fg)
    assert_close(other.sum().w, fg.sum().w)
    assert_close(other.clipped_sum(1.0).w, fg.clipped_sum(1.0).w)


def both_ways() -> tuple[Any, Any, Any]:
    """A weight that is used as it is, and through a function of it."""
    fn = lambda w, x: F.linear(x, w).square().sum() + F.linear(x.cos(), w / w.norm()).sin().sum()
    return fn, torch.randn(30, 40, dtype=torch.float64), torch.randn(4, 40, dtype=torch.float64)


@pytest.mark.parametrize("how", [*COPIES, "to"])
def test_no_copy_keeps_a_graph(how: str) -> None:
    fn, w, x = both_ways()
    fg = psgrad.factored_grads(fn, w, x)
    assert graphs(fg)
    other = fg.to("cpu") if how == "to" else COPIES[how](fg)
    assert not graphs(other)
    check_copy(other, fg)
    assert_close(other.dense(), psgrad.testing.loop_grads(fn, w, x))


def graphs(fg: Any) -> list[Any]:
    """The factors with a graph."""
    found: list[Any] = []
    todo = [own for block in fg._blocks for own in block.sums]
    while todo:
        factor = todo.pop()
        if isinstance(factor, Sum):
            todo += [part for _, part in factor.terms]
        elif isinstance(factor, Pullback):
            found.append(factor)
    return found


def test_a_shallow_copy_is_the_same() -> None:
    fg = psgrad.factored_grads(linear_loss, torch.ones(3, 4), torch.randn(5, 4))
    assert copy.copy(fg) is fg


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("how", COPIES)
def test_copies_of_few_samples(how: str, n: int) -> None:
    fg = psgrad.factored_grads(linear_loss, torch.ones(3, 4), torch.randn(n, 4))
    check_copy(COPIES[how](fg), fg)


def test_a_file_holds_no_more_than_the_factors() -> None:
    """Neither the memory around a view, nor an input once for each layer that reads it."""

    def fn(p: Any, x: Tensor) -> Tensor:
        h = x.cos()  # (4, 300), of which layers see parts; two see the same
        left, right = h[:, :100], h[:, 100:200]
        return (left @ p["a"]).sin().sum() + (left @ p["b"]).sin().sum() + (right @ p["c"]).sin().sum()

    fg = psgrad.factored_grads(fn, {name: torch.randn(100, 90) for name in "abc"}, torch.randn(60, 4, 300))
    needed = 4 * 60 * 4 * (2 * 100 + 3 * 90)
    for data in (pickle.dumps(fg), save_bytes(fg)):
        assert needed < len(data) < 1.05 * needed


def save_bytes(fg: Any) -> bytes:
    file = io.BytesIO()
    torch.save(fg, file)
    return file.getvalue()


def test_loading_heeds_map_location() -> None:
    """Onto a device without memory, since there is no other here."""
    fn, params, batch = layers()
    fg = psgrad.factored_grads(fn, params, batch)
    other = saved(fg, map_location="meta")
    assert {t.device.type for t in optree.tree_leaves(other)} == {"meta"}
    assert other.sum()["first"]["w"].device.type == "meta"
    assert other.dense()["last"]["w"].device.type == "meta"


def test_a_factor_of_ones_own_is_pickled_by_its_name() -> None:
    fg = psgrad.factored_grads(linear_loss, torch.ones(3, 4), torch.randn(5, 4))
    grads = torch.randn(5, 3, 4)
    (block,) = fg._blocks
    own = replace(fg, _blocks=(Block(None, (replace(block.sums[0], terms=(Placement(None, Own(grads)),)),)),))
    for copied in (pickle.loads(pickle.dumps(own)), copy.deepcopy(own), saved(own, weights_only=False)):
        assert_close(copied.dense(), grads)
    with pytest.raises(pickle.UnpicklingError, match=r"GLOBAL tests.test_factored.Own was not an allowed global"):
        saved(own)


@dataclass(frozen=True, eq=False)
class Own(Dense):
    """A user's factor."""


def test_every_factor_of_ours_can_be_saved() -> None:
    todo, ours = [Factor], set()
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        if kind.__module__.startswith("psgrad.") and kind is not Factor:
            ours.add(kind)
    assert ours - set(RECORDS.values()) == {Pullback}  # which is written out


def test_files_of_other_versions_are_refused() -> None:
    fg = psgrad.factored_grads(linear_loss, torch.ones(3, 4), torch.randn(5, 4))
    other = object.__new__(psgrad.FactoredGrads)
    with pytest.raises(psgrad.ArgumentError) as error:
        other.__setstate__(fg.__getstate__() | {"format": 2})
    assert str(error.value) == (
        "a FactoredGrads was saved by another version of psgrad: its format is 2, not 1\n"
        "  load it with the version that saved it."
    )
    with pytest.raises(psgrad.ArgumentError) as error:
        other.__setstate__(fg.__getstate__() | {"blocks": ((None, False, (((None, {"record": "Sparse"}),),)),)})
    assert str(error.value) == (
        "a FactoredGrads was saved by another version of psgrad: it holds a 'Sparse'\n"
        "  load it with the version that saved it."
    )


# ---- several as one --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(6,), (2, 4), (1, 0, 3, 2), (0, 6), (0, 0)], ids=str)
def test_concat(sizes: tuple[int, ...]) -> None:
    fn, params, batch = layers()

    def with_aux(p: Any, x: Tensor) -> Any:
        return fn(p, x), {"x": x}

    batch = batch[: sum(sizes)]
    parts = [psgrad.factored_grads(with_aux, params, x, has_aux=True, chunk_size=2) for x in batch.split(list(sizes))]
    fg, whole = psgrad.concat(parts), psgrad.factored_grads(with_aux, params, batch, has_aux=True)
    assert len(fg) == len(batch)
    assert fg.values.dtype == torch.float64
    if len(batch):
        check_copy(fg, whole)
        assert_close(fg.aux["x"], batch)
        assert_close(fg.mean(), whole.mean())
        assert_close(fg[::2].norms(), whole[::2].norms())
        order = torch.randperm(len(batch))
        assert_close(psgrad.concat([fg[i : i + 1] for i in order.tolist()]).dense(), whole[order].dense())
    assert_close(pickle.loads(pickle.dumps(fg)).dense(), whole.dense())


def test_concat_of_what_ran_in_parts() -> None:
    """Samples that took other branches stand in blocks of their own, at their places."""
    fn = lambda w, x: (w * x).exp().sum() if x.sum() > 0 else (w * x).square().sum()
    w, x = torch.randn(3, dtype=torch.float64), torch.randn(9, 3, dtype=torch.float64)
    fg = psgrad.concat(psgrad.factored_grads(fn, w, part) for part in x.split(4))
    want = psgrad.testing.loop_grads(fn, w, x)
    assert_close(fg.dense(), want)
    assert_close(fg.norms(), want.norm(dim=1))
    assert_close(fg.dots(), want @ want.mT)


def one(params: Any = None, aux: Any = None) -> Any:
    """Factored gradients of two samples."""
    params = {"w": torch.ones(2)} if params is None else params

    def fn(p: Any, x: Tensor) -> Any:
        return sum((t.sum() * x.sum() for t in optree.tree_leaves(p)), x.sum()), aux

    return psgrad.factored_grads(fn, params, torch.ones(2, 3), has_aux=True)


NOT_ALIKE: dict[str, tuple[Any, type[Exception], str]] = {
    "none": (list, psgrad.ArgumentError, "there is no FactoredGrads to concat\n  give at least one."),
    "type": (
        lambda: [one(), {"w": 1}],
        psgrad.ArgumentTypeError,
        "parts[1] is a dict, not a FactoredGrads\n  give what factored_grads returned.",
    ),
    "structure": (
        lambda: [one(), one(), one({"v": torch.ones(2)})],
        psgrad.ArgumentError,
        "parts[2] has another structure of params than parts[0]\n"
        "  parts[0]: PyTreeSpec({'w': *})\n  parts[2]: PyTreeSpec({'v': *})\n"
        "  give the gradients of the same params.",
    ),
    "shape": (
        lambda: [one(), one({"w": torch.ones(3)})],
        psgrad.ArgumentError,
        "params['w'] is not the same in parts[0] and parts[1]\n"
        "  parts[0]: shape (2,), dtype torch.float32, device cpu\n"
        "  parts[1]: shape (3,), dtype torch.float32, device cpu\n"
        "  give the gradients of the same params.",
    ),
    "dtype": (
        lambda: [one(), one({"w": torch.ones(2).double()})],
        psgrad.ArgumentError,
        "params['w'] is not the same in parts[0] and parts[1]\n"
        "  parts[0]: shape (2,), dtype torch.float32, device cpu\n"
        "  parts[1]: shape (2,), dtype torch.float64, device cpu\n"
        "  give the gradients of the same params.",
    ),
    "aux": (
        lambda: [one(aux={"a": 1}), one(aux=None)],
        psgrad.ArgumentError,
        "parts[1] has another structure of aux than parts[0]\n"
        "  parts[0]: PyTreeSpec({'a': *})\n  parts[1]: PyTreeSpec(None)\n"
        "  give what one fn returned.",
    ),
    "rows of aux": (
        lambda: [one(aux={"a": torch.ones(2)}), one(aux={"a": torch.ones(3)})],
        psgrad.ArgumentError,
        "aux['a'] has shape (2,) in parts[0] and (3,) in parts[1]\n  give what one fn returned.",
    ),
}


@pytest.mark.parametrize("name", NOT_ALIKE)
def test_concat_refuses_what_does_not_belong_together(name: str) -> None:
    make, kind, message = NOT_ALIKE[name]
    with pytest.raises(kind) as error:
        psgrad.concat(make())
    assert str(error.value) == message
