"""Activation checkpointing inside `fn`, by torch's own `torch.utils.checkpoint`.

Torch runs a checkpointed function again during the backward, where vmap, the mode, and whatever the model
held in place of its parameters are gone. The saved-tensor hooks that are on while such a function runs lead
to torch's record of it: there the second run gets its surroundings back.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from ..torch_ import checkpoints
from ..torch_.checkpoints import saved_tensor_hooks
from ..torch_.modules import buffers_of, contents, parameters_of, reachable_modules
from ..torch_.watching import FunctionCall
from .control_flow import body_of
from .held import HELD, OwnParameters
from .signals import NeedsLoop

if TYPE_CHECKING:
    from .mode import Mode

Around = Callable[[], contextlib.AbstractContextManager[Any]]


class Recompute:
    """A checkpointed function's second run, in the surroundings of the first."""

    def __init__(self, recompute: Callable[..., None], roots: list[Any], around: Around) -> None:
        self.recompute, self.around, self.locks = recompute, around, [holding.slots.lock for holding in HELD.holdings]
        modules = list(reachable_modules([recompute, *roots]))
        homes = [home for m in modules for home in (parameters_of(m), buffers_of(m)) if home]
        self.held = [(home, dict(home)) for home in homes]

    def __call__(self, *args: Any) -> None:
        with contextlib.ExitStack() as stack:
            for lock in self.locks:
                stack.enter_context(lock)
            for home, held in self.held:
                stack.callback(home.update, dict(home))
                home.update(held)
            stack.enter_context(self.around())
            self.recompute(*args)


def follow(mode: "Mode") -> None:
    """If a checkpointed function is running: let its second run happen under the mode, too.

    Other hooks on what autograd saves would see all samples at once: where `fn` brings them, samples run one by one.
    """
    hooks = saved_tensor_hooks()
    if not _follow(hooks, mode.recompute) and hooks != mode.packing and mode.is_innermost and not mode.recomputing:
        raise NeedsLoop("fn packs what autograd saves")


def _follow(hooks: Any, around: Around) -> bool:
    """Whether these hooks are a checkpoint's; its function's second run then happens inside `around()`."""
    found = False
    for cell in getattr(hooks[0], "__closure__", None) or ():
        frame = contents(cell)
        if isinstance(frame, checkpoints.Frame):
            found = True
            if not isinstance(frame.recompute_fn, Recompute):
                frame.recompute_fn = Recompute(frame.recompute_fn, checkpoints.arguments(frame), around)
    return found


def keeps_arguments(func: Any) -> bool:
    """Whether this is the autograd Function by which an older torch keeps a checkpoint's arguments, as they are.

    Vmap does not take it, and need not see it: it computes nothing.
    """
    return checkpoints.Keeper is not None and isinstance(func, FunctionCall) and func.function is checkpoints.Keeper


def unhooked(copied: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Inside, what autograd saves is kept as it is; or as copies, for a backward after its owner may have changed it.

    Torch would notice some changes in place and refuse; a change through `.data` it would take for the saved numbers.
    """
    if copied:
        return torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
    if saved_tensor_hooks() is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


class Following(TorchFunctionMode):
    """For `fn` outside vmap: second runs find in the model what first runs found, and no parameter is a constant."""

    def __init__(self, own: OwnParameters) -> None:
        super().__init__()
        self.own = own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (hooks := saved_tensor_hooks()) is not None:
            _follow(hooks, contextlib.nullcontext)
        if (body := body_of(func)) is not None:
            with self:
                return body(*args, **kwargs)
        for t in _tensors((*args, *kwargs.values())):
            if t.requires_grad and t.is_leaf:
                self.own.refuse(func, t)
        return func(*args, **kwargs)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif type(value) in (list, tuple):
            yield from _tensors(value)
