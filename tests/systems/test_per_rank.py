"""Each device of an axis runs its own module."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from eqformer import nn
from eqformer.parallel import filter_shard_map, make_mesh, TENSOR
from eqformer.systems import PerRank


def make(key):
    return nn.Linear("embed -> mlp", embed=3, mlp=2, bias=True, key=key)


def test_each_rank_runs_its_own_and_gets_its_own_gradient(key):
    ranks, x = PerRank(make, 4, key=key), jax.random.normal(key, (5, 3))
    mesh = make_mesh(tensor=4, devices=jax.devices()[:4])
    run = eqx.filter_jit(filter_shard_map(lambda module, x: module(x)[None], mesh, (P(TENSOR), P()), P(TENSOR)))
    alone = [make(each) for each in jax.random.split(key, 4)]
    np.testing.assert_allclose(run(ranks, x), jnp.stack([linear(x) for linear in alone]), rtol=1e-6)
    assert not np.allclose(alone[0].weight, alone[1].weight)

    scale = jnp.arange(4.0)[:, None, None]
    gradient = eqx.filter_jit(eqx.filter_grad(lambda module: jnp.sum(scale * run(module, x))))(ranks)
    np.testing.assert_allclose(gradient.modules.bias, np.arange(4.0)[:, None] * 5 * np.ones((4, 2)))


def test_all_but_one_rank_can_be_zero(key):
    ranks = PerRank(make, 4, only=2, key=key)
    np.testing.assert_array_equal(ranks.modules.weight[2], make(jax.random.split(key, 4)[2]).weight)
    assert not ranks.modules.weight[jnp.array([0, 1, 3])].any()


def test_ranks_that_are_not_there_are_refused(key):
    with pytest.raises(ValueError, match="only=4"):
        PerRank(make, 4, only=4, key=key)
    with pytest.raises(ValueError, match="a call needs one rank, but this device holds 4"):
        PerRank(make, 4, key=key)(jnp.ones((5, 3)))
