"""A GPT trained with clipped per-sample gradients on several processes, its layers in pieces on all of them.

    torchrun --standalone --nproc-per-node 2 examples/clipped_fsdp.py

The model is under FSDP2's `fully_shard`, the optimizer is torch's AdamW, and the step between them is
`psgrad.clipped_grad(..., group=...)`. The text is the documentation of psgrad itself. Any number of processes gives the
same losses up to rounding, one included: batches are drawn alike on all ranks, and each takes its rows.

What to change for GPUs: nothing here. With CUDA there, a process takes the GPU of its local rank, and NCCL. On several
machines leave `--standalone` out and say `--nnodes`, `--rdzv-backend c10d` and `--rdzv-endpoint`. For private training
say `--noise`: it is added to the pieces of the sum, on each rank to its own.
"""

import argparse
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import psgrad


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, t, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    """Of characters; the table of characters is also the head."""

    def __init__(self, words: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.table.weight, std=width**-0.5)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.table.weight)


def next_characters(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.mT, tokens)


def text() -> Tensor:
    """The characters of the documentation, as numbers below 128."""
    pages = sorted(Path(__file__).resolve().parent.parent.glob("docs/*.md"))
    return torch.tensor(list("".join(page.read_text() for page in pages).encode("ascii", "ignore")))


def train(options: argparse.Namespace) -> list[float]:
    device, group = torch.device("cpu"), dist.group.WORLD
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = dist.init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))

    torch.manual_seed(0)  # the same weights everywhere
    model = GPT(128, options.length, options.width, options.depth, options.heads).to(device)
    count = sum(p.numel() for p in model.parameters())
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    fn, params = psgrad.from_module(model, next_characters)

    characters, draws = text(), torch.Generator().manual_seed(1)  # of batches: the same on all ranks
    torch.manual_seed(2 + rank)  # of noise: other numbers on each, which holds other pieces
    if rank == 0:
        print(
            f"{size} processes, {count / 1e6:.1f} M parameters, {options.batch} samples of {options.length} characters"
        )
    losses = []
    start = time.perf_counter()
    for step in range(options.steps):
        rows = torch.randint(len(characters) - options.length - 1, (options.batch,), generator=draws)
        own = rows[rank::size, None] + torch.arange(options.length + 1)
        tokens = characters[own].to(device)
        found = psgrad.clipped_grad(
            fn, params, (tokens[:, :-1], tokens[:, 1:]), options.clip, chunk_size=options.chunk, group=group
        )
        for name, p in model.named_parameters():
            grad: Any = found.grad[name]
            if options.noise:
                grad.to_local().add_(torch.randn_like(grad.to_local()), alpha=options.noise * found.sensitivity)
            p.grad = grad / found.count
        optimizer.step()

        about = torch.stack([found.values.sum(), (found.norms > options.clip).sum().to(found.values.dtype)])
        dist.all_reduce(about, group=group)
        loss, clipped = (about / found.count).tolist()
        losses.append(loss)
        if rank == 0 and (step % options.every == 0 or step == options.steps - 1):
            speed = (step + 1) * options.batch * options.length / (time.perf_counter() - start)
            print(f"step {step:4}  loss {loss:.5f}  {clipped:4.0%} clipped  {speed:,.0f} characters/s", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, what in (
        ("steps", 40, "of training"),
        ("batch", 16, "samples in a step, of all processes"),
        ("length", 64, "characters in a sample"),
        ("width", 256, "of the layers"),
        ("depth", 4, "blocks"),
        ("heads", 4, "of attention"),
        ("every", 5, "steps between two lines"),
        ("chunk", None, "samples that a process runs at once"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=what)
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--clip", type=float, default=1.0, help="bound on the norm of a sample's gradient")
    parser.add_argument("--noise", type=float, default=0.0, help="its standard deviation, in multiples of the bound")
    options = parser.parse_args()
    dist.init_process_group(timeout=timedelta(minutes=5))
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
