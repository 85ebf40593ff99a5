"""The table of models: each third-party, small, with random weights, and what it is fed.

A model is a function without arguments which imports its package and returns the module and its inputs, a tensor, a
tuple or a dict of tensors with the samples in front; its docstring, if any, says what is unusual about it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

N = 3  # samples
VOCABULARY = 29


class Model(NamedTuple):
    name: str
    package: str
    make: Callable[[], tuple[nn.Module, Any]]


MODELS: list[Model] = []


def model(name: str, package: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Add a function to the table."""

    def add(make: Callable[[], Any]) -> Callable[[], Any]:
        MODELS.append(Model(name, package, make))
        return make

    return add


class Called(nn.Module):
    """A module whose call is not simply `module(*inputs)`."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, *inputs: Tensor) -> Any:
        return self.call(self.module, *inputs)


def real(*shape: int) -> Tensor:
    return torch.randn(N, *shape)


def tokens(length: int = 8, least: int = 3) -> Tensor:
    return torch.randint(least, VOCABULARY, (N, length))


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


# transformers: those that the tests of the library do not have

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BERT = {k: v for k, v in _TEXT.items() if k != "num_key_value_heads"}
_EYES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_IMAGE_TOKEN = 28


def _made(name: str, config: str, **options: Any) -> nn.Module:
    import transformers

    return getattr(transformers, name)(getattr(transformers, config)(**options))


def _with_image(image_tokens: int) -> dict[str, Tensor]:
    """Text that begins with an image."""
    text = torch.randint(3, _IMAGE_TOKEN, (N, 8))
    text[:, :image_tokens] = _IMAGE_TOKEN
    return {"input_ids": text, "pixel_values": real(3, 8, 8), "attention_mask": torch.ones_like(text)}


@model("LLaVA", "transformers")
def llava() -> Any:
    import transformers

    eyes = transformers.CLIPVisionConfig(**_EYES, projection_dim=16)
    text = transformers.LlamaConfig(**_TEXT)
    made = _made(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        vision_config=eyes,
        text_config=text,
        image_token_index=_IMAGE_TOKEN,
        image_token_id=_IMAGE_TOKEN,
    )
    return made, _with_image(4)


@model("PaliGemma", "transformers")
def pali_gemma() -> Any:
    import transformers

    eyes = transformers.SiglipVisionConfig(**_EYES, vision_use_head=False)
    text = transformers.GemmaConfig(**_TEXT, head_dim=4)
    made = _made(
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        vision_config=eyes,
        text_config=text,
        image_token_index=_IMAGE_TOKEN,
        image_token_id=_IMAGE_TOKEN,
        projection_dim=16,
    )
    inputs = _with_image(4)
    return made, inputs | {"token_type_ids": torch.zeros_like(inputs["input_ids"])}


@model("RecurrentGemma", "transformers")
def recurrent_gemma() -> Any:
    options = {k: v for k, v in _TEXT.items() if k != "max_position_embeddings"}
    options |= {"lru_width": 16, "attention_window_size": 4, "conv1d_width": 2, "num_hidden_layers": 3, "head_dim": 4}
    return _made("RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", **options), {"input_ids": tokens()}


@model("Bloom", "transformers")
def bloom() -> Any:
    options = {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 2}
    return _made("BloomForCausalLM", "BloomConfig", **options), {"input_ids": tokens()}


@model("Longformer", "transformers")
def longformer() -> Any:
    made = _made("LongformerModel", "LongformerConfig", **_BERT | {"attention_window": 4, "pad_token_id": 1})
    return made, {"input_ids": tokens(), "attention_mask": torch.ones(N, 8, dtype=torch.long)}


@model("BigBird", "transformers")
def big_bird() -> Any:
    return _made("BigBirdModel", "BigBirdConfig", **_BERT), {"input_ids": tokens()}


@model("CLIP", "transformers")
def clip() -> Any:
    made = _made("CLIPModel", "CLIPConfig", text_config=_BERT, vision_config=_EYES, projection_dim=8)
    return made, {"input_ids": tokens(), "pixel_values": real(3, 8, 8)}


@model("DeepSeek V3", "transformers")
def deepseek() -> Any:
    options = _TEXT | {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 8,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 4,
        "experts_implementation": "eager",
    }
    return _made("DeepseekV3ForCausalLM", "DeepseekV3Config", **options), {"input_ids": tokens()}


@model("Perceiver", "transformers")
def perceiver() -> Any:
    options = {
        "num_latents": 4,
        "d_latents": 8,
        "d_model": 8,
        "num_blocks": 1,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 2,
        "qk_channels": 8,
        "v_channels": 8,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8,
    }
    return _made("PerceiverForMaskedLM", "PerceiverConfig", **options), {"inputs": tokens()}


@model("PatchTST", "transformers")
def patch_tst() -> Any:
    options = {"num_input_channels": 2, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 8}
    options |= {"num_attention_heads": 2, "ffn_dim": 16, "num_hidden_layers": 1, "norm_type": "layernorm"}
    return _made("PatchTSTModel", "PatchTSTConfig", **options), {"past_values": real(16, 2)}


@model("VITS", "transformers")
def vits() -> Any:
    """Speech; its noise is turned down to nothing, as a plain loop would draw another."""
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "ffn_dim": 8,
        "flow_size": 8,
        "spectrogram_bins": 5,
        "upsample_initial_channel": 8,
        "upsample_rates": [2, 2],
        "upsample_kernel_sizes": [4, 4],
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3]],
        "prior_encoder_num_flows": 1,
        "prior_encoder_num_wavenet_layers": 1,
        "duration_predictor_num_flows": 1,
        "depth_separable_num_layers": 1,
        "use_stochastic_duration_prediction": False,
        "noise_scale": 0.0,
    }
    made = _made("VitsModel", "VitsConfig", **options)
    return Called(made, lambda vits, text: vits(text).waveform.square().mean(-1)), tokens()


# diffusers


@model("UNet2D", "diffusers")
def unet_2d() -> Any:
    from diffusers import UNet2DModel

    made = UNet2DModel(
        sample_size=8,
        in_channels=2,
        out_channels=2,
        layers_per_block=1,
        block_out_channels=(4, 8),
        norm_num_groups=2,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return made, (real(2, 8, 8), torch.tensor([1, 5, 9]))


@model("UNet2D, text", "diffusers")
def unet_2d_text() -> Any:
    from diffusers import UNet2DConditionModel

    made = UNet2DConditionModel(
        sample_size=8,
        in_channels=2,
        out_channels=2,
        layers_per_block=1,
        block_out_channels=(4, 8),
        norm_num_groups=2,
        attention_head_dim=2,
        cross_attention_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    return made, (real(2, 8, 8), torch.tensor([1, 5, 9]), real(3, 8))


@model("DiT", "diffusers")
def dit() -> Any:
    from diffusers import DiTTransformer2DModel

    made = DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=4,
        in_channels=2,
        out_channels=2,
        num_layers=1,
        norm_num_groups=2,
        sample_size=4,
        patch_size=2,
        num_embeds_ada_norm=10,
    )
    return made, {
        "hidden_states": real(2, 4, 4),
        "timestep": torch.tensor([1, 5, 9]),
        "class_labels": tokens(1)[:, 0] % 10,
    }


@model("AutoencoderKL", "diffusers")
def autoencoder_kl() -> Any:
    from diffusers import AutoencoderKL

    made = AutoencoderKL(
        in_channels=1,
        out_channels=1,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(4, 8),
        latent_channels=2,
        norm_num_groups=2,
        sample_size=8,
    )
    return made, real(1, 8, 8)


# peft: adapters on a small net; what they freeze is frozen


def _adapted(config: str, **options: Any) -> nn.Module:
    import peft

    return peft.get_peft_model(small_net(), getattr(peft, config)(target_modules=["0", "2"], **options))


@model("LoRA", "peft")
def lora() -> Any:
    return _adapted("LoraConfig", r=2, modules_to_save=["4"]), real(4)


@model("DoRA", "peft")
def dora() -> Any:
    return _adapted("LoraConfig", r=2, use_dora=True), real(4)


@model("LoHa", "peft")
def loha() -> Any:
    return _adapted("LoHaConfig", r=2), real(4)


@model("LoKr", "peft")
def lokr() -> Any:
    return _adapted("LoKrConfig", r=2), real(4)


@model("OFT", "peft")
def oft() -> Any:
    return _adapted("OFTConfig", r=0, oft_block_size=2), real(4)


@model("BOFT", "peft")
def boft() -> Any:
    return _adapted("BOFTConfig", boft_block_size=2, boft_n_butterfly_factor=1), real(4)


@model("IA3", "peft")
def ia3() -> Any:
    return _adapted("IA3Config", feedforward_modules=["2"]), real(4)


@model("VeRA", "peft")
def vera() -> Any:
    import peft

    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    return peft.get_peft_model(net, peft.VeraConfig(r=2, target_modules=["0", "2"])), real(6)


@model("prefix tuning, GPT-2", "peft")
def prefix_tuning() -> Any:
    import peft

    gpt = _made("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    made = peft.get_peft_model(gpt, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    return made, {"input_ids": tokens(), "attention_mask": torch.ones(N, 8, dtype=torch.long)}


# torch_geometric: one graph for all samples, features of each

_EDGES = ((0, 1, 1, 2, 3, 4, 4, 0), (1, 0, 2, 1, 4, 3, 0, 4))


def _on_graph(layer: nn.Module) -> tuple[nn.Module, Tensor]:
    return Called(layer, lambda layer, x: layer(x[0], torch.tensor(_EDGES))[None]), real(5, 4)


@model("GCN", "torch_geometric")
def gcn() -> Any:
    from torch_geometric.nn import GCN

    return _on_graph(GCN(4, 6, 2, 3))


@model("GAT", "torch_geometric")
def gat() -> Any:
    from torch_geometric.nn import GAT

    return _on_graph(GAT(4, 6, 2, 3, heads=2, v2=True))


@model("GraphSAGE, max", "torch_geometric")
def graph_sage() -> Any:
    from torch_geometric.nn import GraphSAGE

    return _on_graph(GraphSAGE(4, 6, 2, 3, aggr="max"))


@model("GIN", "torch_geometric")
def gin() -> Any:
    from torch_geometric.nn import GIN

    return _on_graph(GIN(4, 6, 2, 3, norm="layer_norm"))


@model("PNA", "torch_geometric")
def pna() -> Any:
    from torch_geometric.nn import PNAConv

    return _on_graph(PNAConv(4, 6, ["mean", "max", "std"], ["identity", "amplification"], torch.tensor([0, 2, 3])))


@model("graph transformer", "torch_geometric")
def graph_transformer() -> Any:
    from torch_geometric.nn import TransformerConv

    return _on_graph(TransformerConv(4, 6, heads=2, beta=True))


# flows: the loss is made from log densities


@model("NSF", "zuko")
def nsf() -> Any:
    from zuko.flows import NSF

    return Called(NSF(3, context=2, transforms=2, hidden_features=(8,)), lambda f, x, c: f(c).log_prob(x)), (
        real(3),
        real(2),
    )


@model("NAF", "zuko")
def naf() -> Any:
    from zuko.flows import NAF

    return Called(NAF(3, transforms=1, hidden_features=(8,)), lambda f, x: f().log_prob(x)), real(3)


@model("Gaussianization", "zuko")
def gaussianization() -> Any:
    from zuko.flows import GF

    return Called(GF(3, transforms=2, hidden_features=(8,)), lambda f, x: f().log_prob(x)), real(3)


@model("masked affine flow", "nflows")
def masked_affine() -> Any:
    from nflows.transforms import CompositeTransform, MaskedAffineAutoregressiveTransform, ReversePermutation

    steps = [MaskedAffineAutoregressiveTransform(features=3, hidden_features=8), ReversePermutation(features=3)]
    return CompositeTransform(steps), real(3)


@model("spline coupling", "nflows")
def spline_coupling() -> Any:
    from nflows.nn.nets import ResidualNet
    from nflows.transforms import PiecewiseRationalQuadraticCouplingTransform

    made = PiecewiseRationalQuadraticCouplingTransform(
        mask=torch.tensor([1, 0, 1, 0]),
        transform_net_create_fn=lambda i, o: ResidualNet(i, o, hidden_features=8, num_blocks=1),
        tails="linear",
        tail_bound=3.0,
        num_bins=4,
    )
    return made, real(4)


# Gaussian processes, differential equations


@model("exact GP, likelihood", "gpytorch")
def exact_gp() -> Any:
    """Each sample is a data set of its own."""
    import gpytorch

    class Process(gpytorch.models.GP):
        def __init__(self) -> None:
            super().__init__()
            self.mean = gpytorch.means.LinearMean(2)
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5, ard_num_dims=2))
            self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            prior = gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))
            return self.likelihood(prior).log_prob(y)

    return Process(), (real(6, 2), real(6))


@model("variational GP", "gpytorch")
def variational_gp() -> Any:
    import gpytorch

    class Process(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            points = torch.randn(4, 2)
            values = gpytorch.variational.CholeskyVariationalDistribution(4)
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, values))
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def call(process: nn.Module, x: Tensor) -> Any:
        found = process.train()(x)  # in eval it keeps a factor of the first sample's graph
        return found.mean, found.variance

    process = Process()
    process.variational_strategy.variational_params_initialized.fill_(1)
    return Called(process, call), real(5, 2)


class _Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(y)


def _solved(solver: str, **options: Any) -> tuple[nn.Module, Tensor]:
    import torchdiffeq

    solve = getattr(torchdiffeq, solver)
    return Called(_Field(), lambda f, x: solve(f, x, torch.tensor([0.0, 0.5, 1.0]), **options)[-1]), real(3)


@model("odeint, rk4", "torchdiffeq")
def odeint_rk4() -> Any:
    return _solved("odeint", method="rk4", options={"step_size": 0.25})


@model("odeint, dopri5", "torchdiffeq")
def odeint_dopri5() -> Any:
    return _solved("odeint", method="dopri5")


@model("odeint_adjoint", "torchdiffeq")
def odeint_adjoint() -> Any:
    return _solved("odeint_adjoint", method="rk4", options={"step_size": 0.25})


@model("closed-form continuous", "ncps")
def cfc() -> Any:
    from ncps.torch import CfC

    return CfC(3, 6), real(5, 3)


@model("liquid time constant", "ncps")
def ltc() -> Any:
    from ncps.torch import LTC
    from ncps.wirings import AutoNCP

    return LTC(3, AutoNCP(8, 2)), real(4, 3)


# attention of all kinds


@model("entmax attention", "entmax")
def entmax_attention() -> Any:
    from entmax import entmax15

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        return entmax15(layer(x) @ x.mT, dim=-1) @ x

    return Called(nn.Linear(4, 4), call), real(5, 4)


@model("sparsemax head", "entmax")
def sparsemax_head() -> Any:
    from entmax import sparsemax

    return Called(nn.Linear(4, 6), lambda layer, x: sparsemax(layer(x), dim=-1)), real(4)


@model("entmax, learned alpha", "entmax")
def entmax_alpha() -> Any:
    from entmax import entmax_bisect

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.alpha = nn.Linear(4, 6), nn.Parameter(torch.tensor([1.4]))

        def forward(self, x: Tensor) -> Tensor:
            return entmax_bisect(self.layer(x), self.alpha, dim=-1)

    return Head(), real(4)


def _x_decoder(**options: Any) -> tuple[nn.Module, Tensor]:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, **options)
    return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=8, attn_layers=layers), tokens()


@model("decoder, rotary", "x_transformers")
def x_rotary() -> Any:
    return _x_decoder(rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True)


@model("decoder, ALiBi", "x_transformers")
def x_alibi() -> Any:
    return _x_decoder(alibi_pos_bias=True, attn_num_mem_kv=2)


@model("decoder, top-k", "x_transformers")
def x_topk() -> Any:
    return _x_decoder(rel_pos_bias=True, attn_sparse_topk=3, shift_tokens=1)


@model("rotary attention", "rotary_embedding_torch")
def rotary() -> Any:
    from rotary_embedding_torch import RotaryEmbedding

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.turn = nn.Linear(8, 24), RotaryEmbedding(dim=4, learned_freq=True)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (6, 4)).transpose(1, 2).chunk(3, 1)
            q, k = self.turn.rotate_queries_or_keys(q), self.turn.rotate_queries_or_keys(k)
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Attention(), real(5, 8)


@model("local attention", "local_attention")
def local_attention() -> Any:
    from local_attention import LocalTransformer

    made = LocalTransformer(
        num_tokens=VOCABULARY,
        dim=16,
        depth=1,
        heads=2,
        dim_head=8,
        causal=True,
        local_attn_window_size=4,
        max_seq_len=8,
    )
    return made, tokens()


@model("linear attention", "linear_attention_transformer")
def linear_attention() -> Any:
    from linear_attention_transformer import LinearAttentionTransformerLM

    made = LinearAttentionTransformerLM(num_tokens=VOCABULARY, dim=16, heads=2, depth=1, max_seq_len=8, causal=False)
    return made, tokens()


@model("Performer", "performer_pytorch")
def performer() -> Any:
    from performer_pytorch import Performer

    return Performer(dim=16, depth=1, heads=2, dim_head=8, causal=False), real(6, 16)


@model("Perceiver IO", "perceiver_pytorch")
def perceiver_io() -> Any:
    from perceiver_pytorch import PerceiverIO

    made = PerceiverIO(
        dim=8, queries_dim=6, depth=1, num_latents=4, latent_dim=8, cross_heads=1, latent_heads=2, cross_dim_head=4,
        latent_dim_head=4, logits_dim=3,
    )  # fmt: skip
    queries = torch.randn(2, 6)
    return Called(made, lambda m, x: m(x, queries=queries)), real(5, 8)


@model("Conformer", "conformer")
def conformer() -> Any:
    from conformer import ConformerBlock

    return ConformerBlock(dim=8, dim_head=4, heads=2, ff_mult=2, conv_kernel_size=3), real(6, 8)


@model("soft mixture of experts", "soft_moe_pytorch")
def soft_moe() -> Any:
    from soft_moe_pytorch import SoftMoE

    return SoftMoE(dim=8, seq_len=6, num_experts=3), real(6, 8)


@model("ViT", "vit_pytorch")
def vit() -> Any:
    from vit_pytorch import ViT

    return ViT(image_size=8, patch_size=4, num_classes=3, dim=8, depth=1, heads=2, mlp_dim=8), real(3, 8, 8)


@model("gMLP", "g_mlp_pytorch")
def g_mlp() -> Any:
    from g_mlp_pytorch import gMLP

    return gMLP(num_tokens=VOCABULARY, dim=8, depth=2, seq_len=8, causal=True), tokens()


@model("MLP-Mixer", "mlp_mixer_pytorch")
def mlp_mixer() -> Any:
    from mlp_mixer_pytorch import MLPMixer

    return MLPMixer(image_size=8, channels=3, patch_size=4, dim=8, depth=2, num_classes=3), real(3, 8, 8)


@model("Titans memory", "titans_pytorch")
def titans() -> Any:
    """It takes gradients with torch.func inside its forward."""
    from titans_pytorch import NeuralMemory

    return Called(NeuralMemory(dim=8, chunk_size=4), lambda m, x: m(x)[0]), real(8, 8)


# the rest


@model("einops layers", "einops")
def einops_layers() -> Any:
    from einops.layers.torch import EinMix, Rearrange, Reduce

    made = nn.Sequential(
        Rearrange("b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2),
        EinMix("b t i -> b t o", weight_shape="t i o", bias_shape="t o", t=4, i=12, o=6),
        nn.GELU(),
        Reduce("b t o -> b o", "max"),
    )
    return made, real(3, 4, 4)


def _quantized(name: str, **options: Any) -> tuple[nn.Module, Tensor]:
    import vector_quantize_pytorch

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(4, 8), nn.Linear(8, 3)
            self.quantize = getattr(vector_quantize_pytorch, name)(**options)

        def forward(self, x: Tensor) -> Any:
            found = self.quantize(self.before(x))
            return self.after(found[0]), found[2] if len(found) > 2 else found[0]

    return Net(), real(5, 4)


@model("vector quantizer", "vector_quantize_pytorch")
def vector_quantize() -> Any:
    return _quantized("VectorQuantize", dim=8, codebook_size=6, learnable_codebook=True, ema_update=False)


@model("finite scalar quantizer", "vector_quantize_pytorch")
def fsq() -> Any:
    return _quantized("FSQ", levels=[5, 3, 3], dim=8)


@model("lookup-free quantizer", "vector_quantize_pytorch")
def lfq() -> Any:
    return _quantized("LFQ", codebook_size=16, dim=8)


@model("TabNet", "pytorch_tabnet")
def tabnet() -> Any:
    from pytorch_tabnet.tab_network import TabNet

    made = TabNet(
        5, 3, n_d=4, n_a=4, n_steps=2, cat_idxs=[], cat_dims=[], cat_emb_dim=[], group_attention_matrix=torch.eye(5)
    )
    return made, real(5)


@model("FT-Transformer", "rtdl_revisiting_models")
def ft_transformer() -> Any:
    from rtdl_revisiting_models import FTTransformer

    made = FTTransformer(
        n_cont_features=3, cat_cardinalities=[4, 5], d_out=2, n_blocks=2, d_block=8, attention_n_heads=2,
        attention_dropout=0.0, ffn_d_hidden_multiplier=2.0, ffn_dropout=0.0, residual_dropout=0.0,
    )  # fmt: skip
    return made, (real(3), torch.randint(4, (N, 2)))


@model("periodic embeddings", "rtdl_num_embeddings")
def periodic() -> Any:
    from rtdl_num_embeddings import PeriodicEmbeddings

    return PeriodicEmbeddings(4, 6, n_frequencies=5, lite=False), real(4)


@model("TabTransformer", "tab_transformer_pytorch")
def tab_transformer() -> Any:
    from tab_transformer_pytorch import TabTransformer

    made = TabTransformer(categories=(4, 5), num_continuous=3, dim=8, dim_out=2, depth=1, heads=2)
    return made, (torch.randint(4, (N, 2)), real(3))


@model("UNet", "monai")
def monai_unet() -> Any:
    from monai.networks.nets import UNet

    return UNet(2, 1, 2, channels=(4, 8), strides=(2,), num_res_units=1), real(1, 8, 8)


@model("UNETR", "monai")
def monai_unetr() -> Any:
    from monai.networks.nets import UNETR

    made = UNETR(1, 2, img_size=(16, 16), feature_size=4, hidden_size=12, mlp_dim=8, num_heads=2, spatial_dims=2)
    return made, real(1, 16, 16)


def _timm(name: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=3, **options)


@model("ConvNeXt", "timm")
def timm_convnext() -> Any:
    return _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(4, 8, 8, 8)), real(3, 32, 32)


@model("EVA", "timm")
def timm_eva() -> Any:
    return _timm("eva02_tiny_patch14_224", img_size=28, embed_dim=24, depth=1, num_heads=2), real(3, 28, 28)


@model("EfficientNet", "timm")
def timm_efficientnet() -> Any:
    return _timm("efficientnet_lite0", channel_multiplier=0.1, depth_multiplier=0.1), real(3, 32, 32)


@model("EfficientNet", "efficientnet_pytorch")
def efficientnet() -> Any:
    from efficientnet_pytorch import EfficientNet

    return EfficientNet.from_name("efficientnet-b0", num_classes=3, width_coefficient=0.2, image_size=32), real(
        3, 32, 32
    )


@model("equivariant product", "e3nn")
def e3nn_product() -> Any:
    from e3nn import o3

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = o3.Linear("4x0e + 2x1o", "4x0e + 2x1o")
            self.product = o3.FullyConnectedTensorProduct("4x0e + 2x1o", "1x0e + 1x1o", "3x0e + 1x1o")

        def forward(self, x: Tensor, r: Tensor) -> Tensor:
            directions = o3.spherical_harmonics("0e + 1o", r, normalize=True)
            return self.product(self.mix(x), directions)

    return Net(), (real(10), real(3))


@model("EGNN", "egnn_pytorch")
def egnn() -> Any:
    from egnn_pytorch import EGNN

    return EGNN(dim=6, m_dim=4, num_nearest_neighbors=3), (real(5, 6), real(5, 3))


@model("SIREN", "siren_pytorch")
def siren() -> Any:
    from siren_pytorch import SirenNet

    return SirenNet(dim_in=2, dim_hidden=8, dim_out=3, num_layers=2), real(2)


@model("LoRA, merged weights", "loralib")
def loralib_linear() -> Any:
    import loralib

    return nn.Sequential(
        loralib.Linear(4, 6, r=2, merge_weights=False),
        nn.Tanh(),
        loralib.MergedLinear(6, 9, r=2, enable_lora=[True, False, True], merge_weights=False),
    ), real(4)


@model("Mamba", "mambapy")
def mamba_py() -> Any:
    """Its parallel scan is an old-style autograd Function that writes in place."""
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=8, n_layers=1, d_state=4)), real(8, 8)


@model("spiking net", "snntorch")
def spiking() -> Any:
    import snntorch

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
            self.fire = snntorch.Leaky(beta=0.8, learn_beta=True, learn_threshold=True)
            self.out = snntorch.Leaky(beta=0.7)

        def forward(self, x: Tensor) -> Any:
            a, b, kept = self.fire.init_leaky(), self.out.init_leaky(), []
            for _ in range(4):
                spikes, a = self.fire(self.first(x), a)
                spikes, b = self.out(self.second(spikes.to(x)), b)  # its spikes are float32, always
                kept.append(b)
            return torch.stack(kept, 1)

    return Net(), real(4)


@model("temporal convolutions", "pytorch_tcn")
def tcn() -> Any:
    from pytorch_tcn import TCN

    return TCN(3, [4, 4], kernel_size=2, use_norm="weight_norm"), real(3, 8)


@model("autoregressive spline", "normflows")
def normflows_flow() -> Any:
    import normflows

    steps = [normflows.flows.AutoregressiveRationalQuadraticSpline(3, 1, 8)]
    flow = normflows.NormalizingFlow(normflows.distributions.DiagGaussian(3), steps)
    return Called(flow, lambda f, x: f.log_prob(x)), real(3)


@model("neural CDE", "torchcde")
def neural_cde() -> Any:
    import torchcde

    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 8)

        def forward(self, t: Tensor, z: Tensor) -> Tensor:
            return self.net(z).tanh().unflatten(-1, (4, 2))

    def call(field: nn.Module, x: Tensor) -> Tensor:
        path = torchcde.CubicSpline(torchcde.hermite_cubic_coefficients_with_backward_differences(x))
        start = torch.zeros(x.shape[0], 4)
        return torchcde.cdeint(
            path, field, start, t=path.interval, adjoint=False, method="rk4", options={"step_size": 1.0}
        )[:, -1]

    return Called(Field(), call), real(5, 2)
