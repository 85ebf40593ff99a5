"""Models from the wild: psgrad beside a plain loop over the module itself, as a table.

python -m wild            every model of models.py
python -m wild peft GCN   those of a package, or of a name

    exact        as the plain loop, all samples at once
    one-op loop  as the plain loop; some ops ran in a loop over samples
    loop         as the plain loop; the model ran in a loop over samples
    refused      by an error of psgrad's, which is shown
    wrong        other numbers than the plain loop, or an error that is not psgrad's own
    slow         not done in the time that a model has
    broken       the model itself does not run, or its plain loop has no gradients to compare with
    missing      the package is not installed or cannot be imported

The exit code is 1 where anything is wrong.
"""

import collections
import importlib
import math
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import psgrad

from .models import MODELS, Model, N

SECONDS = 60
WRONG = 1e-6  # relative, in float64
KINDS = ("exact", "one-op loop", "loop", "refused", "wrong", "slow", "broken", "missing")


class Found(NamedTuple):
    kind: str
    difference: float | None = None
    remark: str = ""
    seconds: float | None = None  # of psgrad's call


class OutOfTime(BaseException):
    """Not an Exception: neither psgrad nor a model is to take it for an error of its own."""


class NoGradientsError(Exception):
    """There is nothing to compare with."""


def main(wanted: list[str]) -> int:
    torch.set_default_dtype(torch.float64)
    signal.signal(signal.SIGALRM, _out_of_time)
    chosen = [m for m in MODELS if not wanted or m.name in wanted or m.package in wanted]
    counts: collections.Counter[str] = collections.Counter()
    print(f"{'model':<26}{'package':<30}{'':<13}{'difference':>10}{'seconds':>9}", flush=True)
    for model in chosen:
        found = _within_time(model)
        counts[found.kind] += 1
        difference = "-" if found.difference is None else f"{found.difference:.0e}"
        seconds = "-" if found.seconds is None else f"{found.seconds:.2f}"
        row = f"{model.name:<26}{model.package:<30}{found.kind:<13}{difference:>10}{seconds:>9}"
        print(f"{row}  {found.remark}".rstrip(), flush=True)
    print(f"\n{len(chosen)} models: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]))
    return 1 if counts["wrong"] else 0


def _out_of_time(*_: object) -> None:
    raise OutOfTime


def _within_time(model: Model) -> Found:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            importlib.import_module(model.package)
        except Exception as error:
            return Found("missing", remark=_first_line(error))
        torch.manual_seed(0)
        try:
            module, inputs = model.make()  # outside the time: packages import what they need only now
        except Exception as error:
            return Found("broken", remark=_first_line(error))
        signal.alarm(SECONDS)
        try:
            return _compared(module.eval(), inputs)
        except OutOfTime:
            return Found("slow")
        finally:
            signal.alarm(0)


def _compared(module: nn.Module, inputs: Any) -> Found:
    _perturb(module)
    try:
        want = _plain_loop(module, inputs)
    except Exception as error:
        return Found("broken", remark=_first_line(error))
    start = time.perf_counter()
    try:
        grads, reasons = _ours(module, inputs)
    except psgrad.PsgradError as error:
        return Found("refused", remark=_first_line(error), seconds=time.perf_counter() - start)
    except Exception as error:
        return Found("wrong", remark=_first_line(error), seconds=time.perf_counter() - start)
    seconds = time.perf_counter() - start
    difference, name = _largest_difference(grads, want)
    if difference <= WRONG:
        return Found(_kind(reasons), difference, _detail(reasons), seconds)
    if _largest_difference(_plain_loop(module, inputs), want)[0] > WRONG:
        return Found("broken", remark="the plain loop differs from itself: the model draws, or remembers")
    return Found("wrong", difference, f"most in {name}", seconds)


def _perturb(module: nn.Module) -> None:
    """Zeros and ones, as adapters, biases and norms begin, would hide mistakes."""
    with torch.no_grad():
        for p in module.parameters():
            if p.is_floating_point() and p.requires_grad:
                p.add_(torch.randn_like(p), alpha=0.05)


def _plain_loop(module: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """One ordinary backward pass of the module itself per sample."""
    params = {name: p for name, p in module.named_parameters() if p.requires_grad}
    rows = []
    for i in range(N):
        loss = _loss(_called(module, inputs, i), _targets()[i : i + 1])
        found = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
        rows.append([g.detach().clone() for g in found])
    grads = {name: torch.stack(column) for name, column in zip(params, zip(*rows, strict=True), strict=True)}
    if not all(bool(g.isfinite().all()) for g in grads.values()):
        raise NoGradientsError("gradients of the plain loop are not finite")
    if not any(bool(g.any()) for g in grads.values()):
        raise NoGradientsError("all gradients of the plain loop are zero")
    return grads


def _called(module: nn.Module, inputs: Any, i: int) -> Any:
    """The module on sample i, as a batch of one."""
    if isinstance(inputs, Tensor):
        return module(inputs[i : i + 1])
    if isinstance(inputs, dict):
        return module(**{key: t[i : i + 1] for key, t in inputs.items()})
    return module(*(t[i : i + 1] for t in inputs))


def _targets() -> Tensor:
    return torch.arange(1.0, N + 1)


def _loss(output: Any, target: Tensor) -> Tensor:
    """Of every floating-point tensor that the model returns, each element with a weight of its own."""
    terms = []
    for t in _tensors(output):
        phases = torch.arange(t.numel(), dtype=torch.float64).reshape(t.shape) + target.sum()
        terms.append((torch.sin(t) * torch.cos(phases)).sum())
    return torch.stack(terms).sum()


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_complex():
            output = torch.view_as_real(output)
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (tuple, list)):
        for value in output:
            yield from _tensors(value)


def _ours(module: nn.Module, inputs: Any) -> tuple[dict[str, Tensor], list[str]]:
    """What psgrad finds, and its reasons for a loop."""
    fn, params = psgrad.from_module(module, _loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", psgrad.FallbackWarning)
        grads = psgrad.per_sample_grads(fn, params, (inputs, _targets()))
    return grads, [str(w.message) for w in caught if issubclass(w.category, psgrad.FallbackWarning)]


def _kind(reasons: list[str]) -> str:
    if any("psgrad runs fn in a loop over samples" in reason for reason in reasons):
        return "loop"
    if any("psgrad runs a part of fn in a loop over samples" in reason for reason in reasons):
        return "one-op loop"
    return "exact"


def _detail(reasons: list[str]) -> str:
    """Of the first reason, the line that says where and why."""
    lines = reasons[0].splitlines() if reasons else []
    return _short(lines[1].strip() if len(lines) > 1 else "".join(lines))


def _largest_difference(ours: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest difference relative to the parameter's largest gradient, and the parameter's name.

    A gradient that is zero but for rounding, such as that of an attention's key bias, is measured by a millionth of
    the largest gradient of all.
    """
    if ours.keys() != want.keys():
        return math.inf, ", ".join(ours.keys() ^ want.keys())
    floor = 1e-6 * max(float(g.abs().max()) for g in want.values() if g.numel())
    largest = (0.0, "")
    for name, g in want.items():
        if ours[name].shape != g.shape:
            return math.inf, name
        if g.numel():
            difference = float((ours[name] - g).abs().max()) / max(float(g.abs().max()), floor)
            largest = max(largest, (math.inf if math.isnan(difference) else difference, name))
    return largest


def _first_line(error: BaseException) -> str:
    return _short(f"{type(error).__name__}: {str(error).strip() or '(no message)'}".splitlines()[0])


def _short(text: str) -> str:
    return text if len(text) <= 110 else text[:107] + "..."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
