"""kron_factors: the two factors of Kronecker-factored curvature, for every matrix."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from ..annotations import Group, Randomness
from ..engine.batched import Outcome
from ..engine.collectors import Collector, placement
from ..engine.ladder import join
from ..engine.problem import Problem
from ..engine.validate import validated
from ..errors import ArgumentError
from ..factors.base import Factor, Kron
from ..factors.numerics import wide
from ..factors.pullback import pull
from ..factors.sum import MatrixBlock, Sum, as_stored
from ..processes.agreed import agreed
from ..processes.ranks import Ranks
from ..processes.sums import Sums
from ..registry.params import Param, Source
from ..streaming.blocks import Meta
from ..streaming.stream import Quantity, Run, counted, refuse_inside_transforms, refuse_recording, stream
from ..torch_.autograd import in_full_precision
from ..torch_.compiler import uncompiled
from .named import indices_of, names_of


class KronFactors(NamedTuple):
    """What `kron_factors` gives for a matrix of O rows and I columns: means over samples.

    `output` always belongs to the rows of the parameter, and `input` to its columns: where a matrix is used transposed,
    as in x @ w or a transposed convolution, it is its rows that meet x.

    Attributes:
        input: (I, I), of the sum over positions of x x^T, x being what the matrix is multiplied with.
        output: (O, O), of the sum over positions of g g^T, g being the gradient of the product; (O,), the diagonal of a
            diagonal matrix, for a table that is only read by index: how often each row is read.
    """

    input: Tensor
    output: Tensor


@overload
def kron_factors(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    names: Sequence[str] | None = None,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[False] = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    group: Group | None = None,
) -> dict[str, KronFactors]: ...
@overload
def kron_factors(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    names: Sequence[str] | None = None,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[True],
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    group: Group | None = None,
) -> tuple[dict[str, KronFactors], Any]: ...


@uncompiled
@agreed
def kron_factors(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    names: Sequence[str] | None = None,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: bool = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    group: Any = None,
) -> Any:
    """The two factors of K-FAC for every matrix: the means of x x^T and of g g^T, without gradients.

    >>> fn = lambda p, x: (p["w"] @ x).sum() + p["b"].sum()
    >>> params = {"w": torch.zeros(2, 2), "b": torch.zeros(2)}
    >>> found = psgrad.kron_factors(fn, params, torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
    >>> found["w"].input
    tensor([[5., 1.],
            [1., 2.]])
    >>> found["w"].output, list(found)
    (tensor([[1., 1.],
            [1., 1.]]), ['w'])

    Where the gradient of sample n is a sum over positions t of g_t x_t^T (a linear layer, a matrix product, a
    convolution with its patches as the x), these are the means over samples of sum_t x_t x_t^T and of sum_t g_t g_t^T:
    the empirical Fisher as K-FAC sees it ("expand"), for the loss that `fn` is. A matrix that is used several times has
    the sum over all uses: a layer called twice, a fused matrix that is split, a tied table. For the Fisher of the
    model's own distribution, let `fn` draw the label.

    What has no such form is left out: vectors, matrices of which some use is no product with a tensor (elementwise,
    behind a function of parameters, in groups), and, with a `FallbackWarning`, all where samples run one by one.

    Args:
        fn, params, batch, in_dims, randomness, chunk_size, max_bytes, progress: as for `per_sample_grads`.
        names: the parameters that are wanted: keys of a flat dict of params, such as "0.weight", or paths as errors
            write them. None: all that have factors. A table of 50,000 rows that is multiplied has 50,000 x 50,000.
        valid: (N,) booleans; the other samples do not run and do not count.
        has_aux: `fn` returns `(loss, aux)`; aux comes back with a leading sample axis, zeros where not `valid`.
        group: processes that share a batch, as for `clipped_grad`: the means are over the samples of all ranks, whole
            on each. What has no such form on one of them is left out on all.

    Returns:
        A dict from names to `KronFactors(input, output)`, in float32 at least; with `has_aux` `(factors, aux)`. The
        names are those that `FactoredGrads.precondition` takes. Of no samples the factors are NaN.

    Raises:
        ArgumentError: a parameter that is named does not exist, or has no such factors.
    """
    refuse_inside_transforms("kron_factors")
    problem = validated(
        fn, params, batch, in_dims=in_dims, randomness=randomness, has_aux=has_aux, save_memory=max_bytes is not None
    )
    wanted = [i for i, p in enumerate(problem.params) if p.dim() > 1]
    if names is not None:
        names = [names] if isinstance(names, str) else names
        wanted = list(dict.fromkeys(indices_of(names, problem.params_spec, "names")))
    there = counted(problem, valid)
    if there.mask is not None:  # stand-ins would count
        refuse_recording("kron_factors of the samples that are valid")
    shown = "kron_factors" if progress else None
    quantity = KronSums(wanted)
    options: dict[str, Any] = {"chunk_size": chunk_size, "max_bytes": max_bytes, "progress": shown, "ranks": group}
    if group is not None:
        group.expect(names=wanted)
    found, outcome = stream(quantity, there.problem, **options)
    n = there.problem.n
    if group is not None:
        found, n = _over_all_ranks(found, group, there.problem, wanted), group.count
    own = names_of(problem.params_spec)
    result = {}
    for i in wanted:
        p, sums = problem.params[i], found.sums.get(i)
        if names is not None and (i in found.others or p.dim() < 2):
            what = "is no matrix" if p.dim() < 2 else f"has gradients by {found.others[i]}"
            raise ArgumentError(
                f"{problem.name(i)} has no Kronecker factors: it {what}\n"
                "  name parameters that are multiplied as matrices, or leave names out to get all of them."
            )
        if i in found.others or (sums is None and names is None):
            continue
        if sums is None:  # no sample used it
            size = prod(p.shape[1:]) if len(p) else 0
            zeros = torch.zeros(size, size, dtype=wide(p.dtype), device=p.device)
            sums = Kron(zeros.new_zeros(len(p), len(p)), zeros)
        result[own[i]] = KronFactors(*(t.div_(n if n else torch.nan) for t in (sums.input, sums.output)))
    return there.with_aux(result, outcome)


@dataclass(eq=False)
class _Sums:
    """Of the samples so far; `chunked`: a chunk's own sums are added to these, and are memory besides."""

    chunked: bool
    sums: dict[int, Kron] = field(default_factory=dict)
    others: dict[int, str] = field(default_factory=dict)


class KronSums(Quantity[_Sums, _Sums]):
    """Sums of g g^T and x x^T over samples and positions, for some parameters."""

    has_sums = True

    def __init__(self, wanted: Sequence[int]) -> None:
        self.wanted = frozenset(wanted)
        self.name = f"kron {sorted(wanted)}"

    def start(self, whole: Problem, step: int) -> _Sums:
        return _Sums(step < whole.n)

    def add(self, state: _Sums, rows: slice, chunk: Problem, run: Run) -> Outcome:
        outcomes: list[Outcome] = []
        places: list[Tensor | None] = []

        def make(problem: Problem) -> KronCollector:
            return KronCollector(problem, self.wanted)

        for group in run(chunk, make):
            state.others |= group.collector.others
            for i, own in group.collector.sums.items():
                if i in state.sums:
                    state.sums[i] = added(state.sums[i], own)
                else:
                    state.sums[i] = Kron(*(t.clone() for t in own)) if state.chunked else own
            outcomes.append(group.outcome)
            places.append(group.places)
        return join(outcomes, places)


def _over_all_ranks(own: _Sums, ranks: Ranks, problem: Problem, wanted: Sequence[int]) -> _Sums:
    """The sums of the samples of all ranks. What a rank has depends on its samples: first they say what that is."""
    kinds = torch.zeros(len(wanted), 3, device=ranks.device)  # ranks that have a diagonal, a matrix, something else
    for row, i in zip(kinds, wanted, strict=True):
        if i in own.others:
            row[2] = 1
        elif i in own.sums:
            row[own.sums[i].output.dim() - 1] = 1
    (kinds,) = Sums(ranks, [Meta(kinds.shape, kinds.dtype, kinds.device)], lambda: problem.n).result([kinds])
    said = dict(zip(wanted, kinds.tolist(), strict=True))
    others = {i: "another rank's samples" for i, (_, _, other) in said.items() if other} | own.others
    there = {i: bool(matrix) for i, (diagonal, matrix, _) in said.items() if diagonal or matrix}
    metas: list[Meta] = []
    totals: list[Tensor | None] = []
    for i, is_matrix in there.items():
        p, sums = problem.params[i], own.sums.get(i)
        size = prod(p.shape[1:]) if len(p) else 0
        metas += [
            Meta(torch.Size(shape), wide(p.dtype), p.device)
            for shape in ((len(p), len(p)) if is_matrix else (len(p),), (size, size))
        ]
        output = None if sums is None else sums.output
        if output is not None and is_matrix and output.dim() == 1:
            output = output.diag()
        totals += [output, None if sums is None else sums.input]
    whole = iter(Sums(ranks, metas).result(totals) if metas else [])
    return _Sums(False, {i: Kron(next(whole), next(whole)) for i in there}, others)


# ---- what outer products are made of, summed as factors arrive --------------------------------------------------


class KronCollector(Collector):
    """Sums over samples and positions of g g^T and x x^T for the parameters that are `wanted`."""

    def __init__(self, problem: Problem, wanted: Collection[int]) -> None:
        super().__init__(problem)
        self.wanted = wanted
        self.sums: dict[int, Kron] = {}
        self.others: dict[int, str] = {}  # parameters with gradients that are no outer products: what these are
        self.derived: set[int] = set()  # functions of parameters for which something came

    def has(self, source: Source) -> bool:
        return source.index in self.sums or source.index in self.others or source.index in self.derived

    @in_full_precision
    def add(self, param: Param, factor: Factor, use: object = None) -> None:
        source = param.source
        index = source.index
        if index >= len(self.params):
            self.derived.add(index)
        elif index in self.wanted:
            term = as_stored(placement(param, factor))
            block = Sum((term,), source.value.shape).block(term)
            found = None if block is None else term.factor.kron(wide(source.value.dtype))
            if block is None or found is None:
                self.others[index] = type(term.factor).__name__
            else:
                self._add(index, block, found)

    def _add(self, index: int, block: MatrixBlock, found: Kron) -> None:
        p, before = self.params[index], self.sums.get(index)
        height, width = p.shape[0], p[0].numel() if len(p) else 0
        output = embedded(found.output, block.row, height)
        inputs = embedded(found.input, block.column, width)
        self.sums[index] = Kron(output, inputs) if before is None else added(before, Kron(output, inputs))

    def add_dense(self, source: Source, grads: Tensor) -> None:
        if source.index >= len(self.params):
            self.derived.add(source.index)
        elif source.index in self.wanted:
            self.others[source.index] = "Dense"

    def pull(self, derived: Sequence[Source], roots: Sequence[Source]) -> None:
        values, traced = [source.traced() for source in derived], [source.traced() for source in roots]
        reached = pull(values, traced, list(map(torch.zeros_like, values)))
        for source, grad in zip(roots, reached, strict=True):
            if grad is not None and source.index in self.wanted:
                self.others[source.index] = "Pullback"

    def put(self, grads: Sequence[Tensor]) -> None:
        self.others = {i: "a loop over samples" for i, g in enumerate(grads) if i in self.wanted}


def embedded(t: Tensor, start: int, size: int) -> Tensor:
    """A matrix as a diagonal block of one of `size`, a diagonal likewise."""
    if len(t) == size:
        return t
    out = t.new_zeros((size,) * t.dim())
    out[(slice(start, start + len(t)),) * t.dim()] = t
    return out


def added(a: Kron, b: Kron) -> Kron:
    """The sums of both; a diagonal meets a matrix on its diagonal."""
    first, second = (a.output, b.output) if a.output.dim() >= b.output.dim() else (b.output, a.output)
    if first.dim() > second.dim():
        first.diagonal().add_(second)
    else:
        first.add_(second)
    return Kron(first, a.input.add_(b.input))
