"""How a run of `fn` ends early, and what is to be done instead. Not for `fn` to catch, so no Exceptions."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..torch_.functions import ANSWERS, READS, reads_values


class Signal(BaseException):
    """The run cannot go on as it is."""


class Diverged(Signal):
    """Samples want different answers: `groups` are the rows that agree."""

    def __init__(self, groups: list[Tensor]) -> None:
        self.groups = groups


class SampleWritten(Signal):
    """`fn` is about to change its sample in place: let it have a copy."""


class Rerun(Signal):
    """`fn` is to run once more, with an option of the run switched on."""

    def __init__(self, option: str) -> None:
        self.option = option


class NeedsLoop(Signal):
    """Samples have to run one by one, for the whole call."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Unrecordable(Signal):
    """The ops of this call cannot be recorded as a graph that is good for other values."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class NoReads(TorchFunctionMode):
    """Around a function of the user's that is recorded outside of `Mode`: where it reads values, it cannot be."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ANSWERS or (func in READS and reads_values(func, args, kwargs or {})):
            raise Unrecordable(f"a function of the norms reads numbers by {getattr(func, '__name__', func)}")
        return func(*args, **(kwargs or {}))


def split_by_rows(rows: Tensor) -> None:
    """Raise Diverged where the rows (N, ...) are not all equal."""
    if not bool(((rows == rows[:1]) | (rows.isnan() & rows[:1].isnan())).all()):
        group = torch.unique(rows, dim=0, return_inverse=True)[1]
        groups = [(group == k).nonzero().flatten() for k in range(int(group.max()) + 1)]
        if len(groups) > 1:
            raise Diverged(groups)


def split_by_keys(keys: list[Any]) -> None:
    """Raise Diverged where the keys of the samples are not all equal."""
    kinds = list(dict.fromkeys(keys))
    if len(kinds) > 1:
        raise Diverged([torch.tensor([i for i, key in enumerate(keys) if key == kind]) for kind in kinds])
