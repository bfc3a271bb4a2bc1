"""Quantization to 8 and 4 bits: rounding errors, the maps that are quantized, and whole models."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from nn_reference import normal, random_module, wide

from eqformer import models, nn


KEY = jax.random.key(0)
MAP = nn.Linear("heads head_dim -> embed", heads=3, head_dim=8, embed=5, bias=True, key=KEY)


@pytest.mark.parametrize("group", [None, 2, 24])
@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_each_number_is_off_by_half_a_step_at_most(form, group):
    """Of codes that a plain formula gives; a group larger than the last dim is all of that dim."""
    small = eqx.tree_at(lambda m: m.weight, MAP, MAP.weight.at[1].multiply(1e-3).at[2].set(0))
    linear = nn.quantize(small, form, group=group)
    weight = wide(small.weight).reshape(5, 3, -1, group or 8) if group == 2 else wide(small.weight)
    largest = np.abs(weight).max((1, 2) if group is None else -1, keepdims=True)
    scale = wide(linear.scales).reshape(largest.shape)
    np.testing.assert_allclose(scale, largest / {"int8": 127, "int4": 7, "fp8": 448}[form], rtol=2e-7)
    ratio = (weight / np.where(scale > 0, scale, 1)).astype(np.float32)
    codes = ratio.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) if form == "fp8" else np.round(ratio)
    decoded = (codes * scale).astype(np.float32)
    assert np.array_equal(linear.matrix(), decoded.reshape(5, 3, 8))
    half = np.maximum(np.abs(weight) / 16, scale * 2.0**-10) if form == "fp8" else scale / 2
    off = np.abs(decoded - weight) / np.where(half > 0, half, 1)
    assert 0.7 < off.max() < 1 + 1e-4
    assert linear.bias is MAP.bias and linear.scales.shape == {None: (5, 1, 1), 2: (5, 3, 4), 24: (5, 3, 1)}[group]
    assert linear.scale_dims == ("embed", *{None: "__", 2: ("heads", "head_dim"), 24: ("heads", "_")}[group])


def test_all_maps_are_taken_but_routers_and_those_of_the_vocabulary():
    model = eqx.filter_eval_shape(lambda: models.build("mixtral-byte-500k", key=KEY))
    rounded = eqx.filter_eval_shape(lambda: nn.quantize(models.build("mixtral-byte-500k", key=KEY), "int4", group=16))
    kinds = {name: type(node) for name, node in nn.named_modules(rounded, nn.LinearMap)}
    plain = {name for name, kind in kinds.items() if kind is not nn.QuantizedLinear}
    assert plain and all(name.endswith("router.linear") or name == "head" for name in plain), plain
    assert len(plain) < len(kinds) == len(nn.named_modules(model, nn.LinearMap))
    names: Any = nn.dims(rounded).stacks[0].blocks.feed_forward.layer.experts.mlps.down
    assert names.codes == names.scales == "layers experts embed mlp"


def test_what_cannot_be_rounded():
    odd = nn.Linear("embed -> mlp", embed=3, mlp=2, key=KEY)
    with pytest.raises(ValueError, match=r"quantize\(model, 'int3'\): unknown number format; .* int8, int4, fp8"):
        nn.quantize(MAP, "int3")
    with pytest.raises(ValueError, match=r"group=0\): a group has at least one input"):
        nn.quantize(MAP, "int8", group=0)
    with pytest.raises(ValueError, match=r"group=3\): the map has a last input dim 'head_dim' of size 8, which is no"):
        nn.quantize(MAP, "int8", group=3)
    with pytest.raises(ValueError, match=r"'int4'\): the map has a last input dim 'embed' of size 3, which is odd"):
        nn.quantize(odd, "int4")
    with pytest.raises(ValueError, match=r"'fp8'\): the map is quantized already; dequantize"):
        nn.quantize(nn.quantize(MAP, "int8"), "fp8")
    with pytest.raises(
        ValueError, match=r"the map is a LoRA, which holds no weight to round; quantize before with_lora"
    ):
        nn.quantize(nn.with_lora(MAP, [nn.Linear], rank=2, key=KEY), "int8")
    with pytest.raises(ValueError, match=r"quantize\(model, 'int8'\): no linear map is chosen"):
        nn.quantize(MAP, "int8", where=["up"])


def test_rows_sorted_by_expert_are_those_of_the_experts_weights():
    """One expert has no rows."""
    plain = random_module(nn.Experts, lambda key: nn.MLP(embed=4, mlp=6, key=key), 3, key=KEY)
    experts = eqx.filter_jit(lambda plain: nn.quantize(plain, "int4", group=2))(plain)
    x, sizes = normal(1, 7, 4), jnp.asarray([4, 0, 2], jnp.int32)
    y = jax.jit(lambda experts, x: experts.sorted_rows(x, sizes))(experts, x)
    decoded = eqx.filter_jit(lambda experts: [linear.matrix() for linear in nn.linear_maps(experts)])(experts)
    up, down = map(wide, decoded)
    activation = jax.jit(nn.gelu_tanh)
    for row, expert in enumerate([0, 0, 0, 0, 2, 2]):
        hidden = wide(activation(np.float32(up[expert] @ wide(x)[row])))
        np.testing.assert_allclose(np.asarray(y)[row], down[expert] @ hidden, atol=1e-6)
        assert np.abs(np.asarray(y)[row] - down[1] @ hidden).max() > 1e-2
    assert not np.any(np.asarray(y)[6])
