"""A module and a loss as a pure function of parameters and one sample."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from .errors import ArgumentError, ArgumentTypeError
from .processes.layers import Layers, layers_of
from .swap import Given, Slots, Swap
from .torch_.autograd import without_modes
from .torch_.compiler import uncompiled
from .torch_.functions import is_composite, opened
from .torch_.sharding import is_dtensor, is_sharded

Fn = Callable[[dict[str, Tensor], Any], Tensor]


@uncompiled
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
    - A model under `fully_shard` runs layer by layer, with a `group` of all ranks that hold it; `params` are DTensors.
    - `model.train()` and `model.eval()` count as they are when `fn` runs. In training a batch norm
      normalises each sample by its own statistics and leaves its running statistics alone.

    Args:
        model: any module; it is not changed. `params` shares the memory of its parameters: updates in place, as
            by torch.optim, are seen by both.
        loss: called as `loss(output, target)`, each with a leading axis of 1.

    Returns:
        The function, and the trainable parameters as a dict from name to tensor.

    Raises:
        ArgumentTypeError: `model` is not a module or `loss` is not callable.
        ArgumentError: no parameter of `model` is trainable.
    """
    model, layers = _checked(model, loss)
    given = loss
    if is_composite(loss):
        loss = opened(loss)  # modes see what it is made of, without its own hand-over: 20 us
    slots = Slots(model)
    params, known = slots.trainable() if layers is None else layers.own(), set(slots.names)
    if not params:
        raise ArgumentError("no parameter of the model has requires_grad\n  set it on those to differentiate.")

    def fn(params: dict[str, Tensor], sample: Any) -> Tensor:
        if not isinstance(params, (dict, Mapping)) or not params.keys() <= known:
            raise _strangers(params, known)
        inputs, target = _pair(sample)
        with Swap(slots, params) if layers is None else Layered(layers, slots, params):
            if isinstance(inputs, dict):
                output = model(**inputs)
            else:
                output = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
        return loss(output, target)

    if layers is None:
        vars(fn)["psgrad_check"] = Given(slots, params).refuse_changed
    else:
        vars(fn)["psgrad_layers"] = layers
    vars(fn)["psgrad_module"] = (model, given, slots.lock)  # for `verify`, which calls them without all this
    return fn, params


def _checked(model: Any, loss: Any) -> tuple[torch.nn.Module, Layers | None]:
    """The module itself, without what may be around it, and its layers where it is under fully_shard."""
    if isinstance(loss, torch.nn.Module) and callable(model) and not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            f"model is a {type(model).__name__}, and loss a {type(loss).__name__}\n"
            "  give the model first, then the loss."
        )
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            f"model is a {type(model).__name__}, not a torch.nn.Module\n  write fn(params, sample) -> loss yourself."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ArgumentTypeError(
            f"model is a {type(model).__name__} of torch.jit, whose ops nobody sees\n"
            "  give the module that it was made from."
        )
    if isinstance(loss, type):
        raise ArgumentTypeError(f"loss is the class {loss.__name__}\n  give an instance: {loss.__name__}().")
    if not callable(loss):
        raise ArgumentTypeError(f"loss is a {type(loss).__name__}, not a function\n  give loss(output, target).")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module  # it would wait for other processes, which may run fn another number of times
    if type(model).__module__.partition(".")[0] == "opacus":
        raise ArgumentError(
            f"the model is wrapped by Opacus's {type(model).__name__}, which hangs hooks on its modules\n"
            "  give the model itself: model.to_standard_module()."
        )
    _refuse_sharded(model)
    layers = layers_of(model) if any(map(is_sharded, model.modules())) else None
    for name, p in model.named_parameters():
        if isinstance(p, torch.nn.parameter.UninitializedParameter):
            raise ArgumentError(
                f"parameter {name!r} of the model has no shape yet\n"
                "  call the model once, so that its lazy modules are made."
            )
        if is_dtensor(p) and layers is None:
            raise ArgumentError(
                f"parameter {name!r} of the model is a DTensor, as parallelize_module and distribute_module make them\n"
                "  give the model before that, or write fn(params, sample) -> loss yourself."
            )
    return model, layers


def _strangers(params: Any, known: set[str]) -> Exception:
    if not isinstance(params, Mapping):
        return ArgumentTypeError(
            f"params is a {type(params).__name__}, not a dict from parameter name to tensor\n"
            "  give what from_module returned, or some of it."
        )
    unknown = ", ".join(repr(name) for name in params if name not in known)
    return ArgumentError(
        f"params has {unknown}, which the model has not\n  give what from_module returned, or some of it."
    )


def _refuse_sharded(model: torch.nn.Module) -> None:
    """The older FSDP puts parameters of its own into a module while that runs, whatever was there."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # where nobody has loaded it, no module is sharded
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FullyShardedDataParallel):
            raise ArgumentError(
                "the model is sharded by FullyShardedDataParallel, which replaces parameters while it runs\n"
                "  give the model before FullyShardedDataParallel, or under fully_shard, with a group."
            )


class Layered:
    """Inside, the units of a model under fully_shard get to hold `params` as they are gathered."""

    def __init__(self, layers: Layers, slots: Slots, params: Mapping[str, Tensor]) -> None:
        self.layers, self.params = layers, params
        self.swap = Swap(slots, {})  # whose buffers are copies, and which nobody else runs meanwhile

    def __enter__(self) -> None:
        if not self.layers.is_passing:
            raise ArgumentError(
                "fn of a model under fully_shard is called without a group\n"
                "  say group= with the ranks that hold the model, as torch.distributed.group.WORLD."
            )
        self.swap.__enter__()
        self.layers.held = self.params

    def __exit__(self, *error: Any) -> None:
        self.swap.__exit__(*error)


def _pair(sample: Any) -> tuple[Any, Any]:
    """A sample as (inputs, target), each with a leading axis of 1."""
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        length = f" of {len(sample)}" if isinstance(sample, (tuple, list)) else ""
        raise ArgumentError(
            f"a sample of from_module's fn must be (inputs, target), but is a {type(sample).__name__}{length}\n"
            "  give batch=(inputs, targets), with None where there are no targets; inputs may be a tensor, a tuple\n"
            "  or a dict."
        )
    inputs, target = sample
    with without_modes():  # modes need not see it: 15 us
        return (
            inputs.unsqueeze(0) if isinstance(inputs, Tensor) else _of_one(inputs),
            target.unsqueeze(0) if isinstance(target, Tensor) else _of_one(target),
        )


def _of_one(tree: Any) -> Any:
    """The tensors of a tree as a batch of one."""
    return optree.tree_map(lambda t: t.unsqueeze(0) if isinstance(t, Tensor) else t, tree)
