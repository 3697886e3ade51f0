"""Settle finished runs and claim jobs under leases, in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy.orm import Session

from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.database_errors import is_connection_lost
from sqlaqueue.consumer.notifications.notify import notify_all_claimed
from sqlaqueue.consumer.notifications.poll_schedule import Poll
from sqlaqueue.consumer.settling.outcomes import FinishedRun
from sqlaqueue.consumer.settling.settle import without_expiring
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.queue.engine import own_work
from sqlaqueue.queue.run import Run


class ReplyLost(Exception):
    """The connection dropped before the reply to the commit of a claim."""

    def __init__(self, runs: list[Run]) -> None:
        super().__init__(f"the reply to the commit of a claim of {len(runs)} jobs was lost")
        self.runs = runs


class SettleAndClaimResult(NamedTuple):
    """The result of :func:`settle_and_claim`."""

    jobs: list[Any]
    lease_lost: list[FinishedRun]
    more: bool
    """Whether there may be more to claim."""


@own_work()
def settle_and_claim(  # noqa: PLR0917 - an effect passes arguments by position
    session: Session,
    context: ConsumerContext,
    finished: Sequence[FinishedRun],
    limit: int,
    poll: Poll,
    alone: bool,  # noqa: FBT001 - as above
) -> SettleAndClaimResult:
    """Settle runs, claim up to ``limit`` jobs, or quarantined ones, and commit: all in one transaction.

    Quarantined jobs are claimed in turn with the others, as long as there are some. The jobs stay in the session as
    they were loaded: ``expire_on_commit`` would have each read again.

    :param poll: the announcements that this answers.
    :param alone: whether no other worker of this process claims meanwhile, which might take a quarantined job as well.
    """
    claimer, settler, quarantine = context.claimer, context.settler, context.quarantine
    context.isolation.begin(session)
    lost = settler.settle_again(session, finished) if finished else []
    jobs: list[Any] = []
    quarantined = more = False
    if alone and not quarantine.claimed_last:
        jobs = claimer.claim_quarantined(session)
        quarantined = more = bool(jobs)
    if not jobs:
        jobs, more = claimer.claim(session, limit, poll.announcements)
    if alone and not jobs:
        jobs = claimer.claim_quarantined(session)
        # Other jobs may wait: quarantined ones are claimed apart from them.
        quarantined = more = bool(jobs)
    if not jobs and claimer.held_back.retry_in is None:
        notify_all_claimed(session, context.settings, poll)
    try:
        with without_expiring(session):
            settler.commit(session, finished)
    except Exception as error:
        runs = [run for run in map(run_of, jobs) if run is not None]
        if runs and is_connection_lost(error):
            raise ReplyLost(runs) from error
        raise
    if alone:
        quarantine.claimed_last = quarantined
    if quarantined:
        claimer.began(jobs)
    return SettleAndClaimResult(jobs, lost, more)
