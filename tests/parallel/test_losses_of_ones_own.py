"""Errors for users' losses that cannot run under a plan name the loss, and what it must take or return.

Nothing is compiled, because the errors are raised when the step is traced.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from plan_models import batch_of, model_of

from eqformer import training
from eqformer.parallel import make_mesh, Plan
from eqformer.training.losses import _loss_aux


MODEL = functools.cache(lambda: model_of("gpt2"))


def plan_over(**axes):
    """A plan on two devices."""
    return Plan(make_mesh(**axes, devices=jax.devices()[:2]), microbatches=2 if "pipe" in axes else 1)


def traced(loss, plan=None, key=None):
    """The shapes of a loss's sum, count and gradients, on one device or under a plan."""
    gradients = training.make_gradient_function(loss, plan)
    return eqx.filter_eval_shape(gradients, MODEL(), batch_of(MODEL()), key)


def nats(model, batch, tokens, vocabulary):
    """What `next_token_loss` computes, of parts that are public."""
    hidden, _, _ = model.encode(batch.ids, tokens)
    of_tokens = {} if vocabulary is None else {"nats": vocabulary.nats}
    return training.cross_entropy(model.unembed, hidden, batch.targets, batch.weights, **of_tokens)


def passing(model, batch, key, tokens=None, vocabulary=None):
    """A loss as it should be."""
    return nats(model, batch, tokens, vocabulary)


def forgetful(model, batch, key, tokens=None, vocabulary=None):
    """A loss whose model numbers the tokens of a device by itself."""
    return nats(model, batch, None, vocabulary)


def penalised(model, batch, key, tokens=None, vocabulary=None):
    """A loss of a device's weights too."""
    total, count = nats(model, batch, tokens, vocabulary)
    return total + jnp.sum(jnp.square(model.embedding.weight)), count


def counted(model, batch, key, tokens=None, vocabulary=None):
    """A loss whose count is a number of Python's."""
    return nats(model, batch, tokens, vocabulary)[0], batch.ids.size


AXES = ({"context": 2}, {"pipe": 2}, {"tensor": 2}, {"fsdp": 2})


@pytest.mark.grid
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_a_loss_that_passes_on_what_it_is_given_runs(axes):
    for loss in (passing, counted):
        total, count, _ = traced(loss, plan_over(**axes), jax.random.key(0))
        assert total.shape == count.shape == ()


def test_a_loss_that_takes_no_tokens_is_named_before_anything_is_traced():
    def plain(model, batch, key):
        return passing(model, batch, key)

    with pytest.raises(
        ValueError, match=r"make_step\(plain, plan=\.\.\.\): .* takes no tokens and no vocabulary; add both"
    ):
        training.make_gradient_function(plain, plan_over(fsdp=2))
    training.make_gradient_function(lambda model, batch, key, **given: None, plan_over(fsdp=2))  # takes all


@pytest.mark.by_default("axes0-same on all devices of the axis 'context'")
@pytest.mark.parametrize(
    "axes, fault", [(AXES[0], "same on all devices of the axis 'context'"), (AXES[1], "stages have run with")]
)
def test_a_model_that_is_called_without_tokens_is_refused(axes, fault):
    with pytest.raises(ValueError, match=fault):
        traced(forgetful, plan_over(**axes), jax.random.key(0))
    for other in AXES[2:]:  # where a device has whole rows, they are numbered as they are
        traced(forgetful, plan_over(**other), jax.random.key(0))


def test_a_sum_of_slices_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="penalised under Plan over tensor=2: .* optimizer, as weight_decay"):
        traced(penalised, plan_over(tensor=2))
    monkeypatch.setattr(_loss_aux, "varying_axes", lambda x: ())
    with pytest.raises(ValueError, match="filter_shard_map"):  # which says nothing of losses
        traced(penalised, plan_over(tensor=2))


@pytest.mark.by_default("None-quotient", "None-array", "None-three", "tensor-array")
@pytest.mark.parametrize(
    "change, given",
    [
        (lambda total, count: total / count, "one value"),
        (lambda total, count: (total, count[None]), r"two values of shapes \(\) and \(1,\)"),
        (lambda total, count: (total, count, {}), "3 values"),
    ],
    ids=["quotient", "array", "three"],
)
@pytest.mark.parametrize("axes", (None, *AXES[1:3]), ids=["None", "pipe", "tensor"])
def test_what_is_no_sum_and_count_is_named(change, given, axes):
    def loss(*args, **named):
        return change(*passing(*args, **named))

    with pytest.raises(ValueError, match=rf"loss\(model, batch, key\): .* returned {given}. Return \(sum, count\)"):
        traced(loss, None if axes is None else plan_over(**axes))
