"""How PostgreSQL prints an expression, which is the only reliable way to compare it with a stored one.

The database stores ``status = 'pending'`` as ``((status)::text = 'pending'::text)``. So the wanted predicate,
constraint, condition or default is created on an empty temporary copy of the table, read back as the database prints
it, and rolled back. Nothing about a definition has to be stored, and changes by hand are found as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from sqlaqueue.postgresql.catalog.reader import QualifiedName
from sqlaqueue.postgresql.catalog.reflected_objects import trigger_condition
from sqlaqueue.postgresql.ddl.sql_template import SqlTemplate, bare_table
from sqlaqueue.postgresql.types import NEUTRAL

_NAME = "sqlaqueue_normalize"
_COPY = bare_table(_NAME, "pg_temp")


class ExpressionNormalizer:
    """Prints expressions over the columns of one table as PostgreSQL stores them.

    :raises DBAPIError: when the role may not create a temporary table, or the transaction is read-only.
    """

    def __init__(self, connection: sa.Connection, table: QualifiedName) -> None:
        schema, name = table
        self._connection = connection
        self._savepoint = connection.begin_nested()
        create = SqlTemplate(f"CREATE TEMP TABLE {_NAME} (LIKE {{table}})", table=bare_table(name, schema))
        connection.execute(create)

    def close(self) -> None:
        """Remove the copy of the table."""
        self._savepoint.rollback()

    @staticmethod
    def same(normalize: Callable[[str], str | None], stored: str | None, wanted: str | None) -> bool:
        """Return whether a stored expression is the wanted one.

        PostgreSQL prints ``IN`` in another form each time it is parsed and printed again, as a downgrade or a restored
        dump does. So the stored expression is normalized as well if the two differ.

        :param normalize: the method of this class for the kind of expression.
        """
        if stored is None or wanted is None:
            return stored is wanted
        normalized = normalize(wanted)
        return normalized is not None and (stored == normalized or normalize(stored) == normalize(normalized))

    def index_predicate(self, text: str) -> str | None:
        """Return the predicate of an index as PostgreSQL prints it; None if the table cannot have it."""
        return self._created(
            f"CREATE INDEX ON {{copy}} ((1)) WHERE {text}",
            "SELECT pg_get_expr(indpred, indrelid) FROM pg_index WHERE indrelid = '{copy}'::regclass",
        )

    def unique_index(self, definition: str) -> str | None:
        """Return the definition of a unique index as PostgreSQL prints it; None if the table cannot have it.

        :param definition: what follows the name of the table in CREATE INDEX.
        """
        return self._created(
            f"CREATE UNIQUE INDEX ON {{copy}} {definition}",
            "SELECT substring(pg_get_indexdef(indexrelid) FROM ' USING .*') FROM pg_index"
            " WHERE indrelid = '{copy}'::regclass",
        )

    def check_constraint(self, text: str) -> str | None:
        """Return the condition of a constraint as PostgreSQL prints it; None if the table cannot have it."""
        return self._created(
            f"ALTER TABLE {{copy}} ADD CHECK ({text})",
            "SELECT pg_get_expr(conbin, conrelid) FROM pg_constraint"
            " WHERE conrelid = '{copy}'::regclass AND contype = 'c'",
        )

    def trigger_condition(self, event: str, text: str) -> str | None:
        """Return the condition of a row trigger as PostgreSQL prints it; None if the table cannot have it."""
        # The function does not matter; this one exists in every database.
        definition = self._created(
            f"CREATE TRIGGER normalize AFTER {event} ON {{copy}} FOR EACH ROW WHEN ({text})"
            " EXECUTE FUNCTION pg_catalog.suppress_redundant_updates_trigger()",
            "SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgrelid = '{copy}'::regclass",
        )
        return None if definition is None else trigger_condition(definition)

    def column_default(self, column: str, text: str) -> str | None:
        """Return the default of a column as PostgreSQL prints it; None if the column cannot have it."""
        name = NEUTRAL.identifier_preparer.quote(column)
        return self._created(
            f"ALTER TABLE {{copy}} ALTER COLUMN {name} SET DEFAULT {text}",
            "SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef WHERE adrelid = '{copy}'::regclass",
        )

    def _created(self, create: str, read: str) -> str | None:
        try:
            with self._connection.begin_nested() as savepoint:
                self._connection.execute(SqlTemplate(create, copy=_COPY))
                text: Any = self._connection.scalar(sa.text(read.replace("{copy}", f"pg_temp.{_NAME}")))
                savepoint.rollback()
        except DBAPIError:
            return None
        return str(text)
