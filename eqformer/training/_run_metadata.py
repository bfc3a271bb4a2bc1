"""What a checkpoint keeps beside arrays, so that a run can be resumed exactly."""

import json
import math
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


def as_json(metadata: Mapping[str, Any]) -> str:
    """Metadata and the installed versions as JSON; a `ValueError` names what JSON has no word for."""
    _check("metadata", dict(metadata))
    return json.dumps(dict(metadata) | {"versions": versions()}, allow_nan=False)


def _check(path: str, value: object) -> None:
    if isinstance(value, dict):
        for name, one in value.items():
            _check(f"{path}[{name!r}]", one)
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            _check(f"{path}[{number}]", one)
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(
            f"Checkpointer.save(metadata): {path} is {value}, which is no number of JSON; save None or text."
        )
    elif not isinstance(value, str | int | float | None):
        raise ValueError(
            f"Checkpointer.save(metadata): {path} is of {type(value).__name__}, which JSON does not have; save a "
            "number of Python's (`float(x)`, `x.tolist()`), or text."
        )


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """The installed versions of packages, by default of those on which a run's numbers depend."""

    def of(package: str) -> str:
        try:
            return version(package)
        except PackageNotFoundError:
            return "not installed"

    return {package: of(package) for package in packages}
