"""Writes in place: into tensors that `fn` made, never into the caller's parameters or batch.

Where vmap would keep samples apart by a copy and torch without vmap has a view, a write to either is missed by the
other. Such copies are noted; a write that matters sends the call to the loop over samples.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UnsupportedOpError, name_of, place
from ..registry.params import Param
from ..torch_ import levels
from ..torch_.functions import DRAWS, is_composite
from ..torch_.storage import shares_memory, storage_of
from . import op_loop, ragged_indexing
from .signals import NeedsLoop, Rerun, SampleWritten

if TYPE_CHECKING:
    from .mode import Mode, TorchCall


@dataclass(eq=False)
class ViewCopy:
    """A copy where torch without vmap has a view: x[i] with an integer i that differs between samples."""

    original: int  # the storage of x
    copy: int  # that of the copy
    tensor: Tensor  # the copy, alive so that its storage stays its own
    index: Any
    is_dirty: bool = False  # the copy has been written to, and the original not yet


def note_view(mode: "Mode", original: Tensor, found: Any, index: Any = None) -> None:
    """Remember that `found` stands for a view of `original`."""
    storage = _storage(mode, original)
    for t in op_loop.leaves(found):
        if isinstance(t, Tensor) and levels.is_batched(t, mode.level):
            mode.view_copies.append(ViewCopy(storage, _storage(mode, t), t, index))


def _storage(mode: "Mode", t: Tensor) -> int:
    return storage_of(levels.lower(t, mode.n, mode.level))


def _note_write(mode: "Mode", func: Any, args: Any, storage: int) -> None:
    """What a write to `storage` means for copies that stand for views."""
    for view in mode.view_copies:
        if view.copy == storage:
            view.is_dirty = True
        elif view.original == storage:
            if func is ragged_indexing.SETITEM and args[1] is view.index and args[2] is view.tensor:
                view.is_dirty = False  # x[i] += v is a copy, a write to it, and this
            else:
                mode.outdated[view.copy] = view.tensor


def refuse_lost_writes(mode: "Mode") -> None:
    """`fn` is through: raise where a write to a copy should have been one to the original."""
    if any(view.is_dirty for view in mode.view_copies):
        raise NeedsLoop("fn writes to a view by an index that differs between samples")


def check_write(mode: "Mode", func: Any, args: Any, kwargs: Any) -> None:
    """`fn` changes its first argument in place: never the caller's parameters or batch."""
    target = args[0]
    param = mode.tracked.get(id(target))
    if param is not None and not torch.is_grad_enabled() and param.source.index < mode.roots:
        raise _changes(func, param)
    if not mode.is_innermost:
        if param is not None and param.source.index >= mode.roots:
            raise Rerun("of_params_per_sample")
        return
    if not levels.is_batched(target, mode.level):
        others = mode.look((*args[1:], *kwargs.values()))
        drawn = func in DRAWS and mode.randomness == "different"
        if drawn or others.params or others.samples:
            if mode.options.new_per_sample:
                raise NeedsLoop("fn writes samples into a tensor that they share")
            raise Rerun("new_per_sample")
    lowered = levels.lower(target, mode.n, mode.level)
    if any(shares_memory(lowered, source.value) for source in mode.sources[mode.roots :]):
        raise Rerun("of_params_per_sample")
    storage = storage_of(lowered)
    if any(isinstance(t, Tensor) and storage_of(t) == storage for t in mode.batch):
        raise SampleWritten
    if storage in mode.copies:
        param = mode.copies[storage][0]
        if param.source.index >= mode.roots:
            raise NeedsLoop("fn changes a detached function of parameters in place")
        raise _changes(func, param)
    if mode.view_copies:
        _note_write(mode, func, args, storage)


def _changes(func: Any, param: Param) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{name_of(func)} changes {param.source.name} in place\n"
        f"  called at {place()}\n"
        "  per-sample gradients need parameters that stay put: change a clone instead."
    )


def with_sample_axis(mode: "Mode", new: Any) -> Any:
    """A new tensor with memory of its own for every sample."""
    if not isinstance(new, Tensor) or not mode.is_innermost or levels.is_batched(new, mode.level):
        return new
    return levels.sampled_below(mode.level, new.expand(mode.n, *new.shape).contiguous)


def put(mode: "Mode", call: "TorchCall") -> Any:
    """target[index] = value, where the index has both tensors and other things in it: vmap mistakes the axes."""
    check_write(mode, call.func, call.args, call.kwargs)
    target, index, value = call.args
    if not levels.is_batched(target, mode.level):
        return call.run()
    if not levels.below(ragged_indexing.put, target, index, value, mode.n, mode.level):
        raise NeedsLoop("an index that vmap does not take")
    return None


def own_statistics(mode: "Mode", func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with running statistics that may be written to: copies of those that all samples share."""

    def own(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        if not levels.is_batched(t, mode.level):
            mode.outdated[storage_of(t)] = t  # each sample would change it in its own way
            return t.clone()
        check_write(mode, func, (t,), {})
        return t

    first = 1 if is_composite(func) else 3  # F.batch_norm has them behind the input, torch.batch_norm further on
    if not _is_training(func, args, kwargs):
        return args, kwargs
    named = {k: own(v) if k.startswith("running_") else v for k, v in kwargs.items()}
    return (*args[:first], *map(own, args[first : first + 2]), *args[first + 2 :]), named


def _is_training(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a norm may write to its running statistics; a norm that does not say may."""
    names = {"batch_norm": ("training", 5), "instance_norm": ("use_input_stats", 5)}
    name, position = names.get(getattr(func, "__name__", ""), ("", 0))
    if not name:
        return True
    default = name == "use_input_stats" and is_composite(func)
    return bool(kwargs.get(name, args[position] if len(args) > position else default))
