"""The base: the ordinary gradient of the mean loss, whatever the quantity."""

import torch

from ..quantities import NAMES, Grads
from ..workloads import Task
from .peer import Peer, Ready


def gradient(task: Task) -> Ready:
    params = task.params

    def call() -> Grads:
        loss = task.loss(task.model(task.inputs), task.target)
        return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))

    return Ready(call)


PEER = Peer("batch", dict.fromkeys(NAMES, gradient))
