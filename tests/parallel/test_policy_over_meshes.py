"""Policy losses, their gradients, metrics and log-probabilities equal one device's over every axis."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from loss_parity import CASES, fields_of_rows, metrics_of_steps, over_three_meshes, ROUNDING
from plan_models import model_of, plan_over
from plan_parity import alone, differences, place, under

from eqformer import data, models, nn, PolicyBatch, text, training


LOSSES: tuple[Any, ...] = ("grpo", "dapo", "gspo")
METRICS = ("loss", "entropy", "clip_fraction", "kl", "sampler_difference", "reward")


@functools.cache
def batch_for(model: str) -> PolicyBatch:
    """Rows with advantages and log-probabilities that are close to the model's own."""
    fields: Any = fields_of_rows(model)
    rng = np.random.default_rng(3)
    weights = np.array(fields["weights"])
    weights[:, :5] = 0  # the prompt
    policy = PolicyBatch(
        **(fields | {"weights": weights}), advantages=rng.normal(size=8).astype(np.float32), temperature=0.8
    )
    log_probs = np.asarray(training.token_log_probs(model_of(model), policy))
    noise = rng.normal(0.0, 0.2, (3, *log_probs.shape)).astype(np.float32)
    names = ("old_log_probs", "reference_log_probs", "sampler_log_probs")
    known = {name: log_probs + part for name, part in zip(names, noise, strict=True)}
    return dataclasses.replace(policy, **known, row_metrics={"reward": np.arange(8, dtype=np.float32)})


def loss_of(name: Any) -> Any:
    clip = 0.01 if name == "gspo" else 0.1
    return training.policy_loss(name, clip_low=clip, clip_high=clip, beta=0.05)


@functools.cache
def of_one_device(model: str, name: str) -> Any:
    return alone(model_of(model), batch_for(model), loss_of(name))


@pytest.mark.grid
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_loss_and_gradients_equal_one_devices(case, name):
    planned = under(case.plan, model_of(case.model, case.remat), batch_for(case.model), loss_of(name))
    assert differences(planned, of_one_device(case.model, name), ROUNDING) == {}


@pytest.mark.grid
def test_advantages_of_other_rows_give_another_loss():
    """The control: the same rows over the same mesh, each with the advantage of another."""
    case, batch = CASES[0], batch_for("llama")
    moved = dataclasses.replace(batch, advantages=np.roll(np.asarray(batch.advantages), 1))
    planned = under(case.plan, model_of("llama"), moved, loss_of("dapo"))
    assert float(planned.total) != pytest.approx(float(of_one_device("llama", "dapo").total), rel=1e-3)


@pytest.mark.grid
@over_three_meshes
def test_metrics_equal_one_devices(mesh, options):
    rows = metrics_of_steps(loss_of("gspo"), batch_for("llama"), METRICS, mesh, options)
    assert np.allclose(rows[0], rows[1], rtol=1e-4, atol=1e-5) and 0 < rows[0][2] < 1 and rows[0][1] > 1


@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_log_probabilities_equal_one_devices(case):
    model, batch = model_of(case.model), batch_for(case.model)
    want = np.asarray(training.token_log_probs(model, batch))
    sharded = place(case.plan.shard(model), case.plan)
    log_probs = np.asarray(training.make_token_log_probs(case.plan)(sharded, batch))
    is_counted = np.asarray(batch.weights) > 0
    assert np.allclose(log_probs[is_counted], want[is_counted], rtol=1e-5, atol=1e-5)
    shifted = np.roll(want, 1, axis=1)  # the control
    assert not np.allclose(log_probs[is_counted], shifted[is_counted], rtol=1e-2, atol=1e-2)


# Sampling by the weights of the training state, where the plan keeps them.

SAMPLED = [
    ({"fsdp": 2, "context": 2, "tensor": 2}, {"zero": 3, "smallest": 1}),
    ({"fsdp": 2, "pipe": 2, "tensor": 2}, {"zero": 1, "schedule": "interleaved", "chunks": 2, "microbatches": 2}),
    ({"fsdp": 4}, {"zero": 2}),
]


@functools.cache
def byte_model(dtype: str) -> nn.Transformer:
    config = dataclasses.replace(
        models.preset("llama-byte-1m"), embed=32, layers=4, heads=4, kv_heads=2, head_dim=8, mlp=64
    )
    model = models.build(config, key=jax.random.key(0))
    return nn.Precision(dtype, dtype).apply(
        eqx.tree_at(lambda m: m.embedding.weight, model, replace_fn=lambda x: 9 * x)
    )


def rollouts_of(model: nn.Transformer, plan: Any = None) -> text.Rollouts:
    """Four completions of each of two prompts, rewarded for high bytes."""

    def high_bytes(prompts, completions):
        return [float(sum(ord(character) > 127 for character in part)) for part in completions]

    llm = text.LLM(model, data.ByteTokenizer(), end_ids=(10,))
    rows = [{"prompt": part} for part in ("one", "fourteen", "a")]
    sizes: Any = {"prompts": 2, "group": 4, "max_new_tokens": 6, "updates": 2}
    return text.Rollouts(llm, rows, high_bytes, temperature=0.6, plan=plan, key=jax.random.key(0), **sizes)


@pytest.mark.grid
@pytest.mark.parametrize("dtype, bound", [("float32", 1e-5), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("mesh, options", SAMPLED, ids=lambda value: ".".join(value))
def test_the_samplers_log_probabilities_are_the_trainers(mesh, options, dtype, bound):
    model, plan = byte_model(dtype), plan_over(mesh, **options)
    zero = jnp.zeros((), jnp.int32)
    sharded = training.TrainState(place(plan.shard(model), plan), None, zero, zero, zero)
    batch = rollouts_of(model, plan)(training.Progress(sharded, 0, 10, {}))
    is_counted = np.asarray(batch.weights) > 0
    sampler, trainer = np.asarray(batch.sampler_log_probs), np.asarray(batch.old_log_probs)
    alone = np.asarray(training.token_log_probs(model, jax.tree.map(np.asarray, batch)))
    warm = training.make_token_log_probs(plan)(sharded.model, dataclasses.replace(batch, temperature=1.0))
    distance = lambda x: float(np.abs(sampler - np.asarray(x))[is_counted].mean())
    assert distance(trainer) < bound and distance(alone) < bound
    assert min(distance(warm), distance(np.roll(trainer, 1, axis=1))) > 0.1  # the controls


@pytest.mark.grid
@pytest.mark.parametrize("mesh, options", SAMPLED[:2], ids=lambda value: ".".join(value))
def test_a_run_on_rewards_is_one_devices(mesh, options):
    model, plan = byte_model("float32"), plan_over(mesh, **options)
    optimizer = training.optimizer("adamw", model, rate=training.constant(1e-3), eps=1e-3)
    logged, greedy = [], []
    for chosen in (None, plan):
        rows: list[Any] = []
        copy = jax.tree.map(lambda x: x + 0 if eqx.is_array(x) else x, model)
        states = None if chosen is None else training.PlannedState(lambda: model, optimizer, chosen)
        state = training.init_state(copy, optimizer) if states is None else states.init_from(copy)
        step = training.make_step(training.policy_loss("dapo"), optimizer, chosen)
        greedy.append(rollouts_of(model, chosen).greedy_reward(state.model))
        training.train(step, state, rollouts_of(model, chosen), steps=4, callbacks=[training.Log(1, rows.append)])
        logged.append([[row[name] for name in ("loss", "reward", "entropy", "grad_norm")] for row in rows])
    assert np.allclose(*logged, rtol=1e-3, atol=1e-4) and logged[0][0] != logged[0][2]
    assert greedy[0] == greedy[1] != logged[0][0][1]
