"""Feed-forward layers against their formulas in float64."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, linear, normal, random_module, wide

from eqformer import nn


KEY = jax.random.key(0)
erf = np.vectorize(math.erf)
sigmoid = lambda x: 1 / (1 + np.exp(-x))
FORMULAS = {
    "gelu": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "silu": lambda x: x * sigmoid(x),
    "relu": lambda x: np.maximum(x, 0),
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
    "clipped_gelu": lambda x: np.clip(FORMULAS["gelu"](x), -10, 10),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "relu6": lambda x: np.clip(x, 0, 6),
    "hard_swish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "mish": lambda x: x * np.tanh(np.log1p(np.exp(x))),
    "laplace": lambda x: (1 + erf((x - 0.707107) / (0.282095 * math.sqrt(2)))) / 2,
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "sqrt_softplus": lambda x: np.sqrt(np.log1p(np.exp(x))),
    "identity": lambda x: x,
}


def test_every_activation_is_its_formula_and_has_its_slope():
    assert set(FORMULAS) == set(nn.ACTIVATIONS)
    x = np.linspace(-12, 12, 81) + 0.01
    with_slopes = lambda x: {
        name: jax.vmap(jax.value_and_grad(activation))(x) for name, activation in nn.ACTIVATIONS.items()
    }
    found = jax.jit(with_slopes)(np.float32(x))
    for name, formula in FORMULAS.items():
        y, slope = found[name]
        assert close(y, formula(x), 1e-6), name
        assert close(slope, (formula(x + 1e-6) - formula(x - 1e-6)) / 2e-6, 1e-5), name
        narrow = jax.ShapeDtypeStruct((2,), jnp.bfloat16)
        assert jax.eval_shape(nn.ACTIVATIONS[name], narrow).dtype == jnp.bfloat16
    values = [formula(x) for formula in FORMULAS.values()]
    assert all(np.abs(a - b).max() > 1e-4 for i, a in enumerate(values) for b in values[:i])


def test_gelu_tanh_has_its_digits_where_one_plus_a_tanh_has_none():
    x = np.linspace(-5.2, -3, 41)
    off = lambda y: np.abs(np.asarray(y) / FORMULAS["gelu_tanh"](x) - 1).max()
    assert off(nn.gelu_tanh(jnp.float32(x))) < 1e-5 < 0.01 < off(jax.nn.gelu(jnp.float32(x), approximate=True))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["gelu_tanh", "relu_squared"])
def test_mlp(name, bias):
    module = random_module(nn.MLP, embed=3, mlp=5, bias=bias, activation=nn.ACTIVATIONS[name], key=KEY)
    x = normal(1, 2, 4, 3)
    expected = linear(FORMULAS[name](linear(wide(x), module.up)), module.down)
    assert close(module(x), expected)
    assert not close(module(x), linear(FORMULAS["relu"](linear(wide(x), module.up)), module.down), 1e-3)
    assert (module.up.bias is not None) == bias


def test_an_offset_is_added_to_the_factor_that_the_gate_meets():
    module = random_module(
        nn.GatedMLP, embed=3, mlp=5, limit=0.4, offset=1.0, activation=nn.quick_gelu, bias=True, key=KEY
    )
    x = 2 * normal(1, 2, 4, 3)
    gate, up = np.minimum(linear(wide(x), module.gate), 0.4), np.clip(linear(wide(x), module.up), -0.4, 0.4)
    assert close(module(x), linear(FORMULAS["quick_gelu"](gate) * (up + 1), module.down))
    assert not close(module(x), linear(FORMULAS["quick_gelu"](gate) * up, module.down), 1e-3)


@pytest.mark.parametrize("limit", [None, 0.4])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp(bias, limit):
    module = random_module(nn.GatedMLP, embed=3, mlp=5, bias=bias, limit=limit, key=KEY)
    x = 2 * normal(1, 2, 4, 3)
    gate, up = linear(wide(x), module.gate), linear(wide(x), module.up)
    assert gate.min() < -0.4 and gate.max() > 0.4 and up.min() < -0.4 and up.max() > 0.4
    free = linear(FORMULAS["silu"](gate) * up, module.down)
    if limit is not None:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)  # the gate from above only
    expected = linear(FORMULAS["silu"](gate) * up, module.down)
    assert close(module(x), expected)
    assert close(module(x), free) == (limit is None)
    swapped = linear(FORMULAS["silu"](up) * gate, module.down)
    assert not close(module(x), swapped, 1e-3)


def test_a_gate_and_its_factor_have_smooth_bounds():
    module = random_module(nn.GatedMLP, embed=3, mlp=5, up_softcap=0.3, activation=nn.SiTU(0.4), key=KEY)
    x = normal(1, 2, 4, 3)
    gate, up = linear(wide(x), module.gate), linear(wide(x), module.up)
    bounded = 0.4 * np.tanh(gate / 0.4) * sigmoid(gate) * 0.3 * np.tanh(up / 0.3)
    assert close(module(x), linear(bounded, module.down), 1e-5)
    assert not close(module(x), linear(gate * sigmoid(gate) * up, module.down), 1e-2)
    # In 16 bits, a bounded factor is rounded once.
    narrow = jnp.linspace(-4, 4, 64, dtype=jnp.bfloat16)
    wanted = jnp.asarray(0.4 * np.tanh(wide(narrow) / 0.4) * sigmoid(wide(narrow)), jnp.bfloat16)
    assert np.mean(np.asarray(nn.SiTU(0.4)(narrow) == wanted)) > 0.95


def test_a_gate_is_bounded_after_its_activation():
    activation = nn.BoundedActivation(nn.silu, 0.4)
    module = random_module(nn.GatedMLP, embed=3, mlp=5, up_limit=0.3, activation=activation, key=KEY)
    x = 4 * normal(1, 2, 4, 3)
    gate, up = linear(wide(x), module.gate), np.clip(linear(wide(x), module.up), -0.3, 0.3)
    assert close(module(x), linear(np.minimum(FORMULAS["silu"](gate), 0.4) * up, module.down))
    assert not close(module(x), linear(FORMULAS["silu"](np.minimum(gate, 0.4)) * up, module.down), 1e-3)


@pytest.mark.quick
def test_any_function_may_be_the_activation():
    module = random_module(nn.MLP, embed=3, mlp=5, activation=jnp.sin, key=KEY)
    x = normal(1, 2, 3)
    assert close(module(x), linear(np.sin(linear(wide(x), module.up)), module.down))


def xielu(x, alpha_p, alpha_n, beta, eps):
    softplus = lambda y: np.log1p(np.exp(y))
    below = (beta + softplus(alpha_n)) * (np.expm1(np.minimum(x, eps)) - x)
    return np.where(x > 0, softplus(alpha_p) * x * x, below) + beta * x


def test_xielu_is_its_formula_with_gradients_of_both_learned_numbers():
    assert close(nn.XIELU()(jnp.float32(2.0)), 0.8 * 4 + 0.5 * 2) and close(nn.XIELU()(jnp.float32(0.0)), 0.0)
    assert close(nn.XIELU()(jnp.float32(-2.0)), 0.8 * (math.expm1(-2.0) + 2) - 0.5 * 2)
    activation, x = random_module(nn.XIELU), np.linspace(-4, 4, 81) + 0.01
    numbers = [wide(number) for number in jax.tree.leaves(activation)]
    loss = lambda activation, x: (jnp.sum((y := activation(x)) ** 2), y)
    grads, y = jax.jit(jax.grad(loss, has_aux=True))(activation, np.float32(x))
    assert close(y, xielu(x, *numbers), 1e-6)
    slopes = [
        sum(
            (xielu(x, *(n + step * (i == j) for j, n in enumerate(numbers))) ** 2).sum() * step
            for step in (1e-6, -1e-6)
        )
        / 2e-12
        for i in range(2)
    ]
    assert close(jnp.stack([grads.alpha_p, grads.alpha_n]), np.array(slopes), 1e-4)
    assert grads.beta == grads.eps == 0
    narrow = jax.ShapeDtypeStruct((2,), jnp.bfloat16)
    assert jax.eval_shape(activation, narrow).dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", [nn.MLP, nn.GatedMLP])
def test_an_activation_may_have_parameters(kind):
    module, x = random_module(kind, embed=3, mlp=5, activation=nn.XIELU(), key=KEY), normal(1, 2, 3)
    numbers = [wide(number) for number in jax.tree.leaves(module.activation)]
    hidden = [linear(wide(x), part) for part in ((module.gate, module.up) if kind is nn.GatedMLP else (module.up,))]
    formula = lambda *numbers: linear(np.prod([xielu(hidden[0], *numbers), *hidden[1:]], axis=0), module.down)

    def squares(module):
        y = module(x)
        return jnp.sum(y**2), y

    (_, y), grads = jax.jit(jax.value_and_grad(squares, has_aux=True))(module)
    assert close(y, formula(*numbers)) and not close(y, formula(0.0, *numbers[1:]), 1e-3)
    assert grads.activation.alpha_p != 0 and grads.activation.alpha_n != 0


@pytest.mark.parametrize("kind", [nn.MLP, nn.GatedMLP])
def test_slices_of_the_hidden_features_give_partial_sums(kind):
    module, x = random_module(kind, embed=3, mlp=6, key=KEY), normal(1, 2, 4, 3)

    def part(rows):
        names = ("up", "gate") if kind is nn.GatedMLP else ("up",)
        where = lambda m: (*(getattr(m, name).weight for name in names), m.down.weight)
        return eqx.tree_at(
            where, module, (*(getattr(module, n).weight[rows] for n in names), module.down.weight[:, rows])
        )

    modules = part(slice(0, 2)), part(slice(2, 6)), module
    first, second, whole = map(wide, eqx.filter_jit(lambda modules: [module(x) for module in modules])(modules))
    assert close(first + second, whole, 1e-6) and not close(first, whole, 1e-3)


@pytest.mark.parametrize("kind", [nn.MLP, nn.GatedMLP])
def test_initial_deviations(kind):
    module = kind(embed=64, mlp=256, output_std=0.5, key=KEY)
    assert abs(float(jnp.std(module.up.weight)) * 8 - 1) < 0.03
    assert abs(float(jnp.std(module.down.weight)) / 0.5 - 1) < 0.03
