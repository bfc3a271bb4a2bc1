"""The step equals one large batch, clips exactly, ignores non-finite gradients, and updates in place."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from same_bits import assert_same_bits, leaves

from eqformer import training
from eqformer.kernels import _platform
from eqformer.parallel import make_mesh, Plan
from eqformer.training import _step


loss = partial(training.next_token_loss, chunk=16)


def test_microbatches_give_the_big_batch_s_gradient_with_dropout(make_model, make_batch, key):
    model, batch = make_model(dropout=0.3, layers=1), make_batch(rows=4)
    of_batch = eqx.filter_jit(training.make_gradient_function(loss))
    of_two_microbatches = eqx.filter_jit(training.make_gradient_function(loss, microbatches=2))
    total, count, gradients = of_batch(model, batch, key)
    found_total, found_count, found = of_two_microbatches(model, batch, key)
    np.testing.assert_allclose([found_total, found_count], [total, count], rtol=1e-6)
    for a, b in zip(leaves(found), leaves(gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    _assert_norms_of_modules(gradients)
    # The controls: the mean of the microbatches' means is another gradient, and so is one with other examples' keys.
    is_half = [np.arange(4)[:, None] % 2 == i for i in range(2)]
    halves = [of_batch(model, eqx.tree_at(lambda b: b.weights, batch, batch.weights * half), key) for half in is_half]
    assert halves[0][1] != halves[1][1]
    first, second = ([x / float(of_half) for x in leaves(tree)] for _, of_half, tree in halves)
    wanted = [x / float(count) for x in leaves(gradients)]
    assert max(np.abs((a + b) / 2 - c).max() for a, b, c in zip(first, second, wanted, strict=True)) > 1e-3
    other = of_batch(model, eqx.tree_at(lambda b: b.examples, batch, batch.examples + 1), key)
    assert abs(other[0] - total) > 1e-2


def _assert_norms_of_modules(gradients):
    """Their norms are those of the leaves in float64; under meshes, `test_plan_parity` has them in each step."""
    got, block = eqx.filter_jit(training.module_gradient_norms)(gradients), gradients.stacks[0].blocks
    wanted = {"embedding": gradients.embedding, "norm": gradients.norm}
    wanted |= {f"stacks[0].blocks.sublayers[{number}]": sublayer for number, sublayer in enumerate(block.sublayers)}
    exact = lambda tree: np.sqrt(sum(np.sum(np.float64(leaf) ** 2) for leaf in leaves(tree)))
    assert got.keys() == wanted.keys()
    for name, part in wanted.items():
        np.testing.assert_allclose(got[name], exact(part), rtol=1e-6)
    np.testing.assert_allclose(np.linalg.norm([*got.values()]), exact(gradients), rtol=1e-6)
    without_norm = exact(block.mixer.layer)  # the control: a module's norm is of all its leaves
    assert abs(got["stacks[0].blocks.sublayers[0]"] / without_norm - 1) > 1e-3


@pytest.fixture(scope="module")
def quadratic():
    """A loss with known gradients, a model with leaves that do not train, and a compiled step."""

    class Model(eqx.Module):
        weight: jax.Array
        number: jax.Array
        activation: object
        note: str = eqx.field(static=True)

    def make(dtype=jnp.float32):
        return Model(jnp.asarray([3.0, 4.0], dtype), jnp.asarray(7, jnp.int32), jnp.tanh, "kept")

    def of_batch(model, batch, key):
        return jnp.sum(model.weight.astype(jnp.float32) * batch[0]), jnp.sum(batch[1])

    def batch(gradient, count=1.0):
        return jnp.asarray([gradient], jnp.float32), jnp.asarray([count], jnp.float32)

    optimizer = training.optimizer("adamw", make(), rate=training.warmup_cosine(0.1, steps=10, warmup=2))
    return make, batch, optimizer, training.make_step(of_batch, optimizer, clip=1.0), of_batch


def test_the_norm_is_exact_and_reported_before_clipping(quadratic):
    make, batch, _, _, of_batch = quadratic
    optimizer = training.optimizer("sgd", make(), rate=0.5)
    for gradient, expected in (([6.0, 8.0], [0.6, 0.8]), ([0.3, 0.4], [0.15, 0.2])):
        step = training.make_step(of_batch, optimizer, clip=1.0)
        state, metrics = step(training.init_state(make(), optimizer), batch(gradient, 2.0))
        norm = np.linalg.norm(gradient) / 2
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
        clipped = np.array(gradient) / 2 * min(1, 1 / norm)
        np.testing.assert_allclose(clipped, expected, rtol=1e-6)
        np.testing.assert_allclose(state.model.weight, [3.0, 4.0] - 0.5 * clipped, rtol=1e-6)
    step = training.make_step(of_batch, optimizer, clip=None)
    state, _ = step(training.init_state(make(), optimizer), batch([6.0, 8.0], 2.0))
    np.testing.assert_allclose(state.model.weight, [1.5, 2.0], rtol=1e-6)


@pytest.mark.parametrize("bad", [([np.nan, 1.0], 1.0), ([np.inf, 1.0], 1.0), ([1e30, 1e30], 1.0), ([1.0, 1.0], np.nan)])
def test_a_step_that_is_not_finite_changes_nothing(quadratic, bad):
    make, batch, optimizer, step, _ = quadratic
    state, _ = step(training.init_state(make(), optimizer), batch([1.0, -2.0]))
    before = leaves((state.model, state.optimizer_state))
    state, metrics = step(state, batch(*bad))
    assert_same_bits((state.model, state.optimizer_state), before)
    assert (int(state.step), int(metrics["skipped"]), int(metrics["skipped_in_a_row"])) == (2, 1, 1)
    state, metrics = step(state, batch([1.0, -2.0]))
    assert (int(state.step), int(metrics["skipped"]), int(metrics["skipped_in_a_row"])) == (3, 1, 0)
    assert any((a != b).any() for a, b in zip(leaves(state.model), before))  # the control: a good step does change
    assert state.model.note == "kept" and int(state.model.number) == 7


def test_batches_without_any_weight_change_nothing_and_are_counted_by_themselves(quadratic):
    make, batch, optimizer, step, _ = quadratic
    state, _ = step(training.init_state(make(), optimizer), batch([1.0, -2.0]))
    state, metrics = step(state, batch([np.nan, 0.0]))
    before = leaves((state.model, state.optimizer_state))
    counts = lambda metrics: [int(metrics[name]) for name in ("skipped", "skipped_in_a_row", "empty_batches")]
    for number in range(3):
        state, metrics = step(state, batch([1.0, 1.0], 0.0))
        training.check_finite(metrics, limit=2)
        assert counts(metrics) == [1, 1, number + 1]
    assert_same_bits((state.model, state.optimizer_state), before)
    state, metrics = step(state, batch([np.nan, 0.0]))
    assert counts(metrics) == [2, 2, 3]  # the control: those that are not finite end a run, whatever lies between
    with pytest.raises(training.DivergedError, match="2 steps in a row"):
        training.check_finite(metrics, limit=2)
    assert counts(step(state, batch([1.0, -2.0]))[1]) == [2, 0, 3]


@pytest.mark.quick
def test_too_many_in_a_row_are_an_error(quadratic):
    make, batch, optimizer, step, _ = quadratic
    state = training.init_state(make(), optimizer)
    for _ in range(2):
        state, metrics = step(state, batch([np.nan, 0.0]))
        training.check_finite(metrics, limit=3)
    state, _ = step(state, batch([1.0, 0.0]))
    for _ in range(3):
        state, metrics = step(state, batch([np.nan, 0.0]))
    with pytest.raises(training.DivergedError, match="3 steps in a row .* loss nan"):
        training.check_finite(metrics, limit=3)
    assert int(metrics["skipped"]) == 5 and "loss_scale" not in metrics


def test_the_rate_follows_the_run_s_step_through_skipped_ones(quadratic):
    make, batch, optimizer, step, _ = quadratic
    state, rates = training.init_state(make(), optimizer), []
    for gradient in (1.0, np.nan, 1.0, 1.0):
        state, metrics = step(state, batch([gradient, 1.0]))
        rates.append(float(metrics["learning_rate"]))
    np.testing.assert_allclose(rates, [optimizer.rate(i) for i in range(4)], rtol=1e-6)


def test_runs_of_any_length_share_a_program_compiled_from_shapes(quadratic):
    make, batch, _, _, of_batch = quadratic

    def step_of(name, *lengths, peak=0.1):
        starts = [0, *lengths[:-1]]
        phases = [training.SchedulePhase(start, steps, 1, "rewarm") for start, steps in zip(starts, lengths)]
        rate = training.phase_rates(name, phases, peak=peak)
        return training.make_step(of_batch, training.optimizer("adamw", make(), rate=rate))

    first = training.init_state(make(), training.optimizer("adamw", make(), rate=0.1))
    text = lambda *run, **more: step_of(*run, **more).lower(first, batch(1.0)).as_text()
    made = {}
    for name in training.RATES:
        made |= {(name, 1): text(name, 9), (name, 2): text(name, 9, 30)}
        assert made[name, 1] == text(name, 30, peak=0.2) and made[name, 2] == text(name, 5, 12)
    assert len({*made.values()}) == len(made)  # the control: programs of other rates differ
    shapes = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x, tree)
    step = step_of("warmup-cosine", 9)
    ready = step.compile(shapes(first), shapes(batch(1.0)))
    assert ready.compile(first, batch(1.0)) is ready
    again = training.init_state(make(), training.optimizer("adamw", make(), rate=0.1))
    (ours, metrics), (state, expected) = ready(first, batch(1.0)), step(again, batch(1.0))
    assert_same_bits((ours, metrics), (state, expected))


def test_narrow_parameters_train(quadratic):
    make, batch, optimizer, step, _ = quadratic
    state = training.init_state(make(jnp.bfloat16), optimizer)
    for _ in range(3):
        state, metrics = step(state, batch([1.0, -1.0]))
    assert state.model.weight.dtype == jnp.bfloat16 and metrics["loss"].dtype == jnp.float32
    assert state.model.weight[0] < 3 and state.model.weight[1] > 4
    assert {x.dtype for x in jax.tree.leaves(state.optimizer_state)} == {jnp.dtype("float32"), jnp.dtype("int32")}


def test_float64_parameters_train_in_float64(quadratic):
    make, _, optimizer, _, _ = quadratic
    with jax.enable_x64(True):

        def of_batch(model, batch, key):
            return jnp.sum(model.weight * batch), jnp.asarray(2.0, jnp.float32)

        state = training.init_state(make(jnp.float64), optimizer)
        step = training.make_step(of_batch, optimizer, clip=0.5)
        state, metrics = step(state, jnp.asarray([3.0, 4.0], jnp.float64))
        assert state.model.weight.dtype == metrics["grad_norm"].dtype == metrics["loss"].dtype == jnp.float64
        # Adam's first step is the sign of the gradient, short of eps over its clipped size; no decay without a mark.
        clipped = np.array([0.3, 0.4])
        moved = float(metrics["learning_rate"]) * clipped / (clipped + 1e-8)
        np.testing.assert_allclose(state.model.weight, [3.0, 4.0] - moved, rtol=1e-14)


def test_everything_but_the_batch_is_updated_in_place(make_model, make_batch, key):
    model, batch = make_model(), jax.tree.map(jnp.asarray, make_batch())
    optimizer = training.optimizer("adamw", model, rate=1e-3)
    step = training.make_step(loss, optimizer, microbatches=2)
    state = training.init_state(model, optimizer)
    step = step.compile(state, batch, key)
    assert step.program is not None
    memory: Any = step.program.memory_analysis()
    held = sum(x.nbytes for x in jax.tree.leaves(eqx.filter(state, eqx.is_array)))
    assert memory.alias_size_in_bytes == held
    table = state.model.embedding.weight
    losses = []
    for _ in range(8):
        state, metrics = step(state, batch, key)
        losses.append(float(metrics["loss"]))
    assert table.is_deleted() and not batch.ids.is_deleted() and not key.is_deleted()
    assert losses[-1] < losses[0] - 0.02 and int(state.step) == 8
    assert state.model.stacks[0].numbers.tolist() == [0, 1]


def test_the_key_of_a_step_is_its_own(make_batch, key):
    def noise(model, batch, key):
        return model[0] * jax.random.normal(key, ()), jnp.ones(())

    optimizer = training.sgd([jnp.ones(())], rate=training.constant(1.0), matrices=[None])
    step = training.make_step(noise, optimizer, clip=None)
    state, seen = training.init_state([jnp.ones(())], optimizer), []
    for number in range(2):
        before = float(state.model[0])
        state, _ = step(state, make_batch(), key)
        seen.append(before - float(state.model[0]))
        wanted = jax.random.normal(jax.random.fold_in(key, number), ())
        np.testing.assert_allclose(seen[-1], wanted, rtol=1e-5, atol=1e-6)
    assert seen[0] != seen[1]


def test_an_array_in_two_places_becomes_two():
    shared = jnp.ones(2)
    model = {"one": shared, "two": shared}
    optimizer = training.sgd(model, rate=training.constant(1.0), matrices={"one": None, "two": None})
    step = training.make_step(lambda m, batch, key: (jnp.sum(m["one"] - m["two"]), jnp.ones(())), optimizer, clip=None)
    state, _ = step(training.init_state(model, optimizer), None)
    np.testing.assert_array_equal([state.model["one"], state.model["two"]], [[0, 0], [2, 2]])


def test_bad_arguments_are_refused(quadratic, make_batch):
    make, _, optimizer, _, of_batch = quadratic
    with pytest.raises(ValueError, match="microbatches=0"):
        training.make_step(of_batch, optimizer, microbatches=0)
    plan = Plan(make_mesh(devices=jax.devices()[:1]), microbatches=4)
    with pytest.raises(
        ValueError, match=r"Plan\(microbatches=4\), microbatches=2\): .*leave microbatches out of make_step"
    ):
        training.make_step(training.next_token_loss, optimizer, plan, microbatches=2)
    with pytest.raises(ValueError, match="clip=0.0"):
        training.make_step(of_batch, optimizer, clip=0.0)
    step = training.make_step(of_batch, optimizer, microbatches=3)
    with pytest.raises(ValueError, match="microbatches=3.*4 rows.*1 rows"):
        step(training.init_state(make(), optimizer), make_batch(rows=4))


def test_on_accelerators_a_step_is_skipped_array_by_array_and_not_by_a_branch(monkeypatch):
    """A branch's results are beside the state on GPUs, in places of their own; the numbers are the same to the bit."""
    monkeypatch.setattr(_platform, "compilers", lambda: ("cuda",))
    update = lambda x, memory: (x / memory, memory + 1)
    state = jnp.arange(3.0), jnp.array([0.0, 2.0, 3.0])  # of which the update's first number is none
    run = jax.jit(lambda is_meant: _step.update_where(is_meant, update, *state))
    text = lambda platform: run.trace(True).lower(lowering_platforms=(platform,)).as_text()
    branches = {platform: text(platform).count('"stablehlo.case"') for platform in ("cpu", "cuda", "tpu")}
    assert branches["cpu"] == branches["cuda"] + 1 == branches["tpu"] + 1  # all have those of the choice of platform
    branch = [run(is_meant) for is_meant in (True, False)]
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **_: default(*args))
    choices = [_step.update_where(jnp.array(is_meant), update, *state) for is_meant in (True, False)]
    assert np.array_equal(branch, choices, equal_nan=True) and np.array_equal(choices[1], state)
    assert np.isnan(choices[0][0][0])
