"""Bytes that compiled gradients and steps send, against lower bounds for each split."""

import re

import equinox as eqx
import jax
import pytest
from haste import FAST
from plan_parity import batch_of, model_of, place

from eqformer import planning, training
from eqformer.parallel import count_link_ticks, make_mesh, Plan, shardings
from eqformer.program import bytes_sent, list_transfers, read_hlo


ROWS, SEQ, LAYERS, EMBED, KV_EMBED = 8, 32, 4, 32, 8


def model_and_batch(plan: Plan, remat: str):
    model = model_of("llama", remat=remat)
    batch = batch_of(model, ROWS, SEQ)
    return model, jax.device_put(batch, shardings(plan.batch_specs(batch), plan.mesh))


def sent_by_gradients(plan: Plan, remat: str = "none", kind: str = "") -> dict[str, float]:
    """Bytes a device for loss and gradients, by the axes they go over."""
    return by_axes(plan, program_of_gradients(plan, remat), kind)


def program_of_gradients(plan: Plan, remat: str):
    """The program of loss and gradients, optimised as usual."""
    model, batch = model_and_batch(plan, remat)
    arrays, rest = eqx.partition(place(model, plan), eqx.is_array)
    gradients = training.make_gradient_function(training.next_token_loss, plan)
    run = jax.jit(lambda arrays, batch, key: gradients(eqx.combine(arrays, rest), batch, key))
    return run.lower(arrays, batch, jax.random.key(0)).compile(compiler_options=FAST)


def by_axes(plan: Plan, compiled, kind: str = "") -> dict[str, float]:
    """Bytes sent over each axis or product of axes, by all collectives or by those of one kind."""
    transfers = [t for t in list_transfers(read_hlo(compiled, mesh=plan.mesh)) if kind in t.kind]
    total: dict[str, float] = {}
    for transfer in transfers:
        name = " x ".join(transfer.axes or ())
        total[name] = total.get(name, 0) + bytes_sent([transfer])
    return total


def parameters(model) -> int:
    return sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))


def share(devices: int) -> float:
    return (devices - 1) / devices


@pytest.mark.grid
def test_replicated_state_sends_each_gradient_once():
    plan = Plan(make_mesh(fsdp=8))
    sent = sent_by_gradients(plan)
    least = planning.sharded_state_bytes(parameters(model_of("llama")), 8, zero=0, gradient_bytes=4)
    assert set(sent) == {"fsdp"}
    assert 1 <= sent["fsdp"] / least < 1.001  # two scalars more, the loss's sum and count


@pytest.mark.grid
@pytest.mark.parametrize("remat", ["none", "products"])
def test_fully_sharded_parameters_are_gathered_twice_and_their_gradients_scattered_once(remat):
    plan = Plan(make_mesh(fsdp=4, replica=2), zero=3, smallest=1)
    model = model_of("llama")
    blocks = parameters(model.stacks)
    edges = parameters(model) - blocks  # gathered once for both passes
    sent = sent_by_gradients(plan, remat)
    assert 0.99 < sent["fsdp"] / (4 * share(4) * (3 * blocks + 2 * edges)) < 1.001
    assert sent["replica"] / (2 * share(2) * 4 * (blocks + edges) / 4) == pytest.approx(1, abs=0.001)


def test_a_step_scatters_gradients_and_gathers_parameters_once():
    plan, model = Plan(make_mesh(fsdp=8), zero=1, smallest=1), model_of("llama")
    states = training.PlannedState(lambda: model, training.optimizer("adamw", model, rate=1e-2), plan)
    step = training.make_step(training.next_token_loss, states.optimizer, plan)
    program = planning.lowered_step(states, step, planning.batch_shapes(ROWS, SEQ)).compile()
    sent = by_axes(plan, getattr(program, "compiled", program))
    least = planning.sharded_state_bytes(parameters(model), 8, zero=1, weight_bytes=4, gradient_bytes=4)
    assert 1 <= sent["fsdp"] / least < 1.001


# Per device 4 rows of 32 tokens; attention and feed-forward layers, then embedding and head, in units of T h a.
UNIT = 4 * SEQ * EMBED * 4
EDGES = 4 * share(4) * UNIT


@pytest.mark.grid
@pytest.mark.parametrize(
    "residual,overlap,remat,units",
    [
        ("replicated", "none", "none", 8),
        ("replicated", "none", "products", 8),
        ("sequence", "none", "none", 8),
        # Inputs are gathered again, as Megatron does, not kept.
        ("sequence", "none", "products", 10),
        ("sequence", "ring", "none", 10),
        ("sequence", "bidirectional", "products", 10),
    ],
)
def test_a_tensor_parallel_layer_sends_what_it_must(residual, overlap, remat, units):
    plan = Plan(make_mesh(fsdp=2, tensor=4), residual=residual, overlap=overlap)
    program = program_of_gradients(plan, remat)
    sent = by_axes(plan, program)
    least = LAYERS * planning.tensor_bytes(4 * SEQ, EMBED, 4, activation_bytes=4) * units / 8 + EDGES
    scalars = 2 * share(4) * 3 * 4 * SEQ * 4  # each token's peak, normaliser and target logit, in the loss
    assert sent["tensor"] / (least + scalars) == pytest.approx(1, abs=0.001)
    # What modules send stands under their paths: that of the maps, and not under any path that there is not.
    paths = [".".join(transfer.scopes) for transfer in list_transfers(read_hlo(program, mesh=plan.mesh))]
    stands = lambda *names: any(re.search(r"\..*".join(map(re.escape, names)), path) for path in paths)
    assert stands("stacks[0]", "blocks.sublayers[0].layer.output", "row-parallel output") and stands(
        "embedding.token embeddings"
    )
    assert stands("stacks[0]", "blocks.sublayers[1].layer.down", "row-parallel output")
    assert not stands("blocks.sublayers[0].layer.query", "row-parallel output")


@pytest.mark.grid
@pytest.mark.parametrize("method", ["ring", "gather", "heads"])
def test_attention_over_split_rows_sends_keys_and_values(method):
    plan = Plan(make_mesh(fsdp=2, context=4), context_method=method)
    sent = sent_by_gradients(plan)
    tokens = 4 * SEQ
    least = LAYERS * planning.context_bytes(tokens, KV_EMBED, 4, method=method, embed=EMBED, activation_bytes=4)
    # Positions and segments go along, which is much beside heads of four channels.
    places = 2 * 4 * share(4) * tokens
    times = {"ring": 2 * LAYERS, "gather": LAYERS, "heads": LAYERS}[method]
    assert (sent["context"] - times * places) / least == pytest.approx(1 if method != "heads" else 1.2, abs=0.05)


@pytest.mark.grid
def test_a_pipeline_sends_each_microbatch_up_and_down():
    """Twice a tick one microbatch's stream, in those ticks in which some device has it to send."""
    plan = Plan(make_mesh(fsdp=2, pipe=4), microbatches=4)
    permutes = sent_by_gradients(plan, kind="collective-permute")
    unit = SEQ * EMBED * 4
    schedule = plan.timetable()
    assert permutes == {"pipe": 2 * schedule.ticks * unit}
    busy = sum(count_link_ticks(schedule).values())
    assert busy == 2 * (4 + 4 - 2)
    least = planning.pipeline_bytes(SEQ, EMBED, 4, activation_bytes=4)
    assert busy * unit / least == (4 + 4 - 2) / 4
