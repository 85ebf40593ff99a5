"""Several processes on this machine, for tests: forked, joined within a limit, talking by loopback and a file alone."""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import optree
import torch
import torch._dynamo  # once, here: every child would load it on its own
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

TIMEOUT = 20  # seconds that a collective may take
LIMIT = 60  # seconds that all processes of a case may take together

_FORK = multiprocessing.get_context("fork")


def _child(case: Callable[..., Any], rank: int, size: int, store: str, args: Any, timeout: float, pipe: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    try:
        files = dist.FileStore(store, size)
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=files, rank=rank, world_size=size, timeout=limit)
        pipe.send((True, case(rank, size, *args)))
    except BaseException as error:
        pipe.send((False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))
    finally:
        pipe.close()
        sys.stdout.flush()
        os._exit(0)  # without a word to the others, who may have died


def run(
    case: Callable[..., Any], size: int, *args: Any, timeout: float = TIMEOUT, dead: tuple[int, ...] = ()
) -> list[Any]:
    """What `case(rank, size, *args)` returns on each of `size` ranks; None for those in `dead`, which end themselves.

    Results are plain data, or tensors as lists. Whoever overstays is killed, and the test fails.
    """
    with tempfile.TemporaryDirectory() as home:
        children, pipes = [], []
        for rank in range(size):
            ours, theirs = _FORK.Pipe(duplex=False)
            store = str(Path(home) / "store")
            child = _FORK.Process(target=_child, args=(case, rank, size, store, args, timeout, theirs), daemon=True)
            with warnings.catch_warnings():  # JAX's, where another test has loaded it; no child uses it
                warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
                child.start()
            theirs.close()
            children.append(child)
            pipes.append(ours)
        end = time.monotonic() + LIMIT
        found: list[Any] = []
        try:
            for rank, pipe in enumerate(pipes):
                if not pipe.poll(max(0.0, end - time.monotonic())):
                    raise AssertionError(f"rank {rank} says nothing within {LIMIT} s")
                try:
                    found.append(pipe.recv())
                except EOFError:
                    found.append((rank in dead, None))
        finally:
            for child in children:
                child.join(max(0.0, min(5.0, end - time.monotonic())))
                if child.is_alive():
                    child.kill()
                    child.join()
    wrong = [str(said) for good, said in found if not good]
    assert not wrong, "\n".join(wrong)
    return [said for _, said in found]


class Traffic(TorchDispatchMode):
    """Counts the bytes of collectives by what they are: whole tensors that are gathered, scattered, reduced."""

    KINDS = {"gather": "gathered", "reduce_scatter": "scattered", "reducescatter": "scattered", "reduce": "reduced"}

    def __init__(self) -> None:
        super().__init__()
        self.bytes = {"gathered": 0, "scattered": 0, "reduced": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            kind = next((kind for word, kind in self.KINDS.items() if word in func.__name__), None)
            if kind is not None:
                tensors = [t for t in optree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
                self.bytes[kind] += max(t.nbytes for t in tensors)
        return func(*args, **(kwargs or {}))


class RaisesInBackward(torch.autograd.Function):
    """The identity, until its backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no way back")
