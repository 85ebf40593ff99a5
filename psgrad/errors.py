"""What psgrad raises and warns, and how it finds the user's line of code."""

import os
import re
import sys
from functools import lru_cache
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch

from .torch_ import operators

_OURS = (os.path.dirname(os.path.abspath(__file__)) + os.sep, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)

_STOCK = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "nn", "modules", "")

_ENGINE = os.path.join(os.path.dirname(__file__), "engine")
_RUNNERS = tuple(os.path.join(_ENGINE, f"{name}.py") for name in ("problem", "batched", "ladder"))  # of `fn`
_MODULE = os.path.join(os.path.dirname(__file__), "module.py")
_UNFILED = {"<stdin>": "standard input", "<string>": "code in a string"}
_OLD_CELL = re.compile(r"<ipython-input-(\d+)-")
_IN = re.compile(r"In\s*\[(\d+)\]")


class PsgradError(Exception):
    """Base of every error that psgrad raises on purpose: a mistake in the call, said with its remedy."""


class ArgumentError(PsgradError, ValueError):
    """An argument has a value that psgrad cannot work with."""


class ArgumentTypeError(PsgradError, TypeError):
    """An argument, or a leaf of one, has the wrong type."""


class UnsupportedOpError(PsgradError, NotImplementedError):
    """An op uses a parameter in a way that has no per-sample gradient."""


class RuleError(PsgradError):
    """A rule that was given to `psgrad.extend.register` raised, or returned what does not fit."""


class VerificationError(PsgradError, AssertionError):
    """What psgrad gives differs from a plain loop over samples, or cannot be compared with one."""

    comparisons: tuple[Any, ...] = ()  # all that was compared; see `Verification`


class RemoteError(PsgradError, RuntimeError):
    """Another rank of the group has failed: the message has its number and what it said.

    That rank raises its own error. The ranks are in step: a next call works.
    """

    rank: int = -1  # the first that has failed, by its number in the whole job
    message: str = ""  # what it said


class FallbackWarning(UserWarning):
    """The call is answered exactly, but by a slower way than a rule or vmap."""


class UnusedParametersWarning(UserWarning):
    """No parameter has a gradient for any sample: the loss does not depend on them, so that all is zero."""


class SharedSeedWarning(UserWarning):
    """Ranks that have samples of their own drew the same random numbers: their generators had the same state."""


_PUBLIC = (
    PsgradError,
    ArgumentError,
    ArgumentTypeError,
    UnsupportedOpError,
    RuleError,
    VerificationError,
    RemoteError,
    FallbackWarning,
    SharedSeedWarning,
    UnusedParametersWarning,
)
for _public in _PUBLIC:
    _public.__module__ = "psgrad"  # as people import them, and as tracebacks should show them


def name_of(func: object) -> str:
    """How people write a torch function: F.linear, torch.mm, Tensor.view."""
    name = getattr(func, "__name__", type(func).__name__)
    owner = getattr(func, "__self__", None)
    if name == "__get__":  # a property: T, mT, data
        return f"Tensor.{getattr(owner, '__name__', '?')}"
    if name == "apply" and isinstance(owner, type):  # an autograd Function
        return f"{owner.__name__}.apply"
    if isinstance(func, type):
        return f"{name}.apply"
    if isinstance(func, (operators.Overload, operators.Packet)):
        return f"torch.ops.{func}".removesuffix(".default")
    for module, prefix in ((torch.nn.functional, "F"), (torch, "torch"), (torch.Tensor, "Tensor")):
        if getattr(module, name, None) is func:
            return f"{prefix}.{name}"
    return str(name)


@lru_cache(4096)
def _is_users(file: str) -> bool:
    return not os.path.abspath(file).startswith(_OURS)


def _users(frame: FrameType) -> bool:
    return _is_users(frame.f_code.co_filename)


def _told(code: CodeType, line: int) -> str:
    return f"{_file(code.co_filename)}:{line} in {code.co_qualname}"


def _describe(frame: FrameType, line: int) -> str:
    return _told(frame.f_code, line)


def _file(filename: str) -> str:
    """What people call the file, or the cell of a notebook, or whatever else code was read from."""
    if filename in _UNFILED:
        return _UNFILED[filename]
    kernel, name = os.path.split(filename)
    numbered = _OLD_CELL.match(name)
    if not numbered and not os.path.basename(kernel).startswith("ipykernel_"):
        return name
    cell = _cell(filename) or (numbered[1] if numbered else "")
    return f"cell [{cell}]" if cell else "a notebook cell"


def _cell(filename: str) -> str:
    """The number of the cell that IPython has compiled under this name; "" where it does not say."""
    try:
        shell = sys.modules["IPython"].get_ipython()
        found = _IN.search(" ".join(shell.compile.format_code_name(filename)))
    except (AttributeError, KeyError, TypeError):  # no shell is running, or one that names its cells otherwise
        return ""
    return found[1] if found else ""


class Spot(NamedTuple):
    """A line of code; in words only where somebody asks, since most are never told."""

    code: CodeType | None
    line: int

    def __str__(self) -> str:
        return _told(self.code, self.line) if self.code else "an unknown place"


def spot() -> Spot:
    """The innermost line of the running code that belongs to neither torch nor psgrad."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _users(frame):
        frame = frame.f_back
    return Spot(None, 0) if frame is None else Spot(frame.f_code, frame.f_lineno)


def place() -> str:
    """The innermost line of `fn` that belongs to neither torch nor psgrad.

    Where `fn` is a stock module of torch, so that no such line exists: the path of the module. Where it is not even
    that: the line that called psgrad.
    """
    frame: FrameType | None = sys._getframe(1)
    inside: list[FrameType] = []
    while frame is not None and frame.f_code.co_filename not in _RUNNERS:
        if _users(frame):
            return _describe(frame, frame.f_lineno)
        inside.append(frame)
        frame = frame.f_back
    if stock := next((f for f in inside if f.f_code.co_filename.startswith(_STOCK)), None):
        return _path(stock, inside) or _describe(stock, stock.f_lineno)
    return str(spot())


def _path(stock: FrameType, inside: list[FrameType]) -> str:
    """Where the module that runs in the frame `stock` sits: model.encoder.0 (Linear). "" where that is not known."""
    running = [f.f_locals.get("self") for f in inside if f.f_code.co_filename.startswith(_STOCK)]
    modules = [m for m in running if isinstance(m, torch.nn.Module)]
    if not modules or stock.f_locals.get("self") is not modules[0]:
        return ""
    root = modules[-1]
    name = next((name for name, module in root.named_modules() if module is modules[0]), None)
    if name is None:
        return ""
    is_model = any(f.f_code.co_filename == _MODULE and f.f_locals.get("model") is root for f in inside)
    above = "model" if is_model else type(root).__name__
    return f"{above}.{name} ({type(modules[0]).__name__})" if name else f"{above} ({type(root).__name__})"


def place_of(error: BaseException, otherwise: str = "an unknown place") -> str:
    """The innermost line of user code that `error` passed through, or of a stock module where there is none."""
    users = stock = None
    trace = error.__traceback__
    while isinstance(trace, TracebackType):
        where = Spot(trace.tb_frame.f_code, trace.tb_lineno)
        if _users(trace.tb_frame):
            users = where
        elif trace.tb_frame.f_code.co_filename.startswith(_STOCK):  # asking for f_locals would keep them alive
            stock = where
        trace = trace.tb_next
    return str(users or stock or otherwise)


def home_of(fn: Any) -> str:
    """Where `fn` is written: its first line, or "fn" where that is no code of the user's."""
    code = getattr(fn, "__code__", None)
    return str(Spot(code, code.co_firstlineno)) if code is not None and _is_users(code.co_filename) else "fn"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that there is no memory, which no other way of doing the same mends."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def reason_of(error: BaseException) -> str:
    """What an error says, in a line."""
    said = str(error).strip()
    return said.splitlines()[0] if said else type(error).__name__
