"""The operation that creates the unique index of a queue, and the SQL that finds the jobs that prevent it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from alembic.operations import MigrateOperation
from alembic.operations import ops as alembic_ops
from sqlalchemy.sql.elements import conv

from sqlaqueue.alembic.operations.base import NOT_RENDERED, QueueOp, registered_as
from sqlaqueue.alembic.operations.tables import DropIndex
from sqlaqueue.postgresql.ddl import literal_sql
from sqlaqueue.sql.types import NEUTRAL


@registered_as("create_queue_unique_index")
@dataclass(eq=False)
class CreateUniqueIndex(QueueOp):
    """Creates the unique index of a queue, unless the table has jobs with the same values (twins).

    The table is searched for twins first, which blocks no other transaction.

    :param columns: the names of columns, and ``sa.text()`` with an expression.
    :param where: the predicate, as SQL: which jobs count.
    :param keys: the columns of the primary key, by which the error message shows twins.
    :param nulls_distinct: whether jobs with a NULL in one of the columns are never twins.
    :param options: further arguments of SQLAlchemy's Index, such as ``{"postgresql_with": {"fillfactor": "70"}}``.
    :param replace: the table has an index of this name, which is dropped.
    :param live: the table is in use. Create the index CONCURRENTLY, outside of the migration's transaction; an index to
        replace is dropped when the new one is complete.
    """

    index: str
    table: str
    columns: list[Any]
    where: str | None = field(default=None, kw_only=True)
    keys: list[str] = field(kw_only=True)
    nulls_distinct: bool = field(default=True, kw_only=True)
    options: dict[str, Any] = field(default_factory=dict, kw_only=True)
    replace: bool = field(default=False, kw_only=True)
    schema: str | None = field(default=None, kw_only=True)
    live: bool = field(default=False, kw_only=True)
    former: CreateUniqueIndex | None = field(default=None, kw_only=True, metadata=NOT_RENDERED)

    def reverse(self) -> MigrateOperation:
        """Create the index that was replaced, or drop the index."""
        if self.former is not None:
            return dataclasses.replace(self.former, replace=True, former=self)
        if self.live:
            return DropIndex(self.index, self.table, schema=self.schema, undo=self)
        return alembic_ops.DropIndexOp(conv(self.index), self.table, schema=self.schema)


def twins_query(operation: CreateUniqueIndex) -> str:
    """Return the SELECT of all twins, with ``{table}`` in place of the table's name."""
    quote = NEUTRAL.identifier_preparer.quote
    values = _values(operation)
    keys = [quote(key) for key in operation.keys]
    key = keys[0] if len(keys) == 1 else f"({', '.join(keys)})"
    conditions = [] if operation.where is None else [f"({operation.where})"]
    if operation.nulls_distinct:
        conditions += [f"{value} IS NOT NULL" for value in values]
    lines = [
        f"SELECT {', '.join(values)}, count(*), array_agg({key} ORDER BY {', '.join(keys)})",
        "FROM {table}",
        *([f"WHERE {' AND '.join(conditions)}"] if conditions else []),
        f"GROUP BY {', '.join(values)}",
        "HAVING count(*) > 1",
    ]
    return "\n".join(lines)


def twins_message(operation: CreateUniqueIndex) -> str:
    """Return the error message about twins, with ``{table}`` in place of the table's name."""
    return (
        f"{{table}}: the unique index {operation.index} cannot be created, because there are jobs with the same "
        f"{', '.join(_values(operation))}. Cancel or delete all but one of each, and run the migration again. This "
        f"query shows them:\n\n{twins_query(operation)};"
    )


def twins_check(operation: CreateUniqueIndex) -> str:
    """Return a statement that raises ``unique_violation`` if there are twins; ``{table}`` is the table's name."""
    # In PL/pgSQL, so that a script (--sql) contains the check as well. FOUND is a variable there, and may be a column.
    return f"""\
DO $sqlaqueue_do$
#variable_conflict use_column
BEGIN
  IF EXISTS (
{twins_query(operation)}
  ) THEN
    RAISE unique_violation USING MESSAGE = $sqlaqueue_text${twins_message(operation)}$sqlaqueue_text$;
  END IF;
END
$sqlaqueue_do$"""


def _values(operation: CreateUniqueIndex) -> list[str]:
    quote = NEUTRAL.identifier_preparer.quote
    return [quote(each) if isinstance(each, str) else literal_sql(each) for each in operation.columns]
