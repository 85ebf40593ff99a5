"""A model under `fully_shard`, layer by layer: FSDP2 gathers a unit, and what `fn` is to follow is put into it."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.signals import Signal
from ..errors import ArgumentError
from ..torch_ import sharding
from ..torch_.sharding import Event, Unit, Units, is_dtensor
from ..torch_.versions import TESTED


class OutOfTurn(Signal):
    """This rank wants a layer at a point where the others, by the order that is known, do not expect it."""


class Layers:
    """The units of a model, with the names of its parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        if not sharding.is_sharded(model):
            raise ArgumentError(
                "a part of the model is sharded by fully_shard, but the model itself is not\n"
                "  call fully_shard(model), too: it has to be the root."
            )
        if gone := sharding.missing():
            raise ArgumentError(
                f"the model is sharded by fully_shard, whose {gone[0]} torch {torch.__version__} does not have\n"
                f"  psgrad was tested with that of torch {TESTED[0]} to {TESTED[1]}: install one of these, "
                "or give the model before fully_shard."
            )
        self.model, self.units = model, Units(model)
        known = {id(param.own): param for unit in self.units.all for param in unit.params}
        self.params = {}
        for name, p in model.named_parameters():
            if id(p) in known:
                self.params[name] = known[id(p)]
                if not known[id(p)].is_plain:
                    raise ArgumentError(
                        f"parameter {name!r} of the model was no ordinary tensor before fully_shard\n"
                        "  give a model with ordinary parameters to fully_shard."
                    )
            elif p.requires_grad:
                raise ArgumentError(
                    f"parameter {name!r} of the model is trainable, but not under fully_shard\n"
                    "  shard it, too, or set requires_grad to False."
                )
        self.names = {id(param): name for name, param in self.params.items()}
        self.held: Mapping[str, Tensor] = {}  # what stands in for parameters in this pass
        # the collectives of a pass in their order, without and with sums that are scattered as they come: the same on
        # all ranks
        self.schedules: dict[bool, list[Event]] = {}
        self.issued: list[Event] = []  # those of this pass, so far
        self.is_prepared = False
        self.is_passing = False  # inside a pass

    def own(self) -> dict[str, Tensor]:
        """The pieces that this rank holds of the trainable parameters, as DTensors."""
        return {name: param.own.detach() for name, param in self.params.items() if param.own.requires_grad}

    def check(self, params: Any, group: "dist.ProcessGroup") -> None:
        """Raise where `params` are not the model's own, or not sharded over the ranks of the group."""
        if not isinstance(params, Mapping) or not params.keys() <= self.params.keys():
            raise ArgumentError(
                "params are not those of the model under fully_shard\n  give what from_module returned, or some of it."
            )
        members = sorted(dist.get_process_group_ranks(group))
        for name, t in params.items():
            if self.params[name].accumulates:
                raise ArgumentError(
                    f"params[{name!r}] has a gradient that FSDP2 is still to reduce, as between backwards of one step\n"
                    "  finish that step first."
                )
            own = self.params[name].own
            if not is_dtensor(t) or t.to_local().data_ptr() != own.to_local().data_ptr():
                raise ArgumentError(
                    f"params[{name!r}] is not the model's own, and a model under fully_shard runs on its own alone\n"
                    "  give what from_module returned; load other values into the model."
                )
            ranks = sorted(own.device_mesh.mesh.flatten().tolist())
            if ranks != members:
                raise ArgumentError(
                    f"params[{name!r}] is sharded over ranks {ranks}, and the group has {members}\n"
                    "  give a group of all ranks of the model's mesh, such as torch.distributed.group.WORLD."
                )

    def prepare(self) -> None:
        """Have FSDP2 make the tensors for whole parameters, once: this gathers every unit."""
        if not self.is_prepared:
            self.units.prepare()
            self.is_prepared = True

    def whole(self, params: Mapping[str, Any]) -> dict[str, Tensor]:
        """The whole tensors of `params`, which have memory while FSDP2 has them gathered."""
        return {name: self.params[name].gathered() for name in params}

    def largest_sums(self) -> int:
        """Bytes of the sums of the largest unit."""
        return max(sum(4 * int(param.own.numel()) for param in unit.params) for unit in self.units.all)

    @contextlib.contextmanager
    def passing(
        self, ask: Callable[[int], None], scatter: Callable[[Unit, bool], None] | None = None
    ) -> Iterator[None]:
        """Around one pass. Whatever happens in it, this rank takes part in the collectives that all ranks expect.

        `scatter` sends the sums of a unit whose backward is over, or zeros. While the order of the collectives is not
        known, `ask` sees to it, before each of them and at the end, that all ranks are at the same one.
        """
        kind = scatter is not None
        known, self.issued, self.is_passing = self.schedules.get(kind), [], True

        def before(event: Event) -> bool:
            if known is None:
                ask(self._number(event))
            elif event.is_scatter and event not in known[len(self.issued) :]:
                return False  # this rank has sent zeros: its sums are scattered at the end
            else:
                self._wait_for_turn(event, known, scatter)
            self.issued.append(event)
            return True

        try:
            with self.units.passing(self._put, before, None if scatter is None else lambda unit: scatter(unit, True)):
                yield
            if known is None:
                ask(2 * len(self.units.all))
                self.schedules[kind] = self.issued
        finally:
            self.held, self.is_passing = {}, False
            self.units.reset()
            if known is not None and not self.units.is_broken:
                for event in known[len(self.issued) :]:
                    self._serve(event, scatter)

    def orders(self) -> list[tuple[bool, list[int]]]:
        """What is known of the order of collectives, in numbers."""
        return [(kind, [*map(self._number, known)]) for kind, known in sorted(self.schedules.items())]

    def _number(self, event: Event) -> int:
        return 2 * self.units.all.index(event.unit) + event.is_scatter

    def _wait_for_turn(self, event: Event, known: list[Event], scatter: Callable[[Unit, bool], None] | None) -> None:
        """Take part in what comes before `event`: a rank may leave layers out that others run."""
        left = known[len(self.issued) :]
        earlier = left[: left.index(event)] if event in left else []
        if event not in left or not all(other.is_scatter or other.unit.is_to_gather for other in earlier):
            raise OutOfTurn
        for other in earlier:
            self._serve(other, scatter)

    def _serve(self, event: Event, scatter: Callable[[Unit, bool], None] | None) -> None:
        """Take part in a collective for the others' sake."""
        if event.is_scatter:
            assert scatter is not None
            self.units.unbroken(scatter)(event.unit, False)
        else:
            self.units.unbroken(event.unit.gather)()
        self.issued.append(event)

    def _put(self, unit: Unit) -> None:
        """Let the modules hold what stands in for their parameters; what is not asked for is a constant."""
        for param in unit.params:
            t = self.held.get(self.names[id(param)])
            for home, key in param.slots:
                home[key] = param.gathered() if t is None else t


# Layers hold their model, so that here they are held by those who use them alone.
_LAYERS: "weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Layers]]" = weakref.WeakKeyDictionary()


def layers_of(model: torch.nn.Module) -> Layers:
    """The layers of a model, the same ones as long as it has the same parameters."""
    kept = _LAYERS.get(model)
    known = None if kept is None else kept()
    if known is not None and [id(param.own) for param in known.params.values()] == [
        id(p) for name, p in model.named_parameters() if name in known.params
    ]:
        return known
    found = Layers(model)
    _LAYERS[model] = weakref.ref(found)
    return found
