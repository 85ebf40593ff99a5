"""The benchmark command: its tables, its JSON, its comparison, its bars; not its times."""

import json
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import psgrad
from benchmarks import __main__ as command
from benchmarks import convolutions, layers, measuring, results, workloads
from benchmarks.internals import conv_plan
from benchmarks.measuring import Measured
from benchmarks.models import LARGE, WORKLOADS, Point
from benchmarks.peers import PEERS, Ready
from benchmarks.results import Bar, Record, Run
from benchmarks.tasks import QUANTITIES, Task

TINY = ["--only", "mlp-tiny", "--rounds", "1"]
NORMS = [*TINY, "--quantity", "norms", "--peers", "psgrad"]
OTHERS = ("opacus", "backpack", "jax", "jax_privacy")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests share their cores."""
    monkeypatch.setattr(command, "setup", lambda threads: {})


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes a millisecond by the clock, and runs once."""
    monkeypatch.setattr(measuring, "settle", lambda: None)
    monkeypatch.setattr(measuring, "turn", lambda call: [call() is None or 0.001])


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
    monkeypatch.delitem(sys.modules, "benchmarks.jax_peer", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Absent, *sys.meta_path])


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What contenders compile is recorded and checked as ever, and runs op by op."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(psgrad, "compile", partial(psgrad.compile, backend="replay"))


def contender(monkeypatch: pytest.MonkeyPatch, make: Callable[[Task], Ready]) -> None:
    """Puts another contender in psgrad's place."""
    monkeypatch.setitem(PEERS, "psgrad", PEERS["psgrad"]._replace(make=lambda _, task: make(task)))


def kept(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text())
    return content


# ---- the command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", command.COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command.main([name, "--help"])
    printed = capsys.readouterr().out
    assert command.COMMANDS[name].help in printed
    assert all(option in printed for option in ("--json", "--against", "--every", "--plots"))


def test_workloads_run_if_no_command_is_given() -> None:
    args = command.arguments(["--quick", "--threads", "1"])
    assert (args.command, args.only, args.rounds) == ("workloads", ["mlp-tiny", "conv1d", "gpt"], 1)
    assert command.arguments([]).only == list(WORKLOADS)
    assert command.arguments(["--quick", "--only", "mlp", "--rounds", "7"]).rounds == 7


def test_names_are_chosen_whole_or_by_their_first_word() -> None:
    chosen = command.arguments(["convolutions", "--only", "vit,text"]).only
    assert chosen == ["vit 8*3-192 224x224 k16 /16 p0", "text 32*70-256 200 k7 p0"]
    assert command.arguments(["convolutions", "--only", chosen[0]]).only == chosen[:1]
    assert command.arguments(["--peers", "psgrad"]).peers == ["psgrad"]  # and not "psgrad out="
    assert "mlp-tiny" not in command.arguments(["bounded"]).only


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--only", "mlp,nosuch"])
    assert f"nosuch: not among {', '.join(WORKLOADS)}" in capsys.readouterr().err


def test_private_names_of_psgrad_are_imported_in_one_file() -> None:
    private = re.compile(r"(?:from|import) psgrad\.(?:factors|engine|registry|streaming|quantities|torch_|rules)\b")
    files = Path(command.__file__).parent.glob("*.py")
    assert {file.name for file in files if private.search(file.read_text())} == {"internals.py"}


# ---- workloads, memory, sweep, large ----------------------------------------------------------------------


@pytest.mark.usefixtures("nobody_installed", "no_kernels")
def test_every_quantity_has_a_table_and_absent_peers_say_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.json"
    code = command.main([*TINY, "--json", str(file)])
    printed = capsys.readouterr().out
    for quantity in QUANTITIES:
        columns = [name for name, peer in PEERS.items() if quantity in peer.quantities]
        heading = " +".join(["workload +N", "batch ms", *map(re.escape, columns[1:]), "others' CPU", "bar"])
        row = re.search(rf"^{quantity}: .*\n\n{heading}\n(mlp-tiny .*)\n", printed, re.M)[1]
        assert row.count("not installed") == sum(PEERS[name].package != "" for name in columns)
        assert "failed" not in row
    bars = kept(file)["bars"]
    assert code == int(any(not bar["met"] for bar in bars))
    assert [bar["where"] for bar in bars] == [
        f"time, {quantity}, mlp-tiny" for quantity in QUANTITIES[:3] for _ in "12"
    ]
    for record in results.read(file):
        absent = PEERS[record.contender].package != ""
        assert (record.measured.error == results.NOT_INSTALLED) == absent
        assert (record.ratio is None) == absent


def test_a_slow_contender_misses_its_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def delayed(task: Task) -> Ready:
        return Ready(lambda: time.sleep(0.05) or task.right["norms"])

    contender(monkeypatch, delayed)
    assert command.main(NORMS) == 1
    assert "\n0 of 1 bars met\ntime, norms, mlp-tiny: psgrad " in capsys.readouterr().out


def test_a_fast_contender_meets_its_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    contender(monkeypatch, lambda task: Ready(lambda: task.right["norms"]))
    assert command.main(NORMS) == 0
    assert "\n1 of 1 bars met\n" in capsys.readouterr().out


def test_a_wrong_answer_is_a_failure_and_misses_the_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    contender(monkeypatch, lambda task: Ready(lambda: torch.ones(len(task.inputs))))
    assert command.main(NORMS) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^\[1\] psgrad: AssertionError: wrong norms: off by ", printed, re.M)
    assert "bar 2.50: MISSED, nothing to compare" in printed


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_wrong_answers_are_found(quantity: str) -> None:
    task = Point("mlp-tiny", n=5).make()
    right = PEERS["vmap(grad)"].make(quantity, task).call()
    task.check(quantity, right)
    wrong = {**right, "0.bias": right["0.bias"].roll(1, 0)} if isinstance(right, dict) else right.roll(1, 0)
    with pytest.raises(AssertionError, match="wrong"):
        task.check(quantity, wrong)


@on_linux
def test_memory_is_measured_in_a_fresh_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memory.json"
    chosen = ["--only", "mlp-tiny", "--n", "4096", "--quantity", "grads", "--peers", "psgrad", "--threads", "1"]
    assert command.main(["memory", *chosen, "--json", str(file)]) == 0
    base, ours = results.read(file)
    size = 4096 * Point("mlp-tiny").make().size
    assert (base.kind, base.contender, ours.contender) == ("memory", "batch", "psgrad")
    assert size < ours.measured.best < 4 * size
    assert f"{ours.measured.best / 1e6:.1f} ({ours.ratio:.2f})" in capsys.readouterr().out


@on_linux
def test_what_fails_in_a_fresh_process_is_said() -> None:
    found = workloads.peaks("tight", 1, "nosuch", ["psgrad"], Point("mlp-tiny"))
    assert found == {"psgrad": Measured(error="KeyError: 'nosuch'")}


def test_memory_of_gradients_is_judged_beyond_them() -> None:
    found = {"batch": Measured(100.0), "psgrad": Measured(1105.0)}
    (verdict,) = results.judge("here", [Bar(1.1, beyond=1000)], found)
    assert str(verdict) == "psgrad 1.05 of batch beyond 0.0 MB, bar 1.10: met"
    assert not results.judge("here", [Bar(1.1, beyond=900)], found)[0].met
    (bar,) = workloads.bars("memory", "grads", Point("lstm"))
    assert bar.beyond == 32 * Point("lstm").make().size
    assert workloads.bars("memory", "grads", Point("lstm", 7)) == []


def test_cost_is_followed_as_sizes_grow(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "SAMPLES", [Point("mlp", 1), Point("resnet", 1)])
    monkeypatch.setattr(workloads, "WIDTHS", [Point("mlp", width=8)])
    monkeypatch.setattr(workloads, "LENGTHS", [Point("gpt", 1, length=4)])
    assert command.main(["sweep", "--only", "mlp,gpt", "--peers", "psgrad", "--rounds", "1"]) == 0
    rows = re.findall(r"^(?:mlp|gpt|resnet) [\w= ]*?\w=\d+(?= {2,})", capsys.readouterr().out, re.M)
    assert rows == ["mlp N=1", "mlp N=1", "mlp W=8", "gpt N=1 T=4", "mlp N=1", "mlp W=8"]


def test_models_of_every_size_are_checked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LARGE, "resnet50", (2, WORKLOADS["mlp-tiny"][1]))
    workloads.task.cache_clear()
    command.main(["large", "--only", "resnet50", "--kind", "time", "--rounds", "1"])
    workloads.task.cache_clear()
    printed = capsys.readouterr().out
    assert re.findall(r"^(\w+): time .*\n\nworkload.*\nresnet50 +2 ", printed, re.M) == ["norms", "clipped"]
    assert "of 2 bars met" in printed


def test_slow_contenders_get_fewer_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "settle", lambda: None)
    monkeypatch.setattr(measuring, "turn", lambda call: [call()])
    found = measuring.interleaved({"slow": lambda: 10.0, "quick": lambda: 0.001}, 8, patience=3.0)
    assert {name: m.turns for name, m in found.items()} == {"slow": measuring.ENOUGH, "quick": 8}
    assert {name: m.best for name, m in found.items()} == {"slow": 10.0, "quick": 0.001}


# ---- files, comparison, pictures --------------------------------------------------------------------------


def record(contender: str, ratio: float | None, error: str = "") -> Record:
    best = None if ratio is None else ratio * 0.5
    return Record("time", "norms", "mlp", 256, contender, Measured(best, 1.0, 3, error), ratio)


def write(file: Path, records: list[Record]) -> None:
    run = Run({"torch": "2"}, file)
    run.records += records
    run.save()


def test_a_comparison_says_what_changed(tmp_path: Path) -> None:
    old = [record("psgrad", 1.0), record("loop", 5.0), record("vmap(grad)", 2.0), record("Opacus", 2.0)]
    old += [record("JAX", 1.1), record("BackPACK", None, "refused"), record("batch", 1.0)]
    new = [record("psgrad", 1.3), record("loop", 4.0), record("vmap(grad)", 2.05), record("Opacus", None, "broke")]
    new += [record("JAX", None, results.NOT_INSTALLED), record("BackPACK", 1.2), record("batch", 1.0)]
    file = tmp_path / "old.json"
    write(file, old)
    assert results.read(file) == old
    fails, worse, better = (
        "FAILS   time, norms, mlp, Opacus: broke",
        "WORSE   time, norms, mlp, psgrad: 1.000 -> 1.300 (+30.0%)",
        "better  time, norms, mlp, loop: 5.000 -> 4.000 (-20.0%)",
    )
    count = "4 figures in both runs, 1 the same within 10%"
    assert results.compare(new, results.read(file)) == [fails, worse, better, count]
    same = "same    time, norms, mlp, vmap(grad): 2.000 -> 2.050 (+2.5%)"
    means = ["psgrad: +30.0% on average of 1", "loop: -20.0% on average of 1", "vmap(grad): +2.5% on average of 1"]
    assert results.compare(new, old, every=True) == [fails, worse, same, better, count, *means]


def test_the_command_compares_with_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "old.json"
    command.main([*NORMS, "--json", str(file)])
    assert kept(file)["command"] == "workloads"
    faster = [replace(r, ratio=r.ratio / 1000) if r.contender == "psgrad" else r for r in results.read(file)]
    write(file, faster)
    command.main([*NORMS, "--against", str(file), "--every"])
    printed = capsys.readouterr().out
    assert "WORSE   time, norms, mlp-tiny, psgrad: " in printed
    assert "1 figures in both runs, 0 the same within 10%" in printed


def test_figures_of_earlier_runs_are_compared_and_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    files = [str(tmp_path / name) for name in ("times.json", "memory.json", "both.json")]
    old = [record("psgrad", 1.0), record("JAX", None, "broke")]
    names = ("batch", "psgrad")
    grown = [Record("memory", "clipped", f"mlp N={n}", n, k, Measured(1e6 * n), 1.0) for n in (1, 8) for k in names]
    write(Path(files[0]), old)
    write(Path(files[1]), grown)
    code = command.main(["read", *files[:2], "--json", files[2], "--against", files[0], "--plots", str(tmp_path)])
    assert code == 0
    assert capsys.readouterr().out.splitlines() == [
        "",
        f"against {files[0]}:",
        "0 figures in both runs, 0 the same within 10%",
        str(tmp_path / "times.png"),
        str(tmp_path / "memory.png"),
    ]
    assert results.read(Path(files[2])) == old + grown
    assert {file.name for file in tmp_path.glob("*.png")} == {"times.png", "memory.png"}


# ---- bounded ----------------------------------------------------------------------------------------------


@on_linux
def test_bounds_are_measured_beside_fixed_chunk_sizes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "bounds.json"
    chosen = ["--only", "mlp-tiny", "--n", "6000", "--quantity", "norms", "--rounds", "1", "--threads", "1"]
    code = command.main(["bounded", *chosen, "--json", str(file)])
    found = [r for r in results.read(file) if r.contender == "max_bytes"]
    assert [r.kind for r in found] == ["memory"] * 3 + ["time"] * 3
    sizes = [int(r.measured.mark.removeprefix("by ")) for r in found[:3]]  # which ones depends on the allocator
    assert sizes == sorted(sizes, reverse=True)
    assert 6000 > sizes[0] > sizes[-1] >= 1
    bars = kept(file)["bars"]
    assert len(bars) == 6
    assert code == int(not all(bar["met"] for bar in bars))
    assert re.findall(r"^mlp-tiny N=6000 (\d+)%", capsys.readouterr().out, re.M) == ["55", "30", "15"] * 2


# ---- convolutions, fit ------------------------------------------------------------------------------------

SMALL = "cifar 64*32-64 16x16 k1 /2"


@pytest.mark.usefixtures("instant")
def test_convolutions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row with the time of every strategy, and an exit code that says what the row says."""
    file = tmp_path / "times.json"
    assert command.main(["convolutions", "--only", SMALL, "--sets", "2", "--json", str(file)]) == 0
    ratios = {r.contender: r.ratio for r in results.read(file)}
    others = ("ordinary", "fill", "psgrad", "psgrad fresh", "vmap", "patches", "grouped", "loop")
    assert ratios == {"ordinary + fill": 1.0} | dict.fromkeys(others, 0.5)
    printed = capsys.readouterr().out
    assert re.search(rf"^{re.escape(SMALL)} +64 +2\.00 .* chosen 0\.50 ", printed, re.M)
    assert "psgrad 0.50 of ordinary + fill, bar 1.30: met; psgrad 1.00 of vmap, bar 1.05: met" in printed
    assert "2 of 2 bars met" in printed


def test_bars_of_convolutions() -> None:
    found = {"ordinary + fill": Measured(1.5), "psgrad": Measured(1.9), "vmap": Measured(2.0)}
    assert all(verdict.met for verdict in results.judge("", convolutions.BARS, found))
    slow = results.judge("", convolutions.BARS, found | {"psgrad": Measured(2.4)})
    said = ["psgrad 1.60 of ordinary + fill, bar 1.30: MISSED by 23%", "psgrad 1.20 of vmap, bar 1.05: MISSED by 14%"]
    assert list(map(str, slow)) == said


def test_shapes_of_convolutions_are_read() -> None:
    assert len(set(convolutions.SHAPES)) == 66
    x, g, geometry, kernel = convolutions.read_shape("video 2*3-64 8x112x112 k3x7x7 /1x2x2")
    assert (x, g, kernel) == ((2, 1, 3, 8, 112, 112), (2, 1, 64, 8, 56, 56), (3, 7, 7))
    assert geometry == ((1, 2, 2), (1, 3, 3), (1, 1, 1), 1)
    assert convolutions.read_shape("8*64-64 4000 k2 p0 d256 g2")[1:3] == ((8, 1, 64, 3744), ((1,), (0,), (256,), 2))


def test_every_way_of_a_convolution_gives_the_same() -> None:
    calls, chosen = convolutions.contenders(convolutions.read_shape("3*4-6 7x7 k3 /2"))
    assert chosen in calls
    ways = {name: call() for name, call in calls.items() if name not in ("ordinary", "fill")}
    for name, grads in ways.items():
        torch.testing.assert_close(grads.view(3, 6, 4, 3, 3), ways["loop"].clone(), msg=name, rtol=1e-4, atol=1e-4)
    ordinary = calls["ordinary"]()
    torch.testing.assert_close(ordinary, ways["vmap"].view(3, 6, 4, 3, 3).sum(0), rtol=1e-4, atol=1e-4)


def test_fit_of_convolutions_finds_prices() -> None:
    """Times that are made of prices give back choices as good as any."""
    rng, records = random.Random(0), []
    for _ in range(40):
        drawn = convolutions.draw(rng)
        for turned in (False, True):
            with convolutions.turning(return_value=turned):
                ways = conv_plan.counts(*convolutions.read_shape(drawn)).items()
            for way, done in ways:
                seconds = sum(conv_plan.COSTS[k] * v for k, v in done.items()) * 1e-9
                name = way + " turned" * turned
                records.append(Record("time", convolutions.DRAWN, drawn, 1, name, Measured(seconds), None))
    samples = list(convolutions.counted(records))
    assert len(samples) == len(records)
    assert max(convolutions.losses(samples, convolutions.fit(samples))) < 1.05


@pytest.mark.usefixtures("instant")
def test_fit_adds_to_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured is kept; all that is kept is fitted."""
    drawn = iter(["2*3-4 5x5 k3 /1 d1 g1", "2*4-4 6 k1 /1 d1 g1"])
    monkeypatch.setattr(convolutions, "draw", lambda _: next(drawn, ""))
    chosen = ["--rounds", "1", "--json", str(tmp_path / "fit.json")]
    assert command.main(["fit", "60", *chosen]) == 0
    first = capsys.readouterr().out
    assert re.search(r'^    "call": .*,$', first, re.M)
    assert "\n2 shapes; chosen over best: mean 1.00, 90% under 1.00\n" in first
    found = results.read(tmp_path / "fit.json")
    assert {"patches", "patches turned", "grouped", "loop", "pointwise"} < {r.contender for r in found}
    assert command.main(["fit", "0", *chosen]) == 0
    assert capsys.readouterr().out.partition('    "')[2] == first.partition('    "')[2]
    assert results.read(tmp_path / "fit.json") == found


# ---- layers -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("instant")
def test_ops_are_held_against_their_ordinary_backward(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    assert command.main(["layers", "--only", "rms_norm,add", "--rounds", "1", "--json", str(file)]) == 0
    found = results.read(file)
    assert {r.quantity for r in found} == {"rms_norm", "add"}
    assert {r.contender for r in found} == {"ordinary + fill", *layers.CONTENDERS}
    assert "11 of 11 bars met" in capsys.readouterr().out


@pytest.mark.usefixtures("instant")
@pytest.mark.parametrize("family", layers.FAMILIES)
def test_every_op_has_the_same_answers(family: str) -> None:
    found = layers.measure(min(layers.FAMILIES[family](), key=lambda case: case.x.numel()), 1)
    assert set(found) == {"ordinary + fill", *layers.CONTENDERS}


def test_a_rule_that_is_wrong_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(iter(layers.FAMILIES["rms_norm"]()))
    ruled = layers.ruled

    def spoilt(case: Any, buffers: Any) -> Any:
        forward, backward = ruled(case, buffers)

        def wrong(y: torch.Tensor, g: torch.Tensor) -> Any:
            found = backward(y, g)
            buffers[0].add_(1)
            return found

        return forward, wrong

    monkeypatch.setattr(layers, "ruled", spoilt)
    with pytest.raises(AssertionError):
        layers.measure(case, 1)
