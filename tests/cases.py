"""The case database: what each contract test runs over.

A case says how to make `(fn, params, batch)`, and which rule handles each use of each parameter, as
`psgrad.testing.rules_used` reports it: "vmap" is plain vmap, a value computed from parameters alone goes
by a name like "Tensor.mul(params['w'])". Add a case here and it meets the whole contract.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence, unpack_sequence

import psgrad

N = 4  # samples: the chunk sizes 1, 2 and 3 divide it or leave a rest
Problem = tuple[Callable[..., Tensor], Any, Any]
Rules = Mapping[str, list[str]]


@dataclass(frozen=True, eq=False)  # a case is itself, so that it can be looked up
class Case:
    id: str
    build: Callable[[], Problem]
    rules: Rules
    refused: bool = False  # torch's own vmap(grad(fn)) refuses it
    diverges: bool = False  # samples take different branches: `rules` is what all of them use
    loops: bool = False  # even vmap refuses: a loop over samples, with a warning
    looks: bool = False  # how its work is divided depends on numbers: compiled calls run it eagerly
    folds: tuple[str, ...] = ()  # the rules without parameters that it runs
    independent: bool = False  # the loss depends on no parameter: zeros, with a warning

    def make(self, dtype: torch.dtype = torch.float64) -> Problem:
        """`(fn, params, batch)`: the same numbers every time, rounded to `dtype`."""
        with torch.random.fork_rng(), default_dtype(dtype):
            torch.default_generator.manual_seed(0)
            return self.build()

    def loop_grads(self, dtype: torch.dtype = torch.float64) -> Any:
        """The gradients of `make(dtype)` by the loop, worked out once. Not to be written to."""
        return _loop_grads(self, dtype)


@functools.cache
def _loop_grads(case: Case, dtype: torch.dtype) -> Any:
    return psgrad.testing.loop_grads(*case.make(dtype))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def draw(*shape: int) -> Tensor:
    """Random numbers that are the same, but for rounding, in every default dtype."""
    return torch.randn(shape, dtype=torch.float64).to(torch.get_default_dtype())


def loss(y: Tensor) -> Tensor:
    """A number from which every element of y gets its own cotangent."""
    return y.sin().square().sum()


# ---- three ways to write a case ---------------------------------------------------------------------------


def _rules(rules: str | Mapping[str, str], names: list[str]) -> Rules:
    """ "linear" for every parameter, or by parameter: {"w": "linear vmap"}."""
    if isinstance(rules, str):
        rules = dict.fromkeys(names, rules)
    return {_path(name): used.split() for name, used in rules.items()}


def _path(name: str) -> str:
    return name if "params" in name else f"params[{name!r}]"


def op(id: str, call: Callable[..., Tensor], rules: Any, x: Any = (3,), **params: Any) -> Case:
    """The loss of `call(x, **params)`; the sample and the parameters given by shape, or by how to make them."""
    flags = {k: params.pop(k) for k in ("refused", "diverges", "loops", "looks", "folds", "independent") if k in params}

    def build() -> Problem:
        drawn = {name: p() if callable(p) else draw(*p) for name, p in params.items()}
        batch = x() if callable(x) else draw(N, *x)
        return (lambda p, sample: loss(call(sample, **p))), drawn, batch

    return Case(id, build, _rules(rules, list(params)), **flags)


def module(
    id: str, make: Callable[[], nn.Module], rules: Any, x: Any = (3,), frozen: tuple[str, ...] = (), **flags: Any
) -> Case:
    """The loss of a module's output; `frozen` names parameters that are left as they are."""

    def built() -> tuple[nn.Module, dict[str, Tensor]]:
        with default_dtype(torch.float64):
            made = make()
        made = made.to(torch.get_default_dtype())
        return made, {k: p.detach() for k, p in made.named_parameters() if k not in frozen}

    def build() -> Problem:
        made, params = built()
        for name in params:  # defaults such as ones for a norm's weight would hide mistakes
            params[name] = params[name] + 0.3 * draw(*params[name].shape)

        def fn(params: Any, sample: Any) -> Tensor:
            buffers = {k: b.clone() for k, b in made.named_buffers()}
            fixed = {k: p.detach() for k, p in made.named_parameters() if k in frozen}
            out = functional_call(made, {**params, **fixed, **buffers}, (sample,))
            return loss(out[0] if isinstance(out, tuple) else out)

        return fn, params, x() if callable(x) else draw(N, *x)

    return Case(id, build, _rules(rules, list(built()[1])), **flags)


def ints(high: int, *shape: int, low: int = 0) -> Callable[[], Tensor]:
    """A batch of integers below `high`."""
    return lambda: torch.randint(low, high, (N, *shape))


def of(function: str, *operands: str) -> str:
    """What a value computed from parameters alone is called; an operand is a parameter or such a value."""
    return f"{function}({', '.join(_path(name) for name in operands)})"


def constant(*shape: int) -> Callable[[Tensor], Tensor]:
    """A tensor for `fn` to close over; called with a tensor whose dtype it takes."""
    value = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return lambda like: value.to(like.device, like.dtype)


# ---- linear and its spellings ------------------------------------------------------------------------------

_W, _B = constant(4, 3), constant(4)


class _Bilinears(nn.Module):
    """Both inputs of the second depend on the first's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Bilinear(3, 3, 2), nn.Bilinear(2, 3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x, x.cos())
        return self.second(y.sin(), torch.cat([y, x[..., :1]], -1))


LINEAR = (
    op("linear-vector", lambda x, w, b: F.linear(x, w, b), "linear", (3,), w=(5, 3), b=(5,)),
    op("linear-matrix", lambda x, w, b: F.linear(x, w, b), "linear", (2, 3), w=(5, 3), b=(5,)),
    op("linear-3d", lambda x, w, b: F.linear(x, w, b), "linear", (2, 4, 3), w=(5, 3), b=(5,)),
    op("linear-as-long-as-the-batch", lambda x, w, b: F.linear(x, w, b), "linear", (N, N), w=(N, N), b=(N,)),
    op("linear-no-bias", lambda x, w: F.linear(x, w), "linear", (2, 3), w=(5, 3)),
    op("linear-keywords", lambda x, w, b: F.linear(bias=b, weight=w, input=x), "linear", (3,), w=(3, 3), b=(3,)),
    op("linear-keywords-swapped", lambda x, w, b: F.linear(x, bias=b, weight=w), "linear", (2, 3), w=(3, 3), b=(3,)),
    op("linear-frozen-bias", lambda x, w: F.linear(x, w, _B(x)), "linear", w=(4, 3)),
    op("linear-frozen-weight", lambda x, b: F.linear(x, _W(x), b), "linear", b=(4,)),
    op("linear-one-feature", lambda x, w, b: F.linear(x, w, b), "linear", (2, 1), w=(1, 1), b=(1,)),
    op("linear-weight-per-sample", lambda x, b: F.linear(_W(x), x, b), "vmap", (5, 3), b=(5,)),
    op("linear-parameter-as-input", lambda x, e: F.linear(e, x), "vmap", (5, 3), e=(2, 3)),
    op(
        "linear-input-and-weight",
        lambda x, e, w: F.linear(e, w) * x,
        {of("F.linear", "e", "w"): "mul"},
        (2, 4),
        e=(2, 3),
        w=(4, 3),
    ),
    op("linear-shared-input", lambda x, w: F.linear(_W(x), w) * x, {of("F.linear", "w"): "mul"}, (4, 2), w=(2, 3)),
    op("bilinear", lambda x, w, b: F.bilinear(x, x, w, b), "bilinear", (3,), w=(2, 3, 3), b=(2,)),
    op("bilinear-rows", lambda x, w: F.bilinear(x, x[..., :2], w), "bilinear", (2, 4, 3), w=(5, 3, 2)),
    op("bilinear-shared-input", lambda x, w, b: F.bilinear(x, _W(x), w, b), "bilinear", (4, 2), w=(2, 2, 3), b=(2,)),
    op(
        "bilinear-parameter-as-input",
        lambda x, e, w: F.bilinear(x, e, w),
        {"e": "vmap", "w": "bilinear"},
        (2, 3),
        e=(2, 4),
        w=(5, 3, 4),
    ),
    op(
        "bilinear-parameter-first",
        lambda x, e, w: F.bilinear(e, x, w),
        {"e": "vmap", "w": "vmap"},
        (2, 3),
        e=(2, 4),
        w=(5, 4, 3),
    ),
    op("bilinear-frozen-weight", lambda x, b: F.bilinear(x, x, _W(x)[None, :3], b), "bilinear", (2, 3), b=(1,)),
    op("bilinear-frozen", lambda x, s: F.bilinear(x * s, x, _W(x)[None, :3]), {"s": "mul"}, (2, 3), s=(3,)),
    op("bilinear-weight-per-sample", lambda x, b: F.bilinear(x[0], x[0], x, b), "vmap", (3, 3, 3), b=(3,)),
    op("bilinear-matrix-bias", lambda x, w, b: F.bilinear(x, x, w, b), "vmap", (2, 3), w=(2, 3, 3), b=(2, 2)),
    op("bilinear-view", lambda x, w: F.bilinear(x, x, w.transpose(1, 2)), "vmap", (2, 3), w=(2, 3, 3)),
    module("bilinear-chain", lambda: _Bilinears(), "bilinear", (2, 3)),
    module("linear-module", lambda: nn.Linear(3, 5), "linear", (2, 3)),
    module("linear-module-no-bias", lambda: nn.Linear(3, 5, bias=False), "linear", (3,)),
    module("linear-module-frozen-bias", lambda: nn.Linear(3, 5), "linear", (3,), frozen=("bias",)),
    module("linear-module-frozen-weight", lambda: nn.Linear(3, 5), "linear", (3,), frozen=("weight",)),
    module("perceptron", lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.GELU()), "linear"),
)

MATMUL = (
    op("matmul-x-w", lambda x, w: x @ w, "matmul", (2, 3), w=(3, 5)),
    op("matmul-vector-w", lambda x, w: x @ w, "matmul", (3,), w=(3, 5)),
    op("matmul-3d-w", lambda x, w: x @ w, "matmul", (2, 4, 3), w=(3, 5)),
    op("matmul-x-wT", lambda x, w: x @ w.T, "matmul", (2, 3), w=(5, 3)),
    op("matmul-x-wt", lambda x, w: x.matmul(w.t()), "matmul", (2, 3), w=(5, 3)),
    op("matmul-w-vector", lambda x, w: w @ x, "matmul", (3,), w=(5, 3)),
    op("matmul-w-matrix", lambda x, w: w @ x, "matmul", (3, 2), w=(5, 3)),
    op("matmul-w-3d", lambda x, w: w @ x, "matmul", (4, 3, 2), w=(5, 3)),
    op("matmul-wT-x", lambda x, w: torch.matmul(w.T, x), "matmul", (3, 2), w=(3, 5)),
    op("matmul-square", lambda x, w: x @ w + w @ x, "matmul matmul", (3, 3), w=(3, 3)),
    op("matmul-dot", lambda x, w: x @ w, "matmul", (3,), w=(3,)),
    op("matmul-dot-first", lambda x, w: w @ x, "matmul", (3,), w=(3,)),
    op("matmul-x-vector", lambda x, w: x @ w, "matmul", (2, 4, 3), w=(3,)),
    op("matmul-vector-x", lambda x, w: w @ x, "matmul", (3, 2), w=(3,)),
    op("matmul-blocks", lambda x, w: x @ w, "matmul", (2, 4, 3), w=(2, 3, 5)),
    op("matmul-blocks-4d", lambda x, w: x @ w, "matmul", (2, 3, 4, 3), w=(2, 3, 3, 2)),
    op("matmul-blocks-inner-batch", lambda x, w: x @ w, "matmul", (5, 2, 4, 3), w=(2, 3, 5)),
    op("matmul-blocks-first", lambda x, w: w @ x, "matmul", (2, 3, 4), w=(2, 5, 3)),
    op("matmul-broadcast-weight", lambda x, w: x @ w, "vmap", (4, 3), w=(2, 3, 5)),
    op("matmul-broadcast-one", lambda x, w: x @ w, "vmap", (2, 4, 3), w=(1, 3, 5)),
    op(
        "matmul-of-parameters",
        lambda x, a, b: x @ (a @ b),
        {of("Tensor.matmul", "a", "b"): "matmul"},
        (2, 3),
        a=(3, 2),
        b=(2, 5),
    ),
    op("mm", lambda x, w: torch.mm(x, w), "matmul", (2, 3), w=(3, 5)),
    op("mm-first", lambda x, w: w.mm(x), "matmul", (3, 2), w=(5, 3)),
    op("bmm", lambda x, w: torch.bmm(x, w), "bmm", (2, 4, 3), w=(2, 3, 5)),
    op("bmm-first", lambda x, w: w.bmm(x), "bmm", (2, 3, 4), w=(2, 5, 3)),
    op("bmm-transposed", lambda x, w: torch.bmm(x, w.mT), "bmm", (2, 4, 3), w=(2, 5, 3)),
    op("mv", lambda x, w: torch.mv(w, x), "mv", (3,), w=(5, 3)),
    op("mv-vector", lambda x, w: x.mv(w), "mv", (2, 3), w=(3,)),
    op("addmm", lambda x, w, b: torch.addmm(b, x, w), "addmm", (2, 3), w=(3, 5), b=(5,)),
    op("addmm-method", lambda x, w, b: b.addmm(x, w), "addmm", (2, 3), w=(3, 5), b=(5,)),
    op("addmm-conv1d-of-gpt2", lambda x, w, b: torch.addmm(b, x.view(-1, 3), w), "addmm", (2, 2, 3), w=(3, 4), b=(4,)),
    op("addmm-frozen-bias", lambda x, w: torch.addmm(_B(x), x, w), "addmm", (2, 3), w=(3, 4)),
    op("addmm-matrix-bias", lambda x, w, b: torch.addmm(b, x, w), "vmap", (2, 3), w=(3, 5), b=(2, 5)),
    op("addmm-scaled", lambda x, w, b: torch.addmm(b, x, w, beta=2, alpha=3), "vmap", (2, 3), w=(3, 5), b=(5,)),
    op("addmm-sum-per-sample", lambda x, w: torch.addmm(x, x, w), "vmap", (3, 3), w=(3, 3)),
    op("addmm-product-per-sample", lambda x, b: torch.addmm(b, x, x), "vmap", (3, 3), b=(3,)),
)

EINSUM = (
    op("einsum-linear", lambda x, w: torch.einsum("ti,oi->to", x, w), "einsum", (2, 3), w=(5, 3)),
    op("einsum-first", lambda x, w: torch.einsum("oi,ti->to", w, x), "einsum", (2, 3), w=(5, 3)),
    op("einsum-spaces", lambda x, w: torch.einsum(" t i , o i -> o t ", x, w), "einsum", (2, 3), w=(5, 3)),
    op("einsum-implicit", lambda x, w: torch.einsum("ij,jk", x, w), "einsum", (2, 3), w=(3, 5)),
    op("einsum-implicit-sorted", lambda x, w: torch.einsum("zj,ja", x, w), "einsum", (2, 3), w=(3, 5)),
    op("einsum-ellipsis", lambda x, w: torch.einsum("...i,io->...o", x, w), "einsum", (2, 4, 3), w=(3, 5)),
    op("einsum-ellipsis-implicit", lambda x, w: torch.einsum("...i,io", x, w), "einsum", (2, 4, 3), w=(3, 5)),
    op("einsum-ellipsis-of-none", lambda x, w: torch.einsum("...i,io->...o", x, w), "einsum", (3,), w=(3, 5)),
    op("einsum-ellipsis-in-both", lambda x, w: torch.einsum("...i,...i->...", x, w), "einsum", (5, 2, 3), w=(2, 3)),
    op("einsum-heads", lambda x, w: torch.einsum("btd,hdk->bhtk", x, w), "vmap", (2, 4, 3), w=(2, 3, 5)),
    op("einsum-heads-last", lambda x, w: torch.einsum("btd,dhk->bhtk", x, w), "einsum", (2, 4, 3), w=(3, 2, 5)),
    op("einsum-two-inner", lambda x, w: torch.einsum("bthd,hde->bte", x, w), "einsum", (2, 4, 2, 3), w=(2, 3, 5)),
    op("einsum-blocks", lambda x, w: torch.einsum("bthd,hde->bthe", x, w), "einsum", (2, 4, 2, 3), w=(2, 3, 5)),
    op("einsum-dot", lambda x, w: torch.einsum("i,i->", x, w), "einsum", (3,), w=(3,)),
    op("einsum-frobenius", lambda x, w: torch.einsum("ij,ij->", w, x), "einsum", (2, 3), w=(2, 3)),
    op("einsum-outer", lambda x, w: torch.einsum("i,j->ij", x, w), "einsum", (2,), w=(3,)),
    op("einsum-product", lambda x, w: torch.einsum("ij,ij->ij", x, w), "einsum", (2, 3), w=(2, 3)),
    op("einsum-upper-case", lambda x, w: torch.einsum("aB,Bc", x, w), "einsum", (2, 3), w=(3, 5)),
    op("einsum-operands-in-a-list", lambda x, w: torch.einsum("ti,oi->to", [x, w]), "einsum", (2, 3), w=(5, 3)),
    op("einsum-product-transposed", lambda x, w: torch.einsum("ij,ij->ji", x, w), "vmap", (2, 3), w=(2, 3)),
    op("einsum-summed-alone", lambda x, w: torch.einsum("ti,oi->o", x, w), "vmap", (2, 3), w=(5, 3)),
    op("einsum-diagonal", lambda x, w: torch.einsum("ti,ii->ti", x, w), "vmap", (2, 3), w=(3, 3)),
    op("einsum-three", lambda x, w: torch.einsum("i,ij,j->", x, w, x), "vmap", (3,), w=(3, 3)),
    op(
        "einsum-three-of-which-two-contract",
        lambda x, w: torch.einsum("ti,oi,t->to", x, w, x[:, 0]),
        "vmap",
        (2, 3),
        w=(5, 3),
    ),
    op("einsum-one", lambda x, w: torch.einsum("ij->ji", w) @ x, {of("torch.einsum", "w"): "matmul"}, (3,), w=(3, 5)),
    op("einsum-broadcast", lambda x, w: torch.einsum("ti,oi->to", x, w), "vmap", (2, 3), w=(5, 1)),
    op("einsum-sublists", lambda x, w: torch.einsum(x, [0, 1], w, [2, 1], [0, 2]), "einsum", (2, 3), w=(5, 3)),
)

# ---- convolutions ------------------------------------------------------------------------------------------


def _conv(id: str, d: int, x: tuple[int, ...], *args: Any, **kwargs: Any) -> Case:
    """A module Conv{d}d(*args, **kwargs) on an input of shape x."""
    return module(id, lambda: getattr(nn, f"Conv{d}d")(*args, **kwargs), f"conv{d}d", x)


def _transposed(id: str, d: int, x: tuple[int, ...], *args: Any, **kwargs: Any) -> Case:
    """A module ConvTranspose{d}d(*args, **kwargs) on an input of shape x."""
    return module(id, lambda: getattr(nn, f"ConvTranspose{d}d")(*args, **kwargs), f"conv_transpose{d}d", x)


CONV = (
    _conv("conv1d", 1, (2, 3, 7), 3, 4, 3),
    _conv("conv1d-unbatched", 1, (3, 7), 3, 4, 3),
    _conv("conv1d-no-bias", 1, (3, 7), 3, 4, 3, bias=False),
    _conv("conv1d-stride-with-remainder", 1, (2, 3, 8), 3, 4, 3, stride=3),
    _conv("conv1d-same", 1, (3, 7), 3, 4, 3, padding="same"),
    _conv("conv1d-same-even", 1, (3, 7), 3, 4, 4, padding="same"),
    _conv("conv1d-same-even-dilated", 1, (2, 3, 7), 3, 4, 2, padding="same", dilation=3),
    _conv("conv1d-groups", 1, (4, 7), 4, 6, 3, groups=2),
    _conv("conv1d-depthwise", 1, (3, 7), 3, 6, 3, groups=3, padding=1),
    _conv("conv1d-pointwise", 1, (2, 3, 7), 3, 4, 1),
    _conv("conv1d-long", 1, (1, 60), 1, 2, 5, padding=2),  # the grouped strategy
    _conv("conv2d", 2, (2, 3, 5, 6), 3, 4, 3),
    _conv("conv2d-unbatched", 2, (3, 5, 6), 3, 4, (3, 2)),
    _conv("conv2d-no-bias", 2, (3, 5, 6), 3, 4, 3, bias=False),
    _conv("conv2d-inner-batch-of-one", 2, (1, 3, 5, 6), 3, 4, 3),
    _conv("conv2d-stride-with-remainder", 2, (2, 3, 6, 7), 3, 4, 3, stride=(2, 3), padding=(1, 0)),
    _conv("conv2d-padding", 2, (3, 4, 5), 3, 4, 3, padding=2),
    _conv("conv2d-padding-tuple", 2, (3, 4, 5), 3, 4, 3, padding=(0, 2)),
    _conv("conv2d-same", 2, (2, 3, 4, 5), 3, 4, 3, padding="same", dilation=2),
    _conv("conv2d-same-even", 2, (3, 4, 5), 3, 4, (2, 4), padding="same"),
    _conv("conv2d-valid", 2, (3, 4, 5), 3, 4, 3, padding="valid"),
    _conv("conv2d-dilation", 2, (3, 6, 7), 3, 4, 3, dilation=(2, 3), padding=1),
    _conv("conv2d-groups", 2, (2, 4, 5, 5), 4, 6, 3, groups=2, stride=2),
    _conv("conv2d-depthwise", 2, (4, 5, 5), 4, 4, 3, groups=4, padding=1),
    _conv("conv2d-depthwise-multiplied", 2, (2, 3, 5, 5), 3, 6, 3, groups=3, padding=1),
    _conv("conv2d-pointwise", 2, (3, 4, 4), 3, 5, 1),
    _conv("conv2d-pointwise-stride", 2, (2, 3, 4, 5), 3, 5, 1, stride=2),
    _conv("conv2d-pointwise-padded", 2, (3, 4, 4), 3, 5, 1, padding=1),
    _conv("conv2d-pointwise-groups", 2, (2, 4, 4, 4), 4, 6, 1, groups=2),
    _conv("conv2d-whole-input", 2, (3, 4, 4), 3, 5, 4),
    _conv("conv2d-large-map", 2, (8, 16, 16), 8, 2, 3, padding=1),  # the grouped strategy
    _conv("conv2d-large-map-inner-batch", 2, (3, 8, 12, 12), 8, 2, 3, padding=1),
    _conv("conv2d-large-map-groups", 2, (16, 16, 16), 16, 4, 3, padding=1, groups=2),
    _conv("conv2d-many-channels", 2, (8, 3, 3), 8, 16, 3, padding=1),  # the patches strategy
    _conv("conv2d-reflect", 2, (3, 5, 6), 3, 4, 3, padding=1, padding_mode="reflect"),
    _conv("conv2d-replicate", 2, (2, 3, 5, 6), 3, 4, 3, padding=(1, 2), padding_mode="replicate"),
    _conv("conv2d-circular", 2, (3, 5, 6), 3, 4, 3, padding=1, padding_mode="circular", stride=2),
    _conv("conv2d-circular-same", 2, (3, 5, 6), 3, 4, (2, 3), padding="same", padding_mode="circular"),
    _conv("conv3d", 3, (2, 3, 3, 4), 2, 3, 2),
    _conv("conv3d-inner-batch", 3, (2, 2, 3, 3, 4), 2, 3, 2, stride=(1, 2, 2), padding=1),
    _conv("conv3d-dilation", 3, (2, 5, 4, 4), 2, 3, 2, dilation=(3, 2, 1)),
    _conv("conv3d-groups", 3, (2, 3, 3, 3), 2, 4, 3, groups=2, padding="same"),
    _conv("conv3d-pointwise", 3, (2, 3, 2, 2), 2, 3, 1),
    module("conv2d-frozen-weight", lambda: nn.Conv2d(3, 4, 3), "conv2d", (3, 5, 5), frozen=("weight",)),
    module("conv2d-frozen-bias", lambda: nn.Conv2d(3, 4, 3), "conv2d", (3, 5, 5), frozen=("bias",)),
    op(
        "conv2d-keywords",
        lambda x, w, b: F.conv2d(groups=1, padding=[1], bias=b, stride=(2,), weight=w, input=x),
        "conv2d",
        (2, 5, 5),
        w=(3, 2, 3, 3),
        b=(3,),
    ),
    op("conv2d-view", lambda x, w: F.conv2d(x, w.view(4, 3, 2, 2)), "conv2d", (3, 5, 5), w=(4, 12)),
    op("conv2d-transposed-weight", lambda x, w: F.conv2d(x, w.transpose(0, 1)), "conv2d", (3, 5, 5), w=(3, 4, 2, 2)),
    op("conv2d-parameter-as-input", lambda x, e: F.conv2d(e, x), "vmap", (2, 3, 2, 2), e=(3, 5, 5)),
    op("conv2d-weight-per-sample", lambda x, b: F.conv2d(x, x, b), "vmap", (3, 3, 2, 2), b=(3,)),
    _transposed("conv-transpose1d", 1, (2, 3, 5), 3, 2, 3),
    _transposed("conv-transpose1d-unbatched", 1, (3, 5), 3, 2, 3, stride=2, padding=1, output_padding=1),
    _transposed("conv-transpose1d-no-bias", 1, (3, 5), 3, 2, 2, bias=False),
    _transposed("conv-transpose1d-groups", 1, (2, 4, 5), 4, 6, 3, stride=3, groups=2, output_padding=2),
    _transposed("conv-transpose1d-pointwise", 1, (2, 3, 5), 3, 4, 1, stride=2, output_padding=1),
    _transposed("conv-transpose1d-beyond-reach", 1, (2, 3, 4), 3, 2, 2, dilation=3, output_padding=2),
    _transposed("conv-transpose1d-beyond-reach-padded", 1, (3, 5), 3, 2, 2, padding=2, dilation=3, output_padding=1),
    _transposed("conv-transpose1d-long", 1, (2, 60), 2, 1, 5, stride=2, padding=2),  # the grouped strategy
    _transposed("conv-transpose2d", 2, (2, 3, 4, 5), 3, 4, 3),
    _transposed("conv-transpose2d-unbatched", 2, (3, 4, 5), 3, 4, (3, 2), stride=2),
    _transposed("conv-transpose2d-output-padding", 2, (2, 3, 4, 4), 3, 4, 3, (2, 3), (1, 0), (1, 2)),
    _transposed("conv-transpose2d-dilation", 2, (3, 4, 4), 3, 4, (2, 3), dilation=(2, 3), padding=1),
    _transposed("conv-transpose2d-groups", 2, (4, 4, 3), 4, 6, 3, stride=2, groups=2),
    _transposed("conv-transpose2d-depthwise", 2, (2, 3, 4, 4), 3, 6, 3, groups=3, padding=1),
    _transposed("conv-transpose2d-pointwise", 2, (3, 4, 4), 3, 5, 1),
    _transposed("conv-transpose2d-cut-away", 2, (3, 5, 5), 3, 4, 1, padding=1),
    _transposed("conv-transpose2d-beyond-reach", 2, (3, 4, 3), 3, 2, 2, dilation=(3, 4), output_padding=(2, 3)),
    _transposed("conv-transpose2d-large-map", 2, (2, 12, 12), 2, 8, 3, padding=1),  # the grouped strategy
    _transposed("conv-transpose3d", 3, (2, 3, 2, 3), 2, 3, 2),
    _transposed("conv-transpose3d-inner-batch", 3, (2, 2, 3, 2, 2), 2, 4, 2, (1, 2, 2), 1, (0, 1, 0), 2),
    module(
        "conv-transpose2d-frozen-weight",
        lambda: nn.ConvTranspose2d(3, 4, 3),
        "conv_transpose2d",
        (3, 5, 5),
        frozen=("weight",),
    ),
    module(
        "conv-transpose2d-frozen-bias",
        lambda: nn.ConvTranspose2d(3, 4, 3),
        "conv_transpose2d",
        (3, 5, 5),
        frozen=("bias",),
    ),
    op(
        "conv-transpose2d-keywords",
        lambda x, w, b: F.conv_transpose2d(dilation=2, bias=b, stride=[3], weight=w, output_padding=(1,), input=x),
        "conv_transpose2d",
        (2, 4, 4),
        w=(2, 3, 2, 3),
        b=(3,),
    ),
    op(
        "conv-transpose2d-view", lambda x, w: F.conv_transpose2d(x, w.mT), "conv_transpose2d", (3, 4, 4), w=(3, 2, 2, 3)
    ),
    op("conv-transpose1d-weight-per-sample", lambda x, b: F.conv_transpose1d(x, x, b), "vmap", (3, 3, 2), b=(3,)),
    module(
        "autoencoder",
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, 2, 1), nn.PReLU(4), nn.ConvTranspose2d(4, 3, 4, 2, 1), nn.PReLU(), nn.Conv2d(3, 2, 1)
        ),
        {f"{k}.{name}": "conv2d" for k in (0, 4) for name in ("weight", "bias")}
        | {f"2.{name}": "conv_transpose2d" for name in ("weight", "bias")}
        | {"1.weight": "prelu", "3.weight": "prelu"},
        (1, 2, 6, 6),
    ),
    module(
        "convolutional-net",
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, 1, 1),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, 2, 1, groups=2),
            nn.InstanceNorm2d(8, affine=True),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(0),
            nn.Linear(32, 3),
        ),
        {
            f"{layer}.{name}": rule
            for layer, rule in {0: "conv2d", 1: "group_norm", 3: "conv2d", 4: "instance_norm", 7: "linear"}.items()
            for name in ("weight", "bias")
        },
        (3, 8, 8),
    ),
)

# ---- recurrent layers --------------------------------------------------------------------------------------


class _Finals(nn.Module):
    """A recurrent layer's output, final states and, for an lstm, cells: all in one tensor."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out, last = self.layer(x)
        return torch.cat([out.flatten(), *(t.flatten() for t in (last if isinstance(last, tuple) else (last,)))])


class _Encoded(nn.Module):
    """A layer that starts from what another has come to."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.encoder, self.decoder = kind(3, 2), kind(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x[:2], self.encoder(x)[1])[0]


class _Learned(nn.Module):
    """A layer with initial states of its own; the second one is the same for all inner sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 2)
        self.h, self.c = nn.Parameter(torch.zeros(1, 2, 2)), nn.Parameter(torch.zeros(1, 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, (self.h, self.c.expand(1, 2, 2)))[0]


class _Unrolled(nn.Module):
    """A cell in a loop over time."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for row in x:
            state = self.cell(row, state)
        return torch.cat(state) if isinstance(state, tuple) else state


class _Packed(nn.Module):
    """A layer on inner sequences of different lengths, packed in an order of their own."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([2, 4, 2]), enforce_sorted=False)
        out, last = self.layer(packed)
        return torch.cat([pad_packed_sequence(out, padding_value=0.3)[0].flatten(), last.flatten()])


class _Listed(nn.Module):
    """A layer on a list of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.layer(pack_sequence([x[:2], x, x[2:]], enforce_sorted=False))
        return torch.cat(unpack_sequence(out))


class _Shortened(nn.Module):
    """A layer on as many steps as the sample says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 2, batch_first=True)

    def forward(self, sample: tuple[Tensor, Tensor]) -> Tensor:
        x, length = sample
        return self.layer(pack_padded_sequence(x[None], length[None], batch_first=True))[1][0]


def _first_weights(p: Any) -> list[Tensor]:
    return [p["w"], p["u"], p["b"], p["b"]]


_RECURRENT = (
    module("lstm", lambda: nn.LSTM(3, 2), "lstm", (4, 2, 3)),
    module("lstm-unbatched", lambda: nn.LSTM(3, 2), "lstm", (4, 3)),
    module("lstm-as-long-as-the-batch", lambda: nn.LSTM(N, N), "lstm", (N, N, N)),
    module("lstm-one-step", lambda: nn.LSTM(3, 2), "lstm", (1, 1, 3)),
    module("lstm-batch-first", lambda: nn.LSTM(3, 2, batch_first=True), "lstm", (2, 4, 3)),
    module("lstm-no-bias", lambda: nn.LSTM(3, 2, bias=False), "lstm", (4, 2, 3)),
    module("lstm-two-ways", lambda: _Finals(nn.LSTM(3, 2, bidirectional=True)), "lstm", (4, 2, 3)),
    module("lstm-layers", lambda: _Finals(nn.LSTM(3, 2, 2, bidirectional=True)), "lstm", (4, 2, 3)),
    module("lstm-projections", lambda: _Finals(nn.LSTM(3, 4, 2, proj_size=2)), "lstm", (4, 2, 3)),
    module("lstm-frozen-weight", lambda: nn.LSTM(3, 2), "lstm", (4, 3), frozen=("weight_hh_l0", "bias_ih_l0")),
    module(
        "lstm-frozen-layer",
        lambda: nn.LSTM(3, 2, 2),
        "lstm",
        (4, 3),
        frozen=("weight_ih_l1", "weight_hh_l1", "bias_ih_l1", "bias_hh_l1"),
    ),
    module("lstm-of-another", lambda: _Encoded(nn.LSTM), "lstm", (4, 2, 3)),
    module("lstm-learned-states", _Learned, "lstm", (4, 2, 3)),
    module("lstm-in-place", lambda: nn.Sequential(_Finals(nn.LSTM(3, 2)), nn.ReLU(inplace=True)), "lstm", (4, 3)),
    module("lstm-list", _Listed, "lstm lstm lstm", (5, 3)),
    module("lstm-cell", lambda: nn.LSTMCell(3, 2), "lstm", (2, 3)),
    module("gru", lambda: nn.GRU(3, 2), "gru", (4, 2, 3)),
    module("gru-unbatched", lambda: nn.GRU(3, 2, bias=False), "gru", (4, 3)),
    module("gru-layers", lambda: _Finals(nn.GRU(3, 2, 2, bidirectional=True, batch_first=True)), "gru", (2, 4, 3)),
    module("gru-of-another", lambda: _Encoded(nn.GRU), "gru", (4, 2, 3)),
    module("gru-packed", lambda: _Packed(nn.GRU(3, 2, bidirectional=True)), "gru gru", (4, 3, 3)),
    module("gru-cell", lambda: nn.GRUCell(3, 2), "gru", (3,)),
    module("rnn-tanh", lambda: _Finals(nn.RNN(3, 2, 2, bidirectional=True)), "rnn_tanh", (4, 2, 3)),
    module("rnn-tanh-no-bias", lambda: nn.RNN(3, 2, bias=False), "rnn_tanh", (4, 3)),
    module("rnn-of-another", lambda: _Encoded(nn.RNN), "rnn_tanh", (4, 2, 3)),
    module("rnn-relu", lambda: _Finals(nn.RNN(3, 2, 2, nonlinearity="relu")), "rnn_relu", (4, 2, 3)),
    module("rnn-packed", lambda: _Packed(nn.RNN(3, 2, nonlinearity="relu")), "rnn_relu rnn_relu", (4, 3, 3)),
    module("rnn-cell", lambda: nn.RNNCell(3, 2), "rnn_tanh", (2, 3)),
    module("rnn-cell-relu", lambda: nn.RNNCell(3, 2, bias=False, nonlinearity="relu"), "rnn_relu", (2, 3)),
    *(
        module(f"{rule}-unrolled", lambda cell=cell: _Unrolled(cell(3, 2)), " ".join([rule] * 3), (3, 2, 3))
        for rule, cell in (("lstm", nn.LSTMCell), ("gru", nn.GRUCell), ("rnn_tanh", nn.RNNCell))
    ),
    module(
        "lstm-packed-by-sample",
        _Shortened,
        "lstm",
        lambda: (draw(N, 4, 3), torch.tensor([4, 2, 4, 1])),
        diverges=True,
    ),
)
RECURRENT = (
    *(replace(case, refused=True) for case in _RECURRENT),
    op(
        "lstm-function",
        lambda x, **p: torch.lstm(
            x, (x[:1, :, :2], x[1:2, :, :2]), _first_weights(p), True, 1, 0.0, True, False, False
        )[2],
        {"w": "lstm", "u": "lstm", "b": "lstm lstm"},
        (4, 1, 3),
        w=(8, 3),
        u=(8, 2),
        b=(8,),
    ),
)

# ---- norms -------------------------------------------------------------------------------------------------


def _running(norm: Any) -> Any:
    """`norm` with running statistics that are not the defaults."""
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm


NORM = (
    module("group-norm", lambda: nn.GroupNorm(2, 4), "group_norm", (2, 4, 3, 3)),
    module("group-norm-inner-batch-of-one", lambda: nn.GroupNorm(2, 4), "group_norm", (1, 4, 5)),
    module("group-norm-no-axes", lambda: nn.GroupNorm(2, 6), "group_norm", (3, 6)),
    module("group-norm-one-group", lambda: nn.GroupNorm(1, 4, eps=0.1), "group_norm", (2, 4, 3)),
    module("group-norm-all-groups", lambda: nn.GroupNorm(4, 4), "group_norm", (2, 4, 3)),
    module("group-norm-frozen-bias", lambda: nn.GroupNorm(2, 4), "group_norm", (2, 4, 3), frozen=("bias",)),
    module("group-norm-frozen-weight", lambda: nn.GroupNorm(2, 4), "group_norm", (2, 4, 3), frozen=("weight",)),
    op("group-norm-no-bias", lambda x, w: F.group_norm(x, 2, w), "group_norm", (2, 4, 3), w=(4,)),
    op("group-norm-one-channel", lambda x, w, b: F.group_norm(x, 1, w, b), "group_norm", (1, 1, 4), w=(1,), b=(1,)),
    op("group-norm-plain", lambda x, s: F.group_norm(x * s, 2), {"s": "mul"}, (2, 4, 3), s=(4, 1)),
    op(
        "group-norm-parameter",
        lambda x, w: F.group_norm(w, 2) * x,
        {of("F.group_norm", "w"): "mul"},
        (4, 3),
        w=(2, 4, 3),
    ),
    module("layer-norm", lambda: nn.LayerNorm(5), "layer_norm", (2, 5)),
    module("layer-norm-vector", lambda: nn.LayerNorm(5, eps=0.1), "layer_norm", (5,)),
    module("layer-norm-two-axes", lambda: nn.LayerNorm((3, 4)), "layer_norm", (2, 3, 4)),
    module("layer-norm-three-axes", lambda: nn.LayerNorm((2, 3, 4)), "layer_norm", (2, 3, 4)),
    module("layer-norm-inner-batches", lambda: nn.LayerNorm(3), "layer_norm", (2, 2, 4, 3)),
    module("layer-norm-no-bias", lambda: nn.LayerNorm(5, bias=False), "layer_norm", (2, 5)),
    module("layer-norm-frozen-weight", lambda: nn.LayerNorm(5), "layer_norm", (2, 5), frozen=("weight",)),
    op("layer-norm-no-weight", lambda x, b: F.layer_norm(x, [5], bias=b), "layer_norm", (2, 5), b=(5,)),
    op("layer-norm-plain", lambda x, s: F.layer_norm(x * s, (5,)), {"s": "mul"}, (2, 5), s=(5,)),
    op("layer-norm-int-shape", lambda x, w: F.layer_norm(x, torch.Size([5]), w), "layer_norm", (2, 5), w=(5,)),
    module("rms-norm", lambda: nn.RMSNorm(5), "rms_norm", (2, 5)),
    module("rms-norm-vector", lambda: nn.RMSNorm(5, eps=0.1), "rms_norm", (5,)),
    module("rms-norm-two-axes", lambda: nn.RMSNorm((3, 4)), "rms_norm", (2, 3, 4)),
    module("rms-norm-inner-batches", lambda: nn.RMSNorm(3), "rms_norm", (2, 2, 4, 3)),
    op("rms-norm-plain", lambda x, s: F.rms_norm(x * s, (5,)), {"s": "mul"}, (2, 5), s=(5,)),
    op(
        "rms-norm-parameter",
        lambda x, e, w: F.rms_norm(e, [3], w) * x,
        {of("F.rms_norm", "e", "w"): "mul"},
        (4, 3),
        e=(2, 4, 3),
        w=(3,),
    ),
    op("rms-norm-frozen-weight", lambda x, s: F.rms_norm(x * s, (4,), _B(x)), {"s": "mul"}, (2, 4), s=(4,)),
    op("rms-norm-twice", lambda x, w: F.rms_norm(F.rms_norm(x, [5], w).exp(), [5], w), "rms_norm " * 2, (2, 5), w=(5,)),
    module("instance-norm", lambda: nn.InstanceNorm2d(3, affine=True), "instance_norm", (2, 3, 4, 4)),
    module("instance-norm-unbatched", lambda: nn.InstanceNorm1d(3, affine=True), "instance_norm", (3, 4)),
    module("instance-norm-3d", lambda: nn.InstanceNorm3d(2, affine=True), "instance_norm", (2, 2, 2, 2)),
    module(
        "instance-norm-tracking",
        lambda: _running(nn.InstanceNorm1d(3, affine=True, track_running_stats=True)),
        "instance_norm",
        (2, 3, 4),
        refused=True,
    ),
    module(
        "instance-norm-eval",
        lambda: _running(nn.InstanceNorm1d(3, affine=True, track_running_stats=True)).eval(),
        "instance_norm",
        (2, 3, 4),
    ),
    module(
        "instance-norm-frozen-bias",
        lambda: nn.InstanceNorm1d(3, affine=True),
        "instance_norm",
        (2, 3, 4),
        frozen=("bias",),
    ),
    op("instance-norm-no-weight", lambda x, b: F.instance_norm(x, bias=b), "instance_norm", (2, 3, 4), b=(3,)),
    op("instance-norm-plain", lambda x, s: F.instance_norm(x * s), {"s": "mul"}, (2, 3, 4), s=(3, 1)),
    module("batch-norm", lambda: nn.BatchNorm1d(3, track_running_stats=False), "batch_norm", (5, 3)),
    module("batch-norm-images", lambda: nn.BatchNorm2d(3, track_running_stats=False), "batch_norm", (2, 3, 4, 4)),
    module("batch-norm-one-image", lambda: nn.BatchNorm2d(3, track_running_stats=False), "batch_norm", (1, 3, 4, 4)),
    module("batch-norm-tracking", lambda: nn.BatchNorm1d(3), "batch_norm", (2, 3, 4), refused=True),
    module("batch-norm-eval", lambda: _running(nn.BatchNorm1d(3)).eval(), "batch_norm", (2, 3)),
    module("batch-norm-eval-images", lambda: _running(nn.BatchNorm2d(3, eps=0.1)).eval(), "batch_norm", (2, 3, 4, 4)),
    module("batch-norm-eval-single", lambda: _running(nn.BatchNorm3d(2)).eval(), "batch_norm", (1, 2, 1, 1, 1)),
    module(
        "batch-norm-frozen-weight",
        lambda: nn.BatchNorm1d(3, track_running_stats=False),
        "batch_norm",
        (2, 3, 4),
        frozen=("weight",),
    ),
    op(
        "batch-norm-no-bias",
        lambda x, w: F.batch_norm(x, None, None, w, training=True),
        "batch_norm",
        (2, 3, 4),
        w=(3,),
    ),
    op(
        "batch-norm-plain",
        lambda x, s: F.batch_norm(x * s, None, None, training=True),
        {"s": "mul"},
        (2, 3, 4),
        s=(3, 1),
    ),
)

# ---- tables ------------------------------------------------------------------------------------------------

_STARTS: Callable[[Tensor], Tensor] = lambda like: torch.tensor([0, 2, 2, 6], device=like.device)  # an empty bag
_STARTS_AND_END: Callable[[Tensor], Tensor] = lambda like: torch.tensor([0, 2, 2, 6, 9], device=like.device)


def _bag(id: str, shape: tuple[int, ...], rule: str = "embedding_bag", **options: Any) -> Case:
    """F.embedding_bag of a table of 4 rows."""

    def call(x: Tensor, w: Tensor) -> Tensor:
        return F.embedding_bag(x, w, **{name: o(w) if callable(o) else o for name, o in options.items()})

    return op(id, call, rule, ints(4, *shape), w=(4, 3))


def _bags_of_samples() -> Problem:
    """Every sample has bags of its own lengths."""

    def fn(params: Any, sample: Any) -> Tensor:
        index, offsets = sample
        return loss(F.embedding_bag(index, params["w"], offsets))

    return fn, {"w": draw(4, 3)}, (ints(4, 5)(), torch.tensor([[0, 2], [0, 0], [0, 5], [0, 4]]))


EMBEDDING = (
    op("embedding", lambda x, w: F.embedding(x, w), "embedding", ints(6, 5), w=(6, 3)),
    op("embedding-one-index", lambda x, w: F.embedding(x, w), "embedding", ints(6), w=(6, 3)),
    op("embedding-matrix", lambda x, w: F.embedding(x, w), "embedding", ints(6, 2, 4), w=(6, 3)),
    op("embedding-repeated", lambda x, w: F.embedding(x, w), "embedding", ints(2, 7), w=(6, 3)),
    op("embedding-int32", lambda x, w: F.embedding(x, w), "embedding", lambda: ints(6, 5)().int(), w=(6, 3)),
    op("embedding-padding", lambda x, w: F.embedding(x, w, 1), "embedding", ints(3, 7), w=(3, 2)),
    op("embedding-padding-negative", lambda x, w: F.embedding(x, w, -1), "embedding", ints(3, 7), w=(3, 2)),
    op(
        "embedding-by-frequency",
        lambda x, w: F.embedding(x, w, scale_grad_by_freq=True),
        "embedding",
        ints(3, 7),
        w=(3, 2),
    ),
    op(
        "embedding-by-frequency-padding",
        lambda x, w: F.embedding(x, w, padding_idx=0, scale_grad_by_freq=True),
        "embedding",
        ints(3, 2, 4),
        w=(3, 2),
    ),
    op(
        "embedding-shared-index",
        lambda x, w: F.embedding(torch.arange(3, device=x.device), w) * x,
        "embedding",
        (3, 2),
        w=(5, 2),
    ),
    op("embedding-transposed", lambda x, w: F.embedding(x, w.T), "embedding", ints(6, 5), w=(3, 6)),
    module("embedding-module", lambda: nn.Embedding(6, 3, padding_idx=2), "embedding", ints(6, 5)),
    op("index", lambda x, w: w[x], "index", ints(6, 5), w=(6, 3)),
    op("index-one", lambda x, w: w[x], "index", ints(6), w=(6, 3), refused=True),
    op("index-negative", lambda x, w: w[x], "index", ints(6, 5, low=-6), w=(6, 3)),
    op("index-vector-table", lambda x, w: w[x], "index", ints(6, 2, 3), w=(6,)),
    op("index-scalar", lambda x, w: w[x], "index", ints(6), w=(6,), refused=True),
    op("index-3d-table", lambda x, w: w[x], "index", ints(4, 5), w=(4, 2, 3)),
    op("index-int32", lambda x, w: w[x], "index", lambda: ints(6, 5)().int(), w=(6, 3)),
    op("index-view", lambda x, w: w[1:5][x], "index", ints(4, 5), w=(6, 3)),
    op("index-transposed", lambda x, w: w.T[x], "vmap", ints(3, 5), w=(6, 3)),
    op("index-pair", lambda x, w: w[x[0], x[1]], "vmap", ints(3, 2, 4), w=(3, 3)),
    op("index-second-axis", lambda x, w: w[:, x], "vmap", ints(3, 4), w=(2, 3)),
    op(
        "index-shared",
        lambda x, w: w[torch.tensor([2, 0, 2], device=x.device)] * x,
        {of("Tensor.__getitem__", "w"): "mul"},
        (3, 2),
        w=(5, 2),
    ),
    op("index-list", lambda x, w: w[[2, 0, 2]] * x, {of("Tensor.__getitem__", "w"): "mul"}, (3, 2), w=(5, 2)),
    op(
        "index-sample",
        lambda x, s: x[torch.tensor([1, 0], device=x.device)] * s,
        {"s": "mul"},
        (3, 2),
        s=(2,),
    ),
    op("index-select", lambda x, w: torch.index_select(w, 0, x), "index_select", ints(6, 5), w=(6, 3)),
    op("index-select-repeated", lambda x, w: w.index_select(0, x), "index_select", ints(2, 7), w=(6, 3)),
    op("index-select-one", lambda x, w: w.index_select(0, x), "index_select", ints(6), w=(6, 3), refused=True),
    op("index-select-int32", lambda x, w: w.index_select(0, x), "index_select", lambda: ints(6, 5)().int(), w=(6, 3)),
    op("index-select-vector", lambda x, w: w.index_select(0, x), "index_select", ints(6, 5), w=(6,)),
    op("index-select-3d-table", lambda x, w: w.index_select(-3, x), "index_select", ints(4, 5), w=(4, 2, 3)),
    op("index-select-columns", lambda x, w: w.index_select(1, x).view(-1), "index_select", ints(6, 5), w=(3, 6)),
    op("index-select-last-of-three", lambda x, w: w.index_select(-1, x), "index_select", ints(4, 5), w=(2, 3, 4)),
    op("index-select-middle-of-three", lambda x, w: w.index_select(1, x), "vmap", ints(3, 5), w=(2, 3, 4)),
    op("index-select-one-of-the-middle", lambda x, w: w.index_select(1, x), "vmap", ints(3), w=(2, 3, 4), refused=True),
    op("index-select-view", lambda x, w: w[1:5].index_select(0, x), "index_select", ints(4, 5), w=(6, 3)),
    op("index-select-transposed", lambda x, w: w.T.index_select(0, x), "index_select", ints(6, 5), w=(3, 6)),
    op("index-select-twice", lambda x, w: w.index_select(0, x) @ w.T, "index_select matmul", ints(6, 5), w=(6, 3)),
    op(
        "index-select-shared",
        lambda x, w: w.index_select(0, torch.tensor([2, 0, 2], device=x.device)) * x,
        {of("Tensor.index_select", "w"): "mul"},
        (3, 2),
        w=(5, 2),
    ),
    op(
        "index-select-sample",
        lambda x, s: x.index_select(0, torch.tensor([1, 0], device=x.device)) * s,
        {"s": "mul"},
        (3, 2),
        s=(2,),
    ),
    _bag("embedding-bag", (2, 4)),
    _bag("embedding-bag-sum", (2, 4), mode="sum"),
    _bag("embedding-bag-max", (2, 4), mode="max"),
    _bag("embedding-bag-padding", (3, 4), padding_idx=1),
    _bag("embedding-bag-sum-padding", (3, 4), mode="sum", padding_idx=-2),
    _bag("embedding-bag-max-padding", (3, 4), mode="max", padding_idx=1),
    _bag("embedding-bag-by-frequency", (3, 4), "vmap", scale_grad_by_freq=True),
    _bag("embedding-bag-by-frequency-padding", (3, 4), "vmap", mode="sum", scale_grad_by_freq=True, padding_idx=0),
    _bag("embedding-bag-weights", (3, 4), mode="sum", per_sample_weights=constant(3, 4)),
    _bag("embedding-bag-weights-padding", (3, 4), mode="sum", per_sample_weights=constant(3, 4), padding_idx=1),
    _bag("embedding-bag-offsets", (9,), offsets=_STARTS),
    _bag("embedding-bag-offsets-sum", (9,), offsets=_STARTS, mode="sum"),
    _bag("embedding-bag-offsets-max", (9,), offsets=_STARTS, mode="max"),
    _bag("embedding-bag-offsets-padding", (9,), offsets=_STARTS, padding_idx=2),
    _bag("embedding-bag-offsets-max-padding", (9,), offsets=_STARTS, mode="max", padding_idx=2),
    _bag("embedding-bag-offsets-by-frequency", (9,), "vmap", offsets=_STARTS, scale_grad_by_freq=True),
    _bag("embedding-bag-offsets-weights", (9,), offsets=_STARTS, mode="sum", per_sample_weights=constant(9)),
    _bag("embedding-bag-last-offset", (9,), offsets=_STARTS_AND_END, include_last_offset=True),
    _bag("embedding-bag-last-offset-max", (9,), offsets=_STARTS_AND_END, include_last_offset=True, mode="max"),
    Case("embedding-bag-offsets-per-sample", _bags_of_samples, _rules("embedding_bag", ["w"])),
    op(
        "embedding-bag-weight-parameters",
        lambda x, w, s: F.embedding_bag(x, w, mode="sum", per_sample_weights=s),
        {"w": "embedding_bag", "s": "vmap"},
        ints(3, 2, 4),
        w=(3, 2),
        s=(2, 4),
    ),
    op(
        "embedding-bag-computed-weights",
        lambda x, w, s: F.embedding_bag(x, w, mode="sum", per_sample_weights=s * x),
        {"w": "embedding_bag", "s": "mul"},
        ints(3, 2, 4),
        w=(3, 2),
        s=(2, 4),
    ),
    op(
        "embedding-bag-shared-index",
        lambda x, w: F.embedding_bag(torch.tensor([[2, 0], [2, 2]], device=x.device), w) * x,
        "embedding_bag",
        (2, 3),
        w=(5, 3),
    ),
    op("embedding-bag-transposed", lambda x, w: F.embedding_bag(x, w.T), "embedding_bag", ints(6, 2, 5), w=(3, 6)),
    op("one-hot", lambda x, w: F.one_hot(x, 6).to(w.dtype) @ w, "matmul", ints(6, 5), w=(6, 3), refused=True),
    op("gather", lambda x, w: w.gather(0, x), "vmap", ints(4, 2, 3), w=(4, 3)),
)

# ---- parameters used bare ----------------------------------------------------------------------------------

_OPS: dict[str, Callable[..., Tensor]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
}
_BROADCASTS = {  # the sample's shape, the parameter's
    "": ((2, 3), (2, 3)),
    "-narrow": ((4, 2, 3), (2, 1)),
    "-wide": ((3,), (4, 2, 3)),
    "-both-ways": ((2, 1, 3), (4, 1)),
    "-as-long-as-the-batch": ((N,), (N, 1)),
}
_SCALARS = {"-scalar": ((2, 3), ()), "-by-scalar": ((), (2, 3)), "-scalars": ((), ())}


def _away_from_zero(*shape: int) -> Tensor:
    return draw(*shape).exp() + 0.5


def _bare(name: str, kind: str, first: bool) -> Case:
    call, (x, w) = _OPS[name], (_BROADCASTS | _SCALARS)[kind]
    return op(
        f"{name}{'-first' if first else ''}{kind}",
        (lambda x, w: call(w, x)) if first else (lambda x, w: call(x, w)),
        name,
        lambda: _away_from_zero(N, *x),
        w=lambda: _away_from_zero(*w),
    )


ELEMENTWISE = (
    *(_bare(name, kind, first) for name in _OPS for kind in _BROADCASTS for first in (False, True)),
    *(_bare("div", kind, first) for kind in _SCALARS for first in (False, True)),
    op("add-scaled", lambda x, w: torch.add(x, w, alpha=3), "vmap", (2, 3), w=(3,)),
    op("sub-scaled", lambda x, w: w.sub(x, alpha=3), "vmap", (2, 3), w=(3,)),
    op("div-floor", lambda x, w: torch.div(x, w, rounding_mode="floor") + x * w, "mul vmap", w=(3,)),
    op("add-other-keyword", lambda x, w: torch.add(x, other=w), "add", (2, 3), w=(3,)),
    op("mul-input-keyword", lambda x, w: torch.mul(other=x, input=w), "mul", (2, 3), w=(3,)),
    op("add-in-place", lambda x, w: (2 * x).add_(w), "vmap", (2, 3), w=(3,)),
    op("add-to-itself", lambda x, w: x * (w + w), {of("Tensor.add", "w"): "mul"}, w=(3,)),
    op("mul-integers", lambda x, w: x * w, "mul", ints(5, 3), w=(3,)),
    op("mul-booleans", lambda x, w: w * (x > 0), "mul", (3,), w=(3,)),
    op("mul-number", lambda x, w: (2 * w) * x, {of("Tensor.mul", "w"): "mul"}, w=(3,)),
    op("reversed-sub", lambda x, w: (1 - w) * x, {of("Tensor.__rsub__", "w"): "mul"}, w=(3,)),
    op("reversed-div", lambda x, w: (1 / w) * x, {of("Tensor.__rdiv__", "w"): "mul"}, w=lambda: _away_from_zero(3)),
    op("pow", lambda x, w: x**w, "vmap", lambda: _away_from_zero(N, 3), w=(3,)),
    op("exp-times", lambda x, w: w.exp() * x, {of("Tensor.exp", "w"): "mul"}, w=(3,)),
    op("class-token", lambda x, w: torch.cat([w.expand(1, -1), x]), "vmap", (2, 3), w=(3,)),
    op(
        "relative-positions", lambda x, w: x + w[_offsets(3, x)], {of("Tensor.__getitem__", "w"): "add"}, (3, 3), w=(5,)
    ),
    op("where", lambda x, w: torch.where(x > 0, x, w), "vmap", (2, 3), w=(3,)),
    op("prelu", lambda x, w: F.prelu(x, w), "prelu", (2, 3), w=(3,)),
    op("prelu-images", lambda x, w: x.prelu(w), "prelu", (2, 3, 4, 4), w=(3,)),
    op("prelu-one-slope", lambda x, w: F.prelu(x, w), "prelu", (2, 3, 4), w=(1,)),
    op("prelu-vector", lambda x, w: F.prelu(x, w), "prelu", (3,), w=(1,)),
    op("prelu-number", lambda x, w: F.prelu(x.sum(), w), "prelu", (3,), w=()),
    op("prelu-as-long-as-the-batch", lambda x, w: F.prelu(x, w), "prelu", (N, N), w=(N,)),
    op("prelu-twice", lambda x, w: F.prelu(F.prelu(x, w) - 1, w), "prelu prelu", (2, 3, 2), w=(3,)),
    op(
        "stack-of-parameters",
        lambda x, a, b: x @ torch.stack([a, b]),
        {of("torch.stack", "a", "b"): "matmul"},
        (2,),
        a=(3,),
        b=(3,),
    ),
    op(
        "penalty",
        lambda x, w: F.linear(x, w).sum() + w.square().sum(),
        {"w": "linear", of("Tensor.sum", of("Tensor.square", "w")): "add"},
        (3,),
        w=(2, 3),
    ),
)

# ---- views and functions of parameters ---------------------------------------------------------------------

VIEWS = (
    op("view-t", lambda x, w: F.linear(x, w.t()), "linear", (2, 3), w=(3, 5)),
    op("view-T", lambda x, w: F.linear(x, w.T), "linear", (2, 3), w=(3, 5)),
    op("view-mT", lambda x, w: F.linear(x, w.mT), "linear", (2, 3), w=(3, 5)),
    op("view-square-t", lambda x, w: F.linear(x, w.t()), "linear", (2, 3), w=(3, 3)),
    op("view-transpose", lambda x, w: x * w.transpose(0, 2), "mul", (4, 3, 2), w=(2, 3, 4)),
    op("view-permute", lambda x, w: x * w.permute(2, 0, 1), "mul", (4, 2, 3), w=(2, 3, 4)),
    op("view-movedim", lambda x, w: x * w.movedim(0, -1), "mul", (3, 4, 2), w=(2, 3, 4)),
    op("view-view", lambda x, w: F.linear(x, w.view(4, 3)), "linear", (2, 3), w=(12,)),
    op("view-reshape", lambda x, w: F.linear(x, w.reshape(-1, 3)), "linear", (2, 3), w=(2, 2, 3)),
    op("view-reshape-copy", lambda x, w: x * w.T.reshape(-1), {of("Tensor.reshape", "w"): "mul"}, (6,), w=(2, 3)),
    op("view-flatten", lambda x, w: x * w.flatten(), "mul", (6,), w=(2, 3)),
    op("view-unflatten", lambda x, w: F.linear(x, w.unflatten(0, (4, 3))), "linear", (2, 3), w=(12,)),
    op("view-squeeze", lambda x, w: F.linear(x, w.squeeze(-1)), "linear", (2, 3), w=(4, 3, 1)),
    op("view-unsqueeze", lambda x, w: x * w.unsqueeze(1), "mul", (2, 3, 4), w=(2, 4)),
    op("view-none", lambda x, w: x * w[:, None], "mul", (2, 3, 4), w=(2, 4)),
    op("view-expand", lambda x, w: x * w.expand(3, -1), "mul", (3, 4), w=(4,)),
    op("view-expand-linear", lambda x, w: F.linear(x, w.expand(5, -1)), "linear", (2, 3), w=(1, 3)),
    op("view-expand-matmul", lambda x, w: x @ w[:, None].expand(-1, 5), "matmul", (2, 3), w=(3,)),
    op("view-int", lambda x, w: F.linear(x, w[1]), "linear", (2, 3), w=(2, 5, 3)),
    op("view-negative-int", lambda x, w: x * w[-1, 0], "mul", (3,), w=(2, 3)),
    op("view-slice", lambda x, w: F.linear(x, w[1:4]), "linear", (2, 3), w=(5, 3)),
    op("view-slice-columns", lambda x, w: F.linear(x, w[:, 1:3]), "linear", (2, 2), w=(5, 4)),
    op("view-slice-steps", lambda x, w: F.linear(x, w[::2, 1::2]), "linear", (2, 2), w=(5, 4)),
    op("view-ellipsis", lambda x, w: x * w[..., 0], "mul", (2, 3), w=(2, 3, 2)),
    op("view-narrow", lambda x, w: F.linear(x, w.narrow(0, 1, 2)), "linear", (2, 3), w=(5, 3)),
    op("view-select", lambda x, w: x * w.select(1, 2), "mul", (2,), w=(2, 3)),
    op("view-diagonal", lambda x, w: x * w.diagonal(), "mul", (3,), w=(3, 3)),
    op("view-split", lambda x, w: _each(F.linear, x, w.split(2)), "linear linear linear", (2, 3), w=(5, 3)),
    op("view-split-sizes", lambda x, w: _each(F.linear, x, w.split([1, 3])), "linear linear", (2, 3), w=(4, 3)),
    op("view-chunk", lambda x, w: _each(F.linear, x, w.chunk(3)), "linear linear linear", (2, 3), w=(6, 3)),
    op("view-chunk-columns", lambda x, w: _each(F.linear, x, torch.chunk(w, 2, 1)), "linear linear", (2, 3), w=(4, 6)),
    op("view-unbind", lambda x, w: _each(torch.mul, x, w.unbind(1)), "mul mul", (3,), w=(3, 2)),
    op("view-iterated", lambda x, w: _each(torch.mul, x, list(w)), "mul mul", (3,), w=(2, 3)),
    op("view-overlapping", lambda x, w: x * w[:3] + x * w[2:], "mul mul", (3,), w=(5,)),
    op("view-windows", lambda x, w: x * w.unfold(0, 3, 1), "vmap", (3, 3), w=(5,)),
    op("view-of-view", lambda x, w: F.linear(x, w.view(3, 2, 4)[1:].flatten(0, 1).T), "linear", (2, 4), w=(24,)),
    op("view-fused-qkv", lambda x, w, b: _attend(*F.linear(x, w, b).chunk(3, -1)), "linear", (4, 3), w=(9, 3), b=(9,)),
    op("view-split-qkv", lambda x, w: _attend(*(F.linear(x, v) for v in w.chunk(3))), "linear " * 3, (4, 3), w=(9, 3)),
    op("view-whole-and-part", lambda x, w: F.linear(x, w).sum() + F.linear(x, w[:2]).sum(), "linear linear", w=(5, 3)),
    op(
        "view-part-and-plain",
        lambda x, w: F.linear(x, w[:2]).sum() + (x**w).sum(),
        "linear vmap",
        lambda: _away_from_zero(N, 3),
        w=(5, 3),
    ),
    op("not-contiguous", lambda x, w: F.linear(x, w), "linear", (2, 3), w=lambda: draw(3, 5).T),
    op("not-contiguous-view", lambda x, w: x * w[1:].T, "mul", (3, 4), w=lambda: draw(3, 5).T),
    op("expanded", lambda x, w: F.linear(x, w), "linear", (2, 3), w=lambda: draw(1, 3).expand(5, 3)),
    op("storage-offset", lambda x, w: F.linear(x, w[1:]), "linear", (2, 3), w=lambda: draw(9, 3)[4:]),
    Case("one-storage", lambda: _one_storage(), _rules("linear", ["a", "b"])),
)

_MASK: Callable[[Tensor], Tensor] = lambda like: torch.tensor(
    [[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]], dtype=like.dtype, device=like.device
)


class _Scaled(nn.Module):
    """A parametrisation: each row by its own length."""

    def forward(self, w: Tensor) -> Tensor:
        return w / w.norm(dim=1, keepdim=True)


def _parametrised(register: Callable[..., Any], *args: Any) -> nn.Module:
    layer = nn.Linear(3, 4)
    register(layer, "weight", *args)
    return layer.eval()


_ORIGINAL = "parametrizations.weight.original"
_WEIGHT_NORM = {of("torch._weight_norm", f"{_ORIGINAL}1", f"{_ORIGINAL}0"): "linear", "bias": "linear"}
_SPECTRAL_NORM = {
    of("Tensor.div", _ORIGINAL, of("torch.vdot", of("torch.mv", _ORIGINAL))): "linear",
    "bias": "linear",
}
_SCALED = {of("Tensor.div", _ORIGINAL, of("Tensor.norm", _ORIGINAL)): "linear", "bias": "linear"}

DERIVED = (
    op("mask", lambda x, w: F.linear(x, w * _MASK(x)), {of("Tensor.mul", "w"): "linear"}, w=(2, 3)),
    op(
        "mask-frozen-first",
        lambda x, w: F.linear(x, _MASK(x) * w),
        {of("Tensor.mul", "w"): "linear"},
        w=(2, 3),
    ),
    op(
        "lora",
        lambda x, w, a, b: F.linear(x, w + b @ a),
        {of("Tensor.add", "w", of("Tensor.matmul", "b", "a")): "linear"},
        w=(4, 3),
        a=(2, 3),
        b=(4, 2),
    ),
    op(
        "lora-frozen",
        lambda x, a, b: F.linear(x, _W(x) + b @ a),
        {of("Tensor.add", of("Tensor.matmul", "b", "a")): "linear"},
        a=(2, 3),
        b=(4, 2),
    ),
    op(
        "cast",
        lambda x, w: F.linear(x, w.float().to(x.dtype)),
        {of("Tensor.to", of("Tensor.float", "w")): "linear"},
        w=(2, 3),
    ),
    op(
        "standardised",
        lambda x, w: F.conv1d(x, (w - w.mean()) / w.std()),
        {of("Tensor.div", of("Tensor.sub", "w", of("Tensor.mean", "w")), of("Tensor.std", "w")): "conv1d"},
        (2, 5),
        w=(3, 2, 3),
    ),
    op("clone", lambda x, w: F.linear(x, w.clone()), {of("Tensor.clone", "w"): "linear"}, w=(2, 3)),
    op("contiguous", lambda x, w: F.linear(x, w.contiguous()), {of("Tensor.contiguous", "w"): "linear"}, w=(2, 3)),
    op("to-the-same", lambda x, w: F.linear(x, w.to(x.dtype)), {of("Tensor.to", "w"): "linear"}, w=(2, 3)),
    op("as-strided", lambda x, w: x * w.as_strided((3, 3), (1, 1)), {of("Tensor.as_strided", "w"): "mul"}, w=(5,)),
    op("changed-in-place", lambda x, w: F.linear(x, w.clone().mul_(2)), "vmap", w=(2, 3)),
    op(
        "written-in-place",
        lambda x, w: F.linear(x, _first_row_from(w.clone(), x)),
        "vmap",
        w=(2, 3),
        refused=True,
    ),
    op(
        "written-into-zeros",
        lambda x, w: F.linear(_first_row_from(torch.zeros(2, 3, dtype=x.dtype, device=x.device), x), w),
        "linear",
        w=(2, 3),
        refused=True,
    ),
    op(
        "parameter-into-zeros",
        lambda x, w: x * _first_row_from(torch.zeros(2, 3, dtype=x.dtype, device=x.device), w),
        "vmap",
        w=(3,),
    ),
    op("derived-without-gradient", lambda x, w: F.linear(x, w) * _norm_of(w), "linear", w=(2, 3)),
    op("derived-view", lambda x, w: F.linear(x, w.tanh()[1:]), {of("Tensor.tanh", "w"): "linear"}, w=(3, 3)),
    op(
        "derived-twice",
        lambda x, w: _each(F.linear, x, [w.exp()] * 2),
        {of("Tensor.exp", "w"): "linear linear"},
        w=(2, 3),
    ),
    op(
        "derived-and-bare",
        lambda x, w: F.linear(x, w.exp()) + F.linear(x, w),
        {"w": "linear", of("Tensor.exp", "w"): "linear"},
        w=(2, 3),
    ),
    op(
        "derived-plain",
        lambda x, w: x ** w.exp(),
        {of("Tensor.exp", "w"): "vmap"},
        lambda: _away_from_zero(N, 3),
        w=(3,),
    ),
    op("softmax-of-parameter", lambda x, w: x @ w.softmax(0), {of("Tensor.softmax", "w"): "matmul"}, (2, 3), w=(3,)),
    module("weight-norm", lambda: parametrizations.weight_norm(nn.Linear(3, 4)), _WEIGHT_NORM),
    module("spectral-norm", lambda: parametrizations.spectral_norm(nn.Linear(3, 4)).eval(), _SPECTRAL_NORM),
    module("parametrised", lambda: _parametrised(parametrize.register_parametrization, _Scaled()), _SCALED),
)


def _first_row_from(w: Tensor, x: Tensor) -> Tensor:
    w[0] = x
    return w


def _norm_of(w: Tensor) -> Tensor:
    with torch.no_grad():
        return w.norm()


def _each(function: Callable[..., Tensor], x: Tensor, weights: Any) -> Tensor:
    """Something else of each: a mix-up of the weights would show."""
    return torch.cat([(k + 1) * function(x, w) for k, w in enumerate(weights)], -1)


def _offsets(length: int, like: Tensor) -> Tensor:
    i = torch.arange(length, device=like.device)
    return i[:, None] - i + length - 1


def _attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


def _one_storage() -> Problem:
    """Two parameters that are parts of one tensor, as flat-parameter optimisers keep them."""
    flat = draw(27)
    params = {"a": flat[:15].view(5, 3), "b": flat[15:27].view(4, 3)}
    return (lambda p, x: loss(F.linear(x, p["a"])) + loss(F.linear(2 * x, p["b"]))), params, draw(N, 3)


# ---- one parameter, many uses ------------------------------------------------------------------------------


class _Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.positions = nn.Embedding(5, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[-1], device=tokens.device))
        return self.head(self.mix(x).tanh())


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.layer(x).tanh())
        return self.conv(self.conv(x[None]).tanh())


class _TwoPaths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def _same_tensor() -> Problem:
    w = draw(3, 3)
    return (lambda p, x: loss(F.linear(F.linear(x, p["a"]).tanh(), p["b"]))), {"a": w, "b": w}, draw(N, 3)


def _passed_on(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The gradient of h + w is w's and h's alike: w's other use must not be added to h's."""
    h = F.linear(x, v)
    a = x * w
    return (h + w).sin() + a.cos()


_TIED = {
    "embedding.weight": "embedding linear",
    "positions.weight": "embedding",
    "mix.weight": "linear",
    "mix.bias": "linear",
}
REUSE = (
    module("tied-embedding-and-head", _Tied, _TIED, ints(7, 5)),
    module(
        "layer-called-twice",
        _Twice,
        {
            "layer.weight": "linear linear",
            "layer.bias": "linear linear",
            "conv.weight": "conv1d conv1d",
            "conv.bias": "conv1d conv1d",
        },
    ),
    module(
        "one-weight-at-two-paths",
        _TwoPaths,
        {"first.weight": "linear linear", "first.bias": "linear", "second.bias": "linear"},
    ),
    Case("one-tensor-at-two-paths", _same_tensor, _rules("linear", ["a", "b"])),
    op(
        "norm-called-twice", lambda x, w: F.layer_norm(F.layer_norm(x, [3], w).exp(), [3], w), "layer_norm " * 2, w=(3,)
    ),
    op(
        "all-kinds-of-uses",
        lambda x, w: F.linear(x, w) @ w + x * w[0] + w[x.long() % 3].sin().sum(),
        "linear matmul mul index",
        w=(3, 3),
    ),
    op("used-as-both-operands", lambda x, w: F.linear(F.linear(x, w), w, w[0]), "linear linear linear", w=(3, 3)),
    op("gradient-passed-on", _passed_on, {"w": "mul add", "v": "linear"}, w=(3,), v=(3, 3)),
    op("rule-and-plain", lambda x, w: F.linear(x, w) + (x[:, None] * torch.sin(w * x)).sum(1), "linear mul", w=(3, 3)),
)

# ---- attention ---------------------------------------------------------------------------------------------


def _self_attention(
    heads: int | None = None, key_heads: int | None = None, **options: Any
) -> Callable[[Tensor, Tensor], Tensor]:
    """Attention of projections of x (..., L, 4) by w (3, 4, 4)."""

    def call(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = (F.linear(x, part) for part in w)
        if heads is not None:
            q = q.unflatten(-1, (heads, -1)).transpose(-2, -3)
            width = q.shape[-1]
            k, v = (t[..., : width * (key_heads or heads)].unflatten(-1, (-1, width)).transpose(-2, -3) for t in (k, v))
        return _attend(q, k, v, **{name: o(x) if callable(o) else o for name, o in options.items()})

    return call


def _sdpa(id: str, x: tuple[int, ...], **options: Any) -> Case:
    return op(
        id, _self_attention(**options), "linear linear linear", x, w=(3, 4, 4), folds=("scaled_dot_product_attention",)
    )


_BIAS = constant(5, 5)
_KEEP: Callable[[Tensor], Tensor] = lambda like: torch.ones(5, 5, dtype=torch.bool, device=like.device).tril()


class _Attention(nn.Module):
    """Self or cross attention, made of one input; no weights asked for unless `weights`."""

    def __init__(self, weights: bool = False, cross: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)
        self.weights, self.cross = weights, cross

    def forward(self, x: Tensor) -> Tensor:
        other = torch.cat([x.sin(), x.cos()[..., : self.attention.kdim - 4]], -1) if self.cross else x
        out, weights = self.attention(x, other, other, need_weights=self.weights)
        return out if weights is None else torch.cat([out.flatten(), weights.flatten()])


def _projected(times: int, inputs: str = "in_proj_weight in_proj_bias", prefix: str = "attention") -> dict[str, str]:
    """What multi-head attention does: one or three projections in, one out."""
    rules = {f"{prefix}.{name}": " ".join(["linear"] * times) for name in inputs.split()}
    return rules | {f"{prefix}.out_proj.{name}": "linear" for name in ("weight", "bias")}


_NO_BIAS = {"attention.in_proj_weight": "linear linear linear", "attention.out_proj.weight": "linear"}
_BIAS_KV = _projected(3) | {of("Tensor.repeat", f"attention.bias_{k}"): "vmap" for k in "kv"}
_SEPARATE = _projected(1, "q_proj_weight k_proj_weight v_proj_weight") | {
    "attention.in_proj_bias": "linear linear linear"
}
_TRANSFORMER = _projected(3, prefix="self_attn") | {
    f"{layer}{k}.{name}": rule
    for layer, rule in (("linear", "linear"), ("norm", "layer_norm"))
    for k in (1, 2)
    for name in ("weight", "bias")
}
ATTENTION = (
    _sdpa("sdpa", (5, 4)),
    _sdpa("sdpa-heads", (5, 4), heads=2),
    _sdpa("sdpa-inner-batch", (2, 5, 4), heads=2),
    _sdpa("sdpa-causal", (5, 4), heads=2, is_causal=True),
    _sdpa("sdpa-scale", (5, 4), heads=2, scale=0.3, dropout_p=0.0),
    _sdpa("sdpa-boolean-mask", (5, 4), attn_mask=_KEEP),
    _sdpa("sdpa-boolean-mask-inner-batch", (2, 5, 4), heads=2, attn_mask=_KEEP),
    _sdpa("sdpa-additive-mask", (5, 4), heads=2, attn_mask=_BIAS),
    _sdpa("sdpa-mask-per-sample", (5, 4), heads=2, attn_mask=lambda x: x[:, :1] + x[:, 1]),
    _sdpa("sdpa-mask-per-image", (2, 5, 4), heads=2, attn_mask=lambda x: torch.stack([_BIAS(x), -_BIAS(x)])[:, None]),
    _sdpa("sdpa-mask-per-head", (2, 5, 4), heads=2, attn_mask=lambda x: torch.stack([_BIAS(x), -_BIAS(x)])),
    _sdpa("sdpa-grouped-queries", (5, 4), heads=4, key_heads=2, enable_gqa=True),
    _sdpa("sdpa-grouped-queries-inner-batch", (2, 5, 4), heads=4, key_heads=1, enable_gqa=True),
    op("sdpa-queries-of-one-head", lambda x, s: _attend(x[0] * s, x, x.sin()), "mul", (2, 5, 4), s=(4,)),
    op("sdpa-bias-parameter", lambda x, m: _attend(x, x.sin(), x.cos(), attn_mask=m), "vmap", (5, 4), m=(5, 5)),
    op("sdpa-parameter-queries", lambda x, q: _attend(q, x, x.sin()), "vmap", (5, 4), q=(2, 4)),
    module("multihead", _Attention, _projected(3), (5, 4)),
    module("multihead-inner-batch", lambda: _Attention(batch_first=True), _projected(1), (2, 5, 4)),
    module("multihead-weights", lambda: _Attention(weights=True), _projected(1), (5, 2, 4)),
    module("multihead-eval", lambda: _Attention(batch_first=True).eval(), _projected(1), (2, 5, 4)),
    module("multihead-no-bias", lambda: _Attention(bias=False), _NO_BIAS, (5, 4)),
    module("multihead-bias-kv", lambda: _Attention(add_bias_kv=True), _BIAS_KV, (5, 4)),
    module("multihead-zero-attention", lambda: _Attention(add_zero_attn=True), _projected(3), (5, 4)),
    module("multihead-cross", lambda: _Attention(cross=True, kdim=6, vdim=6), _SEPARATE, (5, 4)),
    module("multihead-cross-same-width", lambda: _Attention(cross=True, kdim=4, vdim=4), _projected(3), (5, 4)),
    module("transformer-layer", lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0), _TRANSFORMER, (5, 4)),
    module(
        "transformer-layer-eval",
        lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True).eval(),
        _TRANSFORMER | {"self_attn.in_proj_weight": "linear", "self_attn.in_proj_bias": "linear"},
        (2, 5, 4),
    ),
)

# ---- losses ------------------------------------------------------------------------------------------------


def _classified(id: str, x: tuple[int, ...], target: tuple[int, ...], folds: bool = True, **options: Any) -> Case:
    """F.cross_entropy of logits x * w (B, C, ...), C = 3, and targets below 3."""

    def build() -> Problem:
        wanted = {name: o() if callable(o) else o for name, o in options.items()}

        def fn(params: Any, sample: Any) -> Tensor:
            return F.cross_entropy(sample[0] * params["w"], sample[1], **wanted).sum()

        return fn, {"w": draw(*x)}, (draw(N, *x), torch.randint(3, (N, *target)))

    return Case(id, build, _rules("mul", ["w"]), folds=("cross_entropy",) if folds else ())


LOSSES = (
    _classified("cross-entropy", (1, 3), (1,)),
    _classified("cross-entropy-inner-batch", (4, 3), (4,)),
    _classified("cross-entropy-sum", (4, 3), (4,), reduction="sum"),
    _classified("cross-entropy-positions", (2, 3, 5), (2, 5)),
    _classified("cross-entropy-ignoring", (4, 3), (4,), ignore_index=1),
    _classified("cross-entropy-smoothed", (2, 3, 2), (2, 2), label_smoothing=0.3),
    _classified("cross-entropy-smoothed-ignoring", (4, 3), (4,), label_smoothing=0.3, ignore_index=0, reduction="sum"),
    _classified("cross-entropy-unbatched", (3,), (), folds=False),
    _classified("cross-entropy-class-weights", (4, 3), (4,), weight=lambda: _away_from_zero(3)),
    _classified(
        "cross-entropy-class-weights-smoothed",
        (4, 3),
        (4,),
        weight=lambda: _away_from_zero(3),
        label_smoothing=0.3,
        ignore_index=1,
    ),
    _classified(
        "cross-entropy-class-weights-sum", (2, 3, 2), (2, 2), weight=lambda: _away_from_zero(3), reduction="sum"
    ),
    op(
        "cross-entropy-class-weights-per-sample",
        lambda x, w: F.cross_entropy(x * w, torch.tensor([0, 2], device=x.device), x[0].exp()),
        "mul",
        (2, 3),
        w=(3,),
    ),
    _classified("cross-entropy-not-reduced", (4, 3), (4,), folds=False, reduction="none"),
    op(
        "nll-loss",
        lambda x, w: F.nll_loss((x * w).log_softmax(-1), torch.tensor([0, 2], device=x.device)),
        "mul",
        (2, 3),
        w=(3,),
    ),
    op("mse-to-a-parameter", lambda x, w: F.mse_loss(x, w), "vmap vmap", (2, 3), w=(2, 3)),
)

# ---- trees of parameters -----------------------------------------------------------------------------------


class Layer(NamedTuple):
    weight: Tensor
    bias: Tensor


def _tree(params: Any, call: Callable[..., Tensor]) -> Callable[[], Problem]:
    """`params` by shapes: tuples of int are drawn."""

    def drawn(node: Any) -> Any:
        if isinstance(node, dict):
            return {k: drawn(v) for k, v in node.items()}
        if isinstance(node, list):
            return [drawn(v) for v in node]
        if isinstance(node, Layer):
            return Layer(*map(drawn, node))
        return draw(*node)

    return lambda: ((lambda p, x: loss(call(p, x))), drawn(params), draw(N, 3))


TREES = (
    Case("tree-bare", _tree((2, 3), lambda p, x: F.linear(x, p)), {"params": ["linear"]}),
    Case(
        "tree-list",
        _tree([(3, 3), (3,)], lambda p, x: F.linear(x, *p)),
        {"params[0]": ["linear"], "params[1]": ["linear"]},
    ),
    Case(
        "tree-namedtuple",
        _tree(Layer((2, 3), (2,)), lambda p, x: F.linear(x, p.weight, p.bias)),
        {"params.weight": ["linear"], "params.bias": ["linear"]},
    ),
    Case(
        "tree-nested",
        _tree(
            {"layers": [Layer((4, 3), (4,)), Layer((2, 4), (2,))], "scale": {"by": ()}},
            lambda p, x: F.linear(F.linear(x, *p["layers"][0]).tanh(), *p["layers"][1]) * p["scale"]["by"],
        ),
        {
            "params['layers'][0].weight": ["linear"],
            "params['layers'][0].bias": ["linear"],
            "params['layers'][1].weight": ["linear"],
            "params['layers'][1].bias": ["linear"],
            "params['scale']['by']": ["mul"],
        },
    ),
    op("unused-parameter", lambda x, w, unused: F.linear(x, w), {"w": "linear"}, w=(2, 3), unused=(4, 2)),
    op("all-unused", lambda x, w: x, {}, w=(2, 3), independent=True),
    op("loss-without-parameters", lambda x, w: x + w.detach(), {}, w=(3,), independent=True),
    op("zero-times", lambda x, w: 0 * F.linear(x, w), "linear", w=(2, 3)),
    op(
        "empty-parameter",
        lambda x, w, e: F.linear(x, w) + e.sum(),
        {"w": "linear", of("Tensor.sum", "e"): "add"},
        w=(2, 3),
        e=(0, 3),
    ),
)

# ---- what `fn` may do --------------------------------------------------------------------------------------


def _inner_grad(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The gradient of a small network's output with respect to its input: a gradient penalty."""
    return torch.func.grad(lambda x: (F.linear(x, w).tanh() @ v).sum())(x)


def _if_positive(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.linear(x, w) if x.sum() > 0 else F.linear(x, v) * 2


def _if_all(x: Tensor, w: Tensor) -> Tensor:
    mask = x.isfinite()
    return F.linear(x, w) if mask.all() else F.linear(x[mask], w)


def _if_any(x: Tensor, w: Tensor) -> Tensor:
    if not (x > 1e9).any() and bool(x.isfinite().all()):
        x = F.linear(x, w)
    return F.linear(x, w)


def _positive(x: Tensor) -> Tensor:
    """How many elements are."""
    return (x > 0).sum()


def _powers(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(1 + _positive(x)):  # type: ignore[arg-type]  # a tensor says how often: __index__
        x = F.linear(x, w).tanh()
    return x


def _some_frozen(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scale = F.linear(x, w).sum()
    return F.linear(x, w) * scale


def _loss_of_shape_one() -> Problem:
    return (lambda p, x: F.linear(x, p["w"]).sin()), {"w": draw(1, 3)}, draw(N, 3)


def _pytree_batch() -> Problem:
    def fn(params: Any, sample: Any) -> Tensor:
        scale, label = sample["pair"]
        return loss(F.linear(sample["x"], params["w"]) * scale) * label

    return fn, {"w": draw(2, 3)}, {"x": draw(N, 3), "pair": [draw(N, 2), torch.randint(5, (N,))]}


class _Old(torch.autograd.Function):
    """An autograd Function of the old style, which vmap refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].exp()


_SMALL = lambda: torch.tensor([[0.5, 1.5, 2.5], [2.5, 0.5, 0.1], [1.5, 0.2, 0.3], [0.5, 0.1, 0.9]]).to(draw().dtype)
PROGRAMS = (
    op("nested-vmap", lambda x, w: torch.vmap(lambda row: F.linear(row, w))(x), "linear", (2, 3), w=(4, 3)),
    op("nested-vmap-over-weight", lambda x, w: torch.vmap(lambda row: row * x)(w), "vmap", (3,), w=(4, 3)),
    op("inner-grad", _inner_grad, {"w": "linear", "v": "matmul"}, (2, 3), w=(4, 3), v=(4,)),
    op("branch-agrees", _if_all, "linear", (3,), w=(2, 3), refused=True),
    op("branches-agree", _if_any, "linear linear", (3,), w=(3, 3), refused=True),
    op("branch-diverges", _if_positive, "linear", (3,), w=(2, 3), v=(2, 3), refused=True, diverges=True),
    op("item", lambda x, w: F.linear(x, w) * _positive(x).item(), "linear", w=(2, 3), refused=True, diverges=True),
    op("item-agrees", lambda x, w: F.linear(x, w) * x.isfinite().sum().item(), "linear", w=(2, 3), refused=True),
    op("int", lambda x, w: F.linear(x, w[int(_positive(x)) :]), "linear", w=(5, 3), refused=True, diverges=True),
    op("float", lambda x, w: F.linear(x, w) * float(x.sign().sum()), "linear", w=(2, 3), refused=True, diverges=True),
    op("tolist", lambda x, w: x[:2] * w[x.long().tolist()[0]], "mul", _SMALL, w=(3, 2), refused=True, diverges=True),
    op("range", _powers, "linear", w=(3, 3), refused=True, diverges=True),
    op(
        "parameters-alone",
        lambda x, w: w * float(x.sum() > 0),
        {of("Tensor.sum", of("Tensor.square", of("Tensor.sin", of("Tensor.mul", "w")))): "vmap"},
        w=(2, 3),
        refused=True,
        diverges=True,
    ),
    op("no-grad-part", _some_frozen, "linear linear", (3,), w=(2, 3)),
    op("detached-parameter", lambda x, w: F.linear(x, w) * w.detach().sum(), "linear", (3,), w=(2, 3)),
    op("detached-and-not", lambda x, w: F.linear(x, w.detach()) * F.linear(x, w), "linear", (3,), w=(2, 3)),
    op("data-of-parameter", lambda x, w: F.linear(x, w) * w.data.sum(), "linear", (3,), w=(2, 3)),
    op("old-function", lambda x, w: _Old.apply(F.linear(x, w)), {}, (3,), w=(2, 3), refused=True, loops=True),
    Case("loss-of-shape-one", _loss_of_shape_one, _rules("linear", ["w"]), refused=True),
    Case("pytree-batch", _pytree_batch, _rules("linear", ["w"])),
)


# ---- mixtures of experts -----------------------------------------------------------------------------------


def grouped_mm(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """F.grouped_mm; by its definition where torch refuses: of float64, and of rows that are no multiple of 16 bytes."""
    try:
        return F.grouped_mm(x, w, offs=ends)
    except RuntimeError:
        which = (torch.arange(len(x), device=x.device)[:, None] >= ends).sum(1)
        return torch.einsum("ti,tio->to", x, w[which.clamp(max=len(w) - 1)])


def routed(x: Tensor, w: Tensor) -> Tensor:
    """The rows of x, each with one of three matrices by its first number, sorted for it."""
    which = x.detach()[:, 0].mul(2).round().clamp(-1, 1) + 1
    ends = (which[:, None] <= torch.arange(3, device=x.device)).sum(0, dtype=torch.int32)
    return grouped_mm(x[which.argsort()], w, ends)


def divided(x: Tensor, w: Tensor, *ends: int) -> Tensor:
    """The same with one division for all samples."""
    return grouped_mm(x, w, torch.tensor(ends, dtype=torch.int32, device=x.device))


def _experts_and_bmm(x: Tensor, w: Tensor) -> Tensor:
    return routed(routed(x, w).sin(), w).sin().sum() * x.expand(3, 6, 4).bmm(w)


_EXPERTS = constant(3, 4, 8)
EXPERTS = (
    op("grouped-mm", routed, "grouped_mm", (6, 4), w=(3, 4, 8), looks=True),
    op("grouped-mm-turned", lambda x, w: routed(x, w.mT), "grouped_mm", (6, 4), w=(3, 8, 4), looks=True),
    op("grouped-mm-part", lambda x, w: routed(x, w[1:, 4:].mT), "grouped_mm", (6, 4), w=(4, 8, 4), looks=True),
    op("grouped-mm-shared", lambda x, w: divided(x, w, 0, 5, 5)[:5], "grouped_mm", (6, 4), w=(3, 4, 4), looks=True),
    op("grouped-mm-twice", _experts_and_bmm, "grouped_mm grouped_mm bmm", (6, 4), w=(3, 4, 4), looks=True),
    op("grouped-mm-frozen", lambda x, s: routed(x * s, _EXPERTS(x)), "mul", (6, 4), s=(4,), looks=True),
    op("histc", lambda x, w: x.detach().histc(4, -1, 1) * w, "mul", (7,), w=(4,), folds=("histc",)),
)


CASES = (
    *LINEAR,
    *MATMUL,
    *EINSUM,
    *CONV,
    *RECURRENT,
    *NORM,
    *EMBEDDING,
    *ELEMENTWISE,
    *VIEWS,
    *DERIVED,
    *REUSE,
    *ATTENTION,
    *LOSSES,
    *TREES,
    *PROGRAMS,
    *EXPERTS,
)
assert len({case.id for case in CASES}) == len(CASES), "two cases share an id"
