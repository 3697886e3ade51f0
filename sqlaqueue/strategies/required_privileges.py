"""What the role of a Consumer has to be granted.

Consumers compare it with what their role has (:mod:`sqlaqueue.postgresql.privilege_checks`). Those who enqueue need the
right to insert into the job table and nothing else of this library: the triggers bring their own rights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import sqlalchemy as sa

from sqlaqueue.queue.backend import CONTROL, DEAD_LETTER
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.queue.strategy import Privilege, RequiredPrivilege

_EVERYTHING: dict[Privilege, Sequence[str]] = {"SELECT": (), "INSERT": (), "UPDATE": (), "DELETE": ()}
_SIDE_TABLES: dict[str, dict[Privilege, Sequence[str]]] = {
    # To lock a row takes the right to update some column of it.
    CONTROL: {"SELECT": (), "UPDATE": ("created_at",), "DELETE": ()},
    DEAD_LETTER: {"SELECT": (), "INSERT": (), "UPDATE": ()},
}
"""What is needed on which columns of side tables; on others everything."""

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
"""The roles that claims and the ends of runs write."""


def everything(table: sa.Table) -> Iterator[RequiredPrivilege]:
    """Return the rights of somebody by whom rows come and go; to lock one takes the right to update it."""
    return (RequiredPrivilege(privilege, table) for privilege in _EVERYTHING)


def consumer_privileges(spec: QueueSpec) -> Iterator[RequiredPrivilege]:
    """Return what it takes to read jobs, to write what the end of a run writes, and to use the side tables."""
    yield RequiredPrivilege("SELECT", spec.table, list(spec.table.c))
    yield RequiredPrivilege("UPDATE", spec.table, [spec.columns[role] for role in _WRITTEN if spec.has(role)])
    if spec.config.on_complete == "delete":
        yield RequiredPrivilege("DELETE", spec.table)
    for purpose, table in spec.side_tables.items():
        for privilege, columns in _SIDE_TABLES.get(purpose, _EVERYTHING).items():
            yield RequiredPrivilege(privilege, table, [table.c[name] for name in columns])
