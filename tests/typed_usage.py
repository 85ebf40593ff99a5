"""A user's code, as type checkers see it: test_types.py checks it with mypy and pyright, and runs it."""

import tempfile
from typing import Any, NamedTuple, assert_type

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import psgrad


class Net(NamedTuple):
    w: Tensor
    b: Tensor


def loss(net: Net, x: Tensor) -> Tensor:
    return torch.tanh(x @ net.w + net.b).sum()


def loss_and_aux(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    return loss(net, x), x.sum()


def of_a_module() -> None:
    model = nn.Linear(4, 3)
    fn, params = psgrad.from_module(model, nn.CrossEntropyLoss())
    assert_type(params, dict[str, Tensor])
    batch = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    assert_type(fn(params, (batch[0][0], batch[1][0])), Tensor)
    assert_type(psgrad.per_sample_grads(fn, params, batch), dict[str, Tensor])
    assert_type(psgrad.per_sample_norms(fn, params, batch), Tensor)
    assert_type(psgrad.clipped_grad(fn, params, batch, {"weight": 1.0, "bias": 0.1}).grad, dict[str, Tensor])
    assert_type(psgrad.factored_grads(fn, params, batch).sum(), dict[str, Tensor])


def a_private_training() -> None:
    """A few steps of it, as one would write them."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    fn, params = psgrad.from_module(model, nn.functional.cross_entropy)
    x, y = torch.randn(20, 4), torch.randint(3, (20,))
    expected = 0.4 * len(y)
    for _ in range(2):
        valid = torch.rand(len(y)) < 0.4
        step = psgrad.clipped_grad(fn, params, (x, y), 1.0, valid=valid, nonfinite="zero")
        assert_type(step.norms, Tensor)
        assert_type(step.count, int)
        assert_type(step.sensitivity, float)
        share = float((step.norms > 1.0).sum()) / max(step.count, 1)
        print(f"{step.count} samples, {share:.0%} clipped, median {step.norms[valid].median():.2f}")
        for name, p in params.items():
            noise = 1.1 * step.sensitivity * torch.randn_like(p)
            p -= 0.1 * (step.grad[name] + noise) / expected
    bounds = {"0": 1.0, "2": 0.5}
    layered = psgrad.clipped_grad(fn, params, (x, y), bounds)
    assert_type(layered, psgrad.ClippedGrad[dict[str, Tensor], Any])
    print({name: float(layered.norms[name].max()) for name in bounds}, layered.sensitivity)


def what_can_be_looked_at() -> None:
    model = nn.Linear(4, 3)
    fn, params = psgrad.from_module(model, nn.functional.cross_entropy)
    batch = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    report = psgrad.explain(fn, params, batch)
    assert_type(report, psgrad.Report)
    assert_type(report.result_bytes, int)
    print([row.how for row in report.rows if row.param != "params['bias']"])
    found = psgrad.verify(fn, params, batch)
    assert_type(found, psgrad.Verification)
    print(max(c.relative for c in found.comparisons), found.how)
    try:
        psgrad.per_sample_grads(fn, params, batch, chunk_size=0)
    except psgrad.ArgumentError as error:
        print(error)
    with psgrad.use_rules():
        print(fn(params, (batch[0][0], batch[1][0])))


def of_a_tree(flag: bool = False) -> None:
    net, x = Net(torch.randn(4, 3), torch.randn(3)), torch.randn(5, 4)
    assert_type(psgrad.per_sample_grads(loss, net, x), Net)
    assert_type(psgrad.per_sample_norms(loss, net, x), Tensor)
    assert_type(psgrad.per_sample_norms(loss, net, x, per_param=True), Net)
    assert_type(psgrad.per_sample_norms(loss, net, x, per_param=flag), Any)
    assert_type(psgrad.per_sample_norms(loss_and_aux, net, x, has_aux=True), tuple[Tensor, Any])
    assert_type(psgrad.per_sample_norms(loss_and_aux, net, x, has_aux=True, per_param=True), tuple[Net, Any])
    assert_type(psgrad.per_sample_grads(loss, net, x, return_value=True), tuple[Net, Tensor])
    assert_type(psgrad.per_sample_grads(loss_and_aux, net, x, has_aux=True), tuple[Net, Any])
    both = psgrad.per_sample_grads(loss_and_aux, net, x, has_aux=True, return_value=True)
    assert_type(both, tuple[Net, tuple[Tensor, Any]])
    assert_type(psgrad.per_sample_grads(loss, net, x, return_value=flag), Any)
    assert_type(psgrad.weighted_grad(loss, net, x, torch.ones(5)), Net)
    assert_type(psgrad.weighted_grad(loss_and_aux, net, x, lambda norms: 1 / norms, has_aux=True), tuple[Net, Any])
    step = psgrad.clipped_grad(loss, net, x, 1.0, nonfinite="zero")
    assert_type(step, psgrad.ClippedGrad[Net])
    assert_type(step.grad, Net)
    assert_type(step.values, Tensor)
    assert_type(step.norms, Tensor)
    assert_type(psgrad.clipped_grad(loss, net, x, Net(torch.tensor(1.0), torch.tensor(1.0))).norms, Any)
    clipped, _ = psgrad.clipped_grad(loss_and_aux, net, x, 1.0, has_aux=True)
    assert_type(clipped, psgrad.ClippedGrad[Net])
    assert_type(psgrad.gram(loss, net, x), Tensor)
    assert_type(psgrad.ntk(loss, net, x, outputs="trace"), Tensor)
    assert_type(psgrad.per_sample_jacobians(loss, net, x), Net)
    assert_type(psgrad.projected_grads(loss, net, x, 8, kind="two_sided"), Tensor)
    assert_type(psgrad.projected_grads(loss_and_aux, net, x, 8, has_aux=True), tuple[Tensor, Any])
    assert_type(psgrad.kron_factors(loss, net, x), dict[str, psgrad.KronFactors])
    assert_type(psgrad.kron_factors(loss, net, x)[".w"].input, Tensor)
    assert_type(psgrad.grad_stats(loss, net, x, basis={".w": (None, torch.eye(3))}).variance, Net)
    assert_type(psgrad.per_sample_dots(loss, net, x, net), Tensor)
    assert_type(psgrad.per_sample_dots(loss, net, x, net, per_param=True), Net)
    assert_type(psgrad.per_sample_dots(loss_and_aux, net, x, net, has_aux=True), tuple[Tensor, Any])
    assert_type(psgrad.gram(loss_and_aux, net, x, x[:2], has_aux=True), tuple[Tensor, Any])
    stats = psgrad.grad_stats(loss, net, x)
    assert_type(stats.mean, Net)
    assert_type(stats.noise_scale, Tensor)
    assert_type(psgrad.grad_stats(loss_and_aux, net, x, has_aux=True), tuple[psgrad.GradStats[Net], Any])


def of_a_group() -> None:
    net, x = Net(torch.randn(4, 3), torch.randn(3)), torch.randn(5, 4)
    home = tempfile.TemporaryDirectory()
    dist.init_process_group("gloo", init_method=f"file://{home.name}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        group = mesh.get_group()
        assert_type(psgrad.clipped_grad(loss, net, x, 1.0, group=group), psgrad.ClippedGrad[Net])
        assert_type(psgrad.weighted_grad(loss, net, x, torch.ones(5), group=mesh["dp"]), Net)
        assert_type(psgrad.per_sample_norms(loss, net, x, group=mesh), Tensor)
        assert_type(psgrad.gram(loss, net, x, group=group), Tensor)
    finally:
        dist.destroy_process_group()
        home.cleanup()


def of_factored_grads(flag: bool = False) -> None:
    net, x = Net(torch.randn(4, 3), torch.randn(3)), torch.randn(5, 4)
    fg = psgrad.factored_grads(loss, net, x, randomness="error")
    assert_type(fg, psgrad.FactoredGrads[Net])
    assert_type(fg.norms(), Tensor)
    assert_type(fg.norms(per_param=True), Net)
    assert_type(fg.sq_norms(per_param=flag), Any)
    for tree in (fg.sum(), fg.mean(), fg.variance(), fg.dense(), fg.weighted_sum(fg.values), fg.clipped_sum(1.0)):
        assert_type(tree, Net)
    assert_type(fg.clipped_grad(1.0), psgrad.ClippedGrad[Net])
    assert_type(fg.clipped_grad(torch.tensor(1.0)).norms, Tensor)
    assert_type(fg.clipped_grad({"w": 1.0, "b": 1.0} if flag else Net(net.b[0].abs(), net.b[0].abs())).grad, Net)
    assert_type(fg.dots(), Tensor)
    assert_type(fg.dots(fg[:2]), Tensor)
    assert_type(fg.dots(net), Tensor)
    assert_type(fg.dots(net, per_param=True), Net)
    assert_type(fg.precondition({".w": (None, torch.eye(3))}), psgrad.FactoredGrads[Net])
    assert_type(fg.values, Tensor)
    assert_type(len(fg), int)
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
    psgrad.projected_grads(loss, net, x, 8, kind="dense")  # type: ignore[call-overload]
    print(psgrad.weighted_grad(loss, net, x, torch.ones(5)).missing)  # type: ignore[attr-defined]
