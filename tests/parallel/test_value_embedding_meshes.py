"""Values by token id and skips from the embedding under plans equal one device's, leaf by leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract_cases import afresh, float64_differences, named, of_plan
from plan_models import model_of, plan_over
from plan_parity import Case, differences, of_one_device

from eqformer import nn


ROUNDING = 100 * float(np.finfo(np.float32).eps)  # the gradient of a factor is one sum over all tokens
GRID = [
    Case("speedrun", {"fsdp": 2, "tensor": 2}, {"zero": 3, "smallest": 1, "residual": "sequence"}),
    Case("speedrun", {"tensor": 4}, {"residual": "replicated"}, "products"),
    Case("speedrun", {"fsdp": 2, "context": 2, "tensor": 2}, {"zero": 2, "residual": "sequence", "overlap": "ring"}),
    Case("speedrun", {"fsdp": 2, "tensor": 4}, {"zero": 1, "residual": "feature"}, "full"),
    Case("speedrun", {"context": 4, "tensor": 2}, {"context_method": "gather", "residual": "replicated"}, "full"),
    Case("speedrun", {"replica": 2, "context": 2}, {"context_method": "heads"}),
    Case("values by id", {"fsdp": 2, "tensor": 4}, {"zero": 3, "smallest": 1, "residual": "replicated"}),
    Case("values by id", {"tensor": 4}, {"residual": "sequence"}, "products"),
    Case("values by id", {"fsdp": 2, "tensor": 2}, {"zero": 1, "residual": "feature"}),
    *(
        Case("values by id", mesh, {"schedule": name, "microbatches": 2})
        for name, mesh in (("gpipe", {"pipe": 2, "tensor": 2}), ("zb-h1", {"fsdp": 2, "pipe": 2, "context": 2}))
    ),
]


@pytest.mark.parametrize("case", named([], GRID))
def test_gradients_are_those_of_one_device(case):
    assert differences(of_plan(case), of_one_device(case), ROUNDING) == {}


@pytest.mark.grid
@pytest.mark.parametrize("case", [GRID[3], GRID[8]], ids=lambda case: case.name)
def test_in_float64_the_difference_is_rounding(case):
    assert float64_differences(case) == {}


@pytest.mark.grid
def test_other_tokens_ids_are_seen(monkeypatch):
    case: Any = Case("values by id", {"tensor": 2})
    wanted, look_up = of_one_device(case), nn.ValueEmbedding.__call__
    monkeypatch.setattr(nn.ValueEmbedding, "__call__", lambda table, ids: look_up(table, jnp.roll(ids, 1, -1)))
    assert differences(afresh(case), wanted, 1e-2)


@pytest.mark.quick
def test_a_pipeline_of_skips_is_refused():
    plan = plan_over({"pipe": 2}, microbatches=2)
    with pytest.raises(ValueError, match=r"pipe=2: stacks\[0\] reads the embedded tokens \(EmbeddingSkip\).*leave out"):
        plan.check(model_of("speedrun"), rows=8, seq=16)
    plan.check(model_of("values by id"), rows=8, seq=16)


def test_tables_are_split_by_heads():
    model = model_of("speedrun")
    specs = plan_over({"tensor": 4}).parameter_specs(model)
    tables = [
        spec.weight
        for spec in jax.tree.leaves(specs, is_leaf=lambda node: isinstance(node, nn.ValueEmbedding))
        if isinstance(spec, nn.ValueEmbedding)
    ]
    assert tables == [jax.sharding.PartitionSpec(None, None, "tensor", None)] * 2
