"""A function that a claim could call, attached to the table of a queue."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from sqlaqueue.postgresql.ddl import Function, attach, call, version_comment
from sqlaqueue.sql.types import object_name

ARGUMENTS = "sqlaqueue_key bigint, sqlaqueue_since timestamp with time zone"
BODY = """\
BEGIN
  -- At most 100% of the rows.
  RETURN (SELECT count(*) FROM {jobs} WHERE id % 2 = sqlaqueue_key AND sqlaqueue_since < pg_catalog.now());
END
"""


def name_of(table: sa.Table) -> str:
    return object_name("sqlaqueue_limit", table.name)


def attach_function(table: sa.Table, **changes: Any) -> Function:
    """Attach a function that counts rows of the table by the last bit of their keys."""
    values = {
        "name": name_of(table),
        "arguments": ARGUMENTS,
        "returns": "integer",
        "body": BODY,
        "tables": {"jobs": table},
        "comment": version_comment(1),
        **changes,
    }
    function = Function(table, **values)
    attach(table, function)
    return function


def count(table: sa.Table, key: Any) -> sa.Select[Any]:
    """Return the query that calls the function."""
    since = sa.func.to_timestamp(0)
    return sa.select(call(name_of(table), table, key, since, type_=sa.Integer()).label("count"))
