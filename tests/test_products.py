"""Large products of matrices by oneDNN, where MKL is behind: in every layout, and only where nobody else counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import psgrad
from psgrad.factors import clock, products
from psgrad.factors.maps import gram_of
from psgrad.testing import loop_grads
from psgrad.torch_ import graphs, kernels

pytestmark = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch without oneDNN")
M, K, N = 64, 384, 512  # more multiply-adds than LARGE

LAYOUTS: dict[str, Callable[[int, int], Tensor]] = {
    "rows": lambda m, n: torch.randn(m, n),
    "columns": lambda m, n: torch.randn(n, m).mT,
    "gaps": lambda m, n: torch.randn(m, 2 * n)[:, :n],
    "steps": lambda m, n: torch.randn(2 * m, n)[::2],
    "one row": lambda m, n: torch.randn(1, n).expand(m, n),
    "one column": lambda m, n: torch.randn(m, 1).expand(m, n),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of oneDNN, on whatever processor this is."""
    found: list[tuple[Any, ...]] = []
    kernel = kernels.linear_by_onednn

    def noted(*args: Any) -> Tensor:
        found.append(tuple(tuple(t.shape) for t in args if t is not None))
        return kernel(*args)

    monkeypatch.setattr(kernels, "linear_by_onednn", noted)
    monkeypatch.setattr(kernels, "MKL_IS_BEHIND", True)
    return found


def close(found: Tensor, right: Tensor) -> None:
    assert found.dtype is torch.float32
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5 * float(right.abs().max()))


@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
def test_layouts(first: str, second: str, calls: list[Any]) -> None:
    """oneDNN takes a thousand times as long for a second operand with gaps, which is left to MKL."""
    a, b = LAYOUTS[first](M, K), LAYOUTS[second](K, N)
    close(products.product(a, b), a.double() @ b.double())
    dense = second in ("rows", "columns")
    assert bool(calls) is dense
    close(products.long_product(a, b), a.double() @ b.double())
    close(products.long_product(b.mT, a.mT), b.double().mT @ a.double().mT)
    close(gram_of(a.expand(M, K)), a.double().mT @ a.double())


STACKS: dict[str, Callable[[int, int], Tensor]] = {
    "rows": lambda m, n: torch.randn(3, m, n),
    "columns": lambda m, n: torch.randn(3, n, m).mT,
    "samples inside": lambda m, n: torch.randn(m, 3, n).transpose(0, 1),
    "every other": lambda m, n: torch.randn(6, m, n)[::2],
    "one for all": lambda m, n: torch.randn(m, n).expand(3, m, n),
    "gaps": lambda m, n: torch.randn(3, m, 2 * n)[..., ::2],
}


@pytest.mark.parametrize("second", STACKS)
@pytest.mark.parametrize("first", STACKS)
def test_stacks_of_products(first: str, second: str, calls: list[Any]) -> None:
    """One by one, into whatever memory is given; a second operand with gaps is left to MKL."""
    a, b = STACKS[first](M, K), STACKS[second](K, N)
    right = a.double() @ b.double()
    close(products.batched_product(a, b), right)
    assert len(calls) == (3 if second in ("rows", "columns", "every other", "one for all") else 0)
    for place in (torch.empty(3, M, N), torch.empty(3, N, M).mT, torch.empty(3, M, 2 * N)[..., ::2]):
        assert products.batched_product(a, b, place) is place
        close(place.contiguous(), right)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((3, M // 2, K), (3, K, N // 2)),  # few multiply-adds
        ((3, 16, 16 * K), (3, 16 * K, N)),  # few numbers of a result
        ((2, 3, M, K), (2, 3, K, N)),
        ((3, M, K), (1, K, N)),
        ((0, M, K), (0, K, N)),
        ((M, K), (K, N)),
    ],
)
def test_stacks_that_are_torchs_own(a: tuple[int, ...], b: tuple[int, ...], calls: list[Any]) -> None:
    left, right = torch.randn(a), torch.randn(b)
    assert torch.equal(products.batched_product(left, right), left @ right)
    assert not calls


def test_stacks_that_do_not_fit(calls: list[Any]) -> None:
    for a, b in (((3, M, K), (2, K, N)), ((3, M, K), (3, K + 1, N))):
        with pytest.raises(RuntimeError, match=r"must match|Expected size"):
            products.batched_product(torch.randn(a), torch.randn(b))
    assert not calls


@pytest.mark.parametrize("bias", [None, torch.randn(N), torch.randn(1).expand(N), torch.randn(2 * N)[::2]])
@pytest.mark.parametrize("lead", [(M,), (4, M // 4), (2, 4, M // 8)])
def test_linear(lead: tuple[int, ...], bias: Tensor | None, calls: list[Any]) -> None:
    x, weight = torch.randn(*lead, K), torch.randn(N, K)
    right = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    close(products.linear(x, weight, bias), right)
    assert bool(calls) is (bias is None or bias.is_contiguous())
    close(products.linear(x, torch.randn(K, N).mT.copy_(weight), None), x.double() @ weight.double().mT)
    close(products.product(x, weight.mT), x.double() @ weight.double().mT)


def test_sides_of_other_shapes(calls: list[Any]) -> None:
    """Vectors, and stacks of matrices, are torch's own."""
    big, vector, stack = torch.randn(4096, 4096), torch.randn(4096), torch.randn(2, 256, 256)
    assert torch.equal(products.product(big, vector), big @ vector)
    assert torch.equal(products.product(vector, big), vector @ big)
    assert torch.equal(products.product(stack, stack), stack @ stack)
    assert not calls


def test_numbers_that_are_not_finite(calls: list[Any]) -> None:
    a, b = torch.randn(M, K), torch.randn(K, N)
    a[3, 5], a[7, 1] = torch.nan, torch.inf
    found, right = products.product(a, b), torch.mm(a, b)
    assert calls
    assert torch.equal(found.isnan(), right.isnan())
    assert torch.equal(found.isinf(), right.isinf())


def test_only_where_nobody_else_counts(calls: list[Any]) -> None:
    """Autograd, transforms, tangents, tracers, other dtypes and types of tensors: torch's own product."""
    a, b = torch.randn(M, K), torch.randn(K, N)
    right = (a.double() @ b.double()).sum()

    def total(a: Tensor, b: Tensor = b) -> Tensor:
        return (products.product(a, b) + products.long_product(a, b) + products.linear(a, b.mT, None)).sum() / 3

    slope = grad(total)(a)
    close(slope, b.double().sum(1).expand(M, K).contiguous())
    leaf = a.clone().requires_grad_()
    total(leaf).backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    close(leaf.grad, slope.double())
    torch.testing.assert_close(vmap(total)(torch.stack([a, a]))[1].double(), right, rtol=1e-4, atol=1e-1)
    close(torch.func.jvp(total, (a,), (torch.ones_like(a),))[1], b.double().sum(0).sum() * M)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
        tangent = torch.autograd.forward_ad.unpack_dual(total(dual)).tangent
    assert tangent is not None
    close(tangent, b.double().sum(0).sum() * M)
    ops = str(make_fx(lambda a: total(a))(a).graph)
    assert "mkldnn" not in ops
    total(a.double(), b.double())
    total(a.to("meta"), b.to("meta"))
    assert not calls
    total(a)
    assert len(calls) == 3
    with torch.no_grad():
        total(leaf)
    assert len(calls) == 6


BIASES: dict[str, Callable[[], Tensor]] = {
    "one number": lambda: torch.randn(1),
    "no axis": lambda: torch.randn(()),
    "a row": lambda: torch.randn(1, N),
    "a matrix": lambda: torch.randn(M, N),
    "requires grad": lambda: torch.randn(N, requires_grad=True),
    "subclass": lambda: torch.randn(N).as_subclass(type("Subclass", (Tensor,), {})),
}


@pytest.mark.parametrize("make", BIASES.values(), ids=BIASES)
def test_other_biases(make: Callable[[], Tensor], calls: list[Any]) -> None:
    """oneDNN reads a bias as a row, whatever it is; autograd may follow the bias alone."""
    x, weight, bias = torch.randn(M, K), torch.randn(N, K), make()
    found, right = products.linear(x, weight, bias), F.linear(x, weight, bias)
    assert not calls
    assert type(found) is type(right)
    assert torch.equal(found, right)
    assert found.requires_grad == bias.requires_grad
    if bias.requires_grad:
        (slope,) = torch.autograd.grad(found.sum(), bias)
        assert torch.equal(slope, torch.full((N,), float(M)))
        with torch.no_grad():
            products.linear(x, weight, bias)
        assert calls


def test_a_bias_on_another_device(calls: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="meta"):
        products.linear(torch.randn(M, K), torch.randn(N, K), torch.randn(N, device="meta"))


def test_biases_of_a_frozen_layer(calls: list[Any]) -> None:
    """Of a small call autograd follows the bias alone: whatever it makes of ops that it does not know."""
    weight = torch.randn(1024, 512) / 20
    params, batch = {"b": torch.randn(1024)}, torch.randn(20, 512)
    before = torch._C._get_autograd_fallback_mode()
    torch._C._set_autograd_fallback_mode("nothing")
    try:
        found = psgrad.per_sample_grads(lambda p, x: F.linear(x, weight, p["b"]).tanh().sum(), params, batch)["b"]
    finally:
        torch._C._set_autograd_fallback_mode(before)
    right = 1 - F.linear(batch.double(), weight.double(), params["b"].double()).tanh().square()
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-5)


def test_operands_that_do_not_fit(calls: list[Any]) -> None:
    """Torch says so, in its own words."""
    a, b = torch.randn(M, K), torch.randn(K + 1, N)
    for run in (
        lambda: products.product(a, b),
        lambda: products.long_product(a, b),
        lambda: products.linear(a, b.mT, None),
    ):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            run()
    assert not calls


@pytest.mark.parametrize("convert", [Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_mkldnn])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_other_layouts_of_memory(convert: Callable[[Tensor], Tensor], calls: list[Any]) -> None:
    x, weight = torch.randn(M, K), torch.randn(N, K)
    found = products.linear(convert(x), weight, None)
    close(found.to_dense() if found.layout is not torch.strided else found, x.double() @ weight.double().mT)
    assert not calls


@pytest.mark.filterwarnings("ignore:`torch.jit.trace. is deprecated", "ignore::torch.jit.TracerWarning")
def test_traced_by_jit(calls: list[Any]) -> None:
    """A trace is run with tensors that require grad, and where nobody has oneDNN."""
    a, b = torch.randn(M, K), torch.randn(K, N)
    traced = torch.jit.trace(lambda a: products.product(a, b), (a,), check_trace=False)  # type: ignore[no-untyped-call]
    assert "mkldnn" not in str(traced.graph)
    assert traced(a.requires_grad_()).requires_grad
    assert not calls


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_where_somebody_has_switched_onednn_off(calls: list[Any]) -> None:
    a, b = torch.randn(M, K), torch.randn(K, N)
    with torch.backends.mkldnn.flags(enabled=False):  # type: ignore[no-untyped-call]
        assert torch.equal(products.product(a, b), a @ b)
    assert not calls


def test_not_where_mkl_keeps_up(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MKL_IS_BEHIND", False)
    a, b = torch.randn(M, K), torch.randn(K, N)
    assert torch.equal(products.product(a, b), a @ b)
    assert torch.equal(products.linear(a, b.mT, None), F.linear(a, b.mT))
    assert torch.equal(products.long_product(a, b), a @ b)
    assert not calls


@pytest.mark.parametrize("backend", ["replay", "inductor"])
def test_large_products_of_a_graph(backend: str, calls: list[Any]) -> None:
    """They are an op of ours; small ones, and those of other dtypes, are torch's."""
    if backend == "inductor" and graphs.missing_compiler():
        pytest.skip("no C++ compiler")
    model = nn.Sequential(nn.Linear(K, N), nn.Tanh(), nn.Linear(N, K, bias=False), nn.Tanh(), nn.Linear(K, 3))
    for dtype, ours in ((torch.float32, 5), (torch.float64, 0)):
        fn, params = psgrad.from_module(model.to(dtype), F.cross_entropy)
        step = psgrad.compile(psgrad.clipped_grad, fn, backend=backend, max_norm=0.5)
        batch = torch.randn(M, K, dtype=dtype), torch.randint(3, (M,))
        step(params, batch)
        calls.clear()
        batch = torch.randn(M, K, dtype=dtype), torch.randint(3, (M,))
        found = step(params, batch)
        assert len(calls) == ours  # two forward, one backward, two weighted sums
        (graph,) = [g for world in step._worlds for entry in world.entries.values() for g in entry.graphs]
        assert graph.ops.count("psgrad.product.default") == ours
        assert sum(op in ("aten.addmm.default", "aten.mm.default") for op in graph.ops) == 8 - ours
        torch.testing.assert_close(found, psgrad.clipped_grad(fn, params, batch, 0.5), rtol=1e-4, atol=1e-6)
        assert step.cache_info()[1:4] == (0, 1, (backend,))


@pytest.mark.parametrize("backend", ["replay", "inductor"])
def test_large_gradients_of_a_graph(backend: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample's is a product of its own, into memory that whoever runs the graph has made."""
    if backend == "inductor" and graphs.missing_compiler():
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(clock, "fastest", lambda question, x, g, ways, run: ways[0])  # no kernel of ours in C++
    model = nn.Sequential(nn.Linear(K, N), nn.Tanh(), nn.Linear(N, 3))
    fn, params = psgrad.from_module(model, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))
    step = psgrad.compile(psgrad.per_sample_grads, fn, backend=backend)
    batch = torch.randn(3, M, K), torch.randint(3, (3, M))
    held = [step(params, batch)]
    calls.clear()
    for _ in range(3):
        batch = torch.randn(3, M, K), torch.randint(3, (3, M))
        found = step(params, batch)
        right = loop_grads(fn, params, batch)
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)
        held.append(found)
    assert len({g["0.weight"].data_ptr() for g in held}) == 4
    assert calls.count(((N, M), (K, M))) == 9  # three samples, three calls
    (graph,) = [g for world in step._worlds for entry in world.entries.values() for g in entry.graphs]
    assert graph.ops.count("psgrad.batched_product.default") == 1
    assert step.cache_info()[1:4] == (0, 1, (backend,))


def test_every_quantity_of_a_wide_net(calls: list[Any]) -> None:
    """All of them pass by oneDNN on their way, and are as the loop in float64 has them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N), nn.Tanh(), nn.Linear(N, K), nn.Tanh(), nn.Linear(K, 3))
    fn, params = psgrad.from_module(model, lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten()))
    batch = torch.randn(24, 2, K), torch.randint(3, (24, 2))

    wide = {name: p.double() for name, p in params.items()}
    rows = loop_grads(fn, wide, (batch[0].double(), batch[1]))
    flat = torch.cat([g.flatten(1) for g in rows.values()], 1)
    norms = flat.norm(dim=1)
    seen = []

    def right(found: Any, expected: Tensor) -> None:
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))
        seen.append(len(calls))
        calls.clear()

    got = psgrad.per_sample_grads(fn, params, batch)
    right(torch.cat([g.flatten(1) for g in got.values()], 1), flat)
    right(psgrad.per_sample_norms(fn, params, batch), norms)
    step = psgrad.clipped_grad(fn, params, batch, 0.5)
    weights = (0.5 / norms).clamp(max=1)
    right(torch.cat([g.flatten() for g in step.grad.values()]), weights @ flat)
    direction = {name: torch.randn_like(p) for name, p in params.items()}
    right(
        psgrad.per_sample_dots(fn, params, batch, direction),
        flat @ torch.cat([v.double().flatten() for v in direction.values()]),
    )
    right(psgrad.gram(fn, params, batch), flat @ flat.mT)
    found = psgrad.kron_factors(fn, params, batch)["0.weight"].input
    x = batch[0].double().flatten(0, 1)
    right(found, x.mT @ x / 24)
    assert all(seen)
