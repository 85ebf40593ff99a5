"""PyTorch's ExpandedWeights; the other quantities from its per-sample gradients."""

from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

from ..quantities import Grads
from ..workloads import Task
from .peer import Peer, Ready, copied, from_grads, taken


def grads(task: Task) -> Ready:
    model, note = copied(task)
    params = dict(model.named_parameters())
    forward = call_for_per_sample_grads(model, batch_size=len(task.inputs), loss_reduction="mean")

    def call() -> Grads:
        task.loss(forward(task.inputs), task.target).backward()
        return taken(params, "grad_sample")

    return Ready(call, note=note)


PEER = Peer("ExpandedWeights", from_grads(grads))
