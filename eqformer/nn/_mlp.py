"""Dense and gated feed-forward layers, activation functions by name, and an activation with parameters.

Activations are functions of this file rather than lambdas, so that static fields of equal modules compare equal.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ._contracts import FeedForward
from ._dtype import at_least_float32
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


@dataclasses.dataclass(frozen=True)
class BoundedActivation:
    """`min(activation(x), limit)`, for gates that are bounded after their activation (Step 3.7)."""

    activation: Callable[[Array], Array]
    """An elementwise function."""
    limit: float
    """The largest result."""

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the activation of `x`, at most `limit`."""
        return jnp.minimum(self.activation(x), self.limit)


@dataclasses.dataclass(frozen=True)
class SiTU:
    """`limit tanh(x / limit) sigmoid(x)`, a silu whose linear factor is bounded (Kimi K3), in float32 at least."""

    limit: float
    """The bound of the linear factor."""

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the activation of `x`."""
        wide = x.astype(at_least_float32(x.dtype))
        return (self.limit * jnp.tanh(wide / self.limit) * jax.nn.sigmoid(wide)).astype(x.dtype)


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


class XIELU(eqx.Module):
    """An activation with two learned scalars, quadratic above 0 and an ELU with a slope below (Huang and Schlag 2024).

    It is `a x^2 + beta x` for positive `x`, and `b (expm1(min(x, eps)) - x) + beta x` for others, where
    `a = softplus(alpha_p)` and `b = beta + softplus(alpha_n)` (arXiv:2411.13010; the activation of Apertus). It is
    computed in float32, so that the gradients of the two scalars are summed over tokens in float32.
    """

    alpha_p: Float[Array, ""]
    alpha_n: Float[Array, ""]
    beta: Float[Array, ""]
    """The slope at 0; published beside the learned scalars, but not learned."""
    eps: Float[Array, ""]
    """The largest argument of `expm1`, a negative number; not learned."""

    def __init__(self):
        """Begin with `a = b = 0.8`, as in the paper."""
        self.alpha_p, self.alpha_n = (jnp.log(jnp.expm1(jnp.float32(value))) for value in (0.8, 0.8 - 0.5))
        self.beta, self.eps = jnp.float32(0.5), jnp.float32(-1e-6)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the activation of each entry of `x`, in the dtype of `x`."""
        dtype = at_least_float32(x.dtype)
        wide, alpha_p, alpha_n = (array.astype(dtype) for array in (x, self.alpha_p, self.alpha_n))
        beta, eps = (jax.lax.stop_gradient(array).astype(dtype) for array in (self.beta, self.eps))
        positive = jax.nn.softplus(alpha_p) * jnp.square(wide)
        negative = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(jnp.minimum(wide, eps)) - wide)
        return (jnp.where(wide > 0, positive, negative) + beta * wide).astype(x.dtype)


class FixedActivation(eqx.Module):
    """An activation without parameters. Its function is no leaf, so that all leaves of a model are arrays."""

    function: Callable[[Array], Array] = eqx.field(static=True)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the function of `x`."""
        return self.function(x)


def _as_module(activation: Callable[[Array], Array]) -> Callable[[Array], Array]:
    is_function = jax.tree_util.all_leaves([activation])  # Modules are no leaves.
    return FixedActivation(activation) if is_function else activation


def recompute_in_backward(function: Callable[..., Array]) -> Callable[..., Array]:
    """Return the elementwise function under `jax.checkpoint`: recomputing it is cheaper than keeping its results."""
    return jax.checkpoint(function, prevent_cse=False)


# The activation is an argument, since its parameters, if it has any, have gradients.
def _activate(activation: Callable[[Array], Array], x: Array) -> Array:
    return activation(x)


def _softcap(limit: float, up: Array) -> Array:
    wide = up.astype(at_least_float32(up.dtype))
    return (limit * jnp.tanh(wide / limit)).astype(up.dtype)


def _multiply_by_gate(activation: Callable[[Array], Array], gate: Array, up: Array) -> Array:
    return activation(gate) * up


class MLP(FeedForward):
    """`W_down act(W_up x)`."""

    up: LinearMap
    down: LinearMap
    activation: Callable[[Array], Array]

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
            activation: An elementwise function, or a module with parameters (`XIELU`).
            bias: Whether the maps have biases.
            output_std: Standard deviation of the last map's weights; None: as for the other maps.
            key: Random key for the weights.
        """
        up, down = jax.random.split(key)
        self.up = Linear("embed -> mlp", embed=embed, mlp=mlp, bias=bias, key=up)
        self.down = Linear("mlp -> embed", embed=embed, mlp=mlp, bias=bias, std=output_std, key=down)
        self.activation = _as_module(activation)

    def __call__(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Map each token by itself."""
        return self.down(recompute_in_backward(_activate)(self.activation, self.up(x)))


class GatedMLP(FeedForward):
    """`W_down (act(W_gate x) * W_up x)` (Shazeer 2020): SwiGLU with silu, GeGLU with gelu."""

    gate: LinearMap
    up: LinearMap
    down: LinearMap
    activation: Callable[[Array], Array]
    limit: float | None = eqx.field(static=True)
    up_limit: float | None = eqx.field(static=True)
    up_softcap: float | None = eqx.field(static=True)
    offset: float = eqx.field(static=True)

    def __init__(
        self,
        *,
        embed: int,
        mlp: int,
        activation: Callable[[Array], Array] = silu,
        bias: bool = False,
        limit: float | None = None,
        up_limit: float | None = None,
        up_softcap: float | None = None,
        offset: float = 0.0,
        output_std: float | None = None,
        key: Key[Array, ""],
    ):
        """Initialize the three maps.

        Args:
            embed: Channels of the input and the output.
            mlp: Hidden features.
            activation: An elementwise function, or a module with parameters (`XIELU`).
            bias: Whether the maps have biases.
            limit: A bound that keeps activations from growing without limit (gpt-oss): the gate is at most `limit`, and
                the result of `up` is between `-limit` and `limit`.
            up_limit: The bound of the result of `up`; None: `limit`. Without a `limit`, a `BoundedActivation` bounds
                the gate after its activation (Step 3.7).
            up_softcap: A smooth bound of the result of `up`, `up_softcap * tanh(up / up_softcap)` (Kimi K3).
            offset: Added to the result of `up` (gpt-oss: 1).
            output_std: Standard deviation of the last map's weights; None: as for the other maps.
            key: Random key for the weights.
        """
        gate, up, down = jax.random.split(key, 3)
        self.gate = Linear("embed -> mlp", embed=embed, mlp=mlp, bias=bias, key=gate)
        self.up = Linear("embed -> mlp", embed=embed, mlp=mlp, bias=bias, key=up)
        self.down = Linear("mlp -> embed", embed=embed, mlp=mlp, bias=bias, std=output_std, key=down)
        self.activation, self.offset = _as_module(activation), offset
        self.limit, self.up_limit, self.up_softcap = limit, limit if up_limit is None else up_limit, up_softcap

    def __call__(self, x: Float[Array, "*batch seq embed"]) -> Float[Array, "*batch seq embed"]:
        """Map each token by itself."""
        gate, up = self.gate(x), self.up(x)
        gate = gate if self.limit is None else jnp.minimum(gate, self.limit)
        up = up if self.up_limit is None else jnp.clip(up, -self.up_limit, self.up_limit)
        up = up if self.up_softcap is None else recompute_in_backward(functools.partial(_softcap, self.up_softcap))(up)
        up = up + self.offset if self.offset else up
        return self.down(recompute_in_backward(_multiply_by_gate)(self.activation, gate, up))
