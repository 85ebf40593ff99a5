"""verify: agrees where psgrad is right, names what is wrong where it is not, and leaves nothing behind."""

import dataclasses
import random
import re
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import psgrad
from psgrad.extend import Outer
from psgrad.registry.rule import RULES


def net() -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    fn, params = psgrad.from_module(model, F.cross_entropy)
    return fn, params, (torch.randn(5, 4), torch.randint(3, (5,)))


class Tampered:
    """Inside, F.linear has a rule that is wrong on purpose."""

    def __init__(self, output: Any = 1.0, weight: Any = 1.0) -> None:
        self.own, self.output, self.weight = RULES[F.linear], output, weight

    def forward(self, options: Any, x: Tensor, *params: Any) -> Tensor:
        y, saved = self.own.forward(options, x, *params)
        return y * self.output, saved

    def backward(self, *args: Any) -> Any:
        gx, (weight, *others) = self.own.backward(*args)
        return gx, [None if weight is None else Outer(weight.x, weight.g * self.weight), *others]

    def __enter__(self) -> None:
        rule = dataclasses.replace(
            self.own, functions=(F.linear,), forward=self.forward, backward=self.backward, native=False
        )
        psgrad.extend.register(rule)

    def __exit__(self, *_: Any) -> None:
        RULES[F.linear] = self.own


# ---- where psgrad is right ----------------------------------------------------------------------------


def test_report() -> None:
    report = psgrad.verify(*net())
    assert (report.samples, report.of, report.against) == (3, 5, "the module itself")
    assert [c.quantity for c in report.comparisons] == [
        "losses",
        "gradients",
        "norms",
        "clipped sum",
        "gradients, chunk_size=2",
    ]
    assert all(c.agrees and c.excess < 0.1 for c in report.comparisons)
    assert report.how == "4 of 4 uses of parameters by rules"
    assert (report.unused, report.small, report.nonfinite, report.draws) == ((), (), (), "")


def test_report_prints_as_a_few_lines() -> None:
    report = psgrad.verify(*net())
    off = r"equal|off by \d\.\de-\d\d at most, \d\.\de-\d\d of the largest"
    lines = [
        r"3 of 5 samples agree with the module itself, called plainly",
        rf"  losses                   ({off} \(sample \d; allowed \de.*\))",
        rf"  gradients                ({off} \(params\['\d\.\w+'\], sample \d; allowed \d.*\))",
        rf"  norms                    ({off} \(sample \d; allowed \d.*\))",
        rf"  clipped sum              ({off} \(params\['\d\.\w+'\]; allowed \d.*\))",
        rf"  gradients, chunk_size=2  ({off} \(params\['\d\.\w+'\], sample \d; allowed \d.*\))",
        r"4 of 4 uses of parameters by rules",
    ]
    for line, pattern in zip(str(report).splitlines(), lines, strict=True):
        assert re.fullmatch(pattern.replace(r"allowed \de", r"allowed \d"), line), line
    assert repr(report) == str(report)


@pytest.mark.parametrize(("samples", "compared", "chunked"), [(1, 1, []), (2, 2, [1]), (4, 4, [2]), (9, 5, [2])])
def test_number_of_samples(samples: Any, compared: Any, chunked: Any) -> None:
    report = psgrad.verify(*net(), samples=samples)
    assert report.samples == compared
    sizes = [c.quantity for c in report.comparisons if "chunk_size" in c.quantity]
    assert sizes == [f"gradients, chunk_size={size}" for size in chunked]
    assert psgrad.verify(*net(), samples=None).samples == 5


def test_a_function_of_ones_own() -> None:
    def fn(p: Any, s: Any) -> Any:
        x, shift = s
        return ((x @ p["w"] + shift).tanh() @ p["v"]).square()

    params = {"w": torch.randn(3, 4), "v": torch.randn(4)}
    report = psgrad.verify(fn, params, (torch.randn(3, 6), torch.tensor(0.5)), in_dims=(1, None))
    assert (report.samples, report.of, report.against) == (3, 6, "fn itself")
    assert report.how == "2 of 2 uses of parameters by rules"


def test_uses_without_a_rule() -> None:
    fn = lambda p, x: torch.maximum(F.linear(x, p["w"]), p["b"]).sum()
    report = psgrad.verify(fn, {"w": torch.randn(3, 4), "b": torch.randn(3)}, torch.randn(5, 4))
    assert report.how == "1 of 2 uses of parameters by rules, the others by vmap"


def test_a_branch_on_values() -> None:
    """The uses of both sides count."""
    fn = lambda p, x: F.linear(x, p["w"]).sum() if x[0] > 0 else F.linear(x, p["v"]).square().sum()
    x = torch.randn(4, 4)
    x[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    report = psgrad.verify(fn, {"w": torch.randn(3, 4), "v": torch.randn(3, 4)}, x)
    assert report.how == "2 of 2 uses of parameters by rules"
    assert report.unused == ()


def test_a_loop_over_samples() -> None:
    fn = lambda p, x: F.linear(x, p["w"]).sum() * float(x.numpy().max())
    with pytest.warns(psgrad.FallbackWarning):
        report = psgrad.verify(fn, {"w": torch.randn(3, 4)}, torch.randn(5, 4))
    place = f"test_verify.py:{fn.__code__.co_firstlineno} in {fn.__qualname__}"
    assert report.how == f"samples run in a loop, one by one: vmap refuses at {place}"


def test_aux() -> None:
    fn, params, batch = net()
    with_aux = lambda p, s: (fn(p, s), {"twice": s[0] * 2, "label": s[1]})
    report = psgrad.verify(with_aux, params, batch, has_aux=True)
    assert [c.quantity for c in report.comparisons][-1] == "aux"
    lying = lambda p, s: (fn(p, s), s[0] * (2 if torch._C._functorch.is_batchedtensor(s[0]) else 1))
    with pytest.raises(psgrad.VerificationError, match=r"^the aux differ from those of a plain loop over samples\n"):
        psgrad.verify(lying, params, batch, has_aux=True)


def test_parameters_that_nothing_uses() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.idle = nn.Linear(4, 3), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    report = psgrad.verify(*psgrad.from_module(Idle(), F.cross_entropy), net()[2])
    assert report.unused == ("params['idle']",)
    assert "no gradient reaches, zeros on both sides: params['idle']" in str(report).splitlines()


def test_a_loss_of_no_parameter() -> None:
    _, params, batch = net()
    with pytest.warns(psgrad.UnusedParametersWarning):
        report = psgrad.verify(lambda p, s: s[0].sum(), params, batch)
    assert report.how == "the loss depends on no parameter"
    assert len(report.unused) == 4


def test_gradients_too_small_to_tell() -> None:
    """A bias in front of a normalisation: what is there is rounding, and is said to be."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Flatten(), nn.Linear(144, 3))
    batch = torch.randn(4, 1, 8, 8), torch.randint(3, (4,))
    report = psgrad.verify(*psgrad.from_module(model, F.cross_entropy), batch)
    assert report.small == ("params['0.bias']",)
    assert "gradients too small beside the others to tell: params['0.bias']" in str(report).splitlines()
    there = report.comparisons[1]._replace(param="params['0.bias']", difference=1e-9, relative=1.0)
    line = str(dataclasses.replace(report, comparisons=(there,))).splitlines()[1]
    assert line.startswith("  gradients  off by 1.0e-09 at most, where all is rounding (params['0.bias'], sample ")


def test_gradients_that_are_not_finite() -> None:
    fn, params, (x, y) = net()
    x[1, 0] = torch.nan
    report = psgrad.verify(fn, params, (x, y))
    assert report.nonfinite == ("params['0.bias']", "params['0.weight']", "params['2.bias']", "params['2.weight']")
    assert report.small == ()


@pytest.mark.parametrize(
    ("dtype", "allowed"), [(torch.float64, 1e-7), (torch.float32, 1e-3), (torch.float16, 0.1), (torch.bfloat16, 0.2)]
)
def test_dtypes(dtype: Any, allowed: Any) -> None:
    """Rounding passes; an error of twice the tolerance does not."""
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.LayerNorm(30), nn.Linear(30, 3)).to(dtype)
    fn, params = psgrad.from_module(model, F.cross_entropy)
    batch = torch.randn(5, 40, dtype=dtype), torch.randint(3, (5,))
    psgrad.verify(fn, params, batch)
    with Tampered(weight=1 + 2 * allowed), pytest.raises(psgrad.VerificationError):
        psgrad.verify(fn, params, batch)


def test_autocast() -> None:
    """The parameters are of float32, and half of the computation is not."""
    fn, params, batch = net()
    with torch.autocast("cpu", torch.bfloat16):
        report = psgrad.verify(fn, params, batch)
    assert report.comparisons[1].allowed > 0.05 * report.comparisons[1].difference
    with Tampered(weight=1.01):
        psgrad_says = pytest.raises(psgrad.VerificationError, match="params")
        with psgrad_says:
            psgrad.verify(fn, params, batch)
        with torch.autocast("cpu", torch.bfloat16):
            psgrad.verify(fn, params, batch)


def test_tolerances() -> None:
    fn, params, batch = net()
    with Tampered(weight=1.01):
        psgrad.verify(fn, params, batch, rtol=0.1)
        psgrad.verify(fn, params, batch, atol=10.0)
    with Tampered(weight=1 + 1e-5):
        psgrad.verify(fn, params, batch)
        with pytest.raises(psgrad.VerificationError):
            psgrad.verify(fn, params, batch, rtol=1e-6, atol=0.0)


# ---- where it is wrong --------------------------------------------------------------------------------


def test_a_wrong_factor() -> None:
    fn, params, batch = net()
    with Tampered(weight=2.0), pytest.raises(psgrad.VerificationError) as raised:
        psgrad.verify(fn, params, batch)
    worst = max(raised.value.comparisons, key=lambda c: (c.quantity == "gradients", c.excess))
    layer = re.search(r"\d", worst.param)[0]
    assert str(raised.value) == (
        f"the gradients of params['{layer}.weight'] differ from those of a plain loop over samples\n"
        f"  for sample {worst.sample} by {worst.difference:.3g}, 1 of the largest; allowed {worst.allowed:.1g}\n"
        "  the same goes for: norms; clipped sum; gradients, chunk_size=2\n"
        f"  params['{layer}.weight']: F.linear at model.{layer} (Linear), by the rule linear\n"
        "  compared with the module itself, called plainly\n"
        "  mend the rule, if it is yours; let fn use the params that it is given; otherwise please report this."
    )
    assert isinstance(raised.value, (psgrad.PsgradError, AssertionError))


def test_a_wrong_output() -> None:
    fn, params, batch = net()
    with Tampered(output=1.1), pytest.raises(psgrad.VerificationError) as raised:
        psgrad.verify(fn, params, batch)
    assert re.match(r"the gradients of params\['\d\.\w+'\] differ", str(raised.value))
    assert "\n  the same goes for: losses; norms; clipped sum; gradients, chunk_size=2\n" in str(raised.value)
    assert re.search(
        r"\n  params\['\d\.\w+'\]: F\.linear at model\.\d \(Linear\), by the rule linear\n", str(raised.value)
    )


def test_wrong_norms_name_the_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients right, norms wrong: each quantity has ways of its own."""
    fn, params, batch = net()
    monkeypatch.setattr("psgrad.factors.base.wide_norms", lambda grads: torch.ones(len(grads), dtype=grads.dtype))
    with pytest.raises(psgrad.VerificationError, match=r"^the norms of params\['\d\.\w+'\] differ from those"):
        psgrad.verify(fn, params, batch)


def test_wrong_sums_name_the_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    fn, params, batch = net()
    monkeypatch.setattr("psgrad.verification.clipped_grad", lambda *a, **k: psgrad.clipped_grad(*a[:3], 1e-3, **k))
    with pytest.raises(psgrad.VerificationError, match=r"^the clipped sum of params\['\d\.\w+'\] differ") as raised:
        psgrad.verify(fn, params, batch)
    assert "\n  over all samples by " in str(raised.value)


class Hidden(nn.Module):
    """A parameter that is found in a dict, where nobody can put another in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.zeros(3))
        self.hidden = {"w": self.weight}

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.hidden["w"], self.bias)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_hidden_parameter(scale: Any) -> None:
    """Told by psgrad itself or by verify; also for values that the module does not hold."""
    fn, params = psgrad.from_module(Hidden(), F.cross_entropy)
    params = {name: p * scale for name, p in params.items()} if scale != 1 else params
    with pytest.raises(psgrad.PsgradError, match="weight"):
        psgrad.verify(fn, params, net()[2])


class Rerun(torch.autograd.Function):
    """Runs a module without a graph, and again in the backward, as memory-saving layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Any:
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.module(x)
        torch.autograd.backward(y, g)
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return Rerun.apply(self.first(x), self.inner)


def test_a_function_that_runs_the_module_in_its_backward() -> None:
    """Both loops count what the inner backward adds to .grad, and put the user's .grad back."""
    model = Reversible()
    fn, params = psgrad.from_module(model, F.cross_entropy)
    model.inner.weight.grad = kept = torch.ones(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", psgrad.FallbackWarning)
        report = psgrad.verify(fn, params, net()[2])
    assert report.how.startswith("samples run in a loop")
    assert model.inner.weight.grad is kept
    assert model.first.weight.grad is None


@pytest.mark.filterwarnings("ignore::psgrad.FallbackWarning")
def test_a_function_that_is_none() -> None:
    fn, params, batch = net()
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(psgrad.VerificationError) as raised:
        psgrad.verify(lambda p, s: fn(p, s) * torch.rand((), generator=generator), params, batch)
    assert re.fullmatch(
        r"fn itself, called twice on the first sample, gives \d\S+ and \d\S+\n"
        r"  psgrad needs a function of params and sample: fn must not count its calls, change what it closes\n"
        r"  over, or draw from a generator of its own\.",
        str(raised.value),
    )


# ---- random numbers -----------------------------------------------------------------------------------


def dropping() -> Any:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3), nn.Dropout(0.1))
    fn, params = psgrad.from_module(model, F.cross_entropy)
    return fn, params, net()[2]


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_dropout_number_by_number(randomness: Any) -> None:
    fn, params, batch = dropping()
    report = psgrad.verify(fn, params, batch, randomness=randomness)
    assert re.fullmatch(
        r"fn draws random numbers at dropout\.py:\d+ in Dropout\.forward: "
        r'compared with randomness="same", beside a loop in which every sample draws the same numbers',
        report.draws,
    )
    assert len(report.comparisons) == 5
    with Tampered(weight=1.01), pytest.raises(psgrad.VerificationError, match=r"^the gradients of params"):
        psgrad.verify(fn, params, batch, randomness=randomness)


def test_drawing_that_is_refused() -> None:
    with pytest.raises(psgrad.ArgumentError, match='which randomness="error" refuses'):
        psgrad.verify(*dropping(), randomness="error")
    assert psgrad.verify(*net(), randomness="error").draws == ""


def test_numbers_of_python() -> None:
    """Psgrad draws them once for all samples, so all samples of the loop get the same; chunks would not."""
    fn, params, batch = net()
    before = random.getstate()
    report = psgrad.verify(lambda p, s: fn(p, s) * random.random(), params, batch)
    assert report.draws == (
        "fn draws Python's or numpy's random numbers, which psgrad draws once for all samples of a chunk: "
        "chunks are not compared"
    )
    assert [c.quantity for c in report.comparisons] == ["losses", "gradients", "norms", "clipped sum"]
    assert random.getstate() == before


def test_numbers_of_python_in_a_loop() -> None:
    fn, params, batch = net()
    with pytest.warns(psgrad.FallbackWarning), pytest.raises(psgrad.VerificationError) as raised:
        psgrad.verify(lambda p, s: fn(p, s) * random.random() * float(s[0].numpy().max()), params, batch)
    assert str(raised.value) == (
        "fn draws Python's or numpy's random numbers, and others when it runs again\n"
        "  so psgrad and a plain loop cannot be compared\n"
        "  call model.eval(), or leave out what draws, and verify again."
    )


def test_torch_that_draws_otherwise_under_vmap(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the fused dropout of a GPU does: not psgrad's fault, and not to be called one."""
    fn, params, batch = net()

    def other(p: Any, s: Any) -> Any:
        batched = torch._C._functorch.is_batchedtensor(s[0])
        noise = torch.rand(2)[1 if batched else 0]
        return fn(p, s) * noise

    with pytest.raises(psgrad.VerificationError) as raised:
        psgrad.verify(other, params, batch)
    place = f"test_verify.py:{other.__code__.co_firstlineno + 2} in {other.__qualname__}"
    assert str(raised.value) == (
        f"fn draws random numbers at {place}, and under vmap torch draws others\n"
        "  so psgrad and a plain loop cannot be compared\n"
        "  call model.eval(), or leave out what draws, and verify again."
    )


# ---- arguments, and what is left behind ---------------------------------------------------------------


def test_no_samples() -> None:
    fn, params, (x, y) = net()
    with pytest.raises(psgrad.ArgumentError) as raised:
        psgrad.verify(fn, params, (x[:0], y[:0]))
    assert str(raised.value) == "the batch has no samples, so there is nothing to verify\n  give at least one."
    with pytest.raises(psgrad.ArgumentError, match="samples=0 is not a positive int"):
        psgrad.verify(fn, params, (x, y), samples=0)


def test_params_that_are_not_the_modules() -> None:
    """Other values are put into the module itself; other dtypes and names are left to fn."""
    fn, params, (x, y) = net()
    model = fn.psgrad_module[0]
    before = {name: (p, p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    assert psgrad.verify(fn, {name: 2 * p for name, p in params.items()}, (x, y)).against == "the module itself"
    for name, p in model.named_parameters():
        assert p is before[name][0]
        assert p.data_ptr() == before[name][1]
        assert torch.equal(p, before[name][2])
    some = {name: p for name, p in params.items() if "bias" in name}
    assert psgrad.verify(fn, some, (x, y)).against == "the module itself"
    double = {name: p.double() for name, p in params.items()}
    assert psgrad.verify(fn, double, (x.double(), y)).against == "fn itself"
    with pytest.raises(psgrad.ArgumentError, match="which the model has not"):
        psgrad.verify(fn, {"other": torch.ones(2)}, (x, y))


def test_parameters_that_have_been_frozen_since() -> None:
    fn, params, batch = net()
    model = fn.psgrad_module[0].requires_grad_(False)
    assert psgrad.verify(fn, params, batch).unused == ()
    assert not any(p.requires_grad for p in model.parameters())


def test_inputs_of_every_kind() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, a: Any, b: Any) -> Tensor:
            return self.layer(a * b)

    fn, params = psgrad.from_module(Two(), F.cross_entropy)
    (a, y), b = net()[2], torch.randn(5, 4)
    for inputs in ((a, b), [a, b], {"a": a, "b": b}):
        assert psgrad.verify(fn, params, (inputs, y)).against == "the module itself"


def test_attributes_of_modules_are_left_alone() -> None:
    """What a plain call sets on modules does not stay, and the next sample does not see it."""

    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            if not torch._C._functorch.is_batchedtensor(x):  # psgrad's own runs are not the matter here
                assert self.calls == 0
                self.calls, self.last = self.calls + 1, x
            return super().forward(x)

    model = Counting(4, 3)
    psgrad.verify(*psgrad.from_module(model, F.cross_entropy), net()[2])
    assert "calls" not in vars(model)
    assert "last" not in vars(model)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_nothing_is_left_behind(around: Any) -> None:
    """Buffers, .grad, generators; batch norm and spectral norm write their buffers when training."""
    conv = nn.utils.spectral_norm(nn.Conv2d(1, 4, 3))
    model = nn.Sequential(conv, nn.BatchNorm2d(4), nn.Dropout(0.2), nn.Flatten(), nn.Linear(144, 3))
    fn, params = psgrad.from_module(model, F.cross_entropy)
    model[4].weight.grad = kept = torch.ones(3, 144)
    state = {k: (id(t), t._version, t.detach().clone()) for k, t in model.state_dict(keep_vars=True).items()}
    rng = torch.get_rng_state()
    with around():
        report = psgrad.verify(fn, params, (torch.zeros(4, 1, 8, 8).normal_(), torch.zeros(4, dtype=torch.long)))
        rng_after = torch.get_rng_state()
    assert report.against == "the module itself"
    torch.set_rng_state(rng)
    torch.zeros(4, 1, 8, 8).normal_()
    assert torch.equal(torch.get_rng_state(), rng_after)
    assert model[4].weight.grad is kept
    for k, t in model.state_dict(keep_vars=True).items():
        assert (id(t), t._version) == state[k][:2]
        assert torch.equal(t, state[k][2])


def test_the_batch_is_not_changed() -> None:
    fn, params, (x, y) = net()
    before = x.clone()
    psgrad.verify(lambda p, s: fn(p, (s[0].mul_(2), s[1])), params, (x, y))
    assert torch.equal(x, before)


def test_what_psgrad_refuses_is_not_run() -> None:
    """An embedding that renormalises would change the module's weight in a plain call."""
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.1))
    fn, params = psgrad.from_module(model, lambda y, _: y.sum())
    before = model[0].weight.detach().clone()
    with pytest.raises(psgrad.UnsupportedOpError):
        psgrad.verify(fn, params, (torch.randint(5, (4, 2)), torch.zeros(4)))
    assert torch.equal(model[0].weight, before)


def test_inside_a_transform() -> None:
    fn, params, batch = net()
    with pytest.raises(psgrad.ArgumentError, match=r"verify is called inside a torch\.func transform"):
        torch.func.grad(lambda p: psgrad.verify(fn, p, batch))(params)


def test_two_threads() -> None:
    """Each puts values of its own into one module."""
    fn, params, batch = net()
    reports = []

    def run(scale: Any) -> None:
        for _ in range(3):
            reports.append(psgrad.verify(fn, {name: p * scale for name, p in params.items()}, batch))

    threads = [threading.Thread(target=run, args=(scale,)) for scale in (0.5, 2.0)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(reports) == 6


# ---- models of others ---------------------------------------------------------------------------------


def test_a_language_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=37, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.randint(37, (4, 8))
    fn, params = psgrad.from_module(model, lambda output, _: output.loss)
    report = psgrad.verify(fn, params, ({"input_ids": tokens, "labels": tokens}, torch.zeros(4)), samples=2)
    assert report.against == "the module itself"
    assert re.fullmatch(r"(\d+) of \1 uses of parameters by rules", report.how)
    assert "modeling_gpt2.py" in report.draws
    with Tampered(weight=2.0), pytest.raises(psgrad.VerificationError) as raised:  # the head, tied to the embedding
        psgrad.verify(fn, params, ({"input_ids": tokens, "labels": tokens}, torch.zeros(4)), samples=2)
    assert "params['transformer.wte.weight']: F.linear at modeling_gpt2.py:" in str(raised.value)


def test_a_vision_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ConvNextConfig(hidden_sizes=[4, 8], depths=[1, 1], num_stages=2, patch_size=2)
    model = transformers.ConvNextModel(config)
    fn, params = psgrad.from_module(model, lambda output, _: output.pooler_output.square().sum())
    report = psgrad.verify(fn, params, ({"pixel_values": torch.randn(3, 3, 16, 16)}, torch.zeros(3)))
    assert report.against == "the module itself"
    assert report.comparisons[1].excess < 0.5
