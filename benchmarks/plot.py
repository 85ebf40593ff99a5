"""`python -m benchmarks.plot results.json --out docs/`: pictures of what the benchmarks measured."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from .measured import Record, read
from .peers import BASE, GROWTH, OURS, PEERS
from .quantities import NAMES
from .workloads import SWEEP, WORKLOADS

TITLES = {
    "grads": "per-sample gradients",
    "norms": "their norms",
    "clipped": "sum of clipped gradients",
    "gram": "inner products",
}
COLORS = {
    "batch": "#555555",
    "loop": "#a6a6a6",
    "vmap(grad)": "#e08e45",
    "ExpandedWeights": "#8c6bb1",
    "Opacus": "#5b9bd5",
    "Opacus ghost": "#1f5f99",
    "BackPACK": "#59a14f",
    "JAX": "#c9a400",
    "psgrad": "#d62728",
    "psgrad out=": "#ff9896",
    "psgrad replayed": "#8b0000",
}
MARKERS = dict(zip(PEERS, "|xsv^<D>oo*", strict=True))


def draw(records: Sequence[Record], out: Path) -> list[Path]:
    """Every picture that there are figures for."""
    out.mkdir(parents=True, exist_ok=True)
    figures = {"times.png": times(records), "memory.png": memory(records)}
    written = []
    for name, figure in figures.items():
        if figure is not None:
            figure.savefig(out / name, dpi=150)
            plt.close(figure)
            written.append(out / name)
    return written


def times(records: Sequence[Record]) -> Any:
    """Time over that of the batch gradient: a panel for each quantity, a line for each workload."""
    shown = [r for r in records if r.kind == "time" and r.workload in WORKLOADS and r.contender != BASE and r.ratio]
    quantities = [q for q in NAMES if any(r.quantity == q for r in shown)]
    workloads = [w for w in WORKLOADS if any(r.workload == w for r in shown)][::-1]
    if not shown:
        return None
    columns, rows = min(2, len(quantities)), -(-len(quantities) // 2)
    size = (1.4 + 4.6 * columns, 1.0 + rows * (0.9 + 0.32 * len(workloads)))
    figure, grid = plt.subplots(rows, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
    panels = grid.flatten()
    for panel in panels[len(quantities) :]:
        panel.set_visible(False)
    for panel, quantity in zip(panels, quantities, strict=False):
        for name in PEERS:
            found = [r for r in shown if r.quantity == quantity and r.contender == name]
            panel.plot([r.ratio for r in found], [workloads.index(r.workload) for r in found], **dot(name))
        panel.axvline(1, color=COLORS[BASE], linewidth=1, zorder=0)
        panel.set(title=TITLES[quantity], xscale="log", yticks=range(len(workloads)), yticklabels=workloads)
        panel.set_ylim(-0.6, len(workloads) - 0.4)
        logarithmic(panel.xaxis)
        panel.tick_params(axis="x", labelsize=8)
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="both", color="#e6e6e6", linewidth=0.7)
        panel.set_axisbelow(True)
        panel.spines[["top", "right", "left"]].set_visible(False)
    figure.supxlabel("time over that of the ordinary batch gradient (log scale; left is faster)", fontsize=10)
    handles = {line.get_label(): line for panel in panels for line in panel.lines if len(line.get_xdata())}
    legend(figure, {name: handles[name] for name in PEERS if name in handles}, columns=3 + 2 * (columns > 1))
    return figure


def dot(name: str) -> dict[str, Any]:
    """How a contender looks; ours in front and larger."""
    ours = name in OURS
    size = 9 if name == OURS[0] else 7 if ours else 5.5
    style = {"linestyle": "", "marker": MARKERS[name], "markersize": size, "zorder": 4 if ours else 3}
    return style | {"color": COLORS[name], "label": name, "alpha": 1.0 if ours else 0.85}


def memory(records: Sequence[Record]) -> Any:
    """Peak memory of the sum of clipped gradients against the number of samples."""
    labels = {point.label: point.workload for point in SWEEP}
    shown = [r for r in records if r.kind == "memory" and r.quantity == "clipped" and r.workload in labels]
    shown = [r for r in shown if r.contender in GROWTH and r.measured.best]
    workloads = list(dict.fromkeys(labels[r.workload] for r in shown))
    if not shown:
        return None
    size = (1.2 + 3.8 * len(workloads), 3.9)
    figure, panels = plt.subplots(1, len(workloads), figsize=size, squeeze=False, layout="constrained")
    for panel, workload in zip(panels[0], workloads, strict=True):
        for name in GROWTH:
            found = sorted((r for r in shown if labels[r.workload] == workload and r.contender == name), key=samples)
            style = dot(name) | {"linestyle": "--" if name == BASE else "-", "marker": "o", "markersize": 5}
            panel.plot([r.n for r in found], [(r.measured.best or 0) / 1e6 for r in found], **style)
        panel.set(title=workload, xscale="log", yscale="log", xlabel="samples")
        logarithmic(panel.yaxis)
        panel.set_xticks(sorted({r.n for r in shown}))
        panel.xaxis.set_major_formatter(plain)
        panel.minorticks_off()
        panel.grid(color="#e6e6e6", linewidth=0.7)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("peak MB of a sum of clipped gradients")
    legend(figure, {line.get_label(): line for line in panels[0][0].lines}, columns=len(GROWTH))
    return figure


def samples(record: Record) -> int:
    return record.n


def plain(value: float, _: object = None) -> str:
    return f"{value:g}"


def logarithmic(axis: Any) -> None:
    """Ticks at 1, 2, 5, 10, as plain numbers."""
    axis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(plain)
    axis.set_minor_formatter(mpl.ticker.NullFormatter())


def legend(figure: Any, handles: dict[str, Any], columns: int) -> None:
    style = {"loc": "outside upper center", "ncols": columns, "frameon": False, "fontsize": 9}
    figure.legend(handles.values(), handles.keys(), **style)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="what --json wrote; several count together")
    parser.add_argument("--out", type=Path, default=Path("docs"), metavar="DIR", help="where pictures go (docs)")
    args = parser.parse_args(argv)
    records = [record for file in args.files for record in read(file)]
    print(*draw(records, args.out), sep="\n")


if __name__ == "__main__":
    main()
