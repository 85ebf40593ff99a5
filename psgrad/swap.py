"""torch.func.functional_call, but right for modules and dicts that are reachable twice.

Torch's own leaves a batched tensor in the user's model where one dict of parameters belongs to two modules. This one
puts everything back where it was, in the opposite order; it also sees where the model has put something else in the
place of a parameter, and a small net takes a third of the time.
"""

import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_, setitem
from typing import Any

import torch
from torch import Tensor

from .engine.held import HELD
from .engine.ladder import callers_level
from .errors import ArgumentError, UnsupportedOpError
from .torch_ import levels
from .torch_.modules import FLAT_WEIGHTS, Home, buffers_of, children_of, gradient_hooks_of, parameters_of

_LOCKS: "weakref.WeakKeyDictionary[torch.nn.Module, threading.RLock]" = weakref.WeakKeyDictionary()
_memory_of: Callable[[Tensor], int] = Tensor.data_ptr


class Slots:
    """Where a model holds parameters, buffers, and tensors that it keeps beside them.

    Every place of a parameter is a slot: a key of a module's dict. The lists go together, slot by slot, so that a swap
    is a few calls of C functions, whatever the size of the model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.lock = _LOCKS.setdefault(model, threading.RLock())  # two threads would see each other's parameters
        with self.lock:
            slots = [
                (parameters_of(module), key, path, p)
                for path, module in model.named_modules()  # each module once, whatever the number of paths to it
                for key, p in parameters_of(module).items()
                if p is not None
            ]
        first: dict[int, str] = {}
        self.homes = [home for home, _, _, _ in slots]
        self.keys = [key for _, key, _, _ in slots]
        self.parameters = [p for _, _, _, p in slots]
        self.names = [  # a tied parameter has its first name everywhere
            first.setdefault(id(p), f"{path}.{key}" if path else key) for _, key, path, p in slots
        ]
        self.count = len(first)
        parts = [  # modules with parameters of their own or inside
            (children_of(module), key, f"{path}.{key}" if path else key, child)
            for path, module in model.named_modules()
            for key, child in children_of(module).items()
            if child is not None and next(child.parameters(), None) is not None
        ]
        # what has to be as it was: the parameters first, slot by slot, then these modules
        self.places = self.homes + [home for home, _, _, _ in parts]
        self.place_keys = self.keys + [key for _, key, _, _ in parts]
        self.place_names = self.names + [name for _, _, name, _ in parts]
        self.residents = self.parameters + [child for _, _, _, child in parts]
        self.buffered = [module for module in model.modules() if buffers_of(module)]
        self.caches = [  # what the older weight_norm sets, what recurrent layers keep
            (vars(module), key)
            for module in model.modules()
            for key, value in vars(module).items()
            if isinstance(value, Tensor) or key in FLAT_WEIGHTS
        ]
        self.has_run = False

    def trainable(self) -> dict[str, Tensor]:
        """The parameters with `requires_grad`, detached."""
        trainable = [(name, p) for name, p in zip(self.names, self.parameters, strict=True) if p.requires_grad]
        for name, p in trainable:
            if gradient_hooks_of(p):
                raise _hooked(name)
        return {name: p.detach() for name, p in trainable}

    def refuse_others(self, there: Sequence[Any]) -> None:
        """Raise where what is `there` has replaced a parameter or a module; what another swap has put there has not."""
        for name, own, other in zip(self.place_names, self.residents, there, strict=True):
            if other is not own and isinstance(own, torch.nn.Module):
                raise ArgumentError(
                    f"module {name!r} of the model is another than when from_module was called\n"
                    "  its parameters are not those of params: call from_module again."
                )
            if other is not own and type(other) in (torch.nn.Parameter, type(None)):
                raise ArgumentError(
                    f"parameter {name!r} of the model is another than when from_module was called\n"
                    "  load_state_dict(assign=True) and assignments replace parameters: call from_module again."
                )


class Given:
    """The parameters that `from_module` handed out, beside the model's own whose memory they share."""

    def __init__(self, slots: Slots, params: Mapping[str, Tensor]) -> None:
        own = {name: p for name, p in zip(slots.names, slots.parameters, strict=True) if name in params}
        self.names, self.own, self.tensors = list(own), list(own.values()), [params[name] for name in own]

    def refuse_changed(self, params: Any) -> None:
        """Raise where one of those in `params` has lost the model's memory since, or has got hooks."""
        together = list(map(_memory_of, self.own)) == list(map(_memory_of, self.tensors))
        if (together and not any(map(gradient_hooks_of, self.own))) or not isinstance(params, Mapping):
            return
        for name, p, t in zip(self.names, self.own, self.tensors, strict=True):
            if name in params and gradient_hooks_of(p):
                raise _hooked(name)
            if params.get(name) is t and t.data_ptr() != p.data_ptr():
                raise ArgumentError(
                    f"parameter {name!r} of the model has other memory than when from_module was called\n"
                    "  assignments to .data, casts and moves to a device replace it: call from_module again."
                )


def _hooked(name: str) -> ArgumentError:
    return ArgumentError(
        f"parameter {name!r} of the model has hooks on its gradient, and per-sample gradients pass none\n"
        "  remove them, and do to the gradients what they do."
    )


@dataclass(eq=False)
class Swap:
    """Inside, the model holds `params`; its other parameters are frozen, its buffers copies it may change.

    The names in `params` are names of slots.
    """

    slots: Slots
    params: Mapping[str, Tensor]

    def __enter__(self) -> None:
        slots, held = self.slots, HELD
        slots.lock.acquire()
        self.there = there = list(map(dict.get, slots.places, slots.place_keys))  # None: the model has none any more
        if not all(map(is_, there, slots.residents)):
            try:
                slots.refuse_others(there)
            except ArgumentError:
                slots.lock.release()
                raise
        held.holdings.append(self)
        self.given = given = list(map(self.params.get, slots.names))
        self.beside: list[tuple[Home, str, Any]] = []  # what was there in other places
        try:
            values = given
            if len(self.params) < slots.count:
                values = [p.detach() if t is None else t for t, p in zip(given, slots.parameters, strict=True)]
            deque(map(setitem, slots.homes, slots.keys, values), 0)
            if slots.caches or slots.buffered:
                self._copy_beside()
        except BaseException as error:
            self.__exit__(error)
            raise
        if held.record is not None:
            held.record.append(self)

    def __exit__(self, error: object, *_: object) -> None:
        """The model holds its own again. Raises where a parameter is not where it was put."""
        slots = self.slots
        whole = all(map(is_, map(dict.get, slots.homes, slots.keys), self.given))
        self.missing = [] if whole else self._missing()
        deque(map(setitem, slots.homes, slots.keys, self.there), 0)  # the modules, at the end of the list, are there
        if self.beside:
            for home, key, there in reversed(self.beside):  # two modules may share a home
                home[key] = there
        HELD.holdings.pop()
        slots.lock.release()
        if error is not None:
            return
        if self.missing:
            raise self._lost()
        if not slots.has_run:
            slots.has_run = True
            _warn_of_kept(slots.model)

    def _missing(self) -> list[str]:
        """The names of parameters that are not where they were put."""
        slots = self.slots
        places = zip(slots.homes, slots.keys, slots.names, self.given, strict=True)
        return [name for home, key, name, given in places if given is not None and home.get(key) is not given]

    def _copy_beside(self) -> None:
        """Buffers are copies while the model runs; what it keeps beside them is noted."""
        for home, key in self.slots.caches:
            if key in home:
                self.beside.append((home, key, home[key]))
        for module in self.slots.buffered:
            home = buffers_of(module)
            for key, b in home.items():
                if b is not None:
                    self.beside.append((home, key, b))
                    home[key] = b.clone()

    def own(self, t: Tensor) -> str | None:
        """The name of the parameter that `t` is, where another stands in for it."""
        slots = zip(self.slots.names, self.slots.parameters, strict=True)
        return next((name for name, p in slots if p is t and name in self.params), None)

    def _lost(self) -> UnsupportedOpError:
        name = self.missing[0]
        path = name.rpartition(".")[0]
        module = self.slots.model.get_submodule(path)
        where = f"in {path!r}, a {type(module).__name__}" if path else f"in the model, a {type(module).__name__}"
        return UnsupportedOpError(
            f"the model replaced params[{name!r}] while it ran, so that its gradient would be lost\n"
            f"  {where}\n"
            "  a hook or a wrapper puts another tensor there: give the module without it, or write fn yourself."
        )


def _warn_of_kept(model: torch.nn.Module) -> None:
    """Once per model: a tensor of its samples that it has kept is dead after the call, and torch says little of it."""
    level = levels.current_level()
    for path, module in model.named_modules() if level is not None else ():
        for key, value in vars(module).items():
            kept = value if type(value) in (list, tuple) else (value,)
            if any(isinstance(t, Tensor) and levels.is_batched(t, level) for t in kept):
                where = f"{path!r}, a {type(module).__name__}," if path else f"the model, a {type(module).__name__},"
                warnings.warn(
                    f"{where} keeps a tensor of its sample in its attribute {key!r}\n"
                    "  it cannot be used after the call, holds the call's memory, and a next call may read it:\n"
                    "  call the model itself to look at it, or return it from an fn of your own, by has_aux=True.",
                    stacklevel=callers_level(),
                )
