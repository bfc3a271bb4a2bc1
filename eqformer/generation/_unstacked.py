"""The same model with its layers apart, for decoding where a layer's weights are copied out of their stack."""

import equinox as eqx

from ..nn import Stack, Transformer


def unstacked(model: Transformer) -> Transformer:
    """A model of equal outputs whose stacks hold one layer each, so that no loop over layers is left.

    A decoded token reads every weight once. On CPU a loop over layers first copies each layer's weights and cache out
    of the stack; without one they are read where they lie. The price: compile time grows with depth, and this call
    copies the weights.
    """
    layers = tuple(_one(stack, number) for stack in model.stacks for number in range(len(stack)))
    return eqx.tree_at(lambda m: m.stacks, model, layers)


def _one(stack: Stack, number: int) -> Stack:
    layer = stack[number : number + 1]
    assert isinstance(layer, Stack), "a slice of a stack is a stack"
    return layer
