"""Each rule over configurations that Hypothesis draws: exact in float64, and the rule ran."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import psgrad
from psgrad.extend import ConvGeometry, Outer, Patches, Rows
from psgrad.factors import conv_costs as _conv_plan
from psgrad.factors import costs as _plan
from psgrad.factors import patches as _patches
from psgrad.rules import loss as _loss

from . import strategies as some
from .cases import grouped_mm, loss
from .strategies import Layout

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

Params = dict[str, Tensor]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def check(
    fn: Callable[[Params, Any], Tensor], params: Params, batch: Tensor, layout: Layout, rules: dict[str, str] | None
) -> None:
    """Equal to the loop, and (given `rules`) just these rules ran; a fallback warning is an error anyway."""
    n = len(batch)
    batch, in_dims = layout.apply(batch)
    psgrad.testing.check(fn, params, batch, in_dims=in_dims)
    if rules is not None and n:
        used = psgrad.testing.rules_used(fn, params, batch, in_dims=in_dims)
        assert used == {f"params[{name!r}]": names.split() for name, names in rules.items()}


class Operands:
    """Optional operands of an op: parameters, constants, or None."""

    def __init__(self, rule: str, **shapes_and_uses: tuple[tuple[int, ...], str]) -> None:
        self.params: Params = {}
        self.rules: dict[str, str] = {}
        self.frozen: dict[str, Tensor | None] = {}
        for name, (shape, use) in shapes_and_uses.items():
            if use == "param":
                self.params[name], self.rules[name] = draw(*shape), rule
            else:
                self.frozen[name] = draw(*shape) if use == "frozen" else None

    def scale(self, *shape: int) -> None:
        """A parameter before the op, so that the op's input needs a gradient."""
        self.params = {"scale": draw(*shape)} | self.params
        self.rules = {"scale": "mul"} | self.rules

    def of(self, params: Params) -> list[Tensor | None]:
        """The operands, and the scale, in their order."""
        every = self.frozen | {name: p for name, p in params.items() if name != "scale"}
        return [every[name] for name in sorted(every, key=["w", "b"].index)]


# ---- linear, matmul, einsum --------------------------------------------------------------------------------


def _whole_and_view(view: str, o: int, i: int) -> tuple[tuple[int, ...], Callable[[Tensor], Tensor]]:
    """A parameter's shape, and how an (o, i) matrix comes out of it."""
    return {
        "whole": ((o, i), lambda p: p),
        "transposed": ((i, o), lambda p: p.T),
        "rows": ((o + 2, i), lambda p: p[1 : o + 1]),
        "columns": ((o, i + 2), lambda p: p[:, 1 : i + 1]),
        "steps": ((2 * o, i), lambda p: p[::2]),
        "expanded": ((1, i), lambda p: p.expand(o, i)),
    }[view]


@given(config=some.linears())
def test_linear(config: some.Linear) -> None:
    n, lead, i, o, weight, bias, view, layout = config
    shape, viewed = _whole_and_view(view, o, i)
    operands = Operands("linear", w=(shape, weight), b=((o,), bias))
    operands.scale(i)

    def fn(params: Params, x: Tensor) -> Tensor:
        w, b = operands.of(params)
        assert w is not None
        return loss(F.linear(x * params["scale"], viewed(w), b))

    check(fn, operands.params, draw(n, *lead, i), layout, operands.rules)


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("part", [False, True])
def test_linear_with_a_bias_that_broadcasts(part: bool, lead: tuple[int, ...]) -> None:
    """One number for all outputs: its gradient is a sum over them, of which the rule knows nothing."""

    def fn(params: Params, x: Tensor) -> Tensor:
        return loss(F.linear(x, params["w"], params["b"][1:2] if part else params["b"]))

    params = {"w": draw(5, 4), "b": draw(3 if part else 1)}
    psgrad.testing.check(fn, params, draw(6, *lead, 4))


@given(config=some.matmuls())
def test_matmul(config: some.Matmul) -> None:
    n, x, w, first, layout = config
    ruled = len(w) == 1 or len(w) == 2  # other weights are ruled where no copy is needed

    def fn(params: Params, x: Tensor) -> Tensor:
        x = x * params["scale"]
        return loss(params["w"] @ x if first else x @ params["w"])

    params = {"scale": draw(*x), "w": draw(*w)}
    check(fn, params, draw(n, *x), layout, {"scale": "mul", "w": "matmul"} if ruled else None)


@pytest.mark.parametrize("most", [1, 2])
def test_einsum(most: int) -> None:
    """With one letter of a kind no copy is ever needed; with more, plain vmap may stand in."""

    @given(config=some.einsums(most))
    def run(config: some.Einsum) -> None:
        shape_x, shape_w = ([config.sizes[a] for a in term] for term in (config.x, config.w))

        def fn(params: Params, x: Tensor) -> Tensor:
            x, w = x * params["scale"], params["w"]
            return loss(torch.einsum(config.equation, *((w, x) if config.first else (x, w))))

        rules = {"scale": "mul", "w": "einsum"} if most == 1 else None
        check(fn, {"scale": draw(*shape_x), "w": draw(*shape_w)}, draw(config.n, *shape_x), config.layout, rules)

    run()


@given(config=some.bilinears())
def test_bilinear(config: some.Bilinear) -> None:
    """Both inputs depend on a parameter and on the sample."""
    operands = Operands(
        "bilinear", w=((config.outputs, config.first, config.second), "param"), b=((config.outputs,), config.bias)
    )
    operands.scale(config.first + config.second)

    def fn(params: Params, x: Tensor) -> Tensor:
        w, b = operands.of(params)
        first, second = (x * params["scale"]).split([config.first, config.second], -1)
        return loss(F.bilinear(first, second, w, b))

    check(
        fn, operands.params, draw(config.n, *config.lead, config.first + config.second), config.layout, operands.rules
    )


# ---- convolutions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 3])
def test_conv(d: int) -> None:
    conv = (F.conv1d, F.conv2d, F.conv3d)[d - 1]

    @given(config=some.convs(d))
    def run(config: some.Conv) -> None:
        operands = Operands(f"conv{d}d", w=(config.w, config.weight), b=(config.w[:1], config.bias))
        operands.scale(*config.x)

        def fn(params: Params, x: Tensor) -> Tensor:
            w, b = operands.of(params)
            x = x * params["scale"]
            return loss(conv(x, w, b, config.stride, config.padding, config.dilation, config.groups))

        check(fn, operands.params, draw(config.n, *config.x), config.layout, operands.rules)

    run()


@pytest.mark.parametrize("d", [1, 2, 3])
def test_conv_transpose(d: int) -> None:
    conv = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[d - 1]

    @given(config=some.transposed_convs(d))
    def run(config: some.Transposed) -> None:
        bias = ((config.groups * config.outputs,), config.bias)
        operands = Operands(f"conv_transpose{d}d", w=(config.w, config.weight), b=bias)
        operands.scale(*config.x)

        def fn(params: Params, x: Tensor) -> Tensor:
            w, b = operands.of(params)
            options = config.stride, config.padding, config.output_padding, config.groups, config.dilation
            return loss(conv(x * params["scale"], w, b, *options))

        check(fn, operands.params, draw(config.n, *config.x), config.layout, operands.rules)

    run()


def _ends(*positions: int) -> Tensor:
    return torch.tensor(positions, dtype=torch.int32)


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "Expected weight to be of same shape": (lambda x, w: F.rms_norm(x, [4], w), (1,)),
    "expected input with shape": (lambda x, w: F.rms_norm(x, [3], w), (3,)),
    "at least 1-dimensional": (lambda x, w: F.rms_norm(x, [], w), ()),
    "must be tuple of ints": (lambda x, w: F.rms_norm(x, 4, w), (4,)),
    "output padding must be smaller": (lambda x, w: F.conv_transpose1d(x, w, output_padding=1), (2, 3, 2)),
    "Output size is too small": (lambda x, w: F.conv_transpose1d(x, w, padding=4), (2, 3, 2)),
    "Mismatch of parameter numbers and input channel size": (lambda x, w: F.prelu(x, w), (3,)),
    "input1 size does not match weight size": (lambda x, w: F.bilinear(x, x[:, :2], w), (2, 2, 4)),
    "input batch dimensions do not match": (lambda x, w: F.bilinear(x, x[:1], w), (2, 4, 4)),
    "bias size does not match weight size": (lambda x, w: F.bilinear(x, x, w, w[0, 0, :1]), (2, 4, 4)),
    "All tensors must have the same dtype": (lambda x, w: F.bilinear(x, x.float(), w), (2, 4, 4)),
    "at least 2 dimensional": (lambda x, w: F.scaled_dot_product_attention(x[0] * w, x[1], x[1]), (4,)),
    "more than 1 value per channel": (lambda x, w: F.group_norm(x[:1], 4, w), (4,)),
    "more than 1 spatial element": (lambda x, w: F.instance_norm(x[..., None], weight=w), (4,)),
    "not differentiable with respect to argument 'running_mean'": (lambda x, w: F.batch_norm(x, w, w.exp()), (4,)),
    "argument 'running_mean'": (lambda x, w: F.instance_norm(x[None], w, w.exp(), use_input_stats=False), (2,)),
    "input has to be 1D or 2D Tensor": (lambda x, w: F.embedding_bag(x[None].sign().long() + 1, w), (3, 2)),
}

# the same of grouped_mm, which asks for float32
REFUSED_GROUPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "batch sizes have to match": lambda x, w: F.grouped_mm(x, w, offs=_ends(1, 1, 2)),
    "Offsets have to be int32": lambda x, w: F.grouped_mm(x, w, offs=_ends(1, 2).long()),
    "argument 'bias'": lambda x, w: F.grouped_mm(x, w, offs=_ends(1, 2), bias=w[0, 0]),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch, before it refuses
@pytest.mark.parametrize("message", REFUSED)
def test_rules_refuse_what_torch_refuses(message: str) -> None:
    """With torch's own words."""
    call, shape = REFUSED[message]
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        psgrad.per_sample_grads(lambda w, x: call(x, w).sum(), draw(*shape), draw(3, 2, 4))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("message", REFUSED_GROUPS)
def test_grouped_mm_refuses_what_torch_refuses(message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        psgrad.per_sample_grads(
            lambda w, x: REFUSED_GROUPS[message](x, w).sum(), draw(2, 4, 4).float(), draw(3, 2, 4).float()
        )


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_grouped_mm_without_offsets_is_left_to_vmap() -> None:
    """Each matrix with its own: no rows to divide, and no loop over samples either."""
    fn = lambda w, x: loss(F.grouped_mm(x, w))
    psgrad.testing.check(fn, draw(2, 4, 4).float(), draw(3, 2, 4, 4).float(), rules={"params": ["vmap"]})


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_norms_of_nothing_are_left_to_vmap(norm: Callable[..., Tensor]) -> None:
    fn = lambda w, x: loss(norm(x, [0], w))
    psgrad.testing.check(fn, draw(0), draw(3, 2, 0), rules={"params": ["vmap"]})


def test_conv_refuses_what_torch_refuses() -> None:
    fn = lambda p, x: F.conv1d(x, p["w"], stride=2, padding="same").sum()
    with pytest.raises(RuntimeError, match="padding='same' is not supported for strided convolutions"):
        psgrad.per_sample_grads(fn, {"w": draw(2, 1, 3)}, draw(3, 1, 7))


def _one_conv_gradient(x: Tensor, g: Tensor, w: Tensor, geometry: ConvGeometry) -> Tensor:
    """The weight's gradient for one sample, by ordinary autograd."""
    w = w.detach().requires_grad_()
    conv = (F.conv1d, F.conv2d, F.conv3d)[w.dim() - 3]
    y = conv(x, w, None, *geometry)
    return torch.autograd.grad(y, w, g)[0]


class Allocated(TorchDispatchMode):
    """The bytes of all tensors made by `new_empty` and `new_zeros`."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.new_empty.default, torch.ops.aten.new_zeros.default):
            self.bytes += out.numel() * out.element_size()
        return out


@pytest.mark.parametrize("d", [1, 2, 3])
def test_conv_strategies_agree(d: int) -> None:
    @given(config=some.convs(d, words=False))
    def run(config: some.Conv) -> None:
        assume(config.inner is not None)
        padding = (config.padding,) * d if isinstance(config.padding, int) else config.padding
        geometry = ConvGeometry(config.stride, padding, config.dilation, config.groups)
        x, w = draw(config.n, *config.x), draw(*config.w)
        x, in_dim = config.layout.apply(x)
        x = x.movedim(in_dim, 0)
        conv = (F.conv1d, F.conv2d, F.conv3d)[d - 1]
        g = draw(*conv(x.flatten(0, 1), w, None, *geometry).unflatten(0, x.shape[:2]).shape)
        each = [_one_conv_gradient(x[k], g[k], w, geometry) for k in range(config.n)]
        want = torch.stack(each) if each else draw(0, *config.w)
        factor = Patches(x, g, geometry, config.kernel)
        for strategy, tile, turns, row in _ways(x, geometry, config.kernel):
            with (
                mock.patch.object(_plan, "TILE", tile),
                mock.patch.object(_conv_plan, "AT_ONCE", tile),
                mock.patch.object(_plan, "WORKSPACE", tile),
                mock.patch.object(_conv_plan, "conv_turns", return_value=turns),
                mock.patch.object(_conv_plan, "ROW", row),
            ):
                torch.testing.assert_close(factor.by(strategy), want)
                out = torch.full_like(want, torch.nan)
                assert factor.by(strategy, out) is out
                torch.testing.assert_close(out, want)
                strided = want.new_full((*want.shape[1:], len(want)), torch.nan).movedim(-1, 0)
                torch.testing.assert_close(factor.by(strategy, strided), want)
                torch.testing.assert_close(strided, want)

    run()


def _ways(x: Tensor, geometry: ConvGeometry, kernel: tuple[int, ...]) -> Iterator[tuple[str, int, bool, float]]:
    """Strategies, and the choices within: a tile's bytes; of patches also the product's order, how they are copied."""
    yield from (("grouped", tile, False, 0) for tile in (1, 1 << 11, _plan.WORKSPACE))
    yield "loop", _plan.TILE, False, 0
    if _conv_plan.is_pointwise(x.shape, geometry, kernel):
        yield "pointwise", _plan.TILE, False, 0
    yield from itertools.product(["patches"], [1, 1 << 11, _plan.TILE], [False, True], [0, 1e6])


def test_grouped_convolutions_come_in_tiles() -> None:
    """Of ten samples, four at once at most: 4, 4 and 2, as many for each thread."""
    x, g = draw(10, 1, 2, 6, 6), draw(10, 1, 3, 4, 4)
    factor = Patches(x, g, ConvGeometry((1, 1), (0, 0), (1, 1), 1), (3, 3))
    each = (x[0].numel() + g[0].numel() + 3 * 2 * 9) * x.element_size()
    want = factor.by("loop")
    with (
        mock.patch.object(_conv_plan, "AT_ONCE", 5 * each),
        mock.patch.object(torch, "get_num_threads", return_value=2),
        mock.patch.object(_patches, "weight_gradient", wraps=_patches.weight_gradient) as kernel,
    ):
        torch.testing.assert_close(factor.by("grouped"), want)
    assert [call.args[2].groups for call in kernel.call_args_list] == [4, 4, 2]


@pytest.mark.parametrize("d", [1, 2, 3])
def test_conv_plans_are_ones_that_work(d: int) -> None:
    """An unpadded 1x1 kernel is the only one that may take the pointwise way; the workspace is what is held."""

    @given(config=some.convs(d, words=False))
    def run(config: some.Conv) -> None:
        padding = (config.padding,) * d if isinstance(config.padding, int) else config.padding
        geometry = ConvGeometry(config.stride, padding, config.dilation, config.groups)
        x = torch.randn(max(config.n, 1), config.inner or 1, *config.x[-d - 1 :])
        w = x.new_zeros(config.w)
        g = (F.conv1d, F.conv2d, F.conv3d)[d - 1](x.flatten(0, 1), w, None, *geometry).unflatten(0, x.shape[:2])
        assume(g.numel() > 0)
        plan = _conv_plan.conv_weight(x.shape, g.shape, geometry, config.kernel, 4)
        assert plan.flops == len(x) * w.numel() * g[0, :, 0].numel()
        pointwise = _conv_plan.is_pointwise(x.shape, geometry, config.kernel)
        assert plan.strategy in (("pointwise",) if pointwise else ("patches", "grouped", "loop"))
        if plan.strategy == "patches":
            out = x.new_empty(len(x), *w.shape)
            with Allocated() as held:
                Patches(x, g, geometry, config.kernel).by("patches", out)
            assert plan.workspace == held.bytes

    run()


# ---- norms -------------------------------------------------------------------------------------------------


def _check_norm(config: some.Norm, rule: str, norm: Callable[..., Tensor]) -> None:
    """norm(x, weight, bias) on the configuration's operands."""
    operands = Operands(rule, w=(config.affine, config.weight), b=(config.affine, config.bias))
    if config.scaled:
        operands.scale(*config.x)

    def fn(params: Params, x: Tensor) -> Tensor:
        x = x * params["scale"] if config.scaled else x
        return loss(norm(x, *operands.of(params)))

    check(fn, operands.params, draw(config.n, *config.x), config.layout, operands.rules)


@given(config=some.group_norms())
def test_group_norm(config: some.Norm) -> None:
    _check_norm(config, "group_norm", lambda x, w, b: F.group_norm(x, config.option, w, b, 0.1))


def test_group_norm_of_strides_that_look_like_channels_last() -> None:
    """Along axes of size one a stride means nothing, but kernels read the memory format off it."""
    x = draw(3, 1, 1, 4).as_strided((3, 1, 1, 4), (4, 1, 4, 1))
    params = {"w": draw(1), "b": draw(1), "s": draw(4)}
    fn = lambda p, x: loss(F.group_norm(x * p["s"], 1, p["w"], p["b"]))
    psgrad.testing.check(fn, params, x)


@pytest.mark.parametrize(("positions", "width"), [(16, 1 << 12), (3, 1 << 16)])
def test_layer_norm_of_long_samples(positions: int, width: int) -> None:
    """Where the kernel runs for each sample, and where rows are too few for that."""
    x = draw(2, positions, width)
    for frozen in ((), ("b",), ("w",)):
        given = {name: draw(width) for name in ("w", "b")}
        params = {name: p for name, p in given.items() if name not in frozen} | {"s": draw(positions, 1)}
        fn = lambda p, x, given=given: loss(F.layer_norm(x * p["s"], (width,), (given | p)["w"], (given | p)["b"]))
        psgrad.testing.check(fn, params, x)


@pytest.mark.parametrize("shape", [(5,), (1, 1, 5), (3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layer_norm_of_one_position(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Products of cotangent and normalised input are written straight into the result."""
    params = {name: draw(5).to(dtype) for name in ("w", "b")}
    x, fn = draw(6, *shape).to(dtype), lambda p, x: loss(F.layer_norm(x, (5,), p["w"], p["b"]))
    factors = [row.factor for row in psgrad.explain(fn, params, x).rows]
    assert factors == ["Dense" if len(shape) == 3 and shape[0] > 1 else "Product", "Dense"]
    out = {name: torch.full((6, 5), torch.nan, dtype=dtype) for name in params}
    grads = psgrad.per_sample_grads(fn, params, x, out=out)
    assert all(grads[name] is out[name] for name in out)
    exact = psgrad.testing.loop_grads(fn, {name: p.double() for name, p in params.items()}, x.double())
    tolerance = {"atol": 16 * torch.finfo(dtype).eps, "rtol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close({name: g.double() for name, g in grads.items()}, exact, **tolerance)


@given(config=some.layer_norms())
def test_layer_norm(config: some.Norm) -> None:
    _check_norm(config, "layer_norm", lambda x, w, b: F.layer_norm(x, config.affine, w, b, 0.1))


@given(config=some.rms_norms())
def test_rms_norm(config: some.Norm) -> None:
    _check_norm(config, "rms_norm", lambda x, w, b: F.rms_norm(x, config.affine, w, config.option))


@pytest.mark.parametrize("tracking", [False, True])
def test_instance_norm(tracking: bool) -> None:
    mean, var = draw(3), draw(3).exp()

    @given(config=some.instance_norms())
    def run(config: some.Norm) -> None:
        c, own = config.affine[0], config.option

        def norm(x: Tensor, w: Any, b: Any) -> Tensor:
            given = (mean[:c].clone(), var[:c].clone()) if tracking or not own else (None, None)
            return F.instance_norm(x, *given, w, b, own, 0.1, 0.1)

        _check_norm(config, "instance_norm", norm)

    run()


@pytest.mark.parametrize("tracking", [False, True])
def test_batch_norm(tracking: bool) -> None:
    mean, var = draw(3), draw(3).exp()

    @given(config=some.batch_norms())
    def run(config: some.Norm) -> None:
        c, own = config.affine[0], config.option

        def norm(x: Tensor, w: Any, b: Any) -> Tensor:
            given = (mean[:c].clone(), var[:c].clone()) if tracking or not own else (None, None)
            return F.batch_norm(x, *given, w, b, own, 0.1, 0.1)

        _check_norm(config, "batch_norm", norm)

    run()


# ---- tables ------------------------------------------------------------------------------------------------


def _check_table(config: some.Embedding, rule: str, low: int, look_up: Callable[..., Tensor]) -> None:
    shared = torch.randint(low, config.rows, config.index, dtype=config.dtype)
    indices = torch.randint(low, config.rows, (config.n, *config.index), dtype=config.dtype)

    def fn(params: Params, sample: Tensor) -> Tensor:
        if config.shared:  # the sample is there to be multiplied with
            return loss(look_up(shared, params["w"]) * sample)
        return loss(look_up(sample, params["w"]))

    batch = draw(config.n) if config.shared else indices
    shared_index = config.shared and rule == "index"  # a function of the parameter alone
    check(fn, {"w": draw(config.rows, *config.row)}, batch, config.layout, None if shared_index else {"w": rule})


@given(config=some.embeddings())
def test_embedding(config: some.Embedding) -> None:
    def look_up(index: Tensor, w: Tensor) -> Tensor:
        return F.embedding(index, w, config.padding, scale_grad_by_freq=config.by_frequency)

    _check_table(config, "embedding", 0, look_up)


@given(config=some.embeddings(most=2))
def test_index(config: some.Embedding) -> None:
    _check_table(config, "index", -config.rows, lambda index, w: w[index])


@given(config=some.experts())
def test_grouped_mm(config: some.Experts) -> None:
    """Each sample has as many rows, and divides them by the same sizes, perhaps in an order of its own."""
    count, rows = len(config.sizes), sum(config.sizes) + config.rest
    params, rules = {"w": draw(count, config.inputs, config.outputs)}, {"w": "grouped_mm"}
    if config.turned:
        params["w"] = params["w"].mT.contiguous()
    if config.scaled:
        params, rules = params | {"s": draw(config.inputs)}, {"s": "mul"} | rules

    def fn(params: Params, sample: Tensor) -> Tensor:
        x = sample * params["s"] if config.scaled else sample
        sizes = torch.tensor(config.sizes)
        if config.spread:
            sizes = sizes[sample.detach().flatten()[:count].argsort() if x.numel() >= count else torch.arange(count)]
        w = params["w"].mT if config.turned else params["w"]
        return loss(grouped_mm(x, w, sizes.cumsum(0).int())[: rows - config.rest])

    check(fn, params, draw(config.n, rows, config.inputs), config.layout, rules)


@given(config=some.bags())
def test_embedding_bag(config: some.Bag) -> None:
    params, rules = {"w": draw(config.rows, config.width)}, {"w": "embedding_bag"}
    if config.scaled in ("param", "both"):
        params, rules = (
            params | {"s": draw(*config.index)},
            rules | {"s": "vmap" if config.scaled == "param" else "mul"},
        )
    offsets = None
    if config.lengths is not None:
        ends = torch.tensor(config.lengths).cumsum(0)
        offsets = torch.cat([ends.new_zeros(1), ends])[: None if config.include_last else -1]

    def fn(params: Params, index: Tensor) -> Tensor:
        own = (index + 1).double().sin()
        scales = {"param": lambda: params["s"], "sample": lambda: own, "both": lambda: params["s"] * own}
        return loss(
            F.embedding_bag(
                index,
                params["w"],
                offsets,
                mode=config.mode,
                include_last_offset=config.include_last,
                padding_idx=config.padding,
                per_sample_weights=None if config.scaled is None else scales[config.scaled](),
            )
        )

    batch = torch.randint(config.rows, (config.n, *config.index), dtype=config.dtype)
    check(fn, params, batch, config.layout, rules)


def _buffers(want: Tensor) -> list[Tensor]:
    """What a factor may be asked to write into: contiguous, transposed, strided, of another dtype."""
    nan = lambda *shape, dtype=want.dtype: torch.full(shape, torch.nan, dtype=dtype)
    *lead, o, i = want.shape
    return [
        nan(*lead, o, i),
        nan(*lead, i, o).mT,
        nan(*lead, o, 2 * i)[..., ::2],
        nan(*lead, o, i, dtype=torch.float32),
    ]


def _check_factor(factor: Outer | Rows, want: Tensor) -> None:
    torch.testing.assert_close(factor.dense(), want)
    for out in _buffers(want):
        assert factor.dense(out) is out
        torch.testing.assert_close(out, want.to(out.dtype))


@pytest.mark.parametrize("heads", [(), (2,)])
@pytest.mark.parametrize(("n", "t", "i", "o"), [(3, 2, 4, 5), (1, 1, 1, 1), (2, 3, 1, 4), (3, 0, 2, 2), (2, 1, 0, 3)])
def test_outer(heads: tuple[int, ...], n: int, t: int, i: int, o: int) -> None:
    x, g = draw(n, *heads, t, i), draw(n, *heads, t, o)
    _check_factor(Outer(x, g), torch.einsum("n...ti,n...to->n...oi", x, g))


@pytest.mark.parametrize(("n", "t", "d", "v"), [(3, 5, 2, 4), (1, 1, 1, 1), (2, 0, 3, 2), (2, 3, 0, 4)])
def test_rows(n: int, t: int, d: int, v: int) -> None:
    index, g = torch.randint(0, v, (n, t)), draw(n, t, d)
    want = torch.zeros(n, v, d, dtype=torch.float64)
    for k, (rows, each) in enumerate(zip(index, g, strict=True)):
        want[k].index_add_(0, rows, each)
    _check_factor(Rows(index, g, v), want)


# ---- elementwise -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["add", "sub", "mul", "div"])
def test_elementwise(op: str) -> None:
    call = getattr(torch, op)

    @given(config=some.pairs())
    def run(config: some.Pair) -> None:
        def fn(params: Params, x: Tensor) -> Tensor:
            x = x.exp() + 0.5  # away from zero, for division
            if config.scaled:
                x = F.linear(x[..., None], params["scale"])[..., 0]
            return loss(call(params["w"], x) if config.first else call(x, params["w"]))

        params = ({"scale": draw(1, 1).exp()} if config.scaled else {}) | {"w": draw(*config.w).exp() + 0.5}
        rules = ({"scale": "linear"} if config.scaled else {}) | {"w": op}
        check(fn, params, draw(config.n, *config.x), config.layout, rules)

    run()


def test_mul_straight_into_the_result() -> None:
    """Where nothing is summed, the product is written where it goes; where something is, it is summed first."""
    params, x = {"w": draw(3, 4), "v": draw(4)}, draw(5, 3, 4)
    fn = lambda p, x: loss(x * p["w"] * p["v"])
    assert [row.factor for row in psgrad.explain(fn, params, x).rows] == ["Product", "Dense"]
    out = {name: torch.full((5, *p.shape), torch.nan, dtype=p.dtype) for name, p in params.items()}
    grads = psgrad.per_sample_grads(fn, params, x, out=out)
    assert all(grads[name] is out[name] for name in out)
    torch.testing.assert_close(grads, psgrad.testing.loop_grads(fn, params, x))


@given(config=some.slopes())
def test_prelu(config: some.Slopes) -> None:
    def fn(params: Params, x: Tensor) -> Tensor:
        return loss(F.prelu(x * params["scale"] if config.scaled else x, params["w"]))

    params = ({"scale": draw(*config.x)} if config.scaled else {}) | {"w": draw(*config.slopes)}
    rules = ({"scale": "mul"} if config.scaled else {}) | {"w": "prelu"}
    check(fn, params, draw(config.n, *config.x), config.layout, rules)


# ---- views -------------------------------------------------------------------------------------------------

USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda x, w: x * w,
    "add": lambda x, w: w + x,
    "div": lambda x, w: w / (x.exp() + 0.5),
    "linear": lambda x, w: F.linear(x[..., : w.shape[1]], w),
    "matmul": lambda x, w: x[..., : w.shape[0]] @ w,
    "conv1d": F.conv1d,
}


@given(chain=some.chains())
def test_views(chain: some.Chain) -> None:
    """Whatever views a parameter goes through, the op at the end has its rule and no copy is differentiated."""
    shape = tuple(chain.apply(torch.empty(chain.shape, device="meta")).shape)
    x = {"linear": (2, *shape[1:]), "matmul": (2, *shape[:1]), "conv1d": (2, *shape[1:])}.get(chain.use, shape)

    def fn(params: Params, x: Tensor) -> Tensor:
        return loss(USES[chain.use](x, chain.apply(params["w"])))

    params, batch = {"w": draw(*chain.shape)}, draw(chain.n, *x)
    psgrad.testing.check(fn, params, batch)
    used = psgrad.testing.rules_used(fn, params, batch)
    assert list(used.values()) == [[chain.use]]
    if not any(step[0] in ("reshape", "flatten") for step in chain.steps):
        assert list(used) == ["params['w']"]  # a view throughout: no value of its own


# ---- ops without parameters that run on the folded batch ---------------------------------------------------


@given(config=some.cross_entropies())
def test_cross_entropy(config: some.CrossEntropy) -> None:
    """With every target ignored the mean is NaN, as torch has it."""
    n, inner, classes, spatial, ignored, smoothing, reduction, layout = config
    shape = (inner, classes, *spatial)
    targets = torch.randint(classes, (n, inner, *spatial))
    batch, in_dims = layout.apply(draw(n, *shape))

    def fn(params: Params, sample: tuple[Tensor, Tensor]) -> Tensor:
        x, target = sample
        options = {"ignore_index": ignored, "label_smoothing": smoothing, "reduction": reduction}
        return F.cross_entropy(x * params["w"], target, **options)

    params = {"w": draw(*shape)}
    found = psgrad.per_sample_grads(fn, params, (batch, targets), in_dims=(in_dims, 0))
    want = psgrad.testing.loop_grads(fn, params, (batch, targets), in_dims=(in_dims, 0))
    torch.testing.assert_close(found, want, equal_nan=True)
    with mock.patch.object(_loss, "_SMALL", 0):  # as it is of many numbers
        torch.testing.assert_close(
            psgrad.per_sample_grads(fn, params, (batch, targets), in_dims=(in_dims, 0)),
            found,
            rtol=0,
            atol=0,
            equal_nan=True,
        )


@pytest.mark.parametrize("ignored", [-100, -1, _loss._NO_CLASS])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("spatial", [(), (3,), (3, 2)])
def test_cross_entropy_ignores_targets(spatial: tuple[int, ...], smoothing: float, ignored: int) -> None:
    """In small calls it is torch's kernel that finds them, in others a look: the same numbers."""
    x, targets = draw(4, 2, 5, *spatial), torch.randint(5, (4, 2, *spatial))
    targets[1, 0], targets[2] = ignored, ignored  # some of a sample, all of a sample
    fn = lambda w, s: F.cross_entropy(s[0] * w, s[1], ignore_index=ignored, label_smoothing=smoothing)
    w = draw(2, 5, *spatial)
    found = psgrad.per_sample_grads(fn, w, (x, targets))
    torch.testing.assert_close(found, psgrad.testing.loop_grads(fn, w, (x, targets)), equal_nan=True)
    with mock.patch.object(_loss, "_SMALL", 0):
        again = psgrad.per_sample_grads(fn, w, (x, targets))
    torch.testing.assert_close(again, found, rtol=0, atol=0, equal_nan=True)
    targets[3, 0] = -2
    with pytest.raises(IndexError, match="Target -2 is out of bounds"):
        psgrad.per_sample_grads(fn, w, (x, targets))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("spatial", [(), (3,), (3, 2)])
@pytest.mark.parametrize("target", [-100, -1, 5])
def test_torch_refuses_what_is_no_class(target: int, spatial: tuple[int, ...], smoothing: float) -> None:
    """On which small calls of cross_entropy rely."""
    x, targets = torch.randn(6, 5, *spatial), torch.randint(5, (6, *spatial))
    assert _loss._of_classes_alone(x, targets, smoothing) is not None
    targets.view(-1)[-1] = target
    assert _loss._of_classes_alone(x, targets, smoothing) is None


@given(config=some.attentions())
def test_attention(config: some.Attention) -> None:
    """Queries, keys, values and the mask each depend on a parameter and on the sample."""
    q = (*config.lead, config.queries, config.width)
    k = (*config.key_lead, config.keys, config.width)
    v = (*config.key_lead, config.keys, config.values)
    params = {"q": draw(*q), "k": draw(*k), "v": draw(*v)}
    batch = {name: draw(config.n, *p.shape) for name, p in params.items()}
    if config.mask is not None:
        batch["mask"] = draw(config.n, *config.mask)
        if not config.boolean:
            params["mask"] = draw(*config.mask)

    def fn(params: Params, sample: dict[str, Tensor]) -> Tensor:
        operands = {name: sample[name] * p for name, p in params.items()}
        mask = operands.pop("mask", None)
        if config.mask is not None and config.boolean:
            mask = (sample["mask"] > 0).index_fill(-1, torch.tensor([0]), True)  # a key to look at
        options = {"is_causal": config.causal, "scale": config.scale, "enable_gqa": config.key_lead != config.lead}
        return loss(F.scaled_dot_product_attention(*operands.values(), mask, **options))

    psgrad.testing.check(fn, params, batch)
