"""Blocks: the factors of samples that ran together, and what is asked of several of them."""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..factors import assumptions
from ..factors.base import NormMemo, without_zero_weights
from ..factors.numerics import cast, norm_of_norms
from ..factors.sum import Sum
from ..processes.sums import Meta as Meta
from ..processes.sums import Sums
from ..torch_ import tracing
from ..torch_.autograd import full_precision, in_full_precision


class Block(NamedTuple):
    """Samples that ran together: their places, and what is kept of each parameter's gradients."""

    places: Tensor | None  # (n,) among all samples; None: all, in order
    sums: tuple[Sum | None, ...]  # None: all gradients are zero
    small: bool = False  # so little is held that the order of sums does not matter

    def each(self, change: Callable[[Tensor], Tensor]) -> "Block":
        places = None if self.places is None else change(self.places)
        return Block(places, tuple(None if own is None else own.each(change) for own in self.sums), self.small)

    def without_graph(self) -> "Block":
        """The same, with gradients that are still to be pulled back written out."""
        return Block(self.places, tuple(None if own is None else own.without_graph() for own in self.sums), self.small)


def blocks_joined(parts: Sequence[tuple[Sequence[Block], int]], device: torch.device) -> tuple[Block, ...]:
    """The blocks of several sets of samples, given with their sizes, as blocks of all of them behind one another."""
    if len(parts) == 1:
        return tuple(parts[0][0])
    blocks, start = [], 0
    for own, n in parts:
        places = torch.arange(start, start + n, device=device)
        blocks += [Block(places if b.places is None else places[b.places], b.sums, b.small) for b in own]
        start += n
    return tuple(blocks)


@in_full_precision
def gathered(
    blocks: Sequence[Block],
    lead: tuple[int, ...],
    quantity: Callable[[Block], Tensor | None],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Rows of every block at the places of their samples; None are zeros."""
    if len(blocks) == 1 and blocks[0].places is None:
        found = quantity(blocks[0])
        if found is not None:
            return cast(found, dtype)
    out = torch.zeros(lead, dtype=dtype, device=device)
    for block in blocks:
        found = quantity(block)
        if found is not None:
            where = slice(None) if block.places is None else block.places
            out[where] = found.to(dtype)
    return out


def norms_of_param(i: int, block: Block) -> Tensor | None:
    own = block.sums[i]
    return None if own is None else own.norms()


def norms_of_block(block: Block) -> Tensor | None:
    memo = NormMemo()
    return norm_of_all([None if own is None else own.norms_with(memo) for own in block.sums])


def norm_of_all(norms: Sequence[Tensor | None]) -> Tensor | None:
    """The norms of all parameters together; None where all gradients are zero."""
    there = [t for t in norms if t is not None]
    if not there:
        return None
    try:
        return norm_of_norms(there)
    except RuntimeError:  # on several devices
        return norm_of_norms([t.to(there[0].device) for t in there])


def add_sums(
    block: Block,
    weights: Sequence[Tensor] | None,
    totals: list[Tensor | None],
    skip_zero_check: bool = False,
    across: Sums | None = None,
) -> None:
    """The weighted sums of a block's gradients, added to `totals`.

    `skip_zero_check`: the caller guarantees that weights of zero need no special handling. Where nobody else holds the
    block, memory falls with each sum: first those that free more than they take, then the others by what they free.
    `across`: nothing is added to the totals after this, and each goes to the other ranks, in the order that all have.
    """
    index, order = block.places, list(range(len(block.sums)))
    if not block.small and across is None:
        order.sort(key=[_freed(own) for own in block.sums].__getitem__)
    sums: list[Sum | None] = list(block.sums)
    del block
    given = w = there = None
    with full_precision():
        for i in order if across is None else across.following(totals):
            own, sums[i] = sums[i], None
            if own is None:  # zeros
                continue
            if weights is not None and weights[i] is not given:  # most parameters share their weights
                given = w = weights[i]
                if not skip_zero_check or index is not None:
                    w, there = _nonzero(given, index, skip_zero_check)
            if there is not None:
                own = own.select(there) if len(there) else None
            if own is None:
                continue
            if w is not None and not skip_zero_check and tracing.is_recorded() and not assumptions.are_noted():
                own = without_zero_weights(own, w)
            total = totals[i]
            if total is None:
                totals[i] = total = own.weighted_sum(w)
            else:
                own.add_weighted(total, w)
            if w is not None and not skip_zero_check and assumptions.are_noted():
                assumptions.assume_no_zero_met_nan(w, total)


def _freed(own: Sum | None) -> tuple[bool, int]:
    held = 0 if own is None else sum([t.nbytes for t in own.tensors()])
    return own is not None and held < 4 * prod(own.whole), -held


def _nonzero(w: Tensor, index: Tensor | None, skip_zero_check: bool) -> tuple[Tensor, Tensor | None]:
    """The weights of a block's samples; where some are 0, those of the others, and which they are."""
    w = w if index is None else w[index]
    if skip_zero_check or w.is_meta or tracing.is_recorded() or not bool((w == 0).any()):
        return w, None
    there = w.nonzero()[:, 0]
    return w[there], there
