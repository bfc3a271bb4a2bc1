"""Metrics of a step against counts by hand."""

import math

import pytest

from eqformer import training


def test_bits_per_byte():
    assert training.bits_per_byte(math.log(256)) == pytest.approx(8)
    assert training.bits_per_byte(2 * math.log(2), bytes_per_token=4.0) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="bytes_per_token=0"):
        training.bits_per_byte(1.0, 0.0)


def test_throughput():
    assert training.throughput(1000, 2.0) == {"tokens_per_second": 500}
    assert "mfu" not in training.throughput(1000, 2.0, flops_per_token=6e6)
    row = training.throughput(1000, 2.0, flops_per_token=6e6, peak_flops=1e10)
    assert row == {"tokens_per_second": 500, "model_flops_per_second": 3e9, "mfu": pytest.approx(0.3)}
    with pytest.raises(ValueError, match="seconds=0.0"):
        training.throughput(1, 0.0)
