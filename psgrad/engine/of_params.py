"""Functions of parameters alone: computed once, whatever the number of samples."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import name_of
from ..registry.params import Param, Source
from ..torch_ import levels
from ..torch_.functions import VIEWS
from ..torch_.storage import shares_memory, storage_of
from . import checkpoint

if TYPE_CHECKING:
    from .mode import Mode


def run_once(mode: "Mode", func: Any, args: Any, kwargs: Any, params: list[Param]) -> Any:
    """A function of parameters alone: its values are tracked as views of a parameter, or as new sources."""
    grad_enabled = torch.is_grad_enabled()
    with checkpoint.unhooked(mode.lasting):  # its backward runs where a checkpoint cannot recompute
        values = func(*[_traced(mode, a) for a in args], **{k: _traced(mode, v) for k, v in kwargs.items()})
    many = isinstance(values, (list, tuple))
    flat = list(values) if many else [values]
    if not all(isinstance(v, Tensor) for v in flat):
        return func(*args, **kwargs)
    viewed: list[Any] | None = None
    for i, value in enumerate(flat):
        if not (value.requires_grad and grad_enabled):  # detached, or of integers: a constant
            flat[i] = _own_constant(mode, value.detach(), params)
            continue
        home = _home(value, params) if func in VIEWS else None
        if home is not None and value.dtype == home.source.value.dtype:
            if viewed is None:
                wrapped = func(*args, **kwargs)  # the same view of the leaf, for plain vmap
                viewed = list(wrapped) if many else [wrapped]
            mode.tracked[id(viewed[i])] = Param(value.detach(), home.source, viewed[i], value)
            flat[i] = viewed[i]
        else:
            flat[i] = _derived(mode, value, name_of(func), params)
    return type(values)(flat) if many else flat[0]


def _traced(mode: "Mode", a: Any) -> Any:
    """`a` with every tracked tensor replaced by its value, as ordinary autograd follows it."""
    if type(a) in (list, tuple):
        return type(a)([_traced(mode, v) for v in a])
    return levels.below(mode.tracked[id(a)].traced) if id(a) in mode.tracked else a


def _home(value: Tensor, params: list[Param]) -> Param | None:
    """The parameter whose memory a value shares."""
    return next((p for p in params if shares_memory(value, p.source.value)), None)


def _own_constant(mode: "Mode", value: Tensor, params: list[Param]) -> Tensor:
    """A constant with memory of its own: not the caller's, which `fn` might change."""
    home = _home(value, params)
    if home is None:
        return value
    value = value.clone()
    mode.copies[storage_of(value)] = home, value
    return value


def _derived(mode: "Mode", value: Tensor, op: str, params: list[Param]) -> Tensor:
    """A new source for a value that was computed from parameters alone."""
    graph = value.contiguous()
    value = graph.detach()
    for param in params:
        param.source.uses += 2  # its own use, and the one pulled back
    leaf = levels.below(lambda: value.expand(mode.n, *value.shape).requires_grad_())

    def named(_: int) -> str:
        return f"{op}({', '.join(dict.fromkeys(p.source.name for p in params))})"

    return mode.track(Source(len(mode.sources), named, value, leaf, graph))
