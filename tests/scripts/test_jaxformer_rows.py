"""The benchmark of JAXformer over meshes, with small sizes: every mesh takes one device's step."""

import dataclasses
import re

import pytest
from benchmarks._meshes import JAXFORMER, jaxformer


@pytest.mark.grid
def test_a_mesh_takes_one_device_s_step_and_drops_choices():
    small = dataclasses.replace(JAXFORMER, vocab=64, embed=32, blocks=1, heads=2, latent=8, rope_dim=4)
    one = {"one device": {}}

    def losses(config, meshes):
        rows = list(jaxformer(1, config, meshes, rows=4, seq=16))
        assert [row.name for row in rows] == list(meshes) and rows[0].ratio == 1
        assert all(row.value is not None and row.value > 0 and row.unit == "tokens/s" for row in rows)
        return [re.findall(r"loss (\d+\.\d{3})", row.note) for row in rows]

    alone, over_two = losses(small, one | {"fsdp 2": {"fsdp": 2}})
    assert alone == over_two
    assert losses(dataclasses.replace(small, capacity=2.0), one) != [alone]  # the control: choices are dropped
