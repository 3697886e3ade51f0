"""Fire schedules in a test's transaction: :func:`fire_schedules`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy.orm import Session

from sqlaqueue.schedules.fire import fire
from sqlaqueue.schedules.schedule import Schedule, ScheduleGroup, schedule_groups
from sqlaqueue.schedules.store import declare
from sqlaqueue.testing._types import AnySession
from sqlaqueue.testing.in_transaction.joined_sessions import joined_session, resolve_session
from sqlaqueue.testing.in_transaction.transaction_guard import TransactionGuard
from sqlaqueue.write_routing import execute


def fire_schedules(session: AnySession, schedules: Sequence[Schedule[Any] | type[Any]]) -> list[Any]:
    """Do once what a process with these schedules does: store them if they are new, and fire what is due.

    A schedule is created by the first call, so its first tick comes later; :func:`travel` lets time pass.

    :param session: the test's session. Its pending changes are flushed first.
    :param schedules: Schedules, or queue classes for those that are in the database.
    :return: the jobs, in the order of their ticks.
    """
    return fire_in(resolve_session(session, "fire_schedules", is_async=False), schedules, "fire_schedules")


def fire_in(session: Session, schedules: Sequence[Any], function: str) -> list[Any]:
    """Do so; ``function`` is named in errors."""
    session.flush()
    jobs: list[tuple[Any, type[Any], Any]] = []
    for group in schedule_groups(schedules, f"{function}()"):
        with TransactionGuard() as guard, joined_session(session, guard) as own:
            jobs += execute(own, _fire, (group,))
    return [session.get(model, key, populate_existing=True) for _, model, key in sorted(jobs, key=lambda job: job[0])]


def _fire(session: Session, group: ScheduleGroup) -> list[tuple[Any, type[Any], Any]]:
    """Fire what is due; return the tick, the class and the key of each job."""
    declare(session, group)
    found: list[tuple[Any, type[Any], Any]] = []
    while True:
        firing = fire(session, group)
        for _, error in firing.failed:
            raise error
        found += [(each.tick, type(each.job), each.key) for each in firing.fired if each.key is not None]
        if not firing.more:
            return found
