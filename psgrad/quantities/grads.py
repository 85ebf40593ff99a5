"""per_sample_grads: the gradients themselves, written out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, overload

import optree
import torch
from torch import Tensor

from ..annotations import P, Randomness
from ..composable import composed
from ..engine.batched import Outcome
from ..engine.collectors import DenseCollector
from ..engine.ladder import differentiating, join, no_outcome
from ..engine.problem import Problem, differences, flatten, paths
from ..engine.validate import is_nested, validated
from ..errors import ArgumentError, ArgumentTypeError
from ..factors import warm_memory
from ..streaming.stream import Quantity, Run, fold, plan
from ..torch_.compiler import uncompiled
from ..torch_.storage import first_clash, is_distinct, storage_of


@overload
def per_sample_grads(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    *,
    in_dims: Any = 0,
    has_aux: Literal[False] = False,
    return_value: Literal[False] = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    out: P | None = None,
) -> P: ...
@overload
def per_sample_grads(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    *,
    in_dims: Any = 0,
    has_aux: Literal[False] = False,
    return_value: Literal[True],
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    out: P | None = None,
) -> tuple[P, Tensor]: ...
@overload
def per_sample_grads(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    *,
    in_dims: Any = 0,
    has_aux: Literal[True],
    return_value: Literal[False] = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    out: P | None = None,
) -> tuple[P, Any]: ...
@overload
def per_sample_grads(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    *,
    in_dims: Any = 0,
    has_aux: Literal[True],
    return_value: Literal[True],
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    out: P | None = None,
) -> tuple[P, tuple[Tensor, Any]]: ...
@overload
def per_sample_grads(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    *,
    in_dims: Any = 0,
    has_aux: bool = False,
    return_value: bool = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    out: P | None = None,
) -> Any: ...


@uncompiled
def per_sample_grads(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    in_dims: Any = 0,
    has_aux: bool = False,
    return_value: bool = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    out: Any = None,
) -> Any:
    """The gradient of `fn(params, sample)` for every sample of `batch`.

    >>> def fn(params, sample):  # the loss of one sample
    ...     x, y = sample
    ...     return (x @ params["w"] + params["b"] - y) ** 2
    >>> params = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(0.0)}
    >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([0.0, 2.0, 1.0])
    >>> psgrad.per_sample_grads(fn, params, (x, y))
    {'w': tensor([[2., 0.],
            [0., 0.],
            [4., 4.]]), 'b': tensor([2., 0., 4.])}

    The same numbers as `vmap(grad(fn), in_dims=(None, 0))(params, batch)` up to rounding, at about the
    price of one ordinary backward pass; it also answers where that expression refuses (data-dependent
    branches, dropout as it stands, batch norm in training, old-style autograd Functions).

    - Pure: nothing is set on a tensor or a module, no buffer is changed, an exception leaves no trace.
    - The result is not attached to the autograd graph. Inside a torch.func transform (`grad` of a
      function that calls this one, `vmap`, `jacrev` ...) it is differentiable like any other function.
    - `chunk_size` and `max_bytes` change memory and time, never the answer (random numbers apart: under a
      seed they repeat for the same chunk size).
    - A parameter that `fn` does not use gets zeros; where it uses none at all, an `UnusedParametersWarning`
      says so. An empty batch gives `(0, *shape)`.
    - Where even vmap refuses, samples run one by one, with a `FallbackWarning` that names the reason.

    Args:
        fn: `fn(params, sample) -> loss`, a tensor with one element; with `has_aux`, `(loss, aux)`.
        params: a pytree of floating-point tensors, just those to differentiate.
        batch: a pytree of tensors, each with the samples along its `in_dims` axis.
        in_dims: the sample axis, an int or a pytree prefix of `batch`; None shares a leaf between samples.
        has_aux: `fn` returns `(loss, aux)`; aux comes back with a leading sample axis.
        return_value: the losses come back too.
        chunk_size: how many samples to run at once; None runs all.
        max_bytes: a bound on what the call allocates beyond its inputs and its result: bytes, a size such as
            "500MB" or "1.5GiB", or a fraction, such as 0.5, of what the params' device has free at the call. The
            chunk size is worked out from shapes, once for samples of a shape: keep `fn` from call to call.
            Inside a torch.func transform it has no effect.
        randomness: "different": each sample draws its own random numbers; "same": all share one draw;
            "error": drawing is refused.
        progress: show a bar over samples on stderr, by tqdm where it is installed. It moves on with each chunk, and
            with each sample where they run one by one; a sample counts as often as it has to run. Inside a
            torch.func transform there is none.
        out: a pytree of tensors like the result, written in place and returned. Without it the memory of a large
            result on a CPU is kept for the next one, once the caller has let go of it: see `empty_cache`.

    Returns:
        A pytree like `params`, leaves `(N, *shape)` with the parameter's dtype and device. With
        `return_value` `(grads, values)`, with `has_aux` `(grads, aux)`, with both
        `(grads, (values, aux))`.

    Raises:
        ArgumentError, ArgumentTypeError: an argument, or what `fn` returns, does not fit; the message
            names the path and the remedy.
        UnsupportedOpError: an op uses a parameter in a way that has no per-sample gradient.
    """
    problem = validated(
        fn, params, batch, in_dims=in_dims, randomness=randomness, has_aux=has_aux, save_memory=max_bytes is not None
    )
    buffers = _buffers(out, problem) if out is not None else None
    quantity = Grads(buffers)
    step = plan(quantity, problem, chunk_size, max_bytes)
    assert isinstance(step, int)
    if is_nested():
        grads, outcome = composed(problem, step or None)
    elif problem.n == 0:
        grads, outcome = buffers or [p.new_empty(0, *p.shape) for p in problem.params], no_outcome(problem)
    else:
        with differentiating(problem):
            grads, outcome = fold(quantity, problem, step, "per_sample_grads" if progress else None)
    if buffers is not None:
        for target, rows in zip(optree.tree_leaves(out), grads, strict=True):
            if not (target.is_contiguous() and target.data_ptr() == rows.data_ptr()):
                target.copy_(rows)
        result = out
    else:
        result = problem.params_spec.unflatten(grads)
    if not has_aux:
        return (result, outcome.values) if return_value else result
    assert outcome.aux_spec is not None
    aux = optree.tree_unflatten(outcome.aux_spec, outcome.aux)
    return result, (outcome.values, aux) if return_value else aux


@dataclass(eq=False)
class Grads(Quantity[list[Any], list[Tensor]]):
    """The gradients of all samples, written into `buffers` where they are given."""

    name = "grads"
    buffers: list[Tensor] | None = None

    def start(self, whole: Problem, step: int) -> list[Any]:
        if self.buffers is not None:
            return list(self.buffers)
        if step < whole.n:
            return [warm_memory.empty((whole.n, *p.shape), p) for p in whole.params]
        return []  # the collector's own

    def add(self, state: list[Any], rows: slice, chunk: Problem, run: Run) -> Outcome:
        """The rows of a chunk, straight into the result; by way of memory of their own where samples part ways."""
        targets = [t[rows] for t in state] if state else []
        places: list[Tensor | None] = []
        outcomes: list[Outcome] = []
        for group in run(chunk, lambda part: DenseCollector(part, targets if part is chunk else ())):
            found = group.collector.result()
            places.append(group.places)
            outcomes.append(group.outcome)
            if group.places is None:
                if not state:
                    state.extend(found)
                return group.outcome
            if not state:
                state.extend(warm_memory.empty((chunk.n, *p.shape), p) for p in chunk.params)
            for target, own in zip(targets or state, found, strict=True):
                target.index_copy_(0, group.places.to(target.device), own)
        return join(outcomes, places)

    def rehearsal(self) -> "Grads":
        return Grads()

    def row_bytes(self, whole: Problem) -> int:
        return sum(p.numel() * p.element_size() for p in whole.params)


def _buffers(out: Any, problem: Problem) -> list[Tensor]:
    """`out` checked, as contiguous tensors to write into."""
    leaves, spec = flatten(out)
    if spec != problem.params_spec:
        raise ArgumentError(
            f"out has another structure than params: {differences(spec, problem.params_spec, 'out')}\n"
            "  give a tensor (N, *shape) for every parameter."
        )
    buffers = []
    for name, p, t in zip(problem.names, problem.params, leaves, strict=True):
        path, want = name.replace("params", "out", 1), (problem.n, *p.shape)
        if not isinstance(t, Tensor):
            raise ArgumentTypeError(f"{path} is a {type(t).__name__}, not a tensor\n  give a tensor of shape {want}.")
        if tuple(t.shape) != want or t.dtype != p.dtype or t.device != p.device:
            raise ArgumentError(
                f"{path} has shape {tuple(t.shape)}, dtype {t.dtype}, device {t.device}\n"
                f"  the gradients have shape {want}, dtype {p.dtype}, device {p.device}."
            )
        if t.requires_grad:
            raise ArgumentError(f"{path} requires grad, and cannot be written in place\n  give out.detach().")
        if t.is_inference() and not torch.is_inference_mode_enabled():
            raise ArgumentError(
                f"{path} was made in inference mode, and cannot be written outside it\n  clone it first."
            )
        if not is_distinct(t):
            raise ArgumentError(
                f"{path} has several numbers at one place in memory\n  give a tensor that is not expanded: clone it."
            )
        with torch.inference_mode(False):
            direct = t.is_contiguous() and not t.is_inference()
            buffers.append(t.detach() if direct else torch.empty(want, dtype=t.dtype, device=t.device))
    if not is_nested():  # inside a transform tensors do not say where their memory is
        _refuse_overlap(leaves, problem)
    return buffers


def _refuse_overlap(out: list[Tensor], problem: Problem) -> None:
    """Gradients must be written neither over what is read, nor over each other."""
    storages = [storage_of(t) for t in out]
    read = [*problem.params, *(t for t in problem.batch if _is_strided(t))]
    if len(set(storages)) == len(out) and not any(storage_of(t) in storages for t in read):  # as it nearly always is
        return
    names = [name.replace("params", "out", 1) for name in problem.names]
    for storage in set(storages):
        here = [i for i, own in enumerate(storages) if own == storage]
        clash = first_clash([out[i] for i in here])
        if clash is not None:
            a, b = (names[here[k]] for k in clash)
            raise ArgumentError(f"{b} shares memory with {a}\n  give each gradient memory of its own.")
        others = [*zip(problem.names, problem.params, strict=True)]
        others += zip(paths(problem.batch_spec, "batch"), problem.batch, strict=True)
        for name, t in others:
            if not _is_strided(t) or storage_of(t) != storage:
                continue
            for i in here:
                if first_clash([out[i], t]) is not None:
                    raise ArgumentError(
                        f"{names[i]} shares memory with {name}, which would be overwritten\n"
                        "  give the gradients memory of their own."
                    )


def _is_strided(t: Any) -> bool:
    """Whether `t` is a tensor with a storage, as sparse ones are not."""
    return isinstance(t, Tensor) and t.layout is torch.strided
