"""Optimizer steps under a plan, and on one device."""

from typing import Any

import equinox as eqx
import jax
from plan_models import batch_of
from plan_parity import hastily

from eqformer import nn, training
from eqformer.parallel import init_sharded, Plan


def begun(model: nn.Transformer, plan: Plan, optimizer: training.Optimizer) -> training.TrainState:
    """Return the state before the first step, with each array where the plan keeps it."""
    make = lambda: training.init_state(plan.shard(model), optimizer)
    return init_sharded(make, lambda shapes: training.state_shardings(plan, optimizer, shapes))


def stepped(
    model: nn.Transformer,
    plan: Plan | None,
    optimizer: training.Optimizer,
    steps: int,
    state: Any = None,
    **options: Any,
) -> tuple[training.TrainState, float]:
    """Take some steps; return the state and the last loss.

    On one device, or if `state` is None, the steps start from a new state. `options` are those of `make_step`.
    """
    batch, key = batch_of(model), jax.random.key(7)
    if plan is None:
        step = training.make_step(training.next_token_loss, optimizer, **options)
        state = training.init_state(jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, model), optimizer)
    else:
        step = training.make_step(training.next_token_loss, optimizer, plan, **options)
        state = begun(model, plan, optimizer) if state is None else state
    step, metrics = hastily(step, state, batch, key), {}
    for _ in range(steps):
        state, metrics = step(state, batch, key)
    return state, float(metrics["loss"])
