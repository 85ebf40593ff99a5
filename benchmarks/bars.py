"""The bars: what a contender may take, as a ratio to another's in the same run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .measured import Measured


@dataclass(frozen=True)
class Bar:
    """`contender` takes at most `limit` times what `base` takes."""

    limit: float
    contender: str = "psgrad"
    base: str = "batch"
    beyond: bool = False  # beyond its result: what a contender returns, N x P numbers, is not held against it


def each(beyond: bool = False, **limits: float) -> dict[str, Bar]:
    return {name.replace("_", "-"): Bar(limit, beyond=beyond) for name, limit in limits.items()}


MEMORY = dict.fromkeys(("mlp", "resnet", "resnet_wide", "instance", "conv1d", "conv3d", "gpt", "gpt_tied"), 1.3)


# (kind, quantity): workload: bar. mlp's gradients are nearly all writing N x P floats: held against vmap(grad).
BARS: dict[tuple[str, str], dict[str, Bar]] = {
    ("time", "grads"): {"mlp": Bar(0.30, "psgrad out=", "vmap(grad)")}
    | each(mlp_tiny=3.0, resnet=1.35, resnet_wide=1.25, instance=1.25, conv1d=1.15, conv3d=1.4, gpt=1.12, lstm=3.0),
    ("time", "norms"): each(
        mlp_tiny=2.5, mlp=1.05, resnet=1.3, resnet_wide=1.2, instance=1.2, conv1d=1.1, conv3d=1.35, gpt=1.15, lstm=3.0
    ),
    ("time", "clipped"): each(
        mlp_tiny=3.0, mlp=1.15, resnet=1.4, resnet_wide=1.3, instance=1.3, conv1d=1.2, conv3d=1.45, gpt=1.3, lstm=3.2
    ),
    ("memory", "grads"): each(beyond=True, **dict.fromkeys([*MEMORY, "lstm"], 1.1)),
    ("memory", "norms"): each(**MEMORY, lstm=1.5),
    ("memory", "clipped"): each(**MEMORY, lstm=1.5),
}


@dataclass(frozen=True)
class Verdict:
    """How a workload stands to its bar."""

    kind: str
    quantity: str
    workload: str
    bar: Bar
    ratio: float | None  # None: a contender failed
    met: bool

    def __str__(self) -> str:
        bar = self.bar
        if self.ratio is None:
            return f"bar {bar.limit:.2f}: MISSED, nothing to compare"
        how = "met" if self.met else f"MISSED by {self.ratio / bar.limit - 1:.0%}"
        beyond = " beyond its result" if bar.beyond else ""
        return f"{bar.contender} {self.ratio:.2f} of {bar.base}{beyond}, bar {bar.limit:.2f}: {how}"

    def figures(self) -> dict[str, Any]:
        return asdict(self)


def judge(
    kind: str, quantity: str, workload: str, measured: Mapping[str, Measured], result: float = 0
) -> Verdict | None:
    """The verdict on a workload; None where it has no bar, or a side of it was not to run. `result`: bytes of it."""
    bar = BARS.get((kind, quantity), {}).get(workload)
    if bar is None or bar.contender not in measured or bar.base not in measured:
        return None
    ours, base = measured[bar.contender].best, measured[bar.base].best
    ours = ours - result if ours is not None and bar.beyond else ours
    ratio = ours / base if ours is not None and base else None
    return Verdict(kind, quantity, workload, bar, ratio, ratio is not None and ratio <= bar.limit)
