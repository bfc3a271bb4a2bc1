"""The interface that generation needs of a model, and models whose layers are not stacked."""

from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int, PyTree

from ..nn import (
    has_shape,
    LanguageModel,
    modules,
    PositionEncoding,
    Predictor,
    QuantizedLinear,
    Routed,
    Tokens,
    with_causal_masks,
)


@runtime_checkable
class Model(Protocol):
    """Interface of a model that generates: an `nn.LanguageModel`, or any class with these methods."""

    @property
    def vocab(self) -> int:
        """Number of ids that the model knows, from 0 on."""
        ...

    @property
    def max_seq(self) -> int | None:
        """Number of positions that the model knows; None for any number."""
        ...

    @property
    def start(self) -> int | None:
        """The id with which the decoder begins each text, if an encoder reads the prompt; None without an encoder."""
        ...

    def encode(
        self, ids: Int[Array, "batch seq"], tokens: Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch seq embed"], PyTree, PyTree]:
        """Return the hidden vectors of the ids, the new cache, and outputs of routed layers that nothing here reads."""
        ...

    def unembed(self, hidden: Float[Array, "batch embed"]) -> Float[Array, "batch vocab"]:
        """Return the logits of the tokens after the hidden vectors."""
        ...

    def decode(
        self, ids: Int[Array, "batch seq"], tokens: Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch vocab"], PyTree]:
        """Return the logits of the token after the last id of each row, and the new cache."""
        ...

    def init_cache(self, batch: int, capacity: int, dtype: str | None = None, *, rollback: int = 0) -> PyTree:
        """Return an empty cache for `batch` rows of up to `capacity` tokens.

        The last `rollback` tokens of a row may be replaced by other tokens later.
        """
        ...


@runtime_checkable
class PredictingModel(Model, Protocol):
    """Interface of a model that may have a multi-token predictor, with methods such as `Transformer.predict`."""

    @property
    def predictor(self) -> Predictor | None:
        """The multi-token predictor, if the model has one."""
        ...

    def predict(
        self, ids: Int[Array, "batch seq"], hidden: Float[Array, "batch seq embed"], tokens: Tokens, cache: PyTree
    ) -> tuple[Float[Array, "batch seq embed"], PyTree]:
        """Return the predictor's hidden vectors of the ids, and its new cache.

        `hidden` holds the model's hidden vector of the token before each id.
        """
        ...

    def init_predictor_cache(self, batch: int, capacity: int, dtype: str | None = None, *, rollback: int = 0) -> PyTree:
        """Return an empty cache of the predictor; the arguments are as in `init_cache`."""
        ...


def depends_on_length(model: Model, longest: int) -> bool:
    """Return whether rotary frequencies depend on a row's whole length, for rows of up to `longest` tokens.

    If they do, rows of different lengths cannot share the cache of a common prefix.
    """
    return any(encoding.changes_within(longest) for encoding in modules(model, PositionEncoding))


def count_bytes(tree: PyTree) -> int:
    """Return the bytes of all arrays, or shapes, in a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(eqx.filter(tree, has_shape)))


def count_cache_bytes(model: Model, batch: int, capacity: int, dtype: str | None) -> int:
    """Return the bytes of the caches of `batch` rows."""
    # Masks of blocks change no size, but `init_cache` refuses them.
    return count_bytes(eqx.filter_eval_shape(with_causal_masks(model).init_cache, batch, capacity, dtype))


# Models without a scan over layers, which decode faster on platforms where a scan copies the weights it reads.


def unstack_layers(model: LanguageModel) -> LanguageModel:
    """Return an equal model whose stacks hold one layer each, so that the compiled program has no loop over layers.

    Decoding a token reads every weight once. On GPUs and CPUs a scan over layers first copies each layer's weights, and
    on GPUs its cache, out of the stacked arrays; without the scan they are read in place. In exchange, compile time
    grows with depth, and this call copies the weights.
    """
    layers = tuple(stack[number : number + 1] for stack in model.stacks for number in range(len(stack)))
    return eqx.tree_at(lambda m: m.stacks, model, layers)


def unstack_for_platform(
    model: LanguageModel,
    platform: str,
    chip: str = "",
    devices: int = 1,
    *,
    processor_cache: int | None = None,
    rows: int = 0,
    capacity: int = 0,
    cache_dtype: str | None = None,
) -> LanguageModel:
    """Unstack the layers of a model if decoding on a platform is known to be faster with unstacked layers.

    - On GPUs and on TPU7x, layers are unstacked.
    - On other TPUs, a scan reads slices of stacked arrays in place, so layers stay stacked, unless the projections to
      or from heads do not fit into vector memory.
    - On CPUs, dense layers are unstacked if their weights, with the KV caches, do not fit into the last-level cache,
      because a scan's copies then go through main memory. Compilation takes several times as long.
    - Mixtures of experts are unstacked on all platforms, because a scan copies the weights of all experts, of which a
      token reads only a few. On TPUs, the kernels of experts need these copies.

    Do not call this for models whose layers are split over the axis `pipe`; they must stay stacked.

    Args:
        model: The model, or its shapes.
        platform: `"gpu"`, `"tpu"` or `"cpu"`.
        chip: The device kind by JAX, `jax.devices()[0].device_kind`.
        devices: The number of devices over which a projection is split.
        processor_cache: The bytes of a CPU's last-level cache; None: unknown, so that dense layers stay stacked.
        rows: Rows that are decoded together, whose KV caches count too; 0: only the weights count.
        capacity: Tokens of each row's KV cache.
        cache_dtype: The dtype of keys and values in the caches; None: the compute dtype.
    """
    scan_copies = platform in _COPYING_PLATFORMS or "7x" in chip.lower()
    if platform == "cpu" and processor_cache is not None:
        caches = count_cache_bytes(model, rows, capacity, cache_dtype) if rows else 0
        scan_copies |= sum(_copied_bytes(stack, processor_cache) for stack in model.stacks) + caches > processor_cache
    scan_copies |= platform == "tpu" and _largest_head_projection(model) >= devices * _VECTOR_MEMORY
    return unstack_layers(model) if scan_copies or modules(model.stacks, Routed) else model


def _copied_bytes(stack: Any, processor_cache: int) -> int:
    """Return the bytes of a stack's weights that a scan may copy through main memory.

    The quantized weights of a small layer do not count. They are copied into the processor's cache, from which the
    product then reads them: with 2.4 MB a layer (SmolLM2), a decode step took equally long with stacked and with
    unstacked layers. With 26 MB a layer, a step took 1.6 times as long with stacked layers.
    """
    num_bytes = count_bytes(stack.blocks)
    if num_bytes > len(stack) * processor_cache // 8:
        return num_bytes
    return num_bytes - count_bytes(modules(stack.blocks, QuantizedLinear))


_COPYING_PLATFORMS = ("gpu", "cuda", "rocm")
"""Platforms whose compilers copy slices of all arrays that a loop reads. TPU7x also copies, to change the tiling."""
_VECTOR_MEMORY = 2**26
"""Bytes of a TPU's vector memory. Slices of projections with a dim of heads are copied if they are larger than this."""


def _largest_head_projection(model: LanguageModel) -> int:
    """Return the bytes of a layer's largest projection to or from heads."""
    arrays = jax.tree.leaves(eqx.filter([stack.blocks for stack in model.stacks], eqx.is_array))
    # No other weights of dense layers have more than three dims, such as `layers heads head_dim embed`.
    projections = [x for x in arrays if x.ndim > 3]
    return max((x.size // len(x) * x.dtype.itemsize for x in projections), default=0)
