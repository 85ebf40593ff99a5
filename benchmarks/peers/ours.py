"""psgrad: each quantity by its own function; gradients fresh, and into buffers that are there; a recording of it."""

from collections.abc import Callable
from typing import Any

from torch.fx.experimental.proxy_tensor import make_fx

import psgrad

from ..workloads import Task
from .peer import Make, Peer, Ready


def offer(quantity: Callable[..., Any]) -> Make:
    def make(task: Task) -> Ready:
        fn, params = psgrad.from_module(task.model, task.loss)
        return Ready(lambda: quantity(fn, params, (task.inputs, task.target)))

    return make


def clipped(task: Task) -> Ready:
    (fn, params), max_norm = psgrad.from_module(task.model, task.loss), task.max_norm
    return Ready(
        lambda: psgrad.clipped_grad(fn, params, (task.inputs, task.target), max_norm),
        read=lambda answer: answer.grad,
    )


def reused(task: Task) -> Ready:
    fn, params = psgrad.from_module(task.model, task.loss)
    out = {name: p.new_zeros(len(task.inputs), *p.shape) for name, p in params.items()}
    return Ready(lambda: psgrad.per_sample_grads(fn, params, (task.inputs, task.target), out=out))


def replayed(quantity: Callable[..., Any]) -> Make:
    """The torch ops of one call, recorded once: what is left when all Python is gone."""

    def make(task: Task) -> Ready:
        fn, params = psgrad.from_module(task.model, task.loss)
        batch, max_norm = (task.inputs, task.target), task.max_norm
        graph = make_fx(lambda params, batch: quantity(fn, params, batch, max_norm))(params, batch)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return Ready(lambda: graph(params, batch))

    return make


FRESH = Peer(
    "psgrad",
    {
        "grads": offer(psgrad.per_sample_grads),
        "norms": offer(psgrad.per_sample_norms),
        "clipped": clipped,
        "gram": offer(psgrad.gram),
    },
)
REUSED = Peer("psgrad out=", {"grads": reused})
REPLAYED = Peer(
    "psgrad replayed",
    {
        "grads": replayed(lambda fn, params, batch, _: psgrad.per_sample_grads(fn, params, batch)),
        "norms": replayed(lambda fn, params, batch, _: psgrad.per_sample_norms(fn, params, batch)),
        "clipped": replayed(lambda *call: psgrad.clipped_grad(*call, nonfinite="propagate").grad),
    },
)
