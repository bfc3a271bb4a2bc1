"""Keeps orbax's messages out of the log."""

import logging


def quiet_orbax() -> None:
    """Drop orbax's log records: progress, and each error with its traceback, which `Checkpointer` raises as one error.

    A full disk or a deleted folder fails several of orbax's threads at once, and each would print the same traceback.
    """
    # Orbax logs through absl's logger, which other libraries share: a filter by source leaves theirs alone.
    logger = logging.getLogger("absl")
    if _not_of_orbax not in logger.filters:
        logger.addFilter(_not_of_orbax)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return "orbax" not in record.pathname
