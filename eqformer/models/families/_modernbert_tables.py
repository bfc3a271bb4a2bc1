"""How ModernBERT is published: attributes of configurations, and names of arrays."""

from .._attributes import Activation, Attribute, Entry, Ignore
from .._config import PublishedConfig
from .._layer_attributes import LayerTypes
from .._rotary_attributes import FULL, RotaryByType, SLIDING
from .._weights import Rule
from ._common import INTO_HEADS, LAYER, OF_HEADS, OUT_OF_HEADS, SIZES, WIDTH


def _every_third(published: PublishedConfig, layers: int) -> range:
    return range(0, layers, published.count("global_attn_every_n_layers", 3))


_POSITIONS = RotaryByType(160_000.0, 10_000.0, ("global_rope_theta", "local_rope_theta"), scaled=False)
MODERNBERT_ATTRIBUTES: tuple[Entry, ...] = (
    *(*SIZES, WIDTH, _POSITIONS),
    LayerTypes("global_layers", (FULL, SLIDING), _every_third),
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
    # Of classifiers, of training, and of how transformers runs it.
    Ignore("classifier_pooling", "classifier_dropout", "embedding_dropout", "mlp_dropout", "cls_token_id"),
    Ignore("initializer_cutoff_factor", "layer_norm_eps", "position_embedding_type", "deterministic_flash_attn"),
    Ignore("reference_compile", "repad_logits_with_grad", "sparse_prediction", "sparse_pred_ignore_index"),
    Ignore("is_causal"),  # it is an encoder, whatever this says
)

_ATTENTION, _FED = f"{LAYER}attn.", f"{LAYER}mlp."
_QKV = tuple(f"mixer.layer.{name}." for name in ("query", "key", "value"))
_both = lambda name, path: tuple(Rule(f"{name}.{part}", f"{path}.{part}") for part in ("weight", "bias"))
MODERNBERT_WEIGHTS = (
    Rule("model.embeddings.tok_embeddings.weight", "embedding.weight"),
    *_both("model.embeddings.norm", "embedding_norm"),
    Rule(f"{_ATTENTION}Wqkv.weight", tuple(f"{path}weight" for path in _QKV), INTO_HEADS),
    Rule(f"{_ATTENTION}Wqkv.bias", tuple(f"{path}bias" for path in _QKV), OF_HEADS),
    Rule(f"{_ATTENTION}Wo.weight", "mixer.layer.output.weight", OUT_OF_HEADS),
    Rule(f"{_ATTENTION}Wo.bias", "mixer.layer.output.bias"),
    *_both(f"{LAYER}attn_norm", "mixer.norm"),
    *_both(f"{LAYER}mlp_norm", "feed_forward.norm"),
    Rule(f"{_FED}Wi.weight", ("feed_forward.layer.gate.weight", "feed_forward.layer.up.weight")),
    Rule(f"{_FED}Wi.bias", ("feed_forward.layer.gate.bias", "feed_forward.layer.up.bias")),
    *_both(f"{_FED}Wo", "feed_forward.layer.down"),
    *_both("model.final_norm", "norm.norm"),
    *_both("head.dense", "norm.dense"),
    *_both("head.norm", "norm.output_norm"),
    *_both("decoder", "head"),
    Rule("decoder.bias", "logit_bias"),
)
