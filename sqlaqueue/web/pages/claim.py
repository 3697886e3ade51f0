"""What a claim of a queue costs, and what makes it cost more: its plan, dead rows, and who keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from starlette.responses import Response

from sqlaqueue.admin.doctor.examination import Finding
from sqlaqueue.queue.spec import QueueSpec
from sqlaqueue.web.context import Context
from sqlaqueue.web.data.claim import ClaimPlan, measure_claim, plan_claim, read_index_findings
from sqlaqueue.web.data.parts import Part, attempt_part, problem_text
from sqlaqueue.web.data.server import Horizon, QueueTable, read_horizon, read_tables
from sqlaqueue.web.data.unavailable import Unavailable
from sqlaqueue.web.errors import PageError
from sqlaqueue.web.settings import Queue
from sqlaqueue.web.shared_results import shared_result

SHARED_FOR = 5.0
"""Seconds for which a measured claim is shown, so that many viewers do not claim many times."""

_TIMEOUT = 2.0


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """The plan of a claim; if it could not be executed, why, and its plan nevertheless."""

    plan: Part[ClaimPlan | Unavailable]
    findings: Part[Sequence[Finding]]
    """What is wrong with the indexes of claims."""
    problem: str = ""


async def claim(context: Context) -> Response:
    """Show the plan of a claim with its buffers, and the state of the tables that it reads."""
    shown = context.queue

    async def measure() -> _Measured:
        return await _measure(context, shown)

    measured = await shared_result(context.state, ("claim", shown.name), SHARED_FOR, measure)
    tables, horizon = await context.database.read(_read_server, shown.spec)
    return context.render(
        "claim.html",
        queue=shown,
        measured=measured.value,
        measured_at=measured.made_at,
        tables=tables,
        horizon=horizon,
    )


async def _measure(context: Context, shown: Queue) -> _Measured:
    database = context.database
    findings: Part[Sequence[Finding]] = await database.read(_read_findings, shown.spec)
    try:
        # It locks rows for a moment, which a read-only transaction may not do.
        plan = await database.read(measure_claim, shown.spec, statement_timeout=_TIMEOUT, read_only=False)
        return _Measured(plan=Part(plan), findings=findings)
    except PageError:
        raise
    except DBAPIError as error:
        problem = problem_text(error)
    planned = await database.read(attempt_part, plan_claim, shown.spec)
    return _Measured(plan=planned, findings=findings, problem=problem)


def _read_findings(session: Session, spec: QueueSpec) -> Part[Sequence[Finding]]:
    return attempt_part(session, read_index_findings, spec)


def _read_server(session: Session, spec: QueueSpec) -> tuple[Part[Sequence[QueueTable]], Part[Horizon]]:
    return attempt_part(session, read_tables, spec), attempt_part(session, read_horizon, spec)
