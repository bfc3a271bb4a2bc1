"""Sizes that do not fit a mesh raise one error each, from shapes alone, before any array is made."""

import dataclasses

import jax
import pytest
from jax.sharding import AxisType
from plan_models import batch_of, model_of, plan_over, shapes

from eqformer import nn, training
from eqformer.parallel import AXES, gpipe, make_mesh, option_values, Plan, SCHEDULES, zero_bubble_v


CHOICES = {
    "zero": ({"fsdp": 2}, {"zero": 4}, r"Plan\(zero=4\): the choices are 0, 1, 2, 3"),
    "residual": ({"tensor": 2}, {"residual": "split"}, r"Plan\(residual='split'\): the choices are replicated, seq"),
    "overlap": ({"tensor": 2}, {"overlap": "all"}, r"Plan\(overlap='all'\): the choices are none, ring, bidirectional"),
    "method": (
        {"context": 2},
        {"context_method": "zag"},
        r"Plan\(context_method='zag'\): the choices are ring, gather",
    ),
    "microbatches": ({"pipe": 2}, {"microbatches": 0}, r"Plan\(microbatches=0\): .* at least 1"),
    "expert method": (
        {"expert": 2},
        {"expert_method": "send"},
        r"expert_method='send'\): the choices are auto, gather, ex",
    ),
    "expert factor": ({"expert": 2}, {"expert_factor": 0.0}, r"Plan\(expert_factor=0.0\): .* give a positive and fin"),
    "no end of slots": (
        {"expert": 2},
        {"expert_factor": float("inf")},
        r"factor=inf\): .* slots in a round .* a positive and finite number",
    ),
    "chunks": ({"pipe": 2}, {"chunks": -1}, r"Plan\(chunks=-1\): .* at least 1"),
    "nothing to overlap": (
        {"tensor": 2},
        {"overlap": "ring"},
        r"overlap='ring', residual='replicated'.*take residual=",
    ),
    "schedule": ({"fsdp": 2}, {"schedule": "fifo"}, r"Plan\(schedule='fifo'\): the choices are gpipe, 1f1b"),
    "chunks of a schedule with none": ({"pipe": 2}, {"chunks": 2}, r"1f1b has one chunk per device, but chunks=2"),
    "too few to loop": (
        {"pipe": 4},
        {"schedule": "looping", "microbatches": 2, "chunks": 2},
        r"microbatches=2 and stages=4; take at least 4",
    ),
    "no multiple to interleave": (
        {"pipe": 4},
        {"schedule": "interleaved", "microbatches": 6, "chunks": 2},
        r"microbatches=6 is not a multiple of stages=4; take 4 or 8",
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_that_are_none_or_do_not_go_together(name):
    mesh, choices, message = CHOICES[name]
    plan = object.__new__(Plan)  # as without the type checks of the tests, which refuse a value by its annotation
    for field in dataclasses.fields(Plan):
        object.__setattr__(plan, field.name, choices.get(field.name, field.default))
    object.__setattr__(plan, "mesh", plan_over(mesh).mesh)
    with pytest.raises(ValueError, match=message):
        plan.__post_init__()


def test_every_schedule_is_a_choice():
    assert option_values("schedule") == (*SCHEDULES,) and option_values("microbatches") == ()


def test_a_choice_that_meets_no_axis_is_no_error():
    assert plan_over({"fsdp": 2}, overlap="ring", residual="replicated").overlap == "ring"
    assert plan_over({"fsdp": 2}, schedule="looping", microbatches=1, chunks=4).chunks == 4


def test_a_schedule_is_a_name_a_function_or_a_table():
    table = zero_bubble_v(2, 4)
    assert plan_over({"pipe": 2}, schedule=table, microbatches=4).timetable() is table
    assert plan_over({"pipe": 2}, schedule=gpipe, microbatches=3).timetable().ticks == gpipe(2, 3).ticks
    with pytest.raises(ValueError, match="'zb-v' is for stages=2 and microbatches=4, but stages=4 and microbatches=4"):
        plan_over({"pipe": 4}, schedule=table, microbatches=4)


@pytest.mark.parametrize(
    ("mesh", "choices", "rows", "seq", "message"),
    [
        ({"fsdp": 2, "expert": 2}, {}, 6, 16, r"fsdp=2, expert=2\) in 1 micro.*: 6 rows .*take a multiple of 4 rows"),
        ({"fsdp": 2, "pipe": 2}, {"microbatches": 3}, 8, 16, r"8 rows do not .* 2 x 3 equal.*multiple of 6 rows"),
        ({"context": 4}, {}, 8, 12, r"context=4 by 'ring': rows of 12 tokens are cut into 8 .*multiple of 8 tokens"),
        ({"context": 4}, {"context_method": "heads"}, 8, 14, r"by 'heads': rows of 14 .* 4 equal.*multiple of 4"),
        (
            {"tensor": 4},
            {"residual": "sequence"},
            8,
            18,
            r"tensor=4: the 18 tokens .* context=1 .*multiple of 4 tokens",
        ),
        (
            {"tensor": 4, "context": 2},
            {"residual": "sequence", "context_method": "heads"},
            8,
            12,
            r"the 6 tokens that a device of context=2 holds .* multiple of 8 tokens",
        ),
    ],
)
def test_rows_and_tokens_that_do_not_fall_into_pieces(mesh, choices, rows, seq, message):
    model = shapes(lambda: model_of("llama"))
    plan_over(mesh, **choices).check(model, rows=24, seq=48)
    with pytest.raises(ValueError, match=message):
        plan_over(mesh, **choices).check(model, rows=rows, seq=seq)


def test_axes_of_a_mesh_that_a_plan_does_not_know():
    with pytest.raises(ValueError, match=r"must have the axes replica, .* but has data \(Auto\); use make_mesh"):
        Plan(jax.make_mesh((8,), ("data",), (AxisType.Auto,)))
    with pytest.raises(ValueError, match=r"all of type Auto, but has replica \(Explicit\)"):
        Plan(jax.make_mesh((8, 1, 1, 1, 1, 1), AXES))


def test_what_is_not_checked_beforehand_is_checked_by_the_step():
    model, optimizer = model_of("llama"), training.optimizer("adamw", model_of("llama"), rate=1e-3)
    state = shapes(lambda: training.init_state(model, optimizer))

    def step(over):
        training.make_step(training.next_token_loss, optimizer, over).lower(state, batch_of(model))

    with pytest.raises(ValueError, match=r"8 rows do not fall into 2 x 6 equal pieces"):
        step(plan_over({"fsdp": 2, "pipe": 2}, microbatches=6))
    with pytest.raises(ValueError, match=r"but the dim has size (48|8) in .* and the axis has 3"):
        step(plan_over({"tensor": 3}))


def test_a_mesh_larger_than_the_devices():
    with pytest.raises(ValueError, match=r"multiply to 16 devices, but there are 8"):
        make_mesh(fsdp=4, tensor=4)


def test_what_fits_is_checked_without_an_array():
    model = shapes(lambda: model_of("windows"))
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(model) if nn.has_shape(x))
    everything = plan_over({"fsdp": 2, "context": 2, "tensor": 2}, zero=3, residual="sequence", overlap="bidirectional")
    everything.check(model, rows=2, seq=16)
