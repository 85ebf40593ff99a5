"""progress=True: a bar over samples, that moves on as they run, and is gone when the call is."""

import inspect
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import psgrad
from psgrad.streaming import budget, progress

FUNCTIONS: dict[str, Any] = {
    "per_sample_grads": psgrad.per_sample_grads,
    "per_sample_norms": psgrad.per_sample_norms,
    "per_sample_dots": lambda *args, **options: psgrad.per_sample_dots(*args, args[1], **options),
    "weighted_grad": lambda *args, **options: psgrad.weighted_grad(*args, torch.ones(7), **options),
    "clipped_grad": lambda *args, **options: psgrad.clipped_grad(*args, 0.5, **options),
    "projected_grads": lambda *args, **options: psgrad.projected_grads(*args, 5, **options),
    "gram": psgrad.gram,
    "per_sample_jacobians": psgrad.per_sample_jacobians,
    "ntk": psgrad.ntk,
    "grad_stats": psgrad.grad_stats,
    "kron_factors": psgrad.kron_factors,
    "factored_grads": psgrad.factored_grads,
}


class Recorded:
    """In place of tqdm's bar."""

    bars: list["Recorded"] = []

    def __init__(self, total: int, desc: str, unit: str) -> None:
        self.total, self.desc, self.unit = total, desc, unit
        self.moves: list[int] = []
        self.closed = 0
        self.bars.append(self)

    def update(self, n: int) -> None:
        assert not self.closed
        assert n > 0
        self.moves.append(n)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    monkeypatch.setattr(Recorded, "bars", [])
    monkeypatch.setattr(progress, "_tqdm", lambda: Recorded)
    return Recorded.bars


@pytest.fixture
def no_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tqdm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as where it is not installed


def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.sin(F.linear(x, p["w"], p["b"])).sum()


def problem(n: int = 7) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    return fn, {"w": torch.randn(3, 4), "b": torch.randn(3)}, torch.randn(n, 4)


def branching(p: Any, x: Tensor) -> Tensor:
    """Splits the batch: samples disagree."""
    return fn(p, x) if x.sum() > 0 else fn(p, x).square()


def looping(p: Any, x: Tensor) -> Tensor:
    """vmap refuses: samples run one by one."""
    return fn(p, x) * float(x.numpy().max())


def only(bars: list[Recorded]) -> Recorded:
    (bar,) = bars
    assert bar.closed == 1
    assert sum(bar.moves) == bar.total
    return bar


# ---- what it counts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_bar_has_the_name_of_the_call_and_ends_where_it_should(name: str, bars: list[Recorded]) -> None:
    want = FUNCTIONS[name](*problem(), chunk_size=3)
    assert not bars
    found = FUNCTIONS[name](*problem(), chunk_size=3, progress=True)
    bar = only(bars)
    assert (bar.desc, bar.unit) == (f"psgrad.{name}", " samples")
    if name in ("gram", "ntk"):  # each chunk with itself and the chunks before it: 3 + 2 * 3 + 3 * 1
        assert (bar.total, bar.moves) == (12, [3, 3, 1, 3, 1, 1])
    else:
        assert (bar.total, bar.moves) == (7, [3, 3, 1])
    if name == "factored_grads":
        want, found = want.dense(), found.dense()
    torch.testing.assert_close(found, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_samples_at_once(name: str, bars: list[Recorded]) -> None:
    FUNCTIONS[name](*problem(), progress=True)
    assert only(bars).moves == [7]


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in ("per_sample_grads", "factored_grads")])
def test_samples_that_do_not_count_are_not_counted(name: str, bars: list[Recorded]) -> None:
    valid = torch.tensor([True, False, True, True, True, False, True])
    FUNCTIONS[name](*problem(), chunk_size=2, valid=valid, progress=True)
    assert only(bars).total == (2 + 2 * 2 + 3 * 1 if name in ("gram", "ntk") else 5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_samples(name: str, bars: list[Recorded]) -> None:
    call = FUNCTIONS[name] if name != "weighted_grad" else lambda *a, **k: psgrad.weighted_grad(*a, torch.ones(0), **k)
    call(*problem(0), progress=True)
    assert all((bar.total, bar.moves, bar.closed) == (0, [], 1) for bar in bars)


def test_two_passes_count_twice(bars: list[Recorded], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a clipped sum where no sample's factors can be kept; of weights that depend on the norms of all."""
    peak = lambda problem, n, samples, quantity, parted=False: 1 << 40 if quantity.name == "clipped" else n * 100
    monkeypatch.setattr(budget, "peak_bytes", peak)
    psgrad.clipped_grad(*problem(), 0.5, max_bytes=350, progress=True)
    assert only(bars).moves == [3, 3, 1, 3, 3, 1]
    bars.clear()
    psgrad.weighted_grad(*problem(), lambda norms: 1 / norms, chunk_size=3, progress=True)
    assert only(bars).moves == [3, 3, 1, 3, 3, 1]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_groups_move_it_within_a_chunk(name: str, bars: list[Recorded]) -> None:
    _, params, x = problem()
    FUNCTIONS[name](branching, params, x, progress=True)
    positive = int((x.sum(1) > 0).sum())
    assert sorted(only(bars).moves) == sorted([positive, 7 - positive])


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_samples_move_it_where_they_run_one_by_one(name: str, bars: list[Recorded]) -> None:
    _, params, x = problem()
    FUNCTIONS[name](looping, params, x, progress=True)
    assert only(bars).moves == [1] * 7


def test_a_chunk_that_runs_again_counts_once(bars: list[Recorded]) -> None:
    """The norm of a weight is taken before its second use is known of, and the chunk runs again."""

    def twice(p: Any, x: Tensor) -> Tensor:
        once = F.linear(x, p["w"], p["b"])
        return fn(p, x) + once.sin().square().sum()

    _, params, x = problem()
    psgrad.per_sample_norms(twice, params, x, chunk_size=3, progress=True)
    assert only(bars).moves == [3, 3, 1]


def test_gram_with_others(bars: list[Recorded]) -> None:
    _, params, x = problem()
    psgrad.gram(fn, params, x, x[:2], chunk_size=3, progress=True)
    assert only(bars).total == 7 + 3 * 2
    bars.clear()
    psgrad.gram(fn, params, x, x[:2], progress=True)
    assert only(bars).moves == [7, 2]
    bars.clear()
    psgrad.gram(fn, params, x, psgrad.factored_grads(fn, params, x[:2]), chunk_size=3, progress=True)
    assert only(bars).moves == [3, 3, 1]


# ---- how it ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_closed_on_errors(name: str, error: type[BaseException], bars: list[Recorded]) -> None:
    calls = []

    def failing(p: Any, x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1 + (name in ("per_sample_jacobians", "ntk")):  # which run the first sample for its shape
            raise error
        return fn(p, x)

    _, params, x = problem()
    with pytest.raises(error):
        FUNCTIONS[name](failing, params, x, chunk_size=3, progress=True)
    (bar,) = bars
    assert (bar.moves, bar.closed) == ([3], 1)


def test_there_is_none_where_the_call_is_a_part_of_another(bars: list[Recorded]) -> None:
    _, params, x = problem()
    torch.func.grad(lambda p: psgrad.per_sample_grads(fn, p, x, progress=True)["b"].sum())(params)
    params["w"].requires_grad_()
    psgrad.per_sample_norms(fn, params, x, differentiable=True, progress=True).sum().backward()
    assert not bars


def test_every_function_that_runs_in_chunks_has_it() -> None:
    taking = [name for name in psgrad.__all__ if callable(getattr(psgrad, name)) and not name[0].isupper()]
    signatures = {name: inspect.signature(getattr(psgrad, name)).parameters for name in taking}
    assert {name for name, known in signatures.items() if "chunk_size" in known} == set(FUNCTIONS)
    for name in FUNCTIONS:
        assert signatures[name]["progress"].default is False


# ---- what is seen ----------------------------------------------------------------------------------------


def test_tqdm_draws_it(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tqdm")
    psgrad.per_sample_norms(*problem(), chunk_size=3, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    last = shown.err.rstrip().rpartition("\r")[2]
    assert last.startswith("psgrad.per_sample_norms: 100%|")
    assert "7/7" in last


@pytest.mark.usefixtures("no_tqdm")
def test_a_plain_line_without_tqdm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    psgrad.per_sample_norms(*problem(), chunk_size=3, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert shown.err.endswith("\n")
    looks = [look.rpartition(",")[0] for look in shown.err.split("\r")[1:]]
    assert looks == [
        "psgrad.per_sample_norms: 0 of 7 samples (0%)",
        "psgrad.per_sample_norms: 3 of 7 samples (42%)",
        "psgrad.per_sample_norms: 6 of 7 samples (85%)",
        "psgrad.per_sample_norms: 7 of 7 samples (100%)",
        "psgrad.per_sample_norms: 7 of 7 samples (100%)",
    ]
    lengths = [len(look.rstrip("\n")) for look in shown.err.split("\r")[1:]]
    assert lengths == sorted(lengths)  # nothing of an earlier look is left behind a shorter one


@pytest.mark.usefixtures("no_tqdm")
def test_a_plain_line_rests_between_two_looks_and_ends_on_errors(capsys: pytest.CaptureFixture[str]) -> None:
    def failing(p: Any, x: Tensor) -> Tensor:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        psgrad.clipped_grad(failing, *problem()[1:], 1.0, progress=True)
    shown = capsys.readouterr().err
    assert shown.startswith("\rpsgrad.clipped_grad: 0 of 7 samples (0%), 0.0 s")
    assert shown.endswith("\n")
    line = progress.Line(total=1000, desc="d", unit=" samples")
    for _ in range(999):
        line.update(1)
    assert capsys.readouterr().err.count("\r") < 100


@pytest.mark.usefixtures("no_tqdm")
def test_no_console_and_no_samples(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    psgrad.per_sample_norms(*problem(0), progress=True)
    assert "0 of 0 samples, 0.0 s\n" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stderr", None)
    psgrad.per_sample_norms(*problem(), progress=True)
