"""Looks at values: where each would make the host wait for a device, a call has one at most.

There is no such device here: the tests say of the CPU that its numbers take time.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import psgrad
from psgrad.factors import assumptions

_LOOKS = ("_local_scalar_dense", "nonzero", "unique", "equal.default")


class Looks(TorchDispatchMode):
    """Counts the ops that hand values to Python, or make shapes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in _LOOKS):
            frame = sys._getframe(1)
            while frame.f_back is not None and "psgrad" not in frame.f_code.co_filename:
                frame = frame.f_back
            self.places.append(f"{func} at {frame.f_code.co_filename}:{frame.f_lineno}")
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _numbers_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assumptions, "LOOKS_AT_ONCE", frozenset())


class Tied(nn.Module):
    """A table that is read and multiplied, positions, attention: norms by inner products and cross terms."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(40, 64), nn.Parameter(torch.randn(8, 64))
        layer = nn.TransformerEncoderLayer(64, 2, 256, 0.0, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.body(self.table(x) + self.places), self.table.weight)


def nets() -> dict[str, tuple[Any, Any, Any]]:
    torch.manual_seed(0)
    square = lambda y, _: y.square().mean()  # class targets have a look of their own, on the CPU alone
    conv = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.Flatten(1))
    made: dict[str, tuple[nn.Module, Any]] = {
        "linear": (nn.Sequential(nn.Linear(512, 256), nn.Tanh(), nn.Linear(256, 64)), torch.randn(6, 512)),
        "sequence": (
            nn.Sequential(nn.Linear(128, 256), nn.LayerNorm(256), nn.Linear(256, 128)),
            torch.randn(6, 8, 128),
        ),
        "convolution": (conv, torch.randn(6, 3, 12, 12)),
        "tied": (Tied(), torch.randint(40, (6, 8))),
    }
    found = {}
    for name, (model, x) in made.items():
        fn, params = psgrad.from_module(model, square)
        found[name] = fn, params, (x, torch.zeros(len(x)))
    return found


QUANTITIES: dict[str, Callable[..., Any]] = {
    "grads": psgrad.per_sample_grads,
    "norms": psgrad.per_sample_norms,
    "clipped": lambda *given: psgrad.clipped_grad(*given, 0.1),
    "clipped per layer": lambda *given: psgrad.clipped_grad(*given, dict.fromkeys(given[1], 0.1)),
}


@pytest.mark.parametrize("quantity", QUANTITIES)
@pytest.mark.parametrize("net", ["linear", "sequence", "convolution", "tied"])
def test_one_look_a_call(net: str, quantity: str) -> None:
    given = nets()[net]
    QUANTITIES[quantity](*given)
    with Looks() as looks:
        QUANTITIES[quantity](*given)
    assert len(looks.places) <= 1, looks.places


@pytest.mark.parametrize("net", ["linear", "sequence", "convolution", "tied"])
def test_the_numbers_are_the_same(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = nets()[net]
    found = psgrad.per_sample_norms(*given), psgrad.clipped_grad(*given, 0.1)
    monkeypatch.undo()
    torch.testing.assert_close(
        found, (psgrad.per_sample_norms(*given), psgrad.clipped_grad(*given, 0.1)), rtol=0, atol=0
    )


def _cancelling() -> tuple[Any, Any, Any]:
    """The second half of the positions takes away what the first has given; and one gradient is beyond the range of
    its squares."""
    torch.manual_seed(0)
    fn, params = psgrad.from_module(nn.Linear(256, 300), lambda y, sign: (y * sign).sum())
    x, sign = torch.randn(4, 8, 256), torch.ones(4, 8, 300)
    x[1, 4:], sign[1, 4:] = x[1, :4], -1.0
    x[2] *= 1e25
    return fn, params, (x, sign)


def test_where_one_look_shows_a_loss_of_digits_all_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    given = _cancelling()
    norms, step = psgrad.per_sample_norms(*given), psgrad.clipped_grad(*given, 1.0)
    weighted = psgrad.weighted_grad(*given, lambda norms: (norms < 1e10) / norms.clamp(min=1))
    monkeypatch.undo()
    torch.testing.assert_close(norms, psgrad.per_sample_norms(*given), rtol=0, atol=0)
    torch.testing.assert_close(step.grad, psgrad.clipped_grad(*given, 1.0).grad, rtol=0, atol=0)
    wanted = psgrad.weighted_grad(*given, lambda norms: (norms < 1e10) / norms.clamp(min=1))
    torch.testing.assert_close(weighted, wanted, rtol=0, atol=0)


def test_samples_that_are_not_finite_are_named() -> None:
    fn, params, (x, y) = nets()["linear"]
    x[3] = torch.nan
    with pytest.raises(psgrad.ArgumentError, match="the gradients of sample 3 are not finite"):
        psgrad.clipped_grad(fn, params, (x, y), 0.1)
    step = psgrad.clipped_grad(fn, params, (x, y), 0.1, nonfinite="zero")
    assert step.count == 5
    assert all(bool(g.isfinite().all()) for g in step.grad.values())


def test_a_second_run_draws_what_the_first_drew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where norms are taken again as digits were lost."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(256, 300))
    fn, params = psgrad.from_module(model, lambda y, sign: (y * sign).sum())
    given = fn, params, _cancelling()[2]
    torch.manual_seed(5)
    found, after = psgrad.per_sample_norms(*given), torch.rand(1)
    monkeypatch.undo()
    torch.manual_seed(5)
    torch.testing.assert_close(found, psgrad.per_sample_norms(*given), rtol=0, atol=0)
    assert torch.equal(after, torch.rand(1))


def test_a_function_of_the_norms_is_called_once() -> None:
    seen: list[Tensor] = []

    def weights(norms: Tensor) -> Tensor:
        seen.append(norms)
        return torch.ones_like(norms)

    psgrad.weighted_grad(*_cancelling(), weights)
    assert len(seen) == 1
