"""Experts chosen by token id under plans equal one device's, in gradients leaf by leaf and in generated text."""

import jax.numpy as jnp
import numpy as np
import pytest
from contract_cases import afresh, named, of_plan, texts_over
from plan_parity import Case, differences, of_one_device

from eqformer import nn


ROUNDING = 100 * float(np.finfo(np.float32).eps)
GRID = [
    Case("hashed", {"expert": 2, "fsdp": 2}, {"zero": 3, "smallest": 1}),
    Case("hashed", {"expert": 2, "tensor": 2}, {"residual": "sequence", "expert_method": "exchange"}),
    Case("hashed", {"expert": 2, "context": 2}, {"expert_method": "gather"}),
    Case("hashed", {"fsdp": 2, "tensor": 2}, {"residual": "feature"}),
    Case("hashed", {"expert": 2, "pipe": 2}, {"schedule": "zb-h1", "microbatches": 2}),
]


@pytest.mark.parametrize("case", named([], GRID))
def test_gradients_are_those_of_one_device(case):
    assert differences(of_plan(case), of_one_device(case), ROUNDING) == {}


@pytest.mark.grid
def test_other_tokens_ids_are_seen(monkeypatch):
    case, route = Case("hashed", {"expert": 2}), nn.HashRouter.__call__
    wanted = of_one_device(case)

    def routed_by_neighbors(router, x, tokens):
        return route(router, x, tokens.replace(ids=jnp.roll(tokens.ids, 1, -1)))

    monkeypatch.setattr(nn.HashRouter, "__call__", routed_by_neighbors)
    assert differences(afresh(case), wanted, 1e-2)


@pytest.mark.grid
def test_text_is_one_devices():
    texts = texts_over("hashed", {"expert": 2, "tensor": 2, "pipe": 2})
    assert np.array_equal(texts[0].ids, texts[1].ids) and len({*texts[1].ids[0].tolist()}) > 2
    assert np.allclose(texts[0].log_probabilities, texts[1].log_probabilities, atol=2e-5)
