"""`scripts/scaling.py`: the fit of a power law, the depth for a budget, and bad input, refused before it writes."""

import dataclasses
from pathlib import Path

import pytest
import scaling

from eqformer.recipes import Screen


def points(losses):
    return [scaling.Point(depth, 0.02, 10.0 ** (12 + depth), loss, 1e10) for depth, loss in enumerate(losses, 1)]


def test_a_power_law_is_found_and_another_curve_misses_the_held_out_depth(tmp_path):
    law = scaling.PowerLaw(30.0, 0.1)
    exact = points([law.loss(10.0 ** (12 + depth)) for depth in range(1, 6)])
    fit = scaling.fit_power_law(exact[:-1])
    assert (fit.scale, fit.exponent) == pytest.approx((30.0, 0.1))
    assert fit.loss(exact[-1].flops) == pytest.approx(exact[-1].bits_per_byte)
    bent = [dataclasses.replace(point, bits_per_byte=point.bits_per_byte + 1) for point in exact]
    assert scaling.fit_power_law(bent[:-1]).loss(bent[-1].flops) < 0.995 * bent[-1].bits_per_byte
    command = scaling.Command(out=tmp_path, budget=1e14, rates=(0.02,))
    scaling.report(command, exact, Screen(silent=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rates.png", "scaling.json", "scaling.png"]


def test_the_depth_for_a_budget_is_the_largest_whose_run_fits():
    flops = {depth: scaling.count_flops(scaling.speedrun_recipe(depth)) for depth in (1, 2, 3)}
    assert scaling.choose_depth(flops[2], 20.0) == (2, flops[2])
    assert scaling.choose_depth(0.99 * flops[3], 20.0) == (2, flops[2])
    assert scaling.choose_depth(0.99 * flops[1], 20.0) is None


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"depths": (1, 2)}, r"--depths 1 2: a fit needs two depths"),
        ({"depths": (1, 2, 2)}, r"--depths 1 2 2: .* 3 different ones"),
        ({"depths": (1, 2, 9)}, r"--depths 9: .*; take 8 or 10"),
        ({"rates": (0.0,)}, r"--rates 0\.0: it must be a positive number"),
        ({"budget": 1e15, "hours": 1.0}, r"--budget .* --hours 1\.0: give one of them"),
        (
            {"depths": (1, 2, 4), "data": "text.txt"},
            r"--depths 4: .* epochs of a text of 6,000 bytes, more than --epochs 4",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(fields, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("words " * 1000)
    fields |= {"data": Path(fields["data"])} if "data" in fields else {}
    with pytest.raises(ValueError, match=message):
        scaling.run_scaling(scaling.Command(out=tmp_path / "out", **fields))
    assert not (tmp_path / "out").exists()
