"""lstm, gru, rnn_tanh, rnn_relu and their cells.

Torch's functions run any number of layers in one or both directions. They are taken apart into one call
per layer and direction, and that is what has a rule: the input's projections are one product for all
steps, the loops over time do what depends on the step before and no more, and each weight gets one
factor over all steps.

Inside a rule tensors are (L, B N, F): the steps in front, so that a step is contiguous, and the samples
next to the features, so that (L B, N, F) is a view, which a factor takes transposed.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from .. import _functorch as ft
from .._factors import Dense, Factor, Outer
from .._registry import Call, Composite, Needs, Param, Rule

Saved = tuple[Tensor, ...]
Params = Sequence[Tensor | None]
_aten = torch.ops.aten


class Options(NamedTuple):
    """One layer in one direction. `states`: the widths of the initial states that follow the input in x."""

    reverse: bool
    length: int
    batch: int
    width: int
    states: tuple[int, ...]

    def order(self) -> Iterator[tuple[int, int, int]]:
        """Each step, in order, with the slots of the state before it and after it."""
        if self.reverse:
            return ((t, t + 1, t) for t in reversed(range(self.length)))
        return ((t, t, t + 1) for t in range(self.length))

    @property
    def first(self) -> int:
        """The slot of the initial state."""
        return self.length if self.reverse else 0

    def before(self, slots: Tensor) -> Tensor:
        """The states before each step, of the states (L + 1, ...)."""
        return slots[1:] if self.reverse else slots[:-1]

    def after(self, slots: Tensor) -> Tensor:
        return slots[:-1] if self.reverse else slots[1:]


# ---- layouts -------------------------------------------------------------------------------------------


def _steps(t: Tensor) -> Tensor:
    """(N, L, B, F) as (L, B N, F)."""
    return t.permute(1, 2, 0, 3).flatten(1, 2)


def _samples(t: Tensor, n: int) -> Tensor:
    """(L, B N, F) as a view (N, L, B, F)."""
    return t.unflatten(1, (t.shape[1] // n, n)).permute(2, 0, 1, 3)


def _positions(t: Tensor, n: int) -> Tensor:
    """(L, B N, F) as (N, T, F), T being L x B."""
    return _samples(t, n).flatten(1, 2)


def _flat(options: Options, out: Tensor, *finals: Tensor, n: int) -> Tensor:
    """The output (L, B N, P), and final states (B N, H) behind it, as (N, -1)."""
    parts = [_samples(out, n), *(_samples(t[None], n) for t in finals)]
    return torch.cat([t.flatten(1) for t in parts], 1)


def _unflat(options: Options, g: Tensor, *widths: int) -> list[Tensor]:
    """What `_flat` put together, as memory of its own: (L, B N, P), and (B N, H) for each final state."""
    sizes = [options.length * options.batch * widths[0], *(options.batch * w for w in widths[1:])]
    out, *finals = g.split(sizes, 1)
    parts = [out.unflatten(1, (options.length, options.batch, widths[0]))]
    parts += [t.unflatten(1, (1, options.batch, w)) for t, w in zip(finals, widths[1:], strict=True)]
    rows = [t.permute(1, 2, 0, 3).clone(memory_format=torch.contiguous_format).flatten(1, 2) for t in parts]
    return [rows[0], *(t[0] for t in rows[1:])]


def _input(options: Options, x: Tensor) -> Tensor:
    """The input (N, L, B, I), without the states behind it."""
    if not options.states:
        return x
    shape = options.length, options.batch, options.width
    return x[:, : options.length * options.batch * options.width].unflatten(1, shape)


def _initial(options: Options, x: Tensor, states: Params) -> list[Tensor]:
    """The initial states (B N, H): those behind the input, or those that all samples share."""
    if not options.states:
        return [s[:, None].expand(-1, len(x), -1).flatten(0, 1) for s in states if s is not None]
    parts = x[:, options.length * options.batch * options.width :].split([options.batch * w for w in options.states], 1)
    return [
        p.unflatten(1, (options.batch, w)).transpose(0, 1).flatten(0, 1)
        for p, w in zip(parts, options.states, strict=True)
    ]


def _slots(options: Options, initial: Tensor) -> Tensor:
    """Room for the states (L + 1, B N, H), the initial one in its place."""
    slots = initial.new_empty(options.length + 1, *initial.shape)
    slots[options.first] = initial
    return slots


def _total(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def _gradients(
    options: Options, n: int, x: Tensor, weight: Tensor, d: Tensor, initial: list[Tensor], needs: Needs
) -> tuple[Tensor | None, list[Factor | None]]:
    """The gradient of x, and of initial states that are parameters.

    `d` (L, B N, O) are the cotangents of the input's projections, `initial` those of the initial states.
    """
    rows = [_samples(t[None], n)[:, 0] for t in initial]  # (N, B, H)
    gx = None
    if needs.x:
        gx = _samples(torch.matmul(d, weight), n)
        if options.states:
            gx = torch.cat([gx.flatten(1), *(t.flatten(1) for t in rows)], 1)
    wanted = needs.params[-len(initial) :]
    return gx, [Dense(t.clone()) if want else None for t, want in zip(rows, wanted, strict=True)]


def _weights(
    needs: Sequence[bool], x: Tensor, h: Tensor, of_x: Tensor, of_h: Tensor, n: int
) -> list[Factor | None]:
    """Factors of weight_ih, weight_hh, bias_ih and bias_hh from the cotangents (L, B N, O) of both products."""
    g, gh = _positions(of_x, n), _positions(of_h, n)
    return [
        Outer(x.flatten(1, 2), g) if needs[0] else None,
        Outer(_positions(h, n), gh) if needs[1] else None,
        Dense(g.sum(1)) if needs[2] else None,
        Dense(gh.sum(1)) if needs[3] else None,
    ]


# ---- lstm ----------------------------------------------------------------------------------------------


def lstm_forward(
    options: Options, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any, b_hh: Any, w_hr: Any, h0: Any, c0: Any
) -> tuple[Tensor, Saved]:
    n = len(x)
    h, c = (_slots(options, s) for s in _initial(options, x, (h0, c0)))
    gates = F.linear(_steps(_input(options, x)), w_ih, _total(b_ih, b_hh))  # (L, B N, 4 H)
    squashed = torch.empty_like(options.after(c))  # tanh of the cell
    i, f, g, o = (part.unbind() for part in gates.chunk(4, -1))
    in_forget, gate, hs, cs, tanhs = gates[..., : 2 * c.shape[-1]].unbind(), gates.unbind(), *map(torch.unbind, (h, c, squashed))
    for t, before, after in options.order():
        gate[t].addmm_(hs[before], w_hh.mT)
        in_forget[t].sigmoid_()
        g[t].tanh_()
        o[t].sigmoid_()
        torch.mul(f[t], cs[before], out=cs[after]).addcmul_(i[t], g[t])
        torch.tanh(cs[after], out=tanhs[t])
        if w_hr is None:
            torch.mul(o[t], tanhs[t], out=hs[after])
        else:
            torch.mm(o[t] * tanhs[t], w_hr.mT, out=hs[after])
    last = c[options.length - options.first]
    y = _flat(options, options.after(h), last, n=n)
    return y, tuple(_samples(t, n) for t in (gates, h, c, squashed))


def lstm_backward(
    options: Options, g: Tensor, x: Tensor, params: Params, saved: Saved, needs: Needs
) -> tuple[Tensor | None, list[Factor | None]]:
    """Every local derivative for all steps at once; then, from step to step, what the cotangents make of them."""
    w_ih, w_hh, _, _, w_hr, *_ = params
    assert w_ih is not None and w_hh is not None
    n = len(x)
    gates, h, c, squashed = map(_steps, saved)
    dh, dc = _unflat(options, g, h.shape[-1], c.shape[-1])
    i, f, u, o = gates.chunk(4, -1)
    d = torch.empty_like(gates)
    di, df, du, do = d.chunk(4, -1)
    _aten.sigmoid_backward(u, i, grad_input=di)
    _aten.sigmoid_backward(options.before(c), f, grad_input=df)
    _aten.tanh_backward(i, u, grad_input=du)
    _aten.sigmoid_backward(squashed, o, grad_input=do)
    dcell = _aten.tanh_backward(o, squashed)  # of the cell by the output
    cellwise = d.unflatten(-1, (4, -1))[..., :3, :].unbind()  # i, f and u get the cell's cotangent
    each, dhs, dos, dcells, fs = (t.unbind() for t in (d, dh, do, dcell, f))
    following = None
    for t, *_ in reversed(list(options.order())):
        if following is not None:
            dhs[t].addmm_(each[following], w_hh)
        out = dhs[t] if w_hr is None else dhs[t] @ w_hr
        dc.addcmul_(out, dcells[t])
        cellwise[t].mul_(dc[:, None])
        dos[t].mul_(out)
        dc.mul_(fs[t])
        following = t
    assert following is not None
    gx, initial = _gradients(options, n, x, w_ih, d, [each[following] @ w_hh, dc], needs)
    factors = _weights(needs.params, _input(options, x), options.before(h), d, d, n)
    projection = Outer(_positions(o * squashed, n), _positions(dh, n)) if needs.params[4] else None
    return gx, [*factors, projection, *initial]


def _lstm_step(p: Tensor, h: Tensor, c: Tensor, w_hh: Tensor, b_hh: Any, w_hr: Any) -> list[Tensor]:
    i, f, g, o = (p + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return [h if w_hr is None else F.linear(h, w_hr), c]


# ---- gru -----------------------------------------------------------------------------------------------


def gru_forward(
    options: Options, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any, b_hh: Any, h0: Any
) -> tuple[Tensor, Saved]:
    n, size = len(x), w_hh.shape[1]
    h = _slots(options, *_initial(options, x, (h0,)))
    gates = F.linear(_steps(_input(options, x)), w_ih, b_ih)  # (L, B N, 3 H)
    if b_hh is not None:
        gates[..., : 2 * size] += b_hh[: 2 * size]
    inner = torch.empty_like(options.after(h))  # the state's part of the candidate
    inner[:] = 0 if b_hh is None else b_hh[2 * size :]
    w_gates, w_new = w_hh[: 2 * size].mT, w_hh[2 * size :].mT
    r, z, new = (part.unbind() for part in gates.chunk(3, -1))
    reset_update, hs, inners = gates[..., : 2 * size].unbind(), h.unbind(), inner.unbind()
    for t, before, after in options.order():
        reset_update[t].addmm_(hs[before], w_gates).sigmoid_()
        inners[t].addmm_(hs[before], w_new)
        new[t].addcmul_(r[t], inners[t]).tanh_()
        torch.lerp(new[t], hs[before], z[t], out=hs[after])
    return _flat(options, options.after(h), n=n), tuple(_samples(t, n) for t in (gates, h, inner))


def gru_backward(
    options: Options, g: Tensor, x: Tensor, params: Params, saved: Saved, needs: Needs
) -> tuple[Tensor | None, list[Factor | None]]:
    """All is linear in the cotangent of the state: its factors for all steps at once, then from step to step."""
    w_ih, w_hh, *_ = params
    assert w_ih is not None and w_hh is not None
    n = len(x)
    gates, h, inner = map(_steps, saved)
    (dh,) = _unflat(options, g, h.shape[-1])
    r, z, new = gates.chunk(3, -1)
    by_new = _aten.tanh_backward(1 - z, new)
    d = torch.empty_like(gates)  # cotangents of the state's products
    dr, dz, dn = d.chunk(3, -1)
    _aten.sigmoid_backward(by_new * inner, r, grad_input=dr)
    _aten.sigmoid_backward(options.before(h) - new, z, grad_input=dz)
    torch.mul(by_new, r, out=dn)
    gatewise, each, dhs, zs = d.unflatten(-1, (3, -1)).unbind(), d.unbind(), dh.unbind(), z.unbind()
    carry = torch.empty_like(dhs[0])
    following = None
    for t, *_ in reversed(list(options.order())):
        if following is not None:
            dhs[t].add_(carry)
        gatewise[t].mul_(dhs[t][:, None])
        torch.mul(dhs[t], zs[t], out=carry).addmm_(each[t], w_hh)
        following = t
    of_x = torch.cat([d[..., : 2 * h.shape[-1]], dh.mul_(by_new)], -1)
    gx, initial = _gradients(options, n, x, w_ih, of_x, [carry], needs)
    return gx, [*_weights(needs.params, _input(options, x), options.before(h), of_x, d, n), *initial]


def _gru_step(p: Tensor, h: Tensor, w_hh: Tensor, b_hh: Any) -> list[Tensor]:
    (xr, xz, xn), (hr, hz, hn) = p.chunk(3, -1), F.linear(h, w_hh, b_hh).chunk(3, -1)
    new = (xn + (xr + hr).sigmoid() * hn).tanh()
    return [new + (xz + hz).sigmoid() * (h - new)]


# ---- rnn -----------------------------------------------------------------------------------------------


def _rnn_forward(squash: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, Saved]]:
    def forward(
        options: Options, x: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Any, b_hh: Any, h0: Any
    ) -> tuple[Tensor, Saved]:
        n = len(x)
        h = _slots(options, *_initial(options, x, (h0,)))
        options.after(h).copy_(F.linear(_steps(_input(options, x)), w_ih, _total(b_ih, b_hh)))
        hs = h.unbind()
        for _, before, after in options.order():
            squash(hs[after].addmm_(hs[before], w_hh.mT))
        return _flat(options, options.after(h), n=n), (_samples(h, n),)

    return forward


def _rnn_backward(derivative: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def backward(
        options: Options, g: Tensor, x: Tensor, params: Params, saved: Saved, needs: Needs
    ) -> tuple[Tensor | None, list[Factor | None]]:
        w_ih, w_hh, *_ = params
        assert w_ih is not None and w_hh is not None
        n, h = len(x), _steps(saved[0])
        (d,) = _unflat(options, g, h.shape[-1])
        ds, local = d.unbind(), derivative(options.after(h)).unbind()
        following = None
        for t, *_ in reversed(list(options.order())):
            if following is not None:
                ds[t].addmm_(ds[following], w_hh)
            ds[t].mul_(local[t])
            following = t
        assert following is not None
        gx, initial = _gradients(options, n, x, w_ih, d, [ds[following] @ w_hh], needs)
        return gx, [*_weights(needs.params, _input(options, x), options.before(h), d, d, n), *initial]

    return backward


def _rnn_step(squash: Callable[[Tensor], Tensor]) -> Callable[..., list[Tensor]]:
    return lambda p, h, w_hh, b_hh: [squash(p + F.linear(h, w_hh, b_hh))]


# ---- a layer in one direction: what has a rule ---------------------------------------------------------


def _plain(step: Callable[..., list[Tensor]], states: int) -> Callable[..., Tensor]:
    """The layer by elementary ops, for derivatives of any order."""

    def plain(options: Options, x: Tensor, *params: Any) -> Tensor:
        (w_ih, w_hh, b_ih, b_hh, *others), given = params[:-states], params[-states:]
        state = _initial(options, x, given)
        projected = F.linear(_steps(_input(options, x)), w_ih, b_ih)
        out: list[Any] = [None] * options.length
        for t, *_ in options.order():
            state = step(projected[t], *state, w_hh, b_hh, *others)
            out[t] = state[0]
        return _flat(options, torch.stack(out), *state[1:], n=len(x))

    return plain


def _bind(x: Any, states: tuple[Any, ...], weights: tuple[Any, ...], reverse: bool) -> Call:
    """States that differ between samples go behind the input; others are parameters, or constants, of the call."""
    length, batch, width = x.shape
    level = ft.current_level()
    if level is None or not any(isinstance(s, Tensor) and ft.is_batched(s, level) for s in states):
        return Call(x, (*weights, *states), Options(reverse, length, batch, width, ()))
    operands = [t.wrapped if isinstance(t, Param) else t for t in (x, *states)]
    packed = torch.cat([t.flatten() for t in operands])
    options = Options(reverse, length, batch, width, tuple(s.shape[-1] for s in states))
    return Call(packed, (*weights, *[None] * len(states)), options)


Layer = Callable[[Any, tuple[Any, ...], tuple[Any, ...], bool], Tensor]


def _layer(name: str, plain: Callable[..., Tensor]) -> Layer:
    """One layer in one direction: x (L, B, I), states (B, H) to the output (L, B, P) and final cells, flat."""

    def layer(x: Any, states: tuple[Any, ...], weights: tuple[Any, ...], reverse: bool) -> Tensor:
        if has_torch_function((x, *states, *weights)):
            result: Tensor = handle_torch_function(layer, (x, *states, *weights), x, states, weights, reverse)
            return result
        return plain(Options(reverse, *x.shape, ()), x[None], *weights, *states)[0]

    layer.__name__ = layer.__qualname__ = name
    return layer


def _rule(name: str, forward: Any, backward: Any, step: Any, states: int, saves: int) -> Rule:
    plain = _plain(step, states)
    return Rule(
        name,
        (_layer(name, plain),),
        _bind,
        forward,
        backward,
        plain,
        saves=saves,
        autocast="lower",
        factors=("Outer", "Dense"),
    )


LSTM = _rule("lstm", lstm_forward, lstm_backward, _lstm_step, 2, 4)
GRU = _rule("gru", gru_forward, gru_backward, _gru_step, 1, 3)
RNN_TANH = _rule("rnn_tanh", _rnn_forward(torch.tanh_), _rnn_backward(lambda h: 1 - h * h), _rnn_step(torch.tanh), 1, 1)
RNN_RELU = _rule("rnn_relu", _rnn_forward(torch.relu_), _rnn_backward(lambda h: h > 0), _rnn_step(torch.relu), 1, 1)
LAYERS = (LSTM, GRU, RNN_TANH, RNN_RELU)


# ---- torch's functions, taken apart --------------------------------------------------------------------


class Stack(NamedTuple):
    """Layers as torch's functions get them: the weights of each layer and direction in a row."""

    layer: Layer
    params: Sequence[Any]
    biases: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool

    def weights(self, k: int) -> tuple[Any, ...]:
        """weight_ih, weight_hh, bias_ih, bias_hh and, for an lstm, weight_hr of the k-th layer and direction."""
        each = len(self.params) // (self.layers * (1 + self.bidirectional))
        w_ih, w_hh, *rest = self.params[k * each : (k + 1) * each]
        biases = tuple(rest[:2]) if self.biases else (None, None)
        return _complete(self.layer, (w_ih, w_hh, *biases, *rest[2 * self.biases :]))

    def run(self, x: Any, states: tuple[Any, ...]) -> tuple[Any, ...]:
        """x (L, B, I), states (K, B, H) to the output (L, B, D P) and the final states."""
        finals: list[Any] = [[] for _ in states]
        for number in range(self.layers):
            if number and self.dropout and self.train:
                x = F.dropout(x, self.dropout, True)
            ways = []
            for way in range(1 + self.bidirectional):
                k = number * (1 + self.bidirectional) + way
                out, last = _one(self.layer, x, tuple(s[k] for s in states), self.weights(k), bool(way))
                ways.append(out)
                for final, state in zip(finals, last, strict=True):
                    final.append(state)
            x = torch.cat(ways, -1) if self.bidirectional else ways[0]
        return x, *(torch.stack(f) for f in finals)


def _complete(layer: Layer, weights: tuple[Any, ...]) -> tuple[Any, ...]:
    """An lstm without projections says so."""
    return (*weights, None) if layer is LSTM.functions[0] and len(weights) == 4 else weights


def _one(
    layer: Layer, x: Any, states: tuple[Any, ...], weights: tuple[Any, ...], reverse: bool
) -> tuple[Any, list[Any]]:
    """A layer's output (L, B, P) and its final states (B, H)."""
    length, batch, _ = x.shape
    for state in states:
        if state.shape[:-1] != (batch,):
            raise RuntimeError(f"an initial state has shape {tuple(state.shape)} for {batch} sequences")
    y = layer(x, states, weights, reverse)
    size = length * batch * states[0].shape[-1]
    out = y[:size].unflatten(0, (length, batch, -1))
    cells = [y[size:].unflatten(0, (batch, -1))] if len(states) > 1 else []
    return out, [out[0 if reverse else -1], *cells]


def _states(hx: Any) -> tuple[Any, ...]:
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)


def _sequences(layer: Layer) -> Callable[..., Any]:
    """torch.lstm and its like, on padded or on packed sequences."""

    def padded(
        input: Any, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        stack = Stack(layer, params, has_biases, num_layers, dropout, train, bidirectional)
        out, *finals = stack.run(input.transpose(0, 1) if batch_first else input, _states(hx))
        return out.transpose(0, 1) if batch_first else out, *finals

    def packed(
        data: Any, batch_sizes: Any, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool,
    ) -> tuple[Any, ...]:  # fmt: skip
        stack = Stack(layer, params, has_biases, num_layers, dropout, train, bidirectional)
        index, lengths = _padding(len(data), batch_sizes.tolist(), data.device)
        states, outs, finals, places, start = _states(hx), [], [], [], 0
        for length, same in groupby(lengths):  # sequences of one length run together
            stop = start + len(list(same))
            rows = index[:length, start:stop]
            out, *final = stack.run(data[rows], tuple(s[:, start:stop] for s in states))
            outs.append(out.flatten(0, 1))
            places.append(rows.flatten())
            finals.append(final)
            start = stop
        if len(outs) == 1:
            return outs[0], *finals[0]
        return torch.cat(outs)[torch.cat(places).argsort()], *(torch.cat(f, 1) for f in zip(*finals, strict=True))

    def run(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        is_packed = "batch_sizes" in kwargs or (len(args) > 3 and isinstance(args[3], (list, tuple)))
        return packed(*args, **kwargs) if is_packed else padded(*args, **kwargs)

    return run


def _cell(layer: Layer) -> Callable[..., Any]:
    """torch.lstm_cell and its like: one step."""

    def run(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        _, last = _one(layer, input[None], _states(hx), _complete(layer, (w_ih, w_hh, b_ih, b_hh)), False)
        return last[0] if len(last) == 1 else tuple(last)

    return run


def _padding(size: int, batch_sizes: list[int], device: torch.device) -> tuple[Tensor, list[int]]:
    """Where in packed data each step of each sequence is, (L, B), and the sequences' lengths."""
    index, lengths = torch._VF._pad_packed_sequence(  # type: ignore[attr-defined]
        torch.arange(size, device=device), torch.tensor(batch_sizes), False, 0, len(batch_sizes)
    )
    return index, lengths.tolist()


def pack_padded_sequence(input: Any, lengths: Any, batch_first: bool) -> tuple[Any, Tensor]:
    """Sequences of lengths that all samples share; where they do not, `tolist` parts them."""
    index = torch.arange(input.shape[0] * input.shape[1], device=input.device).view(input.shape[:2])
    places, batch_sizes = torch._VF._pack_padded_sequence(index, torch.tensor(lengths.tolist()), batch_first)  # type: ignore[attr-defined]
    return input.flatten(0, 1)[places], batch_sizes


def pad_packed_sequence(
    data: Any, batch_sizes: Any, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Any, Tensor]:
    places = torch.arange(len(data), device=data.device)
    index, lengths = torch._VF._pad_packed_sequence(  # type: ignore[attr-defined]
        places, batch_sizes, batch_first, len(data), total_length
    )
    padding = data.new_full((1, *data.shape[1:]), padding_value)
    return torch.cat([data, padding])[index], lengths


_KINDS = (
    (LSTM, torch.lstm, torch.lstm_cell),
    (GRU, torch.gru, torch.gru_cell),
    (RNN_TANH, torch.rnn_tanh, torch.rnn_tanh_cell),
    (RNN_RELU, torch.rnn_relu, torch.rnn_relu_cell),
)
_COMPOSITES = (
    Composite("pack_padded_sequence", (torch._pack_padded_sequence,), pack_padded_sequence),
    Composite("pad_packed_sequence", (torch._pad_packed_sequence,), pad_packed_sequence),
    *(Composite(rule.name, (many,), _sequences(rule.functions[0])) for rule, many, _ in _KINDS),
    *(Composite(rule.name, (one,), _cell(rule.functions[0])) for rule, _, one in _KINDS),
)
RULES: tuple[Rule | Composite, ...] = (*LAYERS, *_COMPOSITES)
