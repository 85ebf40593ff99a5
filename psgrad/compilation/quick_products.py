"""Large products of matrices in a recorded graph, by the library that eager calls take for them."""

import threading
from typing import Any

import torch
from torch import Tensor

from ..factors import products
from ..torch_ import kernels
from ..torch_.graphs import Graph
from ..torch_.operators import unused

_ADDMM, _MM = torch.ops.aten.addmm.default, torch.ops.aten.mm.default


def put_in(graph: Graph) -> None:
    """Replace large products of float32 matrices on the CPU by an op of ours, which a compiler calls as it is."""
    if not kernels.MKL_IS_BEHIND:
        return
    nodes = [node for node in graph.graph.nodes if node.target in (_ADDMM, _MM) and _is_large(node)]
    for node in nodes:
        bias, a, b = (None, *node.args) if node.target is _MM else node.args
        with graph.graph.inserting_before(node):
            made = graph.graph.call_function(_product(), (a, b, bias))
        made.meta = node.meta
        node.replace_all_uses_with(made)
        graph.graph.erase_node(node)
    if nodes:
        graph.recompile()


def _is_large(node: torch.fx.Node) -> bool:
    """Whether a product is worth the op, whose bias is a row."""
    *bias, a, b = (arg.meta["val"] for arg in node.args)  # type: ignore[union-attr]
    if node.kwargs or (bias and bias[0].shape != b.shape[1:]):
        return False
    return a.dtype is torch.float32 and a.device.type == "cpu" and a.numel() * b.shape[1] >= products.LARGE


_MADE: list[tuple[torch.library.Library, Any]] = []  # the op, and the library, with which it ends
_LOCK = threading.Lock()


def _product() -> Any:
    """The op; torch knows it as soon as somebody needs it."""
    with _LOCK:
        if not _MADE:
            library = torch.library.Library("psgrad", "FRAGMENT")
            name = unused("psgrad::product").removeprefix("psgrad::")
            library.define(f"{name}(Tensor a, Tensor b, Tensor? bias) -> Tensor")
            library.impl(name, _run, "CPU")
            torch.library.register_fake(f"psgrad::{name}", _shape, lib=library)
            _MADE.append((library, getattr(torch.ops.psgrad, name).default))
    return _MADE[0][1]


def _run(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return products.long_product(a, b) if bias is None else products.linear(a, b.mT, bias)


def _shape(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])
