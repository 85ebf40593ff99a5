"""Parameters that `fn` has in pieces: tensor parallel. The ranks of a group have the same samples."""

from collections.abc import Sequence
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.validate import is_nested
from ..errors import ArgumentError
from .groups import group_of


class Shards:
    """Which parameters are pieces, and of which groups. Their norms are known when all ranks have been asked."""

    def __init__(self, sharded: Any, params: Any) -> None:
        self.groups: list[tuple[dist.ProcessGroup, list[int]]] = []
        for i, group in enumerate(_broadcast(sharded, params)):
            if group is None:
                continue
            found = group_of(group)
            known = next((indices for other, indices in self.groups if other is found), None)
            if known is None:
                self.groups.append((found, [i]))
            else:
                known.append(i)

    def summed(self, each: Sequence[Tensor]) -> list[Tensor]:
        """Numbers of each parameter, all of one shape; those of pieces are summed over the ranks that hold them.

        One all-reduce for each group, in float64.
        """
        found = list(each)
        for group, indices in self.groups:
            own = torch.stack([each[i].double() for i in indices])
            dist.all_reduce(own, group=group)
            for i, t in zip(indices, own, strict=True):
                found[i] = t.to(each[i].dtype)
        return found

    def whole_norms(self, norms: Sequence[Tensor]) -> list[Tensor]:
        """Norms (N,) of each parameter's gradients, with those of pieces replaced by those of the whole."""
        squares = self.summed([t.double().square() for t in norms])  # which float64 has room for
        pieces = {i for _, indices in self.groups for i in indices}
        return [squares[i].sqrt().to(t.dtype) if i in pieces else t for i, t in enumerate(norms)]


def _broadcast(sharded: Any, params: Any) -> list[Any]:
    """The group of each parameter, or None."""
    if isinstance(sharded, dict) and isinstance(params, dict):
        if unknown := sharded.keys() - params.keys():
            raise ArgumentError(f"sharded has {min(unknown)!r}, which params has not\n  leave it out.")
        sharded = {name: sharded.get(name) for name in params}
    try:
        return list(optree.broadcast_prefix(sharded, params, none_is_leaf=True))
    except (ValueError, TypeError):
        raise ArgumentError(
            "sharded does not fit params\n"
            "  give a pytree prefix of params, with a process group for what is in pieces and None for the rest."
        ) from None


def shards_of(sharded: Any, params: Any, max_bytes: object) -> Shards:
    """The pieces among `params`."""
    if is_nested():
        raise ArgumentError(
            "sharded is given inside a torch.func transform\n"
            "  ranks talk about numbers, which are not there yet: call it outside."
        )
    if max_bytes is not None:
        raise ArgumentError(
            "sharded and max_bytes are both given: ranks with pieces of other sizes would run other chunks\n"
            "  give chunk_size, the same on all of them."
        )
    return Shards(sharded, params)
