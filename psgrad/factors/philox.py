"""Random numbers by counting: Philox 4x32-10 of Salmon et al. (2011), in integers alone.

The number at a place depends on the key and the place, never on what was drawn before: every chunk, process, device and
machine has the same.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_.levels import current_level
from ..torch_.tracing import dispatch_modes, is_captured

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85  # what is added to the key in each round
_WORD = (1 << 32) - 1
ROUNDS = 10
BITS = 128  # that one counter gives
OCTETS = BITS // 8
PAGE = 1 << 12  # counters whose bits are kept together: 64 KiB
PAGES = 1 << 10  # that are kept at most


class Stream(NamedTuple):
    """A sequence of random words of its own: one for each seed, parameter and purpose."""

    seed: int  # 64 bits
    param: int
    purpose: int

    def words(self, counters: Any) -> tuple[Any, Any, Any, Any]:
        """Four words of 32 bits for each counter, be it an int or a tensor of int64."""
        key = self.seed & _WORD, self.seed >> 32
        return philox((counters & _WORD, counters >> 32, self.param, self.purpose), key)

    def below(self, bound: int, counters: Any) -> tuple[Any, ...]:
        """Four numbers from 0 to bound - 1 for each counter; of a bound below 2^31, uniform up to bound / 2^32."""
        return tuple((word * bound) >> 32 for word in self.words(counters))

    def signs(self, starts: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """(M, length): the signs 1 and -1 at the places from each of M starts on."""
        steps = torch.arange((length + 2 * BITS - 2) // BITS, device=starts.device)
        found = self._signs((starts // BITS)[:, None] + steps, dtype).view(len(starts), -1)
        return found.gather(1, (starts % BITS)[:, None] + torch.arange(length, device=starts.device))

    def run(self, start: int, stop: int, like: Tensor, keeps: bool = False) -> Tensor:
        """The signs at places from `start` to `stop`, in the dtype and on the device of `like`.

        `keeps`: their bits are kept, so that the next call need not draw them.
        """
        first, last = start // BITS, -(-stop // BITS)
        if keeps and first < last and _can_keep(like):
            octets = self._kept(first, last, like.device)
        else:
            octets = self._octets(torch.arange(first, last, device=like.device))
        return _signs_of(octets, like.dtype)[start - first * BITS : stop - first * BITS]

    def _kept(self, first: int, last: int, device: torch.device) -> Tensor:
        """The octets of counters from `first` to `last`, by pages; the last one only as long as it is needed, about."""
        found = []
        for begin in range(first - first % PAGE, last, PAGE):
            size = min(PAGE, 1 << (last - begin - 1).bit_length())
            page = _page(self, begin, size, device)
            found.append(page[max(first - begin, 0) * OCTETS : (last - begin) * OCTETS])
        return found[0] if len(found) == 1 else torch.cat(found)

    def _signs(self, counters: Tensor, dtype: torch.dtype) -> Tensor:
        """For each counter as many signs as it gives bits."""
        return _signs_of(self._octets(counters), dtype)

    def _octets(self, counters: Tensor) -> Tensor:
        """For each counter its bits, eight at a time."""
        words = torch.stack(self.words(counters), -1)
        octets = (words[..., None] >> torch.arange(0, 32, 8, device=counters.device)) & 255
        return octets.flatten()


def _signs_of(octets: Tensor, dtype: torch.dtype) -> Tensor:
    """Eight signs for each octet, from a table."""
    table = (_kept_table if _can_keep(octets) else _table)(octets.device)
    return table.index_select(0, octets if octets.dtype is torch.int64 else octets.int()).view(torch.int8).to(dtype)


def _table(device: torch.device) -> Tensor:
    """For each octet its eight signs, a byte each, in one word, which is copied faster than eight floats."""
    bits = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return (1 - 2 * bits).to(torch.int8).view(torch.int64).flatten()


_kept_table = lru_cache(maxsize=16)(_table)


def _can_keep(like: Tensor) -> bool:
    """Whether what is made now has values, and is nobody else's: no tracer's, no transform's."""
    if type(like) is not Tensor or like.is_meta or dispatch_modes() or is_captured():
        return False
    return current_level() is None


@lru_cache(maxsize=PAGES)
def _page(stream: Stream, begin: int, size: int, device: torch.device) -> Tensor:
    """The octets of counters from `begin` on, as bytes that are only read."""
    return stream._octets(torch.arange(begin, begin + size, device=device)).to(torch.uint8)


def forget() -> None:
    """Give the kept bits back."""
    _page.cache_clear()


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int]) -> tuple[Any, Any, Any, Any]:
    """Four words from a counter of four and a key of two; all are ints, or tensors of int64."""
    a, b, c, d = counter
    low, high = key
    for _ in range(ROUNDS):
        (of_a, a), (of_c, c) = _product(_MULTIPLIERS[0], a), _product(_MULTIPLIERS[1], c)
        a, b, c, d = of_c ^ b ^ low, c, of_a ^ d ^ high, a
        low, high = (low + _STEPS[0]) & _WORD, (high + _STEPS[1]) & _WORD
    return a, b, c, d


def _product(m: int, word: Any) -> tuple[Any, Any]:
    """The upper and the lower 32 bits of the product of two words; of int64 it wraps around, and all bits are there."""
    product = m * word
    return (product >> 32) & _WORD, product & _WORD
