"""`Optimization`, the plain data of a run's settings, builds the same objects as direct calls."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

from eqformer import models, nn, training
from eqformer.parallel import make_mesh, Plan


CHOSEN = training.Optimization("sgd", 0.5, "constant", weight_decay=0.2, clip=0.1, z_loss=0.3)


@pytest.mark.grid
def test_an_optimization_makes_the_step_of_its_numbers(make_model, make_batch):
    model, batch, phases = make_model(), make_batch(), CHOSEN.phases(20)
    assert phases == [training.SchedulePhase(0, 20, 2)] and CHOSEN.phases(800)[0].warmup == 50
    rule = training.sgd(model, rate=training.constant(0.5, warmup=2), weight_decay=0.2)
    loss = lambda model, batch, key: training.next_token_loss(model, batch, key, z_loss=0.3)
    chosen_rule = CHOSEN.optimizer(model, phases)
    plan = Plan(make_mesh(devices=jax.devices()[:1]))
    steps = [
        (training.make_step(loss, rule, clip=0.1), rule),
        (CHOSEN.step(chosen_rule), chosen_rule),
        (CHOSEN.step(chosen_rule, plan), chosen_rule),
    ]
    steps.append((dataclasses.replace(CHOSEN, z_loss=0.0).step(chosen_rule), chosen_rule))
    ended = []
    for step, optimizer in steps:
        state, metrics = step(training.init_state(jax.tree.map(_copied, model), optimizer), batch, None)
        ended.append([float(metrics["loss"]), *map(np.asarray, jax.tree.leaves(eqx.filter(state.model, eqx.is_array)))])
    expected, one, planned, other = ended
    for found in (one, planned):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, expected)
    assert abs(other[0] - expected[0]) > 0.1  # the control: without the z-loss


def _copied(leaf):
    return leaf.copy() if eqx.is_array(leaf) else leaf


@pytest.mark.parametrize(
    "wrong", [{"weight_decay": -1.0}, {"z_loss": -1.0}, {"balance_rate": -1.0}, {"clip": 0.0}, {"warmup": 20}]
)
def test_an_optimization_that_cannot_work_is_refused(wrong, make_model):
    chosen, ((name, value),) = dataclasses.replace(CHOSEN, **{"rates": "warmup-cosine"} | wrong), wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        chosen.step(chosen.optimizer(make_model(), chosen.phases(20)))


def test_rates_of_groups_and_sizes_of_updates(make_model):
    model = make_model()
    chosen = training.Optimization("normuon", update_size="spectral", embedding_rate=3.0, decay_tables=False)
    chosen.optimizer(model, chosen.phases(20))
    with pytest.raises(ValueError, match=r"Optimization\(head_rate=-1\.0\)"):
        dataclasses.replace(chosen, head_rate=-1.0).optimizer(model, chosen.phases(20))


def test_settings_that_no_optimizer_in_use_has_are_refused(make_model):
    """The controls: settings that an optimizer in `paths` has count, and so do defaults."""
    model, plain = make_model(), training.Optimization("adamw")
    for name, setting, value in (("adamw", "momentum", 0.8), ("soap", "update_size", "spectral"), ("sgd", "b1", 0.7)):
        changes: dict[str, Any] = {"name": name, setting: value}
        chosen = dataclasses.replace(plain, **changes)
        refusal = (
            rf"^Optimization\(name='{name}', {setting}={value!r}\): {name} has no setting {setting}, .* take one of"
        )
        with pytest.raises(ValueError, match=refusal):
            chosen.optimizer(model, chosen.phases(20))
        assert chosen.without_unused() == dataclasses.replace(chosen, **{setting: getattr(plain, setting)})
    by_path = dataclasses.replace(plain, paths=("up.weight=muon",), update_size="spectral")
    assert by_path.without_unused() == by_path and by_path.optimizer(model, by_path.phases(20))
    for name in training.OPTIMIZERS:
        default = training.Optimization(name)  # pyright: ignore[reportArgumentType]
        assert default.without_unused() == default and default.optimizer(model, default.phases(20))
    for chosen, message in (
        (training.Optimization("normuon", b1=1.0), r"\(b1=1\.0\): a decay is at least 0"),
        (training.Optimization("normuon", momentum=-0.1), "momentum=-0.1"),
    ):
        with pytest.raises(ValueError, match=message):
            chosen.optimizer(model, chosen.phases(20))


@pytest.mark.quick
def test_low_rank_changes_are_what_is_trained():
    shapes = eqx.filter_eval_shape(lambda: models.build("llama-byte-1m", key=jax.random.key(0)))
    key = jax.random.key(1)
    made = eqx.filter_eval_shape(training.Lora(2, 8.0, ("query", "value")).apply, shapes, key=key)
    assert {nn.path_name(path).rpartition(".")[2] for path in _maps(made)} == {"query", "value"}
    assert all(lora.scale == 4.0 and lora.down.shape[-2] == 2 for lora in _maps(made).values())
    assert training.Lora(2).trained is nn.lora_factors
    assert training.Lora().apply(shapes, key=key) is shapes and training.Lora().trained is training.trainable
    with pytest.raises(ValueError, match="rank=-1"):
        training.Lora(-1).apply(shapes, key=key)


def _maps(model):
    is_lora = lambda node: isinstance(node, nn.LoRA)
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_lora)
    return {path: leaf for path, leaf in leaves if is_lora(leaf)}


@pytest.mark.by_default(
    "modernbert-byte-200k-in stacks\\\\[0\\\\].* attends to later tokens", "gpt2-byte-1m-seq=513.*512 learned positions"
)
@pytest.mark.parametrize(
    "preset, words",
    [
        ("t5-byte-200k", "has an encoder, which reads a second text"),
        ("modernbert-byte-200k", r"in stacks\[0\].* attends to later tokens"),
        ("gpt2-byte-1m", "seq=513.*512 learned positions"),
    ],
)
def test_models_that_do_not_predict_the_next_token_are_refused(preset, words):
    shapes = eqx.filter_eval_shape(lambda: models.build(preset, key=jax.random.key(0)))
    with pytest.raises(ValueError, match=words):
        training.check_next_token(shapes, seq=513)
    for other in ("gpt2-byte-1m", "qwen3-next-byte-500k"):  # the controls
        training.check_next_token(eqx.filter_eval_shape(models.build, other, key=jax.random.key(0)), seq=512)
