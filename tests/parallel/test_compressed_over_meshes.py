"""Attention to compressed keys, selected blocks and selected pools under plans equals one device's."""

import numpy as np
import pytest
from contract_cases import float64_differences, of_plan, texts_over, write_texts
from plan_models import model_of
from plan_parity import Case, differences, of_one_device


ROUNDING = 250 * float(np.finfo(np.float32).eps)
SELECTED = "compressed and selected"
CHOSEN = Case(SELECTED, {"tensor": 2}, {"residual": "sequence"})
BLOCKED = Case("blocked", {"tensor": 2}, {"residual": "sequence"})
GRID = [
    CHOSEN,
    BLOCKED,
    Case("pooled", {"tensor": 2}, {"residual": "sequence"}),
    Case("pooled", {"tensor": 4}, {"residual": "feature"}),
    Case("pooled", {"fsdp": 2, "tensor": 2}, {"zero": 3, "smallest": 1, "residual": "replicated"}, "full"),
    Case("pooled", {"fsdp": 2, "pipe": 2, "tensor": 2}, {"schedule": "1f1b", "microbatches": 2}),
    Case("pooled lora", {"fsdp": 2, "tensor": 2}, {"zero": 3, "smallest": 1}),
    Case("pooled int8", {"tensor": 2}, {"residual": "replicated"}),
    Case("blocked", {"tensor": 8}, {"residual": "feature"}),  # two devices share a key head
    Case("blocked", {"fsdp": 2, "tensor": 2}, {"zero": 3, "smallest": 1, "residual": "replicated"}, "full"),
    Case("blocked", {"fsdp": 2, "pipe": 2, "tensor": 2}, {"schedule": "1f1b", "microbatches": 2}),
    Case("blocked lora", {"fsdp": 2, "tensor": 2}, {"zero": 3, "smallest": 1}),
    Case("blocked int8", {"tensor": 2}, {"residual": "replicated"}),
    Case(SELECTED, {"tensor": 2}, {"residual": "feature"}),
    Case(SELECTED, {"tensor": 2}, {"residual": "replicated"}, "products"),
    Case("compressed", {"fsdp": 2, "tensor": 2}, {"zero": 3, "smallest": 1, "residual": "sequence"}, "full"),
    Case("compressed", {"tensor": 2}, {"residual": "feature"}),
    Case("compressed", {"replica": 2, "fsdp": 2}, {"zero": 3, "smallest": 1}),
    *(
        Case(SELECTED, mesh, {"schedule": name, "microbatches": 2, **choices})
        for name, mesh, choices in (
            ("gpipe", {"pipe": 2, "tensor": 2}, {"edges": "spread"}),
            ("1f1b", {"pipe": 2, "tensor": 2}, {"residual": "sequence", "stage_remat": True}),
            ("zb-v", {"fsdp": 2, "pipe": 2, "tensor": 2}, {"zero": 3, "smallest": 1, "chunks": 2}),
        )
    ),
    Case(f"{SELECTED} lora", {"fsdp": 2, "tensor": 2}, {"zero": 3, "smallest": 1}),
    Case("compressed int8", {"tensor": 2}, {"residual": "replicated"}),
]


@pytest.mark.grid
@pytest.mark.parametrize("case", GRID, ids=lambda case: case.name)
def test_gradients_are_those_of_one_device(case):
    assert differences(of_plan(case), of_one_device(case), ROUNDING) == {}


@pytest.mark.grid
@pytest.mark.parametrize("case", [CHOSEN, BLOCKED, GRID[2], GRID[15]], ids=lambda case: case.name)
def test_in_float64_the_difference_is_rounding(case):
    assert float64_differences(case) == {}


@pytest.mark.parametrize(
    ("name", "mesh", "message"),
    [
        (SELECTED, {"context": 2}, "CompressedAttention"),
        (SELECTED, {"tensor": 4}, "the dim has size 2 in .* and the axis has 4 devices"),
        ("blocked", {"context": 2}, "BlockIndexedAttention"),
        ("pooled", {"context": 2}, "LatentAttention"),
    ],
)
def test_meshes_that_would_split_rows_or_groups_are_refused(name, mesh, message):
    with pytest.raises(ValueError, match=message):
        of_plan(Case(name, mesh, {}))


@pytest.mark.grid
@pytest.mark.parametrize("name", [SELECTED, "blocked", "pooled"])
@pytest.mark.parametrize("mesh", [{"pipe": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2}])
def test_text_is_one_devices(name, mesh):
    text, alone = texts_over(name, mesh)
    assert np.array_equal(text.ids, alone.ids)
    assert np.allclose(text.log_probabilities, alone.log_probabilities, atol=2e-5)
    assert not np.array_equal(write_texts(model_of("sublayers")).ids, alone.ids)
