"""Dense and gated feed-forward layers."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ._activation import gelu_tanh, silu
from ._contracts import FeedForward
from ._linear import Linear, LinearMap


class MLP(FeedForward):
    """`W_down act(W_up x)`."""

    up: LinearMap
    down: LinearMap
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        mlp: int,
        activation: Callable[[Array], Array] = gelu_tanh,
        bias: bool = False,
        output_std: float | None = None,
        key: Key[Array, ""],
    ):
        """Draw the two maps.

        Args:
            embed: Channels of the input and the output.
            mlp: Hidden features.
            activation: Any elementwise function.
            bias: Whether the maps have biases.
            output_std: Standard deviation of the last map's weights; None: as for the other maps.
            key: For the weights.
        """
        up, down = jax.random.split(key)
        self.up = Linear("embed -> mlp", embed=embed, mlp=mlp, bias=bias, key=up)
        self.down = Linear("mlp -> embed", embed=embed, mlp=mlp, bias=bias, std=output_std, key=down)
        self.activation = activation

    def __call__(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Map each token by itself."""
        return self.down(recompute_in_backward(self.activation)(self.up(x)))


class GatedMLP(FeedForward):
    """`W_down (act(W_gate x) * W_up x)` (Shazeer 2020): SwiGLU with silu, GeGLU with gelu."""

    gate: LinearMap
    up: LinearMap
    down: LinearMap
    activation: Callable[[Array], Array] = eqx.field(static=True)
    limit: float | None = eqx.field(static=True)
    offset: float = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        mlp: int,
        activation: Callable[[Array], Array] = silu,
        bias: bool = False,
        limit: float | None = None,
        offset: float = 0.0,
        output_std: float | None = None,
        key: Key[Array, ""],
    ):
        """Draw the three maps.

        Args:
            embed: Channels of the input and the output.
            mlp: Hidden features.
            activation: Any elementwise function.
            bias: Whether the maps have biases.
            limit: A bound on the gate from above and on the other factor on both sides, against runaway activations
                (gpt-oss).
            offset: Added to the other factor (gpt-oss: 1).
            output_std: Standard deviation of the last map's weights; None: as for the other maps.
            key: For the weights.
        """
        gate, up, down = jax.random.split(key, 3)
        self.gate = Linear("embed -> mlp", embed=embed, mlp=mlp, bias=bias, key=gate)
        self.up = Linear("embed -> mlp", embed=embed, mlp=mlp, bias=bias, key=up)
        self.down = Linear("mlp -> embed", embed=embed, mlp=mlp, bias=bias, std=output_std, key=down)
        self.activation, self.limit, self.offset = activation, limit, offset

    def __call__(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Map each token by itself."""
        gate, up = self.gate(x), self.up(x)
        if self.limit is not None:
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        up = up + self.offset if self.offset else up
        return self.down(recompute_in_backward(lambda gate, up: self.activation(gate) * up)(gate, up))


def recompute_in_backward(function: Callable[..., Array]) -> Callable[..., Array]:
    """Return the elementwise function under `jax.checkpoint`: recomputing it is cheaper than keeping its results."""
    return jax.checkpoint(function, prevent_cse=False)
