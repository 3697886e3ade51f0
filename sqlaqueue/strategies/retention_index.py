"""What the deletion of finished jobs needs: an index by which the oldest of a state are found.

It is there only where ``QueueConfig(retention=...)`` is. Without it each look for jobs whose time is over would read
the whole table, to find nothing most of the time. It costs one entry for each job that ends, and none for jobs that
wait or run. One index serves all states that are deleted, the state first: were it by time alone, each look for
completed jobs would walk over those that failed and are kept for longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.sql.elements import conv

from sqlaqueue.exc import ConfigurationError
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.spec import QueueSpec, check_roles
from sqlaqueue.strategies.indexes import add_index

PURPOSE = "finished"


def attach_retention(spec: QueueSpec) -> None:
    """Add the index of finished jobs to the model's table.

    :raises ConfigurationError: when the queue has no such state, or does not know since when a job is finished.
    """
    model = spec.model.__name__
    for state in spec.config.retention:
        if getattr(spec.config.states, state) is None:
            msg = (
                f"{model}: QueueConfig(retention={{{state!r}: ...}}) is for a state that its table has no word for; "
                f"leave it out, or give a word with QueueConfig(states=States({state}=...))"
            )
            raise ConfigurationError(msg)
    check_roles(model, {"finished_at": "QueueConfig(retention=...)"}, spec.columns, spec.config)
    columns = [spec.columns["status"], spec.columns["finished_at"]]
    # Not IN: the server shows that otherwise than it was told, and otherwise again when it is told that.
    add_index(spec, PURPOSE, columns, where=sa.or_(*(spec.in_state(state) for state in spec.config.retention)))


def attach_to_dead_letters(spec: QueueSpec, dead: sa.Table) -> None:
    """Add the index of finished jobs to the dead letters, which are those of a queue without a state.

    :raises ConfigurationError: for completed jobs, of which nothing is left.
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
    return conv(backend().object_name("ix", table.name, "queue", PURPOSE))


def oldest_first(spec: QueueSpec, states: Sequence[str], moment: sa.ColumnElement[Any]) -> Iterable[Any]:
    """Return the order in which jobs are deleted: by age where the index gives it, which keeps to the index.

    Without it the planner may read the table from its beginning for as many old jobs as it believes to find there.
    """
    return (moment,) if len(states) == 1 and states[0] in spec.config.retention else ()
