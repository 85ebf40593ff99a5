"""The mode under which `fn` runs: it sends the uses of parameters to rules and answers control flow.

`fn` runs once, inside vmap, on parameters that are batched tensors with stride 0 along the samples. Any torch function
that it calls passes through `Mode`, and goes to the first handler in `handlers.py` that takes it:

    a rule for it, and a parameter among its operands  -> the rule, once for the whole batch
    parameters only, no sample in sight                -> computed once: a view, or a new `Source`
    a Python value wanted from a batched tensor        -> answered where all samples agree, else `Diverged`
    a mask that differs between samples, as an index   -> integers where all choose equally many, else `Diverged`
    a function that is made of others                  -> these, one by one
    anything else                                      -> plain vmap: exact, dense
    what vmap refuses, or gets wrong                   -> that op alone in a loop over samples

What `fn` closes over is a constant: no graph starts there. Where `fn` writes samples into a tensor that it made, or
changes a function of parameters in place, it runs once more with an option that allows it (`Rerun`).
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import count, repeat
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..errors import RuleError, home_of, name_of, place
from ..registry.params import Param, Source
from ..registry.rule import REDIRECTS, RULES, Entry
from ..torch_ import levels
from ..torch_.checkpoints import saved_tensor_hooks
from ..torch_.functions import POINTWISE
from ..torch_.watching import CUSTOM_FUNCTION_CALL, FunctionCall
from . import checkpoint, op_loop
from .collectors import Collector
from .draws import Draws
from .handlers import (
    freeze,
    handlers_of,
    has_second_chance,
    is_only_ruled,
    is_ordinary,
    may_use_params,
    refuse_out,
    run_pointwise,
    second_chance,
)
from .held import OwnParameters
from .problem import Problem
from .rule_call import DeferredCalls, UseRecord, ask_op, run_rule
from .signals import Signal
from .writes import ViewCopy

REDIRECTS[CUSTOM_FUNCTION_CALL] = lambda _, args, __: (call := FunctionCall(args[0]), call, args[1:])
_SEQUENCES = (list, tuple)


def _does_more(kwargs: dict[str, Any]) -> bool:
    """Whether keywords make a call do more than compute: write to a tensor, or start a graph."""
    return kwargs.get("out") is not None or bool(kwargs.get("inplace") or kwargs.get("requires_grad"))


class RunOptions(NamedTuple):
    """How a run of `fn` differs from the usual; each is asked for by a `Rerun`."""

    save_memory: bool = False  # no call is deferred: memory counts before time
    new_per_sample: bool = False  # a tensor that `fn` makes has a sample axis, so that samples can be written into it
    of_params_per_sample: bool = False  # functions of parameters have one, too, so that they can be written to


class Operands(NamedTuple):
    """The arguments of a call, as the mode sees them."""

    resolved: list[Any]  # parameters as Param
    params: list[Param]
    samples: bool  # a tensor other than a parameter differs between samples
    graph: bool  # autograd follows a tensor other than a parameter


class TorchCall(NamedTuple):
    """A torch function that `fn` calls, with what there is among its arguments."""

    func: Any
    args: Any
    kwargs: Any
    operands: Operands
    rule: Entry | None

    def run(self) -> Any:
        """The function itself: vmap does it."""
        return self.func(*self.args, **self.kwargs)


class Mode(TorchFunctionMode):
    """One run of `fn` over N samples. Lives for one call in one thread."""

    level = -1  # vmap's, of this run
    anchor: Tensor | None = None  # any leaf: what makes a rule's output require a gradient
    pretended = False  # `fn` has been told that a tensor requires grad which autograd does not follow
    calls_functions = False  # Python runs in the backward, which need not be linear in its cotangent
    has_hooks = False  # `fn` hangs hooks into the graph
    recomputing = False  # a checkpoint runs `fn`'s parts again
    settled: Exception | None = None  # an error that is `fn`'s own, whatever way the op runs
    signal: Signal | None = None  # raised to end the run; `fn` may have caught it

    def __init__(
        self, problem: Problem, collector: Collector, options: RunOptions, log: "list[UseRecord] | None" = None
    ) -> None:
        self.n, self.randomness, self.collector, self.log = problem.n, problem.randomness, collector, log
        self.options, self.problem = options, problem
        # What `fn` holds for parameters.
        self.sources: list[Source] = []
        self.roots = len(problem.params)  # so many sources, the first, are parameters as given
        self.tracked: dict[int, Param] = {}  # by the id of the wrapped tensor, which the Param keeps alive
        # What `fn` may not write to, and what it has met.
        self.batch = [] if problem.own_batch else problem.batch  # the caller's
        self.copies: dict[int, tuple[Param, Tensor]] = {}  # detached parameters, by their storage
        self.view_copies: list[ViewCopy] = []  # copies where torch without vmap has views
        self.outdated: dict[int, Tensor] = {}  # what without vmap would have changed by now, by its storage
        self.frozen: dict[int, Tensor] = {}  # leaves of other graphs
        self.own: list[Tensor] = []  # leaves that `fn` has made, perhaps for torch.autograd.grad: their graphs stay
        # How the backward has to go.
        self.deferred = DeferredCalls(options.save_memory)
        self.lasting = problem.lasting  # functions of parameters alone are pulled back after the call
        # How the run goes.
        self.draws = Draws(problem.params, problem.randomness)
        self.packing = saved_tensor_hooks()  # the caller's hooks on what autograd saves
        self.looped: dict[str, str] = {}  # ops that ran in a loop over samples, with where and why

    def track_roots(self, named: Callable[[int], str], roots: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
        """What `fn` gets to hold for the parameters as given."""
        held = levels.wrap_all(leaves, self.level)
        self.sources = list(map(Source, count(), repeat(named), roots, leaves))
        self.tracked = dict(zip(map(id, held), map(Param, roots, self.sources, held), strict=True))
        return held

    def track(self, source: Source) -> Tensor:
        """What `fn` gets to hold for `source`, to be recognised whenever it is used."""
        wrapped = levels.wrap(source.leaf, self.level)
        self.sources.append(source)
        self.tracked[id(wrapped)] = Param(source.value, source, wrapped)
        return wrapped

    # ---- one call ------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return self._handle(func, args, kwargs)
        except RuleError:
            ask_op(self, func, args, kwargs)  # raises torch's own error where the call is wrong, not the rule
            raise
        except Signal as signal:
            self.signal = signal
            raise
        except Exception as error:
            if not has_second_chance(self, func, args, kwargs, error):
                raise
            failed = error.with_traceback(None)  # whose frames would keep the call's tensors
        try:
            return second_chance(self, func, args, kwargs, failed)
        except Signal as signal:
            self.signal = signal
            raise

    def _handle(self, func: Any, args: Any, kwargs: Any) -> Any:
        is_hooked = saved_tensor_hooks() is not None
        if is_hooked:
            checkpoint.follow(self)
        key = func
        if func in REDIRECTS:
            key, func, args = REDIRECTS[func](func, args, kwargs)
        if levels.current_level() != self.level and may_use_params(func):
            args, kwargs = self._as_given(args, kwargs)
        operands = self.look((*args, *kwargs.values()) if kwargs else args)
        _, params, samples, graph = operands
        rule = RULES.get(key)
        if kwargs and kwargs.get("out") is not None:
            refuse_out(self, params or samples)
        if not graph and not self.outdated:
            if rule is not None:
                if is_only_ruled(func):
                    return run_rule(self, rule, func, args, kwargs, operands)
            elif not params and is_ordinary(func) and not (kwargs and _does_more(kwargs)):
                if func in POINTWISE and samples and not is_hooked:
                    return run_pointwise(self, func, args, kwargs)
                return func(*args, **kwargs)  # as most calls are: 2 us on top of vmap's own
        call = TorchCall(func, args, kwargs, operands, rule)
        if graph:
            call = freeze(self, call)
        for handler in handlers_of(func):
            found = handler(self, call)
            if found is not NotImplemented:
                return found
        raise AssertionError(f"no handler took {name_of(func)}; please report this")

    def look(self, values: Iterable[Any]) -> Operands:
        """What there is among the arguments of a call. One loop: it runs for every call that `fn` makes."""
        param_of, level, level_of, is_batched = self.tracked.get, self.level, levels.level_of, levels.is_batched_tensor
        resolved: list[Any] = []
        params: list[Param] = []
        samples = graph = False
        for value in values:
            if isinstance(value, Tensor):
                param = param_of(id(value))
                if param is not None:
                    value = param
                    params.append(param)
                elif value.requires_grad:  # for a batched tensor vmap says no
                    graph = True
                elif not samples:
                    samples = level_of(value) == level and is_batched(value)
            elif value is not None and type(value) in _SEQUENCES:
                inner = self.look(value)
                value = type(value)(inner.resolved)
                params += inner.params
                samples, graph = samples or inner.samples, graph or inner.graph
            resolved.append(value)
        return Operands(resolved, params, samples, graph)

    def again(self, call: TorchCall, func: Any, args: Any, kwargs: Any) -> TorchCall:
        """The call with another function and arguments in its place."""
        return TorchCall(func, args, kwargs, self.look((*args, *kwargs.values())), call.rule)

    # ---- what handlers ask -----------------------------------------------------------------------------------

    @property
    def own_parameters(self) -> OwnParameters:
        """The tensors that the given parameters stand for."""
        return OwnParameters(self.problem)

    @property
    def is_innermost(self) -> bool:
        """Whether `fn` is not inside a transform of its own just now."""
        return levels.current_level() == self.level

    def differs(self, t: Any) -> bool:
        """Whether `t` differs between samples, and is not a parameter; inside another transform, it may."""
        if not isinstance(t, Tensor) or id(t) in self.tracked:
            return False
        return not self.is_innermost or levels.is_batched(t, self.level)

    def _as_given(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of a call with a parameter among them, without what a transform of `fn`'s own has wrapped
        around those that it takes for constants."""
        found = False

        def unwrapped(value: Any) -> Any:
            nonlocal found
            if isinstance(value, Tensor):
                value = levels.undifferentiated(value)
                found = found or id(value) in self.tracked
            elif type(value) in _SEQUENCES:
                value = type(value)([unwrapped(v) for v in value])
            return value

        given = tuple([unwrapped(a) for a in args]), {k: unwrapped(v) for k, v in kwargs.items()}
        return given if found else (args, kwargs)

    def takes_part(self, args: Any, kwargs: Any) -> bool:
        """Whether a transform of `fn`'s own has a tensor among the arguments of a call."""
        tensors = [t for t in op_loop.leaves((args, kwargs)) if isinstance(t, Tensor)]
        return any(levels.is_transformed(t) and not levels.is_batched(t, self.level) for t in tensors)

    def lower(self, t: Any) -> Any:
        """The (N, ...) tensor behind an operand."""
        if t is None:
            return None
        return levels.lower(t.wrapped if type(t) is Param else t, self.n, self.level)

    # ---- what is noted for `explain`, and for those who sum as factors come --------------------------------------

    def record(self, func: Any, params: list[Param], rule: str | None, reason: str = "") -> UseRecord | None:
        """Log a use of parameters, where somebody listens."""
        if self.log is None or not params:
            return None
        self.log.append(UseRecord(tuple(params), name_of(func), place(), rule, reason))
        return self.log[-1]

    def record_unseen(self, source: Source) -> None:
        """Log that plain vmap differentiated `source`, where no logged use says so."""
        if self.log is not None and not any(
            use.rule is None and any(p.source is source for p in use.params) for use in self.log
        ):
            param = Param(source.value, source, source.leaf)
            self.log.append(UseRecord((param,), "fn", home_of(self.problem.fn), None, "inside another transform"))

    def unruled(self, func: Any, params: list[Param], reason: str) -> None:
        """Gradients will come for `params`, in ways that are not ours to see."""
        self.record(func, params, None, reason)
        if self.collector.reduces_early and not self.recomputing:
            for param in params:
                param.source.uses += 2

    def left_to_vmap(self, func: Any, args: Any, kwargs: Any, params: list[Param], reason: str) -> Any:
        """The call as vmap does it: exact, dense."""
        self.unruled(func, params, reason)
        return func(*args, **kwargs)

    # ---- recomputation ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recompute(self) -> Iterator[None]:
        """The level and the mode once more, for what a checkpoint recomputes during the backward."""
        if self.is_innermost:
            yield
            return
        before = self.sources, self.tracked, self.copies, self.log, self.recomputing
        self.sources, self.tracked, self.copies = list(self.sources), dict(self.tracked), dict(self.copies)
        self.log, self.recomputing = None, True
        try:
            level = levels.enter(self.n, self.randomness)
            try:
                if level != self.level:  # tensors of the first run belong to that level
                    raise RuntimeError("a checkpoint is recomputed inside another transform")
                with self:
                    yield
            finally:
                levels.leave()
        finally:
            self.sources, self.tracked, self.copies, self.log, self.recomputing = before
