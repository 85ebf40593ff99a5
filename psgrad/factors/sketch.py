"""Random projections of per-sample gradients that nobody has to write out, or only a few at a time.

A sketch gives every number of a parameter a random sign and one of `dim` places, and adds up what meets there. Places
go round in blocks of `dim` numbers, each turned by a random shift: two numbers of one block never meet, two of
different blocks with probability 1 / dim. So E <Pg, Ph> = <g, h>, with a variance of at most
(|g|^2 |h|^2 + <g, h>^2) / dim, which is that of a dense matrix of Gaussian numbers.
"""

from collections.abc import Iterator
from functools import lru_cache
from math import isqrt, prod
from typing import NamedTuple

import torch
from torch import Tensor

from . import costs, warm_memory
from .base import Factor
from .maps import Side, mapped_matrices
from .numerics import cast, flat
from .outer import Outer
from .patches import Patches
from .philox import Stream
from .rows import Rows
from .sum import Placement, Sum

SIGNS, SHIFTS, LEFT, RIGHT = range(4)  # purposes of streams


class Projection(NamedTuple):
    """What a parameter's gradients are projected by; `scale` is what they are multiplied with first, None: 1."""

    dim: int
    seed: int
    param: int  # its index among the parameters
    two_sided: bool
    scale: Tensor | None
    dtype: torch.dtype  # of the sums

    def __call__(self, own: Sum) -> Tensor:
        """(N, dim) from the gradients of the parameter."""
        like = torch.empty(0, dtype=self.dtype, device=own.tensors()[-1].device)
        sides = self.sides(own.shape, like) if self.two_sided else None
        if sides is None:
            return self._sketched(own, like)
        out = like.new_zeros(len(own), 2 * self.dim)
        if self.scale is None:
            grads = flat(own.mapped(*sides, self.dtype).dense())
            self._add(out, grads, self._signs(0, grads.shape[1], like), 0, grads.shape[1])
        else:  # which leaves no factor
            for rows, part in own.tiles():
                grads = flat(mapped_matrices(cast(part.dense(), self.dtype) * self.scale, *sides, self.dtype))
                self._add(out[rows], grads, self._signs(0, grads.shape[1], like), 0, grads.shape[1])
        return self._folded(out)

    def _stream(self, purpose: int) -> Stream:
        return Stream(self.seed, self.param, purpose)

    def _signs(self, start: int, stop: int, like: Tensor) -> Tensor:
        return self._stream(SIGNS).run(start, stop, like, warm_memory.keeps())

    # ---- a matrix from both sides ----------------------------------------------------------------------------

    def sides(self, shape: tuple[int, ...], like: Tensor) -> tuple[Side, Side] | None:
        """Random matrices (p, O) and (q, I) with p q <= dim; None where the sketch alone has no two numbers meet."""
        o, i = (shape[0], prod(shape[1:])) if shape else (1, 1)
        if o * i <= self.dim:
            return None
        p, q = two_sizes(o, i, self.dim)
        return self._side(p, o, LEFT, like), self._side(q, i, RIGHT, like)

    def _side(self, rows: int, columns: int, purpose: int, like: Tensor) -> Side:
        if rows == columns:
            return None
        signs = self._stream(purpose).run(0, rows * columns, like, warm_memory.keeps())
        return signs.view(rows, columns).mul_(rows**-0.5)

    # ---- the sketch ------------------------------------------------------------------------------------------

    def _sketched(self, own: Sum, like: Tensor) -> Tensor:
        out = like.new_zeros(len(own), 2 * self.dim)
        scale = None if self.scale is None else self.scale.flatten()
        for term in own.terms:
            start = _start(term)
            factor: Factor = term.factor
            if start is None:  # numbers that do not lie side by side
                factor, start = Sum((term,), own.whole), 0
            if isinstance(factor, Rows) and factor.shape == own.shape and factor.reads_few:
                out += self._table(factor, scale)
                continue
            begin, weights, room = -1, like, like
            for rows, first, part in _pieces(factor):
                part = _in(part, self.dtype)
                if part.fills_out:
                    room = _room(part, room)
                    grads = part.dense(room[: len(part) * prod(part.shape)].view(len(part), *part.shape))
                else:
                    grads = part.dense()
                grads = cast(flat(grads), self.dtype)
                if start + first != begin:  # else those of the samples before
                    begin = start + first
                    weights = self._signs(begin, begin + grads.shape[1], like)
                    weights = weights if scale is None else weights * scale[begin : begin + grads.shape[1]]
                self._add(out[rows], grads, weights, begin, prod(own.shape))
        return self._folded(out)

    def _add(self, out: Tensor, grads: Tensor, weights: Tensor, start: int, size: int) -> None:
        """Add numbers (n, L) times weights (L,), of places from `start` on, block by block to where they belong.

        `size`: how many numbers there are in all.
        """
        stop = start + grads.shape[1]
        shifts = shifts_of(self._stream(SHIFTS), self.dim, -(-size // self.dim))
        for block in range(start // self.dim, -(-stop // self.dim)):
            low, high = max(start, block * self.dim), min(stop, (block + 1) * self.dim)
            place = shifts[block] + low - block * self.dim
            some = slice(low - start, high - start)
            out[:, place : place + high - low].addcmul_(grads[:, some], weights[some])

    def _folded(self, out: Tensor) -> Tensor:
        """Places beyond `dim` come round again."""
        return out[:, : self.dim] + out[:, self.dim :]

    def _table(self, factor: Rows, scale: Tensor | None) -> Tensor:
        """Of a table only the rows that are read: (N, 2 dim), before it is folded."""
        (n, t, d), index, dim = factor.g.shape, factor.index, self.dim
        found = torch.zeros(n, 2 * dim, dtype=self.dtype, device=index.device)
        if factor.g.numel() == 0:
            return found
        blocks = -(-factor.rows * d // dim)
        drawn = self._stream(SHIFTS).below(dim, torch.arange(-(-blocks // 4), device=index.device))
        shifts = torch.cat([torch.stack(drawn, -1).flatten(), drawn[0].new_zeros(1)])  # a block after the last
        for some, part in factor.tiles(6 * t * d * 8):
            g = part.g.flatten(0, 1)
            for first in range(0, d, dim):  # numbers of a row that lie in two blocks at most
                steps = torch.arange(min(dim, d - first), device=index.device)
                starts = part.index.flatten() * d + first
                numbers = self._stream(SIGNS).signs(starts, len(steps), self.dtype)
                numbers = numbers.mul_(cast(g[:, first : first + len(steps)], self.dtype))
                if scale is not None:
                    numbers = numbers.mul_(scale[starts[:, None] + steps])
                block, place = starts // dim, starts % dim
                here = (place + shifts[block])[:, None]
                after = (place - dim + shifts[block + 1])[:, None]
                places = torch.where(steps < (dim - place)[:, None], here, after).add_(steps)
                found[some].scatter_add_(1, places.view(len(part), -1), numbers.view(len(part), -1))
        return found


def _in(factor: Factor, dtype: torch.dtype) -> Factor:
    """The factor in the dtype for sums, where its gradients are sums themselves: half precision has a short range."""
    sums = isinstance(factor, (Outer, Patches)) and factor.dtype is not dtype
    return factor.each(lambda t: cast(t, dtype)) if sums else factor


def two_sizes(o: int, i: int, dim: int) -> tuple[int, int]:
    """How many rows and columns an O x I matrix is projected to: p q <= dim, both about its root where that fits."""
    p = min(o, isqrt(dim))
    q = min(i, dim // p)
    return min(o, dim // q), q


@lru_cache(maxsize=1024)
def shifts_of(stream: Stream, dim: int, blocks: int) -> list[int]:
    """How far each block is turned: ints, so that nobody has to wait for a device."""
    found: list[int] = []
    for counter in range(-(-blocks // 4)):
        found += stream.below(dim, counter)
    return found


def _start(term: Placement) -> int | None:
    """Where the numbers of a term begin in the parameter; None where they do not lie side by side, in order."""
    if term.region is None:
        return 0
    region = term.region.coalesced()
    return region.offset if region.strides in ((), (1,)) else None


def _room(part: Factor, room: Tensor) -> Tensor:
    """Memory for a part's gradients, contiguous: that of the part before, where it is enough."""
    shape = (len(part), *part.shape)
    if len(room) < prod(shape) or room.dtype is not part.dtype:
        room = room.new_empty(prod(shape), dtype=part.dtype)
    return room


def _pieces(factor: Factor) -> Iterator[tuple[slice, int, Factor]]:
    """The factor in parts that are small when written out: which samples, from which number on, and the part.

    Some rows of the parameter, and of these a few samples at a time, so that signs are made once. A convolution lays
    out its patches for each part, and so is not cut.
    """
    n, width, itemsize = len(factor), prod(factor.shape[1:]), factor.dtype.itemsize
    grain = factor.cut_grain()
    if isinstance(factor, Outer) and len(factor.shape) == 2:
        most, step = costs.sketch_piece(n, factor.positions, width * itemsize)
    elif factor.written_bytes() <= costs.WORKSPACE or not grain or isinstance(factor, Patches):
        for rows, part in factor.tiles():
            yield rows, 0, part
        return
    else:
        most, step = n, grain * max(1, costs.WORKSPACE // max(1, n * width * grain * itemsize))
    for start in range(0, factor.shape[0], step):
        part = factor if step >= factor.shape[0] else factor.cut(slice(start, min(start + step, factor.shape[0])))
        for first in range(0, n, most):
            rows = slice(first, min(first + most, n))
            yield rows, start * width, part if most >= n else part.select(rows)
