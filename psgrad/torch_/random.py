"""Seeding: whether somebody sets the state of torch's default generator while a function runs.

The numbers in a generator's state do not tell: a function may seed it to where it already is. So while somebody watches
(`SEEDING_SEEN`), `torch.manual_seed` and `torch.set_rng_state` have other code, which takes a note of the call and does
what torch's own does; in threads that do not watch it only does the latter.
"""

import threading
import types
from typing import Any

import torch

_lock = threading.Lock()
_watching = 0  # how many runs, in all threads, want to know


class _Thread(threading.local):
    watching = 0  # how many of them are this thread's
    seedings = 0  # how often this thread has seeded while it watched


_thread = _Thread()


def _copied(function: Any) -> Any:
    return types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)


def _manual_seed(seed: Any) -> Any:
    """Runs in place of torch's function, among the names of torch's module, hence the import."""
    from psgrad.torch_.random import noted

    return noted(0, seed)


def _set_rng_state(new_state: Any) -> Any:
    """Runs in place of torch's function, among the names of torch's module, hence the import."""
    from psgrad.torch_.random import noted

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


class _SeedingSeen:
    """Inside, `seedings` counts what this thread seeds."""

    def __enter__(self) -> None:
        global _watching
        with _lock:
            _watching += 1
            if _watching == 1:
                _FUNCTIONS[0].__code__, _FUNCTIONS[1].__code__ = _NOTING
        _thread.watching += 1

    def __exit__(self, *_: object) -> None:
        global _watching
        _thread.watching -= 1
        with _lock:
            _watching -= 1
            if not _watching:
                _FUNCTIONS[0].__code__, _FUNCTIONS[1].__code__ = _CODES


SEEDING_SEEN = _SeedingSeen()


def seedings() -> tuple[int, int]:
    """Changes when the default generator is seeded: by torch's functions, or otherwise with another seed."""
    return _thread.seedings, torch.default_generator.initial_seed()
