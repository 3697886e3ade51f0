"""INSERT .. ON CONFLICT, as INSERT .. ON DUPLICATE KEY UPDATE or as INSERT IGNORE.

With DO NOTHING and RETURNING, the rows are returned that were not there before. Only INSERT IGNORE does so, but makes
warnings of all errors: it cuts texts that are too long, and leaves out rows whose foreign key refers to nothing. So the
warnings are read, and all but those about duplicates become errors.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.visitors import iterate

from sqlaqueue.exc import StatementError
from sqlaqueue.mariadb.autocommit import refuse_autocommit
from sqlaqueue.mariadb.errors import DUPLICATES, violated_key

_IGNORES = re.compile(r"/\*sqlaqueue ignores (?P<key>\w*)\*/ ")
_SAVEPOINT = "sqlaqueue_insert"
_INTEGRITY = {1048, 1216, 1364, 1452}


def is_ignoring(insert: Any) -> bool:
    """Return whether an INSERT with DO NOTHING becomes an INSERT IGNORE, and not ON DUPLICATE KEY UPDATE.

    One with RETURNING does, as the other form returns the existing rows as well. So does one of a SELECT, as the other
    form needs a column of the table, whose name the SELECT may have too.
    """
    return bool(insert._returning) or insert.select is not None  # noqa: SLF001 - not public


def in_order_of_assignment(values: Mapping[Any, Any], table: sa.Table) -> list[Any]:
    """Return the columns of DO UPDATE, each behind those that are computed from it.

    MariaDB assigns one column after another, so a value or condition would read what has been assigned before.

    :raises StatementError: if two columns are computed from each other.
    """
    readers: dict[Any, set[Any]] = {column: set() for column in values}
    for column, value in values.items():
        parts: Any = iterate(value)
        for part in parts:
            read = table.c.get(part.key) if isinstance(part, sa.ColumnClause) and part.table is not None else None
            if read is not None and read is not column and read in readers and part.shares_lineage(read):
                readers[read].add(column)
    try:
        return [*TopologicalSorter(readers).static_order()]
    except CycleError as error:
        names = " and ".join(dict.fromkeys(each.key for each in error.args[1]))
        msg = (
            f"{table.name}: on_conflict_do_update() computes {names} from the old values of each other, in set_ or "
            "where, and MariaDB assigns one after the other; update one of them by a statement of its own"
        )
        raise StatementError(msg) from None


def ignoring_duplicates(statement: str, clause: Any, table: Any) -> str:
    """Return an INSERT IGNORE whose other errors are raised when it is executed.

    :param statement: the INSERT IGNORE.
    :param clause: ON CONFLICT DO NOTHING. If it names the primary key, duplicates in another index are errors.
    """
    names = {getattr(each, "name", each) for each in clause.inferred_target_elements or ()}
    key = "PRIMARY" if names and names == {column.name for column in table.primary_key} else ""
    return f"/*sqlaqueue ignores {key}*/ {statement}"


@contextlib.contextmanager
def errors_of_ignored_rows(cursor: Any, statement: str, context: Any) -> Iterator[None]:
    """Execute a statement; if it is such an INSERT and has ignored another error, undo it and raise the error.

    :raises StatementError: if the rows are to be streamed, or there are more warnings than the server keeps.
    """
    head = _IGNORES.match(statement)
    if head is None:
        yield
        return
    table = context.compiled.statement.table
    if context._is_server_side:  # noqa: SLF001 - not public
        msg = (
            f"{table.name}: on_conflict_do_nothing() with returning() or a SELECT reads the warnings of the server "
            "before the rows, so these cannot be streamed; leave out stream(), stream_results and yield_per"
        )
        raise StatementError(msg)
    connection = context.root_connection.connection
    refuse_autocommit(context.root_connection, context.compiled.statement)
    # By a cursor of its own: the other one has the rows that are returned.
    own = connection.cursor()
    try:
        own.execute(f"SAVEPOINT {_SAVEPOINT}")
        yield
        own.execute("SHOW WARNINGS")
        warnings = own.fetchall()
        for level, number, text in warnings:
            if level == "Note" or (number in DUPLICATES and head["key"] in {"", violated_key(text)}):
                continue
            own.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
            integrity = number in _INTEGRITY or number in DUPLICATES
            raised = context.dialect.dbapi.IntegrityError if integrity else context.dialect.dbapi.DataError
            # As the server's errors would be that it has made warnings of.
            raise raised(_ERROR_OF_WARNING.get(number, number), text)
        if warnings:
            own.execute("SELECT @@warning_count")
            number = own.fetchall()[0][0]
            if number > len(warnings):
                own.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
                msg = (
                    f"{table.name}: on_conflict_do_nothing() has passed over {number} rows, and MariaDB tells the "
                    f"reason for {len(warnings)} of them only, as max_error_count says; insert fewer rows by one "
                    "statement"
                )
                raise StatementError(msg)
    finally:
        own.close()


_ERROR_OF_WARNING = {1265: 1406}
"""A text that was cut has another number as an error."""
