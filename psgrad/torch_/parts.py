"""The parts of a tensor that belongs to transforms, and a linear function of each.

A tensor of `jvp` is a value and a tangent, a tensor of `vmap` K values, a tensor of `grad` a value and what follows it
backwards. A function that is linear in the tensor is its own derivative, so that it can be applied to the parts, one
layer after the other. An autograd Function with `jvp` and `vmap` staticmethods says the same, and takes ten times as
long.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _functorch as _ft
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter as _innermost
from torch._functorch.utils import enable_single_level_autograd_function as _for_one_level
from torch.autograd.forward_ad import _set_fwd_grad_enabled, make_dual, unpack_dual

from . import autograd, levels

_KINDS = _ft.TransformType
_KNOWN = (_KINDS.Vmap, _KINDS.Grad, _KINDS.Jvp)


class Linear(Protocol):
    """y = A x + b of a tensor (K, ...), with K independent of each other."""

    def __call__(self, x: Tensor) -> Tensor:
        """y for x of the innermost transform."""

    @property
    def tangent(self) -> "Linear":
        """A x."""

    @property
    def transposed(self) -> "Linear":
        """A^T g of a tensor (K, ...)."""


def are_known() -> bool:
    """Whether all transforms that are on are of kinds whose parts we know."""
    return all(layer.key() in _KNOWN for layer in _ft.get_interpreter_stack() or ())


def raised(t: Tensor, level: int) -> Tensor:
    """`t`, which is of `level`, as the transforms above it hand it out: the function may write to it."""
    for layer in _ft.get_interpreter_stack() or ():
        if layer.level() > level:
            t = _wrapped(t, layer)
    return t


def _wrapped(t: Tensor, layer: Any) -> Tensor:
    return t if layer.key() == _KINDS.Vmap else _ft._wrap_for_grad(t, layer.level())


def apply(linear: Linear, x: Tensor) -> Tensor:
    """`linear(x)` by calls of it with the innermost transform set aside."""
    layer, x = _innermost(), levels.alive(x)
    level, kind = layer.level(), layer.key()
    takes_part = levels.level_of(x) == level
    if takes_part and kind == _KINDS.Vmap:
        rows = levels.rows_in_front(x, level)
        with layer.lower():
            y = linear(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
        return levels.wrap(y, level)
    if takes_part and kind == _KINDS.Grad and x.requires_grad:
        return _differentiated(linear, x)
    tangent = unpack_dual(x).tangent if takes_part and kind == _KINDS.Jvp else None
    with layer.lower():
        y = linear(_ft._unwrap_for_grad(x, level))
        dy = None if tangent is None else linear.tangent(_ft._unwrap_for_grad(tangent, level))
    y = _wrapped(y, layer)
    return y if dy is None else make_dual(y, _wrapped(dy, layer))


class _Differentiated(torch.autograd.function._SingleLevelFunction):
    """A linear function of a tensor that the innermost transform differentiates backwards."""

    @staticmethod
    def forward(ctx: Any, linear: Linear, x: Tensor) -> Any:
        ctx.linear = linear
        ctx.set_materialize_grads(False)
        layer = _innermost()
        with torch.enable_grad(), _set_fwd_grad_enabled(True), layer.lower():  # autograd is off in here, for all levels
            y = linear(_ft._unwrap_for_grad(x, layer.level()))
        return _ft._wrap_for_grad(y, layer.level())

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        with autograd.without_modes():
            return None, None if g is None else ctx.linear.transposed(g)


_apply: Any = _Differentiated.apply  # type: ignore[attr-defined]


def _differentiated(linear: Linear, x: Tensor) -> Tensor:
    with _for_one_level():
        y: Tensor = _apply(linear, x)
    return y
