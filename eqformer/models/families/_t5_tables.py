"""How T5 is published: attributes of configurations, and names of arrays."""

from typing import Any

from .._attributes import Attribute, Count, Entry, Expect, Ignore
from .._config import PublishedConfig
from .._weights import Rule
from ._common import INTO_HEADS, OUT_OF_HEADS


class _Layers(Entry):
    """Layers of the encoder and of the decoder, as many where nothing is said."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """Both."""
        encoder = published.count("num_layers", 6)
        decoder = published.count("num_decoder_layers", encoder)
        return {"layers": decoder, "encoder_layers": None if encoder == decoder else encoder}

    def write(self, config: Any) -> dict[str, Any]:
        """Both."""
        return {"num_layers": config.encoder_layers or config.layers, "num_decoder_layers": config.layers}


class _FeedForward(Entry):
    """The kind of feed-forward layers, which transformers says three times."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`gated`; refuse any other kind."""
        published.expect("feed_forward_proj", "relu", "gated-gelu")
        gated = published.take("feed_forward_proj", "relu") == "gated-gelu"
        for name, value in self._same(gated).items():
            published.expect(name, value)
        return {"gated": gated}

    def write(self, config: Any) -> dict[str, Any]:
        """All three attributes."""
        return {"feed_forward_proj": "gated-gelu" if config.gated else "relu"} | self._same(config.gated)

    def _same(self, gated: bool) -> dict[str, Any]:
        return {"is_gated_act": gated, "dense_act_fn": "gelu_new" if gated else "relu"}


class _Head(Entry):
    """Whether the head is tied, and whether its input is scaled, which older configurations say by being tied."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """Both."""
        tied = published.take("tie_word_embeddings", True)
        return {"tied": tied, "scaled": published.take("scale_decoder_outputs", tied)}

    def write(self, config: Any) -> dict[str, Any]:
        """Both."""
        return {"tie_word_embeddings": config.tied, "scale_decoder_outputs": config.scaled}


T5_ATTRIBUTES: tuple[Entry, ...] = (
    Count("vocab", "vocab_size", 32_128),
    Count("embed", "d_model", 512),
    Count("head_dim", "d_kv", 64),
    Count("mlp", "d_ff", 2048),
    Count("heads", "num_heads", 8),
    *(_Layers(), _FeedForward(), _Head()),
    Attribute("ranges", "relative_attention_num_buckets", 32),
    Attribute("farthest", "relative_attention_max_distance", 128),
    Attribute("eps", "layer_norm_epsilon", 1e-6),
    Attribute("start", "decoder_start_token_id", 0),
    Expect("is_encoder_decoder", True),
    Expect("is_decoder", False, written=False),
    # Of training, and of classifiers.
    Ignore("dropout_rate", "initializer_factor", "classifier_dropout", "n_positions"),
)


def _sublayer(part: str, prefix: str, own: str, rules: dict[str, tuple[str, str]]) -> tuple[Rule, ...]:
    maps = (Rule(f"{prefix}{name}", f"{own}.layer.{path}", how, part=part) for name, (path, how) in rules.items())
    return Rule(f"{prefix}layer_norm.weight", f"{own}.norm.weight", part=part), *maps


def _attention(name: str) -> dict[str, tuple[str, str]]:
    maps = {"q": "query", "k": "key", "v": "value"}
    rules = {f"{name}.{its}.weight": (f"{own}.weight", INTO_HEADS) for its, own in maps.items()}
    return rules | {f"{name}.o.weight": ("output.weight", OUT_OF_HEADS)}


_FED = {"wi": "up", "wi_0": "gate", "wi_1": "up", "wo": "down"}


def _stack(part: str, name: str, fed: int) -> tuple[Rule, ...]:
    """The arrays of the encoder or of the decoder, whose sublayer number `fed` is its feed-forward layer."""
    layer, its = f"{name}.block.{{layer}}.layer.", f"{part}." if part else ""
    gate = "feed_forward.layer.gate"
    table = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    cross = () if part else _sublayer(part, f"{layer}1.", "cross", _attention("EncDecAttention"))
    return (
        *_sublayer(part, f"{layer}0.", "mixer", _attention("SelfAttention")),
        *cross,
        *_sublayer(part, f"{layer}{fed}.", "feed_forward", {}),
        *(
            Rule(
                f"{layer}{fed}.DenseReluDense.{theirs}.weight",
                f"feed_forward.layer.{own}.weight",
                part=part,
                needs=gate if theirs[-2:] in ("_0", "_1") else "",
                lacks=gate if theirs == "wi" else "",
            )
            for theirs, own in _FED.items()
        ),
        Rule(table, f"{its}score_bias.weight"),
        Rule(f"{name}.final_layer_norm.weight", f"{its}norm.weight"),
    )


T5_WEIGHTS = (
    Rule("shared.weight", "embedding.weight"),
    *_stack("encoder", "encoder", 1),
    *_stack("", "decoder", 2),
    Rule("lm_head.weight", "head.weight"),
)
