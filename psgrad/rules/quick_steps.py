"""The loops of `steps` in C++, for compiled code: there a step is a product and one pass, and not a dozen small ops.

They are in `quick_steps.cpp`. What they are not for (projections, half precision, tensors with gaps) runs as in eager
calls.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_ import cpp, tracing
from . import steps


class Loop(NamedTuple):
    """A loop in C++: its name there, what it does, how many tensors it takes, and the likes of those that it makes."""

    name: str
    written: Callable[..., Any]
    takes: int
    likes: Callable[..., tuple[Tensor, ...]]

    def run(self, *args: Any) -> Any:
        given = [t for t in args if isinstance(t, Tensor)]
        has_values = not (tracing.is_faking() or given[0].is_meta)  # else somebody asks for sizes
        if has_values and not self._is_for(given):
            return self.written(*args)
        made = [torch.empty_like(t) for t in self.likes(*args)]
        if has_values:
            length, (_, rows, _), width = (
                len(made[0]) if made else len(given[0]) - 1,
                given[0].shape,
                given[-1].shape[1],
            )
            *_, relu, reverse = [False, *(flag for flag in args if isinstance(flag, bool))]
            sizes = length, rows, width, torch.get_num_threads(), reverse, relu
            cpp.call(_library(), self.name, [*given, *made], sizes)
        return tuple(made) if len(made) > 1 else made[0] if made else None

    def _is_for(self, given: list[Tensor]) -> bool:
        return (
            len(given) == self.takes
            and given[0].dtype in cpp.DTYPES
            and all(t.dtype is given[0].dtype and t.is_cpu and t.is_contiguous() for t in given)
        )


@cache
def _library() -> Any:
    return cpp.library(Path(__file__).with_suffix(".cpp").read_text())


def can_run() -> bool:
    """Whether the compiler can make the loops; the first time on a machine that takes it some seconds."""
    return _library() is not None


LOOPS = (
    Loop("lstm", steps.lstm, 4, lambda gates, h, c, *_: (c[1:], c[1:])),
    Loop("lstm_back", steps.lstm_back, 7, lambda dh, dc, gates, *_: (gates,)),
    Loop("gru", steps.gru, 4, lambda gates, h, inner, *_: (inner,)),
    Loop("gru_back", steps.gru_back, 6, lambda dh, gates, *_: (gates, gates)),
    Loop("rnn", steps.rnn, 2, lambda *_: ()),
    Loop("rnn_back", steps.rnn_back, 3, lambda *_: ()),
)
