"""The README tells the truth: its examples run, and its table of ops is the registry's.

`python tests/test_readme.py` rewrites the table.
"""

import doctest
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import psgrad
from psgrad._errors import name_of
from psgrad._registry import RULES, Composite, Fold, Rule

README = Path(__file__).resolve().parent.parent / "README.md"
OPERATORS = {"matmul": "@", "add": "+", "sub": "-", "mul": "*", "truediv": "/", "getitem": "table[index]"}


def python_blocks(text: str) -> list[tuple[int, str]]:
    """The ```python blocks of a markdown text, each with the line that it starts on."""
    return [(text[: m.start(1)].count("\n"), m[1]) for m in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S)]


def spellings(functions: list[Callable[..., Any]]) -> str:
    """How people write them; a method that repeats a function's name goes without saying."""
    names = [name_of(f) for f in functions]
    shown = [n for n in names if not n.startswith("Tensor.")]
    dunders = [n.removeprefix("Tensor.__").removesuffix("__") for n in names if n.startswith("Tensor.__")]
    return ", ".join(f"`{n}`" for n in [*shown, *(OPERATORS[n] for n in dunders if n in OPERATORS)])


def ops_table() -> str:
    """The registered rules as a markdown table, in the order of registration."""
    rules = {rule.name: rule for rule in RULES.values() if not isinstance(rule, Composite)}
    by_rule: dict[Rule | Fold, list[Callable[..., Any]]] = {rule: [] for rule in rules.values()}
    for function, entry in RULES.items():  # what is taken apart stands with the rule of its parts
        if entry.name in rules and not (getattr(function, "__module__", None) or "").startswith(psgrad.__name__):
            by_rule[rules[entry.name]].append(function)
    lines = ["| rule | written as | factors | in `psgrad.ops` |", "|---|---|---|---|"]
    for rule, functions in by_rule.items():
        factors = ", ".join(rule.factors) if isinstance(rule, Rule) else "none: it has no parameters"
        composable = "yes" if rule.name in psgrad.ops.__all__ else ""
        lines.append(f"| {rule.name} | {spellings(functions)} | {factors} | {composable} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    return re.sub(r"(?<=<!-- ops -->\n).*?(?=<!-- /ops -->)", lambda _: ops_table() + "\n", text, flags=re.S)


def test_table_of_ops_is_the_registry() -> None:
    text = README.read_text()
    assert text == with_table(text), "run `python tests/test_readme.py`"


def test_examples_run() -> None:
    scope: dict[str, Any] = {}
    blocks = python_blocks(README.read_text())
    assert blocks
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for line, source in blocks:
        if ">>>" not in source:
            exec(compile("\n" * line + source, README.name, "exec"), scope)
            continue
        example = doctest.DocTestParser().get_doctest(source, scope, f"{README.name}:{line}", README.name, line)
        report: list[str] = []
        runner.run(example, out=report.append, clear_globs=False)
        if report:
            pytest.fail("".join(report), pytrace=False)
        scope.update(example.globs)


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
