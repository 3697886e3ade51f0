"""Writes ended attempts into the attempt history of a queue, in the transaction that settles their runs."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.consumer.errors import ascii_text, is_transient, text_of
from sqlaqueue.consumer.outcomes import FinishedRun, NotSettled
from sqlaqueue.consumer.settings import ConsumerSettings
from sqlaqueue.exc import HandlerSignal, Snooze, Throttle, WorkerDied
from sqlaqueue.log import fields, logger
from sqlaqueue.postgresql.side_tables import key_json
from sqlaqueue.queue.names import ATTEMPT
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.sql.engine import own_work
from sqlaqueue.sql.errors import violated_constraint, violated_table
from sqlaqueue.sql.types import guarded, numbered_rows
from sqlaqueue.statements.verbs import storable

TRACEBACK_LIMIT = 10_000
"""The length of a traceback in characters; of a longer one the middle is left out."""

_WARN_EVERY = 60.0
"""Seconds between two warnings that the history cannot be written."""

_LOCK_TIMEOUT = "500ms"
"""The longest time to wait for a lock on the table. The settlement has locked jobs, whose leases are not extended."""

_WORKER, _LOCK_TIMEOUT_BEFORE = "sqlaqueue_worker", "sqlaqueue_lock_timeout"
_MICROSECOND = timedelta(microseconds=1)


class AttemptHistory:
    """The attempt history of one Consumer's queue; without ``QueueConfig(attempt_history=...)`` it does nothing."""

    def __init__(self, settings: ConsumerSettings) -> None:
        self._settings, self._spec, self._bind = settings, settings.spec, settings.bind_arguments
        self.is_kept = ATTEMPT in settings.spec.side_tables
        """Whether the queue has a history."""
        # Nearly all runs are completed, and have no error.
        leased = settings.has_leases
        self._completed = _insert(self._spec, with_errors=False, leased=leased) if self.is_kept else None
        self._ended = _insert(self._spec, with_errors=True, leased=leased) if self.is_kept else None
        self._deferred: frozenset[str] = frozenset()
        """The constraints of the table that a commit has found violated; replaced, as several threads read it."""
        self._warned_at: float | None = None

    def record(self, session: Session, settled: Sequence[FinishedRun]) -> None:
        """Insert a row for each of these runs that is an attempt.

        If that fails, the runs are settled all the same: their settlement is in the same transaction, so the INSERT
        has a savepoint. A conflict or a lost connection is raised, as it ends the transaction.
        """
        attempts = [one for one in settled if _is_attempt(one)] if self.is_kept else ()
        if not attempts:
            return
        try:
            statement, values = self._statement(attempts)
            connection = session.connection(bind_arguments=self._bind)
            try:
                self._insert(connection, statement, values)
            except Exception as error:
                texts = {name: _in_ascii(values.get(name)) for name in ("error", "traceback")}
                if is_transient(error) or all(values.get(name) == text for name, text in texts.items()):
                    raise
                # The database may not store a character.
                self._insert(connection, statement, values | texts)
        except Exception as error:
            if is_transient(error):
                raise
            if not (isinstance(error, DBAPIError) and violated_constraint(error)):
                # Such as a constraint that was dropped.
                self._deferred = frozenset()
            self.warn(error)

    def _insert(self, connection: sa.Connection, statement: Any, values: dict[str, Any]) -> None:
        with own_work():
            savepoint = connection.begin_nested()
        with savepoint:
            if self._settings.has_leases:
                values[_LOCK_TIMEOUT_BEFORE] = connection.execute(_LIMIT_LOCKS).one()[0]
            connection.execute(statement, values)
            self._check_deferred(connection)

    def _check_deferred(self, connection: sa.Connection) -> None:
        deferred = self._deferred
        if deferred:
            schema = connection.schema_for_object(self._spec.side_tables[ATTEMPT])
            quote = connection.dialect.identifier_preparer.quote_identifier
            names = [".".join(map(quote, [schema, name] if schema else [name])) for name in sorted(deferred)]
            connection.exec_driver_sql(f"SET CONSTRAINTS {', '.join(names)} IMMEDIATE")

    @contextlib.contextmanager
    def checked_at_commit(self) -> Iterator[None]:
        """Tell a deferred constraint of the history that a commit finds violated from an error of the jobs.

        From then on such a constraint is checked in the savepoint of the INSERT, where it costs no settlement.

        :raises NotSettled: in place of the error of the commit.
        """
        try:
            yield
        except DBAPIError as error:
            name = violated_constraint(error)
            if not self.is_kept or name is None or violated_table(error) != ATTEMPT:
                raise
            self._deferred |= {name}
            msg = f"a constraint of the attempt history was violated: {error.orig}"
            raise NotSettled(msg) from error

    def warn(self, error: Exception) -> None:
        """Log that attempts could not be written, at most once a minute."""
        now = time.monotonic()
        if self._warned_at is not None and now - self._warned_at < _WARN_EVERY:
            return
        self._warned_at = now
        kind, queue = type(error).__name__, self._spec.name
        extra = fields("history_failed", queue=queue, worker=self._settings.worker(), error_kind=kind)
        text = "queue %s: the attempt history could not be written, the jobs are settled without it: %s: %s"
        logger.warning(text, queue, kind, str(error).strip().partition("\n")[0], extra=extra)

    def _statement(self, attempts: Sequence[FinishedRun]) -> tuple[Any, dict[str, Any]]:
        """Return the INSERT for these attempts, with its parameters."""
        now = time.monotonic()
        runs = [one.run for one in attempts]
        # Keys of different types cannot be one array, so each part of a key is one.
        values: dict[str, Any] = {
            f"key_{number}": list(part) for number, part in enumerate(zip(*(run.key for run in runs), strict=True))
        }
        values |= {
            "attempt": [_number(one) for one in attempts],
            "started_ago": [_ago(now, run.handler_started_at) for run in runs],
            "ended_ago": [_ago(now, _ended_at(run.handler_started_at, run.duration, now)) for run in runs],
            _WORKER: self._settings.worker(),
        }
        if all(one.outcome.event == "completed" for one in attempts):
            return self._completed, values
        # A program may raise one exception for many jobs.
        tracebacks: dict[int, str | None] = {}
        for cause in (one.outcome.cause for one in attempts):
            if cause is not None and id(cause) not in tracebacks:
                tracebacks[id(cause)] = traceback_text(cause)
        return self._ended, values | {
            "outcome": [one.ended_as.event for one in attempts],
            "error": [_error(one) for one in attempts],
            "traceback": [tracebacks.get(id(one.outcome.cause)) for one in attempts],
            "worker": [None if _died(one) else values[_WORKER] for one in attempts],
        }


_LIMIT_LOCKS: Any = sa.select(
    sa.func.current_setting("lock_timeout"), sa.func.set_config("lock_timeout", _LOCK_TIMEOUT, sa.true())
)


def _insert(spec: QueueSpec, *, with_errors: bool, leased: bool) -> Any:
    """Return the INSERT of attempts whose values are given as arrays.

    :param with_errors: False if all of them are completed.
    :param leased: whether it restores the timeout of locks that was set for it.
    """
    keys = [f"key_{number}" for number in range(len(spec.keys))]
    columns: dict[str, tuple[Any, None]] = {
        **{name: (key.type, None) for name, key in zip(keys, spec.keys, strict=True)},
        "attempt": (sa.Integer(), None),
        # Numbers are sent as one text, which is faster than an array of times.
        "started_ago": (sa.BigInteger(), None),
        "ended_ago": (sa.BigInteger(), None),
    }
    if with_errors:
        columns |= {name: (sa.Text(), None) for name in ("worker", "outcome", "error", "traceback")}
    given = numbered_rows(columns, "number").c
    values = {
        "queue": sa.literal(spec.name, sa.Text()),
        "key": key_json([given[name] for name in keys]),
        "attempt": given.attempt,
        # By the database's clock: that of this machine measures only how long ago it was.
        "started_at": _before(given.started_ago),
        "ended_at": _before(given.ended_ago),
        "worker": given.worker if with_errors else sa.bindparam(_WORKER, type_=sa.Text()),
        "outcome": given.outcome if with_errors else sa.literal("completed", sa.Text()),
    }
    if with_errors:
        values |= {"error": given.error, "traceback": given.traceback}
    insert: Any = sa.insert(spec.side_tables[ATTEMPT]).from_select(list(values), sa.select(*values.values()))
    if leased:
        # Not by a statement of its own, which would be one more for each settlement.
        before = sa.bindparam(_LOCK_TIMEOUT_BEFORE, type_=sa.Text())
        insert = insert.returning(sa.func.set_config("lock_timeout", before, sa.true()))
    return guarded(insert)


def _before(microseconds: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    # SQLAlchemy has no product of a number and an interval.
    return clock() - microseconds.op("*", return_type=sa.Interval())(sa.literal(_MICROSECOND, sa.Interval()))


def _is_attempt(one: FinishedRun) -> bool:
    """Return whether a settled run is an attempt: released before its handler was called, it is none."""
    return one.outcome.event != "released" or one.run.handler_started_at is not None


def _died(one: FinishedRun) -> bool:
    """Return whether a run stands for earlier ones whose worker died: its own handler is not called."""
    return one.run.handler_started_at is None and isinstance(one.outcome.cause, WorkerDied)


def _number(one: FinishedRun) -> int:
    # The run of such a job has counted its own start, which is none.
    return one.run.attempt - 1 if _died(one) else one.run.attempt


def _ended_at(started_at: float | None, duration: float | None, now: float) -> float:
    """Return when the handler returned; now, if it was not called or has not returned."""
    return now if started_at is None or duration is None else started_at + duration


def _ago(now: float, moment: float | None) -> int | None:
    return None if moment is None else max(0, round((now - moment) * 1e6))


def _in_ascii(texts: list[str | None] | None) -> list[str | None] | None:
    return None if texts is None else [None if text is None else ascii_text(text) for text in texts]


def _error(one: FinishedRun) -> str | None:
    """Return the text of an attempt's error: that of ``last_error``, or why the run was released."""
    ended = one.ended_as
    if one.twin is not None and one.outcome.error is not None:
        return storable(f"{ended.error}\n{one.outcome.error}")
    if ended.error is not None:
        return storable(ended.error)
    is_error = ended.cause is not None and not isinstance(ended.cause, HandlerSignal)
    return text_of(ended.cause) if is_error else None


def traceback_text(error: BaseException) -> str | None:
    """Return the traceback of an exception as a text that can be stored; None if it has none, or is no error."""
    if isinstance(error, Snooze | Throttle) or not (error.__traceback__ or error.__cause__ or error.__context__):
        return None
    try:
        text = storable("".join(traceback.format_exception(error)))
    except Exception:  # noqa: BLE001 - the attempt is recorded all the same
        return None
    if len(text) <= TRACEBACK_LIMIT:
        return text
    # The first lines name the cause, the last ones the error itself.
    half = TRACEBACK_LIMIT // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters left out)\n{text[-half:]}"
