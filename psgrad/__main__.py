"""The demo, `python -m psgrad`: train on per-sample gradients, look at them, check them, time them."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psgrad

Params = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]  # images (N, 1, 8, 8), labels (N,)
tree_map: Callable[..., Any] = optree.tree_map  # over dicts of tensors, which its own types do not know


def load_digits() -> tuple[Batch, Batch]:
    """scikit-learn's 1797 handwritten digits: 1500 to train on, the rest held out."""
    try:
        from sklearn import datasets
    except ImportError:
        raise SystemExit('The demo trains on scikit-learn\'s digits. Please:  pip install "psgrad[demo]"') from None
    images, labels = datasets.load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(y))
    x, y = x[order], y[order]
    return (x[:1500], y[:1500]), (x[1500:], y[1500:])


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.GroupNorm(8, 32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def train(model: nn.Module, train_set: Batch, test_set: Batch, epochs: int = 6, lr: float = 0.05) -> Params:
    """SGD with momentum, by hand: parameters are a dict, a step is a tree map."""
    fn, params = psgrad.from_module(model, F.cross_entropy)
    velocity = tree_map(torch.zeros_like, params)
    (x, y), (x_test, y_test) = train_set, test_set
    for epoch in range(1, epochs + 1):
        total = 0.0
        for rows in torch.randperm(len(y)).split(100):
            grads, losses = psgrad.per_sample_grads(fn, params, (x[rows], y[rows]), return_value=True)
            velocity = tree_map(lambda v, g: 0.9 * v + g.mean(0), velocity, grads)
            params = tree_map(lambda p, v: p - lr * v, params, velocity)
            total += losses.sum().item()
        if epoch % 2 == 0:
            right = (predict(model, params, x_test) == y_test).float().mean()
            print(f"  epoch {epoch}   loss {total / len(y):.3f}   held-out accuracy {right:.1%}")
    return params


def predict(model: nn.Module, params: Params, x: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = torch.func.functional_call(model, params, (x,))
    return logits.argmax(1)


def norms(grads: Params) -> Tensor:
    """The length of every sample's gradient, all parameters together."""
    return torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt()


def show_surprises(model: nn.Module, params: Params, batch: Batch) -> None:
    """The ten samples with the largest gradients, drawn in text, five to a line."""
    fn, _ = psgrad.from_module(model, F.cross_entropy)
    size = norms(psgrad.per_sample_grads(fn, params, batch))
    predicted = predict(model, params, batch[0])
    print(f"  median gradient norm {size.median():.3f}; the ten largest:\n")
    for five in size.topk(10).indices.split(5):
        pictures = [picture(batch[0][i, 0]) for i in five]
        for line in zip(*pictures, strict=True):
            print("  " + "   ".join(line).rstrip())
        labels = [f"a {batch[1][i]}, seen as {predicted[i]}" for i in five]
        print("  " + "   ".join(label.center(16) for label in labels).rstrip())
        print("  " + "   ".join(f"norm {size[i]:.1f}".center(16) for i in five).rstrip() + "\n")


def picture(image: Tensor) -> list[str]:
    """An 8x8 image as eight lines of sixteen characters."""
    shades = " ░▒▓█" if "utf" in (sys.stdout.encoding or "").lower() else " .:*#"
    return ["".join(2 * shades[round(4 * v)] for v in row) for row in image.tolist()]


def check_exactness(model: nn.Module, params: Params, batch: Batch) -> None:
    """The same gradients, one backward pass per sample, in float64."""
    fn, _ = psgrad.from_module(model, F.cross_entropy)
    params, (x, y) = {name: p.double() for name, p in params.items()}, batch
    ours = psgrad.per_sample_grads(fn, params, (x.double(), y))
    loop = psgrad.testing.loop_grads(fn, params, (x.double(), y))
    furthest = max((ours[name] - loop[name]).abs().max().item() for name in params)
    largest = max(g.abs().max().item() for g in loop.values())
    print(f"  {len(y)} samples, largest entry {largest:.1f}, largest difference from a loop {furthest:.1e}")


def compare_times(model: nn.Module, params: Params, batch: Batch, budget: float = 4.0) -> None:
    """Everyone in turn, again and again for `budget` seconds; the minimum counts, as noise only ever adds."""
    fn, _ = psgrad.from_module(model, F.cross_entropy)
    vmap_grad = torch.func.vmap(torch.func.grad(fn), in_dims=(None, 0))

    def batch_gradient() -> object:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        loss = F.cross_entropy(torch.func.functional_call(model, leaves, (batch[0],)), batch[1])
        return torch.autograd.grad(loss, list(leaves.values()))

    contenders: dict[str, Callable[[], object]] = {
        "batch gradient (no samples)": batch_gradient,
        "vmap(grad)": lambda: vmap_grad(params, batch),
        "psgrad": lambda: psgrad.per_sample_grads(fn, params, batch),
    }
    best = dict.fromkeys(contenders, float("inf"))
    end = time.perf_counter() + budget
    while time.perf_counter() < end:
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    base = next(iter(best.values()))
    for name, seconds in best.items():
        print(f"  {name:<28}{1000 * seconds:6.2f} ms   {seconds / base:5.2f} x")


def parse(argv: Sequence[str] | None) -> None:
    """The command line, which has no options: it answers --help, and refuses what it does not know."""
    parser = argparse.ArgumentParser(
        prog="python -m psgrad",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "A demo of psgrad, in under a minute:\n\n"
            "  - trains a small convolutional net on scikit-learn's digits, by per-sample gradients;\n"
            "  - shows the ten held-out digits with the largest gradients;\n"
            "  - compares the gradients with those of a loop over samples;\n"
            "  - times them beside the batch gradient and torch's vmap(grad).\n\n"
            'Needs scikit-learn: pip install "psgrad[demo]".'
        ),
    )
    parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    parse(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # images of 8x8: one is enough, and its times are steadier
    train_set, test_set = load_digits()
    model = make_model()

    print("Training on the mean of per-sample gradients (1500 digits, conv net with group norm)")
    params = train(model, train_set, test_set)

    print("\nWhich held-out digits surprise the net? Those with large gradients")
    show_surprises(model, params, test_set)

    print("Are they exact?")
    x, y = test_set
    check_exactness(model, params, (x[:64], y[:64]))

    print(f"\nWhat do they cost? ({len(y)} samples, one thread)")
    compare_times(model, params, test_set)


if __name__ == "__main__":
    main()
