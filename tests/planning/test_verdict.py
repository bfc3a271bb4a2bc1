"""The verdict of the formulas on whether a step fits."""

import pytest

from eqformer.planning import judge_formula


@pytest.mark.quick
def test_estimates_leave_to_the_compiler_what_they_cannot_tell():
    """A step fits if its upper bound does, and does not if an estimate 25 % too high would still be too much."""
    too_close = "too close to tell without the compiler"
    judge = lambda bound, certain=0: judge_formula(bound, certain, memory=1000)
    assert [judge(size) for size in (100, 1000)] == ["fits"] * 2
    assert [judge(size) for size in (1001, 1250, 1470)] == [too_close] * 3
    assert judge(1471) == "does not fit"  # 1000 * 1.25 / 0.85
    assert judge(1010, certain=1000) == too_close and judge(1010, certain=1001) == "does not fit"


@pytest.mark.quick
def test_bytes_that_are_certain_have_the_margin_too():
    """The weights and caches of a decode step are known; the compiler needs more than these."""
    too_close = "too close to tell without the compiler"
    assert [judge_formula(size, size, 1000) for size in (850, 851, 1000, 1001)] == [
        *("fits", too_close, too_close, "does not fit"),
    ]
