"""Inner products of per-sample gradients, factor against factor.

`dots` is between all samples of two sets, (N, M); `cross` is between two factors of the same samples, (N,).
"""

from collections.abc import Iterator
from math import lcm, prod

import torch
from torch import Tensor

from . import costs
from .base import Factor
from .dense import Dense
from .matrices import Matrices, has_values
from .numerics import flat, wide, widened
from .outer import Outer
from .rows import Rows


def dots(a: Factor, b: Factor) -> Tensor:
    """Inner products (N, M) of the gradients of N and of M samples, the parameter and its part being the same."""
    total: Tensor | None = None
    for one in a.summands():
        for other in b.summands():
            found = _dots(one, other)
            total = found if total is None else total.add_(found)
    assert total is not None
    return total


def _dots(a: Factor, b: Factor) -> Tensor:
    if isinstance(a, Dense) and isinstance(b, Dense) and _is_matrix(a) and _is_matrix(b) and a.dtype == b.dtype:
        return torch.mm(flat(a.grads), flat(b.grads).mT)
    if isinstance(a, Outer) and isinstance(b, Outer) and a.x.dim() < 4 and b.x.dim() < 4 and a.shape == b.shape:
        plan = costs.outer_dots(len(a.x), _positions(a), len(b.x), _positions(b), *a.shape)
        if plan.strategy == "gram":
            return _by_gram(a, b)
    if isinstance(a, Rows) and isinstance(b, Rows) and a.shape == b.shape and a.index.shape[1] == b.index.shape[1] == 1:
        products = widened(a.g[:, 0]) @ widened(b.g[:, 0]).mT
        return products.mul_(a.index == b.index.mT)
    if isinstance(a, Matrices) and isinstance(b, Matrices) and a.shape == b.shape and has_values(a.index):
        (n, t), (m, s), (count, o, i) = a.index.shape, b.index.shape, a.shape
        if costs.outer_dots(n, t, m, s, o, i, count).strategy == "gram":
            return a.dots(b)
    touched = _touched(a, b)
    if touched is not None:
        if len(touched) == 0:
            return widened(a.tensors()[-1]).new_zeros(len(a), len(b))
        same, a = a is b, _at(a, touched)
        b = a if same else _at(b, touched)
    return _by_tiles(a, b)


def _touched(a: Factor, b: Factor) -> Tensor | None:
    """Rows of the parameter outside which one of both is zero; None where all have to be looked at."""
    if a.shape != b.shape:
        return None
    found = a.rows_touched()
    return b.rows_touched() if found is None else found


def _at(factor: Factor, index: Tensor) -> Factor:
    """The factor of some rows of the parameter."""
    found = factor.rows_at(index)
    return Dense(factor.dense().view(len(factor), *factor.shape)[:, index]) if found is None else found


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
    grain = lcm(a.cut_grain(), b.cut_grain())
    if a.shape != b.shape or not a.shape or a.shape[0] == 0 or grain == 0:
        return iter([a]), iter([b])
    n = len(a) if a is b else len(a) + len(b)
    each = n * prod(a.shape[1:]) * grain * wide(a.dtype).itemsize
    step = grain * max(1, max(a.tile_bytes, b.tile_bytes) // max(1, each))
    cuts = [slice(start, min(start + step, a.shape[0])) for start in range(0, a.shape[0], step)]
    return _cut(a, cuts), _cut(b, cuts)


def _cut(factor: Factor, cuts: list[slice]) -> Iterator[Factor]:
    return iter([factor]) if len(cuts) == 1 else map(factor.cut, cuts)


def cross(outer: Outer, rows: Rows) -> Tensor:
    """<outer, rows> (N,) = sum over t, s of outer.g[s, index[t]] (rows.g[t] . outer.x[s]), nothing written out."""
    s, size = outer.x.shape[1], costs.gram_block(rows.index.shape[1])
    found = []
    for some, part in outer.tiles(2 * size * s * 4):
        x, own = widened(part.x), rows.select(some)
        total = x.new_zeros(len(x))
        for g, index in zip(own.g.split(size, 1), own.index.split(size, 1), strict=True):
            products = torch.bmm(x, widened(g).mT)  # (N, S, T)
            picked = part.g.gather(2, index[:, None, :].expand(products.shape))
            total += products.mul_(picked).flatten(1).sum(1)
        found.append(total)
    return torch.cat(found)
