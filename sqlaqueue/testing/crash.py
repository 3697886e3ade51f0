"""Let a worker die while it runs a job: :func:`crash`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.consumer.in_flight import runs_of
from sqlaqueue.consumer.quarantine import JournalEntry, write_entry
from sqlaqueue.exc import NotClaimableError
from sqlaqueue.mapping.mixin import spec_of
from sqlaqueue.queue.run import Key, key_text
from sqlaqueue.queue.spec import QueueSpec, clock
from sqlaqueue.statements.claim import claim_statement, worker_name
from sqlaqueue.statements.selection import select_jobs
from sqlaqueue.testing._types import AnySession
from sqlaqueue.testing.in_transaction.claimable import flushed_key, not_claimable
from sqlaqueue.testing.in_transaction.earlier_jobs import remember_earlier_jobs
from sqlaqueue.testing.in_transaction.instances import show_changes
from sqlaqueue.testing.in_transaction.joined_sessions import joined_session, resolve_session
from sqlaqueue.testing.in_transaction.settings import read_settings, restore_settings
from sqlaqueue.testing.in_transaction.transaction_guard import TransactionGuard
from sqlaqueue.testing.in_transaction.worker import rescue_expired
from sqlaqueue.write_routing import execute


def crash(session: AnySession, job: Any) -> None:
    """Leave a job in the state in which a dead worker leaves it.

    The worker had claimed only this job, and died before its handler wrote anything.

    Under a lease, the job stays claimed by the dead worker, and the lease has expired: the next worker rescues it. In
    a held transaction, the claim is rolled back and the crash journal names the job: it runs alone the next time.
    Either way the attempt counts, and :func:`run_job` or :func:`drain` shows what follows.

    :param session: the test's session. Its pending changes are flushed first; its instances then show the changes.
    :param job: an instance in this session.
    :raises NotClaimableError: if no worker would claim the job now, such as one that is not due.
    """
    execute(resolve_session(session, "crash", is_async=False), crash_in, (job, "crash"))


def crash_in(session: Session, job: Any, function: str, *, is_async: bool = False) -> None:
    """Do so; for a ``session`` of async code the instances are read again at once."""
    key, model = flushed_key(session, job, function), type(job)
    spec = spec_of(model)
    remember_earlier_jobs(session, spec, key)
    settings = read_settings(session, spec)
    try:
        with TransactionGuard() as guard, joined_session(session, guard) as worker:
            _crash(worker, spec, key, lambda: not_claimable(session, model, key, function))
    finally:
        restore_settings(session, spec, settings)
        show_changes(session, is_async=is_async)


def _crash(session: Session, spec: QueueSpec, key: Key, refusal: Callable[[], NotClaimableError]) -> None:
    if spec.has("lease_expires_at"):
        rescue_expired(session, spec)
    one = select_jobs(sa.select(spec.model).where(spec.key_in(spec.keys, [key])), "crash")
    claimed = session.execute(claim_statement(one, sa.literal(1))).scalars().all()
    if not claimed:
        raise refusal()
    if spec.strategy.holds_transaction:
        _leave_journal_entry(session, spec, claimed[0])
    elif spec.has("lease_expires_at"):
        _expire_lease(session, spec, key)
    session.commit()


def _leave_journal_entry(session: Session, spec: QueueSpec, job: Any) -> None:
    (run,) = runs_of([job])
    session.rollback()
    entry = JournalEntry((key_text(run.key),), solely_responsible=True)
    write_entry(session, spec, entry, worker_name())
    if run.attempt + entry.deaths > run.max_attempts:
        session.rollback()
        msg = (
            f"crash(): {spec.model.__name__} {key_text(run.key)} has no attempt left: a worker that claims it "
            "settles it as failed, and calls no handler that could crash; run_job() shows that"
        )
        raise NotClaimableError(msg)


def _expire_lease(session: Session, spec: QueueSpec, key: Key) -> None:
    expired = clock() - sa.literal(timedelta(seconds=1), sa.Interval())
    ended = (
        sa.update(spec.table).where(spec.key_in(spec.keys, [key])).values({spec.columns["lease_expires_at"]: expired})
    )
    session.execute(ended, bind_arguments={"mapper": spec.mapper})
