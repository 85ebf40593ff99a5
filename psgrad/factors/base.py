"""A factor: the N per-sample gradients of one parameter at one call, unmaterialised.

A rule says which factor its backward yields; everything that is computed from per-sample gradients is written once per
factor type. A type has to say `shape`, `plan` and `dense`; all else has a default that writes the gradients out, a few
samples at a time, so that a new type has every quantity from the start and overrides what it can do better.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from math import inf, prod
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..torch_ import tracing
from . import assumptions, costs
from .maps import Side, mapped_matrices
from .numerics import (
    SMALL_NORMS,
    cast,
    flat,
    norms_of,
    suspects,
    weighted_sum_of,
    wide,
    wide_norms,
    widened,
)

F = TypeVar("F", bound="Factor")


@dataclass(eq=False, slots=True)
class NormMemo:
    """Norms of one factor after another; of a tensor that two in a row hold, once.

    The cotangent of a linear layer is the gradient of its bias as well.
    """

    last: Tensor | None = None  # the last tensor, where it is small enough to be held
    found: Tensor | None = None  # its norms
    kept: bool = False  # whether these are somebody's result: each result has memory of its own

    def norms(self, grads: Tensor, to_keep: bool = False) -> Tensor:
        """Norms (N,), perhaps in float64; unless they are `to_keep` the caller only reads them."""
        if grads is not self.last or (to_keep and self.kept) or self.found is None:
            self.found, self.kept = wide_norms(grads), False
            self.last = grads if grads.numel() <= SMALL_NORMS else None
        self.kept = self.kept or to_keep
        return self.found


class Kron(NamedTuple):
    """Sums over samples and positions of what outer products are made of."""

    output: Tensor  # (O, O) of g g^T; (O,) where it is a diagonal
    input: Tensor  # (I, I) of x x^T


class Factor:
    """The per-sample gradients of one parameter at one call: a frozen dataclass of tensors, samples in front."""

    is_written: ClassVar[bool] = False  # the gradients are there already: writing them out costs nothing
    sums_positions: ClassVar[bool] = False  # many short sums cost more than one long sum, if they are merged

    @property
    def plan(self) -> costs.Plan:
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

    @property
    def fills_out(self) -> bool:
        """Whether `dense` writes straight to `out`: not what is there already, or what a kernel makes as a whole."""
        return not self.is_written

    def written_bytes(self) -> int:
        """What writing out the gradient of one sample takes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def tile_bytes(self) -> int:
        """How much is written out at once."""
        return costs.TILE

    def tiles(self: F, bytes_each: int | None = None) -> Iterator[tuple[slice, F]]:
        """The factor a few samples at a time, so that their gradients fit the workspace."""
        n = len(self)
        step = max(1, self.tile_bytes // max(1, self.written_bytes() if bytes_each is None else bytes_each))
        for start in range(0, n, step):
            rows = slice(start, min(start + step, n))
            yield rows, self if step >= n else self.select(rows)

    def norms(self) -> Tensor:
        """Norms (N,)."""
        found = [norms_of(part.dense()) for _, part in self.tiles()]
        return found[0] if len(found) == 1 else torch.cat(found)

    def norms_with(self, memo: NormMemo) -> Tensor:
        """The same, perhaps in float64; `memo` knows those of the factor before."""
        return self.norms()

    def rooted(self, squares: Tensor, least: Tensor) -> Tensor:
        """Norms from their squares; where these are not above `least`, or not finite, from written gradients."""
        if assumptions.are_noted():
            is_sure, zero = (squares > least) & (squares < inf), self.vanishing()
            assumptions.assume(is_sure if zero is None else is_sure | zero)
            return squares.clamp(min=0).sqrt_()
        if tracing.is_recorded():  # while ops are recorded we may not branch on values
            return Factor.norms(self)
        norms = squares.clamp(min=0).sqrt_()
        index = suspects(squares - least, 0)
        if index is not None:
            norms[index] = cast(self.select(index)._written_norms(), norms.dtype)
        return norms

    def _written_norms(self) -> Tensor:
        """Norms from the gradients written out, but for those that are known to be zero."""
        zero = self.vanishing()
        if zero is None or not bool(zero.any()):
            return Factor.norms(self)
        there = zero.logical_not().nonzero()[:, 0]
        found = Factor.norms(self.select(there)) if len(there) else None
        norms = torch.zeros(len(self), dtype=wide(self.dtype) if found is None else found.dtype, device=zero.device)
        return norms if found is None else norms.index_copy_(0, there, found)

    def vanishing(self) -> Tensor | None:
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

    def squared_deviations(self, mean: Tensor) -> Tensor:
        """The sum over n of the squares of gradient n - mean."""
        total = torch.zeros_like(mean)
        for _, part in self.tiles():
            total += (widened(part.dense()) - mean).square_().sum(0)
        return total

    def along(self, directions: Tensor) -> Tensor:
        """Inner products (N, K) with K directions (K, *shape), contiguous and in the dtype for sums."""
        columns = flat(directions).mT
        found = [torch.mm(cast(flat(part.dense()), columns.dtype), columns) for _, part in self.tiles()]
        return found[0] if len(found) == 1 else torch.cat(found)

    def mapped(self, left: Side, right: Side, dtype: torch.dtype) -> "Factor":
        """The gradients L g R^T, in `dtype`; the default writes them out, a few samples at a time on the way."""
        from .dense import Dense  # which is a factor itself

        parts = [mapped_matrices(part.dense(), left, right, dtype) for _, part in self.tiles()]
        return Dense(parts[0] if len(parts) == 1 else torch.cat(parts))

    def kron(self, dtype: torch.dtype) -> "Kron | None":
        """Where gradients are sums of outer products g x^T: the sums of g g^T and of x x^T. None: they are not."""
        return None

    # ---- as a term of a sum ----------------------------------------------------------------------------------

    def add_to(self, grads: Tensor) -> None:
        """Add the gradients to `grads`, contiguous and of as many numbers."""
        grads.add_(self.dense().reshape(grads.shape))

    def merge_key(self) -> Hashable:
        """What factors have in common that `merged_with` makes one of; None: it stays by itself."""
        return None

    def merged_with(self: F, others: "Sequence[Factor]") -> "Factor":
        """The sum with others of the same `merge_key`, as one factor."""
        raise NotImplementedError

    def transposed(self) -> "Factor | None":
        """The gradients of the transposed matrix; None: this type cannot say."""
        return None

    def without_graph(self) -> "Factor":
        """The same, with gradients that are still to be pulled back written out."""
        return self

    # ---- of several outputs ----------------------------------------------------------------------------------

    def jacobians(self, others: "Sequence[Factor]") -> Tensor:
        """Its gradients and those of other outputs of the same samples, at the same call: (N, K, *shape)."""
        return torch.stack([self.dense(), *(f.dense() for f in others)], 1)

    # ---- for inner products ----------------------------------------------------------------------------------

    def summands(self) -> "tuple[Factor, ...]":
        """Factors of the whole that add up to this one."""
        return (self,)

    def cut_grain(self) -> int:
        """How many rows of the parameter `cut` takes together; 0: it cannot cut."""
        return 0

    def cut(self, rows: slice) -> "Factor":
        """The factor of some rows of the parameter, a multiple of the grain."""
        raise NotImplementedError

    def rows_touched(self) -> Tensor | None:
        """The rows of the parameter that have a gradient for some sample, in order; None: all, or nobody knows."""
        return None

    def rows_at(self, index: Tensor) -> "Factor | None":
        """The factor of some rows of the parameter; None: only from the gradients written out."""
        return None


def without_zero_weights(factor: F, w: Tensor) -> F:
    """The same with zeros for samples of weight 0, whose gradients may not be finite: without a look at the weights."""
    counts = w != 0
    return factor.each(lambda t: t.where(counts.to(t.device).view(-1, *[1] * (t.dim() - 1)), 0))


_FIELDS: dict[type, tuple[str, ...]] = {}


def _tensor_fields(kind: Any) -> tuple[str, ...]:
    if kind not in _FIELDS:
        for f in fields(kind):
            if f.type in (Tensor | None, "Tensor | None", "torch.Tensor | None"):  # rows of it would not be taken
                raise TypeError(f"{kind.__name__}.{f.name} may be None: a factor's tensors are annotated Tensor")
        _FIELDS[kind] = tuple(f.name for f in fields(kind) if f.type in (Tensor, "Tensor", "torch.Tensor"))
    return _FIELDS[kind]
