"""GLM-5.3-Flash (GLM team 2026): delta nets with a decay for each channel, and latent attention to selected tokens.

There are several residual streams, which hyper-connections read, write and mix. No layer has rotary positions. An
indexer selects pools of 16 neighboring tokens. Feed-forward layers bound the outputs of their maps `gate` and `up`.
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
from ._mixtures import LayerMixtures, SHARED_ATTRIBUTES, sigmoid_mixture_beside_shared


@dataclasses.dataclass(frozen=True, kw_only=True)
class GLM5NextConfig(LatentNetConfig):
    """The config of a GLM-5.3-Flash.

    The model has no rotary positions, so `rope_dim`, `theta`, `scaling` and `temperature` have no effect.
    """

    net_heads: Size = 64
    lowest_log_decay: Number | None = -5.0
    """The lower bound of the logarithms of a delta net's decays, a negative number; None: no bound."""
    q_latent: Size = 1536
    head_dim: Size = 256
    v_dim: Size = 256
    index_heads: Size = 32
    """The number of the indexer's heads."""
    index_dim: Size = 128
    """Channels of a head of the indexer."""
    index_top_k: Length = 2048
    """The number of keys in the pools that a query selects. A query also sees the keys of its own unfinished pool."""
    index_pool: Size = 16
    """The number of keys in a pool, a divisor of `index_top_k`."""
    reading_layers: tuple[Index, ...] = ()
    """The numbers of the attention layers without an indexer. Such a layer uses the keys that the layer before it
    selects."""
    experts: Size = 288
    groups: Size = 1
    kept_groups: Size = 1
    limit: Positive = 10.0
    """The bound in feed-forward layers: the output of `gate` is at most `limit`, and the output of `up` is between
    `-limit` and `limit`."""
    balance: NotNegative = 0.001
    streams: Size = 4
    """Residual streams of a token."""
    mixing_iterations: Size = 20
    """Iterations that normalize the matrices which mix streams (`nn.Sinkhorn`)."""
    stream_eps: NotNegative = 1e-6
    """A small constant, added to the weights that read streams and, in `nn.Sinkhorn`, to the matrix and its sums."""
    eps: NotNegative = 1e-5
    max_seq: Length = 1_048_576


class _GLM5NextLayer(NamedTuple):
    """A kind of layer."""

    is_attention: bool
    """Whether the layer has attention; False: it has a delta net."""
    is_mixture: bool
    """Whether the layer has a mixture of experts; False: it has a dense MLP."""
    shares: str | None = None
    """The name by which the layer shares its selected keys with the next layer; None: it does not share them."""
    reads: str | None = None
    """The name by which the layer reads the keys that the layer before it shares; None: it reads none."""


def build_glm5_next(config: GLM5NextConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a GLM-5.3-Flash with random weights."""
    if config.index_top_k % config.index_pool:
        raise ValueError(
            f"GLM5NextConfig(index_top_k={config.index_top_k}, index_pool={config.index_pool}): a query selects whole "
            "pools of index_pool keys; give an index_top_k that is a multiple of index_pool."
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
            limits = {"limit": config.limit, "shared_limit": config.limit}
            layer = sigmoid_mixture_beside_shared(config, feed_forward, normalize=config.normalize, **limits)
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
    """Return the kind of each layer; a layer that reads selected keys is joined to the layer before it."""
    kinds: list[_GLM5NextLayer | Together[_GLM5NextLayer]] = []
    for layer, is_mixture in enumerate(config.mixtures):
        if layer not in config.reading_layers:
            kinds.append(_GLM5NextLayer(layer in config.attention_layers, is_mixture))
            continue
        before = kinds.pop() if kinds else None
        if not isinstance(before, _GLM5NextLayer) or not before.is_attention or layer not in config.attention_layers:
            raise ValueError(
                f"GLM5NextConfig(reading_layers={config.reading_layers}): layer {layer} uses the keys that the layer "
                "before it selects, so both must be attention layers, and the layer before it must have an indexer; "
                f"remove {layer} from reading_layers."
            )
        kinds.append(Together((before._replace(shares="choice"), _GLM5NextLayer(True, is_mixture, reads="choice"))))
    return kinds


def _attention(config: GLM5NextConfig, kind: _GLM5NextLayer, key: Key[Array, ""]) -> nn.LatentAttention:
    """Return the attention of a layer; it has an indexer unless the layer reads the keys of the layer before it."""
    mixer, index = jax.random.split(key)
    indexer = None
    if not kind.reads:
        indexer = nn.PooledIndexer(
            embed=config.embed,
            q_latent=config.q_latent,
            heads=config.index_heads,
            dim=config.index_dim,
            pool_size=config.index_pool,
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


class _AttentionLayers(LayerTypes):
    """The entry for `layer_types` and `indexer_types`, two lists with a text for each layer.

    In `indexer_types`, an attention layer with an indexer is `"full"`. An attention layer that reads the keys which the
    layer before it selects is `"shared"`. For a delta net, the text has no effect.
    """

    def read(self, published: PublishedConfig) -> Fields:
        """Return `attention_layers` and `reading_layers`; refuse a reading layer after a layer without an indexer."""
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
                f"indexer_types={modes}: layers {wrong} read the keys that the layer before selects, because they are "
                "'shared', but the layer before has no indexer; it must be an attention layer that is 'full'."
            )
        return fields | {"reading_layers": readers}

    def write(self, config: GLM5NextConfig) -> Attributes:
        """Return both lists."""
        modes = ["shared" if layer in config.reading_layers else "full" for layer in range(config.layers)]
        return super().write(config) | {"indexer_types": modes}


class _Nets(Entry):
    """The entry for the sizes of delta nets and the bound of their decays.

    Older configurations have them in an object, `linear_attn_config`.
    """

    sizes = (
        ("net_heads", "linear_num_heads", "num_heads", 64),
        ("net_head_dim", "linear_head_dim", "head_dim", 128),
        ("taps", "linear_conv_kernel_dim", "short_conv_kernel_size", 4),
    )

    def read(self, published: PublishedConfig) -> Fields:
        """Return the fields; refuse a bound that is not negative. `linear_attn_config` takes precedence."""
        older = published.nested("linear_attn_config")
        nested = PublishedConfig(older, f"{published.source}, linear_attn_config")
        fields: dict[str, object] = {
            field: nested.count(inner, published.count(name, default)) for field, name, inner, default in self.sizes
        }
        stated = published.nullable("linear_lower_bound", -5.0)
        bound = nested.nullable("gate_lower_bound", stated)
        # The configuration and the attribute that state the bound, for errors.
        source, name = (
            (nested, "gate_lower_bound") if "gate_lower_bound" in older else (published, "linear_lower_bound")
        )
        if older and nested.flag("safe_gate", True) and bound is None:
            bound = -5.0
        for lists in ("full_attn_layers", "kda_layers"):  # ignored: `layer_types` states the kinds of layers
            nested.listed(lists, Index)
        nested.finish()
        if bound is not None and not source.checked(name, bound, Number) < 0:
            source.refuse(
                f"{name}={bound}: it must be negative, because it bounds the logarithms of decays, and the state would "
                "grow with a decay above 1."
            )
        return fields | {"lowest_log_decay": bound}

    def write(self, config: GLM5NextConfig) -> Attributes:
        """Return the attributes; the older object is not written."""
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
# The paths that differ from DeepSeek-V3.2's. In DeepSeek-V3.2, these attention arrays also hold the map to the rotary
# channels, which this family lacks. The final norm is within a `MeanStreams`.
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
        Attribute("normalize", "norm_topk_prob", True),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Attribute("limit", "swiglu_limit", 10.0),
        Count("streams", "hc_mult", 4),
        Count("mixing_iterations", "hc_sinkhorn_iters", 20),
        Attribute("stream_eps", "hc_eps", 1e-6),
        Attribute("eps", "rms_norm_eps", 1e-5),
        Attribute("tied", "tie_word_embeddings", False),
        Attribute("bias", "attention_bias", False),
        Attribute("max_seq", "max_position_embeddings", 1_048_576),
        *(Expect("hidden_act", "silu"), Unpublished("activation", "silu", "experts always have silu")),
        *(
            Unpublished(name, value, "no channel is rotated")
            for name, value in (("rope_dim", 64), ("theta", 1e4), ("scaling", None), ("temperature", 0.0))
        ),
        Expect("scoring_func", "sigmoid", written=False),
        Expect("topk_method", "noaux_tc", written=False),
        Expect("moe_layer_freq", 1, written=False),
        Ignore("head_dim", "qk_head_dim", "rope_theta", "first_k_dense_replace"),
        Ignore("num_mtp_layers", num_nextn_predict_layers=0),  # Transformers does not read predictors either.
    ),
    _WEIGHTS,
    unread=lambda config: (f"model.layers.{config.layers}.",),
    multimodal=(MultimodalModel("glm5_next"),),
)
