"""How outcomes and ended attempts are written: operations that settle runs in a Session."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.consumer.core.errors import (
    ascii_text,
    is_duplicate,
    is_lock_or_timeout,
    is_transient,
    may_be_of_a_run,
    may_settle_later,
    text_of,
)
from sqlaqueue.consumer.notifications.polls import WaiterRegistry, notify_settled
from sqlaqueue.consumer.outcomes import COMPLETED, FinishedRun, NotSettled, Outcome, OutcomeRules
from sqlaqueue.consumer.sessions import IsolationLevel, check_rows, is_deleted, refuse_changed_rows
from sqlaqueue.consumer.settings import ConsumerSettings
from sqlaqueue.consumer.statements import EXPECTED, KEY, KEYS, LOCK_TIMEOUT, RUN_TOKEN, ConsumerStatements
from sqlaqueue.exc import HandlerSignal, Snooze, Throttle, WorkerDied
from sqlaqueue.flow_control.rates import hold_back
from sqlaqueue.log import fields, logger
from sqlaqueue.postgresql.claim_scan import LARGE_FOR_MANY, LARGE_FOR_ONE
from sqlaqueue.postgresql.side_tables import key_json
from sqlaqueue.queue.names import ATTEMPT
from sqlaqueue.queue.run import Key, key_text, key_value, keys_by_token, keys_from
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import (
    OURS,
    SETTLES,
    engine_of,
    may_be_other_engine,
    own_work,
    violated_constraint,
    violated_table,
)
from sqlaqueue.sql.portable import Span, clock, earlier, set_setting, setting
from sqlaqueue.sql.types import as_library_statement, numbered_rows
from sqlaqueue.statements.selection import returning_keys
from sqlaqueue.statements.verbs import settle_statement, storable, with_run_details
from sqlaqueue.strategies import ClaimedJobs, Verb
from sqlaqueue.strategies.unique_key import unique_key

LOCK_TIMEOUT_ONE_BY_ONE = "10ms"
"""The longest time to wait for a lock for one job of many, each of which may have a duplicate in that transaction."""

TRACEBACK_LIMIT = 10_000
"""The length of a traceback in characters; of a longer one the middle is left out."""

_LOOK_EVERY = 3.0
"""Seconds between two questions whether a table is large: for so long a plan for a small one may be in use."""

_WARN_EVERY = 60.0
"""Seconds between two warnings that the history cannot be written."""

_WORKER, _LOCK_TIMEOUT_BEFORE = "sqlaqueue_worker", "sqlaqueue_lock_timeout"
_MICROSECOND = timedelta(microseconds=1)


class AttemptHistory:
    """The attempt history of one Consumer's queue; without ``QueueConfig(attempt_history=...)`` it does nothing."""

    def __init__(self, settings: ConsumerSettings) -> None:
        self._settings, self._spec, self._bind = settings, settings.spec, settings.bind_arguments
        self.is_kept = ATTEMPT in settings.spec.side_tables
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
        """Raise NotSettled if the commit finds a deferred constraint of the history violated, and no error of the jobs.

        From then on such a constraint is checked in the savepoint of the INSERT, where it costs no settlement.
        """
        try:
            yield
        except DBAPIError as error:
            name = violated_constraint(error)
            if name is None or violated_table(error) != ATTEMPT:
                raise
            self._deferred |= {name}
            msg = f"a constraint of the attempt history was violated: {error.orig}"
            raise NotSettled(msg) from error

    def warn(self, error: Exception) -> None:
        now = time.monotonic()
        if self._warned_at is not None and now - self._warned_at < _WARN_EVERY:
            return
        self._warned_at = now
        kind, queue = type(error).__name__, self._spec.name
        extra = fields("history_failed", queue=queue, worker=self._settings.worker(), error_kind=kind)
        text = "queue %s: the attempt history could not be written, the jobs end without it: %s: %s"
        logger.warning(text, queue, kind, str(error).strip().partition("\n")[0], extra=extra)

    def _statement(self, attempts: Sequence[FinishedRun]) -> tuple[Any, dict[str, Any]]:
        now = time.monotonic()
        runs = [one.run for one in attempts]
        # Keys of different types cannot be one array, so each part of a key is one.
        values: dict[str, Any] = {
            f"key_{number}": list(part) for number, part in enumerate(zip(*(run.key for run in runs), strict=True))
        }
        values |= {
            "attempt": [run.attempt for run in runs],
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
            "worker": [None if _died(one) else one.run.worker or values[_WORKER] for one in attempts],
        }


_LIMIT_LOCKS: Any = sa.select(setting("lock_timeout"), set_setting("lock_timeout", LOCK_TIMEOUT))


def _insert(spec: QueueSpec, *, with_errors: bool, leased: bool) -> Any:
    """Return the INSERT of attempts given as arrays; if ``leased``, it restores the timeout of locks set for it."""
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
        insert = insert.returning(set_setting("lock_timeout", before))
    return as_library_statement(insert)


def _before(microseconds: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    # SQLAlchemy has no product of a number and an interval.
    return earlier(clock(), microseconds.op("*", return_type=Span())(sa.literal(_MICROSECOND, Span())))


def _is_attempt(one: FinishedRun) -> bool:
    """Return whether a settled run is an attempt: released before its handler was called, it is none."""
    return one.outcome.event != "released" or one.run.handler_started_at is not None


def _died(one: FinishedRun) -> bool:
    """Return whether a run stands for earlier ones whose worker died: its own handler is not called."""
    return one.run.handler_started_at is None and isinstance(one.outcome.cause, WorkerDied)


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
    if one.duplicate is not None and one.outcome.error is not None:
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


def commit_settlements(session: Session, finished: Sequence[FinishedRun]) -> None:
    """Commit what settles runs. If the connection drops before the reply, their settlement is uncertain."""
    # Not earlier: a run whose statements failed before the commit is not settled here, and another worker may have
    # settled it by the time it is tried again.
    for one in finished:
        one.uncertain = True
    session.commit()


def really_lost(
    session: Session, spec: QueueSpec, lost: Sequence[FinishedRun], bind_arguments: dict[str, Any]
) -> list[FinishedRun]:
    """Return those of ``lost`` whose lease was lost indeed, not settled by a commit without a reply."""
    keys = [one.run.key for one in lost]
    attempts = spec.columns.get("attempts", sa.null())
    statement = sa.select(spec.columns["status"], attempts, *spec.keys).where(spec.key_in(spec.keys, keys))
    found: Any = session.execute(statement, bind_arguments=bind_arguments)
    rows = {tuple(row[2:]): (row[0], row[1]) for row in found}
    completed = spec.status_value("completed")
    if_gone = completed if spec.config.on_complete == "delete" else None
    lost_indeed = []
    for one in lost:
        state, attempt = rows.get(one.run.key, (if_gone, None))
        # Another worker has claimed the job since, so the commit did not take place, and the result is its own.
        is_taken_over = attempt is not None and attempt > one.run.attempt
        if not one.uncertain or is_taken_over:
            lost_indeed.append(one)
        elif state == completed:
            one.outcome = COMPLETED
        elif state != spec.status_value(one.outcome.state):
            lost_indeed.append(one)
    return lost_indeed


BESIDE_ORM = {"synchronize_session": False}
"""Consumers settle beside the ORM: the instances are not used any more."""


def execute_for_keys(session: Session, settings: ConsumerSettings, verb: Verb) -> list[Key]:
    """Execute what changes jobs beside the ORM, and return their keys."""
    statement = returning_keys(settings.spec, verb)
    found = session.execute(statement, execution_options=BESIDE_ORM, bind_arguments=settings.bind_arguments)
    return keys_from(found.scalars(), len(settings.spec.keys))


def extend_claims(
    session: Session, settings: ConsumerSettings, claims: Sequence[tuple[Any, Sequence[Key]]]
) -> list[Key]:
    """Let the leases of claims end a whole lease from now, and return the keys; rows that others lock are skipped.

    :param claims: the token of each claim, and the keys of its jobs.
    """
    lease = sa.literal(settings.lease, Span())
    return execute_for_keys(session, settings, settings.spec.strategy.extend(settings.spec, ClaimedJobs(claims), lease))


class SettledEach(NamedTuple):
    """The runs that were not settled, of those that were to be settled one by one."""

    lease_lost: list[FinishedRun]
    refused: list[FinishedRun]
    later: list[FinishedRun]
    """Runs whose rows another transaction has locked; they are settled later."""


class Settler:
    """Settles the runs of one consumer; its methods are operations on a Session."""

    def __init__(
        self,
        settings: ConsumerSettings,
        statements: ConsumerStatements,
        outcome_rules: OutcomeRules,
        waiters: WaiterRegistry,
        isolation: IsolationLevel,
    ) -> None:
        self._settings, self._statements, self._rules = settings, statements, outcome_rules
        self._waiters, self._isolation = waiters, isolation
        self._spec, self._bind = settings.spec, settings.bind_arguments
        self.history = AttemptHistory(settings)
        unique = unique_key(self._spec)
        self._pages, self._looked_at = 0.0, float("-inf")
        """Whether the table of the jobs is large enough for plans that are kept; and when that was asked."""
        self.limits_locks = True
        """Whether settlements limit how long they wait for locks; not in a transaction of a test, which is its own."""
        self._may_meet_duplicates = unique is not None and unique.returns_from_runs
        """Whether a run that becomes pending may meet a duplicate, and may have to wait for an uncommitted one."""
        self._cancels_for_duplicates = unique is not None and unique.config.on_return == "cancel"

    def settle(self, session: Session, finished: Sequence[FinishedRun], *, limited: bool = False) -> list[FinishedRun]:
        """Write how runs ended; return those whose lease was lost, about which nothing was changed.

        :param limited: whether to wait for locks for a moment only, if all of them are completed.
        """
        lost: list[FinishedRun] = []
        for group in _by_outcome(finished):
            settled = self._settle_alike(session, group, limited=limited)
            if len(settled) < len(group):
                keys = set(settled)
                lost += [one for one in group if one.run.key not in keys]
            throttle = group[0].outcome.throttle
            if throttle is not None and settled:
                for statement in hold_back(self._spec, throttle, settled, group[0].outcome.delay or 0.0):
                    session.execute(statement, bind_arguments=self._bind)
            if group[0].outcome.state != "pending":
                notify_settled(session, self._spec, self._waiters, settled)
            elif self._cancels_for_duplicates:
                notify_settled(session, self._spec, self._waiters, [one.run.key for one in group if one.duplicate])
        if self.history.is_kept:
            self.history.record(session, self._settled(finished, lost))
        return lost

    def _settled(self, finished: Sequence[FinishedRun], lost: Sequence[FinishedRun]) -> Sequence[FinishedRun]:
        if not lost:
            return finished
        # The row of a job that its handler has deleted is not found in a held transaction, and it is settled by that.
        held, missing = self._settings.holds_transaction, set(lost)
        return [one for one in finished if one not in missing or (held and one.job is not None and is_deleted(one.job))]

    def _settle_alike(self, session: Session, group: Sequence[FinishedRun], *, limited: bool) -> list[Key]:
        """Settle runs with the same outcome, and return the keys of those that were still claimed."""
        spec, first = self._spec, group[0]
        is_usual = _is_usual(first) and self._statements.completes
        if is_usual and len(group) == 1 and not self._isolation.has_locked(session):
            return self._complete(session, first.run.token, [first.run.key], limited)
        claims = keys_by_token([one.run for one in group])
        if is_usual:
            done = self._isolation.complete_in_place(session, claims)
            if done:
                claims = {
                    token: left for token, keys in claims.items() if (left := [key for key in keys if key not in done])
                }
            return done + [
                key for token, keys in claims.items() for key in self._complete(session, token, keys, limited)
            ]
        # Only rows that the claim deleted are inserted again from their instances.
        jobs = () if spec.strategy.keeps_rows else [one.job for one in group]
        settlement = first.outcome.settlement(first.starts)
        worker = first.run.worker or self._settings.worker()
        settlement = with_run_details(spec, settlement, [one.run for one in group], worker)
        statement = settle_statement(spec, ClaimedJobs(list(claims.items()), jobs), settlement)
        found = session.execute(statement, execution_options=BESIDE_ORM, bind_arguments=self._bind)
        if not self._cancels_for_duplicates or first.outcome.state != "pending":
            return keys_from(found.scalars(), len(spec.keys))
        rows = found.all()
        settled = keys_from([row[0] for row in rows], len(spec.keys))
        named = zip(settled, rows, strict=True) if rows and len(rows[0]) > 1 else ()
        duplicates = {key: row.duplicate for key, row in named}
        for one in group:
            one.duplicate = duplicates.get(one.run.key)
        return settled

    def _complete(self, session: Session, token: Any, keys: list[Key], limited: bool) -> list[Key]:  # noqa: FBT001 - private
        one, bound = len(keys) == 1, {RUN_TOKEN: token}
        if one:
            bound |= {f"{KEY}_{number}": part for number, part in enumerate(keys[0])}
        else:
            bound |= {KEYS: self._spec.bind_keys(keys), EXPECTED: len(keys)}
        kept = self._pages >= (LARGE_FOR_ONE if one else LARGE_FOR_MANY)
        connection = session.connection(bind_arguments=self._bind)
        plain = engine_of(connection.dialect) is not None
        statement = self._statements.complete(one=one, kept=kept, limited=limited, plain=plain)
        # Without the ORM, which would do nothing for this statement.
        found = connection.execute(statement, bound)
        if one:
            return keys if found.rowcount else []
        rows = found.all()
        if plain:
            return [tuple(row) for row in rows]
        number = rows[0][0]
        return keys if number == len(keys) else [tuple(row[1:]) for row in rows if number]

    def look_at_table(self, session: Session) -> None:
        """Ask now and then how large the table of the jobs is: whether plans may be kept."""
        now = time.monotonic()
        if self._statements.completes and now - self._looked_at > _LOOK_EVERY:
            self._looked_at = now
            connection = session.connection(bind_arguments=self._bind)
            others = engine_of(connection.dialect) is not None
            self._pages = float("inf") if others else connection.scalar(self._statements.pages) or 0

    def settle_and_commit(
        self, session: Session, finished: Sequence[FinishedRun], *, lock_timeout: str = LOCK_TIMEOUT
    ) -> list[FinishedRun]:
        """Settle runs in a transaction; return those whose lease was lost."""
        try:
            lost = self.settle_again(session, finished, lock_timeout=lock_timeout)
            self.commit(session, finished)
        except NotSettled:
            session.rollback()
            lost = self.settle_again(session, finished, lock_timeout=lock_timeout)
            self.commit(session, finished)
        return lost

    def commit(self, session: Session, finished: Sequence[FinishedRun] = ()) -> None:
        """Commit what settles runs; raise NotSettled if only the attempt history cannot be committed."""
        if not self.history.is_kept:
            commit_settlements(session, finished)
            return
        with self.history.checked_at_commit():
            commit_settlements(session, finished)

    def settle_again(
        self, session: Session, finished: Sequence[FinishedRun], *, lock_timeout: str = LOCK_TIMEOUT
    ) -> list[FinishedRun]:
        """Do what :meth:`settle` does, and check runs whose earlier commit had no reply: they may be settled.

        It waits for a moment at most: for rows that others have locked, and for a duplicate that another transaction
        has enqueued and not committed. Other jobs must not wait for these.
        """
        limits_itself = (
            self.limits_locks
            and lock_timeout == LOCK_TIMEOUT
            and self._statements.completes
            and not [one for one in finished if one.outcome is not COMPLETED or one.starts != 1]
        )
        if self.limits_locks and not limits_itself:
            limit: Any = sa.text(f"SET LOCAL lock_timeout = '{lock_timeout}'").execution_options(**{OURS: True})
            if may_be_other_engine() and engine_of(session.connection(bind_arguments=self._bind).dialect) is not None:
                limit = sa.select(set_setting("lock_timeout", lock_timeout))
            session.execute(limit, bind_arguments=self._bind)
        lost = self.settle(session, finished, limited=limits_itself)
        if not any(one.uncertain for one in lost):
            return lost
        return really_lost(session, self._spec, lost, self._bind)

    def has_met_duplicate(self, error: BaseException) -> bool:
        """Return whether an error of a settlement is about a duplicate that was not committed when it began."""
        return self._may_meet_duplicates and (is_lock_or_timeout(error) or is_duplicate(error, self._spec))

    def _may_meet_duplicate(self, finished: Sequence[FinishedRun]) -> bool:
        return self._may_meet_duplicates and any(one.outcome.state == "pending" for one in finished)

    def settle_each(self, session: Session, finished: Sequence[FinishedRun], *, otherwise: bool = True) -> SettledEach:
        """Settle runs one by one, so that one that cannot be settled does not block the others.

        :param otherwise: whether to settle a run in another way if the database refuses its outcome.
        """
        result = SettledEach([], [], [])
        for one in finished:
            # The others must not wait for one transaction again and again.
            limit = LOCK_TIMEOUT_ONE_BY_ONE if self._may_meet_duplicate([one]) else LOCK_TIMEOUT
            try:
                result.lease_lost.extend(self.settle_and_commit(session, [one], lock_timeout=limit))
            except Exception as error:
                session.rollback()
                if is_lock_or_timeout(error) or is_duplicate(error, self._spec):
                    result.later.append(one)
                    continue
                if not may_be_of_a_run(error):
                    raise
                run = one.run
                extra = fields(
                    "settling_refused",
                    queue=self._spec.name,
                    worker=self._settings.worker(),
                    job_key=key_value(run.key),
                    attempt=run.attempt,
                    max_attempts=run.max_attempts,
                )
                text = "queue %s: job %s cannot be stored as %s: %s"
                logger.warning(text, self._spec.name, key_text(run.key), one.outcome.event, error, extra=extra)
                lost = self._settle_otherwise(session, one, error) if otherwise else None
                if lost is None:
                    result.refused.append(one)
                else:
                    result.lease_lost.extend(lost)
        return result

    def _settle_otherwise(self, session: Session, one: FinishedRun, error: Exception) -> list[FinishedRun] | None:
        """Settle a run whose outcome is refused; return it if its lease was lost, None if that is impossible."""
        for other in self.other_outcomes(one, error):
            one.outcome = other
            try:
                return self.settle_and_commit(session, [one])
            except Exception as again:
                session.rollback()
                if not may_be_of_a_run(again):
                    raise
        return None

    def other_outcomes(self, one: FinishedRun, error: BaseException | None) -> Iterator[Outcome]:
        """Yield what to write, one after the other, if the database refuses the outcome of a run.

        A success becomes a failed attempt. The text of an error is written in ASCII, which every database stores, and
        then left out.
        """
        outcome = one.outcome
        if outcome is COMPLETED:
            outcome = self._rules.outcome(error, one.run)
            yield outcome
        if outcome.error is not None:
            stack = outcome.traceback
            if not (outcome.error.isascii() and (stack or "").isascii()):
                stack = None if stack is None else ascii_text(stack)
                yield outcome._replace(error=ascii_text(outcome.error), traceback=stack)
            outcome = outcome._replace(traceback=None)
            yield outcome._replace(error=None)

    def complete_and_commit(self, session: Session, finished: Sequence[FinishedRun]) -> list[FinishedRun]:
        """Commit a handler's writes together with the completion of its jobs, or neither.

        :return: the runs whose lease was lost; if there is one, everything was rolled back.
        """
        # The fence needs the row: the row of a job that its handler deletes is there until the flush.
        deleted, lost = [one for one in finished if one.job in session.deleted], list[FinishedRun]()
        if deleted:
            with session.no_autoflush:
                lost = self._settle_beside(session, deleted)
        if not lost:
            misuse = check_rows(session, self._spec, [one.job for one in finished], [one.run for one in finished])
            if misuse is not None:
                raise misuse
            # Not before the flush: what it writes may depend on what the handler has read.
            gone = [one for one in finished if is_deleted(one.job)]
            settles = SETTLES.set(True)
            try:
                left = [one for one in finished if one not in gone] if gone else finished
                lost = self._settle_beside(session, left)
                if gone:
                    # Their rows went with a flush of the handler, so there is nothing else to settle.
                    self.history.record(session, [one for one in gone if one not in deleted])
            finally:
                SETTLES.reset(settles)
        if not lost:
            self.commit(session, finished)
            return lost
        refuse_changed_rows(session, self._spec, [one.run for one in lost])
        return lost

    def _settle_beside(self, session: Session, finished: Sequence[FinishedRun]) -> list[FinishedRun]:
        """Settle runs in the transaction of their handler.

        An outcome that cannot be written now, such as for a lock, is told from an error of the handler's statements.
        """
        try:
            return self.settle(session, finished)
        except DBAPIError as error:
            if may_settle_later(error) and not is_transient(error):
                msg = f"the outcome of the run could not be written: {error.orig}"
                raise NotSettled(msg) from error
            raise


def _is_usual(one: FinishedRun) -> bool:
    return one.outcome is COMPLETED and one.starts == 1


def _by_outcome(finished: Sequence[FinishedRun]) -> list[Sequence[FinishedRun]]:
    if len(finished) == 1:
        return [finished]
    groups: dict[Any, list[FinishedRun]] = {}
    # Nearly all succeed, and there are many.
    usual = [one for one in finished if one.outcome is COMPLETED and one.starts == 1]
    for one in finished if len(usual) < len(finished) else ():
        if not _is_usual(one):
            groups.setdefault((one.outcome._replace(cause=None), one.starts), []).append(one)
    return [group for group in (usual, *groups.values()) if group]


@contextlib.contextmanager
def without_expiring(session: Session) -> Iterator[None]:
    """Keep a commit from expiring instances: ``expire_on_commit`` would have each of them read again."""
    expires, session.expire_on_commit = session.expire_on_commit, False
    try:
        yield
    finally:
        session.expire_on_commit = expires
