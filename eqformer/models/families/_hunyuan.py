"""Hunyuan (Tencent 2025): a Llama whose queries and keys are normed after their rotation; some models have experts.

Hy3 (Tencent 2026) norms queries and keys before their rotation, and has DeepSeek-V3's mixtures.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, NTKScaling, RotaryThenNorm, Transformer
from .._attributes import Activation, Attribute, Count, Entry, Expect, Fields, Ignore, Unpublished
from .._config_types import as_list, Attributes, Length, NotNegative, Number, Positive, PublishedConfig, Size
from .._family import DecoderConfig, Family
from .._layer_attributes import layers_of
from .._rotary_attributes import RotaryPositions
from .._rotary_scaling import either_rotary_parameters, unknown_parameters, WithRotary
from .._weight_rules import Rule
from ._common import (
    ATTENTION,
    decoder_attributes,
    EDGES,
    GATED,
    gated_weights,
    LAYER,
    LLAMA_WEIGHTS,
    PRE_NORMS,
    StatedHeadSize,
)
from ._decoder import attention, decoder, gated_mlp, head_norms, pre_norm_block, rotary_of
from ._mixtures import DenseLayersConfig, LayerMixtures, mixture, SigmoidMoEConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class HunyuanConfig(DecoderConfig):
    """The config of a dense Hunyuan."""

    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether the attention's four projections have biases."""


def build_hunyuan(config: HunyuanConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a dense Hunyuan with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, bias=config.bias, rotary=_rotary_then_norm(config), key=mixer_key)
        return pre_norm_block(config, mixer, gated_mlp(config, key=feed_forward_key))

    return decoder(config, block, key=key)


def _rotary_then_norm(config: DecoderConfig) -> RotaryThenNorm:
    """Return rotary positions, with norms of queries and keys after them."""
    rotary = rotary_of(config, config.head_size, scaling=config.scaling)
    return RotaryThenNorm(rotary=rotary, **head_norms(config))


class AlphaRotaryPositions(RotaryPositions):
    """Rotary positions in which a `dynamic` scaling with an `alpha` means a larger base, for rows of any length."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `theta` and `scaling`."""
        parameters = either_rotary_parameters(published)
        if parameters.get("rope_type", parameters.get("type")) != "dynamic" or parameters.get("alpha") is None:
            return super().read(published)
        if unknown := unknown_parameters({name: value for name, value in parameters.items() if name not in _READ_HERE}):
            published.refuse(f"rope_type='dynamic' with an alpha has attributes that are not known: {unknown}.")
        theta = published.read("rope_theta", Positive, self.theta)
        theta = theta if parameters.get("rope_theta") is None else parameters["rope_theta"]
        return {"theta": theta, "scaling": NTKScaling(parameters["alpha"])}

    def write(self, config: WithRotary) -> Attributes:
        """Return `rope_theta` and `rope_scaling`."""
        if not isinstance(config.scaling, NTKScaling):
            return super().write(config)
        parameters = {"rope_type": "dynamic", "type": "dynamic", "alpha": config.scaling.alpha, "factor": 1.0}
        return {"rope_theta": config.theta, "rope_scaling": parameters}


_READ_HERE = ("rope_type", "type", "rope_theta")

_ATTRIBUTES = (
    *decoder_attributes(AlphaRotaryPositions()),
    StatedHeadSize(),  # Transformers does not compute `head_dim` from other sizes.
    Attribute("bias", "attention_bias", False),
    Activation(),
    Expect("mlp_bias", False, written=False),
    Expect("norm_type", "rms", written=False),
    Expect("use_qk_norm", True, written=False),
    Expect("use_cla", False, written=False),
    Expect("use_rotary_pos_emb", True, written=False),
    Ignore("attention_head_dim", "org_vocab_size"),  # repeat other attributes
    Ignore("cla_share_factor", "add_classification_head", "class_num", "dense_list", "pool_type"),  # not in use
    *(Ignore(f"{name}_id") for name in ("eod_token", "pad", "mask_init", "im_start", "im_end", "im_newline")),
    *(Ignore(f"{name}_id") for name in ("text_start", "text_end", "video_start", "video_end")),
)
_WEIGHTS = (
    *(*EDGES, *ATTENTION, *PRE_NORMS),
    Rule(f"{LAYER}self_attn.query_layernorm.weight", "mixer.layer.rotary.query_norm.weight"),
    Rule(f"{LAYER}self_attn.key_layernorm.weight", "mixer.layer.rotary.key_norm.weight"),
)

_PRESETS = {
    "hunyuan-byte-500k": HunyuanConfig(256, 96, 4, 6, 2, 256, head_dim=16, bias=True, tied=True),
    "hunyuan-7b": HunyuanConfig(128_167, 4096, 32, 32, 8, 14_336, head_dim=128, scaling=NTKScaling(1000.0), tied=True),
}

HUNYUAN = Family(
    "hunyuan_v1_dense",
    HunyuanConfig,
    build_hunyuan,
    _PRESETS,
    "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_dense",
    (*_ATTRIBUTES, Expect("num_experts", 1, written=False)),
    (*_WEIGHTS, *GATED),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HunyuanMoEConfig(DecoderConfig):
    """The config of a Hunyuan with experts; `mlp` is the width of an expert and of the shared expert."""

    top_ks: tuple[Size, ...]
    """The number of experts that each token chooses, for each layer."""
    experts: Size = 64
    """The number of experts of a layer."""
    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether the attention's four projections have biases."""
    balance: NotNegative = 0.001
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""

    def __post_init__(self):
        if len(self.top_ks) != self.layers:
            raise ValueError(
                f"HunyuanMoEConfig(layers={self.layers}, top_ks={self.top_ks}): give a number for each layer."
            )

    @property
    def top_k(self) -> int:
        """The largest number of experts that a token chooses in a layer."""
        return max(self.top_ks)


def build_hunyuan_moe(config: HunyuanMoEConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Hunyuan with experts and random weights."""

    def block(top_k: int, key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        router_key, experts_key, shared_key = jax.random.split(feed_forward_key, 3)
        mixer = attention(config, bias=config.bias, rotary=_rotary_then_norm(config), key=mixer_key)
        feed_forward = mixture(
            config,
            lambda key: gated_mlp(config, key=key),
            shared=gated_mlp(config, key=shared_key),
            top_k=top_k,
            normalize=True,
            router=router_key,
            experts=experts_key,
        )
        return pre_norm_block(config, mixer, feed_forward)

    return decoder(config, block, config.top_ks, key=key)


class _ForEachLayer(Entry):
    """Attributes that are stated once or layer by layer, such as the number of a token's experts."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `top_ks`; refuse anything but one shared expert, as wide as the other experts."""
        layers, width = layers_of(published), published.read("intermediate_size", Size)
        for name, only in (("num_shared_expert", 1), ("moe_intermediate_size", width)):
            stated = published.read(name, Size | list[Size], only)
            if {*as_list(stated)} != {only}:
                published.refuse(f"{name}={stated} is not supported for this family, which has {only} in every layer.")
        stated = published.read("moe_topk", Size | list[Size], 1)
        return {"top_ks": tuple(stated) if isinstance(stated, list) else (stated,) * layers}

    def write(self, config: HunyuanMoEConfig) -> Attributes:
        """Return the number of experts that each token chooses."""
        return {"moe_topk": list(config.top_ks) if len({*config.top_ks}) > 1 else config.top_k}


_MOE_PRESETS = {
    "hunyuan-moe-byte-500k": HunyuanMoEConfig(
        256, 64, 4, 4, 2, 32, top_ks=(4,) * 4, experts=12, head_dim=16, tied=True
    ),
    "hunyuan-a13b": HunyuanMoEConfig(
        128_167, 4096, 32, 32, 8, 3072, top_ks=(8,) * 32, head_dim=128, scaling=NTKScaling(1000.0), tied=True
    ),
}

HUNYUAN_MOE = Family(
    "hunyuan_v1_moe",
    HunyuanMoEConfig,
    build_hunyuan_moe,
    _MOE_PRESETS,
    "HunYuanMoEV1ForCausalLM",
    "hunyuan_v1_moe",
    (
        *_ATTRIBUTES,
        _ForEachLayer(),
        Count("experts", ("num_local_experts", "num_experts"), 1, written=("num_experts",)),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        *(Expect(name, True, written=False) for name in ("norm_topk_prob", "use_mixed_mlp_moe")),
        # Attributes for images, which the published models do not read.
        *(Ignore(f"vit_{name}") for name in ("input_resolution", "mapping_type", "norm_type", "patch", "token")),
        Ignore("anyres_pooling_size", "num_media_embeds"),
    ),
    (
        *_WEIGHTS,
        Rule(f"{LAYER}mlp.gate.wg.weight", "feed_forward.layer.router.linear.weight"),
        *gated_weights("feed_forward.layer.experts.mlps", prefix=f"{LAYER}mlp.experts.{{expert}}."),
        *gated_weights("feed_forward.layer.shared", prefix=f"{LAYER}mlp.shared_mlp."),
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hy3Config(SigmoidMoEConfig, DenseLayersConfig):
    """The config of a Hy3; `mlp` is the width of a dense layer, `expert_mlp` the width of an expert."""

    bias: bool = False
    """Whether the attention's four projections have biases."""
    experts: Size = 192
    scale: Number = 2.826
    theta: Positive = 11_158_840.0
    eps: NotNegative = 1e-5
    max_seq: Length = 131_072


def build_hy3(config: Hy3Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Hy3 with random weights."""

    def block(is_mixture: bool, key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(config, bias=config.bias, **head_norms(config), key=mixer_key)
        return pre_norm_block(config, mixer, config.feed_forward(is_mixture, feed_forward_key))

    return decoder(config, block, config.mixtures, key=key)


_HY3_PRESETS = {
    "hy3-byte-500k": Hy3Config(
        256, 64, 4, 4, 2, 128, expert_mlp=32, experts=12, top_k=4, head_dim=16, theta=1e4, tied=True
    ),
}
_MIXED = "feed_forward.layer."
HY3 = Family(
    "hy_v3",
    Hy3Config,
    build_hy3,
    _HY3_PRESETS,
    "HYV3ForCausalLM",
    "hy_v3",
    (
        *decoder_attributes(RotaryPositions(11_158_840.0), head_dim=128, kv_heads=8, max_seq=131_072),
        Count("expert_mlp", "moe_intermediate_size", 1536),
        Count("experts", ("num_local_experts", "num_experts"), 192, written=("num_experts",)),
        Count("top_k", "num_experts_per_tok", 8),
        Count("shared", "num_shared_experts", 1),
        Attribute("scale", "router_scaling_factor", 2.826),
        LayerMixtures(),
        Attribute("bias", "attention_bias", False),
        Activation(),
        *(Unpublished(name, 1, "there are no groups of experts") for name in ("groups", "kept_groups")),
        Unpublished("normalize", True, "the weights of a token's experts always add up to the scale"),
        Unpublished("balance", 0.0001, "no attribute states the weight of a balance loss"),
        Expect("mlp_bias", False, written=False),
        Ignore("enable_moe_fp32_combine"),  # The dtype in which outputs of experts are added.
    ),
    (
        *LLAMA_WEIGHTS,
        Rule(f"{LAYER}mlp.router.gate.weight", f"{_MIXED}router.linear.weight"),
        Rule(f"{LAYER}mlp.expert_bias", f"{_MIXED}router.selection_bias"),
        *gated_weights(f"{_MIXED}experts.mlps", prefix=f"{LAYER}mlp.experts.{{expert}}."),
        *gated_weights(f"{_MIXED}shared", prefix=f"{LAYER}mlp.shared_mlp."),
    ),
)
