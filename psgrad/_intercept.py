"""The mode under which `fn` runs: it sends the uses of parameters to rules and answers control flow.

`fn` runs once, inside vmap, on parameters that are batched tensors with stride 0 along the samples. Any
torch function it calls passes through `Intercept`:

    a rule for it, and a parameter among its operands  -> the rule, once for the whole batch
    parameters only, no sample in sight                -> computed once: a view, or a new `Source`
    a Python value wanted from a batched tensor        -> answered where all samples agree, else `Diverged`
    a mask that differs between samples, as an index   -> integers where all choose equally many, else `Diverged`
    a function that is made of others (`Composite`)    -> these, one by one
    anything else                                      -> plain vmap: exact, dense

What `fn` closes over is a constant: no graph starts there. Where `fn` writes samples into a tensor that it
made, or changes a function of parameters in place, it runs once more with a setting that allows it (`Retry`).
"""

import contextlib
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import _checkpoint, _masks
from . import _functorch as ft
from ._calls import (
    ANSWERS,
    ATTENTION,
    DRAWS,
    GRAPHS,
    IS_NESTABLE,
    MAKERS,
    REQUIRES_GRAD,
    SET_REQUIRES_GRAD,
    has_graph,
    is_attribute,
    is_composite,
    minds,
    opened,
    wants,
    writes,
)
from ._errors import PsgradError, UnsupportedOpError, name_of, place
from ._factors import Factor
from ._param import Param, Source, shares_memory
from ._pure import PURE, VIEWS
from ._registry import RULES, Call, Composite, Decline, Entry, Fold, Needs, Rule

_hooked = _checkpoint.hooked
_TRUTHS = (torch.Tensor.__bool__, torch.is_nonzero)


class Sink(Protocol):
    """Where the factors of a backward go."""

    @property
    def hasty(self) -> bool:
        """Whether it wants to know, when a factor comes, if more are to come for the same source."""

    def add(self, param: Param, factor: Factor, use: "Use | None") -> None: ...


class Use(NamedTuple):
    """One op's use of parameters, for `explain`."""

    params: tuple[Param, ...]
    op: str
    place: str
    rule: str | None  # None: plain vmap
    reason: str  # why no rule


class Diverged(BaseException):
    """Samples want different answers: `groups` are the rows that agree. Not for `fn` to catch."""

    def __init__(self, groups: list[Tensor]) -> None:
        self.groups = groups


def _no_autocast(device: str) -> contextlib.AbstractContextManager[None]:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


class Written(BaseException):
    """`fn` is about to change its sample in place: let it have a copy. Not for `fn` to catch."""


class Retry(BaseException):
    """`fn` is to run once more, with `setting` of the mode switched on. Not for `fn` to catch."""

    def __init__(self, setting: str) -> None:
        self.setting = setting


class _Run(NamedTuple):
    rule: Rule
    call: Call
    sink: Sink
    use: Use | None
    tracked: tuple[bool, ...]  # which of the call's parameters are ours to differentiate
    constants: bool  # whether one of the others is a tensor, which `fn` might change in place


class _Apply(torch.autograd.Function):
    """A rule on (N, ...) tensors in ordinary autograd: factors go to the sink, never through the graph.

    `anchor` is what makes the output require a gradient where the input does not.
    """

    @staticmethod
    def forward(ctx: Any, run: "_Run", dtype: torch.dtype | None, x: Tensor, anchor: Any) -> Any:
        rule, call = run.rule, run.call
        values = [p.value if isinstance(p, Param) else p for p in call.params]
        if dtype is not None:
            values = [None if v is None else v.to(dtype) for v in values]
        y, saved = rule.forward(call.options, x, *values)
        ctx.save_for_backward(x if rule.keeps_input else x.new_empty(1).expand(x.shape), *saved)
        ctx.run, ctx.values = run, values
        ctx.versions = [v._version for v in values if v is not None] if run.constants else None
        return y.data if y._is_view() else y  # a view made in here could not be changed in place by `fn`

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        rule, call, sink, use, tracked, _ = ctx.run
        x, *saved = ctx.saved_tensors
        if ctx.versions and [v._version for v in ctx.values if v is not None] != ctx.versions:
            raise RuntimeError(f"a weight of {rule.name} was changed in place before its backward")
        with _no_autocast(g.device.type):
            needs = Needs(ctx.needs_input_grad[2], tracked)
            apart = rule.apart and needs.x and True in tracked
            first = needs._replace(x=False) if apart else needs
            gx, factors = rule.backward(call.options, g, x, ctx.values, saved, first)
            for param, factor, track in zip(call.params, factors, tracked, strict=True):
                if track and factor is not None:
                    sink.add(param, factor, use)
            if apart:
                del factors, factor
                rest = Needs(True, (False,) * len(tracked))
                gx = rule.backward(call.options, g, x, ctx.values, saved, rest)[0]
        return None, None, gx, None


_apply = super(torch.autograd.Function, _Apply).apply  # without the checks for functorch, of which none is running


class Intercept(TorchFunctionMode):
    """One run of `fn` over N samples. Lives for one call in one thread."""

    def __init__(self, n: int, randomness: str, sink: Sink, log: list[Use] | None = None) -> None:
        super().__init__()
        self.n, self.randomness, self.sink, self.log = n, randomness, sink, log
        self.level, self.roots = -1, 0  # roots: how many sources are parameters as given
        self.sources: list[Source] = []
        self.tracked: dict[int, Param] = {}  # by the id of the wrapped tensor, which the Param keeps alive
        self.copies: dict[int, tuple[Param, Tensor]] = {}  # detached parameters, by their storage
        self.batch: set[int] = set()  # the storages of the caller's batch
        self.anchor: Tensor | None = None  # any leaf: what makes a rule's output require a gradient
        self.frozen: dict[int, Tensor] = {}  # leaves of other graphs that `fn` has met
        self.own: list[Tensor] = []  # leaves that `fn` has made, perhaps for torch.autograd.grad: their graphs stay
        self.pretended = False  # `fn` thinks of a tensor that it requires grad
        self.recomputing = False
        self.lifts = False  # a new tensor gets a sample axis of its own, so that samples can be written into it
        self.repeats = False  # functions of parameters alone are computed per sample, so that they can be written to

    def track(self, source: Source, wrapped: Tensor) -> None:
        """Recognise `wrapped` as `source` whenever `fn` uses it."""
        self.sources.append(source)
        self.tracked[id(wrapped)] = Param(source.value, source, wrapped)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _hooked() is not None:
            _checkpoint.follow(self._again)
        if (has_graph(args) or (kwargs and has_graph(kwargs.values()))) and not minds(func):
            args, kwargs = self._freeze(func, args, kwargs)
        if func in _masks.FUNCTIONS and ft.current_level() == self.level:
            call = _masks.rewritten(func, args, kwargs, self.n, self.level, _split)
            if call is not None:
                with self:
                    return call[0](*call[1], **call[2])
        rule = RULES.get(func)
        if rule is not None:
            return self._ruled(rule, func, args, kwargs)
        if func in ANSWERS:
            return self._answer(func, args, kwargs)
        if func in PURE:
            return self._pure(func, args, kwargs)
        if func == REQUIRES_GRAD and ft.current_level() == self.level and not _is_torchs(sys._getframe(1)):
            return self._requires_grad(args[0])
        if func in GRAPHS and ft.current_level() == self.level and ft.is_batched(args[0], self.level):
            return func(ft.lower(args[0], self.n, self.level))  # what autograd follows, which vmap hides
        if func is torch.Tensor.requires_grad_ and wants(*args[1:], **kwargs) and self._pretends(args[0]):
            return args[0]
        if func is IS_NESTABLE:
            return False
        if is_composite(func) and (func is ATTENTION or self._scan(args, kwargs)[0]):
            with self:  # torch's own Python: what it calls comes here again
                return opened(func)(*args, **kwargs)
        if writes(func, kwargs) and args and isinstance(args[0], Tensor):
            self._check_write(func, args, kwargs)
        elif self.lifts and func in MAKERS:
            return self._lifted(func(*args, **kwargs))
        if not is_attribute(func):
            if self.log is not None:
                self._note(func, args, kwargs, None, "no rule for this function")
            self._count(args, kwargs)
        out = func(*args, **kwargs)
        if func == SET_REQUIRES_GRAD and args[1]:
            self.own.append(args[0])
        elif kwargs.get("requires_grad"):
            self.own.append(out)
        return out

    # ---- what `fn` closes over ---------------------------------------------------------------------

    def _freeze(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments without the graphs of others: what `fn` closes over is a constant."""
        if ft.current_level() != self.level:  # there a graph may be another transform's
            return args, kwargs
        kept = 1 if writes(func, kwargs) else 0  # torch itself says what may be written
        frozen = (*args[:kept], *map(self._constant, args[kept:]))
        return frozen, {k: v if k == "out" else self._constant(v) for k, v in kwargs.items()}

    def _constant(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)([self._constant(v) for v in value])
        if not isinstance(value, Tensor) or not value.requires_grad or ft.is_differentiated(value):
            return value
        if self.own and (not value.is_leaf or _is_among(value, self.own)):
            return value
        if value.is_leaf and id(value) not in self.frozen:
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
        found = ft.lower(t, self.n, self.level).requires_grad
        if self.pretended and not found:
            raise RuntimeError("fn asks whether a tensor requires grad after it has called requires_grad_()")
        return found

    def _pretends(self, t: Tensor) -> bool:
        """Whether `t` can be said to require grad: for torch's checkpoints, models say so of activations.

        No graph starts there. Nobody notices: torch.autograd refuses a batched tensor, and then the loop runs.
        """
        if ft.current_level() != self.level or not ft.is_batched(t, self.level):
            return False
        self.pretended = self.pretended or not ft.lower(t, self.n, self.level).requires_grad
        return True

    @contextlib.contextmanager
    def _again(self) -> Iterator[None]:
        """The level and the mode once more, for what a checkpoint recomputes during the backward."""
        if ft.current_level() == self.level:
            yield
            return
        before = self.sources, self.tracked, self.copies, self.log, self.recomputing
        self.sources, self.tracked, self.copies = list(self.sources), dict(self.tracked), dict(self.copies)
        self.log, self.recomputing = None, True
        try:
            with ft.vmap_level(self.n, self.randomness) as level:
                if level != self.level:  # tensors of the first run belong to that level
                    raise RuntimeError("a checkpoint is recomputed inside another transform")
                with self:
                    yield
        finally:
            self.sources, self.tracked, self.copies, self.log, self.recomputing = before

    # ---- parameters among the arguments ------------------------------------------------------------

    def _resolve(self, value: Any) -> Any:
        """`value` with every tracked tensor replaced by its Param."""
        if type(value) in (list, tuple):
            return type(value)([self._resolve(v) for v in value])
        return self.tracked.get(id(value), value)

    def _scan(self, args: Any, kwargs: Any) -> tuple[list[Param], bool]:
        """The parameters among the arguments, and whether another tensor there differs between samples."""
        params: list[Param] = []
        samples = False
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, Tensor):
                param = self.tracked.get(id(value))
                if param is not None:
                    params.append(param)
                elif not samples:
                    samples = ft.is_batched(value, self.level)
            elif type(value) in (list, tuple):
                inner, sampled = self._scan(value, None)
                params += inner
                samples = samples or sampled
        return params, samples

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
        if ft.current_level() != self.level:
            return
        if not self.lifts and not ft.is_batched(target, self.level):
            params, samples = self._scan(args[1:], kwargs)
            if samples or params or (func in DRAWS and self.randomness == "different"):
                raise Retry("lifts")
        lowered = ft.lower(target, self.n, self.level)
        if any(shares_memory(lowered, source.value) for source in self.sources[self.roots :]):
            raise Retry("repeats")
        storage = lowered.untyped_storage()._cdata
        if storage in self.batch:
            raise Written
        if storage in self.copies:
            raise self._changes(func, self.copies[storage][0])

    def _lifted(self, new: Any) -> Any:
        """A new tensor with memory of its own for every sample."""
        if not isinstance(new, Tensor) or ft.current_level() != self.level or ft.is_batched(new, self.level):
            return new
        return ft.wrap(ft.below(new.expand(self.n, *new.shape).contiguous), self.level)

    def _note(self, func: Any, args: Any, kwargs: Any, rule: str | None, reason: str = "") -> Use | None:
        """Log a use of parameters, where somebody wants the log."""
        return None if self.log is None else self._listed(func, self._scan(args, kwargs)[0], rule, reason)

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

    def _count(self, args: Any, kwargs: Any) -> None:
        """Gradients will come for the parameters among the arguments, in ways that are not ours to see."""
        if self.sink.hasty and not self.recomputing:
            for param in self._scan(args, kwargs)[0]:
                param.source.uses += 2

    def _plain(self, func: Any, args: Any, kwargs: Any, reason: str) -> Any:
        self._note(func, args, kwargs, None, reason)
        self._count(args, kwargs)
        return func(*args, **kwargs)

    def _ruled(self, rule: Entry, func: Any, args: Any, kwargs: Any) -> Any:
        params, samples = self._scan(args, kwargs)
        if not params and (not samples or (isinstance(rule, Rule) and rule.only_params)):
            return func(*args, **kwargs)
        if isinstance(rule, Composite):
            with self:  # its parts come here again
                return rule.run(*args, **kwargs)
        if ft.current_level() != self.level:
            return self._plain(func, args, kwargs, "inside another transform")
        if isinstance(rule, Fold):
            return self._folded(rule, func, args, kwargs)
        if not samples and rule.only_params:  # a weight made of weights, not a weight at work
            if self.repeats:
                return self._plain(func, args, kwargs, "a function of parameters is changed in place")
            return self._once(func, args, kwargs, params)
        try:
            call = rule.bind(*self._resolve(args), **{k: self._resolve(v) for k, v in kwargs.items()})
        except PsgradError:
            raise
        except TypeError:  # a wrong call: torch's own message is the better one
            return func(*args, **kwargs)
        if isinstance(call, Decline):
            return self._plain(func, args, kwargs, call.reason)
        if call.is_complex:
            return self._plain(func, args, kwargs, "complex numbers")
        if (
            not samples
            and isinstance(call.x, Param)
            and not any(isinstance(p, Tensor) for p in call.params)
            and not self.repeats
        ):
            return self._once(func, args, kwargs, params)  # a standardised weight, say
        tracked = tuple([isinstance(p, Param) for p in call.params])
        constants = [p for p in call.params if isinstance(p, Tensor)]
        if any(ft.is_batched(p, self.level) for p in constants):
            return self._plain(func, args, kwargs, "the weight differs between samples")
        if not self.recomputing:
            for param in params:
                param.source.uses += 1
        use = None
        if self.log is not None:
            others = [p for p in call.others if isinstance(p, Param)]
            use = self._listed(func, [p for p in params if p not in others], rule.name)
            self._listed(func, others, None, "an input of the op, not its weight")
        inputs = [t.wrapped if isinstance(t, Param) else t for t in (call.x, *call.others)]
        kept = call._replace(x=None, others=())  # the inputs are autograd's to keep
        run = _Run(rule, kept, self.sink, use, tracked, bool(constants))
        out = ft.below(self._apply, run, *[None if t is None else ft.lower(t, self.n, self.level) for t in inputs])
        return ft.wrap(out, self.level)

    def _apply(self, run: _Run, x: Tensor, *others: Tensor | None) -> Tensor:
        """A rule's call on the (N, ...) input, one level below vmap."""
        rule, call = run.rule, run.call
        device = x.device.type
        dtype = None
        if call.before is not None:
            x = call.before(x, *others)
        anchor = self.anchor if any(run.tracked) else None
        if not torch.is_autocast_enabled(device):
            y: Tensor = _apply(run, dtype, x, anchor)
        else:
            kind = rule.autocast
            if kind.endswith(" off the CPU"):
                kind = "keep" if device == "cpu" else kind.removesuffix(" off the CPU")
            if kind == "lower" and x.dtype != torch.float64:
                dtype = torch.get_autocast_dtype(device)
                x = x.to(dtype)
            elif kind == "float32" and x.dtype != torch.float64:
                x = x.float()
            with torch.autocast(device, enabled=False):
                y = _apply(run, dtype, x, anchor)
        return y if call.after is None else call.after(y, *others)

    def _folded(self, rule: Fold, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            bound = rule.bind(self.randomness, *args, **kwargs)
        except TypeError:  # a wrong call: torch's own message is the better one
            return func(*args, **kwargs)
        if isinstance(bound, Decline):
            return self._plain(func, args, kwargs, bound.reason)
        self._note(func, args, kwargs, None, "folded into the batch; no rule for a parameter here")
        self._count(args, kwargs)
        tensors, options = bound
        lowered = [None if t is None else ft.lower(t, self.n, self.level) for t in tensors]
        return ft.wrap(ft.below(rule.run, options, *lowered), self.level)

    def _pure(self, func: Any, args: Any, kwargs: Any) -> Any:
        params, samples = self._scan(args, kwargs)
        if not params:
            out = func(*args, **kwargs)
            return self._lifted(out) if self.lifts and func in MAKERS else out
        if samples or ft.current_level() != self.level or (self.repeats and func not in VIEWS):
            return self._plain(func, args, kwargs, "no rule for this function")
        return self._once(func, args, kwargs, params)

    def _traced(self, a: Any) -> Any:
        """`a` with every tracked tensor replaced by its value, as ordinary autograd follows it."""
        if type(a) in (list, tuple):
            return type(a)([self._traced(v) for v in a])
        return ft.below(self.tracked[id(a)].traced) if id(a) in self.tracked else a

    def _once(self, func: Any, args: Any, kwargs: Any, params: list[Param]) -> Any:
        """A function of parameters alone: computed once, tracked as a view or as a new source."""
        grad_enabled = torch.is_grad_enabled()

        with _checkpoint.unhooked():  # its backward runs where a checkpoint cannot recompute
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
                    self.copies[flat[i].untyped_storage()._cdata] = home, flat[i]
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
        leaf = ft.below(lambda: value.expand(self.n, *value.shape).requires_grad_())
        wrapped = ft.wrap(leaf, self.level)

        def named() -> str:
            return f"{op}({', '.join(dict.fromkeys(p.source.name for p in params))})"

        self.track(Source(len(self.sources), named, value, leaf, graph), wrapped)
        return wrapped

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A Python value from a batched tensor, where all samples give the same."""
        t = args[0]
        if ft.current_level() != self.level or not ft.is_batched(t, self.level):
            return func(*args, **kwargs)
        rows = ft.lower(t, self.n, self.level).detach()
        flat = rows.reshape(self.n, -1)
        _split(flat != 0 if func in _TRUTHS else flat.trunc() if func is torch.Tensor.__int__ else flat)
        return func(rows[0], *args[1:], **kwargs)


def _is_torchs(frame: types.FrameType) -> bool:
    """Whether checkpoints or a transform's own code run in `frame`: they mean the tensor as they see it."""
    return _checkpoint.asks(frame) or str(frame.f_globals.get("__name__", "")).startswith("torch._functorch")


def _is_among(t: Tensor, others: Iterable[Tensor]) -> bool:
    return any(shares_memory(t, other) for other in others)


def _split(rows: Tensor) -> None:
    """Diverged, where the rows (N, ...) are not all equal."""
    if not bool(((rows == rows[:1]) | (rows.isnan() & rows[:1].isnan())).all()):
        group = torch.unique(rows, dim=0, return_inverse=True)[1]
        groups = [(group == k).nonzero().flatten() for k in range(int(group.max()) + 1)]
        if len(groups) > 1:
            raise Diverged(groups)
