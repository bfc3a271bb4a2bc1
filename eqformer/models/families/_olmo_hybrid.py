"""OLMo Hybrid (Ai2 2026): gated delta nets, and OLMo 3's attention in every fourth layer, with or without positions.

The learning rates (beta) of the delta rule are between 0 and 2 instead of 0 and 1, so that an update may change the
sign of a state. Layers with a delta net have norms before their sublayers, layers with attention after their sublayers.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ...nn import Attention, Block, Transformer
from .._attributes import Activation, Attribute, Entry, Expect, Fields, Ignore
from .._config_types import Attributes, Length, Positive, PublishedConfig, Size
from .._family import Family
from .._layer_attributes import every, LayerTypes
from .._rotary_attributes import RotaryPositions
from .._rotary_scaling import either_rotary_parameters
from .._weight_rules import Rule
from ._common import ATTENTION, decoder_attributes, EDGES, GATED, head_norm_weights, LAYER, OF_HEADS
from ._decoder import attention, decoder, gated_mlp, head_norms, post_norm_block, pre_norm_block, rotary_of
from ._delta_nets import delta_net, NetSizesConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class OlmoHybridConfig(NetSizesConfig):
    """The config of an OLMo Hybrid."""

    wide_rates: bool = True
    """Whether the learning rates (beta) of delta nets are between 0 and 2, instead of between 0 and 1."""
    rotary: bool = False
    """Whether the attention has rotary positions."""
    theta: Positive = 500_000.0
    bias: bool = False
    """Whether the attention's four projections have biases."""
    max_seq: Length = 65_536


def build_olmo_hybrid(config: OlmoHybridConfig, *, key: Key[Array, ""]) -> Transformer:
    """Return an OLMo Hybrid with random weights."""
    rotary = rotary_of(config, config.head_size, scaling=config.scaling) if config.rotary else None

    def build_attention(key: Key[Array, ""]) -> Attention:
        norms = head_norms(config, all_heads=True)
        return attention(config, bias=config.bias, output_std=None, rotary=rotary, **norms, key=key)

    def block(is_attention: bool, key: Key[Array, ""]) -> Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        gated = gated_mlp(config, output_std=None, key=feed_forward_key)
        if is_attention:
            return post_norm_block(config, build_attention(mixer_key), gated)
        net = delta_net(config, mixer_key, eps=1e-5, output_std=None, largest_rate=2.0 if config.wide_rates else 1.0)
        return pre_norm_block(config, net, gated)

    return decoder(config, block, [layer in config.attention_layers for layer in range(config.layers)], key=key)


class _RotaryOrNone(Entry):
    """Rotary positions; a `rope_theta` of null, within `rope_parameters` or outside, means no rotary positions."""

    _positions = RotaryPositions()

    def read(self, published: PublishedConfig) -> Fields:
        """Return `rotary`, `theta` and `scaling`."""
        theta, parameters = published.nullable("rope_theta", 10_000.0), either_rotary_parameters(published)
        if parameters.get("rope_theta", theta) is None:
            rope_type = parameters.get("rope_type", parameters.get("type"))
            if rope_type not in (None, "default"):
                published.refuse(
                    f"rope_type={rope_type!r}: a rope_theta of null means no rotary positions, which cannot be scaled; "
                    "give a rope_theta, or rope_type='default'."
                )
            if (older := published.nested("rope_scaling")) not in ({}, parameters):
                published.refuse(
                    f"rope_scaling={older}: transformers reads it in place of rope_parameters, whose rope_theta of "
                    "null means no rotary positions; give one of them."
                )
            return {"rotary": False, "theta": 500_000.0, "scaling": None}
        return self._positions.read(published) | {"rotary": True}

    def write(self, config: OlmoHybridConfig) -> Attributes:
        """Return the attributes."""
        if config.rotary:
            return self._positions.write(config)
        return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}


class _NetSizesOrDerived(Entry):
    """The sizes of the delta nets; a size that is null or missing is computed from the model's other sizes."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return the four sizes."""
        heads, embed = published.read("num_attention_heads", Size), published.read("hidden_size", Size)
        kv_heads = published.read("linear_num_key_heads", Size, heads)
        head_dim = published.read("linear_key_head_dim", Size, int(0.75 * embed / kv_heads))
        return {
            "net_heads": published.read("linear_num_value_heads", Size, heads),
            "net_kv_heads": kv_heads,
            "net_head_dim": head_dim,
            "net_v_dim": published.read("linear_value_head_dim", Size, 2 * head_dim),
        }

    def write(self, config: OlmoHybridConfig) -> Attributes:
        """Return the attributes."""
        return {
            "linear_num_value_heads": config.net_heads,
            "linear_num_key_heads": config.net_kv_heads,
            "linear_key_head_dim": config.net_head_dim,
            "linear_value_head_dim": config.net_v_dim,
        }


def _each_fourth(published: PublishedConfig, layers: int) -> tuple[int, ...]:
    """Return every fourth layer; in a model of fewer than four layers, return the last layer."""
    return every(4, layers) or (layers - 1,)


_PRESETS = {
    "olmo-hybrid-byte-500k": OlmoHybridConfig(
        *(256, 64, 4, 4, 4, 192),
        attention_layers=(3,),
        net_heads=4,
        net_kv_heads=4,
        net_head_dim=16,
        net_v_dim=32,
        tied=True,
    ),
    "olmo-hybrid-7b": OlmoHybridConfig(
        *(100_352, 3840, 32, 30, 30, 11_008),
        attention_layers=every(4, 32),
        net_heads=30,
        net_kv_heads=30,
        net_head_dim=96,
        net_v_dim=192,
    ),
}

_NET, _INTO = f"{LAYER}linear_attn.", "(heads dim) embed -> heads dim embed"
_MAPS = (("q", "query"), ("k", "key"), ("v", "value"), ("g", "gate"))
_NET_WEIGHTS = (
    *(Rule(f"{_NET}{name}_proj.weight", f"mixer.layer.{path}.weight", _INTO) for name, path in _MAPS),
    Rule(f"{_NET}b_proj.weight", "mixer.layer.rate.weight"),
    Rule(f"{_NET}a_proj.weight", "mixer.layer.decay.weight"),
    *(
        Rule(f"{_NET}{name}_conv1d.weight", f"mixer.layer.{path}_conv.weight", "(heads dim) 1 taps -> heads dim taps")
        for name, path in _MAPS[:3]
    ),
    Rule(f"{_NET}A_log", "mixer.layer.log_rate"),
    Rule(f"{_NET}dt_bias", "mixer.layer.decay_bias"),
    Rule(f"{_NET}o_norm.weight", "mixer.layer.norm.weight"),
    Rule(f"{_NET}o_proj.weight", "mixer.layer.output.weight", "embed (heads dim) -> embed heads dim"),
)


def _norm_weights(path: str, name: str, other: str) -> tuple[Rule, Rule]:
    """Return the rules for a norm that is published under either of two names."""
    norm = Rule(f"{LAYER}{name}.weight", f"{path}.weight")
    return norm, dataclasses.replace(norm, name=f"{LAYER}{other}.weight", variant=True)


_RATES = "mixer.layer.log_rate"  # a leaf that only delta nets have
OLMO_HYBRID = Family(
    "olmo_hybrid",
    OlmoHybridConfig,
    build_olmo_hybrid,
    _PRESETS,
    "OlmoHybridForCausalLM",
    "olmo_hybrid",
    (
        *decoder_attributes(_RotaryOrNone(), max_seq=65_536),
        LayerTypes("attention_layers", ("full_attention", "linear_attention"), _each_fourth),
        _NetSizesOrDerived(),
        Attribute("taps", "linear_conv_kernel_dim", 4),
        Attribute("wide_rates", "linear_allow_neg_eigval", True),
        Attribute("bias", "attention_bias", False),
        Activation(),
        Expect("linear_use_gate", True, written=False),
        # Settings of initialization.
        Ignore(*(f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor"))),
    ),
    (
        *EDGES,
        *(dataclasses.replace(rule, lacks=_RATES) for rule in (*ATTENTION, *head_norm_weights(OF_HEADS))),
        *(dataclasses.replace(rule, needs=_RATES) for rule in _NET_WEIGHTS),
        Rule(f"{LAYER}post_feedforward_layernorm.weight", "feed_forward.output_norm.weight"),
        # Transformers saves these norms under names that differ from the names of its modules.
        *_norm_weights("mixer.output_norm", "feedforward_layer_norm", "post_attention_layernorm"),
        *_norm_weights("mixer.norm", "attention_layer_norm", "input_layernorm"),
        *_norm_weights("feed_forward.norm", "feedforward_layer_norm", "post_attention_layernorm"),
        *GATED,
    ),
)
