"""A run that is resumed from a checkpoint equals the uninterrupted run bit for bit."""

import json

import equinox as eqx
import jax
import numpy as np
import pytest
from resumed_runs import copy
from same_bits import assert_same_bits

from eqformer import training


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path, make_model, make_batch, key):
    batches = [make_batch(rows=4, seed=step, first=4 * step) for step in range(6)]
    model = make_model(dropout=0.2, layers=1)
    # The rates end soon, so that a wrong step would show in the rate.
    optimizer = training.adamw(model, rate=training.warmup_cosine(1e-2, steps=8, warmup=2))
    step, device = training.make_step(training.next_token_loss, optimizer), jax.devices()[0]

    def start():
        # On its device as a restored state is, so that the step is compiled once.
        return copy(training.init_state(model, optimizer), device)

    def run(state, batches, key):
        for batch in batches:
            state, metrics = step(state, batch, key)
        return state, metrics

    straight, metrics = run(start(), batches, key)
    half, _ = run(start(), batches[:3], key)
    with training.Checkpointer(tmp_path) as checkpointer:
        about = training.run_metadata(recipe={"name": "tiny"}, step=3, data={"seed": 0, "step": 3}, key=key)
        checkpointer.save(half, 3, about)

    def restored():
        like = eqx.filter_eval_shape(training.init_state, make_model(seed=9, dropout=0.2, layers=1), optimizer)
        state, metadata = training.Checkpointer(tmp_path).restore(like)
        return state, training.saved_key(metadata), metadata["data"]["step"]

    state, saved_key, position = restored()
    again, metrics_again = run(state, batches[position:], saved_key)
    assert_same_bits(again, straight)
    assert {name: float(x) for name, x in metrics.items()} == {name: float(x) for name, x in metrics_again.items()}

    # The controls: each thing that is not carried over shows in the table.
    def differs(state, batches, key):
        table = run(state, batches, key)[0].model.embedding.weight
        return not np.array_equal(table, straight.model.embedding.weight)

    assert differs(eqx.tree_at(lambda s: s.optimizer_state, restored()[0], start().optimizer_state), batches[3:], key)
    assert differs(restored()[0], batches[3:], jax.random.key(1))
    assert differs(restored()[0], batches[2:5], key)
    assert differs(eqx.tree_at(lambda s: s.step, restored()[0], jax.device_put(np.int32(0), device)), batches[3:], key)


@pytest.mark.quick
def test_the_metadata_of_a_run_is_json_and_holds_its_key():
    key = jax.random.fold_in(jax.random.key(3), 4)
    about = training.run_metadata(recipe={"embed": 8}, step=2, data={"epoch": 0}, key=key, note="more")
    read = json.loads(json.dumps(about))
    assert read["recipe"] == {"embed": 8} and read["step"] == 2 and read["note"] == "more"
    again = training.saved_key(read)
    assert again.dtype == key.dtype and jax.random.uniform(again) == jax.random.uniform(key)
    assert set(training.versions()) >= {"eqformer", "jax", "equinox", "optax"}
