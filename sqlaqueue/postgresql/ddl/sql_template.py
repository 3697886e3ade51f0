"""SQL text with placeholders for tables, for statements that SQLAlchemy has no construct for.

A template is a :class:`~sqlalchemy.schema.DDLElement`. It can be executed and written to a script (``--sql``) like any
other DDL, with names quoted and schemas translated.
"""

from __future__ import annotations

import re
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import DDLElement
from sqlalchemy.sql.compiler import DDLCompiler
from sqlalchemy.sql.elements import ClauseElement

from sqlaqueue.postgresql.ddl.rendering import escaped
from sqlaqueue.postgresql.types import NEUTRAL

_PLACEHOLDER = re.compile(r"\{(\w+)(:literal)?\}")


def bare_table(name: str, schema: str | None) -> sa.Table:
    """Return a table without columns, which serves as a qualified name."""
    return sa.Table(name, sa.MetaData(), schema=schema)


class SqlTemplate(DDLElement):
    """One statement as text: ``{key}`` is the name of a table, ``{key:literal}`` the same name as a string literal."""

    inherit_cache = False

    def __init__(self, text: str, **tables: sa.Table) -> None:
        self.text = text
        self.tables = tables


@compiles(SqlTemplate, "postgresql")
def _render(element: SqlTemplate, compiler: DDLCompiler, **_: Any) -> str:
    def replacement(match: re.Match[str]) -> str:
        table = element.tables.get(match[1])
        if table is None:
            return match[0]
        name = compiler.preparer.format_table(table)
        # Dollar-quoted: schema_translate_map inserts the schema later, and its name may contain a quote.
        return f"$sqlaqueue_name${name}$sqlaqueue_name$" if match[2] else name

    return _PLACEHOLDER.sub(replacement, escaped(compiler, element.text))


def literal_sql(expression: Any) -> str:
    """Return an expression over the columns of one table as SQL text, with its values as literals."""
    element = expression if isinstance(expression, ClauseElement) else sa.text(str(expression))
    options = {"literal_binds": True, "include_table": False}
    return str(element.compile(dialect=NEUTRAL, compile_kwargs=options))


def index_definition(index: sa.Index) -> str:
    """Return what follows the name of the table in CREATE INDEX."""
    create = str(sa.schema.CreateIndex(index).compile(dialect=NEUTRAL))
    table = NEUTRAL.identifier_preparer.format_table(index.table)  # type: ignore[arg-type] # every index of a model has a table
    return create.partition(f" ON {table} ")[2]


def server_default_sql(column: sa.Column[Any]) -> str | None:
    """Return the server default of a column as SQL text."""
    compiler = NEUTRAL.ddl_compiler(NEUTRAL, None)  # type: ignore[arg-type] # only a part of a statement is compiled
    return compiler.get_column_default_string(column)
