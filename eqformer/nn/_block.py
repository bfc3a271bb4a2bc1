"""Transformer blocks: residual sublayers in sequence, and blocks that a stack repeats together."""

from collections.abc import Sequence

from jaxtyping import Array, Float, PyTree

from ._contracts import Layer, Sublayer
from ._cross_layer import collect_shared
from ._residual import find_feed_forward, find_mixer, join, join_caches, split_cache, with_inputs_of_each
from ._stack import run_layers
from ._tokens import Tokens, tokens_or_default


class Block(Layer):
    """A transformer block: residual sublayers, run in order.

    Most decoders have `Block(Residual(attention, norm), Residual(mlp, norm))`; a Mamba has the first alone, the decoder
    of a T5 has `Residual(cross_attention, norm, reads="source")` between the two. The cache is that of the sublayer
    with a mixer, or a tuple of caches if several have one.
    """

    sublayers: tuple[Sublayer, ...]

    def __init__(self, *sublayers: Sublayer):
        self.sublayers = sublayers

    @property
    def mixer(self) -> Sublayer | None:
        """The first sublayer with a mixer."""
        return find_mixer(self.sublayers)

    @property
    def feed_forward(self) -> Sublayer | None:
        """The first sublayer that maps each token alone and reads nothing but the stream."""
        return find_feed_forward(self.sublayers)

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Run the sublayers; return the stream, the new cache, and what routed and sharing layers return (`aux`)."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        new_caches, auxes = [], []
        per_sublayer = zip(
            self.sublayers, with_inputs_of_each(self.sublayers, tokens), split_cache(self.sublayers, cache)
        )
        for index, (sublayer, sublayer_tokens, sublayer_cache) in enumerate(per_sublayer):
            sublayer_tokens = sublayer_tokens.replaced(shared=(*tokens.shared, *collect_shared(auxes)))
            x, new_cache, aux = sublayer(x, sublayer_tokens, sublayer_cache, index=index)
            new_caches.append(new_cache)
            auxes.append(aux)
        return x, None if cache is None else join_caches(self.sublayers, new_caches), join(auxes)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return the empty cache of the sublayer with a mixer; of several, a tuple of theirs."""
        return join_caches(self.sublayers, [layer.init_cache(batch, capacity, dtype) for layer in self.sublayers])


class SuperBlock(Layer):
    """Layers of any kinds that a stack repeats together as one layer, such as Gemma's local and global blocks."""

    blocks: tuple[Layer, ...]

    @property
    def members(self) -> tuple[Layer, ...]:
        """The blocks."""
        return self.blocks

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Run the blocks in order; the cache and the aux are tuples of the blocks' caches and aux."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        return run_layers(self.blocks, x, tokens, cache)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return a tuple of the blocks' empty caches."""
        return tuple(block.init_cache(batch, capacity, dtype) for block in self.blocks)
