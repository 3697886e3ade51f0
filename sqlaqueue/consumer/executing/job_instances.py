"""What Consumers do in a Session: plain functions ``operation(session, ...)``.

The sync side calls them, the async side runs them by ``AsyncSession.run_sync()``. Each leaves the transaction open
unless its name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value

from sqlaqueue.consumer.claiming.claim_jobs import claim_key
from sqlaqueue.consumer.notifications.notify import notify_released
from sqlaqueue.consumer.sessions import isolation_level
from sqlaqueue.consumer.sessions.handler_misuse import refuse_missing_rows
from sqlaqueue.consumer.settings import Plan
from sqlaqueue.consumer.settling import crash_journal
from sqlaqueue.consumer.settling.outcomes import Ended
from sqlaqueue.consumer.settling.settle import left_as_loaded, settle
from sqlaqueue.keys import keys_by_token, keys_from
from sqlaqueue.mapping.runs import run_of, set_run, show_claimed
from sqlaqueue.queue.backend import backend
from sqlaqueue.queue.run import Run
from sqlaqueue.statements.returning import returning_keys
from sqlaqueue.strategies import ClaimedJobs


def rollback(session: Session) -> None:
    """Undo what the session's transaction has done."""
    session.rollback()


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
    mine = spec.strategy.fence(spec, ClaimedJobs(list(keys_by_token(runs).items())))
    again = sa.select(spec.model).where(mine, backend().claims.planned_anew()).options(*plan.options)
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
    isolation_level.begin_read_committed(session, plan)
    if not spec.strategy.keeps_rows:
        for job in jobs:
            for attribute, value in list(sa.inspect(job).committed_state.items()):
                set_committed_value(job, attribute, value)
        return
    keys = [run.key for job in jobs if (run := run_of(job)) is not None]
    again = sa.select(spec.model).where(spec.key_in(spec.keys, keys)).options(*plan.options)
    session.execute(again.execution_options(populate_existing=True)).unique().scalars().all()
    for job in jobs:
        show_claimed(job, spec)


# -- held batches --------------------------------------------------------------------------------------------


def enter_ledger(session: Session, plan: Plan, entry: crash_journal.Entry, tickets: Sequence[str] = ()) -> None:
    """Write down which jobs a batch is about to run, and commit.

    :param tickets: the calls that the claim answered. The others hear of it here: the claim commits with its last job.
    """
    crash_journal.enter(session, plan.spec, entry, plan.worker(), tickets)
    session.commit()


def strike_ledger(session: Session, plan: Plan, entry: crash_journal.Entry) -> None:
    """Strike a batch out whose transaction was rolled back while its worker lives, but for its suspects; and commit."""
    crash_journal.strike_soon(session, plan.spec, entry)
    session.commit()


def settle_held(session: Session, plan: Plan, ended: Sequence[Ended], entry: crash_journal.Entry) -> None:
    """Settle a held batch, strike it out of the ledger and commit: with its writes, in one transaction."""
    refuse_missing_rows(plan, settle(session, plan, ended))
    _leave(session, plan, ended, entry)
    notify_released(session, plan, ended)
    with left_as_loaded(session):
        session.commit()


def settle_alone(session: Session, plan: Plan, ended: Ended, entry: crash_journal.Entry) -> Ended | None:
    """Claim one job of a held batch that was rolled back, and end its run, all in one transaction.

    :return: the run that was ended; None when somebody else has the job by now.
    """
    again = _settle_anew(session, plan, ended)
    if again is not None:
        _leave(session, plan, [again], entry)
        session.commit()
    return again


def settle_committed(
    session: Session, plan: Plan, jobs: Sequence[Any], ended: Sequence[Ended], entry: crash_journal.Entry
) -> list[Ended]:
    """Put right a held batch whose transaction a handler has committed, where the claim itself has left its mark.

    Its messages, or its rows, would be missing. Jobs that had ended have what they wrote committed, so they end; those
    that had not begun wait again. Where a claim leaves no mark, nothing tells a commit from a rollback: all are free.

    :return: the runs that were ended.
    """
    claims = keys_by_token(run for job in jobs if (run := run_of(job)) is not None)
    if not plan.spec.strategy.keeps_rows:
        reload(session, plan, jobs)
    verb = plan.spec.strategy.restore(plan.spec, ClaimedJobs(list(claims.items()), jobs))
    if verb is None:
        return []
    found = session.execute(returning_keys(plan.spec, verb), bind_arguments=plan.bind).scalars().all()
    back = set(keys_from(found, len(plan.spec.keys)))
    again = [_settle_anew(session, plan, one) for one in ended if one.run.key in back]
    crash_journal.strike(session, plan.spec, entry)
    session.commit()
    return [one for one in again if one is not None]


def _settle_anew(session: Session, plan: Plan, ended: Ended) -> Ended | None:
    for job in claim_key(session, plan, ended.run.key):
        # By the token of the transaction that was lost, a row that the claim deletes would not be written again.
        claimed = run_of(job)
        again = replace(ended, run=replace(ended.run, token=claimed.token if claimed else None), job=job)
        settle(session, plan, [again])
        return again
    return None


def _leave(session: Session, plan: Plan, ended: Sequence[Ended], entry: crash_journal.Entry) -> None:
    # A job that is given back has not been counted: what is known against it must stay.
    if any(one.outcome.ending == "released" or one.outcome.suspect for one in ended):
        crash_journal.strike(session, plan.spec, entry)
    else:
        crash_journal.leave(session, plan.spec, entry)
