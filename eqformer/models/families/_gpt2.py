"""GPT-2 (Radford et al. 2019), GPT-Neo (Black et al. 2021), and GPTBigCode, the family of StarCoder (Li et al. 2023).

Their positions are learned, their norms are `LayerNorm`s with biases, and their feed-forward layers have no gates. In
published models, the embedding is tied to the head, layers with and without a window alternate in GPT-Neo, and a
GPTBigCode has one key head.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Activation, Attribute, Entry, Expect, Fields, Ignore
from .._config_types import Attributes, Index, LayerCount, Length, NotNegative, PublishedConfig, Rate, Size
from .._family import divide_heads, Family, ModelConfig, OLDER_DECODER_CLASSIFIER
from .._layer_attributes import every
from .._weight_rules import Rule
from ._common import attention_weights, INTO_HEADS, LAYER_H, leaf_paths, OF_HEADS, OUT_OF_HEADS, QKV, weight_and_bias
from ._decoder import causal_mask, damping, layer_windows, mlp, stacks_of


SUMMARY = tuple(f"summary_{x}" for x in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj"))
"""Attributes of `GPT2DoubleHeadsModel`, a model with a head for multiple choice; no other model reads them."""
_HEADS, _NEO_LAYERS = 12, 24  # transformers' defaults: heads of GPT-2, layers of GPT-Neo
ATTRIBUTES: tuple[Entry, ...] = (
    Attribute("vocab", "vocab_size", 50_257),
    # Transformers prefers the first of two names, and writes the second.
    Attribute("embed", ("hidden_size", "n_embd"), 768, written=("n_embd",)),
    Attribute("layers", ("num_hidden_layers", "n_layer"), 12, written=("n_layer",)),
    Attribute("heads", ("num_attention_heads", "n_head"), _HEADS, written=("n_head",)),
    Attribute("max_seq", ("max_position_embeddings", "n_positions"), 1024, written=("n_positions",)),
    Attribute("mlp", "n_inner", None),
    Attribute("eps", "layer_norm_epsilon", 1e-5),
    Attribute("dropout", "resid_pdrop", 0.1, written=("resid_pdrop", "embd_pdrop")),
    Attribute("score_scale", "scale_attn_weights", True),
    Attribute("tied", "tie_word_embeddings", True),
    Expect("add_cross_attention", False, written=False),
    Ignore(*SUMMARY, attn_pdrop=0.0),
)

_TURNED = "inputs outputs -> outputs inputs"
# The tables of tokens and positions, the last norm and, if it is not tied, the head.
_ENDS = (
    Rule("transformer.wte.weight", "embedding.weight"),
    Rule("lm_head.weight", "head.weight"),
    Rule("transformer.wpe.weight", "positions.weight"),
    *weight_and_bias("transformer.ln_f", "norm"),
)
_NORMS = (
    *weight_and_bias(f"{LAYER_H}ln_1", "mixer.norm"),
    *weight_and_bias(f"{LAYER_H}ln_2", "feed_forward.norm"),
)
# GPT-2's maps are published with inputs before outputs; queries, keys and values are one array, side by side.
WEIGHTS = (
    *_ENDS,
    *_NORMS,
    Rule(f"{LAYER_H}attn.c_attn.weight", leaf_paths(QKV, "weight"), "embed (h d) -> h d embed", axis=1),
    Rule(f"{LAYER_H}attn.c_attn.bias", leaf_paths(QKV, "bias"), OF_HEADS),
    *weight_and_bias(f"{LAYER_H}attn.c_proj", "mixer.layer.output", "(h d) embed -> embed h d"),
    *weight_and_bias(f"{LAYER_H}mlp.c_fc", "feed_forward.layer.up", _TURNED),
    *weight_and_bias(f"{LAYER_H}mlp.c_proj", "feed_forward.layer.down", _TURNED),
    # GGUF files have maps with outputs first. `_gguf_older_decoders` gives these maps names of their own, because the
    # shape of a square map does not tell the order.
    Rule(f"{LAYER_H}attn.c_attn.linear.weight", leaf_paths(QKV, "weight"), INTO_HEADS, variant=True),
    Rule(f"{LAYER_H}attn.c_proj.linear.weight", "mixer.layer.output.weight", OUT_OF_HEADS, variant=True),
    Rule(f"{LAYER_H}mlp.c_fc.linear.weight", "feed_forward.layer.up.weight", variant=True),
    Rule(f"{LAYER_H}mlp.c_proj.linear.weight", "feed_forward.layer.down.weight", variant=True),
)


@dataclasses.dataclass(frozen=True)
class OlderDecoderConfig(ModelConfig):
    """Base class of configs with the fields of GPT-2 that its successors share."""

    layers: LayerCount
    """The number of layers."""
    heads: Size
    """The number of query heads, a divisor of `embed`; each head has `embed / heads` channels."""
    max_seq: Length = 1024
    """The number of learned positions, which is the length of the longest rows, in tokens."""
    mlp: Size | None = None
    """Hidden features of a feed-forward layer; None: 4 * embed."""
    activation: str = "gelu_tanh"
    """The activation of a feed-forward layer's features: a name of `nn.ACTIVATIONS`."""
    eps: NotNegative = 1e-5
    """The epsilon of norms, which is added to the variance before the root."""
    tied: bool = True
    """Whether the embedding's table is the head too."""
    dropout: Rate = 0.0
    """The rate of dropout on the embeddings and on both residual additions."""

    @property
    def head_size(self) -> int:
        """Channels of a head; raises a `ValueError` if the heads do not divide `embed`."""
        return divide_heads(self)

    @property
    def mlp_size(self) -> int:
        """Hidden features of a feed-forward layer."""
        return self.mlp or 4 * self.embed


@dataclasses.dataclass(frozen=True)
class GPT2Config(OlderDecoderConfig):
    """The config of a GPT-2. Dropout acts on embeddings and on both residual additions, not on attention weights."""

    score_scale: bool = True
    """Whether scores are divided by the root of a head's channels."""
    layer_scales: bool = False
    """Whether scores are also divided by the layer's number, counted from 1."""


def build_gpt2(config: GPT2Config, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a GPT-2 with random weights."""

    def block(score_divisor: int, key: Key[Array, ""]) -> nn.Block:
        return older_block(config, score_scale=_score_scale(config, config.score_scale) / score_divisor, key=key)

    if config.layer_scales:
        return _older_decoder(config, block, range(1, config.layers + 1), key=key)
    return _older_decoder(config, functools.partial(block, 1), key=key)


def _score_scale(config: OlderDecoderConfig, is_scaled: bool) -> float:
    return config.head_size**-0.5 if is_scaled else 1.0


def layer_norm(config: OlderDecoderConfig) -> nn.LayerNorm:
    """Return a `LayerNorm` of the residual stream."""
    return nn.LayerNorm("embed", embed=config.embed, eps=config.eps)


def older_block(
    config: OlderDecoderConfig,
    *,
    score_scale: float,
    kv_heads: int | None = None,
    bias: bool = True,
    window: int | None = None,
    key: Key[Array, ""],
) -> nn.Block:
    """Return a layer of GPT-2 or of one of its successors.

    Args:
        config: The config.
        score_scale: The factor of the scores.
        kv_heads: Heads of keys and values; None: as many as query heads.
        bias: Whether queries, keys and values have biases.
        window: The number of tokens that each token sees, itself included; None: itself and all tokens before it.
        key: Random key for the weights.
    """
    mixer_key, feed_forward_key = jax.random.split(key)
    dropout = nn.Dropout(config.dropout) if config.dropout else None
    attention = nn.Attention(
        embed=config.embed,
        heads=config.heads,
        head_dim=config.head_size,
        kv_heads=kv_heads,
        bias=bias,
        output_bias=True,
        output_std=damping(config) * config.embed**-0.5,
        scores=nn.Scores(score_scale),
        mask=causal_mask(window),
        key=mixer_key,
    )
    feed_forward = mlp(config, config.mlp_size, bias=True, key=feed_forward_key)
    return nn.Block(
        nn.Residual(attention, layer_norm(config), dropout=dropout),
        nn.Residual(feed_forward, layer_norm(config), dropout=dropout),
    )


def _older_decoder(
    config: OlderDecoderConfig,
    block: Callable[..., nn.Layer],
    kinds: Sequence[int | None] | None = None,
    *,
    key: Key[Array, ""],
) -> nn.Transformer:
    """Return a decoder with learned positions.

    With `kinds`, `block(kind, key)` builds each layer, otherwise `block(key)`.
    """
    embedding_key, positions_key, stack_key = jax.random.split(key, 3)
    embed, vocab = config.embed, config.vocab
    if kinds is None:
        stacks = (nn.Stack(block, config.layers, key=stack_key),)
    else:
        stacks = stacks_of(block, kinds, key=stack_key)
    new_head = functools.partial(nn.Linear, "embed -> vocab", embed=embed, vocab=vocab)
    return nn.Transformer(
        embedding=nn.Embedding(vocab=vocab, embed=embed, key=embedding_key),
        positions=nn.LearnedPositions(max_seq=config.max_seq, embed=embed, key=positions_key),
        stacks=stacks,
        norm=layer_norm(config),
        head=None if config.tied else new_head(key=jax.random.fold_in(key, 3)),
        dropout=nn.Dropout(config.dropout) if config.dropout else None,
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
    (
        *ATTRIBUTES,
        Activation("gelu_new", "activation_function"),
        Attribute("layer_scales", "scale_attn_by_inverse_layer_idx", False),
        # This attribute changes only rounding, and here scores are computed in float32 at least.
        Ignore("reorder_and_upcast_attn"),
        Ignore("n_ctx", "predict_special_tokens"),
    ),
    WEIGHTS,
    ignored_suffixes=(".attn.bias", ".attn.masked_bias"),
    is_bare=True,
    classifier=OLDER_DECODER_CLASSIFIER,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTNeoConfig(OlderDecoderConfig):
    """The config of a GPT-Neo."""

    window_layers: tuple[Index, ...]
    """The layers with a window."""
    window: Length = 256
    """The number of tokens that a token sees in the layers of `window_layers`."""
    max_seq: Length = 2048


def build_gpt_neo(config: GPTNeoConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a GPT-Neo with random weights."""

    def block(window: int | None, key: Key[Array, ""]) -> nn.Block:
        return older_block(config, score_scale=1.0, bias=False, window=window, key=key)

    return _older_decoder(config, block, layer_windows(config), key=key)


_TYPES = ("global", "local")


class _GlobalAndLocal(Entry):
    """The layers with a window, from a list of patterns with their repetitions, or from the type of each layer."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `window_layers`; refuse lists of other lengths and types, and lists that contradict each other."""
        layers = published.read("num_layers", LayerCount, _NEO_LAYERS)
        layers = published.read("num_hidden_layers", LayerCount, layers)
        types, patterns = published.listed("attention_layers", str), published.listed("attention_types", list)
        # If only `attention_layers` was stated, transformers reads it, but also saves its default patterns.
        default = [[[*_TYPES], 12]]
        if types is None or patterns not in (None, default):
            expanded = self._expand(published, layers, default if patterns is None else patterns)
            if types is not None and types != expanded:
                published.refuse(
                    f"attention_layers={types}, but attention_types={patterns} are {expanded}; give one of them."
                )
            types = expanded
        if len(types) != layers or {*types} - {*_TYPES}:
            published.refuse(f"attention_layers={types} must have {layers} items, each one of {list(_TYPES)}.")
        return {"window_layers": tuple(layer for layer, name in enumerate(types) if name == "local")}

    def _expand(self, published: PublishedConfig, layers: int, patterns: Sequence[list[Any]]) -> list[str]:
        """Return the type of each layer; refuse unknown types, and repeated patterns that do not add up to `layers`."""
        pairs = [
            published.checked("attention_types", tuple(pattern), tuple[list[str], LayerCount]) for pattern in patterns
        ]
        if unknown := {name for names, _ in pairs for name in names} - {*_TYPES}:
            published.refuse(f"attention_types={patterns}: {sorted(unknown)} are not among {list(_TYPES)}.")
        if sum(len(pattern) * times for pattern, times in pairs) != layers:
            published.refuse(
                f"attention_types={patterns}: with their repetitions, the patterns must have {layers} layers "
                "(num_layers)."
            )
        return [name for pattern, times in pairs for name in pattern * times]

    def write(self, config: GPTNeoConfig) -> Attributes:
        """Return one pattern of all layers."""
        pattern = ["local" if layer in config.window_layers else "global" for layer in range(config.layers)]
        return {"attention_types": [[pattern, 1]]}


def _gpt_neo(embed: int, layers: int, heads: int) -> GPTNeoConfig:
    return GPTNeoConfig(vocab=50_257, embed=embed, layers=layers, heads=heads, window_layers=every(2, layers))


_GPT_NEO_PRESETS = {
    "gpt-neo-byte-500k": GPTNeoConfig(
        vocab=256, embed=96, layers=4, heads=6, max_seq=512, window=64, window_layers=every(2, 4)
    ),
    "tinystories-33m": _gpt_neo(768, 4, 16),
    "gpt-neo-125m": _gpt_neo(768, 12, 12),
    "gpt-neo-1.3b": _gpt_neo(2048, 24, 16),
    "gpt-neo-2.7b": _gpt_neo(2560, 32, 20),
}

GPT_NEO = Family(
    *("gpt_neo", GPTNeoConfig, build_gpt_neo, _GPT_NEO_PRESETS, "GPTNeoForCausalLM", "gpt_neo"),
    (
        Attribute("vocab", "vocab_size", 50_257),
        Attribute("embed", "hidden_size", 2048),
        Attribute("layers", ("num_hidden_layers", "num_layers"), _NEO_LAYERS, written=("num_layers",)),
        Attribute("heads", ("num_attention_heads", "num_heads"), 16, written=("num_heads",)),
        Attribute("max_seq", "max_position_embeddings", 2048),
        Attribute("mlp", "intermediate_size", None),
        Attribute("eps", "layer_norm_epsilon", 1e-5),
        Attribute("dropout", "resid_dropout", 0.0, written=("resid_dropout", "embed_dropout")),
        Attribute("window", "window_size", 256),
        _GlobalAndLocal(),
        Activation("gelu_new", "activation_function"),
        Attribute("tied", "tie_word_embeddings", True),
        Ignore(*SUMMARY, "classifier_dropout"),
    ),
    (
        *(*_ENDS, *_NORMS, *attention_weights(prefix=f"{LAYER_H}attn.attention.", output="out")),
        *weight_and_bias(f"{LAYER_H}mlp.c_fc", "feed_forward.layer.up"),
        *weight_and_bias(f"{LAYER_H}mlp.c_proj", "feed_forward.layer.down"),
    ),
    ignored_suffixes=(".attention.bias", ".attention.masked_bias"),
    classifier=OLDER_DECODER_CLASSIFIER,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTBigCodeConfig(OlderDecoderConfig):
    """The config of a GPTBigCode. Dropout acts on the embeddings and on both residual additions."""

    kv_heads: Size = 1
    """The number of key heads: 1, or as many as query heads."""
    score_scale: bool = True
    """Whether scores are divided by the root of a head's channels."""
    max_seq: Length = 8192

    def __post_init__(self):
        if self.kv_heads not in (1, self.heads):
            raise ValueError(
                f"GPTBigCodeConfig(heads={self.heads}, kv_heads={self.kv_heads}): a published GPTBigCode has 1 key "
                "head, or as many as query heads; give one of these two numbers."
            )


def build_gpt_bigcode(config: GPTBigCodeConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a GPTBigCode with random weights."""
    scale = _score_scale(config, config.score_scale)
    block = functools.partial(older_block, config, score_scale=scale, kv_heads=config.kv_heads)
    return _older_decoder(config, lambda key: block(key=key), key=key)


class _MultiQuery(Entry):
    """The number of key heads, by `multi_query`: 1 if it is true, or as many as query heads."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `kv_heads`; refuse a `num_key_value_heads` beside `multi_query` that contradicts it."""
        heads = published.read("num_attention_heads", Size, published.read("n_head", Size, _HEADS))
        kv_heads = 1 if published.flag("multi_query", True) else heads
        published.expect("num_key_value_heads", kv_heads)
        return {"kv_heads": kv_heads}

    def write(self, config: GPTBigCodeConfig) -> Attributes:
        """Return the attribute."""
        return {"multi_query": config.kv_heads == 1}


def _starcoder(embed: int, layers: int, heads: int, activation: str = "gelu_tanh") -> GPTBigCodeConfig:
    return GPTBigCodeConfig(
        vocab=49_152, embed=embed, layers=layers, heads=heads, mlp=4 * embed, activation=activation, dropout=0.1
    )


_GPT_BIGCODE_PRESETS = {
    "gpt-bigcode-byte-500k": GPTBigCodeConfig(vocab=256, embed=96, layers=4, heads=6, max_seq=512),
    "tiny-starcoder-py": _starcoder(768, 20, 12),
    "santacoder": dataclasses.replace(_starcoder(2048, 24, 16), vocab=49_280, max_seq=2048),
    "starcoderbase-1b": _starcoder(2048, 24, 16),
    "starcoderbase-3b": _starcoder(2816, 36, 22),
    "starcoderbase-7b": _starcoder(4096, 42, 32),
    "starcoder": _starcoder(6144, 40, 48, "gelu"),
}

GPT_BIGCODE = Family(
    *("gpt_bigcode", GPTBigCodeConfig, build_gpt_bigcode, _GPT_BIGCODE_PRESETS, "GPTBigCodeForCausalLM", "gpt_bigcode"),
    (
        *ATTRIBUTES,
        Activation("gelu_pytorch_tanh", "activation_function"),
        _MultiQuery(),
        # These attributes change only rounding, and here scores are computed in float32 at least.
        Ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
        # Settings of the publisher's own program for inference.
        Ignore("inference_runner", "pad_key_length", "pre_allocate_kv_cache", "validate_runner_input"),
        Ignore("max_batch_size", "max_sequence_length"),
    ),
    (
        *(*_ENDS, *_NORMS),
        # With one key head, all queries are before the key; otherwise, each head's query is before the head's key.
        Rule(f"{LAYER_H}attn.c_attn.weight", leaf_paths(QKV, "weight"), INTO_HEADS, groups="kv_heads"),
        Rule(f"{LAYER_H}attn.c_attn.bias", leaf_paths(QKV, "bias"), OF_HEADS, groups="kv_heads"),
        *weight_and_bias(f"{LAYER_H}attn.c_proj", "mixer.layer.output", OUT_OF_HEADS),
        *weight_and_bias(f"{LAYER_H}mlp.c_fc", "feed_forward.layer.up"),
        *weight_and_bias(f"{LAYER_H}mlp.c_proj", "feed_forward.layer.down"),
    ),
    ignored_suffixes=(".attn.bias", ".attn.masked_bias"),
    classifier=OLDER_DECODER_CLASSIFIER,
)
