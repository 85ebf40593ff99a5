"""What a function reads besides its arguments: the values in its closure, its globals, the modules that it calls.

A graph is good only as long as these are what they were when it was recorded. Tensors among them may change in place,
for a graph reads them anew; that another tensor, number, flag or function stands where one was is noticed here.
"""

import contextlib
import dis
import functools
import io
import random
import sys
import threading
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter, eq, is_
from typing import Any

import torch
from torch import Tensor

from ..torch_.modules import FLAT_WEIGHTS, HOOKS_OF_ALL_MODULES

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_DICTS = (dict, OrderedDict, types.MappingProxyType)  # whose truth is whether there is anything in them
_STOPS = (*_PLAIN, Tensor)  # nothing to be found inside
_LIBRARIES = (
    "torch",
    "optree",
    "builtins",
    "functools",
    "threading",
    "psgrad",
)  # whose functions and objects are fixed
_LONG = 1024  # a list with more items is data
_MANY = 4096  # places outside of models; what has more is a library of its own

# What is called by whoever makes and calls an object, or by autograd, without being named.
_UNMENTIONED = {"__new__", "__init__", "__post_init__", "__call__", "__enter__", "__exit__", "__getattr__"}
_UNMENTIONED |= {"__getitem__", "forward", "setup_context", "backward", "jvp", "vmap"}

_contents = attrgetter("cell_contents")
_member = types.MappingProxyType.get


class Surroundings:
    """The places that `fn` reads from, and what each held when this was made."""

    def __init__(self, fn: Any) -> None:
        # Places in columns, so that one pass of C code looks at all of a kind.
        self.dicts: list[dict[Any, Any]] = []
        self.keys: list[Any] = []
        self.items: list[Any] = []
        self.cells: list[types.CellType] = []
        self.contents: list[Any] = []
        self.vacant: list[types.CellType] = []  # of variables that have no value yet
        self.lists: list[Sequence[Any]] = []  # and queues
        self.copies: list[list[Any]] = []
        self.classes: list[types.MappingProxyType[str, Any]] = []  # what they hold
        self.members: list[str] = []
        self.values: list[Any] = []
        self.objects: list[Any] = []  # attributes that no dict holds: of functions, modules of Python, slots
        self.names: list[str] = []
        self.attributes: list[Any] = []
        self.sized: list[Mapping[Any, Any]] = []
        self.sets: list[set[Any]] = []
        self.elements: list[frozenset[Any]] = []
        self.frozen: list[tuple[Any, Any]] = []  # small arrays, and what was in them
        self.refusal: str | None = None  # why a function that reads this cannot be recorded
        self._read = set(_UNMENTIONED)  # names that some function's code mentions, or need not
        self._seen: set[int] = set()
        self._known: set[tuple[int, str]] = set()  # attributes that have a place
        self._spaces: dict[int, Any] = {}  # modules of Python, classes, and tensors with attributes that were met
        self._found: deque[torch.nn.Module] = deque()
        self._others: deque[Any] = deque()
        self._look(fn)
        self._look_everywhere()
        self.empty = [each for each in self.sized if type(each) in _DICTS and not each]  # most of a module's, of hooks
        self.sized = [each for each in self.sized if type(each) not in _DICTS or each]
        self.sizes = list(map(len, self.sized))

    def are_same(self) -> bool:
        """Whether every place holds what it held; numbers and words count as the same where they are equal."""
        try:
            return self._are_identical() or self.changed() is None
        except ValueError:  # a variable has lost its value
            return False

    def _are_identical(self) -> bool:
        return (
            all(map(is_, map(dict.get, self.dicts, self.keys), self.items))
            and all(map(is_, map(_contents, self.cells), self.contents))
            and not any(self.empty)
            and list(map(len, self.sized)) == self.sizes
            and not (self.classes and not all(map(is_, map(_member, self.classes, self.members), self.values)))
            and not (self.objects and not all(map(is_, map(_attribute, self.objects, self.names), self.attributes)))
            and not (self.vacant and any(map(_has_contents, self.vacant)))
            and not (self.lists and self._changed_list())
            and all(map(eq, self.sets, self.elements))
            and not (self.frozen and self._thawed())
        )

    def changed(self) -> str | None:
        """The name of a place that holds something else now."""
        for i, (home, key, before) in enumerate(zip(self.dicts, self.keys, self.items, strict=True)):
            if not _is_same(now := home.get(key), before):
                return repr(key)
            self.items[i] = now  # perhaps an equal number, made anew
        for i, (cell, before) in enumerate(zip(self.cells, self.contents, strict=True)):
            if not _is_same(now := _contents(cell) if _has_contents(cell) else _NOTHING, before):
                return f"a variable of type {type(now).__name__} that it closes over"
            self.contents[i] = now
        if any(map(_has_contents, self.vacant)):
            return "a variable that had no value"
        for i, (space, name, before) in enumerate(zip(self.classes, self.members, self.values, strict=True)):
            if not _is_same(now := space.get(name), before):
                return f"{name!r} of a class"
            self.values[i] = now
        for i, (home, name, before) in enumerate(zip(self.objects, self.names, self.attributes, strict=True)):
            if not _is_same(now := _attribute(home, name), before):
                return f"{name!r} of {getattr(home, '__name__', type(home).__name__)}"
            self.attributes[i] = now
        if any(self.empty) or list(map(len, self.sized)) != self.sizes:
            return "a dict, a module or a class that has grown or shrunk"
        if self._thawed() or not all(map(eq, self.sets, self.elements)):
            return "a set or an array"
        return "a list" if self._changed_list() else None

    def _thawed(self) -> bool:
        """Whether an array has other contents."""
        return any(_contents_of(value) != before for value, before in self.frozen)

    def _changed_list(self) -> bool:
        """Whether a list or a queue has other items."""
        return any(
            len(now) != len(before) or not all(map(_is_same, now, before))
            for now, before in zip(self.lists, self.copies, strict=True)
        )

    # ---- how the places are found ----------------------------------------------------------------------------

    def _place(self, home: dict[Any, Any], key: Any, value: Any) -> None:
        self.dicts.append(home)
        self.keys.append(key)
        self.items.append(value)
        self._look(value)

    def _attribute(self, home: Any, name: str) -> None:
        value = _attribute(home, name)
        if value is _NOTHING or (id(home), name) in self._known:
            return
        self._known.add((id(home), name))
        if isinstance(home, type):
            self.classes.append(vars(home))
            self.members.append(name)
            self.values.append(value)
        else:
            self.objects.append(home)
            self.names.append(name)
            self.attributes.append(value)
        self._look(value)

    def _look(self, value: Any) -> None:
        """Have the places inside `value` found, in its turn: what is near comes before what is far."""
        if isinstance(value, Tensor) and vars(value):
            self._spaces[id(value)] = value
        elif not isinstance(value, _STOPS) and id(value) not in self._seen:
            self._seen.add(id(value))
            (self._found if isinstance(value, torch.nn.Module) else self._others).append(value)

    def _look_everywhere(self) -> None:
        """Of models all places, however deep they are: their flags are what people change. Of the rest the nearest."""
        far = 0
        while self._found or self._others:
            if self._found:
                self._look_at_module(self._found.popleft())
            elif far < _MANY:
                before = len(self.dicts) + len(self._known)
                self._look_inside(self._others.popleft())
                far += len(self.dicts) + len(self._known) - before
            else:
                self._others.clear()
            if not self._found and not self._others:
                self._look_at_namespaces()

    def _look_inside(self, value: Any) -> None:
        """Find the places inside `value`."""
        if isinstance(value, types.FunctionType):
            self._look_at_function(value)
        elif isinstance(value, types.MethodType):
            self._look_at_all((value.__self__, value.__func__))
        elif isinstance(value, types.BuiltinFunctionType):
            self._look(value.__self__)
        elif isinstance(value, functools.partial):
            self._look_at_all((value.func, value.args, value.keywords))
        elif isinstance(value, (staticmethod, classmethod)):
            self._look(value.__func__)
        elif isinstance(value, property):
            self._look(value.fget)
        elif isinstance(value, dict):
            self.sized.append(value)
            for key, item in list(value.items()):
                self._place(value, key, item)
        elif isinstance(value, (list, deque)) and len(value) <= _LONG:
            self.lists.append(value)
            self.copies.append(list(value))
            self._look_at_all(value)
        elif isinstance(value, (tuple, frozenset)):
            self._look_at_all(value)
        elif isinstance(value, type):
            self._spaces.update((id(each), each) for each in value.__mro__ if not _is_fixed(each.__module__))
        elif isinstance(value, types.ModuleType):
            if not _is_fixed(value.__name__):
                self._spaces[id(value)] = value
        else:
            self._look_at_object(value)

    def _look_at_all(self, values: Any) -> None:
        for value in values:
            self._look(value)

    def _look_at_function(self, function: types.FunctionType) -> None:
        is_fixed = _is_fixed(function.__module__)
        if not is_fixed:
            self._read.update(_mentioned(function.__code__))
        for cell in function.__closure__ or ():
            try:
                value = _contents(cell)
            except ValueError:
                self.vacant.append(cell)
                continue
            self.cells.append(cell)
            self.contents.append(value)
            self._look(value)
        if is_fixed:
            return
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._attribute(function, name)
        scope = function.__globals__
        for name in dict.fromkeys(_names(function.__code__)):  # what is not there may come, in front of a builtin too
            self._place(scope, name, scope.get(name))
        for name in dict.fromkeys(_imported(function.__code__, scope.get("__package__") or "")):
            self._place(sys.modules, name, sys.modules.get(name))

    def _look_at_namespaces(self) -> None:
        """What modules of Python, classes and tensors have under names that some function mentions."""
        for home in list(self._spaces.values()):
            for name in sorted(self._read & vars(home).keys()):
                self._attribute(home, name)

    def _look_at_module(self, module: torch.nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            self.refusal = f"fn reads a {type(module).__name__} of torch.jit, whose flags and buffers nobody sees"
        home = vars(module)
        self.sized.append(home)  # what an instance gets hides what its class has
        self._look_at_all(HOOKS_OF_ALL_MODULES)
        for key, value in list(home.items()):
            if key in FLAT_WEIGHTS and isinstance(module, torch.nn.RNNBase):
                continue  # its own parameters again: a forward lists them anew where they are others than before
            if key.startswith("_") and isinstance(value, dict):  # torch's own: parameters, buffers, modules, hooks
                self._look_inside(value)
            else:
                self._place(home, key, value)
        self._look_at_class(type(module))

    def _look_at_class(self, kind: type) -> None:
        """The methods of a class, which the instance's own code may call, and the attributes that these mention."""
        own = [each for each in kind.__mro__ if not _is_fixed(each.__module__)]
        for each in own:
            if (id(each), "") not in self._known:
                self._known.add((id(each), ""))
                self.sized.append(vars(each))
            for name in [name for name, v in vars(each).items() if isinstance(v, _METHODS)]:
                self._attribute(each, name)
        self._spaces.update((id(each), each) for each in own)

    def _look_at_object(self, value: Any) -> None:
        if isinstance(value, io.IOBase):  # such as sys.stderr, which loggers hold: an Iterator over lines
            return
        if isinstance(value, _MANAGER):  # as a decorator it makes another for every call
            self._look_at_all((value.func, value.args, value.kwds))
        elif isinstance(value, (random.Random, Iterator)) or _is_numpys_generator(value):
            self.refusal = f"fn reads a {type(value).__name__}, which gives something else every time"
        elif isinstance(value, set):
            self.sets.append(value)
            self.elements.append(frozenset(value))
            self._look_at_all(value)
        elif isinstance(value, threading.local):  # whoever asks later may be another thread
            for name in list(vars(value)):
                self._attribute(value, name)
            self._look_at_class(type(value))
        elif _contents_of(value) is not _NOTHING:
            self.frozen.append((value, _contents_of(value)))
        elif type(value).__module__ == "functools":  # a function behind a cache
            self._look(getattr(value, "__wrapped__", None))
        elif not _is_fixed(type(value).__module__) or isinstance(value, torch.distributions.Distribution):
            home = getattr(value, "__dict__", {})
            home = home if isinstance(home, dict) else {}
            if home:
                self.sized.append(home)
            for key, item in list(home.items()):
                self._place(home, key, item)
            for name in [n for kind in type(value).__mro__ for n in _slots(kind)]:
                self._attribute(value, name)
            self._look_at_class(type(value))


def _has_contents(cell: types.CellType) -> bool:
    try:
        _contents(cell)
    except ValueError:
        return False
    return True


_NOTHING: Any = object()
_MANAGER = type(contextlib.contextmanager(lambda: iter(()))())  # what a function under contextmanager gives
_METHODS = (types.FunctionType, staticmethod, classmethod, property)


def _attribute(home: Any, name: str) -> Any:
    return vars(home).get(name, _NOTHING) if isinstance(home, type) else getattr(home, name, _NOTHING)


def _slots(kind: type) -> Any:
    slots = vars(kind).get("__slots__", ())
    return [slots] if isinstance(slots, str) else [name for name in slots if not name.startswith("__")]


def _contents_of(value: Any) -> Any:
    """What is in a small array, to be compared; `_NOTHING` for others."""
    if isinstance(value, (bytearray, array)):
        return bytes(value)
    numpy = sys.modules.get("numpy")
    if (
        numpy is not None
        and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))
        and value.nbytes <= _LONG
    ):
        return value.tobytes()
    return _NOTHING


def _is_numpys_generator(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def _is_same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if type(now) is not type(before) or not isinstance(now, _PLAIN):
        return False
    return repr(now) == repr(before) if isinstance(now, (float, complex)) else bool(now == before)  # 0.0 is not -0.0


def _is_fixed(module: str | None) -> bool:
    """Whether a module of Python belongs to a library whose state does not count."""
    return (module or "").partition(".")[0] in _LIBRARIES


def _mentioned(code: types.CodeType) -> Iterator[str]:
    """All names that a function's code, or that of a function inside it, mentions: globals and attributes, and words
    that may be given to getattr."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _mentioned(constant)
        elif isinstance(constant, str):
            yield constant


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names that a function's code, or that of a function inside it, may read."""
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _imported(code: types.CodeType, package: str) -> Iterator[str]:
    """The modules of Python that a function's code, or that of a function inside it, may import when it runs."""
    parts = package.split(".")
    above = [".".join(parts[:i]) for i in range(len(parts) + 1)]  # how far up the dots of an import lead is not asked
    for name in [step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"]:
        names = [f"{home}.{name}".strip(".") for home in above] + [name.partition(".")[0]]  # `import a.b` gives a
        yield from [each for each in names if each and not _is_fixed(each)]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imported(constant, package)
