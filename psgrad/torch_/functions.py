"""Kinds of torch functions, as the mode tells them apart."""

import types
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from . import kernels, operators

ANSWERS: frozenset[Callable[..., Any]] = frozenset(  # a Python value from a tensor
    getattr(torch.Tensor, name) for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")
) | {torch.is_nonzero}
# Other ways in which Python comes by values, or makes tensors of them; of some only where tensors are among the values.
_MADE_OF: frozenset[Any] = frozenset(
    [torch.tensor, torch.as_tensor, torch.asarray, torch.full, torch.arange, torch.linspace]
)
_SLICED: frozenset[Any] = frozenset([torch.Tensor.__getitem__, torch.Tensor.__setitem__])
READS: frozenset[Any] = (
    frozenset[Any](getattr(torch.Tensor, name) for name in ("numpy", "__array__", "__complex__", "__dlpack__"))
    | {torch.equal, torch.allclose, torch.Tensor.equal, torch.Tensor.allclose}
    | frozenset(kernels.GROUPED_MM)  # not by Python, but its rule divides the work by the offsets
    | _MADE_OF
    | _SLICED
)


def reads_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of one of `READS` hands values to Python."""
    if func in _SLICED:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        bounds = [b for i in index if isinstance(i, slice) for b in (i.start, i.stop, i.step)]
        return any(isinstance(b, torch.Tensor) for b in bounds)
    if func in (torch.tensor, torch.as_tensor, torch.asarray):
        return isinstance(args[0] if args else None, (list, tuple)) and _holds_tensors(args[0])
    if func in _MADE_OF:
        return any(isinstance(a, torch.Tensor) for a in (*args, *kwargs.values()))
    return True


def _holds_tensors(values: Any) -> bool:
    if isinstance(values, (list, tuple)):
        return any(map(_holds_tensors, values))
    return isinstance(values, torch.Tensor)


REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_PROPERTIES = vars(torch._C.TensorBase)
GRAPHS = (_PROPERTIES["is_leaf"].__get__, _PROPERTIES["grad_fn"].__get__)
NUMBERS = (_PROPERTIES["imag"].__get__, _PROPERTIES["real"].__get__)  # properties that are views of the numbers
SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
ATTENTION = (
    torch.nn.functional.multi_head_attention_forward
)  # taken apart whoever its weights belong to: there is a fold in it
IS_NESTABLE = torch._nested_tensor_from_mask_left_aligned  # asked by TransformerEncoder for its fused path
MAKE_DUAL = torch._make_dual  # what torch.autograd.forward_ad gives a tangent by
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
_ABOUT_THE_TENSOR = frozenset(
    ["requires_grad_", "register_hook", "retain_grad", "backward", "detach_", "__set__", "__delete__"]
)


def is_about_the_tensor(func: Any) -> bool:
    """Whether `func` is about the tensor itself, not its numbers."""
    return is_attribute(func) or getattr(func, "__name__", "") in _ABOUT_THE_TENSOR


def is_hook(func: Any) -> bool:
    """Whether `func` hangs a hook on the gradient of a tensor."""
    return getattr(func, "__name__", "") == "register_hook"


_BY_FREQUENCY = {F.embedding: 5, F.embedding_bag: 5, torch.embedding: 3}  # where scale_grad_by_freq is by position


def scales_by_frequency(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the backward of a call divides by how often rows of a table are used: then it is not the derivative."""
    place = _BY_FREQUENCY.get(func)
    return place is not None and bool(kwargs.get("scale_grad_by_freq", place < len(args) and args[place]))


MAKERS = frozenset(  # of tensors that `fn` might then write to
    function
    for name in (
        "zeros",
        "ones",
        "empty",
        "full",
        "tensor",
        "clone",
        "empty_strided",
        "eye",
        "scalar_tensor",
        "arange",
        "linspace",
        "logspace",
    )
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
    """Whether `func` changes its first argument: add_, __iadd__, __setitem__, relu(inplace=True), aten.add_.Tensor."""
    if isinstance(func, operators.Overload):
        return operators.mutates(func)
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


# ---- functions that give the same for every sample when their operands do --------------------------------

# Of parameters alone they are computed once: views (`t`, `view`, `split` ...) stay views of the parameter, other
# functions (a mask times a weight, a weight norm, a cast) become a value whose per-sample gradients are pulled back at
# the end. A function that draws random numbers or writes in place must not be here; one that is missing costs time,
# never exactness.
_VIEWS = (
    "t transpose swapaxes swapdims permute movedim moveaxis view view_as reshape reshape_as flatten unflatten ravel "
    "squeeze unsqueeze expand expand_as broadcast_to narrow select split split_with_sizes tensor_split chunk unbind "
    "diagonal __getitem__ detach alias adjoint"
)
_VIEW_PROPERTIES = "T mT H mH data"
_VALUES = (
    "add sub subtract mul multiply div divide true_divide neg negative pow square sqrt rsqrt reciprocal abs sign exp "
    "matrix_exp expm1 log log1p log2 sin cos tan tanh sigmoid relu softmax log_softmax softplus silu gelu elu celu "
    "leaky_relu hardtanh logsigmoid normalize clamp clamp_min clamp_max minimum maximum where masked_fill tril triu "
    "diag diag_embed sum mean prod var std norm amax amin logsumexp cumsum cat concat stack hstack vstack repeat "
    "repeat_interleave tile roll flip pad clone contiguous as_strided to float double half bfloat16 int long type "
    "type_as matmul mm bmm mv dot vdot inner outer addmm baddbmm einsum tensordot kron index_select gather lerp "
    "addcmul addcdiv _weight_norm _weight_norm_interface __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ "
    "__truediv__ __rtruediv__ __div__ __rdiv__ __pow__ __rpow__ __neg__ __matmul__ __rmatmul__ atan erf sinh cosh "
    "floor round ceil rms_norm eq ne lt le gt ge isfinite isnan"
)


_OF_NUMBERS = (
    "tanh sigmoid relu relu6 silu gelu elu selu celu mish leaky_relu softplus hardtanh hardsigmoid hardswish "
    "logsigmoid exp sin cos"
)
POINTWISE: frozenset[Any] = (
    frozenset(  # functions of each number alone, into new memory, unless they are told otherwise
        function
        for name in _OF_NUMBERS.split()
        for home in (torch, torch.Tensor, F)
        if (function := getattr(home, name, None)) is not None
    )
)


def _pure(func: Callable[..., Any]) -> bool:
    code = getattr(func, "__code__", None)  # torch's Python functions say that they can write in place
    return code is None or "inplace" not in code.co_varnames


def _named(names: str) -> frozenset[Callable[..., Any]]:
    homes = (torch, torch.Tensor, F)
    found = (getattr(home, name, None) for name in names.split() for home in homes)
    return frozenset(f for f in found if f is not None and _pure(f))


VIEWS: frozenset[Callable[..., Any]] = _named(_VIEWS) | {
    getattr(torch.Tensor, p).__get__ for p in _VIEW_PROPERTIES.split()
}
PURE: frozenset[Callable[..., Any]] = (
    VIEWS
    | _named(_VALUES)
    | {torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm, torch.linalg.inv, torch.linalg.solve}
    | {torch.linalg.qr, torch.linalg.matrix_exp, torch.linalg.householder_product}
)
