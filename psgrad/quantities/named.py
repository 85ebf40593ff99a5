"""Parameters by name, and linear maps for some of them."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import optree
import torch
from torch import Tensor

from .. import display
from ..engine.problem import kind_of, paths
from ..errors import ArgumentError, ArgumentTypeError
from ..factors.maps import Side
from ..factors.numerics import wide

Maps = dict[int, tuple[Side, Side]]  # L and R of L g R^T, by the parameter's index


def names_of(spec: optree.PyTreeSpec) -> list[str]:
    """What parameters are called: the key in a flat dict, such as "0.weight", and a path in any other tree."""
    return display.names_of(spec)


def indices_of(names: Iterable[Any], spec: optree.PyTreeSpec, argument: str) -> list[int]:
    """Parameters by name, or by path as errors have it."""
    own, full = names_of(spec), paths(spec, "params")
    known = {name: i for i, name in enumerate(own)} | {name: i for i, name in enumerate(full)}
    found = []
    for name in names:
        if name not in known:
            shown = ", ".join(map(repr, own[:10])) + (", ..." if len(own) > 10 else "")
            raise ArgumentError(f"{argument} has {name!r}, but no parameter is called that\n  there are {shown}.")
        found.append(known[name])
    return found


def maps_of(given: Any, spec: optree.PyTreeSpec, metas: Sequence[Any], argument: str, columns: bool = False) -> Maps:
    """For some parameters, by name, two matrices: checked, where the parameter is and in the dtype for sums.

    `columns`: they are given as basis vectors in columns, and the maps are their transposes.
    """
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(
            f"{argument} is {kind_of(given)}, not a dict\n  give two matrices for each parameter that is to change."
        )
    maps: Maps = {}
    for (name, pair), i in zip(given.items(), indices_of(given, spec, argument), strict=True):
        where, meta = f"{argument}[{name!r}]", metas[i]
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ArgumentTypeError(
                f"{where} is {kind_of(pair)}, not two matrices\n  give one for the rows and one for the columns."
            )
        if hasattr(pair, "_fields"):  # KronFactors(input, output), whose sides of a square matrix would fit as well
            raise ArgumentTypeError(
                f"{where} is {kind_of(pair)}, whose fields need not be in the order of the sides\n"
                "  give a plain pair, of its inverses say: (inverse(k.output), inverse(k.input))."
            )
        if not meta.shape:
            raise ArgumentError(f"{where} is for a single number, which is no matrix\n  leave it out.")
        sizes = meta.shape[0], prod(meta.shape[1:])
        left, right = (
            _side(t, size, f"{where}[{k}]", meta, columns) for k, (t, size) in enumerate(zip(pair, sizes, strict=True))
        )
        maps[i] = left, right
    return maps


def _side(given: Any, size: int, where: str, meta: Any, columns: bool) -> Side:
    if given is None:
        return None
    if not isinstance(given, Tensor) or given.is_complex():
        what = given.dtype if isinstance(given, Tensor) else kind_of(given)
        raise ArgumentTypeError(f"{where} is {what}\n  give a tensor of real numbers, or None for no change.")
    if given.dim() not in (1, 2) or given.shape[0 if columns else -1] != size:
        shape = f"({size}, any)" if columns else f"(any, {size})"
        raise ArgumentError(
            f"{where} has shape {tuple(given.shape)}, which does not fit {size} numbers\n"
            f"  give a matrix of shape {shape}, a vector of {size} for a diagonal one, or None for no change."
        )
    t = given.detach().to(meta.device, wide(meta.dtype))
    return t.mT if columns and t.dim() == 2 else t


def empty_maps(maps: Maps) -> Maps:
    """The same without the numbers, in memory of their own."""
    return {i: tuple(None if t is None else torch.empty_like(t) for t in pair) for i, pair in maps.items()}  # type: ignore[misc]
