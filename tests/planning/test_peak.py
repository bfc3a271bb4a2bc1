"""The measured peak is a plausible speed, and the arguments are checked."""

import time

import numpy as np
import pytest

from eqformer.planning._peak import matmul_peak


def test_peak_is_near_numpy_s_own_product():
    size = 512
    one = np.full((size, size), 0.5, np.float32)
    best = min(_seconds(lambda: one @ one) for _ in range(20))
    measured = matmul_peak(size=size, seconds=0.2)
    assert 0.1 < measured / (2 * size**3 / best) < 10


def test_narrow_products_and_bad_arguments():
    assert matmul_peak("bfloat16", size=128, seconds=0.01) > 1e6
    with pytest.raises(ValueError, match="size=0"):
        matmul_peak(size=0)
    with pytest.raises(ValueError, match="'int32'"):
        matmul_peak("int32")


def _seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
