"""Functions with several outputs: one forward, and a backward for each output."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..annotations import Randomness
from ..engine.ladder import Group, generators_kept, keep_forwards
from ..engine.problem import Problem, kind_of, rewind
from ..engine.validate import validated
from ..errors import ArgumentError, ArgumentTypeError
from ..streaming.progress import Bar
from ..streaming.stream import Counted, Run, counted
from .factored import FactoredGrads, factored_chunk


def _row(fn: Callable[..., Any], shape: tuple[int, ...], params: Any, sample: Any) -> Tensor:
    """What `fn` returns, as a row of numbers."""
    out: Tensor = fn(params, sample)
    if tuple(out.shape) != shape:
        raise ArgumentError(
            f"fn returns outputs of shape {shape} for the first sample, of shape {tuple(out.shape)} for another\n"
            "  return as many for every sample."
        )
    return out.reshape(-1)


def _output(fn: Callable[..., Any], shape: tuple[int, ...], k: int, params: Any, sample: Any) -> Tensor:
    """One number of what `fn` returns."""
    return _row(fn, shape, params, sample).narrow(0, k, 1).sum()  # a tensor of its own, not a view


class Outputs(NamedTuple):
    """The samples that count, and the outputs that `fn` has for each."""

    there: Counted
    fn: Callable[..., Any]
    shape: tuple[int, ...]  # of what fn returns
    count: int  # type: ignore[assignment]  # K; tuples have a method of that name

    def of(self, problem: Problem, k: int) -> Problem:
        """The same samples, with output k as the loss."""
        return problem._replace(fn=partial(_output, self.fn, self.shape, k), several=False)


def outputs_of(
    fn: Any, params: Any, batch: Any, in_dims: Any, randomness: Randomness, valid: Any, save_memory: bool
) -> Outputs:
    """The arguments checked; `fn` runs once, on the first sample, for the shape of what it returns."""
    plain = validated(fn, params, batch, in_dims=in_dims, randomness=randomness, save_memory=save_memory)
    if plain.n:
        sample = plain.rows(slice(0, 1)).copied().sample(0)
    else:
        sample = [t.new_zeros(t.shape[1:]) if b else t for t, b in zip(plain.batch, plain.batched, strict=True)]
    # gradients on, as when it is differentiated: silu has another derivative without
    with torch.enable_grad(), generators_kept(plain):
        tree = optree.tree_unflatten(plain.params_spec, [p.clone() for p in plain.params])
        out = fn(tree, optree.tree_unflatten(plain.batch_spec, sample))
    if not isinstance(out, Tensor) or not out.is_floating_point():
        what = f"a tensor of {out.dtype}" if isinstance(out, Tensor) else kind_of(out)
        raise ArgumentTypeError(
            f"fn must return the outputs for one sample as a tensor, but returned {what}\n"
            "  return a floating-point tensor, of any shape."
        )
    shape = tuple(out.shape)
    problem = plain._replace(fn=partial(_row, fn, shape), several=True)
    return Outputs(counted(problem, valid), fn, shape, out.numel())


class Backwards:
    """Samples that have run, and the backward of each of their outputs, as often as somebody asks.

    `fn` runs once for all outputs where its graph can be kept, else once for each, with the same random numbers;
    `again`: with those from `states` on, and the generators stay as they are.
    """

    def __init__(
        self,
        outputs: Outputs,
        problem: Problem,
        run: Run,
        states: Any,
        again: bool = False,
        quiet: bool = False,
        bar: Bar | None = None,
    ) -> None:
        self.outputs, self.problem, self.run, self.states, self.again = outputs, problem, run, states, again
        self.bar, self.done = bar, set[int]()  # hears of each output, once
        self.factors: list[FactoredGrads] | None = None  # of all outputs, once somebody has asked for them
        with self._drawing():
            if again:
                rewind(states)
            self.kept = keep_forwards(problem, outputs.count, quiet=quiet)

    def _drawing(self) -> AbstractContextManager[Any]:
        return generators_kept(self.problem) if self.again else nullcontext()

    def groups(self, k: int, make: Callable[[Problem], Any]) -> Iterator[Group[Any]]:
        """The gradients of output k, as `engine.collect` gives those of a loss."""
        groups = None if self.kept is None else self.kept.backward(k, make)
        if groups is not None and self.bar is not None:
            yield from self.bar.watching(lambda *_: iter(groups))(self.problem, make)
        elif groups is not None:
            yield from groups
        else:
            self.kept = None
            with self._drawing():
                rewind(self.states)
                yield from self.run(self.outputs.of(self.problem, k), make)
        if self.bar is not None and k not in self.done:
            self.done.add(k)
            self.bar.done(self.problem.n)

    def of(self, some: range) -> list[FactoredGrads]:
        """The factors of some outputs; those of all are worked out once, and nothing else is kept then."""
        if self.factors is not None:
            return self.factors[some.start : some.stop]
        found = [factored_chunk(self.problem, lambda _, make: self.groups(k, make))[0] for k in some]  # noqa: B023
        if len(some) == self.outputs.count:
            self.factors, self.kept = found, None
        return found
