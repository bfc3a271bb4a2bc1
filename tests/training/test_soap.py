"""SOAP against its algorithm in float64 numpy, one matrix at a time, with numpy's QR decomposition."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from resumed_runs import run_and_restore
from same_bits import assert_same_bits

from eqformer import nn, training
from eqformer.parallel import Plan
from eqformer.planning import abstract_mesh
from eqformer.training.optimizer._moments import is_preconditioner


RATE, DECAY, B1, B2, EPS, STEPS = 1 / 128, 0.1, 0.9, 0.8, 1e-8, 8


def soap_by_hand(value, gradients, frequency, turned=(True, True)):
    """One `outputs inputs` matrix by algorithm 3 of the paper, with sorted bases as in its authors' code."""
    value, mean = np.float64(value), 0.0
    squares, sides, bases = (
        np.zeros(value.shape),
        [np.zeros((n, n)) for n in value.shape],
        list(map(np.eye, value.shape)),
    )
    for step, gradient in enumerate(gradients, 1):
        left, right = bases
        mean = B1 * mean + (1 - B1) * gradient
        squares = B2 * squares + (1 - B2) * (left.T @ gradient @ right) ** 2
        adam = (left.T @ mean @ right) / (1 - B1**step) / (np.sqrt(squares / (1 - B2**step)) + EPS)
        value = value - RATE * (left @ adam @ right.T + DECAY * value)
        sides = [
            B2 * s + (1 - B2) * g for s, g in zip(sides, (gradient @ gradient.T, gradient.T @ gradient), strict=True)
        ]
        if step == 1 or step % frequency == 0:
            for axis in (0, 1):
                if not turned[axis]:
                    continue
                order = np.argsort(-np.diag(bases[axis].T @ sides[axis] @ bases[axis]), kind="stable")
                squares = np.take(squares, order, axis)
                shifted = sides[axis] + 1e-6 * np.trace(sides[axis]) * np.eye(len(sides[axis]))
                bases[axis] = np.linalg.qr(shifted @ bases[axis][:, order])[0]
    return value


def trained(model, gradients, **options):
    """The leaves after some steps, by their paths, in the dtype of the model."""
    optimizer = training.optimizer("soap", model, rate=RATE, weight_decay=DECAY, b1=B1, b2=B2, eps=EPS, **options)
    init, update = eqx.filter_jit(optimizer.init), eqx.filter_jit(optimizer.update)
    state, parameters = init(model), training.trainable(model)
    for gradient in gradients:
        parameters, state = update(gradient, state, parameters, jnp.asarray(RATE))
    return by_path(parameters), state


def by_path(tree):
    return {nn.path_name(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


class Maps(eqx.Module):
    """Two layers of a map to several output dims, one from several input dims, and a table."""

    heads: nn.Linear
    output: nn.Linear
    table: nn.Embedding

    def __init__(self, key):
        make = lambda pattern: eqx.filter_vmap(
            lambda key: nn.Linear(pattern, embed=5, heads=2, head_dim=3, bias=True, key=key)
        )(jax.random.split(key, 2))
        self.heads, self.output = make("embed -> heads head_dim"), make("heads head_dim -> embed")
        self.table = nn.Embedding(vocab=7, embed=5, key=key)


@pytest.mark.parametrize(
    "options", [{"frequency": 3}, pytest.param({"frequency": 3, "max_size": 5}, marks=pytest.mark.grid)], ids=str
)
def test_each_matrix_is_updated_as_the_algorithm_says(options):
    with jax.enable_x64(True):
        draw = np.random.default_rng(0)
        widen = lambda tree: jax.tree.map(lambda x: jnp.asarray(draw.normal(size=x.shape)), tree)
        model = widen(eqx.filter_eval_shape(Maps, jax.random.key(0)))
        gradients = [widen(training.trainable(model)) for _ in range(STEPS)]
        after, _ = trained(model, gradients, **options)
        before, given = by_path(model), [by_path(gradient) for gradient in gradients]
        for path, shape in {"heads.weight": (6, 5), "output.weight": (5, 6)}.items():
            turned = tuple(size <= options.get("max_size", 6) for size in shape)
            for layer in range(2):
                rows = [x[path][layer].reshape(shape) for x in (before, *given)]
                expected = soap_by_hand(rows[0], rows[1:], 3, turned).reshape(before[path][layer].shape)
                np.testing.assert_allclose(after[path][layer], expected, rtol=1e-9, atol=1e-11, err_msg=path)
            # The controls: other refreshments, and Adam alone, give other weights.
            for other in (
                soap_by_hand(rows[0], rows[1:], 4, turned),
                soap_by_hand(rows[0], rows[1:], 3, (False, False)),
            ):
                assert np.abs(other.reshape(expected.shape) - expected).max() > 1e-4, path
        adam = training.optimizer("adamw", model, rate=RATE, weight_decay=DECAY, b1=B1, b2=B2, eps=EPS)
        rest, state, update = training.trainable(model), eqx.filter_jit(adam.init)(model), eqx.filter_jit(adam.update)
        for gradient in gradients:
            rest, state = update(gradient, state, rest, jnp.asarray(RATE))
        for path in ("table.weight", "heads.bias"):
            np.testing.assert_allclose(after[path], by_path(rest)[path], rtol=1e-12, err_msg=path)


def test_preconditioners_are_split_like_the_sides_of_their_matrices(make_model):
    """The flattened dim of a side takes the axes of the other side, where they divide it."""
    shapes = eqx.filter_eval_shape(lambda: make_model())
    optimizer = training.optimizer("soap", shapes, rate=RATE, trained=training.trainable)
    plan = Plan(abstract_mesh({"fsdp": 2, "tensor": 2}), zero=1, smallest=1)
    state = eqx.filter_eval_shape(training.init_state, shapes, optimizer)
    shardings = training.state_shardings(plan, optimizer, state).optimizer_state
    specs = {
        nn.path_name(path): (*x.spec, *(None for _ in range(4 - len(x.spec))))
        for path, x in jax.tree_util.tree_leaves_with_path(shardings)
        if "preconditioners" in nn.path_name(path)
    }
    pick = lambda end: next(spec for path, spec in specs.items() if path.endswith(end))
    up = next(
        x.spec
        for path, x in jax.tree_util.tree_leaves_with_path(shardings)
        if nn.path_name(path).endswith("mean.stacks[0].blocks.sublayers[1].layer.up.weight")
    )
    assert (up[1], up[2]) == ("tensor", "fsdp")
    assert pick("layer.up.weight.left")[:3] == (None, "tensor", "fsdp")
    assert pick("layer.up.weight.right_basis")[:3] == (None, "fsdp", "tensor")
    assert pick("layer.query.weight.left")[:4] == (None, "tensor", None, "fsdp")


@pytest.mark.grid
@pytest.mark.parametrize("moments", training.MOMENTS)
def test_a_run_resumes_bit_for_bit(moments, make_model, make_batch, tmp_path):
    """With its preconditioners in float32 in any case."""
    model, batch = make_model(layers=1), make_batch()
    optimizer = training.optimizer("soap", model, rate=1e-2, frequency=2, moments=moments)
    step, state, again = run_and_restore(optimizer, model, batch, tmp_path, steps=5, saved=3)
    nodes = [x for x in jax.tree.leaves(state.optimizer_state, is_leaf=is_preconditioner) if is_preconditioner(x)]
    assert len(nodes) == 7 and {x.dtype for x in jax.tree.leaves(nodes)} == {jnp.dtype("float32")}
    for _ in range(2):
        again, _ = step(again, batch, jax.random.key(0))
    assert_same_bits(again, state)


@pytest.mark.quick
def test_what_cannot_work_is_refused(make_model):
    with pytest.raises(ValueError, match=r"soap\(frequency=0\): the frequency is a number of steps"):
        training.optimizer("soap", make_model(layers=1), rate=RATE, frequency=0)
    with pytest.raises(ValueError, match="soap takes hidden matrices only, and embedding.weight is a table"):
        training.optimizer("adamw", make_model(layers=1), rate=RATE, paths=["embedding=soap"])
