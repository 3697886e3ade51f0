"""Statements as text, for an operator to execute: with their values, and with translated schemas."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.schema import DDLElement

from sqlaqueue.postgresql.ddl.objects import QueueObject
from sqlaqueue.postgresql.ddl.sql_template import SqlTemplate
from sqlaqueue.postgresql.types import NEUTRAL

_PARAMETER = re.compile(r"(?<![:\w]):(\w+)")


def sql_text(connection: sa.Connection, statement: Any) -> str:
    """Return a statement as text with its values, which ends with a semicolon."""
    options = {} if isinstance(statement, DDLElement) else {"compile_kwargs": {"literal_binds": True}}
    return f"{_compiled(connection, statement, **options)};"


def name_of(connection: sa.Connection, table: sa.Table) -> str:
    """Return the name of a table for SQL, whether it exists or not."""
    return _compiled(connection, SqlTemplate("{table}", table=table))


def sql_texts(connection: sa.Connection, statements: Iterable[Any]) -> str:
    """Return several statements, each on a line of its own."""
    return "\n".join(sql_text(connection, each) for each in statements)


def creation(table: sa.Table, objects: Iterable[QueueObject]) -> list[Any]:
    """Return the statements that create a table with its indexes and objects."""
    indexes = sorted(table.indexes, key=lambda index: str(index.name))
    return [
        sa.schema.CreateTable(table),
        *map(sa.schema.CreateIndex, indexes),
        *(created for each in objects for created in each.created()),
    ]


def _compiled(connection: sa.Connection, statement: Any, **options: Any) -> str:
    names = connection.get_execution_options().get("schema_translate_map")
    if names is not None:
        options |= {"schema_translate_map": names, "render_schema_translate": True}
    compiled: Any = statement.compile(dialect=NEUTRAL, **options)
    binds: dict[str, Any] = getattr(compiled, "binds", {})

    def literal(found: re.Match[str]) -> str:
        bind = binds.get(found[1])
        return found[0] if bind is None else str(compiled.render_literal_value(bind.effective_value, bind.type))

    # SQLAlchemy 2.0 keeps parameters in ON CONFLICT DO UPDATE, whatever `literal_binds` says.
    return _PARAMETER.sub(literal, str(compiled)).strip()
