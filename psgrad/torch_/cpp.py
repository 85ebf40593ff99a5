"""C++ of ours: compiled by torch's compiler, for this processor, once on a machine."""

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from . import graphs

DTYPES = {torch.float32: "float", torch.float64: "double"}  # that at::vec has in C++, by their name there


@cache
def library(source: str) -> ctypes.CDLL | None:
    """What the compiler makes of a source; None where it cannot."""
    if graphs.missing_compiler() is not None:
        return None
    from torch._inductor.codecache import CppCodeCache

    try:
        return CppCodeCache.load(source)  # type: ignore[no-any-return]
    except Exception:  # an old compiler, or a directory from which nothing may run: torch has several errors for it
        return None


def call(library: ctypes.CDLL, name: str, tensors: Sequence[Tensor], numbers: Sequence[int]) -> None:
    """Call `name`_float or `name`_double(T* const* tensors, const int64_t* numbers)."""
    function = getattr(library, f"{name}_{DTYPES[tensors[0].dtype]}")
    function(
        (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors]), (ctypes.c_int64 * len(numbers))(*numbers)
    )
