"""What a checkpoint keeps beside arrays, so that a run can be resumed exactly."""

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key


_PACKAGES = ("eqformer", "jax", "equinox", "optax", "orbax-checkpoint")


def run_metadata(
    *, recipe: Mapping[str, Any], step: int, data: Mapping[str, Any], key: Key[Array, ""], **more: Any
) -> dict[str, Any]:
    """The metadata of a run: its recipe, the step, the position in the data and the random key, all JSON."""
    raw = np.asarray(jax.random.key_data(key)).tolist()
    random_key = {"implementation": str(jax.random.key_impl(key)), "data": raw}
    return {"recipe": dict(recipe), "step": step, "data": dict(data), "random_key": random_key, **more}


def saved_key(metadata: Mapping[str, Any]) -> Key[Array, ""]:
    """The random key that `run_metadata` wrote."""
    saved = metadata["random_key"]
    return jax.random.wrap_key_data(jnp.asarray(saved["data"], jnp.uint32), impl=saved["implementation"])


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """The installed versions of packages, by default of those on which a run's numbers depend."""

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    return {package: of(package) for package in packages}
