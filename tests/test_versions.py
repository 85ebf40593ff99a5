"""Torch's private names: all of them listed, and an error on import that says which is gone."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils import checkpoint

import psgrad
from psgrad.processes.layers import Layers
from psgrad.torch_ import sharding
from psgrad.torch_ import versions as _versions

ROOT = Path(__file__).resolve().parent.parent
LISTED = {
    f"{home}.{name}"
    for home, names in [*_versions.PRIVATE.items(), *_versions.COMPILER.items()]
    for name in re.split(r"[ |]", names)
}


def _targets(tree: ast.AST) -> dict[str, str]:
    """What the names of a file stand for in torch: imports, and `_aten = torch.ops.aten`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or a.name.partition(".")[0]: a.name if a.asname else "torch" for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    found = {name: target for name, target in found.items() if name == "torch" or target.startswith("torch.")}
    for node in ast.walk(tree):
        target = _dotted(node.value, found) if isinstance(node, ast.Assign) else None
        if target is not None and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = target
    return found


def _dotted(node: ast.AST, targets: dict[str, str]) -> str | None:
    """`torch.ops.aten.add` of an expression that reads so, whatever the file calls its parts."""
    if isinstance(node, ast.Attribute):
        home = _dotted(node.value, targets)
        return None if home is None else f"{home}.{node.attr}"
    return targets.get(node.id) if isinstance(node, ast.Name) else None


def _private_names(source: str) -> Iterator[str]:
    """The dotted names of torch in a file that have a part with an underscore, without what is asked of them."""
    tree = ast.parse(source)
    targets = _targets(tree)
    for node in ast.walk(tree):
        dotted = _dotted(node, targets)
        if dotted is not None and re.search(r"\._(?!_)", dotted):
            yield dotted


def _is_listed(name: str) -> bool:
    """Itself, or a part of it, or on the way to it."""
    return any(f"{name}.".startswith(f"{listed}.") or listed.startswith(f"{name}.") for listed in LISTED)


@pytest.mark.parametrize("path", sorted((ROOT / "psgrad").rglob("*.py")), ids=lambda path: path.name)
def test_every_private_name_is_listed(path: Path) -> None:
    unlisted = {name for name in _private_names(path.read_text()) if not _is_listed(name)}
    assert not unlisted, "add them to psgrad/torch_/versions.py"


def test_names_are_found_whatever_a_file_calls_them() -> None:
    source = """
import torch, torch._dynamo
import torch._C as C
from torch import Tensor, _C, nn
from torch._C import _functorch as ft
aten = torch.ops.aten
aten._one(torch._two, C._three, ft.four, _C.five.six, torch._dynamo.seven)
aten.add(torch.add, Tensor.add, nn.Linear, torch.Tensor.__bool__)
"""
    named = "ops.aten._one _two _C._three _C._functorch.four _C.five.six _dynamo.seven"
    homes = "_C _C._functorch _C.five _dynamo"
    assert set(_private_names(source)) == {f"torch.{name}" for name in f"{named} {homes}".split()}


def test_names_that_are_gone() -> None:
    """Whether a function, one of two ways that torch does something, or a module."""
    keeper = "_NoopSaveInputs" if hasattr(checkpoint, "_NoopSaveInputs") else "_CheckpointFrame.save_inputs"
    script = f"""
import sys, torch
from torch.utils import checkpoint
del torch._C._functorch._add_batch_dim, torch._C._functorch.maybe_get_level, checkpoint.{keeper}
sys.modules["torch._functorch.predispatch"] = None
import psgrad
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 1
    assert run.stderr[run.stderr.rfind("ImportError:") :] == (
        "ImportError: psgrad needs torch._C._functorch._add_batch_dim, torch._C._functorch.maybe_get_level, "
        "torch._functorch.predispatch, torch.utils.checkpoint._CheckpointFrame.save_inputs or "
        f"torch.utils.checkpoint._NoopSaveInputs, which torch {torch.__version__} does not have\n"
        "  psgrad was tested with torch 2.10 to 2.15\n"
        "  install one of these, or a psgrad that was tested with the torch you have.\n"
    )


def test_names_of_fully_shard_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "is_sharded", lambda module: True)
    assert not sharding.missing()
    monkeypatch.setattr(sharding, "missing", lambda: ["FSDPState._lazy_init"])
    with pytest.raises(psgrad.ArgumentError) as caught:
        Layers(torch.nn.Linear(2, 2))
    assert str(caught.value) == (
        f"the model is sharded by fully_shard, whose FSDPState._lazy_init torch {torch.__version__} does not have\n"
        "  psgrad was tested with that of torch 2.10 to 2.15: install one of these, "
        "or give the model before fully_shard."
    )


def test_the_stated_range() -> None:
    """One range in the package, its metadata and the pages."""
    oldest, newest = _versions.TESTED
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={oldest}" in project["dependencies"]
    readme = (ROOT / "README.md").read_text()
    assert f"torch {oldest} or later" in readme
    assert f"torch {oldest}.0 and {newest}.0" in readme
    supported = (ROOT / "docs" / "supported.md").read_text()
    tested = re.findall(r"^\| (\d+\.\d+)\.\d+ \| 3\.\d+ \|", supported, re.M)
    assert {oldest, newest} <= set(tested)
