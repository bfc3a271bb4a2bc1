"""T5 (Raffel et al. 2020, arXiv:1910.10683), T5 v1.1 and Flan-T5: an encoder, and a decoder that attends to it."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Attribute, Count, Entry, Expect, Fields, Ignore, published_activations
from .._config_types import Attributes, Index, LayerCount, Length, NotNegative, PublishedConfig, Size
from .._family import Family, ModelConfig
from .._weight_rules import Rule
from ._common import INTO_HEADS, OUT_OF_HEADS
from ._decoder import activation_of, gated_mlp


class _Layers(Entry):
    """The depths of the encoder and of the decoder, in layers; by default equal."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return both fields."""
        encoder = published.read("num_layers", LayerCount, 6)
        decoder = published.read("num_decoder_layers", LayerCount, encoder)
        return {"layers": decoder, "encoder_layers": None if encoder == decoder else encoder}

    def write(self, config: "T5Config") -> Attributes:
        """Return both attributes."""
        return {"num_layers": config.encoder_layers or config.layers, "num_decoder_layers": config.layers}


# Whether layers are gated, and their activation, by `feed_forward_proj`. "gated-gelu" has GELU's tanh approximation.
_NAMES = [(name, activation) for activation in ("relu", *nn.ACTIVATIONS) for name in published_activations(activation)]
_KINDS = {name: (False, activation) for name, activation in _NAMES} | {"gated-gelu": (True, "gelu_tanh")}
_KINDS |= {f"gated-{name}": (True, activation) for name, activation in _NAMES if name != "gelu"}


class _FeedForwardKind(Entry):
    """The kind of feed-forward layers, which transformers writes into three attributes."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `gated` and `activation`; refuse any other kind."""
        published.expect("feed_forward_proj", *_KINDS)
        proj = published.text("feed_forward_proj", "relu")
        for name, value in self._copies(proj).items():
            published.expect(name, value)
        return dict(zip(("gated", "activation"), _KINDS[proj]))

    def write(self, config: "T5Config") -> Attributes:
        """Return all three attributes; raises a `ValueError` for a kind that has no name."""
        for proj, kind in _KINDS.items():
            if kind == (config.gated, config.activation):
                return {"feed_forward_proj": proj} | self._copies(proj)
        raise ValueError(
            f"save(config=T5Config(activation={config.activation!r})): published configurations can state only "
            f"{', '.join(nn.ACTIVATIONS)}; give one of these."
        )

    def _copies(self, proj: str) -> Attributes:
        """Return the two attributes that repeat `feed_forward_proj`."""
        name = "gelu_new" if proj == "gated-gelu" else proj.removeprefix("gated-")
        return {"is_gated_act": _KINDS[proj][0], "dense_act_fn": name}


class _Head(Entry):
    """Whether the head is tied, and whether its input is scaled; by default, the input of a tied head is scaled."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return both fields."""
        tied = published.flag("tie_word_embeddings", True)
        scaled = published.nullable("scale_decoder_outputs", tied)
        return {"tied": tied, "scaled": False if scaled is None else scaled}

    def write(self, config: "T5Config") -> Attributes:
        """Return both attributes."""
        return {"tie_word_embeddings": config.tied, "scale_decoder_outputs": config.scaled}


T5_ATTRIBUTES: tuple[Entry, ...] = (
    Count("vocab", "vocab_size", 32_128),
    Count("embed", "d_model", 512),
    Count("head_dim", "d_kv", 64),
    Count("mlp", "d_ff", 2048),
    Count("heads", "num_heads", 8),
    *(_Layers(), _FeedForwardKind(), _Head()),
    Attribute("ranges", "relative_attention_num_buckets", 32),
    Attribute("farthest", "relative_attention_max_distance", 128),
    Attribute("eps", "layer_norm_epsilon", 1e-6),
    Attribute("start", "decoder_start_token_id", 0),
    Expect("is_encoder_decoder", True),
    Expect("is_decoder", False, written=False),
    # Settings of training and of classifiers.
    Ignore("dropout_rate", "initializer_factor", "classifier_dropout", "n_positions"),
)


def _sublayer(part: str, prefix: str, name: str, rules: dict[str, tuple[str, str]]) -> tuple[Rule, ...]:
    maps = (
        Rule(f"{prefix}{published}", f"{name}.layer.{path}", pattern, part=part)
        for published, (path, pattern) in rules.items()
    )
    return Rule(f"{prefix}layer_norm.weight", f"{name}.norm.weight", part=part), *maps


def _attention(name: str) -> dict[str, tuple[str, str]]:
    maps = {"q": "query", "k": "key", "v": "value"}
    rules = {f"{name}.{letter}.weight": (f"{path}.weight", INTO_HEADS) for letter, path in maps.items()}
    return rules | {f"{name}.o.weight": ("output.weight", OUT_OF_HEADS)}


_MAPS = {"wi": "up", "wi_0": "gate", "wi_1": "up", "wo": "down"}


def _stack(part: str, name: str, mlp_sublayer: int) -> tuple[Rule, ...]:
    """Return the rules for the encoder or the decoder, whose feed-forward layer is sublayer `mlp_sublayer`."""
    layer, leaf_prefix = f"{name}.block.{{layer}}.layer.", f"{part}." if part else ""
    gate = "feed_forward.layer.gate"
    table = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    cross = () if part else _sublayer(part, f"{layer}1.", "sublayers.1", _attention("EncDecAttention"))
    return (
        *_sublayer(part, f"{layer}0.", "mixer", _attention("SelfAttention")),
        *cross,
        *_sublayer(part, f"{layer}{mlp_sublayer}.", "feed_forward", {}),
        *(
            Rule(
                f"{layer}{mlp_sublayer}.DenseReluDense.{published}.weight",
                f"feed_forward.layer.{leaf}.weight",
                part=part,
                needs=gate if published[-2:] in ("_0", "_1") else "",
                lacks=gate if published == "wi" else "",
            )
            for published, leaf in _MAPS.items()
        ),
        Rule(table, f"{leaf_prefix}score_bias.weight"),
        Rule(f"{name}.final_layer_norm.weight", f"{leaf_prefix}norm.weight"),
    )


T5_WEIGHTS = (
    Rule("shared.weight", "embedding.weight"),
    *_stack("encoder", "encoder", 1),
    *_stack("", "decoder", 2),
    Rule("lm_head.weight", "head.weight"),
)


@dataclasses.dataclass(frozen=True)
class T5Config(ModelConfig):
    """The config of a T5."""

    layers: LayerCount
    """The number of layers of the decoder."""
    heads: Size
    """The number of heads."""
    mlp: Size
    """Hidden features of a feed-forward layer."""
    _: dataclasses.KW_ONLY
    encoder_layers: LayerCount | None = None
    """The number of layers of the encoder; None: as many as in the decoder."""
    head_dim: Size = 64
    """Channels of a head."""
    gated: bool = True
    """Whether feed-forward layers are gated (v1.1), or plain."""
    activation: str = "gelu_tanh"
    """The activation of a feed-forward layer's features, or of its gate: a name of `nn.ACTIVATIONS`."""
    tied: bool = False
    """Whether the embedding's table is the head too."""
    scaled: bool = False
    """Whether hidden vectors are divided by the root of their channels before the head."""
    ranges: Size = 32
    """The number of ranges of distances that have a score bias."""
    farthest: Length = 128
    """From this distance on, all distances are in one range."""
    eps: NotNegative = 1e-6
    """The epsilon of norms, which is added to the mean square before the root."""
    start: Index = 0
    """The id with which the decoder begins."""


def build_t5(config: T5Config, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a T5 with random weights."""
    embed = config.embed
    output_std = (2 * config.layers * config.heads * config.head_dim) ** -0.5

    def norm() -> nn.RMSNorm:
        return nn.RMSNorm("embed", embed=embed, eps=config.eps)

    def feed_forward(key: Key[Array, ""]) -> nn.GatedMLP | nn.MLP:
        if config.gated:
            return gated_mlp(config, key=key)
        return nn.MLP(embed=embed, mlp=config.mlp, activation=activation_of(config), key=key)

    def self_attention(mask: nn.Mask, key: Key[Array, ""]) -> nn.Attention:
        return nn.Attention(
            embed=embed,
            heads=config.heads,
            head_dim=config.head_dim,
            output_std=output_std,
            scores=nn.Scores(1.0, bias=True),
            mask=mask,
            key=key,
        )

    def encoder_block(key: Key[Array, ""]) -> nn.Block:
        attention_key, _, feed_forward_key = jax.random.split(key, 3)
        return nn.Block(
            nn.Residual(self_attention(nn.full(), attention_key), norm()),
            nn.Residual(feed_forward(feed_forward_key), norm()),
        )

    def decoder_block(key: Key[Array, ""]) -> nn.Block:
        attention_key, cross_key, feed_forward_key = jax.random.split(key, 3)
        cross = nn.CrossAttention(
            embed=embed,
            heads=config.heads,
            head_dim=config.head_dim,
            output_std=output_std,
            scores=nn.Scores(1.0),
            key=cross_key,
        )
        return nn.Block(
            nn.Residual(self_attention(nn.causal(), attention_key), norm()),
            nn.Residual(cross, norm(), reads="source"),
            nn.Residual(feed_forward(feed_forward_key), norm()),
        )

    def bias(both_ways: bool, key: Key[Array, ""]) -> nn.RelativeBias:
        return nn.RelativeBias(
            ranges=config.ranges, heads=config.heads, farthest=config.farthest, both_ways=both_ways, key=key
        )

    table_key, encoder_key, decoder_key, encoder_bias_key, decoder_bias_key, head_key = jax.random.split(key, 6)
    encoder_stack = nn.Stack(encoder_block, config.encoder_layers or config.layers, key=encoder_key)
    return nn.Transformer(
        embedding=nn.Embedding(vocab=config.vocab, embed=embed, key=table_key),
        stacks=(nn.Stack(decoder_block, config.layers, key=decoder_key),),
        norm=norm(),
        head=None if config.tied else nn.Linear("embed -> vocab", embed=embed, vocab=config.vocab, key=head_key),
        logit_scale=embed**-0.5 if config.scaled else None,
        encoder=nn.Encoder((encoder_stack,), norm(), bias(True, encoder_bias_key), config.start),
        score_bias=bias(False, decoder_bias_key),
    )


def _as_stored(config: Any, names: Collection[str]) -> T5Config:
    """Return the config with an untied head if the folder has an array of the head.

    Transformers always writes `tie_word_embeddings: true`, so this attribute does not tell whether the head is tied.
    """
    return dataclasses.replace(config, tied=config.tied and "lm_head.weight" not in names)


def _t5(embed: int, layers: int, heads: int, mlp: int) -> T5Config:
    """Return a config of the first T5s, whose feed-forward layers are not gated and whose head is tied."""
    return T5Config(*(32_128, embed, layers, heads, mlp), gated=False, activation="relu", tied=True, scaled=True)


_PRESETS = {
    "t5-byte-200k": dataclasses.replace(_t5(64, 2, 4, 128), vocab=384, head_dim=16),
    "t5-byte-gated-200k": T5Config(384, 64, 2, 4, 96, head_dim=16),
    "t5-small": _t5(512, 6, 8, 2048),
    "t5-base": _t5(768, 12, 12, 3072),
    "t5-large": _t5(1024, 24, 16, 4096),
    "flan-t5-small": T5Config(32_128, 512, 8, 6, 1024),
    "flan-t5-base": T5Config(32_128, 768, 12, 12, 2048),
    "flan-t5-large": T5Config(32_128, 1024, 24, 16, 2816),
    "flan-t5-xl": T5Config(32_128, 2048, 24, 32, 5120),
    "flan-t5-xxl": T5Config(32_128, 4096, 24, 64, 10_240),
}

T5 = Family(
    *("t5", T5Config, build_t5, _PRESETS, "T5ForConditionalGeneration", "t5", T5_ATTRIBUTES, T5_WEIGHTS),
    ignored_suffixes=("coder.embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight"),
    as_stored=_as_stored,
    classifier=None,
)
