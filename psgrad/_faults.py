"""What torch's vmap gets wrong without a word, and what is done in its place. One table; a test says when torch mends one.

Each entry names the functions, says which calls of them are meant, and gives a call that vmap gets right; or none,
and then the op runs in a loop over samples.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ._op_loop import Unlooped

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Differs = Callable[[Any], bool]  # whether an argument differs between samples, and is not a parameter itself


class Fault(NamedTuple):
    functions: tuple[Callable[..., Any], ...]
    what: str  # that vmap does
    meant: Callable[[Differs, tuple[Any, ...], dict[str, Any]], bool]
    instead: Callable[..., Call] | None = None  # of the call's arguments


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], at: int, name: str) -> Any:
    return args[at] if len(args) > at else kwargs.get(name)


def _always(differs: Differs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


def _is_scalar(differs: Differs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return isinstance(args[0], Tensor) and args[0].dim() == 0


def _is_bare(differs: Differs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(args) == 1 and not kwargs


def _selected(input: Tensor, src: Tensor, dim: int, index: int) -> Call:
    dim, index = dim % input.dim(), index % input.shape[dim]
    after = input.shape[dim] - index - 1
    parts = input.narrow(dim, 0, index), src.unsqueeze(dim), input.narrow(dim, index + 1, after)
    return torch.cat, (parts, dim), {}


def _copied(input: Tensor, *_: Any, **__: Any) -> Call:
    return torch.clone, (input,), {}


def _squeeze_axes(t: Tensor) -> Tensor:
    for axis in reversed([i for i, size in enumerate(t.shape) if size == 1]):
        t.squeeze_(axis)
    return t


def _squeezed(t: Tensor) -> Call:
    return _squeeze_axes, (t,), {}


def _refused(*_: Any, **__: Any) -> Call:
    raise Unlooped("as_strided_ is of the batch's memory, not of a sample's")


def _counts(differs: Differs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return differs(_argument(args, kwargs, 1, "weight")) and bool(_argument(args, kwargs, 5, "scale_grad_by_freq"))


def _pads(differs: Differs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return differs(_argument(args, kwargs, 1, "weight")) and _argument(args, kwargs, 2, "padding_idx") is not None


def _unpadded(input: Tensor, weight: Tensor, padding_idx: int, *args: Any, **kwargs: Any) -> Call:
    """No gradient goes to the padding because none can."""
    rows = torch.arange(len(weight), device=weight.device)[:, None]
    return F.embedding, (input, torch.where(rows == padding_idx % len(weight), weight.detach(), weight), None, *args), kwargs


T = torch.Tensor
TABLE = (
    Fault((torch.select_scatter, T.select_scatter), "multiplies the gradient of src", _always, _selected),
    Fault((torch.roll, T.roll), "rolls a scalar along the samples", _is_scalar, _copied),
    Fault((T.squeeze_,), "takes the axis of a single sample away", _is_bare, _squeezed),
    Fault((T.as_strided_,), "takes the memory of all samples for that of one", _always, _refused),
    Fault((F.embedding,), "counts indices of other samples", _counts),
    Fault((F.embedding,), "lets a gradient through to the padding", _pads, _unpadded),
)
FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(function for fault in TABLE for function in fault.functions)


def fault_of(func: Any, args: Any, kwargs: Any, differs: Differs) -> Fault | None:
    """The fault that a call would meet."""
    return next((f for f in TABLE if func in f.functions and f.meant(differs, args, kwargs)), None)
