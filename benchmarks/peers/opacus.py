"""Opacus: hooks that write per-sample gradients, and ghost clipping, which has norms and clipped sums without them."""

from typing import Any

import torch
from torch import Tensor, nn

from ..quantities import Grads
from ..workloads import Task
from .peer import Peer, Ready, copied, from_grads, taken


def adapted(task: Task) -> tuple[nn.Module, dict[str, Tensor], str]:
    """The model as Opacus wants it, its parameters under the names of the model as it was, what is different."""
    from opacus.validators import ModuleValidator

    model, note = copied(task)
    if any(isinstance(module, nn.LSTM) for module in model.modules()):
        model, note = ModuleValidator.fix(model), "nn.LSTM replaced by DPLSTM"
    names: dict[Tensor, str] = {}
    for name, p in model.state_dict(keep_vars=True).items():  # DPLSTM restores nn.LSTM's names there
        names.setdefault(p, name)
    return model, {names[p]: p for p in model.parameters()}, note


def grads(task: Task) -> Ready:
    from opacus import GradSampleModule

    model, params, note = adapted(task)
    wrapped = GradSampleModule(model, loss_reduction="mean")

    def call() -> Grads:
        task.loss(wrapped(task.inputs), task.target).backward()
        return taken(params, "grad_sample")

    return Ready(call, note=note)


def ghost(task: Task) -> tuple[Any, dict[str, Tensor], str]:
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    model, params, note = adapted(task)
    return GradSampleModuleFastGradientClipping(model, max_grad_norm=task.max_norm), params, note


def norms(task: Task) -> Ready:
    wrapped, params, note = ghost(task)

    def call() -> Tensor:
        task.loss(wrapped(task.inputs), task.target).backward()
        found: Tensor = wrapped.get_norm_sample()
        taken(params, "_norm_sample")
        return found

    return Ready(call, note=note)


def clipped(task: Task) -> Ready:
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    wrapped, params, note = ghost(task)
    cleaner = torch.optim.SGD(params.values())  # of the optimizer, only zero_grad is used

    def call() -> Grads:
        losses = task.losses(wrapped(task.inputs))
        DPTensorFastGradientClipping(wrapped, cleaner, losses, "mean").backward()
        return taken(params, "grad")

    return Ready(call, note=note)


HOOKS = Peer("Opacus", from_grads(grads), package="opacus")
GHOST = Peer("Opacus ghost", {"norms": norms, "clipped": clipped}, package="opacus")
