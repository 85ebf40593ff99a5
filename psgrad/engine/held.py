"""Models that hold given parameters in place of their own, and what `fn` meets besides what it is given: constants."""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import UnsupportedOpError, name_of, place
from ..torch_ import levels
from ..torch_.storage import shares_memory
from .problem import Problem

if TYPE_CHECKING:
    from .mode import Mode


class Holding(Protocol):
    """A context in which a model holds given parameters. It can be entered again."""

    slots: Any  # where the model holds its parameters, with `model` itself, and a `lock` on it

    def __enter__(self) -> None: ...
    def __exit__(self, *error: Any) -> None: ...
    def own(self, t: Tensor) -> str | None: ...


class _Held(threading.local):
    """What this thread has put into models, and whether it runs samples one by one."""

    def __init__(self) -> None:
        self.looping = 0  # how many loops over samples, one inside the other, this thread is in
        self.holdings: list[Holding] = []  # those that are entered
        self.record: list[Holding] | None = None  # all that were entered, where somebody asks


HELD = _Held()


@contextlib.contextmanager
def recorded() -> Iterator[list[Holding]]:
    """The holdings that are entered inside, to be entered once more for a backward that runs a model again."""
    before, HELD.record = HELD.record, []
    try:
        yield HELD.record
    finally:
        HELD.record = before


@contextlib.contextmanager
def again(record: Sequence[Holding]) -> Iterator[None]:
    """Inside, models hold what they held while `record` was made; one that held two things in turn holds neither."""
    models = [holding.slots.model for holding in record]
    with contextlib.ExitStack() as stack:
        for holding in record:
            if sum(model is holding.slots.model for model in models) == 1:
                stack.enter_context(holding)
        yield


_DETACH = (Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]


class OwnParameters(NamedTuple):
    """The tensors that the given parameters stand for. Where `fn` takes one for a constant, its gradient is lost."""

    problem: Problem

    def refuse(self, func: Any, t: Tensor) -> None:
        """Raise where `t`, a leaf that requires grad, is one of them, unless `func` says that a constant is meant."""
        if func in _DETACH or levels.is_differentiated(t):  # what a transform inside `fn` follows is its own
            return
        for holding in HELD.holdings:
            if (name := holding.own(t)) is not None:
                raise UnsupportedOpError(
                    f"{name_of(func)} uses the model's own parameter {name!r} in place of params[{name!r}], "
                    "as a constant\n"
                    f"  called at {place()}\n"
                    "  the model holds it in a second place, where fn cannot replace it: read it from the module when "
                    "it is used,\n"
                    "  or take it out of params if it is meant to be a constant."
                )
        for i, p in enumerate(self.problem.params):
            if shares_memory(t, p) and t.storage_offset() == p.storage_offset() and t.shape == p.shape:
                raise UnsupportedOpError(
                    f"{name_of(func)} uses {self.problem.names[i]} as a constant: "
                    "a tensor with its memory that fn closes over\n"
                    f"  called at {place()}\n"
                    "  use what fn is given in params; if a constant is meant, close over its detach()."
                )


def constant(mode: "Mode", func: Any, value: Any) -> Any:
    """An argument of `func` without the graphs of others; an error where it is a parameter met by another way."""
    if type(value) in (list, tuple):
        return type(value)([constant(mode, func, v) for v in value])
    if not isinstance(value, Tensor) or not value.requires_grad or levels.is_differentiated(value):
        return value
    if mode.own and (not value.is_leaf or _is_among(value, mode.own)):
        return value
    if value.is_leaf and id(value) not in mode.frozen:
        mode.own_parameters.refuse(func, value)
        if mode.recomputing and not _is_among(value, mode.frozen.values()):
            raise UnsupportedOpError(
                "a checkpointed function does not find its parameters again when it is recomputed\n"
                f"  called at {place()}\n"
                "  hand them to it as arguments, or make fn with psgrad.from_module."
            )
        mode.frozen[id(value)] = value
    return value.detach()


def _is_among(t: Tensor, others: Iterable[Tensor]) -> bool:
    return any(shares_memory(t, other) for other in others)
