"""Mixtures of experts of the transformers package, tiny and with random weights: experts go by the rule for grouped_mm.

The oracle is the package's own loop over experts, for one sample at a time, in float64, which torch's kernel has not.
"""

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import psgrad
from psgrad.factors import costs

from .test_quantities import Watch

transformers = pytest.importorskip("transformers")

SAMPLES, LENGTH, VOCABULARY = 6, 8, 37
# Of a torch as old as that, transformers asks on a CPU where operands lie in memory, which is another place for every
# sample: each runs by itself.
ASKS_FOR_ADDRESSES = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11)
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "eos_token_id": 0,
}
_ATTENTION = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
_GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 3},
    "Qwen3Moe": {"num_experts": 20, "moe_intermediate_size": 8, "head_dim": 4},  # more than a sample can choose
    "Olmoe": {"num_experts": 4},
    "GptOss": {"num_local_experts": 3, "head_dim": 4},
    "DeepseekV3": {"moe_intermediate_size": 8} | _ATTENTION | _GROUPS,
}


def _made(name: str, **options: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**_COMMON | MODELS[name] | options)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():  # zeros, as biases begin, would hide mistakes
            p.add_(torch.randn_like(p), alpha=0.05)
    return model.double().eval()


def _loss(output: Any, target: Tensor) -> Tensor:
    return (output.logits.sin() * target).sum()


def _batch(n: int = SAMPLES) -> Any:
    target = torch.randn(n, LENGTH, VOCABULARY, dtype=torch.float64)
    return {"input_ids": torch.randint(1, VOCABULARY, (n, LENGTH))}, target


def _by_hand(model: Any, batch: Any) -> dict[str, Tensor]:
    before = model.get_experts_implementation()
    model.set_experts_implementation("eager")
    rows = []
    for tokens, target in zip(batch[0]["input_ids"], batch[1], strict=True):
        loss = _loss(model(input_ids=tokens[None]), target[None])
        rows.append(torch.autograd.grad(loss, list(model.parameters())))
    model.set_experts_implementation(before)
    names = [name for name, _ in model.named_parameters()]
    return {name: torch.stack(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def _flat(tree: dict[str, Tensor], lead: int = 1) -> Tensor:
    return torch.cat([t.flatten(lead) for _, t in sorted(tree.items())], lead)


@pytest.mark.filterwarnings("ignore:There is a performance drop.*scatter_:UserWarning")  # DeepSeek's router
@pytest.mark.parametrize("name", MODELS)
def test_exact_by_the_rule(name: str) -> None:
    """As transformers runs them if nobody says otherwise."""
    if ASKS_FOR_ADDRESSES:
        warnings.simplefilter("ignore", psgrad.FallbackWarning)
    model, batch = _made(name), _batch()
    assert model.config._experts_implementation == "grouped_mm"
    fn, params = psgrad.from_module(model, _loss)
    used = {k: rules for k, rules in psgrad.testing.rules_used(fn, params, batch).items() if ".experts." in k}
    assert len(used) >= 2
    for key, rules in used.items():
        if ASKS_FOR_ADDRESSES:
            rules = sorted({*rules} - {"vmap"})
        assert rules == ["index" if "_bias" in key else "grouped_mm"]
    want = _by_hand(model, batch)
    rows, directions = _flat(want), {key: torch.randn_like(p) for key, p in params.items()}
    torch.testing.assert_close(psgrad.per_sample_grads(fn, params, batch), want)
    torch.testing.assert_close(psgrad.per_sample_norms(fn, params, batch), rows.norm(dim=1))
    clip = (50 / rows.norm(dim=1)).clamp(max=1)
    for options in ({}, {"max_bytes": "2MB"} if name == "GptOss" else {"chunk_size": 4}):
        step = psgrad.clipped_grad(fn, params, batch, 50.0, **options)
        torch.testing.assert_close(_flat(step.grad, 0), clip @ rows)
    torch.testing.assert_close(psgrad.gram(fn, params, batch), rows @ rows.mT)
    along = psgrad.per_sample_dots(fn, params, batch, directions)
    torch.testing.assert_close(along, rows @ _flat(directions, 0))


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm"])
def test_other_implementations(name: str, implementation: str) -> None:
    model, batch = _made(name, experts_implementation=implementation), _batch(3)
    fn, params = psgrad.from_module(model, _loss)
    want = _by_hand(model, batch)
    torch.testing.assert_close(psgrad.per_sample_grads(fn, params, batch), want)
    torch.testing.assert_close(psgrad.per_sample_norms(fn, params, batch), _flat(want).norm(dim=1))


def test_a_loop_over_experts_is_named_with_what_is_better() -> None:
    """Samples choose different experts, so each ends in a group of its own."""
    fn, params = psgrad.from_module(_made("Mixtral", experts_implementation="eager", num_hidden_layers=1), _loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", psgrad.FallbackWarning)
        psgrad.per_sample_norms(fn, params, _batch(12))
    (said,) = [str(w.message) for w in caught if w.category is psgrad.FallbackWarning]
    first, *rest = said.splitlines()
    assert first.startswith("psgrad splits 12 samples into ")
    assert first.endswith(" in MixtralExperts.forward")
    assert rest == [
        "  it loops over experts, of which samples choose others: where the model is one of transformers,",
        '  model.set_experts_implementation("grouped_mm") keeps samples together.',
    ]


# ---- what is held ------------------------------------------------------------------------------------------

E, WIDTH, INNER = 4, 32, 64


def experts_loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """A router and experts of two layers, each row with one of them."""
    chosen, order = F.linear(x, params["router"]).argmax(1).sort()
    ends = (chosen[:, None] <= torch.arange(E)).sum(0, dtype=torch.int32)
    inner = F.grouped_mm(x[order], params["up"], offs=ends).relu()
    return F.grouped_mm(inner, params["down"].mT, offs=ends).sin().sum()


def _experts(n: int, length: int = 12) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(0)
    shapes = {"router": (E, WIDTH), "up": (E, WIDTH, INNER), "down": (E, WIDTH, INNER)}
    return {name: 0.2 * torch.randn(shape) for name, shape in shapes.items()}, torch.randn(n, length, WIDTH)


@pytest.mark.parametrize("quantity", ["norms", "clipped", "gram", "dots", "factored"])
def test_no_tensor_of_n_gradients_of_an_expert(quantity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of N gradients of a single expert's matrix, which are a quarter of N x P."""
    monkeypatch.setattr(costs, "WORKSPACE", 1 << 14)
    monkeypatch.setattr(costs, "TILE", 1 << 14)
    n = 32
    params, batch = _experts(n, 3)
    ask = {
        "norms": lambda: psgrad.per_sample_norms(experts_loss, params, batch),
        "clipped": lambda: psgrad.clipped_grad(experts_loss, params, batch, 1.0),
        "gram": lambda: psgrad.gram(experts_loss, params, batch),
        "dots": lambda: psgrad.per_sample_dots(experts_loss, params, batch, params),
        "factored": lambda: psgrad.factored_grads(experts_loss, params, batch).norms(),
    }[quantity]
    with Watch() as watch:
        ask()
    assert n * 3 * INNER <= watch.most < n * WIDTH * INNER / 4  # the rows, and nothing like N matrices


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    params, batch = _experts(5)
    params, batch = {name: p.to(dtype) for name, p in params.items()}, batch.to(dtype)
    psgrad.testing.check(experts_loss, params, batch, rules={"params['up']": ["grouped_mm"]})
    rows = _flat(psgrad.per_sample_grads(experts_loss, params, batch)).double()
    norms = psgrad.per_sample_norms(experts_loss, params, batch)
    torch.testing.assert_close(norms.double(), rows.norm(dim=1), rtol=2e-2, atol=0)


def test_a_sample_that_is_not_finite_touches_no_other() -> None:
    params, batch = _experts(5)
    want = psgrad.clipped_grad(experts_loss, params, batch[1:], 1.0)
    batch[0, 3] = torch.nan
    step = psgrad.clipped_grad(experts_loss, params, batch, 1.0, nonfinite="zero")
    torch.testing.assert_close(step.grad, want.grad)
    torch.testing.assert_close(step.norms[1:], want.norms)


def test_offsets_that_divide_nothing_are_torchs_affair() -> None:
    """The op runs sample by sample then, as torch has it."""

    def fn(w: Tensor, x: Tensor) -> Tensor:
        return F.grouped_mm(x, w, offs=torch.tensor([4, 2, 6], dtype=torch.int32))[:2].sin().sum()

    w, x = torch.randn(3, 4, 4), torch.randn(5, 6, 4)
    with pytest.warns(psgrad.FallbackWarning, match="offsets that do not divide the positions into groups"):
        found = psgrad.per_sample_grads(fn, w, x)
    torch.testing.assert_close(found, psgrad.testing.loop_grads(fn, w, x))


def test_a_table_of_integers_that_differs_between_samples_is_no_offset() -> None:
    """Only a rule that says so gets integers of all samples at once."""

    def fn(w: Tensor, sample: tuple[Tensor, Tensor]) -> Tensor:
        table, index = sample
        return (F.embedding(index, table) * w).sin().sum()

    w, table, index = torch.randn(2), torch.randint(9, (5, 4, 2)), torch.randint(4, (5, 3))
    psgrad.testing.check(fn, w, (table, index), rules={"params": ["mul"]})


def test_compiled_calls_run_eagerly_and_say_so() -> None:
    params, batch = _experts(5)
    step = psgrad.compile(psgrad.per_sample_norms, experts_loss)
    with pytest.warns(psgrad.FallbackWarning, match="reads numbers by torch._grouped_mm"):
        found = step(params, batch)
    torch.testing.assert_close(found, psgrad.per_sample_norms(experts_loss, params, batch))
