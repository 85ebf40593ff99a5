"""Tensor parallel: layers in pieces, local to `fn`; 2 and 4 processes beside one that has them whole."""

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

import psgrad
from psgrad import parallel

from .processes import run
from .test_processes import assert_close, plain

pytestmark = pytest.mark.skipif(not dist.is_available() or not hasattr(os, "fork"), reason="no processes to fork")
PIECES = {"up.weight": 0, "up.bias": 0, "down.weight": 1}  # the axis along which each is cut


class Net(nn.Module):
    def __init__(self, width: int = 6, inner: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x + self.down(F.gelu(self.up(self.norm(x))))).mean(1))


def problem() -> tuple[Any, dict[str, Tensor], Any]:
    torch.manual_seed(0)
    fn, params = psgrad.from_module(Net(), F.cross_entropy)
    return fn, params, (torch.randn(12, 7, 6), torch.randint(5, (12,)))


def in_pieces(p: dict[str, Tensor], sample: Any, group: Any) -> Tensor:
    """The same model, of which this rank has a part of the inner features."""
    x, y = sample
    h = parallel.copy_to_shards(F.layer_norm(x, (6,), p["norm.weight"], p["norm.bias"]), group)
    h = F.linear(F.gelu(F.linear(h, p["up.weight"], p["up.bias"])), p["down.weight"])
    x = x + parallel.sum_over_shards(h, group) + p["down.bias"]
    return F.cross_entropy(F.linear(x.mean(0, keepdim=True), p["head.weight"], p["head.bias"]), y[None])


def cut(tree: dict[str, Tensor], place: int, of: int) -> dict[str, Tensor]:
    return {k: t.chunk(of, PIECES[k])[place].clone() if k in PIECES else t for k, t in tree.items()}


def _tensor_parallel(rank: int, size: int, data: int) -> Any:
    warnings.simplefilter("error")
    _, params, batch = problem()
    tensor = size // data
    mesh = dist.init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))
    own = {k: t.contiguous() for k, t in cut(params, rank % tensor, tensor).items()}
    rows = slice(rank // tensor * 12 // data, (rank // tensor + 1) * 12 // data)
    mine = tuple(t[rows] for t in batch)
    group, shards = mesh["tp"], dict.fromkeys(PIECES, mesh["tp"])

    def fn(p: Any, sample: Any) -> Tensor:
        return in_pieces(p, sample, group)

    options: dict[str, Any] = {"sharded": shards, "group": mesh["dp"] if data > 1 else None}
    calls: list[int] = []
    reduce = dist.all_reduce

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return reduce(*args, **kwargs)

    dist.all_reduce = counting
    step = psgrad.clipped_grad(fn, own, mine, 0.3, **options)
    count = len(calls)
    each = psgrad.per_sample_norms(fn, own, mine, per_param=True, sharded=shards)
    stats = psgrad.grad_stats(fn, own, mine, chunk_size=4, **options)
    return {
        "clipped": plain(step.grad),
        "norms": step.norms.tolist(),
        "calls": count,
        "chunks": plain(psgrad.clipped_grad(fn, own, mine, 0.3, chunk_size=4, **options).grad),
        "layers": plain(
            psgrad.clipped_grad(fn, own, mine, {"norm": 0.1, "up": 0.1, "down": 0.2, "head": 1.0}, **options).grad
        ),
        "by norm": plain(psgrad.weighted_grad(fn, own, mine, lambda norms: 1 / norms, **options)),
        "gram": psgrad.gram(fn, own, mine, chunk_size=4, sharded=shards).tolist(),
        "cross": psgrad.gram(fn, own, mine, tuple(t[:2] for t in mine), sharded=shards).tolist(),
        "dots": psgrad.per_sample_dots(fn, own, mine, step.grad, chunk_size=4, **options).tolist(),
        "mean": plain(stats.mean),
        "variance": plain(stats.variance),
        "sq_norms": stats.sq_norms.tolist(),
        "scale": [float(stats.trace), float(stats.sq_mean)],
        "only norms": psgrad.per_sample_norms(fn, own, mine, **options).tolist(),
        "each": plain(each),
        "none": psgrad.per_sample_norms(fn, own, tuple(t[:0] for t in mine), sharded=shards).tolist(),
        "grads": plain(psgrad.per_sample_grads(fn, own, mine)),
        "vmap": plain(vmap(grad(fn), in_dims=(None, 0))(own, mine)),
    }


@pytest.mark.parametrize(("size", "data"), [(2, 1), (4, 2)])
def test_layers_in_pieces(size: int, data: int) -> None:
    found = run(_tensor_parallel, size, data)
    fn, params, batch = problem()
    tensor = size // data
    step = psgrad.clipped_grad(fn, params, batch, 0.3)
    layers = psgrad.clipped_grad(fn, params, batch, {"norm": 0.1, "up": 0.1, "down": 0.2, "head": 1.0}).grad
    by_norm = psgrad.weighted_grad(fn, params, batch, lambda norms: 1 / norms)
    each = psgrad.per_sample_norms(fn, params, batch, per_param=True)
    grads = psgrad.per_sample_grads(fn, params, batch)
    products, dots = psgrad.gram(fn, params, batch), psgrad.per_sample_dots(fn, params, batch, step.grad)
    stats = psgrad.grad_stats(fn, params, batch)
    for rank, one in enumerate(found):
        place, rows = rank % tensor, slice(rank // tensor * 12 // data, (rank // tensor + 1) * 12 // data)
        for name in ("clipped", "chunks"):
            assert_close(one[name], cut(step.grad, place, tensor), 2e-6)
        assert_close(one["layers"], cut(layers, place, tensor), 2e-6)
        assert_close(one["by norm"], cut(by_norm, place, tensor), 2e-6)
        for name in ("norms", "only norms"):
            assert_close(one[name], step.norms[rows], 2e-6)
        assert_close(one["each"], {k: t[rows] for k, t in each.items()}, 2e-6)
        assert one["none"] == []
        assert_close(one["gram"], products[rows, rows], 2e-6)
        assert_close(one["cross"], products[rows, rows][:, :2], 2e-6)
        assert_close(one["dots"], dots[rows], 2e-6)
        assert_close(one["mean"], cut(stats.mean, place, tensor), 2e-6)
        assert_close(one["variance"], cut(stats.variance, place, tensor), 5e-6)
        assert_close(one["sq_norms"], step.norms[rows].square(), 2e-6)
        assert_close(one["scale"], [float(stats.trace), float(stats.sq_mean)], 1e-5)
        own = {k: t[rows].chunk(tensor, PIECES[k] + 1)[place] if k in PIECES else t[rows] for k, t in grads.items()}
        assert_close(one["grads"], own, 2e-6)
        assert_close(one["vmap"], own, 2e-6)
        # once in the forward, once in the backward, once for norms: whatever the number of samples; and the sums
        assert one["calls"] == 3 + (data > 1)


def _refused(rank: int, size: int) -> Any:
    _, params, batch = problem()
    group = dist.group.WORLD
    said = []
    for sharded, options in (
        ({"nothing": group}, {}),
        ([group], {}),
        ({"up.weight": "tp"}, {}),
        ({"up.weight": group}, {"max_bytes": "1GB"}),
        ({"up.weight": group}, {"inside": True}),
    ):
        call = lambda x, sharded=sharded, options=options: psgrad.clipped_grad(
            lambda p, s: x * p["up.weight"].sum(), params, batch, 1.0, sharded=sharded, **options
        ).grad["up.weight"]
        try:
            torch.func.jacrev(call)(torch.ones(())) if options.pop("inside", False) else call(1.0)
        except psgrad.PsgradError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_what_is_refused() -> None:
    for said in run(_refused, 2):
        assert said == [
            "ArgumentError: sharded has 'nothing', which params has not\n  leave it out.",
            "ArgumentError: sharded does not fit params\n"
            "  give a pytree prefix of params, with a process group for what is in pieces and None for the rest.",
            "ArgumentTypeError: group is a str, not a process group\n"
            "  give a ProcessGroup, as torch.distributed.group.WORLD is one, or a DeviceMesh with one axis.",
            "ArgumentError: sharded and max_bytes are both given: ranks with pieces of other sizes would run other "
            "chunks\n  give chunk_size, the same on all of them.",
            "ArgumentError: sharded is given inside a torch.func transform\n"
            "  ranks talk about numbers, which are not there yet: call it outside.",
        ]
