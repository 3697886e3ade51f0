"""Operations that claim jobs in a Session, and what goes with a claim."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import instance_state

from sqlaqueue.consumer.claiming.scan_cursor import Mark
from sqlaqueue.consumer.core.transient_errors import is_connection_lost
from sqlaqueue.consumer.notifications.notify import notify_all_claimed
from sqlaqueue.consumer.notifications.poll_schedule import Look
from sqlaqueue.consumer.sessions import isolation_level
from sqlaqueue.consumer.settings import EXCEPT, KEYS, LIMIT, TICKETS, Plan
from sqlaqueue.consumer.settling.outcomes import Ended
from sqlaqueue.consumer.settling.settle import commit, left_as_loaded, settle_surely
from sqlaqueue.keys import Key
from sqlaqueue.mapping.runs import record_run, run_of
from sqlaqueue.queue.run import Run


def claim(session: Session, plan: Plan, n: int, tickets: Sequence[str] = ()) -> tuple[list[Any], bool]:
    """Claim up to ``n`` jobs, from the head of the queue or from where the last claim has ended.

    :param tickets: the calls that this answers, of which the others hear when it commits.
    :return: the jobs, and whether there may be more.
    """
    isolation_level.begin_read_committed(session, plan)
    mark = plan.bearings.begin()
    jobs = _claim_from(session, plan, mark, n, tickets)
    if mark is not None and not jobs:
        mark = None
        jobs = _claim_from(session, plan, mark, n, tickets)
    return jobs, len(jobs) >= n or mark is not None


def _claim_from(session: Session, plan: Plan, mark: Mark | None, n: int, tickets: Sequence[str]) -> list[Any]:
    began = time.monotonic()
    parameters: dict[str, Any] = {LIMIT: n, **(mark or {})}
    if tickets:
        parameters[TICKETS] = " ".join(tickets)
    if plan.claim_suspect is None:
        parameters[EXCEPT] = plan.spec.bind_keys(plan.suspects.remembered())
    if mark is None:
        statement = plan.claim_aloud if tickets else plan.claim
    else:
        statement = plan.claim_from_aloud if tickets else plan.claim_from
    jobs = _hand_out(session, plan, statement, parameters)
    ended_at = plan.mark_of(jobs) if len(jobs) >= n else None
    plan.bearings.claimed(mark, ended_at, len(jobs), time.monotonic() - began)
    return jobs


def _hand_out(session: Session, plan: Plan, statement: Any, parameters: dict[str, Any] | None = None) -> list[Any]:
    """Execute a claim, and return its instances.

    Nearly always the session is new. Then no instance is there that would have to be populated again, and to be ready
    for one costs a twentieth of the time that a job takes.
    """
    options = {"populate_existing": bool(session.identity_map)}
    found = session.execute(statement, parameters, execution_options=options, bind_arguments=plan.bind)
    jobs = list(found.scalars())
    for job in jobs:
        run = run_of(job)
        if run is None:
            # A listener that goes from one job to another has loaded this one, before its row of the claim came.
            record_run(instance_state(job), session)
            run = run_of(job)
        if run is not None:
            run.by_consumer = True
    if plan.load_rest is not None and jobs:
        keys = plan.spec.bind_keys([run.key for job in jobs if (run := run_of(job)) is not None])
        # The rows of a joined collection are several for one job; reading them all is what makes the instances whole.
        session.execute(plan.load_rest, {KEYS: keys}, bind_arguments=plan.bind).unique().all()
    return jobs


def claim_key(session: Session, plan: Plan, key: Key) -> list[Any]:
    """Claim the one job with this key, if it is free and due."""
    isolation_level.begin_read_committed(session, plan)
    return _hand_out(session, plan, plan.claim_key, {KEYS: plan.spec.bind_keys([key])})


class AnswerLost(Exception):
    """The answer to the commit of a claim did not arrive."""

    def __init__(self, runs: list[Run]) -> None:
        super().__init__(f"the answer to the commit of a claim of {len(runs)} jobs was lost")
        self.runs = runs


class Claimed(NamedTuple):
    """What came of settling and claiming."""

    jobs: list[Any]
    lost: list[Ended]
    """The runs whose lease had been lost."""
    more: bool
    """Whether there may be more to claim."""


def settle_and_claim(  # noqa: PLR0917 - as all operations, from left to right
    session: Session,
    plan: Plan,
    ended: Sequence[Ended],
    n: int,
    look: Look,
    alone: bool,  # noqa: FBT001 - called positionally by its step
) -> Claimed:
    """Settle runs, claim up to ``n`` jobs under a lease, or suspects, and commit: all in one transaction.

    Suspects come in turn with the others, as long as there are some. The jobs stay in the session as they were
    loaded: ``expire_on_commit`` would have each read again.

    :param look: the calls that this answers.
    :param alone: whether nobody else in this process claims meanwhile, who might take a suspect as well.
    """
    isolation_level.begin_read_committed(session, plan)
    lost = settle_surely(session, plan, ended) if ended else []
    jobs: list[Any] = []
    suspect = more = False
    if alone and not plan.had_suspect:
        jobs = _claim_suspects(session, plan)
        suspect = more = bool(jobs)
    if not jobs:
        jobs, more = claim(session, plan, n, look.tickets)
    if alone and not jobs:
        jobs = _claim_suspects(session, plan)
        # Whatever else waits: suspects are claimed apart from it.
        suspect = more = bool(jobs)
    if not jobs:
        notify_all_claimed(session, plan, look)
    try:
        with left_as_loaded(session):
            commit(session, ended)
    except Exception as error:
        runs = [run for run in map(run_of, jobs) if run is not None]
        if runs and is_connection_lost(error):
            raise AnswerLost(runs) from error
        raise
    if alone:
        plan.had_suspect = suspect
    if suspect:
        plan.suspects.begin(tuple(sa.inspect(job).identity) for job in jobs)
    return Claimed(jobs, lost, more)


def _claim_suspects(session: Session, plan: Plan) -> list[Any]:
    """Claim one suspect, or several where they may run together; none while some are running."""
    if plan.claim_suspect is None or not plan.look_for_suspects or plan.suspects.one_runs:
        return []
    jobs: list[Any] = []
    if plan.claim_suspects is not None:
        # Of a single one it is known who did it, should its worker die.
        several = len(session.execute(plan.waiting_suspects, bind_arguments=plan.bind).all()) > 1
        parameters = {LIMIT: plan.suspects.at_once}
        jobs = _hand_out(session, plan, plan.claim_suspects, parameters) if several else []
    if not jobs:
        jobs = _hand_out(session, plan, plan.claim_suspect)
        for run in map(run_of, jobs):
            if run is not None:
                run.isolated = True
    plan.look_for_suspects = bool(jobs)
    return jobs
