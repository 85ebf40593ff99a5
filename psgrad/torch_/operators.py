"""Operators of torch.ops as a mode sees them called, and the custom ones of torch.library."""

from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

Overload = OpOverload  # torch.ops.aten.mul.Tensor
Packet = OpOverloadPacket  # torch.ops.aten.mul: all its overloads
CustomOp = CustomOpDef  # what the decorator torch.library.custom_op returns; has one overload
HigherOrder = HigherOrderOperator  # torch.cond and its kin


def overload_of(packet: Any, args: Any, kwargs: Any) -> Any:
    """The overload of an op that a call with these arguments means; RuntimeError where there is none."""
    names = packet.overloads()
    if len(names) == 1:
        return getattr(packet, names[0])
    return getattr(packet, torch._C._jit_resolve_packet(packet._qualified_op_name, *args, **kwargs))


def packet_of(overload: Any) -> Any:
    """The op that an overload belongs to."""
    return overload.overloadpacket


def overload_of_custom_op(op: Any) -> Any:
    """What a custom op calls."""
    return op._opoverload


_TORCHS = frozenset(["aten", "prim", "prims", "quantized", "_c10d_functional", "higher_order"])


def is_custom(func: Any) -> bool:
    """Whether `func` is an operator of others, by torch.library."""
    if isinstance(func, CustomOp):
        return True
    if isinstance(func, OpOverload):
        return func.namespace not in _TORCHS
    return isinstance(func, OpOverloadPacket) and str(func).partition(".")[0] not in _TORCHS


def mutates(func: Any) -> bool:
    """Whether an operator changes one of its arguments in place."""
    if isinstance(func, CustomOp):
        func = func._opoverload
    overloads = [getattr(func, name) for name in func.overloads()] if isinstance(func, OpOverloadPacket) else [func]
    return any(isinstance(op, OpOverload) and op._schema.is_mutable for op in overloads)
