"""Detects what a handler must not do: end the transaction that holds its batch, or change its job's state or key.

Only the Consumer settles a run. After a handler has changed the state or the key of its job, the run could not be
settled, or the job would run again under the new key. A handler may change all other columns, and may delete the job
through the session. The checks run before the handler's writes are committed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.core.statement_deadline import HANDLERS_FLUSH
from sqlaqueue.exc import HandlerMisuseError
from sqlaqueue.queue.options import STATES
from sqlaqueue.queue.run import Key, Run, key_text
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.strategies import ClaimedJobs

_ENDS_TRANSACTION = re.compile(
    r"(\s|--[^\n]*\n|/\*.*?\*/)*(commit|end|abort|prepare\s+transaction|rollback(?!\s+(work\s+|transaction\s+)?to))\b",
    re.IGNORECASE | re.DOTALL,
)

_FIX = "return, or raise Retry, Snooze, Fail or Cancel, and the Consumer settles the run"


def ends_transaction(statement: str) -> bool:
    """Return whether a statement, given as text, ends its transaction."""
    return _ENDS_TRANSACTION.match(statement) is not None


def transaction_ended_error() -> HandlerMisuseError:
    """Return the error for a handler that ended the transaction of its batch without using the session."""
    return HandlerMisuseError(
        "the handler ended the transaction that holds its batch: by commit() or rollback() of the connection or the "
        "driver, or by a statement such as COMMIT; leave this to the Consumer, and use session.begin_nested() to undo "
        "a part"
    )


def is_deleted(job: Any) -> bool:
    """Return whether a job was deleted through its session."""
    state = sa.inspect(job)
    return bool(state.deleted or state.was_deleted)


def check_rows(
    session: Session, spec: QueueSpec, jobs: Sequence[Any], runs: Sequence[Run]
) -> HandlerMisuseError | None:
    """Flush, and return an error if a handler changed the key or the state of one of its jobs by the ORM.

    Changes by other statements are detected when the run is settled.
    """
    # What the handler has changed may take as long as its other statements.
    session.info[HANDLERS_FLUSH] = True
    try:
        session.flush()
    finally:
        session.info[HANDLERS_FLUSH] = False
    if not spec.strategy.keeps_rows:
        return None
    status, states = spec.attributes["status"], spec.config.states
    running = states.pending if states.processing is None else states.processing
    others = [value for state in STATES if (value := getattr(states, state)) is not None and value != running]
    for job, run in zip(jobs, runs, strict=True):
        if is_deleted(job):
            continue
        if sa.inspect(job).identity != run.key:
            return HandlerMisuseError(
                f"the handler changed the key of {type(job).__name__} {key_text(run.key)}, which the Consumer needs to "
                "settle its run, so its writes were rolled back; enqueue another job instead"
            )
        if job.__dict__.get(status, running) in others:
            return HandlerMisuseError(
                f"the handler set {type(job).__name__}.{status} itself, so its writes were rolled back; {_FIX}"
            )
    return None


def row_changed_error(spec: QueueSpec, key: Key) -> HandlerMisuseError:
    """Return the error for a job whose run cannot be settled, as its handler changed the row without the ORM."""
    return HandlerMisuseError(
        f"the handler changed the key or the state of {spec.model.__name__} {key_text(key)}, or deleted its row "
        f"by a statement, so its writes were rolled back; {_FIX}; delete a job by session.delete(job)"
    )


class RowsChanged(HandlerMisuseError):
    """Some runs of a held batch cannot be settled, because a handler changed the rows of their jobs."""

    def __init__(self, spec: QueueSpec, keys: Sequence[Key]) -> None:
        super().__init__(str(row_changed_error(spec, keys[0])))
        self.keys = keys


def refuse_missing_rows(spec: QueueSpec, missing: Iterable[tuple[Run, Any]]) -> None:
    """Refuse to commit a held batch if the rows of some jobs were not found when they were settled.

    The batch has locked these rows, so only its handlers can have changed them.

    :raises RowsChanged: unless the jobs were deleted through the session.
    """
    keys = [run.key for run, job in missing if job is None or not is_deleted(job)]
    if keys:
        raise RowsChanged(spec, keys)


def refuse_changed_rows(session: Session, spec: QueueSpec, lost: Sequence[Run]) -> None:
    """Roll back, and distinguish runs whose lease was lost from those whose row the handler itself changed.

    :raises HandlerMisuseError: if the lease of one is still held after the rollback.
    """
    session.rollback()
    claimed = ClaimedJobs([(run.token, [run.key]) for run in lost])
    mine = sa.select(*spec.keys).where(spec.strategy.fence(spec, claimed))
    found = session.execute(mine, bind_arguments={"mapper": spec.mapper}).first()
    session.rollback()
    if found is not None:
        raise row_changed_error(spec, tuple(found))
