"""Kernels of torch that have no public name, for rules that would be slower without them."""

import platform
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten

cross_entropy: Callable[..., Tensor] = torch._C._nn.cross_entropy_loss  # what F.cross_entropy itself calls
pad_sequence: Any = torch._C._nn.pad_sequence  # what torch.nn.utils.rnn.pad_sequence calls
pack_padded_sequence: Any = torch._pack_padded_sequence
pad_packed_sequence: Any = torch._pad_packed_sequence

# torch.nn.functional.grouped_mm, which calls the first of them; a torch may lack either
GROUPED_MM: tuple[Any, ...] = tuple(
    function
    for home, name in ((torch, "_grouped_mm"), (torch.nn.functional, "grouped_mm"))
    if (function := getattr(home, name, None)) is not None
)


# Looked up when called, as others may put an op of theirs in its place.


def attention_by_math(*args: Any, **kwargs: Any) -> Any:
    """Scaled dot product attention by ordinary ops, which takes a mask that needs a gradient."""
    return _aten._scaled_dot_product_attention_math(*args, **kwargs)


def prelu_backward(g: Tensor, x: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the input, and of the slope at each number, in one pass."""
    found: tuple[Tensor, Tensor] = _aten._prelu_kernel_backward(g, x, slopes)
    return found


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """The output, and 1 / rms of each position."""
    found: tuple[Tensor, Tensor] = _aten._fused_rms_norm(x, shape, weight, eps)
    return found


# ---- products of matrices on the CPU ---------------------------------------------------------------------------


def _is_by_amd() -> bool:
    """Whether AMD made the processor. Where Linux does not say so, Python may start a process to ask."""
    with suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        return any("AMD" in line for line in lines if line.startswith("vendor_id"))
    return "AMD" in platform.processor()


_ONEDNN_LINEAR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # where torch has oneDNN

# MKL keeps its kernels for 512 bits to Intel's processors; oneDNN has them for AMD's, too.
MKL_IS_BEHIND = (
    torch.backends.mkl.is_available()
    and torch.backends.mkldnn.is_available()
    and torch.backends.cpu.get_cpu_capability() == "AVX512"
    and _ONEDNN_LINEAR is not None
    and _is_by_amd()
)


def linear_by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` in float32 on the CPU by oneDNN, which autograd and transforms do not know."""
    found: Tensor = _ONEDNN_LINEAR(x, weight, bias, "none", [], "")
    return found
