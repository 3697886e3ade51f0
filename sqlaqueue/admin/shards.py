"""Statements on a table that Citus distributes by a column: it locks the rows of one shard only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue._typing import AnySelect
from sqlaqueue.admin.job_filter import bind_arguments
from sqlaqueue.postgresql.plans import shard_column
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.sql.engine import engine_of, plain_form

Narrowed = TypeVar("Narrowed", AnySelect, sa.CompoundSelect[Any])


def distribution_column(session: Session, spec: QueueSpec) -> sa.Column[Any] | None:
    """Return the column that distributes a queue's table; None for a table of which a statement may lock all rows."""
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


def across_shards(session: Session, spec: QueueSpec, statement: Narrowed) -> Narrowed:
    """Return a SELECT over jobs in the form that Citus executes over several shards.

    The other form reads the index of claims priority by priority, by a recursive query, which is for one shard only.
    """
    if len(spec.keys) == 1 or distribution_column(session, spec) is None:
        return statement
    plain: Any = plain_form(statement)
    return statement if plain is None else plain


def specs_of_expired(session: Session, spec: QueueSpec) -> Sequence[QueueSpec]:
    """Return the queue for each statement that rescues: one for each shard that has jobs with an expired lease."""
    column = None if len(spec.keys) == 1 else distribution_column(session, spec)
    if column is None:
        return [spec]
    attribute = spec.mapper.get_property_by_column(column).key
    values = session.execute(_expired_values(spec, column), bind_arguments=bind_arguments(spec.model)).scalars()
    return [spec.for_shard(attribute, value) for value in values]


def _expired_values(spec: QueueSpec, column: sa.Column[Any]) -> AnySelect:
    expires = spec.column("lease_expires_at", "rescue()")
    return sa.select(column).where(spec.in_state("processing"), expires <= clock()).distinct()
