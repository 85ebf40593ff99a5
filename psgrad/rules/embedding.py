"""embedding, embedding_bag, indexing a table with a tensor of integers, and index_select."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedOpError, place
from ..factors.assumptions import decide
from ..factors.base import Factor
from ..factors.numerics import as_rows
from ..factors.rows import Rows
from ..registry.rule import Call, Decline, Needs, Param, Rule
from ..torch_ import tracing


def forward(options: tuple[int | None, bool], index: Tensor, weight: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    padding, by_frequency = options
    return F.embedding(index, weight, padding, scale_grad_by_freq=by_frequency), ()


def backward(
    options: tuple[int | None, bool], g: Tensor, index: Tensor, params: Sequence[Tensor], saved: Any, needs: Needs
) -> tuple[None, list[Factor | None]]:
    if not needs.params[0]:
        return None, [None]
    padding, by_frequency = options
    (weight,) = params
    index, g = as_rows(index[..., None])[..., 0], as_rows(g)
    if by_frequency:  # of the row within its own sample
        g = g / _counts(index, len(weight))[..., None].to(g.dtype)
    if padding is not None:
        g = g.masked_fill((index == padding)[..., None], 0)
    return None, [Rows(index, g, len(weight))]


def _counts(index: Tensor, rows: int) -> Tensor:
    """How often each index (N, T) is there in its own sample."""
    if not tracing.can_look(index):  # how many there are without repetition is not known
        return (index[:, :, None] == index[:, None, :]).sum(2)
    apart = index + rows * torch.arange(len(index), device=index.device)[:, None]
    counts: Tensor
    _, where, counts = torch.unique(apart, return_inverse=True, return_counts=True)
    return counts[where]


def plain(options: tuple[int | None, bool], index: Tensor, weight: Tensor) -> Tensor:
    """The output alone. By frequency, of each sample by itself, as torch counts how often a row is in a call."""
    _, by_frequency = options
    if not by_frequency:
        return forward(options, index, weight)[0]
    return torch.stack([forward(options, own, weight)[0] for own in index])


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
        raise _renormalises("embedding", weight, max_norm)
    if weight.dim() != 2 or isinstance(input, Param):
        return Decline("the weight is not a table")
    return Call(input, (weight,), (_row(padding_idx, weight), scale_grad_by_freq))


def _renormalises(op: str, weight: Any, max_norm: float) -> UnsupportedOpError:
    name = weight.source.name if isinstance(weight, Param) else "its weight"
    return UnsupportedOpError(
        f"F.{op}(max_norm={max_norm}) changes {name} in place\n"
        f"  called at {place()}\n"
        "  per-sample gradients need parameters that stay put: renormalise before the call instead."
    )


def _row(padding_idx: int | None, weight: Any) -> int | None:
    """A row counted from the end, counted from the start."""
    return padding_idx + int(weight.shape[0]) if padding_idx is not None and padding_idx < 0 else padding_idx


# ---- bags: an embedding of every index, then the sum, mean or maximum of each bag -----------------------


class Bags(NamedTuple):
    mode: str
    padding: int | None  # this row counts for nothing
    include_last: bool  # the last offset is the end of the last bag


def pooled(bags: Bags, y: Tensor, index: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
    """The bags (N, B, D) of y (N, B, L, D) or, where `offsets` say where they begin, of y (N, T, D)."""
    kept = None if bags.padding is None else index != bags.padding
    if weights is not None:
        y = y * weights[..., None]
    if kept is not None:
        y = y.masked_fill(~kept[..., None], 0 if bags.mode != "max" else -torch.inf)
    if offsets is None and bags.mode != "max":
        y = y.sum(2)
        if bags.mode == "sum":
            return y
        return y / (index.shape[2] if kept is None else kept.sum(2).clamp(min=1)[..., None])
    if offsets is None:
        n, b, length = index.shape
        y, which = y.flatten(1, 2), torch.arange(b * length, device=y.device).div(length, rounding_mode="floor")
        which = which.expand(n, -1)
    else:
        _check(bags, offsets, index)
        n, b, which = len(y), offsets.shape[1] - bags.include_last, _bag_of(offsets, index)
    where = which + b * torch.arange(n, device=y.device)[:, None]  # (N, T), among all samples' bags
    counted = torch.ones_like(where) if kept is None else kept.flatten(1).to(where.dtype)
    count = where.new_zeros(n * b).index_add(0, where.flatten(), counted.flatten()).view(n, b, 1)
    if bags.mode == "max":
        return _largest(y, which, b, count)
    y = y.new_zeros(n * b, y.shape[-1]).index_add(0, where.flatten(), y.flatten(0, 1)).view(n, b, -1)
    return y if bags.mode == "sum" else y / count.clamp(min=1)


def _bag_of(offsets: Tensor, index: Tensor) -> Tensor:
    """The bag (N, T) that each position belongs to."""
    positions = torch.arange(index.shape[1], device=index.device, dtype=offsets.dtype).expand(index.shape)
    return torch.searchsorted(offsets.contiguous(), positions.contiguous(), right=True) - 1


def _check(bags: Bags, offsets: Tensor, index: Tensor) -> None:
    """What torch makes of other offsets is its own affair; a look at them is free on the CPU only."""
    if type(offsets) is Tensor and offsets.device.type == "cpu":
        last, end = offsets[:, -1], index.shape[1]
        ends = last == end if bags.include_last else last <= end
        if not decide(lambda: (offsets[:, 0] == 0).all() & (offsets.diff() >= 0).all() & ends.all()):
            raise RuntimeError("offsets that do not divide the indices into bags")


def _largest(y: Tensor, which: Tensor, b: int, count: Tensor) -> Tensor:
    """For each bag and column the first of the largest elements, as torch has it; 0 where a bag is empty."""
    n, t, d = y.shape
    bag = which[..., None].expand(y.shape)
    most = y.detach().new_full((n, b, d), -torch.inf).scatter_reduce(1, bag, y.detach(), "amax")
    position = torch.arange(t, device=y.device)[:, None].masked_fill(y.detach() != most.gather(1, bag), t)
    first = position.new_full((n, b, d), t).scatter_reduce(1, bag, position, "amin")
    found = y.gather(1, first.clamp(max=t - 1)).masked_fill(first == t, torch.nan)
    return found.masked_fill(count == 0, 0)


def bind_embedding_bag(
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Call | Decline:
    if max_norm is not None:
        raise _renormalises("embedding_bag", weight, max_norm)
    if weight.dim() != 2 or isinstance(input, Param) or isinstance(offsets, Param):
        return Decline("the weight is not a table")
    if scale_grad_by_freq:
        return Decline("scale_grad_by_freq")  # torch's kernel takes frequencies of other rows than the index's
    if mode not in ("sum", "mean", "max") or (mode == "max" and sparse) or input.numel() == 0:
        return Decline("another mode, or no indices")
    if input.dim() != (2 if offsets is None else 1) or (
        offsets is not None and (offsets.dim() != 1 or len(offsets) <= include_last_offset)
    ):
        return Decline("the offsets do not fit")  # torch says so itself
    dtype = weight.value.dtype if isinstance(weight, Param) else weight.dtype
    if per_sample_weights is not None:
        scale = per_sample_weights.value if isinstance(per_sample_weights, Param) else per_sample_weights
        if mode != "sum" or scale.shape != input.shape or scale.dtype != dtype:
            return Decline("the weights of the indices do not fit")  # torch says so itself
    padding = _row(padding_idx, weight)
    if padding is not None and not 0 <= padding < weight.shape[0]:
        return Decline("the padding is no row")  # torch says so itself
    after = partial(pooled, Bags(mode, padding, include_last_offset and offsets is not None))
    return Call(input, (weight,), (None, False), None, after, (input, offsets, per_sample_weights))


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


def bind_index_select(input: Any, dim: Any, index: Any) -> Call | Decline:
    """Rows of the table whose rows are the parameter's slices along `dim`."""
    if not isinstance(input, Param) or not isinstance(index, Tensor):
        return Decline("only a selection from a parameter has a rule")
    if index.dim() != 1 or not -input.dim() <= dim < input.dim():
        return Decline("a scalar, or the index or the dimension do not fit")  # torch says so itself
    count, axis = index.numel(), dim % input.dim()
    rows, shape = input.shape[axis], (*input.shape[:axis], *input.shape[axis + 1 :])
    weight = input.view(lambda v: v.movedim(axis, 0).reshape(rows, prod(shape)))
    if weight is None:
        return Decline("this layout of the parameter needs a copy")

    def after(y: Tensor) -> Tensor:
        return y.reshape(len(y), count, *shape).movedim(1, 1 + axis).contiguous()  # as torch's own is

    return Call(index, (weight,), (None, False), None, after)


EMBEDDING = Rule("embedding", (F.embedding,), bind_embedding, forward, backward, plain, native=True, factors=("Rows",))
RULES = (
    EMBEDDING,
    Rule("embedding_bag", (F.embedding_bag,), bind_embedding_bag, forward, backward, native=True, factors=("Rows",)),
    Rule(
        "index",
        (torch.Tensor.__getitem__,),
        bind_getitem,
        forward,
        backward,
        native=True,
        only_params=True,
        factors=("Rows",),
    ),
    Rule(
        "index_select",
        (torch.index_select, torch.Tensor.index_select),
        bind_index_select,
        forward,
        backward,
        native=True,
        only_params=True,
        factors=("Rows",),
    ),
)
