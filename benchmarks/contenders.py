"""The contenders: one function each, from a task to a call that gives {name: gradients}; a table below."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

import psgrad

from .workloads import Task

Grads = dict[str, Tensor]
Contender = Callable[[Task], Callable[[], Grads]]


def batch(task: Task) -> Callable[[], Grads]:
    """The ordinary gradient of the mean loss."""
    params = task.params

    def call() -> Grads:
        loss = task.loss(task.model(task.inputs), task.target)
        return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))

    return call


def vmap_grad(task: Task) -> Callable[[], Grads]:
    """torch.func as its documentation has it."""
    params = {name: p.detach() for name, p in task.params.items()}

    def fn(params: Grads, x: Tensor, y: Tensor) -> Tensor:
        return task.loss(functional_call(task.model, params, (x[None],)), y[None])

    per_sample = vmap(grad(fn), in_dims=(None, 0, 0), randomness="different")
    return lambda: per_sample(params, task.inputs, task.target)


def fresh(task: Task, chunk_size: int | None = None) -> Callable[[], Grads]:
    """psgrad, with a result of its own for each call."""
    fn, params = psgrad.from_module(task.model, task.loss)
    return lambda: psgrad.per_sample_grads(fn, params, (task.inputs, task.target), chunk_size=chunk_size)


def reused(task: Task) -> Callable[[], Grads]:
    """psgrad, each call writing into the same buffers."""
    fn, params = psgrad.from_module(task.model, task.loss)
    out = {name: p.new_zeros(len(task.inputs), *p.shape) for name, p in params.items()}
    return lambda: psgrad.per_sample_grads(fn, params, (task.inputs, task.target), out=out)


# A new contender is a function above and a line here; what it raises is shown in its cell.
GRADS: dict[str, Contender] = {
    "batch": batch,
    "vmap(grad)": vmap_grad,
    "psgrad": fresh,
    "psgrad out=": reused,
}
