"""The package around the code: its map, the demo, wheel and source distribution, how to add a rule."""

import ast
import email
import inspect
import os
import pydoc
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import psgrad
from psgrad import __main__ as demo
from psgrad.registry.rule import RULES

from . import test_readme
from .cases import op

ROOT = Path(__file__).resolve().parent.parent


def test_a_second_copy_in_one_process() -> None:
    """As where somebody forgets the modules and imports them again: both copies work, each with ops of its own."""
    code = """
import sys, torch, psgrad as first
from psgrad.torch_ import kernels
def forget():
    for name in [name for name in sys.modules if name.split(".")[0] == "psgrad"]:
        del sys.modules[name]
kernels.MKL_IS_BEHIND = hasattr(torch.ops.mkldnn, "_linear_pointwise")
forget()
import psgrad as second
from psgrad.torch_ import kernels
kernels.MKL_IS_BEHIND = hasattr(torch.ops.mkldnn, "_linear_pointwise")
assert first is not second
w, x = torch.randn(512, 384), torch.randn(64, 384)
def fn(w, x):
    return (x @ w.mT).tanh().sum()
right = first.per_sample_norms(fn, w, x)
for copy in (first, second, first):
    step = copy.compile(copy.per_sample_norms, fn, backend="replay")
    step(w, x)
    torch.testing.assert_close(step(w, x), right)
    assert step.cache_info().hits == 2, step.cache_info()
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# ---- the demo --------------------------------------------------------------------------------------------


def test_help_says_what_the_demo_does() -> None:
    done = subprocess.run([sys.executable, "-m", "psgrad", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("usage: python -m psgrad [-h]\n")
    for part in ("a plain loop over samples", "clipped per-sample gradients", "largest gradients", "on all cores"):
        assert part in done.stdout


def test_the_demo_shows_what_it_says(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    demo.run(epochs=2, budget=0.0)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 120
    assert text == "\n".join(line.rstrip() for line in text.split("\n"))
    assert text.startswith(f"psgrad {psgrad.__version__}, torch {torch.__version__}; one thread, as OMP_NUM_THREADS")
    parts = re.split(r"^\d  ", text, flags=re.M)
    assert len(parts) == 6
    _, exact, trained, surprises, times, onwards = parts
    assert all(float(off) < 1e-12 for off in re.findall(r"\d\.\de[+-]\d\d", exact))
    assert "10 of 10 uses of parameters by rules" in exact
    accuracies = [float(found) for found in re.findall(r"(\d+\.\d)%", trained)]
    assert len(accuracies) == 2
    assert accuracies[-1] > 80
    assert "One digit moves the sum by 1 at most" in trained
    assert len(re.findall(r"an? \d, seen as \d", surprises)) == 10
    norms = [float(found) for found in re.findall(r"  norm (\d+\.\d)", surprises)]
    assert len(norms) == 10
    assert norms == sorted(norms, reverse=True)
    usual = re.search(r"median gradient of 297 held-out digits has norm (\S+)\.", surprises)
    assert usual
    assert norms[-1] > 10 * float(usual[1])
    assert len(re.findall(r"\d ms *\d+\.\d x", times)) == 8
    for path in re.findall(r"(?:docs|notebooks)[\w/.]*", onwards):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize(("slow", "said"), [(1.4, False), (2.0, True)])
def test_the_demo_says_where_others_had_the_cores(
    slow: float, said: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "timed", lambda runs, budget: {name: [1.0, slow, slow] for name in runs})
    model, batch = demo.make_model(), (torch.zeros(2, 1, 8, 8), torch.zeros(2, dtype=torch.long))
    demo.compare_times(model, dict(model.named_parameters()), batch, 0.0)
    assert (f"half of its runs took {slow:.1f} times as long" in capsys.readouterr().out) == said


def test_the_demo_ends_quietly_when_nobody_reads_on() -> None:
    pytest.importorskip("sklearn")
    command = f"{shlex.quote(sys.executable)} -m psgrad | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stderr == ""
    assert done.stdout.startswith("psgrad ")
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize("argument", ["--epochs", "faster"])
def test_the_demo_refuses_what_it_does_not_know(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        demo.main([argument])
    assert error.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == f"usage: python -m psgrad [-h]\npython -m psgrad: error: unrecognized arguments: {argument}\n"


# ---- what help says ---------------------------------------------------------------------------------------


def test_help_is_a_map_of_all_public_names() -> None:
    assert psgrad.__doc__ is not None
    words = set(re.findall(r"\w+", psgrad.__doc__))
    assert set(psgrad.__all__) <= words
    assert all(hasattr(psgrad, name) for name in psgrad.__all__)
    text = pydoc.plain(pydoc.render_doc(psgrad))
    assert "A map of the library:" in text
    assert re.search(r"VERSION\s+" + re.escape(psgrad.__version__), text)


def test_every_public_function_and_class_has_help() -> None:
    for name in psgrad.__all__:
        assert inspect.getdoc(getattr(psgrad, name)), name


# ---- the version ------------------------------------------------------------------------------------------


def test_changelog_and_citation_have_the_version() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\]", changes, re.M)
    assert versions[:2] == ["Unreleased", psgrad.__version__]
    assert re.search(rf"^## \[{re.escape(psgrad.__version__)}\] - \d{{4}}-\d\d-\d\d$", changes, re.M)
    assert f"version: {psgrad.__version__}\n" in (ROOT / "CITATION.cff").read_text()


# ---- wheel and source distribution -------------------------------------------------------------------------


BUILD = "import sys; from hatchling import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"


def built(what: str, root: Path, target: Path) -> Path:
    """A wheel or a source distribution of what is at `root`, as installers have the backend build it."""
    command = [sys.executable, "-c", BUILD, f"build_{what}", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    return target / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pytest.importorskip("hatchling")
    target = tmp_path_factory.mktemp("dist")
    return built("wheel", ROOT, target), built("sdist", ROOT, target)


def test_the_wheel_holds_the_package_and_nothing_else(distributions: tuple[Path, Path]) -> None:
    wheel, _ = distributions
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"psgrad-{psgrad.__version__}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    sources = {str(path.relative_to(ROOT)) for kind in ("py", "cpp") for path in (ROOT / "psgrad").rglob(f"*.{kind}")}
    assert {name for name in names if not name.startswith(info)} == sources | {"psgrad/py.typed"}
    assert metadata["Version"] == psgrad.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert set(metadata.get_all("Provides-Extra") or ()) == {"demo", "progress", "notebooks", "docs", "dev", "bench"}
    assert f"{info}/licenses/LICENSE" in names


def test_the_source_distribution_gives_the_same_wheel(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    wheel, source = distributions
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    again = built("wheel", tmp_path / f"psgrad-{psgrad.__version__}", tmp_path)
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        assert one.namelist() == other.namelist()
        assert all(one.read(name) == other.read(name) for name in one.namelist())


STRANGER = """
import importlib.metadata
import pathlib
import sys
import torch
import psgrad

assert pathlib.Path(psgrad.__file__).is_relative_to(sys.prefix), psgrad.__file__
assert importlib.metadata.version("psgrad") == psgrad.__version__
model = torch.nn.Linear(4, 3)
fn, params = psgrad.from_module(model, torch.nn.functional.cross_entropy)
batch = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
step = psgrad.clipped_grad(fn, params, batch, 1.0)
print(psgrad.verify(fn, params, batch).how, step.count)
"""


def test_the_wheel_works_in_an_environment_of_its_own(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    """Which has the packages that psgrad asks for, and neither this directory nor the psgrad that is installed."""
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    (home,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (home / "others.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", *options, str(distributions[0])]
    others = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}  # make sets some
    subprocess.run(pip, check=True, capture_output=True, cwd=tmp_path, env=others)

    def ran(*arguments: str) -> str:
        done = subprocess.run([python, "-I", *arguments], capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert ran("-c", STRANGER) == "2 of 2 uses of parameters by rules 5\n"
    assert ran("-m", "psgrad", "--help").startswith("usage: python -m psgrad")


def test_every_extra_can_be_installed_as_pinned() -> None:
    """What an extra asks for is among the versions that the tests ran on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    asked = {"psgrad": project["dependencies"]} | project["optional-dependencies"]
    for extra, requirements in asked.items():
        for text in requirements:
            wanted = Requirement(text)
            if wanted.name == "psgrad":
                assert wanted.extras <= set(asked), extra
            else:
                version = pinned[canonicalize_name(wanted.name)]
                assert wanted.specifier.contains(version), (extra, text)


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
