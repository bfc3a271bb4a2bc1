"""Linear against einsum in float64."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, normal, random_module, wide

from eqformer import nn
from eqformer.kernels import _platform


KEY = jax.random.key(0)
SIZES = {"embed": 5, "heads": 2, "head_dim": 3, "mlp": 4, "latent": 6}
SPECS = {  # spec -> numpy's letters
    "embed -> mlp": "...e,me->...m",
    "embed -> heads head_dim": "...e,hde->...hd",
    "heads head_dim -> embed": "...hd,ehd->...e",
    "heads head_dim -> latent mlp": "...hd,lmhd->...lm",
    "embed -> latent heads head_dim": "...e,lhde->...lhd",
}


def make(spec, **options):
    sizes = {name: SIZES[name] for name in spec.replace("->", " ").split()}
    return random_module(nn.Linear, spec, **sizes, **options, key=KEY)


run = eqx.filter_jit(lambda module, x: module(x))


def test_few_vectors_do_not_make_xla_copy_the_weight():
    module = make("embed -> heads head_dim")
    few, many = (run.lower(module, normal(1, rows, 5)).compile().compiled.as_text() for rows in (7, 700))
    transposed = re.compile(r"f32\[5,2,3\]\S* transpose\(")
    assert not transposed.search(few)
    assert transposed.search(many)  # the control


def test_a_large_matrix_is_the_first_factor_of_few_vectors_on_cpus(monkeypatch):
    monkeypatch.setattr(_platform, "compilers", lambda: ("cuda",))
    weight = normal(0, 256, 300)
    trace = lambda rows, weight=weight: jax.jit(nn.ComputeDtypeMatmul().forward, static_argnums=2).trace(
        normal(1, rows, weight.shape[1]), weight, "float32"
    )

    def is_first_factor(rows, platform, weight=weight):
        text = trace(rows, weight).lower(lowering_platforms=(platform,)).as_text()
        (factors,) = re.findall(r"dot_general .* : \(tensor<(\S+)xf32>, tensor<(\S+)xf32>\)", text)
        sizes = "x".join(map(str, weight.shape))
        assert set(factors) == {sizes, f"{rows}x{weight.shape[1]}"}
        return factors[0] == sizes

    assert [is_first_factor(rows, "cpu") for rows in (1, 2, 64, 65)] == [False, True, True, False]
    assert [is_first_factor(rows, "cuda") for rows in (1, 2, 64, 65)] == [False] * 4
    assert not is_first_factor(2, "cpu", weight[:, :200])  # a small one, which is not worth it
    # XLA keeps the order of the factors: the product has a column for each vector.
    compiled = trace(7).lower().compile().as_text() or ""
    assert re.search(r"f32\[256,7\]\S* dot\(", compiled) and not re.search(r"f32\[7,256\]\S* dot\(", compiled)
    assert re.search(r"f32\[65,256\]\S* dot\(", trace(65).lower().compile().as_text() or "")  # the control
    expected = np.asarray(normal(1, 7, 300)) @ np.asarray(weight).T
    got = jax.jit(nn.ComputeDtypeMatmul().forward, static_argnums=2)(normal(1, 7, 300), weight, "float32")
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-3)
    nothing = nn.ComputeDtypeMatmul().forward(jnp.zeros((2, 0)), jnp.zeros((4, 0)), jnp.float32)
    assert nothing.shape == (2, 4) and not np.any(nothing)  # a map of no inputs, which odd sizes leave


@pytest.mark.by_default(
    "embed -> mlp-True",
    "embed -> heads head_dim-False",
    "heads head_dim -> embed-True",
    "heads head_dim -> latent mlp-False",
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_each_form_of_spec(spec, bias):
    module = make(spec, bias=bias)
    inputs = [SIZES[name] for name in spec.split("->")[0].split()]
    for lead in ((), (7,), (2, 1), (3,), (2, 3), (2, 300)):
        x = normal(1, *lead, *inputs)
        expected = np.einsum(SPECS[spec], wide(x), wide(module.weight))
        expected = expected if module.bias is None else expected + wide(module.bias)
        found = run(module, x)
        assert close(found, expected)
    assert not close(found, 1.01 * expected)


def test_dims_are_outputs_first_and_sizes_are_read_off_the_weight():
    module = make("embed -> heads head_dim", bias=True)
    assert module.bias is not None
    assert module.weight.shape == (2, 3, 5) and module.weight_dims == ("heads", "head_dim", "embed")
    shard = eqx.tree_at(lambda m: (m.weight, m.bias), module, (module.weight[1:], module.bias[1:]))
    x = normal(1, 4, 5)
    assert np.array_equal(shard(x), module(x)[:, 1:])


def test_initial_deviation():
    big: dict[str, Any] = dict(embed=64, heads=8, head_dim=16)
    default = nn.Linear("embed -> heads head_dim", **big, key=KEY).weight
    assert abs(float(jnp.std(default)) * 64**0.5 - 1) < 0.02
    joined = nn.Linear("heads head_dim -> embed", **big, bias=True, key=KEY)
    assert abs(float(jnp.std(joined.weight)) * 128**0.5 - 1) < 0.02
    given = nn.Linear("embed -> heads head_dim", **big, std=0.3, key=KEY).weight
    assert abs(float(jnp.std(given)) / 0.3 - 1) < 0.02
    assert abs(float(jnp.mean(given))) < 0.01 and joined.bias is not None and not jnp.any(joined.bias)


def test_the_output_has_the_inputs_dtype_and_parameters_keep_theirs():
    module = make("embed -> mlp", bias=True)
    x = normal(1, 3, 5)
    y = module(x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and module.weight.dtype == jnp.float32
    assert close(y, module(x), 2e-2) and not close(y, module(x), 1e-4)


def test_gradients_are_those_of_the_einsum():
    module, x = make("embed -> heads head_dim", bias=True), normal(1, 4, 5)
    gradient = eqx.filter_jit(eqx.filter_grad(lambda m: jnp.sum(jnp.sin(m(x)))))(module)
    slope = np.cos(np.einsum("ne,hde->nhd", wide(x), wide(module.weight)) + wide(module.bias))
    assert close(gradient.weight, np.einsum("nhd,ne->hde", slope, wide(x)))
    assert close(gradient.bias, slope.sum(0))


@pytest.mark.parametrize(
    "spec, sizes, message",
    [
        ("embed mlp", dict(embed=2, mlp=3), r'must read "inputs -> outputs"'),
        ("-> mlp", dict(mlp=3), r'must read "inputs -> outputs"'),
        ("embed ->", dict(embed=3), r'must read "inputs -> outputs"'),
        ("embed -> embed", dict(embed=3), "a name of its own"),
        ("embed -> mlp", dict(embed=3), r"sizes given are \['embed'\]; the spec names \['embed', 'mlp'\]"),
        ("embed -> mlp", dict(embed=3, mlp=2, heads=1), r"given are \['embed', 'heads', 'mlp'\]"),
        ("embed -> mlp -> heads", dict(embed=3, mlp=2, heads=1), "the spec names"),
    ],
)
def test_specs_and_sizes_that_do_not_fit(spec, sizes, message):
    with pytest.raises(ValueError, match=message) as caught:
        nn.Linear(spec, **sizes, key=KEY)
    assert repr(spec) in str(caught.value)


def test_an_input_of_the_wrong_size_names_the_call_and_both_sizes():
    module = make("heads head_dim -> embed")
    message = r"Linear\('heads head_dim -> embed'\)\(x\): .* \{'heads': 2, 'head_dim': 3\}; x has shape \(4, 3, 2\)"
    with pytest.raises(ValueError, match=message):
        module(normal(1, 4, 3, 2))
    with pytest.raises(ValueError, match=r"x has shape \(3,\)"):
        module(normal(1, 3))


def test_a_wrong_dtype_is_refused_by_the_annotation():
    with pytest.raises(ValueError, match=r"Linear\(x of int32 .* must hold floats"):
        make("embed -> mlp")(jnp.ones((2, 5), jnp.int32))
