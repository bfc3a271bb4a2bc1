"""Fully sharded parameters: split over devices, and gathered while they are used (ZeRO-3, arXiv:1910.02054).

Gradients of gathered parameters are summed over uses, microbatches and devices in float32 at least. JAX returns the
gradient of an array in the array's own dtype and shape. The gradient of a 16-bit array therefore goes to a gradient
proxy: float32 zeros, whose values are never read. The forward pass uses the 16-bit values.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jaxtyping import Array, PyTree, Shaped

from .. import nn
from ..nn import at_least_float32, is_trainable
from . import _collectives as send
from ._mesh import FSDP, TENSOR, TorusSteps
from ._shard_map import vary_like


class Gathered(nn.Module):
    """Block whose arrays are split over `fsdp`, all-gathered at each call, and not saved as residuals.

    The backward pass gathers again, and reduce-scatters gradients in float32 at least.
    """

    inner: PyTree
    """The block."""
    dims: tuple[int | None, ...] = eqx.field(static=True)
    """For each array, the dim that is split, or None."""
    dtypes: tuple[str, ...] = eqx.field(static=True)
    """For each array, the dtype in which it is gathered and used."""
    is_checkpointed: bool = eqx.field(static=True, default=False)
    """Whether the caller runs the block under `jax.checkpoint`. If not, the block checkpoints itself: it saves
    neither gathered arrays nor results of reshapes, casts and transposes."""
    values: PyTree = None
    """For each array, the array's values if `inner` holds the array's gradient proxy, else None. A single None stands
    for all arrays."""
    steps: TorusSteps = eqx.field(static=True, default=TorusSteps())
    """Steps in which arrays are gathered over a torus, and gradients scattered (`Placement.torus_steps`)."""

    def __call__(self, *args: PyTree) -> PyTree:
        """Call the block."""
        arrays, static = eqx.partition(self.inner, eqx.is_array)

        def run(arrays: PyTree, values: PyTree, args: tuple[PyTree, ...]) -> PyTree:
            return eqx.combine(self._gather(arrays, values), static)(*args)

        if not self.is_checkpointed:
            run = jax.checkpoint(run, policy=_saves_all_but_gathered, prevent_cse=False)
        return run(arrays, self.values, args)

    def init_cache(self, *args: PyTree) -> PyTree:
        """Return the block's empty cache."""
        arrays, static = eqx.partition(self.inner, eqx.is_array)
        return eqx.combine(self._gather(arrays, self.values), static).init_cache(*args)

    def _gather(self, arrays: PyTree, values: PyTree) -> PyTree:
        leaves, structure = jax.tree.flatten(arrays)
        values = (None,) * len(leaves) if values is None else values
        columns = zip(leaves, self.dims, self.dtypes, values, strict=True)
        return jax.tree.unflatten(structure, [gather(*row, self.steps) for row in columns])


class Scattered(nn.Module):
    """Block whose gradients differ from its arrays in dtype (16-bit arrays) or shape (scattered by ZeRO-2).

    `inner` is the block with gradient proxies for such arrays. `values` has, for each array, the array's values if
    `inner` holds a proxy, else None. `dims` has, for each array, the dim along which its gradient is scattered as soon
    as it is computed, or None. `steps` has the meaning of `Gathered.steps`.
    """

    inner: PyTree
    values: PyTree
    dims: tuple[int | None, ...] = eqx.field(static=True)
    steps: TorusSteps = eqx.field(static=True, default=TorusSteps())

    def __call__(self, *args: PyTree) -> PyTree:
        """Call the block."""
        return self._with_values()(*args)

    def init_cache(self, *args: PyTree) -> PyTree:
        """Return the block's empty cache."""
        return self._with_values().init_cache(*args)

    def _with_values(self) -> PyTree:
        arrays, static = eqx.partition(self.inner, eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)
        columns = zip(self.values, leaves, self.dims, strict=True)
        valued = [
            leaf if value is None else route_gradient(value, leaf, dim, self.steps) for value, leaf, dim in columns
        ]
        return eqx.combine(jax.tree.unflatten(structure, valued), static)


def _saves_all_but_gathered(primitive: Primitive, *_: object, **parameters: object) -> bool:
    """Return whether `jax.checkpoint` saves the result of a primitive.

    The results of all-gathers over `fsdp` are not saved. Reshapes, casts and transposes are not saved either, because
    they cost little to redo.
    """
    is_gather = primitive.name.startswith("all_gather") and parameters.get("axis_name") == (FSDP,)
    return not is_gather and primitive.name not in ("reshape", "convert_element_type", "transpose")


# Gathers over `fsdp`, and gradient proxies.

_ONE_STEP = TorusSteps()


def has_wider_grad(x: object) -> bool:
    """Return whether an array is narrower than its gradient: floating-point numbers of 16 bits or fewer."""
    return nn.is_trainable(x) and nn.at_least_float32(x.dtype) != x.dtype  # type: ignore[attr-defined]


def grad_proxy(x: Array) -> Array:
    """Return zeros of an array's shape and its gradient's dtype."""
    return vary_like(jnp.zeros(x.shape, nn.at_least_float32(x.dtype)), x)


def route_gradient(value: Array, proxy: Array, dim: int | None = None, steps: TorusSteps = _ONE_STEP) -> Array:
    """Return `value`, and send its gradient to `proxy`: unchanged, or reduce-scattered along `dim` if `dim` is set."""
    return _route(dim, steps, vary_like(value, proxy), proxy)


def gather(
    leaf: Array,
    dim: int | None,
    dtype: str,
    value: Array | None = None,
    steps: TorusSteps = _ONE_STEP,
    result_dtype: str | None = None,
) -> Array:
    """All-gather an array that `fsdp` splits along `dim`, in `dtype`; reduce its gradient in float32 at least.

    If `leaf` is a gradient proxy, `value` is the parameter. `steps` are `Placement.torus_steps`. With
    `result_dtype`, the gathered array is cast to that dtype, and its gradient arrives in that dtype.
    """
    if dim is None:
        return leaf if value is None else route_gradient(value, leaf)
    if not nn.is_trainable(leaf):
        return _gather_forward(dim, dtype, steps, result_dtype or dtype, None, leaf)
    return _gather(dim, dtype, steps, result_dtype or dtype, None if value is None else vary_like(value, leaf), leaf)


def scatter(gradient: Array, dim: int, steps: TorusSteps = _ONE_STEP) -> Array:
    """Reduce-scatter the devices' partial gradients over `fsdp` along `dim`, in float32 at least.

    The gradient is scattered at once, or in the `steps` of `Placement.torus_steps`.
    """
    wide = gradient.astype(nn.at_least_float32(gradient.dtype))
    return send.psum_scatter("gradients over fsdp", wide, FSDP, dim, steps=steps.scatter)


def _gather_forward(
    dim: int, dtype: str, steps: TorusSteps, result_dtype: str, value: Array | None, leaf: Array
) -> Array:
    shard = (leaf if value is None else value).astype(dtype)
    return send.all_gather("weights over fsdp", shard, FSDP, dim, steps=steps.gather).astype(result_dtype)


def _gather_with_residuals(
    dim: int, dtype: str, steps: TorusSteps, result_dtype: str, value: Array | None, leaf: Array
) -> tuple[Array, Array]:
    return _gather_forward(dim, dtype, steps, result_dtype, value, leaf), jnp.zeros((), leaf.dtype)


def _gather_backward(
    dim: int, dtype: str, steps: TorusSteps, result_dtype: str, dtype_holder: Array | np.ndarray, gradient: Array
) -> tuple[None, Array]:
    return None, scatter(gradient, dim, steps).astype(dtype_holder.dtype)


_gather = jax.custom_vjp(_gather_forward, nondiff_argnums=(0, 1, 2, 3))
_gather.defvjp(_gather_with_residuals, _gather_backward)


def _route_forward(dim: int | None, steps: TorusSteps, value: Array, proxy: Array) -> Array:
    return value


def _route_with_residuals(dim: int | None, steps: TorusSteps, value: Array, proxy: Array) -> tuple[Array, Array]:
    return value, jnp.zeros((), proxy.dtype)


def _route_backward(
    dim: int | None, steps: TorusSteps, dtype_holder: Array | np.ndarray, gradient: Array
) -> tuple[None, Array]:
    return None, (gradient if dim is None else scatter(gradient, dim, steps)).astype(dtype_holder.dtype)


_route = jax.custom_vjp(_route_forward, nondiff_argnums=(0, 1))
_route.defvjp(_route_with_residuals, _route_backward)


# Gathers of small parameters that the axis `tensor` splits.


def gather_parameter(leaf: Shaped[Array, "..."], dim: int) -> Shaped[Array, "..."]:
    """All-gather a parameter that is split along `dim` over `tensor`; sum its gradient in float32 at least."""
    gather_leaf = _gather_over_tensor if is_trainable(leaf) else _gather_over_tensor_forward
    return gather_leaf(dim % leaf.ndim, leaf)


def gather_module(module: PyTree, dims: tuple[int | None, ...]) -> PyTree:
    """All-gather a module's arrays, each along its entry of `dims`; None leaves an array unchanged."""
    arrays, static = eqx.partition(module, eqx.is_array)
    leaves, structure = jax.tree.flatten(arrays)
    pairs = zip(leaves, dims, strict=True)
    gathered = [x if dim is None else gather_parameter(x, dim) for x, dim in pairs]
    return eqx.combine(structure.unflatten(gathered), static)


def _gather_over_tensor_forward(dim: int, leaf: Array) -> Array:
    return send.all_gather("weights over tensor", leaf, TENSOR, dim)


def _gather_over_tensor_with_residuals(dim: int, leaf: Array) -> tuple[Array, None]:
    return _gather_over_tensor_forward(dim, leaf), None


def _gather_over_tensor_backward(dim: int, _: None, gradient: Array) -> tuple[Array]:
    wide = gradient.astype(at_least_float32(gradient.dtype))
    total = send.psum_scatter("weights over tensor", wide, TENSOR, dim)
    return (total.astype(gradient.dtype),)


_gather_over_tensor = jax.custom_vjp(_gather_over_tensor_forward, nondiff_argnums=(0,))
_gather_over_tensor.defvjp(_gather_over_tensor_with_residuals, _gather_over_tensor_backward)
