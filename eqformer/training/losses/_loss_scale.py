"""Dynamic loss scaling: keeps the gradients within float16's range, 6e-8 to 65,504, while they are computed."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from ... import nn


MAX_SCALE = 2.0**24
Scale = Float[Array, ""] | None  # a `LossScale`'s value


class LossScale(eqx.Module):
    """The power of two by which the loss, a mean over tokens, is multiplied before it is differentiated.

    A step whose gradients are not finite halves the scale (to 1 at least); `interval` steps in a row with finite
    gradients double it (to 2^24 at most; Micikevicius et al., arXiv:1710.03740). Gradients are divided by the scale as
    soon as they are float32.
    """

    value: Float[Array, ""]
    """The factor."""
    finite_in_a_row: Int[Array, ""]
    """The number of steps with finite gradients since the scale last changed."""
    interval: int = eqx.field(static=True, default=2000)
    """The number of such steps after which the scale doubles."""

    def advance(self, is_finite: Bool[Array, ""]) -> "LossScale":
        """Return the scale for the next step, after a step with these gradients."""
        finite_in_a_row = (self.finite_in_a_row + 1) * is_finite.astype(jnp.int32)
        is_due = finite_in_a_row >= self.interval
        factor = jnp.where(is_finite, jnp.where(is_due, 2.0, 1.0), 0.5)
        value = jnp.clip(self.value * factor, 1.0, MAX_SCALE)
        return LossScale(value, jnp.where(is_due, 0, finite_in_a_row), self.interval)


def init_loss_scale(model: PyTree) -> LossScale | None:
    """Return the scale before the first step, 2^16; None for a model without float16 in parameters or compute dtype."""
    is_model = lambda node: isinstance(node, nn.LanguageModel)
    models = [node for node in jax.tree.leaves(model, is_leaf=is_model) if is_model(node)]
    dtypes = {jnp.dtype(node.compute_dtype) for node in models}
    dtypes |= {jnp.dtype(x.dtype) for x in jax.tree.leaves(model) if nn.is_trainable(x)}
    if jnp.dtype("float16") not in dtypes:
        return None
    return LossScale(jnp.full((), 2.0**16, jnp.float32), jnp.zeros((), jnp.int32))


def loss_cotangent(scale: Scale, batch: PyTree) -> Float[Array, ""] | int:
    """Return the cotangent of the summed loss: about `scale` over the number of tokens, a power of two; 1 for no scale.

    The number of tokens is the size of the batch's first array.
    """
    if scale is None:
        return 1
    tokens = max((x.size for x in jax.tree.leaves(batch)[:1]), default=1)
    return scale * 2.0 ** -(max(tokens, 1) - 1).bit_length()


def unscale_gradients(gradients: PyTree, cotangent: Float[Array, ""] | int) -> PyTree:
    """Divide gradients, which are float32 or wider, by the cotangent of the loss with which they were computed."""
    if isinstance(cotangent, int):
        return gradients
    return jax.tree.map(lambda x: x * (1 / cotangent).astype(x.dtype), gradients)
