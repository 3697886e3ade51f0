"""The maintenance loop: it executes each maintenance task when it is due.

A task is a routine, ``task(maintenance, now)``. It returns at once when its timer is not due, and sets the timer before
it does its work: after an error the next try must not be now. :data:`TASKS` lists them in the order of execution.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sqlalchemy.exc import NotSupportedError

from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import Routine, Wait
from sqlaqueue.consumer.core.errors import may_recover
from sqlaqueue.consumer.maintenance import cleanup, handlers_running, leases
from sqlaqueue.consumer.maintenance.state import Maintenance

_AFTER_ERROR = 0.25

Task = Callable[[Maintenance, float], Routine]

TASKS: tuple[Task, ...] = (
    handlers_running.end_overdue,
    handlers_running.pass_on_blocked,
    handlers_running.release_waiting,
    leases.extend,
    handlers_running.settle_overdue,
    leases.heartbeat,
    leases.find_upcoming,
    leases.find_unchanged,
    handlers_running.cancel_requested,
    leases.rescue_expired,
    cleanup.reconcile_messages,
    cleanup.delete_old,
    cleanup.delete_old_attempts,
    cleanup.close_unused,
)


def maintain(context: ConsumerContext) -> Routine:
    """Execute the tasks that are due, again and again, until the run is over."""
    maintenance = Maintenance(context)
    while not context.workers_ended:
        now, pause = time.monotonic(), 0.0
        context.maintained_at = now
        for task in TASKS:
            try:
                yield from _watched(context, task(maintenance, now))
            except Exception as error:  # noqa: BLE001 - the database may be gone; the other tasks are due all the same
                # Before the first claim the worker logs program errors; logging them here would repeat them. Before the
                # start check, unsupported-feature errors are the check's to report.
                is_explained = not context.start_logged and isinstance(error, NotSupportedError)
                is_logged = may_recover(error) and not is_explained
                if error is not context.error and (context.has_claimed or is_logged):
                    context.log_error("maintenance_error", "%s: maintenance: %s: %s", error)
                pause = _AFTER_ERROR
        yield Wait("maintenance", max(maintenance.until_next(), pause))


def _watched(context: ConsumerContext, routine: Routine) -> Routine:
    """Pass the effects of a task on, and record since when one of them waits for the database, for the health."""
    result: Any = None
    raised: Exception | None = None
    while True:
        try:
            effect = routine.send(result) if raised is None else routine.throw(raised)
        except StopIteration as end:
            return end.value
        result = raised = None
        context.waits_for_database_since = time.monotonic()
        try:
            result = yield effect
        except Exception as error:  # noqa: BLE001 - the task decides what an error means
            raised = error
        finally:
            # In this order, as another thread may read in between.
            context.maintained_at = time.monotonic()
            context.waits_for_database_since = None
