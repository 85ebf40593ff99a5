"""Ops and the shapes that they have in real models, for `benchmarks.layers`.

N is such that a call takes 0.5 to 60 ms and N gradients stay under 200 MB.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.registry.rule import RULES, Call
from psgrad.rules import recurrence


@dataclass(frozen=True, eq=False)
class Case:
    """An op at a shape. `op` takes a sample, `whole` all of them, with the same numbers in its output."""

    label: str
    x: Tensor  # (N, ...)
    params: list[Tensor]
    op: Callable[..., Tensor]
    whole: Callable[..., Tensor]
    rule: Any  # an entry of psgrad's registry
    bind: Callable[..., Any]  # the rule's call, from a sample and parameters
    with_forward: bool = False  # times are of forward and backward


def flat(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`op`, which takes a batch, on samples (N, B, ...) that are batches."""
    return lambda x, *params: op(x.flatten(0, 1), *params)


def norm(label: str, function: Any, shape: Sequence[int], channels: int, call: Callable[..., Any]) -> Case:
    """`call(function, x, w, b)` on x (N, 1, C, ...), a batch of one for each sample."""
    op, bind = partial(call, function), partial(call, RULES[function].bind)
    weights = [torch.randn(channels), torch.randn(channels)]
    return Case(label, torch.randn(shape), weights, op, flat(op), RULES[function], bind)


def group_norm() -> Iterator[Case]:
    shapes = [(256, 16, 32), (256, 32, 16), (64, 64, 32), (64, 128, 16), (128, 256, 8), (32, 64, 56), (128, 512, 7)]
    for n, c, s in shapes:
        call = lambda f, x, w, b: f(x, 8, w, b)
        yield norm(f"8 groups of {c} channels, {s} x {s}", F.group_norm, (n, 1, c, s, s), c, call)


def instance_norm() -> Iterator[Case]:
    for n, c, s in [(64, 32, 32), (64, 64, 16), (4, 64, 128), (16, 128, 32)]:
        call = lambda f, x, w, b: f(x, None, None, w, b)
        yield norm(f"{c} channels, {s} x {s}", F.instance_norm, (n, 1, c, s, s), c, call)


def batch_norm() -> Iterator[Case]:
    for n, c, s in [(256, 16, 32), (16, 64, 56), (32, 256, 14), (64, 512, 7)]:
        mean, var = torch.randn(c), torch.rand(c) + 0.5
        call = lambda f, x, w, b, mean=mean, var=var: f(x, mean, var, w, b)
        yield norm(f"eval, {c} channels, {s} x {s}", F.batch_norm, (n, 1, c, s, s), c, call)


TOKENS = [("the benchmark's GPT", 64, 128, 256), ("ViT-S", 32, 197, 384), ("BERT, GPT-2", 16, 128, 768)]
TOKENS += [("GPT-2", 8, 512, 768), ("GPT-2", 4, 1024, 768), ("one position", 2048, 1, 1024)]


def rows(label: str, function: Any, x: Tensor, params: list[Tensor], call: Callable[..., Any]) -> Case:
    """`call(function, x, *params)`, the same for a sample and for all."""
    op, rule = partial(call, function), RULES[function]
    return Case(label, x, params, op, op, rule, partial(call, rule.bind))


def layer_norm() -> Iterator[Case]:
    for name, n, t, d in TOKENS:
        call = lambda f, x, w, b, d=d: f(x, (d,), w, b, 1e-5)
        yield rows(f"{name}: {t} x {d}", F.layer_norm, torch.randn(n, t, d), [torch.randn(d), torch.randn(d)], call)


def rms_norm() -> Iterator[Case]:
    for name, n, t, d in TOKENS:
        call = lambda f, x, w, d=d: f(x, (d,), w, 1e-5)
        yield rows(f"{name}: {t} x {d}", F.rms_norm, torch.randn(n, t, d), [torch.randn(d)], call)


def matrices(function: Any, shapes: Sequence[tuple[str, int, int, int, int]], bias: bool) -> Iterator[Case]:
    for name, n, t, i, o in shapes:
        x = torch.randn(n, i) if t == 1 else torch.randn(n, t, i)
        params = [torch.randn(o, i) / i**0.5, torch.randn(o)] if bias else [torch.randn(i, o) / i**0.5]
        label = f"{name}: {i} to {o}" + (f", length {t}" if t > 1 else "")
        yield rows(label, function, x, params, lambda f, x, *params: f(x, *params))


def linear() -> Iterator[Case]:
    shapes = [
        ("MLP", 64, 1, 784, 1024),
        ("MLP", 32, 1, 1024, 1024),
        ("ResNet head", 64, 1, 512, 1000),
        ("digits", 1024, 1, 64, 128),
    ]
    yield from matrices(F.linear, shapes, True)


LONG = [
    ("the benchmark's GPT", 8, 128, 256, 768),
    ("the benchmark's GPT", 8, 128, 256, 1024),
    ("the benchmark's GPT", 2, 1024, 256, 1024),
    ("its head", 8, 128, 256, 1000),
    ("ViT-S", 4, 197, 384, 1536),
    ("BERT", 4, 128, 768, 768),
    ("BERT", 4, 128, 768, 3072),
    ("GPT-2", 2, 512, 768, 768),
]


def linear_long() -> Iterator[Case]:
    yield from matrices(F.linear, LONG, True)


def matmul() -> Iterator[Case]:
    yield from matrices(torch.matmul, [("MLP", 32, 1, 1024, 1024), LONG[1], LONG[5]], False)


def embedding() -> Iterator[Case]:
    for name, n, t, v, d in [
        ("the benchmark's GPT", 32, 128, 1000, 256),
        ("words", 16, 256, 10_000, 128),
        ("positions of GPT-2", 8, 1024, 1024, 768),
        ("BERT", 1, 512, 30_522, 768),
        ("GPT-2, narrow", 4, 1024, 50_257, 128),
    ]:
        index, table = torch.randint(v, (n, t)), [torch.randn(v, d)]
        yield rows(f"{name}: {t} of {v} x {d}", F.embedding, index, table, lambda f, x, w: f(x, w))


def embedding_bag() -> Iterator[Case]:
    rule = RULES[F.embedding_bag]
    for n, t, v, d, mode in [(32, 64, 5000, 64, "mean"), (16, 256, 10_000, 128, "sum"), (8, 512, 20_000, 128, "mean")]:
        op = lambda x, w, mode=mode: F.embedding_bag(x, w, mode=mode)
        bind = lambda x, w, mode=mode: rule.bind(x, w, mode=mode)
        index = torch.randint(v, (n, 1, t))
        yield Case(f"{mode} of {t} of {v} x {d}", index, [torch.randn(v, d)], op, flat(op), rule, bind)


def attention() -> Iterator[Case]:
    rule = RULES[F.scaled_dot_product_attention]
    for n, h, t, e, causal in [(8, 4, 128, 64, True), (4, 12, 197, 64, False), (2, 12, 512, 64, True)]:
        op = lambda x, causal=causal: F.scaled_dot_product_attention(*x, is_causal=causal)
        whole = lambda x, op=op: op(x.unbind(1))
        bind = lambda x, causal=causal: rule.bind("different", *x, is_causal=causal)
        label = f"{h} heads of {e}, length {t}" + (", causal" if causal else "")
        yield Case(label, torch.randn(n, 3, h, t, e), [], op, whole, rule, bind)


def recurrent(function: Any, rule: Any, gates: int, states: int, shapes: Sequence[tuple[int, ...]]) -> Iterator[Case]:
    for n, length, i, h in shapes:
        bound = h**-0.5
        sizes = [(gates * h, i), (gates * h, h), (gates * h,), (gates * h,)]
        params = [torch.empty(size).uniform_(-bound, bound) for size in sizes]

        def op(x: Tensor, *params: Tensor, batch_first: bool = False, h: int = h) -> Tensor:
            zeros = x.new_zeros(1, x.shape[0 if batch_first else 1], h)
            hx = (zeros, zeros) if states == 2 else zeros
            out: Tensor = function(x, hx, params, True, 1, 0.0, False, False, batch_first)[0]
            return out

        def bind(x: Tensor, *params: Any, h: int = h, length: int = length) -> Call:
            weights = (*params, None) if states == 2 else params
            call = recurrence.bind(x, (x.new_zeros(1, h),) * states, weights, False)
            return call._replace(after=lambda y: y[:, : length * h])

        whole = lambda x, *params, op=op: op(x[:, :, 0], *params, batch_first=True)
        yield Case(
            f"{i} to {h}, length {length}",
            torch.randn(n, length, 1, i),
            params,
            op,
            whole,
            rule,
            bind,
            with_forward=True,
        )


_RECURRENT = [(32, 64, 64, 128), (32, 64, 128, 128), (16, 100, 128, 256), (8, 64, 512, 512)]

# An op with its shapes; a new one is a function above and a line here.
FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    "group_norm": group_norm,
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "instance_norm": instance_norm,
    "batch_norm": batch_norm,
    "linear": linear,
    "linear-long": linear_long,
    "matmul": matmul,
    "embedding": embedding,
    "embedding_bag": embedding_bag,
    "attention": attention,
    "lstm": partial(recurrent, torch.lstm, recurrence.LSTM, 4, 2, _RECURRENT),
    "gru": partial(recurrent, torch.gru, recurrence.GRU, 3, 1, _RECURRENT),
    "rnn": partial(recurrent, torch.rnn_tanh, recurrence.RNN_TANH, 1, 1, _RECURRENT),
}


def broadcast(function: Any) -> Iterator[Case]:
    for n, shape, of_w in [
        (64, (128, 256), (256,)),
        (16, (128, 768), (768,)),
        (16, (197, 384), (197, 384)),
        (32, (64, 32, 32), (64, 1, 1)),
        (4096, (1000,), (1000,)),
    ]:
        label = f"{' x '.join(map(str, shape))} and {' x '.join(map(str, of_w))}"
        yield rows(label, function, torch.randn(n, *shape), [torch.randn(of_w)], lambda f, x, w: f(x, w))


FAMILIES |= {"mul": partial(broadcast, torch.mul), "add": partial(broadcast, torch.add)}
