"""Layers one after another: what each is given of the tokens, and what it leaves for those behind it."""

from collections.abc import Iterator, Sequence
from typing import Any

from jaxtyping import Array, Float, PyTree

from ._dims import modules
from ._layer_inputs import GatedInput
from ._left import left_in, only
from ._residual import Residual
from ._stack import Stack
from ._tokens import Tokens


def in_turn(
    layers: Sequence[Any],
    x: Float[Array, "*batch seq embed"],
    tokens: Tokens,
    cache: PyTree,
) -> tuple[Float[Array, "*batch seq embed"], PyTree, tuple]:
    """What the last of the layers gives, and tuples of their caches and aux.

    Each is given its own of the tokens' `inputs`, and what layers before it have left; of what they leave, what is
    wanted further behind stays in the aux. Raises a `ValueError` where there are not as many inputs as are taken.
    """
    takes = [len(modules(layer, GatedInput)) * (len(layer) if isinstance(layer, Stack) else 1) for layer in layers]
    read = [reads(layer) for layer in layers]
    if tokens.inputs is not None and tokens.inputs.shape[-2] != sum(takes):
        raise ValueError(
            f"LayerInputs(depth={tokens.inputs.shape[-2]}): the model has {sum(takes)} layers with a GatedInput; give "
            "one vector for each."
        )
    caches = (None,) * len(layers) if cache is None else cache
    if not isinstance(caches, tuple | list) or len(caches) != len(layers):
        given = f"{len(caches)} of them" if isinstance(caches, tuple | list) else f"a {type(caches).__name__}"
        raise ValueError(
            f"a call of {len(layers)} layers or stacks takes a tuple of as many caches, and cache is {given}; make it "
            "by init_cache of the same module."
        )
    after, auxes = [], []
    for number, (layer, own, given) in enumerate(zip(layers, _own(tokens, takes), caches, strict=True)):
        wanted = tokens.wanted.union(*read[number + 1 :])
        left = (*tokens.left, *left_in(auxes))
        own = own.replaced(left=left, wanted=wanted).fold_in(number)
        x, kept, aux = layer(x, own, given)
        after.append(kept)
        auxes.append(aux)
    return x, None if cache is None else tuple(after), only(tuple(auxes), tokens.wanted)


def reads(layer: PyTree) -> frozenset[str]:
    """The names of what a layer, or a stack, reads of layers before it."""
    found, left = set[str](), set[str]()
    for one in modules(layer, Residual):
        found |= {one.reads} - left - {None}
        left |= {one.leaves} - {None}
    return frozenset(found)


def _own(tokens: Tokens, takes: Sequence[int]) -> Iterator[Tokens]:
    """For each layer the tokens with its own of their inputs."""
    first = 0
    for number in takes:
        if tokens.inputs is None:
            yield tokens
        else:
            its = tokens.inputs[..., first : first + number, :] if number else None
            yield tokens.replaced(inputs=its)
        first += number
