"""Rematerialisation does not repeat collectives: scattered and gathered tokens are kept for the backward pass."""

import equinox as eqx
import jax
import pytest

from eqformer import models, nn, planning, training
from eqformer._prepare import keep_known
from eqformer.parallel import make_mesh, Plan
from eqformer.parallel._expert_parallel import SplitMixture
from eqformer.program import read_compiled


def scatters(remat: str) -> int:
    """Reduce-scatters in the program of a loss and its gradients."""
    shapes = eqx.filter_eval_shape(lambda: models.build("llama-byte-1m", key=jax.random.key(0)))
    shapes = nn.with_execution(shapes, remat=remat)
    plan = Plan(make_mesh(tensor=2, devices=jax.devices()[:2]), residual="sequence")
    trained = training.optimizer("adamw", shapes, rate=3e-4).trained
    gradients = training.make_gradient_function(training.next_token_loss, plan, trained=trained)
    arrays, rest = eqx.partition(plan.shapes(shapes), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    run = lambda arrays, batch: eqx.filter(gradients(eqx.combine(arrays, rest), batch, None), eqx.is_array)
    return str(jax.make_jaxpr(run)(arrays, planning.batch_shapes(2, 16))).count("reduce_scatter[")


@pytest.mark.grid
def test_what_a_layer_scatters_is_not_scattered_again():
    """But by policies that keep products alone, as a control."""
    assert scatters("full") == scatters("products") == scatters("none")
    assert scatters("dots") == scatters("full") + 1  # the attention's


MIXTURE = models.OLMoEConfig(vocab=512, embed=256, layers=6, heads=4, kv_heads=4, mlp=64, experts=8, top_k=2)


def mixture(devices, method):
    """A state, a model of shapes whose backward pass computes all again, and a batch."""
    make = lambda: nn.with_execution(models.build(MIXTURE, key=jax.random.key(0)), remat="full")
    shapes = eqx.filter_eval_shape(make)
    shapes = eqx.filter_eval_shape(nn.Precision("float32", "bfloat16").apply, shapes)
    plan = Plan(make_mesh(fsdp=2, expert=2, devices=devices), zero=3, expert_method=method)
    states = training.PlannedState(make, training.optimizer("adamw", shapes, rate=3e-4), plan, model_shapes=shapes)
    return states, shapes, planning.batch_shapes(8, 128)


@pytest.mark.grid
def test_the_tokens_that_experts_devices_gather_are_kept():
    """Beside the layers' inputs, and as many bytes; the control: tokens that are exchanged are not."""
    kept = {}
    for method in ("gather", "exchange"):
        held = planning.step_bytes(*mixture(jax.devices()[:4], method), "cuda").held
        kept[method] = held["kept for the backward pass"]
    inputs = MIXTURE.layers * 8 // 4 * 128 * MIXTURE.embed * 2
    assert inputs <= kept["exchange"] < 1.1 * inputs and 2 * inputs <= kept["gather"] < 2.1 * inputs


GPUS = planning.topology("h100:4")
AS_PREPARED = keep_known({"xla_gpu_enable_pipelined_all_gather": True, "xla_gpu_autotune_level": 0})


@pytest.mark.grid
@pytest.mark.skipif(planning.missing_compiler(GPUS) is not None, reason="the extra `cuda` is not installed")
def test_gpus_compute_the_attention_half_of_a_block_once_in_a_turn_backward(monkeypatch):
    """By the products of a compiled step, in which one turn's gather is begun in the turn before it."""

    def operations():
        devices = planning.devices_of(GPUS)
        states, _, batch = mixture(devices, "gather")
        step = training.make_step(training.next_token_loss, states.optimizer, states.plan)
        compiled = planning.lowered_step(states, step, batch).compile(compiler_options=AS_PREPARED)
        return read_compiled(compiled, states.plan.mesh).operations

    once = operations()
    monkeypatch.setattr(SplitMixture, "_name_gathered_tokens", lambda self, x: x)
    twice = operations()
    tokens, embed = 8 // 4 * 128, MIXTURE.embed
    queries_keys_values = (MIXTURE.layers - 1) * 2 * tokens * 3 * embed**2
    assert twice - once >= 0.9 * queries_keys_values
