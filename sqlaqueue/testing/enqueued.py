"""Which jobs a test's transaction has enqueued: :func:`enqueued`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, UnboundExecutionError
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import instance_state

from sqlaqueue.exc import ConfigurationError, StatementError
from sqlaqueue.mapping.mixin import QueueMixin, queue_spec
from sqlaqueue.postgresql.checks_of import checks_of_error
from sqlaqueue.queue.names import ATTEMPT, CONSUMERS, CONTROL, CRASH_JOURNAL, DEAD_LETTER, RATE, SCHEDULE, TICK
from sqlaqueue.queue.retry_policies import Delay, seconds
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sessions import execute
from sqlaqueue.sql.engine import engine_of, schema_of
from sqlaqueue.sql.portable import Span, earlier
from sqlaqueue.sql.types import check_dialect
from sqlaqueue.statements.selection import JobSelection, select_jobs
from sqlaqueue.testing.in_transaction import AnySession, Jobs, resolve_session
from sqlaqueue.testing.rows import check_prepared, enqueued_keys, refresh_or_detach, remember_earlier_jobs

T = TypeVar("T")

_MOST_SHOWN = 5
"""How many other jobs a failed assertion shows."""


def enqueued(session: AnySession, model: Jobs[T], /, **columns: Any) -> list[T]:
    """Return the pending jobs whose rows the transaction of ``session`` has written, by key.

    The rows may have been written by the ORM, bulk inserts, COPY or SQL, in this session or in another one on its
    connection. A retried job is pending again, so it is included. A job from before the transaction is included if the
    code under test has changed its row, as ``requeue()`` does, and not if only functions of this package have.

    ::

        session.add(Email(to="grace@example.com"))  # what the code under test does
        (email,) = enqueued(session, Email, to="grace@example.com")

    :param session: the test's session. Its pending changes are flushed first.
    :param model: the queue class, or a select of its jobs.
    :param columns: values that attributes of the job must have: ``enqueued(session, Email, to="ada@example.com")``.
    :raises StatementError: if the class has no attribute of a given name.
    """
    own = resolve_session(session, "enqueued", is_async=False)
    selection = select_jobs(model, "enqueued")
    known = sa.inspect(selection.entity).all_orm_descriptors.keys()
    for name in columns:
        if name not in known:
            raise StatementError(
                f"enqueued({selection.entity.__name__}, {name}=...): the class has no attribute {name!r}; it has "
                f"{', '.join(sorted(known))}"
            )
    jobs: list[T] = execute(own, _jobs, (selection,))
    # Compared in Python: a JSON column has no equality in the database, and a relationship is compared as an instance.
    found = [job for job in jobs if all(getattr(job, name) == value for name, value in columns.items())]
    return found or _NoJobs(jobs, columns)


class _NoJobs(list[T]):
    """An empty list that shows in the report of a failed assertion which other jobs are enqueued."""

    def __init__(self, others: Sequence[T], columns: Iterable[str]) -> None:
        super().__init__()
        self._others, self._columns = others, columns

    def __repr__(self) -> str:
        if not self._others:
            return super().__repr__()
        shown = [
            ", ".join(f"{name}={getattr(job, name)!r}" for name in self._columns) for job in self._others[:_MOST_SHOWN]
        ]
        more = ["..."] if len(self._others) > _MOST_SHOWN else []
        return f"[], but {len(self._others)} with {'; '.join([*shown, *more])}"


def _jobs(session: Session, selection: JobSelection) -> list[Any]:
    check_prepared(session, selection.spec, "enqueued")
    session.flush()
    spec, keys = selection.spec, enqueued_keys(session, selection)
    jobs = sa.select(selection.entity).where(spec.key_in(spec.keys, keys)).order_by(*spec.keys)
    # Rows may have been changed by statements that the session's instances do not show.
    fresh = jobs.options(*selection.options).execution_options(populate_existing=True)
    return list(session.scalars(fresh).unique()) if keys else []


_TIMES = ("run_at", "created_at", "started_at", "finished_at", "lease_expires_at")
"""The roles whose columns are moved."""

LONGEST = timedelta(days=36525)
"""The longest time of one call. ``drain(scheduled=True)`` treats jobs that are due later as never due."""

_FAR = timedelta(days=365 * 1000)

_SIDE_TABLES = (ATTEMPT, CONSUMERS, CONTROL, CRASH_JOURNAL, DEAD_LETTER, RATE)


def travel(session: AnySession, delta: Delay) -> None:
    """Let ``delta`` pass for all queues: every stored time of theirs becomes that much earlier.

    No clock is replaced, so the statements under test are those of production. Moved are the times that sqlaqueue
    keeps: due times, leases, when jobs were created, started and ended, and the ticks of schedules;
    columns of your own are not. The ticks of a cron expression keep their time of day if ``delta`` is of whole days.

    ::

        tomorrow = datetime.now(UTC) + timedelta(days=1)
        session.add(Email(to="ada@example.com", run_at=tomorrow))
        travel(session, timedelta(days=1))
        assert drain(session, Email, send) == 2

    :param session: the test's session. Its pending changes are flushed first; its instances then show the changes.
    :param delta: seconds or a timedelta.
    :raises ConfigurationError: if ``delta`` is negative, as time cannot go back, or more than a hundred years.
    """
    own = resolve_session(session, "travel", is_async=False)
    moved = timedelta(seconds=seconds(delta, "travel(delta)"))
    if moved > LONGEST:
        raise ConfigurationError(f"travel({delta!r}): travel() moves at most a hundred years at a time")
    execute(own, _move, (moved,))


def _move(session: Session, delta: timedelta) -> None:
    session.flush()
    moved: set[tuple[Any, ...]] = set()
    for spec, table, columns in _tables(session):
        # Two classes may be mapped to one table, whose times pass once.
        names = [(table.schema, table.name, column.name) for column in columns]
        left = [column for column, name in zip(columns, names, strict=True) if name not in moved]
        if left and _move_table(session, spec, table, left, delta):
            moved.update(names)
    for instance in list(session.identity_map.values()):
        spec_of_instance = queue_spec(type(instance))
        if spec_of_instance is not None:
            names_of_times = {spec_of_instance.attributes[role] for role in _TIMES if spec_of_instance.has(role)}
            loaded = names_of_times & instance_state(instance).dict.keys()
            if loaded:
                refresh_or_detach(session, instance, loaded)


def _move_table(
    session: Session, spec: QueueSpec, table: sa.Table, columns: Sequence[sa.Column[Any]], delta: timedelta
) -> bool:
    """Make all times of a table earlier; return False if it lacks a column, and so is another class's."""
    try:
        with session.begin_nested():
            if table is spec.table:
                remember_earlier_jobs(session, spec)
            _shift(session, spec, table, columns, delta)
    except IntegrityError:
        # A unique constraint that contains a time may be violated while some rows are moved and others are not.
        # Moved out of the range of all others first, no two rows can meet.
        _shift(session, spec, table, columns, delta + _FAR)
        _shift(session, spec, table, columns, -_FAR)
    except DBAPIError as error:
        if checks_of_error(error).undefined_object_advice(error, spec) is None:
            raise
        return False
    return True


def _shift(
    session: Session, spec: QueueSpec, table: sa.Table, columns: Sequence[sa.Column[Any]], delta: timedelta
) -> None:
    # Without days, which are 23 or 25 hours long where the session's time zone changes its clocks.
    microseconds = delta // timedelta(microseconds=1)
    interval: Any = sa.cast(sa.literal(f"{microseconds} microseconds", sa.Text()), sa.Interval())
    if engine_of(session.get_bind(spec.mapper).dialect) is not None:
        interval = sa.literal(delta, Span())
    values: dict[Any, Any] = {
        column: earlier(sa.type_coerce(column, sa.DateTime(timezone=True)), interval) for column in columns
    }
    filled = sa.or_(*(column.is_not(None) for column in columns))
    session.execute(sa.update(table).where(filled).values(values), bind_arguments={"mapper": spec.mapper})


def _tables(session: Session) -> Iterator[tuple[QueueSpec, sa.Table, list[sa.Column[Any]]]]:
    for spec in _queues():
        try:
            connection = session.connection(bind_arguments={"mapper": spec.mapper})
        except UnboundExecutionError:
            continue  # its session has no engine for this class
        if not _exists(connection, spec.table):
            continue
        check_dialect(connection.dialect, "travel()", "the engine of the session")
        yield spec, spec.table, [spec.columns[role] for role in _TIMES if spec.has(role)]
        for name, table in spec.side_tables.items():
            if name in _SIDE_TABLES:
                yield spec, table, _times_of(table)
        schema = f"{spec.table.schema}." if spec.table.schema else ""
        for name in (SCHEDULE, TICK):
            shared = spec.table.metadata.tables.get(f"{schema}{name}")
            if shared is not None:
                yield spec, shared, _times_of(shared)


def _queues() -> list[QueueSpec]:
    found: dict[QueueSpec, None] = {}
    classes: list[type[Any]] = [QueueMixin]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        spec = queue_spec(cls)
        if spec is not None:
            found[spec] = None
    return list(found)


def _exists(connection: sa.Connection, table: sa.Table) -> bool:
    # A class may be mapped whose table is elsewhere, such as in another test's database.
    return sa.inspect(connection).has_table(table.name, schema_of(connection, table))


def _times_of(table: sa.Table) -> list[sa.Column[Any]]:
    return [column for column in table.c if isinstance(column.type, sa.DateTime)]
