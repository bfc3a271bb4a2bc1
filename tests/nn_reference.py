"""Plain float64 references in numpy, random parameters, and the recorded fixtures, for the tests of `eqformer.nn`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haste import put


FIXTURES = Path(__file__).parent / "fixtures"


def normal(seed: int, *shape: int) -> jax.Array:
    """Return random float32 numbers."""
    return put(np.random.default_rng(seed).normal(size=shape), np.float32)


def randomised(module: Any, seed: int = 0, deviation: float = 0.5) -> Any:
    """Return the module with every floating-point leaf sampled anew, so that no bias is 0 and no scale is 1.

    The module may consist of shapes only (`equinox.filter_eval_shape`); JAX then compiles no random draws.
    """
    rng = np.random.default_rng(seed)

    def fresh(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jnp.integer):
            return put(np.broadcast_to(np.arange(leaf.shape[-1]), leaf.shape), leaf.dtype)  # a stack's layer numbers
        if isinstance(leaf, jax.ShapeDtypeStruct) or eqx.is_inexact_array(leaf):
            return put(rng.normal(size=leaf.shape) * deviation, leaf.dtype)
        return leaf

    return jax.tree.map(fresh, module)


def random_module(make: Any, *args: Any, **options: Any) -> Any:
    """Return `randomised(make(*args, **options))`, without drawing random numbers twice."""
    return randomised(eqx.filter_eval_shape(lambda: make(*args, **options)))


def replaced(module: Any, **changes: Any) -> Any:
    """Return the module with other fields, static fields too, without calling the constructor."""
    fresh = object.__new__(type(module))
    for field in dataclasses.fields(module):
        object.__setattr__(fresh, field.name, changes.get(field.name, getattr(module, field.name)))
    return fresh


def wide(x: Any) -> np.ndarray:
    """Return an array as float64."""
    return np.asarray(x).astype(np.float64)


def linear(x: np.ndarray, module: Any) -> np.ndarray:
    """Return the expected output of a `Linear`, computed by one matrix."""
    outputs, inputs = len(module.outputs), len(module.inputs)
    weight = wide(module.weight)
    out, into = weight.shape[:outputs], weight.shape[outputs:]
    lead = x.shape[: x.ndim - inputs]
    y = x.reshape(-1, int(np.prod(into))) @ weight.reshape(int(np.prod(out)), -1).T
    y = y.reshape(*lead, *out)
    return y if module.bias is None else y + wide(module.bias)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """Return `1 / (1 + exp(-x))`."""
    return 1 / (1 + np.exp(-x))


def convolved(conv: Any, y: np.ndarray) -> np.ndarray:
    """Return silu of the expected output of a `CausalConv` without a bias, for rows of one document."""
    weight = wide(conv.weight)
    taps = weight.shape[-1]
    padded = np.concatenate([np.zeros((len(y), taps - 1, *y.shape[2:])), y], axis=1)
    found = np.sum([padded[:, tap : tap + y.shape[1]] * weight[..., tap] for tap in range(taps)], axis=0)
    return found * sigmoid(found)


def rms(x: np.ndarray, module: Any) -> np.ndarray:
    """Return the expected output of an `RMSNorm` over its trailing dims."""
    axes = tuple(range(-len(module.dims), 0))
    y = x / np.sqrt((x * x).mean(axis=axes, keepdims=True) + module.eps)
    y = y if module.weight is None else y * (module.offset + wide(module.weight))
    return y if module.shift is None else y + wide(module.shift)


def rotate(
    x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray, interleaved: bool = False, magnitude: float = 1.0
) -> np.ndarray:
    """Apply rotary positions as products of complex numbers; `x` is `batch seq heads head_dim`."""
    half = len(frequencies)
    y = x.copy()
    for batch, seq, head, pair in np.ndindex(*x.shape[:3], half):
        first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        number = complex(x[batch, seq, head, first], x[batch, seq, head, second])
        number *= magnitude * np.exp(1j * float(positions[batch, seq]) * frequencies[pair])
        y[batch, seq, head, first], y[batch, seq, head, second] = number.real, number.imag
    return y


def attend(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    visible: np.ndarray,
    scale: float,
    sinks: np.ndarray | None = None,
    softcap: float | None = None,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    """Compute softmax attention by loops; arrays are `batch seq heads head_dim`, `visible` is `batch seq kv_seq`.

    A `bias` is `batch heads seq kv_seq`.
    """
    batch, seq, heads, _ = query.shape
    group = heads // key.shape[2]
    output = np.zeros((batch, seq, heads, value.shape[-1]))
    for b, i, h in np.ndindex(batch, seq, heads):
        seen = [j for j in range(key.shape[1]) if visible[b, i, j]]
        scores = np.array([query[b, i, h] @ key[b, j, h // group] * scale for j in seen])
        scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
        scores = scores if bias is None else scores + bias[b, h, i, seen]
        weights = np.exp(scores)
        total = weights.sum() + (0 if sinks is None else np.exp(sinks[h]))
        for weight, j in zip(weights, seen):
            output[b, i, h] += weight / total * value[b, j, h // group]
    return output


def golden(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of a fixture by name."""
    with np.load(FIXTURES / f"{name}.npz") as arrays:
        return dict(arrays)


def golden_table(name: str) -> Any:
    """Return a fixture of numbers and settings."""
    return json.loads((FIXTURES / f"{name}.json").read_text())


def golden_case(name: str) -> tuple[jax.Array, np.ndarray, dict[str, np.ndarray]]:
    """Return input, output and weights of one module of transformers."""
    arrays = golden("modules")
    prefix = f"{name}/weights/"
    weights = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
    return jnp.asarray(arrays[f"{name}/x"]), arrays[f"{name}/y"], weights


def close(actual: Any, expected: Any, tolerance: float = 2e-5) -> bool:
    """Return whether the largest difference, relative to the largest expected number, is within the tolerance."""
    actual, expected = wide(actual), wide(expected)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    return bool(np.max(np.abs(actual - expected)) <= tolerance * max(1.0, np.max(np.abs(expected))))
