"""psgrad.compile: the same quantity of the same function, again and again, from a graph of its ops."""

import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
from torch import Tensor

from ..engine.ladder import callers_level
from ..engine.signals import Signal, Unrecordable
from ..engine.validate import is_nested
from ..errors import (
    ArgumentError,
    ArgumentTypeError,
    FallbackWarning,
    PsgradError,
    is_out_of_memory,
)
from ..quantities.clipped import clipped_grad
from ..quantities.clipping import ClippedGrad, bounds_of
from ..quantities.dots import per_sample_dots
from ..quantities.factored import factored_grads
from ..quantities.grads import per_sample_grads
from ..quantities.gram import gram
from ..quantities.jacobians import ntk, per_sample_jacobians
from ..quantities.kron import kron_factors
from ..quantities.norms import per_sample_norms
from ..quantities.projected import projected_grads
from ..quantities.stats import grad_stats
from ..quantities.sums import weighted_grad
from ..torch_ import graphs, tracing
from ..torch_.compiler import is_compiling, uncompiled
from .capture import Capture, functions_among
from .entries import Entry, Recent, World
from .recording import Backend, record
from .signature import Call, but_for_size, plain, signature_of, structure_of
from .sizes import SIZINGS, padded_size

_BACKENDS = ("auto", "inductor", "replay")
_QUANTITIES = (
    per_sample_grads,
    per_sample_norms,
    clipped_grad,
    weighted_grad,
    gram,
    grad_stats,
    factored_grads,
    per_sample_dots,
    projected_grads,
    kron_factors,
    per_sample_jacobians,
    ntk,
)
# What can be a part of others' graphs: dynamo takes trees of tensors from there, and no records inside of them.
_IN_GRAPHS = (per_sample_grads, per_sample_norms, clipped_grad, weighted_grad, gram, grad_stats, per_sample_dots)
_SIGNATURES = 64  # whose graphs are kept
_VARIANTS = 4  # graphs of one signature, for samples that decide otherwise
_STRIKES = 8  # so many calls in a row that no graph is good for, and the signature is given up
_WORLDS = 8  # surroundings that are remembered: training and evaluation, say


class CacheInfo(NamedTuple):
    """What a compiled quantity has done so far.

    Attributes:
        hits: calls that a graph has answered.
        misses: calls that ran eagerly after all: an assumption did not hold, there is no graph for them, or the eager
            call is faster.
        graphs: how many there are.
        backends: of each graph, which backend runs it; then "eager" for each signature whose eager call was faster.
        seconds: spent on recording and compiling.
    """

    hits: int
    misses: int
    graphs: int
    backends: tuple[str, ...]
    seconds: float


@uncompiled
def compile(
    quantity: Callable[..., Any], fn: Callable[..., Any], *, backend: Backend = "auto", **options: Any
) -> "Compiled":
    """`quantity` of `fn` as a function that is recorded once and then run without Python: fast for small models.

    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    >>> fn, params = psgrad.from_module(model, torch.nn.functional.cross_entropy)
    >>> step = psgrad.compile(psgrad.clipped_grad, fn, backend="replay", max_norm=1.0)
    >>> for _ in range(3):
    ...     found = step(params, (torch.randn(16, 4), torch.randint(3, (16,))))
    >>> found.grad["0.weight"].shape, found.count, step.cache_info().hits
    (torch.Size([8, 4]), 16, 3)

    The first call with arguments of some shapes records the ops of the engine, rules and all, as a graph; later
    calls run the graph. The result is the eager call's, of the same type, up to rounding.

    - Params, batch, and the tensors that `fn` closes over are read anew at every call. Where something else that
      `fn` reads has changed (another buffer, `model.eval()`, a number in its closure) there is another graph.
    - What the eager engine decides by looking at values (all gradients are finite, samples agree on a branch, no
      digits were lost) the graph assumes. It returns whether that holds, which is looked at once after the run;
      where it does not, the call runs eagerly.
    - Batches of another size run on the next larger graph, filled up with copies of a sample that do not count;
      not those of `grad_stats`, `factored_grads`, or weights that are a function of the norms.
    - Dropout draws anew at every call, and repeats under `torch.manual_seed`.
    - Python runs while a graph is made, and not after: `print` in `fn` prints then. Where `fn` draws from `random` or
      NumPy, or has sizes that depend on values, it is not recorded but runs eagerly.
    - What cannot be recorded (samples that part ways at a branch, a loop over samples) runs eagerly, with a
      `FallbackWarning` that says why.

    Args:
        quantity: `psgrad.per_sample_grads`, `per_sample_norms`, `clipped_grad`, `weighted_grad`, `gram`, `grad_stats`,
            `factored_grads`, `per_sample_dots`, `projected_grads`, `kron_factors`, `per_sample_jacobians` or `ntk`.
        fn: as for the quantity.
        backend: "replay" runs the graph op by op, without a compiler; "inductor" compiles it, which takes 2 to 50 s
            for each graph; "auto" does both where there is a compiler and the graph is not too large, measures, and
            keeps the faster; where that is no faster than the eager call, calls stay eager.
        options: of the quantity, for every call; all but `out`, `progress`, `differentiable`, `group` and `sharded`.

    Returns:
        A callable of `(params, batch)` and of further arguments of the quantity (`weights`, `valid=`), which has
        `cache_info()` and `clear()`.

    Raises:
        ArgumentError, ArgumentTypeError: `quantity` is none of these, or an option does not fit.
    """
    if quantity not in _QUANTITIES:
        shown = repr(quantity) if isinstance(quantity, str) else f"a {type(quantity).__name__}"
        name = getattr(quantity, "__name__", shown)
        known = ", ".join(f"psgrad.{each.__name__}" for each in _QUANTITIES)
        raise ArgumentTypeError(f"{name} is not a quantity that can be compiled\n  give one of {known}.")
    if not callable(fn):
        raise ArgumentTypeError(f"fn is a {type(fn).__name__}, not a function\n  give fn(params, sample) -> loss.")
    if backend not in _BACKENDS:
        raise ArgumentError(f'backend={backend!r} is not one of "auto", "inductor", "replay"\n  say one of them.')
    if hasattr(fn, "psgrad_layers"):
        raise ArgumentError("fn is of a model under fully_shard, which cannot be compiled\n  call the quantity itself.")
    _refuse_options(options)
    try:
        inspect.signature(quantity).bind_partial(fn, None, None, **options)
    except TypeError as error:
        raise ArgumentTypeError(
            f"{quantity.__name__} {error}\n  give options of psgrad.{quantity.__name__}, or backend=."
        ) from None
    if backend == "inductor" and (why := graphs.missing_compiler()) is not None:
        raise ArgumentError(f'backend="inductor" compiles C++, but {why}\n  install one, or say backend="replay".')
    return Compiled(quantity, fn, backend, options)


def _refuse_options(options: dict[str, Any]) -> None:
    for name in ("out", "progress", "differentiable", "group", "sharded"):
        if (given := options.get(name)) is not None and given is not False:
            raise ArgumentError(f"{name}= does not go with psgrad.compile\n  call the quantity itself for that.")


# ---- the callable ----------------------------------------------------------------------------------------


class Compiled:
    """A quantity of a function, recorded at the first call; made by `psgrad.compile`."""

    def __init__(self, quantity: Callable[..., Any], fn: Callable[..., Any], backend: Backend, options: Any) -> None:
        self.quantity, self.fn, self.backend, self._options = quantity, fn, backend, dict(options)
        self._plain = plain(self._options)
        known = inspect.signature(quantity).parameters.values()
        self._names = [p.name for p in known if p.kind is p.POSITIONAL_OR_KEYWORD][3:]  # of arguments behind the batch
        self._check = getattr(fn, "psgrad_check", None)
        self._lock = threading.RLock()
        self._functions = functions_among(self._options)  # such as weights
        self._capture = Capture(quantity, fn, self._options)
        self._can_be_captured = quantity in _IN_GRAPHS and not self._options.get("has_aux")
        self.clear()

    def __repr__(self) -> str:
        name = getattr(self.fn, "__qualname__", repr(self.fn))
        options = "".join(f", {key}={value!r}" for key, value in self._options.items())
        return f"psgrad.compile({self.quantity.__name__}, {name}{options})"

    @property
    def options(self) -> dict[str, Any]:
        """The options of the quantity for every call: a copy."""
        return dict(self._options)

    def cache_info(self) -> CacheInfo:
        """What has been done so far."""
        entries = [entry for world in self._worlds for entry in world.entries.values()]
        made = [graph.backend for entry in entries for graph in entry.graphs]
        eager = ["eager" for entry in entries if entry.stays_eager]
        return CacheInfo(self._hits, self._misses, len(made), (*made, *eager), self._seconds)

    def clear(self) -> None:
        """Forget all graphs."""
        with self._lock:
            self._worlds: list[World] = []
            self._recent: Recent | None = None
            self._hits = self._misses = 0
            self._changes = 0  # worlds made in a row, without a call that found one of them again
            self._seconds = 0.0
            self._warned: set[str] = set()

    def __call__(self, params: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The quantity for these arguments, as the eager call gives it."""
        if is_compiling() and self._can_be_captured and not kwargs.get("has_aux"):
            return self._capture(params, batch, *args, **kwargs)
        return self._called(params, batch, args, kwargs)

    @uncompiled
    def _called(self, params: Any, batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        options = self._options
        if args or kwargs:
            _refuse_options(kwargs)
            if params is self.fn:
                raise ArgumentTypeError(
                    "params is fn, which psgrad.compile was given already\n  call it with (params, batch)."
                )
            if len(args) > len(self._names) or not kwargs.keys().isdisjoint(self._names[: len(args)]):
                return self.quantity(self.fn, params, batch, *args, **kwargs)  # Python's own words for it
            more = dict(zip(self._names, args, strict=False)) | kwargs
            options = {**options, **more}
            if functions_among(more):  # what they read is not watched
                self._warn("a function is given at the call; give it to psgrad.compile")
                return self._missed(Call(params, batch, options))
        call = Call(params, batch, options)
        if tracing.dispatch_modes() or is_nested() or tracing.has_function_modes():
            return self._eagerly(call)
        if self._check is not None:
            self._check(params)
        world = self._world()
        if world is None:
            return self._missed(call)
        if world.surroundings.refusal is not None:
            self._warn(world.surroundings.refusal)
            return self._missed(call)
        tensors, structure = structure_of(call, self._plain if options is self._options else plain(options))
        settings, recent = graphs.settings(), self._recent
        if (
            recent is not None
            and recent.world is world
            and recent.structure == structure
            and recent.settings == settings
            and recent.are_alike(*tensors)
        ):
            entry = recent.entry
        else:
            key = signature_of(tensors, structure, settings)
            try:
                known = world.known(key)
            except TypeError:  # an option that has no hash
                return self._missed(call)
            entry = self._made(world, key, call) if known is None else known
            if tensors and all(type(t) is Tensor for t in tensors):
                self._recent = Recent(world, structure, settings, graphs.likeness(tensors), entry)
        if entry.stays_eager:
            return self._missed(call)
        if entry.size is not None:
            return self._filled_up(world, entry, call)
        found = self._run(entry, tensors)
        return self._failed(entry, call) if found is NotImplemented else self._finished(found, call)

    def _world(self) -> World | None:
        """The graphs for what `fn` reads now; None where that changes all the time."""
        for i, world in enumerate(self._worlds):
            if world.surroundings.are_same():
                if i:
                    self._worlds.insert(0, self._worlds.pop(i))
                self._changes = 0
                return world
        with self._lock:
            if self._changes >= _WORLDS:
                self._warn(f"{self._worlds[0].surroundings.changed()}, which fn reads, changes from call to call")
                return None
            self._changes += 1
            world = World((self.fn, *self._functions))
            self._worlds = [world, *self._worlds[: _WORLDS - 1]]
            return world

    def _run(self, entry: Entry, tensors: list[Tensor]) -> Any:
        """The result by a graph whose assumptions hold, or NotImplemented."""
        for i, graph in enumerate(entry.graphs):
            try:
                found = graph.run(tensors)
            except Exception as error:  # an index out of range, say: the eager call has the better words for it
                if is_out_of_memory(error):
                    raise
                found = NotImplemented
            if found is not NotImplemented:
                if i:
                    entry.graphs.insert(0, entry.graphs.pop(i))
                entry.strikes = 0
                self._hits += 1
                return found
        return NotImplemented

    def _finished(self, found: Any, call: Call) -> Any:
        """The result with what a graph cannot say: how many samples count, what a bound given as a tensor is."""
        has_aux = call.options.get("has_aux")
        step = found[0] if has_aux else found
        if type(step) is not ClippedGrad:
            return found
        if isinstance(step.count, Tensor):
            step = step._replace(count=int(step.count))
        if step.sensitivity != step.sensitivity:
            bounds = bounds_of(call.options["max_norm"], call.params, len(optree.tree_leaves(call.params)))
            step = step._replace(sensitivity=bounds.sensitivity)
        return (step, found[1]) if has_aux else step

    # ---- calls that no graph is good for -----------------------------------------------------------------------

    def _eagerly(self, call: Call) -> Any:
        return self.quantity(self.fn, call.params, call.batch, **call.options)

    def _missed(self, call: Call, entry: Entry | None = None) -> Any:
        self._misses += 1
        if entry is None or entry.refusal is None:
            return self._eagerly(call)
        refusal, entry.refusal = entry.refusal, None
        try:
            found = self._eagerly(call)
        except Exception:
            if not entry.graphs:
                entry.is_void, self._recent = True, None
            raise
        self._warn(refusal)
        return found

    def _failed(self, entry: Entry, call: Call) -> Any:
        """No graph was good for this call: it runs eagerly, and the next time there will be another graph."""
        entry.strikes += 1
        if entry.given_up or not entry.graphs:
            return self._missed(call, entry)
        if entry.strikes >= _STRIKES:
            entry.given_up = True
            entry.graphs.clear()
            self._warn("what the graph assumes of the values did not hold for many calls in a row")
        elif entry.strikes > 1 and len(entry.graphs) < _VARIANTS:
            self._record(entry, call)
        return self._missed(call, entry)

    def _warn(self, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            message = f"psgrad.compile runs {self.quantity.__name__} eagerly: {why}"
            warnings.warn(message, FallbackWarning, stacklevel=callers_level())

    # ---- new graphs --------------------------------------------------------------------------------------------

    def _made(self, world: World, key: Any, call: Call) -> Entry:
        """The entry for a signature that has not been there before."""
        with self._lock:
            if (known := world.known(key)) is not None:
                return known
            entry = Entry()
            sizing = SIZINGS.get(self.quantity)
            n = None if sizing is None else sizing.samples(call.batch, call.options)
            if n is not None:
                own = len(optree.tree_leaves(call.params))
                sizes = world.sizes.setdefault(but_for_size(key, n, own), [])
                near = [size for size in sizes if n <= size <= 1.5 * n]
                size = min(near, default=padded_size(n)) if sizes else n
                if size not in sizes:
                    sizes.append(size)
                entry.size = size if size != n else None
            if entry.size is None:
                if all(t.numel() for t in optree.tree_leaves(call.batch) if isinstance(t, Tensor)):
                    self._record(entry, call)
                entry.given_up = not entry.graphs
            while len(world.entries) >= _SIGNATURES:
                del world.entries[next(iter(world.entries))]
            world.entries[key] = entry
            return entry

    def _record(self, entry: Entry, call: Call) -> None:
        """Another graph for an entry, good for calls like this one; or why there is none."""
        try:
            inspect.signature(self.quantity).bind(self.fn, call.params, call.batch, **call.options)
        except TypeError as error:
            name = self.quantity.__name__
            raise ArgumentTypeError(
                f"{name} {error}\n  give what psgrad.{name} takes, to psgrad.compile or to the call."
            ) from None
        try:
            made = record(self.quantity, self.fn, tuple(call), self.backend)
        except Unrecordable as refusal:
            entry.refusal = refusal.why
            return
        except PsgradError:
            raise
        except (Exception, Signal) as error:
            if is_out_of_memory(error):
                raise
            words = str(error).partition("\n")[0][:200]
            entry.refusal = f"its ops cannot be recorded ({type(error).__name__}: {words})"
            return
        self._seconds += made.seconds
        if made.backend == "eager":
            entry.stays_eager = True
            entry.graphs.clear()
        else:
            entry.graphs.insert(0, made)

    def _filled_up(self, world: World, entry: Entry, call: Call) -> Any:
        """The result by a graph for a larger batch, filled up with copies of a sample."""
        sizing, size = SIZINGS[self.quantity], entry.size
        n = sizing.samples(call.batch, call.options)
        assert n is not None
        assert size is not None
        larger = Call(call.params, *sizing.filled_up(call.batch, call.options, n, size))
        tensors, structure = structure_of(larger, plain(larger.options))
        key = signature_of(tensors, structure, graphs.settings())
        target = world.known(key)
        if target is None:
            with self._lock:
                target = world.entries[key] = world.known(key) or Entry()
                if not target.graphs and not target.given_up:
                    try:
                        self._record(target, larger)
                    except PsgradError:  # words about sizes would be about the larger ones
                        return self._missed(call)
                    target.given_up = not target.graphs
        entry.stays_eager = target.stays_eager
        found = self._run(target, tensors)
        if found is NotImplemented:
            target.strikes += 1
            return self._missed(call, target)
        return sizing.cut(self._finished(found, call), n, bool(call.options.get("has_aux")))
