"""Pytrees as flat lists."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

import optree
from torch import Tensor

_TENSORS, _TEXTS = {Tensor}, {str}


def flatten(tree: Any, *, none_is_leaf: bool = False) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves of a tree, and its structure.

    What nearly every call is given, a dict from names to tensors and a tuple of tensors, is not walked: its structure
    depends on the names, or the number of tensors, alone, and is worked out once.
    """
    if type(tree) is dict:
        if set(map(type, tree.values())) == _TENSORS and set(map(type, tree)) == _TEXTS:  # 1 and True are one key
            spec, values = _of_names(tuple(tree), none_is_leaf)
            return list(values(tree)), spec
    elif type(tree) is tuple and set(map(type, tree)) == _TENSORS:
        return list(tree), _of_count(len(tree), none_is_leaf)
    return optree.tree_flatten(tree, none_is_leaf=none_is_leaf)


@lru_cache(maxsize=256)
def _of_names(names: Sequence[str], none_is_leaf: bool) -> tuple[optree.PyTreeSpec, Callable[[Any], Sequence[Any]]]:
    """The structure of a dict with these names, in their order, and what takes its values in the order of leaves."""
    tree: Any = {name: name for name in names}
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=none_is_leaf)
    return spec, itemgetter(*leaves) if len(leaves) > 1 else lambda tree: [tree[leaves[0]]]


@lru_cache(maxsize=256)
def _of_count(count: int, none_is_leaf: bool) -> optree.PyTreeSpec:
    """The structure of a tuple of so many tensors."""
    tree: Any = (0,) * count
    return optree.tree_structure(tree, none_is_leaf=none_is_leaf)
