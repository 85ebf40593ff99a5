"""A task: a model, a loss and a batch; the quantities to be had from it, and whether an answer is right."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

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


FROM_GRADS = {"grads": lambda g, _: g, "norms": lambda g, _: norms(g), "clipped": clipped, "gram": lambda g, _: gram(g)}
QUANTITIES = tuple(FROM_GRADS)


@dataclass(frozen=True, eq=False)
class Task:
    """A model, a loss that averages over its batch, and a batch with the samples along axis 0."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    inputs: Tensor
    target: Tensor

    @cached_property
    def params(self) -> dict[str, Tensor]:
        """The parameters by name, a tied one once."""
        return dict(self.model.named_parameters())

    @property
    def size(self) -> int:
        """Bytes of one gradient."""
        return sum(p.numel() * p.element_size() for p in self.params.values())

    @cached_property
    def max_norm(self) -> float:
        """A bound that clips about half of the samples: the median norm of a few gradients."""
        return float(torch.cat([norms(grads) for grads in islice(self.each(), 8)]).median())

    def gradient(self, inputs: Tensor, target: Tensor) -> Grads:
        """The ordinary gradient of the mean loss."""
        loss = self.loss(self.model(inputs), target)
        return dict(zip(self.params, torch.autograd.grad(loss, list(self.params.values())), strict=True))

    def each(self) -> Iterator[Grads]:
        """The gradients of one sample after the other, with a leading axis of 1."""
        for x, y in zip(self.inputs.split(1), self.target.split(1), strict=True):
            yield {name: g[None] for name, g in self.gradient(x, y).items()}

    def stacked(self, samples: int | None = None) -> Grads:
        """The gradients of the first samples, or of all."""
        rows = list(islice(self.each(), samples))
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def norms(self) -> Tensor:
        return torch.cat([norms(row) for row in self.each()])

    def clipped(self) -> Grads:
        """The clipped sum, from one gradient at a time."""
        total: Grads = {}
        for row in self.each():
            for name, g in clipped(row, self.max_norm).items():
                total[name] = total[name].add_(g) if name in total else g
        return total

    @cached_property
    def right(self) -> dict[str, Any]:
        """The right answers, worked out once; of gradients and inner products those of the first few samples."""
        few = self.stacked(FEW)
        return {"grads": few, "norms": self.norms(), "clipped": self.clipped(), "gram": gram(few)}

    def check(self, quantity: str, answer: Any) -> None:
        """Raises unless an answer is right: a fast wrong answer is not a time."""
        right = self.right[quantity]
        if quantity == "grads":
            compare("norms of gradients", norms(answer), self.right["norms"])
            off = norms({name: answer[name][:FEW] - g for name, g in right.items()}) / norms(right)
            if not off.median() < TOLERANCE / 10:  # NaN fails too
                raise AssertionError(f"wrong gradients of samples: off by {float(off.median()):.1e}")
        elif quantity == "gram":
            compare("diagonal", answer.diagonal(), self.right["norms"].square())
            compare("inner products", answer[:FEW, :FEW], right)
        else:
            compare(quantity, answer, right)


def compare(what: str, answer: Tensor | Grads, right: Tensor | Grads) -> None:
    """Raises unless two vectors, whole or by name, are the same up to rounding."""
    a, b = (torch.cat([t[k].flatten() for k in sorted(t)]) if isinstance(t, dict) else t for t in (answer, right))
    if a.shape != b.shape:
        raise AssertionError(f"wrong {what}: {tuple(a.shape)}, not {tuple(b.shape)}")
    if not (error := float((a - b).norm() / b.norm())) < TOLERANCE:
        raise AssertionError(f"wrong {what}: off by {error:.1e}")
