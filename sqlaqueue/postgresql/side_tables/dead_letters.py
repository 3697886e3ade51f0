"""Dead letters: whole rows as JSON in ``sqlaqueue_dead_letter``, and the same as rows of the model's table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql.selectable import NamedFromClause

from sqlaqueue.postgresql.inserts import insert_or_replace
from sqlaqueue.postgresql.side_tables.control import key_json
from sqlaqueue.queue.backend import DEAD_LETTER
from sqlaqueue.queue.spec import QueueSpec, clock


def bury(spec: QueueSpec, rows: NamedFromClause, state: str, error: Any) -> sa.Insert:
    """Return the statement that stores ``rows`` of the model's table as dead letters."""
    buried = sa.select(
        sa.literal(spec.name, sa.Text()),
        key_json([rows.c[key.key] for key in spec.keys]),
        # Not jsonb_build_object(): a function takes a hundred arguments, and a table may have more columns.
        sa.func.to_jsonb(rows.table_valued(), type_=JSONB()),
        sa.literal(state, sa.Text()),
        sa.cast(error, sa.Text()),
        clock(),
    )
    columns = ["queue", "key", "row", "state", "error", "created_at"]
    replaced = ["row", "state", "error", "created_at"]
    return insert_or_replace(spec.side_tables[DEAD_LETTER], (columns, buried), replaced=replaced)


def stored_rows(row: sa.ColumnElement[Any], columns: Sequence[sa.Column[Any]]) -> sa.TableValuedAlias:
    """Return the stored row of each dead letter as a table with the given columns, to be joined on true."""
    record = sa.func.jsonb_to_record(row).table_valued(
        *(sa.column(column.key, column.type) for column in columns), name="sqlaqueue_letter", joins_implicitly=True
    )
    return record.render_derived("sqlaqueue_letter", with_types=True)
