"""The package around the code: the demo's command line, what the source distribution holds, how to add a rule."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import psgrad
from psgrad import __main__ as demo
from psgrad.registry.rule import RULES

from . import test_readme
from .cases import op

ROOT = Path(__file__).resolve().parent.parent


# ---- the demo --------------------------------------------------------------------------------------------


def test_help_says_what_the_demo_does() -> None:
    done = subprocess.run([sys.executable, "-m", "psgrad", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("usage: python -m psgrad [-h]\n")
    for part in ("trains a small convolutional net", "largest gradients", "loop over samples", "times them"):
        assert part in done.stdout


@pytest.mark.parametrize("argument", ["--epochs", "faster"])
def test_the_demo_refuses_what_it_does_not_know(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        demo.main([argument])
    assert error.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"usage: python -m psgrad [-h]\npython -m psgrad: error: unrecognized arguments: {argument}\n"


# ---- the source distribution -----------------------------------------------------------------------------


def used_by_tests() -> set[str]:
    """What lies beside `tests` and is imported, or named as a path from the root, in a test."""
    found = set()
    for path in (ROOT / "tests").glob("*.py"):
        source = path.read_text()
        found |= set(re.findall(r'(?:ROOT|parent\.parent) / "([\w.]+)"', source))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return {name for name in found if (ROOT / name).exists()}


def test_the_source_distribution_holds_what_tests_and_make_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    include = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert all(name.startswith("/") for name in include)  # without it, what has that name in any directory
    assert all((ROOT / name[1:]).exists() for name in include)
    held = {name[1:] for name in include} | {"pyproject.toml", "LICENSE"}  # which hatchling adds
    used = used_by_tests()
    assert {"psgrad", "benchmarks", "notebooks", "README.md", "CONTRIBUTING.md"} <= used
    assert used <= held
    assert {"Makefile", "constraints.txt", "conftest.py", "tests"} <= held
    pictures = re.findall(r"\]\((docs|notebooks)/", (ROOT / "README.md").read_text())
    assert set(pictures) <= held


# ---- CONTRIBUTING ----------------------------------------------------------------------------------------


@pytest.fixture
def contributed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The rule that CONTRIBUTING.md adds, while a test runs."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    block = re.search(r"^   ```python\n(.*?)^   ```$", text, re.M | re.S)
    assert block is not None
    scope: dict[str, Any] = {"__name__": "psgrad.rules.contributed", "__package__": "psgrad.rules"}
    exec(compile(re.sub("^   ", "", block[1], flags=re.M), "CONTRIBUTING.md", "exec"), scope)
    (rule,) = scope["RULES"]
    for function in rule.functions:
        monkeypatch.setitem(RULES, function, rule)
    return rule


def test_the_rule_of_contributing_is_exact(contributed: Any) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    written = re.search(r"^   ```\n   (op\(.*\)),\n   ```$", text, re.M)
    assert written is not None
    case = eval(written[1], {"op": op, "torch": torch})
    psgrad.testing.check(*case.make(), rules=case.rules)
    assert {rule for used in case.rules.values() for rule in used} == {contributed.name}


def test_the_readme_holds_with_the_rule_of_contributing(contributed: Any) -> None:
    """Its examples use ops without a rule, and this is not one of them."""
    test_readme.test_examples_run()
