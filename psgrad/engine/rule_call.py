"""A rule at work, one level below vmap: the op runs once for all samples, its backward yields factors.

Two ways, the same numbers. A small call of a `native` rule is left to ordinary autograd, which is asked for the
cotangent of the output (`Tape`). Any other runs inside an autograd Function of ours, which lets go of each cotangent
as the backward goes on, and costs 0.05 ms more.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..factors import costs as _plan
from ..registry.params import Param
from ..registry.plugin import Guarded
from ..registry.rule import Needs, Rule
from ..torch_ import autograd
from ..torch_.checkpoints import saved_tensor_hooks
from ..torch_.storage import base_of, is_view, version_of, versions_of
from .collectors import Collector


class Use(NamedTuple):
    """One op's use of parameters, for `explain`."""

    params: tuple[Param, ...]
    op: str
    place: str
    rule: str | None  # None: plain vmap
    reason: str  # why no rule


class Applied:
    """A call of a rule, but for its input."""

    __slots__ = ("constants", "is_complex", "options", "params", "rule", "sink", "tracked", "use", "values")

    def __init__(self, rule: Rule, options: Any, params: tuple[Any, ...], sink: Collector) -> None:
        self.rule, self.options, self.params, self.sink = rule, options, params, sink
        values, constants, tracked = [], [], []
        self.is_complex = False  # of complex numbers, for which no rule is written
        for p in params:  # one loop, not three comprehensions: this runs for every use of a parameter
            ours = type(p) is Param
            if ours:
                p = p.value
            elif p is not None:
                constants.append(p)
            values.append(p)
            tracked.append(ours)
            if p is not None and p.dtype.is_complex:
                self.is_complex = True
        self.values: list[Any] = values
        self.constants: list[Tensor] = constants  # `fn` might change them
        self.tracked = tuple(tracked)  # which are ours to differentiate
        self.use: Use | None = None

    @property
    def versions(self) -> list[int]:
        """How often the constants have been written to."""
        return versions_of(self.constants) if self.constants else []

    def refuse_changes(self) -> None:
        raise RuntimeError(f"an operand of {self.rule.name} was changed in place before its backward")

    def backward(self, g: Tensor, x: Tensor, values: list[Any], saved: Any, need_x: bool) -> Tensor | None:
        """The gradient of the input; factors go to the sink, without a graph."""
        if autograd.is_autocasting() and torch.is_autocast_enabled(device := g.device.type):
            with torch.autocast(device, enabled=False):
                return self.backward(g, x, values, saved, need_x)
        if x.requires_grad:
            x = x.detach()
        rule, options, tracked = self.rule, self.options, self.tracked
        apart = need_x and rule.native and True in tracked  # one after the other: less is held at once
        gx, factors = rule.backward(options, g, x, values, saved, Needs(need_x and not apart, tracked))
        # the kernel for the input's gradient lays it out anew, so where it is large it comes before anything is kept
        first = apart and x.nbytes > sum([f.bytes()[1] for f in factors if f is not None])
        if first:
            gx = self._of_input(g, x, values, saved)
        for param, factor in zip(self.params, factors, strict=True):
            if factor is not None and type(param) is Param:
                try:
                    self.sink.add(param, factor, self.use)
                except Exception as error:
                    if type(options) is Guarded:
                        options.blame(error)
                    raise
        if apart and not first:
            del factors, factor
            gx = self._of_input(g, x, values, saved)
        return gx

    def _of_input(self, g: Tensor, x: Tensor, values: list[Any], saved: Any) -> Tensor | None:
        needs = Needs(True, (False,) * len(self.tracked))
        return self.rule.backward(self.options, g, x, values, saved, needs)[0]


class Tape:
    """The small calls of one run, each followed by ordinary autograd; their cotangents are held till the end."""

    def __init__(self, frugal: bool) -> None:
        self.frugal = frugal  # takes no call
        self.held = 0  # bytes of these cotangents
        self.edges: list[GradientEdge] = []  # where the outputs were made: `fn` may change them in place later
        self.calls: list[tuple[Applied, Tensor, int, Any, torch.Size | None]] = []

    def takes(self, rule: Rule, x: Tensor) -> bool:
        small = rule.native and x.nbytes <= _plan.SMALL and self.held <= _plan.SMALL_TOTAL
        return small and not self.frugal and saved_tensor_hooks() is None

    def run(self, applied: Applied, x: Tensor) -> Tensor:
        """The output of a call."""
        values, ours = applied.values, True in applied.tracked
        if ours and not x.requires_grad:  # something has to; its own gradient is never asked for
            first = applied.tracked.index(True)
            values = [*values[:first], values[first].detach().requires_grad_(), *values[first + 1 :]]
        y: Tensor = applied.rule.forward(applied.options, x, *values)[0]
        if ours and y.requires_grad:
            made, shape = y, None
            if is_view(y):  # where `fn` changes it in place, the gradient passes by a view's own edge
                base = base_of(y)
                assert base is not None
                if y.numel() == base.numel() and y.is_contiguous() and base.is_contiguous():
                    made, shape = base, y.shape  # the same numbers in the same order
                else:
                    made = y = y.clone()
            node = made.grad_fn
            assert node is not None
            self.edges.append(GradientEdge(node, made.output_nr))
            self.calls.append((applied, x, version_of(x), applied.versions, shape))
            self.held += y.nbytes
        return y

    def backward(self, cotangents: Sequence[Tensor | None]) -> None:
        """The factors of all calls, from the gradients at `edges`; the last call first, as the backward met them."""
        for (applied, x, version, versions, shape), g in zip(reversed(self.calls), reversed(cotangents), strict=True):
            if g is not None:
                if (version_of(x) != version and applied.rule.keeps_input) or applied.versions != versions:
                    applied.refuse_changes()
                applied.backward(g if shape is None else g.reshape(shape), x, applied.values, (), False)


class _Apply(torch.autograd.Function):
    """A rule on (N, ...) tensors in ordinary autograd: factors go to the sink, never through the graph.

    `anchor` is what makes the output require a gradient where the input does not.
    """

    @staticmethod
    def forward(ctx: Any, applied: Applied, dtype: torch.dtype | None, x: Tensor, anchor: Any) -> Any:
        rule, values = applied.rule, applied.values
        if dtype is not None:
            values = [None if v is None else v.to(dtype) for v in values]
        y, saved = rule.forward(applied.options, x, *values)
        ctx.save_for_backward(x if rule.keeps_input else x.new_empty(1).expand(x.shape), *saved)
        ctx.applied, ctx.values, ctx.versions = applied, values, applied.versions
        return y.data if is_view(y) else y  # a view made in here could not be changed in place by `fn`

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        applied = ctx.applied
        x, *saved = ctx.saved_tensors
        if applied.versions != ctx.versions:
            applied.refuse_changes()
        return None, None, applied.backward(g, x, ctx.values, saved, ctx.needs_input_grad[2]), None


_apply = autograd.direct_apply(_Apply)


def apply(applied: Applied, tape: Tape, anchor: Tensor | None, x: Tensor) -> Tensor:
    """The rule's output (N, ...) for the input (N, ...)."""
    if not autograd.is_autocasting() or not torch.is_autocast_enabled(x.device.type):
        if tape.takes(applied.rule, x):
            return tape.run(applied, x)
        return _apply(applied, None, x, anchor if True in applied.tracked else None)  # type: ignore[no-any-return]
    device, dtype, kind = x.device.type, None, applied.rule.autocast
    if kind.endswith(" off the CPU"):
        kind = "keep" if device == "cpu" else kind.removesuffix(" off the CPU")
    if kind == "lower" and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x = x.to(dtype)
    elif kind == "float32" and x.dtype != torch.float64:
        x = x.float()
    with torch.autocast(device, enabled=False):
        y: Tensor = _apply(applied, dtype, x, anchor if True in applied.tracked else None)
    return y
