"""How configurations of T5 say its sizes."""

from typing import Any

from ...nn import ACTIVATIONS
from .._attributes import Attribute, Count, Entry, Expect, Ignore, names_of
from .._config import PublishedConfig
from .._kinds import LayerCount


class _Layers(Entry):
    """Layers of the encoder and of the decoder, as many where nothing is said."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """Both."""
        encoder = published.read("num_layers", LayerCount, 6)
        decoder = published.read("num_decoder_layers", LayerCount, encoder)
        return {"layers": decoder, "encoder_layers": None if encoder == decoder else encoder}

    def write(self, config: Any) -> dict[str, Any]:
        """Both."""
        return {"num_layers": config.encoder_layers or config.layers, "num_decoder_layers": config.layers}


# By `feed_forward_proj`: whether layers are gated, and their activation. A gated GELU is its approximation.
_NAMES = [(name, its) for its in ("relu", *ACTIVATIONS) for name in names_of(its)]
_KINDS = {name: (False, its) for name, its in _NAMES} | {"gated-gelu": (True, "gelu_tanh")}
_KINDS |= {f"gated-{name}": (True, its) for name, its in _NAMES if name != "gelu"}


class _FeedForward(Entry):
    """The kind of feed-forward layers, which transformers says three times."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """`gated` and `activation`; refuse any other kind."""
        published.expect("feed_forward_proj", *_KINDS)
        said = published.text("feed_forward_proj", "relu")
        for name, value in self._same(said).items():
            published.expect(name, value)
        return dict(zip(("gated", "activation"), _KINDS[said]))

    def write(self, config: Any) -> dict[str, Any]:
        """All three attributes; raises a `ValueError` for a kind that has no name."""
        for said, kind in _KINDS.items():
            if kind == (config.gated, config.activation):
                return {"feed_forward_proj": said} | self._same(said)
        raise ValueError(
            f"save(config=T5Config(activation={config.activation!r})): published are {', '.join(ACTIVATIONS)}; give "
            "one of these."
        )

    def _same(self, said: str) -> dict[str, Any]:
        name = "gelu_new" if said == "gated-gelu" else said.removeprefix("gated-")
        return {"is_gated_act": _KINDS[said][0], "dense_act_fn": name}


class _Head(Entry):
    """Whether the head is tied, and whether its input is scaled, which older configurations say by being tied."""

    def read(self, published: PublishedConfig) -> dict[str, Any]:
        """Both."""
        tied = published.flag("tie_word_embeddings", True)
        scaled = published.nullable("scale_decoder_outputs", tied)
        return {"tied": tied, "scaled": False if scaled is None else scaled}

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
