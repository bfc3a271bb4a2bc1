"""`capture`: values of a pass by their paths, through scans, `jit`, `vmap`, rematerialisation, gradients and caches."""

import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haste import put
from inside_cases import IDS, LAYER, make_block, make_model, MLP, streams_of

import eqformer
from eqformer import models, nn
from eqformer.interpretability import capture, patch, value_paths


STREAM, WEIGHTS = "stacks[0].blocks", f"{LAYER}.core.weights"
run = eqx.filter_jit(lambda captured, *args: captured(*args))


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def captured(model):
    paths = [STREAM, "stacks[0][1]", "stacks[0][-1].input", "stacks[1][0].sublayers[0]", "embedding", "norm.input"]
    return run(capture(model, [*paths, WEIGHTS, f"{LAYER}.core", f"{LAYER}.output.input", f"{MLP}.down.input"]), IDS)


def test_the_residual_stream_is_that_of_each_layer_alone(model, captured):
    streams = eqx.filter_jit(streams_of)(model)
    np.testing.assert_allclose(captured[STREAM], streams, rtol=1e-5, atol=1e-6)
    assert not np.allclose(captured[STREAM][0], streams[1], atol=1e-2)  # layers differ
    np.testing.assert_array_equal(captured["stacks[0][1]"], captured[STREAM][1])
    np.testing.assert_array_equal(captured["stacks[0][-1].input"], captured[STREAM][1])
    np.testing.assert_array_equal(captured["norm.input"].shape, (2, 5, 4))
    np.testing.assert_array_equal(captured["embedding"], model.embedding(IDS))


def test_the_output_is_that_of_the_model(model, captured):
    logits, cache = captured.output
    np.testing.assert_array_equal(logits, eqx.filter_jit(model)(IDS)[0])
    assert cache is None and captured["stacks[1][0].sublayers[0]"].shape == (2, 5, 4)


def test_weights_give_what_attention_returns(model, captured):
    weights, block = captured[WEIGHTS], model.stacks[0].blocks
    assert weights.shape == (3, 2, 2, 5, 5)  # layers batch heads seq kv_seq
    np.testing.assert_allclose(np.sum(weights, -1), 1, rtol=1e-5)
    assert np.all(np.asarray(weights)[..., *np.triu_indices(5, 1)] == 0)
    each_layer = eqx.filter_jit(jax.vmap(lambda norm, value, x: value(norm(x))))
    inputs = np.stack([captured["embedding"], *np.asarray(captured[STREAM])[:-1]])
    values = each_layer(block.sublayers[0].norm, block.sublayers[0].layer.value, inputs)
    attended = jnp.einsum("lbhqk,lbkgd->lbqhd", weights, values)  # one key head serves both query heads
    np.testing.assert_allclose(captured[f"{LAYER}.core"], attended, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(captured[f"{LAYER}.core"], captured[f"{LAYER}.output.input"])


@pytest.mark.parametrize("remat,unroll", [("full", 1), ("products", 2)])
def test_loops_and_rematerialisation_change_no_value(model, captured, remat, unroll):
    other = run(capture(nn.with_execution(model, remat=remat, unroll=unroll), [STREAM, WEIGHTS]), IDS)
    np.testing.assert_allclose(other[STREAM], captured[STREAM], rtol=1e-6)
    np.testing.assert_allclose(other[WEIGHTS], captured[WEIGHTS], rtol=1e-6)


def test_a_vmap_over_rows_gives_each_rows_values(model, captured):
    values = jax.jit(jax.vmap(lambda ids: capture(model, [STREAM])(ids)[STREAM], out_axes=1))(IDS)
    np.testing.assert_allclose(values, captured[STREAM], rtol=1e-5, atol=1e-6)


@pytest.mark.grid
def test_gradients_flow_through_values(model):
    def loss(table, use_capture):
        other = eqx.tree_at(lambda m: m.embedding.weight, model, table)
        return jnp.sum((capture(other, [STREAM])(IDS)[STREAM] if use_capture else streams_of(other)) ** 2)

    gradient, expected = (
        jax.jit(jax.grad(loss), static_argnums=1)(model.embedding.weight, use) for use in (True, False)
    )
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)
    assert np.max(np.abs(expected)) > 0.1


def test_a_cache_gives_each_tokens_values(model, captured):
    observed, cache = capture(model, [STREAM, WEIGHTS]), model.init_cache(2, 8)
    step = eqx.filter_jit(lambda ids, tokens, cache: observed(ids, tokens, cache))
    for number in range(IDS.shape[1]):
        values = step(IDS[:, number : number + 1], nn.Tokens(put(np.full((2, 1), number, np.int32))), cache)
        cache = values.output[1]
        np.testing.assert_allclose(values[STREAM][:, :, 0], captured[STREAM][:, :, number], rtol=1e-4, atol=1e-5)
        weights = values[WEIGHTS][..., 0, :]
        np.testing.assert_allclose(weights[..., :5], captured[WEIGHTS][..., number, :], rtol=1e-4, atol=1e-6)
        assert np.all(weights[..., 5:] == 0)


def lowered(model):
    leaves, structure = jax.tree.flatten(model)  # a list, so that arguments are not named by their paths
    return jax.jit(lambda leaves: jax.tree.unflatten(structure, leaves)(IDS)[0]).lower(leaves).compile().as_text()


@pytest.mark.grid
def test_a_model_that_nobody_looks_into_compiles_to_the_same_program(model):
    before = lowered(model)
    jax.eval_shape(lambda: capture(model, [STREAM])(IDS).values)
    assert lowered(model) == before
    assert lowered(patch(model, {})) == before
    assert lowered(patch(model, {STREAM: lambda x, layer: 2 * x})) != before


@pytest.mark.grid
def test_routers_of_a_model_a_stack_and_a_block_can_be_captured():
    def mixture(key):
        router = nn.TopKRouter(embed=4, experts=2, top_k=1, key=key)
        return nn.MoE(router, nn.Experts(lambda key: nn.MLP(embed=4, mlp=6, key=key), 2, key=key))

    model = make_model((1,), lambda key: make_block(key, mixture))
    routing = run(capture(model, [f"{MLP}.router"]), IDS)[f"{MLP}.router"]
    assert routing.experts.shape == (1, 2, 5, 1) and {*np.unique(routing.experts)} == {0, 1}
    block, x = model.stacks[0][0], model.embedding(IDS)
    alone = run(capture(block, ["sublayers[1].layer.router"]), x)
    np.testing.assert_array_equal(alone["sublayers[1].layer.router"].experts, routing.experts[0])
    np.testing.assert_allclose(alone.output[0], run(block, x)[0], rtol=1e-5, atol=1e-6)
    in_stack = run(capture(model.stacks[0], ["[0].sublayers[1].layer.router"]), x)
    np.testing.assert_array_equal(in_stack["[0].sublayers[1].layer.router"].experts, routing.experts[0])


def test_the_same_functions_are_at_the_top():
    assert eqformer.capture is capture and eqformer.patch is patch


@pytest.mark.parametrize(
    "path,words",
    [
        ("stacks[0].block", ["is no module", "'stacks[0].blocks'"]),
        ("stacks[0][1].sublayers[0].layers.core.weights", ["'stacks[0][1].sublayers[0].layer.core.weights'"]),
        ("stacks[0][3]", ["layer 3", "3 layers"]),
        (f"{LAYER}.query.weight", ["is a parameter", f"'{LAYER}.query'"]),
        (f"{MLP}.activation", ["is a FixedActivation", "nn.Module"]),
    ],
)
def test_a_wrong_path_lists_the_nearest(model, path, words):
    with pytest.raises(ValueError) as error:
        capture(model, [path])
    assert all(word in str(error.value) for word in ("capture(model, paths)", repr(path), *words)), error.value
    assert all(path in value_paths(model) for path in (STREAM, WEIGHTS, f"{MLP}.up.input"))


class Vmapped(nn.FeedForward):
    """A layer that calls one of its parts under `vmap`, and another one never."""

    up: nn.MLP
    idle: nn.MLP

    def __call__(self, x):
        return jax.vmap(lambda row: self.up(row))(x)


def test_each_path_of_the_page_is_one_of_a_model():
    page = (
        (Path(__file__).parents[2] / "docs" / "interpretability.md").read_text().split("## Names in TransformerLens")[1]
    )
    paths = re.findall(r"\| `((?:stacks|embedding|positions|norm)[^`]*)`", page)
    known = {path for name in ("llama-byte-1m", "gpt2") for path in value_paths(models.shapes(name))}
    assert len(paths) > 14 and {path.replace("stacks[0][3]", "stacks[0].blocks") for path in paths} <= known
    assert "stacks[0].blocks.sublayers[2]" not in known


def test_values_that_cannot_be_brought_out_are_refused(model):
    make_vmapped = lambda key: Vmapped(*[nn.MLP(embed=4, mlp=6, key=key)] * 2)
    vmapped = make_model((1,), lambda key: make_block(key, make_vmapped))
    with pytest.raises(ValueError, match="computed inside a vmap"):
        capture(vmapped, [f"{MLP}.up"])(IDS)
    with pytest.raises(ValueError, match="does not run 'stacks"):
        capture(vmapped, [f"{MLP}.idle"])(IDS)
    with pytest.raises(ValueError, match="patch: this call does not run 'stacks"):
        patch(vmapped, {f"{MLP}.idle": lambda x, layer: x})(IDS)
    with pytest.raises(ValueError, match=r"write \['norm'\]"):
        capture(model, "norm")
