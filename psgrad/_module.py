"""A module and a loss as a pure function of parameters and one sample."""

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor
from torch.func import functional_call

from ._errors import ArgumentError, ArgumentTypeError

Fn = Callable[[dict[str, Tensor], Any], Tensor]


def from_module(model: torch.nn.Module, loss: Callable[[Any, Any], Tensor]) -> tuple[Fn, dict[str, Tensor]]:
    """`model` and `loss` as `(fn, params)`, with `fn(params, (inputs, target))` the loss of one sample.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> fn, params = psgrad.from_module(model, torch.nn.functional.cross_entropy)
    >>> x, y = torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 0])
    >>> grads = psgrad.per_sample_grads(fn, params, (x, y))
    >>> {name: tuple(g.shape) for name, g in grads.items()}
    {'0.weight': (5, 8, 4), '0.bias': (5, 8), '2.weight': (5, 3, 8), '2.bias': (5, 3)}

    The module and the loss see a batch of one, so losses that expect a batch work as they stand. Sequence
    outputs too; for token-level cross entropy bring the classes to axis 1:

    >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 10))
    >>> def loss(logits, tokens):  # logits (1, T, V), tokens (1, T)
    ...     return torch.nn.functional.cross_entropy(logits.mT, tokens)
    >>> fn, params = psgrad.from_module(model, loss)
    >>> tokens = torch.randint(10, (6, 7))
    >>> psgrad.per_sample_grads(fn, params, (tokens, tokens))["1.bias"].shape
    torch.Size([6, 10])

    - `inputs` is a tensor (`model(x)`), a tuple or list (`model(*x)`) or a dict (`model(**x)`).
    - `params` holds the parameters with `requires_grad`, detached; a tied weight is there once, under its
      first name. What has no `requires_grad`, and every buffer, is read and never changed.
    - `model.train()` and `model.eval()` count as they are when `fn` runs. In training a batch norm
      normalises each sample by its own statistics and leaves its running statistics alone.

    Args:
        model: any module; it is not changed, and later changes of its parameters do not reach `params`.
        loss: called as `loss(output, target)`, each with a leading axis of 1.

    Returns:
        The function, and the trainable parameters as a dict from name to tensor.

    Raises:
        ArgumentTypeError: `model` is not a module or `loss` is not callable.
        ArgumentError: no parameter of `model` is trainable.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            f"model is a {type(model).__name__}, not a torch.nn.Module\n  write fn(params, sample) -> loss yourself."
        )
    if not callable(loss):
        raise ArgumentTypeError(f"loss is a {type(loss).__name__}, not a function\n  give loss(output, target).")
    for name, p in model.named_parameters():
        if isinstance(p, torch.nn.parameter.UninitializedParameter):
            raise ArgumentError(
                f"parameter {name!r} of the model has no shape yet\n"
                "  call the model once, so that its lazy modules are made."
            )
    names = _names(model)
    params = {same[0]: p.detach() for p, same in names if p.requires_grad}
    if not params:
        raise ArgumentError("no parameter of the model has requires_grad\n  set it on those to differentiate.")
    buffers = _buffers(model)
    others = [(same[0], p) for p, same in names if same[0] not in params]
    aliases = [(other, same[0]) for _, same in names for other in same[1:]]

    def fn(params: dict[str, Tensor], sample: Any) -> Tensor:
        inputs, target = _pair(sample)
        args, kwargs = _arguments(inputs)
        state = {name: p.detach() for name, p in others} | params
        for other, first in aliases:
            if first in state:
                state[other] = state[first]
        for name, module, key in buffers:  # clones: whatever the module does to a buffer stays here
            value = module._buffers.get(key)
            if value is not None:
                state[name] = value.clone()
        return loss(functional_call(model, state, args, kwargs, tie_weights=False), target)

    return fn, params


def _names(model: torch.nn.Module) -> list[tuple[torch.nn.Parameter, list[str]]]:
    """Each parameter once, with a name for each module that holds it.

    A module at two paths holds it once: functional_call would restore it wrongly if given both.
    """
    found: dict[int, tuple[torch.nn.Parameter, list[str]]] = {}
    for path, module in model.named_modules():
        for key, p in module._parameters.items():
            if p is not None:
                found.setdefault(id(p), (p, []))[1].append(f"{path}.{key}" if path else key)
    return list(found.values())


def _buffers(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module, str]]:
    return [
        (f"{path}.{key}" if path else key, module, key)
        for path, module in model.named_modules()
        for key in module._buffers
    ]


def _pair(sample: Any) -> tuple[Any, Any]:
    """A sample as (inputs, target), each with a leading axis of 1."""
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        raise ArgumentError(
            f"a sample of from_module's fn must be (inputs, target), but is a {type(sample).__name__}\n"
            "  give batch=(inputs, targets); inputs may be a tensor, a tuple or a dict."
        )
    pair: Any = tuple(sample)
    inputs, target = optree.tree_map(lambda t: t[None] if isinstance(t, Tensor) else t, pair)
    return inputs, target


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), inputs
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})
