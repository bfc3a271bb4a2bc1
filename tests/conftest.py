"""Eight simulated CPU devices and strict dtype promotion, set before JAX is first used.

Programs are compiled in haste: the tests run thousands of small ones, each a few times.
"""

import os


os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
)

import jax
import pytest


jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def key():
    return jax.random.key(0)
