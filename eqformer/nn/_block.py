"""Transformer blocks: sublayers of the residual stream, in sequence or in parallel."""

from collections.abc import Callable, Sequence

import equinox as eqx
from jaxtyping import Array, Float, PyTree

from ._contracts import Layer, Mixer, Routed
from ._cross_layer import wrap_aux
from ._dtype import multiply_float32
from ._norm import Norm
from ._residual import apply_norm, Residual
from ._stack import run_layers
from ._tokens import Tokens, tokens_or_default


class ParallelMixers(Layer):
    """Mixers that read one input and are summed: `x + sum of scale * mixer(input_scale * norm(x))` (Falcon-H1).

    The mixers share `norm`, or each has its own. They may be of any kinds and numbers of heads, since each states its
    own `facts`; the cache is a tuple of their caches. This takes the place of the one mixer of a block.
    """

    mixers: tuple[Residual, ...]
    norm: Norm | Callable[[Array], Array] | None = None

    def __check_init__(self):
        for number, residual in enumerate(self.mixers):
            if not isinstance(residual.layer, Mixer):
                raise ValueError(
                    f"ParallelMixers(mixers[{number}]=Residual({type(residual.layer).__name__})): what stands side by "
                    "side here are mixers, with caches; take ParallelBlock for one mixer beside a feed-forward layer."
                )
            if residual.sum_norm is not None:
                raise ValueError(
                    f"ParallelMixers(mixers[{number}]=Residual(sum_norm=...)): there is one sum, of all mixers, and it "
                    "is not normed; pass output_norm, or leave it out."
                )

    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: PyTree = None,
        *,
        number: int = 0,
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Add the outputs of all mixers to `x`.

        Dropout's keys are folded with `number`, then with the mixer's number.
        """
        tokens = tokens_or_default(tokens, x.shape[:-1], cache).fold_in(number)
        normed, added, new_caches = apply_norm(self.norm, x), x, []
        caches = (None,) * len(self.mixers) if cache is None else cache
        for index, (mixer, mixer_cache) in enumerate(zip(self.mixers, caches, strict=True)):
            y, new_cache, _ = mixer.branch(normed, tokens, mixer_cache, number=index)
            added = added + y
            new_caches.append(new_cache)
        return added, None if cache is None else tuple(new_caches), None

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return a tuple of the mixers' empty caches."""
        return tuple(mixer.init_cache(batch, capacity, dtype) for mixer in self.mixers)


class Block(Layer):
    """A transformer block: a mixer, then a feed-forward layer, each a residual sublayer; either part may be absent.

    The sublayers run in this order: `mixer`, `cross` (an encoder-decoder's cross-attention), `feed_forward`,
    `gated_input` (a `PerLayerGate`). A `scalar` multiplies the stream last (Gemma 4). With `cross`, the cache is a
    tuple of both mixers' caches. A block without `feed_forward` is a mixer alone (Mamba).
    """

    mixer: Residual | ParallelMixers
    feed_forward: Residual | None = None
    scalar: Float[Array, ""] | None = None
    gated_input: Residual | None = None
    cross: Residual | None = None

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Run all sublayers; return the stream, the mixers' new cache, and a routed layer's `Aux` or None."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        mixer_cache, cross_cache = (cache, None) if self.cross is None or cache is None else cache
        x, mixer_cache, shared = self.mixer(x, tokens, mixer_cache, number=0)
        if self.cross is not None:
            x, cross_cache, _ = self.cross(x, tokens, cross_cache, number=3)
        new_cache = mixer_cache if self.cross is None or cache is None else (mixer_cache, cross_cache)
        aux = None
        if self.feed_forward is not None:
            x, _, aux = self.feed_forward(x, tokens, number=1)
        if self.gated_input is not None:
            layer_input = None if tokens.inputs is None else tokens.inputs[..., 0, :]
            x, _, _ = self.gated_input(x, tokens, number=2, layer_input=layer_input)
        aux = wrap_aux(shared, aux)
        return x if self.scalar is None else multiply_float32(x, self.scalar), new_cache, aux

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return the mixer's empty cache; with `cross`, a tuple of both mixers' empty caches."""
        mixer_cache = self.mixer.init_cache(batch, capacity, dtype)
        return mixer_cache if self.cross is None else (mixer_cache, self.cross.init_cache(batch, capacity, dtype))


class ParallelBlock(Layer):
    """A mixer and a feed-forward layer that add to one input: `sum_norm(x + mixer(norm(x)) + feed_forward(norm(x)))`.

    The two share `norm` (GPT-J, PaLM), or each has its own. There is one sum, so `sum_norm` belongs to the block.
    """

    mixer: Residual
    feed_forward: Residual
    norm: Norm | Callable[[Array], Array] | None = None
    sum_norm: Norm | Callable[[Array], Array] | None = None

    def __check_init__(self):
        for name in ("mixer", "feed_forward"):
            if getattr(self, name).sum_norm is not None:
                raise ValueError(
                    f"ParallelBlock({name}=Residual(sum_norm=...)): a parallel block has one sum, after both layers; "
                    "pass the norm as ParallelBlock(sum_norm=...)."
                )

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Run both layers; return the stream, the mixer's new cache, and a routed layer's `Aux` or None."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        normed = apply_norm(self.norm, x)
        mixed, cache, shared = self.mixer.branch(normed, tokens, cache, number=0)
        fed, _, aux = self.feed_forward.branch(normed, tokens, number=1)
        aux = wrap_aux(shared, aux)
        return apply_norm(self.sum_norm, x + mixed + fed), cache, aux

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return the mixer's empty cache."""
        return self.mixer.init_cache(batch, capacity, dtype)


class DenseAndMoE(Routed):
    """The sum of a dense feed-forward branch and a routed one, each with norms of its own (Gemma 4)."""

    dense: Residual
    routed: Residual

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """Return the sum of both branches, and the routed layer's `Aux`."""
        tokens = tokens_or_default(tokens, x.shape[:-1], None)
        dense, _, _ = self.dense.branch(x, tokens, number=0)
        routed, _, aux = self.routed.branch(x, tokens, number=1)
        return dense + routed, aux

    def rebalanced(self, aux: PyTree, rate: float | Float[Array, ""]) -> "DenseAndMoE":
        """Return the module with its routed layer rebalanced."""
        layer = self.routed.layer
        assert isinstance(layer, Routed)
        return eqx.tree_at(lambda m: m.routed.layer, self, layer.rebalanced(aux, rate))


class SuperBlock(Layer):
    """Layers of any kinds that a stack repeats together as one layer, such as Gemma's local and global blocks."""

    blocks: tuple[Layer, ...]

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Run the blocks in order; the cache and the aux are tuples of the blocks' caches and aux."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        return run_layers(self.blocks, x, tokens, cache)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return a tuple of the blocks' empty caches."""
        return tuple(block.init_cache(batch, capacity, dtype) for block in self.blocks)
