"""Ending runs: what Consumers do in a Session about jobs whose handler has returned.

Plain functions ``operation(session, ...)``, as in :mod:`sqlaqueue.consumer.executing.job_instances`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.consumer.core.transient_errors import is_lock_or_timeout, is_transient, may_settle_later
from sqlaqueue.consumer.notifications.notify import notify_settled
from sqlaqueue.consumer.sessions import isolation_level
from sqlaqueue.consumer.sessions.handler_misuse import check_rows, is_deleted, refuse_changed_rows
from sqlaqueue.consumer.settings import ASKED, KEYS, TOKEN, Plan
from sqlaqueue.consumer.settling.outcomes import COMPLETED, Ended, HeldUp
from sqlaqueue.keys import Key, key_text, key_value, keys_by_token, keys_from
from sqlaqueue.log import fields, logger
from sqlaqueue.statements.settle import settle_statement, with_run_details
from sqlaqueue.strategies import ClaimedJobs

QUIET = {"synchronize_session": False}
"""Consumers settle beside the ORM: nobody looks at the instances any more."""


def settle(session: Session, plan: Plan, ended: Sequence[Ended]) -> list[Ended]:
    """Write how runs ended and return those that were not held any more: nothing was changed about them."""
    lost: list[Ended] = []
    for group in _alike(ended):
        settled = _settle_alike(session, plan, group)
        if len(settled) < len(group):
            keys = set(settled)
            lost += [one for one in group if one.run.key not in keys]
        if group[0].outcome.state != "pending":
            notify_settled(session, plan, settled)
    return lost


def _alike(ended: Sequence[Ended]) -> list[list[Ended]]:
    """Return runs in groups that end alike."""
    groups: dict[Any, list[Ended]] = {}
    # Nearly all succeed, and there are many.
    usual = [one for one in ended if one.outcome is COMPLETED and one.starts == 1]
    for one in ended if len(usual) < len(ended) else ():
        outcome = one.outcome
        if not (outcome is COMPLETED and one.starts == 1):
            groups.setdefault((replace(outcome, cause=None), one.starts), []).append(one)
    return [group for group in (usual, *groups.values()) if group]


def _settle_alike(session: Session, plan: Plan, group: Sequence[Ended]) -> list[Key]:
    """End runs that end alike, and return the keys of those that were held."""
    spec, first = plan.spec, group[0]
    claims = keys_by_token(one.run for one in group)
    if first.outcome is COMPLETED and first.starts == 1 and plan.complete is not None:
        there = isolation_level.complete_in_place(session, plan, claims)
        if there:
            claims = {
                token: left for token, keys in claims.items() if (left := [key for key in keys if key not in there])
            }
        return there + [key for token, keys in claims.items() for key in _complete(session, plan, token, keys)]
    # Only rows that the claim deleted are written anew from their instances.
    jobs = () if spec.strategy.keeps_rows else [one.job for one in group]
    held = ClaimedJobs(list(claims.items()), jobs)
    settlement = first.outcome.settlement(first.starts)
    settlement = with_run_details(spec, settlement, [one.run for one in group], plan.worker())
    statement = settle_statement(spec, held, settlement)
    found = session.execute(statement, execution_options=QUIET, bind_arguments=plan.bind).scalars()
    return keys_from(found, len(spec.keys))


def _complete(session: Session, plan: Plan, token: Any, keys: list[Key]) -> list[Key]:
    """End runs of one claim with success, and return the keys of those that were held."""
    bound = {TOKEN: token, KEYS: plan.spec.bind_keys(keys), ASKED: len(keys)}
    # Of what the ORM would do for this statement nothing is needed.
    rows = session.connection(bind_arguments=plan.bind).execute(plan.complete, bound).all()
    number = rows[0][0]
    return keys if number == len(keys) else [tuple(row[1:]) for row in rows if number]


def settle_and_commit(session: Session, plan: Plan, ended: Sequence[Ended], *, wait: bool = True) -> list[Ended]:
    """Settle runs in a transaction of their own and return those whose lease had been lost.

    :param wait: whether to wait for rows that somebody has locked for more than a moment.
    """
    if not wait:
        session.execute(sa.text("SET LOCAL lock_timeout = '500ms'"), bind_arguments=plan.bind)
    lost = settle_surely(session, plan, ended)
    commit(session, ended)
    return lost


def settle_surely(session: Session, plan: Plan, ended: Sequence[Ended]) -> list[Ended]:
    """The same as :func:`settle`, and look again at runs of which an earlier commit left the end in doubt."""
    lost = settle(session, plan, ended)
    return _look_again(session, plan, lost) if any(one.uncertain for one in lost) else lost


@contextlib.contextmanager
def left_as_loaded(session: Session) -> Iterator[None]:
    """Have a commit leave instances as they are: ``expire_on_commit`` would have each of them read again."""
    expires, session.expire_on_commit = session.expire_on_commit, False
    try:
        yield
    finally:
        session.expire_on_commit = expires


def commit(session: Session, ended: Sequence[Ended]) -> None:
    """Commit what ends runs; should its answer not arrive, their end is in doubt."""
    # Not before: what failed on the way to the commit was surely not settled, and by now may be by somebody else.
    for one in ended:
        one.uncertain = True
    session.commit()


def _look_again(session: Session, plan: Plan, lost: Sequence[Ended]) -> list[Ended]:
    """Return those of ``lost`` that are, when they may have been settled by a commit whose answer got lost."""
    spec = plan.spec
    keys = [one.run.key for one in lost]
    statement = sa.select(*spec.keys, spec.columns["status"]).where(spec.key_in(spec.keys, keys))
    found = session.execute(statement, bind_arguments=plan.bind)
    states = {tuple(row[:-1]): row[-1] for row in found}
    completed = spec.status_value("completed")
    if_gone = completed if spec.config.on_complete == "delete" else None
    lost_indeed = []
    for one in lost:
        state = states.get(one.run.key, if_gone)
        if one.uncertain and state == completed:
            one.outcome = COMPLETED
        elif not one.uncertain or state != spec.status_value(one.outcome.state):
            lost_indeed.append(one)
    return lost_indeed


def settle_each(
    session: Session, plan: Plan, ended: Sequence[Ended], *, wait: bool = True
) -> tuple[list[Ended], list[Ended], list[Ended]]:
    """Settle runs one by one, so that one that cannot be settled does not hold up the others.

    :return: the runs whose lease had been lost, those that could not be settled, and those that are to be settled later
        as they are, since somebody holds their rows.
    """
    lost: list[Ended] = []
    stuck: list[Ended] = []
    later: list[Ended] = []
    for one in ended:
        try:
            lost += settle_and_commit(session, plan, [one], wait=wait)
        except DBAPIError as error:
            session.rollback()
            if is_lock_or_timeout(error):
                later.append(one)
                continue
            if may_settle_later(error):
                raise
            run, queue = one.run, plan.spec.name
            named = {"queue": queue, "worker": plan.worker(), "job_key": key_value(run.key)}
            extra = fields("settling_refused", **named, attempt=run.attempt, max_attempts=run.max_attempts)
            text = "job %s of queue %s cannot be settled as %s: %s"
            logger.warning(text, key_text(run.key), queue, one.outcome.ending, error, extra=extra)
            found_lost = _settle_otherwise(session, plan, one, error) if wait else None
            if found_lost is None:
                stuck.append(one)
            else:
                lost += found_lost
    return lost, stuck, later


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
            if may_settle_later(again):
                raise
    return None


def complete_and_commit(session: Session, plan: Plan, ended: Sequence[Ended]) -> list[Ended]:
    """Commit a handler's writes together with the completion of its jobs, or neither.

    :return: the runs whose lease had been lost; if there is one, everything was rolled back.
    :raises HandlerMisuseError: when a handler has settled its job itself.
    :raises HeldUp: when the handler's writes could be kept, and the end of the run not be written.
    """
    # The fence needs the row: of a job that its handler deletes, it is there until the flush.
    deleted = [one for one in ended if one.job in session.deleted]
    with session.no_autoflush, _no_fault_of_the_handler():
        lost = settle(session, plan, deleted)
    if not lost:
        misuse = check_rows(session, plan, [one.job for one in ended], [one.run for one in ended])
        if misuse is not None:
            raise misuse
        with _no_fault_of_the_handler():
            lost = settle(session, plan, [one for one in ended if not is_deleted(one.job)])
    if not lost:
        commit(session, ended)
        return lost
    refuse_changed_rows(session, plan, lost)
    return lost


@contextlib.contextmanager
def _no_fault_of_the_handler() -> Iterator[None]:
    """Tell an end that cannot be written now, such as for a lock, from what the handler's own statements came to."""
    try:
        yield
    except DBAPIError as error:
        if may_settle_later(error) and not is_transient(error):
            msg = f"the end of the run could not be written: {error.orig}"
            raise HeldUp(msg) from error
        raise
