"""Programs that are traced for a platform whose compiler is not installed."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eqformer import kernels, nn


def test_a_program_is_traced_for_the_platform_that_is_given():
    """Also what JAX keeps of an earlier trace: the same function gives each platform's own way."""
    cache = nn.KVCache.empty((2,), 128, (1, 128), (1, 128), "float32")

    @jax.jit
    def run(cache: Any, new: jax.Array) -> Any:
        return cache.update(new, new, nn.Tokens(jnp.zeros((2, 1), jnp.int32)))[0]

    def text(platform: str) -> str:
        with kernels.traced_for(platform):
            return str(jax.make_jaxpr(run)(cache, jnp.zeros((2, 1, 1, 128))))

    assert ["written_slots" in text(platform) for platform in ("tpu", "cpu", "cuda", "tpu")] == [
        True,
        False,
        False,
        True,
    ]


def test_experts_that_were_traced_before_are_traced_anew():
    experts = nn.Experts(lambda key: nn.GatedMLP(embed=128, mlp=128, key=key), 2, key=jax.random.key(0))
    rows, sizes = jnp.zeros((32, 128)), jnp.full(2, 16, jnp.int32)

    def text(platform: str) -> str:
        with kernels.traced_for(platform):
            return str(jax.make_jaxpr(experts.sorted_rows)(rows, sizes))

    assert ["grouped_multiply_kernel" in text(platform) for platform in ("cpu", "tpu", "cpu")] == [False, True, False]


@pytest.mark.parametrize("platform, there", [("tpu", ("tpu",)), ("cuda", ("cuda",)), ("cpu", ())])
def test_its_compiler_is_taken_for_the_only_one(platform, there):
    installed = kernels.compilers()
    with kernels.traced_for(platform):
        assert kernels.compilers() == there
    assert kernels.compilers() == installed
