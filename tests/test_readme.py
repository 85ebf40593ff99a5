"""The README tells the truth: its examples run. So do the site's tables: they are what the registry and `explain` say.

`python -m tests.test_readme` rewrites the tables, which are in `docs/supported.md`.
"""

import doctest
import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import psgrad
from psgrad.errors import name_of
from psgrad.registry.rule import RULES, BatchFold, Composite, Rule

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SUPPORTED = ROOT / "docs" / "supported.md"
BLOCK = re.compile(r"^( *)(`{3,}|~{3,})(\S*)[^\n]*\n(.*?)^\1\2$", re.M | re.S)  # indent, fence, language, text
NEEDS = re.compile(r"^% needs: (.+)\n\Z", re.M)  # the packages of a block, on the line before it
OPERATORS = {"matmul": "@", "add": "+", "sub": "-", "mul": "*", "truediv": "/", "getitem": "table[index]"}


def run_examples(path: Path) -> None:
    """All ```python blocks with prompts, from top to bottom, in one namespace; the others are Python at least.

    A block that says what it needs, on the line before it, is for tests/test_coming_from.py.
    """
    torch.manual_seed(0)
    text, scope = path.read_text(), dict[str, Any]()
    for found in BLOCK.finditer(text):
        line, source = text[: found.start(4)].count("\n"), textwrap.dedent(found[4])
        if found[3] == "python" and ">>>" not in source:
            compile("\n" * line + source, path.name, "exec")
        elif found[3] == "python" and not NEEDS.search(text[: found.start()]):
            run_block(source, scope, path, line)


def run_block(source: str, scope: dict[str, Any], path: Path, line: int) -> None:
    """The examples of a block, whose names go into `scope`."""
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    example = doctest.DocTestParser().get_doctest(source, scope, f"{path.name}:{line}", path.name, line)
    report: list[str] = []
    runner.run(example, out=report.append, clear_globs=False)
    if report:
        pytest.fail("".join(report), pytrace=False)
    scope.update(example.globs)


def spellings(functions: list[Callable[..., Any]]) -> str:
    """How people write them; a method that repeats a function's name goes without saying."""
    names = [name_of(f) for f in functions]
    shown = sorted(n for n in names if not n.startswith("Tensor."))
    dunders = [n.removeprefix("Tensor.__").removesuffix("__") for n in names if n.startswith("Tensor.__")]
    return ", ".join(f"`{n}`" for n in [*shown, *(OPERATORS[n] for n in dunders if n in OPERATORS)])


def ops_table() -> str:
    """The registered rules as a markdown table, in the order of registration."""
    rules = {rule.name: rule for rule in RULES.values() if not isinstance(rule, Composite)}
    by_rule: dict[Rule | BatchFold, list[Callable[..., Any]]] = {rule: [] for rule in rules.values()}
    for function, entry in RULES.items():  # what is taken apart stands with the rule of its parts
        if entry.name in rules and not (getattr(function, "__module__", None) or "").startswith(psgrad.__name__):
            by_rule[rules[entry.name]].append(function)
    lines = ["| rule | written as | factors | in `psgrad.ops` |", "|---|---|---|---|"]
    for rule, functions in by_rule.items():
        factors = ", ".join(rule.factors) if isinstance(rule, Rule) else "none: it has no parameters"
        composable = "yes" if rule.name in psgrad.ops.__all__ else ""
        lines.append(f"| {rule.name} | {spellings(functions)} | {factors} | {composable} |")
    return "\n".join(lines)


def handling(entry: Any) -> dict[str, list[str]]:
    """How a module's parameters are handled, as `explain` reports it: the rules, and their factors."""
    if entry.loops:
        return {"a loop over samples": []}
    found: dict[str, list[str]] = {}
    _, fn, params, batch = entry.built(entry.modes[0])
    for row in psgrad.explain(fn, params, batch).rows:
        rule = "vmap" if row.how.startswith("vmap") else row.how.removeprefix("rule ")
        found.setdefault(rule, []).append(row.factor)
    return found


def cell(found: dict[str, list[str]]) -> str:
    """Rules that yield the same factors together: "conv1d, conv2d (Patches, Dense)"."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for rule, factors in found.items():
        alike.setdefault(tuple(dict.fromkeys(factors)), []).append(rule)
    return "; ".join(
        ", ".join(rules) + (f" ({', '.join(factors)})" if factors else "") for factors, rules in alike.items()
    )


def modules_table() -> str:
    """The modules of torch.nn that have parameters, those of 1, 2 and 3 axes on one line."""
    from tests.cases import default_dtype
    from tests.modules import MODULES, NOTES

    lines: dict[str, tuple[list[str], dict[str, list[str]]]] = {}
    asked = set()
    with default_dtype(torch.float64):
        for entry in MODULES:
            name, rules = entry.id.partition("-")[0], entry.expected()
            kind = (name, entry.loops, *sorted({rule for used in rules.values() for rule in used}))
            if name.startswith("Lazy") or kind in asked:  # an entry with other options and the same rules
                continue
            asked.add(kind)
            names, found = lines.setdefault(re.sub(r"[123]d$", "", name), ([], {}))
            names += [name] if name not in names else []
            for rule, factors in handling(entry).items():
                found.setdefault(rule, []).extend(factors)
    rows = ["| module | its parameters | notes |", "|---|---|---|"]
    for names, found in lines.values():
        rows.append(f"| {', '.join(f'`{n}`' for n in names)} | {cell(found)} | {NOTES.get(names[0], '')} |")
    return "\n".join(rows)


def with_table(text: str, name: str, table: Callable[[], str]) -> str:
    return re.sub(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", lambda _: table() + "\n", text, flags=re.S)


TABLES = {"ops": ops_table, "modules": modules_table}


@pytest.mark.parametrize("name", TABLES)
def test_table_is_true(name: str) -> None:
    from tests.modules import LACKING

    lines = SUPPORTED.read_text().splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith(tuple(f"| `{lacking}` |" for lacking in LACKING)))
    assert f"<!-- {name} -->" in text
    assert text == with_table(text, name, TABLES[name]), "run `python -m tests.test_readme`"


def test_examples_run() -> None:
    assert ">>>" in README.read_text()
    run_examples(README)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # where the package of tests is
    for _name, _table in TABLES.items():
        SUPPORTED.write_text(with_table(SUPPORTED.read_text(), _name, _table))
