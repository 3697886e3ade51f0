"""The privileges that a Consumer's role needs. A Consumer checks them when it starts.

A role that only enqueues needs INSERT on the job table: the triggers run with their owner's privileges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sqlalchemy as sa
from sqlalchemy.sql.visitors import iterate

from sqlaqueue.flow_control.keys import flow_control
from sqlaqueue.queue.names import ATTEMPT, CONTROL, DEAD_LETTER
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy_protocol import Privilege, RequiredPrivilege

_EVERYTHING: dict[Privilege, Sequence[str]] = {"SELECT": (), "INSERT": (), "UPDATE": (), "DELETE": ()}
_SIDE_TABLES: dict[str, dict[Privilege, Sequence[str]]] = {
    # Locking a row requires UPDATE on one of its columns.
    CONTROL: {"SELECT": (), "UPDATE": ("created_at",), "DELETE": ()},
    DEAD_LETTER: {"SELECT": (), "INSERT": (), "UPDATE": ()},
    # As for requests: the retention locks the rows that it deletes.
    ATTEMPT: {"SELECT": (), "INSERT": (), "UPDATE": ("ended_at",), "DELETE": ()},
}
"""The privileges on side tables, with the columns to which each may be limited; on other side tables all."""

_WRITTEN = (
    "status",
    "run_at",
    "attempts",
    "last_error",
    "finished_at",
    "lease_token",
    "lease_expires_at",
    "claimed_by",
    "started_at",
)
"""The roles whose columns claims and settlements write."""


def everything(table: sa.Table) -> Iterator[RequiredPrivilege]:
    """Return the privileges to insert and delete rows; locking one requires UPDATE."""
    return (RequiredPrivilege(privilege, table) for privilege in _EVERYTHING)


def consumer_privileges(spec: QueueSpec) -> Iterator[RequiredPrivilege]:
    """Return the privileges to read jobs, to write what a settlement writes, and to use the side tables."""
    yield RequiredPrivilege("SELECT", spec.table, list(spec.table.c))
    yield RequiredPrivilege("UPDATE", spec.table, [spec.columns[role] for role in _WRITTEN if spec.has(role)])
    if spec.config.on_complete == "delete":
        yield RequiredPrivilege("DELETE", spec.table)
    for purpose, table in spec.side_tables.items():
        for privilege, columns in _SIDE_TABLES.get(purpose, _EVERYTHING).items():
            yield RequiredPrivilege(privilege, table, [table.c[name] for name in columns])
    yield from _limits_privileges(spec)


def _limits_privileges(spec: QueueSpec) -> Iterator[RequiredPrivilege]:
    """Return the privileges to read the numbers of limits, and the weights of turns, from other tables."""
    flow = flow_control(spec)
    if flow is None:
        return
    numbers = [limit.most for limit in flow.limits] + ([] if flow.turn is None else [flow.turn.weight])
    read: dict[sa.Table, dict[str, sa.Column[object]]] = {}
    for element in (each for number in numbers for each in iterate(number)):
        # The column of an alias is derived from that of the table.
        for column in element.base_columns if isinstance(element, sa.ColumnElement) else ():
            if isinstance(column, sa.Column) and column.table is not spec.table:
                read.setdefault(column.table, {})[column.name] = column
    for table, columns in read.items():
        yield RequiredPrivilege("SELECT", table, list(columns.values()))
