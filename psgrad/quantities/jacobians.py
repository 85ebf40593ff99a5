"""per_sample_jacobians and ntk: functions with several outputs. One forward, and a backward for each output."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from ..annotations import Group, P, Randomness
from ..engine.batched import Outcome
from ..engine.collectors import DenseCollector
from ..engine.ladder import collect, differentiating, join, no_outcome
from ..engine.problem import Problem, generators, rewind
from ..errors import ArgumentError
from ..factors import warm_memory
from ..factors.outputs import add_products, mirrored
from ..processes.agreed import agreed
from ..processes.parcels import Matrix
from ..streaming.budget import TooLittle, peak_bytes
from ..streaming.progress import Bar
from ..streaming.stream import (
    Quantity,
    Run,
    check_step,
    chunks,
    dtype_of,
    plan,
    refuse_inside_transforms,
)
from ..torch_.autograd import in_full_precision
from ..torch_.compiler import uncompiled
from ..torch_.storage import storage_of
from .across import Rows, products_of_all, refuse_max_bytes
from .factored import FactoredGrads, factored
from .outputs import Backwards, Outputs, outputs_of

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
    forward, and one backward for each output, all samples together, so that besides the result only one output's part
    of it is held. All outputs of a sample draw the same random numbers.

    Where Python runs in the backward (autograd Functions, hooks), which need not do the same twice, and where samples
    run one by one, `fn` runs once for each output.

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
    outputs = outputs_of(fn, params, batch, in_dims, randomness, valid, max_bytes is not None)
    problem, k = outputs.there.problem, outputs.count
    quantity = _Jacobians(outputs)
    step = plan(quantity, problem, chunk_size, max_bytes)
    assert isinstance(step, int)
    with differentiating(problem), Bar("per_sample_jacobians", problem.n * k) if progress else nullcontext() as bar:
        quantity.bar = bar
        leaves = quantity.start(problem, step)
        run = collect if bar is None else bar.watching(collect)
        for rows, chunk in chunks(problem, step) if k else ():
            quantity.add(leaves, rows, chunk, run)
    whole = [outputs.there.among_zeros(t) for t in leaves]
    shaped = [t.view(len(t), *outputs.shape, *t.shape[2:]) for t in whole]
    tree: Any = optree.tree_unflatten(problem.params_spec, shaped)
    return tree  # type: ignore[no-any-return]


class _Jacobians(Quantity[list[Tensor], list[Tensor]]):
    """The gradients of all outputs, (N, K, *shape) each; besides, one output's part of a chunk is held."""

    bar: Bar | None = None
    quiet = False

    def __init__(self, outputs: Outputs) -> None:
        self.outputs, self.name = outputs, f"jacobians {outputs.count}"

    def start(self, whole: Problem, step: int) -> list[Tensor]:
        return [warm_memory.empty((whole.n, self.outputs.count, *p.shape), p) for p in whole.params]

    def add(self, state: list[Tensor], rows: slice, chunk: Problem, run: Run) -> Outcome:
        states = generators(chunk.params)
        backwards = Backwards(self.outputs, chunk, run, states, quiet=self.quiet, bar=self.bar)
        room: list[Tensor] = []  # memory of one output, the same for all
        outcome = None

        def make(problem: Problem) -> DenseCollector:
            return DenseCollector(problem, room if problem is chunk else ())

        for k in range(self.outputs.count):
            outcomes: list[Outcome] = []
            places: list[Tensor | None] = []
            for group in backwards.groups(k, make):
                found = group.collector.result()
                for target, own in zip(state, found, strict=True):
                    target = target[rows, k]
                    if group.places is None:
                        target.copy_(own)
                    else:
                        target[group.places.to(target.device)] = own
                if group.places is None:
                    room = found
                outcomes.append(group.outcome)
                places.append(group.places)
            outcome = join(outcomes, places)
        return no_outcome(chunk) if outcome is None else outcome

    def rehearsal(self) -> "_Jacobians":
        alike = _Jacobians(self.outputs)
        alike.quiet = True
        return alike


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
    not divided by their number. One forward, and one backward for each output, all samples together, as for
    `per_sample_jacobians`; factors meet pairwise, what the outputs of a sample share is worked out once, and neither
    Jacobians nor N x P numbers are held. Exact, parameters that are used more than once included.

    In chunks two of them are held at a time, and each runs again for every other: the fewer chunks, the better. Where
    `max_bytes` is too little for all outputs of all samples, some outputs are held at a time.

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
        A tensor (N, M, K, K), or (N, M), in float32 at least. In memory outputs are beside their samples, so that the
        matrix `kernel.permute(0, 2, 1, 3).reshape(N * K, M * K)` is no copy.
    """
    refuse_inside_transforms("ntk")
    _refuse_layers(group)
    if outputs not in ("full", "trace"):
        raise ArgumentError(
            f'outputs={outputs!r} is not one of "full", "trace"\n'
            "  full: all pairs of outputs; trace: the sum over outputs with themselves."
        )
    first = outputs_of(fn, params, batch, in_dims, randomness, valid, max_bytes is not None)
    problem, full = first.there.problem, outputs == "full"
    if group is not None:
        refuse_max_bytes("ntk", max_bytes)
        matrix = Matrix(group, dtype_of(problem))
        check_step(problem, chunk_size, None)
    second = None
    if other is not None:
        second = outputs_of(fn, params, other, in_dims, randomness, None, max_bytes is not None)
        if second.shape != first.shape:
            raise ArgumentError(
                f"fn returns outputs of shape {first.shape} for batch, of shape {second.shape} for other\n"
                "  the kernel needs as many for both."
            )
        moved = second.there.problem._replace(reached=problem.reached)  # one warning, if no output has a gradient
        second = second._replace(there=second.there._replace(problem=moved))
    step, width = _steps(first, second is not None, full, chunk_size, max_bytes)
    if group is not None:
        group.expect(shape=first.shape, outputs=outputs, other=other is not None)
        sides = [_kept(own, step, "ntk" if progress else None) for own in (first, second) if own is not None]
        return products_of_all(group, matrix, sides, outputs == "trace")
    kernel = _Kernel(first, second, step, width, full)
    with differentiating(problem), kernel.bar() if progress else nullcontext() as bar:
        found = kernel.filled(bar)
    if second is None:
        found = first.there.among_zeros(found.transpose(0, 1)).transpose(0, 1)
    return first.there.among_zeros(found)


def _steps(outputs: Outputs, crossed: bool, full: bool, chunk_size: Any, max_bytes: Any) -> tuple[int, int]:
    """How many samples, and how many outputs of each, are held at a time.

    Where all outputs of all samples are too many, half of the outputs, and so on: a pair of outputs costs backwards of
    a graph that is there, a pair of samples forwards too. Where that does not help, as many samples as can be.
    """
    problem, widths = outputs.there.problem, [max(1, outputs.count) if full else 1]
    while widths[-1] > 1:
        widths.append(-(-widths[-1] // 2))
    pairs = [_Pair(outputs, width, full, crossed) for width in widths]
    step = plan(pairs[0], problem, chunk_size, max_bytes, pairs[0] if len(pairs) > 1 else None)
    if step == problem.n or chunk_size is not None:
        assert isinstance(step, int)
        return step, widths[0]
    bound = check_step(problem, chunk_size, max_bytes)
    assert bound is not None
    for width, pair in zip(widths[1:], pairs[1:], strict=True):
        if peak_bytes(problem, problem.n, problem.n, pair, True) <= bound:
            return problem.n, width
    for width, pair in zip(widths[1:], pairs[1:], strict=True):
        if not isinstance(step, TooLittle):
            break
        step, widths[0] = plan(pair, problem, chunk_size, max_bytes, None if width == 1 else pair), width
    assert isinstance(step, int)
    return step, widths[0]


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
    """Chunks of rows against chunks of columns, `width` outputs of each at a time."""

    def __init__(self, rows: Outputs, columns: Outputs | None, step: int, width: int, full: bool) -> None:
        self.rows, self.columns, self.step, self.width, self.full = rows, columns, step, width, full
        self.draws: dict[int, Any] = {}  # the generators' states when a chunk ran first

    def _chunks(self, outputs: Outputs | None) -> list[Problem]:
        return [] if outputs is None else [chunk for _, chunk in chunks(outputs.there.problem, self.step)]

    def bar(self) -> Bar:
        """Over the samples that run, each as often as it does, once for each output."""
        sizes, k = [chunk.n for chunk in self._chunks(self.rows)], self.rows.count
        if self.columns is not None:
            return Bar("ntk", k * (sum(sizes) + len(sizes) * self.columns.there.problem.n))
        return Bar("ntk", k * sum(i * n for i, n in enumerate(sizes, 1)))

    def filled(self, bar: Bar | None) -> Tensor:
        whole, k = self.rows.there.problem, self.rows.count
        m = whole.n if self.columns is None else self.columns.there.problem.n
        shape = (whole.n, k, m, k) if self.full else (whole.n, m)
        out = torch.zeros(shape, dtype=dtype_of(whole), device=whole.params[0].device)
        rows, others = self._chunks(self.rows) if k else [], self._chunks(self.columns)
        for i, chunk in enumerate(rows):
            top = slice(i * self.step, i * self.step + chunk.n)
            left = self._ran(self.rows, chunk, bar)
            for j in range(i, len(rows)) if self.columns is None else range(len(others)):
                side = slice(j * self.step, min((j + 1) * self.step, m))
                if self.columns is not None:
                    right = self._ran(self.columns, others[j], bar)
                else:
                    right = left if i == j else self._ran(self.rows, rows[j], bar)
                self._meet(out[top, :, side] if self.full else out[top, side], left, right)
                if self.columns is None and i != j:
                    if self.full:
                        out[side, :, top] = out[top, :, side].permute(2, 3, 0, 1)
                    else:
                        out[side, top] = out[top, side].mT
        return out.transpose(1, 2) if self.full else out

    def _ran(self, outputs: Outputs, problem: Problem, bar: Bar | None) -> Backwards:
        """A chunk; if it ran before, with the numbers that it drew then."""
        run = collect if bar is None else bar.watching(collect)
        again = id(problem) in self.draws
        states = self.draws.setdefault(id(problem), generators(problem.params))
        return Backwards(outputs, problem, run, states, again, bar=bar)

    def _meet(self, out: Tensor, left: Backwards, right: Backwards) -> None:
        count = self.rows.count
        blocks = [range(start, min(start + self.width, count)) for start in range(0, count, self.width)]
        for i, some in enumerate(blocks):
            own = left.of(some)
            if not self.full:
                out += own[0].dots(own[0] if right is left else right.of(some)[0])
                continue
            for others in blocks[: i + 1] if right is left else blocks:
                same = right is left and others is some
                found = _products(own, own if same else right.of(others), out, len(blocks) == 1)
                if len(blocks) > 1:
                    out[:, some.start : some.stop, :, others.start : others.stop] = found
                    if right is left and not same:
                        out[:, others.start : others.stop, :, some.start : some.stop] = found.permute(2, 3, 0, 1)


@in_full_precision
def _products(left: list[FactoredGrads], right: list[FactoredGrads], out: Tensor, in_place: bool) -> Tensor:
    """Inner products (N, K, M, L) of the gradients of outputs: added to the zeros in `out`, or by themselves."""
    n, m = len(left[0]), len(right[0])
    target = out if in_place else out.new_zeros(n, len(left), m, len(right))
    if all(len(fg._blocks) == 1 and fg._blocks[0].places is None for fg in (*left, *right)):
        total = target.flatten(2).flatten(0, 1)
        a, b = ([fg._blocks[0].sums for fg in own] for own in (left, right))
        for i in range(len(a[0])):
            one = [sums[i] for sums in a]
            add_products(total, one, one if left is right else [sums[i] for sums in b])
        if left is right:
            mirrored(total)
        return target
    for k, own in enumerate(left):
        for i, other in enumerate(right[: k + 1] if left is right else right):
            found = own.dots(other)
            target[:, k, :, i] = found
            if left is right and i < k:
                target[:, i, :, k] = found.mT
    return target


class _Pair(Quantity[list[Any], None]):
    """What the planner measures: a chunk, or two at a time, and the inner products of some outputs of each."""

    has_sums = True  # a chunk meets another, all samples at once only themselves

    def __init__(self, outputs: Outputs, width: int, full: bool, crossed: bool) -> None:
        self.outputs, self.width, self.full, self.crossed = outputs, width, full, crossed
        self.name = f"ntk {outputs.count} {width} {full} {crossed}"

    def start(self, whole: Problem, step: int) -> list[Any]:
        return [self.crossed or step < whole.n]

    def add(self, state: list[Any], rows: slice, chunk: Problem, run: Run) -> Outcome:
        states = generators(chunk.params)
        left = Backwards(self.outputs, chunk, run, states, quiet=True)
        right = Backwards(self.outputs, chunk, run, states, quiet=True) if state[0] else left
        n, count = chunk.n, self.outputs.count
        out = chunk.params[0].new_zeros((n, count, n, count) if self.full else (n, n), dtype=dtype_of(chunk))
        state.append(out)  # the result
        own = self._held(left)
        others = own if right is left and self.width == count else self._held(right)
        if self.full:
            _products(own, others, out, self.width == count)
        else:
            out += own[0].dots(others[0])
        return no_outcome(chunk)

    def _held(self, backwards: Backwards) -> list[FactoredGrads]:
        """The factors of `width` outputs: from the third on copies, but for what outputs share, as they would be."""
        found = backwards.of(range(min(2, self.width)))
        shared = {storage_of(t) for block in found[0]._blocks for own in block.sums if own for t in own.tensors()}

        def copied(t: Tensor) -> Tensor:
            return t if storage_of(t) in shared else torch.empty_like(t)

        for _ in range(2, self.width):
            found.append(found[1]._each(copied))
        if self.width == self.outputs.count:
            backwards.kept = None
        return found
