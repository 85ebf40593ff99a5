"""Per-sample gradients of convolutions and matrices in C++, for graphs that will run many times.

A kernel that multiplies where the numbers stand, and writes or squares a block of the result while it is in the cache,
takes less time than the ordinary gradient of the weight by torch's kernels. It is in `quick_grads.cpp`, for float32.
While a graph is recorded the clock decides where it is taken (`conv_costs.fastest`).
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..torch_ import cpp, tracing
from ..torch_.operators import one_op
from .costs import ConvGeometry
from .numerics import norms_of

LEAST_OUTPUTS = 8  # of a group: those of a position fill a vector, of fewer most of it would be zeros


@cache
def _library() -> Any:
    return cpp.library(Path(__file__).with_suffix(".cpp").read_text())


def can_run() -> bool:
    """Whether the compiler can make the kernels; the first time on a machine that takes it some seconds."""
    return _library() is not None


def is_for_convolution(x: Tensor, g: Tensor, geometry: ConvGeometry) -> bool:
    """Whether there is a kernel for x (N, B, C, *S) and g (N, B, O, *S')."""
    groups, images = geometry.groups, x.shape[1]
    return _are_plain(x, g) and (groups == 1 or images == 1) and g.shape[2] // groups >= LEAST_OUTPUTS and can_run()


def is_for_matrix(x: Tensor, g: Tensor) -> bool:
    """Whether there is one for x (N, T, I) and g (N, T, O)."""
    return _are_plain(x, g) and g.shape[2] >= LEAST_OUTPUTS and can_run()


def _are_plain(*tensors: Tensor) -> bool:
    return all(type(t) is Tensor and t.dtype is torch.float32 and t.is_cpu and t.numel() for t in tensors)


def of_convolution(x: Tensor, g: Tensor, geometry: ConvGeometry, kernel: Sequence[int], result: Tensor) -> Tensor:
    """Writes gradients (N, O, C/G, *K), or into a result (N,) their norms; x (N, B, C, *S), g (N, B, O, *S')."""
    axes, groups = len(kernel), geometry.groups
    samples, norms = len(x) * groups, result.dim() == 1
    ones, zeros = [1] * (3 - axes), [0] * (3 - axes)
    sizes = [samples, x.shape[1], x.shape[2] // groups, g.shape[2] // groups, *ones, *x.shape[3:], *ones, *g.shape[3:]]
    sizes += [*ones, *kernel, *ones, *geometry.stride, *zeros, *geometry.padding, *ones, *geometry.dilation]
    of_groups = result.new_empty(samples) if norms and groups > 1 else result
    _CONVOLUTION(of_groups, x.contiguous(), g.contiguous(), sizes)
    return result if of_groups is result else result.copy_(norms_of(of_groups.view(-1, groups)))


def of_matrix(x: Tensor, g: Tensor, result: Tensor) -> Tensor:
    """Writes gradients (N, O, I), or into a result (N,) their norms; x (N, T, I), g (N, T, O)."""
    _MATRIX(result, x.contiguous(), g.contiguous(), [len(x), x.shape[1], x.shape[2], g.shape[2]])
    return result


def _op(name: str) -> Any:
    """A kernel as an op, which writes to its first argument."""

    def run(result: Tensor, x: Tensor, g: Tensor, sizes: Sequence[int]) -> None:
        if tracing.is_faking() or x.is_meta:  # somebody asks for sizes
            return
        assert result.is_contiguous(), "a result with gaps; please report this"
        x, g = x.contiguous(), g.contiguous()  # a compiler may have laid them out otherwise than recorded
        cpp.call(_library(), name, [x, g, result], [torch.get_num_threads(), result.dim() == 1, *sizes])

    return one_op(f"psgrad::{name}_gradients(Tensor(a!) result, Tensor x, Tensor g, int[] sizes) -> ()", run)


_CONVOLUTION, _MATRIX = _op("convolution"), _op("matrix")
