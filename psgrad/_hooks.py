"""What torch runs behind a mode's back: autograd Functions, and functions that torch.compile made.

The private names for both live here. Whatever is changed in torch is changed for the time of a run only, and does
nothing in threads that are not inside one.
"""

import contextlib
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

C = TypeVar("C", bound=Callable[..., Any])

# ---- autograd Functions ----------------------------------------------------------------------------------

_Function: Any = torch.autograd.Function
_torchs_apply = _Function.__dict__["apply"]  # a classmethod
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
        return _torchs_apply.__func__(self.function, *args, **kwargs)


@classmethod  # type: ignore[misc]
def _seen_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if _thread.watching and torch._C._is_torch_function_mode_enabled():
        return torch.overrides.handle_torch_function(FunctionCall(cls), args, *args, **kwargs)
    return FunctionCall(cls).run(*args, **kwargs)


def vmaps_itself(function: Any) -> bool:
    """Whether an autograd Function says what it does under vmap, by a staticmethod or by leaving it to torch."""
    newer = function.setup_context is not _Function.setup_context
    return newer and (function.generate_vmap_rule or function.vmap is not _Function.vmap)


class functions_seen:  # noqa: N801, used like a function
    """Inside, modes of this thread see calls of autograd Functions.

    Torch shows them those in the newer style alone, and refuses the others under vmap before any mode is asked.
    """

    def __enter__(self) -> None:
        global _watching
        with _lock:
            _watching += 1
            _Function.apply = _seen_apply
        _thread.watching += 1

    def __exit__(self, *_: object) -> None:
        global _watching
        _thread.watching -= 1
        with _lock:
            _watching -= 1
            if not _watching:
                _Function.apply = _torchs_apply


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


_SKIPPED = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # itself, and what it calls


def uncompiled(function: C) -> C:
    """`function` as a break in the graph of whoever compiles its caller: torch.compile leaves it and what it calls."""
    set_code_exec_strategy(function.__code__, _SKIPPED)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # nor is it traced into a caller's graph
    return function
