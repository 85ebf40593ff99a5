"""JAX: `jit(vmap(grad))` of the same architecture with the same weights, everything in one compiled function.

Convolutions run with the channels first and last, and the faster counts. JAX takes all cores that there are.
"""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch

from ..quantities import NAMES
from ..workloads import Task
from .peer import Make, Peer, Ready


def follow(quantity: str, grads: Any, max_norm: float) -> Any:
    """A quantity from per-sample gradients, in jax.numpy."""
    import jax.numpy as jnp

    rows = [g.reshape(len(g), -1) for g in grads.values()]
    if quantity == "grads":
        return grads
    if quantity == "gram":
        return sum(g @ g.T for g in rows)
    norms = jnp.sqrt(sum((g * g).sum(1) for g in rows))
    if quantity == "norms":
        return norms
    w = jnp.minimum(1, max_norm / norms)
    return {name: jnp.tensordot(w, g, 1) for name, g in grads.items()}


def compiled(task: Task, quantity: str, channels_last: bool) -> Ready:
    import jax

    from .jax_layers import Layout, loss

    layout = Layout(channels_last)
    params = {name: layout.weight(p.detach().numpy()) for name, p in task.params.items()}
    inputs, target = layout.inputs(task.inputs.numpy()), jax.numpy.asarray(task.target.numpy())
    per_sample = jax.vmap(jax.grad(partial(loss, layout, task.model)), in_axes=(None, 0, 0))
    whole = jax.jit(lambda params, x, y: follow(quantity, per_sample(params, x, y), task.max_norm))
    run = whole.lower(params, inputs, target).compile()

    def read(answer: Any) -> Any:
        if not isinstance(answer, dict):
            return torch.from_numpy(jax.device_get(answer).copy())
        undo = partial(layout.torch_weight, leading=int(quantity == "grads"))
        return {name: torch.from_numpy(undo(jax.device_get(g)).copy()) for name, g in answer.items()}

    return Ready(lambda: jax.block_until_ready(run(params, inputs, target)), read)


LAYOUTS: dict[Any, bool] = {}


def channels_last(task: Task) -> bool:
    """Whether per-sample gradients are faster with the channels last, tried once for an architecture.

    Whatever the number of samples: a call that has run at full size keeps memory, which would not show at its peak.
    """
    if not any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in task.model.modules()):
        return False
    key = task.inputs.shape[1:], *((name, p.shape) for name, p in task.params.items())
    if key not in LAYOUTS:
        first, last = (quickest(compiled(task, "grads", last).call) for last in (False, True))
        LAYOUTS[key] = last < first
    return LAYOUTS[key]


def quickest(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(4):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return min(times)


def offer(quantity: str) -> Make:
    return lambda task: compiled(task, quantity, channels_last(task))


PEER = Peer("JAX", {quantity: offer(quantity) for quantity in NAMES}, package="jax")
