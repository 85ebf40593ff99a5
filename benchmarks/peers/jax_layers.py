"""The layers of the workloads by hand in JAX, for one sample, with torch's modules as their description."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from torch import nn

from ..workloads import GPT, LSTM, Block, Residual

Params = dict[str, Any]
SPATIAL = "DHW"


@dataclass(frozen=True)
class Layout:
    """Where images have their channels: C, H, W with weights O, I, H, W; or H, W, C with weights H, W, I, O."""

    channels_last: bool

    def inputs(self, x: np.ndarray) -> Any:
        """A torch batch in this layout; only for images are channels ever last."""
        return jnp.asarray(np.moveaxis(x, 1, -1) if self.channels_last else x)

    def weight(self, p: np.ndarray) -> Any:
        """A torch parameter in this layout; of these, only a convolution's weight has more than two axes."""
        return jnp.asarray(np.moveaxis(p, (0, 1), (-1, -2)) if self.channels_last and p.ndim > 2 else p)

    def torch_weight(self, p: np.ndarray, leading: int) -> np.ndarray:
        """The way back, for a gradient with so many axes in front."""
        turned = self.channels_last and p.ndim - leading > 2
        return np.moveaxis(p, (-1, -2), (leading, leading + 1)) if turned else p

    def along(self, v: Any, x: Any) -> Any:
        """A vector of channels shaped to broadcast against a sample."""
        return v if self.channels_last else v.reshape(-1, *[1] * (x.ndim - 1))


def loss(layout: Layout, model: nn.Module, params: Params, x: Any, y: Any) -> Any:
    """Cross entropy of one sample, averaged over its positions if it has any."""
    logits = jax.nn.log_softmax(apply(layout, model, params, "", x))
    return -jnp.take_along_axis(logits, y[..., None], -1).mean()


def apply(layout: Layout, module: nn.Module, params: Params, path: str, x: Any) -> Any:
    """A module on one sample."""
    p = {name[len(path) :]: value for name, value in params.items() if name.startswith(path)}
    match module:
        case nn.Sequential():
            for name, child in module.named_children():
                x = apply(layout, child, params, f"{path}{name}.", x)
            return x
        case nn.Linear():
            return linear(p, x)
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            return conv(layout, module, p, x)
        case nn.GroupNorm():
            return group_norm(layout, p, x, module.num_groups, module.eps)
        case nn.InstanceNorm2d():
            return group_norm(layout, p, x, module.num_features, module.eps)
        case nn.AdaptiveAvgPool1d() | nn.AdaptiveAvgPool2d() | nn.AdaptiveAvgPool3d():
            return x.mean(tuple(range(x.ndim - 1) if layout.channels_last else range(1, x.ndim)))
        case nn.Flatten() | nn.Identity():  # pooling has flattened already
            return x
        case nn.ReLU():
            return jax.nn.relu(x)
        case nn.Tanh():
            return jnp.tanh(x)
        case nn.GELU():
            return jax.nn.gelu(x, approximate=False)
        case Residual():
            body = apply(layout, module.body, params, f"{path}body.", x)
            return jax.nn.relu(body + apply(layout, module.shortcut, params, f"{path}shortcut.", x))
        case Block():
            return block(layout, module, params, path, x)
        case nn.LayerNorm():
            return layer_norm(p, x, module.eps)
        case GPT():
            x = p["token.weight"][x] + p["position.weight"][: len(x)]
            x = layer_norm(under(p, "norm."), apply(layout, module.blocks, params, "blocks.", x), module.norm.eps)
            return x @ p.get("head.weight", p["token.weight"]).T
        case LSTM():
            for k in range(module.lstm.num_layers):
                x = recurrent(under(p, "lstm."), k, x)
            return linear(under(p, "head."), x[-1])
    raise NotImplementedError(f"no JAX version of {type(module).__name__}")


def under(p: Params, path: str) -> Params:
    return {name.removeprefix(path): value for name, value in p.items() if name.startswith(path)}


def linear(p: Params, x: Any) -> Any:
    return x @ p["weight"].T + p["bias"]


def conv(layout: Layout, module: Any, p: Params, x: Any) -> Any:
    space = SPATIAL[-(x.ndim - 1) :]
    image, kernel = (f"N{space}C", f"{space}IO") if layout.channels_last else (f"NC{space}", f"OI{space}")
    pads = [(k, k) for k in module.padding]
    y = lax.conv_general_dilated(x[None], p["weight"], module.stride, pads, dimension_numbers=(image, kernel, image))[0]
    return y + layout.along(p["bias"], y) if "bias" in p else y


def group_norm(layout: Layout, p: Params, x: Any, groups: int, eps: float) -> Any:
    if layout.channels_last:
        rows, axes = x.reshape(*x.shape[:-1], groups, -1), (*range(x.ndim - 1), x.ndim)
    else:
        rows, axes = x.reshape(groups, -1), (1,)
    rows = normalised(rows, axes, eps)
    return rows.reshape(x.shape) * layout.along(p["weight"], x) + layout.along(p["bias"], x)


def layer_norm(p: Params, x: Any, eps: float) -> Any:
    return normalised(x, (-1,), eps) * p["weight"] + p["bias"]


def normalised(x: Any, axes: tuple[int, ...], eps: float) -> Any:
    return (x - x.mean(axes, keepdims=True)) * lax.rsqrt(x.var(axes, keepdims=True) + eps)


def block(layout: Layout, module: Block, params: Params, path: str, x: Any) -> Any:
    inner = lambda name, x: apply(layout, getattr(module, name), params, f"{path}{name}.", x)
    q, k, v = inner("qkv", inner("norm1", x)).reshape(len(x), 3, module.heads, -1).transpose(1, 2, 0, 3)  # (H, T, D)
    scores = jnp.einsum("htd,hsd->hts", q, k) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    attended = jnp.einsum("hts,hsd->thd", weights, v).reshape(x.shape)
    x = x + inner("proj", attended)
    return x + inner("mlp", inner("norm2", x))


def recurrent(p: Params, k: int, x: Any) -> Any:
    """Layer k of an LSTM over a sequence (T, I)."""
    w = p[f"weight_hh_l{k}"]
    inputs = x @ p[f"weight_ih_l{k}"].T + p[f"bias_ih_l{k}"] + p[f"bias_hh_l{k}"]

    def step(state: tuple[Any, Any], row: Any) -> Any:
        h, c = state
        i, f, g, o = jnp.split(row + h @ w.T, 4)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros(w.shape[1])
    return lax.scan(step, (zero, zero), inputs)[1]
