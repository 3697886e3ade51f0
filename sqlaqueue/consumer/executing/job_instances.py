"""Operations on the instances of claimed jobs: attach them to a session, load them again, reload them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session
from sqlalchemy.orm.attributes import set_committed_value

from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.mapping.runs import run_of, set_run
from sqlaqueue.postgresql.claim_scan import planned_anew
from sqlaqueue.queue.run import Run, keys_by_token
from sqlaqueue.statements.selection import without_criteria
from sqlaqueue.strategies import ClaimedJobs


def attach(session: Session, jobs: Sequence[Any]) -> list[Any]:
    """Return claimed, detached jobs as members of ``session``.

    A job that came with related objects is copied: two jobs may share one, which cannot be in two sessions.
    """
    attached = []
    for job in jobs:
        state = sa.inspect(job)
        if len(jobs) > 1 or state.dict.keys().isdisjoint(state.mapper.relationships.keys()):
            session.add(job)
            attached.append(job)
        else:
            copy = session.merge(job, load=False)
            set_run(copy, run_of(job))
            attached.append(copy)
    return attached


def expunge(session: Session) -> None:
    """Detach all instances from the session."""
    session.expunge_all()


def load_again(session: Session, context: ConsumerContext, runs: Sequence[Run]) -> list[Any]:
    """Return new, detached instances of claimed jobs; without those whose lease was lost.

    It is for jobs whose instances are in a session that another thread uses.
    """
    spec = context.spec
    mine = spec.strategy.fence(spec, ClaimedJobs(list(keys_by_token(runs).items())))
    again = sa.select(spec.model).where(mine, planned_anew()).options(*context.settings.selection.options)
    found = {sa.inspect(job).identity: job for job in session.execute(without_criteria(again)).unique().scalars()}
    for run in runs:
        if run.key in found:
            set_run(found[run.key], run)
    session.expunge_all()
    session.rollback()
    return [found[run.key] for run in runs if run.key in found]


def reload(session: Session, context: ConsumerContext, jobs: Sequence[Any]) -> None:
    """Reset jobs to the state in which their claim returned them, after a handler's writes were undone.

    A rollback expires what was changed; in async code the next access to it would raise.
    """
    spec = context.spec
    context.isolation.begin(session)
    if not spec.strategy.keeps_rows:
        for job in jobs:
            for attribute, value in list(sa.inspect(job).committed_state.items()):
                set_committed_value(job, attribute, value)
        return
    keys = [run.key for job in jobs if (run := run_of(job)) is not None]
    again = sa.select(spec.model).where(spec.key_in(spec.keys, keys)).options(*context.settings.selection.options)
    session.execute(without_criteria(again).execution_options(populate_existing=True)).unique().scalars().all()
