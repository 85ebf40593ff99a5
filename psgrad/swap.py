"""torch.func.functional_call, but right for modules and dicts that are reachable twice.

Torch's own leaves a batched tensor in the user's model where one dict of parameters belongs to two modules. This one
puts everything back where it was, in the opposite order; it also sees where the model has put something else in the
place of a parameter, and a small net takes a third of the time.
"""

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .engine.held import HELD
from .errors import ArgumentError, UnsupportedOpError
from .torch_.modules import Home, buffers_of, has_gradient_hooks, parameters_of

_LOCKS: "weakref.WeakKeyDictionary[torch.nn.Module, threading.RLock]" = weakref.WeakKeyDictionary()
Slot = tuple[Home, str, str, torch.nn.Parameter]  # (home, key, name, parameter)


class Slots:
    """Where a model holds parameters, buffers, and tensors that it keeps beside them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.lock = _LOCKS.setdefault(model, threading.RLock())  # two threads would see each other's parameters
        with self.lock:
            self.parameters = _parameters(model)
        self.buffered = [module for module in model.modules() if buffers_of(module)]
        self.caches = [  # what the older weight_norm sets, what recurrent layers keep
            (vars(module), key)
            for module in model.modules()
            for key, value in vars(module).items()
            if isinstance(value, Tensor) or key == "_flat_weights"
        ]

    @property
    def names(self) -> set[str]:
        return {name for _, _, name, _ in self.parameters}

    def trainable(self) -> dict[str, Tensor]:
        """The parameters with `requires_grad`, detached."""
        for _, _, name, p in self.parameters:
            if p.requires_grad and has_gradient_hooks(p):
                raise ArgumentError(
                    f"parameter {name!r} of the model has hooks on its gradient, and per-sample gradients pass none\n"
                    "  remove them, and do to the gradients what they do."
                )
        return {name: p.detach() for _, _, name, p in self.parameters if p.requires_grad}

    def refuse_moved(self, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Raise where a parameter in `given`, one that `trainable` gave as `own`, has lost the model's memory since."""
        for _, _, name, p in self.parameters:
            t = own.get(name)
            if t is not None and given.get(name) is t and t.data_ptr() != p.data_ptr():
                raise ArgumentError(
                    f"parameter {name!r} of the model has other memory than when from_module was called\n"
                    "  assignments to .data, casts and moves to a device replace it: call from_module again."
                )


def _parameters(model: torch.nn.Module) -> list[Slot]:
    """Every place of every parameter, a tied one under its first name."""
    names: dict[int, str] = {}
    return [
        (parameters_of(module), key, names.setdefault(id(p), f"{path}.{key}" if path else key), p)
        for path, module in model.named_modules()  # each module once, whatever the number of paths to it
        for key, p in parameters_of(module).items()
        if p is not None
    ]


class Swap:
    """Inside, the model holds `params`; its other parameters are frozen, its buffers copies it may change."""

    def __init__(self, slots: "Slots", params: Mapping[str, Tensor]) -> None:
        self.model, self.lock = slots.model, slots.lock
        self.slots, self.buffered, self.caches, self.params = slots.parameters, slots.buffered, slots.caches, params
        self.before: list[tuple[Home, str, Any, Any]] = []  # what was there, and what was put there to stay

    def __enter__(self) -> None:
        self.lock.acquire()
        held, params, before = HELD, self.params, self.before
        held.locks.append(self.lock)
        held.holdings.append(self)
        try:
            for home, key, name, p in self.slots:
                there = home[key]
                if there is not p and type(there) is torch.nn.Parameter:
                    raise _replaced(name)
                given = params.get(name)
                before.append((home, key, there, given))
                home[key] = p.detach() if given is None else given
            for home, key in self.caches:
                if key in home:
                    before.append((home, key, home[key], None))
            for module in self.buffered:
                home = buffers_of(module)
                for key, b in home.items():
                    if b is not None:
                        before.append((home, key, b, None))
                        home[key] = b.clone()
        except BaseException:
            self._restore()
            raise
        if held.record is not None:
            held.record.append(self)

    def __exit__(self, error: object, *_: object) -> None:
        lost = self._restore()
        if lost is not None and error is None:
            raise self._lost(lost)

    def _restore(self) -> Tensor | None:
        """The model holds its own again. Returns a parameter that was not where it was put, if there is one."""
        lost, held = None, HELD
        for home, key, there, given in reversed(self.before):  # two modules may share a home
            if given is not None and home.get(key) is not given:
                lost = given
            home[key] = there
        self.before.clear()
        held.holdings.pop()
        held.locks.pop()
        self.lock.release()
        return lost

    def own(self, t: Tensor) -> str | None:
        """The name of the parameter that `t` is, where another stands in for it."""
        return next((name for _, _, name, p in self.slots if p is t and name in self.params), None)

    def _lost(self, given: Tensor) -> UnsupportedOpError:
        name = next(name for name, p in self.params.items() if p is given)
        path = name.rpartition(".")[0]
        module = self.model.get_submodule(path)
        where = f"in {path!r}, a {type(module).__name__}" if path else f"in the model, a {type(module).__name__}"
        return UnsupportedOpError(
            f"the model replaced params[{name!r}] while it ran, so that its gradient would be lost\n"
            f"  {where}\n"
            "  a hook or a wrapper puts another tensor there: give the module without it, or write fn yourself."
        )


def _replaced(name: str) -> ArgumentError:
    return ArgumentError(
        f"parameter {name!r} of the model is another than when from_module was called\n"
        "  load_state_dict(assign=True) and assignments replace parameters: call from_module again."
    )
