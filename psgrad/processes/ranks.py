"""One call that all ranks of a group make together, and how they agree that it went well.

The first thing that ranks tell each other, by one all-reduce of a length that depends on the size of the group alone,
are their heads: whether the call has failed there, which call it is, where its random numbers begin, how many samples
it has. Small sums travel along. A rank whose call raised takes part in what is left with zeros, and says so; only then
are words exchanged, and every rank raises: that rank its own error, the others `RemoteError`.
"""

import contextlib
import hashlib
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.ladder import callers_level
from ..engine.problem import generators, paths
from ..errors import ArgumentError, RemoteError, SharedSeedWarning
from .groups import device_of, group_of
from .placed import Place, made_whole, places_of


class Head(NamedTuple):
    """What a rank tells the others of its call; numbers that float64 holds exactly."""

    failed: float
    call: float  # a fingerprint of what has to be the same on all ranks
    draws: float  # one of the generators' states when the call began; 0: it drew nothing
    samples: float


FIELDS = len(Head._fields)
SMALL = 1024  # how many numbers of small parameters travel with the heads


_BUSY: "weakref.WeakKeyDictionary[Any, int]" = weakref.WeakKeyDictionary()  # groups, and the thread whose call runs
_LOST: "weakref.WeakSet[Any]" = weakref.WeakSet()  # groups in which this rank has left a call without a word


class Round(Protocol):
    """Collectives that belong together. All ranks run them, or none."""

    def abandon(self) -> None:
        """Take part in what is left of them, as a rank that has failed."""
        ...


class Ranks:
    """One call on all ranks of a group. As a context it sees to it that they end it alike."""

    def __init__(self, group: Any, name: str, randomness: str = "different") -> None:
        self.group = group_of(group)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.leaves: list[Any] = []
        self.spec: Any = None
        self.tensors: list[Tensor] = []
        self.places: list[Place | None] = []  # of the parameters that are DTensors, where there are any
        self.device = device_of(self.group, [])
        self.words = [name]
        self.randomness = randomness
        self.draws = generators([])
        self.heads: list[Head] | None = None  # of all ranks, once they are known
        self.rounds: list[Round] = []  # that are to come
        self.owed: list[Callable[[], object]] = []  # to be called even where the call fails: others wait in them
        self.lockstep: Any = None  # the passes of a model under fully_shard
        self.over = False  # there is nothing left that others could wait for, or nothing that they would hear

    def __enter__(self) -> "Ranks":
        """Raises, without a word to the others, where this rank could not talk to them in turn."""
        if self.group in _LOST:
            raise ArgumentError(
                f"{self.words[0]} is called with a group in which an earlier call was interrupted, or has lost a rank\n"
                "  this rank is out of step with the others: end the job, or make a new group on all ranks."
            )
        running = _BUSY.get(self.group)
        if running == threading.get_ident():
            raise ArgumentError(
                f"{self.words[0]} is called with a group inside another call with that group\n"
                "  samples of other ranks are not there for fn: call it outside, or without a group."
            )
        if running is not None:
            _LOST.add(self.group)  # the other ranks may have let these calls take turns
            raise ArgumentError(
                f"{self.words[0]} is called with a group that a call of another thread is using\n"
                "  ranks cannot tell the calls of threads apart: give each thread a group of its own."
            )
        _BUSY[self.group] = threading.get_ident()
        return self

    def take(self, params: Any) -> None:
        """Begin with these parameters."""
        self.leaves, self.spec = optree.tree_flatten(params)
        self.tensors = [t for t in self.leaves if isinstance(t, Tensor)]
        self.device = device_of(self.group, self.tensors)
        named = zip(self.spec.paths(), self.leaves, strict=True)
        kinds = [(*path, tuple(t.shape), t.dtype) for path, t in named if isinstance(t, Tensor)]
        self.words.append(f"{len(self.tensors)} parameters {kinds}")
        self.draws = generators(self.tensors)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                if self.heads is None:
                    self.agree()
            elif not self.over:
                self._leave(error)
        finally:
            _BUSY.pop(self.group, None)
        if error is None:
            self._warn_of_shared_seeds()

    def _leave(self, error: BaseException) -> None:
        """End a call that has failed here. If the others cannot be told, the error is still the one to show."""
        if not isinstance(error, Exception):  # an interrupt waits for nobody
            _LOST.add(self.group)
            return
        try:
            self._tell(error)
        except Exception:
            _LOST.add(self.group)

    # ---- parameters in pieces ----------------------------------------------------------------------------

    def in_pieces(self, other: tuple[str, Any], **options: object) -> list[Place | None]:
        """Note where the pieces of the parameters are, and see to it that all ranks have them in the same.

        The same for another tree, given with its name, whose places are returned.
        """
        self.places = places_of(self.leaves, paths(self.spec, "params"), self.group)
        leaves, spec = optree.tree_flatten(other[1])
        found = places_of(leaves, paths(spec, other[0]), self.group)
        self.expect(places=[None if place is None else place.placements for place in (*self.places, *found)], **options)
        self.agree()  # else a rank whose parameters are whole would wait for the others, who wait for it
        self.heads = None  # those of the call itself are yet to come
        return found

    def gathered(self, other: tuple[str, Any]) -> tuple[Any, Any]:
        """The parameters, and another tree, with every DTensor whole."""
        pieces = self.in_pieces(other)
        params: Any = optree.tree_unflatten(self.spec, self.leaves)
        with self.in_touch():
            return made_whole(params, self.places), made_whole(other[1], pieces)

    def placed(self, leaves: list[Tensor]) -> list[Tensor]:
        """Tensors like the parameters, which all ranks have whole, in pieces where these are."""
        if not self.places:
            return leaves
        return [t if place is None else place.of(t) for t, place in zip(leaves, self.places, strict=True)]

    # ---- what has to be the same -------------------------------------------------------------------------

    def expect(self, **options: object) -> None:
        """Options that have to be the same on all ranks."""
        self.words += [f"{name}={value!r}" for name, value in options.items()]

    def once(self, function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """The user's function, which may talk to the other ranks: it is called once, even where the call fails."""

        def owed() -> object:
            with self.aside():
                return function(torch.zeros(0, device=self.device))

        def called(norms: Tensor) -> Any:
            self.owed.remove(owed)
            with self.aside():
                return function(norms)

        self.owed.append(owed)
        return called

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Around a function of the user's that all ranks call between two collectives: it may use the group itself."""
        running = _BUSY.pop(self.group)
        try:
            yield
        finally:
            _BUSY[self.group] = running

    # ---- heads -------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Samples of all ranks."""
        assert self.heads is not None
        return int(sum(head.samples for head in self.heads))

    def agree(self, samples: int = 0) -> list[Head]:
        """Exchange heads and nothing else. Raises where some rank has failed, or makes another call."""
        flat = self.first(samples)
        self.finished(self.started(flat))
        return self.read(flat)

    def first(self, count: int, failed: bool = False) -> Tensor:
        """What is reduced first: heads, and room for small sums."""
        flat = torch.zeros(self.size * FIELDS + SMALL, dtype=torch.float64, device=self.device)
        drew = self.randomness == "different" and not failed and not _same(self.draws, generators(self.tensors))
        head = Head(failed, _fingerprint(self.words), _fingerprint(self.draws.values()) if drew else 0, count)
        at = self.rank * FIELDS
        flat[at : at + FIELDS] = torch.tensor(head, dtype=torch.float64)
        return flat

    def read(self, flat: Tensor) -> list[Head]:
        """The heads of all ranks. Raises where some rank has failed, or makes another call."""
        rows = flat[: self.size * FIELDS].view(self.size, FIELDS).tolist()
        self.heads = [Head(*row) for row in rows]
        if any(head.failed for head in self.heads):
            raise self.remote(self._exchange(None))
        if len({head.call for head in self.heads}) > 1:
            calls = _apart(self._exchange(", ".join(self.words)))
            said = "\n".join(f"  rank {rank}: {words}" for rank, words in calls)
            raise ArgumentError(
                f"the ranks of the group do not make the same call\n{said}\n"
                "  every rank has to call the same function, with the same parameters and bounds, in the same order."
            )
        return self.heads

    # ---- collectives -------------------------------------------------------------------------------------

    def started(self, flat: Tensor) -> Any:
        """A sum over all ranks, in place, that has begun."""
        with self.in_touch():
            return dist.all_reduce(flat, group=self.group, async_op=True)

    def finished(self, work: Any) -> None:
        with self.in_touch():
            work.wait()

    @contextlib.contextmanager
    def in_touch(self) -> Any:
        """Around a collective: one that fails, as when a process has died, is the last one of the call."""
        try:
            yield
        except BaseException:
            self.lose()
            raise

    def lose(self) -> None:
        """This rank can no longer talk to the others in turn."""
        self.over = True
        _LOST.add(self.group)

    # ---- errors ------------------------------------------------------------------------------------------

    def _tell(self, error: Exception) -> None:
        """Let the others know that the call has failed here."""
        passing = self.lockstep is not None and self.lockstep in self.rounds and not self.lockstep.is_between
        for call in () if passing else self.owed:  # in the middle of passes no rank will call them
            with contextlib.suppress(Exception):
                call()
        if self.heads is None and not self.rounds:
            self.finished(self.started(self.first(0, failed=True)))
        elif self.rounds:
            self.rounds[0].abandon()
        else:
            return
        self._exchange(_words(error))

    def refuse(self) -> None:
        """Raise since some rank has failed: the numbers of a round say so."""
        raise self.remote(self._exchange(None))

    def _exchange(self, own: str | None) -> list[tuple[int, str]]:
        """Words of those ranks that have some, with their numbers in the whole job."""
        said: list[Any] = [None] * self.size
        with self.in_touch():
            dist.all_gather_object(said, own, group=self.group)
        self.over = True
        return [(dist.get_global_rank(self.group, k), words) for k, words in enumerate(said) if words is not None]

    @staticmethod
    def remote(said: list[tuple[int, str]]) -> RemoteError:
        error = RemoteError("\n".join(f"rank {rank}: {words}" for rank, words in said))
        error.rank, error.message = said[0]
        return error

    def _warn_of_shared_seeds(self) -> None:
        ranks: dict[float, list[int]] = {}
        for k, head in enumerate(self.heads or ()):
            if head.draws:
                ranks.setdefault(head.draws, []).append(dist.get_global_rank(self.group, k))
        if shared := [same for same in ranks.values() if len(same) > 1]:
            warnings.warn(
                f"ranks {', '.join(map(str, shared[0]))} drew the same random numbers for different samples\n"
                "  seed every rank that has samples of its own differently: torch.manual_seed(seed + rank).",
                SharedSeedWarning,
                stacklevel=callers_level(),
            )


def _words(error: Exception) -> str:
    """What an error says; others wait for it, so that this does not raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def _apart(said: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """What ranks have called, each cut to where they begin to differ."""
    letters = enumerate(zip(*(words for _, words in said), strict=False))
    same = next((k for k, each in letters if len(set(each)) > 1), 0)
    found = []
    for rank, words in said:
        head, start = words[:60], max(60, same - 40)
        gap, tail = " ... " if start > 60 else "", words[start : start + 140]
        found.append((rank, head + gap + tail + (" ..." if len(words) > start + 140 else "")))
    return found


def _fingerprint(parts: Iterable[Any]) -> float:
    """48 bits that tell lists of words, or of tensors of bytes, apart; never 0."""
    digest = hashlib.blake2b(digest_size=6)
    for part in parts:
        digest.update(bytes(part.tolist()) if isinstance(part, Tensor) else f"{part}\n".encode())
    return float(int.from_bytes(digest.digest(), "big") or 1)


def _same(before: dict[Any, Tensor], after: dict[Any, Tensor]) -> bool:
    return all(torch.equal(state, after[device]) for device, state in before.items())
