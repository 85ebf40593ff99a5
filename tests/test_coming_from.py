"""The pages for people who come from other packages: both sides of each run, and agree in numbers.

A block with `% needs: PACKAGE, ...` on the line before it is the peer's side, and runs where these can be imported.
Where a page has said what `theirs` and `ours` are, the two are compared. `make peers` runs all of them, in an
environment of its own; elsewhere what is missing is skipped, but for the peers that `make test` installs.
"""

import importlib.util
import logging
import os
import re
import textwrap
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import torch

from .test_readme import BLOCK, NEEDS, run_block

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "coming_from").glob("*.md"))
ALWAYS = {"opacus", "backpack", "trak", "dattri", "torch"}  # what `make test` installs
DISTRIBUTIONS = {
    "opacus": ("Opacus", "opacus"),
    "backpack": ("BackPACK", "backpack-for-pytorch"),
    "trak": ("TRAK", "traker"),
    "dattri": ("dattri", "dattri"),
    "jax": ("JAX", "jax"),
    "jax_privacy": ("jax_privacy", "jax_privacy"),
    "bergson": ("Bergson", "bergson"),
}


class Block(NamedTuple):
    source: str
    line: int
    needs: frozenset[str]


def blocks(path: Path) -> list[Block]:
    """The Python of a page, from top to bottom."""
    text, found = path.read_text(), []
    for block in BLOCK.finditer(text):
        if block[3] == "python":
            needs = NEEDS.search(text[: block.start()])
            names = frozenset(re.split(r",\s*", needs[1]) if needs else ())
            found.append(Block(textwrap.dedent(block[4]), text[: block.start(4)].count("\n"), names))
    return found


def is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


# Once for each set of packages that a page needs together: what is missing then hides no other.
SIDES = [(path, needs) for path in PAGES for needs in dict.fromkeys(b.needs for b in blocks(path) if b.needs)]


@pytest.mark.parametrize(("path", "needs"), SIDES, ids=lambda v: v.stem if isinstance(v, Path) else "+".join(sorted(v)))
def test_both_sides_agree(path: Path, needs: frozenset[str]) -> None:
    missing = sorted(filter(is_missing, needs))
    if missing and not needs & ALWAYS and os.environ.get("PSGRAD_PEERS") != "all":
        pytest.skip(f"{', '.join(missing)} is not installed: `make peers` runs this")
    assert not missing, f"{', '.join(missing)} is not installed: `make test` and `make peers` see to it"
    torch.manual_seed(0)
    scope: dict[str, Any] = {}
    compared = 0
    for block in blocks(path):
        if not block.needs <= needs:
            continue
        with warnings.catch_warnings():
            if block.needs:  # of peers, which warn as they like
                warnings.simplefilter("ignore")
                logging.disable(logging.WARNING)
            try:
                run_block(block.source, scope, path, block.line)
            finally:
                logging.disable(logging.NOTSET)
        if "theirs" in scope and "ours" in scope:
            check_alike(scope.pop("theirs"), scope.pop("ours"), f"{path.name}:{block.line}")
            compared += 1
        elif not block.needs:
            scope.pop("ours", None)  # the other side is another package's
    assert "theirs" not in scope, f"{path.name} does not say what is ours"
    assert compared == sum(bool(re.search(r"^>>> theirs", b.source, re.M)) for b in blocks(path) if b.needs <= needs)
    assert compared > 0


def check_alike(theirs: Any, ours: Any, where: str) -> None:
    """Equal trees of numbers, up to the rounding of float32 and Opacus's 1e-6 in the norm."""
    leaves, structure = optree.tree_flatten(theirs)
    own, own_structure = optree.tree_flatten(ours)
    assert structure == own_structure, where
    for a, b in zip(own, leaves, strict=True):
        torch.testing.assert_close(as_tensor(a), as_tensor(b), rtol=1e-4, atol=1e-5, msg=lambda m: f"{where}: {m}")


def as_tensor(leaf: Any) -> torch.Tensor:
    return (leaf.detach() if isinstance(leaf, torch.Tensor) else torch.tensor(np.asarray(leaf))).double()


@pytest.mark.parametrize("package", sorted(ALWAYS))
def test_peers_of_every_run_are_there(package: str) -> None:
    assert not is_missing(package), f"{package} is not installed: `make test` sees to it"
    assert any(package in b.needs for path in PAGES for b in blocks(path))


def test_each_page_compares() -> None:
    assert {path.stem for path, _ in SIDES} == {path.stem for path in PAGES} - {"index"}
    for path in (ROOT / "docs").rglob("*.md"):  # nobody else runs what needs other packages
        assert path in PAGES or "% needs:" not in path.read_text(), path.name


@pytest.mark.parametrize("package", DISTRIBUTIONS)
def test_versions_are_those_on_the_pages(package: str) -> None:
    shown, distribution = DISTRIBUTIONS[package]
    index = (ROOT / "docs" / "coming_from" / "index.md").read_text()
    said = re.search(rf"^\| {shown} \(`{distribution}`\) \| (\S+) \|$", index, re.M)
    assert said
    for path in PAGES:
        if path.stem != "index" and any(package in b.needs for b in blocks(path)):
            assert re.search(rf"\b{shown} {re.escape(said[1])}\b", path.read_text()), path.name
    if not is_missing(package):
        assert version(distribution) == said[1]
