"""The distillation loss against its formulas in float64, with a teacher model and with the teacher's top ids."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from token_table import EMBED, make_table, Table, VOCAB

from eqformer import Batch, DistillationBatch, training
from eqformer.training import loss_count


ROWS, SEQ, TEMPERATURE, WEIGHT, BETA = 4, 7, 1.7, 0.6, 0.3
DIVERGENCES: tuple[Any, ...] = ("forward-kl", "reverse-kl", "jsd")


def teacher_of() -> Table:
    """A teacher of another width."""
    return make_table(5, embed=EMBED + 3)


def plain_batch() -> Batch:
    rng = np.random.default_rng(1)
    ids, targets = rng.integers(0, VOCAB, (2, ROWS, SEQ)).astype(np.int32)
    weights = rng.integers(0, 3, (ROWS, SEQ)) / 2
    return jax.tree.map(jnp.asarray, Batch(ids, targets, weights, np.arange(ROWS, dtype=np.int32)))


def batch_with(teacher: Table) -> DistillationBatch:
    (batch,) = training.add_teacher([plain_batch()], teacher)
    return batch


def stored_batch(teacher: Table, top: int, temperature: float = TEMPERATURE) -> DistillationBatch:
    batch = plain_batch()
    ids, nats = eqx.filter_jit(training.teacher_top_nats)(teacher, batch, top=top, temperature=temperature)
    return dataclasses.replace(
        batch_with(teacher), teacher=None, teacher_hidden=None, top_ids=ids, top_nats=nats, temperature=temperature
    )


def loss_of(divergence: Any, **options: Any) -> Any:
    loss = training.distillation_loss(
        divergence, **{"temperature": TEMPERATURE, "weight": WEIGHT, "beta": BETA} | options
    )
    return lambda model, batch, key: loss(model, batch, None, chunk=5)  # which does not divide the 28 tokens


def formula(divergence: str, model: Table, teacher: Table, batch: Any, top: int | None = None) -> Any:
    """The sum over tokens, of all logits at once; with `top`, of the teacher's top ids and one bucket."""
    logits, of_teacher = (one.table[batch.ids] @ one.head for one in (model, teacher))
    q, p = (jax.nn.softmax(x / TEMPERATURE) for x in (logits, of_teacher))
    if top is not None:
        order = jnp.argsort(-p)[..., :top]
        p, q = (jnp.take_along_axis(x, order, -1) for x in (p, q))
        p, q = (jnp.concatenate([x, 1 - jnp.sum(x, -1, keepdims=True)], -1) for x in (p, q))
    kl = lambda a, b: jnp.sum(a * jnp.log(a / b), -1)
    m = BETA * p + (1 - BETA) * q
    distances = {
        "forward-kl": lambda: kl(p, q),
        "reverse-kl": lambda: kl(q, p),
        "jsd": lambda: BETA * kl(p, m) + (1 - BETA) * kl(q, m),
    }[divergence]()
    nats = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch.targets[..., None], -1)[..., 0]
    return jnp.sum(batch.weights * (WEIGHT * TEMPERATURE**2 * distances + (1 - WEIGHT) * nats))


def check_gradients(run: Any, model: Table, batch: Any, want: Any) -> float:
    """Compare the sum and each gradient with the formula's; return the sum."""
    total, gradients = want
    result, count, of_model = run(model, batch, None)
    assert float(result) == pytest.approx(float(total), rel=1e-11)
    assert float(loss_count(count)) == pytest.approx(float(jnp.sum(batch.weights)))
    for ours, theirs in zip(jax.tree.leaves(of_model), jax.tree.leaves(gradients), strict=True):
        assert np.allclose(ours, theirs, rtol=1e-9, atol=1e-11)
    return float(total)


@pytest.mark.by_default("forward-kl")
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_loss_and_gradients_are_the_formula(divergence):
    with jax.enable_x64(True):
        model, teacher = make_table(), teacher_of()
        run = eqx.filter_jit(training.make_gradient_function(loss_of(divergence), microbatches=2))
        batch, bucketed = batch_with(teacher), stored_batch(teacher, 3)
        want = eqx.filter_jit(_values_and_gradients)(divergence, model, teacher, batch)
        total = check_gradients(run, model, batch, want[0])
        assert check_gradients(run, model, bucketed, want[1]) < total - 1e-3
        # The control: another teacher.
        other = dataclasses.replace(batch, teacher=eqx.tree_at(lambda m: m.head, teacher, -teacher.head))
        assert float(run(model, other, None)[0]) != pytest.approx(total, rel=1e-2)


def _values_and_gradients(divergence: str, model: Table, teacher: Table, batch: Any) -> list[Any]:
    """The formula with all ids, and with three and a bucket."""
    return [
        eqx.filter_value_and_grad(lambda model, top=top: formula(divergence, model, teacher, batch, top))(model)
        for top in (None, 3)
    ]


def test_all_ids_leave_none_for_the_bucket_of_others():
    with jax.enable_x64(True):
        model, teacher = make_table(), teacher_of()
        loss = eqx.filter_jit(loss_of("forward-kl"))
        totals = [
            float(loss(model, batch, None)[0])
            for batch in (batch_with(teacher), stored_batch(teacher, VOCAB), stored_batch(teacher, VOCAB - 1))
        ]
    assert totals[1:] == pytest.approx([totals[0]] * 2, rel=1e-9)


def test_a_step_reports_both_parts_and_leaves_the_teacher_alone():
    model, teacher = jax.tree.map(lambda x: x.astype(jnp.float32), (make_table(), teacher_of()))
    copy = jax.tree.map(np.asarray, teacher)
    optimizer = training.optimizer("adamw", model, rate=1e-1)
    step = training.make_step(training.distillation_loss(weight=1.0), optimizer)
    state = training.init_state(model, optimizer)
    divergences = []
    for _ in range(5):
        batch = jax.tree.map(lambda x: x.astype(jnp.float32) if eqx.is_inexact_array(x) else x, batch_with(teacher))
        state, metrics = step(state, batch, None)
        divergences.append(float(metrics["divergence"]))
        assert float(metrics["loss"]) == pytest.approx(divergences[-1])
    assert divergences[-1] < 0.5 * divergences[0] and float(metrics["next_token_loss"]) > 0
    assert jax.tree.all(jax.tree.map(np.array_equal, teacher, copy))  # its arrays are neither donated nor trained
    assert all(len(x) != EMBED + 3 for x in jax.tree.leaves(state.optimizer_state) if np.ndim(x))
    same, _ = jax.tree.map(lambda x: x.astype(jnp.float32), (teacher_of(), None))
    total = eqx.filter_jit(training.distillation_loss(weight=1.0))(same, batch)[0]
    assert abs(float(total)) < 1e-5  # a model is no way from itself


def test_what_is_refused():
    wrong: list[dict[str, Any]] = [{"temperature": 0.0}, {"weight": 1.5}, {"beta": 1.0}]
    for options in wrong:
        with pytest.raises(ValueError, match=r"temperature must be above 0 and finite, weight at least 0"):
            training.distillation_loss(**options)
    teacher, loss = teacher_of(), training.distillation_loss(temperature=2.0)
    with pytest.raises(
        ValueError, match=r"stored probabilities have the temperature 1.5, .* pass the stored temperature"
    ):
        loss(make_table(), stored_batch(teacher, 3, 1.5))
    with pytest.raises(ValueError, match=r"the batch needs a teacher with its hidden states, or top_ids"):
        loss(make_table(), dataclasses.replace(batch_with(teacher), teacher=None))
