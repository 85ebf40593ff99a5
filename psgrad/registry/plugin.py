"""Rules of others in the table: which keys they go by, and checks that they keep what a rule promises.

A rule that fails must not end in the loop over samples, which would answer exactly and hide the fault. So a rule that
comes through `psgrad.extend.register` stands in the table behind a guard: what it raises, and what it returns that does
not fit, is a `RuleError`. The rules of this package have no guard and pay nothing for it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentTypeError, PsgradError, RuleError, Spot, is_out_of_memory, name_of, spot
from ..factors.base import Factor
from ..torch_ import operators, tracing
from ..torch_.watching import FunctionCall
from .params import Param
from .rule import REDIRECTS, RULES, BatchFold, Call, Composite, Decline, Entry, Needs, Rule

_MEND = "mend the rule, or let its bind return Decline(reason) for such a call: plain vmap does it, exactly."
_SEQUENCES, _OPERANDS = (tuple, list), (Tensor, Param)
_ONE_GRADIENT = "its backward must yield one gradient per sample: mend the rule."


# ---- what the table is asked for ------------------------------------------------------------------------------------


def _overload(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A call of an op that may have several overloads: torch says which one the arguments mean."""
    try:
        found = operators.overload_of(func, args, kwargs)
    except RuntimeError:  # none of them: torch's own message is the better one
        found = func
    return found, found, args


_REGISTERED: dict[Any, Entry] = {}  # rules as they were given, by their keys in the table
_SHADOWED: dict[Any, Entry] = {}  # rules of this package that others stand in for


def _keys(function: Any) -> list[Any]:
    """What the table has to hold so that every way to call `function` meets its rule."""
    if isinstance(function, operators.Overload):
        return [function]
    if isinstance(function, operators.Packet):
        return [getattr(function, name) for name in function.overloads()]
    if isinstance(function, operators.CustomOp):
        return [operators.overload_of_custom_op(function)]
    owner = getattr(function, "__self__", None) if getattr(function, "__name__", "") == "apply" else function
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return [FunctionCall(owner)]
    if isinstance(function, type) or not callable(function):
        what = f"the class {function.__name__}" if isinstance(function, type) else f"a {type(function).__name__}"
        raise ArgumentTypeError(
            f"a rule is for functions that torch lets a mode see, not for {what}\n"
            "  give torch functions, ops of torch.ops or torch.library.custom_op, or autograd Functions."
        )
    return [function]


def register(rule: Entry) -> Entry:
    """Put `rule` in the table for each of its functions; a later registration replaces an earlier one.

    >>> from psgrad.extend import Call, Dense, Rule, register, unregister
    >>> bind = lambda x, w: Call(x, (w,))
    >>> forward = lambda options, x, w: (torch.hypot(x, w), ())
    >>> def backward(options, g, x, params, saved, needs):
    ...     return None, [Dense(torch.ones(len(x), 2))]  # there is one number in w
    >>> rule = register(Rule("hypot", (torch.hypot,), bind, forward, backward))
    >>> psgrad.per_sample_norms(lambda w, x: torch.hypot(x, w).sum(), torch.ones(1), torch.ones(4, 5))
    Traceback (most recent call last):
        ...
    psgrad.RuleError: the backward of rule 'hypot' for torch.hypot yields (4, 2) gradients for params, not (4, 1)
      called at <doctest psgrad.registry.plugin.register[5]>:1 in <lambda>
      its backward must yield one gradient per sample: mend the rule.
    >>> unregister(rule)

    A rule that raises, or that returns what does not fit, is an error that names it, and never hides behind the loop
    over samples. Where the op itself refuses the call, its own error stands.

    Args:
        rule: a `Rule`, `Fold` or `Composite`. Its functions may be torch functions; ops made with
            `torch.library.custom_op`, or found in `torch.ops`, with all or one of their overloads, however they are
            called; autograd Functions, by the class or by its `apply`. Functions of your own reach a rule where they
            call `torch.overrides.handle_torch_function`.

    Returns:
        `rule`, for `unregister`.

    Raises:
        ArgumentTypeError: it is no rule, or one of its functions is nothing that a rule can be for.
    """
    if not isinstance(rule, Rule | BatchFold | Composite):
        raise ArgumentTypeError(
            f"register takes a Rule, a Fold or a Composite, not a {type(rule).__name__}\n  make one of psgrad.extend's."
        )
    if not isinstance(rule.functions, _SEQUENCES):
        raise ArgumentTypeError(
            f"the functions of rule {rule.name!r} are a {type(rule.functions).__name__}, not a tuple\n"
            "  give a tuple of them, also where there is one."
        )
    for key in [key for function in rule.functions for key in _keys(function)]:
        if key in RULES and key not in _REGISTERED:
            _SHADOWED[key] = RULES[key]
        RULES[key], _REGISTERED[key] = _guarded(rule, key), rule
        if isinstance(key, operators.Overload):
            REDIRECTS[operators.packet_of(key)] = _overload
    return rule


def unregister(rule: Entry) -> None:
    """Take `rule` out of the table again; its functions go back to psgrad's own rule, or to plain vmap.

    >>> psgrad.extend.unregister(psgrad.extend.Composite("never registered", (torch.hypot,), torch.hypot))
    """
    for function in rule.functions:
        for key in _keys(function):
            if RULES.get(key) is rule or _REGISTERED.get(key) is rule:
                RULES.pop(key, None)
                _REGISTERED.pop(key, None)
                if key in _SHADOWED:
                    RULES[key] = _SHADOWED.pop(key)


# ---- guards ---------------------------------------------------------------------------------------------------------


class Guard(NamedTuple):
    """A rule of others at one of its functions: what it does wrong is said with both names."""

    rule: Entry
    op: str

    def fault(self, step: str, what: str, remedy: str = _MEND, where: Spot | None = None) -> RuleError:
        """The error for a step of the rule; without `where`, a step that runs where `fn` called the op."""
        return RuleError(
            f"the {step} of rule {self.rule.name!r} for {self.op} {what}\n  called at {where or spot()}\n  {remedy}"
        )

    def run(self, step: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`, a step of the rule; what it raises is the rule's fault."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            self.blame(error, step)
            raise

    def blame(self, error: Exception, step: str, where: Spot | None = None, faked: bool = False) -> None:
        """Raise RuleError for `error`, unless it is none of the rule's."""
        if isinstance(error, PsgradError) or is_out_of_memory(error):
            return
        if faked or tracing.is_faking():  # a rule may look at values, of which there are none: it runs again with some
            return
        said = str(error).strip()
        what = f"raised {type(error).__name__}" + (f": {said.splitlines()[0]}" if said else "")
        raise self.fault(step, what, where=where) from error


class Guarded(NamedTuple):
    """A call's options on their way through the engine, with what the backward, in whatever thread, cannot find out."""

    options: Any
    guard: Guard
    where: Spot
    faked: bool  # tensors have shapes and no values
    params: Sequence[Any]  # the call's
    reshaped: bool  # the call's `after` makes the output

    def name(self, i: int) -> str:
        """The path of parameter i of the call."""
        p = self.params[i]
        return p.source.name if isinstance(p, Param) else f"params[{i}] of the call"

    def fault(self, what: str, remedy: str) -> RuleError:
        """The error for what the backward returned."""
        return self.guard.fault("backward", what, remedy, self.where)

    def blame(self, error: Exception, step: str = "factor") -> None:
        """Raise RuleError for what the backward, or a factor of this call, raised."""
        self.guard.blame(error, step, self.where, self.faked)


def _guarded(rule: Entry, function: Any) -> Entry:
    """`rule` at `function`, checked."""
    guard = Guard(rule, name_of(function))
    if isinstance(rule, Rule):
        return replace(
            rule,
            bind=partial(_bind, guard, rule),
            forward=partial(_forward, rule),
            backward=partial(_backward, rule),
        )
    if isinstance(rule, BatchFold):
        return rule._replace(bind=partial(_bind_fold, guard, rule), run=partial(_run_fold, guard, rule))
    return rule._replace(run=partial(guard.run, "run", rule.run))


def _type(value: object) -> str:
    return "nothing (None)" if value is None else f"a {type(value).__name__}"


def _is_operand(value: object) -> bool:
    return value is None or isinstance(value, _OPERANDS)


def _params(values: Iterable[Any]) -> Iterator[Param]:
    """The parameters among arguments and lists of arguments."""
    for value in values:
        if isinstance(value, Param):
            yield value
        elif isinstance(value, _SEQUENCES):
            yield from _params(value)


def _bind(guard: Guard, rule: Rule, *args: Any, **kwargs: Any) -> Call | Decline:
    call = guard.run("bind", rule.bind, *args, **kwargs)
    if isinstance(call, Decline):
        return call
    if not isinstance(call, Call):
        raise guard.fault("bind", f"returned {_type(call)}", "return Call(x, params, options) or Decline(reason).")
    if call.x is None or not _is_operand(call.x):
        raise guard.fault("bind", f"says that the input is {_type(call.x)}", "x must be a tensor among the arguments.")
    for name, operands in (("params", call.params), ("others", call.others)):
        if not isinstance(operands, _SEQUENCES) or not all(map(_is_operand, operands)):
            raise guard.fault(
                "bind", f"returned {name} that are no tuple of tensors", "give a tuple; None may be in it."
            )
    sources = [p.source for p in _params((call.x, *call.params, *call.others))]
    for param in _params((*args, *kwargs.values())):
        if param.source not in sources:  # its gradient would be zero without a word
            raise guard.fault(
                "bind",
                f"leaves {param.source.name} out",
                "name it as x, in params or in others, or return Decline(reason).",
            )
    guarded = Guarded(call.options, guard, spot(), tracing.is_faking(), call.params, call.after is not None)
    before, after = call.before, call.after
    return call._replace(
        options=guarded,
        before=None if before is None else partial(guard.run, "call's before", before),
        after=None if after is None else partial(_after, guard, after),
    )


def _after(guard: Guard, after: Callable[..., Tensor], y: Tensor, *others: Tensor | None) -> Tensor:
    found = guard.run("call's after", after, y, *others)
    return _samples_first(guard, "call's after", found, len(y))


def _samples_first(guard: Guard, step: str, y: Any, n: int) -> Tensor:
    """`y` if it is a tensor with the sample axis in front."""
    if not isinstance(y, Tensor):
        raise guard.fault(step, f"gives {_type(y)} as the output", "the output must be a tensor: mend the rule.")
    if y.dim() == 0 or len(y) != n:
        raise guard.fault(
            step,
            f"gives an output of shape {tuple(y.shape)} for {n} samples",
            "the output must have the sample axis in front, as the input has: mend the rule.",
        )
    return y


def _forward(rule: Rule, guarded: Guarded, x: Tensor, *params: Tensor | None) -> tuple[Tensor, Any]:
    guard = guarded.guard
    found = guard.run("forward", rule.forward, guarded.options, x, *params)
    pair = isinstance(found, _SEQUENCES) and len(found) == 2
    if not pair or not isinstance(found[0], Tensor) or not isinstance(found[1], _SEQUENCES):
        shown = f"a tuple of {len(found)}" if isinstance(found, tuple) and not pair else _type(found)
        what = "a pair of something else" if pair else shown
        raise guard.fault(
            "forward", f"returned {what}", "return the output and a tuple of tensors for the backward, perhaps ()."
        )
    y, saved = found
    for i, t in enumerate(saved):
        if t is not None and not isinstance(t, Tensor):
            raise guard.fault(
                "forward",
                f"saves {_type(t)} at {i}",
                "only tensors are saved for the backward: put the rest in options.",
            )
    if not guarded.reshaped:
        _samples_first(guard, "forward", y, len(x))
    if (
        rule.native
        and torch.is_grad_enabled()
        and not y.requires_grad
        and any(t is not None and t.requires_grad for t in (x, *params))
    ):
        raise guard.fault(
            "forward",
            "gives an output without a graph",
            "torch must be able to differentiate the forward of a native rule: mend it, or drop native=True.",
        )
    return y, saved


def _backward(
    rule: Rule, guarded: Guarded, g: Tensor, x: Tensor, params: Sequence[Any], saved: Any, needs: Needs
) -> tuple[Tensor | None, Sequence[Factor | None]]:
    try:
        found = rule.backward(guarded.options, g, x, params, saved, needs)
    except Exception as error:
        guarded.blame(error, "backward")
        raise
    if not isinstance(found, _SEQUENCES) or len(found) != 2 or not isinstance(found[1], _SEQUENCES):
        shown = f"a tuple of {len(found)}" if isinstance(found, tuple) and len(found) != 2 else _type(found)
        what = "a pair of something else" if isinstance(found, _SEQUENCES) and len(found) == 2 else shown
        raise guarded.fault(f"returned {what}", "return the gradient of x and a list with one factor per parameter.")
    gx, factors = found
    if needs.x and gx is None:
        raise guarded.fault("yields no gradient for x", "return one where needs.x says so: zeros, where it is zero.")
    if needs.x and not (isinstance(gx, Tensor) and gx.shape == x.shape):
        got = f"a gradient of shape {tuple(gx.shape)}" if isinstance(gx, Tensor) else _type(gx)
        raise guarded.fault(
            f"yields {got} for x of shape {tuple(x.shape)}", "it must be a tensor of the shape of x: mend the rule."
        )
    if len(factors) != len(params):
        raise guarded.fault(
            f"yields {len(factors)} factors for {len(params)} parameters",
            "return one for each of the call's params, None where needs.params says that nobody asks.",
        )
    for i, (factor, p) in enumerate(zip(factors, params, strict=True)):
        if factor is None:
            if needs.params[i]:
                raise guarded.fault(
                    f"yields no factor for {guarded.name(i)}",
                    "return one where needs.params says so: zeros, where it is zero.",
                )
        elif not isinstance(factor, Factor):
            raise guarded.fault(
                f"yields {_type(factor)} for {guarded.name(i)}",
                "it must be a Factor: wrap gradients (N, *shape) in Dense.",
            )
        elif needs.params[i]:
            try:
                samples, shape = len(factor), factor.shape
            except Exception as error:
                guarded.blame(error)
                raise
            if samples != len(x) or prod(shape) != p.numel():
                raise guarded.fault(
                    f"yields {(samples, *shape)} gradients for {guarded.name(i)}, not {(len(x), *p.shape)}",
                    _ONE_GRADIENT,
                )
    return gx, factors


def _bind_fold(guard: Guard, rule: BatchFold, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], Any] | Decline:
    bound = guard.run("bind", rule.bind, *args, **kwargs)
    if isinstance(bound, Decline):
        return bound
    fits = isinstance(bound, _SEQUENCES) and len(bound) == 2 and isinstance(bound[0], _SEQUENCES)
    if not fits or not all(map(_is_operand, bound[0])):
        raise guard.fault(
            "bind", f"returned {_type(bound)}", "return (tensors, options) with a tuple of tensors, or Decline(reason)."
        )
    return bound[0], bound[1]


def _run_fold(guard: Guard, rule: BatchFold, options: Any, *tensors: Tensor | None) -> Tensor:
    n = next((len(t) for t in tensors if t is not None), 0)
    return _samples_first(guard, "run", guard.run("run", rule.run, options, *tensors), n)
