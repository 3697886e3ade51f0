"""What Consumers do in a Session: plain functions ``operation(session, ...)``.

The sync side calls them, the async side runs them by ``AsyncSession.run_sync()``. Each leaves the transaction open
unless its name says otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value

from sqlaqueue.exc import HandlerMisuseError
from sqlaqueue.mapping import run_of, set_run, show_claimed
from sqlaqueue.serving import ledger
from sqlaqueue.serving.calls import NO_CALL, Look
from sqlaqueue.serving.outcomes import COMPLETED, Outcome
from sqlaqueue.serving.plan import EXCEPT, KEYS, LIMIT, TICKETS, Plan
from sqlaqueue.serving.telling import spare_others, tell_ended
from sqlaqueue.spec import Key, Run
from sqlaqueue.statements import settle_statement
from sqlaqueue.strategies import Held

logger = logging.getLogger("sqlaqueue")

QUIET = {"synchronize_session": False}
"""Consumers settle beside the ORM: nobody looks at the instances any more."""


@dataclass(slots=True, eq=False)
class Ended:
    """A run with its outcome, on the way to being settled."""

    run: Run
    outcome: Outcome
    job: Any = None
    starts: int = 1
    uncertain: bool = False
    """A commit was tried: unless its answer arrives, the run may have been settled or not."""


def will_pass(error: BaseException) -> bool:
    """Return whether trying again is all there is to do: the connection is gone, or the database asks for it.

    It does at a deadlock, and at a conflict under a strict isolation level.
    """
    if not isinstance(error, DBAPIError):
        return False
    state = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "pgcode", None)
    return error.connection_invalidated or state in {"40001", "40P01"}


# -- claiming --------------------------------------------------------------------------------------------------


def claim(session: Session, plan: Plan, n: int, tickets: Sequence[str] = ()) -> list[Any]:
    """Claim up to ``n`` jobs.

    :param tickets: the calls that this answers, of which the others hear when it commits.
    """
    parameters: dict[str, Any] = {LIMIT: n}
    if tickets:
        parameters[TICKETS] = " ".join(tickets)
    if plan.claim_suspect is None:
        parameters[EXCEPT] = plan.spec.bind_keys(plan.suspects.remembered())
    statement = plan.claim_aloud if tickets else plan.claim
    return list(session.execute(statement, parameters, bind_arguments=plan.bind).scalars())


def claim_key(session: Session, plan: Plan, key: Key) -> list[Any]:
    """Claim the one job with this key, if it is free and due."""
    return list(session.execute(plan.claim_key, {KEYS: plan.spec.bind_keys([key])}, bind_arguments=plan.bind).scalars())


def claim_and_commit(session: Session, plan: Plan, n: int, look: Look = NO_CALL) -> list[Any]:
    """Claim up to ``n`` jobs under a lease, or one suspect: in turn, as long as there are suspects.

    They come back detached, and leave the session before the commit: ``expire_on_commit`` would have each read again.

    :param look: the calls that this answers.
    """
    jobs: list[Any] = []
    if not plan.had_suspect:
        jobs = _claim_suspect(session, plan)
    if not jobs:
        plan.had_suspect = False
        jobs = claim(session, plan, n, look.tickets)
    if not jobs:
        jobs = _claim_suspect(session, plan)
    if not jobs:
        spare_others(session, plan, look)
    session.expunge_all()
    session.commit()
    if plan.had_suspect:
        plan.suspects.begin(tuple(sa.inspect(jobs[0]).identity))
    return jobs


def _claim_suspect(session: Session, plan: Plan) -> list[Any]:
    if plan.claim_suspect is None or not plan.look_for_suspects or plan.suspects.one_runs:
        return []
    jobs = list(session.execute(plan.claim_suspect, bind_arguments=plan.bind).scalars())
    plan.had_suspect = plan.look_for_suspects = bool(jobs)
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


# -- ending runs ---------------------------------------------------------------------------------------------


def touched(session: Session) -> bool:
    """Return whether a handler has used the session: something to flush, or a transaction with a connection."""
    if session.new or session.dirty or session.deleted:
        return True
    transaction = session.get_transaction()
    return transaction is not None and bool(transaction._connections)  # noqa: SLF001 - asking by session.connection() would begin one


def settle(session: Session, plan: Plan, ended: Sequence[Ended]) -> list[Ended]:
    """Write how runs ended and return those whose lease had been lost: nothing was changed about them."""
    spec, lost = plan.spec, []
    groups: dict[Any, list[Ended]] = {}
    for one in ended:
        outcome = one.outcome
        alike = (outcome.ending, outcome.delay, outcome.error, one.starts)
        groups.setdefault(alike, []).append(one)
    for group in groups.values():
        claims: dict[Any, list[Key]] = {}
        for one in group:
            claims.setdefault(one.run.token, []).append(one.run.key)
        # Only rows that the claim deleted are written anew from their instances.
        jobs = () if spec.strategy.hands_out_rows else [one.job for one in group]
        held = Held(list(claims.items()), jobs)
        statement = settle_statement(spec, held, group[0].outcome.settlement(group[0].starts))
        changed = session.execute(statement, execution_options=QUIET, bind_arguments=plan.bind).scalars().all()
        settled = set(changed) if len(spec.keys) > 1 else {(key,) for key in changed}
        if not plan.holds_transaction:
            lost += [one for one in group if one.run.key not in settled]
        if group[0].outcome.state != "pending":
            tell_ended(session, plan, settled)
    return lost


def settle_and_commit(session: Session, plan: Plan, ended: Sequence[Ended], *, wait: bool = True) -> list[Ended]:
    """Settle runs in a transaction of their own and return those whose lease had been lost.

    :param wait: whether to wait for rows that somebody has locked for more than a moment.
    """
    if not wait:
        session.execute(sa.text("SET LOCAL lock_timeout = '500ms'"), bind_arguments=plan.bind)
    lost = settle(session, plan, ended)
    if any(one.uncertain for one in lost):
        lost = _look_again(session, plan, lost)
    _commit(session, ended)
    return lost


def _commit(session: Session, ended: Sequence[Ended]) -> None:
    # Not before: what failed on the way to the commit was surely not settled, and by now may be by somebody else.
    for one in ended:
        one.uncertain = True
    session.commit()


def _look_again(session: Session, plan: Plan, lost: Sequence[Ended]) -> list[Ended]:
    """Return those of ``lost`` that are, when they may have been settled by a commit whose answer got lost."""
    spec = plan.spec
    keys = [one.run.key for one in lost]
    statement = sa.select(*spec.keys, spec.columns["status"]).where(spec.matches(spec.keys, keys))
    found = session.execute(statement, bind_arguments=plan.bind)
    states = {tuple(row[:-1]): row[-1] for row in found}
    completed = spec.word("completed")
    if_gone = completed if spec.config.on_complete == "delete" else None
    lost_indeed = []
    for one in lost:
        state = states.get(one.run.key, if_gone)
        if one.uncertain and state == completed:
            one.outcome = COMPLETED
        elif not one.uncertain or state != spec.word(one.outcome.state):
            lost_indeed.append(one)
    return lost_indeed


def settle_each(
    session: Session, plan: Plan, ended: Sequence[Ended], *, wait: bool = True
) -> tuple[list[Ended], list[Ended]]:
    """Settle runs one by one, so that one that cannot be settled does not hold up the others.

    :return: the runs whose lease had been lost, and those that could not be settled.
    """
    lost: list[Ended] = []
    stuck: list[Ended] = []
    for one in ended:
        try:
            lost += settle_and_commit(session, plan, [one], wait=wait)
        except DBAPIError as error:
            session.rollback()
            if will_pass(error):
                raise
            logger.warning("job %s cannot be settled as %s: %s", one.run.key, one.outcome.ending, error)
            found_lost = _settle_otherwise(session, plan, one, error) if wait else None
            if found_lost is None:
                stuck.append(one)
            else:
                lost += found_lost
    return lost, stuck


def _settle_otherwise(session: Session, plan: Plan, one: Ended, error: DBAPIError) -> list[Ended] | None:
    """End a run that the database refuses to end as it did: a success as a failed attempt, an error without its text.

    :return: the run if its lease had been lost; None when it cannot be settled at all.
    """
    outcome = plan.judge(error, one.run) if one.outcome is COMPLETED else one.outcome
    for other in (outcome, replace(outcome, error=None)):
        one.outcome = other
        try:
            return settle_and_commit(session, plan, [one])
        except DBAPIError as again:
            session.rollback()
            if will_pass(again):
                raise
    return None


def complete_and_commit(session: Session, plan: Plan, ended: Sequence[Ended]) -> list[Ended]:
    """Commit a handler's writes together with the completion of its jobs, or neither.

    :return: the runs whose lease had been lost; if there is one, everything was rolled back.
    :raises HandlerMisuseError: when a handler has settled its job itself.
    """
    # The fence needs the row: of a job that its handler deletes, it is there until the flush.
    deleted = [one for one in ended if one.job in session.deleted]
    with session.no_autoflush:
        lost = settle(session, plan, deleted)
    if not lost:
        session.flush()
        lost = settle(session, plan, [one for one in ended if not _is_gone(one.job)])
    if not lost:
        _commit(session, ended)
        return lost
    for one in lost:
        _refuse_settled(plan, one.job)
    session.rollback()
    return lost


def _is_gone(job: Any) -> bool:
    state = sa.inspect(job)
    return bool(state.deleted or state.was_deleted)


def _refuse_settled(plan: Plan, job: Any) -> None:
    status, running = plan.spec.attributes["status"], plan.spec.word("processing")
    if job.__dict__.get(status, running) != running:
        msg = (
            f"the handler set {type(job).__name__}.{status} itself, and nothing of what it wrote was kept; let it "
            "return, or raise Retry, Snooze, Fail or Cancel, and the Consumer writes the state"
        )
        raise HandlerMisuseError(msg)


# -- held batches --------------------------------------------------------------------------------------------


def enter_ledger(session: Session, plan: Plan, entry: ledger.Entry, tickets: Sequence[str] = ()) -> None:
    """Write down which jobs a batch is about to run, and commit.

    :param tickets: the calls that the claim answered. The others hear of it here: the claim commits with its last job.
    """
    ledger.enter(session, plan.spec, entry, plan.worker(), tickets)
    session.commit()


def strike_ledger(session: Session, plan: Plan, entry: ledger.Entry) -> None:
    """Strike a batch out whose transaction was rolled back while its worker lives, and commit."""
    ledger.strike(session, plan.spec, entry)
    session.commit()


def settle_held(session: Session, plan: Plan, ended: Sequence[Ended], entry: ledger.Entry) -> None:
    """Settle a held batch, strike it out of the ledger and commit: with its writes, in one transaction."""
    settle(session, plan, ended)
    _leave(session, plan, ended, entry)
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
        ledger.keep(session, plan.spec, entry)
    else:
        ledger.leave(session, plan.spec, entry)
