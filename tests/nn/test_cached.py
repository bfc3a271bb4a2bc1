"""The kernel for GPUs by which newest tokens read a cache: its numbers as plain JAX, its gradients and its program."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from eqformer import nn
from eqformer.nn.cores import _cached
from eqformer.nn.cores._cached import attend_by_kernel, attend_cached, Read, Rules


class Case(NamedTuple):
    """Sizes, of which slots fill no whole block and channels no power of two, and what a call may have beside them."""

    mask: nn.Mask = nn.causal()
    heads: int = 6
    kv_heads: int = 2
    v_dim: int = 24
    softcap: float | None = None
    has_sinks: bool = False
    is_scaled: bool = False
    dtype: Any = jnp.bfloat16


CASES = {
    "everything": Case(nn.sliding_window(50), softcap=3.0, has_sinks=True, is_scaled=True),
    "causal": Case(),
    "one key head, sinks": Case(kv_heads=1, has_sinks=True, v_dim=16),
    "heads of their own": Case(kv_heads=6, dtype=jnp.float16),
}
SLOTS, LENGTHS = 150, (149, 20, 101)  # so that chunks are empty, and rows end within blocks


def given_of(case: Case) -> dict[str, Any]:
    """The arguments of a call."""
    rng = np.random.default_rng(0)
    rows, slots = len(LENGTHS), np.arange(SLOTS)
    wide = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(np.float32))
    keys, values = (rows, SLOTS, case.kv_heads, 24), (rows, SLOTS, case.kv_heads, case.v_dim)
    given: dict[str, Any] = {"query": wide(rows, 1, case.heads, 24).astype(case.dtype)}
    if case.is_scaled:
        codes = lambda shape: jnp.asarray(rng.integers(-127, 128, size=shape), jnp.int8)
        given |= {"key": codes(keys), "value": codes(values)}
        scales = lambda: jnp.asarray(rng.uniform(0.01, 0.02, size=keys[:3]).astype(np.float32))
        given |= {"key_scales": scales(), "value_scales": scales()}
    else:
        given |= {"key": wide(*keys).astype(case.dtype), "value": wide(*values).astype(case.dtype)}
    last = np.asarray(LENGTHS, np.int32)[:, None]
    given |= {"tokens": nn.Tokens(jnp.asarray(last)), "mask": case.mask, "scale": 0.3, "softcap": case.softcap}
    given["kv_tokens"] = nn.Tokens(jnp.asarray(np.where(slots <= last, slots, -1), jnp.int32))
    return given | {"sinks": wide(case.heads) if case.has_sinks else None}


def by_kernel(query, key, value, *, mask, tokens, kv_tokens, scale, softcap, sinks, key_scales=None, value_scales=None):
    read = Read(query, key, value, mask(tokens, kv_tokens), sinks, key_scales, value_scales)
    return attend_by_kernel(Rules(scale, softcap, interpret=True), read)


def wanted(given: dict[str, Any]) -> np.ndarray:
    """By the reference in float32, with keys and values multiplied by their scales."""
    given = {name: given[name] for name in given}
    times = [given.pop(name, None) for name in ("key_scales", "value_scales")]
    for name, factor in zip(("key", "value"), times):
        given[name] = given[name].astype(jnp.float32) * (1 if factor is None else factor[..., None])
    return np.asarray(nn.ReferenceCore()(**{**given, "query": given["query"].astype(jnp.float32)}))


@pytest.mark.parametrize("name", [next(iter(CASES)), *(pytest.param(n, marks=pytest.mark.grid) for n in [*CASES][1:])])
def test_the_kernel_is_the_reference_in_chunks(name, monkeypatch):
    monkeypatch.setattr(_cached, "_PROGRAMS", 4 * 3 * CASES[name].kv_heads)
    monkeypatch.setattr(_cached, "_TILE", 512)
    given = given_of(CASES[name])
    found, right = np.asarray(by_kernel(**given), np.float32), wanted(given)
    assert np.abs(found - right).max() < 0.01 * np.abs(right).max()
    without = given | {"kv_tokens": nn.Tokens(given["kv_tokens"].positions.at[0, 130:].set(-1))}
    assert np.abs(found - wanted(without)).max() > 0.02 * np.abs(right).max()  # the comparison sees slots


def test_gpus_run_it_over_devices_with_types_checked_and_gradients_are_the_references(monkeypatch):
    given = given_of(Case(kv_heads=2, heads=4))
    arrays, rest = {name: given.pop(name) for name in ("query", "key", "value")}, given
    mesh = jax.make_mesh((2,), ("heads",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    specs = dict.fromkeys(arrays, PartitionSpec(None, None, "heads"))
    attend = lambda arrays: attend_cached(**arrays, **rest)
    run = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(specs,), out_specs=specs["query"]))
    text = lambda platform: run.trace(arrays).lower(lowering_platforms=(platform,)).as_text()
    slope = lambda arrays: jax.grad(lambda arrays: jnp.sum(attend(arrays).astype(jnp.float32) ** 2))(arrays)["key"]
    monkeypatch.setattr(_cached, "compilers", lambda: ())
    plain, plain_slope = text("cuda"), slope(arrays)
    monkeypatch.setattr(_cached, "compilers", lambda: ("cuda",))
    run.clear_cache()
    assert "triton" in text("cuda") and "triton" not in text("tpu") + text("cpu") + plain
    assert np.array_equal(slope(arrays), plain_slope)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    assert "triton" not in run.trace(wide).lower(lowering_platforms=("cuda",)).as_text()  # exact sums in float32
