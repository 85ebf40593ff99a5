"""Where a module of torch.nn holds what belongs to it, and which modules a function can reach."""

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch

Home = dict[str, Any]  # a dict in which a module holds parameters, buffers, or anything


def parameters_of(module: torch.nn.Module) -> Home:
    """The module's own parameters by name, itself: an entry that is replaced is replaced in the module."""
    return module._parameters


def buffers_of(module: torch.nn.Module) -> Home:
    """The module's own buffers by name, itself."""
    return module._buffers


def children_of(module: torch.nn.Module) -> Home:
    """The module's own modules by name, itself."""
    return module._modules


FLAT_WEIGHTS = ("_flat_weights", "_flat_weight_refs")  # where a recurrent layer holds its parameters once more


gradient_hooks_of: Callable[[torch.Tensor], Any] = attrgetter("_backward_hooks")  # registered on a tensor's gradient


# Hooks that are called for every module there is.
HOOKS_OF_ALL_MODULES: Sequence[Home] = [
    getattr(torch.nn.modules.module, f"_global_{kind}")
    for kind in ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
]


def reachable_modules(roots: Sequence[Any]) -> Iterator[torch.nn.Module]:
    """The modules that functions can reach: their own, their arguments', what they close over or name."""
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
            todo += [contents(cell) for cell in item.__closure__ or ()]
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


def contents(cell: types.CellType) -> Any:
    """What a closure's cell holds; None where the variable has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
