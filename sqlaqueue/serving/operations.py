"""What Consumers do in a Session: plain functions ``operation(session, ...)``.

The sync side calls them, the async side runs them by ``AsyncSession.run_sync()``. Each leaves the transaction open
unless its name says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value

from sqlaqueue.mapping import run_of, set_run, show_claimed
from sqlaqueue.serving import ledger
from sqlaqueue.serving.bearings import Mark
from sqlaqueue.serving.calls import Look
from sqlaqueue.serving.ending import commit, left_as_loaded, settle, settle_surely
from sqlaqueue.serving.outcomes import Ended
from sqlaqueue.serving.plan import EXCEPT, KEYS, LIMIT, TICKETS, Plan
from sqlaqueue.serving.telling import spare_others
from sqlaqueue.spec import Key, Run
from sqlaqueue.strategies import Held
from sqlaqueue.strategies.replanning import planned_anew

# -- claiming --------------------------------------------------------------------------------------------------


def claim(session: Session, plan: Plan, n: int, tickets: Sequence[str] = ()) -> tuple[list[Any], bool]:
    """Claim up to ``n`` jobs, from the head of the queue or from where the last claim has ended.

    :param tickets: the calls that this answers, of which the others hear when it commits.
    :return: the jobs, and whether there may be more.
    """
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
    jobs = list(session.execute(statement, parameters, bind_arguments=plan.bind).scalars())
    ended_at = plan.mark_of(jobs) if len(jobs) >= n else None
    plan.bearings.claimed(mark, ended_at, len(jobs), time.monotonic() - began)
    return jobs


def claim_key(session: Session, plan: Plan, key: Key) -> list[Any]:
    """Claim the one job with this key, if it is free and due."""
    return list(session.execute(plan.claim_key, {KEYS: plan.spec.bind_keys([key])}, bind_arguments=plan.bind).scalars())


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
    """Settle runs, claim up to ``n`` jobs under a lease, or one suspect, and commit: all in one transaction.

    Suspects come in turn with the others, as long as there are some. The jobs stay in the session as they were
    loaded: ``expire_on_commit`` would have each read again.

    :param look: the calls that this answers.
    :param alone: whether nobody else in this process claims meanwhile, who might take a suspect as well.
    """
    lost = settle_surely(session, plan, ended) if ended else []
    jobs: list[Any] = []
    suspect = more = False
    if alone and not plan.had_suspect:
        jobs = _claim_suspect(session, plan)
        suspect = more = bool(jobs)
    if not jobs:
        jobs, more = claim(session, plan, n, look.tickets)
    if alone and not jobs:
        jobs = _claim_suspect(session, plan)
        # Whatever else waits: a suspect is claimed by itself.
        suspect = more = bool(jobs)
    if not jobs:
        spare_others(session, plan, look)
    with left_as_loaded(session):
        commit(session, ended)
    if alone:
        plan.had_suspect = suspect
    if suspect:
        plan.suspects.begin(tuple(sa.inspect(jobs[0]).identity))
    return Claimed(jobs, lost, more)


def _claim_suspect(session: Session, plan: Plan) -> list[Any]:
    if plan.claim_suspect is None or not plan.look_for_suspects or plan.suspects.one_runs:
        return []
    jobs = list(session.execute(plan.claim_suspect, bind_arguments=plan.bind).scalars())
    plan.look_for_suspects = bool(jobs)
    return jobs


def adopt(session: Session, jobs: Sequence[Any]) -> list[Any]:
    """Return claimed, detached jobs as members of ``session``.

    Jobs that came with related objects are copied: two jobs may share one, which cannot be in two sessions.
    """
    adopted = []
    for job in jobs:
        state = sa.inspect(job)
        if len(jobs) > 1 or state.dict.keys().isdisjoint(state.mapper.relationships.keys()):
            session.add(job)
            adopted.append(job)
        else:
            copy = session.merge(job, load=False)
            set_run(copy, run_of(job))
            adopted.append(copy)
    return adopted


def load_again(session: Session, plan: Plan, runs: Sequence[Run]) -> list[Any]:
    """Return new instances of claimed jobs, detached; not of those that are no longer held.

    For jobs whose instances are in a session that is not free to give them up.
    """
    spec = plan.spec
    claims: dict[Any, list[Key]] = {}
    for run in runs:
        claims.setdefault(run.token, []).append(run.key)
    mine = spec.strategy.fence(spec, Held(list(claims.items())))
    again = sa.select(spec.model).where(mine, planned_anew()).options(*plan.options)
    found = {sa.inspect(job).identity: job for job in session.execute(again).unique().scalars()}
    for run in runs:
        if run.key in found:
            set_run(found[run.key], run)
    session.expunge_all()
    session.rollback()
    return [found[run.key] for run in runs if run.key in found]


def reload(session: Session, plan: Plan, jobs: Sequence[Any]) -> None:
    """Show jobs again as their claim handed them out, after what a handler did to them was undone.

    A rollback expires what was changed; in async code the next look at it would raise.
    """
    spec = plan.spec
    if not spec.strategy.hands_out_rows:
        for job in jobs:
            for attribute, value in list(sa.inspect(job).committed_state.items()):
                set_committed_value(job, attribute, value)
        return
    keys = [run.key for job in jobs if (run := run_of(job)) is not None]
    again = sa.select(spec.model).where(spec.matches(spec.keys, keys)).options(*plan.options)
    session.execute(again.execution_options(populate_existing=True)).unique().scalars().all()
    for job in jobs:
        show_claimed(job, spec)


# -- held batches --------------------------------------------------------------------------------------------


def enter_ledger(session: Session, plan: Plan, entry: ledger.Entry, tickets: Sequence[str] = ()) -> None:
    """Write down which jobs a batch is about to run, and commit.

    :param tickets: the calls that the claim answered. The others hear of it here: the claim commits with its last job.
    """
    ledger.enter(session, plan.spec, entry, plan.worker(), tickets)
    session.commit()


def strike_ledger(session: Session, plan: Plan, entry: ledger.Entry) -> None:
    """Strike a batch out whose transaction was rolled back while its worker lives, and commit."""
    ledger.strike_soon(session, plan.spec, entry)
    session.commit()


def settle_held(session: Session, plan: Plan, ended: Sequence[Ended], entry: ledger.Entry) -> None:
    """Settle a held batch, strike it out of the ledger and commit: with its writes, in one transaction."""
    settle(session, plan, ended)
    _leave(session, plan, ended, entry)
    with left_as_loaded(session):
        session.commit()


def settle_alone(session: Session, plan: Plan, ended: Ended, entry: ledger.Entry) -> Ended | None:
    """Claim one job of a held batch that was rolled back, and end its run, all in one transaction.

    :return: the run that was ended; None when somebody else has the job by now.
    """
    for job in claim_key(session, plan, ended.run.key):
        # By the token of the transaction that was lost, a row that the claim deletes would not be written again.
        claimed = run_of(job)
        again = replace(ended, run=replace(ended.run, token=claimed.token if claimed else None), job=job)
        settle(session, plan, [again])
        _leave(session, plan, [again], entry)
        session.commit()
        return again
    return None


def _leave(session: Session, plan: Plan, ended: Sequence[Ended], entry: ledger.Entry) -> None:
    # A job that is given back has not been counted: what is known against it must stay.
    if any(one.outcome.ending == "released" for one in ended):
        ledger.strike(session, plan.spec, entry)
    else:
        ledger.leave(session, plan.spec, entry)
