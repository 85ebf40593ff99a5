"""embedding, and indexing a table with a tensor of integers."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._errors import UnsupportedOpError, place
from .._factors import Factor, Rows, as_rows
from .._registry import Call, Decline, Needs, Param, Rule


def forward(options: tuple[int | None, bool], index: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    padding, by_frequency = options
    return F.embedding(index, weight, padding, scale_grad_by_freq=by_frequency), ()


def backward(
    options: tuple[int | None, bool], g: Tensor, index: Tensor, params: Sequence[Tensor], saved: Any, needs: Needs
) -> tuple[None, list[Factor | None]]:
    if not needs.params[0]:
        return None, [None]
    padding, by_frequency = options
    (weight,), n = params, len(index)
    index, g = as_rows(index[..., None])[..., 0], as_rows(g)
    if by_frequency:  # of the row within its own sample
        rows = index + len(weight) * torch.arange(n, device=index.device)[:, None]
        _, where, counts = torch.unique(rows, return_inverse=True, return_counts=True)
        g = g / counts[where][..., None].to(g.dtype)
    if padding is not None:
        g = g.masked_fill((index == padding)[..., None], 0)
    return None, [Rows(index, g, len(weight))]


def bind_embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Call | Decline:
    if max_norm is not None:
        name = weight.source.name if isinstance(weight, Param) else "its weight"
        raise UnsupportedOpError(
            f"F.embedding(max_norm={max_norm}) changes {name} in place\n"
            f"  called at {place()}\n"
            "  per-sample gradients need parameters that stay put: renormalise before the call instead."
        )
    if weight.dim() != 2 or isinstance(input, Param):
        return Decline("the weight is not a table")
    rows = weight.shape[0]
    if padding_idx is not None and padding_idx < 0:
        padding_idx += rows
    return Call(input, (weight,), (padding_idx, scale_grad_by_freq))


def bind_getitem(table: Any, index: Any) -> Call | Decline:
    integers = (torch.int64, torch.int32)
    if not isinstance(table, Param) or not isinstance(index, Tensor) or index.dtype not in integers:
        return Decline("only a table indexed by one tensor of integers has a rule")
    shape, rows = table.shape[1:], table.shape[0]
    weight = table.view(lambda v: v.view(rows, -1)) if table.value.is_contiguous() else None
    if weight is None:
        return Decline("this layout of the parameter needs a copy")

    def before(index: Tensor) -> Tensor:
        return torch.where(index < 0, index + rows, index)

    def after(y: Tensor) -> Tensor:
        return y.unflatten(-1, shape) if len(shape) != 1 else y

    return Call(index, (weight,), (None, False), before, after if shape else lambda y: y.squeeze(-1))


EMBEDDING = Rule("embedding", (F.embedding,), bind_embedding, forward, backward, factors=("Rows",))
RULES = (
    EMBEDDING,
    Rule("index", (torch.Tensor.__getitem__,), bind_getitem, forward, backward, only_params=True, factors=("Rows",)),
)
