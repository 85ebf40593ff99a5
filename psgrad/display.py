"""What results look like in a notebook: tables, bars and histograms as HTML without scripts or style sheets.

Colours are the page's own (currentColor) and one accent of middle brightness: legible on light and on dark. All text
is escaped; tables have a bounded number of rows, whatever the tree; nothing here raises.
"""

import html
import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

T = TypeVar("T")

ROWS = 12  # of a table over parameters
MANY = 100  # numbers; a tree with more is not written out
ACCENT = "#d9722e"
BINS = 36
WIDTH, HEIGHT = 460, 84  # of a histogram's bars

_CELL = "padding:1px 14px 1px 0;border:none;vertical-align:baseline;background:none;color:inherit;font-size:inherit;"
_MUTED = "opacity:.65"


def page(title: str, *parts: str) -> str:
    """A title in bold, and what is below it."""
    return (
        '<div style="font-size:.92em;line-height:1.45;max-width:60em;color:inherit">'
        f'<div style="font-weight:600;margin:0 0 .3em">{escaped(title)}</div>{"".join(parts)}</div>'
    )


def safely(show: Callable[[T], str]) -> Callable[[T], str | None]:
    """A `_repr_html_` that gives None where it fails, for which notebooks show the text form instead."""

    @wraps(show)
    def shown(self: T) -> str | None:
        try:
            return show(self)
        except Exception:
            return None

    return shown


def brief(record: Any) -> str:
    """A NamedTuple as its repr has it, but for trees of many numbers: of these, how many there are."""
    fields = ", ".join(f"{name}={_brief_tree(value)}" for name, value in zip(record._fields, record, strict=True))
    return f"{type(record).__name__}({fields})"


def _brief_tree(tree: Any) -> str:
    tensors = [t for t in optree.tree_leaves(tree) if isinstance(t, Tensor)]
    numbers = sum(t.numel() for t in tensors)
    if isinstance(tree, Tensor) or numbers <= MANY:
        return repr(tree)
    return f"<{type(tree).__name__} of {len(tensors):,} tensors, {numbers:,} numbers>"


def escaped(text: object) -> str:
    return html.escape(str(text))


def notes(lines: Sequence[str]) -> str:
    """Lines of smaller print."""
    return "".join(f'<div style="margin:.2em 0;{_MUTED}">{escaped(line)}</div>' for line in lines if line)


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Numbers with their names, side by side."""
    cells = "".join(
        f'<span style="display:inline-block;margin:0 1.6em .3em 0"><span style="{_MUTED}">{escaped(name)}</span> '
        f'<span style="font-weight:600">{escaped(value)}</span></span>'
        for name, value in pairs
    )
    return f"<div>{cells}</div>"


class Html(str):
    """A cell that is HTML already."""


def marked(text: str) -> Html:
    """A cell that stands out."""
    return Html(f'<span style="color:{ACCENT}">{escaped(text)}</span>')


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, more: str = "") -> str:
    """A table whose first `left` columns are words and the others numbers; `more` stands below it."""

    def line(cells: Sequence[str], tag: str, style: str) -> str:
        each = []
        for i, cell in enumerate(cells):
            align = "left" if i < left or isinstance(cell, Html) else "right"
            content = cell if isinstance(cell, Html) else escaped(cell)
            each.append(f'<{tag} style="{_CELL}text-align:{align};{style}">{content}</{tag}>')
        return f'<tr style="background:none;border:none">{"".join(each)}</tr>'

    body = "".join(line(row, "td", "") for row in rows)
    return (
        '<div style="overflow-x:auto"><table style="border-collapse:collapse;border:none;margin:.2em 0;'
        'color:inherit;font-size:inherit;font-variant-numeric:tabular-nums;white-space:nowrap">'
        f'<thead style="border-bottom:1px solid">{line(head, "th", f"font-weight:400;{_MUTED}")}</thead>'
        f"<tbody>{body}</tbody></table></div>{notes([more])}"
    )


def meter(share: float) -> Html:
    """A bar that is filled by `share`, a number from 0 to 1."""
    share = min(1.0, max(0.0, share)) if math.isfinite(share) else 0.0
    return Html(
        '<svg width="84" height="9" viewBox="0 0 84 9" aria-hidden="true">'
        '<rect width="84" height="9" rx="2" fill="currentColor" fill-opacity=".12"/>'
        f'<rect width="{84 * share:.1f}" height="9" rx="2" fill="currentColor" fill-opacity=".55"/></svg>'
    )


# ---- numbers -----------------------------------------------------------------------------------------------


def short(number: float, unit: str = "") -> str:
    """Three digits, and a prefix for thousands."""
    size = float(number)
    for prefix in ("", "k", "M", "G", "T"):
        if abs(size) < 1000 or prefix == "T":
            return f"{size:.3g} {prefix}{unit}".rstrip()
        size /= 1000
    raise AssertionError("unreachable; please report this")


def number(value: object) -> str:
    """Four digits of a number, or of a tensor of one; a dash where it has no value."""
    found = number_of(value)
    return "-" if found is None else f"{found:.4g}"


def number_of(value: object) -> float | None:
    """The number, or None where it has no value, as on the meta device."""
    if isinstance(value, Tensor):
        return None if value.is_meta or value.numel() != 1 else float(value.detach())
    return float(value) if isinstance(value, (int, float)) else None


def percent(share: float | None) -> str:
    if share is None or not math.isfinite(share):
        return "-"
    return f"{100 * share:.0f} %" if share >= 0.095 or share == 0 else f"{100 * share:.1g} %"


def shape(t: Any) -> str:
    return "x".join(map(str, t.shape)) or "scalar"


# ---- trees -------------------------------------------------------------------------------------------------


def names_of(spec: optree.PyTreeSpec) -> list[str]:
    """The leaves of a tree: the key in a flat dict, a path in any other."""
    accessors = spec.accessors()
    if spec.type is not None and issubclass(spec.type, dict) and all(len(a) == 1 for a in accessors):
        return [str(a[0].entry) for a in accessors]
    return [a.codify("") or "params" for a in accessors]


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree with their names."""
    found, spec = optree.tree_flatten(tree)
    return list(zip(names_of(spec), found, strict=True))


def sq_norm(t: Tensor) -> float | None:
    """The squared norm of a tensor, None where it has no values; that of none is 0."""
    if not isinstance(t, Tensor) or t.is_meta:
        return None
    t = t.detach()
    return float(torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32))) ** 2


class Listing(NamedTuple):
    """The rows of a table over parameters that are shown, and a word on the others."""

    rows: list[int]
    more: str


def largest(sizes: Sequence[float | None], what: str) -> Listing:
    """All rows where they are few, else the largest of them; in order."""
    if len(sizes) <= ROWS:
        return Listing(list(range(len(sizes))), "")
    known = [0.0 if size is None or not math.isfinite(size) else size for size in sizes]
    shown = sorted(sorted(range(len(known)), key=lambda i: -known[i])[:ROWS])
    total = sum(known)
    rest = f", with {percent(1 - sum(known[i] for i in shown) / total)} of {what}" if total else ""
    return Listing(shown, f"the {ROWS} largest; {len(sizes) - ROWS} more parameters{rest}")


# ---- histograms --------------------------------------------------------------------------------------------


def histogram(values: Tensor, what: str, bound: float | None = None) -> str:
    """How many samples have which value, as a picture; what is above `bound` stands out. "" for no values."""
    if values.is_meta or not values.numel():
        return ""
    values = values.detach().flatten().double().cpu()
    finite = values[values.isfinite()].clamp_(-8e307, 8e307)  # so that differences are finite, too
    bad = len(values) - len(finite)
    word = f"{bad} not finite, not shown" if bad else ""
    if not len(finite):
        return notes([f"{what}: {word}"])
    low, high = float(finite.min()), float(finite.max())
    marked = bound if bound is not None and math.isfinite(bound) and bound > 0 else None
    if marked is not None:
        low, high = min(low, marked), max(high, marked)
    logarithmic = low > 0 and high / low > 30
    if not logarithmic:
        low = min(low, 0.0) if low < 0.5 * high else low
    scale = math.log if logarithmic else float
    left, right = scale(low), scale(high)
    if not right - left > 1e-9 * max(abs(left), abs(right)):
        left, right = left - 0.5 * (abs(left) or 1), right + 0.5 * (abs(right) or 1)
    at = lambda value: WIDTH * ((scale(value) - left) / (right - left))
    counts = torch.histc(finite.log() if logarithmic else finite, BINS, left, right).tolist()
    return _picture(counts, (left, right, logarithmic), at, marked, what) + notes([word])


def _picture(
    counts: Sequence[float],
    axis: tuple[float, float, bool],
    at: Callable[[float], float],
    bound: float | None,
    what: str,
) -> str:
    left, right, logarithmic = axis
    step, most = (right - left) / BINS, max(counts)
    value = (lambda s: math.exp(s)) if logarithmic else (lambda s: s)
    bars = []
    for i, count in enumerate(counts):
        if count:
            start, end = value(left + i * step), value(left + (i + 1) * step)
            above = bound is not None and start + end > 2 * bound
            fill = f'fill="{ACCENT}"' if above else 'fill="currentColor" fill-opacity=".45"'
            tall = max(1.5, HEIGHT * count / most)
            bars.append(
                f'<rect x="{10 + WIDTH * i / BINS:.1f}" y="{14 + HEIGHT - tall:.1f}" width="{WIDTH / BINS - 1:.1f}" '
                f'height="{tall:.1f}" {fill}><title>{count:.0f} samples: {start:.3g} to {end:.3g}</title></rect>'
            )
    line = f"M10 {14 + HEIGHT}h{WIDTH}"
    marks = [(0.0, value(left), "start"), (float(WIDTH), value(right), "end")]
    mark = ""
    if bound is not None:
        x = 10 + at(bound)
        anchor = "start" if x < WIDTH / 2 else "end"
        mark = (
            f'<path d="M{x:.1f} 2v{HEIGHT + 12}" stroke="{ACCENT}" stroke-width="1.5" stroke-dasharray="4 3"/>'
            f'<text x="{x + (5 if anchor == "start" else -5):.1f}" y="10" text-anchor="{anchor}" fill="{ACCENT}">'
            f"bound {bound:.4g}</text>"
        )
    ticks = "".join(
        f'<text x="{10 + x:.1f}" y="{HEIGHT + 28}" text-anchor="{anchor}" fill="currentColor" fill-opacity=".65">'
        f"{number:.3g}</text>"
        for x, number, anchor in marks
    )
    words = what + (", on a logarithmic axis" if logarithmic else "")
    middle = (
        f'<text x="{10 + WIDTH / 2}" y="{HEIGHT + 28}" text-anchor="middle" fill="currentColor" fill-opacity=".65">'
        f"{escaped(words)}</text>"
    )
    return (
        f'<svg width="{WIDTH + 20}" height="{HEIGHT + 34}" viewBox="0 0 {WIDTH + 20} {HEIGHT + 34}" role="img" '
        f'aria-label="{escaped(words)}" style="max-width:100%;height:auto;font-size:11px;font-family:inherit">'
        f'{"".join(bars)}<path d="{line}" stroke="currentColor" stroke-opacity=".4"/>{mark}{ticks}{middle}</svg>'
    )
