"""What Consumers do in a Session: plain functions ``operation(session, ...)``.

The sync side calls them, the async side runs them by ``AsyncSession.run_sync()``. Each leaves the transaction open
unless its name says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.orm.attributes import set_committed_value

from sqlaqueue import ledger
from sqlaqueue.exc import HandlerMisuseError
from sqlaqueue.mapping import run_of, set_run, show_claimed
from sqlaqueue.outcomes import Outcome
from sqlaqueue.plan import KEYS, LIMIT, Plan
from sqlaqueue.spec import Key, Run
from sqlaqueue.statements import reconcile, rescue, settle_statement
from sqlaqueue.strategies import Held
from sqlaqueue.strategies.side_tables import CONTROL, LEDGER, key_json

_QUIET = {"synchronize_session": False}
"""Consumers settle beside the ORM: nobody looks at the instances any more."""

_GUARD = "sqlaqueue_guard"


@dataclass(slots=True, eq=False)
class Ended:
    """A run with its outcome, on the way to being settled."""

    run: Run
    outcome: Outcome
    job: Any = None
    starts: int = 1
    uncertain: bool = False
    """The commit of its completion was lost: it may have been settled already."""


# -- claiming --------------------------------------------------------------------------------------------------


def claim(session: Session, plan: Plan, n: int) -> list[Any]:
    """Claim up to ``n`` jobs, or one suspect alone: in turn, as long as there are suspects."""
    jobs = []
    if plan.look_for_suspects and not plan.had_suspect:
        jobs = _claim_suspect(session, plan)
    if not jobs:
        plan.had_suspect = False
        jobs = list(session.execute(plan.claim, {LIMIT: n}).scalars())
    if not jobs and plan.look_for_suspects:
        jobs = _claim_suspect(session, plan)
    return jobs


def _claim_suspect(session: Session, plan: Plan) -> list[Any]:
    jobs = [] if plan.claim_suspect is None else list(session.execute(plan.claim_suspect).scalars())
    plan.had_suspect = plan.look_for_suspects = bool(jobs)
    return jobs


def claim_key(session: Session, plan: Plan, key: Key) -> list[Any]:
    """Claim the one job with this key, if it is free and due."""
    return list(session.execute(plan.claim_key, {KEYS: plan.spec.bind_keys([key])}).scalars())


def claim_and_commit(session: Session, plan: Plan, n: int) -> list[Any]:
    """Claim up to ``n`` jobs under a lease and return them detached.

    They leave the session before the commit, or ``expire_on_commit`` would have each read again.
    """
    jobs = claim(session, plan, n)
    session.expunge_all()
    session.commit()
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
    again = sa.select(spec.model).where(spec.matches(spec.keys, keys)).execution_options(populate_existing=True)
    session.execute(again).scalars().all()
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
        changed = session.execute(statement, execution_options=_QUIET).scalars().all()
        settled = set(changed) if len(spec.keys) > 1 else {(key,) for key in changed}
        if not plan.holds_transaction:
            lost += [one for one in group if one.run.key not in settled]
    return lost


def settle_and_commit(session: Session, plan: Plan, ended: Sequence[Ended]) -> list[Ended]:
    """Settle runs in a transaction of their own."""
    lost = settle(session, plan, ended)
    session.commit()
    return lost


def complete_and_commit(session: Session, plan: Plan, ended: Sequence[Ended]) -> list[Ended]:
    """Commit a handler's writes together with the completion of its jobs, or neither.

    :return: the runs whose lease had been lost; if there is one, everything was rolled back.
    """
    session.flush()
    lost = settle(session, plan, ended)
    if lost:
        session.rollback()
    else:
        session.commit()
    return lost


def settle_alone(session: Session, plan: Plan, key: Key, outcome: Outcome, starts: int = 1) -> None:
    """Claim one job of a held batch that was rolled back, and end its run, all in one transaction."""
    for job in claim_key(session, plan, key):
        run = run_of(job)
        if run is not None:
            settle(session, plan, [Ended(run, outcome, job, starts)])
    session.commit()


# -- held batches --------------------------------------------------------------------------------------------


class Savepoint:
    """The part of a held transaction in which one handler runs.

    While it runs, the session refuses to commit: the commit would unlock the whole batch, without an error. A
    rollback or close cannot be refused; :meth:`close` finds out.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._root = session.get_transaction()
        self._own: SessionTransaction = session.begin_nested()
        self._closing = False
        if not session.info.get(_GUARD):
            event.listen(session, "before_commit", _guard)
        session.info[_GUARD] = self

    def refuses(self) -> bool:
        """Return whether a commit that is under way is the handler's."""
        return not self._closing and self._session.get_nested_transaction() is self._own

    def close(self, *, keep: bool) -> None:
        """Keep or undo what the handler wrote.

        :raises HandlerMisuseError: when the handler has ended the transaction that holds the batch.
        """
        if self._session.get_transaction() is not self._root or self._root is None or not self._root.is_active:
            msg = (
                "the handler ended the transaction that holds its batch (session.rollback() or close()); "
                "leave it to the Consumer, and use session.begin_nested() for a part that may be undone"
            )
            raise HandlerMisuseError(msg)
        if self._session.get_nested_transaction() is None:
            return  # the handler has undone its part itself
        self._closing = True
        if keep:
            self._own.commit()
        else:
            self._own.rollback()


def _guard(session: Session) -> None:
    savepoint = session.info.get(_GUARD)
    if savepoint is not None and savepoint.refuses():
        msg = (
            "a handler must not commit the transaction that holds its batch; leave the commit to the Consumer, "
            "and use session.begin_nested() for a part that may be undone"
        )
        raise HandlerMisuseError(msg)


def enter_ledger(session: Session, plan: Plan, keys: Sequence[Key]) -> ledger.Entry:
    """Write down which jobs a batch is about to run, and commit."""
    entry = ledger.enter(session, plan.spec, keys, plan.worker)
    session.commit()
    return entry


def leave_ledger(session: Session, plan: Plan, entry: ledger.Entry) -> None:
    """Strike a batch out whose transaction was rolled back while its worker lives, and commit."""
    ledger.leave(session, plan.spec, entry)
    session.commit()


def settle_held(session: Session, plan: Plan, ended: Sequence[Ended], entry: ledger.Entry) -> None:
    """Settle a held batch, strike it out of the ledger and commit: with its writes, in one transaction."""
    settle(session, plan, ended)
    ledger.leave(session, plan.spec, entry)
    session.commit()


# -- tending the queue ---------------------------------------------------------------------------------------


def extend_leases(session: Session, plan: Plan, runs: Sequence[Run]) -> None:
    """Move the leases of runs that are alive; rows that are locked are passed over."""
    claims: dict[Any, list[Key]] = {}
    for run in runs:
        claims.setdefault(run.token, []).append(run.key)
    held = Held(list(claims.items()))
    verb = plan.spec.strategy.extend(plan.spec, held, sa.literal(plan.lease, sa.Interval()))
    session.execute(verb, execution_options=_QUIET)
    session.commit()


def rescue_expired(session: Session, plan: Plan) -> list[Key]:
    """Take back jobs whose lease has expired, of whatever worker."""
    keys = session.execute(rescue(plan.spec.model), execution_options=_QUIET).scalars().all()
    session.commit()
    return list(keys) if len(plan.spec.keys) > 1 else [(key,) for key in keys]


def reconcile_messages(session: Session, plan: Plan) -> list[Key]:
    """Mend what bypassed the triggers, and forget what the ledger no longer needs."""
    keys = session.execute(reconcile(plan.spec.model), execution_options=_QUIET).scalars().all()
    if LEDGER in plan.spec.side_tables:
        ledger.forget(session, plan.spec)
    session.commit()
    return list(keys) if len(plan.spec.keys) > 1 else [(key,) for key in keys]


def sweep(session: Session, plan: Plan, working: Sequence[Run]) -> tuple[list[Key], list[tuple[Key, float]]]:
    """Rescue what expired, and look which of the jobs at work somebody asked to stop, with the age of the request."""
    rescued = rescue_expired(session, plan) if plan.has_leases else []
    plan.look_for_suspects = True
    return rescued, requests_to_stop(session, plan, working) if working else []


def requests_to_stop(session: Session, plan: Plan, runs: Sequence[Run]) -> list[tuple[Key, float]]:
    """Return which of ``runs`` somebody asked to stop, with the age of the request in seconds, and take it down."""
    control, spec = plan.spec.side_tables[CONTROL], plan.spec
    mine = sa.select(*spec.keys).where(spec.matches(spec.keys, [run.key for run in runs])).subquery("mine")
    named = sa.and_(control.c.queue == spec.name, control.c.key == key_json([mine.c[key.key] for key in spec.keys]))
    age = sa.extract("epoch", sa.func.clock_timestamp() - control.c.created_at)
    taken = sa.delete(control).where(named).returning(*mine.c, age)
    found = [(tuple(row[:-1]), float(row[-1])) for row in session.execute(taken)]
    session.commit()
    return found
