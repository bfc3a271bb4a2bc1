"""Costs that are read from a compiled program's text, against counts by hand."""

import dataclasses
import json
import pathlib

import equinox as eqx
import jax
import pytest

from eqformer.models import build, LlamaConfig, MixtralConfig, T5Config
from eqformer.parallel import COLLECTIVES, make_mesh, Plan, STATE
from eqformer.planning import abstract_mesh, Compilation, compilation_table, decode_forecast, lowered_decode, topology
from eqformer.program import (
    Buffer,
    CompiledCosts,
    count_cycles,
    count_flops,
    FURTHER_ROUNDS,
    largest_buffers,
    read_compiled,
    read_hlo,
)


V5E = (pathlib.Path(__file__).parent / "programs" / "v5e.hlo").read_text()

# A loop that adds a product to what it carries, seven times; a branch of two; a result in the place of an argument.
TEXT = """HloModule jit_f, is_scheduled=true, num_partitions=1

%body (carry: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {
  %carry = (s32[], f32[64,64]{1,0}) parameter(0)
  %number = s32[] get-tuple-element(%carry), index=0
  %sum = f32[64,64]{1,0} get-tuple-element(%carry), index=1
  %left = bf16[64,32]{1,0} fusion(%number), kind=kLoop, calls=%made, metadata={op_name="jit(f)/while/body/up/made"}
  %product = f32[64,64]{1,0} dot(%left, %left), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %more = f32[64,64]{1,0} fusion(%sum, %product), kind=kLoop, calls=%added, backend_config={"estimated_cycles":"100"}
  %next = s32[] add(%number, %number)
  ROOT %back = (s32[], f32[64,64]{1,0}) tuple(%next, %more)
}

%condition (tested: (s32[], f32[64,64])) -> pred[] {
  %tested = (s32[], f32[64,64]{1,0}) parameter(0)
  %at = s32[] get-tuple-element(%tested), index=0
  %last = s32[] constant(7)
  ROOT %is_less = pred[] compare(%at, %last), direction=LT
}

%few (a: f32[64,64]) -> f32[64,64] {
  %a = f32[64,64]{1,0} parameter(0)
  ROOT %b = f32[64,64]{1,0} copy(%a)
}

%many (c: f32[64,64]) -> f32[64,64] {
  %c = f32[64,64]{1,0} parameter(0)
  %d = f32[64,64]{1,0} dot(%c, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %e = f32[64,64]{1,0} multiply(%d, %c)
}

ENTRY %main (x: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = f32[64,64]{1,0} multiply(%x, %x), metadata={op_name="jit(f)/down/start"}
  %near = f32[64,64]{1,0:S(1)} multiply(%x, %x)
  %tuple = (s32[], f32[64,64]{1,0}) tuple(%zero, %start)
  %loop = (s32[], f32[64,64]{1,0}) while(%tuple), condition=%condition, body=%body
  %summed = f32[64,64]{1,0} get-tuple-element(%loop), index=1
  %which = s32[] constant(1)
  ROOT %chosen = f32[64,64]{1,0} conditional(%which, %summed, %summed), branch_computations={%few, %many}
}
"""
MATRIX = 64 * 64 * 4


def executed(text):
    """Operations and cycles of a program's text."""
    program = read_hlo(text)
    return count_flops(program), count_cycles(program)


@pytest.mark.quick
def test_the_buffers_of_a_program():
    """What the loop carries and the product; the carry's next value is in its place, and so is the result."""
    peak, found = largest_buffers(TEXT)
    left = Buffer("bf16[64,32]", 64 * 32 * 2, ("f", "while", "body", "up", "made"))
    assert found[0] == Buffer("f32[64,64]", MATRIX, ("f", "down", "start"))
    assert left in found and peak == 2 * MATRIX + left.size
    apart = TEXT.replace("kind=kLoop, calls=%added", "kind=kInput, calls=%added")
    assert largest_buffers(apart)[0] == peak  # the carry is read for the last time there
    read_later = apart.replace("add(%number, %number)", "add(%number, %sum)")
    assert largest_buffers(read_later)[0] == 3 * MATRIX  # so that its next value needs a place of its own


def test_the_result_of_an_asynchronous_computation_lives_until_it_is_read():
    text = """
%doubled (a: f32[64,64]) -> f32[64,64] {
  %a = f32[64,64]{1,0} parameter(0)
  ROOT %b = f32[64,64]{1,0} add(%a, %a)
}

ENTRY %main (x: f32[64,64]) -> f32[64,64] {
  %x = f32[64,64]{1,0} parameter(0)
  %start = ((f32[64,64]{1,0}), f32[64,64]{1,0}, u32[]) async-start(%x), calls=%doubled
  %done = f32[64,64]{1,0} async-done(%start)
  %first = f32[64,64]{1,0} multiply(%x, %x)
  %second = f32[64,64]{1,0} multiply(%x, %x)
  %both = f32[64,64]{1,0} add(%first, %second)
  ROOT %sum = f32[64,64]{1,0} add(%done, %both)
}
"""
    assert largest_buffers(text)[0] == 4 * MATRIX
    assert largest_buffers(text.replace("add(%done, %both)", "add(%x, %both)"))[0] == 3 * MATRIX  # The control.


@pytest.mark.quick
def test_what_a_program_executes():
    assert executed(TEXT) == (7 * 2 * 64 * 64 * 32 + 2 * 64**3, 700)
    uneven = f'body=%body, metadata={{op_name="jit(f)/{FURTHER_ROUNDS}/while"}}'  # which even loads do not enter
    assert executed(TEXT.replace("body=%body", uneven)) == (2 * 64**3, 0)
    assert executed(TEXT.replace('"estimated_cycles":"100"', '"estimated_cycles":"9223372036854775807"'))[1] == 0


def test_a_batch_of_products_is_a_picture_on_tpus():
    """Of a window as long as the picture, all taps but one are padding."""
    labels = "window={size=8 pad=7_7 rhs_reversal=1}, dim_labels=bf0_0oi->b0f"
    text = f"""ENTRY %main () -> f32[] {{
  %a = bf16[4096,4096,1]{{0,1,2}} parameter(0)
  %b = bf16[8,128,4096]{{2,1,0}} parameter(1)
  ROOT %c = f32[4096,8,128]{{2,0,1}} convolution(%a, %b), {labels}
}}"""
    assert executed(text)[0] == 2 * 4096 * 8 * 128 * 4096


def test_the_cycles_of_a_tpus_loop():
    inside = [line for line in V5E.splitlines() if "estimated_cycles" in line and "calls=" in line]
    assert len(inside) == 1  # the product that runs beside the gather, in a loop of two layers
    (cycles,) = (int(part.partition('"')[0]) for part in inside[0].split('"estimated_cycles":"')[1:])
    assert executed(V5E)[1] == 2 * cycles > 0


def named_bytes(program):
    """What a compiled program sends, by its collectives' names."""
    found = {}
    for each in program.transfers:
        if name := each.named(COLLECTIVES):
            found[name] = found.get(name, 0.0) + each.sent * (each.times or 1)
    return found


NUMBERS = LlamaConfig(vocab=64, embed=32, layers=2, heads=4, kv_heads=2, mlp=64)


def shapes(numbers):
    """A model of shapes."""
    return eqx.filter_eval_shape(lambda: build(numbers, key=jax.random.key(0)))


def test_a_decode_step_holds_what_was_told():
    """In shapes and, compiled for simulated devices, in its arguments; what is told can be kept as JSON."""
    model = eqx.filter_eval_shape(lambda: build(NUMBERS, key=jax.random.key(0)))
    abstract = Plan(abstract_mesh({"fsdp": 4, "tensor": 2}))
    forecast = decode_forecast(abstract, model, topology("v5e:2x4"), rows=8, capacity=64)
    plan = Plan(make_mesh(fsdp=4, tensor=2))
    program = read_compiled(lowered_decode(plan, model, 8, 64).compile(), plan.mesh)
    assert program.argument == pytest.approx(forecast.total, rel=0.02)
    by_hand = 2 * 8 / 4 * 64 * 2 * (2 / 2) * 8 * 4  # layers, rows, slots, keys and values, heads, channels, bytes
    assert forecast.held["caches"] == pytest.approx(by_hand, rel=0.3)  # and the slots' positions
    assert (
        forecast.time.bound == "memory"
        and forecast.time.seconds > forecast.total / topology("v5e:2x4").accelerator.bandwidth
    )
    sent = {cause: size for _, cause, size in forecast.sent}
    assert sent == named_bytes(program) and sent["row-parallel output"] == 2 * 1 / 2 * 2 * 32 * 4 * 2 * 2
    assert CompiledCosts.from_dict(json.loads(json.dumps(program.as_dict()))) == program
    compilation = Compilation(program, 2.0, False)
    assert {row["name"] for row in json.loads(json.dumps(compilation.as_dict()))["transfers"]} >= {
        "row-parallel output"
    }
    table = compilation_table(compilation, forecast)
    assert table.startswith("compiled in 2 s: fits in 16.9 GB\narguments 0.0") and "times the weights" in table
    assert f"{program.sent:,.0f}" in table.splitlines()[-1] and "times the model's own" in table
    chips = topology("v5e:2x4")
    too_small = dataclasses.replace(chips.accelerator, memory=program.held - 1)
    forecast = dataclasses.replace(forecast, target=dataclasses.replace(chips, accelerator=too_small))
    assert "compiled in 2 s: does not fit: 0.000 GB more than" in compilation_table(compilation, forecast)
    assert compilation_table(Compilation(None, 2.0, True, "Used 9G"), forecast).endswith(" run): does not fit: Used 9G")


def test_an_encoder_is_held_and_not_read_to_decode():
    """It has read its text before: a step is compiled without its weights, and multiplies by none of them."""
    numbers = T5Config(vocab=64, embed=32, layers=2, heads=4, head_dim=8, mlp=64, encoder_layers=6)
    model = eqx.filter_eval_shape(lambda: build(numbers, key=jax.random.key(0)))
    told = decode_forecast(Plan(abstract_mesh({})), model, topology("v5e:1x1"), rows=8, capacity=16)
    plan = Plan(make_mesh(devices=jax.devices()[:1]))
    program = read_compiled(lowered_decode(plan, model, 8, 16).compile(), plan.mesh)
    read = told.total - told.held["encoder"]
    of_source = 2 * 2 * 32 * 32 * 4  # layers, keys and values: maps that are not read either, and told
    assert program.argument == pytest.approx(read - of_source, rel=0.01) and told.held["encoder"] > read / 2
    assert told.time.memory == read / topology("v5e:1x1").accelerator.bandwidth
    assert told.operations == pytest.approx(program.operations, rel=0.2)


def test_a_program_holds_its_peak_on_tpus_and_its_allocations_elsewhere():
    """As SmolLM3 with 20 layers on v5e:2x4, which its compiler takes although it allocates more than there is."""
    memory = topology("v5e:2x4").accelerator.memory
    program = CompiledCosts(argument=2_738_000_000, temporary=15_417_000_000, peak=15_999_000_000, platform="tpu")
    on_gpus = dataclasses.replace(program, platform="cuda")
    assert program.held == program.peak and on_gpus.held == program.argument + program.temporary > memory
    told = decode_forecast(Plan(abstract_mesh({})), shapes(NUMBERS), topology("v5e:1x1"), rows=8, capacity=64)
    tables = [compilation_table(Compilation(each, 2.0, False), told) for each in (program, on_gpus)]
    assert tables[0].startswith("compiled in 2 s: fits in 16.9 GB\n")
    assert tables[1].startswith("compiled in 2 s: does not fit: 1.244 GB more than 16.9 GB\n")
    assert program.fits(memory) and not on_gpus.fits(memory) and on_gpus.fits(on_gpus.held)
    assert not Compilation(None, 2.0, False, "Used 17G").fits(memory)


ON_MESHES = {
    "gathered": (NUMBERS, {"fsdp": 2, "context": 2, "tensor": 2}, 3),
    "shared key heads": (dataclasses.replace(NUMBERS, heads=8), {"tensor": 8}, 1),
    "stages": (NUMBERS, {"fsdp": 2, "pipe": 2, "tensor": 2}, 1),
    "experts": (MixtralConfig(vocab=64, embed=32, layers=2, heads=4, kv_heads=2, mlp=64), {"fsdp": 2, "expert": 4}, 1),
}


@pytest.mark.grid
@pytest.mark.parametrize("name", ON_MESHES)
def test_a_decode_step_sends_what_was_told_over_every_axis(name):
    """By each collective's name, as compiled; the control: over each axis that a step uses something is sent."""
    numbers, sizes, zero = ON_MESHES[name]
    model = eqx.filter_eval_shape(lambda: build(numbers, key=jax.random.key(0)))
    abstract, plan = Plan(abstract_mesh(sizes), zero=zero), Plan(make_mesh(**sizes), zero=zero)
    told = decode_forecast(abstract, model, topology("v5e:2x4"), rows=16, capacity=64)
    compiled = named_bytes(read_compiled(lowered_decode(plan, model, 16, 64).compile(), plan.mesh))
    assert {what: size for _, what, size in told.sent} == pytest.approx(compiled)
    over = {cause for cause, *_ in told.sent}
    assert over == {*sizes} - {"fsdp"} | ({STATE} if zero == 3 else set()) and {*told.time.sent} == over
