"""Derivatives by the sample inside `fn`, as physics-informed losses have them: linear layers keep their factors."""

from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import psgrad
from psgrad.factors import costs

from .test_contract import assert_close
from .test_quantities import Watch, flat, summed

N, D = 5, 3
Fn = Callable[[Any, Tensor], Tensor]


@pytest.fixture(autouse=True)
def float64() -> None:
    torch.set_default_dtype(torch.float64)  # conftest puts it back


class Net(nn.Module):
    """A layer that is called twice, its weight used once more transposed, bare vectors and a matrix product."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.inner, self.twice = nn.Linear(D, width), nn.Linear(width, width)
        self.scale, self.out = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x)) * self.scale
        h = torch.sin(self.twice(h)) + h
        h = torch.tanh(self.twice(h)) @ self.twice.weight.t()
        return h @ self.out


def net() -> tuple[Fn, Any]:
    torch.manual_seed(0)
    model = Net()
    return partial(functional_call, model), {k: p.detach() for k, p in model.named_parameters()}


def second(f: Callable[[Tensor], Tensor], x: Tensor, v: Tensor) -> Tensor:
    return jvp(lambda x: jvp(f, (x,), (v,))[1], (x,), (v,))[1]


def pushed(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The Laplacian forward over reverse, direction by direction."""
    return vmap(lambda e: jvp(grad(f), (x,), (e,))[1] @ e)(torch.eye(D)).sum()


EYE = torch.eye(D, dtype=torch.float64)
LOSSES: dict[str, Callable[[Fn, Any, Tensor], Tensor]] = {
    "value and gradient": lambda u, p, x: u(p, x) ** 2 + grad(u, 1)(p, x).square().sum(),
    "gradient of a closure": lambda u, p, x: grad(lambda x: u(p, x))(x).square().sum(),
    "hessian": lambda u, p, x: (hessian(u, 1)(p, x).trace() + u(p, x)) ** 2,
    "jvp of jvp": lambda u, p, x: sum(second(lambda x: u(p, x), x, e) for e in EYE) ** 2,
    "vmap of jvp": lambda u, p, x: vmap(lambda e: second(lambda x: u(p, x), x, e))(EYE).sum() ** 2,
    "forward over reverse": lambda u, p, x: pushed(lambda x: u(p, x), x) ** 2,
    "reverse over reverse": lambda u, p, x: jacrev(jacrev(u, 1), 1)(p, x).diagonal().sum() ** 2,
    "forward over forward": lambda u, p, x: jacfwd(jacfwd(u, 1), 1)(p, x).diagonal().sum() ** 2,
    "reverse over forward": lambda u, p, x: jacrev(jacfwd(u, 1), 1)(p, x).diagonal().sum() ** 2,
    "gradient of gradient": lambda u, p, x: grad(lambda x: grad(lambda x: u(p, x))(x)[0])(x).square().sum(),
    "three deep": lambda u, p, x: grad(lambda x: second(lambda x: u(p, x), x, EYE[0]))(x).square().sum(),
    "vmap": lambda u, p, x: vmap(lambda s: u(p, s * x))(torch.linspace(0, 1, 4)).square().sum(),
    "vmap of vmap": lambda u, p, x: vmap(vmap(lambda e: u(p, e * x)))(EYE.expand(2, D, D)).square().sum(),
    "vmap of gradients": lambda u, p, x: vmap(grad(u, 1), (None, 0))(p, x * torch.ones(4, 1)).square().sum(),
    "pullback": lambda u, p, x: vjp(lambda x: u(p, x), x)[1](x.sum())[0].square().sum(),
    "with aux": lambda u, p, x: sum(
        t.square().sum() for t in grad(lambda x: (u(p, x), u(p, x.sin())), has_aux=True)(x)
    ),
}


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large: no call is left to ordinary autograd."""
    if request.param == "large":
        monkeypatch.setattr(costs, "SMALL", -1)


def rules_of(fn: Any, params: Any, x: Tensor) -> dict[str, set[str]]:
    return {name: set(used) for name, used in psgrad.testing.rules_used(fn, params, x).items()}


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("name", LOSSES)
def test_derivatives_inside(name: str) -> None:
    torch.manual_seed(1)
    u, params = net()
    x, w = torch.randn(N, D), torch.linspace(-1, 2, N)
    fn = lambda p, x: LOSSES[name](u, p, x)
    grads = psgrad.testing.loop_grads(fn, params, x)
    rows = flat(grads)
    norms = rows.norm(dim=1)
    bound = float(norms.median())
    assert_close(psgrad.per_sample_grads(fn, params, x), grads)
    assert_close(psgrad.per_sample_norms(fn, params, x), norms)
    assert_close(psgrad.weighted_grad(fn, params, x, w, chunk_size=2), summed(grads, w))
    assert_close(psgrad.clipped_grad(fn, params, x, bound).grad, summed(grads, (bound / norms).clamp(max=1)))
    assert_close(psgrad.gram(fn, params, x), rows @ rows.mT)
    assert_close(psgrad.grad_stats(fn, params, x).variance, optree.tree_map(lambda t: t.var(0), grads))
    used = rules_of(fn, params, x)
    assert used["params['inner.weight']"] == used["params['inner.bias']"] == {"linear"}
    assert used["params['twice.weight']"] == {"linear", "matmul"}
    assert used["params['out']"] == {"matmul"}


# ---- how a call meets the transform ----------------------------------------------------------------------


def u(p: Any, x: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, p["w"])) @ p["v"]


def closed(p: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: u(p, x)


def a_constant_by_no_grad(p: Any, x: Tensor) -> Tensor:
    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            factor = u(p, 2 * x)
        return u(p, x) * factor

    return grad(f)(x).square().sum()


def no_grad_around(p: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        g, aux = grad(lambda x: (u(p, x), p["w"].t() @ F.linear(torch.ones(3), p["w"])), has_aux=True)(x)
        dy = jvp(closed(p), (x,), (x,))[1]
    return (g * grad(closed(p))(x)).sum() + aux @ x * u(p, x) * dy


def no_grad_pullback(p: Any, x: Tensor) -> Tensor:
    y, pull = vjp(closed(p), x)
    with torch.no_grad():
        g = pull(torch.ones(()))[0]
    return g @ x * y


def inner_step(p: Any, x: Tensor) -> Tensor:
    """The inner transform differentiates by a parameter, and uses the same one as a constant."""
    by_w = grad(lambda w: u({**p, "w": w}, x) + grad(closed(p))(x).sum())(p["w"])
    return u({**p, "w": p["w"] - 0.1 * by_w}, x) + grad(closed(p))(x).square().sum()


def along_a_parameter(p: Any, x: Tensor) -> Tensor:
    step = torch.ones_like(p["w"].detach())
    return jvp(lambda w, x: u({**p, "w": w}, x), (p["w"], x), (step, x))[1] ** 2


def within(inner: Callable[[Callable[[Tensor], Tensor]], Tensor]) -> Fn:
    """The derivative along x of what another transform, in which x is a constant, has made of a layer of x."""
    return lambda p, x: jvp(lambda x: inner(lambda z: F.linear(x, p["w"]) @ torch.tanh(z)), (x,), (x,))[1] ** 2


def writes_to_a_copy(p: Any, x: Tensor) -> Tensor:
    def f(x: Tensor) -> Tensor:
        w, h = p["w"] * 2, F.linear(torch.ones(3), p["w"])
        w.t()[0] *= x.sum()
        h += x.sum()
        return torch.tanh(F.linear(x, w) + h) @ p["v"]

    return grad(f)(x).square().sum()


def of_x(f: Callable[[Any, Tensor], Tensor]) -> Fn:
    """The squared second derivatives of a function of x."""
    return lambda p, x: hessian(lambda x: torch.tanh(f(p, x)).sum())(x).square().sum()


HEADS = torch.arange(6.0, dtype=torch.float64).view(2, 3, 1)
ROWS = torch.ones(2, 1, dtype=torch.float64)
FOUR = torch.linspace(0, 1, 4, dtype=torch.float64)
PARAMS = {"w": (4, 3), "v": (4,), "h": (2, 2, 3), "q": (2, 3, 3), "m": (3, 4)}
CALLS: dict[str, tuple[Fn, dict[str, list[str]]]] = {
    "no_grad inside": (a_constant_by_no_grad, {"w": ["linear"] * 2, "v": ["matmul"] * 2}),
    "no_grad around": (no_grad_around, {}),
    "no_grad around the pullback": (no_grad_pullback, {"w": ["linear"], "v": ["matmul"]}),
    "by a parameter": (inner_step, {}),
    "along a parameter": (along_a_parameter, {"w": ["vmap"], "v": ["matmul"]}),
    "along x, inside grad": (within(lambda f: grad(f)(FOUR).sin().sum()), {"w": ["linear"]}),
    "along x, inside jvp": (within(lambda f: jvp(f, (FOUR,), (FOUR,))[1].sin()), {"w": ["linear"]}),
    "along x, elementwise": (
        lambda p, x: jvp(lambda x: grad(lambda z: (p["w"] * x * z).sum())(FOUR[1:]).sin().sum(), (x,), (x,))[1],
        {"w": ["vmap"]},
    ),
    "writes": (writes_to_a_copy, {}),
    "functionalize": (lambda p, x: functionalize(grad(closed(p)))(x).square().sum(), {"w": ["vmap"], "v": ["vmap"]}),
    "mask": (of_x(lambda p, x: F.linear(x, p["w"] * torch.ones(4, 3).tril())), {}),
    "slice": (of_x(lambda p, x: F.linear(x, p["w"][1:3], p["v"][2:])), {"w": ["linear"], "v": ["linear"]}),
    "detached": (of_x(lambda p, x: F.linear(x, p["w"].detach()) * p["v"]), {"v": ["vmap"]}),
    "frozen bias": (of_x(lambda p, x: F.linear(x, p["w"], torch.ones(4))), {"w": ["linear"]}),
    "frozen weight": (of_x(lambda p, x: F.linear(x, torch.ones(4, 3), p["v"])), {"v": ["vmap"]}),
    "bias of the sample": (of_x(lambda p, x: F.linear(x, p["w"], x.sum().expand(4))), {"w": ["vmap"]}),
    "weight of the sample": (of_x(lambda p, x: F.linear(x, p["w"] * x.sum())), {"w": ["vmap"]}),
    "vmap over rows": (of_x(lambda p, x: vmap(lambda row: row @ x)(p["w"])), {"w": ["vmap"]}),
    "heads": (of_x(lambda p, x: torch.einsum("hti,hoi->hto", x * HEADS, p["h"])), {"h": ["einsum"]}),
    "addmm": (of_x(lambda p, x: torch.addmm(p["v"], x * ROWS, p["m"])), {"m": ["addmm"], "v": ["addmm"]}),
    "bilinear": (of_x(lambda p, x: F.bilinear(x, x.sin(), p["q"])), {"q": ["bilinear"]}),
    "a table": (of_x(lambda p, x: x * F.embedding(torch.tensor([1, 2]), p["w"])), {"w": ["embedding"]}),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented:UserWarning")
@pytest.mark.filterwarnings("ignore::psgrad.UnusedParametersWarning")
@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("name", CALLS)
def test_calls_inside(name: str) -> None:
    torch.manual_seed(0)
    fn, rules = CALLS[name]
    params, x = {k: torch.randn(shape) for k, shape in PARAMS.items()}, torch.randn(N, 3)
    psgrad.testing.check(fn, params, x, rules={f"params[{k!r}]": used for k, used in rules.items()})
    rows = flat(psgrad.testing.loop_grads(fn, params, x))
    assert_close(psgrad.gram(fn, params, x), rows @ rows.mT)
    assert_close(psgrad.per_sample_norms(fn, params, x), rows.norm(dim=1))


def test_a_mask_is_computed_once_inside() -> None:
    fn, params = CALLS["mask"][0], {"w": torch.randn(4, 3)}
    assert psgrad.testing.rules_used(fn, params, torch.randn(N, 3)) == {"Tensor.mul(params['w'])": ["linear"]}


def test_other_numbers_inside_go_by_vmap() -> None:
    params, x = {"w": torch.randn(4, 3).float(), "v": torch.randn(4).float()}, torch.randn(N, 3).float()

    def fn(p: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return grad(lambda x: u(p, x).float())(x).float().square().sum()

    psgrad.testing.check(fn, params, x, rules={"params['w']": ["vmap"]})


@pytest.mark.parametrize("kind", ["gradient of gradient", "hessian", "vmap of jvp", "forward over reverse"])
def test_nothing_of_n_times_p_inside(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a few samples and many positions `gram` writes gradients out, but never more than a tile of them."""
    torch.manual_seed(0)
    width, n = 64, 12
    model = nn.Sequential(nn.Linear(D, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    params = {k: p.detach() for k, p in model.named_parameters()}
    value = lambda p, x: functional_call(model, p, (x,)).squeeze()
    fn, x = (lambda p, x: LOSSES[kind](value, p, x)), torch.randn(n, D)
    monkeypatch.setattr(costs, "TILE", n * width * width * x.element_size() // 4)
    for quantity in (psgrad.per_sample_norms, psgrad.gram, lambda *a: psgrad.clipped_grad(*a, 1.0)):
        with Watch() as watch:
            quantity(fn, params, x)
        assert watch.most <= n * width * width // 4


@pytest.mark.parametrize("name", ["hessian", "vmap of jvp", "three deep"])
def test_compiled(name: str) -> None:
    u, params = net()
    fn = lambda p, x: LOSSES[name](u, p, x)
    step = psgrad.compile(psgrad.per_sample_norms, fn, backend="replay")
    for seed in range(3):
        torch.manual_seed(seed)
        x, given = torch.randn(N, D), {k: p + 0.1 * torch.randn_like(p) for k, p in params.items()}
        assert_close(step(given, x), psgrad.per_sample_norms(fn, given, x))
    info = step.cache_info()
    assert (info.hits, info.misses, info.graphs) == (3, 0, 1)
