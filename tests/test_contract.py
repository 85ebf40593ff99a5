"""The contract, for every case of the table: exact, by the stated rules, whatever the batch and the chunks."""

import contextlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import psgrad
from psgrad.factors import costs as _plan
from psgrad.registry import rule as _registry
from psgrad.registry.rule import RULES, BatchFold, Composite, Rule

from . import cases
from .cases import CASES, RECURRENT, Case, N, draw, loss

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
    pytest.mark.filterwarnings("ignore::psgrad.UnusedParametersWarning"),  # `grads_of` looks for it
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),  # the loop's
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def grads_of(case: Case, *problem: Any, **options: Any) -> Any:
    """`per_sample_grads`, which must warn of a loop, and of unused parameters, just where the case says so."""
    looping = pytest.warns(psgrad.FallbackWarning) if case.loops else contextlib.nullcontext()
    unused = pytest.warns(psgrad.UnusedParametersWarning) if case.independent else warnings.catch_warnings()
    with looping, unused:
        if not case.independent:
            warnings.simplefilter("error", psgrad.UnusedParametersWarning)
        return psgrad.per_sample_grads(*problem, **options)


def assert_close(found: Any, wanted: Any, **tolerances: Any) -> None:
    """Equal trees, paths and dtypes; values up to rounding."""
    paths, leaves, spec = optree.tree_flatten_with_path(found)
    _, others, other_spec = optree.tree_flatten_with_path(wanted)
    assert spec == other_spec
    for path, a, b in zip(paths, leaves, others, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, path=path: f"{path}: {text}", **tolerances)


def samples(batch: Any, index: Any) -> Any:
    return optree.tree_map(lambda t: t[index], batch)


# ---- equality ----------------------------------------------------------------------------------------------


def _defers(case: Case) -> bool:
    """Whether small calls of a rule of the case are left to ordinary autograd, and large ones are not."""
    rules = [rule for rule in RULES.values() if isinstance(rule, Rule) and rule.native]
    return any(rule.name in names for rule in rules for names in case.rules.values())


@pytest.mark.parametrize(
    ("case", "small"),
    [
        pytest.param(case, small, id=f"{case.id}-{'small' if small else 'large'}")
        for case in CASES
        for small in (True, False)
        if small or _defers(case)
    ],
)
def test_equals_the_loop_and_touches_nothing(case: Case, small: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not small:
        monkeypatch.setattr(_plan, "SMALL", -1)
    fn, params, batch = case.make()
    before = optree.tree_map(torch.clone, (params, batch))
    versions = [t._version for t in optree.tree_leaves((params, batch))]
    found = grads_of(case, fn, params, batch)
    assert [t._version for t in optree.tree_leaves((params, batch))] == versions
    assert_close((params, batch), before, rtol=0, atol=0)
    for g, p in zip(optree.tree_leaves(found), optree.tree_leaves(params), strict=True):
        assert not p.requires_grad
        assert p.grad is None
        assert not g.requires_grad
        assert g.is_contiguous()
    assert_close(found, case.loop_grads())


def _ordered(y: Tensor) -> Tensor:
    """A loss that tells the places of y apart, and how many they are, as `loss`, a plain sum, does not."""
    places = torch.arange(y.numel(), 0, -1, dtype=y.dtype, device=y.device).reshape(y.shape)
    return (y.sin().square() * places).sum()


@every_case
def test_every_number_of_an_output_is_at_its_place(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "loss", _ordered)
    fn, params, batch = case.make()
    assert_close(grads_of(case, fn, params, batch), psgrad.testing.loop_grads(fn, params, batch))


@pytest.mark.parametrize("case", [c for c in CASES if c.refused], ids=lambda case: case.id)
def test_torch_refuses_what_is_said_to_be_refused(case: Case) -> None:
    fn, params, batch = case.make()
    with pytest.raises(RuntimeError):
        vmap(grad(fn), in_dims=(None, 0))(params, batch)


@every_case
def test_a_row_belongs_to_its_sample_alone(case: Case) -> None:
    """Permuting samples permutes rows; where sample 3 stands twice and 2 not at all, so do their rows."""
    fn, params, batch = case.make()
    order = [3, 0, 3, 1]
    assert_close(grads_of(case, fn, params, samples(batch, order)), samples(case.loop_grads(), order))


@every_case
def test_chunks_change_nothing(case: Case) -> None:
    """Chunks of three samples and of one."""
    assert_close(grads_of(case, *case.make(), chunk_size=3), case.loop_grads())


@every_case
def test_one_sample_and_none(case: Case) -> None:
    fn, params, batch = case.make()
    one = slice(2, 3)
    assert_close(grads_of(case, fn, params, samples(batch, one)), samples(case.loop_grads(), one))
    none = psgrad.per_sample_grads(fn, params, samples(batch, slice(0)))
    assert_close(none, optree.tree_map(lambda p: p.new_empty(0, *p.shape), params))


@every_case
def test_out_is_written_and_returned(case: Case) -> None:
    fn, params, batch = case.make()
    want = case.loop_grads()
    out = optree.tree_map(lambda p: p.new_full((N, *p.shape), torch.nan), params)
    addresses = [t.data_ptr() for t in optree.tree_leaves(out)]
    found = grads_of(case, fn, params, batch, out=out)
    assert found is out
    assert [t.data_ptr() for t in optree.tree_leaves(out)] == addresses
    assert_close(out, want)
    strided = optree.tree_map(lambda p: p.new_full((*p.shape, N), torch.nan).movedim(-1, 0), params)
    grads_of(case, fn, params, batch, out=strided, chunk_size=3)
    assert_close(strided, want)


@every_case
def test_float32_is_as_accurate_as_autograd(case: Case) -> None:
    """Errors against float64 at most a few times those of ordinary float32 autograd."""
    exact = optree.tree_leaves(case.loop_grads())
    found = optree.tree_leaves(grads_of(case, *case.make(torch.float32)))
    plain = optree.tree_leaves(case.loop_grads(torch.float32))
    for g, p, e in zip(found, plain, exact, strict=True):
        assert g.dtype == torch.float32
        if e.numel():
            scale = e.abs().max() * torch.finfo(torch.float32).eps
            allowed = 8 * torch.maximum((p - e).abs().max(), 4 * scale)
            assert (g - e).abs().max() <= allowed


# ---- the rules ran -----------------------------------------------------------------------------------------


def used(fn: Any, params: Any, batch: Any) -> dict[str, list[str]]:
    return {path: sorted(names) for path, names in psgrad.testing.rules_used(fn, params, batch).items()}


@pytest.mark.parametrize("case", [c for c in CASES if not c.loops and not c.diverges], ids=lambda case: case.id)
def test_the_stated_rules_ran(case: Case) -> None:
    assert used(*case.make()) == {path: sorted(names) for path, names in case.rules.items()}


@pytest.mark.parametrize("case", [c for c in CASES if c.diverges], ids=lambda case: case.id)
def test_the_stated_rules_ran_in_one_branch_or_another(case: Case) -> None:
    fn, params, batch = case.make()
    found: dict[str, set[str]] = {}
    for i in range(N):
        for path, names in used(fn, params, samples(batch, slice(i, i + 1))).items():
            found.setdefault(path, set()).update(names)
    assert found == {path: set(names) for path, names in case.rules.items()}


def counted(monkeypatch: pytest.MonkeyPatch, rule: BatchFold) -> list[str]:
    """Every run of `rule` from now on, by name."""
    runs: list[str] = []

    def run(*args: Any) -> Tensor:
        runs.append(rule.name)
        return rule.run(*args)

    for function in rule.functions:
        monkeypatch.setitem(RULES, function, rule._replace(run=run))
    return runs


@pytest.mark.parametrize("case", [c for c in CASES if c.folds], ids=lambda case: case.id)
def test_the_stated_folds_ran(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in case.folds:
        folds = [rule for rule in RULES.values() if isinstance(rule, BatchFold) and rule.name == name]
        runs = [counted(monkeypatch, fold) for fold in folds]
        psgrad.per_sample_grads(*case.make())
        assert [run for of_fold in runs for run in of_fold] == [name]


# ---- nothing is left out -----------------------------------------------------------------------------------

REGISTERED = {rule.name: rule for rule in RULES.values() if not isinstance(rule, Composite)}


@pytest.mark.parametrize("name", REGISTERED)
def test_every_rule_has_cases(name: str) -> None:
    if isinstance(REGISTERED[name], BatchFold):
        assert any(name in case.folds for case in CASES)
    else:
        assert any(name in names for case in CASES for names in case.rules.values())


def test_every_composite_has_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken apart goes by the rules of its parts: that some case comes by is to be seen here alone."""
    met: set[Callable[..., Any]] = set()

    def spied(function: Callable[..., Any], composite: Composite) -> Composite:
        def run(*args: Any, **kwargs: Any) -> Any:
            met.add(function)
            return composite.run(*args, **kwargs)

        return composite._replace(run=run)

    composites = {function: rule for function, rule in RULES.items() if isinstance(rule, Composite)}
    for function, rule in composites.items():
        monkeypatch.setitem(RULES, function, spied(function, rule))
    for case in RECURRENT:
        psgrad.per_sample_grads(*case.make())
    assert met == set(composites)


# How to call any function of a rule: (function, x, params) -> output, the sample's shape, the parameters'.
Spelling = tuple[Callable[..., Tensor], tuple[int, ...], dict[str, tuple[int, ...]]]
_PAIR: Callable[..., Tensor] = lambda f, x, w: f(x, w)
_AFFINE = {"w": (4,), "b": (4,)}
_GATES = {k: {"w": (2 * k, 3), "u": (2 * k, 2), "b": (2 * k,), "c": (2 * k,), "h": (2, 2)} for k in (1, 3, 4)}
_RECURRENT: Callable[..., Tensor] = lambda f, x, w, u, b, c, h: (  # an lstm has a second state, and no projection here
    f(x, (h, torch.zeros(h.shape, dtype=h.dtype)), (w, u, b, c, None), False)
    if len(b) == 8
    else f(x, (h,), (w, u, b, c), True)
)
SPELLINGS: dict[str, Spelling] = {
    "linear": (lambda f, x, w, b: f(x, w, b), (2, 3), {"w": (4, 3), "b": (4,)}),
    "matmul": (_PAIR, (2, 3), {"w": (3, 4)}),
    "bmm": (_PAIR, (2, 2, 3), {"w": (2, 3, 4)}),
    "mv": (_PAIR, (2, 3), {"w": (3,)}),
    "addmm": (lambda f, x, w, b: f(b, x, w), (2, 3), {"w": (3, 4), "b": (4,)}),
    "einsum": (lambda f, x, w: f("ti,io->to", x, w), (2, 3), {"w": (3, 4)}),
    "bilinear": (lambda f, x, w, b: f(x, x.sin(), w, b), (2, 3), {"w": (4, 3, 3), "b": (4,)}),
    "conv1d": (lambda f, x, w, b: f(x, w, b), (3, 5), {"w": (4, 3, 2), "b": (4,)}),
    "conv2d": (lambda f, x, w, b: f(x, w, b), (3, 4, 4), {"w": (4, 3, 2, 2), "b": (4,)}),
    "conv3d": (lambda f, x, w, b: f(x, w, b), (2, 3, 3, 3), {"w": (4, 2, 2, 2, 2), "b": (4,)}),
    "conv_transpose1d": (lambda f, x, w, b: f(x, w, b), (3, 5), {"w": (3, 4, 2), "b": (4,)}),
    "conv_transpose2d": (lambda f, x, w, b: f(x, w, b), (3, 4, 4), {"w": (3, 4, 2, 2), "b": (4,)}),
    "conv_transpose3d": (lambda f, x, w, b: f(x, w, b), (2, 3, 3, 3), {"w": (2, 4, 2, 2, 2), "b": (4,)}),
    "group_norm": (lambda f, x, w, b: f(x, 2, w, b), (2, 4, 3), _AFFINE),
    "layer_norm": (lambda f, x, w, b: f(x, [4], w, b), (2, 4), _AFFINE),
    "rms_norm": (lambda f, x, w: f(x, [4], w), (2, 4), {"w": (4,)}),
    "instance_norm": (lambda f, x, w, b: f(x, None, None, w, b), (2, 4, 3), _AFFINE),
    "batch_norm": (lambda f, x, w, b: f(x, None, None, w, b, training=True), (2, 4, 3), _AFFINE),
    "lstm": (_RECURRENT, (2, 2, 3), _GATES[4]),
    "gru": (_RECURRENT, (2, 2, 3), _GATES[3]),
    "rnn_tanh": (_RECURRENT, (2, 2, 3), _GATES[1]),
    "rnn_relu": (_RECURRENT, (2, 2, 3), _GATES[1]),
    "embedding": (lambda f, x, w: f(x.argsort(), w), (3,), {"w": (3, 4)}),
    "embedding_bag": (lambda f, x, w: f(x.argsort(), w), (2, 3), {"w": (3, 4)}),
    "index": (lambda f, x, w: f(w, x.argsort()), (3,), {"w": (3, 4)}),
    "index_select": (lambda f, x, w: f(w, 0, x.argsort()), (3,), {"w": (3, 4)}),
    "grouped_mm": (lambda f, x, w: f(x, w, offs=torch.tensor([1, 3], dtype=torch.int32)), (3, 4), {"w": (2, 4, 4)}),
    "add": (_PAIR, (2, 3), {"w": (3,)}),
    "sub": (_PAIR, (2, 3), {"w": (3,)}),
    "mul": (_PAIR, (2, 3), {"w": (3,)}),
    "div": (_PAIR, (2, 3), {"w": (3,)}),
    "prelu": (_PAIR, (2, 3), {"w": (3,)}),
}


def _named(function: Callable[..., Any]) -> str:
    owner = getattr(function, "__objclass__", None) or inspect.getmodule(function)
    return f"{getattr(owner, '__name__', 'torch')}.{function.__name__}"


ENTRIES = [(function, rule) for function, rule in RULES.items() if isinstance(rule, Rule)]


@pytest.mark.parametrize(("function", "rule"), ENTRIES, ids=[f"{r.name}-{_named(f)}" for f, r in ENTRIES])
def test_every_registered_function_runs_its_rule(function: Callable[..., Any], rule: Rule) -> None:
    call, shape, shapes = SPELLINGS[rule.name]
    dtype = torch.float32 if rule.name == "grouped_mm" else torch.float64  # torch's own has no float64
    params = {name: draw(*shape).to(dtype) for name, shape in shapes.items()}
    psgrad.testing.check(
        lambda p, x: loss(call(function, x, **p)),
        params,
        draw(N, *shape).to(dtype),
        rules={f"params[{name!r}]": [rule.name] for name in params},
    )


def test_a_rule_without_a_case_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two checks above can fail."""
    rule = REGISTERED["linear"]
    assert isinstance(rule, Rule)
    stray = Rule("stray", (torch.hypot,), rule.bind, rule.forward, rule.backward)
    monkeypatch.setitem(_registry.RULES, torch.hypot, stray)
    monkeypatch.setitem(REGISTERED, "stray", stray)
    with pytest.raises(AssertionError):
        test_every_rule_has_cases("stray")
    with pytest.raises(KeyError):
        test_every_registered_function_runs_its_rule(torch.hypot, stray)
