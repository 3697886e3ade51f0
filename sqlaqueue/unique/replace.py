"""Move the values of new jobs to twins that wait: ``enqueue(on_twin="replace")``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from sqlaqueue.exc import StatementError
from sqlaqueue.keys import Key
from sqlaqueue.queue.backend import backend
from sqlaqueue.strategies.parts.unique_key import UniqueKey
from sqlaqueue.unique.new_job import NewJob
from sqlaqueue.unique.twin_search import with_keys

_OF_THE_QUEUE = (
    "status",
    "created_at",
    "started_at",
    "finished_at",
    "lease_token",
    "lease_expires_at",
    "claimed_by",
)
"""The roles that stay as they are."""


def lock_waiting(connection: sa.Connection, key: UniqueKey, twins: Sequence[Key]) -> set[Key]:
    """Lock those of ``twins`` that wait, and return their keys; in the order of keys, as all that lock several."""
    spec = key.spec
    waiting = with_keys(spec, sa.select(*spec.keys), list(dict.fromkeys(twins))).where(spec.in_state("pending"))
    locked = waiting.order_by(*spec.keys).with_for_update(of=spec.table, key_share=True)
    return {tuple(row) for row in connection.execute(backend().guarded(locked))}


def replace(connection: sa.Connection, key: UniqueKey, twin: Key, job: NewJob, *, keep_time: bool) -> None:
    """Write the values of a new job into the row of its twin, which is locked.

    :param keep_time: whether the twin keeps its ``run_at``.
    """
    spec = key.spec
    kept = {spec.columns[role] for role in _OF_THE_QUEUE if spec.has(role)} | {*key.columns, *spec.keys}
    if keep_time and spec.has("run_at"):
        kept.add(spec.columns["run_at"])
    if job.mapper.polymorphic_on is not None:
        kept |= {column for column in spec.table.c if column is job.mapper.polymorphic_on}
    given = job.given()
    for table in job.mapper.tables:
        values: dict[sa.Column[Any], Any] = {}
        for name in job.columns():
            for column in job.mapper.get_property(name).columns:
                if isinstance(column, sa.Column) and column.table is table and column not in kept:
                    values[column] = _value(job, column, given.get(name))
        if table is spec.table:
            values |= {spec.columns[role]: fresh for role, fresh in _FRESH.items() if spec.has(role)}
        keys = list(table.primary_key)
        values = {column: value for column, value in values.items() if column not in keys}
        if values and isinstance(table, sa.Table):
            here = sa.and_(*(column == part for column, part in zip(keys, twin, strict=True)))
            connection.execute(sa.update(table).where(here).values(values))


_FRESH = {"attempts": 0, "last_error": None}
"""The values of a job that has not run: what failed before had other arguments."""


def refuse_children(job: NewJob) -> None:
    """Refuse a job with objects that refer to it, which would have to move to its twin.

    :raises StatementError: naming the class and the fix.
    """
    if job.has_children:
        msg = (
            f"enqueue(on_twin='replace'): a {job.name} has objects that refer to it, and only its columns move to a "
            "twin; use on_twin='skip', and change the twin that it returns"
        )
        raise StatementError(msg)


def refuse_other_class(job: NewJob, twin: Any) -> None:
    """Refuse a job of another class than its twin.

    :raises StatementError: naming both.
    """
    if type(twin) is not job.mapper.class_:
        msg = (
            f"enqueue(on_twin='replace'): the twin of a {job.name} is a {type(twin).__name__}, which has other "
            "columns; add the class to Unique(...), or use on_twin='skip'"
        )
        raise StatementError(msg)


def _value(job: NewJob, column: sa.Column[Any], given: Any) -> Any:
    if given is not None:
        return given
    default = job.default_of(column)
    if default is not None:
        return default
    return sa.null() if column.server_default is None else sa.text("DEFAULT")
