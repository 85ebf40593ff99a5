"""from_module: a module and a loss as a pure function, against the module's own gradients."""

import copy
import dataclasses
import functools
import sys
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psgrad
from psgrad.registry.rule import RULES


@pytest.fixture(autouse=True)
def float64() -> None:
    torch.set_default_dtype(torch.float64)  # conftest puts it back


def by_hand(model: Any, loss: Any, call: Any, target: Any, n: Any) -> Any:
    """One ordinary backward pass of the module itself per sample; `call(i)` gives its arguments for sample i."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for i in range(n):
        args, kwargs = call(i)
        value = loss(model(*args, **kwargs), None if target is None else target[i : i + 1])
        rows.append(torch.autograd.grad(value, list(named.values()), materialize_grads=True, allow_unused=True))
    return {name: torch.stack(grads) for name, grads in zip(named, zip(*rows, strict=True), strict=True)}


def same(model: Any, loss: Any, x: Any, y: Any) -> None:
    """per_sample_grads through from_module equals the module's own gradients for a tensor input."""
    fn, params = psgrad.from_module(model, loss)
    ours = psgrad.per_sample_grads(fn, params, (x, y))
    want = by_hand(model, loss, lambda i: ((x[i : i + 1],), {}), y, len(x))
    torch.testing.assert_close(ours, want, rtol=1e-9, atol=1e-10)


def mlp(out: Any = 3) -> Any:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, out))


# ---- inputs -------------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, x: Tensor, z: Any, scale: Any = 1.0) -> Tensor:
        return self.a(x) * scale + self.b(z)


def test_tensor_input() -> None:
    same(mlp(), F.cross_entropy, torch.randn(5, 4), torch.randint(3, (5,)))


@pytest.mark.parametrize("kind", [tuple, list])
def test_tuple_input(kind: Any) -> None:
    model, x, z, y = Two(), torch.randn(5, 4), torch.randn(5, 2), torch.randn(5, 3)
    fn, params = psgrad.from_module(model, F.mse_loss)
    ours = psgrad.per_sample_grads(fn, params, (kind((x, z)), y))
    want = by_hand(model, F.mse_loss, lambda i: ((x[i : i + 1], z[i : i + 1]), {}), y, 5)
    torch.testing.assert_close(ours, want)


def test_dict_input() -> None:
    model, x, z, y = Two(), torch.randn(5, 4), torch.randn(5, 2), torch.randn(5, 3)
    fn, params = psgrad.from_module(model, F.mse_loss)
    ours = psgrad.per_sample_grads(fn, params, ({"z": z, "x": x}, y))
    want = by_hand(model, F.mse_loss, lambda i: ((), {"x": x[i : i + 1], "z": z[i : i + 1]}), y, 5)
    torch.testing.assert_close(ours, want)


def test_dict_input_with_a_shared_leaf() -> None:
    """A leaf with in_dims=None reaches the module as it is: here a number."""
    model, x, z, y = Two(), torch.randn(5, 4), torch.randn(5, 2), torch.randn(5, 3)
    fn, params = psgrad.from_module(model, F.mse_loss)
    batch, in_dims = ({"x": x, "z": z, "scale": 2.0}, y), ({"x": 0, "z": 0, "scale": None}, 0)
    ours = psgrad.per_sample_grads(fn, params, batch, in_dims=in_dims)
    want = by_hand(model, F.mse_loss, lambda i: ((), {"x": x[i : i + 1], "z": z[i : i + 1], "scale": 2.0}), y, 5)
    torch.testing.assert_close(ours, want)


def test_target_that_is_a_tree() -> None:
    x, y, w = torch.randn(5, 4), torch.randint(3, (5,)), torch.rand(5)
    loss = lambda out, t: (F.cross_entropy(out, t["label"], reduction="none") * t["weight"]).sum()
    model = mlp()
    fn, params = psgrad.from_module(model, loss)
    ours = psgrad.per_sample_grads(fn, params, (x, {"label": y, "weight": w}))
    for i in range(5):
        value = loss(model(x[i : i + 1]), {"label": y[i : i + 1], "weight": w[i : i + 1]})
        for g, (name, _) in zip(
            torch.autograd.grad(value, list(model.parameters())), model.named_parameters(), strict=True
        ):
            torch.testing.assert_close(ours[name][i], g)


def test_no_target() -> None:
    """None is a target too: nothing but the output counts."""
    model, x = mlp(), torch.randn(5, 4)
    fn, params = psgrad.from_module(model, lambda out, target: out.square().sum())
    ours = psgrad.per_sample_grads(fn, params, (x, None))
    want = by_hand(model, lambda out, _: out.square().sum(), lambda i: ((x[i : i + 1],), {}), None, 5)
    torch.testing.assert_close(ours, want)


# ---- losses -------------------------------------------------------------------------------------------

LOSSES = {
    "cross_entropy": (F.cross_entropy, lambda: torch.randint(3, (5,))),
    "cross_entropy, probabilities": (F.cross_entropy, lambda: torch.softmax(torch.randn(5, 3), 1)),
    "cross_entropy, smoothed": (
        lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1),
        lambda: torch.randint(3, (5,)),
    ),
    "mse_loss": (F.mse_loss, lambda: torch.randn(5, 3)),
    "bce_with_logits": (F.binary_cross_entropy_with_logits, lambda: torch.randint(2, (5, 3)).double()),
    "a module": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]).double()), lambda: torch.randint(3, (5,))),
    "a module, sum": (nn.L1Loss(reduction="sum"), lambda: torch.randn(5, 3)),
    "nll of log_softmax": (lambda o, t: F.nll_loss(F.log_softmax(o, 1), t), lambda: torch.randint(3, (5,))),
    "huber": (F.huber_loss, lambda: torch.randn(5, 3)),
    "multi_margin": (F.multi_margin_loss, lambda: torch.randint(3, (5,))),
    "a lambda": (lambda o, t: ((o.sum() - t) ** 2).mean(), lambda: torch.randn(5)),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch, of multi_margin_loss
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: Any) -> None:
    loss, target = LOSSES[name]
    same(mlp(), loss, torch.randn(5, 4), target())


def test_token_level_loss() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 10))
    tokens = torch.randint(10, (5, 7))
    same(model, lambda logits, t: F.cross_entropy(logits.mT, t), tokens, tokens.roll(-1, 1))


def test_token_level_loss_that_ignores_positions() -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10))
    tokens = torch.randint(10, (5, 7))
    target = tokens.masked_fill(torch.arange(7) >= torch.tensor([7, 6, 3, 1, 2])[:, None], -100)
    same(model, lambda logits, t: F.cross_entropy(logits.flatten(0, 1), t.flatten()), tokens, target)


def test_segmentation_loss() -> None:
    same(nn.Conv2d(3, 4, 3, padding=1), F.cross_entropy, torch.randn(5, 3, 6, 6), torch.randint(4, (5, 6, 6)))


# ---- which parameters ---------------------------------------------------------------------------------


def test_params_are_the_trainable_ones_detached() -> None:
    model = mlp()
    _, params = psgrad.from_module(model, F.mse_loss)
    assert list(params) == [name for name, _ in model.named_parameters()]
    for name, p in model.named_parameters():
        assert not params[name].requires_grad
        assert params[name].data_ptr() == p.data_ptr()  # no copy


def test_frozen_parameters() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    fn, params = psgrad.from_module(model, F.mse_loss)
    assert list(params) == ["0.bias", "2.weight"]
    same(model, F.mse_loss, torch.randn(5, 4), torch.randn(5, 3))
    report = psgrad.explain(fn, params, (torch.randn(5, 4), torch.randn(5, 3)))
    assert {row.param for row in report.rows} == {"params['0.bias']", "params['2.weight']"}


def test_tied_weights_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
            self.head.weight = self.tok.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(torch.tanh(self.tok(tokens)))

    _, params = psgrad.from_module(Tied(), F.mse_loss)
    assert list(params) == ["tok.weight", "head.bias"]
    tokens = torch.randint(9, (5, 6))
    same(Tied(), lambda out, t: F.cross_entropy(out.mT, t), tokens, tokens)


def test_shared_submodule_once() -> None:
    layer = nn.Linear(4, 4)
    model = nn.Sequential(OrderedDict(first=layer, act=nn.Tanh(), second=layer))
    _, params = psgrad.from_module(model, F.mse_loss)
    assert list(params) == ["first.weight", "first.bias"]
    same(model, F.mse_loss, torch.randn(5, 4), torch.randn(5, 4))


def test_fn_uses_the_params_it_is_given() -> None:
    """Not those of the module: params may be anything of their shapes."""
    model, x, y = mlp(), torch.randn(5, 4), torch.randn(5, 3)
    fn, params = psgrad.from_module(model, F.mse_loss)
    other = {name: torch.randn_like(p) for name, p in params.items()}
    ours = psgrad.per_sample_grads(fn, other, (x, y))
    model.load_state_dict(other)
    torch.testing.assert_close(ours, by_hand(model, F.mse_loss, lambda i: ((x[i : i + 1],), {}), y, 5))


def test_a_part_of_params() -> None:
    """Fewer parameters than the module has: the rest are frozen at the module's values."""
    model, x, y = mlp(), torch.randn(5, 4), torch.randn(5, 3)
    fn, params = psgrad.from_module(model, F.mse_loss)
    head = {name: p for name, p in params.items() if name.startswith("2")}
    ours = psgrad.per_sample_grads(fn, head, (x, y))
    want = by_hand(model, F.mse_loss, lambda i: ((x[i : i + 1],), {}), y, 5)
    torch.testing.assert_close(ours, {name: want[name] for name in head})


def test_the_module_keeps_its_parameters() -> None:
    model = mlp()
    before = dict(model.named_parameters())
    fn, params = psgrad.from_module(model, F.mse_loss)
    psgrad.per_sample_grads(fn, params, (torch.randn(5, 4), torch.randn(5, 3)))
    after = dict(model.named_parameters())
    assert all(after[name] is p and p.requires_grad and p.grad is None for name, p in before.items())


# ---- buffers and modes --------------------------------------------------------------------------------


def buffers(model: Any) -> Any:
    return {name: b.clone() for name, b in model.named_buffers()}


def unchanged(model: Any, before: Any) -> Any:
    after = dict(model.named_buffers())
    return all(type(after[name]) is torch.Tensor and torch.equal(after[name], b) for name, b in before.items())


def test_batch_norm_in_training_leaves_its_buffers_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)).train()
    before = buffers(model)
    assert set(before) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    fn, params = psgrad.from_module(model, F.mse_loss)
    batch = (torch.randn(5, 3, 6, 6), torch.randn(5, 2))
    psgrad.per_sample_grads(fn, params, batch)
    psgrad.per_sample_grads(fn, params, batch, chunk_size=2)
    psgrad.per_sample_grads(fn, params, batch, max_bytes=10**6)
    psgrad.explain(fn, params, batch)
    assert unchanged(model, before)


def test_batch_norm_in_training_inside_a_module_in_eval() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    model[1].train()
    before = buffers(model)
    fn, params = psgrad.from_module(model, F.mse_loss)
    psgrad.per_sample_grads(fn, params, (torch.randn(5, 3, 6, 6), torch.randn(5, 4, 4, 4)))
    assert unchanged(model, before)


class Counting(nn.Module):
    """Writes its buffers in every forward: one in place, one by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.lin(x - self.mean)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_buffers_that_forward_writes(training: Any, chunk_size: Any) -> None:
    model = Counting().train(training)
    before = buffers(model)
    fn, params = psgrad.from_module(model, F.mse_loss)
    batch = (torch.randn(5, 4), torch.randn(5, 3))
    ours = psgrad.per_sample_grads(fn, params, batch, chunk_size=chunk_size)
    assert unchanged(model, before)
    torch.testing.assert_close(ours, psgrad.testing.loop_grads(fn, params, batch))
    assert unchanged(model, before)


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
def test_buffers_are_left_alone_by_the_loop_too() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3)).train()
    before = buffers(model)
    fn, params = psgrad.from_module(model, lambda out, y: out.sum() * float(y.numpy()[0]))
    psgrad.per_sample_grads(fn, params, (torch.randn(5, 2, 6), torch.randn(5)))
    assert unchanged(model, before)


def test_train_and_eval_count_when_fn_runs() -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    fn, params = psgrad.from_module(model, F.mse_loss)
    batch = (torch.randn(5, 4), torch.randn(5, 3))
    model.eval()
    still = psgrad.per_sample_grads(fn, params, batch)
    torch.testing.assert_close(still, psgrad.per_sample_grads(fn, params, batch), rtol=0, atol=0)
    assert (still["2.weight"] != 0).all()
    model.train()
    dropped = psgrad.per_sample_grads(fn, params, batch)
    share = (dropped["2.weight"] == 0).double().mean()
    assert 0.3 < share < 0.7
    assert model.training


def test_batch_norm_in_eval_and_training_differ() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.BatchNorm1d(3))
    fn, params = psgrad.from_module(model, lambda out, y: torch.sin(out).sum() * y.sum())
    batch = (torch.randn(5, 2, 6), torch.rand(5))
    model.train()
    training = psgrad.per_sample_grads(fn, params, batch)
    model.eval()
    evaluating = psgrad.per_sample_grads(fn, params, batch)
    assert not torch.allclose(training["1.weight"], evaluating["1.weight"])
    same(model, lambda out, y: torch.sin(out).sum() * y.sum(), *batch)


# ---- outputs ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class ModelOutput(OrderedDict):
    """Like the transformers package's: an ordered dict whose items are attributes too."""

    def __getattr__(self, name: Any) -> Any:
        return self[name]


class Named(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind, self.body, self.head = kind, nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(x))
        return self.kind(logits=self.head(hidden), hidden=hidden)


@pytest.mark.parametrize("kind", [dict, Output, ModelOutput])
def test_outputs_that_are_not_a_tensor(kind: Any) -> None:
    def loss(out: Any, y: Any) -> Any:
        logits, hidden = (out["logits"], out["hidden"]) if kind is dict else (out.logits, out.hidden)
        return F.cross_entropy(logits, y) + hidden.square().mean()

    same(Named(kind), loss, torch.randn(5, 4), torch.randint(3, (5,)))


def test_output_that_is_a_tuple() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.log_var = nn.Linear(4, 2), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.mean(x), self.log_var(x)

    loss = lambda out, y: (((out[0] - y) ** 2) / out[1].exp() + out[1]).mean()
    same(Pair(), loss, torch.randn(5, 4), torch.randn(5, 2))


def test_module_with_hooks() -> None:
    """Forward hooks are part of the module."""
    model = mlp()
    model[0].register_forward_hook(lambda module, args, out: out * 2)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    same(model, F.mse_loss, torch.randn(5, 4), torch.randn(5, 3))


def test_module_with_a_parameter_list_and_dict() -> None:
    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
            self.named = nn.ParameterDict({"w": nn.Parameter(torch.randn(3, 4))})

        def forward(self, x: Tensor) -> Tensor:
            for scale in self.scales:
                x = torch.tanh(x * scale)
            return F.linear(x, self.named["w"])

    same(Lists(), F.mse_loss, torch.randn(5, 4), torch.randn(5, 3))


def test_resnet_block_with_in_place_ops() -> None:
    """ReLU(inplace=True) and `out += x`, as torchvision's ResNets have them: without the loop over samples."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
            self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            out = self.relu(self.bn1(self.conv1(x)))
            out = self.bn2(self.conv2(out))
            out += x
            return self.relu(out)

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), Block(), Block()).eval()
    same(model, lambda out, y: (out * y).sum(), torch.randn(5, 3, 6, 6), torch.randn(5, 4, 4, 4))


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_module(cls: Any) -> None:
    """A module that keeps a second list of its weights: the ones that count are those in params."""
    model, x = cls(4, 3, num_layers=2, batch_first=True), torch.randn(5, 6, 4)
    loss = lambda out, y: (torch.sin(out[0]) * y).sum()
    same(model, loss, x, torch.randn(5, 6, 3))
    fn, params = psgrad.from_module(model, loss)
    other, y = {name: torch.randn_like(p) for name, p in params.items()}, torch.randn(5, 6, 3)
    ours = psgrad.per_sample_grads(fn, other, (x, y))
    model.load_state_dict(other)
    torch.testing.assert_close(ours, by_hand(model, loss, lambda i: ((x[i : i + 1],), {}), y, 5))


# ---- a batch of one, without its axis -------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x,
        lambda x: x.T.contiguous().T,  # the samples side by side
        lambda x: torch.cat([x, x])[: len(x)],  # a part of a larger tensor
        lambda x: x.repeat_interleave(2, 1)[:, ::2],
        lambda x: x[:1].expand(x.shape),
    ],
    ids=["as it is", "transposed", "part", "strided", "expanded"],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_layouts_of_the_input(layout: Any, inplace: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace), nn.Linear(4, 4))
    same(model, F.cross_entropy, layout(torch.randn(4, 4)), torch.randint(4, (4,)))


def test_a_loss_of_torch_runs_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RULES[torch._C._nn.cross_entropy_loss]
    seen = []
    run = lambda options, *tensors: seen.append(tensors[0].shape) or rule.run(options, *tensors)
    monkeypatch.setitem(RULES, torch._C._nn.cross_entropy_loss, rule._replace(run=run))
    same(mlp(), F.cross_entropy, torch.randn(5, 4), torch.randint(3, (5,)))
    assert seen == [(5, 1, 3)]


def test_a_target_that_is_ignored_gives_nan_as_it_does_alone() -> None:
    target = torch.tensor([0, -100, 2])
    fn, params = psgrad.from_module(mlp(), F.cross_entropy)
    _, values = psgrad.per_sample_grads(fn, params, (torch.randn(3, 4), target), return_value=True)
    assert values.isnan().tolist() == [False, True, False]


def test_a_model_that_has_lost_a_parameter_keeps_the_others() -> None:
    model = mlp()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    first, lost = model[0].weight, model[2]._parameters.pop("bias")
    with pytest.raises(psgrad.ArgumentError, match=r"parameter '2\.bias' of the model is another than when"):
        fn(params, (torch.randn(4), torch.tensor(0)))
    assert model[0].weight is first
    assert "bias" not in model[2]._parameters
    model[2]._parameters["bias"] = lost
    same(model, F.cross_entropy, torch.randn(5, 4), torch.randint(3, (5,)))


class Reversed(torch.autograd.Function):
    """The input as a view of it; the gradient with the other sign."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Any:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -g


class Adversarial(nn.Module):
    def __init__(self, last: Any) -> None:
        super().__init__()
        self.a, self.b, self.last = nn.Linear(4, 3), nn.Linear(3, 3), last

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(torch.tanh(self.a(x)) if self.last else Reversed.apply(self.a(x)))
        return Reversed.apply(x) if self.last else x


@pytest.mark.parametrize("last", [False, True])
def test_a_function_that_returns_a_view(last: Any) -> None:
    same(Adversarial(last), F.cross_entropy, torch.randn(5, 4), torch.randint(3, (5,)))


def test_modules_that_share_their_parameters_dict() -> None:
    first = nn.Linear(4, 4)
    model = nn.Sequential(first, nn.Tanh(), copy.copy(first))
    fn, params = psgrad.from_module(model, F.cross_entropy)
    before = first.weight
    psgrad.per_sample_grads(fn, params, (torch.randn(3, 4), torch.tensor([0, 3, 1])))
    assert model[0].weight is before
    assert isinstance(model[2].weight, nn.Parameter)


SMOOTHING = 0.0


@functools.wraps(F.cross_entropy)
def smoothed(output: Any, target: Any) -> Any:
    return F.cross_entropy(output, target, label_smoothing=SMOOTHING)


def test_a_loss_of_ones_own_in_torchs_clothes(monkeypatch: pytest.MonkeyPatch) -> None:
    fn, params = psgrad.from_module(mlp(), smoothed)
    batch = torch.randn(3, 4), torch.tensor([0, 2, 1])
    before = psgrad.per_sample_norms(fn, params, batch)
    monkeypatch.setattr(sys.modules[__name__], "SMOOTHING", 0.5)
    after = psgrad.per_sample_norms(fn, params, batch)
    assert (before != after).all()


def test_a_module_that_is_replaced_after_from_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Sequential(nn.Linear(4, 3)))
    fn, params = psgrad.from_module(model, F.cross_entropy)
    batch = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    before = psgrad.per_sample_grads(fn, params, batch)
    model[1] = nn.Identity()  # has no parameters, and may be another
    torch.testing.assert_close(psgrad.per_sample_grads(fn, params, batch), before)
    inner = model[2]
    assert isinstance(inner, nn.Sequential)
    inner[0] = nn.Linear(4, 3)
    with pytest.raises(psgrad.ArgumentError) as caught:
        psgrad.per_sample_grads(fn, params, batch)
    assert str(caught.value) == (
        "module '2.0' of the model is another than when from_module was called\n"
        "  its parameters are not those of params: call from_module again."
    )
    psgrad.per_sample_grads(*psgrad.from_module(model, F.cross_entropy), batch)
