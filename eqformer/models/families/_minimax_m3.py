"""MiniMax-M3 (MiniMax 2026): attention to blocks of keys that an indexer selects, and experts beside a shared expert.

The first layers attend to whole rows, and have no experts. The text model is published in folders of the multimodal
model `minimax_m3_vl`. Arrays have other names there than in folders that transformers writes for the text model alone.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Attribute, Count, Entry, Expect, Fields, Ignore, Unpublished
from .._config_types import (
    Attributes,
    Fraction,
    Index,
    Length,
    NotNegative,
    Number,
    OptionalSize,
    Positive,
    PublishedConfig,
    Size,
)
from .._family import Family, MultimodalModel
from .._layer_attributes import check_layer_types, indices_of_flags, layers_of
from .._rotary_attributes import RotaryFraction, RotaryPositions
from .._weight_rules import Rule
from ._common import (
    ATTENTION,
    decoder_attributes,
    EDGES,
    gated_weights,
    head_norm_weights,
    JOINED_GATED,
    LAYER,
    PRE_NORMS,
)
from ._decoder import attention, attention_sizes, decoder, gated_mlp, head_norms, norm, part_rotary, pre_norm_block
from ._mixtures import DenseLayersConfig, FlaggedMixtures, FUSED, mixture, SELECTION_BIAS


@dataclasses.dataclass(frozen=True, kw_only=True)
class MiniMaxM3Config(DenseLayersConfig):
    """The config of a MiniMax-M3; `mlp` is the width of an expert."""

    dense_mlp: Size = 12_288
    """Hidden features of a layer without experts."""
    shared_mlp: Size = 3072
    """Hidden features of the shared expert."""
    experts: Size = 128
    """The number of experts of a layer."""
    top_k: Size = 4
    """The number of experts that each token chooses."""
    scale: Number = 2.0
    """A factor of the experts' weights."""
    activation: str = "quick_gelu"
    limit: Positive = 7.0
    """The bound of the outputs of the maps `gate` and `up` in feed-forward layers."""
    sparse_layers: tuple[Index, ...] = ()
    """The indices of the layers with an indexer; all other layers attend to all keys."""
    index_dim: Size = 128
    """Channels of a small query or key of the indexer."""
    block: Size = 128
    """Tokens of a block of keys."""
    top_blocks: Size = 16
    """The number of blocks that a query sees in layers with an indexer."""
    local_blocks: OptionalSize = 1
    """The number of most recent blocks, the query's own block included, that are always among the `top_blocks`."""
    head_dim: Size = 128
    rotary_fraction: Fraction = 0.5
    """The fraction of a head's channels that is rotated."""
    theta: Positive = 5_000_000.0
    balance: NotNegative = 0.001
    """The weight of the loss `LoadBalance`, which is computed over the whole batch."""
    max_seq: Length = 524_288


class _M3Layer(NamedTuple):
    """A kind of layer."""

    is_sparse: bool
    """Whether the layer has an indexer."""
    is_mixture: bool
    """Whether the layer has experts."""


def build_minimax_m3(config: MiniMaxM3Config, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a MiniMax-M3 with random weights."""
    gated = functools.partial(gated_mlp, config, limit=config.limit, offset=1.0)

    def block(kind: _M3Layer, key: Key[Array, ""]) -> nn.Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        if not kind.is_mixture:
            layer = gated(mlp=config.dense_mlp, key=feed_forward_key)
        else:
            router_key, experts_key, shared_key = jax.random.split(feed_forward_key, 3)
            layer = mixture(
                config,
                lambda key: gated(key=key),
                shared=gated(mlp=config.shared_mlp, key=shared_key),
                balance_normalize=True,
                score="sigmoid",
                normalize=True,
                scale=config.scale,
                balanced=True,
                router=router_key,
                experts=experts_key,
            )
        return pre_norm_block(config, _attention(config, kind.is_sparse, mixer_key), layer, offset=1.0)

    kinds = [_M3Layer(layer in config.sparse_layers, is_mixture) for layer, is_mixture in enumerate(config.mixtures)]
    return decoder(config, block, kinds, final_norm=norm(config, offset=1.0), key=key)


def _attention(config: MiniMaxM3Config, is_sparse: bool, key: Key[Array, ""]) -> nn.Attention:
    """Return the attention of a layer, with or without an indexer."""
    rotary = part_rotary(config)
    mixer_key, indexer_key = jax.random.split(key)
    norms = head_norms(config, offset=1.0)
    if not is_sparse:
        return attention(config, rotary=rotary, **norms, key=mixer_key)
    indexer = nn.BlockIndexer(
        embed=config.embed,
        kv_heads=config.kv_heads,
        dim=config.index_dim,
        block=config.block,
        top_k=config.top_blocks,
        local=config.local_blocks,
        query_norm=norm(config, "index_dim", offset=1.0),
        key_norm=norm(config, "index_dim", offset=1.0),
        rotary=rotary,
        key=indexer_key,
    )
    return nn.BlockIndexedAttention(indexer, **attention_sizes(config), rotary=rotary, **norms, key=mixer_key)


_FULL, _SPARSE, _NESTED = "full_attention", "minimax_m3_sparse", "sparse_attention_config"
# For each size of the indexer: transformers' attribute, the publishers' name within `sparse_attention_config`, and the
# default.
_INDEXER = {
    "index_dim": ("index_head_dim", "sparse_index_dim", 128),
    "block": ("index_block_size", "sparse_block_size", 128),
    "top_blocks": ("index_topk_blocks", "sparse_topk_blocks", 16),
    "local_blocks": ("index_local_blocks", "sparse_local_block", 1),
}
_INDEX_HEADS = ("index_n_heads", "sparse_num_index_heads", 4)


class _IndexerSizes(Entry):
    """The layers with an indexer and the indexer's sizes, as attributes or in the object `sparse_attention_config`."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `sparse_layers` and the sizes.

        The object's sizes take precedence over attributes. `layer_types` takes precedence over the object's list.
        """
        nested, layers = published.nested(_NESTED), layers_of(published)
        flags = nested.pop("sparse_attention_freq", None)

        def read_size(name: str, older: str, default: int, minimum: int = 1) -> int:
            size = published.count(name, default, minimum)
            kind = OptionalSize if minimum == 0 else Size
            return published.checked(f"{_NESTED}.{older}", nested.pop(older, size), kind)

        sizes = {
            field: read_size(*names, minimum=0 if field == "local_blocks" else 1) for field, names in _INDEXER.items()
        }
        index_heads, kv_heads = read_size(*_INDEX_HEADS), published.count("num_key_value_heads", 4)
        types = published.listed("layer_types", str)
        if types is None and flags is not None:
            flagged = _flagged(published, "sparse_attention_freq", flags)
            types = [_SPARSE if layer in flagged else _FULL for layer in range(layers)]
        types = [_FULL] * layers if types is None else types
        check_layer_types(published, "layer_types", types, (_FULL, _SPARSE))
        sparse_layers = tuple(layer for layer, name in enumerate(types) if name == _SPARSE)
        if sparse_layers and index_heads != kv_heads:
            published.refuse(
                f"{_INDEX_HEADS[0]}={index_heads}: an indexer has one head for each key head, and there are "
                f"{kv_heads} key heads."
            )
        disabled = nested.pop("sparse_disable_index_value", None)
        if disabled is not None:
            layers_without_values = _flagged(published, "sparse_disable_index_value", disabled)
            if any(layer not in layers_without_values for layer in sparse_layers):
                published.refuse(f"sparse_disable_index_value={disabled}: an indexer has no values in this family.")
        for name, value in (("use_sparse_attention", True), ("sparse_score_type", "max"), ("sparse_init_block", 0)):
            if (stated := nested.pop(name, value)) != value:
                published.refuse(f"{_NESTED}: {name}={stated!r} is not supported; it must be {value!r}.")
        if nested:
            published.refuse(f"{_NESTED} has attributes that are not known: {sorted(nested)}.")
        return {"sparse_layers": sparse_layers} | sizes

    def write(self, config: MiniMaxM3Config) -> Attributes:
        """Return the attributes of transformers."""
        types = [_SPARSE if layer in config.sparse_layers else _FULL for layer in range(config.layers)]
        sizes = {names[0]: getattr(config, field) for field, names in _INDEXER.items()}
        return sizes | {_INDEX_HEADS[0]: config.kv_heads, "layer_types": types}


def _flagged(published: PublishedConfig, name: str, flags: object) -> tuple[int, ...]:
    """Return the indices of the layers with a flag in a list of `sparse_attention_config`."""
    return indices_of_flags(published, name, published.checked(name, flags, list[Index]))


class _FractionAndChannels(RotaryFraction):
    """The rotated part of a head; its number of channels is written too, for readers other than transformers."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `rotary_fraction`. The number of channels has no effect, as in transformers."""
        published.take("rotary_dim", None)
        return super().read(published)

    def write(self, config: MiniMaxM3Config) -> Attributes:
        """Return both attributes."""
        return super().write(config) | {"rotary_dim": int(config.head_size * config.rotary_fraction)}


_SIZES: dict[str, Any] = {"first_dense": 1, "sparse_layers": (1, 2, 3), "dense_mlp": 128, "shared_mlp": 32}
_PRESETS = {
    "minimax-m3-byte-500k": MiniMaxM3Config(
        *(256, 64, 4, 4, 2, 32),
        **{"experts": 12, "head_dim": 16, "index_dim": 16, "block": 16, "top_blocks": 4, "theta": 1e4, "tied": True},
        **_SIZES,
    ),
    "minimax-m3": MiniMaxM3Config(200_064, 6144, 60, 64, 4, 3072, first_dense=3, sparse_layers=tuple(range(3, 60))),
}

_FEED_FORWARD, _OLDER = "feed_forward.layer", f"{LAYER}block_sparse_moe."
_SHARED, _EXPERTS = f"{_FEED_FORWARD}.shared", f"{_FEED_FORWARD}.experts.mlps"
_INDEX_PARTS = ("q_proj", "query"), ("k_proj", "key"), ("q_norm", "query_norm"), ("k_norm", "key_norm")


def _indexer_weights(prefix: str) -> tuple[Rule, ...]:
    patterns = {"query": "(heads index_dim) embed -> heads index_dim embed"}
    return tuple(
        Rule(f"{prefix}{name}.weight", f"mixer.layer.indexer.{part}.weight", patterns.get(part, ""))
        for name, part in _INDEX_PARTS
    )


# The names of arrays in folders of the multimodal model; only in such folders are these names read.
_PUBLISHED = (
    *gated_weights(),
    *gated_weights(_SHARED, prefix=f"{_OLDER}shared_experts."),
    *gated_weights(_EXPERTS, prefix=f"{_OLDER}experts.{{expert}}.", names=("w1", "w3", "w2")),
    Rule(f"{_OLDER}gate.weight", f"{_FEED_FORWARD}.router.linear.weight"),
    Rule(f"{_OLDER}e_score_correction_bias", f"{_FEED_FORWARD}.router.selection_bias"),
    *_indexer_weights(f"{LAYER}self_attn.index_"),
)
MINIMAX_M3 = Family(
    "minimax_m3",
    MiniMaxM3Config,
    build_minimax_m3,
    _PRESETS,
    "MiniMaxM3VLForCausalLM",
    "minimax_m3_vl_text",
    (
        *decoder_attributes(RotaryPositions(5_000_000.0), head_dim=128, kv_heads=4, max_seq=524_288),
        _FractionAndChannels(1.0),
        _IndexerSizes(),
        FlaggedMixtures(),
        Count("experts", ("num_experts", "num_local_experts"), 128, written=("num_local_experts",)),
        Count("top_k", "num_experts_per_tok", 4),
        Count("dense_mlp", "dense_intermediate_size", 12_288),
        Count("shared_mlp", "shared_intermediate_size", 3072),
        Attribute("scale", "routed_scaling_factor", 2.0),
        Attribute("limit", "swiglu_limit", 7.0),
        Attribute("balance", "router_aux_loss_coef", 0.001),
        Expect("hidden_act", "silu", "swigluoai"),
        Unpublished("activation", "quick_gelu", "all layers use quick_gelu"),
        Expect("swiglu_alpha", 1.702),
        Expect("scoring_func", "sigmoid", written=False),
        Expect("use_routing_bias", True, written=False),
        Expect("use_gemma_norm", True, written=False),
        Expect("use_qk_norm", True, written=False),
        Expect("qk_norm_type", "per_head", written=False),
        Expect("attention_output_gate", False, written=False),
        Expect("n_shared_experts", 1, written=False),
        Ignore("router_jitter_noise"),  # has no effect in transformers
        Ignore(
            "num_mtp_modules", "mtp_transformer_layers", "use_mtp"
        ),  # attributes of layers for multi-token prediction, which are not read
    ),
    (
        *(*EDGES, *ATTENTION, *head_norm_weights(), *PRE_NORMS, *JOINED_GATED, SELECTION_BIAS),
        Rule(f"{LAYER}mlp.gate.weight", f"{_FEED_FORWARD}.router.linear.weight"),
        Rule(f"{LAYER}mlp.shared_experts.gate_up_proj.weight", (f"{_SHARED}.gate.weight", f"{_SHARED}.up.weight")),
        Rule(f"{LAYER}mlp.shared_experts.down_proj.weight", f"{_SHARED}.down.weight"),
        *(dataclasses.replace(rule, variant=False) for rule in FUSED),
        *_indexer_weights(f"{LAYER}self_attn.indexer."),
    ),
    multimodal=(
        MultimodalModel("minimax_m3_vl", weights=tuple(dataclasses.replace(rule, variant=True) for rule in _PUBLISHED)),
    ),
    ignored_prefixes=("mtp.",),
)
