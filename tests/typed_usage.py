"""A user's code, as a type checker sees it: test_types.py checks it with mypy, and runs it."""

from typing import Any, NamedTuple, assert_type

import torch
from torch import Tensor, nn

import psgrad


class Net(NamedTuple):
    w: Tensor
    b: Tensor


def loss(net: Net, x: Tensor) -> Tensor:
    return torch.tanh(x @ net.w + net.b).sum()


def loss_and_aux(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    return loss(net, x), x.sum()


def of_a_module() -> None:
    fn, params = psgrad.from_module(nn.Linear(4, 3), nn.functional.cross_entropy)
    batch = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    assert_type(psgrad.per_sample_grads(fn, params, batch), dict[str, Tensor])
    assert_type(psgrad.per_sample_norms(fn, params, batch), Tensor)
    assert_type(psgrad.clipped_grad(fn, params, batch, {"weight": 1.0, "bias": 0.1}).grad, dict[str, Tensor])
    assert_type(psgrad.factored_grads(fn, params, batch).sum(), dict[str, Tensor])


def of_a_tree(flag: bool = False) -> None:
    net, x = Net(torch.randn(4, 3), torch.randn(3)), torch.randn(5, 4)
    assert_type(psgrad.per_sample_grads(loss, net, x), Net)
    assert_type(psgrad.per_sample_norms(loss, net, x), Tensor)
    assert_type(psgrad.per_sample_norms(loss, net, x, per_param=True), Net)
    assert_type(psgrad.per_sample_norms(loss, net, x, per_param=flag), Any)
    assert_type(psgrad.per_sample_norms(loss_and_aux, net, x, has_aux=True), tuple[Tensor, Any])
    assert_type(psgrad.weighted_grad(loss, net, x, torch.ones(5)), Net)
    assert_type(psgrad.weighted_grad(loss_and_aux, net, x, lambda norms: 1 / norms, has_aux=True), tuple[Net, Any])
    step = psgrad.clipped_grad(loss, net, x, 1.0, nonfinite="zero")
    assert_type(step, psgrad.ClippedGrad[Net])
    assert_type(step.grad, Net)
    assert_type(step.values, Tensor)
    clipped, _ = psgrad.clipped_grad(loss_and_aux, net, x, 1.0, has_aux=True)
    assert_type(clipped, psgrad.ClippedGrad[Net])
    assert_type(psgrad.gram(loss, net, x), Tensor)
    assert_type(psgrad.gram(loss_and_aux, net, x, x[:2], has_aux=True), tuple[Tensor, Any])
    stats = psgrad.grad_stats(loss, net, x)
    assert_type(stats.mean, Net)
    assert_type(stats.noise_scale, Tensor)
    assert_type(psgrad.grad_stats(loss_and_aux, net, x, has_aux=True), tuple[psgrad.GradStats[Net], Any])


def of_factored_grads(flag: bool = False) -> None:
    net, x = Net(torch.randn(4, 3), torch.randn(3)), torch.randn(5, 4)
    fg = psgrad.factored_grads(loss, net, x, randomness="error")
    assert_type(fg, psgrad.FactoredGrads[Net])
    assert_type(fg.norms(), Tensor)
    assert_type(fg.norms(per_param=True), Net)
    assert_type(fg.sq_norms(per_param=flag), Any)
    for tree in (fg.sum(), fg.mean(), fg.variance(), fg.dense(), fg.weighted_sum(fg.values), fg.clipped_sum(1.0)):
        assert_type(tree, Net)
    assert_type(fg[1:], psgrad.FactoredGrads[Net])
    assert_type(list(fg), list[psgrad.FactoredGrads[Net]])
    assert_type(psgrad.concat([fg, fg[:2]]), psgrad.FactoredGrads[Net])
    unsaid: psgrad.FactoredGrads = fg.to("cpu")  # whoever does not care writes no parameter
    assert_type(unsaid.sum(), Any)


def mistakes() -> None:
    """Each is one for mypy: an ignore that is not needed would be an error, too."""
    net, x = Net(torch.randn(4, 3), torch.randn(3)), torch.randn(5, 4)
    psgrad.clipped_grad(loss, net, x, 1.0, nonfinite="drop")  # type: ignore[call-overload]
    psgrad.per_sample_norms(loss, net, x, randomness="never")  # type: ignore[call-overload]
    psgrad.factored_grads(loss, net, x).clipped_sum(1.0, nonfinite="drop")  # type: ignore[arg-type]
    psgrad.explain(loss, net, x, randomness="never")  # type: ignore[arg-type]
    print(psgrad.weighted_grad(loss, net, x, torch.ones(5)).missing)  # type: ignore[attr-defined]
