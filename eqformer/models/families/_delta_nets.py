"""What published hybrids of attention and gated delta nets share: attributes of configurations, and names of arrays."""

from collections.abc import Callable, Sequence
from typing import Any

from .._config import Config
from .._weights import Weight
from ._common import pre_norm_weights
from ._pattern import every


_TYPES = ("linear_attention", "full_attention")
_ATTRIBUTES = {
    "net_heads": ("linear_num_value_heads", 32),
    "net_kv_heads": ("linear_num_key_heads", 16),
    "net_head_dim": ("linear_key_head_dim", 128),
    "net_v_dim": ("linear_value_head_dim", 128),
    "taps": ("linear_conv_kernel_dim", 4),
}


def net_numbers(config: Config, layers: int) -> dict[str, Any]:
    """The nets' sizes, and the numbers of the layers that have an attention instead: by default each fourth."""
    found: dict[str, Any] = {name: config.take(*attribute) for name, attribute in _ATTRIBUTES.items()}
    attending = every(config.count("full_attention_interval", 4), layers)
    types = config.take("layer_types", [_TYPES[layer in attending] for layer in range(layers)])
    if len(types) != layers or set(types) - set(_TYPES):
        config.refuse(f"layer_types={types} must name {layers} layers, each {' or '.join(map(repr, _TYPES))}.")
    return found | {"attending": tuple(layer for layer, name in enumerate(types) if _TYPES.index(name))}


def net_attributes(numbers: Any) -> dict[str, Any]:
    """The same the other way."""
    types = [_TYPES[layer in numbers.attending] for layer in range(numbers.layers)]
    return {attribute: getattr(numbers, name) for name, (attribute, _) in _ATTRIBUTES.items()} | {"layer_types": types}


def net_block_weights(where: Callable[[Any], Any], layers: Sequence[int], kv_heads: int) -> list[Weight]:
    """Of a pre-norm block with a `GatedDeltaNet`: its maps, published key head by key head, and both norms."""
    net, prefix = lambda m: where(m).mixer.layer, "model.layers.{layer}.linear_attn."
    inputs = lambda m: (net(m).query.weight, net(m).key.weight, net(m).value.weight, net(m).gate.weight)
    convs = lambda m: (net(m).query_conv.weight, net(m).key_conv.weight, net(m).value_conv.weight)
    steps = lambda m: (net(m).rate.weight, net(m).decay.weight)
    by_heads, output = "(heads dim) embed -> heads dim embed", "embed (heads dim) -> embed heads dim"
    return [
        Weight(f"{prefix}in_proj_qkvz.weight", inputs, by_heads, layers, groups=kv_heads),
        Weight(f"{prefix}in_proj_ba.weight", steps, "", layers, groups=kv_heads),
        Weight(f"{prefix}conv1d.weight", convs, "(heads dim) 1 taps -> heads dim taps", layers),
        Weight(f"{prefix}A_log", lambda m: net(m).log_rate, "", layers),
        Weight(f"{prefix}dt_bias", lambda m: net(m).decay_bias, "", layers),
        Weight(f"{prefix}norm.weight", lambda m: net(m).norm.weight, "", layers),
        Weight(f"{prefix}out_proj.weight", lambda m: net(m).output.weight, output, layers),
        *pre_norm_weights(where, layers),
    ]
