"""For tests: of the jobs of an application, and of claim strategies.

The functions work in the transaction of a test's session, so that its rollback leaves the database as it was: which
jobs the code under test has enqueued (:func:`enqueued`), how a handler ends (:func:`run_job`, :func:`drain`), what
happens later (:func:`travel`), what schedules enqueue (:func:`fire_schedules`), and what follows a crash
(:func:`crash`). :func:`wait_until` is for workers that really run, and :func:`check_handlers` needs no database. All
but the last have an async version.

:class:`StrategyConformance` tests a claim strategy against its contract. Only it, and the fixtures of the pytest
plug-in in :mod:`sqlaqueue.testing.pytest_plugin`, need pytest.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sqlaqueue.sql.engine import note_written_rows
from sqlaqueue.testing.async_versions import async_crash, async_enqueued, async_fire_schedules, async_travel
from sqlaqueue.testing.check_handlers import check_handlers
from sqlaqueue.testing.crash import crash
from sqlaqueue.testing.drain import async_drain, drain
from sqlaqueue.testing.enqueued import enqueued
from sqlaqueue.testing.fire_schedules import fire_schedules
from sqlaqueue.testing.run_job import async_run_job, run_job
from sqlaqueue.testing.run_result import RunResult
from sqlaqueue.testing.travel import travel
from sqlaqueue.testing.wait_until import async_wait_until, wait_until

if TYPE_CHECKING:
    from sqlaqueue.testing.conformance import Gate, QueueUnderTest, StrategyConformance

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
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
