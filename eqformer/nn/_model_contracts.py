"""Contracts of a whole model and of its parts outside of layers: stacks, dropout, embeddings.

A contract is an abstract module. Modules of other packages may subclass it. The contracts of layers are in
`_contracts`.
"""

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple, overload, TYPE_CHECKING

import equinox as eqx
from jaxtyping import Array, Float, Int, Key, PyTree, Shaped

from ._contracts import Layer, LinearMap
from ._dtype import lookup_rows, matmul_float32
from ._module import Module, take_members
from ._tokens import Tokens


if TYPE_CHECKING:
    from ._embedding import PerLayerInputs
    from ._transformer import Encoder, Predictor


class LayerStack(Layer):
    """Layers of one kind that run one after another; each of their arrays has a `layers` dim in front.

    In a pipeline, a device holds some of the layers, and a call runs the layers that the device holds. Results must not
    depend on how many layers a device holds, nor on a layer's index on the device. `numbers` has each layer's index in
    the whole stack.
    """

    if TYPE_CHECKING:  # Type checkers take an abstract variable for an argument of each constructor.
        numbers: Array = eqx.field(init=False)
        """Each layer's index in the whole stack, which is folded into random keys."""
        depth: int = eqx.field(init=False)
        """The number of layers of the whole stack."""
        remat: str = eqx.field(init=False)
        """The rematerialisation policy, a name in `REMAT`."""
        unroll: int = eqx.field(init=False)
        """How many layers an iteration of a scan runs."""
        blocks: PyTree = eqx.field(init=False)
        """The layers as one module, an ensemble (`nn.ensemble("layers")`)."""
    else:
        numbers: eqx.AbstractVar[Int[Array, "layers"]]
        depth: eqx.AbstractVar[int]
        remat: eqx.AbstractVar[str]
        unroll: eqx.AbstractVar[int]
        blocks: eqx.AbstractVar[PyTree]

    def __len__(self) -> int:
        return self.numbers.shape[0]

    @overload
    def __getitem__(self, index: int) -> Layer: ...

    @overload
    def __getitem__(self, index: slice) -> "LayerStack": ...

    def __getitem__(self, index: int | slice) -> Layer:
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"stack[{index}]: the stack has {len(self)} layers.")
            return take_members(self.blocks, index)
        if not len(range(len(self))[index]):
            raise ValueError(f"stack[{index.start}:{index.stop}]: no layer is left of {len(self)}.")
        layers = take_members(self.blocks, index), self.numbers[index]
        part = eqx.tree_at(lambda s: (s.blocks, s.numbers), self, layers)
        object.__setattr__(part, "depth", len(part))
        return part


class StreamExpansion(Module):
    """The map from embeddings to several residual streams: the contract of `ExpandStreams`."""

    if TYPE_CHECKING:
        streams: int = eqx.field(init=False)
    else:
        streams: eqx.AbstractVar[int]

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch streams seq embed"]:
        """Return the streams of each token."""


class StreamMap(Module):
    """A map of all streams of a token to a few logits, by sums over channels: the contract of `StreamWeights`.

    The map returns an array of logits for each use, such as the weights for reading streams and the weights for writing
    them. Devices may hold slices of the channels of all streams.
    """

    @abc.abstractmethod
    def project(
        self,
        x: Float[Array, "*batch streams seq embed"],
        add: Callable[[Float[Array, "*batch seq sums"]], Float[Array, "*batch seq sums"]],
        slices: int = 1,
    ) -> tuple[Float[Array, "*batch seq _"], ...]:
        """Return an array of logits for each use; `x` may be one of `slices` slices of the channels.

        `add(sums)` returns the sums over all slices. The logits may depend on the channels only by such sums.
        """

    def __call__(self, x: Float[Array, "*batch streams seq embed"]) -> tuple[Float[Array, "*batch seq _"], ...]:
        """Return an array of logits for each use."""
        return self.project(x, lambda sums: sums)


class StreamMerge(Module):
    """The map from several streams to one vector, in the place of a model's `norm`: the contract of `MergeStreams`.

    Its parts must be a `StreamMap` and norms, if the channels of all streams may be split over devices.
    """

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*batch streams seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Return one normalized vector for each token."""


class RandomMask(Module):
    """A random mask of a token's channels, sampled with the token's own key: the contract of `Dropout`.

    The mask is the same in any batch and on any mesh. A device that holds some of the channels samples the mask of all
    channels and applies its slice.
    """

    @property
    @abc.abstractmethod
    def is_active(self) -> bool:
        """Whether the mask changes any channel."""

    @abc.abstractmethod
    def draw_mask(self, keys: Key[Array, "*batch seq"], channels: int) -> Shaped[Array, "*batch seq embed"]:
        """Sample the mask's entry for each channel of each token."""

    @abc.abstractmethod
    def apply_mask(
        self, x: Float[Array, "*batch seq embed"], mask: Shaped[Array, "*batch seq embed"]
    ) -> Float[Array, "*batch seq embed"]:
        """Apply a mask to its channels, elementwise."""

    def __call__(
        self, x: Float[Array, "*batch seq embed"], keys: Key[Array, "*batch seq"] | None
    ) -> Float[Array, "*batch seq embed"]:
        """Mask the channels of each token by its key; without keys return `x`."""
        if keys is None or not self.is_active:
            return x
        return self.apply_mask(x, self.draw_mask(keys, x.shape[-1]))


class ReadsIds(Module):
    """A part that looks up the ids of its tokens; a model passes `Tokens.ids` to layers that have such a part."""


class EmbeddingTable(ReadsIds):
    """A table of vectors that are looked up by id: the contract of `Embedding` and `PerLayerEmbedding`.

    A mesh may split the table by ids or by features, or gather it in chunks. A call must therefore be a lookup in
    `weight`, followed by `transform` of the vectors. The vector of an id outside the table is NaN.
    """

    if TYPE_CHECKING:
        weight: Array = eqx.field(init=False)
    else:
        weight: eqx.AbstractVar[Float[Array, "vocab _"]]

    @property
    def vector_dims(self) -> int:
        """The number of dims of a looked-up vector."""
        return 1

    @property
    def ids_per_token(self) -> int:
        """The number of vectors that a model looks up for each token."""
        return 1

    @property
    def has_transform(self) -> bool:
        """Whether `transform` changes the vectors; if so, devices send the table in its own dtype, not in a narrower
        dtype."""
        return True

    def transform(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Transform looked-up vectors, each feature by itself, because a device may hold only some of the features."""
        return x

    def __call__(self, ids: Int[Array, "*batch seq"]) -> Float[Array, "..."]:
        """Look up one vector for each id."""
        return self.transform(lookup_rows(self.weight, ids))


class TokenEmbedding(EmbeddingTable):
    """A table with a vector for each token id, which may also compute logits: the contract of `Embedding`."""

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Return logits by the same table (Press and Wolf 2017), accumulated in float32 at least."""
        return matmul_float32(x, self.weight)


class PositionEmbedding(Module):
    """Vectors of positions or of token types, which a model adds to its token embeddings: the contract of
    `LearnedPositions` and `TokenTypes`.

    A device may call the module for some of the tokens, or hold some of the features if arrays name them `embed`.
    """

    @property
    @abc.abstractmethod
    def max_seq(self) -> int | None:
        """The number of positions that have a vector; None for any number."""

    @abc.abstractmethod
    def __call__(self, positions: Int[Array, "*batch seq"]) -> Float[Array, "*batch seq embed"]:
        """Return one vector for each position; padding is at position -1."""


class RotaryFactors(Module):
    """Learned factors of rotary frequencies, which all layers of a model share: the contract of `LearnedFrequencies`.

    The layers' positions are a `LearnedRotary`.
    """

    if TYPE_CHECKING:
        alpha: Float[Array, "half"]
    else:
        alpha: eqx.AbstractVar[Float[Array, "half"]]
    """Logarithm of the factor of each frequency."""

    def pass_to(self, tokens: Tokens) -> Tokens:
        """Return the tokens with the factors, as layers read them."""
        return tokens.replace(rotary_alpha=self.alpha)


class ModelParts(NamedTuple):
    """Parts that a `LanguageModel` may have beside its embedding, stacks, norm and head; None for missing parts."""

    logit_bias: Float[Array, "vocab"] | None = None
    """A bias of the logits, beside a head's own bias."""
    encoder: "Encoder | None" = None
    """The encoder of `tokens.source` for cross-attention."""
    predictor: "Predictor | None" = None
    """A module that predicts one token further."""
    layer_inputs: "PerLayerInputs | None" = None
    """A module that makes a vector of each token for each layer, beside the stream."""
    frequencies: RotaryFactors | None = None
    """Learned factors of rotary frequencies, which all layers with a `LearnedRotary` read."""


class LanguageModel(Module):
    """A language model that plans shard, training steps train and engines sample from: the contract of `Transformer`.

    `encode` looks tokens up by `embed`, runs all of `stacks`, and applies `norm`; `unembed` reads the output of `norm`.
    If a mesh splits tokens, features or the vocabulary, wrappers with the same calls replace `embedding`, `stacks`,
    `norm` and `head`. The model must therefore call these parts, and must not read their arrays itself. Any further
    arrays of the model are replicated, and act on the stream; a plan with `residual="feature"` refuses further arrays
    with a dim `embed`.
    """

    if TYPE_CHECKING:
        embedding: TokenEmbedding = eqx.field(init=False)
        stacks: tuple[LayerStack, ...] = eqx.field(init=False)
        norm: Callable[[Array], Array] = eqx.field(init=False)
        head: LinearMap | None = eqx.field(init=False)
        compute_dtype: str = eqx.field(init=False)
    else:
        embedding: eqx.AbstractVar[TokenEmbedding]
        stacks: eqx.AbstractVar[tuple[LayerStack, ...]]
        norm: eqx.AbstractVar[Callable[[Array], Array]]
        head: eqx.AbstractVar[LinearMap | None]
        compute_dtype: eqx.AbstractVar[str]

    @abc.abstractmethod
    def embed(self, ids: Int[Array, "*batch seq"], tokens: Tokens) -> Float[Array, "*rows _ embed"]:
        """Return the input of the first stack, in `compute_dtype`."""

    @abc.abstractmethod
    def encode(
        self, ids: Int[Array, "*batch seq"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Return the output of `norm`, the new cache (a tuple with one for each stack), and the aux of the stacks."""

    @abc.abstractmethod
    def unembed(self, hidden: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        """Return the logits, in float32 at least, for the output of `encode`."""

    @abc.abstractmethod
    def init_cache(
        self, batch: int | Sequence[int], capacity: int, dtype: str | None = None, *, rollback: int = 0
    ) -> PyTree:
        """Return an empty cache for `batch` rows of up to `capacity` tokens."""

    def decode(
        self, ids: Int[Array, "batch seq"], tokens: Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch vocab"], PyTree]:
        """Read tokens of each row; return the logits of the token after the last one, and the new cache."""
        hidden, cache, _ = self.encode(ids, tokens, cache)
        return self.unembed(hidden[:, -1]), cache

    @property
    def runs_in_sequence(self) -> bool:
        """Whether `encode` is `norm(run_layers(stacks, embed(ids, tokens)))` and nothing more, which a pipeline needs.

        By default False: a plan over `pipe` refuses the model.
        """
        return False

    @property
    def max_seq(self) -> int | None:
        """The number of positions that the model knows; None for any number."""
        return None

    @property
    def streams(self) -> int:
        """The number of residual streams of a token, each of which has all channels; 1 by default.

        With several streams, `embed` returns an array with a dim of streams before the dim of tokens.
        """
        return 1

    @property
    def start(self) -> int | None:
        """The id with which the decoder begins each text, if an encoder reads the prompt; None without an encoder."""
        return None

    @property
    def parts(self) -> ModelParts:
        """The parts that only some models have; none by default."""
        return ModelParts()

    @property
    def vocab(self) -> int:
        """The number of token ids."""
        return self.embedding.weight.shape[0]

    @property
    def stream_channels(self) -> int:
        """Channels of the residual stream, by default those of the embedding table."""
        return self.embedding.weight.shape[-1]

    @property
    def depth(self) -> int:
        """The number of layers in all stacks; a super-block counts as one."""
        return sum(len(stack) for stack in self.stacks)

    def __call__(
        self, ids: Int[Array, "*batch seq"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq vocab"], PyTree]:
        """Return the logits of the token after each token, and the cache with these tokens stored."""
        hidden, cache, _ = self.encode(ids, tokens, cache)
        return self.unembed(hidden), cache
