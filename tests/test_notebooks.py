"""Every notebook runs from top to bottom, and is committed with its outputs.

`python tests/test_notebooks.py` executes them and writes the outputs. In the test some loops are shorter; every cell
and every assertion is there. `HYPOTHESIS_PROFILE=thorough` runs them in full.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
# Most of the time goes to torch's own training, with many settings and seeds: texts of a notebook, and what is put in
# their place, so that there are fewer.
SHORTER = {
    "03_training_loop": {"for s in range(4)) / 4": "for s in range(1))"},
    "04_private_training": {
        "seeds = (0, 1, 2)": "seeds = (0,)",
        "base, steps = GPT(), 400": "base, steps = GPT(), 200",
        "expected, steps, noise, delta = 192, 40,": "expected, steps, noise, delta = 192, 20,",
    },
    "05_which_samples_matter": {"seeds = (0, 1, 2)": "seeds = (0,)"},
    "06_natural_gradient": {
        "(0.01, 0.03, 0.06, 0.1)": "(0.06,)",
        "(0.01, 0.03, 0.1, 0.3)": "(0.03,)",
        "(0.003, 0.01, 0.03, 0.1)": "(0.03,)",
        "(0.001, 0.003, 0.01, 0.03)": "(0.01,)",
        "(0.001, 0.01, 0.1, 1.0)": "(0.01,)",
    },
}


class ThisInterpreter(AsyncKernelManager):
    """Kernels by sys.executable, whatever kernels are installed elsewhere."""

    def _kernel_spec_manager_default(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])


def execute(path: Path, shorter: bool = False) -> Any:
    """The notebook at `path`, run afresh by this interpreter, perhaps with `shorter` loops; the file is only read."""
    notebook = nbformat.read(path, as_version=4)
    for text, other in SHORTER.get(path.stem, {}).items() if shorter else ():
        cells = [cell for cell in notebook.cells if cell.cell_type == "code" and text in cell.source]
        assert cells, f"{path.stem} has no {text}"
        for cell in cells:
            cell.source = cell.source.replace(text, other)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        kernel_manager_class=ThisInterpreter,
        timeout=300,
        resources={"metadata": {"path": str(path.parent)}},  # as Jupyter does, so that `import plots` finds plots.py
        record_timing=False,
        coalesce_streams=True,
    )
    return client.execute(env=os.environ | {"OMP_NUM_THREADS": "1"})


def outputs(notebook: Any) -> list[Any]:
    return [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


# Bars of progress=True; and what torch's builds for GPUs say on a machine that has nvcc and no GPU.
_ALLOWED = re.compile(r"^psgrad\.\w+: +\d|No CUDA runtime is found")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path) -> None:
    ran = outputs(execute(path, shorter=not THOROUGH))
    printed = [out.text for out in ran if out.output_type == "stream" and out.name == "stderr"]
    lines = [line for text in printed for line in re.split(r"[\r\n]+", text) if line.strip()]
    assert [line for line in lines if not _ALLOWED.search(line)] == []


def test_a_long_cell_shows_its_progress() -> None:
    shown = [out for path in NOTEBOOKS for out in outputs(nbformat.read(path, as_version=4)) if "text" in out]
    assert any(re.search(r"psgrad\.gram: 100%", out.text) for out in shown if out.name == "stderr")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run it from top to bottom in a fresh kernel"
    kinds = {out.output_type for out in outputs(notebook)}
    assert kinds
    assert "error" not in kinds
    assert str(ROOT) not in path.read_text()


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else NOTEBOOKS:
        notebook = execute(path)
        notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
        nbformat.write(notebook, path)
        print(f"executed {path.name}")
