"""What is measured: how each quantity follows from per-sample gradients, and how an answer to it is checked."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import psgrad

from .workloads import Task

Grads = dict[str, Tensor]

# Relative. Rounding decides whether a relu's input of 1e-7 is positive: one such unit moves the mean gradient of 256
# samples by 2e-3. A wrong answer is wrong by far more.
TOLERANCE = 1e-2
FEW = 5  # samples whose gradients and inner products are checked one by one; most of them must agree


def norms(grads: Grads) -> Tensor:
    """(N,) from per-sample gradients."""
    each = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in grads.values()]
    return torch.linalg.vector_norm(torch.stack(each), dim=0)


def clipped(grads: Grads, max_norm: float) -> Grads:
    """The sum of per-sample gradients, each scaled down to `max_norm` where it is larger."""
    w = (max_norm / norms(grads)).clamp(max=1)
    return {name: torch.tensordot(w, g, 1) for name, g in grads.items()}


def gram(grads: Grads) -> Tensor:
    """(N, N) inner products of per-sample gradients."""
    first, *rest = (g.flatten(1) for g in grads.values())
    total = first @ first.mT
    for g in rest:
        total.addmm_(g, g.mT)
    return total


FROM_GRADS: dict[str, Callable[[Grads, float], Any]] = {
    "grads": lambda grads, _: grads,
    "norms": lambda grads, _: norms(grads),
    "clipped": clipped,
    "gram": lambda grads, _: gram(grads),
}
NAMES = tuple(FROM_GRADS)


class Truth:
    """The right answers for a task, from a loop over its samples that holds one gradient at a time."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @cached_property
    def batch(self) -> Grads:
        """The gradient of the mean loss."""
        params, loss = self.task.params, self.task.loss(self.task.model(self.task.inputs), self.task.target)
        return dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))

    @cached_property
    def looped(self) -> tuple[Tensor, Grads, Grads]:
        """Norms (N,), the clipped sum, and the gradients of the first few samples."""
        task = self.task
        fn, params = psgrad.from_module(task.model, task.loss)
        total = {name: torch.zeros_like(p) for name, p in params.items()}
        found: list[Tensor] = []
        first: list[Grads] = []
        for i in range(len(task.inputs)):
            one = psgrad.testing.loop_grads(fn, params, (task.inputs[i : i + 1], task.target[i : i + 1]))
            found.append(norms(one))
            for name, g in clipped(one, task.max_norm).items():
                total[name] += g
            if i < FEW:
                first.append(one)
        return torch.cat(found), total, {name: torch.cat([g[name] for g in first]) for name in params}

    def check(self, quantity: str, answer: Any) -> None:
        """Raise unless `answer` is right: a fast wrong answer is not a time."""
        right, total, few = self.looped
        if quantity == "grads":
            for name, p in self.batch.items():
                shape, want = tuple(answer[name].shape), (len(right), *p.shape)
                if shape != want:
                    raise AssertionError(f"gradients of {name} have shape {shape}, not {want}")
            compare("gradients", {name: g.mean(0) for name, g in answer.items()}, self.batch)
            off = norms({name: answer[name][:FEW] - g for name, g in few.items()}) / norms(few)
            if not float(off.median()) < TOLERANCE / 10:
                raise AssertionError(f"wrong gradients of samples: off by {float(off.median()):.1e}")
        elif quantity == "norms":
            compare("norms", answer, right)
        elif quantity == "clipped":
            compare("clipped sum", answer, total)
        else:
            compare("diagonal", answer.diagonal(), right.square())
            compare("inner products", answer[:FEW, :FEW], gram(few))


def compare(what: str, answer: Tensor | Grads, right: Tensor | Grads) -> None:
    """Raise unless two vectors, whole or by name, are the same up to rounding."""
    a, b = (t if isinstance(t, dict) else {"": t} for t in (answer, right))
    if shapes(a) != shapes(b):
        raise AssertionError(f"wrong {what}: {shapes(a)}, not {shapes(b)}")
    off = torch.stack([(a[name] - t).square().sum() for name, t in b.items()]).sum()
    error = float((off / torch.stack([t.square().sum() for t in b.values()]).sum()).sqrt())
    if not error < TOLERANCE:  # NaN fails too
        raise AssertionError(f"wrong {what}: off by {error:.1e}")


def shapes(tree: Grads) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in sorted(tree.items())}
