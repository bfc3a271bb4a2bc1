"""`scripts/scaling.py`: what it prints, and bad input, refused before it writes."""

from pathlib import Path

import pytest
import scaling

from eqformer.recipes import PowerLaw, ScalingPoint, Screen


def test_the_report_has_the_fit_the_held_out_depth_and_the_depth_for_a_budget(tmp_path, capsys):
    law = PowerLaw(30.0, 0.1)
    points = [ScalingPoint(depth, 0.02, 10.0 ** (12 + depth), law.loss(10.0 ** (12 + depth))) for depth in (1, 2, 3)]
    scaling.report(scaling.Command(out=tmp_path, budget=1e14), points, Screen())
    printed = capsys.readouterr().out
    assert "held out   depth 3: 0.9487 bits a byte, predicted 0.9487 (+0.0%)" in printed
    assert "fit        30 * FLOPs^-0.100 bits a byte" in printed and "budget     1e+14 FLOPs: depth 2 of" in printed
    scaling.report(scaling.Command(out=tmp_path, budget=1e3), points, Screen())
    assert "the budget is too small for every depth" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scaling.json", "scaling.png"]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"depths": (1, 2)}, r"--depths 1 2: a fit needs two depths"),
        ({"depths": (1, 2, 2)}, r"--depths 1 2 2: .* 3 different depths"),
        ({"depths": (1, 2, 9)}, r"--depths 9: .*; take 8 or 10"),
        ({"rates": (0.0,)}, r"--rates 0\.0: the value must be a positive number"),
        ({"budget": 1e15, "hours": 1.0}, r"--budget .* --hours 1\.0: give only one of the two"),
        (
            {"depths": (1, 2, 4), "data": "text.txt"},
            r"--depths 4: .* epochs of the 5,\d00 bytes of training text, more than --epochs 4",
        ),
        ({"budget": 1e15, "tokens": 1e5}, r"--tokens 100000: for a budget, the number of tokens must grow"),
        (
            {"depths": (1, 2, 4), "data": "text.txt", "tokens": 1e5},
            r"--depths 4: .* epochs of the 5,\d00 bytes .* a smaller depth, --tokens 2\.3e\+04, or --epochs 18",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(fields, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("words " * 1000)
    fields |= {"data": Path(fields["data"])} if "data" in fields else {}
    with pytest.raises(ValueError, match=message):
        scaling.run(scaling.Command(out=tmp_path / "out", **fields))
    assert not (tmp_path / "out").exists()
