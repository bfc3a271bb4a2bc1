"""Arrays created where they belong: no device, and no host, ever holds a whole model."""

from collections.abc import Callable

import equinox as eqx
import jax
from jaxtyping import PyTree

from ..._prepare import run_once
from ..._shapes import is_shape


def init_sharded(
    make: Callable[..., PyTree], shardings: Callable[[PyTree], PyTree], *args: PyTree, shapes: PyTree | None = None
) -> PyTree:
    """`make(*args)` computed by all devices together, each its own pieces.

    `shardings` maps the shapes of the result to a tree of `NamedSharding`s; where these `shapes` are known already,
    `make` is traced once and not twice. Random numbers are functions of a key and a place in the array, so the values
    are those of one device, whatever the mesh.
    """
    shapes = eqx.filter_eval_shape(make, *args) if shapes is None else shapes
    lowered = lower_sharded(make, shardings, *args, shapes=shapes)
    run = lowered.compile(compiler_options=run_once(jax.default_backend()))
    rest = eqx.filter(shapes, is_shape, inverse=True)
    return eqx.combine(run(), rest)


def lower_sharded(
    make: Callable[..., PyTree], shardings: Callable[[PyTree], PyTree], *args: PyTree, shapes: PyTree | None = None
) -> jax.stages.Lowered:
    """The program of `init_sharded`, lowered: `.compile().memory_analysis()` gives what each device needs."""
    shapes = eqx.filter_eval_shape(make, *args) if shapes is None else shapes
    with jax.default_device(None):
        return jax.jit(lambda: eqx.filter(make(*args), eqx.is_array), out_shardings=shardings(shapes)).lower()
