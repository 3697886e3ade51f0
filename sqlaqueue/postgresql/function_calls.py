"""Calls of functions that are created with a queue's table, as expressions in statements.

``sa.func.schema.name()`` would not do: ``schema_translate_map`` does not apply to it.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import IdentifierPreparer, SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.visitors import InternalTraversal
from sqlalchemy.types import TypeEngine


def qualified_name(preparer: IdentifierPreparer, name: str, schema: str | None) -> str:
    """Return the name of a function, quoted, with its schema, which is translated as that of a table."""
    # The preparer qualifies, quotes and translates the name of a table, so a table of this name stands in.
    return preparer.format_table(sa.Table(name, sa.MetaData(), schema=schema))


class _Call(FunctionElement[Any]):
    inherit_cache = True
    # The name and the schema belong to the key of the cache of statements. A table in their place would be replaced
    # where a statement gets aliases.
    _traverse_internals = [  # noqa: RUF012 - as SQLAlchemy declares it
        *FunctionElement._traverse_internals,  # noqa: SLF001 - SQLAlchemy documents no other way to extend the key
        ("name", InternalTraversal.dp_string),
        ("schema", InternalTraversal.dp_string),
        ("type", InternalTraversal.dp_type),
    ]

    def __init__(self, name: str, schema: str | None, arguments: tuple[Any, ...], type_: TypeEngine[Any]) -> None:
        self.name = name
        self.schema = schema
        self.type = type_
        super().__init__(*arguments)


@compiles(_Call)
def _render(element: _Call, compiler: SQLCompiler, **options: Any) -> str:
    name = qualified_name(compiler.preparer, element.name, element.schema)
    return f"{name}{compiler.process(element.clause_expr, **options)}"


def call(function_name: str, table: sa.Table, *arguments: Any, type_: TypeEngine[Any]) -> sa.ColumnElement[Any]:
    """Return the call of a function in the schema of a table.

    :param type_: the type of the result.
    """
    return _Call(function_name, table.schema, arguments, type_)
