"""Inner products between the gradients of two sets of samples, factor against factor."""

from collections.abc import Iterator
from dataclasses import replace
from math import lcm, prod

import torch
from torch import Tensor

from ..torch_ import tracing
from . import costs as _plan
from .leaves import Dense, Factor, Outer, Rows, Tied, flat, wide, widened
from .patches import Patches


def dots(a: Factor, b: Factor) -> Tensor:
    """Inner products (N, M) of the gradients of N and of M samples, the parameter and its part being the same."""
    total: Tensor | None = None
    for one in _summands(a):
        for other in _summands(b):
            found = _dots(one, other)
            total = found if total is None else total.add_(found)
    assert total is not None
    return total


def _summands(factor: Factor) -> tuple[Factor, ...]:
    return (factor.outer, factor.rows) if isinstance(factor, Tied) else (factor,)


def _dots(a: Factor, b: Factor) -> Tensor:
    if isinstance(a, Dense) and isinstance(b, Dense) and _is_matrix(a) and _is_matrix(b) and a.dtype == b.dtype:
        return torch.mm(flat(a.grads), flat(b.grads).mT)
    if isinstance(a, Outer) and isinstance(b, Outer) and a.x.dim() < 4 and b.x.dim() < 4 and a.shape == b.shape:
        plan = _plan.outer_dots(len(a.x), _positions(a), len(b.x), _positions(b), *a.shape)
        if plan.strategy == "gram":
            return _by_gram(a, b)
    if (isinstance(a, Rows) or isinstance(b, Rows)) and a.shape == b.shape and tracing.can_look(a.tensors()[0]):
        if isinstance(a, Rows) and isinstance(b, Rows) and a.index.shape[1] == b.index.shape[1] == 1:
            products = widened(a.g[:, 0]) @ widened(b.g[:, 0]).mT
            return products.mul_(a.index == b.index.mT)
        touched = torch.unique(a.index if isinstance(a, Rows) else b.index)  # type: ignore[attr-defined]
        if len(touched) == 0:
            return widened(a.tensors()[-1]).new_zeros(len(a), len(b))
        same, a = a is b, _rows_of(a, touched)
        b = a if same else _rows_of(b, touched)
    return _by_tiles(a, b)


def _is_matrix(factor: Dense) -> bool:
    """Whether a product takes the gradients as they lie; others are laid out or widened a tile at a time."""
    return factor.grads.is_contiguous() and factor.grads.dtype == wide(factor.grads.dtype)


def _by_gram(a: Outer, b: Outer) -> Tensor:
    """The products of every position of one sample with every position of another."""
    m, t, s = len(b.x), _positions(a), _positions(b)
    x, g = _matrix(b.x).mT, _matrix(b.g).mT  # (I, M S), (O, M S)
    found = []
    for _, part in a.tiles(2 * t * m * s * 4):
        products = torch.mm(_matrix(part.x), x).mul_(torch.mm(_matrix(part.g), g))
        found.append(products.view(-1, t, m, s).sum((1, 3)) if t * s != 1 else products)
    return found[0] if len(found) == 1 else torch.cat(found)


def _positions(factor: Outer) -> int:
    """How many positions a sample has; one where there is no axis for them."""
    return 1 if factor.x.dim() == 2 else factor.x.shape[1]


def _matrix(t: Tensor) -> Tensor:
    """(N, T, I) as (N T, I), (N, I) as it is; in the dtype for sums."""
    return widened(t if t.dim() == 2 else t.flatten(0, 1))


def _rows_of(factor: Factor, touched: Tensor) -> Factor:
    """The factor of the rows `touched` of a table alone."""
    if isinstance(factor, Outer):
        return Outer(factor.x, factor.g[..., touched])
    if isinstance(factor, Rows):
        index = torch.searchsorted(touched, factor.index.contiguous()).clamp_(max=len(touched) - 1)
        there = (touched[index] == factor.index)[..., None]
        return Rows(index, factor.g.where(there, 0), len(touched))
    return Dense(factor.dense().view(len(factor), *factor.shape)[:, touched])


def _by_tiles(a: Factor, b: Factor) -> Tensor:
    """The gradients written out, a few of their rows at a time; once where both are the same."""
    dtype = wide(torch.promote_types(a.dtype, b.dtype))
    total: Tensor | None = None
    for one, other in zip(*_aligned(a, b), strict=True):
        rows = flat(one.dense()).to(dtype)
        columns = rows if a is b else flat(other.dense()).to(dtype)
        total = rows @ columns.mT if total is None else torch.addmm(total, rows, columns.mT, out=total)
    assert total is not None
    return total


def _aligned(a: Factor, b: Factor) -> tuple[Iterator[Factor], Iterator[Factor]]:
    """Both factors cut along the parameter's first axis in the same places."""
    if a.shape != b.shape or not (a.shape and _can_cut(a) and _can_cut(b)):
        return iter([a]), iter([b])
    size, grain = a.shape[0], lcm(_grain(a), _grain(b))
    n = len(a) if a is b else len(a) + len(b)
    each = n * prod(a.shape[1:]) * grain * wide(a.dtype).itemsize
    if isinstance(a, Patches) or isinstance(b, Patches):  # each cut has patches to lay out anew
        each = each * _plan.TILE // _plan.WORKSPACE
    step = grain * _plan.tile(each)
    cuts = [slice(start, min(start + step, size)) for start in range(0, size, step)]
    return (_cut(a, rows) for rows in cuts), (_cut(b, rows) for rows in cuts)


def _can_cut(factor: Factor) -> bool:
    return isinstance(factor, (Dense, Outer, Rows, Patches)) and factor.shape[0] > 0


def _grain(factor: Factor) -> int:
    """How many rows of the parameter go together."""
    if isinstance(factor, Patches) and factor.geometry.groups > 1:
        return factor.shape[0] // factor.geometry.groups
    return 1


def _cut(factor: Factor, rows: slice) -> Factor:
    """The factor of some rows of the parameter."""
    if rows.start == 0 and rows.stop == factor.shape[0]:
        return factor
    if isinstance(factor, Dense):
        return Dense(factor.grads[:, rows])
    if isinstance(factor, Outer):
        return (
            Outer(factor.x[:, rows], factor.g[:, rows]) if factor.x.dim() == 4 else Outer(factor.x, factor.g[..., rows])
        )
    if isinstance(factor, Rows):
        there = (factor.index >= rows.start) & (factor.index < rows.stop)
        index = (factor.index - rows.start).where(there, 0)
        return Rows(index, factor.g.where(there[..., None], 0), rows.stop - rows.start)
    assert isinstance(factor, Patches)
    groups, g = factor.geometry.groups, factor.g[:, :, rows]
    if groups == 1:
        return replace(factor, g=g)
    some = g.shape[2] // _grain(factor)  # whole groups
    width = factor.shape[1]
    first = rows.start // _grain(factor) * width
    x = factor.x[:, :, first : first + some * width]
    return replace(factor, x=x, g=g, geometry=factor.geometry._replace(groups=some))
