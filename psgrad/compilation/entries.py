"""What a compiled quantity remembers: graphs, by what `fn` reads and by the signature of the call."""

from collections.abc import Callable
from typing import Any, NamedTuple

from .recording import Recording
from .surroundings import Surroundings


class Entry:
    """The graphs for calls of one signature, the one that was good last in front."""

    def __init__(self) -> None:
        self.graphs: list[Recording] = []
        self.strikes = 0  # calls in a row that no graph was good for
        self.given_up = False  # such calls run eagerly
        self.stays_eager = False  # the eager call is faster than its graph
        self.refusal: str | None = None  # why there is no graph; said once a call has run eagerly
        self.is_void = False  # `fn` failed by itself, so that nothing is known of other calls
        self.size: int | None = None  # the batch is filled up to so many samples: graphs are those of that size


class World:
    """What `fn` reads besides its arguments, and the graphs that are good as long as that stays."""

    def __init__(self, fn: Any) -> None:
        self.surroundings = Surroundings(fn)
        self.entries: dict[Any, Entry] = {}
        self.sizes: dict[Any, list[int]] = {}  # of batches that there are graphs for, by the signature but for the size

    def known(self, key: Any) -> Entry | None:
        """The entry of a signature; None where a call has yet to say something about its like."""
        entry = self.entries.get(key)
        return None if entry is None or entry.is_void else entry


class Recent(NamedTuple):
    """The last call that a graph was there for: of one like it nothing has to be worked out."""

    world: World
    structure: tuple[Any, ...]
    settings: tuple[Any, ...]
    are_alike: Callable[..., bool]  # tensors, to those of that call
    entry: Entry
