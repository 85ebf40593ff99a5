"""The loops over time of recurrent layers: what depends on the step before, and no more.

Tensors are (L, B N, F), the steps in front; states are slots (L + 1, B N, H): the initial one, then one after each
step, or in reverse. A loop is one op in graphs of `psgrad.compile`.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..factors import assumptions
from ..torch_.operators import as_one_op

_aten = torch.ops.aten
_one_op = partial(as_one_op, when=assumptions.are_for_others)  # graphs that others trace are of torch's ops alone


class Order(NamedTuple):
    """In which direction, and how many steps."""

    reverse: bool
    length: int

    @property
    def steps(self) -> range:
        return range(self.length)[::-1] if self.reverse else range(self.length)

    def before(self, slots: Tensor) -> Tensor:
        """The state before each step."""
        return slots[1:] if self.reverse else slots[:-1]

    def after(self, slots: Tensor) -> Tensor:
        return slots[:-1] if self.reverse else slots[1:]

    def first(self, slots: Tensor) -> Tensor:
        return slots[-1 if self.reverse else 0]

    def last(self, slots: Tensor) -> Tensor:
        return slots[0 if self.reverse else -1]


@_one_op(
    "psgrad::lstm_steps(Tensor(a!) gates, Tensor(b!) h, Tensor(c!) c, Tensor w_hh, Tensor? w_hr, bool reverse)"
    " -> (Tensor, Tensor)"
)
def lstm(
    gates: Tensor, h: Tensor, c: Tensor, w_hh: Tensor, w_hr: Tensor | None, reverse: bool
) -> tuple[Tensor, Tensor]:
    """The gates, states and cells (slots) in place of what comes from the input; tanh of the update and of the cell."""
    order = Order(reverse, len(gates))
    update, squashed = torch.empty_like(order.after(c)), torch.empty_like(order.after(c))
    i, f, raw, o = (t.unbind() for t in gates.chunk(4, -1))
    gate, u, s, w = gates.unbind(), update.unbind(), squashed.unbind(), w_hh.mT
    h_before, h_after, c_before, c_after = (
        t.unbind() for slots in (h, c) for t in (order.before(slots), order.after(slots))
    )
    for t in order.steps:
        gate[t].addmm_(h_before[t], w)
        u[t].copy_(raw[t]).tanh_()  # contiguous, in half the time
        gate[t].sigmoid_()  # one call for three gates, though it spoils `raw`
        torch.mul(f[t], c_before[t], out=c_after[t]).addcmul_(i[t], u[t])
        torch.tanh(c_after[t], out=s[t])
        if w_hr is None:
            torch.mul(o[t], s[t], out=h_after[t])
        else:
            torch.mm(o[t] * s[t], w_hr.mT, out=h_after[t])
    return update, squashed


@_one_op(
    "psgrad::lstm_steps_back(Tensor(a!) dh, Tensor(b!) dc, Tensor gates, Tensor c, Tensor u, Tensor squashed,"
    " Tensor w_hh, Tensor? w_hr, bool reverse) -> Tensor"
)
def lstm_back(
    dh: Tensor,
    dc: Tensor,
    gates: Tensor,
    c: Tensor,
    u: Tensor,
    squashed: Tensor,
    w_hh: Tensor,
    w_hr: Tensor | None,
    reverse: bool,
) -> Tensor:
    """The cotangent of the gates (L, B N, 4 H), those of states (slots) and cell in place of what came from behind.

    Every local derivative for all steps at once; then, step by step, times the cotangent of state or cell.
    """
    order = Order(reverse, len(gates))
    i, f, _, o = gates.chunk(4, -1)
    d = torch.empty_like(gates)
    di, df, du, do = d.chunk(4, -1)
    _aten.sigmoid_backward(u, i, grad_input=di)
    _aten.sigmoid_backward(order.before(c), f, grad_input=df)
    _aten.tanh_backward(i, u, grad_input=du)
    _aten.sigmoid_backward(squashed, o, grad_input=do)
    local = _aten.tanh_backward(o, squashed).unbind()  # of the cell, from the output
    by_cell = d.unflatten(-1, (4, -1))[..., :3, :].unbind()  # i, f and u
    gate, forget, by_out = d.unbind(), f.unbind(), do.unbind()
    before, after = order.before(dh).unbind(), order.after(dh).unbind()
    for t in reversed(order.steps):
        out = after[t] if w_hr is None else after[t] @ w_hr
        by_out[t].mul_(out)
        by_cell[t].mul_(dc.addcmul_(out, local[t])[:, None])
        dc.mul_(forget[t])
        before[t].addmm_(gate[t], w_hh)
    return d


@_one_op("psgrad::gru_steps(Tensor(a!) gates, Tensor(b!) h, Tensor(c!) inner, Tensor w_hh, bool reverse) -> Tensor")
def gru(gates: Tensor, h: Tensor, inner: Tensor, w_hh: Tensor, reverse: bool) -> Tensor:
    """The update; gates, states (slots) and the state's part of the update in place of what comes from the input."""
    order, size = Order(reverse, len(gates)), w_hh.shape[1]
    update = torch.empty_like(inner)
    w_both, w_inner = w_hh[: 2 * size].mT, w_hh[2 * size :].mT
    both, part, u = gates[..., : 2 * size].unbind(), inner.unbind(), update.unbind()
    r, z, raw = (t.unbind() for t in gates.chunk(3, -1))
    before, after = order.before(h).unbind(), order.after(h).unbind()
    for t in order.steps:
        both[t].addmm_(before[t], w_both).sigmoid_()
        part[t].addmm_(before[t], w_inner)
        torch.addcmul(raw[t], r[t], part[t], out=u[t]).tanh_()
        torch.lerp(u[t], before[t], z[t], out=after[t])
    return update


@_one_op(
    "psgrad::gru_steps_back(Tensor(a!) dh, Tensor gates, Tensor h, Tensor u, Tensor inner, Tensor w_hh, bool reverse)"
    " -> (Tensor, Tensor)"
)
def gru_back(
    dh: Tensor, gates: Tensor, h: Tensor, u: Tensor, inner: Tensor, w_hh: Tensor, reverse: bool
) -> tuple[Tensor, Tensor]:
    """The cotangents of the input's and of the state's products (L, B N, 3 H); those of states (slots) in place.

    Every local derivative for all steps at once; then, step by step, times the cotangent of the state.
    """
    order = Order(reverse, len(gates))
    r, z, _ = gates.chunk(3, -1)
    by_u = _aten.tanh_backward(1 - z, u)
    d = torch.empty_like(gates)  # of the state's products
    dr, dz, du = d.chunk(3, -1)
    _aten.sigmoid_backward(by_u * inner, r, grad_input=dr)
    _aten.sigmoid_backward(order.before(h) - u, z, grad_input=dz)
    torch.mul(by_u, r, out=du)
    gate, parts, kept = d.unbind(), d.unflatten(-1, (3, -1)).unbind(), z.unbind()
    before, after = order.before(dh).unbind(), order.after(dh).unbind()
    for t in reversed(order.steps):
        parts[t].mul_(after[t][:, None])
        before[t].addcmul_(after[t], kept[t]).addmm_(gate[t], w_hh)
    return torch.cat([dr, dz, by_u.mul_(order.after(dh))], -1), d


@_one_op("psgrad::rnn_steps(Tensor(a!) h, Tensor w_hh, bool relu, bool reverse) -> ()")
def rnn(h: Tensor, w_hh: Tensor, relu: bool, reverse: bool) -> None:
    """The states (slots) in place of what comes from the input."""
    order, squash, w = Order(reverse, len(h) - 1), torch.relu_ if relu else torch.tanh_, w_hh.mT
    before, after = order.before(h).unbind(), order.after(h).unbind()
    for t in order.steps:
        squash(after[t].addmm_(before[t], w))


@_one_op("psgrad::rnn_steps_back(Tensor(a!) dh, Tensor h, Tensor w_hh, bool relu, bool reverse) -> ()")
def rnn_back(dh: Tensor, h: Tensor, w_hh: Tensor, relu: bool, reverse: bool) -> None:
    """The cotangents of what is squashed in place of those of the states (slots)."""
    order = Order(reverse, len(h) - 1)
    states = order.after(h)
    local = (~(states <= 0) if relu else 1 - states * states).unbind()
    before, after = order.before(dh).unbind(), order.after(dh).unbind()
    for t in reversed(order.steps):
        before[t].addmm_(after[t].mul_(local[t]), w_hh)
