"""What torch does not show to modes: calls of autograd Functions, and who seeds its random numbers.

While somebody is `WATCHING`, `Function.apply`, `torch.manual_seed` and `torch.set_rng_state` have other code; in
threads that do not watch, that code does what torch's own does. The numbers in a generator's state would not tell of
seeding: a function may seed it to where it already is.
"""

import inspect
import threading
import types
from typing import Any

import torch

_lock = threading.Lock()
_watching = 0  # how many runs, in all threads, watch


class _Thread(threading.local):
    watching = 0  # how many of them are this thread's
    seedings = 0  # how often this thread has seeded while it watched


_thread = _Thread()

# ---- autograd Functions ----------------------------------------------------------------------------------

CUSTOM_FUNCTION_CALL: Any = torch._functorch.autograd_function.custom_function_call  # what modes see of the newer style
_Function: Any = torch.autograd.Function
_method: Any = _Function.__dict__["apply"]
_apply: Any = getattr(_method, "__func__", None)  # up to torch 2.14 a Python function
_code = None if _apply is None else _apply.__code__
_torchs_apply: Any = (
    (lambda cls, *args, **kwargs: _method.__get__(None, cls)(*args, **kwargs))
    if _code is None
    else types.FunctionType(_code, _apply.__globals__, "apply", _apply.__defaults__, _apply.__closure__)
)


class FunctionCall:
    """The function that modes see for `MyFunction.apply`; `function` is the class."""

    __slots__ = ("function",)

    def __init__(self, function: Any) -> None:
        self.function = function

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FunctionCall) and other.function is self.function

    def __hash__(self) -> int:
        return hash(self.function)

    @property
    def __name__(self) -> str:
        return f"{self.function.__name__}.apply"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The same without asking modes, which see what the Function calls instead."""
        return _torchs_apply(self.function, *args, **kwargs)


class _Hook:
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Runs in place of torch's `Function.apply`, among the names of torch's module, hence the import."""
        from psgrad.torch_.watching import applied

        return applied(__class__, cls, args, kwargs)  # type: ignore[name-defined]  # torch's code has that cell, too


_HOOK: Any = classmethod(_Hook.apply)  # type: ignore[arg-type]


def applied(_: Any, cls: Any, args: Any, kwargs: Any) -> Any:
    """`cls.apply(*args, **kwargs)` while some thread wants modes to see it."""
    if not _thread.watching or not torch._C._is_torch_function_mode_enabled():
        return _torchs_apply(cls, *args, **kwargs)
    if _is_newer(cls):  # as torch itself does: defaults are filled in, names forgotten
        bound = inspect.signature(cls.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args, kwargs = bound.args, {}
    return torch.overrides.handle_torch_function(FunctionCall(cls), args, *args, **kwargs)


def _is_newer(function: Any) -> bool:
    """Whether an autograd Function is in the style that torch lets into transforms: its forward has no ctx."""
    return function.setup_context is not _Function.setup_context


def says_vmap(function: Any) -> bool:
    """Whether an autograd Function says what it does under vmap, by a staticmethod or by leaving it to torch."""
    return _is_newer(function) and (function.generate_vmap_rule or function.vmap is not _Function.vmap)


def vmaps_its_backward(function: Any) -> bool:
    """Whether torch vmaps the backward of an autograd Function together with its forward."""
    return _is_newer(function) and bool(function.generate_vmap_rule)


_HOOK_CODE = _Hook.apply.__code__

# ---- seeding ---------------------------------------------------------------------------------------------


def _copied(function: Any) -> Any:
    return types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)


def _manual_seed(seed: Any) -> Any:
    """Runs in place of torch's function, among the names of torch's module, hence the import."""
    from psgrad.torch_.watching import noted

    return noted(0, seed)


def _set_rng_state(new_state: Any) -> Any:
    """Runs in place of torch's function, among the names of torch's module, hence the import."""
    from psgrad.torch_.watching import noted

    return noted(1, new_state)


_FUNCTIONS: Any = (torch.random.manual_seed, torch.random.set_rng_state)
_ORIGINALS = tuple(map(_copied, _FUNCTIONS))
_CODES = tuple(function.__code__ for function in _ORIGINALS)
_NOTING = (_manual_seed.__code__, _set_rng_state.__code__)


def noted(which: int, argument: Any) -> Any:
    """One of the functions, called while some thread watches."""
    if _thread.watching:
        _thread.seedings += 1
    return _ORIGINALS[which](argument)


def seedings() -> tuple[int, int]:
    """Changes when the default generator is seeded: by torch's functions, or otherwise with another seed."""
    return _thread.seedings, torch.default_generator.initial_seed()


# ---- both ------------------------------------------------------------------------------------------------


def _exchange(apply: Any, code: Any, codes: Any) -> None:
    """Give torch's functions other code, or their own. Where `Function.apply` is Python its code is exchanged, not the
    method: people keep `exp = Exp.apply` and call that."""
    if _apply is None:
        _Function.apply = apply
    else:
        _apply.__code__ = code
    _FUNCTIONS[0].__code__, _FUNCTIONS[1].__code__ = codes


class _Watching:
    """Inside, modes of this thread see calls of autograd Functions, and `seedings` counts what this thread seeds.

    Torch shows modes the Functions in the newer style alone; the others it refuses under vmap before any mode is asked.
    """

    def __enter__(self) -> None:
        global _watching
        with _lock:
            _watching += 1
            if _watching == 1:
                _exchange(_HOOK, _HOOK_CODE, _NOTING)
        _thread.watching += 1

    def __exit__(self, *_: object) -> None:
        global _watching
        _thread.watching -= 1
        with _lock:
            _watching -= 1
            if not _watching:
                _exchange(_method, _code, _CODES)


WATCHING = _Watching()
