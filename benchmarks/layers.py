"""`layers`: each op's rule beside its ordinary backward, at the shapes that ops have in real models.

The ordinary backward gives the gradient of the input and the summed ones of the parameters; a rule's backward gives
the gradient of the input and N gradients of each parameter, written into buffers that are there. It may take `BAR`
times what the ordinary one and a plain fill of these buffers take. Recurrent layers are timed with their forward.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .internals import RULES, Call, Fold, Needs, Param, Source, recurrence
from .measuring import ORDINARY, Measured, beside_ordinary
from .results import Bar, Plan, Row, Run

BAR = Bar(1.15, base=ORDINARY)
CONTENDERS = ("ordinary", "fill", "psgrad", "vmap", "forward", "psgrad forward")
Op = Callable[..., Any]
Sides = tuple[Op, Op]  # forward; backward from its output and a cotangent: gradients of the input, then of parameters


def plans(args: Namespace, run: Run) -> Iterator[Plan]:
    for family in args.only:
        torch.manual_seed(0)
        rows = (Row(case.label, len(case.x), partial(measure, case, args.rounds), [BAR]) for case in FAMILIES[family]())
        yield Plan("time", family, ORDINARY, CONTENDERS, rows, 44)


class Case(NamedTuple):
    """An op at a shape: a call takes 0.5 to 60 ms, and N gradients stay under 200 MB."""

    label: str
    x: Tensor  # (N, ...)
    params: list[Tensor]
    op: Op  # takes a sample
    whole: Op  # takes all of them, with the same numbers in its output
    rule: Any  # an entry of psgrad's registry
    bind: Op  # the rule's call, from a sample and parameters
    with_forward: bool = False  # times are of forward and backward


def case(label: str, function: Op, x: Tensor, params: list[Tensor], call: Op | None = None, flat: bool = False) -> Case:
    """`call(function, x, *params)`, the same for a sample and for all; `flat`: a sample is a batch of its own."""
    op, bind = (partial(call, f) if call else f for f in (function, RULES[function].bind))
    whole = (lambda x, *params: op(x.flatten(0, 1), *params)) if flat else op
    return Case(label, x, params, op, whole, RULES[function], bind)


def images(label: str, function: Any, sizes: Sequence[tuple[int, int, int]], call: Op) -> Iterator[Case]:
    """A norm of N images with C channels, S x S."""
    for n, c, s in sizes:
        x, params = torch.randn(n, 1, c, s, s), [torch.randn(c), torch.randn(c)]
        yield case(f"{label}{c} channels, {s} x {s}", function, x, params, call, flat=True)


def tokens(function: Any, params: int) -> Iterator[Case]:
    """A norm of vectors, with so many parameters."""
    sizes = [("the benchmark's GPT", 64, 128, 256), ("ViT-S", 32, 197, 384), ("BERT, GPT-2", 16, 128, 768)]
    sizes += [("GPT-2", 8, 512, 768), ("GPT-2", 4, 1024, 768), ("one position", 2048, 1, 1024)]
    for name, n, t, d in sizes:
        weights, call = [torch.randn(d) for _ in range(params)], lambda f, x, *w: f(x, (x.shape[-1],), *w, eps=1e-5)
        yield case(f"{name}: {t} x {d}", function, torch.randn(n, t, d), weights, call)


def matrices(function: Any, sizes: Sequence[tuple[str, int, int, int, int]], bias: bool) -> Iterator[Case]:
    for name, n, t, i, o in sizes:
        x = torch.randn(n, i) if t == 1 else torch.randn(n, t, i)
        params = [torch.randn(o, i) / i**0.5, torch.randn(o)] if bias else [torch.randn(i, o) / i**0.5]
        yield case(f"{name}: {i} to {o}" + (f", length {t}" if t > 1 else ""), function, x, params)


def embedding() -> Iterator[Case]:
    sizes = [("the benchmark's GPT", 32, 128, 1000, 256), ("words", 16, 256, 10_000, 128)]
    sizes += [("positions of GPT-2", 8, 1024, 1024, 768), ("BERT", 1, 512, 30_522, 768)]
    for name, n, t, v, d in [*sizes, ("GPT-2, narrow", 4, 1024, 50_257, 128)]:
        yield case(f"{name}: {t} of {v} x {d}", F.embedding, torch.randint(v, (n, t)), [torch.randn(v, d)])


def embedding_bag() -> Iterator[Case]:
    for n, t, v, d, mode in [(32, 64, 5000, 64, "mean"), (16, 256, 10_000, 128, "sum"), (8, 512, 20_000, 128, "mean")]:
        call, index = lambda f, x, w, mode=mode: f(x, w, mode=mode), torch.randint(v, (n, 1, t))
        yield case(f"{mode} of {t} of {v} x {d}", F.embedding_bag, index, [torch.randn(v, d)], call, flat=True)


def attention() -> Iterator[Case]:
    rule = RULES[F.scaled_dot_product_attention]
    for n, h, t, e, causal in [(8, 4, 128, 64, True), (4, 12, 197, 64, False), (2, 12, 512, 64, True)]:
        op = lambda x, causal=causal: F.scaled_dot_product_attention(*x, is_causal=causal)
        whole, bind = lambda x, op=op: op(x.unbind(1)), lambda x, c=causal: rule.bind("different", *x, is_causal=c)
        label = f"{h} heads of {e}, length {t}" + (", causal" if causal else "")
        yield Case(label, torch.randn(n, 3, h, t, e), [], op, whole, rule, bind)


def recurrent(function: Any, rule: Any, gates: int, states: int) -> Iterator[Case]:
    for n, length, i, h in [(32, 64, 64, 128), (32, 64, 128, 128), (16, 100, 128, 256), (8, 64, 512, 512)]:
        sizes = [(gates * h, i), (gates * h, h), (gates * h,), (gates * h,)]
        params = [torch.empty(size).uniform_(-(h**-0.5), h**-0.5) for size in sizes]

        def op(x: Tensor, *params: Tensor, batch_first: bool = False, h: int = h) -> Any:
            zeros = x.new_zeros(1, x.shape[0 if batch_first else 1], h)
            hx = (zeros, zeros) if states == 2 else zeros
            return function(x, hx, params, True, 1, 0.0, False, False, batch_first)[0]

        def bind(x: Tensor, *params: Any, h: int = h, length: int = length) -> Call:
            weights = (*params, None) if states == 2 else params
            call = recurrence.bind(x, (x.new_zeros(1, h),) * states, weights, False)
            return call._replace(after=lambda y: y[:, : length * h])

        whole, x = lambda x, *params, op=op: op(x[:, :, 0], *params, batch_first=True), torch.randn(n, length, 1, i)
        yield Case(f"{i} to {h}, length {length}, with forward", x, params, op, whole, rule, bind, with_forward=True)


def broadcast(function: Any) -> Iterator[Case]:
    sizes = [(64, (128, 256), (256,)), (16, (128, 768), (768,)), (16, (197, 384), (197, 384))]
    for n, shape, of_w in [*sizes, (32, (64, 32, 32), (64, 1, 1)), (4096, (1000,), (1000,))]:
        label = f"{' x '.join(map(str, shape))} and {' x '.join(map(str, of_w))}"
        yield case(label, function, torch.randn(n, *shape), [torch.randn(of_w)])


GROUPED = [(256, 16, 32), (256, 32, 16), (64, 64, 32), (64, 128, 16), (128, 256, 8), (32, 64, 56), (128, 512, 7)]
INSTANCES = [(64, 32, 32), (64, 64, 16), (4, 64, 128), (16, 128, 32)]
EVALUATED = [(256, 16, 32), (16, 64, 56), (32, 256, 14), (64, 512, 7)]
STATS = torch.stack([torch.linspace(-1, 1, 512), torch.linspace(0.5, 1.5, 512)])  # means and variances
MLP = ("MLP", 32, 1, 1024, 1024)
SHORT = [("MLP", 64, 1, 784, 1024), MLP, ("ResNet head", 64, 1, 512, 1000), ("digits", 1024, 1, 64, 128)]
LONG = [("the benchmark's GPT", 8, 128, 256, 768), ("the benchmark's GPT", 8, 128, 256, 1024)]
LONG += [("the benchmark's GPT", 2, 1024, 256, 1024), ("its head", 8, 128, 256, 1000), ("ViT-S", 4, 197, 384, 1536)]
LONG += [("BERT", 4, 128, 768, 768), ("BERT", 4, 128, 768, 3072), ("GPT-2", 2, 512, 768, 768)]

# An op with its shapes; a new one is a function above and a line here.
FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "group_norm": partial(images, "8 groups of ", F.group_norm, GROUPED, lambda f, x, w, b: f(x, 8, w, b)),
    "layer_norm": partial(tokens, F.layer_norm, 2),
    "rms_norm": partial(tokens, F.rms_norm, 1),
    "instance_norm": partial(images, "", F.instance_norm, INSTANCES, lambda f, x, w, b: f(x, None, None, w, b)),
    "batch_norm": partial(
        images, "eval, ", F.batch_norm, EVALUATED, lambda f, x, w, b: f(x, *STATS[:, : x.shape[1]], w, b)
    ),
    "linear": partial(matrices, F.linear, SHORT, True),
    "linear-long": partial(matrices, F.linear, LONG, True),
    "matmul": partial(matrices, torch.matmul, [MLP, LONG[1], LONG[5]], False),
    "embedding": embedding,
    "embedding_bag": embedding_bag,
    "attention": attention,
    "lstm": partial(recurrent, torch.lstm, recurrence.LSTM, 4, 2),
    "gru": partial(recurrent, torch.gru, recurrence.GRU, 3, 1),
    "rnn": partial(recurrent, torch.rnn_tanh, recurrence.RNN_TANH, 1, 1),
    "mul": partial(broadcast, torch.mul),
    "add": partial(broadcast, torch.add),
}


def measure(case: Case, rounds: int) -> dict[str, Measured]:
    """The times of each contender; answers are compared first."""
    buffers = [p.new_zeros(len(case.x), *p.shape) for p in case.params]
    (forward, backward), (rule_forward, rule_backward) = ordinary(case), ruled(case, buffers)
    y, z = forward(), rule_forward()
    g = torch.randn_like(y)
    h, each_g = g.reshape(z.shape), g.reshape(len(case.x), *case.op(case.x[0], *case.params).shape)
    torch.testing.assert_close(z, y.reshape(z.shape), atol=1e-3, rtol=1e-3)
    summed, each = backward(y, g), rule_backward(z, h)  # gradients of the input, if it has any, then of parameters
    for i, (a, b) in enumerate(zip(summed, each, strict=True)):
        b = b if i < len(summed) - len(case.params) else b.sum(0)
        torch.testing.assert_close(b.reshape(a.shape), a, atol=1e-4 * float(a.abs().max()), rtol=1e-3)
    calls: dict[str, Op] = {
        "ordinary": lambda: backward(forward() if case.with_forward else y, g),
        "psgrad": lambda: rule_backward(rule_forward() if case.with_forward else z, h),
        "fill": lambda: [b.fill_(0.0) for b in buffers],
        "forward": forward,
        "psgrad forward": rule_forward,
        "vmap": lambda: torch.vmap(partial(vjp, case))(case.x, each_g),
    }
    found = beside_ordinary(calls, rounds)
    if not case.with_forward:  # vmap runs the forward, too, which the others do not
        found["vmap"] = replace(found["vmap"], best=(found["vmap"].best or 0) - (found["forward"].best or 0))
    return found


def vjp(case: Case, x: Tensor, g: Tensor) -> Any:
    """The gradients of one sample."""
    op, given = (case.op, [x, *case.params]) if x.is_floating_point() else (partial(case.op, x), case.params)
    return torch.func.vjp(op, *given)[1](g)


def ordinary(case: Case) -> Sides:
    """Autograd on the whole batch."""
    x, params = case.x.detach(), [p.detach().requires_grad_() for p in case.params]
    wanted = [x.requires_grad_(), *params] if x.is_floating_point() else params
    return lambda: case.whole(x, *params), lambda y, g: torch.autograd.grad(y, wanted, g, retain_graph=True)


class _Apply(torch.autograd.Function):
    """A rule's call in autograd, as psgrad's engine has it; the factors go into buffers."""

    @staticmethod
    def forward(ctx: Any, rule: Any, call: Any, buffers: Sequence[Tensor], x: Tensor, anchor: Tensor) -> Any:
        ctx.values = [p.value if isinstance(p, Param) else p for p in call.params]
        ctx.run = rule, call, buffers
        y, saved = rule.forward(call.options, x, *ctx.values)
        ctx.save_for_backward(x, *saved)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (rule, call, buffers), (x, *saved) = ctx.run, ctx.saved_tensors
        needs = Needs(ctx.needs_input_grad[3], tuple(isinstance(p, Param) for p in call.params))
        gx, factors = rule.backward(call.options, g, x, ctx.values, saved, needs)
        for param, factor in zip(call.params, factors, strict=True):
            if isinstance(param, Param):
                buffer = buffers[param.source.index]
                factor.dense(buffer if param.whole else param.part.rows(buffer))
        return None, None, None, gx, None


def ruled(case: Case, buffers: list[Tensor]) -> Sides:
    """psgrad's rule."""
    x, anchor, rule = case.x.detach(), torch.zeros((), requires_grad=True), case.rule
    x.requires_grad_(x.is_floating_point())
    grad = partial(torch.autograd.grad, retain_graph=True, allow_unused=True)
    if isinstance(rule, Fold):
        tensors, options = case.bind(x[0])
        absent = [None for t in tensors if t is None]
        return lambda: rule.run(options, *x.unbind(1), *absent), lambda y, g: grad(y, x, g)
    call = case.bind(x[0].detach(), *(Param(p, Source(i, str, p, p), p) for i, p in enumerate(case.params)))

    def forward() -> Any:
        y = _Apply.apply(rule, call, buffers, x if call.before is None else call.before(x), anchor)
        others = (x, *call.others[1:]) if call.others else ()  # of an embedding bag: its indices
        return y if call.after is None else call.after(y, *others)

    def backward(y: Tensor, g: Tensor) -> list[Tensor]:
        found = grad(y, x if x.requires_grad else anchor, g)
        return [*found, *buffers] if x.requires_grad else buffers

    return forward, backward
