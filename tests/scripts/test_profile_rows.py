"""The benchmark of a train step's time: the times of its parts add up to the step, for a small model."""

import pytest
from benchmarks._profile import profile

from eqformer import models


@pytest.mark.grid
def test_kinds_of_work_and_modules_add_up_to_the_step():
    rows = list(profile(2, models.preset("llama-byte-1m"), rows=2, seq=32))
    traced = next(row.value for row in rows if row.name == "traced")
    for group in ("kind of work", "module"):
        own = {row.name: row for row in rows if row.group == group}
        assert sum(row.value or 0 for row in own.values()) == pytest.approx(traced)
        assert sum(row.ratio or 0 for row in own.values()) == pytest.approx(1)
        assert {"products", "elementwise"} <= {*own} or "optimizer" in own
