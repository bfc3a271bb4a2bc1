"""Runs whose numbers are not finite any more."""

from typing import Any


class DivergedError(RuntimeError):
    """Too many steps in a row had a loss or gradient that was not finite."""


def check_finite(metrics: dict[str, Any], limit: int = 10, *, step: int | None = None) -> None:
    """Raises `DivergedError` if the last `limit` steps were all skipped; blocks until these metrics are computed.

    The error names the first such step, where `step` is the number of these metrics' own.
    """
    in_a_row = int(metrics["skipped_in_a_row"])
    if in_a_row >= limit:
        which = "" if step is None else f", steps {step - in_a_row + 1} to {step},"
        raise DivergedError(
            f"{in_a_row} steps in a row{which} had a loss or a gradient norm that was not finite (limit {limit}; last: "
            f"loss {float(metrics['loss'])}, gradient norm {float(metrics['grad_norm'])}). Parameters are those of the "
            "last finite step; lower the learning rate, lengthen the warmup, look at the data of these steps, or have "
            "DebugNans (--debug-nans) name the module."
        )
