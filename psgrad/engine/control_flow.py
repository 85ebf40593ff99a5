"""torch.cond, while_loop, scan and map inside `fn`, as the Python that they stand for.

Torch would compile their bodies. Run one by one under the mode, their predicates are answered like any other.
"""

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from ..torch_.operators import HigherOrder


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any = ()) -> Any:
    return true_fn(*operands) if pred else false_fn(*operands)


def _while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Any, additional: Any = ()) -> Any:
    carried = tuple(carried)
    while cond_fn(*carried, *additional):
        carried = tuple(body_fn(*carried, *additional))
    return carried


def _scan(combine_fn: Callable[..., Any], init: Any, xs: Any, additional: Any = ()) -> list[Any]:
    """Along axis 0 of every leaf, as torch has moved it there."""
    carried, rows = list(init), []
    for i in range(len(xs[0])):
        out = list(combine_fn(*carried, *(x[i] for x in xs), *additional))
        carried = out[: len(init)]
        rows.append(out[len(init) :])
    return [*carried, *(torch.stack(column) for column in zip(*rows, strict=True))]


def _map(f: Callable[..., Any], xs: Any, additional: Any = (), *, mutated_arg_indices: str = "") -> Any:
    """`mutated_arg_indices`, which a newer torch gives, says what `f` writes to: as Python it just does."""
    found = [f(*(x[i] for x in xs), *additional) for i in range(len(xs[0]))]
    return optree.tree_map(lambda *leaves: torch.stack(leaves) if isinstance(leaves[0], Tensor) else leaves[0], *found)


_BODIES: dict[str, Callable[..., Any]] = {"cond": _cond, "while_loop": _while_loop, "scan": _scan, "map_impl": _map}


def body_of(func: Any) -> Callable[..., Any] | None:
    """The Python that a higher-order op stands for; None where `func` is none of these."""
    if not isinstance(func, HigherOrder):
        return None
    return _BODIES.get(func.name())
