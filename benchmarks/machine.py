"""The machine: on a busy one, or where memory is new to each call, no ratio is to be trusted."""

import os
import time
from pathlib import Path

import torch

BUSY = 0.1  # a tenth of the cores gone to others already moves minima of two-threaded calls


def keep_memory() -> None:
    """Have malloc keep what is freed, as in a process that trains: it does so up to the largest block that was ever
    freed, 32 MB at most. Otherwise a call of the ResNet meets 13,000 new pages, after this 0 to 5,000: its batch
    gradient takes 98 ms in place of 135."""
    torch.empty((32 << 20) - (64 << 10), dtype=torch.uint8)


def settle() -> None:
    """Wait until this process's own threads rest: JAX's are at work for 0.4 s after a call that made 2 GB, in which
    whoever comes next takes 2.2 times as long."""
    end = time.monotonic() + 2  # seconds: some may never rest
    while time.monotonic() < end:
        used = time.process_time()
        time.sleep(0.005)
        if time.process_time() - used < 0.001:
            return


class Others:
    """The share of the cores that other processes have used since this was made; NaN where it is not known."""

    def __init__(self) -> None:
        self.start = self._now()

    def share(self) -> float:
        busy, own, clock = (b - a for a, b in zip(self.start, self._now(), strict=True))
        return max(0.0, busy - own) / (clock * (os.cpu_count() or 1))

    def _now(self) -> tuple[float, float, float]:
        """Seconds: all cores at work, this process at work, the clock."""
        own = os.times()
        return _busy(), own.user + own.system, time.monotonic()


def _busy() -> float:
    try:
        user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(
            int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        )
    except OSError:
        return float("nan")
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
