"""The public functions: check the call, choose a chunk size, run the engine, put the rows together."""

from collections.abc import Callable
from typing import Any, Literal, overload

import optree
import torch
from torch import Tensor

from ..annotations import P, Randomness
from ..engine import ladder as _engine
from ..engine import problem as _problem
from ..engine.collectors import DenseCollector
from ..engine.problem import Problem, paths
from ..errors import ArgumentError, ArgumentTypeError
from ..factors import huge_pages as _alloc
from ..ops import use_rules
from ..streaming import budget as _memory
from ..torch_ import levels
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
    out: P | None = None,
) -> P: ...
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
    out: P | None = None,
) -> tuple[P, Any]: ...


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
        out: a pytree of tensors like the result, written in place and returned; saves the allocation,
            which for large results is most of the time.

    Returns:
        A pytree like `params`, leaves `(N, *shape)` with the parameter's dtype and device. With
        `return_value` `(grads, values)`, with `has_aux` `(grads, aux)`, with both
        `(grads, (values, aux))`.

    Raises:
        ArgumentError, ArgumentTypeError: an argument, or what `fn` returns, does not fit; the message
            names the path and the remedy.
        UnsupportedOpError: an op uses a parameter in a way that has no per-sample gradient.
    """
    problem = _problem.make(
        fn, params, batch, in_dims=in_dims, randomness=randomness, has_aux=has_aux, frugal=max_bytes is not None
    )
    buffers = _buffers(out, problem) if out is not None else None
    step = step_of(problem, chunk_size, max_bytes, grads_work)
    if levels.current_level() is not None:
        grads, outcome = composed(problem, step)
    else:
        with _engine.differentiating(problem):
            grads, outcome = _chunked(problem, step, buffers)
    if buffers is not None:
        for target, rows in zip(optree.tree_leaves(out), grads, strict=True):
            if not (target.is_contiguous() and target.data_ptr() == rows.data_ptr()):
                target.copy_(rows)
        result = out
    else:
        result = optree.tree_unflatten(problem.params_spec, grads)
    if not has_aux:
        return (result, outcome.values) if return_value else result
    assert outcome.aux_spec is not None
    aux = optree.tree_unflatten(outcome.aux_spec, outcome.aux)
    return result, (outcome.values, aux) if return_value else aux


def step_of(
    problem: Problem,
    chunk_size: int | None,
    max_bytes: int | float | str | None,
    work: Callable[[Problem], _memory.Work],
) -> int:
    """How many samples to run at once."""
    if chunk_size is None and max_bytes is None:
        return problem.n
    bound = check_step(problem, chunk_size, max_bytes)
    if bound is not None and problem.n > 0 and levels.current_level() is None:
        return _memory.chunk_size(problem, bound, work)
    return min(chunk_size or problem.n, problem.n)


def check_step(problem: Problem, chunk_size: int | None, max_bytes: int | float | str | None) -> int | None:
    """The two options that say how many samples to run at once, checked; and the bound in bytes."""
    _problem.check_positive("chunk_size", chunk_size)
    bound = _memory.bytes_of(max_bytes, problem.params)
    if chunk_size is not None and bound is not None:
        raise ArgumentError("chunk_size and max_bytes are both given\n  give one: max_bytes works out a chunk size.")
    return bound


def _buffers(out: Any, problem: Problem) -> list[Tensor]:
    """`out` checked, as contiguous tensors to write into."""
    leaves, spec = optree.tree_flatten(out)
    if spec != problem.params_spec:
        raise ArgumentError(f"out has another structure than params\n  params: {problem.params_spec}\n  out: {spec}")
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
    if levels.current_level() is None:  # inside a transform tensors do not say where their memory is
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


def _written(
    problem: Problem, run: _memory.Run, buffers: list[Tensor] | None = None
) -> tuple[list[Tensor], _engine.Outcome]:
    """The gradients of all samples, into `buffers` where they are given."""
    outcomes: list[_engine.Outcome] = []
    places: list[Tensor | None] = []
    whole = buffers or []

    def take(part: "_engine.Part[DenseCollector]") -> None:
        nonlocal whole
        rows = part.sink.result()
        outcomes.append(part.outcome)
        places.append(part.index)
        if part.index is None:
            whole = rows
            return
        whole = whole or [_alloc.empty((problem.n, *p.shape), p) for p in problem.params]
        for target, found in zip(whole, rows, strict=True):
            target.index_copy_(0, part.index.to(target.device), found)

    run(problem, lambda p: DenseCollector(p.params, p.n, buffers if p is problem else None), take)
    return whole, _engine.join(outcomes, places)


def _measured(problem: Problem, run: _memory.Run) -> object:
    """`_written` as a chunk of a larger call does it: into memory that is there."""
    return _written(problem, run, [p.new_empty(problem.n, *p.shape) for p in problem.params])


def grads_work(problem: Problem) -> _memory.Work:
    """per_sample_grads, for those who ask what it allocates."""
    return _memory.Work("grads", _measured, sum(p.numel() * p.element_size() for p in problem.params))


def _chunked(problem: Problem, step: int, buffers: list[Tensor] | None) -> tuple[list[Tensor], _engine.Outcome]:
    """The engine over chunks of `step` samples, each writing its rows of the result."""
    if problem.n == 0:
        return _nothing(problem, buffers)
    if step >= problem.n:
        return _written(problem, _engine.run, buffers)
    whole = buffers or [_alloc.empty((problem.n, *p.shape), p) for p in problem.params]
    outcomes = []
    for start in range(0, problem.n, step):
        rows = slice(start, start + step)
        outcomes.append(_written(problem.rows(rows), _engine.run, [t[rows] for t in whole])[1])
    return whole, _engine.join(outcomes)


def _nothing(problem: Problem, buffers: list[Tensor] | None) -> tuple[list[Tensor], _engine.Outcome]:
    """The answer for no samples."""
    return buffers or [p.new_empty(0, *p.shape) for p in problem.params], _engine.no_outcome(problem)


def composed(problem: Problem, step: int) -> tuple[list[Tensor], _engine.Outcome]:
    """Inside somebody else's transform: `vmap(grad(fn))` with the rules as composable Functions."""
    spec: list[optree.PyTreeSpec | None] = [None]
    batch = [t for t, b in zip(problem.batch, problem.batched, strict=True) if b]

    def loss(params: list[Tensor], rows: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        each = iter(rows)
        sample = [next(each) if b else t for t, b in zip(problem.batch, problem.batched, strict=True)]
        out = problem.call(params, sample)
        spec[0] = out.aux_spec
        return out.loss, out.aux

    per_sample = torch.func.grad_and_value(loss, has_aux=True)
    with use_rules():
        grads, (values, aux) = torch.vmap(
            per_sample, in_dims=(None, 0), randomness=problem.randomness, chunk_size=step or None
        )(problem.params, batch)
    return grads, _engine.Outcome(values, aux, spec[0])
