"""Accelerators that are not here, but for which a compiler may be installed; without it, tests are skipped."""

import functools
import importlib.util
import os
from typing import Any

import jax
import numpy as np
import pytest

from eqformer import planning


@functools.cache
def tpus(name: str, slices: int = 1) -> list[Any]:
    """Return the devices of a topology such as `v5e:4x4` from libtpu."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed: pip install 'eqformer[tpu]'")
    os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    from jax.experimental import topologies

    more = {"num_slices": slices} if slices > 1 else {}
    return topologies.get_topology_desc(name, platform="tpu", **more).devices


def devices_for(name: str) -> list[Any]:
    """Return the devices of a topology such as `v5e:2x2` or `h100:8` from the compiler for these chips."""
    chips = planning.topology(name)
    if missing := planning.missing_compiler(chips):
        pytest.skip(missing)
    return planning.devices_of(chips)


def compiled_for_tpu(function: Any, *shapes: tuple[tuple[int, ...], Any]) -> Any:
    """Compile a function of arrays of these shapes and dtypes for one chip of v5e, and return the program."""
    mesh = jax.sharding.Mesh(np.array(tpus("v5e:2x2")[:1]), ("one",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arrays = [jax.ShapeDtypeStruct(*shape, sharding=whole) for shape in shapes]
    return jax.jit(function).lower(*arrays).compile()
