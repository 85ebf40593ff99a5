"""Types that public signatures have in common."""

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch import Tensor
from typing_extensions import TypeVar  # with defaults: people may write FactoredGrads without its parameter

P = TypeVar("P", default=Any)  # params: a tensor, or a tree of them
Norms = TypeVar("Norms", default=Tensor)  # (N,), or a tree of them

Randomness = Literal["different", "same", "error"]
Nonfinite = Literal["raise", "zero", "propagate"]

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    Group: TypeAlias = dist.ProcessGroup | DeviceMesh  # the processes that share a batch
else:
    Group = Any
