"""Large products of matrices in a recorded graph, by the library that eager calls take for them."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..factors import products
from ..torch_ import kernels
from ..torch_.graphs import Graph
from ..torch_.operators import one_op

_aten = torch.ops.aten


def put_in(graph: Graph) -> None:
    """Replace large products of float32 matrices on the CPU by ops of ours, which a compiler calls as they are."""
    if not kernels.MKL_IS_BEHIND:
        return
    nodes = [node for node in graph.graph.nodes if node.target in _REPLACED and _is_large(node)]
    for node in nodes:
        with graph.graph.inserting_before(node):
            made = _REPLACED[node.target](graph.graph, node)
        made.meta = node.meta
        node.replace_all_uses_with(made)
        graph.graph.erase_node(node)
    if nodes:
        graph.recompile()


def _is_large(node: torch.fx.Node) -> bool:
    """Whether a product is worth the op, whose bias is a row."""
    *bias, a, b = (arg.meta["val"] for arg in node.args)  # type: ignore[union-attr]
    if node.kwargs or (bias and bias[0].shape != b.shape[1:]) or a.dtype is not torch.float32 or a.device.type != "cpu":
        return False
    return products.are_large(a.shape, b.shape) if a.dim() == 3 else prod(a.shape) * b.shape[1] >= products.LARGE


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return products.long_product(a, b) if bias is None else products.linear(a, b.mT, bias)


def _batched_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    products.batched_product(a, b, out)


_PRODUCT = one_op("psgrad::product(Tensor a, Tensor b, Tensor? bias) -> Tensor", _product)
_BATCHED_PRODUCT = one_op("psgrad::batched_product(Tensor(a!) out, Tensor a, Tensor b) -> ()", _batched_product)


def _mm(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    return graph.call_function(_PRODUCT, (*node.args, None))


def _addmm(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    bias, a, b = node.args
    return graph.call_function(_PRODUCT, (a, b, bias))


def _bmm(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    """Into a tensor that the graph makes: whoever compiles it has memory for what is returned."""
    shape = list(node.meta["val"].shape)
    out = graph.call_function(_aten.empty.memory_format, (shape,), {"dtype": torch.float32, "device": "cpu"})
    graph.call_function(_BATCHED_PRODUCT, (out, *node.args))
    return out


_REPLACED: dict[Any, Callable[[torch.fx.Graph, torch.fx.Node], torch.fx.Node]] = {
    _aten.mm.default: _mm,
    _aten.addmm.default: _addmm,
    _aten.bmm.default: _bmm,
}
