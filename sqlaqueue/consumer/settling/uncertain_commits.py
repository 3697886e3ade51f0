"""Commits whose reply is lost: whether they took place is checked when their runs are settled again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.settling.outcomes import COMPLETED, FinishedRun
from sqlaqueue.queue.spec import QueueSpec


def commit_settlements(session: Session, finished: Sequence[FinishedRun]) -> None:
    """Commit what settles runs. If the connection drops before the reply, their settlement is uncertain."""
    # Not earlier: a run whose statements failed before the commit is not settled here, and another worker may have
    # settled it by the time it is tried again.
    for one in finished:
        one.uncertain = True
    session.commit()


def really_lost(
    session: Session, spec: QueueSpec, lost: Sequence[FinishedRun], bind_arguments: dict[str, Any]
) -> list[FinishedRun]:
    """Return those of ``lost`` whose lease was lost indeed, without those that a commit without a reply has settled.

    :param lost: runs that could not be settled, as they are not claimed any more.
    """
    keys = [one.run.key for one in lost]
    attempts = spec.columns.get("attempts", sa.null())
    statement = sa.select(spec.columns["status"], attempts, *spec.keys).where(spec.key_in(spec.keys, keys))
    found: Any = session.execute(statement, bind_arguments=bind_arguments)
    rows = {tuple(row[2:]): (row[0], row[1]) for row in found}
    completed = spec.status_value("completed")
    if_gone = completed if spec.config.on_complete == "delete" else None
    lost_indeed = []
    for one in lost:
        state, attempt = rows.get(one.run.key, (if_gone, None))
        # Another worker has claimed the job since, so the commit did not take place, and the result is its own.
        is_taken_over = attempt is not None and attempt > one.run.attempt
        if not one.uncertain or is_taken_over:
            lost_indeed.append(one)
        elif state == completed:
            one.outcome = COMPLETED
        elif state != spec.status_value(one.outcome.state):
            lost_indeed.append(one)
    return lost_indeed
