"""Architectures of the transformers package, tiny and with random weights: exact, and mostly without the loop."""

import warnings
from typing import Any, NamedTuple

import pytest
import torch

import psgrad

transformers = pytest.importorskip("transformers")

VOCABULARY, WIDTH, LENGTH, SAMPLES = 37, 16, 8, 3


class Architecture(NamedTuple):
    model: str
    config: str
    options: dict[str, Any]
    inputs: str = "text"
    looped: str = ""  # the op that runs in a loop over samples, where there is one
    masks: tuple[str, ...] = ("ones", "padding")


_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
_GPT = {
    "vocab_size": VOCABULARY,
    "n_positions": 16,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
}
_VIT = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 4,
}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 16,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_T5 = {"vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
_SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": 2}
_SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [3, 3],
    "strides": [2, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
}
_WAV2VEC2 = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": (8, 8),
    "conv_stride": (2, 2),
    "conv_kernel": (3, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
_NEO = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "hidden_size": WIDTH,
    "num_layers": 2,
    "num_heads": 2,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_OPT = {"ffn_dim": 24, "word_embed_proj_dim": WIDTH}
_DISTIL = {"vocab_size": VOCABULARY, "dim": WIDTH, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
_XLNET = {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_layer": 2, "n_head": 2, "d_inner": 24}
_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4}
_MOE = _LLAMA | {"num_experts_per_tok": 2, "experts_implementation": "eager"}  # the other ones have no float64
_WHISPER = {k: v for k, v in _BART.items() if k != "max_position_embeddings"} | {
    "num_mel_bins": 4,
    "max_source_positions": 8,
    "max_target_positions": 8,
}
_LED = {k: v for k, v in _BART.items() if k != "max_position_embeddings"} | {
    "attention_window": 4,
    "max_encoder_position_embeddings": 16,
    "max_decoder_position_embeddings": 16,
}
_FUNNEL = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "n_head": 2,
    "d_head": 8,
    "d_inner": 24,
    "block_sizes": [1, 1],
    "num_decoder_layers": 1,
}
_JAMBA = _MOE | {
    "num_experts": 2,
    "mamba_d_state": 4,
    "mamba_dt_rank": 2,
    "use_mamba_kernels": False,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
_RESNET = {"embedding_size": 4, "hidden_sizes": [8, 8], "depths": [1, 1], "layer_type": "basic"}

_OLD_STYLE = "GeLUFunction.apply"  # that op alone runs sample by sample

ARCHITECTURES = {
    "GPT-2": Architecture("GPT2LMHeadModel", "GPT2Config", _GPT),
    "Llama": Architecture("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "BERT": Architecture("BertForMaskedLM", "BertConfig", _BERT),
    "BERT classifier": Architecture("BertForSequenceClassification", "BertConfig", _BERT),
    "RoBERTa": Architecture("RobertaForMaskedLM", "RobertaConfig", _BERT | {"max_position_embeddings": 20}),
    "DistilBERT": Architecture("DistilBertForMaskedLM", "DistilBertConfig", _DISTIL),
    "ALBERT": Architecture("AlbertModel", "AlbertConfig", _BERT | {"embedding_size": 8}),
    "DeBERTa": Architecture(
        "DebertaV2Model", "DebertaV2Config", _BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    ),
    "OPT": Architecture("OPTForCausalLM", "OPTConfig", {k: v for k, v in _BERT.items() if k[0] != "i"} | _OPT),
    "Mistral": Architecture("MistralForCausalLM", "MistralConfig", _LLAMA | {"sliding_window": 3}),
    "Qwen2": Architecture("Qwen2ForCausalLM", "Qwen2Config", _LLAMA),
    "Qwen3": Architecture("Qwen3ForCausalLM", "Qwen3Config", _LLAMA | {"head_dim": 4}),
    "Gemma 2": Architecture("Gemma2ForCausalLM", "Gemma2Config", _LLAMA | {"head_dim": 4}),
    "Phi": Architecture("PhiForCausalLM", "PhiConfig", _LLAMA | {"bos_token_id": 0, "eos_token_id": 0}),
    "GPT-NeoX": Architecture("GPTNeoXForCausalLM", "GPTNeoXConfig", _BERT),
    "GPT-Neo": Architecture("GPTNeoForCausalLM", "GPTNeoConfig", _NEO),
    "Falcon": Architecture(
        "FalconForCausalLM",
        "FalconConfig",
        {k: v for k, v in _BERT.items() if k[0] not in "im"} | {"bos_token_id": 0, "eos_token_id": 0},
    ),
    "XLNet": Architecture("XLNetModel", "XLNetConfig", _XLNET),
    "FNet": Architecture("FNetModel", "FNetConfig", {k: v for k, v in _BERT.items() if "heads" not in k}),
    "T5": Architecture("T5ForConditionalGeneration", "T5Config", _T5 | {"decoder_start_token_id": 0}, "text to text"),
    "BART": Architecture("BartForConditionalGeneration", "BartConfig", _BART, "text to text"),
    "Bloom": Architecture(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": 2},
        looped=_OLD_STYLE,
    ),
    "Longformer": Architecture(
        "LongformerModel",
        "LongformerConfig",
        _BERT | {"attention_window": 4, "pad_token_id": 1},
        masks=("ones",),  # its own gradients are NaN where a window is all padding
    ),
    "LED": Architecture("LEDForConditionalGeneration", "LEDConfig", _LED, "text to text", masks=("ones",)),  # NaN too
    "Mamba": Architecture("MambaForCausalLM", "MambaConfig", _MAMBA | {"time_step_rank": 2}),
    "Mamba 2": Architecture(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        _MAMBA | {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    ),
    "Jamba": Architecture("JambaForCausalLM", "JambaConfig", _JAMBA),
    "Mixtral": Architecture("MixtralForCausalLM", "MixtralConfig", _MOE | {"num_local_experts": 3}),
    "GPT-OSS": Architecture("GptOssForCausalLM", "GptOssConfig", _MOE | {"num_local_experts": 3, "head_dim": 4}),
    "Phi-3": Architecture("Phi3ForCausalLM", "Phi3Config", _LLAMA | {"pad_token_id": 0}),
    "Gemma 3": Architecture("Gemma3ForCausalLM", "Gemma3TextConfig", _LLAMA | {"head_dim": 4, "sliding_window": 3}),
    "Cohere": Architecture("CohereForCausalLM", "CohereConfig", _LLAMA),
    "OLMo 2": Architecture("Olmo2ForCausalLM", "Olmo2Config", _LLAMA),
    "GPT-J": Architecture("GPTJForCausalLM", "GPTJConfig", _GPT | {"rotary_dim": 4}),
    "MPT": Architecture(
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": VOCABULARY, "d_model": WIDTH, "n_heads": 2, "n_layers": 2, "max_seq_len": 16},
    ),
    "DeBERTa v1": Architecture(
        "DebertaModel", "DebertaConfig", _BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
    ),
    "ELECTRA": Architecture("ElectraModel", "ElectraConfig", _BERT | {"embedding_size": 8}),
    "MPNet": Architecture("MPNetModel", "MPNetConfig", _BERT | {"max_position_embeddings": 20}),
    "ModernBERT": Architecture(
        "ModernBertModel", "ModernBertConfig", _BERT | {"pad_token_id": 0, "local_attention": 4}
    ),
    "RoFormer": Architecture("RoFormerModel", "RoFormerConfig", _BERT),
    "Funnel": Architecture("FunnelModel", "FunnelConfig", _FUNNEL),
    "CLIP text": Architecture(
        "CLIPTextModel", "CLIPTextConfig", _BERT | {"eos_token_id": 2, "bos_token_id": 0, "pad_token_id": 1}
    ),
    "ViT": Architecture("ViTForImageClassification", "ViTConfig", _VIT, "images"),
    "BEiT": Architecture("BeitModel", "BeitConfig", _VIT | {"use_relative_position_bias": True}, "images"),
    "Swin": Architecture("SwinModel", "SwinConfig", _SWIN, "images"),
    "Swin V2": Architecture("Swinv2Model", "Swinv2Config", _SWIN, "images"),
    "CLIP vision": Architecture("CLIPVisionModel", "CLIPVisionConfig", _VIT, "images"),
    "SigLIP": Architecture("SiglipVisionModel", "SiglipVisionConfig", _VIT, "images"),
    "DINOv2": Architecture(
        "Dinov2Model", "Dinov2Config", {k: v for k, v in _VIT.items() if k != "intermediate_size"}, "images"
    ),
    "MobileNet V2": Architecture(
        "MobileNetV2Model", "MobileNetV2Config", {"depth_multiplier": 0.25, "image_size": 16}, "images"
    ),
    "PoolFormer": Architecture(
        "PoolFormerModel", "PoolFormerConfig", {"depths": [1] * 4, "hidden_sizes": [8] * 4}, "images"
    ),
    "ConvNeXt": Architecture(
        "ConvNextModel",
        "ConvNextConfig",
        {"hidden_sizes": [4, 8], "depths": [1, 1], "num_stages": 2, "patch_size": 2},
        "images",
    ),
    "ResNet": Architecture("ResNetModel", "ResNetConfig", _RESNET, "images"),
    "SegFormer": Architecture("SegformerModel", "SegformerConfig", _SEGFORMER, "images"),
    "wav2vec 2.0": Architecture("Wav2Vec2Model", "Wav2Vec2Config", _WAV2VEC2, "sound"),
    "WavLM": Architecture(
        "WavLMModel", "WavLMConfig", _WAV2VEC2 | {"num_buckets": 8, "max_bucket_distance": 16}, "sound"
    ),
    "Whisper": Architecture("WhisperModel", "WhisperConfig", _WHISPER, "spectra"),
}
CASES = [
    pytest.param(name, mask, id=f"{name}, {mask}" if mask else name)
    for name, architecture in ARCHITECTURES.items()
    for mask in (architecture.masks if architecture.inputs.startswith("text") else ("",))
]


def _made(architecture: Any) -> Any:
    model = getattr(transformers, architecture.model)(
        getattr(transformers, architecture.config)(**architecture.options)
    )
    with torch.no_grad():
        for p in model.parameters():  # zeros and ones, as biases and norms begin, would hide mistakes
            if p.dim() == 1:
                p.add_(torch.randn_like(p), alpha=0.1)
    return model.double().eval()


def _inputs(architecture: Any, mask: Any) -> Any:
    if architecture.inputs == "images":
        return {"pixel_values": torch.randn(SAMPLES, 3, 16, 16, dtype=torch.float64)}
    if architecture.inputs == "sound":
        return {"input_values": torch.randn(SAMPLES, 60, dtype=torch.float64)}
    if architecture.inputs == "spectra":
        spectra = torch.randn(SAMPLES, 4, 16, dtype=torch.float64)
        return {"input_features": spectra, "decoder_input_ids": torch.randint(3, VOCABULARY, (SAMPLES, 5))}
    lengths = torch.tensor([LENGTH, 5, 3]) if mask == "padding" else torch.tensor([LENGTH] * SAMPLES)
    tokens = torch.randint(3, VOCABULARY, (SAMPLES, LENGTH))
    inputs = {"input_ids": tokens, "attention_mask": (torch.arange(LENGTH) < lengths[:, None]).long()}
    return inputs | ({"decoder_input_ids": tokens[:, :5]} if architecture.inputs == "text to text" else {})


def _output(output: Any) -> Any:
    return output["logits"] if "logits" in output else output["last_hidden_state"]


def _loss(output: Any, target: Any) -> Any:
    return (torch.sin(_output(output)) * target).sum()


def _by_hand(model: Any, inputs: Any, target: Any) -> Any:
    """One ordinary backward pass of the module itself per sample."""
    rows, params = [], {name: p for name, p in model.named_parameters() if p.requires_grad}
    for i in range(SAMPLES):
        loss = _loss(model(**{k: t[i : i + 1] for k, t in inputs.items()}), target[i : i + 1])
        rows.append(torch.autograd.grad(loss, list(params.values()), materialize_grads=True, allow_unused=True))
    return {name: torch.stack(grads) for name, grads in zip(params, zip(*rows, strict=True), strict=True)}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch, of ops it has no batching rule for
@pytest.mark.parametrize(("name", "mask"), CASES)
def test_exact(name: Any, mask: Any) -> None:
    """Equal to the module's own gradients; a loop over samples only where the table says so, and why."""
    architecture = ARCHITECTURES[name]
    model, inputs = _made(architecture), _inputs(architecture, mask)
    with torch.no_grad():
        target = torch.randn_like(_output(model(**inputs)))
    fn, params = psgrad.from_module(model, _loss)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", psgrad.FallbackWarning)
        grads = psgrad.per_sample_grads(fn, params, (inputs, target))
    torch.testing.assert_close(grads, _by_hand(model, inputs, target), rtol=1e-8, atol=1e-10)
    reasons = [str(w.message) for w in caught if w.category is psgrad.FallbackWarning]
    if not architecture.looped:
        assert not reasons
    else:
        assert [architecture.looped in reason for reason in reasons] == [True]


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "BERT"])
def test_rules_handle_every_layer(name: Any) -> None:
    """Weights of linear layers, embeddings and layer norms go through a rule, none through plain vmap."""
    architecture = ARCHITECTURES[name]
    model, inputs = _made(architecture), _inputs(architecture, "ones")
    fn, params = psgrad.from_module(model, lambda output, _: _output(output).square().sum())
    used = psgrad.testing.rules_used(fn, params, (inputs, torch.zeros(SAMPLES)))
    assert {rule for rules in used.values() for rule in rules} <= {
        "linear",
        "addmm",
        "embedding",
        "layer_norm",
        "mul",
        "add",
    }
    assert set(used) == {f"params[{key!r}]" for key in params}


@pytest.mark.parametrize("name", ["GPT-2", "BERT"])
def test_training_mode(name: Any) -> None:
    """With dropout: every sample its own masks, reproducible under a seed, no fallback."""
    architecture = ARCHITECTURES[name]
    model, inputs = _made(architecture).train(), _inputs(architecture, "padding")
    inputs = {k: t[:1].expand_as(t) for k, t in inputs.items()}  # the same sample, three times
    fn, params = psgrad.from_module(model, lambda output, _: _output(output).square().sum())

    def grads() -> Any:
        torch.manual_seed(1)
        return psgrad.per_sample_grads(fn, params, (inputs, torch.zeros(SAMPLES)))

    first, again = grads(), grads()
    assert all(torch.equal(first[k], again[k]) for k in params)
    weight = next(k for k in params if k.endswith("weight"))
    assert not torch.equal(first[weight][0], first[weight][1])
    assert not torch.equal(first[weight][1], first[weight][2])


def test_token_level_loss_with_ignored_positions() -> None:
    """A language model's own loss: shifted labels, -100 where the padding is."""
    architecture = ARCHITECTURES["GPT-2"]
    model, inputs = _made(architecture), _inputs(architecture, "padding")
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    fn, params = psgrad.from_module(model, lambda output, _: output.loss)
    grads = psgrad.per_sample_grads(fn, params, (inputs | {"labels": labels}, torch.zeros(SAMPLES)))
    for i in range(SAMPLES):
        loss = model(**{k: t[i : i + 1] for k, t in inputs.items()}, labels=labels[i : i + 1]).loss
        want = torch.autograd.grad(loss, list(model.parameters()))
        for (name, _), g in zip(model.named_parameters(), want, strict=True):
            torch.testing.assert_close(grads[name][i], g, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "Llama", "T5", "ViT"])
def test_gradient_checkpointing(name: Any) -> None:
    """The package's own switch: same masks, same gradients, no loop, less saved."""
    architecture = ARCHITECTURES[name]
    model, inputs = _made(architecture).train(), _inputs(architecture, "padding")
    fn, params = psgrad.from_module(model, lambda output, _: _output(output).square().sum())
    params = {k: p * 1.1 for k, p in params.items()}  # not what the model holds when it recomputes

    def grads_and_saved() -> Any:
        saved = []
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
            return psgrad.per_sample_grads(fn, params, (inputs, torch.zeros(SAMPLES))), sum(saved)

    (wanted, everything), _ = grads_and_saved(), model.gradient_checkpointing_enable()
    found, less = grads_and_saved()
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    assert less < 0.5 * everything


def test_gradient_checkpointing_with_frozen_layers() -> None:
    """Fine-tuning the last block: what is frozen costs nothing, checkpoints or not."""
    architecture = ARCHITECTURES["GPT-2"]
    model, inputs = _made(architecture), _inputs(architecture, "padding")
    model.requires_grad_(False).transformer.h[1].requires_grad_(True)
    fn, params = psgrad.from_module(model.train(), lambda output, _: _output(output).square().sum())

    def grads() -> Any:
        torch.manual_seed(1)
        return psgrad.per_sample_grads(fn, params, (inputs, torch.zeros(SAMPLES)))

    wanted, _ = grads(), model.gradient_checkpointing_enable()
    torch.testing.assert_close(grads(), wanted, rtol=1e-9, atol=1e-10)
