"""The models, one function each, from a number of samples to a task; and the table of workloads."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .tasks import Task


def classify(model: nn.Module, n: int, *shape: int, classes: int = 10) -> Task:
    """Random inputs of a shape, random labels."""
    return Task(model, F.cross_entropy, torch.randn(n, *shape), torch.randint(classes, (n,)))


def mlp(sizes: Sequence[int], n: int, activation: type[nn.Module] = nn.ReLU) -> Task:
    layers = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), activation())]
    return classify(nn.Sequential(*layers[:-1]), n, sizes[0], classes=sizes[-1])


def pooled(layers: Sequence[nn.Module], width: int, n: int, *shape: int, classes: int = 10) -> Task:
    """Layers that end with some channels, their mean over all places, and a linear layer."""
    pool = getattr(nn, f"AdaptiveAvgPool{len(shape) - 1}d")(1)
    return classify(nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(width, classes)), n, *shape, classes=classes)


def conv_net(groups: int, shape: Sequence[int], sizes: Sequence[Sequence[int]], n: int) -> Task:
    """Convolutions (in, out, kernel, stride, padding), each with a relu and a norm of groups; 0: of instances."""
    conv = getattr(nn, f"Conv{len(shape) - 1}d")
    norm = partial(nn.GroupNorm, groups) if groups else partial(nn.InstanceNorm2d, affine=True)
    layers = [layer for size in sizes for layer in (conv(*size), norm(size[1]), nn.ReLU())]
    return pooled(layers, sizes[-1][1], n, *shape)


class Residual(nn.Module):
    """Convolutions (out, kernel, stride) with group norms, and a shortcut, which is 1x1 where the shape changes."""

    def __init__(self, cin: int, convs: Sequence[tuple[int, int, int]], groups: int = 8) -> None:
        super().__init__()
        widths, stride = [cin, *(out for out, *_ in convs)], max(stride for *_, stride in convs)
        body = [
            layer for i, conv in zip(widths, convs, strict=False) for layer in (*normed(i, *conv, groups), nn.ReLU())
        ]
        self.body = nn.Sequential(*body[:-1])
        same = cin == widths[-1] and stride == 1
        self.shortcut = nn.Identity() if same else nn.Sequential(*normed(cin, widths[-1], 1, stride, groups))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def normed(cin: int, cout: int, kernel: int, stride: int = 1, groups: int = 8) -> list[nn.Module]:
    """A padded convolution without a bias, and a group norm."""
    return [nn.Conv2d(cin, cout, kernel, stride, kernel // 2, bias=False), nn.GroupNorm(groups, cout)]


def resnet(n: int, widths: tuple[int, int, int] = (16, 32, 64)) -> Task:
    a, b, c = widths
    sizes = [(a, a, 1), (a, a, 1), (a, b, 2), (b, b, 1), (b, c, 2), (c, c, 1)]
    blocks = [Residual(i, [(o, 3, stride), (o, 3, 1)]) for i, o, stride in sizes]
    return pooled([*normed(3, a, 3), nn.ReLU(), *blocks], c, n, 3, 32, 32)


def resnet50(n: int) -> Task:
    """25.6 million parameters."""
    layers, cin = [*normed(3, 64, 7, 2, 32), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)], 64
    for width, depth, first in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for stride in (first, *[1] * (depth - 1)):
            layers.append(Residual(cin, [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)], 32))
            cin = 4 * width
    return pooled(layers, cin, n, 3, 160, 160, classes=1000)


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

    def __init__(self, vocabulary: int, length: int, tied: bool, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.per_sample_positions = False  # what peers need that take the first axis of an index for the samples
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        if self.per_sample_positions:
            places = places.expand_as(tokens).clone()
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(places))))


def gpt(n: int, tied: bool = False, length: int = 128, words: int = 1000, size: Sequence[int] = (256, 4, 4)) -> Task:
    """`size`: width, heads, depth."""
    tokens = torch.randint(words, (n, length + 1))
    loss = lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten())
    return Task(GPT(words, length, tied, *size), loss, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


class LSTM(nn.Module):
    """Two recurrent layers, and a linear one on the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, num_layers=2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


# name: (samples, task); a new workload is a function above and a line here.
WORKLOADS: dict[str, tuple[int, Callable[..., Task]]] = {
    "mlp-tiny": (64, partial(mlp, (20, 64, 2), activation=nn.Tanh)),
    "mlp": (256, lambda n, width=1024: mlp((784, width, width, 10), n)),
    "resnet": (64, resnet),
    "resnet-wide": (16, partial(resnet, widths=(64, 128, 256))),
    "instance": (32, partial(conv_net, 0, (3, 32, 32), [(3, 32, 3, 1, 1), (32, 64, 3, 2, 1), (64, 64, 3, 1, 1)])),
    "conv1d": (32, partial(conv_net, 8, (1, 4000), [(1, 32, 9, 2), (32, 64, 9, 2)])),
    "conv3d": (8, partial(conv_net, 4, (1, 24, 24, 24), [(1, 8, 3, 1, 1), (8, 16, 3, 2, 1)])),
    "gpt": (8, gpt),
    "gpt-tied": (8, partial(gpt, tied=True)),
    "lstm": (32, lambda n: classify(LSTM(), n, 64, 64)),
}
LARGE: dict[str, tuple[int, Callable[..., Task]]] = {  # of the size that people train
    "resnet50": (4, resnet50),
    "gpt2-small": (2, partial(gpt, tied=True, length=256, words=50257, size=(768, 12, 12))),
}


class Point(NamedTuple):
    """A workload at a size; None: its own."""

    workload: str
    n: int | None = None
    length: int | None = None
    width: int | None = None

    @property
    def label(self) -> str:
        sizes = zip("NTW", self[1:], strict=True)
        return " ".join([self.workload, *(f"{letter}={size}" for letter, size in sizes if size is not None)])

    @property
    def samples(self) -> int:
        return self.n or (WORKLOADS | LARGE)[self.workload][0]

    def make(self) -> Task:
        """The task, the same every time."""
        torch.manual_seed(0)
        sizes = {name: size for name, size in self._asdict().items() if name in ("length", "width") and size}
        return (WORKLOADS | LARGE)[self.workload][1](self.samples, **sizes)
