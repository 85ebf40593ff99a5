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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from .composable import composable
from .registry.rule import RULES, Composite, Decline, Rule
from .rules import conv as _conv
from .rules import embedding as _embedding
from .rules import linear as _linear
from .rules import norm as _norm
from .rules import recurrence as _recurrence
from .torch_ import levels

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


def _run(rule: Rule, func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
    """`func` through its rule's composable Functions; as torch has it where the rule declines."""
    call = rule.bind(*args, **kwargs)
    if isinstance(call, Decline) or not isinstance(call.x, Tensor) or call.is_complex:
        result: Tensor = func(*args, **kwargs)
        return result
    return composable(rule, call)


_RULED: dict[Callable[..., Any], Rule] = {}


def _op(rule: Rule, func: _Function) -> _Function:
    @functools.wraps(func)
    def op(*args: Any, **kwargs: Any) -> Any:
        if has_torch_function((*args, *kwargs.values())):
            return handle_torch_function(op, (*args, *kwargs.values()), *args, **kwargs)
        return _run(rule, func, args, kwargs)

    op.__module__ = __name__
    op.__doc__ = f"torch.nn.functional.{func.__name__}, with fast per-sample gradients under vmap(grad(...))."
    RULES[op] = rule
    _RULED[func] = _RULED[op] = rule
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
_RULED |= {rule.functions[0]: rule for rule in _recurrence.RULES}


class _UseRules(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, rule = kwargs or {}, RULES.get(func)
        if isinstance(rule, Composite) and levels.current_level() is not None:  # torch's own serves without a transform
            with self:
                return rule.run(*args, **kwargs)
        rule = _RULED.get(func)
        return func(*args, **kwargs) if rule is None else _run(rule, func, args, kwargs)


@contextmanager
def use_rules() -> Iterator[None]:
    """Inside, `vmap(grad(f))`, `jacrev`, `hessian` ... of your own use psgrad's rules for stock modules.

    A batch or instance norm in training normalises as ever, but leaves its running statistics alone.

    >>> import torch, psgrad
    >>> from torch.func import functional_call, grad, vmap
    >>> model, x = torch.nn.Conv1d(1, 2, 3), torch.randn(4, 1, 8)
    >>> loss = lambda p, x: functional_call(model, p, (x,)).square().sum()
    >>> with psgrad.use_rules():
    ...     grads = vmap(grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), x)
    >>> grads["weight"].shape
    torch.Size([4, 2, 1, 3])
    """
    with _UseRules():
        yield
