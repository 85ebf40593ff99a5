"""A rule as a composable autograd Function: vmap, grad, jvp and double backward work through it.

`vmap(grad(f))` reaches two hand-written vmaps: that of the op, and that of its gradient, where a rule's
backward gives all per-sample gradients at once. Everything else about the two Functions (their double
backward, forward mode, vmap over a weight that differs between samples) is torch's own derivative of
torch's own op, so it is right for any nesting of transforms.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .engine.batched import Outcome
from .engine.ladder import no_outcome
from .engine.problem import Problem
from .errors import PsgradError, is_out_of_memory
from .factors import costs
from .registry.rule import RULES, Call, Composite, Decline, Needs, Rule
from .torch_ import levels, operators
from .torch_.functions import GRAPHS, is_hook, scales_by_frequency
from .torch_.storage import is_view
from .torch_.watching import CUSTOM_FUNCTION_CALL


class _Spec(NamedTuple):
    """A bound call but for its tensors.

    `samples`: whether x has the sample axis in front. `summed`: a gradient of the parameters is that of all samples
    together, as where a function of the whole batch is differentiated.
    """

    rule: Rule
    options: Any
    samples: bool
    needs: Needs
    summed: bool = False


def _forward(spec: _Spec, x: Tensor, *params: Tensor | None) -> tuple[Tensor, ...]:
    y, saved = spec.rule.forward(spec.options, x if spec.samples else x[None], *params)
    y = y if spec.samples else y[0]
    return y.data if is_view(y) else y, *saved  # a view made in here could not be changed in place outside


def _reference(spec: _Spec) -> Callable[..., Tensor]:
    """The op as a plain function that torch differentiates, any number of times."""
    plain = spec.rule.plain or (lambda *args: spec.rule.forward(*args)[0])
    if spec.samples:
        return lambda x, *params: plain(spec.options, x, *params)
    return lambda x, *params: plain(spec.options, x[None], *params)[0]


def _tensors(args: Any) -> list[int]:
    return [i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point()]


def _partial(function: Callable[..., Any], args: Any, where: list[int]) -> Callable[..., Any]:
    """`function` of the floating tensors among `args` alone."""

    def of(*some: Tensor) -> Any:
        full = list(args)
        for i, t in zip(where, some, strict=True):
            full[i] = t
        return function(*full)

    return of


def _gradient(spec: _Spec) -> Callable[..., tuple[Tensor, ...]]:
    """The op's gradient as a plain differentiable function of (g, x, *params)."""

    def one(g: Tensor, x: Tensor, *params: Tensor | None) -> tuple[Tensor, ...]:
        args = (x, *params)
        where = [i for i in _tensors(args) if (spec.needs.x, *spec.needs.params)[i]]
        alone = _partial(_reference(spec._replace(samples=spec.summed)), args, where)
        pull: Any = torch.func.vjp(alone, *(args[i] for i in where))[1]
        found: tuple[Tensor, ...] = pull(g)
        return found

    if not spec.samples or spec.summed:
        return one
    return lambda g, x, *params: torch.vmap(one, in_dims=(0, 0, *[None] * len(params)))(g, x, *params)


def _push(function: Callable[..., Any], primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    """The derivative of `function` in one direction."""
    try:
        return torch.func.jvp(function, primals, tangents)[1]
    except RuntimeError as error:
        if "Nested forward mode" not in str(error):
            raise
    # inside torch.autograd.forward_ad, where forward mode does not nest: by two reverse passes
    out, pull = torch.func.vjp(function, *primals)[:2]
    zeros = torch.zeros_like(out) if isinstance(out, Tensor) else tuple(map(torch.zeros_like, out))
    return torch.func.vjp(pull, zeros)[1](tangents)[0]


class _Op(torch.autograd.Function):
    """The op. Besides its output it returns what the backward wants, which is not differentiable."""

    @staticmethod
    def forward(spec: _Spec, x: Tensor, *params: Tensor | None) -> tuple[Tensor, ...]:
        return _forward(spec, x, *params)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        spec, x, *params = inputs
        ctx.spec, ctx.count, ctx.saved = spec, len(params), len(output) - 1
        ctx.save_for_backward(x, *params, *output[1:])
        ctx.save_for_forward(x, *params)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, *_: Any) -> Any:
        x, *rest = ctx.saved_tensors
        params, saved = rest[: ctx.count], rest[ctx.count :]
        _, need_x, *need_params = ctx.needs_input_grad
        if g is None:
            return None, None, *[None] * ctx.count
        spec = ctx.spec._replace(needs=Needs(need_x, tuple(need_params)), summed=ctx.spec.samples)
        found = iter(_OpGrad.apply(spec, len(saved), g, x, *saved, *params))
        return None, *(next(found) if need else None for need in (need_x, *need_params))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> Any:
        args = ctx.saved_tensors
        where = [i for i, t in enumerate(tangents) if t is not None]
        alone = _partial(_reference(ctx.spec), args, where)
        out = _push(alone, tuple(args[i] for i in where), tuple(tangents[i] for i in where))
        return out, *[None] * ctx.saved

    @staticmethod
    def vmap(info: Any, in_dims: Any, spec: _Spec, x: Tensor, *params: Tensor | None) -> Any:
        _, x_dim, *dims = in_dims
        if any(d is not None for d in dims):  # the weight differs between samples: torch's own way
            y = torch.vmap(_reference(spec), in_dims=(x_dim, *dims))(x, *params)
            return (y, *(y.new_empty(info.batch_size, 0) for _ in range(spec.rule.saves))), 0  # nobody reads these
        n, x = info.batch_size, x.movedim(x_dim, 0)
        if spec.samples:
            y, *saved = _Op.apply(spec, x.flatten(0, 1), *params)
            y = y.unflatten(0, (n, -1))
        else:
            y, *saved = _Op.apply(spec._replace(samples=True), x, *params)
        return (y, *(t.unflatten(0, (n, -1)) for t in saved)), 0


class _OpGrad(torch.autograd.Function):
    """The op's gradient: of x, and of each parameter, per sample where the call has samples and they are not summed."""

    @staticmethod
    def forward(spec: _Spec, count: int, g: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        saved, params = rest[:count], rest[count:]
        if not spec.samples:
            g, x = g[None], x[None]
        gx, factors = spec.rule.backward(spec.options, g, x, params, saved, spec.needs)
        found = [] if gx is None else [gx]
        for p, factor in zip(params, factors, strict=True):
            if factor is None:
                continue
            if spec.summed:
                found.append(factor.weighted_sum().reshape(p.shape).to(p.dtype))
            else:
                found.append(factor.dense().reshape(len(x), *p.shape).to(p.dtype))
        return tuple(t if spec.samples else t[0] for t in found)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        spec, count, g, x, *rest = inputs
        ctx.spec, ctx.count = spec, count
        ctx.save_for_backward(g, x, *rest[count:])
        ctx.save_for_forward(g, x, *rest[count:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        args = [t if t is None else levels.alive(t) for t in ctx.saved_tensors]
        where = _tensors(args)
        pull: Any = torch.func.vjp(_partial(_gradient(ctx.spec), args, where), *(args[i] for i in where))[1]
        found: list[Tensor | None] = [None] * len(args)
        for i, grad in zip(where, pull(cotangents), strict=True):
            found[i] = grad
        g, x, *params = found
        return None, None, g, x, *[None] * ctx.count, *params

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, g: Any, x: Any, *rest: Any) -> Any:
        args, tangents = ctx.saved_tensors, (g, x, *rest[ctx.count :])
        where = [i for i, t in enumerate(tangents) if t is not None]
        alone = _partial(_gradient(ctx.spec), args, where)
        return _push(alone, tuple(args[i] for i in where), tuple(tangents[i] for i in where))

    @staticmethod
    def vmap(info: Any, in_dims: Any, spec: _Spec, count: int, g: Tensor, x: Tensor, *rest: Any) -> Any:
        _, _, *dims = in_dims
        params = rest[count:]
        if any(d is not None for d in dims[2 + count :]):
            function = _gradient(spec)
            return torch.vmap(function, in_dims=(*dims[:2], *dims[2 + count :]))(g, x, *params), 0

        def front(t: Any, dim: int | None) -> Any:
            return t.movedim(dim, 0) if dim is not None else t.expand(info.batch_size, *t.shape)

        g, x, *saved = (front(t, d) for t, d in zip((g, x, *rest[:count]), dims[: 2 + count], strict=True))
        if spec.summed:
            return _sums_of_calls(spec, g, x, saved, params), 0
        # as one call on all their samples would have saved it; the kernels take contiguous memory for granted
        saved = [t.flatten(0, 1).contiguous() for t in saved]
        if not spec.samples:
            return _OpGrad.apply(spec._replace(samples=True), count, g, x, *saved, *params), 0
        flat = _OpGrad.apply(spec, count, g.flatten(0, 1), x.flatten(0, 1), *saved, *params)
        return tuple(t.unflatten(0, (info.batch_size, -1)) for t in flat), 0


def _sums_of_calls(spec: _Spec, g: Tensor, x: Tensor, saved: list[Tensor], params: Any) -> tuple[Tensor, ...]:
    """Gradients of B calls with N samples each, summed over the samples of a call: x and g are (B, N, ...).

    As many calls at once as keep the gradients of their samples in a tile; a call that does not fit is summed by the
    rule, without them.
    """
    large = max((p.nbytes for p, need in zip(params, spec.needs.params, strict=True) if need), default=0)
    step, parts = costs.tile(x.shape[1] * large), []
    for start in range(0, len(x), step):
        some = slice(start, start + step)
        if step == 1:
            one = (t[start].contiguous() for t in (g, x, *saved))
            parts.append(tuple(t[None] for t in _OpGrad.apply(spec, len(saved), *one, *params)))
            continue
        rows = (t[some].flatten(0, 1).contiguous() for t in (g, x, *saved))
        flat = _OpGrad.apply(spec._replace(summed=False), len(saved), *rows, *params)
        each = [t.unflatten(0, (-1, x.shape[1])) for t in flat]
        parts.append((*each[: spec.needs.x], *(t.sum(1) for t in each[spec.needs.x :])))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def composable(rule: Rule, call: Call) -> Tensor:
    """A bound call on ordinary tensors, through the composable Functions."""

    def lifted(change: Callable[..., Tensor] | None, t: Tensor) -> Tensor:
        if change is None:
            return t
        others = [None if o is None else o[None] for o in call.others]
        return change(t[None], *others)[0]  # `before` and `after` expect a sample axis

    spec = _Spec(rule, call.options, False, Needs(True, tuple(p is not None for p in call.params)))
    y: Tensor = _Op.apply(spec, lifted(call.before, call.x), *call.params)[0]
    return lifted(call.after, y)


# ---- rules in place of torch's own functions -------------------------------------------------------------

COMPOSABLE: dict[Callable[..., Any], Rule] = {}  # the functions that `use_rules` replaces; `ops.py` fills it


def run_composable(rule: Rule, func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
    """`func` through its rule's composable Functions; as torch has it where the rule declines."""
    call = rule.bind(*args, **kwargs)
    if isinstance(call, Decline) or not isinstance(call.x, Tensor) or call.is_complex:
        result: Tensor = func(*args, **kwargs)
        return result
    return composable(rule, call)


class _UseRules(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, rule = kwargs or {}, RULES.get(func)
        if isinstance(rule, Composite) and levels.current_level() is not None:  # torch's own serves without a transform
            with self:
                return rule.run(*args, **kwargs)
        rule = COMPOSABLE.get(func)
        return func(*args, **kwargs) if rule is None else run_composable(rule, func, args, kwargs)


@contextmanager
def use_rules() -> Iterator[None]:
    """Inside, `vmap(grad(f))`, `jacrev`, `hessian` ... of your own use psgrad's rules for stock modules.

    A batch or instance norm in training normalises as ever, but leaves its running statistics alone.

    >>> import torch, psgrad
    >>> from torch.func import functional_call, grad, vmap
    >>> model, x = torch.nn.Conv1d(1, 2, 3), torch.randn(4, 1, 8)
    >>> loss = lambda p, x: functional_call(model, p, (x,)).square().sum()
    >>> with psgrad.use_rules():
    ...     grads = vmap(grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), x)
    >>> grads["weight"].shape
    torch.Size([4, 2, 1, 3])
    """
    with _UseRules():
        yield


# ---- quantities inside somebody else's transform ---------------------------------------------------------


def composed(problem: Problem, step: int | None = None) -> tuple[list[Tensor], Outcome]:
    """Gradients by `vmap(grad(fn))` with the rules as composable Functions, `step` samples at a time."""
    if problem.n == 0:
        return [p.new_empty(0, *p.shape) for p in problem.params], no_outcome(problem)
    loss = _Loss(problem)
    per_sample = torch.func.grad_and_value(loss, has_aux=True)
    with use_rules():
        grads, (values, aux) = torch.vmap(
            per_sample, in_dims=(None, 0), randomness=problem.randomness, chunk_size=step
        )(problem.params, loss.rows)
    return grads, Outcome(values, aux, loss.aux_spec)


def composed_sum(problem: Problem, weights: Tensor) -> tuple[list[Tensor], Outcome] | None:
    """The gradient of the losses, each counting with its weight: nothing of N x P is held.

    None where that will not do: Python of the user's runs in the backward, which need not be linear in its cotangent,
    or losses are in half precision, so that weights must not go through it; or torch refuses `grad(vmap(fn))`, which it
    does not of `vmap(grad(fn))`.
    """
    loss, mode = _Loss(problem), _WatchBackward()
    each = torch.vmap(loss, in_dims=(None, 0), randomness=problem.randomness)

    def total(params: list[Tensor]) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        values, aux = each(params, loss.rows)
        if not mode.is_linear or values.dtype.itemsize < 4:  # in which weights would be rounded
            raise _UnfitForWeights
        return values.mul(weights.to(values.device, values.dtype)).sum(), (values, aux)

    try:
        with mode:
            sums, (values, aux) = torch.func.grad(total, has_aux=True)(problem.params)
    except _UnfitForWeights:
        return None
    except Exception as error:
        if isinstance(error, PsgradError) or is_out_of_memory(error):
            raise
        return None
    return sums, Outcome(values, aux, loss.aux_spec)


class _Loss:
    """`fn` as a function of flat parameters and the rows of one sample, to be vmapped over `rows`."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.rows = [t for t, b in zip(problem.batch, problem.batched, strict=True) if b]
        self.aux_spec: optree.PyTreeSpec | None = None

    def __call__(self, params: list[Tensor], rows: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        each, problem = iter(rows), self.problem
        sample = [next(each) if b else t for t, b in zip(problem.batch, problem.batched, strict=True)]
        out = problem.call(params, sample)
        self.aux_spec = out.aux_spec
        return out.loss, out.aux


class _UnfitForWeights(BaseException):
    """Raised in a run where weights must not go through the backward."""


class _WatchBackward(_UseRules):
    """The rules; and whether what runs in the backward may be no derivative, nor linear.

    That is Python of the user's, in a Function, an operator, a hook; and an embedding scaled by frequency, of whose
    backward torch has no derivative by the cotangent.
    """

    is_linear = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is CUSTOM_FUNCTION_CALL:
            self.is_linear &= args[0] in (_Op, _OpGrad)
        elif (
            func in GRAPHS
            or is_hook(func)
            or operators.is_opaque(func)
            or scales_by_frequency(func, args, kwargs or {})
        ):
            self.is_linear = False
        rule = COMPOSABLE.get(func)
        if rule is not None and rule.native and rule.plain is None:  # torch sums over samples itself, in half the time
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)
