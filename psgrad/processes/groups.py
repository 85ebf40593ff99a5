"""Groups of processes, as people name them."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, ArgumentTypeError


def group_of(group: Any) -> "dist.ProcessGroup":
    """The process group that `group` is, or that a mesh with one axis stands for."""
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(
            "group is given, but torch.distributed has no process group yet\n"
            "  call torch.distributed.init_process_group first, in every process; torchrun sets what it reads."
        )
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ArgumentError(
            f"this process, rank {dist.get_rank()}, is not in the group\n  call only where it is a member."
        )
    if _is_mesh(group):
        if group.ndim != 1:
            raise ArgumentError(
                f"group is a mesh with {group.ndim} axes, {group.mesh_dim_names}\n"
                "  give the axis along which samples are split, mesh[name], or torch.distributed.group.WORLD."
            )
        found: dist.ProcessGroup = group.get_group()
        return found
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentTypeError(
            f"group is a {type(group).__name__}, not a process group\n"
            "  give a ProcessGroup, as torch.distributed.group.WORLD is one, or a DeviceMesh with one axis."
        )
    return group


def device_of(group: "dist.ProcessGroup", tensors: list[Tensor]) -> torch.device:
    """Where the ranks of a group keep what they tell each other: where `tensors` are, or where the backend can look."""
    if tensors:
        return tensors[0].device
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu") if accelerator is None or "gloo" in dist.get_backend(group) else accelerator


def _is_mesh(group: object) -> bool:
    mesh = sys.modules.get("torch.distributed.device_mesh")  # where nobody has loaded it, there are none
    return mesh is not None and isinstance(group, mesh.DeviceMesh)
