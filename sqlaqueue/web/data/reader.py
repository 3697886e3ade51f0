"""Read one queue for a page: by indexes unless a table is small, part by part, with reasons for what is missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Generic, TypeAlias, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.admin.jobs import bind_arguments
from sqlaqueue.consumer.core.errors import is_connection_lost
from sqlaqueue.exc import SqlaqueueError
from sqlaqueue.postgresql.catalog_text import quoted, table_name
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import sqlstate
from sqlaqueue.sql.types import object_name
from sqlaqueue.web.data.engines import Pages, pages_of


class ParameterError(ValueError):
    """A parameter of a request that is malformed; the problem repeats no more of the value than a reader needs."""

    def __init__(self, parameter: str, problem: str) -> None:
        super().__init__(f"{parameter}: {problem}")
        self.parameter, self.problem = parameter, problem


T = TypeVar("T")

WITHOUT_SAVEPOINTS = "sqlaqueue_without_savepoints"
"""The key in ``session.info`` of a session that reads its parts without savepoints, as long as none fails.

The two statements of a savepoint take as long as many of the parts."""

_PROBLEMS = {
    "0A000": "The server does not execute this statement. Citus does not if a table is distributed by a column.",
    "57014": "Reading this took too long, so it was cancelled.",
    "55P03": "A table is locked by another session, so this cannot be read.",
    "42P01": "A table is missing. Run the migrations of the application: alembic upgrade head.",
    "42703": (
        "A column is missing. If a newer version of the program has dropped it, restart this process with that "
        "version; otherwise run the migrations of the application: alembic upgrade head."
    ),
    "42501": "The role of the dashboard has no right to read this.",
    "25006": "The role of the dashboard may only read, and this needs to lock a row for a moment.",
}


@dataclass(frozen=True)
class Part(Generic[T]):
    value: T | None = None
    problem: str = ""


class PartFailedError(Exception):
    """A part cannot be read, in a session without savepoints: all of them are to be read again with savepoints."""


def attempt_part(session: Session, operation: Callable[..., T], *args: Any) -> Part[T]:
    """Return ``operation(session, *args)``, executed in a savepoint; or the problem.

    :raises DBAPIError: if the connection is lost, as nothing else can be read then.
    :raises PartFailedError: instead of returning the problem, in a session that tries without savepoints.
    """
    is_tried = WITHOUT_SAVEPOINTS in session.info
    try:
        with session.no_autoflush, nullcontext() if is_tried else session.begin_nested():
            return Part(operation(session, *args))
    except (DBAPIError, SqlaqueueError) as error:
        if is_connection_lost(error):
            raise
        if is_tried:
            raise PartFailedError from error
        return Part(problem=problem_text(error))


def problem_text(error: Exception) -> str:
    """Return in one sentence why something cannot be read, and what to do about it."""
    if isinstance(error, SqlaqueueError):
        return f"{error}"
    state = sqlstate(error) if isinstance(error, DBAPIError) else None
    if state in _PROBLEMS:
        return _PROBLEMS[state]
    # Not the text of the error: it may contain values of redacted columns.
    return f"This cannot be read (SQLSTATE {state})." if state else "This cannot be read; the log says why."


_LOCK_TIMEOUT = "500ms"
"""For how long a statement waits for a lock: a table is locked for a moment, or for long."""

GIVE_UP_AFTER = 0.4
"""The seconds after which a part that fails is the last one: the others would most likely wait as long, for the same
lock or the same server."""

SMALL_TABLE = 8 * 1024**2
"""The size in bytes up to which a table is read whole; that takes a few milliseconds."""

_PLANS = {"enable_bitmapscan": "off", "enable_seqscan": "off", "enable_sort": "off", "jit": "off"}
"""With them the first entries of an index are read in its order wherever there is such an index, whatever the planner's
statistics say. Where there is none, the cost of the plan would make the server compile it, which takes long."""


REMEMBERED = 60.0
"""For how many seconds it is remembered which indexes there are, and whether a table is small."""

Memory: TypeAlias = dict[tuple[str, str], tuple[float, bool]]
"""What is remembered of the queues of one dashboard: until when, and the answer, by queue and question."""


@dataclass
class QueueReader:
    session: Session
    spec: QueueSpec
    now: datetime
    """The server's clock when the reader was made."""
    memory: Memory
    has_given_up: bool = False

    @classmethod
    def begin(cls, session: Session, spec: QueueSpec, memory: Memory | None = None) -> QueueReader:
        """Return the reader of a queue, and set what it needs until the end of the transaction."""
        settings = {**_PLANS, "lock_timeout": _LOCK_TIMEOUT}
        now = pages_of(session, spec.mapper).begin(session, settings, bind_arguments(spec.model))
        return cls(session, spec, now.astimezone(UTC), {} if memory is None else memory)

    @property
    def pages(self) -> Pages:
        return pages_of(self.session, self.spec.mapper)

    def part(self, read: Callable[[], T]) -> Part[T]:
        if self.has_given_up:
            return Part(problem="This was not read, since what came before took too long.")
        began = time.monotonic()
        part = attempt_part(self.session, lambda _: read())
        self.has_given_up = bool(part.problem) and time.monotonic() > began + GIVE_UP_AFTER
        return part

    @property
    def connection(self) -> sa.Connection:
        return self.session.connection(bind_arguments=bind_arguments(self.spec.model))

    def execute(self, statement: Any) -> Any:
        return self.session.execute(statement, bind_arguments=bind_arguments(self.spec.model))

    @property
    def is_small(self) -> bool:
        return self._remembered("small", lambda: self.pages.is_small(self.connection, self.spec.table, SMALL_TABLE))

    def is_bounded(self, question: str, statement: Any) -> bool:
        """Return whether a SELECT with a LIMIT reads no more rows than it returns, by its plan.

        Every table is read by an index, in its order; no row is read that is left out afterwards, and none is sorted.

        :param question: a name of the statement, by which the answer is remembered.
        """
        return self._remembered(question, lambda: self.pages.is_bounded(self.connection, statement))

    def _remembered(self, question: str, ask: Callable[[], bool]) -> bool:
        key, now = (self.spec.name, question), time.monotonic()
        until, answer = self.memory.get(key, (0.0, False))
        if until < now:
            answer = ask()
            self.memory[key] = now + REMEMBERED, answer
        return answer


HISTORY = "attempt_history=timedelta(days=14)"
"""The option that turns the attempt history on."""


@dataclass(frozen=True, kw_only=True)
class Fix:
    what: str
    code: str
    """Python or SQL, to be copied."""


@dataclass(frozen=True, kw_only=True)
class Unavailable:
    """A number that is not read, as that would read a whole table."""

    reason: str
    fixes: tuple[Fix, ...] = ()


def attempt_history_fix(spec: QueueSpec) -> Fix:
    return Fix(
        what=f"Keep the attempts of {spec.model.__name__}, and migrate the database.",
        code=f"__queue__ = QueueConfig(..., {HISTORY})",
    )


def finished_index_fix(reader: QueueReader) -> Fix:
    """Return the SQL of an index that has the finished jobs of each state by time."""
    spec = reader.spec
    status, finished = (quoted(spec.columns[role].name) for role in ("status", "finished_at"))
    states = [state for state in FINISHED if getattr(spec.config.states, state) is not None]
    condition = " OR ".join(f"{status} = {spec.literal(state)}" for state in states)
    name = quoted(object_name("ix", spec.table.name, "finished"))
    table = table_name(reader.connection, spec.table)
    return Fix(
        what="Create an index of finished jobs, which has no entry for pending ones.",
        code=f"CREATE INDEX CONCURRENTLY {name} ON {table} ({status}, {finished})\n    WHERE {condition};",
    )
