"""Activation checkpointing inside `fn`, by torch's own function: exact, without the loop, and it saves memory."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import psgrad
from psgrad.streaming.budget import Meter

N, WIDTH = 5, 6
recomputed = partial(checkpoint, use_reentrant=False)


@pytest.fixture(autouse=True)
def float64() -> None:
    torch.set_default_dtype(torch.float64)  # conftest puts it back


def _block(width: Any = WIDTH) -> Any:
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh())


class Net(nn.Module):
    """Blocks in a row; `how` calls one."""

    def __init__(self, blocks: Any, how: Any) -> None:
        super().__init__()
        self.blocks, self.how = nn.Sequential(*blocks), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "sequential":
            return checkpoint_sequential(self.blocks, 2, x, use_reentrant=False)
        for block in self.blocks:
            x = self.how(block, x)
        return x


def _plainly(block: Any, x: Any) -> Any:
    return block(x)


def _nested(block: Any, x: Any) -> Any:
    return recomputed(lambda x: recomputed(block, recomputed(torch.sin, x)), x)


HOWS = {
    "module": recomputed,
    "method": lambda block, x: recomputed(block.forward, x),
    "partial": lambda block, x: recomputed(partial(block.__call__), x),
    "lambda": lambda block, x: recomputed(lambda: block(x)),
    "keyword": lambda block, x: recomputed(block, input=x),
    "module as argument": lambda block, x: recomputed(_plainly, block, x),
    "no early stop": lambda block, x: recomputed(block, x, early_stop=False),
    "generators not kept": lambda block, x: recomputed(block, x, preserve_rng_state=False),
    "nested": _nested,
    "sequential": "sequential",
}


def _pair(how: Any, blocks: Any) -> Any:
    """`(fn, params)` with checkpoints, and fn without: both with parameters that the module does not have."""
    net = Net(blocks, how)
    fn, params = psgrad.from_module(net, F.mse_loss)
    plain = Net(blocks, (lambda block, x: block(torch.sin(x))) if how is _nested else _plainly)
    return fn, {k: p + torch.randn_like(p) for k, p in params.items()}, psgrad.from_module(plain, F.mse_loss)[0]


def _batch() -> Any:
    return torch.randn(N, 3, WIDTH), torch.randn(N, 3, WIDTH)


def _close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how", HOWS)
def test_exact(how: Any) -> None:
    """Equal to fn without checkpoints, for other parameters than the module's own; a loop would warn."""
    fn, params, plain = _pair(HOWS[how], [_block() for _ in range(3)])
    batch = _batch()
    _close(psgrad.per_sample_grads(fn, params, batch), psgrad.testing.loop_grads(plain, params, batch))


@pytest.mark.parametrize("how", ["module", "sequential"])
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_dropout_repeats_in_the_recomputation(how: Any, chunk_size: Any, randomness: Any) -> None:
    fn, params, plain = _pair(HOWS[how], [nn.Sequential(_block(), nn.Dropout(0.4)) for _ in range(3)])
    batch, grads = _batch(), []
    for function in (fn, plain):
        torch.manual_seed(3)
        grads.append(psgrad.per_sample_grads(function, params, batch, chunk_size=chunk_size, randomness=randomness))
    _close(*grads)


def test_by_functional_call() -> None:
    net = Net([_block(), _block()], recomputed)
    params = {k: torch.randn_like(p) for k, p in net.named_parameters()}
    plain = Net(net.blocks, _plainly)
    x = torch.randn(N, WIDTH)
    _close(
        psgrad.per_sample_grads(lambda p, x: functional_call(net, p, (x,)).square().sum(), params, x),
        psgrad.testing.loop_grads(lambda p, x: functional_call(plain, p, (x,)).square().sum(), params, x),
    )


def test_parameters_and_samples_that_the_function_closes_over() -> None:
    """Bare parameters, functions of parameters, branches and plain vmap inside a checkpoint."""

    def fn(p: Any, sample: Any, through: Any) -> Any:
        x, mask = sample

        def inner(h: Any) -> Any:
            w = torch.tanh(p["w"]) * p["s"]
            h = F.linear(h, w, p["b"]) * mask + torch.cumsum(p["b"], 0)
            return h.cos() if h.sum() > 0 else h.sin() * p["s"]

        return through(inner, through(inner, x)).square().sum()

    params = {"w": torch.randn(WIDTH, WIDTH), "b": torch.randn(WIDTH), "s": torch.randn(())}
    batch = torch.randn(N, WIDTH), torch.randn(N, WIDTH)
    _close(
        psgrad.per_sample_grads(lambda p, s: fn(p, s, recomputed), params, batch),
        psgrad.testing.loop_grads(lambda p, s: fn(p, s, lambda f, x: f(x)), params, batch),
    )


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_parameters_as_arguments(nested: Any, hooks: Any) -> None:
    """Recognised in the recomputation, also where somebody else's hooks have kept them."""

    def layer(x: Any, w: Any, b: Any) -> Any:
        return torch.tanh(F.linear(x, w, b)) * b

    def inner(x: Any, w: Any, b: Any) -> Any:
        return recomputed(layer, x, w, b) if nested else layer(x, w, b)

    def fn(p: Any, x: Any, through: Any) -> Any:
        return through(lambda x, w, b: inner(inner(x, w, b), w, b), torch.sin(x), p["w"], p["b"]).square().sum()

    params, x = {"w": torch.randn(WIDTH, WIDTH), "b": torch.randn(WIDTH)}, torch.randn(N, WIDTH)
    others = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with others if hooks else contextlib.nullcontext():
        found = psgrad.per_sample_grads(lambda p, x: fn(p, x, recomputed), params, x)
    _close(found, psgrad.testing.loop_grads(lambda p, x: fn(p, x, lambda f, *args: f(*args)), params, x))


def test_one_model_in_threads() -> None:
    """Each recomputation sees the parameters of its own call."""
    fn, params, plain = _pair(recomputed, [_block() for _ in range(3)])
    batch = _batch()
    each = [{k: p * (1 + i) for k, p in params.items()} for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(psgrad.per_sample_grads, fn, p, batch) for p in each * 8]
    for run, p in zip(runs, each * 8, strict=True):
        _close(run.result(), psgrad.testing.loop_grads(plain, p, batch))


def test_parametrised_weights_inside() -> None:
    blocks = [nn.Sequential(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Tanh()) for _ in range(2)]
    fn, params, plain = _pair(recomputed, blocks)
    batch = _batch()
    _close(psgrad.per_sample_grads(fn, params, batch), psgrad.testing.loop_grads(plain, params, batch))


@pytest.mark.parametrize("leaf", ["argument", "method", "attribute"])
def test_leaves_that_the_function_makes(leaf: Any) -> None:
    """Models make a tensor require grad so that torch's checkpoint has something to differentiate."""

    def shift(x: Any) -> Any:
        zeros = torch.zeros(WIDTH, requires_grad=leaf == "argument")
        if leaf == "method":
            x = x.requires_grad_()
        if leaf == "attribute":
            zeros.requires_grad = True
        return x + zeros

    params, x = torch.randn(WIDTH), torch.randn(N, WIDTH)
    _close(
        psgrad.per_sample_grads(lambda p, x: recomputed(lambda x: shift(x).sin() * p, x).square().sum(), params, x),
        psgrad.testing.loop_grads(lambda p, x: (x.sin() * p).square().sum(), params, x),
    )


def test_autocast_inside() -> None:
    """The recomputation runs at the precision of the first run."""
    x, params = torch.randn(N, 3, WIDTH, dtype=torch.float32), torch.randn(WIDTH, WIDTH, dtype=torch.float32)

    def fn(p: Any, x: Any, through: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return through(lambda h: F.linear(h, p).tanh(), through(lambda h: F.linear(h, p).tanh(), x)).sum()

    found = psgrad.per_sample_grads(lambda p, x: fn(p, x, recomputed), params, x)
    assert torch.equal(found, psgrad.per_sample_grads(lambda p, x: fn(p, x, lambda f, x: f(x)), params, x))


def test_rules_run_and_are_reported_once() -> None:
    fn, params, plain = _pair(recomputed, [_block(), _block()])
    batch = _batch()
    assert psgrad.testing.rules_used(fn, params, batch) == psgrad.testing.rules_used(plain, params, batch)
    rows = [(row.param, row.how, row.factor) for row in psgrad.explain(fn, params, batch).rows]
    assert sorted(rows) == sorted((r.param, r.how, r.factor) for r in psgrad.explain(plain, params, batch).rows)


def _peak(how: Any) -> Any:
    blocks = [nn.Sequential(_block(32), _block(32), _block(32)) for _ in range(8)]
    fn, params = psgrad.from_module(Net(blocks, how), F.mse_loss)
    batch = torch.randn(4, 200, 32), torch.randn(4, 200, 32)
    out = {k: p.new_empty(4, *p.shape) for k, p in params.items()}
    with Meter([*params.values(), *batch, *out.values()]) as meter:
        psgrad.per_sample_grads(fn, params, batch, out=out)
    return meter.peak, fn, params, batch


def test_memory_goes_down() -> None:
    """Eight blocks of nine layers: kept are eight inputs, and one block's activations at a time."""
    (plain, *_), (less, fn, params, batch) = _peak(_plainly), _peak(recomputed)
    assert less < 0.35 * plain
    assert psgrad.explain(fn, params, batch).peak_bytes < 0.4 * plain
    found = psgrad.per_sample_grads(fn, params, batch, max_bytes=plain // 3)
    _close(found, psgrad.per_sample_grads(fn, params, batch))


def test_the_model_is_left_as_it_was() -> None:
    net = Net([nn.Sequential(_block(), nn.BatchNorm1d(3))], recomputed).eval()
    state = {k: (id(t), t.clone()) for k, t in net.state_dict(keep_vars=True).items()}
    fn, params = psgrad.from_module(net, F.mse_loss)
    psgrad.per_sample_grads(fn, params, _batch())
    assert {k: id(t) for k, t in net.state_dict(keep_vars=True).items()} == {k: i for k, (i, _) in state.items()}
    assert all(torch.equal(t, state[k][1]) for k, t in net.state_dict().items())


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 2


class Doubled(nn.Module):
    def __init__(self, how: Any) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "one op":
            return OldStyle.apply(x)
        return x * (2 + 0 * float(x.detach().numpy().sum()))


@pytest.mark.parametrize("how", ["one op", "all"])
def test_in_the_loop(how: Any) -> None:
    """Where something else needs a loop: recomputed with the parameters of the call there too."""
    fn, params, plain = _pair(recomputed, [_block(), nn.Sequential(Doubled(how), _block())])
    batch = _batch()
    with pytest.warns(psgrad.FallbackWarning, match="a part of fn" if how == "one op" else "psgrad runs fn"):
        found = psgrad.per_sample_grads(fn, params, batch)
    _close(found, psgrad.testing.loop_grads(plain, params, batch))


class Hidden:
    """Holds a model where nobody looks for one."""

    __slots__ = ("model",)

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, x: Any) -> Any:
        return self.model(x)


def test_parameters_that_the_recomputation_does_not_find() -> None:
    """Refused: torch itself would silently compute with the module's own parameters."""
    hidden = Hidden(_block())

    def fn(p: Any, x: Any) -> Any:
        return functional_call(Net([hidden.model], lambda _, x: recomputed(hidden, x)), p, (x,)).square().sum()

    params = {f"blocks.0.{k}": torch.randn_like(p) for k, p in hidden.model.named_parameters()}
    with pytest.raises(psgrad.UnsupportedOpError) as caught:
        psgrad.per_sample_grads(fn, params, torch.randn(N, WIDTH))
    head, _, remedy = str(caught.value).splitlines()
    assert head == "a checkpointed function does not find its parameters again when it is recomputed"
    assert remedy == "  hand them to it as arguments, or make fn with psgrad.from_module."
