"""Losses, gradients and optimizer steps of models under plans, and of the same models on one device."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from haste import HASTE, put
from plan_models import batch_of, model_of

from eqformer import nn, training
from eqformer.parallel import init_sharded, make_mesh, Plan, shardings
from eqformer.training import loss_count, LossAux, make_gradient_function, next_token_loss


KEY = 7
STEPS, BALANCE = 3, 0.01


class Case(NamedTuple):
    """A model by name, a mesh, a plan's choices, and how the model itself runs."""

    model: str
    mesh: dict[str, int]
    choices: dict[str, Any] = {}
    remat: str = "none"
    dtypes: tuple[str, str] = ("float32", "float32")
    optimizer: str = "adamw"
    shape: tuple[int, int] = (8, 16)  # number of rows, and of tokens in each row

    @property
    def name(self) -> str:
        """The case's id in pytest."""
        mesh = ".".join(f"{axis}{size}" for axis, size in self.mesh.items())
        numbers = {name: f"{name}{value}" for name, value in self.choices.items() if isinstance(value, int | float)}
        words = [self.model, mesh, *(numbers.get(name, value) for name, value in self.choices.items())]
        words += [self.remat] * (self.remat != "none")
        return " ".join(words)

    @property
    def plan(self) -> Plan:
        """The case's plan, over the first devices."""
        size = int(np.prod(list(self.mesh.values())))
        return Plan(make_mesh(**self.mesh, devices=jax.devices()[:size]), **self.choices)


class Outcome(NamedTuple):
    """Results that a plan must not change: the loss's sum and count, the gradients, and mixtures' figures."""

    total: Any
    count: Any
    gradients: Any
    aux: tuple[nn.Aux, ...] = ()


def of_one_device(case: Case) -> Outcome:
    """Return the model's outcome on one device, computed once for all cases with the same model, dtypes and shape."""
    return _of_one_device(case.model, case.dtypes, case.shape)


@functools.cache
def _of_one_device(model: str, dtypes: tuple[str, str], shape: tuple[int, int]) -> Outcome:
    plain = model_of(model, dtypes=dtypes)
    return alone(plain, batch_of(plain, *shape))


def of_plan(case: Case) -> Outcome:
    """Return the model's outcome under the case's plan."""
    model = model_of(case.model, case.remat, case.dtypes)
    return under(case.plan, model, batch_of(model, *case.shape))


def total_of_plan(case: Case) -> float:
    """Return only the loss's sum under the case's plan."""
    model = model_of(case.model, case.remat, case.dtypes)
    return total_under(case.plan, model, batch_of(model, *case.shape))


def under(plan: Plan, model: nn.Transformer, batch: Any, loss: Any = next_token_loss) -> Outcome:
    """Return the outcome of a model, batch and loss under a plan."""
    return program_under(plan, model, batch, loss)(model)


def total_under(plan: Plan, model: nn.Transformer, batch: Any, loss: Any = next_token_loss) -> float:
    """Return only the loss's sum, from a program without gradients, which compiles sooner.

    It suffices for a test that breaks something which changes the loss.
    """
    plan.check(model, rows=len(batch.ids), seq=batch.ids.shape[1])
    of_batch = make_gradient_function(loss, plan)
    model, key = place(_moved(plan.shard, model), plan), jax.random.key(KEY)
    only = lambda *given: of_batch(*given)[0]
    return float(hastily(only, model, batch, key)(model, batch, key))


def program_under(
    plan: Plan, model: nn.Transformer, batch: Any, loss: Any = next_token_loss
) -> Callable[[nn.Transformer], Outcome]:
    """Compile for a plan and a batch; return a function from a model of the same shapes to its outcome."""
    plan.check(model, rows=len(batch.ids), seq=batch.ids.shape[1])
    of_batch = make_gradient_function(loss, plan)

    def read(*given: Any) -> tuple:
        total, tally, gradients = of_batch(*given)
        # A loss with metrics returns a `LossAux` also for a model without routed layers; its `aux` is then None.
        if isinstance(tally, LossAux) and tally.aux is not None:
            tally = LossAux(tally.count, plan.unshard_aux(tally.aux, model))
        return total, tally, gradients

    placed = lambda model: place(_moved(plan.shard, model), plan)
    key = jax.random.key(KEY)
    program = hastily(read, placed(model), batch, key)

    def run(model: nn.Transformer) -> Outcome:
        got = _outcome(*program(placed(model), batch, key))
        return got._replace(gradients=_moved(plan.unshard, got.gradients))

    run.program = program.program
    return run


def _moved(order: Callable[..., Any], tree: Any) -> Any:
    """Return a model with its layers in another order, gathered by numpy, which compiles nothing."""

    def taken(x: Any, rows: Any) -> Any:
        x = np.asarray(x)
        padded = np.concatenate([x, np.zeros_like(x[:1])])
        return put(padded[np.minimum(rows, len(x))])

    return order(tree, taken)


def alone(model: nn.Transformer, batch: Any, loss: Any = next_token_loss, microbatches: int = 1) -> Outcome:
    """Return the outcome of a model, batch and loss on one device."""
    return compiled(make_gradient_function(loss, microbatches=microbatches), model, batch)


def place(model: nn.Transformer, plan: Plan) -> nn.Transformer:
    """Put the model's arrays where the plan keeps them; they are cut by numpy, which compiles nothing."""
    arrays, rest = eqx.partition(model, eqx.is_array)
    kept = shardings(plan.parameter_specs(arrays), plan.mesh)
    return eqx.combine(jax.device_put(jax.device_get(arrays), kept), rest)


def compiled(gradients: Any, model: nn.Transformer, batch: Any) -> Outcome:
    """Run `(model, batch, key) -> (sum, count, gradients)`, compiled in haste."""
    return compiled_for(gradients, model, batch)(batch)


def compiled_for(gradients: Any, model: nn.Transformer, batch: Any) -> Callable[[Any], Outcome]:
    """Compile `(model, batch, key) -> (sum, count, gradients)` in haste; return a function from a batch to the outcome.

    The model is the given one; batches must have the shapes of the given one.
    """
    key = jax.random.key(KEY)
    program = hastily(gradients, model, batch, key)
    return lambda batch: _outcome(*program(model, batch, key))


def _outcome(total: Any, tally: Any, found: Any) -> Outcome:
    aux = tuple(nn.aux_of(tally.aux)) if isinstance(tally, LossAux) else ()
    return Outcome(total, loss_count(tally), found, aux)


def hastily(function: Any, *args: Any) -> Any:
    """Compile a function with hardly any optimisation, for arguments whose arrays have the shapes of these."""
    arrays, rest = eqx.partition(args, _is_array)
    result_rest = []

    def run(arrays: Any) -> Any:
        result, others = eqx.partition(function(*eqx.combine(arrays, rest)), eqx.is_array)
        result_rest.append(others)
        return result

    program = jax.jit(run).lower(arrays).compile(compiler_options=HASTE)
    call = lambda *args: eqx.combine(program(eqx.filter(args, _is_array)), result_rest[0])
    call.program = program
    return call


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray)


def differences(got: Outcome, want: Outcome, tolerance: float) -> dict[str, float]:
    """Return by name what differs by more than `tolerance`: the loss, the count, mixtures' figures, or gradients.

    Each leaf's gradients are compared by the Frobenius norm of the difference, relative to the norm of the expected
    gradient. Some expected gradients are only rounding errors, such as that of a key's bias without rotary positions.
    For such a leaf the difference need only be as small as rounding errors.
    """
    wrong = {}
    for name in ("total", "count"):
        found, expected = float(getattr(got, name)), float(getattr(want, name))
        if not abs(found - expected) <= tolerance * abs(expected):
            wrong[name] = abs(found - expected) / abs(expected)
    for number, (found, expected) in enumerate(zip(got.aux, want.aux, strict=True)):
        for name in ("load", "dropped", "tokens", "loss", "entropy"):
            error = np.linalg.norm(np.subtract(getattr(found, name), getattr(expected, name)))
            if not error <= tolerance * np.linalg.norm(getattr(expected, name)):
                wrong[f"{name} of mixture {number}"] = float(error)
    eps = np.finfo(jax.tree.leaves(want.gradients)[0].dtype).eps
    return wrong | leaf_differences(got.gradients, want.gradients, tolerance, rounding=max(100 * eps, tolerance / 10))


def leaf_differences(got: Any, want: Any, tolerance: float, rounding: float = 0.0) -> dict[str, float]:
    """Return the relative difference of each leaf that differs by more than `tolerance`, by the leaf's path.

    A leaf whose norm is at most `rounding` times the norm of all leaves together may differ by as much as that.
    """
    wrong = {}
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(want, eqx.is_inexact_array))
    nothing = rounding * np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for _, x in leaves))
    for (path, expected), found in zip(leaves, jax.tree.leaves(eqx.filter(got, eqx.is_inexact_array)), strict=True):
        expected, found = np.asarray(expected, np.float64), np.asarray(found, np.float64)
        size, error = np.linalg.norm(expected), np.linalg.norm(found - expected)
        if not error <= (tolerance * size if size > nothing else nothing):
            wrong[nn.path_name(path)] = float(error / max(size, 1e-30))
    return wrong


class Trained(NamedTuple):
    """The model and the optimizer's state after `STEPS` steps, each step's metrics, and an evaluation afterwards."""

    model: Any
    memory: Any
    metrics: list[dict[str, float]]
    evaluation: dict[str, float]


@functools.cache
def trained_on_one_device(model: str, optimizer: str, dtypes: tuple[str, str]) -> Trained:
    """Take `STEPS` steps of the model on one device."""
    plain = model_of(model, dtypes=dtypes)
    rule = _optimizer(optimizer, plain)
    state = training.init_state(jax.tree.map(lambda x: x.copy() if eqx.is_array(x) else x, plain), rule)
    return _train(
        training.make_step(next_token_loss, rule, balance_rate=BALANCE, gradient_norms=True),
        state,
        training.evaluation_sums,
        batch_of(plain),
    )


def trained_by_plan(case: Case) -> Trained:
    """Take `STEPS` steps under the case's plan, from a state whose arrays are created where the plan keeps them."""
    model, plan = model_of(case.model, case.remat, case.dtypes), case.plan
    rule = _optimizer(case.optimizer, model)
    step = training.make_step(next_token_loss, rule, plan, balance_rate=BALANCE, gradient_norms=True)
    make = lambda: training.init_state(plan.shard(model), rule)
    state = init_sharded(make, lambda shapes: training.state_shardings(plan, rule, shapes))
    got = _train(step, state, training.make_evaluation(plan), batch_of(model))
    ordered = lambda tree: _moved(plan.unshard, tree)
    return got._replace(model=ordered(got.model), memory=ordered(got.memory))


def _optimizer(name: str, model: nn.Transformer) -> training.Optimizer:
    # AdamW divides by the root of the mean square: with a tiny eps, a gradient of rounding errors makes a full step.
    name, _, part = name.partition(" of ")
    name, *paths = name.split(" with ")
    trained = nn.lora_factors if part == "factors" else training.trainable
    return training.optimizer(name, model, rate=1e-2, eps=1e-3, paths=paths, trained=trained)


def _train(step: Any, state: Any, evaluate: Any, batch: Any) -> Trained:
    key, metrics = jax.random.key(KEY), []
    step = hastily(step, state, batch, key)
    for _ in range(STEPS):
        state, of_step = step(state, batch, key)
        names = "loss", "count", "skipped", *(name for name in of_step if name.startswith("grad_norm"))
        metrics.append({name: float(of_step[name]) for name in names})
    evaluation = hastily(evaluate, state.model, batch)(state.model, batch)
    evaluation = {name: float(value) for name, value in evaluation.items()}
    return Trained(state.model, state.optimizer_state, metrics, evaluation)
