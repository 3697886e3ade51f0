"""What operators change: cancel, requeue and purge jobs in short transactions; pause, resume and repair queues."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.admin.jobs import JobFilter, bind_arguments, counts, key_parts, next_keys
from sqlaqueue.consumer.core.errors import error_line, is_duplicate, kind_of, may_be_of_a_row
from sqlaqueue.consumer.maintenance.leases import expired_keys
from sqlaqueue.consumer.settle import LOCK_TIMEOUT_ONE_BY_ONE
from sqlaqueue.consumer.statements import LOCK_TIMEOUT
from sqlaqueue.exc import StatementError
from sqlaqueue.log import fields, logger
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.postgresql.plans import shard_column
from sqlaqueue.postgresql.side_tables import (
    MOST_OF_AUTHOR,
    MOST_OF_REASON,
    PAUSE,
    key_json,
    pause_note,
    request_of_consumer,
    withdraw_request,
)
from sqlaqueue.queue.names import CONTROL
from sqlaqueue.queue.options import FINISHED
from sqlaqueue.queue.run import Key, key_text, key_tuple, key_value
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sessions import routing_to_primary
from sqlaqueue.sql.engine import WRITES_LATER, engine_of, own_work, sqlstate
from sqlaqueue.sql.portable import clock, json_array, set_setting, setting
from sqlaqueue.sql.types import insert_or_ignore
from sqlaqueue.statements import verbs
from sqlaqueue.statements.selection import instances, key_of, returning_keys, select_jobs
from sqlaqueue.strategies.unique_key import unique_key

Narrowed = TypeVar("Narrowed", AnySelect, sa.CompoundSelect[Any])


def distribution_column(session: Session, spec: QueueSpec) -> sa.Column[Any] | None:
    connection = session.connection(bind_arguments=bind_arguments(spec.model))
    return None if engine_of(connection.dialect) is not None else shard_column(connection, spec)


def by_shard(session: Session, spec: QueueSpec, keys: Sequence[Key]) -> Iterable[Sequence[Key]]:
    """Divide keys into those that one statement may lock: those with the same value of the column."""
    if len(keys) <= 1 or len(spec.keys) == 1:
        return [keys]
    column = distribution_column(session, spec)
    if column is None:
        return [keys]
    found: dict[Any, list[Key]] = {}
    for key in keys:
        found.setdefault(key[spec.keys.index(column)], []).append(key)
    return found.values()


def reads_by_priority(session: Session, spec: QueueSpec) -> bool:
    """Return whether a SELECT over jobs reads the index of claims priority by priority, by a recursive query.

    Citus executes such a query on one shard only, and other engines have no LATERAL.
    """
    if engine_of(session.get_bind(**bind_arguments(spec.model)).dialect) is not None:
        return False
    return len(spec.keys) == 1 or distribution_column(session, spec) is None


def specs_of_expired(session: Session, spec: QueueSpec) -> Sequence[QueueSpec]:
    """Return the queue for each statement that rescues: one for each shard that has jobs with an expired lease."""
    column = None if len(spec.keys) == 1 else distribution_column(session, spec)
    if column is None:
        return [spec]
    attribute = spec.mapper.get_property_by_column(column).key
    expires = spec.column("lease_expires_at", "rescue()")
    expired = sa.select(column).where(spec.in_state("processing"), expires <= clock()).distinct()
    values = session.execute(expired, bind_arguments=bind_arguments(spec.model)).scalars()
    return [spec.for_shard(attribute, value) for value in values]


# -- bulk changes ------------------------------------------------------------------------------------------------------


BATCH_SIZE = 1000
"""Default number of jobs that are changed in one transaction."""

Change = Callable[[Session, type[Any], JobFilter, Sequence[Key]], int]
"""Changes the jobs with these keys that still match the filter, and returns their number."""

Progress = Callable[[int], object]
"""Is called with the number of jobs that have been dealt with since the last call; ``int`` does nothing with it."""


def in_batches(
    session: Session,
    model: Any,
    job_filter: JobFilter,
    change: Change,
    *,
    size: int = BATCH_SIZE,
    limit: int | None = None,
    progress: Progress = int,
) -> Iterator[int]:
    """Change jobs, and yield after each commit the number of jobs that the batch has changed.

    :param change: changes one batch, such as :func:`requeue_some`, :func:`cancel_some` or :func:`purge_some`.
    :param size: number of jobs in a batch.
    :param limit: maximum number of jobs to select; None for all.
    :param progress: called after each batch with the number of its jobs, changed or not.
    :raises StatementError: if the queue does not support the change.
    """
    for number, keys in enumerate(_pages(session, model, job_filter, size, limit, progress=progress)):
        try:
            changed = change(session, model, job_filter, keys)
            session.commit()
        except DBAPIError as error:
            # One of many jobs, which is alone in its batch by chance.
            if len(keys) > 1 or (number == 0 and size > 1) or not may_be_of_a_row(error):
                raise
            session.rollback()
            warn_of_refusal(select_jobs(model, "change").spec, keys[0], error)
            changed = 0
        yield changed


def _pages(
    session: Session, model: Any, job_filter: JobFilter, size: int, limit: int | None, *, progress: Progress
) -> Iterator[list[Key]]:
    """Yield the keys of selected jobs page by page; each page is read when the one before it has been dealt with."""
    after, left = None, limit
    while left is None or left > 0:
        keys = next_keys(session, model, job_filter, after, size if left is None else min(size, left))
        if not keys:
            return
        yield keys
        progress(len(keys))
        after, left = keys[-1], None if left is None else left - len(keys)


def purge(
    session: Session,
    model: Any,
    job_filter: JobFilter,
    *,
    batch_size: int = BATCH_SIZE,
    limit: int | None = None,
) -> int:
    """Delete finished jobs of a queue class or a select, commit each batch, and return their number."""
    return sum(in_batches(session, model, job_filter, purge_some, size=batch_size, limit=limit))


def cancel_some(session: Session, model: type[Any], job_filter: JobFilter, keys: Sequence[Key]) -> int:
    """Cancel pending jobs, and request the cancellation of running ones, which are not counted."""
    return _change_some(session, model, keys, lambda some: verbs.cancel(unchanged_jobs(model, job_filter, some)))


def purge_some(session: Session, model: type[Any], job_filter: JobFilter, keys: Sequence[Key]) -> int:
    """Delete finished jobs; a ``change`` for :func:`in_batches`."""
    states = FINISHED if job_filter.states is None else job_filter.states

    def verb(some: Sequence[Key]) -> Any:
        return verbs.purge(unchanged_jobs(model, job_filter, some), states=states, limit=len(some))

    return _change_some(session, model, keys, verb)


def execute(session: Session, model: type[Any], verb: Any) -> int:
    """Execute a verb, commit, and return the number of changed jobs."""
    changed = _change(session, model, verb)
    session.commit()
    return changed


def preview(session: Session, model: type[Any], verb: Any) -> int:
    """Execute a verb, roll back, and return the number of jobs that it would change."""
    changed = _change(session, model, verb)
    session.rollback()
    return changed


Verb = Callable[[Sequence[Key]], Any]
"""Makes the statement that changes the jobs with these keys."""


def _change_some(session: Session, model: Any, keys: Sequence[Key], verb: Verb) -> int:
    with routing_to_primary(session):
        shards = by_shard(session, select_jobs(model, "change").spec, keys)
        return sum(len(_in_parts(session, model, some, verb, {})) for some in shards)


def _in_parts(
    session: Session, model: Any, keys: Sequence[Key], verb: Verb, refused: dict[Any, str]
) -> Sequence[sa.Row[Any]]:
    """Execute a verb on some jobs, and return its rows.

    If the database refuses to change one of several jobs, for a constraint, a trigger, a policy or a foreign key, the
    others are changed by halves, and a warning names the one that stays as it is.

    :param refused: receives the keys of jobs that stay as they are, each with the error.
    """
    if len(keys) <= 1:
        return _execute(session, model, verb(keys))
    return _in_savepoints(session, model, keys, verb, refused)


@contextmanager
def savepoint(session: Session, model: Any) -> Iterator[None]:
    """Execute the block in a savepoint, to whose end deferred constraints are checked as well.

    At the commit, a job that violates one would undo the changes of all.
    """
    with own_work():
        nested = session.begin_nested()
    with nested:
        yield
        bind = bind_arguments(model)
        if engine_of(session.get_bind(**bind).dialect) is None:
            # They stay deferred in the next savepoint: what waits for jobs is counted once all has been changed.
            for mode in ("IMMEDIATE", "DEFERRED"):
                session.execute(sa.text(f"SET CONSTRAINTS ALL {mode}"), bind_arguments=bind)


def _in_savepoints(
    session: Session, model: Any, keys: Sequence[Key], verb: Verb, refused: dict[Any, str]
) -> Sequence[sa.Row[Any]]:
    try:
        with savepoint(session, model):
            return _execute(session, model, verb(keys))
    except DBAPIError as error:
        if not may_be_of_a_row(error):
            raise
        if len(keys) == 1:
            warn_of_refusal(select_jobs(model, "change").spec, keys[0], error)
            refused[key_value(keys[0])] = error_line(error)
            return ()
    half = len(keys) // 2
    return [row for part in (keys[:half], keys[half:]) for row in _in_savepoints(session, model, part, verb, refused)]


def _execute(session: Session, model: Any, statement: Any) -> Sequence[sa.Row[Any]]:
    # The instances in the session are not synchronized, as the commit expires them.
    options = {"synchronize_session": False}
    return session.execute(statement, execution_options=options, bind_arguments=bind_arguments(model)).all()


def warn_of_refusal(spec: QueueSpec, key: Key, error: DBAPIError) -> None:
    """Log that the database refuses to change a job, and that it stays as it is."""
    text = "queue %s: job %s stays as it is, as the database refuses to change it: %s"
    extra = fields("change_refused", queue=spec.name, job_key=key_value(key), error_kind=kind_of(error))
    logger.warning(text, spec.name, key_text(key), error_line(error), extra=extra)


def _change(session: Session, model: type[Any], verb: Any) -> int:
    with routing_to_primary(session):
        return len(_execute(session, model, verb))


def unchanged_jobs(model: Any, job_filter: JobFilter, keys: Sequence[Key]) -> Any:
    """Return a SELECT of the jobs with these keys whose state still matches the filter."""
    spec, _, select, _ = select_jobs(model, "change")
    jobs = select.where(spec.key_in(spec.keys, keys))
    if job_filter.states is None or not spec.has("status"):
        return jobs
    return jobs.where(spec.in_state(*job_filter.states))


_LOCK_NOT_AVAILABLE = "55P03"

Rows = Sequence[Sequence[Any]]
"""The results of a verb: the key of each job, and that of its duplicate."""


def attempt(session: Session, model: Any, verb: Any, *, lock_timeout: str, keys: Sequence[Key] = ()) -> Rows | None:
    """Execute a verb in a savepoint; return None if a job meets a duplicate that was not committed when it began.

    It returns None as well if the database refuses to change a job, and names the job if it is the only one.

    :param keys: the keys of the jobs, if they are known.
    """
    spec, bind = select_jobs(model, "attempt").spec, bind_arguments(model)
    former = session.scalar(sa.select(setting("lock_timeout")), bind_arguments=bind)
    try:
        with savepoint(session, model):
            session.execute(_set_timeout(lock_timeout), bind_arguments=bind)
            rows = _execute(session, model, verb)
            # It would outlive the savepoint.
            session.execute(_set_timeout(former), bind_arguments=bind)
            return rows
    except DBAPIError as error:
        if sqlstate(error) == _LOCK_NOT_AVAILABLE or is_duplicate(error, spec):
            return None
        if not may_be_of_a_row(error):
            raise
        if len(keys) == 1:
            warn_of_refusal(spec, keys[0], error)
        return None


def _set_timeout(value: Any) -> Any:
    return sa.select(set_setting("lock_timeout", value))


# -- cancellation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Cancelled:
    """The result of :meth:`QueueAdmin.cancel`. A key is a value, or a tuple for a composite primary key.

    ::

        done = admin.cancel(select(Email).where(Email.to == "ada@example.com"))
        print(len(done.cancelled), "cancelled,", len(done.asked), "running ones were asked to stop")
    """

    cancelled: list[Any] = field(default_factory=list)
    """The jobs that were pending, and are cancelled now."""
    asked: list[Any] = field(default_factory=list)
    """The running jobs whose cancellation has been requested."""
    missing: list[Any] = field(default_factory=list)
    """Jobs that are neither pending nor running: given instances and keys, including those of
    ``JobFilter(keys=...)``, whose jobs do not exist or have finished; and jobs that finished after they had been
    selected. A key that was given as a text is here in the type of its column."""
    refused: dict[Any, str] = field(default_factory=dict)
    """Of several jobs those that the database refuses to change, each with the error."""


def cancel(
    session: Session,
    jobs: Any,
    job_filter: JobFilter,
    *,
    batch_size: int = BATCH_SIZE,
    limit: int | None = None,
    progress: Progress = int,
) -> Cancelled:
    """Cancel pending jobs, request the cancellation of running ones, and commit each batch.

    :param jobs: instances; or a queue class or a select, whose jobs ``job_filter`` and ``limit`` narrow.
    """
    done = Cancelled()
    if isinstance(jobs, type | sa.Select):
        model: Any = jobs
        texts = job_filter.keys or ()
        with routing_to_primary(session):
            options = {WRITES_LATER: True}
            missing = [key for key in texts if not counts(session, model, replace(job_filter, keys=(key,)), **options)]
        done.missing.extend(key_value(_converted(session, model, key)) for key in missing)
        for keys in _pages(session, model, job_filter, batch_size, limit, progress=progress):
            _cancel_page(session, model, keys, lambda some: unchanged_jobs(model, job_filter, some), done)
        return done
    listed = instances(jobs, "cancel")
    for start in range(0, len(listed), batch_size):
        page = listed[start : start + batch_size]
        by_key = {key_of(job, "cancel"): job for job in page}

        def found(some: Sequence[Key], by_key: dict[Key, Any] = by_key) -> list[Any]:
            return [by_key[key] for key in some]

        _cancel_page(session, type(page[0]), [key_of(job, "cancel") for job in page], found, done)
    return done


def _converted(session: Session, model: Any, key: str) -> Sequence[Any]:
    """Return the parts of a key that is given as a text, in the types of its columns."""
    parts = key_parts(select_jobs(model, "cancel").spec, key)
    return session.execute(sa.select(*parts), bind_arguments=bind_arguments(model)).one()


def _cancel_page(
    session: Session, model: Any, keys: Sequence[Key], jobs: Callable[[Sequence[Key]], Any], done: Cancelled
) -> None:
    """Cancel the jobs with these keys, and commit; ``jobs`` returns what the verb takes, for some of the keys."""
    spec, bind = select_jobs(model, "cancel").spec, bind_arguments(model)
    # Before the verb: a request for cancellation is younger than this.
    with routing_to_primary(session):
        started = session.scalar(sa.select(clock()), bind_arguments=bind)
        cancelled = set[Any]()
        for some in by_shard(session, spec, keys):
            rows = _in_parts(session, model, some, lambda keys: verbs.cancel(jobs(keys)), done.refused)
            cancelled.update(row[0] for row in rows)
        asked = set()
        if CONTROL in spec.side_tables:
            asked = {key_value(row) for row in session.execute(_requested(spec, keys, started), bind_arguments=bind)}
    session.commit()
    for key in map(key_value, keys):
        if key in done.refused:
            continue
        outcome = done.cancelled if key in cancelled else done.asked if key in asked else done.missing
        outcome.append(key)


def _requested(spec: QueueSpec, keys: Sequence[Key], started: Any) -> AnySelect:
    control = spec.side_tables[CONTROL]
    is_requested = sa.and_(control.c.queue == spec.name, control.c.key == key_json(spec.keys))
    return (
        sa.select(*spec.keys)
        .select_from(spec.table)
        .join(control, is_requested)
        .where(spec.key_in(spec.keys, keys), control.c.created_at >= sa.literal(started, control.c.created_at.type))
    )


# -- queue control -----------------------------------------------------------------------------------------------------


_LONGEST = 5.0
"""For how many seconds jobs are rescued or requeued one by one; those that were are locked meanwhile."""


def pause(session: Session, model: type[Any], *, reason: str = "", author: str = "") -> None:
    """Pause a queue, so that none of its jobs is claimed, and commit.

    :param reason: why, in at most 200 characters; a queue that is paused already keeps the reason that it has.
    :param author: who pauses it, in at most 50 characters.
    :raises StatementError: if one is longer.
    """
    spec = select_jobs(model, "pause").spec
    told = [
        _one_line("reason", reason, MOST_OF_REASON),
        _one_line("author", author, MOST_OF_AUTHOR),
    ]
    bind = bind_arguments(model)
    with routing_to_primary(session):
        session.execute(verbs.pause(model), bind_arguments=bind)
        if any(told):
            control, note = spec.side_tables[CONTROL], pause_note(spec)
            mine = sa.and_(control.c.queue == spec.name, control.c.key == PAUSE)
            since = session.scalar(sa.select(control.c.created_at).where(mine), bind_arguments=bind)
            session.execute(
                sa.delete(control).where(control.c.queue == note, control.c.created_at != since), bind_arguments=bind
            )
            has_note = sa.select(control.c.queue).where(control.c.queue == note)
            if session.execute(has_note, bind_arguments=bind).first() is None:
                key = json_array(*(sa.literal(each, sa.Text()) for each in told))
                row = {"queue": note, "key": key, "created_at": since}
                session.execute(insert_or_ignore(control, row), bind_arguments=bind)
    session.commit()


def _one_line(name: str, text: str, most: int) -> str:
    given: object = text  # without a type checker, callers may pass anything
    line = " ".join(text.split()) if isinstance(given, str) else None
    if line is None or len(line) > most or not line.isprintable():
        msg = f"pause({name}={text!r}): give a text of at most {most} characters, all of them printable"
        raise StatementError(msg)
    return line


def resume(session: Session, model: type[Any]) -> None:
    """Let Consumers claim jobs of a paused queue again, and commit."""
    spec, bind = select_jobs(model, "resume").spec, bind_arguments(model)
    with routing_to_primary(session):
        session.execute(verbs.resume(model), bind_arguments=bind)
        control = spec.side_tables.get(CONTROL)
        if control is not None:
            session.execute(sa.delete(control).where(control.c.queue == pause_note(spec)), bind_arguments=bind)
    session.commit()


ConsumerAction = Literal["quiet", "resume", "stop"]
"""What a Consumer can be asked: to claim no more jobs, to claim them again, and to stop as after SIGTERM."""


def ask_consumers(session: Session, model: type[Any], action: ConsumerAction, ids: Iterable[str]) -> None:
    """Ask Consumers, given by their ids, for something, and commit.

    They read it with their next heartbeat: at once if they are notified, otherwise within some ten seconds.
    """
    spec = select_jobs(model, "ask_consumers").spec
    with routing_to_primary(session):
        for each in ids:
            asked = (
                withdraw_request(spec, "quiet", each) if action == "resume" else request_of_consumer(spec, action, each)
            )
            session.execute(asked, bind_arguments=bind_arguments(model))
    session.commit()


def rescue(session: Session, model: type[Any]) -> int:
    """Make jobs whose lease has expired pending again, commit, and return their number.

    A job of a unique queue that has a duplicate by now counts as well. One whose duplicate is not committed yet is left
    as it is; if there are many of these, other jobs may be left to the next call.
    """
    spec = select_jobs(model, "rescue").spec
    unique = unique_key(spec)
    with routing_to_primary(session):
        if unique is None or not unique.returns_from_runs:
            try:
                with savepoint(session, model):
                    number = _rescue_together(session, model)
            except DBAPIError as error:
                if not may_be_of_a_row(error):
                    raise
                number = _rescue_each(session, model, spec)
        else:
            rows = attempt(session, model, verbs.rescue(model), lock_timeout=LOCK_TIMEOUT)
            number = _rescue_each(session, model, spec) if rows is None else len(rows)
    session.commit()
    return number


def _rescue_each(session: Session, model: type[Any], spec: QueueSpec) -> int:
    """Rescue one job after the other, without those that have a duplicate, or that the database refuses to change."""
    number, until = 0, time.monotonic() + _LONGEST
    for key in session.execute(expired_keys(spec), bind_arguments=bind_arguments(model)).all():
        if time.monotonic() > until:
            break
        verb = returning_keys(spec, spec.strategy.rescue_some(spec, [tuple(key)]))
        number += len(attempt(session, model, verb, lock_timeout=LOCK_TIMEOUT_ONE_BY_ONE, keys=[tuple(key)]) or ())
    return number


def preview_rescue(session: Session, model: type[Any]) -> int:
    """Return how many jobs :func:`rescue` would make pending; roll back."""
    number = _rescue_together(session, model)
    session.rollback()
    return number


def _rescue_together(session: Session, model: type[Any]) -> int:
    """Rescue jobs in one statement, or in one for each shard of a distributed table, and return their number."""
    with routing_to_primary(session):
        specs = specs_of_expired(session, select_jobs(model, "rescue").spec)
        return sum(len(_execute(session, model, returning_keys(each, each.strategy.rescue(each)))) for each in specs)


def reconcile(session: Session, model: type[Any]) -> int:
    """Insert missing messages and delete superfluous ones, commit, and return the number of jobs concerned."""
    return execute(session, model, verbs.reconcile(model))


# -- requeueing --------------------------------------------------------------------------------------------------------


class Requeued(int):
    """How many jobs are pending again. ``duplicates`` and ``left`` are empty unless the queue is unique.

    ::

        done = admin.requeue(JobFilter(states=("failed",)))
        print(done, "are pending again;", len(done.duplicates), "have a duplicate")
    """

    duplicates: dict[Any, str]
    """The keys of jobs that have a duplicate, each with the duplicate's key as a text. They were cancelled, or left as
    they were, as ``Unique(on_return=...)`` says. A key is a value, or a tuple for a composite primary key."""
    left: list[Any]
    """The keys of jobs that were left as they were: a duplicate was being enqueued and was not committed yet, another
    transaction had locked the job, or there were too many such jobs in their batch. Requeue them again later."""

    refused: dict[Any, str]
    """Of several jobs those that the database refuses to change, each with the error. Those of a unique queue are among
    :attr:`left`, and only the log has the error."""

    def __new__(
        cls,
        number: int = 0,
        duplicates: dict[Any, str] | None = None,
        left: Sequence[Any] = (),
        refused: dict[Any, str] | None = None,
    ) -> Self:
        """Return a number with the keys of the jobs that were not counted."""
        made = super().__new__(cls, number)
        made.duplicates, made.left, made.refused = dict(duplicates or {}), list(left), dict(refused or {})
        return made


Then = Callable[[Sequence[Key]], object]
"""Is called with the keys of the jobs that are pending again, before the commit."""


def requeue(
    session: Session,
    jobs: Any,
    job_filter: JobFilter,
    *,
    batch_size: int = BATCH_SIZE,
    limit: int | None = None,
    progress: Progress = int,
    then: Then | None = None,
) -> Requeued:
    """Make finished jobs pending again, with no attempt counted; commit each batch, and return their number.

    :param jobs: instances; or a queue class or a select, whose jobs ``job_filter`` and ``limit`` narrow.
    :param then: changes the jobs of a class or a select further, before each commit.
    """
    if isinstance(jobs, type | sa.Select):
        options: dict[str, Any] = {"size": batch_size, "limit": limit, "progress": progress}
        results = in_batches(session, jobs, job_filter, functools.partial(requeue_some, then=then), **options)
        return _sum([one for one in results if isinstance(one, Requeued)])
    listed = instances(jobs, "requeue")
    if not listed:
        return Requeued()
    model: type[Any] = spec_of(type(listed[0])).model
    keys, done = [key_of(job, "requeue") for job in listed], list[Requeued]()
    for start in range(0, len(keys), batch_size):
        done.append(requeue_some(session, model, JobFilter(), keys[start : start + batch_size]))
        session.commit()
    return _sum(done)


def requeue_some(
    session: Session, model: type[Any], job_filter: JobFilter, keys: Sequence[Key], *, then: Then | None = None
) -> Requeued:
    """Make finished jobs pending again; a ``change`` for :func:`in_batches`.

    They are requeued together, and each by itself if a duplicate of one of them is being enqueued.
    """

    def verb(some: Sequence[Key]) -> Any:
        return verbs.requeue_jobs(unchanged_jobs(model, job_filter, some), came_back=False)

    with routing_to_primary(session):
        spec = select_jobs(model, "requeue").spec
        if unique_key(spec) is None:
            refused: dict[Any, str] = {}
            parts = (_in_parts(session, model, some, verb, refused) for some in by_shard(session, spec, keys))
            back = [row for part in parts for row in part]
            _call(then, back)
            return Requeued(len(back), refused=refused)
        rows = attempt(session, model, verb(keys), lock_timeout=LOCK_TIMEOUT, keys=keys)
        if rows is not None:
            _call(then, [row for row in rows if row[1] is None])
            return _requeued(rows)
        # Backwards, so that of several duplicates among them the newest becomes pending.
        tried: dict[Key, Rows | None] = dict.fromkeys(reversed(keys))
        until = time.monotonic() + _LONGEST
        for key in tried:
            if time.monotonic() < until:
                tried[key] = attempt(session, model, verb([key]), lock_timeout=LOCK_TIMEOUT_ONE_BY_ONE, keys=[key])
        _call(then, [row for rows in tried.values() for row in rows or () if row[1] is None])
    done = _sum([_requeued(rows) for rows in tried.values() if rows is not None])
    return Requeued(done, done.duplicates, done.left + [key_value(key) for key, rows in tried.items() if rows is None])


def _call(then: Then | None, rows: Rows) -> None:
    if then is not None and rows:
        then([key_tuple(row[0]) for row in rows])


def _requeued(rows: Rows) -> Requeued:
    duplicates = {row[0]: row[1] for row in rows if row[1]}
    # Without a key: a duplicate that was committed after the statement had begun.
    left = [row[0] for row in rows if row[1] == ""]
    return Requeued(len(rows) - len(duplicates) - len(left), duplicates, left)


def _sum(results: Sequence[Requeued]) -> Requeued:
    duplicates = {key: duplicate for one in results for key, duplicate in one.duplicates.items()}
    refused = {key: error for one in results for key, error in one.refused.items()}
    return Requeued(sum(results), duplicates, [key for one in results for key in one.left], refused)
