"""RMSNorm and LayerNorm against their formulas in float64."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, normal, randomised, rms, wide

from eqformer import nn


@pytest.mark.parametrize("options", [{}, {"offset": 1.0}, {"shift": True}, {"scale": False}, {"eps": 0.5}])
def test_rms_norm(options):
    module = randomised(nn.RMSNorm("embed", embed=6, **options))
    for shape in ((6,), (2, 6), (2, 3, 6)):
        x = 3 + normal(1, *shape)
        assert close(module(x), rms(wide(x), module))
    assert not close(module(x), rms(wide(x) - wide(x).mean(-1, keepdims=True), module), 1e-3)


def test_rms_norm_over_several_dims_is_not_over_each():
    module = randomised(nn.RMSNorm("heads head_dim", heads=3, head_dim=4))
    x = normal(1, 2, 5, 3, 4) * jnp.array([1.0, 10.0, 100.0])[:, None]
    flat = wide(x).reshape(2, 5, 12)
    expected = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + 1e-6) * wide(module.weight).reshape(12)
    assert close(module(x), expected.reshape(x.shape))
    per_head = eqx.tree_at(lambda m: m.weight, nn.RMSNorm("head_dim", head_dim=4), module.weight[0])
    assert not close(module(x)[..., 0, :], per_head(x)[..., 0, :], 1e-2)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"scale": False, "bias": False}, {"eps": 0.5, "offset": 1.0}])
def test_layer_norm(options):
    module = randomised(nn.LayerNorm("embed", embed=6, **options))
    x = 3 + normal(1, 2, 3, 6)
    centred = wide(x) - wide(x).mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + module.eps)
    expected = expected if module.weight is None else expected * (module.offset + wide(module.weight))
    expected = expected if module.bias is None else expected + wide(module.bias)
    assert close(module(x), expected)
    assert not close(module(x), rms(wide(x), nn.RMSNorm("embed", embed=6)), 1e-2)


def test_layer_norm_over_fewer_dims_than_it_scales():
    module = randomised(nn.LayerNorm("heads head_dim", over="head_dim", heads=3, head_dim=4, eps=0.1))
    x = normal(1, 2, 5, 3, 4) * jnp.array([1.0, 10.0, 100.0])[:, None]
    centred = wide(x) - wide(x).mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 0.1)
    assert close(module(x), expected * wide(module.weight) + wide(module.bias))
    with pytest.raises(ValueError, match="over must name the last of the dims"):
        nn.LayerNorm("heads head_dim", over="heads", heads=3, head_dim=4)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_fresh_norm_scales_by_one(offset):
    module = nn.RMSNorm("embed", embed=6, offset=offset, shift=True)
    assert np.all(module.weight == 1 - offset)
    x = normal(1, 3, 6)
    assert np.allclose(np.mean(np.square(module(x)), -1), 1, atol=1e-4)


@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
def test_reductions_are_in_float32(kind):
    """Squares of 1e20 and sums of 512 bfloat16 numbers both fail in the input's own dtype."""
    module = kind("embed", embed=512)
    x = normal(1, 4, 512).astype(jnp.bfloat16)
    y = module(x)
    assert y.dtype == jnp.bfloat16
    expected = kind("embed", embed=512)(x.astype(jnp.float32))
    assert close(y, expected, 2**-8)
    small = module((x.astype(jnp.float32) * 1e4).astype(jnp.float16))  # squares beyond float16
    assert small.dtype == jnp.float16 and bool(jnp.isfinite(small).all())
    assert not jnp.isfinite(jnp.sum(jnp.square((x.astype(jnp.float32) * 1e4).astype(jnp.float16))))


@pytest.mark.parametrize("kind", [nn.RMSNorm, nn.LayerNorm])
def test_sizes_that_would_broadcast_are_refused(kind):
    name = kind.__name__
    with pytest.raises(ValueError, match=rf"{name}\('embed'\)\(x\): .* \{{'embed': 1\}}; x has shape \(2, 8\)"):
        kind("embed", embed=1)(normal(1, 2, 8))
    with pytest.raises(ValueError, match=r"\{'embed': 8\}; x has shape \(2, 1\)"):
        kind("embed", embed=8)(normal(1, 2, 1))
    with pytest.raises(ValueError, match=rf"{name}\('embed'\): the sizes given are \['mlp'\]; .* \['embed'\]"):
        kind("embed", mlp=8)
