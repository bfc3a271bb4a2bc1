"""Captured and edited values under a plan, and gradients through them, equal one device's."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inside_cases import KEY, LAYER, make_block, MLP

from eqformer import nn
from eqformer.interpretability import capture, patch
from eqformer.parallel import _global_values, AXES, make_mesh, Plan


IDS = jax.random.randint(jax.random.key(3), (8, 8), 0, 7)
STREAM, WEIGHTS = "stacks[0].blocks", f"{LAYER}.core.weights"
HEADS = [f"{LAYER}.{name}" for name in ("query", "key", "core.query", "core.value", "core", "output.input")]
PATHS = [STREAM, f"{STREAM}.input", f"{STREAM}.sublayers[0]", WEIGHTS, *HEADS, MLP, f"{MLP}.up", f"{MLP}.down.input"]
PATHS += ["embedding", "norm.input", "norm", "stacks[0][2].sublayers[1].layer"]
ROUTED = [STREAM, WEIGHTS, MLP, f"{MLP}.router"]

DENSE: dict[str, tuple[dict, dict]] = {
    "data": ({"replica": 2, "fsdp": 4}, {}),
    "zero 3": ({"fsdp": 4, "tensor": 2}, {"zero": 3, "smallest": 1}),
    "tensor": ({"fsdp": 4, "tensor": 2}, {}),
    "sequence, ring": ({"fsdp": 2, "context": 2, "tensor": 2}, {"residual": "sequence"}),
    "feature": ({"fsdp": 4, "tensor": 2}, {"residual": "feature"}),
    "shared key heads": ({"fsdp": 2, "tensor": 4}, {}),
    "ring": ({"fsdp": 2, "context": 4}, {}),
    "gather": ({"fsdp": 2, "context": 2, "tensor": 2}, {"context_method": "gather"}),
    "heads": ({"fsdp": 2, "context": 2, "tensor": 2}, {"context_method": "heads"}),
    "pipe": ({"fsdp": 2, "pipe": 2, "tensor": 2}, {"microbatches": 2}),
}
EXPERTS: dict[str, tuple[dict, dict]] = {
    "experts": ({"fsdp": 2, "expert": 2, "tensor": 2}, {}),
    "experts of a sequence": ({"expert": 2, "context": 2, "tensor": 2}, {"residual": "sequence"}),
    "experts in stages": ({"expert": 2, "pipe": 2}, {}),
}
run = eqx.filter_jit(lambda captured, ids: captured(ids))


def make_wide_block(key, feed_forward=None):
    block = make_block(key)
    attention = nn.Attention(embed=4, heads=4, kv_heads=2, head_dim=2, rotary=nn.Rotary(2, 100.0), key=key)
    mlp = nn.MLP(embed=4, mlp=8, key=key) if feed_forward is None else feed_forward(key)
    return eqx.tree_at(lambda b: [b.sublayers[0].layer, b.sublayers[1].layer], block, [attention, mlp])


def make_mixture(key):
    router = nn.TopKRouter(embed=4, experts=4, top_k=2, key=key)
    return nn.MoE(router, nn.Experts(lambda key: nn.MLP(embed=4, mlp=6, key=key), 4, key=key))


@functools.cache
def make_model(is_routed=False, layers=4):
    make = functools.partial(make_wide_block, feed_forward=make_mixture if is_routed else None)
    stacks = (nn.Stack(make, layers, key=KEY),)
    return nn.Transformer(nn.Embedding(vocab=7, embed=4, key=KEY), stacks, nn.RMSNorm("embed", embed=4))


def abstract_plan(sizes):
    return Plan(jax.sharding.AbstractMesh(sizes, AXES, (jax.sharding.AxisType.Auto,) * len(AXES)))


def make_plan(sizes, options):
    return Plan(make_mesh(**sizes, devices=jax.devices()[: int(np.prod([*sizes.values()]))]), **options)


@functools.cache
def expected_values(is_routed):
    return run(capture(make_model(is_routed), ROUTED if is_routed else PATHS), IDS)


def compare(values, expected, paths):
    """Return the paths whose values differ; "logits" stands for the model's output."""
    pairs = {path: (values[path], expected[path]) for path in paths} | {
        "logits": (values.output[0], expected.output[0])
    }
    bound = lambda y: 1e-5 * max(1.0, np.max(np.abs(y)))
    is_equal = lambda x, y: x.shape == y.shape and bool(np.max(np.abs(x - y)) <= bound(y))  # False for NaN
    return {path for path, trees in pairs.items() if not all(map(is_equal, *map(jax.tree.leaves, trees)))}


def check_plan(sizes, options, paths, is_routed=False):
    plan, model = make_plan(sizes, options), make_model(is_routed)
    values = run(capture(plan.shard(model), paths, plan=plan), IDS)
    assert compare(values, expected_values(is_routed), paths) == set()


@pytest.mark.grid
def test_values_under_a_plan_are_those_of_one_device():
    plan, model, paths = make_plan({"context": 2, "tensor": 2}, {}), make_model(layers=2), [STREAM, WEIGHTS]
    values, expected = (run(capture(m, paths, plan=p), IDS) for m, p in ((plan.shard(model), plan), (model, None)))
    assert compare(values, expected, paths) == set()


@pytest.mark.grid
@pytest.mark.parametrize("name", DENSE)
def test_all_values_under_each_plan_are_those_of_one_device(name):
    check_plan(*DENSE[name], PATHS)


@pytest.mark.grid
def test_values_of_uneven_stages_are_in_the_order_of_the_layers():
    plan, model = make_plan({"pipe": 2}, {}), make_model(layers=3)
    values, expected = (run(capture(m, [STREAM], plan=p), IDS) for m, p in ((plan.shard(model), plan), (model, None)))
    assert compare(values, expected, [STREAM]) == set()
    with pytest.raises(ValueError, match=r"pass plan\.shard\(model\)"):
        capture(model, [STREAM], plan=plan)(IDS)


@pytest.mark.grid
@pytest.mark.parametrize("name", EXPERTS)
def test_routed_values_are_those_of_one_device(name):
    check_plan(*EXPERTS[name], ROUTED, is_routed=True)


def wrong_order(monkeypatch):
    monkeypatch.setattr(_global_values, "context_order", lambda method, seq, pieces: np.arange(seq))


def wrong_axes(monkeypatch):
    wrong = {"batch": ("context",), "seq": ("fsdp", "tensor")}
    monkeypatch.setattr(_global_values, "_AXES_OF_DIM", _global_values._AXES_OF_DIM | wrong)


@pytest.mark.grid
@pytest.mark.parametrize("change,wrong", [(wrong_order, {STREAM, "logits"}), (wrong_axes, {STREAM, "logits"})])
def test_values_need_the_order_of_tokens_and_the_axes_of_dims(change, wrong, monkeypatch):
    plan = make_plan({"fsdp": 2, "context": 2}, {})
    change(monkeypatch)
    captured = capture(plan.shard(make_model()), [STREAM], plan=plan)
    values = eqx.filter_jit(lambda captured: captured(IDS))(captured)  # a program of its own, made after the change
    assert compare(values, expected_values(False), [STREAM]) == wrong


@pytest.mark.parametrize(
    "shape,dims,part,axes,split,copied",
    [
        ((8, 6, 4), "batch seq embed", (4, 6, 4), {"fsdp"}, [("fsdp",), (), ()], ()),
        ((8, 6, 4), "batch seq embed", (4, 3, 4), {"fsdp", "context"}, [("fsdp",), ("context",), ()], ()),
        ((8, 8, 4), "batch seq embed", (8, 2, 4), {"context", "tensor"}, [(), ("context", "tensor"), ()], ()),
        ((8, 6, 4), "batch seq embed", (8, 3, 4), {"context", "tensor"}, [(), ("context",), ()], ("tensor",)),
        ((8, 6, 4), "batch seq embed", (8, 6, 2), {"tensor"}, [(), (), ("tensor",)], ()),
        ((8, 4, 6, 6), "batch heads seq kv_seq", (8, 2, 3, 6), {"context", "tensor"},
         [(), ("tensor",), ("context",), ()], ()),
        ((8, 6, 2, 4), "batch seq kv_heads head_dim", (8, 6, 1, 4), {"tensor"}, [(), (), ("tensor",), ()], ()),
        ((8, 6, 7), "batch seq vocab", (8, 6, 4), {"tensor"}, [(), (), ("tensor",)], ()),
    ],
)  # fmt: skip
def test_names_and_sizes_tell_the_axes_of_each_dim(shape, dims, part, axes, split, copied):
    plan = abstract_plan((1, 2, 1, 1, 2, 2))
    expected = _global_values.Split(tuple(split), copied)
    assert _global_values.find_split_of_shapes(plan, part, frozenset(axes), shape, dims) == expected


def test_copies_that_differ_are_no_numbers():
    plan = abstract_plan((1, 2, 1, 1, 1, 2))
    split = _global_values.Split((("fsdp",), ()), ("tensor",))
    parts = jnp.broadcast_to(jnp.arange(3.0), (1, 2, 1, 1, 1, 2, 1, 3))
    value = _global_values.join_parts(plan, parts, split, (2, 3), "batch embed")
    np.testing.assert_array_equal(value, [[0, 1, 2], [0, 1, 2]])
    different = parts.at[0, 1, 0, 0, 0, 1, 0, 2].add(1)
    value = _global_values.join_parts(plan, different, split, (2, 3), "batch embed")
    np.testing.assert_array_equal(value, [[0, 1, 2], [0, 1, np.nan]])


def test_a_part_that_no_axis_explains_is_refused():
    plan = abstract_plan((1, 2, 1, 1, 2, 2))
    with pytest.raises(
        ValueError, match=r"\(8, 6, 4\) in the global value.*\(8, 2, 4\).*no split of 'seq' over no axis"
    ):
        _global_values.find_split_of_shapes(plan, (8, 2, 4), frozenset({"fsdp"}), (8, 6, 4), "batch seq embed")


def make_patches(change):
    """Functions that read other tokens, heads, features and layers than those that one device has."""
    add = jax.tree_util.Partial(lambda change, x, layer: x.at[:, 3].add(change[layer]), change)
    return {
        STREAM: add,
        "stacks[0][1].sublayers[0].layer.core.weights": lambda weights: weights.at[:, 0, :, 2].multiply(2.0),
        "stacks[0][2].sublayers[1].layer.down.input": lambda x: jnp.roll(x, 1, axis=-1) * change[0, 0],
        "stacks[0][3].sublayers[0].layer.core.key": lambda key: key * jnp.arange(1.0, 3.0)[:, None],
        "norm": lambda x: x[:, ::-1] / 2,
    }


def loss_and_values(change, model, plan):
    captured = capture(patch(model, make_patches(change)), [STREAM, WEIGHTS], plan=plan)(IDS)
    factors = jnp.arange(8.0)[:, None]
    loss = jnp.mean(captured.output[0][..., 3] ** 2 * factors[:, 0]) + jnp.mean(captured[STREAM][2] * factors)
    return loss + jnp.mean(captured[WEIGHTS][0, :, 1] ** 2), captured


def differentiate(change, model, plan):
    """Return the values, and the loss's gradients for an array that patches hold and for the model."""
    loss = lambda trees: loss_and_values(trees[0], trees[1], plan)
    return eqx.filter_jit(lambda trees: eqx.filter_grad(loss, has_aux=True)(trees))((change, model))


@pytest.mark.grid
@pytest.mark.parametrize("name", ["zero 3", "sequence, ring", "feature", "heads", "pipe", "shared key heads"])
def test_edits_under_a_plan_and_their_gradients_are_those_of_one_device(name):
    plan, model, change = make_plan(*DENSE[name]), make_model(), jax.random.normal(KEY, (4, 4))
    (change_gradient, gradients), values = differentiate(change, plan.shard(model), plan)
    expected, expected_of_one = differentiate(change, model, None)
    assert compare(values, expected_of_one, [STREAM, WEIGHTS]) == set()
    assert compare(expected_of_one, expected_values(False), [STREAM, WEIGHTS]) == {STREAM, WEIGHTS, "logits"}
    for actual, wanted in zip(jax.tree.leaves((change_gradient, plan.unshard(gradients))), jax.tree.leaves(expected)):
        assert np.max(np.abs(actual - wanted)) <= 1e-5 * max(1.0, np.max(np.abs(wanted)))


@pytest.mark.grid
def test_an_edit_needs_the_values_of_all_devices(monkeypatch):
    plan, change = make_plan({"tensor": 2}, {}), jnp.ones((4, 4))
    repeat = lambda name, x, axes, dim: jnp.concatenate([x, x], dim)
    monkeypatch.setattr(_global_values.send, "all_gather", repeat)
    _, values = differentiate(change, plan.shard(make_model()), plan)
    expected = loss_and_values(change, make_model(), None)[1]
    assert {STREAM, "logits"} <= compare(values, expected, [STREAM, WEIGHTS])


@pytest.mark.grid
def test_calls_that_a_plan_does_not_run_are_refused():
    plan, model = make_plan({"fsdp": 2, "context": 2}, {}), make_model()
    for ids, words in ((IDS[:3], "3 rows do not fall into"), (IDS[:, :6], "rows of 6 tokens are cut into 4")):
        with pytest.raises(ValueError, match=words):
            capture(plan.shard(model), [STREAM], plan=plan)(ids)
    with pytest.raises(ValueError, match="a plan runs a whole language model, and the model is a Block"):
        capture(model.stacks[0][0], ["sublayers[0]"], plan=plan)
