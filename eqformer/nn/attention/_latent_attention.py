"""Multi-head latent attention: keys and values rebuilt from one small latent a token."""

from collections.abc import Sequence
from typing import Any

import einops
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from ...kernels import (
    ATTENTION,
    AttentionCall,
    blockwise_of,
    causal,
    DecodeCall,
    Mask,
    Op,
    Operation,
    RotatedChannels,
    StoredArrays,
)
from .._cache import empty_slots, LatentCache, mask_overflow, slots_for
from .._contracts import Attends, Mixer, MixerFacts
from .._cross_layer import SharedValue, ShareRequest
from .._dtype import add_float32, broadcast_float32, float_dtype, multiply_float32
from .._linear import Linear, LinearMap
from .._norm import Norm
from .._tokens import document_lengths, Tokens, tokens_or_default
from ._indexer import Choice, Indexer
from ._rotary import Rotary
from ._temperature import LogTemperature


class LatentAttention(Mixer):
    """MLA of DeepSeek-V2 (2024), section 2.1: low-rank joint compression of keys and values, decoupled rotary key.

    A token is cached as a latent of `latent` channels, from which each head's key and value are computed, and one
    rotated key of `rope_dim` channels that all heads share. Queries come from the input or, with `q_latent`, from a
    latent of their own. Without a `rotary` there is no decoupled key (NoPE). A single decoded token attends to the
    latents directly: the up-projections are absorbed into query and output, as in the paper, with equal results. With
    an `indexer`, beyond its number of keys each query sees those alone that it chooses (DeepSeek-V3.2). In
    `Residual(shares=)` it shares this choice, for a layer without an indexer in `Residual(reads=)` (GLM-5).
    """

    query_down: LinearMap | None
    query_latent_norm: Norm | None
    query: LinearMap
    query_rope: LinearMap | None
    latent_down: LinearMap
    latent_norm: Norm | None
    key_rope: LinearMap | None
    key_up: LinearMap
    value_up: LinearMap
    output: LinearMap
    rotary: Rotary | None
    temperature: LogTemperature | None
    indexer: Indexer | None
    mask: Mask
    core: Operation
    scale: float = eqx.field(static=True)

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
        temperature: LogTemperature | None = None,
        indexer: Indexer | None = None,
        bias: bool = False,
        latent_bias: bool = False,
        output_std: float | None = None,
        mask: Mask | None = None,
        core: Operation | None = None,
        scale: float | None = None,
        key: Key[Array, ""],
    ):
        """Draw the projections; parts that are modules are passed built.

        Args:
            embed: Channels of the input and the output.
            heads: Heads.
            head_dim: Channels of a head's query and key that are not rotated; `rotary.dim` are.
            latent: Channels of the latent of keys and values.
            q_latent: Channels of the queries' latent; None: queries come from the input.
            v_dim: Channels of a head's value; None: `head_dim`.
            latent_norm: A norm of the latent of keys and values.
            query_latent_norm: A norm of the queries' latent.
            rotary: Rotary positions; None: there is no decoupled key.
            temperature: What sharpens queries of late positions.
            indexer: What chooses the keys that a query sees; it reads the queries' latent.
            bias: Whether the maps have biases.
            latent_bias: Whether those to latents, and the output, have biases at least (DeepSeek).
            output_std: The deviation of the output's weights; None: as the others'.
            mask: Which keys a query may see; None: `causal()`.
            core: How the attention is computed; None: `kernels.ATTENTION`, in memory linear in the sequence.
            scale: What the scores are multiplied by; None: `(head_dim + rope_dim)^-0.5`.
            key: For the weights.
        """
        if indexer is not None and q_latent is None:
            raise ValueError(
                "LatentAttention(indexer=..., q_latent=None): an indexer reads the queries' latent; give one."
            )
        keys = jax.random.split(key, 8)
        rope_dim = 0 if rotary is None else rotary.dim
        source = {"embed": embed} if q_latent is None else {"q_latent": q_latent}
        (origin,) = source
        self.query_down, edges = None, {"embed": embed, "bias": bias or latent_bias}
        if q_latent is not None:
            self.query_down = Linear("embed -> q_latent", q_latent=q_latent, key=keys[0], **edges)
        self.query_latent_norm, self.latent_norm = query_latent_norm, latent_norm
        self.query = Linear(
            f"{origin} -> heads head_dim", heads=heads, head_dim=head_dim, bias=bias, key=keys[1], **source
        )
        self.latent_down = Linear("embed -> latent", latent=latent, key=keys[2], **edges)
        self.query_rope = self.key_rope = None
        if rotary is not None:
            self.query_rope = Linear(
                f"{origin} -> heads rope_dim", heads=heads, rope_dim=rope_dim, bias=bias, key=keys[3], **source
            )
            self.key_rope = Linear("embed -> rope_dim", rope_dim=rope_dim, key=keys[4], **edges)
        up = {"latent": latent, "heads": heads, "bias": bias}
        v_dim = head_dim if v_dim is None else v_dim
        self.key_up = Linear("latent -> heads head_dim", head_dim=head_dim, key=keys[5], **up)
        self.value_up = Linear("latent -> heads v_dim", v_dim=v_dim, key=keys[6], **up)
        self.output = Linear("heads v_dim -> embed", heads=heads, v_dim=v_dim, std=output_std, key=keys[7], **edges)
        self.rotary, self.temperature, self.indexer = rotary, temperature, indexer
        self.mask = causal() if mask is None else mask
        self.core = ATTENTION if core is None else core
        self.scale = (head_dim + rope_dim) ** -0.5 if scale is None else scale

    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: LatentCache | ShareRequest | SharedValue | None = None,
    ) -> tuple[Float[Array, "*batch seq embed"], LatentCache | SharedValue | None]:
        """Attend among the tokens of `x` and, with a cache, to those stored in it; the new ones are stored too."""
        given, cache = cache, _own_cache(cache)
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        source = self._source(x)
        query, query_rope = self.query(source), None if self.query_rope is None else self.query_rope(source)
        latents = self.latent_down(x)
        latents = latents if self.latent_norm is None else self.latent_norm(latents)
        key_rope = jnp.zeros((*x.shape[:-1], 0), x.dtype) if self.key_rope is None else self.key_rope(x)
        # If frequencies depend on the length, keys are cached unrotated, and rotated when they are read.
        late = self.rotary is not None and self.rotary.depends_on_length
        key_rope = key_rope if late else self._rotate_key(key_rope, tokens, None)
        rope_dim = key_rope.shape[-1]
        if self.indexer is not None:  # whose keys are cached beside the rotated ones
            key_rope = jnp.concatenate([key_rope, self.indexer.keys(x, tokens)], -1)
        kv_tokens = lengths = None
        if cache is not None:
            cache, latents, key_rope, kv_tokens = cache.update(latents, key_rope, tokens)
            latents, key_rope = latents.astype(x.dtype), key_rope.astype(x.dtype)
        key_rope, index_keys = key_rope[..., :rope_dim], key_rope[..., rope_dim:]
        seen = tokens if kv_tokens is None else kv_tokens
        if late:
            lengths = document_lengths(tokens, kv_tokens)
            key_rope = self._rotate_key(key_rope, seen, lengths)
        absorbed = cache is not None and x.shape[-2] == 1
        if absorbed:
            # The bias of key_up adds the same number to all scores of a query, which does not change the softmax.
            query = einops.einsum(query, self.key_up.matrix(x.dtype), "... h d, h d latent -> ... h latent")
        query, rotated = self._sharpened(query, tokens), None
        if self.rotary is not None and query_rope is not None:
            query_rope = self._sharpened(self.rotary(query_rope, tokens.positions, lengths), tokens)
            rotated = RotatedChannels(query_rope, key_rope[..., None, :])
        choice, rest = self._read(given), {"mask": self.mask, "tokens": tokens, "scale": self.scale}
        if self.indexer is not None:
            asking = self.indexer.asking(x, source, tokens)
            choice = self.indexer.choose(asking, index_keys, mask=self.mask, tokens=tokens, kv_tokens=seen)
        if cache is not None and absorbed and choice is None and (loop := blockwise_of(self.core)):
            attended = self._to_latents(loop.decode, query, rotated, latents, cache, late, seen, tokens)
        else:
            key = value = latents[..., None, :]
            if not absorbed:
                key, value = self.key_up(latents), self.value_up(latents)
            if rotated is not None:
                shared = broadcast_float32(rotated.key, (*key.shape[:-1], rope_dim))
                query, key = jnp.concatenate([query, rotated.query], -1), jnp.concatenate([key, shared], -1)
            if choice is None:
                attended = self.core(AttentionCall(query, key, value, kv_tokens=kv_tokens, **rest))
            else:
                attended = choice(query, key, value, kv_tokens=seen, **rest)
        if cache is not None:
            attended = mask_overflow(attended, tokens, cache)
        if absorbed:
            up = self.value_up
            attended = einops.einsum(attended, up.matrix(x.dtype), "... h latent, h v latent -> ... h v")
            attended = add_float32(attended, up.bias)
        return self.output(attended), SharedValue(choice, cache) if isinstance(
            given, ShareRequest | SharedValue
        ) else cache

    def _read(self, given: PyTree) -> Choice | None:
        """Return the choice of keys that an earlier layer shares; raises a `ValueError` for anything else."""
        choice = given.value if isinstance(given, SharedValue) else None
        if isinstance(given, SharedValue) and (self.indexer is not None or not isinstance(choice, Choice | None)):
            raise ValueError(
                f"LatentAttention(x): it was given {type(choice).__name__} of an earlier layer, and reads an indexer's "
                "choice alone, if it has no indexer; let it stand in Residual(reads=), behind one that has an indexer, "
                "in Residual(shares=)."
            )
        return choice

    def _source(self, x: Float[Array, "*batch _ embed"]) -> Float[Array, "*batch _ source"]:
        """What the queries come from: the input, or their latent."""
        source = x if self.query_down is None else self.query_down(x)
        return source if self.query_latent_norm is None else self.query_latent_norm(source)

    def _to_latents(
        self,
        decode: Op,
        query: Float[Array, "*batch 1 heads latent"],
        rotated: RotatedChannels | None,
        latents: Float[Array, "*batch kv_seq latent"],
        cache: LatentCache,
        late: bool,
        kv_tokens: Tokens,
        tokens: Tokens,
    ) -> Float[Array, "*batch 1 heads latent"]:
        """Attend to what a cache stores as it is: joined, latents and rotated keys would be written and read anew."""
        key, scales = latents[..., None, :], None
        is_held = rotated is not None and not late and rotated.key.shape[-1] == cache.rotary_keys.shape[-1]
        stored = StoredArrays(cache.layer, cache.latents, rotated=cache.rotary_keys if is_held else None)
        if cache.latent_scales is not None:
            (key, scales), (rotary, others) = ((x[..., None, :], y[..., None]) for x, y in cache.scaled())
            if rotated is not None and not late:
                rotated = RotatedChannels(rotated.query, rotary[..., : rotated.key.shape[-1]], others)
        visible = self.mask(tokens, kv_tokens)
        return decode(
            DecodeCall(
                query,
                key,
                None,
                visible=visible,
                scale=self.scale,
                key_scales=scales,
                rotated=rotated,
                stored=stored,
            )
        )

    def _sharpened(
        self, query: Float[Array, "*batch seq heads head_dim"], tokens: Tokens
    ) -> Float[Array, "*batch seq heads head_dim"]:
        if self.temperature is None:
            return query
        return multiply_float32(query, self.temperature(tokens.positions, query.dtype)[..., None, None])

    def _rotate_key(
        self, key: Float[Array, "*batch seq rope_dim"], tokens: Tokens, lengths: Int[Array, "*batch #seq"] | None
    ) -> Float[Array, "*batch seq rope_dim"]:
        return key if self.rotary is None else self.rotary(key[..., None, :], tokens.positions, lengths)[..., 0, :]

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> LatentCache:
        """An empty cache for rows of up to `capacity` tokens; if the mask sees fewer, it is so long only, and rolls."""
        dtype = float_dtype(dtype, f"init_cache(dtype={dtype!r})")
        self.mask.check_cached("LatentAttention")
        size = slots_for(self.mask.reach(capacity), capacity)
        latents = jnp.zeros((*batch, size, *self.latent_down.output_shape), dtype)
        width = 0 if self.rotary is None else self.rotary.dim
        width += 0 if self.indexer is None else self.indexer.key.output_shape[0]
        rotary_keys = jnp.zeros((*batch, size, width), dtype)
        slots: dict[str, Any] = {"positions": empty_slots(batch, size), "rolling": size < capacity}
        return LatentCache(latents=latents, rotary_keys=rotary_keys, **slots)

    def facts(self) -> MixerFacts:
        """It runs on a slice of its heads, and its core attends for pieces of rows; the rotated key is every head's."""
        rotated = () if self.query_rope is None else (self.query_rope.output_shape,)
        query, key = (self.query.output_shape, *rotated), (self.key_up.output_shape, *rotated)
        value = (self.value_up.output_shape,)
        # Rows are not cut where an indexer compares all of their keys.
        attends = Attends(self.mask, query, key, value, value) if self.indexer is None else None
        return MixerFacts(True, attends)


def _own_cache(given: LatentCache | ShareRequest | SharedValue | None) -> LatentCache | None:
    """The cache of what a mixer is called with."""
    return (
        given.cache if isinstance(given, ShareRequest) else given.wrapped if isinstance(given, SharedValue) else given
    )
