"""Graphs of torch's ops: recorded by torch's tracer, run as they are, or compiled by its compiler."""

import shutil
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo import guards
from torch._guards import TracingContext
from torch._guards import tracing as _tracing
from torch.fx.experimental.proxy_tensor import make_fx

from . import decompositions, tracing, versions
from .operators import compiled_ways

Graph = torch.fx.GraphModule
Runner = Callable[..., Sequence[Tensor]]  # a graph at work: tensors in, tensors out
Allocator = Callable[[Sequence[int], Sequence[int], torch.dtype], Tensor]  # from shape, strides and dtype
_guards: Any = guards  # whose types are not all declared
empty_strided: Allocator = _guards._empty_strided_cpu  # as compiled code has it


def _zeros(size: Sequence[int], **options: Any) -> Tensor:
    return torch.zeros(size, **options)


# Zeros without memory, as forward derivatives make them: mul.Scalar of them, in a trace, brings the process down.
_FOR_THE_TRACER: dict[Any, Callable[..., Any]] = {torch.ops.aten._efficientzerotensor.default: _zeros}


def record(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], number_of: Callable[[Tensor], Any]
) -> tuple[Graph, list[Tensor], str | None]:
    """The ops of `function(*inputs)` as a graph, in their order; the other tensors that it met; and why it is good for
    the recorded values alone, if it is.

    The graph takes these behind its inputs: whoever runs it says what they are by then. Had they stayed in it, a
    compiler would take their numbers for granted. The tracer would, too, where Python asks one of them for its number:
    `number_of` answers.
    """

    def answer(t: Tensor) -> Any:
        return NotImplemented if tracing.has_proxy(t) else number_of(t)

    own = [t.detach() for t in inputs]  # one tensor given twice would be one input
    table = {**_FOR_THE_TRACER, torch.ops.aten._local_scalar_dense.default: answer}
    # Of each result the tracer keeps a fake tensor. Unless there is a context with a mode for these it makes a mode for
    # each of them, which looks up the lines of all callers: a third of the time.
    with _tracing(TracingContext(tracing.FakeTensorMode())):
        graph = make_fx(function, decomposition_table=table)(*own)
    met: dict[int, tuple[Tensor, torch.fx.Node]] = {}
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        t = getattr(graph, node.target)
        if id(t) not in met:
            with graph.graph.inserting_after(last):
                last = graph.graph.placeholder(f"met_{len(met)}")
            last.meta = node.meta
            met[id(t)] = t, last
        node.replace_all_uses_with(met[id(t)][1])
        graph.graph.erase_node(node)
    fixed = _what_is_fixed(graph, {node for _, node in met.values()})
    graph.graph.eliminate_dead_code()
    for name in [name for name, value in vars(graph).items() if isinstance(value, Tensor)]:
        delattr(graph, name)
    graph.recompile()
    return graph, [t for t, _ in met.values()], fixed


def _what_is_fixed(graph: Graph, met: set[torch.fx.Node]) -> str | None:
    """Why a graph is good for the recorded values alone: sizes that follow from values, writes to what it has met."""
    for node in graph.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if torch.Tag.dynamic_output_shape in node.target.tags and not _is_by_integers(node):
            return f"the sizes that {node.target.name()} gives depend on values"
        schema = node.target._schema
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            if any(_root(each) in met for each in (written if isinstance(written, (list, tuple)) else [written])):
                return f"{node.target.name()} writes to a tensor that fn closes over"
    return None


def _is_by_integers(node: torch.fx.Node) -> bool:
    """Whether a node indexes by integers alone, which decide no size."""
    if node.target is not torch.ops.aten.index.Tensor:
        return False
    indices = [index for index in node.args[1] if index is not None]  # type: ignore[union-attr]
    return not any(index.meta["val"].dtype in (torch.bool, torch.uint8) for index in indices)  # type: ignore[union-attr]


def _root(node: Any) -> Any:
    """What a node is a view of, as far as ops that return their argument's memory tell."""
    while isinstance(node, torch.fx.Node) and isinstance(node.target, torch._ops.OpOverload):
        if not node.target.is_view and not node.target._schema.is_mutable:
            return node
        node = node.args[0]
    return node


def ops_of(graph: Graph) -> list[str]:
    """The names of a graph's ops, in their order: "aten.addmm.default"."""
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def largest(graph: Graph) -> int:
    """The bytes of the largest tensor that a graph makes."""
    made = [node.meta.get("val") for node in graph.graph.nodes if node.op == "call_function"]
    return max((t.numel() * t.element_size() for t in made if isinstance(t, Tensor)), default=0)


def replay(graph: Graph) -> Runner:
    """The ops of a graph, one after the other, from one Python function."""
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten.detach.default:  # outside autograd it is the tensor itself
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.recompile()
    forward: Any = graph.forward
    return forward  # type: ignore[no-any-return]


def compile_graph(graph: Graph, inputs: Sequence[Tensor], empty: Allocator | None = None) -> Runner:
    """A graph through torch's compiler, called directly: torch.compile's guards would cost more than a small graph.

    Random numbers are drawn by torch's own ops, so that a seed gives what it gives without a compiler. `empty` gives
    the memory for what the compiled code writes, in place of malloc: kernels are then called from Python, which has to
    ask for it. Else they are called from C++, which matters where they are small.
    """
    _load_compiler()
    if empty is None and all(t.device.type == "cpu" for t in inputs):
        # an error where an op is met that C++ cannot call, any other comes again; a warning where it calls by a detour
        with suppress(Exception), tracing.unlogged("torch._inductor.ir"):
            return _compiled(graph, inputs, None, from_python=False)
    return _compiled(graph, inputs, empty, from_python=True)


def _compiled(graph: Graph, inputs: Sequence[Tensor], empty: Allocator | None, from_python: bool) -> Runner:
    """`compile_graph` by kernels that are called from Python, or from C++."""
    from torch._functorch import config as aot_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    copy = Graph(torch.nn.Module(), torch.fx.Graph())
    output = copy.graph.graph_copy(graph.graph, {})
    copy.graph.output(output)
    on_cpu = all(t.device.type == "cpu" for t in inputs)
    ways = compiled_ways(node.target for node in copy.graph.nodes) if on_cpu else {}
    for node in copy.graph.nodes:
        node.meta, node.target = {}, ways.get(node.target, node.target)
    copy.recompile()
    inside: list[Any] = []

    def compile_inside(*args: Any, **options: Any) -> Any:
        made: Any = compile_fx_inner(*args, **options)
        inside.append(made.current_callable if _is_whole(len(inputs)) else None)
        return made

    with (
        config.patch(_SETTINGS | {"cpp_wrapper": not from_python, "size_asserts": from_python}),  # 1 us of small graphs
        aot_config.patch(enable_autograd_cache=False),  # it would hand out what is around the compiled code as well
    ):
        run: Any = compile_fx(
            copy, [t.detach() for t in inputs], inner_compile=compile_inside, decompositions=decompositions.table()
        )
    call = inside[0] if len(inside) == 1 else None
    if call is None:
        return run  # type: ignore[no-any-return]
    scope = getattr(call, "__globals__", {})
    if empty is not None and _ALLOCATES in scope:
        scope[_ALLOCATES] = empty
    return lambda *tensors: call(list(tensors))


_SETTINGS = {
    "fallback_random": True,
    "cpp.min_chunk_size": 1024,  # numbers that a thread is woken for, at least
    "layout_optimization": False,  # channels in front, as the ops have chosen: what reads the last is slower here
}
_ALLOCATES = "empty_strided_cpu"  # what compiled code calls its allocator


def _is_whole(inputs: int) -> bool:
    """Whether the code that is being compiled does all of a graph's work: nothing is written to inputs, and no output
    is an input, or shares memory with one or with another output, which would be seen to around the code."""
    from torch._functorch._aot_autograd.schemas import OutputType

    context = TracingContext.try_get()
    facts: Any = None if context is None else context.fw_metadata
    return (
        facts is not None
        and len(facts.input_info) == inputs
        and not facts.num_mutated_inp_runtime_indices
        and not facts.tokens
        and not facts.is_rng_op_functionalized
        and all(output.output_type is OutputType.non_alias for output in facts.output_info)
    )


def reinterpreted(t: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """The memory of `t` with another shape, as nobody's view."""
    return _guards._reinterpret_tensor(t, shape, strides, 0)  # type: ignore[no-any-return]


@cache
def _load_compiler() -> None:
    """It takes a second, and has deprecation warnings of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        versions.check(versions.COMPILER)


@cache
def missing_compiler() -> str | None:
    """Why graphs of tensors on the CPU cannot be compiled here; None: they can."""
    _load_compiler()
    from torch._inductor import cpp_builder

    try:
        found = str(cpp_builder.get_cpp_compiler())
    except Exception as error:  # torch has a class of its own for it
        return f"torch finds no C++ compiler ({str(error).splitlines()[0]})"
    return None if shutil.which(found) else f"torch's C++ compiler {found!r} is not there"


def likeness(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that says whether other tensors, as many, have the types, dtypes, devices, shapes, strides and
    requires_grad of these, and whether inference mode and autocast are as they are now: one call of C++."""
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    made = _guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return made.check  # type: ignore[no-any-return]


def settings() -> tuple[Any, ...]:
    """What besides its inputs decides which ops a function runs: settings of torch, as far as they are cheap to ask."""
    return (
        torch._C._is_any_autocast_enabled()
        and tuple(
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _autocast_kinds()
        ),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._len_torch_function_stack() and torch.get_default_device(),
    )


def _autocast_kinds() -> tuple[str, ...]:
    device = torch.accelerator.current_accelerator()
    return ("cpu",) if device is None else ("cpu", device.type)
