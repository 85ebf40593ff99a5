"""Models under `fully_shard` (FSDP2): what it keeps of them, and its hooks, as they go together with vmap and modes.

FSDP2 gathers the parameters of a unit before the unit's forward and its backward, into tensors whose memory it frees
and allocates again. Its hooks would run under our mode and inside vmap; while a pass is on they run outside of both, on
the plain (N, ...) tensors. All of its private names are here. They are looked up when a model under `fully_shard` is
met: to import torch.distributed.fsdp takes longer than to import psgrad.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from . import levels
from .autograd import without_modes
from .modules import Home, parameters_of

_NAMES: dict[tuple[str, str], Sequence[str]] = {  # by module and class, as far as they are there before a model has run
    ("_fully_shard", "FSDPModule"): ("_get_fsdp_state",),
    ("_fully_shard._fsdp_state", "FSDPState"): (
        "_lazy_init",
        "_pre_backward",
        "_register_pre_backward_hook",
        "_root_pre_forward",
    ),
    ("_fully_shard._fsdp_param_group", "FSDPParamGroup"): (
        "_register_post_backward_hook",
        "_to_sharded",
        "is_unsharded",
        "post_backward",
        "post_forward",
        "pre_backward",
        "pre_forward",
        "reshard",
        "unshard",
        "wait_for_unshard",
    ),
    ("_fully_shard._fsdp_param", "FSDPParam"): ("init_unsharded_param",),
}


_NOTHING = object()


def is_sharded(module: object) -> bool:
    """Whether `module` is a unit of `fully_shard`."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # where nobody has loaded it, no module is sharded
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def is_dtensor(t: object) -> bool:
    tensor: Any = sys.modules.get("torch.distributed.tensor")  # where nobody has loaded it, there are none
    return tensor is not None and isinstance(t, tensor.DTensor)


def missing() -> list[str]:
    """The private names of FSDP2 that this torch does not have."""
    gone = []
    for (home, owner), names in _NAMES.items():
        with contextlib.suppress(ImportError):
            found = getattr(import_module(f"torch.distributed.fsdp.{home}"), owner, None)
            names = [name for name in names if not hasattr(found, name)]
        gone += [f"{owner}.{name}" for name in names]
    return gone


def _groups_of(state: Any) -> list[Any]:
    """The groups of parameters that a module of `fully_shard` gathers; an older torch has at most one of them."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


class ShardedParam:
    """A parameter under `fully_shard`."""

    def __init__(self, param: Any) -> None:
        self.param, self.own = param, param.sharded_param  # the DTensor that the model holds
        info = param._module_info
        self.slots: list[tuple[Home, str]] = [
            (parameters_of(module), key)
            for module, key in zip(
                [info.module, *info.shared_modules], [info.param_name, *info.shared_param_names], strict=True
            )
        ]

    @property
    def is_plain(self) -> bool:
        """Whether it is gathered as it is: no tensor of another kind, nor in pieces on other axes of a mesh."""
        return not self.param.is_dtensor and not hasattr(self.param._sharded_local_tensor, "fsdp_post_all_gather")

    @property
    def accumulates(self) -> bool:
        """Whether a gradient waits to be reduced: the model is between two backwards of one step."""
        return self.param.unsharded_accumulated_grad is not None

    def gathered(self) -> Tensor:
        """The whole parameter, whose memory is there while FSDP2 has it gathered. The same tensor always."""
        whole: Tensor = self.param._unsharded_param.detach()
        return whole


class Unit:
    """Parameters that FSDP2 gathers together, before one of `modules` runs."""

    def __init__(self, group: Any) -> None:
        self.group, self.modules = group, group.modules
        self.params = [ShardedParam(param) for param in group.fsdp_params]

    @property
    def is_to_gather(self) -> bool:
        """Whether `unshard` would begin to gather, as it does where nothing is there and nothing is under way."""
        group = self.group
        is_skipped = not getattr(group, "unshard_in_backward", True) and group._training_state.name == "PRE_BACKWARD"
        return group._all_gather_result is None and not group.is_unsharded and not is_skipped

    def gather(self) -> None:
        """Gather and let go: for other ranks, which want this one's pieces. Also inside a pass."""
        kind = type(self.group)
        kind.unshard(self.group)
        kind.wait_for_unshard(self.group)
        kind._to_sharded(self.group)


class Event(NamedTuple):
    """A unit is gathered, or its sums are scattered."""

    unit: Unit
    is_scatter: bool


class Units:
    """The units of a model, in the order of its modules."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        states = {id(s): s for m in model.modules() if is_sharded(m) for s in [m._get_fsdp_state()]}  # type: ignore[operator]
        self.states = list(states.values())
        self.all = [Unit(group) for state in self.states for group in _groups_of(state)]
        self.is_broken = False  # a gather of this pass has failed, as when a process has died

    def prepare(self) -> None:
        """Gather each unit once, so that the tensors for whole parameters exist."""
        root: Any = self.model
        root._get_fsdp_state()._lazy_init()
        for unit in self.all:
            unit.gather()

    def reset(self) -> None:
        """Nothing is gathered, nothing is under way: as after an ordinary step, whatever has happened in this one."""
        root: Any = self.model
        if hasattr(root, "reset_iter_state"):
            root.reset_iter_state()
        else:
            _reset(root._get_fsdp_state())

    @contextlib.contextmanager
    def passing(
        self, put: Callable[[Unit], None], before: Callable[[Event], bool], after: Callable[[Unit], None] | None
    ) -> Iterator[None]:
        """Around a forward and a backward: hooks run outside vmap and modes.

        `put` is called where a unit is whole before it runs, `after`, which is a collective, where its backward is
        over, `before` where a collective is about to begin; it may say that there is to be no `after`.
        """
        handles = [
            module.register_forward_pre_hook(lambda *_, unit=unit: put(unit))
            for unit in self.all
            for module in unit.modules
        ]
        self.is_broken = False
        changed: list[tuple[dict[str, Any], str, Any]] = []

        def change(owner: Any, name: str, value: Any) -> None:
            home = vars(owner)  # is asked before its class
            changed.append((home, name, home.get(name, _NOTHING)))
            home[name] = value

        try:
            for state in self.states:
                change(state, "_root_pre_forward", _unseen(state._root_pre_forward))
                change(state, "_register_pre_backward_hook", _pre_backward_hook(state))
            for unit in self.all:
                group = unit.group
                change(group, "reduce_grads", False)  # there are none of its own
                for name in ("pre_forward", "post_forward", "reshard", "pre_backward"):
                    change(group, name, _unseen(getattr(group, name)))
                change(group, "post_backward", self._ending(unit, group.post_backward, before, after))
                change(group, "unshard", self._gathering(unit, group.unshard, before))
                change(group, "wait_for_unshard", _unseen(self.unbroken(group.wait_for_unshard)))
                change(group, "_register_post_backward_hook", _post_backward_hook(group))
            yield
        finally:
            for handle in handles:
                handle.remove()
            for home, name, before in reversed(changed):
                home[name] = before
                if before is _NOTHING:
                    del home[name]

    def unbroken(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, and noted whether it has failed."""

        def unbroken(*args: Any) -> Any:
            try:
                return function(*args)
            except BaseException:
                self.is_broken = True
                raise

        return unbroken

    def _gathering(self, unit: Unit, unshard: Callable[..., None], before: Any) -> Callable[..., None]:
        """`unshard` of a unit without modes, and first `before`, where it begins to gather."""

        def gathering(*args: Any) -> None:
            with without_modes():
                is_idle = unit.group._all_gather_result is None
                is_to_gather = unit.is_to_gather
                if is_to_gather:
                    _outside(before, Event(unit, False))
                self.unbroken(unshard)(*args)
                if is_to_gather != (is_idle and unit.group._all_gather_result is not None):
                    self.is_broken = True
                    raise AssertionError("fully_shard gathers where psgrad does not expect it; please report this")

        return gathering

    def _ending(self, unit: Unit, post_backward: Callable[..., None], before: Any, after: Any) -> Callable[..., None]:
        """`post_backward` of a unit without modes, and then `after`."""

        def ending(*args: Any) -> None:
            with without_modes():
                post_backward(*args)
                if after is not None and before(Event(unit, True)):
                    self.unbroken(after)(unit)

        return ending


def _outside(function: Callable[..., Any], *args: object) -> Any:
    """`function` outside of the vmap that runs, if one does."""
    return function(*args) if levels.current_level() is None else levels.below(function, *args)


def _reset(root: Any) -> None:
    """`reset_iter_state` of a newer torch, for the state of the root under an older one."""
    stream, shared, pass_ = root._device_handle.current_stream(), root._comm_ctx, root._state_ctx
    for name in ("all_gather_state", "reduce_scatter_state"):
        _wait(stream, getattr(shared, name))
        setattr(shared, name, None)
    shared.post_forward_order.clear()
    for state in pass_.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
        for group in _groups_of(state):
            if (gather := group._all_gather_result) is not None:
                if gather.all_gather_event is not None:
                    stream.wait_event(gather.all_gather_event)
                if hasattr(gather.all_gather_work, "wait"):
                    gather.all_gather_work.wait()
            _wait(stream, group._all_reduce_state)
            if group._post_reduce_event is not None:
                stream.wait_event(group._post_reduce_event)
            group._all_gather_result = group._all_reduce_state = group._post_reduce_event = None
            group._reshard_after_forward_event = group._partial_reduce_output = None
            group._post_forward_indices.clear()
            group._training_state = type(group._training_state).IDLE
            group._to_sharded()
    pass_.iter_forward_root = None
    pass_.post_backward_final_callback_queued = False


def _wait(stream: Any, pending: Any) -> None:
    """Let `stream` wait for a collective that may be under way."""
    if pending is not None and pending.event is not None:
        stream.wait_event(pending.event)


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` without modes."""

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with without_modes():
            return function(*args, **kwargs)

    return unseen


def _pre_backward_hook(state: Any) -> Callable[[Any], Any]:
    """FSDP2 hangs its hook, which gathers a unit for its backward, on the unit's outputs: here on the plain ones."""

    def register(output: Any) -> Any:
        with without_modes():
            for t in optree.tree_leaves(output):
                if isinstance(t, Tensor) and (plain := levels.plain(t)).requires_grad:
                    plain.register_hook(state._pre_backward)
        return output

    return register


def _post_backward_hook(group: Any) -> Callable[[Any, Any], Any]:
    """By one autograd Function of all inputs FSDP2 hears that a unit's backward is over: here of the plain ones."""
    function: Any = sys.modules[type(group).__module__].RegisterPostBackwardFunction

    def follows(t: Any) -> bool:
        return isinstance(t, Tensor) and levels.plain(t).requires_grad

    def register(args: Any, kwargs: Any) -> Any:
        level = levels.current_level()
        with without_modes():
            given: Any = args, kwargs
            leaves, spec = optree.tree_flatten(given, none_is_leaf=True)
            followed = [i for i, t in enumerate(leaves) if follows(t)]
            if not followed or not torch.is_grad_enabled():
                return args, kwargs
            if level is None:
                out = function.apply(group, *[leaves[i] for i in followed])
            else:
                batched = [levels.is_batched(leaves[i], level) for i in followed]
                plain = [
                    levels.rows_in_front(leaves[i], level) if b else leaves[i]
                    for i, b in zip(followed, batched, strict=True)
                ]
                out = levels.below(function.apply, group, *plain)
                out = [levels.wrap(t, level) if b else t for t, b in zip(out, batched, strict=True)]
            for i, t in zip(followed, out, strict=True):
                leaves[i] = t
            return optree.tree_unflatten(spec, leaves)

    return register
