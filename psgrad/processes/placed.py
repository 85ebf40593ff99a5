"""DTensors among the parameters: whole while `fn` runs, and results placed as they are."""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import optree
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError
from ..torch_.sharding import is_dtensor


class Place(NamedTuple):
    """Where the pieces of a DTensor are."""

    mesh: Any
    placements: tuple[Any, ...]

    def of(self, whole: Tensor) -> Tensor:
        """This rank's piece of a tensor that every rank has whole, as a DTensor; nothing is sent."""
        tensor: Any = sys.modules["torch.distributed.tensor"]
        found: Tensor = tensor.distribute_tensor(whole, self.mesh, self.placements, src_data_rank=None)
        return found

    def summed(self, total: Tensor) -> Tensor:
        """This rank's piece of the sum of what all ranks of the mesh have: a collective."""
        tensor: Any = sys.modules["torch.distributed.tensor"]
        partial = tensor.DTensor.from_local(total, self.mesh, [tensor.Partial()] * self.mesh.ndim, run_check=False)
        found: Tensor = partial.redistribute(self.mesh, self.placements)
        return found


def places_of(leaves: Sequence[Any], names: Sequence[str], group: "dist.ProcessGroup") -> list[Place | None]:
    """The place of each leaf that is a DTensor. All ranks that hold pieces of one have to be in the group."""
    found: list[Place | None] = []
    members = set(dist.get_process_group_ranks(group))
    for leaf, name in zip(leaves, names, strict=True):
        found.append(Place(leaf.device_mesh, tuple(leaf.placements)) if is_dtensor(leaf) else None)
        if (place := found[-1]) is None:
            continue
        if strangers := sorted(set(place.mesh.mesh.flatten().tolist()) - members):
            raise ArgumentError(
                f"{name} is a DTensor with pieces on rank {strangers[0]}, which is not in the group\n"
                "  sums over the group would not be those of that rank: give a group of all ranks of its mesh."
            )
        if any(placement.is_partial() for placement in place.placements):
            raise ArgumentError(
                f"{name} is a DTensor that is still to be summed: {place.placements}\n  redistribute it first."
            )
    return found


def made_whole(tree: Any, places: Sequence[Place | None]) -> Any:
    """A tree with all of every DTensor: a collective of the ranks of its mesh for each."""
    leaves, spec = optree.tree_flatten(tree)
    whole = [t if place is None else t.detach().full_tensor().detach() for t, place in zip(leaves, places, strict=True)]
    return optree.tree_unflatten(spec, whole)
