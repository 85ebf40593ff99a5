"""What a peer is: for each quantity that it offers, a function from a task to a call."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..quantities import FROM_GRADS, Grads
from ..workloads import Task


@dataclass(frozen=True)
class Ready:
    """A call to be measured."""

    call: Callable[[], Any]
    read: Callable[[Any], Any] = lambda answer: answer  # to torch tensors under the model's names, not measured
    note: str = ""  # what had to change about the model


Make = Callable[[Task], Ready]


@dataclass(frozen=True)
class Peer:
    """A contender, and the package that it comes from; none: torch, or psgrad itself."""

    name: str
    offers: Mapping[str, Make]
    package: str = ""


def from_grads(grads: Make) -> dict[str, Make]:
    """Every quantity, computed from per-sample gradients."""

    def offer(quantity: str) -> Make:
        def make(task: Task) -> Ready:
            ready, follow, max_norm = grads(task), FROM_GRADS[quantity], task.max_norm
            return Ready(lambda: follow(ready.call(), max_norm), note=ready.note)

        return make

    return {quantity: offer(quantity) for quantity in FROM_GRADS}


def copied(task: Task) -> tuple[nn.Module, str]:
    """A model that a peer may change, in the form that hooks on modules want, and what is different about it."""
    model = deepcopy(task.model)
    if not hasattr(model, "per_sample_positions"):
        return model, ""
    model.per_sample_positions = True
    return model, "positions looked up per sample"


def taken(params: Mapping[str, Tensor], attribute: str) -> Grads:
    """What a peer has left on parameters, which are clean afterwards."""
    found = {name: getattr(p, attribute, None) for name, p in params.items()}
    if absent := [name for name, value in found.items() if value is None]:
        raise NotImplementedError(f"no {attribute} for {len(absent)} of {len(params)} parameters, as {absent[0]}")
    for p in params.values():
        p.grad = None
        setattr(p, attribute, None)
    return found
