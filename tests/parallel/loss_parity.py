"""Cases and measurements that the tests of losses over meshes share."""

from collections.abc import Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from plan_models import batch_of, model_of, plan_over
from plan_parity import Case

from eqformer import Batch, training
from eqformer._shapes import batch_fields


ROUNDING = 50 * float(np.finfo(np.float32).eps)
CASES = [
    Case("llama", {"fsdp": 2, "context": 2, "tensor": 2}, {"zero": 3, "smallest": 1, "residual": "sequence"}),
    Case("llama", {"fsdp": 2, "pipe": 2, "context": 2}, {"zero": 2, "schedule": "zb-h1", "microbatches": 2}),
    Case("shared mixture", {"fsdp": 2, "tensor": 2}, {"zero": 1, "residual": "feature", "microbatches": 2}),
    Case("llama", {"pipe": 2, "tensor": 2}, {"schedule": "gpipe", "microbatches": 4}),
]
over_three_meshes = pytest.mark.parametrize(
    "mesh, options",
    [({"context": 2, "tensor": 2}, {}), ({"fsdp": 2, "pipe": 2}, {"schedule": "1f1b"}), ({"fsdp": 4}, {"zero": 3})],
)


def fields_of_rows(model: str) -> dict[str, Any]:
    """Return the fields of a `Batch` of eight rows for a model."""
    return batch_fields(batch_of(model_of(model), 8))


def metrics_of_steps(
    loss: Any,
    batch: Batch,
    names: Sequence[str],
    mesh: Mapping[str, int],
    options: Mapping[str, Any],
    microbatches: int = 1,
) -> list[list[float]]:
    """Return the named metrics of one step on one device, and of the same step over a mesh.

    `microbatches` counts those of the one device; the mesh has its own number.
    """
    model = model_of("llama")
    optimizer = training.optimizer("sgd", model, rate=1e-3)
    plan = plan_over(dict(mesh), microbatches=1 if mesh == {"fsdp": 4} else 2, **options)
    rows = []
    alone = training.make_step(loss, optimizer, microbatches=microbatches)
    for step in (alone, training.make_step(loss, optimizer, plan)):
        state = training.init_state(jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, model), optimizer)
        metrics = step(state, batch, None)[1]
        rows.append([float(metrics[name]) for name in names])
    return rows
