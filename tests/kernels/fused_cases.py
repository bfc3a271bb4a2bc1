"""Calls of attention for the tests of fused kernels: arrays, tokens, results of a core, and distances of results."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from benchmarks._gpu_numbers import packed
from haste import put
from jax.sharding import PartitionSpec

from eqformer import kernels, nn


SEQ = 384  # three blocks of the splash kernel
LENGTHS = ((100, 50, 160), (30, 354))  # the documents' lengths by row; the first row ends in padding


class Case(NamedTuple):
    mask: nn.Mask
    is_packed: bool = False
    softcap: float | None = None
    has_sinks: bool = False
    v_dim: int = 8


CASES = {
    "everything": Case(nn.sliding_window(140), is_packed=True, softcap=0.8, has_sinks=True, v_dim=16),
    "causal": Case(nn.causal()),
    "full": Case(nn.full()),
    "full, packed": Case(nn.full(), is_packed=True),
    "window both ways, packed": Case(nn.Mask(is_causal=False, window=70, ahead=90), is_packed=True),
    "sinks": Case(nn.causal(), has_sinks=True),
}


def inputs(case: Case, heads: int = 4, kv_heads: int = 2, seq: int = SEQ, dtype: Any = np.float32) -> dict:
    rng = np.random.default_rng(0)
    widths = {
        "query": (heads, 8),
        "key": (kv_heads, 8),
        "value": (kv_heads, case.v_dim),
        "direction": (heads, case.v_dim),
    }
    arrays = {name: put(rng.normal(size=(2, seq, *width)), dtype) for name, width in widths.items()}
    return arrays | ({"sinks": put(rng.normal(size=heads), jnp.float32)} if case.has_sinks else {})


def tokens_of(case: Case) -> nn.Tokens:
    whole = nn.right_padded(jnp.array([SEQ, 300]), SEQ) if not case.mask.is_causal else nn.positions_like((2, SEQ))
    return packed(LENGTHS, SEQ) if case.is_packed else whole


def results(core: kernels.Operation, case: Case, arrays: dict, tokens: nn.Tokens) -> dict:
    """Return the output and the gradients of the inputs; the outputs of padding count as 0."""
    real = (tokens.positions >= 0)[..., None, None]

    def call(given: dict):
        more: dict[str, Any] = {"mask": case.mask, "tokens": tokens, "scale": 0.3, "softcap": case.softcap}
        return jnp.where(real, core(kernels.AttentionCall(**given, **more)), 0)

    output, pull = jax.vjp(call, {name: x for name, x in arrays.items() if name != "direction"})
    return pull(arrays["direction"].astype(output.dtype))[0] | {"output": output}


def sharded(core: kernels.Operation, case: Case, arrays: dict, tokens: nn.Tokens) -> dict:
    """Return `results` computed by `shard_map`, which checks types, with rows and heads split over four devices."""
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    split = PartitionSpec("rows", None, "heads")
    specs = {name: PartitionSpec("heads") if name == "sinks" else split for name in arrays}
    outcome = {name: spec for name, spec in specs.items() if name != "direction"} | {"output": split}
    call = lambda arrays, tokens: results(core, case, arrays, tokens)
    run = jax.shard_map(call, mesh=mesh, in_specs=(specs, PartitionSpec("rows")), out_specs=outcome)
    return jax.jit(run)(arrays, tokens)


def distance(got: dict, want: dict) -> float:
    assert set(got) == set(want)
    got, want = (jax.tree.map(lambda x: np.asarray(x, np.float64), arrays) for arrays in (got, want))
    largest = lambda x: max(float(np.abs(x).max()), 1.0)
    return max(float(np.abs(got[name] - want[name]).max()) / largest(want[name]) for name in want)
