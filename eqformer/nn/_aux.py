"""What routed layers return beside their output."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from ._dims import modules


class Aux(eqx.Module):
    """The auxiliary losses and counts of a mixture of experts, each a sum over the tokens of a call without padding.

    In a stack, each array has a `layers` dim in front. `loss` is added to the sum of the tokens' losses; `load` counts
    the choices of each expert, also those dropped; `entropy` sums the entropy of each token's scores, in nats.
    """

    loss: Float[Array, "*layers"]
    load: Int[Array, "*layers experts"]
    dropped: Int[Array, "*layers"]
    entropy: Float[Array, "*layers"]
    tokens: Int[Array, "*layers"]


def aux_of(aux: PyTree) -> list[Aux]:
    """Every `Aux` in what a model or a part of one returned as aux, in the order of its layers."""
    return modules(aux, Aux)


def aux_loss(aux: PyTree) -> Float[Array, ""]:
    """The sum of all losses of routed layers; zero where there are none."""
    first, *others = [jnp.sum(one.loss) for one in aux_of(aux)] or [jnp.zeros((), jnp.float32)]
    return sum(others, start=first)
