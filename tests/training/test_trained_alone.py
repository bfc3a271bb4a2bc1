"""Training of a part of a model: other parameters have no gradients and no state, and stay bit for bit."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import randomised
from resumed_runs import copy

from eqformer import Batch, kernels, models, nn, training


NUMBERS = models.LlamaConfig(vocab=29, embed=16, layers=2, heads=4, kv_heads=2, mlp=24)
STEPS = 3


@functools.cache
def adapted():
    def make():
        model = models.build(NUMBERS, key=jax.random.key(0))
        model = nn.with_execution(model, core=kernels.ReferenceAttention())
        return nn.with_lora(model, ["query", "value", "up"], rank=2, alpha=4.0, key=jax.random.key(1))

    return randomised(eqx.filter_eval_shape(make), deviation=0.2)


def batch():
    ids = np.random.default_rng(0).integers(0, 29, (4, 11))
    cut = lambda x: jnp.asarray(x, jnp.int32)
    return Batch(cut(ids[:, :-1]), cut(ids[:, 1:]), jnp.ones((4, 10), jnp.float32), jnp.arange(4, dtype=jnp.int32))


def by_path(tree):
    return {nn.path_name(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def trained(name, part, **options):
    """The paths that some steps change, the losses, and what the optimizer remembers of parameters."""
    rule = training.optimizer(name, adapted(), rate=0.05, trained=part)
    step = training.make_step(training.next_token_loss, rule, **options)
    state = training.init_state(copy(adapted()), rule)
    before, losses = by_path(eqx.filter(state.model, eqx.is_array)), []
    for _ in range(STEPS):
        state, metrics = step(state, batch())
        losses.append(float(metrics["loss"]))
    after = by_path(eqx.filter(state.model, eqx.is_array))
    remembered = jax.tree.leaves(rule.map_state(lambda x: x, state.optimizer_state, other=None))
    return {path for path in before if not np.array_equal(before[path], after[path])}, losses, remembered


@pytest.mark.grid
@pytest.mark.parametrize(
    "name, microbatches",
    [("adamw", 1), ("muon", 2), ("sgd", 1)],
)
def test_factors_alone_change_and_are_remembered(name, microbatches):
    factors = set(by_path(nn.lora_factors(adapted())))
    changed, losses, remembered = trained(name, nn.lora_factors, microbatches=microbatches)
    assert changed == factors and losses[0] > losses[1] > losses[2]
    shapes = {leaf.shape for leaf in by_path(nn.lora_factors(adapted())).values()}
    moments = {"adamw": 2, "muon": 1, "sgd": 0}[name]
    assert len(remembered) == moments * len(factors) and {x.shape for x in remembered} <= shapes


@pytest.mark.grid
def test_by_default_everything_is_trained():
    """The control: the same steps change, and remember, what stays above."""
    floats = set(by_path(eqx.filter(adapted(), eqx.is_inexact_array)))
    changed, _, remembered = trained("adamw", training.trainable)
    assert changed == floats and len(remembered) == 2 * len(floats)


def test_gradients_are_those_of_the_whole_and_others_are_not_computed():
    model, rows = adapted(), batch()

    def compiled(part):
        run = eqx.filter_jit(training.make_gradient_function(training.next_token_loss, trained=part))
        program = run.lower(model, rows, None).compile()
        return program(model, rows, None), program.compiled.cost_analysis()["flops"]

    (total, _, gradients), flops = compiled(nn.lora_factors)
    (whole, _, of_all), all_trained = compiled(training.trainable)
    assert float(total) == pytest.approx(float(whole), rel=1e-6)
    found, expected = by_path(gradients), by_path(of_all)
    assert set(found) == set(by_path(nn.lora_factors(model))) < set(expected)
    assert all(np.allclose(found[path], expected[path], 1e-4, 1e-6) for path in found)
    assert not all(np.allclose(found[path], 1.01 * expected[path], 1e-4, 1e-6) for path in found)
    assert flops < 0.85 * all_trained
