"""Single jobs for operators: select them, list them, read one with its attempts, and group the failed ones."""

from __future__ import annotations

import csv
import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.consumer.core.errors import may_be_of_a_row
from sqlaqueue.exc import StatementError
from sqlaqueue.postgresql.side_tables import key_json
from sqlaqueue.queue.names import ATTEMPT, DEAD_LETTER
from sqlaqueue.queue.options import STATES
from sqlaqueue.queue.retry_policies import Delay, seconds
from sqlaqueue.queue.run import Key, key_text, key_tuple, key_value
from sqlaqueue.queue.spec import QueueSpec, within_calendar
from sqlaqueue.sessions import routing_to_primary
from sqlaqueue.sql.engine import WRITES_LATER
from sqlaqueue.sql.portable import by_engine, clock, converted, earlier, nulls_last
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.strategies.listing import SHOWN, key_labels
from sqlaqueue.strategies.update_status import LEASE_EXPIRED
from sqlaqueue.texts import did_you_mean

NO_ERROR = ""
"""The kind of error of jobs without one."""

OTHER = "other"
"""The kind of error texts that do not start with a kind, such as that of ``fail(jobs, error="...")``."""

RESCUED = "LeaseExpired"
"""The kind of error of jobs whose lease expired in their last attempt."""

_KIND = r"^(?!\d)\w+(?:\.\w+)*(?=:(?:\s|$))"
"""The start of an error's text, before a colon and a space.

All engines agree on ASCII. Whether another character is a letter or a space depends on the database's locale: with the
locale C, PostgreSQL knows none of them, so that an error such as ``Größe: 3`` is of the kind :data:`OTHER`.
"""

NO_TEXT = "(no text)"
"""The message of an error that has a kind only."""

WITHOUT_ERROR = "(no error)"
"""The message of a job without an error."""

_LONGEST_MESSAGE = 300
"""The number of characters of an error from which its message is made."""

_BEFORE_MESSAGE = rf"{_KIND}:\s*"

_DIFFERS = (
    r"[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}"  # a UUID
    r"|0[xX][0-9A-Fa-f]+"  # an address, as of an object
    r"|[0-9A-Fa-f]{8,}"  # a digest
    r"|(?<![0-9A-Za-z])'[^']*(?:'|$)"  # a quoted text, but not the end of "can't"; it may have been cut
    r'|"[^"]*(?:"|$)'
    r"|[0-9]+(?:[.,:][0-9]+)*"  # a number, or a time
)
"""What differs in the errors of jobs that have failed for the same reason."""


@dataclass(frozen=True, kw_only=True)
class JobFilter:
    """Conditions that jobs of a queue have to meet, all of them.

    ::

        old = JobFilter(states=("failed",), older_than=timedelta(days=7), error="TimeoutError")
        print(admin.count(old))
        admin.requeue(old)

    :param states: the names of states; None for all.
    :param older_than: the minimum age, in seconds or as a timedelta.
    :param newer_than: the maximum age, in seconds or as a timedelta.
    :param since: the attribute from which the age of a job is counted.
    :param error: the kind of the last error: the name of its class, or the kind given to ``Fail(kind=...)``; ``other``
        for texts that start with neither, empty for jobs without an error.
    :param keys: keys as texts, the parts of a composite one separated by commas; None for all.
    :raises StatementError: for a state that does not exist, and for anything but a tuple of texts.
    :raises ConfigurationError: for an age that is not zero or more.
    """

    states: tuple[str, ...] | None = None
    older_than: Delay | None = None
    newer_than: Delay | None = None
    since: Literal["finished_at", "created_at"] = "finished_at"
    error: str | None = None
    keys: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse what would select other jobs than those that are meant."""
        for name in ("states", "keys"):
            given: Any = getattr(self, name)  # without a type checker, callers may pass any object
            if given is None:
                continue
            is_list = isinstance(given, Iterable) and not isinstance(given, str)
            parts = tuple(given) if is_list else (given,)
            unknown = [part for part in parts if name == "states" and part not in STATES]
            if unknown:
                msg = f"JobFilter(states={given!r}): there is no state {unknown[0]!r}; there are {', '.join(STATES)}"
                raise StatementError(msg + did_you_mean(str(unknown[0]), STATES))
            if not is_list or not all(isinstance(part, str) for part in parts):
                msg = f"JobFilter({name}={given!r}): use a tuple of texts, {name}={tuple(map(str, parts))!r}"
                raise StatementError(msg)
            object.__setattr__(self, name, parts)
        for name, age in (("older_than", self.older_than), ("newer_than", self.newer_than)):
            if age is not None:
                object.__setattr__(self, name, timedelta(seconds=seconds(age, f"JobFilter({name}=...)")))


def count(session: Session, model: type[Any], job_filter: JobFilter) -> dict[str, int]:
    """Return the number of selected jobs by state, without states that have none."""
    return dict(counts(session, model, job_filter))


def counts(session: Session, model: type[Any], job_filter: JobFilter, **options: Any) -> list[tuple[str, int]]:
    """Return the states that have selected jobs, each with their number; ``options`` are execution options."""
    jobs = filtered_jobs(model, job_filter).subquery("sqlaqueue_jobs")
    counted = sa.select(jobs.c.state, sa.func.count()).group_by(jobs.c.state).order_by(jobs.c.state)
    found = session.execute(counted, execution_options=options, bind_arguments=bind_arguments(model))
    return [(row[0], row[1]) for row in found]


def next_keys(session: Session, model: type[Any], job_filter: JobFilter, after: Key | None, limit: int) -> list[Key]:
    """Return the next keys of selected jobs, in the order of the keys.

    :param after: the last key of the page before; None for the first page.
    :param limit: maximum number of keys.
    """
    spec = select_jobs(model, "job_filter").spec
    jobs = filtered_jobs(model, job_filter).subquery("sqlaqueue_jobs")
    keys = [jobs.c[name] for name in key_labels(spec)]
    found = sa.select(*keys).order_by(*keys).limit(limit)
    if after is not None:
        values = [sa.literal(value, key.type) for value, key in zip(after, keys, strict=True)]
        found = found.where(sa.tuple_(*keys) > sa.tuple_(*values))
    # They are about to be changed, and a replica may not have them yet.
    with routing_to_primary(session):
        options = {WRITES_LATER: True}
        rows = session.execute(found, execution_options=options, bind_arguments=bind_arguments(model))
        return [tuple(row) for row in rows]


def filtered_jobs(model: type[Any], job_filter: JobFilter) -> AnySelect:
    """Return a SELECT of the selected jobs, see :meth:`~sqlaqueue.strategies.ClaimStrategy.list_jobs`.

    :raises StatementError: if the model leaves out an attribute that ``job_filter`` needs.
    """
    given: object = job_filter  # without a type checker, callers may pass any object
    if not isinstance(given, JobFilter):
        msg = f"{given!r} is no filter of jobs; give a JobFilter, such as JobFilter(states=('failed',))"
        raise StatementError(msg)
    spec, entity, select, _ = select_jobs(model, "job_filter")
    jobs = spec.strategy.list_jobs(spec, select, job_filter.states).subquery("sqlaqueue_listed")
    selected = sa.select(*jobs.c)

    def needed(role: str, what: str) -> sa.ColumnElement[Any]:
        if role not in jobs.c:
            msg = (
                f"{what} needs the queue attribute {role!r}, which {entity.__name__} leaves out; remove this condition"
            )
            raise StatementError(msg)
        return jobs.c[role]

    if job_filter.older_than is not None:
        selected = selected.where(
            needed(job_filter.since, "the age of jobs") <= earlier(clock(), job_filter.older_than)
        )
    if job_filter.newer_than is not None:
        selected = selected.where(needed(job_filter.since, "the age of jobs") > earlier(clock(), job_filter.newer_than))
    if job_filter.error is not None:
        selected = selected.where(kind_of(needed("last_error", "the kind of an error")) == job_filter.error)
    if job_filter.keys is not None:
        keys = [jobs.c[name] for name in key_labels(spec)]
        same = [sa.and_(*map(operator.eq, keys, key_parts(spec, text))) for text in job_filter.keys]
        selected = selected.where(sa.or_(sa.false(), *same))
    return selected


def kind_of(error: sa.ColumnElement[Any]) -> sa.ColumnElement[str]:
    """Return the kind that starts an error's text: the name of its class, or the kind given to ``Fail(kind=...)``.

    A text such as "order 1: no stock" starts with no kind.
    """
    # Where no text matches, PostgreSQL returns NULL, and MariaDB an empty text.
    prefix = sa.func.nullif(sa.func.regexp_substr(error, sa.literal(_KIND, sa.Text())), "", type_=sa.Text())
    return sa.case(
        (sa.func.coalesce(error, "") == "", sa.literal(NO_ERROR, sa.Text())),
        # The prefix is enough, as a short column may have truncated the rest.
        (error.startswith(LEASE_EXPIRED.partition(":")[0] + ":"), sa.literal(RESCUED, sa.Text())),
        else_=sa.func.coalesce(prefix, sa.literal(OTHER, sa.Text())),
    )


def message_of(error: sa.ColumnElement[Any]) -> sa.ColumnElement[str]:
    """Return the first line of an error without its kind, and with ``…`` for what differs from job to job.

    These are numbers, UUIDs, digests and quoted texts: ``LookupError: job 5 not found`` and ``LookupError: job 6 not
    found`` have the same message.
    """
    cut = sa.func.left(error, _LONGEST_MESSAGE)
    beginning = by_engine(cut, sa.func.substr(error, 1, _LONGEST_MESSAGE), cut)
    line = sa.func.regexp_substr(beginning, sa.literal("^[^\n]*", sa.Text()))
    without_kind = sa.func.regexp_replace(line, sa.literal(_BEFORE_MESSAGE, sa.Text()), sa.literal("", sa.Text()))
    pattern, sign = sa.literal(_DIFFERS, sa.Text()), sa.literal("…", sa.Text())
    message = by_engine(
        sa.func.regexp_replace(without_kind, pattern, sign, sa.literal("g", sa.Text()), type_=sa.Text()),
        sa.func.sqlaqueue_replaced(without_kind, pattern, sign, type_=sa.Text()),
        sa.func.regexp_replace(without_kind, pattern, sign, type_=sa.Text()),
    )
    return sa.case(
        (sa.func.coalesce(error, "") == "", sa.literal(WITHOUT_ERROR, sa.Text())),
        else_=sa.func.coalesce(sa.func.nullif(message, ""), sa.literal(NO_TEXT, sa.Text()), type_=sa.Text()),
    )


def bind_arguments(model: type[Any]) -> dict[str, Any]:
    """Return the ``bind_arguments`` for statements, as a session may have several engines."""
    return {"mapper": select_jobs(model, "bind").spec.mapper}


def key_parts(spec: QueueSpec, text: str) -> list[sa.ColumnElement[Any]]:
    """Return the parts of a key that is given as a text; PostgreSQL converts each to the type of its column.

    :raises StatementError: if it has not as many parts as the key has columns, or a part is no integer where the
        column is one.
    """
    parts: Sequence[str] = [text] if len(spec.keys) == 1 else next(csv.reader([text]), [])
    if len(parts) != len(spec.keys):
        names = ",".join(key.key for key in spec.keys)
        msg = f"the key {text!r}: {spec.model.__name__} has a key of {len(spec.keys)} columns; write it as {names}"
        raise StatementError(msg)
    for key, part in zip(spec.keys, parts, strict=True):
        if isinstance(key.type, sa.Integer) and not _INTEGER.fullmatch(part):
            name = spec.mapper.get_property_by_column(key).key
            msg = f"the key {text!r}: {spec.model.__name__}.{name} is an integer, and {part!r} is not"
            raise StatementError(msg)
    return [converted(sa.literal(part, sa.Text()), key.type) for key, part in zip(spec.keys, parts, strict=True)]


_INTEGER = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)


AttemptOutcome: TypeAlias = Literal["completed", "retried", "failed", "cancelled", "released", "rescued"]
"""How an attempt ended."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One ended attempt of a job; times are those of the database's clock.

    ::

        for attempt in admin.attempts(1):
            print(attempt.attempt, attempt.outcome, attempt.seconds, attempt.error)
    """

    attempt: int
    """Its number, from 1. A released attempt does not count, so the next one has the same number."""
    outcome: AttemptOutcome
    started_at: datetime | None
    """When the handler was called, None if it was not. Of a rescued attempt: when the job was claimed, if its row
    has ``started_at``."""
    ended_at: datetime
    """When the handler returned or raised. Of a rescued attempt: when the job was rescued."""
    worker: str | None
    """The worker that ran the job, as in ``claimed_by``; None if it is not known."""
    error: str | None
    traceback: str | None

    @property
    def seconds(self) -> float | None:
        """The seconds between the start and the end; None without a start."""
        return None if self.started_at is None else (self.ended_at - self.started_at).total_seconds()


def attempts(session: Session, model: type[Any], key: Any, *, limit: int = 20) -> list[Attempt]:
    """Return the ended attempts of one job, newest first; the job itself may be deleted already."""
    spec = select_jobs(model, "attempts").spec
    if ATTEMPT not in spec.side_tables:
        msg = (
            f"QueueAdmin.attempts(): {spec.model.__name__} has no attempt history; enable it with "
            "QueueConfig(attempt_history=timedelta(days=14))"
        )
        raise StatementError(msg)
    table = spec.side_tables[ATTEMPT]
    mine = key_json(key_parts(spec, key_text(key)))
    names = [field.name for field in fields(Attempt)]
    # The runs of a job end one after the other, so ids are in the order of time, whatever happens to the clock.
    found = (
        sa.select(*(table.c[name] for name in names))
        .where(table.c.queue == spec.name, table.c.key == mine)
        .order_by(table.c.id.desc())
    )
    rows = session.execute(found.limit(limit), bind_arguments=bind_arguments(model))
    return [Attempt(**dict(zip(names, row, strict=True))) for row in rows]


@dataclass(frozen=True, kw_only=True)
class FailureGroup:
    """The failed jobs with one kind of error.

    ::

        for group in admin.failures():
            print(group.count, "jobs failed with", group.kind, "such as", group.keys[0])
    """

    kind: str
    """The name of the error's class, or the kind given to ``Fail(kind=...)``; ``other`` for a text that starts with
    neither, empty without an error."""
    count: int
    newest: datetime | None
    """When the newest one failed; None if the model leaves out ``finished_at``."""
    error: str | None
    """The full text of its error."""
    keys: list[Any]
    """The keys of some of them, newest first: values, or tuples for a composite primary key."""


def failures(session: Session, model: type[Any], *, examples: int = 3) -> list[FailureGroup]:
    """Return the failed jobs in groups, the largest first, each with the keys of some ``examples``."""
    spec = select_jobs(model, "failures").spec
    labels = key_labels(spec)
    jobs = filtered_jobs(model, JobFilter(states=("failed",))).subquery("sqlaqueue_jobs")
    error = jobs.c.last_error if "last_error" in jobs.c else converted(sa.null(), sa.Text())
    moment = jobs.c.finished_at if "finished_at" in jobs.c else converted(sa.null(), sa.DateTime(timezone=True))
    kind = kind_of(error) if "last_error" in jobs.c else sa.literal(NO_ERROR, sa.Text())
    keys = [jobs.c[name] for name in labels]
    newest_first = [nulls_last(moment.desc()), *(key.desc() for key in keys)]
    ranked = sa.select(
        kind.label("kind"),
        error.label("error"),
        sa.func.max(moment).over(partition_by=kind).label("newest"),
        sa.func.count().over(partition_by=kind).label("jobs"),
        sa.func.row_number().over(partition_by=kind, order_by=newest_first).label("rank"),
        *keys,
    ).subquery("sqlaqueue_ranked")
    shown = (
        sa.select(ranked)
        .where(ranked.c.rank <= max(examples, 1))
        .order_by(ranked.c.jobs.desc(), ranked.c.kind, ranked.c.rank)
    )
    groups: dict[str, FailureGroup] = {}
    for row in session.execute(shown, bind_arguments=bind_arguments(model)):
        group = groups.setdefault(
            row.kind, FailureGroup(kind=row.kind, count=row.jobs, newest=row.newest, error=row.error, keys=[])
        )
        if row.rank <= examples:
            group.keys.append(key_value([getattr(row, name) for name in labels]))
    return list(groups.values())


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """One job. Attributes that the queue leaves out have the value None.

    ::

        for info in admin.jobs(JobFilter(states=("failed",)), limit=5):
            print(info.key, info.attempts, info.last_error)
    """

    queue: str
    key: Any
    """The primary key: a value, or a tuple if it is composite. Methods of QueueAdmin take it."""
    state: str
    """The name of its state; ``other`` for a status value that the queue does not use."""
    priority: int | None = None
    run_at: datetime | None = None
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    attempts: int | None = None
    max_attempts: int | None = None
    last_error: str | None = None
    claimed_by: str | None = None
    lease_expires_at: datetime | None = None


def first_known(moments: Sequence[sa.ColumnElement[Any]]) -> sa.ColumnElement[Any]:
    """Return the first moment that is not NULL."""
    if len(moments) > 1:
        return sa.func.coalesce(*moments)
    # SQLite has no coalesce() of one argument.
    return moments[0] if moments else sa.null()


def jobs(session: Session, model: type[Any], job_filter: JobFilter | None = None, *, limit: int = 20) -> list[JobInfo]:
    """Return jobs of a queue, newest first: by the time when they finished or else were enqueued."""
    spec = select_jobs(model, "jobs").spec
    found = filtered_jobs(model, job_filter or JobFilter()).subquery("sqlaqueue_jobs")
    moments = [found.c[role] for role in ("finished_at", "created_at") if role in found.c]
    keys = [found.c[name].desc() for name in key_labels(spec)]
    newest = [nulls_last(first_known(moments).desc())] if moments else []
    listed = sa.select(*_readable(found)).order_by(*newest, *keys).limit(limit)
    rows = session.execute(listed, bind_arguments=bind_arguments(model))
    return [_info(spec, row) for row in rows]


def job(session: Session, model: type[Any], key: Any) -> tuple[JobInfo, dict[str, Any]] | None:
    """Return one job, with the values of its row by column name; None if there is no such job."""
    info = job_info(session, model, key)
    return None if info is None else (info, _values(session, select_jobs(model, "job").spec, info))


def job_info(session: Session, model: type[Any], key: Any) -> JobInfo | None:
    """Return one job without the values of its row, which may be large; None if there is no such job."""
    spec = select_jobs(model, "job").spec
    found = filtered_jobs(model, JobFilter(keys=(key_text(key),))).subquery("sqlaqueue_jobs")
    # A key may be used again after a job with it has failed and its row was deleted: a pending job comes first.
    rows = session.execute(
        sa.select(*_readable(found)).order_by(found.c.state != "pending").limit(1), bind_arguments=bind_arguments(model)
    )
    row = rows.first()
    return None if row is None else _info(spec, row)


def _readable(found: sa.FromClause) -> list[sa.ColumnElement[Any]]:
    return [
        within_calendar(column).label(column.key)
        if isinstance(column.type, sa.DateTime) and column.type.timezone and column.key in SHOWN
        else column
        for column in found.c
    ]


def _info(spec: QueueSpec, row: Any) -> JobInfo:
    shown = {role: getattr(row, role) for role in SHOWN if role in row._fields}
    key = key_value([getattr(row, name) for name in key_labels(spec)])
    return JobInfo(queue=spec.name, key=key, state=row.state, **shown)


def _values(session: Session, spec: QueueSpec, info: JobInfo) -> dict[str, Any]:
    bind = {"mapper": spec.mapper}
    if not spec.has("status") and info.state != "pending" and DEAD_LETTER in spec.side_tables:
        dead = spec.side_tables[DEAD_LETTER]
        parts = [sa.literal(part, column.type) for part, column in zip(key_tuple(info.key), spec.keys, strict=True)]
        letter = sa.select(dead.c.row).where(dead.c.queue == spec.name, dead.c.key == key_json(parts))
        return dict(session.scalar(letter, bind_arguments=bind) or {})
    mine = spec.key_in(spec.keys, [key_tuple(info.key)])
    try:
        row = session.execute(sa.select(*spec.table.c).where(mine), bind_arguments=bind).first()
    except Exception as error:
        if not may_be_of_a_row(error):
            raise
        # A value that this program cannot load: operators see it as a text.
        texts = (converted(column, sa.Text()) for column in spec.table.c)
        row = session.execute(sa.select(*texts).where(mine), bind_arguments=bind).first()
    return {} if row is None else {column.name: value for column, value in zip(spec.table.c, row, strict=True)}
