"""The contrastive loss, its gradients and metrics equal one device's over every axis, with all devices' candidates."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from loss_parity import CASES, fields_of_rows, metrics_of_steps, ROUNDING
from plan_models import model_of
from plan_parity import alone, Case, differences, total_under, under

from eqformer import Batch, training
from eqformer.parallel import _global_values


LOSSES = {
    "mean": training.contrastive_loss(temperature=0.3),
    "last token": training.contrastive_loss(temperature=0.3, pooling="lasttoken", symmetric=True, dims=(8, 32)),
    "first token": training.contrastive_loss(temperature=0.3, pooling="cls", similarity="dot"),
}
WHOLE = [
    Case("llama", {"replica": 2, "fsdp": 2, "tensor": 2}, {"zero": 2, "residual": "sequence"}),
    Case("llama", {"fsdp": 4, "context": 2}, {"zero": 1, "context_method": "ring"}),
    CASES[0],
    Case("llama", {"fsdp": 2, "pipe": 2, "context": 2}, {"zero": 2, "schedule": "zb-h1", "microbatches": 2}),
    Case("llama", {"fsdp": 2, "pipe": 2, "tensor": 2}, {"schedule": "gpipe", "microbatches": 2}),
    CASES[2],
]


@functools.cache
def batch_for(model: str) -> Batch:
    """Pairs of rows; every other row has padding at its end."""
    fields: Any = fields_of_rows(model) | {"group": 2, "segments": None, "documents": None}
    seq = fields["ids"].shape[1]
    lengths = np.array([seq, seq - 3, 5, seq, seq, 9, seq - 1, seq])[:, None]
    fields["positions"] = np.where(np.arange(seq) < lengths, np.arange(seq), -1).astype(np.int32)
    return Batch(**fields)


@functools.cache
def of_one_device(model: str, name: str, microbatches: int = 1) -> Any:
    """Of as many microbatches as the plan has, since candidates come from one microbatch."""
    return alone(model_of(model), batch_for(model), LOSSES[name], microbatches)


@pytest.mark.grid
def test_candidates_come_from_all_devices():
    name, case = "five layers", Case("five layers", {"fsdp": 2, "tensor": 2}, {"zero": 1})
    planned = under(case.plan, model_of(name), batch_for(name), LOSSES["mean"])
    assert differences(planned, of_one_device(name, "mean"), ROUNDING) == {}


@pytest.mark.grid
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case.name)
def test_loss_and_gradients_equal_one_devices(case, name):
    planned = under(case.plan, model_of(case.model, case.remat), batch_for(case.model), LOSSES[name])
    alone_outcome = of_one_device(case.model, name, case.choices.get("microbatches", 1))
    assert differences(planned, alone_outcome, ROUNDING) == {}


@pytest.mark.grid
@pytest.mark.parametrize("name", LOSSES)
def test_an_encoder_equals_one_device_in_float64(name):
    """In float32 the norms after each residual addition round more than the losses of other cases."""
    with jax.enable_x64(True):
        case = Case("bert", {"fsdp": 2, "context": 2, "tensor": 2}, {"zero": 3, "smallest": 1, "residual": "sequence"})
        model, batch = model_of("bert", dtypes=("float64", "float64")), batch_for("bert")
        planned = under(case.plan, model, batch, LOSSES[name])
        assert differences(planned, alone(model, batch, LOSSES[name]), 1e-11) == {}


@pytest.mark.grid
@pytest.mark.parametrize("mesh", [{"context": 2, "tensor": 2}, {"fsdp": 2, "pipe": 2}])
def test_metrics_equal_one_devices(mesh):
    names = ("retrieval_accuracy", "positive_similarity", "loss")
    options = {"schedule": "1f1b"} if "pipe" in mesh else {}
    loss = LOSSES["mean"]
    rows = metrics_of_steps(loss, batch_for("llama"), names, mesh, options, microbatches=2)
    assert np.allclose(rows[0], rows[1], rtol=1e-4, atol=1e-5)


@pytest.mark.grid
def test_without_the_other_devices_candidates_the_loss_differs(monkeypatch):
    """The control of `gather_rows`."""
    want = float(of_one_device("llama", "mean").total)
    monkeypatch.setattr(_global_values.send, "all_gather", lambda name, x, axes: x)
    monkeypatch.setattr(_global_values.jax.lax, "axis_index", lambda axes: 0)
    case = Case("llama", {"fsdp": 4}, {"zero": 1})
    got = total_under(case.plan, model_of("llama"), batch_for("llama"), LOSSES["mean"])
    assert abs(got / want - 1) > 0.1
