"""GPT-J (Wang and Komatsuzaki 2021) and CodeGen (Nijkamp et al. 2022, arXiv:2203.13474).

Attention and feed-forward layer are parallel: neither reads the other's output. The first channels of each head are
rotated in neighboring pairs. Of the projections, only those of feed-forward layers and the head have biases.
"""

import dataclasses

import jax
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Activation, Attribute, Entry, Expect, Fields, Ignore, Nullable
from .._config_types import Attributes, Length, PublishedConfig, Size
from .._family import DECODER_CLASSIFIER, Family
from .._weight_rules import Rule
from ._common import attention_weights, INTO_HEADS, LAYER_H, leaf_paths, LOGIT_BIAS, OUT_OF_HEADS, weight_and_bias
from ._decoder import damping, decoder, mlp, rotary_of
from ._gpt2 import layer_norm, OlderDecoderConfig, SUMMARY


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTJConfig(OlderDecoderConfig):
    """The config of a GPT-J."""

    rotary_dim: Size = 64
    """The number of channels of each head that are rotated, an even number."""
    tied: bool = False
    max_seq: Length = 2048
    """The length of the longest rows that the model was trained on, in tokens; it does not change the model."""
    theta = 10_000.0  # the base of rotary positions, which no attribute states

    def __post_init__(self):
        if self.rotary_dim > self.head_size:
            raise ValueError(
                f"{type(self).__name__}(embed={self.embed}, heads={self.heads}, rotary_dim={self.rotary_dim}): a head "
                f"has {self.head_size} channels; give a rotary_dim of at most this number."
            )


def build_gptj(config: GPTJConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a GPT-J or a CodeGen with random weights."""
    rotary = rotary_of(config, config.rotary_dim, "rotary_dim", interleaved=True)
    dropout = nn.Dropout(config.dropout) if config.dropout else None

    def block(key: Key[Array, ""]) -> nn.ParallelResidual:
        mixer_key, feed_forward_key = jax.random.split(key)
        attention = nn.Attention(
            embed=config.embed,
            heads=config.heads,
            head_dim=config.head_size,
            output_std=damping(config) * config.embed**-0.5,
            rotary=rotary,
            key=mixer_key,
        )
        branches = attention, mlp(config, config.mlp_size, bias=True, key=feed_forward_key)
        return nn.ParallelResidual(
            tuple(nn.Residual(branch, dropout=dropout) for branch in branches), layer_norm(config)
        )

    return decoder(config, block, final_norm=layer_norm(config), dropout=dropout, logit_bias=True, key=key)


def _attributes() -> tuple[Entry, ...]:
    return (
        Attribute("vocab", "vocab_size", 50_400),
        # Transformers prefers the first of two names, and writes the second.
        Attribute("embed", ("hidden_size", "n_embd"), 4096, written=("n_embd",)),
        Attribute("layers", ("num_hidden_layers", "n_layer"), 28, written=("n_layer",)),
        Attribute("heads", ("num_attention_heads", "n_head"), 16, written=("n_head",)),
        Attribute("max_seq", ("max_position_embeddings", "n_positions"), 2048, written=("n_positions",)),
        Attribute("mlp", "n_inner", None),
        Nullable("rotary_dim", "rotary_dim", 64),
        Attribute("eps", "layer_norm_epsilon", 1e-5),
        Attribute("dropout", "resid_pdrop", 0.0, written=("resid_pdrop", "embd_pdrop")),
        Activation("gelu_new", "activation_function"),
        Attribute("tied", "tie_word_embeddings", False),
        # Older releases of transformers wrote these attributes, and no model reads them.
        Expect("rotary", True, written=False),
        Expect("scale_attn_weights", True, written=False),
        Ignore(*SUMMARY, "n_ctx"),
    )


_WEIGHTS = (
    Rule("transformer.wte.weight", "embedding.weight"),
    *weight_and_bias("transformer.ln_f", "norm"),
    *(Rule("lm_head.weight", "head.weight"), *LOGIT_BIAS),
    *weight_and_bias(f"{LAYER_H}ln_1", "norm"),
    *weight_and_bias(f"{LAYER_H}mlp.fc_in", "feed_forward.layer.up"),
    *weight_and_bias(f"{LAYER_H}mlp.fc_out", "feed_forward.layer.down"),
)
_PRESETS = {
    "gptj-byte-500k": GPTJConfig(vocab=256, embed=96, layers=4, heads=6, rotary_dim=8),
    "gpt-j-6b": GPTJConfig(vocab=50_400, embed=4096, layers=28, heads=16),
}
GPTJ = Family(
    *("gptj", GPTJConfig, build_gptj, _PRESETS, "GPTJForCausalLM", "gptj", _attributes()),
    (*_WEIGHTS, *attention_weights(prefix=f"{LAYER_H}attn.", output="out")),
    ignored_suffixes=(".attn.bias", ".attn.masked_bias"),
    classifier=DECODER_CLASSIFIER,
)


# CodeGen was trained in 4 parts of each tensor, and its `qkv_proj` has one group of rows for each part.
_GROUPS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodeGenConfig(GPTJConfig):
    """The config of a CodeGen."""

    def __post_init__(self):
        super().__post_init__()
        if self.embed % _GROUPS:
            raise ValueError(
                f"CodeGenConfig(embed={self.embed}): queries, keys and values are published in {_GROUPS} groups of "
                f"channels; give an embed that is a multiple of {_GROUPS}."
            )


class _AutoMap(Entry):
    """`auto_map`, which names a publisher's own program. CodeGen2 has this attribute, and CodeGen does not."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return no field; refuse a CodeGen2."""
        if published.take("auto_map", None) is not None:
            published.refuse(
                "auto_map is stated, as in CodeGen2, whose own program divides queries, keys and values into other "
                "groups; only CodeGen 350M to 16B can be loaded, which have no auto_map."
            )
        return {}

    def write(self, config: CodeGenConfig) -> Attributes:
        """Return no attribute."""
        return {}


def _codegen(embed: int, layers: int, heads: int, rotary_dim: int = 64) -> CodeGenConfig:
    return CodeGenConfig(vocab=51_200, embed=embed, layers=layers, heads=heads, rotary_dim=rotary_dim)


_CODEGEN_PRESETS = {
    "codegen-byte-500k": CodeGenConfig(vocab=256, embed=96, layers=4, heads=6, rotary_dim=8),
    "codegen-350m": _codegen(1024, 20, 16, 32),
    "codegen-2b": _codegen(2560, 32, 32),
    "codegen-6b": _codegen(4096, 33, 16),
    "codegen-16b": _codegen(6144, 34, 24),
}
CODEGEN = Family(
    *("codegen", CodeGenConfig, build_gptj, _CODEGEN_PRESETS, "CodeGenForCausalLM", "codegen"),
    (*_attributes(), _AutoMap()),
    (
        *_WEIGHTS,
        Rule(
            f"{LAYER_H}attn.qkv_proj.weight",
            leaf_paths(("query", "value", "key"), "weight"),
            INTO_HEADS,
            groups=_GROUPS,
        ),
        Rule(f"{LAYER_H}attn.out_proj.weight", "mixer.layer.output.weight", OUT_OF_HEADS),
    ),
    ignored_suffixes=(".attn.causal_mask", ".attn.masked_bias"),
    classifier=None,
)
