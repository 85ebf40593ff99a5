"""Operators of torch.ops as a mode sees them called, and the custom ones of torch.library."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

F = TypeVar("F", bound=Callable[..., Any])

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


_TORCHS = frozenset(["aten", "prim", "prims", "quantized", "_c10d_functional", "higher_order", "torch_nn"])


def is_custom(func: Any) -> bool:
    """Whether `func` is an operator of others."""
    overloads = _overloads(func)
    return bool(overloads) and overloads[0].namespace not in _TORCHS


def is_opaque(func: Any) -> bool:
    """Whether an operator of others has a backward of its own, or changes its arguments.

    Not to be remembered: `register_autograd` may come at any time.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return is_custom(func) and (mutates(func) or any(has_kernel(op.name(), "Autograd") for op in _overloads(func)))


def _overloads(func: Any) -> list[Any]:
    if isinstance(func, CustomOp):
        return [func._opoverload]
    if isinstance(func, OpOverloadPacket):
        return [getattr(func, name) for name in func.overloads()]
    return [func] if isinstance(func, OpOverload) else []


def mutates(func: Any) -> bool:
    """Whether an operator changes one of its arguments in place."""
    return any(op._schema.is_mutable for op in _overloads(func))


def one_op(schema: str, function: Callable[..., Any]) -> Any:
    """`function` as one op, for graphs of ours: it runs as written whenever a graph does.

    Nobody differentiates it. The schema ("psgrad::name(...) -> ...") says what is changed in place; what is returned
    has memory of its own. Sizes come from running it on tensors without values.
    """
    written = schema.partition("(")[0]
    name = unused(written)
    torch.library.define(name, schema.removeprefix(written), tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(name, "CompositeExplicitAutograd", function)
    space, _, own = name.partition("::")
    return getattr(getattr(torch.ops, space), own).default


def as_one_op(schema: str, when: Callable[[], bool]) -> Callable[[F], F]:
    """`function` as one op `when` ops are recorded for a graph of ours. A loop over a thousand steps is then one node,
    and not ten thousand.
    """

    def registered(function: F) -> F:
        op = one_op(schema, function)

        @wraps(function)
        def called(*args: Any) -> Any:
            return op(*args) if when() else function(*args)

        called.op = op  # type: ignore[attr-defined]
        return called  # type: ignore[return-value]

    return registered


_COMPILED: dict[Any, tuple[Any, Callable[[], bool]]] = {}  # an op: another, that does the same; whether it can


def in_compiled_code(function: Any, other: Callable[..., Any], can_run: Callable[[], bool]) -> None:
    """Compiled code calls `other`, which does the same, for the op that `as_one_op` made of `function`.

    `can_run` is asked when code is compiled that has the op in it.
    """
    name, *rest = str(function.op._schema).partition("(")
    _COMPILED[function.op] = one_op("".join([f"{name}_compiled", *rest]), other), can_run


def compiled_ways(ops: Iterable[Any]) -> dict[Any, Any]:
    """What compiled code calls in place of some of these ops, by the op."""
    return {op: other for op in {*ops} & {*_COMPILED} for other, can_run in [_COMPILED[op]] if can_run()}


def unused(name: str) -> str:
    """`name` ("psgrad::name"), or where a copy of this package, imported before, has an op of that name, another."""
    space, _, own = name.partition("::")
    return unused(f"{name}_") if hasattr(getattr(torch.ops, space), own) else name
