"""The one job that a function of this package was given: its key, and why it could not be claimed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session, object_session

from sqlaqueue.exc import NotAQueueError, NotClaimableError, StatementError
from sqlaqueue.flow_control.held_back import held_back_by
from sqlaqueue.log import seconds_text
from sqlaqueue.mapping.mixin import QueueMixin, spec_of
from sqlaqueue.postgresql.side_tables import is_paused
from sqlaqueue.queue.names import CONTROL
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.statements.selection import instances, key_of
from sqlaqueue.waiting.wait import read_state


def flushed_key(session: Session, job: Any, function: str) -> Key:
    """Flush, and return the key of a job.

    :raises NotAQueueError: if it is no instance of a queue class.
    :raises StatementError: if it belongs to another session, or to none and has no row.
    """
    if isinstance(job, Iterable) and not isinstance(job, QueueMixin):
        msg = f"{function}(): this is a {type(job).__name__}; give one job, and call it for each"
        raise NotAQueueError(msg)
    (job,) = instances([job], function)
    owner = object_session(job)
    if owner is not None and owner is not session:
        msg = (
            f"{function}(): this {type(job).__name__} belongs to another session, whose transaction this one may not "
            "see; give the session to which the job was added"
        )
        raise StatementError(msg)
    session.flush()
    return key_of(job, function)


def not_claimable(session: Session, model: type[Any], key: Key, function: str) -> NotClaimableError:
    """Return the error for a job that was not claimed, with the reason."""
    spec = spec_of(model)
    return NotClaimableError(f"{function}(): {model.__name__} {key_text(key)} {_reason(session, spec, key)}")


def _reason(session: Session, spec: QueueSpec, key: Key) -> str:
    bind = {"mapper": spec.mapper}
    state = read_state(session, spec, key)
    if not state.has_row:
        return "has no row in this transaction"
    if state.state == "processing":
        return "is already claimed and its run has not ended; to test a crash, call crash() while the job is pending"
    if state.state != "pending":
        return f"is {state.state}, so no worker claims it; requeue() makes it pending"
    if queue_is_paused(session, spec):
        name = spec.model.__name__
        return f"waits, since its queue is paused; session.execute(resume({name})) ends that"
    if spec.has("run_at"):
        wait = sa.select(spec.columns["run_at"] - clock()).where(spec.key_in(spec.keys, [key]))
        delay = session.execute(wait, bind_arguments=bind).scalar_one_or_none()
        if delay is not None and delay.total_seconds() > 0:
            left = delay.total_seconds()
            return f"is not due for {seconds_text(left)}; travel(session, {int(left) + 1}) moves it there"
    other = "was not claimed: another transaction has locked it, or the Consumer's select leaves it out"
    return _held_back(session, spec, key) or other


def _held_back(session: Session, spec: QueueSpec, key: Key) -> str:
    found = [*held_back_by(session, spec, key)]
    if not found:
        return ""
    waits = [one.seconds for one in found if one.kind == "rate"]
    hint = f" travel(session, {int(max(waits)) + 1}) moves it there." if waits else ""
    return f"is held back. {' '.join(one.text for one in found)}{hint}".removesuffix(".")


def queue_is_paused(session: Session, spec: QueueSpec) -> bool:
    """Return whether a queue is paused."""
    if CONTROL not in spec.side_tables:
        return False
    paused = sa.select(is_paused(spec))
    return bool(session.execute(paused, bind_arguments={"mapper": spec.mapper}).scalar_one())
