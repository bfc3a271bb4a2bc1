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
from .._config import Config
from .._weights import Published, Weight


@dataclasses.dataclass(frozen=True)
class GPT2:
    """The numbers of a GPT-2. Dropout acts on the embeddings and on both residual additions, not inside the softmax."""

    vocab: int
    embed: int
    layers: int
    heads: int
    max_seq: int = 1024
    mlp: int | None = None  # 4 * embed by default
    eps: float = 1e-5
    dropout: float = 0.0


def build_gpt2(numbers: GPT2, *, key: Key[Array, ""]) -> Transformer:
    """A GPT-2 with random weights."""
    embed, mlp = numbers.embed, numbers.mlp or 4 * numbers.embed
    if embed % numbers.heads:
        raise ValueError(f"GPT2(embed={embed}, heads={numbers.heads}): heads must divide embed.")
    damping = (2 * numbers.layers) ** -0.5
    dropout = Dropout(numbers.dropout) if numbers.dropout else None

    def block(key: Key[Array, ""]) -> Block:
        attention, feed_forward = jax.random.split(key)
        return Block(
            mixer=Residual(
                Attention(
                    embed=embed,
                    heads=numbers.heads,
                    head_dim=embed // numbers.heads,
                    bias=True,
                    output_std=damping * embed**-0.5,
                    key=attention,
                ),
                LayerNorm("embed", embed=embed, eps=numbers.eps),
                dropout=dropout,
            ),
            feed_forward=Residual(
                MLP(
                    embed=embed,
                    mlp=mlp,
                    activation=gelu_tanh,
                    bias=True,
                    output_std=damping * mlp**-0.5,
                    key=feed_forward,
                ),
                LayerNorm("embed", embed=embed, eps=numbers.eps),
                dropout=dropout,
            ),
        )

    embedding, positions, stack = jax.random.split(key, 3)
    return Transformer(
        embedding=Embedding(vocab=numbers.vocab, embed=embed, key=embedding),
        positions=LearnedPositions(max_seq=numbers.max_seq, embed=embed, key=positions),
        stacks=(Stack(block, numbers.layers, key=stack),),
        norm=LayerNorm("embed", embed=embed, eps=numbers.eps),
        dropout=dropout,
    )


GPT2_PRESETS = {
    "gpt2-byte-1m": GPT2(vocab=256, embed=128, layers=4, heads=8, max_seq=512),
    "gpt2": GPT2(vocab=50_257, embed=768, layers=12, heads=12, dropout=0.1),
    "gpt2-medium": GPT2(vocab=50_257, embed=1024, layers=24, heads=16, dropout=0.1),
    "gpt2-large": GPT2(vocab=50_257, embed=1280, layers=36, heads=20, dropout=0.1),
    "gpt2-xl": GPT2(vocab=50_257, embed=1600, layers=48, heads=25, dropout=0.1),
}


def _read(config: Config) -> GPT2:
    config.expect("activation_function", "gelu_new")
    config.expect("scale_attn_weights", True)
    config.expect("scale_attn_by_inverse_layer_idx", False)
    config.expect("reorder_and_upcast_attn", False)  # which changes rounding alone
    config.expect("add_cross_attention", False)
    config.expect("tie_word_embeddings", True)
    for name in ("n_ctx", *(f"summary_{x}" for x in _OF_SUMMARIES)):
        config.take(name, None)
    return GPT2(
        vocab=config.take("vocab_size", 50_257),
        embed=config.take("n_embd", 768),
        layers=config.take("n_layer", 12),
        heads=config.take("n_head", 12),
        max_seq=config.take("n_positions", 1024),
        mlp=config.take("n_inner", None),
        eps=config.take("layer_norm_epsilon", 1e-5),
        dropout=config.take("resid_pdrop", 0.1),
    )


def _write(numbers: GPT2) -> dict[str, Any]:
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop"), numbers.dropout)
    sizes = {"vocab_size": numbers.vocab, "n_embd": numbers.embed, "n_layer": numbers.layers, "n_head": numbers.heads}
    more = {"n_positions": numbers.max_seq, "n_inner": numbers.mlp, "layer_norm_epsilon": numbers.eps}
    return sizes | more | dropouts | {"attn_pdrop": 0.0, "activation_function": "gelu_new"}


def _weights(numbers: GPT2) -> list[Weight]:
    """Maps are stored inputs first; queries, keys and values side by side."""
    layers, layer = range(numbers.layers), "transformer.h.{layer}."
    block, attention = lambda m: m.stacks[0].blocks, lambda m: m.stacks[0].blocks.mixer.layer
    joined = lambda name: lambda m: tuple(getattr(getattr(attention(m), x), name) for x in ("query", "key", "value"))
    turned = "inputs outputs -> outputs inputs"
    return [
        Weight("transformer.wte.weight", lambda m: m.embedding.weight),
        Weight("transformer.wpe.weight", lambda m: m.positions.weight),
        Weight(f"{layer}ln_1.weight", lambda m: block(m).mixer.norm.weight, "", layers),
        Weight(f"{layer}ln_1.bias", lambda m: block(m).mixer.norm.bias, "", layers),
        Weight(f"{layer}attn.c_attn.weight", joined("weight"), "embed (h d) -> h d embed", layers, axis=1),
        Weight(f"{layer}attn.c_attn.bias", joined("bias"), "(h d) -> h d", layers),
        Weight(f"{layer}attn.c_proj.weight", lambda m: attention(m).output.weight, "(h d) embed -> embed h d", layers),
        Weight(f"{layer}attn.c_proj.bias", lambda m: attention(m).output.bias, "", layers),
        Weight(f"{layer}ln_2.weight", lambda m: block(m).feed_forward.norm.weight, "", layers),
        Weight(f"{layer}ln_2.bias", lambda m: block(m).feed_forward.norm.bias, "", layers),
        Weight(f"{layer}mlp.c_fc.weight", lambda m: block(m).feed_forward.layer.up.weight, turned, layers),
        Weight(f"{layer}mlp.c_fc.bias", lambda m: block(m).feed_forward.layer.up.bias, "", layers),
        Weight(f"{layer}mlp.c_proj.weight", lambda m: block(m).feed_forward.layer.down.weight, turned, layers),
        Weight(f"{layer}mlp.c_proj.bias", lambda m: block(m).feed_forward.layer.down.bias, "", layers),
        Weight("transformer.ln_f.weight", lambda m: m.norm.weight),
        Weight("transformer.ln_f.bias", lambda m: m.norm.bias),
    ]


_OF_SUMMARIES = ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")
GPT2_PUBLISHED = Published(
    "GPT2LMHeadModel",
    "gpt2",
    _read,
    _write,
    _weights,
    ignored_suffixes=(".attn.bias", ".attn.masked_bias"),
    prefix="transformer.",
)
