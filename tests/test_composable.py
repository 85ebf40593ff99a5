"""The rules inside transforms of one's own: psgrad.ops, psgrad.use_rules(), and per_sample_grads nested."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import psgrad
from psgrad import composable as _composable
from psgrad.composable import COMPOSABLE

from .cases import CASES, Case, default_dtype, loss

pytestmark = [
    pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning"),
]

N = 3


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def assert_close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(optree.tree_leaves(found), optree.tree_leaves(wanted))


# ---- stock modules under use_rules() -----------------------------------------------------------------------


class Stock(NamedTuple):
    make: Callable[[], nn.Module]
    x: Callable[[], Tensor]  # a batch of N samples


def _running(norm: Any) -> nn.Module:
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm.eval()


class _Twofold(nn.Module):
    """A bilinear map of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(3, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x[..., 1:].sin())


class Output(nn.Module):
    """A recurrent layer's output and its last states as one tensor; with initial states made of the input."""

    def __init__(self, layer: nn.RNNBase, given: bool = False) -> None:
        super().__init__()
        self.layer, self.given = layer, given

    def forward(self, x: Tensor) -> Tensor:
        state = x.sum(0)[None] if self.given else None
        out, last = self.layer(x, (state, state) if self.given and isinstance(self.layer, nn.LSTM) else state)
        lasts = last if isinstance(last, tuple) else (last,)
        return torch.cat([out.flatten(), *(t.flatten() for t in lasts)])


MODULES = {
    "linear": Stock(lambda: nn.Linear(3, 4), lambda: draw(N, 2, 3)),
    "linear-vector": Stock(lambda: nn.Linear(3, 2, bias=False), lambda: draw(N, 3)),
    "bilinear": Stock(lambda: _Twofold(), lambda: draw(N, 2, 3)),
    "conv1d-groups": Stock(lambda: nn.Conv1d(2, 4, 3, 2, 1, groups=2), lambda: draw(N, 2, 2, 5)),
    "conv2d-same": Stock(lambda: nn.Conv2d(2, 2, 3, padding="same", dilation=2), lambda: draw(N, 2, 4, 3)),
    "conv2d-even": Stock(lambda: nn.Conv2d(1, 2, (2, 3), padding="same"), lambda: draw(N, 1, 3, 3)),
    "conv2d-pointwise": Stock(lambda: nn.Conv2d(2, 3, 1, bias=False), lambda: draw(N, 2, 2, 3, 3)),
    "conv3d": Stock(lambda: nn.Conv3d(1, 2, 2), lambda: draw(N, 1, 2, 3, 2)),
    "conv-transpose1d": Stock(lambda: nn.ConvTranspose1d(2, 4, 3, 2, 1, 1, groups=2), lambda: draw(N, 2, 2, 3)),
    "conv-transpose2d-beyond-reach": Stock(
        lambda: nn.ConvTranspose2d(1, 2, 2, padding=1, dilation=3, output_padding=2), lambda: draw(N, 1, 2, 2)
    ),
    "rms-norm": Stock(lambda: nn.RMSNorm((3, 2)), lambda: draw(N, 2, 3, 2)),
    "rms-norm-no-weight": Stock(
        lambda: nn.Sequential(nn.Linear(3, 3), nn.RMSNorm(3, 0.1, elementwise_affine=False)), lambda: draw(N, 3)
    ),
    "group-norm": Stock(lambda: nn.GroupNorm(2, 4), lambda: draw(N, 2, 4, 2)),
    "layer-norm": Stock(lambda: nn.LayerNorm((3, 2)), lambda: draw(N, 2, 3, 2)),
    "layer-norm-no-bias": Stock(lambda: nn.LayerNorm(3, bias=False), lambda: draw(N, 3)),
    "instance-norm": Stock(lambda: nn.InstanceNorm1d(2, affine=True), lambda: draw(N, 2, 2, 3)),
    "instance-norm-eval": Stock(
        lambda: _running(nn.InstanceNorm1d(2, affine=True, track_running_stats=True)), lambda: draw(N, 2, 2, 3)
    ),
    "batch-norm": Stock(lambda: nn.BatchNorm1d(2, track_running_stats=False), lambda: draw(N, 3, 2, 2)),
    "batch-norm-eval": Stock(lambda: _running(nn.BatchNorm1d(2)), lambda: draw(N, 2, 2, 2)),
    "embedding": Stock(lambda: nn.Embedding(4, 2, padding_idx=2), lambda: torch.randint(4, (N, 3))),
    "embedding-by-frequency": Stock(
        lambda: nn.Embedding(3, 2, scale_grad_by_freq=True), lambda: torch.randint(3, (N, 4))
    ),
    "lstm": Stock(lambda: Output(nn.LSTM(1, 2, bidirectional=True)), lambda: draw(N, 2, 1, 1)),
    "lstm-projection": Stock(lambda: Output(nn.LSTM(1, 2, 2, proj_size=1)), lambda: draw(N, 2, 2, 1)),
    "lstm-states": Stock(lambda: Output(nn.LSTM(2, 2, bias=False), True), lambda: draw(N, 2, 1, 2)),
    "gru": Stock(lambda: Output(nn.GRU(1, 2, bidirectional=True)), lambda: draw(N, 2, 1, 1)),
    "gru-states": Stock(lambda: Output(nn.GRU(2, 2), True), lambda: draw(N, 2, 1, 2)),
    "rnn": Stock(lambda: Output(nn.RNN(1, 2, 2)), lambda: draw(N, 2, 2, 1)),
    "rnn-relu": Stock(lambda: Output(nn.RNN(2, 2, nonlinearity="relu"), True), lambda: draw(N, 2, 1, 2)),
    "network": Stock(
        lambda: nn.Sequential(nn.Conv1d(1, 2, 2), nn.GroupNorm(1, 2), nn.Tanh(), nn.Linear(3, 3), nn.LayerNorm(3)),
        lambda: draw(N, 1, 1, 4),
    ),
}


class Setting(NamedTuple):
    """A module as functions of its parameters and its input, both for one sample and for N."""

    f: Callable[..., Tensor]  # (params, x) -> loss
    out: Callable[..., Tensor]  # (params, x) -> output
    p: dict[str, Tensor]
    x: Tensor


def setting(name: str) -> Setting:
    with default_dtype(torch.float64):
        module = MODULES[name].make()
    params = {k: p.detach() + 0.3 * torch.randn_like(p) for k, p in module.named_parameters()}

    def out(params: Any, x: Tensor) -> Tensor:
        return functional_call(module, params, (x,))

    return Setting(lambda p, x: loss(out(p, x)), out, params, MODULES[name].x())


# ---- the reference -----------------------------------------------------------------------------------------
#
# Torch 2.13 is not always right itself: grad(vmap(grad)) of a layer norm, a batch norm or an embedding scaled by
# frequency, the double backward of a layer norm without a weight, forward mode over the double backward of a
# norm. So the reference has loops in place of torch's batching, and elementary ops in place of fused norms.


def _normalised(x: Tensor, axes: list[int], eps: float) -> Tensor:
    return (x - x.mean(axes, keepdim=True)) / torch.sqrt(x.var(axes, correction=0, keepdim=True) + eps)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, trailing: int) -> Tensor:
    tail = (..., *[None] * trailing)
    x = x if weight is None else x * weight[tail]
    return x if bias is None else x + bias[tail]


def _layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    return _affine(_normalised(x, list(range(-len(shape), 0)), eps), weight, bias, 0)


def _group_norm(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    y = _normalised(x.reshape(len(x), groups, -1), [-1], eps).reshape(x.shape)
    return _affine(y, weight, bias, x.dim() - 2)


def _channel_norm(x: Tensor, axes: list[int], stats: Any, weight: Any, bias: Any, eps: float) -> Tensor:
    """By `stats`, a mean and a variance, or (None) by the input's own over `axes`."""
    trailing = x.dim() - 2
    if stats is None:
        return _affine(_normalised(x, axes, eps), weight, bias, trailing)
    mean, var = stats
    return _affine(
        _affine(_affine(x, None, -mean, trailing), (var + eps).rsqrt(), None, trailing), weight, bias, trailing
    )


def _instance_norm(
    input: Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    stats = None if use_input_stats else (running_mean, running_var)
    return _channel_norm(input, list(range(2, input.dim())), stats, weight, bias, eps)


def _batch_norm(
    input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    stats = None if training else (running_mean, running_var)
    return _channel_norm(input, [0, *range(2, input.dim())], stats, weight, bias, eps)


class Elementary(TorchFunctionMode):
    """Inside, norms are made of ops whose derivatives of any order torch has right."""

    TABLE = {
        F.layer_norm: _layer_norm,
        F.group_norm: _group_norm,
        F.instance_norm: _instance_norm,
        F.batch_norm: _batch_norm,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.TABLE.get(func, func)(*args, **(kwargs or {}))


class Tools(NamedTuple):
    """The transforms of a run."""

    vmap: Callable[..., Any]
    jacrev: Callable[..., Any]
    jacfwd: Callable[..., Any]

    def hessian(self, f: Callable[..., Tensor], argnum: int = 0) -> Callable[..., Any]:
        return self.jacfwd(self.jacrev(f, argnum), argnum)


def looped(f: Callable[..., Any], in_dims: Any = 0, out_dims: int = 0, chunk_size: int | None = None) -> Any:
    """vmap, one sample after the other."""

    def run(*args: Any) -> Any:
        dims = (in_dims,) * len(args) if isinstance(in_dims, int) else in_dims
        size, *_ = (optree.tree_leaves(a)[0].shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
        rows = [f(*(a if d is None else _row(a, d, i) for a, d in zip(args, dims, strict=True))) for i in range(size)]
        return optree.tree_map(lambda *each: torch.stack(each, out_dims), *rows)

    return run


def _row(tree: Any, dim: int, i: int) -> Any:
    return optree.tree_map(lambda t: t.select(dim, i), tree)


def pulled(f: Callable[..., Any], argnum: int = 0) -> Callable[..., Any]:
    """jacrev, a backward for each row."""
    return jacrev(f, argnum, chunk_size=1)


def pushed(f: Callable[..., Any], argnum: int = 0) -> Callable[..., Any]:
    """jacfwd, a forward for each column."""

    def run(*args: Any) -> Any:
        leaves, spec = optree.tree_flatten(args[argnum])

        def alone(*leaves: Tensor) -> Any:
            return f(*args[:argnum], optree.tree_unflatten(spec, leaves), *args[argnum + 1 :])

        def column(k: int, i: int) -> Any:
            tangents = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in leaves]
            tangents[k].view(-1)[i] = 1
            return jvp(alone, tuple(leaves), tuple(tangents))[1]

        def columns(k: int) -> Any:
            each = [column(k, i) for i in range(leaves[k].numel())]
            return optree.tree_map(lambda *c: torch.stack(c, -1).unflatten(-1, leaves[k].shape), *each)

        return optree.tree_map(lambda *parts: list(parts), *map(columns, range(len(leaves))))

    return run


TORCH, REFERENCE = Tools(vmap, jacrev, jacfwd), Tools(looped, pulled, pushed)


def _double_backward(s: Setting, _: Tools) -> Any:
    """Ordinary autograd, twice, without any transform."""
    leaves = {k: p.clone().requires_grad_() for k, p in s.p.items()}
    first = torch.autograd.grad(s.f(leaves, s.x[0]), list(leaves.values()), create_graph=True)
    return first, torch.autograd.grad(sum(loss(g) for g in first), list(leaves.values()))


def _squared(grads: Any) -> Tensor:
    return sum((g.square().sum() for g in optree.tree_leaves(grads)), torch.zeros(()))


Transforms = dict[str, Callable[[Setting, Tools], Any]]
TRANSFORMS: Transforms = {
    "forward": lambda s, t: s.out(s.p, s.x[0]),
    "grad": lambda s, t: grad(s.f)(s.p, s.x[0]),
    "vmap(grad)": lambda s, t: t.vmap(grad(s.f), (None, 0))(s.p, s.x),
    "vmap(grad), samples last": lambda s, t: t.vmap(grad(s.f), (None, -1), -1)(s.p, s.x.movedim(0, -1)),
    "vmap(grad), in chunks": lambda s, t: t.vmap(grad(s.f), (None, 0), chunk_size=2)(s.p, s.x),
    "vmap(vmap(grad))": lambda s, t: t.vmap(t.vmap(grad(s.f), (None, 0)), (None, 0))(s.p, _two(s.x)),
    "vmap(grad), an ensemble": lambda s, t: t.vmap(grad(s.f), (0, None))(_ensemble(s.p), s.x[0]),
    "vmap(vmap(grad)), an ensemble": lambda s, t: t.vmap(t.vmap(grad(s.f), (None, 0)), (0, None))(_ensemble(s.p), s.x),
    "vmap(grad(vmap)), an ensemble": lambda s, t: t.vmap(grad(lambda p: t.vmap(s.f, (None, 0))(p, s.x).sum()))(
        _ensemble(s.p)
    ),
    "vmap(grad), a model per sample": lambda s, t: t.vmap(grad(s.f))(_ensemble(s.p), s.x[:2]),
    "jacrev": lambda s, t: t.jacrev(s.out)(s.p, s.x[0]),
    "jacfwd": lambda s, t: t.jacfwd(s.out)(s.p, s.x[0]),
    "vmap(jacrev)": lambda s, t: t.vmap(t.jacrev(s.out), (None, 0))(s.p, s.x),
    "hessian": lambda s, t: t.hessian(s.f)(s.p, s.x[0]),
    "jacrev(jacrev)": lambda s, t: t.jacrev(t.jacrev(s.f))(s.p, s.x[0]),
    "vmap(hessian)": lambda s, t: t.vmap(t.hessian(s.f), (None, 0))(s.p, s.x),
    "grad(vmap(grad))": lambda s, t: grad(lambda p: _squared(t.vmap(grad(s.f), (None, 0))(p, s.x)))(s.p),
    "jvp(vmap(grad))": lambda s, t: jvp(lambda p: t.vmap(grad(s.f), (None, 0))(p, s.x), (s.p,), (s.p,)),
    "vjp": lambda s, t: vjp(lambda p: s.out(p, s.x[0]), s.p)[1](torch.ones_like(s.out(s.p, s.x[0]))),
    "double backward": _double_backward,
}
INPUT_TRANSFORMS: Transforms = {
    "grad": lambda s, t: grad(s.f, 1)(s.p, s.x[0]),
    "vmap(grad)": lambda s, t: t.vmap(grad(s.f, 1), (None, 0))(s.p, s.x),
    "vmap(grad), both": lambda s, t: t.vmap(grad(s.f, (0, 1)), (None, 0))(s.p, s.x),
    "vmap(jacrev)": lambda s, t: t.vmap(t.jacrev(s.out, 1), (None, 0))(s.p, s.x),
    "vmap(jacfwd)": lambda s, t: t.vmap(t.jacfwd(s.out, 1), (None, 0))(s.p, s.x),
    "hessian": lambda s, t: t.hessian(s.f, 1)(s.p, s.x[0]),
    "mixed": lambda s, t: t.jacrev(grad(s.f), 1)(s.p, s.x[0]),
    "grad(vmap(grad))": lambda s, t: grad(lambda x: _squared(t.vmap(grad(s.f), (None, 0))(s.p, x)))(s.x),
    "gradient penalty": lambda s, t: t.vmap(grad(lambda p, x: _squared(grad(s.f, 1)(p, x))), (None, 0))(s.p, s.x),
}


def _two(x: Tensor) -> Tensor:
    return torch.stack([x, x.flip(0)])


def _ensemble(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: torch.stack([p, 2 * p + 1]) for k, p in params.items()}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", MODULES)
def test_transforms_of_parameters(name: str, transform: str) -> None:
    s, run = setting(name), TRANSFORMS[transform]
    with psgrad.use_rules():
        found = run(s, TORCH)
    with Elementary():
        assert_close(found, run(s, REFERENCE))


@pytest.mark.parametrize("transform", INPUT_TRANSFORMS)
@pytest.mark.parametrize("name", [name for name in MODULES if "embedding" not in name])
def test_transforms_of_the_input(name: str, transform: str) -> None:
    s, run = setting(name), INPUT_TRANSFORMS[transform]
    with psgrad.use_rules():
        found = run(s, TORCH)
    with Elementary():
        assert_close(found, run(s, REFERENCE))


# ---- the rule ran ------------------------------------------------------------------------------------------

OPS: dict[str, Callable[..., Tensor]] = {  # an op of psgrad.ops on x and its parameters
    "linear": lambda op, x, w, b: op(x, w, b),
    "bilinear": lambda op, x, w, b: op(x, x[..., :2].sin(), w, b),
    "conv1d": lambda op, x, w, b: op(x, w, b, 2, 1),
    "conv2d": lambda op, x, w, b: op(x, w, b, padding="same"),
    "conv3d": lambda op, x, w, b: op(x, w, b),
    "conv_transpose1d": lambda op, x, w, b: op(x, w, b, 2, 1, 1),
    "conv_transpose2d": lambda op, x, w, b: op(x, w, b, 1, 1, 1, dilation=2),
    "conv_transpose3d": lambda op, x, w, b: op(x, w, b),
    "group_norm": lambda op, x, w, b: op(x, 2, w, b),
    "layer_norm": lambda op, x, w, b: op(x, w.shape, w, b),
    "rms_norm": lambda op, x, w: op(x, w.shape, w),
    "instance_norm": lambda op, x, w, b: op(x, weight=w, bias=b),
    "batch_norm": lambda op, x, w, b: op(x, None, None, w, b, True),
    "embedding": lambda op, x, w: op(x, w),
}
SHAPES: dict[str, tuple[Any, ...]] = {  # the sample's, the parameters'
    "linear": ((2, 3), (4, 3), (4,)),
    "bilinear": ((2, 3), (4, 3, 2), (4,)),
    "conv1d": ((2, 4), (3, 2, 2), (3,)),
    "conv2d": ((1, 3, 2), (2, 1, 2, 1), (2,)),
    "conv3d": ((1, 2, 2, 3), (2, 1, 2, 1, 2), (2,)),
    "conv_transpose1d": ((2, 4), (2, 3, 2), (3,)),
    "conv_transpose2d": ((1, 3, 2), (1, 2, 2, 1), (2,)),
    "conv_transpose3d": ((1, 2, 2, 3), (1, 2, 2, 1, 2), (2,)),
    "group_norm": ((2, 4, 2), (4,), (4,)),
    "layer_norm": ((2, 3), (3,), (3,)),
    "rms_norm": ((2, 3), (3,)),
    "instance_norm": ((2, 2, 3), (2,), (2,)),
    "batch_norm": ((3, 2, 2), (2,), (2,)),
    "embedding": (None, (4, 2)),
}


def test_every_op_is_here() -> None:
    assert set(OPS) == set(SHAPES) == set(psgrad.ops.__all__)


def operands(name: str, n: int | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
    shape, *params = SHAPES[name]
    lead = () if n is None else (n,)
    x = torch.randint(4, (*lead, 3)) if shape is None else draw(*lead, *shape)
    return x, tuple(draw(*p) for p in params)


@pytest.mark.parametrize("name", psgrad.ops.__all__)
def test_an_op_equals_torch(name: str) -> None:
    x, params = operands(name)
    assert_close(OPS[name](getattr(psgrad.ops, name), x, *params), OPS[name](getattr(F, name), x, *params))


@pytest.mark.parametrize("name", psgrad.ops.__all__)
def test_vmap_of_grad_runs_the_rules_backward_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An op of psgrad.ops: one run of the backward, which sees all samples and says that it does."""
    seen: list[tuple[str, bool, int]] = []
    forward = _composable._OpGrad.forward

    def spied(spec: Any, count: int, g: Tensor, x: Tensor, *rest: Any) -> Any:
        seen.append((spec.rule.name, spec.samples, len(x)))
        return forward(spec, count, g, x, *rest)

    monkeypatch.setattr(_composable._OpGrad, "forward", staticmethod(spied))
    x, params = operands(name, N)

    def f(op: Callable[..., Tensor], params: Any, x: Tensor) -> Tensor:
        return loss(OPS[name](op, x, *params))

    found = vmap(grad(f, 1), (None, None, 0))(getattr(psgrad.ops, name), params, x)
    assert seen == [(name, True, N)]
    assert_close(found, vmap(grad(f, 1), (None, None, 0))(getattr(F, name), params, x))


@pytest.mark.parametrize("name", psgrad.ops.__all__)
def test_use_rules_runs_the_rules_backward_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own function under use_rules(), with a spy in place of the registered rule."""
    function, runs = getattr(F, name), []
    rule = COMPOSABLE[function]

    def backward(options: Any, g: Tensor, x: Tensor, *rest: Any) -> Any:
        runs.append(len(x))
        return rule.backward(options, g, x, *rest)

    monkeypatch.setitem(COMPOSABLE, function, dataclasses.replace(rule, backward=backward))
    x, params = operands(name, N)
    with psgrad.use_rules():
        vmap(grad(lambda params, x: loss(OPS[name](function, x, *params))), (None, 0))(params, x)
    assert runs == [N]


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith(("lstm", "gru", "rnn"))])
def test_use_rules_runs_recurrent_rules_once_for_each_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    forward = _composable._OpGrad.forward

    def spied(spec: Any, count: int, g: Tensor, x: Tensor, *rest: Any) -> Any:
        seen.append(len(x))
        return forward(spec, count, g, x, *rest)

    monkeypatch.setattr(_composable._OpGrad, "forward", staticmethod(spied))
    s, states = setting(name), MODULES[name].make().given
    with psgrad.use_rules():
        vmap(grad(s.f), (None, 0))(s.p, s.x)
    assert seen == ([] if states else [N] * sum("weight_ih" in p for p in s.p))  # states per sample: plain ops


def test_use_rules_ends_with_its_block() -> None:
    x, (w, b) = operands("linear", N)
    linear = lambda w, x: F.linear(x, w, b).sum()
    plain = F.linear(x, w.clone().requires_grad_(), b).grad_fn.name()
    with pytest.raises(ZeroDivisionError), psgrad.use_rules():
        assert "_Op" in str(F.linear(x, w.clone().requires_grad_(), b).grad_fn)
        raise ZeroDivisionError
    assert F.linear(x, w.clone().requires_grad_(), b).grad_fn.name() == plain
    with psgrad.use_rules(), psgrad.use_rules():
        nested = vmap(grad(linear), (None, 0))(w, x)
    assert_close(nested, vmap(grad(linear), (None, 0))(w, x))


# ---- numerical derivatives ---------------------------------------------------------------------------------


def _differentiable(name: str) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """An op as a function of its floating-point operands alone."""
    x, params = operands(name)
    op = getattr(psgrad.ops, name)
    leaves = tuple(p.requires_grad_() for p in params)
    if not x.is_floating_point():
        return (lambda *params: OPS[name](op, x, *params)), leaves
    return (lambda x, *params: OPS[name](op, x, *params)), (x.requires_grad_(), *leaves)


@pytest.mark.parametrize("name", psgrad.ops.__all__)
def test_gradcheck(name: str) -> None:
    function, inputs = _differentiable(name)
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("name", psgrad.ops.__all__)
def test_gradgradcheck(name: str) -> None:
    function, inputs = _differentiable(name)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("name", psgrad.ops.__all__)
def test_forward_mode_of_autograd(name: str) -> None:
    function, inputs = _differentiable(name)
    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, check_backward_ad=False)


# ---- per_sample_grads inside somebody else's transform -----------------------------------------------------

PerSample = Callable[[Any, Any], Any]  # (params, batch) -> per-sample gradients


def _ours(s: Setting) -> PerSample:
    return lambda p, x: psgrad.per_sample_grads(s.f, p, x)


_ONE = torch.ones((), dtype=torch.float64)
INSIDE: dict[str, Callable[[Setting, PerSample, Tools], Any]] = {
    "grad": lambda s, g, t: grad(lambda p: _squared(g(p, s.x)))(s.p),
    "grad of the batch": lambda s, g, t: grad(lambda x: _squared(g(s.p, x)))(s.x),
    "vmap": lambda s, g, t: t.vmap(lambda x: g(s.p, x))(_two(s.x)),
    "vmap, an ensemble": lambda s, g, t: t.vmap(lambda p: g(p, s.x))(_ensemble(s.p)),
    "jacrev": lambda s, g, t: t.jacrev(lambda p: g(p, s.x))(s.p),
    "jacfwd": lambda s, g, t: t.jacfwd(lambda p: g(p, s.x))(s.p),
    "jacrev(grad)": lambda s, g, t: t.jacrev(grad(lambda p: _squared(g(p, s.x))))(s.p),
    "grad(vjp)": lambda s, g, t: grad(lambda p: _squared(vjp(lambda p: _squared(g(p, s.x)), p)[1](_ONE)))(s.p),
    "vmap(grad)": lambda s, g, t: t.vmap(grad(lambda p, x: _squared(g(p, x))), (None, 0))(s.p, _two(s.x)),
}
SMALL = ["linear", "conv1d-groups", "group-norm", "batch-norm", "layer-norm-no-bias", "network"]


@pytest.mark.parametrize("transform", INSIDE)
@pytest.mark.parametrize("name", SMALL)
def test_inside_a_transform(name: str, transform: str) -> None:
    s, run = setting(name), INSIDE[transform]
    found = run(s, _ours(s), TORCH)
    with Elementary():
        assert_close(found, run(s, looped(grad(s.f), (None, 0)), REFERENCE))


@pytest.mark.parametrize("name", SMALL)
def test_inside_another_fn(name: str) -> None:
    """A per-sample loss made of per-sample gradients, as in meta-learning: a sample is a batch itself."""
    s = setting(name)
    batch = torch.stack([s.x, -s.x, s.x.flip(0), 2 * s.x])
    found = psgrad.per_sample_grads(lambda p, x: _squared(_ours(s)(p, x)), s.p, batch)
    plain = looped(grad(s.f), (None, 0))
    with Elementary():
        assert_close(found, looped(grad(lambda p, x: _squared(plain(p, x))), (None, 0))(s.p, batch))


def test_inside_keeps_options() -> None:
    s = setting("linear")

    def both(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = s.out(p, x)
        return loss(y), y

    def call(p: Any) -> Any:
        return psgrad.per_sample_grads(both, p, s.x, has_aux=True, return_value=True, chunk_size=2)

    grads, (values, aux) = vmap(call)({k: v[None] for k, v in s.p.items()})
    assert_close(optree.tree_map(lambda t: t[0], grads), psgrad.per_sample_grads(s.f, s.p, s.x))
    assert_close(values[0], torch.stack([s.f(s.p, x) for x in s.x]))
    assert_close(aux[0], torch.stack([s.out(s.p, x) for x in s.x]))


NO_REFERENCE = "embedding-bag"  # torch's backward has no derivative
TWICE = [case for case in CASES if not case.refused and not case.loops and not case.id.startswith(NO_REFERENCE)]


@pytest.mark.parametrize("case", TWICE, ids=lambda case: case.id)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")  # by F.mse_loss
def test_every_case_inside_grad(case: Case) -> None:
    """`per_sample_grads`, and how it changes along the parameters, inside torch.func.grad."""
    fn, params, batch = case.make()
    directions = optree.tree_map(lambda p: draw(len(optree.tree_leaves(batch)[0]), *p.shape), params)

    def along(per_sample: Callable[[Any], Any]) -> tuple[Any, Any]:
        def f(t: Tensor) -> tuple[Tensor, Any]:
            found = per_sample(optree.tree_map(lambda p: p * t, params))
            products = optree.tree_map(lambda g, d: (g * d).sum(), found, directions)
            return sum(optree.tree_leaves(products), 0 * t), found

        with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
            return grad(f, has_aux=True)(torch.ones((), dtype=torch.float64))

    found = along(lambda p: psgrad.per_sample_grads(fn, p, batch))
    with Elementary():
        assert_close(found, along(lambda p: looped(grad(fn), (None, 0))(p, batch)))
