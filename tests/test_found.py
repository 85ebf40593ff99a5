"""Ways to be wrong without a word that a reader found: each equals a plain loop over samples now, or is refused."""

import contextlib
import math
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn
from torch.autograd import forward_ad

import psgrad

pytestmark = pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning", "ignore::psgrad.UnusedParametersWarning")


@pytest.fixture(autouse=True)
def float64() -> None:
    torch.set_default_dtype(torch.float64)  # conftest puts it back


def loop(fn: Callable[..., Tensor], w: Tensor, batch: Tensor) -> Tensor:
    """By hand, for each sample a copy: what `fn` means."""
    rows = []
    for x in batch:
        leaf = w.clone().requires_grad_()
        loss = fn(leaf, x.clone())
        rows.append(torch.autograd.grad(loss, leaf, allow_unused=True, materialize_grads=True)[0])
    return torch.stack(rows)


def same(fn: Callable[..., Tensor], w: Tensor | None = None, x: Tensor | None = None) -> None:
    """Gradients, norms and weighted sums are those of the loop, and the batch and params are as they were."""
    w = torch.randn(3) if w is None else w
    x = torch.randn(4, 3) if x is None else x
    before, expected = (w.clone(), x.clone()), loop(fn, w, x)
    weights = torch.tensor([0.5, 2.0, 3.0, 4.0])[: len(x)]
    torch.testing.assert_close(psgrad.per_sample_grads(fn, w, x), expected)
    torch.testing.assert_close(psgrad.per_sample_norms(fn, w, x), expected.flatten(1).norm(dim=1))
    torch.testing.assert_close(psgrad.weighted_grad(fn, w, x, weights), torch.tensordot(weights, expected, 1))
    torch.testing.assert_close((w, x), before, rtol=0, atol=0)


# ---- writes ------------------------------------------------------------------------------------------------


def _changes_then_reruns(w: Tensor, x: Tensor) -> Tensor:
    x.mul_(2)
    a = torch.zeros(3)
    a[0] = x[0]
    return (w * x * a.sum()).sum()


def _changes_a_function_of_w(w: Tensor, x: Tensor) -> Tensor:
    x.mul_(2)
    v = w * 2
    v[0] = 0
    return (v * x).sum()


BUFFER = torch.arange(3.0)


def _masked(w: Tensor, x: Tensor) -> Tensor:
    a = BUFFER * 2
    a[x > 0] = 7.0
    return (a * w).sum()


def _through_a_view(w: Tensor, x: Tensor) -> Tensor:
    a = BUFFER.repeat(2)
    a[:3].mul_(x)
    return (a[:3] * w).sum()


def _by_out(w: Tensor, x: Tensor) -> Tensor:
    o = torch.empty(3)
    torch.mul(x, x, out=o)
    return (o * w).sum()


def _selected_view(w: Tensor, x: Tensor) -> Tensor:
    a = torch.outer(w, x) * 1
    a[x.argmax()].mul_(2)
    return a.sum()


def _named_view(w: Tensor, x: Tensor) -> Tensor:
    a = torch.outer(w, x) * 1
    row = a[x.argmax()]
    row *= 2
    return (a * a).sum()


def _view_of_a_view(w: Tensor, x: Tensor) -> Tensor:
    a = torch.outer(w, x) * 1
    a[x.argmax()][0] = 7.0
    return (a * a).sum()


def _stale_view(w: Tensor, x: Tensor) -> Tensor:
    a = torch.outer(w, x) * 1
    row = a[x.argmax()]
    a.mul_(3)
    return row.sum()


def _added_at(w: Tensor, x: Tensor) -> Tensor:
    a = torch.outer(w, x) * 1
    a[x.argmax()] += x
    return (a * a).sum()


def _narrowed(w: Tensor, x: Tensor) -> Tensor:
    a = torch.outer(w, x) * 1
    a.narrow(0, x.argmax(), 1).mul_(2)
    return a.sum()


def _lists(w: Tensor, x: Tensor) -> Tensor:
    a = torch.zeros(3, 3, 3) + 0 * x.sum()
    a[[2, 0, 1], :, [2, 0, 1]] = torch.arange(9.0).view(3, 3) * w[0] * x[0]
    return (a * torch.arange(27.0).view(3, 3, 3)).sum()


def _detached_function_of_w(w: Tensor, x: Tensor) -> Tensor:
    v = (w * 2).detach()
    v.add_(1)
    return (w * v * x).sum()


class Viewing(torch.autograd.Function):
    """In the old style, and gives a view of its input."""

    @staticmethod
    def forward(ctx: Any, number: int, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, g


def _view_by_a_function(w: Tensor, x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        Viewing.apply(3, y).mul_(5)
    return (y * w).sum()


WRITES = {
    "sample changed, then a new run for samples written into a new tensor": _changes_then_reruns,
    "sample changed, then a new run for a function of parameters": _changes_a_function_of_w,
    "arange": lambda w, x: (torch.arange(3.0).add_(x) * w).sum(),
    "linspace": lambda w, x: (torch.linspace(0, 1, 3).add_(x) * w).sum(),
    "a product of a constant": lambda w, x: ((BUFFER * 2).sub_(x) * w).sum(),
    "stacked constants": lambda w, x: (torch.stack([BUFFER, BUFFER]).mul_(x) * w).sum(),
    "a mask": _masked,
    "a view": _through_a_view,
    "out=": _by_out,
    "an overload of aten": lambda w, x: (torch.ops.aten.add_.Tensor(torch.zeros(3), x) * w).sum(),
    "an overload of aten on the sample": lambda w, x: (torch.ops.aten.mul_.Tensor(x, 2.0) * w).sum(),
    "a view by an index per sample": _selected_view,
    "a named view by an index per sample": _named_view,
    "a view of a view by an index per sample": _view_of_a_view,
    "the original of a view by an index per sample": _stale_view,
    "x[i] += v": _added_at,
    "narrow by an index per sample": _narrowed,
    "a view that a Function gives": _view_by_a_function,
    "lists with a slice between them": _lists,
    "a detached function of parameters": _detached_function_of_w,
}


@pytest.mark.parametrize("name", WRITES)
def test_writes(name: str) -> None:
    same(WRITES[name], x=torch.randn(3, 3) if name.startswith("lists") else None)


@torch.library.custom_op("psgrad_found::double_", mutates_args={"a"})
def double_(a: Tensor) -> None:
    a.mul_(2)


def _custom_write(w: Tensor, x: Tensor) -> Tensor:
    a = torch.ones(3)
    double_(a)
    return (a * w * x).sum()


def test_a_custom_op_that_writes() -> None:
    same(_custom_write)


@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="its vmap does not take such an index")
def test_assignment_by_an_index_per_sample_needs_no_loop() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", psgrad.FallbackWarning)
        psgrad.per_sample_grads(_added_at, torch.randn(3), torch.randn(4, 3))


@pytest.mark.parametrize("target", ["sample", "parameter"])
def test_writes_behind_the_modes_back_are_refused(target: str) -> None:
    class Dirty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: Tensor) -> Tensor:
            t.mul_(2)
            ctx.mark_dirty(t)
            return t

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            return 2 * g

    w, x = torch.randn(3), torch.randn(4, 3)
    with torch.no_grad():
        fn = {
            "sample": lambda w, x: (Dirty.apply(x) * w).sum(),
            "parameter": lambda w, x: (_doubled(w) * x).sum(),
        }[target]
    with pytest.raises(psgrad.PsgradError, match="in place"):
        psgrad.per_sample_grads(fn, w, x)


def _doubled(w: Tensor) -> Tensor:
    with torch.no_grad():
        torch.ops.aten.mul_.Tensor(w, 2.0)
    return w


def test_statistics_that_a_norm_has_changed() -> None:
    def fn(w: Tensor, x: Tensor) -> Tensor:
        mean, variance = torch.zeros(3), torch.ones(3)
        F.batch_norm(x * torch.arange(1.0, 5)[:, None], mean, variance, training=True)
        return (w * mean).sum()

    same(fn)

    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x[0])
            return self.out(h + self.norm.running_mean)

    model = Reading()
    fn, params = psgrad.from_module(model, lambda out, t: out.square().sum())
    batch = torch.randn(4, 5, 3), torch.zeros(4)
    report = psgrad.verify(fn, params, batch)
    assert report.samples == 3


# ---- control flow ------------------------------------------------------------------------------------------


def _swallows(w: Tensor, x: Tensor) -> Tensor:
    try:
        v = x.sum().item()
    except BaseException:
        v = 0.0
    return (w * x).sum() * v


def _swallows_a_write(w: Tensor, x: Tensor) -> Tensor:
    with contextlib.suppress(BaseException):
        x[0] = 5.0
    return (w * x).sum()


@pytest.mark.parametrize("fn", [_swallows, _swallows_a_write])
def test_a_function_that_catches_everything(fn: Any) -> None:
    same(fn)


def test_both_zeros() -> None:
    same(lambda w, x: (w * math.copysign(1.0, x.item())).sum(), x=torch.tensor([0.0, -0.0, 0.0]))


def test_a_transform_inside_the_loop_for_the_whole_call() -> None:
    same(lambda w, x: torch.func.grad(lambda v: (v * x).sum() ** 2)(w).sum() + float(x.numpy().sum()))


# ---- random numbers ----------------------------------------------------------------------------------------


def _seeds(w: Tensor, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return (w * x * torch.randn(3)).sum()


def _forks(w: Tensor, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = torch.randn(3)
    return (w * x * drawn).sum()


def _seeds_and_draws_by_aten(w: Tensor, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return (w * torch.ops.aten.randn_like.default(x)).sum()


def _seeds_the_generator(w: Tensor, x: Tensor) -> Tensor:
    torch.default_generator.manual_seed(7)
    return (w * x * torch.randn(3)).sum()


@pytest.mark.parametrize("fn", [_seeds, _forks, _seeds_and_draws_by_aten, _seeds_the_generator])
def test_seeding_inside_the_function(fn: Any) -> None:
    w, x = torch.randn(3), torch.randn(4, 3)
    expected = loop(fn, w, x)
    for state in (0, 1):  # also where the caller has the very state that the function seeds
        torch.manual_seed(state)
        torch.testing.assert_close(psgrad.per_sample_grads(fn, w, x), expected)


def test_seeding_is_torchs_own_again() -> None:
    before = torch.random.manual_seed.__code__, torch.random.set_rng_state.__code__
    psgrad.per_sample_grads(_seeds, torch.randn(3), torch.randn(4, 3))
    with pytest.raises(ZeroDivisionError):
        psgrad.per_sample_grads(lambda w, x: (w * x).sum() / (1 // 0), torch.randn(3), torch.randn(4, 3))
    assert before == (torch.random.manual_seed.__code__, torch.random.set_rng_state.__code__)


def test_seeding_in_another_thread_is_its_own() -> None:
    w, x = torch.randn(3), torch.randn(4, 3)

    def fn(w: Tensor, x: Tensor) -> Tensor:
        other = threading.Thread(target=torch.random.get_rng_state)
        other.start()
        other.join()
        return (w * x * torch.rand(3)).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error", psgrad.FallbackWarning)
        psgrad.per_sample_grads(fn, w, x)


class Drawing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.drawn = torch.rand(())
        return h * ctx.drawn

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.drawn


def test_a_function_that_draws_the_same_for_all() -> None:
    fn = lambda w, x: Drawing.apply(w * x).sum()
    found = psgrad.per_sample_grads(fn, torch.ones(3), torch.ones(4, 3), randomness="same")
    assert (found == found[:1]).all()


# ---- backwards ---------------------------------------------------------------------------------------------


@torch.library.custom_op("psgrad_found::clamped", mutates_args=())
def clamped(a: Tensor) -> Tensor:
    return a.clone()


clamped.register_autograd(lambda ctx, g: g.clamp(-0.1, 0.1))


def test_a_backward_that_is_registered_after_the_first_call() -> None:
    """Of an operator that had none: it is not linear, so that weights must not go through it."""
    library = torch.library.Library("psgrad_found", "FRAGMENT")
    library.define("later(Tensor a) -> Tensor")
    library.impl("later", lambda a: a.clone(), "CompositeExplicitAutograd")
    later = torch.ops.psgrad_found.later
    fn = lambda w, x: (w * later(x) * later(w * x)).sum()
    psgrad.per_sample_grads(lambda w, x: (w * later(x)).sum(), torch.randn(3), torch.randn(4, 3))
    torch.library.register_autograd("psgrad_found::later", lambda ctx, g: g / g.norm(), lib=library)
    same(fn)


class Normed(torch.autograd.Function):
    """Says what it does under vmap; its backward is no derivative."""

    @staticmethod
    def forward(h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / g.norm()

    @staticmethod
    def vmap(info: Any, in_dims: Any, h: Tensor) -> Any:
        return Normed.apply(h), in_dims[0]


def _prehook(w: Tensor, x: Tensor) -> Tensor:
    h = w * x
    h.grad_fn.register_prehook(lambda gs: tuple(g / g.norm() for g in gs))
    return (h * x).sum()


def _packs(w: Tensor, x: Tensor) -> Tensor:
    def pack(t: Tensor) -> Any:
        scale = t.abs().max()
        return (t / scale).mul(8).round(), scale

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda p: p[0] / 8 * p[1]):
        return (w * x).exp().sum()


class Reentrant(torch.autograd.Function):
    """Runs a closure over the parameters again in its backward, which adds to their `.grad`."""

    @staticmethod
    def forward(ctx: Any, closure: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.closure, ctx.x = closure, x
        with torch.no_grad():
            return closure(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        with torch.enable_grad():
            y = ctx.closure(ctx.x)
        torch.autograd.backward(y, g)
        return None, None, torch.zeros(())


BACKWARDS = {
    "a custom op's, not linear": lambda w, x: (clamped(w * x) * x).sum(),
    "a Function's with a vmap of its own": lambda w, x: (Normed.apply(w * x) * x).sum(),
    "a hook on a node": _prehook,
    "what autograd saves, packed": _packs,
}


@pytest.mark.parametrize("name", BACKWARDS)
def test_backwards(name: str) -> None:
    same(BACKWARDS[name])


def test_a_backward_inside_a_backward() -> None:
    def fn(w: Tensor, x: Tensor) -> Tensor:
        return Reentrant.apply(lambda t: (w * t).sum() ** 2, x, w.sum() * 0) + (w * x).sum()

    w, x = torch.randn(3), torch.randn(4, 3)
    expected = torch.stack([torch.func.grad(lambda v, s: (v * s).sum() ** 2 + (v * s).sum())(w, s) for s in x])
    torch.testing.assert_close(psgrad.per_sample_grads(fn, w, x), expected)
    torch.testing.assert_close(psgrad.testing.loop_grads(fn, w, x), expected)


def test_a_nested_call_is_differentiated_in_the_loop_too() -> None:
    inner = lambda w, s: (w * s).sum() ** 2

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return ((w - 0.1 * psgrad.per_sample_grads(inner, w, x[None])[0]) * x).sum()

    w, x = torch.randn(3), torch.randn(4, 3)
    expected = torch.func.vmap(torch.func.grad(fn), (None, 0))(w, x)
    torch.testing.assert_close(psgrad.per_sample_grads(fn, w, x), expected)
    looping = lambda w, x: fn(w, x) + 0 * float(x.numpy().sum())
    torch.testing.assert_close(psgrad.per_sample_grads(looping, w, x), expected)


# ---- numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("offset", "noise"), [(1e6, 1e-3), (1.0, 1e-6), (1.0, 1e-3), (0.0, 1.0)])
def test_variance_of_gradients_that_hardly_differ(offset: float, noise: float) -> None:
    x = offset + noise * torch.randn(20, 60)
    found = psgrad.grad_stats(lambda w, s: F.linear(s, w).sum(), torch.zeros(50, 60), x).variance
    torch.testing.assert_close(found, x.var(0).expand(50, 60), rtol=1e-6, atol=0.0)


def test_numbers_that_index_fill_makes_integers() -> None:
    same(lambda w, x: ((x * 3).long().index_fill(0, torch.tensor([1]), 2.7) * w).sum())


def test_weights_far_from_one() -> None:
    fn = lambda w, x: ((w * x).sum() * 1e25) * 1e-22
    ones = torch.ones(3, dtype=torch.float32)
    found = psgrad.weighted_grad(fn, ones, ones.expand(4, 3), torch.full((4,), 1e-30, dtype=torch.float32))
    torch.testing.assert_close(found, torch.full((3,), 4e-27, dtype=torch.float32), rtol=1e-6, atol=0.0)


# ---- what models keep --------------------------------------------------------------------------------------


def test_a_cache_that_a_model_fills_when_it_first_runs() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.positions = nn.Linear(3, 2), None

        def forward(self, x: Tensor) -> Tensor:
            if self.positions is None:
                self.positions = torch.arange(3.0).cos()
            return self.layer(x + self.positions)

    model = Positions()
    fn, params = psgrad.from_module(model, lambda out, t: out.square().sum())
    batch = torch.randn(4, 3), torch.zeros(4)
    psgrad.explain(fn, params, batch)
    assert model.positions is None
    found = psgrad.per_sample_grads(fn, params, batch, max_bytes="1MB")
    assert type(found["layer.weight"]) is Tensor
    assert type(model.positions) is Tensor
    model(batch[0])


@pytest.mark.parametrize("how", ["data", "cast"])
def test_parameters_that_have_left_the_models_memory(how: str) -> None:
    model = nn.Linear(4, 3)
    fn, params = psgrad.from_module(model, F.cross_entropy)
    batch = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)  # a step of an optimizer is seen
    psgrad.per_sample_grads(fn, params, batch)
    if how == "data":
        model.weight.data = torch.randn(3, 4)
    else:
        model.float()
    with pytest.raises(psgrad.ArgumentError, match="'weight' of the model has other memory than when from_module"):
        psgrad.per_sample_norms(fn, params, batch)
    psgrad.per_sample_norms(fn, {name: t.clone() for name, t in params.items()}, batch)  # given on purpose


def test_hooks_on_a_parameter_are_refused() -> None:
    model = nn.Linear(4, 3)
    model.weight.register_hook(lambda g: 2 * g)
    with pytest.raises(psgrad.ArgumentError, match="'weight' of the model has hooks on its gradient"):
        psgrad.from_module(model, F.cross_entropy)


# ---- sums under autocast -------------------------------------------------------------------------------------


def test_factors_are_asked_in_their_own_dtype() -> None:
    model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3)).float()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    batch = torch.randn(64, 20, dtype=torch.float32), torch.randint(3, (64,))
    fg = psgrad.factored_grads(fn, params, batch)
    asked = lambda: (fg.dots(), fg.norms(), fg.clipped_sum(0.1), fg.variance(), fg.weighted_sum(torch.ones(64)))
    wanted = asked()
    with torch.autocast("cpu", torch.bfloat16):
        found = asked()
        clipped = psgrad.clipped_grad(fn, params, batch, 0.1)
        grads = psgrad.per_sample_grads(fn, params, batch)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    weights = (0.1 / clipped.norms).clamp(max=1)
    for name, total in clipped.grad.items():
        torch.testing.assert_close(total, torch.tensordot(weights, grads[name], 1), rtol=2e-2, atol=2e-3)


# ---- verify and rules ----------------------------------------------------------------------------------------


def test_verify_of_a_function_with_a_transform_in_it() -> None:
    fn = lambda w, x: torch.func.jacrev(lambda t: torch.tanh(w @ t))(x).square().sum()
    assert psgrad.verify(fn, torch.randn(3, 4), torch.randn(5, 4)).samples == 3


def test_a_rule_that_is_taken_out_leaves_psgrads_own() -> None:
    from psgrad.extend import Composite, register, unregister
    from psgrad.registry.rule import RULES

    before = RULES[torch.mul]
    rule = register(Composite("mine", (torch.mul,), lambda a, b: a * b))
    assert RULES[torch.mul] is not before
    unregister(rule)
    assert RULES[torch.mul] is before


def test_mistakes_of_newcomers() -> None:
    model = nn.Linear(4, 3)
    batch = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    with pytest.raises(psgrad.ArgumentTypeError) as error:
        psgrad.per_sample_norms(model, dict(model.named_parameters()), batch)
    assert str(error.value) == "fn is a Linear, a module\n  give fn and params of psgrad.from_module(model, loss)."
    with pytest.raises(psgrad.ArgumentTypeError) as error:
        psgrad.from_module(F.cross_entropy, model)  # type: ignore[arg-type]
    assert str(error.value) == "model is a function, and loss a Linear\n  give the model first, then the loss."


def test_weights_may_be_booleans_or_counts() -> None:
    fn, w, x = lambda w, x: (w * x).sum(), torch.zeros(2), torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 1.0]])
    assert psgrad.weighted_grad(fn, w, x, torch.tensor([True, False, True])).tolist() == [4.0, 5.0]
    assert psgrad.weighted_grad(fn, w, x, torch.tensor([2, 0, 1])).tolist() == [7.0, 9.0]
    assert psgrad.weighted_grad(fn, w, x, lambda norms: norms > 3).tolist() == [3.0, 4.0]


def test_a_hook_that_comes_after_from_module_is_refused_by_name() -> None:
    model = torch.nn.Linear(3, 2)
    fn, params = psgrad.from_module(model, torch.nn.functional.cross_entropy)
    batch = torch.randn(4, 3), torch.randint(2, (4,))
    handle = model.bias.register_hook(lambda g: 2 * g)
    with pytest.raises(psgrad.ArgumentError, match="parameter 'bias' of the model has hooks on its gradient"):
        psgrad.per_sample_grads(fn, params, batch)
    psgrad.per_sample_grads(fn, {"weight": params["weight"]}, batch)
    handle.remove()
    psgrad.per_sample_grads(fn, params, batch)


def test_explain_inside_a_transform_is_refused_by_name() -> None:
    def outer(w: torch.Tensor) -> torch.Tensor:
        psgrad.explain(lambda w, x: (w * x).sum(), w, torch.ones(3, 2))
        return w.sum()

    with pytest.raises(psgrad.ArgumentError, match=r"explain is called inside a torch\.func transform"):
        torch.func.grad(outer)(torch.ones(2))


def test_a_model_wrapped_by_opacus_is_refused_by_name() -> None:
    opacus = pytest.importorskip("opacus")
    wrapped = opacus.GradSampleModule(torch.nn.Linear(3, 2))
    with pytest.raises(psgrad.ArgumentError, match=r"wrapped by Opacus's GradSampleModule"):
        psgrad.from_module(wrapped, torch.nn.functional.cross_entropy)
    psgrad.from_module(wrapped.to_standard_module(), torch.nn.functional.cross_entropy)


# ---- tangents of torch.autograd.forward_ad ------------------------------------------------------------------


def _along(y: Callable[..., Tensor], w: Tensor, x: Tensor) -> Tensor:
    """The squared derivative of y(w, x) in the direction of ones, by dual numbers."""
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(y(w, forward_ad.make_dual(x, torch.ones(3))))
    found: Tensor = primal if tangent is None else tangent.square()
    return found


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("op", [torch.mul, F.linear, torch.dot], ids=["elementwise", "linear", "dot"])
def test_a_tangent_is_kept(op: Callable[..., Tensor], n: int) -> None:
    same(lambda w, x: _along(lambda w, x: op(x, w).sin().sum(), w, x), x=torch.randn(n, 3))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
def test_a_linearized_function_has_its_values() -> None:
    """Its gradient by w is torch's, which takes what it has folded for constants."""
    fn = lambda w, x: torch.func.linearize(lambda x: (w * x).sin().sum(), x)[1](x) + w.sum()
    w, x = torch.randn(3), torch.randn(4, 3)
    grads, values = psgrad.per_sample_grads(fn, w, x, return_value=True)
    torch.testing.assert_close(grads, loop(fn, w, x))
    torch.testing.assert_close(values, torch.stack([(x * w * (w * x).cos()).sum() + w.sum() for x in x]))
