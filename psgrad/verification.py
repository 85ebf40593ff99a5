"""verify: what psgrad gives for a few samples, beside a plain loop over the user's own function."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from . import display
from .annotations import Randomness
from .engine.ladder import differentiating
from .engine.problem import Problem
from .engine.rule_call import UseRecord
from .engine.validate import check_positive, validated
from .errors import ArgumentError, PsgradError, VerificationError, place_of
from .plain_loop import Draws, Looped, loop, nudged, target_of
from .quantities.clipped import clipped_grad
from .quantities.grads import per_sample_grads
from .quantities.norms import per_sample_norms
from .streaming.stream import refuse_inside_transforms
from .testing import _logged


class Comparison(NamedTuple):
    """One quantity beside the plain loop's, at the place where it is furthest from it.

    Attributes:
        quantity: what was compared: "losses", "gradients", "norms", ...
        param: the path of the parameter; "" for a number per sample.
        sample: which sample; None: a sum over all.
        difference: how far the two are apart.
        relative: the difference over the largest number there.
        allowed: the difference that rounding may make.
    """

    quantity: str
    param: str
    sample: int | None
    difference: float
    relative: float
    allowed: float

    @property
    def agrees(self) -> bool:
        """Whether the difference is allowed."""
        return self.difference <= self.allowed

    @property
    def excess(self) -> float:
        """How far this is from agreeing; at most 1 where it does."""
        return self.difference / self.allowed if self.allowed else math.inf if self.difference else 0.0

    @property
    def where(self) -> str:
        """The parameter and the sample, in words."""
        sample = "" if self.sample is None else f"sample {self.sample}"
        return ", ".join(part for part in (self.param, sample) if part)


@dataclass(frozen=True)
class Verification:
    """What `verify` has compared. Prints as a few lines; renders as a table in notebooks.

    Attributes:
        samples: how many were compared.
        of: how many the batch has.
        against: what the plain loop called: "the module itself", or "fn itself".
        comparisons: a `Comparison` for each quantity.
        how: how many uses of parameters went by rules, by vmap, or in a loop over samples.
        unused: parameters that no gradient reaches: zeros on both sides.
        small: parameters with gradients so small beside the others that they tell nothing.
        nonfinite: parameters with gradients that are NaN or infinite, on both sides.
        draws: what was done about random numbers; "" where `fn` draws none.
    """

    samples: int
    of: int
    against: str
    comparisons: tuple[Comparison, ...]
    how: str
    unused: tuple[str, ...]
    small: tuple[str, ...]
    nonfinite: tuple[str, ...]
    draws: str

    def __str__(self) -> str:
        width = max(len(c.quantity) for c in self.comparisons)
        lines = [f"{self.samples} of {self.of} samples agree with {self.against}, called plainly"]
        lines += [
            f"  {c.quantity.ljust(width)}  off by {c.difference:.1e} at most, {self._beside(c)} "
            f"({c.where}; allowed {c.allowed:.1e})"
            if c.difference
            else f"  {c.quantity.ljust(width)}  equal"
            for c in self.comparisons
        ]
        return "\n".join([*lines, self.how, *self._remarks()])

    def _beside(self, c: Comparison) -> str:
        """How much a difference is; where the numbers themselves are rounding, a part of them says nothing."""
        return "where all is rounding" if c.param in self.small else f"{c.relative:.1e} of the largest"

    def _remarks(self) -> list[str]:
        lines = []
        if self.unused:
            lines.append("no gradient reaches, zeros on both sides: " + _listed(self.unused))
        if self.small:
            lines.append("gradients too small beside the others to tell: " + _listed(self.small))
        if self.nonfinite:
            lines.append("gradients that are not finite, on both sides: " + _listed(self.nonfinite))
        return [*lines, self.draws] if self.draws else lines

    __repr__ = __str__

    @display.safely
    def _repr_html_(self) -> str:
        """Each quantity, how far it is from the plain loop's, and how much of what rounding may do that is."""
        rows = [
            (
                c.quantity,
                c.where if c.difference else "",
                f"{c.difference:.1e}" if c.difference else "equal",
                f"{c.relative:.1e}" if c.difference and c.param not in self.small else "",
                f"{c.allowed:.1e}",
                display.percent(c.excess) if c.difference else "",
            )
            for c in self.comparisons
        ]
        head = ("quantity", "furthest at", "off by", "of the largest", "allowed", "of that")
        return display.page(
            f"{self.samples} of {self.of} samples agree with {self.against}, called plainly",
            display.table(head, rows, left=2),
            display.notes([self.how, *self._remarks()]),
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 6 else [*names[:5], f"and {len(names) - 5} more"])


def verify(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    samples: int | None = 3,
    in_dims: Any = 0,
    has_aux: bool = False,
    randomness: Randomness = "different",
    rtol: float | None = None,
    atol: float | None = None,
) -> Verification:
    """Compare psgrad with a plain loop over `fn` on a few samples: the first thing to call with a new model.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> fn, params = psgrad.from_module(model, torch.nn.functional.cross_entropy)
    >>> report = psgrad.verify(fn, params, (torch.randn(5, 4), torch.randint(3, (5,))))
    >>> report.against, report.how
    ('the module itself', '4 of 4 uses of parameters by rules')
    >>> [c.quantity for c in report.comparisons]
    ['losses', 'gradients', 'norms', 'clipped sum', 'gradients, chunk_size=2']

    The loop runs one sample at a time by ordinary autograd, and shares nothing with psgrad's engine. What
    `from_module` made is compared with the module itself, called on a batch of one, and with the gradients of its
    own parameters: a parameter that the module hides from psgrad shows, too.

    - Where `fn` draws random numbers, all samples share one draw, in psgrad's runs (`randomness="same"`) and in the
      loop, whose generators are put back before every sample. Dropout is then compared number by number.
    - A difference is measured against the largest number of the same gradient, and against what rounding does to the
      plain loop itself: a gradient that is nothing but rounding, as that of a bias in front of a normalisation, is
      said to be so.
    - Nothing is left behind: generators, buffers and `.grad` are as they were.

    Args:
        fn, params, batch, in_dims, has_aux, randomness: as for `per_sample_grads`.
        samples: how many samples to compare, the first ones; None: all.
        rtol: what may differ, as a part of a gradient's largest number. Unless given, the square root of the
            precision of the coarsest dtype that `fn` computes in: 3e-4 for float32, 1.5e-8 for float64.
        atol: what may differ besides, at any size. Unless given, 16 times what the plain loop's numbers move by when
            the last digit of every parameter does.

    Returns:
        A `Verification`: print it.

    Raises:
        VerificationError: something differs by more than rounding can explain; the message names the parameter, the
            sample, the ops that use it. Also where `fn` is not a function: another loss for the same sample.
        ArgumentError: the batch has no samples; and as `per_sample_grads`.
    """
    refuse_inside_transforms("verify")
    check_positive("samples", samples)
    whole = validated(fn, params, batch, in_dims=in_dims, randomness=randomness, has_aux=has_aux)
    if whole.n == 0:
        raise ArgumentError("the batch has no samples, so there is nothing to verify\n  give at least one.")
    problem = whole.rows(slice(0, whole.n if samples is None else samples))
    draws = Draws(problem)
    try:
        with differentiating():
            return _verified(problem, whole.n, params, draws, rtol, atol)
    finally:
        draws.again()


# ---- psgrad beside it ---------------------------------------------------------------------------------


class _Run(NamedTuple):
    """The arguments of psgrad's public functions for the samples that are compared."""

    problem: Problem
    params: Any
    batch: Any
    in_dims: Any
    draws: Draws
    randomness: Any

    def grads(self, **options: Any) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        """Gradients of each parameter, losses, aux."""
        self.draws.again()
        has_aux = self.problem.has_aux
        grads, values = per_sample_grads(
            self.problem.fn, self.params, self.batch, return_value=True, has_aux=has_aux, **self._shared(), **options
        )
        aux: Any = ()
        if has_aux:
            values, aux = values
        return optree.tree_leaves(grads), values, optree.tree_leaves(aux)

    def norms(self, **options: Any) -> Any:
        self.draws.again()
        return per_sample_norms(self._loss(), self.params, self.batch, **self._shared(), **options)

    def clipped(self, bound: float) -> list[Tensor]:
        self.draws.again()
        found = clipped_grad(self._loss(), self.params, self.batch, bound, nonfinite="zero", **self._shared())
        return optree.tree_leaves(found.grad)

    def _shared(self) -> dict[str, Any]:
        return {"in_dims": self.in_dims, "randomness": self.randomness}

    def _loss(self) -> Callable[..., Any]:
        fn = self.problem.fn
        return (lambda params, sample: fn(params, sample)[0]) if self.problem.has_aux else fn


def _verified(
    problem: Problem, of: int, params: Any, draws: Draws, rtol: float | None, atol: float | None
) -> Verification:
    spec = problem.batch_spec
    in_dims = spec.unflatten([0 if b else None for b in problem.batched])
    run = _Run(problem, params, spec.unflatten(problem.batch), in_dims, draws, problem.randomness)
    grads, losses, aux = run.grads()  # before anything else runs: what psgrad refuses might change the parameters
    drawing = _Drawing(draws.torch_drew, draws.others_drew)
    if drawing.torchs and problem.randomness == "different":
        same = problem._replace(randomness="same", draws_from=draws.torchs)
        run = run._replace(randomness="same", problem=same)
        grads, losses, aux = run.grads()
    target = target_of(run.problem, params)
    looped = loop(target, draws)
    wanted = _Wanted(looped, rtol)
    wanted.check_again(target.name)
    if atol is not None:
        wanted.slack = [[atol for _ in row] for row in wanted.slack]
    else:
        near = run.problem._replace(params=nudged(problem.params, looped.precision))
        wanted.measure(loop(target_of(near, near.params_spec.unflatten(near.params)), draws))
    names = problem.names
    compared = [
        wanted.beside_losses(losses),
        wanted.beside_grads("gradients", grads, names),
        wanted.beside_norms(run, names),
        wanted.beside_clipped(run, names),
    ]
    if problem.n > 1 and not drawing.others:  # Python's numbers are drawn once for each chunk
        step = 2 if problem.n > 2 else 1
        chunked = run.grads(chunk_size=step)[0]
        compared.append(wanted.beside_grads(f"gradients, chunk_size={step}", chunked, names))
    compared += wanted.beside_aux(aux)
    uses, how = _uses(run)
    if not all(c.agrees for c in compared):
        if not compared[0].agrees:
            drawing.check(run, wanted)
        raise _mismatch(compared, uses, how, target.name, grads, names)

    def those(holds: Callable[[int], bool]) -> tuple[str, ...]:
        return tuple(name for i, name in enumerate(names) if holds(i))

    unused = those(wanted.is_unused)
    return Verification(
        problem.n,
        of,
        target.name,
        tuple(compared),
        "the loss depends on no parameter" if len(unused) == len(names) else how,
        unused,
        those(wanted.is_small),
        those(wanted.is_nonfinite),
        drawing.said(run),
    )


# ---- comparing ----------------------------------------------------------------------------------------


_STEPS = 16  # how many roundings of the last digit may add up, beside those of the plain loop itself


def _largest(t: Tensor | None) -> float:
    """The largest finite magnitude; None stands for zeros."""
    if t is None:
        return 0.0
    t = t.detach().cpu().double()
    return float(torch.where(t.isfinite(), t.abs(), 0.0).max()) if t.numel() else 0.0


def _norm(t: Tensor | None) -> float:
    return 0.0 if t is None else float(t.detach().cpu().double().norm())


def _difference(ours: Tensor, want: Tensor | None) -> float:
    """The largest difference; a NaN beside a NaN is none, a NaN beside a number or another shape is infinite."""
    ours = ours.detach().cpu().double()
    want = torch.zeros_like(ours) if want is None else want.detach().cpu().double()
    if ours.shape != want.shape:
        return math.inf
    equal = (ours == want) | (ours.isnan() & want.isnan())
    apart = torch.where(equal, 0.0, (ours - want).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    return float(apart.max()) if apart.numel() else 0.0


def _furthest(found: Sequence[Comparison]) -> Comparison:
    return max(found, key=lambda c: (c.excess, c.difference))


class _Wanted:
    """What the plain loop gave, and by how much other numbers may differ from that.

    By a part `rtol` of the largest number, and by some `slack`: numbers that cancel out, such as the gradient of a bias
    in front of a normalisation, leave nothing but the rounding of larger numbers. How much that is, a second loop
    tells, with parameters that differ in their last digit.
    """

    def __init__(self, looped: Looped, rtol: float | None) -> None:
        self.looped, self.grads = looped, looped.grads
        self.rtol = looped.precision**0.5 if rtol is None else rtol
        self.sizes = [[_largest(g) for g in row] for row in self.grads]
        self.norms = torch.tensor([[_norm(g) for g in row] for row in self.grads], dtype=torch.float64)  # (N, params)
        # of each sample: one for each parameter, for the norm, for the loss, for each leaf of aux
        self.slack = [[0.0] * (len(row) + 2 + len(aux)) for row, aux in zip(self.grads, looped.aux, strict=True)]

    def measure(self, near: Looped) -> None:
        """Set `slack` by a loop whose parameters are almost the same."""
        for n, (row, other) in enumerate(zip(self.grads, near.grads, strict=True)):
            moved = [0.0 if g is None or h is None else _difference(h, g) for g, h in zip(row, other, strict=True)]
            both = [(self.looped.losses[n], near.losses[n]), *zip(self.looped.aux[n], near.aux[n], strict=True)]
            moved += [math.hypot(*moved), *(_difference(h, g) for g, h in both)]
            least = 4 * self.looped.precision * max(self.sizes[n])
            self.slack[n] = [least + (_STEPS * m if math.isfinite(m) else 0.0) for m in moved]

    def compared(
        self, quantity: str, param: str, sample: int | None, ours: Tensor, want: Tensor | None, slack: float
    ) -> Comparison:
        size, difference = _largest(want), _difference(ours, want)
        relative = difference / size if size else math.inf if difference else 0.0
        return Comparison(quantity, param, sample, difference, relative, self.rtol * size + slack)

    def check_again(self, what: str) -> None:
        """A loss is a function of parameters and sample, or there is nothing to compare."""
        first, again = float(self.looped.losses[0]), self.looped.again
        if abs(first - again) > self.rtol * max(abs(first), abs(again)):
            raise VerificationError(
                f"{what}, called twice on the first sample, gives {again:.6g} and {first:.6g}\n"
                "  psgrad needs a function of params and sample: fn must not count its calls, change what it closes\n"
                "  over, or draw from a generator of its own."
            )

    def beside_losses(self, losses: Tensor) -> Comparison:
        """Of all samples, or of the first ones."""
        at = len(self.grads[0]) + 1
        return _furthest(
            [
                self.compared("losses", "", n, ours, self.looped.losses[n], self.slack[n][at])
                for n, ours in enumerate(losses)
            ]
        )

    def beside_grads(self, quantity: str, grads: Sequence[Tensor], names: Sequence[str]) -> Comparison:
        return _furthest(
            [
                self.compared(quantity, name, n, rows[n], row[i], self.slack[n][i])
                for i, (name, rows) in enumerate(zip(names, grads, strict=True))
                for n, row in enumerate(self.grads)
            ]
        )

    def beside_norms(self, run: _Run, names: Sequence[str]) -> Comparison:
        """Norms of whole gradients; where they differ, the parameter by whose norms they do."""
        norms, want, slack = run.norms(), self.norms.norm(dim=1), [row[len(names)] for row in self.slack]
        found = [self.compared("norms", "", n, norms[n], want[n], slack[n]) for n in range(len(want))]
        if all(c.agrees for c in found):
            return _furthest(found)
        each = optree.tree_leaves(run.norms(per_param=True))
        parts = [
            self.compared("norms", name, n, rows[n], self.norms[n, i], slack[n])
            for i, (name, rows) in enumerate(zip(names, each, strict=True))
            for n in range(len(want))
        ]
        return _furthest([c for c in parts if not c.agrees] or found)

    def beside_clipped(self, run: _Run, names: Sequence[str]) -> Comparison:
        """The sum of gradients clipped to the middle one of their norms, so that some are and some are not."""
        norms = self.norms.norm(dim=1)
        finite = norms[norms.isfinite()]
        bound = float(finite.median()) if finite.numel() and float(finite.median()) > 0 else 1.0
        weights = [bound / max(float(n), bound) if n.isfinite() else 0.0 for n in norms]
        found = []
        for i, (name, ours) in enumerate(zip(names, run.clipped(bound), strict=True)):
            counted = [(w, row[i]) for w, row in zip(weights, self.grads, strict=True) if w]
            parts = [w * g.detach().cpu().double() for w, g in counted if g is not None]
            want = torch.stack(parts).sum(0) if parts else None
            # what the parts may differ by; the sum itself may be small
            slack = sum(
                w * (self.rtol * size[i] + s[i]) for w, size, s in zip(weights, self.sizes, self.slack, strict=True)
            )
            found.append(self.compared("clipped sum", name, None, ours, want, slack))
        return _furthest(found)

    def beside_aux(self, aux: Sequence[Tensor]) -> list[Comparison]:
        """Floating-point leaves of aux; a rounding may change an integer, such as the place of the largest logit."""
        first = len(self.grads[0]) + 2
        found = [
            self.compared("aux", "", n, rows[n], want[i], self.slack[n][first + i])
            for i, rows in enumerate(aux)
            for n, want in enumerate(self.looped.aux)
            if rows.is_floating_point()
        ]
        return [_furthest(found)] if found else []

    def is_unused(self, i: int) -> bool:
        return all(row[i] is None for row in self.grads)

    def is_small(self, i: int) -> bool:
        """Whether zeros would have done as well for parameter i, which has a gradient."""
        small = all(
            size[i] <= self.rtol * size[i] + slack[i] for size, slack in zip(self.sizes, self.slack, strict=True)
        )
        return small and not self.is_unused(i) and not self.is_nonfinite(i)

    def is_nonfinite(self, i: int) -> bool:
        return not bool(self.norms[:, i].isfinite().all())


# ---- what is said -------------------------------------------------------------------------------------


_NOT_COMPARED = (
    "  so psgrad and a plain loop cannot be compared\n  call model.eval(), or leave out what draws, and verify again."
)


class _Drawing(NamedTuple):
    """Whether `fn` draws random numbers from torch's generators, from others."""

    torchs: bool
    others: bool

    def said(self, run: _Run) -> str:
        lines = []
        if self.torchs:
            lines.append(
                f'fn draws random numbers{_draws_at(run.problem)}: compared with randomness="same", '
                "beside a loop in which every sample draws the same numbers"
            )
        if self.others:
            lines.append(
                "fn draws Python's or numpy's random numbers, which psgrad draws once for all samples of a chunk: "
                "chunks are not compared"
            )
        return "\n".join(lines)

    def check(self, run: _Run, wanted: _Wanted) -> None:
        """Refuse where losses differ since other numbers were drawn, which says nothing of psgrad."""
        if self.others:
            raise VerificationError(
                f"fn draws Python's or numpy's random numbers, and others when it runs again\n{_NOT_COMPARED}"
            )
        if not self.torchs:
            return
        try:  # torch's kernels for dropout, for one, draw other numbers under vmap
            agrees = wanted.beside_losses(_vmap_alone(run)[None]).agrees
        except Exception:
            agrees = run.problem.params[0].device.type == "cpu"
        if not agrees:
            raise VerificationError(
                f"fn draws random numbers{_draws_at(run.problem)}, and under vmap torch draws others\n{_NOT_COMPARED}"
            )


def _draws_at(problem: Problem) -> str:
    """Where vmap meets the first draw, or "" where it does not."""
    try:
        _logged(problem._replace(randomness="error").copied(), [])
    except Exception as error:
        return f" at {place_of(error)}" if "randomness error mode" in str(error) else ""
    return ""


def _uses(run: _Run) -> tuple[list[UseRecord], str]:
    """Every use of a parameter, and in words how they are handled."""
    log: list[UseRecord] = []
    run.draws.again()
    try:
        _logged(run.problem.copied(), log)
    except PsgradError:
        raise
    except Exception as error:
        return [], f"samples run in a loop, one by one: vmap refuses at {place_of(error)}"
    count = sum(len(use.params) for use in log)
    ruled = sum(len(use.params) for use in log if use.rule is not None)
    return log, f"{ruled} of {count} uses of parameters by rules" + (", the others by vmap" if ruled < count else "")


def _vmap_alone(run: _Run) -> Tensor:
    """The first sample's loss under torch's vmap, without psgrad."""
    problem = run.problem
    batched = [t[:1] for t, b in zip(problem.batch, problem.batched, strict=True) if b]

    def loss(rows: list[Tensor]) -> Tensor:
        each = iter(rows)
        sample = [next(each) if b else t for t, b in zip(problem.batch, problem.batched, strict=True)]
        return problem.call(problem.params, sample).loss

    run.draws.again()
    found: Tensor = torch.vmap(loss, randomness="same")(batched)[0]
    return found


def _mismatch(
    compared: Sequence[Comparison],
    uses: Sequence[UseRecord],
    how: str,
    target: str,
    grads: Sequence[Tensor],
    names: Sequence[str],
) -> VerificationError:
    differing = [c for c in compared if not c.agrees]
    first = next((c for c in differing if c.quantity == "gradients"), differing[0])
    of = f" of {first.param}" if first.param else ""
    where = "over all samples" if first.sample is None else f"for sample {first.sample}"
    lines = [
        f"the {first.quantity}{of} differ from those of a plain loop over samples",
        f"  {where} by {first.difference:.3g}, {first.relative:.3g} of the largest; allowed {first.allowed:.1g}",
    ]
    if others := [c.quantity for c in differing if c is not first]:
        lines.append(f"  the same goes for: {'; '.join(others)}")
    lines += [f"  {line}" for line in _uses_of(first.param, uses)] if uses else [f"  {how}"]
    if first.param and not bool(grads[names.index(first.param)].any()):
        lines.append("  psgrad's are zeros: is it held elsewhere too, in a dict or a closure, and used from there?")
    lines += [
        f"  compared with {target}, called plainly",
        "  mend the rule, if it is yours; let fn use the params that it is given; otherwise please report this.",
    ]
    error = VerificationError("\n".join(lines))
    error.comparisons = tuple(compared)
    return error


def _uses_of(param: str, uses: Sequence[UseRecord]) -> list[str]:
    """What uses the parameter, or where none is named, what has a rule: a line each, at most five."""
    found = dict.fromkeys(
        f"{p.source.name}: {use.op} at {use.place}, by {f'the rule {use.rule}' if use.rule else 'vmap'}"
        for use in uses
        for p in use.params
        if param in p.source.name and (param or use.rule)
    )
    lines = list(found)
    return lines if len(lines) <= 5 else [*lines[:5], f"and {len(lines) - 5} more uses"]
