"""`patch`: functions that edit or replace values of a pass, in one layer or in all, and gradients through them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inside_cases import IDS, LAYER, make_model, make_model_with_encoder, MLP

from eqformer import generation, nn
from eqformer.interpretability import capture, patch


STREAM, WEIGHTS = "stacks[0].blocks", f"{LAYER}.core.weights"
run = eqx.filter_jit(lambda model, *args: model(*args))


@pytest.fixture(scope="module")
def model():
    return make_model()


def without_mlp(model, layer):
    """The model with weights of zero where the MLP of a layer of the first stack returns to the stream."""
    where = lambda m: m.stacks[0].blocks.sublayers[1].layer.down.weight
    return eqx.tree_at(where, model, where(model).at[layer].set(0))


def test_an_output_replaced_by_zeros_is_a_layer_left_out(model):
    patched = patch(model, {"stacks[0][1].sublayers[1].layer": jnp.zeros_like})
    logits, expected = run(patched, IDS)[0], run(without_mlp(model, 1), IDS)[0]
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
    for other in (run(model, IDS)[0], run(without_mlp(model, 2), IDS)[0]):
        assert not np.allclose(logits, other, atol=1e-3)


def test_a_path_through_all_layers_gives_the_layers_number(model):
    mask_layer = lambda y, layer: jnp.where(layer == 1, jnp.zeros_like(y), y)
    expected = run(patch(model, {"stacks[0][1].sublayers[1].layer": jnp.zeros_like}), IDS)[0]
    captured = run(capture(patch(model, {MLP: mask_layer}), [MLP]), IDS)
    np.testing.assert_allclose(captured.output[0], expected, rtol=1e-5, atol=1e-6)
    assert [bool(np.any(values)) for values in np.asarray(captured[MLP])] == [True, False, True]


@pytest.mark.by_default("stacks[0].blocks.sublayers[0].layer.query")
@pytest.mark.parametrize(
    "path", [STREAM, f"{STREAM}.input", f"{LAYER}.core.weights", f"{LAYER}.core", f"{LAYER}.query"]
)
def test_a_function_that_changes_nothing_changes_nothing(model, path):
    logits, expected = run(patch(model, {path: lambda x, layer: x}), IDS)[0], run(model, IDS)[0]
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(run(patch(model, {path: lambda x, layer: x[::-1]}), IDS)[0], expected, atol=1e-4)


def test_weights_of_one_head_can_be_replaced(model):
    own_token = lambda weights: weights.at[:, 0].set(jnp.eye(5, dtype=weights.dtype))
    captured = run(capture(patch(model, {"stacks[0][0].sublayers[0].layer.core.weights": own_token}), [WEIGHTS]), IDS)
    np.testing.assert_array_equal(captured[WEIGHTS][0, :, 0], np.broadcast_to(np.eye(5), (2, 5, 5)))
    plain = run(capture(model, [WEIGHTS]), IDS)[WEIGHTS]
    np.testing.assert_allclose(captured[WEIGHTS][0, :, 1], plain[0, :, 1], rtol=1e-5)  # the other head
    assert not np.allclose(captured[WEIGHTS][1], plain[1], atol=1e-4)  # what the next layer reads is another stream


@pytest.mark.grid
def test_a_captured_stream_restores_another_prompts_output(model):
    other = (IDS + 3) % 7
    clean = run(capture(model, [STREAM]), IDS)
    replace = jax.tree_util.Partial(lambda stream, x, layer: stream[layer], clean[STREAM])
    np.testing.assert_allclose(run(patch(model, {STREAM: replace}), other)[0], clean.output[0], rtol=1e-5, atol=1e-6)
    assert not np.allclose(run(model, other)[0], clean.output[0], atol=1e-3)


@pytest.mark.grid
def test_gradients_flow_to_a_functions_arrays(model):
    def loss(change):
        add = jax.tree_util.Partial(lambda change, x, layer: x + change[layer], change)
        return jnp.sum(patch(model, {STREAM: add})(IDS)[0] ** 2)

    change, step = jnp.zeros((3, 4)), jnp.zeros((3, 4)).at[:, 1].set(1e-2)
    gradient, (above, below) = jax.jit(lambda: (jax.grad(loss)(change), (loss(step), loss(-step))))()
    np.testing.assert_allclose(jnp.sum(gradient[:, 1]), (above - below) / 2e-2, rtol=1e-2)
    assert np.all(np.abs(gradient) > 0)


@pytest.mark.grid
def test_the_gradient_of_other_layers_is_that_of_the_plain_model(model):
    """A function without a derivative in one layer leaves those of the others finite."""
    sqrt_of_zero = lambda y: jnp.sqrt(0 * y)
    loss = lambda model: jnp.sum(patch(model, {"stacks[0][0].sublayers[1].layer": sqrt_of_zero})(IDS)[0])
    gradient = eqx.filter_jit(eqx.filter_grad(loss))(model).stacks[0].blocks.sublayers[1].layer.down.weight
    assert np.all(np.isfinite(gradient[1:])) and not np.all(np.isfinite(gradient[0]))


def test_a_patched_model_decodes_with_a_cache(model):
    patched = patch(model, {"stacks[0][0].sublayers[1].layer": jnp.zeros_like})
    step = eqx.filter_jit(lambda model, tokens: model.decode(IDS, tokens, model.init_cache(2, 8))[0])
    tokens = nn.positions_like(IDS.shape)
    logits, expected, plain = (step(m, tokens) for m in (patched, without_mlp(model, 0), model))
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(logits, plain, atol=1e-3) and isinstance(patched, generation.Model)


def test_a_later_patch_follows_the_earlier_one(model):
    twice = patch(patch(model, {"norm": lambda x: 2 * x}), {"norm": lambda x: x + 1})
    at_once = patch(model, {"norm": lambda x: 2 * x + 1})
    np.testing.assert_array_equal(run(twice, IDS)[0], run(at_once, IDS)[0])


def test_a_function_must_return_a_value_of_the_same_kind(model):
    for function in (lambda x: x[:1], lambda x: x.astype(jnp.bfloat16), lambda x: (x, x)):
        with pytest.raises(ValueError, match=r"patch\('norm'\): the function returns .* the same structure"):
            eqx.filter_eval_shape(patch(model, {"norm": function}), IDS)
    with pytest.raises(ValueError, match=r"patch\(model, functions\): 'norms' is no module .* 'norm'"):
        patch(model, {"norms": jnp.zeros_like})


class WithIdle(nn.LinearWrapper):
    """A map that holds a module which it never calls."""

    idle: nn.RMSNorm

    def product(self, x, dtype=None):
        return self.inner.product(x, dtype)


@pytest.mark.grid
def test_a_patch_that_a_call_does_not_run_is_refused(model):
    linear, norm = nn.Linear("embed -> vocab", embed=4, vocab=7, key=jax.random.key(1)), nn.RMSNorm("embed", embed=4)
    with_head = eqx.tree_at(lambda m: m.head, model, WithIdle(linear, norm), is_leaf=lambda x: x is None)
    doubled = patch(with_head, {"head": lambda x: 2 * x})
    # `encode` does not run the head, and does not ask for it.
    hidden, logits, plain = jax.jit(lambda: (doubled.encode(IDS)[0], doubled(IDS)[0], with_head(IDS)[0]))()
    np.testing.assert_allclose(logits, 2 * plain, rtol=1e-6)
    idle = patch(with_head, {"head.idle": lambda x: 2 * x})
    with pytest.raises(ValueError, match=r"does not run 'head\.idle'.* unembed runs 'head'; name"):
        idle.unembed(hidden)
    with pytest.raises(ValueError, match=r"does not run 'head\.idle'.* the model runs 'embedding', 'stacks\[0\]'"):
        jax.eval_shape(lambda: capture(idle, ["norm"])(IDS).values)
    assert all(map(eqx.is_array, jax.tree.leaves(capture(doubled, ["norm"]).patches)))
    with_norm = eqx.tree_at(lambda m: m.norm, model, WithIdle(linear, norm))
    with pytest.raises(ValueError, match=r"does not run 'norm\.idle'.* encode runs .*'norm'; name modules"):
        jax.eval_shape(lambda: patch(with_norm, {"norm.idle": lambda x: 2 * x}).encode(IDS)[0])


def test_a_predictor_is_not_patched(model):
    norm, merge = model.norm, nn.Linear("sides embed -> merged", sides=2, embed=4, merged=4, key=jax.random.key(1))
    predictor = nn.Predictor(norm, norm, merge, model.stacks[1:], norm)
    predicting = eqx.tree_at(lambda m: m.predictor, model, predictor, is_leaf=lambda x: x is None)
    with pytest.raises(ValueError, match="'predictor.merge' belongs to the predictor"):
        patch(predicting, {"predictor.merge": lambda x: 2 * x})


@pytest.mark.grid
def test_a_patched_encoder_is_read_from_the_cache():
    model = make_model_with_encoder()
    double = lambda x, layer: 2 * x
    patched = patch(model, {"encoder.norm": lambda x: 2 * x, "stacks[0].blocks.sublayers[0].layer.key": double})
    tokens = nn.positions_like(IDS.shape)
    source = nn.Source(IDS, tokens)

    @jax.jit
    def logits_by_pass():
        at_once, plain = (m(IDS, nn.with_source(tokens, source))[0] for m in (patched, model))
        early, late = (jax.tree.map(lambda x: x[:, :3], tokens), jax.tree.map(lambda x: x[:, 3:], tokens))
        _, cache = patched(IDS[:, :3], nn.with_source(early, source), patched.init_cache(2, 8))
        return at_once[:, 3:], plain[:, 3:], patched(IDS[:, 3:], late, cache)[0]

    expected, plain, logits = logits_by_pass()
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(expected, plain, atol=1e-3)
