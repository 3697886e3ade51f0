"""Enqueue many jobs by COPY, faster than in any other way: :func:`copy_in`.

::

    with Session(engine) as session:
        copy_in(session, Email, ({"to": address} for address in addresses))
        session.commit()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, scoped_session

from sqlaqueue.copy.column_plan import make_plan
from sqlaqueue.copy.drivers import Copy, check_driver, send
from sqlaqueue.copy.rows import Feed
from sqlaqueue.exc import StatementError
from sqlaqueue.mapping.mixin import spec_of


def copy_in(session: Session | scoped_session[Any], model: type[Any], rows: Iterable[Mapping[str, Any]], /) -> int:
    """Enqueue a job for each row by one COPY in the session's transaction, and return how many there are.

    The rows are streamed, so a generator of millions takes no memory. What is pending in the session is flushed before.
    All rows give the same attributes as the first one; what they leave out has its default, in Python or in the
    database. As with ``session.execute(insert(model), rows)``, types do with values what they always do, and no
    instance is made: ``@validates``, attribute events and relationships see nothing. Nothing else can be done on the
    session's connection before the last row, so what makes the rows must not read from it bit by bit.

    After an error nothing is enqueued. If it comes from the server or from a row behind the first, the transaction has
    to be rolled back, or the savepoint: ``with session.begin_nested(): copy_in(...)``.

    :param model: a queue class whose rows are in one table.
    :param rows: mappings from the names of attributes to values. Without any, no statement is sent.
    :raises NotAQueueError: when ``model`` is no queue.
    :raises StatementError: when a row is no mapping, has an attribute that the class or the first row does not have,
        or lacks one, or holds a value that cannot be written; naming the row, counted from 1.
    :raises ConfigurationError: when the driver is none of psycopg, asyncpg and psycopg2.
    :raises sqlalchemy.exc.DBAPIError: when the server refuses a row, as for any statement.
    """
    if isinstance(session, scoped_session):
        session = session()
    if not isinstance(session, Session):
        msg = f"copy_in({session!r}, ...): give a Session; for an AsyncSession there is async_copy_in"
        raise StatementError(msg)
    return copy_rows(session, model, rows, "copy_in")


def copy_rows(session: Session, model: type[Any], rows: Iterable[Mapping[str, Any]], verb: str) -> int:
    """Do what :func:`copy_in` does, under whichever name.

    :param verb: who is at work, for the texts of errors.
    """
    spec = spec_of(model)
    mapper, what = sa.inspect(model), f"{verb}({model.__name__})"
    # A session that chooses among engines looks at these.
    target: dict[str, Any] = {"mapper": mapper, "clause": sa.insert(mapper.local_table)}
    check_driver(session.get_bind(**target).dialect, what)
    remaining = _iterate(what, rows)
    try:
        first = next(remaining)
    except StopIteration:
        return 0
    if session.autoflush:
        session.flush()
    connection = session.connection(bind_arguments=target)
    plan = make_plan(verb, spec, mapper, first, connection.dialect)
    return send(Copy(connection, spec.table, Feed(plan, mapper, chain((first,), remaining))))


def _iterate(what: str, rows: Any) -> Iterator[Any]:
    # A mapping would be iterated over as well, by its keys.
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping | str | bytes):
        msg = f"{what}: the rows are {type(rows).__name__}; give an iterable of mappings, such as a list of dicts"
        raise StatementError(msg)
    return iter(rows)
