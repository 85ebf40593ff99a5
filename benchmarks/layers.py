"""`python -m benchmarks.layers`: each op's rule beside its ordinary backward; exit code 1 if the bar is missed.

The ordinary backward gives the gradient of the input and the summed ones of the parameters; a rule's backward gives
the gradient of the input and N gradients of each parameter, written into buffers that are there. It may take `BAR`
times what the ordinary one and a plain fill of these buffers take. Recurrent layers are timed with their forward.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from psgrad.registry.params import Param, Source
from psgrad.registry.rule import BatchFold, Needs

from .__main__ import among, positive
from .layer_shapes import FAMILIES, Case
from .machine import BUSY, Others
from .timing import Call, fastest
from .workloads import setup

BAR = 1.15
PATIENCE = 2.0  # seconds of a contender, after which it gets no more turns than it must


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layers", description=__doc__)
    parser.add_argument("--only", type=among(FAMILIES), default=list(FAMILIES), help=f"some of {', '.join(FAMILIES)}")
    parser.add_argument("--rounds", type=positive, default=10, help="turns of each contender (10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    args = parser.parse_args(argv)
    about = setup() | {"rounds": args.rounds, "bar": BAR}
    figures: list[dict[str, Any]] = []
    for family in args.only:
        figures += table(family, args.rounds)
    missed = [row for row in figures if row["ratio"] > BAR]
    print(f"\n{len(figures) - len(missed)} of {len(figures)} within {BAR}")
    for row in missed:
        print(f"{row['family']}, {row['shape']}: {row['ratio']:.2f}")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**about, "rows": figures}, indent=1) + "\n")
    return int(bool(missed))


def table(family: str, rounds: int) -> list[dict[str, Any]]:
    """Measure an op's shapes, and print a row for each."""
    torch.manual_seed(0)
    figures, others = [], Others()
    for i, case in enumerate(FAMILIES[family]()):
        if i == 0:
            what = "forward + backward" if case.with_forward else "backward"
            print(f"\n### {family}: {what}\n")
            print("| shape | N | ordinary ms | fill ms | rule ms | rule / (ordinary + fill) | vmap / the same | bar |")
            print("|---|---|---|---|---|---|---|---|")
        times = measure(case, rounds)
        base = times["ordinary"] + times["fill"]
        row = {"family": family, "shape": case.label, "n": len(case.x), "ratio": times["rule"] / base, **times}
        figures.append(row)
        cells = [f"{times[name] * 1e3:.2f}" for name in ("ordinary", "fill", "rule")]
        cells += [f"{times[name] / base:.2f}" for name in ("rule", "vmap")]
        verdict = "met" if row["ratio"] <= BAR else "MISSED"
        print(f"| {case.label} | {len(case.x)} | {' | '.join(cells)} | {verdict} |", flush=True)
    if (share := others.share()) > BUSY:
        print(f"\nOther processes took {share:.0%} of the cores: not to be trusted.")
    return figures


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Seconds of each contender; answers are compared first."""
    buffers = [p.new_zeros(len(case.x), *p.shape) for p in case.params]
    base, rule = ordinary(case), ruled(case, buffers)
    y, z = base.forward(), rule.forward()
    g = torch.randn_like(y)
    g_rule = g.reshape(z.shape)
    torch.testing.assert_close(z, y.reshape(z.shape), atol=1e-3, rtol=1e-3)
    check(base.backward(y, g), rule.backward(z, g_rule), len(case.params))
    if case.with_forward:
        calls: dict[str, Call] = {
            "ordinary": lambda: base.backward(base.forward(), g),
            "rule": lambda: rule.backward(rule.forward(), g_rule),
        }
    else:
        calls = {"ordinary": lambda: base.backward(y, g), "rule": lambda: rule.backward(z, g_rule)}
    calls["fill"] = lambda: [b.fill_(0.0) for b in buffers]
    calls |= {"forward": base.forward, "rule's forward": rule.forward}
    calls["vmap"] = vmapped(case, g.reshape(len(case.x), *case.op(case.x[0], *case.params).shape))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ops that vmap runs in a loop
        times = fastest(calls, rounds, PATIENCE)
    if not case.with_forward:  # it runs the forward, too, which the others do not
        times["vmap"] -= times["forward"]
    return times


def check(summed: Sequence[Tensor], each: Sequence[Tensor], params: int) -> None:
    """A rule's gradients of parameters add up to the ordinary ones, and those of the input are the same."""
    split = len(summed) - params
    for i, (a, b) in enumerate(zip(summed, each, strict=True)):
        b = b if i < split else b.sum(0)
        torch.testing.assert_close(b.reshape(a.shape), a, atol=1e-4 * float(a.abs().max()), rtol=1e-3)


# ---- the contenders -------------------------------------------------------------------------------------


class Sides(NamedTuple):
    """Forward, and backward from its output and a cotangent: gradients of the input, then of parameters."""

    forward: Callable[[], Tensor]
    backward: Callable[[Tensor, Tensor], Sequence[Tensor]]


def _input(case: Case) -> Tensor:
    return case.x.detach().requires_grad_(case.x.is_floating_point())


def ordinary(case: Case) -> Sides:
    """Autograd on the whole batch."""
    x, params = _input(case), [p.detach().requires_grad_() for p in case.params]
    wanted = [x, *params] if x.requires_grad else params
    return Sides(lambda: case.whole(x, *params), lambda y, g: torch.autograd.grad(y, wanted, g, retain_graph=True))


def vmapped(case: Case, g: Tensor) -> Call:
    """vmap over samples of each one's vjp."""

    def one(x: Tensor, g: Tensor) -> Any:
        if x.is_floating_point():
            return torch.func.vjp(case.op, x, *case.params)[1](g)
        return torch.func.vjp(lambda *params: case.op(x, *params), *case.params)[1](g)

    return lambda: torch.vmap(one)(case.x, g)


class _Apply(torch.autograd.Function):
    """A rule's call in autograd, as psgrad's engine has it; the factors go into buffers."""

    @staticmethod
    def forward(ctx: Any, rule: Any, call: Any, buffers: Sequence[Tensor], x: Tensor, anchor: Tensor) -> Any:
        ctx.values = [p.value if isinstance(p, Param) else p for p in call.params]
        ctx.run = rule, call, buffers
        y, saved = rule.forward(call.options, x, *ctx.values)
        ctx.save_for_backward(x, *saved)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (rule, call, buffers), (x, *saved) = ctx.run, ctx.saved_tensors
        needs = Needs(ctx.needs_input_grad[3], tuple(isinstance(p, Param) for p in call.params))
        gx, factors = rule.backward(call.options, g, x, ctx.values, saved, needs)
        for param, factor in zip(call.params, factors, strict=True):
            if isinstance(param, Param):
                buffer = buffers[param.source.index]
                factor.dense(buffer if param.whole else param.part.rows(buffer))
        return None, None, None, gx, None


def ruled(case: Case, buffers: list[Tensor]) -> Sides:
    """psgrad's rule."""
    x, anchor, rule = _input(case), torch.zeros((), requires_grad=True), case.rule
    if isinstance(rule, BatchFold):
        tensors, options = case.bind(x[0])
        absent = [None for t in tensors if t is None]
        return Sides(
            lambda: rule.run(options, *x.unbind(1), *absent),
            lambda y, g: torch.autograd.grad(y, x, g, retain_graph=True),
        )
    call = case.bind(x[0].detach(), *(Param(p, Source(i, str, p, p), p) for i, p in enumerate(case.params)))

    def forward() -> Tensor:
        y = _Apply.apply(rule, call, buffers, x if call.before is None else call.before(x), anchor)
        others = (x, *call.others[1:]) if call.others else ()  # of an embedding bag: its indices
        return y if call.after is None else call.after(y, *others)

    def backward(y: Tensor, g: Tensor) -> list[Tensor]:
        wanted = x if x.requires_grad else anchor
        found = torch.autograd.grad(y, wanted, g, retain_graph=True, allow_unused=True)
        return [*found, *buffers] if x.requires_grad else buffers

    return Sides(forward, backward)


if __name__ == "__main__":
    sys.exit(main())
