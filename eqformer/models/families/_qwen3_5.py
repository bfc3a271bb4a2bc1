"""Text models of Qwen3.5 and 3.6 (Qwen team 2026): delta nets, attention in each fourth layer; mixtures too."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Attribute, Count, Entry, Expect, Ignore
from .._config_types import NotNegative, Size
from .._family import Family, MultimodalModel
from .._layer_attributes import every
from .._rotary_attributes import RotaryPositions
from .._weight_rules import NAMED_PREDICTOR
from ._common import decoder_attributes, EDGES, GATED, head_norm_weights, PRE_NORMS
from ._decoder import decoder, gated_mlp, norm, pre_norm_block
from ._delta_nets import delta_net, GATED_ATTENTION, gated_attention, NET_ATTRIBUTES, NetConfig, SPLIT_NET_WEIGHTS
from ._mixtures import FUSED, GATED_SHARED, MIXTURE, mixture_beside_gated_shared


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
_POSITIONS = RotaryPositions(skipped=("mrope_section", "mrope_interleaved"))
_ATTRIBUTES: tuple[Entry, ...] = (
    *NET_ATTRIBUTES,
    Expect("attn_output_gate", True, written=False),
    Expect("mamba_ssm_dtype", "float32", written=False),
    Ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),  # attributes of predictors
)
_WEIGHTS = (*EDGES, *GATED_ATTENTION, *head_norm_weights(), *SPLIT_NET_WEIGHTS, *PRE_NORMS)

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
    (*decoder_attributes(_POSITIONS, head_dim=256, kv_heads=4, max_seq=32_768), *_ATTRIBUTES),
    (*_WEIGHTS, *GATED),
    predictor=NAMED_PREDICTOR,
    multimodal=(MultimodalModel("qwen3_5"),),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen35MoEConfig(NetConfig):
    """The config of a Qwen3.5 with experts; `mlp` is an expert's width, `shared_mlp` the shared expert's."""

    shared_mlp: Size
    """Hidden features of the shared expert."""
    experts: Size = 256
    """The number of experts of a layer."""
    top_k: Size = 8
    """The number of experts that each token chooses."""
    balance: NotNegative = 0.001
    """The weight of `LoadBalance`, over the batch."""

    @property
    def expert_mlp(self) -> int:
        """Hidden features of an expert."""
        return self.mlp

    @property
    def normalise(self) -> bool:
        """Whether the weights of a token's experts are normalized to add up to 1."""
        return True


def build_qwen3_5_moe(config: Qwen35MoEConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Qwen3.5 with experts and random weights."""

    def block(is_attention: bool, key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        mixed = (gated_attention if is_attention else delta_net)(config, mixer)
        return pre_norm_block(config, mixed, mixture_beside_gated_shared(config, feed_forward), offset=1.0)

    kinds = [layer in config.attention_layers for layer in range(config.layers)]
    return decoder(config, block, kinds, final_norm=norm(config, offset=1.0), key=key)


_MOE_PRESETS = {
    "qwen3.5-moe-byte-500k": Qwen35MoEConfig(
        *(256, 64, 4, 2, 1, 32),
        attention_layers=every(4, 4),
        net_heads=4,
        net_kv_heads=2,
        net_head_dim=16,
        net_v_dim=16,
        head_dim=32,
        shared_mlp=32,
        experts=12,
        top_k=4,
        theta=1e4,
        tied=True,
    ),
    "qwen3.5-35b-a3b": Qwen35MoEConfig(248_320, 2048, 40, 16, 2, 512, shared_mlp=512, attention_layers=every(4, 40)),
}

QWEN3_5_MOE = Family(
    "qwen3_5_moe",
    Qwen35MoEConfig,
    build_qwen3_5_moe,
    _MOE_PRESETS,
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    (
        *decoder_attributes(_POSITIONS, head_dim=256, kv_heads=2, mlp="moe_intermediate_size", max_seq=32_768),
        *_ATTRIBUTES,
        Attribute("shared_mlp", "shared_expert_intermediate_size", 512),
        Count("experts", ("num_experts", "num_local_experts"), 256),
        Count("top_k", "num_experts_per_tok", 8),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Ignore("intermediate_size"),  # a width of dense layers, which the family lacks
    ),
    (*_WEIGHTS, *MIXTURE, *FUSED, *GATED_SHARED),
    predictor=NAMED_PREDICTOR,
    multimodal=(MultimodalModel("qwen3_5_moe"),),
)
