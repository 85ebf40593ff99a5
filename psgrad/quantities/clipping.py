"""Bounds on norms: which parameter is under which, and the weights that keep them."""

import math
from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from ..engine.problem import paths
from ..errors import ArgumentError, ArgumentTypeError
from ..factors.numerics import norm_of_norms
from ..torch_ import tracing


def clip_weights(norms: Tensor, max_norm: Any, finite: Tensor | None, nonfinite: str) -> Tensor:
    """What makes norms at most `max_norm`; samples that are not finite count 0, or NaN to let them through."""
    if not isinstance(max_norm, Tensor):  # which is 2 us cheaper to divide than a number
        max_norm = norms.new_full((), min(max_norm, torch.finfo(norms.dtype).max))
    w = torch.div(max_norm, norms).clamp_(max=1)
    return w if finite is None else w.masked_fill(~finite, torch.nan if nonfinite == "propagate" else 0.0)


def finite_of(norms: Sequence[Tensor], nonfinite: str) -> Tensor | None:
    """Which samples have norms (N,) that are all finite; None: every one."""
    if tracing.can_look(norms[0]):
        if all([math.isfinite(t.sum()) for t in norms]):  # noqa: C419, a third less
            return None
    elif nonfinite != "propagate":
        why, where = "and ops are being recorded", "under make_fx and its like"
        if norms[0].is_meta:
            why, where = "which meta tensors do not have", "for shapes alone"
        raise ArgumentError(f'nonfinite={nonfinite!r} depends on numbers, {why}\n  say nonfinite="propagate" {where}.')
    return torch.stack(list(norms)).isfinite().all(0)


def refuse_nonfinite(finite: Tensor) -> None:
    """Raise for the samples that are not finite, if any."""
    bad = (~finite).nonzero()[:, 0].tolist()
    if bad:
        shown = ", ".join(map(str, bad[:10])) + (f", ... ({len(bad)} in all)" if len(bad) > 10 else "")
        raise ArgumentError(
            f"the gradients of {'samples' if len(bad) > 1 else 'sample'} {shown} are not finite\n"
            '  leave them out with nonfinite="zero", or let them through with nonfinite="propagate".'
        )


def check_nonfinite(nonfinite: object) -> None:
    if nonfinite not in ("raise", "zero", "propagate"):
        raise ArgumentError(
            f'nonfinite={nonfinite!r} is not one of "raise", "zero", "propagate"\n'
            "  raise: an error that names the samples; zero: they do not count; propagate: the sum is NaN."
        )


def check_max_norm(max_norm: Any, where: str = "max_norm") -> Any:
    """A positive number, or a tensor of one."""
    number = isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool)
    if not number and not (isinstance(max_norm, Tensor) and max_norm.numel() == 1 and not max_norm.is_complex()):
        raise ArgumentTypeError(f"{where} is a {type(max_norm).__name__}, not a number\n  give a positive number.")
    if (number or tracing.can_look(max_norm)) and not float(max_norm) > 0:
        raise ArgumentError(f"{where}={float(max_norm)} is not positive\n  give a positive number; inf clips nothing.")
    return max_norm.detach().reshape(()) if isinstance(max_norm, Tensor) else max_norm


def bounds_of(max_norm: Any, params: Any, count: int) -> tuple[list[Any], optree.PyTreeSpec | None, list[int]]:
    """The bounds, their tree where they are one, and which of them each of `count` parameters is under.

    Of `params` only the structure counts.
    """
    if isinstance(max_norm, (float, int)):
        return [check_max_norm(max_norm)], None, [0] * count
    leaves, spec = optree.tree_flatten(max_norm)
    if spec.is_leaf():
        return [check_max_norm(max_norm)], None, [0] * count
    names = paths(spec, "max_norm")
    bounds = [check_max_norm(leaf, name) for leaf, name in zip(leaves, names, strict=True)]
    numbers: Any = optree.tree_unflatten(spec, list(range(len(leaves))))
    if isinstance(max_norm, dict) and all(isinstance(k, int) for k in numbers.values()):
        keys = _flat_keys(params, count)
        if keys is not None:
            return bounds, spec, _by_name(numbers, keys)
    try:
        return bounds, spec, optree.broadcast_prefix(numbers, params)
    except (ValueError, TypeError):
        raise ArgumentError(
            f"max_norm does not fit params\n  max_norm: {spec}\n  params: {optree.tree_structure(params)}\n"
            "  give one number, or a pytree prefix of params."
        ) from None


def _flat_keys(params: Any, count: int) -> list[str] | None:
    """The names of parameters in a dict from name to tensor, in the order of the leaves; None for any other tree."""
    if not isinstance(params, dict) or len(params) != count:
        return None
    tree: Any = params  # of tensors, which optree's types do not know
    keys = [path[0] for path in optree.tree_paths(tree) if len(path) == 1 and isinstance(path[0], str)]
    return keys if len(keys) == count else None


def _by_name(numbers: dict[str, int], names: Sequence[str]) -> list[int]:
    """For parameters called like "encoder.weight": the bound with that name, or with that of a module above."""
    group = []
    for name in names:
        above = [key for key in numbers if name == key or name.startswith(f"{key}.")]
        if not above:
            raise ArgumentError(
                f"max_norm has no bound for {name!r}\n  give one for the parameter, or for a module above it."
            )
        group.append(numbers[max(above, key=len)])
    if unused := [key for key, k in numbers.items() if k not in group]:
        raise ArgumentError(f"max_norm has {unused[0]!r}, under which there is no parameter\n  leave it out.")
    return group


def norms_under(each: Sequence[Tensor], group: Sequence[int], count: int) -> list[Tensor]:
    """Norms (N,) over the parameters under each of `count` bounds, from those of each parameter."""
    under = [[t for t, k in zip(each, group, strict=True) if k == bound] for bound in range(count)]
    return [norm_of_norms(ts) if ts else torch.zeros_like(each[0]) for ts in under]
