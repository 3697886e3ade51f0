"""The INSERT of rescued attempts into the attempt history, as a part of the statement that rescues the jobs.

A rescue overwrites what the row says about the run of the dead worker: its attempt, its worker and when it began. So
the rows are read where they are locked, before the UPDATE.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from sqlaqueue.postgresql.side_tables import key_json
from sqlaqueue.queue.names import ATTEMPT
from sqlaqueue.queue.spec import QueueSpec, clock

_COPIED = {"attempt": "attempts", "started_at": "started_at", "worker": "claimed_by"}
"""The columns of the history that are copied from the job's row, with their roles there."""

_PREFIX = "sqlaqueue_last_"


def has_history(spec: QueueSpec) -> bool:
    """Return whether a queue has an attempt history."""
    return ATTEMPT in spec.side_tables


def without_history(spec: QueueSpec) -> QueueSpec:
    """Return the same queue with no attempt history, for a statement that must work whatever is wrong with that."""
    others = {name: table for name, table in spec.side_tables.items() if name != ATTEMPT}
    return replace(spec, side_tables=others)


def run_columns(spec: QueueSpec, rows: sa.FromClause) -> list[sa.Label[Any]]:
    """Return the columns of a job's row that :func:`record_rescued` reads; none without a history.

    :param rows: the table of the jobs, or an alias of it.
    """
    if not has_history(spec):
        return []
    return [
        rows.c[spec.columns[role].key].label(f"{_PREFIX}{name}") for name, role in _COPIED.items() if spec.has(role)
    ]


def record_rescued(
    spec: QueueSpec, rescued: sa.CTE, error: str, where: sa.ColumnElement[bool] | None = None
) -> sa.Insert:
    """Return the INSERT of an attempt for each rescued job.

    :param rescued: the rows of the jobs before the rescue: their keys, and :func:`run_columns`.
    :param error: the text of the error.
    :param where: limits the rows; None for all.
    """
    table = spec.side_tables[ATTEMPT]
    values: dict[str, Any] = {
        "queue": sa.literal(spec.name, sa.Text()),
        "key": key_json([rescued.c[key.key] for key in spec.keys]),
        "attempt": sa.literal(1, sa.Integer()),
        "ended_at": clock(),
        "outcome": sa.literal("rescued", sa.Text()),
        "error": sa.literal(error, sa.Text()),
    }
    for name in _COPIED:
        if f"{_PREFIX}{name}" in rescued.c:
            copied: sa.ColumnElement[Any] = sa.cast(rescued.c[f"{_PREFIX}{name}"], table.c[name].type)
            values[name] = sa.func.coalesce(copied, 1) if name == "attempt" else copied
    rows = sa.select(*values.values()).select_from(rescued)
    return sa.insert(table).from_select(list(values), rows if where is None else rows.where(where))
