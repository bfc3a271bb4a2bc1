"""Several residual streams under plans equal one device's, leaf by leaf."""

import numpy as np
import pytest
from contract_cases import bytes_of_gradients, float64_differences, of_plan, texts_over, write_texts
from plan_models import model_of, plan_over
from plan_parity import Case, differences, of_one_device

from eqformer.planning import sent_bytes, sum_by_cause


ROUNDING = 250 * float(np.finfo(np.float32).eps)  # the gradient of a scale is one sum over all tokens
CASES = [
    Case("streams", {"tensor": 2}, {"residual": "feature"}),
    Case(
        "streams",
        {"fsdp": 2, "pipe": 2, "tensor": 2},
        {"zero": 1, "residual": "feature", "schedule": "zb-h1", "microbatches": 2},
    ),
    Case("streams", {"fsdp": 2, "pipe": 2}, {"zero": 1, "schedule": "zb-h1", "microbatches": 2}),
    Case("streams", {"fsdp": 2, "tensor": 2}, {"zero": 3, "smallest": 1, "residual": "sequence"}),
    Case("streams", {"tensor": 4}, {"residual": "replicated"}, "products"),
    Case("streams", {"fsdp": 2, "context": 2, "tensor": 2}, {"zero": 2, "residual": "sequence", "overlap": "ring"}),
    Case("streams", {"fsdp": 2, "tensor": 4}, {"zero": 1, "residual": "feature"}, "full"),
    Case("streams", {"context": 4, "tensor": 2}, {"context_method": "gather", "residual": "feature"}, "full"),
    Case("streams", {"replica": 2, "context": 2}, {"context_method": "heads"}),
    *(
        Case("streams", mesh, {"schedule": name, "microbatches": 2, **choices})
        for name, mesh, choices in (
            ("gpipe", {"pipe": 2, "tensor": 2}, {"edges": "spread"}),
            ("1f1b", {"pipe": 2, "tensor": 2}, {"residual": "sequence", "stage_remat": True}),
            ("interleaved", {"pipe": 2, "context": 2}, {"chunks": 2}),
            ("zb-v", {"fsdp": 2, "pipe": 2, "tensor": 2}, {"zero": 3, "smallest": 1, "chunks": 2}),
        )
    ),
    Case("streams of experts", {"expert": 2, "fsdp": 2}, {"zero": 3, "smallest": 1}),
    Case("streams of experts", {"expert": 2, "tensor": 2}, {"residual": "feature"}),
    Case("streams lora", {"fsdp": 2, "tensor": 2}, {"zero": 3, "smallest": 1}),
]


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradients_are_those_of_one_device(case):
    assert differences(of_plan(case), of_one_device(case), ROUNDING) == {}


@pytest.mark.grid
@pytest.mark.parametrize("case", [CASES[0], CASES[7]], ids=lambda case: case.name)
def test_in_float64_the_difference_is_rounding(case):
    assert float64_differences(case) == {}


@pytest.mark.grid
def test_stages_send_all_streams_as_the_planner_says():
    counted, told = bytes_of_gradients(Case("streams", {"pipe": 2}, {"schedule": "1f1b", "microbatches": 2}))
    assert told["pipe"] == pytest.approx(counted["pipe"], rel=0.05)


@pytest.mark.quick
def test_the_planner_counts_the_streams():
    plan = plan_over({"pipe": 2}, microbatches=2)
    several, single = (
        sum_by_cause(sent_bytes(plan, model_of(name), rows=8, seq=16))["pipe"] for name in ("streams", "sublayers")
    )
    assert several == 3 * single


@pytest.mark.grid
@pytest.mark.parametrize("mesh", [{"pipe": 2, "context": 2, "tensor": 2}, {"fsdp": 2, "tensor": 4}])
def test_text_is_one_devices(mesh):
    text, alone = texts_over("streams", mesh)
    assert np.array_equal(text.ids, alone.ids)
    assert np.allclose(text.log_probabilities, alone.log_probabilities, atol=2e-5)
    assert not np.array_equal(write_texts(model_of("sublayers")).ids, alone.ids)
