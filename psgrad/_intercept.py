"""The mode under which `fn` runs: it sends the uses of parameters to rules and answers control flow.

`fn` runs once, inside vmap, on parameters that are batched tensors with stride 0 along the samples. Any
torch function it calls passes through `Intercept`:

    a rule for it, and a parameter among its operands  -> the rule, once for the whole batch
    parameters only, no sample in sight                -> computed once: a view, or a new `Source`
    a Python value wanted from a batched tensor        -> answered where all samples agree, else `Diverged`
    a function that is made of others (`Composite`)    -> these, one by one
    anything else                                      -> plain vmap: exact, dense
"""

import contextlib
import types
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from . import _functorch as ft
from ._errors import PsgradError, UnsupportedOpError, name_of, place
from ._factors import Factor
from ._param import Param, Source, shares_memory
from ._pure import PURE, VIEWS
from ._registry import RULES, Call, Composite, Decline, Entry, Fold, Needs, Rule

_ANSWERS: frozenset[Callable[..., Any]] = frozenset(
    getattr(torch.Tensor, name) for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")
) | {torch.is_nonzero}


_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_IS_NESTABLE = torch._nested_tensor_from_mask_left_aligned  # asked by TransformerEncoder for its fused path


class Sink(Protocol):
    """Where the factors of a backward go."""

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
            gx, factors = rule.backward(call.options, g, x, ctx.values, saved, needs)
            for param, factor, track in zip(call.params, factors, tracked, strict=True):
                if track and factor is not None:
                    sink.add(param, factor, use)
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

    def track(self, source: Source, wrapped: Tensor) -> None:
        """Recognise `wrapped` as `source` whenever `fn` uses it."""
        self.sources.append(source)
        self.tracked[id(wrapped)] = Param(source.value, source, wrapped)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is not None:
            return self._ruled(rule, func, args, kwargs)
        if func in _ANSWERS:
            return self._answer(func, args, kwargs)
        if func in PURE:
            return self._pure(func, args, kwargs)
        if func is _REQUIRES_GRAD and ft.current_level() == self.level:  # vmap hides it
            return ft.lower(args[0], self.n, self.level).requires_grad
        if func is _IS_NESTABLE:
            return False
        if _is_composite(func) and self._scan(args, kwargs)[0]:
            with self:  # torch's own Python: what it calls comes here again
                return _opened(func)(*args, **kwargs)
        if _writes(func, kwargs) and args and isinstance(args[0], Tensor):
            self._check_write(func, args[0])
        if self.log is not None and not _is_attribute(func):
            self._note(func, args, kwargs, None, "no rule for this function")
        return func(*args, **kwargs)

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

    def _check_write(self, func: Any, target: Tensor) -> None:
        """`fn` changes `target` in place: never the caller's parameters or batch."""
        param = self.tracked.get(id(target))
        if param is not None and not torch.is_grad_enabled():
            if param.source.index < self.roots:
                raise self._changes(func, param)
            raise RuntimeError("a function of parameters is changed in place")  # the loop can do that
        if ft.current_level() != self.level:
            return
        storage = ft.lower(target, self.n, self.level).untyped_storage()._cdata
        if storage in self.batch:
            raise Written
        if storage in self.copies:
            raise self._changes(func, self.copies[storage][0])

    def _note(self, func: Any, args: Any, kwargs: Any, rule: str | None, reason: str = "") -> Use | None:
        """Log a use of parameters, where somebody wants the log."""
        if self.log is None or not (params := self._scan(args, kwargs)[0]):
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

    def _plain(self, func: Any, args: Any, kwargs: Any, reason: str) -> Any:
        self._note(func, args, kwargs, None, reason)
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
            return self._once(func, args, kwargs, params)
        try:
            call = rule.bind(*self._resolve(args), **{k: self._resolve(v) for k, v in kwargs.items()})
        except PsgradError:
            raise
        except TypeError:  # a wrong call: torch's own message is the better one
            return func(*args, **kwargs)
        if isinstance(call, Decline):
            return self._plain(func, args, kwargs, call.reason)
        if not samples and isinstance(call.x, Param) and not any(isinstance(p, Tensor) for p in call.params):
            return self._once(func, args, kwargs, params)  # a standardised weight, say
        tracked = tuple([isinstance(p, Param) for p in call.params])
        constants = [p for p in call.params if isinstance(p, Tensor)]
        if any(ft.is_batched(p, self.level) for p in constants):
            return self._plain(func, args, kwargs, "the weight differs between samples")
        use = None if self.log is None else self._note(func, args, kwargs, rule.name)
        run = _Run(rule, call, self.sink, use, tracked, bool(constants))
        x = call.x.wrapped if isinstance(call.x, Param) else call.x
        out = ft.below(self._apply, run, ft.lower(x, self.n, self.level))
        return ft.wrap(out, self.level)

    def _apply(self, run: _Run, x: Tensor) -> Tensor:
        """A rule's call on the (N, ...) input, one level below vmap."""
        rule, call = run.rule, run.call
        device = x.device.type
        dtype = None
        if call.before is not None:
            x = call.before(x)
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
        return y if call.after is None else call.after(y)

    def _folded(self, rule: Fold, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            bound = rule.bind(self.randomness, *args, **kwargs)
        except TypeError:  # a wrong call: torch's own message is the better one
            return func(*args, **kwargs)
        if isinstance(bound, Decline):
            return self._plain(func, args, kwargs, bound.reason)
        self._note(func, args, kwargs, None, "folded into the batch; no rule for a parameter here")
        tensors, options = bound
        lowered = [None if t is None else ft.lower(t, self.n, self.level) for t in tensors]
        return ft.wrap(ft.below(rule.run, options, *lowered), self.level)

    def _pure(self, func: Any, args: Any, kwargs: Any) -> Any:
        params, samples = self._scan(args, kwargs)
        if not params:
            return func(*args, **kwargs)
        if samples or ft.current_level() != self.level:
            return self._plain(func, args, kwargs, "no rule for this function")
        return self._once(func, args, kwargs, params)

    def _once(self, func: Any, args: Any, kwargs: Any, params: list[Param]) -> Any:
        """A function of parameters alone: computed once, tracked as a view or as a new source."""
        grad_enabled = torch.is_grad_enabled()

        def value_of(a: Any) -> Any:
            if type(a) in (list, tuple):
                return type(a)([value_of(v) for v in a])
            return ft.below(self.tracked[id(a)].traced) if id(a) in self.tracked else a

        values = func(*map(value_of, args), **{k: value_of(v) for k, v in kwargs.items()})
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
        if not bool(((flat == flat[:1]) | (flat.isnan() & flat[:1].isnan())).all()):
            group = torch.unique(flat, dim=0, return_inverse=True)[1]
            groups = [(group == k).nonzero().flatten() for k in range(int(group.max()) + 1)]
            if len(groups) > 1:
                raise Diverged(groups)
        return func(rows[0], *args[1:], **kwargs)


_ATTRIBUTES = frozenset(["__get__", "dim", "size", "numel", "stride", "__len__", "is_floating_point", "is_complex"])


def _is_attribute(func: Any) -> bool:
    return getattr(func, "__name__", "") in _ATTRIBUTES


def _writes(func: Any, kwargs: Any) -> bool:
    """Whether `func` changes its first argument: add_, __iadd__, __setitem__, relu(inplace=True)."""
    name = getattr(func, "__name__", "")
    if name.endswith("__"):
        return name == "__setitem__" or name in _INPLACE
    return name.endswith("_") or bool(kwargs.get("inplace"))


_INPLACE = frozenset(
    f"__i{op}__" for op in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)


def _is_composite(func: Any) -> bool:
    """Whether `func` is torch's own Python, made of other torch functions."""
    return type(func) is types.FunctionType and func.__module__ == "torch.nn.functional"


def _no(*_: Any) -> bool:
    return False


@cache
def _opened(func: types.FunctionType) -> Callable[..., Any]:
    """`func` without its own hand-over to modes, so that the mode sees the functions it is made of."""
    scope = func.__globals__ | dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _no
    )
    opened = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened
