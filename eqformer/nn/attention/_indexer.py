"""What chooses the keys of a sparse attention: small heads that score every key, and the best of them."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from .._dtype import at_least_float32
from .._linear import Linear
from .._linear_map import LinearMap
from .._module import Module
from .._norm import LayerNorm
from .._tokens import Tokens
from ..cores._core import ReferenceCore
from ._mask import Chosen, Mask
from ._rotary import Rotary


class Asking(NamedTuple):
    """What an indexer makes of queries: small ones, and how much each of their heads counts."""

    query: Float[Array, "*batch seq index_heads index_dim"]
    weight: Float[Array, "*batch seq index_heads"]


class Indexer(Module):
    """The lightning indexer of DeepSeek-V3.2 (DeepSeek-AI 2025, eq. 1): each query sees its `top_k` best keys alone.

    A key at `s` has for a query at `t` the score `sum_h w_th relu(q_th . k_s)`, of small queries from the queries'
    latent, small keys and weights from the input. Nothing of it has a gradient: it is trained by a loss of its own. Of
    equal scores the first key counts.
    """

    query: LinearMap
    key: LinearMap
    key_norm: LayerNorm
    weight: LinearMap
    rotary: Rotary
    top_k: int = eqx.field(static=True)
    at_once: int = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        q_latent: int,
        heads: int,
        dim: int,
        top_k: int,
        rotary: Rotary,
        at_once: int = 64,
        key: Key[Array, ""],
    ):
        """Draw the maps.

        Args:
            embed: Channels of the input.
            q_latent: Channels of the queries' latent.
            heads: Small heads.
            dim: Channels of one, of which the first `rotary.dim` are rotated.
            top_k: Keys that a query sees.
            rotary: Rotary positions, whose frequencies must not depend on the length.
            at_once: Queries whose scores are in memory at a time.
            key: For the weights.
        """
        if rotary.depends_on_length or top_k < 1:
            raise ValueError(
                f"Indexer(top_k={top_k}, rotary={rotary}): a query sees at least one key, and keys are cached rotated; "
                "give top_k >= 1 and a rotary whose scaling does not depend on the length."
            )
        keys = jax.random.split(key, 3)
        self.query = Linear(
            "q_latent -> index_heads index_dim", q_latent=q_latent, index_heads=heads, index_dim=dim, key=keys[0]
        )
        self.key = Linear("embed -> index_dim", embed=embed, index_dim=dim, key=keys[1])
        self.key_norm = LayerNorm("index_dim", index_dim=dim, eps=1e-6)
        self.weight = Linear("embed -> index_heads", embed=embed, index_heads=heads, key=keys[2])
        self.rotary, self.top_k, self.at_once = rotary, top_k, at_once

    def keys(self, x: Float[Array, "*batch _ embed"], tokens: Tokens) -> Float[Array, "*batch seq index_dim"]:
        """What of the tokens of `x` is cached."""
        return self.rotary(self.key_norm(self.key(x))[..., None, :], tokens.positions)[..., 0, :]

    def asking(
        self, x: Float[Array, "*batch _ embed"], latent: Float[Array, "*batch seq q_latent"], tokens: Tokens
    ) -> Asking:
        """What asks for keys, of the input and the queries' latent."""
        exact = at_least_float32(x.dtype)
        query, weight = self.rotary(self.query(latent), tokens.positions), self.weight(x)
        return Asking(*(jax.lax.stop_gradient(its).astype(exact) for its in (query, weight)))

    def __call__(
        self,
        asking: Asking,
        keys: Float[Array, "*batch kv_seq index_dim"],
        visible: Bool[Array, "*batch seq kv_seq"],
    ) -> Bool[Array, "*batch seq kv_seq"]:
        """Which of the visible keys each query sees."""
        if keys.shape[-2] <= self.top_k:
            return visible
        query, weight = asking
        heads, dim = query.shape[-2:]
        dots = jnp.einsum("...qhd,...kd->...qhk", query, jax.lax.stop_gradient(keys).astype(query.dtype))
        scores = jnp.einsum("...qh,...qhk->...qk", weight * heads**-0.5, jax.nn.relu(dots * dim**-0.5))
        best = jax.lax.top_k(jnp.where(visible, scores, -jnp.inf), self.top_k)[1]
        chosen = jnp.put_along_axis(jnp.zeros_like(visible), best, True, axis=-1, inplace=False)
        return chosen & visible

    def attend(
        self,
        query: Float[Array, "*batch seq heads head_dim"],
        key: Float[Array, "*batch kv_seq kv_heads head_dim"],
        value: Float[Array, "*batch kv_seq kv_heads v_dim"],
        *,
        asking: Asking,
        keys: Float[Array, "*batch kv_seq index_dim"],
        mask: Mask,
        tokens: Tokens,
        kv_tokens: Tokens,
        scale: float,
    ) -> Float[Array, "*batch seq heads v_dim"]:
        """Attention to the chosen keys, of some queries at a time, in memory linear in the row.

        Args:
            query: The attention's queries.
            key: Its keys.
            value: Its values.
            asking: What asks for keys.
            keys: The indexer's own.
            mask: Which keys a query may choose from.
            tokens: The positions and segments of the queries.
            kv_tokens: Those of the keys.
            scale: What the scores are multiplied by.
        """

        def some(query: Array, asking: Asking, positions: Array, segments: Array | None) -> Array:
            its = Tokens(positions, segments)
            chosen: Any = Chosen(self(asking, keys, mask(its, kv_tokens)))
            return ReferenceCore()(query, key, value, mask=chosen, tokens=its, kv_tokens=kv_tokens, scale=scale)

        seq, at, size = query.shape[-3], query.ndim - 3, self.at_once
        places = jax.tree.map(lambda x: jnp.broadcast_to(x, query.shape[:-2]), (tokens.positions, tokens.segments))
        if seq <= size:
            return some(query, asking, *places)

        def cut(x: Array) -> Array:
            filled = jnp.pad(x, [(0, -seq % size if axis == at else 0) for axis in range(x.ndim)])
            return jnp.moveaxis(filled.reshape(*x.shape[:at], -1, size, *x.shape[at + 1 :]), at, 0)

        parts = jax.tree.map(cut, (query, asking, *places))
        found = jnp.moveaxis(jax.lax.map(jax.checkpoint(lambda its: some(*its)), parts), 0, at)
        whole = found.reshape(*query.shape[:at], -1, *found.shape[at + 2 :])
        return jax.lax.slice_in_dim(whole, 0, seq, axis=at)
