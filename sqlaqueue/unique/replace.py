"""Move the values of new jobs to twins that wait: ``enqueue(on_twin="replace")``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from sqlaqueue.exc import StatementError
from sqlaqueue.queue.run import Key
from sqlaqueue.sql.engine import engine_of, with_plain_form
from sqlaqueue.sql.types import guarded
from sqlaqueue.strategies.twins import UniqueKey
from sqlaqueue.unique.new_job import NewJob
from sqlaqueue.unique.twin_search import with_keys

_KEPT = object()
"""For a column that is left as it is, or to its ``onupdate``."""

_NULL = sa.null()
"""One object each, so that rows with the same columns share a statement."""

_OF_THE_QUEUE = (
    "status",
    "created_at",
    "started_at",
    "traceparent",
    "finished_at",
    "lease_token",
    "lease_expires_at",
    "claimed_by",
)
"""The roles that stay as they are."""


def lock_waiting(connection: sa.Connection, key: UniqueKey, twins: Sequence[Key]) -> set[Key]:
    """Lock those of ``twins`` that wait, and return their keys; in the order of keys, as all that lock several."""
    spec, keys = key.spec, list(dict.fromkeys(twins))
    if engine_of(connection.dialect) is None:
        waiting = with_keys(spec, sa.select(*spec.keys), keys)
    else:
        # A join might lock rows that it only looks at.
        waiting = sa.select(*spec.keys).where(spec.key_in(spec.keys, keys))
    waiting = waiting.where(spec.in_state("pending"))
    locked = waiting.order_by(*spec.keys).with_for_update(of=spec.table, key_share=True)
    return {tuple(row) for row in connection.execute(guarded(locked))}


def replace(
    connection: sa.Connection, key: UniqueKey, twins: Mapping[Key, tuple[NewJob, Any]], *, keep_time: bool
) -> None:
    """Write the values of new jobs into the rows of their twins, which are locked.

    :param twins: the new job and the instance of the twin, by the twin's key.
    :param keep_time: whether the twins keep their ``run_at``.
    """
    groups: dict[tuple[sa.Table, tuple[Any, ...]], list[dict[str, Any]]] = {}
    for twin, (job, instance) in twins.items():
        job.set_defaults(connection)
        given = job.given()
        for table in job.mapper.tables:
            if isinstance(table, sa.Table):
                values = _values(key, job, table, given, keep_time=keep_time) | _next_version(job, table, instance)
                bound = {column: value for column, value in values.items() if not isinstance(value, sa.ClauseElement)}
                # Values that are SQL are part of the statement.
                parts = tuple((column, None if column in bound else value) for column, value in values.items())
                parameters = {f"value_{number}": bound.get(column) for number, (column, _) in enumerate(parts)}
                parameters |= {f"key_{number}": part for number, part in enumerate(twin)}
                groups.setdefault((table, parts), []).append(parameters)
    for (table, parts), parameters_of_rows in groups.items():
        here = sa.and_(*(column == sa.bindparam(f"key_{number}") for number, column in enumerate(table.primary_key)))
        changes = {
            column: sa.bindparam(f"value_{number}", type_=column.type) if value is None else value
            for number, (column, value) in enumerate(parts)
        }
        used = {f"key_{number}" for number, _ in enumerate(table.primary_key)}
        used |= {f"value_{number}" for number, (_, value) in enumerate(parts) if value is None}
        if changes:
            rows = [{name: row[name] for name in used} for row in parameters_of_rows]
            connection.execute(sa.update(table).where(here).values(changes), rows)


def _values(
    key: UniqueKey, job: NewJob, table: sa.Table, given: Mapping[str, Any], *, keep_time: bool
) -> dict[sa.Column[Any], Any]:
    """Return what is written into a row of a table."""
    spec = key.spec
    kept = {spec.columns[role] for role in _OF_THE_QUEUE if spec.has(role)} | {*key.columns, *table.primary_key}
    if keep_time and spec.has("run_at"):
        kept.add(spec.columns["run_at"])
    values = {
        column: value
        for name in job.columns()
        for column in job.mapper.get_property(name).columns
        if isinstance(column, sa.Column)
        and column.table is table
        and column not in kept
        and column is not job.mapper.polymorphic_on
        and column is not job.mapper.version_id_col
        and (value := given[name] if name in given else _default(column)) is not _KEPT
    }
    fresh = {spec.columns[role]: value for role, value in _FRESH.items() if spec.has(role)}
    return values | (fresh if table is spec.table else {})


_FRESH: dict[str, Any] = {"attempts": 0, "last_error": _NULL}
"""The values of a job that has not run: what failed before had other arguments."""


def refuse_children(job: NewJob) -> None:
    """Refuse a job with objects that refer to it, which would have to move to its twin.

    :raises StatementError: naming the class and the fix.
    """
    if job.relationships.has_others:
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


def _next_version(job: NewJob, table: sa.Table, twin: Any) -> dict[sa.Column[Any], Any]:
    """Return the version that follows that of the twin, for a class with ``version_id_col``."""
    version, generate = job.mapper.version_id_col, job.mapper.version_id_generator
    if not isinstance(version, sa.Column) or version.table is not table or not callable(generate):
        return {}
    return {version: generate(getattr(twin, job.mapper.get_property_by_column(version).key))}


def _default(column: sa.Column[Any]) -> Any:
    """Return what is written for an attribute that the new job does not set, and for which Python has no value."""
    default: Any = column.default
    if column.onupdate is not None or (default is not None and default.is_sequence):
        return _KEPT
    if default is not None and default.is_clause_element:
        return default.arg
    server_default: Any = column.server_default
    if server_default is None:
        return _NULL
    return with_plain_form(sa.text("DEFAULT"), lambda: _expression(server_default.arg))


def _expression(default: Any) -> Any:
    """Return a default as an expression of a statement, for an UPDATE that cannot name it by DEFAULT."""
    return sa.literal(default) if isinstance(default, str) else default
