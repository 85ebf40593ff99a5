"""What the mode does with a call, by the kind of function that is called.

`TABLE` is read from top to bottom. A row says which functions it is for; its handler takes a call of one of them, or
leaves it to the next row by NotImplemented. The last row takes everything: plain vmap.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import PsgradError, is_out_of_memory, name_of, place, reason_of
from ..factors import assumptions
from ..registry.rule import RULES
from ..torch_ import levels, operators
from ..torch_.functions import (
    ANSWERS,
    ATTENTION,
    GRAPHS,
    IS_NESTABLE,
    MAKE_DUAL,
    MAKERS,
    NUMBERS,
    PURE,
    READS,
    REQUIRES_GRAD,
    SET_REQUIRES_GRAD,
    SHOWN,
    UPDATES,
    VIEWS,
    asks_for_grad,
    is_about_the_tensor,
    is_attribute,
    is_composite,
    is_python,
    opened,
    reads_values,
    writes,
)
from ..torch_.storage import parted, storage_of, unfolded
from ..torch_.tracing import NO_VALUES
from ..torch_.watching import FunctionCall, says_vmap, vmaps_its_backward
from . import checkpoint, faults, op_loop, ragged_indexing
from .answers import answer, answer_for_all, graph_of, pretend_requires_grad, requires_grad
from .control_flow import body_of
from .draws import RANDOM, draws
from .held import constant
from .of_params import run_once
from .rule_call import run_rule
from .signals import NeedsLoop, Unrecordable
from .writes import check_write, note_view, own_statistics, put, with_sample_axis

if TYPE_CHECKING:
    from .mode import Mode, TorchCall

Handler = Callable[["Mode", "TorchCall"], Any]
_BY_SIZE = frozenset([torch.empty, torch.ones, torch.rand, torch.randn, torch.zeros])  # of sizes, perhaps in tensors
_MIXES = "its backward is not known to keep samples apart"
_OF_MEMORY = (torch.as_strided, torch.Tensor.as_strided)  # of the whole storage, in which a row is somewhere


# ---- before any handler ----------------------------------------------------------------------------------


def freeze(mode: "Mode", call: "TorchCall") -> "TorchCall":
    """The call without the graphs of others: what `fn` closes over is a constant."""
    if is_about_the_tensor(call.func) or checkpoint.keeps_arguments(call.func) or not mode.is_innermost:
        return call
    kept = 1 if writes(call.func, call.kwargs) else 0  # torch itself says what may be written
    args = (*call.args[:kept], *[constant(mode, call.func, v) for v in call.args[kept:]])
    kwargs = {k: v if k == "out" else constant(mode, call.func, v) for k, v in call.kwargs.items()}
    return mode.again(call, call.func, args, kwargs)


def refuse_out(mode: "Mode", is_sampled: object) -> None:
    """`out=`: vmap has no way to write what differs between samples."""
    if is_sampled and mode.is_innermost:
        raise NeedsLoop("fn writes into a tensor by out=")


# ---- handlers --------------------------------------------------------------------------------------------


def refuse_outdated(mode: "Mode", call: "TorchCall") -> Any:
    """Running statistics after a norm in training, copies of what has changed since: the loop alone has them right."""
    if mode.outdated and call.func not in UPDATES:
        for t in op_loop.leaves((call.args, call.kwargs)):
            if isinstance(t, Tensor) and storage_of(levels.plain(t)) in mode.outdated:
                raise NeedsLoop("fn reads what would have changed with a view of it, or in a norm")
    return NotImplemented


def refuse_read(mode: "Mode", call: "TorchCall") -> Any:
    """A value that Python gets by another way than `ANSWERS`: a graph would keep it."""
    if assumptions.are_for_others() and reads_values(call.func, call.args, call.kwargs):
        raise Unrecordable(f"fn reads numbers by {name_of(call.func)}")
    return NotImplemented


def refuse_dual(mode: "Mode", call: "TorchCall") -> Any:
    """A tangent of torch.autograd.forward_ad, which neither vmap nor a loop over samples for that op can keep."""
    if mode.is_innermost:  # torch.func.jvp calls it as well, inside its own layer
        raise NeedsLoop("fn pushes tangents forward by torch.autograd.forward_ad")
    return NotImplemented


def draw(mode: "Mode", call: "TorchCall") -> Any:
    """A function that draws random numbers: from the run's own generators alone."""
    if mode.recomputing or not draws(call.func, call.args, call.kwargs):
        if mode.recomputing and assumptions.are_for_others():
            raise Unrecordable("a checkpoint draws its random numbers again")
        return NotImplemented
    mode.draws.before(call.kwargs.get("generator"))
    try:
        for handler in handlers_of(call.func):
            found = NotImplemented if handler is draw else handler(mode, call)
            if found is not NotImplemented:
                return found
    finally:
        mode.draws.after()
    return NotImplemented


def keep_arguments(mode: "Mode", call: "TorchCall") -> Any:
    """The Function by which an older torch keeps a checkpoint's arguments: it computes nothing."""
    if not checkpoint.keeps_arguments(call.func) or not call.operands.graph or not mode.is_innermost:
        return NotImplemented
    return levels.below(call.func, *call.args, **call.kwargs)


def avoid_fault(mode: "Mode", call: "TorchCall") -> Any:
    """A call that torch's vmap gets wrong: another call in its place, or a loop over samples for the op."""
    fault = faults.fault_of(call.func, call.args, call.kwargs, mode.differs)
    if fault is None:
        return NotImplemented
    other = fault.instead(*call.args, **call.kwargs) if fault.instead is not None else None
    if other is not None:
        func, args, kwargs = other
        with mode:
            return func(*args, **kwargs)
    if not op_loop.is_sampled(call.args, call.kwargs, mode.level):
        return call.run()
    if not mode.is_innermost:
        raise NeedsLoop(f"inside another transform torch's vmap {fault.what}")
    return run_alone(mode, call.func, call.args, call.kwargs, f"torch's vmap {fault.what}")


def index_raggedly(mode: "Mode", call: "TorchCall") -> Any:
    """A mask, or integers, that differ between samples as an index; nonzero()."""
    if not mode.is_innermost:
        return NotImplemented
    func, args, kwargs = call.func, call.args, call.kwargs
    other = ragged_indexing.rewritten(func, args, kwargs, mode.n, mode.level)
    if other is not None:
        with mode:
            found = other[0](*other[1], **other[2])
    elif ragged_indexing.is_mixed(func, args):
        return put(mode, call)
    elif ragged_indexing.selects(func, args, mode.level):
        found = call.run() if call.rule is None else run_rule(mode, call.rule, func, args, kwargs, call.operands)
    else:
        return NotImplemented
    if ragged_indexing.selects(func, args, mode.level):
        note_view(mode, args[0], found, args[1])
    return found


def show(mode: "Mode", call: "TorchCall") -> Any:
    """A text of a tensor, in which vmap would show all samples."""
    return run_alone(mode, call.func, call.args, call.kwargs) if mode.is_innermost else NotImplemented


def update_statistics(mode: "Mode", call: "TorchCall") -> Any:
    """A norm that may write to running statistics: it gets copies."""
    if not mode.is_innermost:
        return NotImplemented
    args, kwargs = own_statistics(mode, call.func, call.args, call.kwargs)
    call = mode.again(call, call.func, args, kwargs)
    return use_rule(mode, call) if call.rule is not None else leave_to_vmap(mode, call)


def use_rule(mode: "Mode", call: "TorchCall") -> Any:
    if call.rule is None:
        return NotImplemented
    return run_rule(mode, call.rule, call.func, call.args, call.kwargs, call.operands)


def apply_function(mode: "Mode", call: "TorchCall") -> Any:
    """A call of an autograd Function, whose backward is the user's Python.

    Torch takes it through vmap by a rule that vmaps its backward too, or by one that the Function brings; then the
    backward would see the cotangents of all samples at once, so that the op runs in a loop.
    """
    if getattr(call.func.function, "takes_all_samples", False) and mode.is_innermost and not call.operands.params:
        return apply_to_all_samples(mode, call)
    mode.calls_functions = True
    level = levels.current_level()
    sampled = level == mode.level and op_loop.is_sampled(call.args, call.kwargs, mode.level)
    if sampled and not vmaps_its_backward(call.func.function):
        why = _MIXES if says_vmap(call.func.function) else "it does not say what it does under vmap"
        return run_alone(mode, call.func, call.args, call.kwargs, why)
    return mode.left_to_vmap(call.func, call.args, call.kwargs, call.operands.params, "no rule for this function")


def apply_to_all_samples(mode: "Mode", call: "TorchCall") -> Any:
    """A Function of one tensor that says it keeps samples apart, in its backward too: once, on the (N, ...) tensor."""
    x, *others = call.args
    if not levels.is_batched(x, mode.level):
        return levels.below(call.func, *call.args)
    return levels.sampled_below(mode.level, call.func, levels.rows_in_front(x, mode.level), *others)


def call_custom_op(mode: "Mode", call: "TorchCall") -> Any:
    """An operator of others, whose backward may be Python: as an autograd Function."""
    if not operators.is_opaque(call.func):
        return NotImplemented
    mode.calls_functions = True
    if operators.mutates(call.func):
        raise NeedsLoop("an operator changes its arguments in place")
    if mode.is_innermost and op_loop.is_sampled(call.args, call.kwargs, mode.level):
        return run_alone(mode, call.func, call.args, call.kwargs, _MIXES)
    return NotImplemented


def ask(mode: "Mode", call: "TorchCall") -> Any:
    """bool(), item() and their kin."""
    return answer(mode, call)


def compute_once(mode: "Mode", call: "TorchCall") -> Any:
    """A function that is the same for all samples when its operands are: of parameters alone, computed once."""
    operands = call.operands
    if not operands.params:
        return NotImplemented
    per_sample = mode.options.of_params_per_sample and call.func not in VIEWS
    if operands.samples or per_sample or (not mode.is_innermost and mode.takes_part(call.args, call.kwargs)):
        return mode.left_to_vmap(call.func, call.args, call.kwargs, call.operands.params, "no rule for this function")
    return levels.at(mode.level, run_once, mode, call.func, call.args, call.kwargs, operands.params)


def tell_requires_grad(mode: "Mode", call: "TorchCall") -> Any:
    return requires_grad(mode, call.args[0]) if mode.is_innermost else NotImplemented


def tell_graph(mode: "Mode", call: "TorchCall") -> Any:
    if not mode.is_innermost or not levels.is_batched(call.args[0], mode.level):
        return NotImplemented
    return graph_of(mode, call)


def start_graph(mode: "Mode", call: "TorchCall") -> Any:
    return call.args[0] if pretend_requires_grad(mode, *call.args, **call.kwargs) else NotImplemented


def deny(mode: "Mode", call: "TorchCall") -> Any:
    """Asked by TransformerEncoder before it takes its fused path."""
    return False


def take_apart(mode: "Mode", call: "TorchCall") -> Any:
    """Torch's own Python: what it calls comes here again."""
    if not (call.func is ATTENTION or call.operands.params or asks_for_grad(call.func)):
        return NotImplemented
    with mode:
        return opened(call.func)(*call.args, **call.kwargs)


def run_body(mode: "Mode", call: "TorchCall") -> Any:
    """torch.cond and its kin, as the Python that they stand for."""
    body = body_of(call.func)
    assert body is not None
    with mode:
        return body(*call.args, **call.kwargs)


def write(mode: "Mode", call: "TorchCall") -> Any:
    """A write in place: never into the caller's memory."""
    if call.args and isinstance(call.args[0], Tensor):
        check_write(mode, call.func, call.args, call.kwargs)
    return NotImplemented


def make(mode: "Mode", call: "TorchCall") -> Any:
    """A tensor that `fn` makes, perhaps to write samples into it."""
    if assumptions.are_noted() and call.func in _BY_SIZE and any(_is_size(a) for a in call.args):
        int_of = lambda a: answer_for_all(mode.again(call, torch.Tensor.__int__, (a,), {}))
        call = mode.again(call, call.func, tuple([int_of(a) if _is_size(a) else a for a in call.args]), call.kwargs)
        return call.run() if not mode.options.new_per_sample else with_sample_axis(mode, call.run())
    if not mode.options.new_per_sample or call.operands.params:
        return NotImplemented
    return with_sample_axis(mode, call.run())


def _is_size(value: Any) -> bool:
    """Whether an argument is an integer in a tensor that all samples share."""
    plain = isinstance(value, Tensor) and not value.dim() and not levels.is_transformed(value)
    return plain and not value.is_floating_point() and not value.is_complex()


def leave_to_vmap(mode: "Mode", call: "TorchCall") -> Any:
    """Everything else."""
    func, args, kwargs, params = call.func, call.args, call.kwargs, call.operands.params
    if kwargs.get("inplace"):
        write(mode, call)
    if params and not is_attribute(func):
        mode.unruled(func, params, "no rule for this function")
    found = call.run()
    if func == SET_REQUIRES_GRAD and args[1]:
        mode.own.append(args[0])
    elif kwargs.get("requires_grad"):
        mode.own.append(found)
    return found


def _always(func: Any) -> bool:
    return True


def _is_function(func: Any) -> bool:
    return type(func) is FunctionCall


def _is_written(func: Any) -> bool:
    return writes(func, {})


def _has_body(func: Any) -> bool:
    return body_of(func) is not None


TABLE: tuple[tuple[Callable[[Any], bool], Handler], ...] = (
    (_always, refuse_outdated),
    (READS.__contains__, refuse_read),
    (lambda func: func is MAKE_DUAL, refuse_dual),
    (RANDOM.__contains__, draw),
    (_is_function, keep_arguments),
    (faults.FUNCTIONS.__contains__, avoid_fault),
    (ragged_indexing.FUNCTIONS.__contains__, index_raggedly),
    (SHOWN.__contains__, show),
    (UPDATES.__contains__, update_statistics),
    (_always, use_rule),
    (_is_function, apply_function),
    (operators.is_custom, call_custom_op),
    (ANSWERS.__contains__, ask),
    (PURE.__contains__, compute_once),
    (lambda func: func == REQUIRES_GRAD, tell_requires_grad),
    (lambda func: func in GRAPHS, tell_graph),
    (lambda func: func is torch.Tensor.requires_grad_, start_graph),
    (lambda func: func is IS_NESTABLE, deny),
    (is_composite, take_apart),
    (_has_body, run_body),
    (_is_written, write),
    (MAKERS.__contains__, make),
    (_always, leave_to_vmap),
)
_FOR_ANY = (refuse_outdated, use_rule, leave_to_vmap)


@lru_cache(4096)
def handlers_of(func: Any) -> tuple[Handler, ...]:
    """The handlers that a call of `func` is offered to, in this order."""
    return tuple(handler for is_for, handler in TABLE if is_for(func))


@lru_cache(4096)
def is_ordinary(func: Any) -> bool:
    """Whether `func` computes something, no more: without a parameter or a graph it is vmap's alone."""
    special = [handler for handler in handlers_of(func) if handler not in (*_FOR_ANY, compute_once, take_apart)]
    return not special and not asks_for_grad(func) and func is not ATTENTION and func != SET_REQUIRES_GRAD


@lru_cache(4096)
def is_only_ruled(func: Any) -> bool:
    """Whether no handler but the rule's has a say in a call of `func`."""
    return handlers_of(func)[1] is use_rule


def may_use_params(func: Any) -> bool:
    """Whether a handler other than vmap's cares for parameters among the arguments of `func`."""
    return func in RULES or func in PURE or is_composite(func)


def run_pointwise(mode: "Mode", func: Any, args: Any, kwargs: Any) -> Any:
    """A function of each number alone. Where the operand is a layer's output with an axis of 1 put in, as models see a
    batch of one, the function runs on the output itself: the backward then passes no views from layer to layer.
    """
    tensors = [value for value in kwargs.values() if isinstance(value, Tensor)] if kwargs else ()
    if len(args) == 1 and not tensors and levels.current_level() == mode.level:
        x = levels.lower(args[0], mode.n, mode.level)
        if x.dim() > 1 and x.shape[1] == 1 and (rows := unfolded(x)) is not None:
            return levels.sampled_below(mode.level, _parted, func, rows, kwargs)
    return func(*args, **kwargs)


def _parted(func: Any, rows: Tensor, kwargs: Any) -> Tensor:
    """(N, ...) as (N, 1, ...), each number changed."""
    found: Tensor = parted(func(rows, **kwargs))
    return found


# ---- what vmap cannot do ---------------------------------------------------------------------------------


def has_second_chance(mode: "Mode", func: Any, args: Any, kwargs: Any, error: Exception) -> bool:
    """Whether a call that failed may do better by another way: its error need not be `fn`'s own."""
    if mode.recomputing or func in ANSWERS or error is mode.settled:  # torch ends a recomputation by an error
        return False
    if isinstance(error, (PsgradError, *NO_VALUES)) or is_out_of_memory(error):
        return False
    if "randomness error mode" in str(error):
        return False
    return mode.is_innermost and op_loop.is_sampled(args, kwargs, mode.level)


def second_chance(mode: "Mode", func: Any, args: Any, kwargs: Any, error: Exception) -> Any:
    """A call that failed: taken apart, or in a loop over samples. Where these fail too, the error is `fn`'s own."""
    why = reason_of(error)
    if is_about_the_tensor(func) and func not in NUMBERS:
        raise NeedsLoop(why)
    # An index out of range is a sample's own mistake; taken apart, vmap would not look.
    if is_python(func) and not writes(func, kwargs) and not isinstance(error, IndexError):
        with mode:
            return opened(func)(*args, **kwargs)
    if (func in RANDOM and mode.randomness == "same") or func in _OF_MEMORY:
        raise NeedsLoop(why)
    return run_alone(mode, func, args, kwargs, why)


def run_alone(mode: "Mode", func: Any, args: Any, kwargs: Any, why: str = "") -> Any:
    """One op in a loop over samples."""
    if isinstance(func, FunctionCall) and mode.randomness == "same":
        raise NeedsLoop("a Function may draw random numbers, which samples are to share")
    if params := mode.look((*args, *kwargs.values())).params:
        mode.unruled(func, params, f"in a loop over samples, {why}")
    if is_writing := writes(func, kwargs):
        check_write(mode, func, args, kwargs)
    if func in UPDATES:
        args, kwargs = own_statistics(mode, func, args, kwargs)
    found, original = op_loop.run(func, args, kwargs, mode.n, mode.level, is_writing)
    mode.draws.after()
    if original is not None:
        note_view(mode, original, found)
    if why:
        mode.looped.setdefault(name_of(func), f"at {place()}: {why}")
    return found
