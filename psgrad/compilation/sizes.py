"""Batches of many sizes on graphs of few: filled up with copies of a sample that do not count."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from ..quantities.clipped import clipped_grad
from ..quantities.grads import per_sample_grads
from ..quantities.gram import gram
from ..quantities.norms import per_sample_norms
from ..quantities.sums import weighted_grad


class Sizing(NamedTuple):
    """How a quantity takes a batch that is filled up."""

    cut: Callable[[Any, int, bool], Any]  # the result for all rows, with aux or without, as that for the first n
    is_sum: bool = False  # over samples: copies count 0

    def samples(self, batch: Any, options: dict[str, Any]) -> int | None:
        """How many samples there are; None where a batch like this is not filled up."""
        leaves = optree.tree_leaves(batch, none_is_leaf=True)
        plain = all(isinstance(t, Tensor) and t.dim() for t in leaves) and options.get("in_dims", 0) == 0
        sizes = {len(t) for t in leaves} if plain else set()
        other = callable(options.get("weights")) or options.get("other") is not None or options.get("chunk_size")
        return sizes.pop() if len(sizes) == 1 and sizes != {0} and not other else None

    def filled_up(self, batch: Any, options: dict[str, Any], n: int, size: int) -> tuple[Any, dict[str, Any]]:
        """Batch and options for `size` samples, of which the first n are these."""
        larger = optree.tree_map(lambda t: torch.cat([t, t[:1].expand(size - n, *t.shape[1:])]), batch)
        options, missing = dict(options), size - n
        if isinstance(w := options.get("weights"), Tensor) and w.shape == (n,):
            options["weights"] = torch.cat([w, w.new_zeros(missing)])
        valid = options.get("valid")
        if isinstance(valid, Tensor):
            options["valid"] = torch.cat([valid, valid.new_zeros(missing)])
        elif self.is_sum and "weights" not in options:
            device = optree.tree_leaves(batch)[0].device
            options["valid"] = torch.arange(size, device=device) < n
        return larger, options


def padded_size(n: int) -> int:
    """A power of two, or three quarters of one, that n samples fit."""
    power = 1 << max(n - 1, 0).bit_length()
    return power * 3 // 4 if power > 2 and n <= power * 3 // 4 else power


def _first(tree: Any, n: int) -> Any:
    return optree.tree_map(lambda t: t[:n], tree)


def _cut_rows(found: Any, n: int, has_aux: bool) -> Any:
    return _first(found, n)


def _cut_clipped(found: Any, n: int, has_aux: bool) -> Any:
    step = found[0] if has_aux else found
    step = step._replace(norms=_first(step.norms, n), values=step.values[:n])
    return (step, _first(found[1], n)) if has_aux else step


def _cut_sum(found: Any, n: int, has_aux: bool) -> Any:
    return (found[0], _first(found[1], n)) if has_aux else found


def _cut_gram(found: Any, n: int, has_aux: bool) -> Any:
    return (found[0][:n, :n], _first(found[1], n)) if has_aux else found[:n, :n]


SIZINGS: dict[Callable[..., Any], Sizing] = {
    per_sample_grads: Sizing(_cut_rows),
    per_sample_norms: Sizing(_cut_rows),
    clipped_grad: Sizing(_cut_clipped, is_sum=True),
    weighted_grad: Sizing(_cut_sum, is_sum=True),
    gram: Sizing(_cut_gram),
}
