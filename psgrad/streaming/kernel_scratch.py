"""What torch's kernels hold for themselves while they run, which no tensor shows: those of convolutions on a CPU."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor


def scratch(op: Any, args: Sequence[Any], out: Any) -> int:
    """Bytes that a call of `op` takes at its peak beside operands and results; 0 where nothing is known."""
    if op is torch.ops.aten.convolution.default:
        x, weight, _, *options = args
        return _convolution("output", x, weight, out, *options)
    if op is torch.ops.aten.convolution_backward.default:
        y, x, weight, _, *options, wanted = args
        kinds = [kind for kind, want in zip(("input", "weight"), wanted[:2], strict=True) if want]
        return max((_convolution(kind, x, weight, y, *options) for kind in kinds), default=0)  # one after the other
    return 0


def _convolution(
    kind: str,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> int:
    """The kernel for the output, or for the gradient of the input or the weight."""
    if x.device.type != "cpu" or 0 in (x.numel(), y.numel()):
        return 0
    found = {"output": y, "input": x, "weight": weight}[kind]
    if x.dtype == torch.float32 and torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled:
        # oneDNN lays operands out anew, lets go of them, then brings its result into the usual layout
        if kind == "weight":
            return _blocks(x) + _blocks(y)
        read = x if kind == "output" else y
        copies = 2 if prod(stride) > 1 and transposed == (kind == "output") else 1  # windows put apart take another
        return max(_blocks(read) + weight.nbytes, copies * found.nbytes)
    # torch's own lays out the kernel's windows, of one group after another, and joins the groups' results
    windows = prod((x if transposed else y).shape[2:]) * prod(weight.shape[1:]) * x.element_size()
    joined = 0 if groups == 1 else found.nbytes + (x.nbytes + y.nbytes) // groups
    return _at_once(kind, len(x), len(stride), max(dilation) > 1, transposed, groups) * windows + joined


def _blocks(t: Tensor) -> int:
    """Bytes of (B, C, ...) in oneDNN's layout, blocks of 8 channels."""
    return t.nbytes // t.shape[1] * -(-t.shape[1] // 8) * 8


def _at_once(kind: str, n: int, d: int, dilated: bool, transposed: bool, groups: int) -> int:
    """For how many samples, and groups, torch's own kernels lay out windows at a time."""
    if (kind != "output" or d == 3) if transposed else dilated:
        return 1
    if d == 3:
        return n * groups
    return min(n, torch.get_num_threads()) if kind == "input" else n
