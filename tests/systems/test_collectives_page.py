"""The page on collectives: its check finds a collective that differs from its reference."""

import numpy as np
import pytest
from page import example


def test_control_another_reference_is_refused(monkeypatch):
    collectives = example("systems-collectives.md")
    right = collectives.reference_all_to_all
    monkeypatch.setattr(collectives, "reference_all_to_all", lambda x, tiled: np.roll(right(x, tiled=tiled), 1, axis=0))
    with pytest.raises(AssertionError, match="all_to_all"):
        collectives.check(("fsdp", "tensor"), True)
