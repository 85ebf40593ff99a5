"""explain: what a call will do with every parameter, before it does it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import display
from .annotations import Randomness
from .engine.batched import run_together
from .engine.collectors import Collector
from .engine.ladder import differentiating, generators_kept
from .engine.problem import Problem
from .engine.rule_call import UseRecord
from .engine.signals import Diverged, NeedsLoop, Signal
from .engine.validate import validated
from .errors import ArgumentError, PsgradError, home_of, place_of, reason_of
from .factors.base import Factor
from .factors.costs import Plan
from .quantities.grads import Grads
from .registry.params import Param, Source
from .streaming import budget
from .torch_ import levels
from .torch_.compiler import uncompiled
from .torch_.tracing import NO_VALUES


class Row(NamedTuple):
    """One use of one parameter.

    Attributes:
        param: its path.
        shape: of what the op uses: the parameter, or a view of it.
        op: the function, as people write it.
        place: where it is called: file, line and function.
        how: "rule linear", or "vmap: " and why there is no rule.
        factor: what the backward yields.
        strategy: how that is written out.
        flops: multiply-adds of doing so, for the whole batch.
        bytes: of this use's gradients, for the whole batch.
    """

    param: str
    shape: tuple[int, ...]
    op: str
    place: str
    how: str
    factor: str
    strategy: str
    flops: int
    bytes: int


@dataclass(frozen=True)
class Report:
    """What `per_sample_grads` will do. Prints as a table; renders as HTML in notebooks.

    Attributes:
        rows: a `Row` for each use of each parameter, in the order of the calls: `param`, `shape`, `op`, `place`, `how`,
            `factor`, `strategy`, `flops`, `bytes`.
        unused: parameters that no op uses: their gradients are zeros.
        samples: how many the batch has.
        parameters: how many numbers are in params.
        result_bytes: of the N x P result.
        peak_bytes: at most beyond inputs and result, all samples at once.
        chunk_size: what `max_bytes` gives; None without it.
        note: how this was found out, where not from shapes alone.
        looped: ops that run in a loop over samples, each with its place and the reason.
    """

    rows: tuple[Row, ...]
    unused: tuple[str, ...]
    samples: int
    parameters: int
    result_bytes: int
    peak_bytes: int
    chunk_size: int | None
    note: str
    looped: tuple[str, ...] = ()

    _SHOWN = 60  # rows in a notebook
    _HEAD = ("parameter", "shape", "op", "at", "how", "factor", "strategy", "mult-adds", "bytes")

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                row.param,
                "x".join(map(str, row.shape)) or "scalar",
                row.op,
                row.place,
                row.how,
                row.factor,
                row.strategy,
                display.short(row.flops) if row.flops else "",
                display.short(row.bytes, "B"),
            )
            for row in self.rows
        ]

    def _totals(self) -> list[str]:
        lines = [
            f"{self.samples} samples x {display.short(self.parameters)} parameters: "
            f"result {display.short(self.result_bytes, 'B')}, at most {display.short(self.peak_bytes, 'B')} beside it",
            f"{self._ruled()} of {len(self.rows)} uses by a rule",
        ]
        if self.chunk_size is not None:
            lines.append(f"chunk_size {self.chunk_size}")
        return lines + self._remarks()

    def _ruled(self) -> int:
        return sum(row.how.startswith("rule") for row in self.rows)

    def _remarks(self) -> list[str]:
        lines = ["not used, so zeros: " + ", ".join(self.unused)] if self.unused else []
        lines += [f"in a loop over samples: {op}" for op in self.looped]
        return [*lines, self.note] if self.note else lines

    def __str__(self) -> str:
        cells = [self._HEAD, *self._cells()]
        widths = [max(len(row[i]) for row in cells) for i in range(len(self._HEAD))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], "", *self._totals()])

    __repr__ = __str__

    @display.safely
    def _repr_html_(self) -> str:
        """The table, with each use's share of the memory; what goes by vmap stands out."""
        pairs = [
            ("samples", f"{self.samples:,}"),
            ("parameters", display.short(self.parameters)),
            ("result", display.short(self.result_bytes, "B")),
            ("at most beside it", display.short(self.peak_bytes, "B")),
            ("uses by a rule", f"{self._ruled()} of {len(self.rows)}"),
        ]
        if self.chunk_size is not None:
            pairs.append(("chunk_size", f"{self.chunk_size:,}"))
        total = sum(row.bytes for row in self.rows)
        rows: list[tuple[str, ...]] = []
        for row, cells in zip(self.rows[: self._SHOWN], self._cells(), strict=False):
            how = cells[4] if row.how.startswith("rule") else display.marked(cells[4])
            rows.append((*cells[:4], how, *cells[5:], display.meter(row.bytes / total if total else 0.0)))
        left = len(self.rows) - len(rows)
        more = f"{left} more uses of parameters" if left else ""
        return display.page(
            "What per_sample_grads will do",
            display.facts(pairs),
            display.table((*self._HEAD, "share"), rows, left=7, more=more) if rows else "",
            display.notes(self._remarks()),
        )


class _Listing(Collector):
    """Keeps what factors say of themselves, and never materialises one."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.found: list[tuple[object, Source, str, Plan]] = []  # no factor: it would keep the graph alive
        self.pulled: set[int] = set()  # parameters that have a gradient

    def add(self, param: Param, factor: Factor, use: object = None) -> None:
        self.found.append((use, param.source, type(factor).__name__, factor.plan))
        self.pulled.add(param.source.index)

    def add_dense(self, source: Source, grads: Tensor) -> None:
        self.pulled.add(source.index)

    def has(self, source: Source) -> bool:
        return source.index in self.pulled

    def pull(self, derived: Sequence[Source], roots: Sequence[Source]) -> None:
        values, traced = [source.traced() for source in derived], [source.traced() for source in roots]
        zeros = [torch.zeros_like(value) for value in values]
        reached = torch.autograd.grad(values, traced, zeros, allow_unused=True)
        self.pulled |= {source.index for source, grad in zip(roots, reached, strict=True) if grad is not None}


def _listed(problem: Problem) -> tuple[list[UseRecord], _Listing, tuple[str, ...]]:
    """Every use of a parameter, what came of it, and the ops that ran in a loop over samples."""
    log: list[UseRecord] = []
    listing = _Listing(problem)
    looped = run_together(problem, listing, log).looped
    return log, listing, looped


@uncompiled
def explain(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    in_dims: Any = 0,
    has_aux: bool = False,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
) -> Report:
    """What `per_sample_grads(fn, params, batch)` will do with every parameter, before it does it.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> fn, params = psgrad.from_module(model, torch.nn.functional.cross_entropy)
    >>> report = psgrad.explain(fn, params, (torch.randn(5, 4), torch.zeros(5, dtype=torch.long)))
    >>> [(row.param, row.how, row.factor) for row in report.rows][:2]
    [("params['0.weight']", 'rule linear', 'Outer'), ("params['0.bias']", 'rule linear', 'Dense')]
    >>> report.result_bytes
    1340

    Runs `fn` on tensors that have shapes and no memory. Where that does not do, as `fn` looks at values (a
    data-dependent branch) or torch does not know an op's shapes, it runs on the first sample instead and the
    report's last line says why. Never needs the memory of the result.

    Args:
        fn, params, batch, in_dims, has_aux, randomness: as for `per_sample_grads`.
        max_bytes: also work out the chunk size that this bound would give.

    Returns:
        A `Report`: print it, display it in a notebook, or read its `rows`.
    """
    problem = validated(
        fn, params, batch, in_dims=in_dims, randomness=randomness, has_aux=has_aux, save_memory=max_bytes is not None
    )
    if any(levels.is_transformed(t) for t in (*problem.params, *problem.batch) if isinstance(t, Tensor)):
        raise ArgumentError(
            "explain is called inside a torch.func transform\n  call it outside, on the function that is transformed."
        )
    bound = budget.bytes_of(max_bytes, problem.params)
    note, scale, size = "", 1, sum(p.numel() for p in problem.params)
    if problem.n == 0:
        return Report((), (), 0, size, 0, 0, None, "no samples: nothing runs")
    try:
        with budget.fake(problem) as shapes:
            rows, used, looped = _rows(*_listed(shapes.copied()))
    except PsgradError:
        raise
    except (Exception, Signal) as refusal:
        note, scale = f"{_why_run(refusal, fn)} found out by running the first sample", problem.n
        try:
            with differentiating(), generators_kept(problem):
                rows, used, looped = _rows(*_listed(problem.rows(slice(0, 1)).copied()))
        except PsgradError:
            raise
        except (Exception, NeedsLoop) as error:
            rows, used, looped = [], None, ()
            note = f"vmap refuses at {place_of(error)}: every sample runs on its own, in a loop"
    rows = [row._replace(flops=row.flops * scale, bytes=row.bytes * scale) for row in rows]
    return Report(
        tuple(rows),
        tuple(name for i, name in enumerate(problem.names) if i not in used) if used is not None else (),
        problem.n,
        size,
        problem.n * sum(p.numel() * p.element_size() for p in problem.params),
        budget.peak_bytes(problem, problem.n, problem.n, Grads()),
        None if bound is None else _chunk_size(problem, bound),
        note,
        looped,
    )


def _chunk_size(problem: Problem, bound: int) -> int:
    found = budget.chunk_size(problem, bound, Grads())
    if isinstance(found, budget.TooLittle):
        raise found.error()
    return found


def _why_run(error: BaseException, fn: Any) -> str:
    """Why shapes alone did not tell what `fn` does."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (Diverged, *NO_VALUES)):
            return "fn looks at values:"
        cause = cause.__cause__ or cause.__context__
    where = place_of(error, otherwise=f"the backward of {home_of(fn)}")  # which runs no line of the user's
    why = reason_of(error).rstrip(".")
    # of tensors that neither the user nor psgrad has put anywhere
    if "meta" in why and ("same device" in why or "two different devices" in why):
        why = "torch does not follow this derivative on tensors without memory"
    return f"shapes alone were not enough at {where}: {why};"


def _rows(
    log: list[UseRecord], listing: _Listing, looped: tuple[str, ...]
) -> tuple[list[Row], set[int] | None, tuple[str, ...]]:
    """A row for each parameter of each use, in the order of the forward; which parameters are used; ops in a loop."""
    rows = []
    used = {param.source.index for use in log for param in use.params} | listing.pulled
    for use in log:
        for param in use.params:
            n = len(param.source.leaf)
            size = n * param.value.numel() * param.value.element_size()
            name, shape = param.source.name, tuple(param.value.shape)
            if use.rule is None:
                rows.append(Row(name, shape, use.op, use.place, f"vmap: {use.reason}", "Dense", "autograd", 0, size))
                continue
            found = [f[2:] for f in listing.found if f[0] is use and f[1] is param.source]
            how = f"rule {use.rule}"
            if not found:
                rows.append(Row(name, shape, use.op, use.place, how, "none", "the loss does not depend on it", 0, 0))
            else:
                kind, plan = found[0]
                flops = sum(plan.flops for _, plan in found)  # inside a derivative there are several
                rows.append(Row(name, shape, use.op, use.place, how, kind, plan.strategy, flops, size))
    return rows, used, looped
