"""Rotary positions against complex numbers in float64 and against transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import close, golden, normal, rotate, wide

from eqformer import nn


POSITIONS = np.array([[7, 3, 0, 1023, 2], [5, 6, 7, 8, 9]], np.int32)


# One small program a rotary instead of one an operation.
run = jax.jit(lambda rotary, x, positions, lengths=None: rotary(x, positions, lengths), static_argnums=0)


def frequencies(dim, theta):
    return np.array([theta ** (-2 * i / dim) for i in range(dim // 2)])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim, theta", [(8, 10000.0), (4, 500.0), (2, 10000.0)])
def test_complex_reference_in_any_order_of_positions_whole_and_partial(dim, theta, interleaved):
    x = normal(1, 2, 5, 3, 8)
    y = run(nn.Rotary(dim, theta, interleaved), x, POSITIONS)
    # At position 1023 an angle in float32 is off by up to 1023 * 2^-24 * 2.
    assert close(y, rotate(wide(x), POSITIONS, frequencies(dim, theta), interleaved), 2e-4)
    assert np.array_equal(y[..., dim:], x[..., dim:])
    wrong = rotate(wide(x), POSITIONS, frequencies(dim, theta * 1.5), interleaved)
    other = rotate(wide(x), POSITIONS, frequencies(dim, theta), not interleaved)
    assert dim == 2 or not (close(y, wrong, 1e-2) or close(y, other, 1e-2))


@pytest.mark.parametrize("scaling", [None, nn.YarnScaling(4.0, 16)])
def test_reverse_negates_the_angles(scaling):
    x = normal(1, 2, 5, 3, 8)
    rotary, reverse = nn.Rotary(8, 100.0, scaling=scaling), nn.Rotary(8, 100.0, scaling=scaling, reverse=True)
    assert close(run(reverse, x, POSITIONS), run(rotary, x, -POSITIONS), 1e-6)
    assert not close(run(reverse, x, POSITIONS), run(rotary, x, POSITIONS), 1e-2)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_transformers_layouts(layout):
    arrays = golden("rotary")
    rotary = nn.Rotary(8, 10000.0, interleaved=layout == "interleaved")
    other = nn.Rotary(8, 10000.0, interleaved=layout != "interleaved")
    positions = jnp.asarray(arrays["positions"].astype(np.int32))
    for name in ("query", "key"):
        x = jnp.asarray(np.swapaxes(arrays[name], 1, 2))
        expected = np.swapaxes(arrays[f"{layout}.{name}"], 1, 2)
        assert close(run(rotary, x, positions), expected, 1e-4)
        assert not close(run(other, x, positions), expected, 1e-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_alone(interleaved):
    rotary = nn.Rotary(8, 10000.0, interleaved)
    query, key = normal(1, 1, 1, 1, 8), normal(2, 1, 1, 1, 8)

    def score(at, distance):
        q, k = run(rotary, query, np.array([[at + distance]])), run(rotary, key, np.array([[at]]))
        return float(np.sum(np.asarray(q) * np.asarray(k)))

    for distance in (0, 1, 17):
        assert np.isclose(score(0, distance), score(200, distance), atol=1e-3)
    assert not np.isclose(score(0, 1), score(0, 2), atol=1e-2)


def test_an_offset_continues_a_sequence():
    rotary, x = nn.Rotary(4, 100.0), normal(1, 1, 6, 2, 4)
    whole, x = np.asarray(run(rotary, x, np.arange(6)[None])), np.asarray(x)
    assert np.array_equal(run(rotary, x[:, 4:], np.array([[4, 5]])), whole[:, 4:])
    assert not np.allclose(run(rotary, x[:, 4:], np.array([[0, 1]])), whole[:, 4:], atol=1e-2)


def test_no_batch_or_many():
    rotary, x = nn.Rotary(4, 100.0, scaling=nn.DynamicScaling(2.0, 3)), np.asarray(normal(1, 2, 3, 5, 2, 4))
    places = np.arange(30).reshape(2, 3, 5)
    many = np.asarray(run(rotary, x, places))
    assert np.allclose(run(rotary, x[1, 2], places[1, 2]), many[1, 2], atol=1e-6)
    assert np.allclose(run(rotary, x[1], places[1]), many[1], atol=1e-6)


def test_lengths_of_rows_are_their_own():
    """Row 0 stays within the original length, row 1 goes beyond: alone or together, each gets its own frequencies."""
    scaling = nn.LongRopeScaling((1.0, 1.0), (2.0, 4.0), original_length=8, factor=4.0)
    x = np.broadcast_to(normal(1, 1, 3, 1, 4), (2, 3, 1, 4))
    places = np.array([[0, 1, 2], [0, 1, 9]])
    rotary = nn.Rotary(4, 100.0, scaling=scaling)
    y = np.asarray(run(rotary, x, places))
    magnitude = np.sqrt(1 + np.log(4) / np.log(8))
    base = frequencies(4, 100.0)
    assert close(y[0], rotate(wide(x[:1]), places[:1], base, magnitude=magnitude)[0])
    assert close(y[1], rotate(wide(x[1:]), places[1:], base / [2, 4], magnitude=magnitude)[0])
    assert not np.allclose(y[0, 1], y[1, 1], atol=1e-2)
    # A given length overrides the one read off the positions, as in decoding.
    given = np.asarray(run(rotary, x, places, np.array([[9], [8]])))
    assert np.allclose(given[0, :2], y[1, :2], atol=1e-6) and np.allclose(given[1, :2], y[0, :2], atol=1e-6)


def test_angles_are_in_float32_for_bfloat16_inputs():
    rotary, x = nn.Rotary(8, 10000.0), normal(1, 1, 1, 1, 8)
    place = jnp.array([[1021]])  # 1020 or 1024 in bfloat16
    y = run(rotary, x.astype(jnp.bfloat16), place)
    assert y.dtype == jnp.bfloat16
    assert close(y, run(rotary, x, place), 2e-2) and not close(y, run(rotary, x, place + 3), 2e-1)


def test_float64_inputs_are_rotated_in_float64():
    with jax.enable_x64(True):
        x, places = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 1, 4))), np.array([[0, 3, 5]])
        y = run(nn.Rotary(4, 16.0), x, places)
        assert y.dtype == jnp.float64 and close(y, rotate(wide(x), places, frequencies(4, 16.0)), 1e-12)


def test_gradient_is_the_turn_back():
    rotary, x, slope = nn.Rotary(4, 100.0), normal(1, 1, 3, 2, 6), normal(2, 1, 3, 2, 6)
    places = jnp.array([[4, 0, 9]])
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(rotary(x, places) * slope)))(x)
    assert close(gradient, rotate(wide(slope), -np.asarray(places), frequencies(4, 100.0)))


@pytest.mark.parametrize("scaling", [nn.NTKScaling(2.0), nn.DynamicScaling(2.0, 8)])
def test_a_power_of_the_channels_needs_two_pairs(scaling):
    with pytest.raises(ValueError, match=rf"Rotary\(dim=2, scaling={type(scaling).__name__}.*at least 4"):
        nn.Rotary(2, 10000.0, scaling=scaling)
    assert nn.Rotary(4, 10000.0, scaling=scaling).dim == 4 and nn.Rotary(2, 10000.0).dim == 2


@pytest.mark.parametrize("dim", [0, 3, -2])
def test_channels_turn_in_pairs(dim):
    with pytest.raises(ValueError, match=rf"Rotary\(dim={dim}\).*even and at least 2"):
        nn.Rotary(dim, 10.0)


def test_wrong_shapes_are_refused():
    rotary = nn.Rotary(8, 10.0)
    with pytest.raises(ValueError, match=r"Rotary\(dim=8\)\(x\): x has only 4 channels"):
        rotary(normal(1, 1, 3, 2, 4), jnp.arange(3)[None])
    with pytest.raises(ValueError, match=r"Rotary\(positions of shape \(1, 4\)\): with x of shape \(1, 3, 2, 8\)"):
        rotary(normal(1, 1, 3, 2, 8), jnp.arange(4)[None])
