"""OPT (Zhang et al. 2022, arXiv:2205.01068): learned positions, LayerNorms, and a feed-forward layer with a relu.

OPT 350M has a norm after each residual addition. Its embedding table has fewer channels than the residual stream: one
projection maps embeddings to the stream, and another one maps the stream back before the head.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Activation, Attribute, Count, Entry, Fields, Ignore, Unpublished
from .._config_types import Attributes, Length, PublishedConfig, Size
from .._family import Family
from .._weight_rules import Rule
from ._common import attention_weights, weight_and_bias
from ._decoder import damping, mlp
from ._gpt2 import OlderDecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class OPTConfig(OlderDecoderConfig):
    """The config of an OPT. Dropout acts on both residual additions."""

    activation: str = "relu"
    max_seq: Length = 2048
    pre_norm: bool = True
    """Whether norms are before sublayers, and after the last layer, instead of after each residual addition."""
    final_norm: bool = True
    """Whether there is a norm after the last layer; without `pre_norm` there is none."""
    table_channels: Size | None = None
    """Channels of the embedding table; None: as many as the residual stream."""
    bias: bool = True
    """Whether the projections of attention and feed-forward layers have biases."""
    norm_weights: bool = True
    """Whether norms have weights and biases."""


def build_opt(config: OPTConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return an OPT with random weights."""
    embed, vocab, channels = config.embed, config.vocab, config.table_channels or config.embed
    embedding_key, positions_key, stack_key, head_key, *map_keys = jax.random.split(key, 6)
    dropout = nn.Dropout(config.dropout) if config.dropout else None

    def norm() -> nn.LayerNorm:
        return nn.LayerNorm("embed", embed=embed, eps=config.eps, scale=config.norm_weights, bias=config.norm_weights)

    def residual(layer: nn.Attention | nn.MLP) -> nn.Residual:
        if config.pre_norm:
            return nn.Residual(layer, norm(), dropout=dropout)
        return nn.Residual(layer, sum_norm=norm(), dropout=dropout)

    def block(key: Key[Array, ""]) -> nn.Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        attention = nn.Attention(
            embed=embed,
            heads=config.heads,
            head_dim=config.head_size,
            bias=config.bias,
            output_std=damping(config) * embed**-0.5,
            key=mixer_key,
        )
        feed_forward = mlp(config, config.mlp_size, bias=config.bias, key=feed_forward_key)
        return nn.Block(residual(attention), residual(feed_forward))

    final_norm = norm() if config.pre_norm and config.final_norm else nn.IdentityNorm()
    embedding_map = output_map = None
    if channels != embed:
        embedding_map = nn.Linear("embed -> hidden", embed=channels, hidden=embed, key=map_keys[0])
        output_map = nn.Linear("hidden -> embed", embed=channels, hidden=embed, key=map_keys[1])
    return nn.Transformer(
        embedding=nn.Embedding(vocab=vocab, embed=channels, key=embedding_key),
        embedding_map=embedding_map,
        positions=nn.LearnedPositions(max_seq=config.max_seq, embed=embed, offset=2, key=positions_key),
        stacks=(nn.Stack(block, config.layers, key=stack_key),),
        norm=final_norm if output_map is None else nn.MappedNorm(final_norm, output_map),
        head=None if config.tied else nn.Linear("embed -> vocab", embed=channels, vocab=vocab, key=head_key),
    )


@dataclasses.dataclass(frozen=True)
class _DefaultedWidth(Entry):
    """A width, which the config stores as None if it is `times` the channels of the residual stream."""

    name: str
    """The field of the config."""
    published: str
    """The attribute, which is always written as a number."""
    times: int
    default: int | None = None
    """The number if the attribute is missing or null; None: the stream's channels."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return the field."""
        embed = published.read("hidden_size", Size)
        width = published.read(self.published, Size, self.default or embed)
        return {self.name: None if width == self.times * embed else width}

    def write(self, config: OPTConfig) -> Attributes:
        """Return the attribute."""
        width = getattr(config, self.name)
        return {self.published: self.times * config.embed if width is None else width}


class _FinalNorm(Entry):
    """Whether there is a norm after the last layer, by `_remove_final_layer_norm`."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `final_norm`."""
        return {"final_norm": not published.flag("_remove_final_layer_norm", False)}

    def write(self, config: OPTConfig) -> Attributes:
        """Return the attribute."""
        return {"_remove_final_layer_norm": not config.final_norm}


def _opt(embed: int, layers: int, heads: int) -> OPTConfig:
    return OPTConfig(vocab=50_272, embed=embed, layers=layers, heads=heads, dropout=0.1)


_PRESETS = {
    "opt-byte-500k": OPTConfig(vocab=256, embed=96, layers=4, heads=6, max_seq=512),
    "opt-125m": _opt(768, 12, 12),
    "opt-350m": dataclasses.replace(_opt(1024, 24, 16), pre_norm=False, table_channels=512),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "opt-66b": _opt(9216, 64, 72),
}

_DECODER, _LAYER = "model.decoder.", "model.decoder.layers.{layer}."
_BOTH_NORMS = (("self_attn_layer_norm", "mixer"), ("final_layer_norm", "feed_forward"))
OPT = Family(
    *("opt", OPTConfig, build_opt, _PRESETS, "OPTForCausalLM", "opt"),
    (
        Attribute("vocab", "vocab_size", 50_272),
        Count("embed", "hidden_size", 768),
        Attribute("layers", "num_hidden_layers", 12),
        Attribute("heads", "num_attention_heads", 12),
        _DefaultedWidth("mlp", "ffn_dim", 4, default=3072),
        Attribute("max_seq", "max_position_embeddings", 2048),
        Attribute("dropout", "dropout", 0.1),
        Attribute("pre_norm", "do_layer_norm_before", True),
        _FinalNorm(),
        _DefaultedWidth("table_channels", "word_embed_proj_dim", 1),
        Attribute("bias", "enable_bias", True),
        Attribute("norm_weights", "layer_norm_elementwise_affine", True),
        Unpublished("eps", 1e-5, "all models of this family have this epsilon"),
        Activation("relu", "activation_function"),
        Attribute("tied", "tie_word_embeddings", True),
        Ignore("activation_dropout", "init_std", "layerdrop"),  # rates and deviations of training
    ),
    (
        Rule(f"{_DECODER}embed_tokens.weight", "embedding.weight"),
        Rule("lm_head.weight", "head.weight"),
        Rule(f"{_DECODER}embed_positions.weight", "positions.weight"),
        Rule(f"{_DECODER}project_in.weight", "embedding_map.weight"),
        Rule(f"{_DECODER}project_out.weight", "norm.map.weight"),
        *weight_and_bias(f"{_DECODER}final_layer_norm", "norm"),
        # The `MappedNorm` of a model with `table_channels` holds the final norm.
        *weight_and_bias(f"{_DECODER}final_layer_norm", "norm.norm"),
        *attention_weights(prefix=f"{_LAYER}self_attn.", output="out"),
        *(
            rule
            for published, sublayer in _BOTH_NORMS
            for norm_field in ("norm", "sum_norm")
            for rule in weight_and_bias(f"{_LAYER}{published}", f"{sublayer}.{norm_field}")
        ),
        *weight_and_bias(f"{_LAYER}fc1", "feed_forward.layer.up"),
        *weight_and_bias(f"{_LAYER}fc2", "feed_forward.layer.down"),
    ),
    ignored_suffixes=("decoder.version",),
)
