"""The keyword `group` of public functions."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import optree

from ..engine.validate import is_nested
from ..errors import ArgumentError
from .lockstep import Lockstep
from .placed import is_dtensor
from .ranks import Ranks

C = TypeVar("C", bound=Callable[..., Any])


def agreed(function: C) -> C:
    """A public function with the keyword `group`: there it gets the `Ranks` of its call, and None where none is given.

    Whatever raises in it, from the first look at its arguments on, all ranks raise. Inside, parameters are whole.
    """

    @functools.wraps(function)
    def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        if group is None:
            return function(*args, **kwargs)
        fn = args[0] if args else kwargs.get("fn")
        params = args[1] if len(args) > 1 else kwargs.get("params")
        with Ranks(group, function.__name__, kwargs.get("randomness", "different")) as ranks:
            ranks.take(params)
            if is_nested():
                raise ArgumentError(
                    f"{function.__name__} is called with a group inside a torch.func transform\n"
                    "  ranks talk about numbers, which are not there yet: call it outside, or without a group."
                )
            if any(map(is_dtensor, ranks.leaves)):
                whole = _whole(ranks, getattr(fn, "psgrad_layers", None), kwargs.get("max_bytes") is not None)
                if len(args) > 1:
                    args = (args[0], whole, *args[2:])
                else:
                    kwargs["params"] = whole
            return function(*args, group=ranks, **kwargs)

    return cast(C, call)


def _whole(ranks: Ranks, layers: Any, is_bounded: bool) -> Any:
    """The parameters without pieces: whole at once, or for a model under fully_shard while a layer is gathered."""
    if layers is None:
        return ranks.gathered()
    params: Any = optree.tree_unflatten(ranks.spec, ranks.leaves)
    layers.check(params, ranks.group)
    ranks.in_pieces(is_prepared=layers.is_prepared, orders=layers.orders(), is_bounded=is_bounded)
    ranks.lockstep = Lockstep(ranks, layers)
    with ranks.in_touch():
        layers.prepare()
    return layers.whole(params)
