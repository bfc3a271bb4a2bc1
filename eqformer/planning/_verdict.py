"""Whether a step fits into a device's memory, as far as formulas can tell."""

from typing import Literal


Verdict = Literal["fits", "does not fit", "too close to tell without the compiler"]
"""Whether a step fits into a device's memory."""

# Of steps that were compiled beside them, formulas told from 14 % too little to 21 % too much.
MOST_TOO_LITTLE, MOST_TOO_MUCH = 0.15, 0.25


def judge_formula(predicted: int, certain: int, memory: int) -> Verdict:
    """Judge bytes that formulas predict, of which `certain` are there whatever the compiler does."""
    if max(certain, predicted / (1 + MOST_TOO_MUCH)) > memory:
        return "does not fit"
    return "fits" if predicted / (1 - MOST_TOO_LITTLE) <= memory else "too close to tell without the compiler"
