"""GLM-5.3-Flash (GLM team 2026): delta nets with a decay for each channel, and latent attention to selected tokens.

Layers have several residual streams, which hyper-connections mix. No layer has rotary positions. An indexer selects the
tokens by pools, and feed-forward layers bound the results of their gate and of `up`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Attribute, Count, Entry, Expect, Fields, Ignore, Unpublished
from .._config_types import Attributes, Index, Length, NotNegative, Number, Positive, PublishedConfig, Size
from .._family import Family, MultimodalModel
from .._layer_attributes import check_layer_types, every, LayerTypes, Period
from .._weight_rules import Rule
from ._common import LAYER, SIZES, WIDTH
from ._decoder import activation_of, damping, decoder, gated_mlp, norm, Together
from ._deepseek import EqualKeyHeads, LATENT_BYTE
from ._deepseek_v3 import DSA_WEIGHTS
from ._glm import published_indexer_types
from ._hy4 import stream_weights
from ._kimi_linear import IS_NET, LatentNetConfig, NET_WEIGHTS
from ._mixtures import LayerMixtures, mixture, SHARED_ATTRIBUTES, small_expert


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLM5NextConfig(LatentNetConfig):
    """The config of a GLM-5.3-Flash, which has no rotary positions.

    `rope_dim`, `theta`, `scaling` and `temperature` have no effect.
    """

    net_heads: Size = 64
    lowest_log_decay: Number | None = -5.0
    """The lower bound of the logarithm of a delta net's decays, a negative number; None: no bound."""
    q_latent: Size = 1536
    head_dim: Size = 256
    v_dim: Size = 256
    index_heads: Size = 32
    """Heads of the indexer."""
    index_dim: Size = 128
    """Channels of a head of the indexer."""
    index_top_k: Length = 2048
    """The number of keys that a query selects, in whole pools; it also sees those of its own unfinished pool."""
    index_pool: Size = 16
    """Keys of a pool, a divisor of `index_top_k`."""
    reading_layers: tuple[Index, ...] = ()
    """The numbers of attention layers without an indexer. Each sees the keys that the layer before selected."""
    experts: Size = 288
    groups: Size = 1
    kept_groups: Size = 1
    limit: Positive = 10.0
    """The bound in feed-forward layers: gates are at most `limit`, results of `up` within `-limit` and `limit`."""
    balance: NotNegative = 0.001
    streams: Size = 4
    """Residual streams of a token."""
    mixing_iterations: Size = 20
    """Iterations of the normalization of the matrices that mix streams."""
    stream_eps: NotNegative = 1e-6
    """Added to the weights of reading streams, and in the normalization of the matrices that mix streams."""
    eps: NotNegative = 1e-5
    max_seq: Length = 1_048_576


class _GLM5NextLayer(NamedTuple):
    """A kind of layer: whether it has attention and experts, and the name by which it shares or reads selected keys."""

    is_attention: bool
    is_mixture: bool
    shares: str | None = None
    reads: str | None = None


def build_glm5_next(config: GLM5NextConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a GLM-5.3-Flash with random weights."""
    if config.index_top_k % config.index_pool:
        raise ValueError(
            f"GLM5NextConfig(index_top_k={config.index_top_k}, index_pool={config.index_pool}): a query selects whole "
            "pools; give an index_top_k that index_pool divides."
        )
    connect = functools.partial(
        nn.HyperConnection,
        streams=config.streams,
        embed=config.embed,
        mixing=nn.Sinkhorn(config.mixing_iterations, config.stream_eps),
        eps=config.stream_eps,
        norm_eps=config.eps,
    )

    def block(kind: _GLM5NextLayer, key: Key[Array, ""]) -> nn.Block:
        mixer_key, feed_forward, first, second = jax.random.split(key, 4)
        mixer = _attention(config, kind, mixer_key) if kind.is_attention else _net(config, mixer_key)
        if kind.is_mixture:
            layer = _mixture(config, feed_forward)
        else:
            layer = gated_mlp(config, limit=config.limit, key=feed_forward)
        return nn.Block(
            connect(nn.Residual(mixer, norm(config), shares=kind.shares, reads=kind.reads), key=first),
            connect(nn.Residual(layer, norm(config)), key=second),
        )

    return decoder(
        config,
        block,
        _kinds(config),
        expand=nn.ExpandStreams(config.streams),
        final_norm=nn.MeanStreams(norm(config)),
        key=key,
    )


def _kinds(config: GLM5NextConfig) -> list[_GLM5NextLayer | Together[_GLM5NextLayer]]:
    """Return the kind of each layer; one that reads selected keys is joined to the layer before."""
    kinds: list[_GLM5NextLayer | Together[_GLM5NextLayer]] = []
    for layer, is_mixture in enumerate(config.mixtures):
        if layer not in config.reading_layers:
            kinds.append(_GLM5NextLayer(layer in config.attention_layers, is_mixture))
            continue
        before = kinds.pop() if kinds else None
        if not isinstance(before, _GLM5NextLayer) or not before.is_attention or layer not in config.attention_layers:
            raise ValueError(
                f"GLM5NextConfig(reading_layers={config.reading_layers}): layer {layer} and the layer before must have "
                "attention, and the layer before must have an indexer; leave the number out."
            )
        kinds.append(Together((before._replace(shares="choice"), _GLM5NextLayer(True, is_mixture, reads="choice"))))
    return kinds


def _attention(config: GLM5NextConfig, kind: _GLM5NextLayer, key: Key[Array, ""]) -> nn.LatentAttention:
    """Return the attention of a layer, with an indexer unless the layer reads selected keys."""
    mixer, index = jax.random.split(key)
    indexer = None
    if not kind.reads:
        indexer = nn.PooledIndexer(
            embed=config.embed,
            q_latent=config.q_latent,
            heads=config.index_heads,
            dim=config.index_dim,
            rate=config.index_pool,
            top_k=config.index_top_k // config.index_pool,
            key=index,
        )
    return nn.LatentAttention(
        embed=config.embed,
        heads=config.heads,
        head_dim=config.head_dim,
        latent=config.latent,
        q_latent=config.q_latent,
        v_dim=config.v_dim,
        latent_norm=norm(config, "latent"),
        query_latent_norm=norm(config, "q_latent"),
        indexer=indexer,
        bias="latents" if config.bias else False,
        output_std=damping(config) * (config.heads * config.v_dim) ** -0.5,
        key=mixer,
    )


def _net(config: GLM5NextConfig, key: Key[Array, ""]) -> nn.ChannelDeltaNet:
    """Return the delta net of a layer."""
    return nn.ChannelDeltaNet(
        embed=config.embed,
        heads=config.net_heads,
        head_dim=config.net_head_dim,
        lowest_log_decay=config.lowest_log_decay,
        taps=config.taps,
        activation=activation_of(config),
        eps=config.eps,
        output_std=damping(config) * (config.net_heads * config.net_head_dim) ** -0.5,
        key=key,
    )


def _mixture(config: GLM5NextConfig, key: Key[Array, ""]) -> nn.MoE:
    """Return DeepSeek-V3's mixture with bounded gates and results of `up`, in the shared expert too."""
    router, experts, shared = jax.random.split(key, 3)
    return mixture(
        config,
        functools.partial(small_expert, config, limit=config.limit),
        shared=gated_mlp(config, mlp=config.shared * config.expert_mlp, limit=config.limit, key=shared),
        balance_per="sequence",
        balance_normalise=True,
        groups=nn.ExpertGroups(config.groups, config.kept_groups, "top2"),
        score="sigmoid",
        normalise=config.normalise,
        scale=config.scale,
        balanced=True,
        router=router,
        experts=experts,
    )


class _AttentionLayers(LayerTypes):
    """`layer_types`, and `indexer_types`: whether a layer reads selected keys, which only attention layers can."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `attention_layers` and `reading_layers`; refuse one that reads if the layer before has no indexer."""
        types = published.listed("layer_types", str)
        if types is not None:
            named = ["indexed_attention" if name == "full_attention" else name for name in types]
            published.add("layer_types", named)
        fields, modes = super().read(published), published_indexer_types(published)
        check_layer_types(published, "indexer_types", modes, ("full", "shared"))
        layers = fields[self.name]
        assert isinstance(layers, tuple)
        readers = tuple(layer for layer in layers if modes[layer] == "shared")
        if wrong := [layer for layer in readers if layer - 1 not in layers or modes[layer - 1] == "shared"]:
            published.refuse(
                f"indexer_types={modes}: layers {wrong} read the keys that the layer before selected, and it has no "
                "indexer."
            )
        return fields | {"reading_layers": readers}

    def write(self, config: GLM5NextConfig) -> Attributes:
        """Return both lists."""
        modes = ["shared" if layer in config.reading_layers else "full" for layer in range(config.layers)]
        return super().write(config) | {"indexer_types": modes}


class _Nets(Entry):
    """The sizes of nets and the bound of their decays, as attributes or in the older object `linear_attn_config`."""

    sizes = (
        ("net_heads", "linear_num_heads", "num_heads", 64),
        ("net_head_dim", "linear_head_dim", "head_dim", 128),
        ("taps", "linear_conv_kernel_dim", "short_conv_kernel_size", 4),
    )

    def read(self, published: PublishedConfig) -> Fields:
        """Return the fields; `linear_attn_config` takes precedence. Refuse a bound that is not negative."""
        older = published.nested("linear_attn_config")
        nested = PublishedConfig(older, f"{published.source}, linear_attn_config")
        fields: dict[str, object] = {
            field: nested.count(inner, published.count(name, default)) for field, name, inner, default in self.sizes
        }
        stated = published.nullable("linear_lower_bound", -5.0)
        bound = nested.nullable("gate_lower_bound", stated)
        if older and nested.flag("safe_gate", True) and bound is None:
            bound = -5.0
        for name in ("full_attn_layers", "kda_layers"):  # ignored: `layer_types` states the kinds of layers
            nested.listed(name, Index)
        nested.finish()
        if bound is not None and not published.checked("linear_lower_bound", bound, Number) < 0:
            published.refuse(f"linear_lower_bound={bound}: it must be negative, since states would grow.")
        return fields | {"lowest_log_decay": bound}

    def write(self, config: GLM5NextConfig) -> Attributes:
        """Return the attributes of transformers."""
        sizes = {name: getattr(config, field) for field, name, _, _ in self.sizes}
        return sizes | {"linear_lower_bound": config.lowest_log_decay}


_BYTE: dict[str, Any] = LATENT_BYTE | {"rope_dim": 64}
_PRESETS = {
    "glm5-next-byte-500k": GLM5NextConfig(
        **_BYTE,
        q_latent=32,
        attention_layers=(3,),
        net_heads=4,
        net_head_dim=16,
        index_heads=4,
        index_dim=16,
        index_top_k=64,
        experts=12,
        top_k=4,
        first_dense=1,
        streams=2,
        tied=True,
    ),
    "glm-5.3-flash": GLM5NextConfig(
        154_880, 4096, layers=45, heads=64, mlp=12_288, expert_mlp=2048, attention_layers=every(4, 45)
    ),
}

_ATTENTION, _MIXER = f"{LAYER}self_attn.", "mixer.layer."
# DeepSeek joins a map to rotary channels to each of these arrays, but not here; the final norm is in `MeanStreams`.
_CHANGED = {
    "model.norm.weight": "norm.norm.weight",
    f"{_ATTENTION}kv_a_proj_with_mqa.weight": f"{_MIXER}latent_down.weight",
    f"{_ATTENTION}kv_a_proj_with_mqa.bias": f"{_MIXER}latent_down.bias",
    f"{_ATTENTION}q_b_proj.weight": f"{_MIXER}query.weight",
}
_WEIGHTS = (
    *(dataclasses.replace(rule, pattern="") if rule.name.endswith("A_log") else rule for rule in NET_WEIGHTS),
    *(
        dataclasses.replace(
            rule,
            path=_CHANGED.get(rule.name, rule.path),
            lacks=IS_NET if rule.name.startswith(f"{_ATTENTION}o_proj") else rule.lacks,
        )
        for rule in DSA_WEIGHTS
        if rule.name != f"{_ATTENTION}q_proj.weight"
    ),
    Rule(f"{_ATTENTION}indexer.index_kpool_compress_gate", f"{_MIXER}indexer.gate.weight"),
    Rule(f"{_ATTENTION}indexer.index_kpool_compress_ape", f"{_MIXER}indexer.bias"),
    *stream_weights(f"{LAYER}hc_attn_", "mixer.weights", f"{LAYER}attn_hc."),
    *stream_weights(f"{LAYER}hc_ffn_", "feed_forward.weights", f"{LAYER}ffn_hc."),
)

GLM5_NEXT = Family(
    "glm5_next",
    GLM5NextConfig,
    build_glm5_next,
    _PRESETS,
    "Glm5NextForCausalLM",
    "glm5_next_text",
    (
        *(*SIZES, WIDTH, EqualKeyHeads(), *SHARED_ATTRIBUTES, LayerMixtures(), _Nets()),
        _AttentionLayers("attention_layers", ("indexed_attention", "linear_attention"), Period(4)),
        Count("latent", "kv_lora_rank", 512),
        Count("q_latent", "q_lora_rank", 1536),
        Count("head_dim", "qk_nope_head_dim", 256),
        Count("v_dim", "v_head_dim", 256),
        Expect("qk_rope_head_dim", 0),
        Count("index_heads", "index_n_heads", 32),
        Count("index_dim", "index_head_dim", 128),
        Count("index_top_k", "index_topk", 2048),
        Count("index_pool", "index_kpool", 16),
        Expect("index_kpool_always_select_tail", True),
        Attribute("normalise", "norm_topk_prob", True),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Attribute("limit", "swiglu_limit", 10.0),
        Count("streams", "hc_mult", 4),
        Count("mixing_iterations", "hc_sinkhorn_iters", 20),
        Attribute("stream_eps", "hc_eps", 1e-6),
        Attribute("eps", "rms_norm_eps", 1e-5),
        Attribute("tied", "tie_word_embeddings", False),
        Attribute("bias", "attention_bias", False),
        Attribute("max_seq", "max_position_embeddings", 1_048_576),
        *(Expect("hidden_act", "silu"), Unpublished("activation", "silu", "experts have it in any case")),
        *(
            Unpublished(name, value, "no channel is rotated")
            for name, value in (("rope_dim", 64), ("theta", 1e4), ("scaling", None), ("temperature", 0.0))
        ),
        Expect("scoring_func", "sigmoid", written=False),
        Expect("topk_method", "noaux_tc", written=False),
        Expect("moe_layer_freq", 1, written=False),
        Ignore("head_dim", "qk_head_dim", "rope_theta", "first_k_dense_replace"),
        Ignore("num_mtp_layers", num_nextn_predict_layers=0),  # predictors, which transformers skips too
    ),
    _WEIGHTS,
    unread=lambda config: (f"model.layers.{config.layers}.",),
    multimodal=(MultimodalModel("glm5_next"),),
)
