"""The maintenance task that extends the leases of live runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from sqlaqueue.consumer.context import ConsumerContext
from sqlaqueue.consumer.core.effects import ExecuteInOwnSession, Routine
from sqlaqueue.consumer.maintenance.state import Maintenance
from sqlaqueue.consumer.settling.settle import BESIDE_ORM
from sqlaqueue.queue.run import Key, Run, keys_by_token, keys_from
from sqlaqueue.statements.selection import returning_keys
from sqlaqueue.strategies import ClaimedJobs

_LONGEST_TIMEOUT = 2**31 - 1


def extend(maintenance: Maintenance, now: float) -> Routine:
    """Extend the leases of the runs that are here."""
    context, timers = maintenance.context, maintenance.timers
    if not context.settings.has_leases:
        return
    since = context.busy_since
    if since is None:
        # A timer that stays due would wake an idle loop without end.
        timers.cancel("leases")
        timers.cancel("locked")
        maintenance.locked = ()
        return
    timers.start("leases", since + maintenance.extension)
    if timers.is_due("leases", now):
        timers.set("leases", now + min(maintenance.extension, 1.0))
        runs = context.live_runs()
        if runs:
            yield from _extend_runs(maintenance, runs)
        timers.set("leases", now + maintenance.extension)
    elif maintenance.locked and timers.is_due("locked", now):
        # They have to come before the second look of a rescue, so they cannot wait until all are extended again.
        mine = {id(run) for run in maintenance.locked}
        yield from _extend_runs(maintenance, [run for run in context.live_runs() if id(run) in mine])


def _extend_runs(maintenance: Maintenance, runs: Sequence[Run]) -> Routine:
    maintenance.timers.set("locked", time.monotonic() + maintenance.second_look / 4)
    maintenance.locked = runs
    if runs:
        extended = set((yield ExecuteInOwnSession(extend_leases, (maintenance.context, runs))))
        maintenance.locked = [run for run in runs if run.key not in extended]
    if not maintenance.locked:
        maintenance.timers.cancel("locked")


def extend_leases(session: Session, context: ConsumerContext, runs: Sequence[Run]) -> list[Key]:
    """Move the end of the leases of live runs, and return their keys; locked rows are passed over."""
    settings = context.settings
    claims = list(keys_by_token(runs).items())
    if settings.distribution is None:
        return _extend(session, context, claims)
    extended, failed = list[Key](), None
    for claim in claims:
        # All jobs of one claim are on one shard, and a statement locks rows on one shard only. If the server of one
        # does not answer, the leases on the others are extended all the same.
        try:
            extended += _extend(session, context, [claim])
        except DBAPIError as error:
            session.rollback()
            failed = error
    if failed is not None:
        raise failed
    return extended


def _extend(session: Session, context: ConsumerContext, claims: Sequence[tuple[Any, Sequence[Key]]]) -> list[Key]:
    """Extend the leases of some claims in a transaction."""
    spec, settings = context.spec, context.settings
    verb = spec.strategy.extend(spec, ClaimedJobs(claims), sa.literal(settings.lease, sa.Interval()))
    limit_transaction(session, context)
    statement = returning_keys(spec, verb)
    found = session.execute(statement, execution_options=BESIDE_ORM, bind_arguments=settings.bind_arguments).scalars()
    extended = keys_from(found, len(spec.keys))
    session.commit()
    return extended


def limit_transaction(session: Session, context: ConsumerContext, *others: sa.ColumnElement[Any]) -> None:
    """Have the server end this transaction if it does not come to its commit within a lease.

    A process that is frozen just before the commit would keep the rows locked, and no consumer could rescue them.

    :param others: expressions that are executed by the same statement.
    """
    limit = min(int(context.settings.lease.total_seconds() * 1000), _LONGEST_TIMEOUT)
    setting = sa.func.set_config("idle_in_transaction_session_timeout", str(limit), sa.true())
    session.execute(sa.select(setting, *others), bind_arguments=context.settings.bind_arguments)
