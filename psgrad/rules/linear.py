"""linear, and its spellings: matmul, mm, bmm, mv, addmm, einsum with one parameter operand; bilinear.

Every one of them reduces to one layout, y[n, h, t, o] = sum_i x[n, h, t, i] w[h, o, i], by views of the
input, the weight and the output.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..factors.base import Factor
from ..factors.dense import Dense
from ..factors.numerics import as_rows
from ..factors.outer import Outer
from ..factors.products import linear, product
from ..registry.rule import Call, Decline, Needs, Param, Rule
from ..torch_.storage import folded, parted


def forward(options: None, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    if weight.dim() == 3:  # x (N, H, T, I), weight (H, O, I)
        return torch.matmul(x, weight.mT), ()
    return linear(x, weight, bias), ()  # x (N, ..., I), weight (O, I)


def backward(
    options: None, g: Tensor, x: Tensor, params: Sequence[Tensor | None], saved: Any, needs: Needs
) -> tuple[Tensor | None, Sequence[Factor | None]]:
    weight, (of_weight, of_bias) = params[0], needs.params
    assert weight is not None
    gx = product(g, weight) if needs.x else None
    if x.dim() > 2 and weight.dim() == 2:
        n, *t, _ = x.shape
        x, g = (v.reshape(n, v.shape[-1]) if prod(t) == 1 else as_rows(v) for v in (x, g))
    bias = (Dense(g, own=False) if g.dim() == 2 else Dense(g.sum(1))) if of_bias else None
    return gx, (Outer(x, g) if of_weight else None, bias)


def bind_linear(input: Any, weight: Any, bias: Any = None) -> Call | Decline:
    if weight.dim() != 2 or (bias is not None and bias.dim() != 1):
        return Decline("the weight is not a matrix, or the bias not a vector")
    if bias is not None and bias.shape != weight.shape[:1]:
        return Decline("the bias broadcasts")
    if input.dim() == 2 and input.shape[0] == 1:  # as models see one sample: factors without the axis
        return Call(input, (weight, bias), None, folded, parted)
    return Call(input, (weight, bias))


def bind_bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Call | Decline:
    """A linear map of the outer products of the inputs, (..., I J) by (O, I J)."""
    if weight.dim() != 3 or isinstance(input1, Param):
        return Decline("the first input is a parameter")
    if input1.shape[:-1] != input2.shape[:-1] or (input1.shape[-1:] + input2.shape[-1:]) != weight.shape[1:]:
        return Decline("the inputs do not fit")  # torch says so itself
    if bias is not None and bias.shape != weight.shape[:1]:
        return Decline("the bias does not fit")  # torch says so itself
    operands = [t for t in (input1, input2, weight, bias) if t is not None]
    if len({t.value.dtype if isinstance(t, Param) else t.dtype for t in operands}) > 1:
        return Decline("the dtypes differ")  # torch says so itself
    if not isinstance(weight, Param):
        matrix = weight.flatten(1)
    elif (matrix := weight.view(lambda v: v.flatten(1))) is None:
        return Decline("this layout of the parameter needs a copy")

    def before(x: Tensor, other: Tensor) -> Tensor:
        return (x[..., :, None] * other[..., None, :]).flatten(-2)

    return Call(input1, (matrix, bias), None, before, None, (input2,))


# ---- contractions: a parameter and an input whose axes are named by letters -----------------------------


def _sizes(shape: Sequence[int], letters: str) -> dict[str, int]:
    return dict(zip(letters, shape, strict=True))


def contraction(x: Any, of_x: str, w: Param, of_w: str, of_out: str) -> Call | Decline:
    """A product of an input and a parameter, summed over the letters that the output does not have."""
    if any(len(set(letters)) != len(letters) for letters in (of_x, of_w, of_out)):
        return Decline("an axis is repeated")
    blocks = [a for a in of_out if a in of_x and a in of_w]
    inner = [a for a in of_x if a in of_w and a not in of_out]
    outer = [a for a in of_out if a in of_w and a not in of_x]
    times = [a for a in of_out if a in of_x and a not in of_w]
    if len(blocks) + len(inner) + len(times) != len(of_x) or len(blocks) + len(inner) + len(outer) != len(of_w):
        return Decline("an axis of one operand is summed alone")
    sizes, x_sizes = _sizes(w.shape, of_w), _sizes(x.shape, of_x)
    if any(sizes[a] != x_sizes[a] for a in blocks + inner):
        return Decline("the operands broadcast")
    sizes |= x_sizes

    def total(axes: list[str]) -> int:
        n = 1
        for a in axes:
            n *= sizes[a]
        return n

    lead = [total(blocks)] if blocks else []
    order_w = [of_w.index(a) for a in blocks + outer + inner]
    weight = w.view(lambda v: v.permute(order_w).reshape(*lead, total(outer), total(inner)))
    if weight is None:
        return Decline("this layout of the parameter needs a copy")
    order_x = [0, *(1 + of_x.index(a) for a in blocks + times + inner)]
    order_out = [0, *(1 + (blocks + times + outer).index(a) for a in of_out)]
    shape_out = [sizes[a] for a in blocks + times + outer]

    def before(x: Tensor) -> Tensor:
        return x.permute(order_x).reshape(len(x), *lead, total(times), total(inner))

    def after(y: Tensor) -> Tensor:
        return y.reshape(len(y), *shape_out).permute(order_out)

    return Call(x, (weight, None), None, before, after)


def _product(a: Any, b: Any, of_a: str, of_b: str, of_out: str) -> Call | Decline:
    if isinstance(a, Param) and isinstance(b, Param):
        return Decline("both operands are parameters")
    if isinstance(b, Param):
        return contraction(a, of_a, b, of_b, of_out)
    return contraction(b, of_b, a, of_a, of_out)


def bind_matmul(input: Any, other: Any) -> Call | Decline:
    a, b = input, other
    if a.dim() == 0 or b.dim() == 0:
        return Decline("an operand is a scalar")
    if isinstance(b, Param) and b.dim() == 2:  # the common x @ w: no letters needed
        weight = b.view(lambda v: v.mT)
        assert weight is not None
        return Call(a, (weight, None))
    batch_a, batch_b = a.dim() - 2, b.dim() - 2
    letters = "abcdefghij"[: max(batch_a, batch_b, 0)]
    of_a = "i" if a.dim() == 1 else letters[len(letters) - batch_a :] + "ti"
    of_b = "i" if b.dim() == 1 else letters[len(letters) - batch_b :] + "io"
    of_out = letters + ("t" if a.dim() > 1 else "") + ("o" if b.dim() > 1 else "")
    return _product(a, b, of_a.replace("t", "y").replace("i", "z"), of_b.replace("i", "z"), of_out.replace("t", "y"))


def bind_bmm(input: Any, mat2: Any) -> Call | Decline:
    return bind_matmul(input, mat2)


def bind_mv(input: Any, vec: Any) -> Call | Decline:
    return bind_matmul(input, vec)


def bind_addmm(input: Any, mat1: Any, mat2: Any, *, beta: Any = 1, alpha: Any = 1) -> Call | Decline:
    if beta != 1 or alpha != 1 or not isinstance(mat2, Param) or isinstance(mat1, Param):
        return Decline("only bias + x @ weight has a rule")
    if input.dim() != 1 or input.shape[0] != mat2.shape[1]:
        return Decline("the bias is not a vector of the output's width")
    weight = mat2.view(lambda v: v.mT)
    return Call(mat1, (weight, input))


def bind_einsum(equation: Any, *operands: Any) -> Call | Decline:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2:
        return Decline("einsum of other than two operands")
    left, arrow, of_out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if "..." in equation:
        spare = [c for c in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if c not in equation]
        widths = [t.dim() - len(term.replace("...", "")) for t, term in zip(operands, terms, strict=True)]
        dots = "".join(spare[: max(widths)])
        for i, width in enumerate(widths):
            terms[i] = terms[i].replace("...", dots[len(dots) - width :])
        of_out = of_out.replace("...", dots)
    else:
        dots = ""
    if not arrow:
        both = terms[0] + terms[1]
        of_out = dots + "".join(sorted(c for c in set(both) - set(dots) if both.count(c) == 1))
    if any(len(term) != t.dim() for t, term in zip(operands, terms, strict=True)):
        return Decline("the equation does not fit the operands")  # torch says so itself
    return _product(operands[0], operands[1], terms[0], terms[1], of_out)


def _rule(name: str, functions: tuple[Any, ...], bind: Any, *factors: str, autocast: str = "lower") -> Rule:
    return Rule(
        name,
        functions,
        bind,
        forward,
        backward,
        native=True,
        only_params=True,
        linear=True,
        autocast=autocast,
        factors=("Outer", *factors),
    )


T = torch.Tensor
LINEAR = _rule("linear", (F.linear,), bind_linear, "Dense")
BILINEAR = Rule(
    "bilinear", (F.bilinear,), bind_bilinear, forward, backward, native=True, linear=True, factors=("Outer", "Dense")
)
RULES = (
    LINEAR,
    _rule("matmul", (torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm), bind_matmul),
    _rule("bmm", (torch.bmm, T.bmm), bind_bmm),
    _rule("mv", (torch.mv, T.mv), bind_mv, autocast="lower off the CPU"),
    _rule("addmm", (torch.addmm, T.addmm), bind_addmm, "Dense"),
    _rule("einsum", (torch.einsum,), bind_einsum),
    BILINEAR,
)
