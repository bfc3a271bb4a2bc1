"""Every scaling against transformers' frequencies, and scalings that change nothing or are refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from nn_reference import golden_table

from eqformer import nn


CASES = {f"{case['name']}-{case['length']}": case for case in golden_table("rotary_frequencies")}
MAX_LENGTH = 64  # max_position_embeddings of the fixtures' config


def scaling_of(parameters):
    """Our scaling for transformers' `rope_parameters`, by an explicit mapping."""
    given = dict(parameters)
    kind, _, _ = given.pop("rope_type"), given.pop("rope_theta"), given.pop("partial_rotary_factor", None)
    if kind == "default":
        return None
    if kind == "linear":
        return nn.LinearScaling(given["factor"])
    if kind == "dynamic":
        return nn.DynamicScaling(given["factor"], MAX_LENGTH)
    original = given["original_max_position_embeddings"]
    if kind == "llama3":
        return nn.Llama3Scaling(given["factor"], given["low_freq_factor"], given["high_freq_factor"], original)
    if kind == "yarn":
        magnitude = given.get("attention_factor")
        if "mscale" in given:
            strengths = (given["mscale"], given["mscale_all_dim"])
            over, under = (nn.yarn_magnitude(given["factor"], strength) for strength in strengths)
            magnitude = over / under
        return nn.YarnScaling(
            given["factor"],
            original,
            beta_fast=given.get("beta_fast", 32.0),
            beta_slow=given.get("beta_slow", 1.0),
            magnitude=magnitude,
            truncate=given.get("truncate", True),
        )
    assert kind == "longrope"
    short, long = tuple(given["short_factor"]), tuple(given["long_factor"])
    return nn.LongRopeScaling(short, long, original, given["factor"], magnitude=given.get("attention_factor"))


def ours(case, scaling, length=None):
    """Frequencies and factor, read off the rotation of unit vectors by one radian's worth of position."""
    dim = int(case["head_dim"] * case["parameters"].get("partial_rotary_factor", 1.0))
    rotary = nn.Rotary(dim, case["parameters"]["rope_theta"], scaling=scaling)
    x = jnp.zeros((1, 1, 1, dim)).at[..., : dim // 2].set(1.0)
    length = jnp.array([[1 if length is None else length]])
    y = np.asarray(rotary(x, jnp.ones((1, 1), jnp.int32), length), np.float64)[0, 0, 0]
    cosine, sine = y[: dim // 2], y[dim // 2 :]
    return np.arctan2(sine, cosine), np.hypot(sine, cosine)


@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_factor_are_those_of_transformers(name):
    case = CASES[name]
    scaling = scaling_of(case["parameters"])
    turn, factor = ours(case, scaling, case["length"])
    assert np.allclose(turn, case["frequencies"], rtol=2e-6, atol=1e-9)
    assert np.allclose(factor, case["attention_factor"], rtol=1e-6)
    assert np.allclose(factor, 1) or (scaling is not None and scaling.changes_norms)
    if case["name"] not in ("default", "dynamic") and case["parameters"].get("short_factor", [2])[-1] != 1.0:
        unscaled, _ = ours(case, None)
        assert not np.allclose(unscaled, case["frequencies"], rtol=1e-3)


def test_the_fixture_holds_every_kind_and_both_sides_of_the_length():
    kinds = {case["parameters"]["rope_type"] for case in CASES.values()}
    assert kinds == {"default", "linear", "dynamic", "yarn", "llama3", "longrope"}
    assert {"dynamic-64", "dynamic-65", "longrope-64", "longrope-65", "yarn_mscale-None"} <= set(CASES)
    of_factor = {case["parameters"]["rope_type"] for case in CASES.values() if case["attention_factor"] != 1}
    assert of_factor == {"yarn", "longrope"}
    at = lambda name: CASES[name]["frequencies"]
    assert at("dynamic-64") == at("dynamic-1") != at("dynamic-65") != at("dynamic-512")
    assert at("longrope-64") == at("longrope-1") != at("longrope-65") == at("longrope-200")


def test_without_a_ramp_each_wave_stays_or_grows():
    """Llama 4 Scout's two factors are equal: nothing is divided by their difference."""
    kept, grown = (nn.Llama3Scaling(8.0, factor, factor, 64) for factor in (1e-6, 1e6))
    base = 100.0 ** (-np.arange(0, 8, 2) / 8)
    turns = 64 * base / (2 * np.pi)
    assert turns.min() < 1 < turns.max()
    found = nn.Llama3Scaling(8.0, 1.0, 1.0, 64).frequencies(8, 100.0, jnp.array([[9]]))[0]
    assert np.allclose(found, np.where(turns > 1, base, base / 8), rtol=1e-6)
    assert np.allclose(kept.frequencies(8, 100.0, jnp.array([[9]]))[0], base, rtol=1e-6)
    assert np.allclose(grown.frequencies(8, 100.0, jnp.array([[9]]))[0], base / 8, rtol=1e-6)


def test_only_some_depend_on_the_length():
    depends = {case["name"]: scaling_of(case["parameters"]) for case in CASES.values()}
    found = {name for name, scaling in depends.items() if nn.Rotary(4, 10.0, scaling=scaling).depends_on_length}
    assert found == {"dynamic", "longrope", "longrope_factor"}


def test_yarn_of_no_growth_is_no_change():
    plain, _ = ours(CASES["yarn-None"], None)
    turn, factor = ours(CASES["yarn-None"], nn.YarnScaling(1.0, 64))
    assert np.allclose(turn, plain, rtol=1e-6) and np.allclose(factor, 1.0)
    assert nn.yarn_magnitude(0.5) == nn.yarn_magnitude(1.0) == 1.0


def test_longrope_of_no_growth_has_factor_one():
    for factor in (0.5, 1.0):
        scaling = nn.LongRopeScaling((1.0,) * 4, (2.0,) * 4, 64, factor)
        assert np.allclose(ours(CASES["longrope-1"], scaling)[1], 1.0)


def test_longrope_wants_one_divisor_a_pair():
    scaling = nn.LongRopeScaling((1.0,) * 4, (2.0,) * 3, 64, 4.0)
    with pytest.raises(ValueError, match=r"LongRopeScaling\(long_divisors=...\): 3 divisors for 4 pairs"):
        nn.Rotary(8, 10.0, scaling=scaling)(jnp.ones((1, 1, 8)), jnp.zeros(1, jnp.int32))
