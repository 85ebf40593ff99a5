"""The mode under which `fn` runs: it sends the uses of parameters to rules and answers control flow.

`fn` runs once, inside vmap, on parameters that are batched tensors with stride 0 along the samples. Any
torch function it calls passes through `Intercept`:

    a rule for it, and a parameter among its operands  -> the rule, once for the whole batch
    parameters only, no sample in sight                -> computed once: a view, or a new `Source`
    a Python value wanted from a batched tensor        -> answered where all samples agree, else `Diverged`
    a mask that differs between samples, as an index   -> integers where all choose equally many, else `Diverged`
    a function that is made of others (`Composite`)    -> these, one by one
    anything else                                      -> plain vmap: exact, dense
    what vmap refuses, or gets wrong                   -> that op alone in a loop over samples

What `fn` closes over is a constant: no graph starts there. Where `fn` writes samples into a tensor that it
made, or changes a function of parameters in place, it runs once more with a setting that allows it (`Retry`).
"""

import contextlib
import sys
import types
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import PsgradError, RuleError, UnsupportedOpError, is_out_of_memory, name_of, place
from ..registry.params import Param, Source
from ..registry.rule import REDIRECTS, RULES, Call, Composite, Decline, Entry, Fold, Rule
from ..torch_ import checkpoints, levels
from ..torch_.autograd import CUSTOM_FUNCTION_CALL, FunctionCall, vmaps_itself
from ..torch_.checkpoints import saved_tensor_hooks
from ..torch_.functions import (
    ANSWERS,
    ATTENTION,
    DRAWS,
    GRAPHS,
    IS_NESTABLE,
    MAKERS,
    NUMBERS,
    PURE,
    REQUIRES_GRAD,
    SET_REQUIRES_GRAD,
    SHOWN,
    UPDATES,
    VIEWS,
    asks_for_grad,
    is_attribute,
    is_composite,
    is_python,
    minds,
    opened,
    wants,
    writes,
)
from ..torch_.storage import shares_memory, storage_of
from ..torch_.tracing import NO_VALUES
from . import checkpoint as _checkpoint
from . import faults as _faults
from . import op_loop as _op_loop
from . import ragged_indexing as _masks
from .collectors import Collector
from .control_flow import body_of
from .draws import RANDOM, Draws, draws
from .held import OwnParameters
from .op_loop import Unlooped
from .rule_call import Applied, Tape, Use, apply

REDIRECTS[CUSTOM_FUNCTION_CALL] = lambda _, args, __: (call := FunctionCall(args[0]), call, args[1:])
_SEQUENCES = (list, tuple)
_TRUTHS = (torch.Tensor.__bool__, torch.is_nonzero)
_TELLING = frozenset(["out", "inplace", "requires_grad"])  # keywords that make a call more than a computation
_OF_MEMORY = (torch.as_strided, torch.Tensor.as_strided)  # of the whole storage, in which a row is somewhere
_CAREFUL = _masks.FUNCTIONS | SHOWN | UPDATES
_GUARDED = _CAREFUL | _faults.FUNCTIONS | RANDOM  # of which some calls go another way than their rule
_SPECIAL = (
    _CAREFUL
    | _faults.FUNCTIONS
    | ANSWERS
    | MAKERS
    | RANDOM
    | {ATTENTION, IS_NESTABLE, REQUIRES_GRAD, SET_REQUIRES_GRAD, torch.Tensor.requires_grad_, *GRAPHS}
)


class Operands(NamedTuple):
    """The arguments of a call, as the mode sees them."""

    resolved: list[Any]  # parameters as Param
    params: list[Param]
    samples: bool  # a tensor other than a parameter differs between samples
    graph: bool  # autograd follows a tensor other than a parameter


@lru_cache(4096)
def _is_ordinary(func: Any) -> bool:
    """Whether `func` computes something, no more: without a parameter or a graph it is vmap's alone."""
    special = func in _SPECIAL or isinstance(func, FunctionCall) or body_of(func) is not None
    return not special and not writes(func, {}) and not asks_for_grad(func)


class Diverged(BaseException):
    """Samples want different answers: `groups` are the rows that agree. Not for `fn` to catch."""

    def __init__(self, groups: list[Tensor]) -> None:
        self.groups = groups


class Written(BaseException):
    """`fn` is about to change its sample in place: let it have a copy. Not for `fn` to catch."""


class Retry(BaseException):
    """`fn` is to run once more, with `setting` of the mode switched on. Not for `fn` to catch."""

    def __init__(self, setting: str) -> None:
        self.setting = setting


class Intercept(TorchFunctionMode):
    """One run of `fn` over N samples. Lives for one call in one thread."""

    def __init__(
        self,
        n: int,
        randomness: str,
        sink: Collector,
        log: list[Use] | None,
        frugal: bool,
        own: OwnParameters,
    ) -> None:
        super().__init__()
        self.n, self.randomness, self.sink, self.log = n, randomness, sink, log
        self.own_parameters, self.draws = own, Draws(own.params, randomness)
        self.functions = False  # `fn` calls autograd Functions, whose backward is Python
        self.settled: Exception | None = None  # an error that is `fn`'s own, whatever way the op runs
        self.hooks = False  # `fn` hangs hooks into the graph
        self.looped: dict[str, str] = {}  # ops that ran in a loop over samples, with where and why
        self.level, self.roots = -1, 0  # roots: how many sources are parameters as given
        self.sources: list[Source] = []
        self.tracked: dict[int, Param] = {}  # by the id of the wrapped tensor, which the Param keeps alive
        self.copies: dict[int, tuple[Param, Tensor]] = {}  # detached parameters, by their storage
        self.batch: list[Any] = []  # the caller's
        self.anchor: Tensor | None = None  # any leaf: what makes a rule's output require a gradient
        self.frozen: dict[int, Tensor] = {}  # leaves of other graphs that `fn` has met
        self.own: list[Tensor] = []  # leaves that `fn` has made, perhaps for torch.autograd.grad: their graphs stay
        self.pretended = False  # `fn` thinks of a tensor that it requires grad
        self.tape = Tape(frugal)
        self.recomputing = False
        self.lifts = False  # a new tensor gets a sample axis of its own, so that samples can be written into it
        self.lasting = False  # functions of parameters alone are pulled back after the call
        self.repeats = False  # functions of parameters alone are computed per sample, so that they can be written to

    def track(self, source: Source) -> Tensor:
        """What `fn` gets to hold for `source`, to be recognised whenever it is used."""
        wrapped = levels.wrap(source.leaf, self.level)
        self.sources.append(source)
        self.tracked[id(wrapped)] = Param(source.value, source, wrapped)
        return wrapped

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return self._handled(func, args, kwargs)
        except RuleError:
            self._ask_op(func, args, kwargs)  # which may say that it is the caller's mistake
            raise
        except Exception as error:
            if not self._has_second_chance(func, args, kwargs, error):
                raise
            why = reason_of(error)
        return self._second_chance(func, args, kwargs, why)

    def _handled(self, func: Any, args: Any, kwargs: Any) -> Any:
        if saved_tensor_hooks() is not None:
            _checkpoint.follow(self._again)
        key = func
        if func in REDIRECTS:
            key, func, args = REDIRECTS[func](func, args, kwargs)
        seen = self._look((*args, *kwargs.values()) if kwargs else args)
        rule = RULES.get(key)
        if rule is None:
            if not seen.params and not seen.graph and _is_ordinary(func) and kwargs.keys().isdisjoint(_TELLING):
                return func(*args, **kwargs)  # as most calls are: 2 us on top of vmap's own
        elif not seen.graph and func not in _GUARDED:
            return self._ruled(rule, func, args, kwargs, seen)
        if func in RANDOM and not self.recomputing and draws(func, args, kwargs):
            self.draws.before(kwargs.get("generator"))
            try:
                return self._unusual(rule, func, args, kwargs, seen)
            finally:
                self.draws.after()
        return self._unusual(rule, func, args, kwargs, seen)

    def _unusual(self, rule: Entry | None, func: Any, args: Any, kwargs: Any, seen: Operands) -> Any:
        _, params, _, graph = seen
        if graph and not minds(func):
            if _checkpoint.keeps_arguments(func) and levels.current_level() == self.level:
                return levels.below(func, *args, **kwargs)
            args, kwargs = self._freeze(func, args, kwargs)
            seen = self._look((*args, *kwargs.values()))
        if func in _faults.FUNCTIONS:
            fault = _faults.fault_of(func, args, kwargs, self._differs)
            if fault is not None:
                return self._by_another_way(fault, func, args, kwargs)
        if func in _CAREFUL and levels.current_level() == self.level:
            call = (
                _masks.rewritten(func, args, kwargs, self.n, self.level, _split) if func in _masks.FUNCTIONS else None
            )
            if call is not None:
                with self:
                    return call[0](*call[1], **call[2])
            if _masks.is_mixed(func, args):
                return self._put(*args)
            if func in SHOWN:
                return self._alone(func, args, kwargs)
            if func in UPDATES:
                args, kwargs = self._own_statistics(func, args, kwargs)
                seen = self._look((*args, *kwargs.values()))
        if rule is not None:
            return self._ruled(rule, func, args, kwargs, seen)
        if type(func) is FunctionCall:
            return self._function(func, args, kwargs)
        if func in ANSWERS:
            return self._answer(func, args, kwargs)
        if func in PURE:
            return self._pure(func, args, kwargs, seen)
        if func == REQUIRES_GRAD and levels.current_level() == self.level and not _is_torchs(sys._getframe(3)):
            return self._requires_grad(args[0])
        if func in GRAPHS and levels.current_level() == self.level and levels.is_batched(args[0], self.level):
            found = func(levels.lower(args[0], self.n, self.level))  # what autograd follows, which vmap hides
            return found if found is None or isinstance(found, bool) else _Node(self, found)
        if func is torch.Tensor.requires_grad_ and wants(*args[1:], **kwargs) and self._pretends(args[0]):
            return args[0]
        if func is IS_NESTABLE:
            return False
        if (is_composite(func) and (func is ATTENTION or params)) or asks_for_grad(func):
            with self:  # torch's own Python: what it calls comes here again
                return opened(func)(*args, **kwargs)
        if (body := body_of(func)) is not None:
            with self:
                return body(*args, **kwargs)
        if writes(func, kwargs) and args and isinstance(args[0], Tensor):
            self._check_write(func, args, kwargs)
        elif self.lifts and func in MAKERS:
            return self._lifted(func(*args, **kwargs))
        if params and not is_attribute(func):
            self._unruled(func, params, "no rule for this function")
        out = func(*args, **kwargs)
        if func == SET_REQUIRES_GRAD and args[1]:
            self.own.append(args[0])
        elif kwargs.get("requires_grad"):
            self.own.append(out)
        return out

    def _by_another_way(self, fault: _faults.Fault, func: Any, args: Any, kwargs: Any) -> Any:
        """A call that torch's vmap gets wrong."""
        if fault.instead is not None:
            call = fault.instead(*args, **kwargs)
            with self:
                return call[0](*call[1], **call[2])
        if not _op_loop.is_sampled(args, kwargs, self.level):
            return func(*args, **kwargs)
        if levels.current_level() != self.level:
            raise Unlooped(f"inside another transform torch's vmap {fault.what}")
        return self._alone(func, args, kwargs, f"torch's vmap {fault.what}")

    def _put(self, target: Tensor, index: Any, value: Any) -> None:
        """target[index] = value, where the index has both tensors and other things in it."""
        call: tuple[Any, Any, Any] = _masks.SETITEM, (target, index, value), {}
        self._check_write(*call)
        if not levels.is_batched(target, self.level):
            return _masks.SETITEM(target, index, value)
        if not levels.below(_masks.put, target, index, value, self.n, self.level):
            self._alone(*call, "an index that vmap does not take")
        return None

    def _differs(self, t: Any) -> bool:
        """Whether `t` differs between samples, and is not a parameter; inside another transform, it may."""
        if not isinstance(t, Tensor) or id(t) in self.tracked:
            return False
        return levels.current_level() != self.level or levels.is_batched(t, self.level)

    # ---- what vmap cannot do -----------------------------------------------------------------------

    def _has_second_chance(self, func: Any, args: Any, kwargs: Any, error: Exception) -> bool:
        """Whether a call that failed may do better by another way: its error need not be `fn`'s own."""
        if self.recomputing or func in ANSWERS or error is self.settled:  # torch ends a recomputation by an error
            return False
        if isinstance(error, (PsgradError, *NO_VALUES)) or is_out_of_memory(error):
            return False
        if "randomness error mode" in str(error):
            return False
        return levels.current_level() == self.level and _op_loop.is_sampled(args, kwargs, self.level)

    def _second_chance(self, func: Any, args: Any, kwargs: Any, why: str) -> Any:
        """A call that failed: taken apart, or in a loop over samples. Where these fail too, the error is `fn`'s own."""
        if minds(func) and func not in NUMBERS:
            raise Unlooped(why)
        if is_python(func) and not writes(func, kwargs):
            with self:
                return opened(func)(*args, **kwargs)
        if (func in RANDOM and self.randomness == "same") or func in _OF_MEMORY:
            raise Unlooped(why)
        return self._alone(func, args, kwargs, why)

    def _alone(self, func: Any, args: Any, kwargs: Any, why: str = "") -> Any:
        """One op in a loop over samples."""
        if params := self._look((*args, *kwargs.values())).params:
            self._unruled(func, params, f"in a loop over samples, {why}")
        if is_writing := writes(func, kwargs):
            self._check_write(func, args, kwargs)
        if func in UPDATES:
            args, kwargs = self._own_statistics(func, args, kwargs)
        out = _op_loop.run(func, args, kwargs, self.n, self.level, is_writing, _split_keys)
        self.draws.after()
        if why:
            self.looped.setdefault(name_of(func), f"at {place()}: {why}")
        return out

    def _function(self, func: FunctionCall, args: Any, kwargs: Any) -> Any:
        """A call of an autograd Function."""
        self.functions = True
        level = levels.current_level()
        if level == self.level and not vmaps_itself(func.function) and _op_loop.is_sampled(args, kwargs, level):
            return self._alone(func, args, kwargs, "it does not say what it does under vmap")
        if params := self._look((*args, *kwargs.values())).params:
            self._unruled(func, params, "no rule for this function")
        return func(*args, **kwargs)

    def _own_statistics(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with running statistics that may be written to: copies of those that all samples share."""

        def own(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            if not levels.is_batched(t, self.level):
                return t.clone()
            self._check_write(func, (t,), {})
            return t

        first = 1 if is_composite(func) else 3  # F.batch_norm has them behind the input, torch.batch_norm further on
        named = {k: own(v) if k.startswith("running_") else v for k, v in kwargs.items()}
        return (*args[:first], *map(own, args[first : first + 2]), *args[first + 2 :]), named

    # ---- what `fn` closes over ---------------------------------------------------------------------

    def _freeze(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments without the graphs of others: what `fn` closes over is a constant."""
        if levels.current_level() != self.level:  # there a graph may be another transform's
            return args, kwargs
        kept = 1 if writes(func, kwargs) else 0  # torch itself says what may be written
        frozen = (*args[:kept], *[self._constant(func, v) for v in args[kept:]])
        return frozen, {k: v if k == "out" else self._constant(func, v) for k, v in kwargs.items()}

    def _constant(self, func: Any, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)([self._constant(func, v) for v in value])
        if not isinstance(value, Tensor) or not value.requires_grad or levels.is_differentiated(value):
            return value
        if self.own and (not value.is_leaf or _is_among(value, self.own)):
            return value
        if value.is_leaf and id(value) not in self.frozen:
            self.own_parameters.refuse(func, value)
            if self.recomputing and not _is_among(value, self.frozen.values()):
                raise UnsupportedOpError(
                    "a checkpointed function does not find its parameters again when it is recomputed\n"
                    f"  called at {place()}\n"
                    "  hand them to it as arguments, or make fn with psgrad.from_module."
                )
            self.frozen[id(value)] = value
        return value.detach()

    def _requires_grad(self, t: Tensor) -> bool:
        """What autograd follows, which vmap hides."""
        found = levels.lower(t, self.n, self.level).requires_grad
        if self.pretended and not found:
            raise Unlooped("fn asks whether a tensor requires grad after it has called requires_grad_()")
        return found

    def _pretends(self, t: Tensor) -> bool:
        """Whether `t` can be said to require grad: for torch's checkpoints, models say so of activations.

        No graph starts there. Nobody notices: torch.autograd refuses a batched tensor, and then the loop runs.
        """
        if levels.current_level() != self.level or not levels.is_batched(t, self.level):
            return False
        self.pretended = self.pretended or not levels.lower(t, self.n, self.level).requires_grad
        return True

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        """The level and the mode once more, for what a checkpoint recomputes during the backward."""
        if levels.current_level() == self.level:
            yield
            return
        before = self.sources, self.tracked, self.copies, self.log, self.recomputing
        self.sources, self.tracked, self.copies = list(self.sources), dict(self.tracked), dict(self.copies)
        self.log, self.recomputing = None, True
        try:
            with levels.vmap_level(self.n, self.randomness) as level:
                if level != self.level:  # tensors of the first run belong to that level
                    raise RuntimeError("a checkpoint is recomputed inside another transform")
                with self:
                    yield
        finally:
            self.sources, self.tracked, self.copies, self.log, self.recomputing = before

    # ---- parameters among the arguments ------------------------------------------------------------

    def _look(self, values: Iterable[Any]) -> Operands:
        """What there is among the arguments of a call. One loop: it runs for every call that `fn` makes."""
        param_of, level = self.tracked.get, self.level
        resolved: list[Any] = []
        params: list[Param] = []
        samples = graph = False
        for value in values:
            if isinstance(value, Tensor):
                param = param_of(id(value))
                if param is not None:
                    value = param
                    params.append(param)
                elif value.requires_grad:  # of a batched tensor vmap says no
                    graph = True
                elif not samples:
                    samples = levels.is_batched(value, level)
            elif value is not None and type(value) in _SEQUENCES:
                inner = self._look(value)
                value = type(value)(inner.resolved)
                params += inner.params
                samples, graph = samples or inner.samples, graph or inner.graph
            resolved.append(value)
        return Operands(resolved, params, samples, graph)

    def _changes(self, func: Any, param: Param) -> UnsupportedOpError:
        return UnsupportedOpError(
            f"{name_of(func)} changes {param.source.name} in place\n"
            f"  called at {place()}\n"
            "  per-sample gradients need parameters that stay put: change a clone instead."
        )

    def _check_write(self, func: Any, args: Any, kwargs: Any) -> None:
        """`fn` changes its first argument in place: never the caller's parameters or batch."""
        target = args[0]
        param = self.tracked.get(id(target))
        if param is not None and not torch.is_grad_enabled() and param.source.index < self.roots:
            raise self._changes(func, param)
        if levels.current_level() != self.level:
            return
        if not self.lifts and not levels.is_batched(target, self.level):
            others = self._look((*args[1:], *kwargs.values()))
            drawn = func in DRAWS and self.randomness == "different"
            if drawn or others.params or others.samples:
                raise Retry("lifts")
        lowered = levels.lower(target, self.n, self.level)
        if any(shares_memory(lowered, source.value) for source in self.sources[self.roots :]):
            raise Retry("repeats")
        storage = storage_of(lowered)
        if any(isinstance(t, Tensor) and storage_of(t) == storage for t in self.batch):
            raise Written
        if storage in self.copies:
            raise self._changes(func, self.copies[storage][0])

    def _lifted(self, new: Any) -> Any:
        """A new tensor with memory of its own for every sample."""
        if not isinstance(new, Tensor) or levels.current_level() != self.level or levels.is_batched(new, self.level):
            return new
        return levels.wrap(levels.below(new.expand(self.n, *new.shape).contiguous), self.level)

    def _listed(self, func: Any, params: list[Param], rule: str | None, reason: str = "") -> Use | None:
        if self.log is None or not params:
            return None
        self.log.append(Use(tuple(params), name_of(func), place(), rule, reason))
        return self.log[-1]

    def note_unseen(self, source: Source) -> None:
        """Log that plain vmap differentiated `source`, where no logged use says so."""
        if self.log is not None and not any(
            use.rule is None and any(p.source is source for p in use.params) for use in self.log
        ):
            param = Param(source.value, source, source.leaf)
            self.log.append(Use((param,), "fn", "an unknown place", None, "inside another transform"))

    # ---- the four ways -----------------------------------------------------------------------------

    def _unruled(self, func: Any, params: list[Param], reason: str) -> None:
        """Gradients will come for `params`, in ways that are not ours to see."""
        self._listed(func, params, None, reason)
        if self.sink.reduces_early and not self.recomputing:
            for param in params:
                param.source.uses += 2

    def _plain(self, func: Any, args: Any, kwargs: Any, params: list[Param], reason: str) -> Any:
        self._unruled(func, params, reason)
        return func(*args, **kwargs)

    def _ruled(self, rule: Entry, func: Any, args: Any, kwargs: Any, seen: Operands) -> Any:
        params = seen.params
        if not params:
            plain = isinstance(rule, Rule) and rule.only_params  # as good without parameters
            if plain or not seen.samples:
                return func(*args, **kwargs)
        if isinstance(rule, Composite):
            with self:  # its parts come here again
                return rule.run(*args, **kwargs)
        if levels.current_level() != self.level:
            return self._plain(func, args, kwargs, params, "inside another transform")
        if isinstance(rule, Fold):
            return self._folded(rule, func, args, kwargs, params)
        if not seen.samples and rule.only_params:  # a weight made of weights, not a weight at work
            if self.repeats:
                return self._plain(func, args, kwargs, params, "a function of parameters is changed in place")
            return self._once(func, args, kwargs, params)
        try:
            given = seen.resolved
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
            return self._plain(func, args, kwargs, params, call.reason)
        applied = Applied(rule, call.options, call.params, self.sink)
        if applied.is_complex or call.x.dtype.is_complex:
            return self._plain(func, args, kwargs, params, "complex numbers")
        if not seen.samples and not applied.constants and isinstance(call.x, Param) and not self.repeats:
            return self._once(func, args, kwargs, params)  # a standardised weight, say
        for constant in applied.constants:
            if levels.is_batched(constant, self.level):
                return self._plain(func, args, kwargs, params, "the weight differs between samples")
        if not self.recomputing:
            for param in params:
                param.source.uses += 1
        if self.log is not None:
            others = [p for p in call.others if isinstance(p, Param)]
            applied.use = self._listed(func, [p for p in params if p not in others], rule.name)
            self._listed(func, others, None, "an input of the op, not its weight")
        lowered = [self._lower(t) for t in call.others] if call.others else ()
        return levels.wrap(levels.below(self._applied, call, applied, self._lower(call.x), *lowered), self.level)

    def _ask_op(self, func: Any, args: Any, kwargs: Any) -> None:
        """Raise what `func` itself says of a call at which a rule failed: then the call is wrong, not the rule.

        Sample by sample, without vmap, which may have reasons of its own to refuse.
        """
        if levels.current_level() != self.level:
            return

        def one(value: Any, i: int) -> Any:
            if type(value) in _SEQUENCES:
                return type(value)([one(v, i) for v in value])
            return levels.lower(value, self.n, self.level)[i].detach().clone() if isinstance(value, Tensor) else value

        def ask() -> None:
            for i in range(self.n):
                func(*[one(a, i) for a in args], **{k: one(v, i) for k, v in kwargs.items()})

        try:
            with torch.no_grad():
                levels.below(ask)
        except Exception as error:
            self.settled = error
            raise error from None

    def _lower(self, t: Any) -> Any:
        """The (N, ...) tensor behind an operand."""
        t = t.wrapped if type(t) is Param else t
        return None if t is None else levels.lower(t, self.n, self.level)

    def _applied(self, call: Call, applied: Applied, x: Tensor, *others: Tensor | None) -> Tensor:
        """A rule's call on the (N, ...) input, one level below vmap."""
        if call.before is not None:
            x = call.before(x, *others)
        y = apply(applied, self.tape, self.anchor, x)
        return y if call.after is None else call.after(y, *others)

    def _folded(self, rule: Fold, func: Any, args: Any, kwargs: Any, params: list[Param]) -> Any:
        try:
            bound = rule.bind(self.randomness, *args, **kwargs)
        except TypeError:  # a wrong call: torch's own message is the better one
            return func(*args, **kwargs)
        if isinstance(bound, Decline):
            return self._plain(func, args, kwargs, params, bound.reason)
        if params:
            self._unruled(func, params, "folded into the batch; no rule for a parameter here")
        tensors, options = bound
        lowered = map(self._lower, tensors)
        return levels.wrap(levels.below(rule.run, options, *lowered), self.level)

    def _pure(self, func: Any, args: Any, kwargs: Any, seen: Operands) -> Any:
        params = seen.params
        if not params:
            out = func(*args, **kwargs)
            return self._lifted(out) if self.lifts and func in MAKERS else out
        if seen.samples or levels.current_level() != self.level or (self.repeats and func not in VIEWS):
            return self._plain(func, args, kwargs, params, "no rule for this function")
        return self._once(func, args, kwargs, params)

    def _traced(self, a: Any) -> Any:
        """`a` with every tracked tensor replaced by its value, as ordinary autograd follows it."""
        if type(a) in (list, tuple):
            return type(a)([self._traced(v) for v in a])
        return levels.below(self.tracked[id(a)].traced) if id(a) in self.tracked else a

    def _once(self, func: Any, args: Any, kwargs: Any, params: list[Param]) -> Any:
        """A function of parameters alone: computed once, tracked as a view or as a new source."""
        grad_enabled = torch.is_grad_enabled()

        with _checkpoint.unhooked(self.lasting):  # its backward runs where a checkpoint cannot recompute
            values = func(*map(self._traced, args), **{k: self._traced(v) for k, v in kwargs.items()})
        many = isinstance(values, (list, tuple))
        flat = list(values) if many else [values]
        if not all(isinstance(v, Tensor) for v in flat):
            return func(*args, **kwargs)
        viewed: list[Any] | None = None
        for i, value in enumerate(flat):
            if not (value.requires_grad and grad_enabled):  # detached, or of integers: a constant
                flat[i] = value.detach()
                home = next((p for p in params if shares_memory(value, p.source.value)), None)
                if home is not None:  # not the caller's memory, which `fn` might change
                    flat[i] = flat[i].clone()
                    self.copies[storage_of(flat[i])] = home, flat[i]
                continue
            homes = params if func in VIEWS else ()
            home = next((p for p in homes if shares_memory(value, p.source.value)), None)
            if home is not None and value.dtype == home.source.value.dtype:
                if viewed is None:
                    wrapped = func(*args, **kwargs)  # the same view of the leaf, for plain vmap
                    viewed = list(wrapped) if many else [wrapped]
                self.tracked[id(viewed[i])] = Param(value.detach(), home.source, viewed[i], value)
                flat[i] = viewed[i]
            else:
                flat[i] = self._derived(value, name_of(func), params)
        return type(values)(flat) if many else flat[0]

    def _derived(self, value: Tensor, op: str, params: list[Param]) -> Tensor:
        """A new source for a value that was computed from parameters alone."""
        graph = value.contiguous()
        value = graph.detach()
        for param in params:
            param.source.uses += 2  # its own use, and the one pulled back
        leaf = levels.below(lambda: value.expand(self.n, *value.shape).requires_grad_())

        def named(_: int) -> str:
            return f"{op}({', '.join(dict.fromkeys(p.source.name for p in params))})"

        return self.track(Source(len(self.sources), named, value, leaf, graph))

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A Python value from a batched tensor, where all samples give the same."""
        t = args[0]
        if levels.current_level() != self.level or not levels.is_batched(t, self.level):
            return func(*args, **kwargs)
        rows = levels.lower(t, self.n, self.level).detach()
        flat = rows.reshape(self.n, -1)
        whole = func is torch.Tensor.__int__ and flat.is_floating_point()
        _split(flat != 0 if func in _TRUTHS else flat.trunc() if whole else flat)
        return func(rows[0], *args[1:], **kwargs)


class _Node:
    """What `fn` gets for the `grad_fn` of a batched tensor: the graph of the batch is not that of a sample."""

    def __init__(self, mode: Intercept, node: Any) -> None:
        self._mode, self._node = mode, node

    def register_prehook(self, hook: Any) -> Any:
        """A hook on the gradient of the output, which is the same in both."""
        mode: Intercept = self._mode
        if mode.tape.edges:  # there it would not count: what is asked for is taken before it
            raise Retry("frugal")
        mode.hooks = True
        return self._node.register_prehook(hook)

    def __getattr__(self, name: str) -> Any:
        raise Unlooped(f"fn uses grad_fn.{name}")

    def __repr__(self) -> str:
        raise Unlooped("fn shows grad_fn")


def reason_of(error: Exception) -> str:
    """What an error says, in a line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _split_keys(keys: list[Any]) -> None:
    """Diverged, where the keys of the samples are not all equal."""
    kinds = list(dict.fromkeys(keys))
    if len(kinds) > 1:
        raise Diverged([torch.tensor([i for i, key in enumerate(keys) if key == kind]) for kind in kinds])


def _is_torchs(frame: types.FrameType) -> bool:
    """Whether checkpoints or a transform's own code run in `frame`: they mean the tensor as they see it."""
    return checkpoints.runs_in(frame) or levels.runs_in(frame)


def _is_among(t: Tensor, others: Iterable[Tensor]) -> bool:
    return any(shares_memory(t, other) for other in others)


def _split(rows: Tensor) -> None:
    """Diverged, where the rows (N, ...) are not all equal."""
    if not bool(((rows == rows[:1]) | (rows.isnan() & rows[:1].isnan())).all()):
        group = torch.unique(rows, dim=0, return_inverse=True)[1]
        groups = [(group == k).nonzero().flatten() for k in range(int(group.max()) + 1)]
        if len(groups) > 1:
            raise Diverged(groups)
