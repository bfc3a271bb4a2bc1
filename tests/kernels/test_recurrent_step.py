"""The TPU kernel for one token of a recurrence, in Pallas' interpreter, equals plain JAX and updates in place."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put

from eqformer import kernels, models, nn
from eqformer.kernels import _recurrent_step, RecurrentStepCall, ReferenceStep, StepTpu
from eqformer.nn.recurrent import _delta_rule, _mamba
from eqformer.nn.recurrent._recurrence import States


def close(one: Any, other: Any, bound: float) -> bool:
    """Return whether the largest difference, relative to the largest expected number, is within the bound."""
    return bool(np.max(np.abs(one - other)) <= bound * max(1.0, np.max(np.abs(other))))


ROWS = 3
# Of each rule: layers, groups, heads of a group, channels of a key and a value. Those of 64 are laid before the others.
CASES = {
    "a state space whose heads share a key": (_mamba._step, 2, 1, 16, 128, 64),
    "one of groups": (_mamba._step, None, 4, 2, 128, 128),
    "a delta rule": (_delta_rule._step, None, 1, 16, 128, 128),
    "one of narrow values that fades by channels": (_delta_rule._step, 2, 1, 3, 128, 64),
}


def call_of(name: str) -> RecurrentStepCall:
    """Rows find their state, zeros and NaN."""
    step, layers, groups, heads, head_dim, v_dim = CASES[name]
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    many, unit = (ROWS, groups, heads), np.float32(head_dim**-0.5)
    if step is _mamba._step:
        few, faded = (ROWS, groups, 1), -np.abs(draw(*many, 1))
        token = draw(*few, head_dim) * unit, draw(*few, head_dim) * unit, draw(*many, v_dim), faded
    else:
        faded = -np.abs(draw(*many, head_dim if "channels" in name else 1))
        keys = draw(*many, head_dim) * unit, draw(*many, head_dim) * unit
        token = *keys, draw(*many, v_dim), 1 / (1 + np.exp(-draw(*many, 1))), faded
    memory = draw(*(() if layers is None else (layers,)), ROWS, groups * heads, head_dim, v_dim)
    layer = None if layers is None else np.asarray(1, np.int32)
    token, memory, initial, layer = jax.device_put((token, memory, np.asarray([0, 1, 2], np.int32), layer))
    return RecurrentStepCall(token, memory, initial, layer, step)


@pytest.mark.by_default("a state space whose heads share a key", "one of narrow values that fades by channels")
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_plain_step(name, monkeypatch):
    call = call_of(name)
    monkeypatch.setattr(_recurrent_step, "_STATE_BYTES", 2**18)  # several programs
    answer, memory = jax.device_get(jax.jit(StepTpu(interpret=True).run)(call))
    reference = jax.jit(ReferenceStep().run)
    wanted, after = jax.device_get(reference(call))
    assert answer.shape == wanted.shape and np.isnan(answer[2]).all()
    assert close(answer[:2], wanted[:2], 1e-5)
    lost = np.isnan(after)
    assert np.array_equal(lost, np.isnan(memory))
    assert close(np.where(lost, 0, memory), np.where(lost, 0, after), 1e-6)
    assert call.layer is None or np.array_equal(memory[0], np.asarray(call.memory)[0])  # another layer's
    begun = dataclasses.replace(call, initial=put(np.ones(ROWS), np.int32))  # the control: rows that find zeros
    assert not close(np.asarray(reference(begun)[0][0]), answer[0], 1e-2)


@pytest.mark.grid
def test_tpus_step_by_it_in_a_stack():
    """One call, of all layers' states, which its result stands for; more tokens at once are read by chunks."""
    config = models.Mamba2Config(16, 32, 3, net_heads=4, net_kv_heads=1, net_head_dim=128, net_v_dim=64)
    model = models.build(config, key=jax.random.key(0))
    cache = model.init_cache(2, 8)

    def text(platform: str, seq: int = 1) -> str:
        ids = jnp.zeros((2, seq), jnp.int32)
        run = eqx.filter_jit(lambda model, cache: model(ids, nn.positions_like(ids.shape), cache))
        with kernels.traced_for(platform):
            return str(eqx.filter_make_jaxpr(run)(model, cache)[0])

    assert "name=stepped_states" in text("tpu") and "f32[3,2,1,4,64,128]" in text("tpu")
    assert not any("stepped_states" in found for found in (text("cpu"), text("cuda"), text("tpu", 4)))


def test_its_gradients_are_those_of_the_plain_step():
    call = call_of("a delta rule")

    def total(token: Any, platform: str) -> jax.Array:
        with kernels.traced_for(platform):
            answer, after = States(call.memory, call.initial == 1).step_token(call.step, *token)
        return jnp.sum(jnp.sin(answer)) + jnp.sum(jnp.cos(after))

    gradient = lambda platform: jax.jit(jax.grad(functools.partial(total, platform=platform)))(call.inputs)
    own, plain = jax.device_get((gradient("tpu"), gradient("cpu")))
    assert all(close(*pair, 1e-5) for pair in zip(own, plain, strict=True))
    assert not close(own[0] * 1.01, plain[0], 1e-5)


def test_it_has_states_of_whole_vectors_in_float32():
    def reason(*dims: int, memory: str = "float32", inputs: str = "float32") -> str | None:
        arrays = jnp.zeros((2, 4, *dims), memory), (jnp.zeros((2, 4, 1, 1), inputs),)
        return StepTpu().supports(RecurrentStepCall(arrays[1], arrays[0], jnp.zeros(2, jnp.int32), None, max))

    assert all(reason(*dims) is None for dims in ((128, 64), (128, 128), (256, 64), (16, 128)))
    for dims in ((16, 32), (64, 64), (128, 60), (12, 128)):
        assert reason(*dims) == f"it takes states whose channels fill vectors of 8 x 128, not {[*dims]}"
    assert reason(128, 128, memory="bfloat16") == "it computes in float32, not ['bfloat16', 'float32']"
    assert reason(128, 128, inputs="bfloat16") == "it computes in float32, not ['float32', 'bfloat16']"
