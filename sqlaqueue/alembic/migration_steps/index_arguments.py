"""The parts of an index as the operations of this library name them."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from sqlaqueue.postgresql.ddl import literal_sql


def columns_of(index: sa.Index) -> list[Any]:
    """Return the names of its columns, and its expressions as ``sa.text()``."""
    return [part.name if isinstance(part, sa.Column) else sa.text(literal_sql(part)) for part in index.expressions]


def predicate_of(index: sa.Index) -> str | None:
    """Return its predicate as SQL."""
    where = index.dialect_options["postgresql"]["where"]
    # A reflected predicate is a string, in which a colon is no parameter.
    return where if where is None or isinstance(where, str) else literal_sql(where)


def options_of(index: sa.Index) -> dict[str, Any]:
    """Return its other arguments."""
    return {
        name: [getattr(each, "name", each) for each in value] if isinstance(value, list | tuple) else value
        for name, value in index.dialect_kwargs.items()
        if name != "postgresql_where" and value
    }
