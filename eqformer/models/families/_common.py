"""What most published decoders share: attributes of configurations, and names of arrays."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .._config import Config, layer_types, rotary_attributes
from .._weights import Weight


_ATTRIBUTES = {
    "vocab": "vocab_size",
    "embed": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "mlp": "intermediate_size",
}


def common_numbers(
    config: Config,
    theta: float = 10_000.0,
    layer_type: str | None = None,
    *,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    eps: str = "rms_norm_eps",
    tied: bool = False,
) -> dict[str, Any]:
    """Sizes, rotary positions, norms' eps, and whether the head is tied, under our names.

    Those given are the family's defaults, `layer_type` the layers whose rotary positions these are, and `eps` the
    attribute that says it.
    """
    found: dict[str, Any] = {name: config.count(attribute) for name, attribute in _ATTRIBUTES.items()}
    found["theta"], found["scaling"] = config.rotary(theta, layer_type)
    found["kv_heads"] = config.nullable("num_key_value_heads", kv_heads) or found["heads"]
    found["head_dim"] = config.take("head_dim", head_dim)
    found["eps"] = config.take(eps)
    found["tied"] = config.take("tie_word_embeddings", tied)
    found["max_seq"] = config.take("max_position_embeddings", 2048)
    return found


def common_attributes(numbers: Any) -> dict[str, Any]:
    """The same the other way."""
    return {
        **{attribute: getattr(numbers, name) for name, attribute in _ATTRIBUTES.items()},
        "num_key_value_heads": numbers.kv_heads,
        **({} if numbers.head_dim is None else {"head_dim": numbers.head_dim}),
        "rms_norm_eps": numbers.eps,
        "tie_word_embeddings": numbers.tied,
        "max_position_embeddings": numbers.max_seq,
        **rotary_attributes(numbers.theta, numbers.scaling),
    }


def switched_windows(config: Config, layers: int, window: int | None, default: Iterable[int]) -> dict[str, Any]:
    """A window that `use_sliding_window` switches on, and the numbers of its layers; given are the defaults."""
    window = config.nullable("sliding_window", window)
    window = window if config.take("use_sliding_window", False) else None
    windowed = config.windowed(layers, window, default)
    return {"window": window if windowed else None, "windowed": windowed}


def switched_window_attributes(numbers: Any) -> dict[str, Any]:
    """The same the other way."""
    return {
        "use_sliding_window": numbers.window is not None,
        "sliding_window": numbers.window,
        "layer_types": layer_types(numbers.layers, numbers.windowed),
    }


def edge_weights(tied: bool) -> list[Weight]:
    """The embedding, the last norm and, where it is not tied, the head."""
    head = [] if tied else [Weight("lm_head.weight", lambda m: m.head.weight)]
    table = Weight("model.embed_tokens.weight", lambda m: m.embedding.weight)
    return [table, Weight("model.norm.weight", lambda m: m.norm.weight), *head]


def block_weights(
    where: Callable[[Any], Any],
    layers: Sequence[int],
    *,
    bias: bool = False,
    output_bias: bool | None = None,
    gated: int = 0,
) -> list[Weight]:
    """Of a pre-norm block: the attention's projections and both norms."""
    options: dict[str, Any] = {"bias": bias, "output_bias": output_bias, "gated": gated}
    projections = attention_weights(lambda m: where(m).mixer.layer, layers, **options)
    return projections + pre_norm_weights(where, layers)


def attention_weights(
    where: Callable[[Any], Any],
    layers: Sequence[int],
    *,
    prefix: str = "model.layers.{layer}.self_attn.",
    bias: bool = False,
    output_bias: bool | None = None,
    gated: int = 0,
) -> list[Weight]:
    """An `Attention`'s projections, published as `q_proj`, `k_proj`, `v_proj` and `o_proj`.

    Of so many `gated` heads, each head's gate is published behind its query.
    """
    found = []
    for name, published in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o")):
        is_output = name == "output"
        pattern = "embed (heads head_dim) -> embed heads head_dim" if is_output else _HEADS
        find, groups = _attribute(where, f"{name}.weight"), 1
        if name == "query" and gated:
            find, groups = lambda m: (where(m).query.weight, where(m).gate.weight), gated
        found.append(Weight(f"{prefix}{published}_proj.weight", find, pattern, layers, groups=groups))
        if bias if not is_output or output_bias is None else output_bias:
            pattern = "" if is_output else "(heads head_dim) -> heads head_dim"
            found.append(Weight(f"{prefix}{published}_proj.bias", _attribute(where, f"{name}.bias"), pattern, layers))
    return found


def norm_weights(
    where: Callable[[Any], Any],
    layers: Sequence[int],
    names: Mapping[str, str],
    *,
    prefix: str = "model.layers.{layer}.",
    pattern: str = "",
) -> list[Weight]:
    """Scales of norms: by our attribute the name published."""
    return [
        Weight(f"{prefix}{its}.weight", _attribute(where, f"{own}.weight"), pattern, layers)
        for own, its in names.items()
    ]


def pre_norm_weights(where: Callable[[Any], Any], layers: Sequence[int]) -> list[Weight]:
    """The norms before both sublayers, under the names of Llama."""
    names = {"mixer.norm": "input_layernorm", "feed_forward.norm": "post_attention_layernorm"}
    return norm_weights(where, layers, names)


def four_norm_weights(where: Callable[[Any], Any], layers: Sequence[int]) -> list[Weight]:
    """The norms before and after both sublayers, under the names of Gemma 2."""
    names = {
        "mixer.norm": "input_layernorm",
        "mixer.output_norm": "post_attention_layernorm",
        "feed_forward.norm": "pre_feedforward_layernorm",
        "feed_forward.output_norm": "post_feedforward_layernorm",
    }
    return norm_weights(where, layers, names)


def query_key_norm_weights(where: Callable[[Any], Any], layers: Sequence[int], pattern: str = "") -> list[Weight]:
    """Of an `Attention`'s norms of queries and keys, published as `q_norm` and `k_norm`."""
    names = {"query_norm": "q_norm", "key_norm": "k_norm"}
    return norm_weights(where, layers, names, prefix="model.layers.{layer}.self_attn.", pattern=pattern)


def gated_weights(
    where: Callable[[Any], Any],
    layers: Sequence[int],
    *,
    prefix: str = "model.layers.{layer}.mlp.",
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Weight]:
    """A `GatedMLP`'s maps."""
    pairs = zip(("gate", "up", "down"), names, strict=True)
    return [Weight(f"{prefix}{its}.weight", _attribute(where, f"{name}.weight"), "", layers) for name, its in pairs]


def joined_gated_weights(where: Callable[[Any], Any], layers: Sequence[int]) -> list[Weight]:
    """Of a `GatedMLP` whose first two maps are published as one."""
    prefix, ups = "model.layers.{layer}.mlp.", lambda m: (where(m).gate.weight, where(m).up.weight)
    down = Weight(f"{prefix}down_proj.weight", _attribute(where, "down.weight"), "", layers)
    return [Weight(f"{prefix}gate_up_proj.weight", ups, "", layers), down]


_HEADS = "(heads head_dim) embed -> heads head_dim embed"


def _attribute(where: Callable[[Any], Any], path: str) -> Callable[[Any], Any]:
    def find(model: Any) -> Any:
        found = where(model)
        for name in path.split("."):
            found = getattr(found, name)
        return found

    return find
