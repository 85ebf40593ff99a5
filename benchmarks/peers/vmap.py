"""torch.func as its documentation has it; the other quantities from its result."""

from torch import Tensor
from torch.func import functional_call, grad, vmap

from ..quantities import Grads
from ..workloads import Task
from .peer import Peer, Ready, from_grads


def grads(task: Task) -> Ready:
    params = {name: p.detach() for name, p in task.params.items()}

    def fn(params: Grads, x: Tensor, y: Tensor) -> Tensor:
        return task.loss(functional_call(task.model, params, (x[None],)), y[None])

    per_sample = vmap(grad(fn), in_dims=(None, 0, 0), randomness="different")
    return Ready(lambda: per_sample(params, task.inputs, task.target))


PEER = Peer("vmap(grad)", from_grads(grads))
