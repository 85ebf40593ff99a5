"""Activation checkpointing inside `fn`, by torch's own `torch.utils.checkpoint`.

Torch runs a checkpointed function again during the backward, where vmap, the mode, and whatever the model
held in place of its parameters are gone. The saved-tensor hooks that are on while such a function runs lead
to torch's record of it: there the second run gets its surroundings back. Torch's private names for this
live here.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as _checkpoint

from ..torch_.hooks import FunctionCall
from .control_flow import body_of
from .held import HELD, OwnParameters

Around = Callable[[], contextlib.AbstractContextManager[Any]]

_Frame: Any = _checkpoint._CheckpointFrame
# An older torch keeps a checkpoint's arguments by an autograd Function, a newer one in the frame itself.
_Keeper: Any = getattr(_checkpoint, "_NoopSaveInputs", None)
_top = torch._C._autograd._top_saved_tensors_default_hooks
hooked = functools.partial(_top, True)  # the innermost saved-tensor hooks (pack, unpack), or None


class _Again:
    """A checkpointed function's second run, in the surroundings of the first."""

    def __init__(self, recompute: Callable[..., None], roots: list[Any], around: Around) -> None:
        self.recompute, self.around, self.locks = recompute, around, list(HELD.locks)
        homes: Any = [home for m in _modules([recompute, *roots]) for home in (m._parameters, m._buffers) if home]
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


def follow(around: Around) -> None:
    """If a checkpointed function is running: let its second run happen inside `around()`."""
    hooks: Any = hooked()
    for cell in getattr(hooks[0], "__closure__", None) or ():
        frame = _contents(cell)
        if isinstance(frame, _Frame) and not isinstance(frame.recompute_fn, _Again):
            frame.recompute_fn = _Again(frame.recompute_fn, _arguments(frame), around)


def _arguments(frame: Any) -> list[Any]:
    """What the checkpointed function of `frame` was given, or what closes over it; tensors may be missing."""
    return list(frame.saved_args) if _Keeper is None else [frame.input_saver.grad_fn.get_args]


def keeps_arguments(func: Any) -> bool:
    """Whether this is the autograd Function by which an older torch keeps a checkpoint's arguments, as they are.

    Vmap does not take it, and need not see it: it computes nothing.
    """
    return _Keeper is not None and isinstance(func, FunctionCall) and func.function is _Keeper


def asks(frame: types.FrameType) -> bool:
    """Whether it is torch's checkpoints that run in `frame`: they would detach a batched tensor for good."""
    return frame.f_globals is vars(_checkpoint)


def unhooked(copied: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Inside, what autograd saves is kept as it is; or as copies, for a backward after its owner may have changed it.

    Torch would notice some changes in place and refuse; a change through `.data` it would take for the saved numbers.
    """
    if copied:
        return torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t)
    if hooked() is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)


class Following(TorchFunctionMode):
    """For `fn` outside vmap: second runs find in the model what first runs found, and no parameter is a constant."""

    def __init__(self, own: OwnParameters) -> None:
        super().__init__()
        self.own = own

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if hooked() is not None:
            follow(contextlib.nullcontext)
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


def _modules(roots: list[Any]) -> Iterator[torch.nn.Module]:
    """The modules that functions can reach: their own, their arguments', what they close over."""
    todo, seen = list(roots), dict[int, Any]()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item  # alive, so that its id stays its own
        if isinstance(item, torch.nn.Module):
            yield item
            todo += item._modules.values()
        elif isinstance(item, types.FunctionType):
            todo += [_contents(cell) for cell in item.__closure__ or ()]
            todo += item.__defaults__ or ()
            named = (item.__globals__.get(name) for name in item.__code__.co_names)
            todo += [value for value in named if isinstance(value, torch.nn.Module)]
        elif isinstance(item, types.MethodType):
            todo += [item.__func__, item.__self__]
            if not isinstance(item.__self__, (type, torch.nn.Module)):
                todo += getattr(item.__self__, "__dict__", {}).values()
        elif isinstance(item, functools.partial):
            todo += [item.func, *item.args, *item.keywords.values()]
        elif type(item) in (list, tuple):
            todo += item
        elif type(item) is dict:
            todo += item.values()


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None
