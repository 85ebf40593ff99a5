"""Bounds on norms: which parameter is under which, the weights that keep them, and what comes of it."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Generic, NamedTuple

import optree
import torch
from torch import Tensor

from .. import display
from ..annotations import Norms, P
from ..engine.problem import paths
from ..engine.validate import is_nested
from ..errors import ArgumentError, ArgumentTypeError
from ..factors import assumptions
from ..factors.numerics import norm_of_norms
from ..torch_ import levels, tracing


class ClippedGrad(NamedTuple, Generic[P, Norms]):
    """A sum of clipped gradients, and what a training step wants to know beside it.

    Guarantee: one sample more in the batch, or one less, moves `grad` by at most `sensitivity` in L2 norm over all
    parameters; one exchanged for another, by at most twice that. Noise for differential privacy is scaled by it.
    The conditions:

    - `nonfinite` is "zero" or "raise". With "propagate" one sample can make everything NaN. With "raise" the error
      itself depends on the data: in private training say "zero".
    - `fn` is a function of params and its own sample: no statistics of the batch, no state from call to call. The
      random numbers that the other samples draw count as given.
    - Up to rounding. In float32 a clipped gradient exceeds its bound by 1e-4 of that at the very worst, where the
      positions of a sequence nearly cancel out, and by about 1e-7 otherwise. `grad` is rounded to the dtype of params:
      in bfloat16 that moves it by up to 1/256 of its own size besides.

    Attributes:
        grad: the sum of the clipped gradients, a pytree like params. For a mean divide it by `count`, or in private
            training by the batch size that was to be expected.
        norms: (N,) norms before clipping; a pytree of them like `max_norm` where that is one. 0 for samples that are
            not `valid`.
        values: (N,) losses; 0 for samples that are not `valid`.
        count: how many samples are in the sum: those that are `valid`, less those that `nonfinite="zero"` left out;
            with a `group`, of all ranks.
        sensitivity: how far one sample can move `grad`. It is `max_norm`, or where there are several bounds the square
            root of the sum of their squares; NaN where `max_norm` is a tensor without a value, as meta tensors are.

    Inside a torch.func transform `count` and `sensitivity` are tensors of one number, as vmap returns nothing else.
    """

    grad: P
    norms: Norms
    values: Tensor
    count: int  # type: ignore[assignment]  # tuples have a method of that name, which nobody calls here
    sensitivity: float

    def __repr__(self) -> str:
        return display.brief(self)

    @display.safely
    def _repr_html_(self) -> str:
        """Norms with the bound, and where the sum comes from."""
        n, of = self.count, len(self.values)
        samples = f"{n:,}" if n == of else f"{n:,} of {of:,}" if n < of else f"{n:,} of all ranks, {of:,} here"
        pairs = [("samples", samples), ("sensitivity", f"{self.sensitivity:.4g}")]
        n = min(n, of)  # of a group there are norms of this rank's alone
        pictures = []
        if isinstance(self.norms, Tensor):
            norms = _of_those_that_count(self.norms, of - n)
            if n and not norms.is_meta:
                above = int((norms > self.sensitivity).sum())
                pairs += [("clipped", f"{above:,} ({display.percent(above / n)})")]
                pairs += [("median norm", display.number(norms.median()))]
            pictures.append(display.histogram(norms, "norms before clipping", self.sensitivity))
        else:
            rows = [
                (name, *(display.number(found) for found in (t.median(), t.max())))
                for name, t in display.leaves(self.norms)[: display.ROWS]
                if t.numel()
            ]
            pictures.append(display.table(("bound", "median norm", "largest"), rows) if rows else "")
        params = display.leaves(self.grad)
        squares = [display.sq_norm(t) for _, t in params]
        total = sum(s for s in squares if s is not None)
        shown = display.largest(squares, "its square")
        table = [
            (
                params[i][0],
                display.shape(params[i][1]),
                display.number(None if (own := squares[i]) is None else own**0.5),
                display.meter(own / total if own and total else 0.0),
            )
            for i in shown.rows
        ]
        if squares and squares[0] is not None:
            pairs += [("norm of the sum", f"{total**0.5:.4g}")]
        head = ("parameter", "shape", "norm of the sum", "share of its square")
        return display.page(
            "ClippedGrad", display.facts(pairs), *pictures, display.table(head, table, left=2, more=shown.more)
        )


def _of_those_that_count(norms: Tensor, others: int) -> Tensor:
    """Norms (N,) without those of samples that do not count: zeros, or not finite."""
    if not others or norms.is_meta:
        return norms
    kept = norms[norms.isfinite()]
    others -= len(norms) - len(kept)
    zeros = (kept == 0).nonzero()[: max(others, 0), 0]
    mask = torch.ones(len(kept), dtype=torch.bool, device=kept.device)
    mask[zeros] = False
    return kept[mask]


class Bounds(NamedTuple):
    """Bounds on norms, and which parameters are under which."""

    each: list[Any]  # numbers, or tensors of one
    spec: optree.PyTreeSpec | None  # their tree, where they are one
    group: list[int]  # the bound that each parameter is under
    sensitivity: float  # the norm of all together


def clip_weights(norms: Tensor, max_norm: Any, finite: Tensor | None, nonfinite: str) -> Tensor:
    """What makes norms at most `max_norm`; samples that are not finite count 0, or NaN to let them through."""
    if not isinstance(max_norm, Tensor):  # which is cheaper to divide than a number
        usual = type(norms) is Tensor and norms.is_cpu and not tracing.is_recorded()
        max_norm = _bound(max_norm, norms.dtype) if usual else norms.new_full((), _finite(max_norm, norms.dtype))
    w = torch.div(max_norm, norms).clamp_(max=1)
    return w if finite is None else w.masked_fill(~finite, torch.nan if nonfinite == "propagate" else 0.0)


def _finite(max_norm: float, dtype: torch.dtype) -> float:
    return min(max_norm, torch.finfo(dtype).max)


@lru_cache
def _bound(max_norm: float, dtype: torch.dtype) -> Tensor:
    """A bound as a tensor on the CPU, which nobody writes to: the same from call to call."""
    return torch.full((), _finite(max_norm, dtype), dtype=dtype, device="cpu")


def finite_of(norms: Sequence[Tensor], nonfinite: str) -> Tensor | None:
    """Which samples have norms (N,) that are all finite; None: every one."""
    if assumptions.are_looks() and not norms[0].is_meta:
        if all(map(math.isfinite, map(_sum, norms))):
            return None
    elif assumptions.are_noted() and nonfinite != "propagate":
        for t in norms:
            assumptions.assume(t.sum().isfinite())
        return None
    elif assumptions.doubt(lambda: torch.stack(list(norms)).isfinite()):
        return None
    elif nonfinite != "propagate" and norms[0].is_meta:
        why = "depends on numbers, which meta tensors do not have"
        raise ArgumentError(f'nonfinite={nonfinite!r} {why}\n  say nonfinite="propagate" for shapes alone.')
    elif nonfinite == "raise":  # whoever runs the recorded ops gets the error
        tracing.assert_in_graph(torch.stack(list(norms)).isfinite().all(), "the gradients of a sample are not finite")
        return None
    return torch.stack(list(norms)).isfinite().all(0)


_sum: Callable[[Tensor], Tensor] = Tensor.sum


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


def check_max_norm(max_norm: Any, where: str = "max_norm") -> tuple[Any, float]:
    """A positive number, or a tensor of one; and the number, NaN where it cannot be known."""
    number = isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool)
    if not number and not (isinstance(max_norm, Tensor) and max_norm.numel() == 1 and not max_norm.is_complex()):
        raise ArgumentTypeError(f"{where} is a {type(max_norm).__name__}, not a number\n  give a positive number.")
    value = math.nan
    if number or (tracing.can_look(max_norm) and not levels.hides_values(max_norm)):
        value = float(max_norm.detach() if isinstance(max_norm, Tensor) else max_norm)
        if not value > 0:
            raise ArgumentError(f"{where}={value} is not positive\n  give a positive number; inf clips nothing.")
    if not isinstance(max_norm, Tensor):
        return max_norm, value
    return (max_norm if is_nested() else max_norm.detach()).reshape(()), value


def bounds_of(max_norm: Any, params: Any, count: int) -> Bounds:
    """The bounds on the norms of `count` parameters. Of `params` only the structure counts."""
    leaves, spec = [max_norm], None
    if not isinstance(max_norm, (float, int)):
        leaves, spec = optree.tree_flatten(max_norm)
    if spec is None or spec.is_leaf():
        bound, value = check_max_norm(max_norm)
        return Bounds([bound], None, [0] * count, value)
    names = paths(spec, "max_norm")
    found = [check_max_norm(leaf, name) for leaf, name in zip(leaves, names, strict=True)]
    group = _groups(max_norm, spec, params, count)
    sensitivity = math.hypot(*(found[k][1] for k in set(group)))
    return Bounds([bound for bound, _ in found], spec, group, sensitivity)


def _groups(max_norm: Any, spec: optree.PyTreeSpec, params: Any, count: int) -> list[int]:
    """Which bound of a tree each parameter is under."""
    numbers: Any = optree.tree_unflatten(spec, list(range(spec.num_leaves)))
    if isinstance(max_norm, dict) and all(isinstance(k, int) for k in numbers.values()):
        keys = _flat_keys(params, count)
        if keys is not None:
            return _by_name(numbers, keys)
    try:
        return optree.broadcast_prefix(numbers, params)
    except (ValueError, TypeError):
        raise ArgumentError(
            f"max_norm does not fit params\n  max_norm: {spec}\n  params: {optree.tree_structure(params)}\n"
            "  give one number, or a pytree prefix of params; where these have names, a dict from names."
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
