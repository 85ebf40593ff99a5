"""per_sample_jacobians and ntk: functions with several outputs, one output at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import optree
import torch
from torch import Tensor

from ..annotations import Group, P, Randomness
from ..engine.batched import Outcome
from ..engine.ladder import collect, differentiating, generators_kept
from ..engine.problem import Problem, generators, kind_of, rewind
from ..engine.validate import validated
from ..errors import ArgumentError, ArgumentTypeError
from ..processes.agreed import agreed
from ..processes.parcels import Matrix
from ..streaming.progress import Bar
from ..streaming.stream import (
    Counted,
    Quantity,
    Run,
    check_step,
    chunks,
    counted,
    dtype_of,
    fold,
    plan,
    refuse_inside_transforms,
)
from ..torch_.compiler import uncompiled
from .across import Rows, products_of_all, refuse_max_bytes
from .factored import FactoredGrads, factored, factored_chunk
from .grads import Grads


def _output(fn: Callable[..., Any], params: Any, sample: Any) -> Tensor:
    """One number of what `fn` returns; which, is the same for all samples, and comes with each."""
    own, which = sample
    out: Tensor = fn(params, own)
    return out.reshape(-1).index_select(0, which)


class Outputs(NamedTuple):
    """A problem for each of K numbers that `fn` returns: the last leaf of the batch says which."""

    there: Counted  # the samples that count, of the first output
    shape: tuple[int, ...]  # of what fn returns
    numbers: Tensor  # (K, 1)

    @property
    def count(self) -> int:  # type: ignore[override]  # tuples have a method of that name
        return len(self.numbers)

    def of(self, problem: Problem, k: int) -> Problem:
        """The same samples, for output k."""
        return problem._replace(batch=[*problem.batch[:-1], self.numbers[k]])

    def each(self, problem: Problem, run: Run, states: Any) -> Iterator[FactoredGrads]:
        """The factors of every output, one after the other; all draw the same random numbers, from `states` on."""
        for k in range(self.count):
            rewind(states)
            yield factored_chunk(self.of(problem, k), run)[0]


def _outputs(
    fn: Any, params: Any, batch: Any, in_dims: Any, randomness: Randomness, valid: Any, save_memory: bool
) -> Outputs:
    """The arguments checked; `fn` runs once, on the first sample, for the shape of what it returns."""
    options: dict[str, Any] = {"randomness": randomness, "save_memory": save_memory}
    plain = validated(fn, params, batch, in_dims=in_dims, **options)
    if plain.n:
        sample = plain.rows(slice(0, 1)).copied().sample(0)
    else:
        sample = [t.new_zeros(t.shape[1:]) if b else t for t, b in zip(plain.batch, plain.batched, strict=True)]
    with (
        torch.enable_grad(),
        generators_kept(plain),
    ):  # as when it is differentiated: silu has another derivative without
        tree = optree.tree_unflatten(plain.params_spec, [p.clone() for p in plain.params])
        out = fn(tree, optree.tree_unflatten(plain.batch_spec, sample))
    if not isinstance(out, Tensor) or not out.is_floating_point():
        what = f"a tensor of {out.dtype}" if isinstance(out, Tensor) else kind_of(out)
        raise ArgumentTypeError(
            f"fn must return the outputs for one sample as a tensor, but returned {what}\n"
            "  return a floating-point tensor, of any shape."
        )
    numbers = torch.arange(out.numel(), device=out.device)[:, None]
    first = numbers[0] if len(numbers) else numbers.new_zeros(1)
    problem = validated(partial(_output, fn), params, (batch, first), in_dims=(in_dims, None), **options)
    return Outputs(counted(problem, valid), tuple(out.shape), numbers)


# ---- Jacobians -------------------------------------------------------------------------------------------


@uncompiled
@agreed
def per_sample_jacobians(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    *,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    group: Group | None = None,
) -> P:
    """The Jacobian of `fn(params, sample)` with respect to params, for every sample.

    >>> fn = lambda w, x: torch.stack([(w * x).sum(), (w * x).prod()])
    >>> psgrad.per_sample_jacobians(fn, torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0], [1.0, 1.0]]))
    tensor([[[ 3.,  4.],
             [24., 12.]],
    <BLANKLINE>
            [[ 1.,  1.],
             [ 2.,  1.]]])

    The same numbers as `vmap(jacrev(fn), in_dims=(None, 0))(params, batch)`; it also answers where that refuses. One
    forward and one backward for each output, all samples together, so that besides the result only one output's part
    of it is held. All outputs of a sample draw the same random numbers.

    Args:
        fn: `fn(params, sample) -> outputs`, a floating-point tensor of any shape, the same for every sample. It runs
            once more, on the first sample, for that shape.
        params, batch, in_dims, randomness, chunk_size, max_bytes: as for `per_sample_grads`.
        valid: (N,) booleans; the other samples do not run, and their Jacobians are 0.
        progress: show a bar, as for `per_sample_grads`; a sample counts once for each output.
        group: processes that share a batch, as for `clipped_grad`. Jacobians are of this rank's samples; if a rank
            raises, all do.

    Returns:
        A pytree like params, leaves (N, *outputs, *shape).

    Raises:
        ArgumentTypeError: `fn` returns no floating-point tensor.
    """
    refuse_inside_transforms("per_sample_jacobians")
    _refuse_layers(group)
    outputs = _outputs(fn, params, batch, in_dims, randomness, valid, max_bytes is not None)
    problem, k = outputs.there.problem, outputs.count
    leaves = [p.new_zeros(problem.n, k, *p.shape) for p in problem.params]
    if problem.n and k:
        step = plan(Grads(), problem, chunk_size, max_bytes)
        assert isinstance(step, int)
        before = generators(problem.params)
        with differentiating(problem), Bar("per_sample_jacobians", problem.n * k) if progress else nullcontext() as bar:
            for i in range(k):
                rewind(before)
                found, _ = fold(Grads(), outputs.of(problem, i), step, bar=bar)
                for target, rows in zip(leaves, found, strict=True):
                    target[:, i] = rows
                del found
    whole = [outputs.there.among_zeros(t) for t in leaves]
    shaped = [t.view(len(t), *outputs.shape, *t.shape[2:]) for t in whole]
    tree: Any = optree.tree_unflatten(problem.params_spec, shaped)
    return tree  # type: ignore[no-any-return]


# ---- the neural tangent kernel ---------------------------------------------------------------------------


@uncompiled
@agreed
def ntk(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    other: Any = None,
    *,
    outputs: Literal["full", "trace"] = "full",
    valid: Tensor | None = None,
    in_dims: Any = 0,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    group: Any = None,
) -> Tensor:
    """The empirical neural tangent kernel: inner products of the Jacobians of samples, without the Jacobians.

    >>> model = torch.nn.Sequential(torch.nn.Linear(5, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3))
    >>> params = {name: p.detach() for name, p in model.named_parameters()}
    >>> fn = lambda p, x: torch.func.functional_call(model, p, (x,))
    >>> kernel = psgrad.ntk(fn, params, torch.randn(8, 5))
    >>> kernel.shape, psgrad.ntk(fn, params, torch.randn(8, 5), torch.randn(2, 5), outputs="trace").shape
    (torch.Size([8, 8, 3, 3]), torch.Size([8, 2]))

    Entry [n, m, k, l] is <J_n[k], J_m[l]>, the layout of neural_tangents; "trace" is the sum over k of [n, m, k, k],
    not divided by their number. One forward and one backward for each output, all samples together; factors meet
    pairwise, and neither Jacobians nor N x P numbers are held. Exact, parameters that are used more than once included.

    In chunks two of them are held at a time, and each runs again for every other: the fewer chunks, the better.

    Args:
        fn: `fn(params, sample) -> outputs`, a floating-point tensor of K numbers in any shape, the same for every
            sample. It runs once more, on the first sample, for that shape.
        params, batch, in_dims, randomness, chunk_size, max_bytes: as for `per_sample_grads`.
        other: another batch for the same `fn` and `in_dims`; None: the batch itself.
        outputs: "full", or "trace", which holds the factors of one output at a time in place of all.
        valid: (N,) booleans; rows (and without `other` columns) of the other samples are 0, and they do not run.
        progress: show a bar, as for `per_sample_grads`; a sample counts for each output as often as it runs.
        group: processes that share a batch, as for `gram`. Rows are this rank's samples, columns those of all ranks,
            one rank after the other; the factors of all outputs are kept, and sent once: `max_bytes` is refused.

    Returns:
        A tensor (N, M, K, K), or (N, M), in float32 at least.
    """
    refuse_inside_transforms("ntk")
    _refuse_layers(group)
    if outputs not in ("full", "trace"):
        raise ArgumentError(
            f'outputs={outputs!r} is not one of "full", "trace"\n'
            "  full: all pairs of outputs; trace: the sum over outputs with themselves."
        )
    first = _outputs(fn, params, batch, in_dims, randomness, valid, max_bytes is not None)
    problem = first.there.problem
    if group is not None:
        refuse_max_bytes("ntk", max_bytes)
        matrix = Matrix(group, dtype_of(problem))
        check_step(problem, chunk_size, None)
    step = plan(_Pair(first, outputs == "full"), problem, chunk_size, max_bytes)
    assert isinstance(step, int)
    second = None
    if other is not None:
        second = _outputs(fn, params, other, in_dims, randomness, None, max_bytes is not None)
        if second.shape != first.shape:
            raise ArgumentError(
                f"fn returns outputs of shape {first.shape} for batch, of shape {second.shape} for other\n"
                "  the kernel needs as many for both."
            )
        moved = second.there.problem._replace(reached=problem.reached)  # one warning, if no output has a gradient
        second = second._replace(there=second.there._replace(problem=moved))
    if group is not None:
        group.expect(shape=first.shape, outputs=outputs, other=other is not None)
        sides = [_kept(own, step, "ntk" if progress else None) for own in (first, second) if own is not None]
        return products_of_all(group, matrix, sides, outputs == "trace")
    kernel = _Kernel(first, second, step, outputs == "full")
    with differentiating(problem), kernel.bar() if progress else nullcontext() as bar:
        found = kernel.filled(bar)
    if second is None:
        found = first.there.among_zeros(found.transpose(0, 1).contiguous()).transpose(0, 1)
    return first.there.among_zeros(found.contiguous())


def _kept(outputs: Outputs, step: int, shown: str | None) -> Rows:
    """The factors of all outputs; all draw the same random numbers."""
    problem, there, grads = outputs.there.problem, outputs.there, []
    before = generators(problem.params)
    for k in range(outputs.count):
        rewind(before)
        grads.append(factored(outputs.of(problem, k), chunk_size=step or None, max_bytes=None, progress=shown)[0])
    return Rows(grads, there.places, there.n)


def _refuse_layers(ranks: Any) -> None:
    if ranks is not None and ranks.lockstep is not None:
        raise ArgumentError(
            "fn is that of a model under fully_shard, which returns the loss alone\n"
            "  give the model before fully_shard, and fn(params, sample) -> outputs."
        )


class _Kernel:
    """Chunks of rows against chunks of columns."""

    def __init__(self, rows: Outputs, columns: Outputs | None, step: int, full: bool) -> None:
        self.rows, self.columns, self.step, self.full = rows, columns, step, full
        self.draws: dict[int, Any] = {}  # the generators' states when a chunk ran first

    def _chunks(self, outputs: Outputs | None) -> list[Problem]:
        return [] if outputs is None else [chunk for _, chunk in chunks(outputs.there.problem, self.step)]

    def bar(self) -> Bar:
        """Over the samples that run, each as often as it does."""
        sizes, k = [chunk.n for chunk in self._chunks(self.rows)], self.rows.count
        if self.columns is not None:
            return Bar("ntk", k * (sum(sizes) + len(sizes) * self.columns.there.problem.n))
        return Bar("ntk", k * sum(i * n for i, n in enumerate(sizes, 1)))

    def filled(self, bar: Bar | None) -> Tensor:
        whole, k = self.rows.there.problem, self.rows.count
        m = whole.n if self.columns is None else self.columns.there.problem.n
        shape = (whole.n, m, k, k) if self.full else (whole.n, m)
        out = torch.zeros(shape, dtype=dtype_of(whole), device=whole.params[0].device)
        if not k:
            return out
        rows, others = self._chunks(self.rows), self._chunks(self.columns)
        for i, chunk in enumerate(rows):
            top = slice(i * self.step, i * self.step + chunk.n)
            left = list(self._factors(self.rows, chunk, bar)) if self.full else []
            for j in range(i, len(rows)) if self.columns is None else range(len(others)):
                column = rows[j] if self.columns is None else others[j]
                side = slice(j * self.step, j * self.step + column.n)
                same = self.columns is None and i == j
                source = self.rows if self.columns is None else self.columns
                if self.full:
                    right = left if same else list(self._factors(source, column, bar))
                    _fill(out[top, side], left, right, same)
                else:
                    self._trace(out[top, side], source, chunk, column, same, bar)
                if self.columns is None and not same:
                    block = out[top, side].transpose(0, 1)
                    out[side, top] = block.transpose(2, 3) if self.full else block
        return out

    def _trace(
        self, out: Tensor, source: Outputs, chunk: Problem, column: Problem, same: bool, bar: Bar | None
    ) -> None:
        left = self._factors(self.rows, chunk, bar)
        right = left if same else self._factors(source, column, bar)
        for own in left:
            out += own.dots(own if same else next(iter(right)))

    def _factors(self, outputs: Outputs, problem: Problem, bar: Bar | None) -> Iterator[FactoredGrads]:
        """The factors of a chunk for each output; if it ran before, with the numbers that it drew then."""
        run = collect if bar is None else bar.watching(collect)
        states = self.draws.setdefault(id(problem), generators(problem.params))
        for fg in outputs.each(problem, run, states):
            if bar is not None:
                bar.done(problem.n)
            yield fg


def _fill(out: Tensor, left: Sequence[FactoredGrads], right: Sequence[FactoredGrads], same: bool) -> None:
    """out[n, m, k, l] for all pairs of outputs; of a chunk with itself each pair once."""
    for k, a in enumerate(left):
        for i in range(k if same else 0, len(right)):
            found = a.dots(right[i])
            out[:, :, k, i] = found
            if same and i != k:
                out[:, :, i, k] = found.mT


class _Pair(Quantity[list[Any], None]):
    """Two chunks at a time and the inner products of one pair of outputs: what the planner measures."""

    def __init__(self, outputs: Outputs, full: bool) -> None:
        self.outputs, self.full = outputs, full
        self.name = f"ntk {outputs.count if full else 1}"

    def start(self, whole: Problem, step: int) -> list[Any]:
        return []

    def add(self, state: list[Any], rows: slice, chunk: Problem, run: Run) -> Outcome:
        times = max(1, self.outputs.count) if self.full else 1
        held = [factored_chunk(chunk, run) for _ in range(2 * times)]
        held[0][0].dots(held[-1][0])
        return held[0][1]
