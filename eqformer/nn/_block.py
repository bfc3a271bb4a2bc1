"""Transformer blocks: sublayers beside a residual stream, one after the other or side by side."""

from collections.abc import Callable, Sequence

import equinox as eqx
from jaxtyping import Array, Float, PyTree

from ._contracts import Layer, Mixer, Routed
from ._cross_layer import wrap_aux
from ._float32_sums import multiply_float32
from ._norm import Norm
from ._residual import apply_norm, Residual
from ._stack import run_layers
from ._tokens import Tokens, tokens_or_default


class ParallelMixers(Layer):
    """Mixers that read one input and add to it together: `x + sum of scale * mixer(input_scale * norm(x))` (Falcon-H1).

    They share `norm`, or each has its own. Any mixers do, of heads as each has them: what transforms and costs must
    know, each says of itself, and the cache is a tuple of theirs. It stands in a block in the place of one mixer.
    """

    mixers: tuple[Residual, ...]
    norm: Norm | Callable[[Array], Array] | None = None

    def __check_init__(self):
        for number, one in enumerate(self.mixers):
            if not isinstance(one.layer, Mixer):
                raise ValueError(
                    f"ParallelMixers(mixers[{number}]=Residual({type(one.layer).__name__})): what stands side by side "
                    "here are mixers, with caches; take ParallelBlock for one mixer beside a feed-forward layer."
                )
            if one.sum_norm is not None:
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
        """Add what all mixers give to `x`; dropout's keys are folded with `number`, then with the mixer's own."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache).fold_in(number)
        given, added, after = apply_norm(self.norm, x), x, []
        caches = (None,) * len(self.mixers) if cache is None else cache
        for place, (mixer, remembered) in enumerate(zip(self.mixers, caches, strict=True)):
            y, kept, _ = mixer.branch(given, tokens, remembered, number=place)
            added = added + y
            after.append(kept)
        return added, None if cache is None else tuple(after), None

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """A tuple of the mixers' empty caches."""
        return tuple(mixer.init_cache(batch, capacity, dtype) for mixer in self.mixers)


class Block(Layer):
    """A mixer beside the residual stream, or several, and, where there is one, a feed-forward layer after it.

    Between the two may stand a second mixer, `cross`, as an encoder-decoder's cross-attention does; the cache is then a
    tuple of both mixers'. Behind them may stand a `PerLayerGate`, in `gated_input`; a `scalar` multiplies the stream
    last (Gemma 4).
    """

    mixer: Residual | ParallelMixers
    feed_forward: Residual | None = None
    scalar: Float[Array, ""] | None = None
    gated_input: Residual | None = None
    cross: Residual | None = None

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Run all sublayers; the cache is the mixers', and the `Aux` a routed feed-forward layer's, or None."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        own, other = (cache, None) if self.cross is None or cache is None else cache
        x, own, left = self.mixer(x, tokens, own, number=0)
        if self.cross is not None:
            x, other, _ = self.cross(x, tokens, other, number=3)
        cache = own if self.cross is None or cache is None else (own, other)
        aux = None
        if self.feed_forward is not None:
            x, _, aux = self.feed_forward(x, tokens, number=1)
        if self.gated_input is not None:
            its = None if tokens.inputs is None else tokens.inputs[..., 0, :]
            x, _, _ = self.gated_input(x, tokens, number=2, layer_input=its)
        aux = wrap_aux(left, aux)
        return x if self.scalar is None else multiply_float32(x, self.scalar), cache, aux

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """The mixer's empty cache, and the other's."""
        own = self.mixer.init_cache(batch, capacity, dtype)
        return own if self.cross is None else (own, self.cross.init_cache(batch, capacity, dtype))


class ParallelBlock(Layer):
    """A mixer and a feed-forward layer that add to one input: `sum_norm(x + mixer(norm(x)) + feed_forward(norm(x)))`.

    The two share `norm` (GPT-J, PaLM), or each has its own. There is one sum: `sum_norm` is the block's.
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
        """Run both layers; the cache is the mixer's, and the `Aux` a routed feed-forward layer's, or None."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        given = apply_norm(self.norm, x)
        mixed, cache, left = self.mixer.branch(given, tokens, cache, number=0)
        fed, _, aux = self.feed_forward.branch(given, tokens, number=1)
        aux = wrap_aux(left, aux)
        return apply_norm(self.sum_norm, x + mixed + fed), cache, aux

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """The mixer's empty cache."""
        return self.mixer.init_cache(batch, capacity, dtype)


class DenseAndMoE(Routed):
    """A layer for each token beside one that routes tokens: what both branches add, each with norms of its own."""

    dense: Residual
    routed: Residual

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree]:
        """The sum of both branches, and the routed layer's `Aux`."""
        tokens = tokens_or_default(tokens, x.shape[:-1], None)
        (dense, _, _), (routed, _, aux) = (
            self.dense.branch(x, tokens, number=0),
            self.routed.branch(x, tokens, number=1),
        )
        return dense + routed, aux

    def rebalanced(self, aux: PyTree, rate: float | Float[Array, ""]) -> "DenseAndMoE":
        """With the routed layer rebalanced."""
        layer = self.routed.layer
        assert isinstance(layer, Routed)
        return eqx.tree_at(lambda m: m.routed.layer, self, layer.rebalanced(aux, rate))


class SuperBlock(Layer):
    """Layers of any kinds that repeat together as one of a stack: Gemma's local and global blocks, three sublayers."""

    blocks: tuple[Layer, ...]

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Run the blocks in turn; the cache, and the `Aux` of routed layers, are tuples of theirs."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        return run_layers(self.blocks, x, tokens, cache)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """A tuple of the blocks' empty caches."""
        return tuple(block.init_cache(batch, capacity, dtype) for block in self.blocks)
