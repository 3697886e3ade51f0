"""Status values that the database refuses: by a CHECK constraint of the status column, or by its type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from sqlaqueue.postgresql.diagnosis.relations import literal, quoted, table_name, table_oid
from sqlaqueue.postgresql.sqlstate import sqlstate
from sqlaqueue.queue.diagnosis_protocol import RefusedState
from sqlaqueue.queue.roles import literal_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.states import STATES

_INVALID_VALUE = "22P02"

# Of constraints with several columns it is not known what the other columns will be.
_CONSTRAINTS = sa.text("""
    SELECT c.conname::text AS name, pg_get_expr(c.conbin, c.conrelid) AS expression,
           format_type(a.atttypid, a.atttypmod) AS type
    FROM pg_constraint AS c JOIN pg_attribute AS a ON a.attrelid = c.conrelid AND c.conkey = ARRAY[a.attnum]
    WHERE c.contype = 'c' AND c.conrelid = CAST(CAST(:oid AS bigint) AS oid) AND a.attname = :column
    ORDER BY c.conname
""")


def refused_states(connection: sa.Connection, spec: QueueSpec) -> list[RefusedState]:
    """Return the states that a constraint or the type of the status column refuses."""
    if not spec.has("status"):
        return []
    # A held transaction writes no status when it claims.
    written = [
        state
        for state in STATES
        if getattr(spec.config.states, state) is not None
        and not (state == "processing" and spec.strategy.holds_transaction)
    ]
    unknown = [state for state in written if not _is_known(connection, spec, state)]
    by_type = f"the type of the column {spec.columns['status'].name}"
    return [
        *(RefusedState(state=state, by=by_type, repair="") for state in unknown),
        *_by_constraints(connection, spec, [state for state in written if state not in unknown]),
    ]


def _is_known(connection: sa.Connection, spec: QueueSpec, state: str) -> bool:
    """Return whether the type of the status column has the value of a state."""
    if not isinstance(spec.columns["status"].type, sa.Enum):
        return True
    try:
        with connection.begin_nested():
            connection.execute(sa.select(sa.cast(spec.literal(state), spec.columns["status"].type)))
    except DBAPIError as error:
        if sqlstate(error) != _INVALID_VALUE:
            raise
        return False
    return True


def _by_constraints(connection: sa.Connection, spec: QueueSpec, states: Sequence[str]) -> Iterator[RefusedState]:
    column = spec.columns["status"]
    bound = {"oid": table_oid(connection, spec.table), "column": column.name}
    for name, expression, type_ in connection.execute(_CONSTRAINTS, bound).all():
        for state in states:
            # The type of the database, as the expression has its operators; the model may declare another one.
            given = literal_text(spec.status_value(state), column.type)
            stored: sa.ColumnElement[Any] = sa.literal_column(f"CAST({given} AS {type_})")
            row = sa.select(stored.label(column.name)).subquery("sqlaqueue_row")
            # As for an INSERT: NULL counts as true.
            fits = sa.literal_column(f"({expression}) IS NOT FALSE", sa.Boolean())
            value = sa.cast(row.c[column.name], sa.Text())
            found: Any = connection.execute(sa.select(fits.label("fits"), value.label("value")).select_from(row)).one()
            if found.fits:
                continue
            table, constraint = table_name(connection, spec.table), quoted(name)
            wider = f"CHECK (({expression}) OR {quoted(column.name)} = {literal(found.value)})"
            repair = (
                f"ALTER TABLE {table} DROP CONSTRAINT {constraint}, ADD CONSTRAINT {constraint} {wider} NOT VALID;\n"
                f"ALTER TABLE {table} VALIDATE CONSTRAINT {constraint};"
            )
            yield RefusedState(state=state, by=f"the CHECK constraint {name}", repair=repair)
