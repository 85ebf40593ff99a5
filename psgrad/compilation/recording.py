"""One recorded call: its ops as a graph, the tensors that they read, and what they assume."""

import random
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from itertools import count
from math import inf
from operator import and_, attrgetter, itemgetter, methodcaller
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from ..engine.answers import number_of
from ..engine.problem import generators, rewind
from ..engine.signals import Unrecordable
from ..factors import assumptions, clock, warm_memory
from ..quantities.factored import FactoredGrads
from ..torch_ import graphs
from ..torch_.autograd import full_precision, is_autocasting
from . import quick_products

Backend = Literal["auto", "inductor", "replay"]
LARGE = 2500  # ops; the compiler would be busy for minutes with more
_TURNS, _MOST_TURNS, _SECONDS = 5, 200, 0.5  # how long contenders take turns, at least and at most
_OVERHEAD = 5e-4  # seconds; eager calls take nearly as long for the smallest models, and are not weighed there
_LEAD = {"inductor": 0.95}  # where it is close


class Recording:
    """A graph, ready to run on the tensors of a call."""

    def __init__(
        self, run: graphs.Runner, backend: str, met: list[Tensor], spec: optree.PyTreeSpec, leaves: list[Any]
    ) -> None:
        self.runner, self.backend, self.met, self.spec = run, backend, met, spec
        # Leaves of the result that are no tensors, and what sets them among the graph's tensors, which come first.
        self.others = [leaf for leaf in leaves if leaf is not None]
        tensors, others = count(), count(len(leaves) - len(self.others))
        places = [next(tensors if leaf is None else others) for leaf in leaves]
        self.ordered = itemgetter(*places) if len(places) > 1 else list
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
        return self.spec.unflatten(self.ordered([*found, *self.others]) if self.others else found)


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


def is_lazy(t: Tensor) -> bool:
    """Whether a tensor's numbers are not what is in its memory: they are conjugated or negated when they are read."""
    return t.is_neg() or t.is_conj()


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
        return [t.detach() for t in found if isinstance(t, Tensor)] + _all_of(conditions)

    with _Notice(f"psgrad.compile: {quantity.__name__}, recording and compiling"):
        draws, foreign = generators(tensors), _foreign_generators()
        is_bounded = call[2].get("max_bytes") is not None  # planned by estimates: others may want more memory
        try:
            in_cpp = backend != "replay" and graphs.missing_compiler() is None
            with nullcontext() if is_bounded else clock.measured(in_cpp):
                graph, met, why = graphs.record(flat, tensors, number_of)
            after = generators(tensors)
            has_drawn = not all(torch.equal(state, after[device]) for device, state in draws.items())
        finally:
            rewind(draws)
        if _foreign_generators() != foreign:
            raise Unrecordable("fn draws random numbers by Python's random or by NumPy")
        if why is not None:
            raise Unrecordable(why)
        quick_products.put_in(graph)
        ops = graphs.ops_of(graph)
        params, batch, options = call
        eagerly = partial(quantity, fn, params, batch, **options)
        try:
            runner, used = _ready(graph, [*tensors, *met], backend, draws, eagerly, is_bounded)
        finally:
            rewind(draws)
    out_spec, out_leaves, assumes = shape
    made = Recording(runner, used, met, out_spec, out_leaves)
    made.assumes, made.ops, made.seconds = assumes, ops, time.perf_counter() - started
    made.draws = has_drawn
    return made


def _all_of(conditions: list[Tensor]) -> list[Tensor]:
    """One boolean for all conditions, if there are any."""
    if len(conditions) > _FEW:
        return [torch.stack([c.to(conditions[0].device) for c in conditions]).all()]
    return [reduce(and_, [c.to(conditions[0].device) for c in conditions])] if conditions else []


_FEW = 4  # conditions that are one kernel when they are compiled; more are stacked, or replay has an op for each


def _foreign_generators() -> Any:
    """The states of generators that are not torch's."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else _of_numpy(numpy)


def _of_numpy(numpy: Any) -> Any:
    kind, key, *rest = numpy.random.get_state()
    return kind, key.tobytes(), rest


def _ready(
    graph: Any, tensors: list[Tensor], backend: Backend, draws: Any, eagerly: Callable[[], Any], is_bounded: bool
) -> tuple[graphs.Runner, str]:
    """A graph by a backend, and which it is; "eager" where the eager call is faster than any."""
    large = len(graph.graph.nodes) > LARGE
    lazy = any(map(is_lazy, tensors))  # compiled code reads memory as it is
    can_compile = not large and not lazy and (backend == "inductor" or graphs.missing_compiler() is None)
    runners: dict[str, graphs.Runner] = {}
    if backend != "replay" and can_compile:
        warm = not is_bounded and graphs.largest(graph) >= warm_memory.LEAST
        memory = warm_memory.Returned()
        with full_precision(), torch.inference_mode(False), torch.no_grad():
            compiled = graphs.compile_graph(graph, tensors, memory.empty_strided if warm else None)
        runners["inductor"] = (lambda *given: memory.run(compiled, given)) if warm else compiled
    if backend != "inductor" or not can_compile:
        runners["replay"] = graphs.replay(graph)
    if backend != "auto":
        return next((runner, name) for name, runner in runners.items())
    turns = {name: partial(_run, runner, tensors) for name, runner in runners.items()}
    seconds = _least_seconds(turns, draws, tensors[0].device)
    best = min(seconds, key=lambda name: _LEAD.get(name, 1.0) * seconds[name])
    if seconds[best] > _OVERHEAD:
        seconds = _least_seconds({best: turns[best], "eager": eagerly}, draws, tensors[0].device)
        if seconds["eager"] < seconds[best]:
            return runners[best], "eager"
    return runners[best], best


def _least_seconds(contenders: Mapping[str, Callable[[], Any]], draws: Any, device: torch.device) -> dict[str, float]:
    """The least time of each, of turns that they take."""
    best = dict.fromkeys(contenders, inf)
    began = time.perf_counter()
    for turn in count():
        for name, run in contenders.items():
            rewind(draws)
            started = time.perf_counter()
            run()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            if turn:  # the first warms up
                best[name] = min(best[name], time.perf_counter() - started)
        if turn >= _TURNS and (time.perf_counter() - began > _SECONDS or turn >= _MOST_TURNS):
            return best
    raise AssertionError("please report this")


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
