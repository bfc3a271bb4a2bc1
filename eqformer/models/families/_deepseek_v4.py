"""DeepSeek-V4 (DeepSeek-AI 2026): attention to compressed keys and hyper-connections around mixtures of experts.

All layers attend to a window of tokens. Heavy layers also attend to the compressed keys of all blocks of tokens, and
sparse layers to the best compressed keys of small blocks. The first mixtures choose experts by the ids of tokens.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Key

from ... import nn
from ..._files import renamed_field
from .._attributes import Attribute, Count, Entry, Expect, Fields, Ignore
from .._config_types import (
    Attributes,
    Fraction,
    Index,
    LayerCount,
    Length,
    NotNegative,
    Number,
    Positive,
    PublishedConfig,
    Size,
)
from .._family import Family, ModelConfig
from .._layer_attributes import check_layer_types, layers_of
from .._rotary_scaling import (
    either_rotary_parameters,
    make_scaling,
    ORIGINAL,
    ROPE_TYPES,
    scaling_attributes,
    unknown_parameters,
)
from .._weight_rules import Rule
from ._common import gated_weights, SIZES
from ._decoder import damping, decoder, gated_mlp, norm, rotary_of
from ._hy4 import stream_weights
from ._mixtures import mixture, small_expert


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSeekV4Config(ModelConfig):
    """The config of a DeepSeek-V4."""

    layers: LayerCount
    """The number of layers."""
    heads: Size
    """The number of query heads, which share one key head."""
    head_dim: Size = 512
    """Channels of a head."""
    rope_dim: Size = 64
    """The number of rotated channels of a head, or of an indexer's head; these are the last channels of the head."""
    q_latent: Size = 1024
    """Channels of the queries' latent."""
    groups: Size = 8
    """The number of groups of heads; each group has its own first output map."""
    group_rank: Size = 1024
    """Channels of a group between the first output map and the second."""
    window: Length = 128
    """The number of recent tokens that a query sees."""
    heavy_layers: tuple[Index, ...] = ()
    """The indices of the layers with compressed keys of all blocks."""
    sparse_layers: tuple[Index, ...] = ()
    """The indices of the layers with an indexer, which selects among compressed keys of overlapping blocks."""
    heavy_block_size: Size = renamed_field("heavy_rate", default=128)
    """Tokens of a block in heavy layers."""
    sparse_block_size: Size = renamed_field("sparse_rate", default=4)
    """Tokens of a block in sparse layers."""
    index_heads: Size = 64
    """The number of the indexer's heads."""
    index_dim: Size = 128
    """Channels of a head of the indexer."""
    index_top_k: Length = 512
    """The number of compressed keys that a query sees in sparse layers."""
    expert_mlp: Size
    """Hidden features of an expert, and of the shared expert."""
    experts: Size = 256
    """The number of experts of a layer."""
    top_k: Size = 6
    """The number of experts that each token takes."""
    hash_layers: tuple[Index, ...] = (0, 1, 2)
    """The indices of the layers in which a table lists a token's experts by the token's id."""
    scale: Number = 1.5
    """A factor of the experts' weights."""
    limit: Positive = 10.0
    """The bound of the outputs of an expert's maps `gate` and `up`."""
    balance: NotNegative = 0.001
    """The weight of the loss `LoadBalance`, which is computed for each row; layers of `hash_layers` have none."""
    streams: Size = 4
    """Residual streams of a token."""
    mixing_iterations: Size = 20
    """Iterations that normalize the matrices which mix streams (`nn.Sinkhorn`)."""
    stream_eps: NotNegative = 1e-6
    """A small constant, added to the weights that read streams and, in `nn.Sinkhorn`, to the matrix and its sums."""
    theta: Positive = 10_000.0
    """The base of rotary positions in layers with a window alone."""
    compressed_theta: Positive = 160_000.0
    """The base of rotary positions in layers with compressed keys."""
    scaling: nn.RotaryScaling | None = None
    """The scaling of rotary positions in layers with compressed keys; None: no scaling."""
    eps: NotNegative = 1e-6
    """The epsilon of norms, which is added to the mean square before the root."""
    tied: bool = False
    """Whether the embedding's table is the head too."""
    max_seq: Length = 1_048_576
    """The length of the longest rows that the model was trained on, in tokens; it does not change the model."""

    @property
    def mlp(self) -> int:
        """Hidden features of the shared expert."""
        return self.expert_mlp

    @property
    def activation(self) -> str:
        """The activation of an expert's gate."""
        return "silu"


class _LayerKind(NamedTuple):
    """A kind of layer."""

    blocks: str
    """`"heavy"` or `"sparse"`, or empty for a layer that attends to a window alone."""
    is_hashed: bool
    """Whether a table lists a token's experts by the token's id."""


def build_deepseek_v4(config: DeepSeekV4Config, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a DeepSeek-V4 with random weights."""
    if config.heads % config.groups:
        raise ValueError(
            f"DeepSeekV4Config(heads={config.heads}, groups={config.groups}): all groups have the same number of "
            "heads; give a number of groups that divides heads."
        )
    sizes = {"streams": config.streams, "embed": config.embed, "eps": config.stream_eps, "norm_eps": config.eps}
    mixing = nn.Sinkhorn(config.mixing_iterations, config.stream_eps)

    def block(kind: _LayerKind, key: Key[Array, ""]) -> nn.Block:
        mixer_key, feed_forward_key, first_key, second_key = jax.random.split(key, 4)
        attention = _attention(config, kind.blocks, mixer_key)
        experts = _mixture(config, kind.is_hashed, feed_forward_key)
        return nn.Block(
            nn.HyperConnection(nn.Residual(attention, norm(config)), mixing=mixing, **sizes, key=first_key),
            nn.HyperConnection(nn.Residual(experts, norm(config)), mixing=mixing, **sizes, key=second_key),
        )

    layers_key, merge_key = jax.random.split(key)
    return decoder(
        config,
        block,
        [_LayerKind(_blocks_of(config, layer), layer in config.hash_layers) for layer in range(config.layers)],
        expand=nn.ExpandStreams(config.streams),
        final_norm=nn.MergeStreams(norm(config), **sizes, key=merge_key),
        key=layers_key,
    )


def _blocks_of(config: DeepSeekV4Config, layer: int) -> str:
    return "heavy" if layer in config.heavy_layers else "sparse" if layer in config.sparse_layers else ""


def _attention(config: DeepSeekV4Config, blocks: str, key: Key[Array, ""]) -> nn.CompressedAttention:
    """Return the attention of a layer; `blocks` is the layer's `_LayerKind.blocks`."""
    mixer_key, compressor_key, index_key, index_compressor_key = jax.random.split(key, 4)
    rotary = rotary_of(
        config,
        config.rope_dim,
        "rope_dim",
        theta=config.compressed_theta if blocks else None,
        interleaved=True,
        scaling=config.scaling if blocks else None,
    )
    is_sparse = blocks == "sparse"
    compress = functools.partial(
        nn.KeyCompressor,
        embed=config.embed,
        block_size=config.sparse_block_size if is_sparse else config.heavy_block_size,
        series=2 if is_sparse else 1,
        rotary=rotary,
        norm_eps=config.eps,
    )
    indexer = None
    if is_sparse:
        sizes = {"embed": config.embed, "q_latent": config.q_latent, "heads": config.index_heads}
        indexer = nn.EntryIndexer(
            compress(dim=config.index_dim, key=index_compressor_key), top_k=config.index_top_k, key=index_key, **sizes
        )
    return nn.CompressedAttention(
        embed=config.embed,
        groups=config.groups,
        group_heads=config.heads // config.groups,
        head_dim=config.head_dim,
        q_latent=config.q_latent,
        group_rank=config.group_rank,
        window=config.window,
        rotary=rotary,
        compressor=compress(dim=config.head_dim, key=compressor_key) if blocks else None,
        indexer=indexer,
        norm_eps=config.eps,
        output_std=damping(config) * (config.groups * config.group_rank) ** -0.5,
        key=mixer_key,
    )


def _mixture(config: DeepSeekV4Config, is_hashed: bool, key: Key[Array, ""]) -> nn.MoE:
    """Return experts beside a shared expert; a token's experts are listed by its id, or chosen by scores and a bias."""
    router_key, experts_key, shared_key = jax.random.split(key, 3)
    expert = functools.partial(small_expert, config, limit=config.limit)
    shared = gated_mlp(config, limit=config.limit, key=shared_key)
    if not is_hashed:
        return mixture(
            config,
            expert,
            shared=shared,
            balance_per="sequence",
            balance_normalize=True,
            score="sqrt_softplus",
            normalize=True,
            scale=config.scale,
            balanced=True,
            router=router_key,
            experts=experts_key,
        )
    router = nn.HashRouter(
        embed=config.embed,
        experts=config.experts,
        top_k=config.top_k,
        vocab=config.vocab,
        score="sqrt_softplus",
        normalize=True,
        scale=config.scale,
        key=router_key,
    )
    return nn.MoE(router, nn.Experts(expert, config.experts, key=experts_key), shared=shared)


_TYPES = {"": "sliding_attention", "sparse": "compressed_sparse_attention", "heavy": "heavily_compressed_attention"}
_RATIOS = {0: _TYPES[""], 4: _TYPES["sparse"], 128: _TYPES["heavy"]}
_HASHED, _ROUTED = "hash_moe", "moe"


class _AttentionTypes(Entry):
    """`layer_types`, or the older `compress_ratios`; by default two heavy layers, then heavy and sparse in turn."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `heavy_layers` and `sparse_layers`."""
        types, ratios = published.listed("layer_types", str), published.listed("compress_ratios", int)
        if types is None and ratios is not None:
            if unknown := {*ratios} - {*_RATIOS}:
                published.refuse(f"compress_ratios={ratios}: {sorted(unknown)} is none of {[*_RATIOS]}.")
            types = [_RATIOS[ratio] for ratio in ratios[: layers_of(published)]]  # Later ratios are for predictors.
        if types is None:
            later = [_TYPES["sparse" if layer % 2 else "heavy"] for layer in range(layers_of(published))]
            types = ([_TYPES["heavy"]] * 2 + later)[: len(later)]
        check_layer_types(published, "layer_types", types, _TYPES.values())
        of_type = lambda blocks: tuple(layer for layer, name in enumerate(types) if name == _TYPES[blocks])
        return {"heavy_layers": of_type("heavy"), "sparse_layers": of_type("sparse")}

    def write(self, config: DeepSeekV4Config) -> Attributes:
        """Return the list."""
        return {"layer_types": [_TYPES[_blocks_of(config, layer)] for layer in range(config.layers)]}


class _MixtureTypes(Entry):
    """`mlp_layer_types`, or the older `num_hash_layers`, the number of first layers with experts listed by token id."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `hash_layers`."""
        types, hashed = published.listed("mlp_layer_types", str), published.count("num_hash_layers", 3, 0)
        if types is None:
            layers = layers_of(published)
            hashed = min(hashed, layers)
            types = [_HASHED] * hashed + [_ROUTED] * (layers - hashed)
        check_layer_types(published, "mlp_layer_types", types, (_HASHED, _ROUTED))
        return {"hash_layers": tuple(layer for layer, name in enumerate(types) if name == _HASHED)}

    def write(self, config: DeepSeekV4Config) -> Attributes:
        """Return the list."""
        return {"mlp_layer_types": [_HASHED if n in config.hash_layers else _ROUTED for n in range(config.layers)]}


class _Rates(Entry):
    """`compress_rates`, the number of tokens of a block by type of layer, or an older attribute for each type."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `heavy_block_size` and `sparse_block_size`; an older attribute replaces the newer one."""
        stated, rates = published.nested("compress_rates"), {}
        if unknown := {*stated} - {*_TYPES.values()}:
            published.refuse(f"compress_rates={stated}: {sorted(unknown)} are not types of layer.")
        for blocks, older, default in (("heavy", "compress_rate_hca", 128), ("sparse", "compress_rate_csa", 4)):
            kind = _TYPES[blocks]
            if stated and kind not in stated:
                published.refuse(f"compress_rates={stated} have no {kind!r}; give the rates of both types.")
            rate = published.checked(f"compress_rates.{kind}", stated.get(kind, default), Size)
            rates[f"{blocks}_block_size"] = published.count(older, rate)
        return rates

    def write(self, config: DeepSeekV4Config) -> Attributes:
        """Return the rates by type of layer."""
        return {"compress_rates": {_TYPES[kind]: getattr(config, f"{kind}_block_size") for kind in ("sparse", "heavy")}}


class _TwoRotaries(Entry):
    """Rotary positions of layers with a window alone (`main`) and of layers with compressed keys (`compress`).

    If `rope_parameters` lacks these two objects, the bases are attributes of their own, and the scaling applies to
    layers with compressed keys. YaRN's magnitude is then 1 unless it is stated.
    """

    def read(self, published: PublishedConfig) -> Fields:
        """Return `rope_dim`, `theta`, `compressed_theta` and `scaling`."""
        head_dim = published.count("head_dim")
        stated = published.read("qk_rope_head_dim", Size, None)
        default = 64 / 512 if stated is None else stated / head_dim
        part = published.read("partial_rotary_factor", Fraction, default)
        theta = published.read("rope_theta", Positive, 10_000.0)
        compressed_theta = published.read("compress_rope_theta", Positive, 160_000.0)
        parameters = either_rotary_parameters(published)
        if "main" in parameters or "compress" in parameters:
            main, compress = (
                published.checked(f"rope_parameters.{name}", parameters.get(name), dict)
                for name in ("main", "compress")
            )
            main = {"rope_theta": theta, "partial_rotary_factor": 1.0} | main
            compress = {"rope_theta": compressed_theta, "partial_rotary_factor": 1.0} | compress
            theta = published.checked("rope_parameters.main.rope_theta", main["rope_theta"], Positive)
            prefix = "rope_parameters.compress"
            compressed_theta = published.checked(f"{prefix}.rope_theta", compress.pop("rope_theta"), Positive)
            part = published.checked(f"{prefix}.partial_rotary_factor", compress.pop("partial_rotary_factor"), Fraction)
            # Transformers drops other parameters beside `main` and `compress`, so only a scaling's name is checked.
            if parameters.get("rope_type", "default") not in ROPE_TYPES:
                published.refuse(f"rope_type={parameters['rope_type']!r} is not known.")
            if main.get("rope_type", "default") != "default" or main["partial_rotary_factor"] != part:
                published.refuse(
                    f"rope_parameters={parameters}: `main` must have no scaling, and the same partial_rotary_factor as "
                    "`compress`."
                )
        else:
            dropped = ("rope_theta", "partial_rotary_factor")
            compress = {name: value for name, value in parameters.items() if name not in dropped}
            if (compress.get("rope_type") or compress.get("type")) == "yarn":
                compress.setdefault("attention_factor", 1.0)
        kind = compress.pop("rope_type", None) or compress.pop("type", None)
        compress.pop("type", None)
        longest = published.count("max_position_embeddings")
        original = compress.pop(ORIGINAL, None) or longest
        scaling = make_scaling(published.refuse, kind, compress, original, longest)
        if unknown := unknown_parameters(compress):
            published.refuse(f"rope_parameters have attributes that are not known: {unknown}.")
        return {
            "rope_dim": int(head_dim * part),
            "theta": theta,
            "compressed_theta": compressed_theta,
            "scaling": scaling,
        }

    def write(self, config: DeepSeekV4Config) -> Attributes:
        """Return `rope_parameters` with both objects, and the older attributes, which state the same numbers."""
        part = {"partial_rotary_factor": config.rope_dim / config.head_dim}
        scaled = {"rope_type": "default"} | scaling_attributes(config).get("rope_scaling", {})
        main = {"rope_type": "default", "rope_theta": config.theta} | part
        bases = {"rope_theta": config.theta, "compress_rope_theta": config.compressed_theta}
        compress = scaled | {"rope_theta": config.compressed_theta} | part
        return bases | part | {"rope_parameters": {"main": main, "compress": compress}}


_BYTE: dict[str, Any] = {
    **{"vocab": 256, "embed": 64, "layers": 4, "heads": 4, "head_dim": 32, "rope_dim": 8, "q_latent": 32},
    **{"groups": 2, "group_rank": 32, "window": 32, "sparse_layers": (1, 3), "heavy_layers": (2,)},
    **{"heavy_block_size": 16, "index_heads": 8, "index_dim": 16, "index_top_k": 16, "expert_mlp": 32, "experts": 12},
    **{"top_k": 3, "hash_layers": (0,), "streams": 2, "tied": True},
}
_PRESETS = {
    "deepseek-v4-byte-500k": DeepSeekV4Config(**_BYTE),
    "deepseek-v4-flash": DeepSeekV4Config(
        vocab=129_280,
        embed=4096,
        layers=43,
        heads=64,
        expert_mlp=2048,
        sparse_layers=tuple(range(2, 43, 2)),
        heavy_layers=tuple(range(3, 43, 2)),
        scaling=nn.YarnScaling(16.0, 65_536, magnitude=1.0),
    ),
}

_LAYER = "model.layers.{layer}."
_ATTENTION, _COMPRESSED, _INDEX = f"{_LAYER}attn.", f"{_LAYER}attn.compressor.", f"{_LAYER}attn.indexer."
_MIXER, _INDEXER, _MIXTURE = "mixer.layer.", "mixer.layer.indexer.", "feed_forward.layer."


def _compressor_weights(published: str, path: str) -> tuple[Rule, ...]:
    """Return the rules of a `KeyCompressor`."""
    by_series = "(series dim) embed -> series dim embed"
    return (
        Rule(f"{published}wkv.weight", f"{path}value.weight", by_series),
        Rule(f"{published}wgate.weight", f"{path}gate.weight", by_series),
        Rule(f"{published}ape", f"{path}bias", "block_size (series dim) -> block_size series dim"),
        Rule(f"{published}norm.weight", f"{path}norm.weight"),
    )


_WEIGHTS = (
    Rule("model.embed_tokens.weight", "embedding.weight"),
    Rule("model.embed.weight", "embedding.weight", variant=True),
    Rule("model.norm.weight", "norm.norm.weight"),
    Rule("head.weight", "head.weight"),
    *stream_weights("model.hc_head.hc_", "norm.weights", "model.hc_head_"),
    *stream_weights(f"{_LAYER}hc_attn_", "mixer.weights"),
    *stream_weights(f"{_LAYER}hc_ffn_", "feed_forward.weights"),
    Rule(f"{_LAYER}attn_norm.weight", "mixer.norm.weight"),
    Rule(f"{_LAYER}ffn_norm.weight", "feed_forward.norm.weight"),
    Rule(f"{_ATTENTION}wq_a.weight", f"{_MIXER}query_down.weight"),
    Rule(f"{_ATTENTION}q_norm.weight", f"{_MIXER}query_latent_norm.weight"),
    Rule(
        f"{_ATTENTION}wq_b.weight",
        f"{_MIXER}query.weight",
        "(groups heads width) latent -> groups heads width latent",
        groups="groups",
    ),
    Rule(f"{_ATTENTION}wkv.weight", f"{_MIXER}key.weight"),
    Rule(f"{_ATTENTION}norm.weight", f"{_MIXER}key_norm.weight"),
    Rule(f"{_ATTENTION}attn_sink", f"{_MIXER}sinks", "(groups heads) -> groups heads", groups="groups"),
    Rule(
        f"{_ATTENTION}wo_a.weight",
        f"{_MIXER}group_down.weight",
        "(groups rank) (heads width) -> groups rank heads width",
        groups="groups",
    ),
    Rule(
        f"{_ATTENTION}wo_b.weight",
        f"{_MIXER}output.weight",
        "embed (groups rank) -> embed groups rank",
        groups="groups",
    ),
    *_compressor_weights(_COMPRESSED, f"{_MIXER}compressor."),
    *_compressor_weights(f"{_INDEX}compressor.", f"{_INDEXER}compressor."),
    Rule(f"{_INDEX}wq_b.weight", f"{_INDEXER}query.weight", "(heads dim) latent -> heads dim latent"),
    Rule(f"{_INDEX}weights_proj.weight", f"{_INDEXER}weight.weight"),
    Rule(f"{_LAYER}ffn.gate.weight", f"{_MIXTURE}router.linear.weight"),
    Rule(f"{_LAYER}ffn.gate.bias", f"{_MIXTURE}router.selection_bias"),
    Rule(f"{_LAYER}ffn.gate.tid2eid", f"{_MIXTURE}router.table", ids_below="experts"),
    *gated_weights(f"{_MIXTURE}experts.mlps", prefix=f"{_LAYER}ffn.experts.{{expert}}.", names=("w1", "w3", "w2")),
    *gated_weights(f"{_MIXTURE}shared", prefix=f"{_LAYER}ffn.shared_experts.", names=("w1", "w3", "w2")),
)

DEEPSEEK_V4 = Family(
    "deepseek_v4",
    DeepSeekV4Config,
    build_deepseek_v4,
    _PRESETS,
    "DeepseekV4ForCausalLM",
    "deepseek_v4",
    (
        *SIZES,
        Count("head_dim", "head_dim", 512),
        _TwoRotaries(),
        Count("q_latent", "q_lora_rank", 1024),
        Count("groups", "o_groups", 8),
        Count("group_rank", "o_lora_rank", 1024),
        Count("window", "sliding_window", 128),
        _AttentionTypes(),
        _Rates(),
        Count("index_heads", "index_n_heads", 64),
        Count("index_dim", "index_head_dim", 128),
        Count("index_top_k", "index_topk", 512),
        Count("expert_mlp", "moe_intermediate_size", 2048),
        Count("experts", "n_routed_experts", 256),
        Count("top_k", "num_experts_per_tok", 6),
        _MixtureTypes(),
        Attribute("scale", "routed_scaling_factor", 1.5),
        Attribute("limit", "swiglu_limit", 10.0),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Count("streams", "hc_mult", 4),
        Count("mixing_iterations", "hc_sinkhorn_iters", 20),
        Attribute("stream_eps", "hc_eps", 1e-6),
        Attribute("eps", "rms_norm_eps", 1e-6),
        Attribute("tied", "tie_word_embeddings", False),
        Attribute("max_seq", "max_position_embeddings", 1_048_576),
        Expect("num_key_value_heads", 1),
        Expect("n_shared_experts", 1),
        Expect("scoring_func", "sqrtsoftplus"),
        Expect("norm_topk_prob", True),
        Expect("topk_method", "noaux_tc", written=False),
        Expect("hidden_act", "silu"),
        Expect("attention_bias", False, written=False),
        Expect("mlp_bias", False, written=False),
        Ignore(
            "router_jitter_noise", num_nextn_predict_layers=0
        ),  # layers for multi-token prediction, which transformers skips too
    ),
    _WEIGHTS,
    ignored_prefixes=("mtp.", "model.mtp."),
    is_bare=True,
)
