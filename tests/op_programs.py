"""Torch's own operator database as per-sample programs, and what psgrad makes of each.

Torch ships a table of its operators with sample inputs for each. Every differentiable one becomes a few small
losses: an argument is the parameter while the other arguments differ between samples, or the argument itself is
the parameter times something of the sample; in the function, the method and the in-place spelling.

`python -m tests.op_programs [names ...]` prints a line for every operator.
"""

import argparse
import itertools
import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

import psgrad

N = 3
LARGEST = 2000  # elements of a sample input
TRIED = 60  # sample inputs of an operator that are looked at
SPELLINGS = ("function", "method", "inplace")
CLASSES = ("nothing", "exact", "op loop", "loop", "writes", "error", "wrong")  # from good to bad

# Operators that compute in a smaller type, where a weighted sum is rounded in another order than the loop's.
ROUNDING = {"bfloat16": 2.0**-7, "half": 2.0**-10}


# ---- torch's table ---------------------------------------------------------------------------------------------


@cache
def operators() -> dict[str, Any]:
    """Every operator of torch's table that is differentiable in float64, by name and variant."""
    try:
        import expecttest  # noqa: F401, torch's test tools want it, for what is not used here
    except ModuleNotFoundError:
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    found = [op for op in op_db if op.supports_autograd and torch.float64 in op.supported_dtypes("cpu")]
    return {".".join(filter(None, (op.name, op.variant_test_name))): op for op in found}


def _is_dense(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided


class Sample(NamedTuple):
    """A sample input of torch's table, taken apart."""

    leaves: list[Any]
    spec: optree.PyTreeSpec
    finish: Callable[[Any], Any]  # what makes a function with a gradient of the output: eigenvectors have no sign

    def call(self, op: Callable[..., Any], leaves: list[Any]) -> Any:
        first, args, kwargs = optree.tree_unflatten(self.spec, leaves)
        return self.finish(op(first, *args, **kwargs))

    @property
    def first(self) -> Any:
        return optree.tree_unflatten(self.spec, self.leaves)[0]

    @property
    def kind(self) -> str:
        """What makes this sample input another than its neighbours: options and dimensions, not sizes."""
        return repr([leaf.dim() if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]) + repr(self.spec)

    @property
    def floats(self) -> list[int]:
        return [i for i, leaf in enumerate(self.leaves) if _is_dense(leaf) and leaf.dtype == torch.float64]


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _inputs(op: Any) -> Iterator[Any]:
    """The sample inputs of an operator, without torch's warnings about them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield from op.sample_inputs("cpu", torch.float64)


def samples_of(op: Any, count: int) -> list[Sample]:
    """`count` small sample inputs of distinct kinds, those without elements last; or the smallest one."""
    torch.manual_seed(0)
    random.seed(0)
    kinds: set[str] = set()
    small: list[Sample] = []
    others: list[tuple[int, Sample]] = []
    for given in itertools.islice(_inputs(op), TRIED):
        leaves, spec = optree.tree_flatten((given.input, given.args, given.kwargs), none_is_leaf=True)
        sample = Sample(list(map(_detached, leaves)), spec, given.output_process_fn_grad)
        if not sample.floats or sample.kind in kinds:
            continue
        kinds.add(sample.kind)
        sizes = [leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)]
        if 0 in sizes or sum(sizes) > LARGEST:
            others.append((0 if 0 in sizes else sum(sizes), sample))
            continue
        small.append(sample)
        if len(small) == count:
            break
    empty = [sample for size, sample in others if size == 0]
    return (small + empty)[:count] or [min(others, key=lambda other: other[0])[1]]


# ---- programs --------------------------------------------------------------------------------------------------


class Program(NamedTuple):
    """A loss of one sample, with what it is asked of."""

    id: str
    fn: Callable[[Any, Any], Tensor]
    params: Any
    batch: Any
    constants: list[Tensor]


def loss_of(out: Any, scale: Tensor) -> Tensor:
    """A fixed weighting of all numbers of an output, times 1 + 0.1 `scale`."""
    total = torch.zeros((), dtype=torch.float64)
    for i, leaf in enumerate(optree.tree_leaves(out)):
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            continue
        if leaf.layout != torch.strided:
            leaf = leaf.to_dense()
        for part in (leaf.real, leaf.imag) if leaf.is_complex() else (leaf,):
            weight = torch.sin(1.7 * torch.arange(leaf.numel(), dtype=torch.float64) + i + 1).reshape(leaf.shape)
            total = total + (weight * part).sum()
    return total * (1 + 0.1 * scale)


# How far samples differ, from the most to the least: the first that an operator takes in a plain loop is used.
CHANGES = ("mixed", "each", "scaled", "same")


def _changed(t: Tensor, change: str, source: torch.Generator) -> Tensor:
    """N copies of `t`, the first as it is: floats scaled, elementwise or as a whole; indices and masks permuted."""
    copies = t.expand(N, *t.shape).clone()
    if change == "same":
        return copies
    if not (t.is_floating_point() or t.is_complex()):
        if change == "mixed":
            for n in range(1, N):
                order = torch.randperm(t.numel(), generator=source)
                copies[n] = t.reshape(-1)[order].reshape(t.shape)
        return copies
    shape = (N, *t.shape) if change != "scaled" else (N, *[1] * t.dim())
    factor = 1 + 0.1 * (torch.rand(shape, generator=source, dtype=torch.float64) - 0.5)
    factor[0] = 1
    return (copies * factor).to(t.dtype)


def _spelled(op: Any, spelling: str) -> Callable[..., Any] | None:
    if spelling == "function":
        return op.op
    if spelling == "method":
        return op.method_variant
    written = op.inplace_variant
    return None if written is None else lambda x, *args, **kwargs: written(x.clone(), *args, **kwargs)


Parts = tuple[Any, Any, Any, list[Tensor]]  # fn, params, batch, constants
How = Callable[[Callable[..., Any], Sample, int, str], Parts]


def shared(call: Callable[..., Any], sample: Sample, arg: int, change: str) -> Parts:
    """Argument `arg` is the parameter; the other tensors differ between samples."""
    source = torch.Generator().manual_seed(arg)
    places = [i for i, leaf in enumerate(sample.leaves) if _is_dense(leaf) and i != arg]
    batch = [_changed(sample.leaves[i], change, source) for i in places]
    scale = torch.linspace(-1, 1, N, dtype=torch.float64)

    def fn(param: Tensor, row: Any) -> Tensor:
        leaves = list(sample.leaves)
        leaves[arg] = param
        for place, leaf in zip(places, row[0], strict=True):
            leaves[place] = leaf
        return loss_of(sample.call(call, leaves), row[1])

    return fn, sample.leaves[arg].clone(), (batch, scale), []


def scaled(call: Callable[..., Any], sample: Sample, arg: int, change: str) -> Parts:
    """Argument `arg` is the parameter times a factor of the sample; the other tensors are constants."""
    source = torch.Generator().manual_seed(arg)
    factor = _changed(torch.ones_like(sample.leaves[arg]), change, source)
    scale = torch.linspace(-1, 1, N, dtype=torch.float64)

    def fn(param: Tensor, row: Any) -> Tensor:
        leaves = list(sample.leaves)
        leaves[arg] = param * row[0]
        return loss_of(sample.call(call, leaves), row[1])

    constants = [leaf for i, leaf in enumerate(sample.leaves) if _is_dense(leaf) and i != arg]
    return fn, sample.leaves[arg].clone(), (factor, scale), constants


def everything(call: Callable[..., Any], sample: Sample, arg: int, change: str) -> Parts:
    """All arguments are parameters, each times a factor of the sample; `arg` is not used."""
    source = torch.Generator().manual_seed(arg)
    places = sample.floats
    factors = [_changed(torch.ones_like(sample.leaves[i]), change, source) for i in places]
    scale = torch.linspace(-1, 1, N, dtype=torch.float64)

    def fn(params: Any, row: Any) -> Tensor:
        leaves = list(sample.leaves)
        for place, p, f in zip(places, params, row[0], strict=True):
            leaves[place] = p * f
        return loss_of(sample.call(call, leaves), row[1])

    return fn, [sample.leaves[i].clone() for i in places], (factors, scale), []


def programs_of(name: str, count: int, thorough: bool = False) -> Iterator[tuple[str, Callable[[str], Program]]]:
    """(spelling, what makes the program for a change) of the first `count` sample inputs of an operator.

    `thorough`: methods and in-place spellings of all sample inputs, not just of the first; and all arguments as
    parameters at once.
    """
    op = operators()[name]
    for k, sample in enumerate(samples_of(op, count)):
        spellings = SPELLINGS if isinstance(sample.first, Tensor) and (k == 0 or thorough) else SPELLINGS[:1]
        hows: list[tuple[How, int]] = [(how, arg) for arg in sample.floats for how in (shared, scaled)]
        if thorough and len(sample.floats) > 1:
            hows.append((everything, -1))
        for spelling, (how, arg) in itertools.product(spellings, hows):
            call = _spelled(op, spelling)
            if call is not None:
                title = f"{name} {spelling} input {k} argument {arg} {how.__name__}"
                yield spelling, partial(_made, title, how, call, sample, arg)


def _made(title: str, how: How, call: Callable[..., Any], sample: Sample, arg: int, change: str) -> Program:
    return Program(f"{title} {change}", *how(call, sample, arg, change))


# ---- what psgrad makes of one ----------------------------------------------------------------------------------


SEEDED = "fn seeds the random numbers that it draws"
INPUTS = ("params", "batch", "constants")


class Verdict(NamedTuple):
    kind: str  # of CLASSES
    detail: str
    program: str


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' | '.join(lines[:2]) if lines else ''}"[:300]


def rung(messages: Iterable[str]) -> str:
    """How far down the ladder a call went, from its FallbackWarnings."""
    told = list(messages)
    if any("in a loop over samples: exact, but slow" in text for text in told):
        return "loop"
    return "op loop" if any("loop" in text for text in told) else "exact"


def _bits(tree: Any) -> list[bytes]:
    return [t.detach().resolve_conj().resolve_neg().contiguous().numpy().tobytes() for t in optree.tree_leaves(tree)]


def _expected(program: Program) -> tuple[Any, Tensor]:
    """Gradients and losses by a plain loop."""
    fn, params = program.fn, program.params
    grads = psgrad.testing.loop_grads(fn, params, optree.tree_map(torch.clone, program.batch))
    rows = [optree.tree_map(lambda t, n=n: t[n].clone(), program.batch) for n in range(N)]
    return grads, torch.stack([fn(optree.tree_map(torch.clone, params), row).detach() for row in rows])


def _differs(what: str, found: Any, wanted: Any, rounding: float = 0.0) -> str | None:
    """What is wrong with `found`, in a few words; `rounding` of the largest number is allowed."""
    for a, b in zip(optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{what} {tuple(a.shape)} {a.dtype} in place of {tuple(b.shape)} {b.dtype}"
        finite = b[b.isfinite()]
        size = float(finite.abs().max()) if finite.numel() else 0.0
        if not torch.allclose(a, b, rtol=1e-7, atol=max(1e-9, rounding) * max(1.0, size), equal_nan=True):
            gap = float((a - b).abs().nan_to_num(torch.inf).max())
            return f"{what} off by {gap:.2g} of {size:.2g}"
    return None


def _asked(program: Program, expected: tuple[Any, Tensor], **options: Any) -> str | None:
    """Gradients, losses, norms and a clipped sum compared with the loop's: what is wrong."""
    call = (program.fn, program.params, program.batch)
    grads, values = expected
    rows = torch.cat([t.reshape(N, -1) for t in optree.tree_leaves(grads)], 1)
    norms = rows.norm(dim=1)
    found, losses = psgrad.per_sample_grads(*call, return_value=True, **options)
    wrong = _differs("grads", found, grads) or _differs("values", losses, values)
    wrong = wrong or _differs("norms", psgrad.per_sample_norms(*call, **options), norms)
    if wrong or not rows.isfinite().all():
        return wrong
    bound = float(norms.median()) or 1.0
    weights = (bound / norms).clamp(max=1)
    clipped = psgrad.clipped_grad(*call, bound, **options)
    wanted = optree.tree_map(lambda t: torch.einsum("n,n...->...", weights, t), grads)
    return _differs("clipped", clipped.grad, wanted, ROUNDING.get(program.id.partition(" ")[0], 0.0))


def judged(program: Program) -> Verdict | None:
    """What psgrad makes of a program; None where a plain loop cannot run it.

    Operators of the table that draw random numbers set a seed first. Where psgrad takes that for what it is, the
    program runs once more with samples that share their draws, which shows the operator itself.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = _expected(program)
        except Exception:
            return None
    verdict = _compared(program, expected)
    return _compared(program, expected, randomness="same") if SEEDED in verdict.detail else verdict


def _compared(program: Program, expected: tuple[Any, Tensor], **options: Any) -> Verdict:
    inputs = (program.params, program.batch, program.constants)
    before = [_bits(part) for part in inputs]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", psgrad.FallbackWarning)
        if any(g.any() for g in optree.tree_leaves(expected[0])):
            warnings.simplefilter("error", psgrad.UnusedParametersWarning)
        try:
            wrong = _asked(program, expected, **options)
        except Exception as error:
            return Verdict("error", _first_line(error), program.id)
    changed = [name for name, part, old in zip(INPUTS, inputs, before, strict=True) if _bits(part) != old]
    if changed:
        return Verdict("writes", f"{', '.join(changed)}; {wrong or 'right otherwise'}", program.id)
    if wrong:
        return Verdict("wrong", wrong, program.id)
    messages = [str(w.message) for w in told]
    return Verdict(rung(messages), " | ".join(messages[0].splitlines()[1:]) if messages else "", program.id)


def verdicts(name: str, count: int, thorough: bool = False) -> dict[str, list[Verdict]]:
    """The verdicts for each spelling of an operator, the worst first."""
    found: dict[str, list[Verdict]] = {}
    for spelling, make in programs_of(name, count, thorough):
        verdict = next(filter(None, (judged(make(change)) for change in CHANGES)), None)
        if verdict is not None:
            found.setdefault(spelling, []).append(verdict)
    for each in found.values():
        each.sort(key=lambda verdict: -CLASSES.index(verdict.kind))
    return found


def survey(names: Iterable[str] = (), count: int = 3, thorough: bool = False, every: bool = False) -> None:
    """A line for each operator and spelling, the worst program's or `every`, and how many there are of each class."""
    counts: dict[str, int] = dict.fromkeys(CLASSES, 0)
    for name in names or operators():
        found = verdicts(name, count, thorough)
        found = found or {"function": [Verdict("nothing", "no sample input that a loop can run", name)]}
        for spelling, each in found.items():
            for verdict in [v for v in each if v.kind != "exact"] if every else each[:1]:
                print(f"{name:45} {spelling:9} {verdict.kind:8} {verdict.program} {verdict.detail}", flush=True)
        counts[max((each[0].kind for each in found.values()), key=CLASSES.index)] += 1
    print(counts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--count", type=int, default=3, help="sample inputs of each operator")
    parser.add_argument("--thorough", action="store_true", help="all spellings, and all arguments at once")
    parser.add_argument("--every", action="store_true", help="every program that is not exact, not just the worst")
    given = parser.parse_args()
    torch.set_num_threads(1)
    survey(given.names, given.count, given.thorough, given.every)
