"""Gradients of convolutions and matrices by the kernels in C++: the same numbers as by torch's, wherever they run."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import psgrad
from psgrad.factors import clock, quick_grads
from psgrad.factors.costs import ConvGeometry
from psgrad.factors.outer import Outer
from psgrad.factors.patches import Patches
from psgrad.torch_ import graphs

from .strategies import Draw

pytestmark = pytest.mark.skipif(graphs.missing_compiler() is not None, reason="no C++ compiler")
OPS = ("psgrad.convolution_gradients.default", "psgrad.matrix_gradients.default")
TWO_GROUPS = ConvGeometry((1,), (0,), (1,), 2), (1,)  # a kernel of one tap


def close(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=2e-6 * float(right.abs().max()) + 1e-30)


# ---- the kernels ---------------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """A convolution, and how many of its output's positions are left out, as a transposed one may."""

    samples: int
    images: int
    inputs: int
    outputs: int
    groups: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    left_out: int


@st.composite
def convolutions(draw: Draw) -> Drawn:
    axes, groups = draw(st.integers(1, 3)), draw(st.sampled_from((1, 1, 2, 3)))

    def each(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(least, most)) for _ in range(axes))

    kernel, dilation = each(1, 4), each(1, 2)
    size = tuple(more + d * (k - 1) for more, k, d in zip(each(1, 9), kernel, dilation, strict=True))
    if axes == 1 and draw(st.booleans()):
        size = (size[0] + 5000,)  # more positions than are added up at once
    images = 1 if groups > 1 else draw(st.integers(1, 3))
    outputs = draw(st.sampled_from((8, 9, 16, 17, 33, 48, 64, 70, 130)))
    sizes = draw(st.integers(1, 4)), images, draw(st.integers(1, 5)), outputs, groups, size
    return Drawn(*sizes, kernel, each(1, 3), each(0, 2), dilation, draw(st.integers(0, 1)))


@given(convolutions())
@settings(deadline=None, max_examples=60)
def test_convolutions(drawn: Drawn) -> None:
    torch.manual_seed(0)
    geometry = ConvGeometry(drawn.stride, drawn.padding, drawn.dilation, drawn.groups)
    x = torch.randn(drawn.samples, drawn.images, drawn.groups * drawn.inputs, *drawn.size)
    axes = zip(drawn.size, drawn.kernel, *geometry[:3], strict=True)
    positions = [max(1, (s + 2 * p - d * (k - 1) - 1) // by + 1 - drawn.left_out) for s, k, by, p, d in axes]
    g = torch.randn(drawn.samples, drawn.images, drawn.groups * drawn.outputs, *positions)
    assert quick_grads.is_for_convolution(x, g, geometry)
    right = Patches(x.double(), g.double(), geometry, drawn.kernel).by("patches")
    own = Patches(x, g, geometry, drawn.kernel)
    close(own.by("quick"), right)
    close(own.by("quick", torch.empty(right.shape, dtype=torch.float64)), right)
    close(own._norms_by("quick"), right.flatten(1).norm(dim=1))


@given(st.integers(1, 5), st.sampled_from((1, 2, 7, 64, 5000)), st.integers(1, 130), st.sampled_from((8, 11, 16, 100)))
@settings(deadline=None, max_examples=40)
def test_matrices(n: int, t: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(0)
    own = Outer(torch.randn(n, t, inputs), torch.randn(t, n, outputs).transpose(0, 1))
    right = own.g.double().mT @ own.x.double()
    close(own._quick(), right)
    close(own._norms_by("quick"), right.flatten(1).norm(dim=1))
    for out in (
        torch.empty(n, outputs, inputs),
        torch.empty(n, inputs, outputs).mT,
        torch.empty(n, outputs, inputs + 1),
    ):
        place = out[..., :inputs]
        assert own._quick(place) is place
        close(place, right)


def test_threads_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, g = torch.randn(5, 1, 3, 9, 9), torch.randn(5, 1, 16, 9, 9)
    own, found = Patches(x, g, ConvGeometry((1, 1), (1, 1), (1, 1), 1), (3, 3)), list[Tensor]()
    for threads in (1, 2, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found += [own.by("quick"), own._norms_by("quick")]
    assert all(torch.equal(a, b) for a, b in zip(found[2:], found[:-2], strict=True))


def test_norms_beyond_the_range_of_squares() -> None:
    """And a sample that is not finite touches no other."""
    torch.manual_seed(0)
    scales = torch.tensor([1e-30, 1e30, 1.0, torch.nan, torch.inf])
    x, g = torch.randn(5, 6, 3), torch.randn(5, 6, 8) * scales[:, None, None]
    right = (g.double().mT @ x.double()).flatten(1).norm(dim=1)
    in_groups = Patches(x.mT[:, None].repeat(1, 1, 2, 1), g.mT[:, None].repeat(1, 1, 2, 1), *TWO_GROUPS)
    for norms, exact in ((Outer(x, g)._norms_by("quick"), right), (in_groups._norms_by("quick"), right * 2**0.5)):
        torch.testing.assert_close(norms[:3].double(), exact[:3], rtol=1e-5, atol=0)
        assert norms.isfinite().tolist() == [True] * 3 + [False] * 2


@pytest.mark.parametrize(
    ("x", "g", "geometry"),
    [
        ((2, 1, 4, 9), (2, 1, 7, 9), ConvGeometry((1,), (1,), (1,), 1)),
        ((2, 2, 16, 9), (2, 2, 16, 9), ConvGeometry((1,), (1,), (1,), 2)),
        ((0, 1, 4, 9), (0, 1, 8, 9), ConvGeometry((1,), (1,), (1,), 1)),
    ],
    ids=["few outputs", "groups of several images", "no samples"],
)
def test_what_they_are_not_for(x: Sequence[int], g: Sequence[int], geometry: ConvGeometry) -> None:
    assert not quick_grads.is_for_convolution(torch.ones(x), torch.ones(g), geometry)


def test_they_are_for_float32_on_the_cpu() -> None:
    for t in (torch.ones(2, 3, 8).double(), torch.ones(2, 3, 8).bfloat16(), torch.ones(2, 3, 8, device="meta")):
        assert not quick_grads.is_for_matrix(t, t)
    assert quick_grads.is_for_matrix(torch.ones(2, 3, 8), torch.ones(2, 3, 8))


# ---- in graphs -----------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Convolutions of each kind and a matrix over positions, all large enough to be measured."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1, groups=2)
        self.up, self.last = nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(self.second(self.first(x).tanh()).tanh())
        found: Tensor = self.last(x.reshape(len(x), 16, 4, -1).transpose(1, 2).reshape(len(x), 64, -1))
        return found


def ran(step: Any) -> list[str]:
    """The kernels of ours in the graphs of a compiled quantity."""
    entries = [entry for world in step._worlds for entry in world.entries.values()]
    return [op for entry in entries for graph in entry.graphs for op in graph.ops if op in OPS]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the clock decides it is for the kernels of ours."""
    monkeypatch.setattr(clock, "fastest", lambda question, x, g, ways, run: ways[-1])


QUANTITIES: dict[Callable[..., Any], dict[str, Any]] = {
    psgrad.per_sample_grads: {},
    psgrad.per_sample_norms: {},
    psgrad.clipped_grad: {"max_norm": 0.5},
    psgrad.grad_stats: {},
}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda quantity: quantity.__name__)
def test_they_are_in_graphs(quantity: Callable[..., Any]) -> None:
    """Of compiled calls, whose answers are those of eager calls, for other batches too; a row of NaN stays one row."""
    torch.manual_seed(0)
    fn, params = psgrad.from_module(Net(), lambda out, y: (out * y).square().mean())
    options = QUANTITIES[quantity]
    step = psgrad.compile(quantity, fn, backend="inductor", **options)
    for _ in range(2):
        batch = torch.randn(16, 3, 32, 32), torch.randn(16, 64, 64)
        found, right = step(params, batch), quantity(fn, params, batch, **options)
        torch.testing.assert_close(found, right, rtol=2e-4, atol=1e-6)
    assert {*ran(step)} == {*OPS}
    assert step.cache_info()[:2] == (2, 0)
    if quantity is psgrad.per_sample_norms:
        batch[0][3] = torch.nan
        assert step(params, batch).isnan().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("way", ["quick", "patches"])
def test_what_the_compiler_lays_out_otherwise(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs that are contiguous where they are recorded, and not in compiled code; and one that has gaps."""
    monkeypatch.setattr(clock, "fastest", lambda *_: way)
    torch.manual_seed(0)

    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        inputs = F.logsigmoid(x), F.channel_shuffle(x[None], 2)[0], x.tanh()[4:]
        return sum((F.conv2d(t, w).square().mean() for t, w in zip(inputs, p.values(), strict=True)), x.new_zeros(()))

    params = {str(i): torch.randn(16, channels, 3, 3) for i, channels in enumerate((8, 8, 4))}
    step = psgrad.compile(psgrad.per_sample_grads, fn, backend="inductor")
    for layout in (torch.channels_last, torch.contiguous_format):
        batch = torch.randn(16, 8, 34, 34).contiguous(memory_format=layout)
        found = step(params, batch)
        torch.testing.assert_close(found, psgrad.per_sample_grads(fn, params, batch), rtol=1e-4, atol=1e-5)
    assert step.cache_info()[:2] == (2, 0)
    assert len(ran(step)) == (6 if way == "quick" else 0)


@pytest.mark.usefixtures("always")
def test_where_they_are_not_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replay needs no compiler, max_bytes is planned by other ways, and a compiler may fail."""
    torch.manual_seed(0)
    fn, params = psgrad.from_module(nn.Conv2d(3, 16, 3), lambda out, y: (out * y).sum())
    batch = torch.randn(16, 3, 66, 66), torch.randn(16, 16, 64, 64)
    options: dict[str, Any]
    for backend, options in (("inductor", {}), ("replay", {}), ("inductor", {"max_bytes": "1GB"})):
        step = psgrad.compile(psgrad.per_sample_grads, fn, backend=backend, **options)
        torch.testing.assert_close(
            step(params, batch), psgrad.per_sample_grads(fn, params, batch), rtol=1e-4, atol=1e-3
        )
        assert len(ran(step)) == (backend == "inductor" and not options)
    monkeypatch.setattr(quick_grads, "_library", lambda: None)
    step = psgrad.compile(psgrad.per_sample_grads, fn, backend="inductor")
    step(params, batch)
    assert not ran(step)


def test_eager_calls_do_not_ask_for_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_grads, "can_run", lambda: pytest.fail("asked"))
    fn, params = psgrad.from_module(nn.Conv2d(3, 16, 3), lambda out, y: F.mse_loss(out, y))
    psgrad.per_sample_norms(fn, params, (torch.randn(16, 3, 34, 34), torch.randn(16, 16, 32, 32)))
