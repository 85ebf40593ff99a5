"""Type checkers know what a call returns, and it returns that."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import psgrad

from . import typed_usage

ROOT = Path(__file__).resolve().parent.parent
USES: list[Any] = [use for name, use in vars(typed_usage).items() if name.split("_")[0] in ("of", "a", "what")]


def test_mypy_has_nothing_to_say() -> None:
    """Of the package, and of what calls return: strict, as pyproject.toml says. Here it runs beside other tests."""
    pytest.importorskip("mypy")
    done = subprocess.run([sys.executable, "-m", "mypy"], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pyright_knows_what_calls_return(tmp_path: Path) -> None:
    """In a directory of a stranger's own, strict."""
    pytest.importorskip("pyright")
    shutil.copy(str(typed_usage.__file__), tmp_path)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"include": ["."], "typeCheckingMode": "strict"}))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    found = json.loads(done.stdout)
    assert not found["generalDiagnostics"], done.stdout
    assert found["summary"]["filesAnalyzed"] == 1


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_calls_return_what_they_say(use: Any) -> None:
    use()


def test_every_use_is_run() -> None:
    assert len(USES) == 6


def test_results_are_tuples_with_names() -> None:
    """Generic as they are: they can be taken apart, and written down in annotations."""
    assert psgrad.ClippedGrad._fields == ("grad", "norms", "values", "count", "sensitivity")
    for result in (psgrad.ClippedGrad, psgrad.GradStats, psgrad.FactoredGrads):
        assert result[dict].__origin__ is result  # type: ignore[type-arg,attr-defined,index]
