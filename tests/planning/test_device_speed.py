"""The measured peak is FLOPs divided by the seconds of the fastest repeat, and arguments are checked."""

from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from jax.sharding import Mesh

from eqformer.parallel import make_mesh
from eqformer.planning import copy_bandwidth, matmul_peak, mesh_peak


def test_peak_is_operations_over_the_best_time(monkeypatch):
    # A clock that moves on by 1 s a look, and by 0.25 s once: the best repeat took that long.
    jumps = (0.25 if look == 6 else 1.0 for look in count())
    now = iter(_running_sum(jumps))
    monkeypatch.setattr("eqformer.planning._accelerators.perf_counter", lambda: next(now))
    assert matmul_peak(size=64, seconds=9.0) == pytest.approx(2 * 64**3 / 0.25)


def test_simulated_devices_share_their_cpu_and_others_have_each_a_peak(monkeypatch):
    monkeypatch.setattr("eqformer.planning._accelerators.matmul_peak", lambda dtype, *, seconds, device: 7.0)
    mesh = make_mesh(replica=4, fsdp=2)
    assert mesh_peak(mesh) == 7.0
    of = lambda number: SimpleNamespace(platform="gpu", process_index=number // 4)
    devices = np.array([of(number) for number in range(8)])
    gpus: Any = Mock(spec=Mesh, local_devices=devices[:4], devices=devices, size=8)
    assert mesh_peak(gpus) == 56.0


def test_a_copy_reads_and_writes(monkeypatch):
    now = iter(_running_sum(0.25 if look == 6 else 1.0 for look in count()))
    monkeypatch.setattr("eqformer.planning._accelerators.perf_counter", lambda: next(now))
    assert copy_bandwidth(size=4096, seconds=9.0) == pytest.approx(2 * 4096 / 0.25)


def test_a_real_clock_and_narrow_products():
    slow, fast = 1e6, 1e16  # no device that runs these tests is outside
    assert slow < matmul_peak(size=256, seconds=0.05) < fast
    assert slow < matmul_peak("bfloat16", size=128, seconds=0.01) < fast


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="size=0"):
        matmul_peak(size=0)
    with pytest.raises(ValueError, match=r"copy_bandwidth\(size=3"):
        copy_bandwidth(size=3)
    with pytest.raises(ValueError, match="'int32'"):
        matmul_peak("int32")


def _running_sum(jumps):
    total = 0.0
    for jump in jumps:
        total += jump
        yield total
