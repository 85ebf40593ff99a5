"""Pictures of what the benchmarks measured."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt

from .models import WORKLOADS
from .peers import BASE, GROWTH, OURS, PEERS
from .results import Record
from .tasks import QUANTITIES
from .workloads import SAMPLES

plt.switch_backend("Agg")
LONG = ("per-sample gradients", "their norms", "sum of clipped gradients", "inner products")
TITLES = dict(zip(QUANTITIES, LONG, strict=True))
COLORS = [
    "#555555",
    "#a6a6a6",
    "#e08e45",
    "#bbbbbb",
    "#f5c396",
    "#8c6bb1",
    "#5b9bd5",
    "#1f5f99",
    "#59a14f",
    "#c9a400",
    "#e8d06b",
]  # of PEERS
COLORS += ["#d62728", "#ff9896", "#8b0000"]
STYLES = dict(zip(PEERS, zip("|xs_sv^<D>>oo*", COLORS, strict=True), strict=True))


def draw(records: Sequence[Record], out: Path) -> list[Path]:
    """Draws every picture that there are figures for."""
    times = [r for r in records if r.kind == "time" and r.workload in WORKLOADS and r.contender != BASE and r.ratio]
    swept = [r for r in records if r.workload in {point.label for point in SAMPLES} and r.contender in GROWTH]
    sums = [r for r in swept if (r.kind, r.quantity) == ("memory", "clipped") and r.measured.best]
    out.mkdir(parents=True, exist_ok=True)
    pictures = {"times.png": times and draw_times(times), "memory.png": sums and draw_memory(sums)}
    drawn = {out / name: figure for name, figure in pictures.items() if figure}
    for file, figure in drawn.items():
        figure.savefig(file, dpi=150)
        plt.close(figure)
    return list(drawn)


def draw_times(shown: Sequence[Record]) -> Any:
    """Time over that of the batch gradient: a panel for each quantity, a line for each workload."""
    quantities = [q for q in TITLES if any(r.quantity == q for r in shown)]
    workloads = [w for w in WORKLOADS if any(r.workload == w for r in shown)][::-1]
    columns, rows = min(2, len(quantities)), -(-len(quantities) // 2)
    size = (1.4 + 4.6 * columns, 1.0 + rows * (0.9 + 0.32 * len(workloads)))
    figure, grid = plt.subplots(rows, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
    for panel in grid.flatten()[len(quantities) :]:
        panel.set_visible(False)
    for panel, quantity in zip(grid.flatten(), quantities, strict=False):
        for name in PEERS:
            found = [r for r in shown if r.quantity == quantity and r.contender == name]
            panel.plot([r.ratio for r in found], [workloads.index(r.workload) for r in found], **dot(name))
        panel.axvline(1, color=COLORS[0], linewidth=1, zorder=0)
        panel.set(title=TITLES[quantity], xscale="log", yticks=range(len(workloads)), yticklabels=workloads)
        panel.set(ylim=(-0.6, len(workloads) - 0.4), axisbelow=True)
        panel.tick_params(axis="x", labelsize=8)
        panel.tick_params(axis="y", length=0)
        finish(panel, panel.xaxis, ["top", "right", "left"])
    figure.supxlabel("time over that of the ordinary batch gradient (log scale; left is faster)", fontsize=10)
    legend(figure, grid.flatten(), columns=3 + 2 * (columns > 1))
    return figure


def draw_memory(shown: Sequence[Record]) -> Any:
    """Peak memory of the sum of clipped gradients against the number of samples."""
    workloads = list(dict.fromkeys(r.workload.split()[0] for r in shown))
    size = (1.2 + 3.8 * len(workloads), 3.9)
    figure, (panels,) = plt.subplots(1, len(workloads), figsize=size, squeeze=False, layout="constrained")
    for panel, workload in zip(panels, workloads, strict=True):
        for name in GROWTH:
            found = [r for r in shown if r.workload.split()[0] == workload and r.contender == name]
            points = sorted((r.n, (r.measured.best or 0) / 1e6) for r in found)
            style = dot(name) | {"linestyle": "--" if name == BASE else "-", "marker": "o", "markersize": 5}
            panel.plot([n for n, _ in points], [size for _, size in points], **style)
        panel.set(title=workload, xscale="log", yscale="log", xlabel="samples", xticks=sorted({r.n for r in shown}))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.minorticks_off()
        finish(panel, panel.yaxis, ["top", "right"])
    panels[0].set_ylabel("peak MB of a sum of clipped gradients")
    legend(figure, panels, columns=len(GROWTH))
    return figure


def dot(name: str) -> dict[str, Any]:
    """How a contender looks; ours in front and larger."""
    (marker, color), ours = STYLES[name], name in OURS
    style = {"linestyle": "", "marker": marker, "color": color, "label": name}
    return style | ({"markersize": 8, "zorder": 4} if ours else {"markersize": 5.5, "zorder": 3, "alpha": 0.85})


def finish(panel: Any, axis: Any, without: list[str]) -> None:
    """Ticks of an axis at 1, 2, 5, 10, as plain numbers; a light grid; no frame on some sides."""
    axis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(mpl.ticker.NullFormatter())
    panel.grid(color="#e6e6e6", linewidth=0.7)
    panel.spines[without].set_visible(False)


def legend(figure: Any, panels: Iterable[Any], columns: int) -> None:
    lines = {line.get_label(): line for panel in panels for line in panel.lines if len(line.get_xdata())}
    names = [name for name in PEERS if name in lines]
    style = {"loc": "outside upper center", "ncols": columns, "frameon": False, "fontsize": 9}
    figure.legend([lines[name] for name in names], names, **style)
