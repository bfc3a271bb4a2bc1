"""Tokens are gathered for experts in pieces if one gather would need too much memory; results are the same."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P
from narrow_sums import narrow_sums
from plan_parity import Case, differences, of_one_device, of_plan
from test_narrow_sums import MEANT, not_meant, program_of

from eqformer import nn
from eqformer.parallel import _expert_exchange, _expert_parallel, AXES, Exchange, filter_shard_map, make_mesh


CASE = Case("shared mixture", {"fsdp": 2, "expert": 2}, {"zero": 3, "expert_method": "gather"})
ROUNDING = 64 * float(np.finfo(np.float32).eps)
PADDED = Exchange(is_ragged=False, factor=2.0)


@pytest.mark.quick
def test_as_few_equal_pieces_as_keep_the_room_small():
    count, gigabyte = _expert_exchange.count_gathered_pieces, 2**30
    assert [count(4096, size * gigabyte) for size in (0, 1, 2, 3, 30)] == [1, 1, 2, 4, 32]
    assert count(6, 5 * gigabyte) == 6 and count(2, 9 * gigabyte) == 2  # at least a token


def counted(monkeypatch: pytest.MonkeyPatch, max_bytes: int) -> list[int]:
    """The numbers of pieces that are taken from now on, with room for so many bytes."""
    found: list[int] = []
    pieces_of = _expert_exchange.count_gathered_pieces
    monkeypatch.setattr(_expert_exchange, "MAX_GATHERED_BYTES", max_bytes)
    monkeypatch.setattr(
        _expert_parallel, "count_gathered_pieces", lambda *given: found.append(pieces_of(*given)) or found[-1]
    )
    return found


@pytest.mark.grid
def test_pieces_give_the_layers_own_results_and_gradients(monkeypatch):
    """Of two devices with two experts each; the control leaves the last piece out."""
    found = counted(monkeypatch, 1024)

    def layer(key):
        router = nn.TopKRouter(embed=8, experts=4, top_k=2, key=key)
        return nn.MoE(router, nn.Experts(lambda key: nn.MLP(embed=8, mlp=4, key=key), 4, key=key))

    moe, x = layer(jax.random.key(0)), jax.random.normal(jax.random.key(1), (4, 8, 8))
    arrays, rest = eqx.partition(moe, eqx.is_inexact_array)
    specs = jax.tree.map(lambda x: P("expert") if x.ndim == 3 else P(), arrays)

    def split(arrays, x):
        return _expert_parallel.SplitMixture(eqx.combine(arrays, rest), "gather", PADDED, None)(x)[0]

    mapped = filter_shard_map(split, make_mesh(expert=2, devices=jax.devices()[:2]), (specs, P("expert")), P("expert"))
    plain = lambda arrays, x: eqx.combine(arrays, rest)(x)[0]

    def each(function, *given):
        y, pull = jax.vjp(function, *given)
        return y, pull(y)

    got, want = jax.jit(lambda *given: (each(mapped, *given), each(plain, *given)))(arrays, x)
    assert set(found) == {2}
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    assert not np.allclose(got[0], jnp.asarray(want[0]).at[1].set(0), atol=1e-3)


@pytest.mark.grid
def test_pieces_give_a_plan_one_devices_gradients(monkeypatch):
    found = counted(monkeypatch, 2048)
    assert differences(of_plan(CASE), of_one_device(CASE), ROUNDING) == {}
    assert set(found) == {8}


@pytest.mark.grid
def test_gradients_are_summed_over_pieces_in_float32(monkeypatch):
    found = counted(monkeypatch, 2048)
    program = program_of(CASE._replace(dtypes=("float32", "bfloat16")))
    assert not_meant(narrow_sums(program), MEANT) == []
    assert set(found) == {4}


def largest(monkeypatch: pytest.MonkeyPatch, max_bytes: int) -> float:
    """Bytes of the largest array in the gradient of a layer of DeepSeek-V3's sizes, over 64 devices, 4,096 tokens each.

    Nothing is compiled or run.
    """
    monkeypatch.setattr(_expert_exchange, "MAX_GATHERED_BYTES", max_bytes)
    sizes = [64 if axis == "expert" else 1 for axis in AXES]
    mesh = AbstractMesh(tuple(sizes), AXES, (AxisType.Auto,) * len(AXES))

    def layer(key):
        router = nn.TopKRouter(embed=7168, experts=256, top_k=8, key=key)
        return nn.MoE(router, nn.Experts(lambda key: nn.GatedMLP(embed=7168, mlp=2048, key=key), 256, key=key))

    moe = eqx.filter_eval_shape(layer, jax.random.key(0))
    arrays, rest = eqx.partition(moe, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    specs = jax.tree.map(lambda x: P("expert") if x.ndim == 3 else P(), arrays)

    def loss(arrays, x):
        split = _expert_parallel.SplitMixture(eqx.combine(arrays, rest), "gather", PADDED, None)
        return jax.lax.psum(jnp.sum(split(x)[0].astype(jnp.float32)), "expert")

    mapped = filter_shard_map(loss, mesh, (specs, P("expert")), P())
    x = jax.ShapeDtypeStruct((64, 4096, 7168), jnp.bfloat16)
    program = jax.make_jaxpr(jax.grad(mapped))(arrays, x)
    return max(
        _sizes(next(eqn for eqn in equations(program.jaxpr) if eqn.primitive.name == "shard_map").params["jaxpr"])
    )


def equations(jaxpr):
    """Those of a program, and of all that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def _sizes(jaxpr):
    for equation in equations(getattr(jaxpr, "jaxpr", jaxpr)):
        for variable in equation.outvars:
            if hasattr(variable.aval, "shape") and not jnp.issubdtype(variable.aval.dtype, jax.dtypes.extended):
                yield variable.aval.size * variable.aval.dtype.itemsize


def test_a_layer_of_256_experts_takes_no_tens_of_gigabytes_by_default(monkeypatch):
    assert largest(monkeypatch, _expert_exchange.MAX_GATHERED_BYTES) < 2.5e9
    assert largest(monkeypatch, 2**60) > 25e9  # at once, as it was
