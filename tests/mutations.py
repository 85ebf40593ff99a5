"""Do the tests notice? Breaks one place of the package at a time and runs tests on it; by hand, not part of the suite.

    python -m tests.mutations [--only rules/conv.py] [--every 3] [--seed 0] -- tests/test_contract.py -k conv

What follows `--` goes to pytest, which collects once. All tests run first, to see which places each of them comes by;
then each mutation meets those that come by its place, in a fork, the quickest of a file first, until one fails. A
mutation that no test notices is printed with its line: either a test is missing, or the place makes no difference to
the numbers (a faster way in place of a slower one, an error that torch would raise itself). "not met" are places that
no test comes by, and those outside of functions; tests in processes of their own see no mutation.
"""

import argparse
import ast
import builtins
import gc
import os
import pickle
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple, TypeVar

import pytest

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("rules/*.py", "factors/*.py")
PATIENCE = 30  # seconds, and twenty times what the test took before: a mutation that never ends is noticed, too

Answer = TypeVar("Answer")
Functions = dict[tuple[str, str, int], list[FunctionType]]  # by file, name and line


class Mutation(NamedTuple):
    """One expression or statement of a file, and what stands there instead."""

    file: str
    line: int
    start: int  # characters into the file
    end: int
    instead: str
    what: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}:{self.start}"


def mutations(file: Path) -> Iterator[Mutation]:
    """Dropped refusals, gradients that are not made, turned signs, turned conditions."""
    text = file.read_text()

    def mutation(node: ast.expr | ast.stmt, instead: str, what: str) -> Mutation:
        return Mutation(str(file.relative_to(ROOT)), node.lineno, *_span(text, node), instead, what)

    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Return(value=ast.Call(func=ast.Name(id="Decline"))):
                yield mutation(node, "pass", "a refusal dropped")
            case ast.Attribute(value=ast.Name(id="needs"), attr="x"):
                yield mutation(node, "False", "the input's gradient not made")
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id="needs"), attr="params")):
                yield mutation(node, "False", "a parameter's gradient not made")
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as sign, right=right) if not _is_text(node):
                turned = "-" if isinstance(sign, ast.Add) else "+"
                yield mutation(
                    node, f"(({_source(text, left)}) {turned} ({_source(text, right)}))", f"{turned} instead"
                )
            case ast.If(test=test) if not _is_for_types(test):
                yield mutation(test, f"not ({_source(text, test)})", "a condition turned")


def _span(text: str, node: ast.expr | ast.stmt) -> tuple[int, int]:
    """Where a node is among the characters of the text."""
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    return lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset


def _source(text: str, node: ast.expr) -> str:
    found = ast.get_source_segment(text, node)
    assert found is not None
    return found


def _is_text(node: ast.AST) -> bool:
    return any(isinstance(getattr(part, "value", None), str) for part in ast.walk(node))


def _is_for_types(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


# ---- code in place of other code, in functions that are there ----------------------------------------------


def functions_of_the_package() -> Functions:
    """What is not in here, such as what runs on import, cannot be changed any more."""
    found: Functions = defaultdict(list)
    gc.unfreeze()  # conftest freezes what it finds
    for f in gc.get_objects():
        if type(f) is FunctionType and f.__code__.co_filename.startswith(str(ROOT / "psgrad")):
            found[f.__code__.co_filename, f.__code__.co_qualname, f.__code__.co_firstlineno].append(f)
    return found


def mutated(mutation: Mutation) -> str:
    """The file's text; every other line stays where it is, by which functions are found again."""
    text = (ROOT / mutation.file).read_text()
    lines = text.count("\n", mutation.start, mutation.end) - mutation.instead.count("\n")
    instead = mutation.instead + "\n" * lines
    if lines and mutation.instead != "pass":  # which is a statement
        instead = f"({instead})"
    return text[: mutation.start] + instead + text[mutation.end :]


def change(file: Path, code: CodeType, functions: Functions) -> int:
    """Give each function of a file its part of `code`, the file's; how many are other than before."""
    before, after = (_parts(c) for c in (compile(file.read_text(), str(file), "exec"), code))
    changed = 0
    for (name, line, number), part in before.items():
        other = after.get((name, line, number), part)
        for function in functions.get((str(file), name, line), ()) if other != part else ():
            if function.__code__ == part:  # not another lambda of that line
                function.__code__ = other
                changed += 1
    return changed


def _parts(code: CodeType) -> dict[tuple[str, int, int], CodeType]:
    """All code inside of `code`, by name, line, and number among those of one name and line."""
    seen: Counter[tuple[str, int]] = Counter()
    found, todo = {}, [code]
    while todo:
        part = todo.pop(0)
        key = part.co_qualname, part.co_firstlineno
        found[(*key, seen[key])] = part
        seen[key] += 1
        todo += [c for c in part.co_consts if isinstance(c, CodeType)]
    return found


class Spies(ast.NodeTransformer):
    """Tells `builtins.met` of each place of a file before it is evaluated."""

    def __init__(self, file: Path) -> None:
        self.text = file.read_text()
        self.places: dict[tuple[int, int], set[str]] = defaultdict(set)
        for m in mutations(file):
            self.places[m.start, m.end].add(m.place)

    def visit(self, node: ast.AST) -> Any:
        places = self.places.get(_span(self.text, node)) if isinstance(node, ast.expr | ast.Return) else None
        self.generic_visit(node)
        if places is None:
            return node
        own = node.value if isinstance(node, ast.Return) else node
        assert isinstance(own, ast.expr)
        spied = ast.parse(f"met({sorted(places)!r}) or 0", mode="eval").body  # `met` returns None
        assert isinstance(spied, ast.BoolOp)
        spied.values[1] = own
        for part in (spied, *ast.walk(spied.values[0])):
            ast.copy_location(part, own)
        if not isinstance(node, ast.Return):
            return spied
        node.value = spied
        return node

    def code(self, file: Path) -> CodeType:
        return compile(ast.fix_missing_locations(self.visit(ast.parse(self.text))), str(file), "exec")


# ---- tests in forks ------------------------------------------------------------------------------------------


class Met(NamedTuple):
    """What the tests do where nothing is broken."""

    places: dict[str, set[str]]  # the tests that come by each
    seconds: dict[str, float]
    failing: set[str]  # without any mutation: these tell nothing


class Mutants:
    """A pytest plugin, which runs tests once for each mutation."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.has_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.has_failed |= report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        functions = functions_of_the_package()
        files = sorted({f for pattern in self.options.only or PLACES for f in (ROOT / "psgrad").glob(pattern)})
        found = [m for file in files for m in mutations(file)]
        chosen = sorted(random.Random(self.options.seed).sample(found, len(found) // self.options.every))
        if self.options.lines:
            chosen = [m for m in found if m.place in self.options.lines]
        met = in_a_fork(lambda: self.meet(session.items, files, functions))
        assert met is not None, "the tests do not run to their end as they are"
        print(f"\n{len(met.seconds)} tests in {sum(met.seconds.values()):.0f} s, of which fail: {sorted(met.failing)}")
        words: Counter[str] = Counter()
        for mutation in chosen:
            names = met.places[mutation.place] - met.failing
            tests = [item for item in session.items if item.nodeid in names]
            tests.sort(key=lambda item: (Path(item.path).name, met.seconds[item.nodeid]))  # fixtures of a file, once
            word = in_a_fork(lambda m=mutation, t=tests: self.meets(m, t, functions, met.seconds)) or "noticed"
            words[word] += 1
            print(f"{word:12} {mutation.place} {mutation.what}", flush=True)
        print(", ".join(f"{n} {word}" for word, n in words.items()))
        return True

    def meet(self, items: list[pytest.Item], files: list[Path], functions: Functions) -> Met:
        """Runs all tests with spies in the package."""
        seen: set[str] = set()
        vars(builtins)["met"] = seen.update
        for file in files:
            change(file, Spies(file).code(file), functions)
        met = Met(defaultdict(set), {}, set())
        for item, following in zip(items, [*items[1:], None], strict=True):
            seen.clear()
            begun = time.monotonic()
            if self.fails(item, following):
                met.failing.add(item.nodeid)
            met.seconds[item.nodeid] = time.monotonic() - begun
            for place in seen:
                met.places[place].add(item.nodeid)
        return met

    def meets(self, mutation: Mutation, tests: list[pytest.Item], functions: Functions, usual: dict[str, float]) -> str:
        """Whether one of the tests fails; where the process dies of it or of the alarm, nobody hears of it here."""
        file = ROOT / mutation.file
        if not tests or not change(file, compile(mutated(mutation), str(file), "exec"), functions):
            return "not met"
        begun = time.monotonic()
        for item, following in zip(tests, [*tests[1:], None], strict=True):
            signal.alarm(int(PATIENCE + 20 * usual[item.nodeid]))
            if self.fails(item, following):
                return "noticed"
            if time.monotonic() - begun > self.options.seconds:
                return "NOT IN TIME"
        return "NOT NOTICED"

    def fails(self, item: pytest.Item, following: pytest.Item | None) -> bool:
        self.has_failed = False
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        return self.has_failed


def in_a_fork(work: Callable[[], Answer]) -> Answer | None:
    """What `work` returns in a copy of this process, which prints nothing; None where that dies."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.dup2(nowhere, 2)
            with os.fdopen(writer, "wb") as file:
                pickle.dump(work(), file)
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    found: Answer | None = pickle.loads(data) if data else None
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="files below psgrad/, as patterns")
    parser.add_argument("--every", type=int, default=1, help="one in so many, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", nargs="*", help="file:line:start of the mutations to try, as they were printed")
    parser.add_argument("--seconds", type=float, default=60, help="after which no further test is tried")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options = parser.parse_args(sys.argv[1:split])
    tests = sys.argv[split + 1 :] or ["tests/test_contract.py"]
    pytest.main(["-q", "-s", "-p", "no:cacheprovider", *tests], plugins=[Mutants(options)])


if __name__ == "__main__":
    main()
