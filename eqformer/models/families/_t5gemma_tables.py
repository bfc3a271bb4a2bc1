"""How T5Gemma is published: attributes of its two halves, and names of arrays."""

from typing import Any

from .._attributes import Attribute, Entry, Expect, Ignore, kinds_of, read_entries
from .._config import PublishedConfig
from .._kinds import Index
from .._weights import Rule
from ._common import attention_weights
from ._gemma2 import GEMMA2, Gemma2Config
from ._t5gemma2_tables import half_weights


# What transformers takes where a half says nothing.
_MISSING = {"vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
_MISSING |= {"num_attention_heads": 8, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192}


class _Halves(Entry):
    """The attributes of the encoder and of the decoder, each like a Gemma 2's."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """The decoder's, and `encoder` where that has others; the whole says whether the head is tied."""
        read, written = (_half(published, half) for half in ("encoder", "decoder"))
        same = all(its == written[name] for name, its in read.items() if name not in ("start", "tied"))
        own: dict[str, Any] = {name: its for name, its in read.items() if name != "start"} | {"tied": True}
        tied = published.flag("tie_word_embeddings", True)
        return written | {"tied": tied, "encoder": None if same else Gemma2Config(**own)}

    def write(self, config: Any) -> dict[str, Any]:
        """Both halves, and what the whole says of them."""
        kinds: dict[str, Any] = {"model_type": "t5_gemma_module", "bos_token_id": config.start}
        halves = {"encoder": config.encoder or config, "decoder": config}
        said = {name: kinds | GEMMA2.write(its) for name, its in halves.items()}
        return said | {"vocab_size": config.vocab, "tie_word_embeddings": config.tied}


def _half(published: PublishedConfig, half: str) -> dict[str, Any]:
    its = PublishedConfig(_MISSING | published.nested(half), f"{published.source}: {half}")
    found = read_entries((*GEMMA2.attributes, *_OF_HALVES), its, {**kinds_of(Gemma2Config), "start": Index})
    its.finish()
    return found


_OF_HALVES = (
    Attribute("start", "bos_token_id", 2),
    Expect("is_decoder", False, True),  # which the half's place says
    Ignore("dropout_rate", "cross_attention_hidden_size"),
)
T5GEMMA_ATTRIBUTES: tuple[Entry, ...] = (
    _Halves(),
    Expect("is_encoder_decoder", True),
    Ignore("vocab_size", "dropout_rate", "classifier_dropout_rate"),  # said by the halves, and of training
)

_CROSS = "model.decoder.layers.{layer}."
T5GEMMA_WEIGHTS = (
    Rule("model.encoder.embed_tokens.weight", "encoder.embedding.weight"),
    Rule("model.decoder.embed_tokens.weight", "embedding.weight"),
    *half_weights("model.encoder.", "encoder"),
    *half_weights("model.decoder.", ""),
    *attention_weights(prefix=f"{_CROSS}cross_attn.", path="cross.layer"),
    Rule(f"{_CROSS}pre_cross_attn_layernorm.weight", "cross.norm.weight"),
    Rule(f"{_CROSS}post_cross_attn_layernorm.weight", "cross.output_norm.weight"),
    Rule("lm_head.out_proj.weight", "head.weight"),
)
