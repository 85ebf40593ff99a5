"""The arguments of the public functions: checked, and laid out as a `Problem`."""

from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from operator import attrgetter
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..errors import ArgumentError, ArgumentTypeError
from ..torch_ import levels
from ..torch_.sharding import is_dtensor
from .held import HELD
from .problem import Problem, flatten, generators, kind_of, paths


def is_nested() -> bool:
    """Whether a function that is being differentiated calls us: in a transform, forward_ad, or a loop of ours."""
    return levels.current_level() is not None or HELD.looping > 0 or levels.has_tangents()


def validated(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    in_dims: Any,
    randomness: str,
    has_aux: bool = False,
    attached: bool = False,
    save_memory: bool = False,
    lasting: bool = False,
) -> Problem:
    """Check the arguments of a public function and lay them out; `attached` leaves them in the autograd graph."""
    if not callable(fn):
        raise ArgumentTypeError(f"fn is {kind_of(fn)}, not a function\n  give fn(params, sample) -> loss.")
    if isinstance(fn, torch.nn.Module):
        raise ArgumentTypeError(
            f"fn is a {type(fn).__name__}, a module\n  give fn and params of psgrad.from_module(model, loss)."
        )
    if (check := getattr(fn, "psgrad_check", None)) is not None:
        check(params)
    if randomness not in ("different", "same", "error"):
        raise ArgumentError(
            f'randomness={randomness!r} is not one of "different", "same", "error"\n'
            "  different: each sample draws its own; same: all share one draw; error: drawing is refused."
        )
    leaves, params_spec = flat_params(params)
    batch_leaves, batched, batch_spec, n = _flat_batch(batch, in_dims)
    if not attached and not is_nested():
        tensors = leaves + batch_leaves if all(batched) else [t for t in leaves + batch_leaves if isinstance(t, Tensor)]
        if any(map(_requires_grad, tensors)) or any(map(_is_inference, tensors)):  # seldom; small calls notice the loop
            leaves, batch_leaves = list(map(_own, leaves)), list(map(_own, batch_leaves))
    start = generators(leaves) if randomness == "same" else None
    return Problem(
        fn,
        leaves,
        params_spec,
        batch_leaves,
        batched,
        batch_spec,
        n,
        randomness,
        has_aux,
        draws_from=start,
        save_memory=save_memory,
        lasting=lasting,
        reached=[],
    )


def check_positive(name: str, value: object, remedy: str = "give one, or None for no bound.") -> None:
    """An option that is a positive int or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ArgumentError(f"{name}={value!r} is not a positive int\n  {remedy}")


_is_inference: Callable[[Tensor], bool] = Tensor.is_inference
_is_real: Callable[[Tensor], bool] = Tensor.is_floating_point
_size: Callable[[Tensor, int], int] = Tensor.size
_TENSORS = {Tensor}
_requires_grad: Callable[[Tensor], bool] = attrgetter("requires_grad")


def _own(t: Any) -> Any:
    """`t` without graph, and usable in autograd even where it was made in inference mode."""
    if not isinstance(t, Tensor):
        return t
    if not t.is_inference():
        return t.detach() if t.requires_grad else t
    with torch.inference_mode(False):
        return t.clone()


def flat_params(params: Any) -> tuple[list[Tensor], optree.PyTreeSpec]:
    leaves, spec = flatten(params)
    if set(map(type, leaves)) == _TENSORS and all(map(_is_real, leaves)):  # as it nearly always is
        return leaves, spec
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            remedy = "params holds just what is differentiated: let fn close over the rest."
            if isinstance(leaf, (torch.nn.Module, Iterator)):  # such as model.parameters()
                remedy = "give dict(model.named_parameters()), or what from_module returns."
            elif hasattr(leaf, "__array__"):
                remedy = "make it one with torch.as_tensor."
            elif hasattr(leaf, "__dict__"):  # an object of the user's, a dataclass perhaps
                remedy = "give its tensors in a dict, a list, a tuple or a NamedTuple."
            raise ArgumentTypeError(f"{paths(spec, 'params')[i]} is {kind_of(leaf)}, not a tensor\n  {remedy}")
        if is_dtensor(leaf):
            raise ArgumentTypeError(
                f"{paths(spec, 'params')[i]} is a DTensor, and there is no group\n"
                "  say group= with the ranks that hold it, or give its full_tensor(), or its to_local()."
            )
        if not leaf.is_floating_point():
            why = "which has no gradient"
            remedy = "params holds just what is differentiated: let fn close over the rest."
            if leaf.is_complex():
                why, remedy = "which is not supported", "give torch.view_as_real of it, and undo that in fn."
            raise ArgumentTypeError(f"{paths(spec, 'params')[i]} has dtype {leaf.dtype}, {why}\n  {remedy}")
    if not leaves:
        raise ArgumentError("params holds no tensor\n  give a pytree with the tensors to differentiate.")
    return leaves, spec


def _is_sampled(leaf: Any, dim: Any) -> bool:
    return isinstance(leaf, Tensor) and type(dim) is int and -leaf.dim() <= dim < leaf.dim()


def _misfit(dims: optree.PyTreeSpec, batch: optree.PyTreeSpec, path: str = "") -> str:
    """Where in_dims is no prefix of the batch, in words; "" where it is one."""
    if dims.type is None:
        return ""
    if dims.type is not batch.type:
        kinds = ["a leaf" if spec.type is None else f"a {spec.type.__name__}" for spec in (dims, batch)]
        return f"in_dims{path} is {kinds[0]}, batch{path} {kinds[1]}"
    if dims.entries() != batch.entries():
        if issubclass(dims.type, (list, tuple)):
            return f"in_dims{path} has {dims.num_children} entries, batch{path} {batch.num_children}"
        return f"in_dims{path} has the keys {dims.entries()}, batch{path} {batch.entries()}"
    children = zip(dims.entries(), dims.children(), batch.children(), strict=True)
    return next(filter(None, (_misfit(d, b, f"{path}[{entry!r}]") for entry, d, b in children)), "")


def _flat_batch(batch: Any, in_dims: Any) -> tuple[list[Any], list[bool], optree.PyTreeSpec, int]:
    leaves, spec = flatten(batch, none_is_leaf=True)
    if type(in_dims) is int and in_dims == 0:
        try:
            sizes = list(map(_size, leaves, repeat(0)))
        except (TypeError, IndexError):  # no tensor, or one without axes
            sizes = []
        if sizes and min(sizes) == max(sizes):  # as most batches are
            return leaves, [True] * len(leaves), spec, sizes[0]
    try:
        whole = type(in_dims) is int
        dims = [in_dims] * len(leaves) if whole else optree.broadcast_prefix(in_dims, batch, none_is_leaf=True)
    except (ValueError, TypeError) as error:
        dims_spec, whole_spec = (optree.tree_structure(tree, none_is_leaf=True) for tree in (in_dims, batch))
        raise ArgumentError(
            f"in_dims={in_dims!r} does not fit the batch: {_misfit(dims_spec, whole_spec) or error}\n"
            "  give one int, or a pytree prefix of the batch as in torch.vmap."
        ) from None
    moved: list[Any] = []
    lengths: dict[int, int] = {}
    for i, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if leaf is None or dim is None:
            moved.append(leaf)
            continue
        name = paths(spec, "batch")[i] if not _is_sampled(leaf, dim) else ""
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise ArgumentTypeError(f"in_dims for {name} is {kind_of(dim)}\n  give an int, or None for a shared leaf.")
        if not isinstance(leaf, Tensor):
            remedy = "make it a tensor with one row per sample, or give it in_dims=None: the same for all samples."
            if isinstance(leaf, (DataLoader, Dataset, Iterator)):
                remedy = "give one of the batches that a DataLoader makes of it, and call once for each."
            elif isinstance(leaf, Mapping):  # as a tokenizer returns it
                remedy = f"give dict({name}): dicts are taken apart, and other mappings are not."
            raise ArgumentTypeError(f"{name} is {kind_of(leaf)}, not a tensor\n  {remedy}")
        if not -leaf.dim() <= dim < leaf.dim():
            raise ArgumentError(
                f"{name} has shape {tuple(leaf.shape)}, which has no axis {dim}\n"
                "  the sample axis is in_dims (0 unless given); in_dims=None shares a leaf between all samples."
                + (
                    "\n  is the batch a list of samples? stack them: default_collate(batch)."
                    if type(batch) is list
                    else ""
                )
            )
        lengths[i] = leaf.shape[dim]
        moved.append(leaf if dim == 0 else leaf.movedim(dim, 0))
    if not lengths:
        raise ArgumentError(
            "batch has no tensor with a sample axis\n  give at least one tensor, with in_dims other than None."
        )
    if len(set(lengths.values())) > 1:
        names = paths(spec, "batch")
        listed = ", ".join(f"{names[i]} has {length}" for i, length in lengths.items())
        raise ArgumentError(
            f"batch leaves disagree on the number of samples: {listed}\n"
            "  every leaf needs one row per sample along its in_dims axis; in_dims=None shares a leaf."
        )
    n = next(iter(lengths.values()))
    batched = [leaf is not None and dim is not None for leaf, dim in zip(leaves, dims, strict=True)]
    return moved, batched, spec, n
