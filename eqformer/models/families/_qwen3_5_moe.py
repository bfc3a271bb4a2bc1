"""Qwen3.5 and 3.6, the text models of their mixtures (Qwen team 2026): a Qwen3-Next with experts in every layer."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Attribute, Count, Ignore
from .._config_types import NotNegative, Size
from .._family import Family, MultimodalModel
from .._layer_attributes import every
from .._predictors import NAMED_PREDICTOR
from ._common import decoder_attributes
from ._decoder import decoder, norm, pre_norm_block
from ._delta_nets import delta_net, gated_attention, NetConfig
from ._mixtures import FUSED, GATED_SHARED, MIXTURE, mixture_beside_gated_shared
from ._qwen3_5 import QWEN35_ATTRIBUTES, QWEN35_POSITIONS, QWEN35_WEIGHTS


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


_PRESETS = {
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
    _PRESETS,
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    (
        *decoder_attributes(QWEN35_POSITIONS, head_dim=256, kv_heads=2, mlp="moe_intermediate_size", max_seq=32_768),
        *QWEN35_ATTRIBUTES,
        Attribute("shared_mlp", "shared_expert_intermediate_size", 512),
        Count("experts", ("num_experts", "num_local_experts"), 256),
        Count("top_k", "num_experts_per_tok", 8),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Ignore("intermediate_size"),  # a width of dense layers, which the family lacks
    ),
    (*QWEN35_WEIGHTS, *MIXTURE, *FUSED, *GATED_SHARED),
    predictor=NAMED_PREDICTOR,
    multimodal=(MultimodalModel("qwen3_5_moe"),),
)
