"""Every module of torch.nn that has parameters: exact, by the stated rules, its own state untouched."""

import contextlib
import inspect
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import psgrad

from .cases import N, draw
from .modules import MODULES, Adapted, Entry

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
FACTORS = {  # what a weight of two axes and more yields
    "Outer": ("linear", "bilinear"),
    "Patches": tuple(f"conv{kind}{d}d" for kind in ("", "_transpose") for d in (1, 2, 3)),
    "Rows": ("embedding", "embedding_bag"),
}


@pytest.fixture(autouse=True)
def float64() -> None:
    torch.set_default_dtype(torch.float64)  # conftest puts it back


BOTH = [pytest.param(e, mode, id=f"{e.id}-{mode}") for e in MODULES for mode in e.modes]
every_module = pytest.mark.parametrize(("entry", "mode"), BOTH)
every_ruled_module = pytest.mark.parametrize(("entry", "mode"), [p for p in BOTH if not p.values[0].loops])


@contextlib.contextmanager
def looping(entry: Entry) -> Iterator[None]:
    """Inside, a loop over samples is an error, but for entries that say so."""
    with warnings.catch_warnings():
        if entry.loops:
            warnings.simplefilter("ignore", psgrad.FallbackWarning)
        yield


@every_module
def test_equals_the_loop_and_keeps_the_state(entry: Entry, mode: str) -> None:
    module, fn, params, batch = entry.built(mode)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    with looping(entry):
        psgrad.testing.check(fn, params, batch)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


@every_ruled_module
def test_the_stated_rules_ran(entry: Entry, mode: str) -> None:
    _, fn, params, batch = entry.built(mode)
    used = psgrad.testing.rules_used(fn, params, batch)
    assert {path: sorted(names) for path, names in used.items()} == entry.expected()


@pytest.mark.parametrize("entry", [e for e in MODULES if not e.loops], ids=lambda entry: entry.id)
def test_a_large_parameter_has_a_factor(entry: Entry) -> None:
    _, fn, params, batch = entry.built(entry.modes[0])
    for row in psgrad.explain(fn, params, batch).rows:
        wanted = [factor for factor, rules in FACTORS.items() if row.how.removeprefix("rule ") in rules]
        if len(row.shape) > 1 and wanted:
            assert row.factor == wanted[0]


def test_adapters_have_factors_of_their_own_size() -> None:
    """A frozen layer's low-rank change: pairs of vectors for the two small matrices, nothing for the large one."""
    fn, params, batch = _lora()
    rows = psgrad.explain(fn, params, batch).rows
    assert [(row.param, row.shape, row.how, row.factor) for row in rows] == [
        ("params['down']", (2, 6), "rule linear", "Outer"),
        ("params['up']", (5, 2), "rule linear", "Outer"),
    ]


def _lora() -> tuple[Any, Any, Any]:
    module = Adapted()
    module.base.requires_grad_(False)
    fn, params = psgrad.from_module(module, F.mse_loss)
    return fn, params, (draw(N, 6), draw(N, 5))


# ---- nothing is left out -----------------------------------------------------------------------------------

# a Linear under another name, in MultiheadAttention; what recurrent modules have in common
INNER = {"NonDynamicallyQuantizableLinear", "RNNBase", "RNNCellBase"}
_MAKES_PARAMETERS = re.compile(r"[pP]arameter\(|Linear\(|Transformer\w+\(|_get_clones\(")


def _modules() -> set[type[nn.Module]]:
    """The public module classes of torch.nn."""
    homes = [import_module(info.name) for info in pkgutil.walk_packages(nn.modules.__path__, "torch.nn.modules.")]
    found = {c for home in homes for c in vars(home).values() if inspect.isclass(c) and issubclass(c, nn.Module)}
    return {c for c in found if not c.__name__.startswith("_") and c.__module__.startswith("torch.nn.modules.")}


def _has_parameters(module: type[nn.Module]) -> bool:
    """Whether one of its constructors makes some."""
    made = [vars(c)["__init__"] for c in module.__mro__ if "__init__" in vars(c) and c not in (nn.Module, object)]
    return any(_MAKES_PARAMETERS.search(inspect.getsource(init)) for init in made if inspect.isfunction(init))


def _missing(entries: tuple[Entry, ...]) -> set[str]:
    covered = {entry.id.partition("-")[0] for entry in entries}
    return {c.__name__ for c in _modules() if _has_parameters(c)} - covered - INNER


def test_every_module_with_parameters_is_in_the_table() -> None:
    assert _missing(MODULES) == set()


@pytest.mark.parametrize(
    "name", ["Linear", "PReLU", "InstanceNorm2d", "LazyConv3d", "Transformer", "TransformerEncoder"]
)
def test_a_module_that_is_not_in_the_table_is_noticed(name: str) -> None:
    assert _missing(tuple(e for e in MODULES if e.id.partition("-")[0] != name)) == {name}


# ---- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d, (3,)),
        (nn.BatchNorm1d, (3, 1)),
        (nn.BatchNorm2d, (3, 1, 1)),
        (nn.BatchNorm3d, (3, 1, 1, 1)),
        (nn.SyncBatchNorm, (3, 1)),
    ],
)
def test_batch_norm_of_a_single_value_is_refused(norm: Callable[..., nn.Module], shape: tuple[int, ...]) -> None:
    fn, params = psgrad.from_module(nn.Sequential(norm(3)), lambda y, _: y.sum())
    with pytest.raises(psgrad.UnsupportedOpError) as error:
        psgrad.per_sample_grads(fn, params, (draw(N, *shape), draw(N)))
    assert str(error.value) == (
        "F.batch_norm(training=True) with params['0.weight'] normalises over a single value per channel\n"
        f"  called at model.0 ({norm.__name__})\n"
        "  a sample is normalised by its own statistics: call model.eval(), or use group or layer norm instead."
    )


def test_a_bag_that_renormalises_is_refused() -> None:
    fn, params = psgrad.from_module(nn.Sequential(nn.EmbeddingBag(5, 3, max_norm=1.0)), lambda y, _: y.sum())
    with pytest.raises(psgrad.UnsupportedOpError) as error:
        psgrad.per_sample_grads(fn, params, (torch.randint(5, (N, 4)), draw(N)))
    assert str(error.value) == (
        "F.embedding_bag(max_norm=1.0) changes params['0.weight'] in place\n"
        "  called at model.0 (EmbeddingBag)\n"
        "  per-sample gradients need parameters that stay put: renormalise before the call instead."
    )


BAD_BAGS = {
    r"offsets\[0\] has to be 0": {"offsets": [1, 3]},
    r"offsets\[-1\] can not be greater": {"offsets": [0, 7]},
    "offsets has to be a 1D Tensor": {"offsets": [[0, 1]]},
    "padding_idx must be within": {"offsets": [0], "padding_idx": 5},
    "mode has to be one of": {"offsets": [0], "mode": "median"},
    "per_sample_weights is only supported for mode='sum'": {"offsets": [0], "per_sample_weights": True},
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch, before it refuses
@pytest.mark.parametrize("message", BAD_BAGS)
def test_bags_that_torch_refuses(message: str) -> None:
    """The error is torch's own."""
    options: dict[str, Any] = dict(BAD_BAGS[message])
    offsets = torch.tensor(options.pop("offsets"))
    if "per_sample_weights" in options:
        options["per_sample_weights"] = draw(5)
    with pytest.raises((RuntimeError, ValueError, NotImplementedError), match=message):
        psgrad.per_sample_grads(
            lambda p, x: F.embedding_bag(x, p, offsets, **options).sum(), draw(5, 3), torch.randint(5, (N, 5))
        )


@pytest.mark.parametrize("options", [{"offsets": [0, 4, 2]}, {"offsets": [0, 2, 4], "include_last_offset": True}])
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own loop, in C++
def test_bags_that_only_torch_understands(options: dict[str, Any]) -> None:
    """Offsets that do not divide the indices: torch's own answer for each sample."""
    starts = torch.tensor(options["offsets"])
    last = options.get("include_last_offset", False)
    fn = lambda p, x: F.embedding_bag(x, p, starts, mode="sum", include_last_offset=last).square().sum()
    weight, batch = draw(5, 3), torch.randint(5, (N, 5))
    found = psgrad.per_sample_grads(fn, weight, batch)
    torch.testing.assert_close(found, psgrad.testing.loop_grads(fn, weight, batch))


# ---- through from_module -----------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_training_leaves_running_statistics_alone(norm: Callable[..., nn.Module]) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(2, 3, 2), norm(3), nn.PReLU(3))
    fn, params = psgrad.from_module(model, lambda y, t: (y.sin() * t).sum())
    before = {name: b.clone() for name, b in model.named_buffers()}
    batch = draw(N, 2, 3, 3), draw(N)
    found = psgrad.per_sample_grads(fn, params, batch)
    torch.testing.assert_close(found, psgrad.testing.loop_grads(fn, params, batch))
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)


# ---- dtypes and memory formats -----------------------------------------------------------------------------

SMALL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv-transpose1d": (lambda: nn.ConvTranspose1d(3, 4, 3, 2, 1, 1), (2, 3, 6)),
    "conv-transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, 2, groups=2), (2, 4, 4, 4)),
    "conv-transpose3d": (lambda: nn.ConvTranspose3d(2, 3, 2), (2, 2, 3, 3, 3)),
    "rms-norm": (lambda: nn.RMSNorm(6), (3, 6)),
    "prelu": (lambda: nn.PReLU(3), (2, 3, 6)),
    "bilinear": (lambda: _Squared(), (3, 6)),
}


class _Squared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(6, 6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x)


def _losses(module: nn.Module) -> tuple[Callable[[Any, Tensor], Tensor], dict[str, Tensor]]:
    params = {name: p.detach() + 0.3 * torch.randn_like(p) for name, p in module.named_parameters()}
    return (lambda p, x: functional_call(module, p, (x,)).float().sin().sum()), params


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch, of rms_norm under autocast
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", SMALL)
def test_autocast(name: str, inside: bool) -> None:
    """As far from the loop under autocast as bfloat16 rounds, after a layer that autocast lowers, by the rule."""
    make, shape = SMALL[name]
    first = nn.Identity() if name == "bilinear" else nn.Linear(shape[-1], shape[-1])  # torch refuses mixed dtypes there
    module = nn.Sequential(first, make(), nn.Tanh()).float()
    inner, params = _losses(module)

    def fn(p: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=torch.is_autocast_enabled("cpu") or inside):
            return inner(p, x)

    batch = torch.randn(N, *shape, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        ours, want = psgrad.per_sample_grads(fn, params, batch), psgrad.testing.loop_grads(fn, params, batch)
        used = psgrad.testing.rules_used(fn, params, batch)
    for path, p in params.items():
        assert ours[path].dtype == p.dtype
        scale = want[path].abs().max().item()
        torch.testing.assert_close(ours[path], want[path], rtol=0, atol=2 * torch.finfo(torch.bfloat16).eps * scale)
    assert "vmap" not in {rule for rules in used.values() for rule in rules}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*SMALL, "embedding-bag"])
def test_parameters_of_any_dtype(name: str, dtype: torch.dtype) -> None:
    """The dtype of a result is the parameter's; it is as near to the float64 gradient as the loop's."""
    if name == "embedding-bag":
        module, batch = nn.EmbeddingBag(5, 3), torch.randint(5, (N, 2, 4))
    else:
        make, shape = SMALL[name]
        module, batch = make(), torch.randn(N, *shape).to(dtype)
    fn, params = _losses(module.to(dtype))
    ours, loop = psgrad.per_sample_grads(fn, params, batch), psgrad.testing.loop_grads(fn, params, batch)
    wide = batch.double() if batch.is_floating_point() else batch
    truth = psgrad.testing.loop_grads(fn, {k: p.double() for k, p in params.items()}, wide)
    for path, want in truth.items():
        assert ours[path].dtype == dtype
        error, allowed = ((t[path].double() - want).abs().max() for t in (ours, loop))
        assert error <= 1.5 * allowed + torch.finfo(dtype).eps * want.abs().max(), path


@pytest.mark.parametrize("which", ["batch", "weight", "both"])
@pytest.mark.parametrize("make", [nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose3d])
def test_channels_last(make: Callable[..., nn.Module], which: str) -> None:
    spatial = 3 if "3d" in make.__name__ else 2
    memory = torch.channels_last_3d if spatial == 3 else torch.channels_last
    model, x = nn.Sequential(make(4, 6, 2), nn.Tanh(), make(6, 4, 2)), draw(N * 2, 4, *[4] * spatial)
    if which != "batch":
        model = model.to(memory_format=memory)
    if which != "weight":
        x = x.contiguous(memory_format=memory)
    fn = lambda p, x: functional_call(model, p, (x,)).sin().sum()
    params = {name: p.detach() for name, p in model.named_parameters()}
    psgrad.testing.check(fn, params, x.unflatten(0, (N, 2)))
