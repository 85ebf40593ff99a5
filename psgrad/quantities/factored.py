"""FactoredGrads: per-sample gradients that are not written out, and what can be asked of them."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Generic, Literal, NamedTuple, overload

import optree
import torch
from torch import Tensor

from ..annotations import Nonfinite, P
from ..engine.problem import paths
from ..errors import ArgumentError, ArgumentTypeError
from ..factors import huge_pages as _alloc
from ..factors import plain_data as _saved
from ..factors.base import NormMemo
from ..factors.numerics import cast, norm_of_norms, wide, widest
from ..factors.sum import Sum
from ..torch_ import tracing
from ..torch_.compiler import uncompiled
from ..torch_.storage import identity_of, storage_of


class Meta(NamedTuple):
    """A parameter but for its numbers."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def new(self) -> Tensor:
        """Zeros like the parameter, in the dtype for sums."""
        return torch.zeros(self.shape, dtype=wide(self.dtype), device=self.device)


@dataclass(eq=False, slots=True)  # not frozen, which costs; nobody changes one
class Block:
    """Samples that ran together: their places, and what is kept of each parameter's gradients."""

    index: Tensor | None  # (n,) among all samples; None: all, in order
    sums: tuple[Sum | None, ...]  # None: all gradients are zero
    small: bool = False  # so little is held that the order of sums does not matter

    def each(self, change: Callable[[Tensor], Tensor]) -> "Block":
        index = None if self.index is None else change(self.index)
        return Block(index, tuple(None if own is None else own.each(change) for own in self.sums), self.small)

    def without_graph(self) -> "Block":
        """The same, with gradients that are still to be pulled back written out."""
        return Block(self.index, tuple(None if own is None else own.without_graph() for own in self.sums), self.small)


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
        held = sum({storage_of(t): t.untyped_storage().nbytes() for t in self._tensors()}.values())
        size = sum(prod(m.shape) for m in self._metas)
        dense = self._n * sum(prod(m.shape) * m.dtype.itemsize for m in self._metas)
        return f"FactoredGrads({self._n} samples x {size:,} parameters, holding {held:,} bytes; dense {dense:,})"

    def _tensors(self) -> list[Tensor]:
        return [t for block in self._blocks for own in block.sums if own is not None for t in own.tensors()]

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
        """The sum of the gradients, each scaled to norm `max_norm` where it is larger.

        `max_norm` is what `clipped_grad` takes: a positive number, a pytree prefix of params with a number for the
        parameters below it, or a dict by names of modules. Samples whose gradients are not finite:
        `nonfinite="raise"` names them in an error, `"zero"` leaves them out, `"propagate"` makes the sum NaN.
        """
        check_nonfinite(nonfinite)
        like = self._tree([self.values] * len(self._metas))  # of which the structure alone counts
        bounds, _, group = bounds_of(max_norm, like, len(self._metas))
        if len(bounds) == 1:
            norms = [self.norms()]
        else:
            each = [self._gathered((self._n,), partial(norms_of_param, i)) for i in range(len(self._metas))]
            norms = norms_under(each, group, len(bounds))
        finite = finite_of(norms, nonfinite)
        if nonfinite == "raise" and finite is not None:
            refuse_nonfinite(finite)
        weights = [clip_weights(t, bound, finite, nonfinite) for t, bound in zip(norms, bounds, strict=True)]
        return self._typed(self._sums([weights[k] for k in group]))

    def variance(self) -> P:
        """The unbiased variance over samples of every number of the parameters; NaN for fewer than two samples."""
        mean = [t / self._n for t in self._sums(None)]
        return self._typed([t / (self._n - 1) if self._n > 1 else t * torch.nan for t in self._spread(mean)])

    def _typed(self, leaves: Sequence[Tensor]) -> P:
        return self._tree([cast(t, m.dtype) for t, m in zip(leaves, self._metas, strict=True)])

    def _weights(self, weights: Any) -> Tensor:
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

    def _spread(self, mean: Sequence[Tensor]) -> list[Tensor]:
        """The sums of squared differences from `mean`."""
        totals = [meta.new() for meta in self._metas]
        for block in self._blocks:
            n = self._n if block.index is None else len(block.index)
            for total, own, m in zip(totals, block.sums, mean, strict=True):
                total += n * m.square() if own is None else own.squared_deviations(m)
        return totals

    # ---- more than that -----------------------------------------------------------------------------------

    def dots(self, other: "FactoredGrads | None" = None) -> Tensor:
        """Inner products (N, M) of the gradients with those of `other`, or (N, N) with each other."""
        if other is None:
            other = self
        if not isinstance(other, FactoredGrads):
            raise ArgumentTypeError(
                f"other is a {type(other).__name__}, not a FactoredGrads\n  give what factored_grads returned."
            )
        if other._spec != self._spec or [m[:2] for m in other._metas] != [m[:2] for m in self._metas]:
            raise ArgumentError("other holds the gradients of other parameters\n  give the same params to both.")

        def against(block: Block) -> Tensor:
            return other._gathered(
                (other._n, self._n if block.index is None else len(block.index)),
                lambda b: added(
                    [x.dots(y) for x, y in zip(b.sums, block.sums, strict=True) if x is not None and y is not None]
                ),
            ).mT

        return self._gathered((self._n, other._n), against)

    def dense(self) -> P:
        """The gradients written out: a pytree like params, leaves (N, *shape)."""
        leaves = []
        for i, (shape, dtype, device) in enumerate(self._metas):
            like = torch.empty(0, dtype=dtype, device=device)
            out = _alloc.empty((self._n, *shape), like)
            for block in self._blocks:
                own = block.sums[i]
                if block.index is None:
                    _ = out.zero_() if own is None else own.dense(out)
                elif own is None:
                    out.index_fill_(0, block.index, 0)
                else:
                    out.index_copy_(0, block.index, own.dense(_alloc.empty((len(block.index), *shape), like)))
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
            places = position if block.index is None else block.index
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
        """Plain data (see _saved.py), without graphs, and without memory beyond the tensors that are held."""
        blocks = [block.without_graph().each(_Compact()) for block in self._blocks]
        return {
            "format": _saved.FORMAT,
            "samples": self._n,
            "params": _saved.plain_spec(self._spec),
            # a tensor says dtype and device, and goes where torch.load's map_location sends it
            "metas": tuple((tuple(m.shape), torch.empty(0, dtype=m.dtype, device=m.device)) for m in self._metas),
            "blocks": tuple((b.index, b.small, tuple(map(_saved.plain, b.sums))) for b in blocks),
            "values": self.values,
            "aux": self.aux,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.get("format") != _saved.FORMAT:
            raise _saved.unreadable(f"its format is {state.get('format')}, not {_saved.FORMAT}")
        metas = tuple(Meta(torch.Size(shape), like.dtype, like.device) for shape, like in state["metas"])
        blocks = []
        for index, small, sums in state["blocks"]:
            blocks.append(Block(index, tuple(map(_saved.rebuilt, sums)), small))
        spec = _saved.rebuilt_spec(state["params"])
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


def blocks_joined(parts: Sequence[tuple[Sequence[Block], int]], device: torch.device) -> tuple[Block, ...]:
    """The blocks of several sets of samples, given with their sizes, as blocks of all of them behind one another."""
    if len(parts) == 1:
        return tuple(parts[0][0])
    blocks, start = [], 0
    for own, n in parts:
        places = torch.arange(start, start + n, device=device)
        blocks += [Block(places if b.index is None else places[b.index], b.sums, b.small) for b in own]
        start += n
    return tuple(blocks)


for _method in (
    "norms",
    "weighted_sum",
    "sum",
    "mean",
    "clipped_sum",
    "variance",
    "dots",
    "dense",
    "to",
    "__getitem__",
):
    uncompiled(getattr(FactoredGrads, _method))


def gathered(
    blocks: Sequence[Block],
    lead: tuple[int, ...],
    quantity: Callable[[Block], Tensor | None],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Rows of every block at the places of their samples; None are zeros."""
    if len(blocks) == 1 and blocks[0].index is None:
        found = quantity(blocks[0])
        if found is not None:
            return cast(found, dtype)
    out = torch.zeros(lead, dtype=dtype, device=device)
    for block in blocks:
        found = quantity(block)
        if found is not None:
            where = slice(None) if block.index is None else block.index
            out[where] = found.to(dtype)
    return out


def norms_of_param(i: int, block: Block) -> Tensor | None:
    own = block.sums[i]
    return None if own is None else own.norms()


def norms_of_block(block: Block) -> Tensor | None:
    memo = NormMemo()
    return norm_of_all([None if own is None else own.norms_with(memo) for own in block.sums])


def add_sums(
    block: Block, weights: Sequence[Tensor] | None, totals: list[Tensor | None], counted: bool = False
) -> None:
    """The weighted sums of a block's gradients, added to `totals`. `counted`: no weight is 0, or it does not matter.

    Where nobody else holds the block, memory falls with each sum: first those that free more than they take, then the
    others by what they free. For the MLP of the benchmarks a peak of 9.6 MB in place of 14.7.
    """
    index, order = block.index, list(range(len(block.sums)))
    if not block.small:
        order.sort(key=[_freed(own) for own in block.sums].__getitem__)
    sums: list[Sum | None] = list(block.sums)
    del block
    given = w = there = None
    for i in order:
        own, sums[i] = sums[i], None
        if own is None:  # zeros
            continue
        if weights is not None and weights[i] is not given:  # most parameters share their weights
            given = weights[i]
            w, there = _counting(given, index, counted)
        if there is not None:
            own = own.select(there) if len(there) else None
        if own is not None:
            total = totals[i]
            if total is None:
                totals[i] = own.weighted_sum(w)
            else:
                own.add_weighted(total, w)


def _freed(own: Sum | None) -> tuple[bool, int]:
    held = 0 if own is None else sum([t.nbytes for t in own.tensors()])
    return own is not None and held < 4 * prod(own.whole), -held


def _counting(w: Tensor, index: Tensor | None, counted: bool) -> tuple[Tensor, Tensor | None]:
    """The weights of a block's samples; where some are 0, those of the others, and which they are."""
    w = w if index is None else w[index]
    if counted or w.is_meta or not bool((w == 0).any()):
        return w, None
    there = w.nonzero()[:, 0]
    return w[there], there


def clip_weights(norms: Tensor, max_norm: Any, finite: Tensor | None, nonfinite: str) -> Tensor:
    """What makes norms at most `max_norm`; samples that are not finite count 0, or NaN to let them through."""
    if not isinstance(max_norm, Tensor):  # which is 2 us cheaper to divide than a number
        max_norm = norms.new_full((), min(max_norm, torch.finfo(norms.dtype).max))
    w = torch.div(max_norm, norms).clamp_(max=1)
    return w if finite is None else w.masked_fill(~finite, torch.nan if nonfinite == "propagate" else 0.0)


def finite_of(norms: Sequence[Tensor], nonfinite: str) -> Tensor | None:
    """Which samples have norms (N,) that are all finite; None: every one."""
    if tracing.can_look(norms[0]):
        if all([math.isfinite(t.sum()) for t in norms]):  # noqa: C419, a third less
            return None
    elif nonfinite != "propagate":
        why, where = "and ops are being recorded", "under make_fx and its like"
        if norms[0].is_meta:
            why, where = "which meta tensors do not have", "for shapes alone"
        raise ArgumentError(f'nonfinite={nonfinite!r} depends on numbers, {why}\n  say nonfinite="propagate" {where}.')
    return torch.stack(list(norms)).isfinite().all(0)


def refuse_nonfinite(finite: Tensor) -> None:
    """Raise for the samples that are not finite, if any."""
    bad = (~finite).nonzero()[:, 0].tolist()
    if bad:
        shown = ", ".join(map(str, bad[:10])) + (f", ... ({len(bad)} in all)" if len(bad) > 10 else "")
        raise ArgumentError(
            f"the gradients of {'samples' if len(bad) > 1 else 'sample'} {shown} are not finite\n"
            '  leave them out with nonfinite="zero", or let them through with nonfinite="propagate".'
        )


def check_nonfinite(nonfinite: object) -> None:
    if nonfinite not in ("raise", "zero", "propagate"):
        raise ArgumentError(
            f'nonfinite={nonfinite!r} is not one of "raise", "zero", "propagate"\n'
            "  raise: an error that names the samples; zero: they do not count; propagate: the sum is NaN."
        )


def check_max_norm(max_norm: Any, where: str = "max_norm") -> Any:
    """A positive number, or a tensor of one."""
    number = isinstance(max_norm, (int, float)) and not isinstance(max_norm, bool)
    if not number and not (isinstance(max_norm, Tensor) and max_norm.numel() == 1 and not max_norm.is_complex()):
        raise ArgumentTypeError(f"{where} is a {type(max_norm).__name__}, not a number\n  give a positive number.")
    if (number or tracing.can_look(max_norm)) and not float(max_norm) > 0:
        raise ArgumentError(f"{where}={float(max_norm)} is not positive\n  give a positive number; inf clips nothing.")
    return max_norm.detach().reshape(()) if isinstance(max_norm, Tensor) else max_norm


def bounds_of(max_norm: Any, params: Any, count: int) -> tuple[list[Any], optree.PyTreeSpec | None, list[int]]:
    """The bounds, their tree where they are one, and which of them each of `count` parameters is under.

    Of `params` only the structure counts.
    """
    if isinstance(max_norm, (float, int)):
        return [check_max_norm(max_norm)], None, [0] * count
    leaves, spec = optree.tree_flatten(max_norm)
    if spec.is_leaf():
        return [check_max_norm(max_norm)], None, [0] * count
    names = paths(spec, "max_norm")
    bounds = [check_max_norm(leaf, name) for leaf, name in zip(leaves, names, strict=True)]
    numbers: Any = optree.tree_unflatten(spec, list(range(len(leaves))))
    if isinstance(max_norm, dict) and all(isinstance(k, int) for k in numbers.values()):
        keys = _flat_keys(params, count)
        if keys is not None:
            return bounds, spec, _by_name(numbers, keys)
    try:
        return bounds, spec, optree.broadcast_prefix(numbers, params)
    except (ValueError, TypeError):
        raise ArgumentError(
            f"max_norm does not fit params\n  max_norm: {spec}\n  params: {optree.tree_structure(params)}\n"
            "  give one number, or a pytree prefix of params."
        ) from None


def _flat_keys(params: Any, count: int) -> list[str] | None:
    """The names of parameters in a dict from name to tensor, in the order of the leaves; None for any other tree."""
    if not isinstance(params, dict) or len(params) != count:
        return None
    tree: Any = params  # of tensors, which optree's types do not know
    keys = [path[0] for path in optree.tree_paths(tree) if len(path) == 1 and isinstance(path[0], str)]
    return keys if len(keys) == count else None


def _by_name(numbers: dict[str, int], names: Sequence[str]) -> list[int]:
    """For parameters called like "encoder.weight": the bound with that name, or with that of a module above."""
    group = []
    for name in names:
        above = [key for key in numbers if name == key or name.startswith(f"{key}.")]
        if not above:
            raise ArgumentError(
                f"max_norm has no bound for {name!r}\n  give one for the parameter, or for a module above it."
            )
        group.append(numbers[max(above, key=len)])
    if unused := [key for key, k in numbers.items() if k not in group]:
        raise ArgumentError(f"max_norm has {unused[0]!r}, under which there is no parameter\n  leave it out.")
    return group


def norms_under(each: Sequence[Tensor], group: Sequence[int], count: int) -> list[Tensor]:
    """Norms (N,) over the parameters under each of `count` bounds, from those of each parameter."""
    under = [[t for t, k in zip(each, group, strict=True) if k == bound] for bound in range(count)]
    return [norm_of_norms(ts) if ts else torch.zeros_like(each[0]) for ts in under]


def norm_of_all(norms: Sequence[Tensor | None]) -> Tensor | None:
    """The norms of all parameters together; None where all gradients are zero."""
    there = [t for t in norms if t is not None]
    if len({t.device for t in there}) > 1:
        there = [t.to(there[0].device) for t in there]
    return norm_of_norms(there) if there else None


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
        return sums, tuple(block.index is None for block in self.blocks), self.metas, self.spec, self.n


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
