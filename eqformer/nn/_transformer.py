"""Language models: embedding, stacks, norm and logits; with encoders, predictors and prediction heads."""

import dataclasses
from collections.abc import Callable, Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from .._annotation_checks import checked
from .._shapes import as_tuple
from ..kernels import apply_softcap
from ._cache import check_cached
from ._contracts import Routed, ScoreBias
from ._dtype import add_float32, at_least_float32, float_dtype
from ._embedding import PerLayerInputs, TokenTypes
from ._linear import Linear, LinearMap
from ._mlp import gelu
from ._model_contracts import (
    LanguageModel,
    LayerStack,
    ModelParts,
    PositionEmbedding,
    RandomMask,
    RotaryFactors,
    StreamExpansion,
    TokenEmbedding,
)
from ._module import Module, modules
from ._norm import Norm
from ._pooling import ClassificationHead
from ._stack import empty_caches, run_layers, share_embedding, with_ids
from ._tokens import Source, Tokens, tokens_or_default, with_source


class Encoder(Module):
    """Layers that read a source's embeddings, for the cross-attention of the model that holds them."""

    stacks: tuple[LayerStack, ...]
    """The layers; their masks say whether tokens see later tokens."""
    norm: Norm | Callable[[Array], Array]
    """Norm of the last layer's output."""
    score_bias: ScoreBias | None = None
    """Bias added to the scores of the encoder's attention layers that use one."""
    start: int = eqx.field(static=True, default=0)
    """The id with which the decoder begins each text."""
    embedding: TokenEmbedding | None = None
    """The encoder's own embedding table (T5Gemma), which may have other sizes; None: the model's."""

    def __check_init__(self):
        if modules(self.stacks, Routed):
            raise ValueError(
                "Encoder(stacks=...): a layer routes tokens, and the counts of its router would be lost; give layers "
                "without a mixture of experts."
            )

    def __call__(self, x: Float[Array, "*batch kv_seq embed"], tokens: Tokens) -> Source:
        """Encode embedded tokens."""
        x, _, _ = run_layers(self.stacks, x, tokens.replace(score_bias=self.score_bias), None)
        return Source(self.norm(x), tokens)


class PredictionHead(Module):
    """Head of a masked language model (BERT), `output_norm(act(W norm(x)))`, which takes the place of a model's `norm`.

    The output of `norm` alone is the encoder's vector of each token. To get these vectors, replace the head by its
    `norm`.
    """

    norm: Norm
    dense: LinearMap
    output_norm: Norm
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        norm: Norm,
        output_norm: Norm,
        *,
        embed: int,
        bias: bool = False,
        activation: Callable[[Array], Array] = gelu,
        key: Key[Array, ""],
    ):
        """Initialize the weights of the dense layer.

        Args:
            norm: Norm of the last layer's output.
            output_norm: Norm of the head's output.
            embed: Channels of the residual stream.
            bias: Whether the dense layer has a bias.
            activation: Applied to the output of the dense layer.
            key: Random key for the weights.
        """
        self.norm, self.output_norm, self.activation = norm, output_norm, activation
        self.dense = Linear("embed -> hidden", embed=embed, hidden=embed, bias=bias, key=key)

    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch embed"]:
        """Apply the head to each token."""
        return self.output_norm(self.activation(self.dense(self.norm(x))))


class MappedNorm(Module):
    """A norm followed by a linear map, in the place of a model's `norm` (OPT 350M).

    The map leads from the channels of the residual stream to those of the embedding table, which computes the logits.
    """

    norm: Norm
    """Norm of the last layer's output; `IdentityNorm()` for none."""
    map: LinearMap
    """The map `hidden -> embed` from the stream's channels to the table's."""

    def __call__(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch embed"]:
        """Normalize and map each token."""
        return self.map(self.norm(x))


def without_head(model: "Transformer") -> "Transformer":
    """Return the model without its head: `encode` returns the last layer's output, after the last norm if there is one.

    The result's logits come from the embedding table, and mean nothing if the model had another head.
    """
    norm = model.norm.norm if isinstance(model.norm, PredictionHead) else model.norm
    return dataclasses.replace(model, norm=norm, head=None, logit_bias=None, predictor=None, classifier=None)


class Predictor(Module):
    """The module of multi-token prediction that predicts one more token (DeepSeek-V3, arXiv:2412.19437, eq. 21 to 23).

    Let `h` be the output of the model's final norm for token `i`. The layers and `norm` map
    `x_i = merge [embedding_norm(Emb(t_(i+1))); hidden_norm(h)]`, and the model's head turns the result into logits of
    token `i + 2`. The paper concatenates the two vectors in the other order, which permutes columns of `merge`;
    published weights have the order used here.
    """

    embedding_norm: Norm | Callable[[Array], Array]
    """Norm of the next token's embedding."""
    hidden_norm: Norm | Callable[[Array], Array]
    """Norm of the model's hidden vector."""
    merge: LinearMap
    """A map `sides embed -> merged`. The two sides are the next token's embedding and the hidden vector."""
    stacks: tuple[LayerStack, ...]
    """The layers, one in published models."""
    norm: Norm | Callable[[Array], Array]
    """Norm of the last layer's output."""

    def __call__(
        self,
        embedded: Float[Array, "*batch seq embed"],
        hidden: Float[Array, "*batch seq embed"],
        tokens: Tokens,
        cache: PyTree = None,
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """Return the input of the model's head, and the new cache.

        Each hidden vector of the model is merged with the next token's embedding. `tokens` has the positions of the
        hidden vectors.
        """
        x = self.merge(jnp.stack([self.embedding_norm(embedded), self.hidden_norm(hidden)], axis=-2))
        x, cache, _ = run_layers(self.stacks, x, tokens, cache)
        return self.norm(x), cache

    def init_cache(
        self, batch: Sequence[int], capacity: int, dtype: str | None, *, compute_dtype: str, rollback: int = 0
    ) -> PyTree:
        """Return an empty cache, as `Transformer.init_cache` does."""
        return empty_caches(self.stacks, batch, capacity, dtype, compute_dtype=compute_dtype, rollback=rollback)


def _compute_dtype(dtype: str) -> str:
    return float_dtype(dtype, f"Transformer(compute_dtype={dtype!r})")


class Transformer(LanguageModel):
    """A language model, assembled from built parts; without a `head`, the embedding's table computes the logits.

    Parameters keep their own dtype and are cast to the compute dtype when they are used. Norms, softmax and logits are
    computed in float32 at least.
    """

    embedding: TokenEmbedding
    """The table of token embeddings."""
    stacks: tuple[LayerStack, ...]
    """The layers."""
    norm: Norm | Callable[[Array], Array]
    """Norm of the last layer's output."""
    head: LinearMap | None = None
    """The map from hidden vectors to logits; None: the embedding's table."""
    positions: PositionEmbedding | None = None
    """A table of position embeddings, added to the token embeddings."""
    embedding_norm: Norm | None = None
    """Norm of the embeddings (ModernBERT)."""
    embedding_map: LinearMap | None = None
    """A map `embed -> hidden` of the looked-up vectors to the channels of the residual stream, before positions are
    added, if the table has other channels (OPT 350M); `norm` must then be a `MappedNorm`, which leads back. None: no
    map."""
    logit_bias: Float[Array, "vocab"] | None = None
    """A bias of the logits, beside a head's own bias (ModernBERT, whose head is the embedding's table)."""
    dropout: RandomMask | None = None
    """Dropout of the embeddings."""
    compute_dtype: str = eqx.field(static=True, default="float32", converter=_compute_dtype)
    """The dtype of the residual stream."""
    logit_scale: float | None = eqx.field(static=True, default=None)
    """A factor of the logits (Granite, Cohere)."""
    logit_softcap: float | None = eqx.field(static=True, default=None)
    """A bound of the scaled logits, `softcap * tanh(logits / softcap)` (Gemma 2)."""
    layer_inputs: PerLayerInputs | None = None
    """A module that gives each layer a further vector of each token, beside the residual stream (Gemma 4 E2B)."""
    predictor: Predictor | None = None
    """A module that predicts one token further, for speculative decoding; a call of the model does not use it."""
    encoder: Encoder | None = None
    """The encoder of `tokens.source` for cross-attention, with the model's embedding table (T5) or its own."""
    score_bias: ScoreBias | None = None
    """A bias of attention scores, such as a `RelativeBias`, for the layers' attentions that use one."""
    frequencies: RotaryFactors | None = None
    """Learned factors of rotary frequencies, for the layers whose positions are a `LearnedRotary`."""
    token_types: PositionEmbedding | None = None
    """A table of token types, a `TokenTypes`, added to the token embeddings (BERT)."""
    classifier: ClassificationHead | None = None
    """A head that classifies texts or tokens, in the place of logits of the vocabulary; `classify` applies it."""
    expand: StreamExpansion | None = None
    """A module that turns the embeddings into several residual streams, for layers of `HyperConnection`s. `norm` must
    then be a `StreamMerge`, such as `MergeStreams`, which turns the streams into one vector."""

    def __check_init__(self):
        if self.expand is None:
            return
        for name in ("encoder", "predictor", "layer_inputs"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"Transformer(expand=..., {name}=...): this part reads a single residual stream, and the embedding "
                    "is expanded into several; leave one of the two out."
                )

    @property
    def stream_channels(self) -> int:
        """Channels of the residual stream: those of the table, or of the result of `embedding_map`."""
        if self.embedding_map is not None:
            return self.embedding_map.output_shape[-1]
        return self.embedding.weight.shape[-1]

    @property
    def start(self) -> int | None:
        """The id with which the decoder begins each text; None without an encoder."""
        return None if self.encoder is None else self.encoder.start

    @property
    def runs_in_sequence(self) -> bool:
        """True: `encode` embeds, runs the stacks one after another, and normalizes."""
        return True

    @property
    def max_seq(self) -> int | None:
        """The number of learned positions; None without them."""
        return None if self.positions is None else self.positions.max_seq

    @property
    def parts(self) -> ModelParts:
        """The optional parts that the model has."""
        return ModelParts(self.logit_bias, self.encoder, self.predictor, self.layer_inputs, self.frequencies)

    def encode(
        self, ids: Int[Array, "*batch seq"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Return the final norm's output, the new cache (a tuple with one for each stack), and the aux of routed
        layers.

        The aux has, for each stack, a tree of `Aux` with a `layers` dim in front, and None for layers that route no
        tokens. With a cache, `tokens` must be passed, because their positions tell the length of each row so far. A
        source of ids (`tokens.source`) is encoded here. With a cache, pass the source in one call; later calls read it
        from the cache.
        """
        tokens = tokens_or_default(tokens, ids.shape, cache)
        if cache is not None:
            check_cached(tokens, cache)
        x = self.embed(ids, tokens)
        tokens = self._encode_source(tokens).replace(score_bias=self.score_bias)
        if self.frequencies is not None:
            tokens = self.frequencies.pass_to(tokens)
        if self.layer_inputs is not None:
            tokens = tokens.replace(inputs=self.layer_inputs(x, ids))
        tokens = share_embedding(with_ids(tokens, ids, self.stacks), x, self.stacks)
        x, cache, aux = run_layers(self.stacks, x, tokens, cache)
        return self.norm(x), cache, aux

    def _encode_source(self, tokens: Tokens) -> Tokens:
        """Return the tokens with their source of ids encoded."""
        source = tokens.source
        if self.encoder is None or source is None or not source.is_of_ids:
            return tokens
        # Encoder and decoder sample different dropout masks, because no layer of the decoder folds in `_SOURCE`.
        source_tokens = source.tokens.fold_in(_SOURCE)
        table = self.encoder.embedding
        if table is None:
            x = self.embed(source.values, source_tokens)
        else:
            x = table(source.values).astype(self.compute_dtype)
        return with_source(tokens, self.encoder(x, source_tokens))

    def embed(self, ids: Int[Array, "*batch seq"], tokens: Tokens) -> Float[Array, "*rows _ embed"]:
        """Return the input of the first stack: token embeddings plus embeddings of token types and of positions, if
        the model has such tables."""
        x = self.embedding(ids).astype(self.compute_dtype)
        x = x if self.embedding_map is None else self.embedding_map(x)
        if self.token_types is not None:
            types = jnp.zeros_like(tokens.positions) if tokens.types is None else tokens.types
            x = add_float32(x, self.token_types(types))
        if self.positions is not None:
            x = add_float32(x, self.positions(tokens.positions))
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        x = x if self.dropout is None else self.dropout(x, tokens.fold_in(_EMBEDDING).keys)
        return x if self.expand is None else self.expand(x)

    @property
    def streams(self) -> int:
        """The number of residual streams."""
        return 1 if self.expand is None else self.expand.streams

    @property
    def reads_types(self) -> bool:
        """Whether the types of tokens change the vectors: the model has a table of more than one type."""
        return isinstance(self.token_types, TokenTypes) and self.token_types.weight.shape[0] > 1

    def unembed(self, hidden: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Return the logits, in float32 at least, of the output of `encode`."""
        if self.head is None:
            logits = self.embedding.unembed(hidden)
        else:
            logits = add_float32(self.head.product(hidden, at_least_float32(hidden.dtype)), self.head.bias)
        logits = add_float32(logits, self.logit_bias)
        return apply_softcap(logits if self.logit_scale is None else logits * self.logit_scale, self.logit_softcap)

    def classify(self, hidden: Float[Array, "batch seq embed"], tokens: Tokens) -> Float[Array, "batch *seq labels"]:
        """Return the classifier's scores of each text or token, for the output of `encode`."""
        if self.classifier is None:
            raise ValueError("Transformer.classify: the model has no classifier; load or build it with one.")
        return self.classifier(hidden, tokens)

    @checked
    def predict(
        self, ids: Int[Array, "*batch seq"], hidden: Float[Array, "*batch seq embed"], tokens: Tokens, cache: PyTree
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """Return the predictor's output and its new cache; `unembed` turns the output into logits of the token after
        `ids`.

        `hidden` is the output of `encode` for the token before each of `ids`. To predict one token further, pass the
        output of this method instead.
        """
        if self.predictor is None:
            raise ValueError("Transformer.predict: the model has no predictor; load or build it with predictor=True.")
        # A hidden vector, merged with the embedding of the token after it, has the vector's own position.
        hidden_tokens = Tokens(jnp.where(tokens.positions > 0, tokens.positions - 1, -1))
        return self.predictor(self.embed(ids, tokens), hidden, hidden_tokens, cache)

    def init_cache(
        self, batch: int | Sequence[int], capacity: int, dtype: str | None = None, *, rollback: int = 0
    ) -> PyTree:
        """Return an empty cache for `batch` rows of up to `capacity` tokens, by default in the compute dtype.

        The last `rollback` tokens of a row may be replaced by other tokens later; windows keep that many more slots. A
        recurrence's state cannot be rolled back.

        In `"int8"` or `"float8_e4m3fn"` (`"fp8"`), keys, values and latents have a scale for each token and head, and a
        recurrence's state stays in the compute dtype.
        """
        shape = as_tuple(batch)
        if self.max_seq is not None and capacity > self.max_seq:
            raise ValueError(
                f"init_cache(capacity={capacity}): the model has {self.max_seq} learned positions; pass at most this "
                "number."
            )
        return empty_caches(self.stacks, shape, capacity, dtype, compute_dtype=self.compute_dtype, rollback=rollback)

    def init_predictor_cache(
        self, batch: int | Sequence[int], capacity: int, dtype: str | None = None, *, rollback: int = 0
    ) -> PyTree:
        """Return an empty cache for the layers of the `predictor`, as `predict` takes it."""
        if self.predictor is None:
            raise ValueError(
                "Transformer.init_predictor_cache: the model has no predictor; load or build it with predictor=True."
            )
        shape = as_tuple(batch)
        return self.predictor.init_cache(shape, capacity, dtype, compute_dtype=self.compute_dtype, rollback=rollback)


# Numbers that are folded into random keys for the source and for the embedding's dropout; layers fold in other numbers.
_SOURCE = 2**31 - 2
_EMBEDDING = 2**31 - 1
