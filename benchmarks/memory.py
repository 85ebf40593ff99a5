"""Peak memory of contenders, each in a fresh process: what a call adds to the model, the data and the code."""

import ctypes
import json
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


def measure(point: Point, quantity: str, peers: Iterable[Peer], progress: Callable[[str], None]) -> dict[str, Measured]:
    """Bytes at the peak of one call of each contender beyond what was there before it."""
    found = {}
    for peer in peers:
        progress(peer.name)
        found[peer.name] = peak(point, quantity, peer.name)
    return found


def peak(point: Point, quantity: str, contender: str) -> Measured:
    command = [sys.executable, "-m", "benchmarks.memory", json.dumps([point, quantity, contender])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:  # killed, most likely, for want of memory
        return Measured(error=(done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:110])
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def child(point: Point, quantity: str, contender: str) -> Measured:
    """The measurement, in this process."""
    make = PEERS[contender].offers[quantity]
    make(point.make(n=1)).call()  # loads lazy imports and kernels
    ready = make(point.make())
    ctypes.CDLL(None).malloc_trim(0)  # freed heap would be reused without showing
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = status("VmRSS")
    result = ready.call()
    after = status("VmHWM")
    del result
    return Measured(after - before, turns=1, mark="*" if ready.note else "", note=ready.note)


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
