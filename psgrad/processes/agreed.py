"""The keyword `group` of public functions."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import optree

from ..engine.validate import is_nested
from ..errors import ArgumentError
from ..torch_.sharding import is_dtensor
from .lockstep import Lockstep
from .placed import made_whole
from .ranks import Ranks

C = TypeVar("C", bound=Callable[..., Any])


def agreed(function: C, like_params: str = "") -> C:
    """A public function with the keyword `group`: there it gets the `Ranks` of its call, and None where none is given.

    Whatever raises in it, from the first look at its arguments on, all ranks raise. Inside, parameters are whole, and
    so is the argument `like_params`, a tree like them.
    """
    places = {name: k for k, name in enumerate(inspect.signature(function).parameters)}

    @functools.wraps(function)
    def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
        if group is None:
            return function(*args, **kwargs)
        given = _Given(list(args), kwargs, places)
        with Ranks(group, function.__name__, kwargs.get("randomness", "different")) as ranks:
            ranks.take(given["params"])
            if is_nested():
                raise ArgumentError(
                    f"{function.__name__} is called with a group inside a torch.func transform\n"
                    "  ranks talk about numbers, which are not there yet: call it outside, or without a group."
                )
            other: Any = given[like_params] if like_params else None
            if any(map(is_dtensor, [*ranks.leaves, *optree.tree_leaves(other)])):
                layers = getattr(given["fn"], "psgrad_layers", None)
                # what decides which passes a model under fully_shard runs has to be the same on all ranks
                ranks.expect(given=[name for name in ("weights", "max_bytes") if _matters(given, name)])
                given["params"], whole = _whole(ranks, layers, (like_params, other))
                if other is not None:
                    given[like_params] = whole
            return function(*given.args, group=ranks, **given.kwargs)

    return cast(C, call)


class _Given:
    """Arguments by name, wherever they are."""

    def __init__(self, args: list[Any], kwargs: dict[str, Any], places: dict[str, int]) -> None:
        self.args, self.kwargs, self.places = args, kwargs, places

    def __getitem__(self, name: str) -> Any:
        k = self.places[name]
        return self.args[k] if k < len(self.args) else self.kwargs.get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if self.places[name] < len(self.args):
            self.args[self.places[name]] = value
        else:
            self.kwargs[name] = value


def _matters(given: _Given, name: str) -> bool:
    """Whether an argument is one by which a call takes other passes: a function of the norms, a bound on memory."""
    value = given[name] if name in given.places else None
    return callable(value) if name == "weights" else value is not None


def _whole(ranks: Ranks, layers: Any, other: tuple[str, Any]) -> tuple[Any, Any]:
    """The parameters and a tree like them without pieces: whole at once, but for the parameters of a model under
    fully_shard, which are whole while a layer is gathered."""
    if layers is None:
        return ranks.gathered(other)
    params: Any = optree.tree_unflatten(ranks.spec, ranks.leaves)
    layers.check(params, ranks.group)
    pieces = ranks.in_pieces(other, is_prepared=layers.is_prepared, orders=layers.orders())
    with ranks.in_touch():
        layers.prepare()
        layers.units.reset()  # an evaluation before this may have left units gathered
        whole = made_whole(other[1], pieces)
    ranks.lockstep = Lockstep(ranks, layers)
    return layers.whole(params), whole
