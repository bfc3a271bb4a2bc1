"""The rows of a GPU's benchmark, of a small size on a CPU: what they hold, and how many a deadline leaves."""

import dataclasses

import jax
import pytest
from benchmarks import _gpu


SMALL = _gpu.Sizes(
    dense=("llama-byte-1m",),
    mixture="mixtral-byte-500k",
    mixture_layers=1,
    lengths=(32, 64),
    tokens=64,
    heads=(4, 2, 8),
    decoded=("llama-byte-1m",),
    batches=(1, 2),
    prompt=8,
    new=4,
)


MIXTURE = "mixtral-byte-500k, 1 layers"


@pytest.mark.grid
def test_each_group_has_its_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_gpu._peers, "are_installed", lambda: False)
    with jax.numpy_dtype_promotion("standard"):  # for `jax.nn`'s attention in bfloat16
        rows = list(_gpu.gpu(2, tmp_path, SMALL))
    trained = (
        "train llama-byte-1m, 2 x 32",
        "train llama-byte-1m, 1 x 64",
        "train mixtral-byte-500k, 1 layers, 2 x 32",
    )
    groups = ["peak", "attention, 2 x 32 tokens", "attention, 1 x 64 tokens", *(f"{name} tokens" for name in trained)]
    assert {*groups, "decode llama-byte-1m, batch 1", "decode llama-byte-1m, batch 2"} <= {row.group for row in rows}
    shares = [row.value for row in rows if row.unit == "%"]
    assert all(row.value > 0 for row in rows) and len(shares) == 8
    assert all(half < full for half, full in zip(shares[::2], shares[1::2]))
    assert list((tmp_path / "gpu-profile").rglob("*.xplane.pb"))


def test_what_is_late_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_gpu, "_trace", lambda *given: None)
    (peak,) = _gpu.gpu(2, tmp_path, dataclasses.replace(SMALL, minutes=-1.0))
    assert peak.group == "peak" and "8 of 8 groups are left out" in capsys.readouterr().err
