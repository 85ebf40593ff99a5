"""Python values that `fn` asks of batched tensors: answered where all samples agree, else the batch is split."""

import os
import sys
import types
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..factors import assumptions
from ..torch_ import checkpoints, levels, tracing
from ..torch_.storage import unfolded
from .signals import NeedsLoop, Rerun, split_by_rows

if TYPE_CHECKING:
    from .mode import Mode, TorchCall

_TRUTHS = (torch.Tensor.__bool__, torch.is_nonzero)
_ENGINE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def answer(mode: "Mode", call: "TorchCall") -> Any:
    """A Python value from a batched tensor, where all samples give the same."""
    t = call.args[0]
    if not mode.is_innermost or not levels.is_batched(t, mode.level):
        return answer_for_all(call) if assumptions.are_noted() and not levels.is_transformed(t) else call.run()
    rows = levels.lower(t, mode.n, mode.level).detach()
    if assumptions.are_noted():
        return _answer_to_stay(mode, call, rows)
    return _answer(mode, call, rows)


def _answer_to_stay(mode: "Mode", call: "TorchCall", rows: Tensor) -> Any:
    """An answer while ops are recorded: the graph is good for samples that give the same one."""
    with tracing.unrecorded():
        found, value = _answer(mode, call, rows), rows[:1].clone()
    _assume(call.func, rows, found, value)
    return found


def answer_for_all(call: "TorchCall") -> Any:
    """An answer of a tensor that all samples share, while ops are recorded."""
    t = call.args[0].detach()
    with tracing.unrecorded():
        found, value = call.run(), t.clone()
    _assume(call.func, t, found, value)
    return found


def number_of(t: Tensor) -> Any:
    """What item() gives, while ops are recorded, where no mode sees it: inside an autograd Function, say."""
    with tracing.unrecorded():
        found, value = t.item(), t.clone()
    _assume(Tensor.item, t, found, value)
    return found


def _assume(func: Any, t: Tensor, found: Any, value: Tensor) -> None:
    """Note the assumption that `t` gives the answer `found` again, or has this `value` again."""
    if func in _TRUTHS:
        assumptions.assume((t != 0) == found)
    elif t.is_floating_point():  # 0.0 and -0.0 are two answers
        assumptions.assume(((t == value) & (t.signbit() == value.signbit())) | (t.isnan() & value.isnan()))
    else:
        assumptions.assume(t == value)


def _answer(mode: "Mode", call: "TorchCall", rows: Tensor) -> Any:
    func, flat = call.func, rows.reshape(mode.n, -1)
    if func in _TRUTHS:
        split_by_rows(flat != 0)
    elif func is torch.Tensor.__int__ and flat.is_floating_point():
        split_by_rows(flat.trunc())
    else:
        split_by_rows(flat)
        if flat.is_floating_point() and bool((flat == 0).any()):
            split_by_rows(flat.signbit())  # 0.0 and -0.0 are two answers
    return func(rows[0], *call.args[1:], **call.kwargs)


def requires_grad(mode: "Mode", t: Tensor) -> Any:
    """What autograd follows, which vmap hides; torch's own code is told what it would see without us."""
    frame = _asking()
    if checkpoints.runs_in(frame) or levels.runs_in(frame):  # torch's own code means the tensor as it sees it
        return NotImplemented
    found = levels.lower(t, mode.n, mode.level).requires_grad
    if mode.pretended and not found:
        raise NeedsLoop("fn asks whether a tensor requires grad after it has called requires_grad_()")
    return found


def _asking() -> types.FrameType:
    """The frame that called a torch function."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_ENGINE) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def pretend_requires_grad(mode: "Mode", t: Tensor, requires_grad: bool = True) -> bool:
    """Whether `t` can be said to require grad: for torch's checkpoints, models say so of activations.

    No graph starts there. Nobody notices: torch.autograd refuses a batched tensor, and then the loop runs.
    """
    if not requires_grad or not mode.is_innermost or not levels.is_batched(t, mode.level):
        return False
    mode.pretended = mode.pretended or not levels.lower(t, mode.n, mode.level).requires_grad
    return True


def graph_of(mode: "Mode", call: "TorchCall") -> Any:
    """`is_leaf` or `grad_fn`: what autograd follows, which vmap hides."""
    rows = levels.lower(call.args[0], mode.n, mode.level)
    found = call.func(rows)
    if found is None or isinstance(found, bool):
        return found
    base = unfolded(rows)
    return GraphNode(mode, found) if base is None else GraphNode(mode, base.grad_fn, rows.shape)


class GraphNode:
    """What `fn` gets for the `grad_fn` of a batched tensor: the graph of the batch is not that of a sample."""

    def __init__(self, mode: "Mode", node: Any, shape: Sequence[int] | None = None) -> None:
        self._mode, self._node = mode, node
        self._shape = shape  # of the gradients that `fn` sees, where the node is of a tensor of another shape

    def register_prehook(self, hook: Any) -> Any:
        """A hook on the gradient of the output, which sees one sample's after the other."""
        mode = self._mode
        if mode.deferred.edges:  # their gradients are taken before such a hook would change them
            mode.signal = Rerun("save_memory")
            raise mode.signal
        mode.has_hooks = True
        return self._node.register_prehook(_SampleHook(hook, mode.n, self._shape))

    def __getattr__(self, name: str) -> Any:
        self._mode.signal = NeedsLoop(f"fn uses grad_fn.{name}")
        raise self._mode.signal

    def __repr__(self) -> str:
        self._mode.signal = NeedsLoop("fn shows grad_fn")
        raise self._mode.signal


class _SampleHook(NamedTuple):
    """A hook on gradients, called for one sample at a time."""

    hook: Any
    n: int
    shape: Sequence[int] | None

    def __call__(self, grads: tuple[Tensor | None, ...]) -> Any:
        if self.shape is None:
            return self._of_samples(grads)
        (given,) = grads
        if given is None:
            return None
        found = self._of_samples((given.reshape(self.shape),))
        return None if found is None else (found[0].reshape(given.shape),)

    def _of_samples(self, grads: tuple[Tensor | None, ...]) -> Any:
        rows = [self.hook(tuple(None if g is None else g[i] for g in grads)) for i in range(self.n)]
        if all(row is None for row in rows):
            return None
        own = [[None if g is None else g[i] for g in grads] if row is None else row for i, row in enumerate(rows)]
        return tuple(None if column[0] is None else torch.stack(column) for column in zip(*own, strict=True))
