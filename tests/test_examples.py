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
import torch.distributed as dist

from .processes import run

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "clipped_fsdp.py"
SMALL = {"steps": 4, "batch": 6, "length": 12, "width": 16, "depth": 2, "heads": 2, "every": 1}

pytestmark = pytest.mark.skipif(not dist.is_available() or not hasattr(os, "fork"), reason="no processes to fork")


def _train(rank: int, size: int) -> Any:
    spec = importlib.util.spec_from_file_location("clipped_fsdp", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.train(argparse.Namespace(**SMALL, chunk=None, rate=1e-2, clip=1.0, noise=0.0))


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
    first, *lines = done.stdout.splitlines()
    assert re.fullmatch(r"2 processes, 0\.0 M parameters, 6 samples of 12 characters", first)
    assert len(lines) == 4
    for line in lines:
        assert re.fullmatch(r"step +\d+  loss \d\.\d{5}  +\d+% clipped  [\d,]+ characters/s", line)
