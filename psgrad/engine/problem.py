"""One call, validated: flat tensors, their paths, and how to run `fn` on them."""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..errors import ArgumentError, ArgumentTypeError
from ..torch_ import levels

Index = slice | Tensor


class Sampled(NamedTuple):
    """What `fn` gave for one sample, or under vmap for each: the loss, and aux as flat tensors."""

    loss: Tensor
    aux: list[Tensor]
    aux_spec: optree.PyTreeSpec | None


@dataclass(eq=False, slots=True)  # not frozen, which would cost 10 us a call; nobody changes one
class Problem:
    """`fn` over N samples: `params` and `batch` as flat lists, a batch leaf's sample axis in front."""

    fn: Callable[..., Any]
    params: list[Tensor]
    params_spec: optree.PyTreeSpec
    batch: list[Any]
    batched: list[bool]  # whether a leaf of `batch` has the sample axis
    batch_spec: optree.PyTreeSpec
    n: int
    randomness: str
    has_aux: bool
    draws_from: Any = None  # the generators' states when all samples are to share one draw
    own_batch: bool = False  # the batch is a copy that `fn` may change
    frugal: bool = False  # memory counts before time
    lasting: bool = False  # factors outlive the call, whatever happens to the parameters
    seed: Tensor | None = None  # (N,): what each loss counts in the backward; None: 1
    reached: list[bool] = field(default_factory=list)  # not empty: some parameter had a gradient; all parts share it

    def copied(self) -> "Problem":
        """The same with a batch that `fn` may change."""
        return replace(self, batch=[t.clone() if isinstance(t, Tensor) else t for t in self.batch], own_batch=True)

    def name(self, i: int) -> str:
        """The path of parameter i."""
        return self.names[i]

    @property
    def names(self) -> list[str]:
        """The paths of all parameters; worked out when asked for, which is seldom."""
        return paths(self.params_spec, "params")

    @property
    def requires_grad(self) -> bool:
        """Whether a tensor of it is in the autograd graph."""
        return any(isinstance(t, Tensor) and t.requires_grad for t in (*self.params, *self.batch))

    def rows(self, index: Index) -> "Problem":
        """The same for some of the samples only."""
        take = (lambda t: t[index]) if isinstance(index, slice) else (lambda t: t.index_select(0, index.to(t.device)))
        batch = [take(t) if b else t for t, b in zip(self.batch, self.batched, strict=True)]
        n = len(range(*index.indices(self.n))) if isinstance(index, slice) else len(index)
        return replace(self, batch=batch, n=n, seed=None if self.seed is None else take(self.seed))

    def sample(self, i: int) -> list[Any]:
        """The batch leaves of sample i, without the sample axis."""
        return [t[i] if b else t for t, b in zip(self.batch, self.batched, strict=True)]

    def call(self, params: Sequence[Tensor], sample: Sequence[Any], mode: Any = None) -> Sampled:
        """`fn` once, on flat leaves, under `mode` where one is given; its output checked."""
        held, one = self.params_spec.unflatten(params), self.batch_spec.unflatten(sample)
        if mode is None:
            out = self.fn(held, one)
        else:
            with mode:
                out = self.fn(held, one)
        aux: Any = None
        if self.has_aux:
            if not (isinstance(out, tuple) and len(out) == 2):
                raise ArgumentTypeError(
                    f"fn must return (loss, aux) with has_aux=True, but returned {_type(out)}\n"
                    "  return the two as a tuple, or drop has_aux."
                )
            out, aux = out
        loss = _scalar(out, self.has_aux)
        if not self.has_aux:
            return Sampled(loss, [], None)
        leaves, spec = optree.tree_flatten(aux)
        return Sampled(loss, [_aux_leaf(a, i, spec) for i, a in enumerate(leaves)], spec)


def _type(value: object) -> str:
    return "nothing (None)" if value is None else f"a {type(value).__name__}"


def _scalar(loss: Any, has_aux: bool) -> Tensor:
    """The loss as a tensor without axes; one of shape (1,) or (1, 1) counts as a scalar."""
    if not isinstance(loss, Tensor):
        also = "" if has_aux or not isinstance(loss, tuple) else " (with has_aux=True it may return (loss, aux))"
        raise ArgumentTypeError(
            f"fn must return the loss of one sample as a tensor, but returned {_type(loss)}{also}\n"
            "  return a tensor with one element."
        )
    if loss.numel() != 1:
        raise ArgumentError(
            f"fn must return one number per sample, but its loss has shape {tuple(loss.shape)}\n"
            "  reduce it, for example with .mean() or .sum(); fn sees one sample, without the batch axis."
        )
    if not loss.is_floating_point():
        raise ArgumentTypeError(
            f"fn must return a real loss, but its dtype is {loss.dtype}\n  return a floating-point tensor."
        )
    return loss.reshape(()) if loss.dim() else loss


def _aux_leaf(leaf: Any, i: int, spec: optree.PyTreeSpec) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf.detach()
    if isinstance(leaf, (bool, int, float)):
        return torch.as_tensor(leaf)
    where = spec.accessors()[i].codify("aux")
    raise ArgumentTypeError(
        f"{where} is {_type(leaf)}, not a tensor or a number\n  aux travels back per sample: return tensors only."
    )


# ---- making one ---------------------------------------------------------------------------------------


def make(
    fn: Callable[..., Any],
    params: Any,
    batch: Any,
    *,
    in_dims: Any,
    randomness: str,
    has_aux: bool = False,
    attached: bool = False,
    frugal: bool = False,
) -> Problem:
    """Check the arguments of a public function and lay them out; `attached` leaves them in the autograd graph."""
    if not callable(fn):
        raise ArgumentTypeError(f"fn is {_type(fn)}, not a function\n  give fn(params, sample) -> loss.")
    if randomness not in ("different", "same", "error"):
        raise ArgumentError(
            f'randomness={randomness!r} is not one of "different", "same", "error"\n'
            "  different: each sample draws its own; same: all share one draw; error: drawing is refused."
        )
    inside = levels.current_level() is not None  # somebody else's transform: they may be differentiating us
    own = (lambda t: t) if attached or inside else _own
    leaves, params_spec = flat_params(params)
    batch_leaves, batched, batch_spec, n = _flat_batch(batch, in_dims, own)
    leaves = [own(leaf) for leaf in leaves]
    start = generators(leaves) if randomness == "same" else None
    problem = Problem(fn, leaves, params_spec, batch_leaves, batched, batch_spec, n, randomness, has_aux, start)
    problem.frugal = frugal
    return problem


def generators(params: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    """The states of the default generators that `fn` may draw from."""
    states = {_CPU: torch.default_generator.get_state()}
    for p in params:
        if not p.is_cpu and not p.is_meta and p.device not in states:
            states[p.device] = torch.get_device_module(p.device).get_rng_state(p.device)
    return states


_CPU = torch.device("cpu")


def rewind(states: dict[torch.device, Tensor]) -> None:
    """Put the default generators back."""
    for device, state in states.items():
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)


def check_positive(name: str, value: object) -> None:
    """An option that is a positive int or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ArgumentError(f"{name}={value!r} is not a positive int\n  give one, or None for no bound.")


def _own(t: Tensor) -> Tensor:
    """`t` without graph, and usable in autograd even where it was made in inference mode."""
    if not t.is_inference():
        return t.detach() if t.requires_grad else t
    with torch.inference_mode(False):
        return t.clone()


def paths(spec: optree.PyTreeSpec, root: str) -> list[str]:
    """How to write each leaf of a tree called `root`: params['tok']['weight']."""
    return [accessor.codify(root) for accessor in spec.accessors()]


def flat_params(params: Any) -> tuple[list[Tensor], optree.PyTreeSpec]:
    leaves, spec = optree.tree_flatten(params)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            remedy = "params holds just what is differentiated: let fn close over the rest."
            if isinstance(leaf, (torch.nn.Module, Iterator)):  # such as model.parameters()
                remedy = "give dict(model.named_parameters()), or what from_module returns."
            raise ArgumentTypeError(f"{paths(spec, 'params')[i]} is {_type(leaf)}, not a tensor\n  {remedy}")
        if type(leaf) is not Tensor and _is_dtensor(leaf):
            raise ArgumentTypeError(
                f"{paths(spec, 'params')[i]} is a DTensor, which is not supported\n"
                "  give its full_tensor(), or its to_local()."
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


def _is_dtensor(t: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # where nobody has loaded it, there are none
    return module is not None and isinstance(t, module.DTensor)


def _is_sampled(leaf: Any, dim: Any) -> bool:
    return isinstance(leaf, Tensor) and type(dim) is int and -leaf.dim() <= dim < leaf.dim()


def _flat_batch(
    batch: Any, in_dims: Any, own: Callable[[Tensor], Tensor]
) -> tuple[list[Any], list[bool], optree.PyTreeSpec, int]:
    leaves, spec = optree.tree_flatten(batch, none_is_leaf=True)
    if type(in_dims) is int and in_dims == 0:
        sizes = [t.shape[0] if isinstance(t, Tensor) and t.dim() else -1 for t in leaves]
        if sizes and min(sizes) == max(sizes) >= 0:  # as most batches are
            return [own(t) for t in leaves], [True] * len(leaves), spec, sizes[0]
    try:
        whole = type(in_dims) is int
        dims = [in_dims] * len(leaves) if whole else optree.broadcast_prefix(in_dims, batch, none_is_leaf=True)
    except (ValueError, TypeError) as error:
        raise ArgumentError(
            f"in_dims={in_dims!r} does not fit the batch\n"
            f"  give one int, or a pytree prefix of the batch as in torch.vmap ({str(error).splitlines()[0]})."
        ) from None
    moved: list[Any] = []
    lengths: dict[int, int] = {}
    for i, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if leaf is None or dim is None:
            moved.append(own(leaf) if isinstance(leaf, Tensor) else leaf)
            continue
        name = paths(spec, "batch")[i] if not _is_sampled(leaf, dim) else ""
        if not isinstance(dim, int) or isinstance(dim, bool):
            raise ArgumentTypeError(f"in_dims for {name} is {_type(dim)}\n  give an int, or None for a shared leaf.")
        if not isinstance(leaf, Tensor):
            raise ArgumentTypeError(
                f"{name} is {_type(leaf)}, not a tensor\n"
                "  make it a tensor with one row per sample, or give it in_dims=None: the same for all samples."
            )
        if not -leaf.dim() <= dim < leaf.dim():
            raise ArgumentError(
                f"{name} has shape {tuple(leaf.shape)}, which has no axis {dim}\n"
                "  the sample axis is in_dims (0 unless given); in_dims=None shares a leaf between all samples."
            )
        lengths[i] = leaf.shape[dim]
        moved.append(own(leaf) if dim == 0 else own(leaf).movedim(dim, 0))
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
