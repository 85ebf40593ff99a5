"""Torch's autograd engine, called directly."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

is_autocasting: Callable[[], bool] = torch._C._is_any_autocast_enabled  # for some device
without_modes: Any = torch._C.DisableTorchFunction  # inside, torch functions are not shown to modes
_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward


def gradients(y: Tensor, inputs: Sequence[Any], seed: Tensor) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` of `y` with `seed`, None where an input is not used.

    On the CPU, where the backward runs in this thread, this calls the C++ engine directly: our arguments are valid,
    and the checks of torch.autograd.grad cost 50 us.
    """
    if y.device.type != "cpu":
        return torch.autograd.grad(y, inputs, seed, allow_unused=True)
    found: tuple[Tensor | None, ...] = _run_backward(
        (y,), (seed,), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


def direct_apply(function: Any) -> Any:
    """`function.apply` of the C++ base class, without the checks for functorch: for calls outside any transform."""
    return super(torch.autograd.Function, function).apply
