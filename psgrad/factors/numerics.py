"""Sums, norms and their dtypes: how numbers are added up so that neither digits nor range are lost.

Sums are taken in float32 at least. Norms are right where their squares are beyond the dtype's range.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from math import inf, sqrt

import torch
from torch import Tensor

from ..torch_ import tracing
from . import assumptions, costs


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of `dtype` are summed."""
    return torch.float32 if dtype.itemsize < 4 else dtype


@lru_cache
def widest(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of several are summed together."""
    return reduce(torch.promote_types, map(wide, dtypes))


def widened(t: Tensor) -> Tensor:
    return t if t.element_size() >= 4 else t.float()


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t.to(dtype)`, which costs 2 us even where there is nothing to do."""
    return t if t.dtype is dtype else t.to(dtype)


_vector_norm: Callable[..., Tensor] = torch.linalg.vector_norm


def flat(grads: Tensor) -> Tensor:
    """(N, *shape) as (N, P)."""
    axes = grads.dim()
    return grads if axes == 2 else grads.flatten(1) if axes > 2 else grads[:, None]


# So many float32 numbers have their squares added in float64. On the CPU, as more would cost more than the look at
# values that tells whether float32 will do; elsewhere, where a look makes the host wait, to bound the copy's memory.
SMALL_NORMS = 1 << 13
SMALL_NORMS_OFF_CPU = 1 << 22


def norms_of(grads: Tensor) -> Tensor:
    """Norms (N,) of gradients (N, *shape), whose squares may be beyond the dtype's range.

    A gradient that is not finite has a norm that is not, one of zeros the norm 0, and either touches no other.
    """
    return cast(wide_norms(grads), wide(grads.dtype))


def wide_norms(grads: Tensor) -> Tensor:
    """The same norms, perhaps in float64."""
    if grads.dim() != 2:
        grads = flat(grads)
    if grads.dtype is torch.float32 and grads.numel() <= SMALL_NORMS and grads.is_cpu:  # in small calls this counts
        return _vector_norm(grads, dim=1, dtype=torch.float64)
    return _norms_of_any(grads)


def _norms_of_any(grads: Tensor) -> Tensor:
    """The same norms of (N, P), whatever their number, dtype and device."""
    dtype = wide(grads.dtype)
    if grads.dtype is torch.float16:  # the squares of its numbers are in float32's range
        return _plain_norms(grads)
    recorded = tracing.is_recorded()  # then we may not branch on values
    few = recorded or grads.numel() <= (SMALL_NORMS if grads.is_cpu else SMALL_NORMS_OFF_CPU)
    if few and dtype is torch.float32 and grads.device.type != "mps":  # which has no float64
        return _vector_norm(grads, dim=1, dtype=torch.float64)
    if recorded:
        return _scaled_norms(grads)
    norms = _plain_norms(grads)
    # above this it does not matter what the squares of P numbers lose below the smallest normal number
    index = suspects(norms, sqrt(grads.shape[1] * lost_below(dtype)))
    if index is not None:
        for some in index.split(costs.tile(grads.shape[1] * dtype.itemsize)):
            norms[some] = _scaled_norms(grads[some])
    return norms


def _plain_norms(rows: Tensor) -> Tensor:
    """Norms (N,) of (N, P), right where the squares are in the dtype's range; a tenth of bmm's or einsum's time."""
    if rows.element_size() < 4:
        return _vector_norm(rows, dim=1, dtype=torch.float32)
    return _vector_norm(rows, dim=1)


@lru_cache
def lost_below(dtype: torch.dtype) -> float:
    """Where to a number of that size an error in the smallest normal number matters."""
    info = torch.finfo(dtype)
    return info.tiny / info.eps


def suspects(t: Tensor, least: float) -> Tensor | None:
    """The indices at which `t` (N,) is not above `least`, or not finite; None where there are none. One look."""
    if type(t) is not Tensor or t.is_meta or len(t) == 0:  # shapes alone have no values to look at
        return None
    if assumptions.doubt(lambda: (t > least) & (t < inf)):
        return None
    low, high = t.aminmax()  # NaN where there is one
    if float(low) > least and float(high) < inf:
        return None
    return ((t > least) & (t < inf)).logical_not_().nonzero()[:, 0]


def _scaled_norms(rows: Tensor) -> Tensor:
    """Norms (N,) of (N, P) by way of each row's largest number, so that no square leaves the dtype's range."""
    rows = widened(rows)
    if rows.shape[1] == 0:
        return rows.new_zeros(len(rows))
    largest = rows.abs().amax(1)
    usual = (largest > 0) & (largest < inf)
    return torch.where(usual, _vector_norm(rows / largest[:, None], dim=1) * largest, largest)


def in_float64(t: Tensor) -> Tensor:
    """`t` in float64 where the device has that."""
    return t if t.dtype is torch.float64 or t.device.type == "mps" else t.double()


def norm_of_norms(norms: Sequence[Tensor]) -> Tensor:
    """The norms (N,) of vectors whose parts have norms (N,); no square under- or overflows on the way."""
    return reduce(torch.hypot, norms)  # of 4 parts 9 us, where a norm of them stacked takes 23


def weighted_sum_of(grads: Tensor, w: Tensor | None) -> Tensor:
    """Gradients (N, *shape) summed with weights (N,), or as they are."""
    if w is None:
        return grads.sum(0, dtype=wide(grads.dtype))
    rows = grads if grads.dim() == 2 else flat(grads)
    if rows.element_size() < 4:
        rows = rows.float()
    found = torch.mv(rows.t(), w if w.dtype is rows.dtype else w.to(rows.dtype))
    return found if grads.dim() == 2 else found.view(grads.shape[1:])


def scaled(g: Tensor, w: Tensor | None) -> Tensor:
    """Row n of `g` times w[n], in the dtype for sums."""
    g = widened(g)
    return g if w is None else g * cast(w, g.dtype).view(-1, *[1] * (g.dim() - 1))


def vanishing(x: Tensor, g: Tensor) -> Tensor:
    """Booleans (N,): samples that are zero in one of two tensors (N, ...) and finite in the other."""
    x, g = flat(x), flat(g)
    return (~x.any(1) & g.isfinite().all(1)) | (~g.any(1) & x.isfinite().all(1))


def as_rows(t: Tensor) -> Tensor:
    """(N, ..., D) as (N, T, D)."""
    axes = t.dim()
    return t if axes == 3 else t.flatten(1, -2) if axes > 3 else t[:, None]
