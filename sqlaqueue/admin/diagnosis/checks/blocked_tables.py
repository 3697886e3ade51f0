"""Tables of a queue that a session has locked while others wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from sqlaqueue.admin.diagnosis.checks.horizon import describe_session, last_statement
from sqlaqueue.admin.diagnosis.checks.objects import tables_of
from sqlaqueue.admin.diagnosis.examination import Examination
from sqlaqueue.admin.diagnosis.finding import Finding
from sqlaqueue.postgresql.server import blockers
from sqlaqueue.texts import duration_text


def check_blocked_tables(examination: Examination) -> Iterator[Finding]:
    """Find the sessions that others wait for, not those that wait.

    Threshold: ``blocked_for``.
    """
    limit = examination.thresholds.blocked_for.total_seconds()
    for spec in examination.specs:
        for each in blockers(examination.connection, tables_of(spec)):
            if each.seconds < limit:
                continue
            session = each.session
            waiting = "1 session waits" if each.waiting == 1 else f"{each.waiting} sessions wait"
            doing = "idle in a transaction" if (session.state or "").startswith("idle") else "executing a statement"
            yield Finding(
                severity="critical",
                code="blocked_table",
                queue=spec.name,
                summary=(
                    f"{describe_session(session)} has locked {', '.join(each.tables)}, and {waiting} for it, the first "
                    f"for {duration_text(each.seconds)}. It is {doing}{last_statement(session)}."
                ),
                consequence="Until it ends, jobs are not enqueued, claimed or settled.",
                fixes=(f"-- Rolls its transaction back.\nSELECT pg_terminate_backend({session.pid});",),
                facts={**asdict(session), "waiting": each.waiting, "tables": [*each.tables]},
            )
