"""Tables that are yet to be measured, how they are printed, kept and judged, and how two runs compare."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import geometric_mean
from typing import Any, NamedTuple

from .measuring import BUSY, Measured, clocks, others, progress

NOT_INSTALLED = "not installed"
NOISE = 0.1  # from run to run ratios move by about this much
COLUMN = 18  # characters


@dataclass(frozen=True)
class Record:
    """A cell of a table."""

    kind: str  # "time" or "memory"
    quantity: str  # or the op
    workload: str  # with its size, where that is not its own; or the op's shape
    n: int
    contender: str
    measured: Measured
    ratio: float | None  # to the base of its table

    @property
    def key(self) -> tuple[str, ...]:
        return self.kind, self.quantity, self.workload, self.contender


@dataclass(frozen=True)
class Bar:
    """`contender` takes at most `limit` times what `base` takes."""

    limit: float
    contender: str = "psgrad"
    base: str = "batch"
    beyond: float = 0  # bytes that are not held against the contender, such as those of its result


@dataclass(frozen=True)
class Verdict:
    """How a row of a table stands to a bar; without a ratio: a contender failed."""

    where: str
    bar: Bar
    ratio: float | None
    met: bool

    def __str__(self) -> str:
        bar, beyond = self.bar, f" beyond {self.bar.beyond / 1e6:.1f} MB" if self.bar.beyond else ""
        if self.ratio is None:
            return f"bar {bar.limit:.2f}: MISSED, nothing to compare"
        how = "met" if self.met else f"MISSED by {self.ratio / bar.limit - 1:.0%}"
        return f"{bar.contender} {self.ratio:.2f} of {bar.base}{beyond}, bar {bar.limit:.2f}: {how}"


def judge(where: str, bars: Iterable[Bar], found: Mapping[str, Measured]) -> list[Verdict]:
    """The verdicts on a row, but of bars with a side that was not to run."""
    ran = [bar for bar in bars if bar.contender in found and bar.base in found]
    ratios = [found[bar.contender].over(found[bar.base], bar.beyond) for bar in ran]
    return [Verdict(where, bar, x, x is not None and x <= bar.limit) for bar, x in zip(ran, ratios, strict=True)]


class Row(NamedTuple):
    """A row of a table, yet to be measured."""

    label: str
    n: int
    measure: Callable[[], Mapping[str, Measured]]
    bars: Sequence[Bar] = ()


class Plan(NamedTuple):
    """A table, yet to be measured: figures are ratios to `base`."""

    kind: str  # "time" or "memory"
    quantity: str
    base: str
    contenders: Sequence[str]
    rows: Iterable[Row]
    width: int = 14  # of labels


class Table:
    """Prints rows as they come, and collects footnotes."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.time, self.notes = plan, plan.kind == "time", dict[str, int]()
        self.columns = [plan.base, *(name for name in plan.contenders if name != plan.base)]
        what = "minimum (median/minimum)" if self.time else "peak MB of a call beyond model and data"
        print(f"\n{plan.quantity}: {plan.kind} over that of {plan.base}, {what}\n")
        heads = [f"{plan.base} {'ms' if self.time else 'MB'}", *self.columns[1:]]
        self.line("workload", "N", heads, "others' CPU", "bar")

    def line(self, label: str, n: object, cells: Sequence[str], share: str, bar: str) -> None:
        columns = "".join(f" {cell:>{COLUMN}}" for cell in cells)
        print(f"{label:<{self.plan.width}} {n:>5}{columns} {share:>12}  {bar}", flush=True)

    def row(self, row: Row, found: Mapping[str, Measured], share: float, verdicts: Sequence[Verdict]) -> None:
        cells = [self.cell(name, found) if name in found else "-" for name in self.columns]
        busy = f"Other processes took over {BUSY:.0%} of the cores: not to be trusted." if share > BUSY else ""
        bars = "; ".join(map(str, verdicts)) or "-"
        self.line(row.label, row.n, cells, f"{share:.0%}{self.note(busy if self.time else '')}", bars)

    def cell(self, name: str, found: Mapping[str, Measured]) -> str:
        m, base = found[name], found.get(self.plan.base, Measured())
        if m.error == NOT_INSTALLED:
            return NOT_INSTALLED
        note = self.note(f"{name}: {m.error or m.note}" if m.error or m.note else "")
        if m.best is None:
            return f"failed{note}"
        ratio = "" if name == self.plan.base else f"{m.over(base) or float('nan'):.2f}"
        if not self.time:
            return f"{m.mark} {m.best / 1e6:.1f}{ratio and f' ({ratio})'}{note}".strip()
        return f"{m.mark} {ratio or f'{m.best * 1e3:.2f}'}{f' ({m.spread:.2f})' if m.spread else ''}{note}".strip()

    def note(self, text: str) -> str:
        """The number of a footnote, the same for the same text."""
        return f" [{self.notes.setdefault(text, len(self.notes) + 1)}]" if text else ""

    def end(self) -> None:
        print("\n".join(["", *(f"[{i}] {text}" for text, i in self.notes.items())]), flush=True)


class Run:
    """What has been measured so far."""

    def __init__(self, about: dict[str, Any], file: Path | None) -> None:
        self.about, self.file = about, file
        self.records, self.verdicts = list[Record](), list[Verdict]()

    def measure(self, plan: Plan) -> None:
        """Measures a table, and prints a row as soon as there is one."""
        table = Table(plan)
        for row in plan.rows:
            where = plan.kind, plan.quantity, row.label
            progress(f"{', '.join(where)} ", row=True)
            start = clocks()
            found = row.measure()
            share, base = others(start), found.get(plan.base, Measured())
            progress("", row=True)
            verdicts = judge(", ".join(where), row.bars, found)
            self.records += [Record(*where, row.n, name, m, m.over(base)) for name, m in found.items()]
            self.verdicts += verdicts
            self.save()  # after each row: a run that is stopped keeps what it has
            table.row(row, found, share, verdicts)
        table.end()

    def save(self) -> None:
        if self.file:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            kept = {"bars": [asdict(v) for v in self.verdicts], "records": [asdict(r) for r in self.records]}
            self.file.write_text(json.dumps(self.about | kept, indent=1, allow_nan=False) + "\n")

    def missed(self) -> int:
        """Says which bars are missed, and returns how many."""
        missed = [verdict for verdict in self.verdicts if not verdict.met]
        if self.verdicts:
            print(f"\n{len(self.verdicts) - len(missed)} of {len(self.verdicts)} bars met")
        for verdict in missed:
            print(f"{verdict.where}: {verdict}")
        return len(missed)


def read(file: Path) -> list[Record]:
    records = json.loads(file.read_text())["records"]
    return [Record(**{**record, "measured": Measured(**record["measured"])}) for record in records]


def about(file: Path) -> dict[str, Any]:
    """What a run says of itself."""
    return {key: value for key, value in json.loads(file.read_text()).items() if key not in ("bars", "records")}


def describe(error: BaseException, package: str = "") -> str:
    """An exception on one short line."""
    if isinstance(error, ModuleNotFoundError) and package and error.name == package:
        return NOT_INSTALLED
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 110 else text[:107] + "..."


def compare(new: Iterable[Record], old: Iterable[Record], every: bool = False) -> list[str]:
    """A line for each ratio that got worse or better beyond noise, or fails where it did not; worst first.

    `every`: a line for each ratio that both runs have, and for each contender how its ratios changed on average.
    """
    before = {record.key: record for record in old}
    changes: list[tuple[float, str]] = []
    factors: dict[str, list[float]] = {}
    for record in new:
        was, name = before.get(record.key), ", ".join(record.key)
        if was is None or was.ratio is None or NOT_INSTALLED in (was.measured.error, record.measured.error):
            continue
        if record.ratio is None:
            changes.append((inf, f"FAILS   {name}: {record.measured.error}"))
        elif not record.ratio == was.ratio == 1:  # a base, which is compared with itself
            change = record.ratio / was.ratio - 1
            how = "same  " if abs(change) <= NOISE else "WORSE " if change > 0 else "better"
            changes.append((change, f"{how}  {name}: {was.ratio:.3f} -> {record.ratio:.3f} ({change:+.1%})"))
            factors.setdefault(record.contender, []).append(1 + change)
    beyond = sorted((change for change in changes if every or abs(change[0]) > NOISE), reverse=True)
    same = sum(abs(change) <= NOISE for change, _ in changes)
    count = f"{len(changes)} figures in both runs, {same} the same within {NOISE:.0%}"
    means = [f"{name}: {geometric_mean(x) - 1:+.1%} on average of {len(x)}" for name, x in factors.items()]
    return [*(line for _, line in beyond), count, *(means if every else [])]
