"""Factors as plain data and back: what a FactoredGrads is pickled as.

Tensors, numbers, strings, and tuples and dicts of them. Such a file names one class of ours, psgrad.FactoredGrads,
whatever files our code lies in; and `torch.load`, which builds only what it knows, can load it.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import optree

from ..errors import ArgumentError
from .costs import ConvGeometry
from .dense import Dense, Product
from .matrices import Matrices
from .outer import Outer
from .patches import Patches
from .region import Region
from .rows import Rows
from .sum import Placement, Sum

FORMAT = 1  # raised when files of before can no longer be read
RECORDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Sum, Placement, Dense, Product, Outer, Rows, Matrices, Patches, Region, ConvGeometry)
}


def plain(value: Any) -> Any:
    """A record as a dict of its fields; anything else, such as somebody's own factor, as it is."""
    kind = type(value)
    if kind is tuple:
        return tuple(plain(v) for v in value)
    if RECORDS.get(kind.__name__) is not kind:
        return value
    names = kind._fields if isinstance(value, tuple) else [f.name for f in fields(kind)]
    return {"record": kind.__name__, **{name: plain(getattr(value, name)) for name in names}}


def rebuilt(value: Any) -> Any:
    """What `plain` made plain."""
    if type(value) is tuple:
        return tuple(rebuilt(v) for v in value)
    if type(value) is not dict:
        return value
    name = value.get("record")
    if name not in RECORDS:
        raise unreadable(f"it holds a {name!r}")
    return RECORDS[name](**{key: rebuilt(v) for key, v in value.items() if key != "record"})


def plain_spec(spec: optree.PyTreeSpec) -> Any:
    """A tree's structure as the tree itself, with numbers for its leaves; as it is where a node takes no numbers."""
    numbers = list(range(spec.num_leaves))
    try:
        tree: Any = optree.tree_unflatten(spec, numbers)
        leaves, again = optree.tree_flatten(tree)
    except Exception:  # whatever a class of the user's raises
        return {"spec": spec}
    return {"tree": tree} if again == spec and leaves == numbers else {"spec": spec}


def rebuilt_spec(value: Mapping[str, Any]) -> optree.PyTreeSpec:
    spec: optree.PyTreeSpec = value["spec"] if "spec" in value else optree.tree_structure(value["tree"])
    return spec


def unreadable(why: str) -> ArgumentError:
    return ArgumentError(
        f"a FactoredGrads was saved by another version of psgrad: {why}\n  load it with the version that saved it."
    )
