"""FP8 products against their formula in float64: values, gradients, slices, and the maps that use them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fp8_reference import reference
from haste import put
from nn_reference import close, normal, random_module as of_shapes, wide

from eqformer import models, nn, training


KEY = jax.random.key(0)
SMALL = models.LlamaConfig(vocab=48, embed=16, layers=2, heads=4, kv_heads=2, mlp=24)


def by_map(linear: nn.LinearMap, x: jax.Array, gradient: jax.Array, dtype: Any = None) -> tuple[Any, Any, Any]:
    """The same as the map gives them."""
    y, back = jax.vjp(lambda linear, x: linear.product(x, dtype), linear, x)
    of_linear, to_x = back(gradient.astype(y.dtype))
    return y, to_x, of_linear.weight


of_map = eqx.filter_jit(by_map)


def random_linear(spread: float, dtype: str = "float32") -> tuple[nn.Linear, jax.Array, jax.Array]:
    """A map of 12 to 6, 20 vectors and the gradients of what it gives; vectors are as large as up to `exp(spread)`."""
    linear = of_shapes(nn.Linear, "embed -> heads head_dim", embed=12, heads=3, head_dim=2, key=KEY)
    sizes = np.exp(spread * wide(normal(3, 20, 1)))
    x, gradient = wide(normal(1, 20, 12)) * sizes, wide(normal(2, 20, 3, 2)) / sizes[..., None]
    given = linear, x, gradient * np.exp(wide(normal(4, 20, 1, 1)))
    return jax.tree.map(lambda leaf: put(leaf, jnp.dtype(dtype)), given)


@pytest.mark.parametrize("spread", [0.0, 3.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_outputs_and_gradients_are_the_formulas(dtype, spread):
    with jax.enable_x64(dtype == "float64"):
        linear, x, gradient = random_linear(spread if dtype != "float16" else 0.5, dtype)
        want = reference(wide(x), wide(linear.weight).reshape(6, 12), wide(gradient).reshape(20, 6))
        tolerance = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11, "float64": 1e-14}[dtype]
        found = of_map(nn.with_fp8(linear, [nn.Linear]), x, gradient)
        assert all(one.dtype == dtype for one in found)
        for one, other in zip(found, want):
            np.testing.assert_allclose(
                wide(one).reshape(other.shape), other, tolerance, tolerance * np.abs(other).max()
            )
        plain = of_map(linear, x, gradient)
        assert not any(close(one, two, 3e-3) for one, two in zip(plain, found))


def test_sums_in_float32_of_narrow_inputs():
    linear, x, gradient = random_linear(1.0, "bfloat16")
    y, *_ = of_map(nn.with_fp8(linear, [nn.Linear]), x, gradient, jnp.float32)
    want = reference(wide(x), wide(linear.weight).reshape(6, 12), wide(gradient).reshape(20, 6))[0]
    assert y.dtype == jnp.float32 and close(y.reshape(want.shape), want, 1e-6)


@pytest.mark.parametrize("wrong", ["form of gradients", "scale", "scale of vectors"])
def test_another_rounding_is_seen(wrong, monkeypatch):
    """Gradients in E4M3, a scale that is no power of two, and one scale for all vectors give other numbers."""
    linear, x, gradient = random_linear(3.0)
    round_exactly = nn._precision.round_to_fp8  # type: ignore[attr-defined]

    def other(x: Any, form: Any, dim: int | None) -> Any:
        if wrong == "scale":
            codes, scale = round_exactly(x / 3, form, dim)
            return codes, 3 * scale
        if wrong == "scale of vectors":
            codes, scale = round_exactly(x, form, None)
            return codes, jnp.broadcast_to(scale, (*x.shape[:-1], 1)) if dim is not None else scale
        return round_exactly(x, nn.Fp8Matmul.E4M3, dim)

    monkeypatch.setattr(nn._precision, "round_to_fp8", other)  # type: ignore[attr-defined]
    want = reference(wide(x), wide(linear.weight).reshape(6, 12), wide(gradient).reshape(20, 6))
    run = eqx.filter_jit(lambda linear, x, gradient: by_map(linear, x, gradient))  # traced anew
    found = run(nn.with_fp8(linear, [nn.Linear]), x, gradient)
    assert not all(close(wide(one).reshape(two.shape), two, 1e-5) for one, two in zip(found, want))


def test_slices_give_what_the_whole_gives():
    """Of rows to the last digit, of inputs up to the smallest numbers; scales that are no powers of two would not."""
    products, thirds = nn.Fp8Matmul(), jax.jit(lambda x, weight: products.forward(x / 3, weight, "float32") * 3)
    forward = jax.jit(lambda x, weight: products.forward(x, weight, "float32"))
    to_weight = jax.jit(lambda gradient, x: products.weight_grad(gradient, x, "float32"))
    x, weight, gradient = (np.array(normal(*given)) for given in ((1, 64, 32), (2, 48, 32), (3, 64, 48)))
    whole = forward(x, weight)
    assert np.array_equal(np.concatenate([forward(half, weight) for half in (x[:32], x[32:])]), whole)
    x[:, :16] *= 0.01  # slices of unlike size
    weight[:, 16:] *= 7.0
    whole = forward(x, weight)
    total = sum(np.asarray(forward(x[:, part], weight[:, part])) for part in (slice(16), slice(16, 32)))
    assert close(total, whole, 2**-17) and not np.array_equal(total, whole)
    parts = [np.asarray(to_weight(gradient[part], x[part])) for part in (slice(16), slice(16, 64))]
    assert close(sum(parts), to_weight(gradient, x), 1e-6)
    assert not close(thirds(x, weight), whole, 1e-2)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", ["input", "weight", "gradient"])
def test_what_is_not_finite_is_not_hidden(number, place):
    linear, x, gradient = random_linear(0.0)
    if place == "weight":
        linear = eqx.tree_at(lambda m: m.weight, linear, linear.weight.at[0, 0, 0].set(number))
    x = x.at[0, 0].set(number) if place == "input" else x
    gradient = gradient.at[0, 0, 0].set(number) if place == "gradient" else gradient
    y, to_x, to_weight = of_map(nn.with_fp8(linear, [nn.Linear]), x, gradient)
    finite = [bool(np.isfinite(one).all()) for one in (y, to_x, to_weight)]
    assert (
        finite
        == {"input": [False, True, False], "weight": [False, False, True], "gradient": [True, False, False]}[place]
    )


def test_zeros_and_the_smallest_numbers():
    linear = nn.with_fp8(of_shapes(nn.Linear, "embed -> mlp", embed=4, mlp=3, key=KEY), [nn.Linear])
    call = lambda *rows: of_map(
        linear, put(np.broadcast_to(rows, (2, 4)), np.float32), put(np.ones((2, 3)), np.float32)
    )
    y, _, to_weight = call([0.0], [0.0])
    assert not np.any(y) and not np.any(to_weight)
    small, one = np.asarray(call([2.0**-100], [1.0])[0])
    np.testing.assert_allclose(small * 2.0**100, one, rtol=1e-6)


def test_all_linears_are_taken_but_routers_and_those_of_the_vocabulary():
    build = lambda: models.build("mixtral-byte-500k", key=KEY)
    model = eqx.filter_eval_shape(build)
    taken = {name for name, node in nn.named_modules(eqx.filter_eval_shape(lambda: nn.with_fp8(build())), nn.Fp8Linear)}
    assert {name.rpartition(".")[2] for name in taken} == {"query", "key", "value", "output", "gate", "up", "down"}
    back = eqx.filter_eval_shape(lambda: nn.without_fp8(nn.with_fp8(build())))
    assert jax.tree.structure(back) == jax.tree.structure(model)
    paths = lambda tree: [nn.path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert paths(eqx.filter_eval_shape(lambda: nn.with_fp8(build()))) == paths(model)  # of checkpoints, too


def test_what_cannot_multiply_in_8_bits():
    mixture = eqx.filter_eval_shape(lambda: models.build("mixtral-byte-500k", key=KEY))
    with pytest.raises(ValueError, match=r"with_fp8\(.*\): stacks.* cannot multiply in 8 bits: a map must be a Linear"):
        nn.with_fp8(mixture, [nn.Router])
    linear = nn.Linear("embed -> mlp", embed=4, mlp=3, key=KEY)
    with pytest.raises(ValueError, match=r"cannot multiply in 8 bits: a map must be a Linear"):
        nn.with_fp8(nn.quantize(linear, "int8"), [nn.QuantizedLinear])
    with pytest.raises(ValueError, match=r"with_fp8\(model\): no linear map is chosen"):
        nn.with_fp8(nn.quantize(linear, "int8"))
    with pytest.raises(ValueError, match=r"Precision\(products='int8'\): products are in 'compute' .* or 'fp8'"):
        nn.Precision(products="int8")


def test_a_policy_chooses_the_products():
    model = eqx.filter_eval_shape(lambda: models.build(SMALL, key=KEY))
    fp8 = eqx.filter_eval_shape(lambda: nn.Precision("float32", "bfloat16", "fp8").apply(models.build(SMALL, key=KEY)))
    maps = nn.named_modules(fp8.stacks[0], nn.LinearMap)
    assert all(isinstance(one, nn.Fp8Linear) for _, one in maps) and fp8.compute_dtype == "bfloat16"
    assert jax.tree.structure(eqx.filter_eval_shape(nn.Precision().apply, fp8)) == jax.tree.structure(model)
    marks = nn.matrices(fp8), nn.matrices(model)
    assert jax.tree.leaves(marks[0]) == jax.tree.leaves(marks[1])  # Muon sees the same matrices


@pytest.mark.grid
@pytest.mark.parametrize("remat", ["products", "full"])
def test_what_is_recomputed_changes_nothing(remat):
    """And a LoRA beside a map of 8 bits, whose factors stay in the compute dtype, has gradients."""
    model = nn.with_fp8(models.build(SMALL, key=KEY))
    ids = jnp.arange(32, dtype=jnp.int32).reshape(2, 16)
    run = lambda model: jnp.sum(model.encode(ids, nn.positions_like((2, 16)))[0] ** 2)
    want = eqx.filter_jit(eqx.filter_grad(run))(model)
    found = eqx.filter_jit(eqx.filter_grad(run))(nn.with_execution(model, remat=remat))
    assert all(close(one, two, 1e-5) for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(want)))
    adapted = nn.with_lora(model, ["query"], rank=2, key=KEY)
    assert jax.tree.structure(nn.with_fp8(nn.without_fp8(adapted))) == jax.tree.structure(adapted)
    assert jnp.any(training.trainable(eqx.filter_grad(run)(adapted)).stacks[0].blocks.mixer.layer.query.up.weight)
