"""conv1d, conv2d, conv3d, and their transposes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..factors.base import Factor
from ..factors.costs import ConvGeometry
from ..factors.dense import Dense
from ..factors.patches import Patches
from ..registry.rule import Call, Decline, Needs, Rule
from ..torch_ import tracing


def _of_input(g: Tensor, x: Tensor, weight: Tensor, geometry: ConvGeometry, *transposed: Any) -> Tensor:
    """The input's gradient, (N, B, C, *S) as `x` is; `transposed`: whether the convolution is, and its extra output.

    Torch asks for the input, of which only the shape is read: a compiled graph would write its numbers out once more.
    """
    stride, padding, dilation, groups = geometry
    shape = x.flatten(0, 1)
    shape = torch.empty_like(shape) if tracing.is_recorded() else shape
    gx, _, _ = torch.ops.aten.convolution_backward(
        g.flatten(0, 1), shape, weight, None, stride, padding, dilation, *transposed, groups, [True, False, False]
    )
    found: Tensor = gx.unflatten(0, x.shape[:2])
    return found


def forward(
    geometry: ConvGeometry, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    stride, padding, dilation, groups = geometry
    y = torch.convolution(x.flatten(0, 1), weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)
    return y.unflatten(0, x.shape[:2]), ()  # x (N, B, C, *S)


def backward(
    geometry: ConvGeometry, g: Tensor, x: Tensor, params: Sequence[Tensor | None], saved: Any, needs: Needs
) -> tuple[Tensor | None, list[Factor | None]]:
    weight, _ = params
    assert weight is not None
    gx = _of_input(g, x, weight, geometry, False, [0] * len(geometry.stride)) if needs.x else None
    factors: list[Factor | None] = [None, None]
    if needs.params[0]:
        factors[0] = Patches(x, g, geometry, tuple(weight.shape[2:]))
    if needs.params[1]:
        factors[1] = Dense(g.flatten(3).sum((1, 3)))
    return gx, factors


def _each(value: Any, d: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * d if len(values) == 1 else values


def _same(kernel: Sequence[int], dilation: Sequence[int]) -> tuple[tuple[int, ...], list[int]]:
    """Padding "same": what both sides get, and what F.pad puts on the far sides first."""
    totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    odd = [total % 2 for total in totals]
    return tuple(t // 2 for t in totals), [p for extra in reversed(odd) for p in (0, extra)] if any(odd) else []


def bind_conv(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Call | Decline:
    d = weight.dim() - 2
    stride, dilation = _each(stride, d), _each(dilation, d)
    far: list[int] = []
    if padding == "valid":
        padding = (0,) * d
    elif padding == "same":
        if any(s != 1 for s in stride):
            return Decline("stride with padding='same'")  # torch refuses it itself
        padding, far = _same(weight.shape[2:], dilation)
    else:
        padding = _each(padding, d)
    geometry = ConvGeometry(stride, padding, dilation, groups)
    single = input.dim() == d + 1  # no batch axis inside fn

    def before(x: Tensor) -> Tensor:
        x = x[:, None] if single else x
        return F.pad(x, far) if far else x

    def after(y: Tensor) -> Tensor:
        return y[:, 0]

    return Call(input, (weight, bias), geometry, before if single or far else None, after if single else None)


# ---- transposed -----------------------------------------------------------------------------------------


class Transposed(NamedTuple):
    geometry: ConvGeometry
    output_padding: tuple[int, ...]


def transposed_forward(
    options: Transposed, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    (stride, padding, dilation, groups), extra = options
    y = torch.convolution(x.flatten(0, 1), weight, bias, stride, padding, dilation, True, extra, groups)
    return y.unflatten(0, x.shape[:2]), ()  # x (N, B, C, *S)


def _reached(options: Transposed, g: Tensor, x: Tensor, kernel: Sequence[int]) -> tuple[Tensor, ConvGeometry]:
    """The cotangent as the input of a convolution that gives one output for each position of x.

    An output padding of a stride or more (there is one where the dilation is larger) would give it more
    outputs; then it is padded here, and what lies beyond the kernel's reach is left out.
    """
    geometry, extra = options
    if all(e < s for e, s in zip(extra, geometry.stride, strict=True)):
        return g, geometry
    g = F.pad(g, [p for side in reversed(geometry.padding) for p in (side, side)])
    for axis, (s, d, k) in enumerate(zip(geometry.stride, geometry.dilation, kernel, strict=True), start=3):
        g = g.narrow(axis, 0, (x.shape[axis] - 1) * s + d * (k - 1) + 1)
    return g, geometry._replace(padding=(0,) * len(kernel))


def transposed_backward(
    options: Transposed, g: Tensor, x: Tensor, params: Sequence[Tensor | None], saved: Any, needs: Needs
) -> tuple[Tensor | None, list[Factor | None]]:
    """The weight's gradient is that of the convolution which leads back, from the output to the input."""
    weight, _ = params
    assert weight is not None
    geometry, extra = options
    gx = _of_input(g, x, weight, geometry, True, extra) if needs.x else None
    factors: list[Factor | None] = [None, None]
    if needs.params[0]:
        kernel = tuple(weight.shape[2:])
        reached, geometry = _reached(options, g, x, kernel)
        factors[0] = Patches(reached, x, geometry, kernel)
    if needs.params[1]:
        factors[1] = Dense(g.flatten(3).sum((1, 3)))
    return gx, factors


def bind_transposed(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Call | Decline:
    d = weight.dim() - 2
    stride, padding, output_padding, dilation = (_each(v, d) for v in (stride, padding, output_padding, dilation))
    single = input.dim() == d + 1  # no batch axis inside fn
    return Call(
        input,
        (weight, bias),
        Transposed(ConvGeometry(stride, padding, dilation, groups), output_padding),
        (lambda x: x[:, None]) if single else None,
        (lambda y: y[:, 0]) if single else None,
    )


def _rule(f: Any, bind: Any, forward: Any, backward: Any) -> Rule:
    return Rule(f.__name__, (f,), bind, forward, backward, native=True, autocast="lower", factors=("Patches", "Dense"))


CONV = tuple(_rule(f, bind_conv, forward, backward) for f in (F.conv1d, F.conv2d, F.conv3d))
TRANSPOSED = tuple(
    _rule(f, bind_transposed, transposed_forward, transposed_backward)
    for f in (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
)
RULES = CONV + TRANSPOSED
