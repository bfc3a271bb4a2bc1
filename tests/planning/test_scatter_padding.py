"""Padding that the TPU compiler adds to reduce-scatters, against parts of recorded programs (libtpu 0.0.42)."""

import equinox as eqx
import jax
import pytest

from eqformer.models import build, LlamaConfig
from eqformer.parallel import Plan
from eqformer.planning import _forecast, abstract_mesh, for_platform, scatter_padding, topology


# Devices of a ring, float32 numbers of a row and, of rows of a device's slice, by how many they were padded.
COMPILED = {
    ("v5e:2x4", 8, 2048): {256: 0, 1024: 40, 1376: 64, 1408: 32, 1536: 48, 1792: 32, 16032: 80, 18992: 8},
    ("v5e:2x4", 8, 4096): {256: 0, 400: 32, 1376: 64, 1792: 8, 4008: 24},
    ("v5e:2x4", 8, 8192): {1376: 0, 1792: 0},
    ("v5e:2x2", 4, 2048): {256: 0, 400: 16, 640: 32, 1376: 80, 2752: 160, 3584: 0, 32064: 192},
    ("v5e:1x4", 4, 2048): {640: 8, 1376: 24, 2752: 56, 3584: 0, 5504: 96},
    ("v5e:1x4", 4, 5120): {256: 8, 1792: 56, 4008: 40},
    ("v5e:1x2", 2, 2048): {5504: 120, 7168: 128, 64128: 16},
    ("v5p:2x2x1", 4, 2048): {2752: 160},
    ("v6e:2x4", 8, 2048): {1376: 24, 1792: 32, 2000: 16, 9000: 48, 16032: 192},
}


@pytest.mark.quick
def test_slices_are_padded_as_compiled_ones_are():
    for (name, devices, columns), slices in COMPILED.items():
        padded = {rows: _forecast._padded_rows(rows, 4 * columns, devices, topology(name)) for rows in slices}
        assert {rows: size - rows for rows, size in padded.items()} == slices, (name, columns)


def test_a_step_sends_its_gradients_padding_on_tpus_alone():
    """A layer of SmolLM3: the slices of three maps are padded by 64 rows, sent seven times and moved from as far."""
    config = LlamaConfig(vocab=1024, embed=2048, layers=1, heads=16, kv_heads=4, mlp=11008, tied=True)
    model = eqx.filter_eval_shape(lambda: build(config, key=jax.random.key(0)))
    padding = {}
    for name in ("v5e:2x4", "h100:8"):
        chips = topology(name)
        plan = for_platform(Plan(abstract_mesh({"fsdp": 8}), zero=3), chips.accelerator.platform)
        padding[name] = scatter_padding(plan, model, chips)
    by_hand = 3 * 64 * 2048 * 4 * 7 * (1 + 7 / 8)
    assert padding == {"v5e:2x4": by_hand, "h100:8": 0.0}
