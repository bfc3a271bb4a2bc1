"""Dtypes of parameters and computation."""

import jax
import jax.numpy as jnp
import pytest

from eqformer import nn
from eqformer.nn._dtype import at_least_float32


def test_cast_touches_floating_point_arrays_alone():
    tree = {"a": jnp.ones(2), "n": jnp.arange(2), "key": jax.random.key(0), "f": jnp.sin, "none": None, "x": 1.5}
    half = nn.cast(tree, "bfloat16")
    assert half["a"].dtype == jnp.bfloat16 and half["n"] is tree["n"] and half["key"] is tree["key"]
    assert half["f"] is jnp.sin and half["none"] is None and half["x"] == 1.5


@pytest.mark.parametrize("field", ["parameters", "compute"])
def test_dtypes_are_floating_point(field):
    with pytest.raises(ValueError, match=rf"Precision\({field}='int32'\): give a floating-point dtype"):
        nn.Precision(**{field: "int32"})
    assert nn.Precision() == nn.Precision("float32", "float32")


def test_reductions_are_float32_at_least():
    found = {name: str(at_least_float32(jnp.dtype(name))) for name in ("bfloat16", "float16", "float32", "float64")}
    assert found == {"bfloat16": "float32", "float16": "float32", "float32": "float32", "float64": "float64"}
