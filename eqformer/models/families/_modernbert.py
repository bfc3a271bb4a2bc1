"""ModernBERT (Warner et al. 2024, arXiv:2412.13663): an encoder for masked tokens, with local and global attention."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Activation, Attribute, Entry, Ignore
from .._config_types import Index, LayerCount, Length, NotNegative, Positive, PublishedConfig, Size
from .._family import ClassifierTable, divide_heads, Family, linear_rules, ModelConfig
from .._layer_attributes import LayerTypes
from .._rotary_attributes import RotaryByType
from .._rotary_scaling import FULL, SLIDING
from .._weight_rules import Rule
from ._common import INTO_HEADS, LAYER, leaf_paths, OF_HEADS, OUT_OF_HEADS, SIZES, weight_and_bias, WIDTH
from ._decoder import activation_of, damping, decoder, gated_mlp, rotary_of


@dataclasses.dataclass(frozen=True)
class ModernBERTConfig(ModelConfig):
    """The config of a ModernBERT."""

    layers: LayerCount
    """The number of layers."""
    heads: Size
    """The number of heads, each of `embed / heads` channels."""
    mlp: Size
    """Hidden features of a feed-forward layer."""
    _: dataclasses.KW_ONLY
    global_layers: tuple[Index, ...]
    """The indices of the layers in which each token sees all other tokens."""
    window: Length = 128
    """The number of neighbors that a token sees in layers with a window, half of them on either side."""
    theta: Positive = 160_000.0
    """The base of rotary positions in layers without a window."""
    scaling: nn.RotaryScaling | None = None
    """The scaling of rotary positions in layers without a window; None: no scaling."""
    local_theta: Positive = 10_000.0
    """The base of rotary positions in layers with a window."""
    local_scaling: nn.RotaryScaling | None = None
    """The scaling of rotary positions in layers with a window; None: no scaling."""
    eps: NotNegative = 1e-5
    """The epsilon of norms, which is added to the mean square before the root."""
    activation: str = "gelu"
    """The activation of a feed-forward layer's gate: a name of `nn.ACTIVATIONS`."""
    dense_activation: str = "gelu"
    """The activation of the prediction head: a name of `nn.ACTIVATIONS`."""
    norm_bias: bool = False
    """Whether norms have biases."""
    bias: bool = False
    """Whether the attention's maps have biases."""
    mlp_bias: bool = False
    """Whether feed-forward layers have biases."""
    dense_bias: bool = False
    """Whether the prediction head's dense layer has a bias."""
    logit_bias: bool = True
    """Whether logits have a bias."""
    tied: bool = True
    """Whether the embedding's table is the head too."""
    max_seq: Length = 8192
    """The length of the longest rows that the model was trained on, in tokens; it does not change the model."""


def _every_nth(published: PublishedConfig, layers: int) -> range:
    return range(0, layers, published.count("global_attn_every_n_layers", 3))


_POSITIONS = RotaryByType(160_000.0, 10_000.0, ("global_rope_theta", "local_rope_theta"), scaled=False)
MODERNBERT_ATTRIBUTES: tuple[Entry, ...] = (
    *(*SIZES, WIDTH, _POSITIONS),
    LayerTypes("global_layers", (FULL, SLIDING), _every_nth),
    Attribute("window", "local_attention", 128),
    Attribute("eps", "norm_eps", 1e-5),
    Attribute("norm_bias", "norm_bias", False),
    Attribute("bias", "attention_bias", False),
    Attribute("mlp_bias", "mlp_bias", False),
    Attribute("dense_bias", "classifier_bias", False),
    Attribute("logit_bias", "decoder_bias", True),
    Attribute("tied", "tie_word_embeddings", True),
    Attribute("max_seq", "max_position_embeddings", 8192),
    Activation("gelu", "hidden_activation"),
    Activation("gelu", "classifier_activation", "dense_activation"),
    # Attributes of classifiers, of training, and of how transformers runs the model.
    Ignore("classifier_pooling", "classifier_dropout", "embedding_dropout", "mlp_dropout", "cls_token_id"),
    Ignore("initializer_cutoff_factor", "layer_norm_eps", "position_embedding_type", "deterministic_flash_attn"),
    Ignore("reference_compile", "repad_logits_with_grad", "sparse_prediction", "sparse_pred_ignore_index"),
    Ignore("is_causal"),  # The family's models are encoders, so this attribute has no effect.
)

_ATTENTION, _FEED_FORWARD = f"{LAYER}attn.", f"{LAYER}mlp."
_QKV, _GATED = ("query", "key", "value"), ("gate", "up")


MODERNBERT_WEIGHTS = (
    Rule("model.embeddings.tok_embeddings.weight", "embedding.weight"),
    *weight_and_bias("model.embeddings.norm", "embedding_norm"),
    Rule(f"{_ATTENTION}Wqkv.weight", leaf_paths(_QKV, "weight"), INTO_HEADS),
    Rule(f"{_ATTENTION}Wqkv.bias", leaf_paths(_QKV, "bias"), OF_HEADS),
    Rule(f"{_ATTENTION}Wo.weight", "mixer.layer.output.weight", OUT_OF_HEADS),
    Rule(f"{_ATTENTION}Wo.bias", "mixer.layer.output.bias"),
    *weight_and_bias(f"{LAYER}attn_norm", "mixer.norm"),
    *weight_and_bias(f"{LAYER}mlp_norm", "feed_forward.norm"),
    Rule(f"{_FEED_FORWARD}Wi.weight", leaf_paths(_GATED, "weight", "feed_forward.layer.")),
    Rule(f"{_FEED_FORWARD}Wi.bias", leaf_paths(_GATED, "bias", "feed_forward.layer.")),
    *weight_and_bias(f"{_FEED_FORWARD}Wo", "feed_forward.layer.down"),
    *weight_and_bias("model.final_norm", "norm.norm"),
    *weight_and_bias("model.final_norm", "norm"),  # the norm of a model without a prediction head
    *weight_and_bias("head.dense", "norm.dense"),
    *weight_and_bias("head.norm", "norm.output_norm"),
    *weight_and_bias("decoder", "head"),
    Rule("decoder.bias", "logit_bias"),
)


def build_modernbert(config: ModernBERTConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a ModernBERT with random weights."""
    size = divide_heads(config)

    def norm() -> nn.LayerNorm:
        return nn.LayerNorm("embed", embed=config.embed, eps=config.eps, bias=config.norm_bias)

    def block(kind: tuple[bool, bool], key: Key[Array, ""]) -> nn.Block:
        is_global, is_first = kind
        mixer_key, feed_forward_key = jax.random.split(key)
        if is_global:
            window, rotary = None, rotary_of(config, size, scaling=config.scaling)
        else:
            window = config.window // 2 + 1  # `Mask.window` counts the token itself too.
            rotary = rotary_of(config, size, theta=config.local_theta, scaling=config.local_scaling)
        mixer = nn.Attention(
            embed=config.embed,
            heads=config.heads,
            head_dim=size,
            bias=config.bias,
            output_std=damping(config) * config.embed**-0.5,
            rotary=rotary,
            mask=nn.Mask(is_causal=False, window=window),
            key=mixer_key,
        )
        gated = gated_mlp(config, bias=config.mlp_bias, key=feed_forward_key)
        return nn.Block(nn.Residual(mixer, None if is_first else norm()), nn.Residual(gated, norm()))

    decoder_key, dense_key, head_key = jax.random.split(key, 3)
    kinds = [(layer in config.global_layers, layer == 0) for layer in range(config.layers)]
    dense = nn.PredictionHead(
        norm(),
        norm(),
        embed=config.embed,
        bias=config.dense_bias,
        activation=activation_of(config, "dense_activation"),
        key=dense_key,
    )
    model = decoder(config, block, kinds, embedding_norm=norm(), final_norm=dense, key=decoder_key)
    if not config.tied:
        head = nn.Linear("embed -> vocab", bias=config.logit_bias, embed=config.embed, vocab=config.vocab, key=head_key)
        return dataclasses.replace(model, head=head)
    bias = jnp.zeros(config.vocab, jnp.float32) if config.logit_bias else None
    return dataclasses.replace(model, logit_bias=bias)


_BYTE = ModernBERTConfig(256, 64, 4, 4, 96, global_layers=(0, 3), window=32)
_PRESETS = {
    "modernbert-byte-200k": dataclasses.replace(_BYTE, norm_bias=True, bias=True, mlp_bias=True, dense_bias=True),
    "modernbert-byte-untied-200k": dataclasses.replace(_BYTE, tied=False),
    "modernbert-base": ModernBERTConfig(50_368, 768, 22, 12, 1152, global_layers=tuple(range(0, 22, 3))),
    "modernbert-large": ModernBERTConfig(50_368, 1024, 28, 16, 2624, global_layers=tuple(range(0, 28, 3))),
}


def _dense(config: ModernBERTConfig) -> dict[str, Any]:
    """Return the options of the dense layer of a classifier."""
    norm = {"norm_eps": config.eps, "norm_bias": config.norm_bias}
    return {"activation": config.dense_activation, "bias": config.dense_bias, **norm}


_CLASSIFIER = ClassifierTable(
    (
        *linear_rules("head.dense", "dense.linear"),
        *linear_rules("head.norm", "dense.norm"),
        *linear_rules("classifier", "output"),
    ),
    pooling="cls",
    pooling_attribute="classifier_pooling",
    dense=_dense,
    token_dense=_dense,
)
MODERNBERT = Family(
    "modernbert",
    ModernBERTConfig,
    build_modernbert,
    _PRESETS,
    "ModernBertForMaskedLM",
    "modernbert",
    MODERNBERT_ATTRIBUTES,
    MODERNBERT_WEIGHTS,
    classifier=_CLASSIFIER,
)
