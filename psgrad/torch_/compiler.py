"""Torch's compiler: what it compiled runs as written inside `fn`, and it leaves our own functions alone."""

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

C = TypeVar("C", bound=Callable[..., Any])

_lock = threading.Lock()
_eager = 0  # how many runs, in all threads, want compiled functions to run as they were written
_stance: Any = None  # dynamo's before the first of them


_FRAMES = "torch._dynamo.eval_frame"  # the module that runs compiled functions
is_loaded: Callable[[], bool] = partial(sys.modules.__contains__, _FRAMES)
_frames: Callable[[], Any] = partial(sys.modules.__getitem__, _FRAMES)


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


def eagerly() -> contextlib.AbstractContextManager[None]:
    """Inside, nothing is compiled and no compiled function runs; where nobody has loaded dynamo, nothing to do."""
    return _EAGERLY if is_loaded() else _NOTHING


class CompilerLoaded(BaseException):
    """`fn` was the first to use torch.compile (torch.cond does), too late for `eagerly`. Not for `fn` to catch."""


def is_compiling() -> bool:
    """Whether dynamo is reading the code that asks, rather than Python running it."""
    return torch.compiler.is_dynamo_compiling()


def in_graph(function: C) -> C:
    """`function` as a part of the graph of whoever compiles its caller: its ops are recorded, its Python not read."""
    import torch._dynamo

    made: Any = torch._dynamo.nonstrict_trace(function) if _takes_trees() else _of_flat_results(function)
    return made  # type: ignore[no-any-return]


@cache
def _takes_trees() -> bool:
    """Whether what becomes a part of a graph may return dicts; in an older torch lists and tuples alone."""
    from torch._higher_order_ops.flat_apply import FlatApply

    return "checked_output" in inspect.signature(FlatApply.__call__).parameters


class _Structure:
    """That of the last result."""

    spec: Any = None


def _of_flat_results(function: C) -> Any:
    """`in_graph` by way of flat results: while dynamo reads `unflat`, it calls `flat` first, and then has the spec."""
    import torch._dynamo
    from torch.utils import _pytree

    structure = _Structure()

    def flat(*args: Any) -> list[Any]:
        leaves, spec = _pytree.tree_flatten(function(*args))
        if structure.spec != spec:
            structure.spec = spec
        return leaves

    in_graph: Any = torch._dynamo.nonstrict_trace(flat)

    def unflat(*args: Any) -> Any:
        leaves = in_graph(*args)
        return _pytree.tree_unflatten(leaves, structure.spec)

    return unflat


_SKIPPED = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)  # itself, and what it calls


def uncompiled(function: C) -> C:
    """`function` as a break in the graph of whoever compiles its caller: torch.compile leaves it and what it calls."""
    set_code_exec_strategy(function.__code__, _SKIPPED)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # nor is it traced into a caller's graph
    return function
