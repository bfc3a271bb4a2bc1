"""What DeepSeek-V2 and V3 share: attributes of configurations, blocks of latent attention, and names of arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Block,
    Experts,
    GatedMLP,
    LatentAttention,
    LoadBalance,
    MoE,
    Residual,
    RMSNorm,
    Rotary,
    TopKRouter,
    yarn_magnitude,
    YarnScaling,
)
from .._config import Config, rotary_attributes
from .._weights import Weight
from ._common import common_numbers, gated_weights, pre_norm_weights
from ._mixtures import mixture_weights


_ATTRIBUTES = {
    "vocab": "vocab_size",
    "embed": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "mlp": "intermediate_size",
    "expert_mlp": "moe_intermediate_size",
    "latent": "kv_lora_rank",
    "q_latent": "q_lora_rank",
    "head_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
    "experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "shared": "n_shared_experts",
    "first_dense": "first_k_dense_replace",
    "scale": "routed_scaling_factor",
    "groups": "n_group",
    "kept_groups": "topk_group",
    "eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "max_seq": "max_position_embeddings",
}


def latent_numbers(config: Config) -> dict[str, Any]:
    """All numbers but those of one version alone."""
    config.expect("hidden_act", "silu")
    config.expect("attention_bias", False)
    config.expect("moe_layer_freq", 1)
    # Of training: how losses are summed and where experts are.
    for name in ("aux_loss_alpha", "seq_aux", "ep_size", "qk_head_dim"):
        config.take(name, None)
    found = common_numbers(config)
    if (kv_heads := found.pop("kv_heads")) != found["heads"]:
        config.refuse(f"num_key_value_heads={kv_heads}: latent attention has as many as heads, {found['heads']}.")
    given = config.nested("rope_parameters") or config.nested("rope_scaling")
    found["temperature"] = float(given.get("mscale_all_dim") or 0.0) if found["scaling"] is not None else 0.0
    for name in _ATTRIBUTES.keys() - found.keys() | {"head_dim"}:
        found[name] = config.take(_ATTRIBUTES[name])
    found["groups"], found["kept_groups"] = found["groups"] or 1, found["kept_groups"] or 1
    return found


def latent_attributes(numbers: Any) -> dict[str, Any]:
    """The same the other way."""
    said = {attribute: getattr(numbers, name) for name, attribute in _ATTRIBUTES.items()}
    said |= rotary_attributes(numbers.theta, numbers.scaling)
    if numbers.temperature:
        said["rope_scaling"] |= {"mscale": numbers.temperature, "mscale_all_dim": numbers.temperature}
    said |= {"num_key_value_heads": numbers.heads, "hidden_act": "silu", "attention_bias": False}
    return said | {"moe_layer_freq": 1}


def latent_block(
    numbers: Any,
    is_mixture: bool,
    *,
    router: Callable[[Key[Array, ""]], TopKRouter],
    losses: tuple[LoadBalance, ...],
    interleaved: bool,
    key: Key[Array, ""],
) -> Block:
    """Latent attention, whose scores YaRN sharpens by `temperature` too, and a gated layer or a mixture."""
    embed, damping = numbers.embed, (2 * numbers.layers) ** -0.5
    scaling, sharper = numbers.scaling, 1.0
    if numbers.temperature and isinstance(scaling, YarnScaling):
        sharper = yarn_magnitude(scaling.factor, numbers.temperature) ** 2

    def gated(mlp: int, key: Key[Array, ""]) -> GatedMLP:
        return GatedMLP(embed=embed, mlp=mlp, output_std=damping * mlp**-0.5, key=key)

    def mixture(key: Key[Array, ""]) -> MoE:
        choose, experts, shared = jax.random.split(key, 3)
        return MoE(
            router(choose),
            Experts(lambda key: gated(numbers.expert_mlp, key), numbers.experts, key=experts),
            shared=gated(numbers.shared * numbers.expert_mlp, shared),
            losses=losses,
        )

    attention, feed_forward = jax.random.split(key)
    return Block(
        mixer=Residual(
            LatentAttention(
                embed=embed,
                heads=numbers.heads,
                head_dim=numbers.head_dim,
                latent=numbers.latent,
                q_latent=numbers.q_latent,
                v_dim=numbers.v_dim,
                latent_norm=RMSNorm("latent", latent=numbers.latent),
                query_latent_norm=None if numbers.q_latent is None else RMSNorm("q_latent", q_latent=numbers.q_latent),
                rotary=Rotary(numbers.rope_dim, numbers.theta, interleaved=interleaved, scaling=scaling),
                output_std=damping * (numbers.heads * numbers.v_dim) ** -0.5,
                scale=sharper * (numbers.head_dim + numbers.rope_dim) ** -0.5,
                key=attention,
            ),
            RMSNorm("embed", embed=embed, eps=numbers.eps),
        ),
        feed_forward=Residual(
            mixture(feed_forward) if is_mixture else gated(numbers.mlp, feed_forward),
            RMSNorm("embed", embed=embed, eps=numbers.eps),
        ),
    )


def latent_block_weights(
    numbers: Any, is_mixture: bool, where: Callable[[Any], Any], layers: Sequence[int]
) -> list[Weight]:
    """Of a block of latent attention and a gated layer or a mixture."""
    attention, fed = lambda m: where(m).mixer.layer, lambda m: where(m).feed_forward.layer
    prefix, heads = "model.layers.{layer}.self_attn.", numbers.heads
    queries = lambda m: (attention(m).query.weight, attention(m).query_rope.weight)
    latents = lambda m: (attention(m).latent_down.weight, attention(m).key_rope.weight)
    ups = lambda m: (attention(m).key_up.weight, attention(m).value_up.weight)
    split, joined = "(heads width) inputs -> heads width inputs", "embed (heads width) -> embed heads width"
    found = [
        Weight(f"{prefix}kv_a_proj_with_mqa.weight", latents, "", layers),
        Weight(f"{prefix}kv_a_layernorm.weight", lambda m: attention(m).latent_norm.weight, "", layers),
        Weight(f"{prefix}kv_b_proj.weight", ups, split, layers, groups=heads),
        Weight(f"{prefix}o_proj.weight", lambda m: attention(m).output.weight, joined, layers),
        *pre_norm_weights(where, layers),
    ]
    if numbers.q_latent is None:
        found += [Weight(f"{prefix}q_proj.weight", queries, split, layers, groups=heads)]
    else:
        down, norm = lambda m: attention(m).query_down.weight, lambda m: attention(m).query_latent_norm.weight
        found += [Weight(f"{prefix}q_a_proj.weight", down, "", layers)]
        found += [Weight(f"{prefix}q_a_layernorm.weight", norm, "", layers)]
        found += [Weight(f"{prefix}q_b_proj.weight", queries, split, layers, groups=heads)]
    if not is_mixture:
        return [*found, *gated_weights(fed, layers)]
    shared = gated_weights(lambda m: fed(m).shared, layers, prefix="model.layers.{layer}.mlp.shared_experts.")
    return [*found, *mixture_weights(fed, layers), *shared]


def mixtures_after_dense(numbers: Any) -> tuple[bool, ...]:
    """Which layers have experts: all but the first."""
    return tuple(layer >= numbers.first_dense for layer in range(numbers.layers))
