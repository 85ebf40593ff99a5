"""BackPACK: BatchGrad, the clipped sum and inner products from it; norms by BatchL2Grad."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..quantities import Grads
from ..workloads import Task
from .peer import Peer, Ready, copied, from_grads, taken


def extended(task: Task, extension: str, attribute: str) -> tuple[Callable[[], Grads], str]:
    """A backward with an extension, giving what it leaves on the parameters."""
    import backpack

    model, note = copied(task)
    model = backpack.extend(model)
    params = dict(model.named_parameters())
    made: Any = getattr(backpack.extensions, extension)

    def call() -> Grads:
        loss = task.loss(model(task.inputs), task.target) * len(task.inputs)  # it does not undo the mean
        with backpack.backpack(made()):
            loss.backward()
        return taken(params, attribute)

    return call, note


def grads(task: Task) -> Ready:
    call, note = extended(task, "BatchGrad", "grad_batch")
    return Ready(call, note=note)


def norms(task: Task) -> Ready:
    squares, note = extended(task, "BatchL2Grad", "batch_l2")

    def call() -> Tensor:
        return torch.stack(list(squares().values())).sum(0).sqrt()

    return Ready(call, note=note)


PEER = Peer("BackPACK", from_grads(grads) | {"norms": norms}, package="backpack")
