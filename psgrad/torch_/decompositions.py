"""Ops that torch's compiler is given in smaller ones, in graphs of ours: then they are part of the loops around them.

Of a small graph the calls of other libraries are half of the time.
"""

from collections.abc import Callable
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

FEW = 4  # rows, columns, or numbers in a row: a product with so few is no product of matrices
SMALL = 1 << 15  # multiply-adds; of more, a library's call is worth what it costs
_FLOATS = (torch.float32, torch.float64)
_aten = torch.ops.aten


@cache
def table() -> dict[Any, Callable[..., Any]]:
    """The compiler's own table, with ours in front."""
    from torch._inductor.decomposition import select_decomp_table

    known = dict(select_decomp_table())
    own: dict[Any, Callable[..., Any]] = {_aten.mm.default: _mm, _aten.addmm.default: _addmm}
    own |= {_aten.mv.default: _mv, _aten.hypot.default: _hypot}
    return known | {op: _in_front(function, known.get(op)) for op, function in own.items()}


def _in_front(function: Callable[..., Any], other: Callable[..., Any] | None) -> Callable[..., Any]:
    def decomposed(*args: Any, **options: Any) -> Any:
        found = NotImplemented if options else function(*args)
        return found if found is not NotImplemented or other is None else other(*args, **options)

    return decomposed


def _is_small(a: Tensor, b: Tensor) -> bool:
    sizes = (*a.shape, b.shape[1])
    return a.is_cpu and a.dtype in _FLOATS and 0 < prod(sizes) <= SMALL and min(sizes) <= FEW


def _mm(a: Tensor, b: Tensor) -> Any:
    if not _is_small(a, b):
        return NotImplemented
    if a.shape[1] > FEW:
        return (a[:, :, None] * b).sum(1)
    terms = [a[:, i : i + 1] * b[i : i + 1] for i in range(a.shape[1])]
    return sum(terms[1:], start=terms[0])


def _addmm(bias: Tensor, a: Tensor, b: Tensor) -> Any:
    product = _mm(a, b)
    return product if product is NotImplemented else product + bias


def _mv(a: Tensor, v: Tensor) -> Any:
    return (a * v).sum(1) if a.is_cpu and a.dtype in _FLOATS and 0 < a.numel() <= SMALL else NotImplemented


def _hypot(a: Tensor, b: Tensor) -> Any:
    """By ops that vectors have. No square leaves the dtype's range; what is not finite stays so."""
    if not a.is_cpu or a.dtype not in _FLOATS or a.dtype is not b.dtype or a.stride() != b.stride():
        return NotImplemented  # where layouts differ torch gives the result strides that ours would not have
    a, b = a.abs(), b.abs()
    larger, smaller = torch.maximum(a, b), torch.minimum(a, b)
    ratio = torch.where(smaller == larger, 1.0, smaller / larger)  # 0 and infinity are not divided by themselves
    return larger * (1 + ratio * ratio).sqrt()
