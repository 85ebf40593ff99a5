"""grouped_mm, by which mixtures of experts multiply each position with one of many matrices; and histc.

A sample's positions are sorted by matrix; offsets, which differ between samples, say where those of each matrix end.
For all samples together the rule asks of each position which matrix it meets.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..factors.assumptions import decide
from ..factors.base import Factor
from ..factors.matrices import Matrices, has_values, products
from ..registry.rule import BatchFold, Call, Decline, Needs, Param, Rule
from ..torch_ import kernels


def forward(is_turned: bool, x: Tensor, offsets: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """x (N, T, I), offsets (N, E) or (E,), weight (E, I, O), or (E, O, I) where it is turned."""
    n, t = x.shape[:2]
    ends = offsets.expand(n, -1).contiguous()
    _check(ends, t)
    positions = torch.arange(t, device=x.device, dtype=ends.dtype).expand(n, t).contiguous()
    index = torch.searchsorted(ends, positions, right=True)
    y = products(x.flatten(0, 1), index.flatten(), weight.mT if is_turned else weight)
    return y.unflatten(0, (n, t)), (index,)


def _check(ends: Tensor, t: int) -> None:
    """What torch makes of other offsets is its own affair; a look at them is free on the CPU only."""
    fit: Callable[[], Tensor] = lambda: (ends[:, 0] >= 0).all() & (ends.diff() >= 0).all() & (ends[:, -1] <= t).all()
    if has_values(ends) and ends.device.type == "cpu" and not decide(fit):
        raise RuntimeError("offsets that do not divide the positions into groups")


def backward(
    is_turned: bool, g: Tensor, x: Tensor, params: Sequence[Tensor], saved: tuple[Tensor, ...], needs: Needs
) -> tuple[Tensor | None, Sequence[Factor | None]]:
    (_, weight), (index,) = params, saved
    gx = None
    if needs.x:
        flat = products(g.flatten(0, 1), index.flatten(), weight if is_turned else weight.mT)
        gx = flat.unflatten(0, x.shape[:2])
    if not needs.params[1]:
        return gx, [None, None]
    return gx, [None, Matrices(index, *((x, g) if is_turned else (g, x)), len(weight))]


def bind_grouped_mm(
    mat_a: Any, mat_b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
) -> Call | Decline:
    if offs is None or mat_a.dim() != 2 or mat_b.dim() != 3:
        return Decline("not the rows of a matrix with one of several matrices each")
    if isinstance(mat_a, Param) or isinstance(offs, Param) or bias is not None or out_dtype is not None:
        return Decline("the rows are a parameter, or there is a bias or another dtype")
    fits = mat_a.shape[1] == mat_b.shape[1] and offs.shape == mat_b.shape[:1] and mat_a.dtype == mat_b.dtype
    if not fits or offs.dtype != torch.int32 or len(offs) == 0:
        return Decline("the operands do not fit")  # torch says so itself
    if isinstance(mat_b, Param):
        is_turned = not mat_b.value.is_contiguous()
        weight = mat_b.view(lambda v: v.mT) if is_turned else mat_b
    else:
        is_turned, weight = False, mat_b
    return Call(mat_a, (offs, weight), is_turned)


def bind_histc(
    randomness: str, input: Any, bins: int = 100, min: Any = 0, max: Any = 0
) -> tuple[tuple[Any, ...], Any] | Decline:
    return (input,), (bins, min, max)


def histograms(options: tuple[int, Any, Any], x: Tensor) -> Tensor:
    """Each sample's own; torch has no way to take several at once."""
    return torch.stack([torch.histc(own, *options) for own in x])


RULES = (
    Rule(
        "grouped_mm",
        kernels.GROUPED_MM,
        bind_grouped_mm,
        forward,
        backward,
        saves=1,
        takes_integers=True,
        factors=("Matrices",),
    ),
    BatchFold("histc", (torch.histc, torch.Tensor.histc), bind_histc, histograms),
)
