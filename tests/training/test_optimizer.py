"""Optimizers against their formulas in float64 numpy, one unstacked matrix at a time."""

import functools
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from haste import put
from jax.sharding import PartitionSpec

from eqformer import nn, training
from eqformer.parallel import Plan
from eqformer.planning import abstract_mesh, state_bytes


RATE, DECAY, STEPS = 1e-2, 0.1, 3
ALL = ["adamw", "schedule-free-adamw", "muon", "normuon", "sgd"]  # But for SOAP: test_soap.py.


def run(optimizer, model, gradients):
    """Leaves by path after a few updates with the given gradients, and the state."""
    init, update = eqx.filter_jit(optimizer.init), eqx.filter_jit(optimizer.update)
    state, parameters = init(model), training.trainable(model)
    for gradient in gradients:
        parameters, state = update(gradient, state, parameters, jnp.float32(RATE))
    return by_path(parameters), state


def by_path(tree):
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def random_gradients(model, seed=0):
    draw = np.random.default_rng(seed)
    leaves, structure = jax.tree.flatten(training.trainable(model))

    def one():
        return jax.tree.unflatten(structure, [jnp.float32(draw.normal(size=leaf.shape)) for leaf in leaves])

    return [one() for _ in range(STEPS)]


def marks_by_path(model):
    is_leaf = lambda x: x is None or isinstance(x, nn.Matrix)
    marks = jax.tree_util.tree_leaves_with_path(nn.matrices(model), is_leaf=is_leaf)
    return {jax.tree_util.keystr(path): mark for path, mark in marks}


def adam_by_hand(value, gradients, b1=0.9, b2=0.95, eps=1e-8, decay=0.0):
    value, first, second = np.float64(value), 0.0, 0.0
    for step, gradient in enumerate(np.asarray(gradients, np.float64), 1):
        first, second = b1 * first + (1 - b1) * gradient, b2 * second + (1 - b2) * gradient**2
        direction = first / (1 - b1**step) / (np.sqrt(second / (1 - b2**step)) + eps)
        value = value - RATE * (direction + decay * value)
    return value


def orthogonalised(matrix):
    """Five quintic Newton-Schulz iterations on one `rows columns` matrix, wide side last."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


def muon_by_hand(value, gradients, beta=0.95, decay=DECAY, rms=0.2):
    """One `outputs inputs` matrix through Nesterov momentum, orthogonalisation and decay."""
    value, momentum = np.float64(value), 0.0
    for step, gradient in enumerate(np.asarray(gradients, np.float64), 1):
        momentum = beta * momentum + (1 - beta) * gradient
        ahead = beta * momentum / (1 - beta ** (step + 1)) + (1 - beta) * gradient / (1 - beta**step)
        direction = orthogonalised(ahead) * rms * np.sqrt(max(value.shape))
        value = value - RATE * (direction + decay * value)
    return value


@functools.cache
def best_quintics(lower, steps, cushion=0.02407327424182761):
    """The coefficients of Polar Express by Remez' exchange: polynomials that err least from 1, one after another.

    Below `cushion` of the largest value, singular values need not be near 1; each polynomial is scaled so that its
    smallest and largest values lie at the same distance from 1 (arXiv 2505.16932, section 4.3).
    """
    upper, coefficients = 1.0, []
    for _ in range(steps):
        start = max(lower, cushion * upper)
        points = np.linspace(start, upper, 4)
        for _ in range(50):
            powers = np.stack([points, points**3, points**5, [1, -1, 1, -1]], axis=1)
            a, b, c, _ = np.linalg.solve(powers, np.ones(4))
            points = np.array([start, *np.sort(np.sqrt(np.roots([5 * c, 3 * b, a]).real)), upper])
        lowest, highest = (a * x + b * x**3 + c * x**5 for x in (lower, upper))
        scale = 2 / (lowest + highest)
        coefficients.append((a * scale, b * scale, c * scale))
        lower = scale * lowest
        upper = 2 - lower
    return [(a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in coefficients]


def normuon_by_hand(value, gradients, beta=0.95, row_decay=0.95, decay=DECAY, rms=0.2, equal=True):
    """One `outputs inputs` matrix through momentum, Polar Express, division by each row's mean square, and decay.

    Where `equal` is False, the rows are not divided.
    """
    value, momentum, squares = np.float64(value), 0.0, 0.0
    for step, gradient in enumerate(np.asarray(gradients, np.float64), 1):
        momentum = beta * momentum + (1 - beta) * gradient
        x = beta * momentum / (1 - beta ** (step + 1)) + (1 - beta) * gradient / (1 - beta**step)
        x /= np.linalg.norm(x)
        for a, b, c in best_quintics(1e-3, 5):
            x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
        squares = row_decay * squares + (1 - row_decay) * np.mean(x**2, axis=1, keepdims=True)
        x = x / np.sqrt(squares / (1 - row_decay**step)) if equal else x
        value = value - RATE * (x * rms / np.sqrt(np.mean(x**2)) + decay * value)
    return value


@pytest.fixture(scope="module")
def trained(filled):
    """The leaves of four optimizers after a few steps from the same model and gradients."""

    def block(key):
        one, two = jax.random.split(key)
        attention = nn.Attention(
            embed=8, heads=2, kv_heads=1, head_dim=6, bias=True, scores=nn.Scores(sinks=jnp.zeros(2)), key=one
        )
        norm = nn.RMSNorm("embed", embed=8)
        return nn.Block(nn.Residual(attention, norm), nn.Residual(nn.GatedMLP(embed=8, mlp=12, key=two), norm))

    def build():
        one, two, three = jax.random.split(jax.random.key(0), 3)
        return nn.Transformer(
            nn.Embedding(vocab=10, embed=8, key=one),
            (nn.Stack(block, 3, key=two),),
            nn.RMSNorm("embed", embed=8),
            nn.Linear("embed -> vocab", embed=8, vocab=10, key=three),
        )

    model = filled(build)
    gradients = random_gradients(model)
    # Tests of their own compare schedule-free AdamW and SOAP.
    options: Any = {name: dict(weight_decay=DECAY) for name in ("adamw", "muon", "normuon")}
    options["sgd"] = dict(momentum=0.9)
    after = {
        name: run(training.optimizer(name, model, rate=RATE, **named), model, gradients)
        for name, named in options.items()
    }
    return model, {path: [by_path(g)[path] for g in gradients] for path in by_path(gradients[0])}, after


def test_every_leaf_of_adamw_and_the_mask_of_decay(trained):
    model, gradients, after = trained
    before, marks = by_path(training.trainable(model)), marks_by_path(model)
    decayed = {path for path in before if marks[path] is not None}
    assert len(decayed) == 9 and all(path.endswith(".weight") and "norm" not in path for path in decayed)
    for path, value in before.items():
        decay = DECAY if path in decayed else 0.0
        expected = adam_by_hand(value, gradients[path], decay=decay)
        np.testing.assert_allclose(after["adamw"][0][path], expected, rtol=2e-5, atol=2e-6, err_msg=path)
    one = next(iter(decayed))  # the control: decay is large enough to be seen
    assert np.abs(adam_by_hand(before[one], gradients[one]) - after["adamw"][0][one]).max() > 1e-4


def test_muon_orthogonalises_each_matrix_of_the_ensemble_by_itself(trained):
    model, gradients, after = trained
    before, marks = by_path(training.trainable(model)), marks_by_path(model)
    hidden = {path: mark for path, mark in marks.items() if mark is not None and not mark.table}
    assert len(hidden) == 7 and {mark.outputs for mark in hidden.values()} == {1, 2}
    for path, mark in hidden.items():
        shape = before[path].shape
        outputs = int(np.prod(shape[1 : 1 + mark.outputs]))
        for layer in range(3):
            rows = [x[layer].reshape(outputs, -1) for x in (before[path], *gradients[path])]
            expected = muon_by_hand(rows[0], rows[1:]).reshape(shape[1:])
            np.testing.assert_allclose(after["muon"][0][path][layer], expected, rtol=1e-4, atol=1e-5, err_msg=path)
        # The control: all layers as one matrix give another update.
        together = muon_by_hand(
            before[path].reshape(3 * outputs, -1), np.reshape(gradients[path], (STEPS, 3 * outputs, -1))
        )
        assert np.abs(together.reshape(shape) - after["muon"][0][path]).max() > 1e-3
    for path in before.keys() - hidden.keys():
        expected = adam_by_hand(before[path], gradients[path], decay=DECAY if marks[path] is not None else 0.0)
        np.testing.assert_allclose(after["muon"][0][path], expected, rtol=2e-5, atol=2e-6, err_msg=path)


def test_normuon_divides_each_rows_update_by_its_mean_square(trained):
    model, gradients, after = trained
    before, marks = by_path(training.trainable(model)), marks_by_path(model)
    for path, mark in marks.items():
        if mark is None or mark.table:  # AdamW's, as Muon's are
            np.testing.assert_array_equal(after["normuon"][0].get(path), after["muon"][0].get(path))
            continue
        shape = before[path].shape
        outputs = int(np.prod(shape[1 : 1 + mark.outputs]))
        for layer in range(3):
            rows = [x[layer].reshape(outputs, -1) for x in (before[path], *gradients[path])]
            expected = normuon_by_hand(rows[0], rows[1:]).reshape(shape[1:])
            np.testing.assert_allclose(after["normuon"][0][path][layer], expected, rtol=1e-4, atol=1e-5, err_msg=path)
        orthogonal = normuon_by_hand(rows[0], rows[1:], equal=False).reshape(
            shape[1:]
        )  # The control: rows not divided.
        assert np.abs(orthogonal - after["normuon"][0][path][2]).max() > 1e-4, path


@pytest.mark.parametrize("name, by_hand", [("muon", muon_by_hand), ("normuon", normuon_by_hand)])
def test_updates_of_spectral_size(trained, name, by_hand):
    model, gradients, after = trained
    found, _ = run(
        training.optimizer(name, model, rate=RATE, weight_decay=DECAY, update_size="spectral"),
        model,
        [jax.tree.unflatten(jax.tree.structure(training.trainable(model)), step) for step in zip(*gradients.values())],
    )
    before, marks = by_path(training.trainable(model)), marks_by_path(model)
    for path, mark in marks.items():
        if mark is None or mark.table:
            np.testing.assert_array_equal(found.get(path), after[name][0].get(path))
            continue
        shape = before[path].shape
        outputs = int(np.prod(shape[1 : 1 + mark.outputs]))
        rows = [x[1].reshape(outputs, -1) for x in (before[path], *gradients[path])]
        inputs = rows[0].shape[1]
        # An orthogonal matrix times sqrt(outputs / inputs).
        expected = by_hand(rows[0], rows[1:], rms=np.sqrt(outputs / inputs / max(outputs, inputs))).reshape(shape[1:])
        np.testing.assert_allclose(found[path][1], expected, rtol=1e-4, atol=1e-5, err_msg=path)
        assert np.abs(found[path] - after[name][0][path]).max() > 1e-3  # the control: the other size
    with pytest.raises(ValueError, match=r"muon\(update_size='frobenius'\): the sizes are rms and spectral"):
        training.optimizer(name, model, rate=RATE, update_size="frobenius")


def test_means_of_gradients_decay_as_the_settings_say(trained):
    model, gradients, after = trained
    settings = training.Optimization("normuon", RATE, "constant", warmup=0, weight_decay=DECAY, momentum=0.6, b1=0.5)
    found, _ = run(
        settings.optimizer(model, settings.phases(STEPS)),
        model,
        [jax.tree.unflatten(jax.tree.structure(training.trainable(model)), step) for step in zip(*gradients.values())],
    )
    before, marks = by_path(training.trainable(model)), marks_by_path(model)
    for path in before:
        if (mark := marks[path]) is None or mark.table:
            decay = 0.0 if mark is None else DECAY
            expected = adam_by_hand(before[path], gradients[path], b1=0.5, decay=decay)
            np.testing.assert_allclose(found[path], expected, rtol=2e-5, atol=2e-6, err_msg=path)
        else:
            outputs = int(np.prod(before[path].shape[1 : 1 + mark.outputs]))
            rows = [x[1].reshape(outputs, -1) for x in (before[path], *gradients[path])]
            expected = normuon_by_hand(rows[0], rows[1:], beta=0.6).reshape(before[path].shape[1:])
            np.testing.assert_allclose(found[path][1], expected, rtol=1e-4, atol=1e-5, err_msg=path)
        assert np.abs(found[path] - after["normuon"][0][path]).max() > 1e-4, path  # The control: other decays.


@pytest.mark.by_default("adamw")
@pytest.mark.parametrize("name", [*ALL, "soap"])
def test_groups_of_parameters_have_rates_of_their_own(trained, name):
    model, gradients, _ = trained
    steps = [
        jax.tree.unflatten(jax.tree.structure(training.trainable(model)), step) for step in zip(*gradients.values())
    ]
    rates = training.GroupRates(embedding=2.0, head=0.5, vectors=0.0)
    make = partial(training.optimizer, name, model, rate=RATE, weight_decay=0.0)
    before, plain = by_path(training.trainable(model)), run(make(), model, steps)[0]
    optimizer = make(group_rates=rates)
    found, state = run(optimizer, model, steps)
    factors = {".embedding.weight": 2.0, ".head.weight": 0.5}
    marks = marks_by_path(model)
    for path, value in before.items():
        factor = factors.get(path, 1.0 if marks[path] is not None else 0.0)
        expected = value + factor * (plain[path] - value)
        np.testing.assert_allclose(found[path], expected, rtol=1e-5, atol=1e-7, err_msg=path)
        assert np.any(plain[path] != value), path
    moments = jax.tree.leaves(optimizer.map_state(lambda x: 1, state, other=0))
    assert sum(moments) == sum(jax.tree.leaves(make().map_state(lambda x: 1, make().init(model), other=0)))


def test_polar_express_ends_nearer_to_an_orthogonal_matrix():
    values = np.geomspace(1e-3, 1, 1001)
    worst = {}
    for iteration, steps in {
        "polar-express": best_quintics(1e-3, 5),
        "quintic": [(3.4445, -4.7750, 2.0315)] * 5,
    }.items():
        x = values
        for a, b, c in steps:
            x = a * x + b * x**3 + c * x**5
        worst[iteration] = np.abs(x - 1).max()
    assert worst["polar-express"] < 0.16 and worst["quintic"] > 0.5, worst


@pytest.mark.by_default("adamw")
@pytest.mark.parametrize("name", [*ALL[:-1], "soap"])
def test_only_weights_that_move_towards_zero_decay_cautiously(name, make_model):
    model = make_model(layers=1)
    gradients = random_gradients(model, seed=1)[:1]
    before = by_path(training.trainable(model))
    make = partial(training.optimizer, name, model, rate=RATE)
    still, _ = run(make(weight_decay=0.0), model, gradients)
    decayed, _ = run(make(weight_decay=DECAY), model, gradients)
    cautious, _ = run(make(weight_decay=DECAY, cautious=True), model, gradients)
    shares = []
    for path in before:
        shrinks = (still[path] - before[path]) * before[path] < 0
        np.testing.assert_allclose(
            cautious[path], np.where(shrinks, decayed[path], still[path]), atol=1e-8, err_msg=path
        )
        shares.append(np.mean(cautious[path] != decayed[path]))
    assert max(shares) > 0.3  # The control: many weights moved away from 0.


def test_sgd_with_momentum(trained):
    model, gradients, after = trained
    for path, value in by_path(training.trainable(model)).items():
        expected, velocity = np.float64(value), 0.0
        for gradient in gradients[path]:
            velocity = 0.9 * velocity + gradient
            expected = expected - RATE * velocity
        np.testing.assert_allclose(after["sgd"][0][path], expected, rtol=1e-5, atol=1e-6, err_msg=path)


def test_an_update_of_muon_is_as_large_as_one_of_adamw(trained):
    model, _, after = trained
    before = by_path(training.trainable(model))
    path = ".stacks[0].blocks.sublayers[1].layer.up.weight"
    sizes = {name: np.sqrt(np.mean((after[name][0][path] - before[path]) ** 2)) for name in ("adamw", "muon")}
    assert 0.1 < sizes["muon"] / sizes["adamw"] < 1


def test_tables_decay_by_choice_and_a_given_mask_is_used(make_model):
    model = make_model(layers=1)
    zero = [jax.tree.map(lambda x: put(np.zeros(x.shape), x.dtype), training.trainable(model))]
    make = partial(training.sgd, model, rate=training.constant(RATE), weight_decay=DECAY)
    kept, _ = run(make(decay_tables=False), model, zero)
    moved, _ = run(make(), model, zero)
    before = by_path(training.trainable(model))
    np.testing.assert_array_equal(kept[".embedding.weight"], before[".embedding.weight"])
    np.testing.assert_allclose(moved[".embedding.weight"], before[".embedding.weight"] * (1 - RATE * DECAY), rtol=1e-6)
    nothing = jax.tree.map(lambda _: None, model)
    still, _ = run(make(matrices=nothing), model, zero)
    for path in before:
        np.testing.assert_array_equal(still[path], before[path])


@pytest.mark.parametrize("name", ALL)
def test_state_mirrors_the_parameters(name, make_model):
    model = make_model(layers=1)
    options: Any = dict(momentum=0.9) if name == "sgd" else {}
    optimizer = training.optimizer(name, model, rate=RATE, **options)
    state = jax.eval_shape(optimizer.init, training.trainable(model))
    parameters = training.trainable(model)
    specs = jax.tree.map(lambda x: PartitionSpec(*"abcd"[: x.ndim]), parameters)
    pairs = optimizer.map_state(lambda x, spec: (x.shape, spec), state, specs, other=None)
    pairs = jax.tree.leaves(
        pairs, is_leaf=lambda x: isinstance(x, tuple) and len(x) == 2 and isinstance(x[-1], PartitionSpec)
    )
    wanted = [x.shape for x in jax.tree.leaves(parameters)]
    # Adam holds two moments of each leaf, schedule-free AdamW one and the weights that move, Muon one of each hidden
    # matrix and two of the others, SGD one. NorMuon also has a number for each output of a hidden matrix.
    hidden = [m for m in jax.tree.leaves(nn.matrices(model), is_leaf=lambda x: isinstance(x, nn.Matrix)) if not m.table]
    counts = {
        "adamw": 2 * len(wanted),
        "schedule-free-adamw": 2 * len(wanted),
        "normuon": 2 * len(wanted),
        "sgd": len(wanted),
    }
    assert len(pairs) == (counts | {"muon": 2 * len(wanted) - len(hidden)})[name]
    shapes_of_rows = [shape for shape, _ in pairs if shape not in wanted]
    assert {shape for shape, _ in pairs} >= set(wanted)
    assert len(shapes_of_rows) == (len(hidden) if name == "normuon" else 0)
    assert all(shape[-1] == 1 for shape in shapes_of_rows)
    assert all(len(spec) == len(shape) for shape, spec in pairs)


def test_narrow_parameters_have_wide_moments_and_integers_stay(make_model):
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if eqx.is_inexact_array(x) else x, make_model(layers=1))
    optimizer = training.optimizer("adamw", model, rate=RATE)
    state, parameters = optimizer.init(model), training.trainable(model)
    gradient = jax.tree.map(jnp.ones_like, parameters)
    after, state = eqx.filter_jit(optimizer.update)(gradient, state, parameters, jnp.float32(RATE))
    assert {x.dtype for x in jax.tree.leaves(after)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("float32"), jnp.dtype("int32")}
    assert parameters.stacks[0].numbers is None and eqx.combine(after, model).stacks[0].numbers.dtype == jnp.int32


def test_an_optimizer_can_be_made_from_shapes(make_model):
    built = make_model(layers=1)
    shapes = eqx.filter_eval_shape(lambda model: model, built)
    optimizer = training.optimizer("muon", shapes, rate=RATE)
    state = optimizer.init(built)
    assert jax.tree.structure(state) == jax.tree.structure(training.optimizer("muon", built, rate=RATE).init(built))


@pytest.mark.quick
def test_norm_is_of_all_leaves_together():
    draw = np.random.default_rng(0)
    leaves = [draw.normal(size=shape) for shape in ((3, 4), (5,), ())]
    expected = np.linalg.norm(np.concatenate([leaf.reshape(-1) for leaf in leaves]))
    np.testing.assert_allclose(training.global_norm([jnp.float32(leaf) for leaf in leaves]), expected, rtol=1e-6)
    assert training.global_norm([jnp.full((4096,), 1.0, jnp.bfloat16)]) == 64  # bfloat16 sums would stop at 256
    assert training.global_norm({}) == 0


def test_an_unknown_name_is_refused(make_model):
    with pytest.raises(ValueError, match="'adam'.*adamw, schedule-free-adamw, muon, normuon, soap, sgd"):
        training.optimizer("adam", make_model(layers=1), rate=RATE)
    with pytest.raises(ValueError, match="iteration='cubic'.*quintic and polar-express"):
        training.optimizer("muon", make_model(layers=1), rate=RATE, iteration="cubic")
    with pytest.raises(ValueError, match="newton_schulz_steps=6.*has 5 steps"):
        training.optimizer("normuon", make_model(layers=1), rate=RATE, newton_schulz_steps=6)


@pytest.mark.by_default("adamw")
@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_moments_are_kept_in_bfloat16_and_used_in_float32(name, make_model):
    """Three steps beside the same rule whose float32 state is rounded by hand after each; the control is not."""
    model = make_model(layers=1)
    options: Any = dict(momentum=0.9) if name == "sgd" else {}
    wide, narrow = (training.optimizer(name, model, rate=RATE, moments=m, **options) for m in training.MOMENTS[:2])
    parameters = training.trainable(model)
    wave = lambda x: np.cos(np.arange(x.size)).reshape(x.shape) + np.asarray(x)
    gradients = jax.tree.map(lambda x: put(wave(x), x.dtype), parameters)
    round_one = lambda x: put(np.asarray(x).astype(ml_dtypes.bfloat16), np.float32)
    shapes = {x.shape for x in jax.tree.leaves(parameters)}  # and not those of Muon's coefficients
    rounded = lambda state: jax.tree.map(lambda x: round_one(x) if x.shape in shapes else x, state)
    step_wide, step_narrow = (eqx.filter_jit(rule.update) for rule in (wide, narrow))
    init_wide, init_narrow = (eqx.filter_jit(rule.init) for rule in (wide, narrow))
    state, by_hand, kept = init_narrow(model), init_wide(model), init_wide(model)
    ours = hands = floats = parameters
    for _ in range(3):
        ours, state = step_narrow(gradients, state, ours, jnp.float32(RATE))
        hands, by_hand = step_wide(gradients, by_hand, hands, jnp.float32(RATE))
        by_hand = rounded(by_hand)
        floats, kept = step_wide(gradients, kept, floats, jnp.float32(RATE))
    assert {*jax.tree.leaves(narrow.map_state(lambda x: x.dtype.name, state, other=None))} == {"bfloat16"}
    # On average: a number between two of bfloat16 may be rounded to either.
    pairs = lambda one, other: zip(*map(jax.tree.leaves, (one, other)), strict=True)
    off = lambda one, other: max(np.abs(np.subtract(a, b)).mean() for a, b in pairs(one, other))
    assert off(ours, hands) < 1e-7 and off(ours, floats) > 1e-6, (off(ours, hands), off(ours, floats))


def test_what_bfloat16_moments_cannot_hold_is_refused(make_model):
    with pytest.raises(ValueError, match=r"b2=0.999\): .* falls by 0.001 .* exactly; take moments='float32' or '8bit'"):
        training.optimizer("adamw", make_model(layers=1), rate=RATE, moments="bfloat16", b2=0.999)
    with pytest.raises(ValueError, match=r"row_decay=0.99\): .* falls by 0.01 .* or row_decay of at most 0.98"):
        training.optimizer("normuon", make_model(layers=1), rate=RATE, moments="bfloat16", row_decay=0.99)
    with pytest.raises(ValueError, match=r"moments='int4'\): .* float32 or bfloat16 or 8bit"):
        training.optimizer("adamw", make_model(layers=1), rate=RATE, moments="int4")


@pytest.mark.grid
def test_bfloat16_moments_are_counted_where_a_plan_keeps_them(make_model):
    model, plan = make_model(layers=2), Plan(abstract_mesh({"fsdp": 2}), zero=1, smallest=1)
    rules = [training.optimizer("adamw", model, rate=RATE, moments=moments) for moments in training.MOMENTS[:2]]
    wide, narrow = (state_bytes(training.PlannedState(lambda: model, rule, plan)) for rule in rules)
    assert wide["parameters"] == narrow["parameters"]
    halves = [large / small for large, small in zip(wide["optimizer state"], narrow["optimizer state"])]
    assert all(1.95 < half <= 2 for half in halves), halves  # but for the step's number
