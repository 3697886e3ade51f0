"""Ties database objects to a table: they are created after it and dropped with it.

The events are those of all tables: a listener of one table would be lost when its MetaData is pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import InternalError
from sqlalchemy.schema import DDLElement

from sqlaqueue.exc import ConfigurationError, DatabaseNotReadyError
from sqlaqueue.postgresql.ddl.objects import Function, QueueObject, TriggerFunction
from sqlaqueue.queue.backend import SCHEDULE
from sqlaqueue.queue.engine import PREPARED_BY, engine_of
from sqlaqueue.queue.spec import QueueSpec

_NO_TRIGGERS = "triggers are not supported on distributed tables"
"""The error of Citus, which has no SQLSTATE of its own."""

# Not in table.info, which Alembic writes into migrations as if it were source code.
_OBJECTS = "_sqlaqueue_objects"
_SPEC = "_sqlaqueue_spec"

_WITH_INDEXES = ("unique", "limits", "rates", "order", "fair")
"""The options of a queue whose indexes are written for PostgreSQL."""


class _Queue:
    """The queue of a table. It belongs to this process; a pickle of the table leaves it out."""

    def __init__(self, spec: QueueSpec | None = None) -> None:
        self.spec = spec

    def __reduce__(self) -> tuple[type[_Queue], tuple[()]]:
        return _Queue, ()


def set_queue(table: sa.Table, spec: QueueSpec) -> None:
    """Register the queue of a table, and detach the objects of a class that had the table before.

    A class is defined again when its module is reloaded and its table has ``extend_existing``.
    """
    before = queue_of(table)
    if before is not None:
        table.__dict__.pop(_OBJECTS, None)
        for purpose, side in before.side_tables.items():
            # Tables that the queues of a schema share are registered under their own names.
            if purpose != side.name:
                table.metadata.remove(side)
    table.__dict__[_SPEC] = _Queue(spec)


def queue_of(table: sa.Table) -> QueueSpec | None:
    """Return the queue whose jobs are the rows of a table; None when there is none."""
    found: _Queue | None = table.__dict__.get(_SPEC)
    return None if found is None else found.spec


def attach(table: sa.Table, element: QueueObject) -> None:
    """Create ``element`` after ``table`` and drop it with it, on PostgreSQL."""
    table.__dict__.setdefault(_OBJECTS, []).append(element)


def objects_of(table: sa.Table) -> Sequence[QueueObject]:
    """Return the objects that are attached to a table."""
    objects: Sequence[QueueObject] = table.__dict__.get(_OBJECTS, ())
    return objects


def called_functions(table: sa.Table) -> Sequence[Function]:
    """Return those of its functions that statements call, and no trigger."""
    return [each for each in objects_of(table) if isinstance(each, Function) and not isinstance(each, TriggerFunction)]


def functions_of(spec: QueueSpec) -> Sequence[Function]:
    """Return the functions that statements of a queue call, those of its side tables among them."""
    return [each for table in (spec.table, *spec.side_tables.values()) for each in called_functions(table)]


@event.listens_for(sa.Table, "before_create")
def _check_supported(table: sa.Table, connection: sa.Connection, **_: Any) -> None:
    other, spec = engine_of(connection.dialect), queue_of(table)
    if spec is None:
        return
    if other is not None:
        other.check_supported(spec)
        return
    call = PREPARED_BY.get(connection.dialect.name)
    used = [option for option in _WITH_INDEXES if getattr(spec.config, option)]
    if call is not None and used:
        # Their indexes have expressions and conditions, which another compiler refuses or leaves out: a unique index
        # without its condition would forbid a job for ever, once it has had a twin.
        msg = (
            f"{spec.model.__name__}: the indexes of QueueConfig({used[0]}=...) cannot be created by an engine for "
            f"{connection.dialect.name} that is not prepared; call {call} right after create_engine()"
        )
        raise ConfigurationError(msg)


@event.listens_for(sa.Table, "after_create")
def _create_objects(table: sa.Table, connection: sa.Connection, **_: Any) -> None:
    other = engine_of(connection.dialect)
    if other is not None:
        other.created(table, connection)
        return
    for element in objects_of(table):
        for created in element.created():
            _execute(created, table, connection)


@event.listens_for(sa.Table, "after_drop")
def _drop_objects(table: sa.Table, connection: sa.Connection, **_: Any) -> None:
    for element in objects_of(table):
        dropped = element.dropped()
        if dropped is not None:
            _execute(dropped, table, connection)


@event.listens_for(sa.MetaData, "after_create")
def _create_beside(
    metadata: sa.MetaData,  # noqa: ARG001 - the event's signature
    connection: sa.Connection,
    tables: Sequence[sa.Table] | None = None,
    **options: Any,
) -> None:
    # Without checkfirst, and with Table.create(), the caller creates each table.
    if options.get("checkfirst"):
        _create_side_tables(tables or (), connection)


def _create_side_tables(tables: Sequence[sa.Table], connection: sa.Connection) -> None:
    """Create the side tables of the queues among ``tables``, if only some tables were requested.

    Without them the first row would fail inside a trigger, naming a table that is in no model.
    """
    if connection.dialect.name != "postgresql" and engine_of(connection.dialect) is None:
        return
    for table in tables:
        spec = queue_of(table)
        for side in () if spec is None else spec.side_tables.values():
            if side not in tables:
                side.create(connection, checkfirst=True)


def _execute(element: DDLElement, table: sa.Table, connection: sa.Connection) -> None:
    try:
        element.execute_if(dialect="postgresql")(table, connection)
    except InternalError as error:
        if _NO_TRIGGERS not in str(error.orig):
            raise
        spec = queue_of(table)
        if table.name == SCHEDULE:
            instead = (
                "so there are no schedules; declare them for a queue whose table is local or distributed by a column"
            )
        elif spec is not None and spec.config.strategy != "update_status":
            instead = 'so use QueueConfig(strategy="update_status", notify=False), or a local table'
        else:
            instead = "so use QueueConfig(notify=False), or a local table"
        msg = f"{table.fullname}: Citus creates no triggers in a distributed schema, {instead}"
        raise DatabaseNotReadyError(msg) from error
