"""The benchmark command: its table, its JSON, its comparison, its bars; not its times."""

import json
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import bars, bounded, compare, convolutions, fit_convolutions, large, layers, measured, memory, timing
from benchmarks.measured import Measured, Record
from benchmarks.peers import PEERS
from benchmarks.peers.peer import Peer, Ready
from benchmarks.quantities import NAMES, Truth
from benchmarks.workloads import LARGE, WORKLOADS, Point, Task
from psgrad.factors.conv_costs import COSTS

TINY = ["--only", "mlp-tiny", "--rounds", "1"]
OTHERS = ("opacus", "backpack", "jax")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests share their cores."""
    monkeypatch.setattr(command, "setup", lambda threads: {})


class Absent:
    """A finder of modules before all others, for which some packages are not there."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name.partition(".")[0] in OTHERS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def nobody_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in OTHERS]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])


def contender(monkeypatch: pytest.MonkeyPatch, quantity: str, make: Callable[[Task], Ready]) -> None:
    """Puts another contender in psgrad's place."""
    ours = PEERS["psgrad"]
    monkeypatch.setitem(PEERS, "psgrad", Peer("psgrad", {**ours.offers, quantity: make}))


def delayed(task: Task) -> Ready:
    norms = PEERS["vmap(grad)"].offers["norms"](task).call

    def call() -> Any:
        time.sleep(0.05)
        return norms()

    return Ready(call)


@pytest.mark.usefixtures("nobody_installed")
def test_every_quantity_has_a_table_and_absent_peers_say_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.json"
    code = command.main([*TINY, "--json", str(file)])
    printed = capsys.readouterr().out
    for quantity in NAMES:
        columns = [name for name, peer in PEERS.items() if quantity in peer.offers]
        heading = " +".join(["workload +N", "batch ms", *map(re.escape, columns[1:]), "others' CPU", "bar"])
        row = re.search(rf"^{quantity}: .*\n\n{heading}\n(mlp-tiny .*)\n", printed, re.M)[1]
        assert row.count("not installed") == sum(PEERS[name].package != "" for name in columns)
        assert "failed" not in row
    content = json.loads(file.read_text())
    assert code == int(any(not bar["met"] for bar in content["bars"]))
    assert {bar["quantity"] for bar in content["bars"]} == {"grads", "norms", "clipped"}
    for record in measured.read(file):
        absent = PEERS[record.contender].package != ""
        assert (record.measured.error == measured.NOT_INSTALLED) == absent
        assert (record.ratio is None) == absent


def test_a_slow_contender_misses_its_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    contender(monkeypatch, "norms", delayed)
    assert command.main([*TINY, "--quantity", "norms", "--peers", "psgrad"]) == 1
    assert "\n0 of 1 bars met\ntime of norms, mlp-tiny: psgrad " in capsys.readouterr().out


def test_a_fast_contender_meets_its_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def instant(task: Task) -> Ready:
        norms = Truth(task).looped[0]
        return Ready(lambda: norms)

    contender(monkeypatch, "norms", instant)
    assert command.main([*TINY, "--quantity", "norms", "--peers", "psgrad"]) == 0
    assert "\n1 of 1 bars met\n" in capsys.readouterr().out


def test_a_wrong_answer_is_a_failure_and_misses_the_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    contender(monkeypatch, "norms", lambda task: Ready(lambda: torch.ones(len(task.inputs))))
    assert command.main([*TINY, "--quantity", "norms", "--peers", "psgrad"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^\[1\] psgrad: AssertionError: wrong norms: off by ", printed, re.M)
    assert "bar 2.50: MISSED, nothing to compare" in printed


@pytest.mark.parametrize("quantity", NAMES)
def test_wrong_answers_are_found(quantity: str) -> None:
    truth = Truth(Point("mlp-tiny", n=5).make())
    right = PEERS["vmap(grad)"].offers[quantity](truth.task).call()
    truth.check(quantity, right)
    wrong = {**right, "0.bias": right["0.bias"].roll(1, 0)} if isinstance(right, dict) else right.roll(1, 0)
    with pytest.raises(AssertionError, match="wrong"):
        truth.check(quantity, wrong)


def record(contender: str, ratio: float | None, error: str = "") -> Record:
    best = None if ratio is None else ratio * 0.5
    return Record("time", "norms", "mlp", 256, contender, Measured(best, 1.0, 3, error), ratio)


def test_a_comparison_says_what_changed(tmp_path: Path) -> None:
    old = [record("psgrad", 1.0), record("loop", 5.0), record("vmap(grad)", 2.0), record("Opacus", 2.0)]
    old += [record("JAX", 1.0), record("BackPACK", None, "refused")]
    new = [record("psgrad", 1.3), record("loop", 4.0), record("vmap(grad)", 2.1), record("Opacus", None, "broke")]
    new += [record("JAX", None, measured.NOT_INSTALLED), record("BackPACK", 1.0)]
    file = tmp_path / "old.json"
    measured.write(file, {"torch": "2"}, old, [])
    assert measured.read(file) == old
    assert compare.compare(new, measured.read(file)) == [
        "FAILS   time, norms, mlp, Opacus: broke",
        "WORSE   time, norms, mlp, psgrad: 1.00 -> 1.30 (+30%)",
        "better  time, norms, mlp, loop: 5.00 -> 4.00 (-20%)",
        "4 figures in both runs, 1 the same within 10%",
    ]


def test_the_command_compares_with_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, chosen = tmp_path / "old.json", [*TINY, "--quantity", "norms", "--peers", "psgrad"]
    command.main([*chosen, "--json", str(file)])
    faster = [
        replace(r, ratio=r.ratio / 1000) if r.ratio and r.contender == "psgrad" else r for r in measured.read(file)
    ]
    measured.write(file, {}, faster, [])
    command.main([*chosen, "--against", str(file)])
    printed = capsys.readouterr().out
    assert "WORSE   time, norms, mlp-tiny, psgrad: " in printed
    assert "2 figures in both runs, 1 the same within 10%" in printed


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_is_measured_in_a_fresh_process() -> None:
    found = memory.peak(Point("mlp-tiny", n=4096), "grads", "psgrad")
    size = 4096 * 4 * sum(p.numel() for p in Point("mlp-tiny").make().params.values())
    assert found.best is not None
    assert size < found.best < 4 * size


def test_memory_of_gradients_is_judged_beyond_them() -> None:
    found = {"batch": Measured(100.0), "psgrad": Measured(1105.0)}
    verdict = bars.judge("memory", "grads", "resnet", found, 1000)
    assert str(verdict) == "psgrad 1.05 of batch beyond its result, bar 1.10: met"
    assert not bars.judge("memory", "grads", "resnet", found, 900).met


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_bounds_are_measured_beside_fixed_chunk_sizes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "bounds.json"
    code = bounded.main(["--only", "conv3d", "--quantity", "norms", "--rounds", "1", "--json", str(file)])
    rows = [bounded.Bounded(**row) for row in json.loads(file.read_text())]
    sizes = [row.chunk for row in rows]  # which ones depends on what the allocator does
    assert sizes == sorted(sizes, reverse=True)
    assert 8 > sizes[0] > sizes[-1] >= 1
    assert code == int(not all(row.held for row in rows))
    assert capsys.readouterr().out.count("| conv3d | norms |") == 3


def test_models_of_every_size_are_checked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LARGE, "resnet50", (2, WORKLOADS["mlp-tiny"][1]))
    monkeypatch.setattr(large, "setup", dict)
    assert large.main(["--only", "resnet50", "--kind", "time", "--rounds", "1"]) == 0
    assert re.findall(r"resnet50 \| 2 \| 0.0 M \| (\w+), time", capsys.readouterr().out) == ["norms", "clipped"]


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--only", "mlp,nosuch"])
    assert f"nosuch: not among {', '.join(WORKLOADS)}" in capsys.readouterr().err


def test_pictures_are_drawn(tmp_path: Path) -> None:
    plot = pytest.importorskip("benchmarks.plot", reason="matplotlib is not installed")
    grown = [
        Record("memory", "clipped", f"mlp N={n}", n, name, Measured(1e6 * n), 1.0)
        for n in (1, 8)
        for name in ("batch", "psgrad")
    ]
    old = [record("psgrad", 1.0), record("JAX", None, "broke")]
    assert plot.draw([*old, *grown], tmp_path) == [tmp_path / "times.png", tmp_path / "memory.png"]
    assert plot.draw([], tmp_path) == []


def test_slow_contenders_get_fewer_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "settle", lambda: None)
    monkeypatch.setattr(timing, "turn", lambda call: [call()])
    found = timing.interleaved({"slow": lambda: 10.0, "quick": lambda: 0.001}, 8, patience=3.0)
    assert {name: len(turns) for name, turns in found.items()} == {"slow": timing.ENOUGH, "quick": 8}
    assert timing.fastest({"slow": lambda: 10.0, "quick": lambda: 0.001}, 1) == {"slow": 10.0, "quick": 0.001}


# ---- convolutions -----------------------------------------------------------------------------------------

SMALL = "cifar 32-64 1x1 /2"


def test_convolutions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row with the time of every strategy, and an exit code that says what the row says."""
    monkeypatch.setattr(convolutions, "setup", dict)
    monkeypatch.setattr(timing, "turn", lambda call: [call() is None or 0.001])
    file = tmp_path / "times.json"
    code = convolutions.main(["--only", SMALL, "--rounds", "1", "--sets", "2", "--json", str(file)])
    assert code == 0
    (row,) = json.loads(file.read_text())["rows"]
    assert set(row["seconds"]) == {"ordinary", "fill", "ours", "fresh", "patches", "grouped", "loop", "vmap"}
    printed = capsys.readouterr().out
    assert f"| {SMALL} | 1.00 | 1.00 | 0.50 |" in printed
    assert "1 of 1 shapes keep the bars" in printed


def test_bars_of_convolutions() -> None:
    seconds = {"ordinary": 1.0, "fill": 0.5, "ours": 1.9, "patches": 1.8, "grouped": 1.7, "vmap": 2.0}
    row = convolutions.Row("some", seconds, "patches", ["patches", "grouped"])
    assert row.missed == []
    assert row.best == "grouped"
    slow = row._replace(seconds=seconds | {"ours": 2.4})
    assert slow.missed == ["1.60 > 1.3", "1.20 of vmap(grad)"]


def test_every_way_of_a_convolution_gives_the_same() -> None:
    problem = convolutions.Problem(convolutions.shape(3, 4, 6, 7, 3, 2), 1)
    ways = {name: call() for name, call in problem.contenders().items() if name not in ("ordinary", "fill")}
    for name, grads in ways.items():
        torch.testing.assert_close(grads.view(3, 6, 4, 3, 3), ways["loop"].clone(), msg=name, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(problem.ordinary(), ways["vmap"].view(3, 6, 4, 3, 3).sum(0), rtol=1e-4, atol=1e-4)


def test_fit_of_convolutions_finds_prices() -> None:
    """Times that are made of prices give back choices as good as any."""
    rng = random.Random(0)
    samples = []
    for _ in range(40):
        drawn = fit_convolutions.draw(rng)
        for turns in (False, True):
            given: fit_convolutions.Sample = {"shape": drawn, "turns": turns}
            ways = fit_convolutions.counted(given).items()
            given["seconds"] = {way: sum(COSTS[k] * v for k, v in done.items()) * 1e-9 for way, done in ways}
            samples.append(given)
    assert max(fit_convolutions.judge(samples, fit_convolutions.fit(samples))) < 1.05


def test_ops_are_held_against_their_ordinary_backward(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    code = layers.main(["--only", "rms_norm,add", "--rounds", "1", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert {row["family"] for row in rows} == {"rms_norm", "add"}
    assert code == int(any(row["ratio"] > layers.BAR for row in rows))
    printed = capsys.readouterr().out
    assert printed.count("| met |") + printed.count("| MISSED |") == len(rows)


def test_a_rule_that_is_wrong_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(iter(layers.FAMILIES["rms_norm"]()))
    ruled = layers.ruled

    def spoilt(case: Any, buffers: Any) -> Any:
        sides = ruled(case, buffers)

        def backward(y: torch.Tensor, g: torch.Tensor) -> Any:
            found = sides.backward(y, g)
            buffers[0].add_(1)
            return found

        return sides._replace(backward=backward)

    monkeypatch.setattr(layers, "ruled", spoilt)
    with pytest.raises(AssertionError):
        layers.measure(case, 1)
