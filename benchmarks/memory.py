"""Peak memory of contenders, each in a fresh process: what a call adds to the model, the data and the code.

By default glibc's malloc serves blocks up to the size of the largest one freed so far (32 MiB at most) from its heap,
and what lies free between others there stays with the process. How large these holes are is chance: for the ResNet's
batch gradient 106 to 132 MB in one process and another, where 72 MB of tensors are alive. So every contender runs with
a malloc that gives each block over 64 KiB back when it is freed ("tight"), and its peak is memory in use: 73.5 to 73.7.
The first call is not counted, which builds kernels and loads code; of those after it the median is.
"""

import ctypes
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from .measured import Measured, describe
from .peers import PEERS
from .peers.peer import Peer
from .workloads import Point, setup

TURNS = 3
MALLOC: dict[str, dict[str, str]] = {
    "tight": {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},  # which also keeps them so
    "default": {},
}


def measure(
    point: Point, quantity: str, peers: Iterable[Peer], progress: Callable[[str], None], malloc: str = "tight"
) -> dict[str, Measured]:
    """Bytes at the peak of one call of each contender beyond what was there before it."""
    found = {}
    for peer in peers:
        progress(peer.name)
        found[peer.name] = peak(point, quantity, peer.name, malloc)
    return found


def peak(point: Point, quantity: str, contender: str, malloc: str = "tight") -> Measured:
    command = [sys.executable, "-m", "benchmarks.memory", json.dumps([point, quantity, contender])]
    env = os.environ | MALLOC[malloc]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:  # killed, most likely, for want of memory
        return Measured(error=(done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:110])
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def child(point: Point, quantity: str, contender: str) -> Measured:
    """The measurement, in this process."""
    ready = PEERS[contender].offers[quantity](point.make())
    ready.call()  # loads lazy imports, builds kernels: once in a process, whatever the contender
    found = sorted(grown(ready.call) for _ in range(TURNS))
    middle = found[TURNS // 2]
    return Measured(middle, found[-1] / max(middle, 1), TURNS, mark="*" if ready.note else "", note=ready.note)


def grown(call: Callable[[], object]) -> float:
    """Bytes by which this process grows at the peak of a call."""
    ctypes.CDLL(None).malloc_trim(0)  # freed heap would be reused without showing
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status("VmRSS")
    result = call()
    after = status("VmHWM")
    del result
    return after - before


def status(field: str) -> float:
    """A field of the kernel's account of this process, in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field + ":"))
    return float(line.split()[1]) * 1024


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    setup()
    where, what, who = json.loads(sys.argv[1])
    try:
        answer = child(Point(*where), what, who)
    except Exception as error:
        answer = Measured(error=describe(error, PEERS[who].package))
    print(json.dumps(asdict(answer)))
