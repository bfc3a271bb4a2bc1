"""Attention to the keys and values of an earlier layer."""

from collections.abc import Sequence

import equinox as eqx
import jax
from jaxtyping import Array, Float, Key, PyTree

from ...kernels import ATTENTION, causal, Mask, Operation
from .._contracts import Attends, Mixer, MixerFacts
from .._linear import Linear, LinearMap
from .._norm import Norm
from .._tokens import document_lengths, SharedKV, SharedValue, Tokens, tokens_or_default
from ._rotary import Rotary
from ._scores import Scores


class CrossLayerAttention(Mixer):
    """Attention whose keys and values an earlier layer shares (Brandon et al. 2024, arXiv:2405.12981).

    The layer has queries and an output of its own, and no cache. Use it in `Residual(reads=name)`, which calls it with
    the `SharedValue` of that name in place of a cache. Give it the mask and the rotary positions of the `Attention`
    whose keys it reads. `kv_heads` is the number of the whole layer and is used only for costs, because calls read the
    number of heads from the shared keys.
    """

    query: LinearMap
    output: LinearMap
    query_norm: Norm | None
    rotary: Rotary | None
    scores: Scores
    mask: Mask
    core: Operation
    kv_heads: int = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        heads: int,
        head_dim: int,
        kv_heads: int,
        bias: bool = False,
        output_std: float | None = None,
        query_norm: Norm | None = None,
        rotary: Rotary | None = None,
        scores: Scores | None = None,
        mask: Mask | None = None,
        core: Operation | None = None,
        key: Key[Array, ""],
    ):
        """Initialize the projections; parts that are modules are passed built.

        Args:
            embed: Channels of the input and the output.
            heads: Heads of queries, a multiple of `kv_heads`.
            head_dim: Channels of a head.
            kv_heads: Heads of the keys and values that are read.
            bias: Whether queries and the output have biases.
            output_std: The standard deviation of the output's weights; None: as for the queries'.
            query_norm: The norm of the queries.
            rotary: The rotary positions of queries; shared keys are rotated already.
            scores: The scale, softcap and other options of the scores; None: the scale `head_dim^-0.5` alone.
            mask: The keys that a query may see; None: `causal()`.
            core: The operation that computes the softmax; None: `kernels.ATTENTION`.
            key: For the weights.
        """
        if heads % kv_heads:
            raise ValueError(
                f"CrossLayerAttention(heads={heads}, kv_heads={kv_heads}): each key head serves equally many queries, "
                "so kv_heads must divide heads."
            )
        query_key, output_key = jax.random.split(key)
        sizes = {"embed": embed, "heads": heads, "head_dim": head_dim}
        self.query = Linear("embed -> heads head_dim", bias=bias, key=query_key, **sizes)
        self.output = Linear("heads head_dim -> embed", bias=bias, std=output_std, key=output_key, **sizes)
        self.query_norm, self.rotary = query_norm, rotary
        self.scores = Scores() if scores is None else scores
        self.mask = causal() if mask is None else mask
        self.core = ATTENTION if core is None else core
        self.kv_heads = kv_heads

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: SharedValue | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], SharedValue]:
        """Attend to the keys and values that the earlier layer shares."""
        shared = None if cache is None else cache.value
        if cache is None or not isinstance(shared, SharedKV):
            raise ValueError(
                "CrossLayerAttention(x): the layer reads keys of an earlier layer; use it in Residual(reads=), after "
                "an Attention in Residual(shares=)."
            )
        tokens = tokens_or_default(tokens, x.shape[:-1], None)
        kv_tokens = None if shared.positions is None else Tokens(shared.positions)
        query = self.query(x)
        query = query if self.query_norm is None else self.query_norm(query)
        if self.rotary is not None:
            lengths = document_lengths(tokens, kv_tokens) if self.rotary.depends_on_length else None
            query = self.rotary(query, tokens.positions, lengths)
        call = self.scores.call(query, shared.keys, shared.values, mask=self.mask, tokens=tokens, kv_tokens=kv_tokens)
        return self.output(self.core(call)), cache

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return None: another layer's cache has the keys."""
        return None

    def facts(self) -> MixerFacts:
        """State that the layer runs on a slice of its heads, and that its core may attend for pieces of rows."""
        query, output_sizes = self.query.output_shape, self.output.sizes
        key, output = (self.kv_heads, query[1]), (output_sizes["heads"], output_sizes["head_dim"])
        return MixerFacts(True, Attends(self.mask, (query,), (key,), (key,), (output,), self.scores.options))
