"""Tables as text: a row for each workload, a column for each contender, notes below."""

from collections.abc import Mapping, Sequence

from .bars import Verdict
from .measured import NOT_INSTALLED, Measured
from .peers import BASE
from .workloads import Point, Task

NAME, COLUMN = 14, 18


class Table:
    """Prints rows as they come, and collects what is to be said below them."""

    def __init__(self, kind: str, quantity: str, contenders: Sequence[str]) -> None:
        self.kind, self.contenders = kind, [name for name in contenders if name != BASE]
        self.notes: list[str] = []
        self.remarks: dict[str, None] = {}
        if kind == "time":
            what, unit, busy = f"time over that of {BASE}, minimum (median/minimum)", "ms", "  others' CPU"
        else:
            what, unit, busy = f"peak MB of a call beyond model and data (over that of {BASE})", "MB", ""
        print(f"\n{quantity}: {what}\n")
        print(line("workload", "N", f"{BASE} {unit}", *self.contenders) + f"{busy}  bar")

    def row(
        self, point: Point, task: Task, measured: Mapping[str, Measured], share: float | None, verdict: Verdict | None
    ) -> None:
        base = measured[BASE]
        cells = [self.cell(name, point, measured[name], base.best) for name in (BASE, *self.contenders)]
        busy = "" if share is None else f"{share:>13.0%}"
        print(f"{line(point.label, str(len(task.inputs)), *cells)}{busy}  {verdict or '-'}", flush=True)

    def cell(self, name: str, point: Point, found: Measured, base: float | None) -> str:
        if found.error == NOT_INSTALLED:
            return NOT_INSTALLED
        if found.error or found.best is None:
            return f"failed [{self.number(f'{name}: {found.error}')}]"
        if found.note:
            self.remarks[f"* {name}, {point.workload}: {found.note}"] = None
        if self.kind == "memory":
            ratio = f" ({found.best / base:.2f})" if name != BASE and base else ""
            return f"{found.mark}{found.best / 1e6:.1f}{ratio}"
        figure = found.best * 1e3 if name == BASE else found.best / base if base else float("nan")
        return f"{found.mark} {figure:.2f} ({found.spread:.2f})".strip()

    def number(self, text: str) -> int:
        """The number of a footnote, the same for the same text."""
        if text not in self.notes:
            self.notes.append(text)
        return self.notes.index(text) + 1

    def end(self) -> None:
        notes = [f"[{i + 1}] {text}" for i, text in enumerate(self.notes)]
        print("\n".join(["", *self.remarks, *notes]), flush=True)


def line(name: str, n: str, *cells: str) -> str:
    return f"{name:<{NAME}}{n:>4}" + "".join(f"{cell:>{COLUMN}}" for cell in cells)
