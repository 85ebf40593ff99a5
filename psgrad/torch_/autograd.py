"""Torch's autograd: its engine, called directly; and autograd Functions, which modes do not see by themselves.

While somebody watches (`FUNCTIONS_SEEN`), `Function.apply` is another function; in threads that do not watch, that one
does what torch's own does.
"""

import inspect
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

is_autocasting: Callable[[], bool] = torch._C._is_any_autocast_enabled  # for some device
without_modes: Any = torch._C.DisableTorchFunction  # inside, torch functions are not shown to modes
_run_backward: Any = torch.autograd.Variable._execution_engine.run_backward


def gradients(y: Tensor, inputs: Sequence[Any], seed: Tensor) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` of `y` with `seed`, None where an input is not used.

    On the CPU, where the backward runs in this thread, this calls the C++ engine directly: our arguments are valid,
    and the checks of torch.autograd.grad cost 50 us.
    """
    if y.device.type != "cpu":
        return torch.autograd.grad(y, inputs, seed, allow_unused=True)
    found: tuple[Tensor | None, ...] = _run_backward(
        (y,), (seed,), False, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


def direct_apply(function: Any) -> Any:
    """`function.apply` of the C++ base class, without the checks for functorch: for calls outside any transform."""
    return super(torch.autograd.Function, function).apply


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
_lock = threading.Lock()
_watching = 0  # how many runs, in all threads, want to see calls of autograd Functions


class _Thread(threading.local):
    watching = 0  # how many of them are this thread's


_thread = _Thread()


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
        from psgrad.torch_.autograd import applied

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


class _FunctionsSeen:
    """Inside, modes of this thread see calls of autograd Functions.

    Torch shows them those in the newer style alone, and refuses the others under vmap before any mode is asked. Where
    `Function.apply` is Python its code is exchanged, not the method: people keep `exp = Exp.apply` and call that.
    """

    def __enter__(self) -> None:
        global _watching
        with _lock:
            _watching += 1
            if _watching == 1:
                if _apply is None:
                    _Function.apply = _HOOK
                else:
                    _apply.__code__ = _HOOK_CODE
        _thread.watching += 1

    def __exit__(self, *_: object) -> None:
        global _watching
        _thread.watching -= 1
        with _lock:
            _watching -= 1
            if not _watching:
                if _apply is None:
                    _Function.apply = _method
                else:
                    _apply.__code__ = _code


FUNCTIONS_SEEN = _FunctionsSeen()
