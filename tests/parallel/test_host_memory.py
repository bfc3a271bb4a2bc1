"""Optimizer state and residuals in host memory: the same bits, the counted bytes, and compiled programs."""

from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from compilers import devices_for
from plan_models import batch_of, model_of, plan_over

from eqformer import models, nn, planning, training
from eqformer.parallel import _check_plan, make_mesh, Plan
from eqformer.program import read_compiled


def kinds(tree: Any) -> list[str | None]:
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


def rule(model: nn.Transformer, moments: str = "float32") -> training.Optimizer:
    return training.optimizer("adamw", model, rate=1e-3, moments=moments)


def states_of(memory: Any, mesh: dict, moments: str = "float32", **choices: Any) -> training.PlannedState:
    model = model_of("llama")
    plan = plan_over(mesh, optimizer_memory=memory, smallest=1, **choices)
    return training.PlannedState(lambda: model, rule(model, moments), plan)


def step_of(states: training.PlannedState) -> training.Step:
    return training.make_step(training.next_token_loss, states.optimizer, states.plan)


def stepped(step: training.Step, state: Any, steps: int) -> Any:
    for _ in range(steps):
        state, _ = step(state, batch_of(model_of("llama")), jax.random.key(7))
    return state


CASES = [
    ({"fsdp": 2}, "float32", {"zero": 1}),
    ({"fsdp": 2}, "8bit", {"zero": 1}),
    ({"fsdp": 2, "pipe": 2}, "8bit", {"zero": 1, "microbatches": 2, "schedule": "interleaved", "chunks": 2}),
    ({"fsdp": 2, "tensor": 2}, "float32", {"zero": 3}),
]


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_and_checkpoints_are_the_same_to_the_bit(case, tmp_path):
    """Two steps, a checkpoint, and one step more from it by the other way of keeping the state."""
    mesh, moments, choices = case
    ways = {memory: states_of(memory, mesh, moments, **choices) for memory in ("device", "pinned_host")}
    steps, ended = {memory: step_of(states) for memory, states in ways.items()}, {}
    for memory, states in ways.items():
        state = stepped(steps[memory], states.init(), 2)
        counters = 1 + (moments == "8bit")
        far = ["pinned_host"] * (memory == "pinned_host") * (len(kinds(state.optimizer_state)) - counters)
        assert [kind for kind in kinds(state.optimizer_state) if kind != "device"] == far
        assert {*kinds(state.model)} == {"device"}
        with training.Checkpointer(tmp_path / memory) as checkpointer:
            state = states.save(checkpointer, state, 2, {})
            assert [kind for kind in kinds(state.optimizer_state) if kind != "device"] == far
        other = "device" if memory == "pinned_host" else "pinned_host"
        again, _ = ways[other].restore(training.Checkpointer(tmp_path / memory))
        ended[memory] = stepped(steps[other], again, 1)
    pairs = zip(*(jax.tree.leaves(eqx.filter(each, eqx.is_array)) for each in ended.values()), strict=True)
    assert all(one.dtype == two.dtype and np.array_equal(one, two) for one, two in pairs)


@pytest.mark.quick
def test_a_step_that_brings_nothing_near_is_refused(monkeypatch):
    """The control: the state is really elsewhere, and JAX mixes no memories."""
    states = states_of("pinned_host", {"fsdp": 2}, zero=1)
    monkeypatch.setattr(training._gradients, "fetch_from_host", lambda _, __, memory, gradients: (memory, gradients))
    with pytest.raises(ValueError, match="memory_space of all inputs"):
        stepped(step_of(states), states.init(), 1)


@pytest.mark.grid
def test_it_is_counted_where_it_lies():
    """By hand: two moments in float32 of every parameter, in halves, on the host; the step's number on the device."""
    here, away = (states_of(memory, {"fsdp": 2}, zero=1) for memory in ("device", "pinned_host"))
    one, other = planning.state_bytes(here), planning.state_bytes(away)
    assert one["optimizer state"][1] == 4 + 2 * 4 * sum(
        x.size for x in jax.tree.leaves(training.trainable(here.build()))
    )
    assert other["optimizer state"] == (4, 4) and other["parameters"] == one["parameters"]
    assert other["optimizer state on its host"] == tuple(size - 4 for size in one["optimizer state"])
    chips, batch = planning.topology("v5e:1x2"), planning.batch_shapes(8, 16)
    told = [planning.forecast(each, each.build(), batch, chips) for each in (here, away)]
    assert (told[0].on_host, told[1].on_host) == (0, other["optimizer state on its host"][0])
    # An update needs the moments on the device beside the gradients; elsewhere in the step they are not there.
    estimates = [forecast.total - forecast.held[planning.MARGIN] for forecast in told]
    assert estimates[0] - told[1].on_host <= estimates[1] <= estimates[0]


def test_devices_without_such_memory_are_refused(monkeypatch):
    monkeypatch.setattr(_check_plan, "_memory_kinds", lambda device: ["device", "vmem"])
    with pytest.raises(
        ValueError, match="'pinned_host'.* have the memories device, vmem; take optimizer_memory='device'"
    ):
        plan_over({"fsdp": 2}, optimizer_memory="pinned_host")


MESHES = [
    ({"fsdp": 2}, {"zero": 3}),
    ({"fsdp": 2, "tensor": 2}, {"zero": 3, "residual": "sequence"}),
    ({"fsdp": 2, "pipe": 2}, {"zero": 1, "microbatches": 2, "schedule": "1f1b", "stage_remat": True}),
]


@pytest.mark.parametrize("remat", ["products", "full"])
def test_what_stages_keep_is_not_kept_on_hosts(remat):
    plan, model = plan_over({"pipe": 2}, microbatches=2), model_of("llama", f"{remat}_on_host")
    why = rf"remat '{remat}_on_host', but stages .*; take remat '{remat}', or Plan\(stage_remat=True\)"
    with pytest.raises(ValueError, match=why):
        plan.check(model, rows=8, seq=16)
    plan_over({"pipe": 2}, microbatches=2, stage_remat=True).check(model, rows=8, seq=16)


@pytest.mark.grid
@pytest.mark.parametrize("way", ["products", "full"])
@pytest.mark.parametrize("case", MESHES, ids=str)
def test_gradients_by_what_is_on_hosts_are_those_of_what_is_on_devices(case, way):
    """To the bit, as CPUs run both alike; and what is kept, by hand."""
    mesh, choices = case
    found, kept = {}, {}
    for remat in (way, f"{way}_on_host"):
        model, plan = model_of("llama", remat), plan_over(mesh, smallest=1, **choices)
        gradients = eqx.filter_jit(training.make_gradient_function(training.next_token_loss, plan))
        found[remat] = gradients(model, batch_of(model), jax.random.key(7))
        states = training.PlannedState(lambda model=model: model, rule(model), plan)
        kept[remat] = planning.step_bytes(states, model, planning.batch_shapes(8, 16)).on_host
    pairs = zip(*(jax.tree.leaves(eqx.filter(each, eqx.is_array)) for each in found.values()), strict=True)
    assert all(one.dtype == two.dtype and np.array_equal(one, two) for one, two in pairs)
    assert kept[way] == 0 < kept[f"{way}_on_host"]
    if "pipe" not in mesh:
        numbers = 32  # input; and of products: maps in; attended, sums; map out; gate, up
        numbers += ((32 + 8 + 8) + (32 + 8) + 32 + 2 * 48) * (way == "products")
        assert kept[f"{way}_on_host"] == 4 * numbers * 4 * (8 * 16 // 2) // mesh.get("tensor", 1)


@pytest.mark.parametrize("name", ["v5e:2x2", "h100:4"])
def test_compilers_keep_it_on_the_host(name):
    """A step of a small model: arguments less by the moments, temporaries more by no more than their copies; and with
    products or layers' inputs on the host, temporaries less by these, but for what is on its way."""
    chips, devices = planning.topology(name), devices_for(name)
    config = models.LlamaConfig(vocab=256, embed=1024, layers=2, heads=8, kv_heads=8, head_dim=128, mlp=1024)
    batch, made, moments, kept = planning.batch_shapes(8, 1024), {}, 0, {}
    for way in ("products", "pinned_host", "products_on_host", "full", "full_on_host"):
        memory, remat = ("pinned_host", "products") if way == "pinned_host" else ("device", way)
        build = lambda remat=remat: nn.with_execution(models.build(config, key=jax.random.key(0)), remat=remat)
        optimizer = rule(jax.eval_shape(build))
        plan = Plan(make_mesh(fsdp=4, devices=devices), zero=3, optimizer_memory=memory)
        states = training.PlannedState(build, optimizer, plan)
        step = training.make_step(training.next_token_loss, optimizer, plan)
        made[way] = read_compiled(planning.lowered_step(states, step, batch).compile())
        moments += planning.state_bytes(states).get("optimizer state on its host", (0, 0))[0]
        kept[way] = planning.step_bytes(states, jax.eval_shape(build), batch).on_host
    here, away = made["products"], made["pinned_host"]
    assert here.on_host == 0 and away.on_host == pytest.approx(moments, rel=0.01)  # a TPU pads small arrays
    assert here.argument - away.argument == pytest.approx(away.on_host, rel=0.01)
    # A compiler for GPUs has room for the copies in what the backward pass no longer needs; a TPU's found none.
    max_extra = 1.1 * moments if chips.accelerator.platform == "tpu" else 0.05 * here.temporary
    assert away.temporary - here.temporary < max_extra, (here.temporary, away.temporary, moments)
    # A TPU's compiler has some of it twice on the host, and of two layers most on its way: more than their inputs.
    is_tpu = chips.accelerator.platform == "tpu"
    for way, share in (("products", 0.2), ("full", None)) if is_tpu else (("products", 0.6), ("full", 0.6)):
        near, far, size = made[way], made[f"{way}_on_host"], kept[f"{way}_on_host"]
        assert 0.99 * size < far.on_host < 1.01 * (1 + is_tpu) * size
        assert far.argument == near.argument == here.argument
        less = near.temporary - far.temporary
        assert share is None or less > share * size, (way, near.temporary, far.temporary, size)
