"""Draws the pictures of the explaining pages, for light and for dark: `python docs/pictures/draw.py`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from math import cos, hypot, pi, sin
from pathlib import Path

HERE = Path(__file__).resolve().parent
WARNED = "FallbackWarning"

LIGHT = {
    "ink": "#1f2328",
    "soft": "#59636e",
    "line": "#8c959f",
    "paper": "#ffffff",
    "card": "#f3f5f7",
    "blue": "#1f6fb8",
    "orange": "#b8580b",
    "green": "#2f7d3b",
    "red": "#c0362c",
}
DARK = {
    "ink": "#e6e8eb",
    "soft": "#a9b1ba",
    "line": "#707a86",
    "paper": "#131416",
    "card": "#22262b",
    "blue": "#6fb1f2",
    "orange": "#f0a254",
    "green": "#79c885",
    "red": "#f2877c",
}


@dataclass
class Sheet:
    """An SVG of a width and a height, drawn in the colours of one palette."""

    width: int
    height: int
    colours: dict[str, str]
    title: str
    parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, w: float, h: float, line: str = "line", fill: str = "card", r: int = 6) -> None:
        c = self.colours
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{r}" fill="{c[fill]}" stroke="{c[line]}" '
            'stroke-width="1.2"/>'
        )

    def block(self, x: float, y: float, w: float, h: float, colour: str, strength: float = 0.25) -> None:
        c = self.colours[colour]
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="1.5" fill="{c}" fill-opacity="{strength:g}" '
            f'stroke="{c}" stroke-width="1"/>'
        )

    def stack(self, x: float, y: float, w: float, h: float, colour: str, n: int = 4, shift: float = 5) -> None:
        """The same block for several samples, one behind the other."""
        for k in reversed(range(n)):
            self.parts.append(
                f'<rect x="{x + shift * k:g}" y="{y - shift * k:g}" width="{w:g}" height="{h:g}" rx="1.5" '
                f'fill="{self.colours["paper"]}"/>'
            )
            self.block(x + shift * k, y - shift * k, w, h, colour, 0.3 if k == 0 else 0.15)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        colour: str = "ink",
        size: float = 14,
        anchor: str = "start",
        code: bool = False,
        bold: bool = False,
    ) -> None:
        family = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" if code else "system-ui, sans-serif"
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{self.colours[colour]}" font-size="{size:g}" font-family="{family}" '
            f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def line(self, points: list[tuple[float, float]], colour: str = "line", width: float = 1.4, dash: str = "") -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{self.colours[colour]}" stroke-width="{width:g}"{dashed}/>'
        )

    def arrow(self, x0: float, y0: float, x1: float, y1: float, colour: str = "soft", width: float = 1.5) -> None:
        length = hypot(x1 - x0, y1 - y0)
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        size = 4 + 2 * width
        bx, by = x1 - size * ux, y1 - size * uy
        self.line([(x0, y0), (bx, by)], colour, width)
        wing = size * 0.45
        corners = ((x1, y1), (bx - wing * uy, by + wing * ux), (bx + wing * uy, by - wing * ux))
        path = " ".join(f"{x:g},{y:g}" for x, y in corners)
        self.parts.append(f'<polygon points="{path}" fill="{self.colours[colour]}"/>')

    def circle(self, x: float, y: float, r: float, colour: str, fill: float = 0.0, dash: str = "") -> None:
        c = self.colours[colour]
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="{r:g}" fill="{c}" fill-opacity="{fill:g}" stroke="{c}" '
            f'stroke-width="1.3"{dashed}/>'
        )

    def svg(self) -> str:
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img">\n<title>{escape(self.title)}</title>\n{body}\n</svg>\n'
        )


def call(s: Sheet) -> None:
    """What goes in and what comes out."""
    s.text(20, 26, "batch: N samples", bold=True)
    for k in range(4):
        s.block(20, 44 + 26 * k, 120, 20, "blue", 0.3 if k == 0 else 0.15)
        s.text(148, 59 + 26 * k, ("sample 0", "sample 1", "...", "sample N-1")[k], "soft", 12)
    s.text(20, 182, "params, stored once", bold=True)
    for x, w, h, name in ((20, 60, 40, "w"), (92, 60, 12, "b")):
        s.block(x, 196, w, h, "orange", 0.25)
        s.text(x + w / 2, 196 + h + 16, name, "soft", 12, "middle", code=True)
    s.arrow(218, 95, 276, 118)
    s.arrow(168, 206, 276, 148)
    s.box(280, 96, 172, 74)
    s.text(366, 128, "fn(params, sample)", size=14, anchor="middle", code=True)
    s.text(366, 150, "the loss of one sample", "soft", 12, "middle")
    s.arrow(456, 112, 512, 76)
    s.arrow(456, 152, 512, 180)
    s.text(520, 26, "N losses", bold=True)
    for k in range(4):
        s.block(520, 44 + 16 * k, 16, 11, "green", 0.3)
    s.text(546, 72, "(N,)", "soft", 12, code=True)
    s.text(520, 142, "N gradients, like params", bold=True)
    s.stack(520, 186, 60, 40, "orange", 4)
    s.text(550, 246, "w: (N, O, I)", "soft", 12, "middle", code=True)
    s.stack(640, 186, 60, 12, "orange", 4)
    s.text(670, 246, "b: (N, O)", "soft", 12, "middle", code=True)


def factors(s: Sheet) -> None:
    """The leaves, but for `Matrices`: the outer products of `Outer` at the places of `Rows`."""
    columns = (20, 205, 390, 575)
    heads = (
        ("Outer", "linear, matmul, LSTM"),
        ("Rows", "embedding, table[index]"),
        ("Patches", "convolution"),
        ("Dense", "bias, scale, plain vmap"),
    )
    for x, (name, ops) in zip(columns, heads, strict=True):
        s.box(x, 12, 170, 236, fill="paper")
        s.text(x + 12, 36, name, bold=True, size=15, code=True)
        s.text(x + 12, 55, ops, "soft", 12)
    x = columns[0]
    s.block(x + 18, 84, 14, 62, "orange", 0.35)
    s.text(x + 25, 162, "g", "soft", 12, "middle", code=True)
    s.text(x + 42, 120, "x", "soft", 13, "middle")
    s.block(x + 54, 108, 76, 14, "blue", 0.35)
    s.text(x + 92, 138, "x", "soft", 12, "middle", code=True)
    s.text(x + 12, 190, "N T (I + O) numbers", size=12.5)
    s.text(x + 12, 208, "for N I O", "soft", 12.5)
    s.text(x + 12, 234, "sum over t of g xᵀ", "soft", 12)
    x = columns[1]
    for k in range(8):
        s.block(x + 90, 74 + 11 * k, 62, 9, "orange", 0.4 if k in (1, 4, 6) else 0.05)
    for k, row in enumerate((4, 1, 6)):
        s.block(x + 16, 84 + 24 * k, 40, 12, "orange", 0.4)
        s.arrow(x + 58, 90 + 24 * k, x + 88, 79 + 11 * row, "soft", 1.1)
    s.text(x + 12, 190, "N T (D + 1) numbers", size=12.5)
    s.text(x + 12, 208, "for N V D", "soft", 12.5)
    s.text(x + 12, 234, "row index[t] gets g[t]", "soft", 12)
    x = columns[2]
    for i in range(6):
        for k in range(6):
            s.block(x + 16 + 12 * i, 78 + 12 * k, 10, 10, "blue", 0.5 if 1 <= i <= 3 and 2 <= k <= 4 else 0.12)
    for i in range(4):
        for k in range(4):
            s.block(x + 104 + 12 * i, 90 + 12 * k, 10, 10, "orange", 0.6 if (i, k) == (1, 2) else 0.15)
    s.text(x + 51, 166, "x", "soft", 12, "middle", code=True)
    s.text(x + 127, 152, "g", "soft", 12, "middle", code=True)
    s.text(x + 12, 190, "input and cotangent", size=12.5)
    s.text(x + 12, 208, "for N O C K", "soft", 12.5)
    s.text(x + 12, 234, "one term per position", "soft", 12)
    x = columns[3]
    s.stack(x + 40, 112, 66, 40, "orange", 5)
    s.text(x + 12, 190, "N P numbers", size=12.5)
    s.text(x + 12, 208, "for N P", "soft", 12.5)
    s.text(x + 12, 234, "the gradients as such", "soft", 12)


def ladder(s: Sheet) -> None:
    """Four ways, each exact, each slower than the one before."""
    rungs = (
        ("1  a rule", "the op runs once for all samples; its backward yields a factor", "green", ""),
        ("2  plain vmap", "that one use of the parameter by vmap; its gradients are written out", "blue", ""),
        ("3  a loop for that op", "the op runs sample by sample; the others keep their rules", "orange", WARNED),
        ("4  a loop for the call", "fn runs sample by sample, by ordinary autograd", "red", WARNED),
    )
    s.line([(30, 16), (30, 262)], "line", 3)
    s.line([(718, 16), (718, 262)], "line", 3)
    for k, (name, what, colour, said) in enumerate(rungs):
        y = 20 + 60 * k
        s.box(30, y, 688, 44, colour, "card", 4)
        s.text(46, y + 27, name, colour, 14, bold=True)
        s.text(224, y + 27, what, "ink", 12.5)
        if said:
            s.text(704, y + 16, said, "soft", 10.5, "end", code=True)
        if k < 3:
            s.arrow(58, y + 45, 58, y + 60, "soft", 1.3)


def plan(s: Sheet) -> None:
    """Chunks that fit a bound."""
    s.text(20, 26, "a rehearsal without memory: bytes over time", bold=True)
    base, top = 150, 56
    s.line([(40, 40), (40, base), (360, base)], "line")
    s.line([(40, top), (360, top)], "red", 1.4, "5 4")
    s.text(366, top + 5, "max_bytes", "red", 12, code=True)
    fits = [(40, base), (80, 132), (130, 108), (180, 84), (205, 64), (235, 92), (275, 116), (320, 140), (350, base)]
    much = [(40, base), (70, 122), (100, 90), (125, top), (140, 36)]
    s.line(much, "soft", 1.6, "3 3")
    s.line(fits, "green", 2.2)
    s.text(148, 42, "too many samples", "soft", 12)
    s.text(240, 84, "this many fit", "green", 12)
    s.text(100, 168, "forward", "soft", 12, "middle")
    s.text(270, 168, "backward", "soft", 12, "middle")
    s.text(500, 26, "then run", bold=True)
    for k, n in enumerate((8, 8, 8, 4)):
        for i in range(n):
            s.block(500 + 22 * (i % 4) + 0, 48 + 34 * k + 13 * (i // 4), 19, 10, "blue", 0.3)
        s.arrow(596, 60 + 34 * k, 624, 60 + 34 * k)
        s.text(632, 64 + 34 * k, ("start, add", "add", "add", "add, finish")[k], "ink", 12.5, code=True)


def one_call(s: Sheet) -> None:
    """The walk through one call."""
    s.box(20, 16, 200, 52)
    s.text(32, 38, "params, stored once", size=13.5)
    s.text(32, 57, "N copies of stride 0: no memory", "soft", 11)
    s.box(520, 16, 200, 52)
    s.text(532, 38, "a chunk of N samples", size=13.5)
    s.text(532, 57, "as many as max_bytes allows", "soft", 11)
    s.arrow(120, 68, 250, 104)
    s.arrow(620, 68, 490, 104)
    s.box(170, 104, 400, 128, "blue")
    s.text(186, 127, "vmap(fn), watched call by call", "blue", 14, bold=True)
    rows = (
        ("a parameter meets an op with a rule", "once for all N"),
        ("a function of parameters alone", "once, pulled back"),
        ("a Python value is asked for", "answer, or split"),
        ("anything else", "left to vmap"),
    )
    for k, (what, how) in enumerate(rows):
        s.text(186, 151 + 22 * k, what, "ink", 12.5)
        s.text(556, 151 + 22 * k, how, "soft", 12.5, "end")
    s.arrow(370, 232, 370, 258)
    s.box(170, 258, 400, 34)
    s.text(370, 280, "N losses: one ordinary backward of their sum", size=13.5, anchor="middle")
    s.arrow(370, 292, 370, 318)
    s.box(170, 318, 400, 54, "orange")
    s.text(186, 340, "each rule's backward", "orange", 14, bold=True)
    s.text(186, 360, "gives the input's gradient, and a factor per parameter", "ink", 12.5)
    ends = (
        (20, "written out", "per_sample_grads"),
        (200, "norms, let go", "per_sample_norms"),
        (380, "kept, then summed", "clipped_grad"),
        (560, "kept", "factored_grads, gram"),
    )
    for x, what, who in ends:
        s.arrow(370 + (x + 80 - 370) * 0.42, 372, x + 80, 408)
        s.box(x, 408, 160, 50)
        s.text(x + 11, 429, what, size=12.5)
        s.text(x + 12, 448, who, "soft", 11, code=True)


def gram_form(s: Sheet) -> None:
    """A norm from inner products of positions, or from the gradient written out."""
    s.text(20, 26, "written out: T I O multiply-adds", bold=True, size=13.5)
    s.block(20, 62, 40, 96, "orange", 0.3)
    s.text(40, 54, "gᵀ", "soft", 12, "middle")
    s.text(70, 114, "x", "soft", 14, "middle")
    s.block(82, 90, 120, 40, "blue", 0.3)
    s.text(142, 82, "x", "soft", 12, "middle")
    s.text(216, 114, "=", "soft", 14, "middle")
    s.block(230, 62, 120, 96, "red", 0.25)
    s.text(290, 114, "gradient", size=12.5, anchor="middle")
    s.text(20, 178, "sum of its squares", "soft", 12)
    s.line([(384, 20), (384, 182)], "line", 1, "4 4")
    s.text(404, 26, "Gram form: about T² (I + O) / 2", bold=True, size=13.5)
    for x, colour, name in ((404, "blue", "x xᵀ"), (512, "orange", "g gᵀ")):
        for i in range(4):
            for k in range(4):
                s.block(x + 20 * i, 66 + 20 * k, 18, 18, colour, 0.35 if i <= k else 0.08)
        s.text(x + 39, 56, name, "soft", 12, "middle")
    s.text(497, 110, "⊙", "soft", 16, "middle")
    s.arrow(602, 104, 640, 104)
    s.text(650, 100, "sum of all:", size=12.5)
    s.text(650, 118, "|gradient|²", "green", 13, bold=True)
    s.text(404, 178, "each pair of positions once, by symmetry", "soft", 12)


def clipping(s: Sheet) -> None:
    """Each gradient inside its bound, and what one sample can move."""
    cx, cy, r = 150, 132, 62
    arrows = ((0.2, 120), (1.05, 40), (2.0, 105), (2.75, 52), (3.9, 130), (5.3, 74))
    s.text(20, 24, "each gradient is brought inside the bound", bold=True)
    s.circle(cx, cy, r, "blue", 0.08, "5 4")
    for angle, size in arrows:
        ux, uy = cos(angle), -sin(angle)
        if size > r:
            s.arrow(cx, cy, cx + size * ux, cy + size * uy, "line", 1)
        s.arrow(cx, cy, cx + min(size, r) * ux, cy + min(size, r) * uy, "blue", 2)
    s.text(cx + 40, cy + r + 18, "max_norm", "blue", 12, code=True)
    s.text(400, 24, "one sample more stays in this ball", bold=True)
    ex, ey, scale = 600, 150, 0.75
    points = [(430.0, 190.0)]
    for angle, size in arrows[:3] + ((0.35, 90), (0.1, 80)):
        x, y = points[-1]
        points.append((x + scale * min(size, r) * cos(angle), y - scale * min(size, r) * sin(angle) * 0.6))
    for (x0, y0), (x1, y1) in pairwise(points):
        s.arrow(x0, y0, x1, y1, "blue", 1.8)
    ex, ey = points[-1]
    s.circle(ex, ey, r * scale, "orange", 0.15, "5 4")
    s.circle(ex, ey, 3.5, "ink", 1)
    s.arrow(ex, ey, ex + r * scale * cos(pi / 4), ey + r * scale * sin(pi / 4), "orange", 1.8)
    s.text(ex + 4, ey + r * scale + 20, "sensitivity", "orange", 12, "middle", code=True)
    s.text(ex + 10, ey - r * scale - 8, "grad", "ink", 12, "middle", code=True)


def noise(s: Sheet) -> None:
    """Gradients around their mean; the noise scale said is that of the gradients drawn."""
    turns = [(k * 2.399963, 0.6 + 0.8 * ((k * 7) % 11) / 11) for k in range(14)]
    points = [(size * cos(angle), size * sin(angle)) for angle, size in turns]
    shift = [sum(axis) / len(points) for axis in zip(*points, strict=True)]
    points = [(x - shift[0], y - shift[1]) for x, y in points]
    trace = sum(x * x + y * y for x, y in points) / (len(points) - 1)
    for left, length, spread, said in (
        (20, 170, 38, "one sample points roughly the right way"),
        (390, 32, 76, "in a batch of this size noise equals signal"),
    ):
        scale = trace * (spread / length) ** 2
        ox, oy = left + (60 if length > 100 else 140), 128
        mx, my = ox + 0.96 * length, oy - 0.28 * length
        s.text(left, 24, f"noise scale {scale:.2g}", bold=True)
        for x, y in points:
            s.arrow(ox, oy, mx + spread * x, my + spread * y, "line", 0.9)
        s.circle(mx, my, spread * trace**0.5, "blue", 0.07, "5 4")
        s.arrow(ox, oy, mx, my, "orange", 3)
        s.text(left, 226, said, "soft", 12.5)
    s.text(92, 150, "mean", "orange", 12, code=True)
    s.text(276, 64, "trace", "blue", 12, code=True)


PICTURES: dict[str, tuple[Callable[[Sheet], None], int, int, str]] = {
    "call": (call, 740, 262, "A batch of N samples and one set of parameters give N losses and N gradients"),
    "factors": (factors, 765, 260, "Four kinds of factor: Outer, Rows, Patches, Dense"),
    "ladder": (ladder, 748, 278, "The ladder: a rule, plain vmap, a loop for one op, a loop for the call"),
    "plan": (plan, 740, 186, "The plan: the number of samples whose rehearsal stays under max_bytes"),
    "one_call": (one_call, 740, 474, "One call: a watched forward, one backward, factors, an answer"),
    "gram_form": (gram_form, 740, 192, "A norm by writing the gradient out, or from inner products of positions"),
    "clipping": (clipping, 740, 236, "Clipped gradients, and how far one sample can move their sum"),
    "noise": (noise, 740, 238, "Gradients around their mean, with a small and with a large noise scale"),
}


def main() -> None:
    for name, (draw, width, height, title) in PICTURES.items():
        for mode, colours in (("light", LIGHT), ("dark", DARK)):
            sheet = Sheet(width, height, colours, title)
            draw(sheet)
            (HERE / f"{name}-{mode}.svg").write_text(sheet.svg())


if __name__ == "__main__":
    main()
