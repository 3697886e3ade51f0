"""Tables as the catalog has them: by name, by OID, and whether row-level security hides rows."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.elements import ColumnElement


class TableName(ColumnElement[str]):
    """The name of a table in SQL, as a text; its schema is translated as in any statement."""

    inherit_cache = False

    def __init__(self, table: sa.Table) -> None:
        self.table = table


@compiles(TableName)
def _table_name(element: TableName, compiler: SQLCompiler, **_: Any) -> str:
    # Dollar-quoted: a schema that is inserted later may have a quote in its name.
    return f"$sqlaqueue${compiler.preparer.format_table(element.table)}$sqlaqueue$"


class TableId(ColumnElement[Any]):
    """The OID of a table (regclass); null when the search path has no table of its name."""

    inherit_cache = False

    def __init__(self, table: sa.Table) -> None:
        self.table_name = TableName(table)


@compiles(TableId)
def _table_id(element: TableId, compiler: SQLCompiler, **_: Any) -> str:
    return f"to_regclass({compiler.process(element.table_name)})"


def system_table(name: str, *columns: str) -> sa.TableClause:
    """Return a table of ``pg_catalog`` with some of its columns."""
    return sa.table(name, *map(sa.column, columns))


def sees_all(table: sa.Table) -> sa.ColumnElement[bool]:
    """Return the condition that row-level security hides no row of a table from the current role."""
    hidden: sa.ColumnElement[bool] = sa.func.row_security_active(TableName(table), type_=sa.Boolean())
    return ~hidden
