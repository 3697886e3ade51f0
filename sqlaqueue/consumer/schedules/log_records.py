"""The log records about schedules."""

from __future__ import annotations

from collections.abc import Sequence

from sqlaqueue.consumer.schedules.firing_process import GroupState
from sqlaqueue.log import fields, logger
from sqlaqueue.schedules.fire import Firing
from sqlaqueue.schedules.store import Declaration, Moved

_LONGEST_ERROR = 2000


def log_error(error: Exception) -> None:
    """Log an error of the database; the process tries again."""
    extra = fields("schedules_error", error_kind=type(error).__name__)
    logger.warning("schedules: %s", failure_text(error), extra=extra)


def log_declared(declared: Declaration) -> None:
    """Log a definition of the program that was written, or was kept as it is."""
    if not declared.keeps:
        text = "schedule %r: written into the database"
        logger.info(text, declared.name, extra=fields("schedule_written", schedule=declared.name))
        return
    text = (
        "schedule %r: the program has changed it, but it was changed at run time as well, which is kept; "
        "`sqlaqueue schedules reset` replaces it"
    )
    logger.warning(text, declared.name, extra=fields("schedule_kept", schedule=declared.name))


def log_moved(moved: Moved) -> None:
    """Log a tick that an upgrade of the rules moves."""
    text = (
        "schedule %r: its next tick, %s, was computed by %s; by %s of this process it would be %s. The stored one is "
        "fired, and the ticks after it follow the new rules"
    )
    extra = fields("schedule_moved", schedule=moved.schedule)
    logger.warning(text, moved.schedule, moved.next_tick, moved.before, moved.rules, moved.computed, extra=extra)


def log_unknown(state: GroupState, names: Sequence[str]) -> None:
    """Log once which overdue schedules the process cannot fire."""
    for name in names:
        if name not in state.reported:
            text = (
                "schedule %r is overdue, and this process cannot fire it: it has not imported the class of its jobs, "
                "or has no schedule with the function that makes them"
            )
            logger.warning(text, name, extra=fields("schedule_unknown", schedule=name))
    state.reported = set(names)


def log_firing(firing: Firing) -> None:
    """Log the ticks of one transaction."""
    for name, first in firing.missed:
        text = "schedule %r: ticks from %s on were missed, and are passed over"
        logger.warning(text, name, first, extra=fields("ticks_missed", schedule=name))
    for fired in firing.fired:
        text = "schedule %r fired for %s" if fired.key is not None else "schedule %r: no job for %s, as one is there"
        extra = fields("schedule_fired", schedule=fired.schedule, delay=fired.late.total_seconds())
        logger.debug(text, fired.schedule, fired.tick, extra=extra)


def log_failure(name: str, error: BaseException, text: str) -> None:
    """Log why a schedule could not be fired."""
    extra = fields("schedule_failed", schedule=name, error_kind=type(error).__name__)
    logger.warning("the schedule %r cannot be fired and stays due: %s", name, text, extra=extra)


def failure_text(error: BaseException) -> str:
    """Return the first line of an error as a text that the server can store, without the statement and its values."""
    shown = getattr(error, "orig", None) or error
    try:
        line = str(shown).strip().partition("\n")[0]
    except Exception:  # noqa: BLE001 - it has to be recorded all the same
        line = "its text could not be made"
    return f"{type(shown).__name__}: {line}".replace("\0", "").encode(errors="replace").decode()[:_LONGEST_ERROR]
