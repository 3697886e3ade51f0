"""Running jobs whose worker is gone, and that no Consumer rescues."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sqlalchemy as sa

from sqlaqueue.admin.diagnosis.checks.shared import alive_text, at_most, counted, live_consumers, number_text
from sqlaqueue.admin.diagnosis.examination import Examination, target_of
from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.postgresql.catalog_text import sql_text
from sqlaqueue.queue.spec import QueueSpec, clock, within_calendar
from sqlaqueue.strategies.update_status import waits_for_twin
from sqlaqueue.texts import duration_text


def check_leases(examination: Examination) -> Iterator[Finding]:
    """Find expired leases, and running jobs that have none."""
    for spec in examination.specs:
        if spec.strategy.holds_transaction or not spec.has("lease_expires_at") or not spec.has("status"):
            continue
        yield from _expired(examination, spec)
        yield from _without_lease(examination, spec)


def _expired(examination: Examination, spec: QueueSpec) -> Iterator[Finding]:
    expires = spec.columns["lease_expires_at"]
    old = sa.select(expires).where(
        spec.in_state("processing"),
        expires <= clock() - examination.thresholds.lease_expired_for,
        ~waits_for_twin(spec),
    )
    first = at_most(old.order_by(expires)).subquery("sqlaqueue_expired")
    age = sa.extract(
        "epoch", clock() - within_calendar(sa.cast(sa.func.min(first.c[expires.key]), sa.DateTime(timezone=True)))
    )
    row: Any = examination.connection.execute(sa.select(sa.func.count(), age).select_from(first)).one()
    number, since = row
    if not number:
        return
    alive = len(live_consumers(examination, spec))
    target = target_of(spec)
    whose = f"though {alive_text(alive)}" if alive else "and no Consumer is alive"
    then = "The log of the Consumers shows why they do not." if alive else "A Consumer does so when it runs."
    yield Finding(
        severity="critical",
        code="expired_leases",
        queue=spec.name,
        summary=(
            f"The leases of {number_text(number, 'job')} have expired, the first {duration_text(float(since))} ago, "
            f"{whose}."
        ),
        consequence=f"Their workers died, and the jobs do not run until they are rescued. {then}",
        fixes=(f"sqlaqueue rescue {target}", *(() if alive else (f"sqlaqueue worker {target}=MODULE:HANDLER",))),
        facts={"jobs": number, "seconds": float(since), "consumers": alive},
    )


def _without_lease(examination: Examination, spec: QueueSpec) -> Iterator[Finding]:
    stuck = sa.and_(spec.in_state("processing"), spec.columns["lease_expires_at"].is_(None))
    number = counted(examination.connection, sa.select(*spec.keys).where(stuck))
    if number:
        update = sa.update(spec.table).where(stuck).values({spec.columns["status"]: spec.literal("pending")})
        yield Finding(
            severity="critical",
            code="runs_without_lease",
            queue=spec.name,
            summary=f"{number_text(number, 'job')} in the state processing, without a lease: plain SQL has set it.",
            consequence="No worker runs them, and no Consumer rescues them.",
            fixes=(sql_text(examination.connection, update),),
            facts={"jobs": number},
        )
