"""Large products of matrices on the CPU, by the quicker of the two libraries that torch has there.

torch gives products of float32 matrices to MKL, which on AMD's processors runs at half the speed of oneDNN,
torch's library for convolutions. A large product goes to oneDNN there. Everywhere else, and where somebody else has a
say (autograd, a transform, a tracer, a tensor of another type), it is torch's own.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..torch_ import kernels, levels, tracing
from . import huge_pages

LARGE = 1 << 23  # multiply-adds; of fewer, oneDNN's call costs as much as it saves
LARGE_RESULT = 1 << 15  # numbers, for products one by one: of fewer, laying out the operands anew costs more
PLAIN = (Tensor, torch.nn.Parameter)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a (..., M, K) times b (K, N)."""
    if a.numel() * b.shape[-1] < LARGE or not goes_to_onednn(a, b):
        return torch.matmul(a, b)
    return kernels.linear_by_onednn(a, b.mT)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` of x (..., I), weight (O, I) and bias (O,)."""
    if x.numel() * weight.shape[0] < LARGE or not goes_to_onednn(x, weight.mT, bias):
        return F.linear(x, weight, bias)
    return kernels.linear_by_onednn(x, weight, bias)


def long_product(a: Tensor, b: Tensor) -> Tensor:
    """a (M, K) times b (K, N): a sum of many outer products, as the gradient of a weight is.

    oneDNN lays out its first operand anew, with the K in a row. Where that would copy more than it takes to begin with
    `b` and to turn the result, `b` comes first.
    """
    (m, k), n = a.shape, b.shape[1]
    if m * k * n < LARGE:
        return torch.mm(a, b)
    if k * n + m * n < k * m and goes_to_onednn(b.mT, a.mT):
        return kernels.linear_by_onednn(b.mT, a).mT.contiguous()
    return product(a, b)


def batched_product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a (N, M, K) times b (N, K, L), written to `out` where it is given; or as torch.matmul has it.

    oneDNN has no call for many products: large ones are taken one by one, and copied while they are in the cache.
    """
    if not (are_large(a.shape, b.shape) and goes_to_onednn(a[0], b[0])):
        return torch.matmul(a, b) if out is None else torch.matmul(a, b, out=out)
    if out is None:
        out = huge_pages.empty((*a.shape[:2], b.shape[2]), a)
    for left, right, place in zip(a.unbind(), b.unbind(), out.unbind(), strict=True):
        place.copy_(kernels.linear_by_onednn(left, right.mT))
    return out


def are_large(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether products (N, M, K) times (N, K, L) are worth a call of oneDNN each."""
    if len(a) != 3 or len(b) != 3 or not kernels.MKL_IS_BEHIND:
        return False
    (n, m, k), size = a, b[2]
    return m * k * size >= LARGE and m * size >= LARGE_RESULT and n > 0 and b[:2] == (n, k)


def goes_to_onednn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> bool:
    """Whether a large product, a (..., M, K) times b (K, N) and plus a bias (N,), is for oneDNN.

    `b` has to be without gaps, in either order: it takes a thousand times as long where there are some. Of operands
    that do not fit torch says so itself.
    """
    return (
        kernels.MKL_IS_BEHIND
        and bool(torch.backends.mkldnn.enabled)
        and _is_plain(a)
        and _is_plain(b)
        and a.dim() > 1
        and b.dim() == 2
        and a.shape[-1] == b.shape[0]
        and (b.is_contiguous() or b.mT.is_contiguous())
        and (bias is None or (_is_plain(bias) and bias.shape == b.shape[1:] and bias.is_contiguous()))
        and not levels.has_tangents()
        and not (tracing.dispatch_modes() or tracing.is_recorded())
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
    )


def _is_plain(t: Tensor) -> bool:
    """Whether a tensor is an array of float32 on the CPU, which neither autograd nor a transform follows."""
    return (
        type(t) in PLAIN
        and t.dtype is torch.float32
        and t.is_cpu
        and t.layout is torch.strided
        and not t.is_nested
        and not (t.requires_grad and torch.is_grad_enabled())
        and not levels.is_transformed(t)
    )
