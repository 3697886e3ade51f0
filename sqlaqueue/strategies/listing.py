"""Jobs and attempts as rows for operators and for the attempt history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from sqlaqueue._typing import AnySelect
from sqlaqueue.postgresql.side_tables import key_json
from sqlaqueue.queue.names import ATTEMPT
from sqlaqueue.queue.options import STATES
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.sql.portable import clock, converted

# -- attempt history ---------------------------------------------------------------------------------------------------
# The INSERT of rescued attempts into the attempt history, as a part of the statement that rescues the jobs.
#
# A rescue overwrites what the row says about the run of the dead worker: its attempt, its worker and when it began.
# So the rows are read where they are locked, before the UPDATE.


_COPIED = {"attempt": "attempts", "started_at": "started_at", "worker": "claimed_by"}
"""The columns of the history that are copied from the job's row, with their roles there."""

_PREFIX = "sqlaqueue_last_"


def has_history(spec: QueueSpec) -> bool:
    return ATTEMPT in spec.side_tables


def without_history(spec: QueueSpec) -> QueueSpec:
    """Return a queue without its attempt history, for a statement that must work whatever is wrong with the history."""
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
    spec: QueueSpec, rescued: sa.FromClause, error: str, where: sa.ColumnElement[bool] | None = None
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
            copied: sa.ColumnElement[Any] = converted(rescued.c[f"{_PREFIX}{name}"], table.c[name].type)
            values[name] = sa.func.coalesce(copied, 1) if name == "attempt" else copied
    rows = sa.select(*values.values()).select_from(rescued)
    return sa.insert(table).from_select(list(values), rows if where is None else rows.where(where))


# -- job listing -------------------------------------------------------------------------------------------------------
# A list of jobs for operators: one row for each job, with its key, its state and the columns of its life.


OTHER = "other"
"""The state of rows whose status is not one of the queue's values."""

SHOWN = (
    "priority",
    "run_at",
    "created_at",
    "started_at",
    "finished_at",
    "attempts",
    "max_attempts",
    "last_error",
    "claimed_by",
    "lease_expires_at",
)
"""The roles that a listing has as columns, unless the model leaves them out."""


def key_labels(spec: QueueSpec) -> list[str]:
    """Return the names of the columns of a listing that contain the key."""
    return [f"key_{number}" for number in range(len(spec.keys))]


def labelled_keys(spec: QueueSpec, chosen: AnySelect) -> list[Any]:
    """Return the key columns of the jobs that ``chosen`` selects, labelled for a listing.

    They are attributes of the entity, for which the ORM adds the discriminator of a single-table subclass.
    """
    entity = chosen.column_descriptions[0]["entity"]
    mapper = sa.inspect(entity)
    keys = [getattr(entity, mapper.get_property_by_column(key).key) for key in spec.keys]
    return [key.label(name) for key, name in zip(keys, key_labels(spec), strict=True)]


def job_listing(spec: QueueSpec, chosen: AnySelect, states: Sequence[str] | None) -> AnySelect:
    """Return the listing of a queue whose rows have a status."""
    status = spec.columns["status"]
    named = [state for state in STATES if getattr(spec.config.states, state) is not None]
    state = sa.case(*((status == spec.literal(each), sa.literal_column(f"'{each}'")) for each in named), else_=OTHER)
    columns = [*labelled_keys(spec, chosen), sa.type_coerce(state, sa.Text()).label("state")]
    columns.extend(spec.columns[role].label(role) for role in SHOWN if spec.has(role))
    listing = chosen.with_only_columns(*columns, maintain_column_froms=True)
    return listing if states is None else listing.where(spec.in_state(*states))
