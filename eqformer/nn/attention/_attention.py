"""Softmax attention: multi-head, multi-query and grouped-query as one module; and attention with value embeddings."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from ...kernels import ATTENTION, causal, Mask, Operation
from .._cache import KVCache, mask_overflow, store_keys
from .._contracts import Attends, LinearMap, Mixer, MixerFacts
from .._dtype import at_least_float32, lookup_rows
from .._linear import Linear
from .._mlp import FixedActivation
from .._model_contracts import EmbeddingTable
from .._norm import Norm
from .._tokens import answer_request, SharedKV, SharedValue, ShareRequest, Tokens, tokens_or_default, unwrap_request
from ._rotary import PositionEncoding
from ._rotary_cache import start_rotation
from ._scores import compute_attention, Scores


def make_gate(
    gate: bool | Literal["heads"], *, embed: int, heads: int, head_dim: int, bias: bool, key: Key[Array, ""]
) -> Linear | None:
    """Return the map of an attention's gates, for each channel or, with "heads", for each head; None without gates."""
    outputs, sizes = ("heads", {}) if gate == "heads" else ("heads head_dim", {"head_dim": head_dim})
    return Linear(f"embed -> {outputs}", embed=embed, heads=heads, bias=bias, key=key, **sizes) if gate else None


def apply_gate(
    gate: LinearMap | None,
    x: Float[Array, "*rows _ embed"],
    attended: Float[Array, "*batch seq heads v_dim"],
    activation: Callable[[Array], Array] = jax.nn.sigmoid,
) -> Float[Array, "*batch seq heads v_dim"]:
    """Multiply the outputs of heads by the activation of the gate's map of `x`; without a gate, return them
    unchanged."""
    if gate is None:
        return attended
    factors = activation(gate(x))
    return attended * (factors if factors.ndim == attended.ndim else factors[..., None])


def _softplus(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jax.nn.softplus(x.astype(at_least_float32(x.dtype))).astype(x.dtype)


_GATES: dict[str, Callable[[Array], Array]] = {"sigmoid": jax.nn.sigmoid, "softplus": _softplus}


class Attention(Mixer):
    """Attention of `heads` queries over `kv_heads` keys and values (Vaswani 2017; Shazeer 2019; Ainslie et al. 2023).

    `kv_heads == heads` is multi-head attention, `kv_heads == 1` is multi-query attention, and any number in between is
    grouped-query attention: query head `h` reads key head `h // (heads / kv_heads)`. Head counts are read off the
    weights, so the module runs on a slice of its heads.

    With `eqx.tree_at(lambda a: a.value, attention, None)`, keys before their norm are used as values (Gemma 4).
    """

    query: LinearMap
    key: LinearMap
    value: LinearMap | None
    output: LinearMap
    query_norm: Norm | None
    key_norm: Norm | None
    value_norm: Norm | None
    rotary: PositionEncoding | None
    gate: LinearMap | None
    gate_activation: FixedActivation
    scores: Scores
    mask: Mask
    core: Operation

    def __init__(
        self,
        *,
        embed: int,
        heads: int,
        head_dim: int | tuple[int, int],
        kv_heads: int | None = None,
        bias: bool = False,
        output_bias: bool | None = None,
        output_std: float | None = None,
        query_norm: Norm | None = None,
        key_norm: Norm | None = None,
        value_norm: Norm | None = None,
        rotary: PositionEncoding | None = None,
        gate: bool | Literal["heads"] = False,
        scores: Scores | None = None,
        mask: Mask | None = None,
        core: Operation | None = None,
        key: Key[Array, ""],
    ):
        """Initialize the projections; norms, rotary positions, scores, mask and core are passed as instances.

        Args:
            embed: Channels of the input and the output.
            heads: Heads of queries.
            head_dim: Channels of a head. A pair: the channels of its queries and keys, and the channels of its values
                (MiMo-V2-Flash).
            kv_heads: Heads of keys and values, a divisor of `heads`; None: as many as `heads`.
            bias: Whether queries, keys, values and gates have biases.
            output_bias: Whether the output has a bias; None: as `bias`.
            output_std: The standard deviation of the output's weights; None: as for the other weights.
            query_norm: The norm of the queries, before their rotation.
            key_norm: The norm of the keys, before their rotation.
            value_norm: The norm of the values.
            rotary: The position encoding of queries and keys: `Rotary`, or `RotaryThenNorm`.
            gate: Whether each head's output is multiplied by sigmoids of the input, one for each channel. With "heads",
                all channels of a head have the same factor (LFM3).
            scores: The scale, temperature, softcap, bias and sinks of the scores; None: the scale `head_dim^-0.5`
                alone.
            mask: The keys that a query may see; None: `causal()`.
            core: The operation that computes the softmax; None: `kernels.ATTENTION`, the platform's own kernel or a
                loop over blocks. Its memory is linear in the sequence, and it has a first derivative in reverse mode;
                for other derivatives (`jax.jvp`, Hessians) pass `kernels.DotProductAttention()`.
            key: Random key for the weights.
        """
        kv_heads = heads if kv_heads is None else kv_heads
        if heads % kv_heads:
            raise ValueError(
                f"Attention(heads={heads}, kv_heads={kv_heads}): each key head serves equally many query heads, so "
                f"kv_heads must divide heads; take one of {[n for n in range(1, heads + 1) if heads % n == 0]}."
            )
        keys = jax.random.split(key, 5)
        output_bias = bias if output_bias is None else output_bias
        head_dim, v_dim = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
        q_sizes = {"embed": embed, "heads": heads, "head_dim": head_dim}
        kv_sizes = {"embed": embed, "kv_heads": kv_heads}
        # The channels of values have a name of their own only if their number differs.
        name = "head_dim" if v_dim == head_dim else "v_dim"
        v_sizes, output_sizes = kv_sizes | {name: v_dim}, {"embed": embed, "heads": heads, name: v_dim}
        self.query = Linear("embed -> heads head_dim", bias=bias, key=keys[0], **q_sizes)
        self.key = Linear("embed -> kv_heads head_dim", bias=bias, key=keys[1], **kv_sizes, head_dim=head_dim)
        self.value = Linear(f"embed -> kv_heads {name}", bias=bias, key=keys[2], **v_sizes)
        self.output = Linear(f"heads {name} -> embed", bias=output_bias, std=output_std, key=keys[3], **output_sizes)
        self.gate = make_gate(gate, embed=embed, heads=heads, head_dim=v_dim, bias=bias, key=keys[4])
        self.gate_activation = FixedActivation(jax.nn.sigmoid)
        self.query_norm, self.key_norm, self.value_norm = query_norm, key_norm, value_norm
        self.rotary = rotary
        self.scores = Scores() if scores is None else scores
        self.mask = causal() if mask is None else mask
        self.core = ATTENTION if core is None else core

    def with_gate(
        self, *, by_heads: bool = False, activation: Literal["sigmoid", "softplus"] = "sigmoid", key: Key[Array, ""]
    ) -> "Attention":
        """Return the layer with a gate without biases: each head's output is multiplied by a function of the input.

        The function is a linear map followed by a sigmoid or a softplus (Laguna). Each channel has its own factor; with
        `by_heads`, all channels of a head have the same factor.
        """
        (heads, _), (_, v_dim), (embed,) = self.query.output_shape, self._value_shape, self.output.output_shape
        kind = "heads" if by_heads else True
        gate = make_gate(kind, embed=embed, heads=heads, head_dim=v_dim, bias=False, key=key)
        replaced = gate, FixedActivation(_GATES[activation])
        return eqx.tree_at(lambda a: (a.gate, a.gate_activation), self, replaced, is_leaf=lambda node: node is None)

    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: KVCache | ShareRequest | None = None,
    ) -> tuple[Float[Array, "*batch seq embed"], KVCache | SharedValue | None]:
        """Attend among the tokens of `x` and, with a cache, to its tokens; the new tokens are stored in the cache."""
        # `Residual(shares=)` asks for the keys and values, so that a later layer can attend to them too.
        is_shared, cache = unwrap_request(cache)
        attended, shared, cache = self._attend(self.core, x, tokens, cache)
        return attended, answer_request(is_shared, shared, cache)

    def _attend(
        self, core: Operation, x: Float[Array, "*batch seq embed"], tokens: Tokens | None, cache: KVCache | None
    ) -> tuple[Float[Array, "*batch seq embed"], SharedKV, KVCache | None]:
        """Attend by this core; return the output, the keys and values, and the new cache."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        query, key, value = self._project(x, tokens)
        query, key, value = self._normalize(query, key, value)
        # Keys are rotated before they are cached, except where later tokens would change the rotation.
        rotation, cache = start_rotation(self.rotary, tokens, cache)
        query, key = rotation.before_cache(query, key)
        cache, key, value, kv_tokens = store_keys(cache, key, value, tokens)
        query, key = rotation.after_cache(query, key, kv_tokens)
        call = self.scores.call(query, key, value, mask=self.mask, tokens=tokens, kv_tokens=kv_tokens)
        # A single query reads its keys where the cache stores them, if they are stored rotated.
        attended = compute_attention(core, call, None if rotation.on_read else cache)
        # Tokens beyond the capacity of the cache are not stored, so their outputs are NaN.
        attended = mask_overflow(attended, tokens, cache)
        attended = apply_gate(self.gate, x, attended, self.gate_activation)
        shared = SharedKV(key, value, None if kv_tokens is None else kv_tokens.positions)
        return self.output(attended), shared, cache

    def _project(
        self, x: Float[Array, "*batch _ embed"], tokens: Tokens
    ) -> tuple[
        Float[Array, "*rows seq heads head_dim"],
        Float[Array, "*rows seq kv_heads head_dim"],
        Float[Array, "*rows seq kv_heads v_dim"],
    ]:
        """Return queries, keys and values. Under a plan, the maps may gather tokens, or exchange rows for heads."""
        query, key = self.query(x), self.key(x)
        return query, key, key if self.value is None else self.value(x)

    def _normalize(
        self,
        query: Float[Array, "*batch seq heads head_dim"],
        key: Float[Array, "*batch seq kv_heads head_dim"],
        value: Float[Array, "*batch seq kv_heads v_dim"],
    ) -> tuple[
        Float[Array, "*batch seq heads head_dim"],
        Float[Array, "*batch seq kv_heads head_dim"],
        Float[Array, "*batch seq kv_heads v_dim"],
    ]:
        """Apply the norms of queries, keys and values, if there are any."""
        value = value if self.value_norm is None else self.value_norm(value)
        query = query if self.query_norm is None else self.query_norm(query)
        return query, key if self.key_norm is None else self.key_norm(key), value

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> KVCache:
        """Return an empty cache for rows of up to `capacity` tokens.

        If the mask lets a query see fewer than `capacity` tokens, the cache is a rolling buffer with slots for the
        tokens that a query sees.
        """
        self.mask.check_cached("Attention")
        reach = self.mask.reach(capacity)
        cache = KVCache.empty(batch, capacity, self.key.output_shape, self._value_shape, dtype, reach=reach)
        if self.rotary is None or not self.rotary.can_rerotate(capacity):
            return cache
        return dataclasses.replace(cache, rotary_lengths=jnp.zeros(tuple(batch), jnp.int32))

    @property
    def _value_shape(self) -> tuple[int, ...]:
        """Heads of values, and channels of a head."""
        return self.key.output_shape if self.value is None else self.value.output_shape

    def facts(self) -> MixerFacts:
        """Declare that a device can run a slice of the heads, and that the core may run on pieces of rows."""
        query, key, value = self.query.output_shape, self.key.output_shape, self._value_shape
        output = (query[0], value[1])
        attends = Attends(self.mask, (query,), (key,), (value,), (output,), self.scores.options)
        return MixerFacts(True, attends, attends_by_rows=not self.scores.bias)


# Attention whose values have a part that depends on the token alone.


class ValueEmbedding(EmbeddingTable):
    """A table with a value for each token id and key head: the part of a layer's values that depends on the id alone.

    Each layer holds its own table, and devices of the axis `tensor` hold the table's part for their key heads. The
    value of an id outside the table is NaN.
    """

    weight: Float[Array, "ids kv_heads head_dim"]

    def __init__(self, *, vocab: int, kv_heads: int, head_dim: int, std: float = 0.02, key: Key[Array, ""]):
        """Initialize the table.

        Args:
            vocab: Number of token ids.
            kv_heads: Heads of values.
            head_dim: Channels of a head.
            std: Standard deviation of the table.
            key: Random key for the table.
        """
        self.weight = std * jax.random.normal(key, (vocab, kv_heads, head_dim), jnp.float32)

    @property
    def vector_dims(self) -> int:
        """2: a key head and its channels."""
        return 2

    @property
    def has_transform(self) -> bool:
        """False: looked-up values are used as they are."""
        return False

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq kv_heads head_dim"]:
        """Look up the values of each id."""
        return lookup_rows(self.weight, ids)


class ValueEmbeddedAttention(Attention):
    """Attention with the values `W_v x + 2 sigmoid(W_g x) * table[id]`, with one gate for each key head.

    The gate is 1 at the beginning. Tables of values come from the speedruns of modded-nanogpt (2024-12). The gate comes
    from nanochat (2026-01), where it reads only a few channels of `x`; here it reads all. The layer needs the ids of
    its tokens, `Tokens.ids`, which a `Transformer` passes to layers that read them.
    """

    value_embedding: ValueEmbedding
    value_gate: LinearMap

    def __init__(
        self,
        *,
        vocab: int,
        embed: int,
        heads: int,
        head_dim: int,
        kv_heads: int | None = None,
        value_std: float | None = None,
        key: Key[Array, ""],
        **options: Any,
    ):
        """Initialize the projections and the table.

        Args:
            vocab: Number of token ids of the table.
            embed: Channels of the input and the output.
            heads: Heads of queries.
            head_dim: Channels of a head.
            kv_heads: Heads of keys and values, a divisor of `heads`; None: as many as `heads`.
            value_std: Standard deviation of the table; None: embed^-0.5, as for the projections and in nanochat.
            key: Random key for the weights.
            **options: Further arguments of `Attention`.
        """
        attention_key, table_key, gate_key = jax.random.split(key, 3)
        kv_heads = heads if kv_heads is None else kv_heads
        sizes = {"embed": embed, "heads": heads, "head_dim": head_dim, "kv_heads": kv_heads}
        super().__init__(**sizes, key=attention_key, **options)
        std = embed**-0.5 if value_std is None else value_std
        self.value_embedding = ValueEmbedding(vocab=vocab, kv_heads=kv_heads, head_dim=head_dim, std=std, key=table_key)
        self.value_gate = Linear("embed -> kv_heads", embed=embed, kv_heads=kv_heads, std=0.0, key=gate_key)

    def facts(self) -> MixerFacts:
        """Return the facts of an `Attention`: devices that split the heads split table and gate by key heads, too."""
        return super().facts()

    def _project(
        self, x: Float[Array, "*batch _ embed"], tokens: Tokens
    ) -> tuple[
        Float[Array, "*rows seq heads head_dim"],
        Float[Array, "*rows seq kv_heads head_dim"],
        Float[Array, "*rows seq kv_heads v_dim"],
    ]:
        """Return queries, keys, and values with their embeddings."""
        if tokens.ids is None:
            raise ValueError(
                "ValueEmbeddedAttention(x): the layer reads the ids of its tokens; call it within a Transformer, or "
                "pass Tokens(positions, ids=ids)."
            )
        query, key, value = super()._project(x, tokens)
        gate = 2 * jax.nn.sigmoid(self.value_gate(x))[..., None]
        return query, key, value + gate * self.value_embedding(tokens.ids).astype(value.dtype)
