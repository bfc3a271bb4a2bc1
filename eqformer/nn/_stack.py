"""Layers in sequence: stacks that a scan runs, super-blocks, and rematerialisation policies."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jaxtyping import Array, Float, Int, Key, PyTree

from .._annotation_checks import checked
from ._block import (
    check_caches,
    count_layer_inputs,
    EMBEDDING,
    EmbeddingSkip,
    LAYER_INPUT,
    Residual,
    SOURCE,
    split_layer_inputs,
)
from ._cache import index_layer, LayerCache, quantize_caches, update_layer, with_rollback
from ._contracts import Layer
from ._dtype import in_dtypes_of, in_float32, parse_cache_dtype
from ._model_contracts import LayerStack, ReadsIds
from ._module import ensemble, modules, path_name
from ._tokens import collect_shared, keep_shared, SharedValue, take_last_layer, Tokens, tokens_or_default


class Stack(LayerStack):
    """`layers` blocks of one kind, each array with a `layers` dim in front, run by `lax.scan`.

    The blocks are built in one trace and run in one trace, so neither start-up nor compilation grows with depth.
    Indexing returns layers: `stack[2]` is a block, `stack[2:4]` a stack. Blocks of several kinds in a repeating pattern
    go into one `SuperBlock`; kinds that do not repeat go into stacks of their own.

    `with_execution` sets `remat`, the policy for what the backward pass recomputes (see `REMAT`), and `unroll`, the
    number of layers that an iteration of the scan runs. `depth` is the number of layers of the whole stack. In a
    pipeline, a device holds some of these layers and, if stages are unequal, also padding layers.
    """

    numbers: Int[Array, "layers"]
    remat: str = eqx.field(static=True)
    unroll: int = eqx.field(static=True)
    depth: int = eqx.field(static=True)
    blocks: Layer = ensemble("layers")

    def __init__(self, make: Callable[[Key[Array, ""]], Layer], layers: int, *, key: Key[Array, ""]):
        """Build `make(key)` for `layers` keys."""
        if layers < 1:
            raise ValueError(f"Stack(layers={layers}): a stack holds at least one block.")
        self.blocks = eqx.filter_vmap(make)(jax.random.split(key, layers))
        # A slice of the stack keeps the layers' indices in the whole stack, because they are folded into random keys.
        self.numbers = jnp.arange(layers, dtype=jnp.int32)
        self.remat, self.unroll, self.depth = "none", 1, layers

    def __call__(
        self, x: Float[Array, "*batch seq embed"], tokens: Tokens | None = None, cache: PyTree = None
    ) -> tuple[Float[Array, "*batch seq embed"], PyTree, PyTree]:
        """Run the layers in order; the cache and the aux of routed layers have a `layers` dim in front."""
        _check_layers(self, "x")
        tokens = tokens_or_default(tokens, x.shape[:-1], cache)
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        layer_inputs, tokens = _split_by_layer(tokens.inputs, len(self)), tokens.replace(inputs=None)
        # All layers read the arrays of the tokens, such as a cross-attention's source. The scan sums their gradients
        # over layers in the arrays' dtype, so the arrays enter the scan in float32.
        float32_tokens = in_float32(tokens) if cache is None else tokens

        def run_layer(carry: tuple, scanned: tuple) -> tuple[tuple, PyTree]:
            # The cache is part of the carry and updated in place; as a scanned input it would be copied by every call.
            (x, caches), (weights, number, index, inputs) = carry, scanned
            x = checkpoint_name(x, "layer input")  # A name for rematerialisation policies that offload layer inputs.
            layer_tokens = in_dtypes_of(float32_tokens, tokens).replace(inputs=inputs).fold_in(number)
            x, new_cache, aux = eqx.combine(weights, static)(x, layer_tokens, _select_cache(caches, index))
            return (x, _store_cache(caches, new_cache, index)), keep_shared(aux, tokens.names_read)

        policy = REMAT[self.remat]
        if policy is not None:
            # Without a loop between forward and backward pass, some compilers merge the recomputation with the forward
            # pass and keep its results. A scan of a single iteration has no loop.
            run_layer = jax.checkpoint(run_layer, policy=policy, prevent_cse=1 < len(self) <= self.unroll)
        indices = jnp.arange(len(self), dtype=jnp.int32)
        scanned = (arrays, self.numbers, indices, layer_inputs)
        (x, cache), aux = jax.lax.scan(run_layer, (x, cache), scanned, unroll=self.unroll)
        return x, cache, take_last_layer(aux)

    def init_cache(self, batch: Sequence[int], capacity: int, dtype: str = "float32") -> PyTree:
        """Return the blocks' empty caches, stacked over `layers`."""
        _check_layers(self, "init_cache")
        return eqx.filter_vmap(lambda block: block.init_cache(batch, capacity, dtype))(self.blocks)


class SuperBlock(Layer):
    """Layers of any kinds that a stack repeats together as one layer, such as Gemma's local and global blocks.

    Each of `blocks` is a whole layer, usually a `Block`, whose arguments are the sublayers of one layer.
    """

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


def empty_caches(
    stacks: Sequence[LayerStack],
    batch: Sequence[int],
    capacity: int,
    dtype: str | None,
    *,
    compute_dtype: str,
    rollback: int,
) -> tuple[PyTree, ...]:
    """Return the empty cache of each stack; `dtype=None` means the compute dtype, and an 8-bit dtype adds scales."""
    dtype, is_small = parse_cache_dtype(dtype or compute_dtype, f"init_cache(dtype={dtype!r})")
    caches = tuple(stack.init_cache(batch, capacity, compute_dtype if is_small else dtype) for stack in stacks)
    caches = quantize_caches(caches, dtype) if is_small else caches
    return with_rollback(caches, rollback) if rollback else caches


def _check_layers(stack: Stack, call: str) -> None:
    """Raise a `ValueError` for an array of the blocks whose first dim is not the number of layers."""
    arrays = eqx.filter(stack.blocks, eqx.is_array)
    if all(x.shape[:1] == (len(stack),) for x in jax.tree.leaves(arrays)):
        return
    path, x = next((path, x) for path, x in jax.tree_util.tree_leaves_with_path(arrays) if x.shape[:1] != (len(stack),))
    raise ValueError(
        f"Stack({call}): blocks.{path_name(path)} has shape {x.shape}, but arrays of a stack of {len(stack)} layers "
        f"have a dim of {len(stack)} in front; to change layer i, give equinox.tree_at the whole array, as "
        "array.at[i].set(...)."
    )


def _split_by_layer(
    inputs: Float[Array, "*rows seq depth mlp"] | None, layers: int
) -> Float[Array, "layers *rows seq _ mlp"] | None:
    """Return the per-layer inputs with a `layers` dim in front.

    A layer gets one vector for each of its sublayers that reads such a vector.
    """
    if inputs is None:
        return None
    *rows, depth, mlp = inputs.shape
    return jnp.moveaxis(inputs.reshape(*rows, layers, depth // layers, mlp), -3, 0)


def _select_cache(caches: PyTree, index: Int[Array, ""]) -> PyTree:
    """Return a layer's cache: its slice, or for a `LayerCache` all layers' arrays with the layer's index."""

    def select(cache: PyTree) -> PyTree:
        return dataclasses.replace(cache, layer=index) if _is_layer_cache(cache) else index_layer(cache, index)

    return jax.tree.map(select, caches, is_leaf=_is_layer_cache)


def _store_cache(caches: PyTree, new_cache: PyTree, index: Int[Array, ""]) -> PyTree:
    """Return the stack's caches with a layer's new cache stored."""

    def store(old: PyTree, new: PyTree) -> PyTree:
        return dataclasses.replace(new, layer=None) if _is_layer_cache(old) else update_layer(old, new, index)

    return jax.tree.map(store, caches, new_cache, is_leaf=_is_layer_cache)


def _is_layer_cache(node: object) -> TypeGuard[LayerCache]:
    return isinstance(node, LayerCache)


def run_layers(
    layers: Sequence[Callable[..., tuple]],
    x: Float[Array, "*batch seq embed"],
    tokens: Tokens,
    cache: PyTree,
) -> tuple[Float[Array, "*batch seq embed"], PyTree, tuple]:
    """Run layers, stacks, or modules that are called like them, in order.

    Return the last output, and tuples of the layers' caches and aux. Each layer gets its own slice of `tokens.inputs`,
    and the values that earlier layers share with it. Shared values that are read by layers after `layers` stay in the
    aux. Raises a `ValueError` if the number of per-layer inputs is not the number of sublayers that read such an input.
    """
    count = sum(map(count_layer_inputs, layers))
    read_by_layer = [shared_names_read(layer) for layer in layers]
    if tokens.inputs is not None and tokens.inputs.shape[-2] != count:
        raise ValueError(
            f"PerLayerInputs(depth={tokens.inputs.shape[-2]}): the model has {count} sublayers that read a vector, "
            f"Residual(reads={LAYER_INPUT!r}); give one vector for each."
        )
    caches = (None,) * len(layers) if cache is None else cache
    check_caches(caches, len(layers), "layers or stacks")
    new_caches, auxes = [], []
    per_layer = zip(layers, split_layer_inputs(layers, tokens), caches, strict=True)
    for index, (layer, layer_tokens, layer_cache) in enumerate(per_layer):
        names_read = tokens.names_read.union(*read_by_layer[index + 1 :])
        shared = (*tokens.shared, *collect_shared(auxes))
        layer_tokens = layer_tokens.replace(shared=shared, names_read=names_read).fold_in(index)
        x, new_cache, aux = layer(x, layer_tokens, layer_cache)
        new_caches.append(new_cache)
        auxes.append(aux)
    return x, None if cache is None else tuple(new_caches), keep_shared(tuple(auxes), tokens.names_read)


def shared_names_read(layer: PyTree) -> frozenset[str]:
    """Return the names of the values that a layer, or a stack, reads from layers before it."""
    needed, shared = set[str](), set[str]()
    if modules(layer, EmbeddingSkip):
        needed.add(EMBEDDING)
    for residual in modules(layer, Residual):
        needed |= {residual.reads} - shared - {None, SOURCE, LAYER_INPUT}
        shared |= {residual.shares} - {None}
    return frozenset(needed)


@checked
def with_ids(tokens: Tokens, ids: Int[Array, "*batch seq"], layers: PyTree) -> Tokens:
    """Return the tokens with their ids if one of the layers, or a router in it, looks up ids in a table of its own."""
    return tokens.replace(ids=ids) if modules(layers, ReadsIds) else tokens


def share_embedding(tokens: Tokens, x: Float[Array, "*batch _ embed"], layers: Sequence[PyTree]) -> Tokens:
    """Return the tokens with `x`, the input of the first layer, as a shared value if one of the layers reads it."""
    if not any(EMBEDDING in shared_names_read(layer) for layer in layers):
        return tokens
    return tokens.replace(shared=(*tokens.shared, SharedValue(x, name=EMBEDDING)))


# Rematerialisation policies. A policy names the arrays that the forward pass keeps; the backward pass recomputes all
# other arrays.
#
# `none` keeps everything.
# `full` keeps the layers' inputs, and the arrays named "own tokens".
# `dots` keeps the results of all matrix products; `dots_no_batch` keeps the results of products without a batch dim.
# `products` keeps the results of linear maps, and the arrays named "attended", "product" and "dropout".
# `products_on_host` keeps the same arrays except "dropout", and the layers' inputs, in the memory of the hosts.
# `full_on_host` keeps the layers' inputs in the memory of the hosts, and "own tokens" on the devices.
#
# A device that is its own host runs the last two as `products` and `full`. Modules name arrays by `checkpoint_name`:
#
# "own tokens", only if devices split a row's tokens: the results of a layer's maps for the device's tokens, which would
# otherwise be sent again, and the tokens gathered for experts, which would otherwise be computed twice.
# "attended": the output of attention (except by `DotProductAttention`), and the sums of the softmax if the backward
# pass reads them. No kernel then runs forward twice.
# "product": the result of a linear map that is gathered from devices, that experts computed, or that a `LoRA` sums.
# "dropout": a dropout mask, a byte for each channel.
#
# A product of several experts at once has a batch dim. It is not kept if experts choose their tokens, or contain more
# than linear maps.
_POLICIES = jax.checkpoint_policies
_TO_HOST = {"offload_src": "device", "offload_dst": "pinned_host"}
_PRODUCT_NAMES = ("attended", "product")
_OFFLOAD_NAMES = _POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=[], names_which_can_be_offloaded=[*_PRODUCT_NAMES, "layer input"], **_TO_HOST
)
_OFFLOAD_LAYER_INPUTS = _POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=["own tokens"], names_which_can_be_offloaded=["layer input"], **_TO_HOST
)
_OFFLOAD_DOTS = _POLICIES.offload_dot_with_no_batch_dims(**_TO_HOST)


def _offload_products(primitive: Primitive, *avals: object, **params: object) -> PyTree:
    """Offload named arrays and the results of products without a batch dim."""
    return (_OFFLOAD_NAMES if primitive.name == "name" else _OFFLOAD_DOTS)(primitive, *avals, **params)


REMAT: dict[str, Callable[..., PyTree] | None] = {
    "none": None,
    "full": _POLICIES.save_only_these_names("own tokens"),
    "dots": _POLICIES.dots_saveable,
    "dots_no_batch": _POLICIES.dots_with_no_batch_dims_saveable,
    "products": _POLICIES.save_from_both_policies(
        _POLICIES.dots_with_no_batch_dims_saveable, _POLICIES.save_only_these_names(*_PRODUCT_NAMES, "dropout")
    ),
    "products_on_host": _offload_products,
    "full_on_host": _OFFLOAD_LAYER_INPUTS,
}
