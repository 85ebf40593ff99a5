"""A bar over samples, for long work: tqdm's where that is installed, else a line that rewrites itself."""

import contextlib
import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from ..engine.ladder import Group
from ..engine.problem import Problem

INTERVAL = 0.1  # seconds between two looks of the line


class Bar:
    """How many samples have run, of `total`: each counts as often as it has to run.

    A chunk moves it on when it is done; where its samples run in groups, or one by one, each group does so before.
    """

    def __init__(self, name: str, total: int) -> None:
        self.before = 0  # samples of the chunks that are done
        self.at = 0  # what is shown
        self.line: Any = (_tqdm() or Line)(total=total, desc=f"psgrad.{name}", unit=" samples")

    def __enter__(self) -> "Bar":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.line.close()

    def done(self, samples: int) -> None:
        """A chunk of so many samples has run."""
        self.before += samples
        self._move(self.before)

    def watching(self, run: Callable[..., Iterator[Group[Any]]]) -> Callable[..., Iterator[Group[Any]]]:
        """The same as `run`, whose groups move the bar within a chunk; a chunk that has to start again does not."""

        def watched(problem: Problem, make: Callable[[Problem], Any]) -> Iterator[Group[Any]]:
            seen = 0
            for group in run(problem, make):
                yield group
                seen += problem.n if group.places is None else len(group.places)
                self._move(self.before + seen)

        return watched

    def _move(self, position: int) -> None:
        if position > self.at:
            self.line.update(position - self.at)
            self.at = position


def _tqdm() -> Any:
    """tqdm's bar for a terminal or a notebook, or None where it is not installed."""
    with contextlib.suppress(ImportError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a notebook could have a prettier one
        return importlib.import_module("tqdm.auto").tqdm
    return None


class Line:
    """One line on stderr, in place of tqdm's bar."""

    def __init__(self, total: int, desc: str, unit: str) -> None:
        self.total, self.desc, self.unit = total, desc, unit
        self.n, self.start, self.shown = 0, time.monotonic(), 0.0
        self.width = 0
        self._show()

    def update(self, n: int) -> None:
        self.n += n
        if self.n >= self.total or time.monotonic() - self.shown >= INTERVAL:
            self._show()

    def close(self) -> None:
        self._show("\n")

    def _show(self, end: str = "") -> None:
        self.shown = time.monotonic()
        part = f" ({100 * self.n // self.total}%)" if self.total else ""
        text = f"{self.desc}: {self.n:,} of {self.total:,}{self.unit}{part}, {self.shown - self.start:.1f} s"
        self.width = max(self.width, len(text))
        if sys.stderr is not None:  # as where there is no console
            sys.stderr.write(f"\r{text.ljust(self.width)}{end}")
            sys.stderr.flush()
