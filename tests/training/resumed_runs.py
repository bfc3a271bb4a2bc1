"""A training run that saves a checkpoint on its way, for tests that a resumed run equals the uninterrupted run."""

import equinox as eqx
import jax
import numpy as np

from eqformer import training


def copy(tree, device=None):
    """Return the tree with copies of its arrays, on `device` unless it is None: a step donates its state's arrays."""
    return jax.tree.map(lambda x: jax.device_put(np.array(x), device) if eqx.is_array(x) else x, tree)


def run_and_restore(optimizer, model, batch, folder, *, steps, saved, **options):
    """Train; return the step function, the state after all steps, and the state restored from a checkpoint.

    The checkpoint was saved after `saved` steps.

    `options` are those of `make_step`.
    """
    step = training.make_step(training.next_token_loss, optimizer, **options)
    state = training.init_state(copy(model), optimizer)
    for number in range(1, steps + 1):
        state, _ = step(state, batch, jax.random.key(0))
        if number == saved:
            with training.Checkpointer(folder) as checkpointer:
                checkpointer.save(state, saved, {})
    restored, _ = training.Checkpointer(folder).restore(training.init_state(copy(model), optimizer))
    return step, state, restored
