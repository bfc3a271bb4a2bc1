"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, biases everywhere, tied embedding."""

import dataclasses
import functools

import jax
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Activation, Attribute, Entry, Expect, Ignore
from .._config_types import LayerCount, Length, NotNegative, Rate, Size
from .._family import Family, ModelConfig, OLDER_DECODER_CLASSIFIER
from .._weight_rules import Rule
from ._common import leaf_paths
from ._decoder import activation_of, stacks_of


_SUMMARY = tuple(f"summary_{x}" for x in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj"))
ATTRIBUTES: tuple[Entry, ...] = (
    Attribute("vocab", "vocab_size", 50_257),
    Attribute("embed", "n_embd", 768),
    Attribute("layers", "n_layer", 12),
    Attribute("heads", "n_head", 12),
    Attribute("max_seq", "n_positions", 1024),
    Attribute("mlp", "n_inner", None),
    Attribute("eps", "layer_norm_epsilon", 1e-5),
    Attribute("dropout", "resid_pdrop", 0.1, written=("resid_pdrop", "embd_pdrop")),
    Activation("gelu_new", "activation_function"),
    Attribute("score_scale", "scale_attn_weights", True),
    Attribute("tied", "tie_word_embeddings", True),
    Attribute("layer_scales", "scale_attn_by_inverse_layer_idx", False),
    Expect("add_cross_attention", False, written=False),
    Ignore(
        "reorder_and_upcast_attn"
    ),  # This attribute changes only rounding, and here scores are computed in float32 at least.
    Ignore("n_ctx", "predict_special_tokens", *_SUMMARY, attn_pdrop=0.0),
)

_LAYER, _TURNED = "transformer.h.{layer}.", "inputs outputs -> outputs inputs"
_QKV = ("query", "key", "value")
# Weights of maps are published with inputs before outputs; queries, keys and values are one array, side by side.
WEIGHTS = (
    Rule("transformer.wte.weight", "embedding.weight"),
    Rule("lm_head.weight", "head.weight"),
    Rule("transformer.wpe.weight", "positions.weight"),
    *(Rule(f"{_LAYER}ln_1.{leaf}", f"mixer.norm.{leaf}") for leaf in ("weight", "bias")),
    Rule(f"{_LAYER}attn.c_attn.weight", leaf_paths(_QKV, "weight"), "embed (h d) -> h d embed", axis=1),
    Rule(f"{_LAYER}attn.c_attn.bias", leaf_paths(_QKV, "bias"), "(h d) -> h d"),
    Rule(f"{_LAYER}attn.c_proj.weight", "mixer.layer.output.weight", "(h d) embed -> embed h d"),
    Rule(f"{_LAYER}attn.c_proj.bias", "mixer.layer.output.bias"),
    *(Rule(f"{_LAYER}ln_2.{leaf}", f"feed_forward.norm.{leaf}") for leaf in ("weight", "bias")),
    Rule(f"{_LAYER}mlp.c_fc.weight", "feed_forward.layer.up.weight", _TURNED),
    Rule(f"{_LAYER}mlp.c_fc.bias", "feed_forward.layer.up.bias"),
    Rule(f"{_LAYER}mlp.c_proj.weight", "feed_forward.layer.down.weight", _TURNED),
    Rule(f"{_LAYER}mlp.c_proj.bias", "feed_forward.layer.down.bias"),
    *(Rule(f"transformer.ln_f.{leaf}", f"norm.{leaf}") for leaf in ("weight", "bias")),
    # GGUF files have maps with outputs first.
    Rule(f"{_LAYER}attn.c_attn.linear.weight", leaf_paths(_QKV, "weight"), "(h d) embed -> h d embed", variant=True),
    Rule(f"{_LAYER}attn.c_proj.linear.weight", "mixer.layer.output.weight", "embed (h d) -> embed h d", variant=True),
    Rule(f"{_LAYER}mlp.c_fc.linear.weight", "feed_forward.layer.up.weight", variant=True),
    Rule(f"{_LAYER}mlp.c_proj.linear.weight", "feed_forward.layer.down.weight", variant=True),
)


@dataclasses.dataclass(frozen=True)
class GPT2Config(ModelConfig):
    """The config of a GPT-2. Dropout acts on the embeddings and on both residual additions, not inside the softmax."""

    layers: LayerCount
    """The number of layers."""
    heads: Size
    """The number of heads."""
    max_seq: Length = 1024
    """The number of learned positions, which is the length of the longest rows, in tokens."""
    mlp: Size | None = None
    """Hidden features of a feed-forward layer; None: 4 * embed."""
    activation: str = "gelu_tanh"
    """The activation of a feed-forward layer's features: a name of `nn.ACTIVATIONS`."""
    eps: NotNegative = 1e-5
    """The epsilon of norms, which is added to the mean square before the root."""
    score_scale: bool = True
    """Whether scores are divided by the root of a head's channels."""
    layer_scales: bool = False
    """Whether scores are also divided by the layer's number, counted from 1."""
    tied: bool = True
    """Whether the embedding's table is the head too."""
    dropout: Rate = 0.0
    """The rate of dropout on the embeddings and on both residual additions."""


def build_gpt2(config: GPT2Config, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a GPT-2 with random weights."""
    embed, mlp = config.embed, config.mlp or 4 * config.embed
    head_dim, remainder = divmod(embed, config.heads)
    if remainder:
        raise ValueError(f"GPT2Config(embed={embed}, heads={config.heads}): heads must divide embed.")
    damping = (2 * config.layers) ** -0.5
    dropout = nn.Dropout(config.dropout) if config.dropout else None

    def norm() -> nn.LayerNorm:
        return nn.LayerNorm("embed", embed=embed, eps=config.eps)

    def block(number: int, key: Key[Array, ""]) -> nn.Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        attention = nn.Attention(
            embed=embed,
            heads=config.heads,
            head_dim=head_dim,
            bias=True,
            output_std=damping * embed**-0.5,
            scores=nn.Scores((head_dim**-0.5 if config.score_scale else 1.0) / number),
            key=mixer_key,
        )
        feed_forward = nn.MLP(
            embed=embed,
            mlp=mlp,
            activation=activation_of(config),
            bias=True,
            output_std=damping * mlp**-0.5,
            key=feed_forward_key,
        )
        return nn.Block(
            nn.Residual(attention, norm(), dropout=dropout), nn.Residual(feed_forward, norm(), dropout=dropout)
        )

    embedding_key, positions_key, stack_key = jax.random.split(key, 3)
    if config.layer_scales:
        stacks = stacks_of(block, range(1, config.layers + 1), key=stack_key)
    else:
        stacks = (nn.Stack(functools.partial(block, 1), config.layers, key=stack_key),)
    head = nn.Linear("embed -> vocab", embed=embed, vocab=config.vocab, key=jax.random.fold_in(key, 3))
    return nn.Transformer(
        embedding=nn.Embedding(vocab=config.vocab, embed=embed, key=embedding_key),
        positions=nn.LearnedPositions(max_seq=config.max_seq, embed=embed, key=positions_key),
        stacks=stacks,
        norm=norm(),
        head=None if config.tied else head,
        dropout=dropout,
    )


_PRESETS = {
    "gpt2-byte-1m": GPT2Config(vocab=256, embed=128, layers=4, heads=8, max_seq=512),
    "gpt2": GPT2Config(vocab=50_257, embed=768, layers=12, heads=12, dropout=0.1),
    "gpt2-medium": GPT2Config(vocab=50_257, embed=1024, layers=24, heads=16, dropout=0.1),
    "gpt2-large": GPT2Config(vocab=50_257, embed=1280, layers=36, heads=20, dropout=0.1),
    "gpt2-xl": GPT2Config(vocab=50_257, embed=1600, layers=48, heads=25, dropout=0.1),
}

GPT2 = Family(
    *("gpt2", GPT2Config, build_gpt2, _PRESETS, "GPT2LMHeadModel", "gpt2"),
    ATTRIBUTES,
    WEIGHTS,
    ignored_suffixes=(".attn.bias", ".attn.masked_bias"),
    is_bare=True,
    classifier=OLDER_DECODER_CLASSIFIER,
)
