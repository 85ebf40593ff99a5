"""A loop over samples, one ordinary gradient each; norms and clipped sums hold one at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..quantities import Grads, clipped, gram, norms
from ..workloads import Task
from .peer import Peer, Ready


def each(task: Task) -> Iterator[Grads]:
    """The gradients of one sample after the other, with a leading axis of 1."""
    params = task.params
    for i in range(len(task.inputs)):
        loss = task.loss(task.model(task.inputs[i : i + 1]), task.target[i : i + 1])
        found = torch.autograd.grad(loss, list(params.values()))
        yield {name: g[None] for name, g in zip(params, found, strict=True)}


def stacked(task: Task) -> Grads:
    rows = list(each(task))
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


def grads(task: Task) -> Ready:
    return Ready(lambda: stacked(task))


def all_norms(task: Task) -> Ready:
    return Ready(lambda: torch.cat([norms(row) for row in each(task)]))


def clipped_sum(task: Task) -> Ready:
    max_norm = task.max_norm

    def call() -> Grads:
        total: dict[str, Tensor] = {}
        for row in each(task):
            for name, g in clipped(row, max_norm).items():
                total[name] = total[name].add_(g) if name in total else g
        return total

    return Ready(call)


def products(task: Task) -> Ready:
    return Ready(lambda: gram(stacked(task)))


PEER = Peer("loop", {"grads": grads, "norms": all_norms, "clipped": clipped_sum, "gram": products})
