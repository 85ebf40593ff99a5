"""Recurrent layers and cells over configurations that Hypothesis draws: exact in float64, and the rule ran."""

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

import psgrad

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
        for name in learned if config.lengths is None and "sample" not in config.states else ():
            assert used[f"params[{name!r}]"] == [config.kind] * rows
