"""What torch's vmap gets wrong without a word, and what is done in its place.

One table; a test says when torch mends an entry. Each names the functions, says which calls of them are meant, and
gives a call that vmap gets right; or none, and then the op runs in a loop over samples.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..factors.assumptions import are_noted, decide
from ..torch_ import levels
from ..torch_.tracing import can_look
from .signals import NeedsLoop

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
Differs = Callable[[Any], bool]  # whether an argument differs between samples, and is not a parameter itself


class Fault(NamedTuple):
    functions: tuple[Callable[..., Any], ...]
    what: str  # that vmap does
    meant: Callable[..., bool]  # of `Differs` and the call's arguments, which may not be what the op takes
    instead: Callable[..., Call | None] | None = None  # of the call's arguments; None: the op runs in a loop


def _always(*_: Any, **__: Any) -> bool:
    return True


def _is_scalar(_: Differs, input: Any = None, *__: Any, **___: Any) -> bool:
    return isinstance(input, Tensor) and input.dim() == 0


def _is_bare(_: Differs, t: Tensor, *args: Any, **kwargs: Any) -> bool:
    return not args and not kwargs


def _selected(input: Tensor, src: Tensor, dim: int, index: int) -> Call | None:
    if not -input.dim() <= dim < input.dim() or not -input.shape[dim] <= index < input.shape[dim]:
        return None  # torch refuses it, in its own words
    dim, index = dim % input.dim(), index % input.shape[dim]
    after = input.shape[dim] - index - 1
    parts = input.narrow(dim, 0, index), src.unsqueeze(dim), input.narrow(dim, index + 1, after)
    return torch.cat, (parts, dim), {}


def _has_scalar_index(_: Differs, input: Any = None, dim: Any = None, index: Any = None, *__: Any, **___: Any) -> bool:
    return isinstance(index, Tensor) and index.dim() == 0


def _selected_by_list(input: Tensor, dim: int, index: Tensor) -> Call:
    return torch.index_select, (input, dim, index.reshape(1)), {}


def _copied(input: Tensor, *_: Any, **__: Any) -> Call:
    return torch.clone, (input,), {}


def _squeeze_axes(t: Tensor) -> Tensor:
    for axis in reversed([i for i, size in enumerate(t.shape) if size == 1]):
        t.squeeze_(axis)
    return t


def _squeezed(t: Tensor) -> Call:
    return _squeeze_axes, (t,), {}


def _refused(*_: Any, **__: Any) -> Call:
    raise NeedsLoop("as_strided is of the batch's memory, not of a sample's")


def _index_filled(input: Tensor, dim: int, index: Tensor, value: Any) -> Call | None:
    if input.dim() and not -input.dim() <= dim < input.dim():
        return None
    size = input.shape[dim] if input.dim() else 1
    if _is_out_of_range(index, size, -size):
        return None  # torch has its own words for it
    chosen = (torch.arange(size, device=input.device)[:, None] == index % size).any(1)
    shape = [size if i == dim % input.dim() else 1 for i in range(input.dim())]
    filled = value.to(input.dtype) if isinstance(value, Tensor) else torch.full_like(input, value)
    return torch.where, (chosen.view(shape), filled, input), {}


def _is_changed(name: str) -> Callable[..., Call]:
    """A write in place as what it stands for: a new value, copied to where the old one was."""
    plain = getattr(torch.Tensor, name)

    def changed(t: Tensor, *args: Any, **kwargs: Any) -> Call:
        return torch.Tensor.copy_, (t, plain(t.clone(), *args, **kwargs)), {}  # the backward may read the old one

    return changed


def _pads(differs: Differs, input: Any = None, weight: Any = None, padding_idx: Any = None, *_: Any, **__: Any) -> bool:
    return padding_idx is not None and differs(weight)


def _is_out_of_range(indices: Any, size: int, least: int = 0) -> bool:
    """Whether torch would refuse indices that its vmap does not look at."""
    if not isinstance(indices, Tensor) or indices.numel() == 0:
        return False
    indices = levels.plain(indices)
    if not (can_look(indices) or are_noted()):
        return False
    return decide(lambda: ((indices < least) | (indices >= size)).any())


def _misses(differs: Differs, input: Any = None, weight: Any = None, *_: Any, **__: Any) -> bool:
    return differs(weight) and _is_out_of_range(input, weight.shape[0])


def _has_no_class(_: Differs, input: Any = None, num_classes: Any = -1, *__: Any, **___: Any) -> bool:
    return isinstance(num_classes, int) and num_classes > 0 and _is_out_of_range(input, num_classes)


def _unpadded(input: Tensor, weight: Tensor, padding_idx: int, *args: Any, **kwargs: Any) -> Call:
    """No gradient goes to the padding because none can."""
    rows = torch.arange(len(weight), device=weight.device)[:, None]
    return (
        F.embedding,
        (input, torch.where(rows == padding_idx % len(weight), weight.detach(), weight), None, *args),
        kwargs,
    )


T = torch.Tensor
# in place, vmap writes over what the backward then asks for
_IN_PLACE = ["addbmm", "cumprod", "float_power", "hypot", "index_reduce", "ldexp", "pow"]
TABLE = (
    *(
        Fault((getattr(T, f"{name}_"),), "writes over what the backward needs", _always, _is_changed(name))
        for name in _IN_PLACE
    ),
    Fault((T.__ipow__,), "writes over what the backward needs", _always, _is_changed("pow")),
    Fault((torch.index_fill, T.index_fill), "mistakes the axis of a value", _always, _index_filled),
    Fault((T.index_fill_,), "mistakes the axis of a value", _always, _is_changed("index_fill")),
    Fault(
        (torch.as_strided_copy, torch.as_strided_scatter, T.as_strided_scatter),
        "takes the memory of all samples for that of one",
        _always,
        _refused,
    ),
    Fault((torch.select_scatter, T.select_scatter), "multiplies the gradient of src", _always, _selected),
    Fault(
        (torch.index_select, T.index_select),
        "repeats what a scalar index selects",
        _has_scalar_index,
        _selected_by_list,
    ),
    Fault((torch.roll, T.roll), "rolls a scalar along the samples", _is_scalar, _copied),
    Fault((T.squeeze_,), "takes the axis of a single sample away", _is_bare, _squeezed),
    Fault((T.as_strided_,), "takes the memory of all samples for that of one", _always, _refused),
    Fault((F.embedding,), "does not look whether an index is in the table", _misses),
    Fault((F.one_hot,), "does not look whether a class is below num_classes", _has_no_class),
    Fault((F.embedding,), "lets a gradient through to the padding", _pads, _unpadded),
)
FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(function for fault in TABLE for function in fault.functions)


def fault_of(func: Any, args: Any, kwargs: Any, differs: Differs) -> Fault | None:
    """The fault that a call would meet."""
    return next((f for f in TABLE if func in f.functions and f.meant(differs, *args, **kwargs)), None)
