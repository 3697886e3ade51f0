"""Settle finished runs and claim jobs under leases, in one transaction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy.orm import Session

from sqlaqueue.consumer.claiming.claim_jobs import ClaimFailed
from sqlaqueue.consumer.claiming.unclaimable import Suspects
from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.database_errors import is_connection_lost
from sqlaqueue.consumer.notifications.notify import notify_all_claimed
from sqlaqueue.consumer.notifications.poll_schedule import Poll
from sqlaqueue.consumer.settling.outcomes import FinishedRun
from sqlaqueue.consumer.settling.settle import without_expiring
from sqlaqueue.mapping.runs import run_of
from sqlaqueue.queue.run import Run
from sqlaqueue.sql.engine import own_work


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
    suspects: Suspects | None,
) -> SettleAndClaimResult:
    """Settle runs, claim up to ``limit`` jobs, or quarantined ones, and commit: all in one transaction.

    The jobs stay in the session as they were loaded: ``expire_on_commit`` would have each read again.

    :param poll: the announcements that this answers.
    :param alone: whether no other worker of this process claims meanwhile, which might take a quarantined job as well.
    :param suspects: the jobs to claim; None for those that are due.
    """
    claimer, settler = context.claimer, context.settler
    context.isolation.begin(session)
    lost = settler.settle_again(session, finished) if finished else []
    jobs, more, quarantined = _claim(session, context, limit, poll, alone, suspects)
    if not jobs and claimer.held_back.retry_in is None and not claimer.unclaimable:
        notify_all_claimed(session, context.settings, poll)
    try:
        with without_expiring(session):
            settler.commit(session, finished)
    except Exception as error:
        runs = [run for run in map(run_of, jobs) if run is not None]
        if runs and is_connection_lost(error):
            raise ReplyLost(runs) from error
        if jobs and not finished:
            # Such as a deferred constraint, which the commit checks.
            raise ClaimFailed(len(jobs), suspects, quarantined=quarantined) from error
        claimer.unclaimable.settles_apart = True
        raise
    claimer.unclaimable.succeeded(suspects, found=bool(jobs))
    if alone:
        context.quarantine.claimed_last = quarantined
    if quarantined:
        claimer.began(jobs)
    return SettleAndClaimResult(jobs, lost, more)


def _claim(  # noqa: PLR0917 - as its caller
    session: Session,
    context: ConsumerContext,
    limit: int,
    poll: Poll,
    alone: bool,  # noqa: FBT001 - as its caller
    suspects: Suspects | None,
) -> tuple[list[Any], bool, bool]:
    """Claim jobs; return them, whether there may be more, and whether they are quarantined.

    Quarantined jobs are claimed in turn with the others, as long as there are some.
    """
    claimer = context.claimer
    if suspects is not None:
        jobs = claimer.claim_suspects(session, suspects)
        return jobs, True, suspects.quarantined and bool(jobs)
    if alone and not context.quarantine.claimed_last and (jobs := claimer.claim_quarantined(session)):
        return jobs, True, True
    jobs, more = claimer.claim(session, limit, poll.announcements)
    if alone and not jobs and (jobs := claimer.claim_quarantined(session)):
        # Other jobs may wait: quarantined ones are claimed apart from them.
        return jobs, True, True
    return jobs, more, False
