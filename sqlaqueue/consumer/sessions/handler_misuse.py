"""What a handler must not do with the row of its own job: noticed before its writes are kept, and said with the fix.

The Consumer ends a run. A handler that writes the state of its job itself, or changes its key, would have the job taken
for another run's, or run again under the new key. It may change all other columns, and delete its job through the
session.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.settings import Plan
from sqlaqueue.consumer.settling.outcomes import Ended
from sqlaqueue.exc import HandlerMisuseError
from sqlaqueue.keys import Key, key_text
from sqlaqueue.queue.config import STATES
from sqlaqueue.queue.run import Run
from sqlaqueue.strategies import ClaimedJobs

_ENDS_TRANSACTION = re.compile(
    r"(\s|--[^\n]*\n|/\*.*?\*/)*(commit|end|abort|prepare\s+transaction|rollback(?!\s+(work\s+|transaction\s+)?to))\b",
    re.IGNORECASE | re.DOTALL,
)

INSTEAD = "let it return, or raise Retry, Snooze, Fail or Cancel, and the Consumer ends the run"


def ends_transaction(statement: str) -> bool:
    """Return whether the text of a statement ends the transaction that it is executed in."""
    return _ENDS_TRANSACTION.match(statement) is not None


def transaction_ended_error() -> HandlerMisuseError:
    """Return the error for a handler that ended its batch's transaction where the session could not notice."""
    return HandlerMisuseError(
        "the handler ended the transaction that holds its batch, past its session: by the connection's commit() or "
        "rollback(), the driver's, or a statement such as COMMIT; leave it to the Consumer, and use "
        "session.begin_nested() for a part that may be undone"
    )


def is_deleted(job: Any) -> bool:
    """Return whether a job was deleted through its session."""
    state = sa.inspect(job)
    return bool(state.deleted or state.was_deleted)


def check_rows(session: Session, plan: Plan, jobs: Sequence[Any], runs: Sequence[Run]) -> HandlerMisuseError | None:
    """Flush, and return an error when a handler has changed the key or the state of one of its jobs.

    What it has written without the ORM is noticed when the run is settled.
    """
    session.flush()
    spec = plan.spec
    if not spec.strategy.keeps_rows:
        return None
    status, states = spec.attributes["status"], spec.config.states
    running = states.pending if states.processing is None else states.processing
    others = [word for state in STATES if (word := getattr(states, state)) is not None and word != running]
    for job, run in zip(jobs, runs, strict=True):
        if is_deleted(job):
            continue
        if sa.inspect(job).identity != run.key:
            return HandlerMisuseError(
                f"the handler changed the key of {type(job).__name__} {key_text(run.key)}, by which the Consumer ends "
                "its run, and nothing of what it wrote was kept; enqueue another job in place of this one"
            )
        if job.__dict__.get(status, running) in others:
            return HandlerMisuseError(
                f"the handler set {type(job).__name__}.{status} itself, and nothing of what it wrote was kept; "
                f"{INSTEAD}"
            )
    return None


def row_changed_error(plan: Plan, key: Key) -> HandlerMisuseError:
    """Return the error for a job whose row its handler has changed past the ORM, so that its run cannot be ended."""
    return HandlerMisuseError(
        f"the row of {plan.spec.model.__name__} {key_text(key)} is not there any more as it was handed out: a handler "
        "changed its key or its state, or deleted it by a statement, and nothing of what it wrote was kept; "
        f"{INSTEAD}; delete a job by session.delete(job)"
    )


class RowsChanged(HandlerMisuseError):
    """Some runs of a held batch cannot be ended, since a handler has changed the rows of their jobs."""

    def __init__(self, plan: Plan, keys: Sequence[Key]) -> None:
        super().__init__(str(row_changed_error(plan, keys[0])))
        self.keys = keys


def refuse_missing_rows(plan: Plan, missing: Sequence[Ended]) -> None:
    """Refuse to commit a held batch of which some rows were not found: nobody but its handlers can have written them.

    :raises RowsChanged: unless they were deleted through the session.
    """
    keys = [one.run.key for one in missing if one.job is None or not is_deleted(one.job)]
    if keys:
        raise RowsChanged(plan, keys)


def refuse_changed_rows(session: Session, plan: Plan, lost: Sequence[Ended]) -> None:
    """Tell runs that were lost to others from those whose row the handler itself has changed; all is rolled back.

    :raises HandlerMisuseError: when one is held all the same, once what the handler wrote is undone.
    """
    session.rollback()
    held = ClaimedJobs([(one.run.token, [one.run.key]) for one in lost])
    mine = sa.select(*plan.spec.keys).where(plan.spec.strategy.fence(plan.spec, held))
    found = session.execute(mine, bind_arguments=plan.bind).first()
    session.rollback()
    if found is not None:
        raise row_changed_error(plan, tuple(found))
