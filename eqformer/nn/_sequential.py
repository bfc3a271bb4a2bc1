"""Layers in sequence: per-layer inputs, caches, and values that layers share with later layers."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxtyping import Array, Float, PyTree

from ._cross_layer import collect_shared, keep_shared
from ._dims import modules
from ._per_layer_embedding import PerLayerGate
from ._residual import Residual
from ._stack import Stack
from ._tokens import Tokens


def run_layers(
    layers: Sequence[Any],
    x: Float[Array, "*batch seq embed"],
    tokens: Tokens,
    cache: PyTree,
) -> tuple[Float[Array, "*batch seq embed"], PyTree, tuple]:
    """Run the layers in order; return the last output, and tuples of the layers' caches and aux.

    Each layer gets its own slice of `tokens.inputs`, and the values that earlier layers share with it. Shared values
    that a layer behind these layers reads stay in the aux. Raises a `ValueError` if the number of per-layer inputs is
    not the number of layers that take one.
    """
    counts = [len(modules(layer, PerLayerGate)) * (len(layer) if isinstance(layer, Stack) else 1) for layer in layers]
    read_by_layer = [shared_names_read(layer) for layer in layers]
    if tokens.inputs is not None and tokens.inputs.shape[-2] != sum(counts):
        raise ValueError(
            f"PerLayerInputs(depth={tokens.inputs.shape[-2]}): the model has {sum(counts)} layers with a PerLayerGate; "
            "give one vector for each."
        )
    caches = (None,) * len(layers) if cache is None else cache
    if not isinstance(caches, tuple | list) or len(caches) != len(layers):
        given = f"{len(caches)} of them" if isinstance(caches, tuple | list) else f"a {type(caches).__name__}"
        raise ValueError(
            f"a call of {len(layers)} layers or stacks takes a tuple of as many caches, and cache is {given}; make it "
            "by init_cache of the same module."
        )
    new_caches, auxes = [], []
    per_layer = zip(layers, _split_inputs(tokens, counts), caches, strict=True)
    for number, (layer, layer_tokens, layer_cache) in enumerate(per_layer):
        names_read = tokens.names_read.union(*read_by_layer[number + 1 :])
        shared = (*tokens.shared, *collect_shared(auxes))
        layer_tokens = layer_tokens.replaced(shared=shared, names_read=names_read).fold_in(number)
        x, new_cache, aux = layer(x, layer_tokens, layer_cache)
        new_caches.append(new_cache)
        auxes.append(aux)
    return x, None if cache is None else tuple(new_caches), keep_shared(tuple(auxes), tokens.names_read)


def shared_names_read(layer: PyTree) -> frozenset[str]:
    """Return the names of the values that a layer, or a stack, reads from layers before it."""
    needed, shared = set[str](), set[str]()
    for residual in modules(layer, Residual):
        needed |= {residual.reads} - shared - {None}
        shared |= {residual.shares} - {None}
    return frozenset(needed)


def _split_inputs(tokens: Tokens, counts: Sequence[int]) -> Iterator[Tokens]:
    """Yield the tokens of each layer, with only that layer's slice of `tokens.inputs`."""
    start = 0
    for count in counts:
        if tokens.inputs is None:
            yield tokens
        else:
            layer_inputs = tokens.inputs[..., start : start + count, :] if count else None
            yield tokens.replaced(inputs=layer_inputs)
        start += count
