"""A measurement of one contender, as the table, the JSON file and the pictures have it."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class Measured:
    """What one contender took, or why it did not run."""

    best: float | None = None  # seconds or bytes
    spread: float | None = None  # median / best
    turns: int = 0
    error: str = ""
    mark: str = ""  # said in the cell
    note: str = ""  # said below the table


@dataclass(frozen=True)
class Record:
    """A cell of a table."""

    kind: str  # "time" or "memory"
    quantity: str
    workload: str  # with its size, where that is not its own
    n: int
    contender: str
    measured: Measured
    ratio: float | None  # to the batch gradient

    @property
    def key(self) -> tuple[str, ...]:
        return self.kind, self.quantity, self.workload, self.contender


def write(file: Path, about: dict[str, Any], records: Iterable[Record], verdicts: Iterable[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {**about, "bars": list(verdicts), "records": [asdict(record) for record in records]}
    file.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def read(file: Path) -> list[Record]:
    records = json.loads(file.read_text())["records"]
    return [Record(**{**record, "measured": Measured(**record["measured"])}) for record in records]


def describe(error: BaseException, package: str = "") -> str:
    """An exception on one short line."""
    if isinstance(error, ModuleNotFoundError) and package and error.name == package:
        return NOT_INSTALLED
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 110 else text[:107] + "..."
