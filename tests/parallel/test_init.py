"""Sharded initialization gives the same values on every mesh, and no device holds a whole copy."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqformer import _prepare, models, nn
from eqformer.parallel import init_sharded, lower_sharded, make_mesh, Plan, shardings


LLAMA = models.LlamaConfig(vocab=512, embed=128, layers=4, heads=8, kv_heads=4, mlp=344)  # 900,000 parameters
MESHES: dict[str, Any] = {"fsdp": dict(fsdp=8), "fsdp tensor pipe": dict(fsdp=2, tensor=2, pipe=2)}


def make(key):
    return models.build(LLAMA, key=key)


def numbers_of(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))]


def placed_by(plan):
    return lambda shapes: shardings(plan.parameter_specs(shapes), plan.mesh)


@pytest.fixture(scope="module")
def plain():
    return eqx.filter_jit(make)(jax.random.key(0))


MORE = [pytest.param(name, marks=pytest.mark.grid) for name in [*MESHES][1:]]


@pytest.mark.parametrize("name", [[*MESHES][0], *MORE])
def test_values_are_those_of_one_device_and_no_device_needs_a_copy(name, plain):
    plan = Plan(make_mesh(**MESHES[name]), zero=3)
    program = lower_sharded(make, placed_by(plan), jax.random.key(0)).compile()
    arrays = program()
    for found, wanted in zip(numbers_of(arrays), numbers_of(plain), strict=True):
        np.testing.assert_array_equal(found, wanted)
    whole = sum(leaf.nbytes for leaf in numbers_of(plain))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(arrays))
    needs, text = program.memory_analysis(), program.as_text()
    assert needs is not None and text is not None
    assert held / whole < 0.15 and needs.output_size_in_bytes < held + 4096
    assert needs.temp_size_in_bytes < 1.6 * held  # the random bits of its own pieces
    assert needs.argument_size_in_bytes < 4096 and not any(
        word in text for word in ("all-gather(", "all-reduce(", "collective-permute(", "all-to-all(")
    )


def test_what_runs_once_is_compiled_in_less_time_to_the_same_bits():
    lowered = jax.jit(lambda: nn.Linear("embed -> mlp", embed=64, mlp=64, key=jax.random.key(0))).lower()
    (option,) = _prepare._SINGLE_RUN_FLAGS
    at = lambda level: lowered.compile(compiler_options={option: level})
    least, little, most = (
        np.concatenate([x.ravel() for x in numbers_of(at(level)())])
        for level in (0, _prepare._SINGLE_RUN_FLAGS[option], 3)
    )
    np.testing.assert_array_equal(little, most)
    assert (least != most).any()  # the control: without any of LLVM's passes, products are not fused with sums


@pytest.mark.grid
def test_what_is_drawn_is_not_held_step_by_step(monkeypatch):
    """By YNN's kernels, which `prepare` chooses for training, and which programs that draw do not get."""
    (ours,), draw = _prepare.format_flags(_prepare._CPU_FLAGS), lambda key: jax.random.normal(key, (64, 1024))
    lowered = jax.jit(lambda: [draw(key) for key in jax.random.split(jax.random.key(0), 8)]).lower()
    needs_of = lambda options: lowered.compile(compiler_options=options).memory_analysis()
    kinds = ",".join(f"{_prepare._KIND}{kind}" for kind in ("DOT", "REDUCE", "ELTWISE"))
    monkeypatch.setenv("XLA_FLAGS", f"--of_the_user=1 {ours}")
    drawn = _prepare.single_run_options("cpu")
    few, many = needs_of(drawn), needs_of({_prepare._KERNELS_FLAG: kinds})
    assert few is not None and many is not None and _prepare.single_run_options("gpu") == {}
    assert few.temp_size_in_bytes < 0.2 * many.temp_size_in_bytes
    monkeypatch.setenv("XLA_FLAGS", f"--{_prepare._KERNELS_FLAG}=")
    assert _prepare.single_run_options("cpu") == _prepare._SINGLE_RUN_FLAGS  # what the user has set stays


def test_the_memory_check_sees_a_copy():
    mesh = make_mesh(fsdp=8)
    whole = lambda spec: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(spec))
    draw = lambda: jax.random.normal(jax.random.key(0), (2**16,))
    needs_of = lambda spec: lower_sharded(draw, lambda _: whole(spec)).compile().memory_analysis()
    copied, split = needs_of(None), needs_of("fsdp")
    assert copied is not None and split is not None
    assert copied.output_size_in_bytes == 2**18 and split.output_size_in_bytes == 2**15
    assert split.temp_size_in_bytes <= copied.temp_size_in_bytes / 4


def test_each_layer_and_each_array_has_a_key_of_its_own(plain):
    for path, leaf in jax.tree_util.tree_leaves_with_path(plain.stacks[0].blocks):
        if "norm" not in nn.path_name(path):
            layers = np.asarray(leaf).reshape(len(leaf), -1)[:, :64]
            assert len(np.unique(layers)) == layers.size, nn.path_name(path)
    random = [np.asarray(leaf).ravel()[:64] for leaf in jax.tree.leaves(plain) if eqx.is_inexact_array(leaf)]
    standard = np.stack([leaf / leaf.std() for leaf in random if leaf.std() > 0])
    correlations = np.corrcoef(standard) - np.eye(len(standard))
    assert np.abs(correlations).max() < 0.6
    same = np.corrcoef(np.concatenate([standard, 3 * standard[:1]])) - np.eye(len(standard) + 1)
    assert np.abs(same).max() > 0.99  # a key used twice is seen


@pytest.mark.quick
def test_trees_with_more_than_arrays_come_back_whole():
    mesh = make_mesh(fsdp=2, tensor=4)

    def make(key, scale):
        return {"mlp": nn.MLP(embed=64, mlp=64, activation=jax.nn.relu, key=key), "name": "text", "scale": scale}

    plan = Plan(mesh, zero=3)
    got = init_sharded(make, placed_by(plan), jax.random.key(1), 3.0)
    assert got["name"] == "text" and got["scale"] == 3.0 and got["mlp"].activation.function is jax.nn.relu
    weight = got["mlp"].up.weight
    assert weight.addressable_shards[0].data.shape == (16, 32) and len(weight.addressable_shards) == 8
    assert jnp.isfinite(got["mlp"](jnp.ones((2, 64)))).all()
    want = make(jax.random.key(1), 3.0)["mlp"].up.weight
    np.testing.assert_allclose(weight, want, rtol=1e-6)
