"""For tests: of the jobs of an application, and of claim strategies.

The functions work in the transaction of a test's session, so that its rollback leaves the database as it was: which
jobs the code under test has enqueued (:func:`enqueued`), how a handler ends (:func:`run_job`, :func:`drain`), what
happens later (:func:`travel`), what schedules enqueue (:func:`fire_schedules`), and what follows a crash
(:func:`crash`). :func:`wait_until` is for workers that really run, and :func:`check_handlers` needs no database. All
but the last have an async version.

:class:`StrategyConformance` tests a claim strategy against its contract. Only it, and the fixtures of the pytest
plug-in in :mod:`sqlaqueue.testing.pytest_plugin`, need pytest.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from sqlaqueue.queue.retry_policies import Delay
from sqlaqueue.schedules.schedule import Schedule
from sqlaqueue.sessions import execute
from sqlaqueue.sql.engine import note_written_rows
from sqlaqueue.testing.drain import (
    RunResult,
    async_drain,
    async_run_job,
    crash,
    crash_in,
    drain,
    fire_in,
    fire_schedules,
    run_job,
)
from sqlaqueue.testing.enqueued import enqueued, travel
from sqlaqueue.testing.in_transaction import Jobs, resolve_session
from sqlaqueue.testing.wait_until import async_wait_until, check_handlers, wait_until

if TYPE_CHECKING:
    from sqlaqueue.testing.conformance import Gate, QueueUnderTest, StrategyConformance
    from sqlaqueue.testing.in_transaction import AnyAsyncSession

__all__ = [
    "Gate",
    "QueueUnderTest",
    "RunResult",
    "StrategyConformance",
    "async_crash",
    "async_drain",
    "async_enqueued",
    "async_fire_schedules",
    "async_run_job",
    "async_travel",
    "async_wait_until",
    "check_handlers",
    "crash",
    "drain",
    "enqueued",
    "fire_schedules",
    "run_job",
    "travel",
    "wait_until",
]

# Which jobs the transaction of a test has enqueued is noted from here on.
note_written_rows()

_CONFORMANCE = ("Gate", "QueueUnderTest", "StrategyConformance")


def __getattr__(name: str) -> Any:
    # Imported when it is used: an application may test its jobs with another framework than pytest.
    if name in _CONFORMANCE:
        return getattr(import_module("sqlaqueue.testing.conformance"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


T = TypeVar("T")


async def async_enqueued(session: AnyAsyncSession, model: Jobs[T], /, **columns: Any) -> list[T]:
    """The version of :func:`enqueued` for an AsyncSession.

    ::

        async_session.add(Email(to="grace@example.com"))  # what the code under test does
        (email,) = await async_enqueued(async_session, Email, to="grace@example.com")
    """
    own = resolve_session(session, "async_enqueued", is_async=True)
    jobs: list[T] = await own.run_sync(enqueued, model, **columns)
    return jobs


async def async_fire_schedules(session: AnyAsyncSession, schedules: Sequence[Schedule[Any] | type[Any]]) -> list[Any]:
    """The version of :func:`fire_schedules` for an AsyncSession.

    ::

        hourly = Schedule("hourly", Email, every=timedelta(hours=1), values={"to": "ada@example.com"})
        await async_fire_schedules(async_session, [hourly])
        await async_travel(async_session, timedelta(hours=1))
        (email,) = await async_fire_schedules(async_session, [hourly])
    """
    own = resolve_session(session, "async_fire_schedules", is_async=True)
    jobs: list[Any] = await own.run_sync(fire_in, schedules, "async_fire_schedules")
    return jobs


async def async_travel(session: AnyAsyncSession, delta: Delay) -> None:
    """The version of :func:`travel` for an AsyncSession.

    ::

        await async_travel(async_session, timedelta(days=1))
    """
    await resolve_session(session, "async_travel", is_async=True).run_sync(travel, delta)


async def async_crash(session: AnyAsyncSession, job: Any) -> None:
    """The version of :func:`crash` for an AsyncSession.

    ::

        email = await async_session.get_one(Email, 1)
        await async_crash(async_session, email)
    """
    own = resolve_session(session, "async_crash", is_async=True)
    await own.run_sync(execute, partial(crash_in, is_async=True), (job, "async_crash"))
