"""The demo, `python -m psgrad`: check per-sample gradients, train on clipped ones, look at the largest, time them."""

import argparse
import copy
import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psgrad

Params = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]  # images (N, 1, 8, 8), labels (N,)
BOUND = 1.0  # on the norm of a digit's gradient
BUSY = 1.5  # the median of times over the least, above which somebody else had the cores


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


def use_all_cores() -> str:
    """As many threads as this process may have, unless somebody has said otherwise; in words."""
    said = "OMP_NUM_THREADS" in os.environ
    if not said:
        known = hasattr(os, "sched_getaffinity")
        torch.set_num_threads(len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1)
    count = torch.get_num_threads()
    threads = "one thread" if count == 1 else f"{count} threads"
    return f"{threads}, as OMP_NUM_THREADS says" if said else f"{threads}: all cores that it found"


# ---- the parts of the demo -------------------------------------------------------------------------------


def check_exactness(model: nn.Module, batch: Batch) -> None:
    """psgrad beside a plain loop over the module itself, in float64."""
    fn, params = psgrad.from_module(copy.deepcopy(model).double(), F.cross_entropy)
    found = psgrad.verify(fn, params, (batch[0].double(), batch[1]), samples=8)
    print(f"   {'':<26}{'off by':>10}{'of the largest':>18}")
    for c in found.comparisons:
        print(f"   {c.quantity:<26}{c.difference:>10.1e}{c.relative:>18.1e}")
    print(f"   {found.samples} digits in float64; {found.how}.")


def train(model: nn.Module, train_set: Batch, test_set: Batch, epochs: int, lr: float = 0.2) -> Params:
    """SGD with momentum on the sum of clipped gradients: parameters are a dict, a step is a few lines."""
    fn, params = psgrad.from_module(model, F.cross_entropy)
    velocity = {name: torch.zeros_like(p) for name, p in params.items()}
    (x, y), (x_test, y_test) = train_set, test_set
    print(f"   {'epoch':>5}{'loss':>10}{'median norm':>14}{'clipped':>10}{'held-out accuracy':>20}{'seconds':>10}")
    for epoch in range(1, epochs + 1):
        start, losses, norms = time.perf_counter(), 0.0, []
        for rows in torch.randperm(len(y)).split(100):
            step = psgrad.clipped_grad(fn, params, (x[rows], y[rows]), BOUND)
            velocity = {name: 0.9 * velocity[name] + g / step.count for name, g in step.grad.items()}
            params = {name: p - lr * velocity[name] for name, p in params.items()}
            losses += step.values.sum().item()
            norms.append(step.norms)
        took, seen = time.perf_counter() - start, torch.cat(norms)
        right = (predict(model, params, x_test) == y_test).float().mean()
        print(
            f"   {epoch:>5}{losses / len(y):>10.3f}{seen.median():>14.2g}{(seen > BOUND).float().mean():>10.0%}"
            f"{right:>20.1%}{took:>10.2f}"
        )
    print(f"   One digit moves the sum by {step.sensitivity:g} at most: what noise is scaled to in private training.")
    return params


def predict(model: nn.Module, params: Params, x: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = torch.func.functional_call(model, params, (x,))
    return logits.argmax(1)


def show_surprises(model: nn.Module, params: Params, batch: Batch) -> None:
    """The ten samples with the largest gradients, drawn in text, five to a line."""
    fn, _ = psgrad.from_module(model, F.cross_entropy)
    size = psgrad.per_sample_norms(fn, params, batch)
    predicted = predict(model, params, batch[0])
    print(f"   The median gradient of {len(size)} held-out digits has norm {size.median():.2g}. The ten largest:\n")
    for five in size.topk(10).indices.split(5):
        pictures = [picture(batch[0][i, 0]) for i in five]
        for line in zip(*pictures, strict=True):
            print("   " + "   ".join(line).rstrip())
        labels = [f"{'an 8' if batch[1][i] == 8 else f'a {batch[1][i]}'}, seen as {predicted[i]}" for i in five]
        print("   " + "   ".join(label.center(16) for label in labels).rstrip())
        print("   " + "   ".join(f"norm {size[i]:.1f}".center(16) for i in five).rstrip() + "\n")


def picture(image: Tensor) -> list[str]:
    """An 8x8 image as eight lines of sixteen characters."""
    shades = " ░▒▓█" if "utf" in (sys.stdout.encoding or "").lower() else " .:*#"
    return ["".join(2 * shades[round(4 * v)] for v in row) for row in image.tolist()]


def compare_times(model: nn.Module, params: Params, batch: Batch, budget: float) -> None:
    """Everyone in turn, again and again for `budget` seconds; the minimum counts, as noise only ever adds."""
    fn, _ = psgrad.from_module(model, F.cross_entropy)
    per_sample = torch.func.vmap(torch.func.grad(fn), in_dims=(None, 0))

    def backward() -> object:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        loss = F.cross_entropy(torch.func.functional_call(model, leaves, (batch[0],)), batch[1])
        return torch.autograd.grad(loss, list(leaves.values()))

    def flat() -> list[Tensor]:
        return [g.flatten(1) for g in per_sample(params, batch).values()]

    def norms(rows: Sequence[Tensor]) -> Tensor:
        return torch.stack([r.square().sum(1) for r in rows]).sum(0).sqrt()

    def clipped() -> object:
        rows = flat()
        weights = (BOUND / norms(rows)).clamp(max=1)
        return [weights @ r for r in rows]

    quantities: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "per-sample gradients": (
            lambda: psgrad.per_sample_grads(fn, params, batch),
            lambda: per_sample(params, batch),
        ),
        "their norms": (lambda: psgrad.per_sample_norms(fn, params, batch), lambda: norms(flat())),
        "their sum, each clipped": (lambda: psgrad.clipped_grad(fn, params, batch, BOUND), clipped),
        "their inner products": (
            lambda: psgrad.gram(fn, params, batch),
            lambda: torch.stack([r @ r.mT for r in flat()]).sum(0),
        ),
    }
    runs: dict[Any, Callable[[], object]] = {"backward": backward}
    runs |= {(name, k): run for name, pair in quantities.items() for k, run in enumerate(pair)}
    times = timed(runs, budget)
    best = {name: min(each) for name, each in times.items()}
    base = best["backward"]
    print(f"   {'':<26}{'psgrad':>19}{'vmap(grad)':>21}")
    for name in quantities:
        each = "".join(f"{1000 * best[name, k]:>10.2f} ms{best[name, k] / base:>6.1f} x" for k in (0, 1))
        print(f"   {name:<26}{each}")
    print(f"   x: times the ordinary gradient of the batch, which took {1000 * base:.2f} ms.")
    if (spread := median(times["backward"]) / base) > BUSY:
        print(f"   Not to be trusted: half of its runs took {spread:.1f} times as long or more, as on busy cores.")


def timed(runs: dict[Any, Callable[[], object]], budget: float) -> dict[Any, list[float]]:
    """The times of each, one at least."""
    times: dict[Any, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + budget
    while time.perf_counter() < end or not all(times.values()):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return times


WHERE_TO_GO = """\
   help(psgrad)                            a map of the library
   psgrad.verify(fn, params, batch)        the first call with a model of your own
   docs/quickstart.md, docs/recipes.md     from a model to what you came for; `make docs` builds the site
   docs/coming_from                        from Opacus, vmap(grad), BackPACK, JAX, TRAK
   notebooks                               private training, which samples matter, natural gradients, how it works"""


# ---- the command line ------------------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> None:
    """The command line, which has no options: it answers --help, and refuses what it does not know."""
    parser = argparse.ArgumentParser(
        prog="python -m psgrad",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=(
            "A demo of psgrad, in under a minute:\n\n"
            "  - compares per-sample gradients with those of a plain loop over samples;\n"
            "  - trains a small convolutional net on scikit-learn's digits, by clipped per-sample gradients;\n"
            "  - shows the ten held-out digits with the largest gradients;\n"
            "  - times gradients, norms, clipped sums and inner products beside torch's vmap(grad), on all cores;\n"
            "  - says where to go next.\n\n"
            'Needs scikit-learn: pip install "psgrad[demo]".'
        ),
    )
    parser.parse_args(argv)


def run(epochs: int = 5, budget: float = 5.0) -> None:
    """The demo itself: `epochs` of training, `budget` seconds for the times."""
    torch.manual_seed(0)
    cores = use_all_cores()
    train_set, test_set = load_digits()
    model = make_model()
    size = sum(p.numel() for p in model.parameters())
    print(f"psgrad {psgrad.__version__}, torch {torch.__version__}; {cores}")
    print(f"1797 handwritten digits, a convolutional net with group norm, {size:,} parameters")

    print("\n1  Are they exact? psgrad beside a plain loop over samples")
    check_exactness(model, train_set)

    print(f"\n2  Train on clipped gradients: that of each digit has norm {BOUND:g} at most")
    params = train(model, train_set, test_set, epochs)

    print("\n3  Which digits surprise the net? Those with large gradients")
    show_surprises(model, params, test_set)

    print(f"4  What do they cost? {len(test_set[1])} digits, the best of many runs; {cores}")
    compare_times(model, params, test_set, budget)

    print(f"\n5  Where to go\n{WHERE_TO_GO}")


def main(argv: Sequence[str] | None = None) -> None:
    parse(argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # in a pipe, too, each line is there when it is written
    try:
        run()
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
