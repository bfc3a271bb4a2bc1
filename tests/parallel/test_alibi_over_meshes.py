"""Attention with linear biases over meshes: each head keeps its slope, in gradients leaf by leaf and in texts."""

import jax.numpy as jnp
import numpy as np
import pytest
from contract_cases import afresh, named, of_plan, texts_over
from plan_parity import Case, differences, of_one_device

from eqformer import nn


ROUNDING = 100 * float(np.finfo(np.float32).eps)
EVERY_RUN = [Case("alibi", {"tensor": 2}, {"residual": "replicated"})]
GRID = [
    Case("alibi", {"context": 2, "tensor": 2}, {"context_method": "ring", "residual": "sequence"}),
    Case("alibi", {"context": 2, "tensor": 2}, {"context_method": "heads", "residual": "replicated"}),
    Case("alibi", {"context": 4}, {"context_method": "gather"}),
    Case("alibi", {"fsdp": 2, "tensor": 4}, {"zero": 3, "smallest": 1, "residual": "feature"}),
    Case("alibi", {"pipe": 2, "tensor": 2}, {"schedule": "zb-h1", "microbatches": 2}),
    Case("alibi", {"pipe": 2, "context": 2}, {"schedule": "1f1b", "microbatches": 2, "context_method": "ring"}),
]


@pytest.mark.parametrize("case", named(EVERY_RUN, GRID))
def test_gradients_are_those_of_one_device(case):
    assert differences(of_plan(case), of_one_device(case), ROUNDING) == {}


@pytest.mark.grid
@pytest.mark.parametrize("case", named([], [EVERY_RUN[0], GRID[0], GRID[1], GRID[3], GRID[4]]))
def test_slopes_that_count_the_heads_of_a_device_are_seen(case, monkeypatch):
    wanted, slopes = of_one_device(case), nn.ALiBi.slopes

    def slopes_of_first_heads(alibi, dtype):
        return slopes(nn.ALiBi(heads=alibi.heads), dtype)[: len(alibi.numbers)] + 0 * alibi.numbers.astype(dtype)

    assert jnp.any(slopes(nn.ALiBi(heads=8), "float32")[4:] != slopes(nn.ALiBi(heads=8), "float32")[:4])
    monkeypatch.setattr(nn.ALiBi, "slopes", slopes_of_first_heads)
    assert differences(afresh(case), wanted, 1e-2)


@pytest.mark.grid
@pytest.mark.parametrize("mesh", [{"tensor": 2, "pipe": 2}, {"context": 2, "tensor": 2}])
def test_text_is_one_devices(mesh):
    texts = texts_over("alibi", mesh)
    assert np.array_equal(texts[0].ids, texts[1].ids) and len({*texts[1].ids[0].tolist()}) > 2
    assert np.allclose(texts[0].log_probabilities, texts[1].log_probabilities, atol=2e-5)
