"""Claiming in a Session, and what goes with it: plain functions, as in :mod:`sqlaqueue.serving.operations`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.serving.bearings import Mark
from sqlaqueue.serving.calls import Look
from sqlaqueue.serving.ending import QUIET, commit, left_as_loaded, settle_surely
from sqlaqueue.serving.outcomes import RELEASED, Ended
from sqlaqueue.serving.plan import EXCEPT, KEYS, LIMIT, TICKETS, Plan
from sqlaqueue.serving.telling import spare_others
from sqlaqueue.spec import Key
from sqlaqueue.statements import settle_statement
from sqlaqueue.strategies import Held
from sqlaqueue.strategies.base import TOKEN

Load = Callable[[Iterable[Any], UUID], list[Any]]
"""Makes instances of the rows that a claim, with some token, has returned."""


def _load_held(rows: Iterable[Any], _: UUID) -> list[Any]:
    return list(rows)


def claim(
    session: Session, plan: Plan, n: int, tickets: Sequence[str] = (), load: Load = _load_held
) -> tuple[list[Any], bool]:
    """Claim up to ``n`` jobs, from the head of the queue or from where the last claim has ended.

    :param tickets: the calls that this answers, of which the others hear when it commits.
    :return: the jobs, and whether there may be more.
    """
    mark = plan.bearings.begin()
    jobs = _claim_from(session, plan, mark, n, tickets, load)
    if mark is not None and not jobs:
        mark = None
        jobs = _claim_from(session, plan, mark, n, tickets, load)
    return jobs, len(jobs) >= n or mark is not None


def _claim_from(  # noqa: PLR0917 - as all operations, from left to right
    session: Session, plan: Plan, mark: Mark | None, n: int, tickets: Sequence[str], load: Load
) -> list[Any]:
    began, token = time.monotonic(), uuid4()
    parameters: dict[str, Any] = {LIMIT: n, TOKEN: token, **(mark or {})}
    if tickets:
        parameters[TICKETS] = " ".join(tickets)
    if plan.claim_suspect is None:
        parameters[EXCEPT] = plan.spec.bind_keys(plan.suspects.remembered())
    if mark is None:
        statement = plan.claim_aloud if tickets else plan.claim
    else:
        statement = plan.claim_from_aloud if tickets else plan.claim_from
    claimed = session.execute(statement, parameters, bind_arguments=plan.bind).scalars()
    took = time.monotonic() - began
    jobs = load(claimed, token)
    ended_at = plan.mark_of(jobs) if len(jobs) >= n else None
    plan.bearings.claimed(mark, ended_at, len(jobs), took)
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
    error: Exception | None = None
    """Why no instances could be made of what was claimed, so that it was given back."""


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
        try:
            jobs, more = claim(session, plan, n, look.tickets, partial(_commit_and_load, session, plan, ended))
        except _NotLoaded as failed:
            return Claimed([], lost, more=True, error=failed.cause)
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


def _commit_and_load(
    session: Session, plan: Plan, ended: Sequence[Ended], rows: Iterable[Any], token: UUID
) -> list[Any]:
    """Commit a claim whose rows have arrived, and make instances of them.

    In this order, since to make them takes as long as the claim itself: meanwhile the next one would find the rows
    locked and have to pass over each, and this one's connection would do nothing.
    """
    if not plan.spec.has("lease_token"):
        # What could not be loaded would not be found again.
        return list(rows)
    commit(session, ended)
    try:
        jobs = list(rows)
        if session.in_transaction():
            # What was loaded eagerly; a handler that begins in a transaction would be taken for one that uses it.
            with left_as_loaded(session):
                session.commit()
    except Exception as error:
        _give_back(session, plan, token)
        raise _NotLoaded(error) from error
    return jobs


class _NotLoaded(Exception):
    """No instances could be made of what was claimed."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _give_back(session: Session, plan: Plan, token: UUID) -> None:
    """Give back all that a claim has taken, of which no instances are at hand."""
    spec = plan.spec
    session.rollback()
    taken = sa.select(*spec.keys).where(spec.in_state("processing"), spec.columns["lease_token"] == token)
    keys = [tuple(row) for row in session.execute(taken, bind_arguments=plan.bind)]
    if keys:
        given_back = settle_statement(spec, Held([(token, keys)]), RELEASED.settlement())
        session.execute(given_back, execution_options=QUIET, bind_arguments=plan.bind)
    session.commit()


def _claim_suspect(session: Session, plan: Plan) -> list[Any]:
    if plan.claim_suspect is None or not plan.look_for_suspects or plan.suspects.one_runs:
        return []
    jobs = list(session.execute(plan.claim_suspect, bind_arguments=plan.bind).scalars())
    plan.look_for_suspects = bool(jobs)
    return jobs
