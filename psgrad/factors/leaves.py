"""Factors: the N per-sample gradients of one parameter at one call, unmaterialised.

A rule says which factor its backward yields; everything that is computed from per-sample gradients is
written once per factor type. Sums are taken in float32 at least.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache, reduce
from math import inf, prod, sqrt
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..torch_ import tracing
from ..torch_.storage import base_of
from . import costs as _plan
from . import huge_pages as _alloc

F = TypeVar("F", bound="Factor")


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
_IN_FLOAT64 = 1 << 13
_IN_FLOAT64_OFF_CPU = 1 << 22


def norms_of(grads: Tensor) -> Tensor:
    """Norms (N,) of gradients (N, *shape), whose squares may be beyond the dtype's range.

    A gradient that is not finite has a norm that is not, one of zeros the norm 0, and either touches no other.
    """
    return cast(wide_norms(grads), wide(grads.dtype))


def wide_norms(grads: Tensor) -> Tensor:
    """The same, be it in float64."""
    if grads.dim() != 2:
        grads = flat(grads)
    if grads.dtype is torch.float32 and grads.numel() <= _IN_FLOAT64 and grads.is_cpu:  # in small calls this counts
        return _vector_norm(grads, dim=1, dtype=torch.float64)
    return _norms_of_any(grads)


def _norms_of_any(grads: Tensor) -> Tensor:
    """The same of (N, P), whatever their number, dtype and device."""
    dtype = wide(grads.dtype)
    if grads.dtype is torch.float16:  # the squares of its numbers are in float32's range
        return _plain_norms(grads)
    recorded = tracing.is_recorded()  # then nothing may depend on values
    few = recorded or grads.numel() <= (_IN_FLOAT64 if grads.is_cpu else _IN_FLOAT64_OFF_CPU)
    if few and dtype is torch.float32 and grads.device.type != "mps":  # which has no float64
        return _vector_norm(grads, dim=1, dtype=torch.float64)
    if recorded:
        return _scaled_norms(grads)
    norms = _plain_norms(grads)
    index = _suspects(norms, _least_norm(dtype, grads.shape[1]))
    if index is not None:
        for some in index.split(_plan.tile(grads.shape[1] * dtype.itemsize)):
            norms[some] = _scaled_norms(grads[some])
    return norms


def _plain_norms(rows: Tensor) -> Tensor:
    """Norms (N,) of (N, P), right where the squares are in the dtype's range; a tenth of bmm's or einsum's time."""
    if rows.element_size() < 4:
        return _vector_norm(rows, dim=1, dtype=torch.float32)
    return _vector_norm(rows, dim=1)


def _least_norm(dtype: torch.dtype, p: int) -> float:
    """The norm of P numbers above which it does not matter what their squares lose below the smallest normal number."""
    return sqrt(p * _lost_below(dtype))


@lru_cache
def _lost_below(dtype: torch.dtype) -> float:
    """Where to a number of that size an error in the smallest normal number matters."""
    info = torch.finfo(dtype)
    return info.tiny / info.eps


def _suspects(t: Tensor, least: float) -> Tensor | None:
    """The indices at which `t` (N,) is not above `least`, or not finite; None where there are none. One look."""
    if type(t) is not Tensor or t.is_meta or len(t) == 0:  # shapes alone have no values to look at
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
    rows = flat(widened(grads))
    found = torch.mv(rows.t(), cast(w, rows.dtype))
    return found if grads.dim() == 2 else found.view(grads.shape[1:])


def scaled(g: Tensor, w: Tensor | None) -> Tensor:
    """Row n of `g` times w[n], in the dtype for sums."""
    g = widened(g)
    return g if w is None else g * cast(w, g.dtype).view(-1, *[1] * (g.dim() - 1))


class Factor:
    """The per-sample gradients of one parameter at one call. A type is a frozen dataclass of tensors with
    the sample axis in front; all but `dense`, `plan` and `shape` has a default."""

    @property
    def plan(self) -> _plan.Plan:
        """How `dense` goes about it, and what that costs."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample's gradient."""
        raise NotImplementedError

    def dense(self, out: Tensor | None = None) -> Tensor:
        """The gradients (N, *shape), written into `out` where it is given."""
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """What is held, sample axis first."""
        return [getattr(self, name) for name in _tensor_fields(type(self))]

    def each(self: F, change: Callable[[Tensor], Tensor]) -> F:
        """The same with every tensor changed."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))  # a third of the time of dataclasses.replace
        for name in _tensor_fields(type(self)):
            vars(other)[name] = change(getattr(self, name))
        return other

    def layout(self) -> Any:
        """The factor but for its tensors; equal for factors that differ in these alone."""
        held = _tensor_fields(type(self))
        return type(self), *(getattr(self, f.name) for f in fields(self) if f.name not in held)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.tensors()[0])

    def bytes(self) -> tuple[int, int]:
        """What is held, and what the gradients would take."""
        tensors = self.tensors()
        dense = tensors[0].shape[0] * prod(self.shape) * tensors[-1].element_size()
        return sum([t.nbytes for t in tensors]), dense

    def select(self: F, index: slice | Tensor) -> F:
        """The factor of some of the samples."""
        return self.each(lambda t: t[index])

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors()[-1].dtype

    def tiles(self: F, bytes_each: int | None = None) -> Iterator[tuple[slice, F]]:
        """The factor a few samples at a time, so that their gradients fit the workspace."""
        n, step = len(self), _plan.tile(prod(self.shape) * self.dtype.itemsize if bytes_each is None else bytes_each)
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            yield rows, self if step >= n else self.select(rows)

    def norms(self) -> Tensor:
        """Norms (N,)."""
        found = [norms_of(part.dense()) for _, part in self.tiles()]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _rooted(self, squares: Tensor, least: Tensor) -> Tensor:
        """Norms from their squares; where these are not above `least`, or not finite, from written gradients."""
        if tracing.is_recorded():  # which forbids a look
            return Factor.norms(self)
        norms = squares.clamp(min=0).sqrt_()
        index = _suspects(squares - least, 0)
        if index is not None:
            norms[index] = cast(self.select(index)._written_norms(), norms.dtype)
        return norms

    def _written_norms(self) -> Tensor:
        """Norms from the gradients written out, but for those that are known to be zero."""
        zero = self._vanishing()
        if zero is None or not bool(zero.any()):
            return Factor.norms(self)
        there = zero.logical_not().nonzero()[:, 0]
        found = Factor.norms(self.select(there)) if len(there) else None
        norms = torch.zeros(len(self), dtype=wide(self.dtype) if found is None else found.dtype, device=zero.device)
        return norms if found is None else norms.index_copy_(0, there, found)

    def _vanishing(self) -> Tensor | None:
        """Booleans (N,): gradients that are zero as what they are made of is; None: nobody knows."""
        return None

    def weighted_sum(self, w: Tensor | None = None) -> Tensor:
        """The sum over n of w[n] times gradient n; without `w` of the gradients."""
        sums = (weighted_sum_of(part.dense(), None if w is None else w[rows]) for rows, part in self.tiles())
        total = next(sums)
        for part in sums:
            total += part
        return total

    def add_weighted(self, total: Tensor, w: Tensor | None = None) -> None:
        """The same, added to `total` of the gradient's shape."""
        total.add_(self.weighted_sum(w))

    def spread(self, mean: Tensor) -> Tensor:
        """The sum over n of the squares of gradient n - mean."""
        total = torch.zeros_like(mean)
        for _, part in self.tiles():
            total += (widened(part.dense()) - mean).square_().sum(0)
        return total


_FIELDS: dict[type, tuple[str, ...]] = {}


def _tensor_fields(kind: Any) -> tuple[str, ...]:
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple(f.name for f in fields(kind) if f.type in (Tensor, "Tensor"))
    return _FIELDS[kind]


def _keep(grads: Tensor, out: Tensor | None) -> Tensor:
    return grads if out is None else out.copy_(grads)


def vanishing(x: Tensor, g: Tensor) -> Tensor:
    """Booleans (N,): samples that are zero in one of two tensors (N, ...) and finite in the other."""
    x, g = flat(x), flat(g)
    return (~x.any(1) & g.isfinite().all(1)) | (~g.any(1) & x.isfinite().all(1))


def as_rows(t: Tensor) -> Tensor:
    """(N, ..., D) as (N, T, D)."""
    axes = t.dim()
    return t if axes == 3 else t.flatten(1, -2) if axes > 3 else t[:, None]


def merged(t: Tensor) -> Tensor:
    """(N, B, ...) as (N B, ...)."""
    base = base_of(t)  # of a sample that was given an axis: the batch as it was, and nothing to do
    if base is None or base.requires_grad or t.requires_grad:  # a graph may have come another way than the memory
        return t.flatten(0, 1)
    n, b, *rest = t.shape
    alike = base.shape == (n * b, *rest) and base.dtype is t.dtype and base.is_contiguous() and t.is_contiguous()
    return base if alike else t.flatten(0, 1)


@dataclass(frozen=True, eq=False)
class Dense(Factor):
    """Gradients that are there already."""

    grads: Tensor  # (N, *shape)
    own: bool = True  # False: the tensor is another's too, so that a result must be a copy

    @property
    def plan(self) -> _plan.Plan:
        return _plan.Plan("as it is", 0, 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.grads.shape[1:])

    def dense(self, out: Tensor | None = None) -> Tensor:
        return _keep(self.grads if self.own or out is not None else self.grads.clone(), out)

    def norms(self) -> Tensor:
        return norms_of(self.grads)

    def weighted_sum(self, w: Tensor | None = None) -> Tensor:
        return weighted_sum_of(self.grads, w)


@dataclass(frozen=True, eq=False)
class Product(Factor):
    """Gradients that are products, element by element: x[n] g[n], written straight to where they go."""

    x: Tensor  # (N, *shape), or what broadcasts to it
    g: Tensor  # (N, *shape)

    @property
    def plan(self) -> _plan.Plan:
        return _plan.Plan("mul", self.g.numel(), 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.g.shape[1:])

    def dense(self, out: Tensor | None = None) -> Tensor:
        return self.x * self.g if out is None else torch.mul(self.x, self.g, out=out)


@dataclass(frozen=True, eq=False)
class Outer(Factor):
    """Gradients of a matrix, or of H of them: for sample n, the sum over t of g[n, t] x[n, t]^T."""

    x: Tensor  # (N, T, I) or (N, H, T, I); (N, I) where there is one position
    g: Tensor  # (N, T, O) or (N, H, T, O); (N, O)

    @property
    def plan(self) -> _plan.Plan:
        return _plan.Plan("bmm" if self._plain.x.dim() > 2 else "mul", self.x.numel() * self.g.shape[-1], 0)

    @property
    def rows(self) -> "Outer":
        """The same with an axis for positions."""
        return self if self.x.dim() > 2 else Outer(self.x[:, None], self.g[:, None])

    @property
    def _plain(self) -> "Outer":
        """The same without an axis for one position."""
        one = self.x.dim() == 3 and self.x.shape[1] == 1
        return Outer(self.x.squeeze(1), self.g.squeeze(1)) if one else self

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.x.shape[1:-2], self.g.shape[-1], self.x.shape[-1])

    def bytes(self) -> tuple[int, int]:
        x, g = self.x, self.g
        if x.dim() > 2:
            return super().bytes()
        return x.nbytes + g.nbytes, g.nbytes * x.shape[1]  # one position: often a small call

    def dense(self, out: Tensor | None = None) -> Tensor:
        x, g = (own := self._plain).x, own.g
        if x.dim() == 2:  # 0.2 to 0.7 of bmm's time
            g, x = g.unsqueeze(2), x.unsqueeze(1)
            product: Callable[..., Tensor] = torch.mul
        else:
            g, product = g.mT, torch.matmul
        if out is None:
            shape = (*g.shape[:-1], x.shape[-1])  # (N, [H,] O, I)
            if not _alloc.is_large(shape, g):
                return product(g, x)
            out = _alloc.empty(shape, g)
        if out.dtype != x.dtype:
            return out.copy_(product(g, x))
        if out.stride(-1) != 1 and out.stride(-2) == 1:  # the matrix is stored transposed: so is the product
            product(x.mT, g.mT, out=out.mT)
            return out
        return product(g, x, out=out)

    def norms(self) -> Tensor:
        if self.x.dim() == 2:
            return cast(wide_norms(self.x) * wide_norms(self.g), widest(self.x.dtype, self.g.dtype))
        x, g = (own := self._plain).x, own.g
        if x.dim() == 2:
            return own.norms()
        if x.dim() == 4:
            return norms_of(Outer(x.flatten(0, 1), g.flatten(0, 1)).norms().view(x.shape[:2]))
        n, t, i = x.shape
        plan = _plan.outer_norms(n, t, i, g.shape[-1], x.element_size())
        return self._rooted(*self.by_gram()) if plan.strategy == "gram" else super().norms()

    def by_gram(self) -> tuple[Tensor, Tensor]:
        """Squared norms: sum over t, s of (x[t] . x[s]) (g[t] . g[s]), in strips, each pair once by symmetry.

        And what they have to exceed. Where positions cancel, digits are lost: the squares that they have alone tell.
        Where x[t] . x[s] is below the smallest normal number d, up to I d is lost, which makes I d times the sum of all
        g[t] . g[s], at most T times that of the |g[t]|^2; the same for x; and T^2 d where the products are.
        """
        t, (i, o) = self.x.shape[1], (self.x.shape[2], self.g.shape[2])
        size = _plan.gram_strip(t)
        found, least = [], []
        for _, part in self.tiles(2 * size * t * 4):
            x, g = widened(part.x), widened(part.g)
            lost = t * _lost_below(x.dtype)
            total, low = x.new_zeros(len(x)), x.new_full((len(x),), t * lost)
            for start in range(0, t, size):
                end = min(start + size, t)
                of_x, of_g = torch.bmm(x[:, start:end], x[:, :end].mT), torch.bmm(g[:, start:end], g[:, :end].mT)
                diagonal = of_x.diagonal(start, 1, 2)
                low.add_(diagonal.sum(1), alpha=o * lost).add_(of_g.diagonal(start, 1, 2).sum(1), alpha=i * lost)
                products = of_x.mul_(of_g)
                last = products[:, :, start:]  # these positions with each other: both halves
                total.add_(products.flatten(1).sum(1), alpha=2).sub_(last.sum((1, 2)))
                low.add_(diagonal.sum(1), alpha=1e4 * torch.finfo(x.dtype).eps)
            found.append(total)
            least.append(low)
        return torch.cat(found), torch.cat(least)

    def _vanishing(self) -> Tensor | None:
        return vanishing(self.x, self.g)

    def weighted_sum(self, w: Tensor | None = None) -> Tensor:
        if self.x.dim() == 4:  # each head alone
            x, g = (t.transpose(0, 1).flatten(1, 2) for t in (widened(self.x), scaled(self.g, w)))
            return g.mT @ x
        return torch.mm(*self._weighted(w))

    def add_weighted(self, total: Tensor, w: Tensor | None = None) -> None:
        if self.x.dim() == 4:
            super().add_weighted(total, w)
        else:
            total.addmm_(*self._weighted(w))

    def _weighted(self, w: Tensor | None) -> tuple[Tensor, Tensor]:
        """Matrices (O, N T) and (N T, I) whose product is the weighted sum."""
        x, g = widened(self.x), widened(self.g)
        if x.dim() == 2:
            return g.t() if w is None else g.t() * cast(w, g.dtype), x
        x, g = (scaled(x, w), g) if x.numel() < g.numel() else (x, scaled(g, w))  # the smaller of the two
        return g.flatten(0, 1).mT, x.flatten(0, 1)

    def spread(self, mean: Tensor) -> Tensor:
        own = self._plain
        if own.x.dim() > 2 or own.x.device.type == "mps":  # which has no float64
            return super().spread(mean)
        x, g, m = own.x.double(), own.g.double(), mean.double()  # float64 for the differences
        squares = g.square().mT @ x.square() - 2 * m * (g.mT @ x) + len(x) * m.square()
        return squares.clamp_(min=0).to(mean.dtype)


class NormsOfMany:
    """Norms of one factor after another; of a tensor that two in a row hold, once.

    The cotangent of a linear layer is the gradient of its bias as well.
    """

    __slots__ = ("given", "last", "norms")

    def __init__(self) -> None:
        self.last: Tensor | None = None  # the last tensor, where it is small enough to be held
        self.norms: Any = None  # its norms
        self.given = False  # whether these are somebody's result: each has memory of its own

    def of(self, factor: Any) -> Tensor:
        """The factor's `norms()`, be they in float64."""
        kind = type(factor)
        if kind is Outer and (x := factor.x).dim() == 2:
            own, give, grads = wide_norms(x), False, factor.g
        elif kind is Dense:
            own, give, grads = None, True, factor.grads
        else:
            return factor.norms()  # type: ignore[no-any-return]
        if grads is not self.last or (give and self.given):
            self.norms, self.given = wide_norms(grads), False
            self.last = grads if grads.numel() <= _IN_FLOAT64 else None
        if own is not None:
            return own.mul_(self.norms)
        self.given = True
        return self.norms  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Rows(Factor):
    """Gradients of a table of rows: for sample n, g[n, t] added to row index[n, t]."""

    index: Tensor  # (N, T)
    g: Tensor  # (N, T, D)
    rows: int  # V

    @property
    def plan(self) -> _plan.Plan:
        return _plan.Plan("index_add", self.g.numel(), 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows, self.g.shape[-1]

    def dense(self, out: Tensor | None = None) -> Tensor:
        (n, _, d), v = self.g.shape, self.rows
        grads = out if out is not None and out.is_contiguous() and out.dtype == self.g.dtype else None
        grads = (_alloc.empty((n, v, d), self.g) if grads is None else grads).zero_()
        places = (self.index + v * torch.arange(n, device=self.g.device)[:, None]).flatten()
        grads.view(n * v, d).index_add_(0, places, self.g.flatten(0, 1))
        return grads if out is None or grads is out else out.copy_(grads)

    def norms(self) -> Tensor:
        _, t, d = self.g.shape
        if t == 1:
            return norms_of(self.g)
        return torch.cat([part._by_segments() for _, part in self.tiles(t * d * self.g.element_size())])

    def _by_segments(self) -> Tensor:
        """Each sample's rows with one index added up, in a table of T rows in place of V."""
        t = self.g.shape[1]
        ordered, order = self.index.sort(dim=1)
        begins = torch.zeros_like(ordered)
        begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        segment = torch.empty_like(order).scatter_(1, order, begins.cumsum(1))
        return norms_of(Rows(segment, widened(self.g), t).dense())

    def weighted_sum(self, w: Tensor | None = None) -> Tensor:
        g = scaled(self.g, w).flatten(0, 1)
        return g.new_zeros(self.shape).index_add_(0, self.index.flatten(), g)

    def spread(self, mean: Tensor) -> Tensor:
        """Rows that a sample does not touch differ from the mean by the mean."""
        if not tracing.can_look(self.index):  # how many are touched is not known
            return super().spread(mean)
        _, t, d = self.g.shape
        untouched = mean.new_full((self.rows,), len(self))
        total = torch.zeros_like(mean)
        for _, part in self.tiles(3 * t * d * self.g.element_size()):
            index, sums = part._summed()
            total.index_add_(0, index, (sums - mean[index]).square_())
            untouched.index_add_(0, index, mean.new_full((len(index),), -1))
        return total.add_(untouched[:, None] * mean.square())

    def _summed(self) -> tuple[Tensor, Tensor]:
        """The rows that each sample touches, once each: their indices (U,) and gradients (U, D)."""
        keys = (self.index + self.rows * torch.arange(len(self), device=self.index.device)[:, None]).flatten()
        found, where = torch.unique(keys, return_inverse=True)
        g = widened(self.g).flatten(0, 1)
        return found % self.rows, g.new_zeros(len(found), g.shape[1]).index_add_(0, where, g)


@dataclass(frozen=True, eq=False)
class Tied(Factor):
    """A table read by index and multiplied as a matrix, as language models tie embedding and head."""

    outer: Outer  # x (N, S, D), g (N, S, V)
    rows: Rows  # index (N, T), g (N, T, D)

    @property
    def plan(self) -> _plan.Plan:
        return _plan.Plan("bmm, index_add", self.outer.plan.flops + self.rows.plan.flops, 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape

    def tensors(self) -> list[Tensor]:
        return self.outer.tensors() + self.rows.tensors()

    def each(self, change: Callable[[Tensor], Tensor]) -> "Tied":
        return Tied(self.outer.each(change), self.rows.each(change))

    def layout(self) -> Any:
        return Tied, self.outer.layout(), self.rows.layout()

    def dense(self, out: Tensor | None = None) -> Tensor:
        grads = self.outer.dense(out)
        n_index = torch.arange(len(grads), device=grads.device)[:, None].expand(self.rows.index.shape)
        return grads.index_put_((n_index, self.rows.index), self.rows.g.to(grads.dtype), accumulate=True)

    def norms(self) -> Tensor:
        parts = in_float64(self.outer.norms()).square() + in_float64(self.rows.norms()).square()
        crossed = self._crossed()
        least = parts * (1e4 * torch.finfo(crossed.dtype).eps) + self._uncertain()
        return cast(self._rooted(parts + 2 * crossed, least), crossed.dtype)

    def _uncertain(self) -> Tensor:
        """How large squared norms have to be for what `_crossed` loses not to matter.

        Of S T summands each is the product of a sum over D, where the smallest normal number may be lost D times, and
        of an outer.g, which is smaller than the norm of all of them.
        """
        (_, s, d), t, g = self.outer.x.shape, self.rows.index.shape[1], self.outer.g
        largest = _vector_norm(flat(g), dim=1, dtype=wide(g.dtype))
        return largest.mul_(d).add_(1).mul_(2 * s * t * _lost_below(largest.dtype))

    def _vanishing(self) -> Tensor | None:
        return (self.outer.norms() == 0) & (self.rows.norms() == 0)

    def _crossed(self) -> Tensor:
        """<outer, rows> = sum over t, s of outer.g[s, index[t]] (rows.g[t] . outer.x[s])."""
        s = self.outer.x.shape[1]
        size = _plan.gram_block(self.rows.index.shape[1])
        found = []
        for _, part in self.tiles(2 * size * s * 4):
            x = widened(part.outer.x)
            total = x.new_zeros(len(x))
            for g, index in zip(part.rows.g.split(size, 1), part.rows.index.split(size, 1), strict=True):
                products = torch.bmm(x, widened(g).mT)  # (N, S, T)
                picked = part.outer.g.gather(2, index[:, None, :].expand(products.shape))
                total += products.mul_(picked).flatten(1).sum(1)
            found.append(total)
        return torch.cat(found)

    def weighted_sum(self, w: Tensor | None = None) -> Tensor:
        total = self.outer.weighted_sum(w)
        return total.index_add_(0, self.rows.index.flatten(), scaled(self.rows.g, w).flatten(0, 1).to(total.dtype))
