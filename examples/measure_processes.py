"""What a step of several processes sends, and what a process holds: psgrad beside an ordinary FSDP2 step.

    torchrun --standalone --nproc-per-node 4 examples/measure_processes.py

For an MLP of 25 MB and for a small GPT it prints, per process, the bytes of tensors that collectives gathered,
scattered and summed, and how far memory rose above what was held before the step. Linux and the CPU only.
"""

import argparse
import ctypes
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import optree
import torch
import torch.distributed as dist
import torch.nn.functional as F
from clipped_fsdp import GPT, next_characters
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import psgrad

KINDS = {"gather": "gathered", "reduce_scatter": "scattered", "reducescatter": "scattered", "reduce": "summed"}
M_MMAP_THRESHOLD = -3  # of mallopt: from so many bytes on, memory goes back to the system when it is freed


class Traffic(TorchDispatchMode):
    """Bytes of the whole tensors that collectives gather, scatter and sum."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = dict.fromkeys(("gathered", "scattered", "summed"), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and (kind := next((k for word, k in KINDS.items() if word in func.__name__), None)):
            tensors = [t for t in optree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            self.bytes[kind] += max(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))


def status(field: str) -> int:
    """Bytes, by the kernel's account of this process."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def risen(call: Callable[[], object]) -> int:
    """How far memory rises while `call` runs."""
    call()  # buffers that are kept are there
    before = status("VmRSS:")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts anew
    call()
    return status("VmHWM:") - before


def mlp() -> tuple[nn.Module, Any, Any]:
    layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers), F.mse_loss, lambda n: (torch.randn(n, 1024), torch.randn(n, 1024))


def gpt() -> tuple[nn.Module, Any, Any]:
    return (
        GPT(128, 32, 512, 4, 8),
        next_characters,
        lambda n: (torch.randint(128, (n, 32)), torch.randint(128, (n, 32))),
    )


def measure(make: Callable[[], tuple[nn.Module, Any, Any]], samples: int) -> tuple[dict[str, tuple[Any, int]], int]:
    torch.manual_seed(0)
    whole, loss, data = make()
    model = make()[0]
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks if isinstance(model, GPT) else [m for m in model if isinstance(m, nn.Linear)]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(1 + dist.get_rank())
    batch, group = data(samples), dist.group.WORLD
    fn, params = psgrad.from_module(model, loss)
    plain_fn, plain_params = psgrad.from_module(whole, loss)

    def ordinary() -> None:
        loss(model(batch[0]), batch[1]).backward()
        model.zero_grad()

    found = {}
    for name, call in {
        "ordinary FSDP2 step": ordinary,
        "clipped_grad, fully_shard": lambda: psgrad.clipped_grad(fn, params, batch, 1.0, group=group),
        "per_sample_norms, fully_shard": lambda: psgrad.per_sample_norms(fn, params, batch, group=group),
        "clipped_grad, replicated": lambda: psgrad.clipped_grad(plain_fn, plain_params, batch, 1.0, group=group),
    }.items():
        call()  # the first call of a model learns in which order its layers are gathered
        dist.barrier()
        memory = risen(call)
        with Traffic() as traffic:
            call()
        found[name] = traffic.bytes, memory
    return found, sum(p.numel() * p.itemsize for p in whole.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4, help="of each process")
    options = parser.parse_args()
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    for name, make in (("MLP", mlp), ("GPT", gpt)):
        found, size = measure(make, options.samples)
        if dist.get_rank() == 0:
            print(f"{name} of {size / 1e6:.1f} MB, {dist.get_world_size()} processes, {options.samples} samples each")
            print(f"{'MB':32}{'gathered':>10}{'scattered':>10}{'summed':>10}{'memory':>10}")
            for call, (traffic, memory) in found.items():
                print(f"{call:32}" + "".join(f"{n / 1e6:10.2f}" for n in (*traffic.values(), memory)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
