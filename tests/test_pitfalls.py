"""Cases that break per-sample gradients elsewhere, one test each: psgrad gets them right."""

from functools import partial
from typing import Any, NamedTuple

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import psgrad

exact = partial(psgrad.testing.check, rtol=1e-9, atol=1e-9)  # float64


def exact_by_loop(fn: Any, params: Any, batch: Any) -> None:
    """Exact, by the loop over samples, which says so."""
    with pytest.warns(psgrad.FallbackWarning, match="psgrad runs fn in a loop over samples: exact, but slow"):
        exact(fn, params, batch)


def rules_of(fn: Any, params: Any, batch: Any) -> Any:
    return psgrad.testing.rules_used(fn, params, batch)


def module_fn(module: Any, reduce: Any = lambda out: out.square().sum()) -> Any:
    """`fn(params, x)` that calls `module` on a batch of one, and its parameters."""
    params = {name: p.detach() for name, p in module.named_parameters()}
    return (lambda p, x: reduce(functional_call(module, p, (x[None],)))), params


@pytest.fixture(autouse=True)
def float64() -> None:
    torch.set_default_dtype(torch.float64)  # conftest puts it back


# ---- embeddings ---------------------------------------------------------------------------------------


def test_position_embedding_on_a_shared_index() -> None:
    params = {"tok": torch.randn(11, 4), "pos": torch.randn(6, 4), "out": torch.randn(3, 4)}

    def fn(p: Any, tokens: Any) -> Any:
        h = F.embedding(tokens, p["tok"]) + F.embedding(torch.arange(6), p["pos"])
        return F.linear(torch.tanh(h), p["out"]).square().sum()

    exact(fn, params, torch.randint(11, (5, 6)), rules={"params['pos']": ["embedding"]})


def test_position_embedding_alone_on_a_shared_index() -> None:
    def fn(p: Any, x: Any) -> Any:
        return (torch.tanh(F.embedding(torch.arange(3), p)) * x).sum()

    exact(fn, torch.randn(6, 4), torch.randn(5, 4))


@pytest.mark.parametrize("padding_idx", [0, 2, -1])
def test_embedding_padding_idx(padding_idx: Any) -> None:
    def fn(p: Any, tokens: Any) -> Any:
        return torch.sin(F.embedding(tokens, p, padding_idx=padding_idx)).sum()

    tokens = torch.tensor([[0, 2, 2, 4], [2, 0, 4, 0], [1, 1, 3, 3]])
    exact(fn, torch.randn(5, 3), tokens, rules={"params": ["embedding"]})
    assert (psgrad.per_sample_grads(fn, torch.randn(5, 3), tokens)[:, padding_idx] == 0).all()


@pytest.mark.parametrize("padding_idx", [None, 2])
def test_embedding_scale_grad_by_freq(padding_idx: Any) -> None:
    """The frequency is that within the sample, as it is when the sample runs alone."""

    def fn(p: Any, tokens: Any) -> Any:
        h = F.embedding(tokens, p, padding_idx=padding_idx, scale_grad_by_freq=True)
        return torch.sin(h).sum()

    tokens = torch.tensor([[0, 0, 0, 4], [2, 0, 2, 0], [1, 1, 3, 2]])
    exact(fn, torch.randn(5, 3), tokens, rules={"params": ["embedding"]})


def test_embedding_max_norm_is_refused() -> None:
    table = torch.randn(5, 3)
    before = table.clone()
    with pytest.raises(psgrad.UnsupportedOpError, match=r"F\.embedding\(max_norm=1\.0\) changes params in place"):
        psgrad.per_sample_grads(lambda p, t: F.embedding(t, p, max_norm=1.0).sum(), table, torch.tensor([[1], [2]]))
    assert torch.equal(table, before)


def test_embedding_sparse() -> None:
    """Per-sample gradients are dense, whatever `sparse` asks of the ordinary gradient."""
    tokens = torch.tensor([[0, 1, 1], [2, 2, 4]])
    table = torch.randn(5, 3)
    grads = psgrad.per_sample_grads(lambda p, t: torch.sin(F.embedding(t, p, sparse=True)).sum(), table, tokens)
    want = psgrad.testing.loop_grads(lambda p, t: torch.sin(F.embedding(t, p)).sum(), table, tokens)
    torch.testing.assert_close(grads, want)


@pytest.mark.parametrize("index", [torch.tensor([[0, 1], [1, 1]]), torch.tensor([[-1, 0], [-5, 4]])])
def test_table_indexed_by_tokens(index: Any) -> None:
    exact(lambda p, i: torch.sin(p[i]).sum(), torch.randn(5, 3), index, rules={"params": ["index"]})


def test_embedding_of_no_tokens() -> None:
    exact(lambda p, t: F.embedding(t, p).sum(), torch.randn(5, 3), torch.zeros(4, 0, dtype=torch.long))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode: Any) -> None:
    def fn(p: Any, tokens: Any) -> Any:
        return F.embedding_bag(tokens, p, torch.tensor([0, 2]), mode=mode).square().sum()

    exact(fn, torch.randn(7, 3), torch.randint(7, (4, 5)), rules={"params": ["embedding_bag"]})


# ---- one weight, several uses -------------------------------------------------------------------------


def test_weight_tied_between_embedding_and_head() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.tok.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(torch.tanh(self.tok(tokens)))

    fn, params = psgrad.from_module(Tied(), lambda logits, y: F.cross_entropy(logits.mT, y))
    assert list(params) == ["tok.weight"]
    tokens = torch.randint(9, (5, 6))
    exact(fn, params, (tokens, tokens.roll(1, 1)), rules={"params['tok.weight']": ["embedding", "linear"]})


def test_layer_called_twice() -> None:
    layer = nn.Linear(4, 4)
    fn, params = psgrad.from_module(nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer), F.mse_loss)
    exact(fn, params, (torch.randn(5, 3, 4), torch.randn(5, 3, 4)), rules={"params['0.weight']": ["linear"] * 3})


def test_convolution_called_twice() -> None:
    conv = nn.Conv2d(3, 3, 3, padding=1)
    fn, params = psgrad.from_module(nn.Sequential(conv, nn.Tanh(), conv), F.mse_loss)
    exact(fn, params, (torch.randn(4, 3, 5, 5), torch.randn(4, 3, 5, 5)), rules={"params['0.weight']": ["conv2d"] * 2})


def test_one_weight_at_two_module_paths() -> None:
    """Given under both names, each use counts for its own name; from_module has it once."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    model, x = Two(), torch.randn(5, 4)
    fn, params = psgrad.from_module(model, lambda out, _: out.square().sum())
    assert list(params) == ["a.weight", "a.bias", "b.bias"]
    exact(fn, params, (x, x))

    both = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    exact(lambda p, s: functional_call(model, p, (s,), tie_weights=False).square().sum(), both, x)


# ---- norms --------------------------------------------------------------------------------------------


def test_group_norm_without_bias() -> None:
    exact(
        lambda p, x: torch.sin(F.group_norm(x[None], 2, p["w"])).sum(),
        {"w": torch.randn(4)},
        torch.randn(5, 4, 3, 3),
        rules={"params['w']": ["group_norm"]},
    )


def test_group_norm_with_a_frozen_bias() -> None:
    bias, x = torch.randn(4), torch.randn(5, 4, 3, 3)
    exact(
        lambda p, x: torch.sin(F.group_norm(x[None], 2, p["w"], bias)).sum(),
        {"w": torch.randn(4)},
        x,
        rules={"params['w']": ["group_norm"]},
    )


def test_group_norm_with_a_frozen_weight() -> None:
    weight, x = torch.randn(4), torch.randn(5, 4, 3, 3)
    exact(
        lambda p, x: torch.sin(F.group_norm(x[None], 2, weight, p["b"])).sum(),
        {"b": torch.randn(4)},
        x,
        rules={"params['b']": ["group_norm"]},
    )


def test_norms_in_the_middle_of_a_net() -> None:
    """The gradient that passes through a norm counts as much as that of its own weight."""
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.InstanceNorm2d(4, affine=True), nn.Conv2d(4, 4, 3)
    )
    fn, params = module_fn(nn.Sequential(net, nn.LayerNorm([4, 4, 4]), nn.Sigmoid()))
    exact(fn, params, torch.randn(5, 3, 8, 8))


@pytest.mark.parametrize("affine", [True, False])
def test_instance_norm_in_eval_with_running_statistics(affine: Any) -> None:
    norm = nn.InstanceNorm2d(4, affine=affine, track_running_stats=True)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    fn, params = module_fn(nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Tanh()).eval())
    exact(fn, params, torch.randn(5, 3, 6, 6))


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(shape: Any, bias: Any) -> None:
    norm = nn.LayerNorm(shape, bias=bias)
    nn.init.normal_(norm.weight)
    fn, params = module_fn(norm, lambda out: torch.sin(out).sum())
    exact(fn, params, torch.randn(5, 2, 3, 4), rules={"params['weight']": ["layer_norm"]})


def test_rms_norm() -> None:
    fn, params = module_fn(nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6), nn.Tanh()))
    exact(fn, params, torch.randn(5, 3, 4))


def test_batch_norm_in_eval() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh())
    net[1].running_mean.normal_()
    net[1].running_var.uniform_(0.5, 2.0)
    fn, params = module_fn(net.eval())
    exact(fn, params, torch.randn(5, 3, 6, 6), rules={"params['1.weight']": ["batch_norm"]})


def test_batch_norm_in_training_normalises_each_sample_by_itself() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 2, 3)).train()
    fn, params = psgrad.from_module(net, lambda out, y: (out * y).sum())
    exact(fn, params, (torch.randn(5, 3, 6, 6), torch.randn(5, 2, 2, 2)), rules={"params['1.weight']": ["batch_norm"]})


def test_batch_norm_in_training_over_an_inner_batch() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()).train()
    params = {name: p.detach() for name, p in net.named_parameters()}

    def inner(p: Any, rows: Any) -> Any:
        buffers = {name: b.clone() for name, b in net.named_buffers()}
        return functional_call(net, (p, buffers), (rows,)).square().sum()

    exact(inner, params, torch.randn(5, 6, 3), rules={"params['1.weight']": ["batch_norm"]})


def test_batch_norm_leaves_the_running_statistics_alone() -> None:
    norm = nn.BatchNorm1d(4).train()
    mean, var = norm.running_mean.clone(), norm.running_var.clone()

    def fn(p: Any, x: Any) -> Any:
        return F.batch_norm(x, norm.running_mean, norm.running_var, p["w"], p["b"], training=True).square().sum()

    psgrad.per_sample_grads(fn, {"w": torch.randn(4), "b": torch.randn(4)}, torch.randn(5, 6, 4))
    assert torch.equal(norm.running_mean, mean)
    assert torch.equal(norm.running_var, var)


def test_batch_norm_over_one_element_is_refused() -> None:
    fn, params = psgrad.from_module(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), F.mse_loss)
    with pytest.raises(psgrad.UnsupportedOpError, match=r"params\['1\.weight'\] normalises over a single value"):
        psgrad.per_sample_grads(fn, params, (torch.randn(5, 3), torch.randn(5, 4)))


# ---- linear and matmul --------------------------------------------------------------------------------


def test_linear_kwargs_in_another_order() -> None:
    exact(
        lambda p, x: F.linear(bias=p["b"], weight=p["w"], input=x).square().sum(),
        {"w": torch.randn(3, 4), "b": torch.randn(3)},
        torch.randn(5, 4),
        rules={"params['w']": ["linear"], "params['b']": ["linear"]},
    )


def test_linear_with_a_frozen_weight_or_bias() -> None:
    w, b, x = torch.randn(3, 4), torch.randn(3), torch.randn(5, 4)
    exact(lambda p, x: F.linear(x, p, b).square().sum(), w, x, rules={"params": ["linear"]})
    exact(lambda p, x: F.linear(x, w, p).square().sum(), b, x, rules={"params": ["linear"]})


MATMULS = {
    "x @ w": (lambda x, w: x @ w, (2, 4), (4, 3), "matmul"),
    "vector @ w": (lambda x, w: x @ w, (4,), (4, 3), "matmul"),
    "w @ x": (lambda x, w: w @ x, (4, 2), (3, 4), "matmul"),
    "w @ vector": (lambda x, w: w @ x, (4,), (3, 4), "matmul"),
    "x @ v": (lambda x, w: x @ w, (2, 4), (4,), "matmul"),
    "v @ x": (lambda x, w: w @ x, (4, 2), (4,), "matmul"),
    "dot by matmul": (lambda x, w: x @ w, (4,), (4,), "matmul"),
    "x @ w.t()": (lambda x, w: x @ w.t(), (2, 4), (3, 4), "matmul"),
    "x @ w.T": (lambda x, w: x @ w.T, (2, 4), (3, 4), "matmul"),
    "mm": (torch.mm, (2, 4), (4, 3), "matmul"),
    "Tensor.mm": (lambda x, w: x.mm(w), (2, 4), (4, 3), "matmul"),
    "mv": (torch.mv, (2, 4), (4,), "mv"),
    "mv of the parameter": (lambda x, w: torch.mv(w, x), (4,), (3, 4), "mv"),
    "bmm": (torch.bmm, (2, 5, 4), (2, 4, 3), "bmm"),
    "bmm of the parameter": (lambda x, w: torch.bmm(w, x), (2, 4, 5), (2, 3, 4), "bmm"),
    "batched matmul": (torch.matmul, (2, 5, 4), (2, 4, 3), "matmul"),
    "broadcast matmul": (torch.matmul, (6, 2, 5, 4), (2, 4, 3), "matmul"),
    "matmul, parameter broadcasts": (torch.matmul, (2, 5, 4), (1, 4, 3), None),
    "matmul, input broadcasts": (torch.matmul, (5, 4), (2, 4, 3), None),
    "addmm": (lambda x, w: torch.addmm(torch.ones(3), x, w), (2, 4), (4, 3), "addmm"),
    "addmm, scaled": (lambda x, w: torch.addmm(torch.ones(3), x, w, alpha=2, beta=3), (2, 4), (4, 3), None),
    "einsum": (lambda x, w: torch.einsum("ti,io->to", x, w), (2, 4), (4, 3), "einsum"),
    "einsum of heads": (lambda x, w: torch.einsum("ti,hio->hto", x, w), (2, 4), (5, 4, 3), None),
    "einsum, one block per head": (lambda x, w: torch.einsum("hti,hio->hto", x, w), (5, 2, 4), (5, 4, 3), "einsum"),
    "einsum with dots": (lambda x, w: torch.einsum("...i,io", x, w), (2, 2, 4), (4, 3), "einsum"),
    "einsum to a number": (lambda x, w: torch.einsum("ti,ti->", x, w), (2, 4), (2, 4), "einsum"),
    "einsum, repeated axis": (lambda x, w: torch.einsum("t,ii->t", x, w), (2,), (3, 3), None),
    "einsum of three": (lambda x, w: torch.einsum("ti,ij,tj->t", x, w, x), (2, 4), (4, 4), None),
    "tensordot": (lambda x, w: torch.tensordot(x, w, 2), (5, 2, 4), (2, 4, 3), None),
    "inner": (torch.inner, (2, 4), (3, 4), None),
    "dot": (torch.dot, (4,), (4,), None),
    "outer": (torch.outer, (4,), (3,), None),
    "bilinear": (lambda x, w: F.bilinear(x, x, w), (2, 4), (3, 4, 4), "bilinear"),
}


@pytest.mark.parametrize("spelling", MATMULS)
def test_matmul_spellings(spelling: Any) -> None:
    op, x_shape, w_shape, rule = MATMULS[spelling]
    rules = None if rule is None else {"params['w']": [rule]}
    exact(
        lambda p, x: torch.sin(op(x, p["w"])).sum(), {"w": torch.randn(w_shape)}, torch.randn(5, *x_shape), rules=rules
    )


def test_addmm_with_a_bias_parameter() -> None:
    params = {"w": torch.randn(4, 3), "b": torch.randn(3)}
    exact(
        lambda p, x: torch.sin(torch.addmm(p["b"], x, p["w"])).sum(),
        params,
        torch.randn(5, 2, 4),
        rules={"params['w']": ["addmm"], "params['b']": ["addmm"]},
    )


def test_product_of_two_parameters() -> None:
    params = {"a": torch.randn(4, 2), "b": torch.randn(2, 3)}
    exact(lambda p, x: torch.sin(x @ (p["a"] @ p["b"])).sum(), params, torch.randn(5, 6, 4))


# ---- bare parameters ----------------------------------------------------------------------------------

BARE = {
    "x * scale": ((4,), lambda p, x: x * p),
    "scale * x": ((4,), lambda p, x: p * x),
    "x * number": ((), lambda p, x: x * p),
    "x / scale": ((4,), lambda p, x: x / p),
    "scale / x": ((4,), lambda p, x: p / x),
    "x + pos": ((3, 4), lambda p, x: x + p),
    "pos + x": ((3, 4), lambda p, x: p + x),
    "pos - x": ((3, 4), lambda p, x: p - x),
    "x - pos": ((3, 4), lambda p, x: x - p),
    "x + more axes": ((2, 1, 4), lambda p, x: x + p),
    "x * more axes": ((2, 1, 1), lambda p, x: x * p),
    "x + column": ((3, 1), lambda p, x: x + p),
    "torch.add, alpha": ((4,), lambda p, x: torch.add(x, p, alpha=3)),
    "torch.sub, alpha": ((4,), lambda p, x: torch.sub(p, x, alpha=3)),
    "kwargs": ((4,), lambda p, x: torch.mul(other=p, input=x)),
    "addcmul": ((4,), lambda p, x: torch.addcmul(x, p, x)),
    "x ** p": ((4,), lambda p, x: x.abs() ** p),
    "maximum": ((4,), lambda p, x: torch.maximum(x, p)),
    "where": ((4,), lambda p, x: torch.where(x > 0, p, x)),
    "class token": ((1, 4), lambda p, x: torch.cat([p, x])),
    "class token expanded": ((1, 1, 4), lambda p, x: torch.cat([p.expand(1, -1, -1), x[None]], 1)),
    "stacked": ((3, 4), lambda p, x: torch.stack([x, p])),
    "padded": ((4,), lambda p, x: F.pad(x * p, (1, 1))),
    "prelu": ((1,), lambda p, x: F.prelu(x, p)),
    "in place": ((4,), lambda p, x: (2 * x).mul_(p)),
    "assigned to a row": ((4,), lambda p, x: _with_first_row(x, p)),
}


def _with_first_row(x: Any, row: Any) -> Any:
    y = 2 * x
    y[0] = row
    return y


@pytest.mark.parametrize("use", BARE)
def test_bare_parameters(use: Any) -> None:
    shape, op = BARE[use]
    exact(lambda p, x: torch.sin(op(p, x)).sum(), 1.5 + torch.rand(shape), torch.rand(5, 3, 4) + 0.5)


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
def test_bare_parameters_take_the_rule(op: Any) -> None:
    params, x = torch.rand(4) + 1, torch.rand(5, 3, 4) + 1
    exact(lambda p, x: torch.sin(getattr(torch, op)(x, p)).sum(), params, x, rules={"params": [op]})
    exact(lambda p, x: torch.sin(getattr(p, op)(x)).sum(), params, x, rules={"params": [op]})


def test_relative_position_table() -> None:
    """A table looked up with a shared index, reshaped and added to scores, as Swin and T5 do."""
    index = (torch.arange(4)[:, None] - torch.arange(4)) + 3

    def fn(p: Any, x: Any) -> Any:  # (4, 3)
        bias = p["table"][index.flatten()].view(4, 4, 2).permute(2, 0, 1)  # (heads, 4, 4)
        q, k = (F.linear(x, p[name]).view(4, 2, 3) for name in "qk")
        return torch.softmax(torch.einsum("thd,shd->hts", q, k) + bias, -1).square().sum()

    params = {"table": torch.randn(7, 2), "q": torch.randn(6, 3), "k": torch.randn(6, 3)}
    exact(fn, params, torch.randn(5, 4, 3))


def test_parameter_that_is_an_activation() -> None:
    """A learned query: the parameter is the input of a layer."""
    params = {"query": torch.randn(2, 4), "w": torch.randn(3, 4), "b": torch.randn(3)}
    exact(lambda p, x: (F.linear(p["query"], p["w"], p["b"]) @ x).square().sum(), params, torch.randn(5, 3))


# ---- views --------------------------------------------------------------------------------------------

VIEWS = {
    "t": lambda w: w.t(),
    "T": lambda w: w.T,
    "mT": lambda w: w.mT,
    "transpose": lambda w: w.transpose(0, 1),
    "permute": lambda w: w.permute(1, 0),
    "view": lambda w: w.view(4, 6),
    "reshape": lambda w: w.reshape(-1, 3),
    "reshape of a transpose": lambda w: w.t().reshape(8, 3),
    "flatten": lambda w: w.flatten(),
    "first rows": lambda w: w[:2],
    "last rows": lambda w: w[-2:],
    "columns": lambda w: w[:, 1:3],
    "one row": lambda w: w[1],
    "one number": lambda w: w[1, 2],
    "every other": lambda w: w[::2],
    "new axis": lambda w: w[None],
    "ellipsis": lambda w: w[..., 2:],
    "narrow": lambda w: w.narrow(1, 1, 3),
    "select": lambda w: w.select(1, 2),
    "split": lambda w: w.split(3)[1],
    "chunk": lambda w: w.chunk(2)[0],
    "unbind": lambda w: w.unbind(1)[2],
    "diagonal": lambda w: w.diagonal(),
    "expand": lambda w: w[:1].expand(5, -1),
    "squeeze": lambda w: w[:, :1].squeeze(1),
    "movedim": lambda w: w.movedim(0, 1),
    "as_strided": lambda w: w.as_strided((4, 3), (1, 4)),
    "to its own dtype": lambda w: w.to(torch.float64).contiguous(),
    "unfold": lambda w: w.unfold(1, 2, 1),
    "list of rows": lambda w: w[[0, 0, 2]],
    "boolean mask": lambda w: w[torch.tensor([True, False, True, False, False, True])],
    "index_select": lambda w: w.index_select(0, torch.tensor([0, 0, 2])),
    "gather": lambda w: w.gather(1, torch.tensor([[0, 0], [1, 3]])),
    "tril": lambda w: w.tril(),
    "flip": lambda w: w.flip(0),
    "contiguous": lambda w: w.t().contiguous(),
    "view of a view": lambda w: w[1:4].t()[1:, :].reshape(3, 3)[:, ::2],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_parameters(name: Any) -> None:
    """The view at work in a product with the sample, and next to the whole parameter."""
    view = VIEWS[name]

    def fn(p: Any, x: Any) -> Any:
        w = view(p["w"])
        return torch.sin(w * x[: w.shape[-1] if w.dim() else 1]).sum() + torch.sin(p["w"] @ x[:4]).sum()

    exact(fn, {"w": torch.randn(6, 4)}, torch.randn(5, 30))


@pytest.mark.parametrize("name", [name for name, view in VIEWS.items() if view(torch.zeros(6, 4)).dim() == 2])
def test_views_of_parameters_as_weights(name: Any) -> None:
    view = VIEWS[name]
    width = view(torch.zeros(6, 4)).shape[1]
    exact(lambda p, x: torch.sin(F.linear(x, view(p))).sum(), torch.randn(6, 4), torch.randn(5, 2, width))


def test_as_strided_behind_the_back_of_modes() -> None:
    """Its backward would average over the samples: refused, and answered by the loop."""
    fn = lambda p, x: torch.sin(F.linear(x, torch.ops.aten.as_strided(p, (4, 3), (1, 4)))).sum()
    params, batch = torch.randn(6, 4), torch.randn(5, 2, 3)
    with pytest.warns(psgrad.FallbackWarning, match="as_strided of a parameter has no gradient per sample"):
        grads = psgrad.per_sample_grads(fn, params, batch)
    torch.testing.assert_close(grads, psgrad.testing.loop_grads(fn, params, batch))


def test_fused_qkv_split() -> None:
    def fn(p: Any, x: Any) -> Any:
        q, k, v = F.linear(x, p["qkv"], p["bias"]).split(4, -1)
        wq, wk, wv = p["qkv"].split(4)  # and once more by hand
        bq, _, bv = p["bias"].chunk(3)
        h = F.scaled_dot_product_attention(q, k, v) + F.linear(x, wq, bq) * F.linear(x, wv, bv)
        return torch.sin(h + x @ wk.t()).sum()

    exact(fn, {"qkv": torch.randn(12, 4), "bias": torch.randn(12)}, torch.randn(5, 3, 4))


@pytest.mark.parametrize("kdim", [None, 6])
def test_multihead_attention_in_proj(kdim: Any) -> None:
    """In one stacked weight, or in three where keys have another width."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True, kdim=kdim, vdim=kdim)
    params = {name: p.detach() for name, p in attention.named_parameters()}

    def fn(p: Any, s: Any) -> Any:
        return torch.sin(functional_call(attention, p, (s[0][None], s[1][None], s[1][None]))[0]).sum()

    exact(fn, params, (torch.randn(4, 3, 8), torch.randn(4, 5, kdim or 8)))


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", ["none", "shared", "causal", "padding per sample"])
def test_multihead_attention_masks(need_weights: Any, mask: Any) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    params = {name: p.detach() for name, p in attention.named_parameters()}
    padding = torch.arange(3) >= torch.tensor([1, 2, 3, 3])[:, None]

    def fn(p: Any, s: Any) -> Any:
        x, pad = s[0][None], s[1][None]
        kwargs = {"need_weights": need_weights}
        if mask == "shared":
            kwargs["attn_mask"] = torch.tensor([[0.0, 1.0, -1.0]] * 3)
        elif mask == "causal":
            kwargs |= {"attn_mask": torch.ones(3, 3, dtype=torch.bool).triu(1), "is_causal": True}
        elif mask != "none":
            kwargs["key_padding_mask"] = pad
        return torch.sin(functional_call(attention, p, (x, x, x), kwargs)[0]).sum()

    exact(fn, params, (torch.randn(4, 3, 8), padding))


def test_no_grad_on_a_use_of_a_parameter() -> None:
    """What `fn` itself switches off is not differentiated: views, values, ruled ops."""

    def fn(p: Any, x: Any) -> Any:
        with torch.no_grad():
            view, value, out = p.t(), p * 2, F.linear(x, p)
        frozen = (x @ view) * (x @ value.t()) * out * F.linear(x, p.detach()) * (x @ p.data.t())
        return (frozen * F.linear(x, p)).sum()

    exact(fn, torch.randn(3, 4), torch.randn(5, 4))


# ---- parametrised weights -----------------------------------------------------------------------------


class _Mask(nn.Module):
    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, w: Tensor) -> Tensor:
        return w * self.mask


class _Lora(nn.Module):
    def __init__(self, base: Any, rank: Any) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = (
            nn.Parameter(torch.randn(rank, base.in_features)),
            nn.Parameter(torch.randn(base.out_features, rank)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.a.t()) @ self.b.t() + F.linear(x, self.b @ self.a)


def _masked(layer: Any) -> Any:
    parametrize.register_parametrization(layer, "weight", _Mask((torch.rand_like(layer.weight) > 0.5).double()))
    return layer


PARAMETRISED = {
    "weight_norm linear": lambda: (parametrizations.weight_norm(nn.Linear(4, 3)), (4,)),
    "weight_norm conv": lambda: (parametrizations.weight_norm(nn.Conv1d(4, 3, 2), dim=1), (4, 5)),
    "spectral_norm linear, eval": lambda: (parametrizations.spectral_norm(nn.Linear(4, 3)).eval(), (4,)),
    "spectral_norm conv, eval": lambda: (parametrizations.spectral_norm(nn.Conv2d(2, 3, 2)).eval(), (2, 4, 4)),
    "mask times linear": lambda: (_masked(nn.Linear(4, 3)), (4,)),
    "mask times conv": lambda: (_masked(nn.Conv2d(2, 3, 2)), (2, 4, 4)),
    "LoRA": lambda: (_Lora(nn.Linear(4, 3), 2), (4,)),
    "orthogonal": lambda: (parametrizations.orthogonal(nn.Linear(4, 3)), (4,)),
}


@pytest.mark.parametrize("name", PARAMETRISED)
def test_parametrised_weights(name: Any) -> None:
    """Exact without the loop over samples: a FallbackWarning would be an error here."""
    module, shape = PARAMETRISED[name]()
    fn, params = module_fn(nn.Sequential(module, nn.Tanh()))
    exact(fn, params, torch.randn(5, *shape))


def test_lora_with_a_frozen_base() -> None:
    module = _Lora(nn.Linear(4, 3), 2)
    module.base.requires_grad_(False)
    fn, params = psgrad.from_module(module, F.mse_loss)
    assert list(params) == ["a", "b"]
    exact(fn, params, (torch.randn(5, 4), torch.randn(5, 3)))


@pytest.mark.parametrize(
    "make",
    [lambda w: w * 2, lambda w: torch.tanh(w), lambda w: w / w.norm(), lambda w: w - w.mean(1, keepdim=True)],
    ids=["scaled", "tanh", "normalised", "centred"],
)
def test_function_of_parameters_alone_is_computed_once(make: Any) -> None:
    """`fn` sees the weight that was made once; the rule handles the layer."""
    fn = lambda p, x: torch.sin(F.linear(x, make(p["w"]))).sum()
    params, x = {"w": torch.randn(3, 4)}, torch.randn(5, 2, 4)
    exact(fn, params, x)
    used = rules_of(fn, params, x)
    assert [rule for rules in used.values() for rule in rules] == ["linear"], used


# ---- convolutions -------------------------------------------------------------------------------------

CONVOLUTIONS = {
    "1d": (nn.Conv1d, (4, 6, 3), {}),
    "2d": (nn.Conv2d, (4, 6, 3), {}),
    "3d": (nn.Conv3d, (2, 3, 2), {}),
    "1x1": (nn.Conv2d, (4, 6, 1), {}),
    "1x1, strided": (nn.Conv2d, (4, 6, 1), {"stride": 2}),
    "1x1, padded": (nn.Conv2d, (4, 6, 1), {"padding": 1}),
    "rectangular kernel": (nn.Conv2d, (4, 6, (2, 3)), {"padding": (1, 0)}),
    "groups": (nn.Conv2d, (4, 6, 3), {"groups": 2}),
    "groups of 1x1": (nn.Conv2d, (4, 6, 1), {"groups": 2}),
    "groups 1d": (nn.Conv1d, (4, 6, 3), {"groups": 2, "dilation": 2}),
    "groups 3d": (nn.Conv3d, (2, 4, 2), {"groups": 2}),
    "depthwise": (nn.Conv2d, (4, 4, 3), {"groups": 4}),
    "depthwise with multiplier": (nn.Conv2d, (4, 8, 3), {"groups": 4, "padding": 1}),
    "dilation": (nn.Conv2d, (3, 5, 3), {"dilation": 2}),
    "dilation 3d": (nn.Conv3d, (2, 3, 2), {"dilation": (1, 2, 3)}),
    "stride with remainder": (nn.Conv2d, (3, 5, 3), {"stride": 2}),
    "stride with remainder, 3": (nn.Conv2d, (3, 5, 2), {"stride": 3}),
    "stride larger than kernel": (nn.Conv1d, (3, 5, 2), {"stride": 4}),
    "stride with remainder 3d": (nn.Conv3d, (2, 3, 2), {"stride": (2, 1, 3)}),
    "stride, padding, dilation, groups": (
        nn.Conv2d,
        (4, 6, 3),
        {"stride": (2, 3), "padding": (2, 1), "dilation": (1, 2), "groups": 2},
    ),
    "same, odd kernel": (nn.Conv2d, (3, 5, 3), {"padding": "same"}),
    "same, even kernel": (nn.Conv2d, (3, 5, 4), {"padding": "same"}),
    "same, even and odd": (nn.Conv2d, (3, 5, (2, 3)), {"padding": "same"}),
    "same, even kernel, dilated": (nn.Conv1d, (3, 5, 2), {"padding": "same", "dilation": 3}),
    "same, even kernel 3d": (nn.Conv3d, (2, 3, 2), {"padding": "same"}),
    "valid": (nn.Conv2d, (3, 5, 3), {"padding": "valid"}),
    "circular": (nn.Conv2d, (3, 5, 3), {"padding": 1, "padding_mode": "circular"}),
    "reflect": (nn.Conv2d, (3, 5, 3), {"padding": 2, "padding_mode": "reflect"}),
    "replicate": (nn.Conv2d, (3, 5, 3), {"padding": 1, "padding_mode": "replicate"}),
    "circular 1d": (nn.Conv1d, (3, 5, 3), {"padding": 1, "padding_mode": "circular"}),
    "same, reflect": (nn.Conv1d, (3, 5, 4), {"padding": "same", "padding_mode": "reflect"}),
    "no bias": (nn.Conv2d, (3, 5, 3), {"bias": False}),
    "patch embedding": (nn.Conv2d, (3, 5, 4), {"stride": 4}),
}
SPACE = {nn.Conv1d: (11,), nn.Conv2d: (9, 8), nn.Conv3d: (7, 6, 8)}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # torch, in the loop
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name: Any) -> None:
    """The weight and bias, and the gradient that goes on to the layer below."""
    cls, args, kwargs = CONVOLUTIONS[name]
    conv, space = cls(*args, **kwargs), SPACE[cls]
    rule = cls.__name__.lower()
    fn, params = module_fn(conv, lambda out: torch.sin(out).sum())
    exact(fn, params, torch.randn(4, args[0], *space), rules={"params['weight']": [rule]})
    scaled = lambda p, x: fn({k: v for k, v in p.items() if k != "scale"}, x * p["scale"])
    exact(scaled, params | {"scale": torch.randn(args[0], *space)}, torch.randn(4, args[0], *space))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", ["1d", "2d", "3d", "groups", "same, even kernel", "circular"])
def test_convolutions_with_unbatched_input_inside_fn(name: Any) -> None:
    cls, args, kwargs = CONVOLUTIONS[name]
    conv = cls(*args, **kwargs)
    params = {k: p.detach() for k, p in conv.named_parameters()}
    fn = lambda p, x: torch.sin(functional_call(conv, p, (x,))).sum()
    exact(fn, params, torch.randn(4, args[0], *SPACE[cls]), rules={"params['weight']": [cls.__name__.lower()]})


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize(
    "name", ["1d", "2d", "3d", "groups", "depthwise", "1x1, strided", "dilation", "same, even kernel"]
)
@pytest.mark.parametrize("inner", [1, 3, 5])
def test_convolutions_over_an_inner_batch(name: Any, inner: Any) -> None:
    """A sample is itself a batch of images; 5 is also the number of samples."""
    cls, args, kwargs = CONVOLUTIONS[name]
    conv = cls(*args, **kwargs)
    params = {k: p.detach() for k, p in conv.named_parameters()}
    fn = lambda p, x: torch.sin(functional_call(conv, p, (x,))).sum()
    exact(fn, params, torch.randn(5, inner, args[0], *SPACE[cls]))


@pytest.mark.parametrize("size", [(3, 16, 16), (16, 16, 16), (40, 3, 3)])
def test_convolutions_by_every_strategy(size: Any) -> None:
    """Large maps and many channels take different ways to the same numbers."""
    channels, *space = size
    fn, params = module_fn(nn.Conv2d(channels, 24, 3, padding=1), lambda out: torch.sin(out).sum())
    exact(fn, params, torch.randn(3, channels, *space))


def test_convolution_by_functional_call_with_kwargs() -> None:
    fn = lambda p, x: F.conv2d(bias=p["b"], stride=2, weight=p["w"], padding=1, input=x[None]).square().sum()
    params = {"w": torch.randn(4, 3, 3, 3), "b": torch.randn(4)}
    exact(fn, params, torch.randn(5, 3, 6, 7), rules={"params['w']": ["conv2d"], "params['b']": ["conv2d"]})


TRANSPOSED = {
    "1d": (nn.ConvTranspose1d, (4, 6, 3), {}),
    "2d": (nn.ConvTranspose2d, (4, 6, 3), {"stride": 2, "padding": 1}),
    "3d": (nn.ConvTranspose3d, (2, 3, 2), {}),
    "output_padding": (nn.ConvTranspose2d, (4, 6, 3), {"stride": 3, "output_padding": (2, 1)}),
    "groups": (nn.ConvTranspose2d, (4, 6, 3), {"groups": 2, "stride": 2}),
    "dilation": (nn.ConvTranspose1d, (4, 6, 3), {"dilation": 2}),
}


@pytest.mark.parametrize("name", TRANSPOSED)
def test_transposed_convolutions(name: Any) -> None:
    cls, args, kwargs = TRANSPOSED[name]
    space = {nn.ConvTranspose1d: (6,), nn.ConvTranspose2d: (4, 5), nn.ConvTranspose3d: (3, 4, 3)}[cls]
    fn, params = module_fn(cls(*args, **kwargs), lambda out: torch.sin(out).sum())
    exact(fn, params, torch.randn(4, args[0], *space))


# ---- which axis is the sample's -----------------------------------------------------------------------


def test_inner_batch() -> None:
    """A sample is a batch of 5 images of one user."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    params = {k: p.detach() for k, p in net.named_parameters()}
    fn = lambda p, s: F.cross_entropy(functional_call(net, p, (s[0],)), s[1])
    for n in (1, 4, 5):  # 5 samples of 5 images: sizes say nothing about axes
        exact(fn, params, (torch.randn(n, 5, 3, 6, 6), torch.randint(3, (n, 5))))


def test_set_folded_into_the_first_axis() -> None:
    """Windows of one sample become the batch of the layers in between."""
    net = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 2))

    def fn(p: Any, x: Any) -> Any:  # (8, 4): two windows of four, folded and unfolded
        windows = x.view(2, 4, 4).flatten(0, 1)
        out = functional_call(net, p, (windows,)).view(2, 4, 2)
        return out.mean(1).square().sum()

    exact(fn, {k: p.detach() for k, p in net.named_parameters()}, torch.randn(8, 8, 4))


@pytest.mark.parametrize("n", [3, 4])
def test_sequence_length_equal_to_batch_size(n: Any) -> None:
    """n = 4 samples of 4 positions of width 4, through weights of 4 x 4."""
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4))
    fn, params = module_fn(net, lambda out: torch.sin(out).sum())
    exact(fn, params, torch.randn(n, 4, 4))
    pos = params | {"pos": torch.randn(4, 4)}
    exact(lambda p, x: fn({k: v for k, v in p.items() if k != "pos"}, x + p["pos"]), pos, torch.randn(n, 4, 4))


def test_sequence_length_equal_to_batch_size_in_a_transformer() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True)
    fn, params = module_fn(layer)
    exact(fn, params, torch.randn(4, 4, 4))


def test_sample_axis_in_the_middle() -> None:
    """Samples along axis 1 of a (T, N, D) batch, with T = N = D."""
    fn, params = module_fn(nn.Linear(4, 4), lambda out: torch.sin(out).sum())
    x = torch.randn(4, 4, 4)
    ours = psgrad.per_sample_grads(fn, params, x, in_dims=1)
    torch.testing.assert_close(ours, psgrad.testing.loop_grads(fn, params, x.transpose(0, 1)), rtol=1e-9, atol=1e-9)


MOVED = {
    "convolution with a kernel per sample": lambda x: F.conv1d(
        torch.ones(2, 3, 4).cumsum(0), x.view(5, 3, 4)[:, :, :1]
    ),
    "embedding of a table per sample": lambda x: F.embedding(torch.tensor([[0, 3], [1, 1]]), x.view(5, 12)[:, :4]),
    "advanced indexing around a slice": lambda x: x.view(3, 5, 4)[torch.tensor([0, 2]), :, torch.tensor([1, 3])],
}


@pytest.mark.parametrize("layer", ["linear", "add", "layer_norm", "branch", "aux"])
@pytest.mark.parametrize("name", MOVED)
def test_sample_axis_that_an_op_moves(name: Any, layer: Any) -> None:
    """vmap leaves the sample axis where it likes: here at 1, which is a size of 5 too."""
    make = MOVED[name]

    def fn(p: Any, x: Any) -> Any:
        h = make(x)
        if layer == "branch":
            return (h * p["scale"]).sum() * (2 if (h.flatten()[0] > 0) else 1)
        if layer == "linear":
            return torch.sin(F.linear(h, p["w"][:, : h.shape[-1]])).sum()
        if layer == "layer_norm":
            return torch.sin(F.layer_norm(h, h.shape[-1:], p["scale"].expand(h.shape[-1]))).sum()
        return torch.sin(h + p["scale"]).sum()

    params, x = {"w": torch.randn(3, 5), "scale": torch.randn(())}, torch.randn(5, 60)
    if layer != "aux":
        exact(fn, params, x)
        return
    _, aux = psgrad.per_sample_grads(lambda p, x: (fn(p, x), make(x)), params, x, has_aux=True)
    torch.testing.assert_close(aux, torch.stack([make(row) for row in x]))


# ---- recurrent layers ---------------------------------------------------------------------------------

RECURRENT = {
    "LSTM": (nn.LSTM, {}),
    "LSTM, bidirectional": (nn.LSTM, {"bidirectional": True}),
    "LSTM, two layers": (nn.LSTM, {"num_layers": 2}),
    "LSTM, projection": (nn.LSTM, {"proj_size": 2, "bidirectional": True}),
    "LSTM, no bias": (nn.LSTM, {"bias": False}),
    "GRU": (nn.GRU, {}),
    "GRU, two layers, bidirectional": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "RNN": (nn.RNN, {}),
    "RNN, relu": (nn.RNN, {"nonlinearity": "relu"}),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers(name: Any) -> None:
    """vmap refuses them; they have rules."""
    cls, kwargs = RECURRENT[name]
    layer = cls(4, 3, batch_first=True, **kwargs)
    fn, params = module_fn(layer, lambda out: torch.sin(out[0]).sum())
    exact(fn, params, torch.randn(4, 5, 4))


@pytest.mark.parametrize("cls", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells(cls: Any) -> None:
    """A cell in a Python loop over time."""
    cell = cls(4, 3)

    def fn(p: Any, x: Any) -> Any:
        state = None
        for row in x:
            state = functional_call(cell, p, (row[None], state))
        return torch.sin(state[0] if isinstance(state, tuple) else state).sum()

    exact(fn, {name: p.detach() for name, p in cell.named_parameters()}, torch.randn(4, 5, 4))


def test_recurrent_layer_on_packed_sequences() -> None:
    """Samples with sequences of one length run together."""
    layer = nn.LSTM(4, 3, batch_first=True)
    params = {name: p.detach() for name, p in layer.named_parameters()}

    def fn(p: Any, s: Any) -> Any:
        x, length = s
        packed = nn.utils.rnn.pack_padded_sequence(x[None], length[None], batch_first=True)
        out, _ = functional_call(layer, p, (packed,))
        return torch.sin(out.data).sum()

    exact(fn, params, (torch.randn(4, 5, 4), torch.tensor([5, 3, 1, 3])))


# ---- control flow -------------------------------------------------------------------------------------


def test_if_all_of_a_mask() -> None:
    """The branch that most text models have. All agree, or the batch is split: no loop over samples."""

    def fn(p: Any, s: Any) -> Any:
        x, mask = s
        h = F.linear(x, p["w"])
        if mask.all():
            return torch.sin(h).sum()
        return (h * mask[:, None]).square().sum() * p["s"]

    params, x = {"w": torch.randn(3, 4), "s": torch.randn(())}, torch.randn(5, 2, 4)
    exact(fn, params, (x, torch.ones(5, 2, dtype=torch.bool)))
    exact(fn, params, (x, torch.tensor([[1, 1], [1, 0], [1, 1], [0, 1], [0, 0]]).bool()))


BRANCHES = {
    "bool": lambda x: 2.0 if x[0] > 0 else 0.5,
    "item": lambda x: 2.0 if x[0].item() > 0 else 0.5,
    "float": lambda x: round(float(x[0])),
    "int": lambda x: int(x[0] * 2),
    "is_nonzero": lambda x: 2.0 if torch.is_nonzero(x[0].round()) else 0.5,
    "tolist": lambda x: sum(x.sign().tolist()),
    "index": lambda x: range(10)[(x[0].abs() * 2).long()],
    "while": lambda x: _halvings(x[0]),
    "nested": lambda x: (2.0 if x[1] > 0 else 3.0) if x[0] > 0 else (4.0 if x[2] > 0 else 5.0),
    "any": lambda x: 2.0 if (x > 1).any() else 0.5,
}


def _halvings(value: Any) -> Any:
    count = 0
    while value.abs() > 0.1:
        value, count = value / 2, count + 1
    return count


@pytest.mark.parametrize("branch", BRANCHES)
def test_data_dependent_branches(branch: Any) -> None:
    """Split by the answer, each part on its own: exact and without the loop over samples."""
    factor, keys = BRANCHES[branch], torch.randn(3, 4).repeat(3, 1)  # nine samples, three answers
    fn = lambda p, s: torch.sin(F.linear(s[0], p) * factor(s[1])).sum()
    exact(fn, torch.randn(3, 4), (torch.randn(9, 4), keys))


def test_another_answer_for_every_sample() -> None:
    """As when fn logs its loss: exact, with one run per sample, which the warning says."""

    def fn(p: Any, x: Any) -> Any:
        loss = torch.sin(F.linear(x, p)).sum()
        seen.append(loss.item())
        return loss

    seen, params, x = [], torch.randn(3, 4), torch.randn(9, 4)
    place = f"test_pitfalls.py:{fn.__code__.co_firstlineno + 2} in {fn.__qualname__}"
    with pytest.warns(psgrad.FallbackWarning) as caught:
        ours = psgrad.per_sample_grads(fn, params, x)
    torch.testing.assert_close(torch.tensor(seen).sort()[0], torch.sin(F.linear(x, params)).sum(1).sort()[0])
    torch.testing.assert_close(ours, psgrad.testing.loop_grads(fn, params, x), rtol=1e-9, atol=1e-9)
    assert [str(w.message) for w in caught] == [f"psgrad splits 9 samples into 9 groups, which disagree at {place}"]


def test_branch_on_a_parameter() -> None:
    """The same for all samples: nothing to split."""
    fn = lambda p, x: (torch.sin(F.linear(x, p)) if p.sum() > 0 else F.linear(x, p).square()).sum()
    for sign in (1, -1):
        exact(fn, sign * torch.rand(3, 4), torch.randn(5, 4), rules={"params": ["linear"]})


def test_branch_on_nan() -> None:
    fn = lambda p, x: F.linear(x, p).sum() if x[0].isnan() or float(x[0]) > 0 else F.linear(x, p).square().sum()
    x = torch.randn(6, 4)
    x[2, 0] = torch.nan
    params = torch.randn(3, 4)
    ours, want = psgrad.per_sample_grads(fn, params, x), psgrad.testing.loop_grads(fn, params, x)
    torch.testing.assert_close(ours, want, equal_nan=True)


def test_parameter_used_only_in_one_branch() -> None:
    def fn(p: Any, x: Any) -> Any:
        h = F.linear(x, p["w"])
        return (h * p["scale"]).sum() if x[0] > 0 else h.square().sum()

    params, x = {"w": torch.randn(3, 4), "scale": torch.randn(3)}, torch.randn(6, 4)
    exact(fn, params, x)
    grads = psgrad.per_sample_grads(fn, params, x)
    assert (grads["scale"][x[:, 0] <= 0] == 0).all()
    assert (grads["scale"][x[:, 0] > 0] != 0).all()


def test_parameter_unused_by_fn() -> None:
    params = {"w": torch.randn(3, 4), "idle": torch.randn(2, 2), "nothing": torch.randn(0, 3)}
    x = torch.randn(5, 4)
    exact(lambda p, x: F.linear(x, p["w"]).sum(), params, x)
    grads = psgrad.per_sample_grads(lambda p, x: F.linear(x, p["w"]).sum(), params, x)
    assert torch.equal(grads["idle"], torch.zeros(5, 2, 2))
    assert grads["nothing"].shape == (5, 0, 3)


# ---- randomness ---------------------------------------------------------------------------------------


def test_dropout() -> None:
    """Each sample its own mask, the same in forward and backward, reproducible under a seed."""
    fn = lambda p, x: F.dropout(F.linear(x, p), 0.5).sum()
    x = torch.ones(64, 4)

    def grads(**kwargs: Any) -> Any:
        torch.manual_seed(3)
        return psgrad.per_sample_grads(fn, torch.randn(8, 4), x, **kwargs)

    masks = grads()[:, :, 0]
    assert set(masks.unique().tolist()) == {0.0, 2.0}
    assert len(masks.unique(dim=0)) > 32
    assert torch.equal(grads(), grads())
    assert torch.equal(grads(chunk_size=5), grads(chunk_size=5))


# ---- autocast, dtypes, memory formats -----------------------------------------------------------------

NORMS = {
    "layer": lambda: nn.LayerNorm(8),
    "group": lambda: nn.GroupNorm(2, 8),
    "instance": lambda: nn.InstanceNorm1d(8, affine=True),
    "batch, eval": lambda: nn.BatchNorm1d(8).eval(),
    "rms": lambda: nn.RMSNorm(8),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch, of rms_norm under autocast
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_autocast_around_a_norm(norm: Any, inside: Any) -> None:
    """As far from the loop under autocast as bfloat16 rounds, wherever autocast is switched on."""
    net = nn.Sequential(nn.Linear(8, 8), NORMS[norm](), nn.Tanh(), nn.Linear(8, 8)).float()
    params = {name: p.detach() for name, p in net.named_parameters()}

    def fn(p: Any, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.is_autocast_enabled("cpu") or inside):
            return functional_call(net, p, (x,)).float().square().mean()

    x = torch.randn(4, 8, 8, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        ours, want = psgrad.per_sample_grads(fn, params, x), psgrad.testing.loop_grads(fn, params, x)
    for name, p in params.items():
        assert ours[name].dtype == p.dtype
        scale = want[name].abs().max().item()
        torch.testing.assert_close(ours[name], want[name], rtol=0, atol=2 * torch.finfo(torch.bfloat16).eps * scale)


def test_autocast_of_a_convolution() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5)).float()
    params = {name: p.detach() for name, p in net.named_parameters()}

    def fn(p: Any, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = functional_call(net, p, (x[None],))
        assert out.dtype == torch.bfloat16
        return out.float().square().mean()

    x = torch.randn(4, 3, 6, 6, dtype=torch.float32)
    ours, want = psgrad.per_sample_grads(fn, params, x), psgrad.testing.loop_grads(fn, params, x)
    for name in params:
        scale = want[name].abs().max().item()
        torch.testing.assert_close(ours[name], want[name], rtol=0, atol=2 * torch.finfo(torch.bfloat16).eps * scale)


def _conv_and_norms() -> Any:
    return nn.Sequential(
        nn.Conv1d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Tanh(), nn.Flatten(), nn.Linear(48, 8), nn.LayerNorm(8)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_of_any_dtype(dtype: Any) -> None:
    """The dtype of a result is the parameter's; it is as near to the float64 gradient as the loop's."""
    fn, params = module_fn(_conv_and_norms().to(dtype), lambda out: torch.sin(out).sum())
    x = torch.randn(4, 3, 6, dtype=dtype)
    ours, loop = psgrad.per_sample_grads(fn, params, x), psgrad.testing.loop_grads(fn, params, x)
    truth = psgrad.testing.loop_grads(fn, {name: p.double() for name, p in params.items()}, x.double())
    for name, want in truth.items():
        assert ours[name].dtype == dtype
        error, allowed = ((t[name].double() - want).abs().max() for t in (ours, loop))
        assert error <= 1.5 * allowed + torch.finfo(dtype).eps * want.abs().max(), name


def test_mixed_dtypes() -> None:
    """Parameters and batch of different dtypes, promoted or cast by fn."""
    params = {"w": torch.randn(3, 4, dtype=torch.float32), "s": torch.randn(3)}

    def fn(p: Any, x: Any) -> Any:
        return torch.sin(F.linear(x, p["w"].double()) * p["s"] * p["w"][:, 0]).sum()

    x = torch.randn(5, 4)
    ours, want = psgrad.per_sample_grads(fn, params, x), psgrad.testing.loop_grads(fn, params, x)
    torch.testing.assert_close(ours, want)
    assert (ours["w"].dtype, ours["s"].dtype) == (torch.float32, torch.float64)


COMPLEX = {
    "cast weight": lambda p, x: F.linear(x, p.to(x.dtype)).abs().square().sum(),
    "cast weight, matmul": lambda p, x: (x @ p.T.to(x.dtype)).abs().sum(),
    "cast weight, einsum": lambda p, x: torch.einsum("oi,i->o", p.to(x.dtype), x).abs().sum(),
    "cast kernel": lambda p, x: F.conv1d(x[None], p[:, None, :2].to(x.dtype)).abs().square().sum(),
    "cast table": lambda p, x: (p.to(x.dtype)[x.real.long() % 3] * x).abs().sum(),
    "cast bias": lambda p, x: (x + p[0].to(x.dtype)).abs().sum(),
    "weight of two parts": lambda p, x: (torch.complex(p, p.sin()) @ x).abs().sum(),
    "pairs as one number": lambda p, x: (torch.view_as_complex(p.view(-1, 2))[:4] * x).abs().sum(),
    "scale": lambda p, x: (x * p[0]).abs().sum() + (p[1] / x).real.sum() + (p[2] - x).imag.square().sum(),
    "conjugate": lambda p, x: ((x * p[0]).conj() * x * p[1].to(x.dtype).conj()).imag.sum(),
    "both parts": lambda p, x: (F.linear(x.real, p).sin() + F.linear(x.imag, p).cos()).sum(),
    "spectrum": lambda p, x: torch.fft.fft(F.linear(x.real, p)).abs().square().sum(),
    "filter": lambda p, x: torch.fft.irfft(torch.fft.rfft(x.real) * p[0, :3]).sin().sum(),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_numbers_on_the_way_to_a_real_loss(name: Any) -> None:
    """Rules are written for real numbers and keep away from complex ones, inside other transforms too."""
    params, x = torch.randn(3, 4), torch.randn(5, 4, dtype=torch.complex128)
    exact(COMPLEX[name], params, x)
    with psgrad.use_rules():
        composed = torch.vmap(torch.func.grad(COMPLEX[name]), (None, 0))(params, x)
    torch.testing.assert_close(composed, psgrad.testing.loop_grads(COMPLEX[name], params, x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", [True, False])
def test_autocast_of_a_language_model(dtype: Any, inside: Any) -> None:
    """Embedding, attention and norms: the rules run, at the precision that autocast has for each."""
    net = nn.Sequential(
        nn.Embedding(11, 8), nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True), nn.Linear(8, 11)
    ).float()
    fn, params = psgrad.from_module(net, lambda out, y: F.cross_entropy(out.float().mT, y))

    def run(p: Any, sample: Any) -> Any:
        with torch.autocast("cpu", dtype, enabled=torch.is_autocast_enabled("cpu") or inside):
            return fn(p, sample)

    tokens = torch.randint(11, (4, 6))
    with torch.autocast("cpu", dtype, enabled=not inside):
        ours = psgrad.per_sample_grads(run, params, (tokens, tokens.roll(1, 1)))
        want = psgrad.testing.loop_grads(run, params, (tokens, tokens.roll(1, 1)))
        used = rules_of(run, params, (tokens, tokens))
    assert {rule for rules in used.values() for rule in rules} == {"embedding", "linear", "layer_norm"}
    for name, p in params.items():
        assert ours[name].dtype == p.dtype == torch.float32
        scale = max(want[name].abs().max().item(), 1e-3)
        torch.testing.assert_close(ours[name], want[name], rtol=0, atol=4 * torch.finfo(dtype).eps * scale)


def _transposed(t: Any) -> Any:
    return t.mT.contiguous().mT


FORMATS = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "non-contiguous": _transposed,
    "expanded": lambda x: x[:1].expand_as(x),
    "expanded inside": lambda x: x[..., :1].expand_as(x),
    "every other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
    "samples last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("which", FORMATS)
def test_memory_formats_of_the_batch(which: Any) -> None:
    net = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.Tanh(), nn.Flatten(2), nn.Linear(30, 3))
    fn, params = module_fn(net)
    exact(fn, params, FORMATS[which](torch.randn(4, 4, 6, 5)))


@pytest.mark.parametrize("which", ["channels_last", "non-contiguous", "expanded inside", "offset"])
def test_memory_formats_of_the_parameters(which: Any) -> None:
    fn = lambda p, x: torch.sin(F.conv2d(x[None], p["w"], p["b"])).sum() + (p["w"] * x[0, 0, 0]).square().sum()
    params = {"w": FORMATS[which](torch.randn(6, 4, 3, 3)), "b": torch.randn(1).expand(6)}
    exact(fn, params, torch.randn(5, 4, 6, 6))
    grads = psgrad.per_sample_grads(fn, params, torch.randn(5, 4, 6, 6))
    assert grads["w"].shape == (5, 6, 4, 3, 3)
    grads["w"][0].zero_()
    assert (grads["w"][1] != 0).any()


def test_memory_formats_inside_fn() -> None:
    net = nn.Sequential(nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 6), nn.Conv2d(6, 2, 2))
    fn, params = module_fn(net.to(memory_format=torch.channels_last))
    exact(lambda p, x: fn(p, x.movedim(0, -1).contiguous().movedim(-1, 0)), params, torch.randn(4, 4, 6, 5))


ZERO_SIZE = {
    "linear of no rows": (lambda p, x: F.linear(x, p["w"], p["b"]).sum(), (0, 4)),
    "linear of no features": (lambda p, x: F.linear(x, p["none"]).sum() + p["b"].sum(), (2, 0)),
    "matmul of no rows": (lambda p, x: (x @ p["w"].t()).sum(), (0, 4)),
    "product with nothing": (lambda p, x: (x * p["b"]).sum(), (0, 3)),
    "layer norm of no rows": (lambda p, x: F.layer_norm(x, (4,), p["w"][0]).sum(), (0, 4)),
    "convolution of no images": (lambda p, x: F.conv1d(x, p["w"][:, :, None]).sum(), (0, 4, 2)),
}


@pytest.mark.parametrize("case", ZERO_SIZE)
def test_zero_size_inputs(case: Any) -> None:
    fn, shape = ZERO_SIZE[case]
    params = {"w": torch.randn(3, 4), "b": torch.randn(3), "none": torch.randn(3, 0)}
    exact(fn, params, torch.randn(5, *shape))


# ---- trees of parameters ------------------------------------------------------------------------------


class Layer(NamedTuple):
    w: torch.Tensor
    b: torch.Tensor


def test_nested_trees_of_parameters() -> None:
    params = {
        "layers": [Layer(torch.randn(4, 4), torch.randn(4)), Layer(torch.randn(3, 4), torch.randn(3))],
        "s": (torch.randn(3), None),
    }

    def fn(p: Any, x: Any) -> Any:
        for layer in p["layers"]:
            x = torch.tanh(F.linear(x, layer.w, layer.b))
        assert p["s"][1] is None
        return (x * p["s"][0]).sum()

    exact(fn, params, torch.randn(5, 4))
    grads = psgrad.per_sample_grads(fn, params, torch.randn(5, 4))
    assert isinstance(grads["layers"][1], Layer)
    assert optree.tree_structure(grads) == optree.tree_structure(params)


def test_params_that_are_one_tensor() -> None:
    exact(lambda w, x: torch.sin(F.linear(x, w)).sum(), torch.randn(3, 4), torch.randn(5, 4))


def test_params_of_numbers() -> None:
    """Tensors without axes."""
    params = [torch.tensor(2.0), torch.tensor(-1.0)]
    exact(lambda p, x: torch.sin(p[0] * x + p[1]).sum(), params, torch.randn(5, 3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integer_or_boolean_leaves_in_params(dtype: Any) -> None:
    params = {"w": torch.randn(3), "steps": [torch.zeros(2, dtype=dtype)]}
    with pytest.raises(psgrad.ArgumentTypeError, match=rf"params\['steps'\]\[0\] has dtype {dtype}"):
        psgrad.per_sample_grads(lambda p, x: (p["w"] * x).sum(), params, torch.randn(5, 3))


def test_same_tensor_at_two_paths() -> None:
    """Two parameters that happen to share memory: each gets the gradient of its own uses."""
    w = torch.randn(4, 4)
    fn = lambda p, x: torch.sin(F.linear(F.linear(x, p["a"]), p["b"].t()) @ p["a"].view_as(p["b"])).sum()
    exact(fn, {"a": w, "b": w}, torch.randn(5, 4))
    exact(
        lambda p, x: torch.sin((p["a"] @ p["b"] + p["a"].expand_as(p["b"])) @ x).sum(),
        {"a": w, "b": w},
        torch.randn(5, 4),
    )


def test_parameters_that_are_views_of_one_buffer() -> None:
    """Flat parameters: views of one storage at different offsets."""
    flat = torch.randn(24)
    params = {"w": flat[:12].view(3, 4), "v": flat[12:].view(3, 4)}
    exact(
        lambda p, x: torch.sin(F.linear(x, p["w"]) * F.linear(x, p["v"][1:] * 2).sum()).sum(), params, torch.randn(5, 4)
    )


def test_params_that_require_grad_already() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    params = dict(net.named_parameters())
    exact(lambda p, x: functional_call(net, p, (x,)).square().sum(), params, torch.randn(5, 4))
    grads = psgrad.per_sample_grads(lambda p, x: functional_call(net, p, (x,)).sum(), params, torch.randn(5, 4))
    assert not any(g.requires_grad for g in grads.values())
    assert all(p.requires_grad and p.grad is None for p in params.values())


def test_params_that_are_part_of_a_graph() -> None:
    base = torch.randn(3, 4, requires_grad=True)
    exact(lambda p, x: torch.sin(F.linear(x, p)).sum(), base * 2, torch.randn(5, 4))
    assert base.grad is None


# ---- losses -------------------------------------------------------------------------------------------


def test_loss_that_does_not_depend_on_the_parameters() -> None:
    params, x = {"w": torch.randn(3, 4)}, torch.randn(5, 4)
    for fn in (lambda p, x: x.sum(), lambda p, x: torch.tensor(1.0), lambda p, x: p["w"].detach().sum() * x.sum()):
        with pytest.warns(psgrad.UnusedParametersWarning):
            grads = psgrad.per_sample_grads(fn, params, x)
        assert torch.equal(grads["w"], torch.zeros(5, 3, 4))


def test_loss_that_does_not_depend_on_the_sample() -> None:
    exact(lambda p, x: p.square().sum(), torch.randn(3), torch.randn(5, 4))


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_loss_of_shape_one(shape: Any) -> None:
    exact(lambda p, x: F.linear(x, p).square().sum().view(shape), torch.randn(3, 4), torch.randn(5, 4))


def test_loss_that_is_a_vector() -> None:
    with pytest.raises(psgrad.ArgumentError, match=r"its loss has shape \(3,\)"):
        psgrad.per_sample_grads(lambda p, x: F.linear(x, p), torch.randn(3, 4), torch.randn(5, 4))


NETS = {
    "conv": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2)),
        (3, 6, 6),
    ),
    "conv, small maps": lambda: (
        nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True)),
        (8, 3, 3),
    ),
    "batch norm": lambda: (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval()), (4,)),
    "transformer": lambda: (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (3, 4)),
}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("net", NETS)
def test_nan_sample_does_not_touch_the_others(net: Any, bad: Any) -> None:
    module, shape = NETS[net]()
    fn, params = module_fn(module)
    x = torch.randn(5, *shape)
    clean = psgrad.per_sample_grads(fn, params, x)
    x[2] = bad
    dirty = psgrad.per_sample_grads(fn, params, x)
    others = torch.tensor([0, 1, 3, 4])
    for name in params:
        torch.testing.assert_close(dirty[name][others], clean[name][others], rtol=1e-12, atol=1e-12)
    assert any(g[2].isnan().any() for g in dirty.values())


def test_loss_that_is_infinite_for_one_sample() -> None:
    fn = lambda p, x: torch.log(F.linear(x, p)).sum()
    params, x = torch.ones(1, 2), torch.tensor([[1.0, 1.0], [0.0, 0.0], [2.0, 1.0]])
    torch.testing.assert_close(
        psgrad.per_sample_grads(fn, params, x)[[0, 2]], psgrad.testing.loop_grads(fn, params, x[[0, 2]])
    )


# ---- calls in calls, sizes, surroundings ---------------------------------------------------------------


def test_fn_that_calls_psgrad() -> None:
    """A loss that has per-sample gradients inside, over its own inner batch."""
    inner = lambda w, x: torch.tanh(F.linear(x, w)).square().sum()

    def fn(p: Any, rows: Any) -> Any:
        grads = psgrad.per_sample_grads(inner, p["w"], rows)
        return grads.square().sum() + F.linear(rows, p["w"]).sum()

    def plain(p: Any, rows: Any) -> Any:
        grads = torch.vmap(torch.func.grad(inner), in_dims=(None, 0))(p["w"], rows)
        return grads.square().sum() + F.linear(rows, p["w"]).sum()

    params, x = {"w": torch.randn(3, 4)}, torch.randn(5, 6, 4)
    ours = psgrad.per_sample_grads(fn, params, x)
    want = torch.vmap(torch.func.grad(plain), in_dims=(None, 0))(params, x)
    torch.testing.assert_close(ours, want)


def test_calls_inside_torch_func_transforms() -> None:
    """grad of a function of per-sample gradients, and vmap over parameters."""
    fn = lambda w, x: torch.tanh(F.linear(x, w)).square().sum()
    w, x = torch.randn(3, 4), torch.randn(5, 4)
    reference = torch.vmap(torch.func.grad(fn), in_dims=(None, 0))
    ours = torch.func.grad(lambda w: psgrad.per_sample_grads(fn, w, x).square().sum())(w)
    torch.testing.assert_close(ours, torch.func.grad(lambda w: reference(w, x).square().sum())(w))
    many = torch.randn(2, 3, 4)
    ours = torch.vmap(lambda w: psgrad.per_sample_grads(fn, w, x))(many)
    torch.testing.assert_close(ours, torch.stack([reference(w, x) for w in many]))


def test_transform_inside_fn() -> None:
    """fn differentiates its own network with respect to the input, as physics-informed losses do."""
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    params = {k: p.detach() for k, p in net.named_parameters()}

    def fn(p: Any, x: Any) -> Any:
        u = lambda x: functional_call(net, p, (x,)).squeeze()
        return (torch.func.grad(u)(x).sum() - u(x)) ** 2 + torch.func.jacrev(torch.func.grad(u))(
            x
        ).diagonal().sum() ** 2

    exact(fn, params, torch.randn(5, 2))


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
def test_autograd_grad_inside_fn() -> None:
    """The same with torch.autograd.grad, which vmap refuses: exact by the loop."""

    def fn(p: Any, x: Any) -> Any:
        x = x.detach().requires_grad_()
        u = torch.tanh(F.linear(x, p)).sum()
        (gx,) = torch.autograd.grad(u, x, create_graph=True)
        return gx.square().sum() + u

    exact(fn, torch.randn(3, 2), torch.randn(5, 2))


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
@pytest.mark.parametrize("on", ["activation", "parameter", "function of a parameter"])
def test_gradient_hooks_inside_fn(on: Any) -> None:
    """A hook that changes a gradient is part of fn."""

    def fn(p: Any, x: Any) -> Any:
        w = p * 2
        h = F.linear(x, w)
        {"activation": h, "parameter": p, "function of a parameter": w}[on].register_hook(lambda g: g * 3)
        return h.square().sum()

    exact(fn, torch.randn(3, 2), torch.randn(5, 2))


def test_no_samples() -> None:
    """N = 0 gives (0, *shape)."""
    fn, params = psgrad.from_module(nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 2)), F.mse_loss)
    grads, values = psgrad.per_sample_grads(fn, params, (torch.randn(0, 2, 4), torch.randn(0, 2)), return_value=True)
    assert {k: tuple(g.shape) for k, g in grads.items()} == {k: (0, *p.shape) for k, p in params.items()}
    assert all(g.dtype == p.dtype for g, p in zip(grads.values(), params.values(), strict=True))
    assert values.shape == (0,)


def test_one_sample() -> None:
    fn, params = module_fn(nn.Sequential(nn.Conv1d(2, 3, 2), nn.GroupNorm(3, 3), nn.Flatten(), nn.Linear(9, 2)))
    exact(fn, params, torch.randn(1, 2, 4))


def test_more_samples_than_memory_allows() -> None:
    """All samples at once would take more than 40 times the bound."""
    fn, params = module_fn(nn.Sequential(nn.Linear(2, 500), nn.Tanh(), nn.Linear(500, 1)), lambda out: out.sum())
    x = torch.randn(400, 5, 2)
    bound = 400_000
    assert psgrad.explain(fn, params, x).peak_bytes > 40 * bound
    ours = psgrad.per_sample_grads(fn, params, x, max_bytes=bound)
    torch.testing.assert_close(ours, psgrad.per_sample_grads(fn, params, x))


@pytest.mark.parametrize("preserve", [True, False])
def test_activation_checkpointing_inside_fn(preserve: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))

    def fn(p: Any, x: Any) -> Any:
        block = lambda x: functional_call(net, p, (torch.sin(x),))
        y = checkpoint(block, x * p["scale"], use_reentrant=False, preserve_rng_state=preserve)
        return checkpoint(block, y, use_reentrant=False).square().sum()

    def without(p: Any, x: Any) -> Any:
        block = lambda x: functional_call(net, p, (torch.sin(x),))
        return block(block(x * p["scale"])).square().sum()

    params = {k: p.detach() for k, p in net.named_parameters()} | {"scale": torch.randn(4)}
    x = torch.randn(5, 4)
    net.scale = nn.Parameter(torch.zeros(4))  # functional_call wants every name to exist
    torch.testing.assert_close(
        psgrad.per_sample_grads(fn, params, x), psgrad.testing.loop_grads(without, params, x), rtol=1e-9, atol=1e-9
    )


SURROUNDINGS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled(False)": lambda: torch.set_grad_enabled(False),
}


@pytest.mark.parametrize("how", SURROUNDINGS)
def test_surroundings_that_switch_gradients_off(how: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Tanh())
    fn, params = module_fn(net)
    x = torch.randn(5, 4)
    want = psgrad.testing.loop_grads(fn, params, x)
    with SURROUNDINGS[how]():
        ours = psgrad.per_sample_grads(fn, params, x)
        chunked = psgrad.per_sample_grads(fn, params, x, chunk_size=2)
        split = psgrad.per_sample_grads(lambda p, x: fn(p, x) * (2 if x[0] > 0 else 1), params, x)
        assert not torch.is_grad_enabled()
    torch.testing.assert_close(ours, want)
    torch.testing.assert_close(chunked, want)
    torch.testing.assert_close(
        split, psgrad.testing.loop_grads(lambda p, x: fn(p, x) * (2 if x[0] > 0 else 1), params, x)
    )
    assert not any(g.is_inference() for g in ours.values())


@pytest.mark.parametrize("called_inside", [True, False])
def test_tensors_made_in_inference_mode(called_inside: Any) -> None:
    fn = lambda p, x: torch.tanh(F.linear(x, p)).sum()
    with torch.inference_mode():
        params, x = torch.randn(3, 4), torch.randn(5, 4)
        ours = psgrad.per_sample_grads(fn, params, x) if called_inside else None
    if ours is None:
        ours = psgrad.per_sample_grads(fn, params, x)
    torch.testing.assert_close(ours, psgrad.testing.loop_grads(fn, params.clone(), x.clone()))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_fused_fast_path_of_transformer_encoder_layer(norm_first: Any, grad: Any) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=norm_first).eval()
    fn, params = module_fn(layer)
    x = torch.randn(4, 3, 8)
    with torch.set_grad_enabled(grad):
        exact(fn, params, x, rules={"params['linear1.weight']": ["linear"], "params['norm1.weight']": ["layer_norm"]})


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
def test_fused_fast_path_of_a_transformer_encoder() -> None:
    """Nested tensors are another fast path of the encoder in eval: padding differs between samples."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    params = {k: p.detach() for k, p in encoder.named_parameters()}
    padding = torch.arange(3) >= torch.tensor([1, 2, 3, 3])[:, None]

    def fn(p: Any, s: Any) -> Any:
        out = functional_call(encoder, p, (s[0][None],), {"src_key_padding_mask": s[1][None]})
        return (out * ~s[1][None, :, None]).square().sum()

    exact(fn, params, (torch.randn(4, 3, 8), padding))


@pytest.mark.parametrize("grad", [True, False])
def test_fused_fast_path_of_multihead_attention(grad: Any) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    params = {k: p.detach() for k, p in attention.named_parameters()}
    fn = lambda p, x: functional_call(attention, p, (x[None],) * 3)[0].square().sum()
    with torch.set_grad_enabled(grad):
        exact(fn, params, torch.randn(4, 3, 8))


def test_transformer_with_encoder_and_decoder() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    params = {k: p.detach() for k, p in model.named_parameters()}
    mask = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    fn = lambda p, s: functional_call(model, p, (s[0][None], s[1][None]), {"tgt_mask": mask}).square().sum()
    exact(fn, params, (torch.randn(4, 3, 8), torch.randn(4, 4, 8)))


# ---- attention ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (2, 2, 3, 4)])
@pytest.mark.parametrize("mask", ["none", "causal", "shared", "per sample", "learned"])
def test_scaled_dot_product_attention(shape: Any, mask: Any) -> None:
    """Under vmap the native kernel runs with samples folded into its batch; a learned bias is differentiated."""
    length = shape[-2]

    def fn(p: Any, s: Any) -> Any:
        x, m = s
        q, k, v = (F.linear(x, w) for w in p["qkv"].unbind())
        bias = {"none": None, "causal": None, "shared": torch.ones(length, length).tril() > 0, "per sample": m}
        attn_mask = p["bias"] if mask == "learned" else bias[mask]
        return torch.sin(F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=mask == "causal")).sum()

    params = {"qkv": torch.randn(3, 4, 4), "bias": torch.randn(length, length)}
    exact(fn, params, (torch.randn(5, *shape), torch.randn(5, length, length)))
