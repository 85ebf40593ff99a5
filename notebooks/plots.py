"""The looks that the notebooks' pictures share.

>>> import plots
>>> plots.style()
"""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#3566a8", "#e08214", "#3a8f4d", "#c43c39", "#7b559c", "#8c8c8c"


def style() -> None:
    """White and opaque, so that pictures can be read on light and dark pages; no frame above and on the right."""
    plt.rcParams.update(
        {
            "figure.dpi": 110,
            "figure.facecolor": "white",
            "savefig.facecolor": "white",
            "figure.constrained_layout.use": True,
            "axes.prop_cycle": plt.cycler(color=[BLUE, ORANGE, GREEN, RED, PURPLE, GREY]),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 11,
            "axes.grid": False,
            "legend.frameon": False,
            "font.size": 10,
        }
    )


def images(
    pictures: Sequence[Any], above: Sequence[str] = (), below: Sequence[str] = (), red: Sequence[bool] = ()
) -> None:
    """Small grey pictures (H, W) in a row, a word above and below each; the one below in red where `red` says so."""
    axes = plt.subplots(1, len(pictures), figsize=(9, 1.75), squeeze=False)[1]
    for i, (ax, picture) in enumerate(zip(axes[0], pictures, strict=True)):
        ax.imshow(picture, cmap="gray_r")
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
        if above:
            ax.set_title(above[i], fontsize=10)
        if below:
            ax.set_xlabel(below[i], color=RED if red and red[i] else "black")
    plt.show()


def bars(ax: Any, values: dict[str, float], text: str = "{:.2g}", colours: Sequence[str] | str = BLUE) -> None:
    """Horizontal bars, the first on top, each with its number behind it."""
    names = list(values)
    drawn = ax.barh(names, list(values.values()), color=colours, height=0.65)
    ax.bar_label(drawn, [text.format(v) for v in values.values()], padding=4, fontsize=9)
    ax.invert_yaxis()
    ax.margins(x=0.12)
