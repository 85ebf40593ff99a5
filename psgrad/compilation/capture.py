"""A quantity as a part of somebody else's graph: inside a function that torch.compile compiles."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from operator import setitem
from typing import Any

import optree
import torch
from torch import Tensor

from ..engine.signals import Unrecordable
from ..errors import UnsupportedOpError
from ..quantities.clipped import clipped_grad
from ..quantities.clipping import ClippedGrad
from ..quantities.stats import GradStats, grad_stats
from ..torch_ import tracing
from ..torch_.compiler import in_graph
from .surroundings import Surroundings


def functions_among(options: Any) -> list[Any]:
    """The functions of the user's that a quantity is given, such as weights of the norms."""
    return [leaf for leaf in optree.tree_leaves(options) if callable(leaf)]


class Capture:
    """What dynamo reads in place of `Compiled`: the ops of the quantity go into its graph.

    Tensors that `fn` closes over are arguments there: a graph would take their numbers for granted otherwise. Flags of
    modules are, too, so that dynamo notices `model.eval()`. What cannot be recorded breaks the graph.
    """

    def __init__(self, quantity: Callable[..., Any], fn: Any, options: dict[str, Any]) -> None:
        self.record_type: Any = {clipped_grad: ClippedGrad, grad_stats: GradStats}.get(quantity)
        around = Surroundings((fn, *functions_among(options)))
        places = zip(around.dicts, around.keys, around.items, strict=True)
        cells = zip(around.cells, around.contents, strict=True)
        self.modules = [m for m in (*around.items, *around.contents) if isinstance(m, torch.nn.Module)]
        self.homes: list[tuple[Any, Any]] = [(home, key) for home, key, item in places if isinstance(item, Tensor)]
        self.homes += [(home, i) for home in around.lists for i, item in enumerate(home) if isinstance(item, Tensor)]
        self.cells = [cell for cell, contents in cells if isinstance(contents, Tensor)]

        def captured(met: Sequence[Tensor], flags: Any, params: Any, batch: Any, args: Any, kwargs: Any) -> Any:
            if tracing.dispatch_modes():
                if any(isinstance(t, Tensor) for t in optree.tree_leaves({**options, **kwargs}.get("max_norm", 0))):
                    raise UnsupportedOpError("the sensitivity to a bound that is a tensor is a number")
                try:
                    with tracing.captured(), self._holding(met):
                        found = quantity(fn, params, batch, *args, **{**options, **kwargs})
                except Unrecordable as refusal:
                    raise UnsupportedOpError(f"{quantity.__name__} cannot be recorded: {refusal.why}") from None
            else:  # the graph was broken here, or its backend is Python
                found = quantity(fn, params, batch, *args, **{**options, **kwargs})
            return tuple(found) if self.record_type is not None else found  # dynamo takes no records

        self.captured = in_graph(captured)

    def __call__(self, params: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Read by dynamo, never run by Python."""
        met = [home[key] for home, key in self.homes] + [cell.cell_contents for cell in self.cells]
        flags = [module.training for module in self.modules]
        found = self.captured(met, flags, params, batch, args, kwargs)
        return found if self.record_type is None else self.record_type(*found)

    @contextlib.contextmanager
    def _holding(self, met: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the places that `fn` reads hold these."""
        homes, keys = [home for home, _ in self.homes], [key for _, key in self.homes]
        before = [home[key] for home, key in self.homes]
        contents = [cell.cell_contents for cell in self.cells]
        try:
            list(map(setitem, homes, keys, met))
            for cell, t in zip(self.cells, met[len(homes) :], strict=True):
                cell.cell_contents = t
            yield
        finally:
            list(map(setitem, homes, keys, before))
            for cell, t in zip(self.cells, contents, strict=True):
                cell.cell_contents = t
