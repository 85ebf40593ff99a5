"""What Hypothesis draws: configurations, never tensor values.

A configuration is a NamedTuple of numbers and names, so that a failure prints as something to type in.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from .cases import N

Draw = Callable[[st.SearchStrategy[Any]], Any]
SAMPLES = st.integers(0, N - 1)
SIZE = st.integers(1, 3)
SIZE_OR_NONE_AT_ALL = st.integers(0, 3)
USE = st.sampled_from(("param", "frozen", "none"))  # what an optional operand is


def sizes(least: int, most: int, size: st.SearchStrategy[int] = SIZE) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(size, min_size=least, max_size=most).map(tuple)


# ---- how a batch lies in memory ----------------------------------------------------------------------------


class Layout(NamedTuple):
    memory: str = "contiguous"
    in_dim: int = 0  # which axis the samples are along, modulo the number of axes

    def apply(self, batch: Tensor) -> tuple[Tensor, int]:
        """A batch (N, ...) stored in another way, and its `in_dims`."""
        batch = _MEMORY[self.memory](batch)
        in_dim = self.in_dim % batch.dim()
        return batch.movedim(0, in_dim), in_dim


def _strided(t: Tensor) -> Tensor:
    """Every second element of a tensor with twice the width, the rest being NaN or -1."""
    wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), torch.nan if t.is_floating_point() else -1)
    wide[..., ::2] = t
    return wide[..., ::2]


def _expanded(axis: int) -> Callable[[Tensor], Tensor]:
    """One element along `axis` stands for all."""
    return lambda t: t.narrow(axis, 0, min(1, t.shape[axis])).expand(t.shape)


_MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "channels last": lambda t: t.movedim(1, -1).contiguous().movedim(-1, 1) if t.dim() > 1 else t,
    "strided": _strided,
    "same for all samples": _expanded(0),
    "same along the last axis": _expanded(-1),
}
LAYOUTS = st.builds(Layout, st.sampled_from(sorted(_MEMORY)), st.integers(0, 3))


# ---- linear, matmul, einsum --------------------------------------------------------------------------------


class Linear(NamedTuple):
    n: int
    lead: tuple[int, ...]
    inputs: int
    outputs: int
    weight: str
    bias: str
    view: str  # how the weight comes out of the parameter
    layout: Layout


@st.composite
def linears(draw: Draw) -> Linear:
    return Linear(
        draw(SAMPLES),
        draw(sizes(0, 2, SIZE_OR_NONE_AT_ALL)),
        draw(SIZE_OR_NONE_AT_ALL),
        draw(SIZE_OR_NONE_AT_ALL),
        draw(st.sampled_from(("param", "frozen"))),
        draw(USE),
        draw(st.sampled_from(("whole", "transposed", "rows", "columns", "steps", "expanded"))),
        draw(LAYOUTS),
    )


class Matmul(NamedTuple):
    n: int
    x: tuple[int, ...]
    w: tuple[int, ...]
    first: bool  # whether the parameter is
    layout: Layout


@st.composite
def matmuls(draw: Draw) -> Matmul:
    """Operands of 1 to 4 axes whose leading axes broadcast."""
    inner, first = draw(SIZE_OR_NONE_AT_ALL), draw(st.booleans())
    lead = draw(sizes(0, 2))

    def operand(left: bool) -> tuple[int, ...]:
        kind = draw(st.sampled_from(("vector", "matrix", "blocks")))
        if kind == "vector":
            return (inner,)
        own = draw(SIZE_OR_NONE_AT_ALL)
        matrix = (own, inner) if left else (inner, own)
        blocks = tuple(draw(st.sampled_from((1, size))) for size in lead) if kind == "blocks" else ()
        return *blocks, *matrix

    left, right = operand(True), operand(False)
    x, w = (right, left) if first else (left, right)
    return Matmul(draw(SAMPLES), x, w, first, draw(LAYOUTS))


class Einsum(NamedTuple):
    n: int
    x: str
    w: str
    out: str
    sizes: dict[str, int]
    first: bool  # whether the parameter is
    layout: Layout

    @property
    def equation(self) -> str:
        return f"{self.w},{self.x}->{self.out}" if self.first else f"{self.x},{self.w}->{self.out}"


@st.composite
def einsums(draw: Draw, most: int) -> Einsum:
    """Letters of four kinds, up to `most` of each: in all three terms, summed, the parameter's, the input's."""
    letters = iter("abcdefghijklm")
    blocks, inner, outer, times = ([next(letters) for _ in range(draw(st.integers(0, most)))] for _ in range(4))

    def term(*kinds: list[str]) -> str:
        return "".join(draw(st.permutations([a for kind in kinds for a in kind])))

    x, w, out = term(blocks, inner, times), term(blocks, inner, outer), term(blocks, outer, times)
    widths = {a: draw(SIZE_OR_NONE_AT_ALL) for a in sorted({*x, *w})}
    return Einsum(draw(SAMPLES), x, w, out, widths, draw(st.booleans()), draw(LAYOUTS))


# ---- convolutions ------------------------------------------------------------------------------------------


class Conv(NamedTuple):
    n: int
    inner: int | None  # images per sample; None: an unbatched call
    groups: int
    inputs: int  # channels per group
    outputs: int
    spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    weight: str
    bias: str
    layout: Layout

    @property
    def d(self) -> int:
        return len(self.kernel)

    @property
    def x(self) -> tuple[int, ...]:
        return *(() if self.inner is None else (self.inner,)), self.groups * self.inputs, *self.spatial

    @property
    def w(self) -> tuple[int, ...]:
        return self.groups * self.outputs, self.inputs, *self.kernel


@st.composite
def convs(draw: Draw, d: int, words: bool = True) -> Conv:
    """Any convolution whose output is not empty; with `words`, padding may be "same" or "valid"."""
    small = st.integers(1, 3 if d < 3 else 2)

    def each(size: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(size) for _ in range(d))

    kernel, dilation, stride, padding = each(small), each(small), each(small), each(st.integers(0, 2))
    kind = draw(st.sampled_from(("each", "one", *(("same", "valid") if words else ()))))
    said: Any = {"each": padding, "one": padding[0]}.get(kind, kind)
    if kind == "one":
        padding = (padding[0],) * d
    elif kind != "each":
        padding = (0,) * d  # "same" may pad more
    if kind == "same":
        stride = (1,) * d
    least = [max(1, di * (k - 1) + 1 - 2 * p) for k, di, p in zip(kernel, dilation, padding, strict=True)]
    spatial = tuple(size + draw(st.integers(0, 3)) for size in least)
    return Conv(
        draw(SAMPLES),
        draw(st.sampled_from((None, 1, 2, 0))),
        draw(small),
        draw(small),
        draw(small),
        spatial,
        kernel,
        stride,
        said,
        dilation,
        draw(st.sampled_from(("param", "frozen"))),
        draw(USE),
        draw(LAYOUTS),
    )


class Transposed(NamedTuple):
    n: int
    inner: int | None  # images per sample; None: an unbatched call
    groups: int
    inputs: int  # channels per group
    outputs: int
    spatial: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    output_padding: tuple[int, ...]
    dilation: tuple[int, ...]
    weight: str
    bias: str
    layout: Layout

    @property
    def x(self) -> tuple[int, ...]:
        return *(() if self.inner is None else (self.inner,)), self.groups * self.inputs, *self.spatial

    @property
    def w(self) -> tuple[int, ...]:
        return self.groups * self.inputs, self.outputs, *self.kernel


@st.composite
def transposed_convs(draw: Draw, d: int) -> Transposed:
    """Any transposed convolution whose output is not empty; output padding up to where torch refuses it."""
    small = st.integers(1, 3 if d < 3 else 2)

    def each(size: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(size) for _ in range(d))

    kernel, dilation, stride, padding = each(small), each(small), each(small), each(st.integers(0, 2))
    extra = tuple(draw(st.integers(0, max(s, di) - 1)) for s, di in zip(stride, dilation, strict=True))
    spatial = []
    for k, di, s, p, e in zip(kernel, dilation, stride, padding, extra, strict=True):
        size = draw(small)
        while (size - 1) * s - 2 * p + di * (k - 1) + e + 1 < 1:
            size += 1
        spatial.append(size)
    return Transposed(
        draw(SAMPLES),
        draw(st.sampled_from((None, 1, 2))),
        draw(small),
        draw(small),
        draw(small),
        tuple(spatial),
        kernel,
        stride,
        padding,
        extra,
        dilation,
        draw(st.sampled_from(("param", "frozen"))),
        draw(USE),
        draw(LAYOUTS),
    )


# ---- norms -------------------------------------------------------------------------------------------------


class Norm(NamedTuple):
    n: int
    x: tuple[int, ...]  # of a sample
    affine: tuple[int, ...]  # the shape of weight and bias
    option: Any  # groups, or whether the sample's own statistics are used
    weight: str
    bias: str
    scaled: bool  # a parameter stands before the norm, so that its input needs a gradient
    layout: Layout


def _norm(draw: Draw, x: tuple[int, ...], affine: tuple[int, ...], option: Any = None) -> Norm:
    weight, bias, scaled = draw(USE), draw(USE), draw(st.booleans())
    return Norm(draw(SAMPLES), x, affine, option, weight, bias, scaled or "param" not in (weight, bias), draw(LAYOUTS))


@st.composite
def group_norms(draw: Draw) -> Norm:
    groups, each, inner = draw(SIZE), draw(SIZE), draw(SIZE)
    spatial = draw(sizes(0, 3))
    assume(inner * each * prod(spatial) > 1)  # torch refuses a single value
    config = _norm(draw, (inner, groups * each, *spatial), (groups * each,), groups)
    assume(config.weight != "none" or config.bias == "none")  # torch cannot: "tensor does not have a device"
    return config


@st.composite
def layer_norms(draw: Draw) -> Norm:
    shape = draw(sizes(1, 3))
    return _norm(draw, (*draw(sizes(0, 2)), *shape), shape)


@st.composite
def rms_norms(draw: Draw) -> Norm:
    shape = draw(sizes(1, 3))
    config = _norm(draw, (*draw(sizes(0, 2)), *shape), shape, draw(st.sampled_from((None, 0.1))))
    return config._replace(bias="none", scaled=config.scaled or config.weight != "param")


@st.composite
def instance_norms(draw: Draw) -> Norm:
    own, channels, spatial = draw(st.booleans()), draw(SIZE), draw(sizes(1, 3))
    assume(not own or prod(spatial) > 1)
    return _norm(draw, (draw(SIZE), channels, *spatial), (channels,), own)


@st.composite
def batch_norms(draw: Draw) -> Norm:
    own, inner, channels, spatial = draw(st.booleans()), draw(SIZE), draw(SIZE), draw(sizes(0, 3))
    assume(not own or inner * prod(spatial) > 1)
    return _norm(draw, (inner, channels, *spatial), (channels,), own)


# ---- tables ------------------------------------------------------------------------------------------------


class Embedding(NamedTuple):
    n: int
    rows: int
    row: tuple[int, ...]  # the shape of one
    index: tuple[int, ...]
    dtype: torch.dtype
    shared: bool  # one index for all samples
    padding: int | None
    by_frequency: bool
    layout: Layout


@st.composite
def embeddings(draw: Draw, most: int = 1) -> Embedding:
    """Rows of up to `most` axes; of just one where the op is torch's embedding."""
    rows = draw(st.integers(1, 4))
    return Embedding(
        draw(SAMPLES),
        rows,
        draw(sizes(1 if most == 1 else 0, most, SIZE_OR_NONE_AT_ALL)),
        draw(sizes(0, 2, SIZE_OR_NONE_AT_ALL)),
        draw(st.sampled_from((torch.int64, torch.int32))),
        draw(st.booleans()),
        draw(st.none() | st.integers(-rows, rows - 1)),
        draw(st.booleans()),
        draw(LAYOUTS),
    )


class Experts(NamedTuple):
    n: int
    sizes: tuple[int, ...]  # how many rows meet each matrix; the rest meets none
    rest: int
    inputs: int
    outputs: int
    spread: bool  # samples divide their rows in another way each
    turned: bool
    scaled: bool  # the rows need a gradient
    layout: Layout


@st.composite
def experts(draw: Draw) -> Experts:
    return Experts(
        draw(SAMPLES),
        draw(sizes(1, 4, SIZE_OR_NONE_AT_ALL)),
        draw(SIZE_OR_NONE_AT_ALL),
        draw(SIZE),
        draw(SIZE),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(LAYOUTS),
    )


class Bag(NamedTuple):
    n: int
    rows: int
    width: int
    index: tuple[int, ...]  # (B, L), or (T,) with offsets
    lengths: tuple[int, ...] | None  # of the bags
    include_last: bool
    dtype: torch.dtype
    mode: str
    padding: int | None
    scaled: str | None  # the weights of the indices: None, a "param", per "sample", or a product of "both"
    layout: Layout


@st.composite
def bags(draw: Draw) -> Bag:
    rows, mode = draw(st.integers(1, 4)), draw(st.sampled_from(("sum", "mean", "max")))
    lengths = draw(st.none() | sizes(1, 4, SIZE_OR_NONE_AT_ALL))
    index = draw(sizes(2, 2)) if lengths is None else (sum(lengths),)
    assume(prod(index) > 0)
    return Bag(
        draw(SAMPLES),
        rows,
        draw(SIZE),
        index,
        lengths,
        lengths is not None and draw(st.booleans()),
        draw(st.sampled_from((torch.int64, torch.int32))),
        mode,
        draw(st.none() | st.integers(-rows, rows - 1)),
        draw(st.sampled_from((None, "param", "sample", "both"))) if mode == "sum" else None,
        draw(LAYOUTS),
    )


# ---- elementwise -------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    n: int
    x: tuple[int, ...]
    w: tuple[int, ...]
    first: bool  # whether the parameter is
    scaled: bool  # x needs a gradient
    layout: Layout


@st.composite
def pairs(draw: Draw) -> Pair:
    """Two shapes that broadcast: parts of one, with some axes made 1."""
    whole = draw(sizes(0, 3, SIZE_OR_NONE_AT_ALL))

    def part() -> tuple[int, ...]:
        shape = whole[draw(st.integers(0, len(whole))) :]
        return tuple(draw(st.sampled_from((1, size))) for size in shape)

    return Pair(draw(SAMPLES), part(), part(), draw(st.booleans()), draw(st.booleans()), draw(LAYOUTS))


class Slopes(NamedTuple):
    n: int
    x: tuple[int, ...]
    slopes: tuple[int, ...]
    scaled: bool  # x needs a gradient
    layout: Layout


@st.composite
def slopes(draw: Draw) -> Slopes:
    """prelu with one slope, or one for each element of the sample's second axis."""
    x = draw(sizes(0, 4))
    shapes = st.sampled_from(((), (1,), *(((x[1],),) if len(x) > 1 else ())))
    return Slopes(draw(SAMPLES), x, draw(shapes), draw(st.booleans()), draw(LAYOUTS))


class Bilinear(NamedTuple):
    n: int
    lead: tuple[int, ...]
    first: int
    second: int
    outputs: int
    bias: str
    layout: Layout


@st.composite
def bilinears(draw: Draw) -> Bilinear:
    return Bilinear(draw(SAMPLES), draw(sizes(0, 2)), draw(SIZE), draw(SIZE), draw(SIZE), draw(USE), draw(LAYOUTS))


# ---- views -------------------------------------------------------------------------------------------------

Step = tuple[str, tuple[Any, ...], int | None]  # a method of Tensor, its arguments, which of its outputs


class Chain(NamedTuple):
    n: int
    shape: tuple[int, ...]
    steps: tuple[Step, ...]
    use: str

    def apply(self, t: Tensor) -> Tensor:
        for name, args, which in self.steps:
            found = getattr(t, name)(*args)
            t = found if which is None else found[which]
        return t


def _factorings(size: int) -> list[tuple[int, int]]:
    return [(k, size // k) for k in range(1, size + 1) if size % k == 0]


def _step(draw: Draw, shape: tuple[int, ...], kind: str) -> Step | None:
    """A view of a tensor of this shape, or None where there is none of the kind."""
    d = len(shape)
    axis = st.integers(-d, d - 1) if d else None
    one: int | None = None
    args: tuple[Any, ...]
    if kind == "unsqueeze":
        args = (draw(st.integers(-d - 1, d)),)
    elif kind == "expand":
        args = ((*draw(sizes(0, 1)), *(draw(SIZE) if k == 1 else draw(st.sampled_from((-1, k))) for k in shape)),)
    elif kind == "reshape":
        args = ((prod(shape),) if d != 1 else draw(st.sampled_from(_factorings(shape[0]))),)
    elif kind == "flatten":
        args = ()
    elif axis is None:
        return None
    elif kind == "permute":
        args = tuple(draw(st.permutations(range(d))))
    elif kind in ("transpose", "movedim"):
        args = (draw(axis), draw(axis))
    elif kind == "squeeze":
        args = (draw(axis),)
    elif kind in ("select", "unbind", "narrow", "split", "chunk", "unflatten", "__getitem__"):
        along = draw(axis)
        size = shape[along]
        start = draw(st.integers(0, size - 1))
        if kind == "select":
            args = (along, start)
        elif kind == "unbind":
            args, one = (along,), start
        elif kind == "narrow":
            args = (along, start, draw(st.integers(1, size - start)))
        elif kind in ("split", "chunk"):
            args, one = (draw(SIZE), along), draw(st.sampled_from((0, -1)))
        elif kind == "unflatten":
            args = (along, draw(st.sampled_from(_factorings(size))))
        else:
            part = draw(st.sampled_from((start, slice(start, None), slice(None, None, 2), None, Ellipsis)))
            args = ((*[slice(None)] * (along % d), part),)
    else:  # diagonal
        if d < 2:
            return None
        args = ()
    return kind, args, one


_KINDS = (
    *("unsqueeze", "expand", "reshape", "flatten", "permute", "transpose", "movedim", "squeeze", "select", "unbind"),
    *("narrow", "split", "chunk", "unflatten", "__getitem__", "diagonal"),
)


@st.composite
def chains(draw: Draw) -> Chain:
    """Up to four views of a parameter, one after the other, and the op that uses the last."""
    shape = draw(sizes(0, 3, st.integers(1, 4)))
    seen, steps = torch.empty(shape, device="meta"), []
    for kind in draw(st.lists(st.sampled_from(_KINDS), max_size=4)):
        step = _step(draw, tuple(seen.shape), kind)
        if step is not None:
            steps.append(step)
            seen = Chain(0, (), (step,), "").apply(seen)
    uses = {2: ("mul", "add", "linear", "matmul"), 3: ("mul", "conv1d")}.get(seen.dim(), ("mul", "div"))
    return Chain(draw(st.integers(1, 3)), shape, tuple(steps), draw(st.sampled_from(uses)))


# ---- ops without parameters that run on the folded batch ---------------------------------------------------


class CrossEntropy(NamedTuple):
    n: int
    inner: int
    classes: int
    spatial: tuple[int, ...]
    ignored: int  # a class, or one that does not occur
    smoothing: float
    reduction: str
    layout: Layout


@st.composite
def cross_entropies(draw: Draw) -> CrossEntropy:
    return CrossEntropy(
        draw(SAMPLES),
        draw(SIZE),
        draw(SIZE),
        draw(sizes(0, 2)),
        draw(st.sampled_from((-100, 0, 1))),
        draw(st.sampled_from((0.0, 0.2))),
        draw(st.sampled_from(("mean", "sum"))),
        draw(LAYOUTS),
    )


class Attention(NamedTuple):
    n: int
    lead: tuple[int, ...]  # none, heads, or a batch and heads
    key_heads: int  # fewer than heads: grouped queries
    queries: int
    keys: int
    width: int
    values: int
    mask: tuple[int, ...] | None  # its shape
    boolean: bool
    causal: bool
    scale: float | None

    @property
    def key_lead(self) -> tuple[int, ...]:
        return (*self.lead[:-1], self.key_heads) if self.lead else ()


@st.composite
def attentions(draw: Draw) -> Attention:
    lead, queries, keys = draw(sizes(0, 2, st.sampled_from((1, 2, 4)))), draw(SIZE), draw(SIZE)
    key_heads = draw(st.sampled_from([k for k in (1, 2, 4) if lead[-1] % k == 0])) if lead else 1
    kind = draw(st.sampled_from(("none", "causal", "mask")))
    mask = None
    if kind == "mask":
        whole = (*lead, queries, keys)
        mask = tuple(draw(st.sampled_from((1, size))) for size in whole[draw(st.integers(0, len(whole) - 2)) :])
    return Attention(
        draw(st.integers(1, 3)),
        lead,
        key_heads,
        queries,
        keys,
        draw(SIZE),
        draw(SIZE),
        mask,
        draw(st.booleans()),
        kind == "causal",
        draw(st.none() | st.just(0.7)),
    )


# ---- recurrent layers --------------------------------------------------------------------------------------


class Recurrent(NamedTuple):
    kind: str  # a name in torch
    n: int
    length: int
    batch: int | None  # sequences per sample; None: an unbatched call
    lengths: tuple[int, ...] | None  # of each, where they are packed; None: not packed
    inputs: int
    hidden: int
    projection: int
    layers: int
    bidirectional: bool
    bias: bool
    batch_first: bool
    frozen: frozenset[str]  # weights that are no parameters
    states: tuple[str, ...]  # what each initial state is; none given
    used: frozenset[int]  # which of the output and the final states the loss looks at
    layout: Layout

    @property
    def x(self) -> tuple[int, ...]:
        if self.batch is None:
            return self.length, self.inputs
        return *((self.batch, self.length) if self.batch_first else (self.length, self.batch)), self.inputs

    @property
    def runs(self) -> int:
        """How often each layer runs: once for each length."""
        return len(set(self.lengths)) if self.lengths else 1


@st.composite
def recurrents(draw: Draw) -> Recurrent:
    kind = draw(st.sampled_from(("lstm", "gru", "rnn_tanh", "rnn_relu")))
    states = 2 if kind == "lstm" else 1
    projection = draw(st.integers(0, 2)) if kind == "lstm" else 0
    batch, length = draw(st.none() | SIZE), draw(SIZE)
    packed = batch is not None and draw(st.booleans())
    given = draw(st.booleans())
    return Recurrent(
        kind,
        draw(SAMPLES),
        length,
        batch,
        draw(st.tuples(*[st.integers(1, length)] * (batch or 0))) if packed else None,
        draw(SIZE),
        projection + draw(SIZE),
        projection,
        draw(SIZE),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.frozensets(st.sampled_from(("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")))),
        draw(st.tuples(*[st.sampled_from(("param", "frozen", "sample"))] * states)) if given else (),
        draw(st.frozensets(st.integers(0, states), min_size=1)),
        draw(LAYOUTS),
    )
