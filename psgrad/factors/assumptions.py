"""Assumptions: what is decided by a look at values, while ops are recorded and nobody may branch on them.

A recorded graph is good for other values than those it was recorded with only where every decision on the way would be
the same again. So each decision leaves a condition behind: a boolean tensor that the graph returns. Whoever runs the
graph looks at all of them together, once, and throws the answer away where one does not hold.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..torch_ import tracing


class _Thread(threading.local):
    conditions: list[Tensor] | None = None  # None: nobody would look at them
    doubts: list[Tensor] | None = None  # None: whoever doubts looks at once


_thread = _Thread()


@contextmanager
def noted() -> Iterator[list[Tensor]]:
    """Inside, conditions are noted in the list."""
    before, _thread.conditions = _thread.conditions, []
    try:
        yield _thread.conditions
    finally:
        _thread.conditions = before


@contextmanager
def apart() -> Iterator[None]:
    """Inside, nothing is recorded and nothing is noted: for work of our own, such as the planner's."""
    before, _thread.conditions = _thread.conditions, None
    try:
        with tracing.unrecorded():
            yield
    finally:
        _thread.conditions = before


# ---- eager calls: looks that wait for one another ----------------------------------------------------------

LOOKS_AT_ONCE = frozenset({"cpu", "meta"})  # devices whose numbers are there when they are asked for


def waits(t: Tensor) -> bool:
    """Whether a look at `t` makes the host wait for its device: then all looks of a call are better one."""
    return t.device.type not in LOOKS_AT_ONCE and not tracing.is_recorded()


@contextmanager
def doubted() -> Iterator[list[Tensor]]:
    """Inside, what is doubted is noted in the list in place of a look; whoever asks looks at all of it, once."""
    before, _thread.doubts = _thread.doubts, []
    try:
        yield _thread.doubts
    finally:
        _thread.doubts = before


def doubt(condition: Callable[[], Tensor]) -> bool:
    """Whether somebody will look at `condition`, booleans, later: until then it counts as true."""
    if _thread.doubts is None:
        return False
    _thread.doubts.append(condition().all())
    return True


def are_looks() -> bool:
    """Whether whoever wants to know looks at once: nothing is recorded, and no look waits for others."""
    return _thread.conditions is None and _thread.doubts is None and not tracing.is_recorded()


def hold(conditions: list[Tensor]) -> bool:
    """One look at all conditions."""
    return not conditions or bool(torch.stack([c.to(conditions[0].device) for c in conditions]).all())


# ---- graphs --------------------------------------------------------------------------------------------------


def are_noted() -> bool:
    """Whether somebody will look at the conditions of this run: then `assume` may be called."""
    return _thread.conditions is not None


def are_for_others() -> bool:
    """Whether the ops of this run are to serve other values, too: a graph of ours, or a part of somebody's."""
    return _thread.conditions is not None or tracing.is_captured()


def assume(condition: Tensor) -> None:
    """What follows is right only where `condition`, booleans, is true."""
    assert _thread.conditions is not None, "nobody notes assumptions; please report this"
    _thread.conditions.append(condition if condition.dim() == 0 else condition.all())


def assume_no_zero_met_nan(weights: Tensor, total: Tensor) -> None:
    """A sample of weight 0 is to leave no trace in a weighted sum, but 0 times a number that is not finite is NaN."""
    assume((weights != 0).all() | total.sum().isfinite())


def decide(condition: Callable[[], Tensor]) -> bool:
    """Whether a boolean tensor is true: by a look, and while ops are recorded on the assumption that it stays so."""
    if not are_noted():
        return bool(condition())
    with tracing.unrecorded():
        found = bool(condition())
    stays = condition()
    assume(stays if found else stays.logical_not())
    return found
