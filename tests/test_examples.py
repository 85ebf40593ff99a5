"""The examples run, and do what they say."""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import psgrad

from .processes import Traffic, run

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "clipped_fsdp.py"
SMALL = {"steps": 4, "batch": 6, "length": 12, "width": 16, "depth": 2, "heads": 2, "every": 1}

pytestmark = pytest.mark.skipif(not dist.is_available() or not hasattr(os, "fork"), reason="no processes to fork")


def example() -> Any:
    spec = importlib.util.spec_from_file_location("clipped_fsdp", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _train(rank: int, size: int) -> Any:
    return example().train(argparse.Namespace(**SMALL, chunk=None, rate=1e-2, clip=1.0, noise=0.0))


def test_any_number_of_processes_gives_the_same_losses(capfd: pytest.CaptureFixture[str]) -> None:
    (alone,), two, four = run(_train, 1), run(_train, 2), run(_train, 4)
    assert len(alone) == 4
    assert alone[-1] < alone[0]
    for losses in (*two, *four):
        assert losses == pytest.approx(alone, rel=1e-5)


def test_by_torchrun() -> None:
    """As the example says, but small, and with noise."""
    options = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *options, "--noise", "0.1"],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith("[Gloo]")]  # an older torch's words
    first, *lines = said
    assert re.fullmatch(r"2 processes, 0\.0 M parameters, 6 samples of 12 characters", first)
    assert len(lines) == 4
    for line in lines:
        assert re.fullmatch(r"step +\d+  loss \d\.\d{5}  +\d+% clipped  [\d,]+ characters/s", line)


# ---- the formulas of docs/scale.md -------------------------------------------------------------------------

WIDTH, DEPTH, WORDS, LENGTH = 16, 3, 32, 8


def _measured(rank: int, size: int) -> Any:
    from torch.distributed.fsdp import fully_shard

    module = example()
    model = module.GPT(WORDS, LENGTH, WIDTH, DEPTH, 2)
    mesh = dist.init_device_mesh("cpu", (size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fn, params = psgrad.from_module(model, module.next_characters)
    tokens = torch.randint(WORDS, (2, LENGTH))
    psgrad.clipped_grad(fn, params, (tokens, tokens), 1.0, group=dist.group.WORLD)
    with Traffic() as traffic:
        psgrad.clipped_grad(fn, params, (tokens, tokens), 1.0, group=dist.group.WORLD)
    return traffic.bytes


def test_traffic_is_as_on_paper() -> None:
    block = 12 * WIDTH**2 + 13 * WIDTH  # with biases and norms, which do not count on paper
    root = WORDS * WIDTH + LENGTH * WIDTH + 2 * WIDTH  # with places and the last norm
    for size in (2, 4):
        for found in run(_measured, size):
            assert found["gathered"] == 4 * (2 * DEPTH * block + root)
            assert found["scattered"] == 4 * (DEPTH * block + root)
            # heads twice, what is said before a pass and after the last, and whether all scattered
            assert found["reduced"] == 2 * (32 * size + 8 * 1024) + 2 * 32 + 8


def test_factors_are_as_on_paper() -> None:
    module = example()
    torch.manual_seed(0)
    width = 64
    model = module.GPT(WORDS, LENGTH, width, DEPTH, 2)
    fn, params = psgrad.from_module(model, module.next_characters)
    tokens = torch.randint(WORDS, (2, LENGTH))
    kept = psgrad.factored_grads(fn, params, (tokens, tokens))
    held = dict(zip(sorted(params), kept._held(), strict=True))
    weights = sum(size for name, size in held.items() if name.startswith("blocks") and params[name].dim() == 2)
    assert weights == 2 * LENGTH * 4 * DEPTH * 16 * width
    # the table's rows and indices (of 8 bytes), the head's inputs and the gradients of its outputs
    assert held["table.weight"] == 2 * LENGTH * (4 * (WORDS + 2 * width) + 8)
