"""Inner products of the gradients of all ranks' samples: those of one loss for gram, of K outputs for ntk.

Parameter i's factors of all ranks go to rank i mod w, which makes its part of the whole matrix; the parts are summed.
So factors are sent once, where a ring would send them w / 2 times.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from ..processes.parcels import Matrix
from ..processes.ranks import Ranks
from .factored import FactoredGrads, concat


class Rows(NamedTuple):
    """What a rank sends of its samples: the gradients of some parameters, and which samples they are."""

    grads: Sequence[FactoredGrads | None]  # of each output; None: there is no parameter for that rank
    places: Tensor | None  # of the samples that count; None: all
    n: int

    def of_params(self, rank: int, size: int) -> "Rows":
        """The same of every `size`-th parameter, from number `rank` on."""
        some = slice(rank, None, size)
        return self._replace(grads=[None if own is None else own._of_params(some) for own in self.grads])


def refuse_max_bytes(name: str, max_bytes: object) -> None:
    if max_bytes is not None:
        raise ArgumentError(
            f"{name} with a group keeps the factors of all samples, which max_bytes does not bound\n"
            "  give chunk_size, for what runs at once, or no group."
        )


def products_of_all(ranks: Ranks, matrix: Matrix, sides: Sequence[Rows], is_trace: bool = False) -> Tensor:
    """(n, M, K, K), or the trace (n, M): this rank's rows, and columns of all ranks' samples, one rank after the other.

    `sides` are the rows, and the columns where these are others.
    """
    count = 1 if is_trace else len(sides[0].grads)
    parcels = [[side.of_params(k, ranks.size) for side in sides] for k in range(ranks.size)]
    came = matrix.exchanged(parcels, sides[0].n * count, sides[-1].n * count)
    firsts, seconds = [parts[0] for parts in came], [parts[-1] for parts in came]
    n, m = (sum(part.n for part in parts) for parts in (firsts, seconds))

    def products() -> Tensor | None:
        if not firsts[0].grads or firsts[0].grads[0] is None:
            return None
        left = _joined(firsts)
        right = left if len(sides) == 1 else _joined(seconds)
        out = torch.zeros(n, count, m, count, dtype=matrix.dtype, device=ranks.device)
        rows, columns = _places(firsts)[:, None], _places(seconds)
        for k, a in enumerate(left):
            for i, b in enumerate(right) if not is_trace else [(k, right[k])]:
                at = (0, 0) if is_trace else (k, i)
                out[:, at[0], :, at[1]][rows, columns] += a.dots(b).to(out)
        return out.view(n * count, m * count)

    start = sum(part.n for part in firsts[: ranks.rank])
    found = matrix.summed(products).view(n, count, m, count)[start : start + sides[0].n].permute(0, 2, 1, 3)
    return (found[:, :, 0, 0] if is_trace else found).clone(memory_format=torch.contiguous_format)


def _joined(parts: Sequence[Rows]) -> list[Any]:
    """The gradients of all ranks' samples, for each output."""
    return [concat(list(own)) for own in zip(*(part.grads for part in parts), strict=True)]


def _places(parts: Sequence[Rows]) -> Tensor:
    """Where the samples that count are among those of all ranks."""
    found, start = [], 0
    for part in parts:
        own = torch.arange(part.n) if part.places is None else part.places.cpu()
        found.append(own + start)
        start += part.n
    return torch.cat(found)
