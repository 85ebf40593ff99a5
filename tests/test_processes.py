"""Many processes: 2 and 4 on this machine, beside one process and a loop in float64."""

import os
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import psgrad
from psgrad import testing
from psgrad.factors import sum as sum_module
from psgrad.processes import parcels
from psgrad.processes import sums as sums_module

from .processes import RaisesInBackward, run

pytestmark = pytest.mark.skipif(not dist.is_available() or not hasattr(os, "fork"), reason="no processes to fork")


# ---- what all ranks work on --------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding that is also the head, a norm, a layer that is used twice."""

    def __init__(self, width: int = 8, words: int = 11) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.norm = nn.LayerNorm(width)
        self.twice = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.twice(torch.tanh(self.twice(self.norm(self.table(tokens)))))
        return F.linear(x, self.table.weight)


def tokens_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.mT, tokens)


def problem(dtype: torch.dtype = torch.float32, n: int = 24) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    fn, params = psgrad.from_module(Tied().to(dtype), tokens_loss)
    return fn, params, (torch.randint(11, (n, 5)), torch.randint(11, (n, 5)))


def part(batch: Any, rank: int, sizes: list[int]) -> Any:
    start = sum(sizes[:rank])
    return tuple(t[start : start + sizes[rank]] for t in batch)


def plain(tree: Any) -> Any:
    return {name: t.tolist() for name, t in tree.items()}


def assert_close(found: Any, expected: Any, digits: float = 1e-6) -> None:
    """Trees of numbers, compared with the largest of each leaf in mind."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_close(found[name], expected[name], digits)
        return
    a, b = torch.as_tensor(found, dtype=torch.float64), torch.as_tensor(expected).double()
    a = a.reshape(b.shape) if not b.numel() else a  # a list of no rows has no columns
    assert a.shape == b.shape
    assert float((a - b).abs().max() if a.numel() else 0) <= digits * max(
        float(b.abs().max()) if b.numel() else 0, 1e-3
    )


def rows(n: int = 24) -> dict[str, Tensor]:
    """The gradients of all samples by the loop over samples, in float64."""
    fn, params, batch = problem(torch.float64, n)
    return testing.per_sample_grads(fn, params, batch)


SIZES = [[12, 12], [20, 4], [24, 0], [10, 0, 13, 1]]


# ---- the quantities ----------------------------------------------------------------------------------------


ROTATION = (torch.linspace(-1, 1, 24).view(8, 3), torch.linspace(2, -1, 40).view(8, 5))  # of 8 rows and 8 columns


def _quantities(rank: int, size: int, sizes: list[int]) -> Any:
    warnings.simplefilter("error")  # no loop over samples
    fn, params, batch = problem()
    own, group = part(batch, rank, sizes), dist.group.WORLD
    step = psgrad.clipped_grad(fn, params, own, 0.5, group=group)
    given = torch.linspace(-1, 2, sum(sizes)).split(sizes)[rank]
    stats = psgrad.grad_stats(fn, params, own, group=group)
    seen: list[int] = []

    def weigh(norms: Tensor) -> Tensor:
        seen.append(len(norms))
        return 1 / norms

    return {
        "clipped": plain(step.grad),
        "norms": step.norms.tolist(),
        "count": step.count,
        "values": len(step.values),
        "weighted": plain(psgrad.weighted_grad(fn, params, own, given, group=group)),
        "by norm": plain(psgrad.weighted_grad(fn, params, own, weigh, group=group)),
        "seen": seen,
        "mean": plain(stats.mean),
        "variance": plain(stats.variance),
        "scale": [float(stats.trace), float(stats.sq_mean), float(stats.noise_scale)],
        "only norms": psgrad.per_sample_norms(fn, params, own, group=group).tolist(),
        "dots": psgrad.per_sample_dots(fn, params, own, step.grad, group=group).tolist(),
        "projected": psgrad.projected_grads(fn, params, own, 32, seed=5, chunk_size=7, group=group).tolist(),
        "kron": {k: plain(f._asdict()) for k, f in psgrad.kron_factors(fn, params, own, group=group).items()},
        "rotated": plain(psgrad.grad_stats(fn, params, own, basis={"twice.weight": ROTATION}, group=group).variance),
        "factored": psgrad.factored_grads(fn, params, own, group=group).norms().tolist(),
        "gram": psgrad.gram(fn, params, own, group=group).tolist(),
        "in chunks": plain(psgrad.clipped_grad(fn, params, own, 0.5, chunk_size=5, group=group).grad),
        "in little": plain(psgrad.clipped_grad(fn, params, own, 0.5, max_bytes=40_000, group=group).grad),
        "layers": plain(
            psgrad.clipped_grad(fn, params, own, {"table": 0.5, "norm": 0.1, "twice": 1.0}, group=group).grad
        ),
    }


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_quantities_are_those_of_one_process(sizes: list[int]) -> None:
    found = run(_quantities, len(sizes), sizes)
    each = rows()
    norms = torch.stack([g.flatten(1).square().sum(1) for g in each.values()]).sum(0).sqrt()
    clip = (0.5 / norms).clamp(max=1)
    sum_of: Callable[[Tensor], Any] = lambda w: {k: torch.einsum("n,n...->...", w, g) for k, g in each.items()}
    layers = {"table": 0.5, "norm": 0.1, "twice": 1.0}
    under = {
        name: torch.stack([g.flatten(1).square().sum(1) for k, g in each.items() if k.startswith(name)]).sum(0).sqrt()
        for name in layers
    }
    layered = {
        k: torch.einsum("n,n...->...", (layers[k.split(".")[0]] / under[k.split(".")[0]]).clamp(max=1), g)
        for k, g in each.items()
    }
    mean = {k: g.mean(0) for k, g in each.items()}
    variance = {k: g.var(0) for k, g in each.items()}
    trace = sum(float(v.sum()) for v in variance.values())
    sq_mean = sum(float(m.square().sum()) for m in mean.values()) - trace / 24
    flat = torch.cat([g.flatten(1) for g in each.values()], 1)
    double = problem(torch.float64)
    projected = psgrad.projected_grads(*double, 32, seed=5)
    kron = psgrad.kron_factors(*double)
    rotated = psgrad.grad_stats(*double, basis={"twice.weight": tuple(t.double() for t in ROTATION)}).variance
    for rank, one in enumerate(found):
        own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        assert_close(one["clipped"], sum_of(clip))
        assert_close(one["in chunks"], sum_of(clip))
        assert_close(one["in little"], sum_of(clip))
        assert_close(one["layers"], layered)
        assert_close(one["weighted"], sum_of(torch.linspace(-1, 2, 24, dtype=torch.float64)))
        assert_close(one["by norm"], sum_of(1 / norms))
        assert one["seen"] == [sizes[rank]]
        assert one["count"] == 24
        assert one["values"] == sizes[rank]
        for name in ("norms", "only norms", "factored"):
            assert_close(one[name], norms[own])
        assert_close(one["mean"], mean)
        assert_close(one["variance"], variance)
        assert_close(one["scale"], [trace, sq_mean, trace / sq_mean], 1e-5)
        assert_close(one["gram"], (flat @ flat.T)[own])
        assert_close(one["dots"], flat[own] @ torch.cat([g.flatten() for g in sum_of(clip).values()]))
        assert_close(one["projected"], projected[own])
        assert_close(one["kron"], {name: factors._asdict() for name, factors in kron.items()})
        assert_close(one["rotated"], rotated, 2e-6)
        for name in ("clipped", "weighted", "mean", "layers"):
            assert one[name] == found[0][name], f"{name} has other bits on rank {rank}"
    fn, params, batch = problem()
    alone = psgrad.clipped_grad(fn, params, batch, 0.5)
    assert_close(found[0]["clipped"], alone.grad)


def _many_buckets(rank: int, size: int, large: int) -> Any:
    """Buckets of one parameter each, so that all but the last are sent while others are worked out."""
    sums_module.BUCKET, sums_module.SMALL, sums_module.LARGE = 1, 20, large  # type: ignore[misc]
    fn, params, batch = problem()
    own = part(batch, rank, [15, 9])
    sent: list[int] = []
    reduce = dist.all_reduce

    def counting(t: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(t.nbytes)
        return reduce(t, *args, **kwargs)

    dist.all_reduce = counting
    step = psgrad.clipped_grad(fn, params, own, 0.5, group=dist.group.WORLD)
    return plain(step.grad), sent


@pytest.mark.parametrize("large", [1, 1 << 20])
def test_buckets(large: int) -> None:
    found = run(_many_buckets, 2, large)
    fn, params, batch = problem()
    for grad, sent in found:
        assert_close(grad, psgrad.clipped_grad(fn, params, batch, 0.5).grad)
        # two vectors of 8 travel with the heads, then one parameter each; behind large ones, whether a rank has failed
        assert len(sent) == 1 + 3 + (large == 1)
        assert sent == found[0][1]


def _collectives(rank: int, size: int) -> Any:
    """How many collectives each call takes on the good path."""
    fn, params, batch = problem()
    own = part(batch, rank, [15, 9])
    calls: list[str] = []
    for name in ("all_reduce", "all_gather_object", "all_to_all_single", "all_gather", "barrier", "broadcast"):
        setattr(dist, name, _counting(name, calls))
    found = {}
    for group in (None, dist.group.WORLD):
        for name, call in CALLS.items():
            calls.clear()
            call(fn, params, own, group=group)
            found[f"{name}, {'no' if group is None else 'a'} group"] = list(calls)
    return found


def _counting(name: str, calls: list[str]) -> Any:
    run = getattr(dist, name)

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return run(*args, **kwargs)

    return counting


CALLS: dict[str, Callable[..., Any]] = {
    "clipped_grad": lambda fn, params, batch, **k: psgrad.clipped_grad(fn, params, batch, 0.5, **k),
    "weighted_grad": lambda fn, params, batch, **k: psgrad.weighted_grad(fn, params, batch, lambda n: 1 / n, **k),
    "grad_stats": psgrad.grad_stats,
    "per_sample_norms": psgrad.per_sample_norms,
    "factored_grads": psgrad.factored_grads,
    "gram": psgrad.gram,
    "per_sample_dots": lambda fn, params, batch, **k: psgrad.per_sample_dots(fn, params, batch, problem()[1], **k),
    "projected_grads": lambda fn, params, batch, **k: psgrad.projected_grads(fn, params, batch, 8, **k),
    "kron_factors": psgrad.kron_factors,
}


def test_how_many_collectives_a_call_takes() -> None:
    """A small model goes with the heads: one all-reduce is all that there is. Without a group there is none."""
    for found in run(_collectives, 2):
        assert found == {
            **{f"{name}, no group": [] for name in CALLS},
            **{f"{name}, a group": ["all_reduce"] for name in CALLS},
            "grad_stats, a group": ["all_reduce", "all_reduce"],
            "kron_factors, a group": ["all_reduce", "all_reduce"],
            "gram, a group": ["all_reduce", "all_to_all_single", "all_reduce", "all_to_all_single", "all_reduce"],
        }


def _gram_of_two(rank: int, size: int) -> Any:
    fn, params, batch = problem()
    own, other = part(batch, rank, [5, 0, 7, 2]), part(batch, rank, [1, 3, 0, 2])
    valid = torch.arange(len(own[0])) % 3 != 1
    kept = psgrad.factored_grads(fn, params, other)
    return {
        "other": psgrad.gram(fn, params, own, other, group=dist.group.WORLD).tolist(),
        "kept": psgrad.gram(fn, params, own, kept, group=dist.group.WORLD).tolist(),
        "valid": psgrad.gram(fn, params, own, valid=valid, chunk_size=2, group=dist.group.WORLD).tolist(),
    }


def test_gram_of_two_batches_and_of_valid_samples() -> None:
    found = run(_gram_of_two, 4)
    fn, params, batch = problem()
    first, second = tuple(t[:14] for t in batch), tuple(t[:6] for t in batch)
    sizes = [5, 0, 7, 2]
    valid = torch.cat([torch.arange(n) % 3 != 1 for n in sizes])
    cross, own = psgrad.gram(fn, params, first, second), psgrad.gram(fn, params, first, valid=valid)
    for rank, one in enumerate(found):
        at = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        assert_close(one["other"], cross[at])
        assert_close(one["kept"], cross[at])
        assert_close(one["valid"], own[at])


def _several_outputs(rank: int, size: int) -> Any:
    model, params, x = outputs()
    own, group = x[[slice(5), slice(5, 5), slice(5, 9)][rank]], dist.group.WORLD
    valid = torch.arange(len(own)) != 1
    try:
        psgrad.ntk(model, params, own, max_bytes="1GB", group=group)
    except psgrad.ArgumentError as error:
        said = str(error).splitlines()[0]
    return {
        "full": psgrad.ntk(model, params, own, valid=valid, chunk_size=3, group=group).tolist(),
        "trace": psgrad.ntk(model, params, own, outputs="trace", group=group).tolist(),
        "other": psgrad.ntk(model, params, own, own[:1] * 2, group=group).tolist(),
        "jacobians": plain(psgrad.per_sample_jacobians(model, params, own, group=group)),
        "said": said,
    }


def outputs() -> tuple[Any, Any, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    params = {name: p.detach() for name, p in model.named_parameters()}
    return lambda p, x: torch.func.functional_call(model, p, (x,)), params, torch.randn(9, 4)


def test_kernels_of_several_outputs() -> None:
    fn, params, x = outputs()
    found = run(_several_outputs, 3)
    valid = torch.tensor([n not in (1, 6) for n in range(9)])
    full, trace = psgrad.ntk(fn, params, x, valid=valid), psgrad.ntk(fn, params, x, outputs="trace")
    other, jacobians = psgrad.ntk(fn, params, x, 2 * x[[0, 5]]), psgrad.per_sample_jacobians(fn, params, x)
    for one, at in zip(found, (slice(5), slice(5, 5), slice(5, 9)), strict=True):
        assert_close(one["full"], full[at])
        assert_close(one["trace"], trace[at])
        assert_close(one["other"], other[at])
        assert_close(one["jacobians"], {name: t[at] for name, t in jacobians.items()})
        assert one["said"] == "ntk with a group keeps the factors of all samples, which max_bytes does not bound"


def _other_dtypes(rank: int, size: int, dtype: torch.dtype) -> Any:
    fn, params, batch = problem(dtype)
    own = part(batch, rank, [15, 9])
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    step = psgrad.clipped_grad(fn, params, own, 0.5, group=mesh["dp"])
    again = psgrad.clipped_grad(fn, params, own, 0.5, group=mesh)
    return {k: (str(g.dtype), g.double().tolist()) for k, g in step.grad.items()}, plain(again.grad) == plain(step.grad)


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float64, 1e-13), (torch.bfloat16, 2e-2)], ids=str)
def test_dtypes_and_meshes(dtype: torch.dtype, digits: float) -> None:
    found = run(_other_dtypes, 2, dtype)
    fn, params, batch = problem(dtype)
    alone = psgrad.clipped_grad(fn, params, batch, 0.5).grad
    for grads, same in found:
        assert same
        assert {name for name, _ in grads.values()} == {str(dtype)}
        assert_close({k: numbers for k, (_, numbers) in grads.items()}, alone, digits)


# ---- errors that all ranks agree on -------------------------------------------------------------------------


def _broken(what: str, fn: Any) -> Any:
    """`fn` as one rank has it."""

    def changed(params: Any, sample: Any) -> Tensor:
        if what == "forward":
            raise RuntimeError("no way on")
        if what == "backward":
            return RaisesInBackward.apply(fn(params, sample))
        if what == "nan":
            return fn(params, sample) * torch.nan
        if what == "loop":
            from ctypes import c_int  # an op that vmap does not know, and then an error

            return fn(params, sample) * float(torch.from_numpy(__import__("numpy").ones(1))) + c_int("no number").value
        return fn(params, sample)

    return changed


def _failing(rank: int, size: int, what: str, bad: int) -> Any:
    sums_module.BUCKET, sums_module.SMALL = 1, 20  # type: ignore[misc]
    fn, params, batch = problem()
    own, group = part(batch, rank, [24 // size] * size), dist.group.WORLD
    mine, monkey = rank == bad, pytest.MonkeyPatch()
    found: dict[str, Any] = {}
    for name, call in CALLS.items():
        if what in ("weights", "nan", "sums") and name not in ("weighted_grad", "clipped_grad"):
            continue
        if (what, name) in (("weights", "clipped_grad"), ("nan", "weighted_grad")):
            continue
        start = time.monotonic()
        try:
            if what == "argument" and mine:
                call(fn, params, own, chunk_size=-1, group=group)
            elif what == "params" and mine:
                call(fn, {"no": "tensor"}, own, group=group)
            elif what == "sums" and mine:  # after the heads have been sent
                with monkey.context() as patch:
                    patch.setattr(sum_module.Sum, "weighted_sum", _without_room)
                    call(fn, params, own, group=group)
            elif what == "weights":
                psgrad.weighted_grad(fn, params, own, _asks_all if not mine else _asks_and_fails, group=group)
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", psgrad.FallbackWarning)
                    call(_broken(what, fn) if mine else fn, params, own, group=group)
            said = "nothing"
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            said = said if getattr(error, "rank", bad) == bad else f"another rank: {said}"
        took = time.monotonic() - start
        step = psgrad.clipped_grad(fn, params, own, 0.5, group=group)  # the next call is as if nothing had been
        found[name] = said, took, plain(step.grad)
    return found


_weighted_sum = sum_module.Sum.weighted_sum


def _without_room(own: Any, w: Tensor | None = None) -> Tensor:
    if tuple(own.whole) == (8, 8):
        raise MemoryError("no room for sums")
    return _weighted_sum(own, w)


def _asks_all(norms: Tensor) -> Tensor:
    """A function of the norms that talks to the other ranks."""
    total = norms.sum()
    dist.all_reduce(total)
    return norms / total


def _asks_and_fails(norms: Tensor) -> Tensor:
    _asks_all(norms)
    raise RuntimeError("no weights")


SAYS = {
    "forward": "RuntimeError: no way on",
    "backward": "RuntimeError: no way back",
    "sums": "MemoryError: no room for sums",
    "nan": "ArgumentError: the gradients of samples 0, 1, 2, 3, 4, 5",
    "argument": "ArgumentError: chunk_size=-1 is not a positive int",
    "params": "ArgumentTypeError: params['no'] is a str, not a tensor",
    "weights": "RuntimeError: no weights",
    "loop": "TypeError: ",
}


@pytest.mark.parametrize(("what", "size"), [(what, 2 + 2 * (what in ("forward", "nan"))) for what in SAYS], ids=str)
def test_all_ranks_raise_if_one_does(what: str, size: int) -> None:
    bad = size - 1
    found = run(_failing, size, what, bad)
    fn, params, batch = problem()
    alone = psgrad.clipped_grad(fn, params, batch, 0.5).grad
    for rank, calls in enumerate(found):
        assert calls
        for said, took, after in calls.values():
            assert said.startswith(SAYS[what] if rank == bad else f"RemoteError: rank {bad}: {SAYS[what]}")
            assert took < 5  # and not the 20 s of the timeout; a quiet machine needs 0.1 s
            assert_close(after, alone)


def _failing_gram(rank: int, size: int) -> Any:
    """One rank fails at each of the stages of a Gram matrix: when it packs, when it unpacks, when it multiplies."""
    fn, params, batch = problem()
    own, group, found = part(batch, rank, [12, 12]), dist.group.WORLD, []
    for home, name in ((parcels, "_packed"), (parcels, "_unpacked"), (sum_module.Sum, "dots")):
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(home, name, _raising)
            try:
                psgrad.gram(fn, params, own, group=group)
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
    return found, psgrad.gram(fn, params, own, group=group).tolist()


def _raising(*_: Any) -> Any:
    raise MemoryError("no room")


def test_all_ranks_raise_if_one_does_in_a_gram_matrix() -> None:
    first, second = run(_failing_gram, 2)
    assert first[0] == ["RemoteError: rank 1: MemoryError: no room"] * 3
    assert second[0] == ["MemoryError: no room"] * 3
    fn, params, batch = problem()
    assert_close([*first[1], *second[1]], psgrad.gram(fn, params, batch))


def _asked_by_others(rank: int, size: int) -> Any:
    """The function of the norms talks to the other ranks, and one rank fails before it is called there."""
    fn, params, batch = problem()
    own = part(batch, rank, [12, 12])
    try:
        psgrad.weighted_grad(_broken("forward", fn) if rank else fn, params, own, _asks_all, group=dist.group.WORLD)
    except RuntimeError as error:
        return type(error).__name__, str(error)


def test_a_function_of_the_norms_is_called_where_the_call_has_failed() -> None:
    assert run(_asked_by_others, 2) == [
        ("RemoteError", "rank 1: RuntimeError: no way on"),
        ("RuntimeError", "no way on"),
    ]


def _different_calls(rank: int, size: int, what: str) -> Any:
    fn, params, batch = problem()
    own, group = part(batch, rank, [12, 12]), dist.group.WORLD
    try:
        if what == "bounds":
            psgrad.clipped_grad(fn, params, own, 0.5 + rank, group=group)
        elif what == "functions":
            (psgrad.grad_stats if rank else psgrad.gram)(fn, params, own, group=group)
        elif what == "names":
            named = {k.replace("bias", "bios") if rank else k: v for k, v in params.items()}
            back = lambda p, s: fn({k.replace("bios", "bias"): v for k, v in p.items()}, s)
            psgrad.weighted_grad(back, named, own, torch.ones(12), group=group)
        elif what == "dtypes":
            psgrad.clipped_grad(fn, {k: v.double() if rank else v for k, v in params.items()}, own, 0.5, group=group)
        else:
            given = {k: v for k, v in params.items() if k != "norm.bias" or rank}
            psgrad.weighted_grad(fn, given, own, torch.ones(12), group=group)
    except psgrad.ArgumentError as error:
        return str(error), plain(psgrad.clipped_grad(fn, params, own, 0.5, group=group).grad)


@pytest.mark.parametrize("what", ["bounds", "functions", "params", "names", "dtypes"])
def test_ranks_that_make_different_calls(what: str) -> None:
    found = run(_different_calls, 2, what)
    said, after = found[0]
    lines = said.splitlines()
    assert found == [(said, after)] * 2
    assert lines[0] == "the ranks of the group do not make the same call"
    assert lines[1].startswith("  rank 0: ")
    assert lines[2].startswith("  rank 1: ")
    assert lines[3] == (
        "  every rank has to call the same function, with the same parameters and bounds, in the same order."
    )
    for line, part_of_it in zip(lines[1:3], WORDS[what], strict=True):
        assert part_of_it in line
    fn, params, batch = problem()
    assert_close(after, psgrad.clipped_grad(fn, params, batch, 0.5).grad)


WORDS = {
    "bounds": ("max_norm=0.5", "max_norm=1.5"),
    "functions": ("gram, 5 parameters", "grad_stats, 5 parameters"),
    "params": ("weighted_grad, 4 parameters", "weighted_grad, 5 parameters"),
    "names": ("'norm.bias', (8,)", "'norm.bios', (8,)"),
    "dtypes": ("(11, 8), torch.float32", "(11, 8), torch.float64"),
}


class _WordlessError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def _odd_failures(rank: int, size: int) -> Any:
    """One rank fails where others would not expect it; each time the next call has to be exact."""
    fn, params, batch = problem()
    own, group = part(batch, rank, [12, 12]), dist.group.WORLD
    none = tuple(t[:0] for t in own)

    def asking(p: Any, sample: Any) -> Tensor:
        psgrad.per_sample_norms(fn, params, own, group=group)
        return fn(p, sample)

    def wordless(p: Any, sample: Any) -> Tensor:
        raise _WordlessError

    def endless(p: Any, sample: Any) -> Tensor:
        return endless(p, sample)

    def unused(p: Any, sample: Any) -> Tensor:
        return torch.zeros(())

    clipped = lambda f, batch=own, **options: psgrad.clipped_grad(f, params, batch, 0.5, group=group, **options)
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {  # of rank 1, and of rank 0
        "a warning after the sums": (lambda: clipped(unused), lambda: clipped(fn)),
        "a call inside fn": (lambda: clipped(asking), lambda: clipped(fn, none)),
        "no words": (lambda: clipped(wordless), lambda: clipped(fn)),
        "endless": (lambda: clipped(endless), lambda: clipped(fn)),
        "no such option": (lambda: clipped(fn, what=1), lambda: clipped(fn)),
        "other weights": (
            lambda: psgrad.weighted_grad(fn, params, own, lambda n: n[1:], group=group),
            lambda: psgrad.weighted_grad(fn, params, own, lambda n: n, group=group),
        ),
    }
    found: dict[str, Any] = {}
    for name, (bad, good) in calls.items():
        start = time.monotonic()
        with warnings.catch_warnings():
            if rank == 1:
                warnings.simplefilter("error", psgrad.UnusedParametersWarning)
            try:
                (bad if rank == 1 else good)()
                said = "nothing"
            except Exception as error:
                said = "" if name == "no words" else f"{type(error).__name__}: {error}".splitlines()[0]
        found[name] = said, time.monotonic() - start, plain(clipped(fn).grad)
    return found


def test_one_rank_fails_where_nobody_expects_it() -> None:
    said = {
        "a warning after the sums": "UnusedParametersWarning: the loss depends on no parameter",
        "a call inside fn": "ArgumentError: per_sample_norms is called with a group inside another call with",
        "endless": "RecursionError: maximum recursion depth exceeded",
        "no such option": "TypeError: clipped_grad() got an unexpected keyword argument 'what'",
        "other weights": "ArgumentError: weights has shape (11,), not (12,)",
    }
    fn, params, batch = problem()
    alone = psgrad.clipped_grad(fn, params, batch, 0.5).grad
    for rank, found in enumerate(run(_odd_failures, 2)):
        for name, (words, took, after) in found.items():
            if name in said:
                assert words.startswith(("" if rank else "RemoteError: rank 1: ") + said[name])
            assert words != "nothing"
            assert took < 5
            assert_close(after, alone)


def _out_of_step(rank: int, size: int, what: str) -> Any:
    """A rank that leaves a call without a word, and goes on: it must not meet the others a call later."""
    fn, params, batch = problem()
    own, group = part(batch, rank, [12, 12]), dist.group.WORLD

    def interrupted(p: Any, sample: Any) -> Tensor:
        if what == "threads":
            threads = [threading.Thread(target=call)]
            threads[0].start()
            threads[0].join()
        elif rank == 1:
            raise KeyboardInterrupt
        return fn(p, sample)

    def call() -> None:
        try:
            psgrad.clipped_grad(interrupted, params, own, 0.5, group=group)
            said.append("nothing")
        except (Exception, KeyboardInterrupt) as error:
            said.append(str(error))

    said: list[str] = []
    call()
    call()
    return said


def test_a_rank_that_is_out_of_step_gets_no_numbers() -> None:
    lost = (
        "clipped_grad is called with a group in which an earlier call was interrupted, or has lost a rank\n"
        "  this rank is out of step with the others: end the job, or make a new group on all ranks."
    )
    first, second = run(_out_of_step, 2, "interrupt", timeout=8)
    assert first[1] == lost
    assert first[0] != "nothing"
    assert second == ["", lost]
    busy = (
        "clipped_grad is called with a group that a call of another thread is using\n"
        "  ranks cannot tell the calls of threads apart: give each thread a group of its own."
    )
    assert run(_out_of_step, 2, "threads") == [[busy, "nothing", lost]] * 2


def _one_dies(rank: int, size: int) -> Any:
    fn, params, batch = problem()

    def deadly(params: Any, sample: Any) -> Tensor:
        if rank == 1:
            os._exit(1)
        return fn(params, sample)

    start = time.monotonic()
    try:
        psgrad.clipped_grad(deadly, params, part(batch, rank, [12, 12]), 0.5, group=dist.group.WORLD)
    except psgrad.PsgradError:
        raise
    except RuntimeError:  # torch's own
        return time.monotonic() - start


def test_a_process_that_dies_ends_the_others_within_the_timeout() -> None:
    assert run(_one_dies, 2, timeout=4, dead=(1,))[0] < 10


# ---- seeds -------------------------------------------------------------------------------------------------


def _seeds(rank: int, size: int, shared: bool, drop: float, randomness: str = "different") -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(drop), nn.Linear(8, 3))
    fn, params = psgrad.from_module(model, F.cross_entropy)
    x, y = torch.randn(6, 4), torch.zeros(6, dtype=torch.long)
    torch.manual_seed(7 if shared else rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        psgrad.clipped_grad(fn, params, (x, y), 0.5, randomness=randomness, group=dist.group.WORLD)
    return [(w.category.__name__, str(w.message), os.path.basename(w.filename)) for w in caught]


@pytest.mark.parametrize(
    ("shared", "drop", "randomness", "warned"),
    [(True, 0.5, "different", True), (False, 0.5, "different", False), (True, 0.0, "error", False)],
)
def test_ranks_that_share_a_seed_are_warned(shared: bool, drop: float, randomness: str, warned: bool) -> None:
    said = (
        "ranks 0, 1 drew the same random numbers for different samples\n"
        "  seed every rank that has samples of its own differently: torch.manual_seed(seed + rank)."
    )
    expected = [("SharedSeedWarning", said, "test_processes.py")] if warned else []
    assert run(_seeds, 2, shared, drop, randomness) == [expected] * 2


# ---- bad groups --------------------------------------------------------------------------------------------


def test_a_group_needs_processes() -> None:
    fn, params, batch = problem()
    with pytest.raises(psgrad.ArgumentError) as caught:
        psgrad.clipped_grad(fn, params, batch, 0.5, group=object())  # type: ignore[call-overload]
    assert str(caught.value) == (
        "group is given, but torch.distributed has no process group yet\n"
        "  call torch.distributed.init_process_group first, in every process; torchrun sets what it reads."
    )


def _inside_a_transform(rank: int, size: int) -> Any:
    fn, params, batch = problem()

    def total(scale: Tensor) -> Tensor:
        return psgrad.per_sample_norms(lambda p, s: scale * fn(p, s), params, batch, group=dist.group.WORLD).sum()

    try:
        torch.func.grad(total)(torch.ones(()))
    except psgrad.PsgradError as error:
        return str(error)


def test_a_group_inside_a_transform_is_refused() -> None:
    said = (
        "per_sample_norms is called with a group inside a torch.func transform\n"
        "  ranks talk about numbers, which are not there yet: call it outside, or without a group."
    )
    assert run(_inside_a_transform, 2) == [said] * 2


def _bad_groups(rank: int, size: int) -> Any:
    fn, params, batch = problem()
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    own = dist.new_group([0])
    said = []
    for group in ("world", mesh, own):
        try:
            psgrad.clipped_grad(fn, params, part(batch, rank, [4, 4]), 0.5, group=group)  # type: ignore[call-overload]
            said.append("nothing")
        except psgrad.PsgradError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_groups_that_are_none() -> None:
    first, second = run(_bad_groups, 2)
    assert first[:2] == second[:2]
    assert first == [
        "ArgumentTypeError: group is a str, not a process group\n"
        "  give a ProcessGroup, as torch.distributed.group.WORLD is one, or a DeviceMesh with one axis.",
        "ArgumentError: group is a mesh with 2 axes, ('dp', 'tp')\n"
        "  give the axis along which samples are split, mesh[name], or torch.distributed.group.WORLD.",
        "nothing",
    ]
    assert second[2] == ("ArgumentError: this process, rank 1, is not in the group\n  call only where it is a member.")


# ---- parameters in pieces ----------------------------------------------------------------------------------


def _in_pieces(rank: int, size: int, shape: tuple[int, ...]) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    fn, params, batch = problem()
    own, group = part(batch, rank, [24 - 3 * (size - 1)] + [3] * (size - 1)), dist.group.WORLD
    mesh = dist.device_mesh.init_device_mesh("cpu", shape)
    first = [Replicate()] * (len(shape) - 1)
    pieces = {
        k: distribute_tensor(p, mesh, [*first, Shard(p.dim() - 1) if p.dim() > 1 else Shard(0)], src_data_rank=None)
        for k, p in params.items()
    }
    pieces["norm.bias"] = params["norm.bias"]  # one that is whole on every rank
    step = psgrad.clipped_grad(fn, pieces, own, 0.5, group=group)
    stats = psgrad.grad_stats(fn, params=pieces, batch=own, group=group)
    for tree in (step.grad, stats.mean, stats.variance):
        for k, t in tree.items():
            given = pieces[k]
            assert isinstance(t, DTensor) == isinstance(given, DTensor), k
            if isinstance(t, DTensor) and isinstance(given, DTensor):
                assert (t.placements, t.device_mesh) == (given.placements, given.device_mesh)
                assert t.to_local().shape == given.to_local().shape
    full = lambda tree: {k: (t.full_tensor() if isinstance(t, DTensor) else t).tolist() for k, t in tree.items()}
    found = {
        "clipped": full(step.grad),
        "mean": full(stats.mean),
        "weighted": full(psgrad.weighted_grad(fn, pieces, own, torch.ones(len(own[0])), group=group)),
        "norms": psgrad.per_sample_norms(fn, pieces, own, group=group).tolist(),
        "gram": psgrad.gram(fn, pieces, own, group=group).tolist(),
    }
    try:
        psgrad.clipped_grad(fn, pieces, own, 0.5 if rank else -1.0, group=group)
    except psgrad.PsgradError as error:
        found["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
    try:  # one rank's are whole
        psgrad.clipped_grad(fn, pieces if rank else params, own, 0.5, group=group)
    except psgrad.PsgradError as error:
        found["mixed"] = str(error).splitlines()[0]
    with torch.no_grad():  # an optimizer's step on the pieces
        for k, p in pieces.items():
            p -= 0.1 * step.grad[k]
    found["after"] = full(pieces)
    return found


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_parameters_in_pieces(shape: tuple[int, ...]) -> None:
    found = run(_in_pieces, sum(shape) if len(shape) > 1 else 2, shape)
    fn, params, batch = problem()
    step = psgrad.clipped_grad(fn, params, batch, 0.5)
    sizes = [24 - 3 * (len(found) - 1)] + [3] * (len(found) - 1)
    for rank, one in enumerate(found):
        at = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        assert_close(one["clipped"], step.grad)
        assert_close(one["mean"], psgrad.grad_stats(fn, params, batch).mean)
        assert_close(one["weighted"], psgrad.weighted_grad(fn, params, batch, torch.ones(24)))
        assert_close(one["norms"], step.norms[at])
        assert_close(one["gram"], psgrad.gram(fn, params, batch)[at])
        assert_close(one["after"], {k: p - 0.1 * step.grad[k] for k, p in params.items()})
        wrong = "ArgumentError: max_norm=-1.0 is not positive"
        assert one["failed"] == (f"RemoteError: rank 0: {wrong}" if rank else wrong)
        assert one["mixed"] == "the ranks of the group do not make the same call"


def _pieces_elsewhere(rank: int, size: int) -> Any:
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    fn, params, batch = problem()
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    said = []
    split = distribute_tensor(params["table.weight"], mesh["tp"], [Shard(0)], src_data_rank=None)
    partial = DTensor.from_local(params["table.weight"], mesh["dp"], [Partial()], run_check=False)
    for table in (split, partial):
        try:
            psgrad.per_sample_norms(fn, params | {"table.weight": table}, part(batch, rank, [6] * 4), group=mesh["dp"])
        except psgrad.ArgumentError as error:
            said.append(str(error))
    return said


def test_pieces_on_ranks_that_are_not_in_the_group() -> None:
    for rank, said in enumerate(run(_pieces_elsewhere, 4)):
        other = [1, 0, 3, 2][rank]
        assert said == [
            f"params['table.weight'] is a DTensor with pieces on rank {other}, which is not in the group\n"
            "  sums over the group would not be those of that rank: give a group of all ranks of its mesh.",
            "params['table.weight'] is a DTensor that is still to be summed: (Partial(sum),)\n  redistribute it first.",
        ]
