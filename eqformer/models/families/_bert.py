"""BERT (Devlin et al. 2018, arXiv:1810.04805) and its variants RoBERTa, XLM-RoBERTa, DistilBERT and MPNet.

These are encoders for masked tokens with learned positions and with a norm after each residual addition.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Activation, Attribute, Count, Entry, Expect, Fields, Ignore
from .._config_types import Attributes, Index, LayerCount, Length, NotNegative, PublishedConfig, Rate, Size
from .._family import ClassifierTable, divide_heads, Family, linear_rules, ModelConfig
from .._weight_rules import Rule
from ._common import INTO_HEADS, OF_HEADS, OUT_OF_HEADS, SIZES, weight_and_bias, WIDTH
from ._decoder import activation_of


@dataclasses.dataclass(frozen=True)
class DistilBERTConfig(ModelConfig):
    """The config of a DistilBERT. Dropout acts on the embeddings and on both residual additions, not in the softmax."""

    layers: LayerCount
    """The number of layers."""
    heads: Size
    """The number of heads, each of `embed / heads` channels."""
    mlp: Size
    """Hidden features of a feed-forward layer."""
    _: dataclasses.KW_ONLY
    max_seq: Length = 512
    """The number of learned positions, which is the length of the longest rows, in tokens."""
    activation: str = "gelu"
    """The activation of a feed-forward layer's features and of the prediction head: a name of `nn.ACTIVATIONS`."""
    dropout: Rate = 0.0
    """The rate of dropout on the embeddings and on both residual additions."""


@dataclasses.dataclass(frozen=True)
class BERTConfig(DistilBERTConfig):
    """The config of a BERT. Dropout acts on the embeddings and on both residual additions, not in the softmax."""

    _: dataclasses.KW_ONLY
    types: Size = 2
    """The number of token types, such as the two texts of a pair."""
    eps: NotNegative = 1e-12
    """The epsilon of norms, which is added to the variance before the root."""


@dataclasses.dataclass(frozen=True)
class RoBERTaConfig(BERTConfig):
    """The config of a RoBERTa or XLM-RoBERTa; the activation of the prediction head is always `gelu`."""

    _: dataclasses.KW_ONLY
    types: Size = 1
    """The number of token types. RoBERTa has one type, whose vector is added to all embeddings."""
    pad_id: Index = 1
    """The id of padding. The table of positions begins with `pad_id + 1` rows that no token reads."""


@dataclasses.dataclass(frozen=True)
class MPNetConfig(DistilBERTConfig):
    """The config of an MPNet, whose scores have a bias by distance; the prediction head's activation is `gelu`."""

    _: dataclasses.KW_ONLY
    eps: NotNegative = 1e-12
    """The epsilon of norms, which is added to the variance before the root."""


_MPNET_OFFSET = 2  # The number of first rows of MPNet's table of positions that no token reads.


@dataclasses.dataclass(frozen=True)
class _PositionsAfterOffset(Entry):
    """The rows of MPNet's table of positions; the first two rows belong to no position."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `max_seq`."""
        return {"max_seq": published.count("max_position_embeddings", 512, _MPNET_OFFSET + 1) - _MPNET_OFFSET}

    def write(self, config: MPNetConfig) -> Attributes:
        """Return the attribute."""
        return {"max_position_embeddings": config.max_seq + _MPNET_OFFSET}


@dataclasses.dataclass(frozen=True)
class _PositionsAfterPadding(Entry):
    """The rows of RoBERTa's table of positions; the first `pad_token_id + 1` rows belong to no position."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `max_seq` and `pad_id`."""
        pad_id = published.read("pad_token_id", Index, 1)
        rows = published.count("max_position_embeddings", 512, pad_id + 2)
        return {"max_seq": rows - pad_id - 1, "pad_id": pad_id}

    def write(self, config: RoBERTaConfig) -> Attributes:
        """Return both attributes."""
        return {"max_position_embeddings": config.max_seq + config.pad_id + 1, "pad_token_id": config.pad_id}


_NO_DECODER = (
    Expect("is_decoder", False, written=False),
    Expect("add_cross_attention", False, written=False),
    Ignore("is_causal"),  # The family's models are encoders, so this attribute has no effect.
)
_SHARED: tuple[Entry, ...] = (
    *(*SIZES, WIDTH),
    Attribute("eps", "layer_norm_eps", 1e-12),
    Attribute("dropout", "hidden_dropout_prob", 0.1),
    Activation("gelu"),
    Expect("tie_word_embeddings", True),
    Expect("position_embedding_type", "absolute", written=False),
    *_NO_DECODER,
    Ignore("attention_probs_dropout_prob", "classifier_dropout", "directionality"),
    Ignore("language", "name"),  # A question-answering program describes its models with these attributes.
    Ignore(
        *(f"pooler_{name}" for name in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type"))
    ),
)
BERT_ATTRIBUTES: tuple[Entry, ...] = (
    *_SHARED,
    Count("types", "type_vocab_size", 2),
    Attribute("max_seq", "max_position_embeddings", 512),
)
ROBERTA_ATTRIBUTES: tuple[Entry, ...] = (*_SHARED, Count("types", "type_vocab_size", 2), _PositionsAfterPadding())
MPNET_ATTRIBUTES: tuple[Entry, ...] = (
    *_SHARED,
    _PositionsAfterOffset(),
    Expect("relative_attention_num_buckets", 32),
)
DISTILBERT_ATTRIBUTES: tuple[Entry, ...] = (
    Count("vocab", "vocab_size", 30_522),
    Count("embed", "dim", 768),
    Count("layers", "n_layers", 6),
    Count("heads", "n_heads", 12),
    Count("mlp", "hidden_dim", 3072),
    Attribute("max_seq", "max_position_embeddings", 512),
    Attribute("dropout", "dropout", 0.1),
    Activation("gelu", "activation"),
    Expect("tie_word_embeddings", True),
    *_NO_DECODER,
    Ignore("sinusoidal_pos_embds"),  # This attribute states how the table of positions was initialized.
    Ignore("attention_dropout", "qa_dropout", "seq_classif_dropout", "tie_weights_"),
)


def _norm_rules(published: str, path: str) -> tuple[Rule, ...]:
    """Return the rules of a norm; the oldest folders, such as BERT base's, call the norm's arrays gamma and beta."""
    names = (("weight", "gamma"), ("bias", "beta"))
    older = tuple(Rule(f"{published}.{old}", f"{path}.{leaf}", variant=True) for leaf, old in names)
    return (*weight_and_bias(published, path), *older)


def _layer_rules(layer: str, attention: tuple[str, ...], norms: tuple[str, str], mlp: tuple[str, str]) -> list[Rule]:
    """Return the rules of a layer, given the published names of its maps and of its norms."""
    query, key, value, output = (f"{layer}{name}" for name in attention)
    rules = [
        *weight_and_bias(query, "mixer.layer.query", INTO_HEADS, OF_HEADS),
        *weight_and_bias(key, "mixer.layer.key", INTO_HEADS, OF_HEADS),
        *weight_and_bias(value, "mixer.layer.value", INTO_HEADS, OF_HEADS),
        *weight_and_bias(output, "mixer.layer.output", OUT_OF_HEADS),
        *_norm_rules(f"{layer}{norms[0]}", "mixer.sum_norm"),
    ]
    rules += weight_and_bias(f"{layer}{mlp[0]}", "feed_forward.layer.up")
    rules += weight_and_bias(f"{layer}{mlp[1]}", "feed_forward.layer.down")
    return rules + [*_norm_rules(f"{layer}{norms[1]}", "feed_forward.sum_norm")]


def _bert_rules(base: str) -> tuple[Rule, ...]:
    """Return the rules of the base model of BERT and RoBERTa, whose arrays have the prefix `base`."""
    names = tuple(f"attention.{name}" for name in ("self.query", "self.key", "self.value", "output.dense"))
    norms = ("attention.output.LayerNorm", "output.LayerNorm")
    return (
        *(*_table_rules(base), Rule(f"{base}.embeddings.token_type_embeddings.weight", "token_types.weight")),
        *_layer_rules(f"{base}.encoder.layer.{{layer}}.", names, norms, ("intermediate.dense", "output.dense")),
    )


def _table_rules(base: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{base}.embeddings.word_embeddings.weight", "embedding.weight"),
        Rule(f"{base}.embeddings.position_embeddings.weight", "positions.weight"),
        *_norm_rules(f"{base}.embeddings.LayerNorm", "embedding_norm"),
    )


BERT_WEIGHTS = (
    *_bert_rules("bert"),
    *weight_and_bias("cls.predictions.transform.dense", "norm.dense"),
    *_norm_rules("cls.predictions.transform.LayerNorm", "norm.output_norm"),
    Rule("cls.predictions.bias", "logit_bias"),
)
ROBERTA_WEIGHTS = (
    *_bert_rules("roberta"),
    *weight_and_bias("lm_head.dense", "norm.dense"),
    *weight_and_bias("lm_head.layer_norm", "norm.output_norm"),
    Rule("lm_head.bias", "logit_bias"),
)
DISTILBERT_WEIGHTS = (
    *_table_rules("distilbert"),
    *_layer_rules(
        "distilbert.transformer.layer.{layer}.",
        tuple(f"attention.{name}_lin" for name in ("q", "k", "v", "out")),
        ("sa_layer_norm", "output_layer_norm"),
        ("ffn.lin1", "ffn.lin2"),
    ),
    *weight_and_bias("vocab_transform", "norm.dense"),
    *weight_and_bias("vocab_layer_norm", "norm.output_norm"),
    Rule("vocab_projector.bias", "logit_bias"),
)


MPNET_WEIGHTS = (
    *_table_rules("mpnet"),
    Rule("mpnet.encoder.relative_attention_bias.weight", "score_bias.weight"),
    *_layer_rules(
        "mpnet.encoder.layer.{layer}.",
        tuple(f"attention.attn.{name}" for name in ("q", "k", "v", "o")),
        ("attention.LayerNorm", "output.LayerNorm"),
        ("intermediate.dense", "output.dense"),
    ),
    *weight_and_bias("lm_head.dense", "norm.dense"),
    *weight_and_bias("lm_head.layer_norm", "norm.output_norm"),
    Rule("lm_head.bias", "logit_bias"),
)


def _build(
    config: DistilBERTConfig,
    *,
    types: int,
    eps: float,
    offset: int,
    head_activation: str,
    has_distance_bias: bool = False,
    key: Key[Array, ""],
) -> nn.Transformer:
    """Return an encoder with random weights.

    Args:
        config: The sizes.
        types: The number of token types; 0 for a model without a table of types.
        eps: The epsilon of norms, which is added to the variance.
        offset: Rows of the table of positions that no token reads.
        head_activation: The activation of the prediction head.
        has_distance_bias: Whether scores have a bias by distance.
        key: The key of the weights.
    """
    embed, heads, head_dim = config.embed, config.heads, divide_heads(config)
    dropout = nn.Dropout(config.dropout) if config.dropout else None

    def norm() -> nn.LayerNorm:
        return nn.LayerNorm("embed", embed=embed, eps=eps)

    def block(key: Key[Array, ""]) -> nn.Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        mask = nn.Mask(is_causal=False)
        attention = nn.Attention(
            embed=embed,
            heads=heads,
            head_dim=head_dim,
            bias=True,
            mask=mask,
            scores=nn.Scores(bias=has_distance_bias),
            key=mixer_key,
        )
        activation = activation_of(config)
        mlp = nn.MLP(embed=embed, mlp=config.mlp, activation=activation, bias=True, key=feed_forward_key)
        return nn.Block(
            nn.Residual(attention, sum_norm=norm(), dropout=dropout), nn.Residual(mlp, sum_norm=norm(), dropout=dropout)
        )

    table_key, positions_key, types_key, stack_key, dense_key, bias_key = jax.random.split(key, 6)
    dense_activation = nn.ACTIVATIONS[head_activation]
    return nn.Transformer(
        embedding=nn.Embedding(vocab=config.vocab, embed=embed, key=table_key),
        positions=nn.LearnedPositions(max_seq=config.max_seq, embed=embed, offset=offset, key=positions_key),
        token_types=nn.TokenTypes(types=types, embed=embed, key=types_key) if types else None,
        embedding_norm=norm(),
        stacks=(nn.Stack(block, config.layers, key=stack_key),),
        # The last layer already ends with a norm.
        norm=nn.PredictionHead(
            nn.IdentityNorm(), norm(), embed=embed, bias=True, activation=dense_activation, key=dense_key
        ),
        logit_bias=jnp.zeros(config.vocab, jnp.float32),
        dropout=dropout,
        score_bias=nn.RelativeBias(heads=heads, both_ways=True, key=bias_key) if has_distance_bias else None,
    )


def build_bert(config: BERTConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a BERT with random weights and its head for masked tokens."""
    activation = config.activation
    return _build(config, types=config.types, eps=config.eps, offset=0, head_activation=activation, key=key)


def build_roberta(config: RoBERTaConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a RoBERTa with random weights and its head for masked tokens."""
    offset = config.pad_id + 1
    return _build(config, types=config.types, eps=config.eps, offset=offset, head_activation="gelu", key=key)


def build_distilbert(config: DistilBERTConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a DistilBERT with random weights and its head for masked tokens."""
    return _build(config, types=0, eps=1e-12, offset=0, head_activation=config.activation, key=key)


def build_mpnet(config: MPNetConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return an MPNet with random weights and its head for masked tokens."""
    return _build(
        config,
        types=0,
        eps=config.eps,
        offset=_MPNET_OFFSET,
        head_activation="gelu",
        has_distance_bias=True,
        key=key,
    )


_BYTE = (256, 64, 4, 4, 128)
_BASE, _LARGE = (768, 12, 12, 3072), (1024, 24, 16, 4096)
_BERT_PRESETS = {
    "bert-byte-200k": BERTConfig(*_BYTE),
    "bert-base-uncased": BERTConfig(30_522, *_BASE, dropout=0.1),
    "bert-large-uncased": BERTConfig(30_522, *_LARGE, dropout=0.1),
    "minilm-l6": BERTConfig(30_522, 384, 6, 12, 1536, dropout=0.1),
    "minilm-l12": BERTConfig(30_522, 384, 12, 12, 1536, dropout=0.1),
}
_ROBERTA_PRESETS = {
    "roberta-byte-200k": RoBERTaConfig(*_BYTE, pad_id=0),
    "roberta-base": RoBERTaConfig(50_265, *_BASE, eps=1e-5, dropout=0.1),
    "roberta-large": RoBERTaConfig(50_265, *_LARGE, eps=1e-5, dropout=0.1),
    "xlm-roberta-base": RoBERTaConfig(250_002, *_BASE, eps=1e-5, dropout=0.1),
    "xlm-roberta-large": RoBERTaConfig(250_002, *_LARGE, eps=1e-5, dropout=0.1),
}
_DISTILBERT_PRESETS = {
    "distilbert-byte-200k": DistilBERTConfig(*_BYTE),
    "distilbert-base-uncased": DistilBERTConfig(30_522, 768, 6, 12, 3072, dropout=0.1),
}

_MPNET_PRESETS = {
    "mpnet-byte-200k": MPNetConfig(*_BYTE),
    "mpnet-base": MPNetConfig(30_527, *_BASE, eps=1e-5, dropout=0.1),
}


def _conditional_rules(rules: tuple[Rule, ...], *, has_dense: bool) -> tuple[Rule, ...]:
    """Return the rules, limited to classifiers with a dense layer or, unless `has_dense`, to classifiers without it."""
    condition = {"needs" if has_dense else "lacks": "classifier.dense.linear.weight"}
    return tuple(dataclasses.replace(rule, **condition) for rule in rules)


def _dense(activation: str) -> Callable[[DistilBERTConfig], dict[str, str]]:
    """Return the options of a classifier's dense layer."""
    return lambda config: {"activation": activation}


_BERT_CLASSIFIER = ClassifierTable(
    (*linear_rules("bert.pooler.dense", "dense.linear"), *linear_rules("classifier", "output")),
    pooling="cls",
    dense=_dense("tanh"),
)
_ROBERTA_CLASSIFIER = ClassifierTable(
    (
        *linear_rules("classifier.dense", "dense.linear"),
        *_conditional_rules(linear_rules("classifier.out_proj", "output"), has_dense=True),
        *_conditional_rules(linear_rules("classifier", "output"), has_dense=False),
    ),
    pooling="cls",
    dense=_dense("tanh"),
)
_DISTILBERT_CLASSIFIER = ClassifierTable(
    (*linear_rules("pre_classifier", "dense.linear"), *linear_rules("classifier", "output")),
    pooling="cls",
    dense=_dense("relu"),
)
BERT = Family(
    *("bert", BERTConfig, build_bert, _BERT_PRESETS, "BertForMaskedLM", "bert"),
    BERT_ATTRIBUTES,
    BERT_WEIGHTS,
    ignored_suffixes=("embeddings.position_ids",),
    ignored_prefixes=("bert.pooler.", "cls.seq_relationship."),
    is_bare=True,
    classifier=_BERT_CLASSIFIER,
    tied={"cls.predictions.decoder.weight": "embedding.weight", "cls.predictions.decoder.bias": "logit_bias"},
)
ROBERTA = Family(
    *("roberta", RoBERTaConfig, build_roberta, _ROBERTA_PRESETS, "RobertaForMaskedLM", "roberta"),
    ROBERTA_ATTRIBUTES,
    ROBERTA_WEIGHTS,
    ignored_suffixes=("embeddings.position_ids",),
    ignored_prefixes=("roberta.pooler.",),
    is_bare=True,
    aliases=("xlm-roberta", "camembert"),
    classifier=_ROBERTA_CLASSIFIER,
    tied={"lm_head.decoder.weight": "embedding.weight", "lm_head.decoder.bias": "logit_bias"},
)
DISTILBERT = Family(
    *("distilbert", DistilBERTConfig, build_distilbert, _DISTILBERT_PRESETS, "DistilBertForMaskedLM", "distilbert"),
    DISTILBERT_ATTRIBUTES,
    DISTILBERT_WEIGHTS,
    is_bare=True,
    classifier=_DISTILBERT_CLASSIFIER,
    tied={"vocab_projector.weight": "embedding.weight"},
)
MPNET = Family(
    *("mpnet", MPNetConfig, build_mpnet, _MPNET_PRESETS, "MPNetForMaskedLM", "mpnet"),
    MPNET_ATTRIBUTES,
    MPNET_WEIGHTS,
    ignored_suffixes=("embeddings.position_ids",),
    ignored_prefixes=("mpnet.pooler.",),
    is_bare=True,
    classifier=_ROBERTA_CLASSIFIER,
    tied={"lm_head.decoder.weight": "embedding.weight", "lm_head.decoder.bias": "logit_bias"},
)
