"""Kinds of torch functions, as the mode tells them apart."""

import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

ANSWERS: frozenset[Callable[..., Any]] = frozenset(  # a Python value from a tensor
    getattr(torch.Tensor, name) for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")
) | {torch.is_nonzero}
REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
GRAPHS = tuple(vars(torch._C.TensorBase)[name].__get__ for name in ("is_leaf", "grad_fn"))
SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
ATTENTION = torch.nn.functional.multi_head_attention_forward  # holds a fold, whoever its weights belong to
IS_NESTABLE = torch._nested_tensor_from_mask_left_aligned  # asked by TransformerEncoder for its fused path
SHOWN = frozenset([torch.Tensor.__repr__, torch.Tensor.__format__])  # a text, in which vmap would show all samples
UPDATES = frozenset(  # functions that write to running statistics, which are among their operands
    function
    for name in (
        "batch_norm",
        "instance_norm",
        "native_batch_norm",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
    )
    for home in (torch, torch.nn.functional, torch.ops.aten)
    if (function := getattr(home, name, None)) is not None
)
_FUNCTIONAL = vars(torch.nn.functional)
_MINDS = frozenset(["requires_grad_", "register_hook", "retain_grad", "backward", "detach_", "__set__", "__delete__"])


def minds(func: Any) -> bool:
    """Whether `func` is about the tensor itself, not its numbers."""
    return is_attribute(func) or getattr(func, "__name__", "") in _MINDS


MAKERS = frozenset(  # of tensors that `fn` might then write to
    function
    for name in ("zeros", "ones", "empty", "full", "tensor", "clone", "empty_strided", "eye", "scalar_tensor")
    for spelling in (name, f"{name}_like", f"new_{name}")
    for home in (torch, torch.Tensor)
    if (function := getattr(home, spelling, None)) is not None
)
DRAWS = frozenset(  # random numbers into a tensor
    getattr(torch.Tensor, f"{name}_")
    for name in ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
)
_ATTRIBUTES = frozenset(["__get__", "dim", "size", "numel", "stride", "__len__", "is_floating_point", "is_complex"])


def is_attribute(func: Any) -> bool:
    return getattr(func, "__name__", "") in _ATTRIBUTES


def writes(func: Any, kwargs: Any) -> bool:
    """Whether `func` changes its first argument: add_, __iadd__, __setitem__, relu(inplace=True)."""
    name = getattr(func, "__name__", "")
    if name.endswith("__"):
        return name == "__setitem__" or name in _INPLACE
    return name.endswith("_") or bool(kwargs.get("inplace"))


_INPLACE = frozenset(
    f"__i{op}__" for op in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)


def is_composite(func: Any) -> bool:
    """Whether `func` is torch's own Python, made of other torch functions."""
    return type(func) is types.FunctionType and func.__globals__ is _FUNCTIONAL


def _no(*_: Any) -> bool:
    return False


def wants(requires_grad: bool = True) -> bool:
    """What a call of Tensor.requires_grad_ asks for."""
    return requires_grad


def asks_for_grad(func: Any) -> bool:
    """Whether torch's own Python decides by `requires_grad`, of which vmap says no: it has to be taken apart."""
    return is_composite(func) and "requires_grad" in func.__code__.co_names


def is_python(func: Any) -> bool:
    """Whether `func` is Python of torch's that hands itself over to modes: it can be taken apart."""
    python = type(func) is types.FunctionType and str(func.__module__).partition(".")[0] == "torch"
    return python and not _HAND_OVERS.isdisjoint(func.__code__.co_names)


_HAND_OVERS = frozenset(["has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"])


@cache
def opened(func: types.FunctionType) -> Callable[..., Any]:
    """`func` without its own hand-over to modes, so that the mode sees the functions it is made of."""
    scope = func.__globals__ | dict.fromkeys(_HAND_OVERS, _no)
    plain = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    plain.__kwdefaults__ = func.__kwdefaults__
    return plain
