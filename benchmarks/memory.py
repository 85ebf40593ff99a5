"""Peak memory of contenders, each in a fresh process: what a call adds to the model, the data and the code."""

import ctypes
import json
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import psgrad

from . import contenders
from .timing import describe
from .workloads import make, setup

CHUNK = 8
CHUNKED = f"psgrad chunk_size={CHUNK}"
NAMES = ("batch", "vmap(grad)", "psgrad")
CONTENDERS = {name: contenders.GRADS[name] for name in NAMES} | {CHUNKED: partial(contenders.fresh, chunk_size=CHUNK)}


def peak(workload: str, contender: str, n: int | None = None) -> float | str:
    """Bytes at the peak of one call beyond what was there before it, or the error it raised."""
    command = [sys.executable, "-m", "benchmarks.memory", workload, contender, *([] if n is None else [str(n)])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    answer: float | str = json.loads(done.stdout)
    return answer


def child(workload: str, contender: str, n: int | None) -> float:
    """The measurement, in this process."""
    setup()
    CONTENDERS[contender](make(workload, 1))()  # loads lazy imports and kernels
    call = CONTENDERS[contender](make(workload, n))
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
    warnings.simplefilter("ignore", psgrad.FallbackWarning)
    answer: float | str
    try:
        answer = child(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None)
    except Exception as error:
        answer = describe(error)
    print(json.dumps(answer))
