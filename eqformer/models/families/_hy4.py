"""Hy4 (Tencent 2026): GLM-5's indexers and DeepSeek-V3's mixtures, with several residual streams.

Hyper-connections read and write the streams, but do not mix them. Attention has sinks and gates. Experts bound the
outputs of their maps `gate` and `up`.
"""

import dataclasses
import functools

import jax
from jaxtyping import Array, Key

from ...nn import Block, ExpandStreams, HyperConnection, MergeStreams, Residual, Transformer
from .._attributes import Attribute, Count, Entry, Expect, Fields, Ignore, Unpublished
from .._config_types import Attributes, Index, Length, NotNegative, Number, Positive, PublishedConfig, Size
from .._family import Family
from .._layer_attributes import AllLayers, layers_of
from .._weight_rules import Rule
from ._common import GATED, gated_weights, LAYER
from ._decoder import decoder, gated_mlp, norm, rotary_of
from ._deepseek import latent_attention, latent_attributes, LATENT_BYTE, LatentKind
from ._deepseek_v3 import DSA_WEIGHTS, indexer_of
from ._glm import check_indexer_types, GLMMoEDSAConfig, indexer_types, reading_kinds
from ._mixtures import FUSED, LayerMixtures, MIXTURE, SHARED, sigmoid_mixture_beside_shared


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hy4Config(GLMMoEDSAConfig):
    """The config of a Hy4."""

    index_heads: Size = 16
    first_dense: Index = 1
    scale: Number = 2.827
    streams: Size = 4
    """Residual streams of a token."""
    write_scale: Positive = 2.0
    """The largest weight with which a sublayer writes to a stream."""
    stream_eps: NotNegative = 1e-6
    """A small constant, added to the weights that read streams and to the weights that write streams."""
    limit: Positive = 10.0
    """The bound of the outputs of an expert's maps `gate` and `up`."""
    theta: Positive = 10_000.0
    max_seq: Length = 262_144


def build_hy4(config: Hy4Config, *, key: Key[Array, ""]) -> Transformer:
    """Return a Hy4 with random weights."""
    sizes = {"streams": config.streams, "embed": config.embed, "eps": config.stream_eps, "norm_eps": config.eps}
    connect = functools.partial(
        HyperConnection, **sizes, mixing=None, write_scale=config.write_scale, write_eps=config.stream_eps
    )
    rotary = rotary_of(config, config.rope_dim, "rope_dim", scaling=config.scaling)

    indexer = functools.partial(indexer_of, config, rotary, rotates_last=True, norm_eps=config.eps)

    def block(kind: LatentKind, key: Key[Array, ""]) -> Block:
        mixer_key, gate_key, feed_forward_key, first_key, second_key, index_key = jax.random.split(key, 6)
        chooses = None if kind.reads else indexer(index_key)
        mixer = latent_attention(config, indexer=chooses, sinks=True, key=mixer_key).with_gate(key=gate_key)
        if kind.is_mixture:
            layer = sigmoid_mixture_beside_shared(
                config, feed_forward_key, normalize=config.normalize, limit=config.limit
            )
        else:
            layer = gated_mlp(config, key=feed_forward_key)
        return Block(
            connect(Residual(mixer, norm(config), shares=kind.shares, reads=kind.reads), key=first_key),
            connect(Residual(layer, norm(config)), key=second_key),
        )

    layers_key, merge_key = jax.random.split(key)
    return decoder(
        config,
        block,
        reading_kinds(config),
        expand=ExpandStreams(config.streams),
        final_norm=MergeStreams(norm(config), **sizes, key=merge_key),
        key=layers_key,
    )


class _IndexerTypes(Entry):
    """`indexer_types`; if the list is missing, layers 0, 1, 5, 9, 13 and so on have an indexer."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `reading_layers`."""
        types = published.listed("indexer_types", str)
        if types is None:
            types = ["full" if n == 0 or n % 4 == 1 else "shared" for n in range(layers_of(published))]
        return check_indexer_types(published, types)

    def write(self, config: Hy4Config) -> Attributes:
        """Return the list."""
        return {"indexer_types": indexer_types(config)}


_PRESETS = {
    "hy4-byte-500k": Hy4Config(
        **LATENT_BYTE,
        q_latent=32,
        index_heads=4,
        index_dim=16,
        index_top_k=64,
        experts=12,
        top_k=4,
        reading_layers=(2, 3),
        streams=2,
        tied=True,
    ),
}


def stream_weights(published: str, path: str, *variants: str) -> tuple[Rule, ...]:
    """Return the rules of a `StreamWeights` at a path.

    `published` and `variants` are the prefixes that its arrays may have in a folder; `published` is written.
    """
    pattern = "stream_logits (streams embed) -> stream_logits streams embed"
    arrays = (("fn", "weight", pattern), ("base", "base", ""), ("scale", "scale", ""))
    return tuple(
        Rule(f"{prefix}{array}", f"{path}.{leaf}", pattern, variant=prefix != published)
        for prefix in (published, *variants)
        for array, leaf, pattern in arrays
    )


# Transformers writes the names `_GATED`. Older folders and publishers' folders may have the names `_OTHERS`, which
# transformers reads too.
_GATED = ("linear_gate", "up_proj", "down_proj")
_OTHERS = {rule.name for rule in (*GATED, *MIXTURE[1:], *SHARED)}
_WEIGHTS = (
    *(
        dataclasses.replace(rule, variant=rule.variant or rule.name in _OTHERS)
        for rule in DSA_WEIGHTS
        if rule.name != "model.norm.weight"
    ),
    Rule("model.norm.weight", "norm.norm.weight"),
    *stream_weights("model.hc_pre.hc_head.hc_head_", "norm.weights", "model.hc_head.hc_pre.hc_head_"),
    *(
        rule
        for layer, path in (("attn", "mixer"), ("mlp", "feed_forward"))
        for rule in stream_weights(
            f"{LAYER}hc_pre.hc_{layer}_layer.hc_", f"{path}.weights", f"{LAYER}hc_{layer}_layer.hc_pre.hc_"
        )
    ),
    Rule(f"{LAYER}self_attn.learnable_sink_param", "mixer.layer.scores.sinks"),
    Rule(f"{LAYER}self_attn.linear_gate.weight", "mixer.layer.gate.weight", "(heads width) embed -> heads width embed"),
    *gated_weights(names=_GATED),
    *gated_weights("feed_forward.layer.shared", prefix=f"{LAYER}mlp.shared_experts.", names=_GATED),
    *(dataclasses.replace(rule, variant=False) for rule in FUSED),
)
HY4 = Family(
    "hy_v4",
    Hy4Config,
    build_hy4,
    _PRESETS,
    "HYV4ForCausalLM",
    "hy_v4",
    (
        *latent_attributes(
            mixtures=(LayerMixtures(),),
            activation=(Expect("hidden_act", "silu"), Unpublished("activation", "silu", "experts always have silu")),
            max_seq=262_144,
        ),
        AllLayers("layer_types", "indexed_attention"),
        Count("index_heads", "index_n_heads", 16),
        Count("index_dim", "index_head_dim", 128),
        Count("index_top_k", "index_topk", 2048),
        _IndexerTypes(),
        Attribute("normalize", "norm_topk_prob", True),
        Unpublished("balance", 0.0001, "no attribute states the weight of a balance loss"),
        Count("streams", "hc_mult", 4),
        Attribute("write_scale", "hc_magnitude", 2.0),
        Attribute("stream_eps", "hc_eps", 1e-6),
        Attribute("limit", "swiglu_limit", 10.0),
        Ignore("learnable_sink_init"),  # the first value of the sinks
    ),
    _WEIGHTS,
)
