"""A rule at work, one level below vmap: the op runs once for all samples, its backward yields factors.

Two ways, the same numbers. A small call of a `native` rule is left to ordinary autograd, which is asked for the
cotangent of the output (`DeferredCalls`). Any other runs inside an autograd Function of ours, which lets go of each
cotangent as the backward goes on, and costs 0.05 ms more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..errors import PsgradError
from ..factors import costs
from ..registry.params import Param
from ..registry.plugin import Guarded
from ..registry.rule import BatchFold, Call, Composite, Decline, Entry, Needs, Rule
from ..torch_ import autograd, levels, parts
from ..torch_.checkpoints import saved_tensor_hooks
from ..torch_.storage import base_of, is_view, version_of
from .collectors import Collector
from .inside import LinearMap
from .of_params import run_once

if TYPE_CHECKING:
    from .mode import Mode, Operands


class UseRecord(NamedTuple):
    """One op's use of parameters, for `explain`."""

    params: tuple[Param, ...]
    op: str
    place: str
    rule: str | None  # None: plain vmap
    reason: str  # why no rule


class BoundRule:
    """A call of a rule, but for its input."""

    __slots__ = ("collector", "constants", "is_complex", "options", "params", "rule", "tracked", "use", "values")

    def __init__(self, rule: Rule, options: Any, params: tuple[Any, ...], collector: Collector) -> None:
        self.rule, self.options, self.params, self.collector = rule, options, params, collector
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
        self.use: UseRecord | None = None

    def replace(self, constant: Tensor, lowered: Tensor) -> None:
        """Integers that differ between samples, as the (N, ...) tensor behind them."""
        self.values = [lowered if v is constant else v for v in self.values]
        self.constants = [lowered if v is constant else v for v in self.constants]

    def refuse_changes(self) -> None:
        raise RuntimeError(f"an operand of {self.rule.name} was changed in place before its backward")

    def backward(self, g: Tensor, x: Tensor, values: list[Any], saved: Any, need_x: bool) -> Tensor | None:
        """The gradient of the input; factors go to the collector, without a graph."""
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
                    self.collector.add(param, factor, self.use)
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


@dataclass(eq=False, slots=True)
class DeferredCalls:
    """The small calls of one run, each followed by ordinary autograd; their cotangents are held till the end."""

    save_memory: bool  # takes no call
    held: int = 0  # bytes of these cotangents
    edges: list[GradientEdge] = field(default_factory=list)  # of the outputs as made: `fn` may change them in place
    calls: list[tuple[BoundRule, Tensor, int, list[int], torch.Size | None]] = field(default_factory=list)

    def run(self, bound: BoundRule, x: Tensor) -> Tensor | None:
        """The output of a call that is small enough to be added; None: it is not."""
        if self.save_memory or not bound.rule.native or x.nbytes > costs.SMALL:
            return None
        if self.held > costs.SMALL_TOTAL or saved_tensor_hooks() is not None:
            return None
        values, ours = bound.values, True in bound.tracked
        if ours and not x.requires_grad:  # the output needs a grad_fn: of this parameter no gradient is ever asked for
            first = bound.tracked.index(True)
            values = [*values[:first], values[first].detach().requires_grad_(), *values[first + 1 :]]
        y: Tensor = bound.rule.forward(bound.options, x, *values)[0]
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
            versions = list(map(version_of, bound.constants)) if bound.constants else []
            self.calls.append((bound, x, version_of(x), versions, shape))
            self.held += y.nbytes
        return y

    def backward(self, cotangents: Sequence[Tensor | None]) -> None:
        """The factors of all calls, from the gradients at `edges`; the last call first, as the backward met them."""
        for (bound, x, version, versions, shape), g in zip(reversed(self.calls), reversed(cotangents), strict=True):
            if g is not None:
                if version_of(x) != version and bound.rule.keeps_input:
                    bound.refuse_changes()
                if versions and versions != list(map(version_of, bound.constants)):
                    bound.refuse_changes()
                bound.backward(g if shape is None else g.reshape(shape), x, bound.values, (), False)


class _Apply(torch.autograd.Function):
    """A rule on (N, ...) tensors in ordinary autograd: factors go to the collector, never through the graph.

    `anchor` is what makes the output require a gradient where the input does not.
    """

    @staticmethod
    def forward(ctx: Any, bound: BoundRule, dtype: torch.dtype | None, x: Tensor, anchor: Any) -> Any:
        rule, values = bound.rule, bound.values
        if dtype is not None:
            values = [None if v is None else v.to(dtype) for v in values]
        y, saved = rule.forward(bound.options, x, *values)
        ctx.save_for_backward(x if rule.keeps_input else x.new_empty(1).expand(x.shape), *saved)
        ctx.bound, ctx.values = bound, values
        ctx.versions = list(map(version_of, bound.constants)) if bound.constants else []
        return y.data if is_view(y) else y  # a view made in here could not be changed in place by `fn`

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        bound = ctx.bound
        x, *saved = ctx.saved_tensors
        if ctx.versions and ctx.versions != list(map(version_of, bound.constants)):
            bound.refuse_changes()
        return None, None, bound.backward(g, x, ctx.values, saved, ctx.needs_input_grad[2]), None


_apply = autograd.direct_apply(_Apply)


def _autocast(bound: BoundRule, anchor: Tensor | None, x: Tensor) -> Tensor:
    """The rule's output (N, ...) for the input (N, ...), in the dtype that autocast gives the op."""
    device, dtype, kind = x.device.type, None, bound.rule.autocast
    if kind.endswith(" off the CPU"):
        kind = "keep" if device == "cpu" else kind.removesuffix(" off the CPU")
    if kind == "lower" and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        x = x.to(dtype)
    elif kind == "float32" and x.dtype != torch.float64:
        x = x.float()
    with torch.autocast(device, enabled=False):
        y: Tensor = _apply(bound, dtype, x, anchor if True in bound.tracked else None)
    return y


# ---- a call of a function that has a rule ----------------------------------------------------------------


def run_rule(mode: "Mode", rule: Entry, func: Any, args: Any, kwargs: Any, operands: "Operands") -> Any:
    """The rule's way with a call, or vmap's where the rule does not fit."""
    given, params, samples, _ = operands
    if not params:
        plain = isinstance(rule, Rule) and rule.only_params  # as good without parameters
        if plain or not samples:
            return func(*args, **kwargs)
    if isinstance(rule, Composite):
        with mode:  # its parts come to the mode again
            return rule.run(*args, **kwargs)
    if levels.current_level() != mode.level:
        return _run_inside(mode, rule, func, args, kwargs, operands)
    if isinstance(rule, BatchFold):
        return _run_folded(mode, rule, func, args, kwargs, params)
    if not samples and rule.only_params:  # a weight is made of weights: none of them meets a sample
        if mode.options.of_params_per_sample:
            why = "a function of parameters is changed in place"
            return mode.left_to_vmap(func, args, kwargs, params, why)
        return run_once(mode, func, args, kwargs, params)
    try:
        if kwargs:
            named = dict(zip(kwargs, given[len(args) :], strict=True))
            call = rule.bind(*given[: len(args)], **named)
        else:
            call = rule.bind(*given)
    except PsgradError:
        raise
    except TypeError:  # a wrong call: torch's own message is the better one
        return func(*args, **kwargs)
    if isinstance(call, Decline):
        return mode.left_to_vmap(func, args, kwargs, params, call.reason)
    return _run_call(mode, rule, call, func, args, kwargs, operands)


def _run_call(mode: "Mode", rule: Rule, call: Call, func: Any, args: Any, kwargs: Any, operands: "Operands") -> Any:
    """A call that the rule has taken."""
    x, own, options, _, _, others = call
    _, params, samples, _ = operands
    bound = BoundRule(rule, options, own, mode.collector)
    if bound.is_complex or x.dtype.is_complex:
        return mode.left_to_vmap(func, args, kwargs, params, "complex numbers")
    of_params = not samples and not bound.constants and type(x) is Param
    if of_params and not mode.options.of_params_per_sample:
        return run_once(mode, func, args, kwargs, params)  # a standardised weight, say
    for constant in bound.constants:
        if levels.is_batched(constant, mode.level):
            if not rule.takes_integers or constant.is_floating_point():
                return mode.left_to_vmap(func, args, kwargs, params, "the weight differs between samples")
            bound.replace(constant, mode.lower(constant))
    if not mode.recomputing:
        for param in params:
            param.source.uses += 1
    if mode.log is not None:
        inputs = [p for p in others if isinstance(p, Param)]
        bound.use = mode.record(func, [p for p in params if p not in inputs], rule.name)
        mode.record(func, inputs, None, "an input of the op, not its weight")
    return levels.sampled_below(mode.level, _apply_bound, mode, call, bound, *map(mode.lower, (x, *others)))


def _apply_bound(mode: "Mode", call: Call, bound: BoundRule, x: Tensor, *others: Tensor | None) -> Tensor:
    """A rule's call on the plain (N, ...) input."""
    if call.before is not None:
        x = call.before(x, *others)
    if autograd.is_autocasting() and torch.is_autocast_enabled(x.device.type):
        y: Tensor | None = _autocast(bound, mode.anchor, x)
    else:
        y = mode.deferred.run(bound, x)
    if y is None:
        y = _apply(bound, None, x, mode.anchor if True in bound.tracked else None)
    return y if call.after is None else call.after(y, *others)


def _run_inside(mode: "Mode", rule: Entry, func: Any, args: Any, kwargs: Any, operands: "Operands") -> Any:
    """A call inside a transform of `fn`'s own, whose layers lie above ours."""
    params, why = operands.params, "inside another transform"
    if isinstance(rule, Rule) and not mode.options.of_params_per_sample and not mode.takes_part(args, kwargs):
        found = levels.at(mode.level, run_rule, mode, rule, func, args, kwargs, operands)
        return found if id(found) in mode.tracked else parts.raised(found, mode.level)
    if not isinstance(rule, Rule) or not rule.linear or not parts.are_known():
        return mode.left_to_vmap(func, args, kwargs, params, why)
    given, first = operands.resolved, len(args)
    named = dict(zip(kwargs, given[first:], strict=True))
    try:
        call = levels.at(mode.level, lambda: rule.bind(*given[:first], **named))  # views of parameters are plain there
    except TypeError:  # a wrong call: torch's own message is the better one
        return func(*args, **kwargs)
    if isinstance(call, Decline):
        return mode.left_to_vmap(func, args, kwargs, params, call.reason)
    weight, bias = call.params
    if type(weight) is not Param or type(call.x) is Param:
        return mode.left_to_vmap(func, args, kwargs, params, f"{why}, and the weight is no parameter")
    if isinstance(bias, Tensor) and levels.is_transformed(bias):
        return mode.left_to_vmap(func, args, kwargs, params, f"{why}, and the bias differs between samples")
    if call.is_complex or autograd.is_autocasting():
        return mode.left_to_vmap(func, args, kwargs, params, f"{why}, with complex numbers or autocast")
    return _run_parts(mode, rule, call, func, params)


def _run_parts(mode: "Mode", rule: Rule, call: Call, func: Any, params: list[Param]) -> Tensor:
    """A linear map of a tensor that has parts: each comes to the rule on its own."""
    others, (weight, bias) = [p for p in call.others if type(p) is Param], call.params
    use = mode.record(func, [p for p in params if p not in others], rule.name)
    mode.unruled(func, others, "an input of the op, not its weight")
    if not mode.recomputing:
        for param in params:
            param.source.uses += 2  # there may be a factor for each part

    def at_samples(weight: Param, bias: Any, x: Tensor) -> Tensor:
        bound = BoundRule(rule, call.options, (weight, bias), mode.collector)
        bound.use = use
        return _apply_bound(mode, Call(x, bound.params), bound, x)

    def constant(weight: Param, bias: Any, x: Tensor) -> Tensor:
        y: Tensor = rule.forward(call.options, x, weight.value, bias.value if type(bias) is Param else bias)[0]
        return y

    tensors = [call.x, *[p.wrapped if type(p) is Param else p for p in call.others]]
    x: Any
    x, *rest = [None if t is None else t[None] for t in tensors]  # `before` and `after` expect an axis for samples
    turned = levels.at(mode.level, weight.view, lambda t: t.mT)
    linear = LinearMap(weight, turned, bias, at_samples, constant, mode.n, mode.level)
    y = linear(x if call.before is None else call.before(x, *rest))
    return (y if call.after is None else call.after(y, *rest))[0]


def _run_folded(mode: "Mode", rule: BatchFold, func: Any, args: Any, kwargs: Any, params: list[Param]) -> Any:
    """An op without parameters, with the sample axis folded into its own batch axis."""
    try:
        bound = rule.bind(mode.randomness, *args, **kwargs)
    except TypeError:  # a wrong call: torch's own message is the better one
        return func(*args, **kwargs)
    if isinstance(bound, Decline):
        return mode.left_to_vmap(func, args, kwargs, params, bound.reason)
    if params:
        mode.unruled(func, params, "folded into the batch; no rule for a parameter here")
    tensors, options = bound
    return levels.sampled_below(mode.level, rule.run, options, *map(mode.lower, tensors))


def ask_op(mode: "Mode", func: Any, args: Any, kwargs: Any) -> None:
    """Raise what `func` itself says of a call at which a rule failed: then the call is wrong, not the rule.

    Sample by sample, without vmap, which may have reasons of its own to refuse.
    """
    if not mode.is_innermost:
        return

    def one(value: Any, i: int) -> Any:
        if type(value) in (list, tuple):
            return type(value)([one(v, i) for v in value])
        return levels.lower(value, mode.n, mode.level)[i].detach().clone() if isinstance(value, Tensor) else value

    def ask() -> None:
        for i in range(mode.n):
            func(*[one(a, i) for a in args], **{k: one(v, i) for k, v in kwargs.items()})

    try:
        with torch.no_grad():
            levels.below(ask)
    except Exception as error:
        mode.settled = error
        raise error from None
