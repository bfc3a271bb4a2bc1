"""The same model without a scan over layers, for faster decoding on GPUs, CPUs, TPU7x, and of mixtures on all TPUs."""

import equinox as eqx
import jax

from ..nn import modules, Routed, Stack, Transformer


def unstacked(model: Transformer) -> Transformer:
    """An equal model whose stacks hold one layer each, so that the compiled program has no loop over layers.

    Decoding a token reads every weight once. On GPUs and CPUs, a scan over layers first copies each layer's weights,
    and on GPUs its cache, out of the stacked arrays; without the scan they are read in place. In exchange, compile time
    grows with depth, and this call copies the weights.
    """
    layers = tuple(_one(stack, number) for stack in model.stacks for number in range(len(stack)))
    return eqx.tree_at(lambda m: m.stacks, model, layers)


def for_platform(model: Transformer, platform: str, chip: str = "", devices: int = 1) -> Transformer:
    """The model as it reads weights and caches in place on a platform.

    `unstacked` on GPUs, on TPU7x and, with routed layers, everywhere: a scan copies all experts, on CPUs for the few
    that a token reads, and on TPUs for their kernels. Else as it is: other TPUs read slices of stacked arrays where
    they are, but for maps to or from heads that fit no vector memory, and for dense layers CPUs gain less than
    compilation may take. Not for models whose layers are split over the axis `pipe`.

    Args:
        model: The model, or its shapes.
        platform: `"gpu"`, `"tpu"` or `"cpu"`.
        chip: What JAX calls the devices, `jax.devices()[0].device_kind`.
        devices: Over how many devices a map is split.
    """
    is_copying = (
        platform in _COPYING or "7x" in chip.lower() or (platform == "tpu" and _largest(model) >= devices * _WIDE)
    )
    return unstacked(model) if is_copying or modules(model.stacks, Routed) else model


# Platforms whose compilers copy slices of all that a loop reads; TPU7x's brings stacks of weights into other tiles.
_COPYING = ("gpu", "cuda", "rocm")
# Slices of more than two dims, in which heads stand, TPUs bring into vector memory, and copy those that do not fit.
_WIDE = 2**26  # bytes


def _largest(model: Transformer) -> int:
    """Bytes of a layer's largest map to or from heads."""
    arrays = [
        x for stack in model.stacks for x in jax.tree.leaves(eqx.filter(stack.blocks, eqx.is_array)) if x.ndim > 3
    ]
    return max((x.size // len(x) * x.dtype.itemsize for x in arrays), default=0)


def _one(stack: Stack, number: int) -> Stack:
    layer = stack[number : number + 1]
    assert isinstance(layer, Stack), "a slice of a stack is a stack"
    return layer
