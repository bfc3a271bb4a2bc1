"""Tables that most published decoders share: attributes of configurations, and names of arrays."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from .._attributes import Attribute, Count, Entry, Fields
from .._config_types import Attributes, PublishedConfig, Size
from .._family import DecoderConfig
from .._rotary_attributes import RotaryPositions
from .._weight_rules import Rule


LAYER, LAYER_H = "model.layers.{layer}.", "transformer.h.{layer}."
QKV = ("query", "key", "value")
SIZES: tuple[Entry, ...] = (
    Count("vocab", "vocab_size"),
    Count("embed", "hidden_size"),
    Count("layers", "num_hidden_layers"),
    Count("heads", "num_attention_heads"),
)
WIDTH = Count("mlp", "intermediate_size")


@dataclasses.dataclass(frozen=True)
class KeyHeads(Entry):
    """The number of key heads; null, or a missing attribute without a `default`, means as many as query heads."""

    default: int | None = None

    def read(self, published: PublishedConfig) -> Fields:
        """Return `kv_heads`."""
        stated = published.nullable("num_key_value_heads", self.default)
        kv_heads = published.read("num_attention_heads", Size) if stated is None else stated
        return {"kv_heads": published.checked("num_key_value_heads", kv_heads, Size)}

    def write(self, config: DecoderConfig) -> Attributes:
        """Return the attribute."""
        return {"num_key_value_heads": config.kv_heads}


@runtime_checkable
class WithHeadSize(Protocol):
    """Fields of a config whose heads have a size of their own, or `embed / heads` channels."""

    @property
    def head_dim(self) -> int | None: ...
    @property
    def head_size(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class HeadSize(Entry):
    """The channels of a head; None: `embed / heads`. If transformers has a `default`, the number is always written."""

    default: int | None = None

    def read(self, published: PublishedConfig) -> Fields:
        """Return `head_dim`."""
        return {"head_dim": published.take("head_dim", self.default)}

    def write(self, config: WithHeadSize) -> Attributes:
        """Return the attribute."""
        return {} if self.default is None and config.head_dim is None else {"head_dim": config.head_size}


class StatedHeadSize(HeadSize):
    """The channels of a head; null is read as `embed / heads`. The attribute is always written, as a number."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `head_dim`."""
        return {"head_dim": published.nullable("head_dim", self.default)}

    def write(self, config: WithHeadSize) -> Attributes:
        """Return the attribute."""
        return {"head_dim": config.head_size}


def decoder_attributes(
    rotary: Entry = RotaryPositions(),
    *,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    eps: str = "rms_norm_eps",
    tied: bool = False,
    mlp: str = "intermediate_size",
    max_seq: int = 2048,
) -> tuple[Entry, ...]:
    """Return the entries for the fields of a `DecoderConfig`.

    Args:
        rotary: The entry of rotary positions.
        head_dim: Transformers' default for channels of a head; None: `embed / heads`.
        kv_heads: Transformers' default for key heads; None: as many as query heads.
        eps: The attribute for the epsilon of norms.
        tied: Transformers' default for whether the head is tied to the table.
        mlp: The attribute for hidden features.
        max_seq: Transformers' default for the length of the longest rows.
    """
    return (
        *(*SIZES, Count("mlp", mlp)),
        KeyHeads(kv_heads),
        HeadSize(head_dim),
        rotary,
        Attribute("eps", eps),
        Attribute("tied", "tie_word_embeddings", tied),
        Attribute("max_seq", "max_position_embeddings", max_seq),
    )


# The embedding, the last norm and, if it is not tied, the head.
EDGES = (
    Rule("model.embed_tokens.weight", "embedding.weight"),
    Rule("model.norm.weight", "norm.weight"),
    Rule("lm_head.weight", "head.weight"),
)
# The bias of the logits, which belongs to the head unless the head is tied.
LOGIT_BIAS = Rule("lm_head.bias", "head.bias"), Rule("lm_head.bias", "logit_bias")


def attention_weights(
    *,
    prefix: str = f"{LAYER}self_attn.",
    gated: int | str = 0,
    output: str = "o",
    path: str = "mixer.layer",
) -> tuple[Rule, ...]:
    """Return the rules for an `Attention` at this path, published as `q_proj`, `k_proj`, `v_proj` and `o_proj`.

    Biases are read if the attention has them. If each head's gate is published after its query, `gated` is the number
    of heads, or the config's field with that number; 0: there is no gate.
    """
    rules = []
    for name, published in (("query", "q"), ("key", "k"), ("value", "v"), ("output", output)):
        for part, into, out in (("weight", INTO_HEADS, OUT_OF_HEADS), ("bias", OF_HEADS, "")):
            leaf: str | tuple[str, str] = f"{path}.{name}.{part}"
            has_gate = bool(gated) and name == "query"
            leaf, groups = ((leaf, f"{path}.gate.{part}"), gated) if has_gate else (leaf, 1)
            pattern = out if name == "output" else into
            rules.append(Rule(f"{prefix}{published}_proj.{part}", leaf, pattern, groups=groups))
    return tuple(rules)


INTO_HEADS = "(heads head_dim) embed -> heads head_dim embed"
OUT_OF_HEADS = "embed (heads head_dim) -> embed heads head_dim"
OF_HEADS = "(heads head_dim) -> heads head_dim"


def head_norm_weights(pattern: str = "") -> tuple[Rule, ...]:
    """Return the rules for an `Attention`'s norms of queries and keys, published as `q_norm` and `k_norm`."""
    prefix = f"{LAYER}self_attn."
    return (
        Rule(f"{prefix}q_norm.weight", "mixer.layer.query_norm.weight", pattern),
        Rule(f"{prefix}k_norm.weight", "mixer.layer.key_norm.weight", pattern),
    )


def weight_and_bias(published: str, path: str, weight: str = "", bias: str = "") -> tuple[Rule, ...]:
    """Return the rules of the weight and the bias of a map or a norm, with the pattern of each."""
    return Rule(f"{published}.weight", f"{path}.weight", weight), Rule(f"{published}.bias", f"{path}.bias", bias)


def norm_weights(**names: str) -> tuple[Rule, ...]:
    """Return the rules for norms before and after a block's sublayers, given the published name of each."""
    return tuple(Rule(f"{LAYER}{published}.weight", f"{_NORMS[norm]}.weight") for norm, published in names.items())


_NORMS = {
    "mixer": "mixer.norm",
    "feed_forward": "feed_forward.norm",
    "mixer_output": "mixer.output_norm",
    "feed_forward_output": "feed_forward.output_norm",
}


def gated_weights(
    path: str = "feed_forward.layer",
    *,
    prefix: str = f"{LAYER}mlp.",
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    bias: bool = False,
) -> tuple[Rule, ...]:
    """Return the rules for the maps of a `GatedMLP` at this path of a layer, with `bias` for their biases too."""
    parts, maps = ("weight", "bias") if bias else ("weight",), list(zip(names, ("gate", "up", "down"), strict=True))
    return tuple(
        Rule(f"{prefix}{published}.{part}", f"{path}.{name}.{part}") for published, name in maps for part in parts
    )


def leaf_paths(names: Sequence[str], leaf: str, path: str = "mixer.layer.") -> tuple[str, ...]:
    """Return the paths of one leaf, such as `weight`, of several maps of the part at `path`."""
    return tuple(f"{path}{name}.{leaf}" for name in names)


ATTENTION, GATED = attention_weights(), gated_weights(bias=True)
# A `GatedMLP` whose first two maps are published as one.
JOINED_GATED = (
    Rule(f"{LAYER}mlp.gate_up_proj.weight", ("feed_forward.layer.gate.weight", "feed_forward.layer.up.weight")),
    Rule(f"{LAYER}mlp.down_proj.weight", "feed_forward.layer.down.weight"),
)
PRE_NORMS = norm_weights(mixer="input_layernorm", feed_forward="post_attention_layernorm")
POST_NORMS = norm_weights(mixer_output="post_attention_layernorm", feed_forward_output="post_feedforward_layernorm")
FOUR_NORMS = norm_weights(
    mixer="input_layernorm",
    mixer_output="post_attention_layernorm",
    feed_forward="pre_feedforward_layernorm",
    feed_forward_output="post_feedforward_layernorm",
)
LLAMA_WEIGHTS = (*EDGES, *ATTENTION, *head_norm_weights(), *PRE_NORMS, *GATED)
