"""Models under fully_shard, layer by layer: 2 and 4 processes, beside one process that has the model whole."""

import os
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import psgrad

from .processes import RaisesInBackward, Traffic, run
from .test_processes import assert_close, part

if dist.is_available():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

pytestmark = pytest.mark.skipif(not dist.is_available() or not hasattr(os, "fork"), reason="no processes to fork")


class Block(nn.Module):
    def __init__(self, width: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.checkpointed = checkpointed

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)


class Net(nn.Module):
    """A small language model; `kind` says what is special about it."""

    def __init__(self, kind: str = "", width: int = 6, words: int = 11) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width, kind == "checkpoint inside") for _ in range(3)])
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.head = nn.Linear(width, words, bias=False)
        if kind == "tied":
            self.head.weight = self.table.weight
        if kind == "weight norm":
            self.blocks[1].up = nn.utils.parametrizations.weight_norm(self.blocks[1].up)
        if kind == "frozen":
            self.blocks[1].requires_grad_(False)
            self.table.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        blocks = list(self.blocks)
        if self.kind == "orders" and (tokens == 10).all():
            blocks[1:] = blocks[:0:-1]
        if self.kind == "skips" and (tokens == 10).all():
            del blocks[1]
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.kind == "checkpoint outside" else block(x)
        if self.kind == "twice":
            x = self.blocks[0](x)
        if self.kind == "branch" and x.sum() > 0:
            x = x * 2
        return self.head(x * self.scale)


def tokens_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().mT, tokens)


def net(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Net, Any]:
    torch.manual_seed(0)
    model = Net(kind).to(dtype)
    return model, (torch.randint(11, (24, 5)), torch.randint(11, (24, 5)))


def sharded(kind: str, shape: tuple[int, ...]) -> tuple[Net, Any]:
    model, batch = net(kind)
    names = ("replicate", "shard") if len(shape) > 1 else ("shard",)
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
    options: dict[str, Any] = {"mesh": mesh}
    if kind == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model, batch


def whole(tree: Any) -> Any:
    return {name: (t.full_tensor() if hasattr(t, "full_tensor") else t).tolist() for name, t in tree.items()}


def ordinary_step(model: nn.Module, batch: Any) -> list[float]:
    """An ordinary step of FSDP2: the loss, and the norms of all gradients."""
    model.zero_grad()
    loss = tokens_loss(model(batch[0]), batch[1])
    loss.backward()
    found = [loss.item()] + [p.grad.full_tensor().norm().item() for p in model.parameters() if p.requires_grad]  # type: ignore[union-attr]
    model.zero_grad()
    return found


def _layers(rank: int, size: int, kind: str, sizes: list[int], shape: tuple[int, ...]) -> Any:
    warnings.simplefilter("error")  # no loop over samples, no shared seed
    model, batch = sharded(kind, shape)
    own, group = part(batch, rank, sizes), dist.group.WORLD
    before = ordinary_step(model, part(batch, 0, [6]))
    fn, params = psgrad.from_module(model, tokens_loss)
    step = psgrad.clipped_grad(fn, params, own, 0.5, group=group)
    for name, g in step.grad.items():
        p = params[name]
        assert (g.placements, g.dtype, g.to_local().shape) == (p.placements, p.dtype, p.to_local().shape), name
    given = torch.linspace(-1, 2, sum(sizes)).split(sizes)[rank]
    squares = {name: g.square() for name, g in step.grad.items()}
    found = {
        "clipped": whole(step.grad),
        "norms": step.norms.tolist(),
        "count": step.count,
        "little": whole(psgrad.clipped_grad(fn, params, own, 0.5, max_bytes=20_000, group=group).grad),
        "little by norm": whole(
            psgrad.weighted_grad(fn, params, own, lambda norms: 1 / norms, max_bytes=20_000, group=group)
        ),
        "little weighted": whole(psgrad.weighted_grad(fn, params, own, given, max_bytes=20_000, group=group)),
        "little norms": psgrad.per_sample_norms(fn, params, own, max_bytes=20_000, group=group).tolist(),
        "chunks": whole(psgrad.clipped_grad(fn, params, own, 0.5, chunk_size=5, group=group).grad),
        "weighted": whole(psgrad.weighted_grad(fn, params, own, given, group=group)),
        "by norm": whole(psgrad.weighted_grad(fn, params, own, lambda norms: 1 / norms, group=group)),
        "only norms": psgrad.per_sample_norms(fn, params, own, chunk_size=7, group=group).tolist(),
        "gram": psgrad.gram(fn, params, own, group=group).tolist(),
        "dots": psgrad.per_sample_dots(fn, params, own, step.grad, group=group).tolist(),
        "projected": psgrad.projected_grads(fn, params, own, 16, normalize=squares, eps=0.1, group=group).tolist(),
        "kron": {k: whole(f._asdict()) for k, f in psgrad.kron_factors(fn, params, own, group=group).items()},
        "before": before,
        "after": ordinary_step(model, part(batch, 0, [6])),
    }
    stats = psgrad.grad_stats(fn, params, own, group=group)
    found |= {
        "mean": whole(stats.mean),
        "variance": whole(stats.variance),
        "scale": [float(stats.trace), float(stats.sq_mean)],
    }
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in step.grad:
                p -= 0.1 * step.grad[name]
    found["next"] = whole(psgrad.clipped_grad(fn, params, own, 0.5, group=group).grad)
    return found


KINDS = [
    ("", [12, 12], (2,)),
    ("", [10, 0, 13, 1], (4,)),
    ("", [7, 5, 6, 6], (2, 2)),
    ("tied", [20, 4], (2,)),
    ("frozen", [24, 0], (2,)),
    ("twice", [12, 12], (2,)),
    ("branch", [15, 9], (2,)),
    ("weight norm", [12, 12], (2,)),
    ("checkpoint inside", [12, 12], (2,)),
    ("checkpoint outside", [14, 10], (2,)),
]


@pytest.mark.parametrize(("kind", "sizes", "shape"), KINDS, ids=str)
def test_layer_by_layer(kind: str, sizes: list[int], shape: tuple[int, ...]) -> None:
    found = run(_layers, len(sizes), kind, sizes, shape)
    model, batch = net(kind)
    fn, params = psgrad.from_module(model, tokens_loss)
    step = psgrad.clipped_grad(fn, params, batch, 0.5)
    stats, products = psgrad.grad_stats(fn, params, batch), psgrad.gram(fn, params, batch)
    weighted = psgrad.weighted_grad(fn, params, batch, torch.linspace(-1, 2, 24))
    by_norm = psgrad.weighted_grad(fn, params, batch, lambda norms: 1 / norms)
    dots = psgrad.per_sample_dots(fn, params, batch, step.grad)
    squares = {name: g.square() for name, g in step.grad.items()}
    projected = psgrad.projected_grads(fn, params, batch, 16, normalize=squares, eps=0.1)
    kron = psgrad.kron_factors(fn, params, batch)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in step.grad:
                p -= 0.1 * step.grad[name]
    following = psgrad.clipped_grad(fn, params, batch, 0.5).grad
    for rank, one in enumerate(found):
        at = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        assert one["count"] == 24
        for name in ("clipped", "chunks", "little"):
            assert_close(one[name], step.grad, 2e-6)
        for name in ("weighted", "little weighted"):
            assert_close(one[name], weighted, 2e-6)
        for name in ("by norm", "little by norm"):
            assert_close(one[name], by_norm, 2e-6)
        for name in ("norms", "only norms", "little norms"):
            assert_close(one[name], step.norms[at], 2e-6)
        assert_close(one["gram"], products[at], 2e-6)
        assert_close(one["dots"], dots[at], 5e-6)
        assert_close(one["projected"], projected[at], 5e-6)
        assert_close(one["kron"], {name: factors._asdict() for name, factors in kron.items()}, 2e-6)
        assert_close(one["mean"], stats.mean, 2e-6)
        assert_close(one["variance"], stats.variance, 5e-6)
        assert_close(one["scale"], [float(stats.trace), float(stats.sq_mean)], 1e-5)
        assert_close(one["next"], following, 2e-6)
        assert one["before"] == one["after"]


def _mixed(rank: int, size: int) -> Any:
    model, batch = sharded("mixed", (2,))
    fn, params = psgrad.from_module(model, tokens_loss)
    step = psgrad.clipped_grad(fn, params, part(batch, rank, [14, 10]), 0.5, group=dist.group.WORLD)
    assert {g.dtype for g in step.grad.values()} == {torch.float32}
    return whole(step.grad), step.norms.tolist()


def test_mixed_precision() -> None:
    """Layers run in bfloat16, as the policy says; sums are taken and returned in float32."""
    model, batch = net("", torch.bfloat16)
    fn, params = psgrad.from_module(model, tokens_loss)
    kept = psgrad.factored_grads(fn, params, batch)
    norms = kept.norms()
    sums = kept.to("cpu")._sums([(0.5 / norms).clamp(max=1)] * len(params))
    for rank, (grad, own) in enumerate(run(_mixed, 2)):
        assert_close(own, norms[slice(0, 14) if rank == 0 else slice(14, 24)], 1e-6)
        assert_close(grad, dict(zip(sorted(params), sums, strict=True)), 1e-6)


# ---- how much is gathered, and held -------------------------------------------------------------------------


def _traffic(rank: int, size: int) -> Any:
    """Bytes that are gathered and scattered by an ordinary step, and by ours; and what is alive at once."""
    model, batch = sharded("", (2,))
    fn, params = psgrad.from_module(model, tokens_loss)
    own = part(batch, rank, [12, 12])
    psgrad.clipped_grad(fn, params, own, 0.5, group=dist.group.WORLD)  # the first learns in which order layers come
    found: dict[str, Any] = {}
    for name, call in {
        "ordinary": lambda: tokens_loss(model(own[0]), own[1]).backward(),
        "clipped": lambda: psgrad.clipped_grad(fn, params, own, 0.5, group=dist.group.WORLD),
        "norms": lambda: psgrad.per_sample_norms(fn, params, own, group=dist.group.WORLD),
    }.items():
        with Traffic() as traffic:
            call()
        found[name] = traffic.bytes
    with torch.no_grad():
        model(own[0])
    with Traffic() as traffic:
        psgrad.clipped_grad(fn, params, own, 0.5, group=dist.group.WORLD)
    found["after an evaluation"] = traffic.bytes
    alive: list[int] = []
    layers = fn.psgrad_layers  # type: ignore[attr-defined]

    storages = [param.gathered().untyped_storage() for param in layers.params.values()]

    def watch(*_: Any) -> None:
        alive.append(sum(storage.nbytes() for storage in storages))

    for block in model.blocks:
        block.up.register_forward_hook(watch)
    psgrad.clipped_grad(fn, params, own, 0.5, group=dist.group.WORLD)
    watch()
    found["alive"] = alive
    found["all"] = sum(t.numel() * 4 for t in params.values())
    found["block"] = sum(t.numel() * 4 for t in model.blocks[0].parameters())
    return found


def test_no_more_is_gathered_than_by_an_ordinary_step() -> None:
    for found in run(_traffic, 2):
        ordinary, clipped, norms = (found[name] for name in ("ordinary", "clipped", "norms"))
        assert ordinary["gathered"] == clipped["gathered"] == norms["gathered"] > found["all"]
        assert clipped["scattered"] <= ordinary["scattered"] + 1000
        assert norms["scattered"] == 0
        assert found["after an evaluation"] == clipped
        assert clipped["reduced"] + norms["reduced"] < 40_000  # what ranks have to know of each other
        *during, after = found["alive"]
        assert after == 0
        assert len(during) == 3
        assert (
            max(during) <= found["all"] - 2 * found["block"] + 100
        )  # the root's own, one block, and what fills up pieces


# ---- errors ------------------------------------------------------------------------------------------------


def _failing(rank: int, size: int, what: str, first: bool) -> Any:
    model, batch = sharded("", (size,))
    fn, params = psgrad.from_module(model, tokens_loss)
    own, group = part(batch, rank, [24 // size] * size), dist.group.WORLD
    if not first:
        psgrad.clipped_grad(fn, params, own, 0.5, group=group)
    bad, broken = rank == size - 1, [rank == size - 1]

    def breaking(module: nn.Module, args: Any, output: Tensor) -> Any:
        if not broken[0] or len(module.forward_count) <= first:  # type: ignore[arg-type]
            return None
        if what == "forward":
            raise RuntimeError("no way on")
        if what == "backward":
            return RaisesInBackward.apply(output)
        return output * torch.nan if what == "nan" else None

    block = model.blocks[1]
    block.forward_count = []  # type: ignore[assignment]
    block.up.forward_count = block.forward_count  # type: ignore[assignment]
    block.up.register_forward_pre_hook(lambda module, _: module.forward_count.append(1))  # type: ignore[operator, union-attr]
    block.up.register_forward_hook(breaking)

    def weights(norms: Tensor) -> Tensor:
        if what == "weights" and broken[0]:
            raise RuntimeError("no weights")
        return torch.ones_like(norms)

    start = time.monotonic()
    try:
        if what == "argument":
            psgrad.clipped_grad(fn, params, own, 0.5, chunk_size=-1 if bad else None, group=group)
        elif what == "weights":
            psgrad.weighted_grad(fn, params, own, weights, group=group)
        else:
            psgrad.clipped_grad(fn, params, own, 0.5, group=group)
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
    took, broken[0] = time.monotonic() - start, False
    step = psgrad.clipped_grad(fn, params, own, 0.5, group=group)
    return said, took, whole(step.grad), ordinary_step(model, part(batch, 0, [6]))


SAYS = {
    "forward": "RuntimeError: no way on",
    "backward": "RuntimeError: no way back",
    "nan": "ArgumentError: the gradients of samples 0, 1, 2, 3, 4, 5",
    "argument": "ArgumentError: chunk_size=-1 is not a positive int",
    "weights": "RuntimeError: no weights",
}


@pytest.mark.parametrize(
    ("what", "size", "first"),
    [(what, 4 if what == "forward" else 2, what in ("argument", "backward")) for what in SAYS],
)
def test_all_ranks_raise_if_one_does(what: str, size: int, first: bool) -> None:
    found = run(_failing, size, what, first)
    model, batch = net("")
    fn, params = psgrad.from_module(model, tokens_loss)
    alone = psgrad.clipped_grad(fn, params, batch, 0.5).grad
    for rank, (said, took, after, ordinary) in enumerate(found):
        bad = size - 1
        assert said.startswith(SAYS[what] if rank == bad else f"RemoteError: rank {bad}: {SAYS[what]}")
        assert took < 5  # and not the 20 s of the timeout
        assert_close(after, alone, 2e-6)
        assert ordinary == found[0][3]


def _one_dies(rank: int, size: int) -> Any:
    model, batch = sharded("", (2,))
    fn, params = psgrad.from_module(model, tokens_loss)
    own, group = part(batch, rank, [12, 12]), dist.group.WORLD
    psgrad.clipped_grad(fn, params, own, 0.5, group=group)
    if rank == 1:
        model.blocks[1].up.register_forward_hook(lambda *_: os._exit(1))
    start = time.monotonic()
    try:
        psgrad.clipped_grad(fn, params, own, 0.5, group=group)
    except psgrad.PsgradError:
        raise
    except RuntimeError:
        return time.monotonic() - start


def test_a_process_that_dies_ends_the_others_within_the_timeout() -> None:
    assert run(_one_dies, 2, timeout=4, dead=(1,))[0] < 10


class _OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


def _refused(rank: int, size: int) -> Any:
    model, batch = sharded("", (2,))
    fn, params = psgrad.from_module(model, tokens_loss)
    own, group = part(batch, rank, [12, 12]), dist.group.WORLD
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    kept = psgrad.factored_grads(fn, params, own, group=group)
    part_only = Net("")
    fully_shard(part_only.blocks[0])
    one_left = Net("")
    fully_shard(one_left, ignored_params={one_left.scale})
    doubled = {name: p * 2 for name, p in params.items()}
    found = {}
    for name, call in {
        "max_bytes": lambda: psgrad.gram(fn, params, own, max_bytes="1GB", group=group),
        "bounds": lambda: psgrad.clipped_grad(
            fn, params, own, {"table": 1.0, "blocks": 1.0, "scale": 1.0, "head": 1.0}, max_bytes="1GB", group=group
        ),
        "little": lambda: psgrad.clipped_grad(fn, params, own, 0.5, max_bytes=100, group=group),
        "stats": lambda: psgrad.grad_stats(fn, params, own, max_bytes="1GB", group=group),
        "group": lambda: psgrad.per_sample_norms(fn, params, own, group=alone),
        "params": lambda: psgrad.per_sample_norms(fn, doubled, own, group=group),
        "has_aux": lambda: psgrad.per_sample_norms(fn, params, own, has_aux=True, group=group),
        "differentiable": lambda: psgrad.per_sample_norms(
            fn, params, (own[0], torch.randn(12, 5, requires_grad=True)), differentiable=True, group=group
        ),
        "other": lambda: psgrad.gram(fn, params, own, own, group=group),
        "root": lambda: psgrad.from_module(part_only, tokens_loss),
        "left": lambda: psgrad.from_module(one_left, tokens_loss),
        "by hand": lambda: fn(params, (own[0][0], own[1][0])),
    }.items():
        try:
            call()
            found[name] = "nothing"
        except psgrad.PsgradError as error:
            found[name] = str(error)
    found["dense"] = {name: g.tolist() for name, g in kept.dense().items()}
    found["kept"] = psgrad.gram(fn, params, own, kept, group=group).tolist()
    some = {name: p for name, p in params.items() if name.startswith("blocks.1.")}
    found["some"] = whole(psgrad.clipped_grad(fn, some, own, 0.5, group=group).grad)
    return found


def test_what_is_refused_and_what_is_not() -> None:
    first, second = run(_refused, 2)
    model, batch = net("")
    fn, params = psgrad.from_module(model, tokens_loss)
    for rank, one in enumerate((first, second)):
        assert one.pop("little").startswith("max_bytes=100 is too little: one sample at a time needs ")
        at = slice(12 * rank, 12 * rank + 12)
        grads = psgrad.per_sample_grads(fn, params, batch)
        assert_close(one.pop("dense"), {name: g[at] for name, g in grads.items()}, 2e-6)
        assert_close(one.pop("kept"), psgrad.gram(fn, params, batch)[at], 2e-6)
        some = {name: p for name, p in params.items() if name.startswith("blocks.1.")}
        assert_close(one.pop("some"), psgrad.clipped_grad(fn, some, batch, 0.5).grad, 2e-6)
        assert one == {
            "group": f"params['scale'] is sharded over ranks [0, 1], and the group has [{rank}]\n"
            "  give a group of all ranks of the model's mesh, such as torch.distributed.group.WORLD.",
            "max_bytes": "gram with a group keeps the factors of all samples, which max_bytes does not bound\n"
            "  give chunk_size, for what runs at once, or no group.",
            "bounds": "max_bytes and several bounds are given, and a model under fully_shard takes one weight for all "
            "parameters then\n  give one bound, or chunk_size.",
            "stats": "max_bytes is given, and for a model under fully_shard this keeps the factors of all samples\n"
            "  give chunk_size: how many samples run at once.",
            "params": "params['scale'] is not the model's own, and a model under fully_shard runs on its "
            "own alone\n  give what from_module returned; load other values into the model.",
            "has_aux": "has_aux is given, and from_module's fn returns the loss alone\n  drop has_aux.",
            "differentiable": "differentiable=True, and the parameters of a model under fully_shard are there for a "
            "layer at a time\n  give the model before fully_shard.",
            "other": "other is a second batch, and a model under fully_shard runs one in a call\n"
            "  give its factored_grads(..., group=...).",
            "root": "a part of the model is sharded by fully_shard, but the model itself is not\n"
            "  call fully_shard(model), too: it has to be the root.",
            "left": "parameter 'scale' of the model is trainable, but not under fully_shard\n"
            "  shard it, too, or set requires_grad to False.",
            "by hand": "fn of a model under fully_shard is called without a group\n"
            "  say group= with the ranks that hold the model, as torch.distributed.group.WORLD.",
        }


def _loops(rank: int, size: int) -> Any:
    """Where samples would have to run one by one: on one rank alone, and on all; then a model with dropout."""
    model, batch = sharded("", (2,))
    fn, params = psgrad.from_module(model, tokens_loss)
    own, group = part(batch, rank, [12, 12]), dist.group.WORLD
    psgrad.per_sample_norms(fn, params, own, group=group)
    said = []
    hook = lambda *a: torch.autograd.graph.save_on_cpu().__enter__() if rank == 1 else None
    handle = model.blocks[1].up.register_forward_hook(hook)
    try:
        psgrad.per_sample_norms(fn, params, own, group=group)
    except psgrad.PsgradError as error:
        said.append(f"{type(error).__name__}: {error}".splitlines()[0])
    handle.remove()
    if rank == 1:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    return said, psgrad.per_sample_norms(fn, params, own, group=group).tolist()


def test_samples_that_would_have_to_run_one_by_one() -> None:
    first, second = run(_loops, 2)
    why = (
        "UnsupportedOpError: samples of a model under fully_shard would have to run one by one: "
        "fn packs what autograd saves"
    )
    assert (first[0], second[0]) == ([f"RemoteError: rank 1: {why}"], [why])
    model, batch = net("")
    norms = psgrad.per_sample_norms(*psgrad.from_module(model, tokens_loss), batch)
    assert_close([*first[1], *second[1]], norms, 2e-6)


def _drops(rank: int, size: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    fully_shard(model[0])
    fully_shard(model)
    fn, params = psgrad.from_module(model, F.cross_entropy)
    x, y = torch.randn(12, 4), torch.zeros(12, dtype=torch.long)
    torch.manual_seed(7 + rank)
    sizes = [9, 3]
    own = part((x, y), rank, sizes)
    step = psgrad.clipped_grad(fn, params, own, 0.5, chunk_size=3, group=dist.group.WORLD)
    return whole(step.grad), step.norms.tolist()


def test_random_numbers_are_those_of_a_rank_of_its_own() -> None:
    """Passes on zeros, which a rank runs for the others, draw nothing that it would miss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    fn, params = psgrad.from_module(model, F.cross_entropy)
    x, y = torch.randn(12, 4), torch.zeros(12, dtype=torch.long)
    total: dict[str, Tensor] = {}
    norms = []
    for rank in range(2):
        torch.manual_seed(7 + rank)
        step = psgrad.clipped_grad(fn, params, part((x, y), rank, [9, 3]), 0.5, chunk_size=3)
        total = {name: g + total.get(name, 0) for name, g in step.grad.items()}
        norms.append(step.norms)
    for rank, (grad, own) in enumerate(run(_drops, 2)):
        assert_close(grad, total, 2e-6)
        assert_close(own, norms[rank], 2e-6)


def _orders(rank: int, size: int) -> Any:
    """One rank's samples take the layers in another order: it would get pieces of one for those of another."""
    model, batch = sharded("orders", (2,))
    fn, params = psgrad.from_module(model, tokens_loss)
    tens, said = torch.full((4, 5), 10), []
    for tokens in (tens * 0, tens * rank, tens):  # the usual order; one on each rank; the other on both
        try:
            psgrad.per_sample_norms(fn, params, (tokens, tens), group=dist.group.WORLD)
            said.append("nothing")
        except psgrad.UnsupportedOpError as error:
            said.append(str(error))
    own = part(batch, rank, [12, 12])
    return said, psgrad.per_sample_norms(fn, params, own, group=dist.group.WORLD).tolist()


def test_ranks_that_run_layers_in_different_orders() -> None:
    wrong = (
        "the ranks of the group ran the layers of the model in different orders\n"
        "  under fully_shard every rank has to call the same modules in the same order."
    )
    first, second = run(_orders, 2)
    assert first[0] == second[0] == ["nothing", wrong, "nothing"]
    model, batch = net("orders")
    norms = psgrad.per_sample_norms(*psgrad.from_module(model, tokens_loss), batch)
    assert_close([*first[1], *second[1]], norms, 2e-6)


def _skips(rank: int, size: int) -> Any:
    """One rank's samples leave a layer out: it takes part in the gathers of the others all the same."""
    model, batch = sharded("skips", (2,))
    fn, params = psgrad.from_module(model, tokens_loss)
    own, group = part(_skipping(batch), rank, [14, 10]), dist.group.WORLD
    found = [
        psgrad.clipped_grad(fn, params, own, 0.5, group=group),
        psgrad.clipped_grad(fn, params, own, 0.5, max_bytes=20_000, group=group),
    ]
    return [(whole(step.grad), step.norms.tolist()) for step in found], ordinary_step(model, part(batch, 0, [6]))


def _skipping(batch: Any) -> Any:
    tokens = batch[0].clone()
    tokens[14:] = 10
    return tokens, batch[1]


def test_a_rank_that_leaves_layers_out() -> None:
    first, second = run(_skips, 2)
    model, batch = net("skips")
    alone = psgrad.clipped_grad(*psgrad.from_module(model, tokens_loss), _skipping(batch), 0.5)
    for rank, (steps, ordinary) in enumerate((first, second)):
        for grad, norms in steps:
            assert_close(grad, alone.grad, 2e-6)
            assert_close(norms, alone.norms[slice(14) if rank == 0 else slice(14, 24)], 2e-6)
        assert ordinary == first[1]


def _odd_failures(rank: int, size: int) -> Any:
    """One rank fails in the first pass of a model, fails before a function that talks, and wants a layer once more."""
    found: dict[str, Any] = {}
    group, batch = dist.group.WORLD, net("")[1]
    own = part(batch, rank, [12, 12])

    def asks_all(norms: Tensor) -> Tensor:
        total = norms.sum()
        dist.all_reduce(total)
        return norms / total

    def failing(*_: Any) -> None:
        if rank == 1:
            raise RuntimeError("no way on")

    model, (fn, params) = nn.Module(), (None, None)
    little: dict[str, Any] = {"max_bytes": 20_000}
    for name, options in {"first": {}, "little": little, "weights": little, "talks": {}, "twice": {}}.items():
        if name in ("first", "little"):
            model = sharded("", (2,))[0]
            fn, params = psgrad.from_module(model, tokens_loss)
        if name == "twice":
            model.kind = "twice" if rank == 1 else ""  # type: ignore[assignment]
        elif name != "weights":
            handle = model.blocks[1].up.register_forward_hook(failing)  # type: ignore[union-attr, index]
        start = time.monotonic()
        try:
            if name == "weights":  # by a function of the norms on one rank, which takes passes of its own
                weights: Any = torch.ones(12) if rank else torch.ones_like
                psgrad.weighted_grad(fn, params, own, weights, group=group, **options)
            elif name == "talks":
                psgrad.weighted_grad(fn, params, own, asks_all, group=group, **options)
            else:
                psgrad.clipped_grad(fn, params, own, 0.5, group=group, **options)
            said = "nothing"
        except Exception as error:
            said = f"{type(error).__name__}: {error}".splitlines()[0]
        took = time.monotonic() - start
        handle.remove()
        model.kind = ""  # type: ignore[assignment]
        after = whole(psgrad.clipped_grad(fn, params, own, 0.5, group=group, **options).grad)
        found[name] = said, took, after, ordinary_step(model, part(batch, 0, [6]))
    return found


def test_one_rank_fails_where_nobody_expects_it() -> None:
    found = run(_odd_failures, 2)
    model, batch = net("")
    alone = psgrad.clipped_grad(*psgrad.from_module(model, tokens_loss), batch, 0.5).grad
    for rank, one in enumerate(found):
        for name, (said, took, after, ordinary) in one.items():
            failed = "RuntimeError: no way on" if rank else "RemoteError: rank 1: RuntimeError: no way on"
            wrong = "UnsupportedOpError: the ranks of the group ran the layers of the model in different orders"
            differ = "ArgumentError: the ranks of the group do not make the same call"
            assert said == {"twice": wrong, "weights": differ}.get(name, failed)
            assert took < 5
            assert_close(after, alone, 2e-6)
            assert ordinary == found[0][name][3]


# ---- where memory is short ---------------------------------------------------------------------------------


def _two_passes(rank: int, size: int, what: str) -> Any:
    """How many passes there are, and one rank that fails in the very last."""
    model, batch = sharded("", (2,))
    fn, params = psgrad.from_module(model, tokens_loss)
    own, group = part(batch, rank, [16, 8]), dist.group.WORLD
    runs: list[int] = []
    last = [10**6]

    def counting(module: nn.Module, args: Any, output: Tensor) -> Any:
        runs.append(len(output.shape))
        if len(runs) < last[0]:
            return None
        if what == "forward":
            raise RuntimeError("no way on")
        return RaisesInBackward.apply(output)

    model.blocks[1].up.register_forward_hook(counting)
    found = []
    for most in ("1GB", 20_000):
        psgrad.clipped_grad(fn, params, own, 0.5, max_bytes=most, group=group)
        runs.clear()
        step = psgrad.clipped_grad(fn, params, own, 0.5, max_bytes=most, group=group)
        found.append((len(runs), whole(step.grad)))
    last[0] = len(runs) if rank == 0 else last[0]  # which has most samples: the others run on zeros by then
    runs.clear()
    try:
        psgrad.clipped_grad(fn, params, own, 0.5, max_bytes=20_000, group=group)
        said = "nothing"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    last[0] = 10**6
    after = psgrad.clipped_grad(fn, params, own, 0.5, max_bytes=20_000, group=group)
    return found, said, whole(after.grad), ordinary_step(model, part(batch, 0, [6]))


@pytest.mark.parametrize("what", ["forward", "backward"])
def test_two_passes_and_a_rank_that_fails_in_the_last(what: str) -> None:
    found = run(_two_passes, 2, what)
    model, batch = net("")
    alone = psgrad.clipped_grad(*psgrad.from_module(model, tokens_loss), batch, 0.5).grad
    said = "RuntimeError: no way on" if what == "forward" else "RuntimeError: no way back"
    for rank, (steps, error, after, ordinary) in enumerate(found):
        (at_once, _), (in_chunks, _) = steps
        assert at_once == 2 + 2  # two that measure, then norms and sums
        assert in_chunks > 2 + 2
        assert in_chunks == found[0][0][1][0]
        for _, grad in steps:
            assert_close(grad, alone, 2e-6)
        assert error == (said if rank == 0 else f"RemoteError: rank 0: {said}")
        assert_close(after, alone, 2e-6)
        assert ordinary == found[0][3]


def _same_draws(rank: int, size: int) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    fully_shard(model[0])
    fully_shard(model)
    fn, params = psgrad.from_module(model, F.cross_entropy)
    x, y = torch.randn(6, 4), torch.zeros(6, dtype=torch.long)
    torch.manual_seed(7 + rank)
    own = (x, y) if rank == 0 else (x[:0], y[:0])
    summed = psgrad.weighted_grad(
        fn, params, tuple(t[:1] for t in own), lambda n: 1 / n, max_bytes="1GB", group=dist.group.WORLD
    )
    return float(sum(g.full_tensor().square().sum() for g in summed.values()).sqrt())  # type: ignore[union-attr, attr-defined]


def test_both_passes_draw_the_same() -> None:
    """One sample over its own norm has norm 1, if norm and gradient are of the same draw."""
    assert run(_same_draws, 2) == pytest.approx([1.0, 1.0], abs=1e-5)
