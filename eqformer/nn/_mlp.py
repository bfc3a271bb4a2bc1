"""Dense and gated feed-forward layers, and activation functions by name.

Activations are functions of this file rather than lambdas, so that static fields of equal modules compare equal.
"""

import dataclasses
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ._contracts import FeedForward
from ._linear import Linear, LinearMap


@jax.custom_jvp
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `x Phi(x)` with the exact normal distribution function `Phi` (Hendrycks and Gimpel 2016)."""
    return jax.nn.gelu(x, approximate=False)


@gelu.defjvp
def _gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """Return the value and the tangent, `(Phi(x) + x exp(-x^2 / 2) / sqrt(2 pi)) dx`.

    The derivative is written out because JAX 0.12's own derivative of erf does not run within `shard_map`.
    """
    (x,), (dx,) = primals, tangents
    phi = jax.lax.erfc(-x * x.dtype.type(0.5**0.5)) * x.dtype.type(0.5)
    slope = phi + x * jnp.exp(-jnp.square(x) * x.dtype.type(0.5)) * x.dtype.type((2 * math.pi) ** -0.5)
    return gelu(x), slope * dx


def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `x (1 + tanh u) / 2`, `u = sqrt(2 / pi) (x + 0.044715 x^3)`: GPT-2's `gelu_new`, `gelu_pytorch_tanh`."""
    # Computed as the sigmoid of 2u, which keeps its digits where the tanh is near -1, and whose gradient has one
    # residual less.
    slope = 2 * math.sqrt(2 / math.pi)
    return x * jax.nn.sigmoid(x * (slope + slope * 0.044715 * jnp.square(x)))


def quick_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `x sigmoid(1.702 x)`."""
    return x * jax.nn.sigmoid(1.702 * x)


def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `x sigmoid(x)`, also called swish."""
    return jax.nn.silu(x)


def relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `max(x, 0)`."""
    return jax.nn.relu(x)


def relu_squared(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `max(x, 0)^2` (So et al. 2021)."""
    return jnp.square(jax.nn.relu(x))


def clipped_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `min(gelu(x), 10)` (transformers' `gelu_10`)."""
    return jnp.minimum(gelu(x), 10.0)  # gelu is never less than -10


def leaky_relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `max(x, x / 100)`."""
    return jax.nn.leaky_relu(x)


def relu6(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `min(max(x, 0), 6)`."""
    return jax.nn.relu6(x)


def hard_swish(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `x relu6(x + 3) / 6` (Howard et al. 2019)."""
    return jax.nn.hard_swish(x)


def mish(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `x tanh(log(1 + exp x))` (Misra 2019)."""
    return jax.nn.mish(x)


def laplace(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the distribution function of a normal of mean `sqrt(1 / 2)`, deviation `sqrt(1 / 4 pi)` (Ma et al.
    2022)."""
    return 0.5 * (1 + jax.lax.erf((x - 0.707107) / (0.282095 * math.sqrt(2))))


def tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the hyperbolic tangent."""
    return jnp.tanh(x)


def sigmoid(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `1 / (1 + exp -x)`."""
    return jax.nn.sigmoid(x)


def sqrt_softplus(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `sqrt(log(1 + exp x))`."""
    return jnp.sqrt(jax.nn.softplus(x))


def identity(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return `x`."""
    return x


@dataclasses.dataclass(frozen=True)
class ScaledActivation:
    """`activation(scale * x)`, for models that multiply the input of an activation by a constant (Falcon-H1)."""

    activation: Callable[[Array], Array]
    """An elementwise function."""
    scale: float
    """The factor of the argument."""

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the activation of `scale * x`."""
        return self.activation(x * self.scale)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": silu,
    "relu": relu,
    "relu_squared": relu_squared,
    "clipped_gelu": clipped_gelu,
    "leaky_relu": leaky_relu,
    "relu6": relu6,
    "hard_swish": hard_swish,
    "mish": mish,
    "laplace": laplace,
    "tanh": tanh,
    "sigmoid": sigmoid,
    "sqrt_softplus": sqrt_softplus,
    "identity": identity,
}


def recompute_in_backward(function: Callable[..., Array]) -> Callable[..., Array]:
    """Return the elementwise function under `jax.checkpoint`: recomputing it is cheaper than keeping its results."""
    return jax.checkpoint(function, prevent_cse=False)


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
        """Initialize the two maps.

        Args:
            embed: Channels of the input and the output.
            mlp: Hidden features.
            activation: An elementwise function.
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
        """Initialize the three maps.

        Args:
            embed: Channels of the input and the output.
            mlp: Hidden features.
            activation: An elementwise function.
            bias: Whether the maps have biases.
            limit: A bound that keeps activations from growing without limit (gpt-oss): the gate is at most `limit`, and
                the result of `up` is between `-limit` and `limit`.
            offset: Added to the result of `up` (gpt-oss: 1).
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
