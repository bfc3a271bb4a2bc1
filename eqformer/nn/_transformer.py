"""Language models: embed, run the stacks, normalise, unembed."""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .._array_checks import checked
from ..kernels import soft_capped
from ._cache import check_cached
from ._contracts import ScoreBias
from ._dtype import at_least_float32, float_dtype
from ._embedding import Embedding, LearnedPositions
from ._encoder import Encoder
from ._float32_sums import add_float32
from ._linear import LinearMap
from ._module import Module
from ._norm import Norm
from ._per_layer_embedding import PerLayerInputs
from ._residual import Dropout
from ._stack import empty_caches, run_layers, Stack
from ._tokens import Tokens, tokens_or_default, with_source


class Predictor(Module):
    """Multi-token prediction's module for one more token (DeepSeek-V3, arXiv:2412.19437, eq. 21 to 23).

    With `h` what the model's final norm gave of token `i`, `x_i = merge [embedding_norm(Emb(t_(i+1))); hidden_norm(h)]`
    goes through the layers and `norm`; of what they give, the model's head makes logits of token `i + 2`. The paper
    writes the two in the other order, which permutes columns of `merge`; this one is that of published weights.
    """

    embedding_norm: Norm | Callable[[Array], Array]
    """Of the next token's embedding."""
    hidden_norm: Norm | Callable[[Array], Array]
    """Of the model's vector."""
    merge: LinearMap
    """A map `sides embed -> merged`."""
    stacks: tuple[Stack, ...]
    """The layers, one in published models."""
    norm: Norm | Callable[[Array], Array]
    """Of the last layer's output."""

    def __call__(
        self,
        embedded: Float[Array, "*batch seq embed"],
        hidden: Float[Array, "*batch seq embed"],
        tokens: Tokens,
        cache: PyTree = None,
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """What the head is given, and the cache; `tokens` count the vectors of the model, each beside the next token's
        embedding."""
        x = self.merge(jnp.stack([self.embedding_norm(embedded), self.hidden_norm(hidden)], axis=-2))
        x, cache, _ = run_layers(self.stacks, x, tokens, cache)
        return self.norm(x), cache

    def init_cache(
        self, batch: Sequence[int], capacity: int, dtype: str | None, *, compute_dtype: str, rollback: int = 0
    ) -> PyTree:
        """An empty cache, as `Transformer.init_cache` gives one."""
        return empty_caches(self.stacks, batch, capacity, dtype, compute_dtype=compute_dtype, rollback=rollback)


def _compute_dtype(dtype: str) -> str:
    return float_dtype(dtype, f"Transformer(compute_dtype={dtype!r})")


class Transformer(Module):
    """A model of tokens, in parts that are passed built; without a `head` the embedding's table gives the logits.

    Parameters keep their own dtype and are cast where they are used; norms, softmax and logits are computed in float32
    at least.
    """

    embedding: Embedding
    """The table of tokens."""
    stacks: tuple[Stack, ...]
    """The layers."""
    norm: Norm | Callable[[Array], Array]
    """Of the last layer's output."""
    head: LinearMap | None = None
    """What gives the logits; None: the embedding's table."""
    positions: LearnedPositions | None = None
    """A table of positions that is added to the embeddings."""
    embedding_norm: Norm | None = None
    """Of the embeddings (ModernBERT)."""
    logit_bias: Float[Array, "vocab"] | None = None
    """What is added to the logits, beside a head's own bias (ModernBERT, whose head is the embedding's table)."""
    dropout: Dropout | None = None
    """Acts on the embeddings."""
    compute_dtype: str = eqx.field(static=True, default="float32", converter=_compute_dtype)
    """The dtype of the residual stream."""
    logit_scale: float | None = eqx.field(static=True, default=None)
    """What multiplies the logits (Granite, Cohere)."""
    logit_softcap: float | None = eqx.field(static=True, default=None)
    """The bound that they have then, `softcap * tanh(logits / softcap)` (Gemma 2)."""
    layer_inputs: PerLayerInputs | None = None
    """What each layer is given of each token beside the stream (Gemma 4 E2B)."""
    predictor: Predictor | None = None
    """Predicts one token further, for drafts of text; a call of the model leaves it alone."""
    encoder: Encoder | None = None
    """What reads `tokens.source` for the layers' cross-attention, embedded by the same table (T5) or by its own."""
    score_bias: ScoreBias | None = None
    """What is added to the scores of the layers' attentions that say so, such as a `RelativeBias`."""

    @property
    def vocab(self) -> int:
        """How many token ids there are."""
        return self.embedding.weight.shape[0]

    @property
    def depth(self) -> int:
        """How many layers the stacks hold together, a period counted as one."""
        return sum(len(stack) for stack in self.stacks)

    @property
    def start(self) -> int | None:
        """With an encoder, the id that each text begins with, while the encoder reads the prompt; or None."""
        return None if self.encoder is None else self.encoder.start

    def __call__(
        self, ids: Int[Array, "*batch seq"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq vocab"], PyTree]:
        """Logits of the next token after each token, and the cache with these tokens stored."""
        hidden, cache, _ = self.encode(ids, tokens, cache)
        return self.unembed(hidden), cache

    def encode(
        self, ids: Int[Array, "*batch seq"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """The final norm's output, the new cache (a tuple with one for each stack), and the aux of routed layers.

        The aux has, for each stack, a tree of `Aux` with a `layers` dim in front, None for other layers. With a cache,
        `tokens` must be given, since their positions say how long each row is already. A source of ids
        (`tokens.source`) is encoded here; with a cache it is given once, and kept.
        """
        tokens = tokens_or_default(tokens, ids.shape, cache)
        if cache is not None:
            check_cached(tokens, cache)
        x = self.embed(ids, tokens)
        tokens = self._with_encoded(tokens).replaced(score_bias=self.score_bias)
        if self.layer_inputs is not None:
            tokens = tokens.replaced(inputs=self.layer_inputs(x, ids))
        x, cache, aux = run_layers(self.stacks, x, tokens, cache)
        return self.norm(x), cache, aux

    def _with_encoded(self, tokens: Tokens) -> Tokens:
        source = tokens.source
        if self.encoder is None or source is None or not source.is_of_ids:
            return tokens
        read = source.tokens.fold_in(_SOURCE)  # so that its random keys are not the targets'
        own = self.encoder.embedding
        x = self.embed(source.values, read) if own is None else own(source.values).astype(self.compute_dtype)
        return with_source(tokens, self.encoder(x, read))

    def embed(self, ids: Int[Array, "*batch seq"], tokens: Tokens) -> Float[Array, "*batch _ embed"]:
        """What the first stack is given: the tokens' vectors and, where learned, their positions'."""
        x = self.embedding(ids).astype(self.compute_dtype)
        if self.positions is not None:
            x = add_float32(x, self.positions(tokens.positions))
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        return x if self.dropout is None else self.dropout(x, tokens.fold_in(_EMBEDDING).keys)

    def unembed(self, hidden: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Logits, in float32 at least, of what `encode` gave."""
        if self.head is None:
            logits = self.embedding.unembed(hidden)
        else:
            logits = add_float32(self.head.product(hidden, at_least_float32(hidden.dtype)), self.head.bias)
        logits = add_float32(logits, self.logit_bias)
        return soft_capped(logits if self.logit_scale is None else logits * self.logit_scale, self.logit_softcap)

    @checked
    def predict(
        self, ids: Int[Array, "*batch seq"], hidden: Float[Array, "*batch seq embed"], tokens: Tokens, cache: PyTree
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """What the `predictor` gives, of which `unembed` makes logits of the token behind each of `ids`, and its cache.

        `hidden` is what `encode` gave of the token before each, or this method, to predict further still.
        """
        if self.predictor is None:
            raise ValueError("Transformer.predict: the model has no predictor; load or build it with predictor=True.")
        # A vector of the model and the embedding of the token behind it stand at the vector's own position.
        before = Tokens(jnp.where(tokens.positions > 0, tokens.positions - 1, -1))
        return self.predictor(self.embed(ids, tokens), hidden, before, cache)

    def init_cache(
        self, batch: int | Sequence[int], capacity: int, dtype: str | None = None, *, rollback: int = 0
    ) -> PyTree:
        """An empty cache for `batch` rows of up to `capacity` tokens, by default in the compute dtype.

        Of a row's tokens the last `rollback` may be read anew, as others; windows keep so many slots more for it. A
        recurrence's state cannot be taken back.

        In `"int8"` or `"float8_e4m3fn"` (`"fp8"`), keys, values and latents have a scale for each token and head, and a
        recurrence's state stays in the compute dtype.
        """
        shape = (batch,) if isinstance(batch, int) else tuple(batch)
        if self.positions is not None and capacity > (longest := self.positions.weight.shape[0]):
            raise ValueError(
                f"init_cache(capacity={capacity}): the model has {longest} learned positions; ask for at most as many."
            )
        return empty_caches(self.stacks, shape, capacity, dtype, compute_dtype=self.compute_dtype, rollback=rollback)

    def init_predictor_cache(
        self, batch: int | Sequence[int], capacity: int, dtype: str | None = None, *, rollback: int = 0
    ) -> PyTree:
        """The same for the layers of the `predictor`, as `predict` takes it."""
        if self.predictor is None:
            raise ValueError(
                "Transformer.init_predictor_cache: the model has no predictor; load or build it with predictor=True."
            )
        shape = (batch,) if isinstance(batch, int) else tuple(batch)
        return self.predictor.init_cache(shape, capacity, dtype, compute_dtype=self.compute_dtype, rollback=rollback)


_SOURCE = 2**31 - 2
_EMBEDDING = 2**31 - 1  # folded into the keys of the embedding's dropout, where layers fold their numbers
