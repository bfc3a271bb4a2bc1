"""Hunyuan, its mixtures (Tencent 2025, Hunyuan-A13B): experts beside one that every token has, in every layer."""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, NTKScaling, Transformer
from .._attributes import Attribute, Attributes, Count, Entry, Expect, Fields, Ignore
from .._config_types import NotNegative, PublishedConfig, Size
from .._family import DecoderConfig, Family
from .._layer_attributes import layers_of
from .._weight_rules import Rule
from ._common import gated_weights, LAYER
from ._decoder import attention, decoder, gated_mlp, pre_norm_block
from ._hunyuan import HUNYUAN_ATTRIBUTES, HUNYUAN_WEIGHTS, rotary_then_norm
from ._mixtures import mixture


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
    """The weight of `LoadBalance`, over the batch."""

    def __post_init__(self):
        if len(self.top_ks) != self.layers:
            raise ValueError(f"HunyuanMoEConfig(layers={self.layers}, top_ks={self.top_ks}): give one for each layer.")

    @property
    def top_k(self) -> int:
        """The largest number of experts that a token chooses in a layer."""
        return max(self.top_ks)


def build_hunyuan_moe(config: HunyuanMoEConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return a Hunyuan with experts and random weights."""

    def block(top_k: int, key: Key[Array, ""]) -> Block:
        mixer, feed_forward = jax.random.split(key)
        router, experts, shared = jax.random.split(feed_forward, 3)
        attended = attention(config, bias=config.bias, rotary=rotary_then_norm(config), key=mixer)
        mixed = mixture(
            config,
            lambda key: gated_mlp(config, key=key),
            shared=gated_mlp(config, key=shared),
            top_k=top_k,
            normalise=True,
            router=router,
            experts=experts,
        )
        return pre_norm_block(config, attended, mixed)

    return decoder(config, block, config.top_ks, key=key)


class _ForEachLayer(Entry):
    """Attributes that are stated once or layer by layer: the number of a token's experts, and others."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `top_ks`; refuse other shared experts than one as wide as the experts."""
        layers, width = layers_of(published), published.read("intermediate_size", Size)
        for name, only in (("num_shared_expert", 1), ("moe_intermediate_size", width)):
            stated = published.read(name, Size | list[Size], only)
            if {*(stated if isinstance(stated, list) else [stated])} != {only}:
                published.refuse(f"{name}={stated} is not supported for this family, which has {only} in every layer.")
        stated = published.read("moe_topk", Size | list[Size], 1)
        return {"top_ks": tuple(stated) if isinstance(stated, list) else (stated,) * layers}

    def write(self, config: HunyuanMoEConfig) -> Attributes:
        """Return the number of experts that each token chooses."""
        return {"moe_topk": list(config.top_ks) if len({*config.top_ks}) > 1 else config.top_k}


_PRESETS = {
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
    _PRESETS,
    "HunYuanMoEV1ForCausalLM",
    "hunyuan_v1_moe",
    (
        *HUNYUAN_ATTRIBUTES,
        _ForEachLayer(),
        Count("experts", ("num_experts", "num_local_experts"), 1),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        *(Expect(name, True, written=False) for name in ("norm_topk_prob", "use_mixed_mlp_moe")),
        # Attributes for images, which the published models do not read.
        *(Ignore(f"vit_{name}") for name in ("input_resolution", "mapping_type", "norm_type", "patch", "token")),
        Ignore("anyres_pooling_size", "num_media_embeds"),
    ),
    (
        *HUNYUAN_WEIGHTS,
        Rule(f"{LAYER}mlp.gate.wg.weight", "feed_forward.layer.router.linear.weight"),
        *gated_weights("feed_forward.layer.experts.mlps", prefix=f"{LAYER}mlp.experts.{{expert}}."),
        *gated_weights("feed_forward.layer.shared", prefix=f"{LAYER}mlp.shared_mlp."),
    ),
)
