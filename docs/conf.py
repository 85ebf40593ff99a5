"""How Sphinx builds the site from this directory and from `notebooks/`: `make docs`."""

import inspect
import posixpath
import re
import shutil
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml

import psgrad

HERE = Path(__file__).resolve().parent

project = "psgrad"
version = release = psgrad.__version__
copyright = "the authors of psgrad"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "sphinx_design"]
exclude_patterns = ["**.ipynb_checkpoints"]

# ---- pages -----------------------------------------------------------------------------------------------

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # the outputs are in the notebooks; tests/test_notebooks.py runs them

# ---- looks -----------------------------------------------------------------------------------------------

smartquotes = False  # "" is an empty string
html_theme = "furo"
html_title = f"psgrad {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
highlight_language = "none"  # of blocks that name no language: commands
pygments_style = "friendly"
pygments_dark_style = "github-dark"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

# ---- API -------------------------------------------------------------------------------------------------

autodoc_typehints = "none"  # the arguments' descriptions say it in words
autodoc_member_order = "bysource"
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_attr_annotations = False
psgrad.extend.Fold.__name__ = "Fold"  # the name that people import it by


def notebooks_beside_pages() -> None:
    """Copy `notebooks/` to where Sphinx looks for sources; git ignores the copies."""
    copies = HERE / "notebooks"
    copies.mkdir(exist_ok=True)
    originals = {path.name: path for path in HERE.parent.glob("notebooks/*.ipynb")}
    for path in copies.glob("*.ipynb"):
        if path.name not in originals:
            path.unlink()
    for name, path in originals.items():
        copy = copies / name
        if not copy.exists() or copy.read_bytes() != path.read_bytes():
            shutil.copyfile(path, copy)


# Files beside docs/ that are pages, too.
PAGES = {"ARCHITECTURE.md": "architecture.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PAGES["README.md"] = "index.md"


def links_on_the_site(text: str, file: str, docname: str) -> str:
    """Links by the places of files in the repository, as GitHub has them, become links by their places on the site."""

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file), link[1]))
        page = target.removeprefix("docs/") if target.startswith(("docs/", "notebooks/")) else PAGES.get(target)
        return f"]({posixpath.relpath(page, posixpath.dirname(docname) or '.')}" if page else link[0]

    return re.sub(r"\]\((?!\w+:|#)([^)\s#]+)", moved, text)


def read_page(app: Any, docname: str, source: list[str]) -> None:
    file = f"{docname}.ipynb" if docname.startswith("notebooks/") else f"docs/{docname}.md"
    source[0] = links_on_the_site(source[0], file, docname)


def read_included(app: Any, path: Path, docname: str, content: list[str]) -> None:
    content[0] = links_on_the_site(content[0], path.name, docname)


def fields_of(obj: object) -> list[str]:
    """The fields of a record that are explained beside their line in the source, as a section of its docstring."""
    if not isinstance(obj, type) or not (hasattr(obj, "_fields") or is_dataclass(obj)) or obj is psgrad.FactoredGrads:
        return []
    found = re.findall(r"^    (\w+): [^\n]*?  # ([^\n]*)$", inspect.getsource(obj), re.M)
    return ["", "Attributes:", *(f"    {name}: {why}" for name, why in found)] if found else []


PUBLIC = {name for name in psgrad.__all__ if not inspect.ismodule(getattr(psgrad, name))}
PUBLIC |= {f"testing.{name}" for name in psgrad.testing.__all__} | {f"extend.{name}" for name in psgrad.extend.__all__}


def as_code(text: str) -> str:
    """Code in a docstring, as a link where it is the name of something public."""
    name = text.removeprefix("psgrad.")
    return f":py:obj:`~psgrad.{name}`" if name in PUBLIC else f"``{text}``"


def docstring_as_text(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Docstrings are written to be read as they are: only `name` is markup, and stars and bars are themselves."""
    if "Attributes:" not in lines:
        lines += fields_of(obj)
    example = False
    for i, line in enumerate(lines):
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        if not example:
            parts = line.split("`")
            parts[::2] = [re.sub(r"([*|\\])", r"\\\1", part) for part in parts[::2]]
            parts[1::2] = [as_code(part) for part in parts[1::2]]
            lines[i] = "".join(parts) if len(parts) % 2 else line


def visit_math(self: Any, node: nodes.Element) -> None:
    """Formulas as MathML, which browsers draw without a script."""
    block = isinstance(node, nodes.math_block)
    tree = latex2mathml.tex2mathml(node.astext(), as_block=block)
    self.body.append(f'<div class="math">{tree}</div>' if block else str(tree))
    raise nodes.SkipNode


def setup(app: Any) -> None:
    notebooks_beside_pages()
    app.connect("source-read", read_page)
    app.connect("include-read", read_included)
    app.connect("autodoc-process-docstring", docstring_as_text, priority=100)  # before napoleon adds its markup
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))


html_math_renderer = "mathml"
