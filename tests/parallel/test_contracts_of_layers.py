"""Users' own routers and feed-forward layers run over every axis, because rooms rely on contracts."""

import functools
from typing import Any

import numpy as np
import pytest
from contract_cases import bytes_of_gradients, is_seen, named, of_plan, ROUNDING, STAGES, ZERO
from plan_blocks import Cosine
from plan_models import model_of
from plan_parity import Case, differences, of_one_device

from eqformer import nn, planning, training
from eqformer.parallel import _expert_parallel, EXPERT, TENSOR
from eqformer.parallel.tensor import _tensor
from eqformer.parallel.tensor._tensor import count_once
from eqformer.recipes import report


EXCHANGE: dict[str, Any] = {"expert_method": "exchange", "expert_factor": 0.5}
ROUTED = [Case("cosine rows", {"expert": 2}, {})]
MORE_ROUTED = [
    Case("cosine rows", {"expert": 2, "tensor": 2}, EXCHANGE | {"residual": "sequence"}),
    Case("cosine rows", {"fsdp": 2, "expert": 2, "tensor": 2}, ZERO | EXCHANGE | {"residual": "sequence"}),
    Case("cosine", {"expert": 2, "tensor": 2}, {"residual": "feature"}),
    Case("cosine", {"expert": 2, "tensor": 2}, EXCHANGE),
    Case("cosine rows", {"fsdp": 2, "tensor": 2}, ZERO | {"residual": "sequence"}),
    Case("cosine rows", {"expert": 2, "tensor": 2}, {"residual": "feature"}),
    Case("cosine", {"fsdp": 2, "expert": 2, "context": 2}, {"zero": 2}),
    Case("cosine", {"pipe": 2, "tensor": 2}, STAGES),
]


@pytest.mark.grid
@pytest.mark.parametrize("case", named(ROUTED, MORE_ROUTED))
def test_a_router_of_ones_own_chooses_as_on_one_device(case):
    assert differences(of_plan(case), of_one_device(case), ROUNDING) == {}


@pytest.mark.grid
def test_a_router_that_needs_rows_must_say_so(monkeypatch):
    """Each device would take the mean of its own tokens."""
    alone = nn.RouterFacts(8, 2, "token")
    with monkeypatch.context() as patched:
        patched.setattr(Cosine, "facts", lambda self: alone)
        assert is_seen(MORE_ROUTED[0])
    model = model_of("cosine rows")
    with pytest.raises(ValueError, match=r"context=2: .*layer has a Cosine, whose choices depend on whole rows"):
        Case("cosine rows", {"context": 2}).plan.check(model, rows=8, seq=16)
    Case("cosine", {"context": 2}).plan.check(model_of("cosine"), rows=8, seq=16)


@pytest.mark.grid
def test_a_router_in_slices_is_put_together_and_counts_once(monkeypatch):
    monkeypatch.setattr(_expert_parallel, "count_once", lambda stream, y: stream.reduce("row-parallel output", y))
    assert is_seen(Case("cosine rows", {"expert": 2, "tensor": 2}, EXCHANGE))


@pytest.mark.quick
def test_a_router_of_ones_own_is_counted():
    """A token takes two of eight experts; beside them there is the map to twelve numbers, for one to eight."""
    plain, own = model_of("mixture"), model_of("cosine")
    count = functools.partial(planning.flops_per_token, seq=16, backward=False)
    assert count(own) - count(plain) == 4 * 2 * 32 * (12 - 8)
    idle = lambda model: planning.parameter_count(model) - planning.parameter_count(model, active=True)
    assert idle(own) == idle(plain) == 4 * 6 * (3 * 32 * 16 + 2 * 16 + 32)


@pytest.mark.grid
@pytest.mark.parametrize(
    "case",
    named(ROUTED, [Case("cosine", {"expert": 2, "fsdp": 2}, {"expert_method": "exchange", "expert_factor": 0.25})]),
)
def test_bytes_that_experts_of_a_foreign_router_send(case):
    counted, told = bytes_of_gradients(case)
    assert counted[EXPERT] == pytest.approx(told[EXPERT], rel=0.03)


LAYERS = [
    Case("own layers", {"fsdp": 2, "tensor": 2}, ZERO | {"residual": "feature"}),
]
MORE_LAYERS = [
    Case("own layers", {"pipe": 2, "tensor": 2}, STAGES),
    Case("own layers", {"tensor": 4}, {"residual": "feature"}),
    Case("own layers", {"fsdp": 2, "tensor": 2}, ZERO),
    Case("own layers lora", {"fsdp": 2, "tensor": 2}, {"zero": 2, "residual": "sequence"}),
    Case("own layers lora", {"tensor": 2}, {"residual": "feature"}),
    Case("own layers int8", {"tensor": 2}),
]


@pytest.mark.grid
@pytest.mark.parametrize("case", named(LAYERS, MORE_LAYERS))
def test_feed_forward_layers_of_ones_own_are_split_or_whole(case):
    assert differences(of_plan(case), of_one_device(case), ROUNDING) == {}


@pytest.mark.grid
@pytest.mark.parametrize("case", named(LAYERS, MORE_LAYERS[1:3]))
def test_a_whole_layer_counts_once(monkeypatch, case):
    monkeypatch.setattr(_tensor, "count_once", lambda stream, y: count_once(stream, y) * 0)
    assert is_seen(case)


def test_whole_layers_are_told():
    (line,) = report.replicated_lines(LAYERS[0].plan, model_of("own layers"))
    assert line.split(": ")[-1] == "stacks[0].blocks.blocks[1].layer, stacks[0].blocks.blocks[2].layer"


COUNTED = [Case("own layers", {"tensor": 2}), Case("own layers", {"tensor": 2}, {"residual": "sequence"})]


@pytest.mark.parametrize("case", named([], [*COUNTED, LAYERS[0], MORE_LAYERS[0]]))
def test_bytes_of_whole_layers_are_counted(case):
    counted, told = bytes_of_gradients(case)
    assert counted[TENSOR] == pytest.approx(told[TENSOR], rel=0.03)


@pytest.mark.grid
def test_a_routers_own_rule_rebalances_it():
    model = model_of("cosine rows")
    aux = of_one_device(ROUTED[0]).aux
    router = lambda model: model.stacks[0].blocks.feed_forward.layer.router
    moved = router(training.rebalance_routers(model, aux, 0.1)).handicap
    load = np.asarray(aux[0].load)
    assert load.shape == (4, 8) and np.ptp(load) > 0
    expected = router(model).handicap + 0.1 * (load / load.mean(-1, keepdims=True) - 1)
    np.testing.assert_allclose(moved, expected, atol=1e-6)
