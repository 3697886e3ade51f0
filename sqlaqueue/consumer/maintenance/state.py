"""What the maintenance tasks of one run share: their timers, and the state that they keep."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.settings import ConsumerSettings
from sqlaqueue.consumer.settle import BESIDE_ORM
from sqlaqueue.log import fields, logger
from sqlaqueue.postgresql.catalog import ForeignKey
from sqlaqueue.postgresql.checks_of import checks_of
from sqlaqueue.postgresql.claim_scan import planned_anew
from sqlaqueue.postgresql.ddl import UPDATE_COMMAND
from sqlaqueue.queue.names import DEAD_LETTER
from sqlaqueue.queue.retry_policies import seconds
from sqlaqueue.queue.run import Key, Run, key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.engine import engine_of
from sqlaqueue.sql.portable import Span, clock, converted, earlier, seconds_between, set_setting, ticking_clock
from sqlaqueue.statements.selection import returning_keys
from sqlaqueue.strategies.attach import index_name

# -- retention walk ----------------------------------------------------------------------------------------------------
# Deletes old finished jobs: a batch in each transaction, the oldest first.
#
# A walk goes through the jobs of one state by their age, from the oldest to those that are just old enough, and then
# waits for more to become old enough. It skips rows that are locked, and rows to which others refer. An hour later
# the next walk begins from the oldest again.


BATCH, FIRST_BATCH = 5_000, 500
"""How many rows one transaction deletes at most, and the first one of a Consumer: nothing is known then of triggers and
foreign keys, which may make a deletion slow."""

WALK = 3600.0
"""Seconds between two beginnings of a walk."""

MOST_SKIPPED = 100
"""How many jobs that cannot be deleted are remembered one by one."""

_LONG = 0.25
"""Seconds that the server may take for one batch before the next one is made smaller: other maintenance tasks wait
meanwhile. A batch of twice the size is tried only where that should not take longer either."""

_LONGEST = 2.0
_PARTS_OF_LEASE = 6
"""A batch may take at most the lease divided by this number, since the same thread extends leases."""


@dataclass(slots=True)
class Walk:
    """The walk through the finished jobs of one state, or through the attempts of a queue."""

    state: str
    age: timedelta
    limit: int = FIRST_BATCH
    since: datetime | None = None
    """All jobs that ended before have been processed."""
    skipped: list[Key] = field(default_factory=list)
    """Jobs that could not be deleted, and are not older than ``since``."""
    begins_at: float = float("-inf")

    is_new: bool = True
    """It has not come to its end yet."""

    def begin(self, now: float) -> None:
        self.since, self.begins_at, self.is_new = None, now + WALK, True
        self.skipped.clear()

    def end(self) -> bool:
        """Record that no job is left to delete; return whether that is so for the first time in this walk."""
        was_new, self.is_new = self.is_new, False
        return was_new

    def record_batch(self, reached: datetime | None, bound: datetime | None, took: float, *, more: bool) -> None:
        """Record a batch: up to when all jobs are processed, if known, and before when a job had to end.

        :param took: for how many seconds the server was busy with it.
        """
        self.since = (reached if more else bound) or self.since
        if took > _LONG:
            self.limit = max(1, self.limit // 2)
        elif took <= _LONG / 2:
            self.limit = min(BATCH, self.limit * 2)

    def record_error(self) -> bool:
        """Record that a batch could not be deleted; return whether it was a single job, which then is the cause."""
        alone = self.limit == 1
        self.limit = max(1, self.limit // 2)
        return alone

    def skip(self, key: Key, ended_at: datetime) -> bool:
        """Skip a job; return whether to pause, for there are more of these than can be remembered."""
        self.skipped.append(key)
        if len(self.skipped) < MOST_SKIPPED:
            return False
        self.since = ended_at + timedelta(microseconds=1)
        self.skipped.clear()
        return True


class Deleted(NamedTuple):
    """What a batch has deleted.

    :param number: how many rows.
    :param newest: when the last of them has ended; None if there was none, or for a queue without a status.
    :param bound: the time before which they had to end; None for a queue without a status.
    :param seconds: for how long the server was busy.
    """

    number: int
    newest: datetime | None
    bound: datetime | None
    seconds: float


def delete_and_count(
    session: Session, settings: ConsumerSettings, deleting: sa.Delete, moment: sa.Column[Any], bound: datetime | None
) -> Deleted:
    """Execute a DELETE, and return what it has deleted; ``moment`` is the column by which the rows are ordered.

    The server counts the rows, as thousands of them would occupy this process for longer than claims do. It measures
    itself how long it takes, as a thread of this process may wait much longer: for the others, which run handlers.
    """
    began, bind = time.monotonic(), settings.bind_arguments
    if engine_of(session.connection(bind_arguments=bind).dialect) is not None:
        ended = session.execute(deleting.returning(moment), execution_options=BESIDE_ORM, bind_arguments=bind)
        moments = ended.scalars().all()
        return Deleted(len(moments), max(moments, default=None), bound, time.monotonic() - began)
    deleted = deleting.returning(moment.label("sqlaqueue_moment")).cte("sqlaqueue_deleted")
    busy = seconds_between(clock(), ticking_clock())
    counted = sa.select(sa.func.count(), sa.func.max(deleted.c.sqlaqueue_moment), busy).select_from(deleted)
    number, newest, seconds = session.execute(counted, bind_arguments=bind).one()
    return Deleted(number, newest, bound, float(seconds))


class Retention:
    """The deletions of one consumer; methods with a session are operations."""

    def __init__(self, spec: QueueSpec) -> None:
        self.walks = [Walk(state, timedelta(seconds=seconds(age))) for state, age in spec.config.retention.items()]
        self._spec = spec
        self._ready = False
        self._references: dict[str, sa.ColumnElement[bool]] = {}
        self._warned: set[str] = set()

    def _warn_once(self, subject: str, message: str, *arguments: object) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            logger.warning(message, *arguments, extra=fields("retention_stopped", queue=self._spec.name))

    def inspect(self, session: Session, settings: ConsumerSettings) -> bool:
        """Query the index, and the foreign keys that forbid deletions; return whether to go on."""
        spec = self._spec
        connection = session.connection(bind_arguments=settings.bind_arguments)
        table = spec.table if spec.has("status") else spec.side_tables[DEAD_LETTER]
        self._ready = checks_of(connection).has_index(connection, table, index_name(table))
        if self._ready:
            known = checks_of(connection).foreign_keys_to(connection, table)
            self._references = {
                each.name: condition for each in known if (condition := _refers(spec, each)) is not None
            }
        else:
            self._warn_once(
                "index",
                "%s: no finished job is deleted, for the database lacks the index %s of QueueConfig(retention=...): %s "
                "makes it",
                spec.model.__name__,
                index_name(table),
                UPDATE_COMMAND,
            )
        session.rollback()
        return self._ready

    def delete_batch(self, session: Session, settings: ConsumerSettings, walk: Walk) -> Deleted:
        """Delete a batch and commit."""
        spec, began = self._spec, time.monotonic()
        bound = self._limit_transaction(session, settings, walk)
        verb = spec.strategy.purge(
            spec,
            self._selection(walk),
            (walk.state,),
            sa.literal(walk.age, Span()),
            # A generic plan that knows no limit might prefer to sort the table.
            sa.literal(walk.limit).render_literal_execute(),
        )
        if isinstance(verb, sa.Delete):
            deleting = verb.where(planned_anew())
            deleted = delete_and_count(session, settings, deleting, spec.columns["finished_at"], bound)
        else:
            keys = session.execute(
                returning_keys(spec, verb), execution_options=BESIDE_ORM, bind_arguments=settings.bind_arguments
            ).all()
            deleted = Deleted(len(keys), None, bound, time.monotonic() - began)
        session.commit()
        return deleted

    def _limit_transaction(self, session: Session, settings: ConsumerSettings, walk: Walk) -> datetime | None:
        """Have the server end this transaction if it takes long; return the time before which a job must have ended."""
        limits = batch_limits(settings)
        finished_at = self._spec.columns.get("finished_at")
        bound = sa.null() if finished_at is None else converted(earlier(clock(), walk.age), finished_at.type)
        (*_, moment) = session.execute(sa.select(*limits, bound), bind_arguments=settings.bind_arguments).one()
        return moment if self._spec.has("status") else None

    def _selection(self, walk: Walk) -> AnySelect:
        spec = self._spec
        chosen = sa.select(spec.model)
        if not spec.has("status"):
            return chosen
        finished_at = spec.columns["finished_at"]
        if walk.since is not None:
            chosen = chosen.where(finished_at >= sa.literal(walk.since, finished_at.type))
        if walk.skipped:
            chosen = chosen.where(~spec.key_in(spec.keys, walk.skipped))
        return chosen.where(*(~refers for refers in self._references.values()))

    def first_untried(self, session: Session, settings: ConsumerSettings, walk: Walk, deleted: int) -> datetime | None:
        """Return up to when a batch has tried jobs that has deleted fewer than it might; None if it has tried all.

        A trigger that returns NULL keeps jobs without an error, and the next batch would try the same ones.
        """
        spec = self._spec
        if not spec.has("status"):
            return None
        kept = walk.limit - deleted
        left = self._oldest(walk).offset(kept).limit(1)
        row = session.execute(left, bind_arguments=settings.bind_arguments).one_or_none()
        session.rollback()
        if row is None:
            return None
        ended_at: datetime = row[-1]
        # Those that ended at the same moment are left to the next walk, if there are so many.
        return ended_at if ended_at != walk.since else ended_at + timedelta(microseconds=1)

    def _oldest(self, walk: Walk) -> AnySelect:
        """Return a SELECT of the keys and times of the jobs to delete, the oldest first."""
        spec, finished_at = self._spec, self._spec.columns["finished_at"]
        return (
            self._selection(walk)
            .with_only_columns(*spec.keys, finished_at)
            .where(spec.in_state(walk.state), finished_at <= earlier(clock(), walk.age))
            .order_by(finished_at)
        )

    def skip_first(self, session: Session, settings: ConsumerSettings, walk: Walk, error: DBAPIError) -> bool:
        """Skip the oldest job, which could not be deleted; return whether to pause."""
        spec = self._spec
        if not spec.has("status"):
            self._warn_of_error(error, walk, None)
            return True
        first = self._oldest(walk).limit(1).with_for_update(skip_locked=True, of=spec.table)
        row = session.execute(first, bind_arguments=settings.bind_arguments).one_or_none()
        session.rollback()
        if row is None:
            return True
        key: Key = tuple(row[:-1])
        self._warn_of_error(error, walk, key)
        return walk.skip(key, row[-1])

    def _warn_of_error(self, error: DBAPIError, walk: Walk, key: Key | None) -> None:
        what = str(error.orig).strip().partition("\n")[0]
        constraint = getattr(getattr(error.orig, "diag", None), "constraint_name", None)
        self._warn_once(
            constraint or getattr(error.orig, "sqlstate", None) or what,
            "%s: job %s is %s and older than %s, and cannot be deleted: %s. It stays, as do all jobs for which this "
            'is true; tables that refer to it need ondelete="CASCADE" or "SET NULL", and an index on their foreign key',
            self._spec.model.__name__,
            None if key is None else key_text(key),
            walk.state,
            walk.age,
            what,
        )

    def warn_of_references(self, session: Session, settings: ConsumerSettings, walk: Walk) -> None:
        """Log which foreign keys keep jobs from being deleted."""
        spec = self._spec
        for name, refers in self._references.items():
            if name in self._warned:
                continue
            self._limit_transaction(session, settings, walk)
            finished_at = spec.columns["finished_at"]
            stays = (
                sa.select(*spec.keys)
                .where(spec.in_state(walk.state), finished_at <= earlier(clock(), walk.age), refers)
                .order_by(finished_at)
                .limit(1)
            )
            row = session.execute(stays, bind_arguments=settings.bind_arguments).one_or_none()
            session.rollback()
            if row is not None:
                self._warn_once(
                    name,
                    "%s: job %s is %s and older than %s, and stays, as do all like it: the foreign key %s refers to "
                    'it and has no ON DELETE; give that foreign key ondelete="CASCADE" or "SET NULL" and an index, '
                    "or delete what refers to finished jobs first",
                    spec.model.__name__,
                    row[0] if len(row) == 1 else tuple(row),
                    walk.state,
                    walk.age,
                    name,
                )


def batch_limits(settings: ConsumerSettings) -> list[sa.ColumnElement[Any]]:
    """Return the settings by which the server ends a transaction that deletes a batch and takes long."""
    span = int(min(_LONGEST, settings.lease.total_seconds() / _PARTS_OF_LEASE) * 1000)
    names = ("lock_timeout", "statement_timeout", "idle_in_transaction_session_timeout")
    return [set_setting(name, str(span)) for name in names]


def _refers(spec: QueueSpec, foreign_key: ForeignKey) -> sa.ColumnElement[bool] | None:
    """Return the condition that some row refers to a job; None without a status, or if the mapping lacks a column."""
    by_name = {column.name: column for column in spec.table.c}
    if not spec.has("status") or not set(foreign_key.referred) <= set(by_name):
        return None
    child = sa.table(
        foreign_key.table, *map(sa.column, {*foreign_key.columns, *by_name}), schema=foreign_key.schema
    ).alias("sqlaqueue_referring")
    pairs = zip(foreign_key.columns, foreign_key.referred, strict=True)
    same = [child.c[own] == by_name[referred] for own, referred in pairs]
    if foreign_key.is_to_itself:
        # A row that refers only to itself can be deleted.
        same.append(sa.or_(*(child.c[key.name] != key for key in spec.keys)))
    return sa.exists(sa.select(sa.literal_column("1")).select_from(child).where(*same).correlate(spec.table))


MAINTAINERS = 3
"""How many of the listening consumers do what one has to do for all; more than one, since one may be dead."""

_PAUSE_BUSY, _LONGEST_SLEEP = 0.25, 60.0
"""Seconds between two executions of the loop: while there are claimed jobs, and without any."""

_SECOND_LOOK = 1.0
"""Seconds between the two looks of a rescue, at most."""

_SLEEPS_AFTER = _PAUSE_BUSY
"""Seconds without claimed jobs after which the loop sleeps. To be woken for each job costs more than to be executed now
and then where jobs come more often than that, and less where they come more rarely."""


class Timers:
    """When each of several tasks is due, by name, on a monotonic clock."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}

    def set(self, task: str, at: float) -> None:
        self._due[task] = at

    def start(self, task: str, at: float) -> None:
        """Make ``task`` due at the time ``at``, unless its timer runs already."""
        self._due.setdefault(task, at)

    def cancel(self, task: str) -> None:
        self._due.pop(task, None)

    def is_due(self, task: str, now: float) -> bool:
        return task in self._due and self._due[task] <= now

    def until_next(self, now: float) -> float:
        """Return the seconds until the first task is due; 60 without any."""
        return max(0.0, min(self._due.values(), default=now + 60.0) - now)


class Maintenance:
    def __init__(self, context: ConsumerContext) -> None:
        self.context, self.timers = context, Timers()
        self.retention = Retention(context.spec)
        kept = context.spec.config.attempt_history
        self.history = None if kept is None else Walk("attempt", timedelta(seconds=seconds(kept)))
        """The walk through old attempts; None without an attempt history."""
        self.expired: Sequence[Key] = ()
        """The jobs that a rescue has found once, with an expired lease; it looks for them again."""
        self.locked: Sequence[Run] = ()
        """The runs whose leases were not extended, probably since a transaction has locked their rows."""
        self.sent_listening: bool | None = None
        """The ``listening`` of the last heartbeat; None before the first."""
        self.sent_changes: tuple[int, bool, bool] = (0, True, False)
        """The changes of the unclaimable jobs up to the last heartbeat, and whether claims worked and it was quiet."""
        self.missed_proofs = 0
        """How many heartbeats in a row were not received back."""
        self.logged_missed = False
        self.reconciled_upto: Key | None = None
        """Up to which job messages have been compared with jobs; None between two rounds."""
        self.reconciling_took = 0.0
        """The seconds of this round so far."""
        self._busy_at = time.monotonic()
        optional = {"retention": self.retention.walks, "history": self.history, "minute": context.counts is not None}
        for task in ("heartbeat", "reconcile", "unchanged", *(name for name, needed in optional.items() if needed)):
            self.timers.set(task, time.monotonic())

    @property
    def second_look(self) -> float:
        """The seconds between the two looks of a rescue; in between, each live worker tries to extend four times."""
        return min(_SECOND_LOOK, self.context.settings.lease.total_seconds() / 2)

    def until_next(self) -> float:
        """Return the seconds until a task may be due, unless the loop is woken before."""
        context = self.context
        if not context.has_claimed:
            return _PAUSE_BUSY
        now, polls = time.monotonic(), context.polls
        # Set before it is asked whether there is work: a worker that begins some after that wakes the loop.
        context.maintenance_sleeps = now - self._busy_at >= _SLEEPS_AFTER
        # Where notifications stay in the process, there is no listener that watches the timer.
        rescue = polls.rescues.until_due(listening=polls.peers.subscribed and polls.peers.listening)
        notified = min(polls.until_upcoming(), polls.peers.until_proof(), polls.peers.until_look(), rescue)
        wait = min(self.timers.until_next(now), notified, _LONGEST_SLEEP)
        busy = context.busy_since is not None
        if not context.check_idle() or busy:
            self._busy_at = now
        elif context.maintenance_sleeps:
            return max(wait, 0.02)
        timeout = context.settings.timeout
        if timeout is not None:
            wait = min(wait, timeout / 4)
        return max(min(wait, _PAUSE_BUSY), 0.02)
