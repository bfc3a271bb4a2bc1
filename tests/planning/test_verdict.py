"""Whether a step fits, as far as formulas can tell."""

import pytest

from eqformer.planning import judge_formula


@pytest.mark.quick
def test_formulas_leave_to_the_compiler_what_they_cannot_tell():
    """Both bounds are where formulas that were as far off as ever seen would still be right."""
    too_close = "too close to tell without the compiler"
    judge = lambda predicted, certain=0: judge_formula(predicted, certain, memory=1000)
    assert [judge(size) for size in (100, 849)] == ["fits"] * 2
    assert [judge(size) for size in (851, 1000, 1249)] == [too_close] * 3
    assert judge(1251) == "does not fit"
    assert judge(1010, certain=1000) == too_close and judge(1010, certain=1001) == "does not fit"
