"""The table of torch.nn's modules with parameters: how each is made, what it is fed, which rules handle it.

`rules` names, by parameter, what `psgrad.testing.rules_used` reports ("vmap" is plain vmap): a string for every
parameter, or a table, or a function of the parameter's name. The table of modules in docs/supported.md is made from it.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

from .cases import N, draw, loss, of

Rules = str | Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True)
class Entry:
    """A module with some of its options, in training and in eval."""

    id: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]  # the arguments of the call, each with N samples in front
    rules: Rules
    modes: tuple[str, ...] = ("train", "eval")
    call: Callable[..., Any] | None = None  # call(module, *inputs), where it is not just that
    frozen: tuple[str, ...] = ()  # parameters that are not differentiated
    loops: bool = False  # vmap may refuse it, for shapes that depend on values

    def built(self, mode: str) -> tuple[nn.Module, Callable[[Any, Any], Tensor], dict[str, Tensor], tuple[Any, ...]]:
        """The module, and `fn`, `params`, `batch` for it; random parameters, as ones and zeros hide mistakes."""
        torch.manual_seed(0)
        module = self.make().train(mode == "train")
        params = {k: (p + 0.3 * draw(*p.shape)).detach() for k, p in module.named_parameters() if k not in self.frozen}
        fixed = {k: p.detach() for k, p in module.named_parameters() if k in self.frozen}
        run = _Run(module, self.call)

        def fn(params: Any, sample: Any) -> Tensor:
            held = {**params, **fixed, **{k: b.clone() for k, b in module.named_buffers()}}
            found = functional_call(run, {f"module.{k}": t for k, t in held.items()}, tuple(sample))
            return sum(loss(t) for t in optree.tree_leaves(found) if t.is_floating_point())

        return module, fn, params, self.inputs()

    def expected(self) -> dict[str, list[str]]:
        """The rules by the parameter's path."""
        rules = self.rules
        if not isinstance(rules, Mapping):
            names = [k for k, _ in self.make().named_parameters() if k not in self.frozen]
            rules = {k: rules if isinstance(rules, str) else rules(k) for k in names}
        return {k if "params" in k else f"params[{k!r}]": v.split() for k, v in rules.items()}


class _Run(nn.Module):
    """`call` as a module, so that functional_call can put parameters into it."""

    def __init__(self, module: nn.Module, call: Callable[..., Any] | None) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs) if self.call is None else self.call(self.module, *inputs)


def x(*shapes: tuple[int, ...]) -> Callable[[], tuple[Any, ...]]:
    """Inputs of these shapes."""
    return lambda: tuple(draw(N, *shape) for shape in shapes)


def ints(high: int, *shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (torch.randint(high, (N, *shape)),)


def _running(norm: Any) -> Any:
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm


def _lazy(module: nn.Module, *shape: int) -> nn.Module:
    """A lazy module, made."""
    module(draw(*shape))
    return module


# ---- layers with a rule of their own -----------------------------------------------------------------------


def _convs() -> list[Entry]:
    found = []
    for d in (1, 2, 3):
        conv, back = getattr(nn, f"Conv{d}d"), getattr(nn, f"ConvTranspose{d}d")
        size = (6, 5, 4)[:d]
        options: dict[str, tuple[Any, dict[str, Any]]] = {
            "": ((2, 4, *size), {}),
            "-unbatched": ((4, *size), {"bias": False}),
            "-strided": ((2, 4, *size), {"stride": 2, "padding": 1}),
            "-dilated-groups": ((1, 4, *size), {"dilation": 2, "padding": 2, "groups": 2}),
            "-depthwise": ((2, 4, *size), {"groups": 4, "padding": 1}),
        }
        same = {
            "-same": ((2, 4, *size), {"padding": "same"}),
            **{
                f"-{m}": ((2, 4, *size), {"padding": 1, "padding_mode": m})
                for m in ("reflect", "replicate", "circular")
            },
        }
        transposed = {
            "-output-padding": ((2, 4, *size), {"stride": 2, "padding": 1, "output_padding": 1}),
            "-beyond-reach": ((2, 4, *size), {"dilation": 3, "output_padding": 2}),
        }
        for suffix, (shape, kwargs) in (options | same).items():
            make = lambda conv=conv, kwargs=kwargs: conv(4, 8, 3, **kwargs)
            found.append(Entry(f"Conv{d}d{suffix}", make, x(shape), f"conv{d}d"))
        for suffix, (shape, kwargs) in (options | transposed).items():
            make = lambda back=back, kwargs=kwargs: back(4, 8, 3, **kwargs)
            found.append(Entry(f"ConvTranspose{d}d{suffix}", make, x(shape), f"conv_transpose{d}d"))
    return found


def _channel_norms() -> list[Entry]:
    found = []
    for d in (1, 2, 3):
        batch, instance = getattr(nn, f"BatchNorm{d}d"), getattr(nn, f"InstanceNorm{d}d")
        shape = (2, 3, *(4, 3, 2)[:d])
        for suffix, options in {
            "": {},
            "-untracked": {"track_running_stats": False},
            "-cumulative": {"momentum": None},
        }.items():
            make = lambda batch=batch, options=options: (
                batch(3, **options) if "track_running_stats" in options else _running(batch(3, **options))
            )
            found.append(Entry(f"BatchNorm{d}d{suffix}", make, x(shape), "batch_norm"))
        make = lambda instance=instance: instance(3, affine=True)
        found.append(Entry(f"InstanceNorm{d}d", make, x(shape), "instance_norm"))
        found.append(Entry(f"InstanceNorm{d}d-unbatched", make, x(shape[1:]), "instance_norm"))
        make = lambda instance=instance: _running(instance(3, affine=True, track_running_stats=True))
        found.append(Entry(f"InstanceNorm{d}d-tracking", make, x(shape), "instance_norm"))
    return found


def _bag_weights(module: Any, index: Tensor, weights: Tensor) -> Tensor:
    return module(index, per_sample_weights=weights)


def _bags(module: Any, index: Tensor) -> Tensor:
    return module(index, torch.tensor([0, 2, 2, 5, *([7] if module.include_last_offset else [])]))


LAYERS = (
    Entry("Linear", lambda: nn.Linear(3, 4), x((2, 3)), "linear"),
    Entry("Linear-no-bias", lambda: nn.Linear(3, 4, bias=False), x((3,)), "linear"),
    Entry("Bilinear", lambda: nn.Bilinear(3, 2, 4), x((5, 3), (5, 2)), "bilinear"),
    Entry("Bilinear-no-bias", lambda: nn.Bilinear(3, 2, 4, bias=False), x((3,), (2,)), "bilinear"),
    *_convs(),
    Entry("Embedding", lambda: nn.Embedding(5, 3), ints(5, 4), "embedding"),
    Entry("Embedding-padding", lambda: nn.Embedding(5, 3, padding_idx=1), ints(5, 4), "embedding"),
    Entry("Embedding-frequency", lambda: nn.Embedding(5, 3, scale_grad_by_freq=True), ints(3, 4), "embedding"),
    *(
        Entry(f"EmbeddingBag-{mode}{suffix}", make, ints(5, *shape), "embedding_bag", call=call)
        for mode in ("sum", "mean", "max")
        for suffix, make, shape, call in (
            ("", lambda mode=mode: nn.EmbeddingBag(5, 3, mode=mode), (2, 4), None),
            ("-padding", lambda mode=mode: nn.EmbeddingBag(5, 3, mode=mode, padding_idx=1), (2, 4), None),
            ("-offsets", lambda mode=mode: nn.EmbeddingBag(5, 3, mode=mode), (7,), _bags),
            ("-last-offset", lambda mode=mode: nn.EmbeddingBag(5, 3, mode=mode, include_last_offset=True), (7,), _bags),
        )
    ),
    Entry(
        "EmbeddingBag-weights",
        lambda: nn.EmbeddingBag(5, 3, mode="sum"),
        lambda: (*ints(5, 2, 4)(), draw(N, 2, 4)),
        "embedding_bag",
        call=_bag_weights,
    ),
    Entry("LayerNorm", lambda: nn.LayerNorm(5), x((2, 5)), "layer_norm"),
    Entry("LayerNorm-no-bias", lambda: nn.LayerNorm((3, 5), bias=False), x((2, 3, 5)), "layer_norm"),
    Entry("GroupNorm", lambda: nn.GroupNorm(2, 4), x((2, 4, 3)), "group_norm"),
    Entry("RMSNorm", lambda: nn.RMSNorm(5), x((2, 5)), "rms_norm"),
    Entry("RMSNorm-axes", lambda: nn.RMSNorm((3, 5), eps=0.1), x((2, 3, 5)), "rms_norm"),
    *_channel_norms(),
    Entry("SyncBatchNorm", lambda: _running(nn.SyncBatchNorm(3)), x((2, 3, 4)), "batch_norm"),
    Entry("PReLU", lambda: nn.PReLU(), x((2, 3)), "prelu"),
    Entry("PReLU-channels", lambda: nn.PReLU(3), x((2, 3, 4)), "prelu"),
)

# ---- lazy modules, once made -------------------------------------------------------------------------------

LAZY = (
    Entry("LazyLinear", lambda: _lazy(nn.LazyLinear(4), 2, 3), x((2, 3)), "linear"),
    *(
        Entry(f"Lazy{name}{d}d", make, x((2, 3, *[4] * d)), rule.format(d))
        for d in (1, 2, 3)
        for name, make, rule in (
            ("Conv", lambda d=d: _lazy(getattr(nn, f"LazyConv{d}d")(4, 3), 2, 3, *[4] * d), "conv{}d"),
            (
                "ConvTranspose",
                lambda d=d: _lazy(getattr(nn, f"LazyConvTranspose{d}d")(4, 3), 2, 3, *[4] * d),
                "conv_transpose{}d",
            ),
            ("BatchNorm", lambda d=d: _lazy(getattr(nn, f"LazyBatchNorm{d}d")(), 2, 3, *[4] * d), "batch_norm"),
            (
                "InstanceNorm",
                lambda d=d: _lazy(getattr(nn, f"LazyInstanceNorm{d}d")(affine=True), 2, 3, *[4] * d),
                "instance_norm",
            ),
        )
    ),
)

# ---- recurrent layers: a table of them here, their options in test_recurrent.py -----------------------------

RECURRENT = (
    Entry("RNN", lambda: nn.RNN(3, 4), x((5, 2, 3)), "rnn_tanh"),
    Entry("RNN-relu", lambda: nn.RNN(3, 4, nonlinearity="relu", bias=False), x((5, 3)), "rnn_relu"),
    Entry("LSTM", lambda: nn.LSTM(3, 4, 2, bidirectional=True), x((5, 2, 3)), "lstm"),
    Entry("LSTM-projected", lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True), x((2, 5, 3)), "lstm"),
    Entry("GRU", lambda: nn.GRU(3, 4, 2), x((5, 2, 3)), "gru"),
    Entry("RNNCell", lambda: nn.RNNCell(3, 4), x((2, 3), (2, 4)), "rnn_tanh"),
    Entry("LSTMCell", lambda: nn.LSTMCell(3, 4), x((2, 3)), "lstm"),
    Entry("GRUCell", lambda: nn.GRUCell(3, 4), x((2, 3), (2, 4)), "gru"),
)

# ---- attention and transformers ----------------------------------------------------------------------------

_MASK = torch.ones(5, 5, dtype=torch.bool).triu(1)
_ADDED = torch.zeros(5, 5, dtype=torch.float64).masked_fill(_MASK, -torch.inf)
_ENDS = torch.tensor([[False] * 4 + [True], [False] * 5])
_ONE, _TWO, _THREE = x((2, 5, 4)), x((2, 5, 4), (2, 3, 4)), x((2, 5, 4), (2, 3, 4), (2, 3, 4))


def _padded(*shapes: tuple[int, ...]) -> Callable[[], tuple[Any, ...]]:
    """Inputs, and for each of a sample's 2 sequences of length 5 which positions are padding, the first never."""

    def make() -> tuple[Any, ...]:
        return *(draw(N, *shape) for shape in shapes), torch.arange(5) >= torch.randint(1, 6, (N, 2, 1))

    return make


def _attending(packed: int = 1, crossed: int = 2) -> Callable[[str], str]:
    """The rules by a parameter's name: self attention projects `packed` times, cross attention `crossed` times."""

    def rules(name: str) -> str:
        if "norm" in name:
            return "layer_norm"
        if "in_proj" in name:
            return "linear " * (crossed if "multihead_attn" in name else packed)
        return "linear"

    return rules


_ATTENDING = _attending()


def _with(**options: Any) -> Callable[..., Any]:
    return lambda module, *inputs: module(*inputs, **options)


def _self(**options: Any) -> Callable[..., Any]:
    return lambda module, x: module(x, x, x, **options)


def _self_padded(**options: Any) -> Callable[..., Any]:
    return lambda module, x, padding: module(x, x, x, key_padding_mask=padding, **options)


def _mha(id: str, call: Any, inputs: Any = _ONE, rules: Rules = _ATTENDING, **options: Any) -> Entry:
    options = {"batch_first": True} | options
    return Entry(f"MultiheadAttention{id}", lambda: nn.MultiheadAttention(4, 2, **options), inputs, rules, call=call)


_NO_WEIGHTS = {"need_weights": False}
_BIAS_KV = {f"in_proj_{name}": "linear" for name in ("weight", "bias")} | {
    "out_proj.weight": "linear",
    "out_proj.bias": "linear",
    of("Tensor.repeat", "bias_k"): "vmap",
    of("Tensor.repeat", "bias_v"): "vmap",
}
_SEPARATE = {f"{k}_proj_weight": "linear" for k in "qkv"} | {
    "in_proj_bias": "linear linear linear",
    "out_proj.weight": "linear",
    "out_proj.bias": "linear",
}
ATTENTION = (
    _mha("", _self()),
    _mha("-length-first", _self(), batch_first=False),
    _mha("-unbatched", _self(), x((5, 4)), _attending(3)),
    _mha("-no-weights", _self(**_NO_WEIGHTS)),
    _mha("-weights-by-head", _self(average_attn_weights=False)),
    _mha("-no-bias", _self(), bias=False),
    _mha("-bias-kv", _self(), rules=_BIAS_KV, add_bias_kv=True),
    _mha("-bias-kv-no-weights", _self(**_NO_WEIGHTS), rules=_BIAS_KV, add_bias_kv=True),
    _mha("-zero-attention", _self(), add_zero_attn=True),
    _mha("-zero-attention-no-weights", _self(**_NO_WEIGHTS), add_zero_attn=True),
    _mha("-cross", None, _THREE, _attending(3)),
    _mha("-cross-one-memory", lambda module, q, k: module(q, k, k), _TWO, _attending(2)),
    _mha("-widths", None, x((2, 5, 4), (2, 3, 6), (2, 3, 5)), _SEPARATE, kdim=6, vdim=5),
    _mha("-mask", _self(attn_mask=_MASK)),
    _mha("-added-mask", _self(attn_mask=_ADDED, **_NO_WEIGHTS)),
    _mha("-mask-by-head", _self(attn_mask=torch.stack([_MASK, _MASK.mT & ~_MASK, _MASK, _MASK]))),
    _mha("-causal", _self(attn_mask=_MASK, is_causal=True, **_NO_WEIGHTS)),
    _mha("-padding", _self_padded(), _padded((2, 5, 4))),
    _mha("-padding-no-weights", _self_padded(**_NO_WEIGHTS), _padded((2, 5, 4))),
    _mha("-padding-and-mask", _self_padded(attn_mask=_MASK), _padded((2, 5, 4))),
    _mha("-padding-of-all-samples", _self(key_padding_mask=_ENDS)),
)


def _encoder(id: str, inputs: Any = _ONE, call: Any = None, rules: Rules = _ATTENDING, **options: Any) -> Entry:
    """A layer of a transformer's encoder, without dropout."""
    options = {"batch_first": True} | options
    make = lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, **options)
    return Entry(f"TransformerEncoderLayer{id}", make, inputs, rules, call=call)


def _decoder(id: str, inputs: Any = _TWO, call: Any = None, rules: Rules = _ATTENDING, **options: Any) -> Entry:
    options = {"batch_first": True} | options
    make = lambda: nn.TransformerDecoderLayer(4, 2, 8, 0.0, **options)
    return Entry(f"TransformerDecoderLayer{id}", make, inputs, rules, call=call)


def _stack(id: str, inputs: Any, call: Any = None, norm: bool = False, nested: bool = True, **options: Any) -> Entry:
    """Two layers."""
    options = {"batch_first": True} | options

    def make() -> nn.Module:
        last = nn.LayerNorm(4) if norm else None
        if id.startswith("TransformerDecoder"):
            return nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8, 0.0, **options), 2, last)
        layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, **options)
        return nn.TransformerEncoder(layer, 2, last, enable_nested_tensor=nested)

    return Entry(id, make, inputs, _ATTENDING, call=call)


def _quietly(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """`make`, about whose options torch warns."""

    def quiet() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()

    return quiet


def _whole(id: str, inputs: Any, call: Any = None, **options: Any) -> Entry:
    options = {"batch_first": True} | options
    make = _quietly(lambda: nn.Transformer(4, 2, 1, 1, 8, 0.0, **options))
    return Entry(f"Transformer{id}", make, inputs, _ATTENDING, call=call)


TRANSFORMERS = (
    _encoder(""),
    _encoder("-length-first", batch_first=False),
    _encoder("-unbatched", x((5, 4)), rules=_attending(3)),
    _encoder("-norm-first", norm_first=True),
    _encoder("-gelu", activation="gelu"),
    _encoder("-tanh", activation=torch.tanh),
    _encoder("-no-bias", bias=False),
    _encoder("-mask", call=_with(src_mask=_MASK)),
    _encoder("-causal", call=_with(src_mask=_ADDED, is_causal=True)),
    _encoder("-padding", _padded((2, 5, 4)), lambda layer, x, padding: layer(x, src_key_padding_mask=padding)),
    _stack("TransformerEncoder", _ONE),
    _stack("TransformerEncoder-norm", _ONE, norm=True),
    _stack("TransformerEncoder-length-first", _ONE, nested=False, batch_first=False),
    _stack("TransformerEncoder-norm-first", _ONE, nested=False, norm_first=True),
    _stack("TransformerEncoder-mask", _ONE, _with(mask=_MASK)),
    _stack("TransformerEncoder-causal", _ONE, _with(mask=_ADDED, is_causal=True)),
    *(
        _stack(
            f"TransformerEncoder-padding{'-nested' if nested else ''}",
            _padded((2, 5, 4)),
            lambda encoder, x, padding: encoder(x, src_key_padding_mask=padding),
            nested=nested,
        )
        for nested in (False, True)
    ),
    _decoder(""),
    _decoder("-length-first", x((5, 2, 4), (3, 2, 4)), batch_first=False),
    _decoder("-unbatched", x((5, 4), (3, 4)), rules=_attending(3, 3)),
    _decoder("-norm-first", norm_first=True),
    _decoder("-gelu-no-bias", activation="gelu", bias=False),
    _decoder("-causal", call=_with(tgt_mask=_ADDED, tgt_is_causal=True)),
    _decoder(
        "-padding",
        _padded((2, 5, 4), (2, 5, 4)),
        lambda layer, x, memory, padding: layer(
            x, memory, tgt_mask=_MASK, tgt_key_padding_mask=padding, memory_key_padding_mask=padding
        ),
    ),
    _stack("TransformerDecoder", _TWO),
    _stack("TransformerDecoder-norm-mask", _TWO, _with(tgt_mask=_MASK), norm=True),
    _whole("", x((2, 3, 4), (2, 5, 4))),
    _whole("-length-first", x((3, 2, 4), (5, 2, 4)), batch_first=False),
    _whole("-norm-first", x((2, 3, 4), (2, 5, 4)), norm_first=True, activation="gelu"),
    _whole("-causal", x((2, 3, 4), (2, 5, 4)), _with(tgt_mask=_ADDED, tgt_is_causal=True)),
    _whole(
        "-padding",
        _padded((2, 5, 4), (2, 5, 4)),
        lambda module, source, target, padding: module(
            source, target, tgt_mask=_MASK, src_key_padding_mask=padding, memory_key_padding_mask=padding
        ),
    ),
)

# ---- losses with parameters --------------------------------------------------------------------------------


def _classes(classes: int, width: int, *shape: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (draw(N, *shape, width), torch.randint(classes, (N, *shape)))


def _adaptive(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.AdaptiveLogSoftmaxWithLoss(8, 10, [2, 6], div_value=2.0, **options)


LOSSES = (
    Entry("AdaptiveLogSoftmaxWithLoss", _adaptive(), _classes(10, 8, 6), "linear", loops=True),
    Entry("AdaptiveLogSoftmaxWithLoss-bias", _adaptive(head_bias=True), _classes(10, 8, 6), "linear", loops=True),
    Entry("AdaptiveLogSoftmaxWithLoss-unbatched", _adaptive(), _classes(10, 8), "linear", loops=True),
    Entry("AdaptiveLogSoftmaxWithLoss-log-prob", _adaptive(), x((6, 8)), "linear", call=lambda m, x: m.log_prob(x)),
    Entry("LinearCrossEntropyLoss", lambda: nn.LinearCrossEntropyLoss(4, 6, bias=True), _classes(6, 4, 5), "linear"),
    Entry("LinearCrossEntropyLoss-no-bias", lambda: nn.LinearCrossEntropyLoss(4, 6), _classes(6, 4, 5), "linear"),
    Entry(
        "LinearCrossEntropyLoss-smoothed",
        lambda: nn.LinearCrossEntropyLoss(4, 6, reduction="sum", label_smoothing=0.2, ignore_index=1),
        _classes(6, 4, 5),
        "linear",
    ),
)

# ---- parametrised and adapted modules ----------------------------------------------------------------------


def _parametrised(id: str, make: Callable[[], nn.Module], weight: str, rule: str = "linear", **options: Any) -> Entry:
    """A layer whose weight is a function of parameters, which goes by the name `weight`."""
    shape = {"linear": (2, 3), "conv1d": (2, 3, 5), "conv2d": (2, 3, 4, 4), "conv_transpose2d": (2, 3, 4, 4)}[rule]
    return Entry(id, make, x(shape), {weight: rule, "bias": rule}, **options)


class _Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT


def _symmetric() -> nn.Module:
    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", _Symmetric())
    return layer


class Adapted(nn.Module):
    """A frozen layer and a low-rank change of it, in LoRA's manner: at work beside it, or merged into its weight."""

    def __init__(self, merged: bool = False) -> None:
        super().__init__()
        self.base, self.merged = nn.Linear(6, 5), merged
        self.down, self.up = nn.Parameter(draw(2, 6)), nn.Parameter(draw(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.base.weight + self.up @ self.down, self.base.bias)
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


_ORIGINAL = "parametrizations.weight.original"
_NORMED = of("torch._weight_norm", f"{_ORIGINAL}1", f"{_ORIGINAL}0")
_SPECTRAL = of("Tensor.div", _ORIGINAL, of("torch.vdot", of("torch.mv", _ORIGINAL)))
_SKEW = of("Tensor.sub", of("Tensor.tril", _ORIGINAL))
_LOWER = of("Tensor.tril", _ORIGINAL)
_SCALES = of("Tensor.__rdiv__", of("Tensor.add", of("Tensor.sum", of("Tensor.mul", _LOWER))))
_REFLECTED = of("Tensor.matmul", of("Tensor.mul", of("linalg_householder_product", _LOWER, _SCALES)))
_OLD_SPECTRAL = of("Tensor.div", "weight_orig", of("torch.dot", of("torch.mv", "weight_orig")))
_BASE = ("base.weight", "base.bias")


def _orthogonal(how: str | None, outputs: int = 3) -> Callable[[], nn.Module]:
    return lambda: parametrizations.orthogonal(nn.Linear(3, outputs), orthogonal_map=how)


PARAMETRISED = (
    _parametrised("weight_norm", lambda: parametrizations.weight_norm(nn.Linear(3, 4)), _NORMED),
    _parametrised("weight_norm-conv", lambda: parametrizations.weight_norm(nn.Conv1d(3, 4, 2)), _NORMED, "conv1d"),
    _parametrised(
        "weight_norm-whole", lambda: parametrizations.weight_norm(nn.Conv2d(3, 4, 2), dim=None), _NORMED, "conv2d"
    ),
    _parametrised(
        "weight_norm-old",
        _quietly(lambda: nn.utils.weight_norm(nn.Linear(3, 4))),
        of("torch._weight_norm", "weight_v", "weight_g"),
    ),
    _parametrised("spectral_norm", lambda: parametrizations.spectral_norm(nn.Linear(3, 4)), _SPECTRAL, modes=("eval",)),
    _parametrised(
        "spectral_norm-conv",
        lambda: parametrizations.spectral_norm(nn.ConvTranspose2d(3, 4, 2)),
        of("Tensor.div", _ORIGINAL, of("torch.vdot", of("torch.mv", of("Tensor.flatten", _ORIGINAL)))),
        "conv_transpose2d",
        modes=("eval",),
    ),
    _parametrised(
        "spectral_norm-old", _quietly(lambda: nn.utils.spectral_norm(nn.Linear(3, 4))), _OLD_SPECTRAL, modes=("eval",)
    ),
    _parametrised("orthogonal", _orthogonal("matrix_exp"), of("Tensor.matmul", of("torch.matrix_exp", _SKEW))),
    _parametrised(
        "orthogonal-cayley", _orthogonal("cayley"), of("Tensor.matmul", of("linalg_solve", of("torch.add", _SKEW)))
    ),
    _parametrised("orthogonal-householder", _orthogonal("householder"), _REFLECTED),
    _parametrised("orthogonal-rectangular", _orthogonal(None, 4), _REFLECTED),
    _parametrised("parametrisation", _symmetric, of("Tensor.add", of("Tensor.triu", _ORIGINAL))),
    Entry("lora", Adapted, x((3, 6)), "linear", frozen=_BASE),
    Entry(
        "lora-merged",
        lambda: Adapted(merged=True),
        x((3, 6)),
        {of("Tensor.add", of("Tensor.matmul", "up", "down")): "linear"},
        frozen=_BASE,
    ),
)

LACKING = {name for name in ("LinearCrossEntropyLoss",) if not hasattr(nn, name)}  # modules newer than this torch
_ALL = (*LAYERS, *LAZY, *RECURRENT, *ATTENTION, *TRANSFORMERS, *LOSSES, *PARAMETRISED)
MODULES = tuple(entry for entry in _ALL if entry.id.partition("-")[0] not in LACKING)
assert len({entry.id for entry in MODULES}) == len(MODULES), "two entries share an id"

# ---- what the table says beside the rules -------------------------------------------------------------------

NOTES = {
    "Conv1d": 'groups, depthwise, dilation, `padding="same"`, every `padding_mode`',
    "ConvTranspose1d": "groups, dilation, `output_padding`",
    "Bilinear": "a linear map of the inputs' outer products",
    "Embedding": "`padding_idx`, `scale_grad_by_freq`; `max_norm` is refused",
    "EmbeddingBag": "sum, mean, max, offsets, `per_sample_weights`, `padding_idx`; `scale_grad_by_freq` by vmap; "
    "`max_norm` is refused",
    "BatchNorm1d": "in training by the sample's own statistics, of more than one value per channel; running ones stay "
    "as they are",
    "SyncBatchNorm": "as `BatchNorm`, in one process",
    "InstanceNorm1d": "with running statistics, too",
    "RNN": "every option, given states, packed sequences",
    "LSTM": "likewise, with `proj_size`",
    "GRU": "likewise",
    "MultiheadAttention": "every option; vmap for `add_bias_kv` alone",
    "TransformerEncoderLayer": "in eval by the same rules, not by the fused kernel",
    "TransformerEncoder": "nested tensors are not used",
    "AdaptiveLogSoftmaxWithLoss": "samples whose targets fall in other clusters run apart",
    "weight_norm": "of any layer, old and new; the weight is computed once, its gradients are pulled back at the end",
    "spectral_norm": "in eval, old and new; likewise",
    "orthogonal": "every `orthogonal_map`; likewise",
    "parametrisation": "any parametrisation made of ops on parameters alone; likewise",
    "lora": "low-rank matrices beside a frozen layer, or merged into its weight",  # no module of torch's
}
