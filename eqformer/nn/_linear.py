"""A linear map between named dims."""

import math

import einops
import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from ._dims import named_by
from ._sums import wide_sum


class Linear(eqx.Module):
    """`y = W x + b` over named dims: `Linear("embed -> heads head_dim", embed=512, heads=8, head_dim=64, key=key)`.

    The weight's dims are the outputs, then the inputs (`heads head_dim embed`), as published checkpoints have them, and
    the same names contract it: `... embed, heads head_dim embed -> ... heads head_dim`. Sizes are read off the weight,
    so the map runs on any slice of itself. The weight is cast to the input's dtype where it is used.
    """

    outputs: tuple[str, ...] = eqx.field(static=True)
    inputs: tuple[str, ...] = eqx.field(static=True)
    weight: Float[Array, "..."] = named_by("weight_dims")
    bias: Float[Array, "..."] | None = named_by("outputs")

    def __init__(self, spec: str, *, bias: bool = False, std: float | None = None, key: Key[Array, ""], **sizes: int):
        """Draw the weight from a normal distribution of deviation `std`, by default 1/sqrt(product of the input sizes).

        `spec` is `"inputs -> outputs"`; every dim it names gets its size by keyword. Raises a `ValueError` where
        `spec` and the sizes do not fit.
        """
        self.inputs, self.outputs = _parse(spec, sizes)
        fan_in = math.prod(sizes[dim] for dim in self.inputs)
        deviation = fan_in**-0.5 if std is None else std
        self.weight = deviation * jax.random.normal(key, [sizes[dim] for dim in self.weight_dims], jnp.float32)
        self.bias = jnp.zeros([sizes[dim] for dim in self.outputs], jnp.float32) if bias else None

    @property
    def weight_dims(self) -> tuple[str, ...]:
        """Names of the weight's dims: the outputs, then the inputs."""
        return self.outputs + self.inputs

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Map the trailing input dims of `x` to the output dims; leading dims stay."""
        wanted = self.weight.shape[len(self.outputs) :]
        if x.shape[-len(wanted) :] != wanted:
            spec = f"{' '.join(self.inputs)} -> {' '.join(self.outputs)}"
            raise ValueError(
                f"Linear({spec!r})(x): the last dims of x must be {dict(zip(self.inputs, wanted))}; "
                f"x has shape {x.shape}."
            )
        inputs, outputs = " ".join(self.inputs), " ".join(self.outputs)
        pattern = f"... {inputs}, {outputs} {inputs} -> ... {outputs}"
        y = einops.einsum(x, self.weight.astype(x.dtype), pattern)
        return wide_sum(y, self.bias)


def _parse(spec: str, sizes: dict[str, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    inputs, arrow, outputs = spec.partition("->")
    names = inputs.split() + outputs.split()
    if not arrow or not inputs.split() or not outputs.split():
        raise ValueError(
            f'Linear({spec!r}): the spec must read "inputs -> outputs", such as "embed -> heads head_dim".'
        )
    if len(set(names)) != len(names):
        raise ValueError(f"Linear({spec!r}): each dim needs a name of its own; rename the repeated one.")
    if set(names) != set(sizes):
        raise ValueError(f"Linear({spec!r}): the sizes given are {sorted(sizes)}; the spec names {sorted(names)}.")
    return tuple(inputs.split()), tuple(outputs.split())
