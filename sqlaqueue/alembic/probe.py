"""How PostgreSQL itself would write an expression: the one reliable way to compare it with what is there.

The database does not keep ``status = 'pending'`` but ``((status)::text = 'pending'::text)``. So the wanted predicate,
constraint or default is made on an empty temporary copy of the table, read back as the database prints it, and rolled
back. Nothing about a definition has to be stored for that, and a change by hand is seen as well.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import sqlalchemy as sa
from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError

from sqlaqueue.alembic.catalog import Place, condition_in
from sqlaqueue.alembic.sql import Statement, stand_in
from sqlaqueue.postgresql.ddl import NEUTRAL

log = logging.getLogger(__name__)

Printed = Callable[[str], str | None]

_COPY = stand_in("sqlaqueue_probe", "pg_temp")


class Probe:
    """An empty copy of one table."""

    def __init__(self, connection: sa.Connection) -> None:
        self._connection = connection

    def predicate(self, text: str) -> str | None:
        """Return the predicate of an index as PostgreSQL prints it; None when the table cannot have it."""
        return self._made(
            f"CREATE INDEX ON {{copy}} ((1)) WHERE {text}",
            "SELECT pg_get_expr(indpred, indrelid) FROM pg_index WHERE indrelid = '{copy}'::regclass",
        )

    @staticmethod
    def same(printed: Printed, there: str | None, wanted: str | None) -> bool:
        """Tell whether what is there is what is wanted, by one of the ways to print it.

        What PostgreSQL prints of ``IN`` reads otherwise when it is parsed and printed again, as a downgrade or a
        restored dump does.
        """
        if there is None or wanted is None:
            return there is wanted
        first = printed(wanted)
        return first is not None and (there == first or printed(there) == printed(first))

    def check(self, text: str) -> str | None:
        """Return the condition of a constraint as PostgreSQL prints it; None when the table cannot have it."""
        return self._made(
            f"ALTER TABLE {{copy}} ADD CHECK ({text})",
            "SELECT pg_get_expr(conbin, conrelid) FROM pg_constraint"
            " WHERE conrelid = '{copy}'::regclass AND contype = 'c'",
        )

    def condition(self, event: str, text: str) -> str | None:
        """Return the condition of a trigger as PostgreSQL prints it; None when the table cannot have it."""
        # Any function will do, and this one is always there.
        definition = self._made(
            f"CREATE TRIGGER probe AFTER {event} ON {{copy}} FOR EACH ROW WHEN ({text})"
            " EXECUTE FUNCTION pg_catalog.suppress_redundant_updates_trigger()",
            "SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgrelid = '{copy}'::regclass",
        )
        return None if definition is None else condition_in(definition)

    def default(self, column: str, text: str) -> str | None:
        """Return the default of a column as PostgreSQL prints it; None when the column cannot have it."""
        name = NEUTRAL.identifier_preparer.quote(column)
        return self._made(
            f"ALTER TABLE {{copy}} ALTER COLUMN {name} SET DEFAULT {text}",
            "SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef WHERE adrelid = '{copy}'::regclass",
        )

    def _made(self, make: str, look: str) -> str | None:
        try:
            with self._connection.begin_nested() as savepoint:
                self._connection.execute(Statement(make, copy=_COPY))
                text: Any = self._connection.scalar(sa.text(look.replace("{copy}", "pg_temp.sqlaqueue_probe")))
                savepoint.rollback()
        except DBAPIError:
            return None
        return str(text)


@contextlib.contextmanager
def probing(connection: sa.Connection, place: Place) -> Iterator[Probe]:
    """Make a copy of a table that has its columns and nothing else.

    :raises CommandError: when that is not possible.
    """
    schema, table = place
    try:
        savepoint = connection.begin_nested()
        connection.execute(Statement("CREATE TEMP TABLE sqlaqueue_probe (LIKE {table})", table=stand_in(table, schema)))
    except DBAPIError as error:
        msg = (
            f"the indexes and constraints of table {table} cannot be compared: that needs the right to create a "
            f"temporary table, in a transaction that may write ({error.orig})"
        )
        raise CommandError(msg) from error
    try:
        yield Probe(connection)
    finally:
        savepoint.rollback()
