"""Products of 8 bits in numpy: numbers rounded as the formats say, sums in float64."""

import ml_dtypes
import numpy as np


FORMS = {"input": (ml_dtypes.float8_e4m3fn, 2.0**7), "gradient": (ml_dtypes.float8_e5m2, 2.0**14)}


def rounded(x: np.ndarray, kind: str, each: bool) -> np.ndarray:
    """Numbers as a product sees them: over a power of two, of each vector or of all, that brings the largest to its
    place, rounded to 8 bits."""
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
    """The output and both gradients of a map of 8 bits, with exact sums."""
    of_x, of_weight = rounded(x, "input", True), rounded(weight, "input", False)
    return (
        of_x @ of_weight.T,
        rounded(gradient, "gradient", True) @ of_weight,
        rounded(gradient, "gradient", True).T @ of_x,
    )
