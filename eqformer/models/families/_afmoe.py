"""AFMoE (Arcee AI 2025; Trinity): gated attention, four norms a layer, and DeepSeek-V3's mixtures.

Only layers with a window have rotary positions.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Block, Transformer
from .._attributes import Activation, Attribute, Count, Expect, Ignore, Unpublished
from .._config_types import Index, Length, NotNegative
from .._family import Family
from .._layer_attributes import all_but_every, Period, Windows
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, GATED, head_norm_weights, INTO_HEADS, LAYER, norm_weights
from ._decoder import attention, decoder, four_norm_block, head_norms, layer_windows, rotary_of
from ._mixtures import MIXTURE, SHARED, SigmoidMoEConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class AFMoEConfig(SigmoidMoEConfig):
    """The config of an AFMoE; `mlp` is the width of a dense layer, `expert_mlp` the width of an expert."""

    window_layers: tuple[Index, ...]
    """The indices of the layers with a `window` and rotary positions; the other layers have neither."""
    window: Length = 2048
    """The number of tokens that the layers of `window_layers` see."""
    embedding_scaled: bool = True
    """Whether embeddings are multiplied by the root of `embed`."""
    first_dense: Index = 2
    eps: NotNegative = 1e-5
    max_seq: Length = 131_072


def build_afmoe(config: AFMoEConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return an AFMoE with random weights."""
    rotary = rotary_of(config, config.head_size, scaling=config.scaling)

    def block(kind: tuple[int | None, bool], key: Key[Array, ""]) -> Block:
        window, is_mixture = kind
        mixer_key, feed_forward_key = jax.random.split(key)
        mixer = attention(
            config,
            window=window,
            rotary=None if window is None else rotary,
            gate=True,
            **head_norms(config),
            key=mixer_key,
        )
        return four_norm_block(config, mixer, config.feed_forward(is_mixture, feed_forward_key))

    kinds = [(window, layer >= config.first_dense) for layer, window in enumerate(layer_windows(config))]
    scale = config.embed**0.5 if config.embedding_scaled else None
    return decoder(config, block, kinds, embedding_scale=scale, key=key)


_PRESETS = {
    "afmoe-byte-500k": AFMoEConfig(
        *(256, 64, 4, 4, 2, 96),
        expert_mlp=32,
        experts=12,
        top_k=4,
        first_dense=1,
        head_dim=16,
        window_layers=all_but_every(4, 4),
        window=64,
        tied=True,
    ),
    "trinity-mini": AFMoEConfig(
        *(200_192, 2048, 32, 32, 4, 6144),
        expert_mlp=1024,
        window_layers=all_but_every(4, 32),
        head_dim=128,
        scale=2.826,
    ),
}

_NORMS = norm_weights(
    mixer="input_layernorm",
    mixer_output="post_attention_layernorm",
    feed_forward="pre_mlp_layernorm",
    feed_forward_output="post_mlp_layernorm",
)
AFMOE = Family(
    "afmoe",
    AFMoEConfig,
    build_afmoe,
    _PRESETS,
    "AfmoeForCausalLM",
    "afmoe",
    (
        *decoder_attributes(head_dim=128, max_seq=16_384),
        Windows(1024, Period(4, ("global_attn_every_n_layers",), but=True)),
        Count("expert_mlp", "moe_intermediate_size", 1408),
        Count("experts", "num_experts", 64),
        Count("top_k", "num_experts_per_tok", 6),
        Count("shared", "num_shared_experts", 2, minimum=0),
        Attribute("first_dense", "num_dense_layers", 1),
        Attribute("scale", "route_scale", 1.0),
        Attribute("embedding_scaled", "mup_enabled", False),
        Attribute("balance", "router_aux_loss_coef", 0.0001),
        *(Unpublished(name, 1, "there are no groups of experts") for name in ("groups", "kept_groups")),
        Unpublished("normalize", True, "the weights of a token's experts always add up to the scale"),
        Activation(),
        Expect("attention_bias", False, written=False),  # The attention's gates never have biases.
        # The publisher's own program reads these attributes. All models of this family have these values.
        *(Expect(name, 1, written=False) for name in ("n_group", "topk_group")),
        *(Expect(f"num_{name}_groups", 1, written=False) for name in ("expert", "limited")),
        Expect("score_func", "sigmoid", written=False),
        Expect("route_norm", True, written=False),
        Ignore("load_balance_coeff", "use_grouped_mm"),  # settings of training and of speed
    ),
    (
        *(*EDGES, *ATTENTION, *head_norm_weights(), *_NORMS, *GATED, *MIXTURE[1:], *SHARED),
        Rule(f"{LAYER}self_attn.gate_proj.weight", "mixer.layer.gate.weight", INTO_HEADS),
        Rule(f"{LAYER}mlp.router.gate.weight", "feed_forward.layer.router.linear.weight"),
        Rule(f"{LAYER}mlp.expert_bias", "feed_forward.layer.router.selection_bias"),
    ),
)
