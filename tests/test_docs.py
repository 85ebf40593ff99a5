"""The site tells the truth: it builds without a warning, its examples run, its links lead somewhere."""

import inspect
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

import psgrad
from psgrad.registry.rule import RULES

from .test_readme import BLOCK, run_examples

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
BESIDE = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
LINK = re.compile(r"""\]\(\s*<?([^)\s>]+)>?[^)]*\)|(?:src|href)=["']([^"']+)["']|^\s*:link: (\S+)""", re.M)
ELSEWHERE = re.compile(r"""<(?:script|img|iframe|link)[^>]+(?:src|href)=["']((?:https?:)?//[^"']+)""")
HEADING = re.compile(r"^#{1,6} +(.*?) *$", re.M)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ---- the site --------------------------------------------------------------------------------------------


def public() -> Iterator[str]:
    """Every public name that the page of the API has to have, and the fields of what people get from psgrad."""
    for module in (psgrad, psgrad.ops, psgrad.testing, psgrad.extend):
        for thing in module.__all__:
            if not inspect.ismodule(getattr(module, thing)):
                yield f"{module.__name__}.{thing}"
    results: list[Any] = [psgrad.ClippedGrad, psgrad.GradStats, psgrad.Report, psgrad.Comparison, psgrad.Verification]
    for kind in results:
        for field in getattr(kind, "_fields", None) or kind.__dataclass_fields__:
            yield f"psgrad.{kind.__name__}.{field}"
    yield from (f"psgrad.report.Row.{field}" for field in psgrad.report.Row._fields)
    yield from ("psgrad.FactoredGrads.values", "psgrad.FactoredGrads.aux")
    yield from ("psgrad.extend.Rule.saves", "psgrad.extend.Outer.x")  # explained beside their lines in the source


def test_site_builds(tmp_path: Path) -> None:
    """As `make docs` builds it: every warning is an error. One test, so that parallel processes build it once."""
    site = tmp_path / "site"
    options = ["-q", "-W", "--keep-going", "-n", "-j", "auto", "-d", str(tmp_path / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, str(DOCS), str(site)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    contents = (site / "index.html").read_text()
    for path in PAGES:
        assert (site / path.relative_to(DOCS).with_suffix(".html")).is_file()
        orphan = re.match(r"---\n.*^orphan:", path.read_text(), re.M | re.S)  # else Sphinx warns of it
        assert not orphan, f"{name(path)} is in no toctree"
    for path in NOTEBOOKS:
        assert f'href="notebooks/{path.stem}.html"' in contents, name(path)
        shown = (site / "notebooks" / f"{path.stem}.html").read_text()
        assert "&lt;Figure size" not in shown, f"{name(path)} has words in place of its pictures"
    assert [thing for thing in public() if f'id="{thing}"' not in (site / "api.html").read_text()] == []
    for path in site.rglob("*.html"):
        assert ELSEWHERE.findall(path.read_text()) == [], path.name


# ---- examples --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_examples_run(path: Path) -> None:
    rules = dict(RULES)
    run_examples(path)
    assert rules == RULES, "the page leaves a rule behind"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_examples_are_python_blocks(path: Path) -> None:
    """A prompt in a block of another language would not run."""
    for found in BLOCK.finditer(path.read_text()):
        assert found[3] == "python" or not re.match(r"\s*>>> ", found[4]), f"{name(path)}: {found[4][:60]}"


# ---- links -----------------------------------------------------------------------------------------------


def prose(path: Path) -> str:
    """The text of a page or notebook without its code."""
    if path.suffix == ".ipynb":
        cells = nbformat.read(path, as_version=4).cells
        text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    else:
        text = path.read_text()
    text = BLOCK.sub(lambda found: found[0] if found[3].startswith("{") else "", text)
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "`", text)


def anchors(path: Path) -> set[str]:
    """What `#name` may point to: headings as GitHub and MyST name them, and targets of one's own."""
    text = BLOCK.sub("", path.read_text())
    found = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in HEADING.findall(text)}
    return found | set(re.findall(r"^\(([\w-]+)\)=$", text, re.M))


@pytest.mark.parametrize("path", [*BESIDE, *PAGES, *NOTEBOOKS], ids=name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    for found in LINK.finditer(prose(path)):
        link = found[1] or found[2] or found[3]
        if re.match(r"[a-z]+:|//", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if found[3] and not target.suffix:  # a card's link is the name of a page
            target = target.with_suffix(".md")
        assert target.exists(), f"{name(path)}: {link}"
        assert DOCS / "notebooks" not in target.parents, f"{name(path)}: {link} is a copy; link to notebooks/"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name(path)}: {link}"


# ---- pictures --------------------------------------------------------------------------------------------


def test_pictures_are_what_draws_them(tmp_path: Path) -> None:
    draw = runpy.run_path(str(DOCS / "pictures" / "draw.py"))
    draw["main"].__globals__["HERE"] = tmp_path
    draw["main"]()
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert drawn == {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}
