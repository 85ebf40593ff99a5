"""Sums over all ranks of a tensor for each parameter, bucket by bucket."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..factors.numerics import wide
from .ranks import FIELDS, SMALL, Ranks

BUCKET = 25 << 20  # bytes that are reduced at a time: what DistributedDataParallel takes
LARGE = 1 << 20  # bytes from which on a parameter's sum is reduced where it is, without a copy


class Meta(NamedTuple):
    """A parameter but for its numbers."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def new(self) -> Tensor:
        """Zeros like the parameter, in the dtype for sums."""
        return torch.zeros(self.shape, dtype=wide(self.dtype), device=self.device)


class Bucket(NamedTuple):
    """Parameters whose sums are reduced together; or one, which `is_large`, by itself."""

    indices: list[int]
    dtype: torch.dtype
    device: torch.device
    is_large: bool = False


class Sums:
    """One round of sums. Which buckets there are, and their order, follows from the parameters alone.

    A bucket is on its way as soon as its sums are made, while those of the next are worked out. The last one waits
    until nothing else of the round can fail: its last number says whether its rank has. The first round of a call
    begins with the heads; what they say is read before anything else is sent, since only then is it sure that all ranks
    have the same buckets.
    """

    def __init__(self, ranks: Ranks, metas: Sequence[Meta], count: Callable[[], int] = lambda: 0) -> None:
        self.ranks, self.metas, self.count = ranks, metas, count
        self.has_heads = ranks.heads is None and not ranks.rounds
        self.buckets = _buckets(metas, ranks.device if self.has_heads else None)
        self.flats: list[Tensor] = []
        self.works: list[Any] = []
        ranks.rounds.append(self)
        ranks.over = False

    def following(self, totals: list[Tensor | None]) -> Iterator[int]:
        """The parameters in the order of the buckets, to be summed into `totals`: all buckets but the last are sent."""
        for k, bucket in enumerate(self.buckets, 1):
            yield from bucket.indices
            if k < len(self.buckets):
                self._start(totals)

    def result(self, totals: list[Tensor | None]) -> list[Tensor]:
        """The sums over all ranks, in the dtype for sums. Raises where some rank has failed."""
        while len(self.works) < len(self.buckets):
            self._start(totals)
        if self._finish():
            self.ranks.refuse()
        found: list[Any] = [None] * len(self.metas)
        while self.flats:
            flat = self.flats.pop()
            k = len(self.flats)
            bucket, at = self.buckets[k], self.ranks.size * FIELDS if self.has_heads and k == 0 else 0
            if bucket.is_large:
                found[bucket.indices[0]] = flat
                continue
            for i in bucket.indices:
                meta = self.metas[i]
                size = prod(meta.shape)
                part = flat[at : at + size].view(meta.shape)
                found[i] = part.to(meta.device, wide(meta.dtype), copy=True)
                at += size
        self.ranks.rounds.remove(self)
        self.ranks.over = not self.ranks.rounds
        return found

    def abandon(self) -> None:
        """Take part in what is left with zeros, and say that this rank has failed."""
        while len(self.works) < len(self.buckets) and not (self.has_heads and self.works and self._known_to_fail()):
            self._start(None)
        for work in self.works:
            self.ranks.finished(work)

    def _known_to_fail(self) -> bool:
        """Whether the heads say that some rank has failed: then nobody sends anything else."""
        self.ranks.finished(self.works[0])
        heads = self.flats[0][: self.ranks.size * FIELDS].view(-1, FIELDS)
        return bool((heads[:, 0] > 0).any() or (heads[:, 1] != heads[0, 1]).any())

    def _start(self, totals: list[Tensor | None] | None) -> None:
        """Send the next bucket; without totals as a rank that has failed."""
        k = len(self.works)
        indices, dtype, device, is_large = self.buckets[k]
        if self.has_heads and k == 0:
            flat = self.ranks.first(0 if totals is None else self.count(), failed=totals is None)
            if totals is not None:
                self._fill(flat, self.ranks.size * FIELDS, indices, totals)
        else:
            if self.has_heads and k == 1 and totals is not None:
                self.ranks.finished(self.works[0])
                self.ranks.read(self.flats[0])
            total = totals[indices[0]] if is_large and totals is not None else None
            if total is not None and totals is not None:
                flat, totals[indices[0]] = total.to(device, dtype).contiguous(), None
            elif is_large:
                flat = torch.zeros(self.metas[indices[0]].shape, dtype=dtype, device=device)
            else:
                flat = torch.zeros(sum(prod(self.metas[i].shape) for i in indices) + 1, dtype=dtype, device=device)
                flat[-1] = totals is None
                self._fill(flat, 0, indices, totals or [None] * len(self.metas))
        self.flats.append(flat)
        self.works.append(self.ranks.started(flat))

    def _fill(self, flat: Tensor, at: int, indices: list[int], totals: list[Tensor | None]) -> None:
        for i in indices:
            size, total = prod(self.metas[i].shape), totals[i]
            if total is not None:
                flat[at : at + size].view(total.shape).copy_(total)
                totals[i] = None
            at += size

    def _finish(self) -> bool:
        """Wait for all buckets. Whether some rank has failed after the heads."""
        for work in self.works:
            self.ranks.finished(work)
        if self.has_heads and self.ranks.heads is None:
            self.ranks.read(self.flats[0])
        return not (self.has_heads and len(self.flats) == 1) and bool(self.flats[-1][-1] > 0)


def _buckets(metas: Sequence[Meta], first: torch.device | None) -> list[Bucket]:
    """Parameters in buckets: small ones in the first where that has the heads, on the device `first`; then large ones,
    each by itself; then the others. Where there is more than the first, the last is none of a large one: it has room to
    say that a rank has failed.
    """
    sizes = [prod(meta.shape) for meta in metas]
    small: list[int] = []
    large: list[Bucket] = []
    others: list[Bucket] = []
    room, full = SMALL if first is not None else 0, 0
    for i, meta in enumerate(metas):
        kind = wide(meta.dtype), meta.device
        nbytes = sizes[i] * kind[0].itemsize
        if first is not None and sizes[i] <= room:
            small.append(i)
            room -= sizes[i]
        elif nbytes >= LARGE:
            large.append(Bucket([i], *kind, True))
        elif others and (others[-1].dtype, others[-1].device) == kind and full + nbytes <= BUCKET:
            others[-1].indices.append(i)
            full += nbytes
        else:
            others.append(Bucket([i], *kind))
            full = nbytes
    if not others and (large or first is None):
        others.append(Bucket([], torch.float32, metas[0].device))
    return ([] if first is None else [Bucket(small, torch.float64, first)]) + large + others
