"""Do the tests notice? Breaks one place of the package at a time and runs tests on it; by hand, not part of the suite.

    python -m tests.mutations [--only rules/conv.py] [--every 3] [--seed 0] -- tests/test_contract.py -k conv

What follows `--` goes to pytest. A mutation that no test notices is printed with its line: either a test is missing, or
the place makes no difference to the numbers (a faster way in place of a slower one, an error that torch would raise
itself).
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("rules/*.py", "factors/*.py")
LONG = 1200  # seconds for one run; a mutation that never ends is noticed, too


class Mutation(NamedTuple):
    """One expression or statement of a file, and what stands there instead."""

    file: str
    line: int
    start: int  # characters into the file
    end: int
    instead: str
    what: str


def mutations(file: Path) -> Iterator[Mutation]:
    """Dropped refusals, gradients that are not made, turned signs, turned conditions."""
    text = file.read_text()
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def mutation(node: ast.expr | ast.stmt, instead: str, what: str) -> Mutation:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start, end = lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset
        return Mutation(str(file.relative_to(ROOT)), node.lineno, start, end, instead, what)

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
                yield mutation(node, f"({_source(text, left)} {turned} {_source(text, right)})", f"{turned} instead")
            case ast.If(test=test) if not _is_for_types(test):
                yield mutation(test, f"not ({_source(text, test)})", "a condition turned")


def _source(text: str, node: ast.expr) -> str:
    found = ast.get_source_segment(text, node)
    assert found is not None
    return found


def _is_text(node: ast.AST) -> bool:
    return any(isinstance(getattr(part, "value", None), str) for part in ast.walk(node))


def _is_for_types(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def is_noticed(mutation: Mutation, home: Path, pytest: list[str]) -> bool:
    """Whether a test fails in a copy of the project that has the mutation."""
    target = home / mutation.file
    text = target.read_text()
    target.write_text(text[: mutation.start] + mutation.instead + text[mutation.end :])
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *pytest]
        environment = {**os.environ, "PYTHONPATH": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
        run = subprocess.run(command, cwd=home, env=environment, capture_output=True, timeout=LONG)
        if run.returncode not in (0, 1, 2):  # 2: not even collected
            sys.exit(f"pytest ended with {run.returncode}\n{run.stdout.decode()[-2000:]}")
        return run.returncode != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        target.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="files below psgrad/, as patterns")
    parser.add_argument("--every", type=int, default=1, help="one in so many, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", nargs="*", help="file:line of the mutations to try, as they were printed")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    options = parser.parse_args(own)
    pytest = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else ["tests/test_contract.py"]
    files = sorted({f for pattern in options.only or PLACES for f in (ROOT / "psgrad").glob(pattern)})
    found = [m for file in files for m in mutations(file)]
    chosen = sorted(random.Random(options.seed).sample(found, len(found) // options.every))
    if options.lines:
        chosen = [m for m in found if f"{m.file}:{m.line}:{m.start}" in options.lines]
    survivors = []
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / "psgrad"
        shutil.copytree(ROOT, home, ignore=shutil.ignore_patterns(".*", "build", "dist", "__pycache__"))
        begun = time.monotonic()
        for i, mutation in enumerate(chosen, 1):
            noticed = is_noticed(mutation, home, pytest)
            if not noticed:
                survivors.append(mutation)
            word = "noticed" if noticed else "NOT NOTICED"
            print(f"{word:12} {mutation.file}:{mutation.line}:{mutation.start} {mutation.what}", flush=True)
            if i % 10 == 0:
                print(f"# {i} of {len(chosen)}, {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} noticed")


if __name__ == "__main__":
    main()
