"""Drop-in functionals whose `vmap(grad(...))` is fast: torch.nn.functional's signatures, psgrad's rules.

Each is a custom, vmap-able autograd Function, so it composes with `vmap`, `grad`, `jacrev`, `hessian` and
double backward. `psgrad.use_rules()` puts them in place of torch's own for code that is already written.

>>> import torch, psgrad
>>> from torch.func import grad, vmap
>>> w, x = torch.ones(2, 3), torch.arange(6.0).view(2, 3)
>>> vmap(grad(lambda w, x: psgrad.ops.linear(x, w).sum()), in_dims=(None, 0))(w, x)[1]
tensor([[3., 4., 5.],
        [3., 4., 5.]])
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from .composable import COMPOSABLE, run_composable
from .composable import use_rules as use_rules
from .registry.rule import RULES, Rule
from .rules import conv as _conv
from .rules import embedding as _embedding
from .rules import linear as _linear
from .rules import norm as _norm
from .rules import recurrence as _recurrence

__all__ = [
    "batch_norm",
    "bilinear",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "embedding",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "linear",
    "rms_norm",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _op(rule: Rule, func: _Function) -> _Function:
    @functools.wraps(func)
    def op(*args: Any, **kwargs: Any) -> Any:
        if has_torch_function((*args, *kwargs.values())):
            return handle_torch_function(op, (*args, *kwargs.values()), *args, **kwargs)
        return run_composable(rule, func, args, kwargs)

    op.__module__ = __name__
    op.__doc__ = f"torch.nn.functional.{func.__name__}, with fast per-sample gradients under vmap(grad(...))."
    RULES[op] = rule
    COMPOSABLE[func] = COMPOSABLE[op] = rule
    return op  # type: ignore[return-value]


linear = _op(_linear.LINEAR, F.linear)
bilinear = _op(_linear.BILINEAR, F.bilinear)
conv1d = _op(_conv.CONV[0], F.conv1d)
conv2d = _op(_conv.CONV[1], F.conv2d)
conv3d = _op(_conv.CONV[2], F.conv3d)
conv_transpose1d = _op(_conv.TRANSPOSED[0], F.conv_transpose1d)
conv_transpose2d = _op(_conv.TRANSPOSED[1], F.conv_transpose2d)
conv_transpose3d = _op(_conv.TRANSPOSED[2], F.conv_transpose3d)
group_norm = _op(_norm.GROUP, F.group_norm)
layer_norm = _op(_norm.LAYER, F.layer_norm)
rms_norm = _op(_norm.RMS, F.rms_norm)
instance_norm = _op(_norm.INSTANCE, F.instance_norm)
batch_norm = _op(_norm.BATCH, F.batch_norm)
embedding = _op(_embedding.EMBEDDING, F.embedding)
COMPOSABLE.update({rule.functions[0]: rule for rule in _recurrence.RULES})
