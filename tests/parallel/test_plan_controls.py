"""Take out one reduction, gather or exchange of a plan, and its results are no longer one device's.

Where a value that differs between devices would be passed off as the same on all, the types refuse the program before
it is compiled; for these a second control does the reduction with the first device's part alone, which the types
cannot tell, and the numbers do.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import plan_controls as control
import pytest
from plan_controls import nothing, of_first, own_exchange, own_part, own_piece, permuted_nowhere, without
from plan_models import batch_of, model_of
from plan_parity import Case, differences, hastily, of_one_device, of_plan, place

from eqformer import training
from eqformer.parallel import _wrap


TYPES = "var(y|ies|ying)|differ"
ROUNDING = 50 * float(np.finfo(np.float32).eps)

DATA = Case("llama", {"fsdp": 2})
ROWS = Case("llama", {"tensor": 2})
SEQUENCE = Case("gpt2", {"tensor": 2}, {"residual": "sequence"})
RINGED = Case("llama", {"tensor": 2}, {"residual": "sequence", "overlap": "ring"})
FEATURE = Case("gpt2", {"tensor": 2}, {"residual": "feature"})
LATENTS = Case("jaxformer", {"tensor": 2}, {"residual": "feature"})
ROUND = Case("llama", {"context": 2}, {"context_method": "ring"})
DROPPED = Case("gpt2", {"context": 2}, {"context_method": "ring"})
GATHERED = Case("llama", {"context": 2}, {"context_method": "gather"})
EXCHANGED = Case("llama", {"context": 2}, {"context_method": "heads"})
STAGES = Case("llama", {"pipe": 2}, {"schedule": "1f1b", "microbatches": 2})
CHUNKS = Case("llama", {"pipe": 2}, {"schedule": "looping", "microbatches": 2, "chunks": 2})
SHARED = Case("llama", {"tensor": 4})
FULL_NORMS = Case("full norms", {"tensor": 2})
EXPERTS = Case("mixture", {"expert": 2}, {"expert_method": "gather"})
SENT = Case("mixture", {"expert": 2}, {"expert_method": "exchange", "expert_factor": 2.0})
SLICES = Case("mixture", {"tensor": 2}, {"residual": "sequence"})
FEATURES = Case("mixture", {"tensor": 2}, {"residual": "feature"})


class Control(NamedTuple):
    """What is changed, under which case, and what refuses it."""

    change: Callable[[Any], None]
    case: Case
    caught_by: str = "numbers"  # or "types", or "nothing"
    every_run: bool = False


CONTROLS: dict[str, Control] = {
    # Sums over rows and tokens.
    "total of losses, unsummed": Control(control.total_of(0, nothing), DATA, "types", True),
    "total of losses": Control(control.total_of(0, of_first), DATA),
    "total of counts, unsummed": Control(control.total_of(1, nothing), DATA, "types"),
    "total of counts": Control(control.total_of(1, of_first), DATA),
    "gradients over fsdp, unsummed": Control(control.gradients_unsummed, DATA, "types"),
    "gradients over fsdp": Control(control.of_first_over("fsdp"), DATA, every_run=True),
    "gradients over replica": Control(control.of_first_over("replica"), Case("llama", {"replica": 2})),
    "gradients over expert": Control(control.of_first_over("expert"), Case("llama", {"expert": 2})),
    "gradients over context": Control(control.of_first_over("context"), ROUND),
    "gradients over tensor, of what is whole in slices": Control(control.of_first_over("tensor"), SEQUENCE),
    "gradients over tensor, of key heads that devices share": Control(control.of_first_over("tensor"), SHARED),
    # Sharded state.
    "scatter of gradients in ZeRO 1": Control(
        without("state._stand_ins", psum_scatter=own_part), DATA._replace(choices={"zero": 1})
    ),
    "scatter of gradients in ZeRO 2": Control(
        without("state._stand_ins", psum_scatter=own_part), DATA._replace(choices={"zero": 2})
    ),
    "scatter of gradients in ZeRO 3": Control(
        without("state._stand_ins", psum_scatter=own_part), DATA._replace(choices={"zero": 3}), every_run=True
    ),
    "gather of parameters": Control(
        without("state._stand_ins", all_gather=own_piece), DATA._replace(choices={"zero": 3})
    ),
    # Tensor parallelism.
    "sum of row maps, unsummed": Control(without("tensor._tensor", psum=nothing), ROWS, "types"),
    "sum of row maps": Control(without("tensor._tensor", psum=of_first), ROWS, every_run=True),
    "sum of the entry's gradient": Control(control.unsummed_entry, ROWS),
    "entry not said to vary": Control(control.untyped_entry, ROWS, "nothing"),
    "bias added once": Control(control.bias_before, ROWS, every_run=True),
    "gather of tokens before maps": Control(without("tensor._tensor", all_gather=own_piece), SEQUENCE),
    "sum and scatter over tokens": Control(without("tensor._tensor", psum_scatter=own_part), SEQUENCE),
    "messages of ringed maps": Control(without("context._shift", ppermute=permuted_nowhere), RINGED),
    "messages of ringed maps of features": Control(
        without("context._shift", ppermute=permuted_nowhere),
        FEATURE._replace(choices=FEATURE.choices | {"overlap": "ring"}),
    ),
    "swaps of ringed maps in stages": Control(
        without("context._shift", all_to_all=lambda x, *_, **__: x),
        Case("llama", {"pipe": 2, "tensor": 2}, {**RINGED.choices, "schedule": "1f1b", "microbatches": 2}),
    ),
    "own key head of several": Control(without("tensor._tensor", axis_index=control.same_place), SHARED),
    "sum and scatter over features": Control(without("tensor._collective_matmul", psum_scatter=own_part), FEATURE),
    "sum of a map to no features, unsummed": Control(without("tensor._feature", psum=nothing), LATENTS),
    "sum of a map to no features": Control(without("tensor._feature", psum=of_first), LATENTS),
    "mean of means": Control(without("tensor._norms", pmean=control.at_place(0, 2, "pmean", nothing)), FEATURE),
    "mean of squares": Control(without("tensor._norms", pmean=control.at_place(1, 2, "pmean", nothing)), FEATURE),
    "mean of squares over all heads": Control(without("tensor._norms", pmean=nothing), FULL_NORMS),
    "own tokens' dropout": Control(control.first_tokens(_wrap.TokensDropout), SEQUENCE),
    "own tokens' positions": Control(control.first_tokens(_wrap.TokensPositions), SEQUENCE),
    "own features' dropout": Control(control.first_tokens(_wrap.FeatureDropout), FEATURE),
    "no array marked as meeting slices": Control(control.marks(False), SEQUENCE, "nothing"),
    "every array marked as meeting slices": Control(control.marks(True), ROWS, "types"),
    # Vocabulary.
    "sum of looked-up vectors, unsummed": Control(
        without("tensor._vocabulary", psum=control.of_shape(3, "psum", nothing)), ROWS
    ),
    "sum of looked-up vectors": Control(
        without("tensor._vocabulary", psum=control.of_shape(3, "psum", of_first)), ROWS
    ),
    "sum and scatter of looked-up vectors": Control(without("tensor._vocabulary", psum_scatter=own_part), SEQUENCE),
    "gather of the head's tokens": Control(without("tensor._vocabulary", all_gather=own_piece), SEQUENCE),
    "gather of the head's features": Control(without("tensor._vocabulary", all_gather=own_piece), FEATURE),
    "exchange of features for rows": Control(
        without("tensor._vocabulary", all_to_all=own_exchange), FEATURE, every_run=True
    ),
    "highest logit, unreduced": Control(without("tensor._vocabulary", pmax=nothing), ROWS, "types", True),
    "sum of the normaliser": Control(
        without("tensor._vocabulary", psum=control.in_turn_of_shape(1, 0, "psum", of_first)), ROWS, every_run=True
    ),
    "sum of the target's logit": Control(
        without("tensor._vocabulary", psum=control.in_turn_of_shape(1, 1, "psum", of_first)), ROWS
    ),
    "own rows of a whole table": Control(
        without("tensor._vocabulary", axis_index=control.same_place), Case("gpt2", {"tensor": 4})
    ),
    # Mixtures of experts.
    "gather of tokens for experts": Control(without("_mixture", all_gather=own_piece), EXPERTS),
    "sum and scatter of what experts give": Control(without("_mixture", psum_scatter=own_part), EXPERTS),
    "choices sent to their experts, and back": Control(without("_mixture", all_to_all=control.kept_all), SENT),
    "own experts of all": Control(without("_mixture", axis_index=control.same_place), EXPERTS),
    "counts of all devices for the balance": Control(
        without("_mixture", psum=nothing), Case("batch mixture", {"fsdp": 2})
    ),
    "sum over slices of hidden features": Control(without("_mixture", psum_scatter=own_part), SLICES),
    "sum over slices, whole": Control(without("_mixture", psum=of_first), SLICES._replace(choices={})),
    "bias of a sum added once": Control(without("_mixture", axis_index=control.same_place), SLICES),
    "features exchanged for tokens": Control(without("_mixture", all_to_all=own_exchange), FEATURES),
    # Context.
    "keys go round": Control(control.still, ROUND, every_run=True),
    "keys are gathered": Control(without("context._context", all_gather=own_piece), GATHERED),
    "heads are exchanged": Control(without("context._context", all_to_all=own_exchange), EXCHANGED),
    "outputs are exchanged back": Control(
        without("context._context", all_to_all=control.at_place(3, 4, "all_to_all", own_exchange)), EXCHANGED
    ),
    "tokens are gathered beside heads": Control(without("context._context", all_gather=own_piece), EXCHANGED),
    "positions in the order of the ring": Control(control.in_reading_order("positions"), ROUND),
    "documents in the order of the ring": Control(control.in_reading_order("segments"), ROUND),
    "keys of dropout in the order of the ring": Control(control.in_reading_order("keys"), DROPPED),
    "lengths of rows beside their pieces": Control(control.in_reading_order("lengths"), Case("long", {"context": 2})),
    # Pipelines.
    "sum of the edges' gradients, unsummed": Control(without("pipeline._pipeline", psum=nothing), STAGES, "types"),
    "sum of the edges' gradients": Control(without("pipeline._pipeline", psum=of_first), STAGES),
    "messages between stages": Control(
        without("pipeline._pipeline", ppermute=permuted_nowhere), STAGES, every_run=True
    ),
    "gradients sent back between stages": Control(
        without("pipeline._pipeline", ppermute=control.at_place(1, 2, "ppermute", permuted_nowhere)), STAGES
    ),
    "layers in the order of the ring": Control(control.in_order_read, CHUNKS),
}


def named() -> list:
    """The controls, of which some are in every run: the cheap ones, and one of each kind."""
    return [
        pytest.param(*control[:3], id=name, marks=[] if control.every_run else pytest.mark.grid)
        for name, control in CONTROLS.items()
    ]


@pytest.mark.parametrize(("change", "case", "caught_by"), named())
def test_a_plan_needs_it(change, case, caught_by, monkeypatch):
    expected = of_one_device(case)
    change(monkeypatch)
    if caught_by == "types":
        with pytest.raises((ValueError, TypeError), match=TYPES):
            of_plan(case)
        return
    wrong = differences(of_plan(case), expected, ROUNDING)
    # What only types say (where a sum stands in the backward pass) changes no number when it is left out.
    assert not wrong if caught_by == "nothing" else max(wrong.values()) > 1e-3


CASES = {control.case.name: control.case for control in CONTROLS.values()}


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_without_a_change_there_is_no_difference(case):
    assert differences(of_plan(case), of_one_device(case), ROUNDING) == {}


EVALUATED = Case("llama", {"fsdp": 2, "pipe": 2, "tensor": 2}, {"microbatches": 2})
OF_EVALUATION: dict[str, tuple[Callable[[Any], None] | None, str]] = {
    "nothing": (None, ""),
    "highest logit": (without("tensor._vocabulary", pmax=control.of_shape(1, "pmax", of_first)), "correct"),
    "first of the highest": (without("tensor._vocabulary", pmin=of_first), "correct"),
    "first of the highest, unreduced": (without("tensor._vocabulary", pmin=nothing), "types"),
    "last stage's rows": (without("pipeline._pipelined_stack", psum=of_first), "nats"),
    "last stage's rows, unreduced": (without("pipeline._pipelined_stack", psum=nothing), "types"),
    "messages between stages": (without("pipeline._pipelined_stack", ppermute=permuted_nowhere), "nats"),
    "total over rows": (control.total_of(0, of_first), "nats"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "nothing" else pytest.mark.grid) for name in OF_EVALUATION]
)
def test_an_evaluation_needs_it(name, monkeypatch):
    change, wrong = OF_EVALUATION[name]
    plan, model = EVALUATED.plan, model_of("llama")
    batch = batch_of(model)
    want = hastily(training.evaluation_sums, model, batch)(model, batch)
    placed = place(model, plan)
    if change is not None:
        change(monkeypatch)
    if wrong == "types":
        with pytest.raises((ValueError, TypeError), match=TYPES):
            hastily(training.planned_evaluation(plan), placed, batch)
        return
    got = hastily(training.planned_evaluation(plan), placed, batch)(placed, batch)
    unlike = {name for name in want if not np.isclose(got[name], want[name], rtol=ROUNDING)}
    assert wrong in unlike if wrong else not unlike
