"""The swap of parameters: torch.func.functional_call, but right where a module's dict is reachable twice."""

import warnings
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import psgrad
from psgrad.swap import Slots, Swap

from .modules import MODULES, Entry


@pytest.fixture(autouse=True)
def float64() -> None:
    torch.set_default_dtype(torch.float64)  # conftest puts it back


def sums(out: Any) -> list[Tensor]:
    return [t for t in optree.tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]


class Called(nn.Module):
    """A module that is called in a way of its own."""

    def __init__(self, inner: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, *inputs: Any) -> Any:
        return self.call(self.inner, *inputs)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of what modules do outside vmap
@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.id)
def test_both_agree_on_every_module(entry: Entry) -> None:
    """The same output with other parameters, and the module as it was."""
    module = entry.make().eval()
    if entry.call is not None:
        module = Called(module, entry.call)
    inputs = optree.tree_map(lambda t: t[0] if isinstance(t, Tensor) else t, entry.inputs())
    params = {name: p.detach() + 0.1 for name, p in module.named_parameters()}
    slots = Slots(module)
    before = {name: id(p) for name, p in module.named_parameters()}
    with torch.no_grad():
        wanted = functional_call(module, params, tuple(inputs))
        with Swap(slots, params):
            found = module(*inputs)
    for a, b in zip(sums(found), sums(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert {name: id(p) for name, p in module.named_parameters()} == before


class Shared(nn.Module):
    """Two modules with one dict of parameters, as models make that share all of a layer's state."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b._parameters = self.a._parameters

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def test_torch_leaves_its_own_in_a_model_whose_dict_is_reachable_twice() -> None:
    """Fails when torch puts back what it found: then the swap may be torch's."""
    model = Shared()
    own = model.a.weight
    given = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    functional_call(model, given, (torch.randn(3, 2),), tie_weights=False)
    assert model.a.weight is not own


def test_the_swap_puts_back_what_it_found() -> None:
    model = Shared()
    own, slots = model.a.weight, Slots(model)
    with Swap(slots, {name: p + 1 for name, p in slots.trainable().items()}):
        assert model.a.weight is not own
        model(torch.randn(3, 2))
    assert model.a.weight is own
    assert model.b.weight is own


class Keeping(nn.Module):
    """Keeps what it has seen; `last` is there from the start, and so is put back."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key, self.inner = key, nn.Linear(2, 2)
        self.last, self.none = torch.zeros(2), None
        self.list: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if self.key == "list":
            self.list.append(h)
        elif self.key:
            setattr(self, self.key, h)
        return h


@pytest.mark.parametrize("key", ["new", "none", "list"])
def test_a_model_that_keeps_a_tensor_of_its_sample(key: str) -> None:
    fn, params = psgrad.from_module(nn.Sequential(nn.Tanh(), Keeping(key)), nn.functional.mse_loss)
    batch = torch.randn(3, 2), torch.randn(3, 2)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        psgrad.per_sample_grads(fn, params, batch)
        psgrad.per_sample_grads(fn, params, batch)
    assert [str(w.message) for w in warned] == [
        f"'1', a Keeping, keeps a tensor of its sample in its attribute {key!r}\n"
        "  it cannot be used after the call, holds the call's memory, and a next call may read it:\n"
        "  call the model itself to look at it, or return it from an fn of your own, by has_aux=True."
    ]
    assert warned[0].filename == __file__


@pytest.mark.parametrize("key", ["", "last"])
def test_a_model_that_is_as_before(key: str) -> None:
    """Warnings are errors here."""
    model = Keeping(key)
    fn, params = psgrad.from_module(model, nn.functional.mse_loss)
    psgrad.per_sample_grads(fn, params, (torch.randn(3, 2), torch.randn(3, 2)))
    assert torch.equal(model.last, torch.zeros(2))
