"""JAX: `jit(vmap(grad))` of the same architecture with the same weights, everything in one compiled function.

Layers are written by hand for one sample, with torch's modules as their description. JAX takes all cores there are.
"""

from collections.abc import Callable
from functools import partial, reduce
from timeit import repeat
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import nn

from .models import GPT, LSTM, Block, Residual
from .tasks import Task

Params = dict[str, Any]
LAYOUTS: dict[Any, bool] = {}


def faster(quantity: str, task: Task, private: bool = False) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """A call and how to read its answer, with the channels first or last, where gradients are faster; `private`: the
    clipped sum by jax_privacy."""
    # Tried once for an architecture: a call that has run at full size keeps memory that hides its peak.
    key = task.inputs.shape[1:], *((name, p.shape) for name, p in task.params.items())
    if not any(isinstance(module, nn.modules.conv._ConvNd) for module in task.model.modules()):
        LAYOUTS[key] = False
    if key not in LAYOUTS:
        first, last = (min(repeat(compiled("grads", task, last)[0], number=1, repeat=4)) for last in (False, True))
        LAYOUTS[key] = last < first
    return compiled(quantity, task, LAYOUTS[key], private)


def compiled(
    quantity: str, task: Task, last: bool, private: bool = False
) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """`last`: images H, W, C with weights H, W, I, O; else C, H, W with weights O, I, H, W."""
    params = {name: jnp.asarray(laid_out(p.detach().numpy(), last)) for name, p in task.params.items()}
    inputs, target = task.inputs.numpy(), jnp.asarray(task.target.numpy())
    inputs = jnp.asarray(np.moveaxis(inputs, 1, -1) if last else inputs)
    of_one = partial(loss, last, task.model)
    per_sample = jax.vmap(jax.grad(of_one), in_axes=(None, 0, 0))
    whole = jax.jit(lambda params, x, y: follow(quantity, per_sample(params, x, y), task.max_norm))
    if private:
        import jax_privacy

        # one sample is one user, without an axis of its own
        whole = jax.jit(
            jax_privacy.clipped_grad(of_one, l2_clip_norm=task.max_norm, batch_argnums=(1, 2), keep_batch_dim=False)
        )
    run = whole.lower(params, inputs, target).compile()

    def read(answer: Any) -> Any:
        if not isinstance(answer, dict):
            return torch.from_numpy(jax.device_get(answer).copy())
        undo = partial(laid_out, last=last, leading=int(quantity == "grads"), back=True)
        return {name: torch.from_numpy(undo(jax.device_get(g)).copy()) for name, g in answer.items()}

    return lambda: jax.block_until_ready(run(params, inputs, target)), read


def laid_out(p: np.ndarray, last: bool, leading: int = 0, back: bool = False) -> np.ndarray:
    """A torch parameter in JAX's layout, or `back`; of these, only a convolution's weight has more than two axes."""
    torchs, jaxs = (leading, leading + 1), (-1, -2)
    return np.moveaxis(p, *((jaxs, torchs) if back else (torchs, jaxs))) if last and p.ndim - leading > 2 else p


def follow(quantity: str, grads: Params, max_norm: float) -> Any:
    """A quantity from per-sample gradients; the compiler drops the others."""
    rows = [g.reshape(len(g), -1) for g in grads.values()]
    norms = jnp.sqrt(sum((g * g).sum(1) for g in rows))
    clipped = {name: jnp.tensordot(jnp.minimum(1, max_norm / norms), g, 1) for name, g in grads.items()}
    return {"grads": grads, "norms": norms, "clipped": clipped, "gram": sum(g @ g.T for g in rows)}[quantity]


def loss(last: bool, model: nn.Module, params: Params, x: Any, y: Any) -> Any:
    """Cross entropy of one sample, averaged over its positions if it has any."""
    logits = jax.nn.log_softmax(apply(last, model, params, x))
    return -jnp.take_along_axis(logits, y[..., None], -1).mean()


PLAIN = {nn.ReLU: jax.nn.relu, nn.Tanh: jnp.tanh, nn.GELU: partial(jax.nn.gelu, approximate=False)}
PLAIN |= dict.fromkeys((nn.Flatten, nn.Identity), lambda x: x)  # pooling has flattened already


def apply(last: bool, module: Any, p: Params, x: Any) -> Any:
    """A module with parameters `p`, by its own names for them, on one sample."""

    def inner(name: str, x: Any) -> Any:
        own = {key.removeprefix(f"{name}."): value for key, value in p.items() if key.startswith(f"{name}.")}
        return apply(last, module.get_submodule(name), own, x)

    match module:
        case nn.Sequential():
            return reduce(lambda x, name: inner(name, x), dict(module.named_children()), x)
        case nn.Linear():
            return x @ p["weight"].T + p["bias"]
        case nn.LayerNorm():
            return normalised(x, (-1,), module.eps) * p["weight"] + p["bias"]
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            return conv(last, module, p, x)
        case nn.GroupNorm() | nn.InstanceNorm2d():
            return group_norm(last, p, x, getattr(module, "num_groups", len(module.weight)), module.eps)
        case nn.AdaptiveAvgPool1d() | nn.AdaptiveAvgPool2d() | nn.AdaptiveAvgPool3d():
            return x.mean(tuple(range(x.ndim - 1) if last else range(1, x.ndim)))
        case nn.LSTM():
            return reduce(partial(recurrent, p), range(module.num_layers), x)
        case LSTM():
            return inner("head", inner("lstm", x)[-1])
        case Residual():
            return jax.nn.relu(inner("body", x) + inner("shortcut", x))
        case Block():
            x = x + inner("proj", attention(module.heads, inner("qkv", inner("norm1", x))))
            return x + inner("mlp", inner("norm2", x))
        case GPT():
            x = p["token.weight"][x] + p["position.weight"][: len(x)]
            return inner("norm", inner("blocks", x)) @ p.get("head.weight", p["token.weight"]).T
    return PLAIN[type(module)](x)


def conv(last: bool, module: Any, p: Params, x: Any) -> Any:
    space = "DHW"[-(x.ndim - 1) :]
    image, kernel = (f"N{space}C", f"{space}IO") if last else (f"NC{space}", f"OI{space}")
    pads = [(k, k) for k in module.padding]
    y = lax.conv_general_dilated(x[None], p["weight"], module.stride, pads, dimension_numbers=(image, kernel, image))[0]
    return y + along(last, p["bias"], y) if "bias" in p else y


def group_norm(last: bool, p: Params, x: Any, groups: int, eps: float) -> Any:
    shape, axes = ((*x.shape[:-1], groups, -1), (*range(x.ndim - 1), x.ndim)) if last else ((groups, -1), (1,))
    rows = normalised(x.reshape(shape), axes, eps).reshape(x.shape)
    return rows * along(last, p["weight"], x) + along(last, p["bias"], x)


def along(last: bool, v: Any, x: Any) -> Any:
    """A vector of channels shaped to broadcast against a sample."""
    return v if last else v.reshape(-1, *[1] * (x.ndim - 1))


def normalised(x: Any, axes: tuple[int, ...], eps: float) -> Any:
    return (x - x.mean(axes, keepdims=True)) * lax.rsqrt(x.var(axes, keepdims=True) + eps)


def attention(heads: int, qkv: Any) -> Any:
    """Causal attention of a sequence (T, 3 H D)."""
    q, k, v = qkv.reshape(len(qkv), 3, heads, -1).transpose(1, 2, 0, 3)  # (H, T, D)
    scores = jnp.einsum("htd,hsd->hts", q, k) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    return jnp.einsum("hts,hsd->thd", weights, v).reshape(len(qkv), -1)


def recurrent(p: Params, x: Any, k: int) -> Any:
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
