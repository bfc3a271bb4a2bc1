"""Mistral Large 4 (2026): latent attention in which an indexer selects the keys that each query sees.

A layer may read the latents or the selected keys of an earlier layer. Some layers, by default every fourth, have no
rotary positions. The other layers share learned factors of their rotary frequencies. The queries of each head, and of
each head of an indexer, are multiplied by `scale * log(1 + position) + bias`, where `scale` and `bias` are learned.
Experts are chosen by softmax.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
from jaxtyping import Array, Key

from ... import nn
from .._attributes import Attribute, Count, Entry, Fields, Unpublished
from .._config_types import Attributes, Index, Length, Number, OptionalSize, Positive, PublishedConfig, Size
from .._family import Family, MultimodalModel
from .._layer_attributes import AllLayers, every, layers_of, NoRotaryLayers
from .._rotary_attributes import RotaryPositions, RotaryWithTemperature
from .._weight_rules import Rule
from ._common import gated_weights, LAYER
from ._decoder import damping, decoder, gated_mlp, norm, pre_norm_block, rotary_of, Together
from ._deepseek import latent_attributes, LATENT_BYTE, LatentConfig, score_scale
from ._deepseek_v3 import DSA_WEIGHTS
from ._glm import ReadingLayers
from ._mixtures import FUSED, LayerMixtures, mixture_beside_shared, SELECTION_BIAS


@dataclasses.dataclass(frozen=True, kw_only=True)
class MistralLarge4Config(LatentConfig):
    """The config of a Mistral Large 4."""

    q_latent: Size | None = None
    head_dim: Size = 64
    experts: Size = 128
    top_k: Size = 4
    shared: OptionalSize = 1
    first_dense: Index = 1
    groups: Size = 1
    kept_groups: Size = 1
    scale: Number = 1.0
    balance: Number = 0.001
    index_heads: Size = 32
    """Heads of the indexer."""
    index_dim: Size = 128
    """Channels of a head of the indexer; in layers with rotary positions, `rope_dim` of them are rotated."""
    index_top_k: Length = 2048
    """The largest number of keys that a query sees."""
    reading_layers: tuple[Index, ...] = ()
    """The indices of the layers without an indexer; they see the keys that the last layer with an indexer selected."""
    no_rotary_layers: tuple[Index, ...] = ()
    """The indices of the layers without rotary positions; their heads have `head_dim + rope_dim` unrotated channels."""
    latent_sources: tuple[Index, ...] = ()
    """For each layer, the index of the layer whose latents it attends to: its own index, or an earlier layer's. With
    (), each layer attends to its own latents."""
    logit_softcap: Positive = 30.0
    """The bound of the logits."""
    scaling: nn.RotaryScaling | None = nn.YarnScaling(2048.0, 512, magnitude=1.0)
    eps: Number = 1e-5
    max_seq: Length = 1_048_576

    @property
    def sources(self) -> tuple[int, ...]:
        """For each layer, the index of the layer whose latents it attends to."""
        return self.latent_sources or tuple(range(self.layers))


class _MistralLarge4Layer(NamedTuple):
    """A kind of layer: its parts, and whether it shares latents and selected keys with other layers."""

    is_mixture: bool
    has_rotary: bool
    has_indexer: bool
    reads_latents: bool
    """Whether the layer attends to the latents of an earlier layer."""
    shares_latents: bool
    """Whether a later layer attends to this layer's latents."""
    shares: str | None = None
    """`"keys"` if later layers read latents or selected keys from this layer (`Residual.shares`); else None."""
    reads: str | None = None
    """`"keys"` if the layer gets latents and selected keys from earlier layers (`Residual.reads`); else None."""


def build_mistral_large4(config: MistralLarge4Config, *, key: Key[Array, ""]) -> nn.Transformer:
    """Return a Mistral Large 4 with random weights."""
    plain = rotary_of(config, config.rope_dim, "rope_dim", interleaved=True, scaling=config.scaling)
    rotary = nn.LearnedRotary(plain.dim, plain.theta, plain.interleaved, plain.scaling)
    mixture = functools.partial(mixture_beside_shared, config, group_score="top2", normalize=True)

    def block(kind: _MistralLarge4Layer, key: Key[Array, ""]) -> nn.Block:
        mixer_key, feed_forward_key = jax.random.split(key)
        attention = _attention(config, kind, rotary if kind.has_rotary else None, mixer_key)
        layer = mixture(feed_forward_key) if kind.is_mixture else gated_mlp(config, key=feed_forward_key)
        built = pre_norm_block(config, attention, layer)
        sharing = dataclasses.replace(built.sublayers[0], shares=kind.shares, reads=kind.reads)
        return nn.Block(sharing, *built.sublayers[1:])

    model = decoder(config, block, _kinds(config), logit_softcap=config.logit_softcap, key=key)
    return dataclasses.replace(model, frequencies=nn.LearnedFrequencies(config.rope_dim))


def _attention(
    config: MistralLarge4Config, kind: _MistralLarge4Layer, rotary: nn.LearnedRotary | None, key: Key[Array, ""]
) -> nn.LatentAttention:
    """Return the attention of a layer."""
    mixer_key, index_key = jax.random.split(key)
    indexer = None
    if kind.has_indexer:
        indexer = nn.Indexer(
            embed=config.embed,
            q_latent=None,
            heads=config.index_heads,
            dim=config.index_dim,
            top_k=config.index_top_k,
            rotary=rotary,
            query_norm=nn.LayerNorm("embed", embed=config.embed, eps=1e-6),
            temperature=nn.HeadLogTemperature(config.index_heads, "index_heads"),
            key=index_key,
        )
    attention = nn.LatentAttention(
        embed=config.embed,
        heads=config.heads,
        head_dim=config.head_dim + (0 if kind.has_rotary else config.rope_dim),
        latent=config.latent,
        q_latent=config.q_latent,
        v_dim=config.v_dim,
        latent_norm=norm(config, "latent"),
        query_latent_norm=None if config.q_latent is None else norm(config, "q_latent"),
        rotary=rotary,
        indexer=indexer,
        bias="latents" if config.bias else False,
        output_std=damping(config) * (config.heads * config.v_dim) ** -0.5,
        scores=nn.Scores(score_scale(config), nn.HeadLogTemperature(config.heads)),
        key=mixer_key,
    )
    if kind.reads_latents:
        return attention.reading_latents()
    return attention.sharing_latents() if kind.shares_latents else attention


def _kinds(config: MistralLarge4Config) -> list[_MistralLarge4Layer | Together[_MistralLarge4Layer]]:
    """Return the kind of each layer.

    A layer whose latents or keys are read is joined to its readers, and to all layers between them, in one `Together`.
    """
    _check_sources(config)
    sources, indexers = config.sources, _indexers(config)
    # `origins[layer]` has the indices of the earlier layers whose latents or selected keys the layer reads.
    origins = [{sources[layer], indexers[layer]} - {layer} for layer in range(config.layers)]
    origin_layers = set[int]().union(*origins)
    sharing = {source for reader, source in enumerate(sources) if reader != source}
    kinds: list[_MistralLarge4Layer | Together[_MistralLarge4Layer]] = []
    for first, stop in _groups(origins):
        group: list[_MistralLarge4Layer] = []
        for layer in range(first, stop):
            is_origin, is_reader = layer in origin_layers, bool(origins[layer])
            # Latents and selected keys are one shared value. A layer that shares one of them replaces this value, so it
            # must read the value first, to copy the other part.
            needs_value = layer > first and (is_origin or is_reader)
            group.append(
                _MistralLarge4Layer(
                    is_mixture=config.mixtures[layer],
                    has_rotary=layer not in config.no_rotary_layers,
                    has_indexer=indexers[layer] == layer,
                    reads_latents=sources[layer] != layer,
                    shares_latents=layer in sharing,
                    shares="keys" if is_origin else None,
                    reads="keys" if needs_value else None,
                )
            )
        kinds.append(Together(tuple(group)) if len(group) > 1 else group[0])
    return kinds


def _groups(origins: list[set[int]]) -> Iterator[tuple[int, int]]:
    """Divide the layers into the shortest runs that read nothing from other runs; yield each run as (start, stop)."""
    last_readers = list(range(len(origins)))  # for each layer, the last layer that reads from it; else its own index
    for reader, origins_of_reader in enumerate(origins):
        for origin in origins_of_reader:
            last_readers[origin] = reader
    first = end = 0
    for layer, last_reader in enumerate(last_readers):
        end = max(end, last_reader)
        if layer == end:
            yield first, layer + 1
            first = end = layer + 1


def _indexers(config: MistralLarge4Config) -> list[int]:
    """Return, for each layer, the index of the layer whose indexer selects its keys."""
    indexers: list[int] = []
    for layer in range(config.layers):
        if layer in config.reading_layers and not indexers:
            raise ValueError(
                f"MistralLarge4Config(reading_layers={config.reading_layers}): no layer before layer 0 has an "
                "indexer; leave 0 out."
            )
        indexers.append(indexers[-1] if layer in config.reading_layers else layer)
    return indexers


def _check_sources(config: MistralLarge4Config) -> None:
    """Raise a `ValueError` if the sources of latents do not fit the layers."""
    if message := _wrong_source(config.sources, config.layers, config.no_rotary_layers):
        raise ValueError(f"MistralLarge4Config(latent_sources={config.latent_sources}): {message}")


def _wrong_source(sources: tuple[int, ...], layers: int, no_rotary_layers: tuple[int, ...]) -> str:
    """Return why these sources of latents do not fit the layers; an empty text if they fit.

    A layer reads its own latents, or the latents of the last earlier layer that shares latents and, like the reader,
    has or lacks rotary positions.
    """
    if len(sources) != layers:
        return f"{len(sources)} items for {layers} layers; give the index of a layer for each layer."
    sharing = {source for reader, source in enumerate(sources) if reader != source}
    for layer, source in enumerate(sources):
        if source > layer or sources[source] != source:
            return (
                f"layer {layer} cannot read the latents of layer {source}: layer {source} is a later layer, or itself "
                "reads the latents of another layer."
            )
        if source == layer:
            continue
        has_rotary = layer not in no_rotary_layers
        alike = [n for n in range(layer) if n in sharing and (n not in no_rotary_layers) == has_rotary]
        if not alike or alike[-1] != source:
            return (
                f"layer {layer} cannot read the latents of layer {source}: a layer reads the latents of the last "
                "earlier layer that shares latents and, like the reader, has or lacks rotary positions."
            )
    return ""


class _Positions(RotaryWithTemperature):
    """Rotary positions with a temperature, written as `rope_parameters` with a `rope_type`.

    The `rope_type` is always written, because without it transformers would apply this family's default scaling.
    """

    def write(self, config: MistralLarge4Config) -> Attributes:
        """Return `rope_parameters`."""
        older = RotaryWithTemperature.write(self, config)
        return {"rope_parameters": {"rope_type": "default"} | older["rope_scaling"] | {"rope_theta": config.theta}}


class _LatentSources(Entry):
    """The entry for `kv_source_layers`: for each layer, the index of the layer whose latents it reads."""

    def read(self, published: PublishedConfig) -> Fields:
        """Return `latent_sources`; refuse lists with which transformers fails or reads other layers."""
        sources, layers = published.listed("kv_source_layers", Index), layers_of(published)
        if sources is None or sources == list(range(layers)):
            return {"latent_sources": ()}
        no_rotary = NoRotaryLayers()(published, layers)
        if message := _wrong_source(tuple(sources), layers, no_rotary):
            published.refuse(f"kv_source_layers={sources}: {message}")
        return {"latent_sources": tuple(sources)}

    def write(self, config: MistralLarge4Config) -> Attributes:
        """Return the list."""
        return {"kv_source_layers": list(config.sources)}


_PRESETS = {
    "mistral-large4-byte-500k": MistralLarge4Config(
        **LATENT_BYTE,
        index_heads=4,
        index_dim=16,
        index_top_k=64,
        experts=12,
        first_dense=0,
        no_rotary_layers=(1, 3),
        scaling=None,
        tied=True,
    ),
    "mistral-large4": MistralLarge4Config(
        204_800,
        6144,
        layers=72,
        heads=64,
        mlp=24_576,
        expert_mlp=6144,
        no_rotary_layers=every(4, 72),
    ),
}

_ATTENTION, _INDEXER, _MIXER = f"{LAYER}self_attn.", f"{LAYER}self_attn.indexer.", "mixer.layer."
# Rules with transformers' names of arrays. DeepSeek-V3.2's rules apply, except for experts, whose rules are in
# `_WEIGHTS` and `FUSED`, and for the selection bias, which a softmax router does not have.
_RULES = (
    *(rule for rule in DSA_WEIGHTS if "{expert}" not in rule.name and rule != SELECTION_BIAS),
    Rule("model.rotary_emb.alpha", "frequencies.alpha"),
    # Layers without rotary positions have no rotary key, and one map for all channels of a query.
    Rule(f"{_ATTENTION}kv_a_proj_with_mqa.weight", f"{_MIXER}latent_down.weight", lacks=f"{_MIXER}key_rope"),
    Rule(f"{_ATTENTION}kv_a_proj_with_mqa.bias", f"{_MIXER}latent_down.bias", lacks=f"{_MIXER}key_rope"),
    Rule(
        f"{_ATTENTION}q_proj.weight",
        f"{_MIXER}query.weight",
        "(heads width) inputs -> heads width inputs",
        lacks=f"{_MIXER}query_rope",
    ),
    Rule(f"{_INDEXER}q_input_norm.weight", f"{_MIXER}indexer.query_norm.weight"),
    Rule(f"{_INDEXER}q_input_norm.bias", f"{_MIXER}indexer.query_norm.bias"),
    *(
        Rule(f"{published}softmax_scaling.{name}", f"{_MIXER}{path}temperature.{name}")
        for published, path in ((_ATTENTION, "scores."), (_INDEXER, "indexer."))
        for name in ("scale", "bias")
    ),
)
# Parts of transformers' names of arrays, and the texts that replace these parts in published folders: `_IN_FOLDERS` in
# all folders, `_IN_WHOLE` also in folders of whole multimodal models.
_IN_FOLDERS = (
    *((".self_attn.", ".attention."), (".q_proj.", ".wq."), (".kv_a_proj_with_mqa.", ".wkv_a_with_mqa.")),
    *((".kv_b_proj.", ".wkv_b."), (".kv_a_layernorm.", ".kv_a_norm."), (".input_layernorm.", ".attention_norm.")),
    *((".post_attention_layernorm.", ".ffn_norm."), (".mlp.gate.weight", ".gate.weight")),
    *((".mlp.shared_experts.", ".shared_experts."), (".mlp.", ".feed_forward.")),
    *((".softmax_scaling.scale", ".ssmax_scaling.s"), (".softmax_scaling.bias", ".ssmax_scaling.b")),
)
_IN_WHOLE = ((".o_proj.", ".wo."), (".gate_proj.", ".w1."), (".up_proj.", ".w3."), (".down_proj.", ".w2."))


def _renamed(rules: Iterable[Rule], names: tuple[tuple[str, str], ...]) -> list[Rule]:
    """Return the rules with these parts of their names replaced, one part after another."""
    return [dataclasses.replace(rule, name=_replace(rule.name, names)) for rule in rules]


def _replace(text: str, parts: tuple[tuple[str, str], ...]) -> str:
    for old, new in parts:
        text = text.replace(old, new)
    return text


def _as_variants(rules: Iterable[Rule], others: Iterable[Rule]) -> list[Rule]:
    """Return the rules whose names are not among the names of `others`, as variants (`Rule.variant`)."""
    names = {rule.name for rule in others}
    return [dataclasses.replace(rule, variant=True) for rule in rules if rule.name not in names]


_IN_TEXT = _renamed(_RULES, _IN_FOLDERS)
_WEIGHTS = (
    *_IN_TEXT,
    *gated_weights("feed_forward.layer.experts.mlps", prefix=f"{LAYER}experts.{{expert}}.", names=("w1", "w3", "w2")),
    *_as_variants(_RULES, _IN_TEXT),
    *FUSED,
)

MISTRAL_LARGE4 = Family(
    "mistral_large4",
    MistralLarge4Config,
    build_mistral_large4,
    _PRESETS,
    "MistralLarge4ForCausalLM",
    "mistral_large4_text",
    (
        *(
            entry
            for entry in latent_attributes(
                _Positions(RotaryPositions(required=True)),
                mixtures=(Attribute("first_dense", "first_k_dense_replace", 1), LayerMixtures()),
                max_seq=1_048_576,
            )
            if not (isinstance(entry, Attribute) and entry.name == "q_latent")
        ),
        Unpublished("q_latent", None, "queries come from the input"),
        Unpublished("balance", 0.001, "no attribute states the weight of a balance loss"),
        AllLayers("layer_types", "indexed_attention"),
        Count("index_heads", "index_n_heads", 32),
        Count("index_dim", "index_head_dim", 128),
        Count("index_top_k", "index_topk", 2048),
        ReadingLayers(),
        NoRotaryLayers(),
        _LatentSources(),
        Attribute("logit_softcap", "final_logit_softcapping", 30.0),
    ),
    _WEIGHTS,
    # The predictor of further tokens, and parts for images.
    ignored_prefixes=("mtp_dspark.", "vision_language_adapter.", "pre_mm_projector_norm."),
    multimodal=(
        MultimodalModel(
            "mistral_large4",
            weights=tuple(_as_variants(_renamed(_IN_TEXT, _IN_WHOLE), _IN_TEXT)),
            prefixes=(
                *(("model.language_model.", "model."), ("language_model.", "")),
                *(("layers.", "model.layers."), ("norm.", "model.norm."), ("output.", "lm_head.")),
                *(("tok_embeddings.", "model.embed_tokens."), ("lerope.", "model.rotary_emb.")),
            ),
        ),
    ),
)
