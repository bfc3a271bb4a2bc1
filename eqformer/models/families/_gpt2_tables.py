"""How GPT-2 is published: attributes of its configurations, and names of its arrays."""

from .._attributes import Activation, Attribute, Entry, Expect, Ignore
from .._weights import Rule


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
    Ignore("reorder_and_upcast_attn"),  # which changes rounding alone: scores are of float32 at least
    Ignore("n_ctx", "predict_special_tokens", *_SUMMARY, attn_pdrop=0.0),
)

_LAYER, _TURNED = "transformer.h.{layer}.", "inputs outputs -> outputs inputs"
_joined = lambda leaf: tuple(f"mixer.layer.{name}.{leaf}" for name in ("query", "key", "value"))
# Maps are stored inputs first; queries, keys and values side by side.
WEIGHTS = (
    Rule("transformer.wte.weight", "embedding.weight"),
    Rule("lm_head.weight", "head.weight"),
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
