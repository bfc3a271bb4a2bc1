"""A run that a checkpoint interrupts, for tests that a resumed run equals one that never stopped."""

import equinox as eqx
import jax
import numpy as np

from eqformer import training


def copy(tree, device=None):
    """Copy the arrays of a tree by numpy, to a device if one is given: a step donates those of its state."""
    return jax.tree.map(lambda x: jax.device_put(np.array(x), device) if eqx.is_array(x) else x, tree)


def run_and_restore(optimizer, model, batch, folder, *, steps, saved, **options):
    """Return the step, the state after all steps, and the state that a checkpoint saved after `saved` steps.

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
