"""The index by which the deletion of finished jobs finds the oldest ones of a state.

It exists only with ``QueueConfig(retention=...)``. Without it each search would read the whole table, mostly to find
nothing. It costs one entry for each finished job, and none for pending or processing ones. One index serves all states
that are deleted, with the state first: ordered by time alone, the search for completed jobs would walk over failed ones
that are kept for longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.elements import conv

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.spec import QueueSpec, check_roles
from sqlaqueue.sql.types import object_name
from sqlaqueue.strategies.parts.indexes import add_index

PURPOSE = "finished"


def attach_retention(spec: QueueSpec) -> None:
    """Add the index of finished jobs to the model's table.

    :raises ConfigurationError: when the status column cannot hold one of the states, or ``finished_at`` is left out.
    """
    model = spec.model.__name__
    for state in spec.config.retention:
        if getattr(spec.config.states, state) is None:
            msg = (
                f"{model}: QueueConfig(retention={{{state!r}: ...}}) is for a state that has no status value; "
                f"leave it out, or give it one with QueueConfig(states=States({state}=...))"
            )
            raise ConfigurationError(msg)
    check_roles(model, {"finished_at": "QueueConfig(retention=...)"}, spec.columns, spec.config)
    columns = [spec.columns["status"], spec.columns["finished_at"]]
    # Not IN: the server prints it in another form, and that form in yet another one when it parses it again.
    add_index(spec, PURPOSE, columns, where=sa.or_(*(spec.in_state(state) for state in spec.config.retention)))


def attach_to_dead_letters(spec: QueueSpec, dead: sa.Table) -> None:
    """Add the index of finished jobs to the dead letters, for a queue without a status.

    :raises ConfigurationError: for completed jobs, whose rows are deleted.
    """
    if "completed" in spec.config.retention:
        msg = (
            f"{spec.model.__name__}: QueueConfig(retention={{'completed': ...}}): the claim of a job without a status "
            "deletes its row, and of completed jobs nothing is left to keep; leave 'completed' out"
        )
        raise ConfigurationError(msg)
    name = index_name(dead)
    # Queues share the table.
    if name not in {index.name for index in dead.indexes}:
        sa.Index(name, dead.c.queue, dead.c.state, dead.c.created_at)


def index_name(table: sa.Table) -> str:
    """Return the name of the index of finished jobs."""
    return conv(object_name("ix", table.name, "queue", PURPOSE))


def oldest_first(spec: QueueSpec, states: Sequence[str], moment: sa.ColumnElement[Any]) -> Iterable[Any]:
    """Return the order in which jobs are deleted: by age where the index provides it.

    With this order the planner uses the index. Without it, it may read the table from its beginning until it has as
    many old jobs as it expects to find there.
    """
    return (moment,) if len(states) == 1 and states[0] in spec.config.retention else ()
