"""A plain loop over the user's own function, or module, by ordinary autograd: what `verify` holds psgrad against.

Nothing here knows of the engine. `Problem` only says how the arguments are laid out, and checks what comes back.
"""

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from .engine.problem import Problem, Sampled, generators, rewind
from .torch_.modules import buffers_of

# ---- random numbers -----------------------------------------------------------------------------------


class Draws:
    """The states of the generators that `fn` may draw from: torch's, Python's, numpy's."""

    def __init__(self, problem: Problem) -> None:
        self.tensors = [t for t in (*problem.params, *problem.batch) if isinstance(t, Tensor)]
        self.torchs, self.others = generators(self.tensors), self._others()

    @staticmethod
    def _others() -> tuple[Any, bytes]:
        numpy = sys.modules.get("numpy")
        return random.getstate(), b"" if numpy is None else pickle.dumps(numpy.random.get_state())

    def again(self) -> None:
        """Put the generators back."""
        rewind(self.torchs)
        python, numpys = self.others
        random.setstate(python)
        if numpys:
            sys.modules["numpy"].random.set_state(pickle.loads(numpys))

    @property
    def torch_drew(self) -> bool:
        now = generators(self.tensors)
        return not all(torch.equal(state, now[device]) for device, state in self.torchs.items())

    @property
    def others_drew(self) -> bool:
        return self._others() != self.others


# ---- the plain loop -----------------------------------------------------------------------------------


class Looped(NamedTuple):
    """What the plain loop gave, sample by sample."""

    losses: list[Tensor]
    grads: list[list[Tensor | None]]  # of each sample for each parameter; None: autograd finds no way there
    aux: list[list[Tensor]]
    precision: float  # of the coarsest dtype that was met
    again: float  # the first sample's loss, once more


class Target(NamedTuple):
    """What is called plainly: a function, and the tensors to differentiate by, which it holds or is given."""

    name: str
    problem: Problem
    leaves: Callable[[], list[Tensor]]
    around: contextlib.AbstractContextManager[Any]  # around all samples
    each: Callable[[], contextlib.AbstractContextManager[Any]]  # around one


def target_of(problem: Problem, params: Any) -> Target:
    """The module that `fn` was made of, if `from_module` made it and the module has all of `params`; or `fn`."""
    made_of = getattr(problem.fn, "psgrad_module", None)
    if made_of is not None and isinstance(params, Mapping):
        model, loss, lock = made_of
        with lock:  # in another thread the module may hold something else just now
            own = dict(model.named_parameters())
        if all(_fits(own.get(name), value) for name, value in params.items()):
            names = [path[0] for path in problem.params_spec.paths()]
            leaves = [own[name] for name in names]
            return Target(
                "the module itself",
                problem._replace(fn=_module_alone(model, loss)),
                lambda: leaves,
                _holding(model, lock, list(zip(leaves, problem.params, strict=True))),
                lambda: _state_kept(model),
            )

    def clones() -> list[Tensor]:
        return [p.detach().clone().requires_grad_() for p in problem.params]

    return Target("fn itself", problem, clones, contextlib.nullcontext(), contextlib.nullcontext)


def _fits(own: Any, value: Any) -> bool:
    if not isinstance(own, Tensor) or not isinstance(value, Tensor):
        return False
    return own.shape == value.shape and own.dtype == value.dtype and own.device == value.device


def _module_alone(model: torch.nn.Module, loss: Callable[..., Any]) -> Callable[..., Any]:
    """`loss(model(inputs), target)` for a batch of one, by the parameters that the module itself holds."""

    def fn(_: Any, sample: Any) -> Any:
        inputs, target = optree.tree_map(lambda t: t.unsqueeze(0) if isinstance(t, Tensor) else t, sample)
        if isinstance(inputs, dict):
            return loss(model(**inputs), target)
        return loss(model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs), target)

    return fn


@contextlib.contextmanager
def _holding(
    model: torch.nn.Module, lock: contextlib.AbstractContextManager[Any], values: Sequence[tuple[Tensor, Tensor]]
) -> Iterator[None]:
    """Inside, the module's own parameters have these values and no `.grad`; after, all is as it was.

    The parameters stay the same objects, so that whoever else holds them sees the values, too.
    """
    with lock, contextlib.ExitStack() as after:
        for p in model.parameters():
            after.callback(setattr, p, "grad", p.grad)
            p.grad = None
        for own, value in values:
            if own.data_ptr() != value.data_ptr() or own.stride() != value.stride():
                after.callback(setattr, own, "data", own.data)
                own.data = value.clone()
            after.callback(own.requires_grad_, own.requires_grad)
            own.requires_grad_()
        yield


@contextlib.contextmanager
def _state_kept(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the module's buffers are copies; after, they and all attributes of its modules are as they were."""
    with contextlib.ExitStack() as after:
        for module in model.modules():
            for home in (vars(module), buffers_of(module)):
                after.callback(_restore, home, dict(home))
            for key, buffer in buffers_of(module).items():
                buffers_of(module)[key] = None if buffer is None else buffer.clone()
        yield


def _restore(home: dict[str, Any], before: dict[str, Any]) -> None:
    for key in [key for key in home if key not in before]:
        del home[key]
    home.update(before)


def loop(target: Target, draws: Draws) -> Looped:
    """One sample after the other; each draws the same random numbers."""
    problem = target.problem
    losses, grads, aux = [], [], []
    dtypes = {p.dtype for p in problem.params}

    def met(t: Tensor) -> Tensor:
        dtypes.add(t.dtype)
        return t

    def called(i: int, leaves: list[Tensor]) -> Sampled:
        draws.again()
        return problem.call(leaves, [t.clone() if isinstance(t, Tensor) else t for t in problem.sample(i)])

    with target.around:
        with target.each():
            try:
                with torch.autograd.graph.saved_tensors_hooks(met, lambda t: t):
                    again = called(0, target.leaves()).loss.item()
            except RuntimeError as error:
                if "saved tensor hooks" not in str(error):
                    raise
                again = called(0, target.leaves()).loss.item()  # torch.func takes none: of dtypes less is known then
        for i in range(problem.n):
            with target.each():
                leaves = target.leaves()
                out = called(i, leaves)
                grads.append(_gradients(out.loss, leaves))
            losses.append(out.loss.detach())
            aux.append(out.aux)
            dtypes.add(out.loss.dtype)
    return Looped(losses, grads, aux, _precision(dtypes, problem.params), again)


def _gradients(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """By ordinary autograd, with what a backward inside the backward adds to `.grad` (a function that runs again)."""
    if not loss.requires_grad:
        return [None for _ in leaves]
    found: list[Tensor | None] = list(torch.autograd.grad(loss, leaves, allow_unused=True))
    for i, leaf in enumerate(leaves):
        if leaf.grad is not None:
            one = found[i]
            found[i] = leaf.grad if one is None else one + leaf.grad
            leaf.grad = None
    return found


def _precision(dtypes: set[torch.dtype], params: Sequence[Tensor]) -> float:
    """The distance from 1 to the next number, in the coarsest dtype that is computed with."""
    found = [torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    if torch.float32 in dtypes and any(p.device.type != "cpu" for p in params):
        found.append(2.0**-10)  # kernels off the CPU may multiply with fewer digits (TF32)
    return max(found)


def nudged(params: Sequence[Tensor], precision: float) -> list[Tensor]:
    """The parameters, each number a little larger or a little smaller, by `precision` of itself."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for p in params:
        up = torch.randint(2, p.shape, generator=generator).to(p.device, torch.bool)
        found.append(torch.where(up, p * (1 + precision), p * (1 - precision)).to(p.dtype))
    return found
