"""A parameter added to, subtracted from, multiplied with or divided by something that differs per sample; prelu."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..factors.base import Factor
from ..factors.dense import Dense, Product
from ..registry.rule import Call, Decline, Needs, Param, Rule
from ..torch_ import kernels


class Options(NamedTuple):
    op: str  # add, sub, mul, div
    first: bool  # whether the parameter is the first operand


_OPS: dict[str, Callable[..., Any]] = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}


def forward(options: Options, x: Tensor, w: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    op = _OPS[options.op]
    return (op(w, x) if options.first else op(x, w)), ()


def _sum_to(grads: Tensor, n: int, shape: torch.Size) -> Tensor:
    """`grads` (N, ...) summed over the axes along which (N, *shape) was broadcast."""
    return grads.sum_to_size(n, *([1] * (grads.dim() - 1 - len(shape))), *shape).reshape(n, *shape)


def backward(
    options: Options, g: Tensor, x: Tensor, params: Sequence[Tensor], saved: Any, needs: Needs
) -> tuple[Tensor | None, list[Factor | None]]:
    (w,), (op, first), gx = params, options, None
    # the parameter first: its workspace is free again when the gradient of the input is allocated
    factor = _factor(options, g, x, w) if needs.params[0] else None
    if needs.x:
        if op == "add":
            gx = g
        elif op == "sub":
            gx = -g if first else g
        elif op == "mul":
            gx = g * w
        else:
            gx = -g * (w / x) / x if first else g / w
        gx = gx.sum_to_size(x.shape)
    return gx, [factor]


def _factor(options: Options, g: Tensor, x: Tensor, w: Tensor) -> Factor:
    (op, first), n = options, len(x)
    if op == "mul":
        return Product(x, g) if g.shape[1:] == w.shape else Dense(_sum_to(g * x, n, w.shape))
    if op == "div":
        return Dense(_sum_to(g / x, n, w.shape) if first else -_sum_to(g * x, n, w.shape) / w / w)
    if op == "sub" and not first:
        return Dense(-_sum_to(g, n, w.shape))
    gw = _sum_to(g, n, w.shape)
    return Dense(gw, own=gw.numel() != g.numel())  # where nothing was summed, it is g, which belongs to others


def _binder(op: str) -> Callable[..., Call | Decline]:
    def bind(input: Any, other: Any, *, alpha: Any = 1, rounding_mode: Any = None) -> Call | Decline:
        if alpha != 1 or rounding_mode is not None:
            return Decline("alpha and rounding_mode have no rule")
        first = isinstance(input, Param)
        if first and isinstance(other, Param):
            return Decline("both operands are parameters")
        w, x = (input, other) if first else (other, input)
        if w.value.is_complex() or x.is_complex():
            return Decline("complex numbers")
        if x.dtype != w.value.dtype and (x.dim() == 0 or w.dim() == 0):
            return Decline("a scalar of another dtype")  # which promotes by rules of its own
        extra = w.dim() - x.dim()

        def before(x: Tensor) -> Tensor:
            return x.reshape(len(x), *[1] * extra, *x.shape[1:])

        return Call(x, (w,), Options(op, first), before if extra > 0 else None)

    return bind


# ---- prelu ----------------------------------------------------------------------------------------------


def _slopes(x: Tensor, weight: Tensor) -> Tensor:
    """One slope, or one for each channel of x (N, B, C, ...), to be broadcast with x."""
    return weight.reshape(()) if weight.numel() == 1 else weight.view(-1, *[1] * (x.dim() - 3))


def prelu_forward(options: None, x: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    if weight.numel() == 1:
        return F.prelu(x, weight), ()
    return F.prelu(x.flatten(0, 1), weight).unflatten(0, x.shape[:2]), ()


def prelu_backward(
    options: None, g: Tensor, x: Tensor, params: Sequence[Tensor], saved: Any, needs: Needs
) -> tuple[Tensor | None, list[Factor | None]]:
    weight, n = params[0], len(x)
    gx, each = kernels.prelu_backward(g, x, _slopes(x, weight))  # both in one pass
    slopes = each.reshape(n, -1).sum(1) if weight.numel() == 1 else each.reshape(*x.shape[:3], -1).sum((1, 3))
    return (gx if needs.x else None), [Dense(slopes.view(n, *weight.shape))]


def bind_prelu(input: Any, weight: Any) -> Call | Decline:
    if not isinstance(weight, Param) or weight.dim() > 1 or isinstance(input, Param):
        return Decline("the slopes are not a parameter")
    if weight.numel() != 1 and (input.dim() < 2 or input.shape[1] != weight.numel()):
        return Decline("the slopes do not fit")  # torch says so itself
    return Call(input, (weight,))


T = torch.Tensor
_SPELLINGS = {
    "add": (torch.add, T.add, T.__add__, T.__radd__),
    "sub": (torch.sub, T.sub, T.__sub__, torch.subtract, T.subtract),
    "mul": (torch.mul, T.mul, T.__mul__, T.__rmul__, torch.multiply, T.multiply),
    "div": (torch.div, T.div, T.__truediv__, torch.divide, T.divide, torch.true_divide, T.true_divide),
}
RULES = (
    *(
        Rule(
            op,
            functions,
            _binder(op),
            forward,
            backward,
            native=True,
            keeps_input=op in ("mul", "div"),
            only_params=True,
            factors=("Product", "Dense") if op == "mul" else ("Dense",),
        )
        for op, functions in _SPELLINGS.items()
    ),
    Rule(
        "prelu",
        (F.prelu, T.prelu),
        bind_prelu,
        prelu_forward,
        prelu_backward,
        native=True,
        only_params=True,
        autocast="lower",
        factors=("Dense",),
    ),
)
