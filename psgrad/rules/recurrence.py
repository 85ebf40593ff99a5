"""One recurrent layer in one direction: lstm, gru, rnn_tanh, rnn_relu.

The input's projections are one product for all steps, the loops over time do what depends on the step
before and no more, and each weight gets one factor over all steps. The loops are in `steps`.

Inside a rule tensors are (L, B N, F): the steps in front, so that a step is contiguous, and the samples
next to the features, so that (L B, N, F) is a view, which a factor takes transposed. States are slots
(L + 1, B N, H): the initial one, then one after each step, or in reverse.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..factors.base import Factor
from ..factors.dense import Dense
from ..factors.outer import Outer
from ..factors.products import linear, product
from ..registry.rule import Call, Needs, Param, Rule
from ..torch_ import levels
from . import steps
from .steps import Order

Saved = tuple[Tensor, ...]
Params = Sequence[Any]
Gradients = tuple[Tensor | None, list[Factor | None]]


class Options(NamedTuple):
    """`states`: the widths of the initial states that follow the input in x, where they differ between samples."""

    order: Order
    batch: int
    width: int
    states: tuple[int, ...] = ()

    @property
    def lead(self) -> tuple[int, int]:
        return self.order.length, self.batch


# ---- layouts -------------------------------------------------------------------------------------------


def _steps(t: Tensor) -> Tensor:
    """(N, L, B, F) as (L, B N, F)."""
    return t.permute(1, 2, 0, 3).flatten(1, 2)


def _samples(t: Tensor, n: int) -> Tensor:
    """(L, B N, F) as a view (N, L, B, F)."""
    return t.view(len(t), t.shape[1] // n, n, t.shape[2]).permute(2, 0, 1, 3)


def _positions(t: Tensor, n: int) -> Tensor:
    """(L, B N, F) as (N, T, F), T being L x B."""
    return _samples(t, n).flatten(1, 2)


def _split(options: Options, x: Tensor) -> list[Tensor]:
    """The input (N, L, B, I) and the states (N, B, H) that follow it."""
    if not options.states:
        return [x]
    _, batch, width, states = options
    inputs, *rest = x.split([prod(options.lead) * width, *(batch * size for size in states)], 1)
    pairs = zip(rest, states, strict=True)
    return [inputs.unflatten(1, (*options.lead, width)), *(t.unflatten(1, (batch, size)) for t, size in pairs)]


def _opened(options: Options, x: Tensor, states: Params) -> list[Tensor]:
    """The input's steps (L, B N, I) and the initial states (B N, H); `states` has None for one that follows it."""
    inputs, *rest = _split(options, x)
    own = iter(rest)
    initial = [next(own) if s is None else s.expand(len(x), *s.shape) for s in states]
    steps = _steps(inputs).contiguous()  # one product for all, not one for each: 512 to 2048 in 12.4 ms, not 22.9
    return [steps, *(s.transpose(0, 1).flatten(0, 1) for s in initial)]


def _slots(order: Order, initial: Tensor) -> Tensor:
    """Room for the states, the initial one in its place."""
    slots = initial.new_empty(order.length + 1, *initial.shape)
    order.first(slots).copy_(initial)
    return slots


def _closed(n: int, out: Tensor, *finals: Tensor) -> Tensor:
    """The output (L, B N, P), and what of the last state is not in it (B N, H), as (N, -1)."""
    return torch.cat([_samples(t, n).flatten(1) for t in (out, *(f[None] for f in finals))], 1)


def _cotangents(options: Options, g: Tensor, slots: Tensor, *finals: int) -> list[Tensor]:
    """What came for the result of `_closed`, to be added to: slots like the state's, and (B N, H) each."""
    n, batch, shape = len(g), options.batch, (*options.lead, slots.shape[-1])
    out, *rest = g.split([prod(shape), *(batch * width for width in finals)], 1)
    d = torch.empty_like(slots)
    options.order.first(d).zero_()
    _samples(options.order.after(d), n).copy_(out.unflatten(1, shape))
    pairs = zip(rest, finals, strict=True)
    # The clone comes last: of a view of it a compiler that leaves the clone out forgets where in `g` it begins.
    return [d, *(t.reshape(n, batch, width).transpose(0, 1).flatten(0, 1).clone() for t, width in pairs)]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def _gradients(
    options: Options,
    x: Tensor,
    h: Tensor,
    params: Params,
    needs: Needs,
    of_x: Tensor,
    of_h: Tensor,
    *of_states: Tensor,
    others: Sequence[Factor | None] = (),
) -> Gradients:
    """Everything from the cotangents (L, B N, O) of both products and those of the initial states.

    `h` are the states' slots, `others` the factors of weights that not every layer has.
    """
    n, inputs, want = len(x), _split(options, x)[0], needs.params
    states = [_samples(t[None], n)[:, 0] for t in of_states]  # (N, B, H)
    gx = None
    if needs.x:
        gx = _samples(product(of_x, params[0]), n)
        if options.states:
            own = [t for t, p in zip(states, params[-len(states) :], strict=True) if p is None]
            gx = torch.cat([t.flatten(1) for t in (gx, *own)], 1)
    g, gh = _positions(of_x, n), _positions(of_h, n)
    return gx, [
        Outer(inputs.flatten(1, 2), g) if want[0] else None,
        Outer(_positions(options.order.before(h), n), gh) if want[1] else None,
        Dense(g.sum(1)) if want[2] else None,
        Dense(gh.sum(1)) if want[3] else None,
        *others,
        *(Dense(t.clone()) if w else None for t, w in zip(states, want[-len(states) :], strict=True)),
    ]


# ---- lstm ----------------------------------------------------------------------------------------------


def lstm_forward(
    options: Options, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any, b_hh: Any, w_hr: Any, h0: Any, c0: Any
) -> tuple[Tensor, Saved]:
    order = options.order
    inputs, h0, c0 = _opened(options, x, (h0, c0))
    h, c = _slots(order, h0), _slots(order, c0)
    gates = linear(inputs, w_ih, _sum(b_ih, b_hh))  # (L, B N, 4 H)
    update, squashed = steps.lstm(gates, h, c, w_hh, w_hr, order.reverse)
    n = len(x)
    y = _closed(n, order.after(h), order.last(c))
    return y, tuple(_samples(t, n) for t in (gates, h, c, update, squashed))


def lstm_backward(options: Options, g: Tensor, x: Tensor, params: Params, saved: Saved, needs: Needs) -> Gradients:
    order, n = options.order, len(x)
    _, w_hh, _, _, w_hr, *_ = params
    gates, h, c, u, squashed = map(_steps, saved)
    dh, dc = _cotangents(options, g, h, c.shape[-1])
    d = steps.lstm_back(dh, dc, gates, c, u, squashed, w_hh, w_hr, order.reverse)
    projection = None
    if needs.params[4]:
        o = gates.chunk(4, -1)[3]
        projection = Outer(_positions(o * squashed, n), _positions(order.after(dh), n))
    return _gradients(options, x, h, params, needs, d, d, order.first(dh), dc, others=(projection,))


def _lstm_step(p: Tensor, h: Tensor, c: Tensor, w_hh: Tensor, b_hh: Any, w_hr: Any) -> list[Tensor]:
    i, f, u, o = (p + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * u.tanh()
    h = o.sigmoid() * c.tanh()
    return [h if w_hr is None else F.linear(h, w_hr), c]


# ---- gru -----------------------------------------------------------------------------------------------


def gru_forward(
    options: Options, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any, b_hh: Any, h0: Any
) -> tuple[Tensor, Saved]:
    order = options.order
    inputs, h0 = _opened(options, x, (h0,))
    h, size = _slots(order, h0), w_hh.shape[1]
    gates = linear(inputs, w_ih, b_ih)  # (L, B N, 3 H)
    inner = torch.zeros_like(order.after(h))  # the state's part of the update
    if b_hh is not None:
        gates[..., : 2 * size] += b_hh[: 2 * size]
        inner += b_hh[2 * size :]
    update = steps.gru(gates, h, inner, w_hh, order.reverse)
    n = len(x)
    return _closed(n, order.after(h)), tuple(_samples(t, n) for t in (gates, h, update, inner))


def gru_backward(options: Options, g: Tensor, x: Tensor, params: Params, saved: Saved, needs: Needs) -> Gradients:
    gates, h, u, inner = map(_steps, saved)
    (dh,) = _cotangents(options, g, h)
    of_x, d = steps.gru_back(dh, gates, h, u, inner, params[1], options.order.reverse)
    return _gradients(options, x, h, params, needs, of_x, d, options.order.first(dh))


def _gru_step(p: Tensor, h: Tensor, w_hh: Tensor, b_hh: Any) -> list[Tensor]:
    (xr, xz, xu), (hr, hz, hu) = p.chunk(3, -1), F.linear(h, w_hh, b_hh).chunk(3, -1)
    u = (xu + (xr + hr).sigmoid() * hu).tanh()
    return [u + (xz + hz).sigmoid() * (h - u)]


# ---- rnn -----------------------------------------------------------------------------------------------


def _rnn_forward(relu: bool) -> Callable[..., tuple[Tensor, Saved]]:
    def forward(
        options: Options, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any, b_hh: Any, h0: Any
    ) -> tuple[Tensor, Saved]:
        order = options.order
        inputs, h0 = _opened(options, x, (h0,))
        h = _slots(order, h0)
        order.after(h).copy_(linear(inputs, w_ih, _sum(b_ih, b_hh)))
        steps.rnn(h, w_hh, relu, order.reverse)
        return _closed(len(x), order.after(h)), (_samples(h, len(x)),)

    return forward


def _rnn_backward(relu: bool) -> Callable[..., Gradients]:
    def backward(options: Options, g: Tensor, x: Tensor, params: Params, saved: Saved, needs: Needs) -> Gradients:
        h = _steps(saved[0])
        (dh,) = _cotangents(options, g, h)
        steps.rnn_back(dh, h, params[1], relu, options.order.reverse)
        d = options.order.after(dh)
        return _gradients(options, x, h, params, needs, d, d, options.order.first(dh))

    return backward


def _rnn_step(squash: Callable[[Tensor], Tensor]) -> Callable[..., list[Tensor]]:
    return lambda p, h, w_hh, b_hh: [squash(p + F.linear(h, w_hh, b_hh))]


# ---- the rules -----------------------------------------------------------------------------------------


def _plain(step: Callable[..., list[Tensor]], states: int) -> Callable[..., Tensor]:
    """The layer by elementary ops, for derivatives of any order."""

    def plain(options: Options, x: Tensor, *params: Any) -> Tensor:
        w_ih, w_hh, b_ih, b_hh, *others = params[:-states]
        inputs, *state = _opened(options, x, params[-states:])
        projected = F.linear(inputs, w_ih, b_ih)
        out: list[Any] = [None] * options.order.length
        for t in options.order.steps:
            state = step(projected[t], *state, w_hh, b_hh, *others)
            out[t] = state[0]
        return _closed(len(x), torch.stack(out), *state[1:])

    return plain


def bind(x: Any, states: tuple[Any, ...], weights: tuple[Any, ...], reverse: bool) -> Call:
    """States that differ between samples go behind the input; others count as parameters."""
    level, (length, batch, width) = levels.current_level(), x.shape
    own = [isinstance(s, Tensor) and level is not None and levels.is_batched(s, level) for s in states]
    behind = [s for s, mine in zip(states, own, strict=True) if mine]
    if behind:
        x = torch.cat([t.flatten() for t in (x.wrapped if isinstance(x, Param) else x, *behind)])
    others = [None if mine else s for s, mine in zip(states, own, strict=True)]
    options = Options(Order(reverse, length), batch, width, tuple(s.shape[-1] for s in behind))
    return Call(x, (*weights, *others), options)


Layer = Callable[[Any, tuple[Any, ...], tuple[Any, ...], bool], Tensor]


def _layer(name: str, plain: Callable[..., Tensor]) -> Layer:
    """The function that has the rule: x (L, B, I), states (B, H) to the output (L, B, P) and a last cell, flat."""

    def layer(x: Any, states: tuple[Any, ...], weights: tuple[Any, ...], reverse: bool) -> Tensor:
        if has_torch_function((x, *states, *weights)):
            result: Tensor = handle_torch_function(layer, (x, *states, *weights), x, states, weights, reverse)
            return result
        length, batch, width = x.shape
        return plain(Options(Order(reverse, length), batch, width), x[None], *weights, *states)[0]

    layer.__name__ = layer.__qualname__ = name
    return layer


def _rule(name: str, forward: Any, backward: Any, step: Any, states: int, saves: int) -> Rule:
    plain, factors = _plain(step, states), ("Outer", "Dense")
    layer = _layer(name, plain)
    return Rule(name, (layer,), bind, forward, backward, plain, saves=saves, autocast="lower", factors=factors)


LSTM = _rule("lstm", lstm_forward, lstm_backward, _lstm_step, states=2, saves=5)
GRU = _rule("gru", gru_forward, gru_backward, _gru_step, states=1, saves=4)
RNN_TANH = _rule("rnn_tanh", _rnn_forward(False), _rnn_backward(False), _rnn_step(torch.tanh), states=1, saves=1)
RNN_RELU = _rule("rnn_relu", _rnn_forward(True), _rnn_backward(True), _rnn_step(torch.relu), states=1, saves=1)
RULES = (LSTM, GRU, RNN_TANH, RNN_RELU)
