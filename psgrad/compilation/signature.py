"""What tells one call from another: a graph is good for calls that are alike in all of it."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engine.problem import flatten, of_count, of_names
from .recording import facts_of, is_lazy, stride_of

_TENSORS, _TEXTS = {Tensor}, {str}
_NUMBERS_AND_WORDS = {bool, int, float, str, type(None)}


class Call(NamedTuple):
    """The arguments of a quantity but for its function."""

    params: Any
    batch: Any
    options: dict[str, Any]


def _known(leaf: Any) -> Any:
    """What tells an option from others: True is not 1, and 0.0 not -0.0."""
    return (type(leaf), repr(leaf) if isinstance(leaf, float) else leaf)


def structure_of(call: Call, of_options: Any) -> tuple[list[Tensor], tuple[Any, ...]]:
    """The tensors of a call, and what surrounds them; `of_options` are options without tensors, worked out before."""
    params, batch = call.params, call.batch
    if of_options is not None and type(params) is dict and type(batch) is tuple and set(map(type, params)) == _TEXTS:
        structure, values = _of_usual(tuple(params), len(batch), of_options)
        leaves = [*values(params), *batch]
        if set(map(type, leaves)) == _TENSORS:
            return leaves, structure
    leaves, of_params = flatten(params, none_is_leaf=True)
    more, of_batch = flatten(batch, none_is_leaf=True)
    leaves += more
    if of_options is None:
        more, of_options = flatten(call.options, none_is_leaf=True)
        leaves += more
    structure = of_params, of_batch, of_options, _orders(params), _orders(batch)
    if set(map(type, leaves)) == _TENSORS:
        return leaves, structure
    others = tuple([None if isinstance(leaf, Tensor) else _known(leaf) for leaf in leaves])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)], (*structure, others)


@lru_cache(maxsize=256)
def _of_usual(names: tuple[str, ...], count: int, of_options: Any) -> tuple[Any, Callable[[Any], Sequence[Any]]]:
    """What surrounds a dict of tensors with these names and a tuple of so many; and what takes the dict's leaves."""
    of_params, values = of_names(names, True)
    return (of_params, of_count(count, True), of_options, names, ()), values


def _orders(tree: Any) -> tuple[Any, ...]:
    """The order of the keys of each dict in a tree: `fn` may go through them, and structures are equal without it."""
    if isinstance(tree, dict):
        return (*tree, *[_orders(value) for value in tree.values() if not isinstance(value, Tensor)])
    if isinstance(tree, (tuple, list)):
        return tuple([_orders(value) for value in tree if not isinstance(value, Tensor)])
    return ()


def plain(options: dict[str, Any]) -> Any:
    """Numbers and words among options, to be compared; None where there is anything else, which may change."""
    if all(type(value) in _NUMBERS_AND_WORDS for value in options.values()):
        return tuple((name, _known(value)) for name, value in sorted(options.items()))
    return None


def signature_of(tensors: list[Tensor], structure: tuple[Any, ...], settings: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a graph takes for granted of the arguments of a call, and of torch's settings."""
    return (structure, *map(facts_of, tensors), *map(stride_of, tensors), tuple(map(is_lazy, tensors)), settings)


def but_for_size(key: tuple[Any, ...], n: int, own: int) -> Any:
    """A signature in which batches of any size are alike: without strides, and but for the first `own` tensors, the
    parameters, without axes of n in front."""
    structure, *facts, settings = key
    shapes = [fact for fact in facts if isinstance(fact[0] if fact else None, torch.Size)]
    alike = [
        (shape[1:], *rest) if i >= own and len(shape) and shape[0] == n else (shape, *rest)
        for i, (shape, *rest) in enumerate(shapes)
    ]
    return structure, tuple(alike), settings
