"""per_sample_dots: inner products of per-sample gradients with a direction."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import optree
import torch
from torch import Tensor

from ..annotations import Group, P, Randomness
from ..engine.problem import Problem
from ..engine.validate import validated
from ..processes.agreed import agreed
from ..processes.shards import shards_of
from ..streaming.stream import counted, refuse_inside_transforms, stream
from ..torch_.compiler import uncompiled
from .directions import Directions, directions_of
from .linear import LinearMap, LinearRows


@overload
def per_sample_dots(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    direction: Any,
    *,
    per_param: Literal[False] = False,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[False] = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    sharded: Any = None,
    group: Group | None = None,
) -> Tensor: ...
@overload
def per_sample_dots(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    direction: Any,
    *,
    per_param: Literal[True],
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[False] = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    sharded: Any = None,
    group: Group | None = None,
) -> P: ...
@overload
def per_sample_dots(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    direction: Any,
    *,
    per_param: Literal[False] = False,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[True],
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    sharded: Any = None,
    group: Group | None = None,
) -> tuple[Tensor, Any]: ...
@overload
def per_sample_dots(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    direction: Any,
    *,
    per_param: Literal[True],
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[True],
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    sharded: Any = None,
    group: Group | None = None,
) -> tuple[P, Any]: ...


@uncompiled
@partial(agreed, like_params="direction")
def per_sample_dots(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    direction: Any,
    *,
    per_param: bool = False,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: bool = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    sharded: Any = None,
    group: Any = None,
) -> Any:
    """The inner product of every sample's gradient with a direction, at about the price of one backward pass.

    >>> fn = lambda w, x: (w * x).sum()
    >>> x = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    >>> psgrad.per_sample_dots(fn, torch.zeros(2), x, torch.tensor([1.0, 10.0]))
    tensor([43., 20.])
    >>> psgrad.per_sample_dots(fn, torch.zeros(2), x, torch.eye(2))  # two directions
    tensor([[3., 4.],
            [0., 2.]])

    A step of size s along -direction changes the loss of sample n by -s times its number, to first order. With the
    gradient of other samples as the direction these are influences, for data selection and valuation:

    >>> held_out = psgrad.weighted_grad(fn, torch.zeros(2), torch.tensor([[1.0, 1.0]]), torch.ones(1))
    >>> psgrad.per_sample_dots(fn, torch.zeros(2), x, held_out)
    tensor([7., 2.])

    Exact, parameters that are used more than once included; no gradient of a linear layer, convolution or embedding is
    written out for one direction, N x P numbers are never held. Sums are taken in float32 at least. A sample whose
    gradient is not finite has a number that is not finite, and touches no other.

    Args:
        fn, params, batch, in_dims, randomness, chunk_size, max_bytes, progress: as for `per_sample_grads`.
        direction: a pytree like params, of any real dtype; or one whose leaves all have a leading axis of K directions.
        per_param: the products of each parameter's gradients, a pytree like params; they add up to the others.
        valid: (N,) booleans; the other samples do not run, and their numbers are 0.
        has_aux: `fn` returns `(loss, aux)`; aux comes back with a leading sample axis, zeros where not `valid`.
        sharded: parameters in pieces, as for `clipped_grad`, and directions likewise: products of whole gradients.
        group: processes that share a batch, as for `clipped_grad`. The numbers are of this rank's samples; the
            direction is the same on all ranks, and is held whole on each; if a rank raises, all do.

    Returns:
        A tensor (N,), or (N, K) for K directions; with `per_param` a pytree of them; with `has_aux` `(dots, aux)`.

    Raises:
        ArgumentError: direction has another structure than params, or other shapes; its leaves disagree on K.
    """
    refuse_inside_transforms("per_sample_dots")
    problem = validated(
        fn, params, batch, in_dims=in_dims, randomness=randomness, has_aux=has_aux, save_memory=max_bytes is not None
    )
    given = directions_of(direction, problem.params_spec, problem.params)
    there = counted(problem, valid)
    shown = "per_sample_dots" if progress else None
    shards = None if sharded is None else shards_of(sharded, params, max_bytes)
    quantity = Dots(given, per_param or shards is not None)
    options: dict[str, Any] = {"chunk_size": chunk_size, "max_bytes": max_bytes, "progress": shown, "ranks": group}
    found, outcome = stream(quantity, there.problem, **options)
    if shards is not None:
        found = shards.summed(found)
        found = found if per_param else [torch.stack(found).sum(0)]
    rows = [there.among_zeros(given.squeezed(t)) for t in found]
    result = optree.tree_unflatten(problem.params_spec, rows) if per_param else rows[0]
    return there.with_aux(result, outcome)


class Dots(LinearRows):
    """Inner products with each of K directions."""

    def __init__(self, directions: Directions, per_param: bool = False, rehearsed: bool = False) -> None:
        self.directions, self.per_param, self.rehearsed = directions, per_param, rehearsed
        self.width = directions.width
        self.name = f"dots {per_param} {[(t.shape, t.stride(), t.dtype) for t in directions.leaves]}"

    def linear_map(self, whole: Problem) -> LinearMap:
        return self.directions.empty().along if self.rehearsed else self.directions.along

    def rehearsal(self) -> "Dots":
        return Dots(self.directions, self.per_param, rehearsed=True)
