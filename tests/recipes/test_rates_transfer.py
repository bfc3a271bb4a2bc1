"""Coordinate check (Yang et al. 2022, arXiv 2203.03466): a step changes activations alike at all widths."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqformer import Batch, models, training
from eqformer.recipes import speedrun_recipe


WIDTHS, STEPS = (64, 256), 3


def changes(width: int, **options: Any) -> np.ndarray:
    """Root mean squares of what a few steps change in the last hidden vectors, and in the logits."""
    recipe = speedrun_recipe(2)
    config: Any = dataclasses.replace(
        recipe.model, embed=width, heads=width // 64, kv_heads=width // 64, mlp=4 * width, window=16
    )
    head_rate = recipe.optimizer.head_rate * 128 / width  # As the recipe of this width has it.
    optimization = dataclasses.replace(recipe.optimizer, rates="constant", warmup=0, head_rate=head_rate)
    optimization = dataclasses.replace(optimization, **options)
    model = models.build(config, key=jax.random.key(0))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, 33)), jnp.int32)
    ones, examples = jnp.ones((4, 32)), jnp.arange(4, dtype=jnp.int32)
    batch = Batch(ids=ids[:, :-1], targets=ids[:, 1:], weights=ones, examples=examples)
    optimizer = optimization.optimizer(model, optimization.phases(STEPS))
    step = optimization.step(optimizer)
    look = eqx.filter_jit(lambda model: (model.encode(batch.ids)[0], model(batch.ids)[0]))
    before = look(model)
    state = training.init_state(model, optimizer)
    for _ in range(STEPS):
        state, _ = step(state, batch, None)
    after = look(state.model)
    return np.array([float(jnp.sqrt(jnp.mean((new - old) ** 2))) for old, new in zip(before, after, strict=True)])


@pytest.mark.grid
@pytest.mark.parametrize("name", ["normuon", "muon"])
def test_a_step_changes_activations_alike_at_all_widths(name):
    """Optimizers whose updates have a spectral norm of their own share one rate."""
    hidden, logits = np.stack([changes(width, name=name) for width in WIDTHS], axis=1)
    assert hidden.max() / hidden.min() < 1.5 and logits.max() / logits.min() < 1.5, (hidden, logits)


@pytest.mark.grid
@pytest.mark.parametrize("name", ["adamw", "soap"])
def test_under_the_standard_parametrization_changes_drift(name):
    """The controls: optimizers whose updates have the same root mean square at all widths, at one rate."""
    options = {"name": name, "update_size": "rms", "learning_rate": 0.003, "embedding_rate": 1.0, "head_rate": 1.0}
    hidden, logits = np.stack([changes(width, **options) for width in WIDTHS], axis=1)
    assert logits[-1] / logits[0] > 2.5, (hidden, logits)
