"""Arrays of rows by a reference and by a teacher, and the fingerprint that binds them to a model."""

import dataclasses
import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import random_module

from eqformer import data, kernels, models, nn, training
from eqformer.parallel import make_mesh, Plan


SMALL = dataclasses.replace(models.preset("llama-byte-1m"), embed=32, layers=1, heads=4, kv_heads=2, mlp=64)


@pytest.mark.grid
def test_stored_arrays_are_those_of_each_batch(tmp_path):
    build = lambda: models.build(SMALL, key=jax.random.key(0))
    reference = random_module(lambda: nn.with_execution(build(), core=kernels.ReferenceAttention()))
    plan = Plan(make_mesh(devices=jax.devices()[:1]))
    rows = [{"prompt": f"{n}:", "chosen": f"{n} yes", "rejected": f"{n} no"} for n in range(3)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    encoder = data.ConversationEncoder(data.ByteTokenizer(), None)
    store = data.open_store(data.preferences(tmp_path / "pairs.jsonl"), encoder, tmp_path, validation=0.0)
    loader = data.Loader(store, seq=8, batch=4, seed=0, packing="pairs")
    batch: Any = loader.with_row_arrays(training.reference_arrays(reference, plan, batch_size=4)).batch(1)
    (expected,) = training.add_reference_nats([loader.batch(1)], reference, plan)  # type: ignore[list-item]
    assert np.allclose(batch.reference_nats, expected.reference_nats, rtol=1e-5)  # type: ignore[arg-type]
    arrays = training.teacher_arrays(reference, plan, top=5, temperature=2.0, batch_size=4)
    assert arrays.settings["top"] == 5 and arrays.settings["model"] == training.fingerprint(reference)
    pairs = arrays(loader.batch(1))
    top_nats = eqx.filter_jit(training.teacher_top_nats)
    ids, nats = top_nats(reference, loader.batch(1), top=5, temperature=2.0)
    assert np.array_equal(pairs["top_ids"], ids) and np.allclose(pairs["top_nats"], nats, rtol=1e-4, atol=1e-5)


def test_a_fingerprint_depends_on_bits_and_their_places():
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    tree = {
        "a": jnp.asarray(x),
        "b": jnp.arange(3),
        "c": jnp.asarray(x[0], jnp.bfloat16),
        "d": jnp.array([True, False]),
    }
    text = training.fingerprint(tree)
    assert text == training.fingerprint(jax.tree.map(lambda x: x + 0 if x.dtype != bool else x, tree))
    changed = [
        x[::-1],
        x[:, ::-1],
        np.where(np.arange(24).reshape(4, 6) == 7, np.nextafter(x, 9, dtype=np.float32), x),
        x.reshape(6, 4),
    ]
    texts = [training.fingerprint(eqx.tree_at(lambda t: t["a"], tree, jnp.asarray(y))) for y in changed]
    texts.append(training.fingerprint(tree | {"a": tree["b"], "b": tree["a"]}))
    texts.append(training.fingerprint(tree | {"d": ~tree["d"]}))
    assert len({text, *texts}) == 7
