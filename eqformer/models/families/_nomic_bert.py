"""NomicBERT (Nussbaum et al. 2024, arXiv:2402.01613) and GTE (Zhang et al. 2024, arXiv:2407.19669).

Both are BERTs with rotary positions instead of learned positions, and with gated feed-forward layers. Arrays are
published under the names of the publishers' own code. Transformers writes the same names, but with another prefix for
the base model's arrays, and it writes some attributes differently.
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Activation, Attribute, Count, Entry, Expect, Fields, Ignore
from .._config_types import Index, Length, Positive, PublishedConfig, Size
from .._family import ClassifierTable, divide_heads, Family, linear_rules
from .._rotary_attributes import RotaryPositions
from .._rotary_scaling import either_rotary_parameters
from .._weight_rules import Rule
from ._bert import BERTConfig
from ._common import (
    gated_weights,
    HeadSize,
    INTO_HEADS,
    leaf_paths,
    OF_HEADS,
    OUT_OF_HEADS,
    SIZES,
    weight_and_bias,
    WIDTH,
)
from ._decoder import activation_of, rotary_of


@dataclasses.dataclass(frozen=True)
class NomicBERTConfig(BERTConfig):
    """The config of a NomicBERT, whose maps have no biases."""

    _: dataclasses.KW_ONLY
    head_dim: Size | None = None
    """Channels of a head; None: embed / heads."""
    theta: Positive = 1000.0
    """The base of rotary positions."""
    scaling: nn.RotaryScaling | None = None
    """The scaling of rotary positions; None: no scaling."""
    activation: str = "silu"
    """The activation of a feed-forward layer's gate and of the prediction head: a name of `nn.ACTIVATIONS`."""
    max_seq: Length = 2048
    """The length of the longest rows that the model was trained on, in tokens; it does not change the model."""

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        return self.head_dim or self.embed // self.heads


@dataclasses.dataclass(frozen=True)
class GTEConfig(NomicBERTConfig):
    """The config of a GTE.

    All maps have biases, except a feed-forward layer's `gate` and `up`. The prediction head's activation is `gelu`.
    """

    _: dataclasses.KW_ONLY
    types: Index = 1
    """The number of token types; 0 for a model without a table of types."""
    theta: Positive = 160_000.0
    activation: str = "gelu"
    """The activation of a feed-forward layer's gate: a name of `nn.ACTIVATIONS`."""
    max_seq: Length = 8192


class _NomicPositions(RotaryPositions):
    """Rotary positions, whose base is called `rotary_emb_base` in older configurations."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `theta` and `scaling`."""
        base = published.read("rotary_emb_base", Positive, self.theta)
        return RotaryPositions(base).read(published)


class _GTEPositions(RotaryPositions):
    """Rotary positions; older configurations have a scaling `ntk`, which transformers does not know.

    With `ntk`, the base is multiplied by `factor`, and all frequencies are divided by `factor ** (2 / head_dim)`.
    """

    def read(self, published: PublishedConfig) -> Fields:
        """Return `theta` and `scaling`."""
        parameters = either_rotary_parameters(published)
        if parameters.get("rope_type", parameters.get("type")) != "ntk":
            return super().read(published)
        scaling = PublishedConfig({"mixed_b": None} | parameters, f"{published.source}: rope_scaling")
        factor = scaling.read("factor", Positive)
        scaling.expect("mixed_b", None)
        scaling.expect("type", "ntk")
        scaling.finish()
        for name in ("rope_scaling", "rope_parameters"):
            published.take(name, None)
        heads, embed = (published.count(name) for name in ("num_attention_heads", "hidden_size"))
        theta = published.read("rope_theta", Positive, self.theta) * factor
        return {"theta": theta, "scaling": nn.LinearScaling(factor ** (2 * heads / embed))}


_SHARED: tuple[Entry, ...] = (
    HeadSize(),
    Expect("tie_word_embeddings", True),
    Ignore("attention_probs_dropout_prob", "classifier_dropout"),
    Ignore("is_causal"),  # The family's models are encoders, so this attribute has no effect.
)
NOMIC_BERT_ATTRIBUTES: tuple[Entry, ...] = (
    *_SHARED,
    Count("vocab", "vocab_size", 30_528),
    Count("embed", ("hidden_size", "n_embd"), 768),
    Count("layers", ("num_hidden_layers", "n_layer"), 12),
    Count("heads", ("num_attention_heads", "n_head"), 12),
    Count("mlp", ("intermediate_size", "n_inner"), 3072),
    Count("types", "type_vocab_size", 2),
    Attribute("eps", ("layer_norm_eps", "layer_norm_epsilon"), 1e-12),
    Attribute("dropout", ("hidden_dropout_prob", "resid_pdrop"), 0.0),
    Attribute("max_seq", ("max_position_embeddings", "max_trained_positions"), 2048),
    Activation("silu"),
    _NomicPositions(1000.0),
    # Attributes of the publisher's own code. Other values would mean another architecture.
    Expect("activation_function", "swiglu", written=False),
    *(
        Expect(name, False, written=False)
        for name in (
            *("causal", "mlp_fc1_bias", "mlp_fc2_bias", "parallel_block", "parallel_mlp", "prenorm", "qkv_proj_bias"),
            *("rotary_emb_interleaved", "scale_attn_by_inverse_layer_idx", "use_rms_norm"),
        )
    ),
    Expect("num_experts", 0, written=False),
    Expect("rotary_emb_fraction", 1.0, written=False),
    Expect("rotary_emb_scale_base", None, written=False),
    Expect("scale_attn_weights", True, written=False),
    # The publisher's code scales positions only in rows that are longer than the rows of training.
    Ignore("n_positions", "rotary_scaling_factor"),
    Ignore("dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln", "pad_vocab_size_multiple", "use_flash_attn"),
    Ignore("reorder_and_upcast_attn", "use_xentropy"),
    Ignore(*(f"summary_{name}" for name in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj"))),
)
GTE_ATTRIBUTES: tuple[Entry, ...] = (
    *(*_SHARED, *SIZES, WIDTH),
    Attribute("types", "type_vocab_size", 1),
    Attribute("eps", "layer_norm_eps", 1e-12),
    Attribute("dropout", "hidden_dropout_prob", 0.1),
    Attribute("max_seq", "max_position_embeddings", 8192),
    Activation("gelu"),
    _GTEPositions(160_000.0),
    # Attributes of the publisher's own code. Other values would mean another architecture.
    Expect("layer_norm_type", "layer_norm", written=False),
    Expect("logn_attention_scale", False, written=False),
    Expect("position_embedding_type", "rope", written=False),
    Ignore("logn_attention_clip1", "pack_qkv", "unpad_inputs", "use_memory_efficient_attention"),
)

_QKV = ("query", "key", "value")


def _rules(
    prefix: str, layers: str, qkv: str, output: str, norms: tuple[str, str, str], gated: tuple[Rule, ...]
) -> tuple[Rule, ...]:
    """Return the rules of the base model, in which queries, keys and values are published as one array.

    Args:
        prefix: The prefix of all arrays.
        layers: The name of the list of layers.
        qkv: The map to queries, keys and values, in a layer.
        output: The map after the attention.
        norms: The norms after the tables, after the attention and after the feed-forward layer.
        gated: The rules of the feed-forward layer's maps, in a layer.
    """
    layer = f"{prefix}{layers}.{{layer}}."
    return (
        Rule(f"{prefix}embeddings.word_embeddings.weight", "embedding.weight"),
        Rule(f"{prefix}embeddings.token_type_embeddings.weight", "token_types.weight"),
        *weight_and_bias(f"{prefix}{norms[0]}", "embedding_norm"),
        Rule(f"{layer}{qkv}.weight", leaf_paths(_QKV, "weight"), INTO_HEADS),
        Rule(f"{layer}{qkv}.bias", leaf_paths(_QKV, "bias"), OF_HEADS),
        *weight_and_bias(f"{layer}{output}", "mixer.layer.output", OUT_OF_HEADS),
        *weight_and_bias(f"{layer}{norms[1]}", "mixer.sum_norm"),
        *(dataclasses.replace(rule, name=layer + rule.name) for rule in gated),
        *weight_and_bias(f"{layer}{norms[2]}", "feed_forward.sum_norm"),
    )


def _nomic_bert_rules(prefix: str) -> tuple[Rule, ...]:
    gated = gated_weights(prefix="mlp.", names=("fc12", "fc11", "fc2"))
    return _rules(prefix, "encoder.layers", "attn.Wqkv", "attn.out_proj", ("emb_ln", "norm1", "norm2"), gated)


def _gte_rules(prefix: str) -> tuple[Rule, ...]:
    gated = (
        Rule("mlp.up_gate_proj.weight", leaf_paths(("up", "gate"), "weight", "feed_forward.layer.")),
        *weight_and_bias("mlp.down_proj", "feed_forward.layer.down"),
    )
    norms = ("embeddings.LayerNorm", "attn_ln", "mlp_ln")
    return _rules(prefix, "encoder.layer", "attention.qkv_proj", "attention.o_proj", norms, gated)


def _variants(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return tuple(dataclasses.replace(rule, variant=True) for rule in rules)


NOMIC_BERT_WEIGHTS = (
    *_nomic_bert_rules("nomic_bert."),
    *_variants(_nomic_bert_rules("bert.")),
    *weight_and_bias("cls.predictions.transform.dense", "norm.dense"),
    *weight_and_bias("cls.predictions.transform.layer_norm", "norm.output_norm"),
    Rule("cls.predictions.bias", "logit_bias"),
)
GTE_WEIGHTS = (
    *_gte_rules("gte."),
    *_variants(_gte_rules("new.")),
    *weight_and_bias("lm_head.dense", "norm.dense"),
    *weight_and_bias("lm_head.norm", "norm.output_norm"),
    Rule("lm_head.decoder.bias", "logit_bias"),
)


def _build(config: NomicBERTConfig, *, bias: bool, head_activation: str, key: Key[Array, ""]) -> nn.Transformer:
    """Return an encoder with random weights.

    Args:
        config: The sizes.
        bias: Whether the attention's maps, and the last map of a feed-forward layer, have biases.
        head_activation: The activation of the prediction head.
        key: The key of the weights.
    """
    embed = config.embed
    if config.head_dim is None:
        divide_heads(config)
    dropout = nn.Dropout(config.dropout) if config.dropout else None

    def norm() -> nn.LayerNorm:
        return nn.LayerNorm("embed", embed=embed, eps=config.eps)

    def block(key: Key[Array, ""]) -> nn.Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        attention = nn.Attention(
            embed=embed,
            heads=config.heads,
            head_dim=config.head_size,
            bias=bias,
            rotary=rotary_of(config, config.head_size, scaling=config.scaling),
            mask=nn.Mask(is_causal=False),
            key=mixer_key,
        )
        mlp = nn.GatedMLP(embed=embed, mlp=config.mlp, activation=activation_of(config), key=feed_forward_key)
        if bias:
            zeros = jnp.zeros(embed, jnp.float32)
            mlp = eqx.tree_at(lambda mlp: mlp.down.bias, mlp, zeros, is_leaf=lambda leaf: leaf is None)
        return nn.Block(
            nn.Residual(attention, sum_norm=norm(), dropout=dropout), nn.Residual(mlp, sum_norm=norm(), dropout=dropout)
        )

    table_key, types_key, stack_key, dense_key = jax.random.split(key, 4)
    return nn.Transformer(
        embedding=nn.Embedding(vocab=config.vocab, embed=embed, key=table_key),
        token_types=nn.TokenTypes(types=config.types, embed=embed, key=types_key) if config.types else None,
        embedding_norm=norm(),
        stacks=(nn.Stack(block, config.layers, key=stack_key),),
        # The last layer already ends with a norm.
        norm=nn.PredictionHead(
            nn.IdentityNorm(),
            norm(),
            embed=embed,
            bias=True,
            activation=nn.ACTIVATIONS[head_activation],
            key=dense_key,
        ),
        logit_bias=jnp.zeros(config.vocab, jnp.float32),
        dropout=dropout,
    )


def build_nomic_bert(config: NomicBERTConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a NomicBERT with random weights and its head for masked tokens."""
    return _build(config, bias=False, head_activation=config.activation, key=key)


def build_gte(config: GTEConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a GTE with random weights and its head for masked tokens."""
    return _build(config, bias=True, head_activation="gelu", key=key)


_BYTE = (256, 64, 4, 4, 96)
_BASE = (768, 12, 12, 3072)
_NOMIC_BERT_PRESETS = {
    "nomic-bert-byte-200k": NomicBERTConfig(*_BYTE),
    "nomic-embed-text-v1.5": NomicBERTConfig(30_528, *_BASE),
}
_GTE_PRESETS = {
    "gte-byte-200k": GTEConfig(*_BYTE),
    "gte-multilingual-base": GTEConfig(
        250_048, *_BASE, scaling=nn.LinearScaling(8.0 ** (2 / 64)), dropout=0.1, theta=160_000.0
    ),
}


def _classifier(*bases: str) -> ClassifierTable:
    """Return the table of classifiers whose base model has one of these prefixes; the first prefix is written."""
    dense, *older = (linear_rules(f"{base}.pooler.dense", "dense.linear") for base in bases)
    rules = (*dense, *(rule for rules in older for rule in _variants(rules)), *linear_rules("classifier", "output"))
    return ClassifierTable(rules, pooling="cls", dense=lambda config: {"activation": "tanh"})


NOMIC_BERT = Family(
    *("nomic_bert", NomicBERTConfig, build_nomic_bert, _NOMIC_BERT_PRESETS, "NomicBertForMaskedLM", "nomic_bert"),
    NOMIC_BERT_ATTRIBUTES,
    NOMIC_BERT_WEIGHTS,
    ignored_suffixes=("embeddings.position_ids", "rotary_emb.inv_freq"),
    ignored_prefixes=("nomic_bert.pooler.", "bert.pooler.", "cls.seq_relationship."),
    is_bare=True,
    classifier=_classifier("nomic_bert", "bert"),
    tied={"cls.predictions.decoder.weight": "embedding.weight", "cls.predictions.decoder.bias": "logit_bias"},
)
GTE = Family(
    *("gte", GTEConfig, build_gte, _GTE_PRESETS, "GteForMaskedLM", "gte"),
    GTE_ATTRIBUTES,
    GTE_WEIGHTS,
    ignored_suffixes=("rotary_emb.inv_freq",),
    # The scores of tokens in GTE multilingual base are for sparse retrieval.
    ignored_prefixes=("gte.pooler.", "new.pooler.", "classifier."),
    is_bare=True,
    aliases=("new",),
    classifier=_classifier("gte", "new"),
    tied={"lm_head.decoder.weight": "embedding.weight"},
)
