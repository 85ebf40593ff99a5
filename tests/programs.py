"""Random small programs as data: statements over a pool of named tensors, drawn by Hypothesis, printed as Python.

A program holds its parameters, its sample leaves and its statements, each a line of Python or two. `source()` is
what runs, and what a failing test prints: a file that reproduces the failure on its own.
"""

import math
import re
import string
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

Shape = tuple[int, ...]
Draw = Callable[[st.SearchStrategy[Any]], Any]

LARGEST = 64  # elements of a tensor

PRELUDE = """\
import torch
import torch.nn.functional as F

import psgrad


def mlp(v, a, b):
    return F.linear(torch.tanh(F.linear(v, a)), b)


def score(v):
    return (torch.sin(1.3 * torch.arange(v.numel(), dtype=v.dtype) + 1).reshape(v.shape) * v).sum()


def values(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def indices(seed, *shape):
    return torch.randint(0, 1000, shape, generator=torch.Generator().manual_seed(seed))
"""
_PRELUDE = compile(PRELUDE, "<prelude>", "exec")


class Leaf(NamedTuple):
    """A tensor that the program is given: a parameter, or one of a sample."""

    name: str
    shape: Shape
    role: str  # "param", "sample", or "index": integers of a sample
    seed: int


class Statement(NamedTuple):
    """A line of the program, or a few that belong together."""

    text: str

    def mentions(self, name: str) -> bool:
        return re.search(rf"\b{name}\b", self.text) is not None


class Program(NamedTuple):
    n: int
    leaves: tuple[Leaf, ...]
    statements: tuple[Statement, ...]
    scored: tuple[str, ...]  # the tensors that make the loss
    permuted: bool  # the batch lies transposed in memory

    def source(self) -> str:
        """Runnable Python: `fn`, `params` and `batch`."""
        body = [f'{leaf.name} = {"p" if leaf.role == "param" else "s"}["{leaf.name}"]' for leaf in self.leaves]
        body += [line for statement in self.statements for line in statement.text.splitlines()]
        body += ["return " + " + ".join(f"score({name})" for name in self.scored)]
        lines = ["", "", "def fn(p, s):", *("    " + line for line in body), "", "", f"N = {self.n}"]
        for title, roles in (("params", ("param",)), ("batch", ("sample", "index"))):
            made = [f'    "{leaf.name}": {self._made(leaf)},' for leaf in self.leaves if leaf.role in roles]
            lines += [f"{title} = {{", *made, "}"]
        return PRELUDE + "\n".join(lines) + "\n"

    def _made(self, leaf: Leaf) -> str:
        sizes = ["N"] * (leaf.role != "param") + [str(size) for size in leaf.shape]
        maker, turn = "indices" if leaf.role == "index" else "values", ""
        if self.permuted and leaf.role == "sample":
            sizes, turn = sizes[::-1], f".permute({', '.join(map(str, range(len(sizes))[::-1]))})"
        return f"{maker}({', '.join([str(leaf.seed), *sizes])}){turn}"

    def run(self) -> tuple[Callable[[Any, Any], Any], Any, Any]:
        """`fn`, `params` and `batch`."""
        scope: dict[str, Any] = {}
        exec(compile(self.source(), "<program>", "exec"), scope)
        return scope["fn"], scope["params"], scope["batch"]

    def __repr__(self) -> str:
        return f"\n{self.source()}"


# ---- drawing one -----------------------------------------------------------------------------------------------


class Pool:
    """What a program has so far. Statements run on one sample as they are drawn, which tells their shapes."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.leaves: list[Leaf] = []
        self.statements: list[Statement] = []
        self.shapes: dict[str, Shape] = {}  # of floating-point tensors
        self.count = 0
        self.scope: dict[str, Any] = {}
        exec(_PRELUDE, self.scope)

    def one(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def integer(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def leaf(self, role: str, shape: Shape) -> str:
        seed = len(self.leaves)
        name = {"param": "w", "sample": "x", "index": "i"}[role] + str(seed)
        self.leaves.append(Leaf(name, shape, role, seed))
        self.scope[name] = self.scope["indices" if role == "index" else "values"](seed, *shape)
        if role != "index":
            self.shapes[name] = shape
        return name

    def any(self, fits: Callable[[Shape], bool] = lambda shape: True) -> str:
        """A tensor of the pool; "" where none fits."""
        found = [name for name, shape in self.shapes.items() if fits(shape)]
        return self.draw(st.sampled_from(found[::-1])) if found else ""

    def of(self, shape: Shape) -> str:
        """An operand of this shape: a new parameter, a tensor of the pool, or a new leaf of the sample."""
        found = [name for name, other in self.shapes.items() if other == shape]
        chosen = self.draw(st.sampled_from(["param", *found[::-1], "sample"]))
        return self.leaf(chosen, shape) if chosen in ("param", "sample") else chosen

    def index(self, count: int, size: int) -> str:
        """`count` integers below `size`: of the sample, or the same for all."""
        kind = self.one("sample", "range", "list")
        if kind == "sample":
            found = [leaf.name for leaf in self.leaves if leaf.role == "index" and leaf.shape == (count,)]
            return f"({self.one(*found, '') or self.leaf('index', (count,))} % {size})"
        if kind == "range":
            return f"(torch.arange({count}) % {size})"
        return f"torch.tensor({[self.integer(0, size - 1) for _ in range(count)]})"

    def phrase(self, *options: str, **operands: Any) -> str:
        """One of the options with its operands filled in: a shape stands for an operand of that shape."""
        chosen = self.one(*options)
        filled: dict[str, Any] = {}
        for _, field, _, _ in string.Formatter().parse(chosen):
            if field and field not in filled:
                operand = operands[field]
                operand = operand() if callable(operand) else operand
                filled[field] = self.of(operand) if isinstance(operand, tuple) else operand
        return chosen.format(**filled)

    def name(self) -> str:
        self.count += 1
        return f"h{self.count}"

    def say(self, text: str, *names: str) -> None:
        """Add a statement that gives values to `names`, if torch takes it and results are small and finite."""
        try:
            exec(compile(text, "<statement>", "exec"), self.scope)
        except (RuntimeError, IndexError, ValueError, TypeError):
            return
        results = [self.scope[name] for name in names]
        if any(r.numel() > LARGEST or r.numel() == 0 or not bool((r.abs() < 1e3).all()) for r in results):
            return
        self.statements.append(Statement(text))
        for name, result in zip(names, results, strict=True):
            self.shapes[name] = tuple(result.shape)

    def let(self, *options: str, **operands: Any) -> None:
        name = self.name()
        self.say(f"{name} = {self.phrase(*options, **operands)}", name)

    def program(self, n: int, permuted: bool) -> Program:
        """The program so far: what no statement takes makes the loss; leaves that nobody takes are left out."""
        made = [name for name in self.shapes if name.startswith("h")]
        scored = [h for h in made if sum(s.mentions(h) for s in self.statements) == 1] or [*self.shapes][-1:]
        taken = [
            leaf
            for i, leaf in enumerate(self.leaves)
            if i < 2 or leaf.name in scored or any(s.mentions(leaf.name) for s in self.statements)
        ]
        return Program(n, tuple(taken), tuple(self.statements), tuple(scored), permuted)


Kind = Callable[[Pool], None]
KINDS: list[Kind] = []


def on(least: int, most: int = 9) -> Callable[[Callable[[Pool, str, Shape], None]], Kind]:
    """A kind of statement about a tensor with so many axes; nothing where the pool has none."""

    def decorated(draws: Callable[[Pool, str, Shape], None]) -> Kind:
        def drawn(pool: Pool) -> None:
            name = pool.any(lambda shape: least <= len(shape) <= most)
            if name:
                draws(pool, name, pool.shapes[name])

        drawn.__name__ = draws.__name__
        KINDS.append(drawn)
        return drawn

    return decorated


# Where a function has a kink, it lies at an odd number: rounding must not decide on which side a value is.


@on(0)
def elementwise(pool: Pool, v: str, shape: Shape) -> None:
    pool.let(
        "2 * {v}",
        "torch.tanh({v})",
        "{v}.sin()",
        "F.gelu({v})",
        "torch.sigmoid({v})",
        "{v}.square()",
        "F.relu({v} - 0.0717)",
        "F.softplus({v})",
        "torch.log1p({v}.square())",
        "torch.where({v} > 0.0717, {v}, 0.1 * {v})",
        "{v}.masked_fill({v} > 0.1717, 0.5)",
        "{v} / (1 + {v}.square().sum())",
        "{v}.detach() * {v}",
        "{v}.clone()",
        "-{v}",
        "F.dropout({v}, 0.0)",
        "{v}.clamp(-1.0717, 0.7171)",
        v=v,
    )


@on(0)
def arithmetic(pool: Pool, v: str, shape: Shape) -> None:
    other = pool.one(shape, shape[-1:], shape[1:], (1, *shape[1:]) if shape else (), ())
    pool.let(
        "{v} + {u}",
        "{v} * {u}",
        "{u} - {v}",
        "{u} * {v}",
        "{v} / (1 + {u}.square())",
        "{u} / (1 + {v}.square())",
        "torch.addcmul({v}, {v}, {u}, value=0.5)",
        "torch.addcdiv({u}, {v}, 1 + {u}.square())",
        "torch.lerp({v}, {u} + torch.zeros_like({v}), 0.3)",
        "torch.where({v} > 0.0717, {v}, {u})",
        "torch.where({u} > 0.0717, {v}, {u})",
        "torch.atan2({v}, 1 + {u}.square())",
        "torch.hypot({u}, 1 + {v}.square())",
        "torch.logaddexp({v}, {u})",
        "F.mse_loss({v}, {u} + torch.zeros_like({v}), reduction='none')",
        v=v,
        u=other,
    )


@on(1)
def linear(pool: Pool, v: str, shape: Shape) -> None:
    out, size = pool.integer(1, 4), shape[-1]
    pool.let(
        "F.linear({v}, {w})",
        "F.linear({v}, {w}, {b})",
        "F.linear(bias={b}, weight={w}, input={v})",
        "{v} @ {w}.t()",
        "torch.matmul({v}, {w}.mT) + {b}",
        'torch.einsum("...i,oi->...o", {v}, {w})',
        "torch.tensordot({v}, {w}, dims=([-1], [1]))",
        "F.linear({v}, torch.tanh({w}))",
        "F.linear({v}, {w} * (torch.arange({size}) % 2))",
        "F.linear({v}, {w} / (1 + {w}.square().sum(1, keepdim=True)))",
        "F.bilinear({v}, {v}, {k})",
        v=v,
        w=(out, size),
        b=(out,),
        k=(out, size, size),
        size=size,
    )


@on(2, 2)
def product(pool: Pool, v: str, shape: Shape) -> None:
    rows, size = shape
    out = pool.integer(1, 4)
    pool.let(
        "{v} @ {w}",
        "torch.mm({v}, {w})",
        "torch.addmm({c}, {v}, {w})",
        "{v} @ {v}.mT",
        "{v}.mv({a})",
        "torch.bmm({v}[None], {w}[None])[0]",
        'torch.einsum("ti,ij,tj->t", {v}, {q}, {v})',
        "torch.outer({r}, {v}[0])",
        "F.scaled_dot_product_attention({v}[None], {k}[None], {k2}[None])[0]",
        "torch.linalg.solve({q} @ {q}.mT + torch.eye({size}, dtype=torch.float64), {v}.mT)",
        v=v,
        w=(size, out),
        c=(rows, out),
        a=(size,),
        q=(size, size),
        r=(rows,),
        k=(out, size),
        k2=(out, size),
        size=size,
    )


@on(1)
def block(pool: Pool, v: str, shape: Shape) -> None:
    """A composite called with weights, once or twice, or as a recurrence."""
    size, hidden, name = shape[-1], pool.integer(1, 3), pool.name()
    text = pool.phrase(
        "{h} = mlp({v}, {a}, {b})",
        "{h} = mlp(mlp({v}, {a}, {b}), {a}, {b})",
        "{h} = F.linear(F.linear({v}, {a}), {a}.t())",
        "{h} = {v}\nfor _ in range(2):\n    {h} = torch.tanh({h} + mlp({h}, {a}, {b}))",
        v=v,
        h=name,
        a=(hidden, size),
        b=(size, hidden),
    )
    pool.say(text, name)


@on(2, 3)
def convolution(pool: Pool, v: str, shape: Shape) -> None:
    channels = shape[0]
    groups = pool.one(*[g for g in (1, 2, 3, 4) if channels % g == 0])
    padding, stride = pool.integer(0, 1), pool.integer(1, 2)
    kernel = [pool.integer(1, min(3, size + 2 * padding)) for size in shape[1:]]
    out = groups * pool.integer(1, 2)
    pool.let(
        "F.conv{d}d({v}, {w}, {b}, {stride}, {padding}, groups={groups})",
        "F.conv{d}d({v}, {w}, None, {stride}, {padding}, groups={groups})",
        "F.conv{d}d({v}[None], {w}, {b}, {stride}, {padding}, groups={groups})[0]",
        d=len(shape) - 1,
        v=v,
        w=(out, channels // groups, *kernel),
        b=(out,),
        stride=stride,
        padding=padding,
        groups=groups,
    )


@on(2, 2)
def transposed_convolution(pool: Pool, v: str, shape: Shape) -> None:
    pool.let(
        "F.conv_transpose1d({v}, {w}, {b}, {stride})",
        "F.conv_transpose1d({v}[None], {w}, None, {stride})[0]",
        v=v,
        w=(shape[0], 2, pool.integer(1, 3)),
        b=(2,),
        stride=pool.integer(1, 2),
    )


@on(1)
def normalised(pool: Pool, v: str, shape: Shape) -> None:
    options = [
        "F.layer_norm({v}, ({size},), {a}, {b}, eps=0.1)",
        "F.layer_norm({v}, ({size},), eps=0.1)",
        "F.rms_norm({v}, ({size},), {a}, eps=0.1)",
        "torch.softmax({v}, -1)",
        "torch.log_softmax({v}, 0)",
        "F.normalize({v} + 2, dim=0)",
    ]
    if len(shape) >= 2:
        options += [
            "F.group_norm({v}[None], 1, {c}, {c2}, eps=0.1)[0]",
            "F.instance_norm({v}[None], weight={c}, eps=0.1)[0]",
            # of a weight that is not contiguous torch's own backward is wrong on a CPU
            "F.batch_norm({v}, None, None, {s}.contiguous(), {s2}, training=True, eps=0.1)",
        ]
    second = (shape[1],) if len(shape) > 1 else ()
    pool.let(*options, v=v, size=shape[-1], a=shape[-1:], b=shape[-1:], c=shape[:1], c2=shape[:1], s=second, s2=second)


@on(2)
def lookup(pool: Pool, v: str, shape: Shape) -> None:
    """Rows of a matrix, or entries."""
    rows, count = shape[0], pool.integer(1, 3)
    options = [
        "{v}[{i}]",
        "{v}.index_select(0, {i})",
        "{v}[:, {j}]",
        "{v}[{i}, {j}]",
        "{v}[1:, {j}]",
        "{v}[..., {last}]",
        "{v}.gather(0, {i}.reshape(-1, {ones}).expand(-1, {rest}))",
    ]
    if len(shape) == 2:
        options += ["F.embedding({i}, {v})", "F.embedding({i}, {v}, padding_idx=0)", "F.embedding_bag({i}[None], {v})"]
    pool.let(
        *options,
        v=v,
        i=lambda: pool.index(count, rows),
        j=lambda: pool.index(count, shape[1]),
        last=lambda: pool.index(count, shape[-1]),
        ones=", ".join("1" for _ in shape[1:]),
        rest=", ".join(map(str, shape[1:])),
    )


@on(1)
def view(pool: Pool, v: str, shape: Shape) -> None:
    first, d, size = shape[0], len(shape), math.prod(shape)
    k = pool.integer(0, first - 1)
    options = [
        "{v}[{k}]",
        "{v}[{k}:]",
        "{v}[..., :{last}]",
        "{v}[::2]",
        "{v}.reshape(-1)",
        "{v}.reshape({divisor}, -1)",
        "{v}.unsqueeze({new})",
        "{v}.expand(2, {sizes})",
        "{v}.flip(0)",
        "{v}.roll(1, {axis})",
        "{v}.narrow(0, {k}, {left})",
        "{v}.repeat(2, {ones})",
        "F.pad({v}, (1, 0))",
        "{v}.unflatten(0, (1, {first}))",
        "{v}.contiguous().view({size}, 1)",
        "{v}.select(-1, 0)",
    ]
    if d >= 2:
        options += [
            "{v}.mT",
            "{v}.transpose(0, -1)",
            "{v}.movedim(0, -1)",
            "{v}.flatten(0, 1)",
            "{v}.diagonal()",
            "{v}[:, {column}]",
            "{v}.permute({turned}).contiguous()",
            "{v}.tril()",
            "{v}.squeeze(0)",
            "{v}.mT.unfold(0, 1, 1)",
        ]
    pool.let(
        *options,
        v=v,
        k=k,
        last=lambda: pool.integer(1, shape[-1]),
        divisor=lambda: pool.one(*[i for i in range(1, size + 1) if size % i == 0]),
        new=lambda: pool.integer(0, d),
        sizes=", ".join(map(str, shape)),
        axis=lambda: pool.integer(0, d - 1),
        left=first - k,
        ones=", ".join("1" * d),
        first=first,
        size=size,
        column=lambda: pool.integer(0, shape[1] - 1),
        turned=", ".join(map(str, range(d)[::-1])),
    )


@on(1)
def parts(pool: Pool, v: str, shape: Shape) -> None:
    axis = pool.integer(0, len(shape) - 1)
    if shape[axis] < 2:
        return
    a, b = pool.name(), pool.name()
    cut = pool.integer(1, shape[axis] - 1)
    text = pool.phrase(
        "{a}, {b} = {v}.split(({cut}, {left}), {axis})",
        "{a}, {b} = {v}.tensor_split(2, {axis})",
        "{a}, {b}, *_ = {v}.unbind({axis})",
        "{a}, {b}, *_ = {v}.chunk(2, {axis})",
        a=a,
        b=b,
        v=v,
        cut=cut,
        left=shape[axis] - cut,
        axis=axis,
    )
    pool.say(text, a, b)


@on(1)
def joined(pool: Pool, v: str, shape: Shape) -> None:
    pool.let(
        "torch.cat([{v}, {u}], {axis})",
        "torch.stack([{v}, {u}], {axis})",
        "torch.cat(({u}, {v}, {u}), {axis})",
        "torch.stack([row + 1 for row in {v}] + list({u}))",
        "torch.hstack([{u}, {v}])",
        v=v,
        u=shape,
        axis=pool.integer(0, len(shape) - 1),
    )


@on(1)
def reduction(pool: Pool, v: str, shape: Shape) -> None:
    pool.let(
        "{v}.sum({axis})",
        "{v}.mean({axis}, keepdim=True)",
        "{v}.sum()",
        "{v}.logsumexp({axis})",
        "{v}.var({axis}, unbiased=False)",
        "{v}.cumsum({axis})",
        "{v}.prod({axis})",
        "(1 + {v}.square().sum({axis})).sqrt()",
        "({v} + 2).norm(dim={axis})",
        v=v,
        axis=pool.integer(-1, len(shape) - 1),
    )


@on(1)
def write(pool: Pool, v: str, shape: Shape) -> None:
    """A clone, or a new tensor, and a write into it."""
    name = pool.name()
    first, rest = shape[0], shape[1:]
    k, last, count = pool.integer(0, first - 1), pool.integer(1, shape[-1]), pool.integer(1, 3)
    make = pool.one(
        "{h} = {v}.clone()\n",
        "{h} = torch.zeros({sizes}, dtype=torch.float64)\n",
        "{h} = torch.zeros_like({v})\n",
        "{h} = 2 * {v}\n",
        "{h} = {v}.new_ones({sizes})\n",
        "{h} = torch.cat([{v}])\n",
    )
    options = [
        "{h} += {u}",
        "{h}.mul_({u})",
        "{h}.tanh_()",
        "{h}[{k}] = {row}",
        "{h}[{k}:] = {tail}",
        "{h}[..., :{last}] = {left}",
        "{h}[..., :{last}] += {few}",
        "{h}[{i}] = {row}",
        "{h}.index_add_(0, {i}, {rows})",
        "{h}.index_copy_(0, torch.arange({count}) % {first}, {rows})",
        "{h}.masked_fill_({v} > 0.0717, 0.25)",
        "{h}[{v} > 0.0717] = 0.25",
        "{h}.copy_({u})",
        "{h}[{k}].mul_({row})",
        "{h}[{k}].fill_(0.5)",
        "{h}.view(-1)[0] += 1",
        "{h}.index_put_(({i},), {row}, accumulate=True)",
        "{h}.index_fill_(0, {i}, 0.5)",
        "{h}.clamp_(max=0.7171)",
        "{h}.addcmul_({u}, {v})",
        "{h}.zero_()",
        "{h}.scatter_add_(0, {i}.reshape(-1, {ones}).expand(-1, {more}), {rows})" if rest else "{h}.neg_()",
        "for k in range({first}):\n    {h}[k] = {h}[k - 1] * 0.5 + {row}",
        "for k in range({first}):\n    {h}[k] += k * {row}",
        "{h}.unsqueeze_(0)\n{h}.mul_({u})",
        "torch.relu_({h}.sub_(0.0717))",
        "{h} *= {h}",
    ]
    if rest:
        options += ["{h}[:, {j}] = {column}", "{h}[1:, {j}] = 0.5", "{h}.mT[..., {k}] += 1", "{h}.diagonal().add_(1)"]
    text = make + pool.one(*options)
    text = pool.phrase(
        text,
        h=name,
        v=v,
        u=shape,
        sizes=repr(shape),
        k=k,
        row=rest,
        tail=(first - k, *rest),
        last=last,
        left=(*shape[:-1], last),
        few=(last,),
        i=lambda: pool.index(count, first),
        rows=(count, *rest),
        count=count,
        first=first,
        ones=", ".join("1" for _ in rest),
        more=", ".join(map(str, rest)),
        j=lambda: pool.index(1, shape[1]),
        column=(first, 1, *shape[2:]),
    )
    pool.say(text, name)


@on(0)
def branch(pool: Pool, v: str, shape: Shape) -> None:
    """What happens depends on a value of the sample, or of a parameter."""
    name = pool.name()
    test = pool.phrase("{t}.sum() > 0.0717", "({t} > 0.0717).all()", "bool({t}.max() > 0.7171)", t=pool.any())
    text = pool.phrase(
        "{h} = torch.tanh({v}) if {test} else {u} * 2",
        "{h} = {v}\nif {test}:\n    {h} = {h} * {u}",
        "{h} = {v} * float({test})",
        "{h} = {v}.clone()\nif {test}:\n    {h} += {u}",
        h=name,
        v=v,
        u=shape,
        test=test,
    )
    pool.say(text, name)


@on(1)
def loss(pool: Pool, v: str, shape: Shape) -> None:
    pool.let(
        "F.mse_loss({v}, {u})",
        "F.cross_entropy({v}.reshape(-1, {size})[:1], {j})",
        "F.cross_entropy({v}.reshape(-1, {size})[0], {j}[0])",
        "F.nll_loss({v}.log_softmax(-1).reshape(-1, {size})[:1], {j})",
        "F.smooth_l1_loss({v}, {u} + 3)",
        "F.kl_div({v}, {u}.softmax(-1), reduction='sum')",
        v=v,
        u=shape,
        size=shape[-1],
        j=lambda: pool.index(1, shape[-1]),
    )


SHAPES: tuple[Shape, ...] = ((3,), (2, 3), (3, 3), (4, 2), (2,), (2, 3, 2), (4,), (1, 3), ())


@st.composite
def programs(draw: Draw, least: int = 3, most: int = 10) -> Program:
    """A program of `least` to `most` statements."""
    pool = Pool(draw)
    with torch.no_grad():
        pool.leaf("param", draw(st.sampled_from(SHAPES)))
        pool.leaf("sample", draw(st.sampled_from(SHAPES)))
        wanted = draw(st.integers(least, most))
        for _ in range(2 * wanted):
            if len(pool.statements) < wanted:
                draw(st.sampled_from(KINDS))(pool)
    return pool.program(draw(st.sampled_from([3, 2, 4, 1])), draw(st.booleans()))
