"""Select jobs of a queue by state, age, kind of error or key."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.admin.session_checks import requires_session
from sqlaqueue.exc import StatementError
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.sql.engine import WRITES_LATER
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.strategies.listing import key_labels
from sqlaqueue.strategies.update_status import LEASE_EXPIRED
from sqlaqueue.write_routing import routing_to_primary

NO_ERROR = ""
"""The kind of error of jobs without one."""

OTHER = "other"
"""The kind of error texts that do not start with a kind, such as that of ``fail(jobs, error="...")``."""

RESCUED = "LeaseExpired"
"""The kind of error of jobs whose lease expired in their last attempt."""

_KIND = r"^([[:alpha:]_]\w*(?:\.\w+)*):(?:\s|$)"
"""The start of an error's text: its kind, a colon and a space."""


@dataclass(frozen=True, kw_only=True)
class JobFilter:
    """Conditions that jobs of a queue have to meet, all of them.

    :param states: the names of states; None for all.
    :param older_than: the minimum age.
    :param newer_than: the maximum age.
    :param since: the attribute from which the age of a job is counted.
    :param error: the kind of the last error: the name of its class, or the kind given to ``Fail(kind=...)``; ``other``
        for texts that start with neither, empty for jobs without an error.
    :param keys: keys as texts, the parts of a composite one separated by commas; None for all.
    """

    states: tuple[str, ...] | None = None
    older_than: timedelta | None = None
    newer_than: timedelta | None = None
    since: Literal["finished_at", "created_at"] = "finished_at"
    error: str | None = None
    keys: tuple[str, ...] | None = None


@requires_session
def count(session: Session, model: type[Any], job_filter: JobFilter) -> dict[str, int]:
    """Return the number of selected jobs by state, without states that have none.

    :raises StatementError: if the model leaves out an attribute that ``job_filter`` needs.
    """
    return dict(counts(session, model, job_filter))


def counts(session: Session, model: type[Any], job_filter: JobFilter, **options: Any) -> list[tuple[str, int]]:
    """Return the same in pairs.

    :param options: execution options of the query.
    """
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
        found = found.where(sa.tuple_(*keys) > sa.tuple_(*map(_typed, after, keys)))
    # They are about to be changed, and a replica may not have them yet.
    with routing_to_primary(session):
        options = {WRITES_LATER: True}
        rows = session.execute(found, execution_options=options, bind_arguments=bind_arguments(model))
        return [tuple(row) for row in rows]


def filtered_jobs(model: type[Any], job_filter: JobFilter) -> AnySelect:
    """Return a SELECT of the selected jobs, see :meth:`~sqlaqueue.strategies.ClaimStrategy.list_jobs`.

    :raises StatementError: if the model leaves out an attribute that ``job_filter`` needs.
    """
    spec, entity, select, _ = select_jobs(model, "job_filter")
    name = entity.__name__
    jobs = spec.strategy.list_jobs(spec, select, job_filter.states).subquery("sqlaqueue_listed")
    selected = sa.select(*jobs.c)
    if job_filter.older_than is not None:
        selected = selected.where(
            _attribute(jobs, job_filter.since, name, "the age of jobs") <= clock() - job_filter.older_than
        )
    if job_filter.newer_than is not None:
        selected = selected.where(
            _attribute(jobs, job_filter.since, name, "the age of jobs") > clock() - job_filter.newer_than
        )
    if job_filter.error is not None:
        selected = selected.where(
            kind_of(_attribute(jobs, "last_error", name, "the kind of an error")) == job_filter.error
        )
    if job_filter.keys is not None:
        keys = [_key(spec, jobs, text) for text in job_filter.keys]
        selected = selected.where(sa.or_(sa.false(), *keys))
    return selected


def kind_of(error: sa.ColumnElement[Any]) -> sa.ColumnElement[str]:
    """Return the kind that starts an error's text: the name of its class, or the kind given to ``Fail(kind=...)``.

    A text such as "order 1: no stock" starts with no kind.
    """
    prefix = sa.func.substring(error, sa.literal(_KIND, sa.Text()), type_=sa.Text())
    return sa.case(
        (sa.func.coalesce(error, "") == "", sa.literal(NO_ERROR, sa.Text())),
        # The prefix is enough, as a short column may have truncated the rest.
        (error.startswith(LEASE_EXPIRED.partition(":")[0] + ":"), sa.literal(RESCUED, sa.Text())),
        else_=sa.func.coalesce(prefix, sa.literal(OTHER, sa.Text())),
    )


def bind_arguments(model: type[Any]) -> dict[str, Any]:
    """Return the ``bind_arguments`` for statements, as a session may have several engines."""
    return {"mapper": select_jobs(model, "bind").spec.mapper}


def _attribute(jobs: sa.FromClause, role: str, name: str, what: str) -> sa.ColumnElement[Any]:
    if role not in jobs.c:
        msg = f"{what} needs the queue attribute {role!r}, which {name} leaves out; remove this condition"
        raise StatementError(msg)
    return jobs.c[role]


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
            msg = f"the key {text!r}: {spec.model.__name__}.{name} is an integer, and {part!r} is none"
            raise StatementError(msg)
    return [sa.cast(sa.literal(part, sa.Text()), key.type) for key, part in zip(spec.keys, parts, strict=True)]


_INTEGER = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)


def _key(spec: QueueSpec, jobs: sa.FromClause, text: str) -> sa.ColumnElement[bool]:
    pairs = zip(key_labels(spec), key_parts(spec, text), strict=True)
    return sa.and_(*(jobs.c[name] == part for name, part in pairs))


def _typed(value: Any, column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.literal(value, column.type)
