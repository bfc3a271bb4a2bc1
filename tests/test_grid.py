"""Parts of the grid: each grid test belongs to one part, and finished parts are recorded."""

import re

import grid


MARKED = [
    str(path.relative_to(grid.ROOT))
    for path in sorted((grid.ROOT / "tests").rglob("test_*.py"))
    if re.search(r"mark\.(grid|by_default)\b", path.read_text(encoding="utf-8")) and path.name != "test_grid.py"
]


def test_each_file_with_tests_of_the_grid_is_in_a_part():
    assert len(MARKED) > 30 and {grid.part_of(file) for file in MARKED} == {*grid.PARTS}
    assert grid.part_of("tests/test_rooms.py") is None  # the control
    for file in MARKED:
        parts = [
            part
            for part in grid.PARTS
            for chosen in [grid.selection(part)[2:]]
            if any((file + "/").startswith(path + "/") for path in chosen) and f"--ignore={file}" not in chosen
        ]
        assert parts == [grid.part_of(file)]


def test_what_has_run_is_said():
    record = {"layers": {"commit": "abcdef0123", "result": "passed", "minutes": 12.4, "processor_minutes": 20.6}}
    lines = grid.told(record, {"abcdef0123": 3}.__getitem__)
    assert lines[0].split() == "layers abcdef01 passed 12 min, 21 of a processor 3 files changed since".split()
    assert lines[1] == "models     has not been run" and len(lines) == len(grid.PARTS)


def test_an_unknown_part_is_an_error(capsys):
    assert grid.main(["parities"]) == 2
    assert "there is no part parities; the parts are layers, models, layouts, parity" in capsys.readouterr().err
