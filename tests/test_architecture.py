"""The plan of the house: layers, private names of torch in one package, a core that knows no rule."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import psgrad

from .test_versions import _private_names

ROOT = Path(__file__).resolve().parent.parent / "psgrad"
FILES = sorted(ROOT.rglob("*.py"))
LAYERS = (  # each imports only from those before it, and from itself where it is a package
    {"torch_"},
    {"errors", "annotations", "display"},
    {"factors"},
    {"registry"},
    {"rules", "engine"},
    {"composable", "processes"},
    {"streaming"},
    {"quantities"},
    {"compilation"},
    {
        "swap",
        "module",
        "parallel",
        "report",
        "plain_loop",
        "testing",
        "verification",
        "ops",
        "extend",
        "__main__",
        "__init__",
    },
)
LEVEL = {name: i for i, names in enumerate(LAYERS) for name in names}


def part(path: Path) -> str:
    """The package or the file right below psgrad/."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """What a file imports of psgrad, by its part, with the line; but for imports that are for type checkers alone."""
    tree = ast.parse(path.read_text())
    typing_only = {id(child) for node in ast.walk(tree) if _is_typing_only(node) for child in ast.walk(node)}
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in typing_only:
            base = package[: len(package) - node.level + 1]
            target = (*base, *(node.module.split(".") if node.module else ()))
            for alias in node.names:
                yield (target or (alias.name,))[0], node.lineno


def _is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_every_file_has_a_layer() -> None:
    assert {part(path) for path in FILES} == set(LEVEL)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_layers(path: Path) -> None:
    own = part(path)
    wrong = [
        f"line {line} imports {other}"
        for other, line in imports(path)
        if other != own and LEVEL[other] >= LEVEL[own] and own not in LAYERS[-1]
    ]
    assert not wrong


def test_the_core_imports_no_rule() -> None:
    core = {name for names in LAYERS[:-1] for name in names} - {"rules"}
    assert not [path for path in FILES if part(path) in core and "rules" in {name for name, _ in imports(path)}]


@pytest.mark.parametrize(
    "path", [path for path in FILES if part(path) != "torch_"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_private_names_of_torch_are_in_their_package(path: Path) -> None:
    source = path.read_text()
    assert not set(_private_names(source))
    attributes = r"\._(version|cdata|base|is_view|parameters|buffers|modules)\b"
    assert not re.findall(attributes, source)


def test_no_file_is_too_long() -> None:
    """Of code; the signatures and examples of public functions aside."""
    lengths = {path.name: len(path.read_text().splitlines()) for path in FILES}
    assert {name for name, length in lengths.items() if length > 450} <= {"verification.py", "factored.py", "budget.py"}


# ---- a walk through two calls --------------------------------------------------------------------------------


def walk(call: object) -> tuple[set[str], set[str]]:
    """The functions and the files of psgrad that a call passes, comprehensions and what dataclasses write aside."""
    functions, files = set(), set()

    def note(frame: object, event: str, _: object) -> None:
        code = frame.f_code  # type: ignore[attr-defined]
        if event == "call" and code.co_filename.startswith(str(ROOT)) and not code.co_name.startswith("<"):
            functions.add(f"{code.co_filename}:{code.co_qualname}")
            files.add(code.co_filename)

    call()  # type: ignore[operator]
    sys.setprofile(note)
    try:
        call()  # type: ignore[operator]
    finally:
        sys.setprofile(None)
    return functions, files


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.table(tokens)), self.table.weight)


def test_a_walk_through_gradients_of_a_small_net() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(144, 3))
    fn, params = psgrad.from_module(model, F.cross_entropy)
    batch = torch.randn(4, 1, 8, 8), torch.zeros(4, dtype=torch.long)
    functions, files = walk(lambda: psgrad.per_sample_grads(fn, params, batch))
    assert len(functions) <= WALK[0], sorted(functions)
    assert len(files) <= WALK[1], sorted(files)


def test_a_walk_through_a_clipped_sum_with_a_bound() -> None:
    fn, params = psgrad.from_module(Tied(), lambda out, y: F.cross_entropy(out.mT, y))
    batch = torch.randint(11, (6, 5)), torch.randint(11, (6, 5))
    functions, files = walk(lambda: psgrad.clipped_grad(fn, params, batch, 1.0, max_bytes="1MB"))
    assert len(functions) <= BOUNDED_WALK[0], sorted(functions)
    assert len(files) <= BOUNDED_WALK[1], sorted(files)


WALK = (107, 33)  # functions, files; where a compiler is loaded, some more than elsewhere
BOUNDED_WALK = (171, 42)
