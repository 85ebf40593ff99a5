"""A type checker knows what a call returns, and it returns that."""

import subprocess
import sys
from pathlib import Path

import pytest

import psgrad

from . import typed_usage

ROOT = Path(__file__).resolve().parent.parent


def test_a_type_checker_knows_what_calls_return() -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", str(typed_usage.__file__)]  # strict, as pyproject.toml says
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("usage", [typed_usage.of_a_module, typed_usage.of_a_tree, typed_usage.of_factored_grads])
def test_calls_return_what_they_say(usage: object) -> None:
    assert callable(usage)
    usage()


def test_results_are_tuples_with_names() -> None:
    """Generic as they are: they can be taken apart, and written down in annotations."""
    assert psgrad.ClippedGrad._fields == ("grad", "norms", "values")
    assert psgrad.GradStats[dict].__origin__ is psgrad.GradStats  # type: ignore[type-arg,attr-defined]
    assert psgrad.FactoredGrads[dict].__origin__ is psgrad.FactoredGrads  # type: ignore[type-arg,attr-defined]
