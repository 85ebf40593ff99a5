"""One recorded call: its ops as a graph, the tensors that they read, and what they assume."""

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from math import inf
from operator import attrgetter, methodcaller
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from ..engine.problem import generators, rewind
from ..engine.signals import Unrecordable
from ..factors import assumptions
from ..quantities.factored import FactoredGrads
from ..torch_ import graphs
from ..torch_.autograd import full_precision, is_autocasting

Backend = Literal["auto", "inductor", "replay"]
LARGE = 2500  # ops; the compiler would be busy for minutes with more
_TURNS, _MOST_TURNS, _SECONDS = 5, 200, 0.5  # how long two contenders take turns, at least and at most


class Recording:
    """A graph, ready to run on the tensors of a call."""

    def __init__(
        self, run: graphs.Runner, backend: str, met: list[Tensor], spec: optree.PyTreeSpec, leaves: list[Any]
    ) -> None:
        self.runner, self.backend, self.met, self.spec = run, backend, met, spec
        self.leaves = leaves  # of the result; None where a tensor of the graph goes
        self.only_tensors = all(leaf is None for leaf in leaves)
        self.assumes = True  # the graph's last tensor says whether its assumptions hold
        self.draws = False  # random numbers
        self.facts = [*map(facts_of, met), *map(stride_of, met)]
        self.ops: list[str] = []
        self.seconds = 0.0

    def run(self, tensors: list[Tensor]) -> Any:
        """The result of the call, or NotImplemented where what the graph assumes is not so."""
        if self.met and [*map(facts_of, self.met), *map(stride_of, self.met)] != self.facts:
            return NotImplemented  # a cast or a move has given a tensor other memory
        before = generators(tensors) if self.draws else {}
        try:
            found = list(_run(self.runner, (*tensors, *self.met)))
        except BaseException:
            rewind(before)
            raise
        if self.assumes and not found.pop():
            rewind(before)  # whoever runs instead draws the same numbers
            return NotImplemented
        if not self.only_tensors:
            rest = iter(found)
            found = [next(rest) if leaf is None else leaf for leaf in self.leaves]
        return self.spec.unflatten(found)


def _run(runner: graphs.Runner, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """A graph's tensors, outside autograd and autocast, which it has been through already."""
    if is_autocasting() or torch.is_inference_mode_enabled():
        with full_precision(), torch.inference_mode(False), torch.no_grad():
            return runner(*tensors)
    if not any(map(_requires_grad, tensors)):
        return runner(*tensors)
    with torch.no_grad():
        return runner(*tensors)


_requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")
facts_of: Callable[[Tensor], Any] = attrgetter("shape", "dtype", "device")
stride_of: Callable[[Tensor], Any] = methodcaller("stride")


def record(quantity: Callable[..., Any], fn: Any, call: tuple[Any, ...], backend: Backend) -> Recording:
    """The ops of `quantity(fn, params, batch, **options)`, as a graph of the tensors among these.

    Random numbers that were drawn meanwhile are drawn again by whoever runs it.
    """
    started = time.perf_counter()
    tree: Any = call
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i] for i in places]
    shape: list[Any] = []

    def flat(*given: Tensor) -> list[Tensor]:
        filled = list(leaves)
        for i, t in zip(places, given, strict=True):
            filled[i] = t
        params, batch, options = spec.unflatten(filled)
        with assumptions.noted() as conditions:
            result = quantity(fn, params, batch, **options)
            if isinstance(result, FactoredGrads):
                result = result.to(tensors[0].device)  # gradients that are still to be pulled back are written out
        found, out_spec = optree.tree_flatten(result)
        shape.extend([out_spec, [None if isinstance(t, Tensor) else t for t in found], bool(conditions)])
        holds = [torch.stack([c.to(conditions[0].device) for c in conditions]).all()] if conditions else []
        return [t.detach() for t in found if isinstance(t, Tensor)] + holds

    with _Notice(f"psgrad.compile: {quantity.__name__}, recording and compiling"):
        draws, foreign = generators(tensors), _foreign_generators()
        try:
            graph, met, why = graphs.record(flat, tensors)
            after = generators(tensors)
            has_drawn = not all(torch.equal(state, after[device]) for device, state in draws.items())
        finally:
            rewind(draws)
        if _foreign_generators() != foreign:
            raise Unrecordable("fn draws random numbers by Python's random or by NumPy")
        if why is not None:
            raise Unrecordable(why)
        ops = graphs.ops_of(graph)
        runner, used = _ready(graph, [*tensors, *met], backend, draws)
        rewind(draws)
    out_spec, out_leaves, assumes = shape
    made = Recording(runner, used, met, out_spec, out_leaves)
    made.assumes, made.ops, made.seconds = assumes, ops, time.perf_counter() - started
    made.draws = has_drawn
    return made


def _foreign_generators() -> Any:
    """The states of generators that are not torch's."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else _of_numpy(numpy)


def _of_numpy(numpy: Any) -> Any:
    kind, key, *rest = numpy.random.get_state()
    return kind, key.tobytes(), rest


def _ready(graph: Any, tensors: list[Tensor], backend: Backend, draws: Any) -> tuple[graphs.Runner, str]:
    """A graph by a backend, and which it is."""
    large = len(graph.graph.nodes) > LARGE
    if backend == "replay" or large or (backend == "auto" and graphs.missing_compiler() is not None):
        return graphs.replay(graph), "replay"
    with full_precision(), torch.inference_mode(False), torch.no_grad():
        compiled = graphs.compile_graph(graph, tensors)
        if backend == "inductor":
            return compiled, "inductor"
        replayed = graphs.replay(graph)
        is_faster = _best_of(compiled, replayed, tensors, draws) is compiled
    return (compiled, "inductor") if is_faster else (replayed, "replay")


def _best_of(a: graphs.Runner, b: graphs.Runner, tensors: list[Tensor], draws: Any) -> graphs.Runner:
    """The faster of two graphs, by the least time of turns that they take; the first one where it is close."""
    best = {a: inf, b: inf}
    began = time.perf_counter()
    for turn in count():
        for runner in (a, b):
            rewind(draws)
            started = time.perf_counter()
            runner(*tensors)
            if tensors[0].device.type != "cpu":
                torch.accelerator.synchronize()
            if turn:  # the first warms up
                best[runner] = min(best[runner], time.perf_counter() - started)
        if turn >= _TURNS and (time.perf_counter() - began > _SECONDS or turn >= _MOST_TURNS):
            break
    return a if best[a] <= 1.05 * best[b] else b


class _Notice:
    """A line on the terminal, where somebody has to wait for more than a second."""

    def __init__(self, text: str) -> None:
        self.text, self.shown = text, False
        self.timer = threading.Timer(1.0, self._show)

    def _show(self) -> None:
        self.shown = True
        sys.stderr.write(f"{self.text} ...")
        sys.stderr.flush()

    def __enter__(self) -> None:
        self.started = time.perf_counter()
        if sys.stderr is not None and sys.stderr.isatty():
            self.timer.daemon = True
            self.timer.start()

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()
        if self.shown:
            sys.stderr.write(f" {time.perf_counter() - self.started:.1f} s\n")
            sys.stderr.flush()
