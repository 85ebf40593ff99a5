"""Random numbers by counting: Philox 4x32-10 of Salmon et al. (2011), in integers alone.

The number at a place depends on the key and the place, never on what was drawn before: every chunk, process, device and
machine has the same.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85  # what is added to the key in each round
_WORD = (1 << 32) - 1
ROUNDS = 10
BITS = 128  # that one counter gives


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

    def run(self, start: int, stop: int, like: Tensor) -> Tensor:
        """The signs at places from `start` to `stop`, in the dtype and on the device of `like`."""
        first = start // BITS
        counters = torch.arange(first, -(-stop // BITS), device=like.device)
        return self._signs(counters, like.dtype).flatten()[start - first * BITS : stop - first * BITS]

    def _signs(self, counters: Tensor, dtype: torch.dtype) -> Tensor:
        """For each counter as many signs as it gives bits; eight of them from a table at once."""
        words = torch.stack(self.words(counters), -1)
        octets = (words[..., None] >> torch.arange(0, 32, 8, device=counters.device)) & 255
        eight = torch.arange(8, device=counters.device)
        table = 1 - 2 * ((torch.arange(256, device=counters.device)[:, None] >> eight) & 1)
        return table.to(dtype).index_select(0, octets.flatten())


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
