"""Memory for large tensors.

malloc gives large blocks back to the system when they are freed, so a large tensor begins in memory that
has never been touched, and the page faults cost more than the arithmetic. On huge pages there are 512
times fewer of them: 37 MB of gradients in 4.6 ms instead of 19.7, 1.1 GB in 152 ms instead of 478 (2 CPU
threads; into a reused buffer 3.1 and 111). Results are reused buffers: `warm_memory`.
"""

import contextlib
import mmap
from collections.abc import Sequence
from functools import cache
from math import prod

import torch
from torch import Tensor

from ..torch_.levels import current_level
from ..torch_.tracing import dispatch_modes

LARGE = 32 << 20  # up to this malloc keeps what is freed: 16 MB took 0.9 ms, on huge pages 1.3; 64 MB 25 ms and 5.6
_PLAIN = (Tensor, torch.nn.Parameter)  # not fake tensors
_HUGE_PAGES = all(hasattr(mmap, name) for name in ("MADV_HUGEPAGE", "MAP_PRIVATE", "MAP_ANONYMOUS"))


def can_map(like: Tensor) -> bool:
    """Whether a tensor like this may be on memory of ours, where the system has it."""
    if not _HUGE_PAGES or type(like) not in _PLAIN or like.device.type != "cpu":
        return False
    if dispatch_modes() or current_level() is not None:  # tracers and transforms want ops that they can see
        return False
    if not torch.are_deterministic_algorithms_enabled():
        return True
    return not torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # torch fills it


def is_large(shape: Sequence[int], like: Tensor) -> bool:
    """Whether `empty` takes huge pages for this."""
    return prod(shape) * like.element_size() > LARGE and can_map(like)


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """`like.new_empty(shape)`, on huge pages where that is large and the system has them."""
    if not is_large(shape, like):
        return like.new_empty(shape)
    block = mapped(prod(shape) * like.element_size())
    return like.new_empty(shape) if block is None else tensor_on(block, shape, like)


def mapped(size: int) -> mmap.mmap | None:
    """Fresh memory, of this process alone; None where there is none, so that torch may say so."""
    try:
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        return None
    with contextlib.suppress(OSError):  # a kernel without them: ordinary pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


def offer(block: mmap.mmap) -> None:
    """Tell the system that it may take the pages of a block that nobody reads, should it need them before we do.

    Of huge pages: a few us for 64 MB. To go through as many ordinary ones takes as long as to write them.
    """
    if len(block) >= _HUGE and _are_on():
        with contextlib.suppress(OSError):
            block.madvise(mmap.MADV_FREE)


_HUGE = 2 << 20  # bytes of a huge page


@cache
def _are_on() -> bool:
    """Whether a block is on huge pages."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
            return "[never]" not in file.read() and hasattr(mmap, "MADV_FREE")
    except OSError:
        return False


def tensor_on(memory: mmap.mmap | memoryview, shape: Sequence[int], like: Tensor) -> Tensor:
    """A tensor whose storage is `memory`, which torch holds as long as the storage lives."""
    return (
        torch.frombuffer(memory, dtype=like.dtype).view(*shape).data
    )  # `data`: no view of another, as autograd sees it
