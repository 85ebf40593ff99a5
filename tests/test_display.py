"""Results in a notebook: whole and escaped HTML, whatever they hold."""

import math
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psgrad
from psgrad import display

TAGS = {"div", "span", "table", "thead", "tbody", "tr", "th", "td", "svg", "rect", "path", "text", "title"}


class Tags(HTMLParser):
    """The text and the tables of HTML that closes every tag it opens."""

    def __init__(self, text: str | None) -> None:
        super().__init__()
        assert text, "the text form is shown instead"
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.styles: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        self.open.append(tag)
        self.styles += [value or "" for name, value in attrs if name in ("style", "fill", "stroke")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + " "
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def shown(result: Any) -> Tags:
    return Tags(result._repr_html_())


def net(n: int = 12) -> tuple[Any, dict[str, Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 4))
    return *psgrad.from_module(model, F.cross_entropy), (torch.randn(n, 20), torch.randint(4, (n,)))


ALL: dict[str, Any] = {
    "explain": psgrad.explain,
    "verify": psgrad.verify,
    "clipped": lambda *call: psgrad.clipped_grad(*call, 1.0, nonfinite="propagate"),
    "clipped by layer": lambda *call: psgrad.clipped_grad(*call, {"0": 1.0, "2": 2.0}, nonfinite="propagate"),
    "kept and clipped": lambda *call: psgrad.factored_grads(*call).clipped_grad(1.0, nonfinite="propagate"),
    "stats": psgrad.grad_stats,
    "factored": psgrad.factored_grads,
}


# ---- what is seen ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_it_is_whole_and_legible_on_light_and_dark(name: str) -> None:
    tags = shown(ALL[name](*net()))
    colours = {c for style in tags.styles for c in re.findall(r"#\w+|\b(?:black|white(?!-space)|gr[ae]y)\b", style)}
    assert colours <= {display.ACCENT}
    if name != "verify":
        names = ["0.bias", "0.weight", "2.bias", "2.weight"]
        assert sorted(row[0].removeprefix("params['").removesuffix("']") for row in tags.rows[-4:]) == names


def test_a_clipped_sum() -> None:
    fn, params, batch = net()
    bound = float(psgrad.per_sample_norms(fn, params, batch).median())
    step = psgrad.clipped_grad(fn, params, batch, bound)
    tags = shown(step)
    for part in ("samples 12", f"sensitivity {bound:.4g}", "clipped 6 (50 %)", f"bound {bound:.4g}"):
        assert part in re.sub(r"\s+", " ", tags.text)
    assert f"norm of the sum {math.hypot(*(float(g.norm()) for g in step.grad.values())):.4g}" in re.sub(
        r"\s+", " ", tags.text
    )
    shown_bars = re.findall(
        r'<rect x="[^>]*fill="([^"]*)"[^>]*><title>(\d+) samples: (\S+) to ([^\s<]+)<', step._repr_html_() or ""
    )
    assert sum(int(count) for _, count, _, _ in shown_bars) == 12
    for fill, _, low, high in shown_bars:  # what was clipped stands out
        if not float(low) < bound < float(high):
            assert (fill == display.ACCENT) == (float(low) >= bound)
    assert {fill for fill, *_ in shown_bars} == {display.ACCENT, "currentColor"}


def test_samples_that_do_not_count_are_in_no_picture() -> None:
    fn, params, batch = net()
    batch[0][3] = torch.nan
    valid = torch.arange(12) % 4 > 0
    text = re.sub(r"\s+", " ", shown(psgrad.clipped_grad(fn, params, batch, 1.0, valid=valid, nonfinite="zero")).text)
    assert "samples 8 of 12" in text
    counts = [int(n) for n in re.findall(r"(\d+) samples: ", text)]
    assert sum(counts) == 8


def test_bounds_by_layer() -> None:
    fn, params, batch = net()
    step = psgrad.clipped_grad(fn, params, batch, {"0": 1.0, "2": 2.0})
    tags = shown(step)
    assert tags.rows[:1] == [["bound", "median norm", "largest"]]
    assert [row[0] for row in tags.rows[1:3]] == ["0", "2"]
    assert tags.rows[1][2] == f"{float(step.norms['0'].max()):.4g}"


def test_statistics() -> None:
    fn, params, batch = net()
    stats = psgrad.grad_stats(fn, params, batch)
    text = re.sub(r"\s+", " ", shown(stats).text)
    assert f"noise scale {float(stats.noise_scale):.4g}" in text
    assert ("noise drowns the mean" in text) == (float(stats.sq_mean) <= 0)
    drowned = stats._replace(sq_mean=torch.tensor(-1.0))
    assert "noise drowns the mean" in shown(drowned).text


def test_what_is_held() -> None:
    fn, params, batch = net()
    fg = psgrad.factored_grads(fn, params, batch)
    tags = shown(fg)
    assert tags.rows[0] == ["parameter", "shape", "kept as", "held", "written out", "held / written out"]
    rows = {row[0]: row[1:5] for row in tags.rows[1:]}
    assert rows["0.weight"][:2] == ["30x20", "Outer"]
    assert rows["0.weight"][3] == "28.8 kB"
    assert rows["2.bias"][1] == "Dense"
    held = re.search(r"holding ([\d,]+) bytes", repr(fg))
    assert held is not None
    assert f"held {display.short(int(held[1].replace(',', '')), 'B')}" in re.sub(r"\s+", " ", tags.text)


def test_a_report_marks_what_goes_by_vmap() -> None:
    fn = lambda p, x: torch.logcumsumexp(p["a"] * x, 0).sum() + F.linear(x, p["w"]).sum()
    report = psgrad.explain(fn, {"a": torch.ones(3), "w": torch.ones(2, 3)}, torch.ones(4, 3))
    found = report._repr_html_()
    assert found is not None
    marked = re.findall(f'color:{display.ACCENT}">([^<]*)<', found)
    assert marked == [row.how for row in report.rows if row.how.startswith("vmap")]


def test_a_verification() -> None:
    report = psgrad.verify(*net())
    tags = shown(report)
    assert [row[0] for row in tags.rows[1:]] == [c.quantity for c in report.comparisons]
    assert f"3 of 12 samples agree with {report.against}" in tags.text
    assert report.how in tags.text


# ---- whatever they hold ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in ALL if name != "verify"])
def test_no_samples(name: str) -> None:
    shown(ALL[name](*net(0)))


@pytest.mark.parametrize("name", [name for name in ALL if name != "verify"])
@pytest.mark.parametrize("what", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite(name: str, what: float) -> None:
    fn, params, batch = net()
    batch[0][2] = what
    shown(ALL[name](fn, params, batch))
    batch[0][:] = what
    shown(ALL[name](fn, params, batch))


@pytest.mark.parametrize("name", [name for name in ALL if name != "verify"])
def test_shapes_without_values(name: str) -> None:
    fn, params, batch = net()
    on_meta = {name: p.to("meta") for name, p in params.items()}
    tags = shown(ALL[name](fn, on_meta, tuple(t.to("meta") for t in batch)))
    assert "30x20" in tags.text


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    fn, params, (x, y) = net()
    params = {name: p.to(dtype) for name, p in params.items()}
    for call in ALL.values():
        shown(call(fn, params, (x.to(dtype), y)))


def test_parameters_of_every_structure() -> None:
    fn = lambda w, x: (w * x).sum()
    assert shown(psgrad.clipped_grad(fn, torch.zeros(3), torch.ones(2, 3), 1.0)).rows[1][:2] == ["params", "3"]
    fn = lambda p, x: (p["a"][0] * x).sum() + (p["a"][1]["<b>&"] * x).sum()
    params = {"a": [torch.zeros(3), {"<b>&": torch.zeros(())}]}
    for result in (
        psgrad.clipped_grad(fn, params, torch.ones(2, 3), 1.0),
        psgrad.grad_stats(fn, params, torch.ones(2, 3)),
        psgrad.factored_grads(fn, params, torch.ones(2, 3)),
        psgrad.explain(fn, params, torch.ones(2, 3)),
        psgrad.verify(fn, params, torch.ones(2, 3)),
    ):
        text = result._repr_html_()
        assert text is not None
        assert "<b>" not in text
        tags = Tags(text)
        if not isinstance(result, psgrad.Verification):
            names = [row[0].removeprefix("params") for row in tags.rows[1:]]
            assert names == ["['a'][0]", "['a'][1]['<b>&']"]


def test_large_trees_have_a_bounded_table() -> None:
    params = {f"p{k:03}": torch.ones(k % 7 + 1) for k in range(300)}
    fn = lambda p, x: sum((v * x).sum() for v in p.values())
    x = torch.ones(2)
    for result in (
        psgrad.clipped_grad(fn, params, x, 1.0),
        psgrad.grad_stats(fn, params, x),
        psgrad.factored_grads(fn, params, x),
    ):
        tags = shown(result)
        assert len(tags.rows) == display.ROWS + 1
        assert "288 more parameters" in tags.text
    tags = shown(psgrad.explain(fn, params, x))
    assert len(tags.rows) == 61
    assert "240 more uses of parameters" in tags.text
    several = psgrad.clipped_grad(fn, params, x, dict.fromkeys(params, 1.0))
    assert len(shown(several).rows) == 2 * (display.ROWS + 1)


@pytest.mark.parametrize(
    "values",
    [[], [0.0], [0.0, 0.0], [1.0], [1e-300, 1e300], [1.0, 1 + 1e-12], [-1.0, 2.0], [5e-324], [1.7e308, -1.7e308]],
)
@pytest.mark.parametrize("bound", [None, 1.0, math.inf, math.nan, 1e-30, 0.0])
def test_histograms_of_any_numbers(values: list[float], bound: float | None) -> None:
    text = display.histogram(torch.tensor(values, dtype=torch.float64), "a & b", bound)
    assert "nan" not in text
    assert "inf" not in text
    if values:
        tags = Tags(text)
        assert sum(int(n) for n in re.findall(r"(\d+) samples", tags.text)) == len(values)
    else:
        assert text == ""


def test_a_histogram_says_what_it_leaves_out() -> None:
    text = display.histogram(torch.tensor([1.0, torch.nan, 2.0, torch.inf]), "norms")
    assert "2 not finite, not shown" in text
    assert "not shown" not in display.histogram(torch.ones(3), "norms")
    assert "norms: 3 not finite, not shown" in display.histogram(torch.full((3,), torch.nan), "norms")


@pytest.mark.parametrize(
    ("share", "width"), [(0.0, "0.0"), (0.25, "21.0"), (1.0, "84.0"), (7.0, "84.0"), (-1.0, "0.0"), (math.nan, "0.0")]
)
def test_a_meter_is_filled_by_its_share(share: float, width: str) -> None:
    assert re.findall(r'<rect width="([\d.]+)"', display.meter(share)) == ["84", width]


def test_what_cannot_be_shown_leaves_it_to_the_text() -> None:
    broken = psgrad.ClippedGrad(None, None, None, 0, 1.0)  # type: ignore[arg-type]
    assert broken._repr_html_() is None


def test_text_forms_do_not_write_large_trees_out() -> None:
    fn, params = psgrad.from_module(nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 2)), F.cross_entropy)
    batch = torch.randn(4, 20), torch.zeros(4, dtype=torch.long)
    step = psgrad.clipped_grad(fn, params, batch, 1.0)
    assert repr(step).startswith("ClippedGrad(grad=<dict of 4 tensors, 692 numbers>, norms=tensor([")
    assert repr(step).endswith("count=4, sensitivity=1.0)")
    stats = psgrad.grad_stats(fn, params, batch)
    assert repr(stats).startswith("GradStats(mean=<dict of 4 tensors, 692 numbers>, variance=<dict of")
    small = psgrad.clipped_grad(lambda w, x: (w * x).sum(), torch.zeros(2), torch.ones(1, 2), 2.0)
    assert repr(small).startswith("ClippedGrad(grad=tensor([1., 1.]), norms=tensor([1.4142])")
