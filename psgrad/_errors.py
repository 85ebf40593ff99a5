"""What psgrad raises and warns, and how it finds the user's line of code."""

import os
import sys
from types import FrameType, TracebackType

import torch

_OURS = (os.path.dirname(os.path.abspath(__file__)) + os.sep, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)

_STOCK = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "nn", "modules", "")


class PsgradError(Exception):
    """Base of every error that psgrad raises on purpose: a mistake in the call, said with its remedy."""


class ArgumentError(PsgradError, ValueError):
    """An argument has a value that psgrad cannot work with."""

    least = 0  # bytes: what a `max_bytes` that is too little has to be


class ArgumentTypeError(PsgradError, TypeError):
    """An argument, or a leaf of one, has the wrong type."""


class UnsupportedOpError(PsgradError, NotImplementedError):
    """An op uses a parameter in a way that has no per-sample gradient."""


class FallbackWarning(UserWarning):
    """The call is answered exactly, but by a slower way than a rule or vmap."""


for _public in (PsgradError, ArgumentError, ArgumentTypeError, UnsupportedOpError, FallbackWarning):
    _public.__module__ = "psgrad"  # as people import them, and as tracebacks should show them


def name_of(func: object) -> str:
    """How people write a torch function: F.linear, torch.mm, Tensor.view."""
    name = getattr(func, "__name__", type(func).__name__)
    owner = getattr(func, "__self__", None)
    if name == "__get__":  # a property: T, mT, data
        return f"Tensor.{getattr(owner, '__name__', '?')}"
    if name == "apply" and isinstance(owner, type):  # an autograd Function
        return f"{owner.__name__}.apply"
    for module, prefix in ((torch.nn.functional, "F"), (torch, "torch"), (torch.Tensor, "Tensor")):
        if getattr(module, name, None) is func:
            return f"{prefix}.{name}"
    return str(name)


def _users(frame: FrameType) -> bool:
    return not os.path.abspath(frame.f_code.co_filename).startswith(_OURS)


def _describe(frame: FrameType, line: int) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{line} in {code.co_qualname}"


def place() -> str:
    """The innermost line of the running code that belongs to neither torch nor psgrad."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _users(frame):
        frame = frame.f_back
    return _describe(frame, frame.f_lineno) if frame is not None else "an unknown place"


def place_of(error: BaseException) -> str:
    """The innermost line of user code that `error` passed through, or of a stock module where there is none."""
    users = stock = None
    trace = error.__traceback__
    while isinstance(trace, TracebackType):
        where = trace.tb_frame, trace.tb_lineno
        if _users(trace.tb_frame):
            users = where
        elif trace.tb_frame.f_code.co_filename.startswith(_STOCK):  # asking for f_locals would keep them alive
            stock = where
        trace = trace.tb_next
    found = users or stock
    return _describe(*found) if found is not None else "an unknown place"
