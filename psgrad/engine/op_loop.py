"""A loop over samples for one op: the rung between plain vmap and a loop for the whole call.

Where vmap refuses an op, or gets it wrong, the op runs for one sample after the other, on rows of the (N, ...)
tensors behind its arguments, and ordinary autograd follows. Everything around it keeps its rules.
"""

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..torch_ import levels
from ..torch_.storage import shares_memory
from ..torch_.watching import FunctionCall
from .signals import NeedsLoop, split_by_keys


class _Alone(TorchFunctionMode):
    """Refuses what still has the sample axis: an op that reaches for it is no function of its arguments alone."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.level = level

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(t, Tensor) and levels.is_batched(t, self.level) for t in leaves((args, kwargs))):
            raise NeedsLoop("an op uses a tensor that is not among its arguments")
        if isinstance(func, FunctionCall):
            with self:
                return func.run(*args, **kwargs)
        return func(*args, **kwargs)


def leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, none_is_leaf=True)


def is_sampled(args: Any, kwargs: Any, level: int) -> bool:
    """Whether an argument differs between samples."""
    return any(isinstance(t, Tensor) and levels.is_batched(t, level) for t in leaves((args, kwargs)))


def run(func: Any, args: Any, kwargs: Any, n: int, level: int, writes: bool) -> tuple[Any, Tensor | None]:
    """`func` for each of n samples; `writes`: it changes its first argument, and returns that.

    Returns the result, and the argument that each sample's result is a view of, if there is one: the result itself is
    a copy. Samples for which `func` raises, or gives something of another shape or another Python value, part ways.
    """
    given: Any = (args, kwargs)
    flat, spec = optree.tree_flatten(given, none_is_leaf=True)
    rows: list[Sequence[Any]] = []
    for i, leaf in enumerate(flat):
        if not isinstance(leaf, Tensor) or not levels.is_batched(leaf, level):
            if writes and i == 0:
                raise NeedsLoop("fn writes samples into a tensor that they share")
            rows.append([leaf] * n)
        elif writes and i == 0:  # a view that may be written to, as those of unbind may not
            lowered = levels.lower(leaf, n, level)
            rows.append([levels.below(lowered.select, 0, k) for k in range(n)])
        else:
            rows.append(levels.below(levels.lower(leaf, n, level).unbind))
    found: list[Any] = []
    errors: list[Exception | None] = []
    error: Exception | None = None
    for row in zip(*rows, strict=True):
        own_args, own_kwargs = optree.tree_unflatten(spec, row)
        error = None
        try:
            with _Alone(level):
                found.append(levels.below(lambda a, k: func(*a, **k), own_args, own_kwargs))
        except Exception as own:  # this sample's
            found.append(None)
            error = own
        errors.append(error)
    split_by_keys([type(error) for error in errors])
    if errors[0] is not None:
        try:
            raise errors[0]
        finally:
            del errors, error  # an error's traceback has this frame: the two would keep each other, and all rows, alive
    if writes:
        return args[0], None
    return _stacked(found, level), _original(found[0], given, [row[0] for row in rows])


def _original(result: Any, given: Any, row: list[Any]) -> Tensor | None:
    """The argument whose memory a sample's result shares; `row`: the sample's arguments."""
    for leaf, own in zip(leaves(given), row, strict=True):
        if isinstance(own, Tensor) and own is not leaf:
            for t in leaves(result):
                if isinstance(t, Tensor) and t.layout is own.layout is torch.strided and shares_memory(t, own):
                    return leaf  # type: ignore[no-any-return]
    return None


def _stacked(found: list[Any], level: int) -> Any:
    """The samples' results as one."""
    flat = [optree.tree_flatten(value, none_is_leaf=True) for value in found]
    split_by_keys([(spec, *map(_kind, leaves)) for leaves, spec in flat])
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [
        levels.sampled_below(level, torch.stack, column) if isinstance(column[0], Tensor) else column[0]
        for column in columns
    ]
    return optree.tree_unflatten(flat[0][1], joined)


def _kind(leaf: Any) -> Any:
    """What results of two samples must have in common to be one."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str, torch.dtype, torch.device)):
        return type(leaf), repr(leaf)  # NaN equals NaN
    raise NeedsLoop(f"an op gives a {type(leaf).__name__}, which cannot be one for all samples")
