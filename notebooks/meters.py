"""What the notebooks measure with: times, and bytes."""

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def times(calls: Mapping[str, Callable[[], object]], seconds: float = 1.0) -> dict[str, float]:
    """Seconds that each call takes: all in turn, again and again; the minimum counts, since noise only ever adds."""
    best = dict.fromkeys(calls, float("inf"))
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < 3 or time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
        rounds += 1
    return best


def peak_bytes(call: Callable[[], object], inputs: Iterable[Tensor] = ()) -> int:
    """The most bytes of tensors that were alive at once during a call, its result among them, its inputs not."""
    with _Meter(inputs) as meter:
        call()
    return meter.peak


class _Meter(TorchDispatchMode):
    """Sees every tensor that torch makes, and when its memory goes."""

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self.inputs = list(inputs)
        self.seen = {t.untyped_storage().data_ptr() for t in self.inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(t, Tensor) and (size := t.untyped_storage().nbytes()):
                self._meet(t.untyped_storage(), size)
        return out

    def _meet(self, storage: torch.UntypedStorage, size: int) -> None:
        address = storage.data_ptr()
        if address not in self.seen:
            self.seen.add(address)
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._part, address, size)

    def _part(self, address: int, size: int) -> None:
        self.seen.discard(address)
        self.alive -= size
