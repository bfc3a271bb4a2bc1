"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, biases everywhere, tied embedding."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Key

from ...nn import (
    Attention,
    Block,
    Dropout,
    Embedding,
    gelu_tanh,
    LayerNorm,
    LearnedPositions,
    MLP,
    Residual,
    Stack,
    Transformer,
)
from .._attributes import Attribute, Expect, Ignore
from .._family import Family, ModelConfig
from .._weights import Rule


@dataclasses.dataclass(frozen=True)
class GPT2Config(ModelConfig):
    """The config of a GPT-2. Dropout acts on the embeddings and on both residual additions, not inside the softmax."""

    layers: int
    """Layers."""
    heads: int
    """Heads."""
    max_seq: int = 1024
    """The longest rows: the positions of the table."""
    mlp: int | None = None
    """Hidden features of a feed-forward layer; None: 4 * embed."""
    eps: float = 1e-5
    """What norms add before the root."""
    dropout: float = 0.0
    """The rate, on the embeddings and on both residual additions."""


def build_gpt2(config: GPT2Config, *, key: Key[Array, ""]) -> Transformer:
    """A GPT-2 with random weights."""
    embed, mlp = config.embed, config.mlp or 4 * config.embed
    if embed % config.heads:
        raise ValueError(f"GPT2Config(embed={embed}, heads={config.heads}): heads must divide embed.")
    damping = (2 * config.layers) ** -0.5
    dropout = Dropout(config.dropout) if config.dropout else None

    norm = lambda: LayerNorm("embed", embed=embed, eps=config.eps)

    def block(key: Key[Array, ""]) -> Block:
        mixes, feeds = jax.random.split(key)
        heads: dict[str, Any] = {"heads": config.heads, "head_dim": embed // config.heads}
        attention = Attention(embed=embed, **heads, bias=True, output_std=damping * embed**-0.5, key=mixes)
        sizes: dict[str, Any] = {"embed": embed, "mlp": mlp, "output_std": damping * mlp**-0.5}
        feed_forward = MLP(**sizes, activation=gelu_tanh, bias=True, key=feeds)
        return Block(Residual(attention, norm(), dropout=dropout), Residual(feed_forward, norm(), dropout=dropout))

    embedding, positions, stack = jax.random.split(key, 3)
    return Transformer(
        embedding=Embedding(vocab=config.vocab, embed=embed, key=embedding),
        positions=LearnedPositions(max_seq=config.max_seq, embed=embed, key=positions),
        stacks=(Stack(block, config.layers, key=stack),),
        norm=norm(),
        dropout=dropout,
    )


_PRESETS = {
    "gpt2-byte-1m": GPT2Config(vocab=256, embed=128, layers=4, heads=8, max_seq=512),
    "gpt2": GPT2Config(vocab=50_257, embed=768, layers=12, heads=12, dropout=0.1),
    "gpt2-medium": GPT2Config(vocab=50_257, embed=1024, layers=24, heads=16, dropout=0.1),
    "gpt2-large": GPT2Config(vocab=50_257, embed=1280, layers=36, heads=20, dropout=0.1),
    "gpt2-xl": GPT2Config(vocab=50_257, embed=1600, layers=48, heads=25, dropout=0.1),
}

_LAYER, _TURNED = "transformer.h.{layer}.", "inputs outputs -> outputs inputs"
_joined = lambda leaf: tuple(f"mixer.layer.{name}.{leaf}" for name in ("query", "key", "value"))
# Maps are stored inputs first; queries, keys and values side by side.
_WEIGHTS = (
    Rule("transformer.wte.weight", "embedding.weight"),
    Rule("transformer.wpe.weight", "positions.weight"),
    *(Rule(f"{_LAYER}ln_1.{leaf}", f"mixer.norm.{leaf}") for leaf in ("weight", "bias")),
    Rule(f"{_LAYER}attn.c_attn.weight", _joined("weight"), "embed (h d) -> h d embed", axis=1),
    Rule(f"{_LAYER}attn.c_attn.bias", _joined("bias"), "(h d) -> h d"),
    Rule(f"{_LAYER}attn.c_proj.weight", "mixer.layer.output.weight", "(h d) embed -> embed h d"),
    Rule(f"{_LAYER}attn.c_proj.bias", "mixer.layer.output.bias"),
    *(Rule(f"{_LAYER}ln_2.{leaf}", f"feed_forward.norm.{leaf}") for leaf in ("weight", "bias")),
    Rule(f"{_LAYER}mlp.c_fc.weight", "feed_forward.layer.up.weight", _TURNED),
    Rule(f"{_LAYER}mlp.c_fc.bias", "feed_forward.layer.up.bias"),
    Rule(f"{_LAYER}mlp.c_proj.weight", "feed_forward.layer.down.weight", _TURNED),
    Rule(f"{_LAYER}mlp.c_proj.bias", "feed_forward.layer.down.bias"),
    *(Rule(f"transformer.ln_f.{leaf}", f"norm.{leaf}") for leaf in ("weight", "bias")),
)
_SUMMARY = tuple(f"summary_{x}" for x in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj"))
GPT2 = Family(
    *("gpt2", GPT2Config, build_gpt2, _PRESETS, "GPT2LMHeadModel", "gpt2"),
    (
        Attribute("vocab", "vocab_size", 50_257),
        Attribute("embed", "n_embd", 768),
        Attribute("layers", "n_layer", 12),
        Attribute("heads", "n_head", 12),
        Attribute("max_seq", "n_positions", 1024),
        Attribute("mlp", "n_inner", None),
        Attribute("eps", "layer_norm_epsilon", 1e-5),
        Attribute("dropout", "resid_pdrop", 0.1, written=("resid_pdrop", "embd_pdrop")),
        Expect("activation_function", "gelu_new"),
        *(Expect(name, True, written=False) for name in ("scale_attn_weights", "tie_word_embeddings")),
        *(Expect(name, False, written=False) for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention")),
        Expect("reorder_and_upcast_attn", False, written=False),  # which changes rounding alone
        Ignore("n_ctx", *_SUMMARY, attn_pdrop=0.0),
    ),
    _WEIGHTS,
    ignored_suffixes=(".attn.bias", ".attn.masked_bias"),
    prefix="transformer.",
)
