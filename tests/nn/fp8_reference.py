"""Matrix products of 8-bit numbers in numpy: inputs are rounded to the formats, sums are in float64."""

import ml_dtypes
import numpy as np


FORMS = {"input": (ml_dtypes.float8_e4m3fn, 2.0**7), "gradient": (ml_dtypes.float8_e5m2, 2.0**14)}


def rounded(x: np.ndarray, kind: str, each: bool) -> np.ndarray:
    """Return the numbers divided by a scale, rounded to 8 bits, and multiplied by the scale again.

    The scale is the power of two that brings the largest number into `[least, 2 least)` of `FORMS`. With `each` every
    row has its own scale; otherwise one scale holds for the whole array.
    """
    form, least = FORMS[kind]
    scaled = np.empty_like(x)
    for row in range(len(x)) if each else [slice(None)]:
        largest = np.abs(x[row]).max()
        scale = 1.0
        while largest and largest / scale < least:
            scale /= 2
        while largest / scale >= 2 * least:
            scale *= 2
        scaled[row] = (x[row] / scale).astype(form).astype(np.float64) * scale
    return scaled


def reference(x: np.ndarray, weight: np.ndarray, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the output of a linear map of 8-bit products, and the gradients of its input and of its weight."""
    of_x, of_weight = rounded(x, "input", True), rounded(weight, "input", False)
    return (
        of_x @ of_weight.T,
        rounded(gradient, "gradient", True) @ of_weight,
        rounded(gradient, "gradient", True).T @ of_x,
    )
