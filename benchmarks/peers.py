"""The contenders: how each comes to a quantity, and a table of them. What one raises is shown in its cell."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from importlib import import_module
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

import psgrad

from .tasks import FROM_GRADS, QUANTITIES, Grads, Task, gram


def _as_it_is(answer: Any) -> Any:
    return answer


class Ready(NamedTuple):
    """A call to be measured."""

    call: Callable[[], Any]
    read: Callable[[Any], Any] = _as_it_is  # to torch tensors under the model's names, not measured
    note: str = ""  # what had to change about the model
    seconds: float = 0.0  # that compiling took


class Peer(NamedTuple):
    """A contender: from a quantity and a task to a call."""

    name: str
    make: Callable[[str, Task], Ready]
    quantities: Sequence[str] = QUANTITIES  # that it offers
    package: str = ""  # that it comes from; none: torch, or psgrad itself


def from_grads(grads: Callable[[Task], Ready], quantity: str, task: Task) -> Ready:
    """Any quantity, computed from per-sample gradients."""
    ready, follow, max_norm = grads(task), FROM_GRADS[quantity], task.max_norm
    return Ready(lambda: follow(ready.call(), max_norm), note=ready.note)


def batch_gradient(task: Task) -> Ready:
    """The ordinary gradient of the mean loss: what everything is measured against."""
    return Ready(lambda: task.gradient(task.inputs, task.target))


def loop(quantity: str, task: Task) -> Ready:
    """A gradient for each sample; norms and clipped sums hold one at a time."""
    stacked = {"grads": task.stacked, "gram": lambda: gram(task.stacked())}
    return Ready({"norms": task.norms, "clipped": task.clipped, **stacked}[quantity])


def vmapped(task: Task) -> Ready:
    """torch.func as its documentation has it."""
    params = {name: p.detach() for name, p in task.params.items()}
    fn = lambda params, x, y: task.loss(functional_call(task.model, params, (x[None],)), y[None])
    per_sample = vmap(grad(fn), in_dims=(None, 0, 0), randomness="different")
    return Ready(lambda: per_sample(params, task.inputs, task.target))


def copied(task: Task) -> tuple[nn.Module, str]:
    """A model that a peer may change, in the form that hooks on modules want, and what is different about it."""
    model: Any = deepcopy(task.model)
    if has_positions := hasattr(model, "per_sample_positions"):
        model.per_sample_positions = True
    return model, "positions looked up per sample" * has_positions


def taken(params: Mapping[str, Tensor], attribute: str) -> Grads:
    """What a peer has left on parameters, which are clean afterwards."""
    found: dict[str, Any] = {name: getattr(p, attribute, None) for name, p in params.items()}
    if absent := [name for name, value in found.items() if value is None]:
        raise NotImplementedError(f"no {attribute} for {len(absent)} of {len(params)} parameters, as {absent[0]}")
    for p in params.values():
        p.grad = None
        setattr(p, attribute, None)
    return found


def expanded(task: Task) -> Ready:
    model, note = copied(task)
    forward = call_for_per_sample_grads(model, batch_size=len(task.inputs), loss_reduction="mean")
    return backward(task, forward, dict(model.named_parameters()), "grad_sample", note)


def backward(task: Task, forward: Callable[..., Any], params: Mapping[str, Tensor], attribute: str, note: str) -> Ready:
    """The backward of a loss, giving what a peer leaves on the parameters."""

    def call() -> Grads:
        task.loss(forward(task.inputs), task.target).backward()
        return taken(params, attribute)

    return Ready(call, note=note)


def adapted(task: Task) -> tuple[nn.Module, dict[str, Tensor], str]:
    """The model as Opacus wants it, its parameters under the names of the model as it was, what is different."""
    from opacus.validators import ModuleValidator

    model, note = copied(task)
    if any(isinstance(module, nn.LSTM) for module in model.modules()):
        model, note = ModuleValidator.fix(model), "nn.LSTM replaced by DPLSTM"
    names: dict[Tensor, str] = {}
    for name, p in model.state_dict(keep_vars=True).items():  # DPLSTM restores nn.LSTM's names there
        names.setdefault(p, name)
    return model, {names[p]: p for p in model.parameters()}, note


def hooked(task: Task) -> Ready:
    """Hooks that write per-sample gradients."""
    from opacus import GradSampleModule

    model, params, note = adapted(task)
    return backward(task, GradSampleModule(model, loss_reduction="mean"), params, "grad_sample", note)


def ghost(quantity: str, task: Task) -> Ready:
    """Ghost clipping: norms and clipped sums without per-sample gradients."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    model, params, note = adapted(task)
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=task.max_norm)
    cleaner = torch.optim.SGD(params.values())  # of the optimizer, only zero_grad is used

    def norms() -> Tensor:
        task.loss(wrapped(task.inputs), task.target).backward()
        found: Tensor = wrapped.get_norm_sample()
        taken(params, "_norm_sample")
        return found

    def clipped() -> Grads:
        out, n = wrapped(task.inputs), len(task.inputs)
        losses = F.cross_entropy(out.flatten(0, -2), task.target.flatten(), reduction="none").view(n, -1).mean(1)
        DPTensorFastGradientClipping(wrapped, cleaner, losses, "mean").backward()
        return taken(params, "grad")

    return Ready(norms if quantity == "norms" else clipped, note=note)


def extended(extension: str, attribute: str, task: Task) -> Ready:
    """A backward with an extension, giving what it leaves on the parameters."""
    import backpack

    model, note = copied(task)
    model = backpack.extend(model)
    params, made = dict(model.named_parameters()), getattr(backpack.extensions, extension)

    def call() -> Grads:
        loss = task.loss(model(task.inputs), task.target) * len(task.inputs)  # it does not undo the mean
        with backpack.backpack(made()):
            loss.backward()
        return taken(params, attribute)

    return Ready(call, note=note)


def backpacked(quantity: str, task: Task) -> Ready:
    """Norms by BatchL2Grad, the other quantities from BatchGrad."""
    if quantity != "norms":
        return from_grads(partial(extended, "BatchGrad", "grad_batch"), quantity, task)
    squares = extended("BatchL2Grad", "batch_l2", task)
    return Ready(lambda: torch.stack(list(squares.call().values())).sum(0).sqrt(), note=squares.note)


_FUNCTIONS = (psgrad.per_sample_grads, psgrad.per_sample_norms, psgrad.clipped_grad, psgrad.gram)
FUNCTIONS: dict[str, Callable[..., Any]] = dict(zip(QUANTITIES, _FUNCTIONS, strict=True))


def caller(quantity: str, task: Task, reuse: bool = False) -> Callable[..., Any]:
    """psgrad's function on a task, as a function of its options; `reuse`: gradients go where the last ones went."""
    fn, params = psgrad.from_module(task.model, task.loss)
    options: dict[str, Any] = {"max_norm": task.max_norm} if quantity == "clipped" else {}
    if reuse:
        options["out"] = {name: p.new_zeros(len(task.inputs), *p.shape) for name, p in params.items()}
    return partial(FUNCTIONS[quantity], fn, params, (task.inputs, task.target), **options)


def ours(quantity: str, task: Task) -> Ready:
    call = caller(quantity, task)
    return Ready(call, lambda answer: answer.grad) if quantity == "clipped" else Ready(call)


def compiled(quantity: str, task: Task) -> Ready:
    """psgrad.compile: whichever of its backends is faster."""
    fn, params = psgrad.from_module(task.model, task.loss)
    options: dict[str, Any] = {"max_norm": task.max_norm} if quantity == "clipped" else {}
    step = psgrad.compile(FUNCTIONS[quantity], fn, **options)
    batch = task.inputs, task.target
    step(params, batch)
    info = step.cache_info()
    note = f"{info.backends[0]}, ready after {info.seconds:.0f} s"
    read = (lambda answer: answer.grad) if quantity == "clipped" else _as_it_is
    return Ready(lambda: step(params, batch), read, note, info.seconds)


def torch_compiled(ready: Ready) -> Ready:
    """A contender through torch.compile, for the shapes of this task: others of the same code would be generalised."""
    torch._dynamo.reset()
    call, started = torch.compile(ready.call, dynamic=False), perf_counter()
    call()
    seconds = perf_counter() - started
    return Ready(call, ready.read, f"ready after {seconds:.0f} s", seconds)


def by_jax(quantity: str, task: Task, private: bool = False) -> Ready:
    import_module("jax_privacy" if private else "jax")
    return Ready(*import_module(".jax_peer", __package__).faster(quantity, task, private))


BASE, OURS = "batch", ("psgrad", "psgrad out=", "psgrad compiled")
BY_TORCH = ("batch compiled", "compiled vmap(grad)")  # peers of what psgrad compiles
GROWTH = (BASE, "vmap(grad)", "Opacus ghost", "psgrad")  # whose cost is followed from size to size
_ALL = (  # a new peer is a function above and a line here
    Peer(BASE, lambda quantity, task: batch_gradient(task)),
    Peer("loop", loop),
    Peer("vmap(grad)", partial(from_grads, vmapped)),
    Peer(BY_TORCH[0], lambda quantity, task: torch_compiled(batch_gradient(task)), ("grads", "norms", "clipped")),
    Peer(BY_TORCH[1], lambda quantity, task: torch_compiled(from_grads(vmapped, quantity, task))),
    Peer("ExpandedWeights", partial(from_grads, expanded)),
    Peer("Opacus", partial(from_grads, hooked), package="opacus"),
    Peer("Opacus ghost", ghost, ("norms", "clipped"), "opacus"),
    Peer("BackPACK", backpacked, package="backpack"),
    Peer("JAX", by_jax, package="jax"),
    Peer("jax_privacy", partial(by_jax, private=True), ("clipped",), "jax_privacy"),
    Peer(OURS[0], ours),
    Peer(OURS[1], lambda quantity, task: Ready(caller(quantity, task, reuse=True)), ("grads",)),
    Peer(OURS[2], compiled),
)
PEERS = {peer.name: peer for peer in _ALL}
