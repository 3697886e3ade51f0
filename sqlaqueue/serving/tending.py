"""What a Consumer does for its queue beside running jobs: operations on a Session, each with its commit."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from sqlaqueue.serving import ledger
from sqlaqueue.serving.operations import QUIET
from sqlaqueue.serving.plan import Plan
from sqlaqueue.spec import Key, Run, clock
from sqlaqueue.statements import reconcile, rescue
from sqlaqueue.strategies import Held
from sqlaqueue.strategies.side_tables import CONTROL, LEDGER, key_json

_FORGET = timedelta(days=1)
_LONGEST_TIMEOUT = 2**31 - 1


def _be_brief(session: Session, plan: Plan) -> None:
    """Have the server end this transaction if it does not come to its commit within a lease.

    A process that is frozen just before it would keep the rows locked, and nobody could rescue them.
    """
    patience = min(int(plan.lease.total_seconds() * 1000), _LONGEST_TIMEOUT)
    setting = sa.func.set_config("idle_in_transaction_session_timeout", str(patience), sa.true())
    session.execute(sa.select(setting), bind_arguments=plan.bind)


def extend_leases(session: Session, plan: Plan, runs: Sequence[Run]) -> None:
    """Move the leases of runs that are alive; rows that are locked are passed over."""
    claims: dict[Any, list[Key]] = {}
    for run in runs:
        claims.setdefault(run.token, []).append(run.key)
    held = Held(list(claims.items()))
    verb = plan.spec.strategy.extend(plan.spec, held, sa.literal(plan.lease, sa.Interval()))
    _be_brief(session, plan)
    session.execute(verb, execution_options=QUIET, bind_arguments=plan.bind)
    session.commit()


def rescue_expired(session: Session, plan: Plan) -> list[Key]:
    """Take back jobs whose lease has expired, of whatever worker."""
    _be_brief(session, plan)
    keys = session.execute(rescue(plan.spec.model), execution_options=QUIET, bind_arguments=plan.bind).scalars().all()
    session.commit()
    return list(keys) if len(plan.spec.keys) > 1 else [(key,) for key in keys]


def reconcile_messages(session: Session, plan: Plan) -> list[Key]:
    """Mend what bypassed the triggers, and forget what the side tables no longer need."""
    keys = (
        session.execute(reconcile(plan.spec.model), execution_options=QUIET, bind_arguments=plan.bind).scalars().all()
    )
    if LEDGER in plan.spec.side_tables:
        ledger.forget(session, plan.spec)
    control = plan.spec.side_tables.get(CONTROL)
    if control is not None:
        old = control.c.created_at < clock() - _FORGET
        session.execute(sa.delete(control).where(control.c.queue == plan.spec.name, old), bind_arguments=plan.bind)
    session.commit()
    return list(keys) if len(plan.spec.keys) > 1 else [(key,) for key in keys]


def requests_to_stop(session: Session, plan: Plan, runs: Sequence[Run]) -> list[tuple[Key, float]]:
    """Return which of ``runs`` somebody asked to stop, with the age of the request in seconds, and take it down."""
    control, spec = plan.spec.side_tables.get(CONTROL), plan.spec
    if control is None or not runs:
        return []
    mine = sa.select(*spec.keys).where(spec.matches(spec.keys, [run.key for run in runs])).subquery("mine")
    key = key_json([mine.c[column.key] for column in spec.keys])
    # A request that its author has not committed yet must not hold up the leases that the same thread extends.
    asked = (
        sa.select(control.c.queue.label("asked_queue"), control.c.key.label("asked_key"), *mine.c)
        .where(control.c.queue == spec.name, control.c.key == key)
        .with_for_update(of=control, skip_locked=True)
        .cte("asked")
    )
    age = sa.extract("epoch", sa.func.clock_timestamp() - control.c.created_at)
    taken = (
        sa.delete(control)
        .where(control.c.queue == asked.c.asked_queue, control.c.key == asked.c.asked_key)
        .returning(*(asked.c[column.key] for column in spec.keys), age)
    )
    found = [(tuple(row[:-1]), float(row[-1])) for row in session.execute(taken, bind_arguments=plan.bind)]
    session.commit()
    return found
