"""What a function reads besides its arguments: the values in its closure, its globals, the modules that it calls.

A graph is good only as long as these are what they were when it was recorded. Tensors among them may change in place,
for a graph reads them anew; that another tensor, number, flag or function stands where one was is noticed here.
"""

import dis
import functools
import types
from collections.abc import Iterator
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_STOPS = (*_PLAIN, Tensor, type, types.ModuleType, types.BuiltinFunctionType)  # nothing to be found inside
_LIBRARIES = (
    "torch",
    "optree",
    "builtins",
    "functools",
    "threading",
    "psgrad",
)  # whose functions and objects are fixed
_DEPTH = 8  # of containers and objects inside one another
_LONG = 1024  # a list with more items is data
_MANY = 4096  # places; what has more is a library of its own

_contents = attrgetter("cell_contents")


class Surroundings:
    """The places that `fn` reads from, and what each held when this was made."""

    def __init__(self, fn: Any) -> None:
        # Places in columns, so that one pass of C code looks at all of a kind.
        self.dicts: list[dict[Any, Any]] = []
        self.keys: list[Any] = []
        self.items: list[Any] = []
        self.cells: list[types.CellType] = []
        self.contents: list[Any] = []
        self.lists: list[list[Any]] = []
        self.copies: list[list[Any]] = []
        self.sized: list[dict[Any, Any]] = []
        self._seen: set[int] = set()
        self._look(fn, 0)
        self.sizes = list(map(len, self.sized))

    def are_same(self) -> bool:
        """Whether every place holds what it held; numbers and words count as the same where they are equal."""
        return (
            all(map(is_, map(dict.get, self.dicts, self.keys), self.items))
            and all(map(is_, map(_contents, self.cells), self.contents))
            and list(map(len, self.sized)) == self.sizes
            and not (self.lists and self._changed_list())
        ) or self.changed() is None

    def changed(self) -> str | None:
        """The name of a place that holds something else now."""
        for i, (home, key, before) in enumerate(zip(self.dicts, self.keys, self.items, strict=True)):
            if not _is_same(now := home.get(key), before):
                return repr(key)
            self.items[i] = now  # perhaps an equal number, made anew
        for i, (cell, before) in enumerate(zip(self.cells, self.contents, strict=True)):
            if not _is_same(now := _contents(cell), before):
                return f"a variable of type {type(now).__name__} that it closes over"
            self.contents[i] = now
        if list(map(len, self.sized)) != self.sizes:
            return "a dict that has grown or shrunk"
        return "a list" if self._changed_list() else None

    def _changed_list(self) -> bool:
        """Whether a list has other items."""
        return any(
            len(now) != len(before) or not all(map(_is_same, now, before))
            for now, before in zip(self.lists, self.copies, strict=True)
        )

    # ---- how the places are found ----------------------------------------------------------------------------

    def _place(self, home: dict[Any, Any], key: Any, value: Any, depth: int) -> None:
        if len(self.dicts) < _MANY:
            self.dicts.append(home)
            self.keys.append(key)
            self.items.append(value)
            self._look(value, depth + 1)

    def _look(self, value: Any, depth: int) -> None:
        """Find the places inside `value`."""
        if isinstance(value, _STOPS) or depth > _DEPTH or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, types.FunctionType):
            self._look_at_function(value, depth)
        elif isinstance(value, types.MethodType):
            self._look_at_all((value.__self__, value.__func__), depth)
        elif isinstance(value, functools.partial):
            self._look_at_all((value.func, *value.args, *value.keywords.values()), depth)
        elif isinstance(value, dict):
            self.sized.append(value)
            for key, item in list(value.items()):
                self._place(value, key, item, depth)
        elif isinstance(value, list) and len(value) <= _LONG:
            self.lists.append(value)
            self.copies.append(list(value))
            self._look_at_all(value, depth)
        elif isinstance(value, (tuple, set, frozenset)):
            self._look_at_all(value, depth)
        elif isinstance(value, torch.nn.Module):
            self._look_at_module(value, depth)
        elif hasattr(value, "__dict__") and not _is_fixed(type(value).__module__):
            self._look_at_attributes(value, depth)

    def _look_at_all(self, values: Any, depth: int) -> None:
        for value in values:
            self._look(value, depth + 1)

    def _look_at_function(self, function: types.FunctionType, depth: int) -> None:
        for cell in function.__closure__ or ():
            try:
                value = _contents(cell)
            except ValueError:  # nothing is in it yet
                continue
            self.cells.append(cell)
            self.contents.append(value)
            self._look(value, depth + 1)
        if not _is_fixed(function.__module__):
            scope = function.__globals__
            for name in dict.fromkeys(_names(function.__code__)):
                if name in scope:
                    self._place(scope, name, scope[name], depth)
            self._look_at_all((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()), depth)

    def _look_at_module(self, module: torch.nn.Module, depth: int) -> None:
        home = vars(module)
        for key, value in list(home.items()):
            if key.startswith("_") and isinstance(value, dict):  # torch's own: parameters, buffers, modules, hooks
                self._look(value, depth + 1)
            else:
                self._place(home, key, value, depth)
        self._look(type(module).forward, depth + 1)

    def _look_at_attributes(self, value: Any, depth: int) -> None:
        home = vars(value)
        for key, item in list(home.items()):
            self._place(home, key, item, depth)
        if callable(value):
            self._look(type(value).__call__, depth + 1)


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and isinstance(now, _PLAIN) and now == before)


def _is_fixed(module: str | None) -> bool:
    """Whether a module of Python belongs to a library whose state does not count."""
    return (module or "").partition(".")[0] in _LIBRARIES


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names that a function's code, or that of a function inside it, may read."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
