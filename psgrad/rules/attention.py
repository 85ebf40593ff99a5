"""scaled_dot_product_attention: no parameters, but under vmap it would miss the native kernels."""

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ..registry.rule import BatchFold, Decline
from ..torch_ import kernels


class Options(NamedTuple):
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool


def bind_attention(
    randomness: str,
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[tuple[Any, ...], Options] | Decline:
    if dropout_p > 0 and randomness != "different":
        return Decline("all samples share one dropout mask")
    if not (query.dim() == key.dim() == value.dim() and 2 <= query.dim() <= 4):
        return Decline("operands of other than 2 to 4 axes")
    if attn_mask is not None and attn_mask.dim() > query.dim():
        return Decline("a mask with more axes than the query")
    return (query, key, value, attn_mask), Options(dropout_p, is_causal, scale, enable_gqa)


def attention(options: Options, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The native kernel on the sample axis folded into the batch axis; operands (N, [B,] [H,] L, E)."""
    shape = q.shape[:-2]
    if mask is not None:
        mask = mask.reshape(len(mask), *[1] * (q.dim() - mask.dim()), *mask.shape[1:])
        if q.dim() == 5:
            mask = mask.expand(-1, q.shape[1], -1, -1, -1)
        mask = _folded(mask)
    q, k, v = _folded(q), _folded(k), _folded(v)
    dropout_p, is_causal, scale, gqa = options
    if mask is not None and mask.requires_grad:  # the native kernels refuse it
        y: Tensor = kernels.attention_by_math(q, k, v, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=gqa)[0]
    else:
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=gqa)
    return y.reshape(*shape, *y.shape[-2:])


def _folded(t: Tensor) -> Tensor:
    """(N, L, E), (N, H, L, E) or (N, B, H, L, E) as four axes."""
    return t[:, None] if t.dim() == 3 else t.flatten(0, 1) if t.dim() == 5 else t


RULES = (BatchFold("scaled_dot_product_attention", (F.scaled_dot_product_attention,), bind_attention, attention),)
