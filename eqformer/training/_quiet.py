"""Keeps orbax's progress messages out of the log."""

import logging


def quiet_orbax() -> None:
    """Drops orbax's log records below the level of errors; its errors reach the caller as exceptions anyway."""
    # Orbax logs through absl's logger, which other libraries share: a filter by source leaves theirs alone.
    logger = logging.getLogger("absl")
    if _only_errors_of_orbax not in logger.filters:
        logger.addFilter(_only_errors_of_orbax)


def _only_errors_of_orbax(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or "orbax" not in record.pathname
