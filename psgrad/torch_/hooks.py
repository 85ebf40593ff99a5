"""What torch runs behind a mode's back: autograd Functions, and functions that torch.compile made.

The private names for both live here. Whatever is changed in torch is changed for the time of a run only, and does
nothing in threads that are not inside one.
"""

import contextlib
import inspect
import sys
import threading
import types
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

C = TypeVar("C", bound=Callable[..., Any])

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
        from psgrad.torch_.hooks import applied

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


def vmaps_itself(function: Any) -> bool:
    """Whether an autograd Function says what it does under vmap, by a staticmethod or by leaving it to torch."""
    return _is_newer(function) and (function.generate_vmap_rule or function.vmap is not _Function.vmap)


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


# ---- torch.compile ---------------------------------------------------------------------------------------

_eager = 0  # how many runs, in all threads, want compiled functions to run as they were written
_stance: Any = None  # dynamo's before the first of them


def _frames() -> Any:
    return sys.modules["torch._dynamo.eval_frame"]


@cache
def _forced() -> Any:
    return _frames().DynamoStance("force_eager")


class _Eagerly:
    """Inside, functions that torch.compile made run as they were written.

    Dynamo would trace the mode into them, with the parameters of one run. It is told by its stance, which other
    threads share: there such functions run slower for that time, and give the same numbers.
    """

    def __enter__(self) -> None:
        global _eager, _stance
        with _lock:
            if not _eager:
                frames = _frames()
                _stance, frames._stance = frames._stance, _forced()
            _eager += 1

    def __exit__(self, *_: object) -> None:
        global _eager
        with _lock:
            _eager -= 1
            if not _eager:
                _frames()._stance = _stance


_NOTHING = contextlib.nullcontext()
_EAGERLY = _Eagerly()


def dynamo_is_loaded() -> bool:
    return "torch._dynamo.eval_frame" in sys.modules


def eagerly() -> contextlib.AbstractContextManager[None]:
    """Inside, nothing is compiled and no compiled function runs; where nobody has loaded dynamo, nothing to do."""
    return _EAGERLY if dynamo_is_loaded() else _NOTHING


class CompilerLoaded(BaseException):
    """`fn` was the first to use torch.compile (torch.cond does), too late for `eagerly`. Not for `fn` to catch."""


class _CompilersNoticed:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if dynamo_is_loaded():
            raise CompilerLoaded


_COMPILERS_NOTICED = _CompilersNoticed()


def compilers_noticed() -> contextlib.AbstractContextManager[None]:
    """Raises `CompilerLoaded` at its end if dynamo was loaded inside: whatever came of it, it has to run once more."""
    return _NOTHING if dynamo_is_loaded() else _COMPILERS_NOTICED


_SKIPPED = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # itself, and what it calls


def uncompiled(function: C) -> C:
    """`function` as a break in the graph of whoever compiles its caller: torch.compile leaves it and what it calls."""
    set_code_exec_strategy(function.__code__, _SKIPPED)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # nor is it traced into a caller's graph
    return function
