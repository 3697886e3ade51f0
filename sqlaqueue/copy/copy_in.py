"""Bulk enqueueing by COPY, the fastest way to enqueue many jobs: :func:`copy_in`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session

from sqlaqueue.copy.drivers import Copy, RowStream, check_driver, make_column_plan, quoted, send
from sqlaqueue.exc import StatementError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sessions import is_of_asyncio, session_in_scope
from sqlaqueue.sql.types import as_library_statement, insert_unless
from sqlaqueue.strategies.unique_key import UniqueKey, explaining_missing_index, unique_key

if TYPE_CHECKING:
    # It needs greenlet, which sync code may lack.
    from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session

_STAGING = "sqlaqueue_copy"


def copy_unless_duplicate(connection: sa.Connection, key: UniqueKey, rows: RowStream) -> int:
    """Copy rows, insert those that have no duplicate, and return their number.

    They are copied into a temporary table first, since COPY cannot skip rows. They are inserted in the order of the
    unique values, so that two transactions that insert the same ones do not wait for each other in a circle.
    """
    spec, columns = key.spec, rows.plan.columns
    # With the schema of temporary tables, which no schema_translate_map changes.
    copied = (sa.Column(column.name, column.type, key=column.key) for column in columns)
    staging = sa.Table(_STAGING, sa.MetaData(), *copied, schema="pg_temp")
    # Without the constraints of the table.
    source, names = quoted(spec.table, connection, [column.name for column in columns])
    command = f"CREATE TEMPORARY TABLE {_STAGING} ON COMMIT DROP AS SELECT {names} FROM {source} WITH NO DATA"  # noqa: S608 - the names are quoted
    connection.execute(sa.text(command.replace(":", "\\:")))
    send(Copy(connection, staging, rows))
    order = [staging.c[column.key] for column in key.columns if column.key in staging.c]
    insert = insert_unless(
        spec.table,
        ([column.key for column in columns], sa.select(*staging.c).order_by(*order)),
        unique=key.values(spec.table),
        where=key.counts(spec.table) if spec.has("status") else None,
    )
    counted = as_library_statement(insert).execution_options(preserve_rowcount=True)
    with explaining_missing_index(spec):
        number: int = connection.execute(counted).rowcount
    connection.execute(sa.text(f"DROP TABLE pg_temp.{_STAGING}"))
    return number


CopyOnDuplicate = Literal["raise", "skip"]


def copy_in(
    session: Session | scoped_session[Any],
    model: type[Any],
    rows: Iterable[Mapping[str, Any]],
    /,
    *,
    on_duplicate: CopyOnDuplicate = "raise",
) -> int:
    """Enqueue a job for each row by COPY, in the session's transaction, and return the number of rows.

    The rows are streamed: a generator of millions of rows needs little memory. Pending changes of the session are
    flushed first. All rows must give the same attributes as the first one; other attributes get their defaults, in
    Python or in the database. As with ``session.execute(insert(model), rows)``, types convert values as usual, and no
    instances are made: ``@validates``, attribute events and relationships have no effect. Until the last row is sent,
    the connection can do nothing else, so a generator of rows must not use the session.

    If an error is raised, no row is enqueued. After an error of the server or of a row other than the first, roll back
    the transaction, or the savepoint: ``with session.begin_nested(): copy_in(...)``.

    ::

        addresses = ["ada@example.com", "alan@example.com"]
        copy_in(session, Email, ({"to": address} for address in addresses))
        session.commit()

    :param model: a queue class whose rows are in one table.
    :param rows: mappings from attribute names to values. Without rows, no statement is sent.
    :param on_duplicate: for a queue with ``QueueConfig(unique=...)``: ``"raise"`` raises an IntegrityError if a row is
        a duplicate, as any INSERT does. ``"skip"`` leaves duplicates out, and returns the number of the other rows; all
        are copied into a temporary table first, which needs SELECT on the table and TEMPORARY on the database.
    :raises NotAQueueError: if ``model`` is not a queue.
    :raises StatementError: if a row is not a mapping, does not have the attributes of the first row, or has a value
        that cannot be written. The error contains the number of the row, from 1.
    :raises ConfigurationError: if the driver is not psycopg, asyncpg or psycopg2.
    :raises sqlalchemy.exc.DBAPIError: if the server refuses a row.
    """
    if isinstance(session, scoped_session):
        session = session()
    if not isinstance(session, Session):
        msg = f"copy_in({session!r}, ...): use a Session, or async_copy_in() for an AsyncSession"
        raise StatementError(msg)
    return copy_rows(session, model, rows, "copy_in", on_duplicate)


def copy_rows(
    session: Session, model: type[Any], rows: Iterable[Mapping[str, Any]], verb: str, on_duplicate: CopyOnDuplicate
) -> int:
    """Enqueue a job for each row, as :func:`copy_in` documents.

    :param verb: the name of the called function, for errors.
    """
    spec = spec_of(model)
    mapper, what = sa.inspect(model), f"{verb}({model.__name__})"
    unique = _unique_key(spec, on_duplicate, what)
    # Sessions with several engines choose one by these. Not an INSERT: a get_bind() that reads from a replica may know
    # only UPDATE and DELETE as writes, since the INSERTs of a flush say so in another way.
    target: dict[str, Any] = {"mapper": mapper, "clause": sa.update(mapper.local_table)}
    check_driver(session.get_bind(**target).dialect, what)
    given: object = rows  # without a type checker, callers may pass any object
    # A mapping is iterable as well, over its keys.
    if not isinstance(given, Iterable) or isinstance(given, Mapping | str | bytes):
        msg = f"{what}: the rows are {type(given).__name__}; use an iterable of mappings, such as a list of dicts"
        raise StatementError(msg)
    remaining = iter(rows)
    try:
        first = next(remaining)
    except StopIteration:
        return 0
    if session.autoflush:
        session.flush()
    connection = session.connection(bind_arguments=target)
    plan = make_column_plan(what, spec, mapper, first, connection.dialect)
    stream = RowStream(plan, mapper, chain((first,), remaining))
    return (
        send(Copy(connection, spec.table, stream))
        if unique is None
        else copy_unless_duplicate(connection, unique, stream)
    )


def _unique_key(spec: QueueSpec, on_duplicate: object, what: str) -> UniqueKey | None:
    """Return by what the duplicates are found that are left out; None to copy all rows."""
    if on_duplicate == "raise":
        return None
    if on_duplicate != "skip":
        msg = f"{what}: on_duplicate={on_duplicate!r}: use 'raise' or 'skip'"
        raise StatementError(msg)
    unique = unique_key(spec)
    if unique is None:
        msg = f"{what}: on_duplicate='skip': {spec.model.__name__} is not unique; set QueueConfig(unique=Unique(...))"
        raise StatementError(msg)
    return unique


async def async_copy_in(
    session: AsyncSession | async_scoped_session[Any],
    model: type[Any],
    rows: Iterable[Mapping[str, Any]],
    /,
    *,
    on_duplicate: CopyOnDuplicate = "raise",
) -> int:
    """Enqueue a job for each row by COPY, like :func:`~sqlaqueue.copy_in`, which documents parameters and errors.

    asyncpg accepts only values of the type of the column in the database.

    ::

        await async_copy_in(async_session, Email, [{"to": "ada@example.com"}])
        await async_session.commit()
    """
    own = session_in_scope(session)
    if not is_of_asyncio(own, "AsyncSession"):
        msg = f"async_copy_in({session!r}, ...): use an AsyncSession, or copy_in() for a Session"
        raise StatementError(msg)
    inserted: int = await own.run_sync(copy_rows, model, rows, "async_copy_in", on_duplicate)
    return inserted
