"""Qwen3.5 and 3.6, their dense text models (Qwen team 2026): gated delta nets, in each fourth layer an attention."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Entry, Expect, Ignore
from .._family import Family, MultimodalModel
from .._layer_attributes import every
from .._predictors import NAMED_PREDICTOR
from .._rotary_attributes import RotaryPositions
from ._common import decoder_attributes, EDGES, GATED, head_norm_weights, PRE_NORMS
from ._decoder import decoder, gated_mlp, norm, pre_norm_block
from ._delta_nets import delta_net, GATED_ATTENTION, gated_attention, NET_ATTRIBUTES, NetConfig, SPLIT_NET_WEIGHTS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen35Config(NetConfig):
    """The config of a dense Qwen3.5."""


def build_qwen3_5(config: Qwen35Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a dense Qwen3.5 with random weights."""

    def block(is_attention: bool, key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        mixed = (gated_attention if is_attention else delta_net)(config, mixer)
        return pre_norm_block(config, mixed, gated_mlp(config, key=feed_forward), offset=1.0)

    kinds = [layer in config.attention_layers for layer in range(config.layers)]
    return decoder(config, block, kinds, final_norm=norm(config, offset=1.0), key=key)


# The three positions of an image's parts are equal for text.
QWEN35_POSITIONS = RotaryPositions(skipped=("mrope_section", "mrope_interleaved"))
QWEN35_ATTRIBUTES: tuple[Entry, ...] = (
    *NET_ATTRIBUTES,
    Expect("attn_output_gate", True, written=False),
    Expect("mamba_ssm_dtype", "float32", written=False),
    Ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),  # attributes of predictors
)
QWEN35_WEIGHTS = (*EDGES, *GATED_ATTENTION, *head_norm_weights(), *SPLIT_NET_WEIGHTS, *PRE_NORMS)

_PRESETS = {
    "qwen3.5-byte-500k": Qwen35Config(
        *(256, 64, 4, 2, 1, 192),
        attention_layers=every(4, 4),
        net_heads=4,
        net_kv_heads=2,
        net_head_dim=16,
        net_v_dim=16,
        head_dim=32,
        theta=1e4,
        bias=True,
        tied=True,
    ),
    "qwen3.5-9b": Qwen35Config(248_320, 4096, 32, 16, 4, 12_288, attention_layers=every(4, 32)),
    "qwen3.5-27b": Qwen35Config(248_320, 5120, 64, 24, 4, 17_408, net_heads=48, attention_layers=every(4, 64)),
}

QWEN3_5 = Family(
    "qwen3_5",
    Qwen35Config,
    build_qwen3_5,
    _PRESETS,
    "Qwen3_5ForCausalLM",
    "qwen3_5_text",
    (*decoder_attributes(QWEN35_POSITIONS, head_dim=256, kv_heads=4, max_seq=32_768), *QWEN35_ATTRIBUTES),
    (*QWEN35_WEIGHTS, *GATED),
    predictor=NAMED_PREDICTOR,
    multimodal=(MultimodalModel("qwen3_5"),),
)
