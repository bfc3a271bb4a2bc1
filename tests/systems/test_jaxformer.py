"""Faults of the published JAXformer, corrected here: its model with experts over data, stages and tensor axes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eqformer import Batch, models, training
from eqformer.parallel import make_mesh, Plan


ROWS, SEQ, VOCAB, MICROBATCHES, CLIP = 8, 16, 32, 2, 0.1
# Of a block: the one with experts, and one with rotary before it.
LAYERS = [pytest.param(layers, marks=pytest.mark.grid) for layers in (1, 2)]


@pytest.fixture(scope="module", params=LAYERS)
def start(request):
    """The optimizer, and the state before the first step."""
    sizes = {"vocab": VOCAB, "embed": 16, "blocks": 2, "heads": 4, "latent": 8, "rope_dim": 4, "dropout": 0.1}
    experts = 3  # no multiple of any axis
    config = models.JAXformerConfig(**sizes, layers_per_block=request.param, experts=experts, shared=2)
    build = lambda: models.build(config, key=jax.random.key(0))
    # With an eps above what is left of the keys' biases' gradients, which are zero: Adam would make moves of rounding.
    optimizer = training.optimizer("adamw", eqx.filter_eval_shape(build), rate=1e-2, eps=1e-6)
    return optimizer, eqx.filter_jit(lambda: training.init_state(build(), optimizer))()


def make_batch():
    text = np.random.default_rng(0).integers(0, VOCAB, (ROWS, SEQ + 1), np.int32)
    return Batch(text[:, :-1], text[:, 1:], np.ones((ROWS, SEQ), np.float32), np.arange(ROWS, dtype=np.int32))


def stepped(step, state):
    """The state after three steps, and each step's metrics."""
    metrics = []
    for _ in range(3):
        state, measured = step(state, make_batch(), jax.random.key(3))
        metrics.append({name: float(measured[name]) for name in ("loss", "grad_norm", "balance_loss")})
    return state, metrics


@pytest.fixture(scope="module")
def split(start):
    mesh = make_mesh(fsdp=2, pipe=2, tensor=2)
    plan = Plan(mesh, zero=1, residual="sequence", schedule="1f1b", microbatches=MICROBATCHES)
    optimizer, state = start
    arrays, rest = eqx.partition(state, eqx.is_array)
    placed = jax.device_put(arrays, training.state_shardings(plan, optimizer, arrays))
    copied = jax.tree.map(jnp.copy, placed)  # a step consumes the state that it is given
    return stepped(training.make_step(training.next_token_loss, optimizer, plan, clip=CLIP), eqx.combine(copied, rest))


@pytest.fixture(scope="module")
def plain(start):
    optimizer, state = start
    step = training.make_step(training.next_token_loss, optimizer, microbatches=MICROBATCHES, clip=CLIP)
    return stepped(step, jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, state))


def parameters(state):
    return jax.tree.leaves(eqx.filter(state.model, eqx.is_inexact_array))


def test_loss_gradients_and_norm_are_one_devices(split, plain):
    """Also the loss of balance and the clipped updates: nothing is multiplied by a number of devices."""
    for ours, theirs in zip(split[1], plain[1], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert split[1][-1]["loss"] < split[1][0]["loss"] and split[1][0]["grad_norm"] > CLIP  # so the clip is at work
    assert split[1][1]["loss"] != pytest.approx(plain[1][0]["loss"], rel=1e-3)  # it can fail
    for x, y in zip(parameters(split[0]), parameters(plain[0]), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-4)


def spread(array):
    """The largest difference between devices that should hold the same numbers."""
    pieces, far = {}, 0.0
    for shard in array.addressable_shards:
        known = pieces.setdefault(str(shard.index), np.asarray(shard.data))
        far = max(far, float(np.abs(known - np.asarray(shard.data)).max(initial=0)))
    return far, len(pieces)


def test_replicas_are_bitwise_equal_after_steps(split):
    """Parameters and the optimizer's memory, wherever several devices hold a copy."""
    arrays = [x for x in jax.tree.leaves(split[0]) if isinstance(x, jax.Array) and x.ndim]
    found = [spread(x) for x in arrays]
    assert max(far for far, _ in found) == 0.0
    assert {pieces for _, pieces in found} >= {1, 2, 4}  # some whole on all devices, some split over several axes


@pytest.mark.quick
def test_control_a_replica_that_drifts_is_seen():
    whole = jax.device_put(np.ones((4, 4), np.float32), NamedSharding(make_mesh(fsdp=8), PartitionSpec()))
    drifted = [x.data + np.float32(1e-6 * (shard == 3)) for shard, x in enumerate(whole.addressable_shards)]
    assert spread(whole) == (0.0, 1)
    assert spread(jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, drifted))[0] > 0


def test_shared_experts_are_trained(split, start):
    shared = lambda model: model.stacks[0].blocks.blocks[-1].feed_forward.layer.shared
    after, before = shared(split[0].model), shared(start[1].model)
    moved = [float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in zip(*map(jax.tree.leaves, (after, before)))]
    assert len(moved) == 4 and min(moved) > 1e-3
