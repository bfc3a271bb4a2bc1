"""Hunyuan, its dense models (Tencent 2025): a Llama whose queries and keys are normed after their rotation."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, NTKScaling, RotaryThenNorm, Transformer
from .._attributes import Activation, Attribute, Attributes, Expect, Fields, Ignore
from .._config_types import NotNegative, Positive, PublishedConfig
from .._family import DecoderConfig, Family
from .._rotary_attributes import RotaryPositions
from .._rotary_scaling import either_rotary_parameters, unknown_parameters, WithRotary
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, GATED, LAYER, PRE_NORMS, StatedHeadSize
from ._decoder import attention, decoder, gated_mlp, head_norms, pre_norm_block, rotary_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class HunyuanConfig(DecoderConfig):
    """The config of a dense Hunyuan."""

    eps: NotNegative = 1e-5
    bias: bool = False
    """Whether the attention's four projections have biases."""


def build_hunyuan(config: HunyuanConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a dense Hunyuan with random weights."""

    def block(key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        attended = attention(config, bias=config.bias, rotary=rotary_then_norm(config), key=mixer)
        return pre_norm_block(config, attended, gated_mlp(config, key=feed_forward))

    return decoder(config, block, key=key)


def rotary_then_norm(config: DecoderConfig) -> RotaryThenNorm:
    """Return rotary positions, with norms of queries and keys after them."""
    rotary = rotary_of(config, config.head_size, scaling=config.scaling)
    return RotaryThenNorm(rotary=rotary, **head_norms(config))


class AlphaRotaryPositions(RotaryPositions):
    """Rotary positions whose `dynamic` scaling with an `alpha` stands for a larger base at any length."""

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
        """Return the older attributes."""
        if not isinstance(config.scaling, NTKScaling):
            return super().write(config)
        parameters = {"rope_type": "dynamic", "type": "dynamic", "alpha": config.scaling.alpha, "factor": 1.0}
        return {"rope_theta": config.theta, "rope_scaling": parameters}


_READ_HERE = ("rope_type", "type", "rope_theta")

HUNYUAN_ATTRIBUTES = (
    *(*decoder_attributes(AlphaRotaryPositions()), StatedHeadSize()),  # transformers does not compute it
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
HUNYUAN_WEIGHTS = (
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
    (*HUNYUAN_ATTRIBUTES, Expect("num_experts", 1, written=False)),
    (*HUNYUAN_WEIGHTS, *GATED),
)
