"""One call, validated: flat tensors, their paths, and how to run `fn` on them."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..errors import ArgumentError, ArgumentTypeError
from ..factors import assumptions
from ..torch_ import tracing
from .signals import Unrecordable

Index = slice | Tensor


class Sampled(NamedTuple):
    """What `fn` gave for one sample, or under vmap for each: the loss, or a row of outputs, and aux as flat tensors."""

    loss: Tensor
    aux: list[Tensor]
    aux_spec: optree.PyTreeSpec | None


class Problem(NamedTuple):
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
    save_memory: bool = False  # memory counts before time
    lasting: bool = False  # factors outlive the call, whatever happens to the parameters
    seed: Tensor | None = None  # (N,): what each loss counts in the backward; None: 1
    several: bool = False  # `fn` returns a row of numbers to differentiate, not a loss
    reached: list[bool] = []  # its own list for every call, which all parts share: some parameter had a gradient

    def copied(self) -> "Problem":
        """The same with a batch that `fn` may change."""
        return self._replace(batch=[t.clone() if isinstance(t, Tensor) else t for t in self.batch], own_batch=True)

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
        return self._replace(batch=batch, n=n, seed=None if self.seed is None else take(self.seed))

    def sample(self, i: int) -> list[Any]:
        """The batch leaves of sample i, without the sample axis."""
        return [t[i] if b else t for t, b in zip(self.batch, self.batched, strict=True)]

    def sample_in_words(self) -> str:
        """What `fn` is given, for people: batch[0] torch.float32 (3, 8, 8), batch[1] torch.int64 ()."""
        leaves = zip(paths(self.batch_spec, "batch"), self.batch, self.batched, strict=True)
        return _some([f"{path} {_in_words(t[0] if sampled else t)}" for path, t, sampled in leaves])

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
                    f"fn must return (loss, aux) with has_aux=True, but returned {kind_of(out)}\n"
                    "  return the two as a tuple, or drop has_aux."
                )
            out, aux = out
        loss = out if self.several else _scalar(out, self.has_aux)
        if not self.has_aux:
            return Sampled(loss, [], None)
        leaves, spec = optree.tree_flatten(aux)
        return Sampled(loss, [_aux_leaf(a, i, spec) for i, a in enumerate(leaves)], spec)


def kind_of(value: object) -> str:
    """What an error calls a value that is not what it should be."""
    return "nothing (None)" if value is None else f"a {type(value).__name__}"


def _scalar(loss: Any, has_aux: bool) -> Tensor:
    """The loss as a tensor without axes; one of shape (1,) or (1, 1) counts as a scalar."""
    if not isinstance(loss, Tensor):
        also = "" if has_aux or not isinstance(loss, tuple) else " (with has_aux=True it may return (loss, aux))"
        raise ArgumentTypeError(
            f"fn must return the loss of one sample as a tensor, but returned {kind_of(loss)}{also}\n"
            "  return a tensor with one element."
        )
    if loss.numel() != 1:
        raise ArgumentError(
            f"fn must return one number per sample, but its loss has shape {tuple(loss.shape)}\n"
            "  reduce it, for example with .mean() or .sum(); fn sees one sample, without the batch axis.\n"
            "  For every output by itself there are per_sample_jacobians and ntk."
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
        f"{where} is {kind_of(leaf)}, not a tensor or a number\n  aux travels back per sample: return tensors only."
    )


# ---- pytrees as flat lists ------------------------------------------------------------------------------

_TENSORS, _TEXTS = {Tensor}, {str}


def flatten(tree: Any, *, none_is_leaf: bool = False) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves of a tree, and its structure.

    What nearly every call is given, a dict from names to tensors and a tuple of tensors, is not walked: its structure
    depends on the names, or the number of tensors, alone, and is worked out once.
    """
    if type(tree) is dict:
        if set(map(type, tree.values())) == _TENSORS and set(map(type, tree)) == _TEXTS:  # 1 and True are one key
            spec, values = of_names(tuple(tree), none_is_leaf)
            return list(values(tree)), spec
    elif type(tree) is tuple and set(map(type, tree)) == _TENSORS:
        return list(tree), of_count(len(tree), none_is_leaf)
    return optree.tree_flatten(tree, none_is_leaf=none_is_leaf)


@lru_cache(maxsize=256)
def of_names(names: Sequence[str], none_is_leaf: bool) -> tuple[optree.PyTreeSpec, Callable[[Any], Sequence[Any]]]:
    """The structure of a dict with these names, in their order, and what takes its values in the order of leaves."""
    tree: Any = {name: name for name in names}
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=none_is_leaf)
    return spec, itemgetter(*leaves) if len(leaves) > 1 else lambda tree: [tree[leaves[0]]]


@lru_cache(maxsize=256)
def of_count(count: int, none_is_leaf: bool) -> optree.PyTreeSpec:
    """The structure of a tuple of so many tensors."""
    tree: Any = (0,) * count
    return optree.tree_structure(tree, none_is_leaf=none_is_leaf)


def paths(spec: optree.PyTreeSpec, root: str) -> list[str]:
    """How to write each leaf of a tree called `root`: params['tok']['weight']."""
    return [accessor.codify(root) for accessor in spec.accessors()]


def differences(given: optree.PyTreeSpec, wanted: optree.PyTreeSpec, root: str) -> str:
    """Which leaves a tree called `root` lacks, and which it has too many."""
    own, others = paths(given, root), paths(wanted, root)
    lacking, extra = [p for p in others if p not in own], [p for p in own if p not in others]
    said = [f"{verb} {_some(leaves)}" for verb, leaves in (("it lacks", lacking), ("it has", extra)) if leaves]
    return ", ".join(said) or f"{given} is not {wanted}"


def _in_words(leaf: Any) -> str:
    return f"{leaf.dtype} {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"is {kind_of(leaf)}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# ---- random numbers --------------------------------------------------------------------------------------


def generators(params: Sequence[Tensor]) -> dict[torch.device, Tensor]:
    """The states of the default generators that `fn` may draw from."""
    states = {_CPU: torch.default_generator.get_state()}
    for p in params:
        if not p.is_cpu and not p.is_meta and p.device not in states:
            states[p.device] = torch.get_device_module(p.device).get_rng_state(p.device)
    return states


_CPU = torch.device("cpu")


def rewind(states: dict[torch.device, Tensor]) -> None:
    """Put the default generators back.

    A graph of recorded ops could not do that: where numbers have been drawn since, there is none.
    """
    if assumptions.are_noted():
        with tracing.unrecorded():
            now = generators([torch.empty(0, device=device) for device in states])
            if not all(torch.equal(state, now[device]) for device, state in states.items()):
                raise Unrecordable("random numbers would have to be drawn again")
    for device, state in states.items():
        if device.type == "cpu":
            torch.default_generator.set_state(state)
        else:
            torch.get_device_module(device).set_rng_state(state, device)
