"""group_norm, layer_norm, rms_norm, instance_norm, batch_norm.

The fused backward kernels already sum a weight's gradient over a batch axis. Called on the whole batch
seen as ONE sample whose channels are N x C, they return the gradient of the input and the per-sample
gradients of weight and bias together, at the price of the ordinary backward. The normalised input is
never formed.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedOpError, place
from ..factors.base import Factor
from ..factors.dense import Dense, Product
from ..registry.rule import Call, Decline, Needs, Param, Rule
from ..torch_ import kernels
from ..torch_.levels import current_level

Saved = tuple[Tensor, ...]
_aten = torch.ops.aten


def _per_sample(grads: Tensor | None, n: int, channels: int) -> Dense | None:
    """A kernel's gradients of N x B x C channels, summed over B."""
    if grads is None:
        return None
    return Dense(grads.view(n, channels) if grads.numel() == n * channels else grads.view(n, -1, channels).sum(1))


def _tiled(t: Tensor | None, times: int) -> Tensor | None:
    """`t` repeated: in memory of its own, which kernels read as it lies."""
    return None if t is None else t.expand(times, -1).contiguous().view(-1)


# ---- group norm -----------------------------------------------------------------------------------------


class Groups(NamedTuple):
    groups: int
    eps: float


def group_forward(options: Groups, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Saved]:
    (n, b, c), size = x.shape[:3], prod(x.shape[3:])  # x (N, B, C, *S)
    flat = x.reshape(n * b, c, size).contiguous()  # the kernel wants it so
    y, mean, rstd = torch.native_group_norm(flat, weight, bias, n * b, c, size, options.groups, options.eps)
    return y.view(x.shape), (mean, rstd)


def group_backward(
    options: Groups, g: Tensor, x: Tensor, params: Sequence[Tensor | None], saved: Saved, needs: Needs
) -> tuple[Tensor | None, list[Factor | None]]:
    (n, b, c), size = x.shape[:3], prod(x.shape[3:])
    weight, (mean, rstd) = params[0], saved
    if weight is None and needs.params[1]:
        weight = x.new_ones(c)  # without one the kernel refuses the bias
    gx, gw, gb = _aten.native_group_norm_backward(
        g.reshape(1, -1, size).contiguous(),  # three axes: with four the kernel may take them for channels last
        x.reshape(1, -1, size).contiguous(),
        mean.view(1, -1),
        rstd.view(1, -1),
        _tiled(weight, n * b),
        1,
        n * b * c,
        size,
        n * b * options.groups,
        [needs.x, needs.params[0], needs.params[1]],
    )
    return (gx.view(x.shape) if needs.x else None), [_per_sample(gw, n, c), _per_sample(gb, n, c)]


def bind_group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Call | Decline:
    if input.dim() < 2 or input.numel() == 0 or input.numel() == num_groups:
        return Decline("too few elements")  # torch refuses it itself
    return Call(input, (weight, bias), Groups(num_groups, eps))


# ---- layer norm -----------------------------------------------------------------------------------------


class Layer(NamedTuple):
    shape: tuple[int, ...]
    eps: float


def layer_forward(options: Layer, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Saved]:
    y, mean, rstd = torch.native_layer_norm(x, options.shape, weight, bias, options.eps)
    return y, (mean, rstd)


def layer_backward(
    options: Layer, g: Tensor, x: Tensor, params: Sequence[Tensor | None], saved: Saved, needs: Needs
) -> tuple[Tensor | None, list[Factor | None]]:
    (weight, bias), (mean, rstd) = params, saved
    # parameters first: their workspace is free again when the gradient of the input is allocated
    factors = _layer_factors(options, g, x, params, saved, needs)
    if not needs.x:
        return None, factors
    mask = [True, False, False]
    return _layer_kernel(g, x, options.shape, mean, rstd, weight, bias, mask)[0], factors


_layer_kernel = _aten.native_layer_norm_backward.default
# Numbers in a sample from which the kernel runs for each: half of the time at 512 x 768, 0.7 at 128 x 768; and
# positions, for few long rows it takes slowly: 12 ms in place of 3.4 at 16 x 1 x 131072.
_LONG, _POSITIONS = 1 << 16, 16


def _layer_factors(
    options: Layer, g: Tensor, x: Tensor, params: Sequence[Tensor | None], saved: Saved, needs: Needs
) -> list[Factor | None]:
    """Of weight and bias: sums over t of rstd_t (x_t - mean_t) g_t and of g_t."""
    (weight, bias), (mean, rstd), n, shape = params, saved, len(x), options.shape
    outermost = current_level() is None
    if needs.params[0] and outermost and x.numel() >= n * _LONG and mean.numel() >= n * _POSITIONS:
        mask = [False, True, needs.params[1]]
        samples = zip(g.unbind(), x.unbind(), mean.unbind(), rstd.unbind(), strict=True)
        found = [_layer_kernel(g, x, shape, m, r, weight, bias, mask)[1:] for g, x, m, r in samples]
        return [None if each[0] is None else Dense(torch.stack(each)) for each in zip(*found, strict=True)]
    factors: list[Factor | None] = [None, None]
    rows = g.reshape(n, -1, prod(shape))  # (N, T, D)
    one = rows.shape[1] == 1
    if needs.params[0]:
        by = rows if not one else rstd.reshape(n, 1, 1)
        centred = x.reshape(rows.shape) - mean.reshape(n, -1, 1)
        # in place, at a quarter of the time; not where a transform runs, which may want both
        centred = centred.mul_(by) if outermost else centred * by
        if one:
            factors[0] = Product(centred.view(n, *shape), g.reshape(n, *shape))
        else:
            summed = torch.bmm(rstd.to(centred.dtype).reshape(n, 1, -1), centred)
            factors[0] = Dense(summed.view(n, *shape))
    if needs.params[1]:
        factors[1] = Dense(g.reshape(n, *shape), own=False) if one else Dense(rows.sum(1).view(n, *shape))
    return factors


def bind_layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Call | Decline:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if input.numel() == 0:
        return Decline("no elements")
    return Call(input, (weight, bias), Layer(shape, eps))


# ---- rms norm -------------------------------------------------------------------------------------------


class RootMeanSquare(NamedTuple):
    shape: tuple[int, ...]
    eps: float | None  # None: what the dtype resolves


def rms_forward(options: RootMeanSquare, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Saved]:
    y, rstd = kernels.rms_norm(x, options.shape, weight, options.eps)
    return y, (rstd,)


def rms_backward(
    options: RootMeanSquare, g: Tensor, x: Tensor, params: Sequence[Tensor | None], saved: Saved, needs: Needs
) -> tuple[Tensor | None, list[Factor | None]]:
    """With r = rsqrt(mean(x^2) + eps): gw = sum_t r_t (x_t g_t), gx = r (w g) - x r^3 mean(x (w g))."""
    n, width, dtype = len(x), prod(options.shape), saved[0].dtype
    r = saved[0].reshape(n, -1, 1)  # (N, T, 1)
    weight = None if params[0] is None else params[0].reshape(-1).to(dtype)
    rows, g = (t.reshape(n, -1, width).to(dtype) for t in (x, g))  # as torch has it: float32 at least
    product, gx, gw = rows * g, None, None
    if needs.params[0]:
        gw = torch.bmm(r.mT, product).view(n, *options.shape)
    if needs.x:
        mean = (product.sum(-1, keepdim=True) if weight is None else (product @ weight)[..., None]) / width
        gx = (r * g if weight is None else r * g * weight) - rows * (r**3 * mean)
        gx = gx.view(x.shape).to(x.dtype)
    return gx, [None if gw is None else Dense(gw)]


def bind_rms_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Call | Decline:
    if isinstance(normalized_shape, int) or input.numel() == 0:
        return Decline("a shape that is a number, or no elements")
    shape = tuple(normalized_shape)
    if not shape or tuple(input.shape[-len(shape) :]) != shape or (weight is not None and tuple(weight.shape) != shape):
        return Decline("the shapes do not fit")  # torch says so itself; its kernel would broadcast
    return Call(input, (weight,), RootMeanSquare(shape, eps))


# ---- instance and batch norm ----------------------------------------------------------------------------


class Channels(NamedTuple):
    """Normalise each channel by its own statistics, or (`running`) by given ones.

    `batched`: over the sample's inner batch too (batch norm); otherwise each image alone (instance norm).
    """

    batched: bool
    running: bool
    eps: float


def _as_channels(options: Channels, t: Tensor) -> Tensor:
    """(N, B, C, *S) as (B, N C, S) for batch norm, as (1, N B C, S) for instance norm."""
    if options.batched:
        return t.transpose(0, 1).reshape(t.shape[1], t.shape[0] * t.shape[2], -1)
    return t.reshape(1, prod(t.shape[:3]), -1)


def _back(options: Channels, t: Tensor, shape: torch.Size) -> Tensor:
    if options.batched:
        return t.view(shape[1], shape[0], *shape[2:]).transpose(0, 1)
    return t.view(shape)


def _alone(options: Channels, x: Tensor) -> Groups | None:
    """The group norm that this is, where each image has its own statistics: a sixth of batch norm's forward."""
    if options.running or (options.batched and x.shape[1] != 1):
        return None
    return Groups(x.shape[2], options.eps)


def channel_forward(
    options: Channels, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None
) -> tuple[Tensor, Saved]:
    if (groups := _alone(options, x)) is not None:
        return group_forward(groups, x, weight, bias)
    if options.running:
        y, *saved = torch.native_batch_norm(x.flatten(0, 1), weight, bias, mean, var, False, 0.0, options.eps)
        return y.view(x.shape), tuple(saved)
    flat = _as_channels(options, x)
    weight, bias = (_tiled(t, len(x)) for t in (weight, bias))
    y, *saved = torch.native_batch_norm(flat, weight, bias, None, None, True, 0.0, options.eps)
    return _back(options, y, x.shape), tuple(saved)


def channel_backward(
    options: Channels, g: Tensor, x: Tensor, params: Sequence[Tensor | None], saved: Saved, needs: Needs
) -> tuple[Tensor | None, list[Factor | None]]:
    if (groups := _alone(options, x)) is not None:
        gx, factors = group_backward(groups, g, x, params[:2], saved, Needs(needs.x, needs.params[:2]))
        return gx, [*factors, None, None]
    n, c = x.shape[0], x.shape[2]
    flat = _as_channels(options, x)
    weight, _, mean, var = (_tiled(t, flat.shape[1] // c) for t in params)
    gx, gw, gb = _aten.native_batch_norm_backward(
        _as_channels(options, g),
        flat,
        weight,
        mean if options.running else None,
        var if options.running else None,
        saved[0] if not options.running else None,
        saved[1] if not options.running else None,
        not options.running,
        options.eps,
        [needs.x, needs.params[0], needs.params[1]],
    )
    factors = [None] * 4
    for i, grads in enumerate((gw, gb)):
        if needs.params[i]:
            factors[i] = _per_sample(grads, n, c)
    return (_back(options, gx, x.shape) if needs.x else None), factors


def bind_instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Call | Decline:
    if input.dim() < 3 or input.numel() == 0 or (use_input_stats and prod(input.shape[2:]) == 1):
        return Decline("too few elements")  # torch refuses it itself
    if any(isinstance(t, Param) for t in (running_mean, running_var)):
        return Decline("the running statistics are parameters")
    if not use_input_stats and (running_mean is None or running_var is None):
        return Decline("no running statistics")  # torch refuses it itself
    return Call(input, (weight, bias, running_mean, running_var), Channels(False, not use_input_stats, eps))


def bind_batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Call | Decline:
    if training and input.numel() == input.shape[1]:
        name = weight.source.name if isinstance(weight, Param) else "its weight"
        raise UnsupportedOpError(
            f"F.batch_norm(training=True) with {name} normalises over a single value per channel\n"
            f"  called at {place()}\n"
            "  a sample is normalised by its own statistics: call model.eval(), or use group or layer norm instead."
        )
    if input.dim() < 2 or input.numel() == 0 or any(isinstance(t, Param) for t in (running_mean, running_var)):
        return Decline("too few elements, or running statistics that are parameters")
    if not training and (running_mean is None or running_var is None):
        return Decline("no running statistics")  # torch refuses it itself
    return Call(input, (weight, bias, running_mean, running_var), Channels(True, not training, eps))


# ---- the same by elementary ops, for derivatives of any order -----------------------------------------


def _normalised(x: Tensor, axes: list[int], eps: float) -> Tensor:
    mean, var = x.mean(axes, keepdim=True), x.var(axes, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(var + eps)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, trailing: int) -> Tensor:
    """x * weight + bias, the channels being followed by `trailing` axes."""
    for op, t in ((torch.mul, weight), (torch.add, bias)):
        x = x if t is None else op(x, t[(..., *[None] * trailing)])
    return x


def group_plain(options: Groups, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = _normalised(x.reshape(*x.shape[:2], options.groups, -1), [-1], options.eps)
    return _affine(y.reshape(x.shape), weight, bias, x.dim() - 3)


def layer_plain(options: Layer, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return _affine(_normalised(x, list(range(-len(options.shape), 0)), options.eps), weight, bias, 0)


def rms_plain(options: RootMeanSquare, x: Tensor, weight: Tensor | None) -> Tensor:
    eps = torch.finfo(x.dtype).eps if options.eps is None else options.eps
    square = x.square().mean(list(range(-len(options.shape), 0)), keepdim=True)
    return _affine(x * torch.rsqrt(square + eps), weight, None, 0)


def channel_plain(
    options: Channels, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, var: Tensor | None
) -> Tensor:
    trailing = x.dim() - 3
    if options.running and mean is not None and var is not None:
        y = _affine(x, None, -mean, trailing)
        y = _affine(y, torch.rsqrt(var + options.eps), None, trailing)
    else:
        y = _normalised(x, [1, *range(3, x.dim())] if options.batched else list(range(3, x.dim())), options.eps)
    return _affine(y, weight, bias, trailing)


_DENSE = ("Dense",)
GROUP = Rule(
    "group_norm",
    (F.group_norm,),
    bind_group_norm,
    group_forward,
    group_backward,
    group_plain,
    saves=2,
    autocast="float32 off the CPU",
    factors=_DENSE,
)
LAYER = Rule(
    "layer_norm",
    (F.layer_norm,),
    bind_layer_norm,
    layer_forward,
    layer_backward,
    layer_plain,
    saves=2,
    autocast="float32 off the CPU",
    factors=("Product", *_DENSE),
)
RMS = Rule(
    "rms_norm",
    (F.rms_norm, torch.rms_norm),
    bind_rms_norm,
    rms_forward,
    rms_backward,
    rms_plain,
    saves=1,
    autocast="float32 off the CPU",
    factors=_DENSE,
)
INSTANCE = Rule(
    "instance_norm",
    (F.instance_norm,),
    bind_instance_norm,
    channel_forward,
    channel_backward,
    channel_plain,
    saves=2,
    factors=_DENSE,
)
BATCH = Rule(
    "batch_norm",
    (F.batch_norm,),
    bind_batch_norm,
    channel_forward,
    channel_backward,
    channel_plain,
    saves=2,
    factors=_DENSE,
)
RULES = (GROUP, LAYER, RMS, INSTANCE, BATCH)
