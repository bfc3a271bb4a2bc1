"""Kernels of decode steps on accelerators: results as in plain JAX, gradients, and lowered programs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec

from eqformer import kernels, nn
from eqformer.kernels import (
    _cache_write,
    _decode_attention_gpu as gpu,
    _decode_attention_tpu as tpu,
    _op,
    RotatedChannels,
    StoredArrays,
)


class Case(NamedTuple):
    """Sizes, of which slots fill no whole block and channels no power of two, and what a call may have beside them."""

    mask: nn.Mask = nn.causal()
    heads: int = 6
    kv_heads: int = 2
    v_dim: int = 24
    softcap: float | None = None
    has_sinks: bool = False
    is_scaled: bool = False
    """Whether keys and values have 8 bits, and scales."""
    stored_dtype: Any = np.int8
    """The dtype of keys and values of 8 bits."""
    rope_dim: int = 0
    """Not 0: the keys are the values too, and there are so many channels more."""
    dtype: Any = jnp.bfloat16


CASES = {
    "everything": Case(nn.sliding_window(50), softcap=3.0, has_sinks=True, is_scaled=True),
    "latents of 8 bits, heads of three programs": Case(heads=38, kv_heads=1, rope_dim=6, is_scaled=True),
    "fp8": Case(is_scaled=True, stored_dtype=jnp.float8_e4m3fn),
    "latents": Case(kv_heads=1, rope_dim=16, has_sinks=True),
    "causal": Case(),
    "one key head, sinks": Case(kv_heads=1, has_sinks=True, v_dim=16),
    "heads of their own": Case(kv_heads=6, dtype=jnp.float16),
}
SLOTS, LENGTHS = 150, (149, 20, 101, 180)  # so that chunks are empty, rows end within blocks, and the last has rolled


def held() -> nn.Tokens:
    """What the slots hold: nothing behind a row's newest token, of the third two documents behind padding."""
    slots, last = np.arange(SLOTS), np.asarray(LENGTHS)[:, None]
    positions = np.where(slots <= last, slots, -1)
    positions[2, :7] = -1
    positions[3] = np.where(slots <= LENGTHS[3] - SLOTS, slots + SLOTS, slots)
    segments = np.where((np.arange(len(LENGTHS)) == 2)[:, None] & (slots < 60), 0, 1)
    return nn.Tokens(put(positions, np.int32), put(segments, np.int32))


def given_of(case: Case) -> dict[str, Any]:
    """The arguments of a call."""
    rng = np.random.default_rng(0)
    rows = len(LENGTHS)
    wide = lambda *shape, dtype=np.float32: put(rng.normal(size=shape).astype(np.float32), dtype)
    keys, values = (rows, SLOTS, case.kv_heads, 24), (rows, SLOTS, case.kv_heads, case.v_dim)
    given: dict[str, Any] = {"query": wide(rows, 1, case.heads, 24, dtype=case.dtype)}
    if case.is_scaled:
        codes = lambda shape: put(rng.integers(-127, 128, size=shape), np.int8).astype(case.stored_dtype)
        given |= {"key": codes(keys), "value": codes(values)}
        scales = lambda: put(rng.uniform(0.01, 0.02, size=keys[:3]), np.float32)
        given |= {"key_scales": scales(), "value_scales": scales()}
    else:
        given |= {"key": wide(*keys, dtype=case.dtype), "value": wide(*values, dtype=case.dtype)}
    last = np.asarray(LENGTHS, np.int32)[:, None]
    given |= {
        "tokens": nn.Tokens(put(last), put(np.ones_like(last))),
        "mask": case.mask,
        "scale": 0.3,
        "softcap": case.softcap,
    }
    given["kv_tokens"] = held()
    given |= {"sinks": wide(case.heads) if case.has_sinks else None}
    if case.rope_dim:
        given |= {"value": None, "value_scales": None}
        keys, asked = (*keys[:3], case.rope_dim), wide(rows, 1, case.heads, case.rope_dim, dtype=case.dtype)
        its = (codes(keys), scales()) if case.is_scaled else (wide(*keys, dtype=case.dtype), None)
        given["rotated"] = RotatedChannels(asked, *its)
    return given


def decode_call(query, key, value, *, mask, tokens, kv_tokens, held=None, **rest) -> kernels.DecodeCall:
    return kernels.DecodeCall(query, key, value, visible=mask(tokens, kv_tokens), stored=held, **rest)


def attend_cached(**given) -> jax.Array:
    return kernels.DECODE_ATTENTION(decode_call(**given))


def by_kernel(**given) -> jax.Array:
    kernel = kernels.FlashDecodingGpu if given.get("held") is None else kernels.FlashDecodingTpu
    return kernel(interpret=True).run(decode_call(**given))


def compiled(attend: Callable[..., jax.Array], given: dict[str, Any]) -> np.ndarray:
    """The result of a call in one program, traced anew."""
    return np.asarray(eqx.filter_jit(lambda given: attend(**given).astype(jnp.float32))(given))


def without_some(seen: nn.Tokens) -> nn.Tokens:
    """The slots' tokens, of which the first row's last are none."""
    positions = np.array(seen.positions)
    positions[0, 130:] = -1
    return nn.Tokens(put(positions), seen.segments)


def held_by(given: dict[str, Any]) -> StoredArrays:
    """The arrays of a call as those of the second layer of three, of which the others hold what would be seen."""

    def stacked(x: Any) -> jax.Array:
        other = np.full_like(x, np.nan if jnp.issubdtype(x.dtype, jnp.floating) else 127)
        return put(np.stack([other, x, other]).swapaxes(-3, -2))

    rotated = stacked(given["rotated"].key) if "rotated" in given else None
    value = None if given["value"] is None else stacked(given["value"])
    scales = lambda name: (
        None
        if value is None or name not in given
        else put(np.asarray(stacked(np.asarray(given[name])[..., None]))[..., 0])
    )
    factors = {name: scales(name) for name in ("key_scales", "value_scales")}
    return StoredArrays(put(1, np.int32), stacked(given["key"]), value, rotated, **factors)


def wanted(given: dict[str, Any]) -> np.ndarray:
    """Row by row and head by head in float64, of the slots that a row's token sees."""
    exact = lambda x, scales=None: np.asarray(x, np.float64) * (1 if scales is None else np.asarray(scales)[..., None])
    query, key = exact(given["query"]), exact(given["key"], given.get("key_scales"))
    value = key if given["value"] is None else exact(given["value"], given.get("value_scales"))
    if "rotated" in given:
        asked, keys, scales = given["rotated"]
        query, key = np.concatenate([query, exact(asked)], -1), np.concatenate([key, exact(keys, scales)], -1)
    places, segments, window = given["kv_tokens"].positions, given["kv_tokens"].segments, given["mask"].window
    found = np.zeros((*query.shape[:-1], value.shape[-1]))
    for row, head in np.ndindex(query.shape[0], query.shape[2]):
        at, kv_head = LENGTHS[row], head // (query.shape[2] // key.shape[2])
        sees = np.asarray((places[row] >= 0) & (places[row] <= at) & (segments[row] == 1))
        sees = sees if window is None else sees & (np.asarray(places[row]) > at - window)
        scores = given["scale"] * key[row, sees, kv_head] @ query[row, 0, head]
        scores = scores if given["softcap"] is None else given["softcap"] * np.tanh(scores / given["softcap"])
        sink = 0 if given["sinks"] is None else np.exp(float(given["sinks"][head]))
        weights = np.exp(scores)
        found[row, 0, head] = weights @ value[row, sees, kv_head] / (weights.sum() + sink)
    return found


@pytest.mark.parametrize("name", [*CASES][:3] + [pytest.param(n, marks=pytest.mark.grid) for n in [*CASES][3:]])
def test_the_kernel_is_the_reference_in_chunks(name, monkeypatch):
    monkeypatch.setattr(gpu, "_PROGRAMS", 4 * len(LENGTHS) * CASES[name].kv_heads)
    monkeypatch.setattr(gpu, "_BLOCK_ENTRIES", 512)
    monkeypatch.setattr(gpu, "_QUERY_ENTRIES", 512)  # 16 heads of 32 channels a program
    given = given_of(CASES[name])
    found, right = compiled(by_kernel, given), wanted(given)
    assert np.abs(found - right).max() < 0.01 * np.abs(right).max()
    without = given | {"kv_tokens": without_some(given["kv_tokens"])}
    assert np.abs(found - wanted(without)).max() > 0.02 * np.abs(right).max()  # the comparison sees slots


def test_older_gpus_read_fp8_by_the_definition(monkeypatch):
    """GPUs whose hardware does not convert E4M3, and numbers of 8 bits that no cache has."""
    given = given_of(CASES["fp8"])
    assert gpu.FlashDecodingGpu().supports(decode_call(**given)) is None
    other = given | {"key": given["key"].astype(jnp.float8_e5m2)}
    assert "int8 or fp8" in str(gpu.FlashDecodingGpu().supports(decode_call(**other)))
    monkeypatch.setattr(gpu, "gpu_capability", lambda: 8.0)
    assert "compute capability 8.9" in str(gpu.FlashDecodingGpu().supports(decode_call(**given)))


OTHERS = sorted({*CASES} - {"everything", "latents", "fp8"})
# Numbers of a vector: slots fill whole ones and channels do not, and stand before them, or neither; and of a block: 20
# slots, or 128, or all.
LAID = [(10, 512), (128, 512), (128, 2**20)]


@pytest.mark.by_default("everything-10-512", "latents-128-512")
@pytest.mark.parametrize("lanes, tile", LAID)
@pytest.mark.parametrize("name", ["everything", "latents", *OTHERS])
def test_the_kernel_of_tpus_is_the_reference_in_blocks(name, lanes, tile, monkeypatch):
    monkeypatch.setattr(tpu, "LANES", lanes)
    monkeypatch.setattr(_cache_write, "LANES", lanes)
    monkeypatch.setattr(tpu, "_BLOCK_ENTRIES", tile)
    monkeypatch.setattr(tpu, "_SUBLANES", 2)  # heads' scales are read where they lie, if a block has all slots
    given = given_of(CASES[name])
    found, right = compiled(by_kernel, given | {"held": held_by(given)}), wanted(given)
    assert np.abs(found - right).max() < 0.01 * np.abs(right).max()
    without = given | {"kv_tokens": without_some(given["kv_tokens"])}
    assert np.abs(found - wanted(without)).max() > 0.02 * np.abs(right).max()  # the comparison sees slots


@pytest.mark.by_default("everything-512", "everything-1048576")
@pytest.mark.parametrize("name, tile", [("everything", 512), ("latents", 512), ("everything", 2**20)])
def test_tpus_fetch_what_is_counted_and_no_more_than_is_seen(name, tile, monkeypatch):
    monkeypatch.setattr(tpu, "_BLOCK_ENTRIES", tile)
    monkeypatch.setattr(tpu, "_SUBLANES", 2)
    monkeypatch.setattr(tpu, "LANES", 10)
    monkeypatch.setattr(_cache_write, "LANES", 10)
    calls: list[Any] = []

    def pallas_call(kernel: Any, *, grid_spec: Any, out_shape: Any, cost_estimate: Any, **_: Any) -> Any:
        def run(*given: Any) -> jax.Array:
            calls.append((grid_spec, given, cost_estimate.bytes_accessed))
            return jnp.zeros(out_shape.shape, out_shape.dtype)

        return run

    monkeypatch.setattr("jax.experimental.pallas.pallas_call", pallas_call)

    def fetched_and_said(lengths: int) -> tuple[int, int]:
        """Bytes of the blocks that programs ask for, but for those that the one before has asked for."""
        given: dict[str, Any] = given_of(CASES[name]) | {"mask": nn.full()}
        positions = jnp.where(jnp.arange(SLOTS) < lengths, jnp.arange(SLOTS), -1)
        given["kv_tokens"] = nn.Tokens(jnp.broadcast_to(positions, (len(LENGTHS), SLOTS)))
        given["tokens"] = nn.Tokens(jnp.asarray(LENGTHS, jnp.int32)[:, None])
        by_kernel(**given, held=held_by(given))
        grid, (*seen, arrays), said = calls.pop()
        found = sum(x.nbytes for x in seen)
        result = jax.ShapeDtypeStruct((grid.grid[0], *grid.out_specs.block_shape[1:]), jnp.bfloat16)
        for spec, x in zip(jax.tree.leaves((grid.in_specs, grid.out_specs)), jax.tree.leaves((arrays, result))):
            block, last = [size or 1 for size in spec.block_shape], None
            for place in np.ndindex(grid.grid):
                index = [int(number) for number in spec.index_map(*place, *seen)]
                inside = [min(size, whole - size * number) for size, whole, number in zip(block, x.shape, index)]
                found += int(np.prod(inside)) * x.dtype.itemsize if index != last else 0
                last = index
        return found, said

    found, said = fetched_and_said(SLOTS)
    assert found == said
    if tile == 512:
        assert fetched_and_said(70)[0] < 0.6 * said  # four blocks of eight


def test_tpus_give_zeros_where_a_token_sees_nothing():
    given = given_of(Case(kv_heads=1, rope_dim=16))
    held, seen = held_by(given), given["kv_tokens"]
    given["kv_tokens"] = nn.Tokens(seen.positions.at[1].set(-1), seen.segments)
    found = compiled(by_kernel, given | {"held": held})
    assert not found[1].any() and found[0].any() and np.isfinite(found).all()


HEADS: Any = PartitionSpec(None, None, "heads")


def over_heads(attend: Any, specs: Any) -> Any:
    """A call on two devices, each with half of the heads."""
    gpu = AbstractDevice("NVIDIA H100", 132, "gpu")  # from JAX 0.12 on it matters for which one is compiled
    mesh = AbstractMesh((2,), ("heads",), (jax.sharding.AxisType.Auto,), abstract_device=gpu)
    return jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(specs,), out_specs=HEADS))


def test_gpus_run_it_over_devices_with_types_checked_and_gradients_are_the_references(monkeypatch):
    given = given_of(Case(kv_heads=2, heads=4))
    arrays, rest = {name: given.pop(name) for name in ("query", "key", "value")}, given
    attend = lambda arrays: attend_cached(**arrays, **rest)
    run = over_heads(attend, dict.fromkeys(arrays, HEADS))

    def text(platform: str, arrays: dict[str, Any] = arrays) -> str:
        return run.trace(jax.eval_shape(lambda: arrays)).lower(lowering_platforms=(platform,)).as_text()

    total = lambda arrays: jnp.sum(attend(arrays).astype(jnp.float32) ** 2)
    slope = lambda arrays: jax.jit(lambda arrays: jax.grad(total)(arrays)["key"])(arrays)
    monkeypatch.setattr(_op, "compilers", lambda: ())
    plain, plain_slope = text("cuda"), slope(arrays)
    monkeypatch.setattr(_op, "compilers", lambda: ("cuda",))
    run.clear_cache()
    assert "triton" in text("cuda") and "triton" not in text("tpu") + text("cpu") + plain
    assert np.array_equal(slope(arrays), plain_slope)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    assert "triton" not in text("cuda", wide)  # exact sums in float32
    for name, its in {"_QUERY_ENTRIES": 16 * 32 - 1, "TRITON": "jax.experimental.absent"}.items():
        with monkeypatch.context() as patched:
            patched.setattr(gpu, name, its)
            run.clear_cache()
            assert text("cuda") == plain  # nor what a multiprocessor has no room for, nor where JAX has no such kernels


WHOLE: Any = PartitionSpec()
SHARED = {
    "query": HEADS,
    "rotated": RotatedChannels(HEADS, WHOLE),
    "key": WHOLE,
    "held": StoredArrays(WHOLE, WHOLE, None, WHOLE),
}
SPLIT = dict.fromkeys(("query", "key", "value", "key_scales", "value_scales"), HEADS)
SPLIT |= {"held": StoredArrays(WHOLE, HEADS, HEADS, None, HEADS, HEADS)}


@pytest.mark.by_default("latents that devices share")
@pytest.mark.parametrize(
    "case, specs",
    [(Case(kv_heads=1, rope_dim=16), SHARED), (Case(heads=32, kv_heads=16, is_scaled=True), SPLIT)],
    ids=["latents that devices share", "heads"],
)
def test_tpus_run_it_over_devices(case, specs, monkeypatch):
    """With types checked: the results are each device's own, as its queries are."""
    given = given_of(case)
    given["held"] = held_by(given)
    arrays = {name: given.pop(name) for name in specs}
    run = over_heads(lambda arrays: attend_cached(**arrays, **given), specs)

    def text(platform: str, arrays: dict[str, Any] = arrays) -> str:
        return run.trace(jax.eval_shape(lambda: arrays)).lower(lowering_platforms=(platform,)).as_text()

    monkeypatch.setattr(_op, "compilers", lambda: ())
    plain = text("tpu")
    monkeypatch.setattr(_op, "compilers", lambda: ("tpu",))
    run.clear_cache()
    assert "custom_call" not in text("tpu")  # so few slots are not worth a program
    monkeypatch.setattr(tpu, "_LEAST_BYTES", 0)
    run.clear_cache()
    assert "tpu_custom_call" in text("tpu") and "custom_call" not in text("cuda") + text("cpu") + plain
    wide = arrays | {"query": arrays["query"].astype(jnp.float32)}
    assert "custom_call" not in text("tpu", wide)  # exact sums in float32


def test_scores_may_have_a_bias_where_a_cache_is_of_8_bits(monkeypatch):
    monkeypatch.setattr(_op, "compilers", lambda: ("cuda",))
    given = given_of(Case(is_scaled=True))
    bias = put(np.where(np.arange(SLOTS) == 5, 50.0, 0.0)[None, None].repeat(6, 0), np.float32)  # all read slot 5
    found = compiled(attend_cached, given | {"bias": bias})[0, 0]
    value, scales = np.asarray(given["value"]), np.asarray(given["value_scales"])
    slot = (value[0, 5].astype(np.float32) * scales[0, 5, :, None]).repeat(3, 0)
    assert np.abs(found - slot).max() < 0.01 * np.abs(slot).max()
    assert np.abs(compiled(attend_cached, given)[0, 0] - slot).max() > 0.1 * np.abs(slot).max()
