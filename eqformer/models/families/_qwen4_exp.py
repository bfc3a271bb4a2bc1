"""Qwen4-Exp (Qwen team 2026): Qwen3.5's layers with several residual streams, tables of hashed n-grams, and indexers.

Some of the layers with delta nets begin with an n-gram memory, which looks up vectors of a token's n-grams in a table
of its own and adds them to all streams. Attention reads the keys that an indexer selects. All layers have experts.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Attribute, Count, Entry, Fields, Ignore
from .._config_types import Attributes, Index, LARGEST_INT, Length, PublishedConfig, Range, Size
from .._family import Family, MultimodalModel
from .._layer_attributes import every, layers_of, LayerTypes, Period
from .._rotary_attributes import RotaryFraction, RotaryPositions
from .._weight_rules import Rule
from . import _delta_nets as delta_nets
from ._common import decoder_attributes, EDGES, head_norm_weights, LAYER
from ._decoder import attention_sizes, decoder, head_norms, norm, part_rotary
from ._mixtures import FUSED, GATED_SHARED, MIXTURE, mixture_beside_gated_shared, router_attributes


_AtLeastTwo = Annotated[int, Range(2, LARGEST_INT, counts="entries")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen4ExpConfig(delta_nets.NetMixtureConfig):
    """The config of a Qwen4-Exp; `mlp` is the width of an expert."""

    experts: Size = 512
    top_k: Size = 10
    normalize: bool = True
    """Whether the weights of a token's experts are normalized to add up to 1."""
    gate_activation: str | None = None
    """The activation of the output gates of delta nets, `"silu"` or `"sigmoid"`; None: `activation`."""
    streams: _AtLeastTwo = 4
    """Residual streams of a token."""
    stream_rank: Size = 320
    """Channels between the two maps of the gates of streams."""
    index_heads: Size | None = None
    """The number of the indexer's heads; needed if there are attention layers, like the next three fields. Either all
    four or none must be given."""
    index_dim: Size | None = None
    """Channels of a head of the indexer."""
    index_top_k: Size | None = None
    """The number of keys that a query selects, in whole pools. It also sees the keys of its own unfinished pool."""
    index_pool: Size | None = None
    """The number of keys in a pool, a divisor of `index_top_k`."""
    memory_layers: tuple[Index, ...] = ()
    """The indices of the layers with an n-gram memory, which must be layers with delta nets."""
    memory_dim: Size | None = None
    """The sum of the channels of a token's vectors; None: `embed`."""
    memory_taps: Size = 4
    """The number of tokens that the convolution of a memory reads."""
    ngram: _AtLeastTwo = 3
    """Tokens of the longest n-gram."""
    ngram_heads: Size = 8
    """The number of vectors for each length of n-grams."""
    ngram_rows: Size = 20_000_000
    """A lower bound of the number of rows that each vector of a token has in the table of its memory."""
    rows_divisor: Size = 128
    """The number of rows of a whole table is a multiple of this number."""
    hash_seed: Index = 1234
    """The seed of the hash."""
    end_id: Index | None = None
    """The id that ends a text, at which n-grams begin anew; needed if there are memories."""
    table_shards: Length = 512
    """The number of arrays in which a table is published."""
    max_seq: Length = 32_768

    def hash_of(self, layer: int) -> nn.NGramHash:
        """Return the hash of the memory of this layer."""
        if self.end_id is None:
            raise ValueError(
                f"Qwen4ExpConfig(memory_layers={self.memory_layers}, end_id=None): n-grams begin anew after the id "
                "that ends a text; give this id."
            )
        return nn.splitmix_hash(
            vocab=self.vocab,
            longest=self.ngram,
            heads=self.ngram_heads,
            smallest=self.ngram_rows,
            end_id=self.end_id,
            table_index=sorted(self.memory_layers).index(layer),
            seed=self.hash_seed,
        )


class _LayerKind(NamedTuple):
    """A kind of layer."""

    is_attention: bool
    """Whether the layer has attention; False: it has a delta net."""
    memory: int | None = None
    """The layer's index if the layer has an n-gram memory, else None. Each memory has a hash of its own, so layers with
    memories are of different kinds."""


def build_qwen4_exp(config: Qwen4ExpConfig, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a Qwen4-Exp with random weights."""
    _check_memories(config)
    _indexer_sizes(config)  # Refuse wrong sizes also in models without attention, whose folders would state them.
    sizes = {"streams": config.streams, "embed": config.embed, "rank": config.stream_rank, "eps": config.eps}
    connect = functools.partial(nn.GatedConnection, **sizes)

    def block(kind: _LayerKind, key: Key[Array, ""]) -> nn.Block:
        mixer_key, feed_forward, first, second, memory = jax.random.split(key, 5)
        mixer = _attention(config, mixer_key) if kind.is_attention else _net(config, mixer_key)
        sublayers = (
            connect(nn.Residual(mixer), key=first),
            connect(nn.Residual(mixture_beside_gated_shared(config, feed_forward)), key=second),
        )
        if kind.memory is None:
            return nn.Block(*sublayers)
        return nn.Block(nn.Residual(_memory(config, kind.memory, memory)), *sublayers)

    kinds = [
        _LayerKind(layer in config.attention_layers, layer if layer in config.memory_layers else None)
        for layer in range(config.layers)
    ]
    layers, merge = jax.random.split(key)
    return decoder(
        config,
        block,
        kinds,
        expand=nn.ExpandStreams(config.streams),
        final_norm=nn.GatedMerge(nn.StreamGates(**sizes, key=merge)),
        key=layers,
    )


def _check_memories(config: Qwen4ExpConfig) -> None:
    """Raise a `ValueError` for layers that cannot have an n-gram memory."""
    if len({*config.memory_layers}) < len(config.memory_layers):
        raise ValueError(
            f"Qwen4ExpConfig(memory_layers={config.memory_layers}): a layer has one memory; list each layer once."
        )
    if wrong := [n for n in config.memory_layers if n >= config.layers or n in config.attention_layers]:
        raise ValueError(
            f"Qwen4ExpConfig(memory_layers={config.memory_layers}): layers {wrong} are not among the {config.layers} "
            "layers, or have attention; give indices of layers with delta nets."
        )


def _indexer_sizes(config: Qwen4ExpConfig) -> dict[str, Any]:
    """Return the sizes of `nn.MeanPoolIndexer`, none if there is no indexer; raise a `ValueError` for wrong sizes."""
    sizes = {name: getattr(config, name) for name in ("index_heads", "index_dim", "index_top_k", "index_pool")}
    heads, dim, top_k, pool = sizes.values()
    if not config.attention_layers and {*sizes.values()} == {None}:
        return {}
    if None in sizes.values() or top_k % pool:
        raise ValueError(
            f"Qwen4ExpConfig({', '.join(f'{name}={size}' for name, size in sizes.items())}): attention has an indexer, "
            "which selects whole pools of index_pool keys; give all four sizes, and an index_top_k that is a multiple "
            "of index_pool."
        )
    return {"heads": heads, "dim": dim, "pool_size": pool, "top_k": top_k // pool}


def _attention(config: Qwen4ExpConfig, key: Key[Array, ""]) -> nn.IndexedAttention:
    """Return the attention of a layer."""
    mixer, index = jax.random.split(key)
    rotary = part_rotary(config)
    indexer = nn.MeanPoolIndexer(
        embed=config.embed,
        **_indexer_sizes(config),
        query_norm=norm(config, "index_dim", offset=1.0),
        key_norm=norm(config, "index_dim", offset=1.0),
        rotary=rotary,
        key=index,
    )
    return nn.IndexedAttention(
        indexer,
        **attention_sizes(config),
        bias=config.bias,
        rotary=rotary,
        gate=True,
        **head_norms(config, offset=1.0),
        key=mixer,
    )


def _net(config: Qwen4ExpConfig, key: Key[Array, ""]) -> nn.GatedDeltaNet:
    """Return the delta net of a layer."""
    gate = config.activation if config.gate_activation is None else config.gate_activation
    if gate not in _GATES:
        raise ValueError(
            f"Qwen4ExpConfig(activation={config.activation!r}, gate_activation={config.gate_activation!r}): the output "
            f"gates of delta nets have one of the activations {_GATES}; give one of them as gate_activation."
        )
    return delta_nets.delta_net(config, key, gate_activation=nn.ACTIVATIONS[gate])


_GATES = ("silu", "sigmoid")


def _memory(config: Qwen4ExpConfig, layer: int, key: Key[Array, ""]) -> nn.NGramMemory:
    """Return the n-gram memory of a layer."""
    hash_ = config.hash_of(layer)
    channels, heads = config.embed if config.memory_dim is None else config.memory_dim, len(hash_.sizes)
    if channels % heads:
        raise ValueError(
            f"Qwen4ExpConfig(memory_dim={config.memory_dim}, ngram={config.ngram}, ngram_heads={config.ngram_heads}): "
            f"{heads} vectors have {channels} channels together; give a memory_dim that is a multiple of {heads}."
        )
    return nn.NGramMemory(
        hash_,
        embed=config.embed,
        streams=config.streams,
        dim=channels // heads,
        divisor=config.rows_divisor,
        taps=config.memory_taps,
        eps=config.eps,
        key=key,
    )


class _GateActivation(Entry):
    """`output_gate_type`; null means `hidden_act`."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `gate_activation`; refuse other activations than the family has."""
        published.expect("output_gate_type", None, *_GATES)
        return {"gate_activation": published.take("output_gate_type", None)}

    def write(self, config: Qwen4ExpConfig) -> Attributes:
        """Return the attribute."""
        return {"output_gate_type": config.gate_activation}


class _IndexerHeads(Entry):
    """`indexer_n_heads`, and `indexer_kv_heads`, which is 1; transformers expects both to be null without indexers."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `index_heads`; refuse several key heads."""
        published.expect("indexer_kv_heads", 1, None)
        return {"index_heads": published.take("indexer_n_heads", None)}

    def write(self, config: Qwen4ExpConfig) -> Attributes:
        """Return the attributes."""
        return {"indexer_n_heads": config.index_heads, "indexer_kv_heads": None if config.index_heads is None else 1}


class _MemoryLayers(Entry):
    """`ple_layer_ids`, which counts layers from 1, and `eos_token_id`: an id, or a list whose first id is used."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `memory_layers` and `end_id`."""
        layers, count = published.listed("ple_layer_ids", Index, empty=True) or [], layers_of(published)
        if not all(1 <= layer <= count for layer in layers) or len({*layers}) < len(layers):
            published.refuse(f"ple_layer_ids={layers}: layers are counted from 1 to {count}; each may be listed once.")
        ids = published.take("eos_token_id", None)
        end_id = ids[0] if isinstance(ids, list) and ids else ids
        return {
            "memory_layers": tuple(sorted(layer - 1 for layer in layers)),
            "end_id": None if end_id in (None, []) else published.checked("eos_token_id", end_id, Index),
        }

    def write(self, config: Qwen4ExpConfig) -> Attributes:
        """Return the attributes."""
        return {
            "ple_layer_ids": [layer + 1 for layer in sorted(config.memory_layers)],
            "eos_token_id": config.end_id,
        }


class _MemoryDim(Entry):
    """`ple_embed_dim`; null, or no attribute, means `hidden_size`."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `memory_dim`; None if it is the `hidden_size`."""
        stated = published.take("ple_embed_dim", None)
        is_embed = stated is not None and stated == published.read("hidden_size", Size)
        return {"memory_dim": None if is_embed else stated}

    def write(self, config: Qwen4ExpConfig) -> Attributes:
        """Return the attribute."""
        return {"ple_embed_dim": config.embed if config.memory_dim is None else config.memory_dim}


def _constants(config: Qwen4ExpConfig) -> Mapping[str, np.ndarray]:
    """Return the numbers of the hash of each memory by their published names."""
    arrays = {}
    for layer in config.memory_layers:
        hash_, prefix = config.hash_of(layer), f"{_MEMORY.format(layer=layer)}ple_embedding."
        arrays[f"{prefix}layer_multipliers"] = np.array(hash_.multipliers, np.int64)
        arrays[f"{prefix}ngram_heads_vocab_sizes"] = np.array(hash_.sizes, np.int64)
        arrays[f"{prefix}ngram_heads_offsets"] = np.array(hash_.starts, np.int64)
    return arrays


_PRESETS = {
    "qwen4-exp-byte-500k": Qwen4ExpConfig(
        *(256, 64, 4, 2, 1, 32),
        attention_layers=every(4, 4),
        net_heads=4,
        net_kv_heads=2,
        net_head_dim=16,
        net_v_dim=16,
        head_dim=32,
        shared_mlp=32,
        experts=12,
        top_k=4,
        theta=1e4,
        streams=2,
        stream_rank=16,
        index_heads=4,
        index_dim=16,
        index_top_k=64,
        index_pool=4,
        memory_layers=(1,),
        ngram_heads=2,
        ngram_rows=500,
        end_id=0,
        table_shards=4,
        tied=True,
    ),
    # The sizes are transformers' defaults. transformers has none for the indexer, the layers with a memory and the id
    # that ends a text, and other defaults for `theta` (1e4) and `rotary_fraction` (1), which are Qwen3.5's here.
    "qwen4-exp": Qwen4ExpConfig(
        *(248_320, 2048, 40, 16, 2, 512),
        attention_layers=every(4, 40),
        shared_mlp=512,
        index_heads=16,
        index_dim=128,
        index_top_k=2048,
        index_pool=16,
        memory_layers=(1,),
        end_id=248_046,
    ),
}

_ATTENTION, _MEMORY = f"{LAYER}self_attn.", f"{LAYER}ple."
_STREAMS = "(streams embed) -> streams embed"


def _gate_weights(published: str, path: str) -> tuple[Rule, ...]:
    """Return the rules of a `StreamGates` at this path."""
    down = "stream_rank (streams embed) -> stream_rank streams embed"
    up = "(streams embed) stream_rank -> streams embed stream_rank"
    return (
        Rule(f"{published}.hc_norm.weight", f"{path}.norm.weight", _STREAMS),
        Rule(f"{published}.input_mix_weight_down.weight", f"{path}.down.weight", down),
        Rule(f"{published}.input_mix_weight_up.weight", f"{path}.up.weight", up),
    )


def _connection_weights(published: str, path: str) -> tuple[Rule, ...]:
    """Return the rules of a `GatedConnection` at this path of a layer."""
    write = "stream_logits (streams embed) -> stream_logits streams embed"
    return (
        *_gate_weights(f"{LAYER}{published}", f"{path}.gates"),
        Rule(f"{LAYER}{published}.block_inject_weight.weight", f"{path}.write.weight", write),
    )


def _after_memory(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """Return the rules, and the same rules for layers whose mixer comes after a memory."""

    def move(path: str) -> str:
        return path.replace("mixer.", "sublayers.1.", 1)

    moved = tuple(
        dataclasses.replace(
            rule,
            path=move(rule.path) if isinstance(rule.path, str) else tuple(map(move, rule.path)),
            needs=move(rule.needs) or "sublayers.2",
        )
        for rule in rules
    )
    return (*rules, *moved)


_MEMORY_WEIGHTS = (
    *(
        Rule(f"{_MEMORY}norm_{name}.weight", f"sublayers.0.layer.{name}_norm.weight", _STREAMS)
        for name in ("key", "query", "conv")
    ),
    Rule(
        f"{_MEMORY}key_proj.weight",
        "sublayers.0.layer.key.weight",
        "(streams embed) (heads dim) -> streams embed heads dim",
    ),
    Rule(f"{_MEMORY}value_proj.weight", "sublayers.0.layer.value.weight", "embed (heads dim) -> embed heads dim"),
    Rule(f"{_MEMORY}conv1d.weight", "sublayers.0.layer.conv.weight", "(streams embed) 1 taps -> streams embed taps"),
    Rule(
        f"{_MEMORY}ple_embedding.ngram_embedding.shard_{{shard}}.weight",
        "sublayers.0.layer.table.weight",
        shards="table_shards",
    ),
    # The name in folders that transformers writes with its own names.
    Rule(f"{_MEMORY}ple_embedding.ngram_embedding.weight", "sublayers.0.layer.table.weight", variant=True),
)
_WEIGHTS = (
    *EDGES,
    *(
        dataclasses.replace(rule, lacks="", needs="mixer.layer.indexer")
        for rule in (*delta_nets.GATED_ATTENTION, *head_norm_weights())
    ),
    Rule(
        f"{_ATTENTION}indexer.index_qk_proj.weight",
        ("mixer.layer.indexer.query.weight", "mixer.layer.indexer.key.weight"),
        ("(heads dim) embed -> heads dim embed", "dim embed -> dim embed"),
    ),
    Rule(f"{_ATTENTION}indexer.q_layernorm.weight", "mixer.layer.indexer.query_norm.weight"),
    Rule(f"{_ATTENTION}indexer.k_layernorm.weight", "mixer.layer.indexer.key_norm.weight"),
    *_after_memory((*delta_nets.SPLIT_NET_WEIGHTS, *_connection_weights("attn_hyper_connection", "mixer"))),
    *(*MIXTURE, *FUSED, *GATED_SHARED),
    *_connection_weights("mlp_hyper_connection", "feed_forward"),
    *_gate_weights("model.hyper_connection_mixer", "norm.gates"),
    *(dataclasses.replace(rule, needs="sublayers.2") for rule in _MEMORY_WEIGHTS),
)

QWEN4_EXP = Family(
    "qwen4_exp",
    Qwen4ExpConfig,
    build_qwen4_exp,
    _PRESETS,
    "Qwen4ExpForCausalLM",
    "qwen4_exp_text",
    (
        *decoder_attributes(
            RotaryPositions(skipped=("mrope_section", "mrope_interleaved")),
            head_dim=256,
            kv_heads=2,
            mlp="moe_intermediate_size",
            max_seq=32_768,
        ),
        *delta_nets.NET_SIZE_ATTRIBUTES,
        LayerTypes(
            "attention_layers",
            ("full_attention", "linear_attention"),
            Period(4, ("full_attention_interval",)),
            published=("indexed_attention", "linear_attention"),
        ),
        RotaryFraction(1.0, inside=True),
        Attribute("shared_mlp", "shared_expert_intermediate_size", 512),
        *router_attributes(512, 10, normalize=True),
        _GateActivation(),
        Count("streams", "hc_count", 4, minimum=2),
        Count("stream_rank", "hc_lowrank", 320),
        _IndexerHeads(),
        Attribute("index_dim", "indexer_head_dim", None),
        Attribute("index_top_k", "indexer_budget", None),
        Attribute("index_pool", "indexer_compress_ratio", None),
        _MemoryLayers(),
        _MemoryDim(),
        Count("memory_taps", "ple_conv_kernel_size", 4),
        Count("ngram", "ngram_size", 3, minimum=2),
        Count("ngram_heads", "heads_per_ngram", 8),
        Count("ngram_rows", "ngram_vocab_size_base", 20_000_000),
        Count("rows_divisor", "make_ngram_vocab_size_divisible_by", 128),
        Attribute("hash_seed", "seed", 1234),
        Count("table_shards", "split_ngram_parts", 512),
        Ignore("intermediate_size"),  # a width of dense layers, which the family lacks
        Ignore("number_of_conv_states"),  # the number of transformers' caches of a layer
    ),
    _WEIGHTS,
    constants=_constants,
    multimodal=(MultimodalModel("qwen4_exp"),),
)
