"""What the doctor finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from sqlaqueue.admin.doctor.doctor import doctor
from sqlaqueue.admin.doctor.examination import SEVERITIES, Finding
from sqlaqueue.web.attention import remember_findings
from sqlaqueue.web.context import Context
from sqlaqueue.web.errors import BadRequest
from sqlaqueue.web.shared_results import SharedResult, shared_result

SHARED_FOR = 10.0
"""Seconds for which findings are shown, so that many viewers do not each send a hundred statements."""

DEEP_SHARED_FOR = 60.0
"""The same for an examination that has read all jobs."""

_HIDDEN = "(hidden)"


async def health(context: Context) -> Response:
    """Show the findings about the queues that the user sees, and about their server."""
    is_deep = _is_deep(context)
    found = await examined(context, is_deep=is_deep)
    findings = [_shown(context, finding) for finding in found.value]
    return context.render(
        "health.html",
        groups=groups_of(findings),
        counts={severity: sum(each.severity == severity for each in findings) for severity in SEVERITIES},
        examined_at=found.made_at,
        is_deep=is_deep,
        url_of=lambda name: _url_of(context, name),
    )


def groups_of(findings: Sequence[Finding]) -> dict[str | None, list[Finding]]:
    """Return findings by their queue, the worst first: those of the server, by None, and then the worst queue."""
    groups: dict[str | None, list[Finding]] = {}
    for finding in sorted(findings, key=lambda each: SEVERITIES.index(each.severity)):
        groups.setdefault(finding.queue, []).append(finding)
    return {queue: groups[queue] for queue in sorted(groups, key=lambda queue: queue is not None)}


def _url_of(context: Context, name: str | None) -> str | None:
    queue = next((queue for queue in context.queues if queue.name == name), None)
    return None if queue is None else context.url("queue", queue=queue)


async def examined(context: Context, *, is_deep: bool = False) -> SharedResult[Sequence[Finding]]:
    """Return what the doctor finds in the queues that the user sees, or has found some seconds ago."""
    names = tuple(queue.name for queue in context.queues)
    models = [queue.model for queue in context.queues]

    async def examine() -> Sequence[Finding]:
        # Of these queues only: a finding may name jobs, keys and texts of its queue.
        findings = await context.database.read(_examine, models, is_deep) if models else []
        remember_findings(context.state, context.queues, findings)
        return findings

    seconds = DEEP_SHARED_FOR if is_deep else SHARED_FOR
    return await shared_result(context.state, ("health", names, is_deep), seconds, examine)


def _examine(session: Any, models: Sequence[type[Any]], is_deep: bool) -> Sequence[Finding]:  # noqa: FBT001 - operations take positional arguments only
    return doctor(session, *models, deep=is_deep)


def _is_deep(context: Context) -> bool:
    given = context.request.query_params.get("deep", "0")
    if given not in {"0", "1"}:
        raise BadRequest(f"deep={given[:100]}: this is neither 0 nor 1.", "Use deep=1 to read all jobs as well.")
    return given == "1"


def _shown(context: Context, finding: Finding) -> Finding:
    """Return a finding without the error of a schedule, which may repeat a value, if errors are redacted."""
    queue, error = context.settings.queues.get(finding.queue or ""), finding.facts.get("error")
    if not error or queue is None or not context.settings.is_redacted(queue.spec, "last_error"):
        return finding
    return replace(finding, summary=finding.summary.replace(error, _HIDDEN), facts={})
