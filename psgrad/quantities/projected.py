"""projected_grads: per-sample gradients made small by a random projection, for stores and kernels of many samples."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..annotations import Group, P, Randomness
from ..engine.problem import Problem, kind_of
from ..engine.validate import check_positive, validated
from ..errors import ArgumentError, ArgumentTypeError
from ..factors.numerics import cast, wide
from ..factors.sketch import Projection
from ..factors.sum import Sum
from ..processes.agreed import agreed
from ..streaming.stream import counted, refuse_inside_transforms, stream
from ..torch_.compiler import uncompiled
from .directions import Directions, directions_of
from .linear import LinearMap, LinearRows
from .named import names_of

Kind = Literal["sketch", "two_sided"]
Projector = Callable[[str, Tensor], Tensor]


@overload
def projected_grads(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    dim: int,
    *,
    seed: int = 0,
    kind: Kind = "sketch",
    projector: Projector | None = None,
    normalize: P | None = None,
    eps: float = 1e-8,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[False] = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    group: Group | None = None,
) -> Tensor: ...
@overload
def projected_grads(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    dim: int,
    *,
    seed: int = 0,
    kind: Kind = "sketch",
    projector: Projector | None = None,
    normalize: P | None = None,
    eps: float = 1e-8,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: Literal[True],
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    group: Group | None = None,
) -> tuple[Tensor, Any]: ...


@uncompiled
@partial(agreed, like_params="normalize")
def projected_grads(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    dim: int,
    *,
    seed: int = 0,
    kind: Kind = "sketch",
    projector: Projector | None = None,
    normalize: Any = None,
    eps: float = 1e-8,
    valid: Tensor | None = None,
    in_dims: Any = 0,
    has_aux: bool = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    group: Any = None,
) -> Any:
    """Every sample's gradient, projected at random onto `dim` numbers whose inner products estimate those of gradients.

    >>> model = torch.nn.Sequential(torch.nn.Linear(20, 100), torch.nn.Tanh(), torch.nn.Linear(100, 3))
    >>> fn, params = psgrad.from_module(model, torch.nn.functional.cross_entropy)
    >>> batch = torch.randn(50, 20), torch.randint(3, (50,))
    >>> rows = psgrad.projected_grads(fn, params, batch, 512)
    >>> exact = psgrad.gram(fn, params, batch)
    >>> rows.shape, bool((rows @ rows.mT - exact).abs().max() < 0.3 * exact.max())
    (torch.Size([50, 512]), True)

    With P the projection, E <Pg, Ph> = <g, h> over seeds. P is a function of `seed`, `dim`, `kind` and the shapes of
    params: the same for every chunk size, process, device and machine, so that rows made on different days belong
    together. It is drawn by counting (Philox), and torch's generators are left alone.

    The variance of <Pg, Ph>:

    - a dense matrix of Gaussian numbers: (|g|^2 |h|^2 + <g, h>^2) / dim;
    - `kind="sketch"`: at most the same. Each number of a gradient gets a random sign and one of `dim` places. The
      gradients are written out a few samples at a time (of a large table the rows that are read), which for layers with
      many positions, as in language models, costs as much as the weight gradients that an ordinary backward sums;
    - `kind="two_sided"`: at most the same and 2 (1/p + 1/q + 2/(pq)) times the sum over matrices of |g_i|^2 |h_i|^2,
      where p and q are about the root of `dim`: at dim = 4096 a standard deviation of up to a quarter of a layer's
      |g_i| |h_i|, where a sketch has a fiftieth. Each matrix of more than `dim` numbers goes through random
      signs on both sides, A g B^T, p x q numbers: inputs and output gradients are projected, and nothing else is
      written out. The faster one where samples have one position, as in plain MLPs; the form of LoGra.

    N x P numbers are never held. Sums are taken in float32 at least. A sample whose gradient is not finite has a row
    that is not, and touches no other.

    Args:
        fn, params, batch, in_dims, randomness, chunk_size, max_bytes, progress: as for `per_sample_grads`.
        dim: how many numbers each sample gets.
        seed: which projection, from 0 to 2^64 - 1.
        kind: "sketch" or "two_sided", as above.
        projector: a function of one's own in place of both: `projector(name, grads) -> (n, dim)` for gradients
            (n, *shape) of some samples and one parameter, in float32 at least. It has to be linear; what it gives for
            each parameter is added up. `name` is the key in a flat dict of params, or a path.
        normalize: a pytree like params of second moments, such as Adam's `exp_avg_sq`: gradients are divided by
            sqrt(moment) + eps, number by number, before they are projected, as in LESS.
        eps: see `normalize`.
        valid: (N,) booleans; the other samples do not run, and their rows are 0.
        has_aux: `fn` returns `(loss, aux)`; aux comes back with a leading sample axis, zeros where not `valid`.
        group: processes that share a batch, as for `clipped_grad`. The rows are of this rank's samples, by the same
            projection on all ranks; if a rank raises, all do.

    Returns:
        A tensor (N, dim), in float32 at least; with `has_aux` `(rows, aux)`.
    """
    refuse_inside_transforms("projected_grads")
    problem = validated(
        fn, params, batch, in_dims=in_dims, randomness=randomness, has_aux=has_aux, save_memory=max_bytes is not None
    )
    _check(dim, seed, kind, projector, eps)
    moments = None if normalize is None else _moments(normalize, problem)
    there = counted(problem, valid)
    shown = "projected_grads" if progress else None
    quantity = Projections(dim, seed, kind == "two_sided", projector, moments, eps)
    if group is not None:
        group.expect(dim=dim, seed=seed, kind=kind, eps=eps, normalize=normalize is not None)
    options: dict[str, Any] = {"chunk_size": chunk_size, "max_bytes": max_bytes, "progress": shown, "ranks": group}
    found, outcome = stream(quantity, there.problem, **options)
    return there.with_aux(there.among_zeros(found[0]), outcome)


def _check(dim: Any, seed: Any, kind: Any, projector: Any, eps: Any) -> None:
    if dim is None:
        raise ArgumentTypeError("dim is nothing (None)\n  say how many numbers each sample is to get.")
    check_positive("dim", dim, "say how many numbers each sample is to get.")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise ArgumentError(f"seed={seed!r} is not an int from 0 to 2^64 - 1\n  give one: it says which projection.")
    if kind not in ("sketch", "two_sided"):
        raise ArgumentError(
            f'kind={kind!r} is not one of "sketch", "two_sided"\n'
            "  sketch: the variance of a dense projection; two_sided: faster for samples of one position."
        )
    if projector is not None and not callable(projector):
        raise ArgumentTypeError(
            f"projector is {kind_of(projector)}, not a function\n  give projector(name, grads) -> (n, dim)."
        )
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not eps >= 0:
        raise ArgumentError(f"eps={eps!r} is not a number from 0 on\n  give one: it is added to the root of moments.")


def _moments(normalize: Any, problem: Problem) -> Directions:
    found = directions_of(
        normalize,
        problem.params_spec,
        problem.params,
        "normalize",
        "give moments for every parameter: {name: optimizer.state[p]['exp_avg_sq'] for name, p in named_parameters()}.",
    )
    if not found.single:
        raise ArgumentError(
            "normalize has a leading axis that params do not have\n  give one number for every number of params."
        )
    return found


class Projections(LinearRows):
    """Rows of `dim` numbers: the projections of all parameters' gradients, added up."""

    merges = True

    def __init__(
        self,
        dim: int,
        seed: int,
        two_sided: bool,
        projector: Projector | None,
        moments: Directions | None,
        eps: float,
        rehearsed: bool = False,
    ) -> None:
        self.options = dim, seed, two_sided, projector, moments, eps
        self.width, self.rehearsed = dim, rehearsed
        scaled = None if moments is None else [(t.dtype, t.stride()) for t in moments.leaves]
        self.name = f"projected {dim} {two_sided} {projector is None} {scaled}"

    def linear_map(self, whole: Problem) -> LinearMap:
        dim, seed, two_sided, projector, moments, eps = self.options
        dtypes, names = [wide(p.dtype) for p in whole.params], names_of(whole.params_spec)
        if self.rehearsed and moments is not None:
            moments = moments.empty()

        def scale_of(i: int) -> Tensor | None:
            if moments is None:
                return None
            return cast(moments.leaves[i][0], dtypes[i]).sqrt().add_(eps).reciprocal_().contiguous()

        def project(i: int, own: Sum) -> Tensor:
            return Projection(dim, seed, i, two_sided, scale_of(i), dtypes[i])(own)

        def ask(i: int, own: Sum) -> Tensor:
            scale, found = scale_of(i), []
            for _, part in own.tiles():
                grads = cast(part.dense(), dtypes[i])
                grads = grads if scale is None else grads * scale
                if self.rehearsed:
                    found.append(grads.new_empty(len(grads), dim))
                else:
                    assert projector is not None
                    found.append(_checked(projector(names[i], grads), names[i], len(grads), dim))
            return torch.cat(found).to(own.tensors()[-1].device, dtypes[i])

        return project if projector is None else ask

    def rehearsal(self) -> "Projections":
        return Projections(*self.options, rehearsed=True)


def _checked(found: Any, name: str, n: int, dim: int) -> Tensor:
    if not isinstance(found, Tensor) or tuple(found.shape) != (n, dim):
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else kind_of(found)
        raise ArgumentError(
            f"projector returned {what} for {name!r}, not one of shape ({n}, {dim})\n"
            "  give one row of dim numbers for every gradient."
        )
    return found.detach()
