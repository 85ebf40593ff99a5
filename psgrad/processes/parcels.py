"""What one rank sends to another that has no fixed size: records with tensors in them."""

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .ranks import Ranks


class Matrix:
    """A round in which every rank sends a parcel to every rank, makes a matrix of those it gets, and all are summed."""

    def __init__(self, ranks: Ranks, dtype: torch.dtype) -> None:
        self.ranks, self.dtype = ranks, dtype
        self.shape: tuple[int, int] | None = None
        self.stage = 0
        self.flat: Tensor  # what is summed: heads first, then the matrix
        ranks.rounds.append(self)

    def exchanged(self, parcels: Sequence[Any], rows: int, columns: int) -> list[Any]:
        """Parcel k goes to rank k; this rank has so many rows and columns. Returns what came, by rank."""
        packed = [_packed(parcel, self.ranks.device) for parcel in parcels]
        self._heads(failed=False)
        self.ranks.read(self.flat)
        said = self._sizes([[len(words), len(numbers), rows, columns] for words, numbers in packed])
        if any(own[0] < 0 for own in said):
            self.ranks.refuse()
        sizes, self.shape = [own[:2] for own in said], (sum(own[2] for own in said), sum(own[3] for own in said))
        sent = torch.cat([part for both in packed for part in both])
        came = torch.empty(sum(map(sum, sizes)), dtype=torch.uint8, device=self.ranks.device)
        self.flat = torch.zeros(self.shape[0] * self.shape[1] + 1, dtype=self.dtype, device=self.ranks.device)
        if self._rooms(failed=False):
            self.ranks.refuse()
        with self.ranks.in_touch():
            splits = [sum(size) for size in sizes], [len(words) + len(numbers) for words, numbers in packed]
            dist.all_to_all_single(came, sent, *splits, group=self.ranks.group)
        self.stage = 3
        found = came.split([n for size in sizes for n in size])
        return [_unpacked(words, numbers) for words, numbers in zip(found[::2], found[1::2], strict=True)]

    def summed(self, make: Callable[[], Tensor | None]) -> Tensor:
        """The sum over all ranks of what `make` gives, None for zeros. Raises where some rank has failed."""
        assert self.shape is not None
        own = make()
        if own is not None:
            self.flat[:-1].view(self.shape).copy_(own)
        self._sum()
        if bool(self.flat[-1] > 0):
            self.ranks.refuse()
        self.ranks.rounds.remove(self)
        self.ranks.over = True
        return self.flat[:-1].view(self.shape)

    def abandon(self) -> None:
        """Take part in what is left, and say that this rank has failed."""
        if self.stage == 0:
            self._heads(failed=True)
        elif self.stage == 1:
            self._sizes([[-1] * 4] * self.ranks.size)
        elif self.stage == 2:
            self._rooms(failed=True)
        elif self.stage == 3:
            self.flat.zero_()[-1] = 1
            self._sum()

    def _heads(self, failed: bool) -> None:
        self.flat = self.ranks.first(0, failed)
        self.ranks.finished(self.ranks.started(self.flat))
        self.stage = 1

    def _sizes(self, own: list[list[int]]) -> list[list[int]]:
        sent = torch.tensor(own, device=self.ranks.device)
        came = torch.empty_like(sent)
        with self.ranks.in_touch():
            dist.all_to_all_single(came, sent, group=self.ranks.group)
        self.stage = 2
        return [[int(number) for number in row] for row in came.tolist()]

    def _rooms(self, failed: bool) -> bool:
        """Whether some rank has no room for what comes."""
        said = torch.tensor([float(failed)], device=self.ranks.device)
        self.ranks.finished(self.ranks.started(said))
        return bool(said > 0)

    def _sum(self) -> None:
        self.stage = 4
        self.ranks.finished(self.ranks.started(self.flat))


class _Packer(pickle.Pickler):
    """Everything but the numbers of tensors, which are listed."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        self.tensors.append(obj)
        return tuple(obj.shape), obj.dtype


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, numbers: Tensor) -> None:
        super().__init__(file)
        self.numbers = numbers

    def persistent_load(self, pid: Any) -> Tensor:
        shape, dtype = pid
        size = torch.Size(shape).numel() * dtype.itemsize
        own, self.numbers = self.numbers[:size], self.numbers[size:]
        return own.clone().view(dtype).view(shape)  # a clone is aligned, whatever its dtype


def _packed(parcel: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """A parcel as two tensors of bytes: words, and the numbers of its tensors."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(parcel)
    words = torch.frombuffer(file.getbuffer(), dtype=torch.uint8).to(device, copy=True)
    numbers = [t.detach().to(device).contiguous().view(-1).view(torch.uint8) for t in packer.tensors if t.numel()]
    return words, torch.cat(numbers) if numbers else torch.empty(0, dtype=torch.uint8, device=device)


def _unpacked(words: Tensor, numbers: Tensor) -> Any:
    return _Unpacker(io.BytesIO(bytes(words.cpu().tolist())), numbers).load()
