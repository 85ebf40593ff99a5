"""Sums over all ranks of a tensor for each parameter, bucket by bucket."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..factors.numerics import wide
from .ranks import FIELDS, SMALL, Ranks

BUCKET = 25 << 20  # bytes that are reduced at a time: what DistributedDataParallel takes


class Meta(Protocol):
    """A parameter but for its numbers."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...


class Bucket(NamedTuple):
    """Parameters whose sums are reduced together."""

    indices: list[int]
    dtype: torch.dtype
    device: torch.device


class Sums:
    """One round of sums. Which buckets there are, and their order, follows from the parameters alone.

    A bucket is on its way as soon as its sums are made, while those of the next are worked out. The last number of a
    bucket says whether its rank has failed. The first round of a call begins with the heads; what they say is read
    before anything else is sent, since only then is it sure that all ranks have the same buckets.
    """

    def __init__(self, ranks: Ranks, metas: Sequence[Meta], count: Callable[[], int] = lambda: 0) -> None:
        self.ranks, self.metas, self.count = ranks, metas, count
        self.has_heads = ranks.heads is None and not ranks.rounds
        self.buckets = _buckets(metas, ranks.device if self.has_heads else None)
        self.flats: list[Tensor] = []
        self.works: list[Any] = []
        ranks.rounds.append(self)

    def following(self, totals: list[Tensor | None]) -> Iterator[int]:
        """The parameters in the order of the buckets, to be summed into `totals`: a bucket is sent when it is full."""
        for bucket in self.buckets:
            yield from bucket.indices
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
        indices, dtype, device = self.buckets[k]
        if self.has_heads and k == 0:
            flat = self.ranks.first(0 if totals is None else self.count(), failed=totals is None)
            if totals is not None:
                self._fill(flat, self.ranks.size * FIELDS, indices, totals)
        else:
            if self.has_heads and k == 1 and totals is not None:
                self.ranks.finished(self.works[0])
                self.ranks.read(self.flats[0])
            flat = torch.zeros(sum(prod(self.metas[i].shape) for i in indices) + 1, dtype=dtype, device=device)
            if totals is None:
                flat[-1] = 1
            else:
                self._fill(flat, 0, indices, totals)
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
        return any(bool(flat[-1] > 0) for flat in self.flats[1 if self.has_heads else 0 :])


def _buckets(metas: Sequence[Meta], first: torch.device | None) -> list[Bucket]:
    """Parameters in buckets, small ones in the first where that has the heads, on the device `first`."""
    sizes = [prod(meta.shape) for meta in metas]
    small: list[int] = []
    room = SMALL if first is not None else 0
    for i, size in enumerate(sizes):
        if size <= room:
            small.append(i)
            room -= size
    buckets = [] if first is None else [Bucket(small, torch.float64, first)]
    taken, full = set(small) if first is not None else set(), 0
    for i, meta in enumerate(metas):
        if first is not None and i in taken:
            continue
        kind = wide(meta.dtype), meta.device
        nbytes = sizes[i] * kind[0].itemsize
        last = buckets[-1] if len(buckets) > (first is not None) else None
        if last is None or (last.dtype, last.device) != kind or full + nbytes > BUCKET:
            buckets.append(Bucket([], *kind))
            full = 0
        buckets[-1].indices.append(i)
        full += nbytes
    return buckets
