"""How much of the machine other processes took: on a busy one, no ratio is to be trusted."""

import os
import time
from pathlib import Path

BUSY = 0.1  # a tenth of the cores gone to others already moves minima of two-threaded calls


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
