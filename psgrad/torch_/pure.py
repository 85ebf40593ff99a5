"""Torch functions that give the same for every sample when their operands do.

Of parameters alone they are computed once: views (`t`, `view`, `split` ...) stay views of the parameter,
other functions (a mask times a weight, a weight norm, a cast) become a value whose per-sample gradients
are pulled back at the end. A function that draws random numbers or writes in place must not be here; one
that is missing costs time, never exactness.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

_VIEWS = (
    "t transpose swapaxes swapdims permute movedim moveaxis view view_as reshape reshape_as flatten unflatten ravel "
    "squeeze unsqueeze expand expand_as broadcast_to narrow select split split_with_sizes tensor_split chunk unbind "
    "diagonal __getitem__ detach alias adjoint"
)
_PROPERTIES = "T mT H mH data"
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


def _pure(func: Callable[..., Any]) -> bool:
    code = getattr(func, "__code__", None)  # torch's Python functions say that they can write in place
    return code is None or "inplace" not in code.co_varnames


def _named(names: str) -> frozenset[Callable[..., Any]]:
    homes = (torch, torch.Tensor, F)
    found = (getattr(home, name, None) for name in names.split() for home in homes)
    return frozenset(f for f in found if f is not None and _pure(f))


VIEWS: frozenset[Callable[..., Any]] = _named(_VIEWS) | {getattr(torch.Tensor, p).__get__ for p in _PROPERTIES.split()}
PURE: frozenset[Callable[..., Any]] = (
    VIEWS
    | _named(_VALUES)
    | {torch.linalg.norm, torch.linalg.vector_norm, torch.linalg.matrix_norm, torch.linalg.inv, torch.linalg.solve}
    | {torch.linalg.qr, torch.linalg.matrix_exp, torch.linalg.householder_product}
)
