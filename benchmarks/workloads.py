"""The workloads: one function each, from a number of samples to a model, a loss and a batch; a table below."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psgrad

from .machine import keep_memory

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """A model, a loss that averages over its batch, and a batch with the samples along axis 0."""

    model: nn.Module
    loss: Loss
    inputs: Tensor
    target: Tensor

    @property
    def params(self) -> dict[str, Tensor]:
        """The parameters by name, a tied one once."""
        return dict(self.model.named_parameters())

    @property
    def size(self) -> int:
        """Bytes of all per-sample gradients."""
        return len(self.inputs) * sum(p.numel() * p.element_size() for p in self.params.values())

    @cached_property
    def max_norm(self) -> float:
        """A bound that clips about half of the samples: the median norm of a few gradients."""
        few = (self.inputs[:8], self.target[:8])
        grads = psgrad.testing.loop_grads(*psgrad.from_module(self.model, self.loss), few)
        return float(sum(g.flatten(1).square().sum(1) for g in grads.values()).median().sqrt())

    def losses(self, output: Tensor) -> Tensor:
        """The loss of each sample; their mean is `loss`."""
        each = F.cross_entropy(output.flatten(0, -2), self.target.flatten(), reduction="none")
        return each.view(len(output), -1).mean(1)


def classify(model: nn.Module, n: int, *shape: int, classes: int = 10) -> Task:
    """Random inputs of a shape, random labels."""
    return Task(model, F.cross_entropy, torch.randn(n, *shape), torch.randint(classes, (n,)))


def mlp_tiny(n: int) -> Task:
    return classify(nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 2)), n, 20, classes=2)


def mlp(n: int, width: int = 1024) -> Task:
    model = nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    return classify(model, n, 784)


class Residual(nn.Module):
    """A basic block: two 3x3 convolutions with group norms, and a 1x1 shortcut where the shape changes."""

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(cin, cout, 3, stride, padding=1, bias=False),
            nn.GroupNorm(8, cout),
            nn.ReLU(),
            nn.Conv2d(cout, cout, 3, padding=1, bias=False),
            nn.GroupNorm(8, cout),
        )
        same = cin == cout and stride == 1
        down = lambda: nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.GroupNorm(8, cout))
        self.shortcut = nn.Identity() if same else down()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet(n: int, widths: tuple[int, int, int] = (16, 32, 64)) -> Task:
    a, b, c = widths
    stem = [nn.Conv2d(3, a, 3, padding=1, bias=False), nn.GroupNorm(8, a), nn.ReLU()]
    sizes = [(a, a, 1), (a, a, 1), (a, b, 2), (b, b, 1), (b, c, 2), (c, c, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 10)]
    return classify(nn.Sequential(*stem, *(Residual(*size) for size in sizes), *head), n, 3, 32, 32)


def instance(n: int) -> Task:
    norm = partial(nn.InstanceNorm2d, affine=True)
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), norm(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), norm(64), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1), norm(64), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )
    return classify(model, n, 3, 32, 32)


def conv1d(n: int) -> Task:
    model = nn.Sequential(
        *(nn.Conv1d(1, 32, 9, stride=2), nn.GroupNorm(8, 32), nn.ReLU()),
        *(nn.Conv1d(32, 64, 9, stride=2), nn.GroupNorm(8, 64), nn.ReLU()),
        *(nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 10)),
    )
    return classify(model, n, 1, 4000)


def conv3d(n: int) -> Task:
    model = nn.Sequential(
        *(nn.Conv3d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU()),
        *(nn.Conv3d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, 10)),
    )
    return classify(model, n, 1, 24, 24, 24)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with group norms, and a 1x1 shortcut where the shape changes."""

    def __init__(self, cin: int, width: int, stride: int) -> None:
        super().__init__()
        cout = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(cin, width, 1, bias=False), nn.GroupNorm(32, width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, stride, padding=1, bias=False), nn.GroupNorm(32, width), nn.ReLU()),
            *(nn.Conv2d(width, cout, 1, bias=False), nn.GroupNorm(32, cout)),
        )
        down = lambda: nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.GroupNorm(32, cout))
        self.shortcut = nn.Identity() if cin == cout and stride == 1 else down()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def resnet50(n: int, size: int = 160) -> Task:
    """25.6 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, padding=1))
    cin = 64
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(depth):
            layers.append(Bottleneck(cin, width, stride if i == 0 else 1))
            cin = 4 * width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, 1000)]
    return classify(nn.Sequential(*layers, *head), n, 3, size, size, classes=1000)


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small language model with learned positions."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int, tied: bool) -> None:
        super().__init__()
        self.per_sample_positions = False  # what peers need that take the first axis of an index for the samples
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        x = self.token(tokens) + self.position(
            places.expand_as(tokens).clone() if self.per_sample_positions else places
        )
        return self.head(self.norm(self.blocks(x)))


def gpt(
    n: int, tied: bool = False, length: int = 128, vocabulary: int = 1000, size: Sequence[int] = (256, 4, 4)
) -> Task:
    """`size`: width, heads, depth."""
    tokens = torch.randint(vocabulary, (n, length + 1))
    loss: Loss = lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten())
    model = GPT(vocabulary, length, *size, tied)
    return Task(model, loss, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class LSTM(nn.Module):
    """Two recurrent layers, and a linear one on the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, num_layers=2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def lstm(n: int) -> Task:
    return classify(LSTM(), n, 64, 64)


# name: (samples, task); a new workload is a function above and a line here.
WORKLOADS: dict[str, tuple[int, Callable[..., Task]]] = {
    "mlp-tiny": (64, mlp_tiny),
    "mlp": (256, mlp),
    "resnet": (64, resnet),
    "resnet-wide": (16, partial(resnet, widths=(64, 128, 256))),
    "instance": (32, instance),
    "conv1d": (32, conv1d),
    "conv3d": (8, conv3d),
    "gpt": (8, gpt),
    "gpt-tied": (8, partial(gpt, tied=True)),
    "lstm": (32, lstm),
}


# models of the size that people train, by `python -m benchmarks.large`
LARGE: dict[str, tuple[int, Callable[..., Task]]] = {
    "resnet50": (4, resnet50),
    "gpt2-small": (2, partial(gpt, tied=True, length=256, vocabulary=50257, size=(768, 12, 12))),
}
QUICK = ("mlp-tiny", "conv1d", "gpt")


class Point(NamedTuple):
    """A workload at a size; None: its own."""

    workload: str
    n: int | None = None
    length: int | None = None
    width: int | None = None

    @property
    def label(self) -> str:
        sizes = {"N": self.n, "T": self.length, "W": self.width}
        return " ".join([self.workload, *(f"{letter}={size}" for letter, size in sizes.items() if size is not None)])

    def make(self, n: int | None = None) -> Task:
        """The task, the same every time."""
        torch.manual_seed(0)
        samples, task = (WORKLOADS | LARGE)[self.workload]
        sizes = {"length": self.length, "width": self.width}
        return task(n or self.n or samples, **{name: size for name, size in sizes.items() if size is not None})


# How cost grows: with samples, and for what is never written out with width, for norms with the length of sequences.
SWEEP = [Point(workload, n) for workload in ("mlp", "resnet") for n in (1, 8, 64, 512)]
SWEEP_WIDTH = [Point("mlp", width=width) for width in (256, 512, 1024, 2048, 4096)]
SWEEP_NORMS = [Point("gpt", length=length) for length in (32, 64, 128, 256, 512, 1024)]


def setup(threads: int = 2) -> dict[str, Any]:
    """The settings that every measurement shares, and what to say about them."""
    torch.set_num_threads(threads)
    keep_memory()
    return {"torch": torch.__version__, "dtype": "float32", "threads": threads, "cores": os.cpu_count()}
