"""Which jobs of a queue are meant: by state, age, kind of error, key."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.admin.sessions import takes_session
from sqlaqueue.exc import StatementError
from sqlaqueue.keys import Key
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.strategies.job_listing import key_labels
from sqlaqueue.strategies.update_status import LEASE_EXPIRED

NO_ERROR = ""
"""The kind of error of jobs without one."""

OTHER = "other"
"""The kind of texts that do not begin with one, such as those that ``fail(jobs, error="...")`` was given."""

RESCUED = "LeaseExpired"
"""The kind of error of jobs that were taken back from a worker for the last time."""

_KIND = r"^([[:alpha:]_]\w*(?:\.\w+)*):(?:\s|$)"
"""How a text begins that an error was written as: with its kind, a colon and a blank."""


@dataclass(frozen=True, kw_only=True)
class JobFilter:
    """Which jobs of a queue are meant; all conditions have to hold.

    :param states: the names of their states; None for all.
    :param older_than: what ``since`` names is longer ago than this.
    :param newer_than: what ``since`` names is not as long ago as this.
    :param since: from when the age of a job counts.
    :param error: the kind of their last error: the name of its class, or what ``Fail(kind=...)`` has said; ``other``
        for texts that begin with neither, empty for jobs without an error.
    :param keys: their keys as texts, the parts of a composite one separated by commas; None for all.
    """

    states: tuple[str, ...] | None = None
    older_than: timedelta | None = None
    newer_than: timedelta | None = None
    since: Literal["finished_at", "created_at"] = "finished_at"
    error: str | None = None
    keys: tuple[str, ...] | None = None


@takes_session
def count(session: Session, model: type[Any], which: JobFilter) -> dict[str, int]:
    """Return how many of these jobs there are in each state; states without any are missing.

    :raises StatementError: when the model leaves out what ``which`` asks for.
    """
    jobs = surveyed(model, which).subquery("jobs")
    counted = sa.select(jobs.c.state, sa.func.count()).group_by(jobs.c.state).order_by(jobs.c.state)
    return {row[0]: row[1] for row in session.execute(counted, bind_arguments=bind(model))}


def next_keys(session: Session, model: type[Any], which: JobFilter, after: Key | None, limit: int) -> list[Key]:
    """Return the keys of the first ``limit`` of these jobs, in the order of their keys, that come after ``after``."""
    spec = select_jobs(model, "which").spec
    jobs = surveyed(model, which).subquery("jobs")
    keys = [jobs.c[name] for name in key_labels(spec)]
    found = sa.select(*keys).order_by(*keys).limit(limit)
    if after is not None:
        found = found.where(sa.tuple_(*keys) > sa.tuple_(*map(_typed, after, keys)))
    return [tuple(row) for row in session.execute(found, bind_arguments=bind(model))]


def surveyed(model: type[Any], which: JobFilter) -> AnySelect:
    """Return the survey of these jobs, see :meth:`~sqlaqueue.strategies.ClaimStrategy.survey`.

    :raises StatementError: when the model leaves out what ``which`` asks for.
    """
    spec, entity, select, _ = select_jobs(model, "which")
    name = entity.__name__
    jobs = spec.strategy.list_jobs(spec, select, which.states).subquery("surveyed")
    survey = sa.select(*jobs.c)
    if which.older_than is not None:
        survey = survey.where(_shown(jobs, which.since, name, "the age of jobs") <= clock() - which.older_than)
    if which.newer_than is not None:
        survey = survey.where(_shown(jobs, which.since, name, "the age of jobs") > clock() - which.newer_than)
    if which.error is not None:
        survey = survey.where(kind_of(_shown(jobs, "last_error", name, "the kind of an error")) == which.error)
    if which.keys is not None:
        keys = [_key(spec, jobs, text) for text in which.keys]
        survey = survey.where(sa.or_(sa.false(), *keys))
    return survey


def kind_of(error: sa.ColumnElement[Any]) -> sa.ColumnElement[str]:
    """Return the kind of an error: the name of its class, or what ``Fail(kind=...)`` has said.

    Its text begins with it. A text that begins in another way, as "order 1: no stock" does, is no kind of its own.
    """
    begins_with = sa.func.substring(error, sa.literal(_KIND, sa.Text()), type_=sa.Text())
    return sa.case(
        (sa.func.coalesce(error, "") == "", sa.literal(NO_ERROR, sa.Text())),
        # Its beginning is enough: a short column holds no more of it.
        (error.startswith(LEASE_EXPIRED.partition(":")[0] + ":"), sa.literal(RESCUED, sa.Text())),
        else_=sa.func.coalesce(begins_with, sa.literal(OTHER, sa.Text())),
    )


def bind(model: type[Any]) -> dict[str, Any]:
    """Return which engine the statements go to, in a session that has several."""
    return {"mapper": select_jobs(model, "bind").spec.mapper}


def _shown(jobs: sa.FromClause, role: str, name: str, what: str) -> sa.ColumnElement[Any]:
    if role not in jobs.c:
        msg = f"{what} needs the queue attribute {role!r}, which {name} leaves out; do without it"
        raise StatementError(msg)
    return jobs.c[role]


def _key(spec: QueueSpec, jobs: sa.FromClause, text: str) -> sa.ColumnElement[bool]:
    parts: Sequence[str] = [text] if len(spec.keys) == 1 else next(csv.reader([text]), [])
    if len(parts) != len(spec.keys):
        names = ",".join(key.key for key in spec.keys)
        msg = f"the key {text!r}: {spec.model.__name__} has a key of {len(spec.keys)} columns; write it as {names}"
        raise StatementError(msg)
    # The server reads the text as it reads the column's literals; what it becomes here is of no interest.
    pairs = zip(key_labels(spec), spec.keys, parts, strict=True)
    return sa.and_(*(jobs.c[name] == sa.cast(sa.literal(part, sa.Text()), key.type) for name, key, part in pairs))


def _typed(value: Any, column: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
    return sa.literal(value, column.type)
