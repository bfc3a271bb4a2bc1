"""eqformer's contenders: a training step and greedy decoding."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from eqformer import Batch, generation, models, nn, training
from eqformer.parallel import Plan, shardings


def random_batch(vocab: int, rows: int, seq: int) -> Batch:
    """Return a batch of rows of random tokens for next-token prediction."""
    tokens = np.random.default_rng(0).integers(0, vocab, (rows, seq + 1), dtype=np.int32)
    return Batch(
        ids=jnp.asarray(tokens[:, :-1]),
        targets=jnp.asarray(tokens[:, 1:]),
        weights=jnp.ones((rows, seq), jnp.float32),
        examples=jnp.arange(rows, dtype=jnp.int32),
    )


def model_and_optimizer(
    config: Any,
    *,
    execution: nn.Execution = nn.Execution(),
    precision: nn.Precision = nn.Precision(),
    moments: Any = "float32",
) -> tuple[Callable[[], nn.Transformer], training.Optimizer]:
    """Return a function that builds a model with the defaults of recipes, and AdamW for this model."""
    make = lambda: precision.apply(execution.apply(models.build(config, key=jax.random.key(0))))
    return make, training.optimizer("adamw", eqx.filter_eval_shape(make), rate=1e-3, moments=moments)


def step_and_state(config: Any, **how: Any) -> tuple[training.Step, training.TrainState]:
    """Return a training step of AdamW with clipping, and the first state, for a model of a config."""
    make, optimizer = model_and_optimizer(config, **how)
    state = eqx.filter_jit(lambda: training.init_state(make(), optimizer))()
    return training.make_step(training.next_token_loss, optimizer), state


def train_step(config: Any, batch: Batch, **how: Any) -> Callable[[], float]:
    """Return a function that runs a step of forward, backward, clipping and AdamW, and returns the loss."""
    step, state = step_and_state(config, **how)
    holder = [state]

    def run() -> float:
        holder[0], metrics = step(holder[0], batch)
        return float(metrics["loss"])

    return run


class OverMesh:
    """Compiled training step over a mesh, with its state and a batch; with a key, experts may drop tokens."""

    def __init__(self, config: Any, plan: Plan, rows: int, seq: int, key: Key[Array, ""] | None = None, **how: Any):
        make, optimizer = model_and_optimizer(config, **how)
        states = training.PlannedState(make, optimizer, plan)
        self.state, self.key = states.init(), None if key is None else states.replicate(key)
        batch = random_batch(config.vocab, rows, seq)
        self.batch = jax.device_put(batch, shardings(plan.batch_specs(batch), plan.mesh))
        step = training.make_step(training.next_token_loss, optimizer, plan, balance_rate=0.001)
        start = time.perf_counter()
        self.step = step.compile(self.state, self.batch, self.key)
        self.seconds_to_compile = time.perf_counter() - start
        self.loss = math.nan

    def __call__(self) -> None:
        """Run one step."""
        self.state, metrics = self.step(self.state, self.batch, self.key)
        self.loss = float(metrics["loss"])


def decode(
    config: Any,
    ids: np.ndarray,
    new: int,
    *,
    unstacked: bool,
    precision: nn.Precision = nn.Precision(),
    change: Callable[[nn.Transformer], nn.Transformer] = lambda model: model,
) -> Callable[[], Any]:
    """Return a function that decodes greedily with a cache, by a new model; `change` changes it, such as quantizing.

    `unstacked` stores the layers separately instead of in stacked arrays.
    """
    model = eqx.filter_jit(lambda key: change(precision.apply(models.build(config, key=key))))(jax.random.key(0))
    return greedy(generation.unstack_layers(model) if unstacked else model, ids, new)


def greedy(model: nn.LanguageModel, ids: np.ndarray, new: int) -> Callable[[], Any]:
    """Return a function that decodes greedily with a cache."""
    call = partial(
        generation.generate, transforms=generation.sampling(temperature=0), max_new_tokens=new, key=jax.random.key(0)
    )
    return lambda: call(model, ids)
