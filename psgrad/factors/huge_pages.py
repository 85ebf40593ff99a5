"""Memory for large results.

malloc gives large blocks back to the system when they are freed, so a large result begins in memory that
has never been touched, and the page faults cost more than the arithmetic. On huge pages there are 512
times fewer of them: 37 MB of gradients in 4.6 ms instead of 19.7, 1.1 GB in 152 ms instead of 478 (2 CPU
threads; into a reused buffer 3.1 and 111).
"""

import contextlib
import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from ..torch_.tracing import dispatch_modes

_LARGE = 32 << 20  # up to this malloc keeps what is freed: 16 MB took 0.9 ms, on huge pages 1.3; 64 MB 25 ms and 5.6
_PLAIN = (Tensor, torch.nn.Parameter)  # not fake tensors
_HUGE_PAGES = all(hasattr(mmap, name) for name in ("MADV_HUGEPAGE", "MAP_PRIVATE", "MAP_ANONYMOUS"))


def is_large(shape: Sequence[int], like: Tensor) -> bool:
    """Whether `empty` takes huge pages for this."""
    if prod(shape) * like.element_size() <= _LARGE:
        return False
    plain = type(like) in _PLAIN and like.device.type == "cpu"
    return _HUGE_PAGES and plain and not dispatch_modes()  # a tracer wants ops it can see


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """`like.new_empty(shape)`, on huge pages where that is large and the system has them."""
    if not is_large(shape, like):
        return like.new_empty(shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        block = mmap.mmap(-1, prod(shape) * like.element_size(), flags=flags)
    except OSError:  # no memory: let torch say so
        return like.new_empty(shape)
    with contextlib.suppress(OSError):  # a kernel without them: ordinary pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=like.dtype).view(*shape)
