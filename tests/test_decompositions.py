"""What the compiler is given in place of small products and of hypot: the same numbers."""

from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from psgrad.torch_ import decompositions, graphs

SIZES = [(64, 64, 2), (64, 2, 64), (2, 64, 64), (1, 5, 1), (4, 4, 4), (5, 1, 7), (3, 9, 11)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_small_products(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b, bias = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype).mT, torch.randn(n, dtype=dtype)
    torch.testing.assert_close(decompositions._mm(a, b), a @ b)
    torch.testing.assert_close(decompositions._addmm(bias, a, b), a @ b + bias)
    torch.testing.assert_close(decompositions._mv(a, b[:, 0]), a @ b[:, 0])


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.ones(64, 64), torch.ones(64, 5)),
        (torch.ones(10000, 2), torch.ones(2, 2)),
        (torch.ones(4, 0), torch.ones(0, 4)),
        (torch.ones(4, 4).bfloat16(), torch.ones(4, 4).bfloat16()),
        (torch.ones(4, 4).long(), torch.ones(4, 4).long()),
    ],
    ids=["large", "long", "empty", "half precision", "integers"],
)
def test_other_products_are_left_to_the_compiler(a: Tensor, b: Tensor) -> None:
    assert decompositions._mm(a, b) is NotImplemented
    assert decompositions._addmm(b[0], a, b) is NotImplemented if len(b) else True


def test_hypot() -> None:
    """Where squares would leave the range, and where there is nothing to divide by."""
    edges = torch.tensor([0.0, -0.0, 5e-324, 1e-300, -3e-160, 1.0, -4e3, 2e160, 1e300, inf, -inf, nan]).double()
    a, b = (t.flatten() for t in torch.meshgrid(edges, edges, indexing="ij"))
    found, right = decompositions._hypot(a, b), torch.hypot(a, b)
    both = (a.isinf() & b.isnan()) | (a.isnan() & b.isinf())  # torch says infinite, and neither is finite
    torch.testing.assert_close(found[~both], right[~both], rtol=4e-16, atol=0, equal_nan=True)
    assert not found[both].isfinite().any()
    assert decompositions._hypot(torch.ones(3, 4), torch.ones(4, 3).mT) is NotImplemented  # laid out otherwise


def test_they_are_in_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    if graphs.missing_compiler() is not None:
        pytest.skip("no C++ compiler")
    seen: list[str] = []

    def watched(function: Any) -> Any:
        return lambda *args: [seen.append(function.__name__), function(*args)][1]

    for name in ("_mm", "_addmm", "_mv", "_hypot"):
        monkeypatch.setattr(decompositions, name, watched(getattr(decompositions, name)))
    decompositions.table.cache_clear()
    try:
        torch.manual_seed(0)
        tensors = [torch.randn(9, 7), torch.randn(7, 3), torch.randn(3), torch.randn(3, 9)]

        def function(x: Tensor, w: Tensor, bias: Tensor, more: Tensor) -> list[Tensor]:
            y = torch.addmm(bias, x, w)
            return [y, more @ y, torch.mv(y, bias), torch.hypot(y, y + 1)]

        run = graphs.compile_graph(make_fx(function)(*tensors), tensors)
        torch.testing.assert_close(list(run(*tensors)), function(*tensors))
        assert {*seen} == {"_mm", "_addmm", "_mv", "_hypot"}
    finally:
        decompositions.table.cache_clear()
