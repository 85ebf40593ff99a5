"""torch.lstm, gru, rnn_tanh, rnn_relu, their cells, and packed sequences: taken apart.

Torch's functions run any number of layers, in one or both directions, with dropout between them. Here
each layer and direction is a call of its own, which has a rule (`recurrence`).
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..registry.rule import Composite
from ..torch_ import kernels, tracing
from .recurrence import GRU, LSTM, RNN_RELU, RNN_TANH, Layer

_LSTM = LSTM.functions[0]


class Stack(NamedTuple):
    """Layers as torch's functions get them: the weights of each layer and direction, one after the other."""

    layer: Layer
    params: Sequence[Any]
    biases: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool

    def weights(self, k: int) -> Sequence[Any]:
        """weight_ih, weight_hh, bias_ih, bias_hh and, with projections, weight_hr of one layer and direction."""
        each = len(self.params) // (self.layers * (1 + self.bidirectional))
        own = list(self.params[k * each : (k + 1) * each])
        return own if self.biases else [*own[:2], None, None, *own[2:]]

    def run(self, x: Any, states: Sequence[Any]) -> list[Any]:
        """x (L, B, I), states (K, B, H) to the output (L, B, D P) and the last states (K, B, H)."""
        last: list[Sequence[Any]] = []
        for number in range(self.layers):
            if number and self.dropout and self.train:
                x = F.dropout(x, self.dropout)
            ways = []
            for way in range(1 + self.bidirectional):
                k = len(last)
                out, *ends = _run(self.layer, x, [s[k] for s in states], self.weights(k), bool(way))
                ways.append(out)
                last.append(ends)
            x = torch.cat(ways, -1) if self.bidirectional else ways[0]
        return [x, *(torch.stack(ends) for ends in zip(*last, strict=True))]


def _run(layer: Layer, x: Any, states: Sequence[Any], weights: Sequence[Any], reverse: bool = False) -> list[Any]:
    """One layer in one direction: the output (L, B, P) and the last states (B, H)."""
    length, batch, _ = x.shape
    if any(s.shape[:-1] != (batch,) for s in states):
        raise RuntimeError("the initial states do not fit the input")  # torch says more
    if layer is _LSTM and len(weights) == 4:
        weights = [*weights, None]  # no projections
        if states[0].shape != states[1].shape:  # a state of width 1 would be taken for one of the cell's width
            raise RuntimeError("the initial states do not fit the weights")
    y = layer(x, tuple(states), tuple(weights), reverse)
    width, size = states[0].shape[-1], length * batch * states[0].shape[-1]
    out = y[:size].unflatten(0, (length, batch, width))
    cells = [y[size:].unflatten(0, states[1].shape)] if layer is _LSTM else []
    return [out, out[0 if reverse else -1], *cells]


def _states(hx: Any) -> Sequence[Any]:
    return [hx] if isinstance(hx, Tensor) else hx


def _padded(
    layer: Layer,
    input: Any,
    hx: Any,
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Any, ...]:
    stack = Stack(layer, params, has_biases, num_layers, dropout, train, bidirectional)
    out, *last = stack.run(input.transpose(0, 1) if batch_first else input, _states(hx))
    return out.transpose(0, 1) if batch_first else out, *last


def _packed(
    layer: Layer,
    data: Any,
    batch_sizes: Any,
    hx: Any,
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Any, ...]:
    """Sequences of one length run together."""
    stack = Stack(layer, params, has_biases, num_layers, dropout, train, bidirectional)
    index, lengths = _padding(data, batch_sizes, False, len(batch_sizes))  # (L, B)
    places, results, start = [], [], 0
    for length, same in groupby(lengths.tolist()):
        stop = start + len(list(same))
        rows = index[:length, start:stop]
        out, *last = stack.run(data[rows], [s[:, start:stop] for s in _states(hx)])
        places.append(rows.flatten())
        results.append([out.flatten(0, 1), *last])
        start = stop
    if len(results) == 1:
        return tuple(results[0])
    outs, *lasts = zip(*results, strict=True)
    return torch.cat(outs)[torch.cat(places).argsort()], *(torch.cat(last, 1) for last in lasts)


def _sequences(layer: Layer) -> Callable[..., Any]:
    """torch.lstm and its like, which have two signatures."""

    def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        is_packed = "batch_sizes" in kwargs or (len(args) > 3 and isinstance(args[3], (list, tuple)))
        return (_packed if is_packed else _padded)(layer, *args, **kwargs)

    return run


def _cell(layer: Layer) -> Callable[..., Any]:
    """torch.lstm_cell and its like: one step."""

    def run(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        _, *last = _run(layer, input[None], _states(hx), (w_ih, w_hh, b_ih, b_hh))
        return tuple(last) if layer is _LSTM else last[0]

    return run


# ---- packed sequences: torch's own functions say where each step is ------------------------------------


def _pack(input: Any, lengths: Any, batch_first: bool) -> tuple[Any, Tensor]:
    """torch.nn.utils.rnn.pack_padded_sequence; `tolist` parts samples whose sequences have other lengths."""
    sizes = lengths.tolist()
    with tracing.unrecorded():  # places follow from the lengths, which a graph takes for granted
        where = torch.arange(input.shape[0] * input.shape[1], device=input.device).view(input.shape[:2])
        index, batch_sizes = kernels.pack_padded_sequence(where, torch.tensor(sizes), batch_first)
    return input.flatten(0, 1)[index], batch_sizes


def _padding(data: Any, batch_sizes: Any, batch_first: bool, length: int) -> tuple[Tensor, Tensor]:
    """Where in packed data each step of each sequence is, one past its end for padding; the sequences' lengths."""
    given = batch_sizes.tolist()
    with tracing.unrecorded():
        where, sizes = torch.arange(len(data), device=data.device), torch.tensor(given)
        index, lengths = kernels.pad_packed_sequence(where, sizes, batch_first, len(data), length)
    return index, lengths


def _pad(data: Any, batch_sizes: Any, batch_first: bool, padding_value: float, total_length: int) -> tuple[Any, Tensor]:
    """torch.nn.utils.rnn.pad_packed_sequence."""
    index, lengths = _padding(data, batch_sizes, batch_first, total_length)
    return torch.cat([data, data.new_full((1, *data.shape[1:]), padding_value)])[index], lengths


def _pad_all(
    sequences: Sequence[Any], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Any:
    """torch.nn.utils.rnn.pad_sequence."""
    most = max(len(t) for t in sequences)
    room = [t.new_full((most - len(t), *t.shape[1:]), padding_value) for t in sequences]
    pairs = zip(sequences, room, strict=True) if padding_side == "right" else zip(room, sequences, strict=True)
    return torch.stack([torch.cat(pair) for pair in pairs], 0 if batch_first else 1)


_FUNCTIONS = (
    (LSTM, torch.lstm, torch.lstm_cell),
    (GRU, torch.gru, torch.gru_cell),
    (RNN_TANH, torch.rnn_tanh, torch.rnn_tanh_cell),
    (RNN_RELU, torch.rnn_relu, torch.rnn_relu_cell),
)
COMPOSITES = (
    *(Composite(rule.name, (many,), _sequences(rule.functions[0])) for rule, many, _ in _FUNCTIONS),
    *(Composite(rule.name, (one,), _cell(rule.functions[0])) for rule, _, one in _FUNCTIONS),
    Composite("pack_padded_sequence", (kernels.pack_padded_sequence,), _pack),
    Composite("pad_packed_sequence", (kernels.pad_packed_sequence,), _pad),
    Composite("pad_sequence", (kernels.pad_sequence,), _pad_all),
)
