"""Block diffusion over meshes: its loss, gradients, noise and scores are those of one device."""

import functools

import jax
import numpy as np
import pytest
from loss_parity import CASES, fields_of_rows, ROUNDING
from plan_models import model_of, plan_over
from plan_parity import alone, Case, differences, total_under, under

from eqformer import Batch, generation, nn, training
from eqformer.parallel import ShardedModel


METHODS = [
    Case("llama", {"fsdp": 2, "context": 2, "tensor": 2}, {"zero": 1, "context_method": method})
    for method in ("gather", "heads")
]


@functools.cache
def noisy_batch(model: str) -> Batch:
    """Packed rows with their noisy copies; so many ids fit the meshes."""
    batch = Batch(**fields_of_rows(model))
    noise = jax.jit(functools.partial(training.noise_blocks, mask_id=1, block=3))
    return jax.tree.map(np.asarray, noise(batch, jax.random.key(5)))


def block_model(name: str, *options) -> nn.Transformer:
    return nn.with_blocks(model_of(name, *options), 3)


@functools.cache
def of_one_device(name: str):
    return alone(block_model(name), noisy_batch(name), training.block_diffusion_loss)


@pytest.mark.grid
@pytest.mark.parametrize("case", [*CASES, *METHODS], ids=lambda case: case.name)
def test_loss_and_gradients_equal_one_devices(case):
    model, batch = block_model(case.model, case.remat), noisy_batch(case.model)
    planned = under(case.plan, model, batch, training.block_diffusion_loss)
    assert differences(planned, of_one_device(case.model), ROUNDING) == {}


@pytest.mark.grid
def test_rows_split_over_a_ring_have_one_device_s_loss():
    plan, batch = plan_over({"context": 2}), noisy_batch("tied")
    loss = training.block_diffusion_loss
    alone_total = float(jax.jit(lambda batch: loss(block_model("tied"), batch)[0])(batch))
    assert abs(total_under(plan, block_model("tied"), batch, loss) - alone_total) < ROUNDING * alone_total
    assert abs(total_under(plan, model_of("tied"), batch, loss) - alone_total) > 1e-3 * alone_total  # causal masks


def scores_of(model: nn.LanguageModel | ShardedModel, samples: int) -> np.ndarray:
    """Return the log-probabilities and the greedy ids of three rows, in two batches."""
    prompts, new = [[3, 1, 4, 1], [9, 2, 6], [7]], [[5, 9, 2, 6, 5, 3], [5], [8, 9, 7, 9]]
    scores = generation.score_blocks(model, prompts, new, mask_id=1, samples=samples, batch_size=2)
    return np.concatenate([[score.log_probabilities, score.is_greedy] for score in scores], axis=1)


@pytest.mark.grid
@pytest.mark.parametrize("samples", [7, 5], ids=["all choices", "random choices"])
@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"fsdp": 2}, {"context": 2}, {"pipe": 2}], ids=str)
def test_scores_are_those_of_one_device(mesh, samples):
    model = block_model("llama")
    split = scores_of(ShardedModel(plan_over(mesh).shard(model), plan_over(mesh)), samples)
    assert np.allclose(split, scores_of(model, samples), atol=1e-4)
    assert not np.allclose(split, scores_of(model, 12 - samples), atol=1e-2)  # other choices of masked tokens
