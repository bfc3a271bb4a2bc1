"""Scaling studies: the fit of a power law, the depth for a budget, the runs, and the written files."""

import dataclasses
import json
import math

import numpy as np
import pytest

from eqformer import recipes
from eqformer.recipes import ScalingPoint


LAW = recipes.PowerLaw(30.0, 0.1)


def make_points(depths=range(1, 6), rate=0.02, factor=1.0):
    flops = {depth: 10.0 ** (12 + depth) for depth in depths}
    return [ScalingPoint(depth, rate, x, factor * 30.0 * x**-0.1, 1e10) for depth, x in flops.items()]


def test_a_power_law_has_the_least_squares_of_logarithms():
    flops, losses = np.geomspace(1e12, 1e16, 6).tolist(), [5.0, 4.4, 3.1, 2.9, 2.4, 1.7]
    law = recipes.fit_power_law(flops, losses)
    design = np.stack([np.ones(6), -np.log(flops)], axis=1)
    wanted = np.linalg.lstsq(design, np.log(losses), rcond=None)[0]
    np.testing.assert_allclose([np.log(law.scale), law.exponent], wanted, rtol=1e-9)
    assert law.loss(1e14) == pytest.approx(math.exp(wanted[0]) * 1e14 ** -wanted[1], rel=1e-9)


def test_the_best_run_of_each_depth_is_fitted_and_the_largest_depths_are_held_out():
    worse = make_points(rate=0.04, factor=1.2) + [dataclasses.replace(make_points()[0], bits_per_byte=math.nan)]
    fit = recipes.fit_scaling([*worse, *make_points()])
    assert (fit.law.scale, fit.law.exponent) == pytest.approx((30.0, 0.1))
    assert [point.depth for point in fit.held_out] == [5] and fit.errors == pytest.approx((0.0,))
    assert len(recipes.fit_scaling(make_points(range(1, 12))).held_out) == 2
    bent = [dataclasses.replace(point, bits_per_byte=point.bits_per_byte + 1) for point in make_points()]
    assert recipes.fit_scaling(bent).errors[0] < -0.005
    with pytest.raises(ValueError, match=r"have the depths \[1, 2\]; a fit needs two"):
        recipes.fit_scaling(make_points(range(1, 3)))


def test_the_depth_for_a_budget_is_the_largest_whose_run_fits():
    flops = {depth: recipes.count_run_flops(recipes.speedrun_recipe(depth)) for depth in (1, 2, 3)}
    assert recipes.choose_depth(flops[2]) == (2, flops[2])
    assert recipes.choose_depth(0.99 * flops[3]) == (2, flops[2])
    assert recipes.choose_depth(0.99 * flops[1]) is None


def test_recipes_of_a_study_differ_in_depth_and_rate_only(tmp_path):
    study = recipes.scaling_recipes((4, 1, 2), (0.01, 0.03), tokens_per_parameter=5.0, seed=3)
    assert [*study] == [(depth, rate) for depth in (1, 2, 4) for rate in (0.01, 0.03)]
    assert all(recipe.model == recipes.speedrun_recipe(depth).model for (depth, _), recipe in study.items())
    settings = [(recipe.optimizer.learning_rate, recipe.seed) for recipe in study.values()]
    assert settings == [(0.01, 3), (0.03, 3)] * 3
    # A quarter of the largest batch whose rate is smaller, and so half of the rate.
    short = recipes.speedrun_recipe(3, tokens=663_552.0)
    assert (short.batch * short.seq, short.optimizer.learning_rate) == (1024, pytest.approx(0.01))
    text = tmp_path / "text.txt"
    text.write_text("words " * 1000)
    (recipe, *_) = recipes.scaling_recipes((1, 2, 4), data=text).values()
    assert recipes.measure_text(recipe) == pytest.approx(6000 * (1 - recipe.text.validation))


def test_all_depths_may_have_the_same_tokens():
    study = recipes.scaling_recipes((1, 2, 4), tokens=2.0**16)
    assert [recipe.steps * recipe.batch * recipe.seq for recipe in study.values()] == [2**16] * 3
    other = recipes.scaling_recipes((1, 2, 4)).values()  # The control: tokens in proportion to the parameters.
    assert len({recipe.steps * recipe.batch * recipe.seq for recipe in other}) == 3


def test_a_study_trains_each_recipe_in_a_folder_and_writes_what_it_learned(tmp_path, monkeypatch):
    study = recipes.scaling_recipes((1, 2, 3), (0.01, 0.02))
    trained = []

    def train(recipe, folder, *, name, screen):
        trained.append((folder.name, name))
        loss = LAW.loss(recipes.count_run_flops(recipe)) * (1 + 10 * abs(recipe.optimizer.learning_rate - 0.02))
        metrics = {"validation_bits_per_byte": math.nan if folder.name == "depth-1-rate-0.01" else loss}
        return type("Run", (), {"metrics": metrics})

    monkeypatch.setattr(recipes._scaling, "train", train)
    points = recipes.run_scaling(study, tmp_path, screen=recipes.Screen(silent=True))
    assert trained == [(f"depth-{depth}-rate-{rate:g}", "speedrun") for depth, rate in study]
    fit = recipes.fit_scaling(points)
    assert (fit.law_of_all.scale, fit.law_of_all.exponent) == pytest.approx((30.0, 0.1))
    recipes.write_scaling(points, fit, tmp_path, 1e14, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rates.png", "scaling.json", "scaling.png"]
    content = json.loads((tmp_path / "scaling.json").read_text())
    assert content["fit"]["exponent"] == pytest.approx(0.1) and (content["budget"], content["depth"]) == (1e14, 2)
    (tmp_path / "rates.png").unlink()
    recipes.write_scaling(points[1::2], recipes.fit_scaling(points[1::2]), tmp_path)
    assert not (tmp_path / "rates.png").exists()
