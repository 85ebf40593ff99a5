"""What `fn` closes over: constants, in which no graph starts."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import UnsupportedOpError, place
from ..torch_ import levels
from ..torch_.storage import shares_memory

if TYPE_CHECKING:
    from .mode import Mode


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
