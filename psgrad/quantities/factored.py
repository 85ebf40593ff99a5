"""FactoredGrads: per-sample gradients that are not written out, and what can be asked of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Generic, Literal, overload

import optree
import torch
from torch import Tensor

from .. import display
from ..annotations import Nonfinite, P, Randomness
from ..engine.batched import Outcome
from ..engine.problem import Problem, paths
from ..engine.validate import validated
from ..errors import ArgumentError, ArgumentTypeError
from ..factors import plain_data, warm_memory
from ..factors.maps import mapped_shape
from ..factors.numerics import cast, wide, widest
from ..processes.agreed import agreed
from ..streaming.blocks import Block, Meta, add_sums, blocks_joined, gathered, norms_of_block, norms_of_param
from ..streaming.stream import Quantity, Run, blocks_of, metas, refuse_inside_transforms, stream
from ..torch_ import levels
from ..torch_.autograd import in_full_precision
from ..torch_.compiler import uncompiled
from ..torch_.storage import identity_of, storage_of
from .clipping import ClippedGrad, bounds_of, check_nonfinite, clip_weights, finite_of, norms_under, refuse_nonfinite
from .directions import directions_of
from .named import Maps, maps_of


@dataclass(frozen=True, eq=False, repr=False)
class FactoredGrads(Generic[P]):
    """The gradients of N samples, unmaterialised: one forward and one backward, then any number of questions.

    >>> fn = lambda w, x: torch.tanh(w @ x).sum()
    >>> fg = psgrad.factored_grads(fn, torch.ones(3, 2), torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, -1.0]]))
    >>> fg.norms()
    tensor([0.7274, 0.0000, 2.4495])
    >>> fg.clipped_sum(1.0).shape, fg.dots().shape, fg[1:].dense().shape
    (torch.Size([3, 2]), torch.Size([3, 3]), torch.Size([2, 3, 2]))

    Immutable; a pytree node for optree, whose leaves are the tensors it holds. Sums are taken in float32 at
    least. The answers carry no graph, and stay the same whatever happens to params and batch afterwards. Where a
    parameter is used through a function of parameters alone (a weight norm), that function's derivative is taken
    when a question is asked, from copies of what it needs.

    It can be copied, pickled and saved; `torch.load` needs no `weights_only=False`, and heeds `map_location`. Gradients
    behind a function of parameters are written out then.
    """

    _blocks: tuple[Block, ...]
    _metas: tuple[Meta, ...]
    _spec: optree.PyTreeSpec
    _n: int
    values: Tensor  # (N,) losses
    aux: Any = None  # what fn returned besides, with a leading sample axis

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        size, held, dense = sum(prod(m.shape) for m in self._metas), sum(self._held()), sum(self._written_out())
        return f"FactoredGrads({self._n} samples x {size:,} parameters, holding {held:,} bytes; dense {dense:,})"

    @display.safely
    def _repr_html_(self) -> str:
        """What is held of each parameter, beside what writing it out would take."""
        held, dense = self._held(), self._written_out()
        pairs = [
            ("samples", f"{self._n:,}"),
            ("parameters", display.short(sum(prod(m.shape) for m in self._metas))),
            ("held", display.short(sum(held), "B")),
            ("written out", display.short(sum(dense), "B")),
        ]
        if sum(held):
            pairs.append(("written out / held", f"{sum(dense) / sum(held):.3g}"))
        names = display.names_of(self._spec)
        kinds = [
            {type(f).__name__ for block in self._blocks if (own := block.sums[i]) is not None for _, f in own.terms}
            for i in range(len(self._metas))
        ]
        shown = display.largest(dense, "the numbers")
        rows = [
            (
                names[i],
                display.shape(self._metas[i]),
                " + ".join(sorted(kinds[i])) or "zeros",
                display.short(held[i], "B"),
                display.short(dense[i], "B"),
                display.meter(held[i] / dense[i] if dense[i] else 0.0),
            )
            for i in shown.rows
        ]
        head = ("parameter", "shape", "kept as", "held", "written out", "held / written out")
        return display.page("FactoredGrads", display.facts(pairs), display.table(head, rows, left=3, more=shown.more))

    def _held(self) -> list[int]:
        """Bytes that are held of each parameter's gradients; memory that several share counts for the first."""
        seen: set[Any] = set()
        sizes = [0] * len(self._metas)
        for block in self._blocks:
            for i, own in enumerate(block.sums):
                for t in () if own is None else own.tensors():
                    if storage_of(t) not in seen:
                        seen.add(storage_of(t))
                        sizes[i] += t.untyped_storage().nbytes()
        return sizes

    def _written_out(self) -> list[int]:
        """Bytes of each parameter's gradients, were they written out."""
        return [self._n * prod(m.shape) * m.dtype.itemsize for m in self._metas]

    def _tree(self, leaves: Sequence[Any]) -> P:
        tree: Any = optree.tree_unflatten(self._spec, list(leaves))
        return tree  # type: ignore[no-any-return]

    def _gathered(self, lead: tuple[int, ...], quantity: Callable[[Block], Tensor | None]) -> Tensor:
        """Rows of every block at the places of their samples."""
        dtype = widest(*[meta.dtype for meta in self._metas])
        return gathered(self._blocks, lead, quantity, dtype, self._metas[0].device)

    # ---- one number per sample ----------------------------------------------------------------------------

    @overload
    def norms(self, *, per_param: Literal[False] = False) -> Tensor: ...
    @overload
    def norms(self, *, per_param: Literal[True]) -> P: ...
    @overload
    def norms(self, *, per_param: bool = False) -> Any: ...

    def norms(self, *, per_param: bool = False) -> Any:
        """Norms (N,); with `per_param` those of each parameter, a pytree like params."""
        if per_param:
            return self._tree([self._gathered((self._n,), partial(norms_of_param, i)) for i in range(len(self._metas))])
        return self._gathered((self._n,), norms_of_block)

    @overload
    def sq_norms(self, *, per_param: Literal[False] = False) -> Tensor: ...
    @overload
    def sq_norms(self, *, per_param: Literal[True]) -> P: ...
    @overload
    def sq_norms(self, *, per_param: bool = False) -> Any: ...

    def sq_norms(self, *, per_param: bool = False) -> Any:
        """Squared norms (N,); with `per_param` those of each parameter, a pytree like params."""
        found = self.norms(per_param=per_param)
        return optree.tree_map(torch.square, found) if per_param else found.square()

    # ---- one number per parameter -------------------------------------------------------------------------

    def weighted_sum(self, weights: Tensor) -> P:
        """The sum over n of weights[n] times gradient n, a pytree like params.

        A sample with weight 0 does not count, whatever its gradient: not even NaN.
        """
        return self._typed(self._sums([self._weights(weights)] * len(self._metas)))

    def sum(self) -> P:
        """The sum of the gradients, a pytree like params."""
        return self._typed(self._sums(None))

    def mean(self) -> P:
        """The mean of the gradients, a pytree like params."""
        return self._typed([t / self._n for t in self._sums(None)])

    def clipped_sum(self, max_norm: Any, *, nonfinite: Nonfinite = "raise") -> P:
        """The sum of the gradients, each scaled to norm `max_norm` where it is larger: `clipped_grad(...).grad`."""
        return self._clipped(max_norm, nonfinite).grad

    @overload
    def clipped_grad(self, max_norm: float | Tensor, *, nonfinite: Nonfinite = "raise") -> ClippedGrad[P]: ...
    @overload
    def clipped_grad(self, max_norm: Any, *, nonfinite: Nonfinite = "raise") -> ClippedGrad[P, Any]: ...

    def clipped_grad(self, max_norm: Any, *, nonfinite: Nonfinite = "raise") -> ClippedGrad[P, Any]:
        """The clipped sum, norms, values, and the two numbers that private training needs: see `ClippedGrad`.

        `max_norm` is what the function `clipped_grad` takes: a positive number, a pytree prefix of params with a number
        for the parameters below it, or a dict by names of modules. Samples whose gradients are not finite:
        `nonfinite="raise"` names them in an error, `"zero"` leaves them out, `"propagate"` makes the sum NaN.
        """
        return self._clipped(max_norm, nonfinite)

    def _clipped(self, max_norm: Any, nonfinite: Nonfinite) -> ClippedGrad[P, Any]:
        check_nonfinite(nonfinite)
        like = self._tree([self.values] * len(self._metas))  # of which the structure alone counts
        bounds = bounds_of(max_norm, like, len(self._metas))
        for bound in bounds.each:
            _refuse_transformed("max_norm", bound, "clipped_grad")
        if len(bounds.each) == 1:
            norms = [self.norms()]
        else:
            each = [self._gathered((self._n,), partial(norms_of_param, i)) for i in range(len(self._metas))]
            norms = norms_under(each, bounds.group, len(bounds.each))
        finite = finite_of(norms, nonfinite)
        if nonfinite == "raise" and finite is not None:
            refuse_nonfinite(finite)
        weights = [clip_weights(t, bound, finite, nonfinite) for t, bound in zip(norms, bounds.each, strict=True)]
        return ClippedGrad(
            self._typed(self._sums([weights[k] for k in bounds.group])),
            norms[0] if bounds.spec is None else optree.tree_unflatten(bounds.spec, norms),
            self.values,
            self._n if finite is None or nonfinite != "zero" else int(finite.sum()),
            bounds.sensitivity,
        )

    def variance(self) -> P:
        """The unbiased variance over samples of every number of the parameters; NaN for fewer than two samples."""
        mean = [t / self._n for t in self._sums(None)]
        below = self._n - 1 if self._n > 1 else torch.nan
        return self._typed([t / below for t in self._squared_deviations(mean)])

    def _typed(self, leaves: Sequence[Tensor]) -> P:
        return self._tree([cast(t, m.dtype) for t, m in zip(leaves, self._metas, strict=True)])

    def _weights(self, weights: Any) -> Tensor:
        _refuse_transformed("weights", weights, "weighted_grad")
        if not isinstance(weights, Tensor) or tuple(weights.shape) != (self._n,):
            what = (
                f"has shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else f"is a {type(weights).__name__}"
            )
            raise ArgumentError(f"weights {what}, not a tensor of shape ({self._n},)\n  give one number per sample.")
        return weights.detach().to(self._metas[0].device)

    def _sums(self, weights: Sequence[Tensor] | None) -> list[Tensor]:
        """Sums of the gradients of each parameter with its own weights, in the dtype for sums."""
        totals: list[Tensor | None] = [None] * len(self._metas)
        for block in self._blocks:
            add_sums(block, weights, totals)
        return [meta.new() if t is None else t for t, meta in zip(totals, self._metas, strict=True)]

    @in_full_precision
    def _squared_deviations(self, mean: Sequence[Tensor]) -> list[Tensor]:
        """The sums of squared differences from `mean`."""
        totals = [meta.new() for meta in self._metas]
        for block in self._blocks:
            n = self._n if block.places is None else len(block.places)
            for total, own, m in zip(totals, block.sums, mean, strict=True):
                total += n * m.square() if own is None else own.squared_deviations(m)
        return totals

    # ---- more than that -----------------------------------------------------------------------------------

    @overload
    def dots(self, other: Any = None, *, per_param: Literal[False] = False) -> Tensor: ...
    @overload
    def dots(self, other: Any = None, *, per_param: Literal[True]) -> P: ...
    @overload
    def dots(self, other: Any = None, *, per_param: bool = False) -> Any: ...

    def dots(self, other: Any = None, *, per_param: bool = False) -> Any:
        """Inner products of the gradients: with each other, with those of other samples, or with a direction.

        >>> x = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
        >>> fg = psgrad.factored_grads(lambda w, x: (w * x).sum(), torch.zeros(2), x)
        >>> fg.dots()
        tensor([[25.,  8.],
                [ 8.,  4.]])
        >>> fg.dots(torch.tensor([1.0, 10.0]))
        tensor([43., 20.])
        >>> fg[:1].dots(fg[1:].mean())  # how a step down the gradient of some would change the loss of others
        tensor([8.])

        Args:
            other: None: (N, N) with each other. A `FactoredGrads` of M samples: (N, M). A pytree like params: (N,), or
                (N, K) where all its leaves have a leading axis of K directions; no gradient is written out for it.
            per_param: the products of each parameter's gradients, a pytree like params; they add up to the others.
        """
        if other is None:
            other = self
        if isinstance(other, FactoredGrads):
            return self._dots_with(other, per_param)
        remedy = "give a FactoredGrads, or a tensor for every parameter, such as what mean() returns."
        given = directions_of(other, self._spec, self._metas, "other", remedy)
        lead, count = (self._n, given.width), range(len(self._metas))

        def along(i: int, block: Block) -> Tensor | None:
            own = block.sums[i]
            return None if own is None else given.along(i, own)

        if per_param:
            return self._tree([given.squeezed(self._gathered(lead, partial(along, i))) for i in count])
        every = lambda block: added([along(i, block) for i in count])
        return given.squeezed(self._gathered(lead, every))

    def _dots_with(self, other: "FactoredGrads", per_param: bool) -> Any:
        other._check_like(self._spec, self._metas)

        def against(some: slice, block: Block) -> Tensor:
            return other._gathered(
                (other._n, self._n if block.places is None else len(block.places)),
                lambda b: added(
                    [
                        x.dots(y)
                        for x, y in zip(b.sums[some], block.sums[some], strict=True)
                        if x is not None and y is not None
                    ]
                ),
            ).mT

        lead = (self._n, other._n)
        if per_param:
            count = range(len(self._metas))
            return self._tree([self._gathered(lead, partial(against, slice(i, i + 1))) for i in count])
        return self._gathered(lead, partial(against, slice(None)))

    def precondition(self, maps: Mapping[str, Any]) -> "FactoredGrads[P]":
        """The gradients with some parameters' mapped, L g R^T: a preconditioner or a basis of Kronecker form.

        >>> fn = lambda p, x: torch.tanh(p["w"] @ x).sum() + p["b"].sum()
        >>> params, x = {"w": torch.ones(2, 3), "b": torch.ones(2)}, torch.randn(5, 3)
        >>> fg = psgrad.factored_grads(fn, params, x)
        >>> left, right = torch.randn(2, 2), torch.randn(3, 3)
        >>> mapped = fg.precondition({"w": (left, right)})
        >>> torch.allclose(mapped.dense()["w"], left @ fg.dense()["w"] @ right.mT, atol=1e-6)
        True
        >>> small = fg.precondition({"w": (None, torch.randn(1, 3))})  # other sizes: a projection
        >>> small.dots().shape, small.sum()["w"].shape
        (torch.Size([5, 5]), torch.Size([2, 1]))

        The factors are mapped, and no gradient of a linear layer or an embedding is written out. Gradients that have no
        such factors are: those that a parameter has through vmap or a function of parameters, those of convolutions in
        groups.

        Args:
            maps: for the parameters that are to change a pair (L, R), by name: the key in a flat dict of params, such
                as "0.weight", or the path as errors write it, such as "params['a'][0]". Each is a matrix (any, O) or
                (any, I), a vector for a diagonal matrix, or None for the identity. A parameter with more than two axes,
                as of a convolution, counts as the matrix of its first axis and all others; a vector as one column.

        Returns:
            A `FactoredGrads`, whose `values` and `aux` are the same. A parameter that gets another number of rows or
            columns has shape (rows, columns) in the answers.

        Raises:
            ArgumentError: no parameter has that name; a matrix does not fit.
        """
        return self._mapped(maps_of(maps, self._spec, self._metas, "maps"))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "FactoredGrads[P]":
        """The same with every tensor of every factor changed."""
        blocks = tuple(block.each(change) for block in self._blocks)
        return FactoredGrads(blocks, self._metas, self._spec, self._n, self.values, self.aux)

    @in_full_precision
    def _mapped(self, maps: Maps) -> "FactoredGrads[P]":
        metas = list(self._metas)
        for i, sides in maps.items():
            metas[i] = metas[i]._replace(shape=torch.Size(mapped_shape(tuple(metas[i].shape), *sides)))
        blocks = []
        for block in self._blocks:
            sums = list(block.sums)
            for i, sides in maps.items():
                own = sums[i]
                sums[i] = None if own is None else own.mapped(*sides, wide(metas[i].dtype))
            blocks.append(Block(block.places, tuple(sums), block.small))
        return FactoredGrads(tuple(blocks), tuple(metas), self._spec, self._n, self.values, self.aux)

    def _check_like(self, spec: optree.PyTreeSpec, params: Sequence[Meta]) -> None:
        """Raise where these are gradients of other parameters."""
        if self._spec != spec or [m[:2] for m in self._metas] != [m[:2] for m in params]:
            raise ArgumentError("other holds the gradients of other parameters\n  give the same params to both.")

    @in_full_precision
    def dense(self) -> P:
        """The gradients written out: a pytree like params, leaves (N, *shape)."""
        leaves = []
        for i, (shape, dtype, device) in enumerate(self._metas):
            like = torch.empty(0, dtype=dtype, device=device)
            out = warm_memory.empty((self._n, *shape), like)
            for block in self._blocks:
                own = block.sums[i]
                if block.places is None:
                    _ = out.zero_() if own is None else own.dense(out)
                elif own is None:
                    out.index_fill_(0, block.places, 0)
                else:
                    out.index_copy_(0, block.places, own.dense(warm_memory.empty((len(block.places), *shape), like)))
            leaves.append(out)
        return self._tree(leaves)

    def __iter__(self) -> "Iterator[FactoredGrads[P]]":
        return (self[i] for i in range(self._n))

    def __getitem__(self, index: Any) -> "FactoredGrads[P]":
        """The gradients of some samples: an int (kept as one sample), a slice, indices or a mask."""
        chosen = self._chosen(index)
        position = torch.arange(self._n, device=chosen.device)
        blocks = []
        for block in self._blocks:
            places = position if block.places is None else block.places
            local = torch.full((self._n,), -1, device=chosen.device)
            local[places] = torch.arange(len(places), device=chosen.device)
            here = local[chosen]
            where = (here >= 0).nonzero()[:, 0]
            if len(where):
                sums = tuple(None if own is None else own.select(here[where]) for own in block.sums)
                blocks.append(Block(None if len(where) == len(chosen) else where, sums))
        aux = optree.tree_map(lambda t: t[chosen], self.aux)
        return FactoredGrads(tuple(blocks), self._metas, self._spec, len(chosen), self.values[chosen], aux)

    def _chosen(self, index: Any) -> Tensor:
        device = self._metas[0].device
        every = torch.arange(self._n, device=device)
        if isinstance(index, Tensor) and index.dtype == torch.bool and tuple(index.shape) != (self._n,):
            raise ArgumentError(
                f"a mask of shape {tuple(index.shape)} does not fit {self._n} samples\n  give one entry per sample."
            )
        try:
            chosen = every[index.to(device) if isinstance(index, Tensor) else index]
        except (IndexError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"{index!r} does not index {self._n} samples: {error}\n"
                "  give an int, a slice, a tensor of indices or a mask."
            ) from None
        if chosen.dim() > 1:
            raise ArgumentError(
                "samples are indexed along one axis\n  give an int, a slice, a tensor of indices or a mask."
            )
        return chosen.reshape(-1)

    def _of_params(self, index: slice) -> "FactoredGrads | None":
        """The gradients of some parameters, as a list; None where there are none. Aux is left out."""
        metas = self._metas[index]
        if not metas:
            return None
        blocks = [Block(block.places, block.sums[index], block.small) for block in self._blocks]
        spec = optree.tree_structure([0] * len(metas))  # type: ignore[arg-type]
        return FactoredGrads(tuple(blocks), metas, spec, self._n, self.values)

    def to(self, device: Any) -> "FactoredGrads[P]":
        """The same on another device."""
        moved = [block.without_graph().each(lambda t: t.to(device)) for block in self._blocks]
        metas = [m._replace(device=torch.device(device)) for m in self._metas]
        aux = optree.tree_map(lambda t: t.to(device), self.aux)
        return FactoredGrads(tuple(moved), tuple(metas), self._spec, self._n, self.values.to(device), aux)

    # ---- copies and files ---------------------------------------------------------------------------------

    def __copy__(self) -> "FactoredGrads[P]":
        return self  # nobody can change it

    def __getstate__(self) -> dict[str, Any]:
        """Plain data (see plain_data.py), without graphs, and without memory beyond the tensors that are held."""
        blocks = [block.without_graph().each(_Compact()) for block in self._blocks]
        return {
            "format": plain_data.FORMAT,
            "samples": self._n,
            "params": plain_data.plain_spec(self._spec),
            # a tensor says dtype and device, and goes where torch.load's map_location sends it
            "metas": tuple((tuple(m.shape), torch.empty(0, dtype=m.dtype, device=m.device)) for m in self._metas),
            "blocks": tuple((b.places, b.small, tuple(map(plain_data.plain, b.sums))) for b in blocks),
            "values": self.values,
            "aux": self.aux,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.get("format") != plain_data.FORMAT:
            raise plain_data.unreadable(f"its format is {state.get('format')}, not {plain_data.FORMAT}")
        metas = tuple(Meta(torch.Size(shape), like.dtype, like.device) for shape, like in state["metas"])
        blocks = []
        for index, small, sums in state["blocks"]:
            blocks.append(Block(index, tuple(map(plain_data.rebuilt, sums)), small))
        spec = plain_data.rebuilt_spec(state["params"])
        found = FactoredGrads(tuple(blocks), metas, spec, state["samples"], state["values"], state["aux"])
        vars(self).update(vars(found))


FactoredGrads.__module__ = "psgrad"  # as people import it: files name it, and are to be read when our code has moved
torch.serialization.add_safe_globals([FactoredGrads])  # it builds records of a fixed table, and calls nothing


class _Compact:
    """Tensors as they are to be saved: no memory beside their own, and equal views as one."""

    def __init__(self) -> None:
        self.known: dict[Any, Tensor] = {}

    def __call__(self, t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        key = identity_of(storage), t.storage_offset(), t.shape, t.stride(), t.dtype
        if key not in self.known:
            self.known[key] = t if storage.nbytes() <= t.nbytes else t.clone()
        return self.known[key]


def concat(parts: Iterable[FactoredGrads[P]]) -> FactoredGrads[P]:
    """The samples of several FactoredGrads of the same params, behind one another.

    >>> fn = lambda w, x: (w * x).sum()
    >>> batches = torch.tensor([[3.0, 4.0], [0.0, 1.0]]), torch.tensor([[6.0, 8.0]])
    >>> fg = psgrad.concat([psgrad.factored_grads(fn, torch.zeros(2), x) for x in batches])
    >>> len(fg), fg.norms()
    (3, tensor([ 5.,  1., 10.]))

    Nothing is copied but `values` and `aux`. Whether `fn`, and the numbers in params, are the same is up to you: the
    gradients at several steps of a training can be joined, too.

    Args:
        parts: what `factored_grads` returned, at least one.

    Returns:
        A `FactoredGrads`; `values` and `aux` are joined as well.

    Raises:
        ArgumentError: there is none; or they differ in the structure, shapes, dtypes or devices of params, or in aux.
        ArgumentTypeError: one is something else.
    """
    found = list(parts)
    if not found:
        raise ArgumentError("there is no FactoredGrads to concat\n  give at least one.")
    first = found[0]
    for k, fg in enumerate(found):
        if not isinstance(fg, FactoredGrads):
            raise ArgumentTypeError(
                f"parts[{k}] is a {type(fg).__name__}, not a FactoredGrads\n  give what factored_grads returned."
            )
        _check_alike(first, fg, k)
    there = [fg for fg in found if fg._n] or found[:1]  # of no samples the dtype of values is not known
    return FactoredGrads(
        blocks_joined([(fg._blocks, fg._n) for fg in found], first._metas[0].device),
        first._metas,
        first._spec,
        sum(fg._n for fg in found),
        torch.cat([fg.values for fg in there]),
        optree.tree_map(lambda *leaves: torch.cat(leaves), *(fg.aux for fg in there)),
    )


def _check_alike(first: FactoredGrads, fg: FactoredGrads, k: int) -> None:
    """Refuse to join what does not belong together."""
    remedy = "give the gradients of the same params."
    if fg._spec != first._spec:
        raise ArgumentError(
            f"parts[{k}] has another structure of params than parts[0]\n"
            f"  parts[0]: {first._spec}\n  parts[{k}]: {fg._spec}\n  {remedy}"
        )
    for name, a, b in zip(paths(first._spec, "params"), first._metas, fg._metas, strict=True):
        if a != b:
            said = [f"shape {tuple(m.shape)}, dtype {m.dtype}, device {m.device}" for m in (a, b)]
            raise ArgumentError(
                f"{name} is not the same in parts[0] and parts[{k}]\n"
                f"  parts[0]: {said[0]}\n  parts[{k}]: {said[1]}\n  {remedy}"
            )
    (leaves, spec), (others, other) = optree.tree_flatten(first.aux), optree.tree_flatten(fg.aux)
    if other != spec:
        raise ArgumentError(
            f"parts[{k}] has another structure of aux than parts[0]\n"
            f"  parts[0]: {spec}\n  parts[{k}]: {other}\n  give what one fn returned."
        )
    for name, a, b in zip(paths(spec, "aux"), leaves, others, strict=True):
        if a.shape[1:] != b.shape[1:]:
            raise ArgumentError(
                f"{name} has shape {tuple(a.shape[1:])} in parts[0] and {tuple(b.shape[1:])} in parts[{k}]\n"
                "  give what one fn returned."
            )


for _method in (
    "norms",
    "weighted_sum",
    "sum",
    "mean",
    "clipped_sum",
    "clipped_grad",
    "variance",
    "dots",
    "precondition",
    "dense",
    "to",
    "__getitem__",
):
    uncompiled(getattr(FactoredGrads, _method))


def _refuse_transformed(what: str, t: Any, instead: str) -> None:
    """Transforms do not go through what is kept: a derivative would be 0, without a word."""
    if isinstance(t, Tensor) and levels.is_transformed(t):
        raise ArgumentError(
            f"{what} belongs to a torch.func transform, which does not go through kept gradients\n"
            f"  call psgrad.{instead} there."
        )


def added(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of what is there."""
    total: Tensor | None = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total


# ---- as a pytree node ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Layout:
    """A FactoredGrads but for its tensors."""

    blocks: tuple[Block, ...]  # with ... for each tensor
    metas: tuple[Meta, ...]
    spec: optree.PyTreeSpec
    n: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Layout) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> Any:
        sums = tuple(tuple(None if own is None else own.layout() for own in block.sums) for block in self.blocks)
        return sums, tuple(block.places is None for block in self.blocks), self.metas, self.spec, self.n


def _flatten(fg: FactoredGrads) -> tuple[tuple[Any, ...], _Layout]:
    tensors: list[Tensor] = []

    def taken(t: Tensor) -> Any:
        tensors.append(t)
        return ...

    blocks = tuple(block.each(taken) for block in fg._blocks)
    return (fg.values, fg.aux, *tensors), _Layout(blocks, fg._metas, fg._spec, fg._n)


def _unflatten(layout: _Layout, children: Sequence[Any]) -> FactoredGrads:
    values, aux, *rest = children
    tensors = iter(rest)
    blocks = [block.each(lambda _: next(tensors)) for block in layout.blocks]
    return FactoredGrads(tuple(blocks), layout.metas, layout.spec, layout.n, values, aux)


optree.register_pytree_node(FactoredGrads, _flatten, _unflatten, namespace=optree.registry.__GLOBAL_NAMESPACE)  # type: ignore[arg-type]

# ---- the public function ---------------------------------------------------------------------------------


@uncompiled
@agreed
def factored_grads(
    fn: Callable[..., Any],
    params: P,
    batch: Any,
    *,
    in_dims: Any = 0,
    has_aux: bool = False,
    chunk_size: int | None = None,
    max_bytes: int | float | str | None = None,
    randomness: Randomness = "different",
    progress: bool = False,
    group: Any = None,
) -> FactoredGrads[P]:
    """Per-sample gradients that are not written out, to ask any number of questions of.

    >>> model = torch.nn.Linear(100, 50)
    >>> fn, params = psgrad.from_module(model, torch.nn.functional.cross_entropy)
    >>> fg = psgrad.factored_grads(fn, params, (torch.randn(8, 100), torch.randint(50, (8,))))
    >>> fg
    FactoredGrads(8 samples x 5,050 parameters, holding 4,800 bytes; dense 161,600)
    >>> fg.norms().shape, fg.dots().shape, fg.clipped_sum(1.0)["weight"].shape
    (torch.Size([8]), torch.Size([8, 8]), torch.Size([50, 100]))

    One forward and one backward. What is held are the inputs of layers and the gradients of their outputs, or
    the gradients themselves where these are smaller: for a linear layer N x (I + O) numbers in place of
    N x I x O.

    Args:
        fn, params, batch, in_dims, has_aux, randomness: as for `per_sample_grads`.
        chunk_size: how many samples to run at once. The factors of all chunks are kept.
        max_bytes: a bound on what is allocated beyond inputs and result; the chunk size is worked out from it.
        progress: show a bar over samples, as for `per_sample_grads`.
        group: processes that share a batch, as for `clipped_grad`. The factors are of this rank's samples, and so are
            the answers; if a rank raises, all do.

    Returns:
        A `FactoredGrads`; its `values` are the losses, its `aux` what `fn` returned besides.
    """
    refuse_inside_transforms("factored_grads")
    problem = validated(
        fn,
        params,
        batch,
        in_dims=in_dims,
        randomness=randomness,
        has_aux=has_aux,
        save_memory=max_bytes is not None,
        lasting=True,
    )
    shown = "factored_grads" if progress else None
    found, _ = factored(problem, chunk_size=chunk_size, max_bytes=max_bytes, progress=shown, ranks=group)
    return found if group is not None and group.lockstep is not None else _owned(found, problem)


def factored(problem: Problem, **options: Any) -> tuple[FactoredGrads, Outcome]:
    """The factors of all samples, and what came out besides; they may share memory with the caller's tensors."""
    parts, outcome = stream(Factors(), problem, **options)
    blocks = blocks_joined(parts, problem.params[0].device)
    return _asked(problem, blocks, outcome), outcome


class Factors(Quantity[list[tuple[list[Block], int]], list[tuple[list[Block], int]]]):
    """The factors of all chunks, kept; with the number of samples of each."""

    name = "factored"
    keeps_all = True

    def start(self, whole: Problem, step: int) -> list[tuple[list[Block], int]]:
        return []

    def add(self, state: list[tuple[list[Block], int]], rows: slice, chunk: Problem, run: Run) -> Outcome:
        blocks, outcome = blocks_of(chunk, run)
        state.append((blocks, chunk.n))
        return outcome


def factored_chunk(chunk: Problem, run: Run) -> tuple[FactoredGrads, Outcome]:
    """The factors of a chunk, to ask questions of; and what came out besides, to be joined with that of others."""
    blocks, outcome = blocks_of(chunk, run)
    return _asked(chunk, blocks, outcome), outcome


def _asked(problem: Problem, blocks: Sequence[Block], outcome: Outcome) -> FactoredGrads:
    """What is kept of all samples, and what came out besides, as one object."""
    aux = optree.tree_unflatten(outcome.aux_spec, outcome.aux) if outcome.aux_spec is not None else None
    return FactoredGrads(tuple(blocks), metas(problem), problem.params_spec, problem.n, outcome.values, aux)


def _owned(fg: FactoredGrads, problem: Problem) -> FactoredGrads:
    """The same without memory that is the caller's, who may change it."""
    theirs = {storage_of(t) for t in (*problem.params, *problem.batch) if isinstance(t, Tensor)}

    def owned(t: Tensor) -> Tensor:
        if len(t) > 1 and t.stride(0) == 0:  # the same for all samples: a parameter, or what fn closes over
            return t[:1].clone().expand(t.shape)
        # a single row has no stride that would tell
        return t.clone() if len(t) == 1 or storage_of(t) in theirs else t

    return fg._each(owned)
