"""Tables of published hybrids of attention and gated delta nets: attributes of configurations, and names of arrays."""

import dataclasses

from .._attributes import Attribute, Entry
from .._layer_attributes import LayerTypes, Period
from .._weights import Rule
from ._common import attention_weights, LAYER


NET_ATTRIBUTES: tuple[Entry, ...] = (
    Attribute("net_heads", "linear_num_value_heads", 32),
    Attribute("net_kv_heads", "linear_num_key_heads", 16),
    Attribute("net_head_dim", "linear_key_head_dim", 128),
    Attribute("net_v_dim", "linear_value_head_dim", 128),
    Attribute("taps", "linear_conv_kernel_dim", 4),
    LayerTypes("attention_layers", ("full_attention", "linear_attention"), Period(4, ("full_attention_interval",))),
)

GATED_ATTENTION = tuple(
    dataclasses.replace(rule, lacks="mixer.layer.log_rate") for rule in attention_weights(gated="heads")
)
_NET, _HEADS = f"{LAYER}linear_attn.", "(heads dim) embed -> heads dim embed"
_of = lambda leaf, *names: tuple(f"mixer.layer.{name}.{leaf}" for name in names)
# A `GatedDeltaNet`'s maps, published key head by key head.
NET_WEIGHTS = tuple(
    dataclasses.replace(rule, needs="mixer.layer.log_rate")
    for rule in (
        Rule(
            f"{_NET}in_proj_qkvz.weight",
            _of("weight", "query", "key", "value", "gate"),
            _HEADS,
            groups="net_kv_heads",
        ),
        Rule(f"{_NET}in_proj_ba.weight", _of("weight", "rate", "decay"), groups="net_kv_heads"),
        Rule(
            f"{_NET}conv1d.weight",
            _of("weight", "query_conv", "key_conv", "value_conv"),
            "(heads dim) 1 taps -> heads dim taps",
        ),
        Rule(f"{_NET}A_log", "mixer.layer.log_rate"),
        Rule(f"{_NET}dt_bias", "mixer.layer.decay_bias"),
        Rule(f"{_NET}norm.weight", "mixer.layer.norm.weight"),
        Rule(f"{_NET}out_proj.weight", "mixer.layer.output.weight", "embed (heads dim) -> embed heads dim"),
    )
)
