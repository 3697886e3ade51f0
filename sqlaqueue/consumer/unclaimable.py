"""The search for the jobs that this process cannot claim, and what happens to those that are found.

A claim fails as a whole if one row cannot be loaded, or if the database refuses to change one. Which jobs are suspects,
and which of them are claimed next, is decided by :class:`~sqlaqueue.consumer.claim.Unclaimable`.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.consumer.claim import ClaimFailed
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine, Wait
from sqlaqueue.consumer.errors import error_line, is_out_of_range, may_be_of_a_row
from sqlaqueue.consumer.events import JobEvent
from sqlaqueue.consumer.leased import report_unclaimable
from sqlaqueue.consumer.notifications.polls import notify_settled
from sqlaqueue.queue.run import Key
from sqlaqueue.queue.spec import clock

_SLOW = 0.5
"""Seconds between two claims of suspects if very many jobs were unclaimable in a row."""


def search_unclaimable(context: ConsumerContext, failed: ClaimFailed) -> Routine:
    """Take the next step of the search after a claim has failed, so that the next claim continues it.

    :raises Exception: the error of the claim, if no job is its cause.
    """
    error, unclaimable = failed.__cause__ or failed, context.claimer.unclaimable
    # On a distributed table a claim goes from shard to shard, and leaves out one that fails.
    if not may_be_of_a_row(error) or context.settings.distribution is not None:
        raise error
    unclaimable.settles_apart = True
    if failed.suspects is None:
        try:
            keys = yield ExecuteInOwnSession(_candidates, (context, failed))
        except Exception:  # noqa: BLE001 - then the error is none of a row, and it says more than this one
            raise error from None
        if not (unclaimable.suspect(keys, quarantined=failed.quarantined) or unclaimable.is_searching):
            raise error
    else:
        found = unclaimable.failed(failed.suspects, error_line(error))
        if found is not None and not (is_out_of_range(error) and (yield from _fail(context, found.key, error))):
            report_unclaimable(context, found, error, "claimed")
    context.report_start()
    context.polls.poll_at_once()
    if unclaimable.slows_down:
        yield Wait("stop", _SLOW)
    return True


def _candidates(session: Session, context: ConsumerContext, failed: ClaimFailed) -> list[Key]:
    return context.claimer.candidates(session, failed.limit, quarantined=failed.quarantined)


def _fail(context: ConsumerContext, key: Key, error: BaseException) -> Routine:
    """Fail a job whose count of attempts cannot become larger; return whether there was such a job."""
    try:
        failed = yield ExecuteInOwnSession(_fail_pending, (context, key, error_line(error)))
    except DBAPIError:
        return False
    if failed:
        context.claimer.unclaimable.remove(key)
        context.events.emit(JobEvent("failed", context.spec.name, key, error=error))
    return failed


def _fail_pending(session: Session, context: ConsumerContext, key: Key, error: str) -> bool:
    spec, bind = context.spec, context.settings.bind_arguments
    most = spec.most_attempts
    if most is None or not spec.has("status"):
        return False
    text = spec.truncated_error(sa.literal(error, sa.Text()))
    values: dict[str, Any] = {
        "status": spec.status_value("failed"),
        "finished_at": clock(),
        "last_error": text,
        "lease_token": None,
    }
    failed = (
        sa.update(spec.table)
        .where(spec.key_in(spec.keys, [key]), spec.in_state("pending"), spec.columns["attempts"] >= most)
        .values({spec.columns[role]: value for role, value in values.items() if spec.has(role)})
    )
    changed = session.execute(failed.returning(*spec.keys), bind_arguments=bind).first()
    if changed is not None:
        notify_settled(session, spec, context.waiters, [key])
    session.commit()
    return changed is not None
