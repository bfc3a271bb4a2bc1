"""Transformer blocks and their residual sublayers: one or several layers of one input, with norms and dropout."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Key, PyTree

from .._annotation_checks import name_class
from ._contracts import Layer, Mixer, Routed, Sublayer
from ._dtype import multiply_float32
from ._model_contracts import LayerStack, RandomMask
from ._module import modules
from ._norm import Norm
from ._tokens import collect_shared, find_shared, SharedValue, ShareRequest, Source, Tokens, tokens_or_default


SOURCE = "source"
"""The name of the sequence that cross-attention reads, `Tokens.source`."""
LAYER_INPUT = "layer_input"
"""The name of a token's vector for one layer, which `PerLayerInputs` makes."""
EMBEDDING = "embedding"
"""The name under which a `Transformer` shares the input of its first layer with the layers that read it."""


class Dropout(RandomMask):
    """Dropout: zero each channel with probability `rate`, divide the others by `1 - rate` (Srivastava et al. 2014).

    Each token has its own key, so a token's mask is the same in any batch and on any mesh.
    """

    rate: float = eqx.field(static=True)

    def __check_init__(self):
        if not 0 <= self.rate < 1:
            raise ValueError(f"Dropout(rate={self.rate}): the rate is a probability; give one in [0, 1).")

    @property
    def is_active(self) -> bool:
        """Whether any channel may be dropped."""
        return self.rate != 0

    def draw_mask(self, keys: Key[Array, "*batch seq"], channels: int) -> Bool[Array, "*batch seq embed"]:
        """Sample the mask of channels that each token keeps."""
        sample = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - self.rate, (channels,)))
        return sample(keys.reshape(-1)).reshape(*keys.shape, channels)

    def apply_mask(
        self, x: Float[Array, "*batch seq embed"], mask: Bool[Array, "*batch seq embed"]
    ) -> Float[Array, "*batch seq embed"]:
        """Return `x / (1 - rate)` where the mask is set, else zero."""
        # The name lets rematerialisation policies keep the mask, so that it is not sampled again.
        mask = checkpoint_name(mask, "dropout")
        return jnp.where(mask, x / (1 - self.rate), jnp.zeros_like(x))


class Residual(Sublayer):
    """A residual sublayer: `sum_norm(x + scale * output_norm(layer(input_scale * norm(x))))`.

    Any of the three norms may be left out. A layer that reads one more input than `x` names that input in `reads`.
    """

    layer: Mixer | Routed | Callable[..., Array]
    """A `Mixer`, a `Routed` layer, or a function of an array to an array of the same shape."""
    norm: Norm | Callable[[Array], Array] | None = None
    """Norm of the layer's input. This norm alone is pre-norm (GPT-2, Llama); with `output_norm` it is Gemma 2's
    sandwich."""
    output_norm: Norm | Callable[[Array], Array] | None = None
    """Norm of the layer's output. OLMo 2 has this norm alone."""
    sum_norm: Norm | Callable[[Array], Array] | None = None
    """Norm of the sum of input and branch. This norm alone is post-norm (Vaswani 2017)."""
    dropout: RandomMask | None = None
    """Dropout of the branch."""
    scale: float | None = eqx.field(static=True, default=None)
    """Factor of the branch's output (Granite)."""
    input_scale: float | None = eqx.field(static=True, default=None)
    """Factor of the layer's input (Falcon-H1)."""
    shares: str | None = eqx.field(static=True, default=None)
    """The name under which a mixer shares its keys and values, or its choice of keys, with later layers. The mixer is
    called with a `ShareRequest` in place of its cache."""
    reads: str | None = eqx.field(static=True, default=None)
    """The name of one more input. `"source"` gives a mixer the sequence of `Tokens.source`, for cross-attention;
    `"layer_input"` gives a function a second argument, the token's vector for this layer (`PerLayerInputs`). With any
    other name, a mixer reads the value that an earlier layer `shares` under this name: the mixer is called with this
    `SharedValue`, wrapped around its cache, and returns a `SharedValue` around its new cache. If `shares` is the same
    name, later layers read the value that this `SharedValue` holds."""

    def __check_init__(self):
        if self.shares and self.reads not in (None, self.shares):
            raise ValueError(
                f"Residual(shares={self.shares!r}, reads={self.reads!r}): a layer that reads another layer's values "
                "passes them on under the same name; give one of the two, or the same name twice."
            )
        if self.reads and isinstance(self.layer, Routed):
            raise ValueError(
                f"Residual({type(self.layer).__name__}, reads={self.reads!r}): a routed layer takes no further input; "
                "leave out reads, or take a mixer or a function."
            )
        if self.shares in (SOURCE, LAYER_INPUT, EMBEDDING):
            raise ValueError(
                f"Residual(shares={self.shares!r}): this is the name of an input of the whole model; take another name."
            )

    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: PyTree = None,
        *,
        index: int | None = None,
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Add the branch to `x`; `index`, or 0 outside of a block, is folded into the keys of dropout."""
        added, cache, aux = self.run_branch(x, tokens, cache, index=index)
        return apply_norm(self.sum_norm, x + added), cache, aux

    def run_branch(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: PyTree = None,
        *,
        index: int | None = None,
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Return the branch's output, a mixer's new cache, and a routed layer's `Aux` or a mixer's shared value."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        normed, aux = apply_norm(self.norm, x), None
        normed = normed if self.input_scale is None else normed * self.input_scale
        if isinstance(self.layer, Mixer):
            y, cache, aux = self._mix(self.layer, normed, tokens, cache)
        elif isinstance(self.layer, Routed):
            y, aux = self.layer(normed, tokens.bare)
        elif self.reads is None:
            y = self.layer(normed)
        else:
            y = self.layer(normed, self._find_input(tokens))
        y = apply_norm(self.output_norm, y)
        y = y if self.scale is None else y * self.scale
        return y if self.dropout is None else self.dropout(y, tokens.fold_in(index or 0).keys), cache, aux

    def _mix(
        self, mixer: Mixer, x: Float[Array, "*batch seq embed"], tokens: Tokens, cache: PyTree
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, SharedValue | None]:
        """Return the mixer's output, its new cache, and the value that it shares."""
        if self.shares is None and self.reads is None:
            return *mixer(x, tokens.bare, cache), None
        if self.reads == SOURCE:
            return *mixer(x, tokens.bare.replace(source=tokens.source), cache), None
        if self.reads is None:
            wrapped_cache = ShareRequest(cache)
        else:
            wrapped_cache = dataclasses.replace(self._find_input(tokens), wrapped=cache)
        y, shared = mixer(x, tokens.bare, wrapped_cache)
        if not isinstance(shared, SharedValue):
            call = f"shares={self.shares!r}): given ShareRequest(cache)"
            call = call if self.reads is None else f"reads={self.reads!r}): given a SharedValue"
            raise ValueError(
                f"Residual({type(mixer).__name__}, {call}, the mixer returns {type(shared).__name__} and no "
                "SharedValue; leave that option out, or take a mixer that returns a SharedValue around its new cache."
            )
        if self.shares is None:
            return y, shared.wrapped, None
        return y, shared.wrapped, dataclasses.replace(shared, name=self.shares, wrapped=None)

    def _find_input(self, tokens: Tokens) -> PyTree:
        """Return the input that `reads` names; raise a `ValueError` if neither the model nor a layer provides it."""
        if self.reads not in (SOURCE, LAYER_INPUT):
            return find_shared(tokens.shared, self.reads or "")
        value: Source | Array | None = tokens.source
        if self.reads == LAYER_INPUT:
            value = None if tokens.inputs is None else tokens.inputs[..., 0, :]
        if value is None:
            field = "Tokens(source=...)" if self.reads == SOURCE else "Transformer(layer_inputs=PerLayerInputs(...))"
            raise ValueError(
                f"Residual({type(self.layer).__name__}, reads={self.reads!r}): the model provides no such input; pass "
                f"{field}."
            )
        return value

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return the mixer's empty cache, or None for other layers."""
        return self.layer.init_cache(batch, capacity, dtype) if isinstance(self.layer, Mixer) else None


class ParallelResidual(Sublayer):
    """Residual branches that read one input and add to one sum: `sum_norm(x + output_norm(sum of branch(norm(x))))`.

    The branches share `norm`, or each branch has its own norm. Branches may be a mixer and a feed-forward layer (GPT-J,
    PaLM), mixers of any kinds and numbers of heads (Falcon-H1), or a dense layer and a mixture of experts (Gemma 4). A
    `ParallelResidual` is a sublayer of a `Block`, or by itself a layer that a stack repeats.
    """

    branches: tuple[Residual, ...]
    norm: Norm | Callable[[Array], Array] | None = None
    """Norm of the input of all branches."""
    output_norm: Norm | Callable[[Array], Array] | None = None
    """Norm of the sum of the branches, before it is added to the input."""
    sum_norm: Norm | Callable[[Array], Array] | None = None
    """Norm of the sum of the input and the branches."""

    def __check_init__(self):
        for index, branch in enumerate(self.branches):
            if branch.sum_norm is not None:
                raise ValueError(
                    f"ParallelResidual(branches[{index}]=Residual(sum_norm=...)): there is one sum, of the input and "
                    "all branches; pass the norm as ParallelResidual(sum_norm=...)."
                )

    @property
    def mixer(self) -> Sublayer | None:
        """The first branch with a mixer."""
        return find_mixer(self.branches)

    @property
    def feed_forward(self) -> Sublayer | None:
        """The first branch that maps each token by itself."""
        return find_feed_forward(self.branches)

    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: PyTree = None,
        *,
        index: int | None = None,
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Add the branches to `x`.

        In a block, `index` is folded into the tokens' random keys; each branch also folds its own index into the keys
        of its dropout.
        """
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        tokens = tokens if index is None else tokens.fold_in(index)
        normed, outputs, new_caches, auxes = apply_norm(self.norm, x), [], [], []
        per_branch = zip(
            self.branches, split_layer_inputs(self.branches, tokens), split_cache(self.branches, cache), strict=True
        )
        for branch_index, (branch, branch_tokens, branch_cache) in enumerate(per_branch):
            y, new_cache, aux = branch.run_branch(normed, branch_tokens, branch_cache, index=branch_index)
            outputs.append(y)
            new_caches.append(new_cache)
            auxes.append(aux)
        # Without an `output_norm`, the branches are added to the input one after another.
        added = outputs if self.output_norm is None else [self.output_norm(sum_in_order(outputs))]
        x = apply_norm(self.sum_norm, sum_in_order([x, *added]))
        return x, None if cache is None else join_caches(self.branches, new_caches), join_auxes(auxes)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return the empty cache of the branch with a mixer; a tuple of caches if several branches have a mixer."""
        return join_caches(self.branches, [branch.init_cache(batch, capacity, dtype) for branch in self.branches])


class StreamScale(Sublayer):
    """A trained factor of the residual stream (the `layer_scalar` of Gemma 4)."""

    factor: Float[Array, ""]

    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: PyTree = None,
        *,
        index: int | None = None,
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Multiply the stream; the factor's gradient is summed over tokens in float32."""
        return multiply_float32(x, self.factor), cache, None

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return None: the layer has no cache."""
        return None


class EmbeddingSkip(Sublayer):
    """The residual stream `stream * x + embedding * x_0`, with two trained factors; `x_0` is the first layer's input.

    In nanochat (2026-01) each block begins with this sum: per-layer residual scalars, and a skip from the normalized
    embedding. The factors begin at 1 and 0.1 there.
    """

    stream: Float[Array, ""]
    """The factor of the residual stream."""
    embedding: Float[Array, ""]
    """The factor of the model's embedded tokens."""

    def __init__(self, stream: float = 1.0, embedding: float = 0.0):
        """Set the initial factors; with the defaults, the layer changes nothing."""
        self.stream = jnp.full((), stream, jnp.float32)
        self.embedding = jnp.full((), embedding, jnp.float32)

    def __call__(
        self,
        x: Float[Array, "*batch seq embed"],
        tokens: Tokens | None = None,
        cache: PyTree = None,
        *,
        index: int | None = None,
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Return the weighted sum; the factors' gradients are summed over tokens in float32."""
        embedded = find_shared(() if tokens is None else tokens.shared, EMBEDDING).value
        return multiply_float32(x, self.stream) + multiply_float32(embedded, self.embedding), cache, None

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return None: the layer has no cache."""
        return None


class Block(Layer):
    """A transformer block: residual sublayers, run in order.

    Most decoders have `Block(Residual(attention, norm), Residual(mlp, norm))`. Here attention is the mixer: the layer
    in which tokens read one another, and which has a cache. A block of Mamba has one sublayer, its mixer. A block of
    T5's decoder has a third sublayer between these two, `Residual(cross_attention, norm, reads="source")`. The block's
    cache is the cache of its only sublayer with a mixer, or a tuple of caches if several sublayers have mixers.

    A block is one layer of a model: `Block(a, b)` has the residual sublayers `a` and `b`. `SuperBlock((a, b))` holds
    two layers, `a` and `b`, that a stack repeats together.
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
        """The first sublayer that maps each token by itself and reads nothing but the stream."""
        return find_feed_forward(self.sublayers)

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Run the sublayers; return the stream, the new cache, and the aux: `Aux` of routed layers, shared values."""
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        new_caches, auxes = [], []
        per_sublayer = zip(
            self.sublayers, split_layer_inputs(self.sublayers, tokens), split_cache(self.sublayers, cache)
        )
        for index, (sublayer, sublayer_tokens, sublayer_cache) in enumerate(per_sublayer):
            sublayer_tokens = sublayer_tokens.replace(shared=(*tokens.shared, *collect_shared(auxes)))
            x, new_cache, aux = sublayer(x, sublayer_tokens, sublayer_cache, index=index)
            new_caches.append(new_cache)
            auxes.append(aux)
        return x, None if cache is None else join_caches(self.sublayers, new_caches), join_auxes(auxes)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return the empty cache of the sublayer with a mixer; a tuple of caches if several sublayers have mixers."""
        return join_caches(self.sublayers, [layer.init_cache(batch, capacity, dtype) for layer in self.sublayers])


def apply_norm(
    norm: Norm | Callable[[Array], Array] | None, x: Float[Array, "*batch embed"]
) -> Float[Array, "*batch embed"]:
    """Return the normalized array, or the array itself if there is no norm."""
    return x if norm is None else norm(x)


def sum_in_order(arrays: Sequence[Float[Array, "*batch embed"]]) -> Float[Array, "*batch embed"]:
    """Add arrays from the first to the last, so that sums are rounded alike everywhere."""
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total


def has_mixer(sublayer: PyTree) -> bool:
    """Return whether a sublayer has a mixer, and so a cache."""
    return bool(modules(sublayer, Mixer))


def find_mixer(sublayers: Sequence[Sublayer]) -> Sublayer | None:
    """Return the first sublayer with a mixer."""
    return next(filter(has_mixer, sublayers), None)


def find_feed_forward(sublayers: Sequence[Sublayer]) -> Sublayer | None:
    """Return the first sublayer that maps each token by itself and reads nothing but the stream."""
    for sublayer in sublayers:
        residuals = modules(sublayer, Residual)
        if residuals and not has_mixer(sublayer) and all(residual.reads is None for residual in residuals):
            return sublayer
    return None


def split_layer_inputs(layers: Sequence[PyTree], tokens: Tokens) -> Iterator[Tokens]:
    """Yield for each layer the tokens with only that layer's slice of `tokens.inputs`."""
    start = 0
    for count in map(count_layer_inputs, layers):
        if tokens.inputs is None or count == tokens.inputs.shape[-2]:
            yield tokens
        else:
            layer_inputs = tokens.inputs[..., start : start + count, :] if count else None
            yield tokens.replace(inputs=layer_inputs)
        start += count


def count_layer_inputs(layer: PyTree) -> int:
    """Return how many sublayers of a layer, or of all layers of a stack, read a vector for their layer."""
    readers = [residual for residual in modules(layer, Residual) if residual.reads == LAYER_INPUT]
    return len(readers) * (len(layer) if isinstance(layer, LayerStack) else 1)


def split_cache(sublayers: Sequence[Sublayer], cache: PyTree) -> list[PyTree]:
    """Split a cache that `join_caches` made into one cache per sublayer; None for a sublayer without a mixer."""
    flags = [has_mixer(sublayer) for sublayer in sublayers]
    if cache is None or sum(flags) < 2:
        return [cache if flag else None for flag in flags]
    check_caches(cache, sum(flags), "sublayers with mixers")
    caches = iter(cache)
    return [next(caches) if flag else None for flag in flags]


def check_caches(caches: PyTree, count: int, readers: str) -> None:
    """Raise a `ValueError` unless `caches` is a tuple of `count` caches; the error calls the modules `readers`."""
    is_sequence = isinstance(caches, tuple | list)
    if not is_sequence or len(caches) != count:
        passed = f"a tuple of {len(caches)}" if is_sequence else name_class(caches)
        raise ValueError(
            f"a call of {count} {readers} takes a tuple of {count} caches, but cache is {passed}; make the cache by "
            "init_cache of the same module."
        )


def join_caches(sublayers: Sequence[Sublayer], caches: Sequence[PyTree]) -> PyTree:
    """Return the cache of the only sublayer with a mixer; a tuple of caches if there are several, None if none."""
    mixer_caches = [cache for sublayer, cache in zip(sublayers, caches, strict=True) if has_mixer(sublayer)]
    return tuple(mixer_caches) if len(mixer_caches) > 1 else next(iter(mixer_caches), None)


def join_auxes(auxes: Sequence[PyTree]) -> PyTree:
    """Return the only aux that is not None; a tuple if there are several, None if there is none."""
    present = [aux for aux in auxes if aux is not None]
    return tuple(present) if len(present) > 1 else next(iter(present), None)
