"""Recurrent layers and cells: exact in float64 over what Hypothesis draws, and the rule ran."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, pad_sequence

import psgrad
from psgrad.rules import quick_steps, steps
from psgrad.torch_ import cpp, graphs, operators

from . import strategies as some
from .cases import default_dtype, loss

Params = dict[str, Tensor]
LAYERS: dict[str, Any] = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *args, **kwargs: nn.RNN(*args, nonlinearity="relu", **kwargs),
}
CELLS: dict[str, Any] = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "rnn_tanh": nn.RNNCell,
    "rnn_relu": lambda *args, **kwargs: nn.RNNCell(*args, nonlinearity="relu", **kwargs),
}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def made(table: dict[str, Any], kind: str, *args: Any, **kwargs: Any) -> tuple[Any, Params]:
    """A layer or cell in float64, and its parameters."""
    with default_dtype(torch.float64):
        module = table[kind](*args, **kwargs)
    return module, {name: p.detach() for name, p in module.named_parameters()}


def results(out: Any) -> list[Tensor]:
    """A layer's output and each of its final states."""
    y, last = out
    return [y.data if isinstance(y, PackedSequence) else y, *(last if isinstance(last, tuple) else (last,))]


# ---- layers ------------------------------------------------------------------------------------------------


def layer_of(config: some.Recurrent) -> tuple[Any, Params]:
    extra = {"proj_size": config.projection} if config.projection else {}
    return made(
        LAYERS,
        config.kind,
        config.inputs,
        config.hidden,
        config.layers,
        bias=config.bias,
        batch_first=config.batch_first,
        bidirectional=config.bidirectional,
        **extra,
    )


@given(config=some.recurrents())
def test_layers(config: some.Recurrent) -> None:
    """Every option of the modules, initial states of every origin, padded and packed."""
    layer, weights = layer_of(config)
    params = {name: p for name, p in weights.items() if name.rpartition("_l")[0] not in config.frozen}
    fixed = {name: p for name, p in weights.items() if name not in params}
    rows = config.layers * (1 + config.bidirectional)
    inner = () if config.batch is None else (config.batch,)
    shapes = [(rows, *inner, size) for size in (config.projection or config.hidden, config.hidden)]
    given_states = {f"state {i}": draw(*shapes[i]) for i in range(len(config.states))}
    learned = {name: s for name, s in given_states.items() if config.states[int(name[-1])] == "param"}

    def fn(p: Params, x: Tensor) -> Tensor:
        x = x * p["scale"]
        states = [
            {"param": p.get(name), "frozen": value, "sample": value * x.sum()}[use]
            for (name, value), use in zip(given_states.items(), config.states, strict=True)
        ]
        hx = None if not states else tuple(states) if config.kind == "lstm" else states[0]
        inputs: Any = x
        if config.lengths is not None:
            inputs = pack_padded_sequence(x, torch.tensor(config.lengths), config.batch_first, enforce_sorted=False)
        weights = {name: t for name, t in p.items() if name in params} | fixed
        found = results(functional_call(layer, weights, (inputs, hx)))
        return sum((loss((i + 1) * found[i]) for i in config.used), x.new_zeros(()))

    tree = {"scale": draw(config.inputs)} | params | learned
    batch, in_dims = config.layout.apply(draw(config.n, *config.x))
    psgrad.testing.check(fn, tree, batch, in_dims=in_dims)
    if config.n:
        used = psgrad.testing.rules_used(fn, tree, batch, in_dims=in_dims)
        for name in params:
            assert used[f"params[{name!r}]"] == [config.kind] * config.runs
        for name in learned if config.lengths is None else ():
            assert used[f"params[{name!r}]"] == [config.kind] * rows


def one_layer(kind: str, *args: Any, **kwargs: Any) -> tuple[Any, Params]:
    """`fn(params, x)` that looks at a layer's output, and its parameters."""
    layer, params = made(LAYERS, kind, *args, **kwargs)
    return (lambda p, x: loss(results(functional_call(layer, p, (x,)))[0])), params


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented:UserWarning")
def test_lengths_per_sample() -> None:
    """Samples whose inner sequences have the same lengths, in whatever order, run together."""
    layer, params = made(LAYERS, "lstm", 3, 2, bidirectional=True)
    groups: list[int] = []

    def fn(p: Params, sample: tuple[Tensor, Tensor]) -> Tensor:
        x, lengths = sample
        packed = pack_padded_sequence(x, lengths, enforce_sorted=False)
        out, (h, _) = functional_call(layer, p, (packed,))
        padded, again = pad_packed_sequence(out, batch_first=True, padding_value=0.5, total_length=6)
        groups.append(len(again))
        return loss(padded) + loss(h)

    batch = draw(5, 4, 2, 3), torch.tensor([[4, 2], [3, 3], [2, 4], [3, 3], [4, 2]])
    found = psgrad.per_sample_grads(fn, params, batch)
    assert len(groups) == 2  # [3, 3], and the others
    torch.testing.assert_close(found, psgrad.testing.loop_grads(fn, params, batch))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("batch_first", [False, True])
def test_pad_sequence(batch_first: bool, side: str) -> None:
    def fn(p: Params, x: Tensor) -> Tensor:
        padded = pad_sequence([x[:2] * p["w"], x, x[1:]], batch_first, 0.7, side)
        return loss(padded * torch.arange(1, 1 + padded.numel()).view(padded.shape))

    psgrad.testing.check(fn, {"w": draw(3)}, draw(4, 4, 3))


def test_dropout_between_layers() -> None:
    """Each sample has a mask of its own unless all are to share one, the same in forward and backward."""
    fn, params = one_layer("gru", 3, 8, 2, dropout=0.5)
    batch = draw(1, 4, 3).expand(3, 4, 3)

    def rows(randomness: str) -> Tensor:
        torch.manual_seed(0)
        return psgrad.per_sample_grads(fn, params, batch, randomness=randomness)["weight_ih_l1"]

    different, same = rows("different"), rows("same")
    assert not torch.allclose(different[0], different[1])
    torch.testing.assert_close(same, same[:1].expand_as(same))
    assert torch.equal(different, rows("different"))
    used = psgrad.testing.rules_used(fn, params, batch)
    assert set(map(tuple, used.values())) == {("gru",)}


def test_dropout_is_that_of_its_own_mask() -> None:
    """With a mask that can be read off: a column of the second layer's input weight has a gradient just where
    the first layer's output was kept, and there it is that of an input twice as large."""
    fn, params = one_layer("rnn_tanh", 2, 6, 2, dropout=0.5)
    x = draw(8, 1, 2)
    found = psgrad.per_sample_grads(fn, params, x)["weight_ih_l1"]
    kept = (found != 0).any(1)  # (N, H)
    assert kept.any()
    assert not kept.all()

    def masked(p: Params, sample: tuple[Tensor, Tensor]) -> Tensor:
        row, keep = sample
        first = torch.tanh(row @ p["weight_ih_l0"].T + p["bias_ih_l0"] + p["bias_hh_l0"])
        return loss(torch.tanh((first * keep * 2) @ p["weight_ih_l1"].T + p["bias_ih_l1"] + p["bias_hh_l1"]))

    want = psgrad.testing.loop_grads(masked, params, (x, kept.double()))
    torch.testing.assert_close(found, want["weight_ih_l1"])


@pytest.mark.parametrize("kind", LAYERS)
def test_double_backward_inside_a_transform(kind: str) -> None:
    """grad of a function of per-sample gradients: exact."""
    fn, params = one_layer(kind, 2, 2, 2)
    x = draw(3, 2, 2)

    def squares(p: Params) -> Tensor:
        return sum((g.square().sum() for g in psgrad.per_sample_grads(fn, p, x).values()), torch.zeros(()))

    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    want = torch.zeros(())
    for row in x:
        first = torch.autograd.grad(fn(leaves, row), list(leaves.values()), create_graph=True)
        want = want + sum(g.square().sum() for g in first)
    found = list(grad(squares)(params).values())
    torch.testing.assert_close(found, list(torch.autograd.grad(want, list(leaves.values()))))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_gradient_inside_fn(kind: str) -> None:
    """A penalty on the input's gradient: no rule inside another transform, and exact all the same."""
    fn, params = one_layer(kind, 2, 2)
    penalty = lambda p, x: grad(lambda x: fn(p, x))(x).square().sum()
    psgrad.testing.check(penalty, params, draw(3, 2, 2), rules={f"params[{name!r}]": ["vmap"] for name in params})


def test_a_weight_that_differs_between_samples() -> None:
    layer, params = made(LAYERS, "lstm", 3, 2)

    def fn(p: Params, x: Tensor) -> Tensor:
        return loss(functional_call(layer, p | {"weight_hh_l0": p["weight_hh_l0"] * x.mean()}, (x,))[0])

    psgrad.testing.check(fn, params, draw(3, 4, 3), rules={"params['weight_ih_l0']": ["vmap"]})


def test_a_frozen_layer_and_an_input_that_is_a_parameter() -> None:
    layer, weights = made(LAYERS, "gru", 3, 2)
    through = lambda p, x: loss(functional_call(layer, weights, (x * p["scale"],))[0])
    psgrad.testing.check(through, {"scale": draw(3)}, draw(3, 4, 3))
    prompt = lambda p, x: loss(functional_call(layer, weights, (p["prompt"],))[0] * x)
    psgrad.testing.check(prompt, {"prompt": draw(4, 3)}, draw(3, 2))
    both = lambda p, x: loss(functional_call(layer, {k: p[k] for k in weights}, (p["prompt"],))[0] * x)
    psgrad.testing.check(both, weights | {"prompt": draw(4, 3)}, draw(3, 2))


@pytest.mark.parametrize("kind", ["gru", "rnn_tanh", "rnn_relu"])  # torch's lstm needs bfloat16 in the processor
def test_autocast(kind: str) -> None:
    """The layer runs in bfloat16, and gives the gradients of that."""
    layer, params = made(LAYERS, kind, 4, 3)
    params = {name: p.float() for name, p in params.items()}
    seen: set[torch.dtype] = set()

    def fn(p: Params, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = functional_call(layer, p, (x,))[0]
        seen.add(out.dtype)
        return out.float().sin().sum()

    x = draw(3, 5, 4).float()
    psgrad.per_sample_grads(fn, params, x)
    assert seen == {torch.bfloat16}
    psgrad.testing.check(fn, params, x, rtol=0.1, atol=0.05, rules={f"params[{name!r}]": [kind] for name in params})


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kind: str, dtype: torch.dtype) -> None:
    fn, params = one_layer(kind, 4, 3)
    params = {name: p.to(dtype) for name, p in params.items()}
    psgrad.testing.check(lambda p, x: fn(p, x).float(), params, draw(3, 5, 4).to(dtype), rtol=0.1, atol=0.1)


def test_explain_names_the_rule() -> None:
    fn, params = one_layer("lstm", 3, 4, bidirectional=True, proj_size=2)
    report = psgrad.explain(fn, params, draw(5, 6, 3))
    assert {row.how for row in report.rows} == {"rule lstm"}
    factors = {row.param.removeprefix("params['").partition("_")[0]: row.factor for row in report.rows}
    assert factors == {"weight": "Outer", "bias": "Dense"}
    assert report.note == ""


def test_wrong_calls_get_torchs_own_words() -> None:
    fn, params = one_layer("lstm", 3, 2)
    with pytest.raises(RuntimeError, match="Expected sequence length to be larger than 0 in RNN"):
        psgrad.per_sample_grads(fn, params, draw(3, 0, 3))
    with pytest.raises(TypeError, match="received an invalid combination of arguments"):
        psgrad.per_sample_grads(lambda p, x: torch.lstm(x, p["weight_hh_l0"]), params, draw(3, 4, 3))
    unsorted = lambda p, x: pack_padded_sequence(x * p["w"], [1, 2]).data.sum()
    with pytest.raises(RuntimeError, match="must be sorted in decreasing order"):
        psgrad.per_sample_grads(unsorted, {"w": draw(3)}, draw(3, 2, 2, 3))


def test_no_inner_sequences() -> None:
    fn, params = one_layer("lstm", 3, 2, bidirectional=True)
    psgrad.testing.check(fn, params, draw(3, 4, 0, 3), rules={f"params[{name!r}]": ["lstm"] for name in params})


# ---- cells -------------------------------------------------------------------------------------------------


@given(
    kind=st.sampled_from(sorted(CELLS)),
    n=some.SAMPLES,
    steps=some.SIZE,
    batch=st.none() | some.SIZE,
    bias=st.booleans(),
    given_state=st.booleans(),
    layout=some.LAYOUTS,
)
def test_cells(
    kind: str, n: int, steps: int, batch: int | None, bias: bool, given_state: bool, layout: some.Layout
) -> None:
    cell, params = made(CELLS, kind, 3, 2, bias=bias)
    inner = () if batch is None else (batch,)
    tree = {**params, "scale": draw(3)} | ({"state": draw(*inner, 2)} if given_state else {})

    def fn(p: Params, x: Tensor) -> Tensor:
        state: Any = p["state"] if given_state else None
        if given_state and kind == "lstm":
            state = state, 2 * state
        for row in x * p["scale"]:
            state = functional_call(cell, {name: p[name] for name in params}, (row, state))
        return sum((loss(t) for t in (state if kind == "lstm" else [state])), x.new_zeros(()))

    batch_of, in_dims = layout.apply(draw(n, steps, *inner, 3))
    psgrad.testing.check(fn, tree, batch_of, in_dims=in_dims)
    if n:
        used = psgrad.testing.rules_used(fn, tree, batch_of, in_dims=in_dims)
        for name in params:
            assert used[f"params[{name!r}]"] == [kind] * steps


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_narrow_state_is_an_error_as_in_torch() -> None:
    """Of width 1, where the cell is wider: the loop's products would be spread over it."""
    params = {"w_ih": torch.randn(20, 3), "w_hh": torch.randn(20, 1)}
    states = torch.zeros(1, 2, 1), torch.zeros(1, 2, 5)

    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.lstm(x, states, [p["w_ih"], p["w_hh"]], False, 1, 0.0, False, False, False)[0].sum()

    x = torch.randn(2, 4, 2, 3)
    for run in (lambda: fn(params, x[0]), lambda: psgrad.per_sample_grads(fn, params, x)):
        with pytest.raises(RuntimeError, match="incorrect number of RNN parameters"):
            run()


@pytest.mark.parametrize("module", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(("length", "n", "h"), [(1, 1, 1), (3, 1, 1), (2, 1, 2), (2, 2, 1)])
def test_compiled_where_axes_are_of_size_1(module: type[nn.RNNBase], length: int, n: int, h: int) -> None:
    """The compiler leaves copies out where strides agree, and the cotangent of the last cell is behind another's."""
    if graphs.missing_compiler() is not None:
        pytest.skip("no C++ compiler")
    torch.manual_seed(0)
    fn, params = psgrad.from_module(module(3, h, batch_first=True).double(), lambda y, target: (y[0] * target).sum())
    batch = torch.randn(n, length, 3).double(), torch.randn(n, length, h).double()
    step = psgrad.compile(psgrad.per_sample_grads, fn, backend="inductor")
    torch.testing.assert_close(step(params, batch), psgrad.testing.loop_grads(fn, params, batch))
    assert step.cache_info().backends == ("inductor",)


# ---- loops in C++ ------------------------------------------------------------------------------------------

Arguments = list[Any]


def loops(n: int, h: int, reverse: bool, dtype: torch.dtype) -> dict[str, tuple[Any, Arguments]]:
    """Each loop over time, with arguments of n sequences and width h."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype) / 2

    length = 5
    each, slots, weight = (length, n, h), (length + 1, n, h), draw(4 * h, h)
    four, three = draw(length, n, 4 * h), draw(length, n, 3 * h)
    u, s = draw(*each).tanh(), draw(*each).tanh()
    back = [draw(*slots), draw(n, h), four.sigmoid(), draw(*slots), u, s, weight, None, reverse]
    gru_back = [draw(*slots), three.sigmoid(), draw(*slots), u, draw(*each), weight[: 3 * h], reverse]
    return {
        "lstm": (steps.lstm, [four, draw(*slots), draw(*slots), weight, None, reverse]),
        "lstm_back": (steps.lstm_back, back),
        "gru": (steps.gru, [three, draw(*slots), draw(*each), weight[: 3 * h], reverse]),
        "gru_back": (steps.gru_back, gru_back),
        "rnn": (steps.rnn, [draw(*slots), weight[:h], False, reverse]),
        "rnn_back": (steps.rnn_back, [draw(*slots), draw(*slots).tanh(), weight[:h], False, reverse]),
        "rnn relu": (steps.rnn, [draw(*slots), weight[:h], True, reverse]),
        "rnn_back relu": (steps.rnn_back, [draw(*slots), draw(*slots).relu(), weight[:h], True, reverse]),
    }


def outcome(name: str, loop: Any, args: Arguments) -> list[Tensor]:
    """What a loop returns, and what it leaves in its arguments."""
    args = [t.clone() if isinstance(t, Tensor) else t for t in args]
    found = loop(*args)
    left = [t for t in args if isinstance(t, Tensor)]
    if name == "lstm":
        i, f, _, o = left[0].chunk(4, -1)  # where the update was is nobody's
        left[0] = torch.cat([i, f, o], -1)
    return [*left, *([] if found is None else [found] if isinstance(found, Tensor) else found)]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is called in C++."""
    if graphs.missing_compiler() is not None:
        pytest.skip("no C++ compiler")
    names: list[str] = []
    call = cpp.call
    monkeypatch.setattr(cpp, "call", lambda *args: [names.append(args[1]), call(*args)])
    return names


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("n", "h"), [(1, 1), (5, 3), (9, 16), (23, 33)])
def test_loops_in_cpp(
    n: int, h: int, reverse: bool, dtype: torch.dtype, called: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers as by torch's ops, and to the bit the same however many threads there are."""
    torch.manual_seed(0)
    for name, (loop, args) in loops(n, h, reverse, dtype).items():
        way = operators.compiled_ways([loop.op])[loop.op]
        expected, found = outcome(name, loop, args), []
        for threads in (1, 3):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            found.append(outcome(name, way, args))
            assert called.pop() == name.split()[0]
        for a, b, c in zip(expected, *found, strict=True):
            torch.testing.assert_close(b, a)
            assert torch.equal(b, c)
            assert b.stride() == a.stride()


def test_loops_in_cpp_let_nan_through(called: list[str]) -> None:
    """Into the rows that have them, and into no other."""
    torch.manual_seed(0)
    for name, (loop, args) in loops(6, 5, False, torch.float64).items():
        args[0][2, 4] = torch.nan
        way = operators.compiled_ways([loop.op])[loop.op]
        for a, b in zip(outcome(name, loop, args), outcome(name, way, args), strict=True):
            torch.testing.assert_close(b, a, equal_nan=True)
    assert len(called) == 8


def test_what_is_not_for_loops_in_cpp(called: list[str]) -> None:
    """Runs by torch's ops: half precision, a weight with gaps, projections."""
    torch.manual_seed(0)
    way = operators.compiled_ways([steps.lstm.op])[steps.lstm.op]
    gates, h, c, weight, _, reverse = loops(4, 3, False, torch.float64)["lstm"][1]
    for args in (
        [gates.bfloat16(), h.bfloat16(), c.bfloat16(), weight.bfloat16(), None, reverse],
        [gates, h, c, weight.mT.contiguous().mT, None, reverse],
        [gates, h[..., :2].contiguous(), c, weight[:, :2].contiguous(), torch.randn(2, 3).double(), reverse],
    ):
        for a, b in zip(outcome("", steps.lstm, args), outcome("", way, args), strict=True):
            assert torch.equal(a, b)
    assert not called


def test_without_a_compiler_loops_are_of_torchs_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "missing_compiler", lambda: "there is none")
    assert cpp.library("int nothing_of_it_is_compiled;") is None
    monkeypatch.setattr(quick_steps, "_library", lambda: None)
    assert operators.compiled_ways([steps.lstm.op, torch.ops.aten.mm.default]) == {}


def test_what_does_not_compile_is_no_error() -> None:
    assert cpp.library("this is not C++") is None
