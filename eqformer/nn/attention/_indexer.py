"""What chooses the keys of a sparse attention: small heads that score every key, and the best of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

from ...kernels import AttentionCall, ChosenKeys, Mask, ReferenceAttention
from .._dtype import at_least_float32
from .._linear import Linear, LinearMap
from .._module import Module
from .._norm import LayerNorm
from .._tokens import Tokens
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

    def choose(
        self,
        asking: Asking,
        keys: Float[Array, "*batch kv_seq index_dim"],
        *,
        mask: Mask,
        tokens: Tokens,
        kv_tokens: Tokens,
    ) -> "Choice | None":
        """Which keys each query sees, of those that its mask shows; None where there are no more than `top_k`.

        Scores of some queries are in memory at a time.

        Args:
            asking: What asks for keys.
            keys: The indexer's own.
            mask: Which keys a query may choose from.
            tokens: The positions and segments of the queries.
            kv_tokens: Those of the keys.
        """
        if keys.shape[-2] <= self.top_k:
            return None
        keys = jax.lax.stop_gradient(keys).astype(asking.query.dtype)

        def best(tokens: Tokens, asking: Asking) -> Int[Array, "*batch seq top_k"]:
            heads, dim = asking.query.shape[-2:]
            dots = jax.nn.relu(jnp.einsum("...qhd,...kd->...qhk", asking.query, keys) * dim**-0.5)
            scores = jnp.einsum("...qh,...qhk->...qk", asking.weight * heads**-0.5, dots)
            return jax.lax.top_k(jnp.where(mask(tokens, kv_tokens), scores, -jnp.inf), self.top_k)[1]

        return Choice(_of_some(best, tokens, asking.weight.shape[:-1], asking, self.at_once), self.at_once)


class Choice(eqx.Module):
    """Which keys each query sees, of those that its mask shows: an indexer's, for its layer and for later ones."""

    best: Int[Array, "*batch seq top_k"]
    """Places of keys."""
    at_once: int = eqx.field(static=True)
    """Queries whose scores are in memory at a time."""

    def __call__(
        self,
        query: Float[Array, "*batch seq heads head_dim"],
        key: Float[Array, "*batch kv_seq kv_heads head_dim"],
        value: Float[Array, "*batch kv_seq kv_heads v_dim"],
        *,
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
            mask: Which keys a query may see.
            tokens: The positions and segments of the queries.
            kv_tokens: Those of the keys.
            scale: What the scores are multiplied by.
        """

        def some(tokens: Tokens, given: tuple[Array, Array]) -> Float[Array, "*batch seq heads v_dim"]:
            query, best = given
            shown = mask(tokens, kv_tokens)
            chosen = ChosenKeys(shown & jnp.put_along_axis(jnp.zeros_like(shown), best, True, -1, inplace=False))
            call = AttentionCall(query, key, value, mask=chosen, tokens=tokens, kv_tokens=kv_tokens, scale=scale)
            return ReferenceAttention()(call)

        return _of_some(some, tokens, query.shape[:-2], (query, self.best), self.at_once)


def _of_some(
    function: Callable[[Tokens, Any], Array], tokens: Tokens, shape: tuple[int, ...], given: PyTree, size: int
) -> Shaped[Array, "..."]:
    """What a function gives of tokens of a shape and of arrays with their dims in front, of `size` tokens at a time."""
    at, seq = len(shape) - 1, shape[-1]
    places = jax.tree.map(lambda x: jnp.broadcast_to(x, shape), (tokens.positions, tokens.segments))
    if seq <= size:
        return function(Tokens(*places), given)

    def cut(x: Array) -> Array:
        filled = jnp.pad(x, [(0, -seq % size if axis == at else 0) for axis in range(x.ndim)])
        return jnp.moveaxis(filled.reshape(*x.shape[:at], -1, size, *x.shape[at + 1 :]), at, 0)

    parts = jax.tree.map(cut, (places, given))
    found = jax.lax.map(jax.checkpoint(lambda part: function(Tokens(*part[0]), part[1])), parts)
    found = jnp.moveaxis(found, 0, at)
    return jax.lax.slice_in_dim(found.reshape(*found.shape[:at], -1, *found.shape[at + 2 :]), 0, seq, axis=at)
