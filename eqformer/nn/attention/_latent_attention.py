"""Multi-head latent attention (MLA): keys and values are computed from one small latent of each token."""

import copy
import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import einops
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from ... import kernels
from .._cache import empty_slots, LatentCache, mask_overflow, slots_for
from .._contracts import Attends, Mixer, MixerFacts
from .._dtype import add_float32, broadcast_float32, float_dtype
from .._linear import Linear, LinearMap
from .._norm import Norm
from .._tokens import (
    answer_request,
    document_lengths,
    SharedValue,
    ShareRequest,
    Tokens,
    tokens_or_default,
    unwrap_request,
)
from ._attention import apply_gate, make_gate
from ._indexer import KeyIndexer, SelectedKeys
from ._rotary import Rotary
from ._scores import Scores
from ._shared_keys import read_shared_keys, SharedKeys, SharedLatents


class LatentKeys(NamedTuple):
    """The arrays from which keys and values of all heads are computed, for new tokens or for all tokens of a cache."""

    latents: Float[Array, "*batch kv_seq latent"]
    """The latents of keys and values."""
    rope: Float[Array, "*batch kv_seq rope_dim"]
    """The rotary keys, which all heads share; without rotary positions they have no channels."""
    index: Float[Array, "*batch kv_seq _"] | None
    """The channels by which the indexer scores keys."""


class LatentAttention(Mixer):
    """MLA of DeepSeek-V2 (2024), section 2.1: low-rank joint compression of keys and values, decoupled rotary key.

    A token is cached as a latent of `latent` channels, from which each head's key and value are computed, and one
    rotated key of `rope_dim` channels that all heads share. Queries come from the input or, with `q_latent`, from a
    latent of their own. Without a `rotary` there is no decoupled key (NoPE). A single decoded token attends to the
    latents directly: the up-projections are absorbed into query and output, as in the paper, with equal results. With
    an `indexer`, a query sees only the keys that the indexer selects (DeepSeek-V3.2, GLM-5.3).

    A layer with an indexer, in `Residual(shares=)`, shares its selection with later layers without an indexer, in
    `Residual(reads=)` (GLM-5). A layer made by `sharing_latents` also shares its latents, with layers made by
    `reading_latents` (Mistral Large 4). A layer that both reads and shares passes on what earlier layers share. If the
    layer has its own selection or latents, these replace the earlier layers' selection or latents.
    """

    query_down: LinearMap | None
    query_latent_norm: Norm | None
    query: LinearMap
    query_rope: LinearMap | None
    latent_down: LinearMap | None
    latent_norm: Norm | None
    key_rope: LinearMap | None
    key_up: LinearMap
    value_up: LinearMap
    gate: LinearMap | None
    output: LinearMap
    rotary: Rotary | None
    indexer: KeyIndexer | None
    scores: Scores
    mask: kernels.Mask
    core: kernels.Operation
    shares_latents: bool = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        heads: int,
        head_dim: int,
        latent: int,
        q_latent: int | None = None,
        v_dim: int | None = None,
        latent_norm: Norm | None = None,
        query_latent_norm: Norm | None = None,
        rotary: Rotary | None = None,
        indexer: KeyIndexer | None = None,
        bias: bool | Literal["latents"] = False,
        output_std: float | None = None,
        scores: Scores | None = None,
        mask: kernels.Mask | None = None,
        core: kernels.Operation | None = None,
        key: Key[Array, ""],
    ):
        """Initialize the projections; norms, rotary positions, indexer, scores, mask and core are passed as instances.

        Args:
            embed: Channels of the input and the output.
            heads: Heads.
            head_dim: Channels of a head's query and key that are not rotated; `rotary.dim` more are rotated.
            latent: Channels of the latent of keys and values.
            q_latent: Channels of the queries' latent; None: queries come from the input.
            v_dim: Channels of a head's value; None: `head_dim`.
            latent_norm: The norm of the latent of keys and values.
            query_latent_norm: The norm of the queries' latent.
            rotary: Rotary positions; None: there is no decoupled key.
            indexer: Selects the keys that a query sees, from the queries' latent or from the input.
            bias: Whether the maps have biases. With "latents", only the output and the maps from the input to latents
                and to the rotary key have biases (DeepSeek).
            output_std: The standard deviation of the output's weights; None: as for the other weights.
            scores: The scale, temperature and sinks of the scores; None: the scale `(head_dim + rope_dim)^-0.5` alone.
            mask: The keys that a query may see; None: `causal()`.
            core: The operation that computes the softmax; None: `kernels.ATTENTION`, in memory linear in the sequence.
            key: Random key for the weights.
        """
        if indexer is not None and indexer.reads_latent and q_latent is None:
            raise ValueError(
                "LatentAttention(indexer=..., q_latent=None): this indexer reads the queries' latent; give q_latent, "
                "or an indexer that reads the input."
            )
        scores = Scores() if scores is None else scores
        if unknown := [option for option in scores.options if option != "sinks"]:
            raise ValueError(
                f"LatentAttention(scores={scores}): its scores may have a scale, a temperature and sinks, and no "
                f"{' and no '.join(unknown)}; leave it out of the scores."
            )
        keys = jax.random.split(key, 8)
        has_bias, v_dim = bias is True, head_dim if v_dim is None else v_dim
        from_embed = {"embed": embed, "bias": bool(bias)}
        self.query_down = None
        if q_latent is not None:
            self.query_down = Linear("embed -> q_latent", q_latent=q_latent, key=keys[0], **from_embed)
        source, source_size = ("embed", {"embed": embed}) if q_latent is None else ("q_latent", {"q_latent": q_latent})
        query_sizes = {"heads": heads, **source_size}
        self.query = Linear(f"{source} -> heads head_dim", head_dim=head_dim, bias=has_bias, key=keys[1], **query_sizes)
        self.latent_down = Linear("embed -> latent", latent=latent, key=keys[2], **from_embed)
        self.query_rope = self.key_rope = None
        if rotary is not None:
            self.query_rope = Linear(
                f"{source} -> heads rope_dim", rope_dim=rotary.dim, bias=has_bias, key=keys[3], **query_sizes
            )
            self.key_rope = Linear("embed -> rope_dim", rope_dim=rotary.dim, key=keys[4], **from_embed)
        from_latent = {"latent": latent, "heads": heads, "bias": has_bias}
        self.key_up = Linear("latent -> heads head_dim", head_dim=head_dim, key=keys[5], **from_latent)
        self.value_up = Linear("latent -> heads v_dim", v_dim=v_dim, key=keys[6], **from_latent)
        self.output = Linear(
            "heads v_dim -> embed", heads=heads, v_dim=v_dim, std=output_std, key=keys[7], **from_embed
        )
        self.gate = None
        self.query_latent_norm, self.latent_norm = query_latent_norm, latent_norm
        self.rotary, self.indexer, self.scores = rotary, indexer, scores
        self.mask = kernels.causal() if mask is None else mask
        self.core = kernels.ATTENTION if core is None else core
        self.shares_latents = False

    def with_gate(self, *, by_heads: bool = False, key: Key[Array, ""]) -> "LatentAttention":
        """Return the layer with a gate: each head's output is multiplied by sigmoids of a map of the input.

        Each channel has its own factor (Hy4); with `by_heads`, all channels of a head have the same factor (Ling 3).
        """
        (heads, v_dim), (embed,) = self.value_up.output_shape, self.output.output_shape
        kind = "heads" if by_heads else True
        gate = make_gate(kind, embed=embed, heads=heads, head_dim=v_dim, bias=False, key=key)
        return eqx.tree_at(lambda layer: layer.gate, self, gate, is_leaf=lambda node: node is None)

    def sharing_latents(self) -> "LatentAttention":
        """Return the layer that shares its latents, beside its selection, with later layers made by `reading_latents`.

        Either both layers have rotary positions, or neither layer has.
        """
        sharing = copy.copy(self)
        object.__setattr__(sharing, "shares_latents", True)  # `dataclasses.replace` would call the constructor.
        return sharing

    def reading_latents(self) -> "LatentAttention":
        """Return the layer without maps to latents and to a rotary key; the layer reads both from an earlier layer."""
        maps = lambda layer: (layer.latent_down, layer.latent_norm, layer.key_rope)
        return eqx.tree_at(maps, self, (None, None, None), is_leaf=lambda node: node is None)

    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: LatentCache | ShareRequest | SharedValue | None = None,
    ) -> tuple[Float[Array, "*batch seq embed"], LatentCache | SharedValue | None]:
        """Attend among the tokens of `x` and, with a cache, to its tokens; the new tokens are stored in the cache."""
        shared = read_shared_keys(cache)
        is_sharing, cache = _unwrap_cache(cache)
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        source = self._query_source(x)
        query, query_rope = self.query(source), None if self.query_rope is None else self.query_rope(source)
        if self.latent_down is None:
            cache, keys, kv_tokens, lengths = self._read_keys(x, tokens, cache, shared)
        else:
            cache, keys, kv_tokens, lengths = self._store_keys(self._compress(x, tokens), tokens, cache)
        scale = self.scores.scale_of(query.shape[-1] + keys.rope.shape[-1])
        # A single token with a cache attends to the latents themselves, with key_up and value_up absorbed.
        is_absorbed = kv_tokens is not None and x.shape[-2] == 1
        query = self._absorb_key_up(query) if is_absorbed else query
        query, rotated = (
            self.scores.apply_temperature(query, tokens),
            self._rotate_query(query_rope, keys.rope, tokens, lengths),
        )
        selection = self._select_keys(x, source, keys, tokens, kv_tokens, shared.selection)
        # The loop over blocks and the kernels for decoding read the latents where the layer's own cache stores them.
        has_own_latents = self.latent_down is not None
        decode = self.core.decode_op(has_codes=True) if is_absorbed and has_own_latents and selection is None else None
        if decode is not None and cache is not None and kv_tokens is not None:
            attended = decode(self._decode_call(query, rotated, keys.latents, cache, tokens, kv_tokens, scale))
        else:
            call = self._attention_call(query, rotated, keys.latents, tokens, kv_tokens, scale, is_absorbed)
            attended = self.core(call) if selection is None else selection(call)
        attended = mask_overflow(attended, tokens, cache)
        attended = self._apply_value_up(attended) if is_absorbed else attended
        attended = apply_gate(self.gate, x, attended)
        shared = self._update_shared(shared, selection, keys, kv_tokens)
        return self.output(attended), answer_request(is_sharing, shared, cache)

    def _absorb_key_up(self, query: Float[Array, "*batch _ heads head_dim"]) -> Float[Array, "*batch _ heads latent"]:
        """Return absorbed queries: their products with latents equal the products of `query` with `key_up(latents)`."""
        # The bias of key_up is left out: it adds the same constant to all scores of a query, which does not change the
        # softmax.
        return einops.einsum(query, self.key_up.matrix(query.dtype), "... h d, h d latent -> ... h latent")

    def _apply_value_up(self, latents: Float[Array, "*batch _ heads latent"]) -> Float[Array, "*batch _ heads v_dim"]:
        """Return the values of each head's weighted sum of latents."""
        up = self.value_up
        values = einops.einsum(latents, up.matrix(latents.dtype), "... h latent, h v latent -> ... h v")
        return add_float32(values, up.bias)

    def _rotate_query(
        self,
        query: Float[Array, "*batch seq heads rope_dim"] | None,
        key: Float[Array, "*batch kv_seq rope_dim"],
        tokens: Tokens,
        lengths: Int[Array, "*batch #seq"] | None,
    ) -> kernels.RotatedChannels | None:
        """Return the rotated channels of queries and keys, or None without rotary positions; the keys are rotated
        already.
        """
        if self.rotary is None or query is None:
            return None
        query = self.rotary.for_tokens(tokens)(query, tokens.positions, lengths)
        query = self.scores.apply_temperature(query, tokens)
        return kernels.RotatedChannels(query, key[..., None, :])

    def _attention_call(
        self,
        query: Float[Array, "*batch seq heads _"],
        rotated: kernels.RotatedChannels | None,
        latents: Float[Array, "*batch kv_seq latent"],
        tokens: Tokens,
        kv_tokens: Tokens | None,
        scale: float,
        is_absorbed: bool,
    ) -> kernels.AttentionCall:
        """Return the call with the keys and values of all heads or, for absorbed queries, with the latents as both."""
        if is_absorbed:
            key = value = latents[..., None, :]
        else:
            key, value = self.key_up(latents), self.value_up(latents)
        if rotated is not None:
            rope = broadcast_float32(rotated.key, (*key.shape[:-1], rotated.key.shape[-1]))
            query, key = jnp.concatenate([query, rotated.query], -1), jnp.concatenate([key, rope], -1)
        return kernels.AttentionCall(
            query,
            key,
            value,
            mask=self.mask,
            tokens=tokens,
            kv_tokens=kv_tokens,
            scale=scale,
            sinks=self.scores.sinks,
        )

    def _query_source(self, x: Float[Array, "*batch _ embed"]) -> Float[Array, "*batch _ source"]:
        """Return the input of the queries' maps: `x`, or the queries' latent."""
        source = x if self.query_down is None else self.query_down(x)
        return source if self.query_latent_norm is None else self.query_latent_norm(source)

    @property
    def _rotates_on_read(self) -> bool:
        """Whether keys are cached without positions and rotated when they are read, because frequencies may change."""
        return self.rotary is not None and self.rotary.depends_on_length

    def _compress(self, x: Float[Array, "*batch _ embed"], tokens: Tokens) -> LatentKeys:
        """Return the latents, rotary keys and index keys of the tokens of `x`, as they are cached."""
        assert self.latent_down is not None
        latents = self.latent_down(x)
        latents = latents if self.latent_norm is None else self.latent_norm(latents)
        # Under a plan `x` may have only some tokens of each row, and the maps return all of them.
        rope = jnp.zeros((*latents.shape[:-1], 0), x.dtype) if self.key_rope is None else self.key_rope(x)
        rope = rope if self._rotates_on_read else self._rotate_key(rope, tokens, tokens.positions, None)
        return LatentKeys(latents, rope, None if self.indexer is None else self.indexer.index_keys(x, tokens))

    def _store_keys(
        self, keys: LatentKeys, tokens: Tokens, cache: LatentCache | None
    ) -> tuple[LatentCache | None, LatentKeys, Tokens | None, Int[Array, "*batch #seq"] | None]:
        """Store new tokens in the cache.

        Return the cache, all keys that the new tokens may see, the tokens of these keys, and the lengths of documents.
        Without a cache the keys are the new keys, with None for their tokens. Lengths are None unless frequencies
        depend on them.
        """
        latents, rope, kv_tokens, lengths = keys.latents, keys.rope, None, None
        rope_dim, dtype = rope.shape[-1], latents.dtype
        if keys.index is not None:
            # The cache stores the indexer's keys in one array with the rotary keys.
            rope = jnp.concatenate([rope, keys.index], -1)
        if cache is not None:
            cache, latents, rope, kv_tokens = cache.update(latents, rope, tokens)
            latents, rope = latents.astype(dtype), rope.astype(dtype)
        rope, index = rope[..., :rope_dim], None if keys.index is None else rope[..., rope_dim:]
        if self._rotates_on_read:
            lengths = document_lengths(tokens, kv_tokens)
            positions = tokens.positions if kv_tokens is None else kv_tokens.positions
            rope = self._rotate_key(rope, tokens, positions, lengths)
        return cache, LatentKeys(latents, rope, index), kv_tokens, lengths

    def _rotate_key(
        self,
        key: Float[Array, "*batch kv_seq rope_dim"],
        tokens: Tokens,
        positions: Int[Array, "*batch kv_seq"],
        lengths: Int[Array, "*batch #kv_seq"] | None,
    ) -> Float[Array, "*batch kv_seq rope_dim"]:
        if self.rotary is None:
            return key
        return self.rotary.for_tokens(tokens)(key[..., None, :], positions, lengths)[..., 0, :]

    def _read_keys(
        self, x: Float[Array, "*batch _ embed"], tokens: Tokens, cache: LatentCache | None, shared: SharedKeys
    ) -> tuple[LatentCache | None, LatentKeys, Tokens | None, Int[Array, "*batch #seq"] | None]:
        """Store the indexer's keys, if there is an indexer, and read the latents of an earlier layer.

        Return the same as `_store_keys`.
        """
        latents = shared.latents_for(self.rotary is not None)
        index = None if self.indexer is None else self.indexer.index_keys(x, tokens)
        if cache is not None:
            no_channels = jnp.zeros((*x.shape[:-1], 0), x.dtype)
            cache, _, stored, _ = cache.update(no_channels, no_channels if index is None else index, tokens)
            index = None if index is None else stored.astype(index.dtype)
        lengths = document_lengths(tokens, latents.tokens) if self._rotates_on_read else None
        return cache, LatentKeys(latents.latents, latents.rope, index), latents.tokens, lengths

    def _update_shared(
        self, shared: SharedKeys, selection: SelectedKeys | None, keys: LatentKeys, kv_tokens: Tokens | None
    ) -> SharedKeys:
        """Return `shared` with this layer's selection and, if the layer shares its latents, with its latents."""
        shared = dataclasses.replace(shared, selection=selection)
        if not self.shares_latents:
            return shared
        positions = None if kv_tokens is None else kv_tokens.positions
        return shared.with_latents(SharedLatents(keys.latents, keys.rope, positions), self.rotary is not None)

    def _select_keys(
        self,
        x: Float[Array, "*batch _ embed"],
        source: Float[Array, "*batch _ source"],
        keys: LatentKeys,
        tokens: Tokens,
        kv_tokens: Tokens | None,
        shared: SelectedKeys | None,
    ) -> SelectedKeys | None:
        """Return the keys that the indexer selects or, without an indexer, the selection `shared`; None: all keys."""
        if self.indexer is None or keys.index is None:
            return shared
        queries = self.indexer.index_queries(x, source, tokens)
        kv_tokens = tokens if kv_tokens is None else kv_tokens
        return self.indexer.select_keys(queries, keys.index, mask=self.mask, tokens=tokens, kv_tokens=kv_tokens)

    def _decode_call(
        self,
        query: Float[Array, "*batch 1 heads latent"],
        rotated: kernels.RotatedChannels | None,
        latents: Float[Array, "*batch kv_seq latent"],
        cache: LatentCache,
        tokens: Tokens,
        kv_tokens: Tokens,
        scale: float,
    ) -> kernels.DecodeCall:
        """Return the call that reads latents and rotary keys where the cache stores them.

        Joining both to one array of keys would copy them once more.
        """
        key, key_scales = latents[..., None, :], None
        is_stored = rotated is not None and not self._rotates_on_read
        # An indexer's keys are in the same array of the cache, which then does not consist of rotary keys alone.
        is_whole = rotated is not None and rotated.key.shape[-1] == cache.rotary_keys.shape[-1]
        stored = kernels.StoredArrays(
            cache.layer, cache.latents, rotated=cache.rotary_keys if is_stored and is_whole else None
        )
        if cache.latent_scales is not None:
            (key, key_scales), (rope, rope_scales) = (
                (x[..., None, :], y[..., None]) for x, y in cache.read_quantized()
            )
            if rotated is not None and is_stored:
                rotated = kernels.RotatedChannels(rotated.query, rope[..., : rotated.key.shape[-1]], rope_scales)
        return kernels.DecodeCall(
            query,
            key,
            None,
            visible=self.mask(tokens, kv_tokens),
            scale=scale,
            sinks=self.scores.sinks,
            key_scales=key_scales,
            rotated=rotated,
            stored=stored,
        )

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> LatentCache:
        """Return an empty cache for rows of up to `capacity` tokens.

        If the mask lets a query see fewer than `capacity` tokens, the cache is a rolling buffer with slots for the
        tokens that a query sees. The cache of a layer that reads latents has room for the keys of its indexer alone.
        """
        dtype = float_dtype(dtype, f"init_cache(dtype={dtype!r})")
        self.mask.check_cached("LatentAttention")
        size = slots_for(self.mask.reach(capacity), capacity)
        channels = (0,) if self.latent_down is None else self.latent_down.output_shape
        latents = jnp.zeros((*batch, size, *channels), dtype)
        width = 0 if self.key_rope is None else self.key_rope.output_shape[0]
        width += 0 if self.indexer is None else self.indexer.key_channels
        rotary_keys = jnp.zeros((*batch, size, width), dtype)
        positions = empty_slots(batch, size)
        return LatentCache(latents=latents, rotary_keys=rotary_keys, positions=positions, rolling=size < capacity)

    def facts(self) -> MixerFacts:
        """Declare that devices can split the heads and, if there is no indexer, the rows."""
        rotated = () if self.query_rope is None else (self.query_rope.output_shape,)
        query, key = (self.query.output_shape, *rotated), (self.key_up.output_shape, *rotated)
        value = (self.value_up.output_shape,)
        # An indexer compares all keys of a row, so devices cannot split rows.
        attends = Attends(self.mask, query, key, value, value, self.scores.options) if self.indexer is None else None
        return MixerFacts(True, attends, projects_derived=self.indexer is not None and self.indexer.projects_derived)


def _unwrap_cache(argument: LatentCache | ShareRequest | SharedValue | None) -> tuple[bool, LatentCache | None]:
    """Return whether the mixer must return a `SharedValue`, and the cache in its argument."""
    return (True, argument.wrapped) if isinstance(argument, SharedValue) else unwrap_request(argument)
